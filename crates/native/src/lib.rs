//! The CPU kernel: rows of logits over threads. Each row is read from memory once and its dlogits are written once; if tokens share
//! a ratio, rows are read twice.
//!
//! Arithmetic: elements are f32, sixteen at a time ([`Isa`]); sums are f32 over a few columns and f64 over the rest; work that is
//! done once per token is in f64; outputs are rounded once. Rows are independent, and sums over tokens are in their order, so
//! results have the same bits for any number of threads, in place or not, and on every instruction set. Dlogits below the normal
//! numbers of f32, 1.2e-38, are 0.
//!
//! Extra memory is one f32 row per thread. Logits of masked tokens are not read, nor those outside of kept sets if all that is asked
//! for is over the sets; these are gathered and computed in f64.

#![allow(clippy::inline_always, reason = "what is generic over a vector unit must be inlined to be compiled for it")]

pub mod bandwidth;
mod cotangents;
mod divergence;
mod divergence_op;
mod lm_head;
pub mod op;
pub mod products;
mod row;
pub mod share;
mod threads;
mod top_divergence;

use ndarray::{Array2, Array3, ArrayView3, ArrayViewMut3, arr0, s};

use assay_algebra::family::KernelScope;
use assay_algebra::loss::{LossEvaluator, ScoredToken, TokenEvaluation};
use assay_algebra::reduction::{self, ReductionWeights};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::{ObjectiveForm, Structure, StructuredSpec, TokenInput};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{
    Candidate, Dtype, FloatArray, Metrics, OtherIds, Outcome, Problem, ProblemError, Sequence, Shape, Tokens,
    kept_entries,
};
use assay_core::spec::{Averaging, LossSpec, Objective, Reduction};
pub use assay_simd::{Isa, gemm};
pub use cotangents::OutputCotangents;
pub use divergence::{NativeDivergence, NativeDivergences, NativeTeacher};
pub use divergence_op::{DivergenceOp, OpTeacher};
pub use lm_head::{HeadDerivatives, NativeHead, NativeHeadGradients};
pub use row::NativeElement;
use row::{
    KeptSettings, KeptToken, LogitsRow, RowGradients, RowTransform, SavedExponentials, SoftmaxSettings, TokenIds,
    TokenScores,
};
use threads::{RowTask, over_threads};

/// The CPU kernel, on one instruction set. See [the module](self).
///
/// ```
/// use assay_core::implementation::Implementation;
/// use assay_core::problem::{Advantages, Extra, Problem};
/// use assay_core::spec::LossSpec;
/// use assay_native::Native;
/// use ndarray::{Array3, arr1, arr2, s};
///
/// // One sequence of two tokens over four ids; the second token is masked.
/// let logits = Array3::from_shape_vec((1, 2, 4), vec![2.0_f32, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
/// let problem = Problem {
/// logits: logits.into(),
/// ids: arr2(&[[0, 3]]),
/// mask: arr2(&[[true, false]]),
/// advantages: Advantages::Sequence(arr1(&[1.0])),
/// old_logp: Some(arr2(&[[-0.44, 0.0]])),
/// ref_logp: None,
/// extra: Extra::default(),
/// };
/// let candidate = Native::default().run(&LossSpec::default(), problem, 1).unwrap();
/// // Dlogits of a token add up to 0, and those of a masked token are 0.
/// let dlogits = candidate.gradient.to_f64();
/// assert!(dlogits.slice(s![0, 0, ..]).sum().abs() < 1e-6);
/// assert_eq!(dlogits.slice(s![0, 1, ..]).sum(), 0.0);
/// ```
pub struct Native {
    isa: Isa,
}

/// The outputs of the CPU kernel besides dlogits. Those of masked tokens are 0.
#[derive(Clone, Debug)]
pub struct NativeOutputs {
    /// The loss of the batch.
    pub loss: f32,
    /// Log-probability of each sampled token, `[B,T]`, nats.
    pub logp: Array2<f32>,
    /// Log-probabilities of each token's other ids, `[B,T,K−1]`, nats, if the spec asks for several ids per token.
    pub logp_of_others: Option<Array3<f32>>,
    /// Entropy of each token's distribution, `[B,T]`, nats.
    pub entropy: Array2<f32>,
    /// Loss of each token before the reduction, `[B,T]`.
    pub token_loss: Array2<f32>,
    /// Metrics that trainers log, means over unmasked tokens.
    pub metrics: Metrics,
}

