//! Agreement of a trainer with samplers that an independent script computed on the recorded Qwen logits.

use std::sync::OnceLock;

use assay::fixture::{ProblemFile, SafetensorsFile};
use assay::judge::agreement::{LogpQuestion, SamplingParameters, SharedLogits, compare_logp};
use assay::problem::{Advantages, Dtype, Extra, FloatArray, HeadLayout, HeadProblem, Problem, Projection};
use assay::schema::agreement::{LogpAgreement, SideFinding};
use assay::spec::{LogitsTransform, LossSpec, Support};
use ndarray::{Array2, Ix2};

fn sampler(name: &str) -> FloatArray<Ix2> {
    SafetensorsFile::open("fixtures/agreement/samplers.safetensors").unwrap().floats(name).unwrap()
}

/// The recorded group and the tiny batch with its f32 logits, read once.
fn recorded() -> &'static [Problem; 2] {
    static RECORDED: OnceLock<[Problem; 2]> = OnceLock::new();
    RECORDED.get_or_init(|| {
        [("qwen_gsm8k", "logits"), ("qwen_tiny", "logits_f32")].map(|(file, logits)| {
            let file = ProblemFile::open(format!("fixtures/{file}.safetensors")).unwrap();
            let mut problem = file.problem(logits, Some("old_logps")).unwrap();
            // The first tokens of each sequence are enough to tell.
            problem.mask.indexed_iter_mut().filter(|((_, t), _)| *t >= 3).for_each(|(_, counts)| *counts = false);
            problem
        })
    })
}

fn question(problem: &Problem, spec: LossSpec, [trainer, sampled]: [&str; 2]) -> LogpQuestion {
    let mut question = LogpQuestion::new(sampler(trainer), sampler(sampled), problem.mask.clone());
    question.logits = Some((spec, SharedLogits::Logits(problem.clone())));
    question
}

/// The trainer computes what is declared, and the sampler what `said` says.
fn expect_sampler(agreement: &LogpAgreement, said: &str) {
    let [trainer, sampled] = &agreement.sides[..] else { panic!("two sides: {agreement:?}") };
    assert!(trainer.declared, "{trainer:?}");
    assert!(
        !sampled.declared && sampled.computes.iter().any(|computes| computes.contains(said)),
        "{said}: {sampled:?}"
    );
    assert_eq!(agreement.agrees, Some(false));
    assert!(agreement.conclusion.contains("in the sampler, "), "{}", agreement.conclusion);
}

#[test]
fn agreement_names_each_way_in_which_a_sampler_differs() {
    let [group, tiny] = recorded();
    let plain = LossSpec::default();
    let cool = LossSpec { temperature: 0.7.into(), ..LossSpec::default() };
    let capped = LogitsTransform { softcap: Some(30.0), ..LogitsTransform::default() };
    let capped = LossSpec { logits: capped, ..LossSpec::default() };
    let unpadded = LossSpec { support: Support { vocab: Some(100_000), ..Support::default() }, ..LossSpec::default() };
    let cases: [(&Problem, &LossSpec, [&str; 2], &str); 14] = [
        (group, &plain, ["honest", "temperature_0.6"], "the temperature is 0.6, not 1"),
        (group, &cool, ["temperature_0.7", "honest"], "the temperature 0.7 is not applied"),
        (group, &cool, ["temperature_0.7", "temperature_0.49"], "the temperature 0.7 is applied twice"),
        (group, &plain, ["honest", "top_k_50"], "only the top-k set counts, k = 50"),
        (group, &plain, ["honest", "top_p_0.95"], "only the top-p set counts, p = 0.95"),
        (group, &plain, ["honest", "min_p_0.02"], "only the min-p set counts, p = 0.02"),
        (group, &capped, ["softcap_30", "honest"], "the softcap of 30 is missing"),
        (group, &unpadded, ["entries_100000", "honest"], "entries outside the support are counted"),
        (group, &plain, ["honest", "row_before"], "logits are those of the position before"),
        (group, &plain, ["honest", "token_before"], "numbers are those of the token before"),
        (group, &plain, ["honest", "id_plus_one"], "ids are 1 too high"),
        (
            group,
            &plain,
            ["honest", "id_plus_one_temperature_0.7"],
            "the temperature is 0.7, not 1, and ids are 1 too high",
        ),
        (tiny, &plain, ["tiny.honest_f32", "tiny.rounded_to_bf16"], "logits are rounded to bf16 first"),
        (tiny, &plain, ["tiny.honest_f32", "tiny.rounded_to_f16"], "logits are rounded to f16 first"),
    ];
    for (problem, spec, sides, said) in cases {
        expect_sampler(&compare_logp(question(problem, spec.clone(), sides)).unwrap(), said);
    }
    // The same difference on the trainer's side is told of the trainer.
    let exchanged = compare_logp(question(group, plain, ["top_k_50", "honest"])).unwrap();
    assert!(exchanged.conclusion.starts_with("in the trainer, only the top-k set"), "{}", exchanged.conclusion);
}

