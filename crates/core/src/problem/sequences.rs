//! [`Sequences`]: which tokens of a batch make a sequence.
//!
//! Everything that a loss takes of a sequence (its length, its ratio, its mean, its advantage, whether it is empty) asks
//! here, and nothing else does: a token's logits are its own.

use std::ops::Range;

use ndarray::{Array1, Array2, s};

use super::select::Places;
use super::{Advantages, HeadProblem, Problem, ProblemError, Projection, Tokens};

/// Which tokens of `[B,T]` make a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sequences {
    /// Those of a row: `B` sequences of `T` tokens.
    #[default]
    Rows,
    /// Sequences lie one after another in one row, `B = 1`.
    Packed(CuSeqlens),
}

/// Cumulative lengths of `S` sequences, `[S+1]`: sequence `s` has the tokens `cu_seqlens[s]..cu_seqlens[s+1]`, which may
/// be none. It starts at 0, does not decrease, and may end before the tokens do: those behind belong to no sequence, and
/// the mask hides them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CuSeqlens(Array1<usize>);

/// The places of a sequence's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Which sequence it is.
    pub index: usize,
    /// The row that it lies in.
    pub row: usize,
    /// Its tokens there.
    pub tokens: Range<usize>,
}

impl Sequence {
    /// `(b, t)` of each token, in order.
    pub fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let row = self.row;
        self.tokens.clone().map(move |t| (row, t))
    }
}

