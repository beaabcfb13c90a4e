//! A kernel's PTX assembled by `ptxas` and read back by `nvdisasm`.
//!
//! XLA's plugin embeds PTX without reading it, so a text that no assembler accepts, or that needs more than the chip has, "compiles".
//! Therefore every kernel is assembled here, and compared with the chip's resources. A user's driver assembles the same text again,
//! and may do it in another way.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use assay_core::project;
use assay_ptx::PtxKernel;
use assay_schema::gpu::{GpuLaunch, Pipe};

use super::pipes::{PIPES, taken};
use super::sass::{self, SassInstruction};
use super::target::{GpuChip, GpuTarget, THREADS_A_CTA};
use super::trips::{PtxLoop, TripCounts};
use crate::error::AheadError;
use crate::files::{failed, guarded_folder};

/// The tools of NVIDIA's toolkit that need no GPU: `ptxas`, `nvdisasm`, and the library that XLA's own kernels call.
#[derive(Clone, Debug)]
pub struct CudaToolkit {
    root: PathBuf,
}

/// The environment variable that names the folder of a CUDA toolkit instead of the installed one.
pub const TOOLKIT_VARIABLE: &str = "ASSAY_CUDA_TOOLKIT";

/// The tools of the toolkit, relative to its folder.
const PTXAS: &str = "bin/ptxas";
const NVDISASM: &str = "bin/nvdisasm";

/// The figures that `ptxas -v` prints for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PtxasFigures {
    registers: u32,
    spill_bytes: u32,
    /// Static shared memory of a CTA, in bytes.
    shared_bytes: u32,
}

impl PtxasFigures {
    fn parse(text: &str) -> Option<Self> {
        // Every figure is the number before its unit: `Used 16 registers`, `12 bytes spill stores`.
        let before = |unit: &str| {
            let words: Vec<&str> = text.split([' ', ',', '\n']).filter(|word| !word.is_empty()).collect();
            let unit: Vec<&str> = unit.split(' ').collect();
            let at = words.windows(unit.len()).position(|window| window == unit)?;
            words.get(at.checked_sub(1)?)?.parse::<u32>().ok()
        };
        Some(Self {
            registers: before("registers")?,
            spill_bytes: before("bytes spill stores")? + before("bytes spill loads")?,
            shared_bytes: before("bytes smem").unwrap_or(0),
        })
    }
}

impl CudaToolkit {
    /// Finds the toolkit that [`TOOLKIT_VARIABLE`] names, else the one that `make setup-gpu` installed.
    ///
    /// # Errors
    /// [`AheadError::Absent`], with the part that is.
    pub fn locate() -> Result<Self, AheadError> {
        let absent =
            |what| move |looked| AheadError::Absent { what, looked, setup: "setup-gpu", instead: TOOLKIT_VARIABLE };
        let named = env::var_os(TOOLKIT_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let root = named.map_or_else(|| project::find_code("cuda").map_err(absent("ptxas")), Ok)?;
        let parts = [("ptxas", PTXAS), ("nvdisasm", NVDISASM), ("libdevice", "nvvm/libdevice/libdevice.10.bc")];
        match parts.into_iter().map(|(what, part)| (what, root.join(part))).find(|(_, path)| !path.is_file()) {
            Some((what, path)) => Err(absent(what)(vec![path])),
            None => Ok(Self { root }),
        }
    }

    /// Returns the toolkit's folder, which contains `bin` and `nvvm`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Assembles `kernel` for `target`, and sums what all its threads execute.
    ///
    /// # Errors
    /// [`AheadError::Beyond`] where the chip lacks what it asks for; [`AheadError::Assembler`] with the assembler's words;
    /// [`AheadError::Malformed`] where what it or the disassembler wrote is not understood; [`AheadError::Io`].
    pub fn assemble(&self, kernel: &PtxKernel, target: &GpuTarget) -> Result<GpuLaunch, AheadError> {
        let chip = target.chip;
        expect_launch(kernel, target)?;
        // `ptxas` writes the machine code to a file, with the line of PTX of each instruction.
        let guardian = guarded_folder("assay-gpu-")?;
        let [text, binary] = ["kernel.ptx", "kernel.cubin"].map(|name| guardian.folder().join(name));
        fs::write(&text, &kernel.text).map_err(failed("write", &text))?;
        let [ptxas_path, nvdisasm_path] = [PTXAS, NVDISASM].map(|part| self.root.join(part));
        let mut ptxas = Command::new(&ptxas_path);
        ptxas.args(["-v", "--generate-line-info", "--gpu-name", &chip.architecture(), "--output-file"]);
        let output = ptxas.args([&binary, &text]).output().map_err(failed("run", &ptxas_path))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            let message = first_error(&said).unwrap_or_else(|| output.status.to_string());
            return Err(AheadError::Assembler {
                target: target.to_string(),
                kernel: kernel.name.clone(),
                message: message.into(),
            });
        }
        // The figures are on stderr, as are errors.
        let PtxasFigures { registers, spill_bytes, shared_bytes } = PtxasFigures::parse(&said)
            .ok_or_else(|| AheadError::quoted("ptxas -v", 0, &said, "registers and spills"))?;
        // Static shared memory is known only now; the sum must fit as well.
        let shared_bytes = shared_bytes + kernel.shared_bytes;
        expect_shared(kernel, target, shared_bytes)?;
        let mut nvdisasm = Command::new(&nvdisasm_path);
        let output = nvdisasm.args(["-gp", "-c"]).arg(&binary).output().map_err(failed("run", &nvdisasm_path))?;
        if !output.status.success() {
            let message = format!("nvdisasm: {}", String::from_utf8_lossy(&output.stderr).trim());
            return Err(AheadError::Assembler {
                target: target.to_string(),
                kernel: kernel.name.clone(),
                message: message.into(),
            });
        }
        // Weighs each machine instruction by the runs of its line of PTX, and adds up what the pipes take.
        let instructions = sass::parse(&kernel.name, &String::from_utf8_lossy(&output.stdout))?;
        let trips = TripCounts::count(kernel)?;
        let (weights, mut uncounted) = weighed(&instructions, &trips);
        let pipes = pipes(chip, &instructions, &weights, &mut uncounted);
        let threads = kernel.block.iter().product();
        // Residency depends on the registers that the assembler chose.
        let (resident, by) = chip.resident(threads, registers, shared_bytes);
        Ok(GpuLaunch {
            name: kernel.name.clone(),
            runs: 1,
            grid: kernel.grid,
            block: kernel.block,
            cluster: kernel.cluster,
            registers,
            spill_bytes,
            shared_bytes,
            resident,
            resident_by: by.into(),
            instructions: weights.iter().sum(),
            pipes,
            uncounted,
        })
    }
}

