//! CUDA's driver. A [`Driver`] is the library, a [`CudaDevice`] the properties of one GPU, a [`CudaContext`] the owner of its memory and
//! its kernels, [`CudaMemory`] an array on it, and a [`LoadedKernel`] a kernel that the driver has assembled.
//!
//! Every object keeps alive what it was made from and frees itself, so that any order of drops is right, whatever failed before. Calls
//! go to the device's default stream, one after another, or to a framework's [`CudaStream`] with [`BorrowedArray`]s. The context is made
//! current around each call, and the previous one is restored afterwards. The library stays loaded until the process ends.

// The C API. Each block gives its reason.
#![allow(unsafe_code)]

mod kernel;
mod table;
#[cfg(test)]
mod tests;
mod timing;

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use assay_core::memory::DeviceMemory;
use assay_ptx::PtxTarget;
use libloading::Library;

use crate::error::CudaError;
use table::DriverTable;

pub use kernel::{KernelCall, LoadedKernel};

/// The environment variable that names a driver instead of the one that the loader finds.
pub const DRIVER_VARIABLE: &str = "ASSAY_CUDA_DRIVER";

/// The library that the system's loader is asked for.
const LIBRARY: &str = "libcuda.so.1";

// `CUresult`.
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const CONTEXT_IS_DESTROYED: c_int = 709;
const STREAM_CAPTURE_IMPLICIT: c_int = 906;

// `CUdevice_attribute`.
const MEMORY_CLOCK_RATE: c_int = 36;
const MEMORY_BUS_WIDTH: c_int = 37;
const CAPABILITY: [c_int; 2] = [75, 76];
const SHARED_BYTES_A_CTA: c_int = 97;

/// A driver that was loaded and initialised.
pub struct Driver {
    path: PathBuf,
    table: DriverTable,
    /// The newest CUDA version that the driver supports, as CUDA counts versions: 12040 is 12.4.
    version: c_int,
}

/// The drivers of this process.
static LOADED: Mutex<Vec<&'static Driver>> = Mutex::new(Vec::new());

