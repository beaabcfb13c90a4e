//! `assay compile --table`: every recorded shape, compiled with the implementations that compile for TPUs, beside what
//! hardware measured.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::CliError;
use super::compiled::{Figures, Memory};
use crate::problem::Extents;
use crate::tpu::recorded::{BASELINE, RECORDED, SEED_KERNEL, find};

/// The lines that stand around each table in a document: that of logits, and that of LM heads.
const MARKS: [[&str; 2]; 2] = [
    ["<!-- assay compile --table -->", "<!-- end of table -->"],
    ["<!-- assay compile --table, LM heads -->", "<!-- end of table, LM heads -->"],
];

/// No document is longer.
const LONGEST: u64 = 1 << 20;

/// The only target that was recorded.
pub(super) const TARGET: &str = "v6e:2x4";

/// The implementations of the table, each at every recorded shape that is one of its own: the baseline first.
pub(super) fn rows() -> impl Iterator<Item = (&'static str, Extents)> {
    let shapes = RECORDED.iter().filter(|recorded| recorded.program == BASELINE).map(|recorded| recorded.shape);
    shapes.flat_map(|shape| {
        let ids: &[&str] = match shape {
            Extents::Logits(_) => &["xla", "tile-one-pass", "tile-two-pass"],
            Extents::Head(_) => &["xla-lm-head", "tile-lm-head"],
        };
        ids.iter().map(move |&id| (id, shape))
    })
}

/// Every row.
#[derive(Serialize)]
pub(super) struct Rows {
    pub(super) rows: Vec<Figures>,
}

impl Rows {
    /// As Markdown: both tables.
    pub(super) fn markdown(&self) -> String {
        self.tables().join("\n")
    }

    fn tables(&self) -> [String; 2] {
        let mut logits = String::from(
            "| shape a device | program | peak, bytes | of the logits | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        let mut heads = String::from(
            "| shape a device | program | peak, bytes | scratch, bytes | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | 3 products, ms | bound / products | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in &self.rows {
            match row.shape {
                Extents::Logits(_) => row_of_logits(&mut logits, row),
                Extents::Head(_) => row_of_head(&mut heads, row),
            }
        }
        [logits, heads]
    }

    /// Puts the tables between their marks in a document.
    pub(super) fn write_into(&self, path: &Path) -> Result<(), CliError> {
        let io = |action, reason| CliError::Io { path: path.into(), action, reason };
        let bytes = fs::metadata(path).map_err(|reason| io("read", reason))?.len();
        if bytes > LONGEST {
            return Err(CliError::Usage(format!("--into: got {bytes} bytes, expected a document of up to {LONGEST}")));
        }
        let document = fs::read_to_string(path).map_err(|reason| io("read", reason))?;
        let mut text = document;
        for ([start, end], table) in MARKS.into_iter().zip(self.tables()) {
            let parts = text.split_once(start).and_then(|(before, rest)| Some((before, rest.split_once(end)?.1)));
            let Some((before, after)) = parts else {
                let given = path.display();
                return Err(CliError::Usage(format!(
                    "--into: got {given}, expected a document with the lines `{start}` and `{end}`"
                )));
            };
            text = format!("{before}{start}\n{table}{end}{after}");
        }
        crate::fixture::persist(path, |file| std::io::Write::write_all(file, text.as_bytes()))
            .map_err(|reason| io("write", reason))
    }
}

fn row_of_logits(table: &mut String, row: &Figures) {
    let logits = row.shape.to_vec().into_iter().product::<usize>() * row.dtype.size();
    let (peak, bound) = (row.memory.peak_bytes, &row.bound);
    let beside = |number: Option<f64>| number.map_or("–".into(), |number| format!("{number:.2}"));
    let recorded = row.recorded.as_ref().filter(|_| row.implementation == "xla");
    let _ = writeln!(
        table,
        "| {} | {} | {peak} | {:.3} × | {} | {} | {:.3} | {:.3} | {:.3} ({}) | {} | {} |",
        row.shape,
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

fn row_of_head(table: &mut String, row: &Figures) {
    let Memory { compiled, peak_bytes } = row.memory;
    let bound = &row.bound;
    let products_ms = row.products_ms.expect("a head in bf16");
    // Beside what is like it: the baseline of the record, or its kernel.
    let kernel = find(SEED_KERNEL, &row.target, row.shape, row.dtype);
    let recorded = if row.implementation == "xla-lm-head" {
        row.recorded.as_ref().map(|beside| (beside.recorded, format!("{:.2}", beside.ratio)))
    } else {
        kernel.map(|recorded| (recorded, "–".into()))
    };
    let (recorded, ratio) = recorded.expect("the shapes of the table are recorded");
    let recorded = match recorded.step_ms {
        (least, most) if least == most => format!("{least}"),
        (least, most) => format!("{least} to {most}"),
    };
    let _ = writeln!(
        table,
        "| {} | {} | {peak_bytes} | {} | {} | {} | {:.2} | {:.2} | {:.2} ({}) | {products_ms:.2} | {:.2} | {recorded} | {ratio} |",
        row.shape,
        row.implementation,
        compiled.temp_bytes,
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.predicted_ms,
        format!("{:?}", bound.limit).to_lowercase(),
        bound.predicted_ms / products_ms,
    );
}
