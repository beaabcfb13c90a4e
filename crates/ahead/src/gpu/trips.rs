//! The number of times that each line of a kernel's PTX runs, found by executing its integer instructions.
//!
//! The path of a thread depends on its number, on constants, and on very few numbers in memory: the mask and the target of a token.
//! So threads are executed with integers alone. Registers that derive from thread numbers, constants and addresses have values;
//! registers that derive from floats, from shared memory or from other threads are unknown. The mask counts every token, and the
//! target is the middle of the vocabulary. At a branch on an unknown value the thread takes the way on which less runs: it skips
//! forward, or leaves the loop after one round; the line is reported.
//!
//! A warp runs a line as often as the thread that runs it most often. The first and the last thread of each warp are executed,
//! and some clusters of the grid, spread so that rows of every alignment are among them. The count is a lower bound, apart from the
//! scaling from these clusters to the whole grid.

use std::collections::HashMap;

use assay_ptx::PtxKernel;

use super::target::WARP;
use crate::error::AheadError;

/// The most clusters that are executed to represent the grid.
const CLUSTERS: u64 = 16;

/// The most lines that one thread may run before it counts as endless.
const MOST_STEPS: u64 = 4_000_000;

/// The distance between the assumed addresses of arrays in global memory.
const FIRST_ADDRESS: u64 = 1 << 44;

/// A loop of the kernel: a backward branch and its label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PtxLoop {
    /// The line of the first instruction after the label.
    pub(crate) first: usize,
    /// The line of the branch back to the label.
    pub(crate) last: usize,
}

/// The number of times that warps run each line of a kernel in one launch.
#[derive(Clone, Debug)]
pub(crate) struct TripCounts {
    /// The runs of all warps together, by line from 1; `None` for lines without an instruction.
    counts: Vec<Option<f64>>,
    /// The loops of the kernel, in the order of their branches.
    pub(crate) loops: Vec<PtxLoop>,
    /// The number of warps of the launch.
    pub(crate) warps: f64,
    /// The lines of branches that depend on unknown values, ascending.
    pub(crate) undecided: Vec<usize>,
}

impl TripCounts {
    /// Returns how often warps run `line`; a line without an instruction counts once for each warp.
    pub(crate) fn times(&self, line: usize) -> f64 {
        self.counts.get(line).copied().flatten().unwrap_or(self.warps)
    }

    /// Returns the index of the innermost loop around `line`.
    pub(crate) fn around(&self, line: usize) -> Option<usize> {
        let around = self.loops.iter().enumerate().filter(|(_, of)| (of.first..=of.last).contains(&line));
        around.min_by_key(|(_, of)| of.last - of.first).map(|(place, _)| place)
    }

    /// Returns how often the loop is entered: as often as the line before it runs.
    pub(crate) fn entries(&self, of: &PtxLoop) -> f64 {
        let before = self.counts[..of.first].iter().rev().find_map(|count| *count);
        before.unwrap_or(self.warps).min(self.times(of.last))
    }
}

/// The value of an integer register; `None` if it is unknown.
type KnownInteger = Option<u64>;

#[derive(Debug)]
enum TracedOperand {
    Register(usize),
    /// A constant, the address of an array in shared memory, or of a parameter's array.
    Known(u64),
    Special(SpecialRegister),
    /// The address inside of the brackets of a memory operand.
    Memory(Box<TracedOperand>),
    /// The registers inside of the braces of a vector operand.
    Several(Vec<usize>),
    Label(usize),
    Unknown,
}

#[derive(Clone, Copy, Debug)]
enum SpecialRegister {
    Thread,
    Threads,
    Cta,
    Ctas,
    Rank,
    Ranks,
    Cluster,
    Clusters,
    Lane,
    Warp,
    Zero,
    One,
}

#[derive(Debug)]
struct TracedInstruction {
    line: usize,
    /// The predicate's register, and whether the instruction runs if it is false.
    guard: Option<(usize, bool)>,
    opcode: String,
    modifiers: Vec<String>,
    operands: Vec<TracedOperand>,
}

