//! [`GateTallies`]: the comparisons of one candidate, tallied by gate, and the dtypes that set each rounding.

use std::collections::BTreeMap;

use super::token::{JudgedToken, shared_edge};
use super::verdict::{Status, Verdict};
use crate::U;
use crate::condition::ErrorBound;
use crate::gate::{Gate, Model, Output};
use crate::metric::{Allowance, Position, Spacing, Tally, min_normal};
use crate::tolerance::{Grade, Limits};
use assay_core::problem::{Dtype, HeadShape, Shape};

/// The dtype that an output was returned in, and the one that the problem promises for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredDtype {
    pub(crate) given: Dtype,
    pub(crate) promised: Dtype,
}

impl StoredDtype {
    /// Promises a gradient in the dtype of its argument; f64 arguments promise f32, the arithmetic that kernels work in.
    pub(crate) fn gradient(given: Dtype, of: Dtype) -> Self {
        Self { given, promised: if of == Dtype::F64 { Dtype::F32 } else { of } }
    }

    /// Promises f32, as for every output that is not a gradient.
    pub(crate) fn scalar(given: Dtype) -> Self {
        Self { given, promised: Dtype::F32 }
    }

    /// Combines rounding, scale and floor of one value: it is rounded to the finer of the two dtypes, and the scale is at least the
    /// smallest normal number of either.
    pub(crate) fn allowance(self, expected: f64, ErrorBound { scale, floor }: ErrorBound) -> Allowance {
        self.allowances()(expected, scale, floor)
    }

    /// Returns [`allowance`](Self::allowance) as a function of the exact value, scale and floor, which a loop over many of them inlines.
    pub(crate) fn allowances(self) -> impl Fn(f64, f64, f64) -> Allowance {
        let [given, promised] = [self.given, self.promised].map(Spacing::new);
        let smallest = min_normal(self.given).min(min_normal(self.promised));
        move |expected, scale, floor| {
            let [given, promised] = [given.half_ulp(expected), promised.half_ulp(expected)];
            let rounding = if given < promised { given } else { promised };
            Allowance { rounding, unit: U, scale: if scale > smallest { scale } else { smallest }, floor }
        }
    }
}

/// A gate without an edge, the dtypes of its output, and the `κ` of its limit.
#[derive(Clone, Copy)]
pub(crate) struct GateLimit {
    pub(crate) gate: Gate,
    pub(crate) stored: StoredDtype,
    pub(crate) kappa: f64,
}

impl GateLimit {
    /// Compares `output` element by element, at no edge.
    pub(crate) fn elementwise(output: Output, stored: StoredDtype, limits: &Limits) -> Self {
        Self { gate: Gate::new(output, Model::Elementwise), stored, kappa: limits.kappa(output) }
    }

    /// Compares one value of `token`; a value that is not finite is an honest answer if f32 overflows on that token.
    pub(super) fn compare(
        self,
        tally: &mut Tally,
        token: &JudgedToken,
        at: Position,
        (exact, bound): (f64, ErrorBound),
        actual: f64,
    ) {
        if token.condition.overflows && !actual.is_finite() {
            tally.report(at);
        } else {
            tally.compare(at, exact, actual, self.kappa, self.stored.allowance(exact, bound), self.stored.given);
        }
    }
}

/// Tallies by gate, in the order of gates.
pub(crate) struct GateTallies {
    grade: Grade,
    /// The extents of the maps of errors; `None` if there are no maps.
    mapped: Option<HeadShape>,
    by_gate: BTreeMap<Gate, (StoredDtype, Option<f64>, Tally)>,
}

impl GateTallies {
    /// Returns empty tallies of a problem of `shape`, whose hidden width is 0 without an LM head.
    pub(crate) fn new(limits: &Limits, shape: Shape, hidden: usize) -> Self {
        Self { grade: limits.grade, mapped: limits.mapped(shape, hidden), by_gate: BTreeMap::new() }
    }

    /// Returns the tally of `gate`, whose limit has this `κ`; it is empty at first, and so appears in the verdicts.
    pub(crate) fn entry(&mut self, gate: Gate, stored: StoredDtype, kappa: Option<f64>) -> &mut Tally {
        let mapped = self.mapped;
        &mut self.by_gate.entry(gate).or_insert_with(|| (stored, kappa, Tally::with_maps(gate, mapped))).2
    }

    /// Compares a value that all tokens contribute to, such as the loss; NaN or ∞ is honest only if `open`.
    ///
    /// A value that is not finite and should be counts at the edge of the tokens, since one of them most likely caused it.
    pub(super) fn compare_shared(
        &mut self,
        limit: GateLimit,
        tokens: &[JudgedToken],
        (exact, bound): (f64, ErrorBound),
        actual: f64,
        open: bool,
    ) {
        let GateLimit { gate, stored, kappa } = limit;
        // The gate at no edge is entered in any case, so that it has a verdict even if the value counts at an edge.
        self.entry(gate, stored, Some(kappa));
        let edge = if actual.is_finite() || open { None } else { shared_edge(tokens) };
        let tally = self.entry(gate.at(edge), stored, Some(kappa));
        if open {
            tally.report(Position::default());
        } else {
            tally.compare(Position::default(), exact, actual, kappa, stored.allowance(exact, bound), stored.given);
        }
    }

    /// Decides every gate.
    pub(crate) fn into_verdicts(self) -> Vec<Verdict> {
        let verdict = |(gate, (stored, kappa, tally)): (Gate, (StoredDtype, Option<f64>, Tally))| {
            let status = tally.status();
            Verdict {
                gate,
                dtype: stored.given,
                promised: stored.promised,
                status,
                kappa,
                tally,
                grade: (status == Status::Pass).then_some(self.grade),
                short_of_exact: None,
                open_entropies: None,
            }
        };
        self.by_gate.into_iter().map(verdict).collect()
    }
}
