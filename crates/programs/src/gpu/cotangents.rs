//! Factors of a token's dlogits: scales that were worked out before, or the token's record and the cotangents that a framework sends.
//!
//! ```text
//! share = −(G·g + ġ)/(S·T)     bonus = (E·g + ė)/(S·T)     g of the loss, ġ of logp, ė of the entropy
//! ```

use super::logits::SCALAR;
use super::losses::Record;
use crate::two_pass::Scale;
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{Address, Builder, Value};

/// The array that a token's dlogits are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factors {
    /// Scales `[1,n,8]` f32, see [`Scale`].
    Scales,
    /// The token's record `[1,n,8]` f32, see [`Record`], and the cotangents that a framework sends: of the loss `[1]`, of logp and entropy
    /// `[1,n,1]` where there are some.
    Record(Cotangents),
}

/// Cotangents that come beside that of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cotangents {
    /// Whether logp has one.
    pub logp: bool,
    /// Whether the entropy has one.
    pub entropy: bool,
    /// Whether dlogits are there already, for the cotangent of the loss that `used` holds: where it is the one that was sent, nothing is
    /// read or written.
    pub unless_used: bool,
}

/// The factors of a token's dlogits, in every thread of its CTA.
pub(super) struct TokenFactors {
    pub(super) max: Value<f32>,
    /// `−G/(S·T)`
    pub(super) share: Value<f32>,
    /// `s` of the softmax that logp is of.
    pub(super) others: Value<f32>,
    /// Above 0 where the token counts.
    pub(super) mask: Value<f32>,
    /// `E/(S·T)`, and the mean gap, where the entropy has a derivative.
    pub(super) bonus: Option<[Value<f32>; 2]>,
}

impl TokenFactors {
    pub(super) fn of_scales(on: &mut Builder, structure: Structure, token: Value<u64>) -> Self {
        let mut given = |column: Scale| -> Value<f32> { on.load(Address::Global(token, 4 * column as u32)) };
        let [max, share, others, mask] = [Scale::Max, Scale::Share, Scale::Others, Scale::Mask].map(&mut given);
        let bonus = structure.entropy_bonus.map(|_| [Scale::Bonus, Scale::MeanGap].map(&mut given));
        Self { max, share, others, mask, bonus }
    }

    /// Computes the factors from the token's record and the cotangents that were sent.
    pub(super) fn of_record(
        on: &mut Builder,
        structure: Structure,
        token: Value<u64>,
        Sent { loss, logp, entropy }: Sent,
    ) -> Self {
        let given =
            |on: &mut Builder, column: Record| -> Value<f32> { on.load(Address::Global(token, 4 * column as u32)) };
        let [max, others, mask] = [Record::Max, Record::Others, Record::Counts].map(|column| given(on, column));
        let mut factor = |[weight, share]: [Record; 2], own: Option<Value<f32>>| {
            let [weight, share] = [weight, share].map(|column| given(on, column));
            let through_loss = on.mul(weight, loss);
            let all = own.map_or(through_loss, |own| on.add(through_loss, own));
            on.mul(all, share)
        };
        let of_logp = factor([Record::GradLogp, Record::LogpShare], logp);
        let bonus = structure.entropy_bonus.map(|_| factor([Record::Entropy, Record::EntropyShare], entropy));
        let bonus = bonus.map(|bonus| [bonus, given(on, Record::MeanGap)]);
        Self { max, share: on.neg(of_logp), others, mask, bonus }
    }
}

/// The cotangents of a token, in every thread of its CTA.
pub(super) struct Sent {
    pub(super) loss: Value<f32>,
    logp: Option<Value<f32>>,
    entropy: Option<Value<f32>>,
}

/// The addresses of the cotangents.
pub(super) struct SentArrays {
    loss: Value<u64>,
    logp: Option<Value<u64>>,
    entropy: Option<Value<u64>>,
    /// The cotangent that dlogits were made for, and the one to make them for at the next step.
    pub(super) used: Option<[Value<u64>; 2]>,
}

impl SentArrays {
    pub(super) fn declare(on: &mut Builder, n: usize, cotangents: Cotangents) -> Self {
        let per_token = |on: &mut Builder, name| on.input_aligned(SCALAR, name, DeviceDtype::F32, &[1, n, 1]);
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
    pub(super) fn load(&self, on: &mut Builder, [thread, row]: [Value<u32>; 2]) -> Sent {
        let loss: Value<f32> = on.load(Address::Global(self.loss, 0));
        if let Some([used, upstream]) = self.used {
            let used: Value<f32> = on.load(Address::Global(used, 0));
            let is_used = on.equal(used, loss);
            on.when(is_used, Builder::exit);
            let [is_first, is_first_row] = [thread, row].map(|number| on.less(number, 1));
            let is_first = on.and(is_first, is_first_row);
            let is_likely = likely(on, loss);
            let keeps = on.and(is_first, is_likely);
            on.when(keeps, |on| on.store(Address::Global(upstream, 0), loss));
        }
        let offset = on.mul_wide(row, 4);
        let of_token = |on: &mut Builder, array: Option<Value<u64>>| {
            array.map(|array| {
                let at = on.add(array, offset);
                on.load(Address::Global(at, 0))
            })
        };
        Sent { loss, logp: of_token(on, self.logp), entropy: of_token(on, self.entropy) }
    }
}

/// Whether dlogits may be made for that cotangent before it is sent: a finite number, and not 0, which would leave nothing of them.
fn likely(on: &mut Builder, cotangent: Value<f32>) -> Value<bool> {
    let zero: Value<f32> = 0.0.into();
    let [is_below, is_above] = [on.less(cotangent, zero), on.less(zero, cotangent)];
    let [is_more, is_less] = [on.less(Value::from(f32::NEG_INFINITY), cotangent), on.less(cotangent, f32::INFINITY)];
    let [is_some, is_finite] = [on.or(is_below, is_above), on.and(is_more, is_less)];
    on.and(is_some, is_finite)
}
