//! Compares the metrics that trainers log: means over tokens, and shares of clipped tokens.

use super::gates::{GateLimit, GateTallies, StoredDtype};
use super::token::JudgedToken;
use crate::U;
use crate::condition::{Condition, ErrorBound, FLUSHED};
use crate::gate::{Gate, Model, Output};
use crate::metric::{Allowance, Position, half_ulp};
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, Metrics};
use assay_reference::Reference;

/// Compares the metrics of one candidate.
pub(super) fn compare_metrics(
    tallies: &mut GateTallies,
    reference: &Reference,
    actual: &Metrics,
    tokens: &[JudgedToken],
    limits: &Limits,
) {
    let expected = reference.metrics();
    let count = reference.count().max(1) as f64;
    // A mean may be off by the mean of what its tokens may be.
    let mean = |bound: fn(&Condition) -> ErrorBound| {
        let start = ErrorBound { scale: 0.0, floor: FLUSHED };
        tokens.iter().map(|token| bound(&token.condition)).fold(start, |sum, bound| ErrorBound {
            scale: sum.scale + bound.scale / count,
            floor: sum.floor + bound.floor / count,
        })
    };
    let any_nonfinite = tokens.iter().any(JudgedToken::may_be_nonfinite);
    let means = [
        (Output::EntropyMean, Some(expected.entropy_mean), Some(actual.entropy_mean), mean(|c| c.entropy)),
        (Output::KlMean, expected.kl_mean, actual.kl_mean, mean(|c| c.kl)),
        (Output::RatioMean, Some(expected.ratio_mean), Some(actual.ratio_mean), mean(|c| c.ratio)),
    ];
    let stored = StoredDtype { given: Dtype::F64, promised: Dtype::F64 };
    for (output, expected, actual, bound) in means {
        let Some(expected) = expected else { continue };
        let actual = actual.unwrap_or(f64::NAN);
        // The ratio of a token that the clip holds may overflow f32 though its loss is finite; and so may a sum of ratios.
        let open = !actual.is_finite() && (any_nonfinite || expected * count > f64::from(f32::MAX) / 2.0);
        let limit = GateLimit::elementwise(output, stored, limits);
        tallies.compare_shared(limit, tokens, (expected, bound), actual, open);
    }

    // A tied token is counted by one kernel and not by another, so each may move a share by 1/count.
    let ties =
        |tied: fn(&Condition) -> bool| tokens.iter().filter(|token| tied(&token.condition)).count() as f64 / count;
    let shares = [
        (Output::ClipLow, expected.clip_low, actual.clip_low, ties(|c| c.tied.0)),
        (Output::ClipHigh, expected.clip_high, actual.clip_high, ties(|c| c.tied.1)),
        (Output::ClipRegion, expected.clip_region, actual.clip_region, ties(|c| c.tied.0 || c.tied.1)),
    ];
    for (output, expected, actual, tied) in shares {
        // A share is a quotient of two counts: one rounding in f32, of a number that all tokens inside their tie bands may be added to.
        let rounding = half_ulp(expected + tied, Dtype::F32);
        let allowance = Allowance { rounding, unit: U, scale: 1.0, floor: tied };
        let tally = tallies.entry(Gate::new(output, Model::Count), StoredDtype::scalar(Dtype::F32), None);
        tally.compare(Position::default(), expected, actual, 0.0, allowance, Dtype::F32);
    }
}
