//! Decoded instructions: their operands are slots, which registers, constants and special registers share.

use super::arithmetic::{ApproximateFunction, LaneFunction};
use super::transaction::AcquireScope;
use super::types::PtxType;

/// The number of a slot, which has a value for each lane of a warp.
pub(super) type RegisterSlot = usize;

/// An entry after decoding, ready to run.
pub(super) struct DecodedEntry {
    pub(super) name: String,
    /// The names of the parameters, each a pointer to a global array.
    pub(super) parameters: Vec<String>,
    pub(super) limits: LaunchLimits,
    /// The initial value of each slot, by its number.
    pub(super) slots: Vec<InitialValue>,
    pub(super) instructions: Vec<DecodedInstruction>,
    /// The number of mbarriers that a CTA has room for: 0 if the entry initialises none.
    pub(super) barriers_of_a_cta: usize,
    /// The first byte and the end of each array of shared memory.
    pub(super) arrays: Vec<(u32, u32)>,
    /// The first byte of the dynamic array of shared memory, whose extent the launch gives.
    pub(super) dynamic: Option<u32>,
}

/// The demands of an entry's directives on a launch.
#[derive(Default)]
pub(super) struct LaunchLimits {
    pub(super) cluster: Option<[u32; 3]>,
    /// Whether the entry has `.explicitcluster`, so that a launch must give the cluster's extents.
    pub(super) explicit_cluster: bool,
    pub(super) block: Option<[u32; 3]>,
    pub(super) most_threads: Option<u32>,
}

/// The initial value of a slot in every lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum InitialValue {
    /// A register, which must be written before it is read.
    Unwritten,
    Value(u64),
    Parameter(usize),
    Special(PtxSpecialRegister),
}

/// A special register; the number is an axis, x, y or z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PtxSpecialRegister {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterId(usize),
    Nclusterid(usize),
    ClusterCtarank,
    ClusterNctarank,
    Laneid,
    Warpid,
    Nwarpid,
    LanesBelow,
    LanesUpTo,
    LanesFrom,
    LanesAbove,
    LaneBit,
}

/// An instruction whose operands are slots.
pub(super) struct DecodedInstruction {
    pub(super) line: usize,
    /// The opcode with its modifiers, such as `ld.global.f32`.
    pub(super) name: String,
    /// The guard: a predicate, and whether the instruction runs where it is false.
    pub(super) guard: Option<(RegisterSlot, bool)>,
    /// The registers that it reads, which must have been written.
    pub(super) sources: Vec<RegisterSlot>,
    pub(super) action: PtxOperation,
}

/// The effect of an instruction.
pub(super) enum PtxOperation {
    Compute {
        to: RegisterSlot,
        of: [RegisterSlot; 3],
        function: LaneFunction,
    },
    Approximate {
        to: RegisterSlot,
        of: [RegisterSlot; 2],
        function: ApproximateFunction,
        ftz: bool,
    },
    /// A comparison, and the negated relation for a second predicate.
    Compare {
        to: [Option<RegisterSlot>; 2],
        of: [RegisterSlot; 3],
        function: Box<dyn Fn(u64, u64, u64) -> [bool; 2] + Send + Sync>,
    },
    /// A register split into parts of `bits` bits, the lowest first.
    Split {
        to: Vec<Option<RegisterSlot>>,
        of: RegisterSlot,
        bits: u32,
    },
    Join {
        to: RegisterSlot,
        of: Vec<RegisterSlot>,
        bits: u32,
    },
    /// `mapa`: the address of a peer's shared memory.
    Map {
        to: RegisterSlot,
        address: RegisterSlot,
        rank: RegisterSlot,
    },
    /// A load of elements of type `ty` into registers of `register_bits` bits.
    Load {
        space: StateSpace,
        from: OperandAddress,
        ty: PtxType,
        to: Vec<Option<RegisterSlot>>,
        register_bits: u32,
        read_only: bool,
    },
    Store {
        space: StateSpace,
        to: OperandAddress,
        bytes: u32,
        of: Vec<RegisterSlot>,
    },
    /// `st.async`: a store that completes on an mbarrier.
    StoreAsync {
        to: OperandAddress,
        bytes: u32,
        of: Vec<RegisterSlot>,
        barrier: OperandAddress,
    },
    InitialiseBarrier {
        at: OperandAddress,
        count: RegisterSlot,
    },
    /// `mbarrier.arrive`, which first expects so many more bytes.
    ArriveAtBarrier {
        at: OperandAddress,
        bytes: Option<RegisterSlot>,
        releases: bool,
    },
    TryWait {
        complete: RegisterSlot,
        at: OperandAddress,
        parity: RegisterSlot,
        acquires: AcquireScope,
    },
    /// `fence.mbarrier_init`, after which arrivals pass on which barriers are initialised.
    FenceInitialised,
    Atomic {
        space: StateSpace,
        at: OperandAddress,
        ty: PtxType,
        operation: AtomicOperation,
        to: Option<RegisterSlot>,
        of: [RegisterSlot; 2],
    },
    /// `cp.async` of `bytes` bytes: `read` limits how many are read, `ignore` makes it none, and zeros fill the rest.
    Copy {
        to: OperandAddress,
        from: OperandAddress,
        bytes: u32,
        read: Option<RegisterSlot>,
        ignore: Option<RegisterSlot>,
    },
    CommitCopies,
    /// `cp.async.wait_group`: completes all but so many groups.
    WaitCopies(usize),
    /// `cp.async.wait_all`: completes every copy that was issued.
    WaitAllCopies,
    Branch {
        to: usize,
        uniform: bool,
    },
    Exit,
    /// A named barrier of the CTA; an arrival alone if it does not wait.
    Barrier {
        id: RegisterSlot,
        threads: Option<RegisterSlot>,
        aligned: bool,
        waits: bool,
        reduces: Option<PredicateReduction>,
    },
    WarpBarrier {
        members: RegisterSlot,
    },
    ClusterArrive {
        release: bool,
        aligned: bool,
    },
    ClusterWait {
        aligned: bool,
    },
    Fence {
        beyond_cta: bool,
    },
    Shuffle {
        mode: ShuffleMode,
        to: RegisterSlot,
        valid: Option<RegisterSlot>,
        of: RegisterSlot,
        by: RegisterSlot,
        clamp: RegisterSlot,
        members: RegisterSlot,
    },
    Vote {
        mode: VoteMode,
        to: RegisterSlot,
        of: RegisterSlot,
        negated: bool,
        members: RegisterSlot,
    },
    /// `redux`: a reduction over the members of a warp.
    Reduce {
        to: RegisterSlot,
        of: RegisterSlot,
        members: RegisterSlot,
        function: LaneFunction,
    },
    Elect {
        to: Option<RegisterSlot>,
        elected: RegisterSlot,
        members: RegisterSlot,
    },
    ActiveMask {
        to: RegisterSlot,
    },
    Nothing,
}

