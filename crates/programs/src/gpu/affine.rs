//! Exponents of a row's logits by one operation each.
//!
//! An exponent of 2 is `(x − m)·c` with `c = log₂e/T`: a difference and a product. As `x·c − K` it is one operation, which rounds once, if
//! `K` is a number that all of the row share. `m·c` is none in f32, and what its rounding loses would be lost of every exponent:
//!
//! ```text
//! K = round(m·c)    λ = m·c − K, exact    t_j = x_j·c − K, rounded once    e_j = 2^t_j
//! 2^((x_j − m)·c) = e_j·2^−λ              (m − x_j) = (λ − t_j)/c
//! s = 2^−λ Σ e_j                          w = 2^−λ/c (λ Σ e_j − Σ e_j t_j)
//! ```
//!
//! So `λ` goes into factors of the row, and nothing is lost. `|K| < 2¹⁶` leaves `|λ| ≤ 2⁻⁸`: the factors are near 1, and `λ Σ e − Σ e t` does
//! not cancel. `Σ e t` needs finite exponents: logits are no less than a least one, whose exponential is 0. A row for which any of
//! this does not hold is walked by its gaps.

use super::folds::add_block;
use super::logits::{FloatPair, LogitsFormat};
use super::row::{SharedRow, WalkedArray};
use assay_ptx::{PackedFloat, PtxAddress, PtxBuilder, PtxValue};

/// The shifts of rows are below this.
const LARGEST_SHIFT: f32 = 65_536.0;

/// The least logit that sums are taken of, where the dtype goes further down: `−2¹⁰⁰`, a number of bf16 too.
const LEAST: f32 = -(((1_u128) << 100) as f32);

/// The most negative finite f16.
const LEAST_OF_F16: f32 = -65_504.0;

/// Exponents of 2 below this have an exponential of 0.
const NOTHING: f32 = -160.0;

/// Factors of gaps from this on, and to that, leave the exponent of the [least](LEAST) logit within f32 and below [`NOTHING`].
const FACTORS: [f32; 2] = [1.0 / 1_048_576.0, 1_048_576.0];

/// The exponents of a row.
pub(super) struct Affine {
    logits: LogitsFormat,
    /// Whether the row is to be walked by its gaps.
    pub(super) is_beyond: PtxValue<bool>,
    /// The factor `c = log₂e/T` of logits.
    factor: PtxValue<f32>,
    /// The negated shift `−K` of the row.
    minus_shift: PtxValue<f32>,
    /// The difference `λ = m·c − K` that the rounding of `K` left.
    lost: PtxValue<f32>,
    /// The factor `2^−λ` that makes up for the shift.
    restores: PtxValue<f32>,
    /// A word of two least logits, where logits have 16 bits.
    least: Option<PtxValue<u32>>,
}

impl Affine {
    /// Exponents of logits below `max`, whose gaps are multiplied by `scale`, `−log₂e/T`.
    pub(super) fn new(on: &mut PtxBuilder, logits: LogitsFormat, max: PtxValue<f32>, scale: PtxValue<f32>) -> Self {
        let factor = on.variable(scale);
        let factor = on.neg(factor);
        // K is m·c rounded; a fused product gives what that rounding lost, exactly.
        let shift = on.mul(max, factor);
        let minus_shift = on.neg(shift);
        let lost = on.mul_add(max, factor, minus_shift);
        let minus_lost = on.neg(lost);
        let restores = on.exp2(minus_lost);
        // The row is walked by exponents only if the shift is small, the temperature ordinary and the least logit's
        // exponential 0.
        let [above, below] = [on.less(PtxValue::from(-LARGEST_SHIFT), shift), on.less(shift, LARGEST_SHIFT)];
        let [not_small, not_large] = [on.less(PtxValue::from(FACTORS[0]), factor), on.less(factor, FACTORS[1])];
        let of_least = on.mul_add(PtxValue::from(least(logits)), factor, minus_shift);
        let has_least = on.less(of_least, NOTHING);
        // A NaN fails every comparison.
        let fits = [below, not_small, not_large, has_least].into_iter().fold(above, |all, one| on.and(all, one));
        let least = match logits {
            LogitsFormat::F32 => None,
            LogitsFormat::Packed(packed) => Some(on.variable(twice(packed))),
        };
        Self { logits, is_beyond: on.not(fits), factor, minus_shift, lost, restores, least }
    }

