//! The program around a core: what becomes of token losses, whatever computes them.
//!
//! One program serves every mesh. A device holds `[b, t, v]` of `[B, T, V]`; row counts are reduced over the tokens'
//! devices, everything that is one number over the rows' as well. Tokens past `B` or `T` are masked.
//!
//! Where `S` sequences are packed into one row, `[1, N, V]`, each token comes with the number of its sequence. What is a
//! number of a row, `[b]`, is then one of a sequence, `[S]`, and every device has all of them: sums over the tokens of a
//! sequence are of those on a device, and then over devices, wherever the cuts are.

use crate::mesh::MeshAxis;
use crate::program::{
    CoreInputs, CoreOutputs, DeviceShare, HloBiases, NamedArray, OtherId, PackedSequences, Program, ProgramOutput,
    ScalarOutputs, SoftmaxInputs,
};
use crate::rows::{in_rows, stored_as};
use crate::several;
use crate::transform::differ_by_column;
use assay_algebra::arithmetic::Arithmetic as _;
use assay_algebra::objective::TokenLoss;
use assay_algebra::structure::{
    Denominator, DenominatorTokens, SpecNumber, SpecNumbers, Structure, TemperaturePlace, TokenInput,
};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Dtype;
use assay_tile::stablehlo::{Fold, HloBuilder, HloComparison, HloType, HloValue};

/// The parameters and the outputs of [`program`] for a TPU, on a mesh that does not cut the vocabulary.
pub(crate) fn signature(
    structure: Structure,
    local: [usize; 3],
    dtype: Dtype,
    for_kernels: bool,
) -> [Vec<NamedArray>; 2] {
    let [b, t, v] = local;
    let HloType { element, shape } = logits_array(local, dtype, for_kernels);
    let named = |name, dtype, shape: &[usize]| NamedArray { name, dtype, shape: shape.to_vec(), columns: vec![] };
    let per_token = |name, dtype| named(name, dtype, &[b, t]);
    let mut inputs = vec![
        named("logits", element, &shape),
        per_token("ids", DeviceDtype::I32),
        per_token("mask", DeviceDtype::Pred),
        per_token("advantages", DeviceDtype::F32),
    ];
    // The first id of a token is in `ids`; the others have arrays of their own.
    let others = |name, dtype| named(name, dtype, &[b, t, structure.ids_per_token - 1]);
    if structure.ids_per_token > 1 {
        inputs.extend([others("other_ids", DeviceDtype::I32), others("dlogp_of_others", DeviceDtype::F32)]);
    }
    inputs.extend(structure.inputs().into_iter().map(|input| per_token(input.name(), DeviceDtype::F32)));
    if differ_by_column(structure) {
        inputs.extend([named("column_bias", DeviceDtype::F32, &[v]), per_token("target_bias", DeviceDtype::F32)]);
    }
    let numbers: Vec<&str> = structure.program_numbers().into_iter().map(SpecNumber::name).collect();
    inputs.push(NamedArray { columns: numbers.clone(), ..named("numbers", DeviceDtype::F32, &[numbers.len()]) });
    let mut outputs = vec![
        named("dlogits", element, &shape),
        per_token("logp", DeviceDtype::F32),
        per_token("entropy", DeviceDtype::F32),
        per_token("token_loss", DeviceDtype::F32),
        NamedArray {
            columns: ScalarOutputs::NAMES.to_vec(),
            ..named("scalars", DeviceDtype::F32, &[ScalarOutputs::COUNT])
        },
    ];
    outputs.extend((structure.ids_per_token > 1).then(|| others("logp_of_others", DeviceDtype::F32)));
    [inputs, outputs]
}

/// The way in which a program takes its logits.
#[derive(Clone, Copy)]
pub(crate) struct LogitsParameter {
    pub(crate) dtype: Dtype,
    /// Whether the logits are read by kernels that are not XLA's.
    pub(crate) to_kernels: bool,
    /// Whether the logits are row-major, as kernels read them. The compiler's own choice, which JAX's arrays have
    /// too, pads least: if four sequences fill registers of four rows, half of each register is idle.
    pub(crate) row_major: bool,
    /// Dlogits are written over them.
    pub(crate) donated: bool,
}

