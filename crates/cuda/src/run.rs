//! The kernels of PTX as implementations: each on one device, launched by the driver.
//!
//! The host prepares the inputs of tokens, and evaluates the losses of tokens between the two kernels of `gpu-two-pass`. A step has the
//! kernels, that evaluation, and the copies of a few numbers per token, but not the copies of logits.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use assay_algebra::transform::ColumnBiases;
use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{
    Answer, BackendError, Implementation, KernelTiming, KernelTimings, Prepared, ProblemFormat, ResidentProblem,
    RunError, RunsOn, Step, Unavailable, Unsupported,
};
use assay_core::memory::{CompiledMemory, DeviceMemory};
use assay_core::problem::{Candidate, Dtype, FloatArray, Outcome, Problem, Shape};
use assay_core::spec::LossSpec;
use assay_programs::{LossProgram, Programs as _, PtxTarget, StructuredSpec};
use assay_ptx::Parameter;
use ndarray::{Ix2, Ix3};

use crate::driver::{CudaContext, CudaDevice, CudaMemory, Driver, KernelCall, LoadedKernel};
use crate::error::CudaError;
use crate::frame::{HostLoss, HostResults};

/// The end of the ids of kernels that the driver launches.
const SUFFIX: &str = "-driver";

/// The untimed launches before those that are timed. The device's clocks rise during them.
const WARMUP_LAUNCHES: usize = 5;

/// Bytes of a gradient that are compared at once.
const COMPARED_BYTES: usize = 16 << 20;

/// A kernel of PTX, launched by the driver on its first device.
pub struct DriverLoss {
    program: LossProgram,
    id: String,
    /// The driver's first device, once it has been opened.
    device: OnceLock<CudaDevice>,
    /// The device's context, which is opened once and released with this object.
    context: Mutex<Option<Arc<CudaContext>>>,
}

/// Logp and entropy alone: the kernel `gpu-logp`.
pub struct DriverLogp {
    driven: DriverLoss,
}

impl From<CudaError> for RunError {
    fn from(error: CudaError) -> Self {
        BackendError::new(error).into()
    }
}

pub(crate) fn program(id: &str) -> LossProgram {
    LossProgram::all().into_iter().find(|program| program.id() == id).expect("it is listed")
}

/// Returns the target for which the kernels of `program` are written on `device`; errors call it `id`.
///
/// # Errors
/// [`CudaError::Capability`]; [`CudaError::Version`].
pub(crate) fn written_for(device: &CudaDevice, program: LossProgram, id: &str) -> Result<PtxTarget, CudaError> {
    let given = device.capability();
    let target = match given.0 {
        ..9 => PtxTarget::Sm80,
        9 => PtxTarget::Sm90,
        10.. => PtxTarget::Sm100,
    };
    let needed = program.least_target().expect("a kernel of PTX");
    if given >= (8, 0) && target >= needed {
        // A newer chip's text is in a newer PTX, which not every driver that runs takes.
        device.driver().expect_version(target)?;
        return Ok(target);
    }
    let (needed, instead) = if needed == PtxTarget::Sm90 && given >= (8, 0) {
        ("sm_90 and up, whose CTAs form clusters", "gpu-two-pass-driver runs on it")
    } else {
        ("sm_80 and up", "native computes the same on any CPU")
    };
    Err(CudaError::Capability { device: device.name().into(), given, kernel: id.into(), needed, instead })
}

impl DriverLoss {
    /// Creates an implementation of each kernel that computes a loss on one device.
    pub fn all() -> Vec<Self> {
        ["gpu-one-pass", "gpu-two-pass"].map(|id| Self::new(program(id))).into()
    }

    fn new(program: LossProgram) -> Self {
        Self { program, id: format!("{}{SUFFIX}", program.id()), device: OnceLock::new(), context: Mutex::new(None) }
    }

