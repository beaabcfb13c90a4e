//! Parts of a problem: some of its sequences, tokens, columns and hidden units.

use std::ops::Range;

use ndarray::{Array2, Axis, Ix3};

use super::{Advantages, Extra, FloatArray, HeadLayout, HeadProblem, Problem, Projection, Sequences};

/// Which part: indices in the order in which they shall stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Sequences.
    pub batch: Vec<usize>,
    /// Tokens, the same of every row; where sequences are packed into one, they ascend.
    pub tokens: Vec<usize>,
    /// Columns of the vocabulary.
    pub columns: Vec<usize>,
}

impl Part {
    /// All of `[B,T,V]`.
    pub fn whole([batch, tokens, vocab]: [usize; 3]) -> Self {
        Self { batch: (0..batch).collect(), tokens: (0..tokens).collect(), columns: (0..vocab).collect() }
    }
}

/// A `[B,T]` array's part; `[B,1]` keeps its one column.
fn of_tokens<T: Clone>(array: &Array2<T>, part: &Part) -> Array2<T> {
    let rows = array.select(Axis(0), &part.batch);
    let one_a_row = array.ncols() == 1 && part.tokens.iter().any(|t| *t > 0);
    if one_a_row { rows } else { rows.select(Axis(1), &part.tokens).as_standard_layout().into_owned() }
}

/// A `[B,T,…]` array's part, its last axis whole.
fn of_rows(array: &FloatArray<Ix3>, part: &Part) -> FloatArray<Ix3> {
    array.select(Axis(0), &part.batch).select(Axis(1), &part.tokens)
}

impl<L> Problem<L> {
    /// The sequences and tokens of `part` over all columns, with other logits.
    fn with_tokens<M>(&self, part: &Part, logits: M) -> Problem<M> {
        let Extra { rollout_logp, rollout_weights, token_weights, selected, bias, sequences, dentropy } = &self.extra;
        let packed = *sequences != Sequences::Rows;
        let floats = |array: &Option<Array2<f64>>| array.as_ref().map(|array| of_tokens(array, part));
        let weights = |array: &Option<Array2<f64>>| match array {
            Some(weights) if packed && weights.dim() != self.mask.dim() => Some(weights.clone()),
            weights => floats(weights),
        };
        Problem {
            logits,
            ids: of_tokens(&self.ids, part),
            mask: of_tokens(&self.mask, part),
            advantages: match &self.advantages {
                Advantages::Sequence(advantages) if packed => Advantages::Sequence(advantages.clone()),
                Advantages::Sequence(advantages) => Advantages::Sequence(advantages.select(Axis(0), &part.batch)),
                Advantages::Token(advantages) => Advantages::Token(of_tokens(advantages, part)),
                Advantages::Dlogp(dlogp) => Advantages::Dlogp(of_tokens(dlogp, part)),
            },
            old_logp: floats(&self.old_logp),
            ref_logp: floats(&self.ref_logp),
            extra: Extra {
                rollout_logp: floats(rollout_logp),
                rollout_weights: weights(rollout_weights),
                token_weights: weights(token_weights),
                selected: selected.as_ref().map(|selected| of_tokens(selected, part)),
                bias: bias.clone(),
                sequences: sequences.select(&part.tokens),
                dentropy: floats(dentropy),
            },
        }
    }

    /// The part without its logits. An id whose column is left out becomes −1, which is none: such a token no longer counts.
    fn select_tokens<M>(&self, part: &Part, logits: M) -> Problem<M> {
        let column = |id: &i64| part.columns.iter().position(|column| i64::try_from(*column) == Ok(*id));
        let mut problem = self.with_tokens(part, logits);
        problem.ids.mapv_inplace(|id| column(&id).map_or(-1, |v| i64::try_from(v).expect("a column")));
        problem.mask.zip_mut_with(&problem.ids, |counts, id| *counts &= *id >= 0);
        problem.extra.bias = problem.extra.bias.map(|bias| bias.select(Axis(0), &part.columns));
        problem
    }
}

impl Problem<()> {
    /// Its sequences `rows`, and of each the first `width` tokens.
    ///
    /// # Panics
    /// Where either is beyond its axis.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>, width: usize) -> Self {
        self.with_tokens(&Part { batch: rows.collect(), tokens: (0..width).collect(), columns: Vec::new() }, ())
    }
}

impl Problem {
    /// The part of it, a problem of its own. A token whose sampled column is left out no longer counts.
    ///
    /// # Panics
    /// Where an index is beyond its axis.
    #[must_use]
    pub fn select(&self, part: &Part) -> Self {
        self.select_tokens(part, of_rows(&self.logits, part).select(Axis(2), &part.columns))
    }
}

impl HeadProblem {
    /// The part of it with the hidden `units` named. A token whose sampled column is left out no longer counts.
    ///
    /// # Panics
    /// Where an index is beyond its axis.
    #[must_use]
    pub fn select(&self, part: &Part, units: &[usize]) -> Self {
        let Projection { hidden, lm_head, layout, rounds_logits } = &self.logits;
        let [units_axis, columns_axis] = match layout {
            HeadLayout::HiddenByVocab => [Axis(0), Axis(1)],
            HeadLayout::VocabByHidden => [Axis(1), Axis(0)],
        };
        let lm_head = lm_head.select(units_axis, units).select(columns_axis, &part.columns);
        let hidden = of_rows(hidden, part).select(Axis(2), units);
        self.select_tokens(part, Projection { hidden, lm_head, layout: *layout, rounds_logits: *rounds_logits })
    }
}
