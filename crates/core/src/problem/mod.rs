//! Problems, and the outcomes that implementations compute from them.
//!
//! Notation: `B` sequences of `T` tokens over a vocabulary of `V` entries; `u` is a dtype's unit roundoff. If `S` sequences are
//! [packed](Sequences::Packed) into one row of `N` tokens, `[B,T]` is `[1,N]`, and an array with one value per sequence is `[S]`.

mod kept;
mod lm_head;
mod other_ids;
mod outcome;
mod select;
mod sequences;
mod shape;
mod teacher;

use std::fmt;
use std::str::FromStr;

use ndarray::{Array1, Array2, Array3, Ix3, s};

pub use crate::array::{Dtype, Float, FloatArray, FloatView, first_and_others, with_others};
pub use kept::{NO_ENTRY, check_kept_ids, kept_entries, narrowed_kept_ids};
pub use lm_head::{HeadForm, HeadLayout, HeadProblem, HeadShape, Projection, ProjectionView};
pub use other_ids::OtherIds;
pub use outcome::{Candidate, Gradient, HeadCandidate, HeadGradient, HeadGradientView, Metrics, Outcome, joined};
pub use select::ProblemPart;
pub use sequences::{CuSeqlens, Sequence, Sequences};
pub use shape::ProblemShape;
pub use teacher::{Teacher, TeacherTopK};

use crate::spec::{AdvantageLevel, LossSpec, Objective, OldLogp, RolloutLevel, RolloutSource, SpecError, Temperature};
use crate::text::ShownNumber;

/// One GRPO batch, in which position `[b,t]` of `logits` scores token `ids[b,t]`.
///
/// The logits are an array, or in a [`HeadProblem`] the [`Projection`] whose product they are.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::{Advantages, Extra, Problem};
/// use assay::spec::LossSpec;
/// use ndarray::{Array2, Array3, arr1, arr2};
///
/// // Two sequences of three tokens over four entries; the last token of the second is padding.
/// let mut problem: Problem = Problem {
///     logits: Array3::<f32>::zeros((2, 3, 4)).into(),
///     ids: arr2(&[[0, 1, 2], [3, 0, -100]]),
///     mask: arr2(&[[true, true, true], [true, true, false]]),
///     advantages: Advantages::Sequence(arr1(&[1.0, -0.5])),
///     old_logp: Some(Array2::from_elem((2, 3), -1.4)),
///     ref_logp: None,
///     extra: Extra::default(),
/// };
/// let shape = problem.check(&LossSpec::default())?;
/// assert_eq!(shape.to_string(), "2x3x4");
///
/// problem.ids[[1, 1]] = 4;
/// let error = problem.check(&LossSpec::default()).unwrap_err();
/// assert_eq!(error.to_string(), "`ids[1,1]`: got 4, expected 0 ≤ id < V = 4 on an unmasked token");
/// # Ok::<(), assay::problem::ProblemError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Problem<L = FloatArray<Ix3>> {
    /// The logits, `[B,T,V]`, in nats before the temperature.
    pub logits: L,
    /// The sampled tokens, `[B,T]`, or the first id of each token if the spec has several; any value is allowed where
    /// `mask` is false.
    pub ids: Array2<i64>,
    /// The mask, `[B,T]`: true for the tokens that count.
    pub mask: Array2<bool>,
    /// The advantages: `[B]` or `[B,T]` as the spec says, `[S]` for packed sequences.
    pub advantages: Advantages,
    /// Log-probabilities under the old policy, `[B,T]`, nats: the policy that sampled, or that the last epoch left.
    pub old_logp: Option<Array2<f64>>,
    /// Log-probabilities under the reference policy of the KL penalty, `[B,T]`, nats.
    pub ref_logp: Option<Array2<f64>>,
    /// The arrays that only some specs read, and the layout of the sequences.
    pub extra: Extra,
}

/// The part of a [`Problem`] other than its logits, borrowed: all that a kernel gets of the tokens.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "`Problem` documents them")]
pub struct Tokens<'p> {
    pub ids: &'p Array2<i64>,
    pub mask: &'p Array2<bool>,
    pub advantages: &'p Advantages,
    pub old_logp: Option<&'p Array2<f64>>,
    pub ref_logp: Option<&'p Array2<f64>>,
    pub extra: &'p Extra,
}

