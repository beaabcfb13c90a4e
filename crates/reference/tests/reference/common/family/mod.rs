//! The loss of every [`LossSpec`], written down literally over any [`Number`].
//!
//! Written from the published formulas, the docs of the spec and the peers' sources, apart from `crates/reference`. A
//! minimum is a minimum and a clamp a clamp: no branch is chosen for the sake of a derivative and none is taken. [`Frozen`] has
//! everything that a formula holds constant; everything else is a function of the log-probabilities and entropies in
//! [`Policy`]. Once constants are held, rows do not meet: the loss is the sum of [`Loss::row`] over rows.

mod choices;
mod freeze;
mod number;
mod sampler;
mod softmax;
mod term;

use assay_core::problem::Problem;
use assay_core::spec::LossSpec;
use ndarray::Array2;

pub(crate) use number::Number;
pub(crate) use softmax::{Row, entropy, in_support, logits, logp, scaled, temperature};

/// What the network makes of every token; `None` where the problem's mask is false.
#[derive(Clone)]
pub(crate) struct Policy<N> {
    pub(crate) logp: Array2<Option<N>>,
    pub(crate) entropy: Array2<Option<N>>,
}

impl<N: Number> Policy<N> {
    fn logp(&self, b: usize, t: usize) -> N {
        self.logp[[b, t]].clone().expect("an unmasked token")
    }

    fn entropy(&self, b: usize, t: usize) -> N {
        self.entropy[[b, t]].clone().expect("an unmasked token")
    }
}

/// Clip-Cov's random choice, which no formula makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Undetermined {
    pub(crate) candidates: usize,
    pub(crate) taken: usize,
}

/// Everything that is held constant while the loss is differentiated.
pub(crate) struct Frozen<N> {
    /// `ℓ` and `H` at the base point.
    base: Policy<N>,
    /// `m`: the problem's mask, without the tokens that a rejection takes out of it.
    pub(crate) counts: Array2<bool>,
    /// The tokens of `m` that keep their policy term whatever was rejected.
    pub(crate) stays: Array2<bool>,
    /// The tokens of `m` whose row is near enough to the policy that acted, or has nothing to fear.
    pub(crate) near: Array2<bool>,
    /// What the policy term is multiplied by.
    policy_factor: Array2<N>,
    /// What the KL penalty is multiplied by.
    kl_factor: Array2<N>,
    /// The tokens whose entropy is among the highest; all of `m` without that choice.
    pub(crate) top: Array2<bool>,
    /// `c` of a term `−c·A·ℓ`.
    score: Array2<N>,
    /// The tokens that KL-Cov penalizes, that Clip-Cov leaves out, or that a trust region keeps.
    pub(crate) selected: Array2<bool>,
}

/// What becomes of one row.
pub(crate) struct RowLoss<N> {
    /// What the row adds to the loss.
    pub(crate) loss: N,
    /// By token of the row.
    pub(crate) tokens: Vec<Option<TokenLoss<N>>>,
}

/// What becomes of one token of `m`.
pub(crate) struct TokenLoss<N> {
    /// Times masks and weights, before the reduction.
    pub(crate) policy: N,
    /// Times weights, without `beta`.
    pub(crate) kl: Option<N>,
    /// `beta · kl`
    penalty: N,
    pub(crate) loss: N,
}

/// The formulas of one spec on one batch.
#[derive(Clone, Copy)]
pub(crate) struct Loss<'a> {
    pub(crate) spec: &'a LossSpec,
    pub(crate) problem: &'a Problem,
}

/// `f(b, t)` for every token.
fn grid<T>(shape: (usize, usize), f: impl Fn(usize, usize) -> T) -> Array2<T> {
    Array2::from_shape_fn(shape, |(b, t)| f(b, t))
}

fn at<'a>(array: Option<&'a Array2<f64>>, name: &str) -> impl Fn(usize, usize) -> f64 + 'a {
    let array = array.unwrap_or_else(|| panic!("the spec reads `{name}`"));
    |b, t| array[[b, t]]
}

/// All tokens in `mask`, in row-major order.
fn all(mask: &Array2<bool>) -> Vec<(usize, usize)> {
    mask.indexed_iter().filter(|(_, inside)| **inside).map(|(at, _)| at).collect()
}

/// `max(1, ⌊fraction · count⌋)`
fn taken(fraction: f64, count: usize) -> usize {
    whole((fraction * count as f64).floor()).max(1)
}

/// A number that is one of tokens.
#[allow(clippy::cast_sign_loss, reason = "not below 0")]
fn whole(count: f64) -> usize {
    count as usize
}

fn mean<N: Number>(values: &[N]) -> N {
    values.iter().cloned().sum::<N>() / N::from(values.len().max(1) as f64)
}

impl Loss<'_> {
    fn shape(&self) -> (usize, usize) {
        self.problem.mask.dim()
    }

    fn advantage(&self, b: usize, t: usize) -> f64 {
        self.problem.advantages.at(b, t)
    }

    /// The tokens of row `b` in `mask`.
    fn tokens_of(&self, mask: &Array2<bool>, b: usize) -> Vec<usize> {
        (0..self.shape().1).filter(|t| mask[[b, *t]]).collect()
    }
}
