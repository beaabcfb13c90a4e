//! One implementation on one device count, judged on problems of many kinds.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};

use assay::implementation::{Implementation, RunError};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::invariance::Invariance;
use assay::judge::packed::Twins;
use assay::judge::report::on_devices;
use assay::judge::tolerance::Limits;
use assay::judge::variants::Variant;
use assay::parts;
use assay::problem::{Advantages, Candidate, Dtype, FloatArray, Problem, Shape};
use assay::spec::{
    Averaging, Kl, KlEstimator, LogitsTransform, LossSpec, Objective, OffPolicyMask, OldLogp, PpoClip, Ratio,
    RatioLevel, Reduction, Rows, Support, TemperatureDivides,
};
use assay::suites;
use assay::suites::supported as variants;
use assay_testkit::JudgedProblem;
use libtest_mimic::Failed;
use ndarray::{Axis, Ix2};

use super::{JUDGED, STRUCTURES, structures};

/// A check of one implementation on one device count, which returns how many cases it judged.
pub(crate) type Check = fn(&Run) -> Result<usize, Failed>;

/// A problem with garbage under its mask, and the usual distance between the policies.
pub(crate) fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64) -> Recipe {
    Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

/// Qwen's vocabulary, 151,936 = 128 × 1187, in three regimes.
fn qwen() -> &'static [(Recipe, JudgedProblem<'static>)] {
    static KNOWN: OnceLock<Vec<(Recipe, JudgedProblem<'static>)>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let spec = Box::leak(Box::new(LossSpec { entropy_coef: 0.01, temperature: 0.7.into(), ..LossSpec::default() }));
        let of = |regime| {
            let recipe = recipe([1, 8, 151_936], Dtype::Bf16, regime, 1);
            let problem: &Problem = Box::leak(Box::new(recipe.problem(spec).expect("a valid recipe")));
            (recipe, JudgedProblem::new(spec, problem).expect("a valid problem"))
        };
        [Regime::Small, Regime::Peaked, Regime::Confident].map(of).into()
    })
}

/// Whether `|ref_logp − logp|` is at its kink to the last bit. XLA's CPU compiler works logp out twice in the loops of a tile kernel, for
/// the target and for the other columns, rounds it in two ways, and finds two signs: the row is then on no side of the kink.
fn at_a_kink((spec, recipe): &(LossSpec, Recipe)) -> bool {
    recipe.old_logp_noise_scale == 0.0 && spec.kl.as_ref().is_some_and(|kl| kl.estimator == KlEstimator::Abs)
}

/// Logp and entropy of a kernel that computes nothing else, of a name and a class.
pub(crate) fn forward_alone(
    [name, class]: &[&str; 2],
    kernel: impl Fn(&LossSpec, &Problem) -> Result<[FloatArray<Ix2>; 2], RunError>,
) -> Result<usize, Failed> {
    let mut judged = 0;
    for dtype in Dtype::KERNEL {
        for (spec, recipe) in suites::device_cases(dtype, 1, 5) {
            let LossSpec { temperature, temperature_divides, .. } = spec;
            let spec = LossSpec { temperature, temperature_divides, ..LossSpec::from_cotangents(false) };
            let problem = recipe.problem(&spec).expect("a valid recipe");
            let known = JudgedProblem::new(&spec, &problem).expect("a valid problem");
            let [logp, entropy] = kernel(&spec, &problem)?.map(Some);
            let candidate = Candidate {
                loss: None,
                gradient: (),
                logp,
                logp_of_others: None,
                entropy,
                token_loss: None,
                metrics: None,
            };
            let verdicts = known.verdicts_of_forward(&candidate, &Limits::for_class(class)?)?;
            if let Some(verdict) = verdicts.iter().find(|verdict| !verdict.passed()) {
                return Err(known.explain(verdict, name, "this test").to_string().into());
            }
            judged += 1;
        }
    }
    Ok(judged)
}

/// One implementation on one device count. Its checks return how many cases were judged.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) implementation: Arc<dyn Implementation>,
    pub(crate) devices: usize,
    pub(crate) plugin: PathBuf,
}

impl Run {
    pub(crate) fn on(&self, devices: usize) -> Self {
        Self { devices, ..self.clone() }
    }

    fn takes(&self, spec: &LossSpec, [batch, tokens, vocab]: [usize; 3], dtype: Dtype) -> bool {
        let shape = Shape { batch, tokens, vocab };
        self.implementation.supports(spec, shape, dtype, self.devices).is_ok()
    }

