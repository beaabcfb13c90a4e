//! [`LogpComputation`]: a way from a row of logits to the log-probability of an id, evaluated in f64 with the limit of its error.

use crate::U;
use crate::condition::{FLUSHED, lane_sum_error_of};
use crate::metric::Spacing;
use assay_core::problem::Dtype;
use assay_core::spec::{LogitsTransform, LossSpec, Support, TemperatureDivides};

/// The vocabulary entries that a sampler keeps; the probabilities of the others are 0, and those of the kept ones sum to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum KeptSet {
    /// All entries of the row.
    All,
    /// The so many largest, and those equal to the last of them.
    TopK(usize),
    /// The fewest of the largest whose probabilities sum to at least this.
    TopP(f64),
    /// The entries with at least this share of the largest probability.
    MinP(f64),
}

/// The temperature that a side applies, by the declared one, `T`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TemperatureUsed {
    /// The temperature that the spec declares, `T`.
    Declared,
    /// None: the logits are taken as they are.
    None,
    /// The declared temperature, applied twice: `T²`.
    Twice,
    /// The declared temperature times this factor.
    Times(f64),
}

impl TemperatureUsed {
    fn applied(self, declared: f64) -> f64 {
        match self {
            Self::Declared => declared,
            Self::None => 1.0,
            Self::Twice => declared * declared,
            Self::Times(factor) => declared * factor,
        }
    }
}

/// The place of the row and of the id that a number is computed from, relative to its token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenShift {
    /// The positions by which the row of logits is after the token's own.
    pub(super) row: isize,
    /// The positions by which the id is after the token's own.
    pub(super) id: isize,
    /// The number that is added to the id.
    pub(super) plus: i64,
}

/// A way to compute a log-probability from logits.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LogpComputation {
    /// The dtype that logits are rounded to before anything else.
    pub(super) rounded: Option<Dtype>,
    /// The dtype that the LM head is rounded to before the product; chooses among the logits that there are.
    pub(super) head: Option<Dtype>,
    pub(super) transform: LogitsTransform,
    pub(super) support: Support,
    pub(super) temperature: TemperatureUsed,
    pub(super) divides: TemperatureDivides,
    pub(super) kept: KeptSet,
    pub(super) shift: TokenShift,
}

/// A log-probability with what its error may come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct PredictedLogp {
    pub(super) logp: f64,
    /// The limit of its error in f32, without the rounding of the result.
    pub(super) limit: f64,
    /// The derivative by the logarithm of the inverse temperature.
    pub(super) slope: f64,
}

/// The factors of limits that all tokens share.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitFactors {
    /// The factor `κ` of the limits of logp.
    pub(super) kappa: f64,
    /// The error of an exponent in units of `u` and the largest logit.
    pub(super) offset: f64,
    /// Whether the sum of a long row may have been added in lanes of f32.
    pub(super) lanes: bool,
    /// The dtype that logits are declared to have on this side, if it is coarser than that of the logits given.
    pub(super) declared: Option<Dtype>,
}

/// A row of logits of one token, with what else its log-probability needs.
pub(super) struct ComparedRow<'a> {
    pub(super) logits: Vec<f64>,
    /// The error of each logit before anything reads it; empty if logits are given.
    pub(super) errors: &'a [f32],
    pub(super) bias: Option<&'a [f64]>,
    /// The declared temperature of the token.
    pub(super) temperature: f64,
    pub(super) id: usize,
}

impl LogpComputation {
    /// Returns the computation that a spec declares.
    pub(super) fn declared(spec: &LossSpec) -> Self {
        Self {
            rounded: None,
            head: None,
            transform: spec.logits.clone(),
            support: spec.support.clone(),
            temperature: TemperatureUsed::Declared,
            divides: spec.temperature_divides,
            kept: KeptSet::All,
            shift: TokenShift::default(),
        }
    }

