//! Dense arrays on a device: upload, download, layout, and the events that they wait for.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::mpsc::{self, Sender};
use std::time::Instant;

use pjrt_sys::{
    PJRT_Buffer, PJRT_Buffer_Destroy_Args, PJRT_Buffer_Dimensions_Args, PJRT_Buffer_ElementType_Args,
    PJRT_Buffer_GetMemoryLayout_Args, PJRT_Buffer_MemoryLayout, PJRT_Buffer_MemoryLayout_Tiled,
    PJRT_Buffer_MemoryLayout_Type_PJRT_Buffer_MemoryLayout_Type_Tiled, PJRT_Buffer_ToHostBuffer_Args, PJRT_Buffer_Type,
    PJRT_Buffer_Type_PJRT_Buffer_Type_BF16, PJRT_Buffer_Type_PJRT_Buffer_Type_F16,
    PJRT_Buffer_Type_PJRT_Buffer_Type_F32, PJRT_Buffer_Type_PJRT_Buffer_Type_F64,
    PJRT_Buffer_Type_PJRT_Buffer_Type_PRED, PJRT_Buffer_Type_PJRT_Buffer_Type_S16,
    PJRT_Buffer_Type_PJRT_Buffer_Type_S32, PJRT_Buffer_Type_PJRT_Buffer_Type_S64, PJRT_Buffer_Type_PJRT_Buffer_Type_U8,
    PJRT_Client_BufferFromHostBuffer_Args, PJRT_Error, PJRT_Event, PJRT_Event_Await_Args, PJRT_Event_Destroy_Args,
    PJRT_Event_OnReady_Args, PJRT_HostBufferSemantics_PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes,
};

use super::abi::slice_from;
use super::client::Client;
use super::error::{RuntimeError, check};
use super::plugin::{Plugin, call};
use assay_core::device_dtype::DeviceDtype;

/// A dense array on one device. Freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    client: Client,
    raw: NonNull<PJRT_Buffer>,
}

// SAFETY: PJRT buffers may be used from any thread.
unsafe impl Send for DeviceBuffer {}
// SAFETY: as above.
unsafe impl Sync for DeviceBuffer {}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let mut args = PJRT_Buffer_Destroy_Args::new();
        args.buffer = self.raw.as_ptr();
        // A destructor cannot report an error: a buffer that cannot be freed is leaked.
        let _ = call!(self.client.plugin(), PJRT_Buffer_Destroy, args, "free a buffer");
    }
}

/// Returns PJRT's number for an element type.
fn buffer_type(element: DeviceDtype) -> PJRT_Buffer_Type {
    match element {
        DeviceDtype::F64 => PJRT_Buffer_Type_PJRT_Buffer_Type_F64,
        DeviceDtype::F32 => PJRT_Buffer_Type_PJRT_Buffer_Type_F32,
        DeviceDtype::Bf16 => PJRT_Buffer_Type_PJRT_Buffer_Type_BF16,
        DeviceDtype::F16 => PJRT_Buffer_Type_PJRT_Buffer_Type_F16,
        DeviceDtype::I64 => PJRT_Buffer_Type_PJRT_Buffer_Type_S64,
        DeviceDtype::I32 => PJRT_Buffer_Type_PJRT_Buffer_Type_S32,
        DeviceDtype::I16 => PJRT_Buffer_Type_PJRT_Buffer_Type_S16,
        DeviceDtype::U8 => PJRT_Buffer_Type_PJRT_Buffer_Type_U8,
        DeviceDtype::Pred => PJRT_Buffer_Type_PJRT_Buffer_Type_PRED,
    }
}

/// Returns the bytes of a dense array; `None` if their number overflows.
fn byte_count(element: DeviceDtype, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(element.size(), |bytes, &extent| bytes.checked_mul(extent))
}

/// Waits for an event, frees it, and returns the error that it carries.
pub(super) fn wait(plugin: &Plugin, event: *mut PJRT_Event, what: &str) -> Result<(), RuntimeError> {
    if event.is_null() {
        return Ok(());
    }
    let mut wait = PJRT_Event_Await_Args::new();
    wait.event = event;
    let result = call!(plugin, PJRT_Event_Await, wait, what);
    let mut destroy = PJRT_Event_Destroy_Args::new();
    destroy.event = event;
    result.and(call!(plugin, PJRT_Event_Destroy, destroy, "free an event"))
}

/// The receiver of an event's result, which the plugin calls once.
struct EventWaiter {
    plugin: &'static Plugin,
    what: String,
    tell: Sender<Result<(), RuntimeError>>,
}

