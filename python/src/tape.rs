//! A loss between the logits and their gradient, written down as a list of operations on `[B,T]` arrays, for a framework to
//! compute: what [`assay_algebra`] has, which the kernels compute too.
//!
//! ```text
//! softmax   statistics of a row ─▶ logp, entropy, and what its gradient is made of
//! loss      logp, arrays of the batch, weights ─▶ the loss of each token, what is logged of it, ∂loss/∂logp
//! ```

use pyo3::prelude::*;
use serde::Serialize;

use crate::error;
use crate::spec::Spec;
use assay::problem::ProblemError;
use assay::spec::{Averaging, CrossEntropy, LossSpec, Objective, Reduction, Rows};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::family::{KernelScope, expect_one_id, expect_plain_logits};
use assay_algebra::softmax::SoftmaxSums;
use assay_algebra::structure::{Denominator, DenominatorTokens, SpecNumber, Structure, TemperaturePlace, TokenInput};
use assay_algebra::tape::{Tape, token_losses};
use assay_algebra::transform;

/// The divisor of one term of the loss, as described by [`Denominator`].
#[derive(Serialize)]
struct Divisor {
    /// The tokens that are counted: `batch`, `row` or none.
    tokens: Option<&'static str>,
    /// The rows that are counted: `all`, `filled` or none.
    rows: Option<&'static str>,
    /// The factors that are known whatever the batch.
    number: f64,
    epsilon: f64,
}

/// Everything that a framework needs of a spec to compute its loss around kernels.
#[derive(Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is an answer, read by its name")]
struct LossPlan {
    /// `1/T` of the softmax that entropy is of; none where each token has its own, the input `rate`.
    inverse_temperature: Option<f64>,
    /// The reciprocal temperature `1/T` of the softmax of logp.
    logp_inverse_temperature: f64,
    /// The factor that converts a token's `1/T` to its `rate`.
    rate: f64,
    /// Whether logp is of another softmax than entropy.
    two_softmaxes: bool,
    /// Whether tokens of a row depend on each other.
    couples_rows: bool,
    /// Whether the loss has terms of the whole row besides logp and entropy, which only a kernel that is handed whole rows computes.
    row_terms: bool,
    /// The arrays that are read beside ids, mask and advantages, in order.
    inputs: Vec<&'static str>,
    has_kl: bool,
    policy: Divisor,
    /// The divisor of the KL penalty, if the penalty has its own reduction.
    kl: Option<Divisor>,
    /// The divisor of the entropy bonus, if there is one.
    entropy: Option<Divisor>,
    entropy_coef: f64,
    softmax: Tape,
    loss: Tape,
}

/// The kernels that a loss is computed around.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelsOfPlan {
    /// Take logits as they come.
    PlainLogits,
    /// Change logits before their softmax.
    Gpu,
    /// Are handed whole rows too, with kept sets, and compute their terms.
    Native,
}

/// The plan of `spec` for a batch that is padded to `width`, or packed where there is none, as JSON, around kernels that are `native`, or
/// take logits as they come.
///
/// # Errors
/// Where the spec has what is decided over more than a row, a mean over a width that there is not, or changes logits before their
/// softmax and the kernels do not.
#[pyfunction]
#[pyo3(signature = (spec, width, native))]
pub(crate) fn plan(py: Python<'_>, spec: &Spec, width: Option<usize>, native: bool) -> PyResult<String> {
    let kernels = if native { KernelsOfPlan::Native } else { KernelsOfPlan::PlainLogits };
    let plan = LossPlan::new(py, &spec.loss, width, kernels)?;
    Ok(serde_json::to_string(&plan).expect("plain data has a JSON form"))
}

/// Checks that the loss of `spec` is computed around `kernels`, for a batch that is padded to `width`, or packed where there is none.
///
/// # Errors
/// As [`plan`].
pub(crate) fn expect_computed(
    py: Python<'_>,
    spec: &LossSpec,
    width: Option<usize>,
    kernels: KernelsOfPlan,
) -> PyResult<()> {
    if width.is_none() {
        let no_width = |field| error::spec_error(py, ProblemError::NoWidth { field });
        spec.expect_no_width().map_err(no_width)?;
    }
    let plain = || if kernels == KernelsOfPlan::PlainLogits { expect_plain_logits(spec) } else { Ok(()) };
    let mut scoped = spec.clone();
    if kernels != KernelsOfPlan::PlainLogits {
        scoped.support.kept = None;
    }
    // Terms of a whole row are for the kernel of the CPU, which is handed whole rows.
    if let (KernelsOfPlan::Native, Objective::CrossEntropy(terms)) = (kernels, &mut scoped.objective) {
        *terms = CrossEntropy { label_smoothing: 0.0, z_loss: 0.0 };
    }
    expect_one_id(spec).and_then(|()| KernelScope::Row.expect(&scoped)).and_then(|()| plain()).map_err(|beyond| {
        let of_row = beyond.field.starts_with("objective.cross_entropy.");
        let elsewhere = of_row || matches!(beyond.field, "logits" | "support" | "support.kept");
        let supported = if of_row { "0" } else { beyond.supported };
        let elsewhere = if elsewhere { "; `native` takes it" } else { "" };
        error::spec_error(py, format!("`{}`: got {}, expected {supported}{elsewhere}", beyond.field, beyond.given))
    })
}

