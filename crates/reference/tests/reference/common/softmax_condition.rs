//! What a softmax in f64 can lose to rounding.

/// Condition of a softmax over `z`, in units of `u`, with `s_j` the error that `z_j` comes with.
///
/// ```text
/// a_j                  = max z − z_j
/// lift_j               = 1 + a_j + s_j + s_max            relative error of exp(−a_j)
/// relative_j           = lift_j + Σ p_i lift_i            of p_j = exp(−a_j) / S
/// others               = Σ_{j≠y} p_j relative_j           absolute, of 1 − p_y
/// logp                 = |z_y − max z| + |ℓ| + Σ_{j≠peak} p_j (1 + a_j) + Σ_{j≠y} p_j (s_y + s_j)
/// entropy              = H + Σ_{j≠peak} p_j (1 + a_j)² + Σ_j p_j |a_j − ā| s_j
/// ```
///
/// The sums over "all but one" are what keeps a confident token's scale as small as its values.
pub(crate) struct SoftmaxCondition {
    pub(crate) p: Vec<f64>,
    gap: Vec<f64>,
    mean_gap: f64,
    lift: Vec<f64>,
    /// Of `p_j`.
    pub(crate) relative: Vec<f64>,
    /// Of `1 − p_y`.
    pub(crate) others: f64,
    pub(crate) logp: f64,
    pub(crate) entropy: f64,
}

impl SoftmaxCondition {
    /// Of the columns `z`, where `None` is −∞, that come with errors `size`, and the sampled column `y`.
    pub(crate) fn of(z: &[Option<f64>], size: &[f64], y: usize) -> Self {
        // An excluded column has p = 0; a gap of 0 keeps it out of every other product.
        let max = z.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max);
        let peak = z.iter().position(|z| *z == Some(max)).expect("a finite logit");
        let gap: Vec<f64> = z.iter().map(|z| z.map_or(0.0, |z| max - z)).collect();
        let e: Vec<f64> = z.iter().map(|z| z.map_or(0.0, |z| (z - max).exp())).collect();
        let s: f64 = e.iter().sum();
        let p: Vec<f64> = e.iter().map(|e| e / s).collect();

        let all = 0..z.len();
        let sum = |term: &dyn Fn(usize) -> f64| all.clone().map(term).sum::<f64>();
        let but = |one: usize, term: &dyn Fn(usize) -> f64| all.clone().filter(|j| *j != one).map(term).sum::<f64>();
        let log_s = but(peak, &|j| e[j]).ln_1p();
        let mean_gap = sum(&|j| p[j] * gap[j]);
        let lift: Vec<f64> = all.clone().map(|j| 1.0 + gap[j] + size[j] + size[peak]).collect();
        let mean_lift = sum(&|j| p[j] * lift[j]);
        let relative: Vec<f64> = lift.iter().map(|lift| lift + mean_lift).collect();
        Self {
            others: but(y, &|j| p[j] * relative[j]),
            logp: 2.0 * gap[y]
                + log_s
                + but(peak, &|j| p[j] * (1.0 + gap[j]))
                + but(y, &|j| p[j] * (size[y] + size[j])),
            entropy: log_s
                + mean_gap
                + but(peak, &|j| p[j] * (1.0 + gap[j]).powi(2))
                + sum(&|j| p[j] * (gap[j] - mean_gap).abs() * size[j]),
            p,
            gap,
            mean_gap,
            lift,
            relative,
        }
    }

    /// Of `∂H/∂z_j = p_j (a_j − ā)`.
    pub(crate) fn entropy_gradient(&self, j: usize) -> f64 {
        let weighted_gaps: f64 = self.p.iter().zip(&self.gap).zip(&self.lift).map(|((p, a), lift)| p * a * lift).sum();
        self.p[j] * ((self.gap[j] + self.mean_gap) * self.relative[j] + self.lift[j] + weighted_gaps)
    }
}
