//! The part of a spec that determines a program's structure, and the names of the numbers and arrays that the program
//! reads.

pub use super::number::{SpecNumber, SpecNumbers, TokenInput};
use super::transform::Transform;
use assay_core::spec::{
    Averaging, Divergence, KlEstimator, KlGradient, KlImportance, LossSpec, LossTerms, Objective, OldLogp,
    PositiveTokens, RatioLevel, Reduction, Rows, Temperature, TemperatureDivides,
};

/// The part of a spec that determines a program's structure. The numbers of the spec are inputs at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an input that a program has or lacks")]
pub struct Structure {
    /// Formula of the policy term, by its objective.
    pub form: ObjectiveForm,
    /// Level of the log-ratio in the policy term: token or sequence.
    pub level: RatioLevel,
    /// Bounds that hold log-ratios, if any.
    pub bounds: LogRatioBounds,
    /// Whether old log-probabilities are an input; otherwise they are the policy's own.
    pub old_logp_given: bool,
    /// Transform of the logits before their softmax; `None` if there is none.
    pub transform: Option<Transform>,
    /// Quantity that the temperature divides.
    pub temperature: TemperaturePlace,
    /// KL penalty, or `None` if the loss has none.
    pub kl: Option<KlForm>,
    /// Denominator of the entropy bonus, if there is one; cotangents that are given are summed.
    pub entropy_bonus: Option<Denominator>,
    /// Whether the cotangent of each token's entropy is an input.
    pub dentropy: bool,
    /// Number of ids per token whose logp is asked for, at least 1.
    pub ids_per_token: usize,
    /// Denominator of the policy term.
    pub denominator: Denominator,
    /// Whether the policy term of each token has a factor that is an input.
    pub policy_weight: bool,
    /// Whether the KL estimate of each token has a factor that is an input.
    pub kl_weight: bool,
    /// Whether sequences that are too far from the policy that acted are left out.
    pub off_policy_mask: bool,
    /// Terms of a cross-entropy that read the whole row.
    pub row_terms: RowTerms,
}

/// The terms of a cross-entropy that read the whole row, each if it has a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTerms {
    /// Whether the target distribution is uniform in part, so that the mean of all logits is read.
    pub smoothing: bool,
    /// Whether the squared log-sum-exp is added.
    pub z_loss: bool,
}

impl RowTerms {
    /// Whether the cross-entropy has one of them.
    pub fn any(self) -> bool {
        self.smoothing || self.z_loss
    }
}

/// A spec with its structure, which is derived once and handed on.
#[derive(Clone, Copy, Debug)]
pub struct StructuredSpec<'s> {
    /// The spec, from which numbers are read.
    pub spec: &'s LossSpec,
    /// The structure that was derived from the spec.
    pub structure: Structure,
}

impl<'s> StructuredSpec<'s> {
    /// Derives the structure of `spec`.
    pub fn new(spec: &'s LossSpec) -> Self {
        Self { spec, structure: Structure::from_spec(spec) }
    }

    /// Returns the run-time numbers of a program for a batch of `[B,T]`, in the order in which it reads them.
    pub fn program_numbers(self, extents: [usize; 2]) -> Vec<(SpecNumber, f32)> {
        let numbers = self.structure.program_numbers().into_iter();
        numbers.map(|number| (number, number.value_in(self.spec, extents) as f32)).collect()
    }
}