    /// Returns the driver's first device, which is opened once.
    fn device(&self) -> Result<&CudaDevice, CudaError> {
        if let Some(device) = self.device.get() {
            return Ok(device);
        }
        let device = CudaDevice::new(Driver::load()?, 0)?;
        Ok(self.device.get_or_init(|| device))
    }

    /// Returns the target for which its kernels are written on this device.
    fn target(&self) -> Result<PtxTarget, CudaError> {
        written_for(self.device()?, self.program, &self.id)
    }

    fn context(&self) -> Result<Arc<CudaContext>, CudaError> {
        let mut context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = &*context {
            return Ok(Arc::clone(context));
        }
        Ok(Arc::clone(context.insert(self.device()?.clone().context()?)))
    }

    fn unsupported(&self, unsupported: Unsupported) -> Unsupported {
        Unsupported { implementation: self.id.clone(), ..unsupported }
    }

    fn ready<'s>(
        &self,
        spec: &'s LossSpec,
        given: ProblemFormat,
        devices: usize,
    ) -> Result<LoadedProgram<'s>, RunError> {
        self.supports_given(spec, given, devices)?;
        let (target, context) = (self.target()?, self.context()?);
        let loss = StructuredSpec::new(spec);
        let kernels = self.program.gpu_kernels_for(loss, given.shape, given.dtype, 1, target);
        let kernels = kernels.map_err(|error| self.unsupported(error))?;
        let kernels = kernels.into_iter().map(|kernel| context.load(kernel)).collect::<Result<Vec<_>, _>>()?;
        Ok(LoadedProgram { id: self.id.clone(), context, kernels, loss, given, held_bytes: AtomicUsize::new(0) })
    }
}

impl Implementation for DriverLoss {
    fn id(&self) -> &str {
        &self.id
    }

    fn summary(&self) -> &'static str {
        if self.program.least_target() == Some(PtxTarget::Sm90) {
            "gpu-one-pass, launched by CUDA's driver alone"
        } else {
            "gpu-two-pass, launched by CUDA's driver alone"
        }
    }

    fn class(&self) -> &'static str {
        self.program.class()
    }

    fn available(&self) -> Result<(), Unavailable> {
        self.target().map(drop).map_err(|error| Unavailable { reason: error.to_string() })
    }

    fn device_counts(&self) -> Vec<usize> {
        if self.available().is_ok() { vec![1] } else { vec![] }
    }

    fn lowering(&self) -> Option<&'static str> {
        self.available().ok().map(|()| "ptx")
    }

    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        if spec.ids_per_token > 1 {
            let (given, supported) = (spec.ids_per_token.to_string(), "1 id a token".into());
            return Err(Unsupported { implementation: self.id.clone(), field: "ids_per_token", given, supported });
        }
        self.program.supports(spec, shape, dtype, devices).map_err(|error| self.unsupported(error))
    }

    fn takes_packed(&self) -> bool {
        true
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let ready = self.ready(spec, ProblemFormat::from_problem(spec, &problem)?, devices)?;
        let arrays = ready.upload(&problem)?;
        let results = ready.step(&arrays)?;
        // The gradient takes the place of the logits.
        Ok(arrays.outcome(results, problem.logits)?.into())
    }

    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        given: ProblemFormat,
        devices: usize,
    ) -> Result<Box<dyn Prepared + 's>, RunError> {
        Ok(Box::new(self.ready(spec, given, devices)?))
    }
}

impl Default for DriverLogp {
    fn default() -> Self {
        Self { driven: DriverLoss::new(program("gpu-logp")) }
    }
}

