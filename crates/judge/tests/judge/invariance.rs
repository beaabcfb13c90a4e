//! Which outputs of two runs have the same bits.

use ndarray::{arr0, arr2, arr3};

use assay_core::problem::Candidate;
use assay_judge::invariance::Invariance;

fn candidate(loss: f32, logp: Option<f32>, dlogit: f32) -> Candidate {
    Candidate {
        loss: Some(arr0(loss).into()),
        gradient: arr3(&[[[dlogit]]]).into(),
        logp: logp.map(|logp| arr2(&[[logp]]).into()),
        logp_of_others: None,
        entropy: None,
        token_loss: None,
        metrics: None,
    }
}

#[test]
fn invariance_compares_bits_of_outputs_that_both_have() {
    let one = candidate(0.0, Some(f32::NAN), 1.0);
    let other = candidate(-0.0, Some(f32::NAN), 1.0);
    let compared = Invariance::between(&one, &other);
    assert_eq!((compared.same, compared.other), (vec!["logp", "dlogits"], vec!["loss"]));
    let without = Invariance::between(&one, &candidate(0.0, None, 2.0));
    assert_eq!((without.same, without.other), (vec!["loss"], vec!["dlogits"]));
}
