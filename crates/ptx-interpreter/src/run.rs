//! Runs the threads of a cluster.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::arithmetic::{Rounded, approximate, mask, round_once, whole, widened};
use super::decode::{
    Action, Address, Atomic, BarrierReduction, Fill, Instruction, Kernel, Shuffle, Slot, Space, Special, Vote,
};
use super::memory::{Conflict, Memory, Toucher, UNDER_WAY};
use super::types::{Float, Type};
use super::{Buffer, Fault, InterpretError, Launch, Options, Order};

/// Threads of a warp.
const LANES: usize = 32;
/// How far apart global arrays begin, as a power of two; each begins in the middle of its own range.
const ARRAY_RANGE: u32 = 40;
/// How far apart the shared memories of a cluster lie in its window, as a power of two; 0 is one's own.
const PEER_RANGE: u32 = 24;
/// Instructions that a part of a warp takes at most before another has its turn, where the order is shuffled.
const LONGEST_TURN: u64 = 64;
/// Barriers of a CTA.
const BARRIERS: u64 = 16;

type Lanes = [u64; LANES];

/// What a thread did wrong, before it is known where.
struct Wrong {
    lane: usize,
    fault: Fault,
    problem: String,
}

type Ran<T> = Result<T, Wrong>;

/// What threads know once all have come together.
#[derive(Clone, Default)]
struct Meeting {
    clocks: Vec<u32>,
    /// Knowledge that is in `clocks` already.
    met: Vec<Rc<[u32]>>,
    phases: u32,
}

impl Meeting {
    fn add(&mut self, known: &Rc<[u32]>, thread: usize, clock: u32) {
        self.join(known);
        self.clocks[thread] = self.clocks[thread].max(clock);
    }

