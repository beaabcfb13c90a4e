//! The options of an LM head in addition to `--shape`, and the recipe that follows from them.

use clap::Args;
use serde::Serialize;

use super::CliError;
use crate::judge::generate::{HeadRecipe, Recipe};
use crate::problem::{HeadLayout, HeadShape, ProblemShape};

/// The options of an LM head in addition to its extents.
#[derive(Args)]
pub(super) struct HeadChoice {
    /// Layout of the LM head: hv, which is [H,V], or vh, which is [V,H]; hv if none is given
    #[arg(long, value_name = "hv|vh")]
    layout: Option<HeadLayout>,
    /// Logits of the LM head stay in f32 instead of being rounded to the dtype
    #[arg(long)]
    f32_logits: bool,
}

/// A recipe of either kind.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum AnyRecipe {
    Logits(Recipe),
    Head(HeadRecipe),
}

impl HeadChoice {
    /// The recipe for problems of `extents`; `recipe` says the rest of it.
    pub(super) fn recipe(&self, extents: ProblemShape, recipe: Recipe) -> Result<AnyRecipe, CliError> {
        let ProblemShape::Head(HeadShape { hidden, .. }) = extents else {
            let given = [("--layout", self.layout.is_some()), ("--f32-logits", self.f32_logits)];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((option, _)) => Err(CliError::Usage(
                    format!("{option}: got a shape without an LM head, expected --shape BxTxHxV").into(),
                )),
                None => Ok(AnyRecipe::Logits(recipe)),
            };
        };
        let layout = self.layout.unwrap_or(HeadLayout::HiddenByVocab);
        Ok(AnyRecipe::Head(HeadRecipe { hidden, layout, rounds_logits: !self.f32_logits, recipe }))
    }

    /// The options that choose the same again.
    pub(super) fn options(&self) -> String {
        let layout = self.layout.map_or(String::new(), |layout| format!(" --layout {}", layout.key()));
        format!("{layout}{}", if self.f32_logits { " --f32-logits" } else { "" })
    }
}
