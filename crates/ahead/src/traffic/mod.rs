//! Bytes that a program moves between HBM and the cores, from its optimized HLO.
//!
//! Each instruction of the entry computation reads its operands and writes its outputs, each once, in whole tiles of
//! their layout. These do not count:
//!
//! - parameters, constants, tuples, bitcasts and `iota` themselves;
//! - arrays that the layout puts elsewhere, `S(1)` (VMEM) and the like;
//! - the rest of an array of which a part is written in place, or of which a fusion only reads parts at offsets known at run time;
//! - the rest of an operand that is only gathered from or sliced. The called computations tell whether a fusion, or an async
//!   call that slices, does nothing else with an operand.
//!
//! An async pair is counted where it starts, for its operands, and where it is done, for its output; an in-place
//! custom call reads its operands once and writes its outputs once like any other. The body of a `while` counts as often as it
//! runs, if its trips are known. Traffic inside of an instruction (spills to HBM, a kernel's own DMAs that fetch a window
//! twice) is not visible: for a Mosaic kernel the count is a lower bound. A collective reads its operand once and writes its result
//! once, however often parts travel around a ring: libtpu sends those from VMEM to VMEM. Bodies of a `conditional`, and of a `while`
//! with unknown trips, are not counted; the instructions are named.

mod account;
mod collectives;
mod hlo;
mod trips;
mod windows;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::Serialize;

use crate::error::AheadError;
use crate::files::{read_text, sorted_names};
use assay_schema::compile::TpuLaunch;
use hlo::HloModule;

/// The bytes and the collectives of one run of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// The bytes that one device reads from HBM and writes to it.
    pub hbm_bytes: u64,
    /// The names of loops and conditionals whose number of runs is unknown.
    pub uncounted: Vec<String>,
    /// The number of runs of each instruction inside of a loop, by name; instructions outside run once.
    pub runs: BTreeMap<String, u64>,
    /// The part of [`hbm_bytes`](Self::hbm_bytes) that each instruction moves in all its runs, by name.
    pub bytes_of: BTreeMap<String, u64>,
    /// The names of collectives, grouped by the compiled program that they share. libtpu calls it by the name of one of them.
    pub collectives: Vec<Vec<String>>,
    /// The collectives with their bytes, groups and overlap.
    pub moved: Vec<Collective>,
    /// The part of [`hbm_bytes`](Self::hbm_bytes) of collectives during which nothing else is computed.
    pub exposed_bytes: u64,
}

/// An operation that several devices execute together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// Every device gets the sum of all devices' arrays, or another reduction.
    AllReduce,
    /// Every device gets one part of the sum.
    ReduceScatter,
    /// Every device gets the arrays of all devices.
    AllGather,
    /// Every device gets one part of each device's array.
    AllToAll,
    /// Devices get the arrays of other devices.
    Permute,
}

/// One collective operation of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Collective {
    /// The name of its HLO instruction, without the `%`.
    pub name: String,
    /// The kind of the operation, which determines its bytes on the links.
    pub kind: CollectiveKind,
    /// The bytes that are reduced, that are gathered, or that each device sends.
    pub bytes: u64,
    /// The groups of devices that work together; empty for all devices. For a permute, pairs (from, to).
    pub groups: Vec<Vec<usize>>,
    /// The number of its runs in one run of the program.
    pub runs: u64,
    /// The names of the operations that are computed between its start and its end, with those of loops' bodies.
    pub beside: Vec<String>,
    /// The names of collectives that are waited for between its start and its end.
    pub awaited: Vec<String>,
    /// The names of its start, its update and its end, which its own bytes are counted at; empty for a synchronous operation.
    pub ends: Vec<String>,
}

impl Collective {
    /// Whether nothing is computed between its start and its end.
    pub fn is_alone(&self) -> bool {
        self.beside.is_empty()
    }
}

impl Traffic {
    /// Parses the text of an optimized HLO module that was read from `file`, and counts its traffic.
    ///
    /// # Errors
    /// [`AheadError::Malformed`], with the line that does not read as expected.
    pub fn parse(file: &str, text: &str) -> Result<Traffic, AheadError> {
        account::traffic(file, &HloModule::parse(file, text)?)
    }

    /// Sets the number of launches of each kernel: its own runs, and those of the collectives that share its program. Returns the names of
    /// collectives that no kernel serves.
    pub fn launch(&self, kernels: &mut [TpuLaunch]) -> Vec<String> {
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

/// Reads the name and the text of the optimized HLO that a compiler left in `folder`, in a file whose name ends with `suffix`.
///
/// # Errors
/// [`AheadError::Malformed`] if the file is missing, [`AheadError::Io`] if it cannot be read.
pub fn read_optimized(folder: &Path, suffix: &str) -> Result<(String, String), AheadError> {
    // `module_0000.…` is the program; later modules are parts of it that were compiled separately, for the SparseCore.
    let module = sorted_names(folder)?.into_iter().find(|name| name.ends_with(suffix));
    let module = module.ok_or_else(|| AheadError::malformed(suffix, 0, "no such file", "a module's optimized HLO"))?;
    let text = read_text(&folder.join(&module))?;
    Ok((module, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_a_kernel_serve_all_like_collectives() {
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
        let kernel = |name: &str| TpuLaunch {
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
}