    /// Returns the exponents `z`: logits rounded, transformed, divided by the temperature, and −∞ outside the support.
    pub(super) fn exponents(&self, row: &ComparedRow) -> Vec<f64> {
        let temperature = match self.divides {
            TemperatureDivides::Logits => self.temperature.applied(row.temperature),
            TemperatureDivides::Logp => 1.0,
        };
        let LogitsTransform { scale, softcap, bias } = &self.transform;
        let bias = row.bias.filter(|_| *bias);
        let exponent = |(j, &logit): (usize, &f64)| {
            let rounded = self.rounded.map_or(logit, |dtype| dtype.round(logit));
            let scaled = scale * (rounded + bias.map_or(0.0, |bias| bias[j]));
            softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh()) / temperature
        };
        let mut z: Vec<f64> = row.logits.iter().enumerate().map(exponent).collect();
        // Entries outside the support have probability 0, but for the token's own where the spec keeps it.
        let own = z.get(row.id).copied();
        if let Some(vocab) = self.support.vocab {
            z.iter_mut().skip(vocab).for_each(|z| *z = f64::NEG_INFINITY);
        }
        for &id in &self.support.excluded_ids {
            z.iter_mut().skip(id).take(1).for_each(|z| *z = f64::NEG_INFINITY);
        }
        if let (true, Some(own)) = (self.support.keep_sampled, own) {
            z[row.id] = own;
        }
        z
    }

    /// Evaluates the computation for a token. The id must be one of the row.
    pub(super) fn evaluate(&self, row: &ComparedRow, factors: LimitFactors) -> PredictedLogp {
        let mut z = self.exponents(row);
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // Entries that the sampler drops are as if their logits were −∞.
        drop_all_but(self.kept, &mut z, max, row.id);
        let own = z[row.id];
        let (mut sum, mut gaps) = (0.0, 0.0);
        let exponentials: Vec<f64> = z.iter().map(|z| (z - max).exp()).collect();
        for (z, e) in z.iter().zip(&exponentials) {
            if *e > 0.0 {
                sum += e;
                gaps += e * (max - z);
            }
        }
        let (gap, mean_gap) = (max - own, gaps / sum);
        let log_p = -gap - sum.ln();
        // The exponent of the id and the mean of all move with the temperature, or the quotient does.
        let slope = match self.divides {
            TemperatureDivides::Logits => own - (max - mean_gap),
            TemperatureDivides::Logp => log_p,
        };

        // The limit of the judge: C_ℓ = 1 + a_y + ā + |log p|, the roundings of transformed logits, and the offset of the largest logit.
        let LogitsTransform { scale, softcap, bias } = &self.transform;
        let transformed = *scale != 1.0 || softcap.is_some() || *bias;
        let largest = [max, own].into_iter().filter(|z| z.is_finite()).fold(0.0, |most, z| z.abs().max(most));
        let rounded = if transformed { 2.0 * largest } else { 0.0 };
        let mut floor = factors.offset * U * max.abs() + FLUSHED;
        // What each logit is off by reaches the id's exponent and the mean of all.
        let by_logit = scale.abs() / self.divided_by(row);
        let spacing = factors.declared.map(Spacing::new);
        if spacing.is_some() || !row.errors.is_empty() {
            let error = |j: usize| {
                let given = row.errors.get(j).map_or(0.0, |error| f64::from(*error));
                by_logit * (given + spacing.map_or(0.0, |spacing| spacing.half_ulp(row.logits[j])))
            };
            let weighted = |(j, e): (usize, &f64)| if *e > 0.0 { e * error(j).exp_m1() } else { 0.0 };
            floor += error(row.id) + exponentials.iter().enumerate().map(weighted).sum::<f64>() / sum;
        }
        if factors.lanes {
            floor += lane_sum_error_of(&exponentials);
        }
        let factor = match self.divides {
            TemperatureDivides::Logits => 1.0,
            TemperatureDivides::Logp => 1.0 / self.temperature.applied(row.temperature),
        };
        let scale = 1.0 + gap + mean_gap + log_p.abs() + rounded;
        PredictedLogp {
            logp: log_p * factor,
            limit: (factors.kappa * U * scale + floor) * factor,
            slope: slope * factor,
        }
    }

    /// Returns what the exponents are divided by.
    fn divided_by(&self, row: &ComparedRow) -> f64 {
        match self.divides {
            TemperatureDivides::Logits => self.temperature.applied(row.temperature),
            TemperatureDivides::Logp => 1.0,
        }
    }

    /// Says in words how the computation differs from the `declared` one, for a token of the declared `temperature` if all have one.
    pub(super) fn describe(&self, declared: &Self, temperature: Option<f64>) -> String {
        let mut said: Vec<String> = Vec::new();
        if let Some(dtype) = self.head {
            said.push(format!("the LM head is rounded to {dtype} first"));
        }
        if let Some(dtype) = self.rounded {
            said.push(format!("logits are rounded to {dtype} first"));
        }
        if let (None, Some(cap)) = (self.transform.softcap, declared.transform.softcap) {
            said.push(format!("the softcap of {cap} is missing"));
        }
        if self.transform.scale != declared.transform.scale {
            said.push(format!("the scale of logits, {}, is missing", declared.transform.scale));
        }
        if self.transform.bias != declared.transform.bias {
            said.push("the bias of the LM head is missing".into());
        }
        let declared_as = temperature.map_or("the given temperatures".into(), |t| format!("the temperature {t}"));
        match self.temperature {
            TemperatureUsed::Declared => {}
            TemperatureUsed::None => said.push(format!("{declared_as} is not applied")),
            TemperatureUsed::Twice => said.push(format!("{declared_as} is applied twice")),
            TemperatureUsed::Times(factor) => said.push(match temperature {
                Some(t) => format!("the temperature is {}, not {t}", shortest(t * factor)),
                None => format!("the given temperatures are multiplied by {}", shortest(factor)),
            }),
        }
        if self.support != declared.support {
            said.push("entries outside the support are counted".into());
        }
        match self.kept {
            KeptSet::All => {}
            KeptSet::TopK(k) => said.push(format!("only the top-k set counts, k = {k}")),
            KeptSet::TopP(p) => said.push(format!("only the top-p set counts, p = {p}")),
            KeptSet::MinP(p) => said.push(format!("only the min-p set counts, p = {p}")),
        }
        let TokenShift { row, id, plus } = self.shift;
        let beside = |by: isize| if by < 0 { "before" } else { "after" };
        match (row, id) {
            (0, 0) => {}
            (row, 0) => said.push(format!("logits are those of the position {}", beside(row))),
            (row, id) if row == id => said.push(format!("numbers are those of the token {}", beside(row))),
            (row, _) => said.push(format!("rows of logits and ids are apart by {row}")),
        }
        match plus {
            0 => {}
            1.. => said.push(format!("ids are {plus} too high")),
            _ => said.push(format!("ids are {} too low", -plus)),
        }
        said.join(", and ")
    }
}

