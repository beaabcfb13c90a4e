//! [`SequenceCondition`] and [`BatchCondition`]: the errors of what the tokens of a sequence, and of a batch, share.

use ndarray::Array2;

use super::Bands;
use super::alternatives::{choose, held_by_clip};
use super::bound::ErrorBound;
use super::moves::{InputMoves, at_shared_kink, response, shift_shared, within};
use super::softmax::{SoftmaxErrors, entropy_error};
use super::terms::{grad_flushed, grad_terms};
use crate::U;
use crate::quantile;
use assay_core::spec::{LossSpec, OldLogp, RatioLevel};
use assay_reference::{Branch, Reference, Token, TokenInputs};

/// The distances within which a choice between the tokens of a batch is open.
pub(super) struct BatchCondition {
    /// The largest bound of a logp.
    pub(super) logp: ErrorBound,
    /// The largest advantage by size.
    pub(super) advantage: f64,
    /// Whether each token may count as of high entropy or not, `[B,T]`, whatever the others do.
    pub(super) open: Array2<bool>,
}

impl BatchCondition {
    pub(super) fn new(reference: &Reference, softmax: &Array2<Option<SoftmaxErrors>>, bands: Bands) -> Self {
        let spec = reference.spec();
        let mut open = Array2::from_elem(softmax.dim(), false);
        // If the loss counts the kept tokens, whole sets of them are tried instead.
        if spec.top_entropy.is_some() && !quantile::is_counted(spec) {
            let error = |(b, t)| Some(entropy_error(reference.token(b, t)?, softmax[[b, t]]?, bands));
            for at in quantile::open_tokens(reference, &Array2::from_shape_fn(softmax.dim(), error)) {
                open[at] = true;
            }
        }
        let mut all = Self { logp: ErrorBound::default(), advantage: 0.0, open };
        // A covariance compares a token with means over the batch, whose errors are not known token by token: the
        // largest bound and the largest advantage stand for all of them.
        for ((b, t), softmax) in softmax.indexed_iter() {
            let (Some(softmax), Some(token)) = (softmax, reference.token(b, t)) else { continue };
            all.logp = all.logp.or(softmax.logp);
            all.advantage = all.advantage.max(token.inputs.advantage.abs());
        }
        all
    }
}

/// The terms that the tokens of a sequence bring to the ratio they share.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RatioTerms {
    /// The sum `Σ |∂loss/∂w|` of the terms before they cancel.
    pub(crate) sum: f64,
    /// The movement of that sum.
    pub(crate) moved: ErrorBound,
    /// The part of it that may be flushed, in units of [`FLUSHED`](super::FLUSHED).
    pub(crate) flushed: f64,
}

/// A token of a sequence: its place `[b,t]`, its exact values and the errors of its softmax.
type SequenceToken<'t> = ((usize, usize), &'t Token, SoftmaxErrors);

/// The errors of what the tokens of a sequence share.
pub(super) struct SequenceCondition {
    /// The mean of `C_ℓ + |old_logp| + |x|`, and of the floors of logp.
    pub(super) mean: ErrorBound,
    /// The error `C̄` of the shared log-ratio: the mean, or the sum if the ratio is a product.
    log_ratio: ErrorBound,
    /// The sum of `C_ℓ + |old_logp| + |x|`, with the logarithm of the rollout weights added.
    sum: ErrorBound,
    /// The derivatives of the loss by the shared ratio, with the tokens on each side of their kinks; the reference's own first.
    pub(super) couplings: Vec<f64>,
    pub(super) terms: RatioTerms,
}

