//! Cores that call tile kernels, in the way that a device can run them.

use std::f64::consts::{LN_2, LOG2_E};

use super::program::{CoreInputs, CoreOutputs, HloBiases, NamedArray, Program, SoftmaxInputs};
use crate::device::Lowering;
use crate::gpu;
use crate::mesh::MeshAxis;
use crate::one_pass;
use crate::rows::{FARTHEST, in_rows, stored_as};
use crate::transform::differ_by_column;
use crate::two_pass::{self, LocalLogits, Scale, Statistic};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::TokenLoss;
use assay_algebra::softmax::{SoftmaxStatistics, SoftmaxSums};
use assay_algebra::structure::{SpecNumber, Structure, TemperaturePlace, TokenInput};
use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::Dtype;
use assay_ptx::PtxTarget;
use assay_tile::stablehlo::{CallConfig, CallField, Fold, HloComparison, HloType, HloValue};
use assay_tile::{TileKernel, TileMachine, mosaic, xla};

/// The settings that a program's kernels are written for.
#[derive(Clone, Copy)]
pub(crate) struct KernelCalls {
    /// The dtype of the logits in the kernels.
    pub(crate) dtype: Dtype,
    pub(crate) lowering: Lowering,
    pub(crate) machine: TileMachine,
    /// The architecture of the PTX kernels that replace tile kernels, if they do.
    pub(crate) ptx: Option<PtxTarget>,
}

/// A kernel for a TPU, and how it is called.
#[derive(Clone, Debug)]
pub struct TpuKernel {
    /// The name of the kernel in profiles.
    pub name: String,
    /// The kernel as MLIR text of the Mosaic dialects.
    pub text: String,
    /// The `backend_config` of the `tpu_custom_call`, JSON.
    pub payload: String,
    /// The operands of the call, in order, each dense row-major.
    pub operands: Vec<NamedArray>,
    /// The results of the call, in order, each dense row-major.
    pub results: Vec<NamedArray>,
    /// Operand and result that share one array.
    pub aliases: Vec<(usize, usize)>,
    /// The least and the most that its operand `columns` may say, if it has one: how many of the logits' columns are some.
    pub columns: Option<[usize; 2]>,
    /// Bytes of VMEM that it needs.
    pub vmem_bytes: usize,
}

/// A name, and what the last axis holds.
type ArrayLabel<'l> = (&'static str, &'l [&'static str]);

fn described(
    kernel: &TileKernel,
    columns: Option<[usize; 2]>,
    operands: &[ArrayLabel],
    results: &[ArrayLabel],
) -> TpuKernel {
    let named = |list: &mut dyn Iterator<Item = (DeviceDtype, Vec<usize>)>, labels: &[ArrayLabel]| {
        let one = |(&(name, columns), (dtype, shape)): (&ArrayLabel, _)| {
            let columns = columns.to_vec();
            NamedArray { name, dtype, shape, columns }
        };
        labels.iter().zip(list).map(one).collect()
    };
    TpuKernel {
        name: kernel.name().into(),
        text: mosaic::text(kernel),
        payload: mosaic::payload(kernel),
        operands: named(&mut kernel.operands(), operands),
        results: named(&mut kernel.results(), results),
        aliases: kernel.shared(),
        columns,
        vmem_bytes: kernel.vmem_bytes(),
    }
}

/// Describes the [`one_pass`] kernel for a TPU.
pub(crate) fn describe_one_pass(kernel: &TileKernel, structure: Structure) -> TpuKernel {
    let numbers: Vec<&str> = one_pass::numbers(structure).into_iter().map(SpecNumber::name).collect();
    let given: Vec<&str> = one_pass::given_columns(structure).into_iter().map(one_pass::TokenColumn::name).collect();
    let operands = [("ids", &[][..]), ("numbers", &numbers), ("logits", &[]), ("tokens", &given), ("column_bias", &[])];
    described(kernel, None, &operands, &[("dlogits", &[]), ("results", one_pass::result_names(structure))])
}

