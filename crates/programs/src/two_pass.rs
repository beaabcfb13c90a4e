//! Two kernels that stream over the columns: the statistics of every row, then dlogits from a scale for each token.
//!
//! ```text
//! statistics   m = max x_j      g_j = (x_j − m)·log₂e/T     e_j = 2^g_j     s = Σ_{j≠y} e_j,  w = Σ_{j≠y} e_j g_j,  x_y
//! between      anything: logp, entropy and the loss from the statistics; collectives; losses over whole sequences
//! dlogits      dx_j = share · e_j  +  bonus · e_j (a_j − ā),   dx_y = −share · s  +  bonus · e_y (a_y − ā),   0 where masked
//! ```
//!
//! HBM sees each logit twice and each dlogit once. Rows need not fit VMEM, and a row may lie on several devices: an id
//! that is not among a device's columns meets none of them. The maximum runs with the columns, one for each lane, and
//! what was summed is rescaled when it rises; the lanes meet at the end of the row.
//!
//! Where a spec changes logits before their softmax, `x` is what they become, in both kernels anew.

use std::f64::consts::LN_2;

use super::mesh::Mesh;
use super::rows::{
    ColumnChunk, PairwiseSum, WindowColumns, accumulate, exponent_scale, for_each_chunk, gap, in_rows, load_logits,
    lowest, narrow, stored_as, widen,
};
use super::transform::{ChunkTargets, TileTransform, differ_by_column, registers};
use assay_algebra::structure::{GapRate, SpecNumber, Structure, TemperaturePlace};
use assay_core::device_dtype::DeviceDtype;
use assay_tile::{Fold, TileBuilder, TileColumn, TileKernel, TileMachine, TileMemory, TileType, TileValue, Window};

/// Columns of a window, at most.
const WINDOW: usize = 65536;

/// Rows of a window, at most.
const ROWS: usize = 32;

/// The columns of the array that the first kernel returns.
#[derive(Clone, Copy, Debug)]
pub enum Statistic {
    /// The maximum `m` of the row.
    Max,
    /// 0 where the target is not among the columns.
    TargetLogit,
    /// `s` of the softmax that entropy is of.
    Others,
    /// The sum `w` of that softmax, weighed by exponents.
    Weighted,
    /// `s` of the one that logp is of, where that is another.
    LogpOthers,
    /// The sum `w` of that softmax, weighed by exponents.
    LogpWeighted,
}

/// The names of [`Statistic`], in order.
pub(crate) const STATISTIC_NAMES: [&str; 6] =
    ["max", "target_logit", "others", "weighted", "logp_others", "logp_weighted"];

/// The columns of the array that the second kernel is given.
#[derive(Clone, Copy, Debug)]
pub enum Scale {
    /// The maximum `m` of the row.
    Max,
    /// The factor `−G/(S·T)` of exponentials.
    Share,
    /// `s` of the softmax that logp is of.
    Others,
    /// The mask, 1 if the token counts and 0 otherwise.
    Mask,
    /// The factor `E/(S·T)` of the bonus.
    Bonus,
    /// The mean gap `ā` of the softmax that entropy is of.
    MeanGap,
}

/// The names of [`Scale`], in order.
pub(crate) const SCALE_NAMES: [&str; 6] = ["max", "share", "others", "mask", "bonus", "mean_gap"];

/// The number of columns of both arrays.
pub const PER_TOKEN: usize = 8;

/// The logits of a device.
#[derive(Clone, Copy)]
pub(crate) struct LocalLogits {
    /// The extents `[1,n,v]` of the logits.
    pub(crate) shape: [usize; 3],
    /// The number of real columns on the device that has the fewest; its other columns are padding.
    pub(crate) least: usize,
}

impl LocalLogits {
    /// Returns the logits of each device of `mesh`, from its extents `[b,t,v]` and the size of the vocabulary.
    pub(crate) fn new(local: [usize; 3], vocab: usize, mesh: Mesh) -> Self {
        let shape @ [_, _, v] = in_rows(local);
        Self { shape, least: vocab.saturating_sub((mesh.vocab - 1) * v) }
    }

