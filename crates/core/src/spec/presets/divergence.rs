//! Divergences of a student from a teacher: `generalized_jsd_loss` of TRL 1.16.0's GKD, GOLD and IW-OPD trainers, the loss of its
//! `DistillationTrainer`, and those of its SDPO; the losses of Liger 0.8.5; `PyTorch`'s `kl_div`, optax 0.2.8's `kl_divergence`,
//! Tunix 0.1.7's `LogitStrategy` and `MaxText` 0.2.5's `CombinedDistillationStrategy`.
//!
//! SDPO's top-k is of the student's entries, IW-OPD's and Tunix' of the teacher's: either is `teacher_ids` of a problem.

use super::cross_entropy::TokenReduction;
use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{Distillation, DistillationKind, LossSpec, Reduction, TopKRest};

pub(super) const FUNCTIONS: &[&str] = &[
    "generalized_jsd_loss",
    "_chunked_divergence_loss",
    "compute_full_logit_self_distillation_loss",
    "compute_topk_self_distillation_loss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearJSDFunction",
    "LigerJSDFunction",
    "LigerFusedLinearKLDivFunction",
    "LigerKLDivLossFunction",
    "LogitStrategy",
    "CombinedDistillationStrategy",
    "kl_divergence",
    // The last, as it is also the name of the module of Liger's functions.
    "kl_div",
];

const KNOWN: &str = "
    add_tail alpha beta chunk_size compiled distill_top_k distillation_add_tail distillation_alpha distillation_topk eps ignore_index
    beta_feature jsd_beta log_target logits_are_probs reduction student_final_logit_softcapping student_logit_scale
    teacher_final_logit_softcapping teacher_logit_scale temperature top_k weight_hard_loss weight_soft_loss
";

/// The divergence of one function, and what it is multiplied by.
struct NamedDivergence {
    /// The weight of the teacher in the mixture; 0 is the forward KL, and 1 the reverse one.
    beta: f64,
    /// The number of entries, and the place of the rest.
    top_k: Option<(usize, TopKRest)>,
    temperature: f64,
    temperature_squared: bool,
    scale: f64,
}

impl NamedDivergence {
    /// Returns a divergence over the whole vocabulary.
    fn whole(beta: f64, temperature: f64) -> Self {
        Self { beta, top_k: None, temperature, temperature_squared: false, scale: 1.0 }
    }

    fn distillation(&self) -> Distillation {
        let named = if self.beta == 0.0 {
            Distillation::default()
        } else if self.beta == 1.0 {
            Distillation { kind: DistillationKind::ReverseKl, ..Distillation::default() }
        } else {
            Distillation::jensen_shannon(self.beta)
        };
        let (top_k, rest) = self.top_k.unzip();
        Distillation { top_k, rest, temperature_squared: self.temperature_squared, ..named }
    }
}

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let temperature = |default| reader.number("temperature", default);
    let named = match function {
        "generalized_jsd_loss" => generalized_jsd_loss(reader)?,
        "_chunked_divergence_loss" => chunked(reader)?,
        "compute_full_logit_self_distillation_loss" => {
            NamedDivergence::whole(reader.number("distillation_alpha", 1.0)?, temperature(1.0)?)
        }
        "compute_topk_self_distillation_loss" => sdpo_top_k(reader)?,
        "LigerFusedLinearJSDLoss" => {
            only(reader, "weight_hard_loss", 0.5, 0.0, "the cross-entropy of the labels is a spec of its own")?;
            let scale = reader.number("weight_soft_loss", 0.5)?;
            NamedDivergence { scale, ..NamedDivergence::whole(reader.number("beta", 0.5)?, temperature(1.0)?) }
        }
        "LigerFusedLinearJSDFunction" => NamedDivergence::whole(reader.number("jsd_beta", 0.5)?, temperature(1.0)?),
        "LigerJSDFunction" => NamedDivergence::whole(reader.number("beta", 0.5)?, temperature(1.0)?),
        "LogitStrategy" => logit_strategy(reader)?,
        "CombinedDistillationStrategy" => {
            reader.off("beta_feature", "a loss of hidden states has no spec")?;
            logit_strategy(reader)?
        }
        // The forward KL; log-probabilities are the caller's, and so is their temperature.
        _ => NamedDivergence::whole(0.0, temperature(1.0)?),
    };
    let reduction = reduction(reader, function)?;
    let spec = LossSpec {
        temperature: named.temperature.into(),
        reduction: match given.num_items_in_batch {
            Some(items) if TAKE_ITEMS.contains(&function) => Reduction::Normalizer(items),
            _ => reduction.reduction(),
        },
        token_weights: reduction.token_weights(),
        scale: named.scale,
        ..LossSpec::distillation(named.distillation())
    };
    let mut loss = ProjectLoss::new(spec, KNOWN);
    if named.top_k.is_some_and(|(_, rest)| rest == TopKRest::Tail) {
        loss.notes.push("TRL bounds a tail from below by 1e-7, and has no gradient through it there".into());
    }
    Ok(loss)
}