/// Logp and entropy of a batch, `[B,T]`, nats. Those of masked tokens are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct LogpEntropy {
    /// Log-probability of each sampled token.
    pub logp: Array2<f32>,
    /// Log-probabilities of each token's other ids, `[B,T,K−1]`, nats, if the spec asks for several ids per token.
    pub logp_of_others: Option<Array3<f32>>,
    /// Entropy of each token's distribution.
    pub entropy: Array2<f32>,
}

impl NativeOutputs {
    /// Joins the outputs with the gradient that belongs to them.
    fn with_gradient<G>(self, gradient: G) -> Outcome<G> {
        Outcome {
            loss: arr0(self.loss).into(),
            logp: self.logp.into(),
            logp_of_others: self.logp_of_others.map(Into::into),
            entropy: self.entropy.into(),
            token_loss: self.token_loss.into(),
            gradient,
            metrics: self.metrics,
        }
    }
}

impl Default for Native {
    fn default() -> Self {
        Self::on(Isa::fastest())
    }
}

impl Native {
    /// Creates the kernel on the instruction set `isa`.
    pub fn on(isa: Isa) -> Self {
        Self { isa }
    }

    /// Returns the instruction set of the kernel.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes logp and entropy without a loss. It reads the logits of unmasked tokens once and writes nothing.
    ///
    /// Logits are `[B,T,V]` with rows anywhere, each of them dense.
    ///
    /// # Errors
    /// [`RunError`] where the logits or the tokens do not fit each other or `spec`, or the kernel does not do it.
    pub fn forward<E: NativeElement>(
        &self,
        spec: &LossSpec,
        logits: ArrayView3<E>,
        tokens: Tokens,
    ) -> Result<LogpEntropy, RunError> {
        let batch = self.batch::<E>(spec, logits.dim(), logits.strides()[2], tokens, OutputCotangents::default())?;
        Ok(batch.forward(&rows_of(&logits)))
    }

    /// Computes the loss without its gradient. It reads the logits of unmasked tokens once, and its bits are those of
    /// the loss with a gradient.
    ///
    /// # Errors
    /// As [`Native::forward`].
    pub fn evaluate<E: NativeElement>(
        &self,
        spec: &LossSpec,
        logits: ArrayView3<E>,
        tokens: Tokens,
    ) -> Result<NativeOutputs, RunError> {
        let batch = self.batch::<E>(spec, logits.dim(), logits.strides()[2], tokens, OutputCotangents::default())?;
        Ok(batch.evaluate(&rows_of(&logits)))
    }

    /// Computes the loss and writes dlogits over the logits.
    ///
    /// Logits are `[B,T,V]` with rows anywhere, each of them dense.
    ///
    /// # Errors
    /// As [`Native::forward`], or where `cotangents` do not fit; the logits are then as they were.
    pub fn forward_backward_in_place<E: NativeElement>(
        &self,
        spec: &LossSpec,
        mut logits: ArrayViewMut3<E>,
        tokens: Tokens,
        cotangents: OutputCotangents,
    ) -> Result<NativeOutputs, RunError> {
        let batch = self.batch::<E>(spec, logits.dim(), logits.strides()[2], tokens, cotangents)?;
        let rows = rows_of_mut(&mut logits).map(|dlogits| LogitsRow { logits: None, dlogits });
        Ok(batch.forward_backward(rows.collect()))
    }