impl DriverLogp {
    /// Whether this machine can run it.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    pub fn available(&self) -> Result<(), Unavailable> {
        self.driven.available()
    }

    /// Computes `[B,T]` logp and entropy in nats, f32, in one read of the logits; 0 where the mask hides a token. The error is that of
    /// class `gpu` of `tolerances.toml`.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or the device fails.
    pub fn logp_and_entropy(&self, spec: &LossSpec, problem: &Problem) -> Result<[FloatArray<Ix2>; 2], RunError> {
        let ready = self.driven.ready(spec, ProblemFormat::from_problem(spec, problem)?, 1)?;
        let arrays = ready.upload(problem)?;
        arrays.first_call(&ready.kernels[0]).launch()?;
        let statistics = floats(&arrays.results)?;
        Ok(arrays.frame.logp_and_entropy_of_all(&arrays.frame.softmaxes(&statistics)))
    }
}

/// Assembled kernels, and the loss whose numbers they read.
struct LoadedProgram<'s> {
    id: String,
    context: Arc<CudaContext>,
    kernels: Vec<LoadedKernel>,
    loss: StructuredSpec<'s>,
    given: ProblemFormat,
    /// The bytes of copies of logits on the device, from which steps are restored.
    held_bytes: AtomicUsize,
}

/// A problem on the device.
struct ProblemArrays<'s> {
    frame: HostLoss<'s>,
    logits: CudaMemory,
    /// The other inputs of the first kernel, in its order, without the logits.
    inputs: Vec<(&'static str, CudaMemory)>,
    /// The output of the first kernel for each token.
    results: CudaMemory,
    /// The factors that the second kernel reads, if there is one.
    scales: Option<CudaMemory>,
}

/// A problem on the device whose logits can be restored after a step.
struct RestorableArrays<'p> {
    ready: &'p LoadedProgram<'p>,
    /// The arrays of the step. After it the gradient is where the logits were.
    arrays: Rc<ProblemArrays<'p>>,
    /// A copy of the logits, which no kernel writes to.
    copy: CudaMemory,
}

fn bytes_of(logits: &FloatArray<Ix3>) -> Cow<'_, [u8]> {
    const CHECKED: &str = "checked: dense";
    match logits {
        FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
        FloatArray::F32(array) => bytemuck::cast_slice(array.as_slice().expect(CHECKED)).into(),
        FloatArray::Bf16(array) => bytemuck::cast_slice(array.as_slice().expect(CHECKED)).into(),
        FloatArray::F16(array) => bytemuck::cast_slice(array.as_slice().expect(CHECKED)).into(),
    }
}

fn bytes_of_mut(logits: &mut FloatArray<Ix3>) -> &mut [u8] {
    const CHECKED: &str = "checked: dense";
    match logits {
        FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
        FloatArray::F32(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(CHECKED)),
        FloatArray::Bf16(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(CHECKED)),
        FloatArray::F16(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(CHECKED)),
    }
}

