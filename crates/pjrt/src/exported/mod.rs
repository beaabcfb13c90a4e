//! A user's own program: StableHLO text or bytecode, as `jax.export` writes it, with a manifest that says what goes in
//! and what comes out.
//!
//! ```toml
//! program = "grpo_f32.mlir"        # next to the manifest
//! shape = [2, 5, 1031]             # [B, T, V] that it was exported for
//! devices = 1                      # the default
//!
//! [spec]                           # the loss it computes; a missing field has its default
//! reduction = "token_mean"
//!
//! [[input]]                        # in the program's order
//! name = "logits"
//! dtype = "f32"
//! # …
//!
//! [[output]]
//! name = "loss"
//! dtype = "f32"
//! # …
//! ```
//!
//! | input | shape | dtype |
//! |---|---|---|
//! | `logits` | `[B,T,V]` | that of the problem: f64, f32, bf16, f16 |
//! | `ids` | `[B,T]` | i32, i64 |
//! | `mask`, optional | `[B,T]`, 0 or 1 | any |
//! | `advantages` | `[B]` or `[B,T]`, as the spec says | f64, f32, bf16, f16 |
//! | `old_logp`, with `old_logp: given` or where it is compared | `[B,T]` | the same |
//! | `ref_logp`, with a `kl` term | `[B,T]` | the same |
//! | `rollout_logp`, where the spec reads it | `[B,T]`, NaN where the sampler gave none | the same |
//! | `rollout_weights`, with `rollout.source: given` | `[B,T]`, one a sequence repeated | the same |
//! | `token_weights`, with `token_weights` | `[B,T]`, one a sequence repeated | the same |
//! | `selected`, with TOPR by `selected`, or KL-Cov or Clip-Cov without a `selection` | `[B,T]`, 0 or 1 | any |
//! | `bias`, with `logits.bias` | `[V]` | f64, f32, bf16, f16 |
//! | `temperature`, with `temperature: given` | `[B,T]`, one a sequence repeated | the same |
//! | `cu_seqlens` or `segment_ids` or both, with `sequences = S` | `[S+1]`; `[1,N]`, 0 after the last | i32, i64 |
//!
//! | output | shape | dtype |
//! |---|---|---|
//! | `loss` | `[]` | f64, f32, bf16, f16 |
//! | `dlogits` | `[B,T,V]` | the same |
//! | `logp`, `entropy`, `token_loss`, each optional | `[B,T]` | the same |
//!
//! A program for several devices is one that XLA partitions, as `jax.export` writes it, or with `devices_are = "replicas"` the program
//! that each device runs. Inputs and outputs are whole on every device, or have `cut = "B"`, `"T"` or `"V"`: along that axis device `d`
//! of `n` has part `d` of `n` equal ones. Whole outputs must be the same on all devices.
//!
//! Packed sequences are as many as `sequences` says; advantages of sequences are then `[S]`.
//!
//! Values are passed unchanged, even those under the mask; floats are rounded to the input's
//! dtype, to nearest even. An id beyond i32, which only a masked token can have, becomes the nearest i32.
//!
//! A program is compiled into this process and has its rights: run only programs that you trust.

mod manifest;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use ndarray::{Array2, Dimension, ShapeBuilder};
use serde_json::Value;

use crate::runtime::{Client, DeviceBuffer, Executable, PjrtProgram, RuntimeError, locate};
use crate::xla::shards::{ArrayBlock, gather};
use assay_core::device_dtype::{ArrayBytes, DeviceDtype};
use assay_core::implementation::{
    BackendError, FILE_PREFIX, Implementation, ProblemFormat, RunError, Unavailable, Unsupported,
};
use assay_core::problem::{Advantages, Candidate, Dtype, Float, FloatArray, Problem, Sequences, Shape};
use assay_core::spec::LossSpec;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};
use manifest::{
    DevicesAre, ExportAxis, ExportInput, ExportInputName, ExportManifest, ExportOutput, ExportOutputName, read_program,
};

/// A user's own program. See [the module](self).
pub struct ExportedProgram {
    /// `file:` and the manifest's path as given, so that the line of a report can be run again unchanged.
    id: String,
    path: PathBuf,
    manifest: ExportManifest,
    program: PathBuf,
    code: Vec<u8>,
    /// The plugin; `None` means the one that [`locate`] finds.
    plugin: Option<PathBuf>,
    /// The executable, which is compiled when it first runs.
    executable: Mutex<Option<Arc<Executable>>>,
}

