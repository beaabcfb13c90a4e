//! [`Whole`]: a batch whose parts' losses add up to its own.

use std::ops::Range;

use ndarray::{Array2, Axis};

use super::rollout::{self, Settled};
use super::structure::Shaped;
use assay_core::implementation::{Implementation, RunError};
use assay_core::problem::{Candidate, Problem, ProblemError, Sequences, Tokens};
use assay_core::spec::{
    Averaging, LossSpec, Objective, Outside, Reduction, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights,
    Rows, SpecError, Terms, TokenWeights, Unscored,
};

/// A batch, and what of its loss looks at all of it, worked out once: how many tokens and rows there are, how wide the batch
/// is, and the mean of the sampler's weights.
///
/// ```text
/// Σ over parts of loss(spec of the part, its rows) = loss(spec, batch)      and so the gradients, in exact arithmetic
/// ```
///
/// The part's spec says by numbers what that of the batch says by its rows: `rows: all` becomes `rows: {given: B}`, a mean over
/// tokens a `normalizer`. It has the structure of any other part's, so that a compiled program serves all.
pub struct Whole {
    spec: LossSpec,
    batch: Problem<()>,
    extents: Extents,
}

/// What reductions count.
struct Extents {
    rows: usize,
    filled_rows: usize,
    tokens: usize,
    width: usize,
}

/// Checks that a batch under `spec` can be cut into parts.
///
/// # Errors
/// [`SpecError`] for a choice that is made over a whole batch by what its logits are.
pub fn expect_separable(spec: &LossSpec) -> Result<(), SpecError> {
    let selects = match &spec.objective {
        Objective::KlCov(cov) => cov.selection.map(|_| "objective.kl_cov.selection"),
        Objective::ClipCov(cov) => cov.selection.map(|_| "objective.clip_cov.selection"),
        _ => None,
    };
    match selects.or(spec.top_entropy.map(|_| "top_entropy")) {
        Some(field) => {
            let expected = "none: it would be made over a whole batch's logits";
            Err(SpecError { field, given: "a choice".into(), expected })
        }
        None => Ok(()),
    }
}

impl Whole {
    /// `batch`, whose loss is `spec`.
    ///
    /// # Errors
    /// [`SpecError`] where the spec makes choices over a whole batch by what its logits are, or sequences are packed into one row.
    pub fn of(spec: &LossSpec, mut batch: Problem<()>) -> Result<Self, SpecError> {
        expect_separable(spec)?;
        if batch.extra.sequences != Sequences::Rows {
            let expected = "one a row: a batch is cut between rows";
            return Err(SpecError { field: "sequences", given: "packed into one row".into(), expected });
        }
        let mask = Settled::of(Shaped::of(spec), &batch.tokens()).mask;
        let counts: Vec<usize> =
            mask.rows().into_iter().map(|row| row.iter().filter(|counts| **counts).count()).collect();
        let extents = Extents {
            rows: counts.len(),
            filled_rows: counts.iter().filter(|count| **count > 0).count(),
            tokens: counts.iter().sum(),
            width: mask.ncols(),
        };
        let mut spec = spec.clone();
        if spec.rejection.iter().any(|rejection| rejection.level == RejectionLevel::SecondMoment) {
            // What they leave out over the batch is said token by token.
            let own = |(b, t)| {
                batch.extra.token_weights.as_ref().map_or(1.0, |own| own[[b, if own.ncols() == 1 { 0 } else { t }]])
            };
            let own =
                |at| if mask[at] && spec.token_weights.is_some() { own(at) } else { f64::from(u8::from(mask[at])) };
            batch.extra.token_weights = Some(Array2::from_shape_fn(mask.dim(), own));
            spec.token_weights.get_or_insert(TokenWeights { applies_to: Terms::PolicyAndKl });
            spec.rejection.retain(|rejection| rejection.counts);
        }
        if let Some(weights) = spec.rollout.as_mut().filter(|weights| weights.normalize) {
            batch.extra.rollout_weights = Some(normalized(weights, &batch.tokens(), &mask));
            // They are of no level any more, and of no bounds.
            *weights = RolloutWeights {
                source: RolloutSource::Given,
                level: RolloutLevel::Token,
                outside: Outside::Truncate,
                min: None,
                max: None,
                clamp: None,
                normalize: false,
                unscored: Unscored::One,
                applies_to: weights.applies_to,
            };
        }
        Ok(Self { spec, batch, extents })
    }

    /// All of its tokens.
    pub fn batch(&self) -> &Problem<()> {
        &self.batch
    }

    /// The rows of a part and of each its first `width` tokens, beyond which the loss reads none, and their loss. VESPO with
    /// `weights_of_masked_tokens` reads given weights of all tokens, masked ones too.
    pub fn part(&self, rows: Range<usize>, width: usize) -> (LossSpec, Problem<()>) {
        let (spec, share) = self.spec_of(rows.len());
        let mut batch = self.batch.rows(rows, width);
        // What is given of each token is no mean.
        if let Some(dentropy) = &mut batch.extra.dentropy {
            *dentropy /= share;
        }
        (spec, batch)
    }

