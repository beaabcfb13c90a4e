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
    Input {
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
    Number {
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

impl Number {
    /// Its value in `spec`, for a batch of `[B,T]`; NaN where the spec has no such number.
    pub fn of(self, spec: &LossSpec, extents: [usize; 2]) -> f64 {
        let none = f64::NAN;
        let kl = spec.kl.as_ref();
        let of_entropy = spec.entropy_averaging;
        match self {
            Number::LogRatioClamp => spec.ratio.clamp.unwrap_or(none),
            Number::LogRatioLow => spec.ratio.clip.map_or(none, |clip| -clip.low),
            Number::LogRatioHigh => spec.ratio.clip.map_or(none, |clip| clip.high),
            Number::LogRatioCap => spec.ratio.cap.unwrap_or(none),
            Number::OffPolicyThreshold => spec.off_policy_mask.map_or(none, |mask| mask.threshold),
            Number::RatioEpsilon => spec.ratio.denominator_epsilon,
            Number::Beta => kl.map_or(0.0, |kl| kl.beta),
            Number::KlDifferenceClamp => kl.and_then(|kl| kl.difference_clamp).unwrap_or(none),
            Number::KlWeightBound => match kl.map(|kl| kl.gradient) {
                Some(KlGradient::K2Weighted(bound)) => bound,
                _ => none,
            },
            Number::KlValueClamp => kl.and_then(|kl| kl.value_clamp).unwrap_or(none),
            Number::InverseTemperature => spec.temperature.number().map_or(none, f64::recip),
            Number::LogitFactor => transform::factor(spec),
            Number::Rate => spec.temperature.number().map_or(none, |temperature| transform::rate(spec) / temperature),
            Number::LogpRate => transform::rate(spec),
            Number::EntropyFactor => none,
            Number::EntropyCoef if spec.dentropy => -spec.scale,
            Number::EntropyCoef => spec.entropy_coef * spec.scale,
            Number::Denominator => known_denominator(spec.averaging(), extents) / spec.scale,
            Number::LossScale => 1.0,
            Number::DenominatorEpsilon => spec.denominator_epsilon,
            Number::KlDenominator => known_denominator(spec.kl_averaging(), extents) / spec.scale,
            Number::KlDenominatorEpsilon => spec.kl_averaging().denominator_epsilon,
            Number::EntropyDenominator => of_entropy.map_or(1.0, |averaging| known_denominator(averaging, extents)),
            Number::EntropyDenominatorEpsilon => of_entropy.map_or(0.0, |averaging| averaging.denominator_epsilon),
            _ => self.of_objective(&spec.objective).unwrap_or(none),
        }
    }

    fn of_objective(self, objective: &Objective) -> Option<f64> {
        let of_clip = |clip: &PpoClip| match self {
            Number::Low => Some(1.0 - clip.epsilon_low),
            Number::High => Some(1.0 + clip.epsilon_high),
            Number::Delta => Some(clip.delta.unwrap_or(f64::INFINITY)),
            Number::DualClip => Some(clip.dual_clip.unwrap_or(f64::INFINITY)),
            _ => None,
        };
        match (objective, self) {
            (Objective::PpoClip(clip), _) => of_clip(clip),
            (Objective::ClipCov(cov), _) => of_clip(&cov.clip),
            (Objective::Cispo(cispo), Number::Low) => Some(cispo.lower.unwrap_or(f64::NEG_INFINITY)),
            (Objective::Cispo(cispo), Number::High) => Some(cispo.upper),
            (Objective::MaskedRatio(masked), Number::Low) => Some(masked.lower),
            (Objective::MaskedRatio(masked), Number::High) => Some(masked.upper),
            (Objective::Sapo(sapo), Number::TauPositive) => Some(sapo.tau_positive),
            (Objective::Sapo(sapo), Number::TauNegative) => Some(sapo.tau_negative),
            (Objective::Vespo(vespo), Number::KPositive) => Some(vespo.k_positive),
            (Objective::Vespo(vespo), Number::KNegative) => Some(vespo.k_negative),
            (Objective::Vespo(vespo), Number::LambdaPositive) => Some(vespo.lambda_positive.max(1e-4)),
            (Objective::Vespo(vespo), Number::LambdaNegative) => Some(vespo.lambda_negative.max(1e-4)),
            (Objective::TrustRegion(region), Number::Low) => Some(region.low),
            (Objective::TrustRegion(region), Number::High) => Some(region.high),
            (Objective::TrustRegion(region), Number::Penalty) => Some(region.penalty),
            (Objective::TrustRegion(region), Number::Truncate) => region.truncate,
            (Objective::Dro(dro), Number::Penalty) => Some(dro.beta / 2.0),
            (Objective::KlCov(cov), Number::Penalty) => Some(cov.coefficient),
            (Objective::Topr(topr), Number::PositiveWeight) => Some(topr.positive_weight),
            (Objective::Topr(topr), Number::NegativeWeight) => Some(topr.negative_weight),
            (Objective::Topr(topr), Number::High) => Some(topr.upper),
            (Objective::Aspo(aspo), Number::Low) => Some(1.0 - aspo.epsilon_low),
            (Objective::Aspo(aspo), Number::High) => Some(1.0 + aspo.epsilon_high),
            (Objective::Aspo(aspo), Number::LowOfSelected) => aspo.selected.map(|widths| 1.0 - widths.epsilon_low),
            (Objective::Aspo(aspo), Number::HighOfSelected) => aspo.selected.map(|widths| 1.0 + widths.epsilon_high),
            (Objective::Aspo(aspo), Number::DualClipPositive) => Some(aspo.dual_clip_positive),
            (Objective::Aspo(aspo), Number::DualClip) => Some(aspo.dual_clip_negative),
            _ => None,
        }
    }
}

/// Numbers by name.
#[derive(Clone)]
pub struct Numbers<V>(Vec<(Number, V)>);

impl<V: Copy> Numbers<V> {
    /// Those of `numbers`.
    pub fn new(numbers: impl IntoIterator<Item = (Number, V)>) -> Self {
        Self(numbers.into_iter().collect())
    }

    /// A number that the structure reads.
    pub fn get(&self, number: Number) -> V {
        let found = self.0.iter().find(|(other, _)| *other == number);
        found.unwrap_or_else(|| panic!("the structure does not read `{}`", number.name())).1
    }
}