/// A manifest or program that cannot be used. The message is one line and starts with the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportedError {
    /// A field of the manifest, or the program, has an invalid value.
    #[error("{path}: {field}: got {given}, expected {expected}")]
    Invalid {
        /// The manifest or the program.
        path: ShownPath,
        /// The path of the field, such as `spec.dentropy`.
        field: ForeignText,
        /// The value that the field has.
        given: ForeignText,
        /// A description of valid values.
        expected: ForeignLines,
    },
    /// The file cannot be read, or the program does not compile or run.
    #[error("{at}: {reason}")]
    Program {
        /// The file, and the place in it.
        at: ForeignText,
        /// The message of the system, the parser or the plugin.
        reason: ForeignText,
    },
}

impl From<ExportedError> for RunError {
    fn from(error: ExportedError) -> Self {
        BackendError::new(error).into()
    }
}

impl ExportedError {
    fn invalid(path: &Path, field: &str, given: impl Into<ForeignText>, expected: impl Into<ForeignLines>) -> Self {
        Self::Invalid { path: path.into(), field: field.into(), given: given.into(), expected: expected.into() }
    }

    fn program(at: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Program { at: at.to_string().into(), reason: reason.to_string().into() }
    }
}

impl ExportedProgram {
    /// Reads the manifest at `path` and the program that it names, to be run by `plugin`, or the one that [`locate`]
    /// finds.
    ///
    /// # Errors
    /// [`ExportedError`] where a file is missing or too long, the manifest is no TOML or has an unknown or missing
    /// field, an input or output is listed twice, has a dtype it cannot have, or is missing although the spec needs
    /// it, or the program is no MLIR. Whether it compiles shows when it runs.
    pub fn read(path: impl AsRef<Path>, plugin: Option<&Path>) -> Result<Self, ExportedError> {
        let path = path.as_ref().to_path_buf();
        let manifest = ExportManifest::read(&path)?;
        let program = manifest.program(&path);
        Ok(Self {
            id: format!("{FILE_PREFIX}{}", ShownPath(&path)),
            code: read_program(&program)?,
            path,
            manifest,
            program,
            plugin: plugin.map(Path::to_path_buf),
            executable: Mutex::new(None),
        })
    }

    fn client(&self) -> Result<Client, RuntimeError> {
        Client::shared(&locate(self.plugin.as_deref())?)
    }

    fn executable(&self, client: &Client) -> Result<Arc<Executable>, ExportedError> {
        let mut executable = self.executable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(executable) = &*executable {
            return Ok(Arc::clone(executable));
        }
        let ExportManifest { devices, devices_are, .. } = self.manifest;
        let (replicas, partitions) = if devices_are == DevicesAre::Replicas { (devices, 1) } else { (1, devices) };
        let compiled = client
            .compile(&PjrtProgram { code: &self.code, replicas, partitions })
            .map_err(|error| ExportedError::program(ShownPath(&self.program), error))?;
        Ok(Arc::clone(executable.insert(Arc::new(compiled))))
    }

    fn unsupported(&self, field: &'static str, given: impl ToString, supported: impl ToString) -> Unsupported {
        let supported = format!("{}, as its manifest says", supported.to_string());
        Unsupported { implementation: self.id.clone(), field, given: given.to_string(), supported }
    }

    /// Collects the outputs, each checked against the shape of its name and the manifest's dtype.
    fn candidate(&self, buffers: &[Vec<DeviceBuffer>]) -> Result<Candidate, ExportedError> {
        const CHECKED: &str = "checked: every manifest has loss and dlogits";
        // Outputs are found by their position in the manifest, so the numbers must agree.
        let (returned, listed) = (buffers[0].len(), self.manifest.outputs.len());
        if returned != listed {
            let expected = format!("{returned}, as many as the program returns");
            return Err(ExportedError::invalid(&self.path, "output", format!("{listed} listed"), expected));
        }
        let Shape { batch, tokens, vocab } = self.manifest.shape();
        Ok(Candidate {
            loss: Some(self.download(buffers, ExportOutputName::Loss, ())?.expect(CHECKED)),
            gradient: self.download(buffers, ExportOutputName::Dlogits, (batch, tokens, vocab))?.expect(CHECKED),
            logp: self.download(buffers, ExportOutputName::Logp, (batch, tokens))?,
            logp_of_others: None,
            entropy: self.download(buffers, ExportOutputName::Entropy, (batch, tokens))?,
            token_loss: self.download(buffers, ExportOutputName::TokenLoss, (batch, tokens))?,
            metrics: None,
        })
    }

    fn download<D: Dimension>(
        &self,
        buffers: &[Vec<DeviceBuffer>],
        name: ExportOutputName,
        shape: impl ShapeBuilder<Dim = D>,
    ) -> Result<Option<FloatArray<D>>, ExportedError> {
        let Some(at) = self.manifest.outputs.iter().position(|output| output.name == name) else { return Ok(None) };
        let ExportOutput { dtype, cut, .. } = self.manifest.outputs[at];
        let mut array = FloatArray::zeros(shape, dtype);
        let (devices, extents) = (self.manifest.devices, array.shape().to_vec());
        let block = |device: usize| part(&extents, name.axes(), cut, [device, devices]);
        gather(devices, name.name(), block, |device| Ok(&buffers[device][at]), &mut array).map_err(|error| {
            ExportedError::program(format!("{}: output `{}`", ShownPath(&self.path), name.name()), error)
        })?;
        Ok(Some(array))
    }
}

