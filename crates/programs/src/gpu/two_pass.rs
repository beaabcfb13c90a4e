//! Two kernels that stream over the columns, a row by each CTA: the statistics of every row, then dlogits from a scale for each token.
//!
//! ```text
//! statistics   m = max x_j      g_j = min(m − x_j, 2¹⁰⁰)     t_j = −g_j·log₂e/T     e_j = 2^t_j     s = Σ_{j≠y} e_j,  w = Σ_{j≠y} e_j t_j,  x_y
//! between      anything: logp, entropy and the loss from the statistics; collectives; losses over whole sequences
//! dlogits      dx_j = share · e_j  +  bonus · e_j (a_j − ā),   dx_y = −share · s  +  bonus · e_y (a_y − ā),   0 where masked
//! ```
//!
//! HBM sees each logit twice and each dlogit once; of a masked row the second kernel reads nothing. A row may have any length, and lie on several
//! devices: an id that is not among a device's columns meets none of them, and columns beyond the real ones count as −∞. Each thread has a maximum of
//! its own, and what it summed is rescaled when that rises; threads meet at the end of the row.
//!
//! Where a spec changes logits before their softmax, `x` is what they become, in both kernels anew.

use std::f64::consts::{LN_2, LOG2_E};

use super::cotangents::{CotangentArrays, Cotangents, Factors, TokenFactors};
use super::folds::{CtaFolds, add_block, exp, gaps, store_8};
use super::logits::{BLOCK, FloatPair, LogitsFormat, SCALAR};
use super::transform::{Biases, PtxTransform, PtxTransformedBlock, at_target};
use crate::rows::FARTHEST;
use crate::transform::differ_by_column;
use crate::two_pass::{LocalLogits, PER_TOKEN, Statistic, numbers};
use assay_algebra::structure::{GapRate, SpecNumber, Structure, TemperaturePlace, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxAddress, PtxBuilder, PtxKernel, PtxLaunch, PtxTarget, PtxValue};

/// Threads of a CTA, at most; of a short row as many as it has blocks.
const THREADS: u32 = 512;

/// Threads of a multiprocessor that have 64 registers each.
const THREADS_AT_ONCE: u32 = 1024;

/// Blocks that are on their way to a thread at once: where it sums, and where it writes, which takes more registers.
const AHEAD: [u32; 2] = [4, 2];

/// A column that no row has.
const NOWHERE: u32 = 1 << 31;

fn launch(rows: usize, threads: u32) -> PtxLaunch {
    let least_resident = THREADS_AT_ONCE / threads;
    PtxLaunch { grid: [rows as u32, 1, 1], block: [threads, 1, 1], cluster: 1, least_resident }
}

/// A row of `vocab` logits in global memory, walked by the threads of a CTA.
struct RowStream {
    logits: LogitsFormat,
    vocab: u32,
    /// The number of threads of the CTA.
    threads: u32,
    thread: PtxValue<u32>,
    /// Bytes of the row's first block that are before it; `None` where rows begin at multiples of 16.
    before: Option<PtxValue<u32>>,
    /// The address of the row's first block in each array.
    starts: Vec<PtxValue<u64>>,
    /// The number of real columns; the others are padding.
    real: PtxValue<u32>,
    /// The target's column; [`NOWHERE`] where another device has it.
    id: PtxValue<u32>,
    /// The transform of the logits, if the spec has one.
    change: Option<PtxTransform>,
}

/// Elements of a block in variables, and the column of the first.
struct StreamBlock {
    values: Vec<FloatPair>,
    first: PtxValue<u32>,
}

/// The destination of a block's results: its offset from the row's first block, and for each element whether it is
/// the row's, if not all need be.
struct BlockOutput {
    offset: PtxValue<u64>,
    inside: Option<Vec<PtxValue<bool>>>,
}

impl RowStream {
    /// Returns the walk of row `row` over arrays of `vocab` columns, all of them real and none of them the target's.
    fn new(
        on: &mut PtxBuilder,
        [thread, row]: [PtxValue<u32>; 2],
        arrays: Vec<PtxValue<u64>>,
        logits: LogitsFormat,
        vocab: u32,
    ) -> Self {
        let bytes = vocab * logits.size();
        // Where rows are no multiple of 16 bytes, one may begin inside an aligned block that the row before has too:
        // its start moves back to that of its first block, and `before` counts the bytes in between.
        let offset = on.mul_wide(row, bytes);
        let mut starts: Vec<PtxValue<u64>> = arrays.into_iter().map(|array| on.add(array, offset)).collect();
        let threads = bytes.div_ceil(BLOCK).next_power_of_two().clamp(32, THREADS);
        let before = (!bytes.is_multiple_of(BLOCK)).then(|| {
            let low = on.truncate(starts[0]);
            on.bits_and(low, BLOCK - 1)
        });
        if let Some(before) = before {
            let before = on.extend(before);
            starts = starts.into_iter().map(|start| on.sub(start, before)).collect();
        }
        Self { logits, vocab, threads, thread, before, starts, real: vocab.into(), id: NOWHERE.into(), change: None }
    }

