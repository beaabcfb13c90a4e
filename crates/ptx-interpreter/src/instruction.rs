//! Instructions as they run: they name places, in which registers, constants and special registers alike lie.

use super::arithmetic::{Approximate, Function};
use super::transaction::Acquires;
use super::types::Type;

/// A row of a warp's lanes.
pub(super) type Slot = usize;

/// An entry that can run.
pub(super) struct Routine {
    pub(super) name: String,
    /// Names of the parameters, each a pointer.
    pub(super) parameters: Vec<String>,
    pub(super) limits: Limits,
    /// What each slot holds from the beginning.
    pub(super) slots: Vec<Fill>,
    pub(super) instructions: Vec<Instruction>,
    /// Barriers in shared memory that a CTA has room for.
    pub(super) barriers_of_a_cta: usize,
    /// Where arrays of shared memory lie.
    pub(super) arrays: Vec<(u32, u32)>,
    /// Where the array lies whose extent is the launch's.
    pub(super) dynamic: Option<u32>,
}

/// What directives demand of a launch.
#[derive(Default)]
pub(super) struct Limits {
    pub(super) cluster: Option<[u32; 3]>,
    /// Whether a launch must give the cluster's extents.
    pub(super) explicit_cluster: bool,
    pub(super) block: Option<[u32; 3]>,
    pub(super) most_threads: Option<u32>,
}

/// What a slot holds from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fill {
    /// A register, which must be written before it is read.
    Unwritten,
    Value(u64),
    Parameter(usize),
    Special(Special),
}

/// A special register; the number is an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Special {
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

pub(super) struct Instruction {
    pub(super) line: usize,
    /// With its modifiers.
    pub(super) name: String,
    /// A predicate, and whether the instruction runs where it is false.
    pub(super) guard: Option<(Slot, bool)>,
    /// What a run reads, to see that it was written.
    pub(super) sources: Vec<Slot>,
    pub(super) action: Action,
}

pub(super) enum Action {
    Compute {
        to: Slot,
        of: [Slot; 3],
        function: Function,
    },
    Approximate {
        to: Slot,
        of: [Slot; 2],
        function: Approximate,
        ftz: bool,
    },
    /// A comparison, and the same of the opposite where there is a second predicate.
    Compare {
        to: [Option<Slot>; 2],
        of: [Slot; 3],
        function: Box<dyn Fn(u64, u64, u64) -> [bool; 2] + Send + Sync>,
    },
    /// Parts of `bits`, the lowest first.
    Split {
        to: Vec<Option<Slot>>,
        of: Slot,
        bits: u32,
    },
    Join {
        to: Slot,
        of: Vec<Slot>,
        bits: u32,
    },
    /// An address of a peer's shared memory.
    Map {
        to: Slot,
        address: Slot,
        rank: Slot,
    },
    /// `register_bits` is the width of the registers that take elements of type `ty`.
    Load {
        space: Space,
        from: Address,
        ty: Type,
        to: Vec<Option<Slot>>,
        register_bits: u32,
        read_only: bool,
    },
    Store {
        space: Space,
        to: Address,
        bytes: u32,
        of: Vec<Slot>,
    },
    /// A store that completes on a barrier.
    StoreAsync {
        to: Address,
        bytes: u32,
        of: Vec<Slot>,
        barrier: Address,
    },
    InitialiseBarrier {
        at: Address,
        count: Slot,
    },
    /// An arrival, and before it so many bytes are expected.
    ArriveAtBarrier {
        at: Address,
        bytes: Option<Slot>,
        releases: bool,
    },
    TryWait {
        complete: Slot,
        at: Address,
        parity: Slot,
        acquires: Acquires,
    },
    /// `fence.mbarrier_init`
    FenceInitialised,
    Atomic {
        space: Space,
        at: Address,
        ty: Type,
        operation: Atomic,
        to: Option<Slot>,
        of: [Slot; 2],
    },
    /// `cp.async` of `bytes`; fewer are read where `read` says so, none where `ignore` holds, and zeros fill the rest.
    Copy {
        to: Address,
        from: Address,
        bytes: u32,
        read: Option<Slot>,
        ignore: Option<Slot>,
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
        id: Slot,
        threads: Option<Slot>,
        aligned: bool,
        waits: bool,
        reduces: Option<Reduces>,
    },
    WarpBarrier {
        members: Slot,
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
        mode: Shuffle,
        to: Slot,
        valid: Option<Slot>,
        of: Slot,
        by: Slot,
        clamp: Slot,
        members: Slot,
    },
    Vote {
        mode: Vote,
        to: Slot,
        of: Slot,
        negated: bool,
        members: Slot,
    },
    /// Over the members of a warp.
    Reduce {
        to: Slot,
        of: Slot,
        members: Slot,
        function: Function,
    },
    Elect {
        to: Option<Slot>,
        elected: Slot,
        members: Slot,
    },
    ActiveMask {
        to: Slot,
    },
    Nothing,
}

