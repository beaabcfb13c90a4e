//! The names of the arrays and numbers that programs read, and the numbers' values in a spec.

use super::structure::known_denominator;
use super::transform;
use assay_core::spec::{KlGradient, LossSpec, Objective, PpoClip};

/// Declares an enum whose variants have names in programs.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[$note:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type {
            $($(#[$note])* $variant,)*
        }

        impl $type {
            /// The name of the operand in programs, manifests and the Python package.
            pub fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }
        }
    };
}

named! {
    /// Name of a `[B,T]` array that programs read, f32 on devices.
    TokenInput {
        /// Log-probability that the ratio divides by, nats.
        OldLogp = "old_logp",
        /// Log-probability under the reference policy, nats.
        RefLogp = "ref_logp",
        /// Factor of the policy term of each token.
        PolicyWeight = "policy_weight",
        /// Factor of the KL estimate of each token.
        KlWeight = "kl_weight",
        /// Marks of tokens: 1 if KL-Cov penalizes the token, if the token is positive, or if its ratio has other
        /// bounds.
        Selected = "selected",
        /// Log-probability under the sampler, nats; NaN if the sampler did not score the token.
        RolloutLogp = "rollout_logp",
        /// Logarithm of VESPO's rollout weight, the same for all tokens of a sequence.
        LogWeight = "log_weight",
        /// Log-probability under the policy that the off-policy mask compares with, nats; a NaN is left out of the
        /// mean.
        Behaviour = "behaviour_logp",
        /// Cotangent of each token's entropy, `∂loss/∂H`.
        Dentropy = "dentropy",
        /// Inverse temperature `1/T` of the token, times the [rate](super::transform::rate) of the transform of logits;
        /// 1 under the mask.
        Rate = "rate",
    }
}

named! {
    /// Name of a number of a spec, f32 on devices. A bound that the spec lacks is infinite.
    SpecNumber {
        /// Lower bound of the ratio, or the limit of a trust region for `A ≤ 0`.
        Low = "low",
        /// Upper bound of the ratio, or the limit of a trust region for `A > 0`.
        High = "high",
        /// Upper bound `δ` of PPO's ratio that is not clipped.
        Delta = "delta",
        /// Dual-clip constant `c`: for a negative advantage the loss is at most `−c · A`.
        DualClip = "dual_clip",
        /// SAPO's temperature `τ` for a positive advantage.
        TauPositive = "tau_positive",
        /// SAPO's temperature `τ` for any other advantage.
        TauNegative = "tau_negative",
        /// VESPO's exponent `k` of the weight for an advantage that is not negative.
        KPositive = "k_positive",
        /// VESPO's rate `λ` for an advantage that is not negative, at least 1e-4.
        LambdaPositive = "lambda_positive",
        /// VESPO's exponent `k` of the weight for a negative advantage.
        KNegative = "k_negative",
        /// VESPO's rate `λ` for a negative advantage, at least 1e-4.
        LambdaNegative = "lambda_negative",
        /// Factor of the squared log-ratio in the penalty, or of KL-Cov's absolute log-ratio.
        Penalty = "penalty",
        /// Upper bound of the ratio that multiplies a score function.
        Truncate = "truncate",
        /// ASPO's bound `c₊` of the inverse ratio, beyond which a token with `A > 0` has a score function.
        DualClipPositive = "dual_clip_positive",
        /// Lower bound of the ratio of a selected token.
        LowOfSelected = "low_of_selected",
        /// Upper bound of the ratio of a selected token.
        HighOfSelected = "high_of_selected",
        /// TOPR's weight `w₊` of a positive token.
        PositiveWeight = "positive_weight",
        /// TOPR's weight `w₋` of a token that is not positive.
        NegativeWeight = "negative_weight",
        /// Weight `1 − ε` of the log-probability in a cross-entropy.
        TargetWeight = "target_weight",
        /// Share `ε` of the target distribution of a cross-entropy that is uniform.
        LabelSmoothing = "label_smoothing",
        /// Factor of the squared log-sum-exp in a cross-entropy.
        ZLoss = "z_loss",
        /// Upper bound of the ratio that weighs the gradient of a KL estimate.
        KlWeightBound = "kl_weight_bound",
        /// Bound of the absolute log-ratio of each token, or of a sequence's product.
        LogRatioClamp = "log_ratio_clamp",
        /// GMPO's lower bound of a log-ratio, at most 0.
        LogRatioLow = "log_ratio_low",
        /// GMPO's upper bound of a log-ratio, at least 0.
        LogRatioHigh = "log_ratio_high",
        /// Upper bound of the log-ratio of the token's level.
        LogRatioCap = "log_ratio_cap",
        /// Largest mean divergence of a sequence that the off-policy mask keeps, nats.
        OffPolicyThreshold = "off_policy_threshold",
        /// Number `ε` added to the count of tokens that a mean log-ratio divides by.
        RatioEpsilon = "ratio_epsilon",
        /// Factor `beta` of the KL estimate in the loss.
        Beta = "beta",
        /// Bound of the absolute difference `ref_logp − logp`, nats.
        KlDifferenceClamp = "kl_difference_clamp",
        /// Bound of the absolute KL estimate, nats.
        KlValueClamp = "kl_value_clamp",
        /// Inverse temperature `1/T`, if one temperature serves all tokens.
        InverseTemperature = "inverse_temperature",
        /// Factor of a logit with its bias before the `tanh`, or the sign of the scale: see [`transform`].
        LogitFactor = "logit_factor",
        /// Factor `rate/T` of gaps in the softmax that entropy is of.
        Rate = "rate",
        /// Factor `rate` of gaps in the softmax that logp is of, if that is another one.
        LogpRate = "logp_rate",
        /// Derivative `∂loss/∂entropy` of an unmasked token, without `1/T`: an input of a kernel, which the program
        /// around it computes.
        EntropyFactor = "entropy_factor",
        /// Coefficient of the entropy bonus times the spec's `scale`; `−scale` if the cotangent of each token's entropy
        /// is an input.
        EntropyCoef = "entropy_coef",
        /// Known factors of the policy term's denominator, divided by the spec's `scale`.
        Denominator = "denominator",
        /// Cotangent of the loss, which multiplies dlogits.
        LossScale = "loss_scale",
        /// Number `ε` added to the count of tokens that the loss is divided by.
        DenominatorEpsilon = "denominator_epsilon",
        /// Known factors of the denominator of the KL penalty's own mean, divided by the spec's `scale`.
        KlDenominator = "kl_denominator",
        /// Number `ε` added to the count of tokens of the KL penalty's own mean.
        KlDenominatorEpsilon = "kl_denominator_epsilon",
        /// Known factors of the denominator of the entropy bonus's own mean.
        EntropyDenominator = "entropy_denominator",
        /// Number `ε` added to the count of tokens of the entropy bonus's own mean.
        EntropyDenominatorEpsilon = "entropy_denominator_epsilon",
    }
}

