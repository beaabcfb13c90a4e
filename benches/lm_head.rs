//! The LM head with the loss on the CPU against its three matrix products alone, at the head of Qwen2.5-0.5B, for several
//! chunks of tokens. The answer is judged on a few tokens before anything is timed; the two sides take turns; medians.
//!
//! `ASSAY_BENCH_SHAPE` asks for another `BxTxHxV`.

use std::time::{Duration, Instant};

use assay::implementation::Implementation;
use assay::judge::trial::JudgedProblem;
use assay::native::NativeHead;
use assay::problem::{Dtype, HeadProblem, HeadShape};
use assay::products::HeadProducts;
use assay::spec::LossSpec;
use assay::suites::cases::head_recipe;

const SAMPLES: usize = 5;

fn main() {
    let shape = std::env::var("ASSAY_BENCH_SHAPE").unwrap_or_else(|_| "1x512x896x151936".into());
    let shape: HeadShape = shape.parse().unwrap_or_else(|error| panic!("{error}"));
    check(HeadShape { batch: 1, tokens: 3, ..shape });
    let flops = HeadProducts::operations(shape);
    println!("dtype  chunk  chunk MB   head s   products s  GFLOP/s  ratio_to_products");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let problem = problem(shape, dtype);
        for chunk in [128, 256, 512] {
            let head = NativeHead::default().chunk(chunk);
            let mut products = HeadProducts::new(shape);
            let [mut of_head, mut of_products] = [vec![], vec![]];
            for _ in 0..SAMPLES {
                let problem = problem.clone();
                of_head.push(timed(|| head.run(&LossSpec::default(), problem, 1).expect("supported")));
                of_products.push(products.time().as_secs_f64());
            }
            let [of_head, of_products] = [of_head, of_products].map(median);
            println!(
                "{dtype:<6} {chunk:>5} {:>9.0} {of_head:>8.3} {of_products:>12.3} {:>8.1} {:>18.3}",
                (chunk.min(shape.batch * shape.tokens) * shape.vocab * 4) as f64 / 1e6,
                flops / of_products / 1e9,
                of_head / of_products,
            );
        }
    }
}

fn problem(shape: HeadShape, dtype: Dtype) -> HeadProblem {
    let mut recipe = head_recipe(shape);
    recipe.recipe.dtype = dtype;
    // So near to the policy that no token is clipped: one that is costs less.
    recipe.recipe.old_logp_noise_scale = 0.03;
    recipe.unmasked_problem(&LossSpec::default()).expect("a valid recipe")
}

fn check(shape: HeadShape) {
    let spec = LossSpec::default();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let problem = problem(shape, dtype);
        JudgedProblem::new(&spec, &problem).expect("a valid problem").expect_right(
            &NativeHead::default(),
            1,
            "this bench",
        );
    }
}

fn timed<R>(work: impl FnOnce() -> R) -> f64 {
    let started = Instant::now();
    let result = work();
    let took: Duration = started.elapsed();
    drop(result);
    took.as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