/// Returns the first error that an assembler printed, and how many more lines there are.
fn first_error(said: &str) -> Option<String> {
    let mut lines = said.lines().map(str::trim).filter(|line| line.contains("error") || line.contains("fatal"));
    let first = lines.next().or_else(|| said.lines().find(|line| !line.trim().is_empty()))?;
    Some(match lines.count() {
        0 => first.into(),
        more => format!("{first} (and {more} more lines)"),
    })
}

/// The alternative for a kernel that asks for more than a chip has.
const INSTEAD: &str = "gpu-two-pass keeps no row and needs no cluster";

/// Checks a launch against the limits of the chip.
///
/// # Errors
/// [`AheadError::Beyond`].
pub fn expect_launch(kernel: &PtxKernel, target: &GpuTarget) -> Result<(), AheadError> {
    let beyond = |what, given: String, expected: String| {
        Err(AheadError::Beyond {
            target: target.to_string(),
            kernel: kernel.name.clone(),
            what,
            given: given.into(),
            expected,
        })
    };
    let (chip, threads) = (target.chip, kernel.block.iter().product::<u32>());
    if kernel.cluster > chip.largest_cluster {
        let most = chip.largest_cluster;
        let architecture = chip.architecture();
        let expected = if most == 1 {
            format!("none: {architecture} has no clusters, sm_90 and up do; {INSTEAD}")
        } else {
            format!("up to {most}; {INSTEAD}")
        };
        return beyond("cluster of CTAs", kernel.cluster.to_string(), expected);
    }
    if !(1..=THREADS_A_CTA).contains(&threads) {
        return beyond("threads of a CTA", threads.to_string(), format!("1 to {THREADS_A_CTA}"));
    }
    expect_shared(kernel, target, kernel.shared_bytes)
}

fn expect_shared(kernel: &PtxKernel, target: &GpuTarget, bytes: u32) -> Result<(), AheadError> {
    let most = target.chip.shared_bytes_a_cta;
    if bytes <= most {
        return Ok(());
    }
    Err(AheadError::Beyond {
        target: target.to_string(),
        kernel: kernel.name.clone(),
        what: "bytes of shared memory a CTA",
        given: bytes.to_string().into(),
        expected: format!("up to {most}; {INSTEAD}"),
    })
}

/// The machine code that the assembler made of one loop of PTX.
struct AssembledLoop {
    /// The addresses of the machine's loop; `None` if the assembler unrolled it completely.
    place: Option<(u64, u64)>,
    /// The rounds of the PTX loop in one round of the machine's loop, or all rounds if it was unrolled completely.
    rounds: f64,
    /// Whether copies of the loop's instructions exist outside of `place`.
    spilled_over: bool,
}

