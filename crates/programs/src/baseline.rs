//! The baseline program: what a careful JAX user writes with `log_softmax`, `take_along_axis` and autodiff, with the
//! gradient written out by hand.
//!
//! ```text
//! m   = max_j x_j                      a_j = (m − x_j)·(1/T)        e_j = exp(−a_j)
//! s_y = Σ_{j≠y} e_j                    S   = s_y + e_y              ā   = Σ e_j a_j / S
//! ℓ   = −(a_y + ln S)                  H   = ln S + ā
//! dx_j = −G e_j / (S·T) + E e_j (a_j − ā) / (S·T)                   G = ∂loss/∂ℓ,  E = ∂loss/∂H
//! dx_y =  G s_y / (S·T) + E e_y (a_y − ā) / (S·T)
//! ```
//!
//! A cross-entropy that reads the whole row has `∂loss/∂lse · e_j / (S·T) + ∂loss/∂mean / (V·T)` in every column besides.
//!
//! Logits are widened to f32 and every statistic is f32. The operations are those that JAX lowers this to (maximum,
//! subtract, exponential, reduce, gather, select), with five differences, each of which a careful user would make:
//! the target's logit is gathered from the logits as they are given, since a gather from their copy in f32 has XLA write
//! that copy; the target's gradient is patched by comparing columns, where autodiff scatters; `1 − p_y` is `s_y / S`, which
//! keeps its digits where the target has almost all the probability; the temperature multiplies after the maximum is
//! subtracted; and masked tokens are selected away, so that nothing they hold can reach a sum. Of the ways to write it that
//! keep those digits libtpu's bound is least here: [`alternatives`](crate::alternatives) has others, and docs/tpu.md their
//! figures.
//!
//! One program serves every mesh. A device holds `[b, t, v]` of `[B, T, V]`; max, sums and the chosen logit are
//! reduced over the vocabulary's devices, row counts over the tokens', everything that is one number over both of the
//! others. Columns past `V` are −∞ before anything looks at them, and tokens past `B` or `T` are masked.
//!
//! Where a spec changes logits before their softmax, `x` is what [`transform`](assay_algebra::transform) calls `t`, and dlogits are
//! multiplied by its slope at the end.

use super::program::{CoreInputs, CoreOutputs, HloBiases, Program};
use crate::mesh::MeshAxis;
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::cross_entropy::{WholeRow, WholeRowTerm, row_term};
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_algebra::structure::{SpecNumber, SpecNumbers, Structure, TokenInput};
use assay_algebra::transform::Transform;
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Dtype;
use assay_tile::stablehlo::{Fold, HloComparison, HloType, HloValue};

/// The core of the baseline: dlogits of `dtype` from logits of any.
pub(crate) fn core(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    dtype: Dtype,
) -> CoreOutputs {
    core_gathering(on, structure, given, logits, dtype, logits)
}