#[test]
fn agreement_of_two_honest_sides_is_rounding() {
    let [group, tiny] = recorded();
    let agreement = compare_logp(question(group, LossSpec::default(), ["honest", "honest"])).unwrap();
    assert_eq!(agreement.agrees, Some(true), "{agreement:?}");
    // Logits in bf16 on one side are no finding where they are declared: the floor has their rounding.
    let mut mixed = question(tiny, LossSpec::default(), ["tiny.honest_f32", "tiny.rounded_to_bf16"]);
    mixed.logits_dtypes = [None, Some(Dtype::Bf16)];
    let agreement = compare_logp(mixed).unwrap();
    assert_eq!(agreement.agrees, Some(true), "{agreement:?}");
    let floor = agreement.floor.unwrap();
    assert!(floor.beyond == 0 && floor.median > 1e-3, "{floor:?}");
}

#[test]
fn agreement_tells_two_causes_as_two() {
    let [group, _] = recorded();
    let plain = LossSpec::default();
    let said = "the temperature is 0.7, not 1, and only the top-p set counts, p = 0.95";
    // Both numbers are found, or one is given as the sampler's parameter.
    expect_sampler(
        &compare_logp(question(group, plain.clone(), ["honest", "top_p_0.95_temperature_0.7"])).unwrap(),
        said,
    );
    let mut given = question(group, plain, ["honest", "top_p_0.95_temperature_0.7"]);
    given.sampling = SamplingParameters { top_p: Some(0.95), ..SamplingParameters::default() };
    expect_sampler(&compare_logp(given).unwrap(), said);
}

#[test]
fn agreement_does_not_explain_other_weights() {
    let [group, _] = recorded();
    let unexplained = |sampled: FloatArray<Ix2>| {
        let mut question = question(group, LossSpec::default(), ["honest", "honest"]);
        question.sampler = sampled;
        compare_logp(question).unwrap()
    };
    let file = ProblemFile::open("fixtures/qwen_gsm8k.safetensors").unwrap();
    let of_file = |name| file.file().floats(name).unwrap();
    // The engine that sampled the group has quantised activations.
    for sampled in [sampler("other_weights"), of_file("old_logps")] {
        let agreement = unexplained(sampled);
        let SideFinding { computes, declared, .. } = &agreement.sides[1];
        assert!(computes.is_empty() && !declared && agreement.agrees == Some(false), "{:?}", agreement.sides);
        assert!(
            agreement.conclusion.contains("the sampler's numbers are not explained by the logits"),
            "{agreement:?}"
        );
    }
}

