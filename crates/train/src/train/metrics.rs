//! [`Journal`]: the curve of a run, a line of JSON a step, and the same as an event file for TensorBoard.

use std::io::ErrorKind;

use prost::Message;
use serde::{Deserialize, Serialize};

use super::TrainError;
use super::disk::{AppendFile, Disk};
use assay_core::files::read_regular;

/// The results of a step. Means are over the tokens that count, and over epochs; times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The number of the step, from 1 on.
    pub step: usize,
    /// Seconds since 1970, when the step was done.
    pub unix_time: f64,
    /// sha256 of the completions' tokens.
    pub tokens_sha256: String,
    /// The loss of the step, mean over epochs.
    pub loss: f64,
    /// The mean entropy of the tokens, nats.
    pub entropy: f64,
    /// The share of tokens clipped at the low bound.
    pub clip_low: f64,
    /// The share of tokens clipped at the high bound.
    pub clip_high: f64,
    /// The share of tokens that were clipped.
    pub clip_region: f64,
    /// Mean of the KL estimate, where the loss has one.
    pub kl: Option<f64>,
    /// Norm of the whole gradient, before it is clipped.
    pub grad_norm: f64,
    /// Mean reward of the completions.
    #[serde(rename = "reward/total/mean")]
    pub reward: f64,
    /// The part of it for answers.
    #[serde(rename = "reward/answer/mean")]
    pub reward_answer: f64,
    /// The part of it for format.
    #[serde(rename = "reward/format/mean")]
    pub reward_format: f64,
    /// Completions sampled, those among them that dynamic sampling left out.
    #[serde(rename = "rollout/completions")]
    pub completions: usize,
    /// Groups of the batch whose rewards are all equal.
    #[serde(rename = "rollout/even_groups")]
    pub even_groups: usize,
    /// Completions of the batch that found no end.
    #[serde(rename = "rollout/truncated")]
    pub truncated: usize,
    /// Mean distance of the sampler's log-probabilities from those before the update, nats.
    #[serde(rename = "rollout/logp_gap")]
    pub logp_gap: f64,
    /// Completion tokens that the losses were of.
    pub valid_tokens: usize,
    /// The time of making completions, s.
    #[serde(rename = "time/rollout_generate_s")]
    pub rollout_s: f64,
    /// Log-probabilities of the completions before the update and under the reference policy.
    #[serde(rename = "time/score_s")]
    pub score_s: f64,
    /// Everything from completions to new weights.
    #[serde(rename = "time/update_s")]
    pub update_s: f64,
    /// The part of it from hidden states to the gradients of hidden states and LM head.
    #[serde(rename = "time/loss_step_s")]
    pub loss_step_s: f64,
    /// All of them, without an evaluation.
    #[serde(rename = "time/step_s")]
    pub step_s: f64,
    /// The most bytes that a loss step held beyond what there was; `None` if the allocator does not count.
    #[serde(rename = "bytes/loss_step")]
    pub loss_step_bytes: Option<usize>,
    /// The most bytes that the update held beyond what there was.
    #[serde(rename = "bytes/update")]
    pub update_bytes: Option<usize>,
    /// The evaluation before the first step, in the record of the first step.
    #[serde(rename = "eval/step_0", default, skip_serializing_if = "Option::is_none")]
    pub before: Option<GreedyEvaluation>,
    /// The evaluation after this step, if there was one.
    #[serde(flatten)]
    pub evaluation: Option<GreedyEvaluation>,
}

/// Greedy completions of the exercises that are not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GreedyEvaluation {
    /// The mean reward of the greedy completions.
    #[serde(rename = "eval/reward/total/mean")]
    pub reward: f64,
    /// Mean of its part for answers.
    #[serde(rename = "eval/reward/answer/mean")]
    pub answer: f64,
    /// Mean of its part for format.
    #[serde(rename = "eval/reward/format/mean")]
    pub format: f64,
}

/// Every number of `fields`, by its name.
fn scalars(fields: &impl Serialize) -> Vec<EventScalar> {
    let serde_json::Value::Object(fields) = serde_json::to_value(fields).expect("plain data") else {
        unreachable!("a struct")
    };
    let scalar = |(tag, value): (String, serde_json::Value)| {
        // A field that is not a number, such as the hash of the tokens, is no scalar of the curve.
        let simple_value = Some(value.as_f64()? as f32);
        (!["step", "unix_time"].contains(&tag.as_str())).then_some(EventScalar { tag, simple_value })
    };
    fields.into_iter().filter_map(scalar).collect()
}

/// The file for TensorBoard: it knows one by a part of its name.
const EVENTS: &str = "events.out.tfevents.assay";

/// The longest curve that is read, in bytes: of a hundred thousand steps.
const LONGEST_CURVE: u64 = 256 << 20;

/// The files of a run's curve.
pub struct Journal {
    lines: AppendFile,
    events: AppendFile,
    records: Vec<StepRecord>,
}

