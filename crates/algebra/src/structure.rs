//! What of a spec shapes a program, and which numbers and arrays that program reads.

pub use super::number::{SpecNumber, SpecNumbers, TokenInput};
use super::transform::Transform;
use assay_core::spec::{
    Averaging, Divergence, KlEstimator, KlGradient, KlImportance, LossSpec, LossTerms, Objective, OldLogp,
    PositiveTokens, RatioLevel, Reduction, Rows, Temperature, TemperatureDivides,
};

/// What of a spec shapes a program. Its numbers are run-time inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an input that a program has or lacks")]
pub struct Structure {
    /// The policy term.
    pub form: ObjectiveForm,
    /// Whose log-ratio that term takes.
    pub level: RatioLevel,
    /// Which bounds log-ratios have.
    pub bounds: LogRatioBounds,
    /// Whether old log-probabilities come in; else they are the policy's own.
    pub old_logp_given: bool,
    /// What becomes of logits before their softmax, where anything does.
    pub transform: Option<Transform>,
    /// What the temperature divides.
    pub temperature: TemperaturePlace,
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
pub struct StructuredSpec<'s> {
    /// The spec, for its numbers.
    pub spec: &'s LossSpec,
    /// What of it shapes a program.
    pub structure: Structure,
}

impl<'s> StructuredSpec<'s> {
    /// With the structure of `spec`.
    pub fn new(spec: &'s LossSpec) -> Self {
        Self { spec, structure: Structure::from_spec(spec) }
    }

    /// The run-time numbers of a program for a batch of `[B,T]`, in the order that it reads them.
    pub fn program_numbers(self, extents: [usize; 2]) -> Vec<(SpecNumber, f32)> {
        let numbers = self.structure.program_numbers().into_iter();
        numbers.map(|number| (number, number.value_in(self.spec, extents) as f32)).collect()
    }
}

/// The policy term. Clip-Cov is PPO-clip with a weight of 0 on the tokens selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectiveForm {
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
pub struct LogRatioBounds {
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
pub enum TemperaturePlace {
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
pub enum GapRate {
    /// One number for all tokens.
    OfAll(SpecNumber),
    /// Each token's own: [`TokenInput::Rate`].
    OfToken,
}

/// What a term of a token is divided by: `(tokens + ε) · filled rows · a number that is given`, each factor where it is
/// asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denominator {
    /// The tokens counted, if any are.
    pub tokens: Option<DenominatorTokens>,
    /// The rows that have a token.
    pub filled_rows: bool,
    /// Whether there is an `ε`.
    pub epsilon: bool,
}

/// Which tokens are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenominatorTokens {
    /// All.
    OfBatch,
    /// Those of the same row.
    OfRow,
}

impl Denominator {
    /// The mean over all tokens.
    pub const ALL_TOKENS: Self = Self { tokens: Some(DenominatorTokens::OfBatch), filled_rows: false, epsilon: false };

    /// The sum.
    pub const ONE: Self = Self { tokens: None, filled_rows: false, epsilon: false };

    fn from_averaging(averaging: Averaging) -> Self {
        let tokens = match averaging.reduction {
            Reduction::TokenMean => Some(DenominatorTokens::OfBatch),
            Reduction::SequenceMean { .. } => Some(DenominatorTokens::OfRow),
            Reduction::SequenceSum { .. } | Reduction::FixedLength { .. } | Reduction::Normalizer(_) => None,
        };
        let filled_rows = rows_of(averaging.reduction) == Some(Rows::NonEmpty);
        Self { tokens, filled_rows, epsilon: tokens.is_some() && averaging.denominator_epsilon != 0.0 }
    }

    /// Whether rows differ in it.
    pub fn by_row(self) -> bool {
        self.tokens == Some(DenominatorTokens::OfRow)
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
    pub fn from_spec(spec: &LossSpec) -> Self {
        let drops = |from: &[LossTerms]| {
            spec.rejection.iter().any(|rejection| rejection.counts && from.contains(&rejection.drops_from))
        };
        let form = ObjectiveForm::from_objective(&spec.objective);
        let weighs = spec.rollout.is_some() && form != ObjectiveForm::Vespo;
        let selects = matches!(spec.objective, Objective::ClipCov(_));
        let own_weights = spec.token_weights.map(|weights| weights.applies_to);
        let weighs_kl = spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl);
        Self {
            form,
            level: spec.ratio.level,
            bounds: LogRatioBounds {
                clamp: spec.ratio.clamp.is_some(),
                clip: spec.ratio.clip.is_some(),
                cap: spec.ratio.cap.is_some(),
            },
            old_logp_given: spec.old_logp != OldLogp::Current,
            transform: Transform::from_spec(spec),
            temperature: match (spec.temperature, spec.temperature_divides) {
                (Temperature::Given, _) => TemperaturePlace::Given,
                (Temperature::Number(1.0), _) => TemperaturePlace::One,
                (Temperature::Number(_), TemperatureDivides::Logits) => TemperaturePlace::Logits,
                (Temperature::Number(_), TemperatureDivides::Logp) => TemperaturePlace::Logp,
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
                denominator: (spec.kl_averaging() != spec.averaging())
                    .then(|| Denominator::from_averaging(spec.kl_averaging())),
            }),
            entropy_bonus: match spec.entropy_coef {
                _ if spec.dentropy => Some(Denominator::ONE),
                0.0 => None,
                _ => Some(spec.entropy_averaging.map_or(Denominator::ALL_TOKENS, Denominator::from_averaging)),
            },
            dentropy: spec.dentropy,
            ids_per_token: spec.ids_per_token,
            denominator: Denominator::from_averaging(spec.averaging()),
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
        self.level != RatioLevel::Token || self.form == ObjectiveForm::Vespo || self.off_policy_mask
    }

