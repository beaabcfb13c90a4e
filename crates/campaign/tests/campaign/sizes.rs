//! Kernels that are wrong at certain sizes or contents only: each is rejected by the default campaign, whatever its seed.

use assay_campaign::Deck;
use assay_core::problem::{Candidate, FloatArray, Problem};
use assay_core::spec::LossSpec;
use assay_judge::invariance::Invariance;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;

use crate::finds::{right, trl};

/// What is wrong with a kernel, and what it does to the outputs of a right one.
type WrongKernel = (&'static str, fn(&LossSpec, &Problem, &mut Candidate));

/// Sets the dlogits of the columns from `first` on to 0 in each token that `at` selects.
fn drop_columns(candidate: &mut Candidate, first: usize, at: impl Fn(usize, usize) -> bool) {
    let [batch, tokens, _] = candidate.gradient.shape()[..] else { unreachable!("three axes") };
    for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))).filter(|(b, t)| at(*b, *t)) {
        let mut row = candidate.gradient.row(b, t);
        row[first..].fill(0.0);
        candidate.gradient.set_row(b, t, &row);
    }
}

/// The tile `V − tile ..` is lost where the vocabulary is a multiple of it.
fn drop_full_tile(problem: &Problem, candidate: &mut Candidate, tile: usize) {
    let vocab = problem.shape().vocab;
    if vocab.is_multiple_of(tile) && vocab >= tile {
        drop_columns(candidate, vocab - tile / 2, |_, _| true);
    }
}

/// The last partial block of `block` tokens has no gradient.
fn drop_tail_of_tokens(problem: &Problem, candidate: &mut Candidate, block: usize) {
    let tokens = problem.shape().tokens;
    if tokens > block && !tokens.is_multiple_of(block) {
        drop_columns(candidate, 0, |_, t| t >= tokens / block * block);
    }
}

const WRONG: [WrongKernel; 17] = [
    ("loses a full tile of 4,096", |_, problem, candidate| drop_full_tile(problem, candidate, 4_096)),
    ("loses a full tile of 8,192", |_, problem, candidate| drop_full_tile(problem, candidate, 8_192)),
    ("loses a full tile of 16,384", |_, problem, candidate| drop_full_tile(problem, candidate, 16_384)),
    ("loses a full tile of 32,768", |_, problem, candidate| drop_full_tile(problem, candidate, 32_768)),
    ("loses a tail of one column", |_, problem, candidate| {
        let vocab = problem.shape().vocab;
        if vocab % 4_096 == 1 {
            drop_columns(candidate, vocab - 1, |_, _| true);
        }
    }),
    ("loses what is past column 65,536 in bf16", |_, problem, candidate| {
        if problem.shape().vocab > 65_536 && problem.logits.dtype() == assay_core::problem::Dtype::Bf16 {
            drop_columns(candidate, 65_536, |_, _| true);
        }
    }),
    ("loses the tail of 32 tokens", |_, problem, candidate| drop_tail_of_tokens(problem, candidate, 32)),
    ("loses the tail of 128 tokens", |_, problem, candidate| drop_tail_of_tokens(problem, candidate, 128)),
    ("loses the tail of 256 tokens", |_, problem, candidate| drop_tail_of_tokens(problem, candidate, 256)),
    ("loses sequences past 32", |_, _, candidate| drop_columns(candidate, 0, |b, _| b >= 32)),
    ("loses columns past 1,024 in the second row of a persistent program", |_, problem, candidate| {
        let shape = problem.shape();
        if shape.vocab > 1_024 {
            drop_columns(candidate, 1_024, |b, t| b * shape.tokens + t >= 132);
        }
    }),
    ("loses rows past 65,535", |_, problem, candidate| {
        let tokens = problem.shape().tokens;
        drop_columns(candidate, 0, |b, t| b * tokens + t > 65_535);
    }),
    ("has NaN where a ratio is exactly at a bound", |_, problem, candidate| {
        let logp = candidate.logp.as_ref().unwrap().to_f64();
        let old_logp = problem.old_logp.as_ref().unwrap();
        let ratio = |place: (usize, usize)| (logp[place] as f32 - old_logp[place] as f32).exp();
        let at_a_bound =
            logp.indexed_iter().any(|(place, _)| problem.mask[place] && [0.8, 1.2].contains(&ratio(place)));
        if at_a_bound {
            candidate.loss =
                Some(FloatArray::rounded_from(&ndarray::arr0(f64::NAN), candidate.loss.as_ref().unwrap().dtype()));
        }
    }),
    ("has NaN where no token counts", |_, problem, candidate| {
        if !problem.mask.iter().any(|counts| *counts) {
            candidate.loss =
                Some(FloatArray::rounded_from(&ndarray::arr0(f64::NAN), candidate.loss.as_ref().unwrap().dtype()));
        }
    }),
    ("clamps the log-ratio at 20", |spec, problem, candidate| {
        let ratio = assay_core::spec::Ratio { clamp: Some(20.0), ..spec.ratio.clone() };
        *candidate = right(&LossSpec { ratio, ..spec.clone() }, problem);
    }),
    ("takes ids for 16 bits", |spec, problem, candidate| {
        let mut other = problem.clone();
        other.ids.mapv_inplace(|id| if id < 0 { id } else { id & 0xffff });
        *candidate = right(spec, &other);
    }),
    ("overflows where a late column is 89 nats up", |_, problem, candidate| {
        let [batch, tokens, vocab] = problem.logits.shape()[..] else { unreachable!("three axes") };
        for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))).filter(|place| problem.mask[*place]) {
            let row = problem.logits.row(b, t);
            let most = |part: &[f64]| part.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if vocab > 128 && most(&row[128..]) - most(&row[..128]) > 89.0 {
                candidate.gradient.fill_row(b, t, f64::NAN);
            }
        }
    }),
];

#[test]
fn deck_deals_sizes_that_break_kernels_whatever_the_seed() {
    let (spec, limits) = (trl(), Limits::external(Grade::Standard));
    for seed in [0, 7] {
        let deck = Deck { seed, ..Deck::default() };
        let mut rejected = [0; WRONG.len()];
        for index in 0..deck.cases {
            let Some((_, problem)) = deck.problem::<Problem>(index, &spec).unwrap() else { continue };
            let correct = right(&spec, &problem);
            let mut known = None;
            // Only outputs that changed need a verdict, and twice is often enough.
            for ((_, wrong), rejected) in WRONG.iter().zip(&mut rejected).filter(|(_, rejected)| **rejected < 2) {
                let mut candidate = correct.clone();
                wrong(&spec, &problem, &mut candidate);
                if !Invariance::between(&candidate, &correct).other.is_empty() {
                    let known = known.get_or_insert_with(|| JudgedProblem::new(&spec, &problem).unwrap());
                    let verdicts = known.verdicts(&candidate.lend(), &limits).unwrap();
                    *rejected += u64::from(verdicts.iter().any(|verdict| !verdict.passed()));
                }
            }
        }
        let missed: Vec<_> = WRONG.iter().zip(rejected).filter(|(_, rejected)| *rejected < 2).collect();
        let missed: Vec<_> = missed.into_iter().map(|((name, _), rejected)| (name, rejected)).collect();
        assert!(missed.is_empty(), "seed {seed}: {missed:?}");
    }
}
