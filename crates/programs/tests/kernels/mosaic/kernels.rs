//! The text that libtpu is given for every tile kernel, run by the interpreter and judged against the reference. No
//! plugin takes part: what surrounds a kernel on a device is computed here, in f64.

use crate::common::batch::{Batch, plain, token_by_token};
use crate::common::claims;
use crate::common::device::{OnePassColumns, Pass, TwoPassColumns};
use assay_core::problem::{Advantages, Candidate, Dtype, Extra, Problem, Shape};
use assay_core::spec::{Kl, KlEstimator, LogitsTransform, LossSpec, Support, Temperature, TemperatureDivides};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_mosaic_interpreter::{self as interpret, HostArray, MosaicOptions, MosaicUnits, TpuCore};
use assay_programs::{ANY_TPU, LossProgram, NamedArray, Programs, StructuredSpec, TileMachine, TpuKernel};
use assay_suites::supported::recipe;
use assay_suites::{cases, covering};
use ndarray::{Array1, Array2, Array3};
use proptest::prelude::*;
use std::ops::Deref;

/// Columns around registers, chunks of several trips, several windows, and rows that no block divides.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [2, 3, 127], [1, 17, 128], [3, 1, 129], [2, 9, 2049], [1, 33, 1031], [1, 2, 9001], [1, 1, 33_001]];

fn kernels(id: &str, spec: &LossSpec, shape: Shape, dtype: Dtype, machine: TileMachine) -> Vec<TpuKernel> {
    let all = LossProgram::all();
    let implementation = all.iter().find(|implementation| implementation.id() == id).unwrap();
    implementation.kernels_for(StructuredSpec::new(spec), shape, dtype, 1, machine).unwrap()
}

/// Runs a kernel on operands given by name.
fn run(kernel: &TpuKernel, options: MosaicOptions, operands: &[(&str, Vec<u8>)]) -> Result<Vec<Vec<u8>>, String> {
    let given = kernel.operands.iter().map(|operand| {
        let (_, bytes) = operands.iter().find(|(name, _)| *name == operand.name).expect("every operand is given");
        HostArray { element: operand.dtype, shape: operand.shape.clone(), bytes: bytes.clone() }
    });
    let results: Vec<_> = kernel.results.iter().map(|result| (result.dtype, result.shape.clone())).collect();
    let arrays = interpret::run_with(options, &kernel.text, given.collect(), &results, &kernel.aliases);
    Ok(arrays.map_err(|error| format!("{}: {error}", kernel.name))?.into_iter().map(|array| array.bytes).collect())
}

/// A batch with what a device computes around the kernel.
struct Around<'p> {
    batch: Batch<'p>,
    /// Whether the kernel is told of one column more than there are.
    spoil: bool,
    units: MosaicUnits,
}

impl<'p> Deref for Around<'p> {
    type Target = Batch<'p>;

    fn deref(&self) -> &Batch<'p> {
        &self.batch
    }
}

impl<'p> Around<'p> {
    fn new(spec: &'p LossSpec, problem: &'p Problem) -> Self {
        Self { batch: Batch::new(spec, problem), spoil: false, units: MosaicUnits::Host }
    }

    /// A core of `machine`, whose rules hold.
    fn on(&self, machine: TileMachine) -> MosaicOptions {
        let core = TpuCore { vmem_bytes: machine.vmem_bytes };
        MosaicOptions { units: self.units, core: Some(core), ..MosaicOptions::default() }
    }

    fn one_pass(&self, machine: TileMachine) -> Result<Candidate, String> {
        let kernel = &mut kernels("tile-one-pass", self.spec, self.shape, self.problem.logits.dtype(), machine)[0];
        if self.spoil {
            let columns = |columns: usize| format!("{{value = {columns} : i32}}");
            kernel.text = kernel.text.replace(&columns(self.shape.vocab), &columns(self.shape.vocab + 1));
        }
        let named = |array: &str| kernel.operands.iter().find(|operand| operand.name == array).unwrap().columns.clone();
        let results = kernel.results[1].columns.clone();
        let columns = OnePassColumns { numbers: named("numbers"), tokens: named("tokens"), results };
        self.one_pass_with(&columns, |arrays| run(kernel, self.on(machine), arrays))
    }

