//! One batch, and what an implementation makes of it.
//!
//! Notation: `B` sequences of `T` tokens over a vocabulary of `V`; `u` is a dtype's unit roundoff. Where `S` sequences are
//! [packed](Sequences::Packed) into one row of `N` tokens, `[B,T]` is `[1,N]`, and what has `B` of sequences has `S`.

mod extents;
mod lm_head;
mod others;
mod outcome;
mod select;
mod sequences;

use std::fmt;
use std::str::FromStr;

use ndarray::{Array1, Array2, Ix3};

pub use crate::array::{Dtype, Float, FloatArray, FloatView, first_and_others, with_others};
pub use extents::ProblemShape;
pub use lm_head::{HeadForm, HeadLayout, HeadProblem, HeadShape, Projection, ProjectionView};
pub use others::OtherIds;
pub use outcome::{Candidate, HeadCandidate, HeadGradient, HeadGradientView, Lend, Metrics, Outcome};
pub use select::ProblemPart;
pub use sequences::{CuSeqlens, Sequence, Sequences};

use crate::spec::{AdvantageLevel, LossSpec, Objective, OldLogp, RolloutLevel, RolloutSource, SpecError, Temperature};

/// One GRPO batch: position `[b,t]` of `logits` scores token `ids[b,t]`.
///
/// The logits are an array, or in a [`HeadProblem`] the [`Projection`] that they are the product of.
#[derive(Clone, Debug)]
pub struct Problem<L = FloatArray<Ix3>> {
    /// `[B,T,V]`, in nats before the temperature.
    pub logits: L,
    /// `[B,T]`, the sampled tokens, or the first of a token's ids where the spec asks for logp of several; anything may stand where
    /// `mask` is false.
    pub ids: Array2<i64>,
    /// `[B,T]`, true for the tokens that count.
    pub mask: Array2<bool>,
    /// `[B]` or `[B,T]`, as the spec says; `[S]` of packed sequences.
    pub advantages: Advantages,
    /// `[B,T]`, nats: log-probability under the policy that sampled, or that the last epoch left.
    pub old_logp: Option<Array2<f64>>,
    /// `[B,T]`, nats: log-probability under the reference policy of the KL penalty.
    pub ref_logp: Option<Array2<f64>>,
    /// What only some specs ask for, or some batches have.
    pub extra: Extra,
}

/// A [`Problem`] without its logits, borrowed: what a kernel is told of the tokens. Fields as there.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "they stand with `Problem`")]
pub struct Tokens<'p> {
    pub ids: &'p Array2<i64>,
    pub mask: &'p Array2<bool>,
    pub advantages: &'p Advantages,
    pub old_logp: Option<&'p Array2<f64>>,
    pub ref_logp: Option<&'p Array2<f64>>,
    pub extra: &'p Extra,
}

/// Arrays that only some specs read, and how sequences lie where a row is not one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extra {
    /// `[B,T]`, nats: log-probability under the policy that the sampler ran. NaN: not scored.
    pub rollout_logp: Option<Array2<f64>>,
    /// `[B,T]` or `[B,1]`, `≥ 0`: importance weights against the sampler's policy; `[1,N]` or `[S,1]` of packed sequences.
    pub rollout_weights: Option<Array2<f64>>,
    /// `[B,T]` or `[B,1]`, `≥ 0`: weights of tokens that the trainer gives; `[1,N]` or `[S,1]` of packed sequences.
    pub token_weights: Option<Array2<f64>>,
    /// `[B,T]`: the tokens that KL-Cov penalizes, or that Clip-Cov leaves out.
    pub selected: Option<Array2<bool>>,
    /// `[V]`: bias of the LM head.
    pub bias: Option<Array1<f64>>,
    /// Which tokens make a sequence.
    pub sequences: Sequences,
    /// `[B,T]`: the cotangent of each token's entropy.
    pub dentropy: Option<Array2<f64>>,
    /// `[B,T]` or `[B,1]`, `> 0`: the softmax temperature of each token, or one a sequence; `[1,N]` or `[S,1]` of packed sequences.
    pub temperature: Option<Array2<f64>>,
    /// The ids of each token beside its first, where the spec asks for logp of [several](LossSpec::ids_per_token).
    pub others: Option<OtherIds>,
}

/// Advantages, dimensionless.
#[derive(Clone, Debug, PartialEq)]
pub enum Advantages {
    /// One a sequence, `[B]`, or `[S]` of packed ones.
    Sequence(Array1<f64>),
    /// One a token, `[B,T]`.
    Token(Array2<f64>),
    /// The same by the cotangents of logp, `[B,T]`, of which they are the negatives: see [`LossSpec::from_cotangents`].
    Dlogp(Array2<f64>),
}

impl Advantages {
    /// The advantage of token `[b,t]` of a batch whose rows are its sequences; see [`Problem::advantage`].
    pub fn at(&self, b: usize, t: usize) -> f64 {
        match self {
            Advantages::Sequence(a) => a[b],
            Advantages::Token(a) => a[[b, t]],
            Advantages::Dlogp(dlogp) => -dlogp[[b, t]],
        }
    }

