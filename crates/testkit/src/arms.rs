//! The choices that specs make, of all there are. Structs are taken apart field by field and enums arm by arm: what is added
//! to [`LossSpec`] does not compile until it is named here, and then fails the coverage test until something draws it.

use std::collections::BTreeSet;

use assay_core::problem::Dtype;
use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, Cispo, ClipCov, ClipWidths, CovarianceBand, CrossEntropy, Distillation,
    DistillationKind, Divergence, Dro, DroppedTerm, ImportanceSampling, KeptSupport, Kl, KlCov, KlEstimator,
    KlGradient, KlImportance, LogClip, LogitsTransform, LossSpec, LossTerms, MaskedRatio, Objective, OffPolicyMask,
    OldLogp, OutOfBounds, PositiveTokens, PpoClip, QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection,
    RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo, SoftmaxRange, Support,
    Temperature, TemperatureDivides, TokenWeights, TopCovariance, TopEntropy, TopKRest, Topr, TrustRegion,
    UnscoredWeight, Vespo,
};
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::generate::Recipe;

/// `field: choice` of all choices met, and of those made.
#[derive(Debug, Default)]
pub struct Arms {
    all: BTreeSet<String>,
    made: BTreeSet<String>,
}

/// Notes every arm of an enum as a choice of `$field`, and the one that `$value` is as made.
macro_rules! choose {
    ($arms:ident, $field:expr, $value:expr, { $($pattern:pat => $name:literal $($then:block)?),+ $(,)? }) => {{
        $($arms.all.insert(format!("{}: {}", $field, $name));)+
        let made = match $value { $($pattern => { $($then)? $name }),+ };
        $arms.made.insert(format!("{}: {made}", $field));
    }};
}

impl Arms {
    /// The choices that nobody made.
    pub fn missing(&self) -> Vec<&String> {
        self.all.difference(&self.made).collect()
    }

    /// The choices that `others` made and nobody here did.
    pub fn missing_of<'a>(&'a self, others: &'a Self) -> Vec<&'a String> {
        others.made.difference(&self.made).collect()
    }

