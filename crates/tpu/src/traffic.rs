//! Bytes that a program moves between HBM and the cores, from its optimized HLO.
//!
//! Each instruction of the entry computation reads its operands and writes its outputs, each once, in whole tiles of
//! their layout. What does not move:
//!
//! - parameters, constants, tuples, bitcasts and `iota` of themselves;
//! - arrays that the layout puts elsewhere, `S(1)` (VMEM) and the like;
//! - an array of which a part is written, in place, beyond that part; and one of which a fusion takes no more than parts at
//!   places told at run time, beyond those;
//! - an operand that is only gathered from or sliced, beyond what comes out. Whether a fusion gathers from an
//!   operand, or an async call copies a slice of it, is told by its shape in the computations that are called.
//!
//! An async pair is counted where it starts, for its operands, and where it is done, for its output; an in-place
//! custom call reads its operands once and writes its outputs once like any other. The body of a `while` counts as often as it
//! runs, where that can be told. What an instruction keeps to
//! itself (spills to HBM, a kernel's own DMAs that fetch a window twice) is not seen: for a Mosaic kernel this is the
//! least it can move. Bodies of a `conditional`, and of a `while` of unknown trips, are not counted; the instructions are
//! named.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::error::TpuError;
use super::files::read_text;
use super::schedule::Kernel;

const SUFFIX: &str = ".after_optimizations.txt";

/// What one run moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Bytes read from HBM and written to it, on one device.
    pub hbm_bytes: u64,
    /// Instructions with bodies that run a number of times that HLO does not say.
    pub uncounted: Vec<String>,
    /// How often the instructions of loops run, by name; every other runs once.
    pub runs: BTreeMap<String, u64>,
    /// Names of collectives, those together that are alike: libtpu compiles one program for them, which has the name of one.
    pub collectives: Vec<Vec<String>>,
}

impl Traffic {
    /// Says of each kernel how often it is launched, for what has its name and for collectives that it serves too. Those that
    /// none serves come back.
    pub fn launch(&self, kernels: &mut [Kernel]) -> Vec<String> {
        let runs = |name: &str| self.runs.get(name).copied().unwrap_or(1);
        for kernel in &mut *kernels {
            kernel.runs = runs(&kernel.name);
        }
        let compiled: HashSet<String> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
        let mut unserved = Vec::new();
        for alike in &self.collectives {
            let (serving, served): (Vec<&String>, Vec<&String>) =
                alike.iter().partition(|name| compiled.contains(*name));
            match kernels.iter_mut().find(|kernel| serving.first().is_some_and(|name| **name == kernel.name)) {
                Some(kernel) => {
                    kernel.runs = served.iter().map(|name| runs(name)).fold(kernel.runs, u64::saturating_add);
                }
                None => unserved.extend(served.into_iter().cloned()),
            }
        }
        unserved
    }
}

/// The traffic of the program whose dump lies in `folder`.
///
/// # Errors
/// [`TpuError::Dump`] where there is none or it does not read as expected, [`TpuError::Io`] where it cannot be read.
pub fn read(folder: &Path) -> Result<Traffic, TpuError> {
    let failed = |reason| TpuError::Io { path: folder.into(), action: "list", reason };
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    // `module_0000.…` is the program; later ones are parts of it that were compiled apart, for the SparseCore.
    let module = names.into_iter().filter(|name| name.ends_with(SUFFIX)).min();
    let module = module.ok_or_else(|| malformed(SUFFIX, 0, "no such file", "a module's optimized HLO"))?;
    Traffic::parse(&module, &read_text(&folder.join(&module))?)
}

fn malformed(file: &str, line: usize, given: impl Into<String>, expected: &'static str) -> TpuError {
    let given: String = given.into().chars().take(80).collect();
    TpuError::Dump { file: file.into(), line, given, expected }
}

/// An array or a tuple of them.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Array(Array),
    Tuple(Vec<Shape>),
}

#[derive(Clone, Debug, PartialEq)]
struct Array {
    /// `bf16[1,4096,151936]`
    named: String,
    /// Bytes in whole tiles.
    bytes: u64,
    /// Whether it lies in HBM.
    hbm: bool,
}

