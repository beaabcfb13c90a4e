//! The text that libtpu is given for every tile kernel, run by the interpreter and judged against the reference. No
//! plugin takes part: what surrounds a kernel on a device is computed here, in f64.

#[path = "common/recipes.rs"]
mod recipes;

use assay::conformance::generate::{Recipe, Regime};
use assay::conformance::judge::judge;
use assay::conformance::report::explain;
use assay::conformance::tolerance::Tolerances;
use assay::implementation::Implementation;
use assay::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay::reference;
use assay::spec::{LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides};
use assay::tpu::interpret::{self, Array};
use assay::xla::{ANY_DEVICE, Core, TpuKernel, Xla};
use half::{bf16, f16};
use ndarray::{Array2, Array3, arr0};
use proptest::prelude::*;

/// Columns around registers, chunks of several trips, several windows, and rows that no block divides.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [2, 3, 127], [1, 17, 128], [3, 1, 129], [2, 9, 2049], [1, 33, 1031], [1, 2, 9001], [1, 1, 33_001]];

fn kernels(id: &str, spec: &LossSpec, shape: Shape, dtype: Dtype, core: Core) -> Vec<TpuKernel> {
    let all = Xla::all(None);
    let implementation = all.iter().find(|implementation| implementation.id() == id).unwrap();
    implementation.kernels_for(spec, shape, dtype, core).unwrap()
}

/// Runs a kernel on operands given by name.
fn run(kernel: &TpuKernel, operands: &[(&str, Vec<u8>)]) -> Result<Vec<Vec<u8>>, String> {
    let given = kernel.operands.iter().map(|operand| {
        let (_, bytes) = operands.iter().find(|(name, _)| *name == operand.name).expect("every operand is given");
        Array { element: operand.dtype, shape: operand.shape.clone(), bytes: bytes.clone() }
    });
    let results: Vec<_> = kernel.results.iter().map(|result| (result.dtype, result.shape.clone())).collect();
    let arrays = interpret::run(&kernel.text, given.collect(), &results, &kernel.aliases);
    Ok(arrays.map_err(|error| format!("{}: {error}", kernel.name))?.into_iter().map(|array| array.bytes).collect())
}

fn bytes_of<const N: usize>(values: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
    values.into_iter().flatten().collect()
}

fn f32_bytes(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    bytes_of(values.into_iter().map(|x| (x as f32).to_le_bytes()))
}

fn f32s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks(4).map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap()))).collect()
}

