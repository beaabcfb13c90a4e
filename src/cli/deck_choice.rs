//! The problems of a campaign.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{CliError, one_of};
use crate::campaign::{Deck, DeckShapes, HeadDeck};
use crate::judge::generate::Regime;
use crate::problem::{Dtype, HeadLayout};

#[derive(Args)]
pub(super) struct DeckChoice {
    /// Number of problems to try
    #[arg(long, value_name = "N", default_value_t = 200)]
    cases: u64,
    /// Number of them with a vocabulary of 151,936
    #[arg(long, value_name = "N", default_value_t = 1)]
    wide: u64,
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
    /// Problems with an LM head, of these widths
    #[arg(long, value_name = "H,…", value_delimiter = ',')]
    hidden: Vec<usize>,
    /// Layout of the LM head: hv, which is [H,V], or vh, which is [V,H]
    #[arg(long, value_name = "hv|vh", requires = "hidden", default_value = "vh")]
    layout: HeadLayout,
}

/// A deck of either kind.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AnyDeck {
    Logits(Deck),
    Head(HeadDeck),
}

impl DeckChoice {
    pub(super) fn deck(&self) -> Result<AnyDeck, CliError> {
        let wrong = |reason| CliError::Usage(format!("--shapes: {reason}"));
        // The shapes' parser also takes extents of an LM head, which belong in another option here.
        let (shapes, widths) = DeckShapes::read(&self.shapes).map_err(wrong)?;
        if !widths.is_empty() {
            return Err(wrong("got BxTxHxV, expected BxTxV, and the widths H in --hidden".into()));
        }
        let regimes = if self.regimes.is_empty() { Regime::FINITE.to_vec() } else { self.regimes.clone() };
        let Self { cases, wide, seed, packed, ref dtypes, .. } = *self;
        let deck = Deck { dtypes: dtypes.clone(), shapes, regimes, cases, wide, seed, packed };
        if self.hidden.is_empty() {
            return Ok(AnyDeck::Logits(deck));
        }
        if self.hidden.contains(&0) {
            return Err(CliError::Usage("--hidden: got 0, expected widths ≥ 1".into()));
        }
        Ok(AnyDeck::Head(HeadDeck { hidden: self.hidden.clone(), layout: self.layout, ..HeadDeck::new(deck) }))
    }
}