    /// Judges one case, which is supported.
    fn judge(&self, spec: &LossSpec, recipe: &Recipe) -> Result<Candidate, Failed> {
        let problem = recipe.problem(spec).map_err(|error| format!("{error}: {recipe:?} {spec:?}"))?;
        self.judge_known(&JudgedProblem::new(spec, &problem).expect("a valid problem"), recipe)
    }

    fn judge_known(&self, known: &JudgedProblem, recipe: &Recipe) -> Result<Candidate, Failed> {
        let (spec, id) = (known.spec, self.implementation.id());
        let name = on_devices(id, self.devices);
        let judged = known.run(&*self.implementation, self.devices);
        let judged = judged.map_err(|error| format!("{name}: {error}: {recipe:?} {spec:?}"))?;
        let config = serde_json::json!({
            "reason": "…",
            "batch": { "generate": recipe },
            "spec": spec,
            "kernel": { "enabled": true, "impl": id, "devices": self.devices },
        });
        let plugin = self.plugin.display();
        let replay = format!("save as NAME.json and run `assay gradcheck --plugin {plugin} --config` on it: {config}");
        if let Some(failure) = known.failures(&judged, &name, &replay).into_iter().next() {
            return Err(failure.into());
        }
        let mut all = JUDGED.lock().unwrap_or_else(PoisonError::into_inner);
        all.cases += 1;
        all.placed.insert((id.into(), self.devices, recipe.dtype));
        if id == "xla" {
            all.specs.spec(spec);
        }
        drop(all);
        Ok(judged.outcome)
    }

    pub(crate) fn any_spec(&self, counts: &[usize]) -> Result<usize, Failed> {
        self.specs(structures(), counts)
    }

    /// Random specs, each in another dtype and in every regime, on each of `counts`: each answer within the gates of the
    /// reference, and so of every other; shares of tokens, which are counts, the same to the bit. Where there are few specs, the first is
    /// run on fewest and most devices, and each other on another count. With `--nocapture`, which other outputs keep their bits.
    pub(crate) fn specs(&self, specs: usize, counts: &[usize]) -> Result<usize, Failed> {
        const DRAWN: usize = 32;
        let mut judged = 0;
        // Each implementation begins at another shape.
        let seed = self.implementation.id().bytes().map(u64::from).sum::<u64>();
        for i in 0..specs {
            let dtype = Dtype::KERNEL[i % Dtype::KERNEL.len()];
            let counts = match counts {
                [fewest, .., most] if specs <= STRUCTURES && i == 0 => vec![*fewest, *most],
                [_, _, ..] if specs <= STRUCTURES => vec![counts[i % counts.len()]],
                all => all.to_vec(),
            };
            let cases = suites::device_cases(dtype, DRAWN, seed + i as u64);
            let takes = |regimes: &&[(LossSpec, Recipe)]| {
                let (spec, recipe) = &regimes[0];
                let computed = counts.iter().all(|&devices| self.on(devices).takes(spec, recipe.shape, dtype));
                computed && !(self.implementation.class() == "tile" && regimes.iter().any(at_a_kink))
            };
            let Some(regimes) = cases.chunks(Regime::FINITE.len()).find(takes) else {
                return Err(format!("none of {DRAWN} specs in {dtype} is supported").into());
            };
            for (spec, recipe) in regimes {
                let mut first: Option<(usize, Candidate)> = None;
                for &devices in &counts {
                    let outcome = self.on(devices).judge(spec, recipe)?;
                    judged += 1;
                    match &first {
                        None => first = Some((devices, outcome)),
                        Some((fewest, first)) => self.agree((*fewest, first), (devices, &outcome))?,
                    }
                }
            }
        }
        Ok(judged)
    }

    fn agree(&self, (fewest, first): (usize, &Candidate), (devices, other): (usize, &Candidate)) -> Result<(), Failed> {
        let shares = |outcome: &Candidate| {
            let metrics = outcome.metrics.expect("ours return all outputs");
            [metrics.clip_low, metrics.clip_high, metrics.clip_region]
        };
        if shares(first) != shares(other) {
            let (one, many) = (shares(first), shares(other));
            return Err(format!("clip shares {one:?} on {fewest} devices, {many:?} on {devices}").into());
        }
        let bits = Invariance::between(first, other);
        println!("{} ×{devices} against ×{fewest}: {bits:?}", self.implementation.id());
        Ok(())
    }

