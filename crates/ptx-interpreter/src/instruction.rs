//! Instructions as they run: they name places, in which registers, constants and special registers alike lie.

use super::arithmetic::{ApproximateFunction, LaneFunction};
use super::transaction::AcquireScope;
use super::types::PtxType;

/// A row of a warp's lanes.
pub(super) type RegisterSlot = usize;

/// An entry that can run.
pub(super) struct DecodedEntry {
    pub(super) name: String,
    /// Names of the parameters, each a pointer.
    pub(super) parameters: Vec<String>,
    pub(super) limits: LaunchLimits,
    /// What each slot holds from the beginning.
    pub(super) slots: Vec<InitialValue>,
    pub(super) instructions: Vec<DecodedInstruction>,
    /// Barriers in shared memory that a CTA has room for.
    pub(super) barriers_of_a_cta: usize,
    /// Where arrays of shared memory lie.
    pub(super) arrays: Vec<(u32, u32)>,
    /// Where the array lies whose extent is the launch's.
    pub(super) dynamic: Option<u32>,
}

/// What directives demand of a launch.
#[derive(Default)]
pub(super) struct LaunchLimits {
    pub(super) cluster: Option<[u32; 3]>,
    /// Whether a launch must give the cluster's extents.
    pub(super) explicit_cluster: bool,
    pub(super) block: Option<[u32; 3]>,
    pub(super) most_threads: Option<u32>,
}

/// What a slot holds from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum InitialValue {
    /// A register, which must be written before it is read.
    Unwritten,
    Value(u64),
    Parameter(usize),
    Special(SpecialRegister),
}

/// A special register; the number is an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SpecialRegister {
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

pub(super) struct DecodedInstruction {
    pub(super) line: usize,
    /// With its modifiers.
    pub(super) name: String,
    /// A predicate, and whether the instruction runs where it is false.
    pub(super) guard: Option<(RegisterSlot, bool)>,
    /// What a run reads, to see that it was written.
    pub(super) sources: Vec<RegisterSlot>,
    pub(super) action: PtxOperation,
}

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
    /// A comparison, and the same of the opposite where there is a second predicate.
    Compare {
        to: [Option<RegisterSlot>; 2],
        of: [RegisterSlot; 3],
        function: Box<dyn Fn(u64, u64, u64) -> [bool; 2] + Send + Sync>,
    },
    /// Parts of `bits`, the lowest first.
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
    /// An address of a peer's shared memory.
    Map {
        to: RegisterSlot,
        address: RegisterSlot,
        rank: RegisterSlot,
    },
    /// `register_bits` is the width of the registers that take elements of type `ty`.
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
    /// A store that completes on a barrier.
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
    /// An arrival, and before it so many bytes are expected.
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
    /// `fence.mbarrier_init`
    FenceInitialised,
    Atomic {
        space: StateSpace,
        at: OperandAddress,
        ty: PtxType,
        operation: AtomicOperation,
        to: Option<RegisterSlot>,
        of: [RegisterSlot; 2],
    },
    /// `cp.async` of `bytes`; fewer are read where `read` says so, none where `ignore` holds, and zeros fill the rest.
    Copy {
        to: OperandAddress,
        from: OperandAddress,
        bytes: u32,
        read: Option<RegisterSlot>,
        ignore: Option<RegisterSlot>,
    },
    CommitCopies,
    /// All but so many groups.
    WaitCopies(usize),
    /// Everything.
    WaitAllCopies,
    Branch {
        to: usize,
        uniform: bool,
    },
    Exit,
    /// Of a CTA; the arrival alone where it does not wait.
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
    /// Over the members of a warp.
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

/// What a barrier makes of the predicates of all who arrive.
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
    /// The CTA's own.
    Shared,
    /// Anyone's in the cluster.
    Cluster,
}

/// A register and what is added to it.
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
    /// Whether the lanes of a warp take it together.
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
    /// The slots that it reads.
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