    /// Computes the loss and writes dlogits to a separate array of the same extents.
    ///
    /// Both are `[B,T,V]` with rows anywhere, each of them dense.
    ///
    /// # Errors
    /// As [`Native::forward_backward_in_place`], or where `dlogits` do not fit; they are then as they were.
    pub fn forward_backward<E: NativeElement>(
        &self,
        spec: &LossSpec,
        logits: ArrayView3<E>,
        mut dlogits: ArrayViewMut3<E>,
        tokens: Tokens,
        cotangents: OutputCotangents,
    ) -> Result<NativeOutputs, RunError> {
        let batch = self.batch::<E>(spec, logits.dim(), logits.strides()[2], tokens, cotangents)?;
        if dlogits.dim() != logits.dim() {
            let expected = format!("{:?}, that of the logits", logits.shape());
            return Err(ProblemError::Shape { field: "dlogits", given: dlogits.shape().to_vec(), expected }.into());
        }
        expect_dense_rows("dlogits", dlogits.dim(), dlogits.strides()[2])?;
        let logits = rows_of(&logits);
        let rows = rows_of_mut(&mut dlogits)
            .zip(&logits)
            .map(|(dlogits, &logits)| LogitsRow { logits: Some(logits), dlogits });
        Ok(batch.forward_backward(rows.collect()))
    }

    /// Checks the inputs and prepares the batch.
    fn batch<'s, E: NativeElement>(
        &self,
        spec: &'s LossSpec,
        dim: (usize, usize, usize),
        stride: isize,
        tokens: Tokens<'s>,
        cotangents: OutputCotangents<'s>,
    ) -> Result<NativeBatch<'s>, RunError> {
        let (batch, length, vocab) = dim;
        let shape = Shape { batch, tokens: length, vocab };
        // Shapes and values, then what this kernel computes.
        tokens.check(spec, shape)?;
        expect_dense_rows("logits", dim, stride)?;
        expect_supported(self.id(), "logits dtype", spec, E::DTYPE, 1)?;
        cotangents.check([batch, length])?;
        Ok(NativeBatch::new::<E>(spec, self.isa, tokens, vocab, cotangents))
    }
}

fn expect_dense_rows(field: &'static str, dim: (usize, usize, usize), stride: isize) -> Result<(), ProblemError> {
    if stride == 1 || dim.2 == 1 { Ok(()) } else { Err(ProblemError::StridedRows { field, stride }) }
}

/// Lists the rows of logits, in order; each is dense.
fn rows_of<'l, E>(logits: &'l ArrayView3<E>) -> Vec<&'l [E]> {
    logits.rows().into_iter().map(|row| row.to_slice().expect("checked: dense")).collect()
}

fn rows_of_mut<'l, E>(logits: &'l mut ArrayViewMut3<E>) -> impl Iterator<Item = &'l mut [E]> {
    logits.rows_mut().into_iter().map(|row| row.into_slice().expect("checked: dense"))
}

impl Implementation for Native {
    fn id(&self) -> &'static str {
        "native"
    }

    fn summary(&self) -> &'static str {
        "CPU, f32 elements and f64 sums, rows over threads, dlogits in place"
    }

    fn class(&self) -> &'static str {
        "native"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn isa(&self) -> Option<&'static str> {
        Some(self.isa.name())
    }

    fn supports(&self, spec: &LossSpec, _: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        if spec.reads_teacher() {
            return expect_dtype(self.id(), "logits dtype", dtype, devices);
        }
        expect_supported(self.id(), "logits dtype", spec, dtype, devices)
    }

    fn takes_packed(&self) -> bool {
        true
    }

    /// Returns the bytes of one f32 row per thread.
    fn host_bytes(&self, shape: Shape, _: Dtype) -> usize {
        rayon::current_num_threads() * size_of::<f32>() * shape.vocab
    }

    fn run(&self, spec: &LossSpec, mut problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        self.supports(spec, shape, problem.logits.dtype(), devices)?;
        if spec.reads_teacher() {
            return self.run_divergence(spec, problem);
        }
        // The problem's logits become dlogits in place.
        let mut logits = std::mem::replace(&mut problem.logits, FloatArray::F32(Array3::default((0, 0, 0))));
        let (tokens, from_loss) = (problem.tokens(), OutputCotangents::default());
        let evaluation = match &mut logits {
            FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
            FloatArray::F32(logits) => self.forward_backward_in_place(spec, logits.view_mut(), tokens, from_loss)?,
            FloatArray::Bf16(logits) => self.forward_backward_in_place(spec, logits.view_mut(), tokens, from_loss)?,
            FloatArray::F16(logits) => self.forward_backward_in_place(spec, logits.view_mut(), tokens, from_loss)?,
        };
        Ok(evaluation.with_gradient(logits).into())
    }
}