/// Both kernels of [`two_pass`] for a TPU: statistics, then dlogits.
pub(crate) fn describe_two_pass(
    structure: Structure,
    local: LocalLogits,
    element: DeviceDtype,
    machine: TileMachine,
) -> [TpuKernel; 2] {
    // The array of numbers has three forms: absent where a spec has none, named after its only number, or a vector with
    // named entries.
    let numbers: Vec<&str> = two_pass::numbers(structure).into_iter().map(SpecNumber::name).collect();
    let numbers: Option<ArrayLabel> = match *numbers {
        [] => None,
        [name] if structure.transform.is_none() => Some((name, &[])),
        _ => Some(("softmax_numbers", &numbers)),
    };
    let rates = (structure.temperature == TemperaturePlace::Given).then_some((TokenInput::Rate.name(), &[][..]));
    let biases = [("column_bias", &[][..]), ("target_bias", &[])].into_iter().filter(|_| differ_by_column(structure));
    let always = [("columns", &[][..]), ("logits", &[]), ("ids", &[])];
    let shared: Vec<ArrayLabel> = numbers.into_iter().chain(always).chain(rates).chain(biases).collect();
    let with_scales = [&shared[..], &[("scales", &two_pass::SCALE_NAMES)]].concat();
    let columns = Some(local.columns());
    let statistics = two_pass::statistics(structure, local, element, machine);
    let dlogits = two_pass::dlogits(structure, local, element, machine);
    [
        described(&statistics, columns, &shared, &[("statistics", &two_pass::STATISTIC_NAMES)]),
        described(&dlogits, columns, &with_scales, &[("dlogits", &[])]),
    ]
}

/// Calls `kernel` as loops, or as a custom call of Mosaic.
fn call(on: &mut Program, kernel: &TileKernel, calls: KernelCalls, operands: &[HloValue]) -> Vec<HloValue> {
    let types = |list: &mut dyn Iterator<Item = (DeviceDtype, Vec<usize>)>| {
        list.map(|(element, shape)| HloType::new(element, &shape)).collect::<Vec<_>>()
    };
    let given: Vec<HloType> = operands.iter().map(|&operand| on.builder.type_of(operand).clone()).collect();
    assert_eq!(given, types(&mut kernel.operands()), "operands of {}", kernel.name());
    match calls.lowering {
        Lowering::Loops | Lowering::Ptx(_) => xla::inline(kernel, &mut on.builder, operands),
        Lowering::Mosaic => {
            let payload = mosaic::payload(kernel);
            let outputs = types(&mut kernel.results());
            on.builder.custom_call(
                "tpu_custom_call",
                kernel.name(),
                operands,
                &outputs,
                &kernel.shared(),
                CallConfig::Text(&payload),
            )
        }
    }
}

/// `[1,b·t,width]` from `[b,t]` columns, 0 in those that are not given.
fn columns(on: &mut Program, given: &[(usize, HloValue)], width: usize) -> HloValue {
    // A token's values lie in one row of `width` columns, which a kernel reads as one window; columns that nothing
    // gives are 0.
    let [b, t, _] = on.local;
    let zero = on.constant(0.0);
    let columns: Vec<HloValue> = (0..width)
        .map(|column| {
            let value = given.iter().find(|(place, _)| *place == column).map_or(zero, |(_, value)| *value);
            on.builder.reshape(value, &[1, b * t, 1])
        })
        .collect();
    on.builder.concatenate(&columns, 2)
}

/// Column `place` of `[1,b·t,8]`, as `[b,t]`.
fn column(on: &mut Program, array: HloValue, place: usize) -> HloValue {
    let [b, t, _] = on.local;
    let column = on.builder.slice(array, &[0, 0, place], &[1, b * t, 1]);
    on.builder.reshape(column, &[b, t])
}

