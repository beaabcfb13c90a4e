//! Runs of a kernel by the interpreter, and the computations of a device around it, in f64.

use crate::common::batch::Batch;
use crate::common::device::{Arrays, OnePassColumns, Pass, TwoPassColumns};
use assay_core::problem::{Candidate, Dtype, Problem, Shape};
use assay_core::spec::{LogitsTransform, LossSpec};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_programs::{ANY_TPU, LossProgram, MeetingMethod, Programs, PtxTarget, StructuredSpec};
use assay_ptx::{PtxKernel, Role};
use assay_ptx_interpreter::{ApproximateUnits, GlobalArray, GridLaunch, PtxModule};
use std::ops::{Deref, Range};

/// Columns around blocks of 16 bytes, warps, trips of loops, and rows that lie over two CTAs and more.
pub(super) const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [2, 3, 127], [1, 17, 128], [3, 1, 129], [2, 9, 2049], [1, 5, 1031], [1, 2, 9001], [1, 1, 33_001]];

/// The name in tests of the one-pass kernel whose CTAs meet by asynchronous stores.
pub(super) const BY_STORES: &str = "gpu-one-pass, meeting by stores";

/// What texts of the one-pass kernel differ between.
pub(super) const TARGETS: [PtxTarget; 2] = [PtxTarget::Sm90, PtxTarget::Sm100];

pub(super) fn kernels(target: PtxTarget, id: &str, spec: &LossSpec, shape: Shape, dtype: Dtype) -> Vec<PtxKernel> {
    let all = LossProgram::all();
    let implementation = all.iter().find(|implementation| implementation.id() == id).unwrap();
    implementation.gpu_kernels_for(StructuredSpec::new(spec), shape, dtype, 1, target).unwrap()
}

/// Writes the one-pass kernel whose CTAs meet by asynchronous stores.
pub(super) fn meeting_by_stores(target: PtxTarget, spec: &LossSpec, shape: Shape, dtype: Dtype) -> PtxKernel {
    let all = LossProgram::all();
    let program = all.iter().find(|program| program.id() == "gpu-one-pass").unwrap();
    program
        .gpu_kernels_that_meet(StructuredSpec::new(spec), shape, dtype, 1, (target, MeetingMethod::Stores))
        .unwrap()
        .remove(0)
}

/// Runs a kernel on inputs given by name, in sequence and shuffled; outputs in order.
pub(crate) fn run(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    inputs: &[(&str, Vec<u8>)],
) -> Result<Vec<Vec<u8>>, String> {
    run_without(kernel, units, inputs, &[])
}

/// The same, where these bytes of the logits may be read only when dlogits were written over them.
pub(super) fn run_without(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    inputs: &[(&str, Vec<u8>)],
    unwritten: &[Range<usize>],
) -> Result<Vec<Vec<u8>>, String> {
    let module = PtxModule::parse(&kernel.text).map_err(|error| format!("{}: {error}", kernel.name))?;
    let (mut buffers, mut arguments) = (Vec::<GlobalArray>::new(), Vec::new());
    for parameter in &kernel.parameters {
        let bytes = parameter.shape.iter().product::<usize>() * parameter.dtype.size();
        let buffer = match parameter.role {
            Role::Input => {
                let (_, given) = inputs.iter().find(|(name, _)| *name == parameter.name).expect("every input is given");
                assert_eq!(given.len(), bytes, "{}", parameter.name);
                let buffer = GlobalArray::input(&parameter.name, given.clone());
                if parameter.name == "logits" { buffer.unwritten(unwritten.iter().cloned()) } else { buffer }
            }
            Role::Output { over: None } => GlobalArray::output(&parameter.name, bytes),
            Role::Output { over: Some(input) } => {
                arguments.push(arguments[input]);
                continue;
            }
        };
        arguments.push(buffers.len());
        buffers.push(buffer);
    }
    let launch = GridLaunch {
        grid: kernel.grid,
        block: kernel.block,
        cluster: [kernel.cluster, 1, 1],
        dynamic_shared: kernel.shared_bytes,
    };
    let buffers = module.run_both(&kernel.name, &launch, buffers, &arguments, units, 1);
    let buffers = buffers.map_err(|error| format!("{}: {error}", kernel.name))?;
    let outputs = kernel.parameters.iter().zip(&arguments).filter(|(parameter, _)| parameter.role != Role::Input);
    Ok(outputs.map(|(_, &buffer)| buffers[buffer].bytes.clone()).collect())
}

