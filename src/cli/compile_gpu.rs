//! The output of `assay compile` for a GPU.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, presets::UTF8_FULL_CONDENSED};

use super::compile::table_of_memory;
use super::document::Marks;
use crate::ahead::CompileRequest;
use crate::gpu::GpuTarget;
use crate::schema::gpu::{GpuLaunch, GpuLimit, GpuProgramReport, GpuTimeBound};

/// The marks around each table in docs/gpu.md: logits, and LM heads.
pub(super) const MARKS: [Marks; 2] = [
    ["<!-- assay compile --table gpus -->", "<!-- end of table -->"],
    ["<!-- assay compile --table gpus, LM heads -->", "<!-- end of table, LM heads -->"],
];

/// Returns the rows of a table that have Qwen2.5's padded vocabulary and bf16.
pub(super) fn summary(table: &str) -> String {
    let (head, rows) =
        table.lines().partition::<Vec<_>, _>(|line| line.starts_with("| target") || line.starts_with("|---"));
    let shown = rows.into_iter().filter(|row| row.contains("x151936 | bf16 |"));
    head.into_iter().chain(shown).fold(String::new(), |text, line| text + line + "\n")
}

/// Formats the kernels of PTX, and the other figures.
pub(super) fn table_of(request: &CompileRequest<GpuTarget>, figures: &GpuProgramReport) -> String {
    let mut text = String::new();
    for launch in &figures.launches {
        let _ = writeln!(text, "{}", table_of_launch(launch));
    }
    let GpuProgramReport { target, devices, held_by, memory, hbm_bytes, .. } = figures;
    let mut table = table_of_memory(request, [target, held_by.preposition()], *devices, memory, *hbm_bytes);
    let GpuTimeBound { hbm_ms, pipe_ms, pipe, predicted_ms, limit } = &figures.bound;
    let bandwidth = request.target.chip.hbm_tb_per_s;
    table.add_row([format!("bytes at {bandwidth} TB/s"), format!("{hbm_ms:.3} ms")]);
    if !pipe.is_empty() {
        let label = format!("busiest pipe ({pipe}) at {} GHz (assumed)", figures.clock_ghz);
        table.add_row([label, format!("{pipe_ms:.3} ms; pipe / HBM {:.2}", pipe_ms / hbm_ms)]);
    }
    let limit = match limit {
        GpuLimit::Hbm => "hbm",
        GpuLimit::Pipe => pipe,
    };
    table.add_row([format!("lower bound ({limit}), without stalls"), format!("{predicted_ms:.3} ms")]);
    table.add_row(["compile_s".into(), format!("{:.2}", figures.compile_s)]);
    let _ = writeln!(text, "{table}");
    if figures.launches.is_empty() {
        text += "not counted: what pipes of XLA's own kernels take\n";
    }
    for instruction in &figures.hbm_uncounted {
        let _ = writeln!(text, "not counted in hbm_bytes: the body of {instruction}");
    }
    for collective in &figures.collectives {
        let _ = writeln!(text, "not counted: what {collective} takes between devices");
    }
    text
}

fn table_of_launch(launch: &GpuLaunch) -> String {
    let by = |extents: [u32; 3]| extents.map(|extent| extent.to_string()).join("x");
    let mut table = comfy_table::Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    let name = if launch.runs == 1 { launch.name.clone() } else { format!("{} × {}", launch.runs, launch.name) };
    let grid = format!("{} CTAs of {} threads, clusters of {}", by(launch.grid), by(launch.block), launch.cluster);
    table.set_header([name, grid]);
    table.column_mut(1).expect("two columns").set_cell_alignment(CellAlignment::Right);
    table.add_row(["registers a thread".into(), format!("{}, {} bytes spilled", launch.registers, launch.spill_bytes)]);
    table.add_row(["shared memory a CTA".into(), format!("{} bytes", launch.shared_bytes)]);
    table.add_row(["CTAs a multiprocessor".into(), format!("{} ({})", launch.resident, launch.resident_by)]);
    for pipe in &launch.pipes {
        table.add_row([pipe.name.clone(), format!("{:.3e} warp instructions, {:.3} ms", pipe.instructions, pipe.ms)]);
    }
    let mut text = table.to_string();
    for uncounted in &launch.uncounted {
        let _ = write!(text, "\nnot counted: {uncounted}");
    }
    text
}
