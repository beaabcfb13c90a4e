//! The tests of other projects, and the mutants that they would accept: their kind of input, their twin, their tolerances.
//!
//! Each of them compares a kernel with a twin that is right by construction: here the specimen without a bug, in
//! f32 as theirs is, on one device. Batches are cut down; vocabularies and distributions are not.

use ndarray::{Array2, Ix2, Ix3, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, Uniform};
use rayon::prelude::*;

use super::{Mutant, QWEN_VOCABULARY, Specimen};
use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem};
use assay_core::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, Rows,
};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::invariance::Invariance;
pub use assay_schema::mutants::PeerOutcome;

/// The tests of one project.
#[derive(Clone, Copy, Debug)]
pub struct PeerProject {
    /// The project's name in tables.
    pub name: &'static str,
    /// The file and lines of the project's tests.
    pub source: &'static str,
    /// The inputs that the tests draw and compare, and the parts that are shortened here.
    pub inputs: &'static str,
    /// Whether its kernel has the entropy among its outputs.
    entropy: bool,
    checks: fn() -> Vec<PeerCheck>,
}

/// The projects whose tests are replayed.
pub const PROJECTS: [PeerProject; 7] = [
    PeerProject {
        name: "Liger bf16",
        source: "linkedin/Liger-Kernel test/transformers/test_grpo_loss.py, test_grpo_loss, beta 0",
        inputs: "randn bf16 logits, V = 151,936, T = 0.7, old log-probabilities randn or absent, mask all ones but for its \
                 end; token losses and dlogits against f32 at 5e-2 + 5e-1·|x|. 6 tokens of 1,024, upstream gradients 1 for \
                 randn",
        entropy: false,
        checks: || liger_bf16(0.0),
    },
    PeerProject {
        name: "Liger bf16, KL",
        source: "the same test, beta 0.04",
        inputs: "the same with reference log-probabilities randn: about 12 nats from those of randn logits, so that the \
                 gradient of k3 is near e¹²",
        entropy: false,
        checks: || liger_bf16(0.04),
    },
    PeerProject {
        name: "Liger f32",
        source: "the same file, test_grpo_loss_vs_trl and test_grpo_loss_sequence_backward_matches_reference",
        inputs: "randn f32 logits, mask all ones, T = 0.9: five reductions, ratios of tokens and sequences, beta 0 and \
                 0.04; V = 1,000: the loss at 1e-4 + 1e-4·|x|, dlogits without NaN, 16 tokens of 128. V = 32: loss at 1e-5, \
                 dlogits at 1e-4",
        entropy: false,
        checks: liger_f32,
    },
    PeerProject {
        name: "TRL",
        source: "huggingface/trl tests/test_utils.py, TestSelectiveLogSoftmax; July 2026",
        inputs: "randn logits, [4,32,1024]: logp and entropy in f32 at 1e-5 + 1e-5·|x|; their gradients in bf16 at 1e-2",
        entropy: true,
        checks: trl,
    },
    PeerProject {
        name: "verl fused",
        source: "verl-project/verl tests/utils/test_linear_cross_entropy.py",
        inputs: "logits of uniform ±0.5 states and heads, σ = 2.5, V = 151,936, T = 1.5: logp at 1e-3 + 2e-4·|x|, entropy at \
                 5e-3 + 5e-4·|x|, gradients of states and head at 2e-2 + 4e-2·|x|. 4 tokens of 2,169, logits drawn normal, 4 \
                 of 896 states, the entropy's upstream gradient 0.25 for uniform ±0.5",
        entropy: true,
        checks: verl_fused,
    },
    PeerProject {
        name: "Tokamax",
        source: "openxla/tokamax linear_softmax_cross_entropy_loss/pallas_mosaic_tpu_kernel_test.py, chunked_xla_test.py",
        inputs: "logits of randn states and heads, σ = 32, V = 2,048, 2,664 and 10,000, f32: loss and logp at 1e-4 + 1e-4·|x|, \
                 gradients of states and head at 5e-2 + 5e-2·|x|. 16 tokens of 1,024 to 5,136, logits drawn normal, 4 of \
                 1,024 states",
        entropy: false,
        checks: tokamax,
    },
    PeerProject {
        name: "MLLM-JAX",
        source: "demon2036/MLLM-JAX, gates of its gradient check",
        inputs: "Qwen2.5 logits, for which normal ones of σ = 8 stand here, V = 151,936, old_logp = logp + 0.3·randn: loss at \
                 3e-3, dlogits at 2e-2, and at 1·|x| where |x| > 1e-6. 6 tokens of 129",
        entropy: false,
        checks: mllm_jax,
    },
];

