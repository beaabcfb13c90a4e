//! A row of logits in the shared memory of a cluster.
//!
//! A row is cut into blocks of 16 bytes, at addresses that are multiples of 16, and these over the CTAs of the cluster. Of a CTA's blocks a
//! thread has every so many-th, the same in every walk: what it copied in, changed or wrote over it waits for nobody. Where rows do not
//! begin at such addresses, their first and last block have elements of the neighbours', which are neither read nor written: −∞ stands for
//! them in shared memory.

use super::logits::{BLOCK, LogitsFormat};
use super::meeting::MeetingMethod;
use assay_ptx::{PtxAddress, PtxBuilder, PtxTarget, PtxValue};

/// Elements that a trip of a loop takes, at most.
const UNROLLED: u32 = 32;

/// Elements that are kept beside full trips, at most.
const MANY_KEPT: u32 = 40;

/// Threads of a multiprocessor that have 80 registers each: more than rows leave room for.
const THREADS_AT_ONCE: u32 = 768;

/// Threads of a multiprocessor that rows are cut for: few, because what a thread does beside its columns is shared by more of them.
const THREADS: u32 = 512;

/// Shared memory of a multiprocessor of an H100 or a later one, bytes.
const SHARED_OF_A_MULTIPROCESSOR: u32 = 228 << 10;

/// The number of 32-bit registers of a multiprocessor.
const REGISTERS_OF_A_MULTIPROCESSOR: u32 = 64 << 10;

/// Registers of a thread come by so many.
pub(crate) const REGISTERS_AT_ONCE: u32 = 8;

/// Registers that a thread has at most, in whole portions.
const MOST_REGISTERS: u32 = 248;

/// The shared memory that the system takes for every CTA, in bytes.
const SHARED_OF_THE_SYSTEM: u32 = 1 << 10;

/// The shared memory of a kernel in addition to its row, at most, in bytes.
pub(crate) const SHARED_BESIDE: u32 = 8 << 10;

/// CTAs of a cluster, at most, on every device that has clusters.
pub(crate) const LARGEST_CLUSTER: u32 = 8;

/// The distribution of rows over the CTAs of a cluster and their threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowCut {
    pub(crate) target: PtxTarget,
    pub(crate) logits: LogitsFormat,
    pub(crate) vocab: u32,
    /// CTAs of a cluster, a power of two.
    pub(crate) cluster: u32,
    /// Threads of a CTA, a power of two of whole warps.
    pub(crate) threads: u32,
    /// The way in which the CTAs of a cluster meet.
    meeting: MeetingMethod,
    /// Blocks of a CTA, at most.
    blocks: u32,
}

/// Blocks that a row of so many bytes touches, at most.
fn blocks_of_a_row(logits: LogitsFormat, vocab: u32) -> u32 {
    let bytes = vocab * logits.size();
    let before = if bytes.is_multiple_of(BLOCK) { 0 } else { BLOCK - logits.size() };
    (bytes + before).div_ceil(BLOCK)
}

/// Returns the bytes of a CTA's part of a row if `resident` CTAs are to fit on a multiprocessor.
fn room(resident: u32) -> u32 {
    SHARED_OF_A_MULTIPROCESSOR / resident - SHARED_OF_THE_SYSTEM - SHARED_BESIDE
}

impl RowCut {
    /// Distributes rows of `vocab` logits over as few CTAs as leave room for four on a multiprocessor, so that one
    /// copies while another computes; if even the largest cluster does not leave it, over that.
    ///
    /// # Errors
    /// The largest vocabulary that fits.
    pub(crate) fn for_vocab(target: PtxTarget, logits: LogitsFormat, vocab: usize) -> Result<Self, usize> {
        let largest = LARGEST_CLUSTER * (room(1) / BLOCK) * logits.per_block() - logits.per_block();
        let vocab = u32::try_from(vocab).ok().filter(|&vocab| vocab <= largest).ok_or(largest as usize)?;
        let total = blocks_of_a_row(logits, vocab);
        // Fewer CTAs per row spare meetings; more CTAs per multiprocessor hide copies. Sizes are tried in that order.
        let clusters = [1, 2, 4, LARGEST_CLUSTER].into_iter().map(|cluster| (cluster, 4));
        let mut cuts = clusters.chain([(LARGEST_CLUSTER, 2), (LARGEST_CLUSTER, 1)]);
        let fits = |&(cluster, resident): &(u32, u32)| total.div_ceil(cluster) * BLOCK <= room(resident);
        let (cluster, resident) = cuts.find(fits).expect("no larger than the largest");
        let blocks = total.div_ceil(cluster);
        let threads = blocks.next_power_of_two().clamp(32, THREADS / resident);
        Ok(Self { target, logits, vocab, cluster, threads, meeting: MeetingMethod::default(), blocks })
    }

