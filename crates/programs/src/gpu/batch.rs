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

use super::row::{SCALAR, over_lanes};
use assay_algebra::structure::{Denominator, Input, Number, Structure, Temperature, Tokens};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{Address, Builder, Launch, PtxKernel, Target, Value};

use crate::one_pass::{Given, given_columns, numbers as one_pass_numbers, width};

/// The extent of a batch that an array or a grid grows with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// None: there is one.
    Batch,
    /// The tokens.
    Token,
    /// The sequences.
    Sequence,
    /// The sequences, and one for the tokens that belong to none.
    SequenceAndRest,
}

/// A kernel that was written for one token or one sequence, and how its arrays and its grid grow.
pub struct BatchKernel {
    /// The kernel.
    pub ptx: PtxKernel,
    /// The extent that each parameter grows with, in order.
    pub arrays: Vec<Per>,
    /// The extent that the grid grows with.
    pub grid: Per,
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
pub fn batch_numbers(structure: Structure) -> Vec<Number> {
    let mut numbers = structure.program_numbers();
    if !numbers.contains(&Number::LogpRate) {
        numbers.push(Number::LogpRate);
    }
    numbers
}

/// The fewest and the most threads of a CTA that walks a sequence.
const THREADS: [u32; 2] = [32, 512];

/// How many threads suit CTAs that walk so many elements each: a power of two.
pub(crate) fn threads_for(elements: usize) -> u32 {
    let [fewest, most] = THREADS;
    (elements.clamp(1, most as usize) as u32).next_power_of_two().max(fewest)
}

/// Floats of each sequence's sums.
pub(super) const SUMS: usize = 8;

/// A kernel being written, with the extents of its arrays.
pub(super) struct Writer {
    pub(super) on: Builder,
    pub(super) structure: Structure,
    threads: u32,
    arrays: Vec<Per>,
}

impl Writer {
    pub(super) fn new(name: &str, target: Target, structure: Structure, threads: u32) -> Self {
        Self { on: Builder::new(name, target), structure, threads, arrays: Vec::new() }
    }

    /// An array that is read, of `columns` elements for each of its extent.
    pub(super) fn input(&mut self, name: &str, dtype: DeviceDtype, per: Per, columns: usize) -> Array {
        self.arrays.push(per);
        let stride = columns * dtype.size();
        Array { base: self.on.input_aligned(alignment(stride), name, dtype, &[columns]), stride: stride as u32 }
    }

    /// An array that is written.
    pub(super) fn output(&mut self, name: &str, dtype: DeviceDtype, per: Per, columns: usize) -> Array {
        self.arrays.push(per);
        let stride = columns * dtype.size();
        Array { base: self.on.output_aligned(alignment(stride), name, dtype, &[columns]), stride: stride as u32 }
    }

    pub(super) fn f32s(&mut self, name: &str, per: Per) -> Array {
        self.input(name, DeviceDtype::F32, per, 1)
    }

    /// An array of one element for each vocabulary entry.
    fn vocabulary(&mut self, name: &str, vocab: usize) -> Array {
        self.arrays.push(Per::Batch);
        let base = self.on.input_aligned(SCALAR, name, DeviceDtype::F32, &[vocab]);
        Array { base, stride: DeviceDtype::F32.size() as u32 }
    }

