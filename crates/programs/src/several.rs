//! Logp of several ids a token, by a core that knows one.
//!
//! The core is given the likeliest id `y` of each token and the sum of its cotangents, and makes dlogits of them. Around it stand the
//! logits of all ids, which are gathered before dlogits go over them: with `x` what the softmax is of,
//!
//! ```text
//! log p_k = log p_y − (x_y − x_k)/T        dx_k = (C·(1 − p_k) − R·p_k)/T
//! ```
//!
//! with `C` the sum of the cotangents at the places of the id, and `R` at the others. `1 − p` is `−expm1(log p)`: of `y` its logp has all
//! digits however near 0 it is, and of the others `p ≤ ½`. These columns are then set, all places of an id to the same number, rounded
//! once. Of a cut vocabulary the gathered logits, `[b,t,K]`, are added up over the devices.

use super::program::{CoreInputs, CoreOutputs, HloBiases, OtherId, Program};
use crate::mesh::MeshAxis;
use crate::rows::stored_as;
use assay_algebra::structure::{SpecNumber, Structure};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Dtype;
use assay_tile::stablehlo::{Fold, HloComparison, HloType, HloValue};

/// Writes `core` for logits of `dtype`, and the ids that it does not know if tokens have several.
pub(crate) fn around(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    dtype: Dtype,
    core: impl FnOnce(&mut Program, &CoreInputs, HloValue) -> CoreOutputs,
) -> CoreOutputs {
    if structure.ids_per_token == 1 {
        return core(on, given, logits);
    }
    let several = SeveralIds::gather(on, structure, given, logits, dtype);
    let one = several.as_one(on, given);
    let of_one = core(on, &one, logits);
    several.expand(on, structure, given, of_one, dtype)
}

/// Joins `[b,t]` arrays into `[b,t,n]`.
pub(crate) fn together(on: &mut Program, arrays: &[HloValue]) -> HloValue {
    let columns: Vec<HloValue> = arrays
        .iter()
        .map(|&array| {
            let shape = [&on.builder.type_of(array).shape[..], &[1]].concat();
            on.builder.reshape(array, &shape)
        })
        .collect();
    on.builder.concatenate(&columns, 2)
}

/// The `[b,t]` arrays of `[b,t,n]`.
pub(crate) fn apart(on: &mut Program, array: HloValue) -> Vec<HloValue> {
    let [b, t, count] = on.builder.type_of(array).shape[..] else { unreachable!("three axes") };
    let column = |k| {
        let column = on.builder.slice(array, &[0, 0, k], &[b, t, 1]);
        on.builder.reshape(column, &[b, t])
    };
    (0..count).map(column).collect()
}

/// The logits and the cotangents of all ids of a token, `[b,t,K]`.
struct SeveralIds {
    ids: HloValue,
    /// The columns of the ids on this device, i32; one past the last if another device has the id, or the token is
    /// masked.
    columns: HloValue,
    /// 0 where the mask is false.
    dlogp: HloValue,
    /// The inputs of the softmax at the ids.
    x: HloValue,
    /// Whether an id is the first of the likeliest ids, truth values.
    likeliest: HloValue,
    /// The distance `(x_y − x_k)/T` below the likeliest id.
    below: HloValue,
    /// The bias of each id, if columns differ.
    bias: Option<HloValue>,
    /// The extents `[b,t,K]` of these arrays.
    shape: [usize; 3],
}

