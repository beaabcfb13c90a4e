//! The size of a kept set, read off the mass by which one side's probabilities are too large.

use std::ops::RangeInclusive;

use super::computation::{KeptSet, LargestFirst, LimitFactors, LogpComputation};
use super::rows::AgreementRows;
use super::search::SideToken;

/// A range that a number must be in; empty if its lower end is above its upper.
#[derive(Clone, Copy, Debug)]
struct OpenRange {
    low: f64,
    high: f64,
}

impl OpenRange {
    fn narrow(&mut self, to: Self) {
        self.low = self.low.max(to.low);
        self.high = self.high.min(to.high);
    }

    fn is_empty(self) -> bool {
        self.low > self.high
    }
}

/// Finds the kept sets that give every token its number: of fixed size, of fixed mass, or of a fixed share of the largest probability.
///
/// A side that renormalises over a set of mass `m` has log-probabilities that are `−ln m` larger. The set is the so many largest entries
/// of the row, so each token's excess tells their number, within its limit, and with it a range of each of the three parameters. What is
/// left of a range after all tokens is the parameter.
pub(super) fn fitted(
    rows: &AgreementRows,
    computation: &LogpComputation,
    tokens: &[SideToken],
    factors: LimitFactors,
) -> Vec<LogpComputation> {
    let mut top_k = OpenRange { low: 1.0, high: f64::INFINITY };
    let mut top_p = OpenRange { low: 0.0, high: 1.0 };
    let mut min_p = OpenRange { low: 0.0, high: 1.0 };
    for token in tokens {
        let Some(row) = rows.row(computation, token.at) else { continue };
        // Dropping entries makes the others' probabilities larger, never smaller.
        let predicted = computation.evaluate(&row, factors);
        let (excess, limit) = (token.logp - predicted.logp, predicted.limit + token.limit);
        if excess < -limit {
            return Vec::new();
        }
        let z = computation.exponents(&row);
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let LargestFirst { exponents, masses } = LargestFirst::new(&z, max);
        let Some(kept) = kept_counts(&masses, excess, limit) else { return Vec::new() };
        let (fewest, most) = (*kept.start(), *kept.end());
        // The share of the largest probability that entry `n`, counted from 1, has.
        let share = |n: usize| exponents.get(n - 1).map_or(0.0, |z| (z - max).exp());
        let mass = |n: usize| if n == 0 { 0.0 } else { masses[n - 1] };
        let all = most == masses.len();
        // Entries equal to the last of the k largest are kept with it, so k may be smaller than their number.
        let larger = exponents.partition_point(|z| *z > exponents[fewest - 1]);
        top_k.narrow(OpenRange { low: (larger + 1) as f64, high: if all { f64::INFINITY } else { most as f64 } });
        top_p.narrow(OpenRange { low: mass(fewest - 1), high: mass(most) });
        min_p.narrow(OpenRange { low: share(most + 1), high: share(fewest) });
        if top_k.is_empty() && top_p.is_empty() && min_p.is_empty() {
            return Vec::new();
        }
    }
    let mut found = Vec::new();
    if !top_k.is_empty() && top_k.high.is_finite() {
        // The roundest number in the range.
        #[expect(clippy::cast_sign_loss, reason = "it is 1 at least")]
        found.push(KeptSet::TopK(shortest_between(top_k.low, top_k.high).round() as usize));
    }
    if !top_p.is_empty() && top_p.low < 1.0 {
        found.push(KeptSet::TopP(shortest_between(top_p.low, top_p.high)));
    }
    if !min_p.is_empty() && min_p.high > 0.0 {
        found.push(KeptSet::MinP(shortest_between(min_p.low, min_p.high)));
    }
    found.into_iter().map(|kept| LogpComputation { kept, ..computation.clone() }).collect()
}

/// Returns the numbers of largest entries that have a mass `exp(−excess)`, within `limit` nats; `None` if none has.
fn kept_counts(masses: &[f64], excess: f64, limit: f64) -> Option<RangeInclusive<usize>> {
    let [low, high] = [-excess - limit, -excess + limit].map(f64::exp);
    let fewest = masses.partition_point(|mass| *mass < low) + 1;
    let most = masses.partition_point(|mass| *mass <= high);
    (fewest <= most).then_some(fewest..=most)
}

/// Returns the number of fewest digits in a range.
pub(super) fn shortest_between(low: f64, high: f64) -> f64 {
    let middle = 0.5 * (low + high);
    if !(middle > 0.0 && high > low) {
        return middle;
    }
    let digits = middle.log10().floor() as i32;
    (0..17)
        .map(|more| {
            let unit = 10_f64.powi(digits - more);
            let nearest = (middle / unit).round() * unit;
            // A product with a power of ten is off in its last bit: the decimal is read as it is written.
            format!("{nearest:.*}", usize::try_from(more - digits).unwrap_or(0)).parse().unwrap_or(nearest)
        })
        .find(|x| (low..=high).contains(x))
        .unwrap_or(middle)
}
