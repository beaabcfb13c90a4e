//! The scheduler: runs the threads of each cluster, warp by warp, until all have exited.

use std::collections::{HashMap, VecDeque};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::arithmetic::{approximate, mask};
use super::instruction::{
    DecodedEntry, DecodedInstruction, InitialValue, PtxOperation, PtxSpecialRegister, RegisterSlot,
};
use super::launch::{check, split, volume};
use super::memory::CheckedMemory;
use super::state::{
    ClusterBarrier, CtaState, LANES, LaneFault, LaneResult, LaneValues, ThreadState, VectorClock, WarpState, lanes_of,
    lanes_where,
};
use super::{GlobalArray, GridLaunch, InterpretOptions, PtxFault, PtxInterpretError, ThreadOrder};

/// The distance between global arrays, as a power of two; each begins in the middle of its own range of addresses.
pub(super) const ARRAY_RANGE: u32 = 40;
/// The distance between the shared memories of a cluster's CTAs, as a power of two; range 0 is the thread's own CTA.
pub(super) const PEER_RANGE: u32 = 24;
/// The most instructions that a part of a warp runs before another has its turn, if the order is shuffled.
const LONGEST_TURN: u64 = 64;

/// The state of a run: one cluster, and the global arrays that all clusters share.
pub(super) struct ClusterMachine<'a> {
    pub(super) kernel: &'a DecodedEntry,
    pub(super) launch: &'a GridLaunch,
    pub(super) options: &'a InterpretOptions,
    pub(super) names: &'a [String],
    pub(super) global: &'a mut [CheckedMemory],
    /// The bytes by which each global array begins after the aligned start of its range.
    pub(super) late: &'a [u32],
    pub(super) arguments: &'a [usize],
    pub(super) arrays: Vec<(u32, u32)>,
    pub(super) random: Option<SmallRng>,
    /// The cluster's coordinates in the grid of clusters.
    pub(super) place: [u32; 3],
    pub(super) cluster: u32,
    pub(super) threads: Vec<ThreadState>,
    pub(super) warps: Vec<WarpState>,
    pub(super) ctas: Vec<CtaState>,
    pub(super) barrier: ClusterBarrier,
    pub(super) alive: usize,
    pub(super) work: &'a mut u64,
}

/// Runs one entry, as [`super::PtxModule::run`] describes.
pub(super) fn run(
    kernel: &DecodedEntry,
    launch: &GridLaunch,
    buffers: Vec<GlobalArray>,
    arguments: &[usize],
    options: &InterpretOptions,
) -> Result<Vec<GlobalArray>, PtxInterpretError> {
    check(kernel, launch, &buffers, arguments).map_err(PtxInterpretError::Launch)?;
    // The dynamic array follows the declared ones; what no launch allocates is out of bounds.
    let mut arrays = kernel.arrays.clone();
    arrays.extend(kernel.dynamic.map(|start| (start, start + launch.dynamic_shared)));
    let mut names = Vec::new();
    let mut global = Vec::new();
    let mut not_there = Vec::new();
    let mut late = Vec::new();
    for GlobalArray { name, bytes, unwritten, late: of_buffer } in buffers {
        names.push(name);
        late.push(of_buffer);
        let mut memory = CheckedMemory::written(bytes);
        for bytes in &unwritten {
            memory.forget(bytes.clone());
        }
        global.push(memory);
        not_there.push(unwritten);
    }
    // Clusters share nothing but global memory and run one after another; nothing orders them, so their order may be shuffled.
    let of_clusters = [0, 1, 2].map(|axis| launch.grid[axis] / launch.cluster[axis]);
    let mut clusters: Vec<u32> = (0..volume(of_clusters).unwrap_or(0)).collect();
    let mut random = match options.order {
        ThreadOrder::InSequence => None,
        ThreadOrder::Shuffled(seed) => Some(SmallRng::seed_from_u64(seed)),
    };
    if let Some(random) = &mut random {
        clusters.shuffle(random);
    }
    let mut work = 0;
    for cluster in clusters {
        let mut machine = ClusterMachine {
            kernel,
            launch,
            options,
            names: &names,
            global: &mut global,
            late: &late,
            arguments,
            arrays: arrays.clone(),
            // The generator of random orders goes through all clusters, so that each has another order under one seed.
            random: random.take(),
            place: split(cluster, of_clusters),
            cluster,
            threads: Vec::new(),
            warps: Vec::new(),
            ctas: Vec::new(),
            barrier: ClusterBarrier::default(),
            alive: 0,
            work: &mut work,
        };
        machine.start();
        machine.run()?;
        machine.check_peers()?;
        random = machine.random.take();
        for memory in &mut global {
            memory.end_cluster();
        }
    }
    // An output must have been written whole by the end.
    for (memory, name) in global.iter().zip(&names) {
        if let Some((bytes, first)) = memory.never_written() {
            return Err(PtxInterpretError::Unwritten { buffer: name.clone(), bytes, first });
        }
    }
    let all = global.into_iter().zip(names).zip(not_there.into_iter().zip(late));
    let buffer = |((memory, name), (unwritten, late)): ((CheckedMemory, _), _)| GlobalArray {
        name,
        bytes: memory.bytes,
        unwritten,
        late,
    };
    Ok(all.map(buffer).collect())
}

