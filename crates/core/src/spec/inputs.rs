//! The optional inputs of a batch that a loss reads.

use super::{KlImportance, LossSpec, Objective, OldLogp, PositiveTokens, RolloutSource, RolloutWeights, SoftmaxRange};

impl LossSpec {
    /// Whether the loss reads the problem's `old_logp`.
    pub fn reads_old_logp(&self) -> bool {
        self.old_logp == OldLogp::Given
            || self.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Given)
            || self.compares_with_sampler()
    }

    /// Whether the loss reads the problem's `rollout_logp`.
    pub fn reads_rollout_logp(&self) -> bool {
        self.old_logp == OldLogp::Rollout
            || self.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Rollout)
            || self.compares_with_sampler()
            || self.weighs_kl_by_rollout()
    }

    /// Whether the loss reads the problem's `rollout_weights`.
    pub fn reads_rollout_weights(&self) -> bool {
        self.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given)
    }

    /// Whether the loss reads the problem's advantages, which a cross-entropy does not.
    pub fn reads_advantages(&self) -> bool {
        !matches!(self.objective, Objective::CrossEntropy(_) | Objective::None)
    }

    /// Whether the objective reads the problem's `selected`.
    pub fn reads_selected(&self) -> bool {
        match &self.objective {
            Objective::KlCov(cov) => cov.selection.is_none(),
            Objective::ClipCov(cov) => cov.selection.is_none(),
            Objective::Topr(topr) => topr.positive == PositiveTokens::Selected,
            Objective::Aspo(aspo) => aspo.selected.is_some(),
            // Every objective is named, so that a new one is asked.
            Objective::PpoClip(_)
            | Objective::Cispo(_)
            | Objective::Sapo(_)
            | Objective::Vespo(_)
            | Objective::PolicyGradient
            | Objective::ImportanceSampling(_)
            | Objective::MaskedRatio(_)
            | Objective::TrustRegion(_)
            | Objective::Dro(_)
            | Objective::CrossEntropy(_)
            | Objective::Distillation(_)
            | Objective::None => false,
        }
    }

    /// Whether the loss reads the problem's `kept_ids`.
    pub fn reads_kept_ids(&self) -> bool {
        self.support.kept.is_some()
    }

    /// Whether the KL penalty compares the log-probability over the whole vocabulary, and the ratio that over a kept set.
    pub fn has_kl_over_vocabulary(&self) -> bool {
        self.kl.is_some() && self.support.kept.is_some_and(|kept| kept.kl == SoftmaxRange::Vocabulary)
    }

    /// Whether entropy is that of the softmax over the whole vocabulary, and the log-probability over a kept set.
    pub fn has_entropy_over_vocabulary(&self) -> bool {
        self.support.kept.is_some_and(|kept| kept.entropy == SoftmaxRange::Vocabulary)
    }

    /// Whether the KL penalty is weighted by the ratio of the current policy to the sampler's.
    pub fn weighs_kl_by_rollout(&self) -> bool {
        self.kl.as_ref().is_some_and(|kl| kl.importance == KlImportance::Rollout)
    }

    /// Whether rollout weights or rejections compare `old_logp` with `rollout_logp`.
    pub fn compares_with_sampler(&self) -> bool {
        let of_logp = |rollout: &RolloutWeights| rollout.source == RolloutSource::Logp;
        self.rollout.as_ref().is_some_and(of_logp) || !self.rejection.is_empty()
    }
}
