//! A token whose sampler has kept a set of vocabulary entries: the softmax over `K` gathered logits, and their dlogits.
//!
//! ```text
//! set           a_j = (m − x_j)/T,  e_j = exp(−a_j),  Σ e_j for j ≠ y,  Σ e_j a_j            j in the set, all in f64
//! dlogits       0 outside;  e_j · (−G/(S·T))  +  e_j (a_j − ā) · E/(S·T)      and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! vocabulary    the same of the whole row, with the KL penalty's G or the entropy's E, or both, added on every column
//! ```
//!
//! If nothing is over the vocabulary, no logit outside the set is read. The columns of the set are computed in f64, from both
//! softmaxes, and rounded once.

use super::{LogitsRow, NativeElement, RowGradients, Scores, SoftmaxSettings, TokenIds};
use assay_algebra::arithmetic::Immediate;
use assay_algebra::cross_entropy::WholeRow;
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_core::spec::LossSpec;

/// The softmaxes of a token, by what they run over.
#[derive(Clone)]
#[expect(clippy::large_enum_variant, reason = "rows without sets, as most are, need no box")]
pub(crate) enum TokenScores {
    /// The whole row, or what the support leaves of it.
    Row(Scores),
    /// A kept set, and the whole row where something is over it.
    Kept(Box<KeptScores>),
}

/// The softmaxes of a token with a kept set.
#[derive(Clone)]
pub(crate) struct KeptScores {
    /// The softmax over the set that logp is of.
    logp_softmax: SetSoftmax,
    /// The softmax over the set that entropy is of, unless that is over the vocabulary.
    entropy_softmax: SetSoftmax,
    /// The softmax of the whole row, if entropy or the KL penalty reads it.
    vocabulary: Option<Scores>,
    /// The id that sums over the set leave out: the token's, or the likeliest of several.
    target: usize,
    entropy: f64,
    /// Log-probabilities of all ids of the token, nats.
    logps: Vec<f64>,
    /// The log-probability that the KL penalty reads, if it is over the vocabulary.
    kl_logp: Option<f64>,
}

/// The settings of kept sets, the same for all tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptSettings {
    /// Whether entropy is over the vocabulary.
    pub(crate) entropy_over_vocabulary: bool,
    /// Whether the KL penalty is over the vocabulary.
    pub(crate) kl_over_vocabulary: bool,
}

impl KeptSettings {
    /// Whether anything is over the vocabulary, so that entries outside of the set have dlogits.
    pub(crate) fn over_vocabulary(self) -> bool {
        self.entropy_over_vocabulary || self.kl_over_vocabulary
    }

    /// Reads the settings; `None` if the spec has no kept sets.
    pub(crate) fn from_spec(spec: &LossSpec) -> Option<Self> {
        spec.reads_kept_ids().then(|| Self {
            entropy_over_vocabulary: spec.has_entropy_over_vocabulary(),
            kl_over_vocabulary: spec.has_kl_over_vocabulary(),
        })
    }
}

/// A token with its ids and the entries of its kept set.
pub(crate) struct KeptToken {
    pub(crate) ids: TokenIds,
    /// The vocabulary entries in its set.
    pub(crate) entries: Vec<usize>,
    pub(crate) settings: KeptSettings,
}

/// A softmax over the entries of a kept set.
#[derive(Clone, Copy)]
struct SetSoftmax {
    /// Largest transformed logit `m` of the set.
    max: f64,
    /// Factor `1/T`, with the transform's rate.
    inverse_temperature: f64,
    end: SoftmaxStatistics<f64>,
}

/// One vocabulary entry of a kept set, with its logit.
struct SetColumn {
    id: usize,
    /// Transformed logit `t` of the entry, in f64.
    logit: f64,
    /// Slope `1 − tanh²` under a cap, else 1.
    slope: f64,
}

impl TokenScores {
    /// Returns the log-probability of the token's first id, nats.
    pub(crate) fn logp(&self) -> f64 {
        match self {
            TokenScores::Row(scores) => scores.logp,
            TokenScores::Kept(scores) => scores.logps[0],
        }
    }

    /// Returns the entropy that the spec asks for, nats.
    pub(crate) fn entropy(&self) -> f64 {
        match self {
            TokenScores::Row(scores) => scores.entropy,
            TokenScores::Kept(scores) => scores.entropy,
        }
    }

    /// Returns the log-probability that the KL penalty reads, if it is another than [`logp`](Self::logp).
    pub(crate) fn kl_logp(&self) -> Option<f64> {
        match self {
            TokenScores::Row(_) => None,
            TokenScores::Kept(scores) => scores.kl_logp,
        }
    }

