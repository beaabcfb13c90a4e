//! The divergence from a teacher as an operation of a framework: [`DivergenceOp`]. Arrays are borrowed, and logits are never copied.

use ndarray::{Array2, Array3, ArrayView3, ArrayViewD, ArrayViewMut3, Ix2, Ix3};

use super::op::{LOGITS, OpArray, OpArrayMut, OpError, logits};
use super::{Native, NativeDivergence, NativeDivergences, NativeElement, NativeTeacher};
use assay_core::problem::{FloatArray, ProblemError, Shape, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, LossSpec, SpecError};

/// The teacher of each token: its logits `[B,T,V]`, of the student's dtype, or its likeliest entries, `[B,T,K]` each.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each is named as the arrays of a problem are")]
pub enum OpTeacher<'a> {
    Logits(OpArray<'a>),
    TopK { logp: OpArray<'a>, ids: OpArray<'a> },
}

/// A divergence, its teacher and the tokens that count, ready to be called with the student's logits `[B,T,V]`.
pub struct DivergenceOp<'a> {
    native: Native,
    distillation: &'a Distillation,
    /// The temperature that both logits are divided by.
    temperature: f64,
    mask: Array2<bool>,
    teacher: TeacherArrays<'a>,
}

/// A teacher's arrays: logits as they are, entries as they are checked.
enum TeacherArrays<'a> {
    Logits(OpArray<'a>),
    TopK(TeacherTopK),
}

impl<'a> DivergenceOp<'a> {
    /// Converts the mask and a teacher's entries, and checks their dtypes and ranks. A `mask` of `None` is true everywhere in
    /// `tokens`, `[B,T]`.
    ///
    /// # Errors
    /// [`OpError`] naming the array, or the field of a spec that is not a divergence at one temperature.
    pub fn new(
        spec: &'a LossSpec,
        teacher: OpTeacher<'a>,
        mask: Option<&OpArray>,
        tokens: [usize; 2],
    ) -> Result<Self, OpError> {
        let unfit =
            |field, given: &str, expected| ProblemError::from(SpecError { field, given: given.into(), expected });
        let distillation = spec.as_distillation();
        let distillation = distillation.ok_or_else(|| unfit("objective", "another", "distillation"))?;
        let temperature = spec.temperature.number().ok_or_else(|| unfit("temperature", "given", "a number"))?;
        let teacher = match teacher {
            OpTeacher::Logits(logits) => TeacherArrays::Logits(logits),
            OpTeacher::TopK { logp, ids } => TeacherArrays::TopK(TeacherTopK {
                logp: FloatArray::F64(logp.floats::<Ix3>(Teacher::LOGP, "[B,T,K]")?),
                ids: ids.integers::<Ix3>(Teacher::IDS, "[B,T,K]")?,
            }),
        };
        let mask = mask.map(|mask| mask.truths("mask")).transpose()?;
        let mask = mask.unwrap_or_else(|| Array2::from_elem(tokens, true));
        Ok(Self { native: Native::default(), distillation, temperature, mask, teacher })
    }

    /// Computes the divergence of each token.
    ///
    /// # Errors
    /// [`OpError`] naming what does not fit.
    pub fn values(&self, logits: &OpArray) -> Result<NativeDivergences, OpError> {
        match logits {
            OpArray::F32(logits) => self.values_of(logits),
            OpArray::Bf16(logits) => self.values_of(logits),
            OpArray::F16(logits) => self.values_of(logits),
            other => Err(other.wrong_dtype("logits", LOGITS)),
        }
    }

    fn values_of<E: NativeElement + LogitsArray>(&self, array: &ArrayViewD<E>) -> Result<NativeDivergences, OpError> {
        let student = logits(array)?;
        Ok(self.divergence(student.dim())?.values(&student)?)
    }

