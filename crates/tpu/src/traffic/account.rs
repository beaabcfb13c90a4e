//! What each instruction moves, and which collectives are alike.

use std::collections::{HashMap, HashSet};

use super::hlo::{Computation, Definitions, Instruction, Module, Shape, malformed};
use super::trips::trips;
use super::{Collective, Kind, Traffic};
use crate::error::TpuError;

/// Bytes that `instruction` takes of its operand `place`, where it gathers from it or slices it and does nothing else with it.
fn parts_taken(instruction: &Instruction, place: usize, computations: &HashMap<&str, Computation>) -> Option<u64> {
    let opcodes: &[&str] = match instruction.opcode {
        "async-start" => &["gather", "slice", "dynamic-slice"],
        _ => &["gather", "slice"],
    };
    let name = instruction.called().next()?;
    Parts { opcodes, computations, found: HashMap::new() }.of(name, place)
}

/// Opcodes of calls: what is called takes the operands as its parameters.
const CALLS: [&str; 4] = ["async-start", "call", "custom-call", "fusion"];

/// Where parameters of computations are taken parts of.
struct Parts<'c, 't> {
    /// What takes a part of its first operand.
    opcodes: &'c [&'c str],
    computations: &'c HashMap<&'t str, Computation<'t>>,
    /// What [`of`](Self::of) a computation's parameter is.
    found: HashMap<(&'t str, usize), Option<u64>>,
}

