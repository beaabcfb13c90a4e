//! The LM head programs against the reference, through the judge, on every device count.
//!
//! Hidden states and weights are eighths, so that every logit is exact in f32 and rounded logits are what they should be.
use super::cpu_plugins;
use std::env;
use std::path::Path;

use assay::implementation::{Implementation, ProblemFormat};
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::judge::packed::Twins;
use assay::judge::tolerance::Limits;
use assay::problem::{
    Advantages, Dtype, Extra, FloatArray, HeadCandidate, HeadForm, HeadLayout, HeadProblem, HeadShape, Problem,
    Projection,
};
use assay::programs::{ANY_TPU, CHUNK_BYTES, Programs, StructuredSpec};
use assay::registry::head_registry;
use assay::spec::{
    DroppedTerm, Kl, KlEstimator, LogitsTransform, LossSpec, OldLogp, QuantilePrecision, Ratio, RatioLevel, Reduction,
    Rows, Support, TopEntropy,
};
use assay::suites;
use assay::xla::XlaHead;
use assay_testkit::JudgedProblem;
use ndarray::{Array1, Array2, Array3, s};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Four chunks of eight rows, the last not full; columns that no device count divides.
const SHAPE: HeadShape = HeadShape { batch: 3, tokens: 9, hidden: 16, vocab: 203 };

/// 12 ids: one device, 2 to 8 by rows and by vocabulary, each with sums whole and in parts, 4 and 8 by both. What is cut over one device is what is whole
/// (`programs_cut_over_one_device_are_those_of_what_is_whole`).
const PLACEMENTS: usize = 30;

#[derive(Clone, Debug)]
struct Case {
    #[allow(dead_code, reason = "failures print it")]
    name: &'static str,
    spec: LossSpec,
    dtype: Dtype,
    layout: HeadLayout,
    rounds_logits: bool,
}

fn specs() -> [(&'static str, LossSpec); 4] {
    let plain = LossSpec::default();
    let all_terms = LossSpec {
        temperature: 0.7.into(),
        kl: Some(Kl::plain(0.1, KlEstimator::K3)),
        entropy_coef: 0.01,
        reduction: Reduction::SequenceMean { rows: Rows::All },
        logits: LogitsTransform { softcap: Some(6.0), ..LogitsTransform::default() },
        support: Support { vocab: Some(150), excluded_ids: vec![0, 7], keep_sampled: true, kept: None },
        ..plain.clone()
    };
    let sequence = LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, ..plain.ratio },
        entropy_coef: 0.01,
        temperature: 1.3.into(),
        ..plain.clone()
    };
    let sequence_token = LossSpec {
        ratio: Ratio { level: RatioLevel::SequenceToken, ..plain.ratio },
        logits: LogitsTransform { scale: 0.5, softcap: None, bias: true },
        ..plain.clone()
    };
    [("plain", plain), ("all terms", all_terms), ("sequence", sequence), ("sequence token", sequence_token)]
}

/// Sixteen among which any two of a spec, a dtype, and a layout with a rounding meet.
fn cases() -> Vec<Case> {
    let layouts = [
        (HeadLayout::HiddenByVocab, false),
        (HeadLayout::VocabByHidden, true),
        (HeadLayout::HiddenByVocab, true),
        (HeadLayout::VocabByHidden, false),
    ];
    let mut cases = Vec::new();
    for (i, (name, spec)) in specs().into_iter().enumerate() {
        for (j, (layout, rounds_logits)) in layouts.into_iter().enumerate() {
            let dtype = Dtype::KERNEL[(i + j) % Dtype::KERNEL.len()];
            cases.push(Case { name, spec: spec.clone(), dtype, layout, rounds_logits });
        }
    }
    cases
}

