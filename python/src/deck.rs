//! Reads the options that describe a campaign's problems.

use assay::campaign::{Deck, DeckHead, DeckShapes};
use assay::judge::generate::Regime;
use pyo3::prelude::*;

use crate::error;

/// The options of a deck, as Python names them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct DeckOptions {
    cases: u64,
    seed: u64,
    dtypes: Vec<String>,
    shapes: Vec<String>,
    regimes: Option<Vec<String>>,
    wide: Option<u64>,
    lm_head: bool,
    layout: String,
    rounds_logits: bool,
    packed: bool,
    masked_garbage: Option<bool>,
}

impl DeckOptions {
    /// Makes the deck.
    ///
    /// # Errors
    /// `ProblemError` naming the option that is invalid.
    pub(crate) fn deck(self, py: Python<'_>) -> PyResult<Deck> {
        let wrong = |reason: String| error::problem_error(py, reason);
        let Self { cases, seed, packed, masked_garbage, rounds_logits, .. } = self;
        let dtypes: Vec<_> = self.dtypes.iter().map(|name| name.parse().map_err(wrong)).collect::<PyResult<_>>()?;
        let regime = |name: &String| {
            let found = Regime::ALL.into_iter().find(|regime| regime.to_string() == *name);
            let all = || Regime::ALL.map(|regime| regime.to_string()).join(", ");
            found.ok_or_else(|| wrong(format!("regimes: got `{name}`, expected one of {}", all())))
        };
        let regimes = match &self.regimes {
            Some(named) => named.iter().map(regime).collect::<PyResult<_>>()?,
            None => Regime::FINITE.to_vec(),
        };
        let (shapes, hidden) = DeckShapes::read(&self.shapes).map_err(|reason| wrong(format!("shapes: {reason}")))?;
        let layout = self.layout.parse().map_err(|reason| wrong(format!("layout: {reason}")))?;
        // Extents `BxTxHxV` ask for an LM head by themselves.
        let head = (self.lm_head || !hidden.is_empty()).then_some(DeckHead { hidden, layout, rounds_logits });
        // An option of the head would silently do nothing without one.
        if head.is_none() && (rounds_logits || layout != DeckHead::default().layout) {
            let option = if rounds_logits { "rounds_logits" } else { "layout" };
            return Err(wrong(format!("{option}: got it for problems of logits, expected lm_head=True beside it")));
        }
        let wide = self.wide.unwrap_or_else(|| Deck::usual_wide(cases, dtypes.len()));
        let deck = Deck { dtypes, shapes, regimes, cases, wide, seed, packed, masked_garbage, head };
        // No problem at all is what an iterator may end with at once; a campaign refuses it.
        if deck.cases > 0 {
            deck.check().map_err(|reason| wrong(reason.to_string()))?;
        }
        Ok(deck)
    }
}
