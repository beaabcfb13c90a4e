//! A kernel as people write it: textbook formulas in f32, with every cancellation that they have. It passes grade `standard` in
//! every regime, and a verdict says what keeps it from `exact`.

use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay_core::spec::{LossSpec, Objective, PpoClip, Sapo};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::judge::{Cancellation, Verdict};
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use ndarray::{Array2, Array3, arr0};

/// By halves, so that no sum is much larger than what is added to it.
fn sum(values: &[f32]) -> f32 {
    if values.len() <= 8 { values.iter().sum() } else { values.chunks(values.len().div_ceil(2)).map(sum).sum() }
}

/// PPO-clip or SAPO with an entropy bonus, the mean over tokens: `z = x/T`, `ℓ = z_y − logsumexp(z)`, `p = exp(z − logsumexp(z))`,
/// `H = −Σ p ln p`, `dz_j = G(1[j=y] − p_j) − E p_j (ln p_j + H)`, each rounded in f32.
fn textbook(spec: &LossSpec, problem: &Problem) -> Candidate {
    let Shape { batch, tokens, vocab } = problem.shape();
    let count = problem.mask.iter().filter(|counts| **counts).count() as f32;
    let (t, coef) = (spec.temperature.number().unwrap() as f32, spec.entropy_coef as f32);
    let [mut logp, mut entropy, mut token_loss] = [(); 3].map(|()| Array2::<f32>::zeros((batch, tokens)));
    let mut dlogits = Array3::<f64>::zeros((batch, tokens, vocab));
    let mut loss = 0.0_f32;
    for ((b, s), _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        let z: Vec<f32> = problem.logits.row(b, s).into_iter().map(|x| x as f32 / t).collect();
        let y = usize::try_from(problem.ids[[b, s]]).unwrap();
        let most = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let lse = most + sum(&z.iter().map(|z| (z - most).exp()).collect::<Vec<_>>()).ln();
        let ln_p: Vec<f32> = z.iter().map(|z| z - lse).collect();
        let guarded = |ln_p: f32| if ln_p == f32::NEG_INFINITY { 0.0 } else { ln_p.exp() * ln_p };
        let h = -sum(&ln_p.iter().map(|ln_p| guarded(*ln_p)).collect::<Vec<_>>());
        let a = problem.advantages.at(b, s) as f32;
        let ratio = (ln_p[y] - problem.old_logp.as_ref().unwrap()[[b, s]] as f32).exp();
        let (surrogate, slope) = surrogate(&spec.objective, ratio, a);
        let grad = -slope / count;
        (logp[[b, s]], entropy[[b, s]], token_loss[[b, s]]) = (ln_p[y], h, -surrogate);
        loss += (-surrogate - coef * h) / count;
        for (j, &ln_p) in ln_p.iter().enumerate() {
            let p = ln_p.exp();
            let one = f32::from(u8::from(j == y));
            let of_entropy = if p == 0.0 { 0.0 } else { coef / count * p * (ln_p + h) };
            dlogits[[b, s, j]] = f64::from((grad * one - grad * p + of_entropy) / t);
        }
    }
    Candidate {
        loss: Some(arr0(loss).into()),
        logp: Some(logp.into()),
        logp_of_others: None,
        entropy: Some(entropy.into()),
        token_loss: Some(token_loss.into()),
        gradient: FloatArray::rounded_from(&dlogits, problem.logits.dtype()),
        metrics: None,
    }
}

/// And its derivative by `ln ρ`.
fn surrogate(objective: &Objective, ratio: f32, a: f32) -> (f32, f32) {
    match objective {
        Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, .. }) => {
            let clipped = ratio.clamp(1.0 - *epsilon_low as f32, 1.0 + *epsilon_high as f32);
            let held = ratio * a > clipped * a;
            ((ratio * a).min(clipped * a), if held { 0.0 } else { ratio * a })
        }
        Objective::Sapo(Sapo { tau_positive, tau_negative }) => {
            let tau = if a > 0.0 { *tau_positive } else { *tau_negative } as f32;
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            (4.0 / tau * gate * a, 4.0 * gate * (1.0 - gate) * ratio * a)
        }
        other => panic!("{other:?}"),
    }
}

