//! Loss, entropy and dlogits in one pass over HBM: a row stays in the shared memory of a cluster of CTAs from the first look at its
//! logits to the dlogits that are written over them.
//!
//! ```text
//! copy     x_j into shared memory; of a masked row nothing is read, and zeros are written
//! target   x_y is taken out and −∞ left in its place, so that what follows sums over the others; every CTA is told x_y
//! walk 1   m   = max(max_j x_j, x_y)                                                  the cluster meets
//! walk 2   g_j = min(m − x_j, 2¹⁰⁰)   e_j = 2^(−g_j·log₂e/T)   s = Σ e_j,  w = Σ e_j g_j     the cluster meets
//! scalars  S = s + e_y,  ā = (w/T + e_y a_y)/S,  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy     by one warp of each CTA
//! walk 3   dx_j = e_j (A + B g_j)     A = −G/(S·T) − E ā/(S·T)     B = E/(S·T²)       rounded to the logits' dtype
//! target   dx_y =  G s/(S·T) + E e_y (a_y − ā)/(S·T)                                  written over it
//! ```
//!
//! Where a spec changes logits before their softmax, `x` is what they become, in each walk anew, but where the largest logit becomes the
//! largest; dlogits are multiplied by the slope of that.
//!
//! On a B200 a thread keeps the exponentials of its last columns in registers from walk 2 to walk 3, and works on two f32 at once.
//!
//! HBM sees each logit once and each dlogit once. A token-level loss only: `G` needs nothing of other rows but the normaliser, which comes in with
//! the token's weight. Logits are widened to f32, and everything is computed in it; a thread adds up its own columns, eight at a time by
//! halves, then 32 lanes, then all warps of the cluster in one order.

mod meet;
mod scalars;
mod walks;

use std::f64::consts::LOG2_E;

use self::meet::in_cta;
use super::logits::{BLOCK, LogitsFormat, SCALAR};
use super::row::{REGISTERS_AT_ONCE, RowCut, SharedRow};
use super::transform::{Biases, PtxTransform};
use crate::one_pass::{PER_TOKEN, TokenColumn, given_columns, numbers, width};
use assay_algebra::structure::{GapRate, SpecNumber, Structure};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{Arrival, PtxAddress, PtxBuilder, PtxKernel, PtxLaunch, PtxTarget, PtxValue};

