//! prime-rl: `src/prime_rl/trainer/rl/loss.py`, the rl component: the loss classes of `main` after pull request 3586, and
//! `default_loss_fn` and `ipo_loss_fn` of commit 559b4477.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, ready_made, sampler_or_old};
use crate::spec::{
    AdvantageLevel, Cispo, Divergence, LossSpec, LossTerms, MaskedRatio, Objective, PpoClip, Ratio, Reduction,
    Temperature, TokenWeights, TrustRegion,
};

const IPO: &str = "IPOLoss";
const ICE_POP: &str = "IcePopLoss";
const PPO: &str = "PPOLoss";
const CISPO: &str = "CISPOLoss";
const OLD_DEFAULT: &str = "default_loss_fn";
const OLD_IPO: &str = "ipo_loss_fn";

pub(super) const FUNCTIONS: &[&str] = &[IPO, ICE_POP, PPO, CISPO, OLD_DEFAULT, OLD_IPO];

const KNOWN: &str = "
    adv_tau dppo_mask_high dppo_mask_low eps ipo_threshold kl_tau max_importance_ratio ratio_high ratio_low rl_scale
    score_centering temperature temperatures type
";

/// Resolves the sum over tokens of `adv_tau` times a policy term of the ratio against the sampler, over `rl_scale`; the two older
/// functions add `kl_tau·x²`.
///
/// `temperatures` is `given`, one per token; `temperature` is one for all tokens. `adv_tau` multiplies the whole loss here, and
/// the penalty is divided by it.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    // The option `type` may choose another loss than the function. Two losses are called ipo.
    let older = [OLD_DEFAULT, OLD_IPO].contains(&function);
    let ipo = if older { OLD_IPO } else { IPO };
    let kinds = [("ipo", ipo), ("icepop", ICE_POP), ("ppo", PPO), ("cispo", CISPO), ("default", OLD_DEFAULT)];
    let kind = reader.word("type", function, &kinds)?;
    let adv_tau = reader.number("adv_tau", 1.0)?;
    if adv_tau <= 0.0 {
        return Err(reader.refuse("adv_tau", "a number > 0: without advantages there is no policy term"));
    }
    let mut notes = Vec::new();
    let (objective, ratio) = match kind {
        OLD_DEFAULT | OLD_IPO => (Objective::TrustRegion(older_region(reader, kind, adv_tau)?), Ratio::default()),
        _ => newer(reader, kind, &mut notes)?,
    };
    // The loss is a sum over tokens, divided by a count of the global batch, or since by the sum of its weights.
    let tokens = reader.number_or_null("rl_scale", given.num_items_in_batch)?;
    if tokens.is_none() && given.token_weights && !older {
        return Err(reader.refuse("rl_scale", "a number with token weights: it is their sum over the global batch"));
    }
    if tokens.is_none() {
        notes.push("rl_scale is not given: it is taken as the batch's own unmasked tokens".into());
    }
    let spec = LossSpec {
        objective,
        ratio,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: sampler_or_old(given),
        temperature: temperature(reader)?,
        rollout: given.rollout_weights.map(|_| ready_made()),
        // They weight the policy term and its penalty; 0 removes the token from the component.
        token_weights: given.token_weights.then_some(TokenWeights { applies_to: LossTerms::Policy }),
        reduction: tokens.map_or(Reduction::TokenMean, Reduction::Normalizer),
        scale: adv_tau,
        ..LossSpec::default()
    };
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Reads a loss of `main`, with the bound of its ratio.
fn newer(
    reader: &OptionReader,
    kind: &'static str,
    notes: &mut Vec<String>,
) -> Result<(Objective, Ratio), PresetError> {
    reader.off("kl_tau", "the loss has no penalty; `ipo_loss_fn` has")?;
    let why = "it adds a sum over the sampler's set, which the family lacks";
    reader.off("score_centering", why)?;
    let bounds = |low, high| Ok((reader.number("ratio_low", low)?, reader.number("ratio_high", high)?));
    Ok(match kind {
        ICE_POP => {
            let (lower, upper) = bounds(0.2, 5.0)?;
            notes.push("a ratio at a bound, exactly, is kept there and masked here".into());
            (Objective::MaskedRatio(MaskedRatio { lower, upper, surrogate: true }), Ratio::default())
        }
        PPO => {
            let (low, high) = bounds(0.8, 1.2)?;
            let clip = PpoClip { epsilon_low: 1.0 - low, epsilon_high: high - 1.0, ..PpoClip::default() };
            (Objective::PpoClip(clip), capped(reader)?)
        }
        CISPO => {
            let (low, upper) = bounds(0.0, 5.0)?;
            (Objective::Cispo(Cispo { lower: (low > 0.0).then_some(low), upper }), Ratio::default())
        }
        _ => {
            let eps = reader.number("eps", 0.3)?;
            (Objective::TrustRegion(region(eps, eps, true)), capped(reader)?)
        }
    })
}

/// Reads the largest ratio, beyond which the ratio is that number with the gradient of its own.
fn capped(reader: &OptionReader) -> Result<Ratio, PresetError> {
    const NAME: &str = "max_importance_ratio";
    let Some(most) = reader.number_or_null(NAME, Some(1e4))? else { return Ok(Ratio::default()) };
    if most < 1.0 {
        return Err(reader.refuse(NAME, "a number ≥ 1, or null for none"));
    }
    Ok(Ratio { cap: Some(most.ln()), straight_through: true, ..Ratio::default() })
}

/// Reads the trust region of commit 559b4477. IPO has one threshold for both directions.
fn older_region(reader: &OptionReader, kind: &'static str, adv_tau: f64) -> Result<TrustRegion, PresetError> {
    let penalty = reader.number("kl_tau", 1e-3)? / adv_tau;
    let own = if kind == OLD_IPO {
        let threshold = reader.number("ipo_threshold", 0.1)?;
        region(threshold, threshold, true)
    } else {
        region(reader.number("dppo_mask_low", 0.2)?, reader.number("dppo_mask_high", 0.2)?, false)
    };
    Ok(TrustRegion { penalty, ..own })
}

fn region(low: f64, high: f64, two_sided: bool) -> TrustRegion {
    TrustRegion { divergence: Divergence::TotalVariation, low, high, two_sided, truncate: None, penalty: 0.0 }
}

/// Reads either one temperature, or one per token.
fn temperature(reader: &OptionReader) -> Result<Temperature, PresetError> {
    let given_temperatures = reader.temperature("temperatures")?;
    if !reader.is_given("temperatures") {
        return reader.temperature("temperature");
    }
    if reader.is_given("temperature") {
        return Err(reader.refuse("temperature", "nothing in addition to `temperatures`"));
    }
    Ok(given_temperatures)
}
