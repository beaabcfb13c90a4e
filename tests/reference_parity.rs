//! The reference against what TRL, verl, Tunix, Liger and MLLM-JAX returned: `fixtures/parity/` holds the inputs and
//! outputs of their own functions, and [`table`] says which [`LossSpec`] each run was.
//!
//! float64 files differ from the reference by the order of summation only. float32 files carry f32's rounding through
//! every step; both are held to `κ · u · scale`, with `u` that of the file's dtype.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use assay::problem::{Advantages, Dtype, Extra, FloatArray, Problem, mask_from};
use assay::reference::{self, Reference, Token};
use assay::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides,
};
use ndarray::{Array1, Array2, Array3};
use serde::Deserialize;

/// How a peer's run is written as a spec: one line a file.
fn table() -> Vec<(&'static str, LossSpec)> {
    vec![
        // TRL: `grpo` counts empty rows.
        ("trl_grpo_basic", LossSpec { reduction: GRPO, ..clip(0.2, 0.28) }),
        ("trl_grpo_adv_per_token", LossSpec { advantages: AdvantageLevel::Token, reduction: GRPO, ..clip(0.2, 0.28) }),
        ("trl_grpo_symmetric_eps_T0.7", LossSpec { temperature: 0.7, reduction: GRPO, ..clip(0.2, 0.2) }),
        ("trl_grpo_empty_row", LossSpec { temperature: 1.3, reduction: GRPO, ..clip(0.2, 0.28) }),
        (
            "trl_grpo_entropy_bonus",
            LossSpec { temperature: 0.8, entropy_coef: 0.02, reduction: GRPO, ..clip(0.2, 0.2) },
        ),
        ("trl_grpo_old_none", LossSpec { old_logp: OldLogp::Current, reduction: GRPO, ..clip(0.2, 0.2) }),
        ("trl_grpo_kl", LossSpec { kl: kl(0.1, KlEstimator::K3), reduction: GRPO, ..clip(0.2, 0.2) }),
        ("trl_grpo_delta_tight", LossSpec { objective: delta(0.2, 0.7, 1.25), reduction: GRPO, ..LossSpec::default() }),
        ("trl_grpo_delta_wide", LossSpec { objective: delta(0.2, 0.28, 2.5), reduction: GRPO, ..LossSpec::default() }),
        ("trl_bnpo_basic", clip(0.2, 0.28)),
        ("trl_dapo_basic", LossSpec { reduction: Reduction::Normalizer(19.0), ..clip(0.2, 0.28) }),
        // 55 items over steps_per_generation / gradient_accumulation_steps = 2.
        (
            "trl_dapo_num_items",
            LossSpec { temperature: 0.6, reduction: Reduction::Normalizer(27.5), ..clip(0.2, 0.28) },
        ),
        ("trl_dr_grpo_basic", LossSpec { reduction: dr_grpo(16), ..clip(0.2, 0.2) }),
        (
            "trl_dr_grpo_kl",
            LossSpec { temperature: 1.3, kl: kl(0.1, KlEstimator::K3), reduction: dr_grpo(8), ..clip(0.2, 0.2) },
        ),
        ("trl_fused_grpo_T0.7", LossSpec { temperature: 0.7, entropy_coef: 0.01, reduction: GRPO, ..clip(0.2, 0.2) }),
        // Liger: as TRL.
        ("liger_grpo", LossSpec { reduction: GRPO, ..clip(0.2, 0.28) }),
        ("liger_grpo_delta", LossSpec { objective: delta(0.2, 0.7, 1.15), reduction: GRPO, ..LossSpec::default() }),
        ("liger_bnpo_kl", LossSpec { kl: kl(0.04, KlEstimator::K3), ..clip(0.2, 0.2) }),
        ("liger_dapo_items", LossSpec { temperature: 0.7, reduction: Reduction::Normalizer(47.0), ..clip(0.2, 0.28) }),
        ("liger_dr_grpo", LossSpec { reduction: dr_grpo(16), ..clip(0.2, 0.2) }),
        ("liger_linear_grpo", LossSpec { temperature: 0.7, reduction: GRPO, ..clip(0.2, 0.28) }),
        ("liger_triton_grpo", LossSpec { temperature: 0.9, reduction: GRPO, ..clip(0.2, 0.4) }),
        // Tunix: empty rows are left out of B.
        ("tunix_grpo_adv2d", LossSpec { advantages: AdvantageLevel::Token, ..clip(0.2, 0.2) }),
        ("tunix_grpo_default_kl", LossSpec { kl: kl(0.04, KlEstimator::K1), reduction: NON_EMPTY, ..clip(0.2, 0.2) }),
        ("tunix_grpo_dual_clip", LossSpec { reduction: NON_EMPTY, ..dual_clip(0.2, 0.28, 3.0) }),
        ("tunix_grpo_empty_row", LossSpec { reduction: NON_EMPTY, ..clip(0.2, 0.28) }),
        (
            "tunix_grpo_old_none",
            LossSpec {
                old_logp: OldLogp::Current,
                kl: kl(0.1, KlEstimator::K3),
                reduction: NON_EMPTY,
                ..clip(0.2, 0.2)
            },
        ),
        // Sums over tokens, mean over the 4 of 5 rows that have any.
        (
            "tunix_grpo_seq_sum",
            LossSpec { kl: kl(0.1, KlEstimator::K2), reduction: Reduction::Normalizer(4.0), ..clip(0.2, 0.2) },
        ),
        ("tunix_grpo_sum_norm", LossSpec { temperature: 1.2, reduction: Reduction::Normalizer(4.0), ..clip(0.2, 0.2) }),
        (
            "tunix_grpo_token_mean_low_var",
            LossSpec { temperature: 0.7, kl: kl(0.1, KlEstimator::K3), ..clip(0.2, 0.2) },
        ),
        ("tunix_grpo_token_scale", LossSpec { reduction: dr_grpo(5), ..clip(0.2, 0.28) }),
        // verl: dual clip at 3 always, per-token advantages.
        ("verl_vanilla_token_sum", LossSpec { reduction: Reduction::Normalizer(1.0), ..verl() }),
        ("verl_vanilla_seq_mean_token_sum", LossSpec { reduction: Reduction::Normalizer(4.0), ..verl() }),
        ("verl_vanilla_seq_mean_token_sum_norm", LossSpec { reduction: dr_grpo(5), ..verl() }),
        ("verl_vanilla_seq_mean_token_sum_norm_scale", LossSpec { reduction: dr_grpo(32), ..verl() }),
        // 50 tokens of the global batch over dp_size 2.
        ("verl_vanilla_global_batch", LossSpec { reduction: Reduction::Normalizer(25.0), ..verl() }),
        // MLLM-JAX: the temperature divides the log-probability.
        ("mllm_clip_higher", mllm(0.3, 1.0)),
        ("mllm_default", mllm(0.2, 1.0)),
        ("mllm_pallas_v97", mllm(0.3, 0.9)),
        ("mllm_temperature", mllm(0.3, 0.7)),
        ("mllm_temperature_1.5", mllm(0.3, 1.5)),
    ]
}

