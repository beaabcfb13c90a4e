//! A batch whose logits are the product of hidden states and an LM head.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use ndarray::{Array2, Ix2, Ix3};
use serde::{Deserialize, Serialize};

use super::{Dtype, FloatArray, FloatView, Problem, ProblemError, Shape, Tokens};
use crate::spec::LossSpec;

/// A batch without logits: `logits[b,t,v] = Σ_h hidden[b,t,h] · lm_head[h,v]`.
pub type HeadProblem = Problem<Projection>;

/// What logits are made of. What comes between them and the softmax (scale, softcap, bias) is [`crate::spec::LogitsTransform`].
#[derive(Clone, Debug)]
pub struct Projection {
    /// `[B,T,H]`: what the last norm of the model left.
    pub hidden: FloatArray<Ix3>,
    /// `[H,V]` or `[V,H]`, of the same dtype.
    pub lm_head: FloatArray<Ix2>,
    /// Which of the two.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of `hidden` before anything reads them, as a matrix product in that dtype
    /// leaves them. Their gradient is passed on as it is.
    pub rounds_logits: bool,
}

/// A [`Projection`], borrowed.
#[derive(Clone, Debug)]
pub struct ProjectionView<'a> {
    /// `[B,T,H]`.
    pub hidden: FloatView<'a, Ix3>,
    /// `[H,V]` or `[V,H]`.
    pub lm_head: FloatView<'a, Ix2>,
    /// Which of the two.
    pub layout: HeadLayout,
    /// As [`Projection::rounds_logits`].
    pub rounds_logits: bool,
}

impl Projection {
    /// The same, borrowed.
    pub fn view(&self) -> ProjectionView<'_> {
        let Self { hidden, lm_head, layout, rounds_logits } = self;
        ProjectionView {
            hidden: hidden.view(),
            lm_head: lm_head.view(),
            layout: *layout,
            rounds_logits: *rounds_logits,
        }
    }
}

impl ProjectionView<'_> {
    /// The same, borrowed for less long.
    pub fn view(&self) -> ProjectionView<'_> {
        let Self { hidden, lm_head, layout, rounds_logits } = self;
        ProjectionView {
            hidden: hidden.view(),
            lm_head: lm_head.view(),
            layout: *layout,
            rounds_logits: *rounds_logits,
        }
    }

    /// `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        let &[batch, tokens, hidden] = self.hidden.shape() else { unreachable!("hidden has rank 3") };
        let &[rows, columns] = self.lm_head.shape() else { unreachable!("lm_head has rank 2") };
        let vocab = match self.layout {
            HeadLayout::HiddenByVocab => columns,
            HeadLayout::VocabByHidden => rows,
        };
        HeadShape { batch, tokens, hidden, vocab }
    }

    /// Checks that both arrays are dense and fit each other, and the `tokens` them and `spec`.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec, tokens: &Tokens) -> Result<HeadShape, ProblemError> {
        let Self { hidden, lm_head, layout, .. } = self;
        for (field, dense) in [("hidden", hidden.is_standard_layout()), ("lm_head", lm_head.is_standard_layout())] {
            if !dense {
                return Err(ProblemError::Strided { field });
            }
        }
        let shape = self.shape();
        if shape.hidden == 0 {
            let expected = "[B,T,H] with H ≥ 1".into();
            return Err(ProblemError::Shape { field: "hidden", given: hidden.shape().to_vec(), expected });
        }
        let expected = layout.extents(shape.hidden, shape.vocab);
        if lm_head.shape() != expected {
            let expected = format!("{} with H = {}, that of `hidden`", layout.name(), shape.hidden);
            return Err(ProblemError::Shape { field: "lm_head", given: lm_head.shape().to_vec(), expected });
        }
        if lm_head.dtype() != hidden.dtype() {
            let (given, expected) = (lm_head.dtype(), hidden.dtype());
            return Err(ProblemError::Dtype { field: "lm_head", given, expected, like: "hidden" });
        }
        tokens.check(spec, shape.logits())?;
        Ok(shape)
    }
}