    fn row_bytes(self) -> u32 {
        self.vocab * self.logits.size()
    }

    /// Returns this cut with CTAs that meet as `meeting` says.
    pub(crate) fn meeting_by(self, meeting: MeetingMethod) -> Self {
        Self { meeting, ..self }
    }

    /// Whether CTAs of a cluster meet by asynchronous stores.
    pub(crate) fn meets_by_stores(self) -> bool {
        self.cluster > 1 && self.meeting == MeetingMethod::Stores
    }

    /// Whether every row begins at a multiple of 16.
    pub(crate) fn is_aligned(self) -> bool {
        self.row_bytes().is_multiple_of(BLOCK)
    }

    /// CTAs that find room on a multiprocessor, each with `beside` bytes of shared memory beside its part of a row: as many as have
    /// registers enough, or on a B200, which has a use for more registers, as have shared memory.
    pub(crate) fn resident(self, beside: u32) -> u32 {
        let by_registers = THREADS_AT_ONCE / self.threads;
        if self.target < PtxTarget::Sm100 {
            return by_registers;
        }
        let of_a_cta = self.shared_bytes() + beside + SHARED_OF_THE_SYSTEM;
        by_registers.min(SHARED_OF_A_MULTIPROCESSOR / of_a_cta).max(1)
    }

    /// Registers that a thread may have, where so many CTAs find room on a multiprocessor.
    pub(crate) fn registers(self, resident: u32) -> u32 {
        let of_a_thread = REGISTERS_OF_A_MULTIPROCESSOR / (resident * self.threads);
        (of_a_thread / REGISTERS_AT_ONCE * REGISTERS_AT_ONCE).min(MOST_REGISTERS)
    }

    pub(crate) fn warps(self) -> u32 {
        self.threads / 32
    }

    /// Shared memory of a CTA's part of a row.
    pub(crate) fn shared_bytes(self) -> u32 {
        self.blocks * BLOCK
    }

    /// Blocks that every CTA has, of every row.
    fn fewest(self) -> u32 {
        let least = self.row_bytes().div_ceil(BLOCK);
        least.saturating_sub((self.cluster - 1) * self.blocks).min(self.blocks)
    }
}

/// The part of a row that this thread walks.
pub(crate) struct SharedRow {
    pub(crate) cut: RowCut,
    pub(crate) thread: PtxValue<u32>,
    /// Bytes of the row's first block that are before it; `None` where there are none.
    before: Option<PtxValue<u32>>,
    /// The number of this CTA's first block.
    first: PtxValue<u32>,
    /// The number of blocks of this CTA.
    count: PtxValue<u32>,
    /// The address of this CTA's part in shared memory.
    shared: PtxValue<u32>,
    /// And where logits and dlogits lie, as if they were at the part's begin.
    global: [PtxValue<u64>; 2],
    /// The address of this thread's first block in shared memory.
    own_shared: PtxValue<u32>,
    own_global: [PtxValue<u64>; 2],
    /// Blocks that are the row's alone: their addresses in shared memory, from where, and how many bytes; `None` where all are.
    whole: Option<[PtxValue<u32>; 2]>,
    /// Blocks that a walk takes out of its loop, so that what is made of them can stay in registers until another walk; as far as all
    /// threads have as many.
    kept: u32,
}

/// The position of a block in shared and in global memory.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock {
    pub(crate) shared: PtxAddress,
    /// The address in the array that is walked along.
    pub(crate) global: PtxAddress,
    /// Whether it is the row's alone; `None` where all are.
    whole: Option<PtxValue<bool>>,
    /// The index of the block among those whose exponentials are kept.
    pub(crate) kept: Option<usize>,
}

