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
//! The history of each byte is kept: its last write and the reads since. These are errors:
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
//!   Order does not follow from the order in which threads happened to run;
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
mod launch;
mod memory;
mod parse;
mod run;
mod state;
mod transaction;
mod types;

use std::ops::Range;
use std::{fmt, iter};

/// The default limit of warp instructions of a run, which takes some minutes.
const MOST_WORK: u64 = 1 << 32;

/// A PTX module whose entries are decoded and ready to run.
pub struct PtxModule {
    entries: Vec<instruction::DecodedEntry>,
}

impl fmt::Debug for PtxModule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_list().entries(self.entries.iter().map(|entry| &entry.name)).finish()
    }
}

/// The extents of a launch: grid, block, cluster and dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridLaunch {
    /// CTAs along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster along x, y, z: the numbers of `.reqnctapercluster`, or 1, 1, 1.
    pub cluster: [u32; 3],
    /// Bytes of the `.extern .shared` array.
    pub dynamic_shared: u32,
}

/// An array in global memory, whose address a kernel takes as a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlobalArray {
    /// The name of the array in messages.
    pub name: String,
    /// The contents, in bytes, before or after a run.
    pub bytes: Vec<u8>,
    /// The ranges of bytes that the kernel must write, and may read only after that.
    pub unwritten: Vec<Range<usize>>,
    /// The bytes by which the address exceeds a multiple of 2³⁹: 0 unless set by [`late`](Self::late).
    pub late: u32,
}

impl GlobalArray {
    /// Creates an array that is written before the kernel runs; it may be overwritten.
    pub fn input(name: &str, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes, unwritten: vec![], late: 0 }
    }

    /// Creates an array that the kernel must write whole.
    pub fn output(name: &str, bytes: usize) -> Self {
        Self::input(name, vec![0xA5; bytes]).unwritten(iter::once(0..bytes))
    }

    /// Marks ranges of bytes that the kernel must write, and may read only after that.
    #[must_use]
    pub fn unwritten(self, bytes: impl IntoIterator<Item = Range<usize>>) -> Self {
        Self { unwritten: bytes.into_iter().collect(), ..self }
    }

    /// Lets the array begin `bytes` bytes past a multiple of 2³⁹, so that its addresses are aligned no better than that number.
    #[must_use]
    pub fn late(self, bytes: u32) -> Self {
        Self { late: bytes, ..self }
    }
}

/// The order in which warps and parts of warps run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadOrder {
    /// Warp after warp, each until it waits or exits.
    #[default]
    InSequence,
    /// Parts of warps in an order drawn from the seed.
    Shuffled(u64),
}

/// The error of approximate functions. A result that is right under all three is right on any GPU whose errors are within
/// the manual's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApproximateUnits {
    /// No error: the correctly rounded result.
    #[default]
    Rounded,
    /// The result is further from 0 by the manual's largest error.
    Above,
    /// The result is nearer to 0 by the manual's largest error.
    Below,
}

/// The order of threads, the error of approximate functions and the limit of work of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterpretOptions {
    /// The order in which threads run.
    pub order: ThreadOrder,
    /// The error of approximate functions.
    pub units: ApproximateUnits,
    /// The number of warp instructions after which the run ends with an error.
    pub most_work: u64,
}

impl Default for InterpretOptions {
    fn default() -> Self {
        Self { order: ThreadOrder::default(), units: ApproximateUnits::default(), most_work: MOST_WORK }
    }
}

/// The rule that a thread broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PtxFault {
    /// An access outside of every array.
    OutOfBounds,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// A read of what was not written.
    Uninitialised,
    /// An access to bytes that an asynchronous copy or store reads or writes.
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
    /// Behaviour that the manual leaves undefined.
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

/// The reason why a module was not read, or not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PtxInterpretError {
    /// The text is not PTX, or not of the supported part of it.
    #[error("line {line}: {problem}")]
    Text {
        /// The line of the text, counted from 1.
        line: usize,
        /// The finding and the expectation, in words.
        problem: String,
    },
    /// An instruction is unknown or wrong in itself.
    #[error("line {line}: {name}: {problem}")]
    Instruction {
        /// The line of the text, counted from 1.
        line: usize,
        /// The instruction with its modifiers.
        name: String,
        /// The finding and the expectation, in words.
        problem: String,
    },
    /// The launch or the arrays are not those that the entry takes.
    #[error("{0}")]
    Launch(String),
    /// A thread broke a rule.
    #[error("line {line}: {name}: CTA {cta}, thread {thread}: {fault}: {problem}")]
    Fault {
        /// The line of the text, counted from 1.
        line: usize,
        /// The instruction with its modifiers.
        name: String,
        /// The number of the CTA in the grid, x fastest.
        cta: u32,
        /// The number of the thread in its CTA, x fastest.
        thread: u32,
        /// The rule that was broken.
        fault: PtxFault,
        /// The finding and the expectation, in words.
        problem: String,
    },
    /// Bytes of an output that no thread wrote.
    #[error("{buffer}: {bytes} bytes were never written, the first at {first}")]
    Unwritten {
        /// The name of the output array.
        buffer: String,
        /// The number of bytes that were not written.
        bytes: usize,
        /// The offset of the first unwritten byte.
        first: usize,
    },
    /// Two orders of threads led to other bytes.
    #[error("{buffer}: byte {byte} depends on the order in which threads run")]
    OrderDependent {
        /// The name of the array that differs.
        buffer: String,
        /// The offset of the first byte that differs.
        byte: usize,
    },
    /// The run was given up.
    #[error("not finished after {most} warp instructions: the kernel is too large to be interpreted, or does not end")]
    Endless {
        /// The limit of warp instructions, [`InterpretOptions::most_work`].
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

    /// Runs `entry` on `buffers`, and returns them as the kernel left them. Each of `arguments` is the index of the buffer
    /// whose address the parameter takes; two may be equal.
    ///
    /// ```
    /// use assay_ptx_interpreter::{GlobalArray, GridLaunch, InterpretOptions, PtxModule};
    ///
    /// let text = ".version 8.0 .target sm_90 .address_size 64
    ///     .entry store_lane(.param .u64 out) {
    ///         .reg .u64 %out;
    ///         .reg .u32 %lane;
    ///         ld.param.u64 %out, [out];
    ///         mov.u32 %lane, %laneid;
    ///         st.global.u32 [%out], %lane;
    ///     }";
    /// let module = PtxModule::parse(text)?;
    /// let launch = GridLaunch { grid: [1; 3], block: [1; 3], cluster: [1; 3], dynamic_shared: 0 };
    /// let out = vec![GlobalArray::output("out", 4)];
    /// let arrays = module.run("store_lane", &launch, out.clone(), &[0], &InterpretOptions::default())?;
    /// assert_eq!(arrays[0].bytes, [0, 0, 0, 0]);
    ///
    /// // Two threads store to the same address, and nothing orders their stores.
    /// let launch = GridLaunch { block: [2, 1, 1], ..launch };
    /// let error = module.run("store_lane", &launch, out, &[0], &InterpretOptions::default()).unwrap_err();
    /// assert!(error.to_string().contains("race"));
    /// # Ok::<(), assay_ptx_interpreter::PtxInterpretError>(())
    /// ```
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

    /// Runs an entry twice, in sequence and in an order drawn from `seed`; both runs must give the same bytes.
    ///
    /// # Errors
    /// When [`run`](Self::run) does, and when the bytes of the two runs differ.
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