/// The formula of the policy term. Clip-Cov is PPO-clip with a weight of 0 on the selected tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectiveForm {
    /// PPO-clip: the negative of the lesser of the two surrogates, `r·A` and `clip(r)·A`.
    PpoClip,
    /// CISPO: `−sg(clipped ratio) · A · ℓ`.
    Cispo,
    /// SAPO: `−(4/τ) · σ(τ(r − 1)) · A`.
    Sapo,
    /// VESPO: `−w · A · ℓ`, where the weight `w` is a gamma kernel of the sequence's ratio.
    Vespo,
    /// Policy gradient: `−A · ℓ`, without a ratio.
    PolicyGradient,
    /// Importance sampling: `−r · A`, without a clip.
    ImportanceSampling,
    /// Masked ratio: `−sg(r) · A · ℓ`, or `−r · A`, while the ratio is within its bounds, else 0.
    MaskedRatio {
        /// Whether the term is a score function.
        score: bool,
    },
    /// Trust region: `−r · A`, or its score function, while a divergence is within its bounds; and a squared log-ratio
    /// everywhere.
    TrustRegion {
        /// Divergence that the region bounds.
        divergence: Divergence,
        /// Whether both bounds hold, whatever the sign of the advantage.
        two_sided: bool,
        /// Whether the term is a score function, of a ratio with an upper bound.
        score: bool,
    },
    /// DRO: `−A · ℓ` and a squared log-ratio.
    Dro,
    /// KL-Cov: `−r · A`, and the absolute log-ratio of selected tokens.
    KlCov,
    /// TOPR: `−w₊ · A · ℓ` for a positive token, `−w₋ · min(r, high) · A · ℓ` for any other.
    Topr {
        /// Whether the batch says which tokens are positive; otherwise those with `A > 0` are.
        selected: bool,
    },
    /// ASPO: the inverse of the ratio multiplies a positive advantage, with bounds below and above.
    Aspo {
        /// Whether selected tokens have other bounds of the ratio.
        selected: bool,
    },
    /// Cross-entropy: `−(1 − ε) · ℓ`, besides the [terms of the row](RowTerms).
    CrossEntropy,
    /// No policy term at all.
    None,
}

/// The bounds of log-ratios that a spec has.
#[allow(clippy::struct_excessive_bools, reason = "each is of one bound")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRatioBounds {
    /// Whether `|x| ≤ clamp` holds for each token, or for `Σ x` of a product.
    pub clamp: bool,
    /// Whether GMPO's bound holds, which depends on the sign of the advantage.
    pub clip: bool,
    /// Whether the log-ratio of the token's level has an upper bound.
    pub cap: bool,
    /// Whether the gradient passes that bound as if there were none.
    pub straight_through: bool,
}

/// The structure of the KL penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KlForm {
    /// Estimator of the divergence: k1, k2, k3 or the absolute one.
    pub estimator: KlEstimator,
    /// Estimate whose derivative the penalty has.
    pub slope: KlSlope,
    /// Importance weight of the estimate, if any.
    pub importance: KlImportance,
    /// Whether the difference `ref_logp − logp` has a bound.
    pub difference_clamp: bool,
    /// Position of the estimate's bound; `None` if it has no bound.
    pub value_clamp: Option<ValueClamp>,
    /// Denominator of the penalty's own mean; `None` if it is that of the policy term.
    pub denominator: Option<Denominator>,
}

/// The estimate whose derivative the KL penalty has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlSlope {
    /// The estimate itself, with its bounds.
    Own,
    /// The k2 estimate without bounds, `d²/2`.
    K2,
    /// The k2 estimate, times the token's ratio below its bound.
    K2Weighted,
}

/// The position of the estimate's bound relative to the importance weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueClamp {
    /// The bound holds the estimate before the importance multiplies it.
    BeforeImportance,
    /// The bound holds the product of importance and estimate.
    AfterImportance,
}

/// The quantity that the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemperaturePlace {
    /// Nothing, because the temperature is 1.
    One,
    /// The logits before their softmax, by one number for all tokens.
    Logits,
    /// The log-probability; the softmax is that of the logits as they are.
    Logp,
    /// The logits before their softmax, by a temperature of each token.
    Given,
}

/// The factor of gaps below the maximum in a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapRate {
    /// One number that serves all tokens.
    OfAll(SpecNumber),
    /// A number of each token, [`TokenInput::Rate`].
    OfToken,
}