/// The arrays that all rows share; the others have a part for each row.
const SHARED: [&str; 5] = ["numbers", "column_bias", "inverse_temperature", "softmax_numbers", "columns"];

/// Runs a kernel on all rows of a batch, as many at a time as it takes, with zeros beyond the last.
fn run_rows(
    kernel: &PtxKernel,
    units: ApproximateUnits,
    tokens: usize,
    arrays: &Arrays,
) -> Result<Vec<Vec<u8>>, String> {
    let logits = kernel.inputs().find(|input| input.name == "logits").expect("every kernel takes logits");
    let of_a_run = logits.shape[1];
    let mut outputs = vec![Vec::new(); kernel.outputs().count()];
    for first in (0..tokens).step_by(of_a_run) {
        let inputs = arrays.iter().map(|(name, bytes)| {
            if SHARED.contains(name) {
                return (*name, bytes.clone());
            }
            let of_a_row = bytes.len() / tokens;
            let mut part = bytes[first * of_a_row..bytes.len().min((first + of_a_run) * of_a_row)].to_vec();
            part.resize(of_a_run * of_a_row, 0);
            (*name, part)
        });
        let inputs: Arrays = inputs.collect();
        for (all, part) in outputs.iter_mut().zip(run(kernel, units, &inputs)?) {
            let of_a_row = part.len() / of_a_run;
            all.extend(&part[..(tokens - first).min(of_a_run) * of_a_row]);
        }
    }
    Ok(outputs)
}

/// What the columns of the arrays of a kernel are called, as the tile kernel of the same name has them.
pub(super) fn columns(id: &str, spec: &LossSpec, array: &str) -> Vec<&'static str> {
    let all = LossProgram::all();
    let tile = all.iter().find(|implementation| implementation.id() == id.replace("gpu", "tile")).unwrap();
    let shape = Shape { batch: 1, tokens: 1, vocab: 1 };
    let kernels = tile.kernels_for(StructuredSpec::new(spec), shape, Dtype::F32, 1, ANY_TPU).unwrap();
    let arrays = kernels.into_iter().flat_map(|kernel| [kernel.operands, kernel.results].concat());
    arrays.into_iter().find(|named| named.name == array).expect("the array is one of the kernel's").columns
}

/// A batch with what a device computes around the kernel.
pub(crate) struct Around<'p> {
    pub(super) batch: Batch<'p>,
    pub(super) target: PtxTarget,
    pub(super) units: ApproximateUnits,
}

impl<'p> Deref for Around<'p> {
    type Target = Batch<'p>;

    fn deref(&self) -> &Batch<'p> {
        &self.batch
    }
}

impl<'p> Around<'p> {
    pub(crate) fn new(spec: &'p LossSpec, problem: &'p Problem) -> Self {
        Self { batch: Batch::new(spec, problem), target: PtxTarget::Sm90, units: ApproximateUnits::Rounded }
    }

    pub(super) fn one_pass(&self) -> Result<Candidate, String> {
        let id = "gpu-one-pass";
        self.one_pass_by(&kernels(self.target, id, self.spec, self.shape, self.problem.logits.dtype())[0])
    }

