//! Compensated summation of f64 terms.

/// A running sum of f64 that carries its rounding error along (Knuth's two-sum; Ogita, Rump and Oishi 2005): the result is as if the terms had been
/// summed in twice the precision and rounded once, `|error| ≤ u·|Σ x| + O(n·u²)·Σ|x|` with `u = 2⁻⁵³`.
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
        // What of `x` is in the total, and what of the total was there before: what either lacks is the rounding error, exactly.
        let of_x = total - self.total;
        self.lost += (self.total - (total - of_x)) + (x - of_x);
        self.total = total;
    }

    /// Returns the sum with its compensation.
    pub fn value(self) -> f64 {
        // Beyond ±∞ the lost part is ∞ − ∞; the total alone is then the answer.
        if self.total.is_finite() { self.total + self.lost } else { self.total }
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
