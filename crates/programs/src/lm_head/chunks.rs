//! A device's tokens by chunks, and the loops over them.

use std::mem;
use std::ops::{Range, RangeInclusive};

use assay_core::device_dtype::DeviceDtype;

use crate::mesh::MeshAxis;
use crate::program::Program;
use assay_tile::stablehlo::{Fold, HloComparison, HloType, HloValue};

/// Bytes of a gradient that are summed over devices at a time: a quarter of it, within these. A collective has its result beside what
/// it sums, so that what is held twice follows the head's size.
const SUM_BYTES: RangeInclusive<usize> = 32_000_000..=640_000_000;

/// Rows of a chunk, and of a block of the sum, are a multiple of it: the rows of an f32 register.
pub(super) const CHUNK_ROWS: usize = 8;

/// The number of blocks, at most, in which a gradient is summed over devices.
const MOST_BLOCKS: usize = 16;

/// Registers of columns that a part of a scattered gradient is a multiple of: libtpu makes of the reduce-scatter of 1187 registers an
/// all-reduce of all, and a slice.
pub(super) const SCATTERED_REGISTERS: usize = 8;

/// A device's tokens in one line, or of those of several devices a line each, cut into chunks of as many each.
#[derive(Clone, Copy)]
pub(super) struct Chunks {
    /// The number of tokens `b·t` of all lines.
    pub(super) tokens: usize,
    /// The number of lines `n`.
    pub(super) parts: usize,
    /// The number of rows of a chunk in each line.
    pub(super) rows: usize,
    /// `N`, of all chunks, in each line.
    pub(super) padded: usize,
    /// The bytes of the gradient that are summed over devices at a time.
    pub(super) sum_bytes: Option<usize>,
    /// Columns of a register of the memory.
    pub(super) register: usize,
}

impl Chunks {
    /// Returns the number of tokens of a line.
    pub(super) fn part(self) -> usize {
        self.tokens.div_ceil(self.parts)
    }

    /// Rows of a chunk, of all lines.
    pub(super) fn all_rows(self) -> usize {
        self.parts * self.rows
    }

    /// `[b,t]` as `[n,N]`, with 0 behind; a scalar as it is.
    pub(super) fn in_line(self, on: &mut Program, array: HloValue) -> HloValue {
        if on.builder.type_of(array).shape.is_empty() {
            return array;
        }
        // The tokens are padded twice: to lines of equal length, and each line to whole chunks.
        let line = on.builder.reshape(array, &[1, self.tokens]);
        let line = on.filled(line, &[1, self.parts * self.part()]);
        let lines = on.builder.reshape(line, &[self.parts, self.part()]);
        on.filled(lines, &[self.parts, self.padded])
    }

    /// Returns lines `[n,N]` as `[b,t]`, without the padding.
    pub(super) fn in_rows(self, on: &mut Program, lines: HloValue) -> HloValue {
        let [b, t, _] = on.local;
        let lines = on.builder.slice(lines, &[0, 0], &[self.parts, self.part()]);
        let line = on.builder.reshape(lines, &[1, self.parts * self.part()]);
        let line = on.builder.slice(line, &[0, 0], &[1, self.tokens]);
        on.builder.reshape(line, &[b, t])
    }

    /// Returns zeros `[n,N]`, to be filled chunk by chunk.
    pub(super) fn empty(self, on: &mut Program, element: DeviceDtype) -> HloValue {
        on.builder.constant(0.0, HloType::new(element, &[self.parts, self.padded]))
    }

    /// Returns this device's hidden states as `[N,h]`, padded with zeros.
    pub(super) fn states(self, on: &mut Program, hidden: HloValue) -> HloValue {
        let shape = on.builder.type_of(hidden).shape.clone();
        let width = shape[shape.len() - 1];
        let line = on.builder.reshape(hidden, &[self.part(), width]);
        on.filled(line, &[self.padded, width])
    }

    /// The hidden states of the chunk from row `first` of `states` on, of all devices that have some of them, `[c,h]`.
    pub(super) fn hidden(self, on: &mut Program, states: HloValue, first: HloValue) -> HloValue {
        let start = on.at_row(first);
        let width = on.builder.type_of(states).shape[1];
        let hidden = on.builder.dynamic_slice(states, &start, &[self.rows, width]);
        if self.parts > 1 { on.gathered(&[MeshAxis::Vocab], hidden) } else { hidden }
    }

