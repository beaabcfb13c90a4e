//! Members of the loss family that kernels compute, and the errors that name what they do not.

use serde::Serialize;

use assay_core::spec::{CrossEntropy, LogitsTransform, LossSpec, Objective, RatioLevel};

/// The part of a batch that a kernel sees when it computes a token's loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelScope {
    /// One token alone, so that nothing of its sequence is known.
    Token,
    /// All tokens of a sequence that has at least one unmasked token.
    Row,
    /// All tokens of such a sequence with every column of each, for a cross-entropy's terms of the whole row.
    RowAndColumns,
    /// All tokens of a sequence, and sequences without an unmasked token too.
    AnyRow,
    /// No loss at all: the kernel returns logp and entropy.
    Softmax,
}

/// A setting that a kernel does not compute.
#[derive(Debug)]
pub struct UnsupportedSetting {
    /// Name of the setting, as a spec file spells it.
    pub field: &'static str,
    /// Value of the setting in the spec.
    pub given: String,
    /// Values of the setting that the kernel computes.
    pub supported: &'static str,
}

const ROWS: &str = "what one token decides: its row's tokens are not seen together";
const TOKENS: &str = "choices that are made before there are logits: those of a whole batch are not";

impl KernelScope {
    /// Checks that a kernel that sees this much computes `spec`.
    ///
    /// # Errors
    /// The first setting that it does not.
    pub fn expect(self, spec: &LossSpec) -> Result<(), UnsupportedSetting> {
        let unless = |computed: bool, field, given: &dyn Fn() -> String, supported| {
            if computed { Ok(()) } else { Err(UnsupportedSetting { field, given: given(), supported }) }
        };
        // A divergence from a teacher reads a second distribution, which no kernel is given.
        unless(!spec.reads_teacher(), "objective", &|| "distillation".into(), "another: there is no teacher")?;
        // A softmax alone must be that of logits as they are, for one id.
        if self == KernelScope::Softmax {
            return expect_one_id(spec).and_then(|()| expect_plain_logits(spec));
        }
        // A set of columns for each token is gathered by the kernel that is written for any spec.
        let kept = spec.support.kept;
        unless(
            self == KernelScope::AnyRow || kept.is_none(),
            "support.kept",
            &|| written(&kept),
            "none: the same columns for all tokens",
        )?;
        // Choices by covariances or entropies need the logits of the whole batch.
        let selection = match &spec.objective {
            Objective::KlCov(cov) => cov.selection.map(|top| ("objective.kl_cov.selection", written(&top))),
            Objective::ClipCov(cov) => cov.selection.map(|band| ("objective.clip_cov.selection", written(&band))),
            _ => None,
        };
        if let Some((field, given)) = selection {
            return Err(UnsupportedSetting { field, given, supported: "`selected` given with the batch" });
        }
        unless(spec.top_entropy.is_none(), "top_entropy", &|| written(&spec.top_entropy), TOKENS)?;
        // Sums over the whole row besides those of a softmax are written where a program is not one of a kernel's passes.
        if let Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }) = spec.objective {
            let sees_columns = matches!(self, KernelScope::AnyRow | KernelScope::RowAndColumns);
            let elsewhere = "0: the terms of a whole row are computed by native and xla";
            let field = "objective.cross_entropy.label_smoothing";
            unless(sees_columns || label_smoothing == 0.0, field, &|| label_smoothing.to_string(), elsewhere)?;
            let field = "objective.cross_entropy.z_loss";
            unless(sees_columns || z_loss == 0.0, field, &|| z_loss.to_string(), elsewhere)?;
        }
        // A sequence without a token is seen only by kernels that see the whole batch.
        let empty_rows = matches!(&spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows);
        let native = "false: a row without tokens has no part in a program for devices";
        let field = "objective.importance_sampling.empty_rows";
        unless(self == KernelScope::AnyRow || !empty_rows, field, &|| "true".into(), native)?;
        if self != KernelScope::Token {
            return Ok(());
        }
        // Everything else that tokens share needs a kernel that sees their sequence.
        let level = spec.ratio.level;
        unless(level == RatioLevel::Token, "ratio.level", &|| written(&level), ROWS)?;
        let vespo = matches!(spec.objective, Objective::Vespo(_));
        unless(!vespo, "objective", &|| "vespo".into(), ROWS)?;
        unless(spec.off_policy_mask.is_none(), "off_policy_mask", &|| written(&spec.off_policy_mask), ROWS)
    }
}

/// Checks that the spec asks for logp of one id per token.
///
/// # Errors
/// [`LossSpec::ids_per_token`].
pub fn expect_one_id(spec: &LossSpec) -> Result<(), UnsupportedSetting> {
    let beyond = || UnsupportedSetting {
        field: "ids_per_token",
        given: spec.ids_per_token.to_string(),
        supported: "1 id a token",
    };
    if spec.ids_per_token == 1 { Ok(()) } else { Err(beyond()) }
}

/// Checks that logp of several ids per token can be computed around a kernel that knows one of them: the columns of the
/// others are written from their logp alone, from which the gradient of the entropy does not follow.
///
/// # Errors
/// The first setting that it cannot be with.
pub fn expect_around_one_id(spec: &LossSpec) -> Result<(), UnsupportedSetting> {
    let beyond = || UnsupportedSetting {
        field: "dentropy",
        given: "true".into(),
        supported: "false with `ids_per_token` above 1",
    };
    if spec.ids_per_token > 1 && spec.dentropy { Err(beyond()) } else { Ok(()) }
}

/// Checks that the softmax of `spec` is of the logits as they are, over every column, for kernels that change no logit.
///
/// # Errors
/// The first setting that has it otherwise.
pub fn expect_plain_logits(spec: &LossSpec) -> Result<(), UnsupportedSetting> {
    if spec.logits != LogitsTransform::default() {
        let supported = "logits as they come: `scale: 1`, no `softcap`, no `bias`";
        return Err(UnsupportedSetting { field: "logits", given: written(&spec.logits), supported });
    }
    if !spec.support.is_whole() {
        return Err(UnsupportedSetting {
            field: "support",
            given: written(&spec.support),
            supported: "the whole vocabulary",
        });
    }
    Ok(())
}

/// Spells a setting as a spec file does.
fn written(setting: &impl Serialize) -> String {
    let text = serde_json::to_string(setting).unwrap_or_default();
    text.trim_matches('"').to_string()
}
