//! [`Array`]: memory of this extension's, lent to Python.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::slice;
use std::sync::Arc;

use ndarray::Dimension;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{Element, dlpack};
use assay::problem::{Dtype, FloatArray};

/// A dense row-major block of memory, and who keeps it.
#[derive(Clone)]
pub(crate) struct Block {
    data: *mut u8,
    shape: Vec<usize>,
    element: Element,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the owner keeps the memory where it is and may be shared itself; what `data` points to is only read here, and written to in
// `refilled` alone, where nobody else has the block.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// The elements of the array that `of` finds in `owner`; `None` where it is not dense and row-major.
    pub(crate) fn lend<O: Send + Sync + 'static, T, D: Dimension>(
        owner: &Arc<O>,
        element: Element,
        of: impl FnOnce(&O) -> &ndarray::Array<T, D>,
    ) -> Option<Self> {
        Self::within(owner, element, of(owner))
    }

    /// Finds the elements of an array of floats in `owner`; `None` if it is not dense and row-major.
    pub(crate) fn floats<O: Send + Sync + 'static, D: Dimension>(
        owner: &Arc<O>,
        of: impl FnOnce(&O) -> &FloatArray<D>,
    ) -> Option<Self> {
        let float = Element::Float;
        match of(owner) {
            FloatArray::F64(array) => Self::within(owner, float(Dtype::F64), array),
            FloatArray::F32(array) => Self::within(owner, float(Dtype::F32), array),
            FloatArray::Bf16(array) => Self::within(owner, float(Dtype::Bf16), array),
            FloatArray::F16(array) => Self::within(owner, float(Dtype::F16), array),
        }
    }

    /// The elements of `array`, which `owner` holds.
    fn within<O: Send + Sync + 'static, T, D: Dimension>(
        owner: &Arc<O>,
        element: Element,
        array: &ndarray::Array<T, D>,
    ) -> Option<Self> {
        debug_assert_eq!(size_of::<T>(), element.size());
        let data = array.as_slice()?.as_ptr().cast_mut().cast();
        Some(Self { data, shape: array.shape().to_vec(), element, owner: Arc::<O>::clone(owner) })
    }

    pub(super) fn data(&self) -> *mut u8 {
        self.data
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn element(&self) -> Element {
        self.element
    }

    fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element.size()
    }

    /// The addresses that it takes.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.data.addr();
        start..start + self.len()
    }

    /// A checksum of its bytes, by which a kernel that writes to its inputs is seen.
    pub(crate) fn checksum(&self) -> u32 {
        // SAFETY: the owner keeps so many bytes there. A kernel of another thread that wrote to them meanwhile would break
        // its promise not to, and change what this number is, not what memory is read.
        crc32c::crc32c(unsafe { slice::from_raw_parts(self.data, self.len()) })
    }

    /// Overwrites this block, a copy, with the bytes of `other`; `None` if somebody else still has it, or it has another form.
    pub(crate) fn refilled(mut self, other: &Self) -> Option<Self> {
        let fits = self.shape == other.shape && self.element == other.element;
        if !fits || Arc::get_mut(&mut self.owner).is_none() {
            return None;
        }
        // SAFETY: both blocks have so many bytes, and are apart, as nobody else has this one, whose owner was made to be written to.
        unsafe { self.data.copy_from_nonoverlapping(other.data, other.len()) };
        Some(self)
    }

    /// A copy of it that may be written to.
    pub(crate) fn copied(&self) -> Self {
        // SAFETY: as in `checksum`.
        let bytes = unsafe { slice::from_raw_parts(self.data, self.len()) };
        // As words, so that every element is aligned.
        let mut words = vec![0_u64; self.len().div_ceil(8)];
        let data = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the words hold as many bytes, and are apart from them.
        unsafe { data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Self { data, shape: self.shape.clone(), element: self.element, owner: Arc::new(words) }
    }
}

/// An array of a problem's. Frameworks take it without a copy: `NumPy` by the buffer protocol (bf16 as its bits, uint16),
/// `PyTorch` and JAX by `DLPack`.
#[pyclass(frozen, module = "assay")]
pub(crate) struct Array {
    block: Block,
    writable: bool,
    /// Extents and strides as the buffer protocol has them, in bytes.
    extents: Box<[isize]>,
    strides: Box<[isize]>,
}

impl Array {
    /// Lends `block`, to be read, or also to be written to.
    pub(crate) fn lend(block: Block, writable: bool) -> Self {
        let mut strides = Vec::new();
        let mut stride = block.element.size();
        for extent in block.shape.iter().rev() {
            strides.push(stride.cast_signed());
            stride *= extent;
        }
        strides.reverse();
        let extents = block.shape.iter().map(|extent| extent.cast_signed()).collect();
        Self { block, writable, extents, strides: strides.into() }
    }
}

#[pymethods]
impl Array {
    /// The extents of the array.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.block.shape)
    }

    /// `f64`, `f32`, `bf16`, `f16`, `i64` or `bool`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.block.element.name()
    }

    /// The number of bytes that the array takes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.block.len()
    }

    /// Whether it may be written to.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    fn __len__(&self) -> usize {
        self.block.shape.first().copied().unwrap_or(0)
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.block.shape.iter().map(usize::to_string).collect();
        format!("<assay.Array [{}] {}>", shape.join(", "), self.dtype())
    }

    /// The array as a `DLPack` capsule: the versioned kind, which says that it is to be read only, where the consumer takes that.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream;
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err(format!("dl_device: got {dl_device:?}, expected the CPU's, (1, 0)")));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if copy == Some(true) {
            return dlpack::capsule(py, self.block.copied(), versioned, true);
        }
        dlpack::capsule(py, self.block.clone(), versioned, self.writable)
    }

    /// Type and number of the device, which is the CPU.
    #[expect(clippy::unused_self, reason = "as the protocol has it")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    /// # Safety
    /// `view` is the interpreter's, to be filled in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Array { block, writable, extents, strides } = slf.get();
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE && !writable {
            return Err(PyBufferError::new_err(
                "got a request to write, expected one to read: inputs are lent read-only",
            ));
        }
        let asked = |flag: c_int| flags & flag == flag;
        // SAFETY: the interpreter's view may be filled in. It holds a reference to this object, which keeps block, extents
        // and strides as they are; `internal` is nobody's.
        unsafe {
            (*view).buf = block.data.cast::<c_void>();
            (*view).len = block.len().cast_signed();
            (*view).readonly = c_int::from(!writable);
            (*view).itemsize = block.element.size().cast_signed();
            (*view).format = ptr::null_mut();
            if asked(ffi::PyBUF_FORMAT) {
                (*view).format = block.element.format().as_ptr().cast_mut();
            }
            (*view).ndim = c_int::try_from(extents.len()).expect("at most three axes");
            (*view).shape = if asked(ffi::PyBUF_ND) { extents.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).strides = if asked(ffi::PyBUF_STRIDES) { strides.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }
}
