//! Any text as the deck of a suite, with the recipes that a campaign deals of it. Problems are drawn where they are small.
#![no_main]

use assay_campaign::Deck;
use assay_core::problem::{HeadProblem, Problem};
use assay_core::spec::LossSpec;
use libfuzzer_sys::fuzz_target;

/// The most logits of a problem that is drawn.
const MOST: usize = 1 << 12;

fuzz_target!(|text: &str| {
    let Ok(deck) = serde_json::from_str::<Deck>(text) else { return };
    if deck.check().is_err() {
        return;
    }
    let spec = LossSpec::default();
    for dealt in deck.recipes().take(3) {
        let _ = dealt.label();
        let [batch, tokens, vocab] = dealt.recipe.shape;
        let logits = batch.checked_mul(tokens).and_then(|tokens| tokens.checked_mul(vocab));
        if logits.is_none_or(|logits| logits > MOST) {
            continue;
        }
        match &dealt.head {
            None => drop(deck.draw::<Problem>(&dealt, &spec)),
            Some(head) if head.hidden <= MOST / logits.unwrap_or(1).max(1) => drop(deck.draw::<HeadProblem>(&dealt, &spec)),
            Some(_) => {}
        }
    }
});
