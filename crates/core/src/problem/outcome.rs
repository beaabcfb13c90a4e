use ndarray::{Axis, Dimension, Ix0, Ix2, Ix3, RemoveAxis, arr0, concatenate};
use serde::Serialize;

use super::{Dtype, FloatArray, FloatView, Sequences};

/// Everything that a batch comes to, from the reference or a kernel of ours; `gradient` is dlogits of a [`super::Problem`],
/// and a [`HeadGradient`] of a [`super::HeadProblem`]. Arrays keep the dtype that the implementation computed them in, so
/// that a judge knows how they were rounded.
///
/// Masked tokens hold 0 in every array.
#[derive(Clone, Debug)]
pub struct Outcome<G = FloatArray<Ix3>> {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// `[B,T]`, nats: log-probability of each sampled token.
    pub logp: FloatArray<Ix2>,
    /// `[B,T,K−1]`, nats: the same of each token's other ids, where the spec asks for logp of [several](crate::spec::LossSpec::ids_per_token).
    pub logp_of_others: Option<FloatArray<Ix3>>,
    /// `[B,T]`, nats: entropy of each token's distribution.
    pub entropy: FloatArray<Ix2>,
    /// `[B,T]`: policy term plus `beta · kl`, before mask and normaliser, without the entropy bonus.
    pub token_loss: FloatArray<Ix2>,
    /// Of logits `[B,T,V]`: `∂loss / ∂logits`, entropy bonus included.
    pub gradient: G,
    /// What trainers log.
    pub metrics: Metrics,
}

/// The gradient of the loss where logits are the product of hidden states and an LM head.
#[derive(Clone, Debug)]
pub struct HeadGradient {
    /// `[B,T,H]`: `∂loss / ∂hidden`, entropy bonus included; 0 where a token is masked.
    pub dhidden: FloatArray<Ix3>,
    /// `[H,V]` or `[V,H]`, as the problem's `lm_head`: `∂loss / ∂lm_head`.
    pub dlm_head: FloatArray<Ix2>,
    /// The dtype that dlogits were rounded to before those two products.
    pub dlogits_dtype: Dtype,
}

/// A [`HeadGradient`], borrowed.
#[derive(Clone, Debug)]
pub struct HeadGradientView<'a> {
    /// `[B,T,H]`.
    pub dhidden: FloatView<'a, Ix3>,
    /// `[H,V]` or `[V,H]`.
    pub dlm_head: FloatView<'a, Ix2>,
    /// The dtype that dlogits were rounded to before those two products.
    pub dlogits_dtype: Dtype,
}

/// What can be read in place, and what is so read already: a gradient is as large as the logits, or as the head, and is not copied to be judged.
pub trait Lend<'a> {
    /// It, borrowed.
    type View;

    /// Borrows it.
    fn lend(&'a self) -> Self::View;
}

impl<'a> Lend<'a> for FloatArray<Ix3> {
    type View = FloatView<'a, Ix3>;

    fn lend(&'a self) -> Self::View {
        self.view()
    }
}

impl<'a> Lend<'a> for FloatView<'_, Ix3> {
    type View = FloatView<'a, Ix3>;

    fn lend(&'a self) -> Self::View {
        self.view()
    }
}

impl<'a> Lend<'a> for HeadGradientView<'_> {
    type View = HeadGradientView<'a>;

    fn lend(&'a self) -> Self::View {
        let Self { dhidden, dlm_head, dlogits_dtype } = self;
        HeadGradientView { dhidden: dhidden.view(), dlm_head: dlm_head.view(), dlogits_dtype: *dlogits_dtype }
    }
}

impl<'a> Lend<'a> for HeadGradient {
    type View = HeadGradientView<'a>;

    fn lend(&'a self) -> Self::View {
        let Self { dhidden, dlm_head, dlogits_dtype } = self;
        HeadGradientView { dhidden: dhidden.view(), dlm_head: dlm_head.view(), dlogits_dtype: *dlogits_dtype }
    }
}

/// Means over unmasked tokens; all 0 where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Share of tokens with `r < 1 − epsilon_low` and `A < 0`.
    pub clip_low: f64,
    /// Share of tokens with `r > 1 + epsilon_high` and `A > 0`.
    pub clip_high: f64,
    /// Share of tokens with either.
    pub clip_region: f64,
    /// Mean KL estimate, with what it is multiplied by but for `beta`; `None` without a KL term.
    pub kl_mean: Option<f64>,
    /// Mean entropy, nats.
    pub entropy_mean: f64,
    /// Mean ratio `r`.
    pub ratio_mean: f64,
}

