//! What the CPU kernels take beside their inputs and outputs. The allocator counts what any thread takes.

use assay::implementation::Implementation;
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::native::{Native, NativeHead, OutputCotangents};
use assay::problem::{Dtype, FloatArray, HeadLayout};
use assay::spec::LossSpec;
use peak_alloc::PeakAlloc;
use rayon::ThreadPoolBuilder;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a thread may take.
const OF_A_THREAD: usize = 1_000_000;

/// What a token may take: its mask, advantage, weights, scores, gradients and metrics, in f64.
const OF_A_TOKEN: usize = 1000;

/// What the library of products may take to pack what it multiplies.
const OF_PRODUCTS: usize = 8_000_000;

/// The most that `work` held at once beyond what there was.
pub(super) fn most_bytes(work: impl FnOnce()) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    work();
    ALLOCATOR.peak_usage() - before
}

pub(crate) fn extra_memory() {
    rows();
    lm_head();
}

fn lm_head() {
    let (spec, tokens, hidden, vocab) = (LossSpec::default(), 48, 64, 151_936);
    // A chunk's logits are more than what products may take.
    for (dtype, chunk) in [(Dtype::F32, 48), (Dtype::F32, 16), (Dtype::Bf16, 32)] {
        let recipe = Recipe {
            shape: [1, tokens, vocab],
            dtype,
            regime: Regime::Normal,
            seed: 0,
            old_logp_noise_scale: 0.03,
            masked_garbage: false,
        };
        let recipe = HeadRecipe { hidden, layout: HeadLayout::HiddenByVocab, rounds_logits: false, recipe };
        let problem = recipe.unmasked_problem(&spec).expect("a valid recipe");
        let native = NativeHead::default().chunk(chunk);
        let shape = problem.check(&spec).expect("a valid problem");
        // The gradient of the head is f32.
        let outcome = 4 * hidden * vocab + dtype.size() * tokens * hidden;
        let said = native.host_bytes(shape, dtype);
        let taken = most_bytes(|| drop(native.run(&spec, problem, 1).expect("supported"))) - outcome;
        println!("LM head, {dtype}, {chunk} tokens a chunk: {taken} bytes, {said} said");
        let range = said..=said + OF_PRODUCTS;
        assert!(range.contains(&taken), "{dtype}, {chunk} tokens a chunk: {taken} bytes, expected {range:?}");
    }
}

fn rows() {
    let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    for (tokens, threads) in [(12, 1), (12, 2), (48, 2)] {
        let recipe = Recipe {
            shape: [1, tokens, 151_936],
            dtype: Dtype::Bf16,
            regime: Regime::Peaked,
            seed: 0,
            old_logp_noise_scale: 0.03,
            masked_garbage: false,
        };
        let mut problem = recipe.unmasked_problem(&spec).expect("a valid recipe");
        let limit = threads * OF_A_THREAD + tokens * OF_A_TOKEN;
        let empty = FloatArray::Bf16(ndarray::Array3::default((0, 0, 0)));
        let FloatArray::Bf16(mut logits) = std::mem::replace(&mut problem.logits, empty) else {
            unreachable!("bf16 was asked for")
        };
        let mut dlogits = logits.clone();
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        // Threads are started once.
        pool.broadcast(|_| ());
        let native = Native::default();
        let forward = most_bytes(|| {
            pool.install(|| native.forward(&spec, logits.view(), problem.tokens())).expect("supported");
        });
        let beside = most_bytes(|| {
            pool.install(|| {
                native.forward_backward(
                    &spec,
                    logits.view(),
                    dlogits.view_mut(),
                    problem.tokens(),
                    OutputCotangents::default(),
                )
            })
            .expect("supported");
        });
        let in_place = most_bytes(|| {
            pool.install(|| {
                native.forward_backward_in_place(
                    &spec,
                    logits.view_mut(),
                    problem.tokens(),
                    OutputCotangents::default(),
                )
            })
            .expect("supported");
        });
        for (what, bytes) in [("forward", forward), ("beside", beside), ("in place", in_place)] {
            println!("{tokens} tokens, {threads} threads, {what}: {bytes} bytes");
            assert!(
                bytes <= limit,
                "{tokens} tokens, {threads} threads, {what}: {bytes} bytes, expected at most {limit}"
            );
        }
    }
}