    pub(super) fn finish(self, grid: Per) -> BatchKernel {
        let launch = Launch { grid: [1; 3], block: [self.threads, 1, 1], cluster: 1, least_resident: 1 };
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
pub(super) struct Array {
    base: Value<u64>,
    /// Bytes from element to element.
    stride: u32,
}

impl Array {
    /// The address of an element.
    pub(super) fn at(self, on: &mut Builder, index: Value<u32>) -> Address {
        let offset = on.mul_wide(index, self.stride);
        Address::Global(on.add(self.base, offset), 0)
    }

    /// The address of the first.
    pub(super) fn first(self) -> Address {
        Address::Global(self.base, 0)
    }

    pub(super) fn load(self, on: &mut Builder, index: Value<u32>) -> Value<f32> {
        let from = self.at(on, index);
        on.load(from)
    }
}

/// A thread of a CTA, and what the CTA's threads fold over their warps.
pub(super) struct Threads {
    in_cta: u32,
    pub(super) thread: Value<u32>,
    /// The number of the CTA.
    pub(super) cta: Value<u32>,
    lane: Value<u32>,
    warp: Value<u32>,
    /// Shared memory, one array for each fold: no thread waits for a reader of an earlier one.
    folds: Value<u32>,
    next: u32,
    most: u32,
}

impl Threads {
    /// Threads of a CTA that folds at most `most` times.
    pub(super) fn new(on: &mut Builder, threads: u32, most: u32) -> Self {
        let (thread, cta) = (on.thread(), on.cta());
        let (lane, warp) = (on.bits_and(thread, 31), on.shift_right(thread, 5));
        let folds = on.shared("folds", 4 * most.max(1) * threads / 32);
        Self { in_cta: threads, thread, cta, lane, warp, folds, next: 0, most }
    }

    /// The sum of `value` over all threads, the same in each: lanes by halves, then warps by halves.
    pub(super) fn sum(&mut self, on: &mut Builder, value: Value<f32>) -> Value<f32> {
        assert!(self.next < self.most, "a CTA folds no more often than it has room for");
        let warps = self.in_cta / 32;
        let of_warp = over_lanes(on, value, 32, Builder::add);
        let array = on.add(self.folds, 4 * warps * self.next);
        self.next += 1;
        let first = on.less(self.lane, 1);
        on.when(first, |on| {
            let to = on.mul_add(self.warp, 4, array);
            on.store(Address::Shared(to, 0), of_warp);
        });
        on.barrier();
        let own = on.bits_and(self.lane, warps - 1);
        let from = on.mul_add(own, 4, array);
        let value = on.load(Address::Shared(from, 0));
        over_lanes(on, value, warps, Builder::add)
    }

    /// Calls `body` with `first`, `first + 1`, … below `end`, each in one thread.
    pub(super) fn each(
        &self,
        on: &mut Builder,
        [first, end]: [Value<u32>; 2],
        body: impl FnOnce(&mut Builder, Value<u32>),
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

    pub(super) fn is_first(&self, on: &mut Builder) -> Value<bool> {
        on.less(self.thread, 1)
    }
}

/// Places of the extents of a batch in the array `extents`, i32.
const TOKENS: u32 = 0;
const SEQUENCES: u32 = 1;
const VOCAB: u32 = 2;
/// Elements of that array.
pub const EXTENTS: usize = 3;

fn extent(on: &mut Builder, extents: Array, which: u32) -> Value<u32> {
    on.load(extents.first().plus(4 * which))
}

/// `1` where `holds`, else `0`.
fn truth(on: &mut Builder, holds: Value<bool>) -> Value<f32> {
    on.select(holds, 1.0, 0.0)
}

/// `yes` where `x` is 0 or 1, else NaN.
fn unless_truth(on: &mut Builder, x: Value<f32>, yes: Value<f32>) -> Value<f32> {
    let [is_zero, is_one] = [0.0, 1.0].map(|number| on.equal(x, number));
    let valid = on.or(is_zero, is_one);
    on.select(valid, yes, f32::NAN)
}

/// Counts the tokens of each sequence, and says of each token whether it counts: 0, 1, or NaN where it does and is invalid.
///
/// If `cu_seqlens` are no ascending ends within the batch, the first CTA takes all tokens and each that counts is NaN.
pub(crate) fn count(target: Target, structure: Structure, form: BatchForm, vocab: usize, threads: u32) -> BatchKernel {
    let mut writer = Writer::new("grpo_count", target, structure, threads);
    let extents = writer.input("extents", DeviceDtype::I32, Per::Batch, EXTENTS);
    let ends = writer.input("cu_seqlens", DeviceDtype::I32, Per::SequenceAndRest, 1);
    let ids = writer.input("sampled_ids", DeviceDtype::I64, Per::Token, 1);
    let mask = writer.f32s("mask", Per::Token);
    let selected = structure.selected().then(|| writer.f32s("selected", Per::Token));
    let temperatures = Temperatures::declare(&mut writer, form);
    let columns = Columns::declare(&mut writer, form, vocab);
    let targets = writer.output("targets", DeviceDtype::I32, Per::Token, 1);
    let counted = writer.output("counted", DeviceDtype::F32, Per::Token, 1);
    let counts = writer.output("counts", DeviceDtype::F32, Per::SequenceAndRest, 1);
    let spans = writer.output("spans", DeviceDtype::I32, Per::SequenceAndRest, 2);
    let upstream = writer.f32s("upstream", Per::Batch);
    let used = writer.output("used", DeviceDtype::F32, Per::Batch, 1);

    let on = &mut writer.on;
    let mut threads = Threads::new(on, threads, 2);
    let [tokens, sequences, vocab] = [TOKENS, SEQUENCES, VOCAB].map(|which| extent(on, extents, which));
    let (span, valid) = validated_span(on, &mut threads, ends, [tokens, sequences]);
    let counts_as: Value<f32> = on.select(valid, 1.0, f32::NAN);

    let owner = owner(on, threads.cta, sequences);
    let total = on.variable(0.0);
    threads.each(on, span, |on, token| {
        let from = ids.at(on, token);
        let id: Value<u64> = on.load(from);
        let vocab = on.extend(vocab);
        // Unsigned, so that an id below 0 is beyond the vocabulary too.
        let found = on.less(id, vocab);
        let narrow = on.truncate(id);
        let id: Value<u32> = on.select(found, narrow, NO_ID);
        let to = targets.at(on, token);
        on.store(to, id);

        let masked = mask.load(on, token);
        let hidden = on.equal(masked, 0.0);
        let mut validity = unless_truth(on, masked, counts_as);
        validity = on.select(found, validity, f32::NAN);
        if let Some(selected) = selected {
            let selected = selected.load(on, token);
            validity = unless_truth(on, selected, validity);
        }
        if let Some(columns) = columns {
            let id: Value<u32> = on.select(found, narrow, 0);
            validity = columns.target_bias(on, form, [token, id], validity);
        }
        if let Some(temperatures) = temperatures {
            let index = if form.token_temperatures { token } else { owner };
            validity = temperatures.rate(on, [token, index], hidden, validity);
        }
        let counts_as = on.select(hidden, 0.0, validity);
        let to = counted.at(on, token);
        on.store(to, counts_as);
        let one: Value<f32> = on.select(hidden, 0.0, 1.0);
        let sum = on.add(total, one);
        on.set(total, sum);
    });
    let total = threads.sum(on, total);
    let first = threads.is_first(on);
    on.when(first, |on| {
        let count = on.select(valid, total, f32::NAN);
        let to = counts.at(on, threads.cta);
        on.store(to, count);
        let to = spans.at(on, threads.cta);
        let span = span.map(|end| on.variable(end));
        on.store_all(to, span);
        // All that follows has this one copy: another stream may set the cotangent that is likely meanwhile.
        let is_first_cta = on.equal(threads.cta, 0);
        on.when(is_first_cta, |on| {
            let upstream: Value<f32> = on.load(upstream.first());
            on.store(used.first(), upstream);
        });
    });
    writer.finish(Per::SequenceAndRest)
}

/// The target of a token whose id is none: no vocabulary entry.
const NO_ID: u32 = u32::MAX;

/// The tokens of this CTA's sequence, or those behind the last sequence, and whether a token there may count.
fn validated_span(
    on: &mut Builder,
    threads: &mut Threads,
    ends: Array,
    [tokens, sequences]: [Value<u32>; 2],
) -> ([Value<u32>; 2], Value<bool>) {
    // Every CTA looks at all ends: one that descends, or lies beyond the batch, makes all of them invalid.
    let invalid = on.variable(0.0);
    let zero = on.variable(0);
    threads.each(on, [zero, sequences], |on, sequence| {
        let [first, end] = ends_of(on, ends, sequence);
        let [descends, is_beyond] = [on.less(end, first), on.less(tokens, end)];
        let is_invalid = on.or(descends, is_beyond);
        let next = on.select(is_invalid, 1.0, invalid);
        on.set(invalid, next);
    });
    let first_end: Value<u32> = on.load(ends.first());
    let starts_at_0 = on.equal(first_end, 0);
    let next = on.select(starts_at_0, invalid, 1.0);
    on.set(invalid, next);
    let invalid = threads.sum(on, invalid);
    let valid = on.equal(invalid, 0.0);

    // The CTA behind those of the sequences takes what is behind the last end.
    let owned = on.less(threads.cta, sequences);
    let after = on.add(threads.cta, 1);
    let after = on.min(after, sequences);
    let [first, end] = [threads.cta, after].map(|index| {
        let from = ends.at(on, index);
        on.load::<u32>(from)
    });
    let end = on.select(owned, end, tokens);
    let is_first_cta = on.equal(threads.cta, 0);
    let start_of_all: Value<u32> = on.select(is_first_cta, 0, tokens);
    let span = [on.select(valid, first, start_of_all), on.select(valid, end, tokens)];
    (span, on.and(valid, owned))
}

/// The sequence whose numbers a CTA reads: its own, or the last one for tokens that belong to none, whose loss is NaN whatever it reads.
fn owner(on: &mut Builder, cta: Value<u32>, sequences: Value<u32>) -> Value<u32> {
    let last = on.sub(sequences, 1);
    on.min(cta, last)
}

fn ends_of(on: &mut Builder, ends: Array, sequence: Value<u32>) -> [Value<u32>; 2] {
    let from = ends.at(on, sequence);
    [on.load(from), on.load(from.plus(4))]
}

/// Temperatures that come with the batch, and the rates that follow from them.
#[derive(Clone, Copy)]
struct Temperatures {
    given: Array,
    numerator: Value<f32>,
    rates: Array,
}

impl Temperatures {
    fn declare(writer: &mut Writer, form: BatchForm) -> Option<Self> {
        (writer.structure.temperature == Temperature::Given).then(|| {
            let per = if form.token_temperatures { Per::Token } else { Per::Sequence };
            let given = writer.f32s("temperature", per);
            let numbers = Numbers::declare(writer);
            let rates = writer.output(Input::Rate.name(), DeviceDtype::F32, Per::Token, 1);
            Self { given, numerator: numbers.load(&mut writer.on, Number::LogpRate), rates }
        })
    }

    /// Writes what gaps of the token are multiplied by, 1 where it is `hidden`; `validity`, or NaN where its temperature is not a
    /// finite number above 0.
    fn rate(
        self,
        on: &mut Builder,
        [token, index]: [Value<u32>; 2],
        hidden: Value<bool>,
        validity: Value<f32>,
    ) -> Value<f32> {
        let temperature = self.given.load(on, index);
        let zero: Value<f32> = 0.0.into();
        let [is_positive, is_finite] = [on.less(zero, temperature), on.less(temperature, f32::INFINITY)];
        let fits = on.and(is_positive, is_finite);
        let temperature = on.select(fits, temperature, f32::NAN);
        let rate = on.div(self.numerator, temperature);
        let rate = on.select(hidden, 1.0, rate);
        let to = self.rates.at(on, token);
        on.store(to, rate);
        on.select(fits, validity, f32::NAN)
    }
}

/// The biases of vocabulary entries, and those of the targets.
#[derive(Clone, Copy)]
struct Columns {
    /// The bias of each vocabulary entry, −∞ outside the support.
    all: Array,
    /// The bias alone, where entries have one.
    own: Option<Array>,
    targets: Array,
}

impl Columns {
    fn declare(writer: &mut Writer, form: BatchForm, vocab: usize) -> Option<Self> {
        let differ = writer.structure.transform.is_some_and(|transform| transform.columns);
        differ.then(|| Self {
            all: writer.vocabulary("column_bias", vocab),
            own: form.bias.then(|| writer.vocabulary("bias", vocab)),
            targets: writer.output("target_bias", DeviceDtype::F32, Per::Token, 1),
        })
    }

    /// Writes the bias of the token's target; `validity`, or NaN where that is outside the support and may not be.
    fn target_bias(
        self,
        on: &mut Builder,
        form: BatchForm,
        [token, id]: [Value<u32>; 2],
        validity: Value<f32>,
    ) -> Value<f32> {
        let own = self.own.map_or(0.0.into(), |own| own.load(on, id));
        let to = self.targets.at(on, token);
        on.store(to, own);
        if form.keep_sampled {
            return validity;
        }
        let bias = self.all.load(on, id);
        let outside = on.equal(bias, f32::NEG_INFINITY);
        on.select(outside, f32::NAN, validity)
    }
}

/// The numbers of a spec in global memory.
#[derive(Clone)]
pub(super) struct Numbers {
    array: Array,
    order: Vec<Number>,
}

impl Numbers {
    pub(super) fn declare(writer: &mut Writer) -> Self {
        let order = batch_numbers(writer.structure);
        let array = writer.input("numbers", DeviceDtype::F32, Per::Batch, order.len());
        Self { array, order }
    }

    pub(super) fn load(&self, on: &mut Builder, number: Number) -> Value<f32> {
        let place = self.order.iter().position(|&other| other == number);
        let place = place.unwrap_or_else(|| panic!("a batch is given no `{}`", number.name()));
        on.load(self.array.first().plus(4 * place as u32))
    }
}

/// The arrays that say which tokens a sequence has, written by [`count`].
#[derive(Clone, Copy)]
pub(super) struct Sequences {
    extents: Array,
    spans: Array,
    counts: Array,
    pub(super) counted: Array,
}

impl Sequences {
    pub(super) fn declare(writer: &mut Writer) -> Self {
        Self {
            extents: writer.input("extents", DeviceDtype::I32, Per::Batch, EXTENTS),
            spans: writer.input("spans", DeviceDtype::I32, Per::SequenceAndRest, 2),
            counts: writer.f32s("counts", Per::SequenceAndRest),
            counted: writer.f32s("counted", Per::Token),
        }
    }

    /// The tokens of the CTA's sequence: the first, and one behind the last.
    pub(super) fn span(self, on: &mut Builder, sequence: Value<u32>) -> [Value<u32>; 2] {
        let from = self.spans.at(on, sequence);
        on.load_all(from)
    }

    /// The sequence whose numbers a CTA reads.
    pub(super) fn owner(self, on: &mut Builder, cta: Value<u32>) -> Value<u32> {
        let sequences = extent(on, self.extents, SEQUENCES);
        owner(on, cta, sequences)
    }

    /// How many tokens of the sequence count.
    pub(super) fn count(self, on: &mut Builder, sequence: Value<u32>) -> Value<f32> {
        self.counts.load(on, sequence)
    }
}

/// Factors of a token's terms: of a sequence, the same for all of its tokens.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    /// The factor of the policy term.
    pub(super) policy: Value<f32>,
    /// The factor of the KL penalty, over that of the policy term.
    pub(super) kl_share: Option<Value<f32>>,
    /// `∂loss/∂entropy` without `1/T`; if the entropy's cotangents come with the batch, the factor of those.
    pub(super) entropy: Option<Value<f32>>,
    /// `entropy` of a sequence that has a token: one number of the batch, unless sequences differ in it.
    entropy_of_batch: Option<Value<f32>>,
}

/// Folds that [`Weights`] take.
pub(super) const FOLDS_OF_WEIGHTS: u32 = 2;

impl Weights {
    /// Computes the factors of the CTA's sequence: `1 / (tokens · filled sequences · number)`, 0 for a sequence without a token.
    pub(super) fn new(
        on: &mut Builder,
        structure: Structure,
        threads: &mut Threads,
        sequences: Sequences,
        numbers: &Numbers,
        normalizer: Array,
    ) -> Self {
        let all = extent(on, sequences.extents, SEQUENCES);
        let [tokens, filled] = [on.variable(0.0), on.variable(0.0)];
        let zero = on.variable(0);
        threads.each(on, [zero, all], |on, sequence| {
            let count = sequences.count(on, sequence);
            let next = on.add(tokens, count);
            on.set(tokens, next);
            let nothing: Value<f32> = 0.0.into();
            let has_some = on.less(nothing, count);
            let one = truth(on, has_some);
            let next = on.add(filled, one);
            on.set(filled, next);
        });
        let of_batch = [threads.sum(on, tokens), threads.sum(on, filled)];
        let of_batch = of_batch.map(|count| at_least_one(on, count));
        let count = sequences.count(on, threads.cta);
        let of_sequence = OfSequence { count, of_batch, numbers };

        let policy = of_sequence.weight(on, structure.denominator, [Number::Denominator, Number::DenominatorEpsilon]);
        let divisor = on.load(normalizer.first());
        let policy = on.div(policy, divisor);
        let kl_share = structure.kl.and_then(|kl| kl.denominator).map(|denominator| {
            let own = [Number::KlDenominator, Number::KlDenominatorEpsilon];
            let own = of_sequence.weight(on, denominator, own);
            let share = on.div(own, policy);
            let empty = on.equal(count, 0.0);
            on.select(empty, 0.0, share)
        });
        let entropy = structure.entropy_bonus.map(|denominator| {
            let coef = numbers.load(on, Number::EntropyCoef);
            let coef = on.neg(coef);
            if structure.dentropy {
                return [coef; 2];
            }
            let own = [Number::EntropyDenominator, Number::EntropyDenominatorEpsilon];
            let has_own = denominator != Denominator::ALL_TOKENS;
            let divisor = if has_own { of_sequence.divisor(on, denominator, own) } else { of_batch[0] };
            let of_batch = on.div(coef, divisor);
            let empty = on.equal(count, 0.0);
            [on.select(empty, 0.0, of_batch), of_batch]
        });
        let [entropy, entropy_of_batch] = [0, 1].map(|which| entropy.map(|both| both[which]));
        Self { policy, kl_share, entropy, entropy_of_batch }
    }
}

/// Counts that weights are made of.
struct OfSequence<'n> {
    count: Value<f32>,
    /// Tokens, and sequences that have one; at least 1 each.
    of_batch: [Value<f32>; 2],
    numbers: &'n Numbers,
}

impl OfSequence<'_> {
    /// `1/divisor`, 0 where no token of the sequence counts.
    fn weight(&self, on: &mut Builder, denominator: Denominator, numbers: [Number; 2]) -> Value<f32> {
        let divisor = self.divisor(on, denominator, numbers);
        let share = on.div(1.0.into(), divisor);
        let empty = on.equal(self.count, 0.0);
        on.select(empty, 0.0, share)
    }

