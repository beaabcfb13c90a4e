//! StableHLO text, written through typed values.
//!
//! Every operation knows the element type and extents of its operands and checks them when it is written, so that a
//! program which this builder finishes is one that a compiler accepts. A mistake there is a bug of this crate and
//! panics.

use std::fmt::{self, Write as _};

use crate::element::Element;

/// Element type and extents of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    /// The element type.
    pub element: Element,
    /// The extents; none for a scalar.
    pub shape: Vec<usize>,
}

impl Type {
    /// An array type.
    pub fn new(element: Element, shape: &[usize]) -> Self {
        Self { element, shape: shape.to_vec() }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("tensor<")?;
        for extent in &self.shape {
            write!(f, "{extent}x")?;
        }
        write!(f, "{}>", self.element.mlir())
    }
}

/// A value of the program being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// How a reduction combines two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Sum, from 0.
    Add,
    /// Maximum, from −∞. NaN if any is.
    Max,
}

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

/// Comparisons; all are false where a side is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `=`
    Equal,
    /// `<`
    Less,
    /// `≥`
    AtLeast,
}

/// Writes the one function of a module.
#[derive(Default)]
pub struct Builder {
    types: Vec<Type>,
    /// Parameters, each with the output that is written over it.
    parameters: Vec<(Value, Option<usize>)>,
    body: String,
}

impl Builder {
    /// The type of a value.
    pub fn type_of(&self, value: Value) -> &Type {
        &self.types[value.0]
    }

    fn element(&self, value: Value) -> Element {
        self.types[value.0].element
    }

    fn new_value(&mut self, ty: Type) -> Value {
        self.types.push(ty);
        Value(self.types.len() - 1)
    }

    /// Writes `%n = <operation>` and returns `%n`.
    fn define(&mut self, ty: Type, operation: fmt::Arguments) -> Value {
        let value = self.new_value(ty);
        let _ = writeln!(self.body, "    {value} = {operation}");
        value
    }

    fn expect_same_type(&self, op: &str, a: Value, b: Value) {
        assert_eq!(self.type_of(a), self.type_of(b), "{op}: operands of different types");
    }

    fn expect_float(&self, op: &str, a: Value) {
        assert!(self.element(a).is_float(), "{op}: got {}, expected a float type", self.type_of(a));
    }

    /// The next parameter. With `overwritten_by` it is donated, and that output takes its memory.
    pub fn parameter(&mut self, ty: Type, overwritten_by: Option<usize>) -> Value {
        let value = self.new_value(ty);
        self.parameters.push((value, overwritten_by));
        value
    }

    /// The number `x` in every place of `ty`.
    pub fn constant(&mut self, x: f64, ty: Type) -> Value {
        let text = match ty.element {
            Element::F32 if x.is_infinite() => if x > 0.0 { "0x7F800000" } else { "0xFF800000" }.to_string(),
            element if element.is_float() => {
                assert!(x.is_finite(), "constant: {x} in {element}");
                // MLIR wants a point in every float.
                let text = format!("{x:?}");
                if text.contains('.') { text } else { text.replacen('e', ".0e", 1) }
            }
            Element::Pred => (if x == 0.0 { "false" } else { "true" }).to_string(),
            _ => {
                assert!(x.fract() == 0.0, "constant: {x} as an integer");
                format!("{x:.0}")
            }
        };
        self.define(ty.clone(), format_args!("stablehlo.constant dense<{text}> : {ty}"))
    }

    /// `0, 1, 2, …` along `dimension`.
    pub fn iota(&mut self, dimension: usize, ty: Type) -> Value {
        assert!(dimension < ty.shape.len(), "iota: dimension {dimension} of {ty}");
        self.define(ty.clone(), format_args!("stablehlo.iota dim = {dimension} : {ty}"))
    }

    fn unary(&mut self, op: &str, a: Value) -> Value {
        self.expect_float(op, a);
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.{op} {a} : {ty}"))
    }

    /// `−a`
    pub fn negate(&mut self, a: Value) -> Value {
        self.unary("negate", a)
    }

    /// `e^a`
    pub fn exponential(&mut self, a: Value) -> Value {
        self.unary("exponential", a)
    }

    /// `e^a − 1`
    pub fn exponential_minus_one(&mut self, a: Value) -> Value {
        self.unary("exponential_minus_one", a)
    }

    /// `ln (1 + a)`
    pub fn log_plus_one(&mut self, a: Value) -> Value {
        self.unary("log_plus_one", a)
    }

    fn binary(&mut self, op: &str, a: Value, b: Value) -> Value {
        self.expect_same_type(op, a, b);
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.{op} {a}, {b} : {ty}"))
    }

