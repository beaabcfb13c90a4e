//! The programs of [`assay_programs`] on the devices of a plugin.
//!
//! dlogits lie over the logits on every device. What a program cannot do is known before there is a device.

mod devices;
mod lm_head;
mod shards;

use std::path::Path;

use assay_algebra::rollout::Settled;
use assay_core::element::Element;
use assay_core::implementation::{
    self, Answer, BackendError, Implementation, Prepared, RunError, Step, Unavailable, Unsupported,
};
use assay_core::memory::{CompiledMemory, DeviceMemory};
use assay_core::problem::{Candidate, Dtype, FloatArray, Metrics, Outcome, Problem, Shape};
use assay_core::spec::LossSpec;
use assay_programs::mesh::Mesh;
use assay_programs::{LossProgram, Output, Scalars, numbers};
use ndarray::{Array2, Ix0, Ix2, Ix3, arr0};

use crate::runtime::{Buffer, RuntimeError};
use devices::{Devices, Plan, compiled};
pub use lm_head::XlaHead;
use shards::{Padding, Shards};

/// A loss on logits, run by a plugin.
pub struct Xla {
    program: LossProgram,
    on: Devices,
}

impl Xla {
    /// One for each program that has a gradient, on the devices of `plugin`, or of the one that
    /// [`locate`](crate::runtime::locate) finds.
    pub fn all(plugin: Option<&Path>) -> Vec<Xla> {
        let programs = LossProgram::all().into_iter().filter(|program| program.has_gradient());
        programs.map(|program| Xla { program, on: Devices::new(program.sharding(), plugin) }).collect()
    }

    /// Its programs.
    pub fn program(&self) -> LossProgram {
        self.program
    }

    /// Compiles the program for logits of `shape` and `dtype`, and checks that a run of it fits.
    fn plan(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<Plan, RunError> {
        self.supports(spec, shape, dtype, devices)?;
        let mesh = self.program.mesh(shape, devices)?;
        let text = self.program.loops(spec, shape, dtype, devices)?;
        Ok(Plan::of(text, Shards { shape, mesh, client: self.on.client()? })?)
    }
}

/// Logp and entropy alone, run by a plugin: [`LossProgram::entropy`].
pub struct XlaEntropy {
    on: Devices,
}

impl XlaEntropy {
    /// On one device of `plugin`, or of the one that [`locate`](crate::runtime::locate) finds.
    pub fn new(plugin: Option<&Path>) -> Self {
        Self { on: Devices::new(LossProgram::entropy().sharding(), plugin) }
    }

    /// Whether this machine can run it.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    pub fn available(&self) -> Result<(), Unavailable> {
        self.on.available()
    }

    /// `[B,T]` logp and entropy in nats, f32, in one read of the logits; 0 where the mask hides a token. Error as
    /// tile-two-pass: class `tile` of `tolerances.toml`.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    pub fn logp_and_entropy(&self, spec: &LossSpec, problem: &Problem) -> Result<[Array2<f32>; 2], RunError> {
        let shape = problem.check(spec)?;
        let client = self.on.client()?;
        let text = LossProgram::entropy().loops(spec, shape, problem.logits.dtype(), 1)?;
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
}

impl Implementation for Xla {
    fn id(&self) -> &'static str {
        self.program.id()
    }

    fn summary(&self) -> &'static str {
        self.program.summary()
    }

    fn class(&self) -> &'static str {
        self.program.class()
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
        self.program.supports(spec, shape, dtype, devices)
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
        numbers(spec, [shards.shape.batch, shards.shape.tokens]).into_iter().map(|(_, value)| value).collect();
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
