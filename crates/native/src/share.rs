//! The part of a batch that one of several devices computes. The caller weighs tokens, because only it knows the whole
//! batch, and joins the sums of a row whose columns are on several devices.
//!
//! ```text
//! whole rows    loss         read a row, write its dlogits, hand over the results of its token
//! shards of rows statistics  read
//!               gradient     from factors that follow from the statistics of all shards: read again and write
//! ```
//!
//! Per-token arrays are `[B,T]`. The arrays that are handed over are `[B,T,8]`, f32, with the columns named below; other columns
//! and masked tokens are 0. A column is rounded once from f64.
//!
//! In statistics and scales, a logit `x` is the transformed logit over the transform's [`rate`], which is a part of `1/T`; without
//! a transform it is the logit itself.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut3, Axis, s};

use super::{
    KeptSettings, LogitsRow, Native, NativeBatch, NativeElement, OutputCotangents, ReductionWeights, RowTransform,
    SoftmaxSettings, TokenEvaluation, expect_supported, rows_of, rows_of_mut,
};
use crate::row::DlogitsScales;
use crate::threads::{RowTask, over_threads};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::{StructuredSpec, TokenInput};
use assay_core::implementation::{RunError, Unsupported};
use assay_core::problem::{ProblemError, Sequence, check_kept_ids};
use assay_core::spec::{LossSpec, Support, Temperature};

/// Number of columns per token in the arrays that are handed over.
pub const COLUMNS: usize = 8;

/// The columns of [`Native::share_statistics`]: `m` and `x_y` of the shard, then `Σ e_j` and `Σ e_j a_j` over its
/// columns other than the target, `a_j = (m − x_j)/T`, of the softmax that entropy is of; then the same two sums of the
/// softmax of logp, if that is another. `x_y` is 0 if another shard has the target, and NaN if the target is outside
/// the spec's support.
pub const STATISTICS: [&str; 6] = ["max", "target_logit", "others", "weighted", "logp_others", "logp_weighted"];

/// The columns that [`Native::share_gradient`] reads: `m` of all shards, `−G/(S·T)`, `Σ e_j` of the softmax of logp, 1 or 0,
/// `E/(S·T)` and `ā`, with `G` and `E` the loss's derivatives by logp and by entropy.
pub const SCALES: [&str; 6] = ["max", "share", "others", "mask", "bonus", "mean_gap"];

/// The columns of [`Native::share_loss`]. `reduced` is the number that the reduction weighs: the token's loss, except
/// for a KL penalty with a reduction of its own; a clip is 1 or 0.
pub const RESULTS: [&str; COLUMNS] =
    ["logp", "entropy", "token_loss", "reduced", "ratio", "kl", "clipped_low", "clipped_high"];

/// Returns the factor of `1/T` between statistics and gradient.
pub use assay_algebra::transform::rate;

/// The columns of the vocabulary that a device has, with their bias and the rates of its rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct VocabShard<'a> {
    /// First column of the shard, counted in the whole vocabulary.
    pub first_column: usize,
    /// Bias of each column, `[V]`, if the spec reads one.
    pub bias: Option<ArrayView1<'a, f32>>,
    /// Factor [`TokenInput::Rate`] of each row's gaps, `[B,T]`, if temperatures are given.
    pub rates: Option<ArrayView2<'a, f32>>,
}

impl VocabShard<'_> {
    /// Counts `support` from the shard's first column.
    fn support(&self, support: &Support) -> Support {
        let first = self.first_column;
        Support {
            vocab: support.vocab.map(|vocab| vocab.saturating_sub(first)),
            excluded_ids: support.excluded_ids.iter().filter_map(|id| id.checked_sub(first)).collect(),
            keep_sampled: support.keep_sampled,
            kept: support.kept,
        }
    }

    /// Checks the bias of `vocab` columns, and returns it if the spec has one.
    fn bias(&self, spec: &LossSpec, vocab: usize) -> Result<Option<Array1<f64>>, ProblemError> {
        match self.bias {
            _ if !spec.logits.bias => Ok(None),
            None => {
                let because = "`logits.bias: true`";
                Err(ProblemError::Missing { field: "bias", expected: vec![vocab], because })
            }
            Some(bias) if bias.len() != vocab => {
                let expected = format!("[{vocab}]");
                Err(ProblemError::Shape { field: "bias", given: bias.shape().to_vec(), expected })
            }
            Some(bias) => Ok(Some(bias.mapv(f64::from))),
        }
    }

    /// Returns the factor of the gaps of the row at a position, if temperatures are given.
    fn rate(&self, at: (usize, usize)) -> Option<f64> {
        self.rates.map(|rates| rates[at].into())
    }

    /// Checks the rates of the rows that count.
    fn check_rates(
        &self,
        spec: &LossSpec,
        (batch, tokens): (usize, usize),
        counts: impl Fn((usize, usize)) -> bool,
    ) -> Result<(), ProblemError> {
        let rates = match self.rates {
            _ if spec.temperature != Temperature::Given => return Ok(()),
            None => {
                let because = "`temperature: given`";
                return Err(ProblemError::Missing { field: "rate", expected: vec![batch, tokens], because });
            }
            Some(rates) => rates,
        };
        if rates.dim() != (batch, tokens) {
            let expected = format!("[{batch}, {tokens}]");
            return Err(ProblemError::Shape { field: "rate", given: rates.shape().to_vec(), expected });
        }
        rates.indexed_iter().filter(|(at, _)| counts(*at)).try_for_each(|(at, &of_row)| check_rate(spec, at, of_row))
    }
}

