//! Factors of a token's terms: what its sequence and the batch divide them by.

use super::{BatchArray, CtaThreads, NumberArray, SEQUENCES, SequenceArrays, at_least_one, extent};
use assay_algebra::structure::{Denominator, DenominatorTokens, SpecNumber, Structure};
use assay_ptx::{PtxBuilder, PtxValue};

/// Factors of a token's terms: of a sequence, the same for all of its tokens.
#[derive(Clone, Copy)]
pub(crate) struct TermFactors {
    /// The factor of the policy term.
    pub(crate) policy: PtxValue<f32>,
    /// The factor of the KL penalty, over that of the policy term.
    pub(crate) kl_share: Option<PtxValue<f32>>,
    /// `∂loss/∂entropy` without `1/T`; if the entropy's cotangents come with the batch, the factor of those.
    pub(crate) entropy: Option<PtxValue<f32>>,
    /// `entropy` of a sequence that has a token: one number of the batch, unless sequences differ in it.
    pub(crate) entropy_of_batch: Option<PtxValue<f32>>,
}

/// The number of folds over a CTA that [`TermFactors`] takes.
pub(crate) const FOLDS: u32 = 2;

impl TermFactors {
    /// Computes the factors of the CTA's sequence: `1 / (tokens · filled sequences · number)`, 0 for a sequence without a token.
    pub(crate) fn new(
        on: &mut PtxBuilder,
        structure: Structure,
        threads: &mut CtaThreads,
        sequences: SequenceArrays,
        numbers: &NumberArray,
        normalizer: BatchArray,
    ) -> Self {
        let all = extent(on, sequences.extents, SEQUENCES);
        let [tokens, filled] = [on.variable(0.0), on.variable(0.0)];
        let zero = on.variable(0);
        // Every CTA counts the tokens and the filled sequences of the whole batch itself, which is cheaper than a
        // meeting of CTAs.
        threads.each(on, [zero, all], |on, sequence| {
            let count = sequences.count(on, sequence);
            let next = on.add(tokens, count);
            on.set(tokens, next);
            // A sequence is filled if one of its tokens counts.
            let nothing: PtxValue<f32> = 0.0.into();
            let has_some = on.less(nothing, count);
            let one = on.select(has_some, 1.0, 0.0);
            let next = on.add(filled, one);
            on.set(filled, next);
        });
        let of_batch = [threads.sum(on, tokens), threads.sum(on, filled)];
        let of_batch = of_batch.map(|count| at_least_one(on, count));
        let count = sequences.count(on, threads.cta);
        let of_sequence = SequenceCounts { count, of_batch, numbers };

        let policy =
            of_sequence.weight(on, structure.denominator, [SpecNumber::Denominator, SpecNumber::DenominatorEpsilon]);
        // The normalizer that the framework gives, 1 if it gives none, divides the policy's factor.
        let divisor = on.load(normalizer.first());
        let policy = on.div(policy, divisor);
        let kl_share = structure.kl.and_then(|kl| kl.denominator).map(|denominator| {
            let own = [SpecNumber::KlDenominator, SpecNumber::KlDenominatorEpsilon];
            let own = of_sequence.weight(on, denominator, own);
            // The kernel multiplies the KL penalty by weight · share: the policy's factor in the weight is divided out.
            // A sequence without tokens would give 0/0.
            let share = on.div(own, policy);
            let empty = on.equal(count, 0.0);
            on.select(empty, 0.0, share)
        });
        // The loss has −coef · H. Where cotangents of entropy come with the batch, they replace the divisor.
        let entropy = structure.entropy_bonus.map(|denominator| {
            let coef = numbers.load(on, SpecNumber::EntropyCoef);
            let coef = on.neg(coef);
            if structure.dentropy {
                return [coef; 2];
            }
            let own = [SpecNumber::EntropyDenominator, SpecNumber::EntropyDenominatorEpsilon];
            let has_own = denominator != Denominator::ALL_TOKENS;
            let divisor = if has_own { of_sequence.divisor(on, denominator, own) } else { of_batch[0] };
            let of_batch = on.div(coef, divisor);
            // An empty sequence has no bonus, while the number for the whole batch stays what it is.
            let empty = on.equal(count, 0.0);
            [on.select(empty, 0.0, of_batch), of_batch]
        });
        let [entropy, entropy_of_batch] = [0, 1].map(|which| entropy.map(|both| both[which]));
        Self { policy, kl_share, entropy, entropy_of_batch }
    }
}

/// Counts that weights are made of.
struct SequenceCounts<'n> {
    count: PtxValue<f32>,
    /// Tokens, and sequences that have one; at least 1 each.
    of_batch: [PtxValue<f32>; 2],
    numbers: &'n NumberArray,
}

impl SequenceCounts<'_> {
    /// `1/divisor`, 0 where no token of the sequence counts.
    fn weight(&self, on: &mut PtxBuilder, denominator: Denominator, numbers: [SpecNumber; 2]) -> PtxValue<f32> {
        let divisor = self.divisor(on, denominator, numbers);
        let share = on.div(1.0.into(), divisor);
        let empty = on.equal(self.count, 0.0);
        on.select(empty, 0.0, share)
    }

    /// Computes the divisor of a term of a token.
    fn divisor(
        &self,
        on: &mut PtxBuilder,
        denominator: Denominator,
        [known, epsilon]: [SpecNumber; 2],
    ) -> PtxValue<f32> {
        let [tokens, filled] = self.of_batch;
        let mut divisor = self.numbers.load(on, known);
        let counted = denominator.tokens.map(|of| match of {
            DenominatorTokens::OfBatch => tokens,
            DenominatorTokens::OfRow => self.count,
        });
        if let Some(mut counted) = counted {
            if denominator.epsilon {
                let epsilon = self.numbers.load(on, epsilon);
                counted = on.add(counted, epsilon);
            }
            divisor = on.mul(counted, divisor);
        }
        if denominator.filled_rows {
            divisor = on.mul(divisor, filled);
        }
        divisor
    }
}
