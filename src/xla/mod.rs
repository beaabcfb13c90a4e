//! GRPO losses as programs for PJRT devices: one frame around each of several cores, on one device or cut over several.
//!
//! | id | what computes a device's tokens |
//! |---|---|
//! | `xla` | plain XLA operations, the baseline |
//! | `tile-one-pass` | a TPU kernel that reads logits once |
//! | `tile-two-pass` | two that stream over the columns |
//! | `tile-entropy` | the first of those two alone: logp and entropy, no gradient |
//!
//! | ending | what a device holds of `[B,T,V]` |
//! |---|---|
//! | none | all of it |
//! | `-rows` | some sequences; where the devices outnumber them, some tokens of some sequences |
//! | `-vocab` | some columns of every row, as a tensor-parallel head leaves them |
//! | `-mesh` | some columns of some rows |
//!
//! A tile kernel is part of the program in one of two ways: as StableHLO loops, which any device runs, or as a kernel that
//! libtpu compiles, in the programs that [`Xla::program_for`] writes for TPUs.
//!
//! An extent that the devices do not divide is padded: with tokens that the mask leaves out, and with columns that hold
//! NaN and that the program sets to −∞ before it looks at them. [`crate::stablehlo`] writes the program.
//!
//! Arithmetic: logits widened to f32, every sum and everything per token in f32, in the order that XLA chooses; dlogits
//! rounded once. dlogits lie over the logits on every device.

mod baseline;
mod devices;
pub mod lm_head;
mod program;
mod shards;
mod tiled;

use std::path::Path;

use ndarray::{Array2, Ix0, Ix2, Ix3, arr0};

use crate::element::Element;
use crate::implementation::{
    self, Answer, BackendError, Implementation, Prepared, RunError, Step, Unavailable, Unsupported,
};
use crate::kernels::family::Reach;
use crate::kernels::one_pass::{MOST_TOKENS, one_pass, rows_of_a_block};
use crate::kernels::rollout::Settled;
pub use crate::kernels::rows::Core;
use crate::kernels::structure::Structure;
use crate::memory::{CompiledMemory, DeviceMemory};
use crate::problem::{Candidate, Dtype, FloatArray, Metrics, Outcome, Problem, Shape};
use crate::runtime::{Buffer, Mesh, RuntimeError};
use crate::spec::LossSpec;
use crate::stablehlo::Value;
use crate::tile;
use devices::{Devices, Plan, Sharding, compiled};
pub use lm_head::{CHUNK_BYTES, HeadArrays, XlaHead};

pub use program::Named;
use program::{Evaluated, Given, Output, Program, Scalars, local_shape};
use shards::{Padding, Shards};
pub use tiled::TpuKernel;
use tiled::{Calls, Lowering};

/// A core with 128 MiB of VMEM, as a v6e has: what the kernels are written for where no TPU runs them.
pub const ANY_DEVICE: Core = Core { vmem_bytes: 120 << 20, bf16_arithmetic: true };

/// The version of Mosaic's dialects that kernels are written in.
pub const MOSAIC_VERSION: usize = tile::mosaic::VERSION;

/// What a program is given and returns, in order, on each device.
pub struct Signature {
    /// Its parameters.
    pub inputs: Vec<Named>,
    /// Its outputs, the first written over the first parameter.
    pub outputs: Vec<Named>,
    /// What it is given of the spec's numbers, by name.
    pub numbers: Vec<(&'static str, f32)>,
}

/// What computes the loss of a device's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// Plain XLA operations.
    Baseline,
    OnePass,
    TwoPass,
    /// The first of the two passes: logp and entropy, no loss and no gradient.
    Entropy,
}

/// A program under one sharding. See [the module](self).
pub struct Xla {
    kernel: Kernel,
    on: Devices,
}

impl Xla {
    /// One for each sharding, on the devices of `plugin`, or of the one that [`locate`](crate::runtime::locate) finds.
    pub fn all(plugin: Option<&Path>) -> Vec<Xla> {
        let kernels: [(Kernel, &[Sharding]); 4] = [
            (Kernel::Baseline, &Sharding::ALL),
            // The sums of a row stay in the kernel.
            (Kernel::OnePass, &[Sharding::Whole, Sharding::Rows]),
            (Kernel::TwoPass, &Sharding::ALL),
            (Kernel::Entropy, &[Sharding::Whole]),
        ];
        let shardings = kernels.into_iter().flat_map(|(kernel, shardings)| shardings.iter().map(move |&s| (kernel, s)));
        shardings.map(|(kernel, sharding)| Xla { kernel, on: Devices::new(sharding, plugin) }).collect()
    }

