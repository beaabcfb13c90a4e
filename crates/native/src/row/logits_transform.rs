//! The transform of logits before their softmax, and of dlogits on the way back, as [`transform`] has it. The
//! exponential takes the rate as a part of `1/T`.

use ndarray::Array1;

use super::{BLOCK, NativeElement, UNITS};
use assay_algebra::transform;
use assay_core::spec::LossSpec;
use assay_simd::tanh::Tanh;
use assay_simd::{LANES, PackedElement, Simd, UNIT};

/// Number of units whose `tanh` is computed together.
const TOGETHER: usize = 2;

/// The transform of logits that a spec asks for, over the columns of a row.
pub(crate) struct RowTransform {
    pub(super) rate: f64,
    pub(super) factor: f64,
    /// Whether logits are softcapped; otherwise all slopes are 1.
    pub(super) caps: bool,
    /// Bias of each column by blocks, in the order in which a row's elements are loaded; `None` if there is none.
    bias: Option<Vec<[[f32; UNIT]; UNITS]>>,
    /// First column that is outside the support, or the width of the row.
    pub(super) vocab: usize,
    /// Columns before that which are outside the support too, in order.
    pub(super) excluded: Vec<usize>,
}

impl RowTransform {
    /// Prepares the transform for rows of `vocab` elements `E`.
    pub(crate) fn new<E: NativeElement>(spec: &LossSpec, bias: Option<&Array1<f64>>, vocab: usize) -> Self {
        // The columns outside the support: a range at the end, and single ones before it.
        let (rate, factor) = (transform::rate(spec), transform::factor(spec));
        let vocab = spec.support.vocab.unwrap_or(vocab).min(vocab);
        let mut excluded: Vec<usize> = spec.support.excluded_ids.iter().copied().filter(|&j| j < vocab).collect();
        excluded.sort_unstable();
        // Bias in the order in which units are loaded, so that one vector sum adds it.
        let in_load_order = |bias: &Array1<f64>| {
            let mut blocks = vec![[[0.0; UNIT]; UNITS]; bias.len().div_ceil(BLOCK)];
            for (j, &bias) in bias.iter().enumerate() {
                blocks[j / BLOCK].as_flattened_mut()[position::<E>(j % BLOCK)] = bias as f32;
            }
            blocks
        };
        Self {
            rate,
            factor,
            caps: spec.logits.softcap.is_some(),
            bias: bias.filter(|_| spec.logits.bias).map(in_load_order),
            vocab,
            excluded,
        }
    }

    /// Adds the column's bias to a logit: `x_j + bias_j`.
    fn biased<E: NativeElement>(&self, j: usize, x: E) -> f32 {
        let bias = self.bias.as_ref().map(|bias| bias[j / BLOCK].as_flattened()[position::<E>(j % BLOCK)]);
        x.to_f32() + bias.unwrap_or(0.0)
    }

    /// Computes `t_j`, and its slope `1 − tanh²` or 1, in f64.
    pub(super) fn transformed<E: NativeElement>(&self, j: usize, x: E) -> (f64, f64) {
        let y = self.factor * f64::from(self.biased(j, x));
        if self.caps { (y.tanh(), y.cosh().powi(2).recip()) } else { (y, 1.0) }
    }

    /// Lists the columns that the sums of a row leave out, block by block: those outside the support, and the target.
    pub(super) fn absent(&self, target: Option<usize>) -> LeftOutColumns<'_> {
        LeftOutColumns { excluded: &self.excluded, target }
    }

    /// Prepares the map from logits to `t_j`; `None` if they are the same.
    #[inline(always)]
    pub(super) fn map<S: Simd>(&self, simd: S) -> Option<ColumnTransform<'_, S>> {
        // A positive scale alone is a part of the exponent: then logits need no pass of their own.
        let maps = self.caps || self.bias.is_some() || self.factor < 0.0;
        maps.then(|| ColumnTransform {
            transform: self,
            tanh: self.caps.then(|| Tanh::new(simd, self.factor)),
            sign: simd.splat(self.factor.signum() as f32),
        })
    }
}

/// Returns the lane, counted through a block, into which its `j`th element is loaded.
fn position<E: PackedElement>(j: usize) -> usize {
    j / UNIT * UNIT + E::place(j % UNIT)
}

/// An iterator over the columns that sums leave out, block by block.
pub(super) struct LeftOutColumns<'t> {
    excluded: &'t [usize],
    target: Option<usize>,
}

