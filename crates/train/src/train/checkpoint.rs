//! [`RunCheckpoint`]: weights and optimizer after a step, in one safetensors file.
//!
//! A file appears whole or not at all: it is written under another name and renamed. Random numbers need no state in it: they
//! are functions of the run's seed and the step.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Tensor, Var};
use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::optimizer::AdamW;
use super::qwen2::PolicyWeights;
use super::{TrainError, fingerprint};
use crate::checkpoint::{Qwen2Config, single_tensor};
use assay_fixture::SafetensorsFile;

/// The one entry of the file's metadata.
const METADATA: &str = "assay.train";

/// The content of that entry, as JSON.
#[derive(Serialize, Deserialize)]
struct RunCheckpointHeader {
    step: usize,
    optimizer_steps: i32,
    fingerprint: String,
}

/// The state of a run after `step` steps.
pub(super) struct RunCheckpoint {
    /// The number of GRPO steps that the run has made.
    pub step: usize,
    /// The weights of the policy.
    pub weights: PolicyWeights,
    /// The optimizer with its moments.
    pub optimizer: AdamW,
}

/// Writes the run after `step` steps to `path`, over whatever was there.
///
/// # Errors
/// [`TrainError`] where the system refuses; `path` is then as it was.
pub(super) fn write(
    disk: &Disk,
    path: &Path,
    step: usize,
    weights: &PolicyWeights,
    optimizer: &AdamW,
    fingerprint: &str,
) -> Result<(), TrainError> {
    // Weights and moments of the optimiser share one file, so that no interruption can leave those of different steps.
    let weights = weights.iter().map(|(name, weight)| (format!("weight.{name}"), weight.as_tensor().clone()));
    let tensors: BTreeMap<String, Tensor> = weights.chain(optimizer.tensors()?).collect();
    let header = RunCheckpointHeader { step, optimizer_steps: optimizer.steps(), fingerprint: fingerprint.into() };
    let header = serde_json::to_string(&header).expect("plain data");
    let bytes = safetensors::serialize(&tensors, Some(HashMap::from([(METADATA.to_string(), header)])))
        .map_err(|error| TrainError::file(path, error.to_string()))?;
    disk.replace(path, &bytes)
}

/// Reads the checkpoint in `path` of a policy of `config`, written under `fingerprint`.
///
/// # Errors
/// [`TrainError`] where it cannot be read, was written under other settings, or lacks a tensor.
pub(super) fn read(path: &Path, config: &Qwen2Config, fingerprint: &str) -> Result<RunCheckpoint, TrainError> {
    let file = SafetensorsFile::open(path)?;
    let Some(header) = file.metadata().get(METADATA) else {
        return Err(TrainError::file(path, format!("no `{METADATA}` in its metadata, expected a checkpoint")));
    };
    let header: RunCheckpointHeader =
        serde_json::from_str(header).map_err(|error| TrainError::file(path, error.to_string()))?;
    if header.fingerprint != fingerprint {
        let which = fingerprint::differences(&header.fingerprint, fingerprint);
        let reason =
            format!("written under other settings ({which}); remove it, or choose another folder for the results");
        return Err(TrainError::file(path, reason));
    }
    let mut weights = PolicyWeights::new();
    // The tensors are read by the model's own list, whose shapes they must have: a file with fewer is refused.
    for (name, shape) in config.tensors() {
        let weight = single_tensor(&file, &format!("weight.{name}"), &shape)?;
        weights.insert(name, Var::from_tensor(&weight)?);
    }
    let optimizer = AdamW::restored(header.optimizer_steps, &weights, |name, count| {
        Ok(single_tensor(&file, name, &[count])?.to_vec1::<f32>()?)
    })?;
    Ok(RunCheckpoint { step: header.step, weights, optimizer })
}