impl PeerProject {
    /// Prepares the project's tests: draws their inputs and runs the correct kernel.
    pub fn prepare(self) -> Tests {
        let prepared = |check| PreparedCheck::new(check, self.entropy);
        Tests { project: self, checks: (self.checks)().into_par_iter().map(prepared).collect() }
    }
}

/// A project's tests, ready to be run.
pub struct Tests {
    /// The project that the tests belong to.
    pub project: PeerProject,
    checks: Vec<PreparedCheck>,
}

impl Tests {
    /// Returns whether the tests catch `mutant`, accept it, or do not exercise it.
    pub fn judge(&self, mutant: &Mutant) -> PeerOutcome {
        let specimen = Specimen::with(mutant.bug);
        // The outcomes are ordered from not exercised over accepted to caught: one check that catches the mutant is
        // enough.
        let mut cell = PeerOutcome::NotExercised;
        for check in self.checks.iter().filter(|check| mutant.kind.is_reached(&check.check.spec, false)) {
            cell = cell.max(check.judge(&specimen));
            if cell == PeerOutcome::Caught {
                break;
            }
        }
        cell
    }

    /// Whether the tests accept the correct kernel.
    pub fn accept_the_correct_kernel(&self) -> bool {
        // The correct kernel must have its own bits on a second run, and be within the project's tolerances of the
        // twin.
        self.checks.iter().all(|check| {
            check.judge(&Specimen::default()) == PeerOutcome::NotExercised && check.accepts(&check.correct)
        })
    }
}

/// One comparison with a twin in f32.
struct PeerCheck {
    spec: LossSpec,
    problem: Problem,
    limits: Vec<PeerLimit>,
}

/// `|x̂ − x| ≤ atol + rtol·|x|`; a NaN is never close.
#[derive(Clone, Copy)]
struct Close {
    atol: f64,
    rtol: f64,
}

impl Close {
    fn both(tolerance: f64) -> Self {
        Self { atol: tolerance, rtol: tolerance }
    }

    fn holds<'a>(self, actual: impl IntoIterator<Item = &'a f64>, expected: impl IntoIterator<Item = &'a f64>) -> bool {
        let close = |(x, y): (&f64, &f64)| x == y || (x - y).abs() <= self.atol + self.rtol * y.abs();
        actual.into_iter().zip(expected).all(close)
    }
}

/// The comparison that a test makes.
enum PeerLimit {
    Loss(Close),
    Logp(Close),
    Entropy(Close),
    TokenLoss(Close),
    Dlogits(Close),
    /// The dlogits contain no NaN.
    NoNan,
    /// `|Δ| ≤ |x|` of dlogits where `|x|` is above this.
    RelativeAbove(f64),
    /// Gradients of states and head: `dlogits · head`, and `states` times dlogits.
    ThroughHead {
        states: Array2<f64>,
        head: Array2<f64>,
        close: Close,
    },
}

struct PreparedCheck {
    check: PeerCheck,
    entropy: bool,
    twin: Candidate,
    correct: Candidate,
}

impl PreparedCheck {
    fn new(check: PeerCheck, entropy: bool) -> Self {
        // The twin computes on the same logits in f32, as the projects' references do.
        let logits = FloatArray::rounded_from(&check.problem.logits.to_f64(), Dtype::F32);
        let twin = Problem { logits, ..check.problem.clone() };
        let [twin, correct] =
            [&twin, &check.problem].map(|problem| run(&Specimen::default(), &check.spec, problem, entropy));
        Self { check, entropy, twin, correct }
    }