/// Checks that a rate is that of a temperature `> 0`.
fn check_rate(spec: &LossSpec, (b, t): (usize, usize), of_row: f32) -> Result<(), ProblemError> {
    if of_row > 0.0 && of_row.is_finite() {
        return Ok(());
    }
    Err(ProblemError::Temperature { b, t, given: rate(spec) / f64::from(of_row) })
}

/// Whether a target in this column is refused: it is outside the support, and the spec does not put it back.
fn refused(support: &Support, column: usize) -> bool {
    let outside = support.vocab.is_some_and(|vocab| column >= vocab) || support.excluded_ids.contains(&column);
    outside && !support.keep_sampled
}

/// The tokens of a device's rows.
#[derive(Clone, Copy, Debug)]
pub struct ShareTokens<'a> {
    /// Sampled ids, counted from the device's first column; outside `0..V` if another device has the id, or if `mask`
    /// is false.
    pub ids: ArrayView2<'a, i32>,
    /// Mask of the tokens that count, `[B,T]`.
    pub mask: ArrayView2<'a, bool>,
}

/// The arrays from which the loss of whole rows follows, besides their logits.
#[derive(Clone, Debug)]
pub struct ShareInputs<'a> {
    /// Tokens, whose rows are whole.
    pub tokens: ShareTokens<'a>,
    /// Advantage of each token, `[B,T]`.
    pub advantages: ArrayView2<'a, f32>,
    /// Weights `[B,T,3]` of each token: the factor of its loss; the factor of its KL penalty before that, if the
    /// penalty has its own reduction; and `∂loss/∂entropy`, or the factor of the input `dentropy` if there is one.
    pub weights: ArrayView3<'a, f32>,
    /// Number of each token's sequence, `[B,T]`, if a row has several: ascending from any number ≥ 1, 0 if the token
    /// belongs to no sequence.
    pub segment_ids: Option<ArrayView2<'a, i32>>,
    /// Arrays that the spec's structure reads, `[B,T]` each, in its order.
    pub inputs: Vec<(TokenInput, ArrayView2<'a, f32>)>,
    /// Bias of each column, `[V]`, if the spec has one.
    pub bias: Option<ArrayView1<'a, f32>>,
    /// Kept set of each token, `[B,T,K]`, if the spec has them.
    pub kept_ids: Option<ArrayView3<'a, i32>>,
}

/// The logits and the dlogits of a device: one array, or two.
#[derive(Debug)]
pub struct ShareLogits<'a, E> {
    /// Logits, `[B,T,V]`; `None` if dlogits overwrite them.
    pub logits: Option<ArrayView3<'a, E>>,
    /// Array for dlogits, `[B,T,V]`, of the dtype of the logits.
    pub dlogits: ArrayViewMut3<'a, E>,
}

impl<E: NativeElement> ShareLogits<'_, E> {
    fn rows(&mut self) -> Vec<LogitsRow<'_, E>> {
        match &self.logits {
            None => rows_of_mut(&mut self.dlogits).map(|dlogits| LogitsRow { logits: None, dlogits }).collect(),
            Some(logits) => {
                let logits = rows_of(logits);
                let dlogits = rows_of_mut(&mut self.dlogits);
                dlogits.zip(logits).map(|(dlogits, logits)| LogitsRow { logits: Some(logits), dlogits }).collect()
            }
        }
    }
}

/// Returns the column of an id, if it is among `vocab`.
fn column(id: i32, vocab: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|&id| id < vocab)
}

