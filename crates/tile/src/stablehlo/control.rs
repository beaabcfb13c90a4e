//! Loops, branches, barriers and calls.

use std::fmt::Write as _;

use super::{HloBuilder, HloType, HloValue};

/// The configuration passed to the callee of a [`custom_call`](HloBuilder::custom_call).
#[derive(Clone, Copy, Debug)]
pub enum CallConfig<'c> {
    /// One opaque text, such as JSON.
    Text(&'c str),
    /// A dictionary of named fields.
    Fields(&'c [(&'c str, CallField<'c>)]),
}

/// One field of a call's dictionary.
#[derive(Clone, Copy, Debug)]
pub enum CallField<'c> {
    /// A text, escaped as MLIR requires.
    Text(&'c str),
    /// A number, written as i32.
    Number(u32),
}

/// A text as MLIR has it, which reads `\XX` as the byte of that number.
fn quoted(text: &str) -> String {
    // The backslash is replaced first, or the escapes of the others would be escaped again.
    let escaped = text.replace('\\', "\\5C").replace('"', "\\22").replace('\n', "\\0A").replace('\t', "\\09");
    format!("\"{escaped}\"")
}
impl HloBuilder {
    /// Repeats `body` from `carried` while `condition` holds of what is carried.
    pub fn while_loop(
        &mut self,
        carried: &[HloValue],
        condition: impl FnOnce(&mut Self, &[HloValue]) -> HloValue,
        body: impl FnOnce(&mut Self, &[HloValue]) -> Vec<HloValue>,
    ) -> Vec<HloValue> {
        let types: Vec<HloType> = carried.iter().map(|&value| self.type_of(value).clone()).collect();
        // The carried values have one name inside both regions and another after the loop.
        let inside: Vec<HloValue> = types.iter().map(|ty| self.new_value(ty.clone())).collect();
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

    /// Returns the values of `then` if `condition`, a scalar, holds, else those of `otherwise`.
    pub fn if_else(
        &mut self,
        condition: HloValue,
        then: impl FnOnce(&mut Self) -> Vec<HloValue>,
        otherwise: &[HloValue],
    ) -> Vec<HloValue> {
        let types: Vec<HloType> = otherwise.iter().map(|&value| self.type_of(value).clone()).collect();
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

    /// A call of the compiler's own `target`, in profiles called `name`, every array dense row-major. `aliases` are pairs (operand, output) that
    /// share their memory.
    pub fn custom_call(
        &mut self,
        target: &str,
        name: &str,
        operands: &[HloValue],
        outputs: &[HloType],
        aliases: &[(usize, usize)],
        config: CallConfig,
    ) -> Vec<HloValue> {
        // Every array is dense row-major: the kernel computes addresses from its extents alone.
        let layout = |ty: &HloType| {
            let rank = ty.shape.len();
            let order: Vec<usize> = (0..rank).rev().collect();
            format!("dense<{order:?}> : tensor<{rank}xindex>")
        };
        let layouts = |types: &mut dyn Iterator<Item = &HloType>| types.map(layout).collect::<Vec<_>>().join(", ");
        let operand_layouts = layouts(&mut operands.iter().map(|&operand| self.type_of(operand)));
        let result_layouts = layouts(&mut outputs.iter());
        // The index of an output is left out if there is only one.
        let aliases = aliases.iter().map(|(operand, output)| {
            let place = if outputs.len() == 1 { String::new() } else { output.to_string() };
            format!(
                "#stablehlo.output_operand_alias<output_tuple_indices = [{place}], operand_index = {operand}, operand_tuple_indices = []>"
            )
        });
        let aliases = aliases.collect::<Vec<_>>().join(", ");
        let (names, types) = self.lists(operands);
        let output_types = outputs.iter().map(HloType::to_string).collect::<Vec<_>>().join(", ");
        // A text is the older version of the interface; a dictionary needs version 4.
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
    /// `a`, which the compiler may not see through: a value that was rounded stays rounded.
    pub fn barrier(&mut self, a: HloValue) -> HloValue {
        let ty = self.type_of(a).clone();
        self.define(ty.clone(), format_args!("stablehlo.optimization_barrier {a} : {ty}"))
    }

    /// Returns `values` behind one barrier: none is used before all have been computed.
    pub fn barrier_of<const N: usize>(&mut self, values: [HloValue; N]) -> [HloValue; N] {
        let types = values.map(|value| self.type_of(value).clone());
        let (names, type_list) = self.lists(&values);
        let held =
            self.define_list(types.to_vec(), format_args!("stablehlo.optimization_barrier {names} : {type_list}"));
        held.try_into().expect("as many as were given")
    }
}
