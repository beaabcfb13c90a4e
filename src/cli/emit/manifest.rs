//! The request and the manifest of `assay emit`, for any device.

use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Args;
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::cli::{CliError, Passed, Printing};
use crate::config;
use crate::problem::{Dtype, Shape};
use crate::programs::{NamedArray, Signature};
use crate::spec::LossSpec;
use crate::temporary::{UNFINISHED, locked_folder, remove_unlocked};
use crate::text::ShownPath;

/// The whole program, within the folder.
const MODULE: &str = "module.mlir";

/// The kernels to emit, and the folder to write them to.
#[derive(Args)]
pub(super) struct EmitRequest {
    /// The implementation: of a TPU tile-one-pass or tile-two-pass, or one of these over rows, vocabulary or both (-rows, -vocab,
    /// -mesh); of a GPU gpu-one-pass, gpu-two-pass, their cuts, or gpu-logp. The one-pass kernel if none is given
    #[arg(long = "impl", value_name = "ID")]
    pub(super) implementation: Option<String>,
    /// Sequences, tokens and vocabulary that each device holds; of -rows, -vocab and -mesh all that the devices hold together
    #[arg(long, value_name = "BxTxV")]
    pub(super) shape: Shape,
    /// Dtype of the logits: f32, bf16 or f16
    #[arg(long, default_value = "bf16")]
    pub(super) dtype: Dtype,
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Folder to make for the files
    #[arg(short, long, value_name = "DIR")]
    pub(super) output: PathBuf,
    #[command(flatten)]
    pub(super) printing: Printing,
}

impl EmitRequest {
    /// Reads the loss from the spec file, or returns the default loss.
    pub(super) fn spec(&self) -> Result<LossSpec, CliError> {
        Ok(config::read_spec(self.spec.as_deref())?.unwrap_or_default())
    }
}

/// The manifest of emitted kernels and how to call them, described in `docs/jax.md` and `docs/gpu.md`.
#[derive(Serialize)]
pub(super) struct EmitManifest<'e, T, K> {
    assay: &'static str,
    /// The facts that only this kind of target has.
    #[serde(flatten)]
    facts: T,
    #[serde(rename = "impl")]
    implementation: &'e str,
    target: String,
    devices: usize,
    /// The shape `[B,T,V]` of the logits on each device.
    shape: [usize; 3],
    dtype: Dtype,
    spec: &'e LossSpec,
    #[serde(serialize_with = "by_name")]
    numbers: &'e [(&'static str, f32)],
    /// The kernels in the order of their calls.
    pub(super) kernels: Vec<K>,
    module: EmittedModule<'e>,
}

/// A target by name, its devices, and what is said of it.
pub(super) struct EmitTarget<T> {
    pub(super) target: String,
    pub(super) devices: usize,
    pub(super) facts: T,
}

impl<'e, T: Serialize, K: Serialize> EmitManifest<'e, T, K> {
    /// `shape` is what each device holds.
    pub(super) fn new(
        EmitTarget { target, devices, facts }: EmitTarget<T>,
        (implementation, shape, dtype): (&'e str, [usize; 3], Dtype),
        spec: &'e LossSpec,
        signature: &'e Signature,
        kernels: Vec<K>,
    ) -> Self {
        let Signature { numbers, inputs, outputs } = signature;
        // Dlogits are written over the logits in every emitted program: operand 0 and result 0 are one array.
        let module = EmittedModule { file: MODULE, inputs, outputs, aliases: [Alias { operand: 0, result: 0 }] };
        let assay = env!("CARGO_PKG_VERSION");
        Self { assay, facts, implementation, target, devices, shape, dtype, spec, numbers, kernels, module }
    }

    /// Writes it, the whole program and what belongs to each kernel, and prints a line of each.
    pub(super) fn write(
        &self,
        EmitRequest { output, printing, .. }: &EmitRequest,
        module: &str,
        files: &[(&String, &String)],
        line: impl Fn(&K) -> String,
    ) -> Result<Passed, CliError> {
        make_folder(output, |folder| {
            files.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))?;
            fs::write(folder.join(MODULE), module)?;
            fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(self)? + "\n")
        })?;
        let Self { implementation, target, devices, shape: [b, t, v], dtype, kernels, .. } = self;
        let of_all = format!("{implementation} {b}x{t}x{v} {dtype} on each of {devices} devices, {target}");
        let lines: String = kernels.iter().map(line).collect();
        printing.finish(&format!("{}: {of_all}\n{lines}", ShownPath(&output)), self)?;
        Ok(Passed::Yes)
    }
}

/// Places of an operand and of a result that share one array.
#[derive(Serialize)]
pub(super) struct Alias {
    pub(super) operand: usize,
    pub(super) result: usize,
}

#[derive(Serialize)]
struct EmittedModule<'e> {
    file: &'static str,
    inputs: &'e [NamedArray],
    outputs: &'e [NamedArray],
    aliases: [Alias; 1],
}

/// Serializes numbers as an object; infinity, which JSON lacks, as `"inf"`.
fn by_name<S: Serializer>(numbers: &&[(&'static str, f32)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(numbers.len()))?;
    for (name, value) in *numbers {
        if value.is_finite() {
            map.serialize_entry(name, value)?;
        } else {
            map.serialize_entry(name, &value.to_string())?;
        }
    }
    map.end()
}

/// Makes `folder` whole or not at all: it is filled under another name and renamed.
fn make_folder(folder: &Path, fill: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), CliError> {
    let failed = |reason| CliError::Io { path: folder.into(), action: "write", reason };
    // A folder that exists is not touched: files of an earlier run next to these would look as if they belonged to them.
    if folder.symlink_metadata().is_ok() {
        return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "it exists, expected a folder to be made")));
    }
    // Temporary folders are private by default; this one should obey the umask like any other.
    #[cfg(unix)]
    let permissions = Some(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    #[cfg(not(unix))]
    let permissions = None;
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Those of processes that were killed meanwhile.
    remove_unlocked(parent, UNFINISHED);
    let (temporary, _lock) = locked_folder(parent, UNFINISHED, permissions).map_err(failed)?;
    fill(temporary.path()).map_err(failed)?;
    fs::rename(temporary.path(), folder).map_err(failed)?;
    let _ = temporary.keep();
    Ok(())
}
