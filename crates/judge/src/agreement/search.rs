//! [`ComputationSearch`]: finds the computations whose numbers one side has.

use rayon::prelude::*;

use super::SamplingParameters;
use super::computation::{KeptSet, LimitFactors, LogpComputation, TemperatureUsed, TokenShift};
use super::kept;
use super::rows::AgreementRows;
use crate::condition::LONG_ROW;
use crate::metric::Spacing;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::TemperatureDivides;

/// One side's number of a token that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct SideToken {
    pub(super) at: (usize, usize),
    pub(super) logp: f64,
    /// The error / limit against the declared computation.
    pub(super) declared_error: f64,
    /// The limit against the declared computation, nats, with the rounding of the stored number.
    pub(super) limit: f64,
}

/// The tokens that a fit of one number is made with.
const FITTED: usize = 12;

/// The fewest tokens beyond their limit from which a fit of one number means anything.
const FEWEST: usize = 4;

/// The error / limit above which a sum in lanes explains nothing.
const BEYOND_LANES: f64 = 64.0;

/// The range of factors of the temperature that are looked for.
const FACTORS: [f64; 2] = [1.0 / 64.0, 64.0];

/// The explanation of one side's numbers.
pub(super) struct SideExplanation {
    /// The computations with these numbers, each with its largest error / limit; empty if nothing explains them.
    pub(super) computations: Vec<(LogpComputation, f64)>,
    /// Whether the first of them is what is declared.
    pub(super) is_declared: bool,
    /// The side's numbers, as they stand against the declared computation.
    pub(super) tokens: Vec<SideToken>,
}

/// The numbers of one side, with all that the search needs.
pub(super) struct ComputationSearch<'r> {
    rows: &'r AgreementRows,
    declared: LogpComputation,
    factors: LimitFactors,
    /// The spacing of the dtype that the side's numbers are stored in.
    stored: Spacing,
    sampling: SamplingParameters,
    /// The tokens, those that are farthest from the declared computation first.
    tokens: Vec<SideToken>,
}

impl<'r> ComputationSearch<'r> {
    /// Evaluates the declared computation for every token; `numbers` are those that count and are finite.
    pub(super) fn new(
        rows: &'r AgreementRows,
        numbers: &[((usize, usize), f64)],
        stored: Dtype,
        factors: LimitFactors,
        sampling: SamplingParameters,
    ) -> Self {
        let declared = LogpComputation::declared(rows.spec());
        let mut search = Self { rows, declared, factors, stored: Spacing::new(stored), sampling, tokens: Vec::new() };
        let token = |&(at, logp): &((usize, usize), f64)| {
            let (declared_error, limit) =
                search.error_at(&search.declared, at, logp).expect("the declared row and id are the token's own");
            SideToken { at, logp, declared_error, limit }
        };
        let mut tokens: Vec<SideToken> = numbers.par_iter().map(token).collect();
        tokens.sort_by(|a, b| b.declared_error.total_cmp(&a.declared_error));
        search.tokens = tokens;
        search
    }

    /// Returns the declared computation, by which others are described.
    pub(super) fn words(&self) -> LogpComputation {
        self.declared.clone()
    }

    /// Finds what explains the numbers: what is declared, else one difference from it, else two.
    pub(super) fn run(self) -> SideExplanation {
        let declared_error = self.tokens.first().map_or(0.0, |token| token.declared_error);
        if declared_error <= 1.0 {
            let declared = vec![(self.declared.clone(), declared_error)];
            return SideExplanation { computations: declared, is_declared: true, tokens: self.tokens };
        }
        let single = self.differences();
        let mut found = self.those_that_fit(&single);
        if found.is_empty() {
            found = self.fitted(std::slice::from_ref(&self.declared));
        }
        if found.is_empty() {
            // Two differences at once: each of two known ones, and each known one with one that is fitted. With a kept set a number is no
            // smooth function of the temperature, so a temperature that meets one is of few digits.
            let cooler = self.temperatures();
            found = self.those_that_fit(&pairs(&self.declared, &[&single[..], &cooler].concat()));
            if found.is_empty() {
                found = self.fitted(&[single, cooler].concat());
            }
        }
        found.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        SideExplanation { computations: found, is_declared: false, tokens: self.tokens }
    }

