//! The PTX that a driver is given for every kernel, run by the interpreter and judged against the reference. No plugin takes part: what
//! surrounds a kernel on a device is computed here, in f64.

use crate::common::batch::{Batch, plain, token_by_token};
use crate::common::{
    PerToken, bytes_of, column_bias, f32_bytes, impossible_targets, logits_bytes, logits_of, number, per_token,
    target_bias,
};
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, ProblemPart, Shape};
use assay_core::spec::{
    LogitsTransform, LossSpec, Objective, OldLogp, PpoClip, RatioLevel, Support, Temperature, TemperatureDivides,
};
use assay_fixture::ProblemFile;
use assay_judge::generate::{Recipe, Regime};
use assay_judge::recorded::recorded_spec;
use assay_judge::tolerance::Limits;
use assay_judge::trial::Known;
use assay_judge::variants::variants;
use assay_programs::{ANY_TPU, Device, LossProgram, MeetingMethod, Programs, PtxTarget, StructuredSpec};
use assay_ptx::{PtxKernel, Role};
use assay_ptx_interpreter::{ApproximateUnits, GlobalArray, GridLaunch, PtxModule};
use assay_suites::cases;
use ndarray::Array3;
use proptest::prelude::*;
use proptest::sample::select;
use std::ops::{Deref, Range};

/// Columns around blocks of 16 bytes, warps, trips of loops, and rows that lie over two CTAs and more.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [2, 3, 127], [1, 17, 128], [3, 1, 129], [2, 9, 2049], [1, 5, 1031], [1, 2, 9001], [1, 1, 33_001]];

/// The name in tests of the one-pass kernel whose CTAs meet by asynchronous stores.
const BY_STORES: &str = "gpu-one-pass, meeting by stores";

/// What texts of the one-pass kernel differ between.
const TARGETS: [PtxTarget; 2] = [PtxTarget::Sm90, PtxTarget::Sm100];

fn kernels(target: PtxTarget, id: &str, spec: &LossSpec, shape: Shape, dtype: Dtype) -> Vec<PtxKernel> {
    let all = LossProgram::all();
    let implementation = all.iter().find(|implementation| implementation.id() == id).unwrap();
    implementation.gpu_kernels_for(StructuredSpec::new(spec), shape, dtype, 1, target).unwrap()
}

/// Writes the one-pass kernel whose CTAs meet by asynchronous stores.
fn meeting_by_stores(target: PtxTarget, spec: &LossSpec, shape: Shape, dtype: Dtype) -> PtxKernel {
    let all = LossProgram::all();
    let program = all.iter().find(|program| program.id() == "gpu-one-pass").unwrap();
    program
        .gpu_kernels_that_meet(StructuredSpec::new(spec), shape, dtype, 1, (target, MeetingMethod::Stores))
        .unwrap()
        .remove(0)
}

/// Runs a kernel on inputs given by name, in sequence and shuffled; outputs in order.
pub(crate) fn run(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    inputs: &[(&str, Vec<u8>)],
) -> Result<Vec<Vec<u8>>, String> {
    run_without(kernel, units, inputs, &[])
}

/// The same, where these bytes of the logits may be read only when dlogits were written over them.
fn run_without(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    inputs: &[(&str, Vec<u8>)],
    unwritten: &[Range<usize>],
) -> Result<Vec<Vec<u8>>, String> {
    let module = PtxModule::parse(&kernel.text).map_err(|error| format!("{}: {error}", kernel.name))?;
    let (mut buffers, mut arguments) = (Vec::<GlobalArray>::new(), Vec::new());
    for parameter in &kernel.parameters {
        let bytes = parameter.shape.iter().product::<usize>() * parameter.dtype.size();
        let buffer = match parameter.role {
            Role::Input => {
                let (_, given) = inputs.iter().find(|(name, _)| *name == parameter.name).expect("every input is given");
                assert_eq!(given.len(), bytes, "{}", parameter.name);
                let buffer = GlobalArray::input(&parameter.name, given.clone());
                if parameter.name == "logits" { buffer.unwritten(unwritten.iter().cloned()) } else { buffer }
            }
            Role::Output { over: None } => GlobalArray::output(&parameter.name, bytes),
            Role::Output { over: Some(input) } => {
                arguments.push(arguments[input]);
                continue;
            }
        };
        arguments.push(buffers.len());
        buffers.push(buffer);
    }
    let launch = GridLaunch {
        grid: kernel.grid,
        block: kernel.block,
        cluster: [kernel.cluster, 1, 1],
        dynamic_shared: kernel.shared_bytes,
    };
    let buffers = module.run_both(&kernel.name, &launch, buffers, &arguments, units, 1);
    let buffers = buffers.map_err(|error| format!("{}: {error}", kernel.name))?;
    let outputs = kernel.parameters.iter().zip(&arguments).filter(|(parameter, _)| parameter.role != Role::Input);
    Ok(outputs.map(|(_, &buffer)| buffers[buffer].bytes.clone()).collect())
}