    fn two_pass(&self, machine: TileMachine) -> Result<Candidate, String> {
        let dtype = self.problem.logits.dtype();
        let [statistics, dlogits] = &kernels("tile-two-pass", self.spec, self.shape, dtype, machine)[..] else {
            panic!("two kernels")
        };
        let named = |array: &str| dlogits.operands.iter().find(|operand| operand.name == array);
        let columns = TwoPassColumns {
            softmax_numbers: named("softmax_numbers").map_or(vec![], |operand| operand.columns.clone()),
            statistics: statistics.results[0].columns.clone(),
            scales: named("scales").unwrap().columns.clone(),
        };
        self.two_pass_with(&columns, 1, |pass, arrays| {
            run(if pass == Pass::Statistics { statistics } else { dlogits }, self.on(machine), arrays)
        })
    }
}

/// Garbage at masked tokens that is no number in f64 arithmetic here is no business of the kernels.
fn check(id: &str, spec: &LossSpec, recipe: &Recipe, machine: TileMachine) -> Result<(), String> {
    check_by(MosaicUnits::Host, id, spec, recipe, machine)
}

/// Checks the kernels of one pass and of two.
fn check_both(spec: &LossSpec, recipe: &Recipe) {
    for id in ["tile-one-pass", "tile-two-pass"] {
        check(id, spec, recipe, ANY_TPU).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// The same by other units than the host's.
fn check_by(
    units: MosaicUnits,
    id: &str,
    spec: &LossSpec,
    recipe: &Recipe,
    machine: TileMachine,
) -> Result<(), String> {
    let problem = recipe.problem(spec).map_err(|error| error.to_string())?;
    let around = Around { units, ..Around::new(spec, &problem) };
    let candidate = match id {
        "tile-one-pass" => around.one_pass(machine)?,
        _ => around.two_pass(machine)?,
    };
    let known = JudgedProblem::new(spec, &problem).unwrap();
    let judged = known.judge(candidate, &Limits::for_class("tile").unwrap()).unwrap();
    if let Some(failure) = known.failures(&judged, id, "cargo test --test kernels mosaic::").first() {
        return Err(format!("{id} by {units:?} {recipe:?} {spec:?}\n{failure}"));
    }
    Ok(())
}

#[test]
fn minus_infinity_targets_match_reference() {
    claims::expect_targets_at_minus_infinity(|_, spec, recipe| check_both(spec, recipe));
}

/// The emitter and the interpreter may share a mistake about a TPU's units, not about all that are within eight ulp (`OFF_ULP`).
#[test]
fn units_off_either_way_match_reference() {
    let specs = [LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() }, LossSpec::default()];
    for units in [MosaicUnits::Above, MosaicUnits::Below] {
        for (i, regime) in Regime::FINITE.into_iter().enumerate() {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let shape = if i % 3 == 0 { [1, 3, 2049] } else { [2, 5, 131] };
                let recipe = Recipe { shape, dtype, regime, seed: 9, old_logp_noise_scale: 0.1, masked_garbage: true };
                for (id, spec) in ["tile-one-pass", "tile-two-pass"]
                    .into_iter()
                    .flat_map(|id| specs.each_ref().map(|spec| (id, spec)))
                {
                    check_by(units, id, spec, &recipe, ANY_TPU).unwrap();
                }
            }
        }
    }
}

/// By how many units in the last place `found` is off.
fn units_off(found: f64, exact: f64) -> f64 {
    (found / exact - 1.0).abs() * 2_f64.powi(24)
}