/// Logits `[B,T,V]` in f64, rounded where the problem says so.
fn logits(Projection { hidden, lm_head, layout, rounds_logits }: &Projection) -> Array3<f64> {
    let dtype = hidden.dtype();
    let (hidden, lm_head) = (hidden.to_f64(), lm_head.to_f64());
    let (b, t, h) = hidden.dim();
    let vocab = lm_head.len() / h;
    Array3::from_shape_fn((b, t, vocab), |(b, t, v)| {
        let x: f64 = (0..h).map(|h| hidden[[b, t, h]] * lm_head[layout.at(h, v)]).sum();
        if *rounds_logits { dtype.round(x) } else { x }
    })
}

/// The log-probability of `id`, of logits that become what the spec says.
fn logp(spec: &LossSpec, row: &[f64], bias: &Array1<f64>, id: usize) -> f64 {
    let LogitsTransform { scale, softcap, bias: biased } = spec.logits;
    let changed = |j: usize| {
        let x = scale * (row[j] + if biased { bias[j] } else { 0.0 });
        softcap.map_or(x, |cap| cap * (x / cap).tanh())
    };
    let inside = |j: usize| spec.support.vocab.is_none_or(|vocab| j < vocab) && !spec.support.excluded_ids.contains(&j);
    let columns = (0..row.len()).filter(|&j| j == id || inside(j));
    -columns
        .map(|j| ((changed(j) - changed(id)) / spec.temperature.number().expect("one for all")).exp())
        .sum::<f64>()
        .ln()
}

/// A batch with masked tokens, whose hidden states are NaN, and a row of few tokens.
fn problem(case: &Case, shape: HeadShape, seed: u64) -> HeadProblem {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let HeadShape { batch, tokens, hidden, vocab } = shape;
    let mut eighths = || f64::from(rng.random_range(-12..=12)) / 8.0;
    let states = Array3::from_shape_simple_fn((batch, tokens, hidden), &mut eighths);
    let head = Array2::from_shape_simple_fn(case.layout.extents(hidden, vocab), &mut eighths);
    let rounded = |states: &Array3<f64>| Projection {
        hidden: FloatArray::rounded_from(states, case.dtype),
        lm_head: FloatArray::rounded_from(&head, case.dtype),
        layout: case.layout,
        rounds_logits: case.rounds_logits,
    };
    let exact = logits(&rounded(&states));
    let ids = Array2::from_shape_simple_fn((batch, tokens), || rng.random_range(0..vocab));
    let mask = Array2::from_shape_fn((batch, tokens), |(b, t)| t < tokens - 2 * b && (b + t) % 5 != 3);
    let bias = Array1::from_shape_simple_fn(vocab, || rng.random_range(-1.0..1.0_f32)).mapv(f64::from);
    let mut near_logp = || {
        Array2::from_shape_fn((batch, tokens), |(b, t)| {
            let row = exact.slice(s![b, t, ..]).to_vec();
            logp(&case.spec, &row, &bias, ids[[b, t]]) + rng.random_range(-0.5..0.5)
        })
    };
    let (old_logp, ref_logp) = (near_logp(), near_logp());
    let advantages = Array1::from_shape_simple_fn(batch, || rng.random_range(-2.0..2.0));
    let mut masked = states;
    for ((b, t), &counts) in mask.indexed_iter() {
        if !counts {
            masked.slice_mut(s![b, t, ..]).fill(f64::NAN);
        }
    }
    Problem {
        logits: rounded(&masked),
        ids: ids.mapv(|id| id as i64),
        mask,
        advantages: Advantages::Sequence(advantages),
        old_logp: (case.spec.old_logp == OldLogp::Given).then_some(old_logp),
        ref_logp: case.spec.kl.as_ref().map(|_| ref_logp),
        extra: Extra { bias: case.spec.logits.bias.then_some(bias), ..Extra::default() },
    }
}

fn expect_dtypes(problem: &HeadProblem, outcome: &HeadCandidate) {
    assert_eq!(outcome.gradient.dhidden.dtype(), problem.dtype());
    assert_eq!(outcome.gradient.dlm_head.dtype(), Dtype::F32);
}

fn run(implementation: &dyn Implementation<HeadProblem>, case: &Case, devices: usize, seed: u64) {
    let problem = problem(case, SHAPE, seed);
    let known = JudgedProblem::new(&case.spec, &problem).unwrap();
    expect_dtypes(&problem, &known.expect_right(implementation, devices, &format!("seed {seed}, {case:?}")));
}

