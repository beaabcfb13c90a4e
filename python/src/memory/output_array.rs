//! [`OutputArray`]: an array of somebody's framework, read where it lies.

use ndarray::{ArrayView, Dimension};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use super::dlpack;
use crate::error;
use assay::problem::{Dtype, FloatView};

/// The arrays that an output may be, in messages.
const ARRAY: &str = "an array of NumPy, PyTorch or JAX, or another with `__dlpack__` or the buffer protocol";
const DTYPES: &str = "dtype f32, bf16, f16 or f64";

/// An array of floats in the host's memory, dense and row-major once that is [expected](OutputArray::expect_dense).
pub(crate) struct OutputArray {
    /// The array, its capsule or its buffer: what keeps the memory.
    _keep: Keep,
    data: *const u8,
    shape: Vec<usize>,
    /// The strides in bytes; `None` if the array is dense and row-major.
    strides: Option<Vec<isize>>,
    dtype: Dtype,
}

#[expect(dead_code, reason = "each is held, not read")]
enum Keep {
    Object(Py<PyAny>),
    Buffer(PyUntypedBuffer),
    Scalar(Box<u64>),
}

// SAFETY: what keeps the memory may be held and dropped on any thread, and the memory is only read.
unsafe impl Send for OutputArray {}
// SAFETY: as above.
unsafe impl Sync for OutputArray {}

/// An array of a framework before its layout is checked.
struct ForeignArray {
    keep: Keep,
    data: *const u8,
    shape: Vec<usize>,
    /// The strides in bytes; `None` if the array is dense and row-major.
    strides: Option<Vec<isize>>,
    /// The dtype, or the name of a dtype that is not a float.
    dtype: Result<Dtype, String>,
}

impl OutputArray {
    /// Reads the output `field` without a copy. An array on a device is first copied to the host by its own framework.
    /// A 16-bit integer is the bits of a bf16 if `bits` is set.
    ///
    /// # Errors
    /// `OutputError` for what is no array, requires a gradient, has another dtype or no memory.
    pub(crate) fn read(field: &str, object: &Bound<'_, PyAny>, bits: bool) -> PyResult<Self> {
        let py = object.py();
        let wrong = |given: String, expected: &str| error::output_error(py, field, given, expected);
        if requires_grad(object) {
            return Err(wrong("a tensor that requires a gradient".into(), "one that does not: `.detach()`"));
        }
        if object.is_instance_of::<PyInt>() {
            let given = format!("{}, an integer of Python", object.repr()?);
            return Err(wrong(given, "a float, or an array of dtype f32, bf16, f16 or f64"));
        }
        // A Python number needs no protocol; anything else is first brought to the host.
        let found = if let Some(found) = number(object) {
            found
        } else {
            let found = on_host(object).and_then(|host| found(&host, bits)).map_err(|reason| {
                let given = object.get_type().qualname().map_or_else(|_| "an object".into(), |name| name.to_string());
                wrong(format!("{given} ({})", reason.value(py)), ARRAY)
            })?;
            found.ok_or_else(|| wrong(format!("{}", object.get_type()), ARRAY))?
        };
        let dtype = found.dtype.map_err(|given| wrong(format!("dtype {given}"), DTYPES))?;
        // A wrapper around other tensors has none, nor has what was freed.
        if found.data.is_null() && !found.shape.contains(&0) {
            let kind = object.get_type().qualname()?;
            return Err(wrong(format!("{kind} without memory of its own, a null pointer"), "a plain array or tensor"));
        }
        if !found.data.addr().is_multiple_of(dtype.size()) {
            return Err(wrong(
                format!("address {:#x}", found.data.addr()),
                "one that is a multiple of an element's size",
            ));
        }
        let strides = found.strides.filter(|strides| !dense(&found.shape, strides, dtype.size()));
        Ok(Self { _keep: found.keep, data: found.data, shape: found.shape, strides, dtype })
    }