/// Writes the baseline with the target's logit gathered from `from`: the logits themselves, or a copy of them in
/// another dtype.
pub(crate) fn core_gathering(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    dtype: Dtype,
    from: HloValue,
) -> CoreOutputs {
    let columns = on.columns(given.ids, given.first_column);
    let wide = on.builder.convert(logits, DeviceDtype::F32);
    let target_logit = on.target_logit(from, &columns);
    let (x, target_logit) = match structure.transform {
        Some(transform) => on.transformed(transform, given, wide, target_logit, &columns),
        None => (wide, target_logit),
    };
    let x = on.without_padding(x, &columns);
    // The row's maximum, over all devices that have some of its columns.
    let max = on.builder.reduce(Fold::Max, x, &[2]);
    let max = on.over(&[MeshAxis::Vocab], Fold::Max, max);
    let row = SoftmaxInput { x, max, target_logit, is_target: columns.is_target };
    let scales: Vec<_> = structure.gap_rates().into_iter().map(|rate| rate.map(|rate| given.rate(rate))).collect();
    // Logp has a softmax of its own only if the temperature divides logp and not the logits.
    let entropy_softmax = on.softmax(&row, scales[0]);
    let two_softmaxes = scales.len() > 1;
    let logp_softmax = if two_softmaxes { on.softmax(&row, scales[1]) } else { entropy_softmax };

    let logp = logp_softmax.softmax.logp(on);
    let logp = if two_softmaxes { on.times(logp, given.number(SpecNumber::InverseTemperature)) } else { logp };
    let entropy = entropy_softmax.softmax.entropy(on);

    // The loss of each token, then dlogits from its derivatives by logp and by the entropy.
    let (mut token, grad_logp) = on.token_loss(structure, given, logp);
    let policy = GradientTerm { factor: grad_logp, through: &logp_softmax };
    let bonus = structure.entropy_bonus.map(|_| {
        let factor = on.per_token(given.entropy_factor);
        GradientTerm { factor, through: &entropy_softmax }
    });
    let mut dlogits = on.dlogits(&row, given.mask, &policy, bonus.as_ref(), scales[0]);
    if structure.row_terms.any() {
        let term = on.row_term(structure, given, &row, (&entropy_softmax, scales[0]), &columns);
        token.loss = on.builder.add(token.loss, term.value);
        token.reduced = on.builder.add(token.reduced, term.value);
        let of_row = on.dlogits_of_row(given, &entropy_softmax, &term, scales[0]);
        dlogits = on.builder.add(dlogits, of_row);
    }
    let dlogits = match structure.transform {
        Some(transform) => on.through(transform, given, &row, dlogits),
        None => dlogits,
    };
    let dlogits = on.builder.convert(dlogits, dtype.into());
    CoreOutputs { gradient: dlogits, logp, logp_of_others: None, entropy, token }
}

/// The position of each row's target among the columns of this device.
struct TargetColumns {
    /// `[b,t]`: the target's column on this device.
    local_ids: HloValue,
    /// `[b,t]`: whether this device has it; `None` where one device has every column.
    here: Option<HloValue>,
    /// Whether a column is its row's target, `[b,t,v]`.
    is_target: HloValue,
    /// `[b,t,v]`: columns below `V`; `None` where all are.
    real: Option<HloValue>,
}

/// The logits, widened, or what a spec makes of them.
struct SoftmaxInput {
    /// The softmax's inputs in f32, `[b,t,v]`.
    x: HloValue,
    /// The maximum over all columns, `[b,t]`.
    max: HloValue,
    /// The input at the target's column, `[b,t]`.
    target_logit: HloValue,
    /// Whether a column is its row's target, `[b,t,v]`.
    is_target: HloValue,
}

/// One softmax, and its exponentials.
#[derive(Clone, Copy)]
struct BaselineSoftmax {
    /// Gaps `a` below the maximum, times `1/T`, `[b,t,v]`.
    gap: HloValue,
    /// Exponentials `e` of the negated gaps, `[b,t,v]`.
    exp: HloValue,
    /// The sums of the softmax, `[b,t]`.
    softmax: SoftmaxStatistics<HloValue>,
}

/// A derivative of the loss, and the softmax that it goes through.
struct GradientTerm<'s> {
    /// The derivative of the loss by logp or by the entropy, `[b,t]`.
    factor: HloValue,
    through: &'s BaselineSoftmax,
}

impl Program {
    /// A scalar or `[b,t]` value in every place of `[b,t,v]`.
    fn per_element(&mut self, value: HloValue) -> HloValue {
        let dimensions: &[usize] = if self.builder.type_of(value).shape.is_empty() { &[] } else { &[0, 1] };
        self.builder.broadcast(value, dimensions, &self.local.clone())
    }

    /// A number in every place of `[b,t,v]`.
    fn constant_elements(&mut self, x: f64) -> HloValue {
        let ty = HloType::new(DeviceDtype::F32, &self.local);
        self.builder.constant(x, ty)
    }