/// Runs a kernel on all rows of a batch, as many at a time as it takes: `shared` is given to each run, of `rows` those that are its own,
/// and zeros beyond the last.
fn run_rows(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    tokens: usize,
    shared: &[(&'static str, Vec<u8>)],
    rows: &[(&'static str, Vec<u8>)],
) -> Result<Vec<Vec<u8>>, String> {
    let logits = kernel.inputs().find(|input| input.name == "logits").expect("every kernel takes logits");
    let of_a_run = logits.shape[1];
    let mut outputs = vec![Vec::new(); kernel.outputs().count()];
    for first in (0..tokens).step_by(of_a_run) {
        let mut inputs = shared.to_vec();
        inputs.extend(rows.iter().map(|(name, bytes)| {
            let of_a_row = bytes.len() / tokens;
            let mut part = bytes[first * of_a_row..bytes.len().min((first + of_a_run) * of_a_row)].to_vec();
            part.resize(of_a_run * of_a_row, 0);
            (*name, part)
        }));
        for (all, part) in outputs.iter_mut().zip(run(kernel, units, &inputs)?) {
            let of_a_row = part.len() / of_a_run;
            all.extend(&part[..(tokens - first).min(of_a_run) * of_a_row]);
        }
    }
    Ok(outputs)
}

/// What the columns of the arrays of a kernel are called, as the tile kernel of the same name has them.
fn columns(id: &str, spec: &LossSpec, array: &str) -> Vec<&'static str> {
    let all = LossProgram::all();
    let tile = all.iter().find(|implementation| implementation.id() == id.replace("gpu", "tile")).unwrap();
    let shape = Shape { batch: 1, tokens: 1, vocab: 1 };
    let kernels = tile.kernels_for(StructuredSpec::new(spec), shape, Dtype::F32, 1, ANY_TPU).unwrap();
    let arrays = kernels.into_iter().flat_map(|kernel| [kernel.operands, kernel.results].concat());
    arrays.into_iter().find(|named| named.name == array).expect("the array is one of the kernel's").columns
}

/// A batch with what a device computes around the kernel.
pub(crate) struct Around<'p> {
    batch: Batch<'p>,
    target: PtxTarget,
    units: ApproximateUnits,
}

impl<'p> Deref for Around<'p> {
    type Target = Batch<'p>;

    fn deref(&self) -> &Batch<'p> {
        &self.batch
    }
}

impl<'p> Around<'p> {
    pub(crate) fn new(spec: &'p LossSpec, problem: &'p Problem) -> Self {
        Self { batch: Batch::new(spec, problem), target: PtxTarget::Sm90, units: ApproximateUnits::Rounded }
    }

    fn one_pass(&self) -> Result<Candidate, String> {
        let id = "gpu-one-pass";
        self.one_pass_by(&kernels(self.target, id, self.spec, self.shape, self.problem.logits.dtype())[0])
    }

    /// The same by a kernel that was changed, or is another's.
    pub(crate) fn one_pass_by(&self, kernel: &PtxKernel) -> Result<Candidate, String> {
        let [numbers, tokens] = self.given_to_one_pass();
        let rows = [("ids", self.ids()), ("logits", logits_bytes(&self.problem.logits)), ("tokens", tokens)];
        let shared = [("numbers", numbers), ("column_bias", column_bias(self.spec, self.problem))];
        let outputs = run_rows(kernel, self.units, self.tokens(), &shared, &rows)?;
        let names = columns("gpu-one-pass", self.spec, "results");
        let results = PerToken::new(&outputs[1], &names);
        let of = |name: &'static str| {
            let results = &results;
            move |token: usize| results.at(name, token)
        };
        let reduced = if names.contains(&"reduced") { "reduced" } else { "token_loss" };
        Ok(self.candidate(of("logp"), of("entropy"), [&of("token_loss"), &of(reduced)], &outputs[0]))
    }

    /// Numbers, and what is given of each token.
    fn given_to_one_pass(&self) -> [Vec<u8>; 2] {
        let [numbers, tokens] = ["numbers", "tokens"].map(|array| columns("gpu-one-pass", self.spec, array));
        [self.numbers_of_one_pass(&numbers), self.tokens_of_one_pass(&tokens)]
    }

    /// For plain PPO-clip: the derivative of a token's loss is not the kernels' here.
    fn two_pass(&self) -> Result<Candidate, String> {
        let dtype = self.problem.logits.dtype();
        self.two_pass_by(&kernels(self.target, "gpu-two-pass", self.spec, self.shape, dtype), 1)
    }

    /// That of a token, or the mean of those that share its ratio.
    fn of_ratio(&self, of: &dyn Fn(usize) -> f64, token: usize) -> f64 {
        if self.spec.ratio.level == RatioLevel::Token {
            return of(token);
        }
        let first = token / self.shape.tokens * self.shape.tokens;
        let row = (first..first + self.shape.tokens).filter(|&token| self.mask[token]);
        row.clone().map(of).sum::<f64>() / row.count() as f64
    }

    fn changes_logits(&self) -> bool {
        self.spec.logits != LogitsTransform::default() || !self.spec.support.is_whole()
    }

    /// What the two kernels of a device with `local` columns are given for all rows.
    fn shared_by_two_pass(&self, device: usize, local: Shape) -> Vec<(&'static str, Vec<u8>)> {
        let numbers =
            if self.changes_logits() { columns("gpu-two-pass", self.spec, "softmax_numbers") } else { vec![] };
        let real = local.vocab.min(self.shape.vocab - device * local.vocab);
        let biases = column_bias(self.spec, self.problem);
        let inverse = self.spec.temperature.number().map_or(f64::NAN, f64::recip);
        let mut biases = biases[4 * device * local.vocab..][..4 * real].to_vec();
        biases.resize(4 * local.vocab, 0xFF);
        vec![
            ("inverse_temperature", f32_bytes([inverse])),
            ("softmax_numbers", f32_bytes(numbers.iter().map(|name| number(self.spec, name)))),
            ("column_bias", biases),
            ("columns", bytes_of([(real as i32).to_le_bytes()])),
        ]
    }

    /// The same by the two kernels of one of `devices` that have as many columns each, the last of them fewer.
    pub(crate) fn two_pass_by(&self, kernels: &[PtxKernel], devices: usize) -> Result<Candidate, String> {
        let [statistics, dlogits] = kernels else { panic!("two kernels") };
        let (logits, dtype) = (self.problem.logits.to_f64(), self.problem.logits.dtype());
        let local = Shape { vocab: self.shape.vocab.div_ceil(devices), ..self.shape };
        // The softmaxes are of what logits become, times this.
        let rate = if self.changes_logits() { number(self.spec, "logp_rate") } else { 1.0 };
        let shared = |device: usize| self.shared_by_two_pass(device, local);
        let rows = |device: usize| {
            let first = device * local.vocab;
            let of_device = Array3::from_shape_fn((local.batch, local.tokens, local.vocab), |(b, t, v)| {
                logits.get([b, t, first + v]).copied().unwrap_or(f64::NAN)
            });
            let place = |id: i64| (id - first as i64) as i32;
            let ids = self.problem.ids.iter().map(|&id| if place(id) < local.vocab as i32 { place(id) } else { -1 });
            vec![
                ("logits", logits_bytes(&FloatArray::rounded_from(&of_device, dtype))),
                ("ids", bytes_of(ids.map(i32::to_le_bytes))),
                ("target_bias", f32_bytes(target_bias(self.spec, self.problem))),
                ("rate", self.rates()),
            ]
        };
        let names = columns("gpu-two-pass", self.spec, "statistics");
        let mut parts = Vec::new();
        for device in 0..devices {
            let outputs = run_rows(statistics, self.units, self.tokens(), &shared(device), &rows(device))?;
            parts.push(PerToken::new(&outputs[0], &names));
        }
        let max = |token: usize| parts.iter().map(|part| part.at("max", token)).fold(f64::NEG_INFINITY, f64::max);
        let target_logit = |token: usize| parts.iter().map(|part| part.at("target_logit", token)).sum::<f64>();
        let two = self.two_softmaxes();
        let softmax = |token: usize, names: [&str; 2], inverse: f64| {
            let gap = (max(token) - target_logit(token)) * inverse;
            // What a device summed below its own maximum.
            let (mut others, mut weighted) = (0.0, 0.0);
            for part in &parts {
                let shift = (part.at("max", token) - max(token)) * inverse * std::f64::consts::LOG2_E;
                let of_part = names.map(|name| part.at(name, token));
                others += shift.exp2() * of_part[0];
                weighted += shift.exp2() * (of_part[1] + if of_part[0] == 0.0 { 0.0 } else { of_part[0] * shift });
            }
            let target = (-gap).exp();
            let sum = others + target;
            let weighted = -std::f64::consts::LN_2 * weighted;
            let mean_gap = (weighted + if target == 0.0 { 0.0 } else { target * gap }) / sum;
            Softmax { gap, others, sum, log_sum: (others + (target - 1.0)).ln_1p(), mean_gap }
        };
        let of_entropy = |token| softmax(token, ["others", "weighted"], self.rate(token));
        let of_logp =
            |token| if two { softmax(token, ["logp_others", "logp_weighted"], rate) } else { of_entropy(token) };
        let logp = |token: usize| {
            let Softmax { gap, log_sum, .. } = of_logp(token);
            -(gap + log_sum) * if two { self.inverse(token) } else { 1.0 }
        };
        let entropy = |token: usize| of_entropy(token).log_sum + of_entropy(token).mean_gap;
        let log_ratio = |token: usize| match self.spec.old_logp {
            OldLogp::Given => logp(token) - self.token(self.problem.old_logp.as_ref(), token),
            _ => 0.0,
        };
        let loss_and_grad = |token: usize| {
            if self.spec.objective == Objective::PolicyGradient {
                let a = self.advantage(token);
                return (-a * logp(token), -a);
            }
            let Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, .. }) = self.spec.objective else {
                unreachable!("only PPO-clip and policy gradients are drawn")
            };
            let (ratio, a) = (self.of_ratio(&log_ratio, token).exp(), self.advantage(token));
            let clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high);
            if clipped * a < ratio * a { (-clipped * a, 0.0) } else { (-ratio * a, -ratio * a) }
        };
        let scales = columns("gpu-two-pass", self.spec, "scales");
        let scales = per_token(&scales, self.tokens(), |name, token| {
            let (policy, bonus) = (of_logp(token), of_entropy(token));
            let factor = self.of_ratio(&|token| self.weight(token) * loss_and_grad(token).1, token) * self.rate(token);
            let bonus_factor = self.entropy_weight(token) * self.rate(token) / bonus.sum;
            match name {
                "max" => max(token),
                "share" => -factor / policy.sum,
                "others" => policy.others,
                "mask" => f64::from(u8::from(self.mask[token])),
                "bonus" => bonus_factor,
                "mean_gap" => bonus.mean_gap,
                other => panic!("{other}: not known here"),
            }
        });
        let mut gradient = Array3::zeros((self.shape.batch, self.shape.tokens, self.shape.vocab));
        for device in 0..devices {
            let mut rows = rows(device);
            rows.push(("scales", scales.clone()));
            let outputs = run_rows(dlogits, self.units, self.tokens(), &shared(device), &rows)?;
            let of_device = logits_of(&outputs[0], local, dtype).to_f64();
            for ((b, t, v), &x) in of_device.indexed_iter() {
                if let Some(gradient) = gradient.get_mut([b, t, device * local.vocab + v]) {
                    *gradient = x;
                }
            }
        }
        let gradient = logits_bytes(&FloatArray::rounded_from(&gradient, dtype));
        let loss = |token| loss_and_grad(token).0;
        Ok(self.candidate(logp, entropy, [&loss, &loss], &gradient))
    }
}

