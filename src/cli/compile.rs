//! `assay compile`: a program compiled for TPUs that need not be there, and what its compiler says of it.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::compile_table::{self, Rows};
use super::compiled::{Asked, Figures, HeldBy};
use super::emit::find;
use super::{CliError, Passed, Printing, config};
use crate::implementation::RunError;
use crate::problem::{Dtype, Extents, HeadLayout};
use crate::programs::{CHUNK_BYTES, HeadArrays, HeadProgram};
use crate::tpu::{self, Chip, Compiler, Request, Target};

/// VMEM for the windows of an LM head's products on a chip that has 128 MiB, 2¹⁰ bytes: docs/tpu.md has what others give.
const WINDOWS_KIB: usize = 73_728;

#[derive(Args)]
pub(super) struct Compile {
    /// Chip and topology: v5e, v5p, v6e or v7x, alone or as in v6e:2x4
    #[arg(long, value_name = "CHIP[:TOPOLOGY]", value_parser = Target::parse, required_unless_present = "table")]
    target: Option<Target>,
    /// The implementation: xla, tile-one-pass, tile-two-pass or tile-entropy; of an LM head, xla-lm-head or tile-lm-head,
    /// or one of these over rows, vocabulary or both (-rows, -vocab, -mesh)
    #[arg(long = "impl", value_name = "ID", default_value = "xla")]
    implementation: String,
    /// Sequences, tokens and vocabulary that each device holds; with an LM head `BxTxHxV`. Of -rows, -vocab and -mesh all
    /// that the devices hold together
    #[arg(long, value_name = "BxTxV", required_unless_present = "table")]
    shape: Option<Extents>,
    /// Dtype of the logits, or of hidden states and head: f32, bf16 or f16
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    /// How the LM head lies
    #[arg(long, value_enum, default_value = "hv")]
    layout: Layout,
    /// Logits of an LM head stay in f32 instead of being rounded to the dtype
    #[arg(long)]
    f32_logits: bool,
    /// Bytes of logits that tile-lm-head holds at a time, at most
    #[arg(long, value_name = "BYTES", default_value_t = CHUNK_BYTES)]
    chunk_bytes: usize,
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Every recorded shape with xla, tile-one-pass and tile-two-pass, or xla-lm-head and tile-lm-head, instead, in bf16 for
    /// v6e:2x4, as Markdown
    #[arg(long, conflicts_with_all = ["target", "shape", "implementation", "dtype", "spec"])]
    table: bool,
    /// Also put the tables between their marks in a document, such as docs/tpu.md
    #[arg(long, value_name = "FILE.md", requires = "table")]
    into: Option<PathBuf>,
    /// libtpu; the one that `TPU_LIBRARY_PATH` names, or that `make setup-tpu` installed, if none is given
    #[arg(long, value_name = "FILE.so")]
    libtpu: Option<PathBuf>,
    /// Flags of libtpu's own, as a job sets them in `LIBTPU_INIT_ARGS`. If this is not given, an LM head has
    /// `--xla_tpu_scoped_vmem_limit_kib=73728` on chips with 128 MiB of VMEM
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    libtpu_flags: Option<String>,
    /// Seconds that compiling may take
    #[arg(long, value_name = "SECONDS", default_value_t = tpu::compile::TIME_LIMIT.as_secs())]
    timeout: u64,
    #[command(flatten)]
    printing: Printing,
}

/// [`HeadLayout`], on the command line.
#[derive(Clone, Copy, ValueEnum)]
enum Layout {
    /// `[H,V]`
    Hv,
    /// `[V,H]`
    Vh,
}

/// A child of [`Compile`]: compiles what lies in a folder.
#[derive(Args)]
pub(super) struct Worker {
    folder: PathBuf,
}

impl Worker {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        tpu::compile::work(&self.folder)?;
        Ok(Passed::Yes)
    }
}

