//! What a failure is likely of: each cause is named where it is the cause, and none where there is no failure.

use assay_core::problem::{Advantages, Candidate, Dtype, FloatArray, HeadLayout, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_judge::diagnosis::{Diagnosis, OtherRows};
use assay_judge::gate::Output;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_reference::Reference;

fn problem(shape: [usize; 3], dtype: Dtype, regime: Regime) -> Problem {
    let recipe = Recipe { shape, dtype, regime, seed: 3, old_logp_noise_scale: 0.05, masked_garbage: false };
    recipe.unmasked_problem(&LossSpec::default()).unwrap()
}

/// The reference's answer in the problem's dtype, changed by `break_it`: what is said of it.
fn diagnosed(problem: &Problem, break_it: impl FnOnce(&mut Candidate, &Reference)) -> Vec<Diagnosis> {
    let spec = LossSpec::default();
    let known = JudgedProblem::new(&spec, problem).unwrap();
    let mut candidate = Candidate::from(known.reference.outcome());
    candidate.gradient = FloatArray::rounded_from(&candidate.gradient.to_f64(), problem.logits.dtype());
    candidate.metrics = None;
    break_it(&mut candidate, &known.reference);
    let judged = known.judge(candidate, &Limits::external(Grade::Standard)).unwrap();
    problem.diagnose(&known.reference, &judged.outcome.lend(), &judged.verdicts)
}

fn change(candidate: &mut Candidate, by: impl Fn((usize, usize, usize), f64) -> f64) {
    let dtype = candidate.gradient.dtype();
    let mut values = candidate.gradient.to_f64();
    values.indexed_iter_mut().for_each(|(at, x)| *x = by(at, *x));
    candidate.gradient = FloatArray::rounded_from(&values, dtype);
}

#[test]
fn diagnosis_of_a_right_answer_is_empty() {
    for dtype in Dtype::KERNEL {
        assert_eq!(diagnosed(&problem([2, 3, 257], dtype, Regime::Normal), |_, _| {}), []);
    }
}

#[test]
fn diagnosis_names_the_target_alone() {
    let problem = problem([2, 3, 257], Dtype::Bf16, Regime::Normal);
    let said = diagnosed(&problem, |candidate, reference| {
        change(candidate, |(b, t, v), x| if reference.token(b, t).unwrap().id == v { x } else { 0.0 });
    });
    assert_eq!(said, [Diagnosis::OnlyTheTarget]);
}

#[test]
fn diagnosis_measures_a_constant_factor() {
    let problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    let said = diagnosed(&problem, |candidate, _| change(candidate, |_, x| x * 0.9375));
    let [Diagnosis::ConstantFactor { dlogits: factor, loss: None }] = said[..] else { panic!("{said:?}") };
    assert!((factor - 0.9375).abs() < 1e-6, "{factor}");
}

/// A factor for each token, and one for each sequence.
#[test]
fn factors_that_differ_are_told_by_token_or_by_sequence() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let problem = problem([3, 4, 257], dtype, Regime::Normal);
        let said = diagnosed(&problem, |candidate, _| {
            change(candidate, |(b, t, _), x| x * [1.0, 0.5, 3.0, 1.25][(b + t) % 4]);
        });
        let [Diagnosis::FactorPerToken { output: Output::Dlogits, examples, off, tokens }] = said[..] else {
            panic!("{said:?}")
        };
        let has_gradient = |reference: &Reference, at: (usize, usize)| {
            reference.token(at.0, at.1).is_some_and(|token| reference.has_gradient(token))
        };
        let spec = LossSpec::default();
        let reference = problem.evaluate(&spec).unwrap();
        let with: Vec<_> = ndarray::indices((3, 4)).into_iter().filter(|at| has_gradient(&reference, *at)).collect();
        assert_eq!((off, tokens), (with.iter().filter(|(b, t)| (b + t) % 4 != 0).count(), with.len()));
        for of in examples {
            let (b, t) = of.token;
            assert!((of.factor / [1.0, 0.5, 3.0, 1.25][(b + t) % 4] - 1.0).abs() < 4e-3, "{of:?}");
        }

        let said = diagnosed(&problem, |candidate, _| change(candidate, |(b, _, _), x| x * [1.0, 0.5, 2.0][b]));
        let [Diagnosis::FactorPerSequence { off, sequences, .. }] = said[..] else { panic!("{said:?}") };
        assert_eq!((off, sequences), (2, 3));
        assert!(said[0].to_string().contains("2 of 3 sequences are off"), "{}", said[0]);
    }
}