    /// The least and the most columns that one has.
    pub(crate) fn columns(self) -> [usize; 2] {
        [self.least, self.shape[2]]
    }
}

/// The numbers that both kernels are given, in SMEM, in order; without any there is no array of them.
pub fn numbers(structure: Structure) -> Vec<SpecNumber> {
    let mut numbers = structure.softmax_numbers();
    // What gaps are multiplied by has the temperature in it.
    numbers.retain(|&number| structure.transform.is_none() || number != SpecNumber::InverseTemperature);
    numbers
}

/// The division of logits into windows of rows and columns.
#[derive(Clone, Copy)]
struct StreamWindows {
    tokens: usize,
    vocab: usize,
    /// Columns that are real on every device.
    least: usize,
    rows: usize,
    columns: usize,
}

/// The axis of the grid along which blocks of rows lie.
const ROW_BLOCKS: usize = 1;

impl StreamWindows {
    fn new(
        LocalLogits { shape: [_, tokens, vocab], least }: LocalLogits,
        logits: DeviceDtype,
        machine: TileMachine,
    ) -> Self {
        let rows = tokens.next_multiple_of(machine.rows_of_a_register(logits)).min(ROWS);
        // The fewest windows that cover the row, of equal width: full windows would leave a short one at the end, and a
        // trip for few columns.
        let columns = vocab.div_ceil(vocab.div_ceil(WINDOW)).next_multiple_of(machine.lanes);
        Self { tokens, vocab, least, rows, columns }
    }

    fn blocks(self) -> usize {
        self.vocab.div_ceil(self.columns)
    }

    fn grid(self) -> [usize; 3] {
        [1, self.tokens.div_ceil(self.rows), self.blocks()]
    }

    fn logits(self, on: &mut TileBuilder, element: DeviceDtype) -> TileMemory {
        let window = Window { block: vec![1, self.rows, self.columns], along: vec![Some(0), Some(1), Some(2)] };
        on.input(stored_as(element), &[1, self.tokens, self.vocab], window)
    }

    /// A `[1,n,columns]` array of which every step of a row sees the same rows.
    fn per_token(self, columns: usize) -> ([usize; 3], Window) {
        let window = Window { block: vec![1, self.rows, columns], along: vec![Some(0), Some(1), None] };
        ([1, self.tokens, columns], window)
    }

    /// The columns of this step's window.
    fn window_columns(self, on: &mut TileBuilder, structure: Structure, real: TileMemory) -> WindowColumns {
        let (zero, block, columns) = (on.integer(0), on.grid_index(2), on.integer(self.columns));
        let real = on.load_scalar(real, zero);
        let before = on.mul(block, columns);
        // Only the last window may reach beyond the real columns; the others need no mask.
        let real = on.sub(real, before);
        // The last window has the fewest.
        let fewest = self.least.saturating_sub((self.blocks() - 1) * self.columns);
        let lanes = on.machine().lanes;
        WindowColumns { all: self.columns, whole: fewest / lanes * lanes, real, registers: registers(structure) }
    }

    /// The target's column in this step's window, `[rows, 1]`; outside it, where it is not here.
    fn targets(self, on: &mut TileBuilder, ids: TileMemory) -> TileValue {
        let ids = on.load(ids, TileColumn::Static(0), 1);
        let block = on.grid_index(2);
        let columns = on.integer(self.columns);
        let before = on.mul(block, columns);
        on.sub(ids, before)
    }
}

/// Returns whether each of `columns` places from column `start` of a chunk is its row's target.
fn hits(on: &mut TileBuilder, targets: TileValue, chunk: ColumnChunk, start: usize, columns: usize) -> TileValue {
    let first = match chunk.column {
        TileColumn::Static(column) => on.integer(column + start),
        TileColumn::Dynamic(column) => {
            let start = on.integer(start);
            on.add(column, start)
        }
    };
    // The same in all rows, so that one addition serves them.
    let [rows, _] = on.type_of(targets).tile.expect("one column");
    let place = on.iota(1, rows, columns);
    let place = on.add(place, first);
    on.equal(place, targets)
}