/// Checks that the CPU kernels compute `spec` on inputs of `dtype`, which errors call `field`, on so many devices.
fn expect_supported(
    id: &str,
    field: &'static str,
    spec: &LossSpec,
    dtype: Dtype,
    devices: usize,
) -> Result<(), Unsupported> {
    expect_dtype(id, field, dtype, devices)?;
    KernelScope::AnyRow.expect(spec).map_err(|setting| Unsupported {
        implementation: id.into(),
        field: setting.field,
        given: setting.given,
        supported: setting.supported.into(),
    })
}

/// Checks that the CPU kernels take inputs of `dtype`, which errors call `field`, on so many devices.
fn expect_dtype(id: &str, field: &'static str, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
    let unsupported = |field, given, supported: &str| {
        Err(Unsupported { implementation: id.into(), field, given, supported: supported.into() })
    };
    if dtype == Dtype::F64 {
        return unsupported(field, dtype.to_string(), "f32, bf16 and f16");
    }
    if devices != 1 {
        return unsupported("device count", devices.to_string(), "1");
    }
    Ok(())
}

/// Position `(b, t)` of a token in the batch.
type TokenPlace = (usize, usize);

/// A problem whose inputs were checked, without its logits.
struct NativeBatch<'s> {
    spec: &'s LossSpec,
    structure: Structure,
    softmaxes: SoftmaxSettings,
    ids: &'s Array2<i64>,
    others: Option<&'s OtherIds>,
    /// The kept sets, `[B,T,K]`, if the spec has them, and what is not over them.
    kept: Option<(ArrayView3<'s, i32>, KeptSettings)>,
    sequences: Vec<Sequence>,
    advantage: Array2<f64>,
    /// Advantage of each sequence, also of one without an unmasked token.
    advantage_of_rows: Vec<f64>,
    kernel_inputs: KernelInputs,
    weights: ReductionWeights,
    cotangents: OutputCotangents<'s>,
}

impl<'s> NativeBatch<'s> {
    /// Prepares a batch for rows of `vocab` elements `E`.
    fn new<E: NativeElement>(
        spec: &'s LossSpec,
        isa: Isa,
        tokens: Tokens<'s>,
        vocab: usize,
        cotangents: OutputCotangents<'s>,
    ) -> Self {
        // Everything that rows share is computed once, before the first row is read.
        let transform = RowTransform::new::<E>(spec, tokens.extra.bias.as_ref(), vocab);
        let loss @ StructuredSpec { structure, .. } = StructuredSpec::new(spec);
        // Rejections and weights against the sampler depend on no logit, so that they are final before the walk over
        // rows.
        let kernel_inputs = KernelInputs::new(loss, &tokens);
        let sequences = tokens.sequences();
        Self {
            spec,
            structure,
            // The settings fix whether a row needs a second softmax, and whether it may have an entropy gradient: a
            // cotangent of entropy brings one even where the loss has no bonus.
            softmaxes: SoftmaxSettings::new(spec, isa, transform).with_entropy_cotangents(cotangents.entropy.is_some()),
            ids: tokens.ids,
            kept: tokens.extra.kept_ids.as_ref().and_then(|ids| Some((ids.view(), KeptSettings::from_spec(spec)?))),
            others: tokens.extra.others.as_ref(),
            advantage_of_rows: sequences.iter().map(|sequence| tokens.advantage_of(sequence)).collect(),
            sequences,
            advantage: tokens.advantages_of_tokens(),
            weights: ReductionWeights::new(spec, &kernel_inputs, &tokens.extra.sequences),
            kernel_inputs,
            cotangents,
        }
    }

    /// Returns the position of the token of the `i`th row.
    fn place(&self, i: usize) -> TokenPlace {
        (i / self.ids.ncols(), i % self.ids.ncols())
    }

    fn forward<E: NativeElement>(&self, rows: &[&[E]]) -> LogpEntropy {
        self.logp_and_entropy(&self.scores(rows.iter().enumerate().map(|(i, row)| (self.place(i), *row))))
    }

