//! Parts of a problem: some of its sequences, tokens, vocabulary entries and hidden units.

use std::collections::HashMap;
use std::ops::Range;

use ndarray::{Array1, Array2, Array3, Axis, Ix3};

use super::{
    Advantages, CuSeqlens, Extra, FloatArray, HeadLayout, HeadProblem, OtherIds, Problem, Projection, Sequences, kept,
};

/// The indices of a part of a problem, in the order in which the part has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemPart {
    /// The sequences of the part: rows, or indices of packed sequences.
    pub batch: Vec<usize>,
    /// The tokens of the part, the same for every row. In a packed batch a token is in the part if its sequence is, or
    /// if it belongs to none.
    pub tokens: Vec<usize>,
    /// The vocabulary entries of the part.
    pub columns: Vec<usize>,
}

impl ProblemPart {
    /// Returns the part that is everything: all `sequences` of `[sequences,tokens,vocab]`, or of the packed
    /// `[1,tokens,vocab]`.
    pub fn whole([sequences, tokens, vocab]: [usize; 3]) -> Self {
        Self { batch: (0..sequences).collect(), tokens: (0..tokens).collect(), columns: (0..vocab).collect() }
    }
}

/// A rule that gathers the tokens of another batch from the arrays of this one.
pub(super) trait Gather {
    /// Gathers the tokens of a `[B,T]` array.
    fn tokens<T: Clone>(&self, array: &Array2<T>) -> Array2<T>;
    /// Gathers the tokens of a `[B,T,n]` array.
    fn several<T: Clone>(&self, array: &Array3<T>) -> Array3<T>;
    /// Gathers the tokens of a `[B,T,n]` array of floats.
    fn floats(&self, array: &FloatArray<Ix3>) -> FloatArray<Ix3>;
    /// Gathers an array with one number per sequence.
    fn sequences(&self, array: &Array1<f64>) -> Array1<f64>;
}

/// The gathering of a batch whose rows are its sequences.
struct PaddedPlaces<'p>(&'p ProblemPart);

impl Gather for PaddedPlaces<'_> {
    fn tokens<T: Clone>(&self, array: &Array2<T>) -> Array2<T> {
        array.select(Axis(0), &self.0.batch).select(Axis(1), &self.0.tokens).as_standard_layout().into_owned()
    }

    // The rows of a token stay together along the last axis.
    fn several<T: Clone>(&self, array: &Array3<T>) -> Array3<T> {
        array.select(Axis(0), &self.0.batch).select(Axis(1), &self.0.tokens).as_standard_layout().into_owned()
    }

    fn floats(&self, array: &FloatArray<Ix3>) -> FloatArray<Ix3> {
        array.select(Axis(0), &self.0.batch).select(Axis(1), &self.0.tokens)
    }

    fn sequences(&self, array: &Array1<f64>) -> Array1<f64> {
        array.select(Axis(0), &self.0.batch)
    }
}

/// The gathering of packed sequences, or of rows into one row.
pub(super) struct Places {
    /// The position `(b, t)` of each gathered token, in order.
    pub(super) tokens: Vec<(usize, usize)>,
    /// The indices of the gathered sequences, in order.
    pub(super) sequences: Vec<usize>,
}

impl Places {
    /// Finds the tokens of a part of a packed batch, sequence after sequence and then those that belong to none, and
    /// the cumulative lengths of its sequences.
    fn from_part(cu_seqlens: &CuSeqlens, part: &ProblemPart) -> (Self, CuSeqlens) {
        // The tokens of each sequence that are in the part; the last list is of tokens that belong to none.
        let mut owned = vec![Vec::new(); cu_seqlens.count() + 1];
        for &t in &part.tokens {
            owned[cu_seqlens.owner(t).unwrap_or(cu_seqlens.count())].push((0, t));
        }
        let lengths = part.batch.iter().map(|&sequence| owned[sequence].len());
        let within = CuSeqlens::from_lengths(lengths);
        let behind = cu_seqlens.count();
        let tokens = part.batch.iter().chain([&behind]).flat_map(|&sequence| owned[sequence].iter().copied()).collect();
        (Self { tokens, sequences: part.batch.clone() }, within)
    }
}

