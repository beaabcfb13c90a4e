//! Fast-LLM, commit 7d61a1ba: `LanguageModelGRPOLoss` and `LanguageModelGSPOLoss` of `layers/language_model/loss/policy_gradient.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{
    AdvantageLevel, LogitsTransform, LossSpec, Objective, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, Rows,
};

const GSPO: &str = "LanguageModelGSPOLoss";

pub(super) const FUNCTIONS: &[&str] = &["LanguageModelGRPOLoss", GSPO];

const KNOWN: &str = "
    epsilon_high epsilon_low logits_scale_factor metrics num_documents_in_batch num_labels_in_batch type use_triton weight
";

/// Resolves PPO's clip over the labels of the batch, or of a document's geometric mean over its documents.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let by_document = reader.word("type", function == GSPO, &[("grpo", false), ("gspo", true)])?;
    let clip = PpoClip {
        epsilon_low: reader.number("epsilon_low", 0.2)?,
        epsilon_high: reader.number("epsilon_high", 0.2)?,
        ..PpoClip::default()
    };
    let mut missing = None;
    let mut count = |name, default| {
        let given = reader.number_or_null(name, default)?;
        missing = given.is_none().then_some(name);
        Ok::<_, PresetError>(given)
    };
    let (level, usual, reduction) = if by_document {
        // Every token of a document has its loss, and all tokens are added.
        let documents = count("num_documents_in_batch", None)?;
        let rows = documents.map_or(Rows::All, Rows::Given);
        (RatioLevel::Sequence, AdvantageLevel::Sequence, Reduction::SequenceSum { rows })
    } else {
        let labels = count("num_labels_in_batch", given.num_items_in_batch)?;
        (RatioLevel::Token, AdvantageLevel::Token, labels.map_or(Reduction::TokenMean, Reduction::Normalizer))
    };
    // A document's advantage is the mean of its tokens', which is any of them where they are equal.
    if by_document && given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]: a document's is the mean of its tokens'"));
    }
    let spec = LossSpec {
        objective: Objective::PpoClip(clip),
        ratio: Ratio { level, ..Ratio::default() },
        advantages: given.advantages_or(usual),
        old_logp: if given.old_logps { OldLogp::Given } else { OldLogp::Rollout },
        logits: LogitsTransform { scale: reader.number("logits_scale_factor", 1.0)?, ..LogitsTransform::default() },
        reduction,
        scale: reader.number("weight", 1.0)?,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    found.notes.extend(missing.map(|count| format!("{count} is not given: it is taken as the batch's own")));
    Ok(found)
}
