//! CUDA's driver: the [`Driver`] is a library, a [`Device`] what it says of one GPU, a [`Context`] what holds its memory and its
//! kernels, [`Memory`] an array there, a [`Loaded`] kernel one that the driver has assembled.
//!
//! Every object keeps alive what it was made from and frees itself, so that any order of drops is right, whatever failed before. Calls
//! go to the device's default stream, one after another, or to a [`Stream`] of somebody else's with arrays that are [`Lent`]; the context
//! is made current around each, and what was current before is so again afterwards. The library stays loaded until the process ends.

// The C API. Each block gives its reason.
#![allow(unsafe_code)]

mod table;

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use assay_core::memory::DeviceMemory;
use assay_ptx::{ALIGNMENT, Parameter, PtxKernel, Role};
use libloading::Library;

use crate::error::CudaError;
use table::{CLUSTER_DIMENSION, LaunchAttribute, LaunchConfig, Table};

/// Names a driver to use instead of the one that the loader finds.
pub const DRIVER_VARIABLE: &str = "ASSAY_CUDA_DRIVER";

/// What the loader looks for.
const LIBRARY: &str = "libcuda.so.1";

/// The oldest driver that takes PTX 8.0.
const OLDEST: c_int = 12_000;

/// Shared memory that a launch may have without asking for more, bytes.
const PLAIN_SHARED: usize = 48 << 10;

/// Bytes of what the assembler says.
const LOG_BYTES: usize = 8192;

// `CUresult`.
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;

// `CUdevice_attribute`.
const MEMORY_CLOCK_RATE: c_int = 36;
const MEMORY_BUS_WIDTH: c_int = 37;
const CAPABILITY: [c_int; 2] = [75, 76];
const SHARED_BYTES_A_CTA: c_int = 97;

// `CUfunction_attribute`.
const STATIC_SHARED_BYTES: c_int = 1;
const DYNAMIC_SHARED_BYTES: c_int = 8;

// `CUjit_option`.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

/// A loaded driver.
pub struct Driver {
    path: PathBuf,
    table: Table,
}

/// The drivers of this process.
static LOADED: Mutex<Vec<&'static Driver>> = Mutex::new(Vec::new());

impl Driver {
    /// The driver that [`DRIVER_VARIABLE`] names, or else the one that the loader finds, loaded and initialised once a process.
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
            .map_err(|error| CudaError::NoDriver { library: path.clone(), reason: error.to_string() })?;
        let table = Table::of(&library).map_err(|symbol| CudaError::NotADriver { library: path.clone(), symbol })?;
        // The table outlives any owner.
        std::mem::forget(library);
        let driver = Self { path, table };
        // SAFETY: it may be called at any time, and again.
        let status = unsafe { (driver.table.init)(0) };
        if status == NO_DEVICE {
            return Err(CudaError::NoDevice { library: driver.path });
        }
        driver.check(status, || "initialise the driver".into())?;
        let given = driver.number("ask for the driver's version", |number| {
            // SAFETY: the number is alive over the call.
            unsafe { (driver.table.version)(number) }
        })?;
        if given < OLDEST {
            return Err(CudaError::Version { library: driver.path, given });
        }
        Ok(driver)
    }

    /// The library, as it was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error in the driver's own words.
    fn failure(&self, status: c_int, what: impl FnOnce() -> String) -> CudaError {
        let mut words = [ptr::null(); 2];
        let [code, message] = &mut words;
        // SAFETY: both pointers are alive over the calls; what they are set to is text that the driver keeps, or null.
        unsafe {
            (self.table.error_name)(status, code);
            (self.table.error_text)(status, message);
        }
        let [code, message] = words.map(|text: *const c_char| {
            if text.is_null() {
                return format!("error {status}");
            }
            // SAFETY: not null: a text that ends in 0 and stays.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        });
        CudaError::Call { what: what(), code, message }
    }

    fn check(&self, status: c_int, what: impl FnOnce() -> String) -> Result<(), CudaError> {
        if status == 0 { Ok(()) } else { Err(self.failure(status, what)) }
    }

    /// A number that a call gives.
    fn number(&self, what: &str, call: impl FnOnce(*mut c_int) -> c_int) -> Result<c_int, CudaError> {
        let mut number = 0;
        self.check(call(&raw mut number), || what.into())?;
        Ok(number)
    }

    /// A handle that a call gives.
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

/// What the driver says of a GPU. Nothing is held there.
#[derive(Clone)]
pub struct Device {
    driver: &'static Driver,
    handle: c_int,
    name: String,
    capability: (i32, i32),
    shared_bytes_a_cta: usize,
    bandwidth: Option<f64>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} (sm_{}{})", self.name, self.capability.0, self.capability.1)
    }
}