impl Gather for Places {
    fn tokens<T: Clone>(&self, array: &Array2<T>) -> Array2<T> {
        let values = self.tokens.iter().map(|&at| array[at].clone()).collect();
        Array2::from_shape_vec((1, self.tokens.len()), values).expect("one entry a token")
    }

    fn several<T: Clone>(&self, array: &Array3<T>) -> Array3<T> {
        let count = array.dim().2;
        let values = self.tokens.iter().flat_map(|&(b, t)| (0..count).map(move |k| array[[b, t, k]].clone())).collect();
        Array3::from_shape_vec((1, self.tokens.len(), count), values).expect("as many entries a token")
    }

    fn floats(&self, array: &FloatArray<Ix3>) -> FloatArray<Ix3> {
        array.at_places(&self.tokens)
    }

    fn sequences(&self, array: &Array1<f64>) -> Array1<f64> {
        array.select(Axis(0), &self.sequences)
    }
}

impl<L> Problem<L> {
    /// Gathers the tokens of `part` from a `[B,T,…]` array, with its last axis whole.
    fn gather_part(&self, array: &FloatArray<Ix3>, part: &ProblemPart) -> FloatArray<Ix3> {
        match &self.extra.sequences {
            Sequences::Rows => array.select(Axis(0), &part.batch).select(Axis(1), &part.tokens),
            Sequences::Packed(cu_seqlens) => array.at_places(&Places::from_part(cu_seqlens, part).0.tokens),
        }
    }

    /// Gathers the tokens of `places` over all vocabulary entries, with other logits.
    pub(super) fn gathered<M>(&self, places: &impl Gather, sequences: Sequences, logits: M) -> Problem<M> {
        let Extra {
            rollout_logp,
            rollout_weights,
            token_weights,
            selected,
            bias,
            sequences: _,
            dentropy,
            temperature,
            others,
            kept_ids,
            teacher,
        } = &self.extra;
        let floats = |array: &Option<Array2<f64>>| array.as_ref().map(|array| places.tokens(array));
        // Arrays that may have one value per sequence keep that form.
        let one_a_token_or_sequence = |array: &Option<Array2<f64>>| match array {
            // One value per sequence remains a column.
            Some(column) if column.dim() != self.mask.dim() => {
                Some(places.sequences(&column.column(0).to_owned()).insert_axis(Axis(1)))
            }
            of_tokens => floats(of_tokens),
        };
        Problem {
            logits,
            ids: places.tokens(&self.ids),
            mask: places.tokens(&self.mask),
            advantages: match &self.advantages {
                Advantages::Sequence(advantages) => Advantages::Sequence(places.sequences(advantages)),
                Advantages::Token(advantages) => Advantages::Token(places.tokens(advantages)),
                Advantages::Dlogp(dlogp) => Advantages::Dlogp(places.tokens(dlogp)),
            },
            old_logp: floats(&self.old_logp),
            ref_logp: floats(&self.ref_logp),
            extra: Extra {
                rollout_logp: floats(rollout_logp),
                rollout_weights: one_a_token_or_sequence(rollout_weights),
                token_weights: one_a_token_or_sequence(token_weights),
                selected: selected.as_ref().map(|selected| places.tokens(selected)),
                bias: bias.clone(),
                sequences,
                dentropy: floats(dentropy),
                temperature: one_a_token_or_sequence(temperature),
                others: others
                    .as_ref()
                    .map(|OtherIds { ids, dlogp }| OtherIds { ids: places.several(ids), dlogp: places.several(dlogp) }),
                kept_ids: kept_ids.as_ref().map(|kept| places.several(kept)),
                teacher: teacher.as_ref().map(|teacher| teacher.gathered(places)),
            },
        }
    }

