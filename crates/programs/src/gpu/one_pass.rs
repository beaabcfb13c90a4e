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

use std::f64::consts::LOG2_E;

use super::affine::Affine;
use super::row::{Along, BLOCK, Block, Cut, Logits, Pair, REGISTERS_AT_ONCE, Row, SCALAR, add_block, exp, over_lanes};
use super::transform::{Biases, Change, Changed, at_target};
use crate::one_pass::{Given, PER_TOKEN, given_columns, numbers, width};
use crate::rows::FARTHEST;
use crate::two_pass::Statistic;
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{Token, TokenLoss, own_log_ratio, token_loss};
use assay_algebra::softmax::Sums;
use assay_algebra::structure::{Number, Numbers, Rate, Structure, Temperature};
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{Address, Arrival, Builder, Launch, PtxKernel, Target, Value};

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
    cut: Cut,
    returns: Returned,
) -> PtxKernel {
    let mut on = Builder::new("grpo_one_pass", cut.target);
    let given = given_columns(structure);
    let of_spec = numbers(structure);
    let arrays = Arrays {
        ids: on.input_aligned(SCALAR, "ids", DeviceDtype::I32, &[n]),
        numbers: on.input_aligned(SCALAR, "numbers", DeviceDtype::F32, &[of_spec.len()]),
        logits: on.input_aligned(cut.logits.alignment(v), "logits", element, &[1, n, v]),
        tokens: on.input("tokens", DeviceDtype::F32, &[1, n, width(given.len())]),
        biases: given.contains(&Given::TargetBias).then(|| {
            let alignment = cut.logits.alignment_of_biases(v);
            on.input_aligned(alignment, "column_bias", DeviceDtype::F32, &[1, v])
        }),
        upstream: (returns == Returned::Statistics)
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
    let shared = Shared { row, numbers, token, target, maxima, sums, scales: maxima, meetings };
    let beside = parts.into_iter().chain([of_meetings]).map(|bytes| bytes.next_multiple_of(BLOCK)).sum();
    let resident = cut.resident(beside);
    Writer { structure, cut, resident, given, of_spec, arrays, shared }.body(&mut on);
    let grid = n as u32 * cut.cluster;
    on.finish(Launch { grid: [grid, 1, 1], block: [cut.threads, 1, 1], cluster: cut.cluster, least_resident: resident })
}

/// Numbers that the third walk multiplies by.
const SCALES: u32 = 4;

/// Bytes of a barrier in shared memory.
const BARRIER: u32 = 8;

/// A meeting of a cluster. Where CTAs meet by stores each has a separate barrier: a peer that is through the first may store for the
/// second before this CTA has all of the first, and the bytes of the two must not be counted as one.
#[derive(Clone, Copy)]
enum Met {
    Maxima,
    Sums,
}

const MEETINGS: [Met; 2] = [Met::Maxima, Met::Sums];

/// Registers of a thread beside exponentials that it keeps from walk 2 to walk 3. They are kept where a chip's transcendental units have
/// less time for each byte of HBM than its others: on a B200, of logits of 16 bits.
const BESIDE_KEPT: u32 = 32;

/// Registers beside those where an entropy bonus needs gaps too.
const BESIDE_KEPT_AND_GAPS: u32 = 64;

/// What the kernel returns of each token, `[1,n,8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returned {
    /// Logp, entropy, loss and metrics.
    Results,
    /// The statistics of its row, as [`two_pass::statistics`](super::two_pass::statistics) returns them.
    Statistics,
}

impl Returned {
    fn name(self) -> &'static str {
        match self {
            Self::Results => "results",
            Self::Statistics => "statistics",
        }
    }
}

/// Softmaxes of a row.
fn softmaxes(structure: Structure) -> usize {
    structure.gap_rates().len()
}

/// Global memory.
struct Arrays {
    ids: Value<u64>,
    numbers: Value<u64>,
    logits: Value<u64>,
    tokens: Value<u64>,
    /// Of columns, where they differ in it.
    biases: Option<Value<u64>>,
    /// A factor of all dlogits, where there is one.
    upstream: Option<Value<u64>>,
    dlogits: Value<u64>,
    /// Results or statistics of each token.
    returned: Value<u64>,
}

