//! What the kernel of one pass is given of each token, gathered on the device.

use super::{BatchForm, BatchKernel, FOLDS_OF_WEIGHTS, Inputs, Numbers, Per, Sequences, Threads, Weights, Writer};
use crate::one_pass::{Given, given_columns, numbers as one_pass_numbers, width};
use assay_algebra::structure::{SpecNumber, Structure, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{Builder, Target, Value};

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
                Given::OldLogp => inputs.load(on, TokenInput::OldLogp, token).unwrap_or(0.0.into()),
                Given::RefLogp => inputs.load(on, TokenInput::RefLogp, token).unwrap_or(0.0.into()),
                Given::Weight => on.mul(weights.policy, counted),
                Given::Mask => on.select(hidden, 0.0, 1.0),
                Given::PolicyWeight => given(on, &inputs, TokenInput::PolicyWeight, token),
                Given::KlWeight => given(on, &inputs, TokenInput::KlWeight, token),
                Given::Selected => given(on, &inputs, TokenInput::Selected, token),
                Given::RolloutLogp => given(on, &inputs, TokenInput::RolloutLogp, token),
                Given::Rate => given(on, &inputs, TokenInput::Rate, token),
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
                SpecNumber::EntropyFactor => weights.entropy_of_batch.unwrap_or(0.0.into()),
                other => numbers.load(on, other),
            };
            on.store(numbers_of_kernel.first().plus(4 * place), value);
        }
    });
    writer.finish(Per::SequenceAndRest)
}

fn given(on: &mut Builder, inputs: &Inputs, input: TokenInput, token: Value<u32>) -> Value<f32> {
    inputs.load(on, input, token).expect("the structure reads it")
}

/// `∂loss/∂entropy` of a token, without `1/T`.
pub(crate) fn entropy_factor(
    on: &mut Builder,
    structure: Structure,
    weights: &Weights,
    inputs: &Inputs,
    token: Value<u32>,
) -> Value<f32> {
    let factor = weights.entropy.unwrap_or(0.0.into());
    if structure.dentropy {
        let cotangent = given(on, inputs, TokenInput::Dentropy, token);
        return on.mul(cotangent, factor);
    }
    factor
}
