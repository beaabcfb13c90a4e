//! StableHLO text, written through typed values.
//!
//! Every operation knows the element type and extents of its operands and checks them when it is written, so that a
//! program which this builder finishes is one that a compiler accepts. A mistake there is a bug of this crate and
//! panics.

use std::fmt::{self, Write as _};

use assay_core::device_dtype::DeviceDtype;

/// Element type and extents of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    /// The element type.
    pub element: DeviceDtype,
    /// The extents; none for a scalar.
    pub shape: Vec<usize>,
}

impl Type {
    /// An array type.
    pub fn new(element: DeviceDtype, shape: &[usize]) -> Self {
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
pub struct Value {
    /// The operation or parameter that defines it.
    definition: usize,
    /// Which of its results this is, where it has a list of them.
    result: Option<usize>,
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "%{}", self.definition)?;
        self.result.map_or(Ok(()), |result| write!(f, "#{result}"))
    }
}

/// What the callee of a [`custom_call`](Builder::custom_call) is told.
#[derive(Clone, Copy, Debug)]
pub enum CallConfig<'c> {
    /// A text.
    Text(&'c str),
    /// Fields by name.
    Fields(&'c [(&'c str, CallField<'c>)]),
}

/// One of its fields.
#[derive(Clone, Copy, Debug)]
pub enum CallField<'c> {
    /// A text.
    Text(&'c str),
    /// An i32.
    Number(u32),
}

/// A text as MLIR has it, which reads `\XX` as the byte of that number.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\5C").replace('"', "\\22").replace('\n', "\\0A").replace('\t', "\\09");
    format!("\"{escaped}\"")
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

/// NaN or an infinity, as MLIR reads it.
fn bits_of_special(x: f64, element: DeviceDtype) -> &'static str {
    let [nan, plus, minus] = match element {
        DeviceDtype::F64 => ["0x7FF8000000000000", "0x7FF0000000000000", "0xFFF0000000000000"],
        DeviceDtype::Bf16 => ["0x7FC0", "0x7F80", "0xFF80"],
        DeviceDtype::F16 => ["0x7E00", "0x7C00", "0xFC00"],
        _ => ["0x7FC00000", "0x7F800000", "0xFF800000"],
    };
    match x {
        f64::INFINITY => plus,
        f64::NEG_INFINITY => minus,
        _ => nan,
    }
}

/// Writes the one function of a module.
#[derive(Default)]
pub struct Builder {
    /// The types of each definition's results.
    types: Vec<Vec<Type>>,
    /// Parameters, each with the output that is written over it.
    parameters: Vec<(Value, Option<usize>)>,
    /// Parameters that lie row-major on the device, and so the outputs that are written over them.
    row_major: Vec<Value>,
    body: String,
}

impl Builder {
    /// The type of a value.
    pub fn type_of(&self, value: Value) -> &Type {
        &self.types[value.definition][value.result.unwrap_or(0)]
    }

    fn element(&self, value: Value) -> DeviceDtype {
        self.type_of(value).element
    }

    fn new_value(&mut self, ty: Type) -> Value {
        self.types.push(vec![ty]);
        Value { definition: self.types.len() - 1, result: None }
    }