/// Shared memory of a CTA.
struct Shared {
    row: Value<u32>,
    numbers: Value<u32>,
    /// What is given of the token.
    token: Value<u32>,
    /// `x_y`
    target: Value<u32>,
    /// One of every warp of the cluster.
    maxima: Value<u32>,
    /// `s` and `w` of each softmax, of every warp each.
    sums: Value<u32>,
    /// What the third walk multiplies by: see [`Scales`].
    scales: Value<u32>,
    /// A barrier for each of [`MEETINGS`], where CTAs meet by stores.
    meetings: Option<Value<u32>>,
}

/// `dx_j = policy·e_j + e'_j (base + slope·g_j)`, `dx_y = target`. Where logp and entropy are of one softmax, `policy` is within `base`.
/// Where a row may be walked by [exponents](Affine), there is no bonus: `base` is then the factor of their powers, and `slope` is `m`.
struct Scales {
    policy: Value<f32>,
    base: Value<f32>,
    slope: Value<f32>,
    target: Value<f32>,
}

struct Writer {
    structure: Structure,
    cut: Cut,
    /// CTAs that are to find room on a multiprocessor.
    resident: u32,
    given: Vec<Given>,
    of_spec: Vec<Number>,
    arrays: Arrays,
    shared: Shared,
}

/// A row, and what becomes of it.
struct Walked<'r> {
    part: &'r Row,
    change: Option<Change>,
    /// The target's column.
    id: Value<u32>,
}

/// Where a thread is.
#[derive(Clone, Copy)]
struct Place {
    thread: Value<u32>,
    lane: Value<u32>,
    warp: Value<u32>,
    rank: Value<u32>,
    row: Value<u32>,
}

impl Writer {
    fn logits(&self) -> Logits {
        self.cut.logits
    }

    /// Blocks of a thread whose exponentials stay in registers from walk 2 to walk 3.
    fn kept(&self) -> u32 {
        let changes = self.structure.transform.is_some();
        if self.cut.target < Target::Sm100 || self.logits() == Logits::F32 || changes {
            return 0;
        }
        let registers = self.cut.registers(self.resident);
        let softmaxes = softmaxes(self.structure) as u32;
        let beside = match self.structure.entropy_bonus {
            Some(_) => BESIDE_KEPT_AND_GAPS + REGISTERS_AT_ONCE * (softmaxes - 1),
            None => BESIDE_KEPT,
        };
        let exponentials = (registers - beside) / softmaxes;
        exponentials / self.logits().of_a_block()
    }

    fn place(&self, on: &mut Builder) -> Place {
        let thread = on.thread();
        let cta = on.cta();
        let [lane, rank] = [(thread, 32), (cta, self.cut.cluster)].map(|(of, per)| on.bits_and(of, per - 1));
        let warp = on.shift_right(thread, 5);
        let row = on.shift_right(cta, self.cut.cluster.ilog2());
        Place { thread, lane, warp, rank, row }
    }

