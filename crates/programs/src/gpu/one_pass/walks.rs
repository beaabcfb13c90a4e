//! The three walks over a row in shared memory: its largest logit, its sums, its dlogits.

use super::super::affine::Affine;
use super::super::folds::{add_block, exp, gaps, over_lanes};
use super::super::logits::FloatPair;
use super::super::row::{RowBlock, SharedRow, WalkedArray};
use super::super::transform::{PtxTransformedBlock, at_target};
use super::{ClusterMeeting, ClusterWriter, ThreadIndex, TransformedRow, WalkScales};
use assay_ptx::{PtxAddress, PtxBuilder, PtxTarget, PtxValue};

impl ClusterWriter {
    /// Walk 1: `m` and `x_y`.
    pub(super) fn max(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        place: ThreadIndex,
    ) -> (PtxValue<f32>, PtxValue<f32>) {
        // A transform that keeps the order needs only the largest logit transformed, not every one.
        let max = match walked.change {
            Some(change) if change.keeps_order() => {
                let max = self.max_of_logits(on, walked.part);
                change.largest(on, max)
            }
            Some(_) => self.max_of_changed(on, walked),
            None => self.max_of_logits(on, walked.part),
        };
        let larger = |on: &mut PtxBuilder, a, b| on.max(a, b);
        // Lanes of a warp, then all warps of the cluster, find the largest; the target counts too, though it was
        // taken out.
        let max = over_lanes(on, max, 32, larger);
        let here = self.shared.maxima;
        self.tell(on, place, ClusterMeeting::Maxima, here, &[max]);
        self.meet(on, ClusterMeeting::Maxima);
        let others = self.gather(on, place, here, 0, larger);
        let target_logit = on.load(PtxAddress::Shared(self.shared.target, 0));
        self.order_cta(on);
        (on.max(others, target_logit), target_logit)
    }

    /// The largest of what this thread's columns become.
    pub(super) fn max_of_changed(&self, on: &mut PtxBuilder, walked: &TransformedRow) -> PtxValue<f32> {
        let maxima: FloatPair = std::array::from_fn(|_| on.variable(f32::MIN));
        walked.part.walk(on, WalkedArray::Shared, |on, block| {
            let (t, _) = self.load(on, walked, block);
            for pair in t {
                for (&max, t) in maxima.iter().zip(pair) {
                    let larger = on.max(max, t);
                    on.set(max, larger);
                }
            }
        });
        on.max(maxima[0], maxima[1])
    }

    /// A block's columns in f32: as they are, or what they become, the target's and those of other rows −∞.
    pub(super) fn load(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        block: RowBlock,
    ) -> (Vec<FloatPair>, Option<PtxTransformedBlock>) {
        let x = self.logits().load_block(on, block.shared);
        let Some(change) = walked.change else { return (x, None) };
        // The block's columns are transformed with their biases, then the neighbours' elements and the target become
        // −∞.
        let first = walked.part.first_column(on, block);
        let target = on.sub(walked.id, first);
        let changed = change.block(on, &x, first, target, !walked.part.is_aligned());
        let all = changed.t.as_flattened();
        for (&t, other) in all.iter().zip(walked.part.foreign_elements(on, first).into_iter().flatten()) {
            let kept = on.select(other, f32::NEG_INFINITY, t);
            on.set(t, kept);
        }
        at_target(on, target, all.len(), |on, element, hit| {
            let left = on.select(hit, f32::NEG_INFINITY, all[element]);
            on.set(all[element], left);
        });
        (changed.t.clone(), Some(changed))
    }

    /// The largest of this thread's columns as they are.
    pub(super) fn max_of_logits(&self, on: &mut PtxBuilder, part: &SharedRow) -> PtxValue<f32> {
        let logits = self.logits();
        let maxima: [PtxValue<u32>; 4] = std::array::from_fn(|_| on.variable(logits.lowest()));
        part.walk(on, WalkedArray::Shared, |on, block| {
            // Packed elements are compared in pairs as they are; nothing is widened until the end.
            let words: [PtxValue<u32>; 4] = on.load_all(block.shared);
            for (&max, word) in maxima.iter().zip(words) {
                let larger = logits.max_words(on, max, word);
                on.set(max, larger);
            }
        });
        let pairs = [[0, 1], [2, 3]].map(|[a, b]| logits.max_words(on, maxima[a], maxima[b]));
        let word = logits.max_words(on, pairs[0], pairs[1]);
        logits.max_of_word(on, word)
    }

    /// The [exponents](Affine) of one softmax of logits as they are, where instructions are what a chip has least of: a B200 has fewer
    /// transcendental units for its bandwidth, and its registers are for exponentials. Beside a bonus there are none: its gradient is that of
    /// a gap, which is exact near the largest logit, and 0 for a row of equal logits.
    pub(super) fn affine(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        max: PtxValue<f32>,
        scales: &[PtxValue<f32>],
    ) -> Option<Affine> {
        if self.cut.target >= PtxTarget::Sm100 {
            return None;
        }
        match (walked.change, self.structure.entropy_bonus, scales) {
            (None, None, &[scale]) => Some(Affine::new(on, self.logits(), max, scale)),
            _ => None,
        }
    }