    fn join(&mut self, known: &Rc<[u32]>) {
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
struct Copying {
    array: usize,
    from: usize,
    read: usize,
    to: usize,
    written: usize,
}

struct Thread {
    clock: u32,
    known: Rc<[u32]>,
    /// What a relaxed arrival passes on: what was known at the last fence.
    fenced: Option<(Rc<[u32]>, u32)>,
    /// Phases of the cluster's barrier that it knows to be over.
    phases: u32,
    arrivals: u32,
    waits: u32,
    copies: Vec<Copying>,
    groups: VecDeque<Vec<Copying>>,
}

struct Warp {
    cta: usize,
    /// The thread of lane 0, in the cluster.
    first: usize,
    /// Lanes that there are, that have not exited, that wait.
    lanes: u32,
    alive: u32,
    waiting: u32,
    pcs: [usize; LANES],
    slots: Vec<Lanes>,
    /// Of each slot, the lanes that hold something.
    written: Vec<u32>,
}

/// A barrier of a CTA on which some have arrived.
#[derive(Default)]
struct Barrier {
    /// None where all threads take part.
    expected: Option<u64>,
    arrived: u64,
    waiting: Vec<usize>,
    meeting: Meeting,
    /// Threads whose predicate held.
    held: u64,
    reduces: Vec<(usize, Slot, BarrierReduction)>,
}

struct Cta {
    shared: Memory,
    barriers: HashMap<u64, Barrier>,
    alive: u64,
    /// Of each thread of the cluster, the clock and the instruction of its last touch of this CTA's memory as a peer.
    touched: Vec<(u32, u32)>,
}

#[derive(Default)]
struct ClusterBarrier {
    arrived: usize,
    waiting: Vec<usize>,
    /// Phases that are over.
    phases: u32,
    meeting: Meeting,
    /// What the last phase passed on.
    passed: Option<Rc<[u32]>>,
    /// What it came to with what threads knew themselves.
    joined: Vec<(Rc<[u32]>, Rc<[u32]>)>,
}

struct Machine<'a> {
    kernel: &'a Kernel,
    launch: &'a Launch,
    options: &'a Options,
    names: &'a [String],
    global: &'a mut [Memory],
    arguments: &'a [usize],
    arrays: Vec<(u32, u32)>,
    random: Option<SmallRng>,
    /// The cluster's place in the grid of clusters, and as a number.
    place: [u32; 3],
    cluster: u32,
    threads: Vec<Thread>,
    warps: Vec<Warp>,
    ctas: Vec<Cta>,
    barrier: ClusterBarrier,
    alive: usize,
    work: &'a mut u64,
}

fn volume(extents: [u32; 3]) -> Option<u32> {
    let [x, y, z] = extents;
    x.checked_mul(y)?.checked_mul(z).filter(|&volume| volume > 0)
}

fn split(index: u32, extents: [u32; 3]) -> [u32; 3] {
    [index % extents[0], index / extents[0] % extents[1], index / extents[0] / extents[1]]
}

fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

/// What is wrong with the launch, or with the buffers.
fn check(kernel: &Kernel, launch: &Launch, buffers: &[Buffer], arguments: &[usize]) -> Result<(), String> {
    let Launch { grid, block, cluster, dynamic_shared } = *launch;
    let threads = volume(block).filter(|&threads| threads <= 1024);
    let Some(threads) = threads else {
        return Err(format!("a block of {block:?} threads, expected 1 to 1024"));
    };
    if kernel.limits.block.is_some_and(|expected| expected != block) {
        return Err(format!(
            "a block of {block:?} threads, and .reqntid says {:?}",
            kernel.limits.block.unwrap_or_default()
        ));
    }
    if kernel.limits.most_threads.is_some_and(|most| threads > most) {
        return Err(format!("a block of {threads} threads, more than .maxntid says"));
    }
    let expected = kernel.limits.cluster.unwrap_or([1, 1, 1]);
    if cluster != expected {
        return Err(format!("clusters of {cluster:?}, and .reqnctapercluster says {expected:?}"));
    }
    let whole = (0..3).all(|axis| cluster[axis] > 0 && grid[axis].is_multiple_of(cluster[axis]));
    let all = volume(grid).and_then(|ctas| ctas.checked_mul(threads)).filter(|&all| all < u32::MAX - 1);
    if !whole || all.is_none() || volume(cluster).is_none_or(|ctas| ctas > 16) {
        return Err(format!("a grid of {grid:?} CTAs in clusters of {cluster:?}, expected whole clusters of 1 to 16"));
    }
    match kernel.dynamic {
        None if dynamic_shared > 0 => {
            return Err(format!("{dynamic_shared} bytes of dynamic shared memory, and no array that takes them"));
        }
        Some(start) if start.checked_add(dynamic_shared).is_none_or(|end| end >= super::decode::MOST_SHARED) => {
            return Err(format!("{dynamic_shared} bytes of dynamic shared memory are too many"));
        }
        _ => {}
    }
    if arguments.len() != kernel.parameters.len() {
        let takes = kernel.parameters.join(", ");
        return Err(format!("{} arguments, and {} takes {takes}", arguments.len(), kernel.name));
    }
    match arguments.iter().find(|&&buffer| buffer >= buffers.len()) {
        Some(buffer) => Err(format!("argument {buffer} of {} buffers", buffers.len())),
        None => Ok(()),
    }
}

/// [`super::Module::run`] of one entry.
pub(super) fn run(
    kernel: &Kernel,
    launch: &Launch,
    buffers: Vec<Buffer>,
    arguments: &[usize],
    options: &Options,
) -> Result<Vec<Buffer>, InterpretError> {
    check(kernel, launch, &buffers, arguments).map_err(InterpretError::Launch)?;
    let mut arrays = kernel.arrays.clone();
    arrays.extend(kernel.dynamic.map(|start| (start, start + launch.dynamic_shared)));
    let mut names = Vec::new();
    let mut outputs = Vec::new();
    let mut global = Vec::new();
    for Buffer { name, bytes, is_output } in buffers {
        names.push(name);
        outputs.push(is_output);
        global.push(if is_output { Memory::unwritten(bytes) } else { Memory::written(bytes) });
    }
    let of_clusters = [0, 1, 2].map(|axis| launch.grid[axis] / launch.cluster[axis]);
    let mut clusters: Vec<u32> = (0..volume(of_clusters).unwrap_or(0)).collect();
    let mut random = match options.order {
        Order::InSequence => None,
        Order::Shuffled(seed) => Some(SmallRng::seed_from_u64(seed)),
    };
    if let Some(random) = &mut random {
        clusters.shuffle(random);
    }
    let mut work = 0;
    for cluster in clusters {
        let mut machine = Machine {
            kernel,
            launch,
            options,
            names: &names,
            global: &mut global,
            arguments,
            arrays: arrays.clone(),
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
    for ((memory, name), is_output) in global.iter().zip(&names).zip(&outputs) {
        if let Some((bytes, first)) = memory.never_written().filter(|_| *is_output) {
            return Err(InterpretError::Unwritten { buffer: name.clone(), bytes, first });
        }
    }
    let all = global.into_iter().zip(names).zip(outputs);
    Ok(all.map(|((memory, name), is_output)| Buffer { name, bytes: memory.bytes, is_output }).collect())
}

impl Machine<'_> {
    /// Threads, warps and memory of the cluster.
    fn start(&mut self) {
        let Launch { block, cluster, .. } = *self.launch;
        let (per_cta, ctas) = (volume(block).unwrap_or(0) as usize, volume(cluster).unwrap_or(0) as usize);
        let all = per_cta * ctas;
        let nothing: Rc<[u32]> = vec![0; all].into();
        let shared = self.arrays.iter().map(|&(_, end)| end).max().unwrap_or(0) as usize;
        self.alive = all;
        for _ in 0..all {
            self.threads.push(Thread {
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
        for cta in 0..ctas {
            self.ctas.push(Cta {
                shared: Memory::unwritten(vec![0xA5; shared]),
                barriers: HashMap::new(),
                alive: per_cta as u64,
                touched: Vec::new(),
            });
            for first in (0..per_cta).step_by(LANES) {
                let lanes = mask((per_cta - first).min(LANES) as u32) as u32;
                let slots = self.kernel.slots.iter().map(|fill| self.filled(*fill, cta as u32, first as u32));
                let slots = slots.collect();
                let written = self.kernel.slots.iter().map(|fill| if *fill == Fill::Unwritten { 0 } else { u32::MAX });
                self.warps.push(Warp {
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

    /// What a slot holds in the lanes of the warp whose first thread is `first` of a CTA of this rank.
    fn filled(&self, fill: Fill, rank: u32, first: u32) -> Lanes {
        let Launch { grid, block, cluster, .. } = *self.launch;
        let in_cluster = split(rank, cluster);
        let warps = volume(block).unwrap_or(0).div_ceil(LANES as u32);
        let special = match fill {
            Fill::Unwritten => return [0xA5A5_A5A5_A5A5_A5A5; LANES],
            Fill::Value(value) => return [value; LANES],
            Fill::Parameter(parameter) => {
                let address = (self.arguments[parameter] as u64 + 1) << ARRAY_RANGE | 1 << (ARRAY_RANGE - 1);
                return [address; LANES];
            }
            Fill::Special(special) => special,
        };
        let mut lanes = [0; LANES];
        for (lane, value) in (0_u32..).zip(&mut lanes) {
            *value = u64::from(match special {
                Special::Tid(axis) => split(first + lane, block)[axis],
                Special::Ntid(axis) => block[axis],
                Special::Ctaid(axis) => self.place[axis] * cluster[axis] + in_cluster[axis],
                Special::Nctaid(axis) => grid[axis],
                Special::ClusterCtaid(axis) => in_cluster[axis],
                Special::ClusterNctaid(axis) => cluster[axis],
                Special::ClusterId(axis) => self.place[axis],
                Special::Nclusterid(axis) => grid[axis] / cluster[axis],
                Special::ClusterCtarank => rank,
                Special::ClusterNctarank => volume(cluster).unwrap_or(0),
                Special::Laneid => lane,
                Special::Warpid => first / LANES as u32,
                Special::Nwarpid => warps,
                Special::LanesBelow => mask(lane) as u32,
                Special::LanesUpTo => mask(lane + 1) as u32,
                Special::LanesFrom => !(mask(lane) as u32),
                Special::LanesAbove => !(mask(lane + 1) as u32),
                Special::LaneBit => 1 << lane,
            });
        }
        lanes
    }

    /// The CTA's place in the grid, as a number.
    fn cta_in_grid(&self, cluster: u32, rank: u32) -> u32 {
        let Launch { grid, cluster: extents, .. } = *self.launch;
        let place = split(cluster, [0, 1, 2].map(|axis| grid[axis] / extents[axis]));
        let inside = split(rank, extents);
        let [x, y, z] = [0, 1, 2].map(|axis| place[axis] * extents[axis] + inside[axis]);
        x + grid[0] * (y + grid[1] * z)
    }

    /// CTA in the grid and thread in the CTA, of a thread of the grid counted by clusters.
    fn thread_of(&self, thread: u32) -> (u32, u32) {
        let all = self.threads.len() as u32;
        let per_cta = all / self.ctas.len() as u32;
        let (cluster, inside) = (thread / all, thread % all);
        (self.cta_in_grid(cluster, inside / per_cta), inside % per_cta)
    }

    fn fault(&self, thread: usize, at: usize, fault: Fault, problem: String) -> InterpretError {
        let Instruction { line, name, .. } = &self.kernel.instructions[at];
        let (cta, thread) = self.thread_of(self.cluster * self.threads.len() as u32 + thread as u32);
        InterpretError::Fault { line: *line, name: name.clone(), cta, thread, fault, problem }
    }

    /// All warps to their end.
    fn run(&mut self) -> Result<(), InterpretError> {
        let mut order: Vec<usize> = (0..self.warps.len()).collect();
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

    /// Whether anything was done: in sequence, until the warp waits; shuffled, one turn.
    fn run_warp(&mut self, w: usize) -> Result<bool, InterpretError> {
        let mut progress = false;
        while let Some((group, at)) = self.next_group(w) {
            progress = true;
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

    /// Lanes that stand at one instruction, the first that is no collective one if there is, or a collective one for
    /// which nobody is missing.
    fn next_group(&self, w: usize) -> Option<(u32, usize)> {
        let warp = &self.warps[w];
        let mut rest = warp.alive & !warp.waiting;
        let mut collective = Vec::new();
        let mut best: Option<(u32, usize)> = None;
        while rest != 0 {
            let at = warp.pcs[rest.trailing_zeros() as usize];
            let group = lanes_of(rest).filter(|&lane| warp.pcs[lane] == at).fold(0, |group, lane| group | 1 << lane);
            rest &= !group;
            if self.kernel.instructions[at].action.is_collective() {
                collective.push((group, at));
            } else if best.is_none_or(|(_, best)| at < best) {
                best = Some((group, at));
            }
        }
        if best.is_some() {
            return best;
        }
        let complete = |&&(group, at): &&(u32, usize)| self.missing(w, group, at).is_none();
        collective.sort_by_key(|&(_, at)| at);
        collective.iter().find(complete).or(collective.first()).copied()
    }

    /// The lanes of `group` for which the guard holds.
    fn guarded(&self, w: usize, group: u32, at: usize) -> u32 {
        match self.kernel.instructions[at].guard {
            None => group,
            Some((slot, negated)) => {
                let lanes = &self.warps[w].slots[slot];
                lanes_of(group).filter(|&lane| (lanes[lane] == 1) != negated).fold(0, |all, lane| all | 1 << lane)
            }
        }
    }

    /// A lane that takes no part in a collective instruction of `group`, though one that does needs it.
    fn missing(&self, w: usize, group: u32, at: usize) -> Option<(usize, usize)> {
        let warp = &self.warps[w];
        let active = self.guarded(w, group, at);
        let first = active.trailing_zeros() as usize;
        let absent = warp.lanes & !active;
        if active == 0 {
            return None;
        }
        match &self.kernel.instructions[at].action {
            Action::Barrier { aligned: true, .. }
            | Action::ClusterArrive { aligned: true, .. }
            | Action::ClusterWait { aligned: true } => (absent != 0).then(|| (first, absent.trailing_zeros() as usize)),
            Action::WarpBarrier { members }
            | Action::Shuffle { members, .. }
            | Action::Vote { members, .. }
            | Action::Reduce { members, .. }
            | Action::Elect { members, .. } => {
                let members = &warp.slots[*members];
                // A lane names itself, and those it names do the same at once but for those who exited.
                lanes_of(active).find_map(|lane| {
                    let needed = members[lane] as u32 & warp.alive | 1 << lane;
                    let with = lanes_of(active).filter(|&other| members[other] == members[lane]);
                    let with = with.fold(0, |with, lane| with | 1 << lane) & members[lane] as u32;
                    (needed & !with != 0).then(|| (lane, (needed & !with).trailing_zeros() as usize))
                })
            }
            _ => None,
        }
    }

    /// The lanes of `group` from instruction `at` on, while they stay together, for `most` instructions.
    fn run_group(&mut self, w: usize, group: u32, at: usize, most: u64) -> Result<(), InterpretError> {
        let kernel = self.kernel;
        let warp = &self.warps[w];
        // Where others of the warp wait to be joined.
        let others = warp.alive & !warp.waiting & !group;
        let join = if self.random.is_none() { lanes_of(others).map(|lane| warp.pcs[lane]).min() } else { None };
        let mut pc = at;
        for _ in 0..most {
            *self.work += 1;
            if *self.work > self.options.most_work {
                return Err(InterpretError::Endless { most: self.options.most_work });
            }
            let instruction = &kernel.instructions[pc];
            let done = self.step(w, group, pc, instruction);
            let next = done
                .map_err(|Wrong { lane, fault, problem }| self.fault(self.warps[w].first + lane, pc, fault, problem))?;
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

    /// One instruction by the lanes of `group`: where they go on, or None where they part or wait.
    fn step(&mut self, w: usize, group: u32, pc: usize, instruction: &Instruction) -> Ran<Option<usize>> {
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
            Action::Branch { to, uniform } => {
                if active == group {
                    return Ok(Some(*to));
                }
                if active == 0 {
                    return Ok(Some(pc + 1));
                }
                // Shuffled, threads stand at one place in different rounds of a loop.
                if *uniform && self.random.is_none() {
                    let lane = (group & !active).trailing_zeros() as usize;
                    let problem = "some threads of the warp take the branch and this does not".to_string();
                    return Err(Wrong { lane, fault: Fault::Divergence, problem });
                }
                self.set_pcs(w, active, *to);
                self.set_pcs(w, group & !active, pc + 1);
                Ok(None)
            }
            _ if active == 0 => Ok(Some(pc + 1)),
            Action::Exit => {
                self.set_pcs(w, group, pc + 1);
                self.exit(w, active)?;
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

    fn check_written(&self, w: usize, active: u32, slot: Slot) -> Ran<()> {
        let unwritten = active & !self.warps[w].written[slot];
        if unwritten == 0 {
            return Ok(());
        }
        let problem = "a register that it reads was never written".to_string();
        Err(Wrong { lane: unwritten.trailing_zeros() as usize, fault: Fault::Uninitialised, problem })
    }

    fn set(&mut self, w: usize, active: u32, slot: Slot, values: &Lanes) {
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

    /// `function` of three slots, lane by lane.
    fn map(&self, w: usize, active: u32, of: [Slot; 3], function: impl Fn(u64, u64, u64) -> u64) -> Lanes {
        let [a, b, c] = of.map(|slot| &self.warps[w].slots[slot]);
        let mut values = [0; LANES];
        for lane in lanes_of(active) {
            values[lane] = function(a[lane], b[lane], c[lane]);
        }
        values
    }

    fn act(&mut self, w: usize, active: u32, pc: usize, action: &Action) -> Ran<()> {
        match action {
            Action::Compute { to, of, function } => {
                let values = self.map(w, active, *of, function);
                self.set(w, active, *to, &values);
            }
            Action::Approximate { to, of: [a, b], function, ftz } => {
                let units = self.options.units;
                let values = self.map(w, active, [*a, *b, *b], |a, b, _| approximate(*function, units, *ftz, a, b));
                self.set(w, active, *to, &values);
            }
            Action::Compare { to, of, function } => {
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
            Action::Split { to, of, bits } => {
                let whole = self.warps[w].slots[*of];
                for (i, to) in (0_u32..).zip(to) {
                    if let Some(to) = to {
                        self.set(w, active, *to, &whole.map(|whole| whole >> (i * bits) & mask(*bits)));
                    }
                }
            }
            Action::Join { to, of, bits } => {
                let mut values = [0; LANES];
                for (i, slot) in (0_u32..).zip(of) {
                    for (value, part) in values.iter_mut().zip(&self.warps[w].slots[*slot]) {
                        *value |= part << (i * bits);
                    }
                }
                self.set(w, active, *to, &values);
            }
            Action::Map { to, address, rank } => {
                let ctas = self.ctas.len() as u64;
                let of = [*address, *rank, *rank];
                let beyond =
                    self.map(w, active, of, |address, rank, _| u64::from(address >> PEER_RANGE != 0 || rank >= ctas));
                if let Some(lane) = lanes_of(active).find(|&lane| beyond[lane] == 1) {
                    let rank = self.warps[w].slots[*rank][lane];
                    let problem = format!("rank {rank} of {ctas} CTAs, or an address that is not of one's own");
                    return Err(Wrong { lane, fault: Fault::Undefined, problem });
                }
                let values = self.map(w, active, of, |address, rank, _| (rank + 1) << PEER_RANGE | address);
                self.set(w, active, *to, &values);
            }
            Action::Load { space, from, ty, to, register_bits, read_only } => {
                let bytes = ty.bits() as usize / 8;
                for lane in lanes_of(active) {
                    let (place, start) = self.locate(w, lane, *space, *from, bytes * to.len())?;
                    self.touch(w, lane, pc, place, |memory, by| {
                        if *read_only {
                            memory.read_constant(start, bytes * to.len(), by)
                        } else {
                            memory.read(start, bytes * to.len(), by)
                        }
                    })?;
                    for (i, to) in to.iter().enumerate() {
                        let value = number(&self.memory(place).bytes[start + i * bytes..][..bytes]);
                        if let Some(to) = to {
                            self.warps[w].slots[*to][lane] = widened(*ty, value, *register_bits);
                        }
                    }
                }
                for to in to.iter().flatten() {
                    self.warps[w].written[*to] |= active;
                }
            }
            Action::Store { space, to, bytes, of } => {
                let bytes = *bytes as usize;
                for lane in lanes_of(active) {
                    let (place, start) = self.locate(w, lane, *space, *to, bytes * of.len())?;
                    self.touch(w, lane, pc, place, |memory, by| memory.write(start, bytes * of.len(), by))?;
                    for (i, of) in of.iter().enumerate() {
                        let value = self.warps[w].slots[*of][lane];
                        let to = &mut self.memory_mut(place).bytes[start + i * bytes..][..bytes];
                        to.copy_from_slice(&value.to_le_bytes()[..bytes]);
                    }
                }
            }
            Action::Atomic { space, at, ty, operation, to, of } => {
                for lane in lanes_of(active) {
                    self.atomic(w, lane, pc, (*space, *at), (*ty, *operation), *to, *of)?;
                }
            }
            Action::Copy { to, from, bytes, read, ignore } => {
                for lane in lanes_of(active) {
                    let slots = &self.warps[w].slots;
                    let whole = u64::from(*bytes);
                    let count = read.map_or(whole, |read| slots[read][lane]);
                    let count = if ignore.is_some_and(|ignore| slots[ignore][lane] == 1) { 0 } else { count };
                    if count > whole {
                        let problem = format!("{count} bytes to be read for {whole}");
                        return Err(Wrong { lane, fault: Fault::Undefined, problem });
                    }
                    self.copy(w, lane, pc, (*from, count as usize), (*to, whole as usize))?;
                }
            }
            Action::CommitCopies => {
                for lane in lanes_of(active) {
                    let thread = &mut self.threads[self.warps[w].first + lane];
                    let copies = std::mem::take(&mut thread.copies);
                    thread.groups.push_back(copies);
                }
            }
            Action::WaitCopies(groups) => {
                for lane in lanes_of(active) {
                    self.finish_copies(w, lane, pc, *groups);
                }
            }
            Action::WaitAllCopies => {
                for lane in lanes_of(active) {
                    let thread = &mut self.threads[self.warps[w].first + lane];
                    let copies = std::mem::take(&mut thread.copies);
                    thread.groups.push_back(copies);
                    self.finish_copies(w, lane, pc, 0);
                }
            }
            Action::Fence { beyond_cta } => {
                for lane in lanes_of(active).filter(|_| *beyond_cta) {
                    let thread = &mut self.threads[self.warps[w].first + lane];
                    thread.fenced = Some((thread.known.clone(), thread.clock));
                    thread.clock += 1;
                }
            }
            Action::ActiveMask { to } => self.set(w, active, *to, &[active.into(); LANES]),
            Action::Nothing => {}
            _ => unreachable!("a branch, an exit or a collective instruction"),
        }
        Ok(())
    }

    fn address(&self, w: usize, lane: usize, address: Address) -> u64 {
        self.warps[w].slots[address.base][lane].wrapping_add_signed(address.offset)
    }

    /// Which memory an access of `bytes` goes to, and where in it.
    fn locate(&self, w: usize, lane: usize, space: Space, address: Address, bytes: usize) -> Ran<(Place, usize)> {
        let wrong = |fault, problem| Err(Wrong { lane, fault, problem });
        let at = self.address(w, lane, address);
        if !at.is_multiple_of(bytes as u64) {
            return wrong(
                Fault::Misaligned,
                format!("{bytes} bytes at {}, expected a multiple", self.spelt(space, at)),
            );
        }
        if space == Space::Global {
            let array = ((at >> ARRAY_RANGE) as usize).wrapping_sub(1);
            let start = (at & mask(ARRAY_RANGE)) as i64 - (1 << (ARRAY_RANGE - 1));
            let fits = self
                .global
                .get(array)
                .is_some_and(|memory| usize::try_from(start).is_ok_and(|start| start + bytes <= memory.bytes.len()));
            if fits {
                return Ok((Place::Global(array), start as usize));
            }
            return wrong(Fault::OutOfBounds, format!("{bytes} bytes at {}", self.spelt(space, at)));
        }
        let (own, start) = (self.warps[w].cta, at & mask(PEER_RANGE));
        let cta = match at >> PEER_RANGE {
            0 => own,
            rank if space == Space::Cluster && rank <= self.ctas.len() as u64 => rank as usize - 1,
            _ => {
                let problem = format!("{bytes} bytes at {}, which is not of this space", self.spelt(space, at));
                return wrong(Fault::OutOfBounds, problem);
            }
        };
        let inside = |&(first, end): &(u32, u32)| u64::from(first) <= start && start + bytes as u64 <= u64::from(end);
        if !self.arrays.iter().any(inside) {
            return wrong(Fault::OutOfBounds, format!("{bytes} bytes at {}", self.spelt(space, at)));
        }
        if cta != own && self.threads[self.warps[w].first + lane].phases == 0 {
            let problem = format!("CTA {} of the cluster is not known to have started", cta);
            return wrong(Fault::PeerNotStarted, problem);
        }
        Ok((Place::Shared(cta), start as usize))
    }

    /// An address as messages have it.
    fn spelt(&self, space: Space, at: u64) -> String {
        if space == Space::Global {
            let array = ((at >> ARRAY_RANGE) as usize).wrapping_sub(1);
            let start = (at & mask(ARRAY_RANGE)) as i64 - (1 << (ARRAY_RANGE - 1));
            return match (self.names.get(array), self.global.get(array)) {
                (Some(name), Some(memory)) => format!("byte {start} of {name}, which has {}", memory.bytes.len()),
                _ => format!("{at:#x}, which is in no array"),
            };
        }
        let start = (at & mask(PEER_RANGE)) as i64;
        let nearest = self
            .arrays
            .iter()
            .min_by_key(|&&(first, end)| (i64::from(first) - start).max(start - i64::from(end)).max(0));
        match nearest {
            Some(&(first, end)) => {
                format!("byte {} of an array of {} in shared memory", start - i64::from(first), end - first)
            }
            None => format!("{at:#x}, and there is no shared memory"),
        }
    }

    fn memory(&self, place: Place) -> &Memory {
        match place {
            Place::Global(array) => &self.global[array],
            Place::Shared(cta) => &self.ctas[cta].shared,
        }
    }

    fn memory_mut(&mut self, place: Place) -> &mut Memory {
        match place {
            Place::Global(array) => &mut self.global[array],
            Place::Shared(cta) => &mut self.ctas[cta].shared,
        }
    }

    /// Tells `place` that a lane touches it.
    fn touch(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        place: Place,
        touch: impl FnOnce(&mut Memory, &Toucher) -> Result<(), Conflict>,
    ) -> Ran<()> {
        let thread = self.warps[w].first + lane;
        let Thread { clock, known, .. } = &self.threads[thread];
        let by = Toucher { cluster: self.cluster, thread: thread as u32, clock: *clock, known, at: pc as u32 };
        let memory = match place {
            Place::Global(array) => &mut self.global[array],
            Place::Shared(cta) => {
                if cta != self.warps[w].cta {
                    let touched = &mut self.ctas[cta].touched;
                    touched.resize(self.threads.len(), (0, 0));
                    touched[thread] = (*clock, pc as u32);
                }
                &mut self.ctas[cta].shared
            }
        };
        touch(memory, &by).map_err(|conflict| self.conflict(lane, place, &conflict))
    }

    fn conflict(&self, lane: usize, place: Place, conflict: &Conflict) -> Wrong {
        let byte = match place {
            Place::Global(array) => format!("byte {} of {}", conflict.byte, self.names[array]),
            Place::Shared(cta) => {
                let at = (cta as u64 + 1) << PEER_RANGE | conflict.byte as u64;
                format!("{}, of CTA {}", self.spelt(Space::Cluster, at), self.cta_in_grid(self.cluster, cta as u32))
            }
        };
        let problem = match conflict.other {
            None => format!("{byte} was never written"),
            Some((thread, at, wrote)) => {
                let (cta, thread) = self.thread_of(thread);
                let Instruction { line, name, .. } = &self.kernel.instructions[at as usize];
                let did = match (conflict.fault, wrote) {
                    (Fault::NotCopied, true) => "is being written",
                    (Fault::NotCopied, false) => "is being read",
                    (_, true) => "was written",
                    (_, false) => "was read",
                };
                format!(
                    "{byte} {did} by CTA {cta}, thread {thread} at line {line} ({name}), and nothing orders that before this"
                )
            }
        };
        Wrong { lane, fault: conflict.fault, problem }
    }

    #[expect(clippy::too_many_arguments, reason = "an instruction's operands")]
    fn atomic(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (space, at): (Space, Address),
        (ty, operation): (Type, Atomic),
        to: Option<Slot>,
        [first, second]: [Slot; 2],
    ) -> Ran<()> {
        let bytes = ty.bits() as usize / 8;
        let (place, start) = self.locate(w, lane, space, at, bytes)?;
        self.touch(w, lane, pc, place, |memory, by| memory.read_and_write(start, bytes, by))?;
        let (first, second) = (self.warps[w].slots[first][lane], self.warps[w].slots[second][lane]);
        let memory = &mut self.memory_mut(place).bytes[start..start + bytes];
        let old = number(memory);
        let new = match operation {
            // Global memory flushes.
            Atomic::Add if ty == Type::Float(Float::F32) => {
                round_once(Float::F32, Rounded::Add, space == Space::Global, old, first, 0)
            }
            Atomic::Add => old.wrapping_add(first) & mask(ty.bits()),
            Atomic::Min => whole(ty, old).min(whole(ty, first)) as u64 & mask(ty.bits()),
            Atomic::Max => whole(ty, old).max(whole(ty, first)) as u64 & mask(ty.bits()),
            Atomic::And => old & first,
            Atomic::Or => old | first,
            Atomic::Xor => old ^ first,
            Atomic::Exchange => first,
            Atomic::CompareAndSwap if old == first => second,
            Atomic::CompareAndSwap => old,
            Atomic::Increment => {
                if old >= first {
                    0
                } else {
                    old + 1
                }
            }
            Atomic::Decrement => {
                if old == 0 || old > first {
                    first
                } else {
                    old - 1
                }
            }
        };
        memory.copy_from_slice(&new.to_le_bytes()[..bytes]);
        if let Some(to) = to {
            self.warps[w].slots[to][lane] = old;
            self.warps[w].written[to] |= 1 << lane;
        }
        Ok(())
    }

    /// Begins a copy of `count` bytes of global memory to `bytes` of shared memory; what it reads and writes is under way until it is waited for.
    fn copy(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (from, count): (Address, usize),
        (to, bytes): (Address, usize),
    ) -> Ran<()> {
        let (target, written) = self.locate(w, lane, Space::Shared, to, bytes)?;
        // Where nothing is read, nothing need be there.
        let at = self.address(w, lane, from);
        let mut data = vec![0; bytes];
        let mut source = None;
        if count > 0 {
            if !at.is_multiple_of(bytes as u64) {
                let problem = format!("{bytes} bytes at {}, expected a multiple", self.spelt(Space::Global, at));
                return Err(Wrong { lane, fault: Fault::Misaligned, problem });
            }
            let array = ((at >> ARRAY_RANGE) as usize).wrapping_sub(1);
            let start = (at & mask(ARRAY_RANGE)) as i64 - (1 << (ARRAY_RANGE - 1));
            let held = self
                .global
                .get(array)
                .and_then(|memory| usize::try_from(start).ok().filter(|start| start + count <= memory.bytes.len()));
            let Some(start) = held else {
                let problem = format!("{count} bytes at {}", self.spelt(Space::Global, at));
                return Err(Wrong { lane, fault: Fault::OutOfBounds, problem });
            };
            self.touch(w, lane, pc, Place::Global(array), |memory, by| {
                memory.read(start, count, &Toucher { clock: UNDER_WAY, ..*by })
            })?;
            data[..count].copy_from_slice(&self.global[array].bytes[start..start + count]);
            source = Some((array, start));
        }
        self.touch(w, lane, pc, target, |memory, by| {
            memory.write(written, bytes, &Toucher { clock: UNDER_WAY, ..*by })
        })?;
        self.memory_mut(target).bytes[written..written + bytes].copy_from_slice(&data);
        let (array, from) = source.unwrap_or((0, 0));
        let copying = Copying { array, from, read: count, to: written, written: bytes };
        self.threads[self.warps[w].first + lane].copies.push(copying);
        Ok(())
    }

    /// All groups of copies but the last `left` are over.
    fn finish_copies(&mut self, w: usize, lane: usize, pc: usize, left: usize) {
        let Warp { first, cta, .. } = self.warps[w];
        let Thread { clock, known, groups, .. } = &mut self.threads[first + lane];
        let by = Toucher { cluster: self.cluster, thread: (first + lane) as u32, clock: *clock, known, at: pc as u32 };
        while groups.len() > left {
            for Copying { array, from, read, to, written } in groups.pop_front().unwrap_or_default() {
                if read > 0 {
                    self.global[array].copied_from(from, read, &by);
                }
                self.ctas[cta].shared.copied_to(to, written, &by);
            }
        }
    }

    fn exit(&mut self, w: usize, lanes: u32) -> Ran<()> {
        let Warp { first, cta, .. } = self.warps[w];
        for lane in lanes_of(lanes) {
            let thread = &self.threads[first + lane];
            if !thread.copies.is_empty() || thread.groups.iter().any(|group| !group.is_empty()) {
                let problem = "it exits, and a cp.async that it issued was not waited for".to_string();
                return Err(Wrong { lane, fault: Fault::NotCopied, problem });
            }
        }
        self.warps[w].alive &= !lanes;
        self.ctas[cta].alive -= u64::from(lanes.count_ones());
        self.alive -= lanes.count_ones() as usize;
        // Who waited for these alone waits no longer.
        let ids: Vec<u64> = self.ctas[cta].barriers.keys().copied().collect();
        for id in ids {
            self.finish_barrier(cta, id);
        }
        self.finish_phase();
        Ok(())
    }

    /// An instruction that the lanes of a warp take together.
    fn collective(&mut self, w: usize, group: u32, active: u32, pc: usize, action: &Action) -> Ran<()> {
        if let Some((lane, absent)) = self.missing(w, group, pc) {
            return Err(self.apart(w, lane, absent, group));
        }
        match action {
            Action::Barrier { id, threads, waits, reduces, .. } => {
                let slots = &self.warps[w].slots;
                let lane = active.trailing_zeros() as usize;
                let id = slots[*id][lane];
                let count = threads.map(|threads| slots[threads][lane]);
                let held = reduces.as_ref().map(|reduces| {
                    let holds = |&lane: &usize| (slots[reduces.of][lane] == 1) != reduces.negated;
                    lanes_of(active).filter(holds).count() as u64
                });
                if id >= BARRIERS || count.is_some_and(|count| count == 0 || !count.is_multiple_of(LANES as u64)) {
                    let problem = format!("barrier {id} for {count:?} threads, expected 0 to 15 and a multiple of 32");
                    return Err(Wrong { lane, fault: Fault::Undefined, problem });
                }
                let Warp { first, cta, .. } = self.warps[w];
                let barrier = self.ctas[cta].barriers.entry(id).or_default();
                if barrier.arrived > 0 && barrier.expected != count {
                    let problem = format!("barrier {id} for {count:?} threads and {:?}", barrier.expected);
                    return Err(Wrong { lane, fault: Fault::Undefined, problem });
                }
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
            Action::ClusterArrive { release, .. } => {
                for lane in lanes_of(active) {
                    self.arrive(w, lane, *release)?;
                }
                self.finish_phase();
            }
            Action::ClusterWait { .. } => {
                for lane in lanes_of(active) {
                    self.wait(w, lane)?;
                }
            }
            Action::WarpBarrier { members }
            | Action::Shuffle { members, .. }
            | Action::Vote { members, .. }
            | Action::Reduce { members, .. }
            | Action::Elect { members, .. } => {
                let named = self.warps[w].slots[*members];
                let mut rest = active;
                while rest != 0 {
                    let members = named[rest.trailing_zeros() as usize];
                    let these = lanes_of(rest).filter(|&lane| named[lane] == members);
                    let these = these.fold(0, |these, lane| these | 1 << lane);
                    rest &= !these;
                    self.of_members(w, these, action)?;
                }
            }
            _ => unreachable!("a collective instruction"),
        }
        Ok(())
    }

    /// What the lanes `active` of a warp do who name each other.
    fn of_members(&mut self, w: usize, active: u32, action: &Action) -> Ran<()> {
        match action {
            Action::WarpBarrier { .. } => {
                let first = self.warps[w].first;
                let mut meeting = Meeting::default();
                for lane in lanes_of(active) {
                    let thread = &self.threads[first + lane];
                    meeting.add(&thread.known, first + lane, thread.clock);
                    meeting.phases = meeting.phases.max(thread.phases);
                }
                let known: Rc<[u32]> = meeting.clocks.into();
                for lane in lanes_of(active) {
                    let thread = &mut self.threads[first + lane];
                    thread.known = known.clone();
                    thread.phases = meeting.phases;
                    thread.clock += 1;
                }
            }
            Action::Shuffle { mode, to, valid, of, by, clamp, .. } => {
                self.shuffle(w, active, *mode, (*to, *valid), (*of, *by, *clamp))?;
            }
            Action::Vote { mode, to, of, negated, .. } => {
                let values = &self.warps[w].slots[*of];
                let held = lanes_of(active).filter(|&lane| (values[lane] == 1) != *negated);
                let held = held.fold(0_u32, |held, lane| held | 1 << lane);
                let result = match mode {
                    Vote::All => u64::from(held == active),
                    Vote::Any => u64::from(held != 0),
                    Vote::Uniform => u64::from(held == active || held == 0),
                    Vote::Ballot => held.into(),
                };
                self.set(w, active, *to, &[result; LANES]);
            }
            Action::Reduce { to, of, function, .. } => {
                let values = &self.warps[w].slots[*of];
                let all = lanes_of(active).map(|lane| values[lane]).reduce(|a, b| function(a, b, 0));
                self.set(w, active, *to, &[all.unwrap_or(0); LANES]);
            }
            Action::Elect { to, elected, .. } => {
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

    /// That `absent` does not take part in what `lane` does.
    fn apart(&self, w: usize, lane: usize, absent: usize, group: u32) -> Wrong {
        let warp = &self.warps[w];
        let thread = warp.first + absent;
        let thread = thread % (self.threads.len() / self.ctas.len());
        let problem = if lane == absent {
            "it is not among the members that it names".to_string()
        } else if warp.alive >> absent & 1 == 0 {
            format!("thread {thread} of the warp has exited")
        } else if group >> absent & 1 == 1 {
            format!("thread {thread} of the warp steps over it, or names other members")
        } else {
            let waits = warp.waiting >> absent & 1 == 1;
            let at = warp.pcs[absent] - usize::from(waits);
            let Instruction { line, name, .. } = &self.kernel.instructions[at];
            format!("thread {thread} of the warp is at line {line} ({name})")
        };
        Wrong { lane, fault: Fault::Divergence, problem }
    }

    /// Lets who waits at a barrier go on, if all have arrived.
    fn finish_barrier(&mut self, cta: usize, id: u64) {
        let Cta { barriers, alive, .. } = &mut self.ctas[cta];
        let complete = |barrier: &Barrier| barrier.arrived >= barrier.expected.unwrap_or(*alive);
        if !barriers.get(&id).is_some_and(complete) {
            return;
        }
        let barrier = barriers.remove(&id).expect("it was there");
        let known: Rc<[u32]> = barrier.meeting.clocks.into();
        for &thread in &barrier.waiting {
            let state = &mut self.threads[thread];
            state.known = known.clone();
            state.phases = barrier.meeting.phases;
            self.wake(thread);
        }
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

    /// Warp and lane of a thread of the cluster.
    fn lane_of(&self, thread: usize) -> (usize, usize) {
        let w = self.warps.partition_point(|warp| warp.first <= thread) - 1;
        (w, thread - self.warps[w].first)
    }

    fn wake(&mut self, thread: usize) {
        let (w, lane) = self.lane_of(thread);
        self.warps[w].waiting &= !(1 << lane);
    }

    /// On the cluster's barrier.
    fn arrive(&mut self, w: usize, lane: usize, release: bool) -> Ran<()> {
        let index = self.warps[w].first + lane;
        let thread = &mut self.threads[index];
        if thread.arrivals != thread.waits {
            let problem = "it arrives again, and did not wait for the phase on which it arrived".to_string();
            return Err(Wrong { lane, fault: Fault::Undefined, problem });
        }
        thread.arrivals += 1;
        self.barrier.arrived += 1;
        if release {
            self.barrier.meeting.add(&thread.known, index, thread.clock);
            thread.clock += 1;
        } else if let Some((known, clock)) = &thread.fenced {
            self.barrier.meeting.add(known, index, *clock);
        }
        Ok(())
    }

    fn wait(&mut self, w: usize, lane: usize) -> Ran<()> {
        let index = self.warps[w].first + lane;
        let thread = &self.threads[index];
        if thread.arrivals == thread.waits {
            let problem = "it waits for a phase on which it did not arrive: that never ends".to_string();
            return Err(Wrong { lane, fault: Fault::Deadlock, problem });
        }
        if self.barrier.phases >= thread.arrivals {
            self.acquire(index);
        } else {
            self.barrier.waiting.push(index);
            self.warps[w].waiting |= 1 << lane;
        }
        Ok(())
    }

    /// What the last phase of the cluster's barrier passed on is known to the thread.
    fn acquire(&mut self, index: usize) {
        let thread = &mut self.threads[index];
        let barrier = &mut self.barrier;
        thread.waits += 1;
        thread.phases = thread.phases.max(barrier.phases);
        let Some(passed) = &barrier.passed else { return };
        if let Some((_, joined)) = barrier.joined.iter().find(|(known, _)| Rc::ptr_eq(known, &thread.known)) {
            thread.known = joined.clone();
            return;
        }
        let mut meeting = Meeting::default();
        meeting.join(&thread.known);
        meeting.join(passed);
        let joined: Rc<[u32]> = meeting.clocks.into();
        barrier.joined.push((thread.known.clone(), joined.clone()));
        thread.known = joined;
    }

    /// Ends the phase of the cluster's barrier, if all have arrived who did not exit.
    fn finish_phase(&mut self) {
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
        mode: Shuffle,
        (to, valid): (Slot, Option<Slot>),
        (of, by, clamp): (Slot, Slot, Slot),
    ) -> Ran<()> {
        let [of, by, clamp] = [of, by, clamp].map(|slot| self.warps[w].slots[slot]);
        let (mut values, mut valids) = ([0; LANES], [0; LANES]);
        for lane in lanes_of(active) {
            let (offset, segment) = (by[lane] as usize & 31, clamp[lane] as usize >> 8 & 31);
            let clamp = clamp[lane] as usize & 31;
            let most = lane & segment | clamp & !segment & 31;
            let least = lane & segment;
            let (source, is_valid) = match mode {
                Shuffle::Up => (lane.wrapping_sub(offset), lane as isize - offset as isize >= most as isize),
                Shuffle::Down => (lane + offset, lane + offset <= most),
                Shuffle::Butterfly => (lane ^ offset, lane ^ offset <= most),
                Shuffle::Index => (least | offset & !segment & 31, (least | offset & !segment & 31) <= most),
            };
            let source = if is_valid { source } else { lane };
            if active >> source & 1 == 0 {
                let problem = format!("the value of lane {source}, which takes no part");
                return Err(Wrong { lane, fault: Fault::Undefined, problem });
            }
            (values[lane], valids[lane]) = (of[source], u64::from(is_valid));
        }
        self.set(w, active, to, &values);
        if let Some(valid) = valid {
            self.set(w, active, valid, &valids);
        }
        Ok(())
    }

    /// Who waits where, and who is missing.
    fn deadlock(&self) -> InterpretError {
        let at = |thread: usize| {
            let (w, lane) = self.lane_of(thread);
            let warp = &self.warps[w];
            (warp.alive >> lane & 1 == 1).then(|| warp.pcs[lane] - 1)
        };
        let all: Vec<(usize, usize)> = (0..self.threads.len()).filter_map(|t| Some((t, at(t)?))).collect();
        let mut places: Vec<usize> = all.iter().map(|&(_, pc)| pc).collect();
        places.sort_unstable();
        places.dedup();
        let told = places.iter().map(|&place| {
            let here: Vec<usize> = all.iter().filter(|&&(_, pc)| pc == place).map(|&(thread, _)| thread).collect();
            let first = self.cluster * self.threads.len() as u32 + here[0] as u32;
            let (cta, thread) = self.thread_of(first);
            let Instruction { line, name, .. } = &self.kernel.instructions[place];
            format!("{} threads wait at line {line} ({name}), the first CTA {cta}, thread {thread}", here.len())
        });
        let told: Vec<String> = told.collect();
        let exited = self.threads.len() - all.len();
        let problem = format!("{}; {exited} threads have exited", told.join("; "));
        self.fault(all[0].0, all[0].1, Fault::Deadlock, problem)
    }

    /// That no CTA may have exited when a peer touched its memory: some thread of it knew of the touch.
    fn check_peers(&self) -> Result<(), InterpretError> {
        let per_cta = self.threads.len() / self.ctas.len();
        for (rank, cta) in self.ctas.iter().enumerate() {
            for (toucher, &(clock, at)) in cta.touched.iter().enumerate().filter(|(_, (clock, _))| *clock > 0) {
                let threads = &self.threads[rank * per_cta..][..per_cta];
                if !threads.iter().any(|thread| thread.known[toucher] >= clock) {
                    let cta = self.cta_in_grid(self.cluster, rank as u32);
                    let problem = format!("nothing keeps CTA {cta} from exiting before this");
                    return Err(self.fault(toucher, at as usize, Fault::PeerExited, problem));
                }
            }
        }
        Ok(())
    }
}

/// A memory of the machine.
#[derive(Clone, Copy)]
enum Place {
    Global(usize),
    /// Of the CTA of this rank.
    Shared(usize),
}

/// A little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
