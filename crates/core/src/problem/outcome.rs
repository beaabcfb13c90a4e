use ndarray::{Ix0, Ix2, Ix3};
use serde::Serialize;

use super::{Dtype, FloatArray};

/// Everything that one [`super::Problem`] comes to, from the reference or a kernel of ours. Arrays keep the dtype that
/// the implementation computed them in, so that a judge knows how they were rounded.
///
/// Masked tokens hold 0 in every array.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// `[B,T]`, nats: log-probability of each sampled token.
    pub logp: FloatArray<Ix2>,
    /// `[B,T]`, nats: entropy of each token's distribution.
    pub entropy: FloatArray<Ix2>,
    /// `[B,T]`: policy term plus `beta · kl`, before mask and normaliser, without the entropy bonus.
    pub token_loss: FloatArray<Ix2>,
    /// `[B,T,V]`: `∂loss / ∂logits`, entropy bonus included.
    pub dlogits: FloatArray<Ix3>,
    /// What trainers log.
    pub metrics: Metrics,
}

/// Everything that one [`super::HeadProblem`] comes to. As [`Outcome`], with the gradients of what the logits are made of.
#[derive(Clone, Debug)]
pub struct HeadOutcome {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// `[B,T]`, nats: log-probability of each sampled token.
    pub logp: FloatArray<Ix2>,
    /// `[B,T]`, nats: entropy of each token's distribution.
    pub entropy: FloatArray<Ix2>,
    /// `[B,T]`: policy term plus `beta · kl`, before mask and normaliser, without the entropy bonus.
    pub token_loss: FloatArray<Ix2>,
    /// `[B,T,H]`: `∂loss / ∂hidden`, entropy bonus included; 0 where a token is masked.
    pub dhidden: FloatArray<Ix3>,
    /// `[H,V]` or `[V,H]`, as the problem's `lm_head`: `∂loss / ∂lm_head`.
    pub dlm_head: FloatArray<Ix2>,
    /// The dtype that dlogits were rounded to before those two products.
    pub dlogits_dtype: Dtype,
    /// What trainers log.
    pub metrics: Metrics,
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
/// wrote. Only `loss` and `dlogits` are always there.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// `[B,T,V]`: `∂loss / ∂logits`.
    pub dlogits: FloatArray<Ix3>,
    /// `[B,T]`, nats.
    pub logp: Option<FloatArray<Ix2>>,
    /// `[B,T]`, nats.
    pub entropy: Option<FloatArray<Ix2>>,
    /// `[B,T]`.
    pub token_loss: Option<FloatArray<Ix2>>,
    /// What trainers log.
    pub metrics: Option<Metrics>,
}

/// What an implementation of the LM head with the loss returns, to be judged. As [`Candidate`], with the gradients of what the
/// logits are made of: only `loss`, `dhidden` and `dlm_head` are always there.
#[derive(Clone, Debug)]
pub struct HeadCandidate {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// `[B,T,H]`: `∂loss / ∂hidden`.
    pub dhidden: FloatArray<Ix3>,
    /// `[H,V]` or `[V,H]`, as the problem's `lm_head`: `∂loss / ∂lm_head`.
    pub dlm_head: FloatArray<Ix2>,
    /// The dtype that dlogits were rounded to before those two products.
    pub dlogits_dtype: Dtype,
    /// `[B,T]`, nats.
    pub logp: Option<FloatArray<Ix2>>,
    /// `[B,T]`, nats.
    pub entropy: Option<FloatArray<Ix2>>,
    /// `[B,T]`.
    pub token_loss: Option<FloatArray<Ix2>>,
    /// What trainers log.
    pub metrics: Option<Metrics>,
}

impl From<HeadOutcome> for HeadCandidate {
    fn from(outcome: HeadOutcome) -> Self {
        Self {
            loss: outcome.loss,
            dhidden: outcome.dhidden,
            dlm_head: outcome.dlm_head,
            dlogits_dtype: outcome.dlogits_dtype,
            logp: Some(outcome.logp),
            entropy: Some(outcome.entropy),
            token_loss: Some(outcome.token_loss),
            metrics: Some(outcome.metrics),
        }
    }
}

impl From<Outcome> for Candidate {
    fn from(outcome: Outcome) -> Self {
        Self {
            loss: outcome.loss,
            dlogits: outcome.dlogits,
            logp: Some(outcome.logp),
            entropy: Some(outcome.entropy),
            token_loss: Some(outcome.token_loss),
            metrics: Some(outcome.metrics),
        }
    }
}