impl Device {
    /// The one that `driver` has at `place`, from 0 on.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`]; [`CudaError::NoSuchDevice`]; [`CudaError::Call`].
    pub fn of(driver: &'static Driver, place: usize) -> Result<Self, CudaError> {
        let table = &driver.table;
        let count = driver.number("count devices", |number| {
            // SAFETY: the number is alive over the call.
            unsafe { (table.device_count)(number) }
        })?;
        if count < 1 {
            return Err(CudaError::NoDevice { library: driver.path.clone() });
        }
        let Some(which) = c_int::try_from(place).ok().filter(|&which| which < count) else {
            return Err(CudaError::NoSuchDevice { library: driver.path.clone(), given: place, count });
        };
        let handle = driver.number(&format!("open device {place}"), |number| {
            // SAFETY: the number is alive over the call, and there are more devices than `which`.
            unsafe { (table.device)(number, which) }
        })?;
        let mut name = [0_u8; 256];
        // SAFETY: the driver writes as many bytes as it is told at most, the last of them 0.
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

    /// `NVIDIA H100 80GB HBM3`
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability: `(9, 0)` is `sm_90`.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Shared memory that a CTA may have, static and dynamic, if it asks for it.
    pub fn shared_bytes_a_cta(&self) -> usize {
        self.shared_bytes_a_cta
    }

    /// What its memory gives at most, bytes a second: twice its clock, each time as wide as its bus. `None` where the driver does not
    /// say.
    pub fn bandwidth(&self) -> Option<f64> {
        self.bandwidth
    }

    /// Its primary context, which all users of the device in a process share.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn context(self) -> Result<Arc<Context>, CudaError> {
        let driver = self.driver;
        let handle = driver.handle(
            || format!("open a context on {}", self.name),
            |handle| {
                // SAFETY: the pointer is alive over the call, the device one of the driver's.
                unsafe { (driver.table.retain)(handle, self.handle) }
            },
        )?;
        Ok(Arc::new(Context { device: self, handle }))
    }
}

/// A device's primary context; given back when the last of its objects goes.
pub struct Context {
    device: Device,
    handle: *mut c_void,
}

// SAFETY: a context may be current on several threads, and the calls made here may come from any of them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, by this object; what was made in it is gone, for that keeps it alive.
        unsafe { (self.device.driver.table.release)(self.device.handle) };
    }
}

/// While it lives the context is this thread's current one.
struct Current<'c> {
    driver: &'c Driver,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is alive over the call; the context that is popped was pushed by this thread.
        unsafe { (self.driver.table.pop)(&raw mut popped) };
    }
}

