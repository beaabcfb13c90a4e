//! The arrays of the one-pass kernel, gathered from a framework's on the device.

use super::{
    BatchExtent, BatchForm, BatchKernel, BatchWriter, CtaThreads, FOLDS_OF_WEIGHTS, InputArrays, NumberArray,
    SequenceArrays, TermFactors,
};
use crate::one_pass::{TokenColumn, given_columns, numbers as one_pass_numbers, width};
use assay_algebra::structure::{SpecNumber, Structure, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxBuilder, PtxTarget, PtxValue};

/// Writes what [`one_pass`](super::one_pass) is given of each token, and its numbers.
pub(crate) fn tokens(target: PtxTarget, structure: Structure, form: BatchForm, threads: u32) -> BatchKernel {
    let mut writer = BatchWriter::new("grpo_tokens", target, structure, threads);
    let sequences = SequenceArrays::declare(&mut writer);
    let numbers = NumberArray::declare(&mut writer);
    let normalizer = writer.f32s("normalizer", BatchExtent::Batch);
    let inputs = InputArrays::declare(&mut writer, form);
    let columns = given_columns(structure);
    let target_bias =
        columns.contains(&TokenColumn::TargetBias).then(|| writer.f32s("target_bias", BatchExtent::Token));
    let tokens = writer.output("tokens", DeviceDtype::F32, BatchExtent::Token, width(columns.len()));
    let of_kernel = one_pass_numbers(structure);
    let numbers_of_kernel = writer.output("numbers_of_kernel", DeviceDtype::F32, BatchExtent::Batch, of_kernel.len());

    let on = &mut writer.on;
    let mut threads = CtaThreads::new(on, threads, FOLDS_OF_WEIGHTS);
    let span = sequences.span(on, threads.cta);
    // The factors follow from counts of the batch and of this CTA's sequence, and are the same for all of its tokens.
    let weights = TermFactors::new(on, structure, &mut threads, sequences, &numbers, normalizer);
    let sequence = sequences.owner(on, threads.cta);
    threads.each(on, span, |on, token| {
        let counted = sequences.counted.load(on, token);
        let hidden = on.equal(counted, 0.0);
        // A token's columns lie side by side in one row of the array, in the order that the kernel's structure has.
        let to = tokens.at(on, token);
        for (column, place) in columns.iter().zip(0..) {
            let value = match column {
                TokenColumn::Advantage => inputs.advantage(on, [token, sequence]),
                TokenColumn::OldLogp => inputs.load(on, TokenInput::OldLogp, token).unwrap_or(0.0.into()),
                TokenColumn::RefLogp => inputs.load(on, TokenInput::RefLogp, token).unwrap_or(0.0.into()),
                TokenColumn::Weight => on.mul(weights.policy, counted),
                TokenColumn::Mask => on.select(hidden, 0.0, 1.0),
                TokenColumn::PolicyWeight => given(on, &inputs, TokenInput::PolicyWeight, token),
                TokenColumn::KlWeight => given(on, &inputs, TokenInput::KlWeight, token),
                TokenColumn::Selected => given(on, &inputs, TokenInput::Selected, token),
                TokenColumn::RolloutLogp => given(on, &inputs, TokenInput::RolloutLogp, token),
                TokenColumn::Rate => given(on, &inputs, TokenInput::Rate, token),
                TokenColumn::KlShare => weights.kl_share.expect("a KL penalty with a reduction of its own"),
                TokenColumn::EntropyFactor => entropy_factor(on, structure, &weights, &inputs, token),
                TokenColumn::TargetBias => target_bias.expect("vocabulary entries differ").load(on, token),
            };
            // A kernel reads nothing of a masked token but its mask.
            on.store(to.plus(4 * place), value);
        }
    });
    let is_first = threads.is_first(on);
    let is_first_cta = on.equal(threads.cta, 0);
    // One thread of the whole grid copies the numbers, which all rows share.
    let is_first = on.and(is_first, is_first_cta);
    on.when(is_first, |on| {
        for (&number, place) in of_kernel.iter().zip(0..) {
            let value = match number {
                SpecNumber::EntropyFactor => weights.entropy_of_batch.unwrap_or(0.0.into()),
                other => numbers.load(on, other),
            };
            on.store(numbers_of_kernel.first().plus(4 * place), value);
        }
    });
    writer.finish(BatchExtent::SequenceAndRest)
}

fn given(on: &mut PtxBuilder, inputs: &InputArrays, input: TokenInput, token: PtxValue<u32>) -> PtxValue<f32> {
    inputs.load(on, input, token).expect("the structure reads it")
}

/// `∂loss/∂entropy` of a token, without `1/T`.
pub(crate) fn entropy_factor(
    on: &mut PtxBuilder,
    structure: Structure,
    weights: &TermFactors,
    inputs: &InputArrays,
    token: PtxValue<u32>,
) -> PtxValue<f32> {
    let factor = weights.entropy.unwrap_or(0.0.into());
    if structure.dentropy {
        let cotangent = given(on, inputs, TokenInput::Dentropy, token);
        return on.mul(cotangent, factor);
    }
    factor
}
