//! The kernels of a framework's operation: a loss and its gradient on the framework's arrays, with nothing between the kernels but more
//! kernels.
//!
//! ```text
//! forward    count ─▶ statistics ─────────────────▶ losses ─▶ sums
//!            count ─▶ tokens ─▶ one_pass (dlogits) ─▶ losses ─▶ sums     where one token decides its loss and a row fits a cluster
//! backward   dlogits; after one_pass nothing, if the cotangent of the loss is the one that was likely
//! ```

use super::batch::{self, BatchExtent, BatchForm, BatchKernel};
use super::one_pass::{self, OnePassOutput};
use super::{Cotangents, Factors, cut, two_pass};
use crate::two_pass::LocalLogits;
use assay_algebra::structure::{Denominator, Structure};
use assay_core::device_dtype::DeviceDtype;
use assay_core::spec::LossSpec;
use assay_ptx::{Parameter, PtxKernel, PtxTarget};

/// A kernel of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKernel {
    /// Counts tokens, and checks ids and masks.
    Count,
    /// Gathers what [`OnePass`](Self::OnePass) is given of each token.
    Tokens,
    /// Statistics and dlogits of each row, of a loss that one token decides: reads logits once.
    OnePass,
    /// Computes the statistics of each row, reading the logits once.
    Statistics,
    /// Losses and metrics of each token, and a record of what its gradient is made of.
    Losses,
    /// The loss and the means of the metrics.
    Sums,
    /// Dlogits of each row, from its record: reads logits once more.
    Dlogits(Cotangents),
    /// Multiplies dlogits that were made for another cotangent of the loss.
    Multiply,
}

/// Whether [`OperationKernel::OnePass`] computes a loss of that structure for rows of `vocab` logits.
pub fn takes_one_pass(structure: Structure, vocab: usize, element: DeviceDtype, target: PtxTarget) -> bool {
    target >= PtxTarget::Sm90 && !structure.couples_rows() && cut([1, 1, vocab], element, target).is_ok()
}

/// The choices that a kernel's text depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperationText {
    /// The kernel that the text is of.
    pub kernel: OperationKernel,
    /// The loss; for kernels that see a softmax alone, no more of it than they see.
    pub structure: Structure,
    /// The form of the batch's arrays.
    pub form: BatchForm,
    /// Threads of a CTA that walks a sequence.
    pub threads: u32,
    /// The number of columns of the logits; 0 if the text does not depend on it.
    pub vocab: usize,
    /// The dtype of the logits.
    pub element: DeviceDtype,
}

impl OperationText {
    /// The choices for `kernel`, with `[tokens, vocab]` logits of so many sequences.
    pub fn new(
        kernel: OperationKernel,
        structure: Structure,
        form: BatchForm,
        [tokens, sequences, vocab]: [usize; 3],
        element: DeviceDtype,
    ) -> Self {
        let Structure { transform, temperature, entropy_bonus, .. } = structure;
        // Statistics and dlogits read the softmax and no other part of the loss: one text serves all losses over the
        // same logits.
        let softmax_alone = Structure { transform, temperature, ..Structure::from_spec(&LossSpec::default()) };
        let structure = match kernel {
            OperationKernel::Statistics => softmax_alone,
            OperationKernel::Dlogits(cotangents) => {
                let has_bonus = cotangents.entropy || entropy_bonus.is_some();
                Structure { entropy_bonus: has_bonus.then_some(Denominator::ONE), ..softmax_alone }
            }
            OperationKernel::Sums | OperationKernel::Multiply => Structure::from_spec(&LossSpec::default()),
            _ => structure,
        };
        // What a kernel's text does not depend on is left out, so that it is assembled once.
        let plain = BatchForm::default();
        let (form, walked, vocab) = match kernel {
            OperationKernel::Count => (form, tokens.div_ceil(sequences.max(1)), vocab),
            OperationKernel::Tokens | OperationKernel::Losses => (form, tokens.div_ceil(sequences.max(1)), 0),
            OperationKernel::Sums => (plain, sequences + 1, 0),
            _ => (plain, 0, vocab),
        };
        let element = if vocab == 0 { DeviceDtype::F32 } else { element };
        Self { kernel, structure, form, threads: batch::threads_for(walked), vocab, element }
    }

    /// The kernel for `target`, written for one token and one sequence. Its rows [fit](takes_one_pass) where it is the one that must.
    pub fn write(self, target: PtxTarget) -> BatchKernel {
        let Self { kernel, structure, form, threads, vocab, element } = self;
        let row = [1, 1, vocab];
        let local = LocalLogits { shape: row, least: vocab };
        match kernel {
            OperationKernel::Count => batch::count(target, structure, form, vocab, threads),
            OperationKernel::Tokens => batch::tokens(target, structure, form, threads),
            OperationKernel::Losses => super::losses::losses(target, structure, form, threads),
            OperationKernel::Sums => batch::sums(target, structure, threads),
            OperationKernel::OnePass => {
                let Ok(cut) = cut(row, element, target) else { panic!("checked: it fits") };
                per_row(one_pass::one_pass(structure, row, element, cut, OnePassOutput::Statistics))
            }
            OperationKernel::Statistics => per_row(two_pass::statistics(target, structure, local, element)),
            OperationKernel::Dlogits(cotangents) => {
                per_row(two_pass::dlogits(target, structure, local, element, Factors::Record(cotangents)))
            }
            OperationKernel::Multiply => per_row(two_pass::multiply_dlogits(target, row, element)),
        }
    }
}

/// A kernel that was written for one row: its ids, its arrays of the shape `[1, 1, …]` and its grid grow with the tokens.
fn per_row(ptx: PtxKernel) -> BatchKernel {
    let per = |parameter: &Parameter| {
        if parameter.name == "ids" || matches!(parameter.shape[..], [1, 1, _]) {
            BatchExtent::Token
        } else {
            BatchExtent::Batch
        }
    };
    let arrays = ptx.parameters.iter().map(per).collect();
    BatchKernel { ptx, arrays, grid: BatchExtent::Token }
}