/// Reads an array of f32 that a kernel wrote.
fn floats(memory: &CudaMemory) -> Result<Vec<f32>, CudaError> {
    let mut values = vec![0.0_f32; memory.bytes() / size_of::<f32>()];
    memory.read(bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// Returns the bytes of one of the arrays that depend on the column.
fn column_bytes(frame: &HostLoss, array: impl Fn(&ColumnBiases) -> Option<&[f32]>) -> Vec<u8> {
    let columns = frame.columns().expect("a kernel is given biases where columns differ");
    bytemuck::cast_slice(array(columns).expect("made whole")).to_vec()
}

impl<'s> LoadedProgram<'s> {
    /// Uploads a checked problem, and allocates the arrays that the kernels write.
    fn upload(&self, problem: &Problem) -> Result<ProblemArrays<'s>, CudaError> {
        let frame = HostLoss::new(self.loss, &problem.tokens(), self.given.shape.vocab);
        let context = &self.context;
        let logits = context.upload("the logits", &bytes_of(&problem.logits))?;
        // Uploads each input of the first kernel under its name; the second kernel reads a subset of them.
        let first = self.kernels[0].kernel();
        let mut inputs = Vec::new();
        for parameter in first.inputs() {
            let (name, bytes): (&str, Vec<u8>) = match parameter.name.as_str() {
                "logits" => continue,
                "ids" => ("ids", bytemuck::cast_slice(frame.ids()).to_vec()),
                "numbers" => ("numbers", bytemuck::cast_slice(&frame.numbers()).to_vec()),
                "tokens" => ("tokens", bytemuck::cast_slice(&frame.tokens()).to_vec()),
                "inverse_temperature" => {
                    ("inverse_temperature", bytemuck::cast_slice(&frame.softmax_numbers()).to_vec())
                }
                "rate" => {
                    let rates = frame.rates().expect("a kernel is given them where temperatures are given");
                    ("rate", bytemuck::cast_slice(&rates).to_vec())
                }
                "softmax_numbers" => ("softmax_numbers", bytemuck::cast_slice(&frame.softmax_numbers()).to_vec()),
                "column_bias" => ("column_bias", column_bytes(&frame, |columns| columns.bias.as_slice())),
                "target_bias" => ("target_bias", column_bytes(&frame, |columns| columns.target.as_slice())),
                "columns" => {
                    let columns =
                        i32::try_from(self.given.shape.vocab).expect("checked: a vocabulary is counted in i32");
                    ("columns", columns.to_ne_bytes().into())
                }
                other => unreachable!("a kernel is given nothing called {other}"),
            };
            inputs.push((name, context.upload(name, &bytes)?));
        }
        let of_tokens = first.outputs().last().expect("a kernel gives something of each token");
        // Room for the outputs of the first kernel, and for the factors of the second.
        let results = context.allocate("what a kernel gives of each token", of_tokens.bytes())?;
        let scales = self.kernels.get(1).map(|second| {
            let scales = second.kernel().inputs().last().expect("it is given scales");
            context.allocate("what the second kernel multiplies by", scales.bytes())
        });
        Ok(ProblemArrays { frame, logits, inputs, results, scales: scales.transpose()? })
    }

    /// Runs a step, after which the gradient is where the logits were.
    fn step(&self, arrays: &ProblemArrays) -> Result<HostResults, CudaError> {
        arrays.first_call(&self.kernels[0]).launch()?;
        let (results, scales) = self.after_first(arrays)?;
        if let (Some(second), Some(to)) = (self.kernels.get(1), &arrays.scales) {
            to.write(bytemuck::cast_slice(&scales))?;
            arrays.second_call(second).launch()?;
        }
        Ok(results)
    }

    /// Computes a step's results from the first kernel's output, and the factors of the second kernel if there is one.
    fn after_first(&self, arrays: &ProblemArrays) -> Result<(HostResults, Vec<f32>), CudaError> {
        let (frame, numbers) = (&arrays.frame, floats(&arrays.results)?);
        if self.kernels.len() == 1 {
            return Ok((frame.results(&frame.evaluated_by_kernel(&numbers)), Vec::new()));
        }
        let softmaxes = frame.softmaxes(&numbers);
        let evaluated = frame.evaluated(&softmaxes);
        Ok((frame.results(&evaluated), frame.scales(&softmaxes, &evaluated)))
    }

    /// Creates a step on arrays that are on the device; its answer is read from them.
    fn step_on<'p>(&'p self, arrays: Rc<ProblemArrays<'p>>) -> Step<'p> {
        Box::new(move || {
            let results = self.step(&arrays)?;
            let answer: Answer<'p> = Box::new(move || {
                let ProblemFormat { shape: Shape { batch, tokens, vocab }, dtype, .. } = self.given;
                Ok(arrays.outcome(results, FloatArray::zeros((batch, tokens, vocab), dtype))?.into())
            });
            Ok(answer)
        })
    }
}