/// Arrays that only some specs read, and the layout of sequences that are not rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extra {
    /// Log-probabilities under the policy that the sampler ran, `[B,T]`, nats; NaN where the sampler did not score the
    /// token.
    pub rollout_logp: Option<Array2<f64>>,
    /// Importance weights `≥ 0` against the sampler's policy, `[B,T]` or `[B,1]`; `[1,N]` or `[S,1]` for packed
    /// sequences.
    pub rollout_weights: Option<Array2<f64>>,
    /// Weights `≥ 0` of tokens that the trainer gives, `[B,T]` or `[B,1]`; `[1,N]` or `[S,1]` for packed sequences.
    pub token_weights: Option<Array2<f64>>,
    /// The selected tokens, `[B,T]`: KL-Cov penalizes them, Clip-Cov drops them.
    pub selected: Option<Array2<bool>>,
    /// The bias of the LM head, `[V]`, added to the logits.
    pub bias: Option<Array1<f64>>,
    /// The assignment of tokens to sequences.
    pub sequences: Sequences,
    /// The cotangent of each token's entropy, `[B,T]`.
    pub dentropy: Option<Array2<f64>>,
    /// The softmax temperature `> 0` of each token, `[B,T]`, or of each sequence, `[B,1]`; `[1,N]` or `[S,1]` for
    /// packed sequences.
    pub temperature: Option<Array2<f64>>,
    /// The ids of each token after its first, if the spec has several [ids per token](LossSpec::ids_per_token).
    pub others: Option<OtherIds>,
    /// The vocabulary entries that the sampler has kept for each token, `[B,T,K]`, in any order; −1 fills up a smaller
    /// set. Any values are allowed where the mask is false.
    pub kept_ids: Option<Array3<i32>>,
    /// The teacher's distribution of each token, which [`Objective::Distillation`] compares the student's with.
    pub teacher: Option<Teacher>,
}

/// The advantages of a batch, dimensionless, in one of three forms.
#[derive(Clone, Debug, PartialEq)]
pub enum Advantages {
    /// One advantage per sequence, `[B]`, or `[S]` for packed sequences.
    Sequence(Array1<f64>),
    /// One advantage per token, `[B,T]`.
    Token(Array2<f64>),
    /// The negatives of the advantages, `[B,T]`: the cotangents of logp, as in [`LossSpec::from_cotangents`].
    Dlogp(Array2<f64>),
}

impl Advantages {
    /// Returns the advantage of token `[b,t]` of a batch whose sequences are its rows; [`Problem::advantage`] is for
    /// any batch.
    pub fn at(&self, b: usize, t: usize) -> f64 {
        match self {
            Advantages::Sequence(a) => a[b],
            Advantages::Token(a) => a[[b, t]],
            Advantages::Dlogp(dlogp) => -dlogp[[b, t]],
        }
    }

    /// Returns the name of the array, `advantages` or `dlogp`.
    pub fn name(&self) -> &'static str {
        match self {
            Advantages::Sequence(_) | Advantages::Token(_) => "advantages",
            Advantages::Dlogp(_) => "dlogp",
        }
    }

    /// Returns the shape of the array, `[B]` or `[B,T]`.
    pub fn shape(&self) -> &[usize] {
        match self {
            Advantages::Sequence(a) => a.shape(),
            Advantages::Token(a) | Advantages::Dlogp(a) => a.shape(),
        }
    }
}

/// The shape of a batch's logits, written `BxTxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The number of sequences, `B`.
    pub batch: usize,
    /// The number of tokens per sequence, `T`.
    pub tokens: usize,
    /// The size of the vocabulary, `V`.
    pub vocab: usize,
}

impl Shape {
    /// Returns `B·T·V`, or `None` if that exceeds `usize`.
    pub fn elements(self) -> Option<usize> {
        self.batch.checked_mul(self.tokens)?.checked_mul(self.vocab)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}x{}x{}", self.batch, self.tokens, self.vocab)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("shape: got `{text}`, expected BxTxV with integers ≥ 1, such as 2x16x151936");
        let extents: Vec<usize> =
            text.split('x').map(|n| n.parse().map_err(|_| expected())).collect::<Result<_, _>>()?;
        match extents[..] {
            [batch, tokens, vocab] if batch > 0 && tokens > 0 && vocab > 0 => Ok(Shape { batch, tokens, vocab }),
            _ => Err(expected()),
        }
    }
}

