//! The parts of arrays that instructions gather, slice or update, and the bytes of those parts.

use std::collections::{HashMap, HashSet};

use super::hlo::{HloComputation, HloDefinitions, HloInstruction, HloShape};

/// Returns the bytes that `instruction` reads of operand `place`, if it only gathers from it or slices it.
pub(super) fn parts_taken(
    instruction: &HloInstruction,
    place: usize,
    computations: &HashMap<&str, HloComputation>,
) -> Option<u64> {
    // The dynamic slices of fusions are counted by `PartialAccesses`.
    let opcodes: &[&str] = match instruction.opcode {
        "async-start" => &["gather", "slice", "dynamic-slice"],
        _ => &["gather", "slice"],
    };
    let name = instruction.called().next()?;
    PartialReads { opcodes, computations, found: HashMap::new() }.bytes(name, place, 0)
}

/// The most computations within each other that are searched, so that no text overflows the stack.
const DEEPEST: usize = 64;

/// The opcodes of calls, whose operands are the parameters of the called computation.
const CALLS: [&str; 4] = ["async-start", "call", "custom-call", "fusion"];

/// A search for parameters of computations of which only parts are read.
struct PartialReads<'c, 't> {
    /// The opcodes that read a part of their first operand.
    opcodes: &'c [&'c str],
    computations: &'c HashMap<&'t str, HloComputation<'t>>,
    /// The results of [`bytes`](Self::bytes), by computation and parameter.
    found: HashMap<(&'t str, usize), Option<u64>>,
}

impl<'t> PartialReads<'_, 't> {
    /// Returns the bytes of all parts that the computation `name`, within `depth` others, reads of its parameter `place`; `None` if it
    /// reads the whole, or nothing.
    fn bytes(&mut self, name: &'t str, place: usize, depth: usize) -> Option<u64> {
        if depth > DEEPEST {
            return None;
        }
        if let Some(&known) = self.found.get(&(name, place)) {
            return known;
        }
        // Of what calls itself nothing is known.
        self.found.insert((name, place), None);
        let body = &self.computations.get(name)?.instructions;
        let definitions = HloDefinitions::new(body);
        let parameter =
            body.iter().find(|inner| inner.opcode == "parameter" && inner.given.trim() == place.to_string())?;
        // Sums over all uses of the parameter. Any use that reads all of it ends the search.
        let mut bytes = None;
        for user in body {
            let takes = self.opcodes.contains(&user.opcode);
            // Views hand the parameter on; `source` follows them to the use behind.
            let hands_on = !user.root && ["bitcast", "tuple", "get-tuple-element"].contains(&user.opcode);
            for (at, operand) in user.operands.iter().enumerate() {
                let source = definitions.source(operand);
                if hands_on || source.split('#').next() != Some(parameter.name) {
                    continue;
                }
                // A use takes a part, or passes the parameter to a computation that does.
                let part = match user.called().next() {
                    _ if takes && at == 0 => user.shape.bytes(),
                    Some(called) if CALLS.contains(&user.opcode) => self.bytes(called, at, depth + 1)?,
                    _ => return None,
                };
                bytes = Some(bytes.unwrap_or(0_u64).saturating_add(part));
            }
        }
        self.found.insert((name, place), bytes);
        bytes
    }
}

/// The bytes that an instruction moves of arrays of which it reads or writes only parts.
#[derive(Default)]
pub(super) struct PartialAccesses {
    /// The bytes that are read of an operand, by its index.
    pub(super) read: HashMap<usize, u64>,
    /// The bytes that are written of a result, by its index.
    written: HashMap<usize, u64>,
}

impl PartialAccesses {
    pub(super) fn new(
        instruction: &HloInstruction,
        around: &HloDefinitions,
        computations: &HashMap<&str, HloComputation>,
    ) -> Self {
        const TAKE: &str = "dynamic-slice";
        const PUT: &str = "dynamic-update-slice";
        let bytes = |definitions: &HloDefinitions, name: &str| {
            definitions.0.get(name).map_or(0, |instruction| instruction.shape.bytes())
        };
        let mut windows = PartialAccesses::default();
        // An update in place reads and writes the updated part only.
        if let (PUT, [_, part, ..]) = (instruction.opcode, &instruction.operands[..]) {
            windows.read.insert(0, 0);
            windows.written.insert(0, bytes(around, part));
        }
        let body = instruction.called().next().and_then(|name| computations.get(name));
        let Some(body) = body.filter(|_| instruction.opcode == "fusion").map(|body| &body.instructions) else {
            return windows;
        };
        // Inside of a fusion, sums the slices that are read of each parameter; any other use reads it whole.
        let inside = HloDefinitions::new(body);
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
                    (TAKE, 0) => {
                        let read = windows.read.entry(parameter).or_default();
                        *read = read.saturating_add(user.shape.bytes());
                    }
                    (PUT, 0) => _ = windows.read.entry(parameter).or_default(),
                    _ => _ = whole.insert(parameter),
                }
            }
        }
        // A parameter that is also read whole counts whole.
        windows.read.retain(|parameter, _| !whole.contains(parameter));
        // A result that updates a parameter in place writes the updated part only.
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

    /// Sums the bytes that are written to those of the results that are in HBM.
    pub(super) fn bytes_written(&self, results: &HloShape) -> u64 {
        let part = |(place, part): (usize, &HloShape)| {
            let whole = part.hbm_bytes();
            self.written.get(&place).map_or(whole, |&bytes| whole.min(bytes))
        };
        match results {
            HloShape::Array(_) => part((0, results)),
            HloShape::Tuple(parts) => parts.iter().enumerate().map(part).fold(0, u64::saturating_add),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::traffic::Traffic;

    #[test]
    fn partial_read_with_a_whole_one_counts_whole() {
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

    /// The product reads some columns of an operand, as a part of a head's gradient does.
    #[test]
    fn partial_read_of_a_product_counts_its_slice() {
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
    fn partial_write_in_place_counts_its_part() {
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
}