    fn logp_and_entropy(&self, scores: &[Option<TokenScores>]) -> LogpEntropy {
        let per_token = |value: fn(&TokenScores) -> f64| {
            let values = scores.iter().map(|scores| scores.as_ref().map_or(0.0, value) as f32).collect();
            Array2::from_shape_vec(self.ids.dim(), values).expect("one entry a token")
        };
        let there = scores.iter().enumerate().filter_map(|(i, scores)| Some((self.place(i), scores.as_ref()?)));
        LogpEntropy {
            logp: per_token(TokenScores::logp),
            logp_of_others: self.other_ids_array(there.map(|(at, scores)| (at, scores.logp_of_others().collect()))),
            entropy: per_token(TokenScores::entropy),
        }
    }

    /// Gathers values of the other ids of tokens into `[B,T,K−1]`, 0 elsewhere; `None` if tokens have no other ids.
    fn other_ids_array(&self, tokens: impl Iterator<Item = (TokenPlace, Vec<f64>)>) -> Option<Array3<f32>> {
        let (batch, length) = self.ids.dim();
        let mut all = Array3::zeros((batch, length, self.others?.count()));
        for ((b, t), values) in tokens {
            values.iter().enumerate().for_each(|(k, value)| all[[b, t, k]] = *value as f32);
        }
        Some(all)
    }

    /// Evaluates the batch without writing dlogits.
    fn evaluate<E: NativeElement>(&self, rows: &[&[E]]) -> NativeOutputs {
        self.evaluation(&self.evaluated_rows(rows))
    }

    /// Returns the evaluation of each token, `[B,T]`, without writing dlogits.
    fn evaluated_rows<E: NativeElement>(&self, rows: &[&[E]]) -> Array2<Option<TokenEvaluation>> {
        let scores = self.scores(rows.iter().enumerate().map(|(i, row)| (self.place(i), *row)));
        self.by_place(self.evaluated(&scores))
    }

    /// Arranges the evaluations of all tokens as `[B,T]`.
    fn by_place(&self, evaluated: Vec<Option<(TokenScores, TokenEvaluation)>>) -> Array2<Option<TokenEvaluation>> {
        let evaluated = evaluated.into_iter().map(|token| token.map(|(_, evaluated)| evaluated)).collect();
        Array2::from_shape_vec(self.ids.dim(), evaluated).expect("one entry a token")
    }

    /// Evaluates the batch and writes dlogits.
    fn forward_backward<E: NativeElement>(&self, rows: Vec<LogitsRow<E>>) -> NativeOutputs {
        self.evaluation(&self.write_dlogits(rows))
    }

    /// Writes dlogits and returns the evaluation of each token, `[B,T]`.
    fn write_dlogits<E: NativeElement>(&self, rows: Vec<LogitsRow<E>>) -> Array2<Option<TokenEvaluation>> {
        // Tokens that share a ratio: all rows are scored before any is written, so that logits are read twice.
        let place = |(i, row)| (self.place(i), row);
        if self.structure.couples_rows() {
            let scores = self.scores(rows.iter().map(LogitsRow::logits).enumerate().map(place));
            let evaluated = self.evaluated(&scores);
            self.write_rows(
                rows.into_iter()
                    .zip(&evaluated)
                    .enumerate()
                    .map(|(i, (row, evaluated))| (evaluated.as_ref(), self.place(i), row)),
            );
            self.by_place(evaluated)
        } else {
            let evaluated = self.score_and_write(rows.into_iter().enumerate().map(|(i, row)| (self.place(i), row)));
            Array2::from_shape_vec(self.ids.dim(), evaluated).expect("one entry a token")
        }
    }

    /// Scores rows, each with its position; masked rows are not read.
    fn scores<'r, E: NativeElement>(
        &self,
        rows: impl Iterator<Item = (TokenPlace, &'r [E])>,
    ) -> Vec<Option<TokenScores>> {
        let score = |at, row| self.score(at, row);
        let score = &score;
        over_threads(
            rows.map(|(at, row)| RowTask::new(row.len(), move |_| self.kernel_inputs.mask[at].then(|| score(at, row)))),
        )
    }