/// `dhidden` of an LM head has the factors of its dlogits.
#[test]
fn factors_of_dhidden_are_told() {
    let recipe = Recipe {
        shape: [3, 4, 65],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 0.05,
        masked_garbage: false,
    };
    let spec = LossSpec::default();
    let head = HeadRecipe { hidden: 24, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
    let problem = head.unmasked_problem(&spec).unwrap();
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    let exact = HeadProblem::outcome(&known.reference);
    for (factor, is_of_sequences) in [([1.0, 0.5, 3.0, 1.25], false), ([2.0; 4], true)] {
        let mut candidate = exact.clone();
        candidate.metrics = None;
        let mut dhidden = candidate.gradient.dhidden.to_f64();
        dhidden.indexed_iter_mut().for_each(|((b, t, _), x)| *x *= if b == 0 { 1.0 } else { factor[(b + t) % 4] });
        candidate.gradient.dhidden = FloatArray::rounded_from(&dhidden, Dtype::F32);
        candidate.gradient.dlm_head = FloatArray::rounded_from(&candidate.gradient.dlm_head.to_f64(), Dtype::F32);
        let judged = known.judge(candidate, &Limits::external(Grade::Standard)).unwrap();
        let said = problem.diagnose(&known.reference, &judged.outcome.lend(), &judged.verdicts);
        let is_told = |of: &Diagnosis| match of {
            Diagnosis::FactorPerSequence { output: Output::Dhidden, .. } => is_of_sequences,
            Diagnosis::FactorPerToken { output: Output::Dhidden, .. } => !is_of_sequences,
            _ => false,
        };
        assert!(said.len() == 1 && is_told(&said[0]), "{said:?}");
    }
}

/// Rows of two or three entries, and rows that no factor explains, have none.
#[test]
fn factors_are_not_told_where_data_do_not_show_them() {
    let factor = |(b, t, _): (usize, usize, usize), x: f64| x * [1.0, 0.5, 3.0, 1.25][(b + t) % 4];
    let said = diagnosed(&problem([3, 4, 3], Dtype::F32, Regime::Normal), |candidate, _| change(candidate, factor));
    assert!(said.iter().all(|of| !matches!(of, Diagnosis::FactorPerToken { .. })), "{said:?}");
    let said = diagnosed(&problem([3, 4, 257], Dtype::F32, Regime::Normal), |candidate, _| {
        change(candidate, |at, x| if at.2 == 5 { 2.0 * x } else { factor(at, x) });
    });
    assert!(said.iter().all(|of| !matches!(of, Diagnosis::FactorPerToken { .. })), "{said:?}");
}

/// Two entries have nearly all of the gradient: their roundings alone make a factor of it.
#[test]
fn factor_that_rounding_explains_is_not_told() {
    let spread = |mut problem: Problem, first: f32| {
        let FloatArray::Bf16(logits) = &mut problem.logits else { panic!("asked for bf16") };
        logits.fill(half::bf16::from_f32(-12.0));
        logits[[0, 0, 0]] = half::bf16::from_f32(first);
        logits[[0, 0, 1]] = half::bf16::ZERO;
        problem.ids.fill(0);
        // The ratio is 1, so that no clip holds it.
        let logp = f64::from(first) - f64::from(first.exp() + 1.0).ln();
        problem.old_logp.as_mut().unwrap().fill(logp);
        problem
    };
    for step in 0..16 {
        let problem = spread(problem([1, 1, 257], Dtype::Bf16, Regime::Normal), step as f32 / 16.0);
        let said =
            diagnosed(&problem, |candidate, _| change(candidate, |at, x| if at.2 == 200 { 20.0 * x } else { x }));
        assert_eq!(said, [Diagnosis::Columns { first: 200, last: 200, vocab: 257, zero: false }], "{step}");
    }
}

/// Beside NaN no factor is told, whatever the other values are.
#[test]
fn factor_beside_nan_is_not_told() {
    let problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    for factor in [0.5, 0.999_892] {
        let said = diagnosed(&problem, |candidate, _| {
            change(candidate, |at, x| if at == (0, 1, 7) { f64::NAN } else { factor * x });
        });
        let is_factor =
            |of: &Diagnosis| matches!(of, Diagnosis::ConstantFactor { .. } | Diagnosis::FactorPerToken { .. });
        assert!(!said.iter().any(is_factor), "{said:?}");
    }
}

/// Each value goes to either of its neighbours, the nearer one more often.
#[test]
fn stochastic_rounding_is_named() {
    let problem = problem([2, 3, 257], Dtype::Bf16, Regime::Normal);
    let said = diagnosed(&problem, |candidate, reference| {
        let mut seed = 1_u64;
        let mut values = candidate.gradient.to_f64();
        values.indexed_iter_mut().for_each(|((b, t, v), x)| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exact = reference.dlogits_row(b, t)[v];
            let share = (seed >> 11) as f64 / (1_u64 << 53) as f64 - 0.5;
            *x = exact + share * 2.0 * assay_judge::metric::half_ulp(exact, Dtype::Bf16);
        });
        candidate.gradient = FloatArray::rounded_from(&values, Dtype::Bf16);
    });
    assert_eq!(said, [Diagnosis::RoundedTwice(Dtype::Bf16)]);
}

