//! The divergence of a student's distribution from a teacher's over one vocabulary, as a member of the loss family.
//!
//! With `p = softmax(logits / T)` the student's probabilities, `q` the teacher's, and `m = beta·q + (1 − beta)·p`:
//!
//! ```text
//! forward_kl       KL(q‖p) = Σ_j q_j (ln q_j − ln p_j)
//! reverse_kl       KL(p‖q) = Σ_j p_j (ln p_j − ln q_j)
//! jensen_shannon   beta·KL(q‖m) + (1 − beta)·KL(p‖m)
//! ```
//!
//! ```
//! # use assay_core as assay;
//! use assay::spec::{Distillation, DistillationKind, LossSpec, Objective};
//!
//! let spec: LossSpec = serde_json::from_str(
//!     r#"{"objective": {"distillation": {"kind": "jensen_shannon", "beta": 0.1}}, "old_logp": "current"}"#,
//! )?;
//! assert_eq!(spec, LossSpec::distillation(Distillation::jensen_shannon(0.1)));
//! assert!(spec.check().is_ok() && spec.reads_teacher());
//!
//! let error = LossSpec::distillation(Distillation::jensen_shannon(1.5)).check().unwrap_err();
//! assert_eq!(error.to_string(), "spec field `objective.distillation.beta`: got 1.5, expected a number from 0 to 1");
//! # Ok::<(), serde_json::Error>(())
//! ```

use serde::{Deserialize, Serialize};

use super::check::{CheckResult, ensure};
use super::describe::number;
use super::{LogitsTransform, LossSpec, Objective, OldLogp, Ratio, TemperatureDivides};
use crate::text::ShownNumber;

/// The divergence of [`Objective::Distillation`], and its numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Distillation {
    /// The divergence, and its direction.
    pub kind: DistillationKind,
    /// The weight `beta` of the teacher in the mixture of [`DistillationKind::JensenShannon`], from 0 to 1; `None` is 0.5. The other kinds
    /// have no mixture and no `beta`.
    ///
    /// At 0 the divergence is the forward KL, and at 1 the reverse one, as in TRL and Liger. The formula itself is 0 there, and
    /// divided by `beta`, or by `1 − beta`, it has these limits.
    pub beta: Option<f64>,
    /// The number `K ≥ 1` of the teacher's likeliest entries that the problem has of each token, or fewer if its vocabulary is smaller;
    /// `None` if it has the teacher's logits.
    pub top_k: Option<usize>,
    /// The place of the probability outside these entries; set if and only if `top_k` is.
    pub rest: Option<TopKRest>,
    /// Whether the divergence is multiplied by `T²`, as Hinton, Vinyals and Dean (2015) do.
    pub temperature_squared: bool,
}

impl Default for Distillation {
    /// Returns the forward KL to a teacher's logits.
    fn default() -> Self {
        Self { kind: DistillationKind::ForwardKl, beta: None, top_k: None, rest: None, temperature_squared: false }
    }
}

/// The divergence of two distributions that a student is trained by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum DistillationKind {
    /// The divergence `KL(q‖p)`, weighted by the teacher's probabilities.
    ForwardKl,
    /// The divergence `KL(p‖q)`, weighted by the student's probabilities.
    ReverseKl,
    /// The generalised Jensen–Shannon divergence `beta·KL(q‖m) + (1 − beta)·KL(p‖m)` with `m = beta·q + (1 − beta)·p`.
    JensenShannon,
}

/// The place of the probability outside a teacher's `K` entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TopKRest {
    /// One more bin: the divergence is of `K + 1` probabilities, the last of which is 1 less the sum of the others.
    Tail,
    /// None: the teacher's `K` probabilities, and the student's of these entries, are each divided by their sum.
    Renormalized,
    /// None: the sum is over the `K` entries, whose probabilities are as they are and sum up to less than 1.
    Ignored,
}

impl TopKRest {
    /// Returns the name as files spell it.
    fn name(self) -> &'static str {
        match self {
            TopKRest::Tail => "tail",
            TopKRest::Renormalized => "renormalized",
            TopKRest::Ignored => "ignored",
        }
    }
}

impl Distillation {
    /// Returns the generalised Jensen–Shannon divergence with the weight `beta` of the teacher.
    pub fn jensen_shannon(beta: f64) -> Self {
        Self { kind: DistillationKind::JensenShannon, beta: Some(beta), ..Self::default() }
    }

    /// Returns the reverse KL to a teacher's logits.
    pub fn reverse_kl() -> Self {
        Self { kind: DistillationKind::ReverseKl, ..Self::default() }
    }

    /// Returns the weight of the teacher in the mixture, 0.5 unless it is set; 0 for the forward KL, and 1 for the reverse one.
    pub fn teacher_weight(&self) -> f64 {
        match self.kind {
            DistillationKind::ForwardKl => 0.0,
            DistillationKind::ReverseKl => 1.0,
            DistillationKind::JensenShannon => self.beta.unwrap_or(0.5),
        }
    }