/// `κ` of float64 files; worst seen 7.1 (`verl_vanilla_global_batch`).
const LIMIT_F64: f64 = 12.0;
/// `κ` of float32 files; worst seen 14.6 (`trl_fused_grpo_T0.7`, whose online softmax rescales at every tile).
const LIMIT_F32: f64 = 24.0;

const GRPO: Reduction = Reduction::SequenceMean { rows: Rows::All };
const NON_EMPTY: Reduction = Reduction::SequenceMean { rows: Rows::NonEmpty };

fn dr_grpo(max_length: usize) -> Reduction {
    Reduction::FixedLength { rows: Rows::All, length: Some(max_length) }
}

fn ppo_clip(clip: PpoClip) -> LossSpec {
    LossSpec { objective: Objective::PpoClip(clip), ..LossSpec::default() }
}

fn clip(epsilon_low: f64, epsilon_high: f64) -> LossSpec {
    ppo_clip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() })
}

fn delta(epsilon_low: f64, epsilon_high: f64, delta: f64) -> Objective {
    Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta: Some(delta), ..PpoClip::default() })
}

fn dual_clip(epsilon_low: f64, epsilon_high: f64, c: f64) -> LossSpec {
    ppo_clip(PpoClip { epsilon_low, epsilon_high, dual_clip: Some(c), ..PpoClip::default() })
}

