//! [`GradientGates`]: the two gates of a gradient of hidden states or head.

use crate::condition::FLUSHED;
use crate::error_sums::{BoundedValues, ErrorSums};
use crate::gate::{Edge, Gate, Model, Output};
use crate::judge::{GateTallies, StoredDtype};
use crate::metric::{Allowance, Position, Tally};
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, HeadShape, Shape};

/// The two gates of a gradient: each element, and each row's norm.
#[derive(Clone, Copy)]
pub(super) struct GradientGates {
    output: Output,
    pub(super) stored: StoredDtype,
    kappa: f64,
    /// The extents of the maps of errors; `None` if there are no maps.
    mapped: Option<HeadShape>,
}

/// The comparisons of one row of a gradient.
pub(super) struct GradientTallies {
    elements: Tally,
    nonfinite: Tally,
    l2: Tally,
}

/// The elements of one row of a gradient.
#[derive(Clone, Copy)]
pub(super) struct GradientRow<'e> {
    pub(super) exact: &'e [f64],
    /// The error allowed for each element beyond half an ulp.
    pub(super) limits: &'e [f64],
    pub(super) actual: &'e [f64],
}

impl GradientGates {
    pub(super) fn new(output: Output, stored: StoredDtype, limits: &Limits, shape: HeadShape) -> Self {
        let HeadShape { batch, tokens, hidden, vocab } = shape;
        let mapped = limits.mapped(Shape { batch, tokens, vocab }, hidden);
        Self { output, stored, kappa: limits.kappa(output), mapped }
    }

    /// Enters both gates, so that each has a verdict even if nothing is compared.
    pub(super) fn enter(self, tallies: &mut GateTallies) {
        for model in [Model::Elementwise, Model::RowL2] {
            tallies.entry(Gate::new(self.output, model), self.stored, Some(self.kappa));
        }
    }

    /// Compares one row, whose norm is reported at `row` and whose elements at `at`. An element for which `open` holds may be NaN or ∞.
    pub(super) fn compare(
        self,
        row: Position,
        at: impl Fn(usize) -> Position,
        open: impl Fn(usize) -> bool,
        GradientRow { exact, limits, actual }: GradientRow,
    ) -> GradientTallies {
        let Self { stored, kappa, .. } = self;
        let maps = |model| Tally::with_maps(Gate::new(self.output, model), self.mapped);
        let [mut elements, mut nonfinite] = [(); 2].map(|()| maps(Model::Elementwise));
        let mut l2 = maps(Model::RowL2);
        // The limits contain κ already. They count as κ·u·scale, so that the κ needed is known. The value of another branch may be
        // larger, and is rounded at its own size.
        let (unit, dtype, floor) = (1.0 / kappa, stored.given, vec![FLUSHED; exact.len()]);
        let rounding = stored.allowances();
        let allowance = |x: f64, limit: f64, floor: f64| {
            let Allowance { rounding, .. } = rounding(x.abs() + limit, limit, floor);
            Allowance { rounding, unit, scale: limit, floor }
        };
        let finite = |values: &[f64]| values.iter().all(|x| x.is_finite());
        let (mut sums, mut has_norm) = (ErrorSums::default(), true);
        if [exact, limits, actual].into_iter().all(finite) {
            let values = BoundedValues { exact, actual, scale: limits, floor: &floor };
            elements.compare_all(&mut sums, &at, values, kappa, allowance, dtype);
        } else {
            for (i, ((&exact, &limit), &actual)) in exact.iter().zip(limits).zip(actual).enumerate() {
                let unlimited = exact.is_finite() && !limit.is_finite();
                let tally = if actual.is_finite() { &mut elements } else { &mut nonfinite };
                let allowed = allowance(exact, limit, FLUSHED);
                sums.add(exact, actual, allowed);
                if (unlimited || !actual.is_finite()) && open(i) {
                    tally.report(at(i));
                    has_norm = false;
                } else {
                    tally.compare(at(i), exact, actual, kappa, allowed, dtype);
                }
            }
        }
        // A row with an element that is not finite has no norm to compare.
        let [error, rounding, limit] = sums.norms();
        if has_norm && error.is_finite() {
            let norms = Allowance { rounding, unit, scale: limit, floor: 0.0 };
            l2.compare(row, 0.0, error, kappa, norms, Dtype::F64);
        } else {
            l2.not_compared += 1;
        }
        GradientTallies { elements, nonfinite, l2 }
    }

    /// Adds a row at `edge`; its values that are not finite, and should be, count at `nonfinite_edge`.
    pub(super) fn add(
        self,
        tallies: &mut GateTallies,
        edge: Option<Edge>,
        nonfinite_edge: Option<Edge>,
        row: GradientTallies,
    ) {
        for (model, edge, tally) in [
            (Model::Elementwise, edge, row.elements),
            (Model::RowL2, edge, row.l2),
            (Model::Elementwise, nonfinite_edge, row.nonfinite),
        ] {
            if !tally.is_empty() {
                tallies.entry(Gate::new(self.output, model).at(edge), self.stored, Some(self.kappa)).absorb(tally);
            }
        }
    }
}