impl TracedInstruction {
    fn is(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|one| one == modifier)
    }

    /// Returns bits and signedness of the instruction's type, its last modifier; `None` if it is not an integer.
    fn integer(&self) -> Option<(u32, bool)> {
        integer(self.modifiers.last()?)
    }
}

/// Returns bits and signedness of an integer type; `None` for other types.
fn integer(name: &str) -> Option<(u32, bool)> {
    let (kind, bits) = name.split_at_checked(1)?;
    match (kind, bits.parse().ok()?) {
        ("u" | "b", bits @ (8 | 16 | 32 | 64)) => Some((bits, false)),
        ("s", bits @ (8 | 16 | 32 | 64)) => Some((bits, true)),
        _ => None,
    }
}

/// A kernel's text, parsed as far as its integers need it.
struct TracedProgram {
    instructions: Vec<TracedInstruction>,
    registers: usize,
    lines: usize,
}

/// The position of one thread in the launch.
#[derive(Clone, Copy)]
struct ThreadPlace {
    thread: u32,
    cta: u64,
}

/// Creates the error of a line of PTX that does not read as expected.
fn malformed(line: usize, given: &str, expected: &'static str) -> AheadError {
    AheadError::quoted("PTX", line, given, expected)
}

impl TracedProgram {
    fn parse(kernel: &PtxKernel) -> Result<Self, AheadError> {
        let lines: Vec<&str> = kernel.text.lines().collect();
        let code = |line: &str| line.split("//").next().unwrap_or_default().trim().to_string();
        // First pass: instructions are numbered, so that labels have the number of the next one, and arrays in shared memory get addresses.
        let mut labels = HashMap::new();
        let mut known = HashMap::new();
        let mut shared = 0_u64;
        let mut count = 0;
        for line in lines.iter().map(|line| code(line)) {
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label.to_string(), count);
            } else if line.contains(".shared") && line.contains('[') && line.starts_with('.') {
                let name = line.split('[').next().and_then(|line| line.split_whitespace().last()).unwrap_or_default();
                let bytes = line.split(['[', ']']).nth(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(0_u64);
                // Dynamic shared memory has no size here: only its address matters.
                known.insert(name.to_string(), shared.next_multiple_of(16));
                shared = shared.next_multiple_of(16) + bytes;
            } else if is_instruction(&line) {
                count += 1;
            }
        }
        // Arrays in global memory get addresses far apart, so that an address tells the array.
        for (place, parameter) in kernel.parameters.iter().enumerate() {
            known.insert(parameter.name.clone(), FIRST_ADDRESS * (place as u64 + 1));
        }
        // Second pass: operands become indices of registers, constants, addresses and labels.
        let mut registers: HashMap<String, usize> = HashMap::new();
        let mut instructions = Vec::new();
        for (at, line) in lines.iter().enumerate() {
            let line = code(line);
            if !is_instruction(&line) {
                continue;
            }
            let mut operand = |text: &str| operand(text, &mut registers, &known, &labels);
            let text = line.trim_end_matches(';').trim();
            // `@%p1 bra $end` runs if the predicate is true, `@!%p1 bra $end` if it is false.
            let (guard, text) = match text.strip_prefix('@') {
                None => (None, text),
                Some(guarded) => {
                    let (predicate, text) = guarded
                        .split_once(' ')
                        .ok_or_else(|| malformed(at + 1, &line, "an instruction behind its guard"))?;
                    let (negated, name) = predicate.strip_prefix('!').map_or((false, predicate), |name| (true, name));
                    match operand(name) {
                        TracedOperand::Register(register) => (Some((register, negated)), text.trim()),
                        _ => return Err(malformed(at + 1, &line, "a predicate")),
                    }
                }
            };
            // `mad.wide.u32 %d1, %r1, 4, %d0`: the opcode, its modifiers, its operands.
            let (mnemonic, given) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
            let mut modifiers = mnemonic.split('.').map(String::from);
            let opcode = modifiers.next().unwrap_or_default();
            let modifiers = modifiers.filter(|modifier| !modifier.is_empty()).collect();
            let operands = split(given).into_iter().map(&mut operand).collect();
            instructions.push(TracedInstruction { line: at + 1, guard, opcode, modifiers, operands });
        }
        Ok(Self { instructions, registers: registers.len(), lines: lines.len() })
    }

    /// Finds the loops: branches to an earlier line.
    fn loops(&self) -> Vec<PtxLoop> {
        let back = self.instructions.iter().enumerate().filter_map(|(at, branch)| match branch.operands.first() {
            Some(&TracedOperand::Label(to)) if branch.opcode == "bra" && to <= at => Some(PtxLoop {
                first: self.instructions.get(to).map_or(branch.line, |first| first.line),
                last: branch.line,
            }),
            _ => None,
        });
        back.collect()
    }
}

