//! A batch's loss and gradients are those of its parts, into however many it is cut.

use std::ops::Range;
use std::path::Path;

use crate::common::training::{run, settings, with};
use assay::judge::generate::{Recipe, Regime};
use assay::parts::SeparableBatch;
use assay::problem::{Dtype, Problem};
use assay::reference::evaluate;
use assay::spec::{
    AdvantageLevel, DroppedTerm, ImportanceSampling, LossSpec, Objective, QuantilePrecision, Ratio, RatioLevel,
    Reduction, Rows, TopEntropy,
};
use assay::suites::cases;
use assay::train::metrics::StepRecord;
use ndarray::{Array3, s};
use proptest::prelude::*;
use serde_json::json;

const ROWS: usize = 8;
const WIDTH: usize = 7;
const VOCAB: usize = 13;

/// Rows of several lengths, one of them without a token that counts.
fn problem(spec: &LossSpec, seed: u64) -> Problem {
    let recipe = Recipe {
        shape: [ROWS, WIDTH, VOCAB],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed,
        old_logp_noise_scale: 0.4,
        masked_garbage: false,
    };
    let mut problem = recipe.problem(spec).unwrap();
    let empty = seed as usize % ROWS;
    problem.mask.indexed_iter_mut().for_each(|((b, t), counts)| {
        let length = 1 + (b * 5 + empty) % WIDTH;
        *counts &= b != empty && t < length;
    });
    problem
}

/// The rows of one of `parts` parts, and the width of what is read of them.
fn cut(spec: &LossSpec, problem: &Problem, parts: usize) -> Vec<(Range<usize>, usize)> {
    let rows = ROWS / parts;
    if matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens) {
        return (0..parts).map(|i| (i * rows..(i + 1) * rows, WIDTH)).collect();
    }
    let width = |rows: Range<usize>| {
        let last = |b: usize| problem.mask.row(b).iter().rposition(|counts| *counts).map_or(1, |t| t + 1);
        rows.map(last).max().unwrap()
    };
    (0..parts).map(|i| i * rows..(i + 1) * rows).map(|part| (part.clone(), width(part))).collect()
}

/// Loss and dlogits by the f64 reference, of the parts by themselves.
fn of_parts(spec: &LossSpec, problem: &Problem, parts: usize) -> (f64, Array3<f64>) {
    let whole = SeparableBatch::new(spec, problem.with_logits(())).unwrap();
    let logits = problem.logits.to_f64();
    let (mut loss, mut dlogits) = (0.0, Array3::zeros(logits.dim()));
    for (rows, width) in cut(spec, problem, parts) {
        let (spec, batch) = whole.part(rows.clone(), width);
        let part = batch.with_logits(logits.slice(s![rows.clone(), ..width, ..]).to_owned().into());
        let outcome = evaluate(&spec, &part).unwrap_or_else(|error| panic!("{error}: {spec:?}")).outcome();
        loss += outcome.loss.value();
        dlogits.slice_mut(s![rows, ..width, ..]).assign(&outcome.gradient.to_f64());
    }
    (loss, dlogits)
}

fn expect_parts_add_up(spec: &LossSpec, seed: u64) {
    let problem = problem(spec, seed);
    let whole = evaluate(spec, &problem).unwrap().outcome();
    let (loss, dlogits) = (whole.loss.value(), whole.gradient.to_f64());
    let size = dlogits.iter().fold(loss.abs(), |size, x| size.max(x.abs()));
    assert!(size.is_finite(), "no ratio of this noise overflows");
    for parts in [1, 2, 4, 8] {
        let (sum, gradients) = of_parts(spec, &problem, parts);
        let limit = 1e-11 * (1.0 + size);
        assert!((sum - loss).abs() <= limit, "{parts} parts: loss {sum}, of the whole {loss}\n{spec:?}");
        for (at, &x) in gradients.indexed_iter() {
            assert!((x - dlogits[at]).abs() <= limit, "{parts} parts: dlogits{at:?} {x}, {}\n{spec:?}", dlogits[at]);
        }
    }
}

