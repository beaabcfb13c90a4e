//! Draws ids and masks, and fills masked places with garbage.

use ndarray::{Array2, Zip};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::regime::Regime;
use assay_core::problem::{Advantages, Extra, OtherIds, Problem, Teacher, TeacherTopK};
use assay_core::spec::{LossSpec, Objective, Vespo};

/// The choice of the tokens of a problem that count.
#[derive(PartialEq, Eq)]
pub(super) enum CountedTokens {
    /// Sequences of random lengths.
    Ragged,
    /// All tokens, for problems that are timed.
    All,
}

/// Draws an id: any, or in half of the draws of a designed regime one at an edge of the vocabulary or of a tile.
pub(super) fn draw_id(regime: Regime, rng: &mut ChaCha8Rng, vocab: usize) -> usize {
    let any = rng.random_range(0..vocab);
    if !regime.is_designed() || rng.random_bool(0.5) {
        return any;
    }
    let tile = 1 << rng.random_range(7..=12);
    let at = match rng.random_range(0..5) {
        0 => 0,
        1 => vocab - 1,
        // The first column of a tile, the last, and the first of the tile that the vocabulary does not fill.
        2 => any / tile * tile,
        3 => any / tile * tile + tile - 1,
        _ => (vocab - 1) / tile * tile,
    };
    at.min(vocab - 1)
}

/// Finds the first id from `id` on that is in the support; `id` itself if the support is empty.
pub(super) fn within_support(spec: &LossSpec, vocab: usize, id: usize) -> usize {
    let columns = spec.support.vocab.unwrap_or(vocab).min(vocab);
    let inside = (id..id + columns).map(|id| id % columns).find(|id| !spec.support.excluded_ids.contains(id));
    inside.unwrap_or(id)
}

/// Draws a mask `[B,T]`: completions end at random lengths, some sequences are empty, and a few tokens inside do not count, as in tool
/// calls.
///
/// In a designed regime every other sequence is padded on the left, and only the last of several is empty.
pub(super) fn ragged_mask(regime: Regime, rng: &mut ChaCha8Rng, batch: usize, tokens: usize) -> Array2<bool> {
    let mut mask = Array2::from_elem((batch, tokens), false);
    if regime.is_designed() {
        for (b, mut row) in mask.rows_mut().into_iter().enumerate() {
            if b > 1 && b == batch - 1 {
                continue;
            }
            let length = rng.random_range(tokens.div_ceil(2)..=tokens);
            // Every other sequence ends at the right edge, which is padding on the left; its first token always counts.
            let start = if b % 2 == 1 { tokens - length } else { 0 };
            let counts = |t: usize| t == start || !rng.random_bool(0.1);
            let drawn: Vec<bool> = (start..start + length).map(counts).collect();
            row.iter_mut().skip(start).zip(drawn).for_each(|(counts, drawn)| *counts = drawn);
        }
        return mask;
    }
    for mut row in mask.rows_mut() {
        let length = rng.random_range(0..=tokens);
        row.iter_mut().take(length).for_each(|counts| *counts = !rng.random_bool(0.1));
    }
    mask[[rng.random_range(0..batch), 0]] = true;
    mask
}

/// Replaces every masked input by NaN, and masked ids by −100: a kernel that reads one of them shows it.
pub(super) fn put_garbage_under_the_mask(spec: &LossSpec, problem: &mut Problem) {
    let mask = &problem.mask;
    Zip::from(&mut problem.ids).and(mask).for_each(|id, &counts| {
        if !counts {
            *id = -100;
        }
    });
    let garbage = |array: &mut Array2<f64>| {
        Zip::from(array).and(mask).for_each(|x, &counts| {
            if !counts {
                *x = f64::NAN;
            }
        });
    };
    let Extra { rollout_logp, rollout_weights, token_weights, dentropy, temperature, .. } = &mut problem.extra;
    for array in [&mut problem.old_logp, &mut problem.ref_logp, rollout_logp, dentropy].into_iter().flatten() {
        garbage(array);
    }
    // VESPO may read the weights of masked tokens.
    let read = matches!(&spec.objective, Objective::Vespo(Vespo { weights_of_masked_tokens: true, .. }));
    if let Some(weights) = rollout_weights.as_mut().filter(|weights| !read && weights.dim() == mask.dim()) {
        garbage(weights);
    }
    for array in [token_weights, temperature].into_iter().flatten().filter(|array| array.dim() == mask.dim()) {
        garbage(array);
    }
    if let Advantages::Token(advantages) | Advantages::Dlogp(advantages) = &mut problem.advantages {
        garbage(advantages);
    }
    if let Some(OtherIds { ids, dlogp }) = &mut problem.extra.others {
        for ((b, t, k), dlogp) in dlogp.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]) {
            (ids[[b, t, k]], *dlogp) = (-100, f64::NAN);
        }
    }
    // An id that no vocabulary has, at all places.
    if let Some(kept) = &mut problem.extra.kept_ids {
        kept.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]).for_each(|(_, id)| *id = -100);
    }
    if let Some(Teacher::TopK(TeacherTopK { ids, .. })) = &mut problem.extra.teacher {
        ids.indexed_iter_mut().filter(|((b, t, _), _)| !mask[[*b, *t]]).for_each(|(_, id)| *id = -100);
    }
    for ((b, t), &counts) in mask.indexed_iter() {
        if !counts {
            if let Some(teacher) = &mut problem.extra.teacher {
                teacher.floats_mut().fill_row(b, t, f64::NAN);
            }
            problem.logits.fill_row(b, t, f64::NAN);
        }
    }
}
