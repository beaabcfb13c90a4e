//! The kernels of a framework's operation, enqueued on the framework's stream with the framework's arrays. Nothing is synchronised or
//! copied: see [`assay_programs::operation`].

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use assay_algebra::structure::Structure;
use assay_core::implementation::RunError;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use assay_programs::operation::{BatchExtent, BatchForm, BatchKernel, OperationKernel, OperationText, takes_one_pass};
use assay_programs::{LossProgram, Programs as _, PtxTarget};

use crate::driver::{BorrowedArray, CudaContext, CudaDevice, CudaStream, Driver, LoadedKernel};
use crate::error::CudaError;
use crate::run::{program, written_for};

/// The implementation whose limits the operation shares.
const ID: &str = "gpu-two-pass";

/// A launch of a kernel of the operation.
#[derive(Clone, Copy, Debug)]
pub struct OperationLaunch<'a> {
    /// The kernel of the operation that is launched.
    pub kernel: OperationKernel,
    /// The loss that the operation computes.
    pub spec: &'a LossSpec,
    /// The form of the batch: padded or packed, and its optional arrays.
    pub form: BatchForm,
    /// Tokens of the launch, sequences of the batch, and columns of the logits, which are dense.
    pub extents: [usize; 3],
    /// Dtype of the logits and of dlogits.
    pub dtype: Dtype,
    /// The framework's stream, which belongs to this device.
    pub stream: CudaStream,
    /// The framework's arrays, by the names of the kernel's parameters.
    pub arrays: &'a [(&'a str, BorrowedArray)],
}

/// A device with the kernels that were assembled for it. It keeps the primary context, which a framework's runtime uses as well, and the
/// kernels until the process ends.
pub struct Gpu {
    driver: &'static Driver,
    place: usize,
    program: LossProgram,
    target: PtxTarget,
    context: Arc<CudaContext>,
    assembled: Mutex<Vec<Arc<AssembledOperation>>>,
}

/// An assembled kernel, and how its arrays and its grid grow with the batch.
struct AssembledOperation {
    text: OperationText,
    kernel: LoadedKernel,
    arrays: Vec<BatchExtent>,
    grid: BatchExtent,
}

static GPUS: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

impl Gpu {
    /// Opens the driver's device with the number `place`, from 0.
    ///
    /// # Errors
    /// [`CudaError`] where there is no driver, no such device, or one that the kernels do not run on.
    pub fn at(place: usize) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::load()?;
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpus.iter().find(|gpu| ptr::eq(gpu.driver, driver) && gpu.place == place) {
            return Ok(Arc::clone(gpu));
        }
        let (device, program) = (CudaDevice::new(driver, place)?, program(ID));
        let target = written_for(&device, program, ID)?;
        let context = device.context()?;
        let gpu = Arc::new(Self { driver, place, program, target, context, assembled: Mutex::default() });
        gpus.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Whether the device computes the loss of `spec` on rows of `vocab` logits in one pass.
    pub fn takes_one_pass(&self, spec: &LossSpec, vocab: usize, dtype: Dtype) -> bool {
        takes_one_pass(Structure::from_spec(spec), vocab, dtype.into(), self.target)
    }

    /// Enqueues a kernel without synchronising.
    ///
    /// # Errors
    /// [`RunError`] where the kernel does not do this, an array does not fit, or the driver fails.
    pub fn enqueue(&self, called: OperationLaunch) -> Result<(), RunError> {
        let OperationLaunch { extents: [tokens, sequences, _], stream, arrays, .. } = called;
        let assembled = self.assembled(called)?;
        let count = |per| match per {
            BatchExtent::Batch => 1,
            BatchExtent::Token => tokens,
            BatchExtent::Sequence => sequences,
            BatchExtent::SequenceAndRest => sequences + 1,
        };
        let counts: Vec<usize> = assembled.arrays.iter().map(|&per| count(per)).collect();
        Ok(assembled.kernel.enqueue(count(assembled.grid), &counts, stream, arrays)?)
    }

    /// Returns the kernel, which is assembled at its first use.
    fn assembled(&self, called: OperationLaunch) -> Result<Arc<AssembledOperation>, RunError> {
        let OperationLaunch { kernel, spec, form, extents, dtype, stream, .. } = called;
        let text = OperationText::new(kernel, Structure::from_spec(spec), form, extents, dtype.into());
        let mut assembled = self.assembled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = assembled.iter().find(|found| found.text == text) {
            return Ok(Arc::clone(found));
        }
        let row = Shape { batch: 1, tokens: 1, vocab: extents[2] };
        self.program.supports(spec, row, dtype, 1)?;
        let BatchKernel { ptx, arrays, grid } = text.write(self.target);
        self.context.expect_no_capture(stream, &ptx.name)?;
        let made = Arc::new(AssembledOperation { text, kernel: self.context.load(ptx)?, arrays, grid });
        assembled.push(Arc::clone(&made));
        Ok(made)
    }
}
