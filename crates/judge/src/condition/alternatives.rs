//! The search for the branches of the loss that rounding may have put a token on.

use super::Bands;
use super::bound::ErrorBound;
use super::moves::{InputMoves, at_logp, at_shared_kink, shift, shift_kl, shift_shared, within};
use super::sequence::{BatchCondition, SequenceCondition};
use super::softmax::SoftmaxErrors;
use crate::U;
use crate::objective;
use crate::tolerance::Grade;
use assay_core::spec::{LossSpec, Objective, TrustRegion};
use assay_reference::{Branch, Choice, Token, TokenInputs};

/// The relative distance from a bound within which an accurate ratio in f32 may be at it.
const AT_A_BOUND: f64 = 1e-5;

/// A yes-or-no choice among a token's inputs.
type ChoiceField = fn(&mut TokenInputs) -> &mut bool;

/// Lists inputs around the token's own, which come first, on every side of each kink that rounding may cross.
///
/// The kinks of `|d|` and `|w|` are themselves listed if they are near: a kernel may find exactly 0.
pub(super) fn nearby(
    spec: &LossSpec,
    token: &Token,
    softmax: SoftmaxErrors,
    bands: Bands,
    batch: &BatchCondition,
    sequence: &SequenceCondition,
) -> Vec<TokenInputs> {
    let here = token.inputs;
    // ℓ moves to both ends of its band, and to the kinks of d inside it.
    let moves = sequence.moves(spec, token, softmax);
    let width = |of: ErrorBound| U * (bands.logp * of.scale + 4.0) + of.floor;
    let band = width(moves.logp);
    let mut all: Vec<TokenInputs> =
        std::iter::once(here).chain(within(band).map(|by| shift(spec, &here, by))).collect();
    let kinks = here.ref_logp.filter(|_| moves.kl_logp.is_none()).into_iter().chain([here.old_logp]);
    let near = kinks.filter(|&logp| logp <= 0.0 && (logp - here.logp).abs() <= band);
    all.extend(near.map(|logp| at_logp(spec, &here, logp)));
    // A log-probability that the KL penalty alone reads moves independently of ℓ: every combination is possible.
    if let Some(band) = moves.kl_logp.map(width) {
        let kink = here.ref_logp.filter(|&logp| logp <= 0.0 && (logp - here.kl_logp).abs() <= band);
        let shifted = |inputs: &TokenInputs| {
            let inputs = *inputs;
            let at_kink = kink.map(|kl_logp| TokenInputs { kl_logp, ..inputs });
            within(band).map(move |by| shift_kl(&inputs, by)).chain(at_kink)
        };
        let more: Vec<TokenInputs> = all.iter().flat_map(shifted).collect();
        all.extend(more);
    }
    // A shared ratio moves independently of ℓ: every combination is possible.
    if here.row_log_ratio.is_some() {
        let band = sequence.band(bands);
        let shifted = |inputs: &TokenInputs| {
            let inputs = *inputs;
            within(band).map(move |by| shift_shared(&inputs, by)).chain(at_shared_kink(&inputs, band))
        };
        let more: Vec<TokenInputs> = all.iter().flat_map(shifted).collect();
        all.extend(more);
    }
    // Every choice that is open doubles the list.
    let [on_policy, selected] = choice_bands(token, softmax, bands, batch, sequence);
    let choices: [(bool, ChoiceField); 3] = [
        (here.on_policy.margin <= on_policy, |inputs| &mut inputs.on_policy.holds),
        (batch.open[token.at], |inputs| &mut inputs.top_entropy),
        (here.selected.margin <= selected, |inputs| &mut inputs.selected.holds),
    ];
    for (_, choice) in choices.into_iter().filter(|(open, _)| *open) {
        let otherwise = |inputs: &TokenInputs| {
            let mut inputs = *inputs;
            let holds = choice(&mut inputs);
            *holds = !*holds;
            inputs
        };
        let flipped: Vec<TokenInputs> = all.iter().map(otherwise).collect();
        all.extend(flipped);
    }
    all
}

