//! The last steps of a softmax: everything that follows from the sums over a logits row, the same for all kernels.
//!
//! With the gaps `a_j = (m − x_j)/T` of a row's logits below the largest, `e_j = exp(−a_j)`, and the target `y`:
//!
//! ```text
//! s = Σ_{j≠y} e_j        S  = s + e_y                  logp    = −(a_y + ln S)
//! w = Σ_{j≠y} e_j a_j    ā  = (w + e_y a_y) / S        entropy = ln S + ā
//! ```
//!
//! `ln S` is `ln(1 + (s + (e_y − 1)))`: nothing is lost if the target is the maximum and the others are tiny. A target
//! whose logit is −∞ has an infinite gap and no weight: logp is −∞, and entropy that of the others.

use super::arithmetic::Arithmetic;

/// Sums over a logits row, relative to its maximum.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxSums<V> {
    /// Maximum `m` of the logits of all columns.
    pub max: V,
    /// Logit `x_y` of the target.
    pub target_logit: V,
    /// Sum `s` of the exponentials of the other columns.
    pub others: V,
    /// Sum `w` of `e_j a_j` over the other columns.
    pub weighted: V,
}

/// The softmax of a logits row, as far as a loss needs it.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxStatistics<V> {
    /// Gap `a_y` of the target below the maximum, over `T`.
    pub target_gap: V,
    /// Exponential `e_y` of the target.
    pub target: V,
    /// Sum `s` of the exponentials of the other columns.
    pub others: V,
    /// Sum `S` of all exponentials, the target's included.
    pub sum: V,
    /// Logarithm `ln S` of the sum of all exponentials.
    pub log_sum: V,
    /// Mean gap `ā` under the softmax.
    pub mean_gap: V,
}

impl<V: Copy> SoftmaxSums<V> {
    /// Finishes the softmax of logits times `1/T`, or of the logits as they are if no factor is given.
    pub fn softmax<A: Arithmetic<Value = V>>(self, on: &mut A, inverse_temperature: Option<V>) -> SoftmaxStatistics<V> {
        let Self { max, target_logit, others, weighted } = self;
        // The target's gap and exponential, which the sums leave out.
        let gap = on.sub(max, target_logit);
        let target_gap = inverse_temperature.map_or(gap, |inverse| on.mul(gap, inverse));
        let minus_gap = on.neg(target_gap);
        let target = on.exp(minus_gap);
        let (zero, one) = (on.constant(0.0), on.constant(1.0));
        // ln S from S − 1, which is exact where the target is the maximum and the others are tiny.
        let sum = on.add(others, target);
        let short_of_one = on.sub(target, one);
        let excess = on.add(others, short_of_one);
        let log_sum = on.ln_1p(excess);
        // The target's part of the mean gap; 0·∞ is left out.
        let of_target = on.mul(target, target_gap);
        let nothing = on.equal(target, zero);
        let of_target = on.select(nothing, zero, of_target);
        let weighted = on.add(weighted, of_target);
        let mean_gap = on.div(weighted, sum);
        SoftmaxStatistics { target_gap, target, others, sum, log_sum, mean_gap }
    }
}

impl<V: Copy> SoftmaxStatistics<V> {
    /// Computes the log-probability of the target, nats.
    pub fn logp<A: Arithmetic<Value = V>>(&self, on: &mut A) -> V {
        let to_target = on.add(self.target_gap, self.log_sum);
        on.neg(to_target)
    }

    /// Computes the entropy of the softmax, nats.
    pub fn entropy<A: Arithmetic<Value = V>>(&self, on: &mut A) -> V {
        on.add(self.log_sum, self.mean_gap)
    }
}
