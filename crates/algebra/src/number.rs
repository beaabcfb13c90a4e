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
    /// A `[B,T]` array, f32 on devices.
    TokenInput {
        /// The denominator of the ratio.
        OldLogp = "old_logp",
        /// The reference policy's log-probability.
        RefLogp = "ref_logp",
        /// What the policy term of a token is multiplied by.
        PolicyWeight = "policy_weight",
        /// And its KL estimate.
        KlWeight = "kl_weight",
        /// 1 where KL-Cov penalizes, a token is positive, or its ratio has other bounds.
        Selected = "selected",
        /// The sampler's log-probability, NaN where there is none.
        RolloutLogp = "rollout_logp",
        /// The logarithm of VESPO's rollout weight, the same for all tokens of a row.
        LogWeight = "log_weight",
        /// Whose log-probabilities the off-policy mask compares with; NaN is not looked at.
        Behaviour = "behaviour_logp",
        /// The cotangent of the entropy.
        Dentropy = "dentropy",
        /// `1/T` of the token, times the [rate](super::transform::rate) of what is done to logits; 1 under the mask.
        Rate = "rate",
    }
}

named! {
    /// A number of a spec, f32 on devices. A bound that the spec lacks is infinite.
    SpecNumber {
        /// Lower end of the ratio, or of a trust region.
        Low = "low",
        /// Upper end.
        High = "high",
        /// Upper bound of the ratio that is not clipped.
        Delta = "delta",
        /// `c`: where the advantage is negative the loss is at most `−c · A`.
        DualClip = "dual_clip",
        /// SAPO's temperature where the advantage is positive.
        TauPositive = "tau_positive",
        /// And elsewhere.
        TauNegative = "tau_negative",
        /// VESPO's exponent of the ratio where the advantage is positive.
        KPositive = "k_positive",
        /// And its rate.
        LambdaPositive = "lambda_positive",
        /// The exponent elsewhere.
        KNegative = "k_negative",
        /// And the rate.
        LambdaNegative = "lambda_negative",
        /// What the squared log-ratio is multiplied by, or KL-Cov's absolute one.
        Penalty = "penalty",
        /// Upper bound of a score function's ratio.
        Truncate = "truncate",
        /// Upper bound of the ratio upside down.
        DualClipPositive = "dual_clip_positive",
        /// Lower bound of a selected token's ratio.
        LowOfSelected = "low_of_selected",
        /// And upper bound.
        HighOfSelected = "high_of_selected",
        /// Weight of the positive.
        PositiveWeight = "positive_weight",
        /// And of the others.
        NegativeWeight = "negative_weight",
        /// Upper bound of the ratio that weighs the gradient of a KL estimate.
        KlWeightBound = "kl_weight_bound",
        /// Bound of a token's absolute log-ratio.
        LogRatioClamp = "log_ratio_clamp",
        /// GMPO's lower bound of a log-ratio, at most 0.
        LogRatioLow = "log_ratio_low",
        /// GMPO's upper bound.
        LogRatioHigh = "log_ratio_high",
        /// Upper bound of the level's log-ratio.
        LogRatioCap = "log_ratio_cap",
        /// The divergence of a row beyond which it is left out.
        OffPolicyThreshold = "off_policy_threshold",
        /// Added to the tokens of a row where its mean log-ratio is taken.
        RatioEpsilon = "ratio_epsilon",
        /// What the KL estimate is multiplied by.
        Beta = "beta",
        /// Bound of `ref_logp − logp`.
        KlDifferenceClamp = "kl_difference_clamp",
        /// Bound of the estimate.
        KlValueClamp = "kl_value_clamp",
        /// `1/T`.
        InverseTemperature = "inverse_temperature",
        /// What a logit and its bias are multiplied by: see [`transform`].
        LogitFactor = "logit_factor",
        /// `rate/T`, of the softmax that entropy is of.
        Rate = "rate",
        /// `rate`, of the one that logp is of, where that is another.
        LogpRate = "logp_rate",
        /// `∂loss/∂entropy` of an unmasked token, without `1/T`: a kernel's, which a program works out.
        EntropyFactor = "entropy_factor",
        /// Times the spec's `scale`; −1 times it where the cotangent of each token's entropy comes in.
        EntropyCoef = "entropy_coef",
        /// Divided by the spec's `scale`.
        Denominator = "denominator",
        /// The cotangent of the loss, which multiplies dlogits.
        LossScale = "loss_scale",
        /// What is added to the tokens that the loss is divided by.
        DenominatorEpsilon = "denominator_epsilon",
        /// That of the KL penalty's own mean.
        KlDenominator = "kl_denominator",
        /// And what is added to its tokens.
        KlDenominatorEpsilon = "kl_denominator_epsilon",
        /// That of the entropy bonus's own mean.
        EntropyDenominator = "entropy_denominator",
        /// And what is added to its tokens.
        EntropyDenominatorEpsilon = "entropy_denominator_epsilon",
    }
}

impl SpecNumber {
    /// Its value in `spec`, for a batch of `[B,T]`; NaN where the spec has no such number.
    pub fn value_in(self, spec: &LossSpec, extents: [usize; 2]) -> f64 {
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

/// Numbers by name.
#[derive(Clone)]
pub struct SpecNumbers<V>(Vec<(SpecNumber, V)>);

impl<V: Copy> SpecNumbers<V> {
    /// Those of `numbers`.
    pub fn new(numbers: impl IntoIterator<Item = (SpecNumber, V)>) -> Self {
        Self(numbers.into_iter().collect())
    }

    /// A number that the structure reads.
    pub fn get(&self, number: SpecNumber) -> V {
        let found = self.0.iter().find(|(other, _)| *other == number);
        found.unwrap_or_else(|| panic!("the structure does not read `{}`", number.name())).1
    }
}