fn verl() -> LossSpec {
    LossSpec { advantages: AdvantageLevel::Token, ..dual_clip(0.2, 0.28, 3.0) }
}

fn mllm(epsilon_high: f64, temperature: f64) -> LossSpec {
    LossSpec { temperature, temperature_divides: TemperatureDivides::Logp, ..clip(0.2, epsilon_high) }
}

#[allow(clippy::unnecessary_wraps, reason = "it fills `LossSpec::kl`")]
fn kl(beta: f64, estimator: KlEstimator) -> Option<Kl> {
    Some(Kl::plain(beta, estimator))
}

/// The parts of a parity file that the comparison needs.
#[derive(Deserialize)]
struct Recorded {
    dtype: String,
    inputs: Inputs,
    expected: Expected,
}

#[derive(Deserialize)]
struct Inputs {
    logits: Vec<Vec<Vec<f64>>>,
    ids: Vec<Vec<i64>>,
    mask: Vec<Vec<f64>>,
    advantages: RecordedAdvantages,
    old_logps: Option<Vec<Vec<f64>>>,
    ref_logps: Option<Vec<Vec<f64>>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RecordedAdvantages {
    Sequence(Vec<f64>),
    Token(Vec<Vec<f64>>),
}

#[derive(Deserialize)]
struct Expected {
    loss: f64,
    logps: Vec<Vec<f64>>,
    entropy: Option<Vec<Vec<f64>>>,
    dlogits: Vec<Vec<Vec<f64>>>,
}

impl Recorded {
    fn dtype(&self) -> Dtype {
        match self.dtype.as_str() {
            "float64" => Dtype::F64,
            "float32" => Dtype::F32,
            other => panic!("dtype `{other}`: expected float64 or float32"),
        }
    }

