//! The kernels of PTX for every chip, vocabulary and dtype, and XLA's own programs beside them.

use std::fmt::Write as _;

use assay_core::problem::{Dtype, Extents, HeadShape, Shape};
use assay_programs::{HeadProgram, LossProgram, Programs as _};
use assay_schema::gpu::{Compiled, Launch, Table};

use crate::figures::is_for_gpus;
use crate::target::Target;

/// One row to be: what is compiled, and whether its loss has an entropy bonus.
#[derive(Clone, Debug)]
pub struct Row {
    /// For what.
    pub target: Target,
    /// The implementation's id.
    pub implementation: &'static str,
    /// What the device holds.
    pub shape: Extents,
    /// Of the logits, or of hidden states and head.
    pub dtype: Dtype,
    /// The loss's entropy bonus.
    pub entropy_coef: f64,
}

/// Real vocabularies: Qwen2.5's tokens, the same padded to 128, Gemma's.
const VOCABS: [usize; 3] = [151_643, 151_936, 256_000];

/// The one that XLA's programs and losses with an entropy bonus are compiled at.
const VOCAB: usize = 151_936;

/// The bonus of those.
const ENTROPY_COEF: f64 = 0.01;

/// An LM head of a 7B model.
const HEAD: Extents = Extents::Head(HeadShape { batch: 1, tokens: 8192, hidden: 4096, vocab: VOCAB });

/// What is compiled: on each chip `xla` and the kernels that it can run; with an LM head the same.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for target in Target::all() {
        let row = |implementation, shape, dtype, entropy_coef| Row {
            target: target.clone(),
            implementation,
            shape,
            dtype,
            entropy_coef,
        };
        let logits = |vocab| Extents::Logits(Shape { batch: 1, tokens: 4096, vocab });
        rows.push(row("xla", logits(VOCAB), Dtype::Bf16, 0.0));
        let programs = LossProgram::all().into_iter().filter(|program| program.is_whole() && is_for_gpus(*program));
        for program in programs.filter(|program| program.has_kernels() && runs_on(program.id(), &target)) {
            for vocab in VOCABS {
                rows.extend(
                    [Dtype::Bf16, Dtype::F16, Dtype::F32].map(|dtype| row(program.id(), logits(vocab), dtype, 0.0)),
                );
            }
            if program.is_implementation() {
                rows.push(row(program.id(), logits(VOCAB), Dtype::Bf16, ENTROPY_COEF));
            }
        }
        let heads = HeadProgram::all().into_iter().filter(|head| head.is_whole() && is_for_gpus(*head));
        let heads = heads.filter(|head| head.is_implementation() && runs_on(head.id(), &target));
        rows.extend(heads.map(|head| row(head.id(), HEAD, Dtype::Bf16, 0.0)));
    }
    rows
}

/// Whether a chip has what a kernel is made of: one pass needs a cluster.
fn runs_on(id: &str, target: &Target) -> bool {
    !id.contains("one-pass") || target.chip.largest_cluster > 1
}

/// The rows as Markdown: those on logits, and those with an LM head.
pub fn markdown(table: &Table) -> [String; 2] {
    let mut logits = String::from(
        "| target | shape | dtype | program | peak, bytes | of the logits | registers | spills | SMEM a CTA | CTAs an SM | busiest pipe, ms | HBM bytes | HBM, ms | pipe / HBM | bound, ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut heads = String::from(
        "| target | shape | dtype | program | peak, bytes | scratch, bytes | HBM bytes | HBM, ms | busiest pipe of its kernels, ms |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in &table.gpu_rows {
        let _ = if row.shape.len() == 4 { row_of_head(&mut heads, row) } else { row_of_logits(&mut logits, row) };
    }
    [logits, heads]
}

/// `1x4096x151936`
fn extents(row: &Compiled) -> String {
    row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// With what its loss has beside.
fn program(row: &Compiled) -> String {
    let bonus = if row.entropy_coef == 0.0 { "" } else { ", entropy bonus" };
    format!("{}{bonus}", row.implementation)
}

/// A figure of each launch; of one kernel that is itself.
fn of_launches(row: &Compiled, figure: impl Fn(&Launch) -> String) -> String {
    let figures: Vec<String> = row.launches.iter().map(figure).collect();
    if figures.is_empty() { "–".into() } else { figures.join(", ") }
}

fn busiest(row: &Compiled) -> String {
    let bound = &row.bound;
    if bound.pipe.is_empty() { "–".into() } else { format!("{:.3} ({})", bound.pipe_ms, bound.pipe) }
}

fn row_of_logits(table: &mut String, row: &Compiled) -> std::fmt::Result {
    let elements = row.shape.iter().map(|&extent| extent as f64).product::<f64>();
    let bytes = row.dtype.parse::<Dtype>().ok().map(|dtype| elements * dtype.size() as f64);
    let peak = row.memory.peak_bytes;
    let bound = &row.bound;
    writeln!(
        table,
        "| {} | {} | {} | {} | {peak} | {} | {} | {} | {} | {} | {} | {} | {:.3} | {} | {} |",
        row.target,
        extents(row),
        row.dtype,
        program(row),
        bytes.map_or("–".into(), |bytes| format!("{:.5} ×", peak as f64 / bytes)),
        of_launches(row, |launch| launch.registers.to_string()),
        of_launches(row, |launch| launch.spill_bytes.to_string()),
        of_launches(row, |launch| launch.shared_bytes.to_string()),
        of_launches(row, |launch| launch.resident.to_string()),
        busiest(row),
        row.hbm_bytes,
        bound.hbm_ms,
        if bound.pipe.is_empty() { "–".into() } else { format!("{:.2}", bound.pipe_ms / bound.hbm_ms) },
        format_args!("{:.3}", bound.predicted_ms),
    )
}

fn row_of_head(table: &mut String, row: &Compiled) -> std::fmt::Result {
    writeln!(
        table,
        "| {} | {} | {} | {} | {} | {} | {} | {:.3} | {} |",
        row.target,
        extents(row),
        row.dtype,
        program(row),
        row.memory.peak_bytes,
        row.memory.temp_bytes,
        row.hbm_bytes,
        row.bound.hbm_ms,
        busiest(row),
    )
}
