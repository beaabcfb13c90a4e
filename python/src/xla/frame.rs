//! XLA's typed foreign function interface, version 0.3: of `xla/ffi/api/c_api.h`, which jaxlib ships, what a handler on the CPU
//! needs. Names and order of fields are the header's.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice, str};

use ndarray::{ArrayView, ArrayViewMut, Dimension, IntoDimension};

use crate::error::words;

/// The version that these structures are of, major and minor.
const VERSION: [c_int; 2] = [0, 3];

/// The kind of extension `XLA_FFI_Extension_Metadata`.
const METADATA: c_int = 1;
/// The stage `XLA_FFI_ExecutionStage_EXECUTE` of a call.
const EXECUTE: c_int = 3;
/// The error code `XLA_FFI_Error_Code_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: c_int = 3;
/// The error code `XLA_FFI_Error_Code_INTERNAL`.
const INTERNAL: c_int = 13;
/// The attribute type `XLA_FFI_AttrType_STRING`.
const STRING: c_int = 4;

/// An error that XLA owns and that is only passed on.
#[repr(C)]
pub(crate) struct Error([u8; 0]);

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extensions: *mut Extension,
    major: c_int,
    minor: c_int,
}

/// The description that a handler fills in when it is registered.
#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
    state_type: i64,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct ErrorArguments {
    struct_size: usize,
    extensions: *mut Extension,
    message: *const c_char,
    code: c_int,
}

/// The first of XLA's own functions; others follow.
#[repr(C)]
struct Api {
    struct_size: usize,
    extensions: *mut Extension,
    version: Version,
    internal: *const c_void,
    /// # Safety
    /// Of arguments whose message is a C string; that is copied.
    create_error: Option<unsafe extern "C" fn(*mut ErrorArguments) -> *mut Error>,
}

/// The structures `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    kinds: *mut c_int,
    each: *mut *mut Buffer,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    kinds: *mut c_int,
    names: *mut *mut Span,
    values: *mut *mut c_void,
}

#[repr(C)]
struct Span {
    text: *const c_char,
    length: usize,
}

/// `XLA_FFI_CallFrame`, without its last field, `future`.
#[repr(C)]
pub(crate) struct Frame {
    struct_size: usize,
    extensions: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

/// The structure `XLA_FFI_Buffer`, a dense row-major array.
#[repr(C)]
pub(crate) struct Buffer {
    struct_size: usize,
    extensions: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    extents: *mut i64,
}

/// An element type, by its number in `XLA_FFI_DataType`.
///
/// # Safety
/// Every pattern of bits is a value, and its size is that type's.
pub(crate) unsafe trait XlaElement {
    const DTYPE: c_int;
    const NAME: &str;
}

macro_rules! elements {
    ($($type:ty, $dtype:literal, $name:literal;)*) => { $(
        // SAFETY: numbers, of which all bits are some; a truth value is read as its byte.
        unsafe impl XlaElement for $type {
            const DTYPE: c_int = $dtype;
            const NAME: &str = $name;
        }
    )* };
}
elements! {
    u8, 1, "bool";
    i32, 4, "i32";
    half::f16, 10, "f16";
    f32, 11, "f32";
    half::bf16, 16, "bf16";
}

impl Buffer {
    pub(crate) fn has<E: XlaElement>(&self) -> bool {
        self.dtype == E::DTYPE
    }

    /// Returns the address of the first element. Two buffers with one address are one array.
    pub(crate) fn address(&self) -> usize {
        self.data as usize
    }

    fn extents<D: Dimension>(&self, name: &str) -> Result<D, String> {
        let rank = usize::try_from(self.rank).unwrap_or(0);
        // SAFETY: XLA gives as many extents as the rank says; of none the pointer is not looked at.
        let extents = if rank == 0 { &[] } else { unsafe { slice::from_raw_parts(self.extents, rank) } };
        let wrong = || format!("`{name}`: got shape {extents:?}, expected {} axes", D::NDIM.unwrap_or(0));
        let mut dim = D::zeros(D::NDIM.filter(|&axes| axes == rank).ok_or_else(wrong)?);
        for (to, &from) in dim.slice_mut().iter_mut().zip(extents) {
            *to = usize::try_from(from).map_err(|_| wrong())?;
        }
        Ok(dim)
    }

    fn pointer<E: XlaElement>(&self, name: &str) -> Result<*mut E, String> {
        if !self.has::<E>() {
            return Err(format!("`{name}`: got element type {} of XLA's, expected {}", self.dtype, E::NAME));
        }
        let pointer = self.data.cast::<E>();
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(format!("`{name}`: got an array at {pointer:p}, expected elements that are aligned"));
        }
        Ok(pointer)
    }

    /// The array `name`, which nothing writes to while it is looked at.
    pub(crate) fn view<E: XlaElement, D: Dimension>(&self, name: &str) -> Result<ArrayView<'_, E, D>, String> {
        let extents: D = self.extents(name)?;
        // SAFETY: the buffer is dense, of that type and those extents, and lives as long as the call; `Call` hands out no view
        // of what is written.
        Ok(unsafe { ArrayView::from_shape_ptr(extents.into_dimension(), self.pointer::<E>(name)?) })
    }
}

/// A result of a call, which only one value may write to.
pub(crate) struct XlaOutput<'f>(&'f Buffer);

impl<'f> XlaOutput<'f> {
    /// The address, as of [`Buffer::address`].
    pub(crate) fn address(&self) -> usize {
        self.0.address()
    }