/// Opcodes of which each instruction comes from one instruction of PTX, so that their number tells how often a line was copied.
const TELLING: [&str; 8] = ["LDS", "STS", "LDG", "STG", "LD", "ST", "LDGSTS", "MUFU"];

impl AssembledLoop {
    fn find(of: &PtxLoop, instructions: &[SassInstruction]) -> Self {
        let telling = instructions.iter().filter(|one| {
            let opcode = one.mnemonic.split('.').next().unwrap_or_default();
            TELLING.contains(&opcode) && one.line.is_some_and(|line| (of.first..=of.last).contains(&line))
        });
        let telling: Vec<&SassInstruction> = telling.collect();
        // The most copies of a line among those in `place`.
        // Counts, for each line, the instructions that came from it: an unrolled loop has several.
        let copies = |place: Option<(u64, u64)>| {
            let within = telling.iter().filter(|one| is_within(place, one));
            let lines: Vec<_> = within.map(|one| one.line).collect();
            lines.iter().map(|line| lines.iter().filter(|other| *other == line).count()).max().unwrap_or(0)
        };
        // A loop of the machine is a branch backwards that comes from the last line of the PTX's loop.
        let backs = instructions.iter().filter(|branch| branch.line == Some(of.last));
        let places = backs.filter_map(|branch| Some((branch.target?, branch.address))).filter(|(to, from)| to <= from);
        // Among several such loops, the one with most copies of the body is the main one; the others handle the remaining rounds.
        let place = places.max_by_key(|&place| copies(Some(place)));
        let everywhere = Some((0, u64::MAX));
        // Without a loop, all rounds were written one after another.
        let rounds = copies(place.or(everywhere)).max(1) as f64;
        Self { place, rounds, spilled_over: telling.iter().any(|one| !is_within(place.or(everywhere), one)) }
    }
}

fn is_within(place: Option<(u64, u64)>, instruction: &SassInstruction) -> bool {
    place.is_some_and(|(first, last)| (first..=last).contains(&instruction.address))
}

/// Returns how often warps issue each instruction, and a description of what is not counted.
///
/// An instruction runs as often as the line of PTX that it comes from. An instruction that the assembler moved out of the loop of its
/// line runs as often as the loop is entered, and one that it moved into a loop as often as the loop turns. If a loop was unrolled, the
/// copy with most of the PTX's rounds represents all copies: those for the remaining rounds are not cheaper.
fn weighed(instructions: &[SassInstruction], trips: &TripCounts) -> (Vec<f64>, Vec<String>) {
    let made: Vec<AssembledLoop> = trips.loops.iter().map(|of| AssembledLoop::find(of, instructions)).collect();
    let weights = instructions.iter().map(|instruction| {
        let line = instruction.line.unwrap_or(0);
        if let Some(at) = trips.around(line) {
            let (of, made) = (&trips.loops[at], &made[at]);
            // The line is in a loop of PTX. Inside of the machine's loop, or where that was unrolled away, its runs are shared by its
            // copies. Outside, it is either a copy for remaining rounds, which counts as part of the main loop, or was moved before the
            // loop and runs as often as the loop is entered.
            return match made.place {
                None => trips.times(line) / made.rounds,
                Some(_) if is_within(made.place, instruction) => trips.times(line) / made.rounds,
                Some(_) if made.spilled_over => 0.0,
                Some(_) => trips.entries(of).min(trips.times(line)),
            };
        }
        // The line is in no loop of PTX, but its instruction may have been moved into one of the machine's loops.
        let put_into = trips.loops.iter().zip(&made).filter(|(_, made)| is_within(made.place, instruction));
        let innermost = put_into.min_by_key(|(of, _)| of.last - of.first);
        innermost.map_or(trips.times(line), |(of, made)| trips.times(of.last) / made.rounds)
    });
    let told = trips.undecided.iter();
    let told =
        told.map(|line| format!("what the branch in line {line} jumps over, which depends on numbers of the batch"));
    (weights.collect(), told.collect())
}