/// The array whose addresses a walk needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WalkedArray {
    Logits = 0,
    Dlogits = 1,
    /// Shared memory alone, and neither array.
    Shared = 2,
}

impl SharedRow {
    /// Returns the part of row `row` in this thread; `shared` has [room](RowCut::shared_bytes) for the CTA's part of
    /// it.
    pub(crate) fn new(
        on: &mut PtxBuilder,
        cut: RowCut,
        kept: u32,
        [thread, rank, row, shared]: [PtxValue<u32>; 4],
        [logits, dlogits]: [PtxValue<u64>; 2],
    ) -> Self {
        let offset = on.mul_wide(row, cut.row_bytes());
        // Rows that are not whole blocks begin within a block that they share with the row before.
        let (mut starts, mut before) = ([logits, dlogits].map(|array| on.add(array, offset)), None);
        if !cut.is_aligned() {
            let low = on.truncate(starts[0]);
            let bytes = on.bits_and(low, BLOCK - 1);
            let wide = on.extend(bytes);
            starts = starts.map(|start| on.sub(start, wide));
            before = Some(bytes);
        }
        let total: PtxValue<u32> = match before {
            Some(before) => {
                let end = on.add(before, cut.row_bytes() + BLOCK - 1);
                on.shift_right(end, BLOCK.ilog2())
            }
            None => (cut.row_bytes() / BLOCK).into(),
        };
        // Each CTA has as many blocks in a run, the last of them fewer or none.
        let first = on.mul(rank, cut.blocks);
        let passed = on.min(first, total);
        let count = on.variable(total);
        let count = on.sub(count, passed);
        let count = on.min(count, cut.blocks);
        let bytes_before = on.mul_wide(first, BLOCK);
        let global = starts.map(|start| on.add(start, bytes_before));
        let own = on.shift_left(thread, BLOCK.ilog2());
        let own_wide = on.extend(own);
        let own_global = global.map(|base| on.add(base, own_wide));
        let own_shared = on.add(shared, own);
        let whole = before.map(|before| {
            // The row's first block, if it is here and shared with the row before; and the last.
            let zero: PtxValue<u32> = 0.into();
            let at_begin = on.equal(before, zero);
            let skipped: PtxValue<u32> = on.select(at_begin, 0, 1);
            let start = on.max(first, skipped);
            let end = on.add(before, cut.row_bytes());
            let end = on.shift_right(end, BLOCK.ilog2());
            let end = on.max(end, start);
            let length = on.sub(end, start);
            let [start, length] = [on.sub(start, first), length].map(|blocks| on.shift_left(blocks, BLOCK.ilog2()));
            [on.add(start, shared), length]
        });
        Self { cut, thread, before, first, count, shared, global, own_shared, own_global, whole, kept }
    }

    /// Elements that a trip takes, at most: half as many where what is kept leaves few registers for them.
    fn unrolled(&self) -> u32 {
        if self.kept * self.cut.logits.per_block() > MANY_KEPT { UNROLLED / 2 } else { UNROLLED }
    }