    /// Computes the divisor of a term of a token.
    fn divisor(&self, on: &mut Builder, denominator: Denominator, [known, epsilon]: [Number; 2]) -> Value<f32> {
        let [tokens, filled] = self.of_batch;
        let mut divisor = self.numbers.load(on, known);
        let counted = denominator.tokens.map(|of| match of {
            Tokens::OfBatch => tokens,
            Tokens::OfRow => self.count,
        });
        if let Some(mut counted) = counted {
            if denominator.epsilon {
                let epsilon = self.numbers.load(on, epsilon);
                counted = on.add(counted, epsilon);
            }
            divisor = on.mul(counted, divisor);
        }
        if denominator.filled_rows {
            divisor = on.mul(divisor, filled);
        }
        divisor
    }
}

fn at_least_one(on: &mut Builder, count: Value<f32>) -> Value<f32> {
    let is_more = on.less(Value::from(1.0), count);
    let is_number = on.equal(count, count);
    // A NaN stays one.
    let fewest: Value<f32> = on.select(is_number, 1.0, count);
    on.select(is_more, count, fewest)
}

/// The arrays of a batch that a token's loss reads beside its logits.
pub(super) struct Inputs {
    advantages: Array,
    token_advantages: bool,
    arrays: Vec<(Input, Array)>,
}

impl Inputs {
    pub(super) fn declare(writer: &mut Writer, form: BatchForm) -> Self {
        let per = if form.token_advantages { Per::Token } else { Per::Sequence };
        let advantages = writer.f32s("advantages", per);
        let inputs = writer.structure.inputs().into_iter();
        let arrays = inputs.map(|input| (input, writer.f32s(input.name(), Per::Token))).collect();
        Self { advantages, token_advantages: form.token_advantages, arrays }
    }

