//! Loads, stores, atomic operations and asynchronous copies: where each address leads, and whether the access is ordered.

use super::PtxFault;
use super::arithmetic::{RoundedOperation, mask, round_once, whole, widened, wrapped};
use super::instruction::{AtomicOperation, DecodedInstruction, OperandAddress, PtxOperation, RegisterSlot, StateSpace};
use super::memory::{AccessConflict, Accessor, CheckedMemory, UNDER_WAY};
use super::run::{ARRAY_RANGE, ClusterMachine, PEER_RANGE};
use super::state::{AsyncCopy, LaneFault, LaneResult, ThreadState, WarpState, lanes_of};
use super::types::{FloatFormat, PtxType};

/// One memory of the machine: a global array or the shared memory of a CTA.
#[derive(Clone, Copy)]
enum MemoryId {
    /// The global array of this number.
    Global(usize),
    /// The shared memory of the CTA of this rank in its cluster.
    Shared(usize),
}

impl ClusterMachine<'_> {
    pub(super) fn load(&mut self, w: usize, active: u32, pc: usize, load: &PtxOperation) -> LaneResult<()> {
        let PtxOperation::Load { space, from, ty, to, register_bits, read_only } = load else {
            unreachable!("a load");
        };
        let each = ty.bits() as usize / 8;
        let bytes = each * to.len();
        for lane in lanes_of(active) {
            // Lanes are served one after another, each with its own address: a warp's load is 32 accesses in the
            // history.
            let (place, start) = self.locate(w, lane, *space, *from, bytes)?;
            // The history first: bytes that may not be read are not used.
            self.touch(w, lane, pc, place, |memory, by| match read_only {
                true => memory.read_constant(start, bytes, by),
                false => memory.read(start, bytes, by),
            })?;
            for (i, to) in to.iter().enumerate() {
                let value = number(&self.memory(place).bytes[start + i * each..][..each]);
                if let Some(to) = to {
                    self.warps[w].slots[*to][lane] = widened(*ty, value, *register_bits);
                }
            }
        }
        // The registers count as written in the lanes that loaded; reading one in any other lane is an error.
        for to in to.iter().flatten() {
            self.warps[w].written[*to] |= active;
        }
        Ok(())
    }

    /// Stores the lowest `each` bytes of each slot of `of`, one element after another.
    pub(super) fn store(
        &mut self,
        w: usize,
        active: u32,
        pc: usize,
        (space, to): (StateSpace, OperandAddress),
        each: usize,
        of: &[RegisterSlot],
    ) -> LaneResult<()> {
        let bytes = each * of.len();
        for lane in lanes_of(active) {
            let (place, start) = self.locate(w, lane, space, to, bytes)?;
            // The history decides before any byte changes, so that a store that races leaves the memory as it was.
            self.touch(w, lane, pc, place, |memory, by| memory.write(start, bytes, by))?;
            for (i, of) in of.iter().enumerate() {
                let value = self.warps[w].slots[*of][lane];
                let to = &mut self.memory_mut(place).bytes[start + i * each..][..each];
                to.copy_from_slice(&value.to_le_bytes()[..each]);
            }
        }
        Ok(())
    }

    fn address(&self, w: usize, lane: usize, address: OperandAddress) -> u64 {
        self.warps[w].slots[address.base][lane].wrapping_add_signed(address.offset)
    }

    /// Finds the memory and the offset that an access of `bytes` goes to, and refuses one that touches a barrier.
    fn locate(
        &self,
        w: usize,
        lane: usize,
        space: StateSpace,
        address: OperandAddress,
        bytes: usize,
    ) -> LaneResult<(MemoryId, usize)> {
        let (place, start) = self.locate_any(w, lane, space, address, bytes)?;
        if let MemoryId::Shared(cta) = place
            && self.is_barrier(cta, start, bytes)
        {
            let problem = "bytes of an mbarrier, expected to be touched by instructions on it alone".to_string();
            return Err(LaneFault { lane, fault: PtxFault::Undefined, problem });
        }
        Ok((place, start))
    }

    /// Finds the CTA to whose shared memory an access of `bytes` goes, and the offset in it.
    pub(super) fn locate_shared(
        &self,
        w: usize,
        lane: usize,
        space: StateSpace,
        address: OperandAddress,
        bytes: usize,
    ) -> LaneResult<(usize, usize)> {
        match self.locate_any(w, lane, space, address, bytes)? {
            (MemoryId::Shared(cta), start) => Ok((cta, start)),
            (MemoryId::Global(_), _) => unreachable!("an address of shared memory"),
        }
    }

    fn locate_any(
        &self,
        w: usize,
        lane: usize,
        space: StateSpace,
        address: OperandAddress,
        bytes: usize,
    ) -> LaneResult<(MemoryId, usize)> {
        let wrong = |fault, problem| Err(LaneFault { lane, fault, problem });
        // Alignment first: to the whole access, vectors included.
        let at = self.address(w, lane, address);
        if !at.is_multiple_of(bytes as u64) {
            return wrong(
                PtxFault::Misaligned,
                format!("{bytes} bytes at {}, expected a multiple", self.spelt(space, at)),
            );
        }
        // A global address has the number of its array above bit ARRAY_RANGE, so that no offset leads from one array
        // into another.
        if space == StateSpace::Global {
            if let Some((array, start)) = self.in_array(at, bytes) {
                return Ok((MemoryId::Global(array), start));
            }
            return wrong(PtxFault::OutOfBounds, format!("{bytes} bytes at {}", self.spelt(space, at)));
        }
        // The upper bits of a shared address are a CTA of the cluster: 0 for the thread's own, else its rank + 1.
        let (own, start) = (self.warps[w].cta, at & mask(PEER_RANGE));
        let cta = match at >> PEER_RANGE {
            0 => own,
            rank if space == StateSpace::Cluster && rank <= self.ctas.len() as u64 => rank as usize - 1,
            _ => {
                let problem = format!("{bytes} bytes at {}, which is not of this space", self.spelt(space, at));
                return wrong(PtxFault::OutOfBounds, problem);
            }
        };
        let inside = |&(first, end): &(u32, u32)| u64::from(first) <= start && start + bytes as u64 <= u64::from(end);
        if !self.arrays.iter().any(inside) {
            return wrong(PtxFault::OutOfBounds, format!("{bytes} bytes at {}", self.spelt(space, at)));
        }
        // A peer's memory exists once the peer has started, which the end of a phase of the cluster's barrier shows.
        if cta != own && self.threads[self.warps[w].first + lane].phases == 0 {
            let problem = format!("CTA {cta} of the cluster is not known to have started");
            return wrong(PtxFault::PeerNotStarted, problem);
        }
        Ok((MemoryId::Shared(cta), start as usize))
    }

    /// Finds the global array that holds all `bytes` at an address, and the offset in it.
    fn in_array(&self, at: u64, bytes: usize) -> Option<(usize, usize)> {
        let (array, start) = self.near_array(at);
        let start = usize::try_from(start).ok()?;
        self.global.get(array).filter(|memory| start + bytes <= memory.bytes.len()).map(|_| (array, start))
    }

    /// Finds the global array whose range of addresses contains `at`, and the signed offset from its first byte.
    fn near_array(&self, at: u64) -> (usize, i64) {
        let array = ((at >> ARRAY_RANGE) as usize).wrapping_sub(1);
        let late = self.late.get(array).copied().unwrap_or(0);
        // Offsets are counted from the middle of an array's range: a negative one still belongs to that array, and is
        // reported by its name.
        (array, (at & mask(ARRAY_RANGE)) as i64 - (1 << (ARRAY_RANGE - 1)) - i64::from(late))
    }

    /// Describes an address in the words of messages: the offset in an array and the size of that array.
    pub(super) fn spelt(&self, space: StateSpace, at: u64) -> String {
        if space == StateSpace::Global {
            let (array, start) = self.near_array(at);
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

    fn memory(&self, place: MemoryId) -> &CheckedMemory {
        match place {
            MemoryId::Global(array) => &self.global[array],
            MemoryId::Shared(cta) => &self.ctas[cta].shared,
        }
    }

    fn memory_mut(&mut self, place: MemoryId) -> &mut CheckedMemory {
        match place {
            MemoryId::Global(array) => &mut self.global[array],
            MemoryId::Shared(cta) => &mut self.ctas[cta].shared,
        }
    }

    /// Records an access by a lane in the history of `place`, which refuses it where nothing orders it after others.
    fn touch(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        place: MemoryId,
        touch: impl FnOnce(&mut CheckedMemory, &Accessor) -> Result<(), AccessConflict>,
    ) -> LaneResult<()> {
        let thread = self.warps[w].first + lane;
        let ThreadState { clock, known, .. } = &self.threads[thread];
        let by = Accessor { cluster: self.cluster, thread: thread as u32, clock: *clock, known, at: pc as u32 };
        let memory = match place {
            MemoryId::Global(array) => &mut self.global[array],
            MemoryId::Shared(cta) => {
                // Accesses to a peer are noted, for the check that the peer had not exited.
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

    pub(super) fn shared_conflict(&self, lane: usize, cta: usize, conflict: &AccessConflict) -> LaneFault {
        self.conflict(lane, MemoryId::Shared(cta), conflict)
    }

    fn conflict(&self, lane: usize, place: MemoryId, conflict: &AccessConflict) -> LaneFault {
        // The message names the byte, the other access and what is missing between the two.
        let byte = match place {
            MemoryId::Global(array) => format!("byte {} of {}", conflict.byte, self.names[array]),
            MemoryId::Shared(cta) => {
                let at = (cta as u64 + 1) << PEER_RANGE | conflict.byte as u64;
                format!(
                    "{}, of CTA {}",
                    self.spelt(StateSpace::Cluster, at),
                    self.cta_in_grid(self.cluster, cta as u32)
                )
            }
        };
        let problem = match conflict.other {
            None => format!("{byte} was never written"),
            // An asynchronous store is an agent of its own, numbered after the threads: it writes when nobody waits.
            Some((agent, at, _)) if agent as usize % self.agents() >= self.threads.len() => {
                let DecodedInstruction { line, name, .. } = &self.kernel.instructions[at as usize];
                let problem = match self.kernel.instructions[at as usize].action {
                    PtxOperation::StoreAsync { .. } => format!(
                        "{byte} is being written since line {line} ({name}), and this thread did not wait for the end of \
                         the phase by .acquire.cluster"
                    ),
                    _ => format!("{byte} was written at line {line} ({name}), and nothing orders that before this"),
                };
                let is_store = matches!(self.kernel.instructions[at as usize].action, PtxOperation::StoreAsync { .. });
                let fault = if is_store { PtxFault::NotCopied } else { conflict.fault };
                return LaneFault { lane, fault, problem };
            }
            Some((thread, at, wrote)) => {
                let (cta, thread) = self.thread_of(thread);
                let DecodedInstruction { line, name, .. } = &self.kernel.instructions[at as usize];
                let did = match (conflict.fault, wrote) {
                    (PtxFault::NotCopied, true) => "is being written",
                    (PtxFault::NotCopied, false) => "is being read",
                    (_, true) => "was written",
                    (_, false) => "was read",
                };
                format!(
                    "{byte} {did} by CTA {cta}, thread {thread} at line {line} ({name}), and nothing orders that before this"
                )
            }
        };
        LaneFault { lane, fault: conflict.fault, problem }
    }

    #[expect(clippy::too_many_arguments, reason = "an instruction's operands")]
    pub(super) fn atomic(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (space, at): (StateSpace, OperandAddress),
        (ty, operation): (PtxType, AtomicOperation),
        to: Option<RegisterSlot>,
        [first, second]: [RegisterSlot; 2],
    ) -> LaneResult<()> {
        let bytes = ty.bits() as usize / 8;
        let (place, start) = self.locate(w, lane, space, at, bytes)?;
        // The history sees one access that reads and writes, which other atomic operations need no order with.
        self.touch(w, lane, pc, place, |memory, by| memory.read_and_write(start, bytes, by))?;
        let (first, second) = (self.warps[w].slots[first][lane], self.warps[w].slots[second][lane]);
        let memory = &mut self.memory_mut(place).bytes[start..start + bytes];
        let old = number(memory);
        let new = match operation {
            // Atomic additions of f32 flush subnormals in global memory, and not in shared memory.
            AtomicOperation::Add if ty == PtxType::Float(FloatFormat::F32) => {
                round_once(FloatFormat::F32, RoundedOperation::Add, space == StateSpace::Global, old, first, 0)
            }
            AtomicOperation::Add => old.wrapping_add(first) & mask(ty.bits()),
            AtomicOperation::Min => wrapped(whole(ty, old).min(whole(ty, first)), ty.bits()),
            AtomicOperation::Max => wrapped(whole(ty, old).max(whole(ty, first)), ty.bits()),
            AtomicOperation::And => old & first,
            AtomicOperation::Or => old | first,
            AtomicOperation::Xor => old ^ first,
            AtomicOperation::Exchange => first,
            AtomicOperation::CompareAndSwap if old == first => second,
            AtomicOperation::CompareAndSwap => old,
            // The counter wraps at the operand: `inc` goes to 0 from there, `dec` goes there from 0.
            AtomicOperation::Increment => {
                if old >= first {
                    0
                } else {
                    old + 1
                }
            }
            AtomicOperation::Decrement => {
                if old == 0 || old > first {
                    first
                } else {
                    old - 1
                }
            }
        };
        memory.copy_from_slice(&new.to_le_bytes()[..bytes]);
        if let Some(to) = to {
            // The result is the old value; `red` has no register for it.
            self.warps[w].slots[to][lane] = old;
            self.warps[w].written[to] |= 1 << lane;
        }
        Ok(())
    }

    /// Begins a copy of `count` bytes of global memory into `bytes` bytes of shared memory, the rest of which is set to 0.
    /// All of these bytes are under way, and may not be touched, until the thread has waited for the copy.
    pub(super) fn copy(
        &mut self,
        w: usize,
        lane: usize,
        pc: usize,
        (from, count): (OperandAddress, usize),
        (to, bytes): (OperandAddress, usize),
    ) -> LaneResult<()> {
        let (target, written) = self.locate(w, lane, StateSpace::Shared, to, bytes)?;
        // A copy of 0 bytes reads nothing: its source may be any address.
        let at = self.address(w, lane, from);
        let mut data = vec![0; bytes];
        let mut source = None;
        if count > 0 {
            if !at.is_multiple_of(bytes as u64) {
                let problem = format!("{bytes} bytes at {}, expected a multiple", self.spelt(StateSpace::Global, at));
                return Err(LaneFault { lane, fault: PtxFault::Misaligned, problem });
            }
            let Some((array, start)) = self.in_array(at, count) else {
                let problem = format!("{count} bytes at {}", self.spelt(StateSpace::Global, at));
                return Err(LaneFault { lane, fault: PtxFault::OutOfBounds, problem });
            };
            // The copy reads its source at any time until the thread waits for it, so the access is noted with the
            // clock of copies under way.
            self.touch(w, lane, pc, MemoryId::Global(array), |memory, by| {
                memory.read(start, count, &Accessor { clock: UNDER_WAY, ..*by })
            })?;
            data[..count].copy_from_slice(&self.global[array].bytes[start..start + count]);
            source = Some((array, start));
        }
        self.touch(w, lane, pc, target, |memory, by| {
            memory.write(written, bytes, &Accessor { clock: UNDER_WAY, ..*by })
        })?;
        self.memory_mut(target).bytes[written..written + bytes].copy_from_slice(&data);
        let (array, from) = source.unwrap_or((0, 0));
        let copying = AsyncCopy { array, from, read: count, to: written, written: bytes };
        self.threads[self.warps[w].first + lane].copies.push(copying);
        Ok(())
    }

    /// Closes a group of the copies that each lane has issued since it closed the last one (`cp.async.commit_group`).
    pub(super) fn commit_copies(&mut self, w: usize, active: u32) {
        for lane in lanes_of(active) {
            let thread = &mut self.threads[self.warps[w].first + lane];
            let copies = std::mem::take(&mut thread.copies);
            thread.groups.push_back(copies);
        }
    }

    /// Completes all groups of copies of each lane but the last `left` (`cp.async.wait_group`).
    pub(super) fn finish_copies(&mut self, w: usize, active: u32, pc: usize, left: usize) {
        let WarpState { first, cta, .. } = self.warps[w];
        for lane in lanes_of(active) {
            let (cluster, thread) = (self.cluster, first + lane);
            let ThreadState { clock, known, groups, .. } = &mut self.threads[thread];
            let by = Accessor { cluster, thread: thread as u32, clock: *clock, known, at: pc as u32 };
            // From now on the thread may touch these bytes: they are its own accesses at its present clock.
            // Groups complete in the order of their commits: the oldest are finished first.
            while groups.len() > left {
                for AsyncCopy { array, from, read, to, written } in groups.pop_front().unwrap_or_default() {
                    if read > 0 {
                        self.global[array].copied_from(from, read, &by);
                    }
                    self.ctas[cta].shared.copied_to(to, written, &by);
                }
            }
        }
    }
}

/// Reads up to eight bytes as a little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
