//! Every recorded shape, with the implementations that compile for TPUs, beside what hardware measured; two of them for every
//! chip; and `xla` beside the other ways to write it.

use std::fmt::Write as _;

use assay_core::problem::{Dtype, Extents, Shape};
use assay_programs::{LossProgram, Programs};
use assay_schema::compile::{Compiled, Memory, Table};

use super::seed_measurements::{BASELINE, SEED_MEASUREMENTS};
use super::target::Target;

/// The only target that was recorded.
pub const TARGET: &str = "v6e:2x4";

/// The program that the record is of.
const SEED: &str = "xla-seed";

/// The same of an LM head.
const SEED_HEAD: &str = "xla-lm-head-seed";

/// What the ways to write `xla` are compiled for.
const LOGITS: Extents = Extents::Logits(Shape { batch: 1, tokens: 4096, vocab: 151_936 });

/// What is compiled: the implementations, the baseline first, at the recorded shapes; at two of them for the other chips; and
/// the ways to write `xla`.
///
/// # Panics
/// Never: [`TARGET`] is one.
pub fn rows() -> impl Iterator<Item = (Target, &'static str, Extents)> {
    let here = Target::parse(TARGET).expect("a target");
    let recorded =
        SEED_MEASUREMENTS.iter().filter(|recorded| recorded.program == BASELINE).map(|recorded| recorded.shape);
    let on_recorded = recorded.clone().map({
        let here = here.clone();
        move |shape| (here.clone(), shape)
    });
    let heads = recorded.filter(|shape| matches!(shape, Extents::Head(_)));
    let others = Target::defaults().filter(|target| target.to_string() != TARGET);
    let on_others = others.flat_map(move |target| {
        let shapes = std::iter::once(LOGITS).chain(heads.clone());
        shapes.map(move |shape| (target.clone(), shape))
    });
    let side_by_side = on_recorded.chain(on_others).flat_map(|(target, shape)| {
        let ids: &[&str] = match shape {
            Extents::Logits(_) => &["xla", SEED, "tile-one-pass", "tile-two-pass"],
            Extents::Head(_) => &["xla-lm-head", SEED_HEAD, "tile-lm-head"],
        };
        ids.iter().map(move |&id| (target.clone(), id, shape))
    });
    let ways = LossProgram::alternatives().map(Programs::id).filter(|&id| id != SEED);
    side_by_side.chain(ways.map(move |id| (here.clone(), id, LOGITS)))
}

/// The rows as Markdown: those on logits, those with an LM head, and the ways to write `xla`.
pub fn markdown(table: &Table) -> [String; 3] {
    let mut logits = String::from(
        "| target | shape a device | program | peak, bytes | of the logits | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut heads = String::from(
        "| target | shape a device | program | peak, bytes | scratch, bytes | cycles | HBM bytes | cycles, ms | HBM, ms | links, ms | bound, ms | 3 products, ms | bound / products | recorded, ms | bound / recorded |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut ways = String::from(
        "| program | what it is | reaches | peak, bytes | of the logits | cycles | HBM bytes | cycles, ms | HBM, ms | bound, ms |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let programs = LossProgram::all();
    for row in &table.rows {
        let Some(program) = programs.iter().find(|program| program.id() == row.implementation) else {
            row_of_head(&mut heads, row);
            continue;
        };
        if program.is_implementation() || program.id() == SEED {
            row_of_logits(&mut logits, row);
        }
        if program.class() == "xla" && row.target == TARGET && row.shape == LOGITS.to_vec() {
            row_of_way(&mut ways, *program, row);
        }
    }
    [logits, heads, ways]
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
    let recorded = row.recorded.as_ref().filter(|_| row.implementation == SEED);
    let _ = writeln!(
        table,
        "| {} | {} | {} | {} | {} | {} |",
        row.target,
        extents(row),
        row.implementation,
        figures(row),
        beside(recorded.map(|beside| beside.recorded.step_ms[0])),
        beside(recorded.map(|beside| beside.ratio)),
    );
}

fn row_of_way(table: &mut String, program: LossProgram, row: &Compiled) {
    let grade = if program.keeps_digits() { "`exact`" } else { "`standard`" };
    let _ = writeln!(table, "| {} | {} | {grade} | {} |", program.id(), program.summary(), figures(row));
}

/// From the peak to the bound.
fn figures(row: &Compiled) -> String {
    let elements = row.shape.iter().map(|&extent| extent as f64).product::<f64>();
    let logits = row.dtype.parse::<Dtype>().ok().map(|dtype| elements * dtype.size() as f64);
    let (peak, bound) = (row.memory.peak_bytes, &row.bound);
    format!(
        "{peak} | {} × | {} | {} | {:.3} | {:.3} | {:.3} ({})",
        logits.map_or("–".into(), |logits| format!("{:.3}", peak as f64 / logits)),
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.predicted_ms,
        bound.limit.name(),
    )
}

fn row_of_head(table: &mut String, row: &Compiled) {
    let Memory { temp_bytes, peak_bytes, .. } = row.memory;
    let bound = &row.bound;
    // Beside what is like it: the baseline of the record, or its kernel.
    let (recorded, ratio) = match &row.recorded {
        Some(baseline) if row.implementation == SEED_HEAD => (Some(&baseline.recorded), Some(baseline.ratio)),
        _ => (row.recorded_kernel.as_ref().filter(|_| row.implementation == "tile-lm-head"), None),
    };
    let recorded = recorded.map_or("–".into(), |recorded| match recorded.step_ms {
        [least, most] if least == most => format!("{least}"),
        [least, most] => format!("{least} to {most}"),
    });
    let _ = writeln!(
        table,
        "| {} | {} | {} | {peak_bytes} | {temp_bytes} | {} | {} | {:.2} | {:.2} | {:.2} | {:.2} ({}) | {} | {} | {recorded} | {} |",
        row.target,
        extents(row),
        row.implementation,
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.links_ms,
        bound.predicted_ms,
        bound.limit.name(),
        beside(row.products_ms),
        beside(row.products_ms.map(|products_ms| bound.predicted_ms / products_ms)),
        beside(ratio),
    );
}
