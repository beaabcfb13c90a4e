//! Problems that a campaign deals.

use assay::campaign::{Deck, DeckShapes, HeadDeck};
use assay::judge::generate::Regime;
use pyo3::prelude::*;

use crate::error;

/// What a campaign's problems are, as Python tells it.
pub(crate) struct Dealt {
    pub(crate) deck: Deck,
    /// Of problems with an LM head.
    pub(crate) heads: Option<HeadDeck>,
}

impl Dealt {
    /// The deck of `shapes`, as [`DeckShapes::read`] takes them, packed or not.
    ///
    /// # Errors
    /// `ProblemError` naming what is none.
    pub(crate) fn of(
        py: Python<'_>,
        dtypes: &[String],
        shapes: &[String],
        regimes: Option<Vec<String>>,
        lm_head: bool,
        packed: bool,
    ) -> PyResult<Self> {
        let wrong = |reason: String| error::of_problem(py, reason);
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
        if !lm_head && hidden.is_empty() {
            return Ok(Self { deck, heads: None });
        }
        let mut heads = HeadDeck::new(deck.clone());
        if !hidden.is_empty() {
            heads.hidden = hidden;
        }
        Ok(Self { deck, heads: Some(heads) })
    }

    /// The same with so many problems, of this seed, the last `wide` with a large vocabulary.
    pub(crate) fn counted(mut self, cases: u64, wide: u64, seed: u64) -> Self {
        for deck in [&mut self.deck].into_iter().chain(self.heads.as_mut().map(|heads| &mut heads.deck)) {
            (deck.cases, deck.wide, deck.seed) = (cases, wide, seed);
        }
        self
    }
}