/// A reduction of the predicates of all threads that arrive on a barrier (`barrier.red`).
pub(super) struct PredicateReduction {
    pub(super) to: RegisterSlot,
    pub(super) of: RegisterSlot,
    pub(super) negated: bool,
    pub(super) mode: BarrierReduction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarrierReduction {
    Count,
    All,
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateSpace {
    Global,
    /// The shared memory of the thread's own CTA.
    Shared,
    /// The shared memory of any CTA of the cluster.
    Cluster,
}

/// An address: a register and a constant offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OperandAddress {
    pub(super) base: RegisterSlot,
    pub(super) offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtomicOperation {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

impl PtxOperation {
    /// Whether the lanes of a warp execute it together.
    pub(super) fn is_collective(&self) -> bool {
        matches!(
            self,
            PtxOperation::Barrier { .. }
                | PtxOperation::WarpBarrier { .. }
                | PtxOperation::ClusterArrive { .. }
                | PtxOperation::ClusterWait { .. }
                | PtxOperation::Shuffle { .. }
                | PtxOperation::Vote { .. }
                | PtxOperation::Reduce { .. }
                | PtxOperation::Elect { .. }
        )
    }
}

impl PtxOperation {
    /// Returns the slots that it reads, constants included.
    pub(super) fn sources(&self) -> Vec<RegisterSlot> {
        match self {
            PtxOperation::Compute { of, .. } | PtxOperation::Compare { of, .. } => of.to_vec(),
            PtxOperation::Approximate { of, .. } => of.to_vec(),
            PtxOperation::Split { of, .. } => vec![*of],
            PtxOperation::Join { of, .. } => of.clone(),
            PtxOperation::Map { address, rank, .. } => vec![*address, *rank],
            PtxOperation::Load { from, .. } => vec![from.base],
            PtxOperation::Store { to, of, .. } => of.iter().copied().chain([to.base]).collect(),
            PtxOperation::StoreAsync { to, of, barrier, .. } => {
                of.iter().copied().chain([to.base, barrier.base]).collect()
            }
            PtxOperation::InitialiseBarrier { at, count } => vec![at.base, *count],
            PtxOperation::ArriveAtBarrier { at, bytes, .. } => [at.base].into_iter().chain(*bytes).collect(),
            PtxOperation::TryWait { at, parity, .. } => vec![at.base, *parity],
            PtxOperation::Atomic { at, of, .. } => vec![at.base, of[0], of[1]],
            PtxOperation::Copy { to, from, read, ignore, .. } => {
                [to.base, from.base].into_iter().chain(*read).chain(*ignore).collect()
            }
            PtxOperation::Barrier { id, threads, reduces, .. } => {
                let of = reduces.as_ref().map(|reduces| reduces.of);
                [*id].into_iter().chain(*threads).chain(of).collect()
            }
            PtxOperation::Shuffle { of, by, clamp, members, .. } => vec![*of, *by, *clamp, *members],
            PtxOperation::Vote { of, members, .. } | PtxOperation::Reduce { of, members, .. } => vec![*of, *members],
            PtxOperation::WarpBarrier { members } | PtxOperation::Elect { members, .. } => vec![*members],
            PtxOperation::CommitCopies
            | PtxOperation::WaitCopies(_)
            | PtxOperation::WaitAllCopies
            | PtxOperation::Branch { .. }
            | PtxOperation::Exit
            | PtxOperation::ClusterArrive { .. }
            | PtxOperation::ClusterWait { .. }
            | PtxOperation::Fence { .. }
            | PtxOperation::FenceInitialised
            | PtxOperation::ActiveMask { .. }
            | PtxOperation::Nothing => Vec::new(),
        }
    }
}
