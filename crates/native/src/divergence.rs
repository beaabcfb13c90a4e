//! The divergence of a student's distribution from a teacher's, and its gradient by the student's logits: one value for each token.
//!
//! Both rows are read from memory once for the values and once more for the gradient, which is rounded once; nothing of their size is
//! made but that. Arithmetic and threads are those of the loss ([the crate](crate)); masked tokens are not read, and have 0.

use ndarray::{Array2, Array3, ArrayView3, ArrayViewMut3, arr0, s};

use super::{Native, NativeElement, RowTransform, SoftmaxSettings, expect_dense_rows, rows_of, rows_of_mut};
use crate::row::{DlogitsScales, LogitsRow, PAIR_SCORES, PairScores, PairSettings};
use crate::threads::{RowTask, over_threads};
use crate::top_divergence::{OtherEntries, TopDivergence, TopEntries};
use assay_algebra::reduction::ReductionWeights;
use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::StructuredSpec;
use assay_core::implementation::{Implementation as _, RunError, Unsupported};
use assay_core::problem::{Candidate, FloatArray, Problem, ProblemError, Shape, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, LossSpec, SpecError, Support, TopKRest};

/// The teacher of each token: logits as the student's, or its likeliest entries.
#[derive(Clone, Debug)]
pub enum NativeTeacher<'t, E> {
    /// The teacher's logits, `[B,T,V]`, rows anywhere and each of them dense.
    Logits(ArrayView3<'t, E>),
    /// The `K` likeliest entries of each token.
    TopK(&'t TeacherTopK),
}

/// The divergence of each token, and what its gradient is made of.
#[derive(Clone, Debug)]
pub struct NativeDivergences {
    /// The divergence of each token, `[B,T]`, nats, with its factor; 0 where the mask is false.
    pub values: Array2<f32>,
    /// The scores of each row, `[B,T,6]`.
    kept: Array3<f64>,
}

impl NativeDivergences {
    /// Returns the scores of each row, `[B,T,6]`, to be handed to [`Self::from_kept`].
    pub fn kept(self) -> Array3<f64> {
        self.kept
    }

    /// Returns the divergences whose scores were kept; their values are left out.
    ///
    /// # Errors
    /// [`ProblemError::Shape`] if the array is not `[B,T,6]`.
    pub fn from_kept(kept: Array3<f64>) -> Result<Self, ProblemError> {
        if kept.dim().2 != PAIR_SCORES {
            let (given, expected) = (kept.shape().to_vec(), format!("[B,T,{PAIR_SCORES}]"));
            return Err(ProblemError::Shape { field: "kept", given, expected });
        }
        Ok(Self { values: Array2::zeros((kept.dim().0, kept.dim().1)), kept })
    }

    fn scores(&self, (b, t): (usize, usize)) -> PairScores {
        PairScores::from_numbers(std::array::from_fn(|k| self.kept[[b, t, k]]))
    }
}

/// A divergence, the tokens that count and their teacher, checked.
pub struct NativeDivergence<'d, E> {
    distillation: &'d Distillation,
    pair: PairSettings,
    mask: &'d Array2<bool>,
    /// The temperature of each token, `[B,T]`.
    temperature: Array2<f64>,
    teacher: NativeTeacher<'d, E>,
    vocab: usize,
}

impl<'d, E: NativeElement> NativeDivergence<'d, E> {
    /// Prepares the divergence of a batch of `shape` on the kernel `native`, of tokens where `mask` is true.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first array or entry that does not fit. The values of a teacher's logits are not looked at: the
    /// divergence and the dlogits of a row are NaN if it has a NaN, a `+∞`, or no finite logit.
    pub fn new(
        native: &Native,
        distillation: &'d Distillation,
        shape: Shape,
        mask: &'d Array2<bool>,
        temperature: Array2<f64>,
        teacher: NativeTeacher<'d, E>,
    ) -> Result<Self, ProblemError> {
        let Shape { batch, tokens, vocab } = shape;
        let wrong = |field, given: &[usize], expected: String| {
            Err(ProblemError::Shape { field, given: given.to_vec(), expected })
        };
        for (field, given) in [("mask", mask.shape()), ("temperature", temperature.shape())] {
            if given != [batch, tokens] {
                return wrong(field, given, format!("[{batch}, {tokens}]"));
            }
        }
        match &teacher {
            NativeTeacher::Logits(logits) => {
                if logits.dim() != (batch, tokens, vocab) {
                    let expected = format!("[{batch}, {tokens}, {vocab}], that of the student's logits");
                    return wrong(Teacher::LOGITS, logits.shape(), expected);
                }
                expect_dense_rows(Teacher::LOGITS, logits.dim(), logits.strides()[2])?;
            }
            NativeTeacher::TopK(top) => {
                let (field, expected) = ("objective.distillation.rest", "tail, renormalized or ignored with `top_k`");
                if distillation.rest.is_none() {
                    return Err(SpecError { field, given: "none".into(), expected }.into());
                }
                top.check(distillation.top_k.unwrap_or(vocab), mask, shape)?;
            }
        }
        Ok(Self {
            distillation,
            pair: PairSettings { isa: native.isa, teacher_weight: distillation.teacher_weight() },
            mask,
            temperature,
            teacher,
            vocab,
        })
    }

