//! The smallest defects that grade `standard` rejects at Qwen's vocabulary, without and with what it forgives of sums in lanes and
//! of entropies that are differences: the table of `docs/tolerances.md`.

use std::fmt::Write as _;

use assay_core::problem::{Candidate, Dtype, HeadLayout};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::{Cancellation, Verdict};
use assay_judge::judgeable::Judgeable;
use assay_judge::trial::JudgedProblem;

use super::lane_kernel::{EntropyForm, LaneKernel, RIGHT, VOCAB, judged};

const REGIMES: [Regime; 7] =
    [Regime::Ties, Regime::Small, Regime::Normal, Regime::LongTail, Regime::Sampled, Regime::Peaked, Regime::Confident];

/// A kernel whose sums are exact: what is rejected is the defect alone.
const EXACT: LaneKernel = LaneKernel { lanes: 0, ..RIGHT };

/// A way of making a kernel wrong, with the sizes that are tried, the smallest first.
struct Ladder {
    name: &'static str,
    entropy: bool,
    sizes: Vec<f64>,
    /// Makes the kernel of one size, a power of two.
    kernel: fn(f64) -> LaneKernel,
}

fn powers(from: i32, to: i32) -> Vec<f64> {
    (from..=to).map(|k| f64::exp2(f64::from(k))).collect()
}

/// Whether the verdicts pass, without and with what is forgiven of sums in lanes and of entropies.
fn passes(verdicts: &[Verdict]) -> [bool; 2] {
    let forgiven = |verdict: &Verdict| {
        let why = verdict.short_of_exact.map(|short| short.cancellation);
        matches!(why, Some(Cancellation::LaneSum | Cancellation::EntropySum | Cancellation::EntropyDifference { .. }))
    };
    let passes = verdicts.iter().all(Verdict::passed);
    [passes && !verdicts.iter().any(forgiven), passes]
}

/// Finds the smallest size from which on every candidate is rejected, without and with what is forgiven.
fn smallest<P: Judgeable>(
    known: &JudgedProblem<P>,
    candidates: &[Candidate<P::Gradient>],
    sizes: &[f64],
) -> [Option<f64>; 2] {
    let passed: Vec<[bool; 2]> = judged(known, candidates).iter().map(|verdicts| passes(verdicts)).collect();
    [0, 1].map(|limits| {
        let first = passed.iter().rposition(|passes| passes[limits]).map_or(0, |last| last + 1);
        sizes.get(first).copied()
    })
}

/// Begins a table with a column for each regime.
fn header(first: &str) -> String {
    let names = REGIMES.map(|regime| format!(" {regime} |")).concat();
    let columns = first.matches('|').count() - 1 + REGIMES.len();
    format!("{first}{names}\n|{}", "---|".repeat(columns))
}

#[test]
#[ignore = "prints two rows of a table: cargo test -p assay-judge-tests smallest_rejected -- --ignored --nocapture"]
fn smallest_rejected_number_of_terms() {
    print_smallest(&Ladder {
        name: "terms left out",
        entropy: false,
        sizes: powers(0, 17),
        kernel: |terms| LaneKernel { left_out: 1 << ((terms.to_bits() >> 52) - 1023), ..EXACT },
    });
}

#[test]
#[ignore = "prints two rows of a table: cargo test -p assay-judge-tests smallest_rejected -- --ignored --nocapture"]
fn smallest_rejected_error_of_the_sum() {
    print_smallest(&Ladder {
        name: "error of the sum",
        entropy: false,
        sizes: powers(-22, -5),
        kernel: |error| LaneKernel { sum_factor: 1.0 + error as f32, ..EXACT },
    });
}

#[test]
#[ignore = "prints two rows of a table: cargo test -p assay-judge-tests smallest_rejected -- --ignored --nocapture"]
fn smallest_rejected_error_of_the_entropy() {
    print_smallest(&Ladder {
        name: "error of the entropy",
        entropy: true,
        sizes: powers(-22, -5),
        kernel: |error| LaneKernel { factor: 1.0 + error as f32, ..EXACT },
    });
}