impl Native {
    /// Computes the statistics of a device's shard of rows, [`STATISTICS`] of each row, and writes them to
    /// `statistics`.
    ///
    /// Arrays are dense and of one batch.
    ///
    /// # Errors
    /// [`RunError`] where the kernel does not do `spec`, or the bias or the rate of an unmasked token does not fit.
    pub fn share_statistics<E: NativeElement>(
        &self,
        spec: &LossSpec,
        part: VocabShard,
        logits: ArrayView3<E>,
        tokens: ShareTokens,
        statistics: ArrayViewMut3<f32>,
    ) -> Result<(), RunError> {
        // The support and the ids are counted from the shard's first column.
        self.expect_no_kept(spec)?;
        let softmaxes = self.softmaxes::<E>(spec, logits.dim(), part)?;
        let support = part.support(&spec.support);
        let (batch, length, vocab) = logits.dim();
        part.check_rates(spec, (batch, length), |at| tokens.mask[at])?;
        let of_row = |at, row, to: &mut [f32; COLUMNS]| {
            *to = [0.0; COLUMNS];
            if tokens.mask[at] {
                // A target on another shard is no column here; its logit is 0, so that a sum over shards finds it.
                let target = column(tokens.ids[at], vocab);
                let mut of_row = softmaxes.statistics(row, target, part.rate(at).unwrap_or(softmaxes.rate));
                if target.is_some_and(|target| refused(&support, target)) {
                    of_row.target_logit = f64::NAN;
                }
                let columns = [of_row.max, of_row.target_logit].into_iter().chain(of_row.entropy).chain(of_row.logp);
                to.iter_mut().zip(columns).for_each(|(to, column)| *to = column as f32);
            }
        };
        let of_row = &of_row;
        // Rows over threads, each with the eight numbers that it fills.
        let rows = rows_of(&logits).into_iter().zip(columns_of(statistics)).enumerate();
        over_threads(
            rows.map(|(i, (row, to))| RowTask::new(row.len(), move |_| of_row((i / length, i % length), row, to))),
        );
        Ok(())
    }

    /// Writes the dlogits of a device's shard of rows, from [`SCALES`].
    ///
    /// # Errors
    /// As [`Native::share_statistics`]; nothing is written then.
    pub fn share_gradient<E: NativeElement>(
        &self,
        spec: &LossSpec,
        part: VocabShard,
        mut place: ShareLogits<E>,
        ids: ArrayView2<i32>,
        scales: ArrayView3<f32>,
    ) -> Result<(), RunError> {
        let (batch, length, vocab) = place.dlogits.dim();
        self.expect_no_kept(spec)?;
        let softmaxes = self.softmaxes::<E>(spec, (batch, length, vocab), part)?;
        // Column 3 of the scales is the mask: a masked token's rate may be anything, and is not checked.
        part.check_rates(spec, (batch, length), |(b, t)| scales[[b, t, 3]] > 0.0)?;
        let of_row = |at: (usize, usize), mut row: LogitsRow<E>| {
            // The factors follow from the statistics of all shards, which the caller has joined: no sum is made
            // here, and a shard needs no column of another.
            let of_row = scales.index_axis(Axis(0), at.0);
            let [max, share, others, mask, bonus, mean_gap] = std::array::from_fn(|k| f64::from(of_row[[at.1, k]]));
            if mask > 0.0 {
                let scales = DlogitsScales { max, share, others, bonus, mean_gap };
                softmaxes.write_part(&mut row, column(ids[at], vocab), scales, part.rate(at).unwrap_or(softmaxes.rate));
            } else {
                row.dlogits.fill(E::from_f32(0.0));
            }
        };
        let of_row = &of_row;
        let rows = place.rows().into_iter().enumerate();
        over_threads(
            rows.map(|(i, row)| RowTask::new(row.dlogits.len(), move |_| of_row((i / length, i % length), row))),
        );
        Ok(())
    }

    /// Computes the loss of whole rows, writes their dlogits, and [`RESULTS`] of each token to `results`.
    ///
    /// # Errors
    /// [`RunError`] where an unmasked token has an id outside the vocabulary or the support, is of no sequence or has no finite number
    /// in an array or no temperature `> 0`, where sequences do not lie one after another, the bias does not fit or the kernel does not
    /// do `spec`; nothing is written then.
    pub fn share_loss<E: NativeElement>(
        &self,
        spec: &LossSpec,
        mut place: ShareLogits<E>,
        weighed: &ShareInputs,
        results: ArrayViewMut3<f32>,
    ) -> Result<(), RunError> {
        let dim = place.dlogits.dim();
        self.with_batch::<E>(spec, dim, weighed, results, |batch| batch.write_dlogits(place.rows()))
    }