#[test]
fn diagnosis_names_truncation() {
    let problem = problem([2, 3, 257], Dtype::Bf16, Regime::Normal);
    let said = diagnosed(&problem, |candidate, reference| {
        change(candidate, |(b, t, v), _| {
            let exact = reference.dlogits_row(b, t)[v] as f32;
            f64::from(f32::from_bits(exact.to_bits() & 0xffff_0000))
        });
    });
    assert_eq!(said, [Diagnosis::Truncated(Dtype::Bf16)]);
}

#[test]
fn diagnosis_recognises_values_of_a_narrower_dtype() {
    let problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    let said = diagnosed(&problem, |candidate, _| change(candidate, |_, x| Dtype::Bf16.round(x)));
    assert_eq!(said, [Diagnosis::StoredWider(Output::Dlogits, Dtype::Bf16)]);
}

/// A softmax in bf16 has wrong probabilities too; where they are right, logp alone is rounded.
#[test]
fn diagnosis_names_logits_that_are_not_upcast() {
    let problem = problem([2, 3, 257], Dtype::Bf16, Regime::Peaked);
    let round = |candidate: &mut Candidate| {
        candidate.logp = candidate.logp.take().map(|logp| logp.to_f64().mapv(|x| Dtype::Bf16.round(x)).into());
    };
    let said = diagnosed(&problem, |candidate, _| {
        round(candidate);
        change(candidate, |(_, _, v), x| x * (1.0 + 0.03 * (v as f64).sin()));
    });
    assert_eq!(said, [Diagnosis::NotUpcast(Dtype::Bf16)]);
    assert_eq!(
        diagnosed(&problem, |candidate, _| round(candidate)),
        [Diagnosis::StoredWider(Output::Logp, Dtype::Bf16)]
    );
    // A value that is not finite has lost what the others show.
    let said = diagnosed(&problem, |candidate, _| {
        let mut logp = candidate.logp.take().unwrap().to_f64().mapv(|x| Dtype::Bf16.round(x));
        logp[[0, 0]] = f64::NAN;
        candidate.logp = Some(logp.into());
    });
    assert_eq!(said, []);
}

/// A wrong sum scales every probability and not the one-hot: that is no factor of dlogits.
#[test]
fn factor_of_a_wrong_sum_is_not_told() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let problem = problem([2, 3, 257], dtype, Regime::Normal);
        for factor in [1.005, 0.995, 0.98] {
            let said = diagnosed(&problem, |candidate, reference| {
                change(candidate, |(b, t, v), x| if reference.token(b, t).unwrap().id == v { x } else { factor * x });
            });
            assert_eq!(said, [], "{dtype} {factor}");
        }
    }
}

/// The gradient of one token is nearly all of a batch's, and its factor is not that of the others.
#[test]
fn factor_of_one_large_token_is_not_that_of_all() {
    let mut problem = problem([3, 1, 257], Dtype::F32, Regime::Normal);
    let Advantages::Sequence(advantages) = &mut problem.advantages else { panic!("asked for those of sequences") };
    advantages.assign(&ndarray::arr1(&[1e6, 1.0, 1.0]));
    let said = diagnosed(&problem, |candidate, _| change(candidate, |(b, _, _), x| [0.5, 3.0, 1.25][b] * x));
    assert!(!said.iter().any(|of| matches!(of, Diagnosis::ConstantFactor { .. })), "{said:?}");
    assert!(said.iter().any(|of| matches!(of, Diagnosis::FactorPerToken { .. })), "{said:?}");
}

