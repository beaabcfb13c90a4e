//! Loss, entropy and dlogits in one pass over HBM: a block of whole rows stays in VMEM from the first look at its logits
//! to the dlogits that are written over them.
//!
//! ```text
//! target   x_y is taken out of the block and −∞ left in its place, so that what follows sums over the others
//! pass 0   m   = max(max_j x_j, x_y)
//! pass 1   g_j = (x_j − m)·log₂e/T      e_j = 2^g_j      s = Σ e_j,  w = Σ e_j g_j           e_j kept in VMEM
//! scalars  S = s + e_y,  ā = (−ln 2 · w + e_y a_y)/S,  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! pass 2   dx_j = −G e_j/(S·T)  +  E e_j (a_j − ā)/(S·T)          rounded to the logits' dtype
//! target   dx_y =  G s/(S·T)    +  E e_y (a_y − ā)/(S·T)          patched
//! ```
//!
//! Where a spec changes logits before their softmax, pass 0 keeps what they become, `t`, in VMEM in place of the exponentials, with −∞
//! at the target; passes 1 and 2 are over `t`, and dlogits are multiplied by its slope.
//!
//! HBM sees each logit once and each dlogit once. A token-level loss only: `G` needs nothing of other rows but the
//! normaliser, which comes in with the token's weight.

use std::f64::consts::LN_2;

use super::rows::{
    ACCUMULATORS, ColumnChunk, PerRow, WindowColumns, accumulate, exponent_scale, for_each_chunk, gap, join,
    load_logits, lowest, narrow, stored_as, widen,
};
use super::transform::{TileTransform, differ_by_column, registers};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{TokenArray, TokenArrays, TokenLoss, single_token_loss};
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_algebra::structure::{GapRate, SpecNumber, SpecNumbers, Structure, TemperaturePlace, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_tile::{Fold, TileBuilder, TileColumn, TileKernel, TileMachine, TileMemory, TileType, TileValue, Window};

/// Tokens of a batch, at most: their ids lie in SMEM.
pub(crate) fn most_tokens(machine: TileMachine) -> usize {
    machine.smem_bytes / DeviceDtype::I32.size()
}

/// The columns of the array that holds what the kernel is given of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenColumn {
    /// The advantage `A` of the token.
    Advantage,
    /// The log-probability under the old policy, if the structure reads it.
    OldLogp,
    /// The log-probability under the reference policy of the KL penalty, if the structure reads it.
    RefLogp,
    /// The factor of the token's loss, 0 if it is masked, times any cotangent of the loss.
    Weight,
    /// The mask, 1 if the token counts and 0 otherwise.
    Mask,
    /// The factor of the policy term.
    PolicyWeight,
    /// The factor of the KL penalty.
    KlWeight,
    /// The choice of KL-Cov, 1 if the token is penalized.
    Selected,
    /// The log-probability under the sampler, NaN if there is none.
    RolloutLogp,
    /// The factor of the KL penalty if it has a reduction of its own, over `Weight`.
    KlShare,
    /// `∂loss/∂entropy` without `1/T`, where tokens differ in it.
    EntropyFactor,
    /// The bias of the target, where columns differ before their softmax.
    TargetBias,
    /// The factor of gaps if temperatures are given by token: see
    /// [`TokenInput::Rate`](assay_algebra::structure::TokenInput::Rate).
    Rate,
}

impl TokenColumn {
    /// Returns the name of the column in manifests.
    pub fn name(self) -> &'static str {
        match self {
            TokenColumn::Advantage => "advantage",
            TokenColumn::OldLogp => "old_logp",
            TokenColumn::RefLogp => "ref_logp",
            TokenColumn::Weight => "weight",
            TokenColumn::Mask => "mask",
            TokenColumn::PolicyWeight => "policy_weight",
            TokenColumn::KlWeight => "kl_weight",
            TokenColumn::Selected => "selected",
            TokenColumn::RolloutLogp => "rollout_logp",
            TokenColumn::KlShare => "kl_share",
            TokenColumn::EntropyFactor => "entropy_factor",
            TokenColumn::TargetBias => "target_bias",
            TokenColumn::Rate => "rate",
        }
    }
}

