//! The bytes that each instruction moves, summed over a module.

use std::collections::{HashMap, HashSet};

use super::collectives::{COLLECTIVES, CollectiveSignature};
use super::hlo::{HloComputation, HloDefinitions, HloInstruction, HloModule};
use super::trips::trips;
use super::windows::{PartialAccesses, parts_taken};
use super::{Collective, Traffic};
use crate::error::AheadError;

/// The opcodes that move no bytes themselves.
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

/// The largest number of loop bodies that are counted, each for every loop that it is in.
const MOST_BODIES: usize = 4096;

/// Counts the traffic of one run of `module`, which was read from `file`.
///
/// # Errors
/// [`AheadError::Malformed`], where an operand or a computation is named that is nowhere, or loops are within each other without an end.
pub(super) fn traffic(file: &str, module: &HloModule) -> Result<Traffic, AheadError> {
    let mut traffic = Traffic::default();
    let mut likenesses = Vec::new();
    // The entry runs once. Each loop body is counted with the product of the trips around it.
    let mut waiting = vec![(&module.entry, 1)];
    let mut bodies = 0;
    while let Some((instructions, runs)) = waiting.pop() {
        // A body that is a loop of its own would be counted for ever.
        bodies += 1;
        if bodies > MOST_BODIES {
            return Err(AheadError::malformed(file, 0, "loops within each other", "at most 4096 bodies of loops"));
        }
        for (body, trips) in traffic.count(file, instructions, runs, &module.computations, &mut likenesses)? {
            let body =
                module.computations.get(body).ok_or_else(|| AheadError::malformed(file, 0, body, "a computation"))?;
            waiting.push((&body.instructions, trips));
        }
    }
    Ok(traffic)
}