/// Calls a kernel of PTX.
fn call_ptx(on: &mut Program, kernel: &assay_ptx::PtxKernel, operands: &[HloValue]) -> Vec<HloValue> {
    let of = |parameter: &assay_ptx::Parameter| HloType::new(parameter.dtype, &parameter.shape);
    let inputs: Vec<HloType> = kernel.inputs().map(of).collect();
    let given: Vec<HloType> = operands.iter().map(|&operand| on.builder.type_of(operand).clone()).collect();
    assert_eq!(given, inputs, "operands of {}", kernel.name);
    let outputs: Vec<HloType> = kernel.outputs().map(of).collect();
    let [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]] = [kernel.grid, kernel.block];
    // XLA's custom call takes the text as it is, with the launch in its fields; the text is assembled by the driver of
    // the machine that runs it.
    let fields = [
        ("name", CallField::Text(&kernel.name)),
        ("kernel_type", CallField::Text("ptx")),
        ("kernel_data", CallField::Text(&kernel.text)),
        ("grid_x", CallField::Number(grid_x)),
        ("grid_y", CallField::Number(grid_y)),
        ("grid_z", CallField::Number(grid_z)),
        ("block_x", CallField::Number(block_x)),
        ("block_y", CallField::Number(block_y)),
        ("block_z", CallField::Number(block_z)),
        ("shared_mem_bytes", CallField::Number(kernel.shared_bytes)),
    ];
    let config = CallConfig::Fields(&fields);
    on.builder.custom_call("__gpu$xla.gpu.ptx", &kernel.name, operands, &outputs, &kernel.aliases(), config)
}

/// The core that is one tile kernel.
pub(crate) fn tile_one_pass_core(
    on: &mut Program,
    kernel: &TileKernel,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    calls: KernelCalls,
) -> CoreOutputs {
    let bias = given.columns.map(|columns| column_bias(on, columns.bias));
    one_pass_core(on, structure, given, logits, |on, [ids, numbers, logits, tokens]| {
        let stored = on.builder.bitcast(logits, stored_as(calls.dtype.into()));
        let operands = [ids, numbers, stored, tokens].into_iter().chain(bias);
        call(on, kernel, calls, &operands.collect::<Vec<_>>())
    })
}

/// The core that is one kernel of PTX.
pub(crate) fn gpu_one_pass_core(
    on: &mut Program,
    kernel: &assay_ptx::PtxKernel,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
) -> CoreOutputs {
    let bias = given.columns.map(|columns| column_bias(on, columns.bias));
    one_pass_core(on, structure, given, logits, |on, operands| {
        call_ptx(on, kernel, &operands.into_iter().chain(bias).collect::<Vec<_>>())
    })
}

/// The biases of columns as a kernel takes them, `[1,v]`.
fn column_bias(on: &mut Program, bias: HloValue) -> HloValue {
    let [_, _, v] = on.local;
    on.builder.reshape(bias, &[1, v])
}