/// The kernel for `[1,n,v]` logits.
///
/// Its arrays are those of the [tile kernel](crate::one_pass): ids `[n]` i32, numbers f32, logits, tokens `[1,n,width]` f32; dlogits over the
/// logits and results `[1,n,8]` f32. Each [says](assay_ptx::Parameter::alignment) where it begins. What it
/// `returns` may be statistics in place of results, for a framework that has the loss from those; dlogits are then multiplied by one more
/// input, `upstream` `[1]`, the cotangent of the loss that is likely.
pub(crate) fn one_pass(
    structure: Structure,
    [_, n, v]: [usize; 3],
    element: DeviceDtype,
    cut: RowCut,
    returns: OnePassOutput,
) -> PtxKernel {
    let mut on = PtxBuilder::new("grpo_one_pass", cut.target);
    let given = given_columns(structure);
    let of_spec = numbers(structure);
    let arrays = OnePassArrays {
        ids: on.input_aligned(SCALAR, "ids", DeviceDtype::I32, &[n]),
        numbers: on.input_aligned(SCALAR, "numbers", DeviceDtype::F32, &[of_spec.len()]),
        logits: on.input_aligned(cut.logits.alignment(v), "logits", element, &[1, n, v]),
        tokens: on.input("tokens", DeviceDtype::F32, &[1, n, width(given.len())]),
        biases: given.contains(&TokenColumn::TargetBias).then(|| {
            let alignment = cut.logits.alignment_of_biases(v);
            on.input_aligned(alignment, "column_bias", DeviceDtype::F32, &[1, v])
        }),
        upstream: (returns == OnePassOutput::Statistics)
            .then(|| on.input_aligned(SCALAR, "upstream", DeviceDtype::F32, &[1])),
        dlogits: on.output_over("dlogits", "logits"),
        returned: on.output(returns.name(), DeviceDtype::F32, &[1, n, PER_TOKEN]),
    };
    let sums = 2 * softmaxes(structure) as u32;
    let of_warps = 4 * cut.cluster * cut.warps();
    let (of_numbers, of_token) = (4 * of_spec.len() as u32, 4 * width(given.len()) as u32);
    let parts = [of_numbers + 4, of_token, of_warps.max(4 * SCALES), sums * of_warps];
    let row = on.dynamic_shared(cut.shared_bytes());
    let [numbers, token, maxima, sums] =
        [("numbers_here", parts[0]), ("token", parts[1]), ("maxima", parts[2]), ("sums", parts[3])]
            .map(|(name, bytes)| on.shared(name, bytes));
    // Shared memory decides how many rows are on their way at once, so that what is never live together lies in one place. `x_y` is behind
    // the numbers. The scales are written over the maxima, by their own CTA after the second meeting: all CTAs of the cluster wrote
    // maxima before the first, and no thread comes to the second before it has read them.
    let target = on.add(numbers, of_numbers);
    let of_meetings = if cut.meets_by_stores() { BARRIER * MEETINGS.len() as u32 } else { 0 };
    let meetings = (of_meetings > 0).then(|| on.shared("meetings", of_meetings));
    let shared = OnePassShared { row, numbers, token, target, maxima, sums, scales: maxima, meetings };
    let beside = parts.into_iter().chain([of_meetings]).map(|bytes| bytes.next_multiple_of(BLOCK)).sum();
    let resident = cut.resident(beside);
    ClusterWriter { structure, cut, resident, given, of_spec, arrays, shared }.body(&mut on);
    let grid = n as u32 * cut.cluster;
    on.finish(PtxLaunch {
        grid: [grid, 1, 1],
        block: [cut.threads, 1, 1],
        cluster: cut.cluster,
        least_resident: resident,
    })
}

/// Numbers that the third walk multiplies by.
const SCALES: u32 = 4;

/// Bytes of a barrier in shared memory.
const BARRIER: u32 = 8;

/// A meeting of a cluster. Where CTAs meet by stores each has a separate barrier: a peer that is through the first may store for the
/// second before this CTA has all of the first, and the bytes of the two must not be counted as one.
#[derive(Clone, Copy)]
enum ClusterMeeting {
    Maxima,
    Sums,
}

const MEETINGS: [ClusterMeeting; 2] = [ClusterMeeting::Maxima, ClusterMeeting::Sums];

/// Registers of a thread beside exponentials that it keeps from walk 2 to walk 3. They are kept where a chip's transcendental units have
/// less time for each byte of HBM than its others: on a B200, of logits of 16 bits.
const BESIDE_KEPT: u32 = 32;

/// Registers beside those where an entropy bonus needs gaps too.
const BESIDE_KEPT_AND_GAPS: u32 = 64;

/// The array that the kernel returns, `[1,n,8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnePassOutput {
    /// Logp, entropy, loss and metrics.
    Results,
    /// The statistics of its row, as [`two_pass::statistics`](super::two_pass::statistics) returns them.
    Statistics,
}

impl OnePassOutput {
    fn name(self) -> &'static str {
        match self {
            Self::Results => "results",
            Self::Statistics => "statistics",
        }
    }
}

/// Returns the number of softmaxes of a row: two if logp has one of its own.
fn softmaxes(structure: Structure) -> usize {
    structure.gap_rates().len()
}

/// The addresses of the kernel's arrays in global memory.
struct OnePassArrays {
    ids: PtxValue<u64>,
    numbers: PtxValue<u64>,
    logits: PtxValue<u64>,
    tokens: PtxValue<u64>,
    /// The biases of columns, if they differ in them.
    biases: Option<PtxValue<u64>>,
    /// A factor of all dlogits, where there is one.
    upstream: Option<PtxValue<u64>>,
    dlogits: PtxValue<u64>,
    /// Results or statistics of each token.
    returned: PtxValue<u64>,
}