impl From<TokenArray> for TokenColumn {
    fn from(array: TokenArray) -> Self {
        match array {
            TokenArray::Advantage => TokenColumn::Advantage,
            TokenArray::KlShare => TokenColumn::KlShare,
            TokenArray::Input(TokenInput::OldLogp) => TokenColumn::OldLogp,
            TokenArray::Input(TokenInput::RefLogp) => TokenColumn::RefLogp,
            TokenArray::Input(TokenInput::PolicyWeight) => TokenColumn::PolicyWeight,
            TokenArray::Input(TokenInput::KlWeight) => TokenColumn::KlWeight,
            TokenArray::Input(TokenInput::Selected) => TokenColumn::Selected,
            TokenArray::Input(TokenInput::RolloutLogp) => TokenColumn::RolloutLogp,
            TokenArray::Input(other) => unreachable!("a kernel of single tokens reads no {}", other.name()),
        }
    }
}

/// The columns that a structure has, in order: the first five whether it reads them or not.
pub fn given_columns(structure: Structure) -> Vec<TokenColumn> {
    let optional = [
        (structure.policy_weight, TokenColumn::PolicyWeight),
        (structure.kl_weight, TokenColumn::KlWeight),
        (structure.selected(), TokenColumn::Selected),
        (structure.rollout_logp(), TokenColumn::RolloutLogp),
        (structure.kl_share(), TokenColumn::KlShare),
        (structure.entropy_by_token(), TokenColumn::EntropyFactor),
        (differ_by_column(structure), TokenColumn::TargetBias),
        (structure.temperature == TemperaturePlace::Given, TokenColumn::Rate),
    ];
    let always =
        [TokenColumn::Advantage, TokenColumn::OldLogp, TokenColumn::RefLogp, TokenColumn::Weight, TokenColumn::Mask];
    always.into_iter().chain(optional.into_iter().filter_map(|(read, column)| read.then_some(column))).collect()
}

/// Returns the width of an array of so many columns, a multiple of eight.
pub fn width(columns: usize) -> usize {
    columns.next_multiple_of(PER_TOKEN)
}

/// The columns of the array that it returns.
#[derive(Clone, Copy, Debug)]
pub enum ResultColumn {
    /// The log-probability of the target.
    Logp,
    /// The entropy of the token, in nats.
    Entropy,
    /// The loss of the token, before mask and weight.
    Loss,
    /// The policy's over the sampler's probability.
    Ratio,
    /// The KL estimate, not multiplied by `beta`.
    Kl,
    /// Whether the ratio is clipped from below, 1 or 0.
    ClippedLow,
    /// Whether the ratio is clipped from above, 1 or 0.
    ClippedHigh,
    /// The number that `Weight` multiplies, if a KL penalty with a reduction of its own makes it differ from `Loss`.
    Reduced,
}

/// The names of [`ResultColumn`], in order; the last is only of structures that have it.
const RESULT_NAMES: [&str; PER_TOKEN] =
    ["logp", "entropy", "token_loss", "ratio", "kl", "clipped_low", "clipped_high", "reduced"];

/// The names of the columns that a structure returns, in order.
pub fn result_names(structure: Structure) -> &'static [&'static str] {
    &RESULT_NAMES[..PER_TOKEN - usize::from(!structure.kl_share())]
}

/// Columns of both arrays, as far as the structure has no more to give.
pub(crate) const PER_TOKEN: usize = 8;

/// The numbers that it is given, in SMEM, in order.
pub fn numbers(structure: Structure) -> Vec<SpecNumber> {
    let mut numbers = structure.numbers();
    numbers.extend(structure.softmax_numbers());
    numbers.push(SpecNumber::EntropyFactor);
    numbers
}