/// Returns whether a line is an instruction, and not a declaration, a directive or a brace.
fn is_instruction(line: &str) -> bool {
    line.ends_with(';') && !line.starts_with(['.', '}']) && !line.is_empty()
}

/// Splits operands at commas outside of braces and brackets.
fn split(given: &str) -> Vec<&str> {
    let mut depth = 0;
    // Tracks the nesting, so that the commas of `{%f1, %f2}` do not split.
    let parts = given.split(|c: char| {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn operand(
    text: &str,
    registers: &mut HashMap<String, usize>,
    known: &HashMap<String, u64>,
    labels: &HashMap<String, usize>,
) -> TracedOperand {
    // Grids and blocks have one dimension, so that y and z are constant.
    let special = match text {
        "%tid.x" => Some(SpecialRegister::Thread),
        "%ntid.x" => Some(SpecialRegister::Threads),
        "%ctaid.x" => Some(SpecialRegister::Cta),
        "%nctaid.x" => Some(SpecialRegister::Ctas),
        "%cluster_ctarank" | "%cluster_ctaid.x" => Some(SpecialRegister::Rank),
        "%cluster_nctarank" | "%cluster_nctaid.x" => Some(SpecialRegister::Ranks),
        "%clusterid.x" => Some(SpecialRegister::Cluster),
        "%nclusterid.x" => Some(SpecialRegister::Clusters),
        "%laneid" => Some(SpecialRegister::Lane),
        "%warpid" => Some(SpecialRegister::Warp),
        "%tid.y" | "%tid.z" | "%ctaid.y" | "%ctaid.z" | "%clusterid.y" | "%clusterid.z" => Some(SpecialRegister::Zero),
        "%ntid.y" | "%ntid.z" | "%nctaid.y" | "%nctaid.z" => Some(SpecialRegister::One),
        _ => None,
    };
    if let Some(special) = special {
        return TracedOperand::Special(special);
    }
    if let Some(inside) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        // The base alone: what is loaded is told by its array.
        let base = inside.split('+').next().unwrap_or_default().trim();
        return TracedOperand::Memory(Box::new(operand(base, registers, known, labels)));
    }
    // Registers are numbered in the order in which they first occur.
    let mut register = |text: &str| {
        let next = registers.len();
        *registers.entry(text.to_string()).or_insert(next)
    };
    if let Some(inside) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
        return TracedOperand::Several(inside.split(',').map(|one| register(one.trim())).collect());
    }
    if text.starts_with('%') {
        // `%p1|%p2` defines two; the second is unknown for ever.
        return TracedOperand::Register(register(text.split('|').next().unwrap_or(text)));
    }
    // A constant is decimal, possibly negative, or hexadecimal.
    let number = text.strip_prefix("0x").map_or_else(
        || text.parse().ok().map(i64::cast_unsigned).or_else(|| text.parse().ok()),
        |hexadecimal| u64::from_str_radix(hexadecimal, 16).ok(),
    );
    let number = number.or_else(|| known.get(text).copied());
    // Anything else, such as a float constant `0f3F800000`, is unknown.
    match (number, labels.get(text)) {
        (Some(number), _) => TracedOperand::Known(number),
        (None, Some(&label)) => TracedOperand::Label(label),
        (None, None) => TracedOperand::Unknown,
    }
}

/// Truncates a value to its lowest `bits` bits.
fn cut(value: u64, bits: u32) -> u64 {
    if bits >= 64 { value } else { value & ((1 << bits) - 1) }
}

/// Sign-extends the lowest `bits` bits of a value.
fn signed(value: u64, bits: u32) -> i64 {
    let unused = 64 - bits.min(64);
    ((value << unused) as i64) >> unused
}

/// The state of a launch whose threads are run one after another.
struct ThreadTracer<'k> {
    kernel: &'k PtxKernel,
    program: TracedProgram,
    undecided: Vec<usize>,
}

