//! Kernels around those that read logits, for a framework that calls them all one after another: they prepare a batch on the device, so
//! that a step launches a handful of kernels and not hundreds of small operations.
//!
//! ```text
//! grpo_count    ids, mask, cu_seqlens  ─▶ targets, which tokens count, each sequence's place and its count of tokens
//! grpo_tokens   those and the inputs   ─▶ what grpo_one_pass is given of each token
//! grpo_losses   statistics of rows     ─▶ losses, metrics and what a gradient is made of      (see [losses](super::losses))
//! grpo_sums     sums of sequences      ─▶ the loss and the means
//! ```
//!
//! A sequence has a CTA, and all tokens that belong to no sequence have one more. A token whose mask, id, selection or temperature is
//! invalid counts as NaN: its loss is NaN and so is its gradient, and nothing else is.

mod count;
mod sums;
mod tokens;
mod weights;

pub(crate) use count::count;
pub(crate) use sums::{COLUMNS as SUMS, sums};
pub(super) use tokens::entropy_factor;
pub(crate) use tokens::tokens;
pub(super) use weights::{FOLDS as FOLDS_OF_WEIGHTS, TermFactors};

use super::folds::CtaFolds;
use super::logits::SCALAR;
use assay_algebra::structure::{SpecNumber, Structure, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxAddress, PtxBuilder, PtxKernel, PtxLaunch, PtxTarget, PtxValue};

/// The extent of a batch that an array or a grid grows with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchExtent {
    /// A single one for the whole batch.
    Batch,
    /// One for each token of the batch.
    Token,
    /// One for each sequence of the batch.
    Sequence,
    /// The sequences, and one for the tokens that belong to none.
    SequenceAndRest,
}

/// A kernel that was written for one token or one sequence, and how its arrays and its grid grow.
pub struct BatchKernel {
    /// The kernel's text and its launch sizes.
    pub ptx: PtxKernel,
    /// The extent that each parameter grows with, in order.
    pub arrays: Vec<BatchExtent>,
    /// The extent that the grid grows with.
    pub grid: BatchExtent,
}

/// The choices of a batch that decide the text of its kernels, beside the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an array's form, read by its name")]
pub struct BatchForm {
    /// Whether each token has an advantage of its own, not each sequence.
    pub token_advantages: bool,
    /// Whether each token has a temperature of its own, not each sequence, where temperatures are given.
    pub token_temperatures: bool,
    /// Whether vocabulary entries have a bias.
    pub bias: bool,
    /// Whether an id outside the support is valid.
    pub keep_sampled: bool,
}

/// The numbers that the kernels of a batch are given, in order.
pub fn batch_numbers(structure: Structure) -> Vec<SpecNumber> {
    let mut numbers = structure.program_numbers();
    if !numbers.contains(&SpecNumber::LogpRate) {
        numbers.push(SpecNumber::LogpRate);
    }
    numbers
}

/// The fewest and the most threads of a CTA that walks a sequence.
const THREADS: [u32; 2] = [32, 512];

/// Returns the number of threads, a power of two, for CTAs that walk so many elements each.
pub(crate) fn threads_for(elements: usize) -> u32 {
    let [fewest, most] = THREADS;
    (elements.clamp(1, most as usize) as u32).next_power_of_two().max(fewest)
}

/// A kernel being written, with the extents of its arrays.
pub(super) struct BatchWriter {
    pub(super) on: PtxBuilder,
    pub(super) structure: Structure,
    threads: u32,
    arrays: Vec<BatchExtent>,
}

impl BatchWriter {
    pub(super) fn new(name: &str, target: PtxTarget, structure: Structure, threads: u32) -> Self {
        Self { on: PtxBuilder::new(name, target), structure, threads, arrays: Vec::new() }
    }

    /// An array that is read, of `columns` elements for each of its extent.
    pub(super) fn input(&mut self, name: &str, dtype: DeviceDtype, per: BatchExtent, columns: usize) -> BatchArray {
        self.arrays.push(per);
        let stride = columns * dtype.size();
        BatchArray { base: self.on.input_aligned(alignment(stride), name, dtype, &[columns]), stride: stride as u32 }
    }

    /// An array that is written.
    pub(super) fn output(&mut self, name: &str, dtype: DeviceDtype, per: BatchExtent, columns: usize) -> BatchArray {
        self.arrays.push(per);
        let stride = columns * dtype.size();
        BatchArray { base: self.on.output_aligned(alignment(stride), name, dtype, &[columns]), stride: stride as u32 }
    }

