//! A program while it is being written: what its core is given and makes, its outputs, and the losses of tokens.

use serde::Serialize;

use crate::mesh::{Mesh, MeshAxis};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{TokenArray, TokenArrays, TokenLoss, sequence_losses};
use assay_algebra::structure::{GapRate, SpecNumber, SpecNumbers, Structure, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Shape;
use assay_tile::TileMachine;
use assay_tile::stablehlo::{Fold, HloBuilder, HloComparison, HloType, HloValue};

/// The outputs of the program, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramOutput {
    /// `[b,t,v]`, over the logits, or `[b,t,h]`, over the hidden states.
    Gradient,
    /// The log-probability of each target, `[b,t]`.
    Logp,
    /// The entropy of each token, `[b,t]`.
    Entropy,
    /// The loss of each token, `[b,t]`.
    TokenLoss,
    /// The loss and the metrics, in the order of [`ScalarOutputs`].
    Scalars,
    /// `[h,v]` or `[v,h]`, where there is a head.
    DlmHead,
}

impl ProgramOutput {
    /// Returns the index of the output `[b,t,K−1]` with the logp of the other ids, after all outputs of a program
    /// with so many gradients.
    pub fn logp_of_others(gradients: usize) -> usize {
        ProgramOutput::Scalars as usize + gradients
    }
}

/// Places in the vector of scalars.
pub struct ScalarOutputs;

impl ScalarOutputs {
    /// The index of the loss.
    pub const LOSS: usize = 0;
    /// See [`Metrics`](assay_core::problem::Metrics) for this and the rest.
    pub const ENTROPY_MEAN: usize = 1;
    /// The index of the mean ratio.
    pub const RATIO_MEAN: usize = 2;
    /// The mean KL estimate; 0 where there is no penalty.
    pub const KL_MEAN: usize = 3;
    /// The share of tokens clipped low.
    pub const CLIP_LOW: usize = 4;
    /// The index of the share of tokens clipped from above.
    pub const CLIP_HIGH: usize = 5;
    /// The index of the share of tokens clipped either way.
    pub const CLIP_REGION: usize = 6;
    /// The number of scalars in the vector.
    pub const COUNT: usize = 7;
    /// The names of the scalars, in order.
    pub const NAMES: [&str; Self::COUNT] =
        ["loss", "entropy_mean", "ratio_mean", "kl_mean", "clip_low", "clip_high", "clip_region"];
}

/// Extents that one device holds, which is one of `machine`.
pub fn local_shape(shape: Shape, mesh: Mesh, machine: TileMachine) -> [usize; 3] {
    [shape.batch.div_ceil(mesh.batch), shape.tokens.div_ceil(mesh.tokens), columns(shape.vocab, mesh.vocab, machine)]
}

/// Returns the number of columns of `vocab` on each of `devices`: enough to fill a device's registers if that costs
/// at most one column in 64.
fn columns(vocab: usize, devices: usize, machine: TileMachine) -> usize {
    let even = vocab.div_ceil(devices);
    // A device whose columns fill its registers masks none of them; where that would cost more than one column in 64,
    // the even cut is kept.
    let full = even.next_multiple_of(machine.memory_columns);
    if devices > 1 && full - even <= even / 64 { full } else { even }
}

/// The part of a batch that one device has.
#[derive(Clone, Copy)]
pub(crate) struct DeviceShare {
    /// The extents `[b, t, v]` of the device's logits.
    pub(crate) local: [usize; 3],
    pub(crate) mesh: Mesh,
    /// The size `V` of the whole vocabulary.
    pub(crate) vocab: usize,
    /// `S`, where sequences are packed into one row.
    pub(crate) packed: Option<usize>,
}

impl DeviceShare {
    /// Returns the share of logits of `shape` on a mesh of devices of this machine.
    pub(crate) fn new(shape: Shape, packed: Option<usize>, mesh: Mesh, machine: TileMachine) -> Self {
        Self { local: local_shape(shape, mesh, machine), mesh, vocab: shape.vocab, packed }
    }
}

/// The sequences that are packed into one row.
#[derive(Clone, Copy)]
pub(crate) struct PackedSequences {
    /// The number of each token's, i32 `[b,t]`; −1 where it is of none.
    pub(crate) of_tokens: HloValue,
    /// The number `S` of packed sequences.
    pub(crate) count: usize,
}

