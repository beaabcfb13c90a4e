//! What threads, warps and CTAs are at a moment of a run, and what threads know.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use super::PtxFault;
use super::instruction::{BarrierReduction, RegisterSlot};
use super::memory::CheckedMemory;
use super::transaction::TransactionBarrier;

/// Threads of a warp.
pub(super) const LANES: usize = 32;

/// A value for each.
pub(super) type LaneValues = [u64; LANES];

/// The clock of every thread of the cluster, and of every barrier in its shared memory, up to which a thread has learnt of it.
pub(super) type VectorClock = Rc<[u32]>;

/// What a thread did wrong, before it is known where.
pub(super) struct LaneFault {
    pub(super) lane: usize,
    pub(super) fault: PtxFault,
    pub(super) problem: String,
}

pub(super) type LaneResult<T> = Result<T, LaneFault>;

/// What threads know once all have come together.
#[derive(Clone, Default)]
pub(super) struct ClockJoin {
    pub(super) clocks: Vec<u32>,
    /// Knowledge that is in `clocks` already.
    pub(super) met: Vec<VectorClock>,
    pub(super) phases: u32,
}

impl ClockJoin {
    pub(super) fn add(&mut self, known: &VectorClock, thread: usize, clock: u32) {
        self.join(known);
        self.clocks[thread] = self.clocks[thread].max(clock);
    }

    pub(super) fn join(&mut self, known: &VectorClock) {
        if self.clocks.is_empty() {
            self.clocks = vec![0; known.len()];
        }
        if self.met.iter().any(|met| Rc::ptr_eq(met, known)) {
            return;
        }
        for (clock, &known) in self.clocks.iter_mut().zip(known.iter()) {
            *clock = known.max(*clock);
        }
        self.met.push(known.clone());
    }
}

/// A copy under way: where from and where to, and the bytes read and written.
pub(super) struct AsyncCopy {
    pub(super) array: usize,
    pub(super) from: usize,
    pub(super) read: usize,
    pub(super) to: usize,
    pub(super) written: usize,
}

pub(super) struct ThreadState {
    pub(super) clock: u32,
    pub(super) known: VectorClock,
    /// What a relaxed arrival passes on: what was known at the last fence.
    pub(super) fenced: Option<(VectorClock, u32)>,
    /// Phases of the cluster's barrier that it knows to be over.
    pub(super) phases: u32,
    pub(super) arrivals: u32,
    pub(super) waits: u32,
    pub(super) copies: Vec<AsyncCopy>,
    pub(super) groups: VecDeque<Vec<AsyncCopy>>,
}

pub(super) struct WarpState {
    pub(super) cta: usize,
    /// The thread of lane 0, in the cluster.
    pub(super) first: usize,
    /// LaneValues that there are, that have not exited, that wait.
    pub(super) lanes: u32,
    pub(super) alive: u32,
    pub(super) waiting: u32,
    pub(super) pcs: [usize; LANES],
    pub(super) slots: Vec<LaneValues>,
    /// Of each slot, the lanes that hold something.
    pub(super) written: Vec<u32>,
}

/// A barrier of a CTA on which some have arrived.
#[derive(Default)]
pub(super) struct CtaBarrier {
    /// None where all threads take part.
    pub(super) expected: Option<u64>,
    pub(super) arrived: u64,
    pub(super) waiting: Vec<usize>,
    pub(super) meeting: ClockJoin,
    /// Threads whose predicate held.
    pub(super) held: u64,
    pub(super) reduces: Vec<(usize, RegisterSlot, BarrierReduction)>,
}

pub(super) struct CtaState {
    pub(super) shared: CheckedMemory,
    pub(super) barriers: HashMap<u64, CtaBarrier>,
    /// Barriers in its shared memory, in the order in which they were initialised.
    pub(super) transactions: Vec<TransactionBarrier>,
    pub(super) alive: u64,
    /// Of each thread of the cluster, the clock and the instruction of its last touch of this CTA's memory as a peer.
    pub(super) touched: Vec<(u32, u32)>,
}

#[derive(Default)]
pub(super) struct ClusterBarrier {
    pub(super) arrived: usize,
    pub(super) waiting: Vec<usize>,
    /// Phases that are over.
    pub(super) phases: u32,
    pub(super) meeting: ClockJoin,
    /// What the last phase passed on.
    pub(super) passed: Option<VectorClock>,
    /// What it came to with what threads knew themselves.
    pub(super) joined: Vec<[VectorClock; 2]>,
}

/// The lanes of a mask.
pub(super) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

/// The mask of the lanes of `mask` of which `holds` is true.
pub(super) fn lanes_where(mask: u32, holds: impl Fn(usize) -> bool) -> u32 {
    lanes_of(mask).filter(|&lane| holds(lane)).fold(0, |lanes, lane| lanes | 1 << lane)
}