impl Context {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn enter(&self) -> Result<Current<'_>, CudaError> {
        let driver = self.device.driver;
        // SAFETY: the context is alive as long as `self`.
        let status = unsafe { (driver.table.push)(self.handle) };
        driver.check(status, || "make the context current".into())?;
        Ok(Current { driver })
    }

    /// Bytes that are free, and bytes that there are.
    fn free_and_total(&self) -> Result<[usize; 2], CudaError> {
        let current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are alive over the call, in a current context.
        let status = unsafe { (current.driver.table.memory_info)(&raw mut free, &raw mut total) };
        current.driver.check(status, || "ask for free memory".into())?;
        Ok([free, total])
    }

    /// What is in use of the device's memory, by whomever, and how much there is.
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

    /// `bytes` of memory, which hold anything; `what` they are for is said where there are not as many.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Call`].
    pub fn allocate(self: &Arc<Self>, what: &str, bytes: usize) -> Result<Memory, CudaError> {
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
        Ok(Memory { context: Arc::clone(self), address, bytes })
    }

    /// The same with these bytes in it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn upload(self: &Arc<Self>, what: &str, bytes: &[u8]) -> Result<Memory, CudaError> {
        let memory = self.allocate(what, bytes.len())?;
        memory.write(bytes)?;
        Ok(memory)
    }

    /// Has the driver assemble a kernel for the device.
    ///
    /// # Errors
    /// [`CudaError::Refused`] with the assembler's words; [`CudaError::SharedMemory`]; [`CudaError::Call`].
    pub fn load(self: &Arc<Self>, kernel: PtxKernel) -> Result<Loaded, CudaError> {
        let current = self.enter()?;
        let (driver, device) = (current.driver, &self.device.name);
        let text = CString::new(kernel.text.as_str()).expect("PTX has no byte 0");
        let entry = CString::new(kernel.name.as_str()).expect("a name has no byte 0");
        let mut log = [0_u8; LOG_BYTES];
        let mut options = [ERROR_LOG, ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut::<c_void>(LOG_BYTES)];
        let mut module = ptr::null_mut();
        // SAFETY: the text ends in 0; options and values are as many as is said, and they, the log and the handle are alive over the call.
        let status = unsafe {
            (driver.table.load)(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if status != 0 {
            let CudaError::Call { code, message, .. } = driver.failure(status, String::new) else {
                unreachable!("that is what it makes")
            };
            let said = CStr::from_bytes_until_nul(&log)
                .map_or_else(|_| String::new(), |log| log.to_string_lossy().trim().into());
            let log = if said.is_empty() { message } else { said };
            return Err(CudaError::Refused { device: device.clone(), kernel: kernel.name, code, log });
        }
        // From here on it is unloaded whatever happens.
        let mut loaded = Loaded { context: Arc::clone(self), module, function: ptr::null_mut(), kernel };
        let what = || format!("find the kernel {}", loaded.kernel.name);
        let function = driver.handle(what, |handle| {
            // SAFETY: the name ends in 0, the module is loaded, and the handle is alive over the call.
            unsafe { (driver.table.function)(handle, loaded.module, entry.as_ptr()) }
        })?;
        loaded.function = function;
        let fixed = driver.number("ask for static shared memory", |number| {
            // SAFETY: the number is alive over the call, the function one of a loaded module.
            unsafe { (driver.table.function_attribute)(number, STATIC_SHARED_BYTES, function) }
        })?;
        let dynamic = loaded.kernel.shared_bytes;
        let given = usize::try_from(fixed).unwrap_or(0) + dynamic as usize;
        let most = self.device.shared_bytes_a_cta;
        if given > most {
            let (device, kernel) = (device.clone(), loaded.kernel.name.clone());
            return Err(CudaError::SharedMemory { device, kernel, given, most });
        }
        if given > PLAIN_SHARED {
            // SAFETY: the function is one of a loaded module.
            let status = unsafe { (driver.table.set_attribute)(function, DYNAMIC_SHARED_BYTES, dynamic as c_int) };
            driver.check(status, || format!("ask for {dynamic} bytes of dynamic shared memory"))?;
        }
        Ok(loaded)
    }
}

/// An array on a device.
pub struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: it was allocated in this context, and is freed once. Who used it has been waited for.
            unsafe { (current.driver.table.free)(self.address) };
        }
    }
}

impl Memory {
    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn expect_bytes(&self, given: usize) {
        assert_eq!(given, self.bytes, "an array is copied whole");
    }

    /// Puts `bytes` there, as many as it has.
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

    /// Copies it to `bytes`, which are as many.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.expect_bytes(bytes.len());
        let current = self.context.enter()?;
        // SAFETY: both sides hold as many bytes; the host's are written before the call returns.
        let status = unsafe { (current.driver.table.to_host)(bytes.as_mut_ptr().cast(), self.address, bytes.len()) };
        current.driver.check(status, || format!("copy {} bytes from the device", bytes.len()))
    }
}

/// Memory of a device that somebody else holds.
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    address: u64,
    bytes: usize,
}