fn judged(spec: &LossSpec, recipe: &Recipe, grade: Grade) -> (Vec<Verdict>, Vec<String>) {
    let problem = recipe.problem(spec).unwrap();
    let known = JudgedProblem::new(spec, &problem).unwrap();
    let judged = known.judge(textbook(spec, &problem), &Limits::external(grade)).unwrap();
    let failures = known.failures(&judged, "textbook", &format!("{recipe:?}"));
    (judged.verdicts, failures)
}

fn specs() -> [LossSpec; 3] {
    let plain = LossSpec { entropy_coef: 0.0, ..LossSpec::default() };
    let bonus = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    [plain, bonus.clone(), LossSpec { temperature: 0.7.into(), ..bonus }]
}

#[test]
fn textbook_kernel_passes_standard_in_every_regime() {
    let mut cases = 0;
    for spec in specs() {
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            for dtype in Dtype::KERNEL {
                for shape in [[3, 4, 97], [2, 3, 1025], [2, 2, 4099]] {
                    let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
                    let (_, failures) = judged(&spec, &recipe, Grade::Standard);
                    assert!(failures.is_empty(), "{}", failures[0]);
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 3 * Regime::FINITE.len() * 9);
}

#[test]
fn textbook_kernel_passes_standard_at_the_vocabulary_of_qwen() {
    let [_, _, spec] = specs();
    for (regime, dtype) in Regime::FINITE.into_iter().zip(Dtype::KERNEL.into_iter().cycle()) {
        let recipe =
            Recipe { shape: [1, 2, 151_936], dtype, regime, seed: 5, old_logp_noise_scale: 0.1, masked_garbage: false };
        let (_, failures) = judged(&spec, &recipe, Grade::Standard);
        assert!(failures.is_empty(), "{}", failures[0]);
    }
}

/// What keeps it from `exact`, by the regime that shows it.
#[test]
fn verdict_names_what_cancels() {
    let [plain, bonus, _] = specs();
    let recipe = |regime| Recipe {
        shape: [3, 4, 1025],
        dtype: Dtype::F32,
        regime,
        seed: 2,
        old_logp_noise_scale: 0.05,
        masked_garbage: false,
    };
    for (spec, regime, output, cancellation) in [
        (&plain, Regime::Confident, "dlogits", Cancellation::Target),
        (&plain, Regime::ShiftedUp, "logp", Cancellation::Offset),
        (&plain, Regime::ShiftedUp, "dlogits", Cancellation::Offset),
        (&LossSpec { entropy_coef: 50.0, ..bonus }, Regime::Small, "dlogits", Cancellation::EntropyGradient),
    ] {
        let (verdicts, failures) = judged(spec, &recipe(regime), Grade::Standard);
        assert!(failures.is_empty(), "{}", failures[0]);
        let verdict = verdicts.iter().find(|verdict| verdict.gate.to_string() == output).unwrap();
        assert_eq!(verdict.grade, Some(Grade::Standard), "{regime} {output}");
        let short = verdict.short_of_exact.expect("it is not exact");
        assert_eq!(short.cancellation, cancellation, "{regime} {output}: {short}");
        let (_, failures) = judged(spec, &recipe(regime), Grade::Exact);
        assert!(!failures.is_empty(), "{regime}: exact asks for more");
    }
    // Ratios of e³: the gate is open.
    let sapo = LossSpec { objective: Objective::Sapo(Sapo::default()), ..plain.clone() };
    let recipe_of_open_gates = Recipe { shape: [6, 8, 97], old_logp_noise_scale: 2.0, ..recipe(Regime::Normal) };
    let (verdicts, failures) = judged(&sapo, &recipe_of_open_gates, Grade::Standard);
    assert!(failures.is_empty(), "{}", failures[0]);
    assert!(
        verdicts
            .iter()
            .any(|verdict| verdict.short_of_exact.is_some_and(|short| short.cancellation == Cancellation::Gate))
    );

    let (verdicts, _) = judged(&plain, &recipe(Regime::Normal), Grade::Standard);
    assert!(verdicts.iter().all(|verdict| verdict.grade == Some(Grade::Exact)), "{verdicts:?}");
}