    /// Computes the loss of whole rows, [`RESULTS`] of each token, and no dlogits.
    ///
    /// # Errors
    /// As [`Native::share_loss`].
    pub fn share_loss_forward<E: NativeElement>(
        &self,
        spec: &LossSpec,
        logits: ArrayView3<E>,
        weighed: &ShareInputs,
        results: ArrayViewMut3<f32>,
    ) -> Result<(), RunError> {
        self.with_batch::<E>(spec, logits.dim(), weighed, results, |batch| batch.evaluated_rows(&rows_of(&logits)))
    }

    /// Makes a batch of what a device is given besides logits, and writes [`RESULTS`] of the evaluations that `evaluate` returns.
    fn with_batch<E: NativeElement>(
        &self,
        spec: &LossSpec,
        dim: (usize, usize, usize),
        weighed: &ShareInputs,
        results: ArrayViewMut3<f32>,
        evaluate: impl FnOnce(&NativeBatch) -> Array2<Option<TokenEvaluation>>,
    ) -> Result<(), RunError> {
        let (.., vocab) = dim;
        let softmaxes = self.softmaxes::<E>(spec, dim, VocabShard { bias: weighed.bias, ..VocabShard::default() })?;
        weighed.check(spec, vocab)?;
        // From here on the batch is as any other, but for its weights, which the caller has computed.
        let sequences = weighed.sequences()?;
        let ShareInputs { tokens: ShareTokens { ids, mask }, advantages, weights, inputs, .. } = weighed;
        let wide = |array: &ArrayView2<f32>| array.mapv(f64::from);
        let [policy, kl_share, entropy] = [0, 1, 2].map(|i| wide(&weights.index_axis(Axis(2), i)));
        let ids = ids.mapv(i64::from);
        let dentropy = inputs.iter().find(|(input, _)| *input == TokenInput::Dentropy).map(|(_, values)| wide(values));
        let batch = NativeBatch {
            spec,
            structure: StructuredSpec::new(spec).structure,
            softmaxes,
            ids: &ids,
            others: None,
            kept: weighed.kept_ids.and_then(|ids| Some((ids, KeptSettings::from_spec(spec)?))),
            // The caller adds up losses.
            advantage_of_rows: vec![0.0; sequences.len()],
            sequences,
            advantage: wide(advantages),
            kernel_inputs: KernelInputs {
                mask: mask.to_owned(),
                inputs: inputs.iter().map(|(input, values)| (*input, wide(values))).collect(),
            },
            weights: ReductionWeights {
                kl: &policy * kl_share,
                policy,
                entropy: match dentropy {
                    Some(dentropy) => entropy * dentropy,
                    None => entropy,
                },
            },
            // They are in the weights.
            cotangents: OutputCotangents::default(),
        };
        // The eight results of each token, 0 if it is masked.
        columns_of(results).zip(&evaluate(&batch)).for_each(|(to, evaluated)| {
            *to = evaluated.as_ref().map_or([0.0; COLUMNS], |TokenEvaluation { token, logp, entropy, .. }| {
                let clipped = [token.clipped_low, token.clipped_high].map(|clipped| f64::from(u8::from(clipped)));
                let numbers = [*logp, *entropy, token.loss, token.reduced, token.ratio, token.kl.unwrap_or(0.0)];
                let [logp, entropy, loss, reduced, ratio, kl] = numbers.map(|x| x as f32);
                let [low, high] = clipped.map(|x| x as f32);
                [logp, entropy, loss, reduced, ratio, kl, low, high]
            });
        });
        Ok(())
    }

    /// Checks that the softmax is over the same columns for all tokens: a shard knows no set of a token.
    fn expect_no_kept(&self, spec: &LossSpec) -> Result<(), Unsupported> {
        use assay_core::implementation::Implementation as _;
        if !spec.reads_kept_ids() {
            return Ok(());
        }
        let supported = "none where columns are cut over devices".into();
        let given = "given".into();
        Err(Unsupported { implementation: self.id().into(), field: "support.kept", given, supported })
    }

