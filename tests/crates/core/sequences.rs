//! Packed sequences: cumulative lengths and segment ids.

use assay::problem::{CuSeqlens, Sequences};
use ndarray::{Array2, arr2};

#[test]
fn cu_seqlens_wrong_value_is_refused_by_index() {
    let error = |values: &[i64]| CuSeqlens::new(values).unwrap_err().to_string();
    assert_eq!(error(&[0]), "`cu_seqlens`: got shape [1], expected [S+1] with S ≥ 1: 0, and where each sequence ends");
    assert_eq!(error(&[1, 2]), "`cu_seqlens[0]`: got 1, expected 0, where the first sequence begins");
    assert_eq!(
        error(&[0, 4, 3]),
        "`cu_seqlens[2]`: got 3, expected at least 4: sequence 1 cannot end before it begins"
    );
    assert_eq!(error(&[0, -1]), "`cu_seqlens[1]`: got -1, expected at least 0: sequence 0 cannot end before it begins");
    let beyond = Sequences::Packed(CuSeqlens::new(&[0, 2, i64::MAX]).unwrap());
    assert_eq!(
        beyond.check(&Array2::from_elem((1, 4), true)).unwrap_err().to_string(),
        format!("`cu_seqlens[2]`: got {}, expected at most N = 4, the number of tokens", i64::MAX)
    );
    let short = Sequences::Packed(CuSeqlens::new(&[0, 2, 3]).unwrap());
    assert_eq!(
        short.check(&Array2::from_elem((1, 4), true)).unwrap_err().to_string(),
        "`mask[0,3]`: got 1, expected 0: the last sequence of `cu_seqlens` ends at 3"
    );
    assert_eq!(short.check(&arr2(&[[true, false, true, false]])), Ok(()));
    assert_eq!(
        short.check(&Array2::from_elem((2, 4), true)).unwrap_err().to_string(),
        "`mask`: got shape [2, 4], expected [1,N], as `cu_seqlens` packs sequences into one row: concatenate several rows, and \
         add their lengths to the ends"
    );
}

#[test]
fn cu_seqlens_owner_skips_empty_sequences() {
    let cu_seqlens = CuSeqlens::new(&[0, 0, 2, 2, 5, 5]).unwrap();
    let owners: Vec<Option<usize>> = (0..7).map(|t| cu_seqlens.owner(t)).collect();
    assert_eq!(owners, [Some(1), Some(1), Some(3), Some(3), Some(3), None, None]);
    assert_eq!(CuSeqlens::from_lengths([0, 2, 0, 3, 0]), cu_seqlens);
}

#[test]
fn segment_ids_become_cumulative_lengths() {
    let of = |ids: &[i64]| {
        CuSeqlens::from_segment_ids(ids, &Array2::from_shape_fn((1, ids.len()), |(_, t)| ids[t] != 0))
            .map(|cu| cu.values().to_vec())
            .map_err(|e| e.to_string())
    };
    assert_eq!(of(&[1, 1, 2, 3, 3]), Ok(vec![0, 2, 3, 5]));
    // Padding between two sequences belongs to the first, padding after the last to none, and sequence 2 is empty.
    assert_eq!(of(&[0, 1, 0, 3, 3, 0]), Ok(vec![0, 3, 3, 5]));
    assert_eq!(of(&[2, 2]), Ok(vec![0, 0, 2]));
    assert_eq!(
        of(&[2, 1]).unwrap_err(),
        "`segment_ids[1]`: got 1, expected at least 2, the id of an earlier token: sequences are contiguous"
    );
    assert_eq!(
        of(&[-1]).unwrap_err(),
        "`segment_ids[0]`: got -1, expected 0 for padding, or the sequence's number from 1 on"
    );
    assert_eq!(of(&[1, 9]).unwrap_err(), "`segment_ids[1]`: got 9, expected at most 2, the number of tokens");
    let counts = Array2::from_elem((1, 3), true);
    assert_eq!(
        CuSeqlens::from_segment_ids(&[1, 0, 2], &counts).unwrap_err().to_string(),
        "`segment_ids[1]`: got 0, expected a sequence's number, 1 or more, on an unmasked token"
    );
    assert_eq!(of(&[0, 0]).unwrap_err(), "`segment_ids[0]`: got 0, expected a token of a sequence, 1 or more");
}
