//! Whether an implementation gives the same bits on another number of devices.

use ndarray::Ix2;
use serde::Serialize;

use super::tolerance::Output;
use crate::problem::{Candidate, FloatArray};

/// Which outputs of one run have the bits of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Invariance {
    /// Outputs with the same bits.
    pub same: Vec<&'static str>,
    /// Outputs with others.
    pub other: Vec<&'static str>,
}

impl Invariance {
    /// Compares what two runs on one problem both returned.
    pub fn between(a: &Candidate, b: &Candidate) -> Self {
        let per_token = |output, of: fn(&Candidate) -> Option<&FloatArray<Ix2>>| {
            (output, of(a).zip(of(b)).map(|(a, b)| a.same_bits(b)))
        };
        let outputs = [
            (Output::Loss, Some(a.loss.same_bits(&b.loss))),
            per_token(Output::Logp, |candidate| candidate.logp.as_ref()),
            per_token(Output::Entropy, |candidate| candidate.entropy.as_ref()),
            per_token(Output::TokenLoss, |candidate| candidate.token_loss.as_ref()),
            (Output::Dlogits, Some(a.dlogits.same_bits(&b.dlogits))),
        ];
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == Some(wanted)).map(|(output, _)| output.name()).collect()
        };
        Self { same: named(true), other: named(false) }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{arr0, arr2, arr3};

    use super::*;

    fn candidate(loss: f32, logp: Option<f32>, dlogit: f32) -> Candidate {
        Candidate {
            loss: arr0(loss).into(),
            dlogits: arr3(&[[[dlogit]]]).into(),
            logp: logp.map(|logp| arr2(&[[logp]]).into()),
            entropy: None,
            token_loss: None,
            metrics: None,
        }
    }

    #[test]
    fn bits_are_compared_not_values_and_only_where_both_have_the_output() {
        let one = candidate(0.0, Some(f32::NAN), 1.0);
        let other = candidate(-0.0, Some(f32::NAN), 1.0);
        let compared = Invariance::between(&one, &other);
        assert_eq!((compared.same, compared.other), (vec!["logp", "dlogits"], vec!["loss"]));
        let without = Invariance::between(&one, &candidate(0.0, None, 2.0));
        assert_eq!((without.same, without.other), (vec!["loss"], vec!["dlogits"]));
    }
}
