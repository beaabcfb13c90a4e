//! Compensated summation of f64 terms.

use std::array::from_fn;

/// A running sum of f64 that carries its rounding error along (Knuth's two-sum; Ogita, Rump and Oishi 2005).
///
/// The result is as if the terms had been summed in twice the precision and rounded once:
/// `|error| ≤ u·|Σ x| + O(n·u²)·Σ|x|` with `u = 2⁻⁵³`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    total: f64,
    lost: f64,
}

impl Sum {
    /// Adds a term to the sum.
    #[inline]
    pub fn add(&mut self, x: f64) {
        let total = self.total + x;
        // The part of `x` in the new total, and the part of the old one: what both lack is the rounding error, exactly.
        let of_x = total - self.total;
        self.lost += (self.total - (total - of_x)) + (x - of_x);
        self.total = total;
    }

    /// Returns the sum with its compensation.
    pub fn value(self) -> f64 {
        // The lost part of an infinite total is ∞ − ∞; the total alone is then the answer.
        if self.total.is_finite() { self.total + self.lost } else { self.total }
    }
}

/// A running [`Sum`] in lanes, each of which takes one of as many terms: no addition waits for the one before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SumInLanes<const LANES: usize> {
    totals: [f64; LANES],
    lost: [f64; LANES],
}

impl<const LANES: usize> Default for SumInLanes<LANES> {
    fn default() -> Self {
        Self { totals: [0.0; LANES], lost: [0.0; LANES] }
    }
}

impl<const LANES: usize> SumInLanes<LANES> {
    /// Adds a term to each lane, as [`Sum::add`] does.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the loop is compiled for the vector unit of its caller")]
    pub(super) fn add(&mut self, terms: [f64; LANES]) {
        let totals: [f64; LANES] = from_fn(|lane| self.totals[lane] + terms[lane]);
        self.lost = from_fn(|lane| {
            let (x, before, total) = (terms[lane], self.totals[lane], totals[lane]);
            let of_x = total - before;
            self.lost[lane] + ((before - (total - of_x)) + (x - of_x))
        });
        self.totals = totals;
    }

    /// Returns the sum of all lanes with their compensations.
    pub(super) fn value(self) -> f64 {
        self.totals.into_iter().chain(self.lost).collect::<Sum>().value()
    }
}

impl Extend<f64> for Sum {
    fn extend<I: IntoIterator<Item = f64>>(&mut self, terms: I) {
        for x in terms {
            self.add(x);
        }
    }
}

impl FromIterator<f64> for Sum {
    fn from_iter<I: IntoIterator<Item = f64>>(terms: I) -> Self {
        let mut sum = Sum::default();
        sum.extend(terms);
        sum
    }
}
