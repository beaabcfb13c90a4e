//! The options of the loss that a case exercises with a gradient.

use super::exact::{ByLogp, Exact, Record};
use assay_core::spec::{
    Divergence, DroppedTerm, KlGradient, KlImportance, LossSpec, LossTerms, Objective, OldLogp, OutOfBounds,
    RatioLevel, RolloutLevel, RolloutSource, Temperature, TemperatureDivides,
};

/// Counts what a case had, where it had a gradient.
pub(crate) fn note(spec: &LossSpec, exact: &Exact, by_logp: &ByLogp, record: &mut Record) {
    let tokens = || by_logp.iter().flatten().flat_map(|row| row.tokens.iter().flatten());
    let policy = tokens().any(|token| token.policy.slope != 0.0);
    let kl = tokens().any(|token| token.kl.is_some_and(|kl| kl.slope != 0.0));
    note_policy(spec, exact, policy, record);
    note_corrections(spec, exact, policy, kl, record);
    if let Some(terms) = &spec.kl {
        record.saw("kl.gradient own", kl && terms.gradient == KlGradient::Own);
        record.saw("kl.gradient k2", kl && terms.gradient == KlGradient::K2);
        record.saw("kl.importance ratio", kl && terms.importance == KlImportance::Ratio);
        record.saw("kl.importance score", kl && terms.importance == KlImportance::Score);
        record.saw("kl.difference_clamp", kl && terms.difference_clamp.is_some());
        record.saw("kl.value_clamp", kl && terms.value_clamp.is_some() && !terms.clamp_after_importance);
        record.saw("kl.clamp_after_importance", kl && terms.value_clamp.is_some() && terms.clamp_after_importance);
        record.saw("kl.averaging", kl && terms.averaging.is_some());
    }
    record.saw("entropy_coef", spec.entropy_coef != 0.0);
    record.saw("dentropy", spec.dentropy);
    record.saw("entropy_averaging", spec.entropy_coef != 0.0 && spec.entropy_averaging.is_some());
    let (transform, support) = (&spec.logits, &spec.support);
    record.saw("logits", policy && transform.softcap.is_some() && transform.bias && transform.scale != 1.0);
    record.saw("support", policy && !support.is_whole());
    record.saw("temperature given", policy && spec.temperature == Temperature::Given);
    record.saw("temperature_divides logp", policy && spec.temperature_divides == TemperatureDivides::Logp);
}

fn note_policy(spec: &LossSpec, exact: &Exact, policy: bool, record: &mut Record) {
    record.saw("policy", policy);
    let ratio = &spec.ratio;
    let level = match ratio.level {
        RatioLevel::Token => "ratio.level token",
        RatioLevel::Sequence => "ratio.level sequence",
        RatioLevel::SequenceToken => "ratio.level sequence_token",
        RatioLevel::SequenceProduct => "ratio.level sequence_product",
    };
    record.saw(level, policy);
    record.saw("ratio.clamp", policy && ratio.clamp.is_some());
    record.saw("ratio.clip", policy && ratio.clip.is_some());
    record.saw("ratio.cap", policy && ratio.cap.is_some());
    record.saw("ratio.straight_through", policy && ratio.straight_through);
    record.saw("ratio.denominator_epsilon", policy && ratio.denominator_epsilon > 0.0);
    record.saw("old_logp current", policy && spec.old_logp == OldLogp::Current);
    record.saw("old_logp rollout", policy && spec.old_logp == OldLogp::Rollout);
    let counts = &exact.frozen.counts;
    let some_selected = exact.frozen.selected.iter().zip(counts).any(|(selected, counts)| *counts && *selected);
    let some_not = exact.frozen.selected.iter().zip(counts).any(|(selected, counts)| *counts && !selected);
    match &spec.objective {
        Objective::TrustRegion(region) => {
            let divergence = match region.divergence {
                Divergence::TotalVariation => "trust_region.divergence total_variation",
                Divergence::BinaryKl => "trust_region.divergence binary_kl",
            };
            record.saw(divergence, policy && some_not);
            record.saw("trust_region.two_sided", policy && some_not && region.two_sided);
            record.saw("trust_region.truncate", some_selected && region.truncate.is_some());
        }
        Objective::KlCov(cov) => {
            record.saw("kl_cov.selection", policy && some_selected && some_not && cov.selection.is_some());
        }
        Objective::ClipCov(cov) => {
            record.saw("clip_cov.selection", policy && some_selected && some_not && cov.selection.is_some());
        }
        Objective::Vespo(vespo) => {
            record.saw("vespo with weights", policy && spec.rollout.is_some());
            let some_masked = exact.loss.problem.mask.iter().any(|counts| !counts);
            let given = spec.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given);
            record.saw("vespo.weights_of_masked_tokens", given && some_masked && vespo.weights_of_masked_tokens);
        }
        _ => {}
    }
}

fn note_corrections(spec: &LossSpec, exact: &Exact, policy: bool, kl: bool, record: &mut Record) {
    let frozen = &exact.frozen;
    if let Some(rollout) = &spec.rollout {
        let level = match (rollout.source, rollout.level) {
            (RolloutSource::Given, RolloutLevel::Token) => "rollout given",
            (RolloutSource::Given, _) => "rollout given, geometric",
            (_, RolloutLevel::Token) => "rollout.level token",
            (_, RolloutLevel::Sequence) => "rollout.level sequence",
            (_, RolloutLevel::Geometric) => "rollout.level geometric",
            (_, RolloutLevel::TokenGatedByGeometric) => "rollout.level token_gated_by_geometric",
        };
        record.saw(level, policy);
        record.saw("rollout.outside mask", policy && rollout.outside == OutOfBounds::Mask);
        record.saw("rollout.normalize", policy && rollout.normalize);
        record.saw("rollout.applies_to policy_and_kl", kl && rollout.applies_to == LossTerms::PolicyAndKl);
    }
    let unmasked = || exact.loss.problem.mask.indexed_iter().filter(|(_, inside)| **inside).map(|(at, _)| at);
    record.saw("rejection", policy && unmasked().any(|at| !frozen.counts[at]));
    record.saw("rejection.counts", policy && unmasked().any(|at| frozen.counts[at] && !frozen.stays[at]));
    let some_far = policy && unmasked().any(|at| frozen.counts[at] && !frozen.near[at]);
    for (name, which) in [("off_policy_mask given", OldLogp::Given), ("off_policy_mask rollout", OldLogp::Rollout)] {
        record.saw(name, some_far && spec.off_policy_mask.is_some_and(|mask| mask.behaviour == which));
    }
    let some_low = policy && unmasked().any(|at| frozen.counts[at] && !frozen.top[at]);
    let drops = |drops| some_low && spec.top_entropy.is_some_and(|top| top.drops == drops);
    record.saw("top_entropy.drops policy_term", drops(DroppedTerm::PolicyTerm));
    let shared = spec.ratio.level == RatioLevel::Sequence;
    record.saw("top_entropy.drops ratio", shared && drops(DroppedTerm::Ratio));
}
