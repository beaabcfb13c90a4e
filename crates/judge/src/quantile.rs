//! [`kept_sets`]: the sets of tokens that a correct kernel may keep as those of the highest entropy, if the entropies of several tokens
//! equal the quantile within rounding.
//!
//! A kernel finds each entropy `Ĥ_t` within `e_t` of the exact one, and the threshold from those very numbers: with `i` the index
//! of the quantile, `k = ⌊i⌋` and `f = i − k`, from the `k`th and the next of them in ascending order,
//!
//! ```text
//! θ̂ = (1 − f)·Ĥ₍k₎ + f·Ĥ₍k+1₎, within r
//! ```
//!
//! `i` is made of given numbers, and has no error. Nor has `θ̂` if `f = 0`: it is the entropy of a token, which is kept, whatever
//! the errors are. Otherwise a difference, a product and a sum are rounded in f32, and so are the entropies: `r = 5u·H` with `H` the
//! largest entropy. If only the quantile is rounded to f32 before entropies are compared with it, `r = u·H` for `f = 0`.
//!
//! `θ̂` grows with each entropy, by no more than the entropy does. So a token may be left out if it is left out when its own entropy is
//! the lowest and the others are the highest that they may be, and kept in the opposite case. A set is kept by some kernel if there are
//! entropies with all of it at `θ̂` or above and all others below.

use ndarray::Array2;

use super::U;
use assay_core::spec::{DroppedTerm, LossSpec, QuantilePrecision, RatioLevel};
use assay_reference::{Reference, quantile_index};

/// The largest number of open tokens whose sets are all tried: each further token doubles their number.
const MOST_OPEN: usize = 8;

/// A token's entropy, and the bound of its error.
#[derive(Clone, Copy)]
struct UncertainEntropy {
    at: (usize, usize),
    entropy: f64,
    error: f64,
}

impl UncertainEntropy {
    fn low(&self) -> f64 {
        self.entropy - self.error
    }

    fn high(&self) -> f64 {
        self.entropy + self.error
    }
}

/// The entropies of a batch, and where their quantile is.
struct EntropyQuantile {
    entropies: Vec<UncertainEntropy>,
    /// The index `k` of the entropy at or below the quantile.
    below: usize,
    /// The fraction `f` of the way to the next entropy.
    fraction: f64,
    /// The rounding error `r` of the threshold.
    rounding: f64,
}

/// The sets of tokens that may be kept, each `[B,T]`.
pub(super) enum KeptSets {
    /// All sets that some correct kernel keeps.
    Known(Vec<Array2<bool>>),
    /// More sets than are tried, as too many tokens are open.
    TooMany { open: usize },
}

/// Whether a token's loss depends on which other tokens are kept, through a mean over them or a ratio that they share.
pub(super) fn is_counted(spec: &LossSpec) -> bool {
    let of_bonus = spec.entropy_coef != 0.0 && spec.entropy_averaging.is_none() && !spec.dentropy;
    spec.top_entropy.is_some_and(|top| match top.drops {
        DroppedTerm::PolicyTerm => of_bonus || spec.ratio.level.is_shared(),
        DroppedTerm::Ratio => spec.ratio.level != RatioLevel::Token,
    })
}

impl EntropyQuantile {
    /// Places the quantile among entropies that are off by `errors`; `None` without a quantile, or if an entropy is not finite.
    fn new(reference: &Reference, errors: &Array2<Option<f64>>) -> Option<Self> {
        let top = reference.spec().top_entropy?;
        let entropies = errors.indexed_iter().filter_map(|(at, error)| {
            Some(UncertainEntropy { at, entropy: reference.token(at.0, at.1)?.entropy, error: (*error)? })
        });
        let entropies: Vec<UncertainEntropy> = entropies.collect();
        let largest = entropies.iter().map(UncertainEntropy::high).fold(0.0, f64::max);
        if entropies.is_empty() || !entropies.iter().all(|token| token.low().is_finite()) {
            return None;
        }
        let index = quantile_index(&top, entropies.len());
        let (below, fraction) = (index.floor(), index.fract());
        // A threshold that is a token's own entropy is rounded only where it is stored in f32 and compared with
        // unrounded entropies.
        let roundings = match (fraction == 0.0, top.precision) {
            (true, QuantilePrecision::Exact | QuantilePrecision::F32) => 0.0,
            (true, QuantilePrecision::F32Threshold) => 1.0,
            (false, _) => 5.0,
        };
        #[expect(clippy::cast_sign_loss, reason = "an index is ≥ 0")]
        Some(Self { entropies, below: below as usize, fraction, rounding: roundings * U * largest })
    }

    /// Interpolates between the `k`th and the next of ascending values, which `at` returns.
    fn between(&self, at: impl Fn(usize) -> f64) -> f64 {
        let below = at(self.below);
        if self.fraction == 0.0 { below } else { below + self.fraction * (at(self.below + 1) - below) }
    }