/// Targets whose logits are so far above the 255 others, which are 0, and the policy that made them.
fn certain_targets(gaps: &[f32]) -> (Problem, Vec<f64>) {
    let logits =
        Array3::from_shape_fn((1, gaps.len(), 256), |(_, token, column)| if column == 3 { gaps[token] } else { 0.0 });
    let tokens = (1, gaps.len());
    let problem = Problem {
        logits: logits.into(),
        ids: Array2::from_elem(tokens, 3),
        mask: Array2::from_elem(tokens, true),
        advantages: Advantages::Sequence(Array1::ones(1)),
        old_logp: Some(Array2::zeros(tokens)),
        ref_logp: None,
        extra: Extra::default(),
    };
    (problem, gaps.iter().map(|&gap| -(255.0 * f64::from(-gap).exp()).ln_1p()).collect())
}

/// The other columns hold `255·e^−x` of the target's weight: logp is minus the logarithm of 1 and that, which a logarithm that is off by
/// a fixed amount near 1 loses. Of 128 units in the last place exponents take a half, rounded times log₂e, and units eight each.
#[test]
fn logp_of_certain_targets_by_units_off_is_right() {
    let gaps = [6.0_f32, 7.0, 9.0, 12.0, 16.0, 20.0];
    let (problem, logp_of) = certain_targets(&gaps);
    let spec = LossSpec::default();
    for units in [MosaicUnits::Host, MosaicUnits::Above, MosaicUnits::Below] {
        let around = Around { units, ..Around::new(&spec, &problem) };
        let logp = around.one_pass(ANY_TPU).unwrap().logp.unwrap();
        for (token, &gap) in gaps.iter().enumerate() {
            let exact = logp_of[token];
            let off = units_off(logp.at(0, token), exact);
            assert!(off < 128.0, "{units:?}, {gap} above the others: {exact}, off by {off} units in the last place");
        }
    }
}

/// A policy that has hardly moved: the gradient of `e^d − d − 1` is `1 − e^d`, which an exponential that is off by a part of 1 loses where
/// the difference `d` is small. The target is all but certain, so that `d` itself is exact, and nothing else has a gradient.
#[test]
fn k3_of_small_differences_by_units_off_is_right() {
    let differences = [1e-4_f32, -1e-4, 3e-3, -3e-3, 0.1, -0.1, 0.4, -0.4, 0.7, -0.7, 3.0, -3.0];
    let (problem, logp_of) = certain_targets(&[20.0; 12]);
    let ref_logp = Array2::from_shape_fn((1, 12), |(_, token)| f64::from(differences[token]));
    let advantages = Advantages::Sequence(Array1::zeros(1));
    let problem = Problem { ref_logp: Some(ref_logp.clone()), advantages, ..problem };
    let spec = LossSpec { kl: Some(Kl::plain(1.0, KlEstimator::K3)), ..LossSpec::default() };
    for units in [MosaicUnits::Host, MosaicUnits::Above, MosaicUnits::Below] {
        let around = Around { units, ..Around::new(&spec, &problem) };
        let dlogits = around.one_pass(ANY_TPU).unwrap().gradient.to_f64();
        for (token, logp) in logp_of.iter().enumerate() {
            let by_logp = -(ref_logp[[0, token]] - logp).exp_m1();
            let exact = around.weight(token) * by_logp * -logp.exp_m1();
            let off = units_off(dlogits[[0, token, 3]], exact);
            let d = differences[token];
            assert!(off < 128.0, "{units:?}, a difference of {d}: {exact}, off by {off} units in the last place");
        }
    }
}

/// The kernel whose text says that the array has one column more than it has: its edge is poison, and shows.
#[test]
fn column_past_the_edge_makes_outputs_nan() {
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [1, 5, 130],
        dtype: Dtype::F32,
        regime: Regime::FINITE[0],
        seed: 1,
        old_logp_noise_scale: 0.1,
        masked_garbage: false,
    };
    let problem = recipe.problem(&spec).unwrap();
    for beyond in [false, true] {
        let mut around = Around::new(&spec, &problem);
        around.spoil = beyond;
        let candidate = around.one_pass(ANY_TPU).unwrap();
        let logp = candidate.logp.unwrap();
        let read = around.mask.iter().enumerate().filter(|(_, counts)| **counts);
        let mut values = read.map(|(token, _)| logp.at(0, token));
        assert!(if beyond { values.all(f64::is_nan) } else { values.all(f64::is_finite) });
    }
}

