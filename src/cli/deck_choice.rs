//! The problems of a campaign.

use clap::Args;

use super::{CliError, one_of};
use crate::campaign::{Deck, DeckHead, DeckShapes};
use crate::judge::generate::Regime;
use crate::problem::{Dtype, HeadLayout};

#[derive(Args)]
pub(super) struct DeckChoice {
    /// Number of problems to try
    #[arg(long, value_name = "N", default_value_t = 200)]
    cases: u64,
    /// Number of them with a vocabulary of 151,936; one for each dtype and two at least if nothing is said, a tenth at most
    #[arg(long, value_name = "N")]
    wide: Option<u64>,
    /// Seed of every random draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Dtypes of the logits, or of hidden states and head
    #[arg(long, value_name = "DTYPE,…", value_delimiter = ',', default_value = "bf16,f32")]
    dtypes: Vec<Dtype>,
    /// `many`; `few`, for kernels that are compiled for each; or extents, `BxTxV`
    #[arg(long, value_name = "SHAPES", value_delimiter = ',', default_value = "many")]
    shapes: Vec<String>,
    /// Ways of drawing logits; all in which every loss is finite if none is given
    #[arg(long, value_name = "REGIME,…", value_delimiter = ',', value_parser = one_of(&Regime::ALL))]
    regimes: Vec<Regime>,
    /// The sequences of each problem packed: the B of a shape lie in one row of B·T tokens, of lengths that differ, some without a
    /// token, and tokens behind the last
    #[arg(long)]
    packed: bool,
    /// Garbage under the mask in a third of the problems, NaN and the id −100: `true`, it must not show; `false`, there is none. If
    /// nothing is said there is NaN alone, and a kernel that reads it has a note
    #[arg(long, value_name = "true|false")]
    masked_garbage: Option<bool>,
    /// Problems with hidden states and an LM head instead of logits
    #[arg(long)]
    lm_head: bool,
    /// Widths of the LM head, which ask for one; the deck's own if none is given
    #[arg(long, value_name = "H,…", value_delimiter = ',')]
    hidden: Vec<usize>,
    /// Layout of the LM head: hv, which is [H,V], or vh, which is [V,H], if nothing is said
    #[arg(long, value_name = "hv|vh")]
    layout: Option<HeadLayout>,
    /// Problems whose logits the LM head rounds to its dtype
    #[arg(long)]
    rounds_logits: bool,
}

impl DeckChoice {
    /// Reads the options as a deck.
    pub(super) fn deck(&self) -> Result<Deck, CliError> {
        let wrong = |reason| CliError::Usage(format!("--shapes: {reason}").into());
        // The shapes' parser also takes extents of an LM head, which belong in another option here.
        let (shapes, widths) = DeckShapes::read(&self.shapes).map_err(wrong)?;
        let Self { cases, seed, packed, masked_garbage, layout, rounds_logits, ref hidden, ref dtypes, .. } = *self;
        if !widths.is_empty() {
            return Err(wrong("got BxTxHxV, expected BxTxV, and the widths H in --hidden".into()));
        }
        if hidden.contains(&0) {
            return Err(CliError::Usage("--hidden: got 0, expected widths ≥ 1".into()));
        }
        // An option of the head would silently do nothing without one.
        if !self.lm_head && hidden.is_empty() {
            let given = [("--layout", layout.is_some()), ("--rounds-logits", rounds_logits)];
            if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(CliError::Usage(
                    format!("{option}: got no LM head, expected --lm-head or --hidden beside it").into(),
                ));
            }
        }
        let layout = layout.unwrap_or(HeadLayout::VocabByHidden);
        let head =
            (self.lm_head || !hidden.is_empty()).then(|| DeckHead { hidden: hidden.clone(), layout, rounds_logits });
        let regimes = if self.regimes.is_empty() { Regime::FINITE.to_vec() } else { self.regimes.clone() };
        let wide = self.wide.unwrap_or_else(|| Deck::usual_wide(cases, dtypes.len()));
        Ok(Deck { dtypes: dtypes.clone(), shapes, regimes, cases, wide, seed, packed, masked_garbage, head })
    }
}