struct Softmax {
    gap: f64,
    others: f64,
    sum: f64,
    log_sum: f64,
    mean_gap: f64,
}

/// Garbage at masked tokens that is no number in f64 arithmetic here is no business of the kernels.
fn check(target: PtxTarget, id: &str, spec: &LossSpec, recipe: &Recipe) -> Result<(), String> {
    check_by(ApproximateUnits::Rounded, target, id, spec, recipe)
}

/// The same by units that are off.
fn check_by(
    units: ApproximateUnits,
    target: PtxTarget,
    id: &str,
    spec: &LossSpec,
    recipe: &Recipe,
) -> Result<(), String> {
    let problem = recipe.problem(spec).map_err(|error| error.to_string())?;
    check_problem(units, target, id, spec, &problem).map_err(|failure| format!("{recipe:?} {failure}"))
}

fn check_problem(
    units: ApproximateUnits,
    target: PtxTarget,
    id: &str,
    spec: &LossSpec,
    problem: &Problem,
) -> Result<(), String> {
    let around = Around { target, units, ..Around::new(spec, problem) };
    let candidate = match id {
        "gpu-one-pass" => around.one_pass(),
        BY_STORES => around.one_pass_by(&meeting_by_stores(target, spec, around.shape, problem.logits.dtype())),
        _ => around.two_pass(),
    };
    let candidate = candidate.map_err(|error| format!("{spec:?}\n{error}"))?;
    let known = Known::of(spec, problem).unwrap();
    let judged = known.judge(candidate, &Limits::of("gpu").unwrap()).unwrap();
    if let Some(failure) = known.failures(&judged, id, "cargo test --test kernels ptx::").first() {
        return Err(format!("{id} for {target:?} by {units:?} {spec:?}\n{failure}"));
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases::config(24))]

    #[test]
    fn all_outputs_one_pass_any_spec_match_reference(
        spec in cases::any_spec(),
        recipe in cases::any_recipe(),
        target in select(&TARGETS),
    ) {
        let spec = token_by_token(spec);
        check(target, "gpu-one-pass", &spec, &recipe).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn all_outputs_two_pass_any_spec_match_reference(
        spec in cases::any_ppo_spec(),
        changed in proptest::option::of(cases::changed_logits()),
        recipe in cases::any_recipe(),
        target in select(&TARGETS),
    ) {
        let (logits, support) = changed.unwrap_or_default();
        let spec = LossSpec { logits, support, ..plain(&spec) };
        check(target, "gpu-two-pass", &spec, &recipe).map_err(TestCaseError::fail)?;
    }
}