    pub(super) fn f32s(&mut self, name: &str, per: BatchExtent) -> BatchArray {
        self.input(name, DeviceDtype::F32, per, 1)
    }

    /// An array of one element for each vocabulary entry.
    fn vocabulary(&mut self, name: &str, vocab: usize) -> BatchArray {
        self.arrays.push(BatchExtent::Batch);
        let base = self.on.input_aligned(SCALAR, name, DeviceDtype::F32, &[vocab]);
        BatchArray { base, stride: DeviceDtype::F32.size() as u32 }
    }

    pub(super) fn finish(self, grid: BatchExtent) -> BatchKernel {
        let launch = PtxLaunch { grid: [1; 3], block: [self.threads, 1, 1], cluster: 1, least_resident: 1 };
        BatchKernel { ptx: self.on.finish(launch), arrays: self.arrays, grid }
    }
}

/// The alignment of an array whose elements are of so many bytes: no access is larger than an element, nor than 16 bytes.
fn alignment(element: usize) -> u64 {
    let powers = [16, 8, 4];
    powers.into_iter().find(|&power| element.is_multiple_of(power)).unwrap_or(1) as u64
}

/// An array of global memory.
#[derive(Clone, Copy)]
pub(super) struct BatchArray {
    base: PtxValue<u64>,
    /// Bytes from element to element.
    stride: u32,
}

impl BatchArray {
    /// The address of an element.
    pub(super) fn at(self, on: &mut PtxBuilder, index: PtxValue<u32>) -> PtxAddress {
        let offset = on.mul_wide(index, self.stride);
        PtxAddress::Global(on.add(self.base, offset), 0)
    }

    /// The address of the first.
    pub(super) fn first(self) -> PtxAddress {
        PtxAddress::Global(self.base, 0)
    }

    pub(super) fn load(self, on: &mut PtxBuilder, index: PtxValue<u32>) -> PtxValue<f32> {
        let from = self.at(on, index);
        on.load(from)
    }
}

/// A thread of a CTA, and the sums over all of its threads.
pub(super) struct CtaThreads {
    in_cta: u32,
    pub(super) thread: PtxValue<u32>,
    /// The number of the CTA.
    pub(super) cta: PtxValue<u32>,
    folds: CtaFolds,
    /// Sums so far, and at most.
    summed: [u32; 2],
}

impl CtaThreads {
    /// Threads of a CTA that sums at most `most` times.
    pub(super) fn new(on: &mut PtxBuilder, threads: u32, most: u32) -> Self {
        let (thread, cta) = (on.thread(), on.cta());
        let folds = CtaFolds::new(on, [threads, most], thread);
        Self { in_cta: threads, thread, cta, folds, summed: [0, most] }
    }

    /// The sum of `value` over all threads, the same in each.
    pub(super) fn sum(&mut self, on: &mut PtxBuilder, value: PtxValue<f32>) -> PtxValue<f32> {
        let [which, most] = self.summed;
        assert!(which < most, "a CTA sums no more often than it has room for");
        self.summed[0] += 1;
        self.folds.fold(on, which, value, PtxBuilder::add)
    }

    /// Calls `body` with `first`, `first + 1`, … below `end`, each in one thread.
    pub(super) fn each(
        &self,
        on: &mut PtxBuilder,
        [first, end]: [PtxValue<u32>; 2],
        body: impl FnOnce(&mut PtxBuilder, PtxValue<u32>),
    ) {
        let start = on.add(self.thread, first);
        let index = on.variable(start);
        let some = on.less(index, end);
        on.when(some, |on| {
            on.repeat(|on| {
                body(on, index);
                let next = on.add(index, self.in_cta);
                on.set(index, next);
                on.less(index, end)
            });
        });
    }

    pub(super) fn is_first(&self, on: &mut PtxBuilder) -> PtxValue<bool> {
        on.less(self.thread, 1)
    }
}

/// Places of the extents of a batch in the array `extents`, i32.
const TOKENS: u32 = 0;
const SEQUENCES: u32 = 1;
const VOCAB: u32 = 2;
/// The number of elements of the array `extents`.
pub(crate) const EXTENTS: usize = 3;

fn extent(on: &mut PtxBuilder, extents: BatchArray, which: u32) -> PtxValue<u32> {
    on.load(extents.first().plus(4 * which))
}

/// The sequence whose numbers a CTA reads: its own, or the last one for tokens that belong to none, whose loss is NaN whatever it reads.
fn owner(on: &mut PtxBuilder, cta: PtxValue<u32>, sequences: PtxValue<u32>) -> PtxValue<u32> {
    let last = on.sub(sequences, 1);
    on.min(cta, last)
}

