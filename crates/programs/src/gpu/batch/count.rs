//! Tokens of a batch, counted, and their ids, masks and temperatures, checked.

use super::{
    BatchArray, BatchExtent, BatchForm, BatchKernel, BatchWriter, CtaThreads, EXTENTS, NumberArray, SEQUENCES, TOKENS,
    VOCAB, extent, owner,
};
use crate::transform::differ_by_column;
use assay_algebra::structure::{SpecNumber, Structure, TemperaturePlace, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxBuilder, PtxTarget, PtxValue};

/// `yes` where `x` is 0 or 1, else NaN.
fn unless_truth(on: &mut PtxBuilder, x: PtxValue<f32>, yes: PtxValue<f32>) -> PtxValue<f32> {
    let [is_zero, is_one] = [0.0, 1.0].map(|number| on.equal(x, number));
    let valid = on.or(is_zero, is_one);
    on.select(valid, yes, f32::NAN)
}

/// Counts the tokens of each sequence, and says of each token whether it counts: 0, 1, or NaN where it does and is invalid.
///
/// If `cu_seqlens` are no ascending ends within the batch, the first CTA takes all tokens and each that counts is NaN.
pub(crate) fn count(
    target: PtxTarget,
    structure: Structure,
    form: BatchForm,
    vocab: usize,
    threads: u32,
) -> BatchKernel {
    let mut writer = BatchWriter::new("grpo_count", target, structure, threads);
    let extents = writer.input("extents", DeviceDtype::I32, BatchExtent::Batch, EXTENTS);
    let ends = writer.input("cu_seqlens", DeviceDtype::I32, BatchExtent::SequenceAndRest, 1);
    let ids = writer.input("sampled_ids", DeviceDtype::I64, BatchExtent::Token, 1);
    let mask = writer.f32s("mask", BatchExtent::Token);
    let selected = structure.selected().then(|| writer.f32s("selected", BatchExtent::Token));
    let temperatures = TemperatureArrays::declare(&mut writer, form);
    let columns = BiasArrays::declare(&mut writer, form, vocab);
    let targets = writer.output("targets", DeviceDtype::I32, BatchExtent::Token, 1);
    let counted = writer.output("counted", DeviceDtype::F32, BatchExtent::Token, 1);
    let counts = writer.output("counts", DeviceDtype::F32, BatchExtent::SequenceAndRest, 1);
    let spans = writer.output("spans", DeviceDtype::I32, BatchExtent::SequenceAndRest, 2);
    let upstream = writer.f32s("upstream", BatchExtent::Batch);
    let used = writer.output("used", DeviceDtype::F32, BatchExtent::Batch, 1);

    let on = &mut writer.on;
    let mut threads = CtaThreads::new(on, threads, 2);
    let [tokens, sequences, vocab] = [TOKENS, SEQUENCES, VOCAB].map(|which| extent(on, extents, which));
    let (span, valid) = validated_span(on, &mut threads, ends, [tokens, sequences]);
    let counts_as: PtxValue<f32> = on.select(valid, 1.0, f32::NAN);

    let owner = owner(on, threads.cta, sequences);
    let total = on.variable(0.0);
    threads.each(on, span, |on, token| {
        let from = ids.at(on, token);
        // The target: the id if it is in the vocabulary, else a number that no column has.
        let id: PtxValue<u64> = on.load(from);
        let vocab = on.extend(vocab);
        // Unsigned, so that an id below 0 is beyond the vocabulary too.
        let found = on.less(id, vocab);
        let narrow = on.truncate(id);
        let id: PtxValue<u32> = on.select(found, narrow, NO_ID);
        let to = targets.at(on, token);
        on.store(to, id);

        // A token counts as 1 or 0 by its mask; whatever is invalid about it makes that NaN, which reaches its loss.
        let masked = mask.load(on, token);
        let hidden = on.equal(masked, 0.0);
        let mut validity = unless_truth(on, masked, counts_as);
        validity = on.select(found, validity, f32::NAN);
        if let Some(selected) = selected {
            let selected = selected.load(on, token);
            validity = unless_truth(on, selected, validity);
        }
        if let Some(columns) = columns {
            let id: PtxValue<u32> = on.select(found, narrow, 0);
            validity = columns.target_bias(on, form, [token, id], validity);
        }
        if let Some(temperatures) = temperatures {
            let index = if form.token_temperatures { token } else { owner };
            validity = temperatures.rate(on, [token, index], hidden, validity);
        }
        let counts_as = on.select(hidden, 0.0, validity);
        let to = counted.at(on, token);
        on.store(to, counts_as);
        let one: PtxValue<f32> = on.select(hidden, 0.0, 1.0);
        let sum = on.add(total, one);
        on.set(total, sum);
    });
    // The first thread writes the count and the place of the sequence.
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
            let upstream: PtxValue<f32> = on.load(upstream.first());
            on.store(used.first(), upstream);
        });
    });
    writer.finish(BatchExtent::SequenceAndRest)
}

