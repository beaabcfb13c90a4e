//! The ids of a token besides its first, if logp of several is asked for.
//!
//! Each vocabulary shard picks the logits of the ids that it has, and sums the exponentials of the other columns; both are
//! exchanged as sums.

use ndarray::{Array3, Ix3};

use crate::bank::Bug;
use crate::launch::{OtherIdScore, SpecimenEvaluation, SpecimenLaunch, SpecimenSoftmax, TILE, part};
use crate::logits::LogitReader;
use assay_core::problem::{Float, FloatArray};

impl SpecimenLaunch<'_> {
    /// Returns the ids, as the kernel reads them, with their cotangents.
    fn other_ids(&self, at @ (b, t): (usize, usize)) -> Vec<(usize, f64)> {
        let Some(others) = &self.tokens.extra.others else { return Vec::new() };
        let (vocab, count) = (self.shape.vocab as i64, others.count());
        let flat = others.ids.as_slice().expect("checked: dense");
        let token = b * self.shape.tokens + t;
        let id = |k: usize| {
            let id = if self.has(Bug::OtherIdsStrideOne) { flat[token + k] } else { others.ids[[b, t, k]] };
            // Only a bug reads the id of a masked token.
            usize::try_from(id.clamp(0, vocab - 1)).expect("not negative")
        };
        let dlogp = |k: usize| match () {
            () if self.has(Bug::DlogpOfFirstId) => -self.tokens.advantages.at(at.0, at.1),
            () => others.dlogp[[b, t, k]],
        };
        (0..count).map(|k| (id(k), dlogp(k))).collect()
    }

    /// Scores the token's other ids, from the row that begins at `row` and has this softmax.
    pub(crate) fn pick<E: Float>(
        &self,
        logits: &[E],
        row: usize,
        at: (usize, usize),
        softmax: &SpecimenSoftmax,
        temperature: f64,
    ) -> Vec<OtherIdScore> {
        let picked = |(id, grad_logp): (usize, f64)| {
            // Each vocabulary shard picks the id's logit if it has it, and sums the other columns; both are exchanged as sums.
            let (mut chosen, mut others) = (0.0_f32, 0.0);
            for shard in 0..self.mesh.columns {
                let columns = part(self.shape.vocab, self.mesh.columns, shard);
                let is_elsewhere = !columns.contains(&id) && !columns.is_empty();
                let edge = id.clamp(columns.start, columns.end.max(columns.start + 1) - 1);
                // A shard without the id has the column `edge`, which a clamped gather would read; the mutant adds its
                // logit.
                for tile in 0..columns.len().div_ceil(TILE) {
                    let x = self.load(logits, row, &columns, tile, LogitReader { id, backward: false });
                    for (column, x) in (columns.start + tile * TILE..columns.end).zip(x) {
                        if column == id || (is_elsewhere && column == edge && self.has(Bug::OtherIdFromEveryShard)) {
                            chosen += x;
                        }
                        // The sum leaves the target out: `1 − p` of a probable target would cancel if it were formed
                        // from `p`.
                        if column != id {
                            others += f64::from(((x - softmax.max) * softmax.rate).exp());
                        }
                    }
                }
            }
            let t = f64::from((chosen - softmax.max) * softmax.rate);
            // A target at the maximum has `t = 0`, and then the whole sum is `1 + others`: `ln_1p` keeps the small
            // part.
            let log_sum = if t == 0.0 { others.ln_1p() } else { softmax.sum.ln() };
            let divisor = if self.divides_logits() { 1.0 } else { temperature };
            OtherIdScore { id, logp: (t - log_sum) / divisor, others: others / softmax.sum, grad_logp }
        };
        self.other_ids(at).into_iter().map(picked).collect()
    }

    /// Computes the part of the other ids in a dlogit of probability `p`, without the temperature: `Σ_k G_k·(1[j = y_k]
    /// − p_j)`.
    pub(crate) fn gradient_of_others(&self, picked: &[OtherIdScore], column: usize, p: f64) -> f64 {
        let of = |(k, of): (usize, &OtherIdScore)| {
            let is_overwritten = picked[k + 1..].iter().any(|later| later.id == of.id);
            let own = of.id == column && !(is_overwritten && self.has(Bug::RepeatedIdOverwritten));
            match () {
                () if of.grad_logp == 0.0 => 0.0,
                () if self.has(Bug::SoftmaxOfFirstIdAlone) => {
                    if own {
                        of.grad_logp
                    } else {
                        0.0
                    }
                }
                () if own && !self.has(Bug::OneHotOfFirstIdAlone) => of.grad_logp * of.others,
                // ∞ · 0: a column of probability 0 has no part even in an infinite gradient.
                () if p == 0.0 => 0.0,
                () => -of.grad_logp * p,
            }
        };
        picked.iter().enumerate().map(of).sum()
    }

    /// Whether a later id equals the first one, so that a bug overwrites the first.
    pub(crate) fn forgets_first(&self, first: usize, picked: &[OtherIdScore]) -> bool {
        self.has(Bug::RepeatedIdOverwritten) && picked.iter().any(|later| later.id == first)
    }

    /// Arranges log-probabilities of the other ids as `[B,T,K−1]`, 0 for masked tokens; `None` if tokens have no other
    /// ids.
    pub(crate) fn logp_of_others(&self, evaluation: &SpecimenEvaluation) -> Option<FloatArray<Ix3>> {
        let count = self.tokens.extra.others.as_ref()?.count();
        let of_token = |at| {
            let picked = evaluation.tokens[at].as_ref().map_or(&[][..], |token| &token.scored.others);
            let mut logp: Vec<f64> = picked.iter().map(|of| of.logp).collect();
            if self.has(Bug::OtherIdsSorted) {
                logp.sort_by(|a, b| b.total_cmp(a));
            }
            logp.resize(count, 0.0);
            logp
        };
        let all: Vec<f32> =
            ndarray::indices(evaluation.tokens.dim()).into_iter().flat_map(of_token).map(|x| x as f32).collect();
        let (batch, tokens) = evaluation.tokens.dim();
        Some(Array3::from_shape_vec((batch, tokens, count), all).expect("K − 1 values a token").into())
    }
}