/// Shared memory of a CTA.
struct OnePassShared {
    row: PtxValue<u32>,
    numbers: PtxValue<u32>,
    /// The copy of the token's columns.
    token: PtxValue<u32>,
    /// The target's logit `x_y`, or the value it is transformed to.
    target: PtxValue<u32>,
    /// One of every warp of the cluster.
    maxima: PtxValue<u32>,
    /// `s` and `w` of each softmax, of every warp each.
    sums: PtxValue<u32>,
    /// The factors of the third walk: see [`WalkScales`].
    scales: PtxValue<u32>,
    /// A barrier for each of [`MEETINGS`], where CTAs meet by stores.
    meetings: Option<PtxValue<u32>>,
}

/// `dx_j = policy·e_j + e'_j (base + slope·g_j)`, `dx_y = target`. Where logp and entropy are of one softmax, `policy` is within `base`.
/// If a row may be walked by [exponents](super::affine::Affine), there is no bonus: `base` is then the factor of their powers, and `slope` is `m`.
struct WalkScales {
    policy: PtxValue<f32>,
    base: PtxValue<f32>,
    slope: PtxValue<f32>,
    target: PtxValue<f32>,
}

struct ClusterWriter {
    structure: Structure,
    cut: RowCut,
    /// CTAs that are to find room on a multiprocessor.
    resident: u32,
    given: Vec<TokenColumn>,
    of_spec: Vec<SpecNumber>,
    arrays: OnePassArrays,
    shared: OnePassShared,
}

/// A row, and what becomes of it.
struct TransformedRow<'r> {
    part: &'r SharedRow,
    change: Option<PtxTransform>,
    /// The column of the row's target.
    id: PtxValue<u32>,
}

/// The position of a thread in its warp, CTA, cluster and grid.
#[derive(Clone, Copy)]
struct ThreadIndex {
    thread: PtxValue<u32>,
    lane: PtxValue<u32>,
    warp: PtxValue<u32>,
    rank: PtxValue<u32>,
    row: PtxValue<u32>,
}

impl ClusterWriter {
    fn logits(&self) -> LogitsFormat {
        self.cut.logits
    }

    /// Blocks of a thread whose exponentials stay in registers from walk 2 to walk 3.
    fn kept(&self) -> u32 {
        let changes = self.structure.transform.is_some();
        if self.cut.target < PtxTarget::Sm100 || self.logits() == LogitsFormat::F32 || changes {
            return 0;
        }
        // The registers that remain beside a walk's own hold exponentials, which spares the transcendental units in
        // walk 3.
        let registers = self.cut.registers(self.resident);
        let softmaxes = softmaxes(self.structure) as u32;
        let beside = match self.structure.entropy_bonus {
            Some(_) => BESIDE_KEPT_AND_GAPS + REGISTERS_AT_ONCE * (softmaxes - 1),
            None => BESIDE_KEPT,
        };
        let exponentials = (registers - beside) / softmaxes;
        exponentials / self.logits().per_block()
    }

    fn place(&self, on: &mut PtxBuilder) -> ThreadIndex {
        let thread = on.thread();
        let cta = on.cta();
        let [lane, rank] = [(thread, 32), (cta, self.cut.cluster)].map(|(of, per)| on.bits_and(of, per - 1));
        let warp = on.shift_right(thread, 5);
        let row = on.shift_right(cta, self.cut.cluster.ilog2());
        ThreadIndex { thread, lane, warp, rank, row }
    }