/// Prints the smallest size that is rejected in each regime, on logits and behind a head, without and with what is forgiven.
fn print_smallest(Ladder { name, entropy, sizes, kernel }: &Ladder) {
    let shown = |size: Option<f64>| match size {
        None => "–".into(),
        Some(size) if size >= 1.0 => size.to_string(),
        Some(size) => format!("{size:.1e}"),
    };
    let spec = LossSpec::from_cotangents(*entropy);
    let kernels: Vec<LaneKernel> = sizes.iter().map(|size| kernel(*size)).collect();
    let mut rows = [format!("\n| {name} | logits |"), format!("\n| {name} | a head |")];
    for regime in REGIMES {
        let shape = [1, 2, VOCAB];
        let recipe =
            Recipe { shape, dtype: Dtype::F32, regime, seed: 5, old_logp_noise_scale: 0.3, masked_garbage: false };
        let problem = recipe.unmasked_problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run(&problem)).collect();
        let on_logits = smallest(&known, &candidates, sizes);
        let head = HeadRecipe { hidden: 4, layout: HeadLayout::VocabByHidden, rounds_logits: false, recipe };
        let problem = head.unmasked_problem(&spec).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run_head(&known)).collect();
        let behind_a_head = smallest(&known, &candidates, sizes);
        for (row, [before, after]) in rows.iter_mut().zip([on_logits, behind_a_head]) {
            let _ = write!(row, " {} → {} |", shown(before), shown(after));
        }
    }
    println!("{}{}", header("| defect | of |"), rows.concat());
}

/// Right kernels at their worst over four problems of a token a regime: the largest error / limit of logp, and of the entropy.
#[test]
#[ignore = "prints a table: cargo test -p assay-judge-tests largest_errors -- --ignored --nocapture"]
fn largest_errors_of_right_sums_in_lanes() {
    let right = |entropy, lanes| LaneKernel { lanes, entropy, ..RIGHT };
    let forms = [
        ("sum of 8 lanes", "logp", right(EntropyForm::Textbook, 8)),
        ("sum of 16 lanes", "logp", right(EntropyForm::Textbook, 16)),
        ("−Σ p·ln p, 8 lanes", "entropy", right(EntropyForm::Textbook, 8)),
        ("−Σ p·ln p, 16 lanes", "entropy", right(EntropyForm::Textbook, 16)),
        ("lse − Σ p·x, 8 lanes", "entropy", right(EntropyForm::Difference, 8)),
        ("lse − Σ p·x, 16 lanes", "entropy", right(EntropyForm::Difference, 16)),
        ("lse − t/s by chunks", "entropy", right(EntropyForm::Chunked(8192), 16)),
    ];
    let kernels = forms.map(|(_, _, kernel)| kernel);
    let spec = LossSpec::from_cotangents(true);
    let mut rows = forms.map(|(name, gate, _)| format!("\n| {name} | {gate} |"));
    for regime in REGIMES {
        let mut largest = forms.map(|_| 0.0_f64);
        for seed in 0..4 {
            let shape = [1, 1, VOCAB];
            let dtype = if seed % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 };
            let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: false };
            let problem = recipe.unmasked_problem(&spec).unwrap();
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let candidates: Vec<_> = kernels.iter().map(|kernel| kernel.run(&problem)).collect();
            let verdicts = judged(&known, &candidates);
            for ((verdicts, (name, gate, _)), largest) in verdicts.iter().zip(forms).zip(&mut largest) {
                let verdict = verdicts.iter().find(|verdict| verdict.gate.to_string() == gate).unwrap();
                assert!(verdict.passed(), "{name}: {regime} {dtype}, seed {seed}: {verdict:?}");
                if passes(std::slice::from_ref(verdict)) == [false, true] {
                    *largest = largest.max(verdict.tally.badness());
                }
            }
        }
        for (row, largest) in rows.iter_mut().zip(largest) {
            let shown = if largest == 0.0 { "–".into() } else { format!("{largest:.2}") };
            let _ = write!(row, " {shown} |");
        }
    }
    println!("{}{}", header("| right kernel | of |"), rows.concat());
}
