//! `assay peers`: recorded runs of published implementations against the reference, and under the judge.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};

use super::{CliError, Passed, Printing};
use crate::fixture::PeerFile;
use crate::judge::judge::JudgeError;
use crate::judge::judgeable::Judgeable;
use crate::judge::tolerance::Limits;
use crate::problem::Dtype;
use crate::reference::{self, Reference};
use crate::schema::peers::{self as schema, PeerErrors, PeerRun, PeerVerdict};
use crate::schema::verdicts::Grade;
use crate::suites::peers::{PeerDifference, limit};
use crate::text::{ForeignText, ShownPath};

/// The end of the names of files that record a defect of one release.
const QUIRK: &str = "_quirk";

#[derive(Args)]
pub(super) struct PeersCommand {
    /// A recorded run in JSON, or a folder of them
    #[arg(value_name = "DIR|FILE.json")]
    path: PathBuf,
    #[command(flatten)]
    printing: Printing,
}

impl PeersCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let paths = self.paths()?;
        let progress = self.printing.progress(paths.len());
        let (mut files, mut refused) = (Vec::new(), Vec::new());
        for path in &paths {
            progress.set_message(ShownPath(&path).to_string());
            match compare(path) {
                Ok(compared) => files.push(compared),
                Err(error) => refused.push(error.to_string()),
            }
            progress.inc(1);
        }
        progress.finish_and_clear();

        // A file that could not be compared is no pass, as its run may differ.
        let pass = refused.is_empty() && files.iter().all(|file| file.run.verdict != PeerVerdict::Fail);
        let worst = worst(&files);
        let files = files.into_iter().map(|compared| compared.run).collect();
        let comparison = schema::PeersReport { pass, files, worst, refused };
        // Where nothing could be compared, the error says it all.
        if !comparison.files.is_empty() {
            self.printing.finish(&text(&comparison), &comparison)?;
        }
        if let Some((first, others)) = comparison.refused.split_first() {
            let others = if others.is_empty() { String::new() } else { format!(" (and {} more files)", others.len()) };
            return Err(CliError::Usage(format!("{first}{others}").into()));
        }
        if self.printing.quiet {
            for file in comparison.files.iter().filter(|file| file.verdict == PeerVerdict::Fail) {
                super::print(&format!("{}\n", failure(file)))?;
            }
        }
        Ok(pass.into())
    }

    /// The file, or the `.json` files of the folder in order of name.
    fn paths(&self) -> Result<Vec<PathBuf>, CliError> {
        let io = |reason| CliError::Io { path: self.path.clone().into(), action: "read", reason };
        if !fs::metadata(&self.path).map_err(io)?.is_dir() {
            return Ok(vec![self.path.clone()]);
        }
        let entries = fs::read_dir(&self.path).map_err(io)?.collect::<Result<Vec<_>, _>>().map_err(io)?;
        let json = |path: &PathBuf| path.extension() == Some(OsStr::new("json"));
        let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(json).collect();
        // A folder lists its files in any order.
        paths.sort();
        if paths.is_empty() {
            let reason = "got no .json file in it, expected recorded runs of published implementations".into();
            return Err(CliError::Config { path: self.path.clone().into(), reason });
        }
        Ok(paths)
    }
}

/// One recorded run, compared with the reference.
struct ComparedRun {
    dtype: Dtype,
    run: PeerRun,
}

/// File, peer, function and options to a preset's spec, and that through the reference.
fn compare(path: &Path) -> Result<ComparedRun, CliError> {
    let recorded = PeerFile::read(path)?;
    let in_file = |reason: String| CliError::Config { path: path.into(), reason: reason.into() };
    let resolved = recorded.resolve().map_err(|error| in_file(error.to_string()))?;
    let in_problem = |reason| CliError::Problem { path: path.into(), reason };
    let reference = reference::evaluate(&resolved.spec, &recorded.problem).map_err(in_problem)?;
    let difference = PeerDifference::new(&reference, recorded.loss, &recorded.dlogits);

    let file = ForeignText::from(path.file_name().unwrap_or_default().to_string_lossy()).to_string();
    let quirk = path.file_stem().is_some_and(|name| name.to_string_lossy().ends_with(QUIRK));
    let limit = limit(recorded.dtype);
    let gates = judged(&recorded, &reference)?;
    let caught_by: Vec<String> = gates.iter().filter(|(_, passed)| !passed).map(|(gate, _)| gate.clone()).collect();
    // A file of a known defect never passes: it records that one release differs, whatever the difference is.
    let verdict = match (quirk, difference.within(limit)) {
        (true, _) => PeerVerdict::KnownDifference,
        (false, true) => PeerVerdict::Pass,
        (false, false) => PeerVerdict::Fail,
    };
    let run = PeerRun {
        file,
        peer: recorded.peer,
        function: resolved.function.into(),
        dtype: recorded.dtype.to_string(),
        loss_rel: difference.loss,
        dlogits_rel: difference.dlogits,
        limit,
        gates: gates.into_iter().map(|(gate, _)| gate).collect(),
        caught_by,
        quirk,
        verdict,
        without_effect: resolved.without_effect,
        notes: resolved.notes,
    };
    Ok(ComparedRun { dtype: recorded.dtype, run })
}