/// A [`Problem`] that cannot be evaluated under its spec. Each message names the array, its value and the accepted
/// values.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// The spec itself is out of range.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An array is missing that the spec reads.
    #[error("`{field}`: not given, expected shape {expected:?} because the spec has {because}")]
    Missing {
        /// The name of the array.
        field: &'static str,
        /// The shape that it should have.
        expected: Vec<usize>,
        /// The setting of the spec that reads it.
        because: &'static str,
    },
    /// An array has the wrong shape.
    #[error("`{field}`: got shape {given:?}, expected {expected}")]
    Shape {
        /// The name of the array.
        field: &'static str,
        /// The shape that it has.
        given: Vec<usize>,
        /// The shape that it should have, in words.
        expected: String,
    },
    /// An array is not dense and row-major.
    #[error("`{field}`: got a strided array, expected dense row-major (use `as_standard_layout`)")]
    Strided {
        /// The name of the array.
        field: &'static str,
    },
    /// The elements of each row are not contiguous.
    #[error("`{field}`: got rows with a stride of {stride}, expected 1: the elements of a row must be contiguous")]
    StridedRows {
        /// The name of the array.
        field: &'static str,
        /// The distance between neighbouring elements of a row, in elements.
        stride: isize,
    },
    /// A token id is outside the vocabulary on an unmasked token.
    #[error("`ids[{b},{t}{}]`: got {id}, expected 0 ≤ id < V = {vocab} on an unmasked token", id_index(*.k))]
    IdOutOfRange {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the id, if a token has several.
        k: Option<usize>,
        /// The id that was given.
        id: i64,
        /// The size of the vocabulary, `V`.
        vocab: usize,
    },
    /// A value is NaN or infinite on an unmasked token.
    #[error("`{field}[{b},{t}]`: got {}, expected a finite number on an unmasked token", ShownNumber(*given))]
    NotFinite {
        /// The name of the array.
        field: &'static str,
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The value that was given.
        given: f64,
    },
    /// A weight is negative or not finite.
    #[error("`{field}[{b},{t}]`: got {}, expected a finite number ≥ 0", ShownNumber(*given))]
    Weight {
        /// The name of the array.
        field: &'static str,
        /// The sequence of the weight.
        b: usize,
        /// The position of the token, or 0 if there is one weight per sequence.
        t: usize,
        /// The value that was given.
        given: f64,
    },
    /// A temperature is not finite and positive.
    #[error("`temperature[{b},{t}]`: got {}, expected a finite number > 0", ShownNumber(*given))]
    Temperature {
        /// The sequence of the temperature.
        b: usize,
        /// The position of the token, or 0 if there is one temperature per sequence.
        t: usize,
        /// The value that was given.
        given: f64,
    },
    /// A sampled token is outside the spec's support.
    #[error("`ids[{b},{t}{}]`: got {id}, expected an id within `support`{}", id_index(*.k), or_kept(*.k))]
    IdOutsideSupport {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the id, if a token has several.
        k: Option<usize>,
        /// The id that was given.
        id: i64,
    },
    /// A kept id is outside the vocabulary on an unmasked token.
    #[error(
        "`kept_ids[{b},{t},{k}]`: got {id}, expected 0 ≤ id < V = {vocab}, or −1 for no entry, on an unmasked token"
    )]
    KeptIdOutOfRange {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the id in the set.
        k: usize,
        /// The id that was given.
        id: i64,
        /// The size of the vocabulary, `V`.
        vocab: usize,
    },
    /// The spec has kept sets and the problem has none.
    #[error("`kept_ids`: not given, expected [{batch}, {tokens}, K] because the spec has `support.kept`")]
    NoKeptIds {
        /// The number of sequences, `B`.
        batch: usize,
        /// The number of tokens per sequence, `T`.
        tokens: usize,
    },
    /// An id is twice in the kept set of an unmasked token.
    #[error("`kept_ids[{b},{t},{k}]`: got {id}, expected an id that is not at `kept_ids[{b},{t},{first}]` too")]
    KeptTwice {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the second place of the id in the set.
        k: usize,
        /// The id that was given.
        id: i32,
        /// The index of the first place of the id in the set.
        first: usize,
    },
    /// A sampled token is outside its kept set.
    #[error(
        "`ids[{b},{t}{}]`: got {id}, expected an id within the token's `kept_ids`, a mask of 0{}",
        id_index(*.k),
        or_kept(*.k)
    )]
    IdOutsideKept {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the id, if a token has several.
        k: Option<usize>,
        /// The id that was given.
        id: i64,
    },
    /// A teacher's entry is outside the vocabulary on an unmasked token.
    #[error("`teacher_ids[{b},{t},{k}]`: got {id}, expected 0 ≤ id < V = {vocab} on an unmasked token")]
    TeacherIdOutOfRange {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the entry among the teacher's.
        k: usize,
        /// The id that was given.
        id: i64,
        /// The size of the vocabulary, `V`.
        vocab: usize,
    },
    /// The spec reads the likeliest entries of a teacher and the problem has none.
    #[error(
        "`teacher_logp`: not given, expected [{batch}, {tokens}, K] because the spec has `objective.distillation.top_k`"
    )]
    NoTeacherEntries {
        /// The number of sequences, `B`.
        batch: usize,
        /// The number of tokens per sequence, `T`.
        tokens: usize,
    },
    /// An id is twice among the teacher's entries of an unmasked token.
    #[error("`teacher_ids[{b},{t},{k}]`: got {id}, expected an id that is not at `teacher_ids[{b},{t},{first}]` too")]
    TeacherIdTwice {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the second place of the id.
        k: usize,
        /// The id that was given.
        id: i64,
        /// The index of the first place of the id.
        first: usize,
    },
    /// A teacher's logit is NaN or +∞ on an unmasked token.
    #[error(
        "`teacher_logits[{b},{t},{v}]`: got {}, expected a finite number or −∞ on an unmasked token",
        ShownNumber(*given)
    )]
    TeacherLogit {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The entry of the teacher's vocabulary.
        v: usize,
        /// The value that was given.
        given: f64,
    },
    /// A teacher's log-probability is NaN or above 0 on an unmasked token.
    #[error(
        "`teacher_logp[{b},{t},{k}]`: got {}, expected a log-probability ≤ 0 on an unmasked token",
        ShownNumber(*given)
    )]
    TeacherLogp {
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The index of the entry among the teacher's.
        k: usize,
        /// The value that was given.
        given: f64,
    },
    /// All values of a teacher's row are −∞ on an unmasked token.
    #[error("`{field}[{b},{t},:]`: got −∞ everywhere, expected a finite number on an unmasked token")]
    TeacherWithoutMass {
        /// The name of the array.
        field: &'static str,
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
    },
    /// The cumulative lengths of packed sequences are invalid.
    #[error("`cu_seqlens[{at}]`: got {given}, expected {expected}")]
    CuSeqlens {
        /// The index of the first wrong value.
        at: usize,
        /// The value that was given.
        given: i64,
        /// The values that would be accepted, in words.
        expected: String,
    },
    /// A segment id is invalid.
    #[error("`segment_ids[{t}]`: got {given}, expected {expected}")]
    SegmentId {
        /// The position of the token.
        t: usize,
        /// The id that was given.
        given: i64,
        /// The ids that would be accepted, in words.
        expected: String,
    },
    /// An unmasked token belongs to no sequence.
    #[error("`mask[0,{t}]`: got 1, expected 0: the last sequence of `cu_seqlens` ends at {end}")]
    NoSequence {
        /// The position of the token.
        t: usize,
        /// The end of the last sequence, in tokens.
        end: usize,
    },
    /// The spec divides by the padded width, which packed sequences do not have.
    #[error("`{field}`: not given, expected a number ≥ 1, since packed sequences have no padded width")]
    NoWidth {
        /// The path of the spec's field.
        field: &'static str,
    },
    /// Clip-Cov has more candidates than it selects, and which ones is not determined.
    #[error(
        "`selected`: not given, expected [B,T] because {candidates} tokens are within `objective.clip_cov.selection`, \
         of which a peer draws {taken} at random"
    )]
    Undetermined {
        /// The number of tokens within the band.
        candidates: usize,
        /// The number of tokens that are selected.
        taken: usize,
    },
    /// Two arrays must have the same dtype and do not.
    #[error("`{field}`: got dtype {given}, expected {expected}, that of `{like}`")]
    Dtype {
        /// The name of the array.
        field: &'static str,
        /// The dtype that it has.
        given: Dtype,
        /// The dtype that it should have.
        expected: Dtype,
        /// The name of the array that has that dtype.
        like: &'static str,
    },
    /// A mask has a value other than 0 and 1.
    #[error("`{field}[{b},{t}]`: got {}, expected 0 or 1", ShownNumber(*given))]
    Mask {
        /// The name of the array.
        field: &'static str,
        /// The sequence of the token.
        b: usize,
        /// The position of the token.
        t: usize,
        /// The value that was given.
        given: f64,
    },
}

