//! The number of times that the body of a `while` loop runs.

use std::collections::HashMap;

use super::hlo::{HloComputation, HloDefinitions, HloInstruction};

impl HloDefinitions<'_, '_> {
    /// Returns the index of the loop-carried value that `operand` reads from the computation's parameter.
    fn carried(&self, operand: &str) -> Option<usize> {
        let (tuple, place) = self.origin(operand).split_once('#')?;
        self.0.get(tuple).filter(|instruction| instruction.opcode == "parameter")?;
        place.parse().ok()
    }

    /// Returns the value of an integer constant.
    fn constant(&self, operand: &str) -> Option<u64> {
        let constant = self.0.get(self.origin(operand)).filter(|instruction| instruction.opcode == "constant")?;
        constant.given.trim().parse().ok()
    }
}

/// Returns how often the body of `repeated`, a `while` among `around`, runs: as its configuration says, or by a counter that starts at a
/// constant, grows by a constant and is compared with a third.
pub(super) fn trips(
    repeated: &HloInstruction,
    around: &HloDefinitions,
    computations: &HashMap<&str, HloComputation>,
) -> Option<u64> {
    configured(repeated).or_else(|| counted(repeated, around, computations))
}

/// Reads the trips that the compiler found: `"known_trip_count":{"n":"4"}`.
fn configured(repeated: &HloInstruction) -> Option<u64> {
    let (_, known) = repeated.attributes.split_once("\"known_trip_count\":{\"n\":\"")?;
    known.split_once('"')?.0.parse().ok()
}

fn counted(
    repeated: &HloInstruction,
    around: &HloDefinitions,
    computations: &HashMap<&str, HloComputation>,
) -> Option<u64> {
    let [condition, body] =
        [" condition=", " body="].map(|name| repeated.attribute(name).and_then(|name| computations.get(name)));
    let (condition, body) = (&condition?.instructions, &body?.instructions);
    // The condition must be `counter < end`, with the counter carried by the loop and a constant end.
    let root = |instructions: &[HloInstruction]| instructions.iter().position(|instruction| instruction.root);
    let compare = &condition[root(condition)?];
    let [counter, end] = compare.operands[..] else { return None };
    if compare.opcode != "compare" || !compare.attributes.contains("direction=LT") {
        return None;
    }
    let end = HloDefinitions::new(condition).constant(end)?;
    let place = HloDefinitions::new(condition).carried(counter)?;
    // The counter starts at a constant of the tuple that enters the loop.
    let start = around.0.get(repeated.operands.first()?).filter(|tuple| tuple.opcode == "tuple")?;
    let start = around.constant(start.operands.get(place)?)?;
    // The body returns the same element of the tuple, plus a constant step.
    let next = &body[root(body)?];
    let inside = HloDefinitions::new(body);
    let add = inside.0.get(next.operands.get(place)?).filter(|add| add.opcode == "add")?;
    let [left, right] = add.operands[..] else { return None };
    let step = inside.constant(right).filter(|&step| step > 0)?;
    let same = inside.carried(left) == Some(place);
    (same && next.opcode == "tuple").then(|| end.saturating_sub(start).div_ceil(step))
}

#[cfg(test)]
mod tests {
    use crate::traffic::Traffic;

    #[test]
    fn while_loop_with_a_counter_counts_its_trips() {
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
    fn while_loop_with_known_trip_count_counts_it() {
        let program = |configuration: &str| {
            let text = format!(
                "%goes_on (p: (s32[], f32[7])) -> pred[] {{
  %p = (s32[], f32[7]) parameter(0)
  ROOT %less = pred[] fusion(%p#0), kind=kLoop, calls=%compared
}}

%body (p: (s32[], f32[7])) -> (s32[], f32[7]) {{
  %p = (s32[], f32[7]) parameter(0)
  %negated = f32[7] negate(%p#1)
  ROOT %t = (s32[], f32[7]) tuple(%p#0, %negated)
}}

ENTRY %main (a: f32[7]) -> f32[7] {{
  %a = f32[7] parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[7]) tuple(%zero, %a)
  %loop = (s32[], f32[7]) while(%begin), condition=%goes_on, body=%body{configuration}
  ROOT %result = f32[7] get-tuple-element(%loop), index=1
}}
"
            );
            Traffic::parse("x", &text).unwrap()
        };
        let known = program(r#", backend_config={"known_init_step":{"init":"0"},"known_trip_count":{"n":"4"},"x":[]}"#);
        assert_eq!((known.hbm_bytes, known.runs["negated"]), (4 * 2 * 7 * 4, 4));
        assert_eq!(program("").uncounted, ["%loop"]);
    }
}