impl SeveralIds {
    /// Reads the logits of all ids, which are of `dtype`.
    fn gather(on: &mut Program, structure: Structure, given: &CoreInputs, logits: HloValue, dtype: Dtype) -> Self {
        let [b, t, v] = on.local;
        let shape = [b, t, structure.ids_per_token];
        let integers = HloType::new(DeviceDtype::I32, &shape);
        let (zero, none) = (on.several(&shape, 0.0), on.builder.constant(v as f64, integers.clone()));
        let first = OtherId { ids: given.ids, dlogp: on.builder.negate(given.advantage) };
        let (ids, dlogp): (Vec<HloValue>, Vec<HloValue>) =
            std::iter::once(&first).chain(&given.others).map(|of| (of.ids, of.dlogp)).unzip();
        let [ids, dlogp] = [ids, dlogp].map(|arrays| together(on, &arrays));
        // Masked tokens have no cotangent, so that nothing they hold is multiplied.
        let counts = on.builder.broadcast(given.mask, &[0, 1], &shape);
        let dlogp = on.builder.select(counts, dlogp, zero);

        let mut columns = ids;
        if let Some(first_column) = given.first_column {
            let first_column = on.builder.broadcast(first_column, &[], &shape);
            columns = on.builder.subtract(columns, first_column);
        }
        let start = on.builder.constant(0.0, integers);
        // Ids of other devices, and of masked tokens, point past the last column: a scatter drops them.
        let not_before = on.builder.compare(HloComparison::AtLeast, columns, start);
        let not_after = on.builder.compare(HloComparison::Less, columns, none);
        let here = on.builder.and(not_before, not_after);
        let here = on.builder.and(here, counts);
        let columns = on.builder.select(here, columns, none);

        let logits = on.rows_of_floats(logits, dtype);
        let places = on.builder.reshape(columns, &[1, b * t, structure.ids_per_token]);
        let taken = on.builder.take_several_along_last(logits, places);
        let taken = on.builder.convert(taken, DeviceDtype::F32);
        let taken = on.builder.reshape(taken, &shape);
        let from_all = |on: &mut Program, taken| {
            let own = on.builder.select(here, taken, zero);
            on.over(&[MeshAxis::Vocab], Fold::Add, own)
        };
        let mut x = from_all(on, taken);
        let bias = given.columns.map(|of_columns| {
            let taken = on.builder.take(of_columns.bias, columns);
            from_all(on, taken)
        });
        if let Some(bias) = bias {
            x = on.builder.add(x, bias);
        }
        if let Some(transform) = structure.transform {
            x = on.times(x, given.number(SpecNumber::LogitFactor));
            if transform.caps {
                x = on.builder.tanh(x);
            }
        }

        // Distances from the likeliest id are exact where it matters: its own is 0.
        let most = on.builder.reduce(Fold::Max, x, &[2]);
        let most = on.builder.broadcast(most, &[0, 1], &shape);
        let is_most = on.builder.compare(HloComparison::Equal, x, most);
        let likeliest = on.first_of(is_most, shape);
        let gap = on.builder.subtract(most, x);
        // Where both are −∞.
        let gap = on.builder.select(is_most, zero, gap);
        let below = structure.gap_rates()[0].map_or(gap, |rate| on.times(gap, given.rate(rate)));
        Self { ids, columns, dlogp, x, likeliest, below, bias, shape }
    }

    /// Returns the inputs of a core that knows one id: the likeliest, with the sum of all cotangents.
    fn as_one(&self, on: &mut Program, given: &CoreInputs) -> CoreInputs {
        let zero = on.builder.constant(0.0, HloType::new(DeviceDtype::I32, &self.shape));
        let own = on.builder.select(self.likeliest, self.ids, zero);
        let ids = on.builder.reduce(Fold::Add, own, &[2]);
        let sum = on.builder.reduce(Fold::Add, self.dlogp, &[2]);
        let advantage = on.builder.negate(sum);
        let columns = given.columns.zip(self.bias).map(|(of_columns, bias)| {
            let zero = on.several(&self.shape, 0.0);
            let own = on.builder.select(self.likeliest, bias, zero);
            HloBiases { target: on.builder.reduce(Fold::Add, own, &[2]), ..of_columns }
        });
        given.with_ids(ids, advantage, columns)
    }