impl Lent {
    /// `bytes` of memory at `address`.
    ///
    /// # Safety
    /// They are there, on the device whose kernels they are handed to, until the kernel that is then enqueued has run; and nothing else
    /// reads what it writes, or writes what it reads, but in the order of its stream.
    pub unsafe fn new(address: u64, bytes: usize) -> Self {
        Self { address, bytes }
    }
}

/// A stream that somebody else holds.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// A `CUstream`, as the number that it is: 0 is the default one.
    handle: usize,
}

impl Stream {
    /// That of a `CUstream`.
    ///
    /// # Safety
    /// It is one of the primary context of the device whose kernels are enqueued on it, and is there until these have run.
    pub unsafe fn new(handle: usize) -> Self {
        Self { handle }
    }
}

/// A kernel that the driver has assembled.
pub struct Loaded {
    context: Arc<Context>,
    module: *mut c_void,
    function: *mut c_void,
    kernel: PtxKernel,
}

// SAFETY: modules and functions may be used from any thread that the context is current on.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: it was loaded in this context, and is unloaded once. Its launches have been waited for.
            unsafe { (current.driver.table.unload)(self.module) };
        }
    }
}

impl Loaded {
    /// What it is.
    pub fn kernel(&self) -> &PtxKernel {
        &self.kernel
    }

    /// Launches it on `inputs` and on `outputs` that lie over none of them, in order, and waits until it is done; says how long it ran
    /// by the device's own clock.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`]; [`CudaError::Size`]; [`CudaError::Call`].
    pub fn launch(&self, inputs: &[&Memory], outputs: &[&Memory]) -> Result<Duration, CudaError> {
        let addresses = self.addresses(inputs, outputs)?;
        let current = self.context.enter()?;
        let (driver, name) = (current.driver, &self.kernel.name);
        let [before, after] = [Event::new(driver)?, Event::new(driver)?];
        before.record()?;
        // SAFETY: the arrays are as large as the kernel reads and writes and are alive until the launch has been waited for; 0 is the
        // default stream.
        unsafe { self.call(&current, self.kernel.grid, 0, addresses) }?;
        after.record()?;
        after.wait(name)?;
        after.since(&before)
    }

    /// Launches a kernel that was written for one row on `rows` of them, on arrays that are lent under the parameters' names, and returns
    /// before it is done: what goes wrong on the device is said to whoever waits for it. An array of the shape `[1, 1, …]` is then of
    /// `[1, rows, …]`; one that lies over another may have a place of its own.
    ///
    /// # Errors
    /// [`CudaError::Rows`]; [`CudaError::Misaligned`]; [`CudaError::Size`]; [`CudaError::Call`].
    ///
    /// # Panics
    /// Where no array of a parameter's name is lent.
    pub fn enqueue(&self, rows: usize, stream: Stream, lent: &[(&str, Lent)]) -> Result<(), CudaError> {
        let PtxKernel { grid: [of_row, y, z], name, parameters, .. } = &self.kernel;
        let most = c_int::MAX as usize / *of_row as usize;
        if rows > most {
            return Err(CudaError::Rows { kernel: name.clone(), given: rows, most });
        }
        let arrays = parameters.iter().map(|parameter| {
            let Some((_, array)) = lent.iter().find(|(name, _)| *name == parameter.name) else {
                panic!("{name} is given no {}", parameter.name);
            };
            let by_row = matches!(parameter.shape[..], [1, 1, _]);
            self.expect(parameter, parameter.bytes() * if by_row { rows } else { 1 }, *array)?;
            Ok(array.address)
        });
        let addresses = arrays.collect::<Result<Vec<_>, CudaError>>()?;
        let current = self.context.enter()?;
        // SAFETY: the arrays were lent as large as the kernel reads and writes, and arrays and stream until it has run.
        unsafe { self.call(&current, [*of_row * rows as u32, *y, *z], stream.handle, addresses) }
    }