    /// The chunk of `[n,N]` from `first` on, `[1,c]`; a scalar as it is.
    pub(super) fn cut(self, on: &mut Program, lines: HloValue, first: HloValue) -> HloValue {
        if on.builder.type_of(lines).shape.is_empty() {
            return lines;
        }
        let start = on.at_column(first);
        let part = on.builder.dynamic_slice(lines, &start, &[self.parts, self.rows]);
        on.builder.reshape(part, &[1, self.all_rows()])
    }

    /// `[n,N]` with a chunk of it, `[1,c]`, written at `first`.
    pub(super) fn put(self, on: &mut Program, lines: HloValue, chunk: HloValue, first: HloValue) -> HloValue {
        let start = on.at_column(first);
        let chunk = on.builder.reshape(chunk, &[self.parts, self.rows]);
        on.builder.dynamic_update_slice(lines, chunk, &start)
    }

    /// The columns of `[h,v]` in f32 that are scattered at a time: whole registers as [`SCATTERED_REGISTERS`] says, but for what is left.
    pub(super) fn parts_of_columns(self, width: usize, vocab: usize) -> Vec<Range<usize>> {
        // About as many bytes as are summed at a time, but in at most MOST_BLOCKS parts of whole registers.
        let unit = SCATTERED_REGISTERS * self.register;
        let column = width * DeviceDtype::F32.size();
        let bytes = self.sum_bytes.unwrap_or(0).min(*SUM_BYTES.end());
        let columns = (bytes / column).max(vocab / MOST_BLOCKS).max(1).next_multiple_of(unit);
        let whole = vocab / unit * unit;
        let parts = (0..whole).step_by(columns).map(|from| from..(from + columns).min(whole));
        parts.chain((whole < vocab).then_some(whole..vocab)).collect()
    }
}

impl Program {
    /// Returns the start indices of the rows of a matrix from `first` on.
    pub(super) fn at_row(&mut self, first: HloValue) -> [HloValue; 2] {
        [first, self.builder.constant(0.0, HloType::new(DeviceDtype::I32, &[]))]
    }

    /// Returns the start indices of the columns of a matrix from `first` on.
    pub(super) fn at_column(&mut self, first: HloValue) -> [HloValue; 2] {
        let [first, zero] = self.at_row(first);
        [zero, first]
    }

    /// A number of rows or columns.
    pub(super) fn index(&mut self, x: usize) -> HloValue {
        self.builder.constant(x as f64, HloType::new(DeviceDtype::I32, &[]))
    }

    /// An array with 0 behind, up to `shape`.
    pub(super) fn filled(&mut self, array: HloValue, shape: &[usize]) -> HloValue {
        let element = self.builder.type_of(array).element;
        if self.builder.type_of(array).shape == shape {
            return array;
        }
        let zero = self.builder.constant(0.0, HloType::new(element, &[]));
        self.builder.pad(array, zero, shape)
    }

    /// `[n,h]` with 0 behind, so that `h` parts evenly over the devices that have rows of their own.
    pub(super) fn divisible(&mut self, hidden: HloValue) -> HloValue {
        let [rows, width] = self.builder.type_of(hidden).shape[..] else { unreachable!("hidden states in line") };
        let devices = self.mesh.batch * self.mesh.tokens;
        self.filled(hidden, &[rows, width.next_multiple_of(devices)])
    }

    /// Returns the arrays of all devices along `axes`, one after another along the first axis.
    pub(super) fn gathered(&mut self, axes: &[MeshAxis], a: HloValue) -> HloValue {
        self.builder.all_gather(a, 0, &self.mesh.groups(axes))
    }

    /// Returns this device's part, along the first axis, of the sum over the devices along `axes`.
    pub(super) fn scattered(&mut self, axes: &[MeshAxis], a: HloValue) -> HloValue {
        self.builder.reduce_scatter(a, 0, &self.mesh.groups(axes))
    }

    /// Calls `write` with the program's extents set to those of one chunk.
    pub(super) fn in_chunk<R>(&mut self, chunks: Chunks, write: impl FnOnce(&mut Program) -> R) -> R {
        let [.., v] = self.local;
        let all = mem::replace(&mut self.local, [1, chunks.all_rows(), v]);
        let written = write(self);
        self.local = all;
        written
    }