    /// Writes `%n:k = <operation>` and returns `%n#0 … %n#k−1`.
    fn define_list(&mut self, types: Vec<Type>, operation: fmt::Arguments) -> Vec<Value> {
        let (definition, results) = (self.types.len(), types.len());
        self.types.push(types);
        let _ = writeln!(self.body, "    %{definition}:{results} = {operation}");
        (0..results).map(|result| Value { definition, result: Some(result) }).collect()
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

    /// Has a parameter lie row-major on the device, whatever layout would pad it least: a kernel of our own reads it so,
    /// and any other would be copied.
    pub fn lay_out_row_major(&mut self, parameter: Value) {
        self.row_major.push(parameter);
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
            element if element.is_float() && !x.is_finite() => bits_of_special(x, element).to_string(),
            element if element.is_float() => {
                // MLIR wants a point in every float.
                let text = format!("{x:?}");
                if text.contains('.') { text } else { text.replacen('e', ".0e", 1) }
            }
            DeviceDtype::Pred => (if x == 0.0 { "false" } else { "true" }).to_string(),
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

    /// `tanh a`
    pub fn tanh(&mut self, a: Value) -> Value {
        self.unary("tanh", a)
    }

    /// `ln a`
    pub fn log(&mut self, a: Value) -> Value {
        self.unary("log", a)
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

    /// The larger of both; NaN if either is.
    pub fn maximum(&mut self, a: Value, b: Value) -> Value {
        self.binary("maximum", a, b)
    }

    /// The smaller of both; NaN if either is.
    pub fn minimum(&mut self, a: Value, b: Value) -> Value {
        self.binary("minimum", a, b)
    }

    /// `a & b`, bit by bit.
    pub fn bit_and(&mut self, a: Value, b: Value) -> Value {
        assert!(!self.element(a).is_float(), "and: got {}, expected integers", self.type_of(a));
        self.binary("and", a, b)
    }

    /// `a >> b` of integers, the sign kept.
    pub fn shift_right(&mut self, a: Value, b: Value) -> Value {
        assert!(!self.element(a).is_float(), "shift: got {}, expected integers", self.type_of(a));
        self.binary("shift_right_arithmetic", a, b)
    }

    fn logical(&mut self, op: &str, a: Value, b: Value) -> Value {
        assert_eq!(self.element(a), DeviceDtype::Pred, "{op}: truth values");
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
        let ty = Type { element: DeviceDtype::Pred, ..operands.clone() };
        let operation = format!("stablehlo.compare {direction}, {a}, {b}, {kind} : ({operands}, {operands}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.expect_same_type("select", yes, no);
        let ty = self.type_of(yes).clone();
        let truth = self.type_of(condition).clone();
        assert_eq!(truth, Type { element: DeviceDtype::Pred, shape: ty.shape.clone() }, "select: the condition");
        self.define(ty.clone(), format_args!("stablehlo.select {condition}, {yes}, {no} : {truth}, {ty}"))
    }

    /// `a` in another element type, rounded to nearest even.
    pub fn convert(&mut self, a: Value, element: DeviceDtype) -> Value {
        if self.element(a) == element {
            return a;
        }
        let from = self.type_of(a).clone();
        let ty = Type { element, ..from.clone() };
        self.define(ty.clone(), format_args!("stablehlo.convert {a} : ({from}) -> {ty}"))
    }

    /// The bits of `a` as another element type of the same size.
    pub fn bitcast(&mut self, a: Value, element: DeviceDtype) -> Value {
        if self.element(a) == element {
            return a;
        }
        let from = self.type_of(a).clone();
        assert_eq!(from.element.size(), element.size(), "bitcast: {from} to {element}");
        let ty = Type { element, ..from.clone() };
        self.define(ty.clone(), format_args!("stablehlo.bitcast_convert {a} : ({from}) -> {ty}"))
    }

    /// `a` repeated to `shape`; dimension `i` of `a`, of that extent or of one, becomes dimension `dimensions[i]`.
    pub fn broadcast(&mut self, a: Value, dimensions: &[usize], shape: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        assert_eq!(from.shape.len(), dimensions.len(), "broadcast: one dimension for each of {from}");
        for (&extent, &dimension) in from.shape.iter().zip(dimensions) {
            let fits = shape.get(dimension).is_some_and(|&wanted| extent == wanted || extent == 1);
            assert!(fits, "broadcast: {from} to {shape:?} along {dimensions:?}");
        }
        let ty = Type { element: from.element, shape: shape.to_vec() };
        let operation = format!("stablehlo.broadcast_in_dim {a}, dims = {dimensions:?} : ({from}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// The same elements in row-major order under other extents.
    pub fn reshape(&mut self, a: Value, shape: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        if from.shape == shape {
            return a;
        }
        let ty = Type::new(from.element, shape);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        assert_eq!(count(&from.shape), count(shape), "reshape: {from} to {ty}");
        self.define(ty.clone(), format_args!("stablehlo.reshape {a} : ({from}) -> {ty}"))
    }

    /// Elements `start[d] .. start[d] + sizes[d]` along each dimension.
    pub fn slice(&mut self, a: Value, start: &[usize], sizes: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        assert!(start.len() == from.shape.len() && sizes.len() == from.shape.len(), "slice: {start:?} of {from}");
        let range = |(&start, &size): (&usize, &usize)| format!("{start}:{}", start + size);
        let inside = |((&start, &size), &extent): ((&usize, &usize), &usize)| start + size <= extent;
        assert!(start.iter().zip(sizes).zip(&from.shape).all(inside), "slice: {start:?} + {sizes:?} of {from}");
        if sizes == from.shape {
            return a;
        }
        let ranges = start.iter().zip(sizes).map(range).collect::<Vec<_>>().join(", ");
        let ty = Type::new(from.element, sizes);
        self.define(ty.clone(), format_args!("stablehlo.slice {a} [{ranges}] : ({from}) -> {ty}"))
    }

    /// Element `index` of a vector, as a scalar.
    pub fn element_at(&mut self, vector: Value, index: usize) -> Value {
        let one = self.slice(vector, &[index], &[1]);
        self.reshape(one, &[])
    }

    /// A vector of scalars.
    pub fn vector(&mut self, scalars: &[Value]) -> Value {
        let ones: Vec<Value> = scalars.iter().map(|&scalar| self.reshape(scalar, &[1])).collect();
        self.concatenate(&ones, 0)
    }

    /// The arrays one after another along `dimension`.
    pub fn concatenate(&mut self, arrays: &[Value], dimension: usize) -> Value {
        let mut ty = self.type_of(arrays[0]).clone();
        ty.shape[dimension] = 0;
        for &array in arrays {
            let other = self.type_of(array);
            let extent = other.shape[dimension];
            ty.shape[dimension] += extent;
            let same_but_there = {
                let mut expected = ty.clone();
                expected.shape[dimension] = extent;
                *other == expected
            };
            assert!(same_but_there, "concatenate: {other} with others along {dimension}");
        }
        let (names, types) = self.lists(arrays);
        self.define(ty.clone(), format_args!("stablehlo.concatenate {names}, dim = {dimension} : ({types}) -> {ty}"))
    }

    /// `a` with `value`, a scalar, behind it along each dimension, up to `shape`.
    pub fn pad(&mut self, a: Value, value: Value, shape: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        if from.shape == shape {
            return a;
        }
        let scalar = Type::new(from.element, &[]);
        assert_eq!(*self.type_of(value), scalar, "pad: the value");
        let behind: Vec<usize> = shape.iter().zip(&from.shape).map(|(whole, part)| whole - part).collect();
        let nothing = vec![0; shape.len()];
        let ty = Type::new(from.element, shape);
        let operation = format!(
            "stablehlo.pad {a}, {value}, low = {nothing:?}, high = {behind:?}, interior = {nothing:?} : ({from}, {scalar}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `sizes` elements from `start`, one i32 scalar a dimension. A start too far out is moved until the slice is inside.
    pub fn dynamic_slice(&mut self, a: Value, start: &[Value], sizes: &[usize]) -> Value {
        let from = self.type_of(a).clone();
        assert_eq!(start.len(), from.shape.len(), "dynamic_slice: one start a dimension of {from}");
        let ty = Type::new(from.element, sizes);
        let (starts, start_types) = self.lists(start);
        let operation =
            format!("stablehlo.dynamic_slice {a}, {starts}, sizes = {sizes:?} : ({from}, {start_types}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` with `update` written at `start`, as [`dynamic_slice`](Self::dynamic_slice) would read it.
    pub fn dynamic_update_slice(&mut self, a: Value, update: Value, start: &[Value]) -> Value {
        let ty = self.type_of(a).clone();
        let part = self.type_of(update).clone();
        assert_eq!((start.len(), part.element), (ty.shape.len(), ty.element), "dynamic_update_slice: {part} of {ty}");
        let (starts, start_types) = self.lists(start);
        let operation =
            format!("stablehlo.dynamic_update_slice {a}, {update}, {starts} : ({ty}, {part}, {start_types}) -> {ty}");
        self.define(ty, format_args!("{operation}"))
    }

    /// Repeats `body` from `carried` while `condition` holds of what is carried.
    pub fn while_loop(
        &mut self,
        carried: &[Value],
        condition: impl FnOnce(&mut Self, &[Value]) -> Value,
        body: impl FnOnce(&mut Self, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let types: Vec<Type> = carried.iter().map(|&value| self.type_of(value).clone()).collect();
        let inside: Vec<Value> = types.iter().map(|ty| self.new_value(ty.clone())).collect();
        let starts = inside.iter().zip(carried).map(|(name, start)| format!("{name} = {start}"));
        let starts = starts.collect::<Vec<_>>().join(", ");
        let (_, type_list) = self.lists(carried);
        let results = self.define_list(types, format_args!("stablehlo.while({starts}) : {type_list}\n    cond {{"));
        let goes_on = condition(self, &inside);
        let _ = writeln!(self.body, "    stablehlo.return {goes_on} : tensor<i1>\n    }} do {{");
        let next = body(self, &inside);
        assert!(next.iter().zip(carried).all(|(&a, &b)| self.type_of(a) == self.type_of(b)), "while: a carried type");
        self.yield_region(&next);
        let _ = writeln!(self.body, "    }}");
        results
    }

    /// What `then` returns where `condition`, a scalar, holds, else `otherwise`.
    pub fn if_else(
        &mut self,
        condition: Value,
        then: impl FnOnce(&mut Self) -> Vec<Value>,
        otherwise: &[Value],
    ) -> Vec<Value> {
        let types: Vec<Type> = otherwise.iter().map(|&value| self.type_of(value).clone()).collect();
        let (_, type_list) = self.lists(otherwise);
        let results = self.define_list(types, format_args!("\"stablehlo.if\"({condition}) ({{"));
        let values = then(self);
        assert!(values.iter().zip(otherwise).all(|(&a, &b)| self.type_of(a) == self.type_of(b)), "if: a result's type");
        self.yield_region(&values);
        let _ = writeln!(self.body, "    }}, {{");
        self.yield_region(otherwise);
        let _ = writeln!(self.body, "    }}) : (tensor<i1>) -> ({type_list})");
        results
    }

    fn yield_region(&mut self, values: &[Value]) {
        let (names, types) = self.lists(values);
        let _ = writeln!(self.body, "    stablehlo.return {names} : {types}");
    }

    /// The names and the types of values, each separated by commas.
    fn lists(&self, values: &[Value]) -> (String, String) {
        let names = values.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
        let types = values.iter().map(|&value| self.type_of(value).to_string()).collect::<Vec<_>>().join(", ");
        (names, types)
    }

    /// A call of the compiler's own `target`, in profiles called `name`, every array dense row-major. `aliases` are pairs (operand, output) that
    /// share their memory.
    pub fn custom_call(
        &mut self,
        target: &str,
        name: &str,
        operands: &[Value],
        outputs: &[Type],
        aliases: &[(usize, usize)],
        config: CallConfig,
    ) -> Vec<Value> {
        let layout = |ty: &Type| {
            let rank = ty.shape.len();
            let order: Vec<usize> = (0..rank).rev().collect();
            format!("dense<{order:?}> : tensor<{rank}xindex>")
        };
        let layouts = |types: &mut dyn Iterator<Item = &Type>| types.map(layout).collect::<Vec<_>>().join(", ");
        let operand_layouts = layouts(&mut operands.iter().map(|&operand| self.type_of(operand)));
        let result_layouts = layouts(&mut outputs.iter());
        let aliases = aliases.iter().map(|(operand, output)| {
            let place = if outputs.len() == 1 { String::new() } else { output.to_string() };
            format!(
                "#stablehlo.output_operand_alias<output_tuple_indices = [{place}], operand_index = {operand}, operand_tuple_indices = []>"
            )
        });
        let aliases = aliases.collect::<Vec<_>>().join(", ");
        let (names, types) = self.lists(operands);
        let output_types = outputs.iter().map(Type::to_string).collect::<Vec<_>>().join(", ");
        let (version, config) = match config {
            CallConfig::Text(text) => (1, quoted(text)),
            CallConfig::Fields(fields) => {
                let field = |(name, field): &(&str, CallField)| match field {
                    CallField::Text(text) => format!("{name} = {}", quoted(text)),
                    CallField::Number(number) => format!("{name} = {number} : i32"),
                };
                (4, format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", ")))
            }
        };
        let operation = format!(
            "stablehlo.custom_call @{target}({names}) {{api_version = {version} : i32, backend_config = {config}, operand_layouts = [{operand_layouts}], output_operand_aliases = [{aliases}], result_layouts = [{result_layouts}]}} : ({types}) -> ({output_types}) loc(\"{name}\")"
        );
        self.define_list(outputs.to_vec(), format_args!("{operation}"))
    }

    /// `Σ a·b` over one axis of each, in f32 products and sums whatever the operands are, and rounded to `element` once: what is left of
    /// the axes of `a`, then of those of `b`. f32 operands are multiplied as f32, which a TPU does in six passes of its bf16 units.
    pub fn dot(&mut self, a: Value, b: Value, [of_a, of_b]: [usize; 2], element: DeviceDtype) -> Value {
        let (left, right) = (self.type_of(a).clone(), self.type_of(b).clone());
        assert_eq!(left.element, right.element, "dot: element types of {left} and {right}");
        assert_eq!(left.shape.get(of_a), right.shape.get(of_b), "dot: axes {of_a} of {left} and {of_b} of {right}");
        self.expect_float("dot", a);
        let free = |ty: &Type, contracted: usize| {
            let mut shape = ty.shape.clone();
            shape.remove(contracted);
            shape
        };
        let ty = Type { element, shape: [free(&left, of_a), free(&right, of_b)].concat() };
        let precision = if left.element == DeviceDtype::F32 { "HIGHEST" } else { "DEFAULT" };
        let operation = format!(
            "stablehlo.dot_general {a}, {b}, contracting_dims = [{of_a}] x [{of_b}], precision = [{precision}, {precision}] : ({left}, {right}) -> {ty}"
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a`, which the compiler may not see through: a value that was rounded stays rounded.
    pub fn barrier(&mut self, a: Value) -> Value {
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.optimization_barrier {a} : {ty}"))
    }

    /// The same of several: none is used before all are there.
    pub fn barrier_of<const N: usize>(&mut self, values: [Value; N]) -> [Value; N] {
        let types = values.map(|value| self.type_of(value).clone());
        let (names, type_list) = self.lists(&values);
        let held =
            self.define_list(types.to_vec(), format_args!("stablehlo.optimization_barrier {names} : {type_list}"));
        held.try_into().expect("as many as were given")
    }

    /// A matrix with rows for columns.
    pub fn transpose(&mut self, a: Value) -> Value {
        let from = self.type_of(a).clone();
        let [rows, columns] = from.shape[..] else { panic!("transpose: {from} has not two axes") };
        let ty = Type::new(from.element, &[columns, rows]);
        self.define(ty.clone(), format_args!("stablehlo.transpose {a}, dims = [1, 0] : ({from}) -> {ty}"))
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

    /// Arrays of one shape folded together along `dimension`, from scalars: `body` makes of two results of part of the places
    /// that of both. In what order is the compiler's choice.
    pub fn reduce_together(
        &mut self,
        arrays: &[Value],
        starts: &[Value],
        dimension: usize,
        body: impl FnOnce(&mut Self, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let scalars: Vec<Type> = starts.iter().map(|&start| self.type_of(start).clone()).collect();
        let reduced = |array: &Value| {
            let Type { element, mut shape } = self.type_of(*array).clone();
            shape.remove(dimension);
            Type { element, shape }
        };
        let types: Vec<Type> = arrays.iter().map(reduced).collect();
        let results = types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ");
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

    /// The arrays of a group's devices one after another along `dimension`, on each of them. Every device is in one group.
    pub fn all_gather(&mut self, a: Value, dimension: usize, groups: &[Vec<usize>]) -> Value {
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
    pub fn reduce_scatter(&mut self, a: Value, dimension: usize, groups: &[Vec<usize>]) -> Value {
        let members = groups[0].len();
        if members == 1 {
            return a;
        }
        let from = self.type_of(a).clone();
        let parts = from.shape.get(dimension).is_some_and(|extent| extent % members == 0);
        assert!(parts, "reduce_scatter: {members} parts of dimension {dimension} of {from}");
        let mut ty = from.clone();
        ty.shape[dimension] /= members;
        let scalar = Type::new(ty.element, &[]);
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

    /// `a[b, t, indices[b, t]]`, the last axis of `a` gathered. An index out of range is moved to the nearest end.
    pub fn take_along_last(&mut self, a: Value, indices: Value) -> Value {
        let from = self.type_of(a).clone();
        let index = self.type_of(indices).clone();
        let [batch, tokens, _] = from.shape[..] else { panic!("take_along_last: {from} has not three axes") };
        assert_eq!(index, Type::new(DeviceDtype::I32, &[batch, tokens]), "take_along_last: the indices");
        let column = Type::new(DeviceDtype::I32, &[batch, tokens, 1]);
        let starts = self.reshape(indices, &column.shape);
        let ty = Type::new(from.element, &[batch, tokens]);
        let operation = format!(
            r#""stablehlo.gather"({a}, {starts}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}}> : ({from}, {column}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a[b, t, indices[b, t, k]]` of several places of the last axis. An index out of range is moved to the nearest end.
    pub fn take_several_along_last(&mut self, a: Value, indices: Value) -> Value {
        let (ty, places) = self.places_along_last("take_several_along_last", a, indices);
        let (from, index) = (self.type_of(a).clone(), self.type_of(places).clone());
        let operation = format!(
            r#""stablehlo.gather"({a}, {places}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [2], operand_batching_dims = [0, 1], start_indices_batching_dims = [0, 1], start_index_map = [2], index_vector_dim = 3>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}}> : ({from}, {index}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// `a` with `a[b, t, indices[b, t, k]] = values[b, t, k]`. An index out of range sets nothing; of equal ones one is taken, whichever.
    pub fn set_several_along_last(&mut self, a: Value, indices: Value, values: Value) -> Value {
        let (ty, places) = self.places_along_last("set_several_along_last", a, indices);
        assert_eq!(self.type_of(values), &ty, "set_several_along_last: the values");
        let (into, index) = (self.type_of(a).clone(), self.type_of(places).clone());
        let scalar = Type::new(into.element, &[]);
        // The region's names are its own.
        let operation = format!(
            r#""stablehlo.scatter"({a}, {places}, {values}) <{{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [2], input_batching_dims = [0, 1], scatter_indices_batching_dims = [0, 1], scatter_dims_to_operand_dims = [2], index_vector_dim = 3>, indices_are_sorted = false, unique_indices = false}}> ({{
      ^bb0(%left: {scalar}, %right: {scalar}):
        stablehlo.return %right : {scalar}
    }}) : ({into}, {index}, {ty}) -> {into}"#
        );
        self.define(into, format_args!("{operation}"))
    }

    /// The type of `indices` many elements of `a`, and those indices as a vector of one each.
    fn places_along_last(&mut self, what: &str, a: Value, indices: Value) -> (Type, Value) {
        let (from, index) = (self.type_of(a).clone(), self.type_of(indices).clone());
        let [batch, tokens, _] = from.shape[..] else { panic!("{what}: {from} has not three axes") };
        let [_, _, count] = index.shape[..] else { panic!("{what}: {index} has not three axes") };
        assert_eq!(index, Type::new(DeviceDtype::I32, &[batch, tokens, count]), "{what}: the indices");
        (Type::new(from.element, &index.shape), self.reshape(indices, &[batch, tokens, count, 1]))
    }

    /// `a[indices]` of a vector, for indices of any shape. An index out of range is moved to the nearest end.
    pub fn take(&mut self, a: Value, indices: Value) -> Value {
        let (from, index) = (self.type_of(a).clone(), self.type_of(indices).clone());
        assert_eq!((from.shape.len(), index.element), (1, DeviceDtype::I32), "take: of {from} at {index}");
        let places = self.reshape(indices, &[&index.shape[..], &[1]].concat());
        let ty = Type { element: from.element, shape: index.shape };
        let (dimension, index) = (ty.shape.len(), self.type_of(places).clone());
        let operation = format!(
            r#""stablehlo.gather"({a}, {places}) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {dimension}>, indices_are_sorted = false, slice_sizes = array<i64: 1>}}> : ({from}, {index}) -> {ty}"#
        );
        self.define(ty, format_args!("{operation}"))
    }

    /// How a program says in what order the elements of a parameter lie on the device; `None` where that is left open.
    fn layout_mode(&self, parameter: Value) -> Option<String> {
        self.row_major.contains(&parameter).then(|| row_major_mode(self.type_of(parameter).shape.len()))
    }

    /// The module: `main` from the parameters to `outputs`.
    pub fn finish(self, outputs: &[Value]) -> String {
        let parameters = self.parameters.iter().map(|&(value, overwritten_by)| {
            let ty = self.type_of(value);
            let alias = overwritten_by.map(|output| {
                assert_eq!(ty, self.type_of(outputs[output]), "output {output} over a parameter of another type");
                format!("tf.aliasing_output = {output} : i32")
            });
            let attributes: Vec<String> = alias.into_iter().chain(self.layout_mode(value)).collect();
            with_attributes(format!("{value}: {ty}"), &attributes)
        });
        let parameters = parameters.collect::<Vec<_>>().join(", ");
        let (names, types) = self.lists(outputs);
        let results = outputs.iter().enumerate().map(|(place, &output)| {
            let under = self.parameters.iter().find(|&&(_, output)| output == Some(place));
            let attributes: Vec<String> = under.and_then(|&(value, _)| self.layout_mode(value)).into_iter().collect();
            with_attributes(self.type_of(output).to_string(), &attributes)
        });
        let results = results.collect::<Vec<_>>().join(", ");
        let body = self.body;
        format!(
            "module @grpo {{\n  func.func public @main({parameters}) -> ({results}) {{\n{body}    return {names} : {types}\n  }}\n}}\n"
        )
    }
}

/// The module whose one result is its one parameter, row-major on the device whatever order the parameter lies in.
pub fn row_major_copy(ty: &Type) -> String {
    let attributes = [row_major_mode(ty.shape.len())];
    let result = with_attributes(ty.to_string(), &attributes);
    format!("module @lay_out {{\n  func.func public @main(%0: {ty}) -> ({result}) {{\n    return %0 : {ty}\n  }}\n}}\n")
}

/// The attribute by which an array of `rank` lies row-major.
fn row_major_mode(rank: usize) -> String {
    let order: Vec<String> = (0..rank).rev().map(|dimension| dimension.to_string()).collect();
    format!("mhlo.layout_mode = \"{{{}}}\"", order.join(","))
}

fn with_attributes(text: String, attributes: &[String]) -> String {
    if attributes.is_empty() { text } else { format!("{text} {{{}}}", attributes.join(", ")) }
}