    /// The array `name`, to be written to. Nothing else may look at it: see [`Call::outputs`].
    pub(crate) fn view<E: XlaElement, D: Dimension>(self, name: &str) -> Result<ArrayViewMut<'f, E, D>, String> {
        let extents: D = self.0.extents(name)?;
        // SAFETY: as of `Buffer::view`; and it is the only `Output` of this result. An argument that XLA laid over it has the
        // same address, and handlers look at such a one through this view alone.
        Ok(unsafe { ArrayViewMut::from_shape_ptr(extents.into_dimension(), self.0.pointer::<E>(name)?) })
    }
}

/// The frame that a handler is called with.
pub(crate) struct Call<'f>(&'f Frame);

impl<'f> Call<'f> {
    fn buffers(of: &'f Buffers, kind: &str) -> Result<Vec<&'f Buffer>, String> {
        let count = usize::try_from(of.size).unwrap_or(0);
        if count == 0 {
            return Ok(vec![]);
        }
        // SAFETY: XLA gives as many kinds as it says.
        let kinds = unsafe { slice::from_raw_parts(of.kinds, count) };
        // SAFETY: and as many buffers.
        let buffers = unsafe { slice::from_raw_parts(of.each, count) };
        if kinds.iter().any(|&kind| kind != 1) {
            return Err(format!("{kind}: got one that is no buffer, expected buffers"));
        }
        // SAFETY: each is a buffer, as its kind says, which lives as long as the call.
        Ok(buffers.iter().map(|&buffer| unsafe { &*buffer }).collect())
    }

    /// The arguments, of which there are `N` and more.
    pub(crate) fn arguments<const N: usize>(&self) -> Result<([&'f Buffer; N], Vec<&'f Buffer>), String> {
        let mut all = Self::buffers(&self.0.arguments, "arguments")?;
        let rest = all.split_off(N.min(all.len()));
        let first = all.try_into().map_err(|all: Vec<_>| format!("arguments: got {}, expected {N}", all.len()))?;
        Ok((first, rest))
    }

    /// The results, of which there are `N`; asked for once a call.
    pub(crate) fn outputs<const N: usize>(&self) -> Result<[XlaOutput<'f>; N], String> {
        let all: Vec<_> = Self::buffers(&self.0.results, "results")?.into_iter().map(XlaOutput).collect();
        all.try_into().map_err(|all: Vec<_>| format!("results: got {}, expected {N}", all.len()))
    }

    /// The text that is attribute `name`.
    pub(crate) fn text(&self, name: &str) -> Result<&'f str, String> {
        let Attributes { size, kinds, names, values, .. } = &self.0.attributes;
        let missing = || format!("attribute `{name}`: not given, expected text");
        for i in 0..usize::try_from(*size).unwrap_or(0) {
            // SAFETY: XLA gives as many kinds, names and values as it says.
            let (kind, of_name, value) = unsafe { (*kinds.add(i), &**names.add(i), *values.add(i)) };
            if of_name.bytes() == name.as_bytes() && kind == STRING {
                // SAFETY: a text is a span, which lives as long as the call.
                let text = unsafe { &*value.cast::<Span>() }.bytes();
                return str::from_utf8(text).map_err(|reason| format!("attribute `{name}`: {reason}"));
            }
        }
        Err(missing())
    }
}

impl Span {
    fn bytes(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: XLA says how many bytes there are.
        unsafe { slice::from_raw_parts(self.text.cast(), self.length) }
    }
}

/// Answers XLA for the handler that `work` is. A panic becomes an error, and so does a runtime of another version.
///
/// # Safety
/// `frame` is what XLA calls a handler with.
pub(crate) unsafe fn answer(frame: *mut Frame, work: fn(&Call) -> Result<(), String>) -> *mut Error {
    // SAFETY: as above.
    let Some(frame) = (unsafe { frame.as_ref() }) else { return ptr::null_mut() };
    // SAFETY: an extension starts with what tells its kind.
    if let Some(extension) = unsafe { frame.extensions.as_ref() }
        && extension.kind == METADATA
    {
        // SAFETY: such an extension has this type, and its metadata are there to be filled in.
        unsafe {
            let metadata = &mut *(*frame.extensions.cast::<MetadataExtension>()).metadata;
            [metadata.version.major, metadata.version.minor] = VERSION;
            (metadata.traits, metadata.state_type) = (0, 0);
        }
        return ptr::null_mut();
    }
    if frame.stage != EXECUTE {
        return ptr::null_mut();
    }
    // SAFETY: a frame that is executed has XLA's functions.
    let api = unsafe { &*frame.api };
    let of_runtime = [api.version.major, api.version.minor];
    let done = if of_runtime[0] != VERSION[0] || of_runtime < VERSION || frame.struct_size < size_of::<Frame>() {
        let [[major, minor], [of_major, of_minor]] = [VERSION, of_runtime];
        let given = format!("got version {of_major}.{of_minor} of XLA's interface");
        Err((INTERNAL, format!("{given}, expected {major}.{minor} or a later {major}.x: another jaxlib")))
    } else {
        match catch_unwind(AssertUnwindSafe(|| work(&Call(frame)))) {
            Ok(done) => done.map_err(|reason| (INVALID_ARGUMENT, reason)),
            Err(panic) => {
                let words = words(panic.as_ref());
                Err((INTERNAL, format!("a defect of grpo-assay's own, please report it: {words}")))
            }
        }
    };
    let (Err((code, reason)), Some(create_error)) = (done, api.create_error) else { return ptr::null_mut() };
    let message = CString::new(reason.replace('\0', " ")).expect("without zeros");
    let mut arguments = ErrorArguments {
        struct_size: size_of::<ErrorArguments>(),
        extensions: ptr::null_mut(),
        message: message.as_ptr(),
        code,
    };
    // SAFETY: the message is a C string, and stays until it has been copied.
    unsafe { create_error(&raw mut arguments) }
}
