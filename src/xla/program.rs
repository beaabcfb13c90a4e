//! The program around a core: what becomes of token losses, whatever computes them.
//!
//! One program serves every mesh. A device holds `[b, t, v]` of `[B, T, V]`; row counts are reduced over the tokens'
//! devices, everything that is one number over the rows' as well. Tokens past `B` or `T` are masked.

use super::tiled::Named;
use crate::element::Element;
use crate::kernels::arithmetic::Arithmetic;
use crate::kernels::objective::{Numbers, Token, TokenLoss, token_loss};
use crate::kernels::rows::stored_as;
use crate::kernels::structure::{Denominator, Structure};
use crate::problem::{Dtype, Shape};
use crate::runtime::{Axis, Mesh};
use crate::spec::{LossSpec, Reduction};
use crate::stablehlo::{Builder, Comparison, Fold, Type, Value};

/// How many numbers [`numbers`] gives.
pub(super) const NUMBERS: usize = 9;

/// Their names, in order.
pub(super) const NUMBER_NAMES: [&str; NUMBERS] =
    ["low", "high", "delta", "dual_clip", "beta", "inverse_temperature", "entropy_coef", "denominator", "loss_scale"];

/// The run-time numbers of a spec, in the order that the program reads them. The last is the cotangent of the loss, which
/// multiplies dlogits.
pub(super) fn numbers(spec: &LossSpec, batch: usize) -> [f32; NUMBERS] {
    let Numbers { low, high, delta, dual_clip, beta } = Numbers::of(spec);
    let denominator = match spec.reduction {
        Reduction::TokenMean => 1.0,
        Reduction::SequenceMean { .. } => batch as f64,
        Reduction::FixedLength { length, .. } => batch as f64 * length.unwrap_or(1) as f64,
        Reduction::SequenceSum { .. } => 1.0,
        Reduction::Normalizer(value) => value,
    };
    let (inverse_temperature, loss_scale) = (spec.temperature.recip(), 1.0);
    [low, high, delta, dual_clip, beta, inverse_temperature, spec.entropy_coef, denominator, loss_scale]
        .map(|x| x as f32)
}

/// The outputs of the program, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// `[b,t,v]`, over the logits.
    Dlogits,
    /// `[b,t]`
    Logp,
    /// `[b,t]`
    Entropy,
    /// `[b,t]`
    TokenLoss,
    /// The loss and the metrics, in the order of [`Scalars`].
    Scalars,
}

/// Places in the vector of scalars.
pub(super) struct Scalars;

impl Scalars {
    pub(super) const LOSS: usize = 0;
    pub(super) const ENTROPY_MEAN: usize = 1;
    pub(super) const RATIO_MEAN: usize = 2;
    pub(super) const KL_MEAN: usize = 3;
    pub(super) const CLIP_LOW: usize = 4;
    pub(super) const CLIP_HIGH: usize = 5;
    pub(super) const CLIP_REGION: usize = 6;
    pub(super) const COUNT: usize = 7;
    /// In order.
    pub(super) const NAMES: [&str; Self::COUNT] =
        ["loss", "entropy_mean", "ratio_mean", "kl_mean", "clip_low", "clip_high", "clip_region"];
}

/// Extents that one device holds.
pub(super) fn local_shape(shape: Shape, mesh: Mesh) -> [usize; 3] {
    [shape.batch.div_ceil(mesh.batch), shape.tokens.div_ceil(mesh.tokens), shape.vocab.div_ceil(mesh.vocab)]
}

/// The parameters and the outputs of [`program`] for a TPU, on a mesh that does not cut the vocabulary.
pub(super) fn signature(structure: Structure, local: [usize; 3], dtype: Dtype) -> [Vec<Named>; 2] {
    let [b, t, _] = local;
    let named = |name, dtype, shape: &[usize]| Named { name, dtype, shape: shape.to_vec(), columns: &[] };
    let per_token = |name, dtype| named(name, dtype, &[b, t]);
    let mut inputs = vec![
        named("logits", stored_as(dtype.into()), &local),
        per_token("ids", Element::I32),
        per_token("mask", Element::Pred),
        per_token("advantages", Element::F32),
    ];
    inputs.extend(structure.old_logp_given.then(|| per_token("old_logp", Element::F32)));
    inputs.extend(structure.kl.map(|_| per_token("ref_logp", Element::F32)));
    inputs.push(Named { columns: &NUMBER_NAMES, ..named("numbers", Element::F32, &[NUMBERS]) });
    let outputs = vec![
        named("dlogits", stored_as(dtype.into()), &local),
        per_token("logp", Element::F32),
        per_token("entropy", Element::F32),
        per_token("token_loss", Element::F32),
        Named { columns: &Scalars::NAMES, ..named("scalars", Element::F32, &[Scalars::COUNT]) },
    ];
    [inputs, outputs]
}

