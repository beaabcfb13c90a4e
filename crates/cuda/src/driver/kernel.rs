//! Kernels: assembled by the driver, asked what became of them, and launched.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use assay_core::implementation::AssembledKernel;
use assay_ptx::{ALIGNMENT, Parameter, PtxKernel, Role};

use super::table::{CLUSTER_DIMENSION, LaunchAttribute, LaunchConfig};
use super::timing::CudaEvent;
use super::{BorrowedArray, CudaContext, CudaMemory, CudaStream, CurrentContext, Driver};
use crate::error::CudaError;

/// The shared memory that a launch may have without a request, in bytes.
const PLAIN_SHARED: usize = 48 << 10;

/// The size of the buffer for the assembler's errors, in bytes.
const LOG_BYTES: usize = 8192;

// `CUresult`.
const INVALID_CLUSTER_SIZE: c_int = 912;

// `CUfunction_attribute`.
const MOST_THREADS: c_int = 0;
const STATIC_SHARED_BYTES: c_int = 1;
const LOCAL_BYTES: c_int = 3;
const REGISTERS: c_int = 4;
const PTX_VERSION: c_int = 5;
const BINARY_VERSION: c_int = 6;
const DYNAMIC_SHARED_BYTES: c_int = 8;
const SHARED_CARVEOUT: c_int = 9;

/// The share of a multiprocessor's L1 cache that becomes shared memory, in percent.
const ALL_SHARED: c_int = 100;

// `CUjit_option`.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

/// A kernel that the driver has assembled.
pub struct LoadedKernel {
    context: Arc<CudaContext>,
    module: *mut c_void,
    pub(super) function: *mut c_void,
    kernel: PtxKernel,
    assembled: AssembledKernel,
}

// SAFETY: modules and functions may be used from any thread that the context is current on.
unsafe impl Send for LoadedKernel {}
// SAFETY: as above.
unsafe impl Sync for LoadedKernel {}

impl Drop for LoadedKernel {
    fn drop(&mut self) {
        if let Ok(current) = self.context.enter() {
            // SAFETY: it was loaded in this context, and is unloaded once. Its launches have been waited for.
            unsafe { (current.driver.table.unload)(self.module) };
        }
    }
}

/// A kernel and the arrays of one of its launches, in the order of its parameters. `outputs` lists those that are not over an input.
pub struct KernelCall<'a> {
    /// The kernel that is launched.
    pub kernel: &'a LoadedKernel,
    /// The arrays that it reads.
    pub inputs: Vec<&'a CudaMemory>,
    /// The arrays that it writes, without those that are inputs too.
    pub outputs: Vec<&'a CudaMemory>,
}

impl KernelCall<'_> {
    /// Launches the kernel, and waits until it is done.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`]; [`CudaError::Size`]; [`CudaError::Call`].
    pub fn launch(&self) -> Result<(), CudaError> {
        let Self { kernel, inputs, outputs } = self;
        // Sizes and alignments are checked before anything is enqueued.
        let addresses = kernel.addresses(inputs, outputs)?;
        let current = kernel.context.enter()?;
        let done = CudaEvent::new(current.driver)?;
        // SAFETY: the arrays are as large as the kernel reads and writes and are alive until the launch has been waited for.
        unsafe { kernel.call(&current, kernel.kernel.grid, CudaStream::default_one(), addresses) }?;
        done.record()?;
        done.wait(&kernel.kernel.name)
    }
}

impl CudaContext {
    /// Assembles a kernel for the device.
    ///
    /// # Errors
    /// [`CudaError::Refused`] with the assembler's words; [`CudaError::SharedMemory`]; [`CudaError::NoRoom`]; [`CudaError::Call`].
    pub fn load(self: &Arc<Self>, kernel: PtxKernel) -> Result<LoadedKernel, CudaError> {
        let current = self.enter()?;
        let mut loaded = self.assemble(&current, kernel)?;
        let name = CString::new(loaded.kernel.name.as_str()).expect("a name has no byte 0");
        let what = || format!("find the kernel {}", loaded.kernel.name);
        loaded.function = current.driver.handle(what, |handle| {
            // SAFETY: the name ends in 0, the module is loaded, and the handle is alive over the call.
            unsafe { (current.driver.table.function)(handle, loaded.module, name.as_ptr()) }
        })?;
        // Shared memory must be requested before the driver is asked how many CTAs have room.
        let static_shared = loaded.ask_for_shared_memory(&current)?;
        loaded.assembled = loaded.answers(&current, static_shared);
        // A slice of a device may have no group of multiprocessors that is large enough. An older driver may not know the answer.
        if loaded.assembled.clusters == Some(0) {
            let PtxKernel { name, cluster, .. } = &loaded.kernel;
            let shared = static_shared + loaded.kernel.shared_bytes;
            let (device, kernel, cluster) = (self.device.name.clone(), name.clone(), *cluster);
            return Err(CudaError::NoRoom { device, kernel, cluster, shared });
        }
        Ok(loaded)
    }