impl SequenceCondition {
    pub(super) fn new(reference: &Reference, bands: Bands, batch: &BatchCondition, tokens: &[SequenceToken]) -> Self {
        let spec = reference.spec();
        // A token contributes the error of its logp, and those of rounding `old_logp` and the log-ratio `x = ℓ −
        // old_logp`.
        let condition = |&(_, token, softmax): &SequenceToken| {
            let x = token.inputs.logp - token.inputs.old_logp;
            softmax.logp.scale + old_logp_size(spec, token) + if x.is_finite() { x.abs() } else { 0.0 }
        };
        let sum: f64 = tokens.iter().map(condition).sum();
        let floors: f64 = tokens.iter().map(|(_, _, softmax)| softmax.logp.floor).sum();
        let count = tokens.len().max(1) as f64;
        // A shared ratio is the exponential of the mean of a sequence's log-ratios, whose errors are averaged; RLOO's
        // product of ratios has their sum.
        let shared = if spec.ratio.level == RatioLevel::SequenceProduct { 1.0 } else { count };
        let weights = tokens.first().map_or(0.0, |(_, token, _)| token.inputs.row_log_weight.abs());
        let flushed = |(_, token, _): &SequenceToken| grad_flushed(spec, token, &token.branch, bands.grade);
        let mut sequence = Self {
            mean: ErrorBound { scale: sum / count, floor: floors / count },
            log_ratio: ErrorBound { scale: sum / shared, floor: floors / shared },
            sum: ErrorBound { scale: sum + if weights.is_finite() { weights } else { 0.0 }, floor: floors },
            couplings: vec![tokens.first().map_or(0.0, |(_, token, _)| token.coupling)],
            terms: RatioTerms { flushed: tokens.iter().map(flushed).sum(), ..RatioTerms::default() },
        };
        // The terms of Σ ∂loss/∂w may cancel within a sequence, so their sizes and their movements are added up, which
        // bounds the sum in any order.
        if spec.ratio.level.is_shared() {
            for &(_, token, softmax) in tokens {
                let moves = sequence.moves(spec, token, softmax);
                // Near a bound of the clip the token may be on the other branch, whose derivative may be the larger.
                let mut branches = vec![token.branch];
                for by in within(sequence.band(bands)) {
                    let branch = Branch::at(spec, &shift_shared(&token.inputs, by));
                    if !branches.contains(&branch) {
                        branches.push(branch);
                    }
                }
                let (mut sum, mut most) = (0.0, ErrorBound::default());
                for branch in &branches {
                    let derivative =
                        |inputs: &TokenInputs| reference.by_log_ratio(&Token { inputs: *inputs, ..*token }, branch);
                    most = most.or(response(spec, &token.inputs, moves, &derivative));
                    sum = f64::max(sum, grad_terms(spec, token, branch, bands.grade).log_ratio);
                }
                sequence.terms.sum += sum;
                sequence.terms.moved.scale += most.scale;
                sequence.terms.moved.floor += most.floor;
            }
            sequence.add_couplings(reference, bands, batch, tokens);
        }
        sequence
    }

    /// Adds the couplings with all tokens moved to one side of what they share, or with every open choice made in one way.
    ///
    /// Each is a different derivative by the shared ratio, and one of them reaches all tokens of the sequence.
    fn add_couplings(&mut self, reference: &Reference, bands: Bands, batch: &BatchCondition, tokens: &[SequenceToken]) {
        let spec = reference.spec();
        let band = self.band(bands);
        let sum = |branch: &dyn Fn(&Token, SoftmaxErrors) -> Branch| -> f64 {
            tokens.iter().map(|&(_, token, softmax)| reference.by_log_ratio(token, &branch(token, softmax))).sum()
        };
        // All tokens of a sequence read one rounded ratio and one rounded mask, so that they move together: one sum for
        // each end of the band, one at the kink of |w|, one for each way of making the open choices, one with the
        // branches that a clip holds. The combinations of single tokens are not possible.
        let mut couplings = Vec::new();
        for by in within(band) {
            couplings.push(sum(&|token, _| Branch::at(spec, &shift_shared(&token.inputs, by))));
        }
        couplings.push(sum(&|token, _| Branch::at(spec, &at_shared_kink(&token.inputs, band).unwrap_or(token.inputs))));
        for holds in [true, false] {
            couplings.push(sum(&|token, softmax| Branch::at(spec, &choose(token, softmax, bands, batch, self, holds))));
        }
        couplings.push(sum(&|token, _| {
            let nearby: Vec<TokenInputs> = within(band).map(|by| shift_shared(&token.inputs, by)).collect();
            held_by_clip(spec, token, &nearby, bands).unwrap_or(token.branch)
        }));
        // Sums that differ by rounding alone are one coupling: each more costs a comparison of all dlogits.
        for coupling in couplings {
            if self.couplings.iter().all(|known| (coupling - known).abs() > 1e-9 * self.terms.sum) {
                self.couplings.push(coupling);
            }
        }
    }

    /// Returns the errors of the inputs of one token's loss.
    pub(super) fn moves(&self, spec: &LossSpec, token: &Token, softmax: SoftmaxErrors) -> InputMoves {
        // The reference's log-probability rounds with the one that it is subtracted from.
        let reference = token.inputs.ref_logp.map_or(0.0, f64::abs);
        let kl_logp = softmax.kl_logp.map(|kl| ErrorBound { scale: kl.scale + reference, ..kl });
        let logp = softmax.logp.scale + old_logp_size(spec, token) + if kl_logp.is_some() { 0.0 } else { reference };
        let logp = ErrorBound { scale: logp, ..softmax.logp };
        InputMoves { logp, kl_logp, log_ratio: self.log_ratio, weight: self.sum }
    }

    /// Returns the distance from a kink of the shared log-ratio within which both sides are right.
    pub(super) fn band(&self, bands: Bands) -> f64 {
        U * (bands.logp * self.log_ratio.scale + 4.0) + self.log_ratio.floor
    }
}

fn old_logp_size(spec: &LossSpec, token: &Token) -> f64 {
    if spec.old_logp == OldLogp::Current { 0.0 } else { token.inputs.old_logp.abs() }
}
