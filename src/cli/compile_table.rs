//! `assay compile --table`: every recorded shape, compiled with every implementation that compiles for TPUs, beside what
//! hardware measured.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::CliError;
use super::compile::{Figures, written};
use crate::tpu::recorded::{BASELINE, RECORDED, Recorded};

/// The lines that stand around the table in a document.
const MARKS: [&str; 2] = ["<!-- assay compile --table -->", "<!-- end of table -->"];

/// No document is longer.
const LONGEST: u64 = 1 << 20;

/// The implementations of the table, and the target whose record there is.
pub(super) const IMPLEMENTATIONS: [&str; 3] = ["xla", "tile-one-pass", "tile-two-pass"];
/// The only target that was recorded.
pub(super) const TARGET: &str = "v6e:2x4";

/// The recorded runs of the baseline: one for each shape.
pub(super) fn recorded() -> impl Iterator<Item = &'static Recorded> {
    RECORDED.iter().filter(|recorded| recorded.program == BASELINE)
}

/// Every row.
#[derive(Serialize)]
pub(super) struct Rows {
    pub(super) rows: Vec<Figures>,
}

impl Rows {
    /// As Markdown.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from(
            "| shape a device | program | peak, bytes | of the logits | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in &self.rows {
            let logits = row.shape.iter().product::<usize>() * row.dtype.size();
            let peak = row.memory.peak_bytes;
            let bound = &row.bound;
            let beside = |number: Option<f64>| number.map_or("–".into(), |number| format!("{number:.2}"));
            let recorded = row.recorded.as_ref().filter(|_| row.implementation == "xla");
            let _ = writeln!(
                text,
                "| {} | {} | {peak} | {:.3} × | {} | {} | {:.3} | {:.3} | {:.3} ({}) | {} | {} |",
                written(&row.shape),
                row.implementation,
                peak as f64 / logits as f64,
                row.cycles,
                row.hbm_bytes,
                bound.cycles_ms,
                bound.hbm_ms,
                bound.predicted_ms,
                format!("{:?}", bound.limit).to_lowercase(),
                beside(recorded.map(|beside| beside.recorded.step_ms.0)),
                beside(recorded.map(|beside| beside.ratio)),
            );
        }
        text
    }

    /// Puts the table between its marks in a document.
    pub(super) fn write_into(&self, path: &Path) -> Result<(), CliError> {
        let io = |action, reason| CliError::Io { path: path.into(), action, reason };
        let bytes = fs::metadata(path).map_err(|reason| io("read", reason))?.len();
        if bytes > LONGEST {
            return Err(CliError::Usage(format!("--into: got {bytes} bytes, expected a document of up to {LONGEST}")));
        }
        let document = fs::read_to_string(path).map_err(|reason| io("read", reason))?;
        let parts =
            document.split_once(MARKS[0]).and_then(|(before, rest)| Some((before, rest.split_once(MARKS[1])?.1)));
        let Some((before, after)) = parts else {
            let expected = format!("the lines `{}` and `{}`", MARKS[0], MARKS[1]);
            return Err(CliError::Usage(format!(
                "--into: got {}, expected a document with {expected}",
                path.display()
            )));
        };
        let text = format!("{before}{}\n{}{}{after}", MARKS[0], self.markdown(), MARKS[1]);
        crate::fixture::persist(path, |file| std::io::Write::write_all(file, text.as_bytes()))
            .map_err(|reason| io("write", reason))
    }
}