    /// Returns the output `field`, which the judge can read only if it is dense: other strides are refused with the call that makes a dense
    /// copy.
    ///
    /// # Errors
    /// `OutputError` naming the strides.
    pub(crate) fn expect_dense(self, py: Python<'_>, field: &str) -> PyResult<Self> {
        let Some(strides) = &self.strides else { return Ok(self) };
        let given = format!("strides of {strides:?} bytes for shape {:?}", self.shape);
        let expected = "a dense row-major array: `.contiguous()`, or `numpy.ascontiguousarray`";
        Err(error::output_error(py, field, given, expected))
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The addresses that it takes.
    pub(crate) fn addresses(&self) -> std::ops::Range<usize> {
        let start = self.data.addr();
        start..start + self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Views the elements in place as an array of `extents`.
    ///
    /// # Panics
    /// Where these are other elements than it has.
    pub(crate) fn view<D: Dimension>(&self, extents: D) -> FloatView<'_, D> {
        assert_eq!(extents.size(), self.shape.iter().product::<usize>(), "extents are compared before");
        assert!(self.strides.is_none(), "strides are looked at before");
        match self.dtype {
            Dtype::F64 => FloatView::F64(self.elements(extents)),
            Dtype::F32 => FloatView::F32(self.elements(extents)),
            Dtype::Bf16 => FloatView::Bf16(self.elements(extents)),
            Dtype::F16 => FloatView::F16(self.elements(extents)),
        }
    }

    fn elements<T, D: Dimension>(&self, extents: D) -> ArrayView<'_, T, D> {
        // SAFETY: `read` has seen so many elements of this dtype there, dense, row-major and aligned, and the keeper lives. Who
        // returned the array is not to write to it while it is judged.
        unsafe { ArrayView::from_shape_ptr(extents, self.data.cast()) }
    }
}

/// Whether an object is a tensor of `PyTorch`'s that requires a gradient.
pub(crate) fn requires_grad(object: &Bound<'_, PyAny>) -> bool {
    let requires = object.getattr_opt(intern!(object.py(), "requires_grad"));
    requires.is_ok_and(|requires| requires.is_some_and(|requires| requires.is_truthy().unwrap_or(false)))
}

/// A number of Python's own, as `loss.item()` is: an f32 where one holds it exactly.
fn number(object: &Bound<'_, PyAny>) -> Option<ForeignArray> {
    let value = object.cast_exact::<pyo3::types::PyFloat>().ok()?.value();
    let narrow = value as f32;
    let mut bytes = [0; 8];
    let dtype = if f64::from(narrow).to_bits() == value.to_bits() || value.is_nan() {
        bytes[..4].copy_from_slice(&narrow.to_ne_bytes());
        Dtype::F32
    } else {
        bytes = value.to_ne_bytes();
        Dtype::F64
    };
    // A word, for its alignment.
    let word = Box::new(u64::from_ne_bytes(bytes));
    let data = (&raw const *word).cast();
    Some(ForeignArray { keep: Keep::Scalar(word), data, shape: Vec::new(), strides: None, dtype: Ok(dtype) })
}

/// The array in the host's memory, computed.
fn on_host<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    // JAX returns before the array is computed: wait, so that its memory holds the result.
    if let Some(wait) = object.getattr_opt(intern!(py, "block_until_ready"))? {
        wait.call0()?;
    }
    let loaded = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    if let Ok(numpy) = loaded.get_item("numpy")
        && object.is_instance(&numpy.getattr(intern!(py, "generic"))?)?
    {
        return numpy.call_method1(intern!(py, "asarray"), (object,));
    }
    // PyTorch may only note that numbers are negated, which their memory does not show.
    if object
        .getattr_opt(intern!(py, "is_neg"))?
        .is_some_and(|is| is.call0().is_ok_and(|is| is.is_truthy().unwrap_or(false)))
    {
        return on_host(&object.call_method0(intern!(py, "resolve_neg"))?);
    }
    // An array on a device is copied by its own framework; an array on the host is used in place.
    let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else { return Ok(object.clone()) };
    let device = device.call0().and_then(|device| device.get_item(0)?.extract::<i32>());
    if device.is_ok_and(dlpack::on_host) {
        return Ok(object.clone());
    }
    match object.getattr_opt(intern!(py, "cpu"))? {
        Some(copied) => copied.call0(),
        None => py.import("numpy")?.call_method1(intern!(py, "asarray"), (object,)),
    }
}

