//! Other ways to write the [baseline](crate::baseline), compiled for TPUs beside it and never run but to be judged.
//!
//! | id | what is written otherwise |
//! |---|---|
//! | `xla-seed` | `log_softmax` of every column, of which the target's is gathered, and what autodiff makes of it: MLLM-JAX's |
//! | `xla-wide-gather` | the target's logit is gathered from the logits' copy in f32 |
//! | `xla-kept` | the logits are not donated |
//! | `xla-logsumexp` | `x_y − logsumexp(x)`, and what autodiff makes of it |
//! | `xla-online` | the same, maximum and sum in one read: a reduction of pairs |
//!
//! ```text
//! log_softmax:  q_j = (x_j − m) − ln Σ e^(x_j − m)      ℓ = q_y          p_j = e^(q_j)
//! logsumexp:    L = m + ln Σ e^(x_j − m)                ℓ = x_y − L      q_j = x_j − L
//! H = −Σ p_j q_j                                        dx_j = G ([j = y] − p_j)
//! ```
//!
//! `1 − p_y` has no digits left where the target has almost all the probability, and `x_j − L` few where logits are large: these
//! reach `standard`, as autodiff does, and not `exact`. Of the plain loss on whole rows alone: no temperature, no entropy bonus.

use super::baseline;
use super::program::{CoreInputs, CoreOutputs, Program};
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Dtype;
use assay_core::spec::{LossSpec, Temperature};
use assay_tile::stablehlo::{Fold, HloBuilder, HloComparison, HloType, HloValue};

/// One alternative program, named for the difference that the table of [the module](self) describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BaselineAlternative {
    LogSoftmax,
    WideGather,
    Kept,
    LogSumExp,
    Online,
}

impl BaselineAlternative {
    pub(crate) const ALL: [Self; 5] = [Self::LogSoftmax, Self::WideGather, Self::Kept, Self::LogSumExp, Self::Online];

