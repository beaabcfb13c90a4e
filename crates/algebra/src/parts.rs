//! [`SeparableBatch`]: a batch that can be cut into parts whose losses add up to its own.

use std::ops::Range;

use ndarray::{Array1, Array2, Axis};

use super::rollout::{self, KernelInputs, per_token};
use super::structure::StructuredSpec;
use assay_core::implementation::{Implementation, RunError};
use assay_core::problem::{Candidate, Problem, ProblemError, Sequence, Tokens};
use assay_core::spec::{
    Averaging, LossSpec, LossTerms, Objective, OutOfBounds, Reduction, RejectionLevel, RolloutLevel, RolloutSource,
    RolloutWeights, Rows, SpecError, TokenWeights, UnscoredWeight,
};

/// A batch, and what of its loss looks at all of it, worked out once: how many tokens and sequences there are, how wide the batch
/// is, and the mean of the sampler's weights. It is cut between its sequences, packed ones too.
///
/// ```text
/// Σ over parts of loss(spec of the part, its sequences) = loss(spec, batch)      and so the gradients, in exact arithmetic
/// ```
///
/// The part's spec says by numbers what that of the batch says by its sequences, which a spec calls rows: `rows: all` becomes
/// `rows: {given: B}`, a mean over tokens a `normalizer`. It has the structure of any other part's, so that a compiled program
/// serves all.
pub struct SeparableBatch {
    spec: LossSpec,
    batch: Problem<()>,
    extents: ReductionCounts,
}

/// Counts of a batch by which reductions divide.
struct ReductionCounts {
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

impl SeparableBatch {
    /// Counts the tokens and sequences of `batch`, whose loss is `spec`, and normalizes the sampler's weights.
    ///
    /// # Errors
    /// [`SpecError`] where the spec makes choices over a whole batch by what its logits are, or means over a width that packed
    /// sequences do not have.
    pub fn new(spec: &LossSpec, mut batch: Problem<()>) -> Result<Self, SpecError> {
        // Choices over the whole batch cannot be made part by part.
        expect_separable(spec)?;
        if batch.extra.sequences.packed().is_some() {
            let expected = "a number ≥ 1, since packed sequences have no padded width";
            spec.expect_no_width().map_err(|field| SpecError { field, given: "none".into(), expected })?;
        }
        // The counts that reductions divide by, after rejections.
        let mask = KernelInputs::new(StructuredSpec::new(spec), &batch.tokens()).mask;
        let count = |sequence: Sequence| sequence.places().filter(|&at| mask[at]).count();
        let counts: Vec<usize> = batch.sequences().into_iter().map(count).collect();
        let extents = ReductionCounts {
            rows: counts.len(),
            filled_rows: counts.iter().filter(|count| **count > 0).count(),
            tokens: counts.iter().sum(),
            width: mask.ncols(),
        };
        let mut spec = spec.clone();
        // A second moment is over the batch: its rejections become weights of tokens.
        if spec.rejection.iter().any(|rejection| rejection.level == RejectionLevel::SecondMoment) {
            // What they leave out over the batch is said token by token.
            let given = batch.extra.token_weights.as_ref().filter(|_| spec.token_weights.is_some());
            let given = given.map(|given| per_token(&batch.tokens(), given));
            let own = |at| if mask[at] { given.as_ref().map_or(1.0, |given| given[at]) } else { 0.0 };
            batch.extra.token_weights = Some(Array2::from_shape_fn(mask.dim(), own));
            spec.token_weights.get_or_insert(TokenWeights { applies_to: LossTerms::PolicyAndKl });
            spec.rejection.retain(|rejection| rejection.counts);
        }
        // So is the mean by which weights are normalized: they become given weights.
        if let Some(weights) = spec.rollout.as_mut().filter(|weights| weights.normalize) {
            batch.extra.rollout_weights = Some(normalized(weights, &batch.tokens(), &mask));
            // They are of no level any more, and of no bounds.
            *weights = RolloutWeights {
                source: RolloutSource::Given,
                level: RolloutLevel::Token,
                outside: OutOfBounds::Truncate,
                min: None,
                max: None,
                clamp: None,
                normalize: false,
                unscored: UnscoredWeight::One,
                applies_to: weights.applies_to,
            };
        }
        Ok(Self { spec, batch, extents })
    }

