//! The collectives of a module: their bytes, their groups of devices, and what runs between their ends.

use std::collections::{HashMap, HashSet};

use super::hlo::{HloComputation, HloDefinitions, HloInstruction, HloShape};
use super::{Collective, CollectiveKind};
use crate::error::AheadError;

/// The opcodes of collectives, synchronous or starting an asynchronous pair.
pub(super) const COLLECTIVES: [&str; 9] = [
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

/// The collectives that occur inside of fusions and async calls.
const WITHIN: [&str; 3] = ["all-gather", "all-reduce", "reduce-scatter"];

/// The properties in which collectives agree that share one compiled program.
#[derive(PartialEq)]
pub(super) struct CollectiveSignature<'t> {
    opcode: &'t str,
    shape: HloShape,
    operands: Vec<Option<HloShape>>,
    groups: Option<&'t str>,
    /// The operation of the reduction, such as `add`.
    by: Option<&'t str>,
}

impl<'t> CollectiveSignature<'t> {
    pub(super) fn new(
        instruction: &HloInstruction<'t>,
        around: &HloDefinitions,
        computations: &HashMap<&str, HloComputation<'t>>,
    ) -> Self {
        let shape_of = |operand: &&str| around.0.get(*operand).map(|instruction| instruction.shape.clone());
        // Two reducers agree if their last operation does, whatever their names are.
        let reducer = instruction.called().next().and_then(|name| computations.get(name));
        let groups = instruction.attributes.split_once("replica_groups=").map(|(_, after)| after);
        CollectiveSignature {
            opcode: instruction.opcode,
            shape: instruction.shape.clone(),
            operands: instruction.operands.iter().map(shape_of).collect(),
            groups: groups.map(|groups| groups.split_once(", ").map_or(groups, |(groups, _)| groups)),
            by: reducer.and_then(|body| body.instructions.iter().find(|last| last.root)).map(|last| last.opcode),
        }
    }
}

/// The opcodes of instructions that compute, and so overlap with collectives.
const COMPUTES: [&str; 5] = ["fusion", "convolution", "dot", "custom-call", "while"];

/// Custom calls that compute nothing.
const MEMORY_CALLS: [&str; 2] = ["custom_call_target=\"AllocateBuffer\"", "custom_call_target=\"ConcatBitcast\""];

/// The largest number of devices of one program.
const MOST_DEVICES: usize = 1 << 20;

/// Parses groups of devices in three notations: `{{0,1},{2,3}}` lists them; `{}` means all devices, and returns no group; `[2,4]<=[8]` is
/// eight devices in order, as two groups of four; `[4,2]<=[2,4]T(1,0)` transposes two rows of four first.
fn groups(text: &str) -> Option<Vec<Vec<usize>>> {
    // The list form: `{{0,1},{2,3}}`.
    if let Some(listed) = text.strip_prefix("{{") {
        let (listed, _) = listed.split_once("}}")?;
        let numbers = |group: &str| group.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<usize>>>();
        return listed.split("},{").map(numbers).collect();
    }
    if text.starts_with("{}") {
        return Some(vec![]);
    }
    let numbers = |text: &str| text.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<usize>>>();
    // The iota form, `[groups,members]<=[extents]T(order)`: the numbers 0, 1, … in an array of these extents, transposed, then cut into
    // groups.
    let (shape, rest) = text.strip_prefix('[')?.split_once("]<=[")?;
    let (reshaped, rest) = rest.split_once(']')?;
    let (shape, reshaped) = (numbers(shape)?, numbers(reshaped)?);
    let order = match rest.strip_prefix("T(") {
        Some(order) => numbers(order.split_once(')')?.0)?,
        None => (0..reshaped.len()).collect(),
    };
    let [_, members] = shape[..] else { return None };
    // A few numbers may name more devices than there is memory for, and an order that has an axis twice names each of them again.
    let devices = reshaped.iter().try_fold(1_usize, |devices, extent| devices.checked_mul((*extent).max(1)))?;
    let mut axes = order.clone();
    axes.sort_unstable();
    if devices > MOST_DEVICES || !axes.into_iter().eq(0..reshaped.len()) {
        return None;
    }
    // Row-major strides of the array before the transposition.
    let mut strides = vec![1; reshaped.len()];
    for axis in (1..reshaped.len()).rev() {
        strides[axis - 1] = strides[axis] * reshaped[axis];
    }
    // Visits the axes in the transposed order, the last one fastest.
    let mut ids = vec![0];
    for &axis in &order {
        let (extent, stride) = (*reshaped.get(axis)?, *strides.get(axis)?);
        ids = ids.into_iter().flat_map(|id| (0..extent).map(move |i| id + i * stride)).collect();
    }
    Some(ids.chunks(members.max(1)).map(<[usize]>::to_vec).collect())
}