impl Shape {
    fn hbm_bytes(&self) -> u64 {
        match self {
            Shape::Array(array) => {
                if array.hbm {
                    array.bytes
                } else {
                    0
                }
            }
            Shape::Tuple(parts) => parts.iter().map(Shape::hbm_bytes).fold(0, u64::saturating_add),
        }
    }

    /// Bytes of all parts, wherever they lie.
    fn bytes(&self) -> u64 {
        match self {
            Shape::Array(array) => array.bytes,
            Shape::Tuple(parts) => parts.iter().map(Shape::bytes).fold(0, u64::saturating_add),
        }
    }

    fn part(&self, index: usize) -> Option<&Shape> {
        match self {
            Shape::Tuple(parts) => parts.get(index),
            Shape::Array(_) => None,
        }
    }
}

/// Tuples nested deeper than any compiler nests them are refused, lest the stack overflow.
const DEEPEST: usize = 32;

/// Reads a shape off the front of `text`; the rest comes back.
fn shape(text: &str, depth: usize) -> Option<(Shape, &str)> {
    let mut text = text.trim_start();
    let Some(inside) = text.strip_prefix('(') else {
        return array(text).map(|(array, rest)| (Shape::Array(array), rest));
    };
    if depth == DEEPEST {
        return None;
    }
    text = inside.trim_start();
    let mut parts = Vec::new();
    loop {
        if let Some(rest) = text.strip_prefix(')') {
            return Some((Shape::Tuple(parts), rest));
        }
        // `/*index=5*/`
        if let Some(comment) = text.strip_prefix("/*") {
            text = comment.split_once("*/")?.1;
        }
        let (part, rest) = shape(text, depth + 1)?;
        parts.push(part);
        text = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
}

/// `bf16[4096,128]{1,0:T(8,128)(2,1)S(1)}`
fn array(text: &str) -> Option<(Array, &str)> {
    let (element, rest) = text.split_once('[')?;
    let bits = bits(element)?;
    let (extents, rest) = rest.split_once(']')?;
    let named = format!("{element}[{extents}]");
    let extents: Vec<u64> = numbers(extents)?;
    let (layout, rest) = match rest.strip_prefix('{') {
        Some(layout) => layout.split_once('}')?,
        None => ("", rest),
    };
    let (order, attributes) = layout.split_once(':').unwrap_or((layout, ""));
    let order: Vec<u64> = numbers(order)?;
    let mut minor_to_major = Vec::new();
    for axis in order {
        minor_to_major.push(*extents.get(usize::try_from(axis).ok()?)?);
    }
    // The first tile pads the innermost extents; tiles within it only order the elements.
    if let Some(tile) = attributes.strip_prefix("T(").and_then(|tiles| tiles.split_once(')')) {
        for (extent, tile) in minor_to_major.iter_mut().zip(numbers(tile.0)?.into_iter().rev()) {
            *extent = extent.checked_next_multiple_of(tile)?;
        }
    }
    let extents = if minor_to_major.is_empty() { extents } else { minor_to_major };
    let elements = extents.into_iter().try_fold(1_u64, u64::checked_mul)?;
    let bytes = elements.checked_mul(bits)?.div_ceil(8);
    let space = attributes.split_once("S(").and_then(|(_, space)| space.split_once(')'));
    let hbm = space.is_none_or(|(space, _)| space == "0");
    Some((Array { named, bytes, hbm }, rest))
}

fn numbers(text: &str) -> Option<Vec<u64>> {
    let numbers = text.split(',').map(str::trim).filter(|number| !number.is_empty());
    // `<=8`, a bound of a dynamic extent, is read as the bound.
    numbers.map(|number| number.trim_start_matches("<=").parse().ok()).collect()
}

/// Bits of an element.
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

/// One instruction: `%name = shape opcode(operands), attributes`.
struct Instruction<'t> {
    name: &'t str,
    shape: Shape,
    opcode: &'t str,
    /// What stands between the parentheses.
    given: &'t str,
    operands: Vec<&'t str>,
    attributes: &'t str,
    /// Whether it is what its computation returns.
    root: bool,
}