/// The program while it is being written.
pub(super) struct Program {
    pub(super) builder: Builder,
    /// `[b, t, v]`
    pub(super) local: [usize; 3],
    pub(super) mesh: Mesh,
    /// `V`
    pub(super) vocab: usize,
}

/// What a core is given. Arrays are `[b,t]` where nothing else is said, numbers f32 scalars.
pub(super) struct Given {
    /// `[b,t,v]`
    pub(super) logits: Value,
    /// i32
    pub(super) ids: Value,
    /// Truth values.
    pub(super) mask: Value,
    pub(super) advantage: Value,
    pub(super) old_logp: Option<Value>,
    pub(super) ref_logp: Option<Value>,
    /// What `∂token_loss` is multiplied by: 0 where it is masked.
    pub(super) grad_weight: Value,
    /// `∂loss/∂entropy` of an unmasked token, a number.
    pub(super) entropy_factor: Value,
    pub(super) numbers: Numbers<Value>,
    /// `1/T`
    pub(super) inverse_temperature: Value,
    /// This device's first column, a scalar i32, where the vocabulary is cut.
    pub(super) first_column: Option<Value>,
}

/// What of [`Given`] logp and entropy follow from.
#[derive(Clone, Copy)]
pub(super) struct Forward {
    pub(super) logits: Value,
    pub(super) ids: Value,
    pub(super) inverse_temperature: Value,
    pub(super) first_column: Option<Value>,
}

impl Given {
    pub(super) fn forward(&self) -> Forward {
        let &Self { logits, ids, inverse_temperature, first_column, .. } = self;
        Forward { logits, ids, inverse_temperature, first_column }
    }
}

/// What a core returns. Arrays are `[b,t]` and, where the mask hides a token, anything.
pub(super) struct Evaluated {
    /// `[b,t,v]`, the logits' dtype, 0 where it is masked.
    pub(super) dlogits: Value,
    pub(super) logp: Value,
    pub(super) entropy: Value,
    pub(super) token: TokenLoss<Value, Value>,
}

