//! Compensated summation of f64 terms.

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