/// The core that is one kernel, which `call` calls with ids, numbers, logits in rows and tokens. See [`one_pass`].
fn one_pass_core(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    call: impl FnOnce(&mut Program, [HloValue; 4]) -> Vec<HloValue>,
) -> CoreOutputs {
    use one_pass::{ResultColumn, TokenColumn as Column};
    let [b, t, _] = on.local;
    // All columns of the tokens' array are f32: the mask goes in as 1 and 0, and the clipped flags come out so.
    let mask = on.builder.convert(given.mask, DeviceDtype::F32);
    let names = one_pass::given_columns(structure);
    let of_tokens: Vec<(usize, HloValue)> = names
        .iter()
        .enumerate()
        .filter_map(|(place, column)| {
            let value = match column {
                Column::Advantage => Some(given.advantage),
                Column::OldLogp => given.input(TokenInput::OldLogp),
                Column::RefLogp => given.input(TokenInput::RefLogp),
                Column::Weight => Some(given.grad_weight),
                Column::Mask => Some(mask),
                Column::PolicyWeight => given.input(TokenInput::PolicyWeight),
                Column::KlWeight => given.input(TokenInput::KlWeight),
                Column::Selected => given.input(TokenInput::Selected),
                Column::RolloutLogp => given.input(TokenInput::RolloutLogp),
                Column::KlShare => given.kl_share,
                Column::EntropyFactor => Some(given.entropy_factor),
                Column::TargetBias => given.columns.map(|columns| columns.target),
                Column::Rate => given.input(TokenInput::Rate),
            };
            Some((place, value?))
        })
        .collect();
    let tokens = columns(on, &of_tokens, one_pass::width(names.len()));
    // The rows of a batch follow one another, [1,b·t,v]: a kernel needs nothing of the sequence that a token belongs
    // to.
    let ids = on.builder.reshape(given.ids, &[b * t]);
    // Where tokens differ in it, it comes with them.
    let entropy_factor =
        if structure.entropy_by_token() { given.number(SpecNumber::EntropyCoef) } else { given.entropy_factor };
    let numbers: Vec<HloValue> = one_pass::numbers(structure)
        .into_iter()
        .map(|which| if which == SpecNumber::EntropyFactor { entropy_factor } else { given.number(which) })
        .collect();
    let numbers = on.builder.vector(&numbers);
    let own = on.builder.type_of(logits).clone();
    let logits = on.rows(logits);
    let outputs = call(on, [ids, numbers, logits, tokens]);

    let (dlogits, results) = (on.like_logits(outputs[0], &own), outputs[1]);
    let mut result = |which: ResultColumn| column(on, results, which as usize);
    let (logp, entropy, loss) = (result(ResultColumn::Logp), result(ResultColumn::Entropy), result(ResultColumn::Loss));
    let (ratio, kl) = (result(ResultColumn::Ratio), structure.kl.map(|_| result(ResultColumn::Kl)));
    let (low, high) = (result(ResultColumn::ClippedLow), result(ResultColumn::ClippedHigh));
    let zero = on.constant(0.0);
    let clipped_low = on.builder.compare(HloComparison::Less, zero, low);
    let clipped_high = on.builder.compare(HloComparison::Less, zero, high);
    let reduced = if structure.kl_share() { column(on, results, ResultColumn::Reduced as usize) } else { loss };
    // The derivatives stay in the kernel.
    let token = TokenLoss {
        loss,
        reduced,
        by_logp: None,
        by_kl_logp: None,
        by_log_ratio: None,
        ratio,
        kl,
        clipped_low,
        clipped_high,
    };
    CoreOutputs { gradient: dlogits, logp, logp_of_others: None, entropy, token }
}

/// The statistics of a token's softmaxes that its gradient is made of, `[b,t]`.
#[derive(Clone, Copy)]
pub(crate) struct TokenStatistics {
    max: HloValue,
    /// `S` and `s` of the softmax that logp is of.
    sum: HloValue,
    others: HloValue,
    /// `S` and `ā` of the one that entropy is of.
    entropy_sum: HloValue,
    mean_gap: HloValue,
}

impl TokenStatistics {
    pub(crate) fn to_array(self) -> [HloValue; 5] {
        [self.max, self.sum, self.others, self.entropy_sum, self.mean_gap]
    }

    pub(crate) fn from_array([max, sum, others, entropy_sum, mean_gap]: [HloValue; 5]) -> Self {
        Self { max, sum, others, entropy_sum, mean_gap }
    }
}

/// The results of the statistics kernel for a device's logits, `[b,t]`.
pub(crate) struct ForwardPass {
    pub(crate) statistics: TokenStatistics,
    pub(crate) logp: HloValue,
    pub(crate) entropy: HloValue,
}

/// The operands that both kernels are called with.
struct CallOperands {
    local: LocalLogits,
    /// Scalars, logits, ids and, where columns differ, biases.
    values: Vec<HloValue>,
    /// The type of the logits before they were reshaped to rows.
    logits: HloType,
}