    fn judge(&self, kernel: &Specimen) -> PeerOutcome {
        let candidate = run(kernel, &self.check.spec, &self.check.problem, self.entropy);
        match () {
            // A mutant whose outputs have the bits of the correct kernel was not exercised: nothing could tell them
            // apart.
            () if Invariance::between(&candidate, &self.correct).other.is_empty() => PeerOutcome::NotExercised,
            () if self.accepts(&candidate) => PeerOutcome::Passes,
            () => PeerOutcome::Caught,
        }
    }

    fn accepts(&self, candidate: &Candidate) -> bool {
        self.check.limits.iter().all(|limit| self.within(limit, candidate))
    }

    fn within(&self, limit: &PeerLimit, candidate: &Candidate) -> bool {
        let per_token = |close: Close, of: fn(&Candidate) -> &Option<FloatArray<Ix2>>| {
            let values = |of: &Option<FloatArray<Ix2>>| of.as_ref().expect("the specimen has all outputs").to_f64();
            let (actual, expected) = (values(of(candidate)), values(of(&self.twin)));
            // The projects' losses are 0 under the mask, and other outputs there are not compared.
            let mask = &self.check.problem.mask;
            let unmasked = |array: Array2<f64>| -> Vec<f64> {
                array.into_iter().zip(mask).filter_map(|(x, &counts)| counts.then_some(x)).collect()
            };
            close.holds(&unmasked(actual), &unmasked(expected))
        };
        let dlogits = |of: &Candidate| of.gradient.to_f64();
        let loss = |of: &Candidate| of.loss.iter().map(FloatArray::value).collect::<Vec<f64>>();
        match limit {
            PeerLimit::Loss(close) => close.holds(&loss(candidate), &loss(&self.twin)),
            PeerLimit::Logp(close) => per_token(*close, |of| &of.logp),
            PeerLimit::Entropy(close) => per_token(*close, |of| &of.entropy),
            PeerLimit::TokenLoss(close) => per_token(*close, |of| &of.token_loss),
            PeerLimit::Dlogits(close) => close.holds(&dlogits(candidate), &dlogits(&self.twin)),
            PeerLimit::NoNan => !dlogits(candidate).iter().any(|x| x.is_nan()),
            PeerLimit::RelativeAbove(least) => {
                let near = |(x, y): (&f64, &f64)| y.abs() <= *least || (x - y).abs() <= y.abs();
                dlogits(candidate).iter().zip(&dlogits(&self.twin)).all(near)
            }
            // The fused kernels of those projects return gradients of states and head: dlogits are multiplied by a few
            // columns of either.
            PeerLimit::ThroughHead { states, head, close } => {
                let rows = |of: &Candidate| {
                    let all = dlogits(of);
                    let (batch, tokens, vocab) = all.dim();
                    all.into_shape_with_order((batch * tokens, vocab)).expect("as many elements")
                };
                let (actual, expected) = (rows(candidate), rows(&self.twin));
                close.holds(&actual.dot(head), &expected.dot(head))
                    && close.holds(&actual.t().dot(states), &expected.t().dot(states))
            }
        }
    }
}

/// Runs the kernel on one device; removes the entropy if the project's kernel returns none.
fn run(kernel: &Specimen, spec: &LossSpec, problem: &Problem, entropy: bool) -> Candidate {
    let candidate = kernel.run(spec, problem.clone(), 1).expect("the specimen supports these");
    Candidate { entropy: candidate.entropy.filter(|_| entropy), ..candidate }
}

/// randn logits, advantages and log-probabilities near the policy's own; every token counts.
fn randn(spec: &LossSpec, shape: [usize; 3], dtype: Dtype, seed: u64) -> Problem {
    drawn(spec, shape, dtype, Regime::Normal, seed)
}