impl Driver {
    /// Loads the driver that [`DRIVER_VARIABLE`] names, or else the one that the loader finds, and initialises it once a process.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NotADriver`], [`CudaError::Version`], [`CudaError::NoDevice`] where the driver sees none.
    pub fn load() -> Result<&'static Driver, CudaError> {
        let named = env::var_os(DRIVER_VARIABLE).filter(|path| !path.is_empty());
        let path = named.map_or_else(|| PathBuf::from(LIBRARY), PathBuf::from);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = loaded.iter().find(|driver| driver.path == path) {
            return Ok(driver);
        }
        let driver: &Driver = Box::leak(Box::new(Self::load_from(path)?));
        loaded.push(driver);
        drop(loaded);
        Ok(driver)
    }

    fn load_from(path: PathBuf) -> Result<Self, CudaError> {
        // SAFETY: the library's initialisers run; it is NVIDIA's driver, or one that the user has named.
        let library = unsafe { Library::new(&path) }
            .map_err(|error| CudaError::NoDriver { library: path.clone().into(), reason: error.to_string() })?;
        let table = DriverTable::load(&library)
            .map_err(|symbol| CudaError::NotADriver { library: path.clone().into(), symbol })?;
        // The table outlives any owner.
        std::mem::forget(library);
        let mut driver = Self { path, table, version: 0 };
        // SAFETY: it may be called at any time, and again.
        let status = unsafe { (driver.table.init)(0) };
        if status == NO_DEVICE {
            return Err(CudaError::NoDevice { library: driver.path.into() });
        }
        driver.check(status, || "initialise the driver".into())?;
        driver.version = driver.number("ask for the driver's version", |number| {
            // SAFETY: the number is alive over the call.
            unsafe { (driver.table.version)(number) }
        })?;
        driver.expect_version(PtxTarget::Sm80)?;
        Ok(driver)
    }

    /// Checks that the driver supports texts for `target`.
    ///
    /// # Errors
    /// [`CudaError::Version`].
    pub fn expect_version(&self, target: PtxTarget) -> Result<(), CudaError> {
        let given = self.version;
        if given >= target.least_cuda() {
            return Ok(());
        }
        Err(CudaError::Version { library: self.path.clone().into(), given, target })
    }

    /// Returns the library's name or path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the error of a failed call, with the driver's message and the remedy if it is known.
    fn failure(&self, status: c_int, what: impl FnOnce() -> String) -> CudaError {
        let (what, [code, message]) = (what(), self.words(status));
        match status {
            INVALID_CONTEXT | CONTEXT_IS_DESTROYED => CudaError::Context { what, code, message: message.into() },
            _ => CudaError::Call { what, code, message: message.into() },
        }
    }

    /// Returns the driver's name of an error, and its message.
    fn words(&self, status: c_int) -> [String; 2] {
        let mut words = [ptr::null(); 2];
        let [code, message] = &mut words;
        // SAFETY: both pointers are alive over the calls; what they are set to is text that the driver keeps, or null.
        unsafe {
            (self.table.error_name)(status, code);
            (self.table.error_text)(status, message);
        }
        words.map(|text: *const c_char| {
            if text.is_null() {
                return format!("error {status}");
            }
            // SAFETY: not null: a text that ends in 0 and stays.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        })
    }

    fn check(&self, status: c_int, what: impl FnOnce() -> String) -> Result<(), CudaError> {
        if status == 0 { Ok(()) } else { Err(self.failure(status, what)) }
    }

    /// Returns the number that a call writes.
    fn number(&self, what: &str, call: impl FnOnce(*mut c_int) -> c_int) -> Result<c_int, CudaError> {
        let mut number = 0;
        self.check(call(&raw mut number), || what.into())?;
        Ok(number)
    }

    /// Returns the handle that a call writes.
    fn handle(
        &self,
        what: impl FnOnce() -> String,
        call: impl FnOnce(*mut *mut c_void) -> c_int,
    ) -> Result<*mut c_void, CudaError> {
        let mut handle = ptr::null_mut();
        self.check(call(&raw mut handle), what)?;
        Ok(handle)
    }
}

/// The properties of a GPU. It holds no resource of the device.
#[derive(Clone)]
pub struct CudaDevice {
    driver: &'static Driver,
    handle: c_int,
    name: String,
    capability: (i32, i32),
    shared_bytes_a_cta: usize,
    bandwidth: Option<f64>,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} (sm_{}{})", self.name, self.capability.0, self.capability.1)
    }
}

impl CudaDevice {
    /// Opens the device of `driver` with the number `place`, from 0.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`]; [`CudaError::NoSuchDevice`]; [`CudaError::Call`].
    pub fn new(driver: &'static Driver, place: usize) -> Result<Self, CudaError> {
        let table = &driver.table;
        let count = driver.number("count devices", |number| {
            // SAFETY: the number is alive over the call.
            unsafe { (table.device_count)(number) }
        })?;
        if count < 1 {
            return Err(CudaError::NoDevice { library: driver.path.clone().into() });
        }
        let Some(which) = c_int::try_from(place).ok().filter(|&which| which < count) else {
            return Err(CudaError::NoSuchDevice { library: driver.path.clone().into(), given: place, count });
        };
        let handle = driver.number(&format!("open device {place}"), |number| {
            // SAFETY: the number is alive over the call, and there are more devices than `which`.
            unsafe { (table.device)(number, which) }
        })?;
        let mut name = [0_u8; 256];
        // SAFETY: the driver writes at most the number of bytes that is passed, the last of them 0.
        let status = unsafe { (table.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, handle) };
        driver.check(status, || "ask for the device's name".into())?;
        let name = CStr::from_bytes_until_nul(&name)
            .map_or_else(|_| "a GPU".into(), |name| name.to_string_lossy().into_owned());
        let attribute = |which| {
            driver.number(&format!("ask {name} for attribute {which}"), |number| {
                // SAFETY: the number is alive over the call, the handle a device's.
                unsafe { (table.device_attribute)(number, which, handle) }
            })
        };
        let [major, minor] = CAPABILITY.map(attribute);
        let capability = (major?, minor?);
        let shared_bytes_a_cta = usize::try_from(attribute(SHARED_BYTES_A_CTA)?).unwrap_or(0);
        // Newer drivers may say 0, or not know the question any more.
        let [clock_khz, bus_bits] =
            [MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH].map(|which| attribute(which).map_or(0.0, f64::from));
        let bandwidth = 2.0 * clock_khz * 1e3 * bus_bits / 8.0;
        let bandwidth = (bandwidth > 0.0).then_some(bandwidth);
        Ok(Self { driver, handle, name, capability, shared_bytes_a_cta, bandwidth })
    }