    /// The inputs as the peer saw them: float32 files are decimals of f32 values.
    fn problem(&self) -> Problem {
        let Inputs { logits, ids, mask, advantages, old_logps, ref_logps } = &self.inputs;
        let dtype = self.dtype();
        let (batch, tokens, vocab) = (logits.len(), logits[0].len(), logits[0][0].len());
        let rounded = |values: &Vec<Vec<f64>>| matrix(values).mapv(|x| dtype.round(x));
        let flat = logits.iter().flatten().flatten().copied().collect();
        let logits = Array3::from_shape_vec((batch, tokens, vocab), flat).expect("[B][T][V]");
        Problem {
            logits: FloatArray::rounded_from(&logits, dtype),
            ids: matrix(ids),
            mask: mask_from("mask", &matrix(mask)).expect("a mask of 0 and 1"),
            advantages: match advantages {
                RecordedAdvantages::Sequence(a) => {
                    Advantages::Sequence(a.iter().map(|x| dtype.round(*x)).collect::<Array1<_>>())
                }
                RecordedAdvantages::Token(a) => Advantages::Token(rounded(a)),
            },
            old_logp: old_logps.as_ref().map(rounded),
            ref_logp: ref_logps.as_ref().map(rounded),
            extra: Extra::default(),
        }
    }
}

fn matrix<T: Clone>(rows: &[Vec<T>]) -> Array2<T> {
    Array2::from_shape_vec((rows.len(), rows[0].len()), rows.concat()).expect("rows of one length")
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/parity")
}

fn recorded(file: &str) -> Recorded {
    let path = folder().join(format!("{file}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What rounding in the peer's dtype can do to the derivative of a token's loss, in units of `u`: the terms before they
/// cancel, times the log-probabilities that enter through exponents.
fn grad_scale(spec: &LossSpec, token: &Token) -> f64 {
    let inputs = &token.inputs;
    let exponent = |other: f64| 1.0 + inputs.logp.abs() + other.abs();
    let kl = spec.kl.as_ref().zip(inputs.ref_logp);
    let kl = kl.map_or(0.0, |(kl, ref_logp)| kl.beta * (1.0 + token.kl.by_logp.abs()) * exponent(ref_logp));
    token.weight * (token.policy.by_log_ratio.abs() * exponent(inputs.old_logp) + kl)
}

/// As [`grad_scale`], of the token's share of the loss. A clipped token's loss is exact.
fn loss_scale(spec: &LossSpec, token: &Token, count: usize) -> f64 {
    let kl = spec.kl.as_ref().map_or(0.0, |kl| kl.beta * token.kl.value.abs());
    grad_scale(spec, token)
        + token.weight * (token.policy.value.abs() + kl)
        + spec.entropy_coef.abs() * token.entropy / count as f64
}

/// The largest error of a file in units of `u · scale`: its loss, logps, entropies and every entry of dlogits.
fn kappa(spec: &LossSpec, recorded: &Recorded) -> f64 {
    let u = if recorded.dtype() == Dtype::F64 { 2_f64.powi(-53) } else { 2_f64.powi(-24) };
    let problem = recorded.problem();
    let reference = reference::evaluate(spec, &problem).expect("a valid problem");
    let shape = reference.shape();
    let expected = &recorded.expected;
    let mut worst = Worst { u, kappa: 0.0 };
    let mut total_scale = 0.0;
    for (b, t) in (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t))) {
        let Some(token) = reference.token(b, t) else {
            assert!(expected.dlogits[b][t].iter().all(|x| *x == 0.0), "[{b},{t}] is masked and has a gradient");
            continue;
        };
        total_scale += loss_scale(spec, token, reference.count());
        worst.compare(expected.logps[b][t], token.inputs.logp, 1.0 + token.inputs.logp.abs());
        if let Some(entropy) = &expected.entropy {
            worst.compare(entropy[b][t], token.entropy, 1.0 + token.entropy);
        }
        compare_dlogits(&reference, &problem, (b, t), token, &expected.dlogits[b][t], &mut worst);
    }
    worst.compare(expected.loss, reference.loss(), total_scale);
    worst.kappa
}

struct Worst {
    u: f64,
    kappa: f64,
}

impl Worst {
    fn compare(&mut self, got: f64, expected: f64, scale: f64) {
        let error = (got - expected).abs();
        let kappa = if error == 0.0 { 0.0 } else { error / (self.u * scale) };
        // `max` would drop a NaN.
        self.kappa = if kappa > self.kappa || kappa.is_nan() { kappa } else { self.kappa };
    }
}

/// Peers take `1 − p_y` as a difference, so the target's scale is the whole of `∂loss/∂ℓ`; every other column's is that
/// times `p_j`.
fn compare_dlogits(
    reference: &Reference,
    problem: &Problem,
    (b, t): (usize, usize),
    token: &Token,
    expected: &[f64],
    worst: &mut Worst,
) {
    let spec = reference.spec();
    let grad = grad_scale(spec, token);
    let row = problem.logits.row(b, t);
    for (j, dlogit) in reference.dlogits_row(b, t).into_iter().enumerate() {
        let probability = |softmax: &reference::ScaledSoftmax| softmax.stats.probability(row[j] / softmax.divisor);
        let p = if j == token.id { 1.0 } else { probability(&token.logp_softmax) };
        let q = probability(&token.entropy_softmax);
        let bonus = reference.grad_entropy(token).abs() * q * (token.entropy - q.ln());
        worst.compare(expected[j], dlogit, (grad * p + bonus) / spec.temperature);
    }
}

#[test]
fn outcome_f64_peers_match_reference() {
    compare_files(Dtype::F64, LIMIT_F64);
}

#[test]
fn outcome_f32_peers_match_reference() {
    compare_files(Dtype::F32, LIMIT_F32);
}

fn compare_files(dtype: Dtype, limit: f64) {
    let mut failures = Vec::new();
    for (file, spec) in table() {
        let recorded = recorded(file);
        if recorded.dtype() != dtype {
            continue;
        }
        let kappa = kappa(&spec, &recorded);
        println!("{file}: {kappa:.2} u·scale");
        if kappa.is_nan() || kappa > limit {
            failures.push(format!("{file}: {kappa:.2e} u·scale, limit {limit}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn table_covers_every_parity_file() {
    let files = fs::read_dir(folder()).expect("fixtures/parity").map(|entry| entry.expect("an entry").path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let files: BTreeSet<String> =
        files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect();
    let rows = table();
    let listed: BTreeSet<String> = rows.iter().map(|(file, _)| (*file).to_string()).collect();
    assert_eq!(rows.len(), listed.len(), "a file is listed twice");
    assert_eq!(files, listed, "left: files in fixtures/parity, right: rows of the table");
}