    fn columns(&mut self, ids: HloValue, first_column: Option<HloValue>) -> TargetColumns {
        let [b, t, v] = self.local;
        let integers = |shape: &[usize]| HloType::new(DeviceDtype::I32, shape);
        let column = self.builder.iota(2, integers(&[b, t, v]));
        // A device that has every column compares ids as they are.
        let Some(first) = first_column else {
            let wanted = self.per_element(ids);
            let is_target = self.builder.compare(HloComparison::Equal, column, wanted);
            return TargetColumns { local_ids: ids, here: None, is_target, real: None };
        };
        let first_per_token = self.per_token(first);
        // Ids are counted from this device's first column; other devices' ids fall outside 0..v.
        let local_ids = self.builder.subtract(ids, first_per_token);
        let zero = self.builder.constant(0.0, integers(&[b, t]));
        let end = self.builder.constant(v as f64, integers(&[b, t]));
        let not_before = self.builder.compare(HloComparison::AtLeast, local_ids, zero);
        let not_after = self.builder.compare(HloComparison::Less, local_ids, end);
        let here = self.builder.and(not_before, not_after);
        let wanted = self.per_element(local_ids);
        let is_target = self.builder.compare(HloComparison::Equal, column, wanted);
        let real = (v * self.mesh.vocab > self.vocab).then(|| {
            let vocab = self.builder.constant(self.vocab as f64, integers(&[]));
            let left = self.builder.subtract(vocab, first);
            let left = self.per_element(left);
            self.builder.compare(HloComparison::Less, column, left)
        });
        TargetColumns { local_ids, here: Some(here), is_target, real }
    }

    /// −∞ in the columns past `V`.
    fn without_padding(&mut self, x: HloValue, columns: &TargetColumns) -> HloValue {
        let Some(real) = columns.real else { return x };
        let nothing = self.constant_elements(f64::NEG_INFINITY);
        self.builder.select(real, x, nothing)
    }

    /// `x_y` in f32, from the device that has it.
    fn target_logit(&mut self, logits: HloValue, columns: &TargetColumns) -> HloValue {
        let taken = self.builder.take_along_last(logits, columns.local_ids);
        let taken = self.builder.convert(taken, DeviceDtype::F32);
        let Some(here) = columns.here else { return taken };
        let zero = self.constant(0.0);
        // All devices but one add 0, so the sum is that one's logit, exactly.
        let own = self.builder.select(here, taken, zero);
        self.over(&[MeshAxis::Vocab], Fold::Add, own)
    }

    /// Returns the softmax's inputs from logits in f32 and from the target's logit, and the target's own input. The
    /// target's column has that input even if it is outside the support.
    fn transformed(
        &mut self,
        transform: Transform,
        given: &CoreInputs,
        wide: HloValue,
        target_logit: HloValue,
        columns: &TargetColumns,
    ) -> (HloValue, HloValue) {
        let factor = given.number(SpecNumber::LogitFactor);
        let changed = |on: &mut Self, x| {
            let x = on.times(x, factor);
            if transform.caps { on.builder.tanh(x) } else { x }
        };
        // All columns have one map where none has a bias and none is left out, the target's included.
        let Some(HloBiases { bias, target }) = given.columns else {
            return (changed(self, wide), changed(self, target_logit));
        };
        let target_logit = self.builder.add(target_logit, target);
        let target_logit = changed(self, target_logit);
        let bias = self.builder.broadcast(bias, &[2], &self.local.clone());
        let x = self.builder.add(wide, bias);
        let x = changed(self, x);
        let outside = self.constant_elements(f64::NEG_INFINITY);
        // Columns outside the support have a bias of −∞ and are selected away, whatever they hold.
        let is_outside = self.builder.compare(HloComparison::Equal, bias, outside);
        let x = self.builder.select(is_outside, outside, x);
        let of_target = self.per_element(target_logit);
        (self.builder.select(columns.is_target, of_target, x), target_logit)
    }

    /// The derivatives by the logits, from those by what the softmax is of.
    fn through(&mut self, transform: Transform, given: &CoreInputs, row: &SoftmaxInput, dlogits: HloValue) -> HloValue {
        let factor = given.number(SpecNumber::LogitFactor);
        let through_factor = self.times(dlogits, factor);
        if !transform.caps {
            return through_factor;
        }
        let (zero, one) = (self.constant_elements(0.0), self.constant_elements(1.0));
        let square = self.builder.multiply(row.x, row.x);
        let slope = self.builder.subtract(one, square);
        let slope = self.builder.maximum(slope, zero);
        let through = self.builder.multiply(through_factor, slope);
        // What is masked, or outside the support, is 0 whatever its logit is.
        let nothing = self.builder.compare(HloComparison::Equal, dlogits, zero);
        self.builder.select(nothing, zero, through)
    }

