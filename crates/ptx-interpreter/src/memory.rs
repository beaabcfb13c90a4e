//! Memory whose bytes record their last write and the reads since, so that races are found (a happens-before detector).
//!
//! Each thread has a clock, which counts the moments at which others could learn of its accesses. An access is identified
//! by its [`Epoch`]: thread and clock. A thread's vector clock says, for every thread of the cluster, up to which clock it
//! has learnt of that thread's accesses. An access happens before another if the thread of the other knows its epoch, or is
//! the same thread.

use std::ops::Range;

use super::PtxFault;

/// A thread of the grid in the upper half, its clock in the lower.
type Epoch = u64;

/// The epoch of bytes that are written before the kernel begins.
const BEGINNING: Epoch = 0;
/// The epoch of bytes that no thread has written.
const UNWRITTEN: Epoch = u64::MAX;
/// The clock of a copy under way, which no thread knows.
pub(super) const UNDER_WAY: u32 = u32::MAX;
/// The upper half of an epoch whose lower half is an index into [`CheckedMemory::many`].
const MANY: u64 = u32::MAX as u64 - 1;

/// The last write of a byte and the reads since.
#[derive(Clone, Copy)]
struct ByteHistory {
    write: Epoch,
    /// The last read since the write if its thread knows of all earlier ones; else an index of them all.
    read: Epoch,
    /// The instruction of the last write, by its number in the entry.
    write_at: u32,
    read_at: u32,
}

/// Reads or atomic operations of one byte that do not all know of each other.
#[derive(Clone)]
struct ConcurrentAccesses {
    cell: usize,
    atomic: bool,
    cluster: u32,
    /// An access by a cluster before this one, if any.
    other: Option<Epoch>,
    /// The clock of each thread's last access, or 0 if it has none.
    clocks: Vec<u32>,
}

/// An array in global memory, or the shared memory of a CTA.
pub(super) struct CheckedMemory {
    pub(super) bytes: Vec<u8>,
    cells: Vec<ByteHistory>,
    many: Vec<ConcurrentAccesses>,
    unused: Vec<usize>,
    /// Whether each byte was read as constant, through `ld.global.nc`.
    constant: Vec<bool>,
}

/// A thread that accesses memory, and the vector clock of what it knows.
#[derive(Clone, Copy)]
pub(super) struct Accessor<'a> {
    pub(super) cluster: u32,
    /// The number of the thread in its cluster.
    pub(super) thread: u32,
    pub(super) clock: u32,
    /// The clock of every thread of the cluster up to which this thread knows of its accesses.
    pub(super) known: &'a [u32],
    /// The number of the instruction in its entry.
    pub(super) at: u32,
}

/// The reason why an access is refused: an earlier access that nothing orders before it.
#[derive(Debug)]
pub(super) struct AccessConflict {
    pub(super) fault: PtxFault,
    pub(super) byte: usize,
    /// The other access: the thread in the grid, the instruction, and whether it wrote.
    pub(super) other: Option<(u32, u32, bool)>,
}

impl Accessor<'_> {
    fn first(&self) -> u32 {
        self.cluster * self.known.len() as u32
    }

    fn epoch(&self) -> Epoch {
        epoch_of(self.first() + self.thread, self.clock)
    }

    /// Whether this thread knows of a single access, one that is not [`MANY`].
    fn knows(&self, epoch: Epoch) -> bool {
        // Threads of other clusters are outside of the vector clock: their accesses are never known.
        let (thread, clock) = ((epoch >> 32) as u32, epoch as u32);
        if epoch == BEGINNING {
            return true;
        }
        let Some(&known) = thread.checked_sub(self.first()).and_then(|thread| self.known.get(thread as usize)) else {
            return false;
        };
        clock != UNDER_WAY && (thread - self.first() == self.thread || clock <= known)
    }
}

impl ConcurrentAccesses {
    /// Returns an epoch that represents the cluster's accesses to later clusters, which know of none of them.
    fn cluster_epoch(&self) -> Epoch {
        epoch_of(self.cluster * self.clocks.len() as u32, 1)
    }

    fn add(&mut self, by: &Accessor) {
        if self.cluster != by.cluster {
            self.other = Some(self.cluster_epoch());
            self.cluster = by.cluster;
        }
        // The clock of a copy under way is the largest: another read by the same thread does not end it.
        let clock = &mut self.clocks[by.thread as usize];
        *clock = by.clock.max(*clock);
    }

    /// Finds an access of which `by` does not know.
    fn unknown(&self, by: &Accessor) -> Option<Epoch> {
        if self.other.is_some() || self.cluster != by.cluster {
            return self.other.or(Some(self.cluster_epoch()));
        }
        let epochs = (by.first()..).zip(&self.clocks).map(|(thread, &clock)| epoch_of(thread, clock));
        epochs.filter(|&epoch| epoch as u32 != 0).find(|&epoch| !by.knows(epoch))
    }
}

