//! The programs of [`assay_programs`] on the devices of a plugin.
//!
//! dlogits lie over the logits on every device. What a program cannot do is known before there is a device.

mod devices;
mod lm_head;
pub(crate) mod shards;

use std::path::Path;

use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::{SpecNumber, TokenInput};
use assay_algebra::transform::ColumnBiases;
use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{
    Answer, BackendError, Implementation, Prepared, ProblemFormat, RunError, RunsOn, Step, Unavailable, Unsupported,
    Workload,
};
use assay_core::memory::{CompiledMemory, DeviceMemory};
use assay_core::problem::{Candidate, Dtype, FloatArray, Gradient, Metrics, Outcome, Problem};
use assay_core::spec::LossSpec;
use assay_programs::mesh::Mesh;
use assay_programs::{HeadProgram, LossProgram, Lowering, ProgramOutput, Programs, ScalarOutputs, StructuredSpec};
use ndarray::{Array2, Ix1, Ix2, Ix3, arr0};

use crate::runtime::{DeviceBuffer, RuntimeError};
use devices::{PluginDevices, ShardedProgram, compiled, device};
use shards::{ArrayBlock, Padding, Shards};

/// Programs of one kernel under one sharding, run by a plugin.
pub struct Runner<P> {
    program: P,
    on: PluginDevices,
}

/// A loss on logits, run by a plugin.
pub type Xla = Runner<LossProgram>;

/// An LM head and a loss, run by a plugin.
pub type XlaHead = Runner<HeadProgram>;

impl<P: Programs> Runner<P> {
    /// Creates a runner of each program that is an implementation. It runs on the devices of `plugin`, or of the one that
    /// [`locate`](crate::runtime::locate) finds.
    pub fn all(plugin: Option<&Path>) -> Vec<Self> {
        let programs = P::all().into_iter().filter(|program| program.is_implementation());
        programs.map(|program| Self::new(program, plugin)).collect()
    }

    /// Creates a runner of one program on the devices of `plugin`, or of the one that [`locate`](crate::runtime::locate) finds.
    pub fn new(program: P, plugin: Option<&Path>) -> Self {
        Self { program, on: PluginDevices::new(program.sharding(), plugin) }
    }

    /// Returns the programs that it runs.
    pub fn program(&self) -> P {
        self.program
    }
}

impl Xla {
    /// Creates runners of the other ways to write `xla`, which are timed in comparison with it. They run on the devices of `plugin`, or of
    /// the one that [`locate`](crate::runtime::locate) finds.
    pub fn alternatives(plugin: Option<&Path>) -> Vec<Self> {
        LossProgram::alternatives().map(|program| Self::new(program, plugin)).collect()
    }
}

impl XlaHead {
    /// Sets the bytes of a chunk of logits; see [`HeadProgram::chunk_bytes`].
    #[must_use]
    pub fn chunk_bytes(self, bytes: usize) -> Self {
        Self { program: self.program.chunk_bytes(bytes), ..self }
    }

    /// Sets the bytes of gradient that are summed at a time; see [`HeadProgram::sum_bytes`].
    #[must_use]
    pub fn sum_bytes(self, bytes: usize) -> Self {
        Self { program: self.program.sum_bytes(bytes), ..self }
    }
}

/// Logp and entropy alone, run by a plugin: [`LossProgram::entropy`].
pub struct XlaEntropy {
    on: PluginDevices,
}

impl XlaEntropy {
    /// Creates it on one device of `plugin`, or of the one that [`locate`](crate::runtime::locate) finds.
    pub fn new(plugin: Option<&Path>) -> Self {
        Self { on: PluginDevices::new(LossProgram::entropy().sharding(), plugin) }
    }

