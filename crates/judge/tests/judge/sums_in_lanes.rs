//! `torch.log_softmax` in f32 on a CPU, and plain vector loops, at Qwen's vocabulary: a row's exponentials are added one after
//! another in lanes. It passes at grade `standard`, and what is wrong beside it does not.

use assay_core::problem::{Advantages, Candidate, Dtype, FloatArray, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{Recipe, Regime};
use assay_judge::judge::Verdict;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use ndarray::{Array2, Array3};

const VOCAB: usize = 151_936;

/// A way of computing the sum of a row's exponentials in f32.
struct Sum {
    lanes: usize,
    /// The terms at the end of the row that are left out of the sum.
    left_out: usize,
    /// The rounding of each exponential.
    round: fn(f32) -> f32,
    /// The rounding of each partial sum.
    carry: fn(f32) -> f32,
}

const RIGHT: Sum = Sum { lanes: 8, left_out: 0, round: |x| x, carry: |x| x };

impl Sum {
    fn of(&self, exponentials: &[f32]) -> f32 {
        let mut lanes = vec![0.0_f32; self.lanes];
        for (j, e) in exponentials[..exponentials.len() - self.left_out].iter().enumerate() {
            let lane = &mut lanes[j % self.lanes];
            *lane = (self.carry)(*lane + e);
        }
        lanes.into_iter().sum()
    }
}

fn spec() -> LossSpec {
    LossSpec::from_cotangents(false)
}

fn problem(regime: Regime, dtype: Dtype, seed: u64) -> Problem {
    let shape = [1, 2, VOCAB];
    let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false };
    recipe.unmasked_problem(&spec()).unwrap()
}

/// What automatic differentiation makes of `log_softmax(x)[y]` in f32.
fn log_softmax(problem: &Problem, sum: &Sum) -> Candidate {
    let shape = problem.shape();
    let Advantages::Dlogp(cotangents) = &problem.advantages else { panic!("drawn by the spec") };
    let mut logp = Array2::<f32>::zeros((shape.batch, shape.tokens));
    let mut dlogits = Array3::<f64>::zeros((shape.batch, shape.tokens, shape.vocab));
    for ((b, t), _) in problem.mask.indexed_iter() {
        let x: Vec<f32> = problem.logits.row(b, t).iter().map(|x| *x as f32).collect();
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: Vec<f32> = x.iter().map(|x| (sum.round)((x - max).exp())).collect();
        let total = sum.of(&exponentials);
        let log_sum = total.ln();
        let (id, cotangent) = (usize::try_from(problem.ids[[b, t]]).unwrap(), cotangents[[b, t]] as f32);
        logp[[b, t]] = x[id] - max - log_sum;
        for (v, e) in exponentials.iter().enumerate() {
            let p = e / total;
            dlogits[[b, t, v]] = f64::from(if v == id { cotangent - cotangent * p } else { -cotangent * p });
        }
    }
    Candidate {
        loss: None,
        gradient: FloatArray::rounded_from(&dlogits, problem.logits.dtype()),
        logp: Some(FloatArray::rounded_from(&logp.mapv(f64::from), Dtype::F32)),
        logp_of_others: None,
        entropy: None,
        token_loss: None,
        metrics: None,
    }
}

fn verdicts(problem: &Problem, sum: &Sum) -> Vec<Verdict> {
    let spec = spec();
    let known = JudgedProblem::new(&spec, problem).unwrap();
    known.verdicts(&log_softmax(problem, sum).lend(), &Limits::external(Grade::Standard)).unwrap()
}

fn passes(problem: &Problem, sum: &Sum) -> bool {
    verdicts(problem, sum).iter().all(Verdict::passed)
}

#[test]
fn sum_in_lanes_passes_standard_and_names_why_not_exact() {
    let mut named = 0;
    for (regime, seed) in Regime::FINITE.into_iter().zip(0..) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let problem = problem(regime, dtype, seed);
            for lanes in [8, 16] {
                let verdicts = verdicts(&problem, &Sum { lanes, ..RIGHT });
                let failed: Vec<_> = verdicts.iter().filter(|verdict| !verdict.passed()).collect();
                assert!(failed.is_empty(), "{regime} {dtype}, {lanes} lanes: {failed:#?}");
                let why = verdicts.iter().filter_map(|verdict| verdict.short_of_exact.map(|short| short.to_string()));
                named += why.filter(|why| why.contains("one after another in lanes")).count();
            }
        }
    }
    assert!(named > 3, "{named}");
}

#[test]
fn sum_with_32_terms_left_out_is_rejected() {
    for regime in [Regime::Ties, Regime::Sampled, Regime::Normal, Regime::Small, Regime::LongTail] {
        for (seed, lanes) in [(1, 8), (2, 16)] {
            let problem = problem(regime, Dtype::F32, seed);
            assert!(!passes(&problem, &Sum { left_out: 32, lanes, ..RIGHT }), "{regime}, {lanes} lanes");
        }
    }
}

#[test]
fn sum_of_coarse_terms_or_with_a_coarse_carry_is_rejected() {
    let to_f16 = |x: f32| half::f16::from_f32(x).to_f32();
    let to_tf32 = |x: f32| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff);
    let to_bf16 = |x: f32| half::bf16::from_f32(x).to_f32();
    for regime in [Regime::Ties, Regime::Sampled, Regime::Normal] {
        let problem = problem(regime, Dtype::F32, 3);
        assert!(!passes(&problem, &Sum { round: to_f16, ..RIGHT }), "f16, {regime}");
        assert!(!passes(&problem, &Sum { round: to_tf32, ..RIGHT }), "TF32, {regime}");
        assert!(!passes(&problem, &Sum { carry: to_bf16, ..RIGHT }), "bf16 carry, {regime}");
    }
}
