//! Softmax of one row, its log-probability and its entropy.

use super::sum::Sum;

/// Softmax statistics of a row `z[0..V]` of scaled logits.
///
/// With `m = max z` and the *gaps* `a_j = m − z_j ≥ 0`:
///
/// ```text
/// e_j = exp(−a_j)          S = Σ_j e_j          p_j = e_j / S          ā = Σ_j p_j a_j          ā₂ = Σ_j p_j a_j²
/// ```
///
/// A logit of −∞ has `e_j = 0` and contributes nothing. A NaN or +∞ logit, or a row all −∞, makes every statistic NaN.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// `m`, nats.
    pub max: f64,
    /// `S`, between 1 and `V`.
    pub sum: f64,
    /// `S − 1`: what all columns but one maximal one sum to.
    rest: f64,
    /// `ln S`, nats.
    pub log_sum: f64,
    /// `ā`, nats.
    pub mean_gap: f64,
    /// `ā₂`, nats².
    pub mean_square_gap: f64,
}

/// Columns whose exponentials are made before they are added: a call between two additions would have the sums leave their registers.
const AT_ONCE: usize = 512;

impl Softmax {
    /// Statistics of `z`.
    pub fn new(z: &[f64]) -> Self {
        let nan = f64::NAN;
        let any_nan = z.iter().fold(false, |any, x| any | x.is_nan());
        let largest = |of: &[f64]| of.iter().copied().fold(f64::NEG_INFINITY, |m, x| if x > m { x } else { m });
        // Few at a time: no comparison has to wait for all before it.
        let max = largest(&z.chunks(32).map(largest).collect::<Vec<_>>());
        let max = if any_nan { nan } else { max };
        if !max.is_finite() {
            return Self { max, sum: nan, rest: nan, log_sum: nan, mean_gap: nan, mean_square_gap: nan };
        }
        // One maximal term is exactly 1. Kept out of the sum it leaves ln S = ln(1 + rest), which is exact however
        // small the rest is.
        let [mut rest, mut weighted_gaps] = [Sum::default(); 2];
        // What limits are made of, and no value: its sum is plain.
        let mut weighted_squares = 0.0;
        let mut peak_seen = false;
        for z in z.chunks(AT_ONCE) {
            let exponentials: Vec<(f64, f64)> = z.iter().map(|x| max - x).map(|gap| (gap, (-gap).exp())).collect();
            for (gap, e) in exponentials {
                if gap == 0.0 && !peak_seen {
                    peak_seen = true;
                } else if e > 0.0 {
                    rest.add(e);
                    weighted_gaps.add(e * gap);
                    weighted_squares += e * gap * gap;
                }
            }
        }
        let rest = rest.value();
        let sum = 1.0 + rest;
        Self {
            max,
            sum,
            rest,
            log_sum: rest.ln_1p(),
            mean_gap: weighted_gaps.value() / sum,
            mean_square_gap: weighted_squares / sum,
        }
    }

    /// `p = exp(z − m) / S`.
    pub fn probability(&self, z: f64) -> f64 {
        (z - self.max).exp() / self.sum
    }

    /// `log p = −a − ln S`, nats.
    pub fn log_probability(&self, z: f64) -> f64 {
        (z - self.max) - self.log_sum
    }

    /// `1 − p_y = (S − e_y)/S` of a column's `z`, as the sum of the other probabilities: correct to the last bits even where `p_y`
    /// rounds to 1. `S` is 1, of one maximal column, and the rest; where `y` is maximal the rest is what others have, and where it
    /// is not, `rest − e_y` takes nothing from the 1.
    pub fn probability_of_others(&self, z: f64) -> f64 {
        let others = if z == self.max { self.rest } else { 1.0 + (self.rest - (z - self.max).exp()) };
        others / self.sum
    }

    /// `H = −Σ p_j log p_j = ln S + ā`, nats: two non-negative terms, so nothing cancels.
    pub fn entropy(&self) -> f64 {
        self.log_sum + self.mean_gap
    }

    /// `∂H/∂z_j = −p_j (log p_j + H) = p_j (a_j − ā)` of a logit and its probability; 0 where that is 0.
    pub fn entropy_gradient(&self, z: f64, p: f64) -> f64 {
        if p == 0.0 { 0.0 } else { p * ((self.max - z) - self.mean_gap) }
    }
}
