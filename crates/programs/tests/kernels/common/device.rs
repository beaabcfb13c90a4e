//! The computations of devices around a kernel, in f64: what a candidate is made of.

use super::batch::Batch;
use super::{PerToken, bytes_of, column_bias, f32_bytes, logits_bytes, logits_of, number, per_token, target_bias};
use assay_core::problem::{Candidate, FloatArray, Shape};
use assay_core::spec::{LogitsTransform, Objective, OldLogp, PpoClip, RatioLevel};
use ndarray::Array3;

/// Arrays by their names.
pub(crate) type Arrays = Vec<(&'static str, Vec<u8>)>;

/// The names of the columns of the arrays of two kernels.
pub(crate) struct TwoPassColumns {
    pub(crate) softmax_numbers: Vec<&'static str>,
    pub(crate) statistics: Vec<&'static str>,
    pub(crate) scales: Vec<&'static str>,
}

/// The names of the columns of the arrays of one kernel.
pub(crate) struct OnePassColumns {
    pub(crate) numbers: Vec<&'static str>,
    pub(crate) tokens: Vec<&'static str>,
    pub(crate) results: Vec<&'static str>,
}

/// A kernel of the two that stream over columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Statistics,
    Dlogits,
}

struct Softmax {
    gap: f64,
    others: f64,
    sum: f64,
    log_sum: f64,
    mean_gap: f64,
}