impl CallOperands {
    fn new(on: &mut Program, structure: Structure, given: &SoftmaxInputs, calls: KernelCalls) -> Self {
        let [_, rows, _] = in_rows(on.local);
        let numbers: Vec<HloValue> =
            two_pass::numbers(structure).into_iter().map(|which| given.number(which)).collect();
        let numbers = match numbers[..] {
            [] => None,
            [one] => Some(on.builder.reshape(one, &[1])),
            _ => Some(on.builder.vector(&numbers)),
        };
        let local = LocalLogits::new(on.local, on.vocab, on.mesh);
        let (ids, real) = on.device_ids(given);
        let ids = on.builder.reshape(ids, &[1, rows, 1]);
        let own = on.builder.type_of(given.logits).clone();
        let logits = if calls.ptx.is_some() { on.rows(given.logits) } else { on.stored_rows(given.logits) };
        let biases = given
            .columns
            .map(|HloBiases { bias, target }| [column_bias(on, bias), on.builder.reshape(target, &[1, rows, 1])]);
        let rates = given.of_tokens.map(|rates| on.builder.reshape(rates, &[1, rows, 1]));
        let always = numbers.into_iter().chain([real, logits, ids]);
        let values = always.chain(rates).chain(biases.into_iter().flatten()).collect();
        Self { local, values, logits: own }
    }
}

/// One read of the logits: the statistics kernel of [`two_pass`], and collectives where the vocabulary is cut.
pub(crate) fn rows(on: &mut Program, structure: Structure, given: &SoftmaxInputs, calls: KernelCalls) -> ForwardPass {
    let operands = CallOperands::new(on, structure, given, calls);
    statistics(on, structure, given, &operands, calls)
}

fn statistics(
    on: &mut Program,
    structure: Structure,
    given: &SoftmaxInputs,
    operands: &CallOperands,
    calls: KernelCalls,
) -> ForwardPass {
    let scales = structure.gap_rates().into_iter();
    let scales: Vec<_> = scales.map(|scale| scale.map(|which| given.rate(which))).collect();
    let element = calls.dtype.into();
    let results = if let Some(target) = calls.ptx {
        let kernel = gpu::two_pass::statistics(target, structure, operands.local, element);
        call_ptx(on, &kernel, &operands.values)[0]
    } else {
        let kernel = two_pass::statistics(structure, operands.local, element, calls.machine);
        call(on, &kernel, calls, &operands.values)[0]
    };

    let mut statistic = |which: Statistic| column(on, results, which as usize);
    let (local_max, target_logit) = (statistic(Statistic::Max), statistic(Statistic::TargetLogit));
    let entropy_sums = [statistic(Statistic::Others), statistic(Statistic::Weighted)];
    let two_softmaxes = scales.len() > 1;
    let logp_sums = two_softmaxes.then(|| [statistic(Statistic::LogpOthers), statistic(Statistic::LogpWeighted)]);
    // Each device summed below its own maximum; the sums are brought below the common one, then added over devices.
    let max = on.over(&[MeshAxis::Vocab], Fold::Max, local_max);
    // A device that has not the target returned 0 for its logit, so that the sum over devices is the logit.
    let target_logit = on.over(&[MeshAxis::Vocab], Fold::Add, target_logit);
    // A device whose columns are all −∞ has the lowest float as its maximum, and the rise from there may be ∞: bounded,
    // its product with a sum of 0 is 0 and not NaN.
    let (rise, farthest) = (on.builder.subtract(max, local_max), on.constant(FARTHEST));
    let rise = on.builder.minimum(rise, farthest);
    let entropy_softmax = on.joined_softmax(max, rise, target_logit, entropy_sums, scales[0]);
    let logp_softmax =
        logp_sums.map_or(entropy_softmax, |sums| on.joined_softmax(max, rise, target_logit, sums, scales[1]));

    let logp = logp_softmax.logp(on);
    let logp = if two_softmaxes { on.times(logp, given.number(SpecNumber::InverseTemperature)) } else { logp };
    let entropy = entropy_softmax.entropy(on);
    let statistics = TokenStatistics {
        max,
        sum: logp_softmax.sum,
        others: logp_softmax.others,
        entropy_sum: entropy_softmax.sum,
        mean_gap: entropy_softmax.mean_gap,
    };
    ForwardPass { statistics, logp, entropy }
}

