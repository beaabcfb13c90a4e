//! Barriers in shared memory (`mbarrier`) and the asynchronous stores that complete on them.
//!
//! A phase of such a barrier ends when no arrival is pending and as many bytes were stored as were expected. Bytes of an
//! asynchronous store are known to no thread, including the one that stores, before the phase on which they complete is
//! over and the thread has seen that by a wait that acquires at the scope of the cluster.
//!
//! In the vector clocks each barrier is an agent of its own, in addition to the threads: its clock is 1 once it is
//! initialised, and one more after each phase. An asynchronous store writes as the agent of its barrier, at the clock that ends the phase.

use std::collections::HashSet;

use super::PtxFault;
use super::instruction::{OperandAddress, PtxOperation, RegisterSlot, StateSpace};
use super::memory::Accessor;
use super::run::ClusterMachine;
use super::state::{ClockJoin, LANES, LaneFault, LaneResult, ThreadState, VectorClock, lanes_of};

/// The most mbarriers that a CTA may have.
pub(super) const MOST_BARRIERS: usize = 8;
/// The size of an mbarrier, in bytes.
pub(super) const BARRIER_BYTES: usize = 8;
/// The largest number of arrivals, and of bytes either way, that a barrier counts.
const MOST_COUNTED: i64 = (1 << 20) - 1;

/// The knowledge that a wait gives to the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcquireScope {
    Nothing,
    /// All that threads of the CTA released by their arrivals.
    OfCta,
    /// All that threads of the CTA released, and the bytes that peers stored.
    OfCluster,
}

/// A thread that waits for the end of a phase.
struct PhaseWaiter {
    thread: usize,
    complete: RegisterSlot,
    parity: u64,
    acquires: AcquireScope,
}

/// A barrier in shared memory.
pub(super) struct TransactionBarrier {
    /// The first byte in shared memory.
    start: usize,
    /// The number of arrivals that end a phase.
    count: i64,
    pending: i64,
    /// Bytes that are expected and not yet stored.
    bytes: i64,
    /// The number of phases that are over.
    phases: u32,
    meeting: ClockJoin,
    /// Knowledge that the arrivals of the last phase passed on.
    passed: Option<VectorClock>,
    /// Cluster phases that those who arrived knew to be over.
    passed_phases: u32,
    waiting: Vec<PhaseWaiter>,
    /// Threads that have tried to wait for the end of a phase, which may fail once however late it is.
    tried: HashSet<(usize, u32)>,
    /// The last asynchronous store: the agent's clock by which it is over, the thread and the instruction.
    stored: Option<(u32, usize, u32)>,
}

/// A barrier of the cluster by its CTA and its number there.
type BarrierId = (usize, usize);