    /// The candidate of a kernel that was changed, or is another's.
    pub(crate) fn one_pass_by(&self, kernel: &PtxKernel) -> Result<Candidate, String> {
        let [numbers, tokens, results] =
            ["numbers", "tokens", "results"].map(|array| columns("gpu-one-pass", self.spec, array));
        let columns = OnePassColumns { numbers, tokens, results };
        self.one_pass_with(&columns, |arrays| run_rows(kernel, self.units, self.tokens(), arrays))
    }

    /// Numbers, and what is given of each token.
    pub(super) fn given_to_one_pass(&self) -> [Vec<u8>; 2] {
        let [numbers, tokens] = ["numbers", "tokens"].map(|array| columns("gpu-one-pass", self.spec, array));
        [self.numbers_of_one_pass(&numbers), self.tokens_of_one_pass(&tokens)]
    }

    pub(super) fn two_pass(&self) -> Result<Candidate, String> {
        let dtype = self.problem.logits.dtype();
        self.two_pass_by(&kernels(self.target, "gpu-two-pass", self.spec, self.shape, dtype), 1)
    }

    /// The candidate of the two kernels of one of `devices`.
    pub(crate) fn two_pass_by(&self, kernels: &[PtxKernel], devices: usize) -> Result<Candidate, String> {
        let [statistics, dlogits] = kernels else { panic!("two kernels") };
        let changes = self.spec.logits != LogitsTransform::default() || !self.spec.support.is_whole();
        let columns = |array| columns("gpu-two-pass", self.spec, array);
        let columns = TwoPassColumns {
            softmax_numbers: if changes { columns("softmax_numbers") } else { vec![] },
            statistics: columns("statistics"),
            scales: columns("scales"),
        };
        self.two_pass_with(&columns, devices, |pass, arrays| {
            let kernel = if pass == Pass::Statistics { statistics } else { dlogits };
            run_rows(kernel, self.units, self.tokens(), arrays)
        })
    }
}

/// Garbage at masked tokens that is no number in f64 arithmetic here is no business of the kernels.
pub(super) fn check(target: PtxTarget, id: &str, spec: &LossSpec, recipe: &Recipe) -> Result<(), String> {
    check_by(ApproximateUnits::Rounded, target, id, spec, recipe)
}

/// Checks the kernels of one pass and of two.
pub(super) fn check_both(target: PtxTarget, spec: &LossSpec, recipe: &Recipe) {
    for id in ["gpu-one-pass", "gpu-two-pass"] {
        check(target, id, spec, recipe).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// The same by units that are off.
pub(super) fn check_by(
    units: ApproximateUnits,
    target: PtxTarget,
    id: &str,
    spec: &LossSpec,
    recipe: &Recipe,
) -> Result<(), String> {
    let problem = recipe.problem(spec).map_err(|error| error.to_string())?;
    check_problem(units, target, id, spec, &problem).map_err(|failure| format!("{recipe:?} {failure}"))
}

pub(super) fn check_problem(
    units: ApproximateUnits,
    target: PtxTarget,
    id: &str,
    spec: &LossSpec,
    problem: &Problem,
) -> Result<(), String> {
    let around = Around { target, units, ..Around::new(spec, problem) };
    let candidate = match id {
        "gpu-one-pass" => around.one_pass(),
        BY_STORES => around.one_pass_by(&meeting_by_stores(target, spec, around.shape, problem.logits.dtype())),
        _ => around.two_pass(),
    };
    let candidate = candidate.map_err(|error| format!("{spec:?}\n{error}"))?;
    let known = JudgedProblem::new(spec, problem).unwrap();
    let judged = known.judge(candidate, &Limits::for_class("gpu").unwrap()).unwrap();
    if let Some(failure) = known.failures(&judged, id, "cargo test --test kernels ptx::").first() {
        return Err(format!("{id} for {target:?} by {units:?} {spec:?}\n{failure}"));
    }
    Ok(())
}

pub(super) fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime) -> Recipe {
    Recipe { shape, dtype, regime, seed: 5, old_logp_noise_scale: 0.1, masked_garbage: true }
}