impl SpecNumber {
    /// Returns the number's value in `spec` for a batch of `[B,T]`, or NaN if the spec has no such number.
    pub fn value_in(self, spec: &LossSpec, extents: [usize; 2]) -> f64 {
        // Numbers that every loss has are read here, those of objectives below.
        let none = f64::NAN;
        let kl = spec.kl.as_ref();
        let entropy = spec.entropy_averaging;
        match self {
            SpecNumber::LogRatioClamp => spec.ratio.clamp.unwrap_or(none),
            SpecNumber::LogRatioLow => spec.ratio.clip.map_or(none, |clip| -clip.low),
            SpecNumber::LogRatioHigh => spec.ratio.clip.map_or(none, |clip| clip.high),
            SpecNumber::LogRatioCap => spec.ratio.cap.unwrap_or(none),
            SpecNumber::OffPolicyThreshold => spec.off_policy_mask.map_or(none, |mask| mask.threshold),
            SpecNumber::RatioEpsilon => spec.ratio.denominator_epsilon,
            SpecNumber::Beta => kl.map_or(0.0, |kl| kl.beta),
            SpecNumber::KlDifferenceClamp => kl.and_then(|kl| kl.difference_clamp).unwrap_or(none),
            SpecNumber::KlWeightBound => match kl.map(|kl| kl.gradient) {
                Some(KlGradient::K2Weighted(bound)) => bound,
                _ => none,
            },
            SpecNumber::KlValueClamp => kl.and_then(|kl| kl.value_clamp).unwrap_or(none),
            SpecNumber::InverseTemperature => spec.temperature.number().map_or(none, f64::recip),
            SpecNumber::LogitFactor => transform::factor(spec),
            SpecNumber::Rate => {
                spec.temperature.number().map_or(none, |temperature| transform::rate(spec) / temperature)
            }
            SpecNumber::LogpRate => transform::rate(spec),
            SpecNumber::EntropyFactor => none,
            SpecNumber::EntropyCoef if spec.dentropy => -spec.scale,
            SpecNumber::EntropyCoef => spec.entropy_coef * spec.scale,
            SpecNumber::Denominator => known_denominator(spec.averaging(), extents) / spec.scale,
            SpecNumber::LossScale => 1.0,
            SpecNumber::DenominatorEpsilon => spec.denominator_epsilon,
            SpecNumber::KlDenominator => known_denominator(spec.kl_averaging(), extents) / spec.scale,
            SpecNumber::KlDenominatorEpsilon => spec.kl_averaging().denominator_epsilon,
            SpecNumber::EntropyDenominator => entropy.map_or(1.0, |averaging| known_denominator(averaging, extents)),
            SpecNumber::EntropyDenominatorEpsilon => entropy.map_or(0.0, |averaging| averaging.denominator_epsilon),
            _ => self.objective_value(&spec.objective).unwrap_or(none),
        }
    }