    /// Whether it computes a loss and its gradient, and so is an implementation to judge; else logp and entropy alone,
    /// see [`logp_and_entropy`](Self::logp_and_entropy).
    pub fn has_gradient(&self) -> bool {
        self.kernel != Kernel::Entropy
    }

    /// `[B,T]` logp and entropy in nats, f32, in one read of the logits; 0 where the mask hides a token. Error as
    /// tile-two-pass: class `tile` of `tolerances.toml`.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    pub fn logp_and_entropy(&self, spec: &LossSpec, problem: &Problem) -> Result<[Array2<f32>; 2], RunError> {
        let shape = problem.check(spec)?;
        let dtype = problem.logits.dtype();
        self.supports(spec, shape, dtype, 1)?;
        let client = self.on.client()?;
        let forward = Xla { kernel: Kernel::Entropy, on: self.on.whole() };
        let text = forward.program(Structure::of(spec), shape, dtype, Mesh::ONE, Lowering::Loops, ANY_DEVICE)?;
        let executable = compiled(&client, text, 1)?;
        let shards = Shards { shape, mesh: Mesh::ONE, client };
        shards.expect_room(&executable)?;
        let ids = problem.ids.mapv(|id| i32::try_from(id).unwrap_or(0));
        let inverse_temperature = spec.temperature.recip() as f32;
        let inputs = [
            shards.upload_block(0, &problem.logits, &shards.logits(0), Padding::Nan)?,
            shards.upload_per_token(0, Element::I32, &ids, 0)?,
            shards.upload_per_token(0, Element::Pred, &problem.mask.mapv(u8::from), 0)?,
            shards.client.upload(0, Element::F32, &[], bytemuck::bytes_of(&inverse_temperature))?,
        ];
        let outputs = executable.execute(&[inputs.iter().collect()])?;
        let fetched = |place: usize| shards.download_per_token(|device| output(&outputs, device, place));
        Ok([fetched(0)?, fetched(1)?])
    }

    /// Compiles the program for logits of `shape` and `dtype`, and checks that a run of it fits.
    fn plan(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<Plan, RunError> {
        if !self.has_gradient() {
            return Err(self.unsupported("a run of", "loss and dlogits", "logp and entropy alone").into());
        }
        self.supports(spec, shape, dtype, devices)?;
        let mesh = self.mesh(shape, devices)?;
        let text = self.program(Structure::of(spec), shape, dtype, mesh, Lowering::Loops, ANY_DEVICE)?;
        Ok(Plan::of(text, Shards { shape, mesh, client: self.on.client()? })?)
    }

    /// The program of one device of `mesh`.
    fn program(
        &self,
        structure: Structure,
        shape: Shape,
        dtype: Dtype,
        mesh: Mesh,
        lowering: Lowering,
        core: Core,
    ) -> Result<String, Unsupported> {
        let row_major = lowering == Lowering::Mosaic && self.kernel != Kernel::Baseline;
        let calls = Calls { dtype, lowering, core };
        let write = |inside: &dyn Fn(&mut Program, &Given, Value) -> Evaluated| {
            program::program(structure, shape, dtype, mesh, row_major, |on, given, logits| inside(on, given, logits))
        };
        Ok(match self.kernel {
            Kernel::Baseline => write(&|on, given, logits| baseline::core(on, structure, given, logits, dtype)),
            Kernel::OnePass => {
                let kernel = self.one_pass(structure, local_shape(shape, mesh), dtype, core)?;
                write(&|on, given, logits| tiled::one_pass_core(on, &kernel, structure, given, logits, calls))
            }
            Kernel::TwoPass => write(&|on, given, logits| tiled::two_pass_core(on, structure, given, logits, calls)),
            Kernel::Entropy => program::forward(shape, dtype, mesh, row_major, |on, given| {
                let rows = tiled::rows(on, structure, given, calls);
                [rows.logp, rows.entropy]
            }),
        })
    }

    /// Whether one device holds all of the logits.
    pub fn sharding_is_whole(&self) -> bool {
        self.on.sharding == Sharding::Whole
    }

    /// The program that a device runs where each of `devices` holds `local` logits of their own and all of them together
    /// one batch: data-parallel, whatever the sharding of this implementation. A text for compilers: nothing is run. Tile
    /// kernels are called as kernels for a TPU of `core`.
    ///
    /// # Errors
    /// [`Unsupported`], for f64 logits, for a vocabulary beyond i32, and for shardings other than whole rows.
    pub fn program_for(
        &self,
        spec: &LossSpec,
        local: Shape,
        dtype: Dtype,
        devices: usize,
        core: Core,
    ) -> Result<String, Unsupported> {
        if !self.sharding_is_whole() {
            let supported = "those whose devices hold whole rows: xla, tile-one-pass, tile-two-pass, tile-entropy";
            return Err(self.unsupported("compiling ahead of time", self.id(), supported));
        }
        // The limit of the core asked for comes before that of any other.
        self.expect_fits(local_shape(local, Mesh::ONE), dtype, core)?;
        self.supports(spec, local, dtype, 1)?;
        let batch = local.batch.checked_mul(devices).filter(|&batch| i32::try_from(batch).is_ok());
        let Some(batch) = batch else {
            let supported = format!("up to {} on {devices} devices", i32::MAX as usize / devices.max(1));
            return Err(self.unsupported("sequences a device", local.batch, supported));
        };
        let mesh = Mesh { batch: devices, tokens: 1, vocab: 1 };
        self.program(Structure::of(spec), Shape { batch, ..local }, dtype, mesh, Lowering::Mosaic, core)
    }

    /// The tile kernels of that program, in the order that it calls them; none of the baseline.
    ///
    /// # Errors
    /// As [`program_for`](Self::program_for).
    pub fn kernels_for(
        &self,
        spec: &LossSpec,
        local: Shape,
        dtype: Dtype,
        core: Core,
    ) -> Result<Vec<TpuKernel>, Unsupported> {
        self.supports(spec, local, dtype, 1)?;
        let (structure, shape) = (Structure::of(spec), local_shape(local, Mesh::ONE));
        Ok(match self.kernel {
            Kernel::Baseline => vec![],
            Kernel::OnePass => {
                vec![tiled::describe_one_pass(&self.one_pass(structure, shape, dtype, core)?, structure, core)]
            }
            Kernel::TwoPass => vec![
                tiled::describe_statistics(structure, shape, dtype.into(), core),
                tiled::describe_dlogits(structure, shape, dtype.into(), core),
            ],
            Kernel::Entropy => vec![tiled::describe_statistics(structure, shape, dtype.into(), core)],
        })
    }

    /// What that program is given and returns.
    ///
    /// # Errors
    /// As [`program_for`](Self::program_for).
    pub fn signature_for(
        &self,
        spec: &LossSpec,
        local: Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<Signature, Unsupported> {
        self.supports(spec, local, dtype, 1)?;
        let shape = local_shape(local, Mesh::ONE);
        let [inputs, outputs] = match self.kernel {
            Kernel::Entropy => program::forward_signature(shape, dtype),
            _ => program::signature(Structure::of(spec), shape, dtype),
        };
        let values = program::numbers(spec, [local.batch.saturating_mul(devices), local.tokens]);
        let numbers = values.into_iter().map(|(number, value)| (number.name(), value)).collect();
        Ok(Signature { inputs, outputs, numbers })
    }

    /// Checks that a row of the vocabulary fits the VMEM of `core` and the ids of all tokens its SMEM, where they must.
    fn expect_fits(&self, local: [usize; 3], dtype: Dtype, core: Core) -> Result<(), Unsupported> {
        if self.kernel != Kernel::OnePass {
            return Ok(());
        }
        let tokens = local[0].saturating_mul(local[1]);
        if tokens > MOST_TOKENS {
            let supported = format!("up to {MOST_TOKENS}, whose ids fit SMEM; tile-two-pass takes any number");
            return Err(self.unsupported("tokens a device", tokens, supported));
        }
        rows_of_a_block(local, dtype.into(), core).map(|_| ()).map_err(|largest| {
            let mebibytes = core.vmem_bytes >> 20;
            let supported = format!("up to {largest} of {dtype} in {mebibytes} MiB of VMEM; tile-two-pass takes any");
            self.unsupported("vocabulary", local[2], supported)
        })
    }

    /// The one-pass kernel for `local` logits.
    fn one_pass(
        &self,
        structure: Structure,
        local: [usize; 3],
        dtype: Dtype,
        core: Core,
    ) -> Result<tile::Kernel, Unsupported> {
        self.expect_fits(local, dtype, core)?;
        Ok(one_pass(structure, local, dtype.into(), core).expect("checked: it fits"))
    }

    /// How much of a batch it sees where it computes a token's loss.
    fn reach(&self) -> Reach {
        match self.kernel {
            Kernel::Baseline | Kernel::TwoPass => Reach::Row,
            Kernel::OnePass => Reach::Token,
            Kernel::Entropy => Reach::Softmax,
        }
    }

    /// The mesh that `devices` make for a batch of `shape`.
    fn mesh(&self, shape: Shape, devices: usize) -> Result<Mesh, Unsupported> {
        self.on.sharding.mesh(shape, devices).map_err(|counts| self.unsupported("device count", devices, counts))
    }

    fn unsupported(&self, field: &'static str, given: impl ToString, supported: impl Into<String>) -> Unsupported {
        Unsupported { implementation: self.id().into(), field, given: given.to_string(), supported: supported.into() }
    }
}

impl Implementation for Xla {
    fn id(&self) -> &'static str {
        match (self.kernel, self.on.sharding) {
            (Kernel::Baseline, Sharding::Whole) => "xla",
            (Kernel::Baseline, Sharding::Rows) => "xla-rows",
            (Kernel::Baseline, Sharding::Vocab) => "xla-vocab",
            (Kernel::Baseline, Sharding::RowsAndVocab) => "xla-mesh",
            (Kernel::OnePass, Sharding::Whole) => "tile-one-pass",
            (Kernel::OnePass, _) => "tile-one-pass-rows",
            (Kernel::TwoPass, Sharding::Whole) => "tile-two-pass",
            (Kernel::TwoPass, Sharding::Rows) => "tile-two-pass-rows",
            (Kernel::TwoPass, Sharding::Vocab) => "tile-two-pass-vocab",
            (Kernel::TwoPass, Sharding::RowsAndVocab) => "tile-two-pass-mesh",
            (Kernel::Entropy, _) => "tile-entropy",
        }
    }

    fn summary(&self) -> &'static str {
        match (self.kernel, self.on.sharding) {
            (Kernel::Baseline, Sharding::Whole) => {
                "XLA through PJRT, log-softmax as plain operations, f32 statistics, dlogits in place"
            }
            (Kernel::OnePass, Sharding::Whole) => "TPU kernel, rows resident in VMEM, as loops on any PJRT device",
            (Kernel::TwoPass, Sharding::Whole) => "TPU kernels, columns streamed twice, as loops on any PJRT device",
            (Kernel::Entropy, Sharding::Whole) => "TPU kernel, logp and entropy alone, as loops on any PJRT device",
            (_, Sharding::Rows) => "the same, rows over devices",
            (_, Sharding::Vocab) => "the same, vocabulary over devices",
            (_, Sharding::RowsAndVocab) => "the same, rows × vocabulary over devices",
        }
    }

    fn class(&self) -> &'static str {
        if self.kernel == Kernel::Baseline { "xla" } else { "tile" }
    }

    fn available(&self) -> Result<(), Unavailable> {
        self.on.available()
    }

    fn device_counts(&self) -> Vec<usize> {
        self.on.counts()
    }

    fn takes(&self, devices: usize) -> bool {
        self.on.takes(devices)
    }

    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        self.reach().expect(spec).map_err(|beyond| self.unsupported(beyond.field, beyond.given, beyond.supported))?;
        if dtype == Dtype::F64 {
            return Err(self.unsupported("logits dtype", dtype, "f32, bf16 and f16"));
        }
        // Columns and ids are i32 on the device.
        if i32::try_from(shape.vocab).is_err() {
            return Err(self.unsupported("vocabulary", shape.vocab, "up to 2147483647"));
        }
        let mesh = self.mesh(shape, devices)?;
        self.expect_fits(local_shape(shape, mesh), dtype, ANY_DEVICE)
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        let plan = self.plan(spec, shape, problem.logits.dtype(), devices)?;
        let inputs = upload_problem(&plan.shards, spec, &problem)?;
        let outputs = plan.execute(&inputs)?;
        Ok(download(&plan.shards, spec, problem.logits, &outputs)?.into())
    }

    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<Box<dyn Prepared + 's>, RunError> {
        let plan = self.plan(spec, shape, dtype, devices)?;
        Ok(Box::new(Ready { plan, spec, logits: implementation::Given { shape, dtype } }))
    }
}