impl<'t> Instruction<'t> {
    fn parse(line: &'t str) -> Option<Instruction<'t>> {
        let line = line.trim_start();
        let returned = line.strip_prefix("ROOT ");
        let (name, rest) = returned.unwrap_or(line).split_once(" = ")?;
        let (shape, rest) = shape(rest, 0)?;
        let (opcode, rest) = rest.trim_start().split_once('(')?;
        // Operands are names; a constant's value is none, and may hold anything.
        let (given, attributes) = rest.split_once(')').unwrap_or((rest, ""));
        let operands = given.split([',', ' ', '/']).filter(|operand| operand.starts_with('%')).collect();
        Some(Instruction { name, shape, opcode, given, operands, attributes, root: returned.is_some() })
    }

    /// The computation that an attribute names.
    fn attribute(&self, name: &str) -> Option<&'t str> {
        self.attributes.split(name).nth(1)?.split([',', ' ']).next()
    }

    /// Computations that it calls.
    fn called(&self) -> impl Iterator<Item = &'t str> {
        const CALLS: [&str; 3] = [" calls=", " to_apply=", " called_computations={"];
        let after = |call| self.attributes.split(call).nth(1);
        CALLS.into_iter().filter_map(after).filter_map(|name| name.split([',', '}', ' ']).next())
    }
}

/// A computation: what it does, what it takes parts of, and what it calls.
#[derive(Default)]
struct Computation<'t> {
    instructions: Vec<Instruction<'t>>,
    /// `(opcode, shape taken from, bytes that come out)`
    parts: Vec<(&'t str, String, u64)>,
    called: Vec<&'t str>,
}

/// Bytes that `instruction` takes of operands that it only takes parts of, by their shape.
fn parts_taken(instruction: &Instruction, computations: &HashMap<&str, Computation>) -> HashMap<String, u64> {
    // A fusion that slices an operand may read the rest of it too; an async copy of a slice does not.
    let opcodes: &[&str] = match instruction.opcode {
        "async-start" => &["gather", "slice", "dynamic-slice"],
        _ => &["gather"],
    };
    let mut found = HashMap::new();
    let mut seen = HashSet::new();
    let mut waiting: Vec<&str> = instruction.called().collect();
    while let Some(name) = waiting.pop() {
        if let Some(computation) = computations.get(name).filter(|_| seen.insert(name)) {
            let taken = computation.parts.iter().filter(|(opcode, ..)| opcodes.contains(opcode));
            found.extend(taken.map(|(_, shape, bytes)| (shape.clone(), *bytes)));
            waiting.extend(&computation.called);
        }
    }
    found
}

/// Instructions of one computation by name.
struct Definitions<'i, 't>(HashMap<&'t str, &'i Instruction<'t>>);

impl<'i, 't> Definitions<'i, 't> {
    fn of(instructions: &'i [Instruction<'t>]) -> Self {
        Self(instructions.iter().map(|instruction| (instruction.name, instruction)).collect())
    }

    /// What `operand` is a copy of.
    fn origin<'o>(&'o self, mut operand: &'o str) -> &'o str {
        while let Some(copy) = self.0.get(operand).filter(|instruction| instruction.opcode == "copy") {
            operand = copy.operands[0];
        }
        operand
    }

    /// Which part of the computation's parameter `operand` is.
    fn carried(&self, operand: &str) -> Option<usize> {
        let (tuple, place) = self.origin(operand).split_once('#')?;
        self.0.get(tuple).filter(|instruction| instruction.opcode == "parameter")?;
        place.parse().ok()
    }

    /// The value of an integer constant.
    fn constant(&self, operand: &str) -> Option<u64> {
        let constant = self.0.get(self.origin(operand)).filter(|instruction| instruction.opcode == "constant")?;
        constant.given.trim().parse().ok()
    }
}

/// Bytes that an instruction moves of arrays that it does not read or write whole.
#[derive(Default)]
struct Windows {
    /// By place among the operands.
    read: HashMap<usize, u64>,
    /// By place among the results.
    written: HashMap<usize, u64>,
}

