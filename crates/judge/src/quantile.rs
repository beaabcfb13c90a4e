//! Which tokens a right kernel may take for those of the highest entropy, where several have the quantile's to within rounding.
//!
//! A kernel finds each entropy `Ĥ_t` within `e_t` of the exact one, and the threshold from those very numbers: with `i` the index
//! of the quantile, `k = ⌊i⌋` and `f = i − k`, from the `k`th and the next of them in ascending order,
//!
//! ```text
//! θ̂ = (1 − f)·Ĥ₍k₎ + f·Ĥ₍k+1₎, within r
//! ```
//!
//! `i` is made of given numbers, and has no error. Nor has `θ̂` where `f = 0`: it is the entropy of a token, which is kept, however far
//! all of them are off. Else a difference, a product and a sum are rounded in f32, and the entropies to it: `r = 5u·H` with `H` the
//! largest; and where an entropy is compared with a quantile that alone is rounded to f32, `u·H` if `f = 0`.
//!
//! `θ̂` grows with each entropy, by no more than that does. So a token may be left out if it is where its own is the lowest and the
//! others are the highest that they may be, and kept if it is the other way round. A set is kept by some kernel if there are
//! entropies with all of it at `θ̂` or above and all others below.

use ndarray::Array2;

use super::U;
use assay_core::spec::{DroppedTerm, LossSpec, QuantilePrecision, RatioLevel};
use assay_reference::{Reference, quantile_index};

/// Sets are told apart where no more tokens than these may be in or out: a token more doubles them.
const MOST_OPEN: usize = 8;

/// A token's entropy, and how far it may be off.
#[derive(Clone, Copy)]
struct Found {
    at: (usize, usize),
    entropy: f64,
    error: f64,
}

impl Found {
    fn low(&self) -> f64 {
        self.entropy - self.error
    }

    fn high(&self) -> f64 {
        self.entropy + self.error
    }
}

/// The entropies of a batch, and where their quantile is.
struct Quantile {
    found: Vec<Found>,
    /// `k`
    below: usize,
    /// `f`
    fraction: f64,
    /// `r`
    rounding: f64,
}

/// The sets of tokens that may be kept.
pub(super) enum Sets {
    /// These.
    Known(Vec<Array2<bool>>),
    /// More than can be told apart: so many tokens are open.
    Unknown(usize),
}

/// Whether the loss of a token depends on which others are kept: by a mean over them, or a ratio that they share.
pub(super) fn is_counted(spec: &LossSpec) -> bool {
    let of_bonus = spec.entropy_coef != 0.0 && spec.entropy_averaging.is_none() && !spec.dentropy;
    spec.top_entropy.is_some_and(|top| match top.drops {
        DroppedTerm::PolicyTerm => of_bonus || spec.ratio.level.is_shared(),
        DroppedTerm::Ratio => spec.ratio.level != RatioLevel::Token,
    })
}

impl Quantile {
    /// Of entropies that are off by `errors`; `None` without a quantile, or where one of them is not finite.
    fn of(reference: &Reference, errors: &Array2<Option<f64>>) -> Option<Self> {
        let top = reference.spec().top_entropy?;
        let found = errors.indexed_iter().filter_map(|(at, error)| {
            Some(Found { at, entropy: reference.token(at.0, at.1)?.entropy, error: (*error)? })
        });
        let found: Vec<Found> = found.collect();
        let largest = found.iter().map(Found::high).fold(0.0, f64::max);
        if found.is_empty() || !found.iter().all(|found| found.low().is_finite()) {
            return None;
        }
        let index = quantile_index(&top, found.len());
        let (below, fraction) = (index.floor(), index.fract());
        let roundings = match (fraction == 0.0, top.precision) {
            (true, QuantilePrecision::Exact | QuantilePrecision::F32) => 0.0,
            (true, QuantilePrecision::F32Threshold) => 1.0,
            (false, _) => 5.0,
        };
        #[expect(clippy::cast_sign_loss, reason = "an index is ≥ 0")]
        Some(Self { found, below: below as usize, fraction, rounding: roundings * U * largest })
    }