/// The core that is two kernels, with collectives between them where the vocabulary is cut. See [`two_pass`].
pub(crate) fn two_pass_core(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    calls: KernelCalls,
) -> CoreOutputs {
    let forward = given.forward(logits);
    let operands = CallOperands::new(on, structure, &forward, calls);
    let ForwardPass { statistics, logp, entropy } = statistics(on, structure, &forward, &operands, calls);
    let (token, factor) = on.token_loss(structure, given, logp);
    let gradient = gradient(on, structure, given, &operands, statistics, factor, calls);
    CoreOutputs { gradient, logp, logp_of_others: None, entropy, token }
}

/// dlogits written over the logits, from their statistics and `∂loss/∂logp` of each token: the second kernel of
/// [`two_pass`].
pub(crate) fn dlogits(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    logits: HloValue,
    statistics: TokenStatistics,
    grad_logp: HloValue,
    calls: KernelCalls,
) -> HloValue {
    let operands = CallOperands::new(on, structure, &given.forward(logits), calls);
    gradient(on, structure, given, &operands, statistics, grad_logp, calls)
}

fn gradient(
    on: &mut Program,
    structure: Structure,
    given: &CoreInputs,
    operands: &CallOperands,
    statistics: TokenStatistics,
    grad_logp: HloValue,
    calls: KernelCalls,
) -> HloValue {
    let TokenStatistics { max, sum, others, entropy_sum, mean_gap } = statistics;
    let inverse = structure.gap_rates()[0].map(|which| given.rate(which));
    let factor = inverse.map_or(grad_logp, |inverse| on.times(grad_logp, inverse));
    // The factors of dlogits for each token, computed once here and not for every column.
    let share = on.builder.divide(factor, sum);
    let share = on.builder.negate(share);
    let mask = on.builder.convert(given.mask, DeviceDtype::F32);
    // The target's column is made of the same share: a compiler may compute a value anew for each of its uses, and
    // at a kink another rounding is another branch.
    let mut scales = vec![
        (Scale::Max as usize, max),
        (Scale::Share as usize, share),
        (Scale::Others as usize, others),
        (Scale::Mask as usize, mask),
    ];
    if structure.entropy_bonus.is_some() {
        let factor = on.per_token(given.entropy_factor);
        let factor = inverse.map_or(factor, |inverse| on.times(factor, inverse));
        let factor = on.builder.divide(factor, entropy_sum);
        scales.extend([(Scale::Bonus as usize, factor), (Scale::MeanGap as usize, mean_gap)]);
    }
    // Max, share, others and mask are of every token; the bonus's two columns are 0 without a bonus.
    let scales = columns(on, &scales, two_pass::PER_TOKEN);
    let (element, values) = (calls.dtype.into(), [&operands.values[..], &[scales]].concat());
    let dlogits = if let Some(target) = calls.ptx {
        call_ptx(on, &gpu::two_pass::dlogits(target, structure, operands.local, element, gpu::Factors::Scales), &values)
            [0]
    } else {
        let kernel = two_pass::dlogits(structure, operands.local, element, calls.machine);
        call(on, &kernel, calls, &values)[0]
    };
    on.like_logits(dlogits, &operands.logits)
}

impl Program {
    /// The logits as a kernel takes them.
    fn rows(&mut self, logits: HloValue) -> HloValue {
        self.builder.reshape(logits, &in_rows(self.local))
    }

