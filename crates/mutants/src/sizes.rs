//! Bugs that some sizes alone show: tiles of columns, blocks of tokens, and grids of rows, as kernels of others cut them.

use crate::bank::Bug;
use crate::launch::SpecimenLaunch;

/// Programs of a persistent grid, as many as an H100 has multiprocessors.
const PROGRAMS: usize = 132;

/// Columns that a persistent grid still reads from its second row on.
const READ: usize = 1_024;

/// Sequences after which the advantages are read from the first again.
const SEQUENCES: usize = 32;

/// The sizes of a batch on which tiles, blocks and grids depend.
#[derive(Clone, Copy, Debug)]
pub struct BatchSizes {
    /// Sequences, which may lie in one row.
    pub sequences: usize,
    /// Tokens of a row, `T`.
    pub tokens: usize,
    /// The number of logits rows, `B·T`.
    pub rows: usize,
    /// The number of vocabulary entries, `V`.
    pub vocab: usize,
}

impl Bug {
    /// Whether a batch of these sizes can show the bug; `None` if it does not depend on sizes alone.
    ///
    /// ```
    /// use assay_mutants::{BatchSizes, Bug};
    ///
    /// let sizes = BatchSizes { sequences: 2, tokens: 33, rows: 66, vocab: 257 };
    /// assert_eq!(Bug::TokenTailOf32Lost.is_shown_by(sizes), Some(true));
    /// assert_eq!(Bug::FullTileLost.is_shown_by(sizes), Some(false));
    /// assert_eq!(Bug::MaskShifted.is_shown_by(sizes), None);
    /// ```
    pub fn is_shown_by(self, BatchSizes { sequences, tokens, rows, vocab }: BatchSizes) -> Option<bool> {
        let of_columns = || self.full_tile().map(|tile| vocab.is_multiple_of(tile));
        let of_one_column = || self.one_column_tile().map(|tile| vocab > tile && vocab % tile == 1);
        let of_tokens = || self.token_block().map(|block| tokens > block && !tokens.is_multiple_of(block));
        let of_grid = || match self {
            Bug::AdvantageOfRowModulo32 => Some(sequences > SEQUENCES),
            Bug::PersistentGridDropsColumns => Some(rows > PROGRAMS && vocab > READ),
            _ => None,
        };
        of_columns().or_else(of_one_column).or_else(of_tokens).or_else(of_grid)
    }

    /// Returns the width of the tiles whose last one is lost if it is full.
    fn full_tile(self) -> Option<usize> {
        match self {
            Bug::FullTileLost => Some(256),
            Bug::FullTileOf1024Lost => Some(1_024),
            Bug::FullTileOf4096Lost => Some(4_096),
            Bug::FullTileOf8192Lost => Some(8_192),
            Bug::FullTileOf16384Lost => Some(16_384),
            _ => None,
        }
    }

    /// Returns the width of the tiles after which a single column is lost.
    fn one_column_tile(self) -> Option<usize> {
        match self {
            Bug::OneColumnTailLost => Some(256),
            Bug::OneColumnTailOf4096Lost => Some(4_096),
            _ => None,
        }
    }

    /// Returns the length of the blocks of tokens whose last one loses its gradient if it is not full.
    fn token_block(self) -> Option<usize> {
        match self {
            Bug::TokenTailOf32Lost => Some(32),
            Bug::TokenTailOf128Lost => Some(128),
            _ => None,
        }
    }
}

impl SpecimenLaunch<'_> {
    /// Returns the first column that is lost in the row of logits that begins at `row`; `V` if none is.
    pub(crate) fn first_lost_column(&self, row: usize) -> usize {
        let vocab = self.shape.vocab;
        let Some(bug) = self.bug else { return vocab };
        match () {
            () if bug.full_tile().is_some_and(|tile| vocab.is_multiple_of(tile)) => {
                vocab - bug.full_tile().unwrap_or_default()
            }
            () if bug.one_column_tile().is_some_and(|tile| vocab > tile && vocab % tile == 1) => vocab - 1,
            () if bug == Bug::PersistentGridDropsColumns && row / vocab >= PROGRAMS => READ.min(vocab),
            () => vocab,
        }
    }

    /// Whether token `t` of a row is in a block of tokens that loses its gradient.
    pub(crate) fn is_in_lost_block(&self, t: usize) -> bool {
        let tokens = self.shape.tokens;
        let lost = |block: usize| tokens > block && t >= tokens - tokens % block;
        self.bug.and_then(Bug::token_block).is_some_and(lost)
    }

    /// Returns the sequence whose advantage sequence `index` has.
    pub(crate) fn advantage_row(&self, index: usize) -> usize {
        if self.has(Bug::AdvantageOfRowModulo32) { index % SEQUENCES } else { index }
    }
}
