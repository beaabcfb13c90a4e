//! Log-probabilities as the loss takes them, and whether the loss of a first update agrees with them.

use candle_core::Tensor;
use ndarray::{Array1, Array2, Axis};

use super::loss::{array2, array3, widened};
use super::qwen2::Qwen2;
use super::rollout::one_temperature;
use super::sequences::PromptedSequences;
use super::{TrainBatch, TrainError};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::StructuredSpec;
use assay_core::spec::{AdvantageLevel, LossSpec, Objective, OldLogp};
use assay_native::{Native, gemm};

/// The unit roundoff of f32, 2⁻²⁴.
const U: f64 = (f32::EPSILON / 2.0) as f64;

/// The largest allowed mean distance, for rollouts in f32, of the sampler's log-probabilities from those of the loss, nats. Keys and
/// values that are kept and a whole forward round differently, by 1e-6 in the runs of docs/train.md; another temperature,
/// softcap or support shows at 1e-2 and above. It separates these two cases and is not a bound of rounding.
const SAMPLER_GAP: f64 = 1e-3;

/// Computes the log-probabilities of the completions' tokens under `policy`, `[B,T]`, nats, by the loss's own transform of logits, support
/// and temperature, from f32 logits; 0 beyond a completion. Memory: the logits of one sequence.
pub(super) fn logp_of(
    spec: &LossSpec,
    policy: &Qwen2,
    sequences: &PromptedSequences,
) -> Result<Array2<f64>, TrainError> {
    // A spec with the transform of logits, support and temperature of the loss, and no objective.
    let distribution = LossSpec {
        objective: Objective::None,
        old_logp: OldLogp::Current,
        advantages: AdvantageLevel::Sequence,
        logits: spec.logits.clone(),
        support: spec.support.clone(),
        temperature: spec.temperature,
        temperature_divides: spec.temperature_divides,
        ..LossSpec::default()
    };
    let hidden = widened(array3("hidden", &sequences.hidden(policy)?.detach())?);
    let lm_head = widened(array2("lm_head", &policy.lm_head().detach())?);
    let mut batch = sequences.batch(Array1::zeros(sequences.completions.len()), None);
    batch.mask = sequences.places();
    let (_, width, _) = hidden.dim();
    let mut logits = Array2::zeros((width, lm_head.nrows()));
    let mut logp = Array2::zeros(batch.mask.dim());
    // The logits of one sequence at a time: all of them would be the largest array of the run.
    for (row, hidden) in hidden.axis_iter(Axis(0)).enumerate() {
        gemm(logits.view_mut(), false, hidden, lm_head.t());
        let tokens = batch.rows(row..row + 1, width);
        let scored = Native::default().forward(&distribution, logits.view().insert_axis(Axis(0)), tokens.tokens())?;
        logp.row_mut(row).assign(&scored.logp.row(0).mapv(f64::from));
    }
    Ok(logp)
}

/// A first update's loss that is not of the policy that was sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "step {step}, part {part}: the loss has log-probability {given} at [{b},{t}], expected {expected} within {limit:e}: the \
     ratio of a rollout's first update must be 1"
)]
pub struct OffPolicy {
    /// The step, from 1 on.
    pub step: usize,
    /// The part of its batch, from 0 on.
    pub part: usize,
    /// The sequence within the part of the batch.
    pub b: usize,
    /// The token within the sequence.
    pub t: usize,
    /// The log-probability that the loss computes, nats.
    pub given: f64,
    /// The log-probability before the update, nats.
    pub expected: f64,
    /// The largest distance that rounding explains, nats.
    pub limit: f64,
}

/// Finds the first token whose log-probability, in a first update's loss, is not the old one of `batch`.
///
/// Two ways to `logp` from the same hidden states differ by no more than
///
/// ```text
/// u · (4·(H + 8) · max‖h‖ · max‖w‖ · |scale| / T + V + 16·(1 + |logp|)),    u = 2⁻²⁴
/// ```
///
/// the products over `H` of either, in the logit and in the logarithm of the sum; a sum of `V` terms in f32; and few
/// roundings of what results.
pub(super) fn off_policy(
    (step, part): (usize, usize),
    spec: &LossSpec,
    (hidden, lm_head): (&Tensor, &Tensor),
    batch: &TrainBatch,
    logp: &Array2<f64>,
) -> Result<Option<OffPolicy>, TrainError> {
    let Some(old) = &batch.old_logp else { return Ok(None) };
    let norm = |x: &Tensor| -> Result<f64, TrainError> {
        let squares = x.detach().sqr()?.sum(candle_core::D::Minus1)?.flatten_all()?.max(0)?;
        Ok(f64::from(squares.to_scalar::<f32>()?).sqrt())
    };
    let (vocab, width) = lm_head.dims2()?;
    let size = norm(hidden)? * norm(lm_head)? * spec.logits.scale.abs() / one_temperature(spec);
    // The bound of both products, from the norms of the largest hidden state and the largest column of the head.
    let products = 4.0 * (width as f64 + 8.0) * size;
    // A token that rejection masks has no log-probability to compare.
    let mask = KernelInputs::new(StructuredSpec::new(spec), &batch.tokens()).mask;
    for ((b, t), _) in mask.indexed_iter().filter(|(_, counts)| **counts) {
        let (given, expected) = (logp[[b, t]], old[[b, t]]);
        let limit = U * (products + vocab as f64 + 16.0 * (1.0 + expected.abs()));
        if (given - expected).abs().is_nan() || (given - expected).abs() > limit {
            return Ok(Some(OffPolicy { step, part, b, t, given, expected, limit }));
        }
    }
    Ok(None)
}

/// Computes the distance of the sampler's log-probabilities from those of the loss: the mean of the distances, over all tokens, nats.
///
/// # Errors
/// [`TrainError::Sampler`] where that is no rounding, though both are of the same weights.
pub(super) fn sampler_gap(
    step: usize,
    mask: &Array2<bool>,
    [old, rollout]: [&Array2<f64>; 2],
    same_weights: bool,
) -> Result<f64, TrainError> {
    let gaps =
        || mask.iter().zip(old.iter().zip(rollout)).filter(|(counts, _)| **counts).map(|(_, (a, b))| (a - b).abs());
    let gap = gaps().sum::<f64>() / gaps().count().max(1) as f64;
    // The sampler and the policy compute the same number in different orders. A gap beyond rounding under the same
    // weights means that one of them is wrong, and so does a NaN, which exceeds nothing.
    if same_weights && (gap.is_nan() || gap > SAMPLER_GAP) {
        return Err(TrainError::Sampler { step, gap, limit: SAMPLER_GAP });
    }
    Ok(gap)
}