/// Returns the block of an array that one of several devices has.
fn part(extents: &[usize], axes: &[ExportAxis], cut: Option<ExportAxis>, [device, devices]: [usize; 2]) -> ArrayBlock {
    let whole = ArrayBlock::all(extents);
    let Some(axis) = cut.map(|cut| cut.position(axes)).filter(|_| devices > 1) else { return whole };
    // The manifest was checked: the axis divides evenly.
    let length = extents[axis] / devices;
    whole.cut(axis, device * length..(device + 1) * length, length)
}

/// Uploads a device's part of one input of a checked problem.
fn upload(
    client: &Client,
    place: [usize; 2],
    axes: &[ExportAxis],
    input: ExportInput,
    problem: &Problem,
) -> Result<DeviceBuffer, RuntimeError> {
    const CHECKED: &str = "checked: the spec needs it, so the problem has it";
    let ExportInput { name, dtype, cut } = input;
    let per_token = problem.ids.shape();
    // An array with a cut is sent in parts, every other one whole to each device.
    let send = |shape: &[usize], bytes: &[u8]| {
        let ([device, devices], block) = (place, part(shape, axes, cut, place));
        if devices == 1 || cut.is_none() {
            return client.upload(device, dtype, shape, bytes);
        }
        client.upload(device, dtype, block.extents(), &block.part_of(bytes, dtype, 0))
    };
    let send_floats = |values: &Array2<f64>| send(per_token, &numbers(values.iter().copied(), dtype));
    // Values of sequences are repeated for each of their tokens.
    let send_spread = |values: &Option<Array2<f64>>| {
        let values = values.as_ref().expect(CHECKED);
        if values.dim() == problem.ids.dim() {
            return send_floats(values);
        }
        send_floats(&problem.extra.sequences.spread(problem.ids.dim(), &values.column(0).to_vec()))
    };
    match name {
        ExportInputName::Logits => send(problem.logits.shape(), problem.logits.bytes()),
        ExportInputName::Ids => send(per_token, &ids(problem.ids.iter().copied(), dtype)),
        ExportInputName::Mask => send(per_token, &numbers(problem.mask.iter().map(|&counts| f64::from(counts)), dtype)),
        ExportInputName::Advantages => {
            let bytes = match &problem.advantages {
                Advantages::Sequence(advantages) => numbers(advantages.iter().copied(), dtype),
                Advantages::Token(advantages) => numbers(advantages.iter().copied(), dtype),
                // Programs take advantages: a cotangent of logp is one with the sign changed.
                Advantages::Dlogp(dlogp) => numbers(dlogp.iter().map(|dlogp| -dlogp), dtype),
            };
            send(problem.advantages.shape(), &bytes)
        }
        ExportInputName::OldLogp => send_floats(problem.old_logp.as_ref().expect(CHECKED)),
        ExportInputName::RefLogp => send_floats(problem.ref_logp.as_ref().expect(CHECKED)),
        ExportInputName::RolloutLogp => send_floats(problem.extra.rollout_logp.as_ref().expect(CHECKED)),
        ExportInputName::RolloutWeights => send_spread(&problem.extra.rollout_weights),
        ExportInputName::TokenWeights => send_spread(&problem.extra.token_weights),
        ExportInputName::Temperature => send_spread(&problem.extra.temperature),
        ExportInputName::Selected => {
            let selected = problem.extra.selected.as_ref().expect(CHECKED).iter();
            send(per_token, &numbers(selected.map(|&selected| f64::from(selected)), dtype))
        }
        ExportInputName::CuSeqlens => {
            let Sequences::Packed(cu_seqlens) = &problem.extra.sequences else { unreachable!("checked: packed") };
            let ends = cu_seqlens.values();
            send(ends.shape(), &ids(ends.iter().map(|&end| end as i64), dtype))
        }
        ExportInputName::SegmentIds => {
            // Segment ids count from 1, and 0 is of a token in no sequence.
            let number = |at| problem.extra.sequences.owner(at).map_or(0, |sequence| sequence as i64 + 1);
            send(per_token, &ids(problem.ids.indexed_iter().map(|(at, _)| number(at)), dtype))
        }
        ExportInputName::Bias => {
            let bias = problem.extra.bias.as_ref().expect(CHECKED);
            send(bias.shape(), &numbers(bias.iter().copied(), dtype))
        }
    }
}

fn to_bytes<T: Pod>(values: impl Iterator<Item = T>) -> Vec<u8> {
    values.flat_map(|x| bytemuck::bytes_of(&x).to_vec()).collect()
}

