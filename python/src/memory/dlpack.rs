//! `DLPack`, versions 0 and 1: its structures, and capsules of them.

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Block, Element};
use assay::problem::Dtype;

/// Device type and number of the CPU.
pub(super) const CPU: (i32, i32) = (1, 0);

/// Memory of the CPU's that a GPU can reach too.
const CUDA_HOST: i32 = 3;
const ROCM_HOST: i32 = 11;

/// Whether a device's memory can be read here.
pub(super) fn on_host(device: i32) -> bool {
    [CPU.0, CUDA_HOST, ROCM_HOST].contains(&device)
}

/// Set in the flags of what may not be written to.
const READ_ONLY: u64 = 1;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// The structure `DLManagedTensor` of `DLPack` 0.
#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    /// # Safety
    /// Called once, by whoever is the last to use the tensor.
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// The structure `DLManagedTensorVersioned` of `DLPack` 1.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    /// # Safety
    /// Called once, by whoever is the last to use the tensor.
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// The memory that the tensor of a capsule points to.
struct Context {
    block: Block,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Context {
    fn new(block: Block) -> Self {
        let shape: Vec<i64> = block.shape().iter().map(|extent| extent.cast_signed() as i64).collect();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self { block, shape, strides }
    }

    fn tensor(&mut self) -> DlTensor {
        let (device_type, device_id) = CPU;
        DlTensor {
            data: self.block.data().cast(),
            device_type,
            device_id,
            ndim: i32::try_from(self.shape.len()).expect("at most three axes"),
            dtype: data_type(self.block.element()),
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

fn data_type(element: Element) -> DataType {
    let code = match element {
        Element::Int64 => 0,
        Element::Float(Dtype::Bf16) => 4,
        Element::Float(_) => 2,
        Element::Bool => 6,
    };
    DataType { code, bits: 8 * element.size() as u8, lanes: 1 }
}

/// The function that the interpreter calls at the end of a capsule.
///
/// # Safety
/// For the interpreter, with a capsule.
type Destructor = unsafe extern "C" fn(*mut ffi::PyObject);

/// A capsule that keeps `block` until its consumer is done with it. The plain kind cannot say whether it may be written to.
pub(super) fn capsule(py: Python<'_>, block: Block, versioned: bool, writable: bool) -> PyResult<Bound<'_, PyAny>> {
    let mut context = Box::new(Context::new(block));
    let tensor = context.tensor();
    let context = Box::into_raw(context).cast();
    let (pointer, name, destructor): (*mut c_void, _, Destructor) = if versioned {
        let flags = if writable { 0 } else { READ_ONLY };
        let held = Versioned { major: 1, minor: 0, context, deleter: Some(delete_versioned), flags, tensor };
        (Box::into_raw(Box::new(held)).cast(), VERSIONED, drop_versioned)
    } else {
        (Box::into_raw(Box::new(Plain { tensor, context, deleter: Some(delete_plain) })).cast(), PLAIN, drop_plain)
    };
    // SAFETY: the pointer is not null, the name lives for ever, and the destructor is the one of that kind. What the call
    // returns is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor))) }
}

/// # Safety
/// `held` comes from [`capsule`], and nobody uses it any more.
unsafe extern "C" fn delete_plain(held: *mut Plain) {
    // SAFETY: both were boxes there. No lock of the interpreter's is needed: a block holds nothing of Python's.
    unsafe { drop(Box::from_raw(Box::from_raw(held).context.cast::<Context>())) };
}

/// # Safety
/// As [`delete_plain`].
unsafe extern "C" fn delete_versioned(held: *mut Versioned) {
    // SAFETY: as there.
    unsafe { drop(Box::from_raw(Box::from_raw(held).context.cast::<Context>())) };
}

/// # Safety
/// For the interpreter, which ends `capsule`. One that was consumed has another name, and is its consumer's.
unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is one, and by its name its pointer is what `capsule` made, not yet deleted.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        }
    }
}

/// # Safety
/// As [`drop_plain`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// The description of an array in another framework's capsule.
pub(super) struct CapsuleArray {
    pub(super) data: *const u8,
    pub(super) shape: Vec<usize>,
    /// The strides in elements; `None` if the array is dense and row-major.
    pub(super) strides: Option<Vec<isize>>,
    /// The code, the bits and the lanes of the `DLPack` dtype.
    pub(super) dtype: (u8, u8, u16),
    pub(super) on_host: bool,
}

/// The most axes that an array may have, as `NumPy`'s.
const MOST_AXES: usize = 64;

/// Whether an array of `shape`, dense without strides, has no more bytes, and no element that is further from another, than addresses
/// count.
fn is_addressable(shape: &[usize], strides: Option<&[isize]>, element: usize) -> bool {
    let most = isize::MAX.unsigned_abs();
    // Views of an array without an element compute the product of its other extents too.
    let count =
        shape.iter().filter(|extent| **extent > 0).try_fold(element, |bytes, &extent| bytes.checked_mul(extent));
    let furthest = strides.map_or(Some(0), |strides| {
        let steps = shape.iter().zip(strides).map(|(extent, stride)| (extent.saturating_sub(1), stride.unsigned_abs()));
        steps
            .map(|(last, stride)| last.max(1).checked_mul(stride)?.checked_mul(element))
            .try_fold(0, |sum: usize, step| sum.checked_add(step?))
    });
    [count, furthest].into_iter().all(|bytes| bytes.is_some_and(|bytes| bytes <= most))
}

/// Reads `capsule`, which keeps what it describes for as long as it lives: it is not consumed.
pub(super) fn read(capsule: &Bound<'_, PyAny>) -> PyResult<CapsuleArray> {
    let pointer = |name: &CStr| {
        // SAFETY: both calls take any object and a string that lives for ever; the second is made of a capsule of that name.
        unsafe {
            let valid = ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 1;
            if valid { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) } else { ptr::null_mut() }
        }
    };
    let (plain, versioned) = (pointer(PLAIN).cast::<Plain>(), pointer(VERSIONED).cast::<Versioned>());
    // SAFETY: a capsule of either name holds that structure by the protocol, alive while the capsule is.
    let tensor = unsafe {
        match (plain.as_ref(), versioned.as_ref()) {
            (Some(plain), _) => &plain.tensor,
            (_, Some(versioned)) if versioned.major == 1 => &versioned.tensor,
            _ => return Err(PyBufferError::new_err("`__dlpack__`: got no capsule of DLPack 0 or 1")),
        }
    };
    let wrong = |field: &str, given: String, expected: &str| {
        Err(PyBufferError::new_err(format!("`__dlpack__`: {field}: got {given}, expected {expected}")))
    };
    let Some(axes) = usize::try_from(tensor.ndim).ok().filter(|axes| *axes <= MOST_AXES) else {
        return wrong("ndim", tensor.ndim.to_string(), &format!("0 to {MOST_AXES}"));
    };
    // Copy shape and strides out of the capsule, so that only the data depends on its lifetime.
    // SAFETY: by the protocol these point to as many numbers as there are axes, or are null.
    let numbers = |pointer: *const i64| unsafe {
        if pointer.is_null() || axes == 0 { None } else { Some(std::slice::from_raw_parts(pointer, axes)) }
    };
    let extents = numbers(tensor.shape).unwrap_or(&[]);
    let shape: Vec<usize> = extents.iter().filter_map(|&extent| usize::try_from(extent).ok()).collect();
    if shape.len() != axes {
        return wrong("shape", format!("{extents:?} for {axes} axes"), "an extent of at least 0 for each");
    }
    let strides: Option<Vec<isize>> =
        numbers(tensor.strides).map(|strides| strides.iter().map(|&stride| stride as isize).collect());
    let DataType { code, bits, lanes } = tensor.dtype;
    // Every offset of an element, in bytes, and the number of all must be addresses: what follows computes with them.
    let element = usize::from(bits).div_ceil(8).max(1) * usize::from(lanes).max(1);
    if !is_addressable(&shape, strides.as_deref(), element) {
        return wrong("shape", format!("{shape:?} and strides {strides:?}"), "an array that fits into memory");
    }
    let Ok(offset) = usize::try_from(tensor.byte_offset) else {
        return wrong("byte_offset", tensor.byte_offset.to_string(), "an address");
    };
    Ok(CapsuleArray {
        data: tensor.data.cast::<u8>().wrapping_add(offset).cast_const(),
        shape,
        strides,
        dtype: (code, bits, lanes),
        on_host: on_host(tensor.device_type),
    })
}