impl ClusterMachine<'_> {
    /// Creates the threads, the warps and the shared memory of the cluster.
    fn start(&mut self) {
        let GridLaunch { block, cluster, .. } = *self.launch;
        let (per_cta, ctas) = (volume(block).unwrap_or(0) as usize, volume(cluster).unwrap_or(0) as usize);
        let all = per_cta * ctas;
        // A clock has an entry for each thread and for each barrier, which writes the asynchronous stores.
        let nothing: VectorClock = vec![0; all + ctas * self.kernel.barriers_of_a_cta].into();
        let shared = self.arrays.iter().map(|&(_, end)| end).max().unwrap_or(0) as usize;
        self.alive = all;
        for _ in 0..all {
            self.threads.push(ThreadState {
                clock: 1,
                known: nothing.clone(),
                fenced: None,
                phases: 0,
                arrivals: 0,
                waits: 0,
                copies: Vec::new(),
                groups: VecDeque::new(),
            });
        }
        // Each CTA has shared memory that is not yet written, and warps of 32 threads, the last perhaps fewer.
        for cta in 0..ctas {
            self.ctas.push(CtaState {
                shared: CheckedMemory::unwritten(vec![0xA5; shared]),
                barriers: HashMap::new(),
                transactions: Vec::new(),
                alive: per_cta as u64,
                touched: Vec::new(),
            });
            for first in (0..per_cta).step_by(LANES) {
                let lanes = mask((per_cta - first).min(LANES) as u32) as u32;
                // Constants, parameters and special registers are filled in once; registers hold a pattern that is not a likely value.
                let slots = self.kernel.slots.iter().map(|fill| self.filled(*fill, cta as u32, first as u32));
                let slots = slots.collect();
                let written =
                    self.kernel.slots.iter().map(|fill| if *fill == InitialValue::Unwritten { 0 } else { u32::MAX });
                self.warps.push(WarpState {
                    cta,
                    first: cta * per_cta + first,
                    lanes,
                    alive: lanes,
                    waiting: 0,
                    pcs: [0; LANES],
                    slots,
                    written: written.collect(),
                });
            }
        }
    }

    /// Returns the initial value of a slot in each lane of a warp: the one that begins with thread `first` of the CTA `rank`.
    fn filled(&self, fill: InitialValue, rank: u32, first: u32) -> LaneValues {
        let GridLaunch { grid, block, cluster, .. } = *self.launch;
        let in_cluster = split(rank, cluster);
        let warps = volume(block).unwrap_or(0).div_ceil(LANES as u32);
        let special = match fill {
            InitialValue::Unwritten => return [0xA5A5_A5A5_A5A5_A5A5; LANES],
            InitialValue::Value(value) => return [value; LANES],
            InitialValue::Parameter(parameter) => {
                let array = self.arguments[parameter];
                // A pointer leads to the middle of its array's range, so that an offset either way stays recognisable.
                let address = (array as u64 + 1) << ARRAY_RANGE | 1 << (ARRAY_RANGE - 1);
                return [address + u64::from(self.late[array]); LANES];
            }
            InitialValue::Special(special) => special,
        };
        // Special registers, from the coordinates of the thread.
        let mut lanes = [0; LANES];
        for (lane, value) in (0_u32..).zip(&mut lanes) {
            *value = u64::from(match special {
                PtxSpecialRegister::Tid(axis) => split(first + lane, block)[axis],
                PtxSpecialRegister::Ntid(axis) => block[axis],
                PtxSpecialRegister::Ctaid(axis) => self.place[axis] * cluster[axis] + in_cluster[axis],
                PtxSpecialRegister::Nctaid(axis) => grid[axis],
                PtxSpecialRegister::ClusterCtaid(axis) => in_cluster[axis],
                PtxSpecialRegister::ClusterNctaid(axis) => cluster[axis],
                PtxSpecialRegister::ClusterId(axis) => self.place[axis],
                PtxSpecialRegister::Nclusterid(axis) => grid[axis] / cluster[axis],
                PtxSpecialRegister::ClusterCtarank => rank,
                PtxSpecialRegister::ClusterNctarank => volume(cluster).unwrap_or(0),
                PtxSpecialRegister::Laneid => lane,
                PtxSpecialRegister::Warpid => first / LANES as u32,
                PtxSpecialRegister::Nwarpid => warps,
                PtxSpecialRegister::LanesBelow => mask(lane) as u32,
                PtxSpecialRegister::LanesUpTo => mask(lane + 1) as u32,
                PtxSpecialRegister::LanesFrom => !(mask(lane) as u32),
                PtxSpecialRegister::LanesAbove => !(mask(lane + 1) as u32),
                PtxSpecialRegister::LaneBit => 1 << lane,
            });
        }
        lanes
    }

    /// Returns the number of a CTA in the grid, x fastest.
    pub(super) fn cta_in_grid(&self, cluster: u32, rank: u32) -> u32 {
        let GridLaunch { grid, cluster: extents, .. } = *self.launch;
        let place = split(cluster, [0, 1, 2].map(|axis| grid[axis] / extents[axis]));
        let inside = split(rank, extents);
        let [x, y, z] = [0, 1, 2].map(|axis| place[axis] * extents[axis] + inside[axis]);
        x + grid[0] * (y + grid[1] * z)
    }

    /// Returns the CTA in the grid and the thread in that CTA, for a thread of the grid counted by clusters.
    pub(super) fn thread_of(&self, thread: u32) -> (u32, u32) {
        let all = self.agents() as u32;
        let per_cta = (self.threads.len() / self.ctas.len()) as u32;
        let (cluster, inside) = (thread / all, thread % all);
        (self.cta_in_grid(cluster, inside / per_cta), inside % per_cta)
    }

    pub(super) fn fault(&self, thread: usize, at: usize, fault: PtxFault, problem: String) -> PtxInterpretError {
        let DecodedInstruction { line, name, .. } = &self.kernel.instructions[at];
        let (cta, thread) = self.thread_of(self.cluster * self.agents() as u32 + thread as u32);
        PtxInterpretError::Fault { line: *line, name: name.clone(), cta, thread, fault, problem }
    }

    /// Runs all warps until their threads have exited, or until none can go on.
    fn run(&mut self) -> Result<(), PtxInterpretError> {
        let mut order: Vec<usize> = (0..self.warps.len()).collect();
        // Each round gives every warp a turn; a round without progress is a deadlock.
        loop {
            if let Some(random) = &mut self.random {
                order.shuffle(random);
            }
            let mut progress = false;
            for &warp in &order {
                progress |= self.run_warp(warp)?;
            }
            if self.warps.iter().all(|warp| warp.alive == 0) {
                return Ok(());
            }
            if !progress {
                return Err(self.deadlock());
            }
        }
    }

    /// Runs a warp until it waits, or for one turn if the order is shuffled, and returns whether it ran at all.
    fn run_warp(&mut self, w: usize) -> Result<bool, PtxInterpretError> {
        let mut progress = false;
        while let Some((group, at)) = self.next_group(w) {
            progress = true;
            // Shuffled, only some of the lanes go on, and for a limited turn: threads of a warp need not stay together.
            let (group, most) = match &mut self.random {
                Some(random) if !self.kernel.instructions[at].action.is_collective() => {
                    let some = group & random.random::<u32>();
                    (if some == 0 { group } else { some }, random.random_range(1..=LONGEST_TURN))
                }
                Some(_) => (group, 1),
                None => (group, u64::MAX),
            };
            self.run_group(w, group, at, most)?;
            if self.random.is_some() {
                break;
            }
        }
        Ok(progress)
    }

    /// Chooses the lanes to run next, all at one instruction. Instructions that are not collective go first: the lowest, or
    /// any if the order is shuffled. Else it is a collective instruction for which no lane is missing.
    fn next_group(&mut self, w: usize) -> Option<(u32, usize)> {
        let warp = &self.warps[w];
        // Lanes that can go on, in groups by their instruction.
        let mut rest = warp.alive & !warp.waiting;
        let (mut alone, mut collective) = (Vec::new(), Vec::new());
        while rest != 0 {
            let at = warp.pcs[rest.trailing_zeros() as usize];
            let group = lanes_where(rest, |lane| warp.pcs[lane] == at);
            rest &= !group;
            let groups = if self.kernel.instructions[at].action.is_collective() { &mut collective } else { &mut alone };
            groups.push((group, at));
        }
        let first = alone.iter().min_by_key(|&&(_, at)| at).copied();
        if first.is_some() {
            return match &mut self.random {
                Some(random) => Some(alone[random.random_range(0..alone.len())]),
                None => first,
            };
        }
        // Only collective instructions are left: the first for which every lane that must take part has come.
        collective.sort_by_key(|&(_, at)| at);
        let absent = |&(group, at): &(u32, usize)| self.missing(w, group, at).map(|(_, absent)| absent);
        let complete = collective.iter().find(|group| absent(group).is_none());
        // A missing lane that waits at a barrier may still come; one that does not wait has taken another path. Then the
        // group runs, and reports the missing lane.
        let never = |group: &&(u32, usize)| absent(group).is_some_and(|lane| warp.waiting >> lane & 1 == 0);
        complete.or_else(|| collective.iter().find(never)).copied()
    }

    /// Returns the lanes of `group` for which the guard of the instruction holds.
    fn guarded(&self, w: usize, group: u32, at: usize) -> u32 {
        match self.kernel.instructions[at].guard {
            None => group,
            Some((slot, negated)) => {
                let lanes = &self.warps[w].slots[slot];
                lanes_where(group, |lane| (lanes[lane] == 1) != negated)
            }
        }
    }

    /// Finds a lane of `group` and another that it needs for a collective instruction and that does not take part.
    pub(super) fn missing(&self, w: usize, group: u32, at: usize) -> Option<(usize, usize)> {
        let warp = &self.warps[w];
        let active = self.guarded(w, group, at);
        let first = active.trailing_zeros() as usize;
        let absent = warp.lanes & !active;
        if active == 0 {
            return None;
        }
        match &self.kernel.instructions[at].action {
            PtxOperation::Barrier { aligned: true, .. }
            | PtxOperation::ClusterArrive { aligned: true, .. }
            | PtxOperation::ClusterWait { aligned: true } => {
                (absent != 0).then(|| (first, absent.trailing_zeros() as usize))
            }
            PtxOperation::WarpBarrier { members }
            | PtxOperation::Shuffle { members, .. }
            | PtxOperation::Vote { members, .. }
            | PtxOperation::Reduce { members, .. }
            | PtxOperation::Elect { members, .. } => {
                let members = &warp.slots[*members];
                // A lane names itself, and those it names do the same at once but for those who exited.
                lanes_of(active).find_map(|lane| {
                    let needed = members[lane] as u32 & warp.alive | 1 << lane;
                    let with = lanes_where(active, |other| members[other] == members[lane]) & members[lane] as u32;
                    (needed & !with != 0).then(|| (lane, (needed & !with).trailing_zeros() as usize))
                })
            }
            _ => None,
        }
    }

    /// Runs the lanes of `group` from instruction `at` on while they stay together, for at most `most` instructions.
    fn run_group(&mut self, w: usize, group: u32, at: usize, most: u64) -> Result<(), PtxInterpretError> {
        let kernel = self.kernel;
        let warp = &self.warps[w];
        // In sequence, a group stops where it meets others of the warp, so that they go on together.
        let others = warp.alive & !warp.waiting & !group;
        let join = if self.random.is_none() { lanes_of(others).map(|lane| warp.pcs[lane]).min() } else { None };
        let mut pc = at;
        for _ in 0..most {
            // Work is bounded: a kernel that does not end is an error, not a hang.
            *self.work += 1;
            if *self.work > self.options.most_work {
                return Err(PtxInterpretError::Endless { most: self.options.most_work });
            }
            let instruction = &kernel.instructions[pc];
            // A fault is reported with the line and the thread of the lane that has it.
            let done = self.step(w, group, pc, instruction);
            let next = done.map_err(|LaneFault { lane, fault, problem }| {
                self.fault(self.warps[w].first + lane, pc, fault, problem)
            })?;
            let Some(next) = next else { return Ok(()) };
            pc = next;
            if instruction.action.is_collective()
                || kernel.instructions[pc].action.is_collective()
                || join.is_some_and(|join| pc >= join)
            {
                break;
            }
        }
        for lane in lanes_of(group) {
            self.warps[w].pcs[lane] = pc;
        }
        Ok(())
    }

    /// Runs one instruction for the lanes of `group`, and returns their next one, or None if they part or wait.
    fn step(&mut self, w: usize, group: u32, pc: usize, instruction: &DecodedInstruction) -> LaneResult<Option<usize>> {
        // The guard is read by every lane, the sources only where it holds.
        if let Some((guard, _)) = instruction.guard {
            self.check_written(w, group, guard)?;
        }
        let active = self.guarded(w, group, pc);
        if active != 0 {
            for &slot in &instruction.sources {
                self.check_written(w, active, slot)?;
            }
        }
        match &instruction.action {
            PtxOperation::Branch { to, uniform } => {
                if active == group {
                    return Ok(Some(*to));
                }
                if active == 0 {
                    return Ok(Some(pc + 1));
                }
                // In a shuffled order, threads may be at one instruction in different iterations of a loop.
                if *uniform && self.random.is_none() {
                    let lane = (group & !active).trailing_zeros() as usize;
                    let problem = "some threads of the warp take the branch and this does not".to_string();
                    return Err(LaneFault { lane, fault: PtxFault::Divergence, problem });
                }
                self.set_pcs(w, active, *to);
                self.set_pcs(w, group & !active, pc + 1);
                Ok(None)
            }
            _ if active == 0 => Ok(Some(pc + 1)),
            PtxOperation::Exit => {
                self.set_pcs(w, group, pc + 1);
                self.exit(w, active)?;
                Ok(None)
            }
            // Each lane's wait may end at another time: the lanes do not stay together.
            PtxOperation::TryWait { complete, at, parity, acquires } => {
                self.set_pcs(w, group, pc + 1);
                self.try_wait(w, active, pc, (*at, *parity, *complete), *acquires)?;
                Ok(None)
            }
            action if action.is_collective() => {
                self.set_pcs(w, group, pc + 1);
                self.collective(w, group, active, pc, action)?;
                Ok(None)
            }
            action => {
                self.act(w, active, pc, action)?;
                Ok(Some(pc + 1))
            }
        }
    }

    fn set_pcs(&mut self, w: usize, lanes: u32, pc: usize) {
        for lane in lanes_of(lanes) {
            self.warps[w].pcs[lane] = pc;
        }
    }

    fn check_written(&self, w: usize, active: u32, slot: RegisterSlot) -> LaneResult<()> {
        let unwritten = active & !self.warps[w].written[slot];
        if unwritten == 0 {
            return Ok(());
        }
        let problem = "a register that it reads was never written".to_string();
        Err(LaneFault { lane: unwritten.trailing_zeros() as usize, fault: PtxFault::Uninitialised, problem })
    }

    pub(super) fn set(&mut self, w: usize, active: u32, slot: RegisterSlot, values: &LaneValues) {
        let warp = &mut self.warps[w];
        if active == u32::MAX {
            warp.slots[slot] = *values;
        } else {
            for lane in lanes_of(active) {
                warp.slots[slot][lane] = values[lane];
            }
        }
        warp.written[slot] |= active;
    }

    /// Applies `function` to three slots, lane by lane.
    pub(super) fn map(
        &self,
        w: usize,
        active: u32,
        of: [RegisterSlot; 3],
        function: impl Fn(u64, u64, u64) -> u64,
    ) -> LaneValues {
        let [a, b, c] = of.map(|slot| &self.warps[w].slots[slot]);
        let mut values = [0; LANES];
        for lane in lanes_of(active) {
            values[lane] = function(a[lane], b[lane], c[lane]);
        }
        values
    }

    fn act(&mut self, w: usize, active: u32, pc: usize, action: &PtxOperation) -> LaneResult<()> {
        match action {
            PtxOperation::Compute { to, of, function } => {
                let values = self.map(w, active, *of, function);
                self.set(w, active, *to, &values);
            }
            PtxOperation::Approximate { to, of: [a, b], function, ftz } => {
                let units = self.options.units;
                let values = self.map(w, active, [*a, *b, *b], |a, b, _| approximate(*function, units, *ftz, a, b));
                self.set(w, active, *to, &values);
            }
            PtxOperation::Compare { to, of, function } => {
                let both = self.map(w, active, *of, |a, b, c| {
                    let [first, second] = function(a, b, c);
                    u64::from(first) | u64::from(second) << 1
                });
                for (i, to) in to.iter().enumerate() {
                    if let Some(to) = to {
                        self.set(w, active, *to, &both.map(|both| both >> i & 1));
                    }
                }
            }
            PtxOperation::Split { to, of, bits } => {
                let whole = self.warps[w].slots[*of];
                for (i, to) in (0_u32..).zip(to) {
                    if let Some(to) = to {
                        self.set(w, active, *to, &whole.map(|whole| whole >> (i * bits) & mask(*bits)));
                    }
                }
            }
            PtxOperation::Join { to, of, bits } => {
                let mut values = [0; LANES];
                for (i, slot) in (0_u32..).zip(of) {
                    for (value, part) in values.iter_mut().zip(&self.warps[w].slots[*slot]) {
                        *value |= part << (i * bits);
                    }
                }
                self.set(w, active, *to, &values);
            }
            PtxOperation::Map { to, address, rank } => {
                // The peer's range of the window: rank + 1 in the upper bits, over an address of the own CTA.
                let ctas = self.ctas.len() as u64;
                let of = [*address, *rank, *rank];
                let beyond =
                    self.map(w, active, of, |address, rank, _| u64::from(address >> PEER_RANGE != 0 || rank >= ctas));
                if let Some(lane) = lanes_of(active).find(|&lane| beyond[lane] == 1) {
                    let rank = self.warps[w].slots[*rank][lane];
                    let problem = format!("rank {rank} of {ctas} CTAs, or an address that is not of one's own");
                    return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
                }
                let values = self.map(w, active, of, |address, rank, _| (rank + 1) << PEER_RANGE | address);
                self.set(w, active, *to, &values);
            }
            PtxOperation::Load { .. } => self.load(w, active, pc, action)?,
            PtxOperation::Store { space, to, bytes, of } => {
                self.store(w, active, pc, (*space, *to), *bytes as usize, of)?;
            }
            PtxOperation::Atomic { space, at, ty, operation, to, of } => {
                for lane in lanes_of(active) {
                    self.atomic(w, lane, pc, (*space, *at), (*ty, *operation), *to, *of)?;
                }
            }
            PtxOperation::Copy { to, from, bytes, read, ignore } => {
                for lane in lanes_of(active) {
                    // A size operand or a predicate may reduce the bytes read; the rest of the target becomes 0.
                    let slots = &self.warps[w].slots;
                    let whole = u64::from(*bytes);
                    let count = read.map_or(whole, |read| slots[read][lane]);
                    let count = if ignore.is_some_and(|ignore| slots[ignore][lane] == 1) { 0 } else { count };
                    if count > whole {
                        let problem = format!("{count} bytes to be read for {whole}");
                        return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
                    }
                    self.copy(w, lane, pc, (*from, count as usize), (*to, whole as usize))?;
                }
            }
            PtxOperation::CommitCopies => self.commit_copies(w, active),
            PtxOperation::WaitCopies(groups) => self.finish_copies(w, active, pc, *groups),
            PtxOperation::WaitAllCopies => {
                self.commit_copies(w, active);
                self.finish_copies(w, active, pc, 0);
            }
            PtxOperation::StoreAsync { .. }
            | PtxOperation::InitialiseBarrier { .. }
            | PtxOperation::ArriveAtBarrier { .. }
            | PtxOperation::FenceInitialised => self.act_on_barrier(w, active, pc, action)?,
            // A fence keeps what the thread knows now, which a later relaxed arrival passes on.
            PtxOperation::Fence { beyond_cta } => {
                for lane in lanes_of(active).filter(|_| *beyond_cta) {
                    let thread = &mut self.threads[self.warps[w].first + lane];
                    thread.fenced = Some((thread.known.clone(), thread.clock));
                    thread.clock += 1;
                }
            }
            PtxOperation::ActiveMask { to } => self.set(w, active, *to, &[active.into(); LANES]),
            PtxOperation::Nothing => {}
            _ => unreachable!("a branch, an exit or a collective instruction"),
        }
        Ok(())
    }

    fn exit(&mut self, w: usize, lanes: u32) -> LaneResult<()> {
        let WarpState { first, cta, .. } = self.warps[w];
        for lane in lanes_of(lanes) {
            let thread = &self.threads[first + lane];
            if !thread.copies.is_empty() || thread.groups.iter().any(|group| !group.is_empty()) {
                let problem = "it exits, and a cp.async that it issued was not waited for".to_string();
                return Err(LaneFault { lane, fault: PtxFault::NotCopied, problem });
            }
        }
        // The exit is visible to barriers of the CTA and of the cluster, which wait for threads that have not exited.
        self.warps[w].alive &= !lanes;
        self.ctas[cta].alive -= u64::from(lanes.count_ones());
        self.alive -= lanes.count_ones() as usize;
        // A thread that has exited is not expected on the cluster's barrier, and its arrival no longer counts.
        let came = lanes_where(lanes, |lane| self.threads[first + lane].arrivals > self.barrier.phases);
        self.barrier.arrived -= came.count_ones() as usize;
        // Threads that waited only for these go on.
        let ids: Vec<u64> = self.ctas[cta].barriers.keys().copied().collect();
        for id in ids {
            self.finish_barrier(cta, id);
        }
        self.finish_phase();
        Ok(())
    }

    /// Describes a deadlock: how many threads wait at which instruction, and what their barriers lack.
    fn deadlock(&self) -> PtxInterpretError {
        // The instruction at which a thread is; one that waits has its counter behind it already.
        let at = |thread: usize| {
            let (w, lane) = self.lane_of(thread);
            let warp = &self.warps[w];
            (warp.alive >> lane & 1 == 1).then(|| warp.pcs[lane] - (warp.waiting >> lane & 1) as usize)
        };
        let all: Vec<(usize, usize)> = (0..self.threads.len()).filter_map(|t| Some((t, at(t)?))).collect();
        let mut places: Vec<usize> = all.iter().map(|&(_, pc)| pc).collect();
        places.sort_unstable();
        places.dedup();
        let told = places.iter().map(|&place| {
            let here: Vec<usize> = all.iter().filter(|&&(_, pc)| pc == place).map(|&(thread, _)| thread).collect();
            let first = self.cluster * self.agents() as u32 + here[0] as u32;
            let (cta, thread) = self.thread_of(first);
            let DecodedInstruction { line, name, .. } = &self.kernel.instructions[place];
            format!("{} threads wait at line {line} ({name}), the first CTA {cta}, thread {thread}", here.len())
        });
        let told: Vec<String> = told.chain(self.missing_on_barriers()).collect();
        let exited = self.threads.len() - all.len();
        let problem = format!("{}; {exited} threads have exited", told.join("; "));
        self.fault(all[0].0, all[0].1, PtxFault::Deadlock, problem)
    }

    /// Checks that no CTA could have exited before a peer touched its memory: some thread of it knew of the touch at its exit.
    fn check_peers(&self) -> Result<(), PtxInterpretError> {
        // A CTA's shared memory ends with its last thread. A touch by a peer is safe if some thread of the CTA had learnt of it
        // before it exited.
        let per_cta = self.threads.len() / self.ctas.len();
        for (rank, cta) in self.ctas.iter().enumerate() {
            if let Some((thread, at)) = self.stored_after_exit(rank) {
                let cta = self.cta_in_grid(self.cluster, rank as u32);
                let problem = format!("nothing keeps CTA {cta} from exiting before these bytes are stored");
                return Err(self.fault(thread, at as usize, PtxFault::PeerExited, problem));
            }
            for (toucher, &(clock, at)) in cta.touched.iter().enumerate().filter(|(_, (clock, _))| *clock > 0) {
                let threads = &self.threads[rank * per_cta..][..per_cta];
                if !threads.iter().any(|thread| thread.known[toucher] >= clock) {
                    let cta = self.cta_in_grid(self.cluster, rank as u32);
                    let problem = format!("nothing keeps CTA {cta} from exiting before this");
                    return Err(self.fault(toucher, at as usize, PtxFault::PeerExited, problem));
                }
            }
        }
        Ok(())
    }
}