/// Writes a number to six digits at most.
fn shortest(x: f64) -> String {
    assay_schema::number::six(x)
}

/// Replaces the exponents that are not kept by −∞. `own` is the token's id, which a sampler has kept if it may.
fn drop_all_but(kept: KeptSet, z: &mut [f64], max: f64, own: usize) {
    let (lowest, most) = match kept {
        KeptSet::All => return,
        KeptSet::TopK(k) => {
            let mut order = z.to_vec();
            let k = k.clamp(1, order.len());
            (*order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1, usize::MAX)
        }
        KeptSet::MinP(share) => (max + share.ln(), usize::MAX),
        KeptSet::TopP(p) => {
            let LargestFirst { exponents, masses } = LargestFirst::new(z, max);
            let count = (masses.partition_point(|mass| *mass < p) + 1).min(exponents.len());
            (exponents[count - 1], count)
        }
    };
    z.iter_mut().filter(|z| **z < lowest).for_each(|z| *z = f64::NEG_INFINITY);
    // A top-p set ends within entries that are equal, if need be.
    let mut excess = z.iter().filter(|z| **z > f64::NEG_INFINITY).count().saturating_sub(most);
    let mut equal = z.iter_mut().enumerate().rev().filter(|(j, z)| **z == lowest && *j != own);
    while let (1.., Some((_, z))) = (excess, equal.next()) {
        *z = f64::NEG_INFINITY;
        excess -= 1;
    }
}

/// The exponents of a row, the largest first, with the probability mass of each and all before it.
pub(super) struct LargestFirst {
    pub(super) exponents: Vec<f64>,
    pub(super) masses: Vec<f64>,
}

impl LargestFirst {
    /// Sorts the finite exponents of a row whose largest is `max`.
    pub(super) fn new(z: &[f64], max: f64) -> Self {
        let mut exponents: Vec<f64> = z.iter().copied().filter(|z| z.is_finite()).collect();
        exponents.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut total = 0.0;
        let mut masses: Vec<f64> = exponents
            .iter()
            .map(|z| {
                total += (z - max).exp();
                total
            })
            .collect();
        for mass in &mut masses {
            *mass /= total;
        }
        Self { exponents, masses }
    }
}