/// An operand or a result of a program or a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamedArray {
    /// The name of the array in manifests.
    pub name: &'static str,
    /// The dtype of its elements.
    pub dtype: DeviceDtype,
    /// The extents of the array, row-major.
    pub shape: Vec<usize>,
    /// The names of the columns in the last axis, if they hold different things.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<&'static str>,
}

/// The program while it is being written.
pub(crate) struct Program {
    pub(crate) builder: HloBuilder,
    /// The extents `[b, t, v]` of the device's logits.
    pub(crate) local: [usize; 3],
    pub(crate) mesh: Mesh,
    /// The size `V` of the whole vocabulary.
    pub(crate) vocab: usize,
    /// `None` where each row is a sequence.
    pub(crate) packed: Option<PackedSequences>,
}

/// The inputs of a core. Arrays are `[b,t]` and numbers f32 scalars unless stated otherwise.
pub(crate) struct CoreInputs {
    /// The target id of each token, i32.
    pub(crate) ids: HloValue,
    /// Whether each token counts, truth values.
    pub(crate) mask: HloValue,
    pub(crate) advantage: HloValue,
    /// The other ids of each token, if there are several.
    pub(crate) others: Vec<OtherId>,
    /// The arrays that the structure reads in addition.
    pub(crate) inputs: Vec<(TokenInput, HloValue)>,
    /// The biases of columns, if they differ before their softmax.
    pub(crate) columns: Option<HloBiases>,
    /// The factor of `∂token_loss`, 0 if the token is masked.
    pub(crate) grad_weight: HloValue,
    /// The factor of the KL penalty before that, if it has a reduction of its own.
    pub(crate) kl_share: Option<HloValue>,
    /// `∂loss/∂entropy` of an unmasked token: a number, or an array where tokens differ in it.
    pub(crate) entropy_factor: HloValue,
    pub(crate) numbers: SpecNumbers<HloValue>,
    /// Unmasked tokens of each row, over all devices that have some of it: `[b]`; `[S]` of packed sequences.
    pub(crate) row_counts: HloValue,
    /// The device's first column, a scalar i32, if the vocabulary is distributed.
    pub(crate) first_column: Option<HloValue>,
}

/// An id of each token beside its first, and the cotangent of its logp, `[b,t]`, i32 and f32.
#[derive(Clone, Copy)]
pub(crate) struct OtherId {
    pub(crate) ids: HloValue,
    pub(crate) dlogp: HloValue,
}

/// The differences between columns: see [`ColumnBiases`](assay_algebra::transform::ColumnBiases).
#[derive(Clone, Copy)]
pub(crate) struct HloBiases {
    /// `[v]`: that of each column, −∞ outside the support.
    pub(crate) bias: HloValue,
    /// `[b,t]`: that of each target.
    pub(crate) target: HloValue,
}

impl CoreInputs {
    /// An array, where the structure reads it.
    pub(crate) fn input(&self, input: TokenInput) -> Option<HloValue> {
        self.inputs.iter().find(|(other, _)| *other == input).map(|(_, value)| *value)
    }

    /// A number that the structure reads.
    pub(crate) fn number(&self, number: SpecNumber) -> HloValue {
        self.numbers.get(number)
    }

    /// Returns the factor of gaps: a scalar, or `[b,t]`.
    pub(crate) fn rate(&self, rate: GapRate) -> HloValue {
        match rate {
            GapRate::OfAll(number) => self.number(number),
            GapRate::OfToken => self.input(TokenInput::Rate).expect("the structure reads it"),
        }
    }
}

/// The part of [`CoreInputs`] that logp and entropy depend on.
pub(crate) struct SoftmaxInputs {
    pub(crate) logits: HloValue,
    pub(crate) ids: HloValue,
    pub(crate) columns: Option<HloBiases>,
    /// The factors of gaps, `[b,t]`, if tokens differ in them.
    pub(crate) of_tokens: Option<HloValue>,
    pub(crate) numbers: SpecNumbers<HloValue>,
    pub(crate) first_column: Option<HloValue>,
}

impl SoftmaxInputs {
    /// A number of its softmaxes.
    pub(crate) fn number(&self, number: SpecNumber) -> HloValue {
        self.numbers.get(number)
    }

    /// Returns the factor of gaps, as [`CoreInputs::rate`] does.
    pub(crate) fn rate(&self, rate: GapRate) -> HloValue {
        match rate {
            GapRate::OfAll(number) => self.number(number),
            GapRate::OfToken => self.of_tokens.expect("the structure reads it"),
        }
    }
}

