//! Kernels for NVIDIA's GPUs, in PTX.
//!
//! They are called with the arrays of the tile kernels of the same names, so that one frame holds both. What a CTA, a warp and a thread do is
//! their own: there are no windows and no grid in sequence.

mod affine;
pub(crate) mod batch;
pub(crate) mod cotangents;
mod folds;
mod logits;
mod losses;
pub(crate) mod meeting;
mod one_pass;
pub(crate) mod operation;
mod row;
mod transform;
pub(crate) mod two_pass;

use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::{PtxKernel, PtxTarget};

pub(crate) use cotangents::Cotangents;
pub(crate) use cotangents::Factors;
use logits::LogitsFormat;
use meeting::MeetingMethod;
use one_pass::OnePassOutput;
use row::RowCut;

/// The error that an extent exceeds what a kernel's memory or grid can hold.
pub(crate) struct CapacityError {
    /// The name of the extent.
    pub(crate) field: &'static str,
    /// The extent that was asked for.
    pub(crate) given: usize,
    /// The largest extent that fits.
    pub(crate) most: usize,
    /// The memory that is too small, and the kernel to use instead.
    pub(crate) room: &'static str,
}

/// Checks that a row of `[1,n,v]` logits fits a cluster's shared memory, and its rows a grid.
pub(crate) fn expect_one_pass_fits(shape: [usize; 3], element: DeviceDtype) -> Result<(), CapacityError> {
    cut(shape, element, PtxTarget::Sm90).map(|_| ())
}

fn cut([_, n, v]: [usize; 3], element: DeviceDtype, target: PtxTarget) -> Result<RowCut, CapacityError> {
    let beyond = |most| CapacityError {
        field: "vocabulary",
        given: v,
        most,
        room: "in a cluster's shared memory; gpu-two-pass takes more",
    };
    let cut = RowCut::for_vocab(target, LogitsFormat::from_dtype(element), v).map_err(beyond)?;
    let most = i32::MAX as usize / cut.cluster as usize;
    let room = "whose clusters a grid holds; gpu-two-pass takes more";
    if n > most { Err(CapacityError { field: "tokens", given: n, most, room }) } else { Ok(cut) }
}

/// [The kernel](mod@one_pass), of logits that [fit](expect_one_pass_fits).
pub(crate) fn one_pass(
    structure: Structure,
    local: [usize; 3],
    element: DeviceDtype,
    target: PtxTarget,
    meeting: MeetingMethod,
) -> PtxKernel {
    let Ok(cut) = cut(local, element, target) else { panic!("checked: it fits") };
    one_pass::one_pass(structure, local, element, cut.meeting_by(meeting), OnePassOutput::Results)
}

/// Writes the one-pass kernel if `target` has clusters and a row fits one.
pub(crate) fn one_pass_if(
    structure: Structure,
    local: [usize; 3],
    element: DeviceDtype,
    target: PtxTarget,
) -> Option<PtxKernel> {
    let cut = cut(local, element, target).ok().filter(|_| target >= PtxTarget::Sm90)?;
    Some(one_pass::one_pass(structure, local, element, cut, OnePassOutput::Results))
}

/// Checks that a row of `[1,n,v]` logits has no more bytes than its offsets count.
pub(crate) fn expect_two_pass_fits([_, _, v]: [usize; 3], element: DeviceDtype) -> Result<(), CapacityError> {
    let most = (1 << 32) / element.size() - 16;
    if v > most { Err(CapacityError { field: "vocabulary", given: v, most, room: "in 2³² bytes" }) } else { Ok(()) }
}