/// The kernel for `[1,n,v]` logits. `None` where it has no [rows of a block](rows_of_a_block).
pub(crate) fn one_pass(
    structure: Structure,
    local: [usize; 3],
    logits: DeviceDtype,
    machine: TileMachine,
) -> Option<TileKernel> {
    let rows = rows_of_a_block(structure, local, logits, machine).ok()?;
    Some(write(structure, local, logits, machine, rows))
}

/// Rows of a block: two registers of them where they fit VMEM and there are as many, else one.
///
/// # Errors
/// The largest vocabulary of which one register of rows fits.
pub(crate) fn rows_of_a_block(
    structure: Structure,
    [_, n, v]: [usize; 3],
    logits: DeviceDtype,
    machine: TileMachine,
) -> std::result::Result<usize, usize> {
    let granule = machine.rows_of_a_register(logits);
    // Two registers of rows share the cost of a trip; one is enough for few rows.
    let worthwhile = [2 * granule, granule].into_iter().filter(|&rows| rows == granule || rows < 2 * n);
    let fits = |rows: &usize| vmem_bytes(structure, logits, [*rows, v], machine) <= machine.vmem_bytes;
    worthwhile.into_iter().find(fits).ok_or_else(|| {
        // The bytes are linear in the columns, from which the largest vocabulary follows, in whole registers.
        let of_no_columns = vmem_bytes(structure, logits, [granule, 0], machine);
        let of_a_register = vmem_bytes(structure, logits, [granule, machine.lanes], machine) - of_no_columns;
        machine.vmem_bytes.saturating_sub(of_no_columns) / of_a_register * machine.lanes
    })
}

/// VMEM that the compiler needs beside a kernel's own, for values that do not stay in registers.
const SPILLS: usize = 4 << 20;

/// Bytes of VMEM: two buffers for the logits and two for dlogits, the exponentials, the tokens' arrays, and two buffers for the biases
/// of columns.
fn vmem_bytes(structure: Structure, logits: DeviceDtype, block @ [rows, v]: [usize; 2], machine: TileMachine) -> usize {
    let per_token = machine.tile_bytes(DeviceDtype::F32, [rows, PER_TOKEN]);
    let biases = if differ_by_column(structure) { 2 * machine.tile_bytes(DeviceDtype::F32, [1, v]) } else { 0 };
    4 * machine.tile_bytes(logits, block)
        + machine.tile_bytes(DeviceDtype::F32, block)
        + 4 * per_token
        + biases
        + SPILLS
}

/// A softmax, and how its exponentials were made.
#[derive(Clone, Copy)]
struct ResidentSoftmax {
    /// The factor that makes gaps exponents of 2.
    scale: TileValue,
    softmax: SoftmaxStatistics<TileValue>,
}

struct OnePassWriter {
    on: TileBuilder,
    vocab: usize,
    rows: usize,
    logits: TileMemory,
    dlogits: TileMemory,
    tokens: TileMemory,
    given: Vec<TokenColumn>,
    results: TileMemory,
    /// The exponentials, or what logits become.
    exps: TileMemory,
    change: Option<TileTransform>,
    /// Registers of columns that a trip of a loop takes, at most.
    registers: usize,
}

/// The axis of the grid along which blocks of rows lie.
const ROW_BLOCKS: usize = 1;

fn write(
    structure: Structure,
    [_, n, v]: [usize; 3],
    element: DeviceDtype,
    machine: TileMachine,
    rows: usize,
) -> TileKernel {
    let mut on = TileBuilder::new("grpo_one_pass", &[1, n.div_ceil(rows)], machine);
    on.parallel(ROW_BLOCKS);
    let ids = on.scalars(DeviceDtype::I32, n);
    let numbers = on.scalars(DeviceDtype::F32, self::numbers(structure).len());
    let given = given_columns(structure);
    let padded = v.next_multiple_of(machine.lanes);
    let window = |columns| Window { block: vec![1, rows, columns], along: vec![Some(0), Some(1), None] };
    let logits = on.input(stored_as(element), &[1, n, v], window(padded));
    let tokens = on.input(DeviceDtype::F32, &[1, n, width(given.len())], window(width(given.len())));
    let bias = differ_by_column(structure).then(|| {
        let of_columns = Window { block: vec![1, padded], along: vec![None, None] };
        on.input(DeviceDtype::F32, &[1, v], of_columns)
    });
    let dlogits = on.output_over(logits);
    let results = on.output(DeviceDtype::F32, &[1, n, PER_TOKEN], window(PER_TOKEN));
    let exps = on.scratch(DeviceDtype::F32, rows, padded);
    let change =
        TileTransform::from_structure(&mut on, structure, |on, which| number(on, structure, numbers, which), bias);
    let registers = registers(structure);
    let mut writer =
        OnePassWriter { on, vocab: v, rows, logits, dlogits, tokens, given, results, exps, change, registers };
    writer.body(structure, n, ids, numbers);
    writer.on.finish()
}

