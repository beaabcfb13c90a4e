//! An interpreter of PTX text: runs GPU kernels on a machine without a GPU, and finds what a GPU would let pass.
//!
//! [`PtxModule::parse`] reads a module, [`PtxModule::run`] runs one of its entries on a grid. It is written apart from what
//! emits the text, from NVIDIA's manual of the PTX ISA; an instruction, modifier or directive that it does not know is an
//! error that names it, never a guess. Parameters are 64-bit pointers to global arrays. Parsing, decoding and running end
//! with an error that says where and what; sizes and work are bounded.
//!
//! # Arithmetic
//!
//! Every operation rounds as the manual says, `fma` once; `.ftz` flushes subnormal inputs and results. A `mul` and an
//! `add` without a rounding modifier may be fused by an assembler: they are not fused here. `ex2`, `lg2`, `rcp`, `sqrt`,
//! `rsqrt`, `tanh` and `div` in their approximate forms are right to half an ulp, or off by what the manual allows them
//! ([`ApproximateUnits`]).
//!
//! # Memory
//!
//! Each byte knows who wrote and who read it. What is an error:
//!
//! - an access outside a global array or a declared array of shared memory (unused bytes lie between arrays), or one that
//!   is not aligned to its whole size, vectors included;
//! - a read of a register, of shared memory or of an [output](GlobalArray::output) that was not written, and an output that is
//!   not written whole;
//! - a touch of what a `cp.async` writes, or a write to what it reads, before the thread that issued it has waited for
//!   it, and a thread that exits before it has;
//! - two accesses to a byte by two threads, one of them a write, that nothing orders. Accesses are ordered by barriers of
//!   a CTA or warp, and by phases of the cluster's barrier: an arrival with `.release`, or after a fence, puts what came
//!   before it before what comes after the others' wait; one with `.relaxed` orders nothing. Clusters are never ordered.
//!   ThreadOrder does not follow from the order in which threads happened to run;
//! - a touch of a peer's shared memory by a thread that does not know of a phase of the cluster's barrier by which the
//!   peer had started, and one of which no thread of the peer knew at its exit;
//! - a read through `ld.global.nc` of what the kernel writes;
//! - a touch of what an asynchronous store (`st.async`) writes by a thread that has not seen the end of the phase on which
//!   it completes by a wait of `.acquire.cluster`, and a CTA of which no thread has seen it at its exit. Nothing else that
//!   the storing thread did is known by that;
//! - a barrier in shared memory (`mbarrier`) that is used before the thread knows that it is initialised, initialised
//!   twice, touched as memory, or told of more arrivals or bytes than it counts;
//! - an instruction of the cluster (its barrier, `mapa`, `shared::cluster`) in an entry with `.reqnctapercluster` and without
//!   `.explicitcluster`, which a launch could run without clusters.
//!
//! # Threads
//!
//! All threads of a cluster run; clusters run one after another. A warp runs the threads that stand at one instruction
//! together; shuffles, votes and barriers wait for the others of the warp. An `.aligned` barrier that some of a warp's
//! threads do not reach, a `bra.uni` that diverges, and a shuffle from a thread that does not take part are errors; so is
//! a deadlock, which says who waits where, and what an `mbarrier` lacks. The first `try_wait` of a thread for each phase
//! fails, as a GPU's may, so that a wait that does not repeat it is found. Who exits is waited for no longer, as the manual has it.
//! [`ThreadOrder::Shuffled`] runs warps, and parts of warps, in an order drawn from a seed (in which `bra.uni` is not judged:
//! threads stand at one place in different rounds of a loop); [`PtxModule::run_both`] demands the same bytes of both.

mod access;
mod arithmetic;
mod collective;
mod decode;
mod forms;
mod instruction;
mod memory;
mod parse;
mod run;
mod state;
mod transaction;
mod types;

use std::ops::Range;
use std::{fmt, iter};

/// WarpState instructions that a run may take: some minutes.
const MOST_WORK: u64 = 1 << 32;