impl CuSeqlens {
    /// Of `values`, `[S+1]`.
    ///
    /// # Errors
    /// [`ProblemError::Shape`] where there are fewer than two; [`ProblemError::CuSeqlens`] at the first that is wrong.
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
                format!("at least {}: sequence {} ends where it begins or behind", values[at - 1], at - 1),
            ));
        }
        Ok(Self(values.iter().map(|&end| usize::try_from(end).unwrap_or(usize::MAX)).collect()))
    }

    /// Of sequences of these lengths.
    pub fn from_lengths(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let ends = lengths.into_iter().map(|length| {
            end += length;
            end
        });
        Self(std::iter::once(0).chain(ends).collect())
    }

    /// Of segment ids, `[N]`: 1 for the tokens of the first sequence, 2 for those of the second, and so on; 0 for padding,
    /// which `mask`, `[1,N]`, hides, and which is a part of the sequence before it. An id that is passed over is an empty
    /// sequence.
    ///
    /// # Errors
    /// [`ProblemError::SegmentId`] at the first that is 0 on an unmasked token, negative, smaller than one before it or beyond
    /// `N`, or where all are 0.
    pub fn from_segment_ids(ids: &[i64], mask: &Array2<bool>) -> Result<Self, ProblemError> {
        let mut ends = vec![0];
        if let Some(t) = ids.iter().zip(mask).position(|(id, counts)| *id == 0 && *counts) {
            let expected = "a sequence's number, 1 or more, on an unmasked token".into();
            return Err(ProblemError::SegmentId { t, given: 0, expected });
        }
        for (t, &given) in ids.iter().enumerate().filter(|(_, id)| **id != 0) {
            let last = ends.len() - 1;
            let wrong = |expected: String| ProblemError::SegmentId { t, given, expected };
            let id = usize::try_from(given)
                .map_err(|_| wrong("0 for padding, or the sequence's number from 1 on".into()))?;
            if id > ids.len() {
                return Err(wrong(format!("at most {}, the number of tokens", ids.len())));
            }
            if id < last {
                return Err(wrong(format!(
                    "at least {last}, that of a token before it: sequences lie one after another"
                )));
            }
            if id > last {
                // Where the next begins, the last one ends, padding and all; what lies before the first is the first's.
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

    /// The values, `[S+1]`.
    pub fn values(&self) -> &Array1<usize> {
        &self.0
    }

    fn ends(&self) -> &[usize] {
        self.0.as_slice().expect("dense")
    }

    /// `S`.
    pub fn count(&self) -> usize {
        self.0.len() - 1
    }

    /// Where the last sequence ends.
    pub fn end(&self) -> usize {
        self.0[self.count()]
    }

    /// The sequence of token `t`; `None` behind the last.
    pub fn owner(&self, t: usize) -> Option<usize> {
        (t < self.end()).then(|| self.ends().partition_point(|&end| end <= t) - 1)
    }
}

impl Sequences {
    /// How many there are in `batch` rows.
    pub fn count(&self, batch: usize) -> usize {
        match self {
            Sequences::Rows => batch,
            Sequences::Packed(cu_seqlens) => cu_seqlens.count(),
        }
    }

    /// How many are packed into the one row; `None` where each row is one.
    pub fn packed(&self) -> Option<usize> {
        match self {
            Sequences::Rows => None,
            Sequences::Packed(cu_seqlens) => Some(cu_seqlens.count()),
        }
    }

    /// The places of each one's tokens in `[B,T]`, in order.
    pub fn places(&self, (batch, tokens): (usize, usize)) -> Vec<Sequence> {
        match self {
            Sequences::Rows => (0..batch).map(|row| Sequence { index: row, row, tokens: 0..tokens }).collect(),
            Sequences::Packed(cu_seqlens) => {
                let bounds = cu_seqlens.ends().windows(2).enumerate();
                bounds.map(|(index, ends)| Sequence { index, row: 0, tokens: ends[0]..ends[1] }).collect()
            }
        }
    }

    /// The sequence of token `[b,t]`, if it is of any.
    pub fn owner(&self, (b, t): (usize, usize)) -> Option<usize> {
        match self {
            Sequences::Rows => Some(b),
            Sequences::Packed(cu_seqlens) => cu_seqlens.owner(t),
        }
    }

    /// A number of each sequence in the places of its tokens, of which there are `dim`; 0 in those of none.
    pub fn spread(&self, dim: (usize, usize), of_sequences: &[f64]) -> Array2<f64> {
        let mut spread = Array2::zeros(dim);
        for sequence in self.places(dim) {
            sequence.places().for_each(|at| spread[at] = of_sequences[sequence.index]);
        }
        spread
    }

    /// Checks that they are of a batch of `[B,T]`, and that `mask` hides what belongs to none.
    ///
    /// # Errors
    /// The first that is longer than the batch, or the first unmasked token behind the last.
    pub fn check(&self, mask: &Array2<bool>) -> Result<(), ProblemError> {
        let Sequences::Packed(cu_seqlens) = self else { return Ok(()) };
        let (batch, tokens) = mask.dim();
        if batch != 1 {
            let expected =
                "[1,N], as `cu_seqlens` packs sequences into one row: lay several rows one after another, their ends \
                            counted on"
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
        match (cu_seqlens.end()..tokens).find(|&t| mask[[0, t]]) {
            Some(t) => Err(ProblemError::NoSequence { t, end: cu_seqlens.end() }),
            None => Ok(()),
        }
    }

    /// The rows and the tokens in which those `of` a batch of `[B,T]` lie: their rows, or of packed ones their tokens in the one
    /// row, with the last also those behind it.
    ///
    /// # Panics
    /// Where `of` is empty, or beyond what there are.
    pub fn block(&self, of: Range<usize>, (_, tokens): (usize, usize)) -> (Range<usize>, Range<usize>) {
        match self {
            Sequences::Rows => (of, 0..tokens),
            Sequences::Packed(cu_seqlens) => {
                let ends = cu_seqlens.ends();
                (0..1, ends[of.start]..if of.end == cu_seqlens.count() { tokens } else { ends[of.end] })
            }
        }
    }
}

impl Tokens<'_> {
    /// The places of each sequence's tokens, in order.
    pub fn sequences(&self) -> Vec<Sequence> {
        self.extra.sequences.places(self.mask.dim())
    }

    /// The advantage of a sequence, that of its first token where tokens have their own; 0 where it has neither.
    pub fn advantage_of(&self, sequence: &Sequence) -> f64 {
        match self.advantages {
            Advantages::Sequence(of_sequences) => of_sequences[sequence.index],
            Advantages::Token(_) | Advantages::Dlogp(_) => {
                sequence.places().next().map_or(0.0, |(b, t)| self.advantages.at(b, t))
            }
        }
    }

    /// The advantage of each token, `[B,T]`; 0 where it belongs to no sequence.
    pub fn advantages_of_tokens(&self) -> Array2<f64> {
        match self.advantages {
            Advantages::Token(of_tokens) => of_tokens.clone(),
            Advantages::Dlogp(dlogp) => -dlogp,
            Advantages::Sequence(of_sequences) => self.extra.sequences.spread(self.mask.dim(), &of_sequences.to_vec()),
        }
    }
}

impl<L> Problem<L> {
    /// The places of each sequence's tokens, in order.
    pub fn sequences(&self) -> Vec<Sequence> {
        self.tokens().sequences()
    }

    /// The advantage of token `[b,t]`; 0 where it belongs to no sequence.
    pub fn advantage(&self, at: (usize, usize)) -> f64 {
        match &self.advantages {
            Advantages::Token(of_tokens) => of_tokens[at],
            Advantages::Dlogp(dlogp) => -dlogp[at],
            Advantages::Sequence(of_sequences) => {
                self.extra.sequences.owner(at).map_or(0.0, |sequence| of_sequences[sequence])
            }
        }
    }

    /// Where the tokens are of this batch laid out in one row.
    fn row_after_row(&self) -> Places {
        let (batch, tokens) = self.mask.dim();
        Places {
            tokens: (0..batch * tokens).map(|i| (i / tokens, i % tokens)).collect(),
            sequences: (0..batch).collect(),
        }
    }

    /// The same of `count` sequences that lie so in its one row.
    fn with_cu_seqlens(mut self, cu_seqlens: CuSeqlens, count: usize) -> Self {
        assert_eq!(cu_seqlens.count(), count, "as many sequences as rows");
        self.mask.slice_mut(s![0, cu_seqlens.end()..]).fill(false);
        self.extra.sequences = Sequences::Packed(cu_seqlens);
        self
    }

    /// Where the tokens of a packed batch are here: of each sequence those up to the last that counts; the first of the
    /// first where none does.
    fn packed_places(&self) -> (CuSeqlens, Places) {
        let counts = |sequence: &Sequence| {
            let last = sequence.places().enumerate().filter(|(_, at)| self.mask[*at]).last();
            last.map_or(0, |(i, _)| i + 1)
        };
        let sequences = self.sequences();
        let mut lengths: Vec<usize> = sequences.iter().map(counts).collect();
        if lengths.iter().all(|length| *length == 0) {
            lengths[0] = 1;
        }
        let places = sequences.iter().zip(&lengths).flat_map(|(sequence, length)| sequence.places().take(*length));
        let places = Places { tokens: places.collect(), sequences: (0..lengths.len()).collect() };
        (CuSeqlens::from_lengths(lengths.iter().copied()), places)
    }
}

impl Problem {
    /// The same sequences packed, each without the tokens behind the last that counts; and where each token was.
    pub fn pack(&self) -> (Self, Vec<(usize, usize)>) {
        let (cu_seqlens, places) = self.packed_places();
        let logits = self.logits.at_places(&places.tokens);
        (self.gathered(&places, Sequences::Packed(cu_seqlens), logits), places.tokens)
    }

    /// The tokens of all rows in one, `[1,B·T]`, of which `cu_seqlens` makes as many sequences as there were rows, of other
    /// tokens: each has what the row of its number had beside them. What lies behind the last no longer counts.
    ///
    /// # Panics
    /// Where `cu_seqlens` has another number of sequences, or ends behind `B·T`.
    #[must_use]
    pub fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self {
        let logits = self.logits.in_one_row();
        self.gathered(&self.row_after_row(), Sequences::Rows, logits).with_cu_seqlens(cu_seqlens, self.mask.nrows())
    }
}

impl HeadProblem {
    /// The same sequences packed, each without the tokens behind the last that counts; and where each token was.
    pub fn pack(&self) -> (Self, Vec<(usize, usize)>) {
        let (cu_seqlens, places) = self.packed_places();
        let logits = Projection { hidden: self.logits.hidden.at_places(&places.tokens), ..self.logits.clone() };
        (self.gathered(&places, Sequences::Packed(cu_seqlens), logits), places.tokens)
    }

    /// As [`Problem::laid_out`].
    ///
    /// # Panics
    /// As [`Problem::laid_out`].
    #[must_use]
    pub fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self {
        let logits = Projection { hidden: self.logits.hidden.in_one_row(), ..self.logits.clone() };
        self.gathered(&self.row_after_row(), Sequences::Rows, logits).with_cu_seqlens(cu_seqlens, self.mask.nrows())
    }
}
