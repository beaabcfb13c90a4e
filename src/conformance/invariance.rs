//! Whether an implementation gives the same bits on another number of devices.

use serde::Serialize;

use super::tolerance::Output;
use crate::problem::Outcome;

/// Which outputs of one run have the bits of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Invariance {
    /// Outputs with the same bits.
    pub same: Vec<&'static str>,
    /// Outputs with others.
    pub other: Vec<&'static str>,
}

impl Invariance {
    /// Compares two outcomes of one problem. A NaN has other bits than anything.
    pub fn between(a: &Outcome, b: &Outcome) -> Self {
        let outputs = [
            (Output::Loss, a.loss == b.loss),
            (Output::Logp, a.logp == b.logp),
            (Output::Entropy, a.entropy == b.entropy),
            (Output::TokenLoss, a.token_loss == b.token_loss),
            (Output::Dlogits, a.dlogits == b.dlogits),
        ];
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == wanted).map(|(output, _)| output.name()).collect()
        };
        Self { same: named(true), other: named(false) }
    }
}