    pub(crate) fn qwen_vocabulary(&self) -> Result<usize, Failed> {
        for (recipe, known) in qwen() {
            self.judge_known(known, recipe)?;
        }
        Ok(qwen().len())
    }

    /// Five sequences in one row, one of them without a token, whose ends no device's part and no tile ends at.
    pub(crate) fn packed(&self) -> Result<usize, Failed> {
        let rows = Averaging { reduction: Reduction::SequenceMean { rows: Rows::NonEmpty }, denominator_epsilon: 0.5 };
        let by_token = LossSpec {
            reduction: Reduction::SequenceMean { rows: Rows::All },
            kl: Some(Kl { averaging: Some(rows), ..Kl::plain(0.05, KlEstimator::K3) }),
            entropy_coef: 0.01,
            entropy_averaging: Some(rows),
            ..LossSpec::default()
        };
        let by_sequence = LossSpec {
            ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
            off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour: OldLogp::Given }),
            ..by_token.clone()
        };
        let mut judged = 0;
        for (spec, dtype) in [(by_token, Dtype::F32), (by_sequence, Dtype::Bf16)] {
            let recipe = recipe([5, 7, 131], dtype, Regime::Normal, 12);
            let mut padded = recipe.problem(&spec)?;
            padded.mask.row_mut(3).fill(false);
            let twins = Twins::from_padded(&spec, &padded).expect("no weights");
            let lengths: Vec<usize> = twins.packed.sequences().iter().map(|sequence| sequence.tokens.len()).collect();
            assert!(lengths.contains(&0) && lengths.iter().sum::<usize>() > 2 * self.devices, "{lengths:?}");
            if self.takes(&twins.spec, [1, twins.packed.mask.ncols(), 131], dtype) {
                self.judge_known(&JudgedProblem::new(&twins.spec, &twins.packed)?, &recipe)?;
                judged += 1;
            }
        }
        Ok(judged)
    }

    /// Products of seventeen ratios below and beyond f32's largest number, e^88.72, whichever sign the advantage has: the clip wins.
    pub(crate) fn products_beyond_f32(&self) -> Result<usize, Failed> {
        const SUMS: [f64; 4] = [88.0, 88.7, 88.8, 200.0];
        let spec = LossSpec {
            objective: Objective::PpoClip(PpoClip { dual_clip: Some(3.0), ..PpoClip::default() }),
            ratio: Ratio { level: RatioLevel::SequenceProduct, ..Ratio::default() },
            reduction: Reduction::SequenceMean { rows: Rows::All },
            ..LossSpec::default()
        };
        let recipe = recipe([8, 17, 131], Dtype::F32, Regime::Normal, 3);
        let mut problem = recipe.problem(&spec)?;
        problem.advantages = Advantages::Sequence((0..8).map(|b| if b < 4 { 0.7 } else { -1.3 }).collect());
        let logp = assay::reference::evaluate(&spec, &problem)?.outcome().logp.to_f64();
        let counts = problem.mask.map_axis(Axis(1), |row| row.iter().filter(|counts| **counts).count() as f64);
        let old_logp = problem.old_logp.as_mut().expect("a recipe has one");
        for ((b, t), old_logp) in old_logp.indexed_iter_mut() {
            *old_logp = logp[[b, t]] - SUMS[b % 4] / counts[b];
        }
        let known = JudgedProblem::new(&spec, &problem).expect("a valid problem");
        let judged = self.judge_known(&known, &recipe)?;
        let loss = judged.loss.expect("ours return all outputs").to_f64();
        assert!(loss.iter().all(|loss| loss.is_finite()), "{loss}");
        Ok(1)
    }

    /// One token, one column, vocabularies around registers and without a common factor with anything, rows that no block
    /// divides. What is cut takes those with something for each device, and not Qwen's vocabulary.
    pub(crate) fn awkward_shapes(&self) -> Result<usize, Failed> {
        let shapes = [[1, 1, 1], [1, 1, 127], [3, 7, 128], [1, 1, 129], [2, 17, 2049], [1, 8, 151_643]];
        let spec = LossSpec { kl: Some(Kl::plain(0.05, KlEstimator::K3)), entropy_coef: 0.01, ..LossSpec::default() };
        let mut judged = 0;
        for (i, shape) in shapes.into_iter().enumerate() {
            let dtype = Dtype::KERNEL[(i + self.devices) % Dtype::KERNEL.len()];
            let regime = Regime::FINITE[(i + self.implementation.id().len()) % Regime::FINITE.len()];
            let recipe = recipe(shape, dtype, regime, i as u64);
            let is_whole = self.devices == 1;
            if self.takes(&spec, shape, recipe.dtype) && (is_whole || shape[2] < 10_000) {
                self.judge(&spec, &recipe)?;
                judged += 1;
            }
        }
        Ok(judged)
    }

    /// Judges `spec` in every finite regime, in a dtype that the implementation's id chooses.
    fn every_regime(&self, spec: &LossSpec) -> Result<usize, Failed> {
        let dtype = Dtype::KERNEL[self.implementation.id().len() % Dtype::KERNEL.len()];
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            self.judge(spec, &recipe([4, 8, 131], dtype, regime, seed))?;
        }
        Ok(Regime::FINITE.len())
    }

    /// A cap and a bias, and columns that are left out: a few, and all from one on, which several of eight devices have alone. Targets
    /// among them are put back.
    pub(crate) fn changed_logits(&self) -> Result<usize, Failed> {
        let spec = LossSpec {
            logits: LogitsTransform { scale: 0.5, softcap: Some(5.0), bias: true },
            support: Support { vocab: Some(70), excluded_ids: vec![0, 3, 64], keep_sampled: true, kept: None },
            temperature: 0.8.into(),
            temperature_divides: TemperatureDivides::Logp,
            entropy_coef: 0.02,
            ..LossSpec::default()
        };
        self.every_regime(&spec)
    }

    /// Logp of four ids a token, some of them the same, and its gradient, with a cap, a bias and columns that are left out.
    pub(crate) fn several_ids(&self) -> Result<usize, Failed> {
        let spec = LossSpec {
            logits: LogitsTransform { scale: -0.5, softcap: Some(20.0), bias: true },
            support: Support { vocab: Some(129), excluded_ids: vec![0, 3, 64], keep_sampled: false, kept: None },
            temperature: 0.8.into(),
            ids_per_token: 4,
            ..LossSpec::from_cotangents(false)
        };
        self.every_regime(&spec)
    }

    /// In two parts, by the limits of the whole.
    pub(crate) fn parts(&self) -> Result<usize, Failed> {
        let tokens = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
        let spec = LossSpec {
            reduction: Reduction::SequenceMean { rows: Rows::NonEmpty },
            kl: Some(Kl { averaging: Some(tokens), ..Kl::plain(0.1, KlEstimator::K3) }),
            entropy_coef: 0.02,
            ..LossSpec::default()
        };
        let recipe = recipe([8, 8, 96], Dtype::F32, Regime::Normal, 5);
        let problem = recipe.problem(&spec)?;
        let known = JudgedProblem::new(&spec, &problem)?;
        let candidate = parts::run(&*self.implementation, &spec, &problem, 2, self.devices)?;
        let judged = known.judge(candidate, &Limits::for_class(self.implementation.class())?)?;
        let name = on_devices(self.implementation.id(), self.devices);
        match known.failures(&judged, &name, "this trial").into_iter().next() {
            Some(failure) => Err(failure.into()),
            None => Ok(1),
        }
    }

    /// Masks written as the lowest number of a dtype, in half of the columns; rows of nothing else; and rows around the largest
    /// number. Then tokens whose own logit is −∞: their ratio is 0, their logp −∞.
    pub(crate) fn extreme_logits(&self) -> Result<usize, Failed> {
        let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
        let recipe = |dtype| Recipe { masked_garbage: false, ..recipe([4, 8, 264], dtype, Regime::Normal, 1) };
        let mut judged = 0;
        for dtype in Dtype::KERNEL {
            let recipe = recipe(dtype);
            let mut problem = recipe.problem(&spec)?;
            let lowest = match dtype {
                Dtype::F16 => f64::from(half::f16::MIN),
                Dtype::Bf16 => f64::from(half::bf16::MIN),
                _ => f64::from(f32::MIN),
            };
            let mut logits = problem.logits.to_f64();
            for ((b, t, v), x) in logits.indexed_iter_mut() {
                let sampled = usize::try_from(problem.ids[[b, t]])? == v;
                match b {
                    0 if v % 2 == 0 && !sampled => *x = lowest,
                    1 => *x = lowest,
                    2 => *x = -lowest - if sampled { 0.0 } else { -lowest / 256.0 },
                    _ => {}
                }
            }
            problem.logits = FloatArray::rounded_from(&logits, dtype);
            self.judge_known(&JudgedProblem::new(&spec, &problem)?, &recipe)?;
            self.target_holes(&spec, &recipe)?;
            judged += 2;
        }
        // Columns that a sampler cut off.
        let recipe_of_sets = recipe(Dtype::Bf16);
        let problem = suites::sampler::within_top_k_and_top_p(&spec, &recipe_of_sets.problem(&spec)?, 20, 0.95);
        self.judge_known(&JudgedProblem::new(&spec, &problem)?, &recipe_of_sets)?;
        judged += 1;
        // Another softmax for the bonus than for logp.
        if self.devices == 1 {
            let of_logp =
                LossSpec { temperature: 0.7.into(), temperature_divides: TemperatureDivides::Logp, ..spec.clone() };
            self.target_holes(&of_logp, &recipe(Dtype::Bf16))?;
            judged += 1;
        }
        Ok(judged)
    }

    fn target_holes(&self, spec: &LossSpec, recipe: &Recipe) -> Result<(), Failed> {
        let recipe = Recipe { regime: Regime::TargetHoles, masked_garbage: true, ..recipe.clone() };
        let problem = recipe.problem(spec)?;
        let known = JudgedProblem::new(spec, &problem)?;
        let outcome = self.judge_known(&known, &recipe)?;
        let logp = outcome.logp.as_ref().ok_or("no logp")?;
        let of_reference = |(b, t)| known.reference.token(b, t).map(|token| token.inputs.logp);
        let counting = problem.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
        let holes: Vec<_> = counting.filter(|&at| of_reference(at) == Some(f64::NEG_INFINITY)).collect();
        if holes.is_empty() || !known.reference.loss().is_finite() {
            return Err(format!("{recipe:?} shows little").into());
        }
        match holes.into_iter().find(|&(b, t)| logp.at(b, t) != f64::NEG_INFINITY) {
            Some((b, t)) => Err(format!("logp[{b},{t}] is {}: {recipe:?} {spec:?}", logp.at(b, t)).into()),
            None => Ok(()),
        }
    }

    /// Named choices of a spec, alone, each with its place among all.
    pub(crate) fn variants(&self, variants: Vec<(usize, Variant)>, shape: [usize; 3]) -> Result<usize, Failed> {
        const PROBLEMS: usize = 3;
        for (i, variant) in &variants {
            for step in 0..PROBLEMS {
                self.judge(&variant.spec, &Recipe { shape, ..variants::recipe(*i, step) })?;
            }
        }
        Ok(PROBLEMS * variants.len())
    }

    /// The named choices under which tokens of a row, or rows, share a number, where rows are cut as well as the batch:
    /// what differs from a program for one device is their sums.
    pub(crate) fn every_sum_over_tokens(&self) -> Result<usize, Failed> {
        let shares = |spec: &LossSpec| {
            spec.ratio.level != RatioLevel::Token
                || matches!(spec.objective, Objective::Vespo(_))
                || spec.off_policy_mask.is_some()
                || spec.reduction != Reduction::TokenMean
                || spec.entropy_averaging.is_some()
                || spec.kl.as_ref().is_some_and(|kl| kl.averaging.is_some())
        };
        let all = variants::supported(&*self.implementation, self.devices).into_iter().enumerate();
        // Six rows of six tokens: four devices a half of the columns, two for each half of the rows.
        self.variants(all.filter(|(_, variant)| shares(&variant.spec)).collect(), [6, 6, 33])
    }

    /// In `dtype`, or each in another.
    pub(crate) fn structures(&self, specs: Vec<LossSpec>, dtype: Option<Dtype>) -> Result<usize, Failed> {
        let mut judged = 0;
        for (i, spec) in specs.iter().enumerate() {
            // The last so far off that exponentials of a difference overflow.
            for (step, old_logp_noise_scale) in [0.5, 0.5, 60.0].into_iter().enumerate() {
                let recipe = variants::recipe(i, step);
                let dtype = dtype.unwrap_or(recipe.dtype);
                self.judge(spec, &Recipe { dtype, old_logp_noise_scale, ..recipe })?;
                judged += 1;
            }
        }
        Ok(judged)
    }
}
