//! One evaluation of the kernel that mutants are made of: its inputs, and the results of a token.

use std::ops::Range;

use ndarray::{Array2, Ix2};

use crate::bank::Bug;
use assay_core::problem::{FloatArray, Sequence, Shape, Tokens};
use assay_core::spec::LossSpec;

/// Number of columns in a tile. As with the tiles of published kernels, Qwen's vocabulary ends in a tail, and 1,024
/// does not.
pub(crate) const TILE: usize = 256;

/// A mesh of simulated devices, over which a batch is cut.
#[derive(Clone, Copy)]
pub(crate) struct SimulatedMesh {
    /// Number of shards that the sequences are cut into.
    pub(crate) rows: usize,
    /// Number of shards that the vocabulary is cut into.
    pub(crate) columns: usize,
}

impl SimulatedMesh {
    pub(crate) fn new(devices: usize) -> Self {
        match devices {
            1 => Self { rows: 1, columns: 1 },
            2 => Self { rows: 1, columns: 2 },
            _ => Self { rows: devices / 2, columns: 2 },
        }
    }
}

/// Returns the `i`th of `parts` of `0..length`, the last of which may be shorter or empty.
pub(crate) fn part(length: usize, parts: usize, i: usize) -> Range<usize> {
    let each = length.div_ceil(parts);
    (each * i).min(length)..(each * (i + 1)).min(length)
}

/// Results of the tokens of a batch, with its loss.
pub(crate) struct SpecimenEvaluation {
    pub(crate) loss: f64,
    pub(crate) tokens: Array2<Option<SpecimenGradient>>,
}

impl SpecimenEvaluation {
    /// Arranges log-probabilities, entropies and losses as arrays, 0 for masked tokens.
    pub(crate) fn per_token(&self) -> [FloatArray<Ix2>; 3] {
        let values: [fn(&SpecimenGradient) -> f64; 3] =
            [|token| token.scored.logp, |token| token.scored.entropy, |token| token.loss];
        values.map(|value| self.tokens.map(|token| token.as_ref().map_or(0.0, value) as f32).into())
    }
}

/// Every result of a token except its dlogits.
#[derive(Clone)]
pub(crate) struct SpecimenGradient {
    pub(crate) scored: SpecimenScore,
    /// Loss of the token: policy term plus `beta · kl`.
    pub(crate) loss: f64,
    /// Derivative `∂loss/∂logp` of the whole loss.
    pub(crate) grad_logp: f64,
    /// Derivative `∂loss/∂entropy` of the whole loss.
    pub(crate) grad_entropy: f64,
    /// Derivatives by the log-sum-exp and by the mean of the logits, of a cross-entropy's own terms.
    pub(crate) grad_row: [f64; 2],
}

/// A softmax over logits times `rate`.
#[derive(Clone, Copy)]
pub(crate) struct SpecimenSoftmax {
    pub(crate) max: f32,
    pub(crate) rate: f32,
    pub(crate) sum: f64,
    pub(crate) others: f64,
    pub(crate) mean_gap: f64,
    /// Maximum of each vocabulary shard.
    pub(crate) shard_max: [f32; 2],
    /// Sum of each vocabulary shard, relative to the maximum of all.
    pub(crate) shard_sum: [f64; 2],
}

/// The score of a token's id besides its first.
#[derive(Clone, Copy)]
pub(crate) struct OtherIdScore {
    pub(crate) id: usize,
    pub(crate) logp: f64,
    /// Probability `1 − p` of the other columns, summed over them.
    pub(crate) others: f64,
    /// Derivative of the loss by logp of the id.
    pub(crate) grad_logp: f64,
}

/// The score of a token, which follows from its logits.
#[derive(Clone)]
pub(crate) struct SpecimenScore {
    pub(crate) logp: f64,
    pub(crate) entropy: f64,
    pub(crate) id: usize,
    pub(crate) temperature: f64,
    pub(crate) logp_softmax: SpecimenSoftmax,
    pub(crate) entropy_softmax: SpecimenSoftmax,
    /// Scores of the token's ids besides the first.
    pub(crate) others: Vec<OtherIdScore>,
    /// Mean of `(m − x)/T` over all columns, of a cross-entropy that smooths labels.
    pub(crate) mean_gap_of_all: f64,
}

impl SpecimenScore {
    /// Returns the same token with the maxima and sums of another.
    pub(crate) fn with_softmax_of(self, other: &Self) -> Self {
        Self { logp_softmax: other.logp_softmax, entropy_softmax: other.entropy_softmax, ..self }
    }
}

