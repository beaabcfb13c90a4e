//! Programs for GPUs without one: XLA's CPU compiler runs what stands around the kernels of PTX, as the program for a GPU has it, and the
//! interpreter the kernels, between the parts that the program is cut into at its calls.

use std::path::Path;

use assay::device_dtype::ArrayBytes as _;
use assay::implementation::ProblemFormat;
use assay::judge::generate::{Recipe, Regime};
use assay::judge::tolerance::Limits;
use assay::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay::programs::{
    ANY_DEVICE, Device, LossProgram, NamedArray, ProgramOutput, Programs, PtxTarget, ScalarOutputs, StructuredSpec,
};
use assay::runtime::{Client, DeviceBuffer, Executable, PjrtProgram};
use assay::spec::{LogitsTransform, LossSpec, Support, Temperature};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::transform::ColumnBiases;
use assay_ptx::{PtxKernel, Role};
use assay_ptx_interpreter::{ApproximateUnits, GlobalArray, GridLaunch, PtxModule};
use assay_testkit::JudgedProblem;
use assay_testkit::plugins::client;
use libtest_mimic::Failed;
use ndarray::{Dimension, IntoDimension, Ix1, arr0};

/// Four ids a token, some of them the same, with a cap, a bias, columns that are left out and temperatures of tokens: what is gathered
/// before the kernels and set behind them, and what they are given of the likeliest id.
pub(crate) fn several_ids(plugin: &Path) -> Result<(), Failed> {
    let spec = LossSpec {
        logits: LogitsTransform { scale: -0.5, softcap: Some(20.0), bias: true },
        support: Support { vocab: Some(129), excluded_ids: vec![0, 3, 64], keep_sampled: false, kept: None },
        temperature: Temperature::Given,
        ids_per_token: 4,
        ..LossSpec::from_cotangents(false)
    };
    for (id, target, dtype) in
        [("gpu-one-pass", PtxTarget::Sm90, Dtype::Bf16), ("gpu-two-pass", PtxTarget::Sm80, Dtype::F32)]
    {
        let recipe = |regime| super::run::recipe([2, 5, 131], dtype, regime, 3);
        let program = Interpreted::of(client(plugin)?, id, target, &spec, &recipe(Regime::Normal))?;
        for regime in [Regime::Normal, Regime::Confident, Regime::Ties] {
            let problem = recipe(regime).problem(&spec)?;
            let known = JudgedProblem::new(&spec, &problem)?;
            let judged = known.judge(program.run(&problem)?, &Limits::for_class("gpu")?)?;
            if let Some(failure) = known.failures(&judged, id, "this trial").into_iter().next() {
                return Err(format!("{regime:?} {failure}").into());
            }
        }
    }
    Ok(())
}

/// A program in parts, and the kernels that run between them. A part is given what the program is, and what the kernels before it
/// returned; it returns what the next is given, the last part what the program does.
struct Interpreted<'s> {
    client: Client,
    loss: StructuredSpec<'s>,
    inputs: Vec<NamedArray>,
    parts: Vec<Executable>,
    kernels: Vec<PtxKernel>,
}

impl<'s> Interpreted<'s> {
    fn of(client: Client, id: &str, target: PtxTarget, spec: &'s LossSpec, recipe: &Recipe) -> Result<Self, Failed> {
        let program = LossProgram::all().into_iter().find(|program| program.id() == id).ok_or("no such program")?;
        let (loss, dtype, shape) = (StructuredSpec::new(spec), recipe.dtype, recipe.problem(spec)?.shape());
        let text =
            program.text(loss, ProblemFormat { shape, dtype, form: (), packed: None }, 1, Device::gpu(target))?;
        let parts: Vec<String> = parts(&text);
        let compiled = |part: &String| client.compile(&PjrtProgram::replicated(part.as_bytes(), 1));
        let parts = parts.iter().map(compiled).collect::<Result<Vec<_>, _>>()?;
        let kernels = program.gpu_kernels_for(loss, shape, dtype, 1, target)?;
        assert_eq!(parts.len(), kernels.len() + 1, "a part before each call, and one behind the last");
        let inputs = program.signature_for(loss, shape, dtype, 1, ANY_DEVICE)?.inputs;
        Ok(Self { client, loss, inputs, parts, kernels })
    }