    /// Whether this machine can run it.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    pub fn available(&self) -> Result<(), Unavailable> {
        self.on.available()
    }

    /// Computes `[B,T]` logp and entropy in nats, f32, in one read of the logits; 0 where the mask hides a token. The error is that of
    /// tile-two-pass: class `tile` of `tolerances.toml`.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    pub fn logp_and_entropy(&self, spec: &LossSpec, problem: &Problem) -> Result<[FloatArray<Ix2>; 2], RunError> {
        let shape = problem.check(spec)?;
        let client = self.on.client()?;
        let given = ProblemFormat { shape, dtype: problem.logits.dtype(), form: (), packed: None };
        let program = LossProgram::entropy();
        let device = device(&client, program.id())?;
        let loss = StructuredSpec::new(spec);
        let text = program.text(loss, given, 1, device)?;
        let executable = compiled(&client, text, 1)?;
        let (in_rows, row_major) = (program.takes_rows(device), program.takes_row_major(device));
        let shards = Shards { shape, mesh: Mesh::ONE, client, device, in_rows, row_major, scatters: false };
        shards.expect_room(&executable)?;
        // Ids of unmasked tokens have been checked; an id of a masked one may be anything, and becomes 0.
        let ids = problem.ids.mapv(|id| i32::try_from(id).unwrap_or(0));
        // Temperatures of tokens go in as rates per token, and one temperature as a scalar.
        let inverse_temperature =
            if let Some(rates) = KernelInputs::new(loss, &problem.tokens()).input(TokenInput::Rate) {
                shards.upload_per_token(0, DeviceDtype::F32, &rates.mapv(|rate| rate as f32), 0.0)?
            } else {
                let one = SpecNumber::InverseTemperature.value_in(spec, [shape.batch, shape.tokens]) as f32;
                shards.client.upload(0, DeviceDtype::F32, &[], bytemuck::bytes_of(&one))?
            };
        let mut inputs = [vec![
            // A logit beyond the problem's extents is NaN on the device, so that a program that reads one shows it.
            shards.upload_block(0, &problem.logits, &shards.logits(0), Padding::Nan)?,
            shards.upload_per_token(0, DeviceDtype::I32, &ids, 0)?,
            shards.upload_per_token(0, DeviceDtype::Pred, &problem.mask.mapv(u8::from), 0)?,
            inverse_temperature,
        ]];
        shards.lay_out_logits(&mut inputs)?;
        let outputs = executable.execute(&[inputs[0].iter().collect()])?;
        let fetched = |name, place| shards.gather_per_token(name, |device| output(&outputs, device, place));
        Ok([fetched("logp", 0)?, fetched("entropy", 1)?])
    }
}

impl<L, P> Implementation<Problem<L>> for Runner<P>
where
    P: Programs<Problem = Problem<L>>,
    Problem<L>: DeviceArrays,
{
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
        let absent = |reason: String| Unavailable { reason };
        // Without a plugin there is neither a kind of device nor a number.
        let client = self.on.client().map_err(|error| absent(error.to_string()))?;
        // A wrong kind of device is reported before a wrong number of devices.
        if let Ok(device) = device(&client, self.program.id()) {
            self.program.expect_device(device).map_err(|unsupported| absent(unsupported.to_string()))?;
        }
        self.on.available()
    }

    fn device_counts(&self) -> Vec<usize> {
        self.on.counts()
    }

    fn takes(&self, devices: usize) -> bool {
        self.on.takes(devices)
    }

    fn lowering(&self) -> Option<&'static str> {
        let client = self.on.client().ok()?;
        let device = device(&client, self.program.id()).ok()?;
        self.program.lowering(device).map(Lowering::name)
    }

    fn supports(
        &self,
        spec: &LossSpec,
        shape: <Problem<L> as Workload>::Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<(), Unsupported> {
        self.program.supports(spec, shape, dtype, devices)
    }

    fn keeps_digits(&self) -> bool {
        self.program.keeps_digits()
    }

    fn takes_packed(&self) -> bool {
        true
    }

    fn run(
        &self,
        spec: &LossSpec,
        problem: Problem<L>,
        devices: usize,
    ) -> Result<Candidate<<Problem<L> as Workload>::Gradient>, RunError> {
        PreparedProgram::compile(self, spec, ProblemFormat::from_problem(spec, &problem)?, devices)?.run(problem)
    }

    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        given: ProblemFormat<Problem<L>>,
        devices: usize,
    ) -> Result<Box<dyn Prepared<Problem<L>> + 's>, RunError> {
        Ok(Box::new(PreparedProgram::compile(self, spec, given, devices)?))
    }
}