/// What an implementation returns, to be judged: a kernel of ours, a user's program, or a file that somebody's kernel
/// wrote. As [`Outcome`], but only `gradient` is always there, and it may be `()`: what has none is judged on the rest.
#[derive(Clone, Debug)]
pub struct Candidate<G = FloatArray<Ix3>> {
    /// The loss, a scalar; `None` where there is none, as where logp and entropy are the result
    /// ([`LossSpec::is_from_cotangents`](crate::spec::LossSpec::is_from_cotangents)).
    pub loss: Option<FloatArray<Ix0>>,
    /// Of logits `[B,T,V]`: `∂loss / ∂logits`.
    pub gradient: G,
    /// `[B,T]`, nats.
    pub logp: Option<FloatArray<Ix2>>,
    /// `[B,T,K−1]`, nats: of each token's other ids, where the spec asks for logp of [several](crate::spec::LossSpec::ids_per_token).
    pub logp_of_others: Option<FloatArray<Ix3>>,
    /// `[B,T]`, nats.
    pub entropy: Option<FloatArray<Ix2>>,
    /// `[B,T]`.
    pub token_loss: Option<FloatArray<Ix2>>,
    /// What trainers log.
    pub metrics: Option<Metrics>,
}

/// What comes of a [`super::HeadProblem`].
pub type HeadCandidate = Candidate<HeadGradient>;

impl<G> Candidate<G> {
    /// The same with its gradient borrowed; what there is of each token is copied.
    pub fn lend<'a>(&'a self) -> Candidate<G::View>
    where
        G: Lend<'a>,
    {
        Candidate {
            loss: self.loss.clone(),
            gradient: self.gradient.lend(),
            logp: self.logp.clone(),
            logp_of_others: self.logp_of_others.clone(),
            entropy: self.entropy.clone(),
            token_loss: self.token_loss.clone(),
            metrics: self.metrics,
        }
    }
}

impl Candidate {
    /// What a batch comes to whose parts, cut between its [`Sequences`], came to `parts`: the sum of their losses, and their rows one
    /// after another, or of packed sequences their tokens. Metrics are left out.
    ///
    /// # Panics
    /// Where there is no part, or one is of another width.
    #[must_use]
    pub fn from_parts(sequences: &Sequences, parts: &[Self]) -> Self {
        type PerToken = Option<FloatArray<Ix2>>;
        let axis = Axis(usize::from(sequences.packed().is_some()));
        let per_token = |of: fn(&Self) -> &PerToken| {
            let all: Option<Vec<&FloatArray<Ix2>>> = parts.iter().map(|part| of(part).as_ref()).collect();
            all.map(|all| joined(axis, &all))
        };
        let others: Option<Vec<&FloatArray<Ix3>>> = parts.iter().map(|part| part.logp_of_others.as_ref()).collect();
        let losses: Option<Vec<f64>> = parts.iter().map(|part| part.loss.as_ref().map(FloatArray::value)).collect();
        Self {
            loss: losses.map(|losses| arr0(losses.iter().sum::<f64>()).into()),
            gradient: joined(axis, &parts.iter().map(|part| &part.gradient).collect::<Vec<_>>()),
            logp: per_token(|part| &part.logp),
            logp_of_others: others.map(|others| joined(axis, &others)),
            entropy: per_token(|part| &part.entropy),
            token_loss: per_token(|part| &part.token_loss),
            metrics: None,
        }
    }
}

/// Arrays one after another along `axis`, in the dtype of the first.
fn joined<D: Dimension + RemoveAxis>(axis: Axis, arrays: &[&FloatArray<D>]) -> FloatArray<D> {
    let values: Vec<_> = arrays.iter().map(|array| array.to_f64()).collect();
    let views: Vec<_> = values.iter().map(|values| values.view()).collect();
    let values = concatenate(axis, &views).expect("parts of one width");
    FloatArray::rounded_from(&values, arrays[0].dtype())
}

impl<G> From<Outcome<G>> for Candidate<G> {
    fn from(outcome: Outcome<G>) -> Self {
        Self {
            loss: Some(outcome.loss),
            gradient: outcome.gradient,
            logp: Some(outcome.logp),
            logp_of_others: outcome.logp_of_others,
            entropy: Some(outcome.entropy),
            token_loss: Some(outcome.token_loss),
            metrics: Some(outcome.metrics),
        }
    }
}