    /// Computes one softmax, with gaps multiplied by `inverse_temperature`: one number, or one for each token.
    fn softmax(&mut self, row: &SoftmaxInput, inverse_temperature: Option<HloValue>) -> BaselineSoftmax {
        let scaled = |program: &mut Self, gap| match inverse_temperature {
            Some(factor) => program.times(gap, factor),
            None => gap,
        };
        let max = self.per_element(row.max);
        let gap = self.builder.subtract(max, row.x);
        let gap = scaled(self, gap);
        let minus_gap = self.builder.negate(gap);
        let exp = self.builder.exponential(minus_gap);
        let zero = self.constant_elements(0.0);
        // The target is left out of the sum, so that 1 − p_y is a quotient of sums and not a difference.
        let of_others = self.builder.select(row.is_target, zero, exp);
        let others = self.builder.reduce(Fold::Add, of_others, &[2]);
        let others = self.over(&[MeshAxis::Vocab], Fold::Add, others);
        // A logit of −∞ has an infinite gap and no weight.
        let largest = self.constant_elements(f64::from(f32::MAX));
        let finite_gap = self.builder.minimum(gap, largest);
        let weighted = self.builder.multiply(of_others, finite_gap);
        let weighted = self.builder.reduce(Fold::Add, weighted, &[2]);
        let weighted = self.over(&[MeshAxis::Vocab], Fold::Add, weighted);

        let inverse = inverse_temperature.map(|inverse| self.per_token(inverse));
        let sums = SoftmaxSums { max: row.max, target_logit: row.target_logit, others, weighted };
        BaselineSoftmax { gap, exp, softmax: sums.softmax(self, inverse) }
    }

    /// The terms of a cross-entropy that read the whole row, `[b,t]` each, times the token's own weight.
    fn row_term(
        &mut self,
        structure: Structure,
        given: &CoreInputs,
        row: &SoftmaxInput,
        (softmax, inverse_temperature): (&BaselineSoftmax, Option<HloValue>),
        columns: &TargetColumns,
    ) -> WholeRowTerm<HloValue> {
        let numbers = structure.numbers().into_iter().map(|number| (number, self.per_token(given.number(number))));
        let numbers = SpecNumbers::new(numbers.collect::<Vec<_>>());
        let max = inverse_temperature.map_or(row.max, |inverse| self.times(row.max, inverse));
        // Gaps are not negative, so that nothing cancels in their sum; columns past `V` have none.
        let zero = self.constant_elements(0.0);
        let gaps = columns.real.map_or(softmax.gap, |real| self.builder.select(real, softmax.gap, zero));
        let sum = self.builder.reduce(Fold::Add, gaps, &[2]);
        let sum = self.over(&[MeshAxis::Vocab], Fold::Add, sum);
        let vocab = self.constant(self.vocab as f64);
        let mean_gap = self.builder.divide(sum, vocab);
        let whole = WholeRow { max, log_sum: softmax.softmax.log_sum, mean_gap };
        let term = row_term(self, structure, &numbers, whole);
        let Some(weight) = given.input(TokenInput::PolicyWeight) else { return term };
        // A weight of 0 leaves the terms out, even where they are infinite.
        let nothing = self.constant(0.0);
        let out = self.builder.compare(HloComparison::Equal, weight, nothing);
        let mut weighed = |x: HloValue| {
            let product = self.builder.multiply(weight, x);
            self.builder.select(out, nothing, product)
        };
        WholeRowTerm {
            value: weighed(term.value),
            by_log_sum_exp: weighed(term.by_log_sum_exp),
            by_mean: weighed(term.by_mean),
        }
    }