impl DeviceArrays for Problem {
    fn upload(&self, shards: &Shards, device: usize) -> Result<Vec<DeviceBuffer>, RuntimeError> {
        Ok(vec![shards.upload_block(device, &self.logits, &shards.logits(device), Padding::Nan)?])
    }

    fn room(given: ProblemFormat) -> FloatArray<Ix3> {
        FloatArray::zeros([given.shape.batch, given.shape.tokens, given.shape.vocab], given.dtype)
    }

    fn into_room(self, _: ProblemFormat) -> FloatArray<Ix3> {
        self.logits
    }

    fn download(
        shards: &Shards,
        _: ProblemFormat,
        outputs: &[Vec<DeviceBuffer>],
        mut dlogits: FloatArray<Ix3>,
    ) -> Result<FloatArray<Ix3>, RuntimeError> {
        let buffer = |device| output(outputs, device, ProgramOutput::Gradient as usize);
        shards.gather("dlogits", |device| shards.logits(device), buffer, &mut dlogits)?;
        Ok(dlogits)
    }
}

/// The arrays of a kind of problem that devices receive and return, besides those of its tokens.
trait DeviceArrays: Workload {
    /// Sends `device` its blocks of the arrays.
    fn upload(&self, shards: &Shards, device: usize) -> Result<Vec<DeviceBuffer>, RuntimeError>;

    /// Allocates arrays for the gradient.
    fn room(given: ProblemFormat<Self>) -> Self::Gradient;

    /// Returns arrays for the gradient, and may reuse those of the problem.
    fn into_room(self, given: ProblemFormat<Self>) -> Self::Gradient {
        drop(self);
        Self::room(given)
    }

    /// Collects the gradient from each device's outputs in `room`, whose content is overwritten.
    fn download(
        shards: &Shards,
        given: ProblemFormat<Self>,
        outputs: &[Vec<DeviceBuffer>],
        room: Self::Gradient,
    ) -> Result<Self::Gradient, RuntimeError>;
}

/// A compiled program, the problem's shape that it was compiled for, and its loss.
struct PreparedProgram<'s, P: Workload> {
    plan: ShardedProgram,
    loss: StructuredSpec<'s>,
    given: ProblemFormat<P>,
}