fn epoch_of(thread: u32, clock: u32) -> Epoch {
    u64::from(thread) << 32 | u64::from(clock)
}

fn many_of(epoch: Epoch) -> Option<usize> {
    (epoch >> 32 == MANY).then_some(epoch as u32 as usize)
}

impl CheckedMemory {
    /// Creates memory that holds `bytes` before the kernel begins.
    pub(super) fn written(bytes: Vec<u8>) -> Self {
        Self::new(bytes, BEGINNING)
    }

    /// Creates memory that must be written before it is read.
    pub(super) fn unwritten(bytes: Vec<u8>) -> Self {
        Self::new(bytes, UNWRITTEN)
    }

    /// Marks bytes as not yet written, so that they must be written before they are read.
    pub(super) fn forget(&mut self, bytes: Range<usize>) {
        self.cells[bytes].iter_mut().for_each(|cell| cell.write = UNWRITTEN);
    }

    fn new(bytes: Vec<u8>, write: Epoch) -> Self {
        let cells = vec![ByteHistory { write, read: BEGINNING, write_at: 0, read_at: 0 }; bytes.len()];
        Self { bytes, cells, many: Vec::new(), unused: Vec::new(), constant: Vec::new() }
    }

    /// Counts the bytes that no thread has written, and finds the first of them.
    pub(super) fn never_written(&self) -> Option<(usize, usize)> {
        let first = self.cells.iter().position(|cell| cell.write == UNWRITTEN)?;
        Some((self.cells.iter().filter(|cell| cell.write == UNWRITTEN).count(), first))
    }

    /// Checks that `by` knows of the last write, and if it reads that there was one.
    fn check_write(&self, byte: usize, by: &Accessor, reads: bool) -> Result<(), AccessConflict> {
        let cell = &self.cells[byte];
        if cell.write == UNWRITTEN {
            return if reads {
                Err(AccessConflict { fault: PtxFault::Uninitialised, byte, other: None })
            } else {
                Ok(())
            };
        }
        if by.knows(cell.write) {
            return Ok(());
        }
        let fault = if cell.write as u32 == UNDER_WAY { PtxFault::NotCopied } else { PtxFault::Race };
        Err(AccessConflict { fault, byte, other: Some(((cell.write >> 32) as u32, cell.write_at, true)) })
    }

    /// Checks that `by` knows of all reads and atomic operations since the last write.
    fn check_reads(&self, byte: usize, by: &Accessor) -> Result<(), AccessConflict> {
        // A single read, or a set of them of which one suffices.
        let read = self.cells[byte].read;
        let unknown = match many_of(read) {
            Some(many) => self.many[many].unknown(by),
            None if by.knows(read) => None,
            None => Some(read),
        };
        let Some(epoch) = unknown else { return Ok(()) };
        let fault = if epoch as u32 == UNDER_WAY { PtxFault::NotCopied } else { PtxFault::Race };
        Err(AccessConflict { fault, byte, other: Some(((epoch >> 32) as u32, self.cells[byte].read_at, false)) })
    }

    fn forget_reads(&mut self, byte: usize) {
        if let Some(many) = many_of(self.cells[byte].read) {
            self.unused.push(many);
        }
        self.cells[byte].read = BEGINNING;
    }

    /// Replaces the single read of `byte` by a set of accesses, which starts with `before` unless that is the beginning.
    fn begin_many(&mut self, byte: usize, atomic: bool, before: Epoch, by: &Accessor) {
        // A read by an earlier cluster is remembered as such: no thread of this cluster knows of it.
        let thread = ((before >> 32) as u32).wrapping_sub(by.first()) as usize;
        let mut many = ConcurrentAccesses {
            cell: byte,
            atomic,
            cluster: by.cluster,
            other: None,
            clocks: vec![0; by.known.len()],
        };
        match many.clocks.get_mut(thread) {
            _ if before == BEGINNING => {}
            Some(clock) => *clock = before as u32,
            None => many.other = Some(before),
        }
        many.add(by);
        // Sets are reused: most bytes need one only for a short time.
        let at = if let Some(at) = self.unused.pop() {
            self.many[at] = many;
            at
        } else {
            self.many.push(many);
            self.many.len() - 1
        };
        self.cells[byte].read = MANY << 32 | at as u64;
    }

