//! A batch in parts comes to what it comes to whole: the sum of losses, every token's gradient.

use assay_algebra::parts;
use assay_core::implementation::{Implementation, Workload as _};
use assay_core::problem::{Candidate, CuSeqlens, Dtype, Problem, Sequences};
use assay_core::spec::{Kl, KlEstimator, LossSpec, Reduction, Rows};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_native::Native;
use assay_suites::cases;
use ndarray::Axis;
use proptest::prelude::*;

const ROWS: usize = 6;

/// Rows of several lengths, one of them without a token that counts.
fn problem(spec: &LossSpec, seed: u64) -> Problem {
    let recipe = Recipe {
        shape: [ROWS, 5, 13],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed,
        old_logp_noise_scale: 0.4,
        masked_garbage: false,
    };
    let mut problem = recipe.problem(spec).unwrap();
    let empty = seed as usize % ROWS;
    problem.mask.indexed_iter_mut().for_each(|((b, t), counts)| *counts &= b != empty && t <= (b * 3 + empty) % 5);
    problem
}

/// The same in one row: sequences of several lengths, two of them empty, and tokens behind the last.
fn laid_out(spec: LossSpec, problem: &Problem) -> (LossSpec, Problem) {
    (spec.with_width(5), problem.laid_out(CuSeqlens::from_lengths([0, 9, 1, 12, 0, 6])))
}

/// The gates that a candidate fails as the whole batch's.
fn failures(spec: &LossSpec, problem: &Problem, candidate: Candidate) -> Vec<String> {
    let known = JudgedProblem::new(spec, problem).unwrap();
    let judged = known.judge(candidate, &Limits::for_class(Native::default().class()).unwrap()).unwrap();
    known.failures(&judged, "parts", "this test")
}

proptest! {
    #![proptest_config(cases::config(200))]

    #[test]
    fn parts_of_any_loss_add_up_to_its_batch(
        spec in cases::any_spec(),
        seed in 0..1000_u64,
        cut in 2..=ROWS,
        packed in any::<bool>(),
    ) {
        let problem = problem(&spec, seed);
        let (spec, problem) = if packed { laid_out(spec, &problem) } else { (spec, problem) };
        let candidate = parts::run(&Native::default(), &spec, &problem, cut, 1).unwrap();
        let failed = failures(&spec, &problem, candidate);
        prop_assert!(failed.is_empty(), "{cut} parts, packed {packed}: {}", failed.concat());
    }
}

/// What a trainer has that hands every micro-batch the same options and adds up.
#[test]
fn parts_summed_own_means_are_distinguished() {
    let means = [
        Reduction::TokenMean,
        Reduction::SequenceMean { rows: Rows::NonEmpty },
        Reduction::FixedLength { rows: Rows::All, length: None },
    ];
    for reduction in means {
        let spec = LossSpec { reduction, kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..LossSpec::default() };
        let problem = problem(&spec, 3);
        let own: Vec<Candidate> = (0..ROWS / 2)
            .map(|part| {
                let rows = [2 * part, 2 * part + 1];
                let tokens = problem.with_logits(()).rows(2 * part..2 * part + 2, 5);
                let logits = problem.logits.select(Axis(0), &rows);
                Native::default().run(&spec, tokens.with_logits(logits), 1).unwrap()
            })
            .collect();
        assert!(!failures(&spec, &problem, Candidate::from_parts(&Sequences::Rows, &own)).is_empty(), "{reduction:?}");
    }
}