    /// Calls `body` on each of this thread's blocks: in a loop those that every thread has, then the rest.
    pub(crate) fn walk(
        &self,
        on: &mut PtxBuilder,
        along: WalkedArray,
        mut body: impl FnMut(&mut PtxBuilder, RowBlock),
    ) {
        let stride = self.cut.threads * BLOCK;
        // Blocks that every thread has are walked without a check; the last few that are kept are outside the loop,
        // so that registers can hold what belongs to them.
        let all = self.cut.fewest() / self.cut.threads;
        let not_kept = all - self.kept.min(all);
        let trips = not_kept.div_ceil(self.unrolled() / self.cut.logits.per_block());
        let unrolled = not_kept.checked_div(trips).unwrap_or(0);
        let array = |bases: [PtxValue<u64>; 2]| bases[(along as usize).min(1)];
        let mut at = |on: &mut PtxBuilder, shared, global, trip: u32, kept| {
            let whole = self.whole.filter(|_| along != WalkedArray::Shared).map(|whole| {
                let block = on.add(shared, trip * stride);
                is_within(on, block, whole)
            });
            let offset = trip * stride;
            let (shared, global) = (PtxAddress::Shared(shared, offset), PtxAddress::Global(global, offset));
            body(on, RowBlock { shared, global, whole, kept });
        };
        let (mut shared, mut global) = (self.own_shared, array(self.own_global));
        if trips > 1 {
            shared = on.variable(shared);
            if along != WalkedArray::Shared {
                global = on.variable(global);
            }
            let end = on.add(self.own_shared, trips * unrolled * stride);
            on.repeat(|on| {
                (0..unrolled).for_each(|trip| at(on, shared, global, trip, None));
                let next = on.add(shared, unrolled * stride);
                on.set(shared, next);
                if along != WalkedArray::Shared {
                    let next = on.add(global, u64::from(unrolled * stride));
                    on.set(global, next);
                }
                on.less(shared, end)
            });
        } else {
            (0..unrolled).for_each(|trip| at(on, shared, global, trip, None));
        }
        let looped = trips * unrolled;
        let from = if trips > 1 { 0 } else { looped };
        for trip in looped..all {
            at(on, shared, global, trip - looped + from, trip.checked_sub(not_kept).map(|kept| kept as usize));
        }
        // The remaining blocks belong to some of the threads only.
        for trip in all..self.cut.blocks.div_ceil(self.cut.threads) {
            let block = on.add(self.thread, trip * self.cut.threads);
            let here = on.less(block, self.count);
            on.when(here, |on| at(on, shared, global, trip - looped + from, None));
        }
    }

    /// Whether this thread has the block with byte `byte` of the row's blocks, and where that byte is from this CTA's part on.
    fn has(&self, on: &mut PtxBuilder, byte: PtxValue<u32>) -> (PtxValue<bool>, PtxValue<u32>) {
        let block = on.shift_right(byte, BLOCK.ilog2());
        let block = on.sub(block, self.first);
        let here = on.less(block, self.count);
        let thread = on.bits_and(block, self.cut.threads - 1);
        let own = on.equal(thread, self.thread);
        let before = on.shift_left(self.first, BLOCK.ilog2());
        (on.and(here, own), on.sub(byte, before))
    }

    /// Calls `body`, if this thread has it, on every element of the row's first and last block, where these are shared with other rows:
    /// on where it is from this CTA's part on, and whether it is this row's.
    fn edges(&self, on: &mut PtxBuilder, mut body: impl FnMut(&mut PtxBuilder, PtxValue<u32>, PtxValue<bool>)) {
        let (Some(before), Some(whole)) = (self.before, self.whole) else { return };
        let end = on.add(before, self.cut.row_bytes() - 1);
        let zero = on.variable(0);
        // The first and the last block, if other rows have a part of them, are handled element by element.
        for byte in [zero, end] {
            let (own, at) = self.has(on, byte);
            let start = on.bits_and(at, !(BLOCK - 1));
            let block = on.add(self.shared, start);
            let whole = is_within(on, block, whole);
            let shared = on.not(whole);
            let own = on.and(own, shared);
            let first = on.shift_left(self.first, BLOCK.ilog2());
            on.when(own, |on| {
                for element in 0..self.cut.logits.per_block() {
                    let at = on.add(start, element * self.cut.logits.size());
                    let of_row = on.add(at, first);
                    let of_row = on.sub(of_row, before);
                    let inside = on.less(of_row, self.cut.row_bytes());
                    body(on, at, inside);
                }
            });
        }
    }

    fn shared_at(&self, on: &mut PtxBuilder, bytes: PtxValue<u32>) -> PtxAddress {
        PtxAddress::Shared(on.add(self.shared, bytes), 0)
    }

    fn global_at(&self, on: &mut PtxBuilder, along: WalkedArray, bytes: PtxValue<u32>) -> PtxAddress {
        let bytes = on.extend(bytes);
        PtxAddress::Global(on.add(self.global[along as usize], bytes), 0)
    }