    /// What is at `k` and beyond, of ascending values that `at` says.
    fn between(&self, at: impl Fn(usize) -> f64) -> f64 {
        let below = at(self.below);
        if self.fraction == 0.0 { below } else { below + self.fraction * (at(self.below + 1) - below) }
    }

    /// The quantile of ascending `values`, were `value`, one of them, `by`.
    fn with(&self, ascending: &[f64], value: f64, by: f64) -> f64 {
        let place = ascending.partition_point(|other| *other < value);
        // Without it.
        let rest = |k: usize| ascending.get(if k < place { k } else { k + 1 }).copied().unwrap_or(f64::INFINITY);
        self.between(|k| {
            let below = k.checked_sub(1).map_or(f64::NEG_INFINITY, rest);
            by.min(rest(k)).max(below)
        })
    }

    /// The tokens that may be kept, or not.
    fn open(&self) -> Vec<usize> {
        let ascending = |end: fn(&Found) -> f64| {
            let mut all: Vec<f64> = self.found.iter().map(end).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (lows, highs) = (ascending(Found::low), ascending(Found::high));
        let is_open = |found: &Found| {
            let (low, high) = (found.low(), found.high());
            let left_out = self.with(&highs, high, low) + self.rounding > low;
            left_out && self.with(&lows, low, high) - self.rounding <= high
        };
        (0..self.found.len()).filter(|&i| is_open(&self.found[i])).collect()
    }

    /// Whether some kernel keeps just these.
    fn may_be(&self, kept: &[bool]) -> bool {
        let (of_kept, of_others): (Vec<_>, Vec<_>) = self.found.iter().zip(kept).partition(|(_, kept)| **kept);
        let lowest = of_others.iter().map(|(found, _)| found.low()).fold(f64::NEG_INFINITY, f64::max);
        let highest = of_kept.iter().map(|(found, _)| found.high()).fold(f64::INFINITY, f64::min);
        let ascending = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            move |k: usize| values[k]
        };
        let left_out = of_others.len();
        lowest < highest
            && if left_out <= self.below {
                // The quantile is among those kept, of which the lowest is as high, and the others as low, as they may be.
                let values = ascending(of_kept.iter().map(|(found, _)| found.low().max(highest)).collect());
                self.between(|k| values(k - left_out)) - highest <= self.rounding
            } else if left_out == self.below + 1 {
                self.fraction > 0.0 || self.rounding > 0.0
            } else {
                let values = ascending(of_others.iter().map(|(found, _)| found.high().min(lowest)).collect());
                lowest - self.between(values) < self.rounding
            }
    }
}

/// The tokens that may be kept or not, were entropies off by `errors`.
pub(super) fn open(reference: &Reference, errors: &Array2<Option<f64>>) -> Vec<(usize, usize)> {
    let quantile = Quantile::of(reference, errors);
    quantile.map_or(vec![], |quantile| quantile.open().into_iter().map(|i| quantile.found[i].at).collect())
}

/// The sets that may be kept, were entropies off by `errors`.
pub(super) fn sets(reference: &Reference, errors: &Array2<Option<f64>>) -> Sets {
    let Some(quantile) = Quantile::of(reference, errors) else { return Sets::Known(vec![]) };
    let open = quantile.open();
    if open.len() > MOST_OPEN {
        return Sets::Unknown(open.len());
    }
    // Who is not open is on the side where the exact entropies are.
    let exact = {
        let mut entropies: Vec<f64> = quantile.found.iter().map(|found| found.entropy).collect();
        entropies.sort_by(f64::total_cmp);
        quantile.between(|k| entropies[k])
    };
    let own: Vec<bool> = quantile.found.iter().map(|found| found.entropy >= exact).collect();
    let set = |chosen: usize| {
        let mut kept = own.clone();
        open.iter().enumerate().for_each(|(bit, &i)| kept[i] = chosen >> bit & 1 == 1);
        kept
    };
    let sets = (0..1 << open.len()).map(set).filter(|kept| quantile.may_be(kept));
    let on_tokens = |kept: Vec<bool>| {
        let mut all = Array2::from_elem(errors.dim(), true);
        quantile.found.iter().zip(kept).for_each(|(found, kept)| all[found.at] = kept);
        all
    };
    Sets::Known(sets.map(on_tokens).collect())
}