    /// Writes the gradient by the student's logits to `dlogits`, a separate array of their dtype, from what [`DivergenceOp::values`] has
    /// kept and the cotangents of the values, `[B,T]`.
    ///
    /// # Errors
    /// As [`DivergenceOp::values`]; `dlogits` are then as they were.
    pub fn gradient(
        &self,
        logits: &OpArray,
        dlogits: OpArrayMut,
        kept: Array3<f64>,
        cotangents: &OpArray,
    ) -> Result<(), OpError> {
        match (logits, dlogits) {
            (OpArray::F32(logits), OpArrayMut::F32(dlogits)) => self.gradient_of(logits, dlogits, kept, cotangents),
            (OpArray::Bf16(logits), OpArrayMut::Bf16(dlogits)) => self.gradient_of(logits, dlogits, kept, cotangents),
            (OpArray::F16(logits), OpArrayMut::F16(dlogits)) => self.gradient_of(logits, dlogits, kept, cotangents),
            (OpArray::F32(_) | OpArray::Bf16(_) | OpArray::F16(_), dlogits) => {
                Err(OpError::Dtype { field: "dlogits", given: dlogits.dtype(), expected: "that of the logits" })
            }
            (other, _) => Err(other.wrong_dtype("logits", LOGITS)),
        }
    }

    fn gradient_of<E: NativeElement + LogitsArray>(
        &self,
        array: &ArrayViewD<E>,
        mut dlogits: ArrayViewMut3<E>,
        kept: Array3<f64>,
        cotangents: &OpArray,
    ) -> Result<(), OpError> {
        let (student, sent) = (logits(array)?, cotangents.floats::<Ix2>("cotangents", "[B,T]")?);
        let kept = NativeDivergences::from_kept(kept)?;
        Ok(self.divergence(student.dim())?.gradient(&student, &mut dlogits, &kept, &sent)?)
    }

    /// Writes the gradient over the student's logits.
    ///
    /// # Errors
    /// As [`DivergenceOp::gradient`].
    pub fn gradient_in_place(
        &self,
        logits: OpArrayMut,
        kept: Array3<f64>,
        cotangents: &OpArray,
    ) -> Result<(), OpError> {
        match logits {
            OpArrayMut::F32(logits) => self.gradient_in_place_of(logits, kept, cotangents),
            OpArrayMut::Bf16(logits) => self.gradient_in_place_of(logits, kept, cotangents),
            OpArrayMut::F16(logits) => self.gradient_in_place_of(logits, kept, cotangents),
        }
    }

    fn gradient_in_place_of<E: NativeElement + LogitsArray>(
        &self,
        mut logits: ArrayViewMut3<E>,
        kept: Array3<f64>,
        cotangents: &OpArray,
    ) -> Result<(), OpError> {
        let sent = cotangents.floats::<Ix2>("cotangents", "[B,T]")?;
        let kept = NativeDivergences::from_kept(kept)?;
        Ok(self.divergence(logits.dim())?.gradient_in_place(&mut logits, &kept, &sent)?)
    }

    /// Prepares the divergence of students `[B,T,V]`.
    fn divergence<E: NativeElement + LogitsArray>(
        &self,
        (batch, tokens, vocab): (usize, usize, usize),
    ) -> Result<NativeDivergence<'_, E>, OpError> {
        let teacher = match &self.teacher {
            TeacherArrays::TopK(top) => NativeTeacher::TopK(top),
            TeacherArrays::Logits(array) => NativeTeacher::Logits(E::logits(array).ok_or_else(|| {
                OpError::Dtype { field: Teacher::LOGITS, given: array.dtype(), expected: E::EXPECTED }
            })??),
        };
        let temperature = Array2::from_elem(self.mask.dim(), self.temperature);
        let shape = Shape { batch, tokens, vocab };
        Ok(NativeDivergence::new(&self.native, self.distillation, shape, &self.mask, temperature, teacher)?)
    }
}

/// Logits of one dtype among arrays of any.
trait LogitsArray: Sized {
    /// The dtype, for an error.
    const EXPECTED: &'static str;

    /// Views an array as logits `[B,T,V]`; `None` if it has another dtype.
    fn logits<'l>(array: &'l OpArray) -> Option<Result<ArrayView3<'l, Self>, OpError>>;
}

macro_rules! logits_array {
    ($($type:ty, $variant:ident, $dtype:expr;)*) => {
        $(
            impl LogitsArray for $type {
                const EXPECTED: &'static str = $dtype;

                fn logits<'l>(array: &'l OpArray) -> Option<Result<ArrayView3<'l, Self>, OpError>> {
                    match array {
                        OpArray::$variant(array) => Some(logits(array)),
                        _ => None,
                    }
                }
            }
        )*
    };
}
logits_array! {
    f32, F32, "f32, that of the student's logits";
    half::bf16, Bf16, "bf16, that of the student's logits";
    half::f16, F16, "f16, that of the student's logits";
}