/// Wrong values under the mask say nothing of the numbers of tokens that count.
#[test]
fn diagnosis_of_masked_dlogits_is_empty() {
    let mut problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    problem.mask[[0, 1]] = false;
    let Advantages::Sequence(advantages) = &mut problem.advantages else { panic!("asked for those of sequences") };
    advantages.fill(0.0);
    // All that is not 0 is 1, a number of every dtype.
    let said = diagnosed(&problem, |candidate, _| {
        change(candidate, |(b, t, _), x| if (b, t) == (0, 1) { 1.0 } else { x });
    });
    assert_eq!(said, []);
}

/// The report on log-probabilities whose sums of exponentials are changed.
fn with_sums(problem: &Problem, change: impl Fn(&[f64]) -> f64) -> Vec<Diagnosis> {
    diagnosed(problem, |candidate, reference| {
        let mut logp = candidate.logp.take().unwrap().to_f64();
        for ((b, t), value) in logp.indexed_iter_mut() {
            let row = problem.logits.row(b, t);
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let e: Vec<f64> = row.iter().map(|x| (x - most).exp()).collect();
            *value = row[reference.token(b, t).unwrap().id] - most - change(&e).ln();
        }
        candidate.logp = Some(FloatArray::rounded_from(&logp, Dtype::F32));
    })
}

#[test]
fn diagnosis_names_sums_of_a_narrow_dtype() {
    let problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let said = with_sums(&problem, |e| e.iter().fold(0.0, |sum, e| dtype.round(sum + e)));
        assert_eq!(said, [Diagnosis::NarrowSum(dtype)]);
    }
}

#[test]
fn diagnosis_names_entries_that_a_sum_lacks_or_has_twice() {
    let problem = problem([2, 3, 257], Dtype::F32, Regime::Normal);
    let expected = |first, last, twice| [Diagnosis::SumOfColumns { first, last, vocab: 257, twice }];
    assert_eq!(with_sums(&problem, |e| e[..128].iter().sum()), expected(128, 256, false));
    assert_eq!(with_sums(&problem, |e| e[1..].iter().sum()), expected(0, 0, false));
    assert_eq!(with_sums(&problem, |e| e.iter().chain(&e[192..]).sum()), expected(192, 256, true));
    // Entries in the middle, and a share of all, are at neither end.
    assert_eq!(with_sums(&problem, |e| e[..64].iter().chain(&e[128..]).sum()), []);
    assert_eq!(with_sums(&problem, |e| 0.9 * e.iter().sum::<f64>()), []);
}

#[test]
fn diagnosis_names_logits_of_other_tokens() {
    let problem = problem([3, 4, 257], Dtype::F32, Regime::Normal);
    let source = |rows, (b, t): (usize, usize)| match rows {
        OtherRows::Transposed => Some(((t * 3 + b) / 4, (t * 3 + b) % 4)),
        OtherRows::NextToken => (t < 3).then_some((b, t + 1)),
        OtherRows::TokenBefore => (t > 0).then(|| (b, t - 1)),
        OtherRows::NextSequence => (b < 2).then_some((b + 1, t)),
        OtherRows::SequenceBefore => (b > 0).then(|| (b - 1, t)),
    };
    let of_rows = |source: &dyn Fn((usize, usize)) -> Option<(usize, usize)>| {
        diagnosed(&problem, |candidate, reference| {
            let mut logp = candidate.logp.take().unwrap().to_f64();
            for (at, value) in logp.indexed_iter_mut() {
                let Some((b, t)) = source(at) else { continue };
                let other = reference.row(b, t, reference.token(b, t).unwrap());
                *value = other.logp().probabilities[reference.token(at.0, at.1).unwrap().id].ln();
            }
            candidate.logp = Some(FloatArray::rounded_from(&logp, Dtype::F32));
        })
    };
    for rows in OtherRows::ALL {
        assert_eq!(of_rows(&|at| source(rows, at)), [Diagnosis::OtherRows(rows)]);
    }
    // One token alone says nothing, nor do those of which some are right.
    assert_eq!(of_rows(&|at| (at == (0, 1)).then_some((0, 2))), []);
    assert_eq!(of_rows(&|(b, t)| (b == 0 && t < 3).then_some((b, t + 1))), []);
}