/// Every head program with chunks of eight rows, and the gradient summed by eight rows or by a sixteenth.
fn in_chunks(plugin: &Path) -> Vec<XlaHead> {
    let run_here = XlaHead::all(Some(plugin)).into_iter().filter(|head| !head.program().is_for_gpus());
    run_here.map(|head| head.chunk_bytes(1).sum_bytes(1)).collect()
}

/// Each with the device counts that it is run on.
fn placements(plugin: &Path) -> Vec<(XlaHead, Vec<usize>)> {
    let placed = |head: XlaHead| {
        let counts = head.device_counts().into_iter();
        let counts = counts.filter(|&devices| devices > 1 || head.program().is_whole()).collect();
        (head, counts)
    };
    in_chunks(plugin).into_iter().map(placed).collect()
}

#[test]
fn lm_head_every_dtype_and_layout_matches_reference() {
    for (place, plugin) in cpu_plugins().iter().enumerate() {
        let cases = if place == 0 { cases() } else { vec![cases().swap_remove(9)] };
        for head in in_chunks(plugin).iter().filter(|head| head.program().is_whole()) {
            // What is XLA's own has no pairs to go wrong in: each spec is met by two layouts, each layout by two specs.
            let step = if head.id() == "xla-lm-head" { 2 } else { 1 };
            for (seed, case) in cases.iter().enumerate().filter(|(seed, _)| (seed + seed / 4).is_multiple_of(step)) {
                run(head, case, 1, seed as u64);
            }
        }
    }
}

#[test]
fn lm_head_on_every_device_count_matches_reference() {
    let cases = cases();
    let mut placed = 0;
    for (head, counts) in placements(cpu_plugins()[0]) {
        for devices in counts {
            // A step that is prime to the number of cases: each placement meets others.
            run(&head, &cases[placed * 7 % cases.len()], devices, placed as u64);
            placed += 1;
        }
    }
    assert_eq!(placed, PLACEMENTS);
}

/// Random specs, layouts and roundings an implementation, on all of its devices. `ASSAY_DEVICE_CASES` asks for more.
const STRUCTURES: usize = 1;

#[test]
fn lm_head_any_spec_on_most_devices_matches_reference() {
    let structures = env::var("ASSAY_DEVICE_CASES").ok();
    let structures = structures.map_or(STRUCTURES, |text| text.parse().expect("a number of specs a placement"));
    for (seed, (head, counts)) in placements(cpu_plugins()[0]).into_iter().enumerate() {
        let devices = *counts.last().expect("the plugin has eight devices");
        let dtype = Dtype::KERNEL[seed % Dtype::KERNEL.len()];
        // Of sixteen drawn specs as many as asked for are supported, each in every regime but that of holes.
        let cases = suites::device_heads(dtype, 16 * structures, seed as u64).into_iter();
        let supported =
            |(spec, recipe): &(LossSpec, HeadRecipe)| head.supports(spec, recipe.shape(), dtype, devices).is_ok();
        let asked = structures * (Regime::FINITE.len() - 1);
        let cases: Vec<_> = cases.filter(supported).take(asked).collect();
        assert_eq!(cases.len(), asked, "{} on {devices} devices", head.id());
        for (spec, recipe) in cases {
            let problem = recipe.problem(&spec).expect("a valid recipe");
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            expect_dtypes(&problem, &known.expect_right(&head, devices, &format!("{recipe:?}, {spec:?}")));
        }
    }
}

