//! [`Sequences`]: the assignment of a batch's tokens to sequences.
//!
//! Everything that a loss reads of a sequence (length, ratio, mean, advantage, whether it is empty) is defined here and nowhere
//! else; a token's logits do not depend on it.

use std::ops::Range;

use ndarray::{Array1, Array2, s};

use super::select::Places;
use super::{Advantages, Problem, ProblemError, Tokens};

/// The assignment of the tokens of `[B,T]` to sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sequences {
    /// Each row is a sequence: `B` sequences of `T` tokens.
    #[default]
    Rows,
    /// The sequences are concatenated in one row, `B = 1`.
    Packed(CuSeqlens),
}

/// The cumulative lengths of `S` packed sequences, `[S+1]`. Sequence `s` has the tokens
/// `cu_seqlens[s]..cu_seqlens[s+1]`, possibly none. The values start at 0, do not decrease, and may end before the
/// tokens do: the tokens after the last sequence belong to none, and the mask must hide them.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::{CuSeqlens, Sequences};
/// use ndarray::Array2;
///
/// let cu_seqlens = CuSeqlens::new(&[0, 2, 2, 5])?;
/// assert_eq!((cu_seqlens.count(), cu_seqlens.owner(3)), (3, Some(2)));
/// assert_eq!(cu_seqlens, CuSeqlens::from_lengths([2, 0, 3]));
///
/// // The sixth token belongs to no sequence, and counts.
/// let packed = Sequences::Packed(cu_seqlens);
/// let error = packed.check(&Array2::from_elem((1, 6), true)).unwrap_err();
/// assert_eq!(error.to_string(), "`mask[0,5]`: got 1, expected 0: the last sequence of `cu_seqlens` ends at 5");
/// # Ok::<(), assay::problem::ProblemError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CuSeqlens(Array1<usize>);

/// The positions of one sequence's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The index of the sequence in its batch.
    pub index: usize,
    /// The row that contains the sequence.
    pub row: usize,
    /// The positions of its tokens in that row.
    pub tokens: Range<usize>,
}

impl Sequence {
    /// Lists the position `(b, t)` of each token, in order.
    pub fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let row = self.row;
        self.tokens.clone().map(move |t| (row, t))
    }
}

impl CuSeqlens {
    /// Checks and takes the cumulative lengths `values`, `[S+1]`.
    ///
    /// # Errors
    /// [`ProblemError::Shape`] for fewer than two values; [`ProblemError::CuSeqlens`] naming the first wrong one.
    pub fn new(values: &[i64]) -> Result<Self, ProblemError> {
        if values.len() < 2 {
            let expected = "[S+1] with S ≥ 1: 0, and where each sequence ends".into();
            return Err(ProblemError::Shape { field: "cu_seqlens", given: vec![values.len()], expected });
        }
        let wrong = |at: usize, expected: String| ProblemError::CuSeqlens { at, given: values[at], expected };
        if values[0] != 0 {
            return Err(wrong(0, "0, where the first sequence begins".into()));
        }
        if let Some(at) = (1..values.len()).find(|&at| values[at] < values[at - 1]) {
            return Err(wrong(
                at,
                format!("at least {}: sequence {} cannot end before it begins", values[at - 1], at - 1),
            ));
        }
        Ok(Self(values.iter().map(|&end| usize::try_from(end).unwrap_or(usize::MAX)).collect()))
    }

    /// Returns the cumulative lengths of sequences with these `lengths`.
    pub fn from_lengths(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let ends = lengths.into_iter().map(|length| {
            end += length;
            end
        });
        Self(std::iter::once(0).chain(ends).collect())
    }

    /// Converts segment ids, `[N]`: 1 for the tokens of the first sequence, 2 for those of the second, and so on.
    /// Padding has the id 0, must be hidden by `mask`, `[1,N]`, and becomes a part of the sequence before it. A skipped
    /// id is an empty sequence.
    ///
    /// # Errors
    /// [`ProblemError::SegmentId`] naming the first id that is 0 on an unmasked token, negative, smaller than an earlier one or
    /// above `N`; or if all ids are 0.
    pub fn from_segment_ids(ids: &[i64], mask: &Array2<bool>) -> Result<Self, ProblemError> {
        // `ends[s]` is the end of sequence `s`, with the sequences numbered from 1 as the ids are.
        let mut ends = vec![0];
        if let Some(t) = ids.iter().zip(mask).position(|(id, counts)| *id == 0 && *counts) {
            let expected = "a sequence's number, 1 or more, on an unmasked token".into();
            return Err(ProblemError::SegmentId { t, given: 0, expected });
        }
        for (t, &given) in ids.iter().enumerate().filter(|(_, id)| **id != 0) {
            // Ids must not decrease, since a sequence is one run of tokens.
            let last = ends.len() - 1;
            let wrong = |expected: String| ProblemError::SegmentId { t, given, expected };
            let id = usize::try_from(given)
                .map_err(|_| wrong("0 for padding, or the sequence's number from 1 on".into()))?;
            if id > ids.len() {
                return Err(wrong(format!("at most {}, the number of tokens", ids.len())));
            }
            if id < last {
                return Err(wrong(format!("at least {last}, the id of an earlier token: sequences are contiguous")));
            }
            if id > last {
                // A sequence ends where the next begins, padding included; padding before the first belongs to it.
                let begin = if last == 0 { 0 } else { t };
                ends[last] = begin;
                ends.resize(id, begin);
                ends.push(t + 1);
            } else {
                ends[id] = t + 1;
            }
        }
        if ends.len() < 2 {
            let expected = "a token of a sequence, 1 or more".into();
            return Err(ProblemError::SegmentId { t: 0, given: 0, expected });
        }
        Ok(Self(ends.into()))
    }

