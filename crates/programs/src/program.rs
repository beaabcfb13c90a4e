//! The program around a core: what becomes of token losses, whatever computes them.
//!
//! One program serves every mesh. A device holds `[b, t, v]` of `[B, T, V]`; row counts are reduced over the tokens'
//! devices, everything that is one number over the rows' as well. Tokens past `B` or `T` are masked.
//!
//! Where `S` sequences are packed into one row, `[1, N, V]`, each token comes with the number of its sequence. What is a
//! number of a row, `[b]`, is then one of a sequence, `[S]`, and every device has all of them: sums over the tokens of a
//! sequence are of those on a device, and then over devices, wherever the cuts are.

use serde::Serialize;

use crate::mesh::{Axis, Mesh};
use crate::rows::{in_rows, stored_as};
use crate::several::{self, OtherGiven};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{Token, TokenLoss, own_log_ratio, sum, token_loss, unless};
use assay_algebra::structure::{Denominator, Input, Number, Numbers, Rate, Structure, Temperature, Tokens};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::RatioLevel;
use assay_tile::Machine;
use assay_tile::stablehlo::{Builder, Comparison, Fold, Type, Value};

/// The outputs of the program, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// `[b,t,v]`, over the logits, or `[b,t,h]`, over the hidden states.
    Gradient,
    /// `[b,t]`
    Logp,
    /// `[b,t]`
    Entropy,
    /// `[b,t]`
    TokenLoss,
    /// The loss and the metrics, in the order of [`Scalars`].
    Scalars,
    /// `[h,v]` or `[v,h]`, where there is a head.
    DlmHead,
}

impl Output {
    /// Where `[b,t,K−1]` is, the logp of ids beside the first, of a program with so many gradients: behind all else.
    pub fn logp_of_others(gradients: usize) -> usize {
        Output::Scalars as usize + gradients
    }
}

/// Places in the vector of scalars.
pub struct Scalars;

impl Scalars {
    /// The loss.
    pub const LOSS: usize = 0;
    /// See [`Metrics`](assay_core::problem::Metrics) for this and the rest.
    pub const ENTROPY_MEAN: usize = 1;
    /// The mean ratio.
    pub const RATIO_MEAN: usize = 2;
    /// The mean KL estimate; 0 where there is no penalty.
    pub const KL_MEAN: usize = 3;
    /// The share of tokens clipped low.
    pub const CLIP_LOW: usize = 4;
    /// And high.
    pub const CLIP_HIGH: usize = 5;
    /// And either way.
    pub const CLIP_REGION: usize = 6;
    /// How many there are.
    pub const COUNT: usize = 7;
    /// In order.
    pub const NAMES: [&str; Self::COUNT] =
        ["loss", "entropy_mean", "ratio_mean", "kl_mean", "clip_low", "clip_high", "clip_region"];
}

/// Extents that one device holds, which is one of `machine`.
pub fn local_shape(shape: Shape, mesh: Mesh, machine: Machine) -> [usize; 3] {
    [shape.batch.div_ceil(mesh.batch), shape.tokens.div_ceil(mesh.tokens), columns(shape.vocab, mesh.vocab, machine)]
}

/// Of `vocab` cut over `devices`: where it costs at most one column in 64, as many as fill the memory of a device.
fn columns(vocab: usize, devices: usize, machine: Machine) -> usize {
    let even = vocab.div_ceil(devices);
    let full = even.next_multiple_of(machine.memory_columns);
    if devices > 1 && full - even <= even / 64 { full } else { even }
}

/// What one device has of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    /// `[b, t, v]`
    pub(crate) local: [usize; 3],
    pub(crate) mesh: Mesh,
    /// `V`
    vocab: usize,
    /// `S`, where sequences are packed into one row.
    packed: Option<usize>,
}

impl Share {
    /// Of logits of `shape`, cut over a mesh of this machine.
    pub(crate) fn of(shape: Shape, packed: Option<usize>, mesh: Mesh, machine: Machine) -> Self {
        Self { local: local_shape(shape, mesh, machine), mesh, vocab: shape.vocab, packed }
    }
}

/// The sequences that are packed into one row.
#[derive(Clone, Copy)]
pub(crate) struct Packed {
    /// The number of each token's, i32 `[b,t]`; −1 where it is of none.
    of_tokens: Value,
    /// `S`
    count: usize,
}

/// An operand or a result of a program or a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    /// Its name.
    pub name: &'static str,
    /// Element type.
    pub dtype: DeviceDtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// What its last axis holds, place by place, where those are different things.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<&'static str>,
}