    fn body(&self, on: &mut Builder) {
        let place = self.place(on);
        let Place { thread, rank, row, .. } = place;
        let id = {
            let offset = on.mul_wide(row, 4);
            let at = on.add(self.arrays.ids, offset);
            let id: Value<u32> = on.load(Address::Global(at, 0));
            // What stands where the mask hides it must point somewhere in the row.
            on.min(id, self.cut.vocab - 1)
        };
        let token = {
            let offset = on.mul_wide(row, 4 * width(self.given.len()) as u32);
            on.add(self.arrays.tokens, offset)
        };
        let mask: Value<f32> = on.load(Address::Global(token, self.place_of(Given::Mask)));
        let counts = {
            let zero: Value<f32> = 0.0.into();
            on.less(zero, mask)
        };
        let arrays = [self.arrays.logits, self.arrays.dlogits];
        let part = Row::new(on, self.cut, self.kept(), [thread, rank, row, self.shared.row], arrays);
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
        part.copy_in(on);
        self.copy_token(on, thread, token);
        on.wait_for_copies();
        if self.cut.cluster > 1 {
            on.wait_for_cluster();
        }
        let change = self.change(on, &part, token);
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
                self.store(on, Met::Maxima, rank, [(to, x)]);
            }
        });
        let walked = Walked { part: &part, change, id };
        let (max, target_logit) = self.max(on, &walked, place);
        let scales = self.exponent_scales(on);
        let affine = self.affine(on, &walked, max, &scales);
        let kept = self.sum(on, &walked, place, max, &scales, affine.as_ref());

        let zero = on.variable(0);
        let of_first_warp = on.equal(place.warp, zero);
        on.when(of_first_warp, |on| self.scalars(on, place, change, [max, target_logit], affine.as_ref()));
        on.barrier();
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
                    let policy = on.load(Address::Shared(self.shared.scales, 4));
                    affine.write(on, &part, &kept, policy);
                },
            ),
        }
        let in_array = part.global_of(on, target);
        on.when(target.own, |on| {
            let of_target: Value<f32> = on.load(Address::Shared(self.shared.scales, 12));
            self.cut.logits.store(on, in_array, of_target);
        });
    }

    fn scales(&self, on: &mut Builder) -> Scales {
        let [policy, base, slope, target] = on.load_all(Address::Shared(self.shared.scales, 0));
        Scales { policy, base, slope, target }
    }

    /// Where a column is in what is given of a token, bytes.
    fn place_of(&self, column: Given) -> u32 {
        4 * self.given.iter().position(|&other| other == column).expect("the structure has the column") as u32
    }

    fn given(&self, on: &mut Builder, column: Given) -> Value<f32> {
        let place = self.place_of(column);
        on.load(Address::Shared(self.shared.token, place))
    }

    /// A column that not every structure has.
    fn given_if(&self, on: &mut Builder, column: Given) -> Option<Value<f32>> {
        self.given.contains(&column).then(|| self.given(on, column))
    }

    /// Where a number is among those that the kernel is given, bytes.
    fn place_of_number(&self, which: Number) -> u32 {
        4 * self.of_spec.iter().position(|&other| other == which).expect("the structure has the number") as u32
    }

    fn number(&self, on: &mut Builder, which: Number) -> Value<f32> {
        let place = self.place_of_number(which);
        on.load(Address::Shared(self.shared.numbers, place))
    }

    /// What gaps are multiplied by.
    fn rate(&self, on: &mut Builder, rate: Rate) -> Value<f32> {
        match rate {
            Rate::OfAll(which) => self.number(on, which),
            Rate::OfToken => self.given(on, Given::Rate),
        }
    }

    /// Copies what is given of the token, and the numbers.
    fn copy_token(&self, on: &mut Builder, thread: Value<u32>, token: Value<u64>) {
        let parts = width(self.given.len()) as u32 / 4;
        let (numbers, here) = (self.of_spec.len() as u32, &self.shared);
        let from_numbers = self.arrays.numbers;
        let copies = [(parts, 16, token, here.token), (numbers, 4, from_numbers, here.numbers)];
        for (count, bytes, from, to) in copies {
            assert!(count <= self.cut.threads, "a thread copies one part of the token at most");
            let has = on.less(thread, count);
            on.when(has, |on| {
                let offset = on.mul(thread, bytes);
                let to = Address::Shared(on.add(to, offset), 0);
                let offset = on.extend(offset);
                let from = Address::Global(on.add(from, offset), 0);
                if bytes == 16 { on.copy_16(to, from) } else { on.copy_4(to, from) }
            });
        }
    }

    /// Returns the barrier of a meeting in this CTA, where CTAs meet by stores.
    fn barrier_of(&self, met: Met) -> Option<Address> {
        self.shared.meetings.map(|all| Address::Shared(all, BARRIER * met as u32))
    }

    /// Makes this CTA's barriers, where CTAs meet by stores, before it says that it is there: peers may then store.
    fn make_barriers(&self, on: &mut Builder, thread: Value<u32>) {
        let barriers = MEETINGS.map(|met| self.barrier_of(met).map(|barrier| (barrier, self.bytes_of(met))));
        let [Some(maxima), Some(sums)] = barriers else { return };
        let is_first = on.less(thread, 1);
        on.when(is_first, |on| {
            for (barrier, _) in [maxima, sums] {
                on.init_barrier(barrier);
            }
            on.fence_barriers();
            // The only arrival of each phase: what remains is the bytes, of which none can come before this.
            for (barrier, bytes) in [maxima, sums] {
                on.expect_bytes(barrier, bytes);
            }
        });
    }

    /// Counts the bytes that a CTA is told at a meeting: a value of every warp of the cluster for each array, and before the first the target's logit.
    fn bytes_of(&self, met: Met) -> u32 {
        let of_warps = 4 * self.cut.cluster * self.cut.warps();
        match met {
            Met::Maxima => of_warps + 4,
            Met::Sums => 2 * softmaxes(self.structure) as u32 * of_warps,
        }
    }

    /// Stores values in CTA `rank`, which sees them once it has [met](Self::meet).
    fn store(
        &self,
        on: &mut Builder,
        met: Met,
        rank: Value<u32>,
        values: impl IntoIterator<Item = (Address, Value<f32>)>,
    ) {
        let barrier = self.barrier_of(met).map(|_| {
            let all = self.shared.meetings.expect("a barrier is one of them");
            Address::Cluster(on.of_cluster(all, rank), BARRIER * met as u32)
        });
        for (to, value) in values {
            match barrier {
                Some(barrier) => on.store_async(to, value, barrier),
                None => on.store(to, value),
            }
        }
    }

    /// Waits until all that was stored for a meeting is there. Where CTAs meet by stores nothing else is: see [`order_cta`](Self::order_cta).
    fn meet(&self, on: &mut Builder, met: Met) {
        if let Some(barrier) = self.barrier_of(met) {
            on.wait_for_phase(barrier, 0);
        } else if self.cut.cluster > 1 {
            on.arrive_at_cluster(Arrival::Release);
            on.wait_for_cluster();
        } else {
            on.barrier();
        }
    }

    /// Orders what threads of this CTA did before the first meeting, and the reads of maxima, before what others of it do after. The
    /// cluster's barrier does that by itself; stores let this CTA see no more than the values stored, and the copies of the token and of
    /// the numbers are other threads'.
    fn order_cta(&self, on: &mut Builder) {
        if self.shared.meetings.is_some() {
            on.barrier();
        }
    }

    /// Writes what a warp has into its place of every CTA's arrays, one after another.
    fn tell(&self, on: &mut Builder, place: Place, met: Met, arrays: Value<u32>, values: &[Value<f32>]) {
        let cut = self.cut;
        let is_teller = on.less(place.lane, cut.cluster);
        on.when(is_teller, |on| {
            let index = on.mul_add(place.rank, cut.warps(), place.warp);
            let to = on.mul_add(index, 4, arrays);
            let to = if cut.cluster > 1 {
                Address::Cluster(on.of_cluster(to, place.lane), 0)
            } else {
                Address::Shared(to, 0)
            };
            let array = 4 * cut.cluster * cut.warps();
            let values = values.iter().zip(0..).map(|(&value, i)| (to.plus(i * array), value));
            self.store(on, met, place.lane, values);
        });
    }

    /// All warps' values of the `i`-th array, folded: in every lane the same.
    fn gather(
        &self,
        on: &mut Builder,
        place: Place,
        arrays: Value<u32>,
        i: u32,
        fold: impl Fn(&mut Builder, Value<f32>, Value<f32>) -> Value<f32>,
    ) -> Value<f32> {
        let warps = self.cut.cluster * self.cut.warps();
        let own = on.bits_and(place.lane, warps.min(32) - 1);
        let from = on.mul_add(own, 4, arrays);
        let mut values: Vec<Value<f32>> =
            (0..warps.div_ceil(32)).map(|turn| on.load(Address::Shared(from, 4 * (i * warps + 32 * turn)))).collect();
        while values.len() > 1 {
            values = values.chunks(2).map(|pair| fold(on, pair[0], pair[1])).collect();
        }
        over_lanes(on, values[0], warps.min(32), fold)
    }

    /// Walk 1: `m` and `x_y`.
    fn max(&self, on: &mut Builder, walked: &Walked, place: Place) -> (Value<f32>, Value<f32>) {
        let max = match walked.change {
            Some(change) if change.keeps_order() => {
                let max = self.max_of_logits(on, walked.part);
                change.largest(on, max)
            }
            Some(_) => self.max_of_changed(on, walked),
            None => self.max_of_logits(on, walked.part),
        };
        let larger = |on: &mut Builder, a, b| on.max(a, b);
        let max = over_lanes(on, max, 32, larger);
        let here = self.shared.maxima;
        self.tell(on, place, Met::Maxima, here, &[max]);
        self.meet(on, Met::Maxima);
        let others = self.gather(on, place, here, 0, larger);
        let target_logit = on.load(Address::Shared(self.shared.target, 0));
        self.order_cta(on);
        (on.max(others, target_logit), target_logit)
    }

    /// The largest of what this thread's columns become.
    fn max_of_changed(&self, on: &mut Builder, walked: &Walked) -> Value<f32> {
        let maxima: Pair = std::array::from_fn(|_| on.variable(f32::MIN));
        walked.part.walk(on, Along::Shared, |on, block| {
            let (t, _) = self.load(on, walked, block);
            for pair in t {
                for (&max, t) in maxima.iter().zip(pair) {
                    let larger = on.max(max, t);
                    on.set(max, larger);
                }
            }
        });
        on.max(maxima[0], maxima[1])
    }

    /// A block's columns in f32: as they are, or what they become, the target's and those of other rows −∞.
    fn load(&self, on: &mut Builder, walked: &Walked, block: Block) -> (Vec<Pair>, Option<Changed>) {
        let x = self.logits().load_block(on, block.shared);
        let Some(change) = walked.change else { return (x, None) };
        let first = walked.part.first_column(on, block);
        let target = on.sub(walked.id, first);
        let changed = change.block(on, &x, first, target, !walked.part.is_aligned());
        let all = changed.t.as_flattened();
        for (&t, other) in all.iter().zip(walked.part.of_others(on, first).into_iter().flatten()) {
            let kept = on.select(other, f32::NEG_INFINITY, t);
            on.set(t, kept);
        }
        at_target(on, target, all.len(), |on, element, hit| {
            let left = on.select(hit, f32::NEG_INFINITY, all[element]);
            on.set(all[element], left);
        });
        (changed.t.clone(), Some(changed))
    }

    /// The largest of this thread's columns as they are.
    fn max_of_logits(&self, on: &mut Builder, part: &Row) -> Value<f32> {
        let logits = self.logits();
        let maxima: [Value<u32>; 4] = std::array::from_fn(|_| on.variable(logits.lowest()));
        part.walk(on, Along::Shared, |on, block| {
            let words: [Value<u32>; 4] = on.load_all(block.shared);
            for (&max, word) in maxima.iter().zip(words) {
                let larger = logits.max_words(on, max, word);
                on.set(max, larger);
            }
        });
        let pairs = [[0, 1], [2, 3]].map(|[a, b]| logits.max_words(on, maxima[a], maxima[b]));
        let word = logits.max_words(on, pairs[0], pairs[1]);
        logits.max_of_word(on, word)
    }

    /// What a gap is multiplied by to become an exponent of 2: of the softmax that entropy is of, and of that of logp where it is another.
    fn exponent_scales(&self, on: &mut Builder) -> Vec<Value<f32>> {
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

    /// What becomes of the row's logits. Its numbers are read where they came from: no thread has waited for what others copied.
    fn change(&self, on: &mut Builder, part: &Row, token: Value<u64>) -> Option<Change> {
        let transform = self.structure.transform?;
        let place = self.place_of_number(Number::LogitFactor);
        let factor = on.load(Address::Global(self.arrays.numbers, place));
        let biases = self.arrays.biases.map(|all| {
            let own = on.load(Address::Global(token, self.place_of(Given::TargetBias)));
            Biases { all, own, aligned: part.is_aligned(), vocab: self.cut.vocab }
        });
        Some(Change::new(transform, factor, biases))
    }

    /// The [exponents](Affine) of one softmax of logits as they are, where instructions are what a chip has least of: a B200 has fewer
    /// transcendental units for its bandwidth, and its registers are for exponentials. Beside a bonus there are none: its gradient is that of
    /// a gap, which is exact near the largest logit, and 0 for a row of equal logits.
    fn affine(&self, on: &mut Builder, walked: &Walked, max: Value<f32>, scales: &[Value<f32>]) -> Option<Affine> {
        if self.cut.target >= Target::Sm100 {
            return None;
        }
        match (walked.change, self.structure.entropy_bonus, scales) {
            (None, None, &[scale]) => Some(Affine::new(on, self.logits(), max, scale)),
            _ => None,
        }
    }

    /// Walk 2: every CTA is told `s` and `w` of each softmax. Returns the exponentials of the blocks of which they are kept, by each scale.
    fn sum(
        &self,
        on: &mut Builder,
        walked: &Walked,
        place: Place,
        max: Value<f32>,
        scales: &[Value<f32>],
        affine: Option<&Affine>,
    ) -> Vec<Vec<Vec<Pair>>> {
        let sums: Vec<Value<f32>> = (0..2 * scales.len()).map(|_| on.variable(0.0)).collect();
        let kept = match affine {
            None => self.sum_by_gaps(on, walked, max, scales, &sums),
            Some(affine) => {
                let kept = self.room_for_kept(on, scales.len());
                on.either(
                    affine.is_beyond,
                    |on| {
                        let own = self.sum_by_gaps(on, walked, max, scales, &sums);
                        keep(on, &kept, &own);
                    },
                    |on| {
                        let own = affine.sum(on, walked.part, [sums[0], sums[1]]);
                        keep(on, &kept, &own);
                    },
                );
                kept
            }
        };
        let sums: Vec<Value<f32>> = sums.into_iter().map(|sum| over_lanes(on, sum, 32, Builder::add)).collect();
        self.tell(on, place, Met::Sums, self.shared.sums, &sums);
        self.meet(on, Met::Sums);
        kept
    }

    /// Registers for the exponentials that are kept.
    fn room_for_kept(&self, on: &mut Builder, softmaxes: usize) -> Vec<Vec<Vec<Pair>>> {
        let pairs = self.logits().of_a_block() / 2;
        let mut pair = || std::array::from_fn(|_| on.variable(0.0));
        let mut block = || (0..pairs).map(|_| pair()).collect();
        (0..self.kept()).map(|_| (0..softmaxes).map(|_| block()).collect()).collect()
    }

    /// Adds up this thread's columns by their gaps; returns the exponentials of the blocks of which they are kept.
    fn sum_by_gaps(
        &self,
        on: &mut Builder,
        walked: &Walked,
        max: Value<f32>,
        scales: &[Value<f32>],
        sums: &[Value<f32>],
    ) -> Vec<Vec<Vec<Pair>>> {
        let mut kept = Vec::new();
        walked.part.walk(on, Along::Shared, |on, block| {
            let (x, _) = self.load(on, walked, block);
            let gaps = gaps(on, &x, max, true);
            let exps = exponentials(on, &gaps, scales);
            for (exps, sums) in exps.iter().zip(sums.chunks(2)) {
                add_block(on, exps, &gaps, [sums[0], sums[1]]);
            }
            kept.extend(block.kept.map(|_| exps));
        });
        kept
    }

    /// The sums of one softmax of the row.
    fn sums(
        &self,
        on: &mut Builder,
        place: Place,
        which: u32,
        [max, target_logit]: [Value<f32>; 2],
        inverse: Option<Value<f32>>,
    ) -> Sums<Value<f32>> {
        let add = |on: &mut Builder, a, b| on.add(a, b);
        let here = self.shared.sums;
        let others = self.gather(on, place, here, 2 * which, add);
        let weighted = self.gather(on, place, here, 2 * which + 1, add);
        let weighted = inverse.map_or(weighted, |inverse| on.mul(weighted, inverse));
        Sums { max, target_logit, others, weighted }
    }

    /// The columns of the row's statistics, from the sums of the softmax that entropy is of and of that of logp.
    fn statistics(&self, on: &mut Builder, [of_entropy, of_logp]: [Sums<Value<f32>>; 2]) -> [Value<f32>; PER_TOKEN] {
        let mut columns = [Value::from(0.0); PER_TOKEN];
        columns[Statistic::Max as usize] = of_entropy.max;
        columns[Statistic::TargetLogit as usize] = of_entropy.target_logit;
        let places = [[Statistic::Others, Statistic::Weighted], [Statistic::LogpOthers, Statistic::LogpWeighted]];
        let softmaxes = softmaxes(self.structure);
        for ([others, weighted], sums) in places.into_iter().zip([of_entropy, of_logp]).take(softmaxes) {
            columns[others as usize] = sums.others;
            // Statistics weigh by exponents of 2.
            columns[weighted as usize] = on.mul(sums.weighted, -LOG2_E as f32);
        }
        columns
    }

    /// The token's results, and the third walk's [scales](Scales), by one warp.
    fn scalars(
        &self,
        on: &mut Builder,
        place: Place,
        change: Option<Change>,
        ends @ [_, target_logit]: [Value<f32>; 2],
        affine: Option<&Affine>,
    ) {
        let structure = self.structure;
        let by_token = structure.temperature == Temperature::Given;
        let inverse = (!by_token).then(|| self.number(on, Number::InverseTemperature));
        let gap_scales = structure.gap_rates().into_iter();
        let gap_scales: Vec<_> = gap_scales.map(|rate| rate.map(|rate| self.rate(on, rate))).collect();
        let (tempered, one_softmax) = (gap_scales[0], gap_scales.len() == 1);
        let entropy_sums = self.sums(on, place, 0, ends, tempered);
        let entropy_softmax = entropy_sums.softmax(on, tempered);
        let (logp_sums, logp_softmax) = if one_softmax {
            (entropy_sums, entropy_softmax)
        } else {
            let sums = self.sums(on, place, 1, ends, gap_scales[1]);
            (sums, sums.softmax(on, gap_scales[1]))
        };
        let logp = logp_softmax.logp(on);
        let logp = match inverse {
            Some(inverse) if !one_softmax => on.mul(logp, inverse),
            _ => logp,
        };
        let entropy = entropy_softmax.entropy(on);

        let spec_numbers = structure.numbers().into_iter().map(|which| (which, self.number(on, which)));
        let spec_numbers = Numbers::new(spec_numbers.collect::<Vec<_>>());
        let advantage = self.given(on, Given::Advantage);
        let old_logp = if structure.old_logp_given { self.given(on, Given::OldLogp) } else { logp };
        let ref_logp = structure.kl.map(|_| self.given(on, Given::RefLogp));
        let policy_weight = self.given_if(on, Given::PolicyWeight);
        let kl_weight = self.given_if(on, Given::KlWeight);
        let kl_share = self.given_if(on, Given::KlShare);
        let selected = self.given_if(on, Given::Selected);
        let rollout_logp = self.given_if(on, Given::RolloutLogp);
        let own = own_log_ratio(on, structure, &spec_numbers, [logp, old_logp, advantage]);
        let token = Token {
            logp,
            old_logp,
            advantage,
            log_ratio: own.value,
            own,
            ref_logp,
            rollout_logp,
            policy_weight,
            kl_weight,
            kl_share,
            selected,
            log_weight: None,
            on_policy: None,
        };
        let token = token_loss(on, structure, &spec_numbers, &token);
        let grad = token.grad(on, own);
        let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;
        let [low, high] = [clipped_low, clipped_high].map(|clipped| on.select(clipped, 1.0, 0.0));
        let zero = on.constant(0.0);
        let first = first_of_row(on, place);
        // In the order of the columns.
        let columns = [logp, entropy, loss, ratio, kl.unwrap_or(zero), low, high, reduced];
        let upstream = self.arrays.upstream.map(|upstream| on.load(Address::Global(upstream, 0)));
        // Statistics in place of results go with the factor of a framework's loss.
        let columns = if upstream.is_some() { self.statistics(on, [entropy_sums, logp_sums]) } else { columns };
        on.when(first, |on| self.give(on, place.row, columns));

        let times_upstream =
            |on: &mut Builder, factor: Value<f32>| upstream.map_or(factor, |upstream| on.mul(factor, upstream));
        let weight = self.given(on, Given::Weight);
        let weight = times_upstream(on, weight);
        let of_row = self.given_if(on, Given::EntropyFactor);
        let factor = on.mul(weight, grad);
        let factor = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
        let share = on.div(factor, logp_softmax.sum);
        let policy = on.neg(share);
        let share_of_others = on.div(logp_softmax.others, logp_softmax.sum);
        let target = on.mul(factor, share_of_others);
        let mut scales = Scales { policy, base: policy, slope: zero, target };
        if structure.entropy_bonus.is_some() {
            let factor = of_row.unwrap_or_else(|| self.number(on, Number::EntropyFactor));
            let factor = times_upstream(on, factor);
            let factor = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
            let factor = on.div(factor, entropy_softmax.sum);
            let minus = on.neg(factor);
            let before = if one_softmax { policy } else { zero };
            scales.base = on.mul_add(minus, entropy_softmax.mean_gap, before);
            scales.slope = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
            let above_mean = on.sub(entropy_softmax.target_gap, entropy_softmax.mean_gap);
            let exp_above_mean = on.mul(entropy_softmax.target, above_mean);
            let term = on.mul(exp_above_mean, factor);
            // A logit of −∞ has an infinite gap and no weight.
            let nothing = on.equal(entropy_softmax.target, zero);
            let term = on.select(nothing, zero, term);
            scales.target = on.add(target, term);
        }
        if let Some(change) = change {
            scales.target = change.through_target(on, scales.target, target_logit);
        }
        if let Some(affine) = affine {
            scales.base = affine.restore(on, scales.policy);
            scales.slope = ends[0];
        }
        let first = on.less(place.lane, 1);
        let to = Address::Shared(self.shared.scales, 0);
        let Scales { policy, base, slope, target } = scales;
        on.when(first, |on| {
            let values = [policy, base, slope, target].map(|value| on.variable(value));
            on.store_all(to, values);
        });
    }

    /// Writes the columns of what is returned of a row's token. The address is made where it is needed: a register that lives from the
    /// start is one less for exponentials.
    fn give(&self, on: &mut Builder, row: Value<u32>, columns: [Value<f32>; PER_TOKEN]) {
        let [a, b, c, d, e, f, g, h] = columns.map(|column| on.variable(column));
        let offset = on.mul_wide(row, 4 * PER_TOKEN as u32);
        let to = Address::Global(on.add(self.arrays.returned, offset), 0);
        on.store_all(to, [a, b, c, d]);
        on.store_all(to.plus(16), [e, f, g, h]);
    }

    /// Walk 3.
    fn dlogits(
        &self,
        on: &mut Builder,
        walked: &Walked,
        max: Value<f32>,
        scales: &[Value<f32>],
        kept: &[Vec<Vec<Pair>>],
        of: &Scales,
    ) {
        let (logits, bonus) = (self.logits(), self.structure.entropy_bonus.is_some());
        // Without a bonus the softmax that logp is of is all that is needed: the last.
        let first = if bonus { 0 } else { scales.len() - 1 };
        let [policy, base, slope] = [of.policy, of.base, of.slope].map(|factor| [factor; 2]);
        walked.part.write(on, |on, block| {
            let kept = block.kept.map(|number| kept[number][first..].to_vec());
            // An infinite gap has an exponential of 0, which is multiplied by nothing that is infinite but where there is a bonus.
            let (gaps, changed) = if bonus || kept.is_none() {
                let (x, changed) = self.load(on, walked, block);
                (gaps(on, &x, max, bonus), changed)
            } else {
                (vec![], None)
            };
            let exps = kept.unwrap_or_else(|| exponentials(on, &gaps, &scales[first..]));
            let gradients: Vec<Pair> = if bonus {
                let of_entropy = gaps.iter().zip(&exps[0]).map(|(&gap, &exp)| {
                    let factor = on.mul_add_pair(slope, gap, base);
                    on.mul_pair(exp, factor)
                });
                let of_entropy: Vec<Pair> = of_entropy.collect();
                match exps.get(1) {
                    None => of_entropy,
                    Some(exps) => {
                        let both = exps.iter().zip(of_entropy);
                        both.map(|(&exp, term)| on.mul_add_pair(exp, policy, term)).collect()
                    }
                }
            } else {
                exps[0].iter().map(|&exp| on.mul_pair(exp, policy)).collect()
            };
            let gradients = match (walked.change, &changed) {
                (Some(change), Some(changed)) => change.through(on, &gradients, changed),
                _ => gradients,
            };
            logits.pack_block(on, &gradients)
        });
    }
}