/// Logp of three ids a token, whole and cut, by chunks and all at once.
#[test]
fn lm_head_of_several_ids_matches_reference() {
    let spec = LossSpec {
        temperature: 0.7.into(),
        logits: LogitsTransform { softcap: Some(6.0), ..LogitsTransform::default() },
        ids_per_token: 3,
        ..LossSpec::from_cotangents(false)
    };
    let asked = ["xla-lm-head", "tile-lm-head", "tile-lm-head-vocab", "tile-lm-head-rows-scattered"];
    let placed = placements(cpu_plugins()[0]).into_iter().filter(|(head, _)| asked.contains(&head.id()));
    let placed: Vec<_> = placed.collect();
    assert_eq!(placed.len(), asked.len());
    for (seed, (head, counts)) in (0..).zip(placed) {
        let dtype = Dtype::KERNEL[seed as usize % 3];
        let HeadShape { batch, tokens, hidden, vocab } = SHAPE;
        let (shape, regime) = ([batch, tokens, vocab], Regime::Sampled);
        let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
        let recipe = HeadRecipe { hidden, layout: HeadLayout::VocabByHidden, rounds_logits: seed % 2 == 0, recipe };
        let problem = recipe.problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let devices = *counts.last().expect("the plugin has eight devices");
        expect_dtypes(&problem, &known.expect_right(&head, devices, &format!("{recipe:?}")));
    }
}

/// Sequences in one row, whose ends no chunk and no device's part ends at.
#[test]
fn lm_head_packed_sequences_match_reference() {
    let sequence = LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
        reduction: Reduction::SequenceMean { rows: Rows::NonEmpty },
        entropy_coef: 0.01,
        ..LossSpec::default()
    };
    let mut judged = 0;
    for (head, counts) in placements(cpu_plugins()[0]) {
        if !["xla-lm-head", "xla-lm-head-rows", "tile-lm-head", "tile-lm-head-mesh"].contains(&head.id()) {
            continue;
        }
        let devices = *counts.last().expect("the plugin has eight devices");
        let (_, recipe) = suites::device_heads(Dtype::F32, 1, 1).swap_remove(0);
        let recipe =
            HeadRecipe { recipe: Recipe { shape: [3, 9, 131], regime: Regime::Normal, ..recipe.recipe }, ..recipe };
        let twins =
            Twins::from_padded(&sequence, &recipe.problem(&sequence).expect("a valid recipe")).expect("no weights");
        let known = JudgedProblem::new(&twins.spec, &twins.packed).expect("a valid problem");
        known.expect_right(&head, devices, &format!("packed {recipe:?}"));
        judged += 1;
    }
    assert_eq!(judged, 4);
}

/// The baseline has no chunks: its program is the one of the other tests.
#[test]
fn lm_head_registered_in_one_chunk_matches_reference() {
    let registry = head_registry(Some(cpu_plugins()[0]));
    let in_chunks = registry.iter().filter(|head| head.class() == "tile-lm-head" && head.available().is_ok());
    let mut judged = 0;
    for (seed, implementation) in in_chunks.enumerate() {
        let case = &cases()[seed * 5 % 16];
        let devices = *implementation.device_counts().last().unwrap();
        run(&**implementation, case, devices, seed as u64);
        judged += 1;
    }
    assert_eq!(judged, 6);
}

#[test]
fn lm_head_prepared_step_equals_a_run() {
    let head = &in_chunks(cpu_plugins()[0])[4];
    assert_eq!(head.id(), "tile-lm-head");
    let case = &cases()[5];
    let problem = problem(case, SHAPE, 3);
    let given = ProblemFormat::from_problem(&case.spec, &problem).unwrap();
    let prepared = head.prepare(&case.spec, given, 1).unwrap();
    assert!(prepared.compiled_memory().unwrap().peak_bytes() > 0, "it is compiled before there is a problem");
    let form = HeadForm { rounds_logits: !given.form.rounds_logits, ..given.form };
    let other = head.prepare(&case.spec, ProblemFormat { form, ..given }, 1).unwrap();
    let Err(error) = other.load(&problem) else { panic!("logits are rounded, or are not") };
    let [given, expected] = [given, ProblemFormat { form, ..given }].map(|given| given.to_string());
    assert!([given, expected].iter().all(|form| error.to_string().contains(form)), "{error}");
    let outcome = prepared.load(&problem).unwrap()().unwrap()().unwrap();
    expect_dtypes(&problem, &outcome);
    let known = JudgedProblem::new(&case.spec, &problem).unwrap();
    let judged = known.judge(outcome, &Limits::for_class(head.class()).unwrap()).unwrap();
    assert_eq!(known.failures(&judged, "prepared", "this test"), Vec::<String>::new());
}