impl Windows {
    fn of(instruction: &Instruction, around: &Definitions, computations: &HashMap<&str, Computation>) -> Self {
        const TAKE: &str = "dynamic-slice";
        const PUT: &str = "dynamic-update-slice";
        let bytes = |definitions: &Definitions, name: &str| {
            definitions.0.get(name).map_or(0, |instruction| instruction.shape.bytes())
        };
        let mut windows = Windows::default();
        if let (PUT, [_, part, ..]) = (instruction.opcode, &instruction.operands[..]) {
            windows.read.insert(0, 0);
            windows.written.insert(0, bytes(around, part));
        }
        let body = instruction.called().next().and_then(|name| computations.get(name));
        let Some(body) = body.filter(|_| instruction.opcode == "fusion").map(|body| &body.instructions) else {
            return windows;
        };
        let inside = Definitions::of(body);
        let source = |mut name| {
            while let Some(view) = inside.0.get(name).filter(|instruction| instruction.opcode == "bitcast") {
                name = view.operands[0];
            }
            name
        };
        let parameter = |name| -> Option<usize> {
            let parameter = inside.0.get(source(name)).filter(|instruction| instruction.opcode == "parameter")?;
            parameter.given.trim().parse().ok()
        };
        let mut whole = HashSet::new();
        for user in body.iter().filter(|user| user.opcode != "bitcast") {
            for (place, operand) in user.operands.iter().enumerate() {
                let Some(parameter) = parameter(operand) else { continue };
                match (user.opcode, place) {
                    (TAKE, 0) => *windows.read.entry(parameter).or_default() += user.shape.bytes(),
                    (PUT, 0) => *windows.read.entry(parameter).or_default() += 0,
                    _ => _ = whole.insert(parameter),
                }
            }
        }
        windows.read.retain(|parameter, _| !whole.contains(parameter));
        let root = body.iter().find(|instruction| instruction.root);
        let results =
            root.map_or(vec![], |root| if root.opcode == "tuple" { root.operands.clone() } else { vec![root.name] });
        for (place, result) in results.into_iter().enumerate() {
            let put = inside.0.get(source(result)).filter(|instruction| instruction.opcode == PUT);
            if let Some([array, part, ..]) = put.map(|put| &put.operands[..])
                && parameter(array).is_some()
            {
                windows.written.insert(place, bytes(&inside, part));
            }
        }
        windows
    }

    /// Of the results, those that lie in HBM.
    fn bytes_written(&self, results: &Shape) -> u64 {
        let part = |(place, part): (usize, &Shape)| {
            let whole = part.hbm_bytes();
            self.written.get(&place).map_or(whole, |&bytes| whole.min(bytes))
        };
        match results {
            Shape::Array(_) => part((0, results)),
            Shape::Tuple(parts) => parts.iter().enumerate().map(part).fold(0, u64::saturating_add),
        }
    }
}

/// How often the body of `repeated` runs, a `while` among `around`: where a number that it carries starts at a constant,
/// grows by one and is compared with a third.
fn trips(repeated: &Instruction, around: &Definitions, computations: &HashMap<&str, Computation>) -> Option<u64> {
    let [condition, body] =
        [" condition=", " body="].map(|name| repeated.attribute(name).and_then(|name| computations.get(name)));
    let (condition, body) = (&condition?.instructions, &body?.instructions);
    let root = |instructions: &[Instruction]| instructions.iter().position(|instruction| instruction.root);
    let compare = &condition[root(condition)?];
    let [counter, end] = compare.operands[..] else { return None };
    if compare.opcode != "compare" || !compare.attributes.contains("direction=LT") {
        return None;
    }
    let end = Definitions::of(condition).constant(end)?;
    let place = Definitions::of(condition).carried(counter)?;
    let start = around.0.get(repeated.operands.first()?).filter(|tuple| tuple.opcode == "tuple")?;
    let start = around.constant(start.operands.get(place)?)?;
    let next = &body[root(body)?];
    let inside = Definitions::of(body);
    let add = inside.0.get(next.operands.get(place)?).filter(|add| add.opcode == "add")?;
    let [left, right] = add.operands[..] else { return None };
    let step = inside.constant(right).filter(|&step| step > 0)?;
    let same = inside.carried(left) == Some(place);
    (same && next.opcode == "tuple").then(|| end.saturating_sub(start).div_ceil(step))
}

/// Opcodes of what devices do together, at once or from here on.
const COLLECTIVES: [&str; 9] = [
    "all-gather",
    "all-gather-start",
    "all-reduce",
    "all-reduce-start",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "collective-permute-start",
    "reduce-scatter",
];

/// What makes collectives alike.
#[derive(PartialEq)]
struct Likeness<'t> {
    opcode: &'t str,
    shape: Shape,
    operands: Vec<Option<Shape>>,
    groups: Option<&'t str>,
    /// What they reduce by.
    by: Option<&'t str>,
}