/// `count`, or 1 if it is less; a NaN stays one.
fn at_least_one(on: &mut PtxBuilder, count: PtxValue<f32>) -> PtxValue<f32> {
    let is_more = on.less(PtxValue::from(1.0), count);
    let is_number = on.equal(count, count);
    // A NaN stays one.
    let fewest: PtxValue<f32> = on.select(is_number, 1.0, count);
    on.select(is_more, count, fewest)
}

/// The numbers of a spec in global memory.
#[derive(Clone)]
pub(super) struct NumberArray {
    array: BatchArray,
    order: Vec<SpecNumber>,
}

impl NumberArray {
    pub(super) fn declare(writer: &mut BatchWriter) -> Self {
        let order = batch_numbers(writer.structure);
        let array = writer.input("numbers", DeviceDtype::F32, BatchExtent::Batch, order.len());
        Self { array, order }
    }

    pub(super) fn load(&self, on: &mut PtxBuilder, number: SpecNumber) -> PtxValue<f32> {
        let place = self.order.iter().position(|&other| other == number);
        let place = place.unwrap_or_else(|| panic!("a batch is given no `{}`", number.name()));
        on.load(self.array.first().plus(4 * place as u32))
    }
}

/// The arrays that say which tokens a sequence has, written by [`count`].
#[derive(Clone, Copy)]
pub(super) struct SequenceArrays {
    extents: BatchArray,
    spans: BatchArray,
    counts: BatchArray,
    pub(super) counted: BatchArray,
}

impl SequenceArrays {
    pub(super) fn declare(writer: &mut BatchWriter) -> Self {
        Self {
            extents: writer.input("extents", DeviceDtype::I32, BatchExtent::Batch, EXTENTS),
            spans: writer.input("spans", DeviceDtype::I32, BatchExtent::SequenceAndRest, 2),
            counts: writer.f32s("counts", BatchExtent::SequenceAndRest),
            counted: writer.f32s("counted", BatchExtent::Token),
        }
    }

    /// The tokens of the CTA's sequence: the first, and one behind the last.
    pub(super) fn span(self, on: &mut PtxBuilder, sequence: PtxValue<u32>) -> [PtxValue<u32>; 2] {
        let from = self.spans.at(on, sequence);
        on.load_all(from)
    }

    /// The sequence whose numbers a CTA reads.
    pub(super) fn owner(self, on: &mut PtxBuilder, cta: PtxValue<u32>) -> PtxValue<u32> {
        let sequences = extent(on, self.extents, SEQUENCES);
        owner(on, cta, sequences)
    }

    /// Returns the number of tokens of the sequence that count.
    pub(super) fn count(self, on: &mut PtxBuilder, sequence: PtxValue<u32>) -> PtxValue<f32> {
        self.counts.load(on, sequence)
    }
}

/// The arrays of a batch that a token's loss reads beside its logits.
pub(super) struct InputArrays {
    advantages: BatchArray,
    token_advantages: bool,
    arrays: Vec<(TokenInput, BatchArray)>,
}

impl InputArrays {
    pub(super) fn declare(writer: &mut BatchWriter, form: BatchForm) -> Self {
        let per = if form.token_advantages { BatchExtent::Token } else { BatchExtent::Sequence };
        let advantages = writer.f32s("advantages", per);
        let inputs = writer.structure.inputs().into_iter();
        let arrays = inputs.map(|input| (input, writer.f32s(input.name(), BatchExtent::Token))).collect();
        Self { advantages, token_advantages: form.token_advantages, arrays }
    }

    pub(super) fn advantage(&self, on: &mut PtxBuilder, [token, sequence]: [PtxValue<u32>; 2]) -> PtxValue<f32> {
        self.advantages.load(on, if self.token_advantages { token } else { sequence })
    }

    /// The token's element of an array, if the structure reads it.
    pub(super) fn load(&self, on: &mut PtxBuilder, wanted: TokenInput, token: PtxValue<u32>) -> Option<PtxValue<f32>> {
        let (_, array) = self.arrays.iter().find(|(input, _)| *input == wanted)?;
        Some(array.load(on, token))
    }

    /// The token's element of the array of that name.
    pub(super) fn named(&self, on: &mut PtxBuilder, name: &str, token: PtxValue<u32>) -> Option<PtxValue<f32>> {
        let (_, array) = self.arrays.iter().find(|(input, _)| input.name() == name)?;
        Some(array.load(on, token))
    }
}