#[test]
fn agreement_knows_a_rounded_lm_head() {
    let file = ProblemFile::open("fixtures/qwen_tiny.safetensors").unwrap();
    let tensors = file.file();
    let rows = tensors.integers::<ndarray::Ix1>("lm_head_row_ids").unwrap().to_vec();
    let [_, tiny] = recorded();
    let problem: HeadProblem = Problem {
        logits: Projection {
            hidden: tensors.floats("hidden").unwrap(),
            lm_head: tensors.floats("lm_head_rows").unwrap(),
            layout: HeadLayout::VocabByHidden,
            rounds_logits: false,
        },
        // Each id as its place among the rows that are there.
        ids: tiny.ids.mapv(|id| rows.partition_point(|row| *row < id) as i64),
        mask: tiny.mask.clone(),
        advantages: Advantages::Token(Array2::zeros(tiny.ids.raw_dim())),
        old_logp: None,
        ref_logp: None,
        extra: Extra::default(),
    };
    let of_sampler = |name: &str| {
        let mut question = LogpQuestion::new(sampler("tiny.head"), sampler(name), tiny.mask.clone());
        question.logits = Some((LossSpec::default(), SharedLogits::Head(problem.clone())));
        compare_logp(question).unwrap()
    };
    assert_eq!(of_sampler("tiny.head").agrees, Some(true));
    expect_sampler(&of_sampler("tiny.head_in_bf16"), "the LM head is rounded to bf16 first");
}

#[test]
fn agreement_without_logits_is_not_judged() {
    let [group, _] = recorded();
    let question = LogpQuestion::new(sampler("honest"), sampler("temperature_0.6"), group.mask.clone());
    let agreement = compare_logp(question).unwrap();
    assert_eq!((agreement.agrees, agreement.floor), (None, None));
    assert!(agreement.conclusion.starts_with("not judged"), "{}", agreement.conclusion);
    // The figures are those of the formulas, over the tokens that count.
    let pairs: Vec<(f64, f64)> = group
        .mask
        .indexed_iter()
        .filter(|(_, counts)| **counts)
        .map(|((b, t), _)| (sampler("honest").at(b, t), sampler("temperature_0.6").at(b, t)))
        .collect();
    let mean = |of: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(x, y)| of(*x, *y)).sum::<f64>() / pairs.len() as f64;
    let figure = |name: &str| agreement.figures.iter().find(|figure| figure.name.contains(name)).unwrap().value;
    let weights = [mean(&|x, y| (x - y).exp()), mean(&|x, y| (2.0 * (x - y)).exp())];
    for (name, expected) in [
        ("mean |Δ|", mean(&|x, y| (x - y).abs())),
        ("token_mult_prob_error", mean(&|x, y| (x - y).abs().exp())),
        ("diff_mean", mean(&|x, y| (x.exp() - y.exp()).abs())),
        ("k3", mean(&|x, y| (x - y).exp() - 1.0 - (x - y))),
        ("effective", weights[0].powi(2) / weights[1]),
    ] {
        assert!((figure(name) - expected).abs() <= 1e-9 * expected, "{name}: {} and {expected}", figure(name));
    }
}

#[test]
fn agreement_refuses_what_does_not_fit() {
    let [group, tiny] = recorded();
    let refused = |change: &dyn Fn(&mut LogpQuestion)| {
        let mut question = question(group, LossSpec::default(), ["honest", "honest"]);
        change(&mut question);
        compare_logp(question).map_or_else(|error| error.to_string(), |agreement| agreement.conclusion)
    };
    let other_shape = refused(&|question| question.sampler = sampler("tiny.head"));
    assert_eq!(other_shape, "`sampler`: got shape [2, 4], expected [4, 16], that of `trainer`");
    let other_logits = refused(&|question| {
        question.logits = Some((LossSpec::default(), SharedLogits::Logits(tiny.clone())));
    });
    assert_eq!(other_logits, "`ids`: got shape [2, 4], expected [4, 16], that of `trainer`");
    let no_tokens = refused(&|question| question.mask.fill(false));
    assert_eq!(no_tokens, "`mask`: got no token that counts, expected one at least");
    let top_p = refused(&|question| question.sampling.top_p = Some(1.5));
    assert_eq!(top_p, "`top_p`: got 1.5, expected 0 < p ≤ 1");
    // NaN on one side is a verdict, and in no figure.
    let nan = refused(&|question| {
        let mut values = question.sampler.to_f64();
        values[[0, 2]] = f64::NAN;
        question.sampler = FloatArray::rounded_from(&values, Dtype::F32);
    });
    assert_eq!(nan, "1 of 12 tokens are NaN or infinite on one side at least");
}