impl<'t> Likeness<'t> {
    fn of(instruction: &Instruction<'t>, around: &Definitions, computations: &HashMap<&str, Computation<'t>>) -> Self {
        let shape_of = |operand: &&str| around.0.get(*operand).map(|instruction| instruction.shape.clone());
        let reducer = instruction.called().next().and_then(|name| computations.get(name));
        let groups = instruction.attributes.split_once("replica_groups=").map(|(_, after)| after);
        Likeness {
            opcode: instruction.opcode,
            shape: instruction.shape.clone(),
            operands: instruction.operands.iter().map(shape_of).collect(),
            groups: groups.map(|groups| groups.split_once(", ").map_or(groups, |(groups, _)| groups)),
            by: reducer.and_then(|body| body.instructions.iter().find(|last| last.root)).map(|last| last.opcode),
        }
    }
}

/// Opcodes that move nothing of themselves.
const STILL: [&str; 10] = [
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "iota",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
];

impl Traffic {
    /// Counts a computation that runs `runs` times; the bodies of its loops come back, each with how often it runs.
    fn count<'t>(
        &mut self,
        file: &str,
        instructions: &[Instruction<'t>],
        runs: u64,
        computations: &HashMap<&str, Computation<'t>>,
        likenesses: &mut Vec<Likeness<'t>>,
    ) -> Result<Vec<(&'t str, u64)>, TpuError> {
        let definitions = Definitions::of(instructions);
        let by_name = &definitions.0;
        let mut bodies = Vec::new();
        let mut bytes = 0_u64;
        for instruction in instructions.iter().filter(|instruction| !STILL.contains(&instruction.opcode)) {
            let own_name = instruction.name.trim_start_matches('%');
            if runs > 1 {
                self.runs.insert(own_name.into(), runs);
            }
            if COLLECTIVES.contains(&instruction.opcode) {
                let likeness = Likeness::of(instruction, &definitions, computations);
                let place = likenesses.iter().position(|other| *other == likeness).unwrap_or_else(|| {
                    likenesses.push(likeness);
                    self.collectives.push(Vec::new());
                    self.collectives.len() - 1
                });
                self.collectives[place].push(own_name.into());
            }
            if matches!(instruction.opcode, "while" | "conditional") {
                let known = trips(instruction, &definitions, computations);
                if let (Some(trips), Some(body)) = (known, instruction.attribute(" body=")) {
                    bodies.push((body, runs.saturating_mul(trips)));
                    continue;
                }
                self.uncounted.push(instruction.name.into());
                continue;
            }
            // An async call is described where it starts: by the handle that `async-update` takes.
            let handle = instruction.operands.first().filter(|_| instruction.opcode == "async-update");
            let described = handle.and_then(|handle| by_name.get(handle)).copied().unwrap_or(instruction);
            let parts = parts_taken(described, computations);
            let starts = instruction.opcode.ends_with("-start") || instruction.opcode == "async-update";
            let mut counted = HashSet::new();
            let windows = Windows::of(instruction, &definitions, computations);
            for (place, operand) in instruction.operands.iter().enumerate() {
                let (name, index) =
                    operand.split_once('#').map_or((*operand, None), |(name, index)| (name, Some(index)));
                let unknown =
                    || malformed(file, 0, format!("{operand} in {}", instruction.name), "an earlier instruction");
                let source = by_name.get(name).ok_or_else(unknown)?;
                // The handle of an async call is no array.
                let handle = source.opcode.ends_with("-start") || source.opcode == "async-update";
                if handle || !counted.insert(operand) {
                    continue;
                }
                let shape = match index {
                    None => &source.shape,
                    Some(index) => index.parse().ok().and_then(|index| source.shape.part(index)).ok_or_else(unknown)?,
                };
                let whole = shape.hbm_bytes();
                let read = match (instruction.opcode, shape) {
                    ("gather" | "slice" | "dynamic-slice", _) => whole.min(instruction.shape.bytes()),
                    (_, Shape::Array(array)) => parts.get(&array.named).map_or(whole, |&bytes| whole.min(bytes)),
                    _ => whole,
                };
                let read = windows.read.get(&place).map_or(read, |&bytes| read.min(bytes));
                bytes = bytes.saturating_add(read);
            }
            if !starts {
                bytes = bytes.saturating_add(windows.bytes_written(&instruction.shape));
            }
        }
        self.hbm_bytes = self.hbm_bytes.saturating_add(bytes.saturating_mul(runs));
        Ok(bodies)
    }