/// The denominator of a token's term: `(tokens + ε) · filled rows · a given number`. A factor that the spec does not
/// ask for is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denominator {
    /// Tokens that the denominator counts; `None` if it counts none.
    pub tokens: Option<DenominatorTokens>,
    /// Whether the denominator counts the sequences that have a token.
    pub filled_rows: bool,
    /// Whether an `ε` is added to the count of tokens.
    pub epsilon: bool,
}

/// The tokens that a denominator counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenominatorTokens {
    /// The unmasked tokens of the whole batch.
    OfBatch,
    /// The unmasked tokens of the same sequence.
    OfRow,
}

impl Denominator {
    /// The denominator of the mean over all tokens.
    pub const ALL_TOKENS: Self = Self { tokens: Some(DenominatorTokens::OfBatch), filled_rows: false, epsilon: false };

    /// The denominator of the plain sum, 1.
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
        // A factor of the policy term or of the penalty is an input if anything weighs or drops single tokens.
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
                straight_through: spec.ratio.straight_through,
            },
            old_logp_given: spec.old_logp != OldLogp::Current,
            // Logits before their softmax.
            transform: Transform::from_spec(spec),
            temperature: match (spec.temperature, spec.temperature_divides) {
                (Temperature::Given, _) => TemperaturePlace::Given,
                (Temperature::Number(1.0), _) => TemperaturePlace::One,
                (Temperature::Number(_), TemperatureDivides::Logits) => TemperaturePlace::Logits,
                (Temperature::Number(_), TemperatureDivides::Logp) => TemperaturePlace::Logp,
            },
            // The penalty, whose numbers and bounds are inputs.
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
            // Cotangents of entropies take the place of a bonus.
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
            row_terms: match &spec.objective {
                Objective::CrossEntropy(cross_entropy) => {
                    RowTerms { smoothing: cross_entropy.label_smoothing != 0.0, z_loss: cross_entropy.z_loss != 0.0 }
                }
                _ => RowTerms { smoothing: false, z_loss: false },
            },
        }
    }

    /// Whether the loss of a token depends on other tokens of its row.
    pub fn couples_rows(self) -> bool {
        self.level != RatioLevel::Token || self.form == ObjectiveForm::Vespo || self.off_policy_mask
    }

    /// Whether it is told which tokens are selected.
    pub fn selected(self) -> bool {
        match self.form {
            ObjectiveForm::KlCov => true,
            ObjectiveForm::Topr { selected } | ObjectiveForm::Aspo { selected } => selected,
            // Every form is named, so that a new one is asked.
            ObjectiveForm::PpoClip
            | ObjectiveForm::Cispo
            | ObjectiveForm::Sapo
            | ObjectiveForm::Vespo
            | ObjectiveForm::PolicyGradient
            | ObjectiveForm::ImportanceSampling
            | ObjectiveForm::MaskedRatio { .. }
            | ObjectiveForm::TrustRegion { .. }
            | ObjectiveForm::Dro
            | ObjectiveForm::CrossEntropy
            | ObjectiveForm::None => false,
        }
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

    /// The numbers that `token_loss` reads, in order.
    pub fn numbers(self) -> Vec<SpecNumber> {
        use SpecNumber as N;
        // The numbers of the objective, then those of options that the spec has.
        let of_form: &[SpecNumber] = match self.form {
            ObjectiveForm::PpoClip => &[N::Low, N::High, N::Delta, N::DualClip],
            ObjectiveForm::Cispo | ObjectiveForm::MaskedRatio { .. } => &[N::Low, N::High],
            ObjectiveForm::Sapo => &[N::TauPositive, N::TauNegative],
            ObjectiveForm::Vespo => &[N::KPositive, N::LambdaPositive, N::KNegative, N::LambdaNegative],
            ObjectiveForm::TrustRegion { score: false, .. } => &[N::Low, N::High, N::Penalty],
            ObjectiveForm::TrustRegion { score: true, .. } => &[N::Low, N::High, N::Penalty, N::Truncate],
            ObjectiveForm::Dro | ObjectiveForm::KlCov => &[N::Penalty],
            ObjectiveForm::CrossEntropy => &[N::TargetWeight],
            ObjectiveForm::Topr { .. } => &[N::PositiveWeight, N::NegativeWeight, N::High],
            ObjectiveForm::Aspo { selected: false } => &[N::Low, N::High, N::DualClipPositive, N::DualClip],
            ObjectiveForm::Aspo { selected: true } => {
                &[N::Low, N::High, N::LowOfSelected, N::HighOfSelected, N::DualClipPositive, N::DualClip]
            }
            ObjectiveForm::PolicyGradient | ObjectiveForm::ImportanceSampling | ObjectiveForm::None => &[],
        };
        // Each pair says whether the structure reads the number. The order matters: kernels take the numbers by their
        // place.
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
            (self.row_terms.smoothing, N::LabelSmoothing),
            (self.row_terms.z_loss, N::ZLoss),
        ];
        let of_form = of_form.iter().copied();
        of_form.chain(optional.into_iter().filter_map(|(read, number)| read.then_some(number))).collect()
    }

    /// The numbers that its softmaxes read, in order.
    pub fn softmax_numbers(self) -> Vec<SpecNumber> {
        // A temperature of each token is an array, not a number.
        let (one, changes) = (self.temperature != TemperaturePlace::Given, self.transform.is_some());
        let all = [
            (one, SpecNumber::InverseTemperature),
            (changes, SpecNumber::LogitFactor),
            (changes && one, SpecNumber::Rate),
            (changes && self.temperature == TemperaturePlace::Logp, SpecNumber::LogpRate),
        ];
        all.into_iter().filter_map(|(read, number)| read.then_some(number)).collect()
    }

    /// Returns the factors of gaps below the maximum, `None` for 1: of the softmax that entropy is of, and of that of
    /// logp if it is another. Derivatives by the softmax's arguments are multiplied by the first.
    pub fn gap_rates(self) -> Vec<Option<GapRate>> {
        // The transform's rate is a part of the factor.
        let [of_entropy, of_logp] = match self.transform {
            Some(_) => [Some(SpecNumber::Rate), Some(SpecNumber::LogpRate)],
            None => [Some(SpecNumber::InverseTemperature), None],
        };
        let [of_entropy, of_logp] = [of_entropy, of_logp].map(|number| number.map(GapRate::OfAll));
        // A second softmax is needed only where the temperature divides logp.
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
        // Numbers of the loss and of the softmaxes, then those of the reductions.
        let epsilon = |denominator: Option<Denominator>| denominator.is_some_and(|denominator| denominator.epsilon);
        let kl = self.kl.and_then(|kl| kl.denominator);
        // The mean over all tokens needs no number of its own.
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

    /// The `[B,T]` arrays that a program reads besides ids, mask and advantages, in order.
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
            Objective::MaskedRatio(masked) => ObjectiveForm::MaskedRatio { score: !masked.surrogate },
            Objective::TrustRegion(region) => ObjectiveForm::TrustRegion {
                divergence: region.divergence,
                two_sided: region.two_sided,
                score: region.truncate.is_some(),
            },
            Objective::Dro(_) => ObjectiveForm::Dro,
            Objective::KlCov(_) => ObjectiveForm::KlCov,
            Objective::Topr(topr) => ObjectiveForm::Topr { selected: topr.positive == PositiveTokens::Selected },
            Objective::Aspo(aspo) => ObjectiveForm::Aspo { selected: aspo.selected.is_some() },
            Objective::CrossEntropy(_) => ObjectiveForm::CrossEntropy,
            // No kernel computes a divergence: `KernelScope::expect` refuses it.
            Objective::Distillation(_) | Objective::None => ObjectiveForm::None,
        }
    }
}