    /// Evaluates the loss of every token from the scores of all tokens.
    fn evaluated(&self, scores: &[Option<TokenScores>]) -> Vec<Option<(TokenScores, TokenEvaluation)>> {
        let loss = self.loss();
        let of_token = |(b, t): TokenPlace| scores[b * self.ids.ncols() + t].clone();
        let mut all: Vec<Option<(TokenScores, TokenEvaluation)>> = scores.iter().map(|_| None).collect();
        // Sequence by sequence, since tokens of one may share a ratio.
        for sequence in &self.sequences {
            let there = sequence.places().filter_map(|at| Some((at, of_token(at)?)));
            let scored = |(at, scores): (TokenPlace, TokenScores)| {
                let scored = self.scored(at, &scores);
                ((at, scores), scored)
            };
            let (places, there): (Vec<(TokenPlace, TokenScores)>, Vec<ScoredToken>) = there.map(scored).unzip();
            let evaluated = loss.evaluate(&there, |input, at| self.input(input, at).expect("the structure reads it"));
            for ((at @ (b, t), scores), mut evaluated) in places.into_iter().zip(evaluated) {
                evaluated.add_others(scores.logp_of_others().zip(self.dlogp_of_others(at)));
                all[b * self.ids.ncols() + t] = Some((scores, evaluated));
            }
        }
        all
    }