    /// Returns what the terms of a cross-entropy read of the whole row; `None` of a kept set.
    pub(crate) fn whole_row(&self) -> Option<WholeRow<f64>> {
        match self {
            TokenScores::Row(scores) => Some(scores.whole_row()),
            TokenScores::Kept(_) => None,
        }
    }

    /// Lists the log-probabilities of the ids besides the first one.
    pub(crate) fn logp_of_others(&self) -> impl Iterator<Item = f64> + '_ {
        let (of_row, of_set) = match self {
            TokenScores::Row(scores) => (Some(scores.logp_of_others()), None),
            TokenScores::Kept(scores) => (None, Some(scores.logps.iter().skip(1).copied())),
        };
        of_row.into_iter().flatten().chain(of_set.into_iter().flatten())
    }
}

impl SetSoftmax {
    /// Sums over `columns`, of which `target` is the place of the column that is left out.
    fn new(columns: &[SetColumn], target: usize, inverse_temperature: f64) -> Self {
        // A NaN stays: every sum is then NaN.
        let larger = |m: f64, x: f64| if x > m || x.is_nan() { x } else { m };
        let max = columns.iter().map(|column| column.logit).fold(f64::NEG_INFINITY, larger);
        let (mut others, mut weighted) = (0.0, 0.0);
        for (_, column) in columns.iter().enumerate().filter(|(place, _)| *place != target) {
            let gap = (max - column.logit) * inverse_temperature;
            let e = (-gap).exp();
            // A logit of −∞ has an infinite gap and no weight.
            if e != 0.0 {
                others += e;
                weighted += e * gap;
            }
        }
        let sums = SoftmaxSums { max, target_logit: columns[target].logit, others, weighted };
        Self { max, inverse_temperature, end: sums.softmax(&mut Immediate, Some(inverse_temperature)) }
    }

    /// Returns the gap of a logit, over `T`.
    fn gap(&self, logit: f64) -> f64 {
        (self.max - logit) * self.inverse_temperature
    }
}

/// Returns `factor · x`; 0 if the factor is 0, whatever `x` is.
fn unless_0(factor: f64, x: f64) -> f64 {
    if factor == 0.0 { 0.0 } else { factor * x }
}

/// Computes `E/(S·T)·e_j (a_j − ā)`; 0 for a column of probability 0.
fn entropy_part(bonus: f64, gap: f64, mean_gap: f64) -> f64 {
    let e = (-gap).exp();
    if bonus == 0.0 || e == 0.0 { 0.0 } else { bonus * e * (gap - mean_gap) }
}

impl SoftmaxSettings {
    /// Gathers the logits of `entries` and transforms them.
    fn gathered<E: NativeElement>(&self, row: &[E], entries: &[usize]) -> Vec<SetColumn> {
        let column = |&id: &usize| {
            let (logit, slope) = self.transform.transformed(id, row[id]);
            SetColumn { id, logit, slope }
        };
        entries.iter().map(column).collect()
    }

    /// Scores the row of an unmasked token over its kept set, which has its ids among its entries.
    pub(crate) fn score_kept<E: NativeElement>(&self, row: &[E], token: &KeptToken, rate: f64) -> TokenScores {
        let KeptToken { ids, entries, settings } = token;
        let columns = self.gathered(row, entries);
        let place = |id: usize| columns.iter().position(|column| column.id == id).expect("checked: kept");
        let places: Vec<usize> = std::iter::once(ids.first).chain(ids.others.iter().copied()).map(place).collect();
        // Sums leave out the likeliest id, so that `1 − p` is exact on it.
        let likeliest = places.iter().max_by(|&&a, &&b| columns[a].logit.total_cmp(&columns[b].logit));
        let target = *likeliest.expect("at least one id");
        let logp_softmax = SetSoftmax::new(&columns, target, if self.two { self.transform.rate } else { rate });
        let entropy_softmax = if self.two { SetSoftmax::new(&columns, target, rate) } else { logp_softmax };
        // The other ids' log-probabilities are the target's less the difference of the logits; equal ones may be infinite.
        let of_target = logp_softmax.end.logp(&mut Immediate);
        let logp = |&place: &usize| {
            let (x, y) = (columns[place].logit, columns[target].logit);
            let below = if x == y { 0.0 } else { (y - x) * logp_softmax.inverse_temperature };
            (of_target - below) * self.logp_factor
        };
        let KeptSettings { entropy_over_vocabulary, kl_over_vocabulary } = *settings;
        let alone = TokenIds { first: ids.first, others: Vec::new() };
        let vocabulary = (entropy_over_vocabulary || kl_over_vocabulary).then(|| self.score(row, &alone, rate));
        TokenScores::Kept(Box::new(KeptScores {
            target: columns[target].id,
            entropy: match &vocabulary {
                Some(scores) if entropy_over_vocabulary => scores.entropy,
                _ => entropy_softmax.end.entropy(&mut Immediate),
            },
            logps: places.iter().map(logp).collect(),
            kl_logp: vocabulary.as_ref().filter(|_| kl_over_vocabulary).map(|scores| scores.logp),
            logp_softmax,
            entropy_softmax,
            vocabulary,
        }))
    }