impl ThreadTracer<'_> {
    fn special(&self, special: SpecialRegister, place: ThreadPlace) -> u64 {
        let cluster = u64::from(self.kernel.cluster.max(1));
        let ctas = u64::from(self.kernel.grid[0]);
        match special {
            SpecialRegister::Thread => place.thread.into(),
            SpecialRegister::Threads => self.kernel.block[0].into(),
            SpecialRegister::Cta => place.cta,
            SpecialRegister::Ctas => ctas,
            SpecialRegister::Rank => place.cta % cluster,
            SpecialRegister::Ranks => cluster,
            SpecialRegister::Cluster => place.cta / cluster,
            SpecialRegister::Clusters => ctas / cluster,
            SpecialRegister::Lane => (place.thread % WARP).into(),
            SpecialRegister::Warp => (place.thread / WARP).into(),
            SpecialRegister::Zero => 0,
            SpecialRegister::One => 1,
        }
    }

    /// Returns the value at an address of global memory if it is assumed known: the mask counts every token, and the target is the middle
    /// of the vocabulary.
    fn held(&self, address: KnownInteger) -> KnownInteger {
        // The distance between arrays is so large that the quotient is the array's index.
        let place = usize::try_from(address?.checked_div(FIRST_ADDRESS)?.checked_sub(1)?).ok()?;
        let parameter = self.kernel.parameters.get(place)?;
        match parameter.name.as_str() {
            "mask" => Some(1),
            "ids" => {
                let logits = self.kernel.parameters.iter().find(|parameter| parameter.name.contains("logits"))?;
                logits.shape.last().map(|&vocab| vocab as u64 / 2)
            }
            _ => None,
        }
    }

    /// Runs one thread until it ends, and adds to `counts` how often it ran each instruction.
    fn run(&mut self, place: ThreadPlace, counts: &mut [u32]) -> Result<(), AheadError> {
        // All registers are unknown at first. The program counter is `at`.
        let mut registers: Vec<KnownInteger> = vec![None; self.program.registers];
        let (mut at, mut steps) = (0, 0_u64);
        while let Some(instruction) = self.program.instructions.get(at) {
            steps += 1;
            if steps > MOST_STEPS {
                return Err(malformed(instruction.line, "4,000,000 lines by one thread", "a thread that ends"));
            }
            counts[at] += 1;
            at += 1;
            // `None` means that the guard is unknown: the instruction may run or not.
            let guard = instruction
                .guard
                .map_or(Some(true), |(register, negated)| registers[register].map(|value| (value != 0) != negated));
            match instruction.opcode.as_str() {
                // A thread ends at a return, unless its guard is known to be false or is unknown.
                "ret" | "exit" if guard != Some(false) && (guard.is_some() || instruction.guard.is_none()) => {
                    return Ok(());
                }
                "bra" => {
                    let Some(&TracedOperand::Label(to)) = instruction.operands.first() else {
                        return Err(malformed(instruction.line, "a branch", "a label"));
                    };
                    if guard.is_none() && !self.undecided.contains(&instruction.line) {
                        self.undecided.push(instruction.line);
                    }
                    // Unknown: past a part, and out of a loop.
                    let goes = guard.unwrap_or(to >= at);
                    if goes {
                        at = to;
                    }
                    continue;
                }
                _ => {}
            }
            // A guarded instruction that does not run leaves its registers as they are.
            if guard == Some(false) {
                continue;
            }
            // The first operand is the destination. Stores and barriers have none.
            let defined = match instruction.operands.first() {
                Some(TracedOperand::Register(register)) => vec![*register],
                Some(TracedOperand::Several(several)) => several.clone(),
                _ => continue,
            };
            // An unknown guard makes the result unknown.
            let value = if guard.is_some() { self.value(instruction, &registers, place) } else { None };
            let value = value.filter(|_| defined.len() == 1);
            for register in defined {
                registers[register] = value;
            }
        }
        Ok(())
    }

    /// Computes the result of an instruction from the known operands; `None` if it depends on an unknown one.
    fn value(&self, instruction: &TracedInstruction, registers: &[KnownInteger], place: ThreadPlace) -> KnownInteger {
        let given = |at: usize| -> KnownInteger {
            match instruction.operands.get(at)? {
                TracedOperand::Register(register) => registers[*register],
                TracedOperand::Known(value) => Some(*value),
                TracedOperand::Special(special) => Some(self.special(*special, place)),
                _ => None,
            }
        };
        let opcode = instruction.opcode.as_str();
        match opcode {
            // A parameter is known by its address; memory of arrays only as far as `held` says.
            "ld" => {
                let Some(TracedOperand::Memory(address)) = instruction.operands.get(1) else { return None };
                let address = match address.as_ref() {
                    TracedOperand::Register(register) => registers[*register],
                    TracedOperand::Known(address) => Some(*address),
                    _ => None,
                };
                return if instruction.is("param") {
                    address
                } else if instruction.is("shared") || instruction.is("shared::cluster") || instruction.is("local") {
                    None
                } else {
                    self.held(address)
                };
            }
            "mapa" | "cvta" => return given(1),
            "selp" => {
                let (yes, no) = (given(1), given(2));
                return match given(3) {
                    Some(condition) => {
                        if condition == 0 {
                            no
                        } else {
                            yes
                        }
                    }
                    None => yes.filter(|_| yes == no),
                };
            }
            "setp" => return compared(instruction, [given(1)?, given(2)?]),
            "not" | "and" | "or" | "xor" | "mov" if instruction.is("pred") => {
                let [a, b] = [given(1), given(2)];
                return match opcode {
                    "mov" => a,
                    "not" => a.map(|a| u64::from(a == 0)),
                    "and" if a == Some(0) || b == Some(0) => Some(0),
                    "or" if a.is_some_and(|a| a != 0) || b.is_some_and(|b| b != 0) => Some(1),
                    "and" | "or" => Some(u64::from((a? != 0) && (b? != 0))),
                    _ => Some(u64::from((a? != 0) != (b? != 0))),
                };
            }
            _ => {}
        }
        // Integer arithmetic, in the width and the signedness of the type. Anything that is not an integer is unknown.
        let (bits, has_sign) = instruction.integer()?;
        let operand = |at| given(at).map(|value| cut(value, bits));
        let (a, b) = (operand(1), operand(2));
        let wide = |value: u64| if has_sign { i128::from(signed(value, bits)) } else { i128::from(value) };
        // `mul` and `mad` keep the low half of a product, `.hi` the high half, `.wide` both.
        let product = |c: i128| -> KnownInteger {
            let product = wide(a?) * wide(b?);
            let value = if instruction.is("hi") { product >> bits } else { product } + c;
            Some(cut(value.cast_unsigned() as u64, if instruction.is("wide") { bits * 2 } else { bits }))
        };
        let amount = || given(2).map(|amount| (amount & 0xffff_ffff).min(64) as u32);
        let value = match opcode {
            "mov" => a?,
            "add" => a?.wrapping_add(b?),
            "sub" => a?.wrapping_sub(b?),
            "mul" => return product(0),
            "mad" => return product(i128::from(given(3)?)),
            "div" if b? != 0 => (wide(a?) / wide(b?)).cast_unsigned() as u64,
            "rem" if b? != 0 => (wide(a?) % wide(b?)).cast_unsigned() as u64,
            "min" => {
                if wide(a?) < wide(b?) {
                    a?
                } else {
                    b?
                }
            }
            "max" => {
                if wide(a?) > wide(b?) {
                    a?
                } else {
                    b?
                }
            }
            "and" => a? & b?,
            "or" => a? | b?,
            "xor" => a? ^ b?,
            "not" => !a?,
            "neg" => a?.wrapping_neg(),
            "shl" => a?.checked_shl(amount()?).unwrap_or(0),
            "shr" if has_sign => (signed(a?, bits) >> amount()?.min(63)).cast_unsigned(),
            "shr" => a?.checked_shr(amount()?).unwrap_or(0),
            "cvt" => {
                // The source type is the last modifier, the destination type the one before it.
                let (to, _) = integer(instruction.modifiers.iter().rev().nth(1)?)?;
                return Some(cut(if has_sign { signed(a?, bits).cast_unsigned() } else { a? }, to));
            }
            _ => return None,
        };
        Some(cut(value, bits))
    }
}

