//! Compensated summation.

/// A running sum of f64 that carries its rounding error along (Neumaier 1974): the result is as if the terms had been
/// summed in twice the precision and rounded once, `|error| ≤ u·|Σ x| + O(n·u²)·Σ|x|` with `u = 2⁻⁵³`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    total: f64,
    lost: f64,
}

impl Sum {
    /// Adds a term.
    pub fn add(&mut self, x: f64) {
        let total = self.total + x;
        // Of an addition's two operands the smaller loses its low bits; they are recovered exactly.
        self.lost += if self.total.abs() >= x.abs() { (self.total - total) + x } else { (x - total) + self.total };
        self.total = total;
    }

    /// The sum.
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