    fn row_bytes(&self) -> u32 {
        self.vocab * self.logits.size()
    }

    /// The column of element 0 of block `block`.
    fn column(&self, on: &mut PtxBuilder, block: PtxValue<u32>) -> PtxValue<u32> {
        let first = on.mul(block, self.logits.per_block());
        match self.before {
            Some(before) => {
                let elements = on.shift_right(before, self.logits.size().ilog2());
                on.sub(first, elements)
            }
            None => first,
        }
    }

    /// Calls `body` on this thread's blocks of the row, some at a time, after they were loaded; where `reads` is false, without their values.
    fn walk(
        &self,
        on: &mut PtxBuilder,
        reads: bool,
        mut body: impl FnMut(&mut PtxBuilder, &[(StreamBlock, BlockOutput)]),
    ) {
        // Blocks that belong to the row alone are loaded whole: from the first that begins at or after the row's first
        // byte, to the last that ends before its end.
        let (start, end) = match self.before {
            None => (0.into(), (self.row_bytes() / BLOCK).into()),
            Some(before) => {
                let with_room = on.add(before, BLOCK - 1);
                let start = on.shift_right(with_room, BLOCK.ilog2());
                let end = on.add(before, self.row_bytes());
                let end = on.shift_right(end, BLOCK.ilog2());
                (start, end)
            }
        };
        // Threads take blocks in turn, so that a warp reads neighbouring ones.
        let block = on.add(self.thread, start);
        let block = on.variable(block);
        // Several blocks are loaded before any is used, so that their latencies overlap; the rest goes one by one.
        for ahead in [AHEAD[usize::from(self.starts.len() > 1)], 1] {
            let last = |on: &mut PtxBuilder| {
                let last = on.add(block, (ahead - 1) * self.threads);
                on.less(last, end)
            };
            let some = last(on);
            on.when(some, |on| {
                on.repeat(|on| {
                    let loaded: Vec<(StreamBlock, BlockOutput)> = (0..ahead)
                        .map(|turn| {
                            let block = on.add(block, turn * self.threads);
                            let offset = on.mul_wide(block, BLOCK);
                            let mut values = Vec::new();
                            if reads {
                                let from = on.add(self.starts[0], offset);
                                values = self.logits.load_block(on, PtxAddress::Global(from, 0));
                                values = values.into_iter().map(|pair| pair.map(|x| on.variable(x))).collect();
                            }
                            let first = self.column(on, block);
                            (StreamBlock { values, first }, BlockOutput { offset, inside: None })
                        })
                        .collect();
                    body(on, &loaded);
                    let next = on.add(block, ahead * self.threads);
                    on.set(block, next);
                    last(on)
                });
            });
        }
        if self.before.is_some() {
            self.edges(on, reads, end, body);
        }
    }