/// Elements of the largest array that a program names.
fn largest_array(program: &str) -> usize {
    let types = program.split("tensor<").skip(1).filter_map(|rest| rest.split('>').next());
    let elements = |ty: &str| ty.split('x').map_while(|extent| extent.parse::<usize>().ok()).product();
    types.map(elements).max().unwrap()
}

#[test]
fn lm_head_in_chunks_has_no_array_of_all_logits() {
    let shape = HeadShape { batch: 2, tokens: 4096, hidden: 512, vocab: 151_936 };
    for (name, spec) in specs() {
        for rounds_logits in [false, true] {
            let form = HeadForm { layout: HeadLayout::VocabByHidden, rounds_logits };
            let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
            let largest = |id: &str| {
                let all = XlaHead::all(None);
                let head = all.into_iter().find(|head| head.id() == id).unwrap();
                largest_array(&head.program().program_for(StructuredSpec::new(&spec), given, 8, ANY_TPU).unwrap())
            };
            let chunk = CHUNK_BYTES / if rounds_logits { 2 } else { 4 };
            assert!(largest("tile-lm-head") <= chunk, "{name}, {rounds_logits}");
            assert_eq!(largest("xla-lm-head"), 2 * 4096 * 151_936);
        }
    }
}

#[test]
fn lm_head_for_many_devices_has_the_part_of_one() {
    let shape = HeadShape { batch: 256, tokens: 128, hidden: 512, vocab: 151_936 };
    let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
    let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
    let all = XlaHead::all(None);
    let program = |id: &str, devices| {
        let head = all.iter().find(|head| head.id() == id).unwrap();
        head.program().program_for(StructuredSpec::new(&LossSpec::default()), given, devices, ANY_TPU)
    };
    for (id, batch, vocab) in [("tile-lm-head-rows", 1, 151_936), ("tile-lm-head-vocab", 256, 594)] {
        let text = program(id, 256).unwrap();
        let parameters = text.lines().find(|line| line.contains("@main")).unwrap();
        for array in [format!("tensor<{batch}x128x512xbf16>"), format!("tensor<512x{vocab}xbf16>")] {
            assert!(parameters.contains(&array), "{id}: no {array} in {parameters}");
        }
    }
    // Half of the vocabulary is 75,968 columns, 593.5 registers.
    assert!(program("tile-lm-head-mesh", 256).unwrap().contains("tensor<512x76032xbf16>"));
    assert!(program("tile-lm-head-mesh", 2).unwrap_err().to_string().contains("device count 2"));
}

#[test]
fn lm_head_unsupported_is_refused_by_name() {
    let all = XlaHead::all(None);
    let refused =
        |spec: &LossSpec, shape, dtype, devices| all[4].supports(spec, shape, dtype, devices).unwrap_err().to_string();
    let plain = LossSpec::default();
    assert!(refused(&plain, SHAPE, Dtype::F64, 1).contains("tile-lm-head does not support hidden dtype f64"));
    assert!(refused(&plain, SHAPE, Dtype::F32, 2).contains("device count 2"));
    let wide = HeadShape { vocab: 1 << 31, ..SHAPE };
    assert!(refused(&plain, wide, Dtype::F32, 1).contains("vocabulary 2147483648"));
    let long = HeadShape { tokens: 1 << 31, ..SHAPE };
    assert!(refused(&plain, long, Dtype::F32, 1).contains("tokens 3x2147483648"));
    let mut chosen = plain.clone();
    chosen.top_entropy =
        Some(TopEntropy { fraction: 0.5, drops: DroppedTerm::default(), precision: QuantilePrecision::default() });
    assert!(refused(&chosen, SHAPE, Dtype::F32, 1).contains("does not support top_entropy"));
}