/// A number of those in SMEM.
fn number(on: &mut TileBuilder, structure: Structure, numbers: TileMemory, which: SpecNumber) -> TileValue {
    let place = self::numbers(structure).iter().position(|&other| other == which);
    let at = on.integer(place.expect("the structure has the number"));
    on.load_scalar(numbers, at)
}

impl OnePassWriter {
    fn per_row(&mut self) -> PerRow<'_> {
        PerRow { on: &mut self.on, rows: self.rows }
    }

    fn lanes(&self) -> usize {
        self.on.machine().lanes
    }

    /// The columns of a row.
    fn columns(&mut self) -> WindowColumns {
        let (real, lanes) = (self.on.integer(self.vocab), self.lanes());
        let registers = self.registers;
        WindowColumns { all: self.vocab.next_multiple_of(lanes), whole: self.vocab / lanes * lanes, real, registers }
    }

    fn given(&mut self, column: TokenColumn) -> TileValue {
        let place = self.given.iter().position(|&other| other == column).expect("the structure has the column");
        self.on.load(self.tokens, TileColumn::Static(place), 1)
    }

    /// A column that not every structure has.
    fn given_if(&mut self, column: TokenColumn) -> Option<TileValue> {
        self.given.contains(&column).then(|| self.given(column))
    }

    fn give(&mut self, column: ResultColumn, value: TileValue) {
        self.on.store(self.results, TileColumn::Static(column as usize), value);
    }

    /// A truth value as 1 or 0.
    fn give_truth(&mut self, column: ResultColumn, truth: TileValue) {
        let (zero, one) = (self.per_row().constant(0.0), self.per_row().constant(1.0));
        let value = self.on.select(truth, one, zero);
        self.give(column, value);
    }

    fn body(&mut self, structure: Structure, tokens: usize, ids: TileMemory, numbers: TileMemory) {
        let number = |on: &mut TileBuilder, which| number(on, structure, numbers, which);
        // The targets leave the block before anything is summed, so that s is a sum over the other columns and 1 −
        // p_y = s/S keeps its digits.
        let targets = self.targets(tokens, ids);
        let target_logit = self.take_targets(&targets);
        let max = self.max(target_logit);
        if self.change.is_some() {
            self.leave_targets(&targets);
        }

        // Temperatures by token come as an array of rates: one softmax then serves logp and entropy.
        let by_token = structure.temperature == TemperaturePlace::Given;
        let inverse = (!by_token).then(|| number(&mut self.on, SpecNumber::InverseTemperature));
        let rates = structure.gap_rates().into_iter();
        let scales: Vec<_> = rates
            .map(|rate| match rate? {
                GapRate::OfAll(which) => Some(number(&mut self.on, which)),
                GapRate::OfToken => self.given_if(TokenColumn::Rate),
            })
            .collect();
        let (tempered, one_softmax) = (scales[0], scales.len() == 1);
        // The last softmax written leaves its exponentials in VMEM: the one that the policy's gradient goes through.
        // Exponentials are taken once and kept in VMEM: pass 2 loads them, which is cheaper than a second use of the
        // transcendental unit.
        let entropy_softmax = self.softmax(max, target_logit, tempered);
        // A second softmax is needed only where the temperature divides logp and not logits: entropy is then of the
        // divided logits, and logp of the others.
        let logp_softmax = if one_softmax { entropy_softmax } else { self.softmax(max, target_logit, scales[1]) };

        let per_row = &mut self.per_row();
        let logp = logp_softmax.softmax.logp(per_row);
        let logp = match inverse {
            Some(inverse) if !one_softmax => per_row.mul(logp, inverse),
            _ => logp,
        };
        let entropy = entropy_softmax.softmax.entropy(per_row);

        let spread = |writer: &mut Self, which| {
            let scalar = number(&mut writer.on, which);
            writer.on.broadcast(scalar, writer.rows, 1)
        };
        let spec_numbers = SpecNumbers::new(structure.numbers().into_iter().map(|which| (which, spread(self, which))));
        let arrays = TokenArrays::load(structure, |array| self.given(array.into()));
        let (token, grad) = single_token_loss(&mut self.per_row(), structure, &spec_numbers, logp, arrays);
        let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;

        self.give(ResultColumn::Logp, logp);
        self.give(ResultColumn::Entropy, entropy);
        self.give(ResultColumn::Loss, loss);
        self.give(ResultColumn::Ratio, ratio);
        if let Some(kl) = kl {
            self.give(ResultColumn::Kl, kl);
        }
        self.give_truth(ResultColumn::ClippedLow, clipped_low);
        self.give_truth(ResultColumn::ClippedHigh, clipped_high);
        if structure.kl_share() {
            self.give(ResultColumn::Reduced, reduced);
        }

        // Derivatives by logits are factors of exponentials: G/T for the policy, E/(S·T) for the bonus.
        let weight = self.given(TokenColumn::Weight);
        let with_temperature = |writer: &mut Self, factor| match tempered {
            Some(inverse) => writer.on.mul(factor, inverse),
            None => factor,
        };
        let factor = self.on.mul(weight, grad);
        let factor = with_temperature(self, factor);
        let of_row = self.given_if(TokenColumn::EntropyFactor);
        let bonus = structure.entropy_bonus.map(|_| {
            let factor = of_row.unwrap_or_else(|| number(&mut self.on, SpecNumber::EntropyFactor));
            let factor = with_temperature(self, factor);
            let factor = self.on.div(factor, entropy_softmax.softmax.sum);
            Bonus { factor, softmax: entropy_softmax, same_exps: one_softmax }
        });
        self.dlogits(max, factor, &logp_softmax, target_logit, bonus.as_ref(), &targets);
    }

    /// Returns, for each row of the block, the first column of the register that holds its target, and the target's
    /// place in it.
    fn targets(&mut self, tokens: usize, ids: TileMemory) -> Vec<TargetPlace> {
        let lanes = self.lanes();
        let on = &mut self.on;
        let (block, rows) = (on.grid_index(1), on.integer(self.rows));
        let first = on.mul(block, rows);
        let (zero, last) = (on.integer(0), on.integer(tokens - 1));
        let last_column = on.integer(self.vocab - 1);
        let whole_registers = on.constant(-(lanes as f64), TileType::scalar(DeviceDtype::I32));
        (0..self.rows)
            .map(|row| {
                let offset = on.integer(row);
                let token = on.add(first, offset);
                // Rows beyond the end, and what stands where the mask hides it, must point somewhere in the block.
                let token = on.min(token, last);
                let id = on.load_scalar(ids, token);
                let id = on.max(id, zero);
                let id = on.min(id, last_column);
                let register = on.and(id, whole_registers);
                let lane = on.sub(id, register);
                // One number, row · lanes + lane, addresses an element of a register, so that one comparison of a whole
                // register finds the target of one row and of no other.
                let before = on.integer(row * lanes);
                TargetPlace { register, place: on.add(lane, before) }
            })
            .collect()
    }

    /// `row · lanes + lane` in a register of each row.
    fn places(&mut self) -> TileValue {
        let lanes = self.lanes();
        let on = &mut self.on;
        let (row, lane) = (on.iota(0, self.rows, lanes), on.iota(1, self.rows, lanes));
        let lanes = on.integer(lanes);
        let before = on.mul(row, lanes);
        on.add(before, lane)
    }

    /// Takes every target's logit out of the block, `[rows, 1]`, and leaves −∞ there; or what it becomes, and leaves it.
    fn take_targets(&mut self, targets: &[TargetPlace]) -> TileValue {
        // Targets are found one by one, since each row has its own column; a register at a time, since columns that
        // are loaded dynamically must be whole registers.
        let (places, lanes) = (self.places(), self.lanes());
        let (change, bias) = (self.change, self.given_if(TokenColumn::TargetBias));
        let on = &mut self.on;
        let element = on.memory_element(self.logits);
        let nothing = on.number(f64::NEG_INFINITY);
        let mut taken = on.constant(0.0, TileType::tile(DeviceDtype::F32, self.rows, lanes));
        for target in targets {
            let column = TileColumn::Dynamic(target.register);
            let x = on.load(self.logits, column, lanes);
            let x = widen(on, x);
            let hit = on.equal(places, target.place);
            taken = on.select(hit, x, taken);
            if change.is_none() {
                let left = on.select(hit, nothing, x);
                let left = narrow(on, left, element);
                on.store(self.logits, column, left);
            }
        }
        // Each row has one lane that is not 0, its target's, so that a sum over lanes is that logit, exactly.
        let taken = on.fold_lanes(Fold::Add, taken);
        change.map_or(taken, |change| change.apply(on, taken, bias))
    }

    /// Leaves −∞ at every target of what logits become.
    fn leave_targets(&mut self, targets: &[TargetPlace]) {
        let (places, lanes) = (self.places(), self.lanes());
        let on = &mut self.on;
        let nothing = on.number(f64::NEG_INFINITY);
        for target in targets {
            let column = TileColumn::Dynamic(target.register);
            let t = on.load(self.exps, column, lanes);
            let hit = on.equal(places, target.place);
            let left = on.select(hit, nothing, t);
            on.store(self.exps, column, left);
        }
    }

    /// `m`; and what logits become, where they become another.
    fn max(&mut self, target_logit: TileValue) -> TileValue {
        let (logits, exps, change) = (self.logits, self.exps, self.change);
        let (lanes, columns) = (self.lanes(), self.columns());
        let on = &mut self.on;
        let element = on.memory_element(logits);
        // Maxima in bf16 are exact, and take half the registers where the machine computes in bf16.
        let native = change.is_none()
            && (element == DeviceDtype::F32 || element == DeviceDtype::Bf16 && on.machine().bf16_arithmetic);
        let element = if native { element } else { DeviceDtype::F32 };
        let lowest = on.constant(lowest(element), TileType::tile(element, self.rows, lanes));
        let maxima = for_each_chunk(on, columns, &[lowest; ACCUMULATORS], |on, chunk, carried| {
            let x = if let Some(change) = change {
                let (t, _) = change.load(on, logits, chunk, None);
                on.store(exps, chunk.column, t);
                t
            } else {
                let x = load_logits(on, logits, chunk);
                if native { x } else { widen(on, x) }
            };
            let mut maxima = carried.to_vec();
            accumulate(on, Fold::Max, &mut maxima, x);
            maxima
        });
        let maximum = join(on, Fold::Max, &maxima);
        let maximum = on.convert(maximum, DeviceDtype::F32);
        let others = on.fold_lanes(Fold::Max, maximum);
        on.max(others, target_logit)
    }

    /// Pass 1: computes a softmax and leaves its exponentials in VMEM.
    fn softmax(
        &mut self,
        max: TileValue,
        target_logit: TileValue,
        inverse_temperature: Option<TileValue>,
    ) -> ResidentSoftmax {
        let (logits, exps, changes) = (self.logits, self.exps, self.change.is_some());
        let (lanes, columns) = (self.lanes(), self.columns());
        let on = &mut self.on;
        let scale = exponent_scale(on, inverse_temperature);
        let zero = on.constant(0.0, TileType::tile(DeviceDtype::F32, self.rows, lanes));
        let sums = for_each_chunk(on, columns, &[zero; 2 * ACCUMULATORS], |on, chunk, carried| {
            let x = load_changed(on, logits, changes.then_some(exps), chunk);
            let gap = gap(on, max, x);
            // The exponent of 2 is saved in place of the gap: w then needs one product, and a constant factor −ln 2
            // at the end.
            let exponent = on.mul(gap, scale);
            let exp = on.exp2(exponent);
            if !changes {
                on.store(exps, chunk.column, exp);
            }
            let weighted = on.mul(exp, exponent);
            let mut sums = carried.to_vec();
            accumulate(on, Fold::Add, &mut sums[..ACCUMULATORS], exp);
            accumulate(on, Fold::Add, &mut sums[ACCUMULATORS..], weighted);
            sums
        });
        // Accumulators are joined in pairs, then lanes are folded: short chains of additions keep the error small.
        let others = join(on, Fold::Add, &sums[..ACCUMULATORS]);
        let others = on.fold_lanes(Fold::Add, others);
        let weighted = join(on, Fold::Add, &sums[ACCUMULATORS..]);
        let weighted = on.fold_lanes(Fold::Add, weighted);

        let per_row = &mut self.per_row();
        let minus_ln_2 = per_row.constant(-LN_2);
        let weighted = per_row.mul(weighted, minus_ln_2);
        let sums = SoftmaxSums { max, target_logit, others, weighted };
        ResidentSoftmax { scale, softmax: sums.softmax(per_row, inverse_temperature) }
    }

    /// Pass 2. `factor` is `G/T`.
    fn dlogits(
        &mut self,
        max: TileValue,
        factor: TileValue,
        policy: &ResidentSoftmax,
        target_logit: TileValue,
        bonus: Option<&Bonus>,
        targets: &[TargetPlace],
    ) {
        let mask = self.given(TokenColumn::Mask);
        let (logits, dlogits, exps, lanes) = (self.logits, self.dlogits, self.exps, self.lanes());
        let (columns, change) = (self.columns(), self.change);
        let (scale, policy) = (policy.scale, &policy.softmax);
        let on = &mut self.on;
        let element = on.memory_element(dlogits);
        // Each column: −G·e/(S·T), plus the bonus, times the slope of the transform; masked rows are selected to 0.
        let share = on.div(factor, policy.sum);
        let minus_share = on.neg(share);
        let zero = on.number(0.0);
        let minus_ln_2 = on.number(-LN_2);
        let counts = on.less(zero, mask);
        for_each_chunk(on, columns, &[], |on, chunk, _| {
            let kept = on.load(exps, chunk.column, chunk.columns);
            let exp = if change.is_some() {
                let gap = gap(on, max, kept);
                let exponent = on.mul(gap, scale);
                on.exp2(exponent)
            } else {
                kept
            };
            let mut gradient = on.mul(exp, minus_share);
            // The bonus needs the gap itself: it is taken from the logits again, since only exponentials were kept.
            if let Some(bonus) = bonus {
                let x = load_changed(on, logits, change.map(|_| exps), chunk);
                let gap = gap(on, max, x);
                let exponent = on.mul(gap, bonus.softmax.scale);
                let exp = if bonus.same_exps { exp } else { on.exp2(exponent) };
                let gap = on.mul(exponent, minus_ln_2);
                let above_mean = on.sub(gap, bonus.softmax.softmax.mean_gap);
                // The small factor last: a device that flushes what is below the normal numbers must not flush a part.
                let exp_above_mean = on.mul(exp, above_mean);
                let term = on.mul(exp_above_mean, bonus.factor);
                gradient = on.add(gradient, term);
            }
            // A transform's slope belongs to the column's own logit, and columns outside the support get 0.
            if let Some(change) = change {
                let outside = change.outside(on, kept);
                gradient = change.through(on, gradient, kept, outside);
            }
            let [rows, columns] = on.type_of(gradient).tile.expect("a tile");
            let counts = {
                let mask = on.broadcast(mask, rows, columns);
                on.less(zero, mask)
            };
            let gradient = on.select(counts, gradient, zero);
            let gradient = narrow(on, gradient, element);
            on.store(dlogits, chunk.column, gradient);
            vec![]
        });

        // The target's dlogit is G·s/(S·T): computed from the sum of the others, never as 1 − p_y.
        let share_of_others = on.div(policy.others, policy.sum);
        let mut target = on.mul(factor, share_of_others);
        if let Some(bonus) = bonus {
            let above_mean = on.sub(bonus.softmax.softmax.target_gap, bonus.softmax.softmax.mean_gap);
            let exp_above_mean = on.mul(bonus.softmax.softmax.target, above_mean);
            let term = on.mul(exp_above_mean, bonus.factor);
            // A logit of −∞ has an infinite gap and no weight.
            let nothing = on.equal(bonus.softmax.softmax.target, zero);
            let term = on.select(nothing, zero, term);
            target = on.add(target, term);
        }
        if let Some(change) = change {
            target = change.through(on, target, target_logit, None);
        }
        let target = on.select(counts, target, zero);
        let target = on.broadcast(target, self.rows, lanes);
        let places = self.places();
        let on = &mut self.on;
        for TargetPlace { register, place } in targets {
            let column = TileColumn::Dynamic(*register);
            // The target's column is patched in the register that holds it; the other columns are written back as
            // they were.
            let written = on.load(dlogits, column, lanes);
            let written = widen(on, written);
            let hit = on.equal(places, *place);
            let patched = on.select(hit, target, written);
            let patched = narrow(on, patched, element);
            on.store(dlogits, column, patched);
        }
    }
}

