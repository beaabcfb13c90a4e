//! The check of a spec: ranges of numbers, and settings that exclude each other.

use super::{
    AdvantageLevel, Averaging, CrossEntropy, KeptSupport, Kl, KlGradient, KlImportance, LossSpec, Objective, OldLogp,
    OutOfBounds, PpoClip, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, Rows, SoftmaxRange, Temperature, TemperatureDivides, UnscoredWeight,
};
use crate::text::ShownNumber;

/// A field of a [`LossSpec`] that is out of range or contradicts another: its path, its value and the accepted values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("spec field `{field}`: got {given}, expected {expected}")]
pub struct SpecError {
    /// The path of the field, as a file spells it, such as `kl.beta`.
    pub field: &'static str,
    /// The value that the spec has there.
    pub given: String,
    /// The values that would be accepted, in words.
    pub expected: &'static str,
}

pub(super) type CheckResult = Result<(), SpecError>;

pub(super) fn ensure(ok: bool, field: &'static str, given: impl ToString, expected: &'static str) -> CheckResult {
    if ok { Ok(()) } else { Err(SpecError { field, given: given.to_string(), expected }) }
}

fn finite(field: &'static str, x: f64) -> CheckResult {
    ensure(x.is_finite(), field, ShownNumber(x), "a finite number")
}

fn positive(field: &'static str, x: f64) -> CheckResult {
    ensure(x > 0.0 && x.is_finite(), field, ShownNumber(x), "a finite number > 0")
}

fn non_negative(field: &'static str, x: f64) -> CheckResult {
    ensure(x >= 0.0 && x.is_finite(), field, ShownNumber(x), "a finite number ≥ 0")
}

fn positive_or_none(field: &'static str, x: Option<f64>) -> CheckResult {
    x.map_or(Ok(()), |x| positive(field, x))
}

fn above_one(field: &'static str, x: f64) -> CheckResult {
    ensure(x > 1.0 && x.is_finite(), field, ShownNumber(x), "a finite number > 1")
}

fn share(field: &'static str, x: f64) -> CheckResult {
    ensure(x > 0.0 && x <= 1.0, field, ShownNumber(x), "a fraction: above 0, at most 1")
}

fn interval(field: &'static str, low: f64, high: f64) -> CheckResult {
    ensure(
        low < high,
        field,
        format!("{} to {}", ShownNumber(low), ShownNumber(high)),
        "the lower end below the upper one",
    )
}

impl LossSpec {
    /// Checks the range of every number, and that no two settings contradict each other.
    ///
    /// # Errors
    /// [`SpecError`] naming the first field that is wrong.
    ///
    /// ```
    /// # use assay_core as assay;
    /// use assay::spec::{Kl, KlEstimator, LossSpec};
    ///
    /// let spec = LossSpec { kl: Some(Kl::plain(-0.5, KlEstimator::K3)), ..LossSpec::default() };
    /// let error = spec.check().unwrap_err();
    /// assert_eq!(error.to_string(), "spec field `kl.beta`: got -0.5, expected a finite number ≥ 0");
    /// ```
    pub fn check(&self) -> CheckResult {
        // Temperatures that come with the batch are checked with it.
        match self.temperature {
            Temperature::Number(temperature) => positive("temperature", temperature)?,
            Temperature::Given => {
                let divides = self.temperature_divides;
                let expected = "logits with `temperature: given`: dividing logp needs one temperature for all tokens";
                ensure(divides == TemperatureDivides::Logits, "temperature_divides", "logp", expected)?;
            }
        }
        self.check_objective()?;
        self.ratio.check()?;
        // The transform and the support of the softmax.
        let Self { logits, support, .. } = self;
        let scales = logits.scale != 0.0 && logits.scale.is_finite();
        ensure(scales, "logits.scale", ShownNumber(logits.scale), "a finite number other than 0")?;
        positive_or_none("logits.softcap", logits.softcap)?;
        ensure(support.vocab != Some(0), "support.vocab", 0, "an integer ≥ 1")?;
        self.check_kept()?;
        // Corrections for the sampler, and masks.
        if let Some(rollout) = &self.rollout {
            rollout.check()?;
        }
        for rejection in &self.rejection {
            finite("rejection.max", rejection.max)?;
            interval("rejection.min", rejection.min.unwrap_or(f64::NEG_INFINITY), rejection.max)?;
            rejection.check_level()?;
        }
        if let Some(mask) = &self.off_policy_mask {
            finite("off_policy_mask.threshold", mask.threshold)?;
            let behaviour = mask.behaviour;
            ensure(behaviour != OldLogp::Current, "off_policy_mask.behaviour", "current", "given or rollout")?;
        }
        if let Some(top) = &self.top_entropy {
            share("top_entropy.fraction", top.fraction)?;
        }
        // The KL penalty and the entropy bonus.
        if let Some(kl) = &self.kl {
            kl.check()?;
        }
        finite("entropy_coef", self.entropy_coef)?;
        if let Some(averaging) = &self.entropy_averaging {
            averaging.check()?;
        }
        // A given cotangent replaces the entropy bonus.
        let bonus = self.entropy_coef != 0.0 || self.entropy_averaging.is_some();
        let expected = "false with an `entropy_coef` or an `entropy_averaging`, which it replaces";
        ensure(!(self.dentropy && bonus), "dentropy", true, expected)?;
        ensure(self.ids_per_token != 0, "ids_per_token", 0, "an integer ≥ 1")?;
        let expected = "1, unless the spec computes only logp, by its cotangents";
        ensure(self.ids_per_token == 1 || self.is_from_cotangents(), "ids_per_token", self.ids_per_token, expected)?;
        // Several ids exist only for logp from cotangents, and with one fixed support for all of them.
        let puts_back = self.ids_per_token > 1 && support.keep_sampled && !support.is_whole();
        ensure(
            !puts_back,
            "support.keep_sampled",
            true,
            "false with `ids_per_token` above 1: no id is the one that is put back",
        )?;
        self.averaging().check()?;
        positive("scale", self.scale)
    }

