//! The arrays of an LM head that devices receive and return.

use assay_core::implementation::{ProblemFormat, Workload as _};
use assay_core::problem::{Dtype, FloatArray, HeadGradient, HeadLayout, HeadProblem, HeadShape};
use assay_programs::ProgramOutput;
use assay_programs::mesh::{MeshAxis, shard};

use super::shards::{ArrayBlock, Padding, Shards};
use super::{DeviceArrays, output};
use crate::runtime::{DeviceBuffer, RuntimeError};

impl DeviceArrays for HeadProblem {
    fn upload(&self, shards: &Shards, device: usize) -> Result<Vec<DeviceBuffer>, RuntimeError> {
        let packed = self.extra.sequences.packed();
        let given = ProblemFormat::<Self> { shape: self.shape(), dtype: self.dtype(), form: self.form(), packed };
        let rows = states(shards, device, given.shape);
        let head = block_of_head(shards, device, given);
        Ok(vec![
            shards.upload_block(device, &self.logits.hidden, &rows, Padding::Nan)?,
            // A column beyond the vocabulary has a part of 0 in every sum over columns, if its weights are numbers.
            shards.upload_block(device, &self.logits.lm_head, &head, Padding::Zero)?,
        ])
    }

    fn room(given: ProblemFormat<Self>) -> HeadGradient {
        let HeadShape { batch, tokens, hidden, vocab } = given.shape;
        HeadGradient {
            dhidden: FloatArray::zeros([batch, tokens, hidden], given.dtype),
            dlm_head: FloatArray::zeros(given.form.layout.extents(hidden, vocab), Dtype::F32),
            dlogits_dtype: given.dtype,
        }
    }

    fn download(
        shards: &Shards,
        given: ProblemFormat<Self>,
        outputs: &[Vec<DeviceBuffer>],
        mut gradient: HeadGradient,
    ) -> Result<HeadGradient, RuntimeError> {
        let of = |place: ProgramOutput| move |device| output(outputs, device, place as usize);
        let rows = |device| states(shards, device, given.shape);
        shards.gather("dhidden", rows, of(ProgramOutput::Gradient), &mut gradient.dhidden)?;
        let head = |device| block_of_gradient(shards, device, given);
        shards.gather("dlm_head", head, of(ProgramOutput::DlmHead), &mut gradient.dlm_head)?;
        Ok(gradient)
    }
}

/// Returns the block of hidden states and dhidden that `device` has: the rows of its logits, or a part of them if columns are cut and the
/// states are scattered.
fn states(shards: &Shards, device: usize, HeadShape { batch, tokens, hidden, .. }: HeadShape) -> ArrayBlock {
    let (parts, rows) = (shards.mesh.vocab, batch * tokens);
    if !shards.scatters || parts == 1 {
        return shards.rows(device, hidden);
    }
    let local = rows.div_ceil(parts);
    let part = shard(rows, local, shards.mesh.coordinate(device, MeshAxis::Vocab));
    ArrayBlock::all(&[rows, hidden]).cut(0, part, local)
}

/// Returns the block of the head's gradient that `device` has: that of its columns, or of some hidden units if rows are cut and the
/// gradient is scattered.
fn block_of_gradient(shards: &Shards, device: usize, given: ProblemFormat<HeadProblem>) -> ArrayBlock {
    let parts = shards.mesh.batch * shards.mesh.tokens;
    let block = block_of_head(shards, device, given);
    if !shards.scatters || parts == 1 {
        return block;
    }
    let axis = match given.form.layout {
        HeadLayout::HiddenByVocab => 0,
        HeadLayout::VocabByHidden => 1,
    };
    let local = given.shape.hidden.div_ceil(parts);
    block.cut(axis, shard(given.shape.hidden, local, device / shards.mesh.vocab), local)
}

/// Returns the block of the head that `device` has.
fn block_of_head(shards: &Shards, device: usize, given: ProblemFormat<HeadProblem>) -> ArrayBlock {
    let (shape, layout) = (given.shape, given.form.layout);
    let [_, _, v] = shards.local();
    let axis = match layout {
        HeadLayout::HiddenByVocab => 1,
        HeadLayout::VocabByHidden => 0,
    };
    ArrayBlock::all(&layout.extents(shape.hidden, shape.vocab)).cut(axis, shards.part(device).vocab, v)
}