    fn body(&self, on: &mut PtxBuilder) {
        let place = self.place(on);
        let ThreadIndex { thread, rank, row, .. } = place;
        // The target's column, the token's columns and its mask are read before anything else: they decide what the
        // CTA does.
        let id = {
            let offset = on.mul_wide(row, 4);
            let at = on.add(self.arrays.ids, offset);
            let id: PtxValue<u32> = on.load(PtxAddress::Global(at, 0));
            // What stands where the mask hides it must point somewhere in the row.
            on.min(id, self.cut.vocab - 1)
        };
        let token = {
            let offset = on.mul_wide(row, 4 * width(self.given.len()) as u32);
            on.add(self.arrays.tokens, offset)
        };
        let mask: PtxValue<f32> = on.load(PtxAddress::Global(token, self.place_of(TokenColumn::Mask)));
        let counts = {
            let zero: PtxValue<f32> = 0.0.into();
            on.less(zero, mask)
        };
        let arrays = [self.arrays.logits, self.arrays.dlogits];
        let part = SharedRow::new(on, self.cut, self.kept(), [thread, rank, row, self.shared.row], arrays);
        // A masked row gets zeros and nothing of it is read, so that garbage in it cannot matter and no bandwidth is
        // spent.
        let hidden = on.not(counts);
        on.when(hidden, |on| {
            part.write(on, |_, _| [0.into(); 4]);
            let first = first_of_row(on, place);
            on.when(first, |on| self.give(on, row, [0.0.into(); PER_TOKEN]));
            on.exit();
        });

        // Those who are told something must be there.
        if self.cut.cluster > 1 {
            self.make_barriers(on, thread);
            on.arrive_at_cluster(Arrival::Relaxed);
        }
        // The copy is asynchronous: every thread copies the blocks that it will walk, so only its own copies need
        // waiting for.
        part.copy_in(on);
        self.copy_token(on, thread, token);
        on.wait_for_copies();
        if self.cut.cluster > 1 {
            on.wait_for_cluster();
        }
        let change = self.change(on, &part, token);
        // The thread that has the target takes it out of the row, so that the sums are over the other columns and 1 −
        // p_y keeps its digits. Each CTA of the cluster is sent the value, because each computes the token's loss
        // itself.
        let target = part.find(on, id);
        let in_row = part.shared_of(on, target);
        on.when(target.own, |on| {
            let mut x = self.cut.logits.load(on, in_row);
            match change {
                // It is left out by its place.
                Some(change) => x = change.target(on, x),
                None => self.cut.logits.store(on, in_row, f32::NEG_INFINITY),
            }
            for rank in 0..self.cut.cluster {
                let rank = rank.into();
                let to = in_cta(on, self.cut, self.shared.target, rank);
                self.store(on, ClusterMeeting::Maxima, rank, [(to, x)]);
            }
        });
        let walked = TransformedRow { part: &part, change, id };
        // Walk 1 and the first meeting of the cluster, then walk 2 and the second.
        let (max, target_logit) = self.max(on, &walked, place);
        let scales = self.exponent_scales(on);
        let affine = self.affine(on, &walked, max, &scales);
        let kept = self.sum(on, &walked, place, max, &scales, affine.as_ref());

        let zero = on.variable(0);
        // One warp of each CTA computes the token's loss and the factors of dlogits; the others wait at the barrier
        // below.
        let of_first_warp = on.equal(place.warp, zero);
        on.when(of_first_warp, |on| self.scalars(on, place, change, [max, target_logit], affine.as_ref()));
        on.barrier();
        // Walk 3 writes dlogits, by exponents if the row allows it and by gaps otherwise.
        match &affine {
            None => {
                let of = self.scales(on);
                self.dlogits(on, &walked, max, &scales, &kept, &of);
            }
            // What either way needs of the row comes from shared memory: registers are for exponentials.
            Some(affine) => on.either(
                affine.is_beyond,
                |on| {
                    let of = self.scales(on);
                    self.dlogits(on, &walked, of.slope, &scales, &kept, &of);
                },
                |on| {
                    let policy = on.load(PtxAddress::Shared(self.shared.scales, 4));
                    affine.write(on, &part, &kept, policy);
                },
            ),
        }
        // The target's dlogit has another formula and is written over that of the walk, by the same thread.
        let in_array = part.global_of(on, target);
        on.when(target.own, |on| {
            let of_target: PtxValue<f32> = on.load(PtxAddress::Shared(self.shared.scales, 12));
            self.cut.logits.store(on, in_array, of_target);
        });
    }

    fn scales(&self, on: &mut PtxBuilder) -> WalkScales {
        let [policy, base, slope, target] = on.load_all(PtxAddress::Shared(self.shared.scales, 0));
        WalkScales { policy, base, slope, target }
    }

