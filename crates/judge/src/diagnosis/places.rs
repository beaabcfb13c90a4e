//! Diagnoses of where a gradient is wrong: in a run of vocabulary entries, or from some token on.

use super::Diagnosis;
use crate::metric::half_ulp;
use assay_core::problem::FloatView;
use assay_reference::Reference;
use ndarray::Ix3;

/// The number of tokens before a wrong end from which on that end is one of a block: blocks of tokens have eight at least.
const BLOCK: usize = 8;

/// The error of a value, as a share of it, from which on it is wrong beyond any rounding.
const WRONG: f64 = 0.1;

/// Diagnoses where dlogits are wrong: in a run of vocabulary entries, or from some token on.
pub(super) fn diagnose_places(reference: &Reference, dlogits: &FloatView<Ix3>) -> Option<Diagnosis> {
    let shape = reference.shape();
    // For each entry and each place in a sequence whether any value is wrong, and whether any is right.
    let (mut columns, mut places) = (vec![[false; 2]; shape.vocab], vec![[false; 2]; shape.tokens]);
    let (mut zero, mut only_targets) = (true, true);
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        if !reference.has_gradient(token) {
            continue;
        }
        let mut all_wrong = true;
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            // A value below the dtype's resolution is neither right nor wrong.
            if half_ulp(x, dlogits.dtype()) > WRONG / 2.0 * x.abs() {
                continue;
            }
            let wrong = y.is_nan() || (y - x).abs() > WRONG * x.abs();
            columns[v][usize::from(!wrong)] = true;
            all_wrong &= wrong;
            zero &= !wrong || y == 0.0;
            only_targets &= !wrong || v == token.id;
        }
        places[t][usize::from(!all_wrong)] = true;
    }
    let run = |marks: &[[bool; 2]]| {
        let first = marks.iter().position(|[wrong, _]| *wrong)?;
        let last = marks.iter().rposition(|[wrong, _]| *wrong)?;
        // Within the run nothing is right; outside it something is, and nothing wrong.
        let whole = marks[first..=last].iter().all(|[_, right]| !right);
        let others = marks[..first].iter().chain(&marks[last + 1..]).any(|[_, right]| *right);
        (whole && others).then_some((first, last))
    };
    // A target that is wrong alone is no place in the vocabulary.
    if let Some((first, last)) = run(&columns).filter(|_| !only_targets) {
        return Some(Diagnosis::Columns { first, last, vocab: shape.vocab, zero });
    }
    let (first, last) = run(&places)?;
    (last + 1 == shape.tokens && first >= BLOCK).then_some(Diagnosis::Tokens { first, tokens: shape.tokens })
}