    /// Writes the dlogits of an unmasked token with a kept set. `grad` is of the softmaxes over the set and `grad_kl` the
    /// derivative by the KL penalty's own log-probability.
    pub(crate) fn write_kept<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        token: &KeptToken,
        scores: &KeptScores,
        grad: &RowGradients,
        grad_kl: f64,
    ) {
        let KeptToken { ids, entries, settings } = token;
        // The set's logits are read before the row is overwritten.
        let columns = self.gathered(row.logits(), entries);
        let (of_set, of_vocabulary) =
            if settings.entropy_over_vocabulary { (0.0, grad.entropy) } else { (grad.entropy, 0.0) };
        let set = self.set_dlogits(&columns, ids, scores, grad, of_set);
        let whole = scores.vocabulary.as_ref().map(|vocabulary| {
            let others = Vec::new();
            let grad =
                RowGradients { logp: grad_kl, entropy: of_vocabulary, others, log_sum_exp: 0.0, mean_logit: 0.0 };
            let at_set = self.dlogits_at(&columns, vocabulary, &grad);
            self.write(row, vocabulary, None, &grad);
            at_set
        });
        if whole.is_none() {
            row.dlogits.fill(E::from_f32(0.0));
        }
        for (i, (column, dx)) in columns.iter().zip(set).enumerate() {
            let dx = dx + whole.as_ref().map_or(0.0, |whole| whole[i]);
            row.dlogits[column.id] = E::from_f32((dx * column.slope) as f32);
        }
    }

    /// Computes the derivatives by the transformed logits of the set, of what is over the set.
    fn set_dlogits(
        &self,
        columns: &[SetColumn],
        ids: &TokenIds,
        scores: &KeptScores,
        grad: &RowGradients,
        grad_entropy: f64,
    ) -> Vec<f64> {
        let (logp, entropy) = (scores.logp_softmax, scores.entropy_softmax);
        let by_logit = entropy.inverse_temperature * self.transform.factor;
        let policy = by_logit / logp.end.sum;
        let bonus = unless_0(grad_entropy, by_logit / entropy.end.sum);
        let grads: Vec<(usize, f64)> = std::iter::once((ids.first, grad.logp))
            .chain(ids.others.iter().copied().zip(grad.others.iter().copied()))
            .collect();
        let sum =
            |of: &dyn Fn(usize) -> bool| -> f64 { grads.iter().filter(|(id, _)| of(*id)).map(|(_, grad)| grad).sum() };
        let column = |column: &SetColumn| {
            let e = (-logp.gap(column.logit)).exp();
            let (own, rest) = (sum(&|id| id == column.id), sum(&|id| id != column.id));
            // An id that is not the likeliest has a probability of at most ½, so that nothing cancels in `S − e`.
            let others = if column.id == scores.target { logp.end.others } else { logp.end.sum - e };
            let of_rest = if e == 0.0 { 0.0 } else { unless_0(rest, e) };
            let of_logp = unless_0(own, others) - of_rest;
            unless_0(of_logp, policy) + entropy_part(bonus, entropy.gap(column.logit), entropy.end.mean_gap)
        };
        columns.iter().map(column).collect()
    }

    /// Computes the derivatives by the transformed logits of the set, of what is over the vocabulary.
    fn dlogits_at(&self, columns: &[SetColumn], scores: &Scores, grad: &RowGradients) -> Vec<f64> {
        let softmax = &scores.logp_softmax;
        let exponent = softmax.exponent;
        let by_logit = exponent.inverse_temperature * self.transform.factor / softmax.end.sum;
        let (policy, bonus) = (unless_0(grad.logp, by_logit), unless_0(grad.entropy, by_logit));
        let column = |column: &SetColumn| {
            let gap = (f64::from(exponent.max) - column.logit) * exponent.inverse_temperature;
            let e = (-gap).exp();
            let of_logp = if column.id == scores.target {
                unless_0(policy, softmax.end.others)
            } else {
                -if e == 0.0 { 0.0 } else { unless_0(policy, e) }
            };
            of_logp + entropy_part(bonus, gap, softmax.end.mean_gap)
        };
        columns.iter().map(column).collect()
    }
}