/// The program for a device's share of logits, with `core` in its middle.
///
/// Parameters: [logits](logits_array); ids i32, mask pred, where sequences are packed the number of each token's i32; advantages
/// f32, where a token has several ids those beside the first and the cotangents of their logp, `[b,t,K−1]` i32 and f32, then the structure's [inputs](Structure::inputs) f32, all `[b,t]`; where columns differ before their softmax, the
/// [bias](HloBiases) of each `[v]` and of each target `[b,t]`, f32; its [numbers](Structure::program_numbers) f32; and where the
/// vocabulary is cut, the device's first column
/// as a scalar i32.
pub(crate) fn program(
    structure: Structure,
    share: DeviceShare,
    given: LogitsParameter,
    core: impl FnOnce(&mut Program, &CoreInputs, HloValue) -> CoreOutputs,
) -> String {
    let logits = |builder: &mut HloBuilder| logits_parameter(builder, share.local, given);
    let dtype = given.dtype;
    frame(structure, share, logits, |on, given, logits| {
        let evaluated = several::around(on, structure, given, logits, dtype, core);
        let CoreOutputs { gradient, logp, logp_of_others, entropy, token } = evaluated;
        CoreOutputs { gradient: [gradient], logp, logp_of_others, entropy, token }
    })
}

/// Logits where they cross the boundary of a program: `[b,t,v]`; for kernels that are not XLA's `[1,b·t,v]`, and f16 as i16,
/// its bits. A TPU would write f16 anew to read it as its bits, and all logits anew to read them in rows: where tokens are
/// no multiple of eight, its memory has gaps between sequences.
fn logits_array(local: [usize; 3], dtype: Dtype, for_kernels: bool) -> HloType {
    if for_kernels {
        let (element, shape) = logits_in_rows(local, dtype.into());
        HloType { element, shape }
    } else {
        HloType::new(dtype.into(), &local)
    }
}

/// Element type and extents of `local` logits where they are given to kernels that are not XLA's.
pub fn logits_in_rows(local: [usize; 3], element: DeviceDtype) -> (DeviceDtype, Vec<usize>) {
    (stored_as(element), in_rows(local).to_vec())
}

fn logits_parameter(builder: &mut HloBuilder, local: [usize; 3], given: LogitsParameter) -> HloValue {
    let over = given.donated.then_some(ProgramOutput::Gradient as usize);
    let logits = builder.parameter(logits_array(local, given.dtype, given.to_kernels), over);
    if given.row_major {
        builder.lay_out_row_major(logits);
    }
    logits
}