    /// A block's logits, none of them below the least.
    fn load_block(&self, on: &mut PtxBuilder, from: PtxAddress) -> Vec<FloatPair> {
        // Clamping from below makes exponents of −∞ finite: Σ e·t would be 0·∞ otherwise.
        let (LogitsFormat::Packed(packed), Some(least)) = (self.logits, self.least) else {
            let block = self.logits.load_block(on, from);
            return block.into_iter().map(|pair| pair.map(|x| on.max(x, LEAST))).collect();
        };
        let words: [PtxValue<u32>; 4] = on.load_all(from);
        let words = words.map(|word| on.max_packed(packed, word, least));
        words.into_iter().map(|word| on.unpack(packed, word)).collect()
    }

    /// Returns the exponents `t = x·c − K` of a block.
    fn exponents(&self, on: &mut PtxBuilder, x: &[FloatPair]) -> Vec<FloatPair> {
        x.iter().map(|&x| on.mul_add_pair(x, [self.factor; 2], [self.minus_shift; 2])).collect()
    }

    /// `s` and `w` from `Σ e` and `Σ e t`.
    fn sums(&self, on: &mut PtxBuilder, [exps, weighted]: [PtxValue<f32>; 2]) -> [PtxValue<f32>; 2] {
        let minus_weighted = on.neg(weighted);
        // w = 2^−λ/c · (λ Σ e − Σ e·t), in this order, because λ Σ e is the small part.
        let gaps = on.mul_add(exps, self.lost, minus_weighted);
        let gaps = on.mul(gaps, self.restores);
        [on.mul(exps, self.restores), on.div(gaps, self.factor)]
    }

    /// Adds up this thread's columns: `s` and `w` into `sums`. Returns the `e` of the blocks of which they are kept, of one softmax.
    pub(super) fn sum(
        &self,
        on: &mut PtxBuilder,
        part: &SharedRow,
        sums: [PtxValue<f32>; 2],
    ) -> Vec<Vec<Vec<FloatPair>>> {
        let mut kept = Vec::new();
        part.walk(on, WalkedArray::Shared, |on, block| {
            let x = self.load_block(on, block.shared);
            let exponents = self.exponents(on, &x);
            let exps: Vec<FloatPair> = exponents.iter().map(|pair| pair.map(|exponent| on.exp2(exponent))).collect();
            add_block(on, &exps, &exponents, sums);
            kept.extend(block.kept.map(|_| vec![exps]));
        });
        let restored = self.sums(on, sums);
        for (sum, restored) in sums.into_iter().zip(restored) {
            on.set(sum, restored);
        }
        kept
    }

    /// Writes dlogits, `policy` times `e`; of −∞ it is 0 without a least logit.
    pub(super) fn write(
        &self,
        on: &mut PtxBuilder,
        part: &SharedRow,
        kept: &[Vec<Vec<FloatPair>>],
        policy: PtxValue<f32>,
    ) {
        part.write(on, |on, block| {
            let exps = if let Some(number) = block.kept {
                kept[number][0].clone()
            } else {
                let x = self.logits.load_block(on, block.shared);
                let exponents = self.exponents(on, &x);
                exponents.into_iter().map(|pair| pair.map(|exponent| on.exp2(exponent))).collect()
            };
            let gradients: Vec<FloatPair> = exps.into_iter().map(|exp| on.mul_pair(exp, [policy; 2])).collect();
            self.logits.pack_block(on, &gradients)
        });
    }

    /// The factor of `e` that stands for one of `2^((x − m)·c)`.
    pub(super) fn restore(&self, on: &mut PtxBuilder, factor: PtxValue<f32>) -> PtxValue<f32> {
        on.mul(factor, self.restores)
    }
}

/// The least logit that sums are taken of.
fn least(logits: LogitsFormat) -> f32 {
    match logits {
        LogitsFormat::F32 | LogitsFormat::Packed(PackedFloat::Bf16) => LEAST,
        LogitsFormat::Packed(PackedFloat::F16) => LEAST_OF_F16,
    }
}

/// A word of two least logits.
fn twice(packed: PackedFloat) -> u32 {
    let bits = match packed {
        PackedFloat::Bf16 => half::bf16::from_f32(LEAST).to_bits(),
        PackedFloat::F16 => half::f16::from_f32(LEAST_OF_F16).to_bits(),
    };
    u32::from(bits) << 16 | u32::from(bits)
}