    pub(super) fn check(&self, spec: &LossSpec) -> CheckResult {
        if let Some(beta) = self.beta {
            let mixes = self.kind == DistillationKind::JensenShannon;
            let field = "objective.distillation.beta";
            ensure(mixes, field, ShownNumber(beta), "none unless `kind` is jensen_shannon: a KL has no mixture")?;
            ensure((0.0..=1.0).contains(&beta), field, ShownNumber(beta), "a number from 0 to 1")?;
        }
        let field = "objective.distillation.top_k";
        ensure(self.top_k != Some(0), field, 0, "an integer ≥ 1, or none for a teacher's logits")?;
        let (field, expected) = ("objective.distillation.rest", "tail, renormalized or ignored with `top_k`");
        ensure(self.top_k.is_none() || self.rest.is_some(), field, "none", expected)?;
        let given = self.rest.map_or("none", TopKRest::name);
        ensure(self.top_k.is_some() || self.rest.is_none(), field, given, "none without `top_k`")?;
        // A divergence of two distributions has no sampled token, and nothing that is made of its log-probability.
        let old_logp = if spec.old_logp == OldLogp::Given { "given" } else { "rollout" };
        let current = spec.old_logp == OldLogp::Current;
        ensure(current, "old_logp", old_logp, "current with `objective.distillation`, which has no ratio")?;
        ensure(spec.ratio == Ratio::default(), "ratio", "another than the default", WITHOUT)?;
        ensure(spec.rollout.is_none(), "rollout", "rollout weights", WITHOUT)?;
        ensure(spec.rejection.is_empty(), "rejection", format!("{} rejections", spec.rejection.len()), WITHOUT)?;
        ensure(spec.off_policy_mask.is_none(), "off_policy_mask", "a mask", WITHOUT)?;
        ensure(spec.top_entropy.is_none(), "top_entropy", "a mask", WITHOUT)?;
        ensure(spec.kl.is_none(), "kl", "a penalty", WITHOUT)?;
        ensure(spec.entropy_coef == 0.0, "entropy_coef", ShownNumber(spec.entropy_coef), WITHOUT)?;
        ensure(spec.entropy_averaging.is_none(), "entropy_averaging", "a mean", WITHOUT)?;
        ensure(!spec.dentropy, "dentropy", true, WITHOUT)?;
        // Both distributions are of the logits as they are given, over the whole vocabulary.
        ensure(spec.logits == LogitsTransform::default(), "logits", "a transform", WITHOUT)?;
        ensure(spec.support.is_whole(), "support", "a part of the vocabulary", WITHOUT)?;
        let divides = spec.temperature_divides == TemperatureDivides::Logits;
        ensure(divides, "temperature_divides", "logp", "logits with `objective.distillation`")
    }

    pub(super) fn describe(&self) -> String {
        let beta = self.teacher_weight();
        let mixes = self.kind == DistillationKind::JensenShannon && beta > 0.0 && beta < 1.0;
        let factor = if self.temperature_squared { "T²·" } else { "" };
        let divergence = match mixes {
            true => {
                let (of_teacher, of_student) = (number(beta), number(1.0 - beta));
                format!(
                    "{factor}({of_teacher}·KL(q‖m) + {of_student}·KL(p‖m)), m = {of_teacher}·q + {of_student}·p, \
                     p = softmax(logits / T)"
                )
            }
            false if beta == 0.0 => format!("{factor}KL(q‖p), p = softmax(logits / T)"),
            false => format!("{factor}KL(p‖q), p = softmax(logits / T)"),
        };
        let Some((k, rest)) = self.top_k.zip(self.rest) else {
            return format!("{divergence}, q = softmax(teacher_logits / T)");
        };
        let rest = match rest {
            TopKRest::Tail => "and the rest as one more",
            TopKRest::Renormalized => "p of the same, each over its sum",
            TopKRest::Ignored => "the rest left out",
        };
        format!("{divergence}, q = exp(teacher_logp) of {k} entries, {rest}")
    }
}

/// The expected value of a setting that a divergence of two distributions does not have.
const WITHOUT: &str = "its default with `objective.distillation`, which has no such part";

impl LossSpec {
    /// Returns the mean of a divergence from a teacher over all unmasked tokens.
    pub fn distillation(distillation: Distillation) -> Self {
        Self { objective: Objective::Distillation(distillation), old_logp: OldLogp::Current, ..Self::default() }
    }

    /// Returns the divergence from a teacher that the spec is of; `None` for another objective.
    pub fn as_distillation(&self) -> Option<&Distillation> {
        match &self.objective {
            Objective::Distillation(distillation) => Some(distillation),
            _ => None,
        }
    }

    /// Whether the loss reads the problem's `teacher`.
    pub fn reads_teacher(&self) -> bool {
        self.as_distillation().is_some()
    }
}
