//! The kernel as an operation of a framework: [`Op`]. Arrays are borrowed, and logits are never copied.
//!
//! ```text
//! Op::new(spec, arguments)     the arrays of tokens, checked and in f64
//!    .loss(logits)             loss, metrics, logp, entropy, token loss; one read of the logits, nothing written
//!    .gradient(…)              the same and dlogits, in a separate array
//!    .gradient_in_place(…)     or over the logits
//!    .logp_and_entropy(logits) these two alone
//! ```
//!
//! Any number of threads may call at the same time: they share rayon's pool.

use half::{bf16, f16};
use ndarray::{Array1, Array2, Array3, ArrayView3, ArrayViewD, ArrayViewMut3, Axis, Dimension, Ix1, Ix2, Ix3};

use super::{LogpEntropy, Native, NativeElement, NativeOutputs, OutputCotangents};
use assay_core::implementation::RunError;
use assay_core::problem::{
    Advantages, CuSeqlens, Extra, Float, OtherIds, Problem, ProblemError, Sequences, first_and_others, mask_from,
    narrowed_kept_ids,
};
use assay_core::spec::{AdvantageLevel, LossSpec};

/// A borrowed array of any dtype, extents and strides.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each is named as its elements are")]
pub enum OpArray<'a> {
    Bool(ArrayViewD<'a, bool>),
    I32(ArrayViewD<'a, i32>),
    I64(ArrayViewD<'a, i64>),
    F16(ArrayViewD<'a, f16>),
    Bf16(ArrayViewD<'a, bf16>),
    F32(ArrayViewD<'a, f32>),
    F64(ArrayViewD<'a, f64>),
}

/// A borrowed array for dlogits, `[B,T,V]` with dense rows: the logits that they overwrite, or a separate array.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is named as its elements are")]
pub enum OpArrayMut<'a> {
    F16(ArrayViewMut3<'a, f16>),
    Bf16(ArrayViewMut3<'a, bf16>),
    F32(ArrayViewMut3<'a, f32>),
}

/// The arrays of a batch besides its logits. Arrays that the spec does not read may be present.
#[derive(Clone, Debug)]
pub struct OpArguments<'a> {
    /// Sampled tokens, `[B,T]` of integers; or `[B,T,K]`, the ids whose logp is asked for.
    pub ids: OpArray<'a>,
    /// Mask of the tokens that count, `[B,T]`, of truth values or of numbers that are 0 or 1.
    pub mask: OpArray<'a>,
    /// `[B]`, or `[B,T]` where the spec has one a token; for such a spec `[B]` stand for all tokens of their sequence. Of packed
    /// sequences `[S]`, or `[N]` or `[1,N]`.
    /// Of several ids a token `[B,T,K]`: the cotangents of their logp, each with the other sign.
    pub advantages: OpArray<'a>,
    /// Log-probabilities under the policy that acted, `[B,T]`, nats.
    pub old_logp: Option<OpArray<'a>>,
    /// Log-probabilities under the reference policy, `[B,T]`, nats.
    pub ref_logp: Option<OpArray<'a>>,
    /// Log-probabilities under the sampler, `[B,T]`, nats; NaN if it did not score the token.
    pub rollout_logp: Option<OpArray<'a>>,
    /// Weights against the sampler's policy, `[B,T]` or `[B,1]`.
    pub rollout_weights: Option<OpArray<'a>>,
    /// Weights that the trainer gives to tokens, `[B,T]` or `[B,1]`.
    pub token_weights: Option<OpArray<'a>>,
    /// Marks of selected tokens, `[B,T]`, of the same types as the mask.
    pub selected: Option<OpArray<'a>>,
    /// Bias of each vocabulary entry, `[V]`.
    pub bias: Option<OpArray<'a>>,
    /// `[S+1]` of integers, where `S` sequences are packed into one row, `[1,N]`: 0, and where each ends. What is `[B]` above
    /// is then `[S]`.
    pub cu_seqlens: Option<OpArray<'a>>,
    /// Numbers of the sequences of packed tokens, `[1,N]` or `[N]` of integers, instead of `cu_seqlens`: 1, 2, … in
    /// order, 0 for padding.
    pub segment_ids: Option<OpArray<'a>>,
    /// Cotangents of the entropies, `[B,T]`.
    pub dentropy: Option<OpArray<'a>>,
    /// Temperatures, `[B,T]`, `[B,1]` or `[B]`.
    pub temperature: Option<OpArray<'a>>,
    /// Kept sets of the tokens, `[B,T,K]` of integers, −1 for no entry.
    pub kept_ids: Option<OpArray<'a>>,
}

/// The reason why an operation was refused. Nothing has been written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OpError {
    /// The arrays do not fit each other or the spec, or the kernel does not compute the spec.
    #[error(transparent)]
    Run(#[from] RunError),
    /// An array has a dtype that its role does not allow.
    #[error("`{field}`: got dtype {given}, expected {expected}")]
    Dtype {
        /// Name of the array's argument.
        field: &'static str,
        /// Dtype of the array, as frameworks spell it.
        given: &'static str,
        /// Dtypes that are allowed for the array.
        expected: &'static str,
    },
}

impl From<ProblemError> for OpError {
    fn from(error: ProblemError) -> Self {
        OpError::Run(error.into())
    }
}

/// Dtypes of logits and of dlogits, for error messages.
pub(super) const LOGITS: &str = "f32, bf16 or f16";

impl OpArray<'_> {
    /// Returns the extents of the array.
    pub fn shape(&self) -> &[usize] {
        match self {
            OpArray::Bool(array) => array.shape(),
            OpArray::I32(array) => array.shape(),
            OpArray::I64(array) => array.shape(),
            OpArray::F16(array) => array.shape(),
            OpArray::Bf16(array) => array.shape(),
            OpArray::F32(array) => array.shape(),
            OpArray::F64(array) => array.shape(),
        }
    }

    /// Returns the name of the element type.
    pub fn dtype(&self) -> &'static str {
        match self {
            OpArray::Bool(_) => "bool",
            OpArray::I32(_) => "i32",
            OpArray::I64(_) => "i64",
            OpArray::F16(_) => "f16",
            OpArray::Bf16(_) => "bf16",
            OpArray::F32(_) => "f32",
            OpArray::F64(_) => "f64",
        }
    }

    pub(super) fn wrong_dtype(&self, field: &'static str, expected: &'static str) -> OpError {
        OpError::Dtype { field, given: self.dtype(), expected }
    }

    /// Converts the floats of `field` to f64, exactly.
    pub(super) fn floats<D: Dimension>(
        &self,
        field: &'static str,
        meaning: &str,
    ) -> Result<ndarray::Array<f64, D>, OpError> {
        // Every float of 16 or 32 bits is exact in f64.
        let floats = match self {
            OpArray::F16(array) => array.mapv(Float::to_f64),
            OpArray::Bf16(array) => array.mapv(Float::to_f64),
            OpArray::F32(array) => array.mapv(f64::from),
            OpArray::F64(array) => array.to_owned(),
            _ => return Err(self.wrong_dtype(field, "f32, bf16, f16 or f64")),
        };
        Ok(floats.into_dimensionality().map_err(|_| self.wrong_rank(field, meaning))?)
    }

    fn wrong_rank(&self, field: &'static str, meaning: &str) -> ProblemError {
        ProblemError::Shape { field, given: self.shape().to_vec(), expected: meaning.into() }
    }

    pub(super) fn integers<D: Dimension>(
        &self,
        field: &'static str,
        meaning: &str,
    ) -> Result<ndarray::Array<i64, D>, OpError> {
        let integers = match self {
            OpArray::I32(array) => array.mapv(i64::from),
            OpArray::I64(array) => array.to_owned(),
            _ => return Err(self.wrong_dtype(field, "i64 or i32")),
        };
        Ok(integers.into_dimensionality().map_err(|_| self.wrong_rank(field, meaning))?)
    }

    /// Reads an array of several ids per token, `[B,T,K]` with `K ≥ 1`.
    fn ids_array<T>(
        &self,
        field: &'static str,
        read: impl FnOnce(&Self, &'static str, &str) -> Result<Array3<T>, OpError>,
    ) -> Result<Array3<T>, OpError> {
        const MEANING: &str = "[B,T,K] with K ≥ 1, of several ids a token";
        let all = read(self, field, MEANING)?;
        if all.dim().2 == 0 { Err(self.wrong_rank(field, MEANING).into()) } else { Ok(all) }
    }

    pub(super) fn truths(&self, field: &'static str) -> Result<Array2<bool>, OpError> {
        let wrong_rank = |_| self.wrong_rank(field, "[B,T]");
        // Numbers are masks if each is 0 or 1.
        let numbers = match self {
            OpArray::Bool(array) => return Ok(array.to_owned().into_dimensionality().map_err(wrong_rank)?),
            OpArray::I32(array) => array.mapv(f64::from),
            OpArray::I64(array) => array.mapv(|x| x as f64),
            _ => return Ok(mask_from(field, &self.floats::<Ix2>(field, "[B,T]")?)?),
        };
        Ok(mask_from(field, &numbers.into_dimensionality().map_err(wrong_rank)?)?)
    }
}

/// Views an array as logits `[B,T,V]`.
pub(super) fn logits<'l, E>(array: &'l ArrayViewD<'_, E>) -> Result<ArrayView3<'l, E>, OpError> {
    let wrong = |_| ProblemError::Shape {
        field: "logits",
        given: array.shape().to_vec(),
        expected: "[B,T,V] with B, T, V ≥ 1".into(),
    };
    Ok(array.view().into_dimensionality::<Ix3>().map_err(wrong)?)
}

impl OpArguments<'_> {
    fn sequences(&self, mask: &Array2<bool>) -> Result<Sequences, OpError> {
        // Packed sequences are given by their ends or by the number of each token's sequence, never by both.
        Ok(match (&self.cu_seqlens, &self.segment_ids) {
            (None, None) => Sequences::Rows,
            (Some(cu_seqlens), None) => {
                // Ends come as `[0, e₁, …, e_S]`, in the form of cu_seqlens in FlashAttention.
                let values: Array1<i64> = cu_seqlens.integers("cu_seqlens", "[S+1]")?;
                Sequences::Packed(CuSeqlens::new(&values.to_vec())?)
            }
            (None, Some(ids)) => {
                // The number of a token's sequence may be given as one row or as no rows; both have the same elements.
                const MEANING: &str =
                    "[1,N] or [N]: one row of sequences, several laid one after another, their numbers counted on";
                let flat: Vec<i64> = match ids.shape() {
                    [_] => ids.integers::<Ix1>("segment_ids", MEANING)?.to_vec(),
                    [1, _] => ids.integers::<Ix2>("segment_ids", MEANING)?.into_iter().collect(),
                    _ => return Err(ids.wrong_rank("segment_ids", MEANING).into()),
                };
                Sequences::Packed(CuSeqlens::from_segment_ids(&flat, mask)?)
            }
            (Some(_), Some(ids)) => {
                let given = ids.shape().to_vec();
                let expected = "none beside `cu_seqlens`, which says the same".into();
                return Err(ProblemError::Shape { field: "segment_ids", given, expected }.into());
            }
        })
    }
}

impl OpArguments<'_> {
    /// Reads one advantage per sequence, or one per token: `[N]` is one per token of packed sequences if `spec` has
    /// token advantages.
    fn advantages_of(&self, spec: &LossSpec, sequences: &Sequences, tokens: usize) -> Result<Advantages, OpError> {
        let given = &self.advantages;
        if given.shape().len() != 1 {
            return Ok(Advantages::Token(given.floats::<Ix2>("advantages", "[B] or [B,T]")?));
        }
        // One dimension: a number per sequence, unless the spec has one per token of a packed batch.
        let values = given.floats::<Ix1>("advantages", "[B]")?;
        match sequences {
            Sequences::Packed(cu_seqlens) if spec.advantages == AdvantageLevel::Token && values.len() == tokens => {
                // As many sequences as tokens are of one each, or there is no telling whose numbers these are.
                if cu_seqlens.count() == tokens && cu_seqlens.values().iter().enumerate().any(|(i, end)| i != *end) {
                    let expected = "[1,N], one a token: of N sequences of N tokens some are empty".into();
                    return Err(ProblemError::Shape { field: "advantages", given: vec![tokens], expected }.into());
                }
                Ok(Advantages::Token(values.insert_axis(Axis(0))))
            }
            _ => Ok(Advantages::Sequence(values)),
        }
    }
}

/// A loss and the arrays of a batch besides its logits, ready to be called with logits.
pub struct Op<'s> {
    native: Native,
    spec: &'s LossSpec,
    tokens: Problem<()>,
}

impl<'s> Op<'s> {
    /// Converts the `arguments` to f64 and checks their dtypes and ranks.
    ///
    /// # Errors
    /// [`OpError`] naming the first array whose dtype or rank does not fit. Extents and values are looked at with the logits.
    pub fn new(spec: &'s LossSpec, arguments: &OpArguments) -> Result<Self, OpError> {
        let per_token = |field, array: &Option<OpArray>| {
            array.as_ref().map(|array| array.floats::<Ix2>(field, "[B,T]")).transpose()
        };
        // Ids of three dimensions ask for logp of several ids; the first is the token's own.
        let several = arguments.ids.shape().len() == 3;
        let (ids, other_ids) = if several {
            first_and_others(&arguments.ids.ids_array("ids", OpArray::integers::<Ix3>)?)
        } else {
            (arguments.ids.integers("ids", "[B,T]")?, None)
        };
        let bias: Option<Array1<f64>> =
            arguments.bias.as_ref().map(|bias| bias.floats::<Ix1>("bias", "[V]")).transpose()?;
        // Sequences must be known before advantages: their number distinguishes [S] from [N].
        let mask = arguments.mask.truths("mask")?;
        let sequences = arguments.sequences(&mask)?;
        // Several ids have cotangents of their logp in place of advantages, with the other sign.
        let (advantages, others) = if several {
            let negatives = arguments.advantages.ids_array("advantages", OpArray::floats::<Ix3>)?;
            let (first, dlogp) = first_and_others(&-negatives);
            (Advantages::Dlogp(first), other_ids.zip(dlogp).map(|(ids, dlogp)| OtherIds { ids, dlogp }))
        } else {
            (arguments.advantages_of(spec, &sequences, mask.ncols())?, None)
        };
        // Ids beyond 32 bits are in no vocabulary, whose extent is not known yet.
        let kept_ids = match &arguments.kept_ids {
            Some(kept) => {
                let wide: Array3<i64> = kept.integers("kept_ids", "[B,T,K]")?;
                if (wide.dim().0, wide.dim().1) != mask.dim() {
                    return Err(kept
                        .wrong_rank("kept_ids", &format!("[B,T,K] with [B,T] = {:?} of `mask`", mask.shape()))
                        .into());
                }
                Some(narrowed_kept_ids(&wide, &mask, 1 << 31)?)
            }
            None => None,
        };
        // All numbers become f64. Extents and values are checked with the logits.
        let tokens = Problem {
            logits: (),
            ids,
            mask,
            advantages,
            old_logp: per_token("old_logp", &arguments.old_logp)?,
            ref_logp: per_token("ref_logp", &arguments.ref_logp)?,
            extra: Extra {
                rollout_logp: per_token("rollout_logp", &arguments.rollout_logp)?,
                rollout_weights: per_token("rollout_weights", &arguments.rollout_weights)?,
                token_weights: per_token("token_weights", &arguments.token_weights)?,
                selected: arguments.selected.as_ref().map(|selected| selected.truths("selected")).transpose()?,
                bias,
                sequences,
                dentropy: per_token("dentropy", &arguments.dentropy)?,
                temperature: match &arguments.temperature {
                    Some(of_rows) if of_rows.shape().len() == 1 => {
                        let of_rows: Array1<f64> = of_rows.floats::<Ix1>("temperature", "[B]")?;
                        Some(of_rows.insert_axis(Axis(1)))
                    }
                    given => per_token("temperature", given)?,
                },
                others,
                kept_ids,
                teacher: None,
            },
        };
        Ok(Self { native: Native::default(), spec, tokens: tokens.with_advantages_for(spec) })
    }

    /// Returns the arrays of the batch after their conversion.
    pub fn tokens(&self) -> &Problem<()> {
        &self.tokens
    }

    /// Computes the loss without its gradient; its bits are those of the loss with a gradient.
    ///
    /// # Errors
    /// [`OpError`] naming what does not fit.
    pub fn loss(&self, logits: &OpArray) -> Result<NativeOutputs, OpError> {
        match logits {
            OpArray::F32(logits) => self.loss_of(logits),
            OpArray::Bf16(logits) => self.loss_of(logits),
            OpArray::F16(logits) => self.loss_of(logits),
            other => Err(other.wrong_dtype("logits", LOGITS)),
        }
    }

    fn loss_of<E: NativeElement>(&self, array: &ArrayViewD<E>) -> Result<NativeOutputs, OpError> {
        Ok(self.native.evaluate(self.spec, logits(array)?, self.tokens.tokens())?)
    }

    /// Computes logp and entropy of each token, without a loss.
    ///
    /// # Errors
    /// As [`Op::loss`].
    pub fn logp_and_entropy(&self, logits: &OpArray) -> Result<LogpEntropy, OpError> {
        match logits {
            OpArray::F32(logits) => self.logp_and_entropy_of(logits),
            OpArray::Bf16(logits) => self.logp_and_entropy_of(logits),
            OpArray::F16(logits) => self.logp_and_entropy_of(logits),
            other => Err(other.wrong_dtype("logits", LOGITS)),
        }
    }

    fn logp_and_entropy_of<E: NativeElement>(&self, array: &ArrayViewD<E>) -> Result<LogpEntropy, OpError> {
        Ok(self.native.forward(self.spec, logits(array)?, self.tokens.tokens())?)
    }

    /// Computes the loss and writes `dlogits` to a separate array, of the dtype of the logits.
    ///
    /// # Errors
    /// As [`Op::loss`]; `dlogits` are then as they were.
    pub fn gradient(
        &self,
        logits: &OpArray,
        dlogits: OpArrayMut,
        cotangents: OutputCotangents,
    ) -> Result<NativeOutputs, OpError> {
        match (logits, dlogits) {
            (OpArray::F32(logits), OpArrayMut::F32(dlogits)) => self.gradient_of(logits, dlogits, cotangents),
            (OpArray::Bf16(logits), OpArrayMut::Bf16(dlogits)) => self.gradient_of(logits, dlogits, cotangents),
            (OpArray::F16(logits), OpArrayMut::F16(dlogits)) => self.gradient_of(logits, dlogits, cotangents),
            (OpArray::F32(_) | OpArray::Bf16(_) | OpArray::F16(_), dlogits) => {
                Err(OpError::Dtype { field: "dlogits", given: dlogits.dtype(), expected: "that of the logits" })
            }
            (other, _) => Err(other.wrong_dtype("logits", LOGITS)),
        }
    }

    fn gradient_of<E: NativeElement>(
        &self,
        array: &ArrayViewD<E>,
        dlogits: ArrayViewMut3<E>,
        cotangents: OutputCotangents,
    ) -> Result<NativeOutputs, OpError> {
        Ok(self.native.forward_backward(self.spec, logits(array)?, dlogits, self.tokens.tokens(), cotangents)?)
    }

    /// Computes the loss and writes dlogits over the `logits`.
    ///
    /// # Errors
    /// As [`Op::loss`]; the logits are then as they were.
    pub fn gradient_in_place(
        &self,
        logits: OpArrayMut,
        cotangents: OutputCotangents,
    ) -> Result<NativeOutputs, OpError> {
        let Self { native, spec, tokens } = self;
        let tokens = tokens.tokens();
        Ok(match logits {
            OpArrayMut::F32(logits) => native.forward_backward_in_place(spec, logits, tokens, cotangents)?,
            OpArrayMut::Bf16(logits) => native.forward_backward_in_place(spec, logits, tokens, cotangents)?,
            OpArrayMut::F16(logits) => native.forward_backward_in_place(spec, logits, tokens, cotangents)?,
        })
    }
}

impl OpArrayMut<'_> {
    /// Returns the name of the element type.
    pub fn dtype(&self) -> &'static str {
        match self {
            OpArrayMut::F16(_) => "f16",
            OpArrayMut::Bf16(_) => "bf16",
            OpArrayMut::F32(_) => "f32",
        }
    }
}