/// Evaluates `setp` on two integers.
fn compared(instruction: &TracedInstruction, [a, b]: [u64; 2]) -> KnownInteger {
    let (bits, has_sign) = instruction.integer()?;
    let (a, b) = (cut(a, bits), cut(b, bits));
    // Only comparisons without a second predicate have two modifiers: `setp.lt.u32`.
    let ordering = if has_sign { signed(a, bits).cmp(&signed(b, bits)) } else { a.cmp(&b) };
    let holds = match instruction.modifiers.first()?.as_str() {
        "eq" => ordering.is_eq(),
        "ne" => ordering.is_ne(),
        "lt" | "lo" => ordering.is_lt(),
        "le" | "ls" => ordering.is_le(),
        "gt" | "hi" => ordering.is_gt(),
        "ge" | "hs" => ordering.is_ge(),
        _ => return None,
    };
    (instruction.modifiers.len() == 2).then_some(u64::from(holds))
}

impl TripCounts {
    /// Counts one launch of `kernel`.
    ///
    /// # Errors
    /// [`AheadError::Malformed`] where the text is not understood, or a thread does not end.
    pub(crate) fn count(kernel: &PtxKernel) -> Result<Self, AheadError> {
        // A few clusters represent the grid: at most `CLUSTERS`, evenly spread.
        let program = TracedProgram::parse(kernel)?;
        let (loops, lines) = (program.loops(), program.lines);
        let mut threads = ThreadTracer { kernel, program, undecided: Vec::new() };
        let cluster = u64::from(kernel.cluster.max(1));
        let clusters = kernel.grid.iter().map(|&extent| u64::from(extent)).product::<u64>() / cluster;
        let threads_a_cta: u32 = kernel.block.iter().product();
        let chosen = clusters.min(CLUSTERS);
        let instructions = threads.program.instructions.len();
        let mut sums = vec![0_u64; instructions];
        for at in 0..chosen {
            // One cluster further each time, so that rows of every alignment modulo 16 bytes are among them.
            let number = (at * (clusters / chosen) + if clusters > 2 * CLUSTERS { at } else { 0 }) % clusters;
            for cta in number * cluster..(number + 1) * cluster {
                // The first and the last thread of each warp are executed. The warp runs a line as often as that of the two which
                // runs it more often.
                for first in (0..threads_a_cta).step_by(WARP as usize) {
                    let last = (first + WARP).min(threads_a_cta) - 1;
                    let mut most = vec![0_u32; instructions];
                    for thread in [first, last] {
                        let mut counts = vec![0_u32; instructions];
                        threads.run(ThreadPlace { thread, cta }, &mut counts)?;
                        most.iter_mut().zip(counts).for_each(|(most, count)| *most = (*most).max(count));
                    }
                    sums.iter_mut().zip(most).for_each(|(sum, most)| *sum += u64::from(most));
                }
            }
        }
        // Scales the sums to the whole grid.
        let scale = clusters as f64 / chosen as f64;
        let mut counts = vec![None; lines + 1];
        for (instruction, sum) in threads.program.instructions.iter().zip(sums) {
            counts[instruction.line] = Some(sum as f64 * scale);
        }
        let warps = clusters as f64 * cluster as f64 * f64::from(threads_a_cta.div_ceil(WARP));
        threads.undecided.sort_unstable();
        Ok(Self { counts, loops, warps, undecided: threads.undecided })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use assay_core::device_dtype::DeviceDtype;
    use assay_ptx::{Parameter, Role};

    /// Writes a kernel with a row of 1,000 floats, and an element of the mask, for each CTA.
    pub(crate) fn kernel(body: &str) -> PtxKernel {
        let text = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\n.visible .entry scale(\n\t.param .u64 logits,\n\t.param .u64 mask,\n\t.param .u64 dlogits\n)\n.reqntid 256, 1, 1\n{{\n\t.reg .pred %p<8>;\n\t.reg .b32 %r<32>;\n\t.reg .b64 %d<32>;\n\t.reg .f32 %f<32>;\n{body}\tret;\n}}\n"
        );
        let parameter = |name: &str, dtype, shape: &[usize], role| Parameter {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            alignment: assay_ptx::ALIGNMENT,
            role,
        };
        PtxKernel {
            name: "scale".into(),
            text,
            grid: [64, 1, 1],
            block: [256, 1, 1],
            cluster: 1,
            shared_bytes: 0,
            parameters: vec![
                parameter("logits", DeviceDtype::F32, &[64, 1000], Role::Input),
                parameter("mask", DeviceDtype::Pred, &[64], Role::Input),
                parameter("dlogits", DeviceDtype::F32, &[64, 1000], Role::Output { over: Some(0) }),
            ],
        }
    }