    /// Whether it is told which tokens are selected.
    pub fn selected(self) -> bool {
        matches!(
            self.form,
            ObjectiveForm::KlCov | ObjectiveForm::Topr { selected: true } | ObjectiveForm::Aspo { selected: true }
        )
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
    pub fn numbers(self) -> Vec<SpecNumber> {
        use SpecNumber as N;
        let of_form: &[SpecNumber] = match self.form {
            ObjectiveForm::PpoClip => &[N::Low, N::High, N::Delta, N::DualClip],
            ObjectiveForm::Cispo | ObjectiveForm::MaskedRatio => &[N::Low, N::High],
            ObjectiveForm::Sapo => &[N::TauPositive, N::TauNegative],
            ObjectiveForm::Vespo => &[N::KPositive, N::LambdaPositive, N::KNegative, N::LambdaNegative],
            ObjectiveForm::TrustRegion { score: false, .. } => &[N::Low, N::High, N::Penalty],
            ObjectiveForm::TrustRegion { score: true, .. } => &[N::Low, N::High, N::Penalty, N::Truncate],
            ObjectiveForm::Dro | ObjectiveForm::KlCov => &[N::Penalty],
            ObjectiveForm::Topr { .. } => &[N::PositiveWeight, N::NegativeWeight, N::High],
            ObjectiveForm::Aspo { selected: false } => &[N::Low, N::High, N::DualClipPositive, N::DualClip],
            ObjectiveForm::Aspo { selected: true } => {
                &[N::Low, N::High, N::LowOfSelected, N::HighOfSelected, N::DualClipPositive, N::DualClip]
            }
            ObjectiveForm::PolicyGradient | ObjectiveForm::ImportanceSampling | ObjectiveForm::None => &[],
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
    pub fn softmax_numbers(self) -> Vec<SpecNumber> {
        let (one, changes) = (self.temperature != TemperaturePlace::Given, self.transform.is_some());
        let all = [
            (one, SpecNumber::InverseTemperature),
            (changes, SpecNumber::LogitFactor),
            (changes && one, SpecNumber::Rate),
            (changes && self.temperature == TemperaturePlace::Logp, SpecNumber::LogpRate),
        ];
        all.into_iter().filter_map(|(read, number)| read.then_some(number)).collect()
    }

    /// What gaps from the maximum are multiplied by, nothing where it is 1: in the softmax that entropy is of, and in that of logp where
    /// it is another. Derivatives by what the softmax is of are multiplied by the first.
    pub fn gap_rates(self) -> Vec<Option<GapRate>> {
        let [of_entropy, of_logp] = match self.transform {
            Some(_) => [Some(SpecNumber::Rate), Some(SpecNumber::LogpRate)],
            None => [Some(SpecNumber::InverseTemperature), None],
        };
        let [of_entropy, of_logp] = [of_entropy, of_logp].map(|number| number.map(GapRate::OfAll));
        match self.temperature {
            TemperaturePlace::Given => vec![Some(GapRate::OfToken)],
            TemperaturePlace::One if self.transform.is_none() => vec![None],
            TemperaturePlace::One | TemperaturePlace::Logits => vec![of_entropy],
            TemperaturePlace::Logp => vec![of_entropy, of_logp],
        }
    }

    /// The numbers that a whole program reads, in order.
    pub fn program_numbers(self) -> Vec<SpecNumber> {
        use SpecNumber as N;
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
    pub fn inputs(self) -> Vec<TokenInput> {
        let all = [
            (self.old_logp_given, TokenInput::OldLogp),
            (self.kl.is_some(), TokenInput::RefLogp),
            (self.policy_weight, TokenInput::PolicyWeight),
            (self.kl_weight, TokenInput::KlWeight),
            (self.selected(), TokenInput::Selected),
            (self.rollout_logp(), TokenInput::RolloutLogp),
            (self.form == ObjectiveForm::Vespo, TokenInput::LogWeight),
            (self.off_policy_mask, TokenInput::Behaviour),
            (self.dentropy, TokenInput::Dentropy),
            (self.temperature == TemperaturePlace::Given, TokenInput::Rate),
        ];
        all.into_iter().filter_map(|(read, input)| read.then_some(input)).collect()
    }
}

impl ObjectiveForm {
    fn from_objective(objective: &Objective) -> Self {
        match objective {
            Objective::PpoClip(_) | Objective::ClipCov(_) => ObjectiveForm::PpoClip,
            Objective::Cispo(_) => ObjectiveForm::Cispo,
            Objective::Sapo(_) => ObjectiveForm::Sapo,
            Objective::Vespo(_) => ObjectiveForm::Vespo,
            Objective::PolicyGradient => ObjectiveForm::PolicyGradient,
            Objective::ImportanceSampling(_) => ObjectiveForm::ImportanceSampling,
            Objective::MaskedRatio(_) => ObjectiveForm::MaskedRatio,
            Objective::TrustRegion(region) => ObjectiveForm::TrustRegion {
                divergence: region.divergence,
                two_sided: region.two_sided,
                score: region.truncate.is_some(),
            },
            Objective::Dro(_) => ObjectiveForm::Dro,
            Objective::KlCov(_) => ObjectiveForm::KlCov,
            Objective::Topr(topr) => ObjectiveForm::Topr { selected: topr.positive == PositiveTokens::Selected },
            Objective::Aspo(aspo) => ObjectiveForm::Aspo { selected: aspo.selected.is_some() },
            Objective::None => ObjectiveForm::None,
        }
    }
}