    /// Returns the results for all ids, from the core's results for one.
    fn expand(
        self,
        on: &mut Program,
        structure: Structure,
        given: &CoreInputs,
        evaluated: CoreOutputs,
        dtype: Dtype,
    ) -> CoreOutputs {
        let Self { ids, columns, dlogp, x, below, shape, .. } = self;
        let [b, t, top] = shape;
        let CoreOutputs { gradient, logp, entropy, mut token, .. } = evaluated;
        let of_likeliest = on.builder.broadcast(logp, &[0, 1], &shape);
        let logps = on.builder.subtract(of_likeliest, below);
        let terms = on.builder.multiply(dlogp, logps);
        token.loss = on.builder.reduce(Fold::Add, terms, &[2]);
        token.reduced = token.loss;

        let all = [b, t, top, top];
        let [one, other] = [[0, 1, 2], [0, 1, 3]].map(|axes| on.builder.broadcast(ids, &axes, &all));
        // Equal ids share a column: its own cotangents C and those of the other ids R are sums over the K places.
        let same = on.builder.compare(HloComparison::Equal, one, other);
        let of_each = on.builder.broadcast(dlogp, &[0, 1, 3], &all);
        let nothing = on.several(&all, 0.0);
        let own = on.builder.select(same, of_each, nothing);
        let own = on.builder.reduce(Fold::Add, own, &[3]);
        let rest = on.builder.select(same, nothing, of_each);
        let rest = on.builder.reduce(Fold::Add, rest, &[3]);
        // Where the temperature divides the log-probability, that of the softmax is T times it.
        let log_p = if structure.gap_rates().len() > 1 {
            let inverse = on.builder.broadcast(given.number(SpecNumber::InverseTemperature), &[], &shape);
            on.builder.divide(logps, inverse)
        } else {
            logps
        };
        let p = on.builder.exponential(log_p);
        // dx = (C·(1 − p) − R·p)/T, with 1 − p as −expm1(log p).
        let minus_others = on.builder.exponential_minus_one(log_p);
        let of_own = on.builder.multiply(own, minus_others);
        let of_rest = on.builder.multiply(rest, p);
        let sum = on.builder.add(of_own, of_rest);
        let mut dx = on.builder.negate(sum);
        if let Some(rate) = structure.gap_rates()[0] {
            dx = on.times(dx, given.rate(rate));
        }
        if let Some(transform) = structure.transform {
            dx = on.times(dx, given.number(SpecNumber::LogitFactor));
            if transform.caps {
                let (zero, one) = (on.several(&shape, 0.0), on.several(&shape, 1.0));
                let square = on.builder.multiply(x, x);
                let slope = on.builder.subtract(one, square);
                let slope = on.builder.maximum(slope, zero);
                dx = on.builder.multiply(dx, slope);
            }
        }
        let own_type = on.builder.type_of(gradient).clone();
        // All places of an id are set to the same number, so their order does not matter.
        let rows = on.rows_of_floats(gradient, dtype);
        let element = on.builder.type_of(rows).element;
        let dx = on.builder.convert(dx, element);
        let [dx, places] = [dx, columns].map(|array| on.builder.reshape(array, &[1, b * t, top]));
        let rows = on.builder.set_several_along_last(rows, places, dx);
        let gradient = on.builder.bitcast(rows, own_type.element);
        let gradient = on.builder.reshape(gradient, &own_type.shape);

        let first = on.builder.slice(logps, &[0, 0, 0], &[b, t, 1]);
        let logp = on.builder.reshape(first, &[b, t]);
        let others = on.builder.slice(logps, &[0, 0, 1], &[b, t, top - 1]);
        let counts = on.builder.broadcast(given.mask, &[0, 1], &[b, t, top - 1]);
        let nothing = on.several(&[b, t, top - 1], 0.0);
        let logp_of_others = Some(on.builder.select(counts, others, nothing));
        CoreOutputs { gradient, logp, logp_of_others, entropy, token }
    }
}

impl Program {
    /// A number in every place of `shape`.
    fn several(&mut self, shape: &[usize], x: f64) -> HloValue {
        self.builder.constant(x, HloType::new(DeviceDtype::F32, shape))
    }

    /// Logits or dlogits of `dtype` as `[1,b·t,v]` of that, however they cross the boundary of the program.
    fn rows_of_floats(&mut self, array: HloValue, dtype: Dtype) -> HloValue {
        let [b, t, v] = self.local;
        let rows = self.builder.reshape(array, &[1, b * t, v]);
        let element = DeviceDtype::from(dtype);
        if self.builder.type_of(rows).element == stored_as(element) {
            self.builder.bitcast(rows, element)
        } else {
            rows
        }
    }

    /// The first of the places `[b,t,K]` along the last axis where `is` holds; none where it nowhere does.
    fn first_of(&mut self, is: HloValue, shape: [usize; 3]) -> HloValue {
        let place = self.builder.iota(2, HloType::new(DeviceDtype::F32, &shape));
        let before = self.builder.negate(place);
        let nowhere = self.several(&shape, f64::NEG_INFINITY);
        let held = self.builder.select(is, before, nowhere);
        let first = self.builder.reduce(Fold::Max, held, &[2]);
        let first = self.builder.broadcast(first, &[0, 1], &shape);
        self.builder.compare(HloComparison::Equal, before, first)
    }
}