/// What becomes of logits, in rows that begin anywhere, over one CTA and several: a cap, a bias, columns that are left out, and a target
/// among them that is put back.
#[test]
fn all_outputs_of_changed_logits_match_reference() {
    let capped = LogitsTransform { scale: 0.5, softcap: Some(5.0), bias: true };
    let turned = LogitsTransform { scale: -1.7, softcap: None, bias: false };
    let of_first = Support { vocab: Some(100), excluded_ids: vec![0, 3, 64], keep_sampled: true };
    let bonus = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    let two = LossSpec { temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    let specs = [
        LossSpec {
            logits: LogitsTransform { bias: false, ..capped.clone() },
            temperature: Temperature::Given,
            ..LossSpec::default()
        },
        LossSpec { logits: capped, support: of_first.clone(), ..two },
        LossSpec { logits: turned, support: of_first, ..bonus },
    ];
    for (i, (shape, regime)) in SHAPES.into_iter().zip(Regime::FINITE.into_iter().cycle()).enumerate() {
        let dtype = Dtype::KERNEL[i % Dtype::KERNEL.len()];
        let recipe = Recipe { shape, dtype, regime, seed: 11, old_logp_noise_scale: 0.1, masked_garbage: true };
        let units = [ApproximateUnits::Rounded, ApproximateUnits::Above, ApproximateUnits::Below][i / 3 % 3];
        check_by(units, TARGETS[i % 2], "gpu-one-pass", &specs[i % 3], &recipe).unwrap();
        check_by(units, PtxTarget::Sm80, "gpu-two-pass", &specs[(i + 1) % 3], &recipe).unwrap();
    }
}

/// Columns outside the support hold NaN and infinities, and have gradients of exactly 0.
#[test]
fn columns_outside_the_support_are_0_whatever_they_hold() {
    let support = Support { vocab: Some(60), excluded_ids: vec![7], ..Support::default() };
    for (softcap, target) in [(None, PtxTarget::Sm90), (Some(4.0), PtxTarget::Sm100)] {
        let logits = LogitsTransform { softcap, ..LogitsTransform::default() };
        let spec = LossSpec { logits, support: support.clone(), entropy_coef: 0.01, ..LossSpec::default() };
        let mut problem = recipe([1, 3, 131], Dtype::F32, Regime::Normal).problem(&spec).unwrap();
        let FloatArray::F32(logits) = &mut problem.logits else { unreachable!("asked for f32") };
        let outside = |j: usize| j == 7 || j >= 60;
        for ((_, _, j), x) in logits.indexed_iter_mut().filter(|((_, _, j), _)| outside(*j)) {
            *x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][j % 3];
        }
        let known = Known::of(&spec, &problem).unwrap();
        let around = Around { target, ..Around::new(&spec, &problem) };
        for (id, candidate) in [("gpu-one-pass", around.one_pass()), ("gpu-two-pass", around.two_pass())] {
            let candidate = candidate.unwrap();
            let FloatArray::F32(dlogits) = &candidate.gradient else { unreachable!("as the logits") };
            let beyond = dlogits.indexed_iter().filter(|((_, _, j), _)| outside(*j));
            assert!(beyond.map(|(_, dx)| *dx).all(|dx| dx == 0.0), "{id} {softcap:?}");
            assert!(dlogits.iter().any(|dx| *dx != 0.0), "{id} {softcap:?}");
            let judged = known.judge(candidate, &Limits::of("gpu").unwrap()).unwrap();
            assert_eq!(known.failures(&judged, id, "cargo test --test kernels ptx::"), [""; 0]);
        }
    }
}

/// Every named choice of a spec that the one-pass kernel computes, alone.
#[test]
fn all_outputs_one_pass_every_variant_match_reference() {
    let all = LossProgram::all();
    let one_pass = all.iter().find(|implementation| implementation.id() == "gpu-one-pass").unwrap();
    let (mut judged, mut forms) = (0, std::collections::BTreeSet::new());
    for (i, variant) in variants().into_iter().enumerate() {
        let shape = Shape { batch: 3, tokens: 4, vocab: 33 };
        let around_here = token_by_token(variant.spec.clone()) == variant.spec;
        if one_pass.supports(&variant.spec, shape, Dtype::F32, 1).is_ok() && around_here {
            let recipe = Recipe {
                shape: [3, 4, 33],
                dtype: Dtype::F32,
                regime: Regime::FINITE[i % Regime::FINITE.len()],
                seed: i as u64,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            check(TARGETS[i % 2], "gpu-one-pass", &variant.spec, &recipe).unwrap();
            judged += 1;
            forms.insert(format!("{:?}", std::mem::discriminant(&variant.spec.objective)));
        }
    }
    assert!(judged > 55 && forms.len() == 13, "{judged} variants of {} objectives", forms.len());
}

#[test]
fn logp_and_entropy_by_given_cotangents_match_reference() {
    for (seed, entropy, temperature) in [(1, true, Temperature::Given), (2, false, 0.7.into())] {
        let spec = LossSpec { temperature, ..LossSpec::from_cotangents(entropy) };
        for (dtype, regime) in
            [(Dtype::F32, Regime::Confident), (Dtype::Bf16, Regime::Holes), (Dtype::F16, Regime::Sampled)]
        {
            let recipe = Recipe { seed, masked_garbage: true, ..recipe([2, 3, 1031], dtype, regime) };
            for id in ["gpu-one-pass", "gpu-two-pass"] {
                check(PtxTarget::Sm90, id, &spec, &recipe).unwrap_or_else(|failure| panic!("{failure}"));
            }
        }
    }
}

#[test]
fn all_outputs_awkward_shapes_match_reference() {
    let spec = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    for (shape, regime) in SHAPES.into_iter().zip(Regime::FINITE.into_iter().cycle()) {
        for dtype in Dtype::KERNEL {
            let recipe = Recipe { shape, dtype, regime, seed: 7, old_logp_noise_scale: 0.1, masked_garbage: true };
            for target in TARGETS {
                check(target, "gpu-one-pass", &spec, &recipe).unwrap();
            }
            check(PtxTarget::Sm80, "gpu-two-pass", &spec, &recipe).unwrap();
        }
    }
}

/// A target that no column can be has `logp` −∞, in every dtype.
#[test]
fn all_outputs_of_targets_at_minus_infinity_match_reference() {
    let spec = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    for dtype in Dtype::KERNEL {
        for (i, (shape, seed)) in [([2, 5, 131], 3), ([1, 12, 2049], 5)].into_iter().enumerate() {
            let regime = Regime::TargetHoles;
            let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.1, masked_garbage: true };
            assert!(impossible_targets(&recipe.problem(&spec).unwrap(), &spec) > 0, "{recipe:?} shows nothing");
            for id in ["gpu-one-pass", "gpu-two-pass"] {
                check(TARGETS[i], id, &spec, &recipe).unwrap();
            }
        }
    }
}

