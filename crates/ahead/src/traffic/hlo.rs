//! A parser of optimized HLO: shapes, instructions, computations.

use std::collections::HashMap;

use winnow::ascii::{dec_uint, multispace0, space0};
use winnow::combinator::{alt, delimited, fail, opt, preceded, repeat, separated, terminated};
use winnow::error::{ContextError, ErrMode};
use winnow::token::{take_till, take_until, take_while};
use winnow::{ModalResult, Parser};

use crate::error::AheadError;

/// The shape of a value: an array or a tuple of shapes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum HloShape {
    Array(HloArray),
    Tuple(Vec<HloShape>),
}

/// The type, size and memory space of an array.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HloArray {
    /// The dtype and the extents as HLO writes them, `bf16[1,4096,151936]`.
    pub(super) named: String,
    /// The size in bytes, in whole tiles of the layout.
    bytes: u64,
    /// Whether the array is in HBM, and not in VMEM or another memory.
    hbm: bool,
}

impl HloShape {
    /// Sums the bytes of all arrays that are in HBM.
    pub(super) fn hbm_bytes(&self) -> u64 {
        match self {
            HloShape::Array(array) => {
                if array.hbm {
                    array.bytes
                } else {
                    0
                }
            }
            HloShape::Tuple(parts) => parts.iter().map(HloShape::hbm_bytes).fold(0, u64::saturating_add),
        }
    }

    /// Sums the bytes of all arrays, in whatever memory.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            HloShape::Array(array) => array.bytes,
            HloShape::Tuple(parts) => parts.iter().map(HloShape::bytes).fold(0, u64::saturating_add),
        }
    }

    /// Returns element `index` of a tuple; `None` for an array.
    pub(super) fn part(&self, index: usize) -> Option<&HloShape> {
        match self {
            HloShape::Tuple(parts) => parts.get(index),
            HloShape::Array(_) => None,
        }
    }
}

/// The deepest nesting of tuples. Deeper ones are refused, so that the parser does not overflow the stack.
const DEEPEST: usize = 32;

/// Parses a shape inside of `depth` tuples.
fn shape<'t>(depth: usize) -> impl Parser<&'t str, HloShape, ErrMode<ContextError>> {
    move |text: &mut &'t str| {
        // `/*index=5*/`
        let comment = opt(("/*", take_until(0.., "*/"), "*/"));
        // Long tuples have comments such as `/*index=5*/` between their elements.
        let front = (multispace0, comment);
        if depth > DEEPEST {
            return fail.parse_next(text);
        }
        let parts = separated(0.., shape(depth + 1), (multispace0, ','));
        let tuple = delimited('(', parts, (multispace0, ')')).map(HloShape::Tuple);
        preceded(front, alt((tuple, array.map(HloShape::Array)))).parse_next(text)
    }
}

/// Parses an array such as `bf16[4096,128]{1,0:T(8,128)(2,1)S(1)}`.
fn array(text: &mut &str) -> ModalResult<HloArray> {
    let element = take_while(1.., ('a'..='z', '0'..='9')).verify_map(bits);
    let (named, (bits, extents)) =
        (element, delimited('[', numbers, ']')).with_taken().map(|(read, named)| (named, read)).parse_next(text)?;
    let attributes = preceded(':', repeat(0.., attribute));
    let layout = (numbers, opt(attributes).map(Option::unwrap_or_default));
    let layout = opt(delimited('{', layout, (take_till(0.., '}'), '}'))).parse_next(text)?;
    let (order, attributes): (Vec<u64>, Vec<(&str, &str)>) = layout.unwrap_or_default();
    // `T` is the tile, `S` the memory space; 0 or none is HBM.
    let attribute = |name: &str| attributes.iter().find(|(of, _)| *of == name).map(|(_, value)| *value);
    let tile = attribute("T").map_or(Some(vec![]), |tile| numbers.parse(tile).ok());
    let Some(bytes) = tile.and_then(|tile| bytes_of(&extents, &order, &tile, bits)) else {
        return fail.parse_next(text);
    };
    Ok(HloArray { named: named.into(), bytes, hbm: attribute("S").is_none_or(|space| space == "0") })
}

/// Parses one attribute of a layout, `T(8,128)`, or a second tile, which has no name.
fn attribute<'t>(text: &mut &'t str) -> ModalResult<(&'t str, &'t str)> {
    (take_till(0.., ['(', '}']), delimited('(', take_till(0.., [')', '}']), ')')).parse_next(text)
}

fn numbers(text: &mut &str) -> ModalResult<Vec<u64>> {
    // `<=8`, a bound of a dynamic extent, is read as the bound.
    let number = preceded((space0, opt("<=")), dec_uint::<_, u64, _>);
    terminated(separated(0.., number, ','), space0).parse_next(text)
}