fn drawn(spec: &LossSpec, shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64) -> Problem {
    let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false };
    recipe.unmasked_problem(spec).expect("recipes of this crate are in range")
}

fn clipped(epsilon_high: f64) -> Objective {
    Objective::PpoClip(PpoClip { epsilon_low: 0.2, epsilon_high, ..PpoClip::default() })
}

fn k3(beta: f64) -> Option<Kl> {
    (beta > 0.0).then(|| Kl::plain(beta, KlEstimator::K3))
}

fn liger_bf16(beta: f64) -> Vec<PeerCheck> {
    let close = Close { atol: 5e-2, rtol: 5e-1 };
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let check = |(seed, old_logp)| {
        let spec = LossSpec {
            objective: clipped(0.4),
            old_logp,
            temperature: 0.7.into(),
            kl: k3(beta),
            reduction: Reduction::Normalizer(1.0),
            ..LossSpec::default()
        };
        let mut problem = randn(&spec, [1, 6, QWEN_VOCABULARY], Dtype::Bf16, seed);
        let mut normals = || Array2::from_shape_simple_fn((1, 6), || f32_normal(&mut rng));
        (problem.old_logp, problem.ref_logp) = (Some(normals()), Some(normals()));
        // The last of the six tokens is padding.
        problem.mask.slice_mut(s![.., 5..]).fill(false);
        PeerCheck { spec, problem, limits: vec![PeerLimit::TokenLoss(close), PeerLimit::Dlogits(close)] }
    };
    (0..).zip([OldLogp::Current, OldLogp::Given]).map(check).collect()
}

fn f32_normal(rng: &mut impl Rng) -> f64 {
    let x: f64 = StandardNormal.sample(rng);
    f64::from(x as f32)
}

fn liger_f32() -> Vec<PeerCheck> {
    let rows = Rows::All;
    let reductions = |tokens| {
        [
            Reduction::SequenceMean { rows },
            Reduction::TokenMean,
            Reduction::FixedLength { rows, length: Some(tokens) },
            Reduction::SequenceSum { rows },
        ]
    };
    let mut checks = Vec::new();
    for level in [RatioLevel::Token, RatioLevel::Sequence] {
        for beta in [0.0, 0.04] {
            let spec = |reduction, temperature| LossSpec {
                objective: clipped(0.4),
                ratio: Ratio { level, ..Ratio::default() },
                temperature,
                kl: k3(beta),
                reduction,
                ..LossSpec::default()
            };
            for reduction in reductions(16) {
                let spec = spec(reduction, 0.9.into());
                let problem = randn(&spec, [2, 16, 1000], Dtype::F32, 42);
                let limits = vec![PeerLimit::Loss(Close::both(1e-4)), PeerLimit::NoNan];
                checks.push(PeerCheck { spec, problem, limits });
            }
            if level == RatioLevel::Sequence {
                let spec = spec(Reduction::SequenceMean { rows }, 1.1.into());
                let problem = randn(&spec, [2, 8, 32], Dtype::F32, 0);
                let limits = vec![PeerLimit::Loss(Close::both(1e-5)), PeerLimit::Dlogits(Close::both(1e-4))];
                checks.push(PeerCheck { spec, problem, limits });
            }
        }
    }
    checks
}

/// The loss whose gradient is that of `Σ logp`.
fn sum_of_logp() -> LossSpec {
    LossSpec {
        objective: Objective::PolicyGradient,
        old_logp: OldLogp::Current,
        reduction: Reduction::Normalizer(1.0),
        ..LossSpec::default()
    }
}

fn trl() -> Vec<PeerCheck> {
    let forward = LossSpec { objective: Objective::None, ..sum_of_logp() };
    let close = Close::both(1e-5);
    let shape = [4, 32, 1024];
    let problem = randn(&forward, shape, Dtype::F32, 0);
    let limits = vec![PeerLimit::Logp(close), PeerLimit::Entropy(close)];
    let forward = PeerCheck { spec: forward, problem, limits };
    // The mean of the entropy is over 128 tokens: this coefficient gives each an upstream gradient of 0.25.
    let spec = LossSpec { entropy_coef: -0.25 * 128.0, ..sum_of_logp() };
    let mut problem = randn(&spec, shape, Dtype::Bf16, 1);
    problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::Array1::ones(shape[0]));
    let limits = vec![PeerLimit::Dlogits(Close::both(1e-2))];
    vec![forward, PeerCheck { spec, problem, limits }]
}