impl Asked {
    fn compile(&self, compiler: &Compiler) -> Result<Figures, CliError> {
        let (devices, core) = (self.target.devices(), self.target.chip.core());
        let &Asked { dtype, layout, rounds_logits, ref spec, .. } = self;
        let (code, held_by) = match self.shape {
            Extents::Logits(shape) => {
                let code = find(&self.implementation)?.program_for(spec, shape, dtype, devices, core);
                (code, HeldBy::EachDevice)
            }
            Extents::Head(shape) => {
                let head = find_head(&self.implementation)?.chunk_bytes(self.chunk_bytes);
                let code = head.program_for(spec, HeadArrays { shape, dtype, layout, rounds_logits }, devices, core);
                (code, if head.is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices })
            }
        };
        let code = code.map_err(RunError::from)?;
        let request = Request { code: &code, target: &self.target, replicas: devices, partitions: 1 };
        Ok(Figures::new(self, held_by, &compiler.clone().flags(&self.libtpu_flags).compile(&request)?))
    }
}

impl Compile {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?.unwrap_or_default();
        let of = |implementation: &str, target: &Target, shape: Extents| Asked {
            target: target.clone(),
            implementation: implementation.into(),
            shape,
            dtype: self.dtype,
            layout: match self.layout {
                Layout::Hv => HeadLayout::HiddenByVocab,
                Layout::Vh => HeadLayout::VocabByHidden,
            },
            rounds_logits: !self.f32_logits,
            chunk_bytes: self.chunk_bytes,
            spec: spec.clone(),
            libtpu_flags: self.libtpu_flags.clone().unwrap_or_else(|| flags_for(shape, target.chip)),
        };
        let (Some(target), Some(shape)) = (&self.target, self.shape) else {
            let target = Target::parse(compile_table::TARGET)?;
            let rows = compile_table::rows().map(|(id, shape)| of(id, &target, shape));
            return self.run_table(&rows.collect::<Vec<_>>());
        };
        let asked = of(&self.implementation, target, shape);
        let progress = self.printing.progress(1);
        progress.set_message(format!("compiling for {target}"));
        let figures = asked.compile(&self.compiler()?)?;
        progress.finish_and_clear();
        self.printing.finish(&figures.table(), &figures)?;
        Ok(Passed::Yes)
    }

    fn run_table(&self, rows: &[Asked]) -> Result<Passed, CliError> {
        let compiler = self.compiler()?;
        let progress = self.printing.progress(rows.len());
        let compile = |asked: &Asked| {
            progress.set_message(format!("{} at {}", asked.implementation, asked.shape));
            let figures = asked.compile(&compiler);
            progress.inc(1);
            figures
        };
        let rows = Rows { rows: rows.iter().map(compile).collect::<Result<_, _>>()? };
        progress.finish_and_clear();
        if let Some(path) = &self.into {
            rows.write_into(path)?;
        }
        self.printing.finish(&rows.markdown(), &rows)?;
        Ok(Passed::Yes)
    }

    fn compiler(&self) -> Result<Compiler, CliError> {
        let worker = env::current_exe().map_err(|reason| CliError::Io {
            path: "this executable".into(),
            action: "find",
            reason,
        })?;
        let library = tpu::compile::locate(self.libtpu.as_deref())?;
        Ok(Compiler::new(library, worker).limit(Duration::from_secs(self.timeout)))
    }
}

/// What libtpu is told of programs over arrays of `shape`. XLA keeps what a product works on within 32 MiB of VMEM unless it
/// is told otherwise, and its schedules of an LM head's products are better with more.
fn flags_for(shape: Extents, chip: &Chip) -> String {
    match shape {
        Extents::Head(_) if chip.vmem_mib >= 128 => format!("--xla_tpu_scoped_vmem_limit_kib={WINDOWS_KIB}"),
        _ => String::new(),
    }
}

/// The programs called `id`, of an LM head: all of them compile for TPUs.
fn find_head(id: &str) -> Result<HeadProgram, CliError> {
    let all = HeadProgram::all();
    all.iter().copied().find(|program| program.id() == id).ok_or_else(|| {
        let ids = all.iter().map(|program| program.id()).collect::<Vec<_>>().join(", ");
        CliError::Usage(format!("implementation: got `{id}`, expected one of an LM head: {ids}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_heads_alone_have_more_vmem_where_there_is_enough() {
        let flags = |shape: &str, target| flags_for(shape.parse().unwrap(), Target::parse(target).unwrap().chip);
        let more = "--xla_tpu_scoped_vmem_limit_kib=73728";
        assert_eq!(["v5e", "v6e", "v5p", "v7x"].map(|chip| flags("1x8x16x64", chip)), [more, more, "", ""]);
        assert_eq!(flags("1x8x64", "v6e"), "");
    }
}