proptest! {
    #![proptest_config(cases::config(400))]

    #[test]
    fn parts_1_2_4_and_8_have_the_loss_and_dlogits_of_the_whole(spec in cases::any_spec(), seed in 0..1000_u64) {
        expect_parts_add_up(&spec, seed);
    }
}

/// Every reduction of the policy term.
fn reductions() -> Vec<Reduction> {
    let rows = [Rows::All, Rows::NonEmpty, Rows::Given(32.0)];
    let of_rows = rows.into_iter().flat_map(|rows| {
        [
            Reduction::SequenceMean { rows },
            Reduction::SequenceSum { rows },
            Reduction::FixedLength { rows, length: None },
            Reduction::FixedLength { rows, length: Some(9) },
        ]
    });
    [Reduction::TokenMean, Reduction::Normalizer(100.0)].into_iter().chain(of_rows).collect()
}

#[test]
fn parts_of_every_reduction_add_up_with_bonus_and_empty_rows() {
    for reduction in reductions() {
        let spec = LossSpec { reduction, entropy_coef: 0.1, denominator_epsilon: 0.5, ..LossSpec::default() };
        expect_parts_add_up(&spec, 3);
    }
    // A row without tokens has a loss of its own.
    let spec = LossSpec {
        objective: Objective::ImportanceSampling(ImportanceSampling { empty_rows: true }),
        ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
        advantages: AdvantageLevel::Sequence,
        reduction: Reduction::SequenceMean { rows: Rows::All },
        entropy_coef: 0.1,
        ..LossSpec::default()
    };
    expect_parts_add_up(&spec, 4);
}

#[test]
fn parts_do_not_add_up_where_a_batchs_logits_choose() {
    let top_entropy =
        Some(TopEntropy { fraction: 0.5, drops: DroppedTerm::default(), precision: QuantilePrecision::Exact });
    let spec = LossSpec { top_entropy, ..LossSpec::default() };
    let batch = problem(&spec, 1).with_logits(());
    let error = SeparableBatch::new(&spec, batch).err().unwrap().to_string();
    assert!(error.starts_with("spec field `top_entropy`: got a choice, expected none"), "{error}");
}

/// One step of a small policy, its gradient computed in `micro_batches` parts.
fn step_of(folder: &Path, name: &str, loss: &LossSpec, micro_batches: usize) -> StepRecord {
    let update = json!({"ppo_epochs": 2, "micro_batches": micro_batches});
    let settings = settings(folder, &format!("{name}-{micro_batches}"));
    run(with(settings, json!({"steps": 1, "update": update, "loss": loss}))).unwrap()[0].clone()
}

/// Prints the table of docs/train.md. The second epoch starts from the weights that the first left, so that a gradient whose
/// parts did not add up would part them.
#[test]
fn parts_of_a_training_step_in_four_parts_are_that_in_one() {
    let folder = tempfile::tempdir().unwrap();
    println!(
        "| reduction | entropy bonus | loss, 1 part | 4 parts | gradient norm, 1 part | 4 parts |\n|---|---|---|---|---|---|"
    );
    for (reduction, entropy_coef) in
        reductions().into_iter().flat_map(|reduction| [(reduction, 0.0), (reduction, 0.01)])
    {
        let loss = LossSpec { reduction, entropy_coef, ..LossSpec::default() };
        let name = serde_json::to_string(&reduction).unwrap().replace('"', "");
        let [one, four] = [1, 4].map(|parts| step_of(folder.path(), &format!("{name}-{entropy_coef}"), &loss, parts));
        assert_eq!(one.tokens_sha256, four.tokens_sha256);
        assert!(one.grad_norm > 1e-3 && one.valid_tokens < 16 * 12, "there is something to compare: {one:?}");
        println!(
            "| `{name}` | {entropy_coef} | {:+.6} | {:+.6} | {:.6} | {:.6} |",
            one.loss, four.loss, one.grad_norm, four.grad_norm
        );
        for (what, one, four) in [("loss", one.loss, four.loss), ("gradient norm", one.grad_norm, four.grad_norm)] {
            assert!(
                (one - four).abs() < 1e-4 * one.abs().max(1e-2),
                "{name}, {what}: {one} in one part, {four} in four"
            );
        }
    }
}
