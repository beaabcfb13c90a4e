//! The transform of logits within a tile kernel: the `t` of [`transform`](assay_algebra::transform), in columns.

use assay_algebra::structure::{SpecNumber, Structure};
use assay_core::device_dtype::DeviceDtype;
use assay_core::tanh::{DENOMINATOR, FAR, NUMERATOR};
use assay_tile::{TileBuilder, TileMemory, TileType, TileValue};

use crate::rows::{ColumnChunk, REGISTERS, widen};

/// Whether logits differ by column in what is added to them, or in whether they are in the support.
pub(crate) fn differ_by_column(structure: Structure) -> bool {
    structure.transform.is_some_and(|transform| transform.columns)
}

/// Registers of columns that a trip of a loop takes where logits are changed: what they are on the way to that stays in registers.
const REGISTERS_CHANGED: usize = 8;

/// Registers of columns that a trip of a loop takes, at most.
pub(crate) fn registers(structure: Structure) -> usize {
    if structure.transform.is_some() { REGISTERS_CHANGED } else { REGISTERS }
}

/// The targets of a chunk's rows.
pub(crate) struct ChunkTargets<'h> {
    /// The bias of each, `[rows, 1]`.
    pub(crate) bias: TileValue,
    /// Returns whether each of the chunk's columns is its row's target.
    pub(crate) hits: &'h dyn Fn(&mut TileBuilder) -> TileValue,
}

/// The transform that a spec applies to a kernel's logits.
#[derive(Clone, Copy)]
pub(crate) struct TileTransform {
    caps: bool,
    /// A scalar, and so the next.
    factor: TileValue,
    outside: TileValue,
    /// `[1,v]`: the bias of each column, −∞ outside the support.
    bias: Option<TileMemory>,
}

impl TileTransform {
    /// Returns the transform of a structure, if it has one, with numbers from `number`, and with `bias` if columns
    /// differ.
    pub(crate) fn from_structure(
        on: &mut TileBuilder,
        structure: Structure,
        number: impl FnOnce(&mut TileBuilder, SpecNumber) -> TileValue,
        bias: Option<TileMemory>,
    ) -> Option<Self> {
        let caps = structure.transform?.caps;
        let factor = number(on, SpecNumber::LogitFactor);
        Some(Self { caps, factor, outside: on.number(f64::NEG_INFINITY), bias })
    }

    /// `t` of a chunk's columns, f32, −∞ outside the support and beyond the array; and which are outside, where columns differ. A
    /// target among them has its own bias.
    pub(crate) fn load(
        self,
        on: &mut TileBuilder,
        logits: TileMemory,
        chunk: ColumnChunk,
        target: Option<ChunkTargets>,
    ) -> (TileValue, Option<TileValue>) {
        let x = on.load(logits, chunk.column, chunk.columns);
        let x = widen(on, x);
        let [rows, columns] = on.type_of(x).tile.expect("logits are loaded as tiles");
        // The target has its own bias, which may be finite although its column is outside the support.
        let bias = self.bias.map(|bias| {
            let bias = on.load(bias, chunk.column, chunk.columns);
            let bias = on.broadcast(bias, rows, columns);
            match target {
                Some(target) => {
                    let hit = (target.hits)(on);
                    on.select(hit, target.bias, bias)
                }
                None => bias,
            }
        });
        let mut t = self.apply(on, x, bias);
        let outside = bias.map(|bias| on.equal(bias, self.outside));
        if let Some(outside) = outside {
            t = on.select(outside, self.outside, t);
        }
        // Columns beyond the array become −∞, so that they add nothing.
        if let Some(real) = chunk.real {
            let lane = on.iota(1, rows, columns);
            let inside = on.less(lane, real);
            t = on.select(inside, t, self.outside);
        }
        (t, outside)
    }

    /// Returns whether each column that became `t` is outside the support; `None` if every column is inside. The
    /// target must not be among them.
    pub(crate) fn outside(self, on: &mut TileBuilder, t: TileValue) -> Option<TileValue> {
        self.bias.map(|_| on.equal(t, self.outside))
    }

    /// `t` of logits in f32, with their bias where they have one.
    pub(crate) fn apply(self, on: &mut TileBuilder, x: TileValue, bias: Option<TileValue>) -> TileValue {
        let x = bias.map_or(x, |bias| on.add(x, bias));
        let y = on.mul(x, self.factor);
        if self.caps { tanh(on, y) } else { y }
    }

    /// `∂loss/∂x` from `∂loss/∂t`; 0 outside.
    pub(crate) fn through(
        self,
        on: &mut TileBuilder,
        gradient: TileValue,
        t: TileValue,
        outside: Option<TileValue>,
    ) -> TileValue {
        let mut gradient = on.mul(gradient, self.factor);
        let zero = on.number(0.0);
        if self.caps {
            let (one, square) = (on.number(1.0), on.mul(t, t));
            let slope = on.sub(one, square);
            let slope = on.max(slope, zero);
            gradient = on.mul(gradient, slope);
        }
        outside.map_or(gradient, |outside| on.select(outside, zero, gradient))
    }
}

/// `tanh y`, NaN of NaN.
fn tanh(on: &mut TileBuilder, y: TileValue) -> TileValue {
    let (far, near) = (on.number(FAR.into()), on.number((-FAR).into()));
    let y = on.min(y, far);
    let y = on.max(y, near);
    let square = on.mul(y, y);
    // A quotient of two polynomials in y², each by Horner's rule; beyond ±FAR the result is ±1 in f32.
    let series = |on: &mut TileBuilder, [c1, c2, c3, c4]: [f32; 4]| {
        let mut sum = on.constant(c4.into(), TileType { element: DeviceDtype::F32, ..on.type_of(square) });
        for c in [c3, c2, c1, 1.0] {
            let c = on.number(c.into());
            sum = on.mul(sum, square);
            sum = on.add(sum, c);
        }
        sum
    };
    let (p, q) = (series(on, NUMERATOR), series(on, DENOMINATOR));
    let p = on.mul(y, p);
    on.div(p, q)
}