/// The functions that divide by `num_items_in_batch` where it is given.
const TAKE_ITEMS: [&str; 2] = ["generalized_jsd_loss", "_chunked_divergence_loss"];

/// Reads the reduction. `mean` of `PyTorch` divides by the entries of the vocabulary too.
fn reduction(reader: &OptionReader, function: &'static str) -> Result<TokenReduction, PresetError> {
    let words = [("batchmean", TokenReduction::Mean), ("sum", TokenReduction::Sum), ("none", TokenReduction::None)];
    let by_name = reader.word("reduction", TokenReduction::Mean, &words)?;
    if function == "kl_div" && !reader.is_given("reduction") {
        return Err(reader
            .refuse("reduction", "one of batchmean, sum and none: the default, `mean`, is over the vocabulary too"));
    }
    Ok(by_name)
}

/// Refuses every value of `name` but one.
fn only(reader: &OptionReader, name: &'static str, default: f64, value: f64, why: &str) -> Result<(), PresetError> {
    if reader.number(name, default)? == value { Ok(()) } else { Err(reader.refuse(name, format!("{value}: {why}"))) }
}

fn generalized_jsd_loss(reader: &OptionReader) -> Result<NamedDivergence, PresetError> {
    reader.off("logits_are_probs", "a divergence is of logits")?;
    let whole = NamedDivergence::whole(reader.number("beta", 0.5)?, reader.number("temperature", 1.0)?);
    // 0 is the whole vocabulary.
    if reader.number("top_k", 0.0)? == 0.0 {
        return Ok(whole);
    }
    let count = reader.count_or_null("top_k")?;
    if whole.beta != 0.0 && whole.beta != 1.0 {
        return Err(
            reader.refuse("top_k", "0: between the KLs it is the union of both models' entries, whose number differs")
        );
    }
    let rest = rest(reader.flag("add_tail", true)?);
    Ok(NamedDivergence { top_k: count.map(|count| (count, rest)), ..whole })
}

fn chunked(reader: &OptionReader) -> Result<NamedDivergence, PresetError> {
    for name in ["student_logit_scale", "teacher_logit_scale"] {
        only(reader, name, 1.0, 1.0, "both distributions are of the logits as they are given")?;
    }
    for name in ["student_final_logit_softcapping", "teacher_final_logit_softcapping"] {
        reader.off(name, "both distributions are of the logits as they are given")?;
    }
    Ok(NamedDivergence::whole(reader.number("beta", 1.0)?, reader.number("temperature", 1.0)?))
}

fn sdpo_top_k(reader: &OptionReader) -> Result<NamedDivergence, PresetError> {
    let whole = NamedDivergence::whole(reader.number("distillation_alpha", 1.0)?, reader.number("temperature", 1.0)?);
    let rest = rest(reader.flag("distillation_add_tail", false)?);
    let Some(count) = reader.count_or_null("distillation_topk")? else {
        return Err(reader.refuse("distillation_topk", "a number of entries"));
    };
    Ok(NamedDivergence { top_k: Some((count, rest)), ..whole })
}

fn logit_strategy(reader: &OptionReader) -> Result<NamedDivergence, PresetError> {
    only(reader, "alpha", 0.5, 1.0, "the cross-entropy of the labels is a spec of its own")?;
    let whole = NamedDivergence::whole(0.0, reader.number("temperature", 2.0)?);
    let top_k = match reader.number("distill_top_k", 0.0)? {
        0.0 => None,
        _ => reader.count_or_null("distill_top_k")?.map(|count| (count, TopKRest::Renormalized)),
    };
    Ok(NamedDivergence { top_k, temperature_squared: true, ..whole })
}

fn rest(add_tail: bool) -> TopKRest {
    if add_tail { TopKRest::Tail } else { TopKRest::Renormalized }
}