    /// And as a tile kernel does.
    fn stored_rows(&mut self, logits: HloValue) -> HloValue {
        let rows = self.rows(logits);
        let element = self.builder.type_of(rows).element;
        self.builder.bitcast(rows, stored_as(element))
    }

    /// Returns dlogits that a kernel wrote over the logits, in the logits' own type.
    fn like_logits(&mut self, dlogits: HloValue, logits: &HloType) -> HloValue {
        let dlogits = self.builder.bitcast(dlogits, logits.element);
        self.builder.reshape(dlogits, &logits.shape)
    }

    /// The ids, counted from this device's first column, −1 where another has it; and how many columns it has, `[1]` i32.
    fn device_ids(&mut self, given: &SoftmaxInputs) -> (HloValue, HloValue) {
        let [b, t, v] = self.local;
        let scalar = HloType::new(DeviceDtype::I32, &[]);
        let columns = self.builder.constant(v as f64, scalar.clone());
        let Some(first) = given.first_column else {
            // A vocabulary that is not cut has all of its columns here, and ids need no change.
            return (given.ids, self.builder.reshape(columns, &[1]));
        };
        let before = self.builder.broadcast(first, &[], &[b, t]);
        let ids = self.builder.subtract(given.ids, before);
        let vocab = self.builder.constant(self.vocab as f64, scalar);
        // The last device has fewer real columns than the others where the devices do not divide the vocabulary.
        let left = self.builder.subtract(vocab, first);
        let real = self.builder.minimum(left, columns);
        // A window reaches beyond the device's columns, and no target may be found there.
        let of_each = |on: &mut Self, scalar| on.builder.broadcast(scalar, &[], &[b, t]);
        let (end, elsewhere) =
            (of_each(self, real), self.builder.constant(-1.0, HloType::new(DeviceDtype::I32, &[b, t])));
        let before_end = self.builder.compare(HloComparison::Less, ids, end);
        let ids = self.builder.select(before_end, ids, elsewhere);
        (ids, self.builder.reshape(real, &[1]))
    }

    /// A softmax from the sums that every device took below its own maximum.
    fn joined_softmax(
        &mut self,
        max: HloValue,
        rise: HloValue,
        target_logit: HloValue,
        [others, weighted]: [HloValue; 2],
        inverse: Option<HloValue>,
    ) -> SoftmaxStatistics<HloValue> {
        let tempered = |on: &mut Self, value| inverse.map_or(value, |inverse| on.times(value, inverse));
        // Below a maximum that is higher by `rise`, e' = e·2^shift with shift = −rise·log₂e/T, and g' = g + shift: s' =
        // s·2^shift and w' = (w + s·shift)·2^shift. The product with 2^shift comes last, so that it is applied to the
        // sum of both terms.
        let rise = tempered(self, rise);
        let minus_rise = self.builder.negate(rise);
        let shrink = self.builder.exponential(minus_rise);
        let minus_log2_e = self.constant(-LOG2_E);
        let shift = self.builder.multiply(rise, minus_log2_e);
        let shifted = self.builder.multiply(others, shift);
        let weighted = self.builder.add(weighted, shifted);
        let others = self.builder.multiply(others, shrink);
        let weighted = self.builder.multiply(weighted, shrink);
        let others = self.over(&[MeshAxis::Vocab], Fold::Add, others);
        let weighted = self.over(&[MeshAxis::Vocab], Fold::Add, weighted);

        // The weighted sum is of exponents of 2, −a·log₂e/T; −ln 2 turns it into one of gaps over T.
        let minus_ln_2 = self.constant(-LN_2);
        let weighted = self.builder.multiply(weighted, minus_ln_2);
        let inverse = inverse.map(|inverse| self.per_token(inverse));
        SoftmaxSums { max, target_logit, others, weighted }.softmax(self, inverse)
    }
}
