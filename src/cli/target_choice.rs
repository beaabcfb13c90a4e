//! The chip that a program is compiled or written for, as `--target` names it.

use crate::gpu::{self, GpuTarget};
use crate::tpu::TpuTarget;

/// A target of either kind, as `--target` names it.
#[derive(Clone)]
pub(super) enum AnyTarget {
    Tpu(TpuTarget),
    Gpu(GpuTarget),
}

impl AnyTarget {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // No chip of one kind has the name of one of the other: a text that names a GPU is the GPU parser's, and
        // everything else the TPU's, whose error then lists the GPUs too.
        if GpuTarget::is_meant(text) {
            return GpuTarget::parse(text).map(Self::Gpu).map_err(|error| error.to_string());
        }
        TpuTarget::parse(text).map(Self::Tpu).map_err(|error| {
            let gpus = gpu::target::CHIPS.map(|chip| chip.name).join(", ");
            format!("{error}; or a GPU, {gpus}")
        })
    }
}