/// A ratio of `exp(±20)` for those beyond it.
#[test]
fn diagnosis_names_a_ratio_that_is_held() {
    let recipe = Recipe {
        shape: [3, 8, 33],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 30.0,
        masked_garbage: false,
    };
    let spec = LossSpec::default();
    let problem = recipe.unmasked_problem(&spec).unwrap();
    let with_loss = |change: &dyn Fn(f64) -> f64| {
        diagnosed(&problem, |candidate, reference| {
            let mut losses = candidate.token_loss.take().unwrap().to_f64();
            for ((b, t), loss) in losses.indexed_iter_mut() {
                let token = reference.token(b, t).unwrap();
                let own = token.inputs.level_log_ratio(&spec).value;
                // The loss does not depend on a ratio that the clip holds.
                if (loss.abs() / (own.exp() * token.inputs.advantage.abs()) - 1.0).abs() < 1e-6 {
                    *loss *= (change(own) - own).exp();
                }
            }
            candidate.token_loss = Some(FloatArray::rounded_from(&losses, Dtype::F32));
        })
    };
    let said = with_loss(&|own| own.clamp(-20.0, 20.0));
    let [Diagnosis::HeldRatio { log_ratio }] = said[..] else { panic!("{said:?}") };
    assert!((log_ratio - 20.0).abs() < 1e-3, "{log_ratio}");
    assert_eq!(with_loss(&|own| own), []);
    // A clip of ratios at 1.2 is one that losses have, and not always where this one has it.
    assert_eq!(with_loss(&|own| own.clamp(-0.2, 0.2)), []);
    // Ratios that are half as large in logarithms are not held.
    assert_eq!(with_loss(&|own| own / 2.0), []);
}

/// Probabilities over such a sum, where the limit of a log-probability is too wide to tell: each is too large by the same factor.
#[test]
fn diagnosis_names_a_naive_sum_of_the_gradient_alone() {
    let (shape, dtype) = ([1, 3, 151_936], Dtype::F32);
    let recipe =
        Recipe { shape, dtype, regime: Regime::Small, seed: 3, old_logp_noise_scale: 0.05, masked_garbage: false };
    let mut problem = recipe.unmasked_problem(&LossSpec::default()).unwrap();
    // All terms but one are equal, so that each addition loses the same share.
    let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
    logits.fill(0.1);
    logits.slice_mut(ndarray::s![.., .., 0]).fill(0.3);
    let of_sum = |loses: bool| {
        diagnosed(&problem, |candidate, reference| {
            let FloatArray::F32(dlogits) = &mut candidate.gradient else { panic!("asked for f32") };
            for t in 0..3 {
                let (id, factor) = (reference.token(0, t).unwrap().id, factor_of_naive_sum(&problem, (0, t)));
                for (v, x) in dlogits.slice_mut(ndarray::s![0, t, ..]).iter_mut().enumerate() {
                    // The factor of a sum that loses terms, on all other entries or on every second one alone.
                    *x *= if v != id && (loses || v % 2 == 0) { factor } else { 1.0 };
                }
            }
        })
    };
    assert_eq!(of_sum(true), [Diagnosis::NaiveSum(151_936)]);
    assert!(!of_sum(false).contains(&Diagnosis::NaiveSum(151_936)));
}

/// The exact sum of a row's exponentials over that sum, added up one by one in f32.
fn factor_of_naive_sum(problem: &Problem, (b, t): (usize, usize)) -> f32 {
    let row: Vec<f64> = problem.logits.row(b, t).into_iter().collect();
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exact: f64 = row.iter().map(|x| (x - most).exp()).sum();
    let naive = row.iter().fold(0.0_f32, |sum, x| sum + (x - most).exp() as f32);
    (exact / f64::from(naive)) as f32
}

/// `−Σ p ln p` of equal terms, one after the other in f32, as XLA adds on CPUs.
#[test]
fn diagnosis_names_a_naive_sum_of_an_entropy() {
    let mut problem = problem([1, 2, 4099], Dtype::F32, Regime::Small);
    let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
    logits.fill(0.1);
    let said = diagnosed(&problem, |candidate, _| {
        let p = 1.0 / 4099.0_f32;
        let entropy = (0..4099).fold(0.0_f32, |sum, _| sum - p * p.ln());
        candidate.entropy = candidate.entropy.take().map(|of| of.to_f64().mapv(|_| f64::from(entropy)).into());
    });
    assert_eq!(said, [Diagnosis::NaiveSum(4099)]);
}

