//! `assay train`: a whole GRPO run on this machine.

use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::Table;

use super::{CliError, Passed, PluginChoice, Printing, stop_flag};
use crate::config;
use crate::train::{NoObserver, RunProgress, TrainConfig, TrainError, complete};

/// A run goes on from the checkpoint in the folder of its results, where there is one.
#[derive(Args)]
pub(super) struct TrainCommand {
    /// Settings of the run; `configs/train_small.yaml` is one
    #[arg(long, value_name = "FILE.yaml")]
    config: PathBuf,
    /// Folder of the results, in place of the settings' own
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

impl TrainCommand {
    pub(super) fn run(self) -> Result<Passed, CliError> {
        let mut settings = read_settings(&self.config)?;
        if let Some(out) = self.out {
            settings.out = out;
        }
        let plugin = self.plugin.checked_path()?;
        let stop = stop_flag()?;
        let summary = complete(&settings, plugin, &stop, &mut NoObserver, &mut told(&self.printing))?.summary;
        let mut table = Table::new();
        if let serde_json::Value::Object(fields) = serde_json::to_value(&summary).expect("plain data") {
            table.load_style(comfy_table::presets::NOTHING);
            table.add_rows(fields.iter().map(|(name, value)| vec![name.clone(), value.to_string()]));
        }
        self.printing.finish(&format!("{table}\n"), &summary)?;
        Ok(Passed::Yes)
    }
}

/// The settings in `path`, whose inputs are found from where it is.
pub(super) fn read_settings(path: &Path) -> Result<TrainConfig, CliError> {
    let mut settings: TrainConfig = config::read(path)?;
    settings.beside(path.parent().unwrap_or(Path::new("")));
    let invalid = |error: TrainError| CliError::Config { path: path.into(), reason: error.to_string().into() };
    settings.check().map_err(invalid)?;
    Ok(settings)
}

/// A bar over the steps of each run.
pub(super) fn told(printing: &Printing) -> impl FnMut(RunProgress) + Send {
    let mut bar = printing.progress(0);
    move |RunProgress { steps, of, made }| {
        match made {
            // A run begins with a report that has no record, and gets a bar of its own.
            None => bar = printing.progress(of),
            Some(record) => bar.set_message(format!("loss {:+.4}  reward {:.3}", record.loss, record.reward)),
        }
        bar.set_position(steps as u64);
        if steps == of {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn train_configs_shipped_are_valid() {
        let mut names = Vec::new();
        for entry in std::fs::read_dir("configs").unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if ["train_", "ab_"].iter().any(|start| name.starts_with(start)) {
                read_settings(&path).unwrap_or_else(|error| panic!("{error}"));
                names.push(name);
            }
        }
        names.sort();
        assert_eq!(names, ["ab_qwen_vocab.yaml", "ab_small.yaml", "ab_tiny.yaml", "train_small.yaml"]);
    }
}