proptest! {
    #![proptest_config(cases::config(48))]

    #[test]
    fn one_pass_any_spec_matches_reference(spec in cases::any_spec(), recipe in cases::any_recipe()) {
        let spec = token_by_token(spec);
        check("tile-one-pass", &spec, &recipe, ANY_TPU).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn two_pass_any_spec_matches_reference(
        spec in cases::any_ppo_spec(),
        changed in proptest::option::of(cases::changed_logits()),
        recipe in cases::any_recipe(),
    ) {
        let (logits, support) = changed.unwrap_or_default();
        check("tile-two-pass", &LossSpec { logits, support, ..plain(&spec) }, &recipe, ANY_TPU)
            .map_err(TestCaseError::fail)?;
    }
}

/// What becomes of logits, in blocks of rows, chunks of several trips and several windows, of which some have no column in the support:
/// a cap, a bias, columns that are left out, and a target among them that is put back.
#[test]
fn softcap_bias_and_support_match_reference() {
    let capped = LogitsTransform { scale: 0.5, softcap: Some(5.0), bias: true };
    let turned = LogitsTransform { scale: -1.7, softcap: None, bias: false };
    let of_first = Support { vocab: Some(100), excluded_ids: vec![0, 3, 64], keep_sampled: true, kept: None };
    let bonus = LossSpec { entropy_coef: 0.02, temperature: 0.8.into(), ..LossSpec::default() };
    let two = LossSpec { temperature_divides: TemperatureDivides::Logp, ..bonus.clone() };
    let specs = [
        LossSpec { logits: capped.clone(), temperature: Temperature::Given, ..LossSpec::default() },
        LossSpec { logits: capped, support: of_first.clone(), ..two },
        LossSpec { logits: turned, support: of_first, ..bonus },
    ];
    for (i, (shape, regime)) in SHAPES.into_iter().zip(Regime::FINITE.into_iter().cycle()).enumerate() {
        let dtype = Dtype::KERNEL[i % Dtype::KERNEL.len()];
        let recipe = Recipe { shape, dtype, regime, seed: 11, old_logp_noise_scale: 0.1, masked_garbage: true };
        let units = [MosaicUnits::Host, MosaicUnits::Above, MosaicUnits::Below];
        check_by(units[i / 3 % 3], "tile-one-pass", &specs[i % 3], &recipe, ANY_TPU).unwrap();
        check_by(units[(i / 3 + 1) % 3], "tile-two-pass", &specs[(i + 1) % 3], &recipe, ANY_TPU).unwrap();
    }
}

#[test]
fn support_excluded_columns_have_no_gradient() {
    claims::expect_zeros_outside_the_support("tile", 4, |_, spec, problem| {
        let around = Around::new(spec, problem);
        vec![("tile-one-pass", around.one_pass(ANY_TPU).unwrap()), ("tile-two-pass", around.two_pass(ANY_TPU).unwrap())]
    });
}

#[test]
fn one_pass_every_variant_matches_reference() {
    claims::expect_every_variant("tile-one-pass", |_, spec, recipe| {
        check("tile-one-pass", spec, recipe, ANY_TPU).unwrap();
    });
}

/// Specs among which every two choices that shape the kernel meet.
#[test]
fn one_pass_every_pair_of_structures_matches_reference() {
    let all = LossProgram::all();
    let one_pass = all.iter().find(|implementation| implementation.id() == "tile-one-pass").unwrap();
    for (i, spec) in covering::pairs(&|spec, shape| one_pass.supports(spec, shape, Dtype::F32, 1).is_ok())
        .into_iter()
        .map(token_by_token)
        .enumerate()
    {
        // The last so far off that exponentials of a difference overflow.
        for (step, old_logp_noise_scale) in [0.5, 0.5, 60.0].into_iter().enumerate() {
            check("tile-one-pass", &spec, &Recipe { old_logp_noise_scale, ..recipe(i, step) }, ANY_TPU).unwrap();
        }
    }
}

#[test]
fn cotangents_given_match_reference() {
    claims::expect_given_cotangents(0.3, check_both);
}

#[test]
fn shapes_awkward_match_reference() {
    claims::expect_awkward_shapes(&SHAPES, check_both);
}

/// A core that has no bf16 arithmetic, and so little VMEM that a block has half as many rows.
#[test]
fn core_of_lesser_outputs_matches_reference() {
    let machine = TileMachine::tpu(7 << 20, false);
    let recipe = Recipe {
        shape: [1, 40, 9001],
        dtype: Dtype::Bf16,
        regime: Regime::FINITE[0],
        seed: 3,
        old_logp_noise_scale: 0.1,
        masked_garbage: true,
    };
    let spec = LossSpec::default();
    for id in ["tile-one-pass", "tile-two-pass"] {
        check(id, &spec, &recipe, machine).unwrap();
    }
}

/// What a kernel says that it needs of VMEM is what the interpreter counts.
#[test]
fn vmem_of_one_byte_less_is_refused() {
    let spec = LossSpec::default();
    for dtype in Dtype::KERNEL {
        for id in ["tile-one-pass", "tile-two-pass"] {
            for kernel in kernels(id, &spec, Shape { batch: 1, tokens: 40, vocab: 1031 }, dtype, ANY_TPU) {
                let zeros = |named: &NamedArray| {
                    (named.name, vec![0; named.shape.iter().product::<usize>() * named.dtype.size()])
                };
                let operands: Vec<_> = kernel.operands.iter().map(zeros).collect();
                let run_within = |vmem_bytes: usize| {
                    run(
                        &kernel,
                        MosaicOptions { core: Some(TpuCore { vmem_bytes }), ..MosaicOptions::default() },
                        &operands,
                    )
                };
                run_within(kernel.vmem_bytes).unwrap();
                let refused = run_within(kernel.vmem_bytes - 1).unwrap_err();
                assert!(refused.contains("core: two buffers of each window take"), "{refused}");
            }
        }
    }
}

/// libtpu gives a kernel the window of an input that is in VMEM as a part of that array: a store to it beyond the
/// array's last row would be one to whatever is next to it.
#[test]
fn hbm_is_asked_for_operands_that_are_written() {
    let spec = LossSpec::default();
    let shape = Shape { batch: 1, tokens: 40, vocab: 300 };
    let mut written = 0;
    for (id, dtype) in [("tile-one-pass", Dtype::Bf16), ("tile-one-pass", Dtype::F16), ("tile-two-pass", Dtype::F32)] {
        for kernel in kernels(id, &spec, shape, dtype, ANY_TPU) {
            let payload: serde_json::Value = serde_json::from_str(&kernel.payload).unwrap();
            let config = &payload["custom_call_config"];
            let scalars = kernel.text.split("scalar_prefetch = ").nth(1).unwrap().split(' ').next().unwrap();
            let scalars: usize = scalars.parse().unwrap();
            let stored = |input: usize| {
                let into = format!(", %in{input}, ");
                kernel.text.lines().any(|line| line.contains("vector_store") && line.contains(&into))
            };
            let inputs: Vec<usize> = (0..kernel.operands.len() - scalars).filter(|&input| stored(input)).collect();
            let of = |colors: &[serde_json::Value]| (!colors.is_empty()).then(|| serde_json::json!(colors));
            let operand = |input: &usize| serde_json::json!({"operand_index": input + scalars, "color": 0});
            let operands: Vec<_> = inputs.iter().map(operand).collect();
            assert_eq!(config.get("input_memory_space_colors"), of(&operands).as_ref(), "{id} {}", kernel.name);
            // An output over such an operand is in the same place.
            let over = kernel.aliases.iter().filter(|(operand, _)| inputs.contains(&(operand - scalars)));
            let over = over.map(|(_, output)| serde_json::json!({"shape_index": [output], "color": 0}));
            let over: Vec<_> = over.collect();
            assert_eq!(config.get("output_memory_space_colors"), of(&over).as_ref(), "{id} {}", kernel.name);
            written += inputs.len();
        }
    }
    assert_eq!(written, 2, "the one-pass kernel takes each target's logit out of its window");
}
