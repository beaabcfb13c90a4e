//! What the CPU kernel takes beside its inputs and outputs. The only test of its binary: the allocator counts what any
//! thread takes.

use assay::conformance::generate::{Recipe, Regime};
use assay::native::Native;
use assay::problem::{Dtype, FloatArray};
use assay::spec::LossSpec;
use peak_alloc::PeakAlloc;
use rayon::ThreadPoolBuilder;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a thread may take.
const OF_A_THREAD: usize = 1_000_000;

/// What a token may take: its mask, advantage, weights, scores, gradients and metrics, in f64.
const OF_A_TOKEN: usize = 1000;

/// The most that `work` held at once beyond what there was.
fn most_bytes(work: impl FnOnce()) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    work();
    ALLOCATOR.peak_usage() - before
}

#[test]
fn extra_memory_is_within_a_megabyte_a_thread() {
    let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
    for (tokens, threads) in [(24, 1), (24, 2), (96, 2)] {
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
            pool.install(|| native.forward_backward(&spec, logits.view(), dlogits.view_mut(), problem.tokens()))
                .expect("supported");
        });
        let in_place = most_bytes(|| {
            pool.install(|| native.forward_backward_in_place(&spec, logits.view_mut(), problem.tokens()))
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