    /// Returns the name that CUDA reports, `NVIDIA H100 80GB HBM3`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the driver that the device belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Returns the compute capability: `(9, 0)` is `sm_90`.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Returns the most bytes of shared memory, static and dynamic, that a CTA may ask for.
    pub fn shared_bytes_a_cta(&self) -> usize {
        self.shared_bytes_a_cta
    }

    /// Returns the peak bandwidth of the memory, bytes a second: twice its clock, each time as wide as its bus. `None` if the driver does
    /// not report it.
    pub fn bandwidth(&self) -> Option<f64> {
        self.bandwidth
    }

    /// Opens the primary context, which all users of the device in a process share.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn context(self) -> Result<Arc<CudaContext>, CudaError> {
        let driver = self.driver;
        let handle = driver.handle(
            || format!("open a context on {}", self.name),
            |handle| {
                // SAFETY: the pointer is alive over the call, the device one of the driver's.
                unsafe { (driver.table.retain)(handle, self.handle) }
            },
        )?;
        Ok(Arc::new(CudaContext { device: self, handle }))
    }
}

/// A device's primary context. It is released when the last object in it is dropped.
pub struct CudaContext {
    device: CudaDevice,
    handle: *mut c_void,
}

// SAFETY: a context may be current on several threads, and the calls made here may come from any of them.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // SAFETY: it was retained once, by this object; what was made in it is gone, for that keeps it alive.
        unsafe { (self.device.driver.table.release)(self.device.handle) };
    }
}

/// A guard that keeps the context current on this thread.
struct CurrentContext<'c> {
    driver: &'c Driver,
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is alive over the call; the context that is popped was pushed by this thread.
        unsafe { (self.driver.table.pop)(&raw mut popped) };
    }
}

impl CudaContext {
    /// Returns the device that the context is of.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn enter(&self) -> Result<CurrentContext<'_>, CudaError> {
        let driver = self.device.driver;
        // SAFETY: the context is alive as long as `self`.
        let status = unsafe { (driver.table.push)(self.handle) };
        driver.check(status, || "make the context current".into())?;
        Ok(CurrentContext { driver })
    }

    /// Returns the free bytes and all bytes of the device.
    fn free_and_total(&self) -> Result<[usize; 2], CudaError> {
        let current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are alive over the call, in a current context.
        let status = unsafe { (current.driver.table.memory_info)(&raw mut free, &raw mut total) };
        current.driver.check(status, || "ask for free memory".into())?;
        Ok([free, total])
    }

    /// Returns the memory that all processes use on the device, and its size.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn memory(&self) -> Result<DeviceMemory, CudaError> {
        let [free, total] = self.free_and_total()?;
        Ok(DeviceMemory {
            bytes_in_use: total.saturating_sub(free) as i64,
            bytes_limit: Some(total as i64),
            ..DeviceMemory::default()
        })
    }

    /// Checks that work on `stream` is executed, and not captured into a graph. A graph cannot contain the first use of `kernel`.
    ///
    /// # Errors
    /// [`CudaError::Capturing`]; [`CudaError::Call`].
    pub fn expect_no_capture(&self, stream: CudaStream, kernel: &str) -> Result<(), CudaError> {
        let current = self.enter()?;
        let mut capturing = 0;
        // SAFETY: the stream is one of the context, and the number is alive over the call.
        let status = unsafe { (current.driver.table.is_capturing)(stream.pointer(), &raw mut capturing) };
        // The default stream may not even be asked while another is captured.
        if status == STREAM_CAPTURE_IMPLICIT || (status == 0 && capturing != 0) {
            return Err(CudaError::Capturing { kernel: kernel.into() });
        }
        current.driver.check(status, || "ask whether a stream is captured".into())
    }

    /// Allocates `bytes` of uninitialised memory. An error about full memory says that they are for `what`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Call`].
    pub fn allocate(self: &Arc<Self>, what: &str, bytes: usize) -> Result<CudaMemory, CudaError> {
        let current = self.enter()?;
        let driver = current.driver;
        let mut address = 0;
        // SAFETY: the address is alive over the call, in a current context. No allocation is of 0 bytes.
        let status = unsafe { (driver.table.allocate)(&raw mut address, bytes.max(1)) };
        if status == OUT_OF_MEMORY {
            let [free, total] = self.free_and_total()?;
            let device = self.device.name.clone();
            return Err(CudaError::OutOfMemory { device, what: what.into(), needed: bytes, free, total });
        }
        driver.check(status, || format!("allocate {bytes} bytes for {what}"))?;
        Ok(CudaMemory { context: Arc::clone(self), address, bytes })
    }

    /// Allocates memory and copies `bytes` into it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn upload(self: &Arc<Self>, what: &str, bytes: &[u8]) -> Result<CudaMemory, CudaError> {
        let memory = self.allocate(what, bytes.len())?;
        memory.write(bytes)?;
        Ok(memory)
    }
}

