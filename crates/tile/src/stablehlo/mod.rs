//! StableHLO text, written through typed values.
//!
//! Every operation knows the element type and extents of its operands and checks them when it is written, so that a
//! program which this builder finishes is one that a compiler accepts. A mistake there is a bug of this crate and
//! panics.

mod arrays;
mod control;
mod elementwise;
mod sums;

use std::fmt::{self, Write as _};

use assay_core::device_dtype::DeviceDtype;

pub use super::ir::Fold;
pub use control::{CallConfig, CallField};
pub use elementwise::HloComparison;

/// Element type and extents of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HloType {
    /// The dtype of every element.
    pub element: DeviceDtype,
    /// The extents; none for a scalar.
    pub shape: Vec<usize>,
}

impl HloType {
    /// Returns the type of an array with these extents.
    pub fn new(element: DeviceDtype, shape: &[usize]) -> Self {
        Self { element, shape: shape.to_vec() }
    }
}

impl fmt::Display for HloType {
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
pub struct HloValue {
    /// The operation or parameter that defines it.
    definition: usize,
    /// The index of this result, if the definition has a list of results.
    result: Option<usize>,
}

impl fmt::Display for HloValue {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "%{}", self.definition)?;
        self.result.map_or(Ok(()), |result| write!(f, "#{result}"))
    }
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
pub struct HloBuilder {
    /// The types of each definition's results.
    types: Vec<Vec<HloType>>,
    /// Parameters, each with the output that is written over it.
    parameters: Vec<(HloValue, Option<usize>)>,
    /// Parameters that lie row-major on the device, and so the outputs that are written over them.
    row_major: Vec<HloValue>,
    body: String,
}

impl HloBuilder {
    /// The type of a value.
    pub fn type_of(&self, value: HloValue) -> &HloType {
        &self.types[value.definition][value.result.unwrap_or(0)]
    }

    fn element(&self, value: HloValue) -> DeviceDtype {
        self.type_of(value).element
    }

    fn new_value(&mut self, ty: HloType) -> HloValue {
        self.types.push(vec![ty]);
        HloValue { definition: self.types.len() - 1, result: None }
    }

    /// Writes `%n:k = <operation>` and returns `%n#0 … %n#k−1`.
    fn define_list(&mut self, types: Vec<HloType>, operation: fmt::Arguments) -> Vec<HloValue> {
        let (definition, results) = (self.types.len(), types.len());
        self.types.push(types);
        let _ = writeln!(self.body, "    %{definition}:{results} = {operation}");
        (0..results).map(|result| HloValue { definition, result: Some(result) }).collect()
    }

    /// Writes `%n = <operation>` and returns `%n`.
    fn define(&mut self, ty: HloType, operation: fmt::Arguments) -> HloValue {
        let value = self.new_value(ty);
        let _ = writeln!(self.body, "    {value} = {operation}");
        value
    }

    fn expect_same_type(&self, op: &str, a: HloValue, b: HloValue) {
        assert_eq!(self.type_of(a), self.type_of(b), "{op}: operands of different types");
    }

    fn expect_float(&self, op: &str, a: HloValue) {
        assert!(self.element(a).is_float(), "{op}: got {}, expected a float type", self.type_of(a));
    }

    /// Has a parameter lie row-major on the device, whatever layout would pad it least: a kernel of our own reads it so,
    /// and any other would be copied.
    pub fn lay_out_row_major(&mut self, parameter: HloValue) {
        self.row_major.push(parameter);
    }

    /// The next parameter. With `overwritten_by` it is donated, and that output takes its memory.
    pub fn parameter(&mut self, ty: HloType, overwritten_by: Option<usize>) -> HloValue {
        let value = self.new_value(ty);
        self.parameters.push((value, overwritten_by));
        value
    }

    /// The number `x` in every place of `ty`.
    pub fn constant(&mut self, x: f64, ty: HloType) -> HloValue {
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
    pub fn iota(&mut self, dimension: usize, ty: HloType) -> HloValue {
        assert!(dimension < ty.shape.len(), "iota: dimension {dimension} of {ty}");
        self.define(ty.clone(), format_args!("stablehlo.iota dim = {dimension} : {ty}"))
    }
    fn yield_region(&mut self, values: &[HloValue]) {
        let (names, types) = self.lists(values);
        let _ = writeln!(self.body, "    stablehlo.return {names} : {types}");
    }
    /// The names and the types of values, each separated by commas.
    fn lists(&self, values: &[HloValue]) -> (String, String) {
        let names = values.iter().map(HloValue::to_string).collect::<Vec<_>>().join(", ");
        let types = values.iter().map(|&value| self.type_of(value).to_string()).collect::<Vec<_>>().join(", ");
        (names, types)
    }

    /// Returns the attribute that fixes a parameter's layout on the device; `None` if the compiler may choose.
    fn layout_mode(&self, parameter: HloValue) -> Option<String> {
        self.row_major.contains(&parameter).then(|| row_major_mode(self.type_of(parameter).shape.len()))
    }

    /// The module: `main` from the parameters to `outputs`.
    pub fn finish(self, outputs: &[HloValue]) -> String {
        // A donated parameter names the output that takes its memory; both must have one type.
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
        // An output over a parameter has that parameter's layout.
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
pub fn row_major_copy(ty: &HloType) -> String {
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