    /// Returns the whole batch, with the weights that were computed over it.
    pub fn batch(&self) -> &Problem<()> {
        &self.batch
    }

    /// Splits the sequences into at most `parts` ranges of equal length, the last one shorter. A range of packed
    /// sequences without a token is joined with its neighbour.
    pub fn cut(&self, parts: usize) -> Vec<Range<usize>> {
        let (count, mask) = (self.extents.rows, &self.batch.mask);
        let mut cut: Vec<Range<usize>> = Vec::new();
        for first in (0..count).step_by(count.div_ceil(parts.max(1))) {
            let end = count.min(first + count.div_ceil(parts.max(1)));
            let tokens = |of: &Range<usize>| self.batch.extra.sequences.block(of.clone(), mask.dim()).1;
            match cut.last_mut() {
                Some(last) if tokens(last).is_empty() || tokens(&(first..end)).is_empty() => last.end = end,
                _ => cut.push(first..end),
            }
        }
        cut
    }

    /// Returns the sequences `rows`, the first `width` tokens of each, and their loss; for packed sequences it returns
    /// their [`block`](assay_core::problem::Sequences::block). The loss must not read a token beyond `width`: VESPO
    /// with `weights_of_masked_tokens` reads given weights of all tokens, masked ones too.
    pub fn part(&self, rows: Range<usize>, width: usize) -> (LossSpec, Problem<()>) {
        let (spec, share) = self.part_spec(rows.len());
        let mut batch = self.batch.rows(rows, width);
        // What is given of each token is no mean.
        if let Some(dentropy) = &mut batch.extra.dentropy {
            *dentropy /= share;
        }
        (spec, batch)
    }

    /// Returns the loss of a part, and the factor by which all of it is scaled.
    fn part_spec(&self, rows: usize) -> (LossSpec, f64) {
        // Means over counts of the batch become sums over given numbers.
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

/// Runs `implementation` on a batch in [parts](SeparableBatch::cut) of whole sequences. The candidate equals that of
/// the batch at once, except for rounding.
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
    // Cut tokens first, then the logits that belong to each part.
    let whole = SeparableBatch::new(spec, problem.with_logits(())).map_err(ProblemError::from)?;
    let sequences = &problem.extra.sequences;
    let run = |of: Range<usize>| {
        let (rows, tokens) = sequences.block(of.clone(), problem.mask.dim());
        let (spec, batch) = whole.part(of, tokens.len());
        let [rows, tokens] = [rows, tokens].map(Iterator::collect::<Vec<_>>);
        let logits = problem.logits.select(Axis(0), &rows).select(Axis(1), &tokens);
        implementation.run(&spec, batch.with_logits(logits), devices)
    };
    let parts: Vec<Candidate> = whole.cut(parts).into_iter().map(run).collect::<Result<_, _>>()?;
    Ok(Candidate::from_parts(sequences, &parts))
}

impl ReductionCounts {
    /// Replaces counts by numbers in an averaging, and multiplies each denominator by `share`.
    fn fixed(&self, Averaging { reduction, denominator_epsilon }: Averaging, share: f64) -> Averaging {
        // A number of sequences that the batch has replaces the rule by which they are counted.
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

/// Divides the sampler's weights by their mean; returns one per token, or one per sequence if the weights are those of
/// sequences.
fn normalized(weights: &RolloutWeights, tokens: &Tokens, mask: &Array2<bool>) -> Array2<f64> {
    let mut all = rollout::weights(weights, tokens);
    let given = weights.source == RolloutSource::Given;
    if !given {
        // Weights that are computed are 1 where no token counts.
        all.zip_mut_with(mask, |weight, counts| *weight = if *counts { *weight } else { 1.0 });
    }
    let one_each = given && tokens.extra.rollout_weights.as_ref().is_some_and(|given| given.dim() != mask.dim());
    if !one_each && !matches!(weights.level, RolloutLevel::Sequence | RolloutLevel::Geometric) {
        return all;
    }
    // The first token that counts: what is computed is of these alone.
    let of_sequence = |sequence: Sequence| {
        let first = sequence.places().find(|&at| mask[at]).or_else(|| sequence.places().next());
        first.map_or(1.0, |at| all[at])
    };
    let of_sequences: Array1<f64> = tokens.sequences().into_iter().map(of_sequence).collect();
    of_sequences.insert_axis(Axis(1))
}