    /// The part of dlogits of those terms, `[b,t,v]`, 0 where a token is masked.
    fn dlogits_of_row(
        &mut self,
        given: &CoreInputs,
        softmax: &BaselineSoftmax,
        term: &WholeRowTerm<HloValue>,
        inverse_temperature: Option<HloValue>,
    ) -> HloValue {
        let weight = inverse_temperature.map_or(given.grad_weight, |inverse| self.times(given.grad_weight, inverse));
        let of_sum = self.builder.multiply(weight, term.by_log_sum_exp);
        let of_sum = self.builder.divide(of_sum, softmax.softmax.sum);
        let of_sum = self.per_element(of_sum);
        let of_sum = self.builder.multiply(of_sum, softmax.exp);
        let vocab = self.constant(self.vocab as f64);
        let of_mean = self.builder.multiply(weight, term.by_mean);
        let of_mean = self.builder.divide(of_mean, vocab);
        let of_mean = self.per_element(of_mean);
        let both = self.builder.add(of_sum, of_mean);
        let (zero, counts) = (self.constant_elements(0.0), self.per_element(given.mask));
        self.builder.select(counts, both, zero)
    }

    /// `[b,t,v]`, f32. A factor of 0, and a column of probability 0, leave their term out, so that nothing multiplies
    /// them into a NaN.
    fn dlogits(
        &mut self,
        row: &SoftmaxInput,
        mask: HloValue,
        policy: &GradientTerm,
        bonus: Option<&GradientTerm>,
        inverse_temperature: Option<HloValue>,
    ) -> HloValue {
        let tempered = |program: &mut Self, part: &GradientTerm| match inverse_temperature {
            Some(inverse) => program.times(part.factor, inverse),
            None => part.factor,
        };
        let zero = self.constant_elements(0.0);
        let factor = tempered(self, policy);
        let share_of_others = self.builder.divide(policy.through.softmax.others, policy.through.softmax.sum);
        // The target's gradient is G·s/(S·T), the other columns' −G·e/(S·T).
        let target = self.builder.multiply(factor, share_of_others);
        let factor = self.builder.divide(factor, policy.through.softmax.sum);
        let minus_factor = self.builder.negate(factor);
        let minus_factor = self.per_element(minus_factor);
        let others = self.builder.multiply(minus_factor, policy.through.exp);
        let nothing = self.builder.compare(HloComparison::Equal, policy.through.exp, zero);
        let others = self.builder.select(nothing, zero, others);
        let target = self.per_element(target);
        let term = self.builder.select(row.is_target, target, others);
        let no_factor = self.constant(0.0);
        let idle = self.builder.compare(HloComparison::Equal, policy.factor, no_factor);
        let Some(bonus) = bonus else {
            let no = self.builder.constant(0.0, self.builder.type_of(mask).clone());
            let counts = self.builder.select(idle, no, mask);
            let counts = self.per_element(counts);
            return self.builder.select(counts, term, zero);
        };
        let idle = self.per_element(idle);
        let policy = self.builder.select(idle, zero, term);

        let factor = tempered(self, bonus);
        let factor = self.builder.divide(factor, bonus.through.softmax.sum);
        let factor = self.per_element(factor);
        let mean_gap = self.per_element(bonus.through.softmax.mean_gap);
        // The entropy bonus adds E·e·(a − ā)/(S·T).
        let above_mean = self.builder.subtract(bonus.through.gap, mean_gap);
        // The small factor last: a device that flushes what is below the normal numbers must not flush a part.
        let exp_above_mean = self.builder.multiply(bonus.through.exp, above_mean);
        let term = self.builder.multiply(exp_above_mean, factor);
        let nothing = self.builder.compare(HloComparison::Equal, bonus.through.exp, zero);
        let term = self.builder.select(nothing, zero, term);
        let dlogits = self.builder.add(policy, term);
        let counts = self.per_element(mask);
        self.builder.select(counts, dlogits, zero)
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::{LogitsParameter, program};
    use super::super::program::DeviceShare;
    use super::*;
    use crate::ANY_DEVICE;
    use crate::mesh::Mesh;
    use assay_algebra::structure::StructuredSpec;
    use assay_core::problem::Shape;
    use assay_core::spec::{Kl, KlEstimator, LossSpec, Objective, PpoClip, Reduction, Rows};

    const SHAPE: Shape = Shape { batch: 4, tokens: 6, vocab: 13 };

    fn text(spec: &LossSpec, mesh: Mesh) -> String {
        let structure = Structure::from_spec(spec);
        let inside = |on: &mut Program, given: &CoreInputs, logits| core(on, structure, given, logits, Dtype::Bf16);
        let given = LogitsParameter { dtype: Dtype::Bf16, to_kernels: false, row_major: false, donated: true };
        program(structure, DeviceShare::new(SHAPE, None, mesh, ANY_DEVICE), given, inside)
    }

    fn spec(x: f64) -> LossSpec {
        LossSpec {
            objective: Objective::PpoClip(PpoClip {
                epsilon_low: 0.1 * x,
                epsilon_high: 0.3 * x,
                delta: (x > 1.0).then_some(2.0),
                dual_clip: (x > 1.0).then_some(3.0),
            }),
            temperature: (0.5 * x).into(),
            kl: Some(Kl::plain(0.1 * x, KlEstimator::K3)),
            entropy_coef: 0.01 * x,
            reduction: Reduction::Normalizer(7.0 * x),
            ..LossSpec::default()
        }
    }

    #[test]
    fn numbers_of_a_spec_are_run_time_inputs() {
        assert_eq!(text(&spec(1.0), Mesh::ONE), text(&spec(1.5), Mesh::ONE));
        let sum = LossSpec { reduction: Reduction::FixedLength { rows: Rows::All, length: Some(9) }, ..spec(1.0) };
        assert_eq!(text(&spec(1.0), Mesh::ONE), text(&sum, Mesh::ONE), "both divide by a given number");
        let plain = LossSpec { kl: None, ..spec(1.0) };
        assert_ne!(text(&spec(1.0), Mesh::ONE), text(&plain, Mesh::ONE));
    }

    #[test]
    fn numbers_hold_what_the_program_divides_by() {
        let denominator = |reduction| {
            let spec = LossSpec { reduction, scale: 0.5, ..spec(1.0) };
            let numbers = StructuredSpec::new(&spec).program_numbers([4, 6]);
            numbers.into_iter().find(|(number, _)| *number == SpecNumber::Denominator).unwrap().1
        };
        assert_eq!(denominator(Reduction::Normalizer(7.0)), 14.0);
        assert_eq!(denominator(Reduction::FixedLength { rows: Rows::All, length: Some(9) }), 72.0);
        assert_eq!(denominator(Reduction::FixedLength { rows: Rows::NonEmpty, length: None }), 12.0);
        assert_eq!(denominator(Reduction::SequenceMean { rows: Rows::All }), 8.0);
        assert_eq!(denominator(Reduction::SequenceSum { rows: Rows::Given(3.0) }), 6.0);
    }

    #[test]
    fn collectives_stand_only_where_the_mesh_is_cut() {
        let count = |mesh| text(&spec(1.0), mesh).matches("stablehlo.all_reduce").count();
        assert_eq!(count(Mesh::ONE), 0);
        assert_eq!(count(Mesh { batch: 2, tokens: 1, vocab: 1 }), 2, "the count of tokens, the sums");
        // Maximum, target logit, Σ e of the others, Σ e·a.
        assert_eq!(count(Mesh { batch: 1, tokens: 1, vocab: 2 }), 4);
    }

    #[test]
    fn masked_columns_are_only_those_of_a_padded_vocabulary() {
        let padded =
            |vocab| text(&spec(1.0), Mesh { batch: 1, tokens: 1, vocab }).contains("dense<0xFF800000> : tensor<4x6x");
        assert!(padded(2), "13 columns over 2 devices");
        assert!(!padded(13) && !padded(1));
    }

    #[test]
    fn logits_are_read_and_written_in_place() {
        assert!(text(&spec(1.0), Mesh::ONE).contains("@main(%0: tensor<4x6x13xbf16> {tf.aliasing_output = 0 : i32}"));
    }
}