    pub(super) fn advantage(&self, on: &mut Builder, [token, sequence]: [Value<u32>; 2]) -> Value<f32> {
        self.advantages.load(on, if self.token_advantages { token } else { sequence })
    }

    /// The token's element of an array, if the structure reads it.
    pub(super) fn load(&self, on: &mut Builder, wanted: Input, token: Value<u32>) -> Option<Value<f32>> {
        let (_, array) = self.arrays.iter().find(|(input, _)| *input == wanted)?;
        Some(array.load(on, token))
    }

    /// The token's element of the array of that name.
    pub(super) fn named(&self, on: &mut Builder, name: &str, token: Value<u32>) -> Option<Value<f32>> {
        let (_, array) = self.arrays.iter().find(|(input, _)| input.name() == name)?;
        Some(array.load(on, token))
    }
}

/// Writes what [`one_pass`](super::one_pass) is given of each token, and its numbers.
pub(crate) fn tokens(target: Target, structure: Structure, form: BatchForm, threads: u32) -> BatchKernel {
    let mut writer = Writer::new("grpo_tokens", target, structure, threads);
    let sequences = Sequences::declare(&mut writer);
    let numbers = Numbers::declare(&mut writer);
    let normalizer = writer.f32s("normalizer", Per::Batch);
    let inputs = Inputs::declare(&mut writer, form);
    let columns = given_columns(structure);
    let target_bias = columns.contains(&Given::TargetBias).then(|| writer.f32s("target_bias", Per::Token));
    let tokens = writer.output("tokens", DeviceDtype::F32, Per::Token, width(columns.len()));
    let of_kernel = one_pass_numbers(structure);
    let numbers_of_kernel = writer.output("numbers_of_kernel", DeviceDtype::F32, Per::Batch, of_kernel.len());

    let on = &mut writer.on;
    let mut threads = Threads::new(on, threads, FOLDS_OF_WEIGHTS);
    let span = sequences.span(on, threads.cta);
    let weights = Weights::new(on, structure, &mut threads, sequences, &numbers, normalizer);
    let sequence = sequences.owner(on, threads.cta);
    threads.each(on, span, |on, token| {
        let counted = sequences.counted.load(on, token);
        let hidden = on.equal(counted, 0.0);
        let to = tokens.at(on, token);
        for (column, place) in columns.iter().zip(0..) {
            let value = match column {
                Given::Advantage => inputs.advantage(on, [token, sequence]),
                Given::OldLogp => inputs.load(on, Input::OldLogp, token).unwrap_or(0.0.into()),
                Given::RefLogp => inputs.load(on, Input::RefLogp, token).unwrap_or(0.0.into()),
                Given::Weight => on.mul(weights.policy, counted),
                Given::Mask => on.select(hidden, 0.0, 1.0),
                Given::PolicyWeight => given(on, &inputs, Input::PolicyWeight, token),
                Given::KlWeight => given(on, &inputs, Input::KlWeight, token),
                Given::Selected => given(on, &inputs, Input::Selected, token),
                Given::RolloutLogp => given(on, &inputs, Input::RolloutLogp, token),
                Given::Rate => given(on, &inputs, Input::Rate, token),
                Given::KlShare => weights.kl_share.expect("a KL penalty with a reduction of its own"),
                Given::EntropyFactor => entropy_factor(on, structure, &weights, &inputs, token),
                Given::TargetBias => target_bias.expect("vocabulary entries differ").load(on, token),
            };
            // A kernel reads nothing of a masked token but its mask.
            on.store(to.plus(4 * place), value);
        }
    });
    let is_first = threads.is_first(on);
    let is_first_cta = on.equal(threads.cta, 0);
    let is_first = on.and(is_first, is_first_cta);
    on.when(is_first, |on| {
        for (&number, place) in of_kernel.iter().zip(0..) {
            let value = match number {
                Number::EntropyFactor => weights.entropy_of_batch.unwrap_or(0.0.into()),
                other => numbers.load(on, other),
            };
            on.store(numbers_of_kernel.first().plus(4 * place), value);
        }
    });
    writer.finish(Per::SequenceAndRest)
}

fn given(on: &mut Builder, inputs: &Inputs, input: Input, token: Value<u32>) -> Value<f32> {
    inputs.load(on, input, token).expect("the structure reads it")
}

/// `∂loss/∂entropy` of a token, without `1/T`.
pub(super) fn entropy_factor(
    on: &mut Builder,
    structure: Structure,
    weights: &Weights,
    inputs: &Inputs,
    token: Value<u32>,
) -> Value<f32> {
    let factor = weights.entropy.unwrap_or(0.0.into());
    if structure.dentropy {
        let cotangent = given(on, inputs, Input::Dentropy, token);
        return on.mul(cotangent, factor);
    }
    factor
}

/// Columns of the sums of a sequence: the loss, and what is logged of its tokens in the order of the metrics; the last counts them.
pub(super) const COUNT: usize = SUMS - 1;

/// Metrics of a batch.
pub const METRICS: usize = 6;

/// Adds up what [`losses`](super::losses) left of each sequence: the loss, and means over the tokens that count.
pub(crate) fn sums(target: Target, structure: Structure, threads: u32) -> BatchKernel {
    let mut writer = Writer::new("grpo_sums", target, structure, threads);
    let extents = writer.input("extents", DeviceDtype::I32, Per::Batch, EXTENTS);
    let of_sequences = writer.input("sums", DeviceDtype::F32, Per::SequenceAndRest, SUMS);
    let loss = writer.output("loss", DeviceDtype::F32, Per::Batch, 1);
    let metrics = writer.output("metrics", DeviceDtype::F32, Per::Batch, METRICS);

    let on = &mut writer.on;
    let mut threads = Threads::new(on, threads, SUMS as u32);
    let sequences = extent(on, extents, SEQUENCES);
    let all = on.add(sequences, 1);
    let sums: [Value<f32>; SUMS] = std::array::from_fn(|_| on.variable(0.0));
    let zero = on.variable(0);
    threads.each(on, [zero, all], |on, sequence| {
        let from = of_sequences.at(on, sequence);
        for (sum, column) in sums.into_iter().zip(0..) {
            let of_sequence = on.load(from.plus(4 * column));
            let next = on.add(sum, of_sequence);
            on.set(sum, next);
        }
    });
    let sums = sums.map(|sum| threads.sum(on, sum));
    let first = threads.is_first(on);
    on.when(first, |on| {
        on.store(loss.first(), sums[0]);
        let count = at_least_one(on, sums[COUNT]);
        for (&sum, place) in sums[1..COUNT].iter().zip(0..) {
            let mean = on.div(sum, count);
            on.store(metrics.first().plus(4 * place), mean);
        }
    });
    writer.finish(Per::Batch)
}