    /// Computes the divergence of each token. It reads the logits of unmasked tokens once and writes nothing.
    ///
    /// # Errors
    /// [`ProblemError`] if the student has another shape, or rows that are not dense.
    pub fn values(&self, student: &ArrayView3<E>) -> Result<NativeDivergences, ProblemError> {
        self.expect_logits("logits", student.shape(), student.strides()[2])?;
        let teachers = self.teacher_rows();
        let score = |i: usize, row: &[E]| match &teachers {
            Some(teachers) => self.pair.score(row, teachers[i], self.rate(i)),
            None => self.score_top(i, row),
        };
        let score = &score;
        let rows = rows_of(student)
            .into_iter()
            .enumerate()
            .map(|(i, row)| RowTask::new(row.len(), move |_| self.mask[self.place(i)].then(|| score(i, row))));
        let scores = over_threads(rows);
        let (batch, tokens) = self.mask.dim();
        let value = |i: usize, scores: &Option<PairScores>| {
            scores.map_or(0.0, |scores| (self.factor(i) * scores.divergence) as f32)
        };
        let values = scores.iter().enumerate().map(|(i, scores)| value(i, scores)).collect();
        let numbers = scores.iter().flat_map(|scores| scores.map_or([0.0; PAIR_SCORES], PairScores::numbers)).collect();
        Ok(NativeDivergences {
            values: Array2::from_shape_vec((batch, tokens), values).expect("one a token"),
            kept: Array3::from_shape_vec((batch, tokens, PAIR_SCORES), numbers).expect("six a token"),
        })
    }

    /// Writes dlogits to a separate array of the student's extents, from the divergences and their cotangents `[B,T]`.
    ///
    /// # Errors
    /// [`ProblemError`] where an array does not fit; nothing is written then.
    pub fn gradient(
        &self,
        student: &ArrayView3<E>,
        dlogits: &mut ArrayViewMut3<E>,
        divergences: &NativeDivergences,
        cotangents: &Array2<f64>,
    ) -> Result<(), ProblemError> {
        self.expect_logits("logits", student.shape(), student.strides()[2])?;
        self.expect_fits(dlogits, divergences, cotangents)?;
        let rows = rows_of_mut(dlogits).zip(rows_of(student));
        self.write(
            rows.map(|(dlogits, logits)| LogitsRow { logits: Some(logits), dlogits }).collect(),
            divergences,
            cotangents,
        );
        Ok(())
    }

    /// Writes dlogits over the student's logits.
    ///
    /// # Errors
    /// As [`Self::gradient`].
    pub fn gradient_in_place(
        &self,
        logits: &mut ArrayViewMut3<E>,
        divergences: &NativeDivergences,
        cotangents: &Array2<f64>,
    ) -> Result<(), ProblemError> {
        self.expect_fits(logits, divergences, cotangents)?;
        let rows = rows_of_mut(logits).map(|dlogits| LogitsRow { logits: None, dlogits }).collect();
        self.write(rows, divergences, cotangents);
        Ok(())
    }

    /// Checks that an array has the extents of the student's logits, `[B,T,V]`, and dense rows.
    fn expect_logits(&self, field: &'static str, given: &[usize], stride: isize) -> Result<(), ProblemError> {
        let (batch, tokens) = self.mask.dim();
        if given != [batch, tokens, self.vocab] {
            let expected = format!("[{batch}, {tokens}, {}]", self.vocab);
            return Err(ProblemError::Shape { field, given: given.to_vec(), expected });
        }
        expect_dense_rows(field, (batch, tokens, self.vocab), stride)
    }

