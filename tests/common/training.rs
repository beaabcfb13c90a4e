//! Small runs of the training loop, in this process.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use assay::train::metrics::StepRecord;
use assay::train::{NoObserver, TrainConfig, TrainError, complete};
use serde_json::{Value, json};

/// Settings of a run of some seconds, its results in `folder`; its warm start is kept there for other runs of the same seed.
pub(crate) fn settings(folder: &Path, out: &str) -> Value {
    json!({
        "steps": 2,
        "out": folder.join(out),
        "threads": 1,
        "model": {"init": {
            "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true,
        }},
        "task": {"arithmetic": {"train": 32, "evaluate": 4, "largest": 5}},
        "warm_start": {"steps": 100, "batch": 8, "learning_rate": 1e-2, "cache": folder.join("warm.safetensors")},
        "rollout": {"prompts": 4, "group": 4, "max_new_tokens": 12},
    })
}

/// `settings` with those of `others` put over them.
pub(crate) fn with(mut settings: Value, others: Value) -> Value {
    match (&mut settings, others) {
        (Value::Object(all), Value::Object(others)) => {
            for (name, other) in others {
                let value = all.remove(&name).unwrap_or(Value::Null);
                all.insert(name, with(value, other));
            }
            settings
        }
        (_, other) => other,
    }
}

pub(crate) fn config(settings: Value) -> TrainConfig {
    serde_json::from_value(settings).unwrap()
}

/// Its steps, or why it ended.
pub(crate) fn run(settings: Value) -> Result<Vec<StepRecord>, TrainError> {
    let run = complete(&config(settings), None, &AtomicBool::new(false), &mut NoObserver, &mut |_| ())?;
    Ok(run.trainer.records().to_vec())
}