    /// Copies the logits in. They are there after [`wait_for_copies`](PtxBuilder::wait_for_copies).
    pub(crate) fn copy_in(&self, on: &mut PtxBuilder) {
        self.walk(on, WalkedArray::Logits, |on, block| match block.whole {
            Some(whole) => on.when(whole, |on| on.copy_16(block.shared, block.global)),
            None => on.copy_16(block.shared, block.global),
        });
        self.edges(on, |on, at, inside| {
            let to = self.shared_at(on, at);
            on.when(inside, |on| {
                let from = self.global_at(on, WalkedArray::Logits, at);
                self.cut.logits.copy(on, to, from);
            });
            let outside = on.not(inside);
            on.when(outside, |on| self.cut.logits.store(on, to, f32::NEG_INFINITY));
        });
    }

    /// Writes dlogits, of each block what `body` makes of it.
    pub(crate) fn write(
        &self,
        on: &mut PtxBuilder,
        mut body: impl FnMut(&mut PtxBuilder, RowBlock) -> [PtxValue<u32>; 4],
    ) {
        self.walk(on, WalkedArray::Dlogits, |on, block| {
            let words = body(on, block);
            let Some(whole) = block.whole else {
                on.store_all(block.global, words);
                return;
            };
            on.when(whole, |on| on.store_all(block.global, words));
            let shared = on.not(whole);
            on.when(shared, |on| on.store_all(block.shared, words));
        });
        self.edges(on, |on, at, inside| {
            on.when(inside, |on| {
                let (from, to) = (self.shared_at(on, at), self.global_at(on, WalkedArray::Dlogits, at));
                self.cut.logits.copy(on, to, from);
            });
        });
    }

    /// The column of a block's first element: of the row's first block, where that is shared with the row before, one before 0.
    pub(crate) fn first_column(&self, on: &mut PtxBuilder, block: RowBlock) -> PtxValue<u32> {
        let PtxAddress::Shared(base, offset) = block.shared else {
            unreachable!("a row's blocks are in shared memory")
        };
        let from = on.sub(base, self.shared);
        let before = on.shift_left(self.first, BLOCK.ilog2());
        let byte = on.add(from, before);
        let byte = on.add(byte, offset);
        let byte = self.before.map_or(byte, |before| on.sub(byte, before));
        // Bytes before the row stay below 0 when they are counted as elements.
        on.shift_right_signed(byte, self.cut.logits.size().ilog2())
    }

    /// Returns which elements of a block whose first column is `first` belong to another row; `None` if none can.
    pub(crate) fn foreign_elements(&self, on: &mut PtxBuilder, first: PtxValue<u32>) -> Option<Vec<PtxValue<bool>>> {
        self.before?;
        let elements = 0..self.cut.logits.per_block();
        let of_others = elements.map(|element| {
            let column = on.add(first, element);
            let inside = on.less(column, self.cut.vocab);
            on.not(inside)
        });
        Some(of_others.collect())
    }

    /// Whether every block begins at a multiple of its elements.
    pub(crate) fn is_aligned(&self) -> bool {
        self.before.is_none()
    }

    /// Returns the position of column `id`, and whether this thread has it.
    pub(crate) fn find(&self, on: &mut PtxBuilder, id: PtxValue<u32>) -> RowColumn {
        let bytes = on.shift_left(id, self.cut.logits.size().ilog2());
        let byte = self.before.map_or(bytes, |before| on.add(bytes, before));
        let (own, at) = self.has(on, byte);
        RowColumn { own, at }
    }

    /// Returns the address of a column in shared memory.
    pub(crate) fn shared_of(&self, on: &mut PtxBuilder, target: RowColumn) -> PtxAddress {
        self.shared_at(on, target.at)
    }

    /// And that of its dlogit.
    pub(crate) fn global_of(&self, on: &mut PtxBuilder, target: RowColumn) -> PtxAddress {
        self.global_at(on, WalkedArray::Dlogits, target.at)
    }
}

/// Whether a block lies in the stretch of so many bytes from where it starts.
fn is_within(on: &mut PtxBuilder, block: PtxValue<u32>, [start, length]: [PtxValue<u32>; 2]) -> PtxValue<bool> {
    let place = on.sub(block, start);
    on.less(place, length)
}

/// A column of this row.
#[derive(Clone, Copy)]
pub(crate) struct RowColumn {
    /// Whether this thread has it.
    pub(crate) own: PtxValue<bool>,
    /// The byte offset from the begin of this CTA's part.
    at: PtxValue<u32>,
}