/// The operands of both kernels, in order: the numbers, the count of real columns, logits, ids, the factors of gaps
/// if tokens differ in them and, if columns differ, their biases and those of the targets.
struct TwoPassOperands {
    numbers: Option<TileMemory>,
    real: TileMemory,
    logits: TileMemory,
    ids: TileMemory,
    /// The factors of gaps, `[1,n,1]`.
    rates: Option<TileMemory>,
    /// The biases of columns `[1,v]` and of targets `[1,n,1]`.
    biases: Option<[TileMemory; 2]>,
}

impl TwoPassOperands {
    fn declare(on: &mut TileBuilder, structure: Structure, cut: StreamWindows, element: DeviceDtype) -> Self {
        let of_spec = self::numbers(structure).len();
        let numbers = (of_spec > 0).then(|| on.scalars(DeviceDtype::F32, of_spec));
        let real = on.scalars(DeviceDtype::I32, 1);
        let logits = cut.logits(on, element);
        let (shape, window) = cut.per_token(1);
        let ids = on.input(DeviceDtype::I32, &shape, window.clone());
        let by_token = structure.temperature == TemperaturePlace::Given;
        let rates = by_token.then(|| on.input(DeviceDtype::F32, &shape, window.clone()));
        let biases = differ_by_column(structure).then(|| {
            let of_columns = Window { block: vec![1, cut.columns], along: vec![None, Some(2)] };
            [on.input(DeviceDtype::F32, &[1, cut.vocab], of_columns), on.input(DeviceDtype::F32, &shape, window)]
        });
        Self { numbers, real, logits, ids, rates, biases }
    }

    fn number(&self, on: &mut TileBuilder, structure: Structure, which: SpecNumber) -> TileValue {
        let place = numbers(structure).iter().position(|&other| other == which).expect("the structure has the number");
        let place = on.integer(place);
        on.load_scalar(self.numbers.expect("the structure has numbers"), place)
    }

    /// Returns the factors that make gaps exponents of 2, for each softmax: a number, or `[rows, 1]`.
    fn exponent_scales(&self, on: &mut TileBuilder, structure: Structure) -> Vec<TileValue> {
        let rates = structure.gap_rates().into_iter();
        let scales = rates.map(|rate| {
            let rate = rate.map(|rate| match rate {
                GapRate::OfAll(number) => self.number(on, structure, number),
                GapRate::OfToken => on.load(self.rates.expect("tokens differ in it"), TileColumn::Static(0), 1),
            });
            exponent_scale(on, rate)
        });
        scales.collect()
    }

    /// Returns the logits of a window with their transform, in f32.
    fn row(&self, on: &mut TileBuilder, structure: Structure, targets: TileValue) -> WindowLogits {
        let number = |on: &mut TileBuilder, which| self.number(on, structure, which);
        let change = TileTransform::from_structure(on, structure, number, self.biases.map(|[columns, _]| columns));
        let of_targets = self.biases.map(|[_, of_targets]| on.load(of_targets, TileColumn::Static(0), 1));
        WindowLogits { logits: self.logits, change, of_targets, targets }
    }
}

/// The logits of a window and their transform.
#[derive(Clone, Copy)]
struct WindowLogits {
    logits: TileMemory,
    change: Option<TileTransform>,
    /// The biases of the targets, `[rows, 1]`.
    of_targets: Option<TileValue>,
    targets: TileValue,
}