/// An array on a device. It is freed when it is dropped.
pub struct CudaMemory {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: it was allocated in this context, and is freed once. Who used it has been waited for.
            unsafe { (current.driver.table.free)(self.address) };
        }
    }
}

impl CudaMemory {
    /// Returns the size of the array, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn expect_bytes(&self, given: usize) {
        assert_eq!(given, self.bytes, "an array is copied whole");
    }

    /// Copies `bytes`, as many as the array has, to the device.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn write(&self, bytes: &[u8]) -> Result<(), CudaError> {
        self.expect_bytes(bytes.len());
        let current = self.context.enter()?;
        // SAFETY: both sides hold as many bytes; the host's are read before the call returns.
        let status = unsafe { (current.driver.table.to_device)(self.address, bytes.as_ptr().cast(), bytes.len()) };
        current.driver.check(status, || format!("copy {} bytes to the device", bytes.len()))
    }

    /// Copies the whole array to `bytes`, which has the same size.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.expect_bytes(bytes.len());
        self.read_from(0, bytes)
    }

    /// Copies `bytes.len()` bytes of the array, from offset `start`, to `bytes`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// If it has not as many.
    pub fn read_from(&self, start: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let end = start.checked_add(bytes.len());
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes of an array are within it");
        let current = self.context.enter()?;
        // SAFETY: both sides hold as many bytes, as was checked; the host's are written before the call returns.
        let status = unsafe {
            (current.driver.table.to_host)(bytes.as_mut_ptr().cast(), self.address + start as u64, bytes.len())
        };
        current.driver.check(status, || format!("copy {} bytes from the device", bytes.len()))
    }
}

/// An array on a device that another library owns.
#[derive(Clone, Copy, Debug)]
pub struct BorrowedArray {
    address: u64,
    bytes: usize,
}

impl BorrowedArray {
    /// Borrows `bytes` of memory at `address`.
    ///
    /// # Safety
    /// They are there, on the device whose kernels they are handed to, until the kernel that is then enqueued has run; and nothing else
    /// reads what it writes, or writes what it reads, but in the order of its stream.
    pub unsafe fn new(address: u64, bytes: usize) -> Self {
        Self { address, bytes }
    }
}

/// A stream that another library owns.
#[derive(Clone, Copy, Debug)]
pub struct CudaStream {
    /// The address of the `CUstream`; 0 is the default stream.
    handle: usize,
}

impl CudaStream {
    /// Wraps the stream that a `CUstream` is the address of.
    ///
    /// # Safety
    /// It is one of the primary context of the device whose kernels are enqueued on it, and is there until these have run.
    pub unsafe fn new(handle: usize) -> Self {
        Self { handle }
    }

    /// Returns the default stream of the current context.
    fn default_one() -> Self {
        Self { handle: 0 }
    }

    fn pointer(self) -> *mut c_void {
        ptr::without_provenance_mut(self.handle)
    }
}