/// The program whose first parameters are those that `arrays` writes, with `core` in its middle, which is given them. Its
/// outputs are the first gradient, what else [`ProgramOutput`] names of every program, and the other gradients.
#[expect(clippy::too_many_lines, reason = "parameters, weights, core and outputs of one program, in their order")]
pub(crate) fn frame<A, const GRADIENTS: usize>(
    structure: Structure,
    DeviceShare { local, mesh, vocab, packed }: DeviceShare,
    arrays: impl FnOnce(&mut HloBuilder) -> A,
    core: impl FnOnce(&mut Program, &CoreInputs, A) -> CoreOutputs<[HloValue; GRADIENTS]>,
) -> String {
    let [b, t, v] = local;
    let mut builder = HloBuilder::default();
    let per_token = |element| HloType::new(element, &[b, t]);
    // Parameters, in the order that `signature` lists.
    let arrays = arrays(&mut builder);
    let ids = builder.parameter(per_token(DeviceDtype::I32), None);
    let mask = builder.parameter(per_token(DeviceDtype::Pred), None);
    let packed =
        packed.map(|count| PackedSequences { of_tokens: builder.parameter(per_token(DeviceDtype::I32), None), count });
    let advantage = builder.parameter(per_token(DeviceDtype::F32), None);
    let others = (structure.ids_per_token > 1).then(|| {
        let others = |element| HloType::new(element, &[b, t, structure.ids_per_token - 1]);
        [DeviceDtype::I32, DeviceDtype::F32].map(|element| builder.parameter(others(element), None))
    });
    let inputs = structure.inputs().into_iter();
    let inputs: Vec<(TokenInput, HloValue)> =
        inputs.map(|input| (input, builder.parameter(per_token(DeviceDtype::F32), None))).collect();
    let columns = differ_by_column(structure).then(|| HloBiases {
        bias: builder.parameter(HloType::new(DeviceDtype::F32, &[v]), None),
        target: builder.parameter(per_token(DeviceDtype::F32), None),
    });
    let of_spec = structure.program_numbers();
    let numbers = builder.parameter(HloType::new(DeviceDtype::F32, &[of_spec.len()]), None);
    let first_column = (mesh.vocab > 1).then(|| builder.parameter(HloType::new(DeviceDtype::I32, &[]), None));

    let mut on = Program { builder, local, mesh, vocab, packed };
    let numbers = of_spec.into_iter().enumerate().map(|(i, number)| (number, on.builder.element_at(numbers, i)));
    let numbers = SpecNumbers::new(numbers.collect::<Vec<_>>());
    let others = others.map_or_else(Vec::new, |others| {
        let [ids, dlogp] = others.map(|array| several::apart(&mut on, array));
        ids.into_iter().zip(dlogp).map(|(ids, dlogp)| OtherId { ids, dlogp }).collect()
    });
    // The weight of a token: 1 over the divisor of the reduction, which may count tokens or sequences of all devices.
    let loss_scale = numbers.get(SpecNumber::LossScale);
    let counts = on.counts(mask);
    let known = |known, epsilon, denominator: Denominator| DivisorNumbers {
        denominator,
        given: Some(numbers.get(known)),
        epsilon: denominator.epsilon.then(|| numbers.get(epsilon)),
    };
    let divisor =
        on.divisor(&counts, known(SpecNumber::Denominator, SpecNumber::DenominatorEpsilon, structure.denominator));
    let weight = on.share(mask, divisor);
    let grad_weight = on.times(weight, loss_scale);
    // A KL penalty with a reduction of its own is weighed by weight · kl_share: the quotient of the two divisors puts
    // its own in the place of the policy's.
    let kl_share = structure.kl.and_then(|kl| kl.denominator).map(|denominator| {
        let of_kl =
            on.divisor(&counts, known(SpecNumber::KlDenominator, SpecNumber::KlDenominatorEpsilon, denominator));
        let [divisor, of_kl] = [divisor, of_kl].map(|divisor| on.per_token(divisor));
        on.builder.divide(divisor, of_kl)
    });
    // The weight of a token's entropy: a cotangent that is given for each token, or the coefficient over a divisor.
    let dentropy = inputs.iter().find(|(input, _)| *input == TokenInput::Dentropy).map(|(_, value)| *value);
    let entropy_weight = if let Some(dentropy) = dentropy {
        // Nothing that the mask hides is multiplied.
        let nothing = on.constant(0.0);
        let counted = on.builder.select(mask, dentropy, nothing);
        on.times(counted, numbers.get(SpecNumber::EntropyCoef))
    } else {
        // The mean over all tokens is the default, whose divisor is counted on the devices; any other has numbers of
        // its own in the spec.
        let denominator = structure.entropy_bonus.unwrap_or(Denominator::ALL_TOKENS);
        let own = denominator != Denominator::ALL_TOKENS;
        let (known_part, epsilon) = (SpecNumber::EntropyDenominator, SpecNumber::EntropyDenominatorEpsilon);
        let plain = DivisorNumbers { denominator, given: None, epsilon: None };
        let divisor = on.divisor(&counts, if own { known(known_part, epsilon, denominator) } else { plain });
        let coef = numbers.get(SpecNumber::EntropyCoef);
        // A divisor by row makes the weight an array, 0 where the mask hides a token; otherwise it is one number, which
        // kernels take as such.
        if denominator.by_row() {
            let share = on.share(mask, divisor);
            on.times(share, coef)
        } else {
            on.builder.divide(coef, divisor)
        }
    };
    // The loss contains −coef · H, so the derivative by H is negative.
    let entropy_factor = on.times(entropy_weight, loss_scale);
    let entropy_factor = on.builder.negate(entropy_factor);
    let given = CoreInputs {
        ids,
        mask,
        advantage,
        others,
        inputs,
        columns,
        grad_weight,
        kl_share,
        entropy_factor,
        numbers,
        row_counts: counts.of_rows,
        first_column,
    };
    let CoreOutputs { gradient, logp, logp_of_others, entropy, token } = core(&mut on, &given, arrays);
    let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;

    // The loss and the metrics: sums over this device's tokens that count, then over all devices in one collective.
    let scalars = {
        let mut weighted = on.builder.multiply(weight, reduced);
        if structure.entropy_bonus.is_some() {
            let weight = on.per_token(entropy_weight);
            let bonus = on.builder.multiply(weight, entropy);
            weighted = on.builder.subtract(weighted, bonus);
        }
        let clipped = on.builder.or(clipped_low, clipped_high);
        let zero = on.constant(0.0);
        let mut sums = [zero; ScalarOutputs::COUNT];
        sums[ScalarOutputs::LOSS] = on.total(mask, weighted);
        sums[ScalarOutputs::ENTROPY_MEAN] = on.total(mask, entropy);
        sums[ScalarOutputs::RATIO_MEAN] = on.total(mask, ratio);
        sums[ScalarOutputs::KL_MEAN] = on.total(mask, kl.unwrap_or(zero));
        for (place, truth) in [
            (ScalarOutputs::CLIP_LOW, clipped_low),
            (ScalarOutputs::CLIP_HIGH, clipped_high),
            (ScalarOutputs::CLIP_REGION, clipped),
        ] {
            let share = on.builder.convert(truth, DeviceDtype::F32);
            sums[place] = on.total(mask, share);
        }
        on.means(&sums, counts.of_batch)
    };

    let zero = on.constant(0.0);
    // Masked tokens hold anything, and return 0.
    let mut masked = |value| on.builder.select(mask, value, zero);
    let (logp, entropy, token_loss) = (masked(logp), masked(entropy), masked(loss));
    let (first, others) = gradient.split_first().expect("a program has a gradient");
    let of_others: Vec<HloValue> = logp_of_others.into_iter().collect();
    on.builder.finish(&[&[*first, logp, entropy, token_loss, scalars], others, &of_others].concat())
}

