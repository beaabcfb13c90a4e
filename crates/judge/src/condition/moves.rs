//! [`InputMoves`]: how far rounding moves the inputs of a token's loss, and how far the loss moves with them.

use super::bound::ErrorBound;
use crate::U;
use assay_core::spec::{LossSpec, Objective, OldLogp};
use assay_reference::TokenInputs;

/// The errors of the inputs of a token's loss: the scales in units of `u`, the floors in nats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InputMoves {
    /// The error `C` of `ℓ` and of what it is compared with.
    pub(super) logp: ErrorBound,
    /// The error of the log-probability that the KL penalty alone reads; `None` if it reads `ℓ`.
    pub(super) kl_logp: Option<ErrorBound>,
    /// The error `C̄` of the sequence's log-ratio.
    pub(super) log_ratio: ErrorBound,
    /// The error of VESPO's `ln w`.
    pub(super) weight: ErrorBound,
}

/// Bounds how far `f` moves when its inputs move as rounding may move them. Under [`OldLogp::Current`] the ratio stays 1.
pub(crate) fn response(
    spec: &LossSpec,
    inputs: &TokenInputs,
    moves: InputMoves,
    f: &dyn Fn(&TokenInputs) -> f64,
) -> ErrorBound {
    let here = f(inputs);
    // Each input is moved both ways and the larger change counts: next to a kink one of the two may change nothing.
    let between = |inputs: [TokenInputs; 2]| {
        let [down, up] = inputs.map(|inputs| (f(&inputs) - here).abs());
        down.max(up)
    };
    let moved = |inputs: [TokenInputs; 2]| between(inputs) / U;

    // ℓ moves by its own error, or each difference is rounded by itself, whichever is more. Both do not add up: in ρ·k3, for one, an
    // error of ℓ cancels, as ρ·e^d does not depend on it.
    let by_logp = |by: f64| [shift(spec, inputs, -by), shift(spec, inputs, by)];
    let of_logp = moved(by_logp(moves.logp.scale * U));
    // A difference with an infinite side is not rounded; its token is judged by not being finite alone.
    let differences =
        [inputs.logp - inputs.old_logp, inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.kl_logp)];
    let [x, d] = differences.map(|difference| if difference.is_finite() { difference * U } else { 0.0 });
    let old = |by: f64| TokenInputs { old_logp: inputs.old_logp + by, ..*inputs };
    let reference = |by: f64| TokenInputs { ref_logp: inputs.ref_logp.map(|ref_logp| ref_logp + by), ..*inputs };
    // The difference from the sampler counts too, if it weighs something.
    let s = inputs.rollout_logp.map(|rollout_logp| (inputs.kl_logp - rollout_logp) * U).filter(|s| s.is_finite());
    let sampler = |by: f64| TokenInputs { rollout_logp: inputs.rollout_logp.map(|logp| logp + by), ..*inputs };
    let of_sampler = s.map_or(0.0, |s| moved([sampler(-s), sampler(s)]));
    let of_differences = moved([old(-x), old(x)]) + moved([reference(-d), reference(d)]) + of_sampler;
    let by_kl = |by: f64| [shift_kl(inputs, -by), shift_kl(inputs, by)];
    let of_kl = moves.kl_logp.map_or(0.0, |kl| moved(by_kl(kl.scale * U)));
    let mut total = ErrorBound { scale: (of_logp + of_kl).max(of_differences), floor: 0.0 };
    // A floor is in nats, not in units of u, and stays so: it is not divided by U.
    if moves.logp.floor > 0.0 {
        total.floor += between(by_logp(moves.logp.floor));
    }
    if let Some(kl) = moves.kl_logp.filter(|kl| kl.floor > 0.0) {
        total.floor += between(by_kl(kl.floor));
    }

    // The ratio that the tokens of a sequence share has an error of its own.
    if inputs.row_log_ratio.is_some() {
        let by_shared = |by: f64| [shift_shared(inputs, -by), shift_shared(inputs, by)];
        total.scale += moved(by_shared(moves.log_ratio.scale * U));
        if moves.log_ratio.floor > 0.0 {
            total.floor += between(by_shared(moves.log_ratio.floor));
        }
    }
    // A bound of the log-ratio is itself rounded.
    let level = inputs.level_log_ratio(spec);
    let held = level.slope * inputs.log_ratio(spec).slope == 0.0 || spec.ratio.cap == Some(level.value);
    if held && level.value.is_finite() {
        let at = |w: f64| TokenInputs { row_log_ratio: Some(w), ..*inputs };
        let by = level.value.abs() * U;
        total.scale += moved([at(level.value - by), at(level.value + by)]);
    }
    // VESPO weighs a token by `w` of its whole sequence, which has a log-weight of its own and so an error of its own.
    if matches!(spec.objective, Objective::Vespo(_)) {
        let weight =
            |by: f64| [-by, by].map(|by| TokenInputs { row_log_weight: inputs.row_log_weight + by, ..*inputs });
        total.scale += moved(weight(moves.weight.scale * U));
        total.floor += between(weight(moves.weight.floor));
    }
    total
}

