//! Every recorded shape, with the implementations that compile for TPUs, beside what hardware measured.

use std::fmt::Write as _;

use assay_core::problem::{Dtype, Extents};
use assay_schema::compile::{Compiled, Memory, Table};

use super::recorded::{BASELINE, RECORDED};

/// The only target that was recorded.
pub const TARGET: &str = "v6e:2x4";

/// The implementations of the table, each at every recorded shape that is one of its own: the baseline first.
pub fn rows() -> impl Iterator<Item = (&'static str, Extents)> {
    let shapes = RECORDED.iter().filter(|recorded| recorded.program == BASELINE).map(|recorded| recorded.shape);
    shapes.flat_map(|shape| {
        let ids: &[&str] = match shape {
            Extents::Logits(_) => &["xla", "tile-one-pass", "tile-two-pass"],
            Extents::Head(_) => &["xla-lm-head", "tile-lm-head"],
        };
        ids.iter().map(move |&id| (id, shape))
    })
}

/// The rows as Markdown: those on logits, and those with an LM head.
pub fn markdown(table: &Table) -> [String; 2] {
    let mut logits = String::from(
        "| shape a device | program | peak, bytes | of the logits | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut heads = String::from(
        "| shape a device | program | peak, bytes | scratch, bytes | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | 3 products, ms | bound / products | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in &table.rows {
        if row.shape.len() == 4 {
            row_of_head(&mut heads, row);
        } else {
            row_of_logits(&mut logits, row);
        }
    }
    [logits, heads]
}

/// Two digits after the point, where there is a number.
fn beside(number: Option<f64>) -> String {
    number.map_or("–".into(), |number| format!("{number:.2}"))
}

/// `1x4096x151936`
fn extents(row: &Compiled) -> String {
    row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

fn row_of_logits(table: &mut String, row: &Compiled) {
    let elements = row.shape.iter().map(|&extent| extent as f64).product::<f64>();
    let logits = row.dtype.parse::<Dtype>().ok().map(|dtype| elements * dtype.size() as f64);
    let (peak, bound) = (row.memory.peak_bytes, &row.bound);
    let recorded = row.recorded.as_ref().filter(|_| row.implementation == "xla");
    let _ = writeln!(
        table,
        "| {} | {} | {peak} | {} × | {} | {} | {:.3} | {:.3} | {:.3} ({}) | {} | {} |",
        extents(row),
        row.implementation,
        logits.map_or("–".into(), |logits| format!("{:.3}", peak as f64 / logits)),
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.predicted_ms,
        bound.limit.name(),
        beside(recorded.map(|beside| beside.recorded.step_ms[0])),
        beside(recorded.map(|beside| beside.ratio)),
    );
}

fn row_of_head(table: &mut String, row: &Compiled) {
    let Memory { temp_bytes, peak_bytes, .. } = row.memory;
    let bound = &row.bound;
    // Beside what is like it: the baseline of the record, or its kernel.
    let (recorded, ratio) = match &row.recorded {
        Some(baseline) if row.implementation == "xla-lm-head" => (Some(&baseline.recorded), Some(baseline.ratio)),
        _ => (row.recorded_kernel.as_ref(), None),
    };
    let recorded = recorded.map_or("–".into(), |recorded| match recorded.step_ms {
        [least, most] if least == most => format!("{least}"),
        [least, most] => format!("{least} to {most}"),
    });
    let _ = writeln!(
        table,
        "| {} | {} | {peak_bytes} | {temp_bytes} | {} | {} | {:.2} | {:.2} | {:.2} ({}) | {} | {} | {recorded} | {} |",
        extents(row),
        row.implementation,
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.predicted_ms,
        bound.limit.name(),
        beside(row.products_ms),
        beside(row.products_ms.map(|products_ms| bound.predicted_ms / products_ms)),
        beside(ratio),
    );
}
