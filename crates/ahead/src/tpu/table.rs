//! The tables of docs/tpu.md: every recorded shape with the implementations that compile for TPUs and the recorded times, two of the
//! shapes for every chip, and `xla` next to the other ways to write it.

use std::fmt::Write as _;
use std::iter;

use assay_core::problem::{ProblemShape, Shape};
use assay_programs::{LossProgram, Programs};
use assay_schema::compile::{ProgramMemory, TpuProgramReport, TpuTable};

use super::mllm_jax::{BASELINE, MEASUREMENTS};
use super::target::TpuTarget;
use crate::request::{CompileOptions, CompileRequest};
use crate::table::{extents, or_dash, relative_to_logits};

/// The only target of MLLM-JAX's record.
pub const TARGET: &str = "v6e:2x4";

/// The program of logits that MLLM-JAX measured as its baseline.
const LOSS_BASELINE: &str = "xla-seed";

/// The program of an LM head that MLLM-JAX measured as its baseline.
const HEAD_BASELINE: &str = "xla-lm-head-seed";

/// The shape at which the other ways to write `xla` are compared.
const LOGITS: ProblemShape = ProblemShape::Logits(Shape { batch: 1, tokens: 4096, vocab: 151_936 });

/// Lists the programs of the table, with the losses and sizes of `options`: the implementations and MLLM-JAX's baseline at the recorded
/// shapes on [`TARGET`], at two of these shapes on the other chips, and every other way to write `xla` on [`TARGET`].
///
/// # Panics
/// Never: [`TARGET`] is a valid target.
pub fn requests(options: &CompileOptions) -> Vec<CompileRequest<TpuTarget>> {
    let mut requests = Vec::new();
    let mut request = |target: &TpuTarget, id: &str, shape| {
        let (target, implementation) = (target.clone(), id.into());
        requests.push(CompileRequest { target, implementation, shape, options: options.clone() });
    };
    let here = TpuTarget::parse(TARGET).expect("a target");
    let baselines = MEASUREMENTS.iter().filter(|recorded| recorded.program == BASELINE);
    let recorded: Vec<ProblemShape> = baselines.map(|recorded| recorded.shape).collect();
    let heads = recorded.iter().copied().filter(|shape| matches!(shape, ProblemShape::Head(_)));
    let elsewhere: Vec<ProblemShape> = iter::once(LOGITS).chain(heads).collect();
    let others = TpuTarget::defaults().filter(|target| *target != here);
    for (target, shapes) in iter::once((here.clone(), &recorded)).chain(others.map(|target| (target, &elsewhere))) {
        for &shape in shapes {
            let ids: &[&str] = match shape {
                ProblemShape::Logits(_) => &["xla", LOSS_BASELINE, "tile-one-pass", "tile-two-pass"],
                ProblemShape::Head(_) => &["xla-lm-head", HEAD_BASELINE, "tile-lm-head"],
            };
            for id in ids {
                request(&target, id, shape);
            }
        }
    }
    let ways = LossProgram::alternatives().map(Programs::id).filter(|&id| id != LOSS_BASELINE);
    ways.for_each(|id| request(&here, id, LOGITS));
    requests
}

/// Formats the rows as three tables in Markdown: logits, LM heads, and the ways to write `xla`.
pub fn markdown(table: &TpuTable) -> [String; 3] {
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
        if program.is_implementation() || program.id() == LOSS_BASELINE {
            row_of_logits(&mut logits, row);
        }
        if program.class() == "xla" && row.target == TARGET && row.shape == LOGITS.to_vec() {
            row_of_way(&mut ways, *program, row);
        }
    }
    [logits, heads, ways]
}

fn row_of_logits(table: &mut String, row: &TpuProgramReport) {
    let recorded = row.recorded.as_ref().filter(|_| row.implementation == LOSS_BASELINE);
    let _ = writeln!(
        table,
        "| {} | {} | {} | {} | {} | {} |",
        row.target,
        extents(&row.shape),
        row.implementation,
        figures(row),
        or_dash(recorded.map(|beside| beside.recorded.step_ms[0]), 2),
        or_dash(recorded.map(|beside| beside.ratio), 2),
    );
}

fn row_of_way(table: &mut String, program: LossProgram, row: &TpuProgramReport) {
    let grade = if program.keeps_digits() { "`exact`" } else { "`standard`" };
    let _ = writeln!(table, "| {} | {} | {grade} | {} |", program.id(), program.summary(), figures(row));
}

/// Formats the columns from the peak to the bound.
fn figures(row: &TpuProgramReport) -> String {
    let (peak, bound) = (row.memory.peak_bytes, &row.bound);
    format!(
        "{peak} | {} × | {} | {} | {:.3} | {:.3} | {:.3} ({})",
        or_dash(relative_to_logits(peak, &row.shape, &row.dtype), 3),
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.predicted_ms,
        bound.limit.name(),
    )
}

fn row_of_head(table: &mut String, row: &TpuProgramReport) {
    let ProgramMemory { temp_bytes, peak_bytes, .. } = row.memory;
    let bound = &row.bound;
    // Each program is compared with its counterpart in the record: the baseline, or the kernel.
    let (recorded, ratio) = match &row.recorded {
        Some(baseline) if row.implementation == HEAD_BASELINE => (Some(&baseline.recorded), Some(baseline.ratio)),
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
        extents(&row.shape),
        row.implementation,
        row.cycles,
        row.hbm_bytes,
        bound.cycles_ms,
        bound.hbm_ms,
        bound.links_ms,
        bound.predicted_ms,
        bound.limit.name(),
        or_dash(row.products_ms, 2),
        or_dash(row.products_ms.map(|products_ms| bound.predicted_ms / products_ms), 2),
        or_dash(ratio, 2),
    );
}