/// Rows at the ends of a dtype, beside −∞ too, which no shift brings near 0: lowest, largest, a thousandfold, and the lowest but one.
#[test]
fn one_pass_rows_at_the_ends_of_a_dtype_match_reference() {
    for dtype in Dtype::KERNEL {
        let largest = match dtype {
            Dtype::F16 => 65_504.0,
            Dtype::Bf16 => f64::from(half::bf16::MAX),
            _ => f64::from(f32::MAX),
        };
        for (temperature, target) in [(1.0, PtxTarget::Sm90), (100.0, PtxTarget::Sm100), (0.01, PtxTarget::Sm90)] {
            let spec = LossSpec { temperature: temperature.into(), ..LossSpec::default() };
            let mut problem = recipe([1, 4, 517], dtype, Regime::Normal).problem(&spec).unwrap();
            problem.mask.fill(true);
            let ids = problem.ids.clone();
            let drawn = problem.logits.to_f64();
            let changed = drawn.indexed_iter().map(|((_, t, v), &x)| {
                let is_target = ids[(0, t)] == v as i64;
                match t {
                    0 if v % 3 == 0 && !is_target => f64::NEG_INFINITY,
                    0 => -largest,
                    1 => largest,
                    2 => (1e3 * x).clamp(-largest, largest),
                    _ if v % 5 == 0 => 0.0,
                    _ if v % 5 == 1 && !is_target => f64::NEG_INFINITY,
                    _ => -largest,
                }
            });
            let changed = Array3::from_shape_vec((1, 4, 517), changed.collect()).unwrap();
            problem.logits = FloatArray::rounded_from(&changed, dtype);
            check_problem(ApproximateUnits::Rounded, target, "gpu-one-pass", &spec, &problem).unwrap();
        }
    }
}

/// Whatever a chip's units give within what the manual allows them.
#[test]
fn all_outputs_by_units_that_are_off_either_way_match_reference() {
    let specs = [LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() }, LossSpec::default()];
    for units in [ApproximateUnits::Above, ApproximateUnits::Below] {
        for (i, regime) in Regime::FINITE.into_iter().enumerate() {
            let shape = if i % 3 == 0 { [1, 3, 2049] } else { [2, 5, 131] };
            let dtype = if i % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 };
            let recipe = Recipe { shape, dtype, regime, seed: 9, old_logp_noise_scale: 0.1, masked_garbage: true };
            for spec in &specs {
                for id in ["gpu-one-pass", "gpu-two-pass"] {
                    check_by(units, TARGETS[i % 2], id, spec, &recipe).unwrap();
                }
            }
        }
    }
}

/// A recorded row, whole, and one that the mask hides.
#[test]
fn all_outputs_recorded_row_of_qwen_match_reference() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/qwen_tiny.safetensors");
    let recorded = ProblemFile::open(path).unwrap().problem("logits", Some("old_logps_stale")).unwrap();
    let part = ProblemPart { batch: vec![1], tokens: vec![2, 3], ..ProblemPart::whole([2, 4, 151_936]) };
    let problem = recorded.select(&part);
    assert_eq!(problem.mask.iter().copied().collect::<Vec<_>>(), [true, false]);
    let spec = LossSpec { entropy_coef: 0.01, ..recorded_spec() };
    let around = Around::new(&spec, &problem);
    let on_b200 = Around { target: PtxTarget::Sm100, ..Around::new(&spec, &problem) };
    let known = Known::of(&spec, &problem).unwrap();
    for (id, candidate) in
        [("gpu-one-pass", around.one_pass()), ("gpu-one-pass", on_b200.one_pass()), ("gpu-two-pass", around.two_pass())]
    {
        let judged = known.judge(candidate.unwrap(), &Limits::of("gpu").unwrap()).unwrap();
        assert_eq!(known.failures(&judged, id, "cargo test --test kernels ptx::"), [""; 0]);
    }
}

/// Why a kernel that was changed is refused, if it is: what the interpreter or the judge says.
fn refusal(target: PtxTarget, spec: &LossSpec, recipe: &Recipe, change: impl Fn(String) -> String) -> Option<String> {
    let [batch, tokens, vocab] = recipe.shape;
    let kernel = kernels(target, "gpu-one-pass", spec, Shape { batch, tokens, vocab }, recipe.dtype).remove(0);
    refusal_of(kernel, spec, recipe, change)
}

/// Returns why the kernel that is given is refused after a change, if it is.
fn refusal_of(
    mut kernel: PtxKernel,
    spec: &LossSpec,
    recipe: &Recipe,
    change: impl Fn(String) -> String,
) -> Option<String> {
    let problem = recipe.problem(spec).unwrap();
    let around = Around::new(spec, &problem);
    let changed = change(kernel.text.clone());
    assert!(changed != kernel.text, "nothing was changed");
    kernel.text = changed;
    let candidate = match around.one_pass_by(&kernel) {
        Ok(candidate) => candidate,
        Err(error) => return Some(error),
    };
    let known = Known::of(spec, &problem).unwrap();
    let judged = match known.judge(candidate, &Limits::of("gpu").unwrap()) {
        Ok(judged) => judged,
        Err(error) => return Some(error.to_string()),
    };
    known.failures(&judged, "gpu-one-pass", "").first().cloned()
}

fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime) -> Recipe {
    Recipe { shape, dtype, regime, seed: 5, old_logp_noise_scale: 0.1, masked_garbage: true }
}

