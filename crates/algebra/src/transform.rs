//! The transform of logits before their softmax, and of dlogits on the way back.
//!
//! ```text
//! h_j  = cap · tanh(scale · (x_j + bias_j) / cap)       −∞ outside the support
//! dx_j = dh_j · scale · (1 − tanh²(scale · (x_j + bias_j) / cap))
//! ```
//!
//! The softmax is of `rate·t_j/T`. The rate is a part of the factor of its gaps, so that a scale alone costs a sign.
//!
//! ```text
//!                 t_j                               rate        factor            dx_j
//! with a cap      tanh(factor · (x_j + bias_j))     cap         scale / cap       dt_j · factor · (1 − t_j²)
//! without         factor · (x_j + bias_j)           |scale|     the sign of scale dt_j · factor
//! ```
//!
//! Columns that differ are described by one array, so that one program serves any list of ids.

use ndarray::{Array1, Array2};

use assay_core::problem::Tokens;
use assay_core::spec::{LogitsTransform, LossSpec};

/// The part of a spec's transform of logits that determines a program's structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transform {
    /// Whether a `tanh` caps the logits.
    pub caps: bool,
    /// Whether the scale is negative, so that a larger logit becomes a smaller one.
    pub flips: bool,
    /// Whether columns differ: by a bias, or because some are outside the support.
    pub columns: bool,
}

impl Transform {
    /// Derives the transform of `spec`, or `None` if the softmax is of the logits as they are.
    pub fn from_spec(spec: &LossSpec) -> Option<Self> {
        let columns = spec.logits.bias || !spec.support.is_whole();
        let changes = columns || spec.logits != LogitsTransform::default();
        changes.then_some(Self { caps: spec.logits.softcap.is_some(), flips: spec.logits.scale < 0.0, columns })
    }
}

/// Returns the factor of `t` in the softmax, besides `1/T`.
pub fn rate(spec: &LossSpec) -> f64 {
    spec.logits.softcap.unwrap_or(spec.logits.scale.abs())
}

/// Returns the factor of `x + bias` before the `tanh`, or the sign of the scale.
pub fn factor(spec: &LossSpec) -> f64 {
    let scale = spec.logits.scale;
    spec.logits.softcap.map_or(scale.signum(), |cap| scale / cap)
}

/// The arrays that devices read if columns differ in the [`Transform`].
pub struct ColumnBiases {
    /// Bias of each column, `[V]`; −∞ outside the support.
    pub bias: Array1<f32>,
    /// Bias of each token's sampled column, `[B,T]`, which is put back if it is outside the support; unspecified under
    /// the mask.
    pub target: Array2<f32>,
}

impl ColumnBiases {
    /// Computes the biases of `vocab` columns, and those of the sampled columns of `tokens`.
    pub fn new(spec: &LossSpec, tokens: &Tokens, vocab: usize) -> Self {
        let given = tokens.extra.bias.as_ref().filter(|_| spec.logits.bias);
        // A bias of −∞ is no mark: what a cap makes of it is the least logit, and without one it has no weight either way.
        let of_column = |j: usize| given.map_or(0.0, |bias| bias[j].max(f32::MIN.into()) as f32);
        let of_token = |&id: &i64| usize::try_from(id).ok().filter(|&id| id < vocab).map_or(0.0, of_column);
        let mut bias = Array1::from_shape_fn(vocab, of_column);
        // Columns outside the support, whose exponential must be 0.
        let outside = spec.support.vocab.unwrap_or(vocab)..vocab;
        for j in outside.chain(spec.support.excluded_ids.iter().copied().filter(|&j| j < vocab)) {
            bias[j] = f32::NEG_INFINITY;
        }
        Self { bias, target: tokens.ids.map(of_token) }
    }
}