/// What a barrier makes of the predicates of all who arrive.
pub(super) struct Reduces {
    pub(super) to: Slot,
    pub(super) of: Slot,
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
pub(super) enum Space {
    Global,
    /// The CTA's own.
    Shared,
    /// Anyone's in the cluster.
    Cluster,
}

/// A register and what is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Slot,
    pub(super) offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atomic {
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
pub(super) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

impl Action {
    /// Whether the lanes of a warp take it together.
    pub(super) fn is_collective(&self) -> bool {
        matches!(
            self,
            Action::Barrier { .. }
                | Action::WarpBarrier { .. }
                | Action::ClusterArrive { .. }
                | Action::ClusterWait { .. }
                | Action::Shuffle { .. }
                | Action::Vote { .. }
                | Action::Reduce { .. }
                | Action::Elect { .. }
        )
    }
}

impl Action {
    /// The slots that it reads.
    pub(super) fn sources(&self) -> Vec<Slot> {
        match self {
            Action::Compute { of, .. } | Action::Compare { of, .. } => of.to_vec(),
            Action::Approximate { of, .. } => of.to_vec(),
            Action::Split { of, .. } => vec![*of],
            Action::Join { of, .. } => of.clone(),
            Action::Map { address, rank, .. } => vec![*address, *rank],
            Action::Load { from, .. } => vec![from.base],
            Action::Store { to, of, .. } => of.iter().copied().chain([to.base]).collect(),
            Action::StoreAsync { to, of, barrier, .. } => of.iter().copied().chain([to.base, barrier.base]).collect(),
            Action::InitialiseBarrier { at, count } => vec![at.base, *count],
            Action::ArriveAtBarrier { at, bytes, .. } => [at.base].into_iter().chain(*bytes).collect(),
            Action::TryWait { at, parity, .. } => vec![at.base, *parity],
            Action::Atomic { at, of, .. } => vec![at.base, of[0], of[1]],
            Action::Copy { to, from, read, ignore, .. } => {
                [to.base, from.base].into_iter().chain(*read).chain(*ignore).collect()
            }
            Action::Barrier { id, threads, reduces, .. } => {
                let of = reduces.as_ref().map(|reduces| reduces.of);
                [*id].into_iter().chain(*threads).chain(of).collect()
            }
            Action::Shuffle { of, by, clamp, members, .. } => vec![*of, *by, *clamp, *members],
            Action::Vote { of, members, .. } | Action::Reduce { of, members, .. } => vec![*of, *members],
            Action::WarpBarrier { members } | Action::Elect { members, .. } => vec![*members],
            Action::CommitCopies
            | Action::WaitCopies(_)
            | Action::WaitAllCopies
            | Action::Branch { .. }
            | Action::Exit
            | Action::ClusterArrive { .. }
            | Action::ClusterWait { .. }
            | Action::Fence { .. }
            | Action::FenceInitialised
            | Action::ActiveMask { .. }
            | Action::Nothing => Vec::new(),
        }
    }
}
