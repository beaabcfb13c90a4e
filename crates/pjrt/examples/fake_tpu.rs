//! A PJRT plugin that says it is a TPU and keeps the program it is given to compile. All else is done by the CPU plugin that
//! `ASSAY_FAKE_TPU_PLUGIN` names; the program goes to the file that `ASSAY_FAKE_TPU_PROGRAM` does. For tests alone: where a tile kernel
//! is a kernel the CPU plugin refuses it, after it was kept. It creates a client with no option, as no TPU's plugin knows those of a CPU's;
//! Structs to which arguments point must be longer than those of C API 0.54, as those of a later one may be.
//! `ASSAY_FAKE_TPU_PLATFORM=cpu` makes it a CPU plugin that does not either, and `cuda`
//! with a kind of GPU in `ASSAY_FAKE_TPU_KIND` a GPU's. With `ASSAY_FAKE_TPU_LAYOUT=columns` it says that arrays of
//! three dimensions which it is sent lie column by column, as libtpu lays out some that pad less so, and ends the
//! process where a program that expects its first parameter row-major is given one: libtpu refuses it, or reads it
//! wrongly.

#![expect(unsafe_code, reason = "a foreign interface: the C API of PJRT")]

use std::collections::BTreeSet;
use std::env;
use std::ffi::c_char;
use std::fs;
use std::ptr;
use std::slice;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use pjrt_sys::{
    PJRT_Api, PJRT_Buffer_Destroy_Args, PJRT_Buffer_GetMemoryLayout_Args, PJRT_Buffer_MemoryLayout,
    PJRT_Buffer_MemoryLayout_Type_PJRT_Buffer_MemoryLayout_Type_Tiled, PJRT_Buffer_ToHostBuffer_Args,
    PJRT_Client_BufferFromHostBuffer_Args, PJRT_Client_Compile_Args, PJRT_Client_Create_Args,
    PJRT_Client_PlatformName_Args, PJRT_DeviceDescription_Kind_Args, PJRT_Error, PJRT_ExecuteOptions,
    PJRT_LoadedExecutable_Execute_Args, PJRT_NamedValue, PJRT_Program,
};

static PLATFORM: LazyLock<String> =
    LazyLock::new(|| env::var("ASSAY_FAKE_TPU_PLATFORM").unwrap_or_else(|_| "tpu".into()));
static KIND: LazyLock<String> =
    LazyLock::new(|| env::var("ASSAY_FAKE_TPU_KIND").unwrap_or_else(|_| "TPU v6 lite".into()));
static IN_COLUMNS: LazyLock<bool> = LazyLock::new(|| env::var("ASSAY_FAKE_TPU_LAYOUT").is_ok_and(|it| it == "columns"));
/// The minor-to-major order of an array of three dimensions that lies column by column.
static COLUMNS: [i64; 3] = [1, 2, 0];
/// The addresses of the arrays that lie so, and of the programs that expect their first parameter row-major.
static LAID_IN_COLUMNS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
static EXPECTS_ROWS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
const UNKNOWN: &str = "an option that no plugin knows";

/// The CPU plugin's table, and a copy of it whose entries are ours where that is what this is for.
struct Tables {
    real: *const PJRT_Api,
    own: Vec<u64>,
}

// SAFETY: both tables are only read once they are made.
unsafe impl Send for Tables {}
// SAFETY: the same.
unsafe impl Sync for Tables {}

static TABLES: OnceLock<Tables> = OnceLock::new();