/// Collects three lists of names: what is computed between an operation's start and its end, the collectives that are waited for in
/// between, and its own start, update and end. An async call gets its operands at its update, if it has one.
fn between(
    start: &HloInstruction,
    instructions: &[HloInstruction],
    computations: &HashMap<&str, HloComputation>,
) -> [Vec<String>; 3] {
    let after = |name: &str| {
        let at = instructions.iter().position(|other| other.name == name).unwrap_or(0);
        instructions[at + 1..].iter()
    };
    // The end takes the handle of the update if there is one, and otherwise that of the start.
    let update = after(start.name).find(|next| next.opcode == "async-update" && next.operands.contains(&start.name));
    let handle = update.map_or(start.name, |update| update.name);
    let until_done = after(handle).take_while(|other| !other.operands.contains(&handle));
    // In the scheduled order; loops are replaced by their bodies, each once.
    let mut waiting: Vec<&HloInstruction> = until_done.collect();
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
    /// Finds the collective inside of a fusion or an async call. libtpu writes a reduce-scatter as an all-reduce of which a slice is kept,
    /// and an all-gather as an all-reduce of a part among zeros, and sends no more bytes than those need. Collectives on `SparseCore`s,
    /// such as the sums of a v7x, are async calls.
    pub(super) fn within(
        file: &str,
        caller: &HloInstruction,
        instructions: &[HloInstruction],
        computations: &HashMap<&str, HloComputation>,
        runs: u64,
    ) -> Result<Option<Self>, AheadError> {
        // Other instructions do not contain collectives.
        if !["fusion", "async-start"].contains(&caller.opcode) {
            return Ok(None);
        }
        let mut waiting: Vec<&str> = caller.called().collect();
        let mut seen = HashSet::new();
        // Searches the called computations, depth first, for the first collective.
        let mut found = None;
        while let Some(name) = waiting.pop().filter(|_| found.is_none()) {
            if let Some(computation) = computations.get(name).filter(|_| seen.insert(name)) {
                let is_one = |inner: &&HloInstruction| WITHIN.contains(&inner.opcode);
                let inner = computation.instructions.iter().find(is_one);
                found = inner.map(|inner| (&computation.instructions, inner));
                waiting.extend(&computation.called);
            }
        }
        let Some((body, inner)) = found else { return Ok(None) };
        let Some(collective) = Self::from_instruction(file, inner, body, computations, runs)? else { return Ok(None) };
        let definitions = HloDefinitions::new(body);
        let opcode = |name: &&str| definitions.0.get(definitions.followed(name, "bitcast")).map(|found| found.opcode);
        // An all-reduce of a part among zeros is an all-gather; one of which a slice is kept is a reduce-scatter.
        let gathers = inner.operands.iter().filter_map(opcode).any(|opcode| opcode == "dynamic-update-slice");
        let keeps = body.iter().any(|user| {
            let source = user.operands.first().map(|source| definitions.followed(source, "bitcast"));
            user.opcode == "dynamic-slice" && source == Some(inner.name)
        });
        let kind = match (collective.kind, gathers, keeps) {
            (CollectiveKind::AllReduce, true, _) => CollectiveKind::AllGather,
            (CollectiveKind::AllReduce, _, true) => CollectiveKind::ReduceScatter,
            (kind, ..) => kind,
        };
        let starts = caller.opcode == "async-start";
        let [beside, awaited, ends] =
            if starts { between(caller, instructions, computations) } else { Default::default() };
        let name = caller.name.trim_start_matches('%').into();
        Ok(Some(Collective { name, kind, beside, awaited, ends, ..collective }))
    }

    /// Reads a collective that runs `runs` times from `instruction`, one of `instructions`; `None` if it is another operation.
    pub(super) fn from_instruction(
        file: &str,
        instruction: &HloInstruction,
        instructions: &[HloInstruction],
        computations: &HashMap<&str, HloComputation>,
        runs: u64,
    ) -> Result<Option<Self>, AheadError> {
        let opcode = instruction.opcode.trim_end_matches("-start");
        let kind = match opcode {
            "all-reduce" => CollectiveKind::AllReduce,
            "reduce-scatter" => CollectiveKind::ReduceScatter,
            "all-gather" => CollectiveKind::AllGather,
            "all-to-all" => CollectiveKind::AllToAll,
            "collective-permute" => CollectiveKind::Permute,
            _ => return Ok(None),
        };
        let definitions = HloDefinitions::new(instructions);
        // The bytes of the operands, some of which are elements of tuples.
        let of_operands = || {
            let shape = |operand: &&str| {
                let (name, part) = operand.split_once('#').map_or((*operand, None), |(name, part)| (name, Some(part)));
                let shape = &definitions.0.get(name)?.shape;
                part.map_or(Some(shape), |part| shape.part(part.parse().ok()?)).map(HloShape::bytes)
            };
            instruction.operands.iter().filter_map(shape).fold(0, u64::saturating_add)
        };
        let starts = instruction.opcode.ends_with("-start");
        // The bytes that the formulas of the links start from: the larger side of a collective.
        let bytes = match kind {
            CollectiveKind::ReduceScatter | CollectiveKind::AllToAll | CollectiveKind::Permute => of_operands(),
            // A started all-gather returns its operand as well; the second part is the result.
            CollectiveKind::AllGather if starts => instruction.shape.part(1).map_or(0, HloShape::bytes),
            CollectiveKind::AllReduce | CollectiveKind::AllGather => instruction.shape.bytes(),
        };
        // A permute has pairs of devices instead of groups.
        let attribute = if kind == CollectiveKind::Permute { "source_target_pairs=" } else { "replica_groups=" };
        let text = instruction.attributes.split_once(attribute).map_or("{}", |(_, after)| after);
        let expected = "groups of devices, {{0,1},{2,3}} or [2,2]<=[4]";
        let groups =
            groups(text).ok_or_else(|| AheadError::malformed(file, 0, format!("{attribute}{text}"), expected))?;
        let [beside, awaited, ends] =
            if starts { between(instruction, instructions, computations) } else { Default::default() };
        let name = instruction.name.trim_start_matches('%').into();
        Ok(Some(Collective { name, kind, bytes, groups, runs, beside, awaited, ends }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Traffic;

    #[test]
    fn groups_of_too_many_devices_or_of_an_axis_twice_are_refused() {
        assert_eq!(groups("[2,2]<=[4]"), Some(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(groups("[2,2]<=[2,2]T(1,0)"), Some(vec![vec![0, 2], vec![1, 3]]));
        for text in
            ["[1,4]<=[1000000000000]", "[1,4]<=[4611686018427387904,8]", "[2,2]<=[2,2]T(0,0)", "[2,2]<=[2,2]T(0)"]
        {
            assert_eq!(groups(text), None, "{text}");
        }
    }

    /// The module has collectives in all forms that XLA and libtpu write.
    #[test]
    fn collectives_have_groups_and_overlapping_operations() {
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
            ("scatter-start", CollectiveKind::ReduceScatter, String::new()),
            ("pairs", CollectiveKind::AllReduce, String::new()),
            ("started", CollectiveKind::AllReduce, "product".into()),
            ("scattered", CollectiveKind::ReduceScatter, String::new()),
            ("gathered", CollectiveKind::AllGather, String::new()),
            ("moved", CollectiveKind::Permute, String::new()),
            ("call-start", CollectiveKind::AllReduce, "beside in-loop".into()),
            ("meanwhile", CollectiveKind::AllGather, String::new()),
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
