//! Instructions that threads execute together: barriers, shuffles, votes and reductions over a warp.

use std::rc::Rc;

use super::PtxFault;
use super::instruction::{BarrierReduction, DecodedInstruction, PtxOperation, RegisterSlot, ShuffleMode, VoteMode};
use super::run::ClusterMachine;
use super::state::{
    ClockJoin, CtaBarrier, CtaState, LANES, LaneFault, LaneResult, VectorClock, WarpState, lanes_of, lanes_where,
};

/// The number of named barriers that a CTA has.
const BARRIERS: u64 = 16;

impl ClusterMachine<'_> {
    /// Runs an instruction that the lanes of a warp take together, once no lane that must take part is missing.
    pub(super) fn collective(
        &mut self,
        w: usize,
        group: u32,
        active: u32,
        pc: usize,
        action: &PtxOperation,
    ) -> LaneResult<()> {
        if let Some((lane, absent)) = self.missing(w, group, pc) {
            return Err(self.apart(w, lane, absent, group));
        }
        match action {
            PtxOperation::Barrier { id, threads, waits, reduces, .. } => {
                let slots = &self.warps[w].slots;
                let lane = active.trailing_zeros() as usize;
                // Id, thread count and predicate are operands; the first lane's id and count are those of all.
                let id = slots[*id][lane];
                let count = threads.map(|threads| slots[threads][lane]);
                let held = reduces.as_ref().map(|reduces| {
                    let holds = |&lane: &usize| (slots[reduces.of][lane] == 1) != reduces.negated;
                    lanes_of(active).filter(holds).count() as u64
                });
                if id >= BARRIERS || count.is_some_and(|count| count == 0 || !count.is_multiple_of(LANES as u64)) {
                    let problem = format!("barrier {id} for {count:?} threads, expected 0 to 15 and a multiple of 32");
                    return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
                }
                let WarpState { first, cta, .. } = self.warps[w];
                let barrier = self.ctas[cta].barriers.entry(id).or_default();
                if barrier.arrived > 0 && barrier.expected != count {
                    let problem = format!("barrier {id} for {count:?} threads and {:?}", barrier.expected);
                    return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
                }
                // Arrive: each lane adds what it knows, and its next accesses have a later clock.
                barrier.expected = count;
                barrier.held += held.unwrap_or(0);
                for lane in lanes_of(active) {
                    let thread = &mut self.threads[first + lane];
                    barrier.arrived += 1;
                    barrier.meeting.add(&thread.known, first + lane, thread.clock);
                    barrier.meeting.phases = barrier.meeting.phases.max(thread.phases);
                    thread.clock += 1;
                    if *waits {
                        barrier.waiting.push(first + lane);
                        barrier
                            .reduces
                            .extend(reduces.as_ref().map(|reduces| (first + lane, reduces.to, reduces.mode)));
                    }
                }
                if *waits {
                    self.warps[w].waiting |= active;
                }
                self.finish_barrier(cta, id);
            }
            PtxOperation::ClusterArrive { release, .. } => {
                for lane in lanes_of(active) {
                    self.arrive(w, lane, *release)?;
                }
                self.finish_phase();
            }
            PtxOperation::ClusterWait { .. } => {
                for lane in lanes_of(active) {
                    self.wait(w, lane)?;
                }
            }
            PtxOperation::WarpBarrier { members }
            | PtxOperation::Shuffle { members, .. }
            | PtxOperation::Vote { members, .. }
            | PtxOperation::Reduce { members, .. }
            | PtxOperation::Elect { members, .. } => {
                // Lanes that name the same members act together; different masks are different instructions.
                let named = self.warps[w].slots[*members];
                let mut rest = active;
                while rest != 0 {
                    let members = named[rest.trailing_zeros() as usize];
                    let these = lanes_where(rest, |lane| named[lane] == members);
                    rest &= !these;
                    self.run_members(w, these, action)?;
                }
            }
            _ => unreachable!("a collective instruction"),
        }
        Ok(())
    }

    /// Runs an instruction with a member mask for the lanes `active`, which all name the same members.
    fn run_members(&mut self, w: usize, active: u32, action: &PtxOperation) -> LaneResult<()> {
        match action {
            PtxOperation::WarpBarrier { .. } => {
                let first = self.warps[w].first;
                // All members learn what any of them knew.
                let mut meeting = ClockJoin::default();
                for lane in lanes_of(active) {
                    let thread = &self.threads[first + lane];
                    meeting.add(&thread.known, first + lane, thread.clock);
                    meeting.phases = meeting.phases.max(thread.phases);
                }
                let known: VectorClock = meeting.clocks.into();
                for lane in lanes_of(active) {
                    let thread = &mut self.threads[first + lane];
                    thread.known = known.clone();
                    thread.phases = meeting.phases;
                    thread.clock += 1;
                }
            }
            PtxOperation::Shuffle { mode, to, valid, of, by, clamp, .. } => {
                self.shuffle(w, active, *mode, (*to, *valid), (*of, *by, *clamp))?;
            }
            PtxOperation::Vote { mode, to, of, negated, .. } => {
                let values = &self.warps[w].slots[*of];
                // The lanes whose predicate holds, negated or not.
                let held = lanes_where(active, |lane| (values[lane] == 1) != *negated);
                let result = match mode {
                    VoteMode::All => u64::from(held == active),
                    VoteMode::Any => u64::from(held != 0),
                    VoteMode::Uniform => u64::from(held == active || held == 0),
                    VoteMode::Ballot => held.into(),
                };
                self.set(w, active, *to, &[result; LANES]);
            }
            PtxOperation::Reduce { to, of, function, .. } => {
                let values = &self.warps[w].slots[*of];
                let all = lanes_of(active).map(|lane| values[lane]).reduce(|a, b| function(a, b, 0));
                self.set(w, active, *to, &[all.unwrap_or(0); LANES]);
            }
            PtxOperation::Elect { to, elected, .. } => {
                let leader = active.trailing_zeros() as usize;
                let mut leads = [0; LANES];
                leads[leader] = 1;
                self.set(w, active, *elected, &leads);
                if let Some(to) = to {
                    self.set(w, active, *to, &[leader as u64; LANES]);
                }
            }
            _ => unreachable!("an instruction with members"),
        }
        Ok(())
    }

    /// Describes the fault that `absent` does not take part in the instruction of `lane`, and what it does instead.
    fn apart(&self, w: usize, lane: usize, absent: usize, group: u32) -> LaneFault {
        let warp = &self.warps[w];
        let thread = warp.first + absent;
        let thread = thread % (self.threads.len() / self.ctas.len());
        // Four ways to be missing: not in its own mask, exited, guarded off, or at another instruction.
        let problem = if lane == absent {
            "it is not among the members that it names".to_string()
        } else if warp.alive >> absent & 1 == 0 {
            format!("thread {thread} of the warp has exited")
        } else if group >> absent & 1 == 1 {
            format!("thread {thread} of the warp steps over it, or names other members")
        } else {
            let waits = warp.waiting >> absent & 1 == 1;
            let at = warp.pcs[absent] - usize::from(waits);
            let DecodedInstruction { line, name, .. } = &self.kernel.instructions[at];
            format!("thread {thread} of the warp is at line {line} ({name})")
        };
        LaneFault { lane, fault: PtxFault::Divergence, problem }
    }

    /// Completes a barrier of a CTA if all expected threads have arrived: waiting threads go on and know of each other.
    pub(super) fn finish_barrier(&mut self, cta: usize, id: u64) {
        let CtaState { barriers, alive, .. } = &mut self.ctas[cta];
        let complete = |barrier: &CtaBarrier| barrier.arrived >= barrier.expected.unwrap_or(*alive);
        if !barriers.get(&id).is_some_and(complete) {
            return;
        }
        // The waiting threads learn what all arrivals knew; the barrier is then free for its next use.
        let barrier = barriers.remove(&id).expect("it was there");
        let known: VectorClock = barrier.meeting.clocks.into();
        for &thread in &barrier.waiting {
            let state = &mut self.threads[thread];
            state.known = known.clone();
            state.phases = barrier.meeting.phases;
            self.wake(thread);
        }
        // `barrier.red` gives each waiting thread the reduction of the predicates of all that arrived.
        for (thread, to, mode) in barrier.reduces {
            let value = match mode {
                BarrierReduction::Count => barrier.held,
                BarrierReduction::All => u64::from(barrier.held == barrier.arrived),
                BarrierReduction::Any => u64::from(barrier.held > 0),
            };
            let (w, lane) = self.lane_of(thread);
            self.set(w, 1 << lane, to, &[value; LANES]);
        }
    }

    /// Finds the warp and the lane of a thread of the cluster.
    pub(super) fn lane_of(&self, thread: usize) -> (usize, usize) {
        let w = self.warps.partition_point(|warp| warp.first <= thread) - 1;
        (w, thread - self.warps[w].first)
    }

    pub(super) fn wake(&mut self, thread: usize) {
        let (w, lane) = self.lane_of(thread);
        self.warps[w].waiting &= !(1 << lane);
    }

    /// Arrives on the cluster's barrier, and passes on what the thread knows if it releases or has fenced.
    fn arrive(&mut self, w: usize, lane: usize, release: bool) -> LaneResult<()> {
        let index = self.warps[w].first + lane;
        let thread = &mut self.threads[index];
        if thread.arrivals != thread.waits {
            let problem = "it arrives again, and did not wait for the phase on which it arrived".to_string();
            return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
        }
        thread.arrivals += 1;
        self.barrier.arrived += 1;
        // An arrival that releases passes on all that the thread knows; a relaxed one only what it knew at its last fence.
        if release {
            self.barrier.meeting.add(&thread.known, index, thread.clock);
            thread.clock += 1;
        } else if let Some((known, clock)) = &thread.fenced {
            self.barrier.meeting.add(known, index, *clock);
        }
        Ok(())
    }

    fn wait(&mut self, w: usize, lane: usize) -> LaneResult<()> {
        let index = self.warps[w].first + lane;
        let thread = &self.threads[index];
        if thread.arrivals == thread.waits {
            let problem = "it waits for a phase on which it did not arrive: that never ends".to_string();
            return Err(LaneFault { lane, fault: PtxFault::Deadlock, problem });
        }
        if self.barrier.phases >= thread.arrivals {
            self.acquire(index);
        } else {
            self.barrier.waiting.push(index);
            self.warps[w].waiting |= 1 << lane;
        }
        Ok(())
    }

    /// Joins what the last phase of the cluster's barrier passed on into what the thread knows.
    fn acquire(&mut self, index: usize) {
        let thread = &mut self.threads[index];
        let barrier = &mut self.barrier;
        thread.waits += 1;
        thread.phases = thread.phases.max(barrier.phases);
        let Some(passed) = &barrier.passed else { return };
        // Threads of a warp often know the same: the join is computed once for each different knowledge.
        if let Some([_, joined]) = barrier.joined.iter().find(|[known, _]| Rc::ptr_eq(known, &thread.known)) {
            thread.known = joined.clone();
            return;
        }
        let mut meeting = ClockJoin::default();
        meeting.join(&thread.known);
        meeting.join(passed);
        let joined: VectorClock = meeting.clocks.into();
        barrier.joined.push([thread.known.clone(), joined.clone()]);
        thread.known = joined;
    }

    /// Ends the phase of the cluster's barrier if every thread that has not exited has arrived.
    pub(super) fn finish_phase(&mut self) {
        if self.barrier.arrived == 0 || self.barrier.arrived < self.alive {
            return;
        }
        let barrier = &mut self.barrier;
        barrier.phases += 1;
        barrier.arrived = 0;
        let clocks = std::mem::take(&mut barrier.meeting).clocks;
        barrier.passed = (!clocks.is_empty()).then(|| clocks.into());
        barrier.joined.clear();
        for thread in std::mem::take(&mut barrier.waiting) {
            self.acquire(thread);
            self.wake(thread);
        }
    }

    fn shuffle(
        &mut self,
        w: usize,
        active: u32,
        mode: ShuffleMode,
        (to, valid): (RegisterSlot, Option<RegisterSlot>),
        (of, by, clamp): (RegisterSlot, RegisterSlot, RegisterSlot),
    ) -> LaneResult<()> {
        let [of, by, clamp] = [of, by, clamp].map(|slot| self.warps[w].slots[slot]);
        let (mut values, mut valids) = ([0; LANES], [0; LANES]);
        for lane in lanes_of(active) {
            // The manual's formulas: the segment mask in bits 8 to 12 of the clamp operand splits the warp, the lower bits bound
            // the source lane. A lane whose source is out of bounds keeps its own value.
            let (offset, segment) = (by[lane] as usize & 31, clamp[lane] as usize >> 8 & 31);
            let clamp = clamp[lane] as usize & 31;
            let most = lane & segment | clamp & !segment & 31;
            let least = lane & segment;
            let (source, is_valid) = match mode {
                ShuffleMode::Up => (lane.wrapping_sub(offset), lane as isize - offset as isize >= most as isize),
                ShuffleMode::Down => (lane + offset, lane + offset <= most),
                ShuffleMode::Butterfly => (lane ^ offset, lane ^ offset <= most),
                ShuffleMode::Index => (least | offset & !segment & 31, (least | offset & !segment & 31) <= most),
            };
            let source = if is_valid { source } else { lane };
            if active >> source & 1 == 0 {
                let problem = format!("the value of lane {source}, which takes no part");
                return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
            }
            (values[lane], valids[lane]) = (of[source], u64::from(is_valid));
        }
        self.set(w, active, to, &values);
        if let Some(valid) = valid {
            self.set(w, active, valid, &valids);
        }
        Ok(())
    }
}
