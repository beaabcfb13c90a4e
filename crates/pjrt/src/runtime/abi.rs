//! One table of functions for every version of the C API.
//!
//! A plugin checks that each argument struct is at least as long as the one it was built with. The structs only ever
//! grow at their end, and a zero there means *not set*. `pjrt-sys` is built on C API 0.54, so newer plugins refuse its
//! structs. Here the plugin's table is copied and every entry replaced by a function that hands the plugin a longer,
//! zero-filled copy of the struct, and copies the caller's part back; so are structs that arguments point to (programs, options,
//! layouts). That holds for any later version.
//!
//! The module is public for its test alone. Such a function gets no context, so each loaded plugin has a slot and separate functions.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, transmute};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pjrt_sys::{
    PJRT_Api, PJRT_Buffer_ToHostBuffer_Args, PJRT_Client_BufferFromHostBuffer_Args, PJRT_Client_Compile_Args,
    PJRT_Client_Create_Args, PJRT_Compile_Args, PJRT_Error, PJRT_LoadedExecutable_Execute_Args,
    PJRT_TopologyDescription_Create_Args,
};

/// The oldest minor version whose table `pjrt-sys` can read.
pub(super) const OLDEST_MINOR: i32 = 54;

/// The number of plugins that one process may load.
pub(super) const SLOTS: usize = 8;

/// The size of the struct that a plugin is handed. The longest of 0.54 has 200 bytes, and they grow by tens of bytes.
pub const ROOM: usize = 1024;

/// An argument struct followed by zeros up to [`ROOM`] bytes.
#[repr(C, align(16))]
struct Roomy([u8; ROOM]);

// SAFETY: who calls one promises that the pointer is to the argument struct of that very entry.
type PjrtEntry = unsafe extern "C" fn(*mut c_void) -> *mut PJRT_Error;

/// The table that each plugin returned, by its slot.
static TABLES: [AtomicPtr<PJRT_Api>; SLOTS] = [const { AtomicPtr::new(ptr::null_mut()) }; SLOTS];

/// Returns the bytes that a plugin points to; none for a null pointer.
///
/// # Safety
/// `start` is null, or `length` bytes from it are readable for `'a`.
pub(super) unsafe fn bytes_from<'a>(start: *const c_char, length: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { slice_from(start.cast(), length) }
}

/// Returns the elements that a plugin points to; none for a null pointer.
///
/// # Safety
/// `start` is null, or `length` elements from it are readable for `'a`.
pub(super) unsafe fn slice_from<'a, T>(start: *const T, length: usize) -> &'a [T] {
    if start.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(start, length) }
}

/// Calls `call` with a copy of `*args` that is followed by zeros, then copies the caller's part back.
///
/// # Safety
/// `args` points to a struct that begins with its own size and is writable over that size.
pub unsafe fn with_room<R>(args: *mut c_void, call: impl FnOnce(*mut c_void) -> R) -> R {
    let mut roomy = Roomy([0; ROOM]);
    let copy = ptr::from_mut(&mut roomy).cast::<c_void>();
    // SAFETY: both ranges hold `size` bytes, `roomy` is aligned for any field, and the two do not overlap.
    unsafe {
        let size = *args.cast::<usize>();
        assert!(size <= ROOM, "an argument struct of {size} bytes");
        ptr::copy_nonoverlapping(args.cast::<u8>(), copy.cast::<u8>(), size);
        *copy.cast::<usize>() = ROOM;
        let result = call(copy);
        ptr::copy_nonoverlapping(copy.cast::<u8>(), args.cast::<u8>(), size);
        *args.cast::<usize>() = size;
        result
    }
}

/// Calls the entry at byte `OFFSET` of the table in `SLOT` with a longer copy of its arguments.
///
/// # Safety
/// As [`PjrtEntry`].
unsafe extern "C" fn with_room_for<const SLOT: usize, const OFFSET: usize>(args: *mut c_void) -> *mut PJRT_Error {
    let table = TABLES[SLOT].load(Ordering::Acquire);
    // SAFETY: `table_with_room` put a table there before it handed out this function, and only for an entry that the
    // table has. PJRT's argument structs begin with their size.
    unsafe {
        let entry = *table.byte_add(OFFSET).cast::<PjrtEntry>();
        with_room(args, |args| entry(args))
    }
}

