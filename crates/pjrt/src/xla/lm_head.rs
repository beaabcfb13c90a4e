//! LM heads with a loss on the devices of a plugin.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use assay_core::implementation::{self, Answer, Implementation, Prepared, RunError, Step, Unavailable, Unsupported};
use assay_core::memory::{CompiledMemory, DeviceMemory};
use assay_core::problem::{Dtype, FloatArray, HeadCandidate, HeadLayout, HeadOutcome, HeadProblem, HeadShape};
use assay_core::spec::LossSpec;
use assay_programs::mesh::Axis;
use assay_programs::{HeadArrays, HeadProgram, Output, local_shape};

use super::devices::{Devices, Plan};
use super::shards::{Block, Padding, Shards};
use super::{OfTokens, output, upload};
use crate::runtime::{Buffer, RuntimeError};

/// An LM head and a loss, run by a plugin.
pub struct XlaHead {
    program: HeadProgram,
    on: Devices,
}

impl XlaHead {
    /// One for each program, on the devices of `plugin`, or of the one that [`locate`](crate::runtime::locate) finds.
    pub fn all(plugin: Option<&Path>) -> Vec<XlaHead> {
        let on = |program: HeadProgram| XlaHead { program, on: Devices::new(program.sharding(), plugin) };
        HeadProgram::all().into_iter().map(on).collect()
    }

    /// Its programs.
    pub fn program(&self) -> HeadProgram {
        self.program
    }

    /// With chunks of another size; see [`HeadProgram::chunk_bytes`].
    #[must_use]
    pub fn chunk_bytes(self, bytes: usize) -> Self {
        Self { program: self.program.chunk_bytes(bytes), ..self }
    }

    /// Compiles the program for `problem`, whose extents are `shape`, and checks that a run of it fits.
    fn plan(&self, spec: &LossSpec, problem: &HeadProblem, shape: HeadShape, devices: usize) -> Result<Plan, RunError> {
        self.supports(spec, shape, problem.dtype(), devices)?;
        let mesh = self.program.mesh(shape.logits(), devices)?;
        let text = self.program.loops(spec, HeadArrays::of(problem, shape), devices)?;
        Ok(Plan::of(text, Shards { shape: shape.logits(), mesh, client: self.on.client()? })?)
    }
}

impl Implementation<HeadProblem> for XlaHead {
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

    fn supports(&self, spec: &LossSpec, shape: HeadShape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        self.program.supports(spec, shape, dtype, devices)
    }

    fn run(&self, spec: &LossSpec, problem: HeadProblem, devices: usize) -> Result<HeadCandidate, RunError> {
        let shape = problem.check(spec)?;
        let plan = self.plan(spec, &problem, shape, devices)?;
        let arrays = HeadArrays::of(&problem, shape);
        let inputs = upload_head(&plan.shards, spec, &problem, arrays)?;
        drop(problem);
        let outputs = plan.execute(&inputs)?;
        Ok(download_head(&plan.shards, spec, arrays, &outputs)?.into())
    }

    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        shape: HeadShape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<Box<dyn Prepared<HeadProblem> + 's>, RunError> {
        self.supports(spec, shape, dtype, devices)?;
        let given = implementation::Given { shape, dtype };
        Ok(Box::new(Ready { implementation: self, spec, given, devices, plan: RefCell::default() }))
    }
}

/// Ready for problems of one shape; what is compiled for them, when the first says how its head lies.
struct Ready<'s> {
    implementation: &'s XlaHead,
    spec: &'s LossSpec,
    given: implementation::Given<HeadProblem>,
    devices: usize,
    plan: RefCell<Option<Rc<Plan>>>,
}

impl Ready<'_> {
    fn loaded<A>(&self, of: impl FnOnce(&Plan) -> Result<A, Unavailable>) -> Result<A, Unavailable> {
        let plan = self.plan.borrow();
        let reason = "no problem was loaded, and only that says how its head lies";
        of(plan.as_ref().ok_or_else(|| Unavailable { reason: reason.into() })?)
    }
}

