//! Parts of a problem: some of its sequences, tokens, columns and hidden units.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, Axis, Ix3};

use super::{
    Advantages, CuSeqlens, Extra, FloatArray, HeadLayout, HeadProblem, OtherIds, Problem, Projection, Sequences,
};

/// Which part: indices in the order in which they shall stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemPart {
    /// Sequences: rows, or those that are packed into the one row.
    pub batch: Vec<usize>,
    /// Tokens, the same of every row. Of a packed batch those are in the part whose sequence is, and those of none.
    pub tokens: Vec<usize>,
    /// Columns of the vocabulary.
    pub columns: Vec<usize>,
}

impl ProblemPart {
    /// All `sequences` of `[sequences,tokens,vocab]`, or of the packed `[1,tokens,vocab]`.
    pub fn whole([sequences, tokens, vocab]: [usize; 3]) -> Self {
        Self { batch: (0..sequences).collect(), tokens: (0..tokens).collect(), columns: (0..vocab).collect() }
    }
}

/// Where the tokens of another batch stand in this one.
pub(super) trait Gather {
    /// Of a `[B,T]` array.
    fn tokens<T: Clone>(&self, array: &Array2<T>) -> Array2<T>;
    /// Of a `[B,T,n]` array.
    fn several<T: Clone>(&self, array: &Array3<T>) -> Array3<T>;
    /// Of one number a sequence.
    fn sequences(&self, array: &Array1<f64>) -> Array1<f64>;
}

/// Of rows, each a sequence.
struct PaddedPlaces<'p>(&'p ProblemPart);

impl Gather for PaddedPlaces<'_> {
    fn tokens<T: Clone>(&self, array: &Array2<T>) -> Array2<T> {
        array.select(Axis(0), &self.0.batch).select(Axis(1), &self.0.tokens).as_standard_layout().into_owned()
    }

    fn several<T: Clone>(&self, array: &Array3<T>) -> Array3<T> {
        array.select(Axis(0), &self.0.batch).select(Axis(1), &self.0.tokens).as_standard_layout().into_owned()
    }

    fn sequences(&self, array: &Array1<f64>) -> Array1<f64> {
        array.select(Axis(0), &self.0.batch)
    }
}

/// Of sequences in one row.
pub(super) struct Places {
    /// Where each token is.
    pub(super) tokens: Vec<(usize, usize)>,
    /// Which sequences there are.
    pub(super) sequences: Vec<usize>,
}

impl Places {
    /// Those of a part of a packed batch, and where its sequences lie: the tokens of one after those of another, behind the last
    /// those that belong to none.
    fn from_part(cu_seqlens: &CuSeqlens, part: &ProblemPart) -> (Self, CuSeqlens) {
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

    fn sequences(&self, array: &Array1<f64>) -> Array1<f64> {
        array.select(Axis(0), &self.sequences)
    }
}

impl<L> Problem<L> {
    /// What a `[B,T,…]` array has of `part`, its last axis whole.
    fn gather_part(&self, array: &FloatArray<Ix3>, part: &ProblemPart) -> FloatArray<Ix3> {
        match &self.extra.sequences {
            Sequences::Rows => array.select(Axis(0), &part.batch).select(Axis(1), &part.tokens),
            Sequences::Packed(cu_seqlens) => array.at_places(&Places::from_part(cu_seqlens, part).0.tokens),
        }
    }

    /// The batch of the tokens that `places` gathers, over all columns, with other logits.
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
        } = &self.extra;
        let floats = |array: &Option<Array2<f64>>| array.as_ref().map(|array| places.tokens(array));
        let one_a_token_or_sequence = |array: &Option<Array2<f64>>| match array {
            // One a sequence stays so, a column.
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
            },
        }
    }

    /// The sequences and tokens of `part` over all columns, with other logits.
    fn with_tokens<M>(&self, part: &ProblemPart, logits: M) -> Problem<M> {
        match &self.extra.sequences {
            Sequences::Rows => self.gathered(&PaddedPlaces(part), Sequences::Rows, logits),
            Sequences::Packed(cu_seqlens) => {
                let (places, within) = Places::from_part(cu_seqlens, part);
                self.gathered(&places, Sequences::Packed(within), logits)
            }
        }
    }

    /// The part without its logits. An id whose column is left out becomes −1, which is none: such a token no longer counts.
    fn select_tokens<M>(&self, part: &ProblemPart, logits: M) -> Problem<M> {
        let column = |id: &i64| part.columns.iter().position(|column| i64::try_from(*column) == Ok(*id));
        let mut problem = self.with_tokens(part, logits);
        let renamed = |id: i64| column(&id).map_or(-1, |v| i64::try_from(v).expect("a column"));
        problem.ids.mapv_inplace(renamed);
        problem.mask.zip_mut_with(&problem.ids, |counts, id| *counts &= *id >= 0);
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
    /// Its sequences `rows`, and of each the first `width` tokens; of packed ones all tokens where they
    /// [lie](Sequences::block).
    ///
    /// # Panics
    /// Where either is beyond its axis.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>, width: usize) -> Self {
        let tokens = match &self.extra.sequences {
            Sequences::Rows => 0..width,
            packed @ Sequences::Packed(_) => packed.block(rows.clone(), self.mask.dim()).1,
        };
        self.with_tokens(&ProblemPart { batch: rows.collect(), tokens: tokens.collect(), columns: Vec::new() }, ())
    }
}

impl Problem {
    /// The part of it, a problem of its own. A token whose sampled column is left out no longer counts.
    ///
    /// # Panics
    /// Where an index is beyond its axis.
    #[must_use]
    pub fn select(&self, part: &ProblemPart) -> Self {
        self.select_tokens(part, self.gather_part(&self.logits, part).select(Axis(2), &part.columns))
    }
}

impl HeadProblem {
    /// The part of it with the hidden `units` named. A token whose sampled column is left out no longer counts.
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