    fn run(&self, problem: &Problem) -> Result<Candidate, Failed> {
        let given = self.inputs.iter().map(|input| self.upload(input, problem));
        let mut given = given.collect::<Result<Vec<DeviceBuffer>, _>>()?;
        for (part, kernel) in self.parts.iter().zip(&self.kernels) {
            let operands = part.execute(&[given.iter().collect()])?.remove(0);
            for (parameter, bytes) in kernel.outputs().zip(interpret(kernel, &operands)?) {
                given.push(self.client.upload(0, parameter.dtype, &parameter.shape, &bytes)?);
            }
        }
        let last = self.parts.last().expect("one behind the last kernel");
        let outputs = last.execute(&[given.iter().collect()])?.remove(0);
        let Shape { batch, tokens, vocab } = problem.shape();
        let others = ProgramOutput::logp_of_others(1);
        let per_token = |output: ProgramOutput| download(&outputs[output as usize], (batch, tokens), Dtype::F32);
        let scalars: FloatArray<Ix1> =
            download(&outputs[ProgramOutput::Scalars as usize], ScalarOutputs::COUNT, Dtype::F32)?;
        Ok(Candidate {
            loss: Some(arr0(scalars.to_f64()[ScalarOutputs::LOSS] as f32).into()),
            gradient: download(
                &outputs[ProgramOutput::Gradient as usize],
                (batch, tokens, vocab),
                problem.logits.dtype(),
            )?,
            logp: Some(per_token(ProgramOutput::Logp)?),
            logp_of_others: Some(download(
                &outputs[others],
                (batch, tokens, self.loss.spec.ids_per_token - 1),
                Dtype::F32,
            )?),
            entropy: Some(per_token(ProgramOutput::Entropy)?),
            token_loss: Some(per_token(ProgramOutput::TokenLoss)?),
            metrics: None,
        })
    }

    /// What the program is given of a problem by one name.
    fn upload(
        &self,
        NamedArray { name, dtype, shape, .. }: &NamedArray,
        problem: &Problem,
    ) -> Result<DeviceBuffer, Failed> {
        let tokens = problem.tokens();
        let KernelInputs { mask, inputs } = KernelInputs::new(self.loss, &tokens);
        let columns = || ColumnBiases::new(self.loss.spec, &tokens, problem.shape().vocab);
        let others = || problem.extra.others.as_ref().expect("as the spec has several ids");
        let id = |&id: &i64| i32::try_from(id).unwrap_or(0).to_ne_bytes();
        let number = |x: f64| (x as f32).to_ne_bytes();
        let bytes = match *name {
            // In the shape and the dtype that they have.
            "logits" => {
                let Shape { batch, tokens, vocab } = problem.shape();
                let dtype = problem.logits.dtype().into();
                return Ok(self.client.upload(0, dtype, &[batch, tokens, vocab], problem.logits.bytes())?);
            }
            "ids" => bytes_of(problem.ids.iter().map(id)),
            "mask" => mask.iter().map(|&counts| counts.into()).collect(),
            "advantages" => bytes_of(tokens.advantages_of_tokens().into_iter().map(number)),
            "other_ids" => bytes_of(others().ids.iter().map(id)),
            "dlogp_of_others" => bytes_of(others().dlogp.iter().copied().map(number)),
            "column_bias" => bytes_of(columns().bias.into_iter().map(f32::to_ne_bytes)),
            "target_bias" => bytes_of(columns().target.into_iter().map(f32::to_ne_bytes)),
            "numbers" => {
                let numbers = self.loss.program_numbers([problem.shape().batch, problem.shape().tokens]);
                bytes_of(numbers.into_iter().map(|(_, number)| number.to_ne_bytes()))
            }
            name => {
                let (_, values) = inputs.iter().find(|(input, _)| input.name() == name).ok_or(name)?;
                bytes_of(values.iter().copied().map(number))
            }
        };
        Ok(self.client.upload(0, *dtype, shape, &bytes)?)
    }
}

