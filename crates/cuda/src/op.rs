//! The kernels of `gpu-two-pass` as the halves of a framework's operation, on arrays that it holds, on its stream. Nothing is waited
//! for, and nothing is copied.
//!
//! ```text
//! Half::Statistics   reads logits, writes what the loss of a token is made of
//! Half::Dlogits      reads them once more, and writes dlogits over them or elsewhere
//! ```
//!
//! What lies between, a few numbers a token, is the framework's to compute.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use assay_algebra::structure::{Denominator, Structure};
use assay_core::implementation::RunError;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use assay_programs::{LossProgram, Programs as _, Shaped, Target};

use crate::driver::{Context, Device, Driver, Lent, Loaded, Stream};
use crate::error::CudaError;
use crate::run::{program, written_for};

/// The implementation whose kernels they are.
const ID: &str = "gpu-two-pass";

/// Which half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// `inverse_temperature` or `softmax_numbers`, `columns`, `logits`, `ids`, of some specs `rate`, `column_bias` and `target_bias`; and
    /// `statistics`, which it writes: `[rows,8]` f32.
    Statistics,
    /// The same with `scales`, `[rows,8]` f32, and `dlogits`, which it writes: over the logits or apart from them.
    Dlogits {
        /// Whether the entropy of a token has a derivative though the spec has no bonus.
        entropy: bool,
    },
}

/// What a call is of.
#[derive(Clone, Copy, Debug)]
pub struct Called<'a> {
    /// The half.
    pub kernel: Half,
    /// The loss.
    pub spec: &'a LossSpec,
    /// `[rows, vocab]` of the logits, which are dense.
    pub extents: [usize; 2],
    /// Of the logits and of dlogits.
    pub dtype: Dtype,
    /// The framework's, one of this device's.
    pub stream: Stream,
    /// The arrays, by the names of the kernel's parameters.
    pub arrays: &'a [(&'a str, Lent)],
}

/// A device, and the kernels that were assembled for it. It has the primary context, which a framework's runtime has too, until the
/// process ends; so it has the kernels, one for each transform of logits, dtype and vocabulary.
pub struct Gpu {
    driver: &'static Driver,
    place: usize,
    program: LossProgram,
    target: Target,
    context: Arc<Context>,
    loaded: Mutex<Vec<(Text, Arc<Loaded>)>>,
}

/// What a kernel's text depends on.
#[derive(Clone, Copy, PartialEq)]
struct Text {
    dlogits: bool,
    structure: Structure,
    vocab: usize,
    dtype: Dtype,
}

static GPUS: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

impl Gpu {
    /// The driver's device at `place`, from 0 on.
    ///
    /// # Errors
    /// [`CudaError`] where there is no driver, no such device, or one that the kernels do not run on.
    pub fn at(place: usize) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::load()?;
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpus.iter().find(|gpu| ptr::eq(gpu.driver, driver) && gpu.place == place) {
            return Ok(Arc::clone(gpu));
        }
        let (device, program) = (Device::of(driver, place)?, program(ID));
        let target = written_for(&device, program, ID)?;
        let context = device.context()?;
        let gpu = Arc::new(Self { driver, place, program, target, context, loaded: Mutex::default() });
        gpus.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Enqueues a kernel, and does not wait for it.
    ///
    /// # Errors
    /// [`RunError`] where the kernel does not do this, an array does not fit, or the driver fails.
    pub fn enqueue(&self, called: Called) -> Result<(), RunError> {
        let Called { extents: [rows, _], stream, arrays, .. } = called;
        Ok(self.loaded(called)?.enqueue(rows, stream, arrays)?)
    }

    /// The kernel, assembled at its first use.
    fn loaded(
        &self,
        Called { kernel, spec, extents: [_, vocab], dtype, stream, .. }: Called,
    ) -> Result<Arc<Loaded>, RunError> {
        let row = Shape { batch: 1, tokens: 1, vocab };
        self.program.supports(spec, row, dtype, 1)?;
        let own = Structure::of(spec);
        let entropy_bonus = match kernel {
            Half::Dlogits { entropy } if entropy || own.entropy_bonus.is_some() => Some(Denominator::ONE),
            _ => None,
        };
        let (transform, temperature) = (own.transform, own.temperature);
        // All that the two kernels see of a loss.
        let structure = Structure { transform, temperature, entropy_bonus, ..Structure::of(&LossSpec::default()) };
        let text = Text { dlogits: kernel != Half::Statistics, structure, vocab, dtype };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernel)) = loaded.iter().find(|(other, _)| *other == text) {
            return Ok(Arc::clone(kernel));
        }
        let kernels = self.program.gpu_kernels_for(Shaped { spec, structure }, row, dtype, 1, self.target)?;
        let kernel = kernels.into_iter().nth(usize::from(text.dlogits)).expect("two kernels");
        self.context.expect_no_capture(stream, &kernel.name)?;
        let kernel = Arc::new(self.context.load(kernel)?);
        loaded.push((text, Arc::clone(&kernel)));
        Ok(kernel)
    }
}