    /// Records that `by` reads `bytes` bytes from `from` on.
    pub(super) fn read(&mut self, from: usize, bytes: usize, by: &Accessor) -> Result<(), AccessConflict> {
        let epoch = by.epoch();
        for byte in from..from + bytes {
            // The last write must be known, or it races with this read.
            self.check_write(byte, by, true)?;
            let read = self.cells[byte].read;
            if read == epoch {
                continue;
            }
            match many_of(read) {
                // Atomic operations write too: a read must know of all of them, and then replaces them.
                Some(many) if self.many[many].atomic => {
                    self.check_reads(byte, by)?;
                    self.forget_reads(byte);
                    self.cells[byte].read = epoch;
                }
                Some(many) => self.many[many].add(by),
                // Who knows of the last read knows of all before it: one epoch suffices. This is the common case.
                None if by.knows(read) => self.cells[byte].read = epoch,
                None => self.begin_many(byte, false, read, by),
            }
            self.cells[byte].read_at = by.at;
        }
        Ok(())
    }

    /// Records that `by` reads bytes that no thread may write during the whole run.
    pub(super) fn read_constant(&mut self, from: usize, bytes: usize, by: &Accessor) -> Result<(), AccessConflict> {
        self.constant.resize(self.bytes.len(), false);
        for byte in from..from + bytes {
            let cell = &self.cells[byte];
            if cell.write != BEGINNING && cell.write != UNWRITTEN {
                return Err(AccessConflict {
                    fault: PtxFault::Undefined,
                    byte,
                    other: Some(((cell.write >> 32) as u32, cell.write_at, true)),
                });
            }
            self.constant[byte] = true;
        }
        self.read(from, bytes, by)
    }

    /// Records that `by` writes `bytes` bytes from `from` on.
    pub(super) fn write(&mut self, from: usize, bytes: usize, by: &Accessor) -> Result<(), AccessConflict> {
        let epoch = by.epoch();
        for byte in from..from + bytes {
            // A write must know of the last write and of every read since: it is then the only access to remember.
            self.check_write(byte, by, false)?;
            self.check_reads(byte, by)?;
            if self.constant.get(byte).is_some_and(|&constant| constant) {
                let read = self.cells[byte].read;
                let thread = if many_of(read).is_some() { by.first() } else { (read >> 32) as u32 };
                let other = Some((thread, self.cells[byte].read_at, false));
                return Err(AccessConflict { fault: PtxFault::Undefined, byte, other });
            }
            self.forget_reads(byte);
            self.cells[byte].write = epoch;
            self.cells[byte].write_at = by.at;
        }
        Ok(())
    }

    /// Records a write by `by` that becomes known as the agent's, at the agent's clock.
    pub(super) fn write_as(
        &mut self,
        from: usize,
        bytes: usize,
        by: &Accessor,
        (agent, clock): (u32, u32),
    ) -> Result<(), AccessConflict> {
        self.write(from, bytes, by)?;
        for cell in &mut self.cells[from..from + bytes] {
            cell.write = epoch_of(by.first() + agent, clock);
        }
        Ok(())
    }

    /// Records an atomic read and write by `by`; atomic operations do not conflict with each other.
    pub(super) fn read_and_write(&mut self, from: usize, bytes: usize, by: &Accessor) -> Result<(), AccessConflict> {
        for byte in from..from + bytes {
            self.check_write(byte, by, true)?;
            match many_of(self.cells[byte].read) {
                // Atomic operations need not know of each other, only of the write and the reads before them.
                Some(many) if self.many[many].atomic => self.many[many].add(by),
                _ => {
                    self.check_reads(byte, by)?;
                    self.forget_reads(byte);
                    self.begin_many(byte, true, BEGINNING, by);
                }
            }
            self.cells[byte].read_at = by.at;
        }
        Ok(())
    }

    /// Records that `by` has waited for its copy into these bytes.
    pub(super) fn copied_to(&mut self, from: usize, bytes: usize, by: &Accessor) {
        let under_way = Accessor { clock: UNDER_WAY, ..*by }.epoch();
        for cell in &mut self.cells[from..from + bytes] {
            if cell.write == under_way {
                cell.write = by.epoch();
            }
        }
    }

    /// Records that `by` has waited for its copy out of these bytes.
    pub(super) fn copied_from(&mut self, from: usize, bytes: usize, by: &Accessor) {
        let under_way = Accessor { clock: UNDER_WAY, ..*by }.epoch();
        for cell in &mut self.cells[from..from + bytes] {
            if cell.read == under_way {
                cell.read = by.epoch();
            } else if let Some(many) = many_of(cell.read) {
                let clock = &mut self.many[many].clocks[by.thread as usize];
                if *clock == UNDER_WAY {
                    *clock = by.clock;
                }
            }
        }
    }

    /// Ends a cluster: one epoch replaces the sets of its reads, since later clusters know of none of them.
    pub(super) fn end_cluster(&mut self) {
        for at in 0..self.many.len() {
            let many = &self.many[at];
            if !many.atomic && self.cells[many.cell].read == MANY << 32 | at as u64 {
                self.cells[many.cell].read = many.cluster_epoch();
                self.unused.push(at);
                self.many[at].clocks = Vec::new();
            }
        }
    }
}
