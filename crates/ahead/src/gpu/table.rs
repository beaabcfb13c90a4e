//! The tables of docs/gpu.md: the kernels of PTX for every chip, vocabulary and dtype, and XLA's own programs.

use std::fmt::Write as _;

use assay_core::problem::{Dtype, HeadShape, ProblemShape, Shape};
use assay_core::spec::LossSpec;
use assay_programs::{HeadProgram, LossProgram, Programs as _};
use assay_schema::gpu::{GpuLaunch, GpuProgramReport, GpuTable};

use super::figures::is_for_gpus;
use super::target::GpuTarget;
use crate::request::{CompileOptions, CompileRequest};
use crate::table::{extents, or_dash, relative_to_logits};

/// Vocabularies of Qwen2.5's tokens, of the same padded to 128, and of Gemma.
const VOCABS: [usize; 3] = [151_643, 151_936, 256_000];

/// The vocabulary of XLA's programs and of losses with an entropy bonus.
const VOCAB: usize = 151_936;

/// The coefficient of the losses with an entropy bonus.
const ENTROPY_COEF: f64 = 0.01;

/// The LM head of a 7B model on 8,192 tokens.
const HEAD: ProblemShape = ProblemShape::Head(HeadShape { batch: 1, tokens: 8192, hidden: 4096, vocab: VOCAB });

/// Lists the programs of the table, with the losses and sizes of `options`: on each chip `xla` and every kernel that it can run, on
/// logits and with an LM head.
pub fn requests(options: &CompileOptions) -> Vec<CompileRequest<GpuTarget>> {
    let mut requests = Vec::new();
    for target in GpuTarget::all() {
        let request = |id: &str, shape, dtype, entropy_coef| CompileRequest {
            target: target.clone(),
            implementation: id.into(),
            shape,
            options: CompileOptions {
                dtype,
                spec: LossSpec { entropy_coef, ..options.spec.clone() },
                ..options.clone()
            },
        };
        let logits = |vocab| ProblemShape::Logits(Shape { batch: 1, tokens: 4096, vocab });
        requests.push(request("xla", logits(VOCAB), Dtype::Bf16, 0.0));
        let programs = LossProgram::all().into_iter().filter(|program| program.is_whole() && is_for_gpus(*program));
        for program in programs.filter(|program| program.has_kernels() && runs_on(program.id(), &target)) {
            for vocab in VOCABS {
                let dtypes = [Dtype::Bf16, Dtype::F16, Dtype::F32];
                requests.extend(dtypes.map(|dtype| request(program.id(), logits(vocab), dtype, 0.0)));
            }
            if program.is_implementation() {
                requests.push(request(program.id(), logits(VOCAB), Dtype::Bf16, ENTROPY_COEF));
            }
        }
        let heads = HeadProgram::all().into_iter().filter(|head| head.is_whole() && is_for_gpus(*head));
        let heads = heads.filter(|head| head.is_implementation() && runs_on(head.id(), &target));
        requests.extend(heads.map(|head| request(head.id(), HEAD, Dtype::Bf16, 0.0)));
    }
    requests
}

/// Whether a chip can run a kernel: one pass needs clusters of CTAs.
fn runs_on(id: &str, target: &GpuTarget) -> bool {
    !id.contains("one-pass") || target.chip.largest_cluster > 1
}

/// Formats the rows as two tables in Markdown: logits, and LM heads.
pub fn markdown(table: &GpuTable) -> [String; 2] {
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

/// Formats the implementation's id, with a note on the entropy bonus if the loss has one.
fn program(row: &GpuProgramReport) -> String {
    let bonus = if row.entropy_coef == 0.0 { "" } else { ", entropy bonus" };
    format!("{}{bonus}", row.implementation)
}

/// Formats a figure of each launch, separated by commas.
fn per_launch(row: &GpuProgramReport, figure: impl Fn(&GpuLaunch) -> String) -> String {
    let figures: Vec<String> = row.launches.iter().map(figure).collect();
    if figures.is_empty() { "–".into() } else { figures.join(", ") }
}

fn busiest(row: &GpuProgramReport) -> String {
    let bound = &row.bound;
    if bound.pipe.is_empty() { "–".into() } else { format!("{:.3} ({})", bound.pipe_ms, bound.pipe) }
}

fn row_of_logits(table: &mut String, row: &GpuProgramReport) -> std::fmt::Result {
    let peak = row.memory.peak_bytes;
    let bound = &row.bound;
    writeln!(
        table,
        "| {} | {} | {} | {} | {peak} | {} | {} | {} | {} | {} | {} | {} | {:.3} | {} | {} |",
        row.target,
        extents(&row.shape),
        row.dtype,
        program(row),
        relative_to_logits(peak, &row.shape, &row.dtype).map_or("–".into(), |ratio| format!("{ratio:.5} ×")),
        per_launch(row, |launch| launch.registers.to_string()),
        per_launch(row, |launch| launch.spill_bytes.to_string()),
        per_launch(row, |launch| launch.shared_bytes.to_string()),
        per_launch(row, |launch| launch.resident.to_string()),
        busiest(row),
        row.hbm_bytes,
        bound.hbm_ms,
        or_dash((!bound.pipe.is_empty()).then(|| bound.pipe_ms / bound.hbm_ms), 2),
        format_args!("{:.3}", bound.predicted_ms),
    )
}

fn row_of_head(table: &mut String, row: &GpuProgramReport) -> std::fmt::Result {
    writeln!(
        table,
        "| {} | {} | {} | {} | {} | {} | {} | {:.3} | {} |",
        row.target,
        extents(&row.shape),
        row.dtype,
        program(row),
        row.memory.peak_bytes,
        row.memory.temp_bytes,
        row.hbm_bytes,
        row.bound.hbm_ms,
        busiest(row),
    )
}
