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
use assay_ptx::{PtxKernel, Target};

pub(crate) use cotangents::Cotangents;
pub(crate) use cotangents::Factors;
use logits::Logits;
use meeting::Meeting;
use one_pass::Returned;
use row::Cut;

/// What does not fit.
pub(crate) struct Beyond {
    /// An extent.
    pub(crate) field: &'static str,
    /// Its value.
    pub(crate) given: usize,
    /// The most that does.
    pub(crate) most: usize,
    /// Where, and what to use instead.
    pub(crate) room: &'static str,
}

/// Checks that a row of `[1,n,v]` logits fits a cluster's shared memory, and its rows a grid.
pub(crate) fn expect_one_pass_fits(shape: [usize; 3], element: DeviceDtype) -> Result<(), Beyond> {
    cut(shape, element, Target::Sm90).map(|_| ())
}

fn cut([_, n, v]: [usize; 3], element: DeviceDtype, target: Target) -> Result<Cut, Beyond> {
    let beyond = |most| Beyond {
        field: "vocabulary",
        given: v,
        most,
        room: "in a cluster's shared memory; gpu-two-pass takes more",
    };
    let cut = Cut::of(target, Logits::of(element), v).map_err(beyond)?;
    let most = i32::MAX as usize / cut.cluster as usize;
    let room = "whose clusters a grid holds; gpu-two-pass takes more";
    if n > most { Err(Beyond { field: "tokens", given: n, most, room }) } else { Ok(cut) }
}

/// [The kernel](mod@one_pass), of logits that [fit](expect_one_pass_fits).
pub(crate) fn one_pass(
    structure: Structure,
    local: [usize; 3],
    element: DeviceDtype,
    target: Target,
    meeting: Meeting,
) -> PtxKernel {
    let Ok(cut) = cut(local, element, target) else { panic!("checked: it fits") };
    one_pass::one_pass(structure, local, element, cut.meeting_by(meeting), Returned::Results)
}

/// The same where `target` has clusters and a row fits one.
pub(crate) fn one_pass_if(
    structure: Structure,
    local: [usize; 3],
    element: DeviceDtype,
    target: Target,
) -> Option<PtxKernel> {
    let cut = cut(local, element, target).ok().filter(|_| target >= Target::Sm90)?;
    Some(one_pass::one_pass(structure, local, element, cut, Returned::Results))
}

/// Checks that a row of `[1,n,v]` logits has no more bytes than its offsets count.
pub(crate) fn expect_two_pass_fits([_, _, v]: [usize; 3], element: DeviceDtype) -> Result<(), Beyond> {
    let most = (1 << 32) / element.size() - 16;
    if v > most { Err(Beyond { field: "vocabulary", given: v, most, room: "in 2³² bytes" }) } else { Ok(()) }
}