impl Traffic {
    /// Counts a computation that runs `runs` times. Returns the bodies of its loops, each with its number of runs.
    fn count<'t>(
        &mut self,
        file: &str,
        instructions: &[HloInstruction<'t>],
        runs: u64,
        computations: &HashMap<&str, HloComputation<'t>>,
        likenesses: &mut Vec<CollectiveSignature<'t>>,
    ) -> Result<Vec<(&'t str, u64)>, AheadError> {
        let definitions = HloDefinitions::new(instructions);
        let by_name = &definitions.0;
        let mut bodies = Vec::new();
        let mut bytes = 0_u64;
        for instruction in instructions.iter().filter(|instruction| !STILL.contains(&instruction.opcode)) {
            let own_name = instruction.name.trim_start_matches('%');
            if runs > 1 {
                self.runs.insert(own_name.into(), runs);
            }
            // The bytes of this instruction are those added until the end of the loop body.
            let before = bytes;
            // A collective may be inside of a fusion or an async call, or be the instruction itself.
            let within = Collective::within(file, instruction, instructions, computations, runs)?;
            let collective =
                within.or(Collective::from_instruction(file, instruction, instructions, computations, runs)?);
            let exposed = collective.as_ref().is_some_and(Collective::is_alone);
            self.moved.extend(collective);
            // libtpu compiles one program for collectives that agree in everything that matters; the schedule has it under the name of one
            // of them.
            if COLLECTIVES.contains(&instruction.opcode) {
                let likeness = CollectiveSignature::new(instruction, &definitions, computations);
                let place = likenesses.iter().position(|other| *other == likeness).unwrap_or_else(|| {
                    likenesses.push(likeness);
                    self.collectives.push(Vec::new());
                    self.collectives.len() - 1
                });
                self.collectives[place].push(own_name.into());
            }
            // A loop moves nothing itself. Its body is counted later if its trips are known, and reported if not.
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
            // Each operand counts once, however often it is listed.
            let mut counted = HashSet::new();
            let windows = PartialAccesses::new(instruction, &definitions, computations);
            for (place, operand) in instruction.operands.iter().enumerate() {
                let (name, index) =
                    operand.split_once('#').map_or((*operand, None), |(name, index)| (name, Some(index)));
                let unknown = || {
                    AheadError::malformed(
                        file,
                        0,
                        format!("{operand} in {}", instruction.name),
                        "an earlier instruction",
                    )
                };
                let source = by_name.get(name).ok_or_else(unknown)?;
                // The handle of an async call is no array.
                let handle = source.opcode.ends_with("-start") || source.opcode == "async-update";
                if handle || !counted.insert(operand) {
                    continue;
                }
                // An operand may be one element of a tuple, `%name#1`.
                let shape = match index {
                    None => &source.shape,
                    Some(index) => index.parse().ok().and_then(|index| source.shape.part(index)).ok_or_else(unknown)?,
                };
                let whole = shape.hbm_bytes();
                // Only the gathered or sliced part of an operand moves, whether the instruction does it or a computation that it calls.
                let read = match instruction.opcode {
                    "gather" | "slice" | "dynamic-slice" => whole.min(instruction.shape.bytes()),
                    // A text from elsewhere may have an array in the place of the handle.
                    _ => place
                        .checked_sub(before_operands)
                        .and_then(|place| parts_taken(described, place, computations))
                        .map_or(whole, |bytes| whole.min(bytes)),
                };
                let read = windows.read.get(&place).map_or(read, |&bytes| read.min(bytes));
                bytes = bytes.saturating_add(read);
            }
            // The outputs of an async pair are counted at its end.
            if !starts {
                bytes = bytes.saturating_add(windows.bytes_written(&instruction.shape));
            }
            // Times the runs of the computation around it.
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

    /// The bytes of the bf16 logits `[1,4096,151936]`.
    const LOGITS: u64 = 4096 * 151_936 * 2;

    #[test]
    fn traffic_of_the_baseline_is_six_times_its_logits() {
        let traffic = Traffic::parse("xla", XLA).unwrap();
        // Read by three fusions, written once as dlogits and once, for the gather, as f32: 3 + 1 + 2.
        let rest = traffic.hbm_bytes - 6 * LOGITS;
        assert!(rest < LOGITS / 1000, "{rest} bytes per token");
        assert!(traffic.uncounted.is_empty());
    }

    #[test]
    fn traffic_of_a_gather_is_its_result() {
        let whole = XLA.replace(" gather(", " notgather(");
        let (gathered, whole) = (Traffic::parse("x", XLA).unwrap(), Traffic::parse("x", &whole).unwrap());
        assert_eq!(whole.hbm_bytes - gathered.hbm_bytes, 2 * LOGITS - 4096 * 4);
    }

    #[test]
    fn traffic_of_an_operand_counts_once_and_of_a_slice_its_part() {
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
    fn traffic_of_an_update_without_a_handle_is_its_operand() {
        let text = "ENTRY %main (a: f32[100]) -> f32[100] {
  %a = f32[100] parameter(0)
  ROOT %u = f32[100] async-update(%a)
}
";
        assert_eq!(Traffic::parse("x", text).unwrap().hbm_bytes, 400);
    }

    #[test]
    fn traffic_of_a_loop_within_itself_is_an_error() {
        let text = "%c (p: s32[]) -> pred[] {
  ROOT %p = pred[] parameter(0)
}

%b (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %again = s32[] while(%p), condition=%c, body=%b, backend_config={\"known_trip_count\":{\"n\":\"2\"}}
}

ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  ROOT %loop = s32[] while(%a), condition=%c, body=%b, backend_config={\"known_trip_count\":{\"n\":\"2\"}}
}
";
        let error = Traffic::parse("x", text).unwrap_err().to_string();
        assert!(error.contains("loops within each other"), "{error}");
    }

    #[test]
    fn traffic_of_an_undefined_operand_is_an_error() {
        let broken = [
            "ENTRY %m () -> f32[] {\n  %a = f32[1] add(%missing)\n}\n",
            "ENTRY %m () -> f32[] {\n  %a = f32[1] parameter(0)\n  %b = f32[1] add(%a#3)\n}\n",
        ];
        for text in broken {
            let error = Traffic::parse("x", text).unwrap_err();
            assert!(matches!(error, AheadError::Malformed { .. }), "{text}: {error}");
        }
    }
}