/// Puts exponentials where those of either way are kept.
fn keep(on: &mut Builder, kept: &[Vec<Vec<Pair>>], own: &[Vec<Vec<Pair>>]) {
    let flat = |blocks: &[Vec<Vec<Pair>>]| blocks.iter().flatten().flatten().flatten().copied().collect::<Vec<_>>();
    for (place, value) in flat(kept).into_iter().zip(flat(own)) {
        on.set(place, value);
    }
}

/// `2^(gap·scale)` of all gaps, by each scale.
fn exponentials(on: &mut Builder, gaps: &[Pair], scales: &[Value<f32>]) -> Vec<Vec<Pair>> {
    scales.iter().map(|&scale| gaps.iter().map(|&gap| exp(on, gap, scale)).collect()).collect()
}

/// By how much a block's logits are below `max`; where `bounded`, at most [`FARTHEST`].
fn gaps(on: &mut Builder, x: &[Pair], max: Value<f32>, bounded: bool) -> Vec<Pair> {
    let gap = |&x: &Pair| {
        let gap = on.sub_pair([max; 2], x);
        if bounded { gap.map(|gap| on.min(gap, FARTHEST as f32)) } else { gap }
    };
    x.iter().map(gap).collect()
}

/// Shared memory of CTA `rank` of the cluster, that is `address` in this one.
fn in_cta(on: &mut Builder, cut: Cut, address: Value<u32>, rank: Value<u32>) -> Address {
    if cut.cluster > 1 { Address::Cluster(on.of_cluster(address, rank), 0) } else { Address::Shared(address, 0) }
}

/// The one thread that speaks for the row.
fn first_of_row(on: &mut Builder, place: Place) -> Value<bool> {
    let [first_thread, first_cta] = [place.thread, place.rank].map(|number| on.less(number, 1));
    on.and(first_thread, first_cta)
}
