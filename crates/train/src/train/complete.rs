//! [`complete`]: a run from where it is to its last step.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::ThreadPoolBuilder;

use super::disk::Disk;
use super::metrics::StepRecord;
use super::{LossArm, Observer, RunSummary, TrainConfig, TrainError, Trainer};

/// A run that has made all its steps.
pub struct TrainedRun {
    /// The run after its last step.
    pub trainer: Trainer,
    /// The run in a few numbers.
    pub summary: RunSummary,
}

/// The progress of a run, reported after every step.
#[derive(Clone, Copy, Debug)]
pub struct RunProgress<'r> {
    /// Steps made, including those before the checkpoint that the run resumed from.
    pub steps: usize,
    /// Steps that there will be.
    pub of: usize,
    /// The step just made; `None` where the run begins or goes on.
    pub made: Option<&'r StepRecord>,
}

/// Makes the remaining steps of a run on threads of its own, and writes its `summary.json`. A PJRT implementation uses
/// `plugin`; `observer` sees the losses that it wants, `progress` is called after every step.
///
/// # Errors
/// [`TrainError::Interrupted`], after a checkpoint, where `stop` is set; [`TrainError::Threads`]; what the steps return.
pub fn complete(
    config: &TrainConfig,
    plugin: Option<&Path>,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
    progress: &mut (dyn FnMut(RunProgress) + Send),
) -> Result<TrainedRun, TrainError> {
    complete_by(Disk::open(&config.out)?, config, LossArm::from_config(config, plugin)?, stop, observer, progress)
}

/// Makes the remaining steps of a run, as [`complete`], with a given arm and with its files on `disk`.
///
/// # Errors
/// As [`complete`].
pub fn complete_by(
    disk: Disk,
    config: &TrainConfig,
    arm: LossArm,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
    progress: &mut (dyn FnMut(RunProgress) + Send),
) -> Result<TrainedRun, TrainError> {
    let pool = ThreadPoolBuilder::new().num_threads(config.threads.unwrap_or(0)).build();
    let pool = pool.map_err(|error| TrainError::Threads(error.to_string()))?;
    pool.install(|| {
        let mut trainer = Trainer::start(disk.clone(), config.clone(), arm, stop)?;
        let of = config.steps;
        progress(RunProgress { steps: trainer.steps(), of, made: None });
        while !trainer.finished() {
            // An interrupted run saves its state first, so that the same command goes on with the next step.
            if stop.load(Ordering::Relaxed) {
                trainer.save()?;
                let done = format!("after {} of {of} steps; the same command goes on", trainer.steps());
                return Err(TrainError::Interrupted { done });
            }
            trainer.advance(observer)?;
            progress(RunProgress { steps: trainer.steps(), of, made: trainer.records().last() });
        }
        let Some(summary) = RunSummary::from_records(trainer.records()) else {
            let reason = format!("none of {of} steps, all of which were made; with more `steps` the run goes on");
            return Err(TrainError::file(&disk.folder().join("metrics.jsonl"), reason));
        };
        let text = serde_json::to_string_pretty(&summary).expect("plain data") + "\n";
        disk.replace(&disk.folder().join("summary.json"), text.as_bytes())?;
        Ok(TrainedRun { trainer, summary })
    })
}