    /// Each thread processes every 256th of 1,000 columns: the last ones three times, the first 232 four times.
    pub(crate) const SWEEP: &str = "\tld.param.u64 %d0, [logits];
\tld.param.u64 %d1, [mask];
\tld.param.u64 %d2, [dlogits];
\tmov.u32 %r0, %tid.x;
\tmov.u32 %r1, %ctaid.x;
\tcvt.u64.u32 %d3, %r1;
\tadd.u64 %d1, %d1, %d3;
\tld.global.u8 %r2, [%d1];
\tsetp.eq.u32 %p1, %r2, 0;
\t@%p1 bra $masked;
\tmul.wide.u32 %d3, %r1, 4000;
\tadd.u64 %d0, %d0, %d3;
\tadd.u64 %d2, %d2, %d3;
$sweep:
\tmul.wide.u32 %d4, %r0, 4;
\tadd.u64 %d5, %d0, %d4;
\tld.global.f32 %f0, [%d5];
\tex2.approx.ftz.f32 %f0, %f0;
\tadd.u64 %d6, %d2, %d4;
\tst.global.f32 [%d6], %f0;
\tadd.u32 %r0, %r0, 256;
\tsetp.lt.u32 %p0, %r0, 1000;
\t@%p0 bra $sweep;
$masked:
";