/// A module that was read, and whose entries were decoded.
pub struct PtxModule {
    entries: Vec<instruction::DecodedEntry>,
}

impl fmt::Debug for PtxModule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_list().entries(self.entries.iter().map(|entry| &entry.name)).finish()
    }
}

/// How an entry is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridLaunch {
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster along x, y, z: what `.reqnctapercluster` says, or 1, 1, 1.
    pub cluster: [u32; 3],
    /// Bytes of the `.extern .shared` array.
    pub dynamic_shared: u32,
}

/// A global array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalArray {
    /// What messages call it.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Bytes that the kernel must write, and may read only when it did.
    pub unwritten: Vec<Range<usize>>,
    /// How many bytes past a multiple of 2³⁹ it begins: 0 unless [told](Self::late).
    pub late: u32,
}

impl GlobalArray {
    /// An array that is there before the kernel runs; it may be overwritten.
    pub fn input(name: &str, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes, unwritten: vec![], late: 0 }
    }

    /// An array that the kernel must write whole.
    pub fn output(name: &str, bytes: usize) -> Self {
        Self::input(name, vec![0xA5; bytes]).unwritten(iter::once(0..bytes))
    }

    /// The same, of which the kernel must write these bytes, and may read them only when it did.
    #[must_use]
    pub fn unwritten(self, bytes: impl IntoIterator<Item = Range<usize>>) -> Self {
        Self { unwritten: bytes.into_iter().collect(), ..self }
    }

    /// Lets it begin `bytes` past a multiple of 2³⁹, so that its addresses are no better aligned than those.
    #[must_use]
    pub fn late(self, bytes: u32) -> Self {
        Self { late: bytes, ..self }
    }
}

/// How threads are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadOrder {
    /// WarpState after warp, each as far as it comes.
    #[default]
    InSequence,
    /// Parts of warps in an order drawn from the seed.
    Shuffled(u64),
}

/// What computes approximate functions: what is right by all of these is right by any whose errors are within the manual's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApproximateUnits {
    /// Right to half an ulp.
    #[default]
    Rounded,
    /// Further from 0 by the manual's largest error.
    Above,
    /// Nearer to 0 by as much.
    Below,
}

/// How a run goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterpretOptions {
    /// Of threads.
    pub order: ThreadOrder,
    /// Of approximate functions.
    pub units: ApproximateUnits,
    /// Instructions of warps after which the run is given up.
    pub most_work: u64,
}

impl Default for InterpretOptions {
    fn default() -> Self {
        Self { order: ThreadOrder::default(), units: ApproximateUnits::default(), most_work: MOST_WORK }
    }
}

/// What a thread did that it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PtxFault {
    /// An access outside of every array.
    OutOfBounds,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// A read of what was not written.
    Uninitialised,
    /// A touch of a copy under way.
    NotCopied,
    /// Two accesses that nothing orders.
    Race,
    /// A peer's shared memory before the peer is known to have started.
    PeerNotStarted,
    /// A peer's shared memory when the peer may have exited.
    PeerExited,
    /// Threads of a warp apart where they must be together.
    Divergence,
    /// Threads that wait for ever.
    Deadlock,
    /// What the manual leaves undefined.
    Undefined,
}

impl fmt::Display for PtxFault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            PtxFault::OutOfBounds => "out of bounds",
            PtxFault::Misaligned => "misaligned",
            PtxFault::Uninitialised => "uninitialised",
            PtxFault::NotCopied => "not yet copied",
            PtxFault::Race => "race",
            PtxFault::PeerNotStarted => "peer not started",
            PtxFault::PeerExited => "peer exited",
            PtxFault::Divergence => "divergence",
            PtxFault::Deadlock => "deadlock",
            PtxFault::Undefined => "undefined",
        })
    }
}