    /// Checks that what is taken over the whole vocabulary, next to a log-probability over kept sets, is computed.
    fn check_kept(&self) -> CheckResult {
        let Some(KeptSupport { entropy, kl }) = self.support.kept else { return Ok(()) };
        let vocabulary = "vocabulary";
        // A second softmax of another set and a second one of another divisor would be three.
        let one_divisor =
            self.temperature_divides == TemperatureDivides::Logits || self.temperature == Temperature::ONE;
        let expected = "set with `temperature_divides: logp`";
        ensure(entropy == SoftmaxRange::Set || one_divisor, "support.kept.entropy", vocabulary, expected)?;
        ensure(kl == SoftmaxRange::Set || one_divisor, "support.kept.kl", vocabulary, expected)?;
        // This weight is of the ratio, whose log-probability is of the set, and is differentiated with the penalty.
        let by_token_ratio = self.kl.as_ref().is_some_and(|kl| kl.importance == KlImportance::TokenRatio);
        let expected = "set with `kl.importance: token_ratio`";
        ensure(kl == SoftmaxRange::Set || !by_token_ratio, "support.kept.kl", vocabulary, expected)
    }

    fn check_objective(&self) -> CheckResult {
        match &self.objective {
            Objective::PpoClip(clip) => clip.check(),
            Objective::Cispo(cispo) => {
                positive("objective.cispo.upper", cispo.upper)?;
                interval("objective.cispo.lower", cispo.lower.unwrap_or(f64::NEG_INFINITY), cispo.upper)
            }
            Objective::Sapo(sapo) => {
                positive("objective.sapo.tau_positive", sapo.tau_positive)?;
                positive("objective.sapo.tau_negative", sapo.tau_negative)
            }
            Objective::Vespo(vespo) => {
                finite("objective.vespo.k_positive", vespo.k_positive)?;
                finite("objective.vespo.lambda_positive", vespo.lambda_positive)?;
                finite("objective.vespo.k_negative", vespo.k_negative)?;
                finite("objective.vespo.lambda_negative", vespo.lambda_negative)
            }
            Objective::PolicyGradient | Objective::None => Ok(()),
            Objective::ImportanceSampling(sampling) => {
                // A sequence without tokens has a loss only if advantage, ratio and mean are of sequences.
                let fits = self.ratio.level == RatioLevel::Sequence
                    && self.advantages == AdvantageLevel::Sequence
                    && self.reduction == Reduction::SequenceMean { rows: Rows::All };
                let expected = "false unless `ratio.level` is sequence, `advantages` sequence and `reduction` a \
                                sequence_mean over all rows";
                ensure(!sampling.empty_rows || fits, "objective.importance_sampling.empty_rows", true, expected)
            }
            Objective::MaskedRatio(masked) => interval("objective.masked_ratio.lower", masked.lower, masked.upper),
            Objective::TrustRegion(region) => {
                non_negative("objective.trust_region.low", region.low)?;
                non_negative("objective.trust_region.high", region.high)?;
                positive_or_none("objective.trust_region.truncate", region.truncate)?;
                non_negative("objective.trust_region.penalty", region.penalty)
            }
            Objective::Topr(topr) => {
                non_negative("objective.topr.positive_weight", topr.positive_weight)?;
                non_negative("objective.topr.negative_weight", topr.negative_weight)?;
                positive("objective.topr.upper", topr.upper)
            }
            Objective::Aspo(aspo) => {
                non_negative("objective.aspo.epsilon_low", aspo.epsilon_low)?;
                non_negative("objective.aspo.epsilon_high", aspo.epsilon_high)?;
                if let Some(selected) = aspo.selected {
                    non_negative("objective.aspo.selected.epsilon_low", selected.epsilon_low)?;
                    non_negative("objective.aspo.selected.epsilon_high", selected.epsilon_high)?;
                }
                above_one("objective.aspo.dual_clip_positive", aspo.dual_clip_positive)?;
                above_one("objective.aspo.dual_clip_negative", aspo.dual_clip_negative)
            }
            Objective::Distillation(distillation) => distillation.check(self),
            Objective::Dro(dro) => positive("objective.dro.beta", dro.beta),
            Objective::CrossEntropy(cross_entropy) => self.check_cross_entropy(cross_entropy),
            Objective::KlCov(cov) => {
                non_negative("objective.kl_cov.coefficient", cov.coefficient)?;
                cov.selection.map_or(Ok(()), |top| share("objective.kl_cov.selection.fraction", top.fraction))
            }
            Objective::ClipCov(cov) => {
                cov.clip.check()?;
                // The objective without a selection of its own reads the array `selected`, which the problem must have.
                let Some(band) = cov.selection else { return Ok(()) };
                positive("objective.clip_cov.selection.fraction", band.fraction)?;
                interval("objective.clip_cov.selection.lower", band.lower, band.upper)
            }
        }
    }
}