    /// Checks that dlogits, scores and cotangents are of the batch.
    fn expect_fits(
        &self,
        dlogits: &ArrayViewMut3<E>,
        divergences: &NativeDivergences,
        cotangents: &Array2<f64>,
    ) -> Result<(), ProblemError> {
        let (batch, tokens) = self.mask.dim();
        self.expect_logits("dlogits", dlogits.shape(), dlogits.strides()[2])?;
        for (field, given) in [("cotangents", cotangents.shape()), ("kept", &divergences.kept.shape()[..2])] {
            if given != [batch, tokens] {
                let expected = format!("[{batch}, {tokens}]");
                return Err(ProblemError::Shape { field, given: given.to_vec(), expected });
            }
        }
        Ok(())
    }

    fn write(&self, rows: Vec<LogitsRow<E>>, divergences: &NativeDivergences, cotangents: &Array2<f64>) {
        let teachers = self.teacher_rows();
        let write = |i: usize, mut row: LogitsRow<E>| {
            let at = self.place(i);
            let weight = if self.mask[at] { cotangents[at] * self.factor(i) / self.temperature[at] } else { 0.0 };
            let scores = divergences.scores(at);
            match &teachers {
                Some(teachers) => {
                    self.pair.write(row.logits, row.dlogits, teachers[i], &scores, self.rate(i), weight);
                }
                None => self.write_top(i, &mut row, weight),
            }
        };
        let write = &write;
        over_threads(
            rows.into_iter().enumerate().map(|(i, row)| RowTask::new(row.dlogits.len(), move |_| write(i, row))),
        );
    }

    fn teacher_rows(&self) -> Option<Vec<&[E]>> {
        match &self.teacher {
            NativeTeacher::Logits(logits) => Some(rows_of(logits)),
            NativeTeacher::TopK(_) => None,
        }
    }

    fn place(&self, i: usize) -> (usize, usize) {
        (i / self.mask.ncols(), i % self.mask.ncols())
    }

    /// Returns the factor `1/T` of a row's gaps.
    fn rate(&self, i: usize) -> f64 {
        1.0 / self.temperature[self.place(i)]
    }

    /// Returns the factor of a row's divergence.
    fn factor(&self, i: usize) -> f64 {
        if self.distillation.temperature_squared { self.temperature[self.place(i)].powi(2) } else { 1.0 }
    }

    /// Evaluates the divergence from a teacher's likeliest entries.
    fn top(&self, i: usize, row: &[E]) -> TopRow {
        let NativeTeacher::TopK(TeacherTopK { logp, ids }) = &self.teacher else {
            unreachable!("a teacher of logits has rows")
        };
        let ((b, t), rest) = (self.place(i), self.distillation.rest.expect("a spec with `top_k` has it"));
        let ids: Vec<usize> =
            ids.slice(s![b, t, ..]).iter().map(|id| usize::try_from(*id).expect("checked: 0 ≤ id < V")).collect();
        let logits: Vec<f64> = ids.iter().map(|&id| f64::from(row[id].to_f32())).collect();
        // The other entries, added up by themselves: renormalised entries do not need them.
        let support = Support { excluded_ids: ids.clone(), ..Support::default() };
        let of_others = LossSpec { support, ..LossSpec::default() };
        let transform = RowTransform::new::<E>(&of_others, None, row.len());
        let softmax = SoftmaxSettings::new(&of_others, self.pair.isa, transform);
        let others = if rest == TopKRest::Renormalized {
            OtherEntries { max: 0.0, sum: 0.0 }
        } else {
            let statistics = softmax.statistics(row, None, self.rate(i));
            OtherEntries { max: statistics.max, sum: statistics.entropy[0] }
        };
        let top = TopEntries { logp: logp.row(b, t), logits, rate: self.rate(i) };
        let divergence = top.divergence(rest, self.pair.teacher_weight, others);
        TopRow { ids, softmax, others, divergence }
    }

    fn score_top(&self, i: usize, row: &[E]) -> PairScores {
        PairScores::with_divergence(self.top(i, row).divergence.value)
    }