impl LossPlan {
    /// Makes the plan of `spec` for a batch that is padded to `width`, or packed if that is `None`.
    ///
    /// # Errors
    /// As [`plan`].
    fn new(py: Python<'_>, spec: &LossSpec, width: Option<usize>, kernels: KernelsOfPlan) -> PyResult<Self> {
        expect_computed(py, spec, width, kernels)?;
        let extents = [1, width.unwrap_or(1)];
        let structure = Structure::from_spec(spec);
        let number = |number: SpecNumber| number.value_in(spec, extents);
        // The framework counts tokens and rows in the batch; all other factors of a divisor are folded into one
        // number.
        let divisor = |denominator: Denominator, averaging: Option<Averaging>, known, epsilon| Divisor {
            tokens: denominator.tokens.map(|tokens| match tokens {
                DenominatorTokens::OfBatch => "batch",
                DenominatorTokens::OfRow => "row",
            }),
            rows: averaging.and_then(|averaging| rows(averaging.reduction)),
            number: number(known),
            epsilon: if denominator.epsilon { number(epsilon) } else { 0.0 },
        };
        let kl = structure.kl.and_then(|kl| kl.denominator);
        let own = spec.entropy_averaging.filter(|_| !structure.dentropy);
        // Temperatures that each token brings are an input; a fixed one is a constant of the plan.
        let [inverse_temperature, logp_inverse_temperature] = [SpecNumber::Rate, SpecNumber::LogpRate].map(number);
        let inverse_temperature = (structure.temperature != TemperaturePlace::Given).then_some(inverse_temperature);
        Ok(Self {
            inverse_temperature,
            logp_inverse_temperature,
            rate: transform::rate(spec),
            two_softmaxes: structure.temperature == TemperaturePlace::Logp,
            couples_rows: structure.couples_rows(),
            row_terms: structure.row_terms.any(),
            inputs: structure.inputs().into_iter().map(TokenInput::name).collect(),
            has_kl: structure.kl.is_some(),
            policy: divisor(
                structure.denominator,
                Some(spec.averaging()),
                SpecNumber::Denominator,
                SpecNumber::DenominatorEpsilon,
            ),
            kl: kl.map(|kl| {
                divisor(kl, Some(spec.kl_averaging()), SpecNumber::KlDenominator, SpecNumber::KlDenominatorEpsilon)
            }),
            entropy: structure.entropy_bonus.map(|bonus| {
                divisor(bonus, own, SpecNumber::EntropyDenominator, SpecNumber::EntropyDenominatorEpsilon)
            }),
            entropy_coef: number(SpecNumber::EntropyCoef),
            softmax: softmax(
                structure,
                inverse_temperature,
                logp_inverse_temperature,
                number(SpecNumber::InverseTemperature),
            ),
            loss: token_losses(structure, |tape, which| tape.constant(number(which))),
        })
    }
}

/// Returns the rows that a mean divides by, if they are counted in the batch.
fn rows(reduction: Reduction) -> Option<&'static str> {
    match reduction {
        Reduction::SequenceMean { rows } | Reduction::SequenceSum { rows } | Reduction::FixedLength { rows, .. } => {
            match rows {
                Rows::All => Some("all"),
                Rows::NonEmpty => Some("filled"),
                Rows::Given(_) => None,
            }
        }
        Reduction::TokenMean | Reduction::Normalizer(_) => None,
    }
}

/// Computes the softmax from the statistics of whole rows, over logits divided by their rate. The inverse temperature
/// is multiplied by `of_entropy` for the entropy, or by each token's rate if that is `None`, and by `of_logp` for logp.
fn softmax(structure: Structure, of_entropy: Option<f64>, of_logp: f64, inverse_temperature: f64) -> Tape {
    let on = &mut Tape::default();
    let [max, target_logit] = ["max", "target_logit"].map(|name| on.input(name));
    let constant = |on: &mut Tape, x: f64| (x != 1.0).then(|| on.constant(x));
    let of_entropy = match of_entropy {
        Some(x) => constant(on, x),
        None => Some(on.input(TokenInput::Rate.name())),
    };
    let of_logp = constant(on, of_logp);
    // Record the end of a softmax from its sums; logp and entropy may use different temperatures.
    let end = |on: &mut Tape, [others, weighted]: [&'static str; 2], inverse| {
        let [others, weighted] = [others, weighted].map(|name| on.input(name));
        SoftmaxSums { max, target_logit, others, weighted }.softmax(on, inverse)
    };
    let of_entropy = end(on, ["others", "weighted"], of_entropy);
    // With two temperatures the statistics are computed twice, under separate names.
    let two = structure.temperature == TemperaturePlace::Logp;
    let of_logp = if two { end(on, ["logp_others", "logp_weighted"], of_logp) } else { of_entropy };
    let logp = of_logp.logp(on);
    let logp = if two {
        let inverse_temperature = on.constant(inverse_temperature);
        on.mul(logp, inverse_temperature)
    } else {
        logp
    };
    let entropy = of_entropy.entropy(on);
    on.output("logp", logp);
    on.output("entropy", entropy);
    on.output("sum", of_logp.sum);
    on.output("others", of_logp.others);
    on.output("entropy_sum", of_entropy.sum);
    on.output("mean_gap", of_entropy.mean_gap);
    std::mem::take(on)
}