fn logits_bytes(logits: &FloatArray<ndarray::Ix3>) -> Vec<u8> {
    match logits {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
        FloatArray::Bf16(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
        FloatArray::F16(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
    }
}

fn logits_of(bytes: &[u8], shape: Shape, dtype: Dtype) -> FloatArray<ndarray::Ix3> {
    let extents = (shape.batch, shape.tokens, shape.vocab);
    let two = |pair: &[u8]| [pair[0], pair[1]];
    match dtype {
        Dtype::F64 => unreachable!("no kernel returns f64"),
        Dtype::F32 => {
            let values = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
        Dtype::Bf16 => {
            let values = bytes.chunks(2).map(|pair| bf16::from_le_bytes(two(pair)));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
        Dtype::F16 => {
            let values = bytes.chunks(2).map(|pair| f16::from_le_bytes(two(pair)));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
    }
}

/// Columns of a `[B,T,8]` array, token by token.
struct PerToken {
    values: Vec<f64>,
    names: &'static [&'static str],
}

impl PerToken {
    fn new(bytes: &[u8], names: &'static [&'static str]) -> Self {
        Self { values: f32s(bytes), names }
    }

    fn at(&self, name: &str, token: usize) -> f64 {
        let column = self.names.iter().position(|other| *other == name).expect("a column");
        self.values[token * 8 + column]
    }
}

/// A `[B,T,8]` array, NaN in columns that have no name.
fn per_token(names: &[&str], tokens: usize, value: impl Fn(&str, usize) -> f64) -> Vec<u8> {
    let place = |token: usize, column: usize| names.get(column).map_or(f64::NAN, |name| value(name, token));
    f32_bytes((0..tokens).flat_map(|token| (0..8).map(move |column| (token, column))).map(|(t, c)| place(t, c)))
}

/// A batch with what a device computes around the kernel.
struct Around<'p> {
    spec: &'p LossSpec,
    problem: &'p Problem,
    shape: Shape,
    mask: Vec<bool>,
    count: f64,
    /// Whether the kernel is told of one column more than there are.
    spoil: bool,
}

impl<'p> Around<'p> {
    fn new(spec: &'p LossSpec, problem: &'p Problem) -> Self {
        let mask: Vec<bool> = problem.mask.iter().copied().collect();
        let count = mask.iter().filter(|&&counts| counts).count() as f64;
        Self { spec, problem, shape: problem.shape(), mask, count, spoil: false }
    }

    /// What a token's loss is multiplied by.
    fn weight(&self, token: usize) -> f64 {
        if !self.mask[token] {
            return 0.0;
        }
        let rows = self.problem.mask.outer_iter().map(|row| row.iter().filter(|&&counts| counts).count());
        let rows: Vec<usize> = rows.collect();
        let filled = rows.iter().filter(|&&count| count > 0).count();
        let of_row = rows[token / self.shape.tokens] as f64;
        1.0 / match self.spec.reduction {
            Reduction::TokenMean => self.count,
            Reduction::SequenceMean { rows: Rows::All } => self.shape.batch as f64 * of_row,
            Reduction::SequenceMean { rows: Rows::NonEmpty } => filled as f64 * of_row,
            Reduction::FixedLength { rows: Rows::All, length: Some(max_length) } => {
                (self.shape.batch * max_length) as f64
            }
            Reduction::Normalizer(value) => value,
            other => unreachable!("{other:?} is not drawn"),
        }
    }

    fn entropy_factor(&self) -> f64 {
        -self.spec.entropy_coef / self.count.max(1.0)
    }

    fn ids(&self) -> Vec<u8> {
        bytes_of(self.problem.ids.iter().map(|&id| (id as i32).to_le_bytes()))
    }

    fn token(&self, values: Option<&Array2<f64>>, token: usize) -> f64 {
        let at = (token / self.shape.tokens, token % self.shape.tokens);
        values.map_or(f64::NAN, |values| values[at])
    }

    fn advantage(&self, token: usize) -> f64 {
        self.problem.advantages.at(token / self.shape.tokens, token % self.shape.tokens)
    }

    fn tokens(&self) -> usize {
        self.shape.batch * self.shape.tokens
    }

    fn candidate(
        &self,
        logp: impl Fn(usize) -> f64,
        entropy: impl Fn(usize) -> f64,
        loss: impl Fn(usize) -> f64,
        dlogits: &[u8],
    ) -> Candidate {
        let total: f64 = (0..self.tokens()).filter(|&i| self.mask[i]).map(|i| self.weight(i) * loss(i)).sum();
        let bonus: f64 = (0..self.tokens()).filter(|&i| self.mask[i]).map(|i| self.entropy_factor() * entropy(i)).sum();
        let array = |of: &dyn Fn(usize) -> f64| {
            let values = (0..self.tokens()).map(|i| if self.mask[i] { of(i) as f32 } else { 0.0 }).collect();
            Some(Array2::from_shape_vec((self.shape.batch, self.shape.tokens), values).unwrap().into())
        };
        Candidate {
            loss: arr0((total + bonus) as f32).into(),
            dlogits: logits_of(dlogits, self.shape, self.problem.logits.dtype()),
            logp: array(&logp),
            entropy: array(&entropy),
            token_loss: array(&loss),
            metrics: None,
        }
    }

    fn one_pass(&self, core: Core) -> Result<Candidate, String> {
        let kernel = &mut kernels("tile-one-pass", self.spec, self.shape, self.problem.logits.dtype(), core)[0];
        if self.spoil {
            let columns = |columns: usize| format!("{{value = {columns} : i32}}");
            kernel.text = kernel.text.replace(&columns(self.shape.vocab), &columns(self.shape.vocab + 1));
        }
        let Objective::PpoClip(clip) = &self.spec.objective else { unreachable!("only PPO-clip is drawn") };
        let numbers = kernel.operands.iter().find(|operand| operand.name == "numbers").unwrap().columns;
        let numbers = f32_bytes(numbers.iter().map(|&name| match name {
            "low" => 1.0 - clip.epsilon_low,
            "high" => 1.0 + clip.epsilon_high,
            "delta" => clip.delta.unwrap_or(f64::INFINITY),
            "dual_clip" => clip.dual_clip.unwrap_or(f64::INFINITY),
            "beta" => self.spec.kl.as_ref().map_or(0.0, |kl| kl.beta),
            "inverse_temperature" => 1.0 / self.spec.temperature,
            "entropy_factor" => self.entropy_factor(),
            other => panic!("{other}: not known here"),
        }));
        let given = kernel.operands.iter().find(|operand| operand.name == "tokens").unwrap().columns;
        let tokens = per_token(given, self.tokens(), |name, token| match name {
            "advantage" => self.advantage(token),
            "old_logp" => self.token(self.problem.old_logp.as_ref(), token),
            "ref_logp" => self.token(self.problem.ref_logp.as_ref(), token),
            "weight" => self.weight(token),
            "mask" => f64::from(u8::from(self.mask[token])),
            other => panic!("{other}: not known here"),
        });
        let logits = logits_bytes(&self.problem.logits);
        let outputs =
            run(kernel, &[("ids", self.ids()), ("numbers", numbers), ("logits", logits), ("tokens", tokens)])?;
        let results = PerToken::new(&outputs[1], kernel.results[1].columns);
        let of = |name: &'static str| {
            let results = &results;
            move |token: usize| results.at(name, token)
        };
        Ok(self.candidate(of("logp"), of("entropy"), of("token_loss"), &outputs[0]))
    }

    /// For plain PPO-clip: the derivative of a token's loss is not the kernels' here.
    fn two_pass(&self, core: Core) -> Result<Candidate, String> {
        let dtype = self.problem.logits.dtype();
        let [statistics, dlogits] = &kernels("tile-two-pass", self.spec, self.shape, dtype, core)[..] else {
            panic!("two kernels")
        };
        let inverse = 1.0 / self.spec.temperature;
        let shared = vec![
            ("inverse_temperature", f32_bytes([inverse])),
            ("columns", bytes_of([(self.shape.vocab as i32).to_le_bytes()])),
            ("logits", logits_bytes(&self.problem.logits)),
            ("ids", self.ids()),
        ];
        let outputs = run(statistics, &shared)?;
        let sums = PerToken::new(&outputs[0], statistics.results[0].columns);
        let two = self.spec.temperature != 1.0 && self.spec.temperature_divides == TemperatureDivides::Logp;
        let softmax = |token: usize, names: [&str; 2], inverse: f64| {
            let gap = (sums.at("max", token) - sums.at("target_logit", token)) * inverse;
            let (others, target) = (sums.at(names[0], token), (-gap).exp());
            let sum = others + target;
            let weighted = -std::f64::consts::LN_2 * sums.at(names[1], token);
            let mean_gap = (weighted + if target == 0.0 { 0.0 } else { target * gap }) / sum;
            Softmax { gap, others, sum, log_sum: (others + (target - 1.0)).ln_1p(), mean_gap }
        };
        let of_entropy = |token| softmax(token, ["others", "weighted"], inverse);
        let of_logp =
            |token| if two { softmax(token, ["logp_others", "logp_weighted"], 1.0) } else { of_entropy(token) };
        let logp = |token: usize| {
            let Softmax { gap, log_sum, .. } = of_logp(token);
            -(gap + log_sum) * if two { inverse } else { 1.0 }
        };
        let entropy = |token: usize| of_entropy(token).log_sum + of_entropy(token).mean_gap;
        let Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, .. }) = self.spec.objective else {
            unreachable!("only PPO-clip is drawn")
        };
        let loss_and_grad = |token: usize| {
            let old = if self.spec.old_logp == OldLogp::Given {
                self.token(self.problem.old_logp.as_ref(), token)
            } else {
                logp(token)
            };
            let (ratio, a) = ((logp(token) - old).exp(), self.advantage(token));
            let clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high);
            if clipped * a < ratio * a { (-clipped * a, 0.0) } else { (-ratio * a, -ratio * a) }
        };
        let scales = dlogits.operands.iter().find(|operand| operand.name == "scales").unwrap().columns;
        let scales = per_token(scales, self.tokens(), |name, token| {
            let (policy, bonus) = (of_logp(token), of_entropy(token));
            let factor = self.weight(token) * loss_and_grad(token).1 * inverse;
            let bonus_factor = self.entropy_factor() * inverse / bonus.sum;
            match name {
                "max" => sums.at("max", token),
                "share" => -factor / policy.sum,
                "others" => policy.others,
                "mask" => f64::from(u8::from(self.mask[token])),
                "bonus" => bonus_factor,
                "mean_gap" => bonus.mean_gap,
                other => panic!("{other}: not known here"),
            }
        });
        let mut given = shared;
        given.push(("scales", scales));
        let outputs = run(dlogits, &given)?;
        Ok(self.candidate(logp, entropy, |token| loss_and_grad(token).0, &outputs[0]))
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
fn check(id: &str, spec: &LossSpec, recipe: &Recipe, core: Core) -> Result<(), String> {
    let problem = recipe.problem(spec).map_err(|error| error.to_string())?;
    let around = Around::new(spec, &problem);
    let candidate = match id {
        "tile-one-pass" => around.one_pass(core)?,
        _ => around.two_pass(core)?,
    };
    let reference = reference::evaluate(spec, &problem).unwrap();
    for verdict in judge(&reference, &candidate, "tile", Tolerances::builtin()).unwrap() {
        if !verdict.passed() {
            return Err(format!(
                "{id} {recipe:?} {spec:?}\n{}",
                explain(&verdict, &reference, &problem, &format!("{recipe:?}"), "cargo test --test mosaic_kernels")
            ));
        }
    }
    Ok(())
}