    /// Returns the cumulative lengths, `[S+1]`.
    pub fn values(&self) -> &Array1<usize> {
        &self.0
    }

    fn ends(&self) -> &[usize] {
        self.0.as_slice().expect("dense")
    }

    /// Returns the number of sequences, `S`.
    pub fn count(&self) -> usize {
        self.0.len() - 1
    }

    /// Returns the end of the last sequence, in tokens.
    pub fn end(&self) -> usize {
        self.0[self.count()]
    }

    /// Returns the sequence of token `t`; `None` for a token after the last sequence.
    pub fn owner(&self, t: usize) -> Option<usize> {
        // A binary search: the last sequence that begins at or before `t`, which skips empty ones.
        (t < self.end()).then(|| self.ends().partition_point(|&end| end <= t) - 1)
    }
}

impl Sequences {
    /// Returns the number of sequences in `batch` rows.
    pub fn count(&self, batch: usize) -> usize {
        match self {
            Sequences::Rows => batch,
            Sequences::Packed(cu_seqlens) => cu_seqlens.count(),
        }
    }

    /// Returns the number of packed sequences; `None` if each row is a sequence.
    pub fn packed(&self) -> Option<usize> {
        match self {
            Sequences::Rows => None,
            Sequences::Packed(cu_seqlens) => Some(cu_seqlens.count()),
        }
    }

    /// Lists the positions of each sequence's tokens in `[B,T]`, in order.
    pub fn places(&self, (batch, tokens): (usize, usize)) -> Vec<Sequence> {
        match self {
            Sequences::Rows => (0..batch).map(|row| Sequence { index: row, row, tokens: 0..tokens }).collect(),
            Sequences::Packed(cu_seqlens) => {
                // Neighbouring values of the cumulative lengths bound a sequence.
                let bounds = cu_seqlens.ends().windows(2).enumerate();
                bounds.map(|(index, ends)| Sequence { index, row: 0, tokens: ends[0]..ends[1] }).collect()
            }
        }
    }

    /// Returns the sequence of token `[b,t]`; `None` if it belongs to none.
    pub fn owner(&self, (b, t): (usize, usize)) -> Option<usize> {
        match self {
            Sequences::Rows => Some(b),
            Sequences::Packed(cu_seqlens) => cu_seqlens.owner(t),
        }
    }

    /// Repeats one number per sequence for each of its tokens, as `[B,T]` of shape `dim`; tokens that belong to no
    /// sequence get 0.
    pub fn spread(&self, dim: (usize, usize), of_sequences: &[f64]) -> Array2<f64> {
        let mut spread = Array2::zeros(dim);
        for sequence in self.places(dim) {
            sequence.places().for_each(|at| spread[at] = of_sequences[sequence.index]);
        }
        spread
    }

    /// Checks that the sequences fit a batch of `[B,T]`, and that `mask` hides the tokens that belong to none.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first sequence that is longer than the batch, or the first unmasked token after the last sequence.
    pub fn check(&self, mask: &Array2<bool>) -> Result<(), ProblemError> {
        // Rows need no check: every token belongs to the sequence of its row.
        let Sequences::Packed(cu_seqlens) = self else { return Ok(()) };
        let (batch, tokens) = mask.dim();
        if batch != 1 {
            let expected =
                "[1,N], as `cu_seqlens` packs sequences into one row: concatenate several rows, and add their \
                            lengths to the ends"
                    .into();
            return Err(ProblemError::Shape { field: "mask", given: vec![batch, tokens], expected });
        }
        let values = cu_seqlens.ends();
        if let Some(at) = values.iter().position(|&end| end > tokens) {
            let given = i64::try_from(values[at]).unwrap_or(i64::MAX);
            return Err(ProblemError::CuSeqlens {
                at,
                given,
                expected: format!("at most N = {tokens}, the number of tokens"),
            });
        }
        // Padding after the last sequence is allowed if it is masked.
        match (cu_seqlens.end()..tokens).find(|&t| mask[[0, t]]) {
            Some(t) => Err(ProblemError::NoSequence { t, end: cu_seqlens.end() }),
            None => Ok(()),
        }
    }