fn bytes_of<const N: usize>(values: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    values.flatten().collect()
}

fn download<D: Dimension>(
    buffer: &DeviceBuffer,
    shape: impl IntoDimension<Dim = D>,
    dtype: Dtype,
) -> Result<FloatArray<D>, Failed> {
    let shape = shape.into_dimension();
    let mut array = FloatArray::zeros(shape.clone(), dtype);
    buffer.download(dtype.into(), shape.slice(), array.bytes_mut())?;
    Ok(array)
}

/// The text of a program for a GPU, cut at its calls of kernels of PTX.
fn parts(text: &str) -> Vec<String> {
    const CALL: &str = " = stablehlo.custom_call @__gpu$xla.gpu.ptx(";
    // Nothing is written over what the next part reads.
    let text = text.replace(" {tf.aliasing_output = 0 : i32}", "");
    let (head, body) = text.split_once(") -> (").expect("parameters, and results");
    let mut head = head.to_string();
    let (results, body) = body.split_once(") {\n").expect("results, and a body");
    let mut body = body.to_string();
    let mut parts = Vec::new();
    while let Some((before, behind)) = body.clone().split_once(CALL) {
        let (before, own) = before.rsplit_once('\n').expect("a line of its own");
        let (call, behind) = behind.split_once('\n').expect("a call is no program's end");
        let (operands, call) = call.split_once(") {").expect("operands");
        let (_, types) = call.rsplit_once("} : (").expect("types");
        let (given, returned) = types.split_once(") -> (").expect("of operands and results");
        let (returned, _) = returned.split_once(") loc(").expect("a name");
        parts.push(format!("{head}) -> ({given}) {{\n{before}\n    return {operands} : {given}\n  }}\n}}\n"));
        // What the kernel returns is given from here on.
        let (own, _) = own.trim().split_once(':').expect("how many results");
        body = format!("{before}\n{behind}");
        for (place, returned) in returned.split(", ").enumerate() {
            let name = format!("%call{}_{place}", parts.len());
            body = body.replace(&format!("{own}#{place}"), &name);
            head += &format!(", {name}: {returned}");
        }
    }
    parts.push(format!("{head}) -> ({results}) {{\n{body}"));
    parts
}

/// What a kernel makes of its operands, in sequence and shuffled alike.
fn interpret(kernel: &PtxKernel, operands: &[DeviceBuffer]) -> Result<Vec<Vec<u8>>, Failed> {
    let module = PtxModule::parse(&kernel.text)?;
    let mut operands = operands.iter();
    let (mut arrays, mut arguments) = (Vec::new(), Vec::new());
    for parameter in &kernel.parameters {
        let array = match parameter.role {
            Role::Output { over: Some(input) } => {
                arguments.push(arguments[input]);
                continue;
            }
            Role::Output { over: None } => GlobalArray::output(&parameter.name, parameter.bytes()),
            Role::Input => {
                let mut bytes = vec![0; parameter.bytes()];
                let operand = operands.next().ok_or("an operand an input")?;
                operand.download(parameter.dtype, &parameter.shape, &mut bytes)?;
                GlobalArray::input(&parameter.name, bytes)
            }
        };
        arguments.push(arrays.len());
        arrays.push(array);
    }
    let PtxKernel { grid, block, cluster, shared_bytes, .. } = *kernel;
    let launch = GridLaunch { grid, block, cluster: [cluster, 1, 1], dynamic_shared: shared_bytes };
    let arrays = module.run_both(&kernel.name, &launch, arrays, &arguments, ApproximateUnits::Rounded, 1)?;
    let outputs = kernel.parameters.iter().zip(arguments).filter(|(parameter, _)| parameter.role != Role::Input);
    Ok(outputs.map(|(_, array)| arrays[array].bytes.clone()).collect())
}
