//! Diagnoses of values that are right for something else: log-probabilities of the logits of other tokens, and token losses of ratios
//! that are held at a bound.

use super::{Diagnosis, OtherRows, failed};
use crate::U;
use crate::gate::Output;
use crate::judge::Verdict;
use crate::metric::half_ulp;
use assay_core::problem::{Candidate, Dtype, FloatArray, Shape};
use assay_reference::Reference;
use ndarray::Ix2;

/// The error of a log-probability, in units of `u` of what it is the difference of, up to which f32 explains it.
const OF_F32: f64 = 16.0;

/// The error of a token's loss, in half ulps, up to which rounding explains it.
const OF_LOSS: f64 = 64.0;

/// The difference of two bounds that are one, in nats.
const SAME_BOUND: f64 = 1e-3;

/// The bound of a log-ratio, in nats, from which on it is no clip of a loss, whose ratios are nearer to 1.
const NO_CLIP: f64 = 3.0;

impl OtherRows {
    /// Returns the token whose logits the kernel reads for the token `[b,t]`; `None` at the end of a sequence or of the batch.
    fn source(self, (b, t): (usize, usize), shape: Shape) -> Option<(usize, usize)> {
        let Shape { batch, tokens, .. } = shape;
        match self {
            // The row `[t,b]` of `[T,B,V]` is the one of this number in memory.
            Self::Transposed => {
                let row = t * batch + b;
                Some((row / tokens, row % tokens))
            }
            Self::NextToken => (t + 1 < tokens).then_some((b, t + 1)),
            Self::TokenBefore => Some((b, t.checked_sub(1)?)),
            Self::NextSequence => (b + 1 < batch).then_some((b + 1, t)),
            Self::SequenceBefore => Some((b.checked_sub(1)?, t)),
        }
    }
}

/// Diagnoses log-probabilities that are those of the tokens' ids by the logits of other tokens.
pub(super) fn diagnose_rows(reference: &Reference, logp: &FloatArray<Ix2>) -> Option<Diagnosis> {
    let explains = |rows: &OtherRows| {
        // One number may agree by chance: two tokens must be wrong, and right for the logits of the other token.
        let mut explained = 0;
        for at in ndarray::indices((reference.shape().batch, reference.shape().tokens)) {
            let Some(token) = reference.token(at.0, at.1).filter(|token| reference.finite(token)) else { continue };
            // The logits of a masked token are not looked at, and those of one with infinite ones no numbers to compare.
            let Some(source) = rows.source(at, reference.shape()).filter(|source| *source != at) else { continue };
            let Some(other) = reference.token(source.0, source.1).filter(|other| reference.finite(other)) else {
                continue;
            };
            let expected = reference.row(source.0, source.1, other).logp().probabilities[token.id].ln();
            let given = logp.at(at.0, at.1);
            let size = 1.0 + expected.abs() + other.logp_softmax.stats.max.abs();
            if !expected.is_finite() {
                continue;
            }
            if (given - expected).abs() > OF_F32 * U * size {
                return false;
            }
            explained += usize::from((given - token.inputs.logp).abs() > 2.0 * OF_F32 * U * size);
        }
        explained >= 2
    };
    OtherRows::ALL.into_iter().find(explains).map(Diagnosis::OtherRows)
}

/// Diagnoses token losses that are those of ratios held at a bound: all that are wrong tell the same one.
pub(super) fn diagnose_held_ratio<G>(
    reference: &Reference,
    candidate: &Candidate<G>,
    verdicts: &[Verdict],
) -> Option<Diagnosis> {
    let spec = reference.spec();
    // A token's loss is in proportion to its ratio where nothing is added.
    if !failed(verdicts, Output::TokenLoss) || failed(verdicts, Output::Logp) || spec.kl.is_some() {
        return None;
    }
    let losses = candidate.token_loss.as_ref()?;
    let mut bound: Option<f64> = None;
    for (b, t) in ndarray::indices((reference.shape().batch, reference.shape().tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let (given, exact) = (losses.at(b, t), token.token_loss);
        if (given - exact).abs() <= OF_LOSS * half_ulp(exact, Dtype::F32) * (1.0 + token.inputs.logp.abs()) {
            continue;
        }
        let own = token.inputs.level_log_ratio(spec).value;
        let told = (given / exact).ln() + own;
        // A bound is nearer to 0 than what it holds, and on the same side.
        if !told.is_finite() || told * own <= 0.0 || !(NO_CLIP..own.abs()).contains(&told.abs()) {
            return None;
        }
        if bound.is_some_and(|bound| (bound - told.abs()).abs() > SAME_BOUND) {
            return None;
        }
        bound.get_or_insert(told.abs());
    }
    bound.map(|log_ratio| Diagnosis::HeldRatio { log_ratio })
}