    fn objective_value(self, objective: &Objective) -> Option<f64> {
        let clip_value = |clip: &PpoClip| match self {
            SpecNumber::Low => Some(1.0 - clip.epsilon_low),
            SpecNumber::High => Some(1.0 + clip.epsilon_high),
            SpecNumber::Delta => Some(clip.delta.unwrap_or(f64::INFINITY)),
            SpecNumber::DualClip => Some(clip.dual_clip.unwrap_or(f64::INFINITY)),
            _ => None,
        };
        // An objective has only its own numbers; a bound that it lacks is infinite.
        match (objective, self) {
            (Objective::PpoClip(clip), _) => clip_value(clip),
            (Objective::ClipCov(cov), _) => clip_value(&cov.clip),
            (Objective::Cispo(cispo), SpecNumber::Low) => Some(cispo.lower.unwrap_or(f64::NEG_INFINITY)),
            (Objective::Cispo(cispo), SpecNumber::High) => Some(cispo.upper),
            (Objective::MaskedRatio(masked), SpecNumber::Low) => Some(masked.lower),
            (Objective::MaskedRatio(masked), SpecNumber::High) => Some(masked.upper),
            (Objective::Sapo(sapo), SpecNumber::TauPositive) => Some(sapo.tau_positive),
            (Objective::Sapo(sapo), SpecNumber::TauNegative) => Some(sapo.tau_negative),
            (Objective::Vespo(vespo), SpecNumber::KPositive) => Some(vespo.k_positive),
            (Objective::Vespo(vespo), SpecNumber::KNegative) => Some(vespo.k_negative),
            (Objective::Vespo(vespo), SpecNumber::LambdaPositive) => Some(vespo.lambda_positive.max(1e-4)),
            (Objective::Vespo(vespo), SpecNumber::LambdaNegative) => Some(vespo.lambda_negative.max(1e-4)),
            (Objective::TrustRegion(region), SpecNumber::Low) => Some(region.low),
            (Objective::TrustRegion(region), SpecNumber::High) => Some(region.high),
            (Objective::TrustRegion(region), SpecNumber::Penalty) => Some(region.penalty),
            (Objective::TrustRegion(region), SpecNumber::Truncate) => region.truncate,
            (Objective::CrossEntropy(cross_entropy), SpecNumber::TargetWeight) => {
                Some(1.0 - cross_entropy.label_smoothing)
            }
            (Objective::CrossEntropy(cross_entropy), SpecNumber::LabelSmoothing) => Some(cross_entropy.label_smoothing),
            (Objective::CrossEntropy(cross_entropy), SpecNumber::ZLoss) => Some(cross_entropy.z_loss),
            (Objective::Dro(dro), SpecNumber::Penalty) => Some(dro.beta / 2.0),
            (Objective::KlCov(cov), SpecNumber::Penalty) => Some(cov.coefficient),
            (Objective::Topr(topr), SpecNumber::PositiveWeight) => Some(topr.positive_weight),
            (Objective::Topr(topr), SpecNumber::NegativeWeight) => Some(topr.negative_weight),
            (Objective::Topr(topr), SpecNumber::High) => Some(topr.upper),
            (Objective::Aspo(aspo), SpecNumber::Low) => Some(1.0 - aspo.epsilon_low),
            (Objective::Aspo(aspo), SpecNumber::High) => Some(1.0 + aspo.epsilon_high),
            (Objective::Aspo(aspo), SpecNumber::LowOfSelected) => aspo.selected.map(|widths| 1.0 - widths.epsilon_low),
            (Objective::Aspo(aspo), SpecNumber::HighOfSelected) => {
                aspo.selected.map(|widths| 1.0 + widths.epsilon_high)
            }
            (Objective::Aspo(aspo), SpecNumber::DualClipPositive) => Some(aspo.dual_clip_positive),
            (Objective::Aspo(aspo), SpecNumber::DualClip) => Some(aspo.dual_clip_negative),
            _ => None,
        }
    }
}

/// A table of numbers by their names.
#[derive(Clone)]
pub struct SpecNumbers<V>(Vec<(SpecNumber, V)>);

impl<V: Copy> SpecNumbers<V> {
    /// Collects numbers, each with its name.
    pub fn new(numbers: impl IntoIterator<Item = (SpecNumber, V)>) -> Self {
        Self(numbers.into_iter().collect())
    }

    /// A number that the structure reads.
    pub fn get(&self, number: SpecNumber) -> V {
        let found = self.0.iter().find(|(other, _)| *other == number);
        found.unwrap_or_else(|| panic!("the structure does not read `{}`", number.name())).1
    }
}