    /// Lists the computations that differ from the declared one in a single known way.
    fn differences(&self) -> Vec<LogpComputation> {
        let declared = &self.declared;
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut LogpComputation)| {
            let mut changed = declared.clone();
            change(&mut changed);
            if changed != *declared {
                all.push(changed);
            }
        };
        let given = self.rows.problem().logits.dtype();
        for dtype in
            [Dtype::Bf16, Dtype::F16].into_iter().filter(|dtype| dtype.size() < given.size() || *dtype != given)
        {
            add(&|changed| changed.rounded = Some(dtype));
        }
        for dtype in self.rows.head_dtypes() {
            add(&|changed| changed.head = Some(dtype));
        }
        if self.rows.spec().temperature.number() != Some(1.0) {
            add(&|changed| changed.temperature = TemperatureUsed::None);
            add(&|changed| changed.temperature = TemperatureUsed::Twice);
        }
        add(&|changed| changed.transform.softcap = None);
        add(&|changed| changed.transform.scale = 1.0);
        add(&|changed| changed.transform.bias = false);
        add(&|changed| changed.support = assay_core::spec::Support::default());
        let SamplingParameters { top_k, top_p, min_p } = self.sampling;
        let given = [top_k.map(KeptSet::TopK), top_p.map(KeptSet::TopP), min_p.map(KeptSet::MinP)];
        for kept in given.into_iter().flatten() {
            add(&|changed| changed.kept = kept);
        }
        for (row, id) in [(-1, 0), (1, 0), (-1, -1), (1, 1)] {
            add(&|changed| changed.shift = TokenShift { row, id, plus: 0 });
        }
        for plus in [-1, 1] {
            add(&|changed| changed.shift.plus = plus);
        }
        all
    }

    /// Lists the computations with another temperature, of two digits.
    fn temperatures(&self) -> Vec<LogpComputation> {
        let Some(declared) = self.rows.spec().temperature.number() else { return Vec::new() };
        let of = |twentieths: u32| LogpComputation {
            temperature: TemperatureUsed::Times(f64::from(twentieths) / 20.0 / declared),
            ..self.declared.clone()
        };
        (2..=40).map(of).filter(|computation| computation.temperature != TemperatureUsed::Times(1.0)).collect()
    }

    /// Returns those of `computations` whose numbers all tokens have, each with its largest error / limit.
    fn those_that_fit(&self, computations: &[LogpComputation]) -> Vec<(LogpComputation, f64)> {
        // Nearly all fail at one of the tokens that are farthest off, so these are asked first.
        let likely = |computation: &&LogpComputation| self.largest_error(computation, FITTED).is_some();
        let likely: Vec<&LogpComputation> = computations.par_iter().filter(likely).collect();
        let all = self.tokens.len();
        let fits = |computation: &LogpComputation| Some((computation.clone(), self.largest_error(computation, all)?));
        likely.into_iter().filter_map(fits).collect()
    }

    /// Returns the largest error / limit over the first `count` tokens; `None` if one is beyond its limit, or nothing can be compared.
    fn largest_error(&self, computation: &LogpComputation, count: usize) -> Option<f64> {
        let of = |token: &SideToken| {
            // A token whose neighbour is another sequence's says nothing of a shift.
            let Some((error, _)) = self.error_at(computation, token.at, token.logp) else { return Ok(None) };
            if error <= 1.0 { Ok(Some(error)) } else { Err(()) }
        };
        let tokens = &self.tokens[..count.min(self.tokens.len())];
        let errors: Result<Vec<Option<f64>>, ()> = tokens.par_iter().map(of).collect();
        let errors: Vec<f64> = errors.ok()?.into_iter().flatten().collect();
        (!errors.is_empty()).then(|| errors.into_iter().fold(0.0, f64::max))
    }

    /// Returns the error / limit of a number against a computation, and the limit; `None` if the computation has no number there.
    fn error_at(&self, computation: &LogpComputation, at: (usize, usize), logp: f64) -> Option<(f64, f64)> {
        let compared = |factors: LimitFactors| {
            let predicted = self.rows.predict(computation, at, factors)?;
            let limit = predicted.limit + self.stored.half_ulp(predicted.logp);
            // A token that is not in a kept set has no finite number.
            let error = (logp - predicted.logp).abs() / limit;
            Some((if error.is_nan() { f64::INFINITY } else { error }, limit))
        };
        let (error, limit) = compared(self.factors)?;
        let Shape { vocab, .. } = self.rows.problem().shape();
        if error <= 1.0 || error > BEYOND_LANES || vocab <= LONG_ROW {
            return Some((error, limit));
        }
        // The sum of a long row may have been added in lanes, which is walked only where nothing else explains the error.
        compared(LimitFactors { lanes: true, ..self.factors })
    }

    /// Fits one number, a temperature or the size of a kept set, to each of `computations`.
    fn fitted(&self, computations: &[LogpComputation]) -> Vec<(LogpComputation, f64)> {
        if self.tokens.iter().filter(|token| token.declared_error > 1.0).count() < FEWEST {
            return Vec::new();
        }
        let candidates: Vec<LogpComputation> = computations
            .par_iter()
            .flat_map_iter(|computation| {
                let mut fits = Vec::new();
                if computation.temperature == TemperatureUsed::Declared {
                    fits.extend(self.fitted_temperatures(computation));
                }
                if computation.kept == KeptSet::All {
                    fits.extend(kept::fitted(self.rows, computation, &self.tokens, self.factors));
                }
                fits
            })
            .collect();
        self.those_that_fit(&candidates)
    }

    /// Finds factors of the temperature under which the farthest tokens have their numbers.
    fn fitted_temperatures(&self, computation: &LogpComputation) -> Vec<LogpComputation> {
        let at_factor =
            |factor: f64| LogpComputation { temperature: TemperatureUsed::Times(factor), ..computation.clone() };
        let tokens = &self.tokens[..FITTED.min(self.tokens.len())];
        // The residual of a token, and its derivative by the logarithm of the factor.
        let residual = |factor: f64, token: &SideToken| {
            let predicted = self.rows.predict(&at_factor(factor), token.at, self.factors)?;
            Some((token.logp - predicted.logp, predicted.slope, predicted.limit))
        };
        let Some(first) = tokens.first() else { return Vec::new() };
        // The log-probability is concave in the inverse temperature: at most two factors give one token its number. A walk over the range
        // brackets them.
        let steps: u32 = 24;
        let [low, high] = FACTORS.map(f64::ln);
        let factors = (0..=steps).map(|i| f64::exp(low + (high - low) * f64::from(i) / f64::from(steps)));
        let walked: Vec<(f64, f64)> = factors.filter_map(|factor| Some((factor, residual(factor, first)?.0))).collect();
        let brackets = walked.windows(2).filter(|pair| pair[0].1.signum() != pair[1].1.signum());
        let mut found = Vec::new();
        for bracket in brackets {
            let (mut low, mut high) = (bracket[0].0, bracket[1].0);
            let sign = bracket[0].1.signum();
            for _ in 0..20 {
                let middle = f64::sqrt(low * high);
                let Some((value, ..)) = residual(middle, first) else { break };
                if value.signum() == sign { low = middle } else { high = middle }
            }
            let mut factor = f64::sqrt(low * high);
            // A weighted fit over several tokens follows; its width is what the best of them leaves open.
            let mut width = f64::INFINITY;
            for _ in 0..4 {
                let all: Vec<(f64, f64, f64)> = tokens.iter().filter_map(|token| residual(factor, token)).collect();
                let weighted = |of: fn(&(f64, f64, f64)) -> f64| {
                    all.iter().map(|token| of(token) / (token.2 * token.2)).sum::<f64>()
                };
                let (by_slope, square) = (weighted(|(r, s, _)| r * s), weighted(|(_, s, _)| s * s));
                if square <= 0.0 || !square.is_finite() {
                    break;
                }
                // The slope is by the logarithm of the inverse temperature.
                factor *= f64::exp((-by_slope / square).clamp(-0.5, 0.5));
                width = all.iter().map(|(_, slope, limit)| limit / slope.abs()).fold(f64::INFINITY, f64::min);
            }
            if factor.is_finite() && width < 0.1 {
                found.push(at_factor(self.rounded_factor(factor, width)));
            }
        }
        found
    }

    /// Rounds a factor so that the temperature has as few digits as its width allows.
    fn rounded_factor(&self, factor: f64, width: f64) -> f64 {
        let declared = self.rows.spec().temperature.number().unwrap_or(1.0);
        kept::shortest_between(factor * declared * (1.0 - width), factor * declared * (1.0 + width)) / declared
    }
}