/// Computes the bytes of an array in whole tiles. Its elements have `bits` bits; `order` lists the axes from the innermost outwards.
fn bytes_of(extents: &[u64], order: &[u64], tile: &[u64], bits: u64) -> Option<u64> {
    let extent = |axis: &u64| extents.get(usize::try_from(*axis).ok()?).copied();
    // The layout lists the axes from the innermost outwards, and the tile from the outermost inwards.
    let mut minor_to_major = order.iter().map(extent).collect::<Option<Vec<u64>>>()?;
    // The first tile pads the innermost extents; tiles within it only order the elements.
    for (extent, tile) in minor_to_major.iter_mut().zip(tile.iter().rev()) {
        *extent = extent.checked_next_multiple_of(*tile)?;
    }
    let extents = if minor_to_major.is_empty() { extents } else { &minor_to_major };
    let elements = extents.iter().try_fold(1_u64, |elements, extent| elements.checked_mul(*extent))?;
    Some(elements.checked_mul(bits)?.div_ceil(8))
}

/// Returns the bits of one element of an HLO dtype.
fn bits(element: &str) -> Option<u64> {
    Some(match element {
        "token" | "opaque" => 0,
        "s4" | "u4" | "f4e2m1fn" => 4,
        "pred" | "s8" | "u8" => 8,
        "s16" | "u16" | "f16" | "bf16" => 16,
        "s32" | "u32" | "f32" => 32,
        "s64" | "u64" | "f64" | "c64" => 64,
        "c128" => 128,
        _ if element.starts_with("f8") => 8,
        _ => return None,
    })
}

/// An instruction of HLO: `%name = shape opcode(operands), attributes`.
pub(super) struct HloInstruction<'t> {
    pub(super) name: &'t str,
    pub(super) shape: HloShape,
    pub(super) opcode: &'t str,
    /// The text between the parentheses.
    pub(super) given: &'t str,
    pub(super) operands: Vec<&'t str>,
    pub(super) attributes: &'t str,
    /// Whether the instruction is the result of its computation.
    pub(super) root: bool,
}

impl<'t> HloInstruction<'t> {
    fn parse(line: &'t str) -> Option<HloInstruction<'t>> {
        let line = line.trim_start();
        let returned = line.strip_prefix("ROOT ");
        // `ROOT %name = shape opcode(operands), attributes`
        let (name, rest) = returned.unwrap_or(line).split_once(" = ")?;
        let mut rest = rest;
        let shape = shape(0).parse_next(&mut rest).ok()?;
        let (opcode, rest) = rest.trim_start().split_once('(')?;
        // Operands are names; a constant's value is not a name, and may contain anything.
        let (given, attributes) = rest.split_once(')').unwrap_or((rest, ""));
        let operands = given.split([',', ' ', '/']).filter(|operand| operand.starts_with('%')).collect();
        Some(HloInstruction { name, shape, opcode, given, operands, attributes, root: returned.is_some() })
    }

    /// Returns the computation that the attribute `name` refers to.
    pub(super) fn attribute(&self, name: &str) -> Option<&'t str> {
        self.attributes.split(name).nth(1)?.split([',', ' ']).next()
    }

    /// Returns the names of the computations that the instruction calls.
    pub(super) fn called(&self) -> impl Iterator<Item = &'t str> {
        const CALLS: [&str; 3] = [" calls=", " to_apply=", " called_computations={"];
        let after = |call| self.attributes.split(call).nth(1);
        CALLS.into_iter().filter_map(after).filter_map(|name| name.split([',', '}', ' ']).next())
    }
}

/// The instructions of a computation, and the computations that it calls.
#[derive(Default)]
pub(super) struct HloComputation<'t> {
    pub(super) instructions: Vec<HloInstruction<'t>>,
    pub(super) called: Vec<&'t str>,
}

/// The instructions of one computation by name.
pub(super) struct HloDefinitions<'i, 't>(pub(super) HashMap<&'t str, &'i HloInstruction<'t>>);

impl<'i, 't> HloDefinitions<'i, 't> {
    pub(super) fn new(instructions: &'i [HloInstruction<'t>]) -> Self {
        Self(instructions.iter().map(|instruction| (instruction.name, instruction)).collect())
    }

    /// Follows copies from `operand` to the instruction that they copy.
    pub(super) fn origin<'o>(&'o self, operand: &'o str) -> &'o str {
        self.followed(operand, "copy")
    }

    /// Replaces `name` by its first operand as long as its operation is `opcode`. A cycle of such operations ends at one of them.
    pub(super) fn followed<'o>(&'o self, mut name: &'o str, opcode: &str) -> &'o str {
        for _ in 0..self.0.len() {
            let view = self.0.get(name).filter(|instruction| instruction.opcode == opcode);
            let Some(operand) = view.and_then(|view| view.operands.first()) else { break };
            name = operand;
        }
        name
    }

    /// Follows bitcasts and elements of tuples from `operand` to the instruction that computes it.
    pub(super) fn source<'o>(&'o self, mut operand: &'o str) -> &'o str {
        for _ in 0..self.0.len() {
            // `%tuple#1` is element 1 of a tuple.
            let (name, index) = operand.split_once('#').map_or((operand, None), |(name, index)| (name, Some(index)));
            let Some(found) = self.0.get(name) else { break };
            let part_of = |tuple: &str, index: &str| {
                let tuple = self.0.get(tuple).filter(|found| found.opcode == "tuple")?;
                tuple.operands.get(index.parse::<usize>().ok()?).copied()
            };
            let next = match (found.opcode, index) {
                ("bitcast", None) => found.operands.first().copied(),
                ("get-tuple-element", None) => found
                    .operands
                    .first()
                    .zip(found.attribute(" index="))
                    .and_then(|(tuple, index)| part_of(tuple, index)),
                (_, Some(index)) => part_of(name, index),
                _ => None,
            };
            let Some(next) = next else { break };
            operand = next;
        }
        operand
    }
}

