//! Trains an LM head on candle with the losses of this crate: `cargo run --release --features train --example candle_grpo`.
//!
//! The two lines of a training step that are not candle's own are marked. Hidden states are random, and the rewarded token is
//! 7: its log-probability rises.

use assay::problem::{Advantages, Extra};
use assay::spec::LossSpec;
use assay::train::candle_core::{DType, Device, Tensor, Var};
use assay::train::candle_nn::{AdamW, Optimizer, ParamsAdamW};
use assay::train::{GrpoLoss, TrainBatch};
use ndarray::{Array1, Array2};

const REWARDED: i64 = 7;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (sequences, tokens, width, vocab) = (4, 8, 64, 4096);
    let hidden = Tensor::randn(0f32, 1.0, (sequences, tokens, width), &Device::Cpu)?;
    let lm_head = Var::zeros((vocab, width), DType::F32, &Device::Cpu)?;
    let mut optimizer = AdamW::new(vec![lm_head.clone()], ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() })?;

    // What the sampler left: two sequences of the rewarded token, two of another.
    let sampled = |b: usize| if b < 2 { REWARDED } else { 11 };
    let batch = TrainBatch {
        logits: (),
        ids: Array2::from_shape_fn((sequences, tokens), |(b, _)| sampled(b)),
        mask: Array2::from_elem((sequences, tokens), true),
        advantages: Advantages::Sequence(Array1::from_iter((0..sequences).map(|b| if b < 2 { 1.0 } else { -1.0 }))),
        old_logp: Some(Array2::from_elem((sequences, tokens), -(vocab as f64).ln())),
        ref_logp: None,
        extra: Extra::default(),
    };

    let grpo = GrpoLoss::native_lm_head(LossSpec::default()); // once
    for step in 0..5 {
        let loss = grpo.on_hidden(&hidden, &lm_head, &batch)?.loss; // each step
        println!("step {step}: loss {:+.5}", loss.to_scalar::<f32>()?);
        optimizer.backward_step(&loss)?;
    }

    // The same from logits, where another library made them.
    let logits = hidden.reshape((sequences * tokens, width))?.matmul(&lm_head.t()?)?;
    let logits = logits.reshape((sequences, tokens, vocab))?;
    let grpo = GrpoLoss::native(LossSpec::default());
    println!("from logits: loss {:+.5}", grpo.on_logits(&logits, &batch)?.loss.to_scalar::<f32>()?);
    Ok(())
}
