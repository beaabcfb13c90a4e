//! The vocabulary entries that a sampler has kept for each token, as top-k, top-p and min-p keep them.

use ndarray::{Array2, Array3, ArrayView1, ArrayView2, ArrayView3, Axis, s};

use super::{ProblemError, Shape, Tokens};
use crate::spec::{LossSpec, Support};

/// The id in `kept_ids` that fills up a set of fewer than `K` entries.
pub const NO_ENTRY: i32 = -1;

/// Returns the vocabulary entries of a token's kept set, in ascending order: those of `kept_ids` that are in the rest of
/// the support, and the token's `own` id if the support says `keep_sampled`.
pub fn kept_entries(support: &Support, kept_ids: ArrayView1<i32>, own: i64) -> Vec<usize> {
    let ids = kept_ids.iter().filter_map(|id| usize::try_from(*id).ok());
    let own = usize::try_from(own).ok().filter(|_| support.keep_sampled);
    let mut entries: Vec<usize> = ids.filter(|id| support.has(*id)).chain(own).collect();
    entries.sort_unstable();
    entries.dedup();
    entries
}

/// Checks that the kept sets `[B,T,K]` of unmasked tokens are of entries of a vocabulary of `vocab`, each once.
///
/// # Errors
/// [`ProblemError`] naming the first place that is wrong.
///
/// # Panics
/// If `kept_ids` and `mask` differ in `[B,T]`.
pub fn check_kept_ids(kept_ids: ArrayView3<i32>, mask: ArrayView2<bool>, vocab: usize) -> Result<(), ProblemError> {
    let mut seen = Vec::with_capacity(kept_ids.dim().2);
    for ((b, t), _) in mask.indexed_iter().filter(|(_, counts)| **counts) {
        seen.clear();
        for (k, &id) in kept_ids.slice(s![b, t, ..]).iter().enumerate().filter(|(_, id)| **id != NO_ENTRY) {
            if usize::try_from(id).is_ok_and(|id| id < vocab) {
                seen.push((id, k));
            } else {
                return Err(ProblemError::KeptIdOutOfRange { b, t, k, id: id.into(), vocab });
            }
        }
        // Equal ids are neighbours in order, the one that comes first in the set first.
        seen.sort_unstable();
        let twice = seen.windows(2).filter(|pair| pair[0].0 == pair[1].0).min_by_key(|pair| pair[1].1);
        if let Some(&[(id, first), (_, k)]) = twice {
            return Err(ProblemError::KeptTwice { b, t, k, id, first });
        }
    }
    Ok(())
}

impl Tokens<'_> {
    /// Returns the vocabulary entries in the kept set of the unmasked token `[b,t]`, as the function [`kept_entries`]; `None` if the
    /// spec has no kept sets.
    pub fn kept_entries(&self, spec: &LossSpec, (b, t): (usize, usize)) -> Option<Vec<usize>> {
        let kept = self.extra.kept_ids.as_ref().filter(|_| spec.reads_kept_ids())?;
        Some(kept_entries(&spec.support, kept.slice(s![b, t, ..]), self.ids[[b, t]]))
    }

    /// Checks that each unmasked token has a kept set, of entries of the vocabulary, each once.
    pub(super) fn check_kept(&self, spec: &LossSpec, shape: Shape) -> Result<(), ProblemError> {
        if !spec.reads_kept_ids() {
            return Ok(());
        }
        let Shape { batch, tokens, vocab } = shape;
        let Some(kept) = &self.extra.kept_ids else {
            return Err(ProblemError::NoKeptIds { batch, tokens });
        };
        let (rows, columns, count) = kept.dim();
        if (rows, columns) != (batch, tokens) || count == 0 {
            let expected = format!("[{batch}, {tokens}, K] with K ≥ 1");
            return Err(ProblemError::Shape { field: "kept_ids", given: kept.shape().to_vec(), expected });
        }
        check_kept_ids(kept.view(), self.mask.view(), vocab)
    }
}

/// Narrows the `kept_ids` of a vocabulary of `vocab` entries to 32 bits; an id of a masked token that does not fit becomes −1.
///
/// # Errors
/// [`ProblemError::KeptIdOutOfRange`] at the first id of an unmasked token that does not fit.
///
/// # Panics
/// If `kept_ids` and `mask` differ in `[B,T]`.
pub fn narrowed_kept_ids(
    kept_ids: &Array3<i64>,
    mask: &Array2<bool>,
    vocab: usize,
) -> Result<Array3<i32>, ProblemError> {
    let mut narrowed = Array3::from_elem(kept_ids.dim(), NO_ENTRY);
    for ((b, t, k), &id) in kept_ids.indexed_iter() {
        match i32::try_from(id) {
            Ok(id) => narrowed[[b, t, k]] = id,
            Err(_) if mask[[b, t]] => return Err(ProblemError::KeptIdOutOfRange { b, t, k, id, vocab }),
            Err(_) => {}
        }
    }
    Ok(narrowed)
}

/// Gives the ids of entries that `place` still finds their new numbers, and no entry to the others. Of the places of a set, those
/// that are empty in all sets are left out, but for one.
pub(super) fn renumbered(kept: &Array3<i32>, place: impl Fn(usize) -> Option<usize>) -> Array3<i32> {
    let renumbered = kept.mapv(|id| {
        let new = usize::try_from(id).ok().and_then(&place);
        new.map_or(NO_ENTRY, |id| i32::try_from(id).expect("at most the old number"))
    });
    let mut filled: Vec<usize> =
        (0..kept.dim().2).filter(|&k| renumbered.index_axis(Axis(2), k).iter().any(|id| *id != NO_ENTRY)).collect();
    if filled.is_empty() {
        filled.push(0);
    }
    renumbered.select(Axis(2), &filled).as_standard_layout().into_owned()
}