impl Journal {
    /// The curve in the folder of `disk` up to and with step `kept`; what is beyond is forgotten. What a checkpoint says
    /// stands whether or not its steps are all written here: those that are missing stay missing.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn open(disk: &Disk, kept: usize) -> Result<Self, TrainError> {
        let path = disk.folder().join("metrics.jsonl");
        let text = match read_regular(&path, LONGEST_CURVE) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(reason) if reason.kind() == ErrorKind::NotFound => String::new(),
            Err(reason) => return Err(TrainError::io(&path, "read", reason)),
        };
        // Keep the lines up to the checkpoint, in order; a later line belongs to steps that will be made again.
        let (mut records, mut lines) = (Vec::<StepRecord>::new(), String::new());
        for line in text.lines() {
            // A line that was cut off ends the curve.
            let Ok(record) = serde_json::from_str::<StepRecord>(line) else { break };
            if record.step > kept || records.last().is_some_and(|last| last.step >= record.step) {
                break;
            }
            records.push(record);
            // The line is kept as text: a number that is parsed and printed again may lose its last bit.
            lines += line;
            lines.push('\n');
        }
        disk.replace(&path, lines.as_bytes())?;
        // The events are written again from the kept records: they have no order that could be cut.
        let (lines, mut events) = (disk.go_on(path)?, disk.begin(disk.folder().join(EVENTS))?);
        let all = records.iter().flat_map(TensorBoardEvent::all_of);
        let bytes =
            std::iter::once(TensorBoardEvent::opening()).chain(all).flat_map(|event| framed(&event.encode_to_vec()));
        events.append(&bytes.collect::<Vec<u8>>())?;
        Ok(Self { lines, events, records })
    }

    /// Adds a step.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn push(&mut self, record: StepRecord) -> Result<(), TrainError> {
        self.lines.append((serde_json::to_string(&record).expect("plain data") + "\n").as_bytes())?;
        for event in TensorBoardEvent::all_of(&record) {
            self.events.append(&framed(&event.encode_to_vec()))?;
        }
        self.records.push(record);
        Ok(())
    }

    /// Syncs the curve, so that all added steps survive a loss of power.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn sync(&self) -> Result<(), TrainError> {
        self.lines.sync()
    }

    /// Returns the records of the steps so far.
    pub fn records(&self) -> &[StepRecord] {
        &self.records
    }
}

/// TensorBoard's `tensorflow.Event`, the fields that a scalar needs.
#[derive(Message)]
struct TensorBoardEvent {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<EventScalars>,
}

/// TensorBoard's `tensorflow.Summary`, a list of scalars.
#[derive(Message)]
struct EventScalars {
    #[prost(message, repeated, tag = "1")]
    value: Vec<EventScalar>,
}

/// TensorBoard's `tensorflow.Summary.Value`, a named number.
#[derive(Message)]
struct EventScalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

impl TensorBoardEvent {
    /// The first of a file.
    fn opening() -> Self {
        Self { wall_time: 0.0, step: 0, file_version: Some("brain.Event:2".into()), summary: None }
    }

    /// Returns the events of a step; the first step has the evaluation before it in addition.
    fn all_of(record: &StepRecord) -> Vec<Self> {
        let before = record.before.map(|before| Self {
            wall_time: record.unix_time,
            step: 0,
            file_version: None,
            summary: Some(EventScalars { value: scalars(&before) }),
        });
        before.into_iter().chain([Self::from_record(record)]).collect()
    }

    fn from_record(record: &StepRecord) -> Self {
        let value = scalars(record);
        let (wall_time, step) = (record.unix_time, record.step as i64);
        Self { wall_time, step, file_version: None, summary: Some(EventScalars { value }) }
    }
}

/// A record of a TFRecord file: length, its checksum, `bytes`, their checksum.
fn framed(bytes: &[u8]) -> Vec<u8> {
    // TensorBoard checks the length by itself, before it trusts it to find the end of the record.
    let length = (bytes.len() as u64).to_le_bytes();
    [&length, &masked_crc(&length).to_le_bytes()[..], bytes, &masked_crc(bytes).to_le_bytes()].concat()
}

/// Computes the masked CRC-32C of a TFRecord.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720's check value of CRC-32C is e3069283; a reader of `TFRecord` takes the length first.
    #[test]
    fn metrics_records_are_framed_and_read_back() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let record = StepRecord {
            step: 3,
            unix_time: 1.5,
            tokens_sha256: "00".into(),
            loss: -0.25,
            entropy: 1.0,
            clip_low: 0.0,
            clip_high: 0.5,
            clip_region: 0.5,
            kl: None,
            grad_norm: 2.0,
            reward: 1.5,
            reward_answer: 0.75,
            reward_format: 0.75,
            completions: 8,
            even_groups: 1,
            truncated: 2,
            logp_gap: 1e-7,
            valid_tokens: 12,
            rollout_s: 0.1,
            score_s: 0.1,
            update_s: 0.2,
            loss_step_s: 0.05,
            step_s: 0.3,
            loss_step_bytes: Some(4096),
            update_bytes: None,
            before: None,
            evaluation: Some(GreedyEvaluation { reward: 2.0, answer: 1.0, format: 1.0 }),
        };
        let bytes = framed(&TensorBoardEvent::from_record(&record).encode_to_vec());
        let (length, rest) = bytes.split_at(8);
        let length_value = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        assert_eq!(bytes.len(), 16 + length_value);
        assert_eq!(rest[..4], masked_crc(length).to_le_bytes());
        let event = TensorBoardEvent::decode(&rest[4..4 + length_value]).unwrap();
        assert_eq!((event.step, event.wall_time), (3, 1.5));
        let scalars: Vec<(String, f32)> =
            event.summary.unwrap().value.into_iter().map(|scalar| (scalar.tag, scalar.simple_value.unwrap())).collect();
        for expected in
            [("loss", -0.25), ("valid_tokens", 12.0), ("bytes/loss_step", 4096.0), ("eval/reward/total/mean", 2.0)]
        {
            assert!(scalars.contains(&(expected.0.into(), expected.1)), "{expected:?} in {scalars:?}");
        }
        assert!(scalars.iter().all(|(tag, _)| tag != "step" && tag != "unix_time" && tag != "bytes/update"));
    }
}