    /// Returns the rows and the token positions of the sequences `of` in a batch of `[B,T]`: their rows, or for packed
    /// sequences their tokens in the one row, with the tokens after the last sequence if it is among them.
    ///
    /// # Panics
    /// If `of` is empty or out of range.
    pub fn block(&self, of: Range<usize>, (_, tokens): (usize, usize)) -> (Range<usize>, Range<usize>) {
        match self {
            Sequences::Rows => (of, 0..tokens),
            Sequences::Packed(cu_seqlens) => {
                let ends = cu_seqlens.ends();
                // The last part takes the tokens after the last sequence, so that the parts cover the row.
                (0..1, ends[of.start]..if of.end == cu_seqlens.count() { tokens } else { ends[of.end] })
            }
        }
    }
}

impl Tokens<'_> {
    /// Lists the positions of each sequence's tokens, in order.
    pub fn sequences(&self) -> Vec<Sequence> {
        self.extra.sequences.places(self.mask.dim())
    }

    /// Returns the advantage of a sequence, or of its first token if tokens have their own; 0 if it has neither.
    pub fn advantage_of(&self, sequence: &Sequence) -> f64 {
        match self.advantages {
            Advantages::Sequence(of_sequences) => of_sequences[sequence.index],
            Advantages::Token(_) | Advantages::Dlogp(_) => {
                sequence.places().next().map_or(0.0, |(b, t)| self.advantages.at(b, t))
            }
        }
    }

    /// Returns the advantage of each token, `[B,T]`; 0 for a token that belongs to no sequence.
    pub fn advantages_of_tokens(&self) -> Array2<f64> {
        match self.advantages {
            Advantages::Token(of_tokens) => of_tokens.clone(),
            Advantages::Dlogp(dlogp) => -dlogp,
            Advantages::Sequence(of_sequences) => self.extra.sequences.spread(self.mask.dim(), &of_sequences.to_vec()),
        }
    }
}

impl<L> Problem<L> {
    /// Lists the positions of each sequence's tokens, in order.
    pub fn sequences(&self) -> Vec<Sequence> {
        self.tokens().sequences()
    }

    /// Returns the advantage of token `[b,t]`; 0 for a token that belongs to no sequence.
    pub fn advantage(&self, at: (usize, usize)) -> f64 {
        match &self.advantages {
            Advantages::Token(of_tokens) => of_tokens[at],
            Advantages::Dlogp(dlogp) => -dlogp[at],
            Advantages::Sequence(of_sequences) => {
                self.extra.sequences.owner(at).map_or(0.0, |sequence| of_sequences[sequence])
            }
        }
    }

    /// Returns the positions of all tokens, row after row.
    fn row_after_row(&self) -> Places {
        let (batch, tokens) = self.mask.dim();
        Places {
            tokens: (0..batch * tokens).map(|i| (i / tokens, i % tokens)).collect(),
            sequences: (0..batch).collect(),
        }
    }

    /// Cuts the one row of this batch into `count` sequences, and masks the tokens after the last.
    fn with_cu_seqlens(mut self, cu_seqlens: CuSeqlens, count: usize) -> Self {
        assert_eq!(cu_seqlens.count(), count, "as many sequences as rows");
        self.mask.slice_mut(s![0, cu_seqlens.end()..]).fill(false);
        self.extra.sequences = Sequences::Packed(cu_seqlens);
        self
    }

    /// Finds the tokens that packing keeps: of each sequence those up to the last unmasked one, or the very first token
    /// if none counts.
    fn packed_places(&self) -> (CuSeqlens, Places) {
        // The length of a sequence after packing is the position after its last unmasked token.
        let counts = |sequence: &Sequence| {
            let last = sequence.places().enumerate().filter(|(_, at)| self.mask[*at]).last();
            last.map_or(0, |(i, _)| i + 1)
        };
        let sequences = self.sequences();
        let mut lengths: Vec<usize> = sequences.iter().map(counts).collect();
        // A batch needs at least one token, even if none counts.
        if lengths.iter().all(|length| *length == 0) {
            lengths[0] = 1;
        }
        let places = sequences.iter().zip(&lengths).flat_map(|(sequence, length)| sequence.places().take(*length));
        let places = Places { tokens: places.collect(), sequences: (0..lengths.len()).collect() };
        (CuSeqlens::from_lengths(lengths.iter().copied()), places)
    }

    /// Packs the sequences, with the logits that `logits` makes of the places of the tokens; also returns the places.
    pub(crate) fn packed<M>(&self, logits: impl FnOnce(&[(usize, usize)]) -> M) -> (Problem<M>, Vec<(usize, usize)>) {
        let (cu_seqlens, places) = self.packed_places();
        let packed = self.gathered(&places, Sequences::Packed(cu_seqlens), logits(&places.tokens));
        (packed, places.tokens)
    }

    /// Concatenates the tokens of all rows and cuts them by `cu_seqlens`, with other logits.
    pub(crate) fn in_one_row<M>(&self, logits: M, cu_seqlens: CuSeqlens) -> Problem<M> {
        self.gathered(&self.row_after_row(), Sequences::Rows, logits).with_cu_seqlens(cu_seqlens, self.mask.nrows())
    }
}