impl ProblemArrays<'_> {
    /// Returns the inputs of `kernel`, which are among those of the first kernel, in its order.
    fn first_inputs(&self, kernel: &LoadedKernel) -> Vec<&CudaMemory> {
        let named = |name: &str| match name {
            "logits" => Some(&self.logits),
            name => self.inputs.iter().find(|(other, _)| *other == name).map(|(_, memory)| memory),
        };
        kernel.kernel().inputs().filter_map(|parameter| named(&parameter.name)).collect()
    }

    fn first_call<'a>(&'a self, kernel: &'a LoadedKernel) -> KernelCall<'a> {
        KernelCall { kernel, inputs: self.first_inputs(kernel), outputs: vec![&self.results] }
    }

    fn second_call<'a>(&'a self, kernel: &'a LoadedKernel) -> KernelCall<'a> {
        let scales = self.scales.as_ref().expect("there is room where there are two kernels");
        let inputs = self.first_inputs(kernel).into_iter().chain([scales]).collect();
        KernelCall { kernel, inputs, outputs: vec![] }
    }

    /// Adds the gradient to the results of a step; it is read into `room`.
    fn outcome(&self, results: HostResults, mut room: FloatArray<Ix3>) -> Result<Outcome, CudaError> {
        self.logits.read(bytes_of_mut(&mut room))?;
        let HostResults { loss, logp, entropy, token_loss, metrics } = results;
        Ok(Outcome { loss, logp, logp_of_others: None, entropy, token_loss, gradient: room, metrics })
    }
}

impl Drop for RestorableArrays<'_> {
    fn drop(&mut self) {
        self.ready.held_bytes.fetch_sub(self.copy.bytes(), Ordering::Relaxed);
    }
}

impl<'p> ResidentProblem<'p> for RestorableArrays<'p> {
    fn load(&self) -> Result<Step<'p>, RunError> {
        self.arrays.logits.copy_from(&self.copy)?;
        Ok(self.ready.step_on(Rc::clone(&self.arrays)))
    }

    fn time_kernels(&self, judged: &Candidate, launches: usize) -> Result<KernelTimings, RunError> {
        let Self { ready, arrays, copy } = self;
        // The scales between two kernels are those of a whole step, and stay: the same logits have the same.
        arrays.logits.copy_from(copy)?;
        ready.step(arrays)?;
        let calls = match &ready.kernels[..] {
            [one] => vec![arrays.first_call(one)],
            [first, second] => vec![arrays.first_call(first), arrays.second_call(second)],
            _ => unreachable!("one kernel or two"),
        };
        let replayed = ready.context.replay((copy, &arrays.logits), &calls, WARMUP_LAUNCHES, launches)?;
        let (results, _) = ready.after_first(arrays)?;
        self.expect_same(judged, &results, launches)?;
        let kernels = ready.kernels.iter().zip(replayed.kernels);
        let kernels = kernels.map(|(kernel, took)| KernelTiming { kernel: kernel.assembled().clone(), took });
        Ok(KernelTimings { kernels: kernels.collect(), copies: replayed.copies, copied_bytes: copy.bytes() })
    }
}

impl RestorableArrays<'_> {
    /// Checks that the arrays on the device, and the results that follow from them, equal the judged answer bit for bit.
    fn expect_same(&self, judged: &Candidate, results: &HostResults, launches: usize) -> Result<(), CudaError> {
        let expect = |array, differing: usize, all: usize| {
            if differing == 0 {
                return Ok(());
            }
            Err(CudaError::Differs { kernel: self.ready.id.clone(), array, differing, all, launches })
        };
        let of_tokens = [
            ("logp", &judged.logp, &results.logp),
            ("entropy", &judged.entropy, &results.entropy),
            ("token_loss", &judged.token_loss, &results.token_loss),
        ];
        let Shape { batch, tokens, .. } = self.ready.given.shape;
        for (array, judged, given) in of_tokens {
            let judged = judged.as_ref().expect("a step gives it");
            expect(array, numbers_that_differ(judged, given), batch * tokens)?;
        }
        // A part at a time: this machine need not hold a second gradient.
        let (judged, size) = (bytes_of(&judged.gradient), self.ready.given.dtype.size());
        let mut part = vec![0; COMPARED_BYTES.min(judged.len())];
        let mut differing = 0;
        for (place, judged) in judged.chunks(COMPARED_BYTES).enumerate() {
            let given = &mut part[..judged.len()];
            self.arrays.logits.read_from(place * COMPARED_BYTES, given)?;
            let numbers = given.chunks(size).zip(judged.chunks(size));
            differing += if given == judged { 0 } else { numbers.filter(|(given, judged)| given != judged).count() };
        }
        expect("dlogits", differing, judged.len() / size)
    }
}