impl Prepared<HeadProblem> for Ready<'_> {
    fn load<'p>(&'p self, problem: &'p HeadProblem) -> Result<Step<'p, HeadProblem>, RunError> {
        self.given.expect(self.spec, problem)?;
        let arrays = HeadArrays::of(problem, self.given.shape);
        let plan = Rc::new(self.implementation.plan(self.spec, problem, self.given.shape, self.devices)?);
        *self.plan.borrow_mut() = Some(Rc::clone(&plan));
        let inputs = upload_head(&plan.shards, self.spec, problem, arrays)?;
        Ok(Box::new(move || {
            let outputs = plan.execute(&inputs)?;
            let answer: Answer<'p, HeadProblem> = Box::new(move || {
                // The inputs live until here, so that nothing is freed while a step is timed.
                drop(inputs);
                Ok(download_head(&plan.shards, self.spec, arrays, &outputs)?.into())
            });
            Ok(answer)
        }))
    }

    fn host_bytes(&self) -> usize {
        self.plan.borrow().as_ref().map_or(0, |plan| plan.host_bytes())
    }

    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        self.loaded(Plan::compiled_memory)
    }

    fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        self.loaded(Plan::device_memory)
    }
}

/// What `device` holds of the head.
fn block_of_head(shards: &Shards, device: usize, arrays: HeadArrays) -> Block {
    let HeadArrays { shape, layout, .. } = arrays;
    let [_, _, v] = local_shape(shards.shape, shards.mesh);
    let axis = match layout {
        HeadLayout::HiddenByVocab => 1,
        HeadLayout::VocabByHidden => 0,
    };
    Block::all(&layout.extents(shape.hidden, shape.vocab)).cut(axis, shards.part(device).vocab, v)
}

/// Each device's arguments, in the program's order.
fn upload_head(
    shards: &Shards,
    spec: &LossSpec,
    problem: &HeadProblem,
    arrays: HeadArrays,
) -> Result<Vec<Vec<Buffer>>, RuntimeError> {
    upload(shards, spec, problem, |device| {
        let rows = shards.rows(device, arrays.shape.hidden);
        let head = block_of_head(shards, device, arrays);
        Ok(vec![
            shards.upload_block(device, &problem.logits.hidden, &rows, Padding::Nan)?,
            // A column beyond the vocabulary has a part of 0 in every sum over columns, if its weights are numbers.
            shards.upload_block(device, &problem.logits.lm_head, &head, Padding::Zero)?,
        ])
    })
}

/// The outcome, from each device's outputs.
fn download_head(
    shards: &Shards,
    spec: &LossSpec,
    arrays: HeadArrays,
    outputs: &[Vec<Buffer>],
) -> Result<HeadOutcome, RuntimeError> {
    let HeadArrays { shape, dtype, layout, .. } = arrays;
    let mut dhidden = FloatArray::zeros([shape.batch, shape.tokens, shape.hidden], dtype);
    let mut dlm_head = FloatArray::zeros(layout.extents(shape.hidden, shape.vocab), Dtype::F32);
    for device in 0..shards.mesh.devices() {
        let at = |axis| shards.mesh.coordinate(device, axis);
        // What was summed over devices is the same on all of them.
        if at(Axis::Vocab) == 0 {
            let rows = shards.rows(device, shape.hidden);
            rows.download(output(outputs, device, Output::Gradient as usize)?, &mut dhidden)?;
        }
        if at(Axis::Batch) == 0 && at(Axis::Tokens) == 0 {
            let head = block_of_head(shards, device, arrays);
            head.download(output(outputs, device, Output::DlmHead as usize)?, &mut dlm_head)?;
        }
    }
    let OfTokens { loss, logp, entropy, token_loss, metrics } = OfTokens::download(shards, spec, outputs)?;
    let dlogits_dtype = dhidden.dtype();
    Ok(HeadOutcome { loss, logp, entropy, token_loss, dhidden, dlm_head, dlogits_dtype, metrics })
}