    fn line(kernel: &PtxKernel, part: &str) -> usize {
        1 + kernel.text.lines().position(|line| line.contains(part)).unwrap()
    }

    #[test]
    fn trips_of_a_warp_are_those_of_its_busiest_thread() {
        let kernel = kernel(SWEEP);
        let trips = TripCounts::count(&kernel).unwrap();
        assert_eq!(trips.warps, 64.0 * 8.0);
        // Threads 0 to 231 go round four times: all warps but none of the last whole, whose first thread, 224, does.
        assert_eq!(trips.times(line(&kernel, "ex2")), 64.0 * 8.0 * 4.0);
        assert_eq!(trips.times(line(&kernel, "mul.wide.u32 %d3")), 64.0 * 8.0);
        assert_eq!(trips.loops.len(), 1);
        assert_eq!(trips.entries(&trips.loops[0]), 64.0 * 8.0);
        assert!(trips.undecided.is_empty(), "{:?}", trips.undecided);
        // Narrower rows: warps 0 to 6 of 700 columns three times, warp 5 (160 to 191) as its first thread does.
        let narrow = self::kernel(&SWEEP.replace(", 1000", ", 700"));
        assert_eq!(TripCounts::count(&narrow).unwrap().times(line(&narrow, "ex2")), 64.0 * (6.0 * 3.0 + 2.0 * 2.0));
    }

    #[test]
    fn trips_at_an_unknown_branch_are_the_least_and_reported() {
        let unknown = kernel(&SWEEP.replace("[mask]", "[logits]"));
        let trips = TripCounts::count(&unknown).unwrap();
        assert_eq!(trips.undecided, [line(&unknown, "bra $masked")]);
        assert_eq!(trips.times(line(&unknown, "ex2")), 0.0);
        let endless = kernel(&SWEEP.replace("add.u32 %r0, %r0, 256", "add.u32 %r0, %r0, 0"));
        assert!(TripCounts::count(&endless).unwrap_err().to_string().contains("a thread that ends"));
    }
}