    pub(crate) fn id(self) -> &'static str {
        match self {
            Self::LogSoftmax => "xla-seed",
            Self::WideGather => "xla-wide-gather",
            Self::Kept => "xla-kept",
            Self::LogSumExp => "xla-logsumexp",
            Self::Online => "xla-online",
        }
    }

    pub(crate) fn summary(self) -> &'static str {
        match self {
            Self::LogSoftmax => "log_softmax, of which the target's is gathered, and autodiff: MLLM-JAX's program",
            Self::WideGather => "xla, the target's logit gathered from a copy in f32",
            Self::Kept => "xla, dlogits beside the logits",
            Self::LogSumExp => "the target's logit less logsumexp, and autodiff",
            Self::Online => "the same, maximum and sum in one read",
        }
    }

    /// Whether `1 − p_y` keeps its digits: see [`Programs::keeps_digits`](crate::Programs::keeps_digits).
    pub(crate) fn keeps_digits(self) -> bool {
        matches!(self, Self::WideGather | Self::Kept)
    }

    /// A field of the loss that it does not write, what it is there, and what is written.
    pub(crate) fn lacks(self, spec: &LossSpec) -> Option<(&'static str, String, &'static str)> {
        if matches!(self, Self::WideGather | Self::Kept) {
            None
        } else if spec.temperature != Temperature::ONE {
            let given = spec.temperature.number().map_or("given".into(), |temperature| temperature.to_string());
            Some(("temperature", given, "1"))
        } else if spec.entropy_coef != 0.0 {
            Some(("entropy_coef", spec.entropy_coef.to_string(), "0"))
        } else if spec.dentropy {
            Some(("dentropy", "true".into(), "false"))
        } else {
            None
        }
    }

    /// The core: dlogits of `dtype` from logits of any.
    pub(crate) fn core(
        self,
        on: &mut Program,
        structure: Structure,
        given: &CoreInputs,
        logits: HloValue,
        dtype: Dtype,
    ) -> CoreOutputs {
        match self {
            Self::Kept => return baseline::core(on, structure, given, logits, dtype),
            Self::WideGather => {
                let wide = on.builder.convert(logits, DeviceDtype::F32);
                return baseline::core_gathering(on, structure, given, logits, dtype, wide);
            }
            Self::LogSoftmax | Self::LogSumExp | Self::Online => {}
        }
        let [b, t, v] = on.local;
        let per_column = |on: &mut Program, value| on.builder.broadcast(value, &[0, 1], &[b, t, v]);
        let x = on.builder.convert(logits, DeviceDtype::F32);
        // The maximum is subtracted before exponentials are taken, so that none overflows.
        let [max, sum] = if self == Self::Online { in_one_read(&mut on.builder, x) } else { in_two_reads(on, x) };
        let log_sum = on.builder.log(sum);
        // The two ways differ in rounding: log_softmax subtracts twice from each logit, logsumexp once.
        let (logp, log_probabilities) = if self == Self::LogSoftmax {
            let max = per_column(on, max);
            let shifted = on.builder.subtract(x, max);
            let log_sum = per_column(on, log_sum);
            let all = on.builder.subtract(shifted, log_sum);
            (on.builder.take_along_last(all, given.ids), all)
        } else {
            let log_sum_exp = on.builder.add(max, log_sum);
            let target = on.builder.take_along_last(logits, given.ids);
            let target = on.builder.convert(target, DeviceDtype::F32);
            let logp = on.builder.subtract(target, log_sum_exp);
            let log_sum_exp = per_column(on, log_sum_exp);
            (logp, on.builder.subtract(x, log_sum_exp))
        };
        let wide = HloType::new(DeviceDtype::F32, &[b, t, v]);
        let probabilities = on.builder.exponential(log_probabilities);
        // A column of probability 0 has no part in the entropy, whatever its logarithm.
        let least = on.builder.constant(f64::from(f32::MIN), wide.clone());
        let finite = on.builder.maximum(log_probabilities, least);
        let weighted = on.builder.multiply(probabilities, finite);
        let minus_entropy = on.builder.reduce(Fold::Add, weighted, &[2]);
        let entropy = on.builder.negate(minus_entropy);

        let (token, grad_logp) = on.token_loss(structure, given, logp);
        // Autodiff of the gather is G·(one-hot − p).
        let column = on.builder.iota(2, HloType::new(DeviceDtype::I32, &[b, t, v]));
        let ids = per_column(on, given.ids);
        let is_target = on.builder.compare(HloComparison::Equal, column, ids);
        let [zero, one] = [0.0, 1.0].map(|x| on.builder.constant(x, wide.clone()));
        let one_hot = on.builder.select(is_target, one, zero);
        let difference = on.builder.subtract(one_hot, probabilities);
        let factor = per_column(on, grad_logp);
        let dlogits = on.builder.multiply(factor, difference);
        let counts = per_column(on, given.mask);
        let dlogits = on.builder.select(counts, dlogits, zero);
        let dlogits = on.builder.convert(dlogits, dtype.into());
        CoreOutputs { gradient: dlogits, logp, logp_of_others: None, entropy, token }
    }
}

/// `m` and `Σ e^(x_j − m)` of each row.
fn in_two_reads(on: &mut Program, x: HloValue) -> [HloValue; 2] {
    let max = on.builder.reduce(Fold::Max, x, &[2]);
    let of_rows = on.builder.broadcast(max, &[0, 1], &on.local);
    let shifted = on.builder.subtract(x, of_rows);
    let exp = on.builder.exponential(shifted);
    [max, on.builder.reduce(Fold::Add, exp, &[2])]
}

/// Computes `m` and `Σ e^(x_j − m)` of each row in one read: partial results are pairs, and the one with the smaller
/// maximum is scaled to the larger.
fn in_one_read(builder: &mut HloBuilder, x: HloValue) -> [HloValue; 2] {
    let each = builder.constant(1.0, builder.type_of(x).clone());
    let number = |builder: &mut HloBuilder, x| builder.constant(x, HloType::new(DeviceDtype::F32, &[]));
    let starts = [f64::NEG_INFINITY, 0.0].map(|x| number(builder, x));
    let both = builder.reduce_together(&[x, each], &starts, 2, |builder, left, right| {
        let [max, least] = [builder.maximum(left[0], right[0]), builder.minimum(left[0], right[0])];
        let gap = builder.subtract(least, max);
        // Two of −∞ have no gap.
        let same = builder.compare(HloComparison::Equal, least, max);
        let zero = number(builder, 0.0);
        let gap = builder.select(same, zero, gap);
        let scale = builder.exponential(gap);
        let left_has_max = builder.compare(HloComparison::AtLeast, left[0], right[0]);
        let upper = builder.select(left_has_max, left[1], right[1]);
        let lower = builder.select(left_has_max, right[1], left[1]);
        let lower = builder.multiply(scale, lower);
        vec![max, builder.add(upper, lower)]
    });
    [both[0], both[1]]
}