    /// What the array is called.
    pub fn name(&self) -> &'static str {
        match self {
            Advantages::Sequence(_) | Advantages::Token(_) => "advantages",
            Advantages::Dlogp(_) => "dlogp",
        }
    }

    /// The extents, `[B]` or `[B,T]`.
    pub fn shape(&self) -> &[usize] {
        match self {
            Advantages::Sequence(a) => a.shape(),
            Advantages::Token(a) | Advantages::Dlogp(a) => a.shape(),
        }
    }
}

/// Extents of a batch, written `BxTxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// `B`, sequences.
    pub batch: usize,
    /// `T`, tokens a sequence.
    pub tokens: usize,
    /// `V`, vocabulary.
    pub vocab: usize,
}

impl Shape {
    /// `B·T·V`, or `None` where that does not fit.
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

/// A [`Problem`] that cannot be evaluated under its spec.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// The spec itself is out of range.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An array is missing that the spec needs.
    #[error("`{field}`: not given, expected shape {expected:?} because the spec has {because}")]
    Missing {
        /// Name of the array.
        field: &'static str,
        /// Shape it should have.
        expected: Vec<usize>,
        /// The setting that needs it.
        because: &'static str,
    },
    /// An array has the wrong shape.
    #[error("`{field}`: got shape {given:?}, expected {expected}")]
    Shape {
        /// Name of the array.
        field: &'static str,
        /// Shape found.
        given: Vec<usize>,
        /// Shape wanted, in words.
        expected: String,
    },
    /// An array is not dense and row-major.
    #[error("`{field}`: got a strided array, expected dense row-major (use `as_standard_layout`)")]
    Strided {
        /// Name of the array.
        field: &'static str,
    },
    /// The elements of each row are not side by side.
    #[error("`{field}`: got rows with a stride of {stride}, expected 1: a row's elements must lie side by side")]
    StridedRows {
        /// Name of the array.
        field: &'static str,
        /// Elements from one column to the next.
        stride: isize,
    },
    /// A token id lies outside the vocabulary on an unmasked token.
    #[error("`ids[{b},{t}{}]`: got {id}, expected 0 ≤ id < V = {vocab} on an unmasked token", id_index(*.k))]
    IdOutOfRange {
        /// Sequence.
        b: usize,
        /// Token.
        t: usize,
        /// Which of its ids, where it has several.
        k: Option<usize>,
        /// The id found.
        id: i64,
        /// `V`.
        vocab: usize,
    },
    /// A NaN or infinity on an unmasked token.
    #[error("`{field}[{b},{t}]`: got {given}, expected a finite number on an unmasked token")]
    NotFinite {
        /// Name of the array.
        field: &'static str,
        /// Sequence.
        b: usize,
        /// Token.
        t: usize,
        /// The value found.
        given: f64,
    },
    /// A weight that is none.
    #[error("`{field}[{b},{t}]`: got {given}, expected a finite number ≥ 0")]
    Weight {
        /// Name of the array.
        field: &'static str,
        /// Sequence.
        b: usize,
        /// Token, or 0 where there is one weight a sequence.
        t: usize,
        /// The value found.
        given: f64,
    },
    /// A temperature that is none.
    #[error("`temperature[{b},{t}]`: got {given}, expected a finite number > 0")]
    Temperature {
        /// Sequence.
        b: usize,
        /// Token, or 0 where there is one a sequence.
        t: usize,
        /// The value found.
        given: f64,
    },
    /// A token was sampled that the spec's support leaves out.
    #[error("`ids[{b},{t}{}]`: got {id}, expected an id within `support`{}", id_index(*.k), or_kept(*.k))]
    IdOutsideSupport {
        /// Sequence.
        b: usize,
        /// Token.
        t: usize,
        /// Which of its ids, where it has several.
        k: Option<usize>,
        /// The id found.
        id: i64,
    },
    /// Cumulative lengths that are none.
    #[error("`cu_seqlens[{at}]`: got {given}, expected {expected}")]
    CuSeqlens {
        /// Which of them.
        at: usize,
        /// The value found.
        given: i64,
        /// The value wanted, in words.
        expected: String,
    },
    /// A segment id that is none.
    #[error("`segment_ids[{t}]`: got {given}, expected {expected}")]
    SegmentId {
        /// Token.
        t: usize,
        /// The id found.
        given: i64,
        /// The id wanted, in words.
        expected: String,
    },
    /// A token counts that belongs to no sequence.
    #[error("`mask[0,{t}]`: got 1, expected 0: the last sequence of `cu_seqlens` ends at {end}")]
    NoSequence {
        /// Token.
        t: usize,
        /// Where the last sequence ends.
        end: usize,
    },
    /// A width is asked for that packed sequences do not have.
    #[error("`{field}`: not given, expected a number ≥ 1, since packed sequences have no padded width")]
    NoWidth {
        /// The setting.
        field: &'static str,
    },
    /// Clip-Cov has more candidates than it takes.
    #[error(
        "`selected`: not given, expected [B,T] because {candidates} tokens are within `objective.clip_cov.selection`, \
         of which a peer draws {taken} at random"
    )]
    Undetermined {
        /// How many tokens are within the band.
        candidates: usize,
        /// How many are left out.
        taken: usize,
    },
    /// Two arrays have different dtypes that must have one.
    #[error("`{field}`: got dtype {given}, expected {expected}, that of `{like}`")]
    Dtype {
        /// Name of the array.
        field: &'static str,
        /// Its dtype.
        given: Dtype,
        /// The dtype wanted.
        expected: Dtype,
        /// The array that has it.
        like: &'static str,
    },
    /// A mask value other than 0 and 1.
    #[error("`{field}[{b},{t}]`: got {given}, expected 0 or 1")]
    Mask {
        /// Name of the array.
        field: &'static str,
        /// Sequence.
        b: usize,
        /// Token.
        t: usize,
        /// The value found.
        given: f64,
    },
}