    /// Loads the module of a kernel; its function is found later.
    fn assemble(self: &Arc<Self>, current: &CurrentContext, kernel: PtxKernel) -> Result<LoadedKernel, CudaError> {
        let driver = current.driver;
        let text = CString::new(kernel.text.as_str()).expect("PTX has no byte 0");
        // The assembler writes its errors to a buffer that is passed as an option.
        let mut log = [0_u8; LOG_BYTES];
        let mut options = [ERROR_LOG, ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut::<c_void>(LOG_BYTES)];
        let mut module = ptr::null_mut();
        // SAFETY: the text ends in 0; options and values have the length that is passed; all of it, the log and the handle live over the
        // call.
        let status = unsafe {
            (driver.table.load)(
                &raw mut module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        // A lost context has its own error; every other failure is about the text.
        if status == super::INVALID_CONTEXT || status == super::CONTEXT_IS_DESTROYED {
            return Err(driver.failure(status, || format!("load the kernel {}", kernel.name)));
        }
        if status != 0 {
            let [code, message] = driver.words(status);
            let said = CStr::from_bytes_until_nul(&log)
                .map_or_else(|_| String::new(), |log| log.to_string_lossy().trim().into());
            let log = if said.is_empty() { message } else { said };
            return Err(CudaError::Refused {
                device: self.device.name.clone(),
                kernel: kernel.name,
                code,
                log: log.into(),
            });
        }
        let (context, function) = (Arc::clone(self), ptr::null_mut());
        // From here on it is unloaded whatever happens.
        Ok(LoadedKernel { context, module, function, kernel, assembled: AssembledKernel::default() })
    }
}

impl LoadedKernel {
    /// Returns the kernel's text and launch, as they were assembled.
    pub fn kernel(&self) -> &PtxKernel {
        &self.kernel
    }

    /// Returns the figures that the driver has of the assembled kernel.
    pub fn assembled(&self) -> &AssembledKernel {
        &self.assembled
    }

    /// Asks the driver for a figure of the function.
    fn attribute(&self, driver: &Driver, which: c_int) -> Result<c_int, CudaError> {
        driver.number(&format!("ask {} for attribute {which}", self.kernel.name), |number| {
            // SAFETY: the number is alive over the call, the function one of a loaded module.
            unsafe { (driver.table.function_attribute)(number, which, self.function) }
        })
    }

    /// Requests the kernel's shared memory, and returns the bytes of it that are static.
    fn ask_for_shared_memory(&self, current: &CurrentContext) -> Result<u32, CudaError> {
        let (driver, device) = (current.driver, &self.context.device);
        let fixed = u32::try_from(self.attribute(driver, STATIC_SHARED_BYTES)?).unwrap_or(0);
        let dynamic = self.kernel.shared_bytes;
        let given = fixed as usize + dynamic as usize;
        let most = device.shared_bytes_a_cta;
        if given > most {
            let (device, kernel) = (device.name.clone(), self.kernel.name.clone());
            return Err(CudaError::SharedMemory { device, kernel, given, most });
        }
        // SAFETY: the function is one of a loaded module.
        let set = |which, value| unsafe { (driver.table.set_attribute)(self.function, which, value) };
        // More than 48 KiB of shared memory is available only on request.
        if given > PLAIN_SHARED {
            let status = set(DYNAMIC_SHARED_BYTES, dynamic as c_int);
            driver.check(status, || format!("ask for {dynamic} bytes of dynamic shared memory"))?;
        }
        if dynamic > 0 {
            // By itself the driver may leave so much to the cache that fewer CTAs have room together. A wish: none of it is needed.
            let _ = set(SHARED_CARVEOUT, ALL_SHARED);
        }
        Ok(fixed)
    }

    /// Collects the driver's figures of the function. `None` marks a figure that the driver does not know.
    fn answers(&self, current: &CurrentContext, static_shared_bytes: u32) -> AssembledKernel {
        let driver = current.driver;
        let PtxKernel { name, block: [x, y, z], cluster, shared_bytes, .. } = &self.kernel;
        let known = |number: Result<c_int, CudaError>| number.ok().and_then(|number| u32::try_from(number).ok());
        let of = |which| known(self.attribute(driver, which));
        // Occupancy, as the driver computes it for this block and this shared memory.
        let ctas = driver.number("ask how many CTAs have room", |number| {
            let (threads, dynamic) = ((x * y * z) as c_int, *shared_bytes as usize);
            // SAFETY: the number is alive over the call, the function one of a loaded module.
            unsafe { (driver.table.resident_ctas)(number, self.function, threads, dynamic) }
        });
        AssembledKernel {
            name: name.clone(),
            registers: of(REGISTERS),
            local_bytes: of(LOCAL_BYTES),
            static_shared_bytes,
            dynamic_shared_bytes: *shared_bytes,
            most_threads: of(MOST_THREADS),
            ptx_version: of(PTX_VERSION),
            binary_version: of(BINARY_VERSION),
            ctas_a_multiprocessor: known(ctas),
            clusters: if *cluster > 1 { self.resident_clusters(driver) } else { None },
        }
    }

    /// Returns the number of the kernel's clusters that fit on the device at once, if the driver tells.
    fn resident_clusters(&self, driver: &Driver) -> Option<u32> {
        let mut cluster = self.cluster_attribute();
        let config = self.config(self.kernel.grid, CudaStream::default_one(), &mut cluster);
        let mut clusters = 0;
        // SAFETY: the number, the configuration and its attribute are alive over the call, the function is one of a loaded module.
        let status = unsafe { (driver.table.resident_clusters)(&raw mut clusters, self.function, &raw const config) };
        match status {
            0 => u32::try_from(clusters).ok(),
            // That, too, says that there is no room for even one.
            INVALID_CLUSTER_SIZE => Some(0),
            _ => None,
        }
    }

    fn cluster_attribute(&self) -> LaunchAttribute {
        let mut cluster = LaunchAttribute { id: CLUSTER_DIMENSION, padding: 0, value: [0; 16] };
        cluster.value[..3].copy_from_slice(&[self.kernel.cluster, 1, 1]);
        cluster
    }

    fn config(&self, grid: [u32; 3], stream: CudaStream, cluster: &mut LaunchAttribute) -> LaunchConfig {
        LaunchConfig {
            grid,
            block: self.kernel.block,
            shared_bytes: self.kernel.shared_bytes,
            stream: stream.pointer(),
            attributes: ptr::from_mut(cluster),
            // Chips without clusters do not know the attribute.
            attribute_count: c_uint::from(self.kernel.cluster > 1),
        }
    }

    /// Launches `times` as many CTAs as the kernel was written for on borrowed arrays, which are found by the parameters' names, and
    /// returns before it is done: an error on the device is reported to the next call that synchronises. In the order of the parameters, an
    /// array has `counts` times the bytes of its parameter. An output over an input may be a separate array, at the same offset modulo 16
    /// bytes as the input.
    ///
    /// All that a stream that is being captured into a graph refuses was done when the kernel was loaded.
    ///
    /// # Errors
    /// [`CudaError::Rows`]; [`CudaError::Misaligned`]; [`CudaError::Apart`]; [`CudaError::Size`]; [`CudaError::Call`].
    ///
    /// # Panics
    /// If no borrowed array has the name of a parameter.
    pub fn enqueue(
        &self,
        times: usize,
        counts: &[usize],
        stream: CudaStream,
        lent: &[(&str, BorrowedArray)],
    ) -> Result<(), CudaError> {
        let PtxKernel { grid: [of_one, y, z], name, parameters, .. } = &self.kernel;
        // A grid has at most 2³¹ − 1 CTAs along x.
        let most = c_int::MAX as usize / *of_one as usize;
        if times > most {
            return Err(CudaError::Rows { kernel: name.clone(), given: times, most });
        }
        // Parameters find their arrays by name, and each array must have the size that `counts` gives.
        let arrays = parameters.iter().zip(counts).map(|(parameter, count)| {
            let Some((_, array)) = lent.iter().find(|(name, _)| *name == parameter.name) else {
                panic!("{name} is given no {}", parameter.name);
            };
            self.expect(parameter, parameter.bytes() * count, *array)?;
            Ok(array.address)
        });
        let addresses = arrays.collect::<Result<Vec<_>, CudaError>>()?;
        self.expect_together(&addresses)?;
        let current = self.context.enter()?;
        // SAFETY: the borrowed arrays are as large as the kernel reads and writes, and live, with the stream, until it has run.
        unsafe { self.call(&current, [*of_one * times as u32, *y, *z], stream, addresses) }
    }

    /// Launches the kernel on the arrays at these addresses.
    ///
    /// # Safety
    /// There is one for each parameter, as large as the kernel reads and writes with so many CTAs, alive until that has run; `stream` is
    /// the default stream, or another of the context.
    pub(super) unsafe fn call(
        &self,
        current: &CurrentContext,
        grid: [u32; 3],
        stream: CudaStream,
        mut addresses: Vec<u64>,
    ) -> Result<(), CudaError> {
        let driver = current.driver;
        let mut cluster = self.cluster_attribute();
        let config = self.config(grid, stream, &mut cluster);
        // A launch takes a pointer to each argument; each argument is the address of an array.
        let mut arguments: Vec<*mut c_void> =
            addresses.iter_mut().map(|address| ptr::from_mut(address).cast()).collect();
        let (launch, arguments) = (driver.table.launch, arguments.as_mut_ptr());
        // SAFETY: the function is loaded; there is an argument for each of its parameters, to arrays that the caller vouches for;
        // attribute and arguments are alive over the call.
        let status = unsafe { launch(&raw const config, self.function, arguments, ptr::null_mut()) };
        driver.check(status, || format!("launch {}", self.kernel.name))
    }

    /// Checks the arrays and returns their addresses in the order of the parameters.
    pub(super) fn addresses(&self, inputs: &[&CudaMemory], outputs: &[&CudaMemory]) -> Result<Vec<u64>, CudaError> {
        let kernel = &self.kernel;
        let (mut inputs, mut outputs) = (inputs.iter(), outputs.iter());
        let mut arrays: Vec<&CudaMemory> = Vec::new();
        for Parameter { role, .. } in &kernel.parameters {
            // An output over an input has the input's address.
            arrays.push(match role {
                Role::Input => inputs.next().expect("an array for each input"),
                Role::Output { over: None } => outputs.next().expect("an array for each output"),
                Role::Output { over: Some(input) } => arrays[*input],
            });
        }
        assert!(inputs.next().is_none() && outputs.next().is_none(), "no more arrays than {} has", kernel.name);
        for (&&CudaMemory { address, bytes, .. }, parameter) in arrays.iter().zip(&kernel.parameters) {
            self.expect(parameter, parameter.bytes(), BorrowedArray { address, bytes })?;
        }
        Ok(arrays.iter().map(|array| array.address).collect())
    }

    /// Checks that `array` has the size of a parameter, and the alignment that the kernel needs.
    fn expect(&self, parameter: &Parameter, expected: usize, array: BorrowedArray) -> Result<(), CudaError> {
        let (kernel, name) = (|| self.kernel.name.clone(), || parameter.name.clone());
        if array.bytes != expected {
            return Err(CudaError::Size { kernel: kernel(), array: name(), given: array.bytes, expected });
        }
        let (address, alignment) = (array.address, parameter.alignment);
        if !address.is_multiple_of(alignment) {
            return Err(CudaError::Misaligned { kernel: kernel(), array: name(), address, alignment });
        }
        Ok(())
    }

    /// Checks that an output over an input starts at the same offset modulo [`ALIGNMENT`] as the input, because the kernel finds the blocks
    /// of both by the input's address.
    fn expect_together(&self, addresses: &[u64]) -> Result<(), CudaError> {
        for (parameter, &address) in self.kernel.parameters.iter().zip(addresses) {
            let Role::Output { over: Some(input) } = parameter.role else { continue };
            // Both offsets modulo 16 bytes must agree, as the blocks of both arrays start at the same columns.
            let late = [addresses[input], address].map(|address| address % ALIGNMENT);
            if late[0] != late[1] {
                let arrays = [&self.kernel.parameters[input], parameter].map(|parameter| parameter.name.clone());
                return Err(CudaError::Apart { kernel: self.kernel.name.clone(), arrays, late });
            }
        }
        Ok(())
    }
}
