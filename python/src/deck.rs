//! Reads the options that describe a campaign's problems.

use assay::campaign::{Deck, DeckShapes, HeadDeck};
use assay::judge::generate::Regime;
use pyo3::prelude::*;

use crate::error;

/// The decks of a campaign as Python describes them.
pub(crate) struct DeckOptions {
    pub(crate) deck: Deck,
    /// The deck of problems with an LM head; `None` if the problems have logits.
    pub(crate) heads: Option<HeadDeck>,
}

impl DeckOptions {
    /// Makes the deck of `shapes`, as [`DeckShapes::read`] parses them, packed or not.
    ///
    /// # Errors
    /// `ProblemError` naming what is none.
    pub(crate) fn new(
        py: Python<'_>,
        dtypes: &[String],
        shapes: &[String],
        regimes: Option<Vec<String>>,
        lm_head: bool,
        packed: bool,
    ) -> PyResult<Self> {
        let wrong = |reason: String| error::problem_error(py, reason);
        let dtypes = dtypes.iter().map(|name| name.parse().map_err(wrong)).collect::<PyResult<_>>()?;
        let regime = |name: &String| {
            let found = Regime::ALL.into_iter().find(|regime| regime.to_string() == *name);
            let all = || Regime::ALL.map(|regime| regime.to_string()).join(", ");
            found.ok_or_else(|| wrong(format!("regimes: got `{name}`, expected one of {}", all())))
        };
        let mut deck = Deck { dtypes, packed, ..Deck::default() };
        if let Some(named) = regimes {
            deck.regimes = named.iter().map(regime).collect::<PyResult<_>>()?;
        }
        let (shapes, hidden) = DeckShapes::read(shapes).map_err(|reason| wrong(format!("shapes: {reason}")))?;
        deck.shapes = shapes;
        // Extents `BxTxHxV` ask for an LM head by themselves.
        if !lm_head && hidden.is_empty() {
            return Ok(Self { deck, heads: None });
        }
        let mut heads = HeadDeck::new(deck.clone());
        if !hidden.is_empty() {
            heads.hidden = hidden;
        }
        Ok(Self { deck, heads: Some(heads) })
    }

    /// Returns the decks with `cases` problems drawn from `seed`, of which the last `wide` have a large vocabulary.
    pub(crate) fn counted(mut self, cases: u64, wide: u64, seed: u64) -> Self {
        for deck in [&mut self.deck].into_iter().chain(self.heads.as_mut().map(|heads| &mut heads.deck)) {
            (deck.cases, deck.wide, deck.seed) = (cases, wide, seed);
        }
        self
    }
}