/// The parameters and the outputs of [`program`] for a TPU, on a mesh that does not cut the vocabulary.
pub(crate) fn signature(structure: Structure, local: [usize; 3], dtype: Dtype, for_kernels: bool) -> [Vec<Named>; 2] {
    let [b, t, v] = local;
    let Type { element, shape } = logits_array(local, dtype, for_kernels);
    let named = |name, dtype, shape: &[usize]| Named { name, dtype, shape: shape.to_vec(), columns: vec![] };
    let per_token = |name, dtype| named(name, dtype, &[b, t]);
    let mut inputs = vec![
        named("logits", element, &shape),
        per_token("ids", DeviceDtype::I32),
        per_token("mask", DeviceDtype::Pred),
        per_token("advantages", DeviceDtype::F32),
    ];
    let others = |name, dtype| named(name, dtype, &[b, t, structure.top - 1]);
    if structure.top > 1 {
        inputs.extend([others("other_ids", DeviceDtype::I32), others("dlogp_of_others", DeviceDtype::F32)]);
    }
    inputs.extend(structure.inputs().into_iter().map(|input| per_token(input.name(), DeviceDtype::F32)));
    let columns = structure.transform.is_some_and(|transform| transform.columns);
    if columns {
        inputs.extend([named("column_bias", DeviceDtype::F32, &[v]), per_token("target_bias", DeviceDtype::F32)]);
    }
    let numbers: Vec<&str> = structure.program_numbers().into_iter().map(Number::name).collect();
    inputs.push(Named { columns: numbers.clone(), ..named("numbers", DeviceDtype::F32, &[numbers.len()]) });
    let mut outputs = vec![
        named("dlogits", element, &shape),
        per_token("logp", DeviceDtype::F32),
        per_token("entropy", DeviceDtype::F32),
        per_token("token_loss", DeviceDtype::F32),
        Named { columns: Scalars::NAMES.to_vec(), ..named("scalars", DeviceDtype::F32, &[Scalars::COUNT]) },
    ];
    outputs.extend((structure.top > 1).then(|| others("logp_of_others", DeviceDtype::F32)));
    [inputs, outputs]
}

/// The program while it is being written.
pub(crate) struct Program {
    pub(crate) builder: Builder,
    /// `[b, t, v]`
    pub(crate) local: [usize; 3],
    pub(crate) mesh: Mesh,
    /// `V`
    pub(crate) vocab: usize,
    /// `None` where each row is a sequence.
    pub(crate) packed: Option<Packed>,
}

/// What a core is given. Arrays are `[b,t]` where nothing else is said, numbers f32 scalars.
pub(crate) struct Given {
    /// i32
    pub(crate) ids: Value,
    /// Truth values.
    pub(crate) mask: Value,
    pub(crate) advantage: Value,
    /// Of each id beside the first.
    pub(crate) others: Vec<OtherGiven>,
    /// What the structure reads beside.
    inputs: Vec<(Input, Value)>,
    /// Where columns differ before their softmax.
    pub(crate) columns: Option<ColumnsGiven>,
    /// What `∂token_loss` is multiplied by: 0 where it is masked.
    pub(crate) grad_weight: Value,
    /// What the KL penalty is multiplied by before that, where it has a reduction of its own.
    pub(crate) kl_share: Option<Value>,
    /// `∂loss/∂entropy` of an unmasked token: a number, or an array where tokens differ in it.
    pub(crate) entropy_factor: Value,
    numbers: Numbers<Value>,
    /// Unmasked tokens of each row, over all devices that have some of it: `[b]`; `[S]` of packed sequences.
    row_counts: Value,
    /// This device's first column, a scalar i32, where the vocabulary is cut.
    pub(crate) first_column: Option<Value>,
}

/// What differs by column: see [`Columns`](assay_algebra::transform::Columns).
#[derive(Clone, Copy)]
pub(crate) struct ColumnsGiven {
    /// `[v]`: that of each column, −∞ outside the support.
    pub(crate) bias: Value,
    /// `[b,t]`: that of each target.
    pub(crate) target: Value,
}

impl Given {
    /// An array, where the structure reads it.
    pub(crate) fn input(&self, input: Input) -> Option<Value> {
        self.inputs.iter().find(|(other, _)| *other == input).map(|(_, value)| *value)
    }

    /// A number that the structure reads.
    pub(crate) fn number(&self, number: Number) -> Value {
        self.numbers.get(number)
    }

    /// What gaps are multiplied by: a scalar, or `[b,t]`.
    pub(crate) fn rate(&self, rate: Rate) -> Value {
        match rate {
            Rate::OfAll(number) => self.number(number),
            Rate::OfToken => self.input(Input::Rate).expect("the structure reads it"),
        }
    }
}