fn id_index(k: Option<usize>) -> String {
    k.map_or(String::new(), |k| format!(",{k}"))
}

/// Returns the hint about `keep_sampled`, which exists only for tokens with one id.
fn or_kept(k: Option<usize>) -> &'static str {
    if k.is_none() { ", or `support.keep_sampled: true`" } else { "" }
}

impl<L> Problem<L> {
    /// Borrows everything except the logits.
    pub fn tokens(&self) -> Tokens<'_> {
        Tokens {
            ids: &self.ids,
            mask: &self.mask,
            advantages: &self.advantages,
            old_logp: self.old_logp.as_ref(),
            ref_logp: self.ref_logp.as_ref(),
            extra: &self.extra,
        }
    }

    /// Repeats `[B]` advantages as `[B,T]` if `spec` reads one per token: each sequence's advantage for all of its
    /// tokens.
    #[must_use]
    pub fn with_advantages_for(mut self, spec: &LossSpec) -> Self {
        // Arrays of a wrong shape are left as they are, for `check` to refuse.
        if let (AdvantageLevel::Token, Advantages::Sequence(of_rows)) = (spec.advantages, &self.advantages)
            && of_rows.len() == self.extra.sequences.count(self.mask.nrows())
            && self.extra.sequences.check(&self.mask).is_ok()
        {
            let of_tokens = self.extra.sequences.spread(self.mask.dim(), &of_rows.to_vec());
            self.advantages = Advantages::Token(of_tokens);
        }
        self
    }

    /// Copies the tokens of this problem to other logits.
    pub fn with_logits<M>(&self, logits: M) -> Problem<M> {
        let Self { logits: _, ids, mask, advantages, old_logp, ref_logp, extra } = self;
        Problem {
            logits,
            ids: ids.clone(),
            mask: mask.clone(),
            advantages: advantages.clone(),
            old_logp: old_logp.clone(),
            ref_logp: ref_logp.clone(),
            extra: extra.clone(),
        }
    }
}