    /// Collects the choices of all `specs`.
    pub fn from_specs<'a>(specs: impl IntoIterator<Item = &'a LossSpec>) -> Self {
        let mut arms = Self::default();
        for spec in specs {
            arms.spec(spec);
        }
        arms
    }

    fn flag(&mut self, field: &str, set: bool) {
        choose!(self, field, set, { true => "yes", false => "no" });
    }

    fn option<T>(&mut self, field: &str, given: Option<&T>) {
        choose!(self, field, given, { Some(_) => "given", None => "none" });
    }

    /// A number that changes nothing where it is `neutral`.
    fn number(&mut self, field: &str, x: f64, neutral: f64) {
        choose!(self, field, x == neutral, { true => "neutral", false => "another" });
    }

    fn range(&mut self, field: &str, range: SoftmaxRange) {
        choose!(self, field, range, {
            SoftmaxRange::Set => "set",
            SoftmaxRange::Vocabulary => "vocabulary",
        });
    }

    /// Records the choices that `spec` makes.
    pub fn spec(&mut self, spec: &LossSpec) {
        let LossSpec {
            objective,
            ratio,
            advantages,
            old_logp,
            logits: LogitsTransform { scale: logits_scale, softcap, bias },
            support: Support { vocab, excluded_ids, keep_sampled, kept },
            temperature,
            temperature_divides,
            rollout,
            rejection,
            token_weights,
            off_policy_mask,
            top_entropy,
            kl,
            entropy_coef,
            entropy_averaging,
            dentropy,
            ids_per_token,
            reduction,
            denominator_epsilon,
            scale,
        } = spec;
        self.objective(objective);
        self.ratio(ratio);
        choose!(self, "advantages", advantages, {
            AdvantageLevel::Sequence => "sequence",
            AdvantageLevel::Token => "token",
        });
        choose!(self, "old_logp", old_logp, {
            OldLogp::Given => "given",
            OldLogp::Current => "current",
            OldLogp::Rollout => "rollout",
        });
        self.number("logits.scale", *logits_scale, 1.0);
        self.option("logits.softcap", softcap.as_ref());
        self.flag("logits.bias", *bias);
        self.option("support.vocab", vocab.as_ref());
        self.flag("support.excluded_ids", !excluded_ids.is_empty());
        self.flag("support.keep_sampled", *keep_sampled);
        self.option("support.kept", kept.as_ref());
        if let Some(KeptSupport { entropy, kl }) = kept {
            self.range("support.kept.entropy", *entropy);
            self.range("support.kept.kl", *kl);
        }
        choose!(self, "temperature", temperature, {
            Temperature::Number(1.0) => "neutral",
            Temperature::Number(_) => "another",
            Temperature::Given => "given",
        });
        choose!(self, "temperature_divides", temperature_divides, {
            TemperatureDivides::Logits => "logits",
            TemperatureDivides::Logp => "logp",
        });
        self.option("rollout", rollout.as_ref());
        if let Some(rollout) = rollout {
            self.rollout(rollout);
        }
        self.flag("rejection", !rejection.is_empty());
        for rejection in rejection {
            self.rejection(rejection);
        }
        self.option("token_weights", token_weights.as_ref());
        if let Some(TokenWeights { applies_to }) = token_weights {
            self.terms("token_weights.applies_to", *applies_to);
        }
        self.option("off_policy_mask", off_policy_mask.as_ref());
        if let Some(OffPolicyMask { threshold: _, behaviour }) = off_policy_mask {
            choose!(self, "off_policy_mask.behaviour", *behaviour == OldLogp::Rollout, {
                true => "rollout",
                false => "given",
            });
        }
        self.option("top_entropy", top_entropy.as_ref());
        if let Some(top) = top_entropy {
            self.top_entropy(top);
        }
        self.option("kl", kl.as_ref());
        if let Some(kl) = kl {
            self.kl(kl);
        }
        self.number("entropy_coef", *entropy_coef, 0.0);
        self.option("entropy_averaging", entropy_averaging.as_ref());
        self.flag("dentropy", *dentropy);
        self.flag("ids_per_token", *ids_per_token > 1);
        let own = Averaging { reduction: *reduction, denominator_epsilon: *denominator_epsilon };
        for averaging in [Some(own), *entropy_averaging].iter().flatten() {
            self.averaging(averaging);
        }
        self.number("scale", *scale, 1.0);
    }

    fn objective(&mut self, objective: &Objective) {
        choose!(self, "objective", objective, {
            Objective::PpoClip(clip) => "ppo_clip" { self.clip(clip) },
            Objective::Cispo(Cispo { lower, upper: _ }) => "cispo" { self.option("cispo.lower", lower.as_ref()) },
            Objective::Sapo(Sapo { tau_positive: _, tau_negative: _ }) => "sapo",
            Objective::Vespo(vespo) => "vespo" { self.vespo(vespo) },
            Objective::PolicyGradient => "policy_gradient",
            Objective::ImportanceSampling(ImportanceSampling { empty_rows }) => "importance_sampling" {
                self.flag("importance_sampling.empty_rows", *empty_rows);
            },
            Objective::MaskedRatio(MaskedRatio { lower: _, upper: _, surrogate }) => "masked_ratio" {
                self.flag("masked_ratio.surrogate", *surrogate);
            },
            Objective::TrustRegion(region) => "trust_region" { self.trust_region(region) },
            Objective::Dro(Dro { beta: _ }) => "dro",
            Objective::KlCov(KlCov { coefficient: _, selection }) => "kl_cov" {
                self.option("kl_cov.selection", selection.as_ref());
                if let Some(TopCovariance { fraction: _ }) = selection {}
            },
            Objective::ClipCov(ClipCov { clip, selection }) => "clip_cov" {
                self.clip(clip);
                self.option("clip_cov.selection", selection.as_ref());
                if let Some(CovarianceBand { fraction: _, lower: _, upper: _ }) = selection {}
            },
            Objective::Topr(Topr { positive_weight: _, negative_weight: _, upper: _, positive }) => "topr" {
                choose!(self, "topr.positive", positive, {
                    PositiveTokens::Advantage => "advantage",
                    PositiveTokens::Selected => "selected",
                });
            },
            Objective::Aspo(Aspo { epsilon_low: _, epsilon_high: _, selected, dual_clip_positive: _, dual_clip_negative: _ }) => "aspo" {
                self.option("aspo.selected", selected.as_ref());
                if let Some(ClipWidths { epsilon_low: _, epsilon_high: _ }) = selected {}
            },
            Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }) => "cross_entropy" {
                self.number("cross_entropy.label_smoothing", *label_smoothing, 0.0);
                self.number("cross_entropy.z_loss", *z_loss, 0.0);
            },
            Objective::Distillation(Distillation { kind, beta, top_k, rest, temperature_squared }) => "distillation" {
                choose!(self, "distillation.kind", kind, {
                    DistillationKind::ForwardKl => "forward_kl",
                    DistillationKind::ReverseKl => "reverse_kl",
                    DistillationKind::JensenShannon => "jensen_shannon",
                });
                self.option("distillation.beta", beta.as_ref());
                self.option("distillation.top_k", top_k.as_ref());
                choose!(self, "distillation.rest", rest, {
                    None => "none",
                    Some(TopKRest::Tail) => "tail",
                    Some(TopKRest::Renormalized) => "renormalized",
                    Some(TopKRest::Ignored) => "ignored",
                });
                self.flag("distillation.temperature_squared", *temperature_squared);
            },
            Objective::None => "none",
        });
    }

    fn clip(&mut self, clip: &PpoClip) {
        let PpoClip { epsilon_low: _, epsilon_high: _, delta, dual_clip } = clip;
        self.option("clip.delta", delta.as_ref());
        self.option("clip.dual_clip", dual_clip.as_ref());
    }

    fn vespo(&mut self, vespo: &Vespo) {
        let Vespo { k_positive: _, lambda_positive: _, k_negative: _, lambda_negative: _, weights_of_masked_tokens } =
            vespo;
        self.flag("vespo.weights_of_masked_tokens", *weights_of_masked_tokens);
    }

    fn trust_region(&mut self, region: &TrustRegion) {
        let TrustRegion { divergence, low: _, high: _, two_sided, truncate, penalty } = region;
        choose!(self, "trust_region.divergence", divergence, {
            Divergence::TotalVariation => "total_variation",
            Divergence::BinaryKl => "binary_kl",
        });
        self.flag("trust_region.two_sided", *two_sided);
        self.option("trust_region.truncate", truncate.as_ref());
        self.number("trust_region.penalty", *penalty, 0.0);
    }

    fn ratio(&mut self, ratio: &Ratio) {
        let Ratio { level, clamp, clip, cap, straight_through, denominator_epsilon } = ratio;
        choose!(self, "ratio.level", level, {
            RatioLevel::Token => "token",
            RatioLevel::Sequence => "sequence",
            RatioLevel::SequenceToken => "sequence_token",
            RatioLevel::SequenceProduct => "sequence_product",
        });
        self.option("ratio.clamp", clamp.as_ref());
        self.option("ratio.clip", clip.as_ref());
        if let Some(LogClip { low: _, high: _ }) = clip {}
        self.option("ratio.cap", cap.as_ref());
        self.flag("ratio.straight_through", *straight_through);
        self.number("ratio.denominator_epsilon", *denominator_epsilon, 0.0);
    }

    fn rollout(&mut self, rollout: &RolloutWeights) {
        let RolloutWeights { source, level, outside, min, max, clamp, normalize, unscored, applies_to } = rollout;
        choose!(self, "rollout.source", source, {
            RolloutSource::Given => "given",
            RolloutSource::Logp => "logp",
        });
        choose!(self, "rollout.level", level, {
            RolloutLevel::Token => "token",
            RolloutLevel::Sequence => "sequence",
            RolloutLevel::Geometric => "geometric",
            RolloutLevel::TokenGatedByGeometric => "token_gated_by_geometric",
        });
        choose!(self, "rollout.outside", outside, {
            OutOfBounds::Truncate => "truncate",
            OutOfBounds::Mask => "mask",
        });
        self.option("rollout.min", min.as_ref());
        self.option("rollout.max", max.as_ref());
        self.option("rollout.clamp", clamp.as_ref());
        self.flag("rollout.normalize", *normalize);
        choose!(self, "rollout.unscored", unscored, {
            UnscoredWeight::One => "one",
            UnscoredWeight::Zero => "zero",
        });
        self.terms("rollout.applies_to", *applies_to);
    }

    fn terms(&mut self, field: &str, terms: LossTerms) {
        choose!(self, field, terms, {
            LossTerms::Policy => "policy",
            LossTerms::PolicyAndKl => "policy_and_kl",
        });
    }

    fn rejection(&mut self, rejection: &Rejection) {
        let Rejection { estimator, level, min, max: _, counts, drops_from } = rejection;
        choose!(self, "rejection.estimator", estimator, {
            RejectionEstimator::K1 => "k1",
            RejectionEstimator::K2 => "k2",
            RejectionEstimator::K3 => "k3",
            RejectionEstimator::BinaryKl => "binary_kl",
            RejectionEstimator::TotalVariation => "total_variation",
            RejectionEstimator::Probability => "probability",
            RejectionEstimator::AbsoluteRatio => "absolute_ratio",
        });
        choose!(self, "rejection.level", level, {
            RejectionLevel::Token => "token",
            RejectionLevel::SequenceSum => "sequence_sum",
            RejectionLevel::SequenceMean => "sequence_mean",
            RejectionLevel::SequenceMax => "sequence_max",
            RejectionLevel::SequenceMin => "sequence_min",
            RejectionLevel::SecondMoment => "second_moment",
        });
        self.option("rejection.min", min.as_ref());
        self.flag("rejection.counts", *counts);
        self.terms("rejection.drops_from", *drops_from);
    }

    fn top_entropy(&mut self, top: &TopEntropy) {
        let TopEntropy { fraction: _, drops, precision } = top;
        choose!(self, "top_entropy.drops", drops, {
            DroppedTerm::PolicyTerm => "policy_term",
            DroppedTerm::Ratio => "ratio",
        });
        choose!(self, "top_entropy.precision", precision, {
            QuantilePrecision::Exact => "exact",
            QuantilePrecision::F32Threshold => "f32_threshold",
            QuantilePrecision::F32 => "f32",
        });
    }

    fn kl(&mut self, kl: &Kl) {
        let Kl {
            beta: _,
            estimator,
            gradient,
            importance,
            difference_clamp,
            value_clamp,
            clamp_after_importance,
            averaging,
        } = kl;
        choose!(self, "kl.estimator", estimator, {
            KlEstimator::K1 => "k1",
            KlEstimator::K2 => "k2",
            KlEstimator::K3 => "k3",
            KlEstimator::Abs => "abs",
        });
        choose!(self, "kl.gradient", gradient, {
            KlGradient::Own => "own",
            KlGradient::K2 => "k2",
            KlGradient::K2Weighted(_) => "k2_weighted",
        });
        choose!(self, "kl.importance", importance, {
            KlImportance::One => "one",
            KlImportance::Ratio => "ratio",
            KlImportance::TokenRatio => "token_ratio",
            KlImportance::Rollout => "rollout",
            KlImportance::Score => "score",
        });
        self.option("kl.difference_clamp", difference_clamp.as_ref());
        self.option("kl.value_clamp", value_clamp.as_ref());
        self.flag("kl.clamp_after_importance", *clamp_after_importance);
        self.option("kl.averaging", averaging.as_ref());
        if let Some(averaging) = averaging {
            self.averaging(averaging);
        }
    }

    fn averaging(&mut self, averaging: &Averaging) {
        let Averaging { reduction, denominator_epsilon } = averaging;
        choose!(self, "reduction", reduction, {
            Reduction::TokenMean => "token_mean",
            Reduction::SequenceMean { rows } => "sequence_mean" { self.rows(rows) },
            Reduction::SequenceSum { rows } => "sequence_sum" { self.rows(rows) },
            Reduction::FixedLength { rows, length } => "fixed_length" {
                self.rows(rows);
                self.option("reduction.length", length.as_ref());
            },
            Reduction::Normalizer(_) => "normalizer",
        });
        self.number("denominator_epsilon", *denominator_epsilon, 0.0);
    }

    fn rows(&mut self, rows: &Rows) {
        choose!(self, "reduction.rows", rows, {
            Rows::All => "all",
            Rows::NonEmpty => "non_empty",
            Rows::Given(_) => "given",
        });
    }

    /// Records the choices of a problem's recipe.
    pub fn recipe(&mut self, recipe: &Recipe) {
        use assay_judge::generate::Regime;

        let Recipe { shape: _, dtype, regime, seed: _, old_logp_noise_scale, masked_garbage } = recipe;
        choose!(self, "dtype", dtype, {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        });
        choose!(self, "regime", regime, {
            Regime::Small => "small",
            Regime::Normal => "normal",
            Regime::Peaked => "peaked",
            Regime::ShiftedUp => "shifted_up",
            Regime::ShiftedDown => "shifted_down",
            Regime::Negative => "negative",
            Regime::Confident => "confident",
            Regime::Holes => "holes",
            Regime::TargetHoles => "target_holes",
            Regime::Ties => "ties",
            Regime::Sampled => "sampled",
            Regime::LongTail => "long_tail",
            Regime::FarColumn => "far_column",
        });
        self.number("old_logp_noise_scale", *old_logp_noise_scale, 0.0);
        self.flag("masked_garbage", *masked_garbage);
    }

    /// Records the output and the comparison of a gate.
    pub fn gate(&mut self, gate: Gate) {
        let Gate { output, model, edge: _ } = gate;
        choose!(self, "output", output, {
            Output::Loss => "loss",
            Output::Logp => "logp",
            Output::Entropy => "entropy",
            Output::TokenLoss => "token_loss",
            Output::Dlogits => "dlogits",
            Output::Dhidden => "dhidden",
            Output::DlmHead => "dlm_head",
            Output::EntropyMean => "entropy_mean",
            Output::KlMean => "kl_mean",
            Output::RatioMean => "ratio_mean",
            Output::ClipLow => "clip_low",
            Output::ClipHigh => "clip_high",
            Output::ClipRegion => "clip_region",
            Output::Recorded => "recorded",
        });
        choose!(self, "model", model, {
            Model::Elementwise => "elementwise",
            Model::RowL2 => "row_l2",
            Model::RowSum => "row_sum",
            Model::Count => "count",
        });
    }
}