impl<'s, L> PreparedProgram<'s, Problem<L>>
where
    Problem<L>: DeviceArrays,
{
    /// Compiles the program for a problem of the `given` form, and checks that the memory of a run is available.
    fn compile<P: Programs<Problem = Problem<L>>>(
        Runner { program, on }: &Runner<P>,
        spec: &'s LossSpec,
        given: ProblemFormat<Problem<L>>,
        devices: usize,
    ) -> Result<Self, RunError> {
        program.supports(spec, given.shape, given.dtype, devices)?;
        let (client, loss, shape) = (on.client()?, StructuredSpec::new(spec), given.shape.into());
        let device = device(&client, program.id())?;
        let text = program.text(loss, given, devices, device)?;
        let (mesh, in_rows) = (program.mesh(shape, devices)?, program.takes_rows(device));
        let (row_major, scatters) = (program.takes_row_major(device), program.scatters());
        // How the batch is cut, and in which form logits cross, is the program's choice.
        let shards = Shards { shape, mesh, client, device, in_rows, row_major, scatters };
        Ok(Self { plan: ShardedProgram::compile(text, shards)?, loss, given })
    }

    fn run(self, problem: Problem<L>) -> Result<Candidate<<Problem<L> as Workload>::Gradient>, RunError> {
        let inputs = upload(&self.plan.shards, self.loss, &problem)?;
        let room = problem.into_room(self.given);
        let outputs = self.plan.execute(&inputs)?;
        Ok(self.download(&outputs, room)?.into())
    }

    /// Collects the outcome from each device's outputs, with the gradient in `room`.
    fn download(
        &self,
        outputs: &[Vec<DeviceBuffer>],
        room: <Problem<L> as Workload>::Gradient,
    ) -> Result<Outcome<<Problem<L> as Workload>::Gradient>, RuntimeError> {
        let Self { plan, loss, given } = self;
        let shards = &plan.shards;
        // The gradient is cut as the logits are; the other outputs have a few numbers per token, or are scalars.
        let gradient = Problem::download(shards, *given, outputs, room)?;
        let of = |place: ProgramOutput| move |device| output(outputs, device, place as usize);
        let per_token = |name, place| shards.gather_per_token(name, of(place));
        let mut scalars: FloatArray<Ix1> = FloatArray::zeros(ScalarOutputs::COUNT, Dtype::F32);
        shards.gather(
            "scalars",
            |_| ArrayBlock::all(&[ScalarOutputs::COUNT]),
            of(ProgramOutput::Scalars),
            &mut scalars,
        )?;
        // With several ids per token, the other ids have one more output.
        let logp_of_others = (loss.spec.ids_per_token > 1).then(|| {
            let gradients = <Problem<L> as Workload>::Gradient::ARRAYS.len();
            let place = |device| output(outputs, device, ProgramOutput::logp_of_others(gradients));
            let mut logps =
                FloatArray::zeros([shards.shape.batch, shards.shape.tokens, loss.spec.ids_per_token - 1], Dtype::F32);
            shards.gather(
                "logp_of_others",
                |device| shards.rows(device, loss.spec.ids_per_token - 1),
                place,
                &mut logps,
            )?;
            Ok::<_, RuntimeError>(logps)
        });
        let logp_of_others = logp_of_others.transpose()?;
        let scalars = scalars.to_f64();
        let scalar = |place: usize| scalars[place];
        Ok(Outcome {
            loss: arr0(scalar(ScalarOutputs::LOSS) as f32).into(),
            logp: per_token("logp", ProgramOutput::Logp)?,
            logp_of_others,
            entropy: per_token("entropy", ProgramOutput::Entropy)?,
            token_loss: per_token("token_loss", ProgramOutput::TokenLoss)?,
            gradient,
            metrics: Metrics {
                clip_low: scalar(ScalarOutputs::CLIP_LOW),
                clip_high: scalar(ScalarOutputs::CLIP_HIGH),
                clip_region: scalar(ScalarOutputs::CLIP_REGION),
                kl_mean: loss.spec.kl.as_ref().map(|_| scalar(ScalarOutputs::KL_MEAN)),
                entropy_mean: scalar(ScalarOutputs::ENTROPY_MEAN),
                ratio_mean: scalar(ScalarOutputs::RATIO_MEAN),
            },
        })
    }
}