/// Every gate that the outcome of a run came to, and whether it was passed. A float64 run is held to the limits of f32
/// kernels, as any candidate is; that it agrees to float64's own precision is for [`PeerDifference`] to say.
fn judged(recorded: &PeerFile, reference: &Reference) -> Result<Vec<(String, bool)>, JudgeError> {
    let verdicts =
        recorded.problem.judge(reference, &recorded.candidate().lend(), &Limits::external(Grade::Standard))?;
    Ok(verdicts.iter().map(|verdict| (verdict.gate.to_string(), verdict.passed())).collect())
}

fn worst(files: &[ComparedRun]) -> Vec<PeerErrors> {
    let mut by_peer: BTreeMap<(&str, Dtype), PeerErrors> = BTreeMap::new();
    // Known defects are left out of the worst errors, which describe the correct functions.
    for ComparedRun { dtype, run } in files.iter().filter(|file| !file.run.quirk) {
        let worst = by_peer.entry((&run.peer, *dtype)).or_insert_with(|| PeerErrors {
            peer: run.peer.clone(),
            dtype: run.dtype.clone(),
            files: 0,
            loss_rel: 0.0,
            dlogits_rel: 0.0,
        });
        worst.files += 1;
        worst.loss_rel = larger(worst.loss_rel, run.loss_rel);
        worst.dlogits_rel = larger(worst.dlogits_rel, run.dlogits_rel);
    }
    by_peer.into_values().collect()
}

/// `max` that keeps a NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

fn failed_gates(run: &PeerRun) -> String {
    if run.caught_by.is_empty() { format!("none of {}", run.gates.len()) } else { run.caught_by.join(", ") }
}

fn failure(run: &PeerRun) -> String {
    let PeerRun { file, loss_rel, dlogits_rel, limit, .. } = run;
    let gates = failed_gates(run);
    format!(
        "{file}: loss off by {loss_rel:.1e}, dlogits by {dlogits_rel:.1e}, limit {limit:.0e}; failed gates: {gates}"
    )
}

fn word(verdict: PeerVerdict) -> &'static str {
    match verdict {
        PeerVerdict::Pass => "pass",
        PeerVerdict::Fail => "FAIL",
        PeerVerdict::KnownDifference => "known difference",
    }
}

fn text(comparison: &schema::PeersReport) -> String {
    let table = |header: &[&str]| {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(header);
        table
    };
    let mut files = table(&["file", "peer", "dtype", "loss", "dlogits", "limit", "failed gates", "verdict"]);
    for file in &comparison.files {
        files.add_row([
            file.file.clone(),
            file.peer.clone(),
            file.dtype.clone(),
            format!("{:.1e}", file.loss_rel),
            format!("{:.1e}", file.dlogits_rel),
            format!("{:.0e}", file.limit),
            failed_gates(file),
            word(file.verdict).into(),
        ]);
    }
    let mut peers = table(&["peer", "dtype", "files", "worst loss", "worst dlogits"]);
    for worst in &comparison.worst {
        peers.add_row([
            worst.peer.clone(),
            worst.dtype.clone(),
            worst.files.to_string(),
            format!("{:.1e}", worst.loss_rel),
            format!("{:.1e}", worst.dlogits_rel),
        ]);
    }
    let mut text = format!("{files}\n{peers}\n");
    let count = |verdict| comparison.files.iter().filter(|file| file.verdict == verdict).count();
    text += &format!(
        "{} pass, {} fail, {} known differences, {} could not be compared; errors are relative; {} fail a gate of the judge\n",
        count(PeerVerdict::Pass),
        count(PeerVerdict::Fail),
        count(PeerVerdict::KnownDifference),
        comparison.refused.len(),
        comparison.files.iter().filter(|file| !file.caught_by.is_empty()).count(),
    );
    for refused in &comparison.refused {
        text += &format!("  {refused}\n");
    }
    text
}