/// Finds the memory and the dtype of an array; `None` for an object that is not an array.
fn found(object: &Bound<'_, PyAny>, bits: bool) -> PyResult<Option<ForeignArray>> {
    let py = object.py();
    // Try NumPy's protocol first, as NumPy cannot export bf16 by DLPack; then DLPack, then the buffer protocol.
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        return from_interface(object, &interface, bits).map(Some);
    }
    if let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? {
        let versions = pyo3::types::PyDict::new(py);
        versions.set_item("max_version", (1, 0))?;
        // Those of before version 1 do not know the argument.
        let old = |error: PyErr| {
            if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) { method.call0() } else { Err(error) }
        };
        let capsule = method.call((), Some(&versions)).or_else(old)?;
        return from_capsule(&capsule, bits).map(Some);
    }
    let Ok(buffer) = PyUntypedBuffer::get(object) else { return Ok(None) };
    let shape = buffer.shape().to_vec();
    let strides = Some(buffer.strides().to_vec());
    let format = buffer.format().to_string_lossy().into_owned();
    let dtype = named(format.trim_start_matches(['@', '=', '<']), bits);
    let data = buffer.buf_ptr().cast::<u8>().cast_const();
    Ok(Some(ForeignArray { keep: Keep::Buffer(buffer), data, shape, strides, dtype }))
}

/// Reads an array by `NumPy`'s protocol, `__array_interface__`.
fn from_interface(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>, bits: bool) -> PyResult<ForeignArray> {
    let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
    let shape: Vec<usize> = interface.get_item("shape")?.extract()?;
    let strides: Option<Vec<isize>> = interface.get_item("strides")?.extract()?;
    let typestr: String = interface.get_item("typestr")?.extract()?;
    let name = object.getattr("dtype").and_then(|dtype| dtype.getattr("name")?.extract::<String>());
    let dtype = match typestr.as_str() {
        "<f8" => Ok(Dtype::F64),
        "<f4" => Ok(Dtype::F32),
        "<f2" => Ok(Dtype::F16),
        "<V2" if name.as_ref().is_ok_and(|name| name == "bfloat16") => Ok(Dtype::Bf16),
        "<u2" if bits => Ok(Dtype::Bf16),
        swapped if swapped.starts_with('>') => Err(format!(
            "{}, with its bytes in big-endian order: `.astype({:?})`",
            name.unwrap_or_default(),
            swapped.replace('>', "<")
        )),
        "|O" => Err("object, an array of Python objects".into()),
        _ => Err(name.unwrap_or(typestr)),
    };
    let data = std::ptr::with_exposed_provenance(address);
    Ok(ForeignArray { keep: Keep::Object(object.clone().unbind()), data, shape, strides, dtype })
}

fn from_capsule(capsule: &Bound<'_, PyAny>, bits: bool) -> PyResult<ForeignArray> {
    let dlpack::CapsuleArray { data, shape, strides, dtype, on_host } = dlpack::read(capsule)?;
    let dtype = match dtype {
        _ if !on_host => Err("of a device's memory".into()),
        (2, 64, 1) => Ok(Dtype::F64),
        (2, 32, 1) => Ok(Dtype::F32),
        (2, 16, 1) => Ok(Dtype::F16),
        (4, 16, 1) => Ok(Dtype::Bf16),
        (1, 16, 1) if bits => Ok(Dtype::Bf16),
        (code, bits, lanes) => Err(match (code, lanes) {
            (0, 1) => format!("int{bits}"),
            (1, 1) => format!("uint{bits}"),
            (5, 1) => format!("complex{bits}"),
            (6, 1) => "bool".into(),
            _ => format!("with the DLPack code {code}, {bits} bits and {lanes} lanes"),
        }),
    };
    let size = dtype.as_ref().map_or(1, |dtype| dtype.size()).cast_signed();
    // DLPack counts strides in elements, NumPy and this type in bytes.
    let strides = strides.map(|strides| strides.iter().map(|stride| stride * size).collect());
    Ok(ForeignArray { keep: Keep::Object(capsule.clone().unbind()), data, shape, strides, dtype })
}

/// A format of the buffer protocol.
fn named(format: &str, bits: bool) -> Result<Dtype, String> {
    match format {
        "d" => Ok(Dtype::F64),
        "f" => Ok(Dtype::F32),
        "e" => Ok(Dtype::F16),
        "H" if bits => Ok(Dtype::Bf16),
        _ => Err(format!("`{format}` in the struct module's notation")),
    }
}

/// Whether elements of `size` bytes lie side by side in row-major order; the stride of a single one does not matter.
fn dense(shape: &[usize], strides: &[isize], size: usize) -> bool {
    let mut expected = size;
    shape.iter().zip(strides).rev().all(|(&extent, &stride)| {
        let fits = extent == 1 || stride == expected.cast_signed();
        expected *= extent;
        fits
    })
}