    /// Writes the dlogits of a token whose teacher has `K` entries: of all others first, and then of these.
    fn write_top(&self, i: usize, row: &mut LogitsRow<E>, weight: f64) {
        if weight == 0.0 {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        let TopRow { ids, softmax, others, divergence } = self.top(i, row.logits());
        let of_others = divergence.of_others * weight;
        if of_others == 0.0 || others.sum == 0.0 {
            row.dlogits.fill(E::from_f32(0.0));
        } else {
            let share = of_others / others.sum;
            let scales = DlogitsScales { max: others.max, share, others: 0.0, bonus: 0.0, mean_gap: 0.0 };
            softmax.write_part(row, None, scales, self.rate(i));
        }
        for (id, slope) in ids.into_iter().zip(divergence.of_entries) {
            row.dlogits[id] = E::from_f32((slope * weight) as f32);
        }
    }
}

/// A token whose teacher has `K` entries.
struct TopRow {
    ids: Vec<usize>,
    /// The softmax over the other entries.
    softmax: SoftmaxSettings,
    others: OtherEntries,
    divergence: TopDivergence,
}

/// The tokens of a batch and their factors, without logits and teacher.
struct BatchTokens<'t> {
    spec: &'t LossSpec,
    shape: Shape,
    mask: &'t Array2<bool>,
    temperature: Array2<f64>,
    /// The factor of each token in the loss.
    weights: &'t Array2<f64>,
}

impl Native {
    /// Runs a problem whose objective is a divergence; its logits become dlogits in place.
    pub(crate) fn run_divergence(&self, spec: &LossSpec, mut problem: Problem) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        let mut logits = std::mem::replace(&mut problem.logits, FloatArray::F32(Array3::default((0, 0, 0))));
        let tokens = problem.tokens();
        // The factors of tokens in the sum are those of any loss.
        let inputs = KernelInputs::new(StructuredSpec::new(spec), &tokens);
        let weights = ReductionWeights::new(spec, &inputs, &tokens.extra.sequences).policy;
        let temperature = Array2::from_shape_fn((shape.batch, shape.tokens), |at| tokens.temperature(spec, at));
        let batch = BatchTokens { spec, shape, mask: &inputs.mask, temperature, weights: &weights };
        let teacher = tokens.extra.teacher.as_ref().expect("checked: the spec reads it");
        let values = match (&mut logits, teacher) {
            (FloatArray::F32(x), Teacher::Logits(FloatArray::F32(y))) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::Logits(y.view()))?
            }
            (FloatArray::Bf16(x), Teacher::Logits(FloatArray::Bf16(y))) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::Logits(y.view()))?
            }
            (FloatArray::F16(x), Teacher::Logits(FloatArray::F16(y))) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::Logits(y.view()))?
            }
            (FloatArray::F32(x), Teacher::TopK(top)) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::TopK(top))?
            }
            (FloatArray::Bf16(x), Teacher::TopK(top)) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::TopK(top))?
            }
            (FloatArray::F16(x), Teacher::TopK(top)) => {
                self.over_logits(batch, x.view_mut(), NativeTeacher::TopK(top))?
            }
            (student, Teacher::Logits(given)) => {
                return Err(Unsupported {
                    implementation: self.id().into(),
                    field: "teacher_logits dtype",
                    given: given.dtype().to_string(),
                    supported: format!("{}, that of the logits", student.dtype()),
                }
                .into());
            }
            (FloatArray::F64(_), Teacher::TopK(_)) => unreachable!("`supports` rejects f64"),
        };
        let counted = values.indexed_iter().filter(|(at, _)| inputs.mask[*at]);
        let loss = counted.map(|(at, value)| weights[at] * f64::from(*value)).sum::<f64>() as f32;
        Ok(Candidate {
            loss: Some(arr0(loss).into()),
            token_loss: Some(values.into()),
            gradient: logits,
            logp: None,
            logp_of_others: None,
            entropy: None,
            metrics: None,
        })
    }

    /// Computes the divergences of a batch, and writes dlogits over its logits.
    fn over_logits<'t, E: NativeElement>(
        &self,
        BatchTokens { spec, shape, mask, temperature, weights }: BatchTokens<'t>,
        mut logits: ArrayViewMut3<E>,
        teacher: NativeTeacher<'t, E>,
    ) -> Result<Array2<f32>, ProblemError> {
        let distillation = spec.as_distillation().expect("the caller has looked");
        let divergence = NativeDivergence::new(self, distillation, shape, mask, temperature, teacher)?;
        let divergences = divergence.values(&logits.view())?;
        divergence.gradient_in_place(&mut logits, &divergences, weights)?;
        Ok(divergences.values)
    }
}