/// Counts the elements whose bits differ between two arrays of f32.
fn numbers_that_differ(a: &FloatArray<Ix2>, b: &FloatArray<Ix2>) -> usize {
    match (a, b) {
        (FloatArray::F32(a), FloatArray::F32(b)) => a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count(),
        _ => unreachable!("what there is of each token is f32"),
    }
}

impl Prepared for LoadedProgram<'_> {
    fn load<'p>(&'p self, problem: &'p Problem) -> Result<Step<'p>, RunError> {
        self.given.expect(self.loss.spec, problem)?;
        Ok(self.step_on(Rc::new(self.upload(problem)?)))
    }

    fn hold<'p>(&'p self, problem: &'p Problem) -> Result<Option<Box<dyn ResidentProblem<'p> + 'p>>, RunError> {
        self.given.expect(self.loss.spec, problem)?;
        let arrays = self.upload(problem)?;
        let copy =
            self.context.allocate("a copy of the logits, from which steps are restored", arrays.logits.bytes())?;
        copy.copy_from(&arrays.logits)?;
        self.held_bytes.fetch_add(copy.bytes(), Ordering::Relaxed);
        Ok(Some(Box::new(RestorableArrays { ready: self, arrays: Rc::new(arrays), copy })))
    }

    /// Returns the bytes of this machine's memory that arrays of tokens take.
    fn host_bytes(&self) -> usize {
        let beside = |kernel: &LoadedKernel| {
            let arrays = kernel.kernel().parameters.iter().filter(|array| array.dtype == DeviceDtype::F32);
            arrays
                .filter(|array| !["logits", "dlogits"].contains(&array.name.as_str()))
                .map(Parameter::bytes)
                .sum::<usize>()
        };
        self.kernels.iter().map(beside).sum()
    }

    /// Returns the memory that a step allocates: inputs, the gradient over the logits, and the arrays between two kernels.
    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        let first = self.kernels[0].kernel();
        let sum = |bytes: &mut dyn Iterator<Item = usize>| bytes.sum::<usize>() as i64;
        let argument_bytes = sum(&mut first.inputs().map(Parameter::bytes));
        let logits = first.inputs().find(|array| array.name == "logits").map_or(0, Parameter::bytes) as i64;
        let of_tokens = first.outputs().last().map_or(0, Parameter::bytes) as i64;
        let scales = self.kernels.get(1).and_then(|second| second.kernel().inputs().last());
        let (given, between) = match scales {
            None => (of_tokens, 0),
            Some(scales) => (0, of_tokens + scales.bytes() as i64),
        };
        Ok(CompiledMemory {
            argument_bytes,
            output_bytes: logits + given,
            temp_bytes: between,
            alias_bytes: logits,
            code_bytes: 0,
        })
    }

    /// Returns the memory in use without the copies that are kept for a bench: a step has none.
    fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        let seen = self.context.memory().map_err(|error| Unavailable { reason: error.to_string() })?;
        let held = self.held_bytes.load(Ordering::Relaxed) as i64;
        Ok(DeviceMemory { bytes_in_use: seen.bytes_in_use - held, ..seen })
    }

    fn runs_on(&self) -> Option<RunsOn> {
        let device = self.context.device();
        Some(RunsOn { device: device.name().into(), bytes_per_s: device.bandwidth() })
    }
}
