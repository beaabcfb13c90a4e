//! What of a spec shapes a program, and which numbers and arrays that program reads.

pub use super::number::{Input, Number, Numbers};
use super::transform::Transform;
use assay_core::spec::{
    Averaging, Divergence, KlEstimator, KlGradient, KlImportance, LossSpec, LossTerms, Objective, OldLogp,
    PositiveTokens, RatioLevel, Reduction, Rows, Temperature as OfSpec, TemperatureDivides,
};

/// What of a spec shapes a program. Its numbers are run-time inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an input that a program has or lacks")]
pub struct Structure {
    /// The policy term.
    pub form: Form,
    /// Whose log-ratio that term takes.
    pub level: RatioLevel,
    /// Which bounds log-ratios have.
    pub bounds: Bounds,
    /// Whether old log-probabilities come in; else they are the policy's own.
    pub old_logp_given: bool,
    /// What becomes of logits before their softmax, where anything does.
    pub transform: Option<Transform>,
    /// What the temperature divides.
    pub temperature: Temperature,
    /// The KL penalty, if there is one.
    pub kl: Option<KlForm>,
    /// The mean that the entropy bonus is of, if there is one; of cotangents that are given it is the sum.
    pub entropy_bonus: Option<Denominator>,
    /// Whether the cotangent of each token's entropy comes in.
    pub dentropy: bool,
    /// How many ids of a token logp is asked of.
    pub ids_per_token: usize,
    /// The mean that the loss is.
    pub denominator: Denominator,
    /// Whether the policy term of each token has a factor that comes in.
    pub policy_weight: bool,
    /// Whether the KL estimate has.
    pub kl_weight: bool,
    /// Whether rows that are too far from the policy that acted are left out.
    pub off_policy_mask: bool,
}

/// A spec with its structure, which is made of it once and handed on.
#[derive(Clone, Copy, Debug)]
pub struct Shaped<'s> {
    /// The spec, for its numbers.
    pub spec: &'s LossSpec,
    /// What of it shapes a program.
    pub structure: Structure,
}

impl<'s> Shaped<'s> {
    /// With the structure of `spec`.
    pub fn of(spec: &'s LossSpec) -> Self {
        Self { spec, structure: Structure::of(spec) }
    }

    /// The run-time numbers of a program for a batch of `[B,T]`, in the order that it reads them.
    pub fn program_numbers(self, extents: [usize; 2]) -> Vec<(Number, f32)> {
        let numbers = self.structure.program_numbers().into_iter();
        numbers.map(|number| (number, number.of(self.spec, extents) as f32)).collect()
    }
}

/// The policy term. Clip-Cov is PPO-clip with a weight of 0 on the tokens selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The lesser of the ratio's and the clipped ratio's surrogate.
    PpoClip,
    /// `−sg(clipped ratio) · A · ℓ`.
    Cispo,
    /// `−(4/τ) · σ(τ(r − 1)) · A`.
    Sapo,
    /// `−w · A · ℓ`, the weight `w` a gamma kernel of the row's ratio.
    Vespo,
    /// `−A · ℓ`.
    PolicyGradient,
    /// `−r · A`.
    ImportanceSampling,
    /// `−r · A · ℓ`, the ratio held, where it is within its bounds; else 0.
    MaskedRatio,
    /// `−r · A`, or its score function, where a divergence is within its bounds; a squared log-ratio everywhere.
    TrustRegion {
        /// Which divergence.
        divergence: Divergence,
        /// Whether both bounds hold whatever the sign of the advantage.
        two_sided: bool,
        /// Whether it is a score function, of a ratio with an upper bound.
        score: bool,
    },
    /// `−A · ℓ` and a squared log-ratio.
    Dro,
    /// `−r · A`, and the absolute log-ratio of the selected.
    KlCov,
    /// `−A · ℓ` with one weight where a token is positive, with another and a ratio held below its bound elsewhere.
    Topr {
        /// Whether the positive are given, or those with a positive advantage.
        selected: bool,
    },
    /// The ratio upside down where the advantage is positive, with a bound below and above.
    Aspo {
        /// Whether some, which are given, have other bounds of the ratio.
        selected: bool,
    },
    /// No policy term.
    None,
}

/// The bounds of log-ratios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// `|x| ≤ clamp` of each token, or of the product's `Σ x`.
    pub clamp: bool,
    /// GMPO's, by the sign of the advantage.
    pub clip: bool,
    /// Of the level's log-ratio.
    pub cap: bool,
}

