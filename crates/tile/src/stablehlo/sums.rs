//! Sums and maxima: products of matrices, reductions, and collectives over devices.

use std::fmt::Write as _;

use super::{Fold, HloBuilder, HloType, HloValue};
use assay_core::device_dtype::DeviceDtype;

impl Fold {
    fn op(self) -> &'static str {
        match self {
            Fold::Add => "stablehlo.add",
            Fold::Max => "stablehlo.maximum",
        }
    }

    fn start(self) -> f64 {
        match self {
            Fold::Add => 0.0,
            Fold::Max => f64::NEG_INFINITY,
        }
    }
}
impl HloBuilder {
    /// `Σ a·b` over one axis of each, in f32 products and sums whatever the operands are, and rounded to `element` once: what is left of
    /// the axes of `a`, then of those of `b`. f32 operands are multiplied as f32, which a TPU does in six passes of its bf16 units.
    pub fn dot(&mut self, a: HloValue, b: HloValue, [of_a, of_b]: [usize; 2], element: DeviceDtype) -> HloValue {
        let (left, right) = (self.type_of(a).clone(), self.type_of(b).clone());
        assert_eq!(left.element, right.element, "dot: element types of {left} and {right}");
        assert_eq!(left.shape.get(of_a), right.shape.get(of_b), "dot: axes {of_a} of {left} and {of_b} of {right}");
        self.expect_float("dot", a);
        // Each operand keeps its axes but the contracted one.
        let free = |ty: &HloType, contracted: usize| {
            let mut shape = ty.shape.clone();
            shape.remove(contracted);
            shape
        };
        let ty = HloType { element, shape: [free(&left, of_a), free(&right, of_b)].concat() };
        // Without the request for highest precision a TPU would round f32 operands to bf16.
        let precision = if left.element == DeviceDtype::F32 { "HIGHEST" } else { "DEFAULT" };
        let operation = format!(
            "stablehlo.dot_general {a}, {b}, contracting_dims = [{of_a}] x [{of_b}], precision = [{precision}, {precision}] : ({left}, {right}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }
    /// Returns `a` reduced along `dimensions`.
    pub fn reduce(&mut self, fold: Fold, a: HloValue, dimensions: &[usize]) -> HloValue {
        let from = self.type_of(a).clone();
        assert!(dimensions.iter().all(|&d| d < from.shape.len()), "reduce: {dimensions:?} of {from}");
        let kept = |dimension: &usize| !dimensions.contains(dimension);
        let shape: Vec<usize> = (0..from.shape.len()).filter(kept).map(|d| from.shape[d]).collect();
        let scalar = HloType::new(from.element, &[]);
        let start = self.constant(fold.start(), scalar.clone());
        let ty = HloType { element: from.element, shape };
        let op = fold.op();
        let operation = format!(
            "stablehlo.reduce({a} init: {start}) applies {op} across dimensions = {dimensions:?} : ({from}, {scalar}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// Arrays of one shape folded together along `dimension`, from scalars: `body` makes of two results of part of the places
    /// that of both. In what order is the compiler's choice.
    pub fn reduce_together(
        &mut self,
        arrays: &[HloValue],
        starts: &[HloValue],
        dimension: usize,
        body: impl FnOnce(&mut Self, &[HloValue], &[HloValue]) -> Vec<HloValue>,
    ) -> Vec<HloValue> {
        let scalars: Vec<HloType> = starts.iter().map(|&start| self.type_of(start).clone()).collect();
        let reduced = |array: &HloValue| {
            let HloType { element, mut shape } = self.type_of(*array).clone();
            shape.remove(dimension);
            HloType { element, shape }
        };
        let types: Vec<HloType> = arrays.iter().map(reduced).collect();
        let results = types.iter().map(HloType::to_string).collect::<Vec<_>>().join(", ");
        // The region combines two partial results, each a scalar of every array.
        let [left, right] = [(); 2].map(|()| scalars.iter().map(|ty| self.new_value(ty.clone())).collect::<Vec<_>>());
        let inside = [left.as_slice(), &right].concat();
        let named = inside.iter().map(|&name| format!("{name}: {}", self.type_of(name))).collect::<Vec<_>>().join(", ");
        let (operands, operand_types) = self.lists(&[arrays, starts].concat());
        let reduced = self.define_list(
            types,
            format_args!(
                "\"stablehlo.reduce\"({operands}) <{{dimensions = array<i64: {dimension}>}}> ({{\n    ^bb0({named}):"
            ),
        );
        let both = body(self, &left, &right);
        assert!(both.iter().zip(starts).all(|(&a, &b)| self.type_of(a) == self.type_of(b)), "reduce: a result's type");
        self.yield_region(&both);
        let _ = writeln!(self.body, "    }}) : ({operand_types}) -> ({results})");
        reduced
    }

    /// `a` folded, element by element, over the devices of each group. Every device is in one group.
    pub fn all_reduce(&mut self, fold: Fold, a: HloValue, groups: &[Vec<usize>]) -> HloValue {
        // A group of one device has nothing to exchange.
        if groups.iter().all(|group| group.len() == 1) {
            return a;
        }
        let ty = self.type_of(a).clone();
        let scalar = HloType::new(ty.element, &[]);
        let (rows, columns) = (groups.len(), groups[0].len());
        let op = fold.op();
        // The region's names are its own.
        let operation = format!(
            r#""stablehlo.all_reduce"({a}) <{{replica_groups = dense<{groups:?}> : tensor<{rows}x{columns}xi64>}}> ({{
      ^bb0(%left: {scalar}, %right: {scalar}):
        %both = {op} %left, %right : {scalar}
        stablehlo.return %both : {scalar}
    }}) : ({ty}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// The arrays of a group's devices one after another along `dimension`, on each of them. Every device is in one group.
    pub fn all_gather(&mut self, a: HloValue, dimension: usize, groups: &[Vec<usize>]) -> HloValue {
        let members = groups[0].len();
        if members == 1 {
            return a;
        }
        let from = self.type_of(a).clone();
        assert!(dimension < from.shape.len(), "all_gather: dimension {dimension} of {from}");
        let mut ty = from.clone();
        ty.shape[dimension] *= members;
        let rows = groups.len();
        let operation = format!(
            r#""stablehlo.all_gather"({a}) <{{all_gather_dim = {dimension} : i64, replica_groups = dense<{groups:?}> : tensor<{rows}x{members}xi64>}}> : ({from}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` summed, element by element, over the devices of each group, of which the first has the first part along `dimension`, and
    /// so on. Every device is in one group.
    pub fn reduce_scatter(&mut self, a: HloValue, dimension: usize, groups: &[Vec<usize>]) -> HloValue {
        let members = groups[0].len();
        if members == 1 {
            return a;
        }
        let from = self.type_of(a).clone();
        let parts = from.shape.get(dimension).is_some_and(|extent| extent % members == 0);
        assert!(parts, "reduce_scatter: {members} parts of dimension {dimension} of {from}");
        let mut ty = from.clone();
        ty.shape[dimension] /= members;
        let scalar = HloType::new(ty.element, &[]);
        let rows = groups.len();
        let operation = format!(
            r#""stablehlo.reduce_scatter"({a}) <{{scatter_dimension = {dimension} : i64, replica_groups = dense<{groups:?}> : tensor<{rows}x{members}xi64>}}> ({{
      ^bb0(%left: {scalar}, %right: {scalar}):
        %both = stablehlo.add %left, %right : {scalar}
        stablehlo.return %both : {scalar}
    }}) : ({from}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }
}