/// The target of a token whose id is none: no vocabulary entry.
const NO_ID: u32 = u32::MAX;

/// The tokens of this CTA's sequence, or those behind the last sequence, and whether a token there may count.
fn validated_span(
    on: &mut PtxBuilder,
    threads: &mut CtaThreads,
    ends: BatchArray,
    [tokens, sequences]: [PtxValue<u32>; 2],
) -> ([PtxValue<u32>; 2], PtxValue<bool>) {
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
    let first_end: PtxValue<u32> = on.load(ends.first());
    let starts_at_0 = on.equal(first_end, 0);
    let next = on.select(starts_at_0, invalid, 1.0);
    on.set(invalid, next);
    let invalid = threads.sum(on, invalid);
    let valid = on.equal(invalid, 0.0);

    // The CTA behind those of the sequences takes what is behind the last end.
    // Each CTA has the tokens between two ends; invalid ends give all tokens to the first CTA.
    let owned = on.less(threads.cta, sequences);
    let after = on.add(threads.cta, 1);
    let after = on.min(after, sequences);
    let [first, end] = [threads.cta, after].map(|index| {
        let from = ends.at(on, index);
        on.load::<u32>(from)
    });
    let end = on.select(owned, end, tokens);
    let is_first_cta = on.equal(threads.cta, 0);
    let start_of_all: PtxValue<u32> = on.select(is_first_cta, 0, tokens);
    let span = [on.select(valid, first, start_of_all), on.select(valid, end, tokens)];
    (span, on.and(valid, owned))
}

fn ends_of(on: &mut PtxBuilder, ends: BatchArray, sequence: PtxValue<u32>) -> [PtxValue<u32>; 2] {
    let from = ends.at(on, sequence);
    [on.load(from), on.load(from.plus(4))]
}

/// Temperatures that come with the batch, and the rates that follow from them.
#[derive(Clone, Copy)]
struct TemperatureArrays {
    given: BatchArray,
    numerator: PtxValue<f32>,
    rates: BatchArray,
}

impl TemperatureArrays {
    fn declare(writer: &mut BatchWriter, form: BatchForm) -> Option<Self> {
        (writer.structure.temperature == TemperaturePlace::Given).then(|| {
            let per = if form.token_temperatures { BatchExtent::Token } else { BatchExtent::Sequence };
            let given = writer.f32s("temperature", per);
            let numbers = NumberArray::declare(writer);
            let rates = writer.output(TokenInput::Rate.name(), DeviceDtype::F32, BatchExtent::Token, 1);
            Self { given, numerator: numbers.load(&mut writer.on, SpecNumber::LogpRate), rates }
        })
    }

    /// Writes what gaps of the token are multiplied by, 1 where it is `hidden`; `validity`, or NaN where its temperature is not a
    /// finite number above 0.
    fn rate(
        self,
        on: &mut PtxBuilder,
        [token, index]: [PtxValue<u32>; 2],
        hidden: PtxValue<bool>,
        validity: PtxValue<f32>,
    ) -> PtxValue<f32> {
        let temperature = self.given.load(on, index);
        let zero: PtxValue<f32> = 0.0.into();
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
struct BiasArrays {
    /// The bias of each vocabulary entry, −∞ outside the support.
    all: BatchArray,
    /// The bias alone, where entries have one.
    own: Option<BatchArray>,
    targets: BatchArray,
}

impl BiasArrays {
    fn declare(writer: &mut BatchWriter, form: BatchForm, vocab: usize) -> Option<Self> {
        differ_by_column(writer.structure).then(|| Self {
            all: writer.vocabulary("column_bias", vocab),
            own: form.bias.then(|| writer.vocabulary("bias", vocab)),
            targets: writer.output("target_bias", DeviceDtype::F32, BatchExtent::Token, 1),
        })
    }

    /// Writes the bias of the token's target; `validity`, or NaN where that is outside the support and may not be.
    fn target_bias(
        self,
        on: &mut PtxBuilder,
        form: BatchForm,
        [token, id]: [PtxValue<u32>; 2],
        validity: PtxValue<f32>,
    ) -> PtxValue<f32> {
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