/// The program for logits of `shape` and `dtype`, cut over `mesh`, with `core` in its middle. `row_major` is how logits must
/// lie on a TPU for kernels that are not XLA's; f16 ones are then i16, their bits.
///
/// Parameters: logits `[b,t,v]`; ids i32, mask pred, advantages f32, then `old_logp` and `ref_logp` f32 where the structure
/// has them, all `[b,t]`; the numbers f32; and where the vocabulary is cut, the device's first column as a scalar i32.
pub(super) fn program(
    structure: Structure,
    shape: Shape,
    dtype: Dtype,
    mesh: Mesh,
    row_major: bool,
    core: impl FnOnce(&mut Program, &Given) -> Evaluated,
) -> String {
    let local = local_shape(shape, mesh);
    let [b, t, _] = local;
    let mut builder = Builder::default();
    let per_token = |element| Type::new(element, &[b, t]);
    // A TPU would write f16 anew to read it as its bits: there they cross the boundary of the program as bits.
    let element = if row_major { stored_as(dtype.into()) } else { dtype.into() };
    let logits = builder.parameter(Type::new(element, &local), Some(Output::Dlogits as usize));
    if row_major {
        builder.lay_out_row_major(logits);
    }
    let ids = builder.parameter(per_token(Element::I32), None);
    let mask = builder.parameter(per_token(Element::Pred), None);
    let advantage = builder.parameter(per_token(Element::F32), None);
    let old_logp = structure.old_logp_given.then(|| builder.parameter(per_token(Element::F32), None));
    let ref_logp = structure.kl.map(|_| builder.parameter(per_token(Element::F32), None));
    let numbers = builder.parameter(Type::new(Element::F32, &[NUMBERS]), None);
    let first_column = (mesh.vocab > 1).then(|| builder.parameter(Type::new(Element::I32, &[]), None));

    let mut on = Program { builder, local, mesh, vocab: shape.vocab };
    let number: Vec<Value> = (0..NUMBERS).map(|i| on.builder.element_at(numbers, i)).collect();
    let [low, high, delta, dual_clip, beta, inverse_temperature, entropy_coef, denominator, loss_scale] = number[..]
    else {
        unreachable!("NUMBERS of them")
    };
    let numbers = Numbers { low, high, delta, dual_clip, beta };
    let (weight, count) = on.weights(structure.denominator, mask, denominator);
    let grad_weight = on.times(weight, loss_scale);
    let entropy_factor = {
        let count = on.at_least_one(count);
        let per_count = on.builder.divide(entropy_coef, count);
        let scaled = on.builder.multiply(per_count, loss_scale);
        on.builder.negate(scaled)
    };
    let given = Given {
        logits,
        ids,
        mask,
        advantage,
        old_logp,
        ref_logp,
        grad_weight,
        entropy_factor,
        numbers,
        inverse_temperature,
        first_column,
    };
    let Evaluated { dlogits, logp, entropy, token } = core(&mut on, &given);
    let TokenLoss { loss, ratio, kl, clipped_low, clipped_high, .. } = token;

    let scalars = {
        let weighted = on.builder.multiply(weight, loss);
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
            let share = on.builder.convert(truth, Element::F32);
            sums[place] = on.total(mask, share);
        }
        on.means(&sums, count, structure.entropy_bonus.then_some(entropy_coef))
    };

    let zero = on.constant(0.0);
    let mut masked = |value| on.builder.select(mask, value, zero);
    let (logp, entropy, token_loss) = (masked(logp), masked(entropy), masked(loss));
    on.builder.finish(&[dlogits, logp, entropy, token_loss, scalars])
}

/// The program that returns logp and entropy alone, of which `core` makes both, and writes no dlogits. Rows are whole on
/// every device.
///
/// Parameters: logits `[b,t,v]`, which stay; ids i32 and mask pred, `[b,t]`; `1/T` f32.
pub(super) fn forward(
    shape: Shape,
    dtype: Dtype,
    mesh: Mesh,
    row_major: bool,
    core: impl FnOnce(&mut Program, &Forward) -> [Value; 2],
) -> String {
    let local = local_shape(shape, mesh);
    let [b, t, _] = local;
    let mut builder = Builder::default();
    let element = if row_major { stored_as(dtype.into()) } else { dtype.into() };
    let logits = builder.parameter(Type::new(element, &local), None);
    if row_major {
        builder.lay_out_row_major(logits);
    }
    let ids = builder.parameter(Type::new(Element::I32, &[b, t]), None);
    let mask = builder.parameter(Type::new(Element::Pred, &[b, t]), None);
    let inverse_temperature = builder.parameter(Type::new(Element::F32, &[]), None);
    let mut on = Program { builder, local, mesh, vocab: shape.vocab };
    let given = Forward { logits, ids, inverse_temperature, first_column: None };
    let outputs = core(&mut on, &given);
    let zero = on.constant(0.0);
    let outputs = outputs.map(|value| on.builder.select(mask, value, zero));
    on.builder.finish(&outputs)
}

/// The parameters and the outputs of [`forward`] for a TPU.
pub(super) fn forward_signature(local: [usize; 3], dtype: Dtype) -> [Vec<Named>; 2] {
    let [b, t, _] = local;
    let named = |name, dtype, shape: &[usize]| Named { name, dtype, shape: shape.to_vec(), columns: &[] };
    let inputs = vec![
        named("logits", stored_as(dtype.into()), &local),
        named("ids", Element::I32, &[b, t]),
        named("mask", Element::Pred, &[b, t]),
        named("inverse_temperature", Element::F32, &[]),
    ];
    [inputs, vec![named("logp", Element::F32, &[b, t]), named("entropy", Element::F32, &[b, t])]]
}

impl Program {
    /// A scalar in every place of `[b,t]`.
    pub(super) fn per_token(&mut self, scalar: Value) -> Value {
        let [b, t, _] = self.local;
        self.builder.broadcast(scalar, &[], &[b, t])
    }