impl<'t> LeftOutColumns<'t> {
    /// Lists the left-out columns of the `i`th block, counted from its first column. Blocks must be asked for in order.
    pub(super) fn in_block(&mut self, i: usize) -> impl Iterator<Item = usize> + Clone + use<'t> {
        // Columns are sorted, so that those of this block are next.
        let columns = i * BLOCK..(i + 1) * BLOCK;
        let before = self.excluded.partition_point(|&j| j < columns.end);
        let (here, later) = self.excluded.split_at(before);
        self.excluded = later;
        let target = self.target.filter(|target| columns.contains(target));
        here.iter().copied().chain(target).map(move |j| j - columns.start)
    }
}

/// The map from a row's logits to the `t_j` of its softmax.
#[derive(Clone, Copy)]
pub(super) struct ColumnTransform<'t, S: Simd> {
    transform: &'t RowTransform,
    tanh: Option<Tanh<S>>,
    /// Sign of the scale, which multiplies logits that are not capped.
    sign: S::Lanes,
}

/// The `t_j` of a block, and their slopes `1 − tanh²` if they are capped, in the order in which elements are loaded;
/// aligned to cache lines.
#[repr(align(64))]
pub(super) struct TransformedBlock {
    pub(super) t: [[f32; UNIT]; UNITS],
    pub(super) slopes: [[f32; UNIT]; UNITS],
}

impl TransformedBlock {
    pub(super) fn room() -> Self {
        Self { t: [[0.0; UNIT]; UNITS], slopes: [[1.0; UNIT]; UNITS] }
    }

    /// Sets the `j`th column of a block of `E` to `t`: `−∞` leaves it out.
    pub(super) fn set<E: NativeElement>(&mut self, j: usize, t: f32) {
        self.t.as_flattened_mut()[position::<E>(j)] = t;
    }
}

impl<S: Simd> ColumnTransform<'_, S> {
    /// Whether logits are capped; otherwise all slopes are 1.
    pub(super) fn caps(&self) -> bool {
        self.tanh.is_some()
    }

    /// Maps logits with their bias to `t_j`.
    #[inline(always)]
    fn apply<const N: usize>(&self, simd: S, x: [S::Lanes; N]) -> [S::Lanes; N] {
        match &self.tanh {
            Some(tanh) => tanh.apply(simd, x),
            None => x.map(|x| simd.mul(x, self.sign)),
        }
    }

    /// Sets logits of the `i`th block that are outside the support to 0: they must not decide how their neighbours are
    /// computed.
    pub(super) fn clear_excluded<E: NativeElement>(&self, i: usize, block: &mut [E; BLOCK]) {
        let excluded = &self.transform.excluded;
        let before = excluded.partition_point(|&j| j < i * BLOCK);
        for j in excluded[before..].iter().take_while(|&&j| j < (i + 1) * BLOCK) {
            block[j - i * BLOCK] = E::from_f32(0.0);
        }
    }

    /// Maps the `i`th block; computes its slopes too if `slopes` is set and logits are capped.
    #[inline(always)]
    pub(super) fn block<E: NativeElement>(
        &self,
        simd: S,
        i: usize,
        block: &[[E; UNIT]; UNITS],
        to: &mut TransformedBlock,
        slopes: bool,
    ) {
        let bias = self.transform.bias.as_ref().map(|bias| &bias[i]);
        // Two units at a time, so that the steps of their `tanh` overlap.
        for n in (0..UNITS).step_by(TOGETHER) {
            let mut t = [self.sign; 2 * TOGETHER];
            for k in 0..TOGETHER {
                let mut x = E::load(simd, &block[n + k]);
                // The bias is added to the raw logit, before scale and softcap: `scale·(x + bias)` is what `tanh`
                // bounds.
                if let Some(bias) = bias {
                    let bias = f32::load(simd, &bias[n + k]);
                    x = [simd.add(x[0], bias[0]), simd.add(x[1], bias[1])];
                }
                [t[2 * k], t[2 * k + 1]] = x;
            }
            t = self.apply(simd, t);
            for k in 0..TOGETHER {
                // A capped `t` is the `tanh` itself, so that its slope `1 − t²` follows from it; without a cap all
                // slopes are 1.
                let t = [t[2 * k], t[2 * k + 1]];
                f32::store(simd, t, &mut to.t[n + k]);
                if let (Some(tanh), true) = (&self.tanh, slopes) {
                    f32::store(simd, tanh.slopes(simd, t), &mut to.slopes[n + k]);
                }
            }
        }
    }

    /// Maps the logit of the `j`th column of the row.
    #[inline(always)]
    pub(super) fn column<E: NativeElement>(&self, simd: S, j: usize, x: E) -> f32 {
        let [t] = self.apply(simd, [simd.splat(self.transform.biased(j, x))]);
        let mut lanes = [0.0; LANES];
        simd.store(t, &mut lanes);
        lanes[0]
    }
}
