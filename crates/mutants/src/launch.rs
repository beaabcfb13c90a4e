//! One evaluation of the kernel that mutants are made of: what it is given, and what becomes of a token.

use std::ops::Range;

use ndarray::{Array2, Ix2};

use crate::bank::Bug;
use assay_core::problem::{FloatArray, Sequence, Shape, Tokens};
use assay_core::spec::LossSpec;

/// Columns of a tile. As with the tiles of published kernels, Qwen's vocabulary ends in a tail, and 1,024 does not.
pub(crate) const TILE: usize = 256;

/// How devices cut a batch.
#[derive(Clone, Copy)]
pub(crate) struct SimulatedMesh {
    /// Parts that the sequences are cut in.
    pub(crate) rows: usize,
    /// Parts that the vocabulary is cut in.
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

/// The `i`th of `parts` of `0..length`, the last of them shorter or empty.
pub(crate) fn part(length: usize, parts: usize, i: usize) -> Range<usize> {
    let each = length.div_ceil(parts);
    (each * i).min(length)..(each * (i + 1)).min(length)
}

/// What the tokens of a batch come to.
pub(crate) struct SpecimenEvaluation {
    pub(crate) loss: f64,
    pub(crate) tokens: Array2<Option<SpecimenGradient>>,
}

impl SpecimenEvaluation {
    /// Log-probabilities, entropies and losses, 0 where a token is masked.
    pub(crate) fn per_token(&self) -> [FloatArray<Ix2>; 3] {
        let values: [fn(&SpecimenGradient) -> f64; 3] =
            [|token| token.scored.logp, |token| token.scored.entropy, |token| token.loss];
        values.map(|value| self.tokens.map(|token| token.as_ref().map_or(0.0, value) as f32).into())
    }
}

/// A token when all is known but its dlogits.
#[derive(Clone)]
pub(crate) struct SpecimenGradient {
    pub(crate) scored: SpecimenScore,
    /// Policy term plus `beta · kl`.
    pub(crate) loss: f64,
    /// `∂loss/∂logp`
    pub(crate) grad_logp: f64,
    /// `∂loss/∂entropy`
    pub(crate) grad_entropy: f64,
}

/// A softmax over logits times `rate`.
#[derive(Clone, Copy)]
pub(crate) struct SpecimenSoftmax {
    pub(crate) max: f32,
    pub(crate) rate: f32,
    pub(crate) sum: f64,
    pub(crate) others: f64,
    pub(crate) mean_gap: f64,
    /// The maximum of each vocabulary shard.
    pub(crate) shard_max: [f32; 2],
}

/// An id of a token beside its first.
#[derive(Clone, Copy)]
pub(crate) struct OtherIdScore {
    pub(crate) id: usize,
    pub(crate) logp: f64,
    /// `1 − p` of its column, summed over the others.
    pub(crate) others: f64,
    /// `∂loss/∂logp`
    pub(crate) grad_logp: f64,
}

/// What the logits of a token come to.
#[derive(Clone)]
pub(crate) struct SpecimenScore {
    pub(crate) logp: f64,
    pub(crate) entropy: f64,
    pub(crate) id: usize,
    pub(crate) temperature: f64,
    pub(crate) logp_softmax: SpecimenSoftmax,
    pub(crate) entropy_softmax: SpecimenSoftmax,
    /// Its ids beside the first.
    pub(crate) others: Vec<OtherIdScore>,
}

impl SpecimenScore {
    /// The same token with the maxima and sums of another.
    pub(crate) fn with_softmax_of(self, other: &Self) -> Self {
        Self { logp_softmax: other.logp_softmax, entropy_softmax: other.entropy_softmax, ..self }
    }
}

/// What a term of a token's loss, and its gradient, are multiplied by.
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

/// What becomes of each token.
pub(crate) struct TokenCorrections {
    /// Those that count.
    pub(crate) mask: Array2<bool>,
    /// Of the policy term and of the penalty.
    pub(crate) factors: Array2<[CorrectionFactor; 2]>,
}

impl TokenCorrections {
    /// Every unmasked token counts, and nothing is weighed.
    pub(crate) fn none(mask: &Array2<bool>) -> Self {
        Self { mask: mask.clone(), factors: Array2::from_elem(mask.dim(), [CorrectionFactor::ONE; 2]) }
    }
}

/// One evaluation.
pub(crate) struct SpecimenLaunch<'l> {
    pub(crate) bug: Option<Bug>,
    /// Which evaluation it is of its kernel: what one whose sums have no order depends on.
    pub(crate) turn: usize,
    pub(crate) spec: &'l LossSpec,
    pub(crate) shape: Shape,
    pub(crate) tokens: Tokens<'l>,
    pub(crate) mesh: SimulatedMesh,
    /// Whether the softmaxes are of the logits as they are given.
    pub(crate) takes_logits_as_given: bool,
    /// What weighs and rejects tokens.
    pub(crate) corrections: TokenCorrections,
}

impl SpecimenLaunch<'_> {
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The tokens that count: those that are unmasked, and that nothing rejects as if they were.
    pub(crate) fn mask(&self) -> &Array2<bool> {
        &self.corrections.mask
    }

    /// Whether the kernel looks at token `[b,t]`.
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

    /// The tokens of each sequence, as the kernel has them.
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

    /// The sampled column, as the kernel reads it.
    pub(crate) fn id(&self, b: usize, t: usize) -> usize {
        let id = self.tokens.ids[[b, t]];
        let vocab = self.shape.vocab as i64;
        let id = if self.has(Bug::IdTruncated) { i64::from(id as i16).rem_euclid(vocab) } else { id };
        let id = if self.has(Bug::IdOffByOne) { (id + 1) % vocab } else { id };
        // Only a bug reads the id of a masked token.
        usize::try_from(id.clamp(0, vocab - 1)).expect("not negative")
    }
}