/// The columns of `chunk` in f32: logits, or what they became where that is `kept`.
fn load_changed(on: &mut TileBuilder, logits: TileMemory, kept: Option<TileMemory>, chunk: ColumnChunk) -> TileValue {
    if let Some(kept) = kept {
        on.load(kept, chunk.column, chunk.columns)
    } else {
        let x = load_logits(on, logits, chunk);
        widen(on, x)
    }
}

/// The entropy bonus's part of the gradient.
struct Bonus {
    /// The factor `E/(S·T)` of the bonus.
    factor: TileValue,
    softmax: ResidentSoftmax,
    /// Whether the exponentials that are kept are its own.
    same_exps: bool,
}

/// The position of a row's target in the block.
struct TargetPlace {
    /// The first column of its register.
    register: TileValue,
    /// `row · lanes + lane`
    place: TileValue,
}

#[cfg(test)]
mod tests {
    use super::*;
    use assay_core::spec::{LossSpec, Support};

    /// The limit on the vocabulary is worked out before there is a kernel.
    #[test]
    fn vmem_bytes_are_those_that_the_kernel_counts() {
        let machine = TileMachine::tpu(120 << 20, true);
        let support = Support { vocab: Some(1), ..Support::default() };
        let structures =
            [LossSpec::default(), LossSpec { support, ..LossSpec::default() }].map(|spec| Structure::from_spec(&spec));
        let dtypes = [DeviceDtype::F32, DeviceDtype::Bf16, DeviceDtype::F16];
        for (structure, logits) in structures.into_iter().flat_map(|structure| dtypes.map(|logits| (structure, logits)))
        {
            for local in [[1, 1, 1], [1, 80, 129], [1, 4096, 151_936]] {
                let rows = rows_of_a_block(structure, local, logits, machine).unwrap();
                let kernel = one_pass(structure, local, logits, machine).unwrap();
                assert_eq!(
                    kernel.vmem_bytes() + SPILLS,
                    vmem_bytes(structure, logits, [rows, local[2]], machine),
                    "{logits} {local:?}"
                );
            }
            let largest = rows_of_a_block(structure, [1, 1, 10_000_000], logits, machine).unwrap_err();
            assert!(rows_of_a_block(structure, [1, 1, largest], logits, machine).is_ok());
            assert_eq!(rows_of_a_block(structure, [1, 1, largest + 1], logits, machine), Err(largest));
        }
    }
}