/// A compiled program and the spec whose numbers it is given.
struct Ready<'s> {
    plan: Plan,
    spec: &'s LossSpec,
    logits: implementation::Given,
}

impl Prepared for Ready<'_> {
    fn load<'p>(&'p self, problem: &'p Problem) -> Result<Step<'p>, RunError> {
        let Self { plan, spec, logits } = self;
        logits.expect(spec, problem)?;
        let inputs = upload_problem(&plan.shards, spec, problem)?;
        Ok(Box::new(move || {
            let outputs = plan.execute(&inputs)?;
            let answer: Answer<'p> = Box::new(move || {
                // The inputs live until here, so that nothing is freed while a step is timed.
                drop(inputs);
                let extents = [logits.shape.batch, logits.shape.tokens, logits.shape.vocab];
                Ok(download(&plan.shards, spec, FloatArray::zeros(extents, logits.dtype), &outputs)?.into())
            });
            Ok(answer)
        }))
    }

    fn host_bytes(&self) -> usize {
        self.plan.host_bytes()
    }

    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        self.plan.compiled_memory()
    }

    fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        self.plan.device_memory()
    }
}

impl From<RuntimeError> for RunError {
    fn from(error: RuntimeError) -> Self {
        BackendError::new(error).into()
    }
}

/// Each device's arguments, in the program's order: `arrays`, and what is known of the tokens.
fn upload<L>(
    shards: &Shards,
    spec: &LossSpec,
    problem: &Problem<L>,
    arrays: impl Fn(usize) -> Result<Vec<Buffer>, RuntimeError>,
) -> Result<Vec<Vec<Buffer>>, RuntimeError> {
    let numbers: Vec<f32> =
        program::numbers(spec, [shards.shape.batch, shards.shape.tokens]).into_iter().map(|(_, value)| value).collect();
    let Settled { mask, inputs } = Settled::of(spec, &problem.tokens());
    // What the mask hides may be anything; the program never uses it.
    let ids = problem.ids.mapv(|id| i32::try_from(id).unwrap_or(0));
    let mask = mask.mapv(u8::from);
    let (b, t) = problem.mask.dim();
    let advantages = Array2::from_shape_fn((b, t), |(b, t)| problem.advantages.at(b, t) as f32);
    let inputs: Vec<Array2<f32>> = inputs.into_iter().map(|(_, values)| values.mapv(|x| x as f32)).collect();

    (0..shards.mesh.devices())
        .map(|device| {
            let mut buffers = arrays(device)?;
            buffers.extend([
                shards.upload_per_token(device, Element::I32, &ids, 0)?,
                shards.upload_per_token(device, Element::Pred, &mask, 0)?,
                shards.upload_per_token(device, Element::F32, &advantages, f32::NAN)?,
            ]);
            for values in &inputs {
                buffers.push(shards.upload_per_token(device, Element::F32, values, f32::NAN)?);
            }
            let bytes = bytemuck::cast_slice(&numbers);
            buffers.push(shards.client.upload(device, Element::F32, &[numbers.len()], bytes)?);
            if shards.mesh.vocab > 1 {
                let first = shards.part(device).vocab.start as i32;
                buffers.push(shards.client.upload(device, Element::I32, &[], bytemuck::bytes_of(&first))?);
            }
            Ok(buffers)
        })
        .collect()
}