    /// `a + b`
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.binary("add", a, b)
    }

    /// `a − b`
    pub fn subtract(&mut self, a: Value, b: Value) -> Value {
        self.binary("subtract", a, b)
    }

    /// `a · b`
    pub fn multiply(&mut self, a: Value, b: Value) -> Value {
        self.binary("multiply", a, b)
    }

    /// `a / b`
    pub fn divide(&mut self, a: Value, b: Value) -> Value {
        self.binary("divide", a, b)
    }

    fn logical(&mut self, op: &str, a: Value, b: Value) -> Value {
        assert_eq!(self.element(a), Element::Pred, "{op}: truth values");
        self.binary(op, a, b)
    }

    /// `a ∧ b`
    pub fn and(&mut self, a: Value, b: Value) -> Value {
        self.logical("and", a, b)
    }

    /// `a ∨ b`
    pub fn or(&mut self, a: Value, b: Value) -> Value {
        self.logical("or", a, b)
    }

    /// Truth of a comparison, element by element.
    pub fn compare(&mut self, comparison: Comparison, a: Value, b: Value) -> Value {
        self.expect_same_type("compare", a, b);
        let direction = match comparison {
            Comparison::Equal => "EQ",
            Comparison::Less => "LT",
            Comparison::AtLeast => "GE",
        };
        let operands = self.type_of(a).clone();
        let kind = if operands.element.is_float() { "FLOAT" } else { "SIGNED" };
        let ty = Type { element: Element::Pred, ..operands.clone() };
        let operation = format!("stablehlo.compare {direction}, {a}, {b}, {kind} : ({operands}, {operands}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.expect_same_type("select", yes, no);
        let ty = self.type_of(yes).clone();
        let truth = self.type_of(condition).clone();
        assert_eq!(truth, Type { element: Element::Pred, shape: ty.shape.clone() }, "select: the condition");
        self.define(ty.clone(), format_args!("stablehlo.select {condition}, {yes}, {no} : {truth}, {ty}"))
    }

    /// `a` in another element type, rounded to nearest even.
    pub fn convert(&mut self, a: Value, element: Element) -> Value {
        if self.element(a) == element {
            return a;
        }
        let from = self.type_of(a).clone();
        let ty = Type { element, ..from.clone() };
        self.define(ty.clone(), format_args!("stablehlo.convert {a} : ({from}) -> {ty}"))
    }

    /// `a` repeated to `shape`; dimension `i` of `a` becomes dimension `dimensions[i]`.
    pub fn broadcast(&mut self, a: Value, dimensions: &[usize], shape: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        assert_eq!(from.shape.len(), dimensions.len(), "broadcast: one dimension for each of {from}");
        for (&extent, &dimension) in from.shape.iter().zip(dimensions) {
            assert_eq!(Some(&extent), shape.get(dimension), "broadcast: {from} to {shape:?} along {dimensions:?}");
        }
        let ty = Type { element: from.element, shape: shape.to_vec() };
        let operation = format!("stablehlo.broadcast_in_dim {a}, dims = {dimensions:?} : ({from}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// The same elements in row-major order under other extents.
    pub fn reshape(&mut self, a: Value, shape: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        let ty = Type::new(from.element, shape);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        assert_eq!(count(&from.shape), count(shape), "reshape: {from} to {ty}");
        self.define(ty.clone(), format_args!("stablehlo.reshape {a} : ({from}) -> {ty}"))
    }

    /// Element `index` of a vector, as a scalar.
    pub fn element_at(&mut self, vector: Value, index: usize) -> Value {
        let from = self.type_of(vector).clone();
        assert!(from.shape.len() == 1 && index < from.shape[0], "element {index} of {from}");
        let ty = Type::new(from.element, &[1]);
        let end = index + 1;
        let one = self.define(ty.clone(), format_args!("stablehlo.slice {vector} [{index}:{end}] : ({from}) -> {ty}"));
        self.reshape(one, &[])
    }

    /// A vector of scalars.
    pub fn vector(&mut self, scalars: &[Value]) -> Value {
        let element = self.element(scalars[0]);
        let ones: Vec<Value> = scalars.iter().map(|&scalar| self.reshape(scalar, &[1])).collect();
        let names = ones.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
        let types = ones.iter().map(|&one| self.type_of(one).to_string()).collect::<Vec<_>>().join(", ");
        let ty = Type::new(element, &[scalars.len()]);
        self.define(ty.clone(), format_args!("stablehlo.concatenate {names}, dim = 0 : ({types}) -> {ty}"))
    }

    /// `a` folded along `dimensions`.
    pub fn reduce(&mut self, fold: Fold, a: Value, dimensions: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        assert!(dimensions.iter().all(|&d| d < from.shape.len()), "reduce: {dimensions:?} of {from}");
        let kept = |dimension: &usize| !dimensions.contains(dimension);
        let shape: Vec<usize> = (0..from.shape.len()).filter(kept).map(|d| from.shape[d]).collect();
        let scalar = Type::new(from.element, &[]);
        let start = self.constant(fold.start(), scalar.clone());
        let ty = Type { element: from.element, shape };
        let op = fold.op();
        let operation = format!(
            "stablehlo.reduce({a} init: {start}) applies {op} across dimensions = {dimensions:?} : ({from}, {scalar}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` folded, element by element, over the devices of each group. Every device is in one group.
    pub fn all_reduce(&mut self, fold: Fold, a: Value, groups: &[Vec<usize>]) -> Value {
        if groups.iter().all(|group| group.len() == 1) {
            return a;
        }
        let ty = self.type_of(a).clone();
        let scalar = Type::new(ty.element, &[]);
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

    /// `a[b, t, indices[b, t]]`, the last axis of `a` gathered. An index out of range is moved to the nearest end.
    pub fn take_along_last(&mut self, a: Value, indices: Value) -> Value {
        let from = self.type_of(a).clone();
        let index = self.type_of(indices).clone();
        let [batch, tokens, _] = from.shape[..] else { panic!("take_along_last: {from} has not three axes") };
        assert_eq!(index, Type::new(Element::I32, &[batch, tokens]), "take_along_last: the indices");
        let column = Type::new(Element::I32, &[batch, tokens, 1]);
        let starts = self.reshape(indices, &column.shape);
        let ty = Type::new(from.element, &[batch, tokens]);
        let operation = format!(
            r#""stablehlo.gather"({a}, {starts}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}}> : ({from}, {column}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// The module: `main` from the parameters to `outputs`.
    pub fn finish(self, outputs: &[Value]) -> String {
        let list = |values: &mut dyn Iterator<Item = String>| values.collect::<Vec<_>>().join(", ");
        let parameters = list(&mut self.parameters.iter().map(|&(value, overwritten_by)| {
            let ty = self.type_of(value);
            let alias = overwritten_by.map_or(String::new(), |output| {
                assert_eq!(ty, self.type_of(outputs[output]), "output {output} over a parameter of another type");
                format!(" {{tf.aliasing_output = {output} : i32}}")
            });
            format!("{value}: {ty}{alias}")
        }));
        let types = list(&mut outputs.iter().map(|&output| self.type_of(output).to_string()));
        let names = list(&mut outputs.iter().map(Value::to_string));
        let body = self.body;
        format!(
            "module @grpo {{\n  func.func public @main({parameters}) -> ({types}) {{\n{body}    return {names} : {types}\n  }}\n}}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(shape: &[usize]) -> Type {
        Type::new(Element::F32, shape)
    }

    #[test]
    fn a_small_program_reads_as_written() {
        let mut builder = Builder::default();
        let x = builder.parameter(f32s(&[2, 3]), Some(0));
        let max = builder.reduce(Fold::Max, x, &[1]);
        let max = builder.broadcast(max, &[0], &[2, 3]);
        let gap = builder.subtract(x, max);
        let text = builder.finish(&[gap]);
        assert_eq!(
            text,
            "module @grpo {
  func.func public @main(%0: tensor<2x3xf32> {tf.aliasing_output = 0 : i32}) -> (tensor<2x3xf32>) {
    %1 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.maximum across dimensions = [1] : (tensor<2x3xf32>, tensor<f32>) -> tensor<2xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [0] : (tensor<2xf32>) -> tensor<2x3xf32>
    %4 = stablehlo.subtract %0, %3 : tensor<2x3xf32>
    return %4 : tensor<2x3xf32>
  }
}
"
        );
    }

    #[test]
    fn constants_are_written_as_mlir_reads_them() {
        let mut builder = Builder::default();
        for (x, text) in [(0.0, "0.0"), (-1.5, "-1.5"), (1e-30, "1.0e-30"), (f64::INFINITY, "0x7F800000")] {
            builder.constant(x, f32s(&[]));
            let line = builder.body.lines().last().unwrap();
            assert!(line.ends_with(&format!("dense<{text}> : tensor<f32>")), "{line}");
        }
    }

    #[test]
    fn a_group_of_one_needs_no_collective() {
        let mut builder = Builder::default();
        let x = builder.parameter(f32s(&[4]), None);
        assert_eq!(builder.all_reduce(Fold::Add, x, &[vec![0], vec![1]]), x);
        assert_ne!(builder.all_reduce(Fold::Add, x, &[vec![0, 1]]), x);
    }

    #[test]
    #[should_panic(expected = "add: operands of different types")]
    fn operands_of_different_shapes_are_refused() {
        let mut builder = Builder::default();
        let (x, y) = (builder.parameter(f32s(&[2, 3]), None), builder.parameter(f32s(&[3, 2]), None));
        builder.add(x, y);
    }

    #[test]
    #[should_panic(expected = "exponential: got tensor<2xi32>, expected a float type")]
    fn operations_of_real_numbers_refuse_integers() {
        let mut builder = Builder::default();
        let x = builder.parameter(Type::new(Element::I32, &[2]), None);
        builder.exponential(x);
    }

    #[test]
    #[should_panic(expected = "broadcast: tensor<3xf32> to [3, 2] along [1]")]
    fn a_broadcast_along_the_wrong_dimension_is_refused() {
        let mut builder = Builder::default();
        let x = builder.parameter(f32s(&[3]), None);
        builder.broadcast(x, &[1], &[3, 2]);
    }

    #[test]
    #[should_panic(expected = "output 0 over a parameter of another type")]
    fn an_output_over_a_parameter_of_another_type_is_refused() {
        let mut builder = Builder::default();
        let x = builder.parameter(Type::new(Element::Bf16, &[2]), Some(0));
        let wide = builder.convert(x, Element::F32);
        builder.finish(&[wide]);
    }
}