/// Converts `ids` to bytes, as i64 or clamped to i32.
fn ids(ids: impl Iterator<Item = i64>, element: DeviceDtype) -> Vec<u8> {
    match element {
        DeviceDtype::I64 => to_bytes(ids),
        _ => to_bytes(ids.map(|id| id.clamp(i32::MIN.into(), i32::MAX.into()) as i32)),
    }
}

/// Converts `values` to bytes: floats rounded to nearest even, or 0 and 1 of an integer type, which only masks have.
fn numbers(values: impl Iterator<Item = f64>, element: DeviceDtype) -> Vec<u8> {
    match element {
        DeviceDtype::F64 => to_bytes(values),
        DeviceDtype::F32 => to_bytes(values.map(<f32 as Float>::from_f64)),
        DeviceDtype::Bf16 => to_bytes(values.map(<half::bf16 as Float>::from_f64)),
        DeviceDtype::F16 => to_bytes(values.map(<half::f16 as Float>::from_f64)),
        DeviceDtype::I64 => to_bytes(values.map(|x| x as i64)),
        DeviceDtype::I32 => to_bytes(values.map(|x| x as i32)),
        DeviceDtype::I16 => to_bytes(values.map(|x| x as i16)),
        DeviceDtype::U8 | DeviceDtype::Pred => to_bytes(values.map(|x| u8::from(x != 0.0))),
    }
}

/// Returns the first field that differs: its path, and the two values.
fn difference(path: &str, given: &Value, supported: &Value) -> Option<(String, String, String)> {
    match (given, supported) {
        (Value::Object(fields), Value::Object(others)) if fields.keys().eq(others.keys()) => {
            fields.iter().find_map(|(key, value)| {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                difference(&path, value, &others[key])
            })
        }
        _ if given == supported => None,
        _ => Some((path.into(), given.to_string(), supported.to_string())),
    }
}

impl Implementation for ExportedProgram {
    fn id(&self) -> &str {
        &self.id
    }

    fn summary(&self) -> &'static str {
        "a user's program through PJRT"
    }

    fn class(&self) -> &'static str {
        "external"
    }

    fn available(&self) -> Result<(), Unavailable> {
        let expect = |client: Client| client.expect_devices(self.manifest.devices);
        self.client().and_then(expect).map_err(|error| Unavailable { reason: error.to_string() })
    }

    fn device_counts(&self) -> Vec<usize> {
        let devices = self.manifest.devices;
        if self.client().is_ok_and(|client| devices <= client.device_count()) { vec![devices] } else { Vec::new() }
    }

    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        if shape != self.manifest.shape() {
            return Err(self.unsupported("shape", shape, self.manifest.shape()));
        }
        if DeviceDtype::from(dtype) != self.manifest.logits_dtype() {
            return Err(self.unsupported("logits dtype", dtype, self.manifest.logits_dtype()));
        }
        if devices != self.manifest.devices {
            return Err(self.unsupported("device count", devices, self.manifest.devices));
        }
        let fields = |spec: &LossSpec| serde_json::to_value(spec).expect("plain data");
        if let Some((path, given, supported)) = difference("", &fields(spec), &fields(&self.manifest.spec)) {
            return Err(self.unsupported("spec field", format!("`{path}` = {given}"), supported));
        }
        Ok(())
    }

    fn takes_packed(&self) -> bool {
        self.manifest.sequences.is_some()
    }

    fn supports_given(&self, spec: &LossSpec, given: ProblemFormat, devices: usize) -> Result<(), Unsupported> {
        self.supports(spec, given.shape, given.dtype, devices)?;
        let words =
            |packed: Option<usize>| packed.map_or("one a row".into(), |count| format!("{count} packed into one row"));
        if given.packed != self.manifest.sequences {
            return Err(self.unsupported("sequences", words(given.packed), words(self.manifest.sequences)));
        }
        Ok(())
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        self.supports_given(spec, ProblemFormat::from_problem(spec, &problem)?, devices)?;
        let client = self.client()?;
        let executable = self.executable(&client)?;
        let on_one = |device: usize| -> Result<Vec<DeviceBuffer>, RuntimeError> {
            let inputs = self.manifest.inputs.iter();
            inputs
                .map(|&input| upload(&client, [device, devices], self.manifest.axes(input.name), input, &problem))
                .collect()
        };
        let inputs = (0..devices).map(on_one).collect::<Result<Vec<_>, _>>()?;
        let arguments: Vec<Vec<&DeviceBuffer>> = inputs.iter().map(|inputs| inputs.iter().collect()).collect();
        let outputs =
            executable.execute(&arguments).map_err(|error| ExportedError::program(ShownPath(&self.path), error))?;
        Ok(self.candidate(&outputs)?)
    }
}