/// The logits of each device, and its tokens.
fn upload_problem(shards: &Shards, spec: &LossSpec, problem: &Problem) -> Result<Vec<Vec<Buffer>>, RuntimeError> {
    upload(shards, spec, problem, |device| {
        Ok(vec![shards.upload_block(device, &problem.logits, &shards.logits(device), Padding::Nan)?])
    })
}

/// Output `place` of a device.
fn output(outputs: &[Vec<Buffer>], device: usize, place: usize) -> Result<&Buffer, RuntimeError> {
    outputs[device].get(place).ok_or_else(|| RuntimeError::Answer {
        what: "execute".into(),
        given: format!("{} outputs", outputs[device].len()),
        expected: format!("more than {place}"),
    })
}

/// The outcome, from each device's outputs. dlogits are written over `logits`, whatever they hold.
fn download(
    shards: &Shards,
    spec: &LossSpec,
    logits: FloatArray<Ix3>,
    outputs: &[Vec<Buffer>],
) -> Result<Outcome, RuntimeError> {
    let mut dlogits = logits;
    for device in 0..shards.mesh.devices() {
        let buffer = output(outputs, device, Output::Gradient as usize)?;
        shards.logits(device).download(buffer, &mut dlogits)?;
    }
    let OfTokens { loss, logp, entropy, token_loss, metrics } = OfTokens::download(shards, spec, outputs)?;
    Ok(Outcome { loss, logp, entropy, token_loss, dlogits, metrics })
}