// SAFETY: a plugin calls it once, with what it was registered with and an error that is then the callee's.
unsafe extern "C" fn tell(error: *mut PJRT_Error, ready: *mut c_void) {
    // SAFETY: `wait_until` made it of a box, for this one call.
    let EventWaiter { plugin, what, tell } = *unsafe { Box::from_raw(ready.cast::<EventWaiter>()) };
    // SAFETY: the error came from this plugin, and is used nowhere else.
    let result = unsafe { check(plugin.table(), error, || what) };
    // Who waited may have given up.
    let _ = tell.send(result);
}

/// Waits for an event until `deadline`, frees it, and returns the error that it carries. `None` means that it was not ready by then; it is
/// left to the plugin.
pub(super) fn wait_until(
    plugin: &'static Plugin,
    event: *mut PJRT_Event,
    deadline: Instant,
    what: &str,
) -> Option<Result<(), RuntimeError>> {
    if event.is_null() {
        return Some(Ok(()));
    }
    let (tell_it, told) = mpsc::channel();
    // The callback gets a box of its own, as it may run on a thread of the plugin, and after this function has given
    // up.
    let ready = Box::into_raw(Box::new(EventWaiter { plugin, what: what.into(), tell: tell_it }));
    let mut args = PJRT_Event_OnReady_Args::new();
    args.event = event;
    args.callback = Some(tell);
    args.user_arg = ready.cast();
    if let Err(refused) = call!(plugin, PJRT_Event_OnReady, args, what) {
        // SAFETY: what was not registered is not called, so that the box is still this function's.
        drop(unsafe { Box::from_raw(ready) });
        return Some(Err(refused));
    }
    let result = told.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
    let mut destroy = PJRT_Event_Destroy_Args::new();
    destroy.event = event;
    Some(result.and(call!(plugin, PJRT_Event_Destroy, destroy, "free an event")))
}

impl Client {
    /// Copies a dense row-major array to a device, and returns when `bytes` has been read.
    ///
    /// # Errors
    /// [`RuntimeError::Bytes`] where `bytes` does not hold `shape`; [`RuntimeError::Devices`]; the plugin's own error,
    /// such as one of memory.
    pub fn upload(
        &self,
        device: usize,
        element: DeviceDtype,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<DeviceBuffer, RuntimeError> {
        let what = || format!("upload {element} {shape:?} to device {device}");
        let expected = byte_count(element, shape).unwrap_or(usize::MAX);
        // The plugin reads as many bytes as the shape has, whatever the slice holds.
        if bytes.len() != expected {
            let (given, shape) = (bytes.len(), shape.to_vec());
            return Err(RuntimeError::Bytes { what: "upload".into(), given, expected, element, shape });
        }
        let dims: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
        let mut args = PJRT_Client_BufferFromHostBuffer_Args::new();
        args.client = self.raw();
        args.data = bytes.as_ptr().cast();
        args.type_ = buffer_type(element);
        args.dims = dims.as_ptr();
        args.num_dims = dims.len();
        args.host_buffer_semantics = PJRT_HostBufferSemantics_PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
        args.device = self.device(device)?;
        call!(self.plugin(), PJRT_Client_BufferFromHostBuffer, args, what())?;
        let buffer = DeviceBuffer::own(self, args.buffer, &what());
        // The plugin reads `bytes` until this event.
        wait(self.plugin(), args.done_with_host_buffer, &what())?;
        buffer
    }
}

impl DeviceBuffer {
    /// Takes ownership of what the plugin returned.
    pub(super) fn own(client: &Client, raw: *mut PJRT_Buffer, what: &str) -> Result<DeviceBuffer, RuntimeError> {
        let raw = NonNull::new(raw).ok_or_else(|| RuntimeError::Answer {
            what: what.into(),
            given: "null".into(),
            expected: "a buffer".into(),
        })?;
        Ok(DeviceBuffer { client: client.clone(), raw })
    }

    pub(super) fn raw(&self) -> *mut PJRT_Buffer {
        self.raw.as_ptr()
    }

    /// Returns the element type that the plugin reports.
    ///
    /// # Errors
    /// The plugin's own, or [`RuntimeError::Answer`] for a type that this crate has no use for.
    pub fn element(&self) -> Result<DeviceDtype, RuntimeError> {
        let what = "read a buffer's element type";
        let mut args = PJRT_Buffer_ElementType_Args::new();
        args.buffer = self.raw();
        call!(self.client.plugin(), PJRT_Buffer_ElementType, args, what)?;
        DeviceDtype::ALL.into_iter().find(|&element| buffer_type(element) == args.type_).ok_or_else(|| {
            let expected = DeviceDtype::ALL.map(|element| element.to_string()).join(", ");
            RuntimeError::Answer { what: what.into(), given: format!("PJRT type {}", args.type_), expected }
        })
    }

