//! `assay emit`: the kernels of an implementation in files, for a program of the user's own.

mod gpu;
mod manifest;
mod tpu;

use clap::Args;

use super::target_choice::AnyTarget;
use super::{CliError, Passed};
use manifest::EmitRequest;

#[derive(Args)]
pub(super) struct EmitCommand {
    /// A TPU and its topology: v5e, v5p, v6e or v7x, alone or as in v6e:2x4; or a GPU: h100, h200 or b200, alone or, as in h100:8, so
    /// many of them
    #[arg(long, value_name = "CHIP[:TOPOLOGY]", value_parser = AnyTarget::parse)]
    target: AnyTarget,
    #[command(flatten)]
    asked: EmitRequest,
}

impl EmitCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        match &self.target {
            AnyTarget::Tpu(target) => tpu::emit(&self.asked, target),
            AnyTarget::Gpu(target) => gpu::emit(&self.asked, target),
        }
    }
}