/// What of [`Given`] logp and entropy follow from.
pub(crate) struct Forward {
    pub(crate) logits: Value,
    pub(crate) ids: Value,
    pub(crate) columns: Option<ColumnsGiven>,
    /// What gaps are multiplied by, `[b,t]`, where tokens differ in it.
    pub(crate) of_tokens: Option<Value>,
    numbers: Numbers<Value>,
    pub(crate) first_column: Option<Value>,
}

impl Forward {
    /// A number of its softmaxes.
    pub(crate) fn number(&self, number: Number) -> Value {
        self.numbers.get(number)
    }

    /// As [`Given::rate`].
    pub(crate) fn rate(&self, rate: Rate) -> Value {
        match rate {
            Rate::OfAll(number) => self.number(number),
            Rate::OfToken => self.of_tokens.expect("the structure reads it"),
        }
    }
}

impl Given {
    pub(crate) fn forward(&self, logits: Value) -> Forward {
        let &Self { ids, columns, first_column, .. } = self;
        let of_tokens = self.input(Input::Rate);
        Forward { logits, ids, columns, of_tokens, numbers: self.numbers.clone(), first_column }
    }

    /// The same of other ids, with advantages of their own and what is added to their columns.
    pub(crate) fn of_ids(&self, ids: Value, advantage: Value, columns: Option<ColumnsGiven>) -> Given {
        Given { ids, advantage, columns, ..self.part(&mut |array| array) }
    }

    /// What a core is given of some of the tokens, each array as `part` cuts it. Not of a loss whose rows must be whole.
    pub(crate) fn part(&self, part: &mut impl FnMut(Value) -> Value) -> Given {
        Given {
            ids: part(self.ids),
            mask: part(self.mask),
            advantage: part(self.advantage),
            others: self.others.iter().map(|of| OtherGiven { ids: part(of.ids), dlogp: part(of.dlogp) }).collect(),
            inputs: self.inputs.iter().map(|&(input, value)| (input, part(value))).collect(),
            columns: self.columns.map(|columns| ColumnsGiven { target: part(columns.target), ..columns }),
            grad_weight: part(self.grad_weight),
            kl_share: self.kl_share.map(&mut *part),
            entropy_factor: part(self.entropy_factor),
            numbers: self.numbers.clone(),
            row_counts: self.row_counts,
            first_column: self.first_column,
        }
    }
}

/// What a core returns. Arrays are `[b,t]` and, where the mask hides a token, anything.
pub(crate) struct Evaluated<G = Value> {
    /// 0 where it is masked: dlogits `[b,t,v]` in the logits' dtype, or what becomes of them.
    pub(crate) gradient: G,
    pub(crate) logp: Value,
    /// `[b,t,K−1]`, where a token has several ids.
    pub(crate) logp_of_others: Option<Value>,
    pub(crate) entropy: Value,
    pub(crate) token: TokenLoss<Value, Value>,
}

/// How a program is given its logits.
#[derive(Clone, Copy)]
pub(crate) struct LogitsGiven {
    pub(crate) dtype: Dtype,
    /// To kernels that are not XLA's.
    pub(crate) to_kernels: bool,
    /// In the order that JAX has every array in, and kernels read. The compiler's own choice pads least: where four sequences are
    /// cut into registers of four rows, half of each register is idle.
    pub(crate) row_major: bool,
    /// Dlogits are written over them.
    pub(crate) donated: bool,
}

/// The program for a device's share of logits, with `core` in its middle.
///
/// Parameters: [logits](logits_array); ids i32, mask pred, where sequences are packed the number of each token's i32; advantages
/// f32, where a token has several ids those beside the first and the cotangents of their logp, `[b,t,K−1]` i32 and f32, then the structure's [inputs](Structure::inputs) f32, all `[b,t]`; where columns differ before their softmax, the
/// [bias](ColumnsGiven) of each `[v]` and of each target `[b,t]`, f32; its [numbers](Structure::program_numbers) f32; and where the
/// vocabulary is cut, the device's first column
/// as a scalar i32.
pub(crate) fn program(
    structure: Structure,
    share: Share,
    given: LogitsGiven,
    core: impl FnOnce(&mut Program, &Given, Value) -> Evaluated,
) -> String {
    let logits = |builder: &mut Builder| logits_parameter(builder, share.local, given);
    let dtype = given.dtype;
    frame(structure, share, logits, |on, given, logits| {
        let evaluated = several::around(on, structure, given, logits, dtype, core);
        let Evaluated { gradient, logp, logp_of_others, entropy, token } = evaluated;
        Evaluated { gradient: [gradient], logp, logp_of_others, entropy, token }
    })
}