/// Moves `ℓ` by `by`, to at most 0: it stays the logarithm of a probability. The remainder moves the old log-probability the other way,
/// as the log-ratio rounds by itself even where `ℓ` is 0.
pub(super) fn shift(spec: &LossSpec, inputs: &TokenInputs, by: f64) -> TokenInputs {
    let logp = inputs.logp + by;
    let moved = at_logp(spec, inputs, logp.min(0.0));
    let by_itself = logp > 0.0 && spec.old_logp != OldLogp::Current;
    if by_itself { TokenInputs { old_logp: moved.old_logp - logp, ..moved } } else { moved }
}

/// Replaces `ℓ`, and under [`OldLogp::Current`] moves the old one along, so that the ratio stays.
pub(super) fn at_logp(spec: &LossSpec, inputs: &TokenInputs, logp: f64) -> TokenInputs {
    let current = spec.old_logp == OldLogp::Current;
    let old_logp = if current { logp + (inputs.old_logp - inputs.logp) } else { inputs.old_logp };
    // The KL penalty reads the same number, unless that is of another softmax.
    let kl_logp = if spec.has_kl_over_vocabulary() { inputs.kl_logp } else { logp };
    TokenInputs { logp, kl_logp, old_logp, ..*inputs }
}

/// Moves the log-probability that the KL penalty reads, to at most 0.
pub(super) fn shift_kl(inputs: &TokenInputs, by: f64) -> TokenInputs {
    TokenInputs { kl_logp: (inputs.kl_logp + by).min(0.0), ..*inputs }
}

/// Moves the log-ratio that the tokens of a sequence share, if they share one.
pub(super) fn shift_shared(inputs: &TokenInputs, by: f64) -> TokenInputs {
    TokenInputs { row_log_ratio: inputs.row_log_ratio.map(|x| x + by), ..*inputs }
}

/// Places the shared log-ratio at the kink of `|w|`, if it is within `band` of it.
pub(super) fn at_shared_kink(inputs: &TokenInputs, band: f64) -> Option<TokenInputs> {
    let near = inputs.row_log_ratio.is_some_and(|x| x.abs() <= band);
    near.then_some(TokenInputs { row_log_ratio: Some(0.0), ..*inputs })
}

/// Lists both ends of a band around 0; of a wide band, which may contain a whole branch between two kinks such as the sides of a clip,
/// also points inside.
pub(super) fn within(band: f64) -> impl Iterator<Item = f64> {
    let steps = if band < 1e-3 { 1 } else { 16 };
    (1..=steps).flat_map(move |i| [-1.0, 1.0].map(|side| side * band * f64::from(i) / f64::from(steps)))
}