/// The program that returns logp and entropy alone, of which `core` makes both, and writes no dlogits. Rows are whole on
/// every device.
///
/// Parameters: [logits](logits_array), which stay; ids i32 and mask pred, `[b,t]`; `1/T` f32, a scalar, or `[b,t]` where it is given.
pub(crate) fn forward(
    structure: Structure,
    DeviceShare { local, mesh, vocab, .. }: DeviceShare,
    given: LogitsParameter,
    core: impl FnOnce(&mut Program, &SoftmaxInputs) -> [HloValue; 2],
) -> String {
    let [b, t, _] = local;
    let mut builder = HloBuilder::default();
    let logits = logits_parameter(&mut builder, local, given);
    let ids = builder.parameter(HloType::new(DeviceDtype::I32, &[b, t]), None);
    let mask = builder.parameter(HloType::new(DeviceDtype::Pred, &[b, t]), None);
    let by_token = structure.temperature == TemperaturePlace::Given;
    let extents: &[usize] = if by_token { &[b, t] } else { &[] };
    let inverse_temperature = builder.parameter(HloType::new(DeviceDtype::F32, extents), None);
    let mut on = Program { builder, local, mesh, vocab, packed: None };
    let numbers = SpecNumbers::new((!by_token).then_some((SpecNumber::InverseTemperature, inverse_temperature)));
    let of_tokens = by_token.then_some(inverse_temperature);
    let given = SoftmaxInputs { logits, ids, columns: None, of_tokens, numbers, first_column: None };
    let outputs = core(&mut on, &given);
    let zero = on.constant(0.0);
    let outputs = outputs.map(|value| on.builder.select(mask, value, zero));
    on.builder.finish(&outputs)
}

/// The parameters and the outputs of [`forward`] for a TPU.
pub(crate) fn forward_signature(structure: Structure, local: [usize; 3], dtype: Dtype) -> [Vec<NamedArray>; 2] {
    let [b, t, _] = local;
    let HloType { element, shape } = logits_array(local, dtype, true);
    let named = |name, dtype, shape: &[usize]| NamedArray { name, dtype, shape: shape.to_vec(), columns: vec![] };
    let by_token = structure.temperature == TemperaturePlace::Given;
    let inputs = vec![
        named("logits", element, &shape),
        named("ids", DeviceDtype::I32, &[b, t]),
        named("mask", DeviceDtype::Pred, &[b, t]),
        if by_token {
            named(TokenInput::Rate.name(), DeviceDtype::F32, &[b, t])
        } else {
            named("inverse_temperature", DeviceDtype::F32, &[])
        },
    ];
    [inputs, vec![named("logp", DeviceDtype::F32, &[b, t]), named("entropy", DeviceDtype::F32, &[b, t])]]
}

