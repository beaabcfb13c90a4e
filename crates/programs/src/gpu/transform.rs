//! The transform of logits within a kernel for GPUs: the `t` of [`transform`](assay_algebra::transform), in pairs.

use assay_algebra::transform::Transform;
use assay_core::tanh::{DENOMINATOR, FAR, NUMERATOR};
use assay_ptx::{PtxAddress, PtxBuilder, PtxValue};

use super::logits::FloatPair;

/// The transform that a spec applies to a kernel's logits.
#[derive(Clone, Copy)]
pub(crate) struct PtxTransform {
    transform: Transform,
    factor: PtxValue<f32>,
    biases: Option<Biases>,
}

/// The biases of columns and of the row's target.
#[derive(Clone, Copy)]
pub(crate) struct Biases {
    /// The bias of each column, `[v]` f32, −∞ outside the support.
    pub(crate) all: PtxValue<u64>,
    /// The bias of the row's target.
    pub(crate) own: PtxValue<f32>,
    /// Whether every block begins at a multiple of its elements.
    pub(crate) aligned: bool,
    /// The number of columns `v`.
    pub(crate) vocab: u32,
}

/// A block of logits, changed.
pub(crate) struct PtxTransformedBlock {
    /// The transformed logits, in registers that may be set.
    pub(crate) t: Vec<FloatPair>,
    /// Whether each element is outside the support; `None` if every column is inside.
    outside: Option<Vec<PtxValue<bool>>>,
}

impl PtxTransform {
    pub(crate) fn new(transform: Transform, factor: PtxValue<f32>, biases: Option<Biases>) -> Self {
        Self { transform, factor, biases }
    }

    /// `t` of a block, −∞ outside the support: of `x`, of which the first is column `first` and the target's place `target`. Where the block
    /// is `shared` with another row, what becomes of that one's columns is anything.
    pub(crate) fn block(
        self,
        on: &mut PtxBuilder,
        x: &[FloatPair],
        first: PtxValue<u32>,
        target: PtxValue<u32>,
        shared: bool,
    ) -> PtxTransformedBlock {
        let biases = self.biases.map(|biases| {
            let own = biases.own;
            let biases = biases.load_block(on, first, 2 * x.len() as u32, shared);
            // The target keeps its own bias even outside the support.
            at_target(on, target, biases.len(), |on, element, hit| {
                let bias = on.select(hit, own, biases[element]);
                on.set(biases[element], bias);
            });
            biases
        });
        let outside: Option<Vec<PtxValue<bool>>> =
            biases.as_ref().map(|biases| biases.iter().map(|&bias| on.equal(bias, f32::NEG_INFINITY)).collect());
        let t = x.iter().enumerate().map(|(i, &x)| {
            let x = biases.as_ref().map_or(x, |biases| on.add_pair(x, [biases[2 * i], biases[2 * i + 1]]));
            let t = self.apply(on, x);
            std::array::from_fn(|half| {
                let outside = outside.as_ref().map(|outside| outside[2 * i + half]);
                let t = outside.map_or(t[half], |outside| on.select(outside, f32::NEG_INFINITY, t[half]));
                on.variable(t)
            })
        });
        PtxTransformedBlock { t: t.collect(), outside }
    }

    /// `t` of the row's target.
    pub(crate) fn target(self, on: &mut PtxBuilder, x: PtxValue<f32>) -> PtxValue<f32> {
        let x = self.biases.map_or(x, |biases| on.add(x, biases.own));
        let [t, _] = self.apply(on, [x; 2]);
        t
    }

    /// Returns the largest `t` from the largest logit, for a transform that keeps their order.
    pub(crate) fn largest(self, on: &mut PtxBuilder, max: PtxValue<f32>) -> PtxValue<f32> {
        let [t, _] = self.apply(on, [max; 2]);
        t
    }

    /// Whether the largest `t` is that of the largest logit.
    pub(crate) fn keeps_order(self) -> bool {
        !self.transform.flips && !self.transform.columns
    }