/// Lists the computations that differ from the declared one as two of `single` do, in different respects.
fn pairs(declared: &LogpComputation, single: &[LogpComputation]) -> Vec<LogpComputation> {
    let mut all: Vec<LogpComputation> = Vec::new();
    for (i, a) in single.iter().enumerate() {
        for b in &single[i + 1..] {
            if let Some(both) = a.with(b, declared) {
                all.push(both);
            }
        }
    }
    all
}

impl LogpComputation {
    /// Returns the computation that differs from the declared one as `self` and as `other` do; `None` if both change one thing.
    fn with(&self, other: &Self, declared: &Self) -> Option<Self> {
        fn both<T: PartialEq + Clone>(a: &T, b: &T, declared: &T) -> Option<T> {
            match (a != declared, b != declared) {
                (true, true) => None,
                (true, false) => Some(a.clone()),
                _ => Some(b.clone()),
            }
        }
        let divides: TemperatureDivides = declared.divides;
        Some(Self {
            rounded: both(&self.rounded, &other.rounded, &declared.rounded)?,
            head: both(&self.head, &other.head, &declared.head)?,
            transform: both(&self.transform, &other.transform, &declared.transform)?,
            support: both(&self.support, &other.support, &declared.support)?,
            temperature: both(&self.temperature, &other.temperature, &declared.temperature)?,
            divides,
            kept: both(&self.kept, &other.kept, &declared.kept)?,
            shift: both(&self.shift, &other.shift, &declared.shift)?,
        })
    }
}
