//! prime-rl: `src/prime_rl/trainer/rl/loss.py`, the rl component, with `DefaultLossConfig` and `IPOLossConfig`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, ready_made};
use crate::spec::{
    AdvantageLevel, Divergence, LossSpec, LossTerms, Objective, OldLogp, Reduction, TokenWeights, TrustRegion,
};

const DEFAULT: &str = "default_loss_fn";
const IPO: &str = "ipo_loss_fn";

pub(super) const FUNCTIONS: &[&str] = &[DEFAULT, IPO];

const KNOWN: &str = "adv_tau dppo_mask_high dppo_mask_low ipo_threshold kl_tau rl_scale temperature temperatures type";

/// Resolves the sum over tokens of `−keep·adv_tau·A·ρ + kl_tau·x²`, over `rl_scale`, with the ratio against the
/// sampler.
///
/// `temperatures` is `given`, one per token; `temperature` is one for all tokens. `adv_tau` multiplies the whole loss here, and
/// the penalty is divided by it.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    // The option `type` may choose another loss than the function.
    let kinds = [("default", DEFAULT), ("ipo", IPO)];
    let kind = reader.word("type", function, &kinds)?;
    let adv_tau = reader.number("adv_tau", 1.0)?;
    if adv_tau <= 0.0 {
        return Err(reader.refuse("adv_tau", "a number > 0: without advantages there is no policy term"));
    }
    // IPO has one threshold for both directions.
    let (low, high) = if kind == IPO {
        let threshold = reader.number("ipo_threshold", 0.1)?;
        (threshold, threshold)
    } else {
        (reader.number("dppo_mask_low", 0.2)?, reader.number("dppo_mask_high", 0.2)?)
    };
    let region = TrustRegion {
        divergence: Divergence::TotalVariation,
        low,
        high,
        two_sided: kind == IPO,
        truncate: None,
        penalty: reader.number("kl_tau", 1e-3)? / adv_tau,
    };
    // Either one temperature, or one per token.
    let given_temperatures = reader.temperature("temperatures")?;
    let temperature = if reader.is_given("temperatures") {
        if reader.is_given("temperature") {
            return Err(reader.refuse("temperature", "nothing in addition to `temperatures`"));
        }
        given_temperatures
    } else {
        reader.temperature("temperature")?
    };
    // The loss is a sum over tokens, divided by a count of the global batch.
    let tokens = reader.number_or_null("rl_scale", given.num_items_in_batch)?;
    let spec = LossSpec {
        objective: Objective::TrustRegion(region),
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: if given.sampling_logps { OldLogp::Rollout } else { OldLogp::Given },
        temperature,
        rollout: given.rollout_weights.map(|_| ready_made()),
        // They weight the policy term and its penalty; 0 removes the token from the component.
        token_weights: given.token_weights.then_some(TokenWeights { applies_to: LossTerms::Policy }),
        reduction: tokens.map_or(Reduction::TokenMean, Reduction::Normalizer),
        scale: adv_tau,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if tokens.is_none() {
        found.notes.push("rl_scale is not given: it is taken as the batch's own unmasked tokens".into());
    }
    Ok(found)
}