/// Calls an entry whose argument struct has, at byte `FIELD`, a pointer to another struct that may have grown, or null. Both structs are
/// copied.
///
/// # Safety
/// As [`PjrtEntry`].
unsafe extern "C" fn with_room_behind<const SLOT: usize, const OFFSET: usize, const FIELD: usize>(
    args: *mut c_void,
) -> *mut PJRT_Error {
    // SAFETY: the entry's argument struct has such a pointer there, to a struct that begins with its own size, and who calls lets it be
    // written. It is put back.
    unsafe {
        let field = args.byte_add(FIELD).cast::<*mut c_void>();
        let nested = *field;
        if nested.is_null() {
            return with_room_for::<SLOT, OFFSET>(args);
        }
        let error = with_room(nested, |roomy| {
            *field = roomy;
            with_room_for::<SLOT, OFFSET>(args)
        });
        *field = nested;
        error
    }
}

/// Calls an entry whose argument struct points to an array of structs, with their count at byte `COUNT`. The plugin alone knows the
/// distance between the elements, so only a single element is copied.
///
/// # Safety
/// As [`PjrtEntry`].
unsafe extern "C" fn with_room_behind_one<
    const SLOT: usize,
    const OFFSET: usize,
    const FIELD: usize,
    const COUNT: usize,
>(
    args: *mut c_void,
) -> *mut PJRT_Error {
    // SAFETY: the entry's argument struct has a count there.
    unsafe {
        if *args.byte_add(COUNT).cast::<usize>() == 1 {
            with_room_behind::<SLOT, OFFSET, FIELD>(args)
        } else {
            with_room_for::<SLOT, OFFSET>(args)
        }
    }
}

/// Replaces the named entries by functions that pass a longer struct.
macro_rules! give_room {
    ($table:ident, $slot:ident: $($entry:ident)*) => {$(
        if $table.$entry.is_some() {
            let entry: PjrtEntry = with_room_for::<$slot, { offset_of!(PJRT_Api, $entry) }>;
            // SAFETY: both are C functions from one pointer to one pointer.
            $table.$entry = unsafe { transmute::<Option<PjrtEntry>, pjrt_sys::$entry>(Some(entry)) };
        }
    )*};
}

/// Replaces entries whose arguments point to structs: `entry: arguments.field`, or `arguments.field of count`.
macro_rules! give_room_behind {
    ($table:ident, $slot:ident: $($entry:ident: $args:ident.$field:ident $(of $count:ident)?;)*) => {$(
        if $table.$entry.is_some() {
            let entry: PjrtEntry = give_room_behind!(@entry $slot, $entry, $args, $field $(, $count)?);
            // SAFETY: both are C functions from one pointer to one pointer.
            $table.$entry = unsafe { transmute::<Option<PjrtEntry>, pjrt_sys::$entry>(Some(entry)) };
        }
    )*};
    (@entry $slot:ident, $entry:ident, $args:ident, $field:ident) => {
        with_room_behind::<$slot, { offset_of!(PJRT_Api, $entry) }, { offset_of!($args, $field) }>
    };
    (@entry $slot:ident, $entry:ident, $args:ident, $field:ident, $count:ident) => {
        with_room_behind_one::<
            $slot, { offset_of!(PJRT_Api, $entry) }, { offset_of!($args, $field) }, { offset_of!($args, $count) },
        >
    };
}

