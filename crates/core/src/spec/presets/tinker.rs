//! Tinker's API, SDK 0.38.0: the losses of `forward_backward`, by the formulas of its documentation. The service's own code is not
//! public.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, sampler_or_old};
use crate::spec::{AdvantageLevel, Cispo, Dro, ImportanceSampling, LossSpec, Objective, OldLogp, PpoClip, Reduction};

pub(super) const FUNCTIONS: &[&str] = &["importance_sampling", "ppo", "cispo", "dro", "cross_entropy"];

/// The prefix that option names may have.
pub(super) const CONFIG: &str = "loss_fn_config.";

const KNOWN: &str = "beta clip_high_threshold clip_low_threshold loss_fn";

/// Resolves a sum over tokens without a mask, a KL penalty or a temperature: tokens that do not count have the advantage 0.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let names: Vec<(&str, &str)> = FUNCTIONS.iter().map(|name| (*name, *name)).collect();
    let mut notes = Vec::new();
    let objective = match reader.word("loss_fn", function, &names)? {
        "ppo" => {
            // Thresholds are bounds of the ratio, and widths their distances from 1.
            let (low, high) = thresholds(reader, 0.8, 1.2)?;
            Objective::PpoClip(PpoClip { epsilon_low: 1.0 - low, epsilon_high: high - 1.0, ..PpoClip::default() })
        }
        "cispo" => {
            let (low, upper) = thresholds(reader, 0.0, 4.0)?;
            Objective::Cispo(Cispo { lower: (low > 0.0).then_some(low), upper })
        }
        "dro" => {
            notes.push("the squared log-ratio is of every token of a datum, prompts too: mask none of them".into());
            let beta = reader.number_or_null("beta", None)?;
            let beta = beta.ok_or_else(|| reader.refuse("beta", "a number: the documentation has no default"))?;
            Objective::Dro(Dro { beta })
        }
        "cross_entropy" => {
            notes.push("the advantages are the function's `weights`".into());
            Objective::PolicyGradient
        }
        _ => Objective::ImportanceSampling(ImportanceSampling::default()),
    };
    let old_logp = if objective == Objective::PolicyGradient { OldLogp::Current } else { sampler_or_old(given) };
    let spec = LossSpec {
        objective,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp,
        reduction: Reduction::Normalizer(1.0),
        ..LossSpec::default()
    };
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Reads the lower and the upper bound of the ratio.
fn thresholds(reader: &OptionReader, low: f64, high: f64) -> Result<(f64, f64), PresetError> {
    Ok((reader.number("clip_low_threshold", low)?, reader.number("clip_high_threshold", high)?))
}