/// Why a module was not read, or not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PtxInterpretError {
    /// The text is not PTX, or not of the supported part of it.
    #[error("line {line}: {problem}")]
    Text {
        /// Where it is, counted from 1.
        line: usize,
        /// What was found, and what was expected.
        problem: String,
    },
    /// An instruction is unknown or wrong in itself.
    #[error("line {line}: {name}: {problem}")]
    Instruction {
        /// Where it is, counted from 1.
        line: usize,
        /// The instruction with its modifiers.
        name: String,
        /// What was found, and what was expected.
        problem: String,
    },
    /// The launch or the arrays are not those that the entry takes.
    #[error("{0}")]
    Launch(String),
    /// A thread broke a rule.
    #[error("line {line}: {name}: CTA {cta}, thread {thread}: {fault}: {problem}")]
    Fault {
        /// Where it is, counted from 1.
        line: usize,
        /// The instruction with its modifiers.
        name: String,
        /// The CTA's place in the grid, x fastest.
        cta: u32,
        /// The thread's place in its CTA, x fastest.
        thread: u32,
        /// The rule.
        fault: PtxFault,
        /// What was found, and what was expected.
        problem: String,
    },
    /// Bytes of an output that no thread wrote.
    #[error("{buffer}: {bytes} bytes were never written, the first at {first}")]
    Unwritten {
        /// The output.
        buffer: String,
        /// How many.
        bytes: usize,
        /// The first of them.
        first: usize,
    },
    /// Two orders of threads led to other bytes.
    #[error("{buffer}: byte {byte} depends on the order in which threads run")]
    OrderDependent {
        /// What differs.
        buffer: String,
        /// Where.
        byte: usize,
    },
    /// The run was given up.
    #[error("not finished after {most} warp instructions: the kernel is too large to be interpreted, or does not end")]
    Endless {
        /// Instructions that the run could take.
        most: u64,
    },
}

impl PtxModule {
    /// Reads a module's text and decodes its entries.
    ///
    /// # Errors
    /// When the text is malformed, or has an instruction, modifier or directive that is not supported.
    pub fn parse(text: &str) -> Result<Self, PtxInterpretError> {
        Ok(Self { entries: decode::decode(&parse::parse(text)?)? })
    }

    /// Runs `entry` on `buffers`, and returns them as the kernel left them. Each of `arguments` names the buffer whose
    /// address the parameter takes; two may name one buffer.
    ///
    /// # Errors
    /// When launch or arrays do not fit the entry, and when a thread breaks a rule of [the module](self).
    pub fn run(
        &self,
        entry: &str,
        launch: &GridLaunch,
        buffers: Vec<GlobalArray>,
        arguments: &[usize],
        options: &InterpretOptions,
    ) -> Result<Vec<GlobalArray>, PtxInterpretError> {
        let Some(kernel) = self.entries.iter().find(|kernel| kernel.name == entry) else {
            return Err(PtxInterpretError::Launch(format!("there is no entry {entry}, only {self:?}")));
        };
        run::run(kernel, launch, buffers, arguments, options)
    }

    /// [`run`](Self::run) in sequence and in an order drawn from `seed`: both must give the same bytes.
    ///
    /// # Errors
    /// As [`run`](Self::run), and where the bytes differ.
    pub fn run_both(
        &self,
        entry: &str,
        launch: &GridLaunch,
        buffers: Vec<GlobalArray>,
        arguments: &[usize],
        units: ApproximateUnits,
        seed: u64,
    ) -> Result<Vec<GlobalArray>, PtxInterpretError> {
        let by = |order| InterpretOptions { order, units, ..InterpretOptions::default() };
        let one = self.run(entry, launch, buffers.clone(), arguments, &by(ThreadOrder::InSequence))?;
        let other = self.run(entry, launch, buffers, arguments, &by(ThreadOrder::Shuffled(seed)))?;
        let differs = one.iter().zip(&other).find_map(|(one, other)| {
            let byte = one.bytes.iter().zip(&other.bytes).position(|(one, other)| one != other)?;
            Some(PtxInterpretError::OrderDependent { buffer: one.name.clone(), byte })
        });
        differs.map_or(Ok(one), Err)
    }
}