impl LossSpec {
    /// Checks the numbers of a cross-entropy, and that the spec has nothing of a policy loss besides.
    fn check_cross_entropy(&self, cross_entropy: &CrossEntropy) -> CheckResult {
        let &CrossEntropy { label_smoothing, z_loss } = cross_entropy;
        let field = "objective.cross_entropy.label_smoothing";
        ensure((0.0..=1.0).contains(&label_smoothing), field, ShownNumber(label_smoothing), "a share: from 0 to 1")?;
        non_negative("objective.cross_entropy.z_loss", z_loss)?;
        // The terms of the row are of the whole vocabulary and of one softmax.
        let reads_row = cross_entropy.reads_row();
        let expected = "the whole vocabulary with a `label_smoothing` or `z_loss`";
        ensure(!reads_row || self.support.is_whole(), "support", "a part of the vocabulary", expected)?;
        let divides_logits = self.temperature_divides == TemperatureDivides::Logits;
        let expected = "logits with a `label_smoothing` or `z_loss`";
        ensure(!reads_row || divides_logits, "temperature_divides", "logp", expected)?;
        let absent = |has: bool, field| ensure(!has, field, "one", "none with `objective: cross_entropy`");
        absent(self.ratio != Ratio::default(), "ratio")?;
        absent(self.rollout.is_some(), "rollout")?;
        absent(!self.rejection.is_empty(), "rejection")?;
        absent(self.off_policy_mask.is_some(), "off_policy_mask")?;
        absent(self.top_entropy.is_some(), "top_entropy")?;
        absent(self.kl.is_some(), "kl")?;
        let given = if self.old_logp == OldLogp::Rollout { "rollout" } else { "given" };
        let expected = "current with `objective: cross_entropy`, which has no ratio";
        ensure(self.old_logp == OldLogp::Current, "old_logp", given, expected)
    }
}

