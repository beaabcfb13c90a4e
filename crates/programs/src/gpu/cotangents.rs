//! Factors of a token's dlogits: scales that were worked out before, or the token's record and the cotangents that a framework sends.
//!
//! ```text
//! share = −(G·g + ġ)/(S·T)     bonus = (E·g + ė)/(S·T)     g of the loss, ġ of logp, ė of the entropy
//! ```

use super::logits::SCALAR;
use super::losses::TokenRecord;
use crate::two_pass::Scale;
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxAddress, PtxBuilder, PtxValue};

/// The array that a token's dlogits are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factors {
    /// Scales `[1,n,8]` f32, see [`Scale`].
    Scales,
    /// The token's record `[1,n,8]` f32, see [`TokenRecord`], and the cotangents that a framework sends: of the loss `[1]`, of logp and entropy
    /// `[1,n,1]` where there are some.
    Record(Cotangents),
}

/// Cotangents that come beside that of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cotangents {
    /// Whether there is a cotangent of logp for each token.
    pub logp: bool,
    /// Whether the entropy has one.
    pub entropy: bool,
    /// Whether dlogits are there already, for the cotangent of the loss that `used` holds: where it is the one that was sent, nothing is
    /// read or written.
    pub unless_used: bool,
}

/// The factors of a token's dlogits, in every thread of its CTA.
pub(super) struct TokenFactors {
    pub(super) max: PtxValue<f32>,
    /// The factor `−G/(S·T)` of exponentials.
    pub(super) share: PtxValue<f32>,
    /// `s` of the softmax that logp is of.
    pub(super) others: PtxValue<f32>,
    /// The mask of the token: above 0 if it counts.
    pub(super) mask: PtxValue<f32>,
    /// `E/(S·T)`, and the mean gap, where the entropy has a derivative.
    pub(super) bonus: Option<[PtxValue<f32>; 2]>,
}

impl TokenFactors {
    pub(super) fn from_scales(on: &mut PtxBuilder, structure: Structure, token: PtxValue<u64>) -> Self {
        let mut given = |column: Scale| -> PtxValue<f32> { on.load(PtxAddress::Global(token, 4 * column as u32)) };
        let [max, share, others, mask] = [Scale::Max, Scale::Share, Scale::Others, Scale::Mask].map(&mut given);
        let bonus = structure.entropy_bonus.map(|_| [Scale::Bonus, Scale::MeanGap].map(&mut given));
        Self { max, share, others, mask, bonus }
    }

    /// Computes the factors from the token's record and the cotangents that were sent.
    pub(super) fn from_record(
        on: &mut PtxBuilder,
        structure: Structure,
        token: PtxValue<u64>,
        TokenCotangents { loss, logp, entropy }: TokenCotangents,
    ) -> Self {
        let given = |on: &mut PtxBuilder, column: TokenRecord| -> PtxValue<f32> {
            on.load(PtxAddress::Global(token, 4 * column as u32))
        };
        let [max, others, mask] =
            [TokenRecord::Max, TokenRecord::Others, TokenRecord::Counts].map(|column| given(on, column));
        // The derivative through the loss is multiplied by the loss's own cotangent; what the framework sends for logp
        // or entropy directly is added, and the share multiplies both.
        let mut factor = |[weight, share]: [TokenRecord; 2], own: Option<PtxValue<f32>>| {
            let [weight, share] = [weight, share].map(|column| given(on, column));
            let through_loss = on.mul(weight, loss);
            let all = own.map_or(through_loss, |own| on.add(through_loss, own));
            on.mul(all, share)
        };
        let of_logp = factor([TokenRecord::GradLogp, TokenRecord::LogpShare], logp);
        let bonus = structure.entropy_bonus.map(|_| factor([TokenRecord::Entropy, TokenRecord::EntropyShare], entropy));
        let bonus = bonus.map(|bonus| [bonus, given(on, TokenRecord::MeanGap)]);
        Self { max, share: on.neg(of_logp), others, mask, bonus }
    }
}

/// The cotangents of a token, in every thread of its CTA.
pub(super) struct TokenCotangents {
    pub(super) loss: PtxValue<f32>,
    logp: Option<PtxValue<f32>>,
    entropy: Option<PtxValue<f32>>,
}

/// The addresses of the cotangents.
pub(super) struct CotangentArrays {
    loss: PtxValue<u64>,
    logp: Option<PtxValue<u64>>,
    entropy: Option<PtxValue<u64>>,
    /// The cotangent that dlogits were made for, and the one to make them for at the next step.
    pub(super) used: Option<[PtxValue<u64>; 2]>,
}

impl CotangentArrays {
    pub(super) fn declare(on: &mut PtxBuilder, n: usize, cotangents: Cotangents) -> Self {
        let per_token = |on: &mut PtxBuilder, name| on.input_aligned(SCALAR, name, DeviceDtype::F32, &[1, n, 1]);
        Self {
            loss: on.input_aligned(SCALAR, "loss_cotangent", DeviceDtype::F32, &[1]),
            logp: cotangents.logp.then(|| per_token(on, "logp_cotangent")),
            entropy: cotangents.entropy.then(|| per_token(on, "entropy_cotangent")),
            used: cotangents.unless_used.then(|| {
                let used = on.input_aligned(SCALAR, "used", DeviceDtype::F32, &[1]);
                [used, on.output_aligned(SCALAR, "upstream", DeviceDtype::F32, &[1])]
            }),
        }
    }

    /// Reads the cotangents of a row's token. Where dlogits are there already for the one of the loss that was sent, the thread ends;
    /// otherwise the first thread of the first row keeps that one, for the next step to make dlogits for.
    pub(super) fn load(&self, on: &mut PtxBuilder, [thread, row]: [PtxValue<u32>; 2]) -> TokenCotangents {
        let loss: PtxValue<f32> = on.load(PtxAddress::Global(self.loss, 0));
        if let Some([used, upstream]) = self.used {
            let used: PtxValue<f32> = on.load(PtxAddress::Global(used, 0));
            // Dlogits that were made for this very cotangent are right as they are.
            let is_used = on.equal(used, loss);
            on.when(is_used, PtxBuilder::exit);
            let [is_first, is_first_row] = [thread, row].map(|number| on.less(number, 1));
            let is_first = on.and(is_first, is_first_row);
            let is_likely = likely(on, loss);
            let keeps = on.and(is_first, is_likely);
            on.when(keeps, |on| on.store(PtxAddress::Global(upstream, 0), loss));
        }
        let offset = on.mul_wide(row, 4);
        let of_token = |on: &mut PtxBuilder, array: Option<PtxValue<u64>>| {
            array.map(|array| {
                let at = on.add(array, offset);
                on.load(PtxAddress::Global(at, 0))
            })
        };
        TokenCotangents { loss, logp: of_token(on, self.logp), entropy: of_token(on, self.entropy) }
    }
}

/// Whether dlogits may be made for that cotangent before it is sent: a finite number, and not 0, which would leave nothing of them.
fn likely(on: &mut PtxBuilder, cotangent: PtxValue<f32>) -> PtxValue<bool> {
    let zero: PtxValue<f32> = 0.0.into();
    let [is_below, is_above] = [on.less(cotangent, zero), on.less(zero, cotangent)];
    let [is_more, is_less] = [on.less(PtxValue::from(f32::NEG_INFINITY), cotangent), on.less(cotangent, f32::INFINITY)];
    let [is_some, is_finite] = [on.or(is_below, is_above), on.and(is_more, is_less)];
    on.and(is_some, is_finite)
}