impl<L> Prepared<Problem<L>> for PreparedProgram<'_, Problem<L>>
where
    Problem<L>: DeviceArrays,
{
    fn load<'p>(&'p self, problem: &'p Problem<L>) -> Result<Step<'p, Problem<L>>, RunError> {
        self.given.expect(self.loss.spec, problem)?;
        let inputs = upload(&self.plan.shards, self.loss, problem)?;
        Ok(Box::new(move || {
            let outputs = self.plan.execute(&inputs)?;
            let answer: Answer<'p, Problem<L>> = Box::new(move || {
                // The inputs live until here, so that nothing is freed while a step is timed.
                drop(inputs);
                Ok(self.download(&outputs, Problem::room(self.given))?.into())
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

    fn runs_on(&self) -> Option<RunsOn> {
        self.plan.runs_on()
    }
}

impl From<RuntimeError> for RunError {
    fn from(error: RuntimeError) -> Self {
        BackendError::new(error).into()
    }
}

/// Sends each device its arguments, in the program's order: the logits or the arrays that they are computed from, then the arrays of the
/// tokens.
fn upload<L>(
    shards: &Shards,
    loss: StructuredSpec,
    problem: &Problem<L>,
) -> Result<Vec<Vec<DeviceBuffer>>, RuntimeError>
where
    Problem<L>: DeviceArrays,
{
    let sequences = problem.sequences();
    // Prepares the arrays of all tokens once, and cuts them for each device below.
    let numbers = loss.program_numbers([sequences.len(), shards.shape.tokens]);
    let numbers: Vec<f32> = numbers.into_iter().map(|(_, value)| value).collect();
    let KernelInputs { mask, inputs } = KernelInputs::new(loss, &problem.tokens());
    // What the mask hides may be anything; the program never uses it.
    let ids = problem.ids.mapv(|id| i32::try_from(id).unwrap_or(0));
    let mask = mask.mapv(u8::from);
    let advantages = problem.tokens().advantages_of_tokens().mapv(|advantage| advantage as f32);
    // Packed sequences: the index of each token's sequence, −1 for tokens of none.
    let of_tokens = problem.extra.sequences.packed().map(|_| {
        let mut of_tokens = Array2::from_elem(problem.mask.dim(), -1_i32);
        for sequence in &sequences {
            sequence.places().for_each(|at| of_tokens[at] = sequence.index as i32);
        }
        of_tokens
    });
    let transform = loss.structure.transform.filter(|transform| transform.columns);
    let columns = transform.map(|_| ColumnBiases::new(loss.spec, &problem.tokens(), shards.shape.vocab));
    let inputs: Vec<Array2<f32>> = inputs.into_iter().map(|(_, values)| values.mapv(|x| x as f32)).collect();

    let buffers = (0..shards.mesh.devices())
        .map(|device| {
            let mut buffers = problem.upload(shards, device)?;
            buffers.extend([
                shards.upload_per_token(device, DeviceDtype::I32, &ids, 0)?,
                shards.upload_per_token(device, DeviceDtype::Pred, &mask, 0)?,
            ]);
            if let Some(of_tokens) = &of_tokens {
                buffers.push(shards.upload_per_token(device, DeviceDtype::I32, of_tokens, -1)?);
            }
            buffers.push(shards.upload_per_token(device, DeviceDtype::F32, &advantages, f32::NAN)?);
            if let Some(others) = &problem.extra.others {
                let ids = others.ids.mapv(|id| i32::try_from(id).unwrap_or(0));
                let dlogp = others.dlogp.mapv(|dlogp| dlogp as f32);
                buffers.push(shards.upload_of_others(device, DeviceDtype::I32, &ids, 0)?);
                buffers.push(shards.upload_of_others(device, DeviceDtype::F32, &dlogp, f32::NAN)?);
            }
            for values in &inputs {
                buffers.push(shards.upload_per_token(device, DeviceDtype::F32, values, f32::NAN)?);
            }
            if let Some(ColumnBiases { bias, target }) = &columns {
                let bias = bias.as_slice().expect("one axis, made whole");
                buffers.push(shards.upload_columns(device, bias, f32::NEG_INFINITY)?);
                buffers.push(shards.upload_per_token(device, DeviceDtype::F32, target, 0.0)?);
            }
            let bytes = bytemuck::cast_slice(&numbers);
            buffers.push(shards.client.upload(device, DeviceDtype::F32, &[numbers.len()], bytes)?);
            // A device that has a part of the vocabulary needs the id of its first column.
            if shards.mesh.vocab > 1 {
                let first = shards.part(device).vocab.start as i32;
                buffers.push(shards.client.upload(device, DeviceDtype::I32, &[], bytemuck::bytes_of(&first))?);
            }
            Ok(buffers)
        })
        .collect::<Result<Vec<_>, RuntimeError>>();
    let mut buffers = buffers?;
    shards.lay_out_logits(&mut buffers)?;
    Ok(buffers)
}

/// Returns output `place` of a device.
fn output(outputs: &[Vec<DeviceBuffer>], device: usize, place: usize) -> Result<&DeviceBuffer, RuntimeError> {
    outputs[device].get(place).ok_or_else(|| RuntimeError::Answer {
        what: "execute".into(),
        given: format!("{} outputs", outputs[device].len()),
        expected: format!("more than {place}"),
    })
}