/// The KL penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KlForm {
    /// Of the divergence.
    pub estimator: KlEstimator,
    /// What its derivative is taken of.
    pub slope: KlSlope,
    /// What multiplies it.
    pub importance: KlImportance,
    /// Whether `ref_logp − logp` has a bound.
    pub difference_clamp: bool,
    /// Whether the estimate has one, and where it stands.
    pub value_clamp: Option<ValueClamp>,
    /// Its own, where it differs from that of the policy term.
    pub denominator: Option<Denominator>,
}

/// What the estimate's derivative is taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlSlope {
    /// Itself.
    Own,
    /// k2, without bounds.
    K2,
    /// The same, times the token's ratio below its bound.
    K2Weighted,
}

/// Where the estimate's bound stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueClamp {
    /// Before the importance multiplies it.
    BeforeImportance,
    /// After that.
    AfterImportance,
}

/// What the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temperature {
    /// Nothing: it is 1.
    One,
    /// The logits, before their softmax.
    Logits,
    /// The log-probability; the softmax is that of the logits as they are.
    Logp,
    /// The logits, before their softmax, each token's by its own.
    Given,
}

/// What gaps from the maximum are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// One number for all tokens.
    OfAll(Number),
    /// Each token's own: [`Input::Rate`].
    OfToken,
}

/// What a term of a token is divided by: `(tokens + ε) · filled rows · a number that is given`, each factor where it is
/// asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denominator {
    /// The tokens counted, if any are.
    pub tokens: Option<Tokens>,
    /// The rows that have a token.
    pub filled_rows: bool,
    /// Whether there is an `ε`.
    pub epsilon: bool,
}

/// Which tokens are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// All.
    OfBatch,
    /// Those of the same row.
    OfRow,
}

impl Denominator {
    /// The mean over all tokens.
    pub const ALL_TOKENS: Self = Self { tokens: Some(Tokens::OfBatch), filled_rows: false, epsilon: false };

    /// The sum.
    pub const ONE: Self = Self { tokens: None, filled_rows: false, epsilon: false };

    fn of(averaging: Averaging) -> Self {
        let tokens = match averaging.reduction {
            Reduction::TokenMean => Some(Tokens::OfBatch),
            Reduction::SequenceMean { .. } => Some(Tokens::OfRow),
            Reduction::SequenceSum { .. } | Reduction::FixedLength { .. } | Reduction::Normalizer(_) => None,
        };
        let filled_rows = rows_of(averaging.reduction) == Some(Rows::NonEmpty);
        Self { tokens, filled_rows, epsilon: tokens.is_some() && averaging.denominator_epsilon != 0.0 }
    }

    /// Whether rows differ in it.
    pub fn by_row(self) -> bool {
        self.tokens == Some(Tokens::OfRow)
    }
}

fn rows_of(reduction: Reduction) -> Option<Rows> {
    match reduction {
        Reduction::SequenceMean { rows } | Reduction::SequenceSum { rows } | Reduction::FixedLength { rows, .. } => {
            Some(rows)
        }
        Reduction::TokenMean | Reduction::Normalizer(_) => None,
    }
}

/// The factors of a [`Denominator`] that are known before there is a batch, for `[batch, tokens]` of it.
pub(super) fn known_denominator(averaging: Averaging, [batch, tokens]: [usize; 2]) -> f64 {
    let rows = match rows_of(averaging.reduction) {
        Some(Rows::All) => batch as f64,
        Some(Rows::Given(count)) => count,
        Some(Rows::NonEmpty) | None => 1.0,
    };
    match averaging.reduction {
        Reduction::FixedLength { length, .. } => rows * length.unwrap_or(tokens) as f64,
        Reduction::Normalizer(count) => count,
        _ => rows,
    }
}