impl WindowLogits {
    /// Loads a chunk's transformed columns in f32, and whether each is outside the support, if any may be.
    fn load(self, on: &mut TileBuilder, chunk: ColumnChunk) -> (TileValue, Option<TileValue>) {
        let Some(change) = self.change else {
            let x = load_logits(on, self.logits, chunk);
            return (widen(on, x), None);
        };
        let hits = |on: &mut TileBuilder| hits(on, self.targets, chunk, 0, chunk.columns);
        change.load(on, self.logits, chunk, self.of_targets.map(|bias| ChunkTargets { bias, hits: &hits }))
    }
}

/// Called with the [numbers] f32, the number of real columns `[1]` i32, logits `[1,n,V]`, ids `[1,n,1]` i32, where temperatures are
/// given [`TokenInput::Rate`](assay_algebra::structure::TokenInput::Rate) `[1,n,1]` f32 and, where columns differ before their softmax, biases `[1,V]` and those of the targets `[1,n,1]`, f32; returns `[1,n,8]` f32, see [`Statistic`].
pub(crate) fn statistics(
    structure: Structure,
    local: LocalLogits,
    element: DeviceDtype,
    machine: TileMachine,
) -> TileKernel {
    let cut = StreamWindows::new(local, element, machine);
    let mut builder = TileBuilder::new("grpo_statistics", &cut.grid(), machine);
    builder.parallel(ROW_BLOCKS);
    let on = &mut builder;
    let given = TwoPassOperands::declare(on, structure, cut, element);
    let (shape, window) = cut.per_token(PER_TOKEN);
    let results = on.output(DeviceDtype::F32, &shape, window);
    let scales = given.exponent_scales(on, structure);
    let width = machine.lanes;
    let mut of_lanes = || on.scratch(DeviceDtype::F32, cut.rows, width);
    let (maxima, chosen) = (of_lanes(), of_lanes());
    let sums: Vec<[TileMemory; 2]> = scales.iter().map(|_| [of_lanes(), of_lanes()]).collect();
    let lanes = TileType::tile(DeviceDtype::F32, cut.rows, width);
    let whole = |on: &mut TileBuilder, memory| on.load(memory, TileColumn::Static(0), width);
    let keep = |on: &mut TileBuilder, memory, value| on.store(memory, TileColumn::Static(0), value);

    let block = on.grid_index(2);
    let first = on.integer(0);
    let is_first = on.equal(block, first);
    // The first window of a row resets what the scratch holds of the row before.
    on.when(is_first, |on| {
        let (lowest, zero) = (on.constant(lowest(DeviceDtype::F32), lanes), on.constant(0.0, lanes));
        keep(on, maxima, lowest);
        keep(on, chosen, zero);
        sums.iter().flatten().for_each(|&sum| keep(on, sum, zero));
    });

    let columns = cut.window_columns(on, structure, given.real);
    let targets = cut.targets(on, given.ids);
    let row = given.row(on, structure, targets);
    // What logits become, from the maximum to the sums.
    let kept = row.change.map(|_| on.scratch(DeviceDtype::F32, cut.rows, cut.columns));
    // Maxima in bf16 are exact, and take half the registers where the machine computes in bf16.
    let native = row.change.is_none()
        && (element == DeviceDtype::F32 || element == DeviceDtype::Bf16 && machine.bf16_arithmetic);
    let compared = if native { element } else { DeviceDtype::F32 };
    let lowest = on.constant(lowest(compared), TileType { element: compared, ..lanes });
    let highest = for_each_chunk(on, columns, &[lowest], |on, chunk, carried| {
        let x = if native { load_logits(on, row.logits, chunk) } else { row.load(on, chunk).0 };
        if let Some(kept) = kept {
            on.store(kept, chunk.column, x);
        }
        let mut maximum = carried.to_vec();
        accumulate(on, Fold::Max, &mut maximum, x);
        maximum
    });
    let highest = on.convert(highest[0], DeviceDtype::F32);
    // Online maximum, one for each lane: nothing is folded over lanes until the row ends, which would take as long as
    // the sums.
    let before = whole(on, maxima);
    let max = on.max(before, highest);
    keep(on, maxima, max);
    let rise = gap(on, max, before);

    // Sums of this window alone: few terms, then one addition to those of the windows before.
    let zero = on.constant(0.0, lanes);
    let mut initial = vec![zero; 1 + 2 * scales.len()];
    initial[0] = whole(on, chosen);
    let of_window = for_each_chunk(on, columns, &initial, |on, chunk, carried| {
        let x = match kept {
            Some(kept) => on.load(kept, chunk.column, chunk.columns),
            None => row.load(on, chunk).0,
        };
        let zero = on.number(0.0);
        let mut next = carried.to_vec();
        let mut terms = vec![PairwiseSum::default(); 2 * scales.len()];
        for start in (0..chunk.columns).step_by(width) {
            // The target is chosen by comparing columns, and left out of the sums: 1 − p_y is then s/S and keeps its
            // digits.
            let hit = hits(on, targets, chunk, start, width);
            let part = on.columns(x, start, width);
            next[0] = on.select(hit, part, next[0]);
            let gap = gap(on, max, part);
            for (i, &scale) in scales.iter().enumerate() {
                let exponent = on.mul(gap, scale);
                let exp = on.exp2(exponent);
                let exp = on.select(hit, zero, exp);
                let term = on.mul(exp, exponent);
                terms[2 * i].add(on, exp);
                terms[2 * i + 1].add(on, term);
            }
        }
        for (sum, terms) in next[1..].iter_mut().zip(terms) {
            *sum = terms.onto(on, *sum);
        }
        next
    });
    keep(on, chosen, of_window[0]);
    for ((&scale, &[others, weighted]), of_window) in scales.iter().zip(&sums).zip(of_window[1..].chunks(2)) {
        // Sums of earlier windows are scaled down by the rise of the maximum, then this window's are added.
        let before = [whole(on, others), whole(on, weighted)];
        let before = rescaled(on, scale, rise, before[0], before[1]);
        for ((memory, before), of_window) in [others, weighted].into_iter().zip(before).zip(of_window) {
            let sum = on.add(before, *of_window);
            keep(on, memory, sum);
        }
    }

    let last = on.integer(cut.blocks() - 1);
    let is_last = on.equal(block, last);
    on.when(is_last, |on| LaneStatistics { maxima, chosen, sums }.meet(on, &scales, results));
    builder.finish()
}

