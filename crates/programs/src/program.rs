//! A program while it is being written: what its core is given and makes, its outputs, and the losses of tokens.

use serde::Serialize;

use crate::mesh::{Axis, Mesh};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{TokenArray, TokenArrays, TokenLoss, sequence_losses};
use assay_algebra::structure::{GapRate, SpecNumber, SpecNumbers, Structure, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Shape;
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
    pub(crate) vocab: usize,
    /// `S`, where sequences are packed into one row.
    pub(crate) packed: Option<usize>,
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
    pub(crate) of_tokens: Value,
    /// `S`
    pub(crate) count: usize,
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
    pub(crate) inputs: Vec<(TokenInput, Value)>,
    /// Where columns differ before their softmax.
    pub(crate) columns: Option<ColumnsGiven>,
    /// What `∂token_loss` is multiplied by: 0 where it is masked.
    pub(crate) grad_weight: Value,
    /// What the KL penalty is multiplied by before that, where it has a reduction of its own.
    pub(crate) kl_share: Option<Value>,
    /// `∂loss/∂entropy` of an unmasked token: a number, or an array where tokens differ in it.
    pub(crate) entropy_factor: Value,
    pub(crate) numbers: SpecNumbers<Value>,
    /// Unmasked tokens of each row, over all devices that have some of it: `[b]`; `[S]` of packed sequences.
    pub(crate) row_counts: Value,
    /// This device's first column, a scalar i32, where the vocabulary is cut.
    pub(crate) first_column: Option<Value>,
}

/// An id of each token beside its first, and the cotangent of its logp, `[b,t]`, i32 and f32.
#[derive(Clone, Copy)]
pub(crate) struct OtherGiven {
    pub(crate) ids: Value,
    pub(crate) dlogp: Value,
}

/// What differs by column: see [`ColumnBiases`](assay_algebra::transform::ColumnBiases).
#[derive(Clone, Copy)]
pub(crate) struct ColumnsGiven {
    /// `[v]`: that of each column, −∞ outside the support.
    pub(crate) bias: Value,
    /// `[b,t]`: that of each target.
    pub(crate) target: Value,
}

impl Given {
    /// An array, where the structure reads it.
    pub(crate) fn input(&self, input: TokenInput) -> Option<Value> {
        self.inputs.iter().find(|(other, _)| *other == input).map(|(_, value)| *value)
    }

    /// A number that the structure reads.
    pub(crate) fn number(&self, number: SpecNumber) -> Value {
        self.numbers.get(number)
    }

    /// What gaps are multiplied by: a scalar, or `[b,t]`.
    pub(crate) fn rate(&self, rate: GapRate) -> Value {
        match rate {
            GapRate::OfAll(number) => self.number(number),
            GapRate::OfToken => self.input(TokenInput::Rate).expect("the structure reads it"),
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
    pub(crate) numbers: SpecNumbers<Value>,
    pub(crate) first_column: Option<Value>,
}

impl Forward {
    /// A number of its softmaxes.
    pub(crate) fn number(&self, number: SpecNumber) -> Value {
        self.numbers.get(number)
    }

    /// As [`Given::rate`].
    pub(crate) fn rate(&self, rate: GapRate) -> Value {
        match rate {
            GapRate::OfAll(number) => self.number(number),
            GapRate::OfToken => self.of_tokens.expect("the structure reads it"),
        }
    }
}

impl Given {
    pub(crate) fn forward(&self, logits: Value) -> Forward {
        let &Self { ids, columns, first_column, .. } = self;
        let of_tokens = self.input(TokenInput::Rate);
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

impl Program {
    /// A scalar in every place of `[b,t]`; an array as it is.
    pub(crate) fn per_token(&mut self, value: Value) -> Value {
        let [b, t, _] = self.local;
        if self.builder.type_of(value).shape.is_empty() { self.builder.broadcast(value, &[], &[b, t]) } else { value }
    }

    pub(crate) fn scalar(&mut self, x: f64) -> Value {
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

    /// The loss of each token, and `∂loss/∂logp` of each: see [`sequence_losses`].
    pub(crate) fn token_loss(
        &mut self,
        structure: Structure,
        given: &Given,
        logp: Value,
    ) -> (TokenLoss<Value, Value>, Value) {
        let numbers = structure.numbers().into_iter().map(|number| (number, self.per_token(given.number(number))));
        let numbers = SpecNumbers::new(numbers.collect::<Vec<_>>());
        let arrays = TokenArrays::load(structure, |array| match array {
            TokenArray::Advantage => given.advantage,
            TokenArray::KlShare => given.kl_share.expect("a KL penalty with a reduction of its own"),
            TokenArray::Input(input) => given.input(input).expect("the structure reads it"),
        });
        let sequence_sum = |on: &mut Self, value: Value| on.row_sum(given.mask, value);
        let token_count = |on: &mut Self| on.of_rows(given.row_counts);
        sequence_losses(self, structure, &numbers, [logp, given.grad_weight], arrays, sequence_sum, token_count)
    }

    /// A number of each row, `[b]`, or of each packed sequence, `[S]`, in the places of its tokens; 0 in those of none.
    pub(crate) fn of_rows(&mut self, rows: Value) -> Value {
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
    pub(crate) fn sums_of_rows(&mut self, values: Value) -> Value {
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
    pub(crate) fn sum_of_all_rows(&mut self, rows: Value) -> Value {
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
    fn at_least(&mut self, a: Value, b: Value) -> Value {
        self.builder.compare(Comparison::AtLeast, a, b)
    }
    fn clamp(&mut self, a: Value, bounds: [f64; 2]) -> Value {
        let [least, most] = bounds.map(|bound| self.constant(bound));
        let raised = self.builder.maximum(a, least);
        self.builder.minimum(raised, most)
    }
    fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        self.builder.select(condition, yes, no)
    }
}