/// The entry computation of a module, and the computations that are called.
pub(super) struct HloModule<'t> {
    pub(super) entry: Vec<HloInstruction<'t>>,
    /// The called computations by name, which includes the `%`.
    pub(super) computations: HashMap<&'t str, HloComputation<'t>>,
}

impl<'t> HloModule<'t> {
    /// Parses the text of a module that was read from `file`.
    ///
    /// # Errors
    /// [`AheadError::Malformed`], with the line that does not read as expected.
    pub(super) fn parse(file: &str, text: &'t str) -> Result<Self, AheadError> {
        // A computation starts at a line such as `%name (…) {` or `ENTRY %main (…) {`, and ends at `}`; the lines between are instructions.
        let mut computations: HashMap<&str, HloComputation> = HashMap::new();
        let mut current: Option<&str> = None;
        let mut entry: Option<Vec<HloInstruction>> = None;
        let mut in_entry = false;
        for (at, line) in text.lines().enumerate() {
            if line.starts_with('}') {
                (current, in_entry) = (None, false);
            } else if line.starts_with(['%', 'E']) && line.ends_with('{') {
                in_entry = line.starts_with("ENTRY ");
                if in_entry {
                    entry = Some(Vec::new());
                } else {
                    current = Some(line.split(' ').next().unwrap_or_default());
                }
            } else if in_entry || current.is_some() {
                let instruction = HloInstruction::parse(line).ok_or_else(|| {
                    AheadError::malformed(file, at + 1, line.trim(), "`%name = shape opcode(operands)`")
                })?;
                if ["copy", "bitcast"].contains(&instruction.opcode) && instruction.operands.is_empty() {
                    return Err(AheadError::malformed(file, at + 1, line.trim(), "an operand"));
                }
                if let (true, Some(entry)) = (in_entry, &mut entry) {
                    entry.push(instruction);
                } else if let Some(name) = current {
                    let computation = computations.entry(name).or_default();
                    computation.called.extend(instruction.called());
                    computation.instructions.push(instruction);
                }
            }
        }
        let entry = entry.ok_or_else(|| AheadError::malformed(file, 0, "no ENTRY", "an entry computation"))?;
        Ok(Self { entry, computations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hlo_arrays_count_whole_tiles_in_hbm_alone() {
        let hbm = |text| shape(0).parse(text).unwrap().hbm_bytes();
        assert_eq!(hbm("bf16[4,100]{1,0:T(8,128)(2,1)}"), 8 * 128 * 2);
        assert_eq!(hbm("f32[2048,151643]{0,1:T(8,128)}"), 151_648 * 2048 * 4);
        assert_eq!(hbm("f32[4096]{0:T(1024)S(1)}"), 0);
        // A scalar has no extent to pad.
        assert_eq!(hbm("(s4[16]{0}, /*index=1*/(pred[]{:T(512)}, f32[2]))"), 8 + 1 + 8);
    }

    #[test]
    fn hlo_malformed_is_an_error() {
        let deep = format!("ENTRY %m () -> f32[] {{\n  %a = {}f32[] parameter(0)\n}}\n", "(".repeat(100_000));
        let broken = [
            "",
            "ENTRY %m () -> f32[] {\n  nonsense\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f99[1] parameter(0)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[18446744073709551615,9] add(%b)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1]{7} parameter(0)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1]{0:T(0)} parameter(0)\n}\n",
            &deep,
        ];
        for text in broken {
            let error = HloModule::parse("x", text).map(|_| ()).unwrap_err();
            assert!(matches!(error, AheadError::Malformed { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn hlo_copy_of_nothing_is_an_error_and_of_itself_ends() {
        let text = |copy: &str| format!("ENTRY %main {{\n  %a = f32[8]{{0}} {copy}\n}}\n");
        for copy in ["copy()", "bitcast()"] {
            let error =
                HloModule::parse("hlo.txt", &text(copy)).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("hlo.txt, line 2") && error.contains("expected an operand"), "{copy}: {error}");
        }
        let text = text("copy(%a)");
        let module = HloModule::parse("hlo.txt", &text).unwrap();
        assert_eq!(HloDefinitions::new(&module.entry).origin("%a"), "%a");
    }
}