    /// Writes the dlogits of rows whose loss is known, and zeros for masked tokens.
    fn write_rows<'r, E: NativeElement>(
        &self,
        rows: impl Iterator<Item = (Option<&'r (TokenScores, TokenEvaluation)>, TokenPlace, LogitsRow<'r, E>)>,
    ) {
        over_threads(rows.map(|(evaluated, at, mut row)| {
            RowTask::new(row.dlogits.len(), move |_| match evaluated {
                Some((scores, evaluated)) => self.write(&mut row, at, None, scores, evaluated),
                None => row.dlogits.fill(E::from_f32(0.0)),
            })
        }));
    }

    /// Scores rows and writes their dlogits in one step each, for losses in which no token depends on another.
    fn score_and_write<'r, E: NativeElement>(
        &self,
        rows: impl Iterator<Item = (TokenPlace, LogitsRow<'r, E>)>,
    ) -> Vec<Option<TokenEvaluation>> {
        let loss = self.loss();
        let both = |at: TokenPlace, mut row: LogitsRow<E>, saved: &mut SavedExponentials| {
            if !self.kernel_inputs.mask[at] {
                row.dlogits.fill(E::from_f32(0.0));
                return None;
            }
            // The row is still in the cache when its dlogits are written. Exponentials of a kept set are few, and none is saved.
            let (scores, saved) = if self.kept.is_some() {
                (self.score(at, row.logits()), None)
            } else {
                let scores = self.softmaxes.score_and_save(&mut row, &self.ids(at), self.rate(at), saved);
                (TokenScores::Row(scores), Some(&*saved))
            };
            let mut evaluated = loss
                .evaluate(&[self.scored(at, &scores)], |input, at| {
                    self.input(input, at).expect("the structure reads it")
                })
                .pop()?;
            evaluated.add_others(scores.logp_of_others().zip(self.dlogp_of_others(at)));
            self.write(&mut row, at, saved, &scores, &evaluated);
            Some(evaluated)
        };
        // Each row is one task: its dlogits belong to it alone, and the sums over rows are made afterwards in a fixed
        // order.
        let both = &both;
        over_threads(rows.map(|(at, row)| RowTask::new(row.dlogits.len(), move |saved| both(at, row, saved))))
    }

    fn loss(&self) -> LossEvaluator {
        LossEvaluator::new(self.spec, self.structure, [self.ids.nrows(), self.ids.ncols()])
    }

    fn input(&self, input: TokenInput, at: TokenPlace) -> Option<f64> {
        self.kernel_inputs.input(input).map(|values| values[at])
    }

    /// Returns the factor of a row's gaps, `1/T` with the transform's rate.
    fn rate(&self, at: TokenPlace) -> f64 {
        self.input(TokenInput::Rate, at).unwrap_or(self.softmaxes.rate)
    }

    fn ids(&self, at: TokenPlace) -> TokenIds {
        let column = |id: i64| usize::try_from(id).expect("checked: 0 ≤ id < V");
        let others = self.others.into_iter().flat_map(|others| others.at(at.0, at.1));
        TokenIds { first: column(self.ids[at]), others: others.map(|(id, _)| column(id)).collect() }
    }

    fn dlogp_of_others(&self, at: TokenPlace) -> impl Iterator<Item = f64> {
        self.others.into_iter().flat_map(move |others| others.at(at.0, at.1)).map(|(_, dlogp)| dlogp)
    }

    fn scored(&self, at: TokenPlace, scores: &TokenScores) -> ScoredToken {
        let weighted = self.weights.token(self.advantage[at], at);
        let row = if self.structure.row_terms.any() { scores.whole_row() } else { None };
        ScoredToken { weighted, logp: scores.logp(), kl_logp: scores.kl_logp(), entropy: scores.entropy(), row }
    }

    /// Writes the dlogits of an unmasked token, from the exponentials of its score unless other rows were scored in
    /// between.
    fn write<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        at: TokenPlace,
        saved: Option<&SavedExponentials>,
        scores: &TokenScores,
        evaluated: &TokenEvaluation,
    ) {
        // Cotangents of other outputs are added to the derivatives of the loss.
        let OutputCotangents { loss, logp, entropy } = self.cotangents;
        let beside = |cotangents: Option<&Array2<f64>>| cotangents.map_or(0.0, |cotangents| cotangents[at]);
        let grad = RowGradients {
            logp: evaluated.grad_logp * loss + beside(logp),
            entropy: self.weights.entropy[at] * loss + beside(entropy),
            others: self.dlogp_of_others(at).map(|dlogp| dlogp * self.weights.policy[at] * loss).collect(),
            log_sum_exp: evaluated.grad_log_sum_exp * loss,
            mean_logit: evaluated.grad_mean_logit * loss,
        };
        match scores {
            TokenScores::Row(scores) => self.softmaxes.write(row, scores, saved, &grad),
            TokenScores::Kept(scores) => {
                let token = self.kept_token(at).expect("scored by its kept set");
                self.softmaxes.write_kept(row, &token, scores, &grad, evaluated.grad_kl_logp * loss);
            }
        }
    }

    /// Scores the row of an unmasked token, and saves nothing.
    fn score<E: NativeElement>(&self, at: TokenPlace, row: &[E]) -> TokenScores {
        match self.kept_token(at) {
            Some(token) => self.softmaxes.score_kept(row, &token, self.rate(at)),
            None => TokenScores::Row(self.softmaxes.score(row, &self.ids(at), self.rate(at))),
        }
    }

    /// Returns a token with its kept set, if the spec has kept sets.
    fn kept_token(&self, at: TokenPlace) -> Option<KeptToken> {
        let (kept_ids, settings) = self.kept?;
        let entries = kept_entries(&self.spec.support, kept_ids.slice(s![at.0, at.1, ..]), self.ids[at]);
        Some(KeptToken { ids: self.ids(at), entries, settings })
    }

    fn evaluation(&self, evaluated: &Array2<Option<TokenEvaluation>>) -> NativeOutputs {
        // Sequences without a token have a part in one objective.
        let mut loss = reduction::loss(evaluated, &self.weights);
        if let Objective::ImportanceSampling(sampling) = &self.spec.objective
            && sampling.empty_rows
        {
            loss += reduction::empty_rows(self.spec, &self.kernel_inputs.mask, &self.sequences, |sequence| {
                self.advantage_of_rows[sequence.index]
            });
        }
        // The mean cross-entropy of no token is 0/0.
        let is_mean = self.spec.averaging() == Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
        if self.structure.form == ObjectiveForm::CrossEntropy && is_mean && evaluated.iter().all(Option::is_none) {
            loss = f64::NAN;
        }
        // Masked tokens are 0 in every array, whatever their rows hold.
        let per_token = |value: fn(&TokenEvaluation) -> f64| {
            evaluated.map(|evaluated| evaluated.as_ref().map_or(0.0, value) as f32)
        };
        NativeOutputs {
            loss: loss as f32,
            logp: per_token(|evaluated| evaluated.logp),
            logp_of_others: self.other_ids_array(
                evaluated
                    .indexed_iter()
                    .filter_map(|(at, evaluated)| Some((at, evaluated.as_ref()?.logp_of_others.clone()))),
            ),
            entropy: per_token(|evaluated| evaluated.entropy),
            token_loss: per_token(|evaluated| evaluated.token.loss),
            metrics: reduction::metrics(self.spec, evaluated),
        }
    }
}