    /// Returns the quantile of ascending values after `value`, one of them, is replaced by `by`.
    fn with(&self, ascending: &[f64], value: f64, by: f64) -> f64 {
        // Replacing one of n ascending values needs no new sort: the others keep their order, and the new value is put
        // at its place by bounding it with its neighbours.
        let place = ascending.partition_point(|other| *other < value);
        // The values without the replaced one.
        let rest = |k: usize| ascending.get(if k < place { k } else { k + 1 }).copied().unwrap_or(f64::INFINITY);
        self.between(|k| {
            let below = k.checked_sub(1).map_or(f64::NEG_INFINITY, rest);
            by.min(rest(k)).max(below)
        })
    }

    /// Lists the tokens that some correct kernel keeps, and another leaves out.
    fn open(&self) -> Vec<usize> {
        let ascending = |end: fn(&UncertainEntropy) -> f64| {
            let mut all: Vec<f64> = self.entropies.iter().map(end).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (lows, highs) = (ascending(UncertainEntropy::low), ascending(UncertainEntropy::high));
        // The threshold moves by at most as much as the entropy that moves it, so the extreme cases are one token
        // against all others at the opposite ends.
        let is_open = |token: &UncertainEntropy| {
            let (low, high) = (token.low(), token.high());
            let left_out = self.with(&highs, high, low) + self.rounding > low;
            left_out && self.with(&lows, low, high) - self.rounding <= high
        };
        (0..self.entropies.len()).filter(|&i| is_open(&self.entropies[i])).collect()
    }

    /// Whether some correct kernel keeps exactly these tokens.
    fn may_be(&self, kept: &[bool]) -> bool {
        let (of_kept, of_others): (Vec<_>, Vec<_>) = self.entropies.iter().zip(kept).partition(|(_, kept)| **kept);
        // All others must be able to be below all kept tokens: the largest lower end of the others is compared with the
        // smallest upper end of the kept.
        let lowest = of_others.iter().map(|(token, _)| token.low()).fold(f64::NEG_INFINITY, f64::max);
        let highest = of_kept.iter().map(|(token, _)| token.high()).fold(f64::INFINITY, f64::min);
        let ascending = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            move |k: usize| values[k]
        };
        let left_out = of_others.len();
        lowest < highest
            // The quantile is between values of one side: which of them it is depends on how many tokens are below it.
            && if left_out <= self.below {
                // The quantile is among the kept ones: it is lowest if the lowest of them is as high, and the others as low, as they
                // may be.
                let values = ascending(of_kept.iter().map(|(token, _)| token.low().max(highest)).collect());
                self.between(|k| values(k - left_out)) - highest <= self.rounding
            } else if left_out == self.below + 1 {
                // The quantile is between the highest of the others and the lowest of the kept: it is above the former
                // wherever it is interpolated or rounded.
                self.fraction > 0.0 || self.rounding > 0.0
            } else {
                let values = ascending(of_others.iter().map(|(token, _)| token.high().min(lowest)).collect());
                lowest - self.between(values) < self.rounding
            }
    }
}

/// Lists the tokens `[b,t]` that may be kept or left out, if entropies are off by `errors`.
pub(super) fn open_tokens(reference: &Reference, errors: &Array2<Option<f64>>) -> Vec<(usize, usize)> {
    let quantile = EntropyQuantile::new(reference, errors);
    quantile.map_or(vec![], |quantile| quantile.open().into_iter().map(|i| quantile.entropies[i].at).collect())
}

/// Lists the sets of tokens that may be kept, if entropies are off by `errors`.
pub(super) fn kept_sets(reference: &Reference, errors: &Array2<Option<f64>>) -> KeptSets {
    let Some(quantile) = EntropyQuantile::new(reference, errors) else { return KeptSets::Known(vec![]) };
    let open = quantile.open();
    if open.len() > MOST_OPEN {
        return KeptSets::TooMany { open: open.len() };
    }
    // A token that is not open is on the side of its exact entropy.
    let exact = {
        let mut entropies: Vec<f64> = quantile.entropies.iter().map(|token| token.entropy).collect();
        entropies.sort_by(f64::total_cmp);
        quantile.between(|k| entropies[k])
    };
    let own: Vec<bool> = quantile.entropies.iter().map(|token| token.entropy >= exact).collect();
    // Each open token is a bit: every combination is a set, if some kernel may keep it.
    let set = |chosen: usize| {
        let mut kept = own.clone();
        open.iter().enumerate().for_each(|(bit, &i)| kept[i] = chosen >> bit & 1 == 1);
        kept
    };
    let sets = (0..1 << open.len()).map(set).filter(|kept| quantile.may_be(kept));
    let on_tokens = |kept: Vec<bool>| {
        let mut all = Array2::from_elem(errors.dim(), true);
        quantile.entropies.iter().zip(kept).for_each(|(token, kept)| all[token.at] = kept);
        all
    };
    KeptSets::Known(sets.map(on_tokens).collect())
}