    fn apply(self, on: &mut PtxBuilder, x: FloatPair) -> FloatPair {
        let y = on.mul_pair(x, [self.factor; 2]);
        if self.transform.caps { tanh(on, y) } else { y }
    }

    /// `∂loss/∂x` of a block from `∂loss/∂t`, 0 outside the support.
    pub(crate) fn through(
        self,
        on: &mut PtxBuilder,
        gradients: &[FloatPair],
        changed: &PtxTransformedBlock,
    ) -> Vec<FloatPair> {
        let all = gradients.iter().zip(&changed.t).enumerate().map(|(i, (&gradient, &t))| {
            let through = self.through_pair(on, gradient, t);
            let Some(outside) = &changed.outside else { return through };
            [0, 1].map(|half| on.select(outside[2 * i + half], 0.0, through[half]))
        });
        all.collect()
    }

    /// Returns `∂loss/∂x` of the target from `∂loss/∂t`.
    pub(crate) fn through_target(
        self,
        on: &mut PtxBuilder,
        gradient: PtxValue<f32>,
        t: PtxValue<f32>,
    ) -> PtxValue<f32> {
        let [through, _] = self.through_pair(on, [gradient; 2], [t; 2]);
        through
    }

    fn through_pair(self, on: &mut PtxBuilder, gradient: FloatPair, t: FloatPair) -> FloatPair {
        let gradient = on.mul_pair(gradient, [self.factor; 2]);
        if !self.transform.caps {
            return gradient;
        }
        let minus_t = t.map(|t| on.neg(t));
        let slope = on.mul_add_pair(minus_t, t, [1.0.into(); 2]).map(|slope| on.max(slope, 0.0));
        on.mul_pair(gradient, slope)
    }
}

impl Biases {
    /// Loads the biases of the block whose first column is `first` into registers that may be set.
    fn load_block(self, on: &mut PtxBuilder, first: PtxValue<u32>, elements: u32, shared: bool) -> Vec<PtxValue<f32>> {
        if self.aligned {
            let offset = on.mul_wide(first, 4);
            let from = PtxAddress::Global(on.add(self.all, offset), 0);
            return (0..elements / 4).flat_map(|turn| on.load_all::<f32, 4>(from.plus(16 * turn))).collect();
        }
        let load = |element| {
            let column = on.add(first, element);
            let column = if shared { on.min(column, self.vocab - 1) } else { column };
            let offset = on.mul_wide(column, 4);
            let from = on.add(self.all, offset);
            on.load(PtxAddress::Global(from, 0))
        };
        (0..elements).map(load).collect()
    }
}

/// Calls `body` on every element, and whether it is the target, of a block of so many that has it.
pub(crate) fn at_target(
    on: &mut PtxBuilder,
    target: PtxValue<u32>,
    elements: usize,
    mut body: impl FnMut(&mut PtxBuilder, usize, PtxValue<bool>),
) {
    let here = on.less(target, elements as u32);
    on.when(here, |on| {
        for element in 0..elements {
            let hit = on.equal(target, element as u32);
            body(on, element, hit);
        }
    });
}

/// `tanh y`, NaN of NaN.
fn tanh(on: &mut PtxBuilder, y: FloatPair) -> FloatPair {
    let y = y.map(|y| {
        let y = on.min(y, FAR);
        on.max(y, -FAR)
    });
    let square = on.mul_pair(y, y);
    // A quotient of two polynomials in y², each by Horner's rule; beyond ±FAR the result is ±1 in f32.
    let series = |on: &mut PtxBuilder, [c1, c2, c3, c4]: [f32; 4]| {
        [c2, c1, 1.0].into_iter().fold(on.mul_add_pair(square, [c4.into(); 2], [c3.into(); 2]), |sum, c| {
            on.mul_add_pair(sum, square, [c.into(); 2])
        })
    };
    let (p, q) = (series(on, NUMERATOR), series(on, DENOMINATOR));
    let (p, reciprocal) = (on.mul_pair(y, p), q.map(|q| on.reciprocal(q)));
    on.mul_pair(p, reciprocal)
}
