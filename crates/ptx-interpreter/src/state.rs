//! The state of threads, warps and CTAs during a run, and the vector clocks of what threads know.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use super::PtxFault;
use super::instruction::{BarrierReduction, RegisterSlot};
use super::memory::CheckedMemory;
use super::transaction::TransactionBarrier;

/// The number of threads of a warp.
pub(super) const LANES: usize = 32;

/// A value for each lane of a warp.
pub(super) type LaneValues = [u64; LANES];

/// The knowledge of a thread: for every thread of the cluster, and every barrier in its shared memory, the clock up to which
/// the thread has learnt of its accesses.
pub(super) type VectorClock = Rc<[u32]>;

/// A fault of one lane, before the instruction and the thread are added.
pub(super) struct LaneFault {
    pub(super) lane: usize,
    pub(super) fault: PtxFault,
    pub(super) problem: String,
}

pub(super) type LaneResult<T> = Result<T, LaneFault>;

/// The join of the vector clocks of threads that synchronise.
#[derive(Clone, Default)]
pub(super) struct ClockJoin {
    pub(super) clocks: Vec<u32>,
    /// The vector clocks that `clocks` already includes.
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

/// A `cp.async` under way: source and target, and the numbers of bytes read and written.
pub(super) struct AsyncCopy {
    pub(super) array: usize,
    pub(super) from: usize,
    pub(super) read: usize,
    pub(super) to: usize,
    pub(super) written: usize,
}

/// The state of a thread: its clock, its knowledge and its copies.
pub(super) struct ThreadState {
    pub(super) clock: u32,
    pub(super) known: VectorClock,
    /// The knowledge and the clock at the last fence, which a relaxed arrival passes on.
    pub(super) fenced: Option<(VectorClock, u32)>,
    /// The number of phases of the cluster's barrier that it knows to be over.
    pub(super) phases: u32,
    pub(super) arrivals: u32,
    pub(super) waits: u32,
    pub(super) copies: Vec<AsyncCopy>,
    pub(super) groups: VecDeque<Vec<AsyncCopy>>,
}

/// The state of a warp: its masks, program counters and slots.
pub(super) struct WarpState {
    pub(super) cta: usize,
    /// The number in the cluster of the thread of lane 0.
    pub(super) first: usize,
    /// The lanes that have a thread, as a mask; the next two are those that have not exited and those that wait.
    pub(super) lanes: u32,
    pub(super) alive: u32,
    pub(super) waiting: u32,
    pub(super) pcs: [usize; LANES],
    pub(super) slots: Vec<LaneValues>,
    /// The lanes of each slot that have been written, as a mask.
    pub(super) written: Vec<u32>,
}

/// A named barrier of a CTA on which some threads have arrived.
#[derive(Default)]
pub(super) struct CtaBarrier {
    /// The number of threads that take part; None for all of the CTA.
    pub(super) expected: Option<u64>,
    pub(super) arrived: u64,
    pub(super) waiting: Vec<usize>,
    pub(super) meeting: ClockJoin,
    /// The number of arrived threads whose predicate held.
    pub(super) held: u64,
    pub(super) reduces: Vec<(usize, RegisterSlot, BarrierReduction)>,
}

/// The state of a CTA: its shared memory and barriers.
pub(super) struct CtaState {
    pub(super) shared: CheckedMemory,
    pub(super) barriers: HashMap<u64, CtaBarrier>,
    /// The mbarriers in its shared memory, in the order of their initialisation.
    pub(super) transactions: Vec<TransactionBarrier>,
    pub(super) alive: u64,
    /// The clock and the instruction of each thread's last access to this CTA's memory as a peer; clock 0 for none.
    pub(super) touched: Vec<(u32, u32)>,
}

#[derive(Default)]
pub(super) struct ClusterBarrier {
    pub(super) arrived: usize,
    pub(super) waiting: Vec<usize>,
    /// The number of phases that are over.
    pub(super) phases: u32,
    pub(super) meeting: ClockJoin,
    /// The knowledge that the last phase passed on, if any arrival released.
    pub(super) passed: Option<VectorClock>,
    /// The joins of `passed` with the knowledge of threads, so that each is computed once.
    pub(super) joined: Vec<[VectorClock; 2]>,
}

/// Iterates over the lanes of a mask.
pub(super) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

/// Returns the mask of the lanes of `mask` for which `holds` is true.
pub(super) fn lanes_where(mask: u32, holds: impl Fn(usize) -> bool) -> u32 {
    lanes_of(mask).filter(|&lane| holds(lane)).fold(0, |lanes, lane| lanes | 1 << lane)
}