impl<'t> Parts<'_, 't> {
    /// Bytes of all parts that the computation `name` takes of its parameter `place`; `None` where it reads it whole, or nowhere.
    fn of(&mut self, name: &'t str, place: usize) -> Option<u64> {
        if let Some(&known) = self.found.get(&(name, place)) {
            return known;
        }
        // Of what calls itself nothing is known.
        self.found.insert((name, place), None);
        let body = &self.computations.get(name)?.instructions;
        let definitions = Definitions::of(body);
        let parameter =
            body.iter().find(|inner| inner.opcode == "parameter" && inner.given.trim() == place.to_string())?;
        let mut bytes = None;
        for user in body {
            let takes = self.opcodes.contains(&user.opcode);
            let hands_on = !user.root && ["bitcast", "tuple", "get-tuple-element"].contains(&user.opcode);
            for (at, operand) in user.operands.iter().enumerate() {
                let source = definitions.source(operand);
                if hands_on || source.split('#').next() != Some(parameter.name) {
                    continue;
                }
                let part = match user.called().next() {
                    _ if takes && at == 0 => user.shape.bytes(),
                    Some(called) if CALLS.contains(&user.opcode) => self.of(called, at)?,
                    _ => return None,
                };
                bytes = Some(bytes.unwrap_or(0_u64).saturating_add(part));
            }
        }
        self.found.insert((name, place), bytes);
        bytes
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

/// Those that stand in fusions and async calls.
const WITHIN: [&str; 3] = ["all-gather", "all-reduce", "reduce-scatter"];

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

/// Opcodes of what is computed.
const COMPUTES: [&str; 5] = ["fusion", "convolution", "dot", "custom-call", "while"];

/// Custom calls in which nothing is.
const MEMORY_CALLS: [&str; 2] = ["custom_call_target=\"AllocateBuffer\"", "custom_call_target=\"ConcatBitcast\""];

/// `{{0,1},{2,3}}`, or `{}`, which is all devices and none here, or `[2,4]<=[8]`, which is eight devices in order, two groups of four, and `[4,2]<=[2,4]T(1,0)`, which are those of
/// two rows of four by columns.
fn groups(text: &str) -> Option<Vec<Vec<usize>>> {
    if let Some(listed) = text.strip_prefix("{{") {
        let (listed, _) = listed.split_once("}}")?;
        let numbers = |group: &str| group.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<usize>>>();
        return listed.split("},{").map(numbers).collect();
    }
    if text.starts_with("{}") {
        return Some(vec![]);
    }
    let numbers = |text: &str| text.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<usize>>>();
    let (shape, rest) = text.strip_prefix('[')?.split_once("]<=[")?;
    let (reshaped, rest) = rest.split_once(']')?;
    let (shape, reshaped) = (numbers(shape)?, numbers(reshaped)?);
    let order = match rest.strip_prefix("T(") {
        Some(order) => numbers(order.split_once(')')?.0)?,
        None => (0..reshaped.len()).collect(),
    };
    let [_, members] = shape[..] else { return None };
    let mut strides = vec![1; reshaped.len()];
    for axis in (1..reshaped.len()).rev() {
        strides[axis - 1] = strides[axis] * reshaped[axis];
    }
    let mut ids = vec![0];
    for &axis in &order {
        let (extent, stride) = (*reshaped.get(axis)?, *strides.get(axis)?);
        ids = ids.into_iter().flat_map(|id| (0..extent).map(move |i| id + i * stride)).collect();
    }
    Some(ids.chunks(members.max(1)).map(<[usize]>::to_vec).collect())
}

/// What stands between the start of something and its end, by name: what is computed, and collectives that are waited for; and its own
/// start, update and end. What an async call works on is only given to its update, where it has one.
fn between(
    start: &Instruction,
    instructions: &[Instruction],
    computations: &HashMap<&str, Computation>,
) -> [Vec<String>; 3] {
    let after = |name: &str| {
        let at = instructions.iter().position(|other| other.name == name).unwrap_or(0);
        instructions[at + 1..].iter()
    };
    let update = after(start.name).find(|next| next.opcode == "async-update" && next.operands.contains(&start.name));
    let handle = update.map_or(start.name, |update| update.name);
    let until_done = after(handle).take_while(|other| !other.operands.contains(&handle));
    let mut waiting: Vec<&Instruction> = until_done.collect();
    let done = after(handle).nth(waiting.len());
    let own = [Some(start), update, done].into_iter().flatten();
    let own = own.map(|one| one.name.trim_start_matches('%').into()).collect();
    waiting.reverse();
    let mut seen = HashSet::new();
    let [mut computed, mut awaited] = [vec![], vec![]];
    while let Some(one) = waiting.pop() {
        let name = one.name.trim_start_matches('%').to_string();
        let only_memory = MEMORY_CALLS.iter().any(|call| one.attributes.contains(call));
        let body = one.attribute(" body=").filter(|_| one.opcode == "while");
        if let Some(body) = body.filter(|body| seen.insert(*body)).and_then(|body| computations.get(body)) {
            waiting.extend(body.instructions.iter().rev());
        } else if COLLECTIVES.contains(&one.opcode) && !one.opcode.ends_with("-start") {
            awaited.push(name);
        } else if COMPUTES.contains(&one.opcode) && !only_memory {
            computed.push(name);
        }
    }
    [computed, awaited, own]
}

impl Collective {
    /// What a fusion, or an async call, is that has a collective in it: libtpu writes a reduce-scatter as an all-reduce of which a slice is
    /// kept, an all-gather as one of a part among zeros, and sends no more than they need. What is left to `SparseCore`s, as a v7x leaves
    /// sums, are async calls.
    fn within(
        file: &str,
        caller: &Instruction,
        instructions: &[Instruction],
        computations: &HashMap<&str, Computation>,
        runs: u64,
    ) -> Result<Option<Self>, TpuError> {
        if !["fusion", "async-start"].contains(&caller.opcode) {
            return Ok(None);
        }
        let mut waiting: Vec<&str> = caller.called().collect();
        let mut seen = HashSet::new();
        let mut found = None;
        while let Some(name) = waiting.pop().filter(|_| found.is_none()) {
            if let Some(computation) = computations.get(name).filter(|_| seen.insert(name)) {
                let is_one = |inner: &&Instruction| WITHIN.contains(&inner.opcode);
                let inner = computation.instructions.iter().find(is_one);
                found = inner.map(|inner| (&computation.instructions, inner));
                waiting.extend(&computation.called);
            }
        }
        let Some((body, inner)) = found else { return Ok(None) };
        let Some(collective) = Self::of(file, inner, body, computations, runs)? else { return Ok(None) };
        let definitions = Definitions::of(body);
        let opcode = |name: &&str| definitions.0.get(definitions.followed(name, "bitcast")).map(|found| found.opcode);
        let gathers = inner.operands.iter().filter_map(opcode).any(|opcode| opcode == "dynamic-update-slice");
        let keeps = body.iter().any(|user| {
            let source = user.operands.first().map(|source| definitions.followed(source, "bitcast"));
            user.opcode == "dynamic-slice" && source == Some(inner.name)
        });
        let kind = match (collective.kind, gathers, keeps) {
            (Kind::AllReduce, true, _) => Kind::AllGather,
            (Kind::AllReduce, _, true) => Kind::ReduceScatter,
            (kind, ..) => kind,
        };
        let starts = caller.opcode == "async-start";
        let [beside, awaited, ends] =
            if starts { between(caller, instructions, computations) } else { Default::default() };
        let name = caller.name.trim_start_matches('%').into();
        Ok(Some(Collective { name, kind, beside, awaited, ends, ..collective }))
    }

    /// What `instruction` is of those in `instructions`, if it is one, and runs `runs` times.
    fn of(
        file: &str,
        instruction: &Instruction,
        instructions: &[Instruction],
        computations: &HashMap<&str, Computation>,
        runs: u64,
    ) -> Result<Option<Self>, TpuError> {
        let opcode = instruction.opcode.trim_end_matches("-start");
        let kind = match opcode {
            "all-reduce" => Kind::AllReduce,
            "reduce-scatter" => Kind::ReduceScatter,
            "all-gather" => Kind::AllGather,
            "all-to-all" => Kind::AllToAll,
            "collective-permute" => Kind::Permute,
            _ => return Ok(None),
        };
        let definitions = Definitions::of(instructions);
        let of_operands = || {
            let shape = |operand: &&str| {
                let (name, part) = operand.split_once('#').map_or((*operand, None), |(name, part)| (name, Some(part)));
                let shape = &definitions.0.get(name)?.shape;
                part.map_or(Some(shape), |part| shape.part(part.parse().ok()?)).map(Shape::bytes)
            };
            instruction.operands.iter().filter_map(shape).fold(0, u64::saturating_add)
        };
        let starts = instruction.opcode.ends_with("-start");
        let bytes = match kind {
            Kind::ReduceScatter | Kind::AllToAll | Kind::Permute => of_operands(),
            // What is started returns what it was given too.
            Kind::AllGather if starts => instruction.shape.part(1).map_or(0, Shape::bytes),
            Kind::AllReduce | Kind::AllGather => instruction.shape.bytes(),
        };
        let attribute = if kind == Kind::Permute { "source_target_pairs=" } else { "replica_groups=" };
        let text = instruction.attributes.split_once(attribute).map_or("{}", |(_, after)| after);
        let expected = "groups of devices, {{0,1},{2,3}} or [2,2]<=[4]";
        let groups = groups(text).ok_or_else(|| malformed(file, 0, format!("{attribute}{text}"), expected))?;
        let [beside, awaited, ends] =
            if starts { between(instruction, instructions, computations) } else { Default::default() };
        let name = instruction.name.trim_start_matches('%').into();
        Ok(Some(Collective { name, kind, bytes, groups, runs, beside, awaited, ends }))
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
            let before = bytes;
            let within = Collective::within(file, instruction, instructions, computations, runs)?;
            let collective = within.or(Collective::of(file, instruction, instructions, computations, runs)?);
            let exposed = collective.as_ref().is_some_and(Collective::is_alone);
            self.moved.extend(collective);
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
            let before_operands = usize::from(handle.is_some());
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
                let read = match instruction.opcode {
                    "gather" | "slice" | "dynamic-slice" => whole.min(instruction.shape.bytes()),
                    _ => parts_taken(described, place - before_operands, computations)
                        .map_or(whole, |bytes| whole.min(bytes)),
                };
                let read = windows.read.get(&place).map_or(read, |&bytes| read.min(bytes));
                bytes = bytes.saturating_add(read);
            }
            if !starts {
                bytes = bytes.saturating_add(windows.bytes_written(&instruction.shape));
            }
            let moved = (bytes - before).saturating_mul(runs);
            if exposed {
                self.exposed_bytes = self.exposed_bytes.saturating_add(moved);
            }
            if moved > 0 {
                self.bytes_of.insert(own_name.into(), moved);
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
    fn an_operand_that_is_gathered_from_and_read_whole_too_counts_whole() {
        let text = |also: &str| {
            format!(
                "%inner (r: f32[100], j: s32[3]) -> f32[3] {{
  %r = f32[100] parameter(0)
  %j = s32[3] parameter(1)
  ROOT %g = f32[3] gather(%r, %j), slice_sizes={{1}}
}}

%pick (q: f32[100], p: f32[100], i: s32[3]) -> f32[3] {{
  %q = f32[100] parameter(0)
  %p = f32[100] parameter(1)
  %i = s32[3] parameter(2)
  %both = (f32[100], s32[3]) tuple(%p, %i)
  {also}
  ROOT %f = f32[3] call(%both#0, %both#1), to_apply=%inner
}}

ENTRY %main (a: f32[100], b: f32[100]) -> f32[3] {{
  %a = f32[100] parameter(0)
  %b = f32[100] parameter(1)
  %ids = s32[3]{{0:S(1)}} iota(), iota_dimension=0
  ROOT %picked = f32[3] fusion(%a, %b, %ids), kind=kCustom, calls=%pick
}}
"
            )
        };
        let bytes = |also: &str| Traffic::parse("x", &text(also)).unwrap().hbm_bytes;
        // Both have one shape: %a is read whole, of %b three are gathered.
        assert_eq!(bytes("%whole = f32[100] negate(%q)"), (100 + 3 + 3) * 4);
        assert_eq!(bytes("%whole = f32[100] add(%q, %p)"), (100 + 100 + 3) * 4);
        let taken_out = "%out = f32[100] get-tuple-element(%both), index=0\n  %whole = f32[100] add(%q, %out)";
        assert_eq!(bytes(taken_out), (100 + 100 + 3) * 4);
        // What calls itself ends.
        assert_eq!(bytes("%round = f32[3] call(%q, %p, %i), to_apply=%pick"), (100 + 100 + 3) * 4);
    }

    /// As the columns are of which a part of a head's gradient is made.
    #[test]
    fn a_product_reads_of_an_operand_the_slice_that_it_takes() {
        let text = |also: &str| {
            format!(
                "%cut (p: f32[100]) -> f32[10] {{
  %p = f32[100] parameter(0){also}
  ROOT %s = f32[10] slice(%p), slice={{[20:30]}}
}}

%product (q: f32[100], r: f32[7]) -> f32[7] {{
  %q = f32[100] parameter(0)
  %r = f32[7] parameter(1)
  %part = f32[10] fusion(%q), kind=kLoop, calls=%cut
  ROOT %m = f32[7] convolution(%part, %r), dim_labels=fb_io->bf
}}

ENTRY %main (a: f32[100], b: f32[7]) -> f32[7] {{
  %a = f32[100] parameter(0)
  %b = f32[7] parameter(1)
  ROOT %multiplied = f32[7] fusion(%a, %b), kind=kOutput, calls=%product
}}
"
            )
        };
        let bytes = |also: &str| Traffic::parse("x", &text(also)).unwrap().hbm_bytes;
        assert_eq!(bytes(""), (10 + 7 + 7) * 4);
        assert_eq!(bytes("\n  %n = f32[100] negate(%p)"), (100 + 7 + 7) * 4);
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

    /// What devices send of one another, in the forms that XLA and libtpu write.
    #[test]
    fn collectives_are_read_with_their_groups_and_what_runs_beside_them() {
        const TEXT: &str = "HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter (input: f32[64,128]) -> f32[16,128] {
  %input = f32[64,128]{1,0} parameter(0)
  %whole = f32[64,128]{1,0} bitcast(%input)
  %inner = f32[64,128]{1,0} all-reduce(%whole), replica_groups={}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %kept = f32[16,128]{1,0} dynamic-slice(%inner, %zero, %zero), dynamic_slice_sizes={16,128}
}

%offloaded (given: f32[64,128]) -> f32[64,128] {
  %given = f32[64,128]{1,0} parameter(0)
  ROOT %called = f32[64,128]{1,0} call(%given), to_apply=%on-sparse-cores
}

%on-sparse-cores (part: f32[64,128]) -> f32[64,128] {
  %part = f32[64,128]{1,0} parameter(0)
  ROOT %by-others = f32[64,128]{1,0} all-reduce(%part), replica_groups={{0,1,2,3}}, to_apply=%add
}

%turn (carried: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {
  %carried = (s32[], f32[64,128]{1,0:S(1)}) parameter(0)
  %in-loop = f32[64,128]{1,0:S(1)} fusion(%carried#1), kind=kLoop, calls=%add
  ROOT %turned = (s32[], f32[64,128]{1,0:S(1)}) tuple(%carried#0, %in-loop)
}

%scattered-apart (parts: f32[64,128]) -> f32[16,128] {
  %parts = f32[64,128]{1,0} parameter(0)
  ROOT %called-too = f32[16,128]{1,0} custom-call(%parts), custom_call_target=\"any\", called_computations={%by-sparse-cores}
}

%by-sparse-cores (given-too: (f32[64,128], s32[])) -> f32[16,128] {
  %given-too = (f32[64,128]{1,0}, s32[]) parameter(0)
  ROOT %scatter = f32[16,128]{1,0} reduce-scatter(%given-too#0), replica_groups={}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64,128], y: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %y = f32[64,128]{1,0} parameter(1)
  %scatter-start = ((), (), s32[]) async-start(), calls=%scattered-apart
  %scatter-update = ((f32[64,128]{1,0}), f32[16,128]{1,0}, s32[]) async-update(%scatter-start, %y)
  %room = f32[64,128]{1,0} custom-call(), custom_call_target=\"AllocateBuffer\"
  %scatter-done = f32[16,128]{1,0} async-done(%scatter-update)
  %pairs = f32[64,128]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %started = f32[64,128]{1,0} all-reduce-start(%pairs), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %product = f32[64,128]{1,0} fusion(%y), kind=kLoop, calls=%add
  %done = f32[64,128]{1,0} all-reduce-done(%started)
  %scattered = f32[16,128]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter
  %gathered = f32[64,128]{1,0} all-gather(%scattered), replica_groups=[1,4]<=[4], dimensions={0}
  %moved = f32[64,128]{1,0} collective-permute(%gathered), source_target_pairs={{0,1},{1,0}}
  %call-start = ((), (), s32[]) async-start(), calls=%offloaded
  %call-update = ((f32[64,128]{1,0}), f32[64,128]{1,0}, s32[]) async-update(%call-start, %moved)
  %beside = f32[64,128]{1,0} fusion(%y), kind=kLoop, calls=%add
  %meanwhile = f32[64,128]{1,0} all-gather(%scattered), replica_groups=[1,4]<=[4], dimensions={0}
  %zero = s32[] constant(0)
  %begin = (s32[], f32[64,128]{1,0:S(1)}) tuple(%zero, %beside)
  %loop = (s32[], f32[64,128]{1,0:S(1)}) while(%begin), condition=%any, body=%turn, backend_config={\"known_trip_count\":{\"n\":\"2\"}}
  ROOT %call-done = f32[64,128]{1,0} async-done(%call-update)
}
";
        let traffic = Traffic::parse("m", TEXT).unwrap();
        let found: Vec<_> =
            traffic.moved.iter().map(|moved| (moved.name.as_str(), moved.kind, moved.beside.join(" "))).collect();
        let expected = [
            // Room is made meanwhile, and nothing computed.
            ("scatter-start", Kind::ReduceScatter, String::new()),
            ("pairs", Kind::AllReduce, String::new()),
            ("started", Kind::AllReduce, "product".into()),
            ("scattered", Kind::ReduceScatter, String::new()),
            ("gathered", Kind::AllGather, String::new()),
            ("moved", Kind::Permute, String::new()),
            ("call-start", Kind::AllReduce, "beside in-loop".into()),
            ("meanwhile", Kind::AllGather, String::new()),
        ];
        assert_eq!(found, expected);
        assert_eq!(traffic.moved.iter().find(|moved| moved.name == "call-start").unwrap().awaited, ["meanwhile"]);
        let ends = |name: &str| traffic.moved.iter().find(|moved| moved.name == name).unwrap().ends.clone();
        assert_eq!(ends("call-start"), ["call-start", "call-update", "call-done"]);
        assert_eq!(traffic.bytes_of["product"], 2 * 64 * 128 * 4);
        assert!(traffic.moved.iter().all(|moved| moved.bytes == 64 * 128 * 4 && moved.runs == 1), "{traffic:?}");
        let groups: Vec<Vec<Vec<usize>>> = traffic.moved.iter().map(|moved| moved.groups.clone()).collect();
        assert_eq!(groups[1], [[0, 1], [2, 3]]);
        assert_eq!(groups[2], [[0, 2], [1, 3]], "two rows of two, by columns");
        assert!(groups[0].is_empty() && groups[3].is_empty(), "all devices");
        assert_eq!(groups[4], [[0, 1, 2, 3]]);
        // What is reduced while the fusion runs is not exposed; all else that a collective reads and writes is.
        assert_eq!(traffic.exposed_bytes, 4 * 128 * ((64 + 64) + (64 + 16) + 2 * (16 + 64) + (64 + 64)));
        let spoilt = TEXT.replace("{{0,1},{2,3}}", "{{0,x}}");
        assert!(Traffic::parse("m", &spoilt).unwrap_err().to_string().contains("groups of devices"));
    }
}