/// How an LM head lies in memory, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HeadLayout {
    /// `[H,V]`, as JAX stores it.
    #[serde(rename = "hv")]
    HiddenByVocab,
    /// `[V,H]`, as `PyTorch` stores it, and as the embedding that it may be tied to.
    #[serde(rename = "vh")]
    VocabByHidden,
}

/// How the arrays of a [`HeadProblem`] lie, and what its logits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadForm {
    /// How `lm_head` lies.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of `hidden`.
    pub rounds_logits: bool,
}

impl HeadLayout {
    /// The extents of a head of `hidden` by `vocab`.
    pub fn extents(self, hidden: usize, vocab: usize) -> [usize; 2] {
        match self {
            HeadLayout::HiddenByVocab => [hidden, vocab],
            HeadLayout::VocabByHidden => [vocab, hidden],
        }
    }

    /// Where the weight of hidden unit `h` for column `v` is.
    pub fn at(self, h: usize, v: usize) -> [usize; 2] {
        self.extents(h, v)
    }

    /// `[v,h]`: the weights, or the gradient, of hidden units `h` for columns `v`, exactly and row-major.
    pub fn part(self, of: &FloatView<Ix2>, v: Range<usize>, h: Range<usize>) -> Array2<f64> {
        match self {
            HeadLayout::HiddenByVocab => of.part_transposed(h, v),
            HeadLayout::VocabByHidden => of.part(v, h),
        }
    }

    /// `hv` or `vh`, as files and options have it.
    pub fn key(self) -> &'static str {
        match self {
            HeadLayout::HiddenByVocab => "hv",
            HeadLayout::VocabByHidden => "vh",
        }
    }

    /// `[H,V]` or `[V,H]`.
    pub fn name(self) -> &'static str {
        match self {
            HeadLayout::HiddenByVocab => "[H,V]",
            HeadLayout::VocabByHidden => "[V,H]",
        }
    }
}

impl FromStr for HeadLayout {
    type Err = String;

    fn from_str(key: &str) -> Result<Self, String> {
        let all = [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden];
        all.into_iter()
            .find(|layout| layout.key() == key)
            .ok_or_else(|| format!("layout: got `{key}`, expected hv, which is [H,V], or vh, which is [V,H]"))
    }
}

/// Extents of a [`HeadProblem`], written `BxTxHxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// `B`, sequences.
    pub batch: usize,
    /// `T`, tokens a sequence.
    pub tokens: usize,
    /// `H`, width of the model.
    pub hidden: usize,
    /// `V`, vocabulary.
    pub vocab: usize,
}

impl HeadShape {
    /// Extents of the logits.
    pub fn logits(self) -> Shape {
        let Self { batch, tokens, vocab, .. } = self;
        Shape { batch, tokens, vocab }
    }
}

impl fmt::Display for HeadShape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}x{}x{}x{}", self.batch, self.tokens, self.hidden, self.vocab)
    }
}

impl FromStr for HeadShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("shape: got `{text}`, expected BxTxHxV with integers ≥ 1, such as 2x16x896x151936");
        let extents: Vec<usize> =
            text.split('x').map(|n| n.parse().map_err(|_| expected())).collect::<Result<_, _>>()?;
        match extents[..] {
            [batch, tokens, hidden, vocab] if extents.iter().all(|&n| n > 0) => {
                Ok(HeadShape { batch, tokens, hidden, vocab })
            }
            _ => Err(expected()),
        }
    }
}

impl HeadProblem {
    /// `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        self.logits.view().shape()
    }

    /// The dtype of `hidden` and of `lm_head`.
    pub fn dtype(&self) -> Dtype {
        self.logits.hidden.dtype()
    }

    /// Checks that this batch can be evaluated under `spec`: every range, shape and unmasked value.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec) -> Result<HeadShape, ProblemError> {
        self.logits.view().check(spec, &self.tokens())
    }
}
