//! Which members of the loss family the kernels compute.

use serde::Serialize;

use assay_core::spec::{LogitsTransform, LossSpec, Objective, RatioLevel};

/// How much of a batch a kernel sees where it computes a token's loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelScope {
    /// The token alone.
    Token,
    /// Its row.
    Row,
    /// Its row, where that has no token too.
    AnyRow,
    /// No loss at all, but logp and entropy.
    Softmax,
}

/// A setting that a kernel does not compute.
#[derive(Debug)]
pub struct UnsupportedSetting {
    /// As a file spells it.
    pub field: &'static str,
    /// Its value.
    pub given: String,
    /// What would do.
    pub supported: &'static str,
}

const ROWS: &str = "what one token decides: its row's tokens are not seen together";
const TOKENS: &str = "choices that are made before there are logits: those of a whole batch are not";

impl KernelScope {
    /// Checks that a kernel of this reach computes `spec`.
    ///
    /// # Errors
    /// The first setting that it does not.
    pub fn expect(self, spec: &LossSpec) -> Result<(), UnsupportedSetting> {
        let unless = |computed: bool, field, given: &dyn Fn() -> String, supported| {
            if computed { Ok(()) } else { Err(UnsupportedSetting { field, given: given(), supported }) }
        };
        if self == KernelScope::Softmax {
            return expect_one_id(spec).and_then(|()| expect_plain_logits(spec));
        }
        let selection = match &spec.objective {
            Objective::KlCov(cov) => cov.selection.map(|top| ("objective.kl_cov.selection", written(&top))),
            Objective::ClipCov(cov) => cov.selection.map(|band| ("objective.clip_cov.selection", written(&band))),
            _ => None,
        };
        if let Some((field, given)) = selection {
            return Err(UnsupportedSetting { field, given, supported: "`selected` given with the batch" });
        }
        unless(spec.top_entropy.is_none(), "top_entropy", &|| written(&spec.top_entropy), TOKENS)?;
        let empty_rows = matches!(&spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows);
        let native = "false: a row without tokens has no part in a program for devices";
        let field = "objective.importance_sampling.empty_rows";
        unless(self == KernelScope::AnyRow || !empty_rows, field, &|| "true".into(), native)?;
        if self != KernelScope::Token {
            return Ok(());
        }
        let level = spec.ratio.level;
        unless(level == RatioLevel::Token, "ratio.level", &|| written(&level), ROWS)?;
        let vespo = matches!(spec.objective, Objective::Vespo(_));
        unless(!vespo, "objective", &|| "vespo".into(), ROWS)?;
        unless(spec.off_policy_mask.is_none(), "off_policy_mask", &|| written(&spec.off_policy_mask), ROWS)
    }
}

/// Checks that logp is asked of one id a token.
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

/// Checks that logp of several ids a token can be made around a kernel that knows one of them: the columns of the others are set from
/// their logp alone, which says nothing of the entropy's gradient.
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

/// Checks that logits go into the softmax of `spec` as they come, every column of them, for what changes none.
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

/// A setting as a file spells it.
fn written(setting: &impl Serialize) -> String {
    let text = serde_json::to_string(setting).unwrap_or_default();
    text.trim_matches('"').to_string()
}