fn id_index(k: Option<usize>) -> String {
    k.map_or(String::new(), |k| format!(",{k}"))
}

/// Of several ids none is put back.
fn or_kept(k: Option<usize>) -> &'static str {
    if k.is_none() { ", or `support.keep_sampled: true`" } else { "" }
}

impl<L> Problem<L> {
    /// All but the logits.
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

    /// With `[B]` advantages as `[B,T]` where `spec` reads one a token: each sequence's for all of its tokens.
    #[must_use]
    pub fn with_advantages_for(mut self, spec: &LossSpec) -> Self {
        if let (AdvantageLevel::Token, Advantages::Sequence(of_rows)) = (spec.advantages, &self.advantages)
            && of_rows.len() == self.extra.sequences.count(self.mask.nrows())
            && self.extra.sequences.check(&self.mask).is_ok()
        {
            let of_tokens = self.extra.sequences.spread(self.mask.dim(), &of_rows.to_vec());
            self.advantages = Advantages::Token(of_tokens);
        }
        self
    }

    /// The same tokens with other logits.
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
    /// `(B, T, V)` of the logits.
    pub fn shape(&self) -> Shape {
        let [batch, tokens, vocab] = self.logits.shape() else { unreachable!("logits have rank 3") };
        Shape { batch: *batch, tokens: *tokens, vocab: *vocab }
    }

    /// Checks that this batch can be evaluated under `spec`: every range, shape and unmasked value. Values under the
    /// mask are not looked at.
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
    /// Checks that these can be evaluated under `spec` with logits of `shape`, as [`Problem::check`] does.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
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
        for (field, array, because) in self.arrays_read(spec) {
            let Some(array) = array else {
                return Err(ProblemError::Missing { field, expected: per_token.to_vec(), because });
            };
            expect_shape(field, array.shape(), &per_token, "[B,T] of the logits")?;
            // NaN is how a sampler says that it did not score a token, where that means anything.
            if field != "rollout_logp" || spec.old_logp == OldLogp::Rollout {
                self.expect_finite(field, |b, t| array[[b, t]])?;
            }
        }
        self.check_extra(spec, shape)?;
        let of_tokens = self.advantages_of_tokens();
        self.expect_finite(advantages, |b, t| of_tokens[[b, t]])?;
        self.check_others(spec, shape)?;
        let outside =
            |id: usize| spec.support.vocab.is_some_and(|vocab| id >= vocab) || spec.support.excluded_ids.contains(&id);
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
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    /// The softmax temperature of the token at `[b,t]` under `spec`; NaN where it is to be given and is not.
    pub fn temperature(&self, spec: &LossSpec, at: (usize, usize)) -> f64 {
        let given = || {
            let given = self.extra.temperature.as_ref()?;
            if given.dim() == self.mask.dim() {
                return given.get(at).copied();
            }
            given.get((self.extra.sequences.owner(at)?, 0)).copied()
        };
        spec.temperature.number().or_else(given).unwrap_or(f64::NAN)
    }

    /// That each token has as many ids as the spec asks for logp of, and a cotangent of each.
    fn check_others(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        let Shape { batch, tokens, .. } = shape;
        let others = self.extra.others.as_ref();
        let wrong = |field, given: &[usize]| {
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

    /// The `[B,T]` arrays that `spec` reads, with their names and the setting that asks for them.
    fn arrays_read(&self, spec: &LossSpec) -> Vec<(&'static str, Option<&Array2<f64>>, &'static str)> {
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
            // VESPO reads those of masked tokens too, as its peers do.
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

    /// Finite numbers `≥ 0`, `[B,T]` or, `one_a_row`, a number a sequence: where a token counts, or `everywhere`.
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

    /// Numbers that pass `check`, `[B,T]` or, `one_a_row`, a number a sequence: where a token counts, or `everywhere`.
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
        let broadcast = one_a_row && values.dim() == (sequences, 1);
        if values.dim() != (batch, tokens) && !broadcast {
            let expected = format!("[{batch}, {tokens}] or [{sequences}, 1]");
            return Err(ProblemError::Shape { field, given: values.shape().to_vec(), expected });
        }
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

/// Reads the truth values of `field`, such as `mask`, from numbers.
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