fn tables() -> &'static Tables {
    TABLES.get_or_init(|| {
        let path = env::var_os("ASSAY_FAKE_TPU_PLUGIN").expect("ASSAY_FAKE_TPU_PLUGIN names a CPU plugin");
        // SAFETY: loading a PJRT plugin runs its constructors, which is what it is there for.
        let library = Box::leak(Box::new(unsafe { Library::new(path) }.expect("a library")));
        // SAFETY: every plugin exports this function, of this type.
        let get = unsafe { library.get::<unsafe extern "C" fn() -> *const PJRT_Api>(b"GetPjrtApi") }.expect("a plugin");
        // SAFETY: it may be called at any time, and what it returns stays.
        let real = unsafe { get() };
        // SAFETY: a table begins with its own size, and is readable over it.
        let size = unsafe { (*real).struct_size };
        let mut own = vec![0_u64; size.div_ceil(8)];
        // SAFETY: both hold `size` bytes; the copy is aligned as a table of pointers is, and at least as long as the one of C API 0.54.
        unsafe {
            ptr::copy_nonoverlapping(real.cast::<u8>(), own.as_mut_ptr().cast::<u8>(), size);
            let own = &mut *own.as_mut_ptr().cast::<PJRT_Api>();
            own.PJRT_Client_PlatformName = Some(platform_name);
            own.PJRT_DeviceDescription_Kind = Some(kind);
            own.PJRT_Client_Compile = Some(compile);
            own.PJRT_Client_Create = Some(create);
            own.PJRT_LoadedExecutable_Execute = Some(execute);
            own.PJRT_Buffer_ToHostBuffer = Some(to_host);
            own.PJRT_Client_BufferFromHostBuffer = Some(from_host);
            own.PJRT_Buffer_GetMemoryLayout = Some(layout);
            own.PJRT_Buffer_Destroy = Some(destroy);
        }
        Tables { real, own }
    })
}

/// That a struct to which arguments point is as long as one of a later C API, where it has grown.
fn expect_grown(name: &str, given: usize, in_use_here: usize) {
    let expected = in_use_here + size_of::<usize>();
    assert!(given >= expected, "{name} of {given} bytes, expected {expected}: it has grown");
}

