//! Which members of the loss family the kernels compute.

use std::fmt::Debug;

use crate::spec::{Head, Kl, LossSpec, Objective, OldLogp, Ratio, Reduction, Rows};

/// The first setting of `spec` that no kernel here computes: its name and its value.
pub(crate) fn beyond_kernels(spec: &LossSpec) -> Result<(), (&'static str, String)> {
    let unless = |computed: bool, field: &'static str, given: &dyn Debug| {
        if computed { Ok(()) } else { Err((field, format!("{given:?}"))) }
    };
    unless(matches!(spec.objective, Objective::PpoClip(_)), "objective", &spec.objective)?;
    unless(spec.ratio == Ratio::default(), "ratio", &spec.ratio)?;
    unless(spec.old_logp != OldLogp::Rollout, "old_logp", &spec.old_logp)?;
    unless(spec.head == Head::default(), "head", &spec.head)?;
    unless(spec.support.is_whole(), "support", &spec.support)?;
    unless(spec.rollout.is_none(), "rollout", &spec.rollout)?;
    unless(spec.rejection.is_empty(), "rejection", &spec.rejection)?;
    unless(spec.off_policy_mask.is_none(), "off_policy_mask", &spec.off_policy_mask)?;
    unless(spec.top_entropy.is_none(), "top_entropy", &spec.top_entropy)?;
    let plain = |kl: &Kl| *kl == Kl::plain(kl.beta, kl.estimator);
    unless(spec.kl.as_ref().is_none_or(plain), "kl", &spec.kl)?;
    unless(spec.entropy_averaging.is_none(), "entropy_averaging", &spec.entropy_averaging)?;
    let reduction = match spec.reduction {
        Reduction::TokenMean | Reduction::Normalizer(_) => true,
        Reduction::SequenceMean { rows: Rows::All | Rows::NonEmpty } => true,
        Reduction::FixedLength { rows: Rows::All, length } => length.is_some(),
        Reduction::SequenceMean { .. } | Reduction::SequenceSum { .. } | Reduction::FixedLength { .. } => false,
    };
    unless(reduction, "reduction", &spec.reduction)?;
    unless(spec.denominator_epsilon == 0.0, "denominator_epsilon", &spec.denominator_epsilon)?;
    unless(spec.scale == 1.0, "scale", &spec.scale)
}