impl Structure {
    /// Everything but the numbers of `spec`.
    pub fn of(spec: &LossSpec) -> Self {
        let drops = |from: &[LossTerms]| {
            spec.rejection.iter().any(|rejection| rejection.counts && from.contains(&rejection.drops_from))
        };
        let form = Form::of(&spec.objective);
        let weighs = spec.rollout.is_some() && form != Form::Vespo;
        let selects = matches!(spec.objective, Objective::ClipCov(_));
        let own_weights = spec.token_weights.map(|weights| weights.applies_to);
        let weighs_kl = spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl);
        Self {
            form,
            level: spec.ratio.level,
            bounds: Bounds {
                clamp: spec.ratio.clamp.is_some(),
                clip: spec.ratio.clip.is_some(),
                cap: spec.ratio.cap.is_some(),
            },
            old_logp_given: spec.old_logp != OldLogp::Current,
            transform: Transform::of(spec),
            temperature: match (spec.temperature, spec.temperature_divides) {
                (OfSpec::Given, _) => Temperature::Given,
                (OfSpec::Number(1.0), _) => Temperature::One,
                (OfSpec::Number(_), TemperatureDivides::Logits) => Temperature::Logits,
                (OfSpec::Number(_), TemperatureDivides::Logp) => Temperature::Logp,
            },
            kl: spec.kl.as_ref().map(|kl| KlForm {
                estimator: kl.estimator,
                slope: match kl.gradient {
                    KlGradient::Own => KlSlope::Own,
                    KlGradient::K2 => KlSlope::K2,
                    KlGradient::K2Weighted(_) => KlSlope::K2Weighted,
                },
                importance: kl.importance,
                difference_clamp: kl.difference_clamp.is_some(),
                value_clamp: kl.value_clamp.map(|_| {
                    if kl.clamp_after_importance { ValueClamp::AfterImportance } else { ValueClamp::BeforeImportance }
                }),
                denominator: (spec.kl_averaging() != spec.averaging()).then(|| Denominator::of(spec.kl_averaging())),
            }),
            entropy_bonus: match spec.entropy_coef {
                _ if spec.dentropy => Some(Denominator::ONE),
                0.0 => None,
                _ => Some(spec.entropy_averaging.map_or(Denominator::ALL_TOKENS, Denominator::of)),
            },
            dentropy: spec.dentropy,
            ids_per_token: spec.ids_per_token,
            denominator: Denominator::of(spec.averaging()),
            policy_weight: weighs
                || drops(&[LossTerms::Policy, LossTerms::PolicyAndKl])
                || selects
                || own_weights.is_some(),
            kl_weight: spec.kl.is_some()
                && (weighs_kl || drops(&[LossTerms::PolicyAndKl]) || own_weights == Some(LossTerms::PolicyAndKl)),
            off_policy_mask: spec.off_policy_mask.is_some(),
        }
    }

    /// Whether the loss of a token depends on other tokens of its row.
    pub fn couples_rows(self) -> bool {
        self.level != RatioLevel::Token || self.form == Form::Vespo || self.off_policy_mask
    }

    /// Whether it is told which tokens are selected.
    pub fn selected(self) -> bool {
        matches!(self.form, Form::KlCov | Form::Topr { selected: true } | Form::Aspo { selected: true })
    }

    /// Whether the KL estimate is weighed against the sampler.
    pub fn rollout_logp(self) -> bool {
        self.kl.is_some_and(|kl| kl.importance == KlImportance::Rollout)
    }

    /// Whether the KL penalty has a reduction of its own.
    pub fn kl_share(self) -> bool {
        self.kl.is_some_and(|kl| kl.denominator.is_some())
    }

    /// Whether tokens differ in `∂loss/∂entropy`: by their rows, or as it is given.
    pub fn entropy_by_token(self) -> bool {
        self.dentropy || self.entropy_bonus.is_some_and(Denominator::by_row)
    }

    /// The numbers that [`token_loss`](super::objective::token_loss) reads, in order.
    pub fn numbers(self) -> Vec<Number> {
        use Number as N;
        let of_form: &[Number] = match self.form {
            Form::PpoClip => &[N::Low, N::High, N::Delta, N::DualClip],
            Form::Cispo | Form::MaskedRatio => &[N::Low, N::High],
            Form::Sapo => &[N::TauPositive, N::TauNegative],
            Form::Vespo => &[N::KPositive, N::LambdaPositive, N::KNegative, N::LambdaNegative],
            Form::TrustRegion { score: false, .. } => &[N::Low, N::High, N::Penalty],
            Form::TrustRegion { score: true, .. } => &[N::Low, N::High, N::Penalty, N::Truncate],
            Form::Dro | Form::KlCov => &[N::Penalty],
            Form::Topr { .. } => &[N::PositiveWeight, N::NegativeWeight, N::High],
            Form::Aspo { selected: false } => &[N::Low, N::High, N::DualClipPositive, N::DualClip],
            Form::Aspo { selected: true } => {
                &[N::Low, N::High, N::LowOfSelected, N::HighOfSelected, N::DualClipPositive, N::DualClip]
            }
            Form::PolicyGradient | Form::ImportanceSampling | Form::None => &[],
        };
        let kl = self.kl;
        let optional = [
            (self.bounds.clamp, N::LogRatioClamp),
            (self.bounds.clip, N::LogRatioLow),
            (self.bounds.clip, N::LogRatioHigh),
            (self.bounds.cap, N::LogRatioCap),
            (self.off_policy_mask, N::OffPolicyThreshold),
            (matches!(self.level, RatioLevel::Sequence | RatioLevel::SequenceToken), N::RatioEpsilon),
            (true, N::Beta),
            (kl.is_some_and(|kl| kl.difference_clamp), N::KlDifferenceClamp),
            (kl.is_some_and(|kl| kl.value_clamp.is_some()), N::KlValueClamp),
            (kl.is_some_and(|kl| kl.slope == KlSlope::K2Weighted), N::KlWeightBound),
        ];
        let of_form = of_form.iter().copied();
        of_form.chain(optional.into_iter().filter_map(|(read, number)| read.then_some(number))).collect()
    }

    /// The numbers that its softmaxes read, in order.
    pub fn softmax_numbers(self) -> Vec<Number> {
        let (one, changes) = (self.temperature != Temperature::Given, self.transform.is_some());
        let all = [
            (one, Number::InverseTemperature),
            (changes, Number::LogitFactor),
            (changes && one, Number::Rate),
            (changes && self.temperature == Temperature::Logp, Number::LogpRate),
        ];
        all.into_iter().filter_map(|(read, number)| read.then_some(number)).collect()
    }

    /// What gaps from the maximum are multiplied by, nothing where it is 1: in the softmax that entropy is of, and in that of logp where
    /// it is another. Derivatives by what the softmax is of are multiplied by the first.
    pub fn gap_rates(self) -> Vec<Option<Rate>> {
        let [of_entropy, of_logp] = match self.transform {
            Some(_) => [Some(Number::Rate), Some(Number::LogpRate)],
            None => [Some(Number::InverseTemperature), None],
        };
        let [of_entropy, of_logp] = [of_entropy, of_logp].map(|number| number.map(Rate::OfAll));
        match self.temperature {
            Temperature::Given => vec![Some(Rate::OfToken)],
            Temperature::One if self.transform.is_none() => vec![None],
            Temperature::One | Temperature::Logits => vec![of_entropy],
            Temperature::Logp => vec![of_entropy, of_logp],
        }
    }

    /// The numbers that a whole program reads, in order.
    pub fn program_numbers(self) -> Vec<Number> {
        use Number as N;
        let epsilon = |denominator: Option<Denominator>| denominator.is_some_and(|denominator| denominator.epsilon);
        let kl = self.kl.and_then(|kl| kl.denominator);
        let entropy =
            self.entropy_bonus.filter(|denominator| *denominator != Denominator::ALL_TOKENS && !self.dentropy);
        let optional = [
            (self.denominator.epsilon, N::DenominatorEpsilon),
            (kl.is_some(), N::KlDenominator),
            (epsilon(kl), N::KlDenominatorEpsilon),
            (entropy.is_some(), N::EntropyDenominator),
            (epsilon(entropy), N::EntropyDenominatorEpsilon),
        ];
        let mut numbers = self.numbers();
        numbers.extend(self.softmax_numbers());
        numbers.extend([N::EntropyCoef, N::Denominator, N::LossScale]);
        numbers.extend(optional.into_iter().filter_map(|(read, number)| read.then_some(number)));
        numbers
    }

    /// The `[B,T]` arrays that a program reads beside ids, mask and advantages, in order.
    pub fn inputs(self) -> Vec<Input> {
        let all = [
            (self.old_logp_given, Input::OldLogp),
            (self.kl.is_some(), Input::RefLogp),
            (self.policy_weight, Input::PolicyWeight),
            (self.kl_weight, Input::KlWeight),
            (self.selected(), Input::Selected),
            (self.rollout_logp(), Input::RolloutLogp),
            (self.form == Form::Vespo, Input::LogWeight),
            (self.off_policy_mask, Input::Behaviour),
            (self.dentropy, Input::Dentropy),
            (self.temperature == Temperature::Given, Input::Rate),
        ];
        all.into_iter().filter_map(|(read, input)| read.then_some(input)).collect()
    }
}

impl Form {
    fn of(objective: &Objective) -> Self {
        match objective {
            Objective::PpoClip(_) | Objective::ClipCov(_) => Form::PpoClip,
            Objective::Cispo(_) => Form::Cispo,
            Objective::Sapo(_) => Form::Sapo,
            Objective::Vespo(_) => Form::Vespo,
            Objective::PolicyGradient => Form::PolicyGradient,
            Objective::ImportanceSampling(_) => Form::ImportanceSampling,
            Objective::MaskedRatio(_) => Form::MaskedRatio,
            Objective::TrustRegion(region) => Form::TrustRegion {
                divergence: region.divergence,
                two_sided: region.two_sided,
                score: region.truncate.is_some(),
            },
            Objective::Dro(_) => Form::Dro,
            Objective::KlCov(_) => Form::KlCov,
            Objective::Topr(topr) => Form::Topr { selected: topr.positive == PositiveTokens::Selected },
            Objective::Aspo(aspo) => Form::Aspo { selected: aspo.selected.is_some() },
            Objective::None => Form::None,
        }
    }
}
