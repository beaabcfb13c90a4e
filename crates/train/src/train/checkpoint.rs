//! [`RunCheckpoint`]: weights and optimizer after a step, in one safetensors file.
//!
//! A file appears whole or not at all: it is written under another name and renamed. Random numbers need no state in it: they
//! are functions of the run's seed and the step.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Tensor, Var};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::disk::Disk;
use super::optimizer::AdamW;
use super::qwen2::PolicyWeights;
use super::{TrainError, fingerprint};
use crate::checkpoint::{Qwen2Config, single_tensor};
use assay_fixture::{SafetensorsFile, hexadecimal};

/// The one entry of the file's metadata.
const METADATA: &str = "assay.train";

/// The content of that entry, as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunCheckpointHeader {
    step: usize,
    optimizer_steps: i32,
    fingerprint: String,
    /// The SHA-256 of the fields above and of all tensors; `None` in a file that an older version wrote.
    #[serde(default)]
    sha256: Option<String>,
}

/// The SHA-256 of a checkpoint, of its tensors in whatever order they are read: a bit that has changed on a disk would otherwise go on into
/// other numbers.
#[derive(Default)]
struct CheckpointHash(BTreeMap<String, String>);

impl CheckpointHash {
    /// Adds a tensor of f32.
    fn add(&mut self, name: &str, tensor: &Tensor) -> Result<(), TrainError> {
        let mut hash = Sha256::new();
        // A hash is fast over blocks, and slow over single numbers.
        for block in tensor.flatten_all()?.to_vec1::<f32>()?.chunks(4096) {
            hash.update(block.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        }
        self.0.insert(name.into(), hexadecimal(hash));
        Ok(())
    }

    /// Returns the hash of the tensors and of `header`, whose own hash is left out.
    fn finish(self, header: &RunCheckpointHeader) -> String {
        let RunCheckpointHeader { step, optimizer_steps, fingerprint, sha256: _ } = header;
        let first = format!("{step} {optimizer_steps} {fingerprint}\n");
        hexadecimal(
            self.0
                .iter()
                .fold(Sha256::new_with_prefix(first), |all, (name, hash)| all.chain_update(format!("{hash} {name}\n"))),
        )
    }
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
    let mut hash = CheckpointHash::default();
    tensors.iter().try_for_each(|(name, tensor)| hash.add(name, tensor))?;
    let (optimizer_steps, fingerprint) = (optimizer.steps(), fingerprint.into());
    let mut header = RunCheckpointHeader { step, optimizer_steps, fingerprint, sha256: None };
    header.sha256 = Some(hash.finish(&header));
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
    let (mut weights, mut hash) = (PolicyWeights::new(), CheckpointHash::default());
    // The tensors are read by the model's own list, whose shapes they must have: a file with fewer is refused.
    for (name, shape) in config.tensors() {
        let held = format!("weight.{name}");
        let weight = single_tensor(&file, &held, &shape)?;
        hash.add(&held, &weight)?;
        weights.insert(name, Var::from_tensor(&weight)?);
    }
    let optimizer = AdamW::restored(header.optimizer_steps, &weights, |name, count| {
        let moments = single_tensor(&file, name, &[count])?;
        hash.add(name, &moments)?;
        Ok(moments.to_vec1::<f32>()?)
    })?;
    let found = hash.finish(&header);
    if let Some(written) = header.sha256.as_ref().filter(|written| **written != found) {
        let reason = format!(
            "content: got sha256 {found}, expected {written}, which it was written with; remove it, and the run begins again"
        );
        return Err(TrainError::file(path, reason));
    }
    Ok(RunCheckpoint { step: header.step, weights, optimizer })
}