impl ClusterMachine<'_> {
    /// Runs an instruction on a barrier that waits for nothing.
    pub(super) fn act_on_barrier(&mut self, w: usize, active: u32, pc: usize, action: &PtxOperation) -> LaneResult<()> {
        match action {
            PtxOperation::StoreAsync { to, bytes, of, barrier } => {
                self.store_async(w, active, pc, (*to, *barrier), (*bytes as usize, of))
            }
            PtxOperation::InitialiseBarrier { at, count } => self.initialise_barrier(w, active, pc, *at, *count),
            PtxOperation::ArriveAtBarrier { at, bytes, releases } => {
                self.arrive_at_barrier(w, active, pc, *at, (*bytes, *releases))
            }
            PtxOperation::FenceInitialised => {
                self.fence_initialised(w, active);
                Ok(())
            }
            _ => unreachable!("an instruction on a barrier"),
        }
    }

    /// Counts the threads of the cluster and the barriers that its CTAs have room for.
    pub(super) fn agents(&self) -> usize {
        self.threads.len() + self.ctas.len() * self.kernel.barriers_of_a_cta
    }

    fn agent(&self, (cta, number): BarrierId) -> usize {
        self.threads.len() + cta * self.kernel.barriers_of_a_cta + number
    }

    /// Whether `bytes` from `start` on of a CTA's shared memory are in part a barrier.
    pub(super) fn is_barrier(&self, cta: usize, start: usize, bytes: usize) -> bool {
        let overlaps =
            |barrier: &TransactionBarrier| barrier.start < start + bytes && start < barrier.start + BARRIER_BYTES;
        self.ctas[cta].transactions.iter().any(overlaps)
    }

    /// Runs `mbarrier.init` for each active lane.
    fn initialise_barrier(
        &mut self,
        w: usize,
        active: u32,
        pc: usize,
        at: OperandAddress,
        count: RegisterSlot,
    ) -> LaneResult<()> {
        for lane in lanes_of(active) {
            let undefined = |problem| Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            let (cta, start) = self.locate_shared(w, lane, StateSpace::Shared, at, BARRIER_BYTES)?;
            let count = self.warps[w].slots[count][lane] as i64;
            if self.is_barrier(cta, start, BARRIER_BYTES) {
                return undefined("it is initialised twice, expected once".to_string());
            }
            if !(1..=MOST_COUNTED).contains(&count) {
                return undefined(format!("a count of {count} arrivals, expected 1 to {MOST_COUNTED}"));
            }
            let number = self.ctas[cta].transactions.len();
            if number == MOST_BARRIERS {
                return undefined(format!("a CTA with more than {MOST_BARRIERS} barriers is not supported"));
            }
            // The initialisation is the agent's first event, which this lane knows and others must learn of.
            let agent = self.agent((cta, number));
            self.write_as(w, lane, pc, (cta, start, BARRIER_BYTES), (agent, 1))?;
            self.learn(self.warps[w].first + lane, agent, 1);
            self.ctas[cta].transactions.push(TransactionBarrier {
                start,
                count,
                pending: count,
                bytes: 0,
                phases: 0,
                meeting: ClockJoin::default(),
                passed: None,
                passed_phases: 0,
                waiting: Vec::new(),
                tried: HashSet::new(),
                stored: None,
            });
        }
        Ok(())
    }

    /// Lets the thread know of the agent up to `clock`.
    fn learn(&mut self, thread: usize, agent: usize, clock: u32) {
        let known = &mut self.threads[thread].known;
        if known[agent] < clock {
            let mut more = known.to_vec();
            more[agent] = clock;
            *known = more.into();
        }
    }

    /// Runs `fence.mbarrier_init`: later arrivals, relaxed ones too, pass on which barriers are initialised, and nothing else.
    fn fence_initialised(&mut self, w: usize, active: u32) {
        for lane in lanes_of(active) {
            // Only the agents' clocks are raised, to 1: the initialisation, and nothing that the thread knows of others.
            let (first, agents) = (self.threads.len(), self.agents());
            let thread = &mut self.threads[self.warps[w].first + lane];
            let (before, clock) = thread.fenced.take().map_or((vec![0; agents], 0), |(known, at)| (known.to_vec(), at));
            let mut known = before;
            for (passed, own) in known.iter_mut().zip(thread.known.iter()).skip(first) {
                *passed = (*passed).max((*own).min(1));
            }
            thread.fenced = Some((known.into(), clock));
        }
    }

    /// Returns the barrier at an address, which the lane must know to be initialised.
    fn barrier_at(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        space: StateSpace,
        at: OperandAddress,
    ) -> LaneResult<BarrierId> {
        let (cta, start) = self.locate_shared(w, lane, space, at, BARRIER_BYTES)?;
        let found = self.ctas[cta].transactions.iter().position(|barrier| barrier.start == start);
        let Some(number) = found else {
            let problem = "there is no barrier here, expected one that mbarrier.init has made".to_string();
            return Err(LaneFault { lane, fault: PtxFault::Uninitialised, problem });
        };
        self.use_barrier(w, lane, pc, (cta, start, BARRIER_BYTES))?;
        Ok((cta, number))
    }

    /// Runs `mbarrier.arrive`, which expects so many bytes besides.
    fn arrive_at_barrier(
        &mut self,
        w: usize,
        active: u32,
        pc: usize,
        at: OperandAddress,
        (bytes, releases): (Option<RegisterSlot>, bool),
    ) -> LaneResult<()> {
        for lane in lanes_of(active) {
            let which @ (cta, number) = self.barrier_at(w, lane, pc, StateSpace::Shared, at)?;
            // The number of bytes is an operand of `expect_tx` alone.
            let bytes = bytes.map_or(0, |bytes| self.warps[w].slots[bytes][lane] as i64);
            let index = self.warps[w].first + lane;
            let barrier = &mut self.ctas[cta].transactions[number];
            if barrier.pending == 0 {
                let problem = format!("more arrivals in a phase than the {} that were expected", barrier.count);
                return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            }
            // The bytes are expected before the arrival counts.
            barrier.count_bytes(lane, bytes)?;
            barrier.pending -= 1;
            // The arrival passes on what the thread has done: its clock joins those that waiters will acquire, and then
            // advances, so that what it does later is not passed on.
            if releases {
                let thread = &mut self.threads[index];
                barrier.meeting.add(&thread.known, index, thread.clock);
                barrier.meeting.phases = barrier.meeting.phases.max(thread.phases);
                thread.clock += 1;
            }
            self.finish_transactions(which);
        }
        Ok(())
    }

    /// Runs `st.async`: the bytes are there at once, and nobody knows of them before the phase is over.
    fn store_async(
        &mut self,
        w: usize,
        active: u32,
        pc: usize,
        (to, barrier): (OperandAddress, OperandAddress),
        (each, of): (usize, &[RegisterSlot]),
    ) -> LaneResult<()> {
        let bytes = each * of.len();
        for lane in lanes_of(active) {
            let (cta, start) = self.locate_shared(w, lane, StateSpace::Cluster, to, bytes)?;
            let which @ (with, number) = self.barrier_at(w, lane, pc, StateSpace::Cluster, barrier)?;
            if with != cta {
                let [to, of] = [cta, with].map(|cta| self.cta_in_grid(self.cluster, cta as u32));
                let problem = format!("a store to CTA {to} and a barrier of CTA {of}, expected those of one CTA");
                return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            }
            // The data must not overwrite a barrier.
            if self.is_barrier(cta, start, bytes) {
                let problem = "a store over a barrier".to_string();
                return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            }
            // The bytes are written as the barrier's agent, at the clock that it will have when this phase is over.
            let over = self.ctas[cta].transactions[number].phases + 2;
            let agent = self.agent(which);
            self.write_as(w, lane, pc, (cta, start, bytes), (agent, over))?;
            for (i, of) in of.iter().enumerate() {
                let value = self.warps[w].slots[*of][lane];
                let to = &mut self.ctas[cta].shared.bytes[start + i * each..][..each];
                to.copy_from_slice(&value.to_le_bytes()[..each]);
            }
            let thread = self.warps[w].first + lane;
            let barrier = &mut self.ctas[cta].transactions[number];
            barrier.stored = Some((over, thread, pc as u32));
            barrier.count_bytes(lane, -(bytes as i64))?;
            self.finish_transactions(which);
        }
        Ok(())
    }

    /// Runs `mbarrier.try_wait.parity`, which fails the first time, as if the phase ended later, and then waits for its end.
    pub(super) fn try_wait(
        &mut self,
        w: usize,
        active: u32,
        pc: usize,
        (at, parity, complete): (OperandAddress, RegisterSlot, RegisterSlot),
        acquires: AcquireScope,
    ) -> LaneResult<()> {
        for lane in lanes_of(active) {
            let which @ (cta, number) = self.barrier_at(w, lane, pc, StateSpace::Shared, at)?;
            let parity = self.warps[w].slots[parity][lane];
            if parity > 1 {
                let problem = format!("a parity of {parity}, expected 0 or 1");
                return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            }
            let thread = self.warps[w].first + lane;
            let barrier = &mut self.ctas[cta].transactions[number];
            // The first try of a thread for each phase fails, so that a wait without a loop around it is found.
            let is_over = barrier.is_over(parity);
            let phase = barrier.phases + u32::from(!is_over);
            if barrier.tried.insert((thread, phase)) {
                self.set(w, 1 << lane, complete, &[0; LANES]);
            } else if is_over {
                self.set(w, 1 << lane, complete, &[1; LANES]);
                self.acquire_phase(thread, which, acquires);
            } else {
                barrier.waiting.push(PhaseWaiter { thread, complete, parity, acquires });
                self.warps[w].waiting |= 1 << lane;
            }
        }
        Ok(())
    }

    /// Ends the phase of a barrier that lacks nothing, and lets the threads go on that wait for the end.
    fn finish_transactions(&mut self, which @ (cta, number): BarrierId) {
        let barrier = &mut self.ctas[cta].transactions[number];
        // A phase is over when its arrivals and its bytes are both complete, in whichever order they come.
        if barrier.pending != 0 || barrier.bytes != 0 {
            return;
        }
        // The next phase expects as many arrivals; what this one's arrivals released is kept for those who acquire it.
        barrier.phases += 1;
        barrier.pending = barrier.count;
        let ClockJoin { clocks, phases, .. } = std::mem::take(&mut barrier.meeting);
        barrier.passed = (!clocks.is_empty()).then(|| clocks.into());
        barrier.passed_phases = phases;
        let waiting = std::mem::take(&mut barrier.waiting);
        let (over, still): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|of| barrier.is_over(of.parity));
        barrier.waiting = still;
        for PhaseWaiter { thread, complete, acquires, .. } in over {
            let (w, lane) = self.lane_of(thread);
            self.set(w, 1 << lane, complete, &[1; LANES]);
            self.acquire_phase(thread, which, acquires);
            self.wake(thread);
        }
    }

    /// Lets the thread know what it acquires from the phase that is over.
    fn acquire_phase(&mut self, thread: usize, which @ (cta, number): BarrierId, acquires: AcquireScope) {
        if acquires == AcquireScope::Nothing {
            return;
        }
        let agent = self.agent(which);
        let barrier = &self.ctas[cta].transactions[number];
        let (passed, phases, over) = (barrier.passed.clone(), barrier.passed_phases, barrier.phases + 1);
        let state: &mut ThreadState = &mut self.threads[thread];
        state.phases = state.phases.max(phases);
        // The waiter knows from here on what any of the arrivals released.
        if let Some(passed) = passed {
            let mut meeting = ClockJoin::default();
            meeting.join(&state.known);
            meeting.join(&passed);
            state.known = meeting.clocks.into();
        }
        // At the scope of the cluster the stored bytes become known too: the agent's clock of the phase.
        if acquires == AcquireScope::OfCluster {
            self.learn(thread, agent, over);
        }
    }

    /// Finds an asynchronous store of which no thread of its CTA knew at its exit: the thread that stored, and the instruction.
    pub(super) fn stored_after_exit(&self, cta: usize) -> Option<(usize, u32)> {
        let per_cta = self.threads.len() / self.ctas.len();
        let threads = &self.threads[cta * per_cta..][..per_cta];
        self.ctas[cta].transactions.iter().enumerate().find_map(|(number, barrier)| {
            // A barrier remembers its last store: if no thread of the CTA has learnt of that, the CTA may be gone
            // before the bytes arrive.
            let (clock, thread, at) = barrier.stored?;
            let agent = self.agent((cta, number));
            (!threads.iter().any(|thread| thread.known[agent] >= clock)).then_some((thread, at))
        })
    }

    /// Says what barriers lack for which threads wait.
    pub(super) fn missing_on_barriers(&self) -> Vec<String> {
        let all = (0_u32..).zip(&self.ctas);
        let all = all.flat_map(|(rank, cta)| cta.transactions.iter().map(move |barrier| (rank, barrier)));
        // Only barriers that threads wait for explain a deadlock.
        let waited_for = all.filter(|(_, barrier)| !barrier.waiting.is_empty());
        let told = waited_for.map(|(rank, barrier)| {
            let TransactionBarrier { pending, bytes, phases, .. } = barrier;
            let cta = self.cta_in_grid(self.cluster, rank);
            format!("a barrier of CTA {cta} lacks {pending} arrivals and {bytes} bytes in its phase {phases}")
        });
        told.collect()
    }

    /// Writes bytes of a CTA by a lane; the write becomes known as the agent's, at the agent's clock.
    fn write_as(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (cta, start, bytes): (usize, usize, usize),
        (agent, clock): (usize, u32),
    ) -> LaneResult<()> {
        let thread = self.warps[w].first + lane;
        let ThreadState { clock: own, known, .. } = &self.threads[thread];
        let by = Accessor { cluster: self.cluster, thread: thread as u32, clock: *own, known, at: pc as u32 };
        let written = self.ctas[cta].shared.write_as(start, bytes, &by, (agent as u32, clock));
        written.map_err(|conflict| self.shared_conflict(lane, cta, &conflict))
    }

    /// Notes an operation on a barrier; none of them disturbs another.
    fn use_barrier(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (cta, start, bytes): (usize, usize, usize),
    ) -> LaneResult<()> {
        let thread = self.warps[w].first + lane;
        let ThreadState { clock, known, .. } = &self.threads[thread];
        let by = Accessor { cluster: self.cluster, thread: thread as u32, clock: *clock, known, at: pc as u32 };
        let used = self.ctas[cta].shared.read_and_write(start, bytes, &by);
        used.map_err(|conflict| self.shared_conflict(lane, cta, &conflict))
    }
}

impl TransactionBarrier {
    /// Whether the phase of this parity is over: the one before the current, which has the other.
    fn is_over(&self, parity: u64) -> bool {
        u64::from(self.phases & 1) != parity
    }

    /// Expects so many bytes more.
    fn count_bytes(&mut self, lane: usize, more: i64) -> LaneResult<()> {
        self.bytes += more;
        if self.bytes.abs() <= MOST_COUNTED {
            return Ok(());
        }
        let problem =
            format!("a barrier that expects {} bytes, expected at most {MOST_COUNTED} either way", self.bytes);
        Err(LaneFault { lane, fault: PtxFault::Undefined, problem })
    }
}