    fn scalar(&mut self, x: f64) -> Value {
        self.builder.constant(x, Type::new(Element::F32, &[]))
    }

    /// `a · scalar`, for `a` of any shape.
    pub(super) fn times(&mut self, a: Value, scalar: Value) -> Value {
        let shape = self.builder.type_of(a).shape.clone();
        let scalar = self.builder.broadcast(scalar, &[], &shape);
        self.builder.multiply(a, scalar)
    }

    /// `a` folded over the devices along `axes`.
    pub(super) fn over(&mut self, axes: &[Axis], fold: Fold, a: Value) -> Value {
        self.builder.all_reduce(fold, a, &self.mesh.groups(axes))
    }

    /// The loss of each token.
    pub(super) fn token_loss(&mut self, structure: Structure, given: &Given, logp: Value) -> TokenLoss<Value, Value> {
        let Numbers { low, high, delta, dual_clip, beta } = given.numbers;
        let numbers = Numbers {
            low: self.per_token(low),
            high: self.per_token(high),
            delta: self.per_token(delta),
            dual_clip: self.per_token(dual_clip),
            beta: self.per_token(beta),
        };
        let old_logp = given.old_logp.unwrap_or(logp);
        let token = Token { logp, old_logp, advantage: given.advantage, kl: structure.kl.zip(given.ref_logp) };
        token_loss(self, &numbers, &token)
    }

    /// What each token's loss is multiplied by, `[b,t]`, and how many tokens there are, a scalar.
    fn weights(&mut self, denominator: Denominator, mask: Value, given: Value) -> (Value, Value) {
        let [b, t, _] = self.local;
        let ones = self.builder.convert(mask, Element::F32);
        let row_counts = self.builder.reduce(Fold::Add, ones, &[1]);
        let row_counts = self.over(&[Axis::Tokens], Fold::Add, row_counts);
        let count = self.builder.reduce(Fold::Add, row_counts, &[0]);
        let count = self.over(&[Axis::Batch], Fold::Add, count);

        let per_row_token = |program: &mut Self, rows: Value| {
            let counts = program.builder.broadcast(row_counts, &[0], &[b, t]);
            program.times(counts, rows)
        };
        let divisor = match denominator {
            Denominator::Tokens => self.per_token(count),
            Denominator::Given => self.per_token(given),
            Denominator::RowTokens => per_row_token(self, given),
            Denominator::RowTokensFilledRows => {
                let zero = self.builder.constant(0.0, Type::new(Element::F32, &[b]));
                let filled = self.builder.compare(Comparison::Less, zero, row_counts);
                let filled = self.builder.convert(filled, Element::F32);
                let rows = self.builder.reduce(Fold::Add, filled, &[0]);
                let rows = self.over(&[Axis::Batch], Fold::Add, rows);
                per_row_token(self, rows)
            }
        };
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let weight = self.builder.divide(one, divisor);
        (self.builder.select(mask, weight, zero), count)
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
    fn means(&mut self, sums: &[Value; Scalars::COUNT], count: Value, entropy_coef: Option<Value>) -> Value {
        let sums = self.builder.vector(sums);
        let sums = self.over(&[Axis::Batch, Axis::Tokens], Fold::Add, sums);
        let count = self.at_least_one(count);
        let mut values: Vec<Value> = (0..Scalars::COUNT).map(|i| self.builder.element_at(sums, i)).collect();
        for mean in &mut values[Scalars::ENTROPY_MEAN..] {
            *mean = self.builder.divide(*mean, count);
        }
        if let Some(coef) = entropy_coef {
            let bonus = self.builder.multiply(coef, values[Scalars::ENTROPY_MEAN]);
            values[Scalars::LOSS] = self.builder.subtract(values[Scalars::LOSS], bonus);
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
        self.builder.constant(x, Type::new(Element::F32, &[b, t]))
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
    fn neg(&mut self, a: Value) -> Value {
        self.builder.negate(a)
    }
    fn exp(&mut self, a: Value) -> Value {
        self.builder.exponential(a)
    }
    fn exp_m1(&mut self, a: Value) -> Value {
        self.builder.exponential_minus_one(a)
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