    /// Launches it on the arrays that begin at these addresses.
    ///
    /// # Safety
    /// There is one for each parameter, as large as the kernel reads and writes with so many CTAs, alive until that has run; `stream` is
    /// the default stream, 0, or another of the context.
    unsafe fn call(
        &self,
        current: &Current,
        grid: [u32; 3],
        stream: usize,
        mut addresses: Vec<u64>,
    ) -> Result<(), CudaError> {
        let driver = current.driver;
        let mut cluster = LaunchAttribute { id: CLUSTER_DIMENSION, padding: 0, value: [0; 16] };
        cluster.value[..3].copy_from_slice(&[self.kernel.cluster, 1, 1]);
        let config = LaunchConfig {
            grid,
            block: self.kernel.block,
            shared_bytes: self.kernel.shared_bytes,
            stream: ptr::without_provenance_mut(stream),
            attributes: &raw mut cluster,
            // Chips without clusters do not know the attribute.
            attribute_count: c_uint::from(self.kernel.cluster > 1),
        };
        let mut arguments: Vec<*mut c_void> =
            addresses.iter_mut().map(|address| ptr::from_mut(address).cast()).collect();
        let (launch, arguments) = (driver.table.launch, arguments.as_mut_ptr());
        // SAFETY: the function is loaded; there is an argument for each of its parameters, to arrays that the caller vouches for;
        // attribute and arguments are alive over the call.
        let status = unsafe { launch(&raw const config, self.function, arguments, ptr::null_mut()) };
        driver.check(status, || format!("launch {}", self.kernel.name))
    }

    /// Where the arrays of the parameters begin, after a check.
    fn addresses(&self, inputs: &[&Memory], outputs: &[&Memory]) -> Result<Vec<u64>, CudaError> {
        let kernel = &self.kernel;
        let (mut inputs, mut outputs) = (inputs.iter(), outputs.iter());
        let mut arrays: Vec<&Memory> = Vec::new();
        for Parameter { role, .. } in &kernel.parameters {
            arrays.push(match role {
                Role::Input => inputs.next().expect("an array for each input"),
                Role::Output { over: None } => outputs.next().expect("an array for each output"),
                Role::Output { over: Some(input) } => arrays[*input],
            });
        }
        assert!(inputs.next().is_none() && outputs.next().is_none(), "no more arrays than {} has", kernel.name);
        for (&&Memory { address, bytes, .. }, parameter) in arrays.iter().zip(&kernel.parameters) {
            self.expect(parameter, parameter.bytes(), Lent { address, bytes })?;
        }
        Ok(arrays.iter().map(|array| array.address).collect())
    }

    /// Checks that `array` has as many bytes as the kernel takes of a parameter, and begins where it may.
    fn expect(&self, parameter: &Parameter, expected: usize, array: Lent) -> Result<(), CudaError> {
        let (kernel, name) = (|| self.kernel.name.clone(), || parameter.name.clone());
        if array.bytes != expected {
            return Err(CudaError::Size { kernel: kernel(), array: name(), given: array.bytes, expected });
        }
        if !array.address.is_multiple_of(ALIGNMENT) {
            return Err(CudaError::Misaligned { kernel: kernel(), array: name(), address: array.address });
        }
        Ok(())
    }
}

/// A moment of the device's clock, in the current context.
struct Event<'d> {
    driver: &'d Driver,
    handle: *mut c_void,
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once; one that is still to come is freed when it has.
        unsafe { (self.driver.table.destroy_event)(self.handle) };
    }
}

impl<'d> Event<'d> {
    fn new(driver: &'d Driver) -> Result<Self, CudaError> {
        let handle = driver.handle(
            || "create an event".into(),
            |handle| {
                // SAFETY: the handle is alive over the call, in a current context.
                unsafe { (driver.table.create_event)(handle, 0) }
            },
        )?;
        Ok(Self { driver, handle })
    }

    fn record(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive; null is the default stream.
        let status = unsafe { (self.driver.table.record)(self.handle, ptr::null_mut()) };
        self.driver.check(status, || "record an event".into())
    }

    /// Until it has come. What went wrong on the device since is said here.
    fn wait(&self, kernel: &str) -> Result<(), CudaError> {
        // SAFETY: the event is alive and was recorded.
        let status = unsafe { (self.driver.table.synchronize)(self.handle) };
        self.driver.check(status, || format!("run {kernel}"))
    }

    fn since(&self, before: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events have come, and the number is alive over the call.
        let status = unsafe { (self.driver.table.elapsed)(&raw mut milliseconds, before.handle, self.handle) };
        self.driver.check(status, || "read the device's clock".into())?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}