/// A factor of a term of a token's loss, and of the term's gradient.
#[derive(Clone, Copy)]
pub(crate) struct CorrectionFactor {
    pub(crate) value: f64,
    pub(crate) gradient: f64,
}

impl CorrectionFactor {
    pub(crate) const ONE: Self = Self { value: 1.0, gradient: 1.0 };

    pub(crate) fn times(&mut self, weight: f64, in_gradient: bool) {
        self.value *= weight;
        self.gradient *= if in_gradient { weight } else { 1.0 };
    }
}

/// The tokens that count, and the factors of their terms.
pub(crate) struct TokenCorrections {
    /// Mask of the tokens that count, `[B,T]`.
    pub(crate) mask: Array2<bool>,
    /// Factors of the policy term and of the penalty, `[B,T]`.
    pub(crate) factors: Array2<[CorrectionFactor; 2]>,
}

impl TokenCorrections {
    /// Keeps every unmasked token, with factors of 1.
    pub(crate) fn none(mask: &Array2<bool>) -> Self {
        Self { mask: mask.clone(), factors: Array2::from_elem(mask.dim(), [CorrectionFactor::ONE; 2]) }
    }
}

/// One evaluation of the kernel: its inputs, its bug and its devices.
pub(crate) struct SpecimenLaunch<'l> {
    pub(crate) bug: Option<Bug>,
    /// Number of the evaluation, on which a kernel depends whose sums have no order.
    pub(crate) turn: usize,
    pub(crate) spec: &'l LossSpec,
    pub(crate) shape: Shape,
    pub(crate) tokens: Tokens<'l>,
    pub(crate) mesh: SimulatedMesh,
    /// Whether the softmaxes are of the logits as they are given.
    pub(crate) takes_logits_as_given: bool,
    /// Rejections and weights of tokens.
    pub(crate) corrections: TokenCorrections,
}

impl SpecimenLaunch<'_> {
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns the tokens that count: unmasked ones that no rejection masks.
    pub(crate) fn mask(&self) -> &Array2<bool> {
        &self.corrections.mask
    }

    /// Whether the kernel reads token `[b,t]`.
    pub(crate) fn counts(&self, b: usize, t: usize) -> bool {
        let mask = self.mask();
        if self.has(Bug::MaskMultiplied) {
            return true;
        }
        if self.has(Bug::MaskShifted) {
            return mask[[b, (t + 1).min(self.shape.tokens - 1)]];
        }
        if self.has(Bug::MaskOfFirstRow) {
            return mask[[0, t]];
        }
        if self.has(Bug::MaskedTokensInLoss) {
            return (t..self.shape.tokens).any(|t| mask[[b, t]]);
        }
        mask[[b, t]]
    }

    /// Lists the tokens of each sequence, as the kernel has them.
    pub(crate) fn sequences(&self) -> Vec<Sequence> {
        let sequences = &self.tokens.extra.sequences;
        let mut all = sequences.places(self.tokens.mask.dim());
        if sequences.packed().is_none() {
            return all;
        }
        let end = all.last().map_or(0, |last| last.tokens.end);
        match () {
            () if self.has(Bug::BoundariesLate) => {
                for sequence in &mut all {
                    let late = |at: usize| if at == 0 { 0 } else { (at + 1).min(end) };
                    sequence.tokens = late(sequence.tokens.start)..late(sequence.tokens.end);
                }
            }
            () if self.has(Bug::LastSequenceDropped) => drop(all.pop()),
            () if self.has(Bug::PackTakenForRow) => all = vec![Sequence { index: 0, row: 0, tokens: 0..end }],
            () => {}
        }
        all
    }

    /// Returns the sampled column, as the kernel reads it.
    pub(crate) fn id(&self, b: usize, t: usize) -> usize {
        let sequences = &self.tokens.extra.sequences;
        let is_shifted = self.has(Bug::IdOfNextSequence) && sequences.packed().is_some() && t + 1 < self.shape.tokens;
        let is_last = is_shifted && sequences.owner((b, t)) != sequences.owner((b, t + 1));
        let id = self.tokens.ids[[b, if is_last { t + 1 } else { t }]];
        let vocab = self.shape.vocab as i64;
        let id = if self.has(Bug::IdTruncated) { i64::from(id as i16).rem_euclid(vocab) } else { id };
        let id = if self.has(Bug::IdOffByOne) { (id + 1) % vocab } else { id };
        // Only a bug reads the id of a masked token.
        usize::try_from(id.clamp(0, vocab - 1)).expect("not negative")
    }
}