/// Collects the branches of `nearby`, each once, the token's own first.
pub(super) fn branches(
    spec: &LossSpec,
    token: &Token,
    nearby: &[TokenInputs],
    moves: InputMoves,
    bands: Bands,
) -> Vec<Branch> {
    // A trust region compares a divergence with its bounds: the error of the divergence moves the bounds instead.
    let mut specs = vec![];
    if let Objective::TrustRegion(region) = &spec.objective {
        let moved = bands.logp * moves.logp.scale + 4.0 + moves.logp.floor / U;
        let slack = U * objective::divergence_error(region, &token.inputs, moved);
        for slack in [-slack, slack] {
            let moved = TrustRegion { low: region.low + slack, high: region.high + slack, ..region.clone() };
            specs.push(LossSpec { objective: Objective::TrustRegion(moved), ..spec.clone() });
        }
    }
    let mut branches = vec![token.branch];
    for spec in std::iter::once(spec).chain(&specs) {
        for inputs in nearby {
            let branch = Branch::at(spec, inputs);
            if !branches.contains(&branch) {
                branches.push(branch);
            }
        }
    }
    // Grade `standard` also forgives the gradient of two equal arguments of `min` or `clip`; it is no side of a kink,
    // so that no inputs nearby lead to it.
    if let Some(held) = held_by_clip(spec, token, nearby, bands).filter(|held| !branches.contains(held)) {
        branches.push(held);
    }
    branches
}

/// Returns the branch that automatic differentiation takes if the ratio of `nearby` inputs is at a bound of PPO's clip, which grade
/// `standard` forgives.
///
/// In a band that is wider than a value at a bound, as if logits were rounded by whole nats, the exact ratio must be at the bound.
pub(super) fn held_by_clip(spec: &LossSpec, token: &Token, nearby: &[TokenInputs], bands: Bands) -> Option<Branch> {
    if bands.grade != Grade::Standard {
        return None;
    }
    // A held branch is added only where the inputs nearby span less than 1e-3 of a ratio: in a wider band nearly every
    // token would have a ratio at a bound.
    let ratios = nearby.iter().map(|inputs| inputs.ratio(spec));
    let (mut low, mut high) = ratios.fold((f64::INFINITY, 0.0), |(low, high), x| (f64::min(low, x), f64::max(high, x)));
    if high > low * (1.0 + 1e-3) {
        // A kernel that is more accurate than its limits still has a ratio at a bound if the exact one is.
        let here = token.inputs.ratio(spec);
        (low, high) = (here * (1.0 - AT_A_BOUND), here * (1.0 + AT_A_BOUND));
    }
    token.branch.held_by_clip(spec, low..=high)
}

/// Returns how near each of a token's choices, on policy and selected, must be to its threshold to be open.
fn choice_bands(
    token: &Token,
    softmax: SoftmaxErrors,
    bands: Bands,
    batch: &BatchCondition,
    sequence: &SequenceCondition,
) -> [f64; 2] {
    // The off-policy mask compares the mean divergence of a sequence with a threshold: the band is 2κ_logp·C̄ + 4
    // roundings wide.
    let on_policy = U * (2.0 * bands.logp * sequence.mean.scale + 4.0) + 2.0 * sequence.mean.floor;
    // A covariance is `(A − mean A)(ℓ − mean ℓ)`: a token's logp and the batch's mean err by at most the token's bound
    // plus the largest bound of the batch, and the first factor is at most `|A| + max |A|`.
    let two = |kappa: f64, a: ErrorBound, b: ErrorBound| U * kappa * (a.scale + b.scale) + a.floor + b.floor;
    let logps = two(bands.logp, softmax.logp, batch.logp) + U * (8.0 + token.inputs.logp.abs());
    let selected = (token.inputs.advantage.abs() + batch.advantage) * logps;
    [on_policy, selected]
}

/// Returns the token's inputs with every open choice made as `holds`.
pub(super) fn choose(
    token: &Token,
    softmax: SoftmaxErrors,
    bands: Bands,
    batch: &BatchCondition,
    sequence: &SequenceCondition,
    holds: bool,
) -> TokenInputs {
    let [on_policy, selected] = choice_bands(token, softmax, bands, batch, sequence);
    let made = |choice: Choice, band: f64| if choice.margin <= band { Choice { holds, ..choice } } else { choice };
    let inputs = &token.inputs;
    TokenInputs { on_policy: made(inputs.on_policy, on_policy), selected: made(inputs.selected, selected), ..*inputs }
}