    /// Calls `body` on the row's first and last block if other rows share them, element by element. Two threads have
    /// one of them each.
    fn edges(
        &self,
        on: &mut PtxBuilder,
        reads: bool,
        end: PtxValue<u32>,
        mut body: impl FnMut(&mut PtxBuilder, &[(StreamBlock, BlockOutput)]),
    ) {
        let Some(before) = self.before else { return };
        // The row's first byte and the byte after its last may be inside a block, which a neighbouring row shares.
        let past = on.add(before, self.row_bytes());
        let [over_begin, over_end] = [before, past].map(|byte| {
            let over = on.bits_and(byte, BLOCK - 1);
            let zero: PtxValue<u32> = 0.into();
            on.equal(over, zero)
        });
        let zero = on.variable(0);
        let first_is_shared = on.not(over_begin);
        // A row within its first block ends there too.
        let last_is_another = on.less(zero, end);
        let last_is_another = on.or(last_is_another, over_begin);
        let last_is_shared = on.not(over_end);
        let last_is_shared = on.and(last_is_shared, last_is_another);
        for (thread, block, shared) in [(0, zero, first_is_shared), (self.threads - 1, end, last_is_shared)] {
            let own = on.equal(self.thread, thread);
            let own = on.and(own, shared);
            on.when(own, |on| {
                let first = self.column(on, block);
                let offset = on.mul_wide(block, BLOCK);
                let (mut values, mut inside) = (Vec::new(), Vec::new());
                // An element of another row is neither read nor written: another CTA may write it at this moment. It
                // counts as −∞.
                for element in 0..self.logits.per_block() {
                    let column = on.add(first, element);
                    let is_inside = on.less(column, self.vocab);
                    inside.push(is_inside);
                    if reads {
                        let x = on.variable(f32::NEG_INFINITY);
                        on.when(is_inside, |on| {
                            let from = on.add(self.starts[0], offset);
                            let value = self.logits.load(on, PtxAddress::Global(from, element * self.logits.size()));
                            on.set(x, value);
                        });
                        values.push(x);
                    }
                }
                let values = values.as_chunks().0.to_vec();
                body(on, &[(StreamBlock { values, first }, BlockOutput { offset, inside: Some(inside) })]);
            });
        }
    }

    /// Rounds a block of gradients and writes those that are the row's.
    fn write(&self, on: &mut PtxBuilder, place: &BlockOutput, gradients: &[FloatPair]) {
        let logits = self.logits;
        let to = on.add(self.starts[1], place.offset);
        let Some(inside) = &place.inside else {
            let words = logits.pack_block(on, gradients);
            on.store_all(PtxAddress::Global(to, 0), words);
            return;
        };
        for ((&gradient, &inside), element) in gradients.as_flattened().iter().zip(inside).zip(0..) {
            on.when(inside, |on| logits.store(on, PtxAddress::Global(to, element * logits.size()), gradient));
        }
    }

    /// Leaves what the logits become, −∞ outside the support and in columns of other rows.
    fn transform(&self, on: &mut PtxBuilder, part: &StreamBlock, place: &BlockOutput) -> Option<PtxTransformedBlock> {
        let change = self.change?;
        let target = on.sub(self.id, part.first);
        let changed = change.block(on, &part.values, part.first, target, place.inside.is_some());
        for (i, (&x, &t)) in part.values.as_flattened().iter().zip(changed.t.as_flattened()).enumerate() {
            let t = place.inside.as_ref().map_or(t, |inside| on.select(inside[i], t, f32::NEG_INFINITY));
            on.set(x, t);
        }
        Some(changed)
    }

    /// Leaves −∞ in columns that are none.
    fn cut(&self, on: &mut PtxBuilder, part: &StreamBlock) {
        let end = on.add(part.first, self.logits.per_block());
        let has_some = on.less(self.real, end);
        on.when(has_some, |on| {
            for (&x, element) in part.values.as_flattened().iter().zip(0..) {
                let column = on.add(part.first, element);
                let real = on.less(column, self.real);
                let kept = on.select(real, x, f32::NEG_INFINITY);
                on.set(x, kept);
            }
        });
    }

    /// Calls `body` on every element, and whether it is the target, of a block that has it.
    fn at_target(
        &self,
        on: &mut PtxBuilder,
        part: &StreamBlock,
        body: impl FnMut(&mut PtxBuilder, usize, PtxValue<bool>),
    ) {
        let place = on.sub(self.id, part.first);
        at_target(on, place, self.logits.per_block() as usize, body);
    }
}

/// The inputs that both kernels begin with.
struct TwoPassStart {
    on: PtxBuilder,
    stream: RowStream,
    /// The factors that make gaps exponents of 2: for the softmax of the entropy, and for that of logp if it is
    /// another.
    scales: Vec<PtxValue<f32>>,
}