    /// Returns the extents that the plugin reports.
    ///
    /// # Errors
    /// The plugin's own.
    pub fn shape(&self) -> Result<Vec<usize>, RuntimeError> {
        let what = "read a buffer's shape";
        let mut args = PJRT_Buffer_Dimensions_Args::new();
        args.buffer = self.raw();
        call!(self.client.plugin(), PJRT_Buffer_Dimensions, args, what)?;
        // SAFETY: the buffer owns the list.
        let dims = unsafe { slice_from(args.dims, args.num_dims) };
        dims.iter()
            .map(|&extent| {
                let answer = |_| RuntimeError::Answer {
                    what: what.into(),
                    given: format!("{dims:?}"),
                    expected: "extents ≥ 0".into(),
                };
                usize::try_from(extent).map_err(answer)
            })
            .collect()
    }

    /// Whether the array is known to be row-major on its device. `false` if the plugin does not tell: an unnecessary copy costs time, a
    /// missing one fails the run.
    pub fn is_row_major(&self) -> bool {
        let mut args = PJRT_Buffer_GetMemoryLayout_Args::new();
        args.buffer = self.raw();
        // An untiled layout has strides instead of an order of axes.
        let asked = call!(self.client.plugin(), PJRT_Buffer_GetMemoryLayout, args, "read a buffer's layout");
        if asked.is_err() || args.layout.type_ != PJRT_Buffer_MemoryLayout_Type_PJRT_Buffer_MemoryLayout_Type_Tiled {
            return false;
        }
        // SAFETY: the layout is a tiled one, of which this is the member; the buffer owns the list.
        let order = unsafe {
            let tiled = args.layout.__bindgen_anon_1.tiled;
            slice_from(tiled.minor_to_major, tiled.minor_to_major_size)
        };
        order.iter().copied().eq((0..order.len() as i64).rev())
    }

    /// Copies the array into `bytes`, dense and row-major, after checking that it is `element` and `shape`.
    ///
    /// # Errors
    /// [`RuntimeError::Answer`] where the buffer holds another type, shape or size; the plugin's own error, also one
    /// of the computation that was to fill the buffer.
    pub fn download(&self, element: DeviceDtype, shape: &[usize], bytes: &mut [u8]) -> Result<(), RuntimeError> {
        let what = || format!("download {element} {shape:?}");
        let answer = |given: String, expected: String| Err(RuntimeError::Answer { what: what(), given, expected });
        // The plugin would copy whatever the buffer has, so the types are compared first.
        let (own_element, own_shape) = (self.element()?, self.shape()?);
        if (own_element, &own_shape[..]) != (element, shape) {
            return answer(format!("{own_element} {own_shape:?}"), format!("{element} {shape:?}"));
        }
        if Some(bytes.len()) != byte_count(element, shape) {
            let (given, expected) = (bytes.len(), byte_count(element, shape).unwrap_or(usize::MAX));
            return Err(RuntimeError::Bytes { what: what(), given, expected, element, shape: shape.to_vec() });
        }
        // A device may store the array in another order; the layout asks for row-major.
        let minor_to_major: Vec<i64> = (0..shape.len() as i64).rev().collect();
        let mut tiled = PJRT_Buffer_MemoryLayout_Tiled::new();
        tiled.minor_to_major = minor_to_major.as_ptr();
        tiled.minor_to_major_size = minor_to_major.len();
        let mut layout = PJRT_Buffer_MemoryLayout::new();
        layout.type_ = PJRT_Buffer_MemoryLayout_Type_PJRT_Buffer_MemoryLayout_Type_Tiled;
        layout.__bindgen_anon_1.tiled = tiled;

        let mut args = PJRT_Buffer_ToHostBuffer_Args::new();
        args.src = self.raw();
        args.host_layout = &raw mut layout;
        args.dst = ptr::null_mut();
        // Without a destination the plugin says how much it would write.
        call!(self.client.plugin(), PJRT_Buffer_ToHostBuffer, args, what())?;
        if args.dst_size != bytes.len() {
            return answer(format!("{} bytes", args.dst_size), format!("{} bytes", bytes.len()));
        }
        args.dst = bytes.as_mut_ptr().cast();
        call!(self.client.plugin(), PJRT_Buffer_ToHostBuffer, args, what())?;
        // The plugin writes to `bytes` until this event.
        wait(self.client.plugin(), args.event, &what())
    }
}