    /// From the text of an optimized HLO module; `file` is its name.
    ///
    /// # Errors
    /// [`TpuError::Dump`], with the line that does not read as expected.
    pub fn parse(file: &str, text: &str) -> Result<Traffic, TpuError> {
        let mut computations: HashMap<&str, Computation> = HashMap::new();
        let mut current: Option<(&str, HashMap<&str, Shape>)> = None;
        let mut entry: Option<Vec<Instruction>> = None;
        let mut in_entry = false;
        for (at, line) in text.lines().enumerate() {
            if line.starts_with('}') {
                (current, in_entry) = (None, false);
            } else if line.starts_with(['%', 'E']) && line.ends_with('{') {
                in_entry = line.starts_with("ENTRY ");
                if in_entry {
                    entry = Some(Vec::new());
                } else {
                    current = Some((line.split(' ').next().unwrap_or_default(), HashMap::new()));
                }
            } else if in_entry || current.is_some() {
                let instruction = Instruction::parse(line)
                    .ok_or_else(|| malformed(file, at + 1, line.trim(), "`%name = shape opcode(operands)`"))?;
                if let (true, Some(entry)) = (in_entry, &mut entry) {
                    entry.push(instruction);
                } else if let Some((name, shapes)) = &mut current {
                    let computation = computations.entry(name).or_default();
                    computation.called.extend(instruction.called());
                    let from = instruction.operands.first().and_then(|operand| shapes.get(operand));
                    if let ("gather" | "slice" | "dynamic-slice", Some(Shape::Array(from))) = (instruction.opcode, from)
                    {
                        let bytes = instruction.shape.bytes();
                        computation.parts.push((instruction.opcode, from.named.clone(), bytes));
                    }
                    shapes.insert(instruction.name, instruction.shape.clone());
                    computation.instructions.push(instruction);
                }
            }
        }
        let entry = entry.ok_or_else(|| malformed(file, 0, "no ENTRY", "an entry computation"))?;
        let mut traffic = Traffic::default();
        let mut likenesses = Vec::new();
        let mut waiting = vec![(&entry, 1)];
        while let Some((instructions, runs)) = waiting.pop() {
            for (body, trips) in traffic.count(file, instructions, runs, &computations, &mut likenesses)? {
                let body = computations.get(body).ok_or_else(|| malformed(file, 0, body, "a computation"))?;
                waiting.push((&body.instructions, trips));
            }
        }
        Ok(traffic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const XLA: &str = include_str!("../../../fixtures/tpu/xla.after_optimizations.txt");

    /// Bytes of the bf16 logits `[1,4096,151936]`.
    const LOGITS: u64 = 4096 * 151_936 * 2;

    #[test]
    fn the_baseline_moves_its_logits_six_times() {
        let traffic = Traffic::parse("xla", XLA).unwrap();
        // Read by three fusions, written once as dlogits and once, for the gather, as f32: 3 + 1 + 2.
        let rest = traffic.hbm_bytes - 6 * LOGITS;
        assert!(rest < LOGITS / 1000, "{rest} bytes per token");
        assert!(traffic.uncounted.is_empty());
    }

    #[test]
    fn a_gathered_operand_is_read_as_far_as_it_is_gathered() {
        let whole = XLA.replace(" gather(", " notgather(");
        let (gathered, whole) = (Traffic::parse("x", XLA).unwrap(), Traffic::parse("x", &whole).unwrap());
        assert_eq!(whole.hbm_bytes - gathered.hbm_bytes, 2 * LOGITS - 4096 * 4);
    }

    #[test]
    fn tiles_are_whole_and_other_memories_are_not_hbm() {
        let hbm = |text| shape(text, 0).unwrap().0.hbm_bytes();
        assert_eq!(hbm("bf16[4,100]{1,0:T(8,128)(2,1)}"), 8 * 128 * 2);
        assert_eq!(hbm("f32[2048,151643]{0,1:T(8,128)}"), 151_648 * 2048 * 4);
        assert_eq!(hbm("f32[4096]{0:T(1024)S(1)}"), 0);
        // A scalar has no extent to pad.
        assert_eq!(hbm("(s4[16]{0}, /*index=1*/(pred[]{:T(512)}, f32[2]))"), 8 + 1 + 8);
    }

    #[test]
    fn an_operand_counts_once_and_a_slice_as_far_as_it_goes() {
        let text = "%cut (p: f32[100]) -> f32[10] {
  %p = f32[100] parameter(0)
  ROOT %s = f32[10] slice(%p), slice={[0:10]}
}

%pick (q: f32[100], i: s32[3]) -> f32[3] {
  %q = f32[100] parameter(0)
  %i = s32[3] parameter(1)
  ROOT %g = f32[3] gather(%q, %i), slice_sizes={1}
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100] parameter(0)
  %start = ((f32[100]), f32[10], s32[]{:S(2)}) async-start(%a), calls=%cut
  %done = f32[10] async-done(%start)
  %ids = s32[3]{0:S(1)} iota(), iota_dimension=0
  %picked = f32[3] fusion(%a, %ids), kind=kCustom, calls=%pick
  %loop = f32[100] while(%a), condition=%c, body=%b
  ROOT %twice = f32[100] add(%a, %a)
}
";
        let traffic = Traffic::parse("x", text).unwrap();
        assert_eq!(traffic.hbm_bytes, (10 + 10 + 3 + 3 + 100 + 100) * 4);
        assert_eq!(traffic.uncounted, ["%loop"]);
    }

