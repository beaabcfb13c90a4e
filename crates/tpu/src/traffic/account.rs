//! What each instruction moves, and which collectives are alike.

use std::collections::{HashMap, HashSet};

use super::Traffic;
use super::hlo::{Computation, Definitions, Instruction, Module, Shape, malformed};
use super::trips::trips;
use crate::error::TpuError;

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
        let source = |name| inside.followed(name, "bitcast");
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

/// What one run of `module` moves; `file` is its name.
///
/// # Errors
/// [`TpuError::Dump`], where an operand or a computation is named that is nowhere.
pub(super) fn traffic(file: &str, module: &Module) -> Result<Traffic, TpuError> {
    let mut traffic = Traffic::default();
    let mut likenesses = Vec::new();
    let mut waiting = vec![(&module.entry, 1)];
    while let Some((instructions, runs)) = waiting.pop() {
        for (body, trips) in traffic.count(file, instructions, runs, &module.computations, &mut likenesses)? {
            let body = module.computations.get(body).ok_or_else(|| malformed(file, 0, body, "a computation"))?;
            waiting.push((&body.instructions, trips));
        }
    }
    Ok(traffic)
}

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
}

#[cfg(test)]
mod tests {
    use super::*;

    const XLA: &str = include_str!("../../../../fixtures/tpu/xla.after_optimizations.txt");

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
    fn an_operand_that_is_nowhere_is_an_error() {
        let broken = [
            "ENTRY %m () -> f32[] {\n  %a = f32[1] add(%missing)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1] parameter(0)\n  %b = f32[1] add(%a#3)\n}\n",
        ];
        for text in broken {
            let error = Traffic::parse("x", text).unwrap_err();
            assert!(matches!(error, TpuError::Dump { .. }), "{text}: {error}");
        }
    }
}
