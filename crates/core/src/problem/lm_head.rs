//! A batch whose logits are the product of hidden states and an LM head.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use ndarray::{Array2, Ix2, Ix3};
use serde::{Deserialize, Serialize};

use super::{Dtype, FloatArray, FloatView, Problem, ProblemError, Shape, Tokens};
use crate::spec::LossSpec;

/// A batch without logits: `logits[b,t,v] = Σ_h hidden[b,t,h] · lm_head[h,v]`.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::{Advantages, Extra, FloatArray, HeadLayout, HeadProblem, Projection};
/// use assay::spec::LossSpec;
/// use ndarray::{Array1, Array2, Array3};
///
/// // One sequence of 3 tokens, a model of width 8 and a head over 16 entries, stored as PyTorch does.
/// let problem = HeadProblem {
///     logits: Projection {
///         hidden: Array3::<f32>::ones((1, 3, 8)).into(),
///         lm_head: Array2::<f32>::ones((16, 8)).into(),
///         layout: HeadLayout::VocabByHidden,
///         rounds_logits: false,
///     },
///     ids: Array2::zeros((1, 3)),
///     mask: Array2::from_elem((1, 3), true),
///     advantages: Advantages::Sequence(Array1::ones(1)),
///     old_logp: Some(Array2::from_elem((1, 3), -2.7)),
///     ref_logp: None,
///     extra: Extra::default(),
/// };
/// assert_eq!(problem.check(&LossSpec::default())?.to_string(), "1x3x8x16");
/// # Ok::<(), assay::problem::ProblemError>(())
/// ```
pub type HeadProblem = Problem<Projection>;

/// The factors of the logits. The transform between product and softmax (scale, softcap, bias) is
/// [`crate::spec::LogitsTransform`].
#[derive(Clone, Debug)]
pub struct Projection {
    /// The hidden states, `[B,T,H]`, after the last norm of the model.
    pub hidden: FloatArray<Ix3>,
    /// The LM head, `[H,V]` or `[V,H]`, of the same dtype as `hidden`.
    pub lm_head: FloatArray<Ix2>,
    /// The layout of `lm_head`, `[H,V]` or `[V,H]`.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of `hidden` before anything reads them, as a matrix product in that
    /// dtype rounds them. Their gradient is not rounded on the way back.
    pub rounds_logits: bool,
}

/// A borrowed [`Projection`], whose arrays are not copied.
#[derive(Clone, Debug)]
pub struct ProjectionView<'a> {
    /// The hidden states, `[B,T,H]`.
    pub hidden: FloatView<'a, Ix3>,
    /// The LM head, `[H,V]` or `[V,H]`.
    pub lm_head: FloatView<'a, Ix2>,
    /// The layout of `lm_head`, `[H,V]` or `[V,H]`.
    pub layout: HeadLayout,
    /// Whether logits are rounded, as [`Projection::rounds_logits`].
    pub rounds_logits: bool,
}

impl Projection {
    /// Borrows both arrays without copying them.
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
    /// Borrows the arrays again, for a shorter lifetime.
    pub fn view(&self) -> ProjectionView<'_> {
        let Self { hidden, lm_head, layout, rounds_logits } = self;
        ProjectionView {
            hidden: hidden.view(),
            lm_head: lm_head.view(),
            layout: *layout,
            rounds_logits: *rounds_logits,
        }
    }

    /// Returns the shape `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        let &[batch, tokens, hidden] = self.hidden.shape() else { unreachable!("hidden has rank 3") };
        let &[rows, columns] = self.lm_head.shape() else { unreachable!("lm_head has rank 2") };
        let vocab = match self.layout {
            HeadLayout::HiddenByVocab => columns,
            HeadLayout::VocabByHidden => rows,
        };
        HeadShape { batch, tokens, hidden, vocab }
    }

    /// Checks that both arrays are dense and fit each other, and that `tokens` fit them and `spec`.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec, tokens: &Tokens) -> Result<HeadShape, ProblemError> {
        let Self { hidden, lm_head, layout, .. } = self;
        // Layout, then shapes, then dtypes: each message assumes the checks before it.
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

/// The layout of an LM head in memory, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HeadLayout {
    /// The layout `[H,V]`, as JAX stores a head.
    #[serde(rename = "hv")]
    HiddenByVocab,
    /// The layout `[V,H]`, as `PyTorch` stores a head and the embedding that it may be tied to.
    #[serde(rename = "vh")]
    VocabByHidden,
}

/// The layout of a [`HeadProblem`]'s head, and the rounding of its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadForm {
    /// The layout of `lm_head`, `[H,V]` or `[V,H]`.
    pub layout: HeadLayout,
    /// Whether logits are rounded to the dtype of `hidden`.
    pub rounds_logits: bool,
}

impl HeadLayout {
    /// Returns the shape of a head of `hidden` by `vocab` in this layout.
    pub fn extents(self, hidden: usize, vocab: usize) -> [usize; 2] {
        match self {
            HeadLayout::HiddenByVocab => [hidden, vocab],
            HeadLayout::VocabByHidden => [vocab, hidden],
        }
    }

    /// Returns the index of the weight of hidden unit `h` for vocabulary entry `v`.
    pub fn at(self, h: usize, v: usize) -> [usize; 2] {
        self.extents(h, v)
    }

    /// Widens the weights, or the gradient, of hidden units `h` for vocabulary entries `v` to f64, as `[v,h]`, exactly.
    pub fn part(self, of: &FloatView<Ix2>, v: Range<usize>, h: Range<usize>) -> Array2<f64> {
        match self {
            HeadLayout::HiddenByVocab => of.part_transposed(h, v),
            HeadLayout::VocabByHidden => of.part(v, h),
        }
    }

    /// Returns the key `hv` or `vh` that files and options use.
    pub fn key(self) -> &'static str {
        match self {
            HeadLayout::HiddenByVocab => "hv",
            HeadLayout::VocabByHidden => "vh",
        }
    }

    /// Returns the shape in symbols, `[H,V]` or `[V,H]`.
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

/// The shape of a [`HeadProblem`], written `BxTxHxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// The number of sequences, `B`.
    pub batch: usize,
    /// The number of tokens per sequence, `T`.
    pub tokens: usize,
    /// The hidden width of the model, `H`.
    pub hidden: usize,
    /// The size of the vocabulary, `V`.
    pub vocab: usize,
}

impl HeadShape {
    /// Returns the shape `(B, T, V)` of the logits.
    pub fn logits(self) -> Shape {
        let Self { batch, tokens, vocab, .. } = self;
        Shape { batch, tokens, vocab }
    }
}

impl From<HeadShape> for Shape {
    fn from(shape: HeadShape) -> Shape {
        shape.logits()
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
    /// Returns the shape `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        self.logits.view().shape()
    }

    /// Returns the dtype of `hidden` and of `lm_head`.
    pub fn dtype(&self) -> Dtype {
        self.logits.hidden.dtype()
    }

    /// Checks that this batch can be evaluated under `spec`: every range, every shape and every unmasked value.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong, what it holds and what was expected.
    pub fn check(&self, spec: &LossSpec) -> Result<HeadShape, ProblemError> {
        self.logits.view().check(spec, &self.tokens())
    }
}