/// The numbers of tokens that count.
struct TokenCounts {
    /// `[b]`; `[S]` of packed sequences.
    of_rows: HloValue,
    /// The number of tokens of the batch that count, a scalar.
    of_batch: HloValue,
}

/// A denominator with the scalars that are given of it.
struct DivisorNumbers {
    denominator: Denominator,
    given: Option<HloValue>,
    epsilon: Option<HloValue>,
}

impl Program {
    fn counts(&mut self, mask: HloValue) -> TokenCounts {
        let ones = self.builder.convert(mask, DeviceDtype::F32);
        let of_rows = self.sums_of_rows(ones);
        let of_batch = self.sum_of_all_rows(of_rows);
        TokenCounts { of_rows, of_batch }
    }

    /// Computes the divisor of a token's term: `[b,t]` if it differs by row, else a scalar, which is above 0 even if
    /// no token counts.
    fn divisor(
        &mut self,
        counts: &TokenCounts,
        DivisorNumbers { denominator, given, epsilon }: DivisorNumbers,
    ) -> HloValue {
        let tokens = denominator.tokens.map(|tokens| match tokens {
            // A sum over no token is 0, and stays 0 divided by 1.
            DenominatorTokens::OfBatch => self.at_least_one(counts.of_batch),
            DenominatorTokens::OfRow => self.spread_rows(counts.of_rows),
        });
        let tokens = match (tokens, epsilon) {
            (Some(tokens), Some(epsilon)) if denominator.by_row() => {
                let epsilon = self.per_token(epsilon);
                Some(self.builder.add(tokens, epsilon))
            }
            (Some(tokens), Some(epsilon)) => Some(self.builder.add(tokens, epsilon)),
            (tokens, _) => tokens,
        };
        // A row is filled if one of its tokens counts.
        let filled = denominator.filled_rows.then(|| {
            let of_rows = self.builder.type_of(counts.of_rows).clone();
            let zero = self.builder.constant(0.0, of_rows);
            let filled = self.builder.compare(HloComparison::Less, zero, counts.of_rows);
            let filled = self.builder.convert(filled, DeviceDtype::F32);
            let rows = self.sum_of_all_rows(filled);
            self.at_least_one(rows)
        });
        let scalar = [filled, given].into_iter().flatten().reduce(|a, b| self.builder.multiply(a, b));
        match (tokens, scalar) {
            (Some(tokens), Some(scalar)) => self.times(tokens, scalar),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => self.scalar(1.0),
        }
    }

    /// `1/divisor`, 0 where the mask hides a token.
    fn share(&mut self, mask: HloValue, divisor: HloValue) -> HloValue {
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let divisor = self.per_token(divisor);
        let share = self.builder.divide(one, divisor);
        self.builder.select(mask, share, zero)
    }

    /// The sum of `[b,t]` values over this device's unmasked tokens.
    fn total(&mut self, mask: HloValue, values: HloValue) -> HloValue {
        let zero = self.constant(0.0);
        let unmasked = self.builder.select(mask, values, zero);
        self.builder.reduce(Fold::Add, unmasked, &[0, 1])
    }

    fn at_least_one(&mut self, count: HloValue) -> HloValue {
        let one = self.scalar(1.0);
        let none = self.builder.compare(HloComparison::Less, count, one);
        self.builder.select(none, one, count)
    }

    /// The loss and the metrics, from their sums over this device's tokens.
    fn means(&mut self, sums: &[HloValue; ScalarOutputs::COUNT], count: HloValue) -> HloValue {
        let sums = self.builder.vector(sums);
        // One collective adds up all scalars of the batch: the loss is a sum with its weights in it, the others are
        // divided by the count of tokens.
        let sums = self.over(&[MeshAxis::Batch, MeshAxis::Tokens], Fold::Add, sums);
        let count = self.at_least_one(count);
        let mut values: Vec<HloValue> = (0..ScalarOutputs::COUNT).map(|i| self.builder.element_at(sums, i)).collect();
        for mean in &mut values[ScalarOutputs::ENTROPY_MEAN..] {
            *mean = self.builder.divide(*mean, count);
        }
        self.builder.vector(&values)
    }
}