    /// The loss of a part, and what it is scaled by as a whole.
    fn spec_of(&self, rows: usize) -> (LossSpec, f64) {
        let mut spec = self.spec.clone();
        // Rows without tokens have a loss only where all rows are counted: such a part is scaled as a whole.
        let share = match &spec.objective {
            Objective::ImportanceSampling(sampling) if sampling.empty_rows => rows as f64 / self.extents.rows as f64,
            _ => {
                let averaging = self.extents.fixed(spec.averaging(), 1.0);
                (spec.reduction, spec.denominator_epsilon) = (averaging.reduction, averaging.denominator_epsilon);
                1.0
            }
        };
        spec.scale *= share;
        if let Some(averaging) = spec.kl.as_mut().and_then(|kl| kl.averaging.as_mut()) {
            *averaging = self.extents.fixed(*averaging, share);
        }
        if spec.entropy_coef != 0.0 {
            let all_tokens = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
            spec.entropy_averaging = Some(self.extents.fixed(spec.entropy_averaging.unwrap_or(all_tokens), share));
        }
        (spec, share)
    }
}

/// What `implementation` makes of a batch in `parts` of equally many rows, the last of fewer: as of the batch whole, but for
/// rounding.
///
/// # Errors
/// [`RunError`] where the spec cannot be cut, or a part is not run.
pub fn run(
    implementation: &dyn Implementation,
    spec: &LossSpec,
    problem: &Problem,
    parts: usize,
    devices: usize,
) -> Result<Candidate, RunError> {
    let whole = Whole::of(spec, problem.with_logits(())).map_err(ProblemError::from)?;
    let (rows, width) = problem.mask.dim();
    let rows_of_part = rows.div_ceil(parts.max(1));
    let run = |first: usize| {
        let rows = first..rows.min(first + rows_of_part);
        let (spec, batch) = whole.part(rows.clone(), width);
        let logits = problem.logits.select(Axis(0), &rows.collect::<Vec<_>>());
        implementation.run(&spec, batch.with_logits(logits), devices)
    };
    let parts: Vec<Candidate> = (0..rows).step_by(rows_of_part).map(run).collect::<Result<_, _>>()?;
    Ok(Candidate::of_parts(&parts))
}

impl Extents {
    /// The same weights by numbers instead of counts, each divided by `share`.
    fn fixed(&self, Averaging { reduction, denominator_epsilon }: Averaging, share: f64) -> Averaging {
        let rows = |rows| {
            Rows::Given(match rows {
                Rows::All => self.rows as f64 * share,
                // Where no row has a token, no weight is read.
                Rows::NonEmpty => self.filled_rows.max(1) as f64 * share,
                Rows::Given(count) => count * share,
            })
        };
        let of_rows = matches!(reduction, Reduction::SequenceMean { .. });
        let reduction = match reduction {
            Reduction::TokenMean => Reduction::Normalizer((self.tokens.max(1) as f64 + denominator_epsilon) * share),
            Reduction::SequenceMean { rows: of } => Reduction::SequenceMean { rows: rows(of) },
            Reduction::SequenceSum { rows: of } => Reduction::SequenceSum { rows: rows(of) },
            Reduction::FixedLength { rows: of, length } => {
                Reduction::FixedLength { rows: rows(of), length: Some(length.unwrap_or(self.width)) }
            }
            Reduction::Normalizer(count) => Reduction::Normalizer(count * share),
        };
        Averaging { reduction, denominator_epsilon: if of_rows { denominator_epsilon } else { 0.0 } }
    }
}

/// The weights of the sampler over their mean, one a token, or one a row where they are of rows.
fn normalized(weights: &RolloutWeights, tokens: &Tokens, mask: &Array2<bool>) -> Array2<f64> {
    let mut all = rollout::weights(weights, tokens);
    let given = weights.source == RolloutSource::Given;
    if !given {
        // Weights that are computed are 1 where no token counts.
        all.zip_mut_with(mask, |weight, counts| *weight = if *counts { *weight } else { 1.0 });
    }
    let one_a_row = given && tokens.extra.rollout_weights.as_ref().is_some_and(|weights| weights.ncols() == 1);
    if !one_a_row && !matches!(weights.level, RolloutLevel::Sequence | RolloutLevel::Geometric) {
        return all;
    }
    // The first token that counts: what is computed is of these alone.
    let first = |b: usize| mask.row(b).iter().position(|counts| *counts).unwrap_or(0);
    Array2::from_shape_fn((all.nrows(), 1), |(b, _)| all[[b, first(b)]])
}