/// A row over one CTA, and one over two: each wait of the kernel is needed, and its absence is seen by what it leaves to chance.
#[test]
fn a_kernel_without_one_of_its_waits_is_refused() {
    let spec = LossSpec::default();
    let is_wait = |line: &&str| ["cp.async.wait", "barrier."].iter().any(|wait| line.trim_start().starts_with(wait));
    for (target, shape, waits) in [
        (PtxTarget::Sm90, [1, 1, 2049], 4),
        (PtxTarget::Sm90, [1, 1, 33_001], 8),
        (PtxTarget::Sm100, [1, 1, 33_001], 8),
    ] {
        let recipe = recipe(shape, Dtype::Bf16, Regime::Normal);
        let shape = Shape { batch: 1, tokens: 1, vocab: shape[2] };
        let text = kernels(target, "gpu-one-pass", &spec, shape, Dtype::Bf16).remove(0).text;
        let lines: Vec<&str> = text.lines().collect();
        let places: Vec<usize> = (0..lines.len()).filter(|&at| is_wait(&lines[at])).collect();
        assert_eq!(places.len(), waits, "{shape:?}");
        let without = |left_out: &[usize]| {
            let kept = lines.iter().enumerate().filter(|(at, _)| !left_out.contains(at));
            kept.flat_map(|(_, line)| [*line, "\n"]).collect::<String>()
        };
        let mut removed: Vec<Vec<usize>> = places.iter().map(|&at| vec![at]).collect();
        // A meeting of the cluster is an arrival and a wait.
        let arrivals = places.iter().filter(|&&at| lines[at].contains("arrive"));
        removed.extend(arrivals.map(|&at| {
            let wait = places.iter().find(|&&other| other > at && lines[other].contains("cluster.wait"));
            vec![at, *wait.expect("who arrives waits")]
        }));
        for left_out in removed {
            let what: Vec<&str> = left_out.iter().map(|&at| lines[at].trim()).collect();
            let why = refusal(target, &spec, &recipe, |_| without(&left_out));
            let why = why.unwrap_or_else(|| panic!("{shape:?} without {what:?} at {left_out:?} is accepted"));
            println!("{} columns, without {what:?}: {why}", shape.vocab);
        }
        if text.contains("arrive.release") {
            for (place, _) in text.match_indices("arrive.release") {
                let weak = format!("{}arrive.relaxed{}", &text[..place], &text[place + "arrive.release".len()..]);
                let why = refusal(target, &spec, &recipe, |_| weak.clone())
                    .expect("an arrival that orders nothing is refused");
                println!("{} columns, relaxed: {why}", shape.vocab);
            }
        }
    }
}