/// The kernel whose text says that the array has one column more than it has: its edge is poison, and shows.
#[test]
fn nonfinite_outputs_of_a_text_that_reads_a_column_past_the_edge() {
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [1, 5, 130],
        dtype: Dtype::F32,
        regime: Regime::ALL[0],
        seed: 1,
        old_logp_noise_scale: 0.1,
        masked_garbage: false,
    };
    let problem = recipe.problem(&spec).unwrap();
    for beyond in [false, true] {
        let mut around = Around::new(&spec, &problem);
        around.spoil = beyond;
        let candidate = around.one_pass(ANY_DEVICE).unwrap();
        let logp = candidate.logp.unwrap();
        let read = around.mask.iter().enumerate().filter(|(_, counts)| **counts);
        let mut values = read.map(|(token, _)| logp.at(0, token));
        assert!(if beyond { values.all(f64::is_nan) } else { values.all(f64::is_finite) });
    }
}

/// What surrounds the two-pass kernels here knows this much of the loss.
fn plain(spec: &LossSpec) -> LossSpec {
    let Objective::PpoClip(clip) = &spec.objective else { unreachable!("only PPO-clip is drawn") };
    let clip = PpoClip { delta: None, dual_clip: None, ..clip.clone() };
    LossSpec { objective: Objective::PpoClip(clip), kl: None, ..spec.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn all_outputs_one_pass_text_any_spec_match_reference(spec in recipes::any_spec(), recipe in recipes::any_recipe()) {
        check("tile-one-pass", &spec, &recipe, ANY_DEVICE).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn all_outputs_two_pass_text_any_spec_match_reference(spec in recipes::any_spec(), recipe in recipes::any_recipe()) {
        check("tile-two-pass", &plain(&spec), &recipe, ANY_DEVICE).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn all_outputs_text_awkward_shapes_match_reference() {
    let spec = LossSpec { entropy_coef: 0.02, temperature: 0.8, ..LossSpec::default() };
    for (shape, regime) in SHAPES.into_iter().zip(Regime::ALL.into_iter().cycle()) {
        for dtype in Dtype::KERNEL {
            let recipe = Recipe { shape, dtype, regime, seed: 7, old_logp_noise_scale: 0.1, masked_garbage: true };
            for id in ["tile-one-pass", "tile-two-pass"] {
                check(id, &spec, &recipe, ANY_DEVICE).unwrap();
            }
        }
    }
}

/// A core that has no bf16 arithmetic, and so little VMEM that a block has half as many rows.
#[test]
fn all_outputs_text_for_a_lesser_core_match_reference() {
    let core = Core { vmem_bytes: 7 << 20, bf16_arithmetic: false };
    let recipe = Recipe {
        shape: [1, 40, 9001],
        dtype: Dtype::Bf16,
        regime: Regime::ALL[0],
        seed: 3,
        old_logp_noise_scale: 0.1,
        masked_garbage: true,
    };
    for id in ["tile-one-pass", "tile-two-pass"] {
        check(id, &LossSpec::default(), &recipe, core).unwrap();
    }
}