impl Problem {
    /// Returns the shape `(B, T, V)` of the logits.
    pub fn shape(&self) -> Shape {
        // The rank is a part of the type; the shape is a slice.
        let [batch, tokens, vocab] = self.logits.shape() else { unreachable!("logits have rank 3") };
        Shape { batch: *batch, tokens: *tokens, vocab: *vocab }
    }

    /// Checks that this batch can be evaluated under `spec`: every range, every shape and every unmasked value. Values
    /// of masked tokens are not read.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec) -> Result<Shape, ProblemError> {
        if !self.logits.is_standard_layout() {
            return Err(ProblemError::Strided { field: "logits" });
        }
        let shape = self.shape();
        self.tokens().check(spec, shape)?;
        Ok(shape)
    }
}

impl Tokens<'_> {
    /// Checks that these tokens can be evaluated under `spec` with logits of `shape`, as [`Problem::check`] does.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        // Shapes first, so that every later index is within its array.
        spec.check()?;
        if shape.elements().is_none_or(|n| n == 0) {
            return Err(ProblemError::Shape {
                field: "logits",
                given: vec![shape.batch, shape.tokens, shape.vocab],
                expected: "[B,T,V] with B, T, V ≥ 1".into(),
            });
        }
        let per_token = [shape.batch, shape.tokens];
        let expect_shape = |field, given: &[usize], expected: &[usize], meaning: &str| {
            if given == expected {
                return Ok(());
            }
            Err(ProblemError::Shape { field, given: given.to_vec(), expected: format!("{expected:?} ({meaning})") })
        };
        expect_shape("ids", self.ids.shape(), &per_token, "[B,T] of the logits")?;
        expect_shape("mask", self.mask.shape(), &per_token, "[B,T] of the logits")?;
        let sequences = &self.extra.sequences;
        sequences.check(self.mask)?;
        if sequences.packed().is_some() {
            spec.expect_no_width().map_err(|field| ProblemError::NoWidth { field })?;
        }
        // Advantages are per sequence or per token, as the spec reads them.
        let advantages = self.advantages.name();
        match spec.advantages {
            AdvantageLevel::Sequence => {
                let meaning = match sequences {
                    Sequences::Rows => "[B] of the logits, as the spec has `advantages: sequence`",
                    Sequences::Packed(_) => "[S] of `cu_seqlens`, as the spec has `advantages: sequence`",
                };
                expect_shape(advantages, self.advantages.shape(), &[sequences.count(shape.batch)], meaning)?;
            }
            AdvantageLevel::Token => {
                let meaning = "[B,T] of the logits, as the spec has `advantages: token`";
                expect_shape(advantages, self.advantages.shape(), &per_token, meaning)?;
            }
        }
        // Every `[B,T]` array that the spec reads must exist, fit, and be finite where a token counts.
        for (field, array, because) in self.arrays_read(spec) {
            let Some(array) = array else {
                return Err(ProblemError::Missing { field, expected: per_token.to_vec(), because });
            };
            expect_shape(field, array.shape(), &per_token, "[B,T] of the logits")?;
            // A NaN marks a token that the sampler did not score, except where the ratio is taken against it.
            if field != "rollout_logp" || spec.old_logp == OldLogp::Rollout {
                self.expect_finite(field, |b, t| array[[b, t]])?;
            }
        }
        // Arrays with other shapes or ranges.
        self.check_extra(spec, shape)?;
        let of_tokens = self.advantages_of_tokens();
        self.expect_finite(advantages, |b, t| of_tokens[[b, t]])?;
        self.check_others(spec, shape)?;
        self.check_kept(spec, shape)?;
        self.check_teacher(spec, shape)?;
        // Ids are checked last: inside the vocabulary, and inside the support unless the sampled id is put back.
        let outside = |id: usize| !spec.support.has(id);
        let kept_ids = self.extra.kept_ids.as_ref().filter(|_| spec.reads_kept_ids());
        let outside_kept = |at: (usize, usize), id: i64| {
            kept_ids.is_some_and(|kept| !kept.slice(s![at.0, at.1, ..]).iter().any(|kept| i64::from(*kept) == id))
        };
        let others = self.extra.others.as_ref();
        for ((b, t), &first) in self.ids.indexed_iter().filter(|(at, _)| self.mask[*at]) {
            let ids =
                std::iter::once(first).chain(others.into_iter().flat_map(|others| others.at(b, t)).map(|of| of.0));
            for (k, id) in ids.enumerate() {
                let kept = spec.support.keep_sampled;
                let k = others.map(|_| k);
                match usize::try_from(id).ok().filter(|id| *id < shape.vocab) {
                    None => return Err(ProblemError::IdOutOfRange { b, t, k, id, vocab: shape.vocab }),
                    Some(column) if outside(column) && !kept => {
                        return Err(ProblemError::IdOutsideSupport { b, t, k, id });
                    }
                    Some(_) if !kept && outside_kept((b, t), id) => {
                        return Err(ProblemError::IdOutsideKept { b, t, k, id });
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Returns the softmax temperature of the token at `[b,t]` under `spec`; NaN if the batch should have it and does
    /// not.
    pub fn temperature(&self, spec: &LossSpec, at: (usize, usize)) -> f64 {
        // One temperature per token, or one per sequence.
        let given = || {
            let given = self.extra.temperature.as_ref()?;
            if given.dim() == self.mask.dim() {
                return given.get(at).copied();
            }
            given.get((self.extra.sequences.owner(at)?, 0)).copied()
        };
        spec.temperature.number().or_else(given).unwrap_or(f64::NAN)
    }

    /// Checks that each token has as many ids as the spec says, and a finite cotangent of each.
    fn check_others(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        let Shape { batch, tokens, .. } = shape;
        let others = self.extra.others.as_ref();
        // A wrong number of ids is an error of `ids`, a wrong number of cotangents one of `dlogp`.
        let wrong = |field, given: &[usize]| {
            // Users see one array `[B,T,K]`, so the message counts the first id too.
            let mut given = given.to_vec();
            if let Some(count) = given.get_mut(2) {
                *count += 1;
            }
            let expected =
                format!("[{batch}, {tokens}, {k}], as the spec has `ids_per_token: {k}`", k = spec.ids_per_token);
            Err(ProblemError::Shape { field, given, expected })
        };
        match others {
            None if spec.ids_per_token == 1 => Ok(()),
            None => wrong("ids", self.ids.shape()),
            Some(others) => {
                let expected = (batch, tokens, spec.ids_per_token - 1);
                if spec.ids_per_token == 1 || others.ids.dim() != expected {
                    return wrong("ids", others.ids.shape());
                }
                if others.dlogp.dim() != expected {
                    return wrong("dlogp", others.dlogp.shape());
                }
                for ((b, t, _), &given) in others.dlogp.indexed_iter() {
                    if self.mask[[b, t]] && !given.is_finite() {
                        return Err(ProblemError::NotFinite { field: "dlogp", b, t, given });
                    }
                }
                Ok(())
            }
        }
    }

    /// Lists the `[B,T]` arrays that `spec` reads, each with its name and the setting that reads it.
    fn arrays_read(&self, spec: &LossSpec) -> Vec<(&'static str, Option<&Array2<f64>>, &'static str)> {
        // An array that several settings read is listed for each; the first one gives the reason.
        let mask_reads = |which| spec.off_policy_mask.is_some_and(|mask| mask.behaviour == which);
        let compares = spec.compares_with_sampler();
        let (old_logp, rollout_logp) = (self.old_logp, self.extra.rollout_logp.as_ref());
        let all = [
            (spec.old_logp == OldLogp::Given, "old_logp", old_logp, "`old_logp: given`"),
            (mask_reads(OldLogp::Given), "old_logp", old_logp, "`off_policy_mask.behaviour: given`"),
            (compares, "old_logp", old_logp, "weights or rejections against the sampler"),
            (spec.old_logp == OldLogp::Rollout, "rollout_logp", rollout_logp, "`old_logp: rollout`"),
            (mask_reads(OldLogp::Rollout), "rollout_logp", rollout_logp, "`off_policy_mask.behaviour: rollout`"),
            (compares, "rollout_logp", rollout_logp, "weights or rejections against the sampler"),
            (spec.weighs_kl_by_rollout(), "rollout_logp", rollout_logp, "`kl.importance: rollout`"),
            (spec.kl.is_some(), "ref_logp", self.ref_logp, "a `kl` term"),
            (spec.dentropy, "dentropy", self.extra.dentropy.as_ref(), "`dentropy: true`"),
        ];
        all.into_iter().filter_map(|(read, field, array, because)| read.then_some((field, array, because))).collect()
    }

    fn check_extra(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        let Shape { batch, tokens, vocab } = shape;
        if let Some(rollout) = spec.rollout.as_ref().filter(|rollout| rollout.source == RolloutSource::Given) {
            // VESPO may read the weights of masked tokens too, as some projects do.
            // Given weights are checked where the loss reads them.
            let everywhere = matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
            let one_a_row = rollout.level == RolloutLevel::Token;
            let because = "`rollout.source: given`";
            self.check_weights("rollout_weights", self.extra.rollout_weights.as_ref(), because, one_a_row, everywhere)?;
        }
        if spec.token_weights.is_some() {
            self.check_weights("token_weights", self.extra.token_weights.as_ref(), "`token_weights`", true, false)?;
        }
        if spec.temperature == Temperature::Given {
            let because = "`temperature: given`";
            self.check_given("temperature", self.extra.temperature.as_ref(), because, true, false, |(b, t), given| {
                let fits = given > 0.0 && given.is_finite();
                if fits { Ok(()) } else { Err(ProblemError::Temperature { b, t, given }) }
            })?;
        }
        // A selection by given tokens needs their array.
        let selects = spec.reads_selected();
        match &self.extra.selected {
            None if selects => {
                let because = "an objective that reads `selected`";
                return Err(ProblemError::Missing { field: "selected", expected: vec![batch, tokens], because });
            }
            Some(selected) if selects && selected.dim() != (batch, tokens) => {
                let expected = format!("[{batch}, {tokens}]");
                return Err(ProblemError::Shape { field: "selected", given: selected.shape().to_vec(), expected });
            }
            _ => {}
        }
        if spec.logits.bias {
            let Some(bias) = &self.extra.bias else {
                let because = "`logits.bias: true`";
                return Err(ProblemError::Missing { field: "bias", expected: vec![vocab], because });
            };
            if bias.len() != vocab {
                let expected = format!("[{vocab}]");
                return Err(ProblemError::Shape { field: "bias", given: bias.shape().to_vec(), expected });
            }
        }
        Ok(())
    }

    /// Checks that weights are finite and `≥ 0`: `[B,T]`, or with `one_a_row` one per sequence; where a token counts,
    /// or `everywhere`.
    fn check_weights(
        &self,
        field: &'static str,
        weights: Option<&Array2<f64>>,
        because: &'static str,
        one_a_row: bool,
        everywhere: bool,
    ) -> Result<(), ProblemError> {
        self.check_given(field, weights, because, one_a_row, everywhere, |(b, t), given| {
            let fits = given >= 0.0 && given.is_finite();
            if fits { Ok(()) } else { Err(ProblemError::Weight { field, b, t, given }) }
        })
    }

    /// Checks numbers with `check`: `[B,T]`, or with `one_a_row` one per sequence; where a token counts, or
    /// `everywhere`.
    fn check_given(
        &self,
        field: &'static str,
        values: Option<&Array2<f64>>,
        because: &'static str,
        one_a_row: bool,
        everywhere: bool,
        check: impl Fn((usize, usize), f64) -> Result<(), ProblemError>,
    ) -> Result<(), ProblemError> {
        let (batch, tokens) = self.mask.dim();
        let sequences = self.extra.sequences.count(batch);
        let Some(values) = values else {
            return Err(ProblemError::Missing { field, expected: vec![batch, tokens], because });
        };
        // The number of columns distinguishes `[B,T]` from `[B,1]`, also for packed sequences.
        let broadcast = one_a_row && values.dim() == (sequences, 1);
        if values.dim() != (batch, tokens) && !broadcast {
            let expected = format!("[{batch}, {tokens}] or [{sequences}, 1]");
            return Err(ProblemError::Shape { field, given: values.shape().to_vec(), expected });
        }
        // A value of a sequence is checked if any of its tokens counts.
        let filled: Vec<bool> =
            self.sequences().iter().map(|sequence| sequence.places().any(|at| self.mask[at])).collect();
        for ((b, t), &given) in values.indexed_iter() {
            if everywhere || if broadcast { filled[b] } else { self.mask[[b, t]] } {
                check((b, t), given)?;
            }
        }
        Ok(())
    }

    fn expect_finite(&self, field: &'static str, value: impl Fn(usize, usize) -> f64) -> Result<(), ProblemError> {
        for ((b, t), &counts) in self.mask.indexed_iter() {
            let given = value(b, t);
            if counts && !given.is_finite() {
                return Err(ProblemError::NotFinite { field, b, t, given });
            }
        }
        Ok(())
    }
}

/// Converts the numbers 0 and 1 of `field`, such as `mask`, to truth values.
///
/// # Errors
/// [`ProblemError::Mask`] at the first value other than 0 and 1.
pub fn mask_from(field: &'static str, values: &Array2<f64>) -> Result<Array2<bool>, ProblemError> {
    for ((b, t), &given) in values.indexed_iter() {
        if given != 0.0 && given != 1.0 {
            return Err(ProblemError::Mask { field, b, t, given });
        }
    }
    Ok(values.mapv(|x| x == 1.0))
}