    fn softmaxes<E: NativeElement>(
        &self,
        spec: &LossSpec,
        (.., vocab): (usize, usize, usize),
        part: VocabShard,
    ) -> Result<SoftmaxSettings, RunError> {
        use assay_core::implementation::Implementation as _;
        expect_supported(self.id(), "logits dtype", spec, E::DTYPE, 1)?;
        if spec.ids_per_token > 1 {
            let supported = "1: one id a token is handed over".into();
            let implementation = self.id().into();
            return Err(Unsupported {
                implementation,
                field: "ids_per_token",
                given: spec.ids_per_token.to_string(),
                supported,
            }
            .into());
        }
        // A shard has its own columns of the bias, and its own part of the support: ids are counted from its first
        // column.
        let bias = part.bias(spec, vocab)?;
        let of_part = LossSpec { support: part.support(&spec.support), ..spec.clone() };
        Ok(SoftmaxSettings::new(spec, self.isa, RowTransform::new::<E>(&of_part, bias.as_ref(), vocab)))
    }
}

impl ShareInputs<'_> {
    /// Lists the sequences of each row, in order.
    fn sequences(&self) -> Result<Vec<Sequence>, ProblemError> {
        let mask = self.tokens.mask;
        // Without numbers every row is a sequence.
        let Some(ids) = self.segment_ids else {
            let rows = 0..mask.nrows();
            return Ok(rows.map(|row| Sequence { index: row, row, tokens: 0..mask.ncols() }).collect());
        };
        // Numbers must ascend along a row; padding has the number 0.
        let mut all: Vec<Sequence> = vec![];
        for (row, ids) in ids.rows().into_iter().enumerate() {
            let mut last = 0;
            for (t, &id) in ids.iter().enumerate() {
                let wrong = |expected: String| ProblemError::SegmentId { t, given: id.into(), expected };
                if id == 0 {
                    if mask[[row, t]] {
                        return Err(wrong("a sequence's number, 1 or more, on an unmasked token".into()));
                    }
                } else if id < last {
                    return Err(wrong(format!(
                        "at least {last}, that of a token before it: sequences lie one after another"
                    )));
                } else if let Some(sequence) = all.last_mut().filter(|_| id == last) {
                    sequence.tokens.end = t + 1;
                } else {
                    last = id;
                    all.push(Sequence { index: all.len(), row, tokens: t..t + 1 });
                }
            }
        }
        Ok(all)
    }

    fn check(&self, spec: &LossSpec, vocab: usize) -> Result<(), ProblemError> {
        let ShareTokens { ids, mask } = self.tokens;
        let kept = if spec.reads_kept_ids() {
            let (batch, tokens) = mask.dim();
            let kept = self.kept_ids.ok_or(ProblemError::NoKeptIds { batch, tokens })?;
            check_kept_ids(kept, mask, vocab)?;
            Some(kept).filter(|_| !spec.support.keep_sampled)
        } else {
            None
        };
        // Only unmasked tokens are checked: others may hold anything.
        for ((b, t), _) in mask.indexed_iter().filter(|(_, counts)| **counts) {
            let id = ids[[b, t]].into();
            let Some(target) = column(ids[[b, t]], vocab) else {
                return Err(ProblemError::IdOutOfRange { b, t, k: None, id, vocab });
            };
            if refused(&spec.support, target) {
                return Err(ProblemError::IdOutsideSupport { b, t, k: None, id });
            }
            if kept.is_some_and(|kept| !kept.slice(s![b, t, ..]).iter().any(|kept| *kept == ids[[b, t]])) {
                return Err(ProblemError::IdOutsideKept { b, t, k: None, id });
            }
            if let Some((_, rates)) = self.inputs.iter().find(|(input, _)| *input == TokenInput::Rate) {
                check_rate(spec, (b, t), rates[[b, t]])?;
            }
            let arrays = self.inputs.iter().map(|(input, values)| (input.name(), values));
            // NaN is how a sampler says that it did not score a token.
            let arrays = arrays.filter(|(field, _)| {
                ![TokenInput::Behaviour, TokenInput::RolloutLogp].map(TokenInput::name).contains(field)
            });
            for (field, values) in arrays.chain([("advantages", &self.advantages)]) {
                if !values[[b, t]].is_finite() {
                    return Err(ProblemError::NotFinite { field, b, t, given: values[[b, t]].into() });
                }
            }
        }
        Ok(())
    }
}

/// Splits a dense `[B,T,8]` into the columns of each token.
fn columns_of(array: ArrayViewMut3<'_, f32>) -> impl Iterator<Item = &mut [f32; COLUMNS]> {
    array.into_slice().expect("dense").as_chunks_mut::<COLUMNS>().0.iter_mut()
}