/// `ln Σ exp(x − max)` of the vocabulary of Qwen, one term after the other in f32. What is lost where all terms are equal is also what
/// some entries at the end would add.
#[test]
fn diagnosis_names_a_naive_sum() {
    for (seed, fill) in [(3, Some(0.1)), (4, None), (2_147_483_656, None)] {
        let regime = if fill.is_some() { Regime::LongTail } else { Regime::Ties };
        let (shape, dtype) = ([1, 3, 151_936], Dtype::F32);
        let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.05, masked_garbage: false };
        let mut problem = recipe.unmasked_problem(&LossSpec::default()).unwrap();
        if let Some(x) = fill {
            // As columns of an untrained vocabulary: of one logit, so that what is lost of each is lost of all.
            let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
            logits.slice_mut(ndarray::s![.., .., 1..]).fill(x);
        }
        let said = diagnosed(&problem, |candidate, reference| {
            let mut logp = candidate.logp.take().unwrap().to_f64();
            for ((b, t), value) in logp.indexed_iter_mut() {
                let row: Vec<f32> = problem.logits.row(b, t).into_iter().map(|x| x as f32).collect();
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum = row.iter().fold(0.0_f32, |sum, x| sum + (x - most).exp());
                *value = f64::from(row[reference.token(b, t).unwrap().id] - most - sum.ln());
            }
            candidate.logp = Some(logp.into());
        });
        assert_eq!(said, [Diagnosis::NaiveSum(151_936)], "seed {seed}, {fill:?}");
    }
}

/// `lse − Σ p·x` with `p = exp(x − lse)`: the p do not sum up to 1, which is multiplied by the mean logit.
#[test]
fn entropy_of_probabilities_that_do_not_sum_to_1_is_named() {
    let mut problem = problem([4, 8, 1025], Dtype::F32, Regime::Peaked);
    let FloatArray::F32(logits) = &mut problem.logits else { panic!("asked for f32") };
    logits.mapv_inplace(|x| x + 60.0);
    let said = diagnosed(&problem, |candidate, _| {
        let mut entropy = candidate.entropy.take().unwrap().to_f64();
        for ((b, t), value) in entropy.indexed_iter_mut() {
            let row: Vec<f32> = problem.logits.row(b, t).into_iter().map(|x| x as f32).collect();
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let lse = most + row.iter().map(|x| f64::from((x - most).exp())).sum::<f64>().ln() as f32;
            let mean: f64 = row.iter().map(|x| f64::from((x - lse).exp()) * f64::from(*x)).sum();
            *value = f64::from(lse - mean as f32);
        }
        candidate.entropy = Some(entropy.into());
    });
    let [Diagnosis::EntropyDifference { lse, entropy }] = said[..] else { panic!("{said:?}") };
    assert!(lse > 60.0 && entropy < 10.0, "{said:?}");
}

/// Adds `by` to every log-probability of the reference's answer.
fn with_logp_raised(problem: &Problem, by: f64) -> Vec<Diagnosis> {
    diagnosed(problem, |candidate, _| {
        candidate.logp = candidate.logp.take().map(|logp| logp.to_f64().mapv(|x| x + by).into());
    })
}

#[test]
fn diagnosis_of_errors_of_one_sign_is_no_rounding() {
    let problem = problem([2, 3, 257], Dtype::Bf16, Regime::Peaked);
    assert_eq!(with_logp_raised(&problem, 0.1), []);
}

/// One term of 32,769 that is left out is an error that a sum one by one might have, and does not.
#[test]
fn diagnosis_of_a_lost_term_is_no_naive_sum() {
    let problem = problem([1, 2, 32_769], Dtype::F32, Regime::Small);
    assert_eq!(with_logp_raised(&problem, 1.0 / 32_769.0), []);
}

#[test]
fn diagnosis_of_wrong_targets_is_no_place_in_the_vocabulary() {
    let problem = problem([1, 1, 37], Dtype::F32, Regime::Normal);
    let said = diagnosed(&problem, |candidate, reference| {
        change(candidate, |(b, t, v), x| if reference.token(b, t).unwrap().id == v { 0.0 } else { x });
    });
    assert_eq!(said, []);
}

#[test]
fn diagnosis_of_a_few_tokens_is_no_block() {
    for (tokens, wrong, expected) in [(4, 3, None), (19, 16, Some(Diagnosis::Tokens { first: 16, tokens: 19 }))] {
        let problem = problem([2, tokens, 257], Dtype::F32, Regime::Normal);
        let said =
            diagnosed(&problem, |candidate, _| change(candidate, |(_, t, _), x| if t >= wrong { 3.0 * x } else { x }));
        let places: Vec<&Diagnosis> = said.iter().filter(|said| matches!(said, Diagnosis::Tokens { .. })).collect();
        assert_eq!(places, expected.iter().collect::<Vec<_>>());
    }
}