    /// Returns the byte offset of a column among those of a token.
    fn place_of(&self, column: TokenColumn) -> u32 {
        4 * self.given.iter().position(|&other| other == column).expect("the structure has the column") as u32
    }

    fn given(&self, on: &mut PtxBuilder, column: TokenColumn) -> PtxValue<f32> {
        let place = self.place_of(column);
        on.load(PtxAddress::Shared(self.shared.token, place))
    }

    /// A column that not every structure has.
    fn given_if(&self, on: &mut PtxBuilder, column: TokenColumn) -> Option<PtxValue<f32>> {
        self.given.contains(&column).then(|| self.given(on, column))
    }

    /// Returns the byte offset of a number among the kernel's numbers.
    fn place_of_number(&self, which: SpecNumber) -> u32 {
        4 * self.of_spec.iter().position(|&other| other == which).expect("the structure has the number") as u32
    }

    fn number(&self, on: &mut PtxBuilder, which: SpecNumber) -> PtxValue<f32> {
        let place = self.place_of_number(which);
        on.load(PtxAddress::Shared(self.shared.numbers, place))
    }

    /// Returns the factor of gaps.
    fn rate(&self, on: &mut PtxBuilder, rate: GapRate) -> PtxValue<f32> {
        match rate {
            GapRate::OfAll(which) => self.number(on, which),
            GapRate::OfToken => self.given(on, TokenColumn::Rate),
        }
    }

    /// Copies what is given of the token, and the numbers.
    fn copy_token(&self, on: &mut PtxBuilder, thread: PtxValue<u32>, token: PtxValue<u64>) {
        let parts = width(self.given.len()) as u32 / 4;
        let (numbers, here) = (self.of_spec.len() as u32, &self.shared);
        let from_numbers = self.arrays.numbers;
        let copies = [(parts, 16, token, here.token), (numbers, 4, from_numbers, here.numbers)];
        for (count, bytes, from, to) in copies {
            assert!(count <= self.cut.threads, "a thread copies one part of the token at most");
            let has = on.less(thread, count);
            on.when(has, |on| {
                let offset = on.mul(thread, bytes);
                let to = PtxAddress::Shared(on.add(to, offset), 0);
                let offset = on.extend(offset);
                let from = PtxAddress::Global(on.add(from, offset), 0);
                if bytes == 16 { on.copy_16(to, from) } else { on.copy_4(to, from) }
            });
        }
    }

    /// Returns the factors that make gaps exponents of 2: for the softmax of the entropy, and for that of logp if it
    /// is another.
    fn exponent_scales(&self, on: &mut PtxBuilder) -> Vec<PtxValue<f32>> {
        let minus_log2_e = -LOG2_E as f32;
        let scales = self.structure.gap_rates().into_iter().map(|rate| match rate {
            Some(rate) => {
                let scale = self.rate(on, rate);
                on.mul(scale, minus_log2_e)
            }
            None => minus_log2_e.into(),
        });
        scales.collect()
    }

    /// Returns the transform of the row's logits. Its numbers are read from global memory, because no thread has
    /// waited for the other threads' copies yet.
    fn change(&self, on: &mut PtxBuilder, part: &SharedRow, token: PtxValue<u64>) -> Option<PtxTransform> {
        let transform = self.structure.transform?;
        let place = self.place_of_number(SpecNumber::LogitFactor);
        let factor = on.load(PtxAddress::Global(self.arrays.numbers, place));
        let biases = self.arrays.biases.map(|all| {
            let own = on.load(PtxAddress::Global(token, self.place_of(TokenColumn::TargetBias)));
            Biases { all, own, aligned: part.is_aligned(), vocab: self.cut.vocab }
        });
        Some(PtxTransform::new(transform, factor, biases))
    }
}

/// The one thread that speaks for the row.
fn first_of_row(on: &mut PtxBuilder, place: ThreadIndex) -> PtxValue<bool> {
    let [first_thread, first_cta] = [place.thread, place.rank].map(|number| on.less(number, 1));
    on.and(first_thread, first_cta)
}