/// All of an outcome but its gradients.
struct OfTokens {
    loss: FloatArray<Ix0>,
    logp: FloatArray<Ix2>,
    entropy: FloatArray<Ix2>,
    token_loss: FloatArray<Ix2>,
    metrics: Metrics,
}

impl OfTokens {
    fn download(shards: &Shards, spec: &LossSpec, outputs: &[Vec<Buffer>]) -> Result<Self, RuntimeError> {
        let per_token = |which: Output| shards.download_per_token(|device| output(outputs, device, which as usize));
        let mut scalars = [0.0_f32; Scalars::COUNT];
        let bytes = bytemuck::cast_slice_mut(&mut scalars);
        output(outputs, 0, Output::Scalars as usize)?.download(Element::F32, &[Scalars::COUNT], bytes)?;
        let scalar = |place: usize| f64::from(scalars[place]);
        Ok(Self {
            loss: arr0(scalars[Scalars::LOSS]).into(),
            logp: per_token(Output::Logp)?.into(),
            entropy: per_token(Output::Entropy)?.into(),
            token_loss: per_token(Output::TokenLoss)?.into(),
            metrics: Metrics {
                clip_low: scalar(Scalars::CLIP_LOW),
                clip_high: scalar(Scalars::CLIP_HIGH),
                clip_region: scalar(Scalars::CLIP_REGION),
                kl_mean: spec.kl.as_ref().map(|_| scalar(Scalars::KL_MEAN)),
                entropy_mean: scalar(Scalars::ENTROPY_MEAN),
                ratio_mean: scalar(Scalars::RATIO_MEAN),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{HeadLayout, HeadShape};
    use crate::spec::{Ratio, RatioLevel};

    /// The tests on devices run what is whole in place of what is cut over one device.
    #[test]
    fn programs_cut_over_one_device_are_those_of_what_is_whole() {
        let sequence = Ratio { level: RatioLevel::Sequence, ..LossSpec::default().ratio };
        let specs = [
            LossSpec { entropy_coef: 0.01, temperature: 0.7, ..LossSpec::default() },
            LossSpec { ratio: sequence, ..LossSpec::default() },
        ];
        let (all, heads) = (Xla::all(None), XlaHead::all(None));
        let shape = HeadShape { batch: 3, tokens: 5, hidden: 16, vocab: 131 };
        let (mut same, mut same_heads) = (0, 0);
        for spec in &specs {
            let takes = |xla: &&Xla| xla.supports(spec, shape.logits(), Dtype::Bf16, 1).is_ok();
            let text = |xla: &Xla| {
                let mesh = xla.mesh(shape.logits(), 1).unwrap();
                assert_eq!(mesh, Mesh::ONE);
                xla.program(Structure::of(spec), shape.logits(), Dtype::Bf16, mesh, Lowering::Loops, ANY_DEVICE)
                    .unwrap()
            };
            for cut in all.iter().filter(|xla| !xla.sharding_is_whole()).filter(takes) {
                let whole = all.iter().find(|xla| xla.sharding_is_whole() && xla.kernel == cut.kernel).unwrap();
                assert!(text(cut) == text(whole), "{}", cut.id());
                same += 1;
            }
            let layout = HeadLayout::HiddenByVocab;
            let arrays = HeadArrays { shape, dtype: Dtype::Bf16, layout, rounds_logits: true };
            let cut = heads.iter().filter(|head| !head.sharding_is_whole());
            for cut in cut.filter(|head| head.supports(spec, shape, Dtype::Bf16, 1).is_ok()) {
                let whole = heads.iter().find(|head| head.sharding_is_whole() && head.class() == cut.class()).unwrap();
                let text = |head: &XlaHead| head.loops(spec, arrays, 1).unwrap();
                assert!(text(cut) == text(whole), "{}", cut.id());
                same_heads += 1;
            }
        }
        // Rows and vocabulary of each; the one-pass kernel knows no sequence and cuts no vocabulary.
        assert_eq!((same, same_heads), (9, 8));
    }
}