/// Logits where they cross the boundary of a program: `[b,t,v]`; for kernels that are not XLA's `[1,b·t,v]`, and f16 as i16,
/// its bits. A TPU would write f16 anew to read it as its bits, and all logits anew to read them in rows: where tokens are
/// no multiple of eight, its memory has gaps between sequences.
fn logits_array(local: [usize; 3], dtype: Dtype, for_kernels: bool) -> Type {
    if for_kernels {
        let (element, shape) = logits_in_rows(local, dtype.into());
        Type { element, shape }
    } else {
        Type::new(dtype.into(), &local)
    }
}

/// Element type and extents of `local` logits where they are given to kernels that are not XLA's.
pub fn logits_in_rows(local: [usize; 3], element: DeviceDtype) -> (DeviceDtype, Vec<usize>) {
    (stored_as(element), in_rows(local).to_vec())
}

fn logits_parameter(builder: &mut Builder, local: [usize; 3], given: LogitsGiven) -> Value {
    let over = given.donated.then_some(Output::Gradient as usize);
    let logits = builder.parameter(logits_array(local, given.dtype, given.to_kernels), over);
    if given.row_major {
        builder.lay_out_row_major(logits);
    }
    logits
}

/// The program whose first parameters are those that `arrays` writes, with `core` in its middle, which is given them. Its
/// outputs are the first gradient, what else [`Output`] names of every program, and the other gradients.
#[expect(clippy::too_many_lines, reason = "parameters, weights, core and outputs of one program, in their order")]
pub(crate) fn frame<A, const GRADIENTS: usize>(
    structure: Structure,
    Share { local, mesh, vocab, packed }: Share,
    arrays: impl FnOnce(&mut Builder) -> A,
    core: impl FnOnce(&mut Program, &Given, A) -> Evaluated<[Value; GRADIENTS]>,
) -> String {
    let [b, t, v] = local;
    let mut builder = Builder::default();
    let per_token = |element| Type::new(element, &[b, t]);
    let arrays = arrays(&mut builder);
    let ids = builder.parameter(per_token(DeviceDtype::I32), None);
    let mask = builder.parameter(per_token(DeviceDtype::Pred), None);
    let packed = packed.map(|count| Packed { of_tokens: builder.parameter(per_token(DeviceDtype::I32), None), count });
    let advantage = builder.parameter(per_token(DeviceDtype::F32), None);
    let others = (structure.top > 1).then(|| {
        let others = |element| Type::new(element, &[b, t, structure.top - 1]);
        [DeviceDtype::I32, DeviceDtype::F32].map(|element| builder.parameter(others(element), None))
    });
    let inputs = structure.inputs().into_iter();
    let inputs: Vec<(Input, Value)> =
        inputs.map(|input| (input, builder.parameter(per_token(DeviceDtype::F32), None))).collect();
    let columns = structure.transform.is_some_and(|transform| transform.columns);
    let columns = columns.then(|| ColumnsGiven {
        bias: builder.parameter(Type::new(DeviceDtype::F32, &[v]), None),
        target: builder.parameter(per_token(DeviceDtype::F32), None),
    });
    let of_spec = structure.program_numbers();
    let numbers = builder.parameter(Type::new(DeviceDtype::F32, &[of_spec.len()]), None);
    let first_column = (mesh.vocab > 1).then(|| builder.parameter(Type::new(DeviceDtype::I32, &[]), None));

    let mut on = Program { builder, local, mesh, vocab, packed };
    let numbers = of_spec.into_iter().enumerate().map(|(i, number)| (number, on.builder.element_at(numbers, i)));
    let numbers = Numbers::new(numbers.collect::<Vec<_>>());
    let others = others.map_or_else(Vec::new, |others| {
        let [ids, dlogp] = others.map(|array| several::apart(&mut on, array));
        ids.into_iter().zip(dlogp).map(|(ids, dlogp)| OtherGiven { ids, dlogp }).collect()
    });
    let loss_scale = numbers.get(Number::LossScale);
    let counts = on.counts(mask);
    let known = |known, epsilon, denominator: Denominator| Known {
        denominator,
        given: Some(numbers.get(known)),
        epsilon: denominator.epsilon.then(|| numbers.get(epsilon)),
    };
    let divisor = on.divisor(&counts, known(Number::Denominator, Number::DenominatorEpsilon, structure.denominator));
    let weight = on.share(mask, divisor);
    let grad_weight = on.times(weight, loss_scale);
    let kl_share = structure.kl.and_then(|kl| kl.denominator).map(|denominator| {
        let of_kl = on.divisor(&counts, known(Number::KlDenominator, Number::KlDenominatorEpsilon, denominator));
        let [divisor, of_kl] = [divisor, of_kl].map(|divisor| on.per_token(divisor));
        on.builder.divide(divisor, of_kl)
    });
    let dentropy = inputs.iter().find(|(input, _)| *input == Input::Dentropy).map(|(_, value)| *value);
    let entropy_weight = if let Some(dentropy) = dentropy {
        // Nothing that the mask hides is multiplied.
        let nothing = on.constant(0.0);
        let counted = on.builder.select(mask, dentropy, nothing);
        on.times(counted, numbers.get(Number::EntropyCoef))
    } else {
        let denominator = structure.entropy_bonus.unwrap_or(Denominator::ALL_TOKENS);
        let own = denominator != Denominator::ALL_TOKENS;
        let (known_part, epsilon) = (Number::EntropyDenominator, Number::EntropyDenominatorEpsilon);
        let plain = Known { denominator, given: None, epsilon: None };
        let divisor = on.divisor(&counts, if own { known(known_part, epsilon, denominator) } else { plain });
        let coef = numbers.get(Number::EntropyCoef);
        if denominator.by_row() {
            let share = on.share(mask, divisor);
            on.times(share, coef)
        } else {
            on.builder.divide(coef, divisor)
        }
    };
    let entropy_factor = on.times(entropy_weight, loss_scale);
    let entropy_factor = on.builder.negate(entropy_factor);
    let given = Given {
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
    let Evaluated { gradient, logp, logp_of_others, entropy, token } = core(&mut on, &given, arrays);
    let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;

    let scalars = {
        let mut weighted = on.builder.multiply(weight, reduced);
        if structure.entropy_bonus.is_some() {
            let weight = on.per_token(entropy_weight);
            let bonus = on.builder.multiply(weight, entropy);
            weighted = on.builder.subtract(weighted, bonus);
        }
        let clipped = on.builder.or(clipped_low, clipped_high);
        let zero = on.constant(0.0);
        let mut sums = [zero; Scalars::COUNT];
        sums[Scalars::LOSS] = on.total(mask, weighted);
        sums[Scalars::ENTROPY_MEAN] = on.total(mask, entropy);
        sums[Scalars::RATIO_MEAN] = on.total(mask, ratio);
        sums[Scalars::KL_MEAN] = on.total(mask, kl.unwrap_or(zero));
        for (place, truth) in
            [(Scalars::CLIP_LOW, clipped_low), (Scalars::CLIP_HIGH, clipped_high), (Scalars::CLIP_REGION, clipped)]
        {
            let share = on.builder.convert(truth, DeviceDtype::F32);
            sums[place] = on.total(mask, share);
        }
        on.means(&sums, counts.of_batch)
    };

    let zero = on.constant(0.0);
    let mut masked = |value| on.builder.select(mask, value, zero);
    let (logp, entropy, token_loss) = (masked(logp), masked(entropy), masked(loss));
    let (first, others) = gradient.split_first().expect("a program has a gradient");
    let of_others: Vec<Value> = logp_of_others.into_iter().collect();
    on.builder.finish(&[&[*first, logp, entropy, token_loss, scalars], others, &of_others].concat())
}

/// The program that returns logp and entropy alone, of which `core` makes both, and writes no dlogits. Rows are whole on
/// every device.
///
/// Parameters: [logits](logits_array), which stay; ids i32 and mask pred, `[b,t]`; `1/T` f32, a scalar, or `[b,t]` where it is given.
pub(crate) fn forward(
    structure: Structure,
    Share { local, mesh, vocab, .. }: Share,
    given: LogitsGiven,
    core: impl FnOnce(&mut Program, &Forward) -> [Value; 2],
) -> String {
    let [b, t, _] = local;
    let mut builder = Builder::default();
    let logits = logits_parameter(&mut builder, local, given);
    let ids = builder.parameter(Type::new(DeviceDtype::I32, &[b, t]), None);
    let mask = builder.parameter(Type::new(DeviceDtype::Pred, &[b, t]), None);
    let by_token = structure.temperature == Temperature::Given;
    let extents: &[usize] = if by_token { &[b, t] } else { &[] };
    let inverse_temperature = builder.parameter(Type::new(DeviceDtype::F32, extents), None);
    let mut on = Program { builder, local, mesh, vocab, packed: None };
    let numbers = Numbers::new((!by_token).then_some((Number::InverseTemperature, inverse_temperature)));
    let of_tokens = by_token.then_some(inverse_temperature);
    let given = Forward { logits, ids, columns: None, of_tokens, numbers, first_column: None };
    let outputs = core(&mut on, &given);
    let zero = on.constant(0.0);
    let outputs = outputs.map(|value| on.builder.select(mask, value, zero));
    on.builder.finish(&outputs)
}

/// The parameters and the outputs of [`forward`] for a TPU.
pub(crate) fn forward_signature(structure: Structure, local: [usize; 3], dtype: Dtype) -> [Vec<Named>; 2] {
    let [b, t, _] = local;
    let Type { element, shape } = logits_array(local, dtype, true);
    let named = |name, dtype, shape: &[usize]| Named { name, dtype, shape: shape.to_vec(), columns: vec![] };
    let by_token = structure.temperature == Temperature::Given;
    let inputs = vec![
        named("logits", element, &shape),
        named("ids", DeviceDtype::I32, &[b, t]),
        named("mask", DeviceDtype::Pred, &[b, t]),
        if by_token {
            named(Input::Rate.name(), DeviceDtype::F32, &[b, t])
        } else {
            named("inverse_temperature", DeviceDtype::F32, &[])
        },
    ];
    [inputs, vec![named("logp", DeviceDtype::F32, &[b, t]), named("entropy", DeviceDtype::F32, &[b, t])]]
}

/// How many tokens count.
struct Counts {
    /// `[b]`; `[S]` of packed sequences.
    of_rows: Value,
    /// A scalar.
    of_batch: Value,
}

/// A denominator with the scalars that are given of it.
struct Known {
    denominator: Denominator,
    given: Option<Value>,
    epsilon: Option<Value>,
}

impl Program {
    /// A scalar in every place of `[b,t]`; an array as it is.
    pub(crate) fn per_token(&mut self, value: Value) -> Value {
        let [b, t, _] = self.local;
        if self.builder.type_of(value).shape.is_empty() { self.builder.broadcast(value, &[], &[b, t]) } else { value }
    }

    fn scalar(&mut self, x: f64) -> Value {
        self.builder.constant(x, Type::new(DeviceDtype::F32, &[]))
    }

    /// `a · factor`, for `a` of any shape: a scalar, or one a token.
    pub(crate) fn times(&mut self, a: Value, factor: Value) -> Value {
        let shape = self.builder.type_of(a).shape.clone();
        let of_factor = self.builder.type_of(factor).shape.len();
        let factor = if of_factor == shape.len() && of_factor > 0 {
            factor
        } else {
            self.builder.broadcast(factor, &[0, 1][..of_factor], &shape)
        };
        self.builder.multiply(a, factor)
    }

    /// `a` folded over the devices along `axes`.
    pub(crate) fn over(&mut self, axes: &[Axis], fold: Fold, a: Value) -> Value {
        self.builder.all_reduce(fold, a, &self.mesh.groups(axes))
    }

    /// The loss of each token, and `∂loss/∂logp` of each: see [`own_log_ratio`] and [`token_loss`].
    ///
    /// Where tokens share a ratio, with `c` their weights, `x` their own log-ratios and `n` the tokens of the row:
    ///
    /// ```text
    /// sequence_token   w = Σ x / (n + ε)     G_t = c_t (∂f_t/∂ℓ + ∂f_t/∂w)
    /// sequence         w = Σ x / (n + ε)     G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w / (n + ε)
    /// sequence_product w = Σ x               G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w
    /// ```
    pub(crate) fn token_loss(
        &mut self,
        structure: Structure,
        given: &Given,
        logp: Value,
    ) -> (TokenLoss<Value, Value>, Value) {
        let numbers = structure.numbers().into_iter().map(|number| (number, self.per_token(given.number(number))));
        let numbers = Numbers::new(numbers.collect::<Vec<_>>());
        let old_logp = given.input(Input::OldLogp).unwrap_or(logp);
        let own = own_log_ratio(self, structure, &numbers, [logp, old_logp, given.advantage]);
        let count = matches!(structure.level, RatioLevel::Sequence | RatioLevel::SequenceToken).then(|| {
            let count = self.of_rows(given.row_counts);
            self.builder.add(count, numbers.get(Number::RatioEpsilon))
        });
        let over_count = |on: &mut Self, sum: Value| match count {
            Some(count) => on.builder.divide(sum, count),
            None => sum,
        };
        let log_ratio = if structure.level == RatioLevel::Token {
            own.value
        } else {
            let sum = self.row_sum(given.mask, own.value);
            over_count(self, sum)
        };
        let log_weight = given.input(Input::LogWeight).map(|of_sampler| {
            let x = self.builder.subtract(logp, old_logp);
            let (least, most) = (self.constant(-20.0), self.constant(20.0));
            let x = self.builder.maximum(x, least);
            let x = self.builder.minimum(x, most);
            let of_tokens = self.row_sum(given.mask, x);
            self.builder.add(of_tokens, of_sampler)
        });
        let on_policy = given.input(Input::Behaviour).map(|behaviour| {
            let zero = self.constant(0.0);
            let scored = self.equal(behaviour, behaviour);
            let fallen = self.builder.subtract(behaviour, logp);
            let fallen = self.builder.select(scored, fallen, zero);
            let sum = self.row_sum(given.mask, fallen);
            let count = self.of_rows(given.row_counts);
            let mean = self.builder.divide(sum, count);
            let gains = self.builder.compare(Comparison::AtLeast, given.advantage, zero);
            let near = self.builder.compare(Comparison::AtLeast, numbers.get(Number::OffPolicyThreshold), mean);
            self.builder.or(gains, near)
        });
        let token = Token {
            logp,
            old_logp,
            advantage: given.advantage,
            log_ratio,
            own,
            ref_logp: given.input(Input::RefLogp),
            rollout_logp: given.input(Input::RolloutLogp),
            policy_weight: given.input(Input::PolicyWeight),
            kl_weight: given.input(Input::KlWeight),
            kl_share: given.kl_share,
            selected: given.input(Input::Selected),
            log_weight,
            on_policy,
        };
        let token = token_loss(self, structure, &numbers, &token);
        let weighed = |on: &mut Self, slope: Value| on.builder.multiply(given.grad_weight, slope);
        let grad = match structure.level {
            RatioLevel::Sequence | RatioLevel::SequenceProduct => {
                let at_first_hand = token.by_logp.map(|slope| weighed(self, slope));
                let through_ratio = token.by_log_ratio.map(|slope| {
                    let owed = weighed(self, slope);
                    let owed = self.row_sum(given.mask, owed);
                    let owed = over_count(self, owed);
                    unless(self, own.held, owed)
                });
                sum(self, at_first_hand, through_ratio)
            }
            RatioLevel::SequenceToken => {
                let slope = sum(self, token.by_logp, token.by_log_ratio);
                weighed(self, slope)
            }
            RatioLevel::Token => {
                let slope = token.grad(self, own);
                weighed(self, slope)
            }
        };
        (token, grad)
    }

    /// A number of each row, `[b]`, or of each packed sequence, `[S]`, in the places of its tokens; 0 in those of none.
    fn of_rows(&mut self, rows: Value) -> Value {
        let [b, t, _] = self.local;
        let Some(packed) = self.packed else { return self.builder.broadcast(rows, &[0], &[b, t]) };
        // A sum in which all but one are 0 is exact.
        let rows = self.builder.broadcast(rows, &[0], &[packed.count, b, t]);
        let own = self.of_own_sequence(packed, rows);
        self.builder.reduce(Fold::Add, own, &[0])
    }

    /// Of `[S,b,t]` values, 0 where the token is not of the sequence.
    fn of_own_sequence(&mut self, Packed { of_tokens, count }: Packed, values: Value) -> Value {
        let [b, t, _] = self.local;
        let extents = [count, b, t];
        let number = self.builder.iota(0, Type::new(DeviceDtype::I32, &extents));
        let of_tokens = self.builder.broadcast(of_tokens, &[1, 2], &extents);
        let own = self.builder.compare(Comparison::Equal, number, of_tokens);
        let zero = self.builder.constant(0.0, Type::new(DeviceDtype::F32, &extents));
        self.builder.select(own, values, zero)
    }

    /// The sum of `[b,t]` values over each row, `[b]`, or over each packed sequence, `[S]`, on whichever devices its tokens
    /// are.
    fn sums_of_rows(&mut self, values: Value) -> Value {
        let [b, t, _] = self.local;
        let Some(packed) = self.packed else {
            let sums = self.builder.reduce(Fold::Add, values, &[1]);
            return self.over(&[Axis::Tokens], Fold::Add, sums);
        };
        let values = self.builder.broadcast(values, &[1, 2], &[packed.count, b, t]);
        let own = self.of_own_sequence(packed, values);
        let sums = self.builder.reduce(Fold::Add, own, &[1, 2]);
        self.over(&Axis::ROWS, Fold::Add, sums)
    }

    /// The sum of a number of each row over all rows.
    fn sum_of_all_rows(&mut self, rows: Value) -> Value {
        let sum = self.builder.reduce(Fold::Add, rows, &[0]);
        // Every device has all packed sequences.
        if self.packed.is_some() { sum } else { self.over(&[Axis::Batch], Fold::Add, sum) }
    }

    /// The sum over a row's unmasked tokens, on whichever devices they are, in the places of all its tokens.
    fn row_sum(&mut self, mask: Value, values: Value) -> Value {
        let zero = self.constant(0.0);
        let unmasked = self.builder.select(mask, values, zero);
        let sums = self.sums_of_rows(unmasked);
        self.of_rows(sums)
    }

    fn counts(&mut self, mask: Value) -> Counts {
        let ones = self.builder.convert(mask, DeviceDtype::F32);
        let of_rows = self.sums_of_rows(ones);
        let of_batch = self.sum_of_all_rows(of_rows);
        Counts { of_rows, of_batch }
    }

    /// What a term of a token is divided by: `[b,t]` where rows differ in it, else a scalar, which is then a number above
    /// 0 even where no token counts.
    fn divisor(&mut self, counts: &Counts, Known { denominator, given, epsilon }: Known) -> Value {
        let tokens = denominator.tokens.map(|tokens| match tokens {
            Tokens::OfBatch => self.at_least_one(counts.of_batch),
            Tokens::OfRow => self.of_rows(counts.of_rows),
        });
        let tokens = match (tokens, epsilon) {
            (Some(tokens), Some(epsilon)) if denominator.by_row() => {
                let epsilon = self.per_token(epsilon);
                Some(self.builder.add(tokens, epsilon))
            }
            (Some(tokens), Some(epsilon)) => Some(self.builder.add(tokens, epsilon)),
            (tokens, _) => tokens,
        };
        let filled = denominator.filled_rows.then(|| {
            let of_rows = self.builder.type_of(counts.of_rows).clone();
            let zero = self.builder.constant(0.0, of_rows);
            let filled = self.builder.compare(Comparison::Less, zero, counts.of_rows);
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
    fn share(&mut self, mask: Value, divisor: Value) -> Value {
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let divisor = self.per_token(divisor);
        let share = self.builder.divide(one, divisor);
        self.builder.select(mask, share, zero)
    }

    /// The sum of `[b,t]` values over this device's unmasked tokens.
    fn total(&mut self, mask: Value, values: Value) -> Value {
        let zero = self.constant(0.0);
        let unmasked = self.builder.select(mask, values, zero);
        self.builder.reduce(Fold::Add, unmasked, &[0, 1])
    }

    fn at_least_one(&mut self, count: Value) -> Value {
        let one = self.scalar(1.0);
        let none = self.builder.compare(Comparison::Less, count, one);
        self.builder.select(none, one, count)
    }

    /// The loss and the metrics, from their sums over this device's tokens.
    fn means(&mut self, sums: &[Value; Scalars::COUNT], count: Value) -> Value {
        let sums = self.builder.vector(sums);
        let sums = self.over(&[Axis::Batch, Axis::Tokens], Fold::Add, sums);
        let count = self.at_least_one(count);
        let mut values: Vec<Value> = (0..Scalars::COUNT).map(|i| self.builder.element_at(sums, i)).collect();
        for mean in &mut values[Scalars::ENTROPY_MEAN..] {
            *mean = self.builder.divide(*mean, count);
        }
        self.builder.vector(&values)
    }
}

/// On `[b,t]`, f32.
impl Arithmetic for Program {
    type Value = Value;
    type Truth = Value;

    fn constant(&mut self, x: f64) -> Value {
        let [b, t, _] = self.local;
        self.builder.constant(x, Type::new(DeviceDtype::F32, &[b, t]))
    }
    fn add(&mut self, a: Value, b: Value) -> Value {
        self.builder.add(a, b)
    }
    fn sub(&mut self, a: Value, b: Value) -> Value {
        self.builder.subtract(a, b)
    }
    fn mul(&mut self, a: Value, b: Value) -> Value {
        self.builder.multiply(a, b)
    }
    fn div(&mut self, a: Value, b: Value) -> Value {
        self.builder.divide(a, b)
    }
    fn neg(&mut self, a: Value) -> Value {
        self.builder.negate(a)
    }
    fn exp(&mut self, a: Value) -> Value {
        self.builder.exponential(a)
    }
    fn exp_m1(&mut self, a: Value) -> Value {
        self.builder.exponential_minus_one(a)
    }
    fn ln(&mut self, a: Value) -> Value {
        self.builder.log(a)
    }
    fn ln_1p(&mut self, a: Value) -> Value {
        self.builder.log_plus_one(a)
    }
    fn less(&mut self, a: Value, b: Value) -> Value {
        self.builder.compare(Comparison::Less, a, b)
    }
    fn equal(&mut self, a: Value, b: Value) -> Value {
        self.builder.compare(Comparison::Equal, a, b)
    }
    fn and(&mut self, a: Value, b: Value) -> Value {
        self.builder.and(a, b)
    }
    fn or(&mut self, a: Value, b: Value) -> Value {
        self.builder.or(a, b)
    }
    fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.builder.select(condition, yes, no)
    }
}
