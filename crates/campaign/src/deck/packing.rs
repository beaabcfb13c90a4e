//! Cuts a row of tokens into packed sequences.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use assay_core::problem::CuSeqlens;

use super::features::LONG_PACK;

/// The length of the first sequence of long rows: one token more than a tile of tokens.
const PAST_A_TILE: usize = 129;

/// Cuts a row of `tokens` tokens into `sequences` sequences at random places. Even seeds empty one of them, and in two of three
/// draws some tokens after the last sequence belong to none. In a long row the first sequence ends one token past a tile of 128.
pub(super) fn cu_seqlens(seed: u64, [sequences, tokens]: [usize; 2]) -> CuSeqlens {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Draws of their own: the problem is that of its recipe, cut otherwise.
    rng.set_stream(2);
    // Leave up to a quarter of the row after the last sequence, and cut the remainder at random.
    let after = if rng.random_range(0..3) > 0 { rng.random_range(0..=tokens / 4) } else { 0 };
    let end = tokens - after;
    let mut ends: Vec<usize> = (1..sequences).map(|_| rng.random_range(0..=end)).chain([end]).collect();
    ends.sort_unstable();
    // Empty one sequence by moving its end back to its start.
    if sequences > 1 && seed.is_multiple_of(2) {
        let empty = rng.random_range(1..sequences);
        ends[empty - 1] = ends[empty];
    }
    if sequences > 1 && tokens >= LONG_PACK {
        // Ends before that one leave empty sequences behind it.
        for end in &mut ends {
            *end = (*end).max(PAST_A_TILE);
        }
        ends[0] = PAST_A_TILE;
    }
    let starts = std::iter::once(0).chain(ends.iter().copied());
    CuSeqlens::from_lengths(ends.iter().zip(starts).map(|(end, start)| end - start))
}