impl CoreInputs {
    pub(crate) fn forward(&self, logits: HloValue) -> SoftmaxInputs {
        let &Self { ids, columns, first_column, .. } = self;
        let of_tokens = self.input(TokenInput::Rate);
        SoftmaxInputs { logits, ids, columns, of_tokens, numbers: self.numbers.clone(), first_column }
    }

    /// Returns the inputs with other ids, and with advantages and biases that belong to those.
    pub(crate) fn with_ids(&self, ids: HloValue, advantage: HloValue, columns: Option<HloBiases>) -> CoreInputs {
        CoreInputs { ids, advantage, columns, ..self.part(&mut |array| array) }
    }

    /// Returns the inputs of some of the tokens, each array as `part` cuts it, for a loss whose rows need not be
    /// whole.
    pub(crate) fn part(&self, part: &mut impl FnMut(HloValue) -> HloValue) -> CoreInputs {
        CoreInputs {
            ids: part(self.ids),
            mask: part(self.mask),
            advantage: part(self.advantage),
            others: self.others.iter().map(|of| OtherId { ids: part(of.ids), dlogp: part(of.dlogp) }).collect(),
            inputs: self.inputs.iter().map(|&(input, value)| (input, part(value))).collect(),
            columns: self.columns.map(|columns| HloBiases { target: part(columns.target), ..columns }),
            grad_weight: part(self.grad_weight),
            kl_share: self.kl_share.map(&mut *part),
            entropy_factor: part(self.entropy_factor),
            numbers: self.numbers.clone(),
            row_counts: self.row_counts,
            first_column: self.first_column,
        }
    }
}

/// The results of a core. Arrays are `[b,t]`, and masked tokens hold anything.
pub(crate) struct CoreOutputs<G = HloValue> {
    /// 0 where it is masked: dlogits `[b,t,v]` in the logits' dtype, or what becomes of them.
    pub(crate) gradient: G,
    pub(crate) logp: HloValue,
    /// `[b,t,K−1]`, where a token has several ids.
    pub(crate) logp_of_others: Option<HloValue>,
    pub(crate) entropy: HloValue,
    pub(crate) token: TokenLoss<HloValue, HloValue>,
}

impl Program {
    /// A scalar in every place of `[b,t]`; an array as it is.
    pub(crate) fn per_token(&mut self, value: HloValue) -> HloValue {
        let [b, t, _] = self.local;
        if self.builder.type_of(value).shape.is_empty() { self.builder.broadcast(value, &[], &[b, t]) } else { value }
    }

    pub(crate) fn scalar(&mut self, x: f64) -> HloValue {
        self.builder.constant(x, HloType::new(DeviceDtype::F32, &[]))
    }