/// The array of a row a token: what dlogits are made of, under this name, or the statistics that are written.
#[derive(Clone, Copy)]
enum RowArray {
    Given(&'static str),
    Returned,
}

fn begin(
    name: &str,
    target: PtxTarget,
    structure: Structure,
    LocalLogits { shape: [_, n, v], .. }: LocalLogits,
    element: DeviceDtype,
    per_token: RowArray,
) -> (TwoPassStart, PtxValue<u64>) {
    let mut on = PtxBuilder::new(name, target);
    let of_spec = numbers(structure);
    let name = if structure.transform.is_some() { "softmax_numbers" } else { "inverse_temperature" };
    let numbers = (!of_spec.is_empty()).then(|| on.input_aligned(SCALAR, name, DeviceDtype::F32, &[of_spec.len()]));
    let columns = on.input_aligned(SCALAR, "columns", DeviceDtype::I32, &[1]);
    let of_logits = LogitsFormat::from_dtype(element);
    let logits = on.input_aligned(of_logits.alignment(v), "logits", element, &[1, n, v]);
    let ids = on.input_aligned(SCALAR, "ids", DeviceDtype::I32, &[1, n, 1]);
    let by_token = structure.temperature == TemperaturePlace::Given;
    let rates = by_token.then(|| on.input_aligned(SCALAR, TokenInput::Rate.name(), DeviceDtype::F32, &[1, n, 1]));
    let biases = differ_by_column(structure).then(|| {
        let of_columns = (of_logits.alignment_of_biases(v), "column_bias", vec![1, v]);
        [of_columns, (SCALAR, "target_bias", vec![1, n, 1])]
            .map(|(alignment, name, shape)| on.input_aligned(alignment, name, DeviceDtype::F32, &shape))
    });
    let (arrays, tokens) = match per_token {
        RowArray::Given(name) => {
            let given = on.input_aligned(SCALAR, name, DeviceDtype::F32, &[1, n, PER_TOKEN]);
            (vec![logits, on.output_over("dlogits", "logits")], given)
        }
        RowArray::Returned => (vec![logits], on.output("statistics", DeviceDtype::F32, &[1, n, PER_TOKEN])),
    };
    let (thread, row) = (on.thread(), on.cta());
    let number = |on: &mut PtxBuilder, which: SpecNumber| -> PtxValue<f32> {
        let place = of_spec.iter().position(|&other| other == which).expect("the structure has the number");
        on.load(PtxAddress::Global(numbers.expect("the structure has numbers"), 4 * place as u32))
    };
    let minus_log2_e = -LOG2_E as f32;
    let scales = structure.gap_rates().into_iter().map(|rate| {
        let rate = match rate {
            None => return minus_log2_e.into(),
            Some(GapRate::OfAll(which)) => number(&mut on, which),
            Some(GapRate::OfToken) => {
                let offset = on.mul_wide(row, 4);
                let at = on.add(rates.expect("tokens differ in it"), offset);
                on.load(PtxAddress::Global(at, 0))
            }
        };
        on.mul(rate, minus_log2_e)
    });
    let scales = scales.collect();
    let real = on.load(PtxAddress::Global(columns, 0));
    let offset = on.mul_wide(row, 4);
    let at = on.add(ids, offset);
    let id = on.load(PtxAddress::Global(at, 0));
    // An id of another device, or in the padding, matches no column.
    let here = on.less(id, real);
    let id = on.select(here, id, NOWHERE);
    let own = biases.map(|[of_columns, of_targets]| {
        let at = on.add(of_targets, offset);
        (of_columns, on.load(PtxAddress::Global(at, 0)))
    });
    let offset = on.mul_wide(row, 4 * PER_TOKEN as u32);
    let token = on.add(tokens, offset);
    let vocab = v as u32;
    let stream = RowStream::new(&mut on, [thread, row], arrays, of_logits, vocab);
    let biases = own.map(|(all, own)| Biases { all, own, aligned: stream.before.is_none(), vocab });
    let change = structure.transform.map(|transform| {
        let factor = number(&mut on, SpecNumber::LogitFactor);
        PtxTransform::new(transform, factor, biases)
    });
    let stream = RowStream { real, id, change, ..stream };
    (TwoPassStart { on, stream, scales }, token)
}

fn gap(on: &mut PtxBuilder, max: PtxValue<f32>, x: PtxValue<f32>) -> PtxValue<f32> {
    let gap = on.sub(max, x);
    on.min(gap, FARTHEST as f32)
}

/// Brings what was summed below one maximum below another, which is `rise` above it.
fn rescale(on: &mut PtxBuilder, scale: PtxValue<f32>, rise: PtxValue<f32>, [others, weighted]: [PtxValue<f32>; 2]) {
    let shift = on.mul(rise, scale);
    let shrink = on.exp2(shift);
    let moved = on.mul_add(others, shift, weighted);
    let next = on.mul(moved, shrink);
    on.set(weighted, next);
    let next = on.mul(others, shrink);
    on.set(others, next);
}

/// Called as the [tile kernel](crate::two_pass::statistics) is; returns `[1,n,8]` f32, see [`Statistic`].
pub(crate) fn statistics(
    target: PtxTarget,
    structure: Structure,
    local: LocalLogits,
    element: DeviceDtype,
) -> PtxKernel {
    let begun = begin("grpo_statistics", target, structure, local, element, RowArray::Returned);
    let (TwoPassStart { on: mut builder, stream, scales }, results) = begun;
    let on = &mut builder;
    let max: PtxValue<f32> = on.variable(f32::MIN);
    let chosen: PtxValue<f32> = on.variable(0.0);
    // Each thread begins with the lowest finite number as its maximum: with −∞ the gap of a logit of −∞ would be NaN.
    let sums: Vec<[PtxValue<f32>; 2]> = scales.iter().map(|_| [on.variable(0.0), on.variable(0.0)]).collect();
    stream.walk(on, true, |on, parts| {
        let mut highest = max;
        for (part, place) in parts {
            stream.transform(on, part, place);
            stream.cut(on, part);
            highest = part.values.as_flattened().iter().fold(highest, |highest, &x| on.max(highest, x));
        }
        // Online softmax: if the maximum rises, the sums so far are scaled down to it. The logits are read once, and
        // no exponential can overflow.
        let rise = gap(on, highest, max);
        for (&scale, &sums) in scales.iter().zip(&sums) {
            rescale(on, scale, rise, sums);
        }
        on.set(max, highest);
        for (part, _) in parts {
            // The target is remembered and becomes −∞, so that the sums are over the other columns.
            stream.at_target(on, part, |on, element, hit| {
                let x = part.values.as_flattened()[element];
                let found = on.select(hit, x, chosen);
                on.set(chosen, found);
                let kept = on.select(hit, f32::NEG_INFINITY, x);
                on.set(x, kept);
            });
            let gaps = gaps(on, &part.values, max, true);
            for (&scale, &[others, weighted]) in scales.iter().zip(&sums) {
                let exponents: Vec<FloatPair> = gaps.iter().map(|&gap| on.mul_pair(gap, [scale; 2])).collect();
                let exps: Vec<FloatPair> =
                    exponents.iter().map(|exponents| exponents.map(|exponent| on.exp2(exponent))).collect();
                add_block(on, &exps, &exponents, [others, weighted]);
            }
        }
    });
    // Each thread has a maximum of its own: the sums of all are brought below the row's before they are added.
    let folds = CtaFolds::new(on, [stream.threads, 2 + 2 * scales.len() as u32], stream.thread);
    let of_row = folds.fold(on, 0, max, PtxBuilder::max);
    let rise = gap(on, of_row, max);
    for (&scale, &sums) in scales.iter().zip(&sums) {
        rescale(on, scale, rise, sums);
    }
    // Unused columns of a statistics row are 0.
    let mut columns = [PtxValue::from(0.0); PER_TOKEN];
    columns[Statistic::Max as usize] = of_row;
    let places = [
        [Statistic::Others, Statistic::Weighted].map(|place| place as usize),
        [Statistic::LogpOthers, Statistic::LogpWeighted].map(|place| place as usize),
    ];
    let summed = [(Statistic::TargetLogit as usize, chosen)]
        .into_iter()
        .chain(places.into_iter().flatten().zip(sums.into_iter().flatten()));
    for (turn, (place, value)) in summed.enumerate() {
        columns[place] = folds.fold(on, 1 + turn as u32, value, PtxBuilder::add);
    }
    let first = on.less(stream.thread, 1);
    on.when(first, |on| store_8(on, PtxAddress::Global(results, 0), columns));
    builder.finish(launch(local.shape[1], stream.threads))
}

/// Called as [`statistics`], dlogits written over the logits or apart from them, and with what they are made of.
pub(crate) fn dlogits(
    target: PtxTarget,
    structure: Structure,
    local: LocalLogits,
    element: DeviceDtype,
    factors: Factors,
) -> PtxKernel {
    let name = if factors == Factors::Scales { "scales" } else { "record" };
    let begun = begin("grpo_dlogits", target, structure, local, element, RowArray::Given(name));
    let (TwoPassStart { on: mut builder, stream, scales }, token) = begun;
    let on = &mut builder;
    let TokenFactors { max, share, others, mask, bonus } = match factors {
        Factors::Scales => TokenFactors::from_scales(on, structure, token),
        Factors::Record(cotangents) => {
            // Autograd's cotangents are not known when the losses are computed: the factors are then made of the
            // token's record.
            let arrays = CotangentArrays::declare(on, local.shape[1], cotangents);
            let row = on.cta();
            let sent = arrays.load(on, [stream.thread, row]);
            TokenFactors::from_record(on, structure, token, sent)
        }
    };
    let hidden = {
        let zero: PtxValue<f32> = 0.0.into();
        let counts = on.less(zero, mask);
        on.not(counts)
    };
    // A masked row gets zeros, without a read of its logits.
    on.when(hidden, |on| {
        let zeros = vec![[0.0.into(); 2]; stream.logits.per_block() as usize / 2];
        stream.walk(on, false, |on, parts| parts.iter().for_each(|(_, place)| stream.write(on, place, &zeros)));
        on.exit();
    });
    // The target's dlogit is −share · s, a sum over the others, in place of a difference from 1.
    let of_others = on.mul(share, others);
    let target_gradient = on.neg(of_others);
    stream.walk(on, true, |on, parts| {
        for (part, place) in parts {
            let changed = stream.transform(on, part, place);
            stream.cut(on, part);
            let gaps = gaps(on, &part.values, max, true);
            // The policy's gradient goes through the last softmax, the bonus's through the first.
            // The gap and not the exponent is computed first: it is exact near the maximum, where gradients are
            // large.
            let policy = *scales.last().expect("a softmax");
            let exps: Vec<FloatPair> = gaps.iter().map(|&gap| exp(on, gap, policy)).collect();
            let gradients: Vec<FloatPair> =
                exps.iter().map(|&exp| on.mul_pair(exp, [share; 2]).map(|gradient| on.variable(gradient))).collect();
            stream.at_target(on, part, |on, element, hit| {
                let of_policy = gradients.as_flattened()[element];
                let gradient = on.select(hit, target_gradient, of_policy);
                on.set(of_policy, gradient);
            });
            if let Some([factor, mean_gap]) = bonus {
                for ((&gradient, &gap), &of_policy) in gradients.iter().zip(&gaps).zip(&exps) {
                    // The bonus adds E·e·(a − ā)/(S·T), with the gap taken back from its exponent.
                    let exponent = on.mul_pair(gap, [scales[0]; 2]);
                    let exp = if scales.len() == 1 { of_policy } else { exponent.map(|exponent| on.exp2(exponent)) };
                    let minus_mean = on.neg(mean_gap);
                    let above_mean = on.mul_add_pair(exponent, [(-LN_2 as f32).into(); 2], [minus_mean; 2]);
                    let exp_above_mean = on.mul_pair(exp, above_mean);
                    let next = on.mul_add_pair(exp_above_mean, [factor; 2], gradient);
                    gradient.into_iter().zip(next).for_each(|(gradient, next)| on.set(gradient, next));
                }
            }
            let gradients = match (stream.change, &changed) {
                (Some(change), Some(changed)) => change.through(on, &gradients, changed),
                _ => gradients,
            };
            stream.write(on, place, &gradients);
        }
    });
    builder.finish(launch(local.shape[1], stream.threads))
}

/// Multiplies dlogits `[1,n,v]` by the cotangent that was sent over the one that they were made for, where the two differ: each is rounded
/// once more.
pub(crate) fn multiply_dlogits(target: PtxTarget, [_, n, v]: [usize; 3], element: DeviceDtype) -> PtxKernel {
    let mut on = PtxBuilder::new("grpo_multiply", target);
    let logits = LogitsFormat::from_dtype(element);
    let dlogits = on.input_aligned(logits.alignment(v), "dlogits_before", element, &[1, n, v]);
    let written = on.output_over("dlogits", "dlogits_before");
    let cotangents = Cotangents { logp: false, entropy: false, unless_used: true };
    let arrays = CotangentArrays::declare(&mut on, n, cotangents);
    let (thread, row) = (on.thread(), on.cta());
    let stream = RowStream::new(&mut on, [thread, row], vec![dlogits, written], logits, v as u32);
    let sent = arrays.load(&mut on, [thread, row]);
    let [used, _] = arrays.used.expect("it was asked for");
    let used = on.load(PtxAddress::Global(used, 0));
    let factor = on.div(sent.loss, used);
    stream.walk(&mut on, true, |on, parts| {
        for (part, place) in parts {
            let scaled: Vec<FloatPair> = part.values.iter().map(|&pair| on.mul_pair(pair, [factor; 2])).collect();
            stream.write(on, place, &scaled);
        }
    });
    on.finish(launch(n, stream.threads))
}
