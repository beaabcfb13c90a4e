//! LM heads with a loss on the devices of a plugin.

use std::path::Path;

use assay_core::implementation::{Given, Implementation, Prepared, RunError, Unavailable, Unsupported, Workload as _};
use assay_core::problem::{Dtype, FloatArray, HeadCandidate, HeadGradient, HeadLayout, HeadProblem, HeadShape, Shape};
use assay_core::spec::LossSpec;
use assay_programs::mesh::Axis;
use assay_programs::{HeadProgram, Output, Shaped};

use super::devices::{Devices, machine};
use super::shards::{Block, Padding, Shards};
use super::{Arrays, Ready, output};
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

    /// Compiles the program of what is `given`, and checks that a run of it fits.
    fn ready<'s>(
        &self,
        spec: &'s LossSpec,
        given: Given<HeadProblem>,
        devices: usize,
    ) -> Result<Ready<'s, HeadProblem>, RunError> {
        self.program.supports(spec, given.shape, given.dtype, devices)?;
        let (client, loss) = (self.on.client()?, Shaped::of(spec));
        let text = self.program.loops(loss, given.into(), devices, machine(&client))?;
        let mesh = self.program.mesh(given.shape.logits(), devices)?;
        Ready::of(client, loss, given, mesh, text)
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
        self.ready(spec, Given::of(spec, &problem)?, devices)?.run(problem)
    }

    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        given: Given<HeadProblem>,
        devices: usize,
    ) -> Result<Box<dyn Prepared<HeadProblem> + 's>, RunError> {
        Ok(Box::new(self.ready(spec, given, devices)?))
    }
}

impl Arrays for HeadProblem {
    fn logits(shape: HeadShape) -> Shape {
        shape.logits()
    }

    fn upload(&self, shards: &Shards, device: usize) -> Result<Vec<Buffer>, RuntimeError> {
        let given = Given::<Self> { shape: self.shape(), dtype: self.dtype(), form: self.form() };
        let rows = shards.rows(device, given.shape.hidden);
        let head = block_of_head(shards, device, given);
        Ok(vec![
            shards.upload_block(device, &self.logits.hidden, &rows, Padding::Nan)?,
            // A column beyond the vocabulary has a part of 0 in every sum over columns, if its weights are numbers.
            shards.upload_block(device, &self.logits.lm_head, &head, Padding::Zero)?,
        ])
    }

    fn room(given: Given<Self>) -> HeadGradient {
        let HeadShape { batch, tokens, hidden, vocab } = given.shape;
        HeadGradient {
            dhidden: FloatArray::zeros([batch, tokens, hidden], given.dtype),
            dlm_head: FloatArray::zeros(given.form.layout.extents(hidden, vocab), Dtype::F32),
            dlogits_dtype: given.dtype,
        }
    }

    fn download(
        shards: &Shards,
        given: Given<Self>,
        outputs: &[Vec<Buffer>],
        mut gradient: HeadGradient,
    ) -> Result<HeadGradient, RuntimeError> {
        for device in 0..shards.mesh.devices() {
            let at = |axis| shards.mesh.coordinate(device, axis);
            // What was summed over devices is the same on all of them.
            if at(Axis::Vocab) == 0 {
                let rows = shards.rows(device, given.shape.hidden);
                rows.download(output(outputs, device, Output::Gradient as usize)?, &mut gradient.dhidden)?;
            }
            if at(Axis::Batch) == 0 && at(Axis::Tokens) == 0 {
                let head = block_of_head(shards, device, given);
                head.download(output(outputs, device, Output::DlmHead as usize)?, &mut gradient.dlm_head)?;
            }
        }
        Ok(gradient)
    }
}

/// What `device` holds of the head.
fn block_of_head(shards: &Shards, device: usize, given: Given<HeadProblem>) -> Block {
    let (shape, layout) = (given.shape, given.form.layout);
    let [_, _, v] = shards.local();
    let axis = match layout {
        HeadLayout::HiddenByVocab => 1,
        HeadLayout::VocabByHidden => 0,
    };
    Block::all(&layout.extents(shape.hidden, shape.vocab)).cut(axis, shards.part(device).vocab, v)
}