impl PpoClip {
    fn check(&self) -> CheckResult {
        non_negative("objective.ppo_clip.epsilon_low", self.epsilon_low)?;
        non_negative("objective.ppo_clip.epsilon_high", self.epsilon_high)?;
        positive_or_none("objective.ppo_clip.delta", self.delta)?;
        self.dual_clip.map_or(Ok(()), |c| above_one("objective.ppo_clip.dual_clip", c))
    }
}

impl Ratio {
    fn check(&self) -> CheckResult {
        positive_or_none("ratio.clamp", self.clamp)?;
        if let Some(clip) = self.clip {
            non_negative("ratio.clip.low", clip.low)?;
            non_negative("ratio.clip.high", clip.high)?;
        }
        self.cap.map_or(Ok(()), |cap| finite("ratio.cap", cap))?;
        let capped = self.cap.is_some() || !self.straight_through;
        ensure(capped, "ratio.straight_through", true, "false without a `cap`")?;
        non_negative("ratio.denominator_epsilon", self.denominator_epsilon)?;
        // A product has no count to which an epsilon could be added.
        let counted = self.level != RatioLevel::SequenceProduct || self.denominator_epsilon == 0.0;
        let expected = "0 with `level: sequence_product`, which divides by nothing";
        ensure(counted, "ratio.denominator_epsilon", ShownNumber(self.denominator_epsilon), expected)
    }
}

impl RolloutWeights {
    fn check(&self) -> CheckResult {
        self.min.map_or(Ok(()), |min| non_negative("rollout.min", min))?;
        positive_or_none("rollout.max", self.max)?;
        positive_or_none("rollout.clamp", self.clamp)?;
        // Given weights are used unchanged: sums, bounds, clamps and unscored tokens are of computed ones.
        let given = self.source == RolloutSource::Given;
        let taken_as_is = matches!(self.level, RolloutLevel::Token | RolloutLevel::Geometric);
        ensure(!given || taken_as_is, "rollout.level", "a sum of given weights", "token or geometric")?;
        let changed = self.min.or(self.max).or(self.clamp);
        let as_scored = self.unscored == UnscoredWeight::One;
        let kept = !given || (changed.is_none() && self.outside == OutOfBounds::Truncate && as_scored);
        ensure(kept, "rollout.source", "bounds, a clamp or `unscored` of given weights", "none, or `source: logp`")?;
        interval("rollout.min", self.min.unwrap_or(0.0), self.max.unwrap_or(f64::INFINITY))
    }
}

impl Rejection {
    fn check_level(&self) -> CheckResult {
        // The second moment of the batch has one estimator, no lower bound, and rejects as if masked.
        if self.level != RejectionLevel::SecondMoment {
            return Ok(());
        }
        let of_squares = self.estimator == RejectionEstimator::K2;
        ensure(of_squares, "rejection.estimator", "another than k2", "k2 with `level: second_moment`, which is of y²")?;
        ensure(
            self.min.is_none(),
            "rejection.min",
            ShownNumber(self.min.unwrap_or(0.0)),
            "none with `level: second_moment`",
        )?;
        ensure(!self.counts, "rejection.counts", true, "false with `level: second_moment`")
    }
}

impl Kl {
    fn check(&self) -> CheckResult {
        non_negative("kl.beta", self.beta)?;
        if let KlGradient::K2Weighted(bound) = self.gradient {
            positive("kl.gradient.k2_weighted", bound)?;
        }
        positive_or_none("kl.difference_clamp", self.difference_clamp)?;
        positive_or_none("kl.value_clamp", self.value_clamp)?;
        self.averaging.map_or(Ok(()), |averaging| averaging.check())
    }
}

impl Averaging {
    fn check(&self) -> CheckResult {
        non_negative("denominator_epsilon", self.denominator_epsilon)?;
        // Only counts that are given can be out of range.
        let rows = |rows| match rows {
            Rows::All | Rows::NonEmpty => Ok(()),
            Rows::Given(count) => positive("reduction.rows.given", count),
        };
        match self.reduction {
            Reduction::TokenMean => Ok(()),
            Reduction::SequenceMean { rows: count } | Reduction::SequenceSum { rows: count } => rows(count),
            Reduction::FixedLength { rows: count, length } => {
                rows(count)?;
                ensure(length != Some(0), "reduction.fixed_length.length", 0, "an integer ≥ 1")
            }
            Reduction::Normalizer(value) => positive("reduction.normalizer", value),
        }
    }
}