/// The statistics of a row that each lane has gathered, `[rows, lanes]`.
struct LaneStatistics {
    maxima: TileMemory,
    chosen: TileMemory,
    /// `s` and `w` of each softmax.
    sums: Vec<[TileMemory; 2]>,
}

impl LaneStatistics {
    /// The statistics of the row.
    fn meet(&self, on: &mut TileBuilder, scales: &[TileValue], results: TileMemory) {
        let lanes = on.machine().lanes;
        let whole = |on: &mut TileBuilder, memory| on.load(memory, TileColumn::Static(0), lanes);
        let give = |on: &mut TileBuilder, column: Statistic, value| {
            on.store(results, TileColumn::Static(column as usize), value);
        };
        // The lanes meet once a row: each lane's sums are brought below the row's maximum, then added.
        let of_lanes = whole(on, self.maxima);
        let max = on.fold_lanes(Fold::Max, of_lanes);
        let rise = gap(on, max, of_lanes);
        give(on, Statistic::Max, max);
        let chosen = whole(on, self.chosen);
        let target_logit = on.fold_lanes(Fold::Add, chosen);
        give(on, Statistic::TargetLogit, target_logit);
        let columns = [[Statistic::Others, Statistic::Weighted], [Statistic::LogpOthers, Statistic::LogpWeighted]];
        for ((&scale, &[others, weighted]), columns) in scales.iter().zip(&self.sums).zip(columns) {
            let (others, weighted) = (whole(on, others), whole(on, weighted));
            for (column, value) in columns.into_iter().zip(rescaled(on, scale, rise, others, weighted)) {
                let value = on.fold_lanes(Fold::Add, value);
                give(on, column, value);
            }
        }
    }
}