/// What a plugin exports.
// SAFETY: the one symbol of this name in a library that links no other plugin.
#[unsafe(no_mangle)]
pub extern "C" fn GetPjrtApi() -> *const PJRT_Api {
    tables().own.as_ptr().cast()
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn platform_name(args: *mut PJRT_Client_PlatformName_Args) -> *mut PJRT_Error {
    // SAFETY: the same.
    let args = unsafe { &mut *args };
    args.platform_name = PLATFORM.as_ptr().cast::<c_char>();
    args.platform_name_size = PLATFORM.len();
    ptr::null_mut()
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn create(args: *mut PJRT_Client_Create_Args) -> *mut PJRT_Error {
    // SAFETY: the same.
    let given = unsafe { &mut *args };
    // An option of a name that no plugin knows is refused in the CPU plugin's words.
    let option;
    if given.num_options > 0 {
        // SAFETY: there is a first one.
        let first = unsafe { *given.create_options };
        expect_grown("PJRT_NamedValue", first.struct_size, size_of::<PJRT_NamedValue>());
        option = PJRT_NamedValue { name: UNKNOWN.as_ptr().cast::<c_char>(), name_size: UNKNOWN.len(), ..first };
        given.create_options = &raw const option;
    }
    // SAFETY: the table is the CPU plugin's own, and the arguments are passed on.
    unsafe { ((*tables().real).PJRT_Client_Create.expect("every plugin creates clients"))(args) }
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn kind(args: *mut PJRT_DeviceDescription_Kind_Args) -> *mut PJRT_Error {
    // SAFETY: the same.
    let args = unsafe { &mut *args };
    args.device_kind = KIND.as_ptr().cast::<c_char>();
    args.device_kind_size = KIND.len();
    ptr::null_mut()
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn compile(args: *mut PJRT_Client_Compile_Args) -> *mut PJRT_Error {
    // SAFETY: the same; a program's code is readable over its size.
    let code = unsafe {
        let program = &*(*args).program;
        expect_grown("PJRT_Program", program.struct_size, size_of::<PJRT_Program>());
        slice::from_raw_parts(program.code.cast::<u8>(), program.code_size)
    };
    let file = env::var_os("ASSAY_FAKE_TPU_PROGRAM").expect("ASSAY_FAKE_TPU_PROGRAM names a file");
    fs::write(file, code).expect("a file that can be written");
    let text = String::from_utf8_lossy(code);
    let first = text.split("%1:").next().and_then(|start| start.split("->").next());
    let expects_rows = first.is_some_and(|first| first.contains("mhlo.layout_mode"));
    // SAFETY: the table is the CPU plugin's own, and the arguments are passed on as they came.
    unsafe {
        let error = ((*tables().real).PJRT_Client_Compile.expect("every plugin compiles"))(args);
        if error.is_null() && expects_rows {
            held(&EXPECTS_ROWS).insert((*args).executable.addr());
        }
        error
    }
}

fn held(addresses: &Mutex<BTreeSet<usize>>) -> MutexGuard<'_, BTreeSet<usize>> {
    addresses.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn from_host(args: *mut PJRT_Client_BufferFromHostBuffer_Args) -> *mut PJRT_Error {
    // SAFETY: the same. The table is the CPU plugin's own, and the arguments are passed on as they came.
    unsafe {
        let error = ((*tables().real).PJRT_Client_BufferFromHostBuffer.expect("every plugin uploads"))(args);
        if error.is_null() && *IN_COLUMNS && (*args).num_dims == COLUMNS.len() {
            held(&LAID_IN_COLUMNS).insert((*args).buffer.addr());
        }
        error
    }
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn layout(args: *mut PJRT_Buffer_GetMemoryLayout_Args) -> *mut PJRT_Error {
    // SAFETY: the same; what is written is read as the tiled layout that it is. The table is the CPU plugin's own.
    unsafe {
        if !held(&LAID_IN_COLUMNS).contains(&(*args).buffer.addr()) {
            return ((*tables().real).PJRT_Buffer_GetMemoryLayout.expect("it knows its layouts"))(args);
        }
        let layout = &mut (*args).layout;
        layout.type_ = PJRT_Buffer_MemoryLayout_Type_PJRT_Buffer_MemoryLayout_Type_Tiled;
        layout.__bindgen_anon_1.tiled.minor_to_major = COLUMNS.as_ptr();
        layout.__bindgen_anon_1.tiled.minor_to_major_size = COLUMNS.len();
    }
    ptr::null_mut()
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn destroy(args: *mut PJRT_Buffer_Destroy_Args) -> *mut PJRT_Error {
    // SAFETY: the same. The table is the CPU plugin's own, and the arguments are passed on as they came.
    unsafe {
        held(&LAID_IN_COLUMNS).remove(&(*args).buffer.addr());
        ((*tables().real).PJRT_Buffer_Destroy.expect("every plugin frees"))(args)
    }
}

/// Whether a program is given logits in another order than it expects.
///
/// # Safety
/// The arguments are those of a call of `PJRT_LoadedExecutable_Execute`.
unsafe fn is_misread(args: &PJRT_LoadedExecutable_Execute_Args) -> bool {
    let in_columns = held(&LAID_IN_COLUMNS);
    // SAFETY: there is a list for each device, of as many arguments as it says.
    let first = |device| unsafe { (**args.argument_lists.add(device)).addr() };
    let given = (0..args.num_devices).any(|device| args.num_args > 0 && in_columns.contains(&first(device)));
    given && held(&EXPECTS_ROWS).contains(&args.executable.addr())
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn execute(args: *mut PJRT_LoadedExecutable_Execute_Args) -> *mut PJRT_Error {
    // SAFETY: the same; options are always given. The table is the CPU plugin's own, and the arguments are passed on as they came.
    unsafe {
        expect_grown("PJRT_ExecuteOptions", (*(*args).options).struct_size, size_of::<PJRT_ExecuteOptions>());
        assert!(!is_misread(&*args), "parameter 0 is expected row-major, and lies column by column");
        ((*tables().real).PJRT_LoadedExecutable_Execute.expect("every plugin executes"))(args)
    }
}

// SAFETY: as of every entry, the caller's arguments are those of this one.
unsafe extern "C" fn to_host(args: *mut PJRT_Buffer_ToHostBuffer_Args) -> *mut PJRT_Error {
    // SAFETY: the same; a layout is always given here. The table is the CPU plugin's own, and the arguments are passed on as they came.
    unsafe {
        let layout = (*(*args).host_layout).struct_size;
        expect_grown("PJRT_Buffer_MemoryLayout", layout, size_of::<PJRT_Buffer_MemoryLayout>());
        ((*tables().real).PJRT_Buffer_ToHostBuffer.expect("every plugin downloads"))(args)
    }
}