/// Clusters of 2, 4 and 8, bf16 and f32, with a bonus and without, for either chip; and a row of one CTA, which meets at its own barrier.
#[test]
fn meeting_by_stores_every_cluster_matches_reference() {
    let bonus = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    let divided = LossSpec { temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    let specs = [LossSpec::default(), bonus, divided];
    for (i, (vocab, dtype, cluster)) in [
        (1031, Dtype::Bf16, 1),
        (33_001, Dtype::Bf16, 2),
        (17_000, Dtype::F32, 2),
        (65_001, Dtype::Bf16, 4),
        (33_001, Dtype::F32, 4),
        (131_072, Dtype::Bf16, 8),
        (66_003, Dtype::F32, 8),
    ]
    .into_iter()
    .enumerate()
    {
        let spec = &specs[i % specs.len()];
        let recipe = recipe([1, 2, vocab], dtype, Regime::FINITE[i % Regime::FINITE.len()]);
        let shape = Shape { batch: 1, tokens: 2, vocab };
        for target in TARGETS {
            let kernel = meeting_by_stores(target, spec, shape, dtype);
            assert_eq!(kernel.cluster, cluster, "{vocab} {dtype}");
            assert_eq!(kernel.text.contains("st.async"), cluster > 1);
            assert!(!kernel.text.contains("arrive.release"), "a meeting at the cluster's barrier is left");
            check(target, BY_STORES, spec, &recipe).unwrap();
        }
    }
}

/// The two ways of meeting fold the same numbers in the same order.
#[test]
fn meeting_by_stores_returns_the_bits_of_the_barrier() {
    let spec = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    let recipe = recipe([1, 3, 33_001], Dtype::Bf16, Regime::Normal);
    let problem = recipe.problem(&spec).unwrap();
    let around = Around::new(&spec, &problem);
    let [numbers, tokens] = around.given_to_one_pass();
    let logits = logits_bytes(&problem.logits);
    let inputs = [("ids", around.ids()), ("numbers", numbers), ("logits", logits), ("tokens", tokens)];
    for target in TARGETS {
        let of_barrier = &kernels(target, "gpu-one-pass", &spec, around.shape, Dtype::Bf16)[0];
        let of_stores = &meeting_by_stores(target, &spec, around.shape, Dtype::Bf16);
        let [of_barrier, of_stores] =
            [of_barrier, of_stores].map(|kernel| run(kernel, ApproximateUnits::Rounded, &inputs).unwrap());
        assert!(of_barrier == of_stores, "{target:?}: other bits");
    }
}

/// Each wait, fence, count and parity of the meeting by stores is needed.
#[test]
fn meeting_by_stores_with_a_mistake_is_refused() {
    let spec = LossSpec::default();
    let recipe = recipe([1, 1, 33_001], Dtype::Bf16, Regime::Normal);
    let shape = Shape { batch: 1, tokens: 1, vocab: 33_001 };
    let expect = "\tmbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, ";
    for target in TARGETS {
        check(target, BY_STORES, &spec, &recipe).expect("the kernel without a mistake is right");
        let kernel = meeting_by_stores(target, &spec, shape, Dtype::Bf16);
        let lines: Vec<&str> = kernel.text.lines().collect();
        let places = |what: &str| (0..lines.len()).filter(|&at| lines[at].contains(what)).collect::<Vec<_>>();
        let mut changes: Vec<(usize, String)> = Vec::new();
        // A line that is left out: each wait, each barrier, each fence, each arrival and each store.
        for what in ["cp.async.wait", "barrier.", "fence.mbarrier_init", "try_wait", "st.async", "bra $L"] {
            let found = places(what).into_iter();
            // Of the branches those that repeat a wait, which follow it.
            changes.extend(
                found
                    .filter(|&at| what != "bra $L" || lines[at - 1].contains("try_wait"))
                    .map(|at| (at, String::new())),
            );
        }
        for at in places(expect) {
            let (before, bytes) = lines[at].trim_end_matches(';').rsplit_once(", ").unwrap();
            let bytes: i64 = bytes.parse().unwrap();
            changes.extend([-4, 4].map(|more| (at, format!("{before}, {};", bytes + more))));
            changes.push((at, format!("{};", before.replace(".expect_tx", ""))));
        }
        for at in places("try_wait") {
            changes.push((at, lines[at].replace(", 0;", ", 1;")));
            changes.push((at, lines[at].replace("acquire.cluster", "acquire.cta")));
        }
        for at in places("mbarrier.init.") {
            changes.push((at, lines[at].replace(", 1;", ", 2;")));
            changes.push((at, lines[at].repeat(2)));
        }
        // Stores of both meetings that count on one barrier.
        changes.extend(places("st.async").into_iter().map(|at| {
            let swapped =
                if lines[at].contains("+8]") { lines[at].replace("+8]", "]") } else { lines[at].replace("];", "+8];") };
            (at, swapped)
        }));
        assert!(changes.len() > 30, "{} changes", changes.len());
        for (at, line) in changes {
            let changed: String =
                lines.iter().enumerate().flat_map(|(i, old)| [if i == at { &line } else { *old }, "\n"]).collect();
            let why = refusal_of(kernel.clone(), &spec, &recipe, |_| changed.clone());
            let why = why.unwrap_or_else(|| panic!("{target:?}: {} as {line:?} is accepted", lines[at]));
            println!("{} as {line:?}: {why}", lines[at].trim());
        }
    }
}

/// Four folds over a CTA, and a barrier in each.
#[test]
fn statistics_without_one_of_their_waits_are_refused() {
    let shape = Shape { batch: 1, tokens: 1, vocab: 2049 };
    let kernel = kernels(PtxTarget::Sm80, "gpu-two-pass", &LossSpec::default(), shape, Dtype::Bf16).remove(0);
    let zeros = vec![0; 2 * shape.vocab];
    let inputs = [
        ("inverse_temperature", f32_bytes([1.0])),
        ("columns", bytes_of([(shape.vocab as i32).to_le_bytes()])),
        ("logits", zeros),
        ("ids", vec![0; 4]),
    ];
    run(&kernel, ApproximateUnits::Rounded, &inputs).unwrap();
    let barrier = "\tbarrier.sync 0;\n";
    let places: Vec<usize> = kernel.text.match_indices(barrier).map(|(place, _)| place).collect();
    assert_eq!(places.len(), 4);
    for place in places {
        let text = format!("{}{}", &kernel.text[..place], &kernel.text[place + barrier.len()..]);
        let why = run(&PtxKernel { text, ..kernel.clone() }, ApproximateUnits::Rounded, &inputs).unwrap_err();
        println!("statistics without the barrier at byte {place}: {why}");
    }
}

/// Rows that begin anywhere, every other of them masked, the last of the batch too.
#[test]
fn logits_of_masked_rows_are_not_read() {
    let spec = LossSpec::default();
    for (vocab, dtype) in [(1031, Dtype::Bf16), (1031, Dtype::F32), (2048, Dtype::F16), (33_001, Dtype::Bf16)] {
        let recipe = recipe([1, 4, vocab], dtype, Regime::Normal);
        let mut problem = recipe.problem(&spec).unwrap();
        problem.mask.iter_mut().enumerate().for_each(|(token, counts)| *counts = token % 2 == 0);
        let around = Around::new(&spec, &problem);
        let of_a_row = vocab * dtype.size();
        let masked: Vec<Range<usize>> = [1, 3].map(|row| row * of_a_row..(row + 1) * of_a_row).into();
        let logits = ("logits", logits_bytes(&problem.logits));
        let expect_zeros = |outputs: &[Vec<u8>]| {
            assert!(masked.iter().all(|row| outputs[0][row.clone()].iter().all(|&byte| byte == 0)), "{vocab} {dtype}");
            assert!(outputs[0][..of_a_row].iter().any(|&byte| byte != 0), "{vocab} {dtype}");
        };
        let [numbers, tokens] = around.given_to_one_pass();
        let inputs = [("ids", around.ids()), ("numbers", numbers), logits.clone(), ("tokens", tokens)];
        for target in TARGETS {
            let kernel = &kernels(target, "gpu-one-pass", &spec, around.shape, dtype)[0];
            expect_zeros(&run_without(kernel, ApproximateUnits::Rounded, &inputs, &masked).unwrap());
            // What counts is read.
            let first: Range<usize> = 0..of_a_row;
            assert!(
                run_without(kernel, ApproximateUnits::Rounded, &inputs, &[first])
                    .unwrap_err()
                    .contains("never written")
            );
        }
        let kernel = &kernels(PtxTarget::Sm80, "gpu-two-pass", &spec, around.shape, dtype)[1];
        let scales = per_token(&columns("gpu-two-pass", &spec, "scales"), 4, |name, token| match name {
            "mask" => f64::from(u8::from(around.mask[token])),
            _ => 0.125,
        });
        let inputs = [
            ("inverse_temperature", f32_bytes([1.0])),
            ("columns", bytes_of([(vocab as i32).to_le_bytes()])),
            logits,
            ("ids", around.ids()),
            ("scales", scales),
        ];
        expect_zeros(&run_without(kernel, ApproximateUnits::Rounded, &inputs, &masked).unwrap());
    }
}

#[test]
fn a_kernel_with_another_number_or_fold_is_refused() {
    // Where the temperature is low, an exponential above that of the maximum is ∞. With a bonus rows are walked by their gaps, without one
    // by exponents.
    for (what, regime, temperature, bonus, from, to) in [
        ("log₂e off by 2⁻¹⁴", Regime::Normal, 1.0, 0.02, "0fBFB8AA3B", "0fBFB8B23B"),
        ("lanes 16 apart never meet", Regime::Normal, 1.0, 0.02, ", 16, 31, 0xffffffff", ", 8, 31, 0xffffffff"),
        ("no −∞ where the target was", Regime::Normal, 1.0, 0.02, "0fFF800000", "0f00000000"),
        ("gaps of −∞ are infinite", Regime::Holes, 1.0, 0.02, "0f71800000", "0f7F800000"),
        ("1/3 of the logarithm's series", Regime::Normal, 1.0, 0.02, "0f3EAAAAAB", "0f3E8AAAAB"),
        ("the smaller of a pair", Regime::Peaked, 0.1, 0.02, "max.NaN.bf16x2", "min.NaN.bf16x2"),
        ("log₂e of exponents off by 2⁻¹⁴", Regime::Normal, 1.0, 0.0, "0fBFB8AA3B", "0fBFB8B23B"),
        ("the least logit is −∞", Regime::Holes, 1.0, 0.0, "4051759488", "4286644096"),
    ] {
        let spec = LossSpec { entropy_coef: bonus, temperature: temperature.into(), ..LossSpec::default() };
        // A B200 has no exponents that are computed so.
        let targets = if what == "the least logit is −∞" { &TARGETS[..1] } else { &TARGETS };
        for &target in targets {
            let recipe = recipe([1, 3, 517], Dtype::Bf16, regime);
            let refused = refusal(target, &spec, &recipe, |text| text.replace(from, to));
            println!("{what}, {target:?}: {}", refused.unwrap_or_else(|| panic!("{what}, {target:?}: accepted")));
        }
    }
}

#[test]
fn rows_lie_along_the_grid_however_many_there_are() {
    let spec = LossSpec::default();
    let shape = Shape { batch: 1000, tokens: 100, vocab: 151_643 };
    let kernel = &kernels(PtxTarget::Sm90, "gpu-one-pass", &spec, shape, Dtype::Bf16)[0];
    assert_eq!(kernel.grid, [100_000 * kernel.cluster, 1, 1]);
    // The row's offset has 64 bits.
    assert!(kernel.text.contains("mul.wide.u32"), "{}", kernel.text);
}

#[test]
fn what_no_cluster_holds_and_no_device_runs_is_refused_with_what_would_do() {
    let all = LossProgram::all();
    let one_pass = all.iter().find(|implementation| implementation.id() == "gpu-one-pass").unwrap();
    let spec = LossSpec::default();
    let refused = |vocab, dtype| {
        let shape = Shape { batch: 1, tokens: 8, vocab };
        one_pass.supports(&spec, shape, dtype, 1).err().map(|error| error.to_string())
    };
    assert_eq!(refused(256_000, Dtype::F32), None);
    assert_eq!(refused(800_000, Dtype::Bf16), None);
    let error = refused(1_000_000, Dtype::Bf16).unwrap();
    assert!(error.contains("vocabulary 1000000") && error.contains("shared memory"), "{error}");
    assert!(refused(64, Dtype::F64).unwrap().contains("f32, bf16 and f16"));
    for (device, given) in [
        (Device::gpu(PtxTarget::Sm80), "sm_80"),
        (Device::ANY, "loops"),
        (Device::from_platform("tpu", "TPU v6e").unwrap(), "mosaic"),
    ] {
        let error = one_pass.expect_device(device).unwrap_err().to_string();
        assert!(error.contains(given) && error.contains("sm_90"), "{error}");
    }
    assert!(one_pass.expect_device(Device::from_platform("cuda", "NVIDIA H100 80GB HBM3").unwrap()).is_ok());
}

/// Of 127 columns the second of two devices has 63, and NaN where the first has its last.
#[test]
fn statistics_of_part_of_the_vocabulary_are_those_of_its_real_columns() {
    let all = LossProgram::all();
    let cut = all.iter().find(|implementation| implementation.id() == "gpu-two-pass-vocab").unwrap();
    let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    let shape = Shape { batch: 1, tokens: 2, vocab: 127 };
    for dtype in Dtype::KERNEL {
        let [statistics, dlogits] =
            &cut.gpu_kernels_for(StructuredSpec::new(&spec), shape, dtype, 2, PtxTarget::Sm80).unwrap()[..]
        else {
            panic!("two kernels")
        };
        let local = Shape { vocab: 64, ..shape };
        // Numbers that every dtype has. The first row's target is here, the second's elsewhere.
        let x = |row: usize, column: usize| ((row * 5 + column * 7) % 11) as f64 - 4.0;
        let padded = |row: usize, column: usize| if column < 63 { x(row, column) } else { f64::NAN };
        let logits = Array3::from_shape_fn((1, 2, 64), |(_, row, column)| padded(row, column));
        let logits = logits_bytes(&FloatArray::rounded_from(&logits, dtype));
        let ids = bytes_of([17_i32, -1].map(i32::to_le_bytes));
        let columns_here = bytes_of([63_i32.to_le_bytes()]);
        let shared = vec![
            ("inverse_temperature", f32_bytes([1.0])),
            ("columns", columns_here),
            ("logits", logits),
            ("ids", ids),
        ];
        let outputs = run(statistics, ApproximateUnits::Rounded, &shared).unwrap();
        let names = columns("gpu-two-pass", &spec, "statistics");
        let found = PerToken::new(&outputs[0], &names);
        for (row, target) in [(0, Some(17)), (1, None)] {
            let max = (0..63).map(|column| x(row, column)).fold(f64::NEG_INFINITY, f64::max);
            let others = || (0..63).filter(|column| Some(*column) != target).map(|column| x(row, column) - max);
            let weighted: f64 = others().map(|gap| gap.exp() * gap * std::f64::consts::LOG2_E).sum();
            let expected = [
                ("max", max),
                ("target_logit", target.map_or(0.0, |column| x(row, column))),
                ("others", others().map(f64::exp).sum()),
                ("weighted", weighted),
            ];
            for (name, expected) in expected {
                let error = (found.at(name, row) - expected).abs();
                assert!(error <= 1e-5 * expected.abs(), "{dtype} {name} {row}: {} {expected}", found.at(name, row));
            }
        }
        // What is no column gets no gradient.
        let scales = columns("gpu-two-pass", &spec, "scales");
        let scales = per_token(&scales, 2, |name, row| match name {
            "max" => found.at("max", row),
            "mask" => 1.0,
            _ => 0.125,
        });
        let mut given = shared;
        given.push(("scales", scales));
        let outputs = run(dlogits, ApproximateUnits::Rounded, &given).unwrap();
        let gradients = logits_of(&outputs[0], local, dtype).to_f64();
        assert!(gradients.iter().all(|x| x.is_finite()), "{gradients}");
        assert!((0..2).all(|row| gradients[[0, row, 63]] == 0.0 && gradients[[0, row, 62]] != 0.0), "{gradients}");
        let bonus = |gap: f64| 0.125 * (-gap).exp() * (gap - 0.125);
        let gap = found.at("max", 0) - x(0, 17);
        let expected = -0.125 * 0.125 + bonus(gap);
        assert!(
            (gradients[[0, 0, 17]] - expected).abs() <= 1e-2 * expected.abs(),
            "{} {expected}",
            gradients[[0, 0, 17]]
        );
    }
}