    /// `a · factor`, for `a` of any shape: a scalar, or one a token.
    pub(crate) fn times(&mut self, a: HloValue, factor: HloValue) -> HloValue {
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
    pub(crate) fn over(&mut self, axes: &[MeshAxis], fold: Fold, a: HloValue) -> HloValue {
        self.builder.all_reduce(fold, a, &self.mesh.groups(axes))
    }

    /// The loss of each token, and `∂loss/∂logp` of each: see [`sequence_losses`].
    pub(crate) fn token_loss(
        &mut self,
        structure: Structure,
        given: &CoreInputs,
        logp: HloValue,
    ) -> (TokenLoss<HloValue, HloValue>, HloValue) {
        let numbers = structure.numbers().into_iter().map(|number| (number, self.per_token(given.number(number))));
        let numbers = SpecNumbers::new(numbers.collect::<Vec<_>>());
        let arrays = TokenArrays::load(structure, |array| match array {
            TokenArray::Advantage => given.advantage,
            TokenArray::KlShare => given.kl_share.expect("a KL penalty with a reduction of its own"),
            TokenArray::Input(input) => given.input(input).expect("the structure reads it"),
        });
        let sequence_sum = |on: &mut Self, value: HloValue| on.row_sum(given.mask, value);
        let token_count = |on: &mut Self| on.spread_rows(given.row_counts);
        sequence_losses(self, structure, &numbers, [logp, given.grad_weight], arrays, sequence_sum, token_count)
    }

    /// A number of each row, `[b]`, or of each packed sequence, `[S]`, in the places of its tokens; 0 in those of none.
    pub(crate) fn spread_rows(&mut self, rows: HloValue) -> HloValue {
        let [b, t, _] = self.local;
        let Some(packed) = self.packed else { return self.builder.broadcast(rows, &[0], &[b, t]) };
        // A sum in which all but one are 0 is exact.
        let rows = self.builder.broadcast(rows, &[0], &[packed.count, b, t]);
        let own = self.own_sequence_values(packed, rows);
        self.builder.reduce(Fold::Add, own, &[0])
    }

    /// Returns `[S,b,t]` values with 0 for tokens of other sequences.
    fn own_sequence_values(
        &mut self,
        PackedSequences { of_tokens, count }: PackedSequences,
        values: HloValue,
    ) -> HloValue {
        let [b, t, _] = self.local;
        let extents = [count, b, t];
        let number = self.builder.iota(0, HloType::new(DeviceDtype::I32, &extents));
        let of_tokens = self.builder.broadcast(of_tokens, &[1, 2], &extents);
        let own = self.builder.compare(HloComparison::Equal, number, of_tokens);
        let zero = self.builder.constant(0.0, HloType::new(DeviceDtype::F32, &extents));
        self.builder.select(own, values, zero)
    }

    /// The sum of `[b,t]` values over each row, `[b]`, or over each packed sequence, `[S]`, on whichever devices its tokens
    /// are.
    pub(crate) fn sums_of_rows(&mut self, values: HloValue) -> HloValue {
        let [b, t, _] = self.local;
        let Some(packed) = self.packed else {
            let sums = self.builder.reduce(Fold::Add, values, &[1]);
            return self.over(&[MeshAxis::Tokens], Fold::Add, sums);
        };
        // Each token's value goes into the line of its own sequence, [S,b,t], and 0 into all others.
        let values = self.builder.broadcast(values, &[1, 2], &[packed.count, b, t]);
        let own = self.own_sequence_values(packed, values);
        let sums = self.builder.reduce(Fold::Add, own, &[1, 2]);
        self.over(&MeshAxis::ROWS, Fold::Add, sums)
    }

    /// The sum of a number of each row over all rows.
    pub(crate) fn sum_of_all_rows(&mut self, rows: HloValue) -> HloValue {
        let sum = self.builder.reduce(Fold::Add, rows, &[0]);
        // Every device has all packed sequences.
        if self.packed.is_some() { sum } else { self.over(&[MeshAxis::Batch], Fold::Add, sum) }
    }

    /// The sum over a row's unmasked tokens, on whichever devices they are, in the places of all its tokens.
    fn row_sum(&mut self, mask: HloValue, values: HloValue) -> HloValue {
        let zero = self.constant(0.0);
        let unmasked = self.builder.select(mask, values, zero);
        let sums = self.sums_of_rows(unmasked);
        self.spread_rows(sums)
    }
}

/// The arithmetic of a token's loss on arrays `[b,t]` of f32.
impl Arithmetic for Program {
    type Value = HloValue;
    type Truth = HloValue;

    fn constant(&mut self, x: f64) -> HloValue {
        let [b, t, _] = self.local;
        self.builder.constant(x, HloType::new(DeviceDtype::F32, &[b, t]))
    }
    fn add(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.add(a, b)
    }
    fn sub(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.subtract(a, b)
    }
    fn mul(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.multiply(a, b)
    }
    fn div(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.divide(a, b)
    }
    fn neg(&mut self, a: HloValue) -> HloValue {
        self.builder.negate(a)
    }
    fn exp(&mut self, a: HloValue) -> HloValue {
        self.builder.exponential(a)
    }
    fn exp_m1(&mut self, a: HloValue) -> HloValue {
        self.builder.exponential_minus_one(a)
    }
    fn ln(&mut self, a: HloValue) -> HloValue {
        self.builder.log(a)
    }
    fn ln_1p(&mut self, a: HloValue) -> HloValue {
        self.builder.log_plus_one(a)
    }
    fn less(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.compare(HloComparison::Less, a, b)
    }
    fn equal(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.compare(HloComparison::Equal, a, b)
    }
    fn and(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.and(a, b)
    }
    fn or(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.or(a, b)
    }
    fn at_least(&mut self, a: HloValue, b: HloValue) -> HloValue {
        self.builder.compare(HloComparison::AtLeast, a, b)
    }
    fn clamp(&mut self, a: HloValue, bounds: [f64; 2]) -> HloValue {
        let [least, most] = bounds.map(|bound| self.constant(bound));
        let raised = self.builder.maximum(a, least);
        self.builder.minimum(raised, most)
    }
    fn select(&mut self, condition: HloValue, yes: HloValue, no: HloValue) -> HloValue {
        self.builder.select(condition, yes, no)
    }
}