/// Logits of a head drawn normal with deviation `sigma`, in f32 as the fused kernels hold them; and a part of its states.
fn through_head(
    spec: &LossSpec,
    shape: [usize; 3],
    sigma: f64,
    part: &impl Distribution<f64>,
    seed: u64,
) -> (Problem, Array2<f64>, Array2<f64>) {
    let mut problem = randn(spec, shape, Dtype::F32, seed);
    let logits: ndarray::Array<f64, Ix3> = problem.logits.to_f64() * sigma;
    problem.logits = FloatArray::rounded_from(&logits, Dtype::F32);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |rows| Array2::from_shape_simple_fn((rows, 4), || part.sample(&mut rng));
    let (states, head) = (draw(shape[0] * shape[1]), draw(shape[2]));
    (problem, states, head)
}

fn verl_fused() -> Vec<PeerCheck> {
    let tokens = 4;
    let spec = LossSpec {
        advantages: AdvantageLevel::Token,
        temperature: 1.5.into(),
        // The coefficient is divided by the number of tokens, which leaves an upstream gradient of 0.25 for each.
        entropy_coef: -0.25 * f64::from(tokens),
        ..sum_of_logp()
    };
    let shape = [1, usize::try_from(tokens).expect("positive"), QWEN_VOCABULARY];
    let half = Uniform::new_inclusive(-0.5, 0.5).expect("a non-empty range");
    // Each of the 896 products of two uniform numbers in ±0.5 has a variance of 1/144.
    let (problem, states, head) = through_head(&spec, shape, f64::sqrt(896.0 / 144.0), &half, 1);
    let limits = vec![
        PeerLimit::Logp(Close { atol: 1e-3, rtol: 2e-4 }),
        PeerLimit::Entropy(Close { atol: 5e-3, rtol: 5e-4 }),
        PeerLimit::ThroughHead { states, head, close: Close { atol: 2e-2, rtol: 4e-2 } },
    ];
    vec![PeerCheck { spec, problem, limits }]
}

fn tokamax() -> Vec<PeerCheck> {
    let shapes = [2048, 2664, 10_000].map(|vocab| [1, 16, vocab]);
    let reductions = [Reduction::Normalizer(1.0), Reduction::TokenMean];
    let both = shapes.into_iter().flat_map(|shape| reductions.map(|reduction| (shape, reduction)));
    let check = |(shape, reduction)| {
        let spec = LossSpec { reduction, ..sum_of_logp() };
        let (mut problem, states, head) = through_head(&spec, shape, 32.0, &StandardNormal, 42);
        problem.advantages = assay_core::problem::Advantages::Sequence(ndarray::Array1::ones(1));
        let limits = vec![
            PeerLimit::Loss(Close::both(1e-4)),
            PeerLimit::Logp(Close::both(1e-4)),
            PeerLimit::ThroughHead { states, head, close: Close::both(5e-2) },
        ];
        PeerCheck { spec, problem, limits }
    };
    both.map(check).collect()
}

fn mllm_jax() -> Vec<PeerCheck> {
    let spec = LossSpec { objective: clipped(0.3), ..LossSpec::default() };
    let problem = drawn(&spec, [1, 6, QWEN_VOCABULARY], Dtype::F32, Regime::Peaked, 0);
    let limits = vec![
        PeerLimit::Loss(Close { atol: 3e-3, rtol: 0.0 }),
        PeerLimit::Dlogits(Close { atol: 2e-2, rtol: 0.0 }),
        PeerLimit::RelativeAbove(1e-6),
    ];
    vec![PeerCheck { spec, problem, limits }]
}
