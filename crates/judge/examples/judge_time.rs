//! How long the reference and the judge take, a logit and a weight of a head: `cargo run --release -p assay-judge --example judge_time`,
//! or without `--release` as tests have them. Of a problem's tokens and columns, and of hidden units: `BxTxV` or `BxTxHxV`.
//!
//! Processor time is that of all threads together.

use std::time::Instant;

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, HeadLayout};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_native::{Native, NativeHead};

fn main() {
    let asked = std::env::args().skip(1).collect::<Vec<_>>();
    let shapes = if asked.is_empty() { vec!["2x3x151936".into(), "2x3x896x151936".into()] } else { asked };
    let spec = LossSpec { entropy_coef: 0.02, ..LossSpec::default() };
    println!("shape              dtype  grade     what        wall s   processor s   ns an element, processor");
    for shape in shapes {
        let extents: Vec<usize> = shape.split('x').map(|extent| extent.parse().expect("BxTxV or BxTxHxV")).collect();
        let recipe = |shape, dtype| Recipe {
            shape,
            dtype,
            regime: Regime::Normal,
            seed: 0,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        };
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let name = format!("{shape:<18} {dtype:<6}");
            match extents[..] {
                [batch, tokens, vocab] => {
                    let problem =
                        recipe([batch, tokens, vocab], dtype).unmasked_problem(&spec).expect("a valid recipe");
                    time(&name, &spec, &problem, &Native::default(), batch * tokens * vocab);
                }
                [batch, tokens, hidden, vocab] => {
                    let (layout, rounds_logits) = (HeadLayout::VocabByHidden, false);
                    let recipe = recipe([batch, tokens, vocab], dtype);
                    let recipe = HeadRecipe { hidden, layout, rounds_logits, recipe };
                    let problem = recipe.unmasked_problem(&spec).expect("a valid recipe");
                    time(&name, &spec, &problem, &NativeHead::default(), hidden * vocab);
                }
                _ => panic!("{shape}: expected BxTxV or BxTxHxV"),
            }
        }
    }
}

/// The reference, the judge where the better grade is reached, and where neither is.
fn time<P: Judgeable>(name: &str, spec: &LossSpec, problem: &P, kernel: &dyn Implementation<P>, elements: usize) {
    let right = kernel.run(spec, problem.clone(), 1).expect("supported");
    let known =
        timed(&format!("{name} {:<9} reference", ""), elements, || JudgedProblem::new(spec, problem).expect("valid"));
    let limits = Limits::external(Grade::Standard);
    let of_right = format!("{name} {:<9} judge    ", Grade::Exact);
    let judged = timed(&of_right, elements, || known.judge(right, &limits).expect("as many elements"));
    assert_eq!(judged.failed().count(), 0);
}

fn timed<T>(what: &str, elements: usize, work: impl FnOnce() -> T) -> T {
    let (start, processor) = (Instant::now(), processor_seconds());
    let done = work();
    let (wall, processor) = (start.elapsed().as_secs_f64(), processor_seconds() - processor);
    println!("{what} {wall:>9.3} {processor:>13.3} {:>10.1}", processor * 1e9 / elements as f64);
    done
}

/// Returns what all threads took so far, to the nanosecond; 0 where the system does not count it.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let statistics = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
    // The first of three numbers is the time on a processor.
    let nanoseconds = |statistics: String| statistics.split_whitespace().next()?.parse::<f64>().ok();
    statistics.filter_map(nanoseconds).sum::<f64>() / 1e9
}