/// `s` and `w` after the maximum has risen.
fn rescaled(
    on: &mut TileBuilder,
    scale: TileValue,
    rise: TileValue,
    others: TileValue,
    weighted: TileValue,
) -> [TileValue; 2] {
    // With e' = e·2^shift and g' = g + shift, w' = Σ e'·g' = (w + s·shift)·2^shift.
    let shift = on.mul(rise, scale);
    let shrink = on.exp2(shift);
    let shifted = on.mul(others, shift);
    let weighted = on.add(weighted, shifted);
    [on.mul(others, shrink), on.mul(weighted, shrink)]
}

/// Called as [`statistics`], dlogits written over the logits, and with scales `[1,n,8]` f32, see [`Scale`].
pub(crate) fn dlogits(
    structure: Structure,
    local: LocalLogits,
    element: DeviceDtype,
    machine: TileMachine,
) -> TileKernel {
    let cut = StreamWindows::new(local, element, machine);
    let mut builder = TileBuilder::new("grpo_dlogits", &cut.grid(), machine);
    builder.parallel(ROW_BLOCKS);
    let on = &mut builder;
    let given = TwoPassOperands::declare(on, structure, cut, element);
    let (shape, window) = cut.per_token(PER_TOKEN);
    let tokens = on.input(DeviceDtype::F32, &shape, window);
    let dlogits = on.output_over(given.logits);

    let scales = given.exponent_scales(on, structure);
    let of_token = |on: &mut TileBuilder, column: Scale| on.load(tokens, TileColumn::Static(column as usize), 1);
    let (max, share, others) = (of_token(on, Scale::Max), of_token(on, Scale::Share), of_token(on, Scale::Others));
    let mask = of_token(on, Scale::Mask);
    let bonus = structure.entropy_bonus.map(|_| [of_token(on, Scale::Bonus), of_token(on, Scale::MeanGap)]);
    let of_others = on.mul(share, others);
    let target = on.neg(of_others);
    let targets = cut.targets(on, given.ids);
    let row = given.row(on, structure, targets);
    let columns = cut.window_columns(on, structure, given.real);
    for_each_chunk(on, columns, &[], |on, chunk, _| {
        let (x, outside) = row.load(on, chunk);
        // An infinite gap has an exponential of 0, which is multiplied by nothing that is infinite but where there is a bonus.
        let gap = if bonus.is_some() { gap(on, max, x) } else { on.sub(max, x) };
        let exponents: Vec<TileValue> = scales.iter().map(|&scale| on.mul(gap, scale)).collect();
        let exps: Vec<TileValue> = exponents.iter().map(|&exponent| on.exp2(exponent)).collect();
        // The policy's gradient goes through the last softmax, the bonus's through the first.
        let policy = on.mul(exps[exps.len() - 1], share);
        // The target's dlogit replaces that of its column: −share·s, computed once for the row.
        let hit = hits(on, targets, chunk, 0, chunk.columns);
        let mut gradient = on.select(hit, target, policy);
        if let Some([factor, mean_gap]) = bonus {
            let minus_ln_2 = on.number(-LN_2);
            let gap = on.mul(exponents[0], minus_ln_2);
            let above_mean = on.sub(gap, mean_gap);
            // The small factor last: a device that flushes what is below the normal numbers must not flush a part.
            let exp_above_mean = on.mul(exps[0], above_mean);
            let term = on.mul(exp_above_mean, factor);
            gradient = on.add(gradient, term);
        }
        if let Some(change) = row.change {
            gradient = change.through(on, gradient, x, outside);
        }
        let zero = on.number(0.0);
        let [rows, columns] = on.type_of(gradient).tile.expect("a tile");
        let mask = on.broadcast(mask, rows, columns);
        let counts = on.less(zero, mask);
        let gradient = on.select(counts, gradient, zero);
        let gradient = narrow(on, gradient, stored_as(element));
        on.store(dlogits, chunk.column, gradient);
        vec![]
    });
    builder.finish()
}