/// Copies `plugin_table` and replaces every entry that takes arguments and may fail.
fn table_with_room<const SLOT: usize>(plugin_table: *const PJRT_Api) -> PJRT_Api {
    TABLES[SLOT].store(plugin_table.cast_mut(), Ordering::Release);
    // SAFETY: `Plugin::load` has checked that the table is at least as long as this struct.
    let mut table = unsafe { *plugin_table };
    give_room!(table, SLOT:
        PJRT_Error_GetCode PJRT_Plugin_Initialize PJRT_Plugin_Attributes
        PJRT_Event_Destroy PJRT_Event_IsReady PJRT_Event_Error PJRT_Event_Await PJRT_Event_OnReady
        PJRT_Client_Destroy PJRT_Client_PlatformName PJRT_Client_ProcessIndex
        PJRT_Client_PlatformVersion PJRT_Client_Devices PJRT_Client_AddressableDevices PJRT_Client_LookupDevice
        PJRT_Client_LookupAddressableDevice PJRT_Client_AddressableMemories
        PJRT_Client_DefaultDeviceAssignment PJRT_Client_TopologyDescription
        PJRT_DeviceDescription_Id PJRT_DeviceDescription_ProcessIndex PJRT_DeviceDescription_Attributes
        PJRT_DeviceDescription_Kind PJRT_DeviceDescription_DebugString PJRT_DeviceDescription_ToString
        PJRT_Device_GetDescription PJRT_Device_IsAddressable PJRT_Device_LocalHardwareId
        PJRT_Device_AddressableMemories PJRT_Device_DefaultMemory PJRT_Device_MemoryStats
        PJRT_Memory_Id PJRT_Memory_Kind PJRT_Memory_DebugString PJRT_Memory_ToString PJRT_Memory_AddressableByDevices
        PJRT_Executable_Destroy PJRT_Executable_Name PJRT_Executable_NumReplicas PJRT_Executable_NumPartitions
        PJRT_Executable_NumOutputs PJRT_Executable_SizeOfGeneratedCodeInBytes PJRT_Executable_GetCostAnalysis
        PJRT_Executable_OutputMemoryKinds PJRT_Executable_OutputElementTypes PJRT_Executable_OutputDimensions
        PJRT_Executable_OptimizedProgram PJRT_Executable_Serialize PJRT_Executable_Fingerprint
        PJRT_Executable_GetCompiledMemoryStats PJRT_Executable_DeserializeAndLoad
        PJRT_LoadedExecutable_Destroy PJRT_LoadedExecutable_GetExecutable PJRT_LoadedExecutable_AddressableDevices
        PJRT_LoadedExecutable_Delete PJRT_LoadedExecutable_IsDeleted PJRT_LoadedExecutable_Fingerprint
        PJRT_Buffer_Destroy PJRT_Buffer_ElementType PJRT_Buffer_Dimensions PJRT_Buffer_UnpaddedDimensions
        PJRT_Buffer_DynamicDimensionIndices PJRT_Buffer_GetMemoryLayout PJRT_Buffer_OnDeviceSizeInBytes
        PJRT_Buffer_Device PJRT_Buffer_Memory PJRT_Buffer_Delete PJRT_Buffer_IsDeleted PJRT_Buffer_CopyToDevice
        PJRT_Buffer_CopyToMemory PJRT_Buffer_IsOnCpu PJRT_Buffer_ReadyEvent
        PJRT_TopologyDescription_Destroy PJRT_TopologyDescription_PlatformName
        PJRT_TopologyDescription_PlatformVersion PJRT_TopologyDescription_GetDeviceDescriptions
        PJRT_TopologyDescription_Serialize PJRT_TopologyDescription_Attributes
    );
    give_room_behind!(table, SLOT:
        PJRT_Client_Create: PJRT_Client_Create_Args.create_options of num_options;
        PJRT_Client_Compile: PJRT_Client_Compile_Args.program;
        PJRT_Client_BufferFromHostBuffer: PJRT_Client_BufferFromHostBuffer_Args.device_layout;
        PJRT_LoadedExecutable_Execute: PJRT_LoadedExecutable_Execute_Args.options;
        PJRT_Buffer_ToHostBuffer: PJRT_Buffer_ToHostBuffer_Args.host_layout;
        PJRT_TopologyDescription_Create: PJRT_TopologyDescription_Create_Args.create_options of num_options;
        PJRT_Compile: PJRT_Compile_Args.program;
    );
    table
}

/// Calls [`table_with_room`] for a slot that is known at run time. Each slot is used once.
pub(super) fn adapt(slot: usize, plugin_table: *const PJRT_Api) -> PJRT_Api {
    let adapt = [
        table_with_room::<0>,
        table_with_room::<1>,
        table_with_room::<2>,
        table_with_room::<3>,
        table_with_room::<4>,
        table_with_room::<5>,
        table_with_room::<6>,
        table_with_room::<7>,
    ];
    const { assert!(SLOTS == 8) };
    adapt[slot](plugin_table)
}