    /// Goes on from `carried` with `body` for the first row of each chunk before row `end`.
    pub(super) fn for_each_chunk(
        &mut self,
        chunks: Chunks,
        end: usize,
        carried: &[HloValue],
        body: impl FnOnce(&mut Program, HloValue, &[HloValue]) -> Vec<HloValue>,
    ) -> Vec<HloValue> {
        let index = HloType::new(DeviceDtype::I32, &[]);
        let local = [1, chunks.all_rows(), self.local[2]];
        let (mesh, vocab) = (self.mesh, self.vocab);
        // The first row of the chunk is carried as the loop's index.
        let carried = [&[self.builder.constant(0.0, index.clone())], carried].concat();
        let results = self.builder.while_loop(
            &carried,
            |builder, carried| {
                let end = builder.constant(end as f64, index.clone());
                builder.compare(HloComparison::Less, carried[0], end)
            },
            |builder, carried| {
                let mut on = Program { builder: mem::take(builder), local, mesh, vocab, packed: None };
                let next = body(&mut on, carried[0], &carried[1..]);
                let step = on.builder.constant(chunks.rows as f64, index.clone());
                let following = on.builder.add(carried[0], step);
                *builder = on.builder;
                [&[following], &next[..]].concat()
            },
        );
        results[1..].to_vec()
    }

    /// `[m,k]` in f32 summed over the devices that hold other rows of the batch, about `bytes` at a time, or a quarter of it within
    /// [`SUM_BYTES`]. Blocks begin with a register, or XLA puts them back three times as slowly.
    pub(super) fn over_rows(&mut self, mut array: HloValue, bytes: Option<usize>) -> HloValue {
        let axes = MeshAxis::ROWS;
        let [rows, width] = self.builder.type_of(array).shape[..] else { unreachable!("a head has two axes") };
        // Summing in blocks bounds the memory of the collective's result, which exists in addition to its operand.
        let all = rows * width * DeviceDtype::F32.size();
        let bytes = bytes.unwrap_or((all / 4).clamp(*SUM_BYTES.start(), *SUM_BYTES.end()));
        let blocks = all.div_ceil(bytes.max(1)).min(MOST_BLOCKS);
        let block = rows.div_ceil(blocks).next_multiple_of(CHUNK_ROWS);
        if self.mesh.batch * self.mesh.tokens == 1 || block >= rows {
            return self.over(&axes, Fold::Add, array);
        }
        for first in (0..rows).step_by(block) {
            // One after another: sums side by side would take their memory together.
            array = self.builder.barrier(array);
            let part = self.builder.slice(array, &[first, 0], &[block.min(rows - first), width]);
            let part = self.over(&axes, Fold::Add, part);
            let first = self.builder.constant(first as f64, HloType::new(DeviceDtype::I32, &[]));
            let start = self.at_row(first);
            array = self.builder.dynamic_update_slice(array, part, &start);
        }
        array
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fewer columns than blocks, and a gradient of which a sixteenth is more than is summed at a time.
    #[test]
    fn lm_head_chunks_cover_any_vocabulary_in_blocks_and_a_rest() {
        let chunks = |sum_bytes| Chunks { tokens: 8, parts: 1, rows: 8, padded: 8, sum_bytes, register: 128 };
        for (width, vocab) in [(8, 1), (8, 7), (8, 15), (64, 1024), (896, 151_936), (16_384, 262_144)] {
            for sum_bytes in [None, Some(1), Some(100_000_000), Some(usize::MAX)] {
                let parts = chunks(sum_bytes).parts_of_columns(width, vocab);
                let ends =
                    parts.iter().scan(0, |end, part| Some((part.start == std::mem::replace(end, part.end), *end)));
                assert!(ends.clone().all(|(adjoins, _)| adjoins), "{width} × {vocab}: {parts:?}");
                assert_eq!(ends.last().map(|(_, end)| end), Some(vocab), "{width} × {vocab}");
                assert!(parts.len() <= MOST_BLOCKS + 1, "{width} × {vocab}: {parts:?}");
            }
        }
    }
}