/// Returns the time of every pipe that is used, the busiest first.
fn pipes(chip: &GpuChip, instructions: &[SassInstruction], weights: &[f64], uncounted: &mut Vec<String>) -> Vec<Pipe> {
    let mut clocks = [0.0; PIPES.len()];
    let mut through = [0.0; PIPES.len()];
    for (instruction, weight) in instructions.iter().zip(weights) {
        // An unknown instruction takes an issue slot, and is reported once.
        let known = taken(chip, &instruction.mnemonic);
        if known.is_none() {
            let name = format!("the pipe of {}, which is not known", instruction.mnemonic);
            if !uncounted.contains(&name) {
                uncounted.push(name);
            }
        }
        let known = known.unwrap_or_else(|| taken(chip, "NOP").unwrap_or_default());
        for (pipe, taken) in known {
            let at = PIPES.iter().position(|name| *name == pipe).unwrap_or(0);
            clocks[at] += taken * weight;
            through[at] += weight;
        }
    }
    let pipe = |at: usize| Pipe { name: PIPES[at].into(), instructions: through[at], ms: chip.ms(clocks[at]) };
    let mut pipes: Vec<Pipe> = (0..PIPES.len()).map(pipe).filter(|pipe| pipe.instructions > 0.0).collect();
    pipes.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    pipes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::trips::tests::{SWEEP, kernel};

    #[test]
    fn ptxas_figures_with_and_without_spills_are_read() {
        let said = |text| PtxasFigures::parse(text);
        let plain = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_90'
ptxas info    : Function properties for scale
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
";
        assert_eq!(said(plain), Some(PtxasFigures { registers: 16, spill_bytes: 0, shared_bytes: 0 }));
        let full = "    40 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 84672 bytes smem, 400 bytes cmem[0]
";
        assert_eq!(said(full), Some(PtxasFigures { registers: 255, spill_bytes: 32, shared_bytes: 84672 }));
        assert_eq!(said("ptxas info : nothing"), None);
    }

    #[test]
    fn weights_of_moved_and_unrolled_instructions_are_their_runs() {
        let kernel = kernel(SWEEP);
        let trips = TripCounts::count(&kernel).unwrap();
        let line = |part: &str| 1 + kernel.text.lines().position(|line| line.contains(part)).unwrap();
        let of = |address, mnemonic: &str, line, target| SassInstruction {
            address,
            mnemonic: mnemonic.into(),
            line: Some(line),
            target,
        };
        let (outside, inside, back) = (line("cvt.u64"), line("ex2"), line("bra $sweep"));
        let once = vec![
            of(0, "S2R", outside, None),
            of(16, "HOISTED", inside, None),
            of(32, "MUFU.EX2", inside, None),
            of(48, "SUNK", outside, None),
            of(64, "BRA", back, Some(32)),
            of(80, "EXIT", line("\tret"), None),
        ];
        let warps = 64.0 * 8.0;
        let (weights, uncounted) = weighed(&once, &trips);
        assert_eq!(weights, [1.0, 1.0, 4.0, 4.0, 4.0, 1.0].map(|times| times * warps));
        assert!(uncounted.is_empty(), "{uncounted:?}");
        // Unrolled: two rounds in one and one for the remaining rounds; or all four, one after another.
        let twice = [&once[..4], &[of(56, "MUFU.EX2", inside, None)], &once[4..5], &[of(80, "MUFU.EX2", inside, None)]];
        let (weights, _) = weighed(&twice.concat(), &trips);
        assert_eq!(weights, [1.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0].map(|times| times * warps));
        let flat: Vec<_> = (0..4).map(|at| of(16 * at, "MUFU.EX2", inside, None)).collect();
        assert_eq!(weighed(&flat, &trips).0, [warps; 4]);
    }

    /// A target, a change of the kernel, and the words that the error must have.
    type RefusedLaunch = (&'static str, fn(&mut PtxKernel), &'static [&'static str]);

    #[test]
    fn launch_beyond_a_chip_is_refused_with_an_alternative() {
        let of = |target, change: fn(&mut PtxKernel)| {
            let mut kernel = kernel(SWEEP);
            change(&mut kernel);
            expect_launch(&kernel, &GpuTarget::parse(target).unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(of("a100", |_| ()), Ok(()));
        assert_eq!(of("h100", |kernel| kernel.cluster = 8), Ok(()));
        let cases: [RefusedLaunch; 4] = [
            (
                "a100",
                |kernel| kernel.cluster = 4,
                &["a100", "scale", "cluster of CTAs 4", "sm_80 has no clusters", "gpu-two-pass"],
            ),
            ("h100", |kernel| kernel.cluster = 16, &["cluster of CTAs 16", "up to 8", "gpu-two-pass"]),
            ("h100", |kernel| kernel.shared_bytes = 300_000, &["300000", "up to 232448", "gpu-two-pass"]),
            ("h100", |kernel| kernel.block = [2048, 1, 1], &["threads of a CTA 2048", "1 to 1024"]),
        ];
        for (target, change, parts) in cases {
            let message = of(target, change).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