    /// Walk 2: every CTA is told `s` and `w` of each softmax. Returns the exponentials of the blocks of which they are kept, by each scale.
    pub(super) fn sum(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        place: ThreadIndex,
        max: PtxValue<f32>,
        scales: &[PtxValue<f32>],
        affine: Option<&Affine>,
    ) -> Vec<Vec<Vec<FloatPair>>> {
        let sums: Vec<PtxValue<f32>> = (0..2 * scales.len()).map(|_| on.variable(0.0)).collect();
        let kept = match affine {
            None => self.sum_by_gaps(on, walked, max, scales, &sums),
            Some(affine) => {
                // The row's numbers decide at run time which of the two walks it takes. Both leave their exponentials in one
                // set of registers, which walk 3 reads.
                let kept = self.room_for_kept(on, scales.len());
                on.either(
                    affine.is_beyond,
                    |on| {
                        let own = self.sum_by_gaps(on, walked, max, scales, &sums);
                        keep(on, &kept, &own);
                    },
                    |on| {
                        let own = affine.sum(on, walked.part, [sums[0], sums[1]]);
                        keep(on, &kept, &own);
                    },
                );
                kept
            }
        };
        let sums: Vec<PtxValue<f32>> = sums.into_iter().map(|sum| over_lanes(on, sum, 32, PtxBuilder::add)).collect();
        self.tell(on, place, ClusterMeeting::Sums, self.shared.sums, &sums);
        self.meet(on, ClusterMeeting::Sums);
        kept
    }

    /// Registers for the exponentials that are kept.
    pub(super) fn room_for_kept(&self, on: &mut PtxBuilder, softmaxes: usize) -> Vec<Vec<Vec<FloatPair>>> {
        let pairs = self.logits().per_block() / 2;
        let mut pair = || std::array::from_fn(|_| on.variable(0.0));
        let mut block = || (0..pairs).map(|_| pair()).collect();
        (0..self.kept()).map(|_| (0..softmaxes).map(|_| block()).collect()).collect()
    }

    /// Adds up this thread's columns by their gaps; returns the exponentials of the blocks of which they are kept.
    pub(super) fn sum_by_gaps(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        max: PtxValue<f32>,
        scales: &[PtxValue<f32>],
        sums: &[PtxValue<f32>],
    ) -> Vec<Vec<Vec<FloatPair>>> {
        let mut kept = Vec::new();
        walked.part.walk(on, WalkedArray::Shared, |on, block| {
            let (x, _) = self.load(on, walked, block);
            let gaps = gaps(on, &x, max, true);
            let exps = exponentials(on, &gaps, scales);
            for (exps, sums) in exps.iter().zip(sums.chunks(2)) {
                add_block(on, exps, &gaps, [sums[0], sums[1]]);
            }
            kept.extend(block.kept.map(|_| exps));
        });
        kept
    }

    /// Walk 3: writes dlogits from the exponentials of the row.
    pub(super) fn dlogits(
        &self,
        on: &mut PtxBuilder,
        walked: &TransformedRow,
        max: PtxValue<f32>,
        scales: &[PtxValue<f32>],
        kept: &[Vec<Vec<FloatPair>>],
        of: &WalkScales,
    ) {
        let (logits, bonus) = (self.logits(), self.structure.entropy_bonus.is_some());
        // Without a bonus the softmax that logp is of is all that is needed: the last.
        // The policy's gradient goes through the last softmax, the bonus's through the first.
        let first = if bonus { 0 } else { scales.len() - 1 };
        let [policy, base, slope] = [of.policy, of.base, of.slope].map(|factor| [factor; 2]);
        walked.part.write(on, |on, block| {
            let kept = block.kept.map(|number| kept[number][first..].to_vec());
            // An infinite gap has an exponential of 0, which is multiplied by nothing that is infinite but where there is a bonus.
            let (gaps, changed) = if bonus || kept.is_none() {
                let (x, changed) = self.load(on, walked, block);
                (gaps(on, &x, max, bonus), changed)
            } else {
                (vec![], None)
            };
            let exps = kept.unwrap_or_else(|| exponentials(on, &gaps, &scales[first..]));
            // The gradient is dx_j = e_j·(base + slope·gap_j) + policy·e'_j with an entropy bonus, and policy·e_j without one.
            let gradients: Vec<FloatPair> = if bonus {
                let of_entropy = gaps.iter().zip(&exps[0]).map(|(&gap, &exp)| {
                    let factor = on.mul_add_pair(slope, gap, base);
                    on.mul_pair(exp, factor)
                });
                let of_entropy: Vec<FloatPair> = of_entropy.collect();
                match exps.get(1) {
                    None => of_entropy,
                    Some(exps) => {
                        let both = exps.iter().zip(of_entropy);
                        both.map(|(&exp, term)| on.mul_add_pair(exp, policy, term)).collect()
                    }
                }
            } else {
                exps[0].iter().map(|&exp| on.mul_pair(exp, policy)).collect()
            };
            let gradients = match (walked.change, &changed) {
                (Some(change), Some(changed)) => change.through(on, &gradients, changed),
                _ => gradients,
            };
            logits.pack_block(on, &gradients)
        });
    }
}

/// Puts exponentials where those of either way are kept.
fn keep(on: &mut PtxBuilder, kept: &[Vec<Vec<FloatPair>>], own: &[Vec<Vec<FloatPair>>]) {
    let flat =
        |blocks: &[Vec<Vec<FloatPair>>]| blocks.iter().flatten().flatten().flatten().copied().collect::<Vec<_>>();
    for (place, value) in flat(kept).into_iter().zip(flat(own)) {
        on.set(place, value);
    }
}

/// `2^(gap·scale)` of all gaps, by each scale.
fn exponentials(on: &mut PtxBuilder, gaps: &[FloatPair], scales: &[PtxValue<f32>]) -> Vec<Vec<FloatPair>> {
    scales.iter().map(|&scale| gaps.iter().map(|&gap| exp(on, gap, scale)).collect()).collect()
}
