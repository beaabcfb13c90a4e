//! The functions of the driver that are called, by the names that its library exports them under.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// The configuration of a launch, CUDA's `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: *mut c_void,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// An attribute of a launch, CUDA's `CUlaunchAttribute`. Its value is a union of 64 bytes that may contain pointers.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub(super) id: c_int,
    pub(super) padding: c_int,
    pub(super) value: [u32; 16],
}

/// The id of the attribute with the extents of a cluster, `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
pub(super) const CLUSTER_DIMENSION: c_int = 4;

macro_rules! table {
    ($($field:ident $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions, by short names.
        pub(super) struct DriverTable {
            $(
                // SAFETY: who calls it keeps to what CUDA's Driver API Reference says of the function.
                pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,
            )*
        }

        impl DriverTable {
            /// Looks up all functions in `library`.
            ///
            /// # Errors
            /// The first name that it does not export.
            pub(super) fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the symbol's type is fixed by CUDA's Driver API.
                        $field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(|_| $symbol)?,
                    )*
                })
            }
        }
    };
}

table! {
    init "cuInit" (c_uint);
    version "cuDriverGetVersion" (*mut c_int);
    device_count "cuDeviceGetCount" (*mut c_int);
    device "cuDeviceGet" (*mut c_int, c_int);
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    release "cuDevicePrimaryCtxRelease_v2" (c_int);
    push "cuCtxPushCurrent_v2" (*mut c_void);
    pop "cuCtxPopCurrent_v2" (*mut *mut c_void);
    memory_info "cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate "cuMemAlloc_v2" (*mut u64, usize);
    free "cuMemFree_v2" (u64);
    to_device "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    to_host "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    copy "cuMemcpyDtoDAsync_v2" (u64, u64, usize, *mut c_void);
    load "cuModuleLoadDataEx" (*mut *mut c_void, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    unload "cuModuleUnload" (*mut c_void);
    function "cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    function_attribute "cuFuncGetAttribute" (*mut c_int, c_int, *mut c_void);
    set_attribute "cuFuncSetAttribute" (*mut c_void, c_int, c_int);
    resident_ctas "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, *mut c_void, c_int, usize);
    resident_clusters "cuOccupancyMaxActiveClusters" (*mut c_int, *mut c_void, *const LaunchConfig);
    is_capturing "cuStreamIsCapturing" (*mut c_void, *mut c_int);
    launch "cuLaunchKernelEx" (*const LaunchConfig, *mut c_void, *mut *mut c_void, *mut *mut c_void);
    create_event "cuEventCreate" (*mut *mut c_void, c_uint);
    destroy_event "cuEventDestroy_v2" (*mut c_void);
    record "cuEventRecord" (*mut c_void, *mut c_void);
    synchronize "cuEventSynchronize" (*mut c_void);
    elapsed "cuEventElapsedTime" (*mut f32, *mut c_void, *mut c_void);
    error_name "cuGetErrorName" (c_int, *mut *const c_char);
    error_text "cuGetErrorString" (c_int, *mut *const c_char);
}