    /// Gathers the sequences and tokens of `part` over all vocabulary entries, with other logits.
    fn with_tokens<M>(&self, part: &ProblemPart, logits: M) -> Problem<M> {
        match &self.extra.sequences {
            Sequences::Rows => self.gathered(&PaddedPlaces(part), Sequences::Rows, logits),
            Sequences::Packed(cu_seqlens) => {
                let (places, within) = Places::from_part(cu_seqlens, part);
                self.gathered(&places, Sequences::Packed(within), logits)
            }
        }
    }

    /// Gathers the part without its logits. An id whose entry is left out becomes −1, and its token no longer counts.
    fn select_tokens<M>(&self, part: &ProblemPart, logits: M) -> Problem<M> {
        // Ids are renumbered to the entries that are left.
        let column = |id: &i64| part.columns.iter().position(|column| i64::try_from(*column) == Ok(*id));
        let mut problem = self.with_tokens(part, logits);
        let renamed = |id: i64| column(&id).map_or(-1, |v| i64::try_from(v).expect("a column"));
        problem.ids.mapv_inplace(renamed);
        problem.mask.zip_mut_with(&problem.ids, |counts, id| *counts &= *id >= 0);
        // A kept set has the entries that are left.
        if let Some(kept) = &mut problem.extra.kept_ids {
            let places: HashMap<usize, usize> = part.columns.iter().enumerate().map(|(new, old)| (*old, new)).collect();
            *kept = kept::renumbered(kept, |id| places.get(&id).copied());
        }
        if let Some(teacher) = &mut problem.extra.teacher {
            teacher.select_columns(&part.columns, &mut problem.mask);
        }
        // A token needs all of its ids to count.
        if let Some(others) = &mut problem.extra.others {
            others.ids.mapv_inplace(renamed);
            for ((b, t, _), id) in others.ids.indexed_iter() {
                problem.mask[[b, t]] &= *id >= 0;
            }
        }
        problem.extra.bias = problem.extra.bias.map(|bias| bias.select(Axis(0), &part.columns));
        problem
    }
}

impl Problem<()> {
    /// Returns the sequences `rows`, and of each the first `width` tokens; of packed sequences all tokens of their
    /// [block](Sequences::block).
    ///
    /// # Panics
    /// Where either is beyond its axis.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>, width: usize) -> Self {
        // Packed sequences have no width to cut: their block of tokens is taken instead.
        let tokens = match &self.extra.sequences {
            Sequences::Rows => 0..width,
            packed @ Sequences::Packed(_) => packed.block(rows.clone(), self.mask.dim()).1,
        };
        self.with_tokens(&ProblemPart { batch: rows.collect(), tokens: tokens.collect(), columns: Vec::new() }, ())
    }
}

impl Problem {
    /// Returns the part as a separate problem. A token whose sampled entry is left out no longer counts.
    ///
    /// # Panics
    /// Where an index is beyond its axis.
    #[must_use]
    pub fn select(&self, part: &ProblemPart) -> Self {
        self.select_tokens(part, self.gather_part(&self.logits, part).select(Axis(2), &part.columns))
    }
}

impl HeadProblem {
    /// Returns the part with the hidden `units` as a separate problem. A token whose sampled entry is left out no
    /// longer counts.
    ///
    /// # Panics
    /// Where an index is beyond its axis.
    #[must_use]
    pub fn select(&self, part: &ProblemPart, units: &[usize]) -> Self {
        let Projection { hidden, lm_head, layout, rounds_logits } = &self.logits;
        let [units_axis, columns_axis] = match layout {
            HeadLayout::HiddenByVocab => [Axis(0), Axis(1)],
            HeadLayout::VocabByHidden => [Axis(1), Axis(0)],
        };
        let lm_head = lm_head.select(units_axis, units).select(columns_axis, &part.columns);
        let hidden = self.gather_part(hidden, part).select(Axis(2), units);
        self.select_tokens(part, Projection { hidden, lm_head, layout: *layout, rounds_logits: *rounds_logits })
    }
}
