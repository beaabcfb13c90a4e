//! The columns of a token that has several ids.
//!
//! Sums leave out the likeliest of them, so that `1 − p` is exact on it; on the others `p ≤ ½`, and nothing cancels in
//! `(S − e)/S`. Its log-probability gives those of the others, `log p_k = log p_y − (x_y − x_k)/T`, and with `C` the sum of the
//! derivatives by an id's logp over all its occurrences, and `R` that of the other ids,
//!
//! ```text
//! dx = C·(1 − p)/T − R·p/T        and that of entropy, as on every column
//! ```

use super::{LogitsRow, NativeElement, RowGradients, Scores, SoftmaxSettings, TokenIds};

/// The column of one id.
#[derive(Clone, Copy)]
pub(super) struct IdColumn {
    id: usize,
    /// Transformed logit `t` of the column.
    logit: f64,
    /// Slope `1 − tanh²` under a cap, else 1.
    slope: f64,
    /// Log-probability of the id, nats; NaN until it is computed.
    logp: f64,
}

impl SoftmaxSettings {
    /// Returns the id that sums leave out, and the columns of all ids if there are several.
    pub(super) fn target_of<E: NativeElement>(&self, row: &[E], ids: &TokenIds) -> (usize, Vec<IdColumn>) {
        if ids.others.is_empty() {
            return (ids.first, Vec::new());
        }
        // The likeliest id is the target of the sums.
        let column = |id: usize| {
            let (logit, slope) = self.transform.transformed(id, row[id]);
            IdColumn { id, logit, slope, logp: f64::NAN }
        };
        let several: Vec<IdColumn> = std::iter::once(ids.first).chain(ids.others.iter().copied()).map(column).collect();
        let likeliest = several.iter().max_by(|a, b| a.logit.total_cmp(&b.logit));
        (likeliest.map_or(ids.first, |column| column.id), several)
    }
}

impl Scores {
    /// Adds the log-probabilities of `several` columns, if there are any.
    pub(super) fn with(mut self, mut several: Vec<IdColumn>, inverse_temperature: f64) -> Self {
        let Some(target) = several.iter().find(|column| column.id == self.target).map(|column| column.logit) else {
            return self;
        };
        // Equal logits have a difference of 0, also if both are infinite.
        for column in &mut several {
            let below = if column.logit == target { 0.0 } else { (target - column.logit) * inverse_temperature };
            column.logp = self.logp - below;
        }
        self.logp = several[0].logp;
        self.several = several;
        self
    }

    /// Lists the log-probabilities of the ids besides the first one.
    pub(crate) fn logp_of_others(&self) -> impl Iterator<Item = f64> + '_ {
        self.several.iter().skip(1).map(|column| column.logp)
    }

    /// Writes the dlogits of the columns of several ids. `by_logit` is the derivative of the exponent by a logit;
    /// `bonus` and `offset` are `E/S` and `−ā·E/S`, both times that.
    pub(super) fn write_several<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        grad: &RowGradients,
        by_logit: f64,
        [bonus, offset]: [f64; 2],
    ) {
        let grads = || std::iter::once(grad.logp).chain(grad.others.iter().copied()).zip(&self.several);
        let sum =
            |of: &dyn Fn(usize) -> bool| -> f64 { grads().filter(|(_, at)| of(at.id)).map(|(grad, _)| grad).sum() };
        for column in &self.several {
            // `own` are the derivatives by this id's logp, `rest` those by the others'.
            let (own, rest) = (sum(&|id| id == column.id), sum(&|id| id != column.id));
            let logp = &self.logp_softmax;
            let gap = |max: f32, inverse_temperature: f64| (f64::from(max) - column.logit) * inverse_temperature;
            let e = (-gap(logp.exponent.max, logp.exponent.inverse_temperature)).exp();
            // The target has the exact sum of the others; `S − e` is as good for an id of probability ½ or less.
            let others = if column.id == self.target { logp.end.others } else { logp.end.sum - e };
            let of_own = if own == 0.0 { 0.0 } else { own * others };
            let of_rest = if rest == 0.0 || e == 0.0 { 0.0 } else { rest * e };
            let of_logp = if of_own == of_rest { 0.0 } else { (of_own - of_rest) * by_logit / logp.end.sum };
            // The part of entropy, as on every column.
            let entropy = self.entropy_softmax.exponent;
            let gap = gap(entropy.max, entropy.inverse_temperature);
            let q = (-gap).exp();
            let of_entropy = if bonus == 0.0 || q == 0.0 { 0.0 } else { q * (offset + bonus * gap) };
            row.dlogits[column.id] = E::from_f32(((of_logp + of_entropy) * column.slope) as f32);
        }
    }
}