impl Batch<'_> {
    /// The candidate of the kernel that reads logits once, which `run` runs on arrays by name.
    pub(crate) fn one_pass_with(
        &self,
        columns: &OnePassColumns,
        run: impl FnOnce(&Arrays) -> Result<Vec<Vec<u8>>, String>,
    ) -> Result<Candidate, String> {
        let outputs = run(&vec![
            ("ids", self.ids()),
            ("numbers", self.numbers_of_one_pass(&columns.numbers)),
            ("logits", logits_bytes(&self.problem.logits)),
            ("tokens", self.tokens_of_one_pass(&columns.tokens)),
            ("column_bias", column_bias(self.spec, self.problem)),
        ])?;
        let results = PerToken::new(&outputs[1], &columns.results);
        let of = |name: &'static str| {
            let results = &results;
            move |token: usize| results.at(name, token)
        };
        let reduced = if columns.results.contains(&"reduced") { "reduced" } else { "token_loss" };
        Ok(self.candidate(of("logp"), of("entropy"), [&of("token_loss"), &of(reduced)], &outputs[0]))
    }

    /// That of a token, or the mean of those that share its ratio.
    fn of_ratio(&self, of: &dyn Fn(usize) -> f64, token: usize) -> f64 {
        if self.spec.ratio.level == RatioLevel::Token {
            return of(token);
        }
        let first = token / self.shape.tokens * self.shape.tokens;
        let row = (first..first + self.shape.tokens).filter(|&token| self.mask[token]);
        row.clone().map(of).sum::<f64>() / row.count() as f64
    }

    fn changes_logits(&self) -> bool {
        self.spec.logits != LogitsTransform::default() || !self.spec.support.is_whole()
    }

    /// What the two kernels of a device with `local` columns are given for all rows.
    fn shared_by_two_pass(&self, numbers: &[&str], device: usize, local: Shape) -> Arrays {
        let real = local.vocab.min(self.shape.vocab - device * local.vocab);
        let biases = column_bias(self.spec, self.problem);
        let inverse = self.spec.temperature.number().map_or(f64::NAN, f64::recip);
        let mut biases = biases[4 * device * local.vocab..][..4 * real].to_vec();
        biases.resize(4 * local.vocab, 0xFF);
        vec![
            ("inverse_temperature", f32_bytes([inverse])),
            ("softmax_numbers", f32_bytes(numbers.iter().map(|name| number(self.spec, name)))),
            ("column_bias", biases),
            ("columns", bytes_of([(real as i32).to_le_bytes()])),
        ]
    }

    /// The candidate of the two kernels of one of `devices` that have as many columns each, the last of them fewer; `run` runs them on arrays
    /// by name. For plain PPO-clip: the derivative of a token's loss is not the kernels' here.
    pub(crate) fn two_pass_with(
        &self,
        columns: &TwoPassColumns,
        devices: usize,
        run: impl Fn(Pass, &Arrays) -> Result<Vec<Vec<u8>>, String>,
    ) -> Result<Candidate, String> {
        let (logits, dtype) = (self.problem.logits.to_f64(), self.problem.logits.dtype());
        let local = Shape { vocab: self.shape.vocab.div_ceil(devices), ..self.shape };
        // The softmaxes are of what logits become, times this.
        let rate = if self.changes_logits() { number(self.spec, "logp_rate") } else { 1.0 };
        let shared = |device: usize| self.shared_by_two_pass(&columns.softmax_numbers, device, local);
        let rows = |device: usize| {
            let first = device * local.vocab;
            let of_device = Array3::from_shape_fn((local.batch, local.tokens, local.vocab), |(b, t, v)| {
                logits.get([b, t, first + v]).copied().unwrap_or(f64::NAN)
            });
            let place = |id: i64| (id - first as i64) as i32;
            // One device takes ids as they are, whatever masked tokens have.
            let here = |id: i64| devices == 1 || place(id) < local.vocab as i32;
            let ids = self.problem.ids.iter().map(|&id| if here(id) { place(id) } else { -1 });
            vec![
                ("logits", logits_bytes(&FloatArray::rounded_from(&of_device, dtype))),
                ("ids", bytes_of(ids.map(i32::to_le_bytes))),
                ("target_bias", f32_bytes(target_bias(self.spec, self.problem))),
                ("rate", self.rates()),
            ]
        };
        let mut parts = Vec::new();
        for device in 0..devices {
            let outputs = run(Pass::Statistics, &[shared(device), rows(device)].concat())?;
            parts.push(PerToken::new(&outputs[0], &columns.statistics));
        }
        let max = |token: usize| parts.iter().map(|part| part.at("max", token)).fold(f64::NEG_INFINITY, f64::max);
        let target_logit = |token: usize| parts.iter().map(|part| part.at("target_logit", token)).sum::<f64>();
        let two = self.two_softmaxes();
        let softmax = |token: usize, names: [&str; 2], inverse: f64| {
            let gap = (max(token) - target_logit(token)) * inverse;
            // Each device summed below its own maximum: rescale its sums to the maximum of all.
            let (mut others, mut weighted) = (0.0, 0.0);
            for part in &parts {
                let shift = (part.at("max", token) - max(token)) * inverse * std::f64::consts::LOG2_E;
                let of_part = names.map(|name| part.at(name, token));
                others += shift.exp2() * of_part[0];
                weighted += shift.exp2() * (of_part[1] + if of_part[0] == 0.0 { 0.0 } else { of_part[0] * shift });
            }
            let target = (-gap).exp();
            let sum = others + target;
            let weighted = -std::f64::consts::LN_2 * weighted;
            let mean_gap = (weighted + if target == 0.0 { 0.0 } else { target * gap }) / sum;
            Softmax { gap, others, sum, log_sum: (others + (target - 1.0)).ln_1p(), mean_gap }
        };
        let of_entropy = |token| softmax(token, ["others", "weighted"], self.rate(token));
        let of_logp =
            |token| if two { softmax(token, ["logp_others", "logp_weighted"], rate) } else { of_entropy(token) };
        let logp = |token: usize| {
            let Softmax { gap, log_sum, .. } = of_logp(token);
            -(gap + log_sum) * if two { self.inverse(token) } else { 1.0 }
        };
        let entropy = |token: usize| of_entropy(token).log_sum + of_entropy(token).mean_gap;
        let log_ratio = |token: usize| match self.spec.old_logp {
            OldLogp::Given => logp(token) - self.token(self.problem.old_logp.as_ref(), token),
            _ => 0.0,
        };
        let loss_and_grad = |token: usize| {
            if self.spec.objective == Objective::PolicyGradient {
                let a = self.advantage(token);
                return (-a * logp(token), -a);
            }
            let Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, .. }) = self.spec.objective else {
                unreachable!("only PPO-clip and policy gradients are drawn")
            };
            let (ratio, a) = (self.of_ratio(&log_ratio, token).exp(), self.advantage(token));
            let clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high);
            if clipped * a < ratio * a { (-clipped * a, 0.0) } else { (-ratio * a, -ratio * a) }
        };
        let scales = per_token(&columns.scales, self.tokens(), |name, token| {
            let (policy, bonus) = (of_logp(token), of_entropy(token));
            let factor = self.of_ratio(&|token| self.weight(token) * loss_and_grad(token).1, token) * self.rate(token);
            let bonus_factor = self.entropy_weight(token) * self.rate(token) / bonus.sum;
            match name {
                "max" => max(token),
                "share" => -factor / policy.sum,
                "others" => policy.others,
                "mask" => f64::from(u8::from(self.mask[token])),
                "bonus" => bonus_factor,
                "mean_gap" => bonus.mean_gap,
                other => panic!("{other}: not known here"),
            }
        });
        let mut gradient = Array3::zeros((self.shape.batch, self.shape.tokens, self.shape.vocab));
        for device in 0..devices {
            let mut rows = rows(device);
            rows.push(("scales", scales.clone()));
            let outputs = run(Pass::Dlogits, &[shared(device), rows].concat())?;
            let of_device = logits_of(&outputs[0], local, dtype).to_f64();
            for ((b, t, v), &x) in of_device.indexed_iter() {
                if let Some(gradient) = gradient.get_mut([b, t, device * local.vocab + v]) {
                    *gradient = x;
                }
            }
        }
        let gradient = logits_bytes(&FloatArray::rounded_from(&gradient, dtype));
        let loss = |token| loss_and_grad(token).0;
        Ok(self.candidate(logp, entropy, [&loss, &loss], &gradient))
    }
}