    #[test]
    fn a_part_that_is_written_in_place_or_taken_counts_alone() {
        let text = "%put (p: f32[100], q: f32[50], i: s32[]) -> f32[100] {
  %p = f32[100] parameter(0)
  %q = f32[50] parameter(1)
  %i = s32[] parameter(2)
  %seen = f32[100] bitcast(%p)
  %part = f32[7] dynamic-slice(%q, %i), dynamic_slice_sizes={7}
  ROOT %r = f32[100] dynamic-update-slice(%seen, %part, %i)
}

ENTRY %main (a: f32[100], b: f32[50], c: f32[9]) -> f32[100] {
  %a = f32[100] parameter(0)
  %b = f32[50] parameter(1)
  %c = f32[9] parameter(2)
  %i = s32[]{:S(6)} constant(3)
  %fused = f32[100] fusion(%a, %b, %i), kind=kLoop, calls=%put
  ROOT %alone = f32[100] dynamic-update-slice(%fused, %c, %i)
}
";
        let traffic = Traffic::parse("x", text).unwrap();
        assert_eq!(traffic.hbm_bytes, (7 + 7 + 9 + 9) * 4);
        let also_read_whole = text.replace("  ROOT %r", "  %also = f32[50] negate(%q)\n  ROOT %r");
        assert_eq!(Traffic::parse("x", &also_read_whole).unwrap().hbm_bytes, (50 + 7 + 9 + 9) * 4);
        let read_whole = text.replace("bitcast(%p)", "negate(%p)");
        assert_eq!(Traffic::parse("x", &read_whole).unwrap().hbm_bytes, (100 + 7 + 100 + 9 + 9) * 4);
    }

    #[test]
    fn a_loop_counts_as_often_as_it_runs_where_that_is_known() {
        let program = |counter: &str| {
            let text = format!(
                "%goes_on (p: (s32[], f32[7])) -> pred[] {{
  %p = (s32[], f32[7]) parameter(0)
  %end = s32[] constant(10)
  ROOT %less = pred[] compare(%p#0, %end), direction=LT
}}

%inner (p: (s32[], f32[7])) -> (s32[], f32[7]) {{
  %p = (s32[], f32[7]) parameter(0)
  %negated = f32[7] negate(%p#1)
  %one = s32[] constant(1)
  %next = s32[]{{:S(6)}} add(%p#0, %one)
  ROOT %t = (s32[], f32[7]) tuple(%next, %negated)
}}

%outer (p: (s32[], f32[7])) -> (s32[], f32[7]) {{
  %p = (s32[], f32[7]) parameter(0)
  %held = s32[]{{:S(6)}} copy(%p#0)
  %step = s32[] constant(4)
  %next = s32[]{{:S(6)}} add({counter}, %step)
  %five = s32[] constant(5)
  %begin = (s32[], f32[7]) tuple(%five, %p#1)
  %loop.2 = (s32[], f32[7]) while(%begin), condition=%goes_on, body=%inner
  %doubled = f32[7] add(%loop.2#1, %p#1)
  ROOT %t = (s32[], f32[7]) tuple(%next, %doubled)
}}

ENTRY %main (a: f32[7]) -> f32[7] {{
  %a = f32[7] parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[7]) tuple(%zero, %a)
  %loop = (s32[], f32[7]) while(%begin), condition=%goes_on, body=%outer
  ROOT %result = f32[7] get-tuple-element(%loop), index=1
}}
"
            );
            Traffic::parse("x", &text).unwrap()
        };
        let known = program("%held");
        // The counters move too, but for those in other memory: 3 of 4, from 0 below 10, and 5 of 1 in each, from 5.
        let floats = 3 * 3 + 3 * 5 * 2;
        let counters = 3 * (1 + 1) + 3 * 5 * (1 + 1);
        assert_eq!(known.hbm_bytes, (7 * floats + counters) * 4);
        assert_eq!(known.runs["negated"], 15);
        assert_eq!(known.runs["doubled"], 3);
        assert!(known.uncounted.is_empty());
        let unknown = program("%begin#0");
        assert_eq!((unknown.hbm_bytes, unknown.uncounted), (0, vec!["%loop".to_string()]));
    }

    #[test]
    fn a_kernel_serves_every_collective_that_is_like_its_own() {
        let text = "%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%add.2 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%max (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %most = f32[] maximum(%x, %y)
}

%goes_on (p: (s32[], f32[7])) -> pred[] {
  %p = (s32[], f32[7]) parameter(0)
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%p#0, %end), direction=LT
}

%body (p: (s32[], f32[7])) -> (s32[], f32[7]) {
  %p = (s32[], f32[7]) parameter(0)
  %part = f32[7] copy(%p#1)
  %in_loop = f32[7] all-reduce(%part), replica_groups={{0,1}}, to_apply=%add.2
  %one = s32[] constant(1)
  %next = s32[] add(%p#0, %one)
  ROOT %t = (s32[], f32[7]) tuple(%next, %in_loop)
}

ENTRY %main (a: f32[7]) -> f32[7] {
  %a = f32[7] parameter(0)
  %first = f32[7] all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
  %second = f32[7] all-reduce(%first), replica_groups={{0,1}}, to_apply=%add
  %largest = f32[7] all-reduce(%second), replica_groups={{0,1}}, to_apply=%max
  %alone = f32[7] all-reduce(%largest), replica_groups={{0},{1}}, to_apply=%add
  %zero = s32[] constant(0)
  %begin = (s32[], f32[7]) tuple(%zero, %alone)
  %loop = (s32[], f32[7]) while(%begin), condition=%goes_on, body=%body
  ROOT %result = f32[7] get-tuple-element(%loop), index=1
}
";
        let traffic = Traffic::parse("x", text).unwrap();
        let kernel = |name: &str| Kernel {
            name: name.into(),
            bundles: 1,
            loops: vec![],
            cycles: 1,
            runs: 0,
            slots: vec![],
            binding: None,
        };
        let mut kernels = ["second", "largest", "part"].map(kernel);
        assert_eq!(traffic.launch(&mut kernels), ["alone"]);
        assert_eq!(kernels.each_ref().map(|kernel| kernel.runs), [1 + 1 + 3, 1, 3]);
    }

    #[test]
    fn malformed_hlo_is_an_error() {
        let deep = format!("ENTRY %m () -> f32[] {{\n  %a = {}f32[] parameter(0)\n}}\n", "(".repeat(100_000));
        let broken = [
            "",
            "ENTRY %m () -> f32[] {\n  nonsense\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f99[1] parameter(0)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[18446744073709551615,9] add(%b)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1]{7} parameter(0)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1]{0:T(0)} parameter(0)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1] add(%missing)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1] parameter(0)\n  %b = f32[1] add(%a#3)\n}\n",
            &deep,
        ];
        for text in broken {
            let error = Traffic::parse("x", text).unwrap_err();
            assert!(matches!(error, TpuError::Dump { .. }), "{text}: {error}");
        }
    }
}
