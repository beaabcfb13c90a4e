//! A `libcuda` without a device: its memory is this machine's, its modules are read and its launches run by the interpreter of PTX, so
//! that grid, cluster, shared memory, arguments and arrays are those that a driver would have been handed. For tests alone.
//!
//! `ASSAY_FAKE_CUDA` holds settings, `name=value` with commas between: `devices`, `capability` (`9.0`, or `9.0/7.5`:
//! of each device), `shared` (bytes a CTA may have), `memory` (bytes), `version` (12040), `clock` (kHz), `refuses`
//! (any text is no PTX), `odd` (arrays begin two bytes late), `fail` (`cuMemAlloc_v2:2`: the second call of that name
//! fails; `cuMemAlloc_v2:2:709`: with that error), `shuffled` (threads run in the order of that seed), `silent` (of a
//! function only its static shared memory is said), `clusters` (that have room on the device together), `capturing`
//! (every stream is captured), `flips` (from the third launch on one bit of the array that is the argument of that
//! number, from 0 on, once the kernel has run). What is called is written to the file that `ASSAY_FAKE_CUDA_RECORD`
//! names, a line a call, `+` what was made and `-` what was given back.
//!
//! Memory of this process's stands for a framework's on the device once it was lent (`fake_cuda_lend`), until it is taken back
//! (`fake_cuda_take_back`); `fake_cuda_set` gives other settings to a process that runs.

#![expect(unsafe_code, reason = "a foreign interface: the C API of CUDA's driver")]
#![allow(non_snake_case, reason = "names of that interface")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::ptr;
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};

use assay_ptx_interpreter::{GlobalArray, GridLaunch, InterpretOptions, PtxModule, ThreadOrder};

// `CUresult`.
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_DEVICE: c_int = 101;
const INVALID_CONTEXT: c_int = 201;
const INVALID_PTX: c_int = 218;
const INVALID_HANDLE: c_int = 400;
const ILLEGAL_ADDRESS: c_int = 700;
const CONTEXT_IS_DESTROYED: c_int = 709;
const CAPTURE_UNSUPPORTED: c_int = 900;
const INVALID_CLUSTER_SIZE: c_int = 912;
const UNKNOWN: c_int = 999;

/// Where the first array lies: nothing of this process.
const FIRST_ADDRESS: u64 = 0x7F00_0000_0000;

/// Shared memory that a launch has without asking.
const PLAIN_SHARED: u32 = 48 << 10;

/// Shared memory and threads of a multiprocessor, and what of the memory every CTA costs.
const OF_A_MULTIPROCESSOR: [c_int; 2] = [228 << 10, 2048];
const SHARED_OF_THE_SYSTEM: c_int = 1 << 10;

/// Milliseconds of the device's clock that a launch and a copy on the device take.
const LAUNCH: f32 = 1.0;
const COPY: f32 = 0.25;

struct Array {
    bytes: Vec<u8>,
    /// Whether anything was ever put there.
    written: bool,
}

struct Loaded {
    module: PtxModule,
    text: String,
    /// What a launch may have of dynamic shared memory.
    dynamic: u32,
}

#[derive(Default)]
struct State {
    /// How often each was called.
    calls: BTreeMap<&'static str, usize>,
    /// How often the context of each device is.
    retained: BTreeMap<usize, usize>,
    arrays: BTreeMap<u64, Array>,
    /// Bytes of the framework's arrays, by where they begin.
    lent: BTreeMap<u64, usize>,
    modules: BTreeMap<usize, Loaded>,
    /// Of each its module and the entry.
    functions: BTreeMap<usize, (usize, String)>,
    /// Milliseconds of the device's clock.
    events: BTreeMap<usize, f32>,
    clock: f32,
    made: usize,
    /// What the interpreter said of a launch, until somebody waits for it.
    fault: Option<CString>,
    said: CString,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
static SETTINGS: LazyLock<RwLock<&'static str>> =
    LazyLock::new(|| RwLock::new(env::var("ASSAY_FAKE_CUDA").unwrap_or_default().leak()));

/// The context of device 0; those of others follow.
const FIRST_CONTEXT: usize = 77;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn setting(name: &str) -> Option<&'static str> {
    let settings = *SETTINGS.read().unwrap_or_else(PoisonError::into_inner);
    settings
        .split(',')
        .find_map(|setting| setting.split_once('=').filter(|(key, _)| *key == name))
        .map(|(_, value)| value)
}

fn number(name: &str, otherwise: u64) -> u64 {
    setting(name).map_or(otherwise, |value| value.parse().expect("a setting that is a number"))
}

fn record(line: &str) {
    let Some(path) = env::var_os("ASSAY_FAKE_CUDA_RECORD") else { return };
    let mut file = OpenOptions::new().create(true).append(true).open(path).expect("a file to record calls in");
    file.write_all(format!("{line}\n").as_bytes()).expect("a file that can be written");
}

type Answer = Result<String, c_int>;

/// Counts and records a call, and answers it.
fn answered(name: &'static str, answer: impl FnOnce(&mut State) -> Answer) -> c_int {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let calls = state.calls.entry(name).or_default();
    *calls += 1;
    let fails = setting("fail").and_then(|fails| fails.strip_prefix(&format!("{name}:{calls}")));
    let error = fails.and_then(|error| match error.strip_prefix(':') {
        Some(error) => error.parse().ok(),
        None => error.is_empty().then_some(UNKNOWN),
    });
    let answer = error.map_or_else(|| answer(&mut state), Err);
    match answer {
        Ok(what) => {
            record(format!("{name} {what}").trim_end());
            0
        }
        Err(status) => {
            record(&format!("{name} failed with {status}"));
            status
        }
    }
}

/// Sets what a pointer of the caller points to.
fn put<T>(to: *mut T, value: T) {
    // SAFETY: CUDA's Driver API asks for a pointer to room for such a value.
    unsafe { to.write(value) };
}

/// The device whose context is current.
fn device() -> usize {
    CURRENT.with_borrow(|current| current.last().map_or(0, |context| context - FIRST_CONTEXT))
}

/// Its compute capability, or the last that the setting names.
fn capability(device: usize) -> (&'static str, &'static str) {
    let all: Vec<&str> = setting("capability").unwrap_or("9.0").split('/').collect();
    all[device.min(all.len() - 1)].split_once('.').expect("a capability")
}

fn in_context() -> Result<(), c_int> {
    if CURRENT.with_borrow(Vec::is_empty) { Err(INVALID_CONTEXT) } else { Ok(()) }
}

/// Refuses what may not be done while a stream is captured into a graph.
fn not_captured() -> Result<(), c_int> {
    if setting("capturing").is_some() { Err(CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

fn handle(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}

impl State {
    fn new_handle(&mut self) -> usize {
        self.made += 1;
        self.made
    }

    fn array(&mut self, address: u64, bytes: usize) -> Result<&mut Array, c_int> {
        self.arrays.get_mut(&address).filter(|array| array.bytes.len() >= bytes).ok_or(INVALID_VALUE)
    }

    /// The clusters of a launch: those that the launch asks for, or else those that the text has.
    fn cluster(&self, config: &Config, function: usize) -> Result<[u32; 3], c_int> {
        let (module, _) = self.functions.get(&function).ok_or(INVALID_HANDLE)?;
        let text = &self.modules.get(module).ok_or(INVALID_HANDLE)?.text;
        let of_text = text.lines().find_map(|line| line.trim().strip_prefix(".reqnctapercluster "));
        let of_text = of_text.map(|axes| {
            let mut axes = axes.split(',').map(|axis| axis.trim().parse().unwrap_or(0));
            [(); 3].map(|()| axes.next().unwrap_or(1))
        });
        let explicit = text.lines().any(|line| line.trim() == ".explicitcluster");
        let of_launch = (config.attribute_count > 0).then(|| {
            // SAFETY: there is one of them at least.
            let attribute = unsafe { &*config.attributes };
            (attribute.id == 4).then(|| [0, 1, 2].map(|axis| attribute.value[axis])).ok_or(INVALID_VALUE)
        });
        let cluster = match (of_launch.transpose()?, of_text) {
            // A launch that is at odds with its text.
            (Some(asked), Some(said)) if asked != said => return Err(INVALID_CLUSTER_SIZE),
            (Some(cluster), _) => cluster,
            (None, Some(cluster)) if explicit => cluster,
            // A device would run this, and nobody would wait for the other CTAs.
            (None, Some(_)) => return Err(INVALID_CLUSTER_SIZE),
            (None, None) if explicit => return Err(INVALID_CLUSTER_SIZE),
            (None, None) => return Ok([1; 3]),
        };
        if capability(device()).0 == "8" {
            return Err(INVALID_VALUE);
        }
        let whole = (0..3).all(|axis| cluster[axis] > 0 && config.grid[axis].is_multiple_of(cluster[axis]));
        if whole { Ok(cluster) } else { Err(INVALID_CLUSTER_SIZE) }
    }

    /// Returns a figure of a function, as if each thread had 64 registers and none were spilled.
    fn attribute(&self, function: usize, attribute: c_int) -> Result<c_int, c_int> {
        let (module, _) = self.functions.get(&function).ok_or(INVALID_HANDLE)?;
        let text = &self.modules[module].text;
        let after = |word: &str| text.lines().find_map(|line| line.trim().strip_prefix(word));
        let digits = |text: &str| text.chars().filter(char::is_ascii_digit).collect::<String>().parse().ok();
        if attribute != 1 && setting("silent").is_some() {
            return Err(INVALID_VALUE);
        }
        match attribute {
            0 => Ok(1024),
            1 => {
                let declared = text.lines().filter(|line| line.trim_start().starts_with(".shared"));
                let bytes = |line: &str| line.split_once('[')?.1.split_once(']')?.0.parse::<c_int>().ok();
                Ok(declared.filter_map(bytes).sum())
            }
            3 => Ok(0),
            4 => Ok(64),
            5 => after(".version").and_then(digits).ok_or(INVALID_VALUE),
            6 => {
                let (major, minor) = capability(device());
                digits(&format!("{major}{minor}")).ok_or(INVALID_VALUE)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    fn launch(&mut self, config: &Config, function: usize, arguments: *mut *mut c_void) -> Answer {
        let (module, entry) = self.functions.get(&function).cloned().ok_or(INVALID_HANDLE)?;
        let cluster = self.cluster(config, function)?;
        let loaded = self.modules.get(&module).ok_or(INVALID_HANDLE)?;
        if config.shared_bytes > loaded.dynamic {
            return Err(INVALID_VALUE);
        }
        let parameters = loaded.text.matches(".param .u64").count();
        let addresses: Vec<u64> = (0..parameters)
            // SAFETY: the caller gives a pointer for each parameter, to the eight bytes of an address.
            .map(|i| unsafe { (*arguments.add(i)).cast::<u64>().read() })
            .collect();
        let mut names: Vec<u64> = addresses.clone();
        names.sort_unstable();
        names.dedup();
        let places: Vec<usize> =
            addresses.iter().map(|address| names.binary_search(address).expect("it is among them")).collect();
        let mut buffers = Vec::new();
        for address in &names {
            let name = format!("array {address:#x}");
            let buffer = match (self.arrays.get(address), self.lent.get(address)) {
                (Some(array), _) if array.written => GlobalArray::input(&name, array.bytes.clone()),
                (Some(array), _) => GlobalArray::output(&name, array.bytes.len()),
                // SAFETY: so many bytes were lent there.
                (None, Some(&bytes)) => GlobalArray::input(&name, unsafe {
                    std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(*address as usize), bytes).to_vec()
                }),
                (None, None) => return Err(INVALID_VALUE),
            };
            // No better aligned than here.
            buffers.push(buffer.late((address % 256) as u32));
        }
        let launch =
            GridLaunch { grid: config.grid, block: config.block, cluster, dynamic_shared: config.shared_bytes };
        let order = setting("shuffled")
            .map_or(ThreadOrder::InSequence, |seed| ThreadOrder::Shuffled(seed.parse().expect("a seed")));
        let ran = loaded.module.run(
            &entry,
            &launch,
            buffers,
            &places,
            &InterpretOptions { order, ..InterpretOptions::default() },
        );
        let launches = self.calls.get("cuLaunchKernelEx").copied().unwrap_or(0);
        match ran {
            Ok(mut buffers) => {
                let flipped = setting("flips").and_then(|argument| places.get(argument.parse::<usize>().ok()?));
                if let Some(&array) = flipped.filter(|_| launches >= 3) {
                    buffers[array].bytes[0] ^= 1;
                }
                for (address, buffer) in names.iter().zip(buffers) {
                    if let Some(array) = self.arrays.get_mut(address) {
                        *array = Array { bytes: buffer.bytes, written: true };
                    } else {
                        // SAFETY: so many bytes were lent there, to be written to.
                        unsafe {
                            let to = ptr::with_exposed_provenance_mut::<u8>(*address as usize);
                            to.copy_from_nonoverlapping(buffer.bytes.as_ptr(), buffer.bytes.len());
                        }
                    }
                }
            }
            Err(error) => self.fault = Some(CString::new(error.to_string()).unwrap_or_default()),
        }
        self.clock += LAUNCH;
        let Config { grid, block, shared_bytes, stream, .. } = config;
        let (device, stream) = (device(), stream.addr());
        Ok(format!(
            "{entry} device {device} stream {stream} grid {grid:?} block {block:?} cluster {cluster:?} shared {shared_bytes} \
             arguments {places:?}"
        ))
    }
}

/// `CUlaunchConfig`
#[repr(C)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *mut Attribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`
#[repr(C)]
pub struct Attribute {
    id: c_int,
    padding: c_int,
    value: [u32; 16],
}

macro_rules! exported {
    ($(fn $name:ident($state:ident $(, $argument:ident: $type:ty)*) $body:block)*) => {$(
        /// As CUDA's Driver API has it.
        ///
        /// # Safety
        /// The arguments are what that asks for.
        // SAFETY: the one symbol of this name in a library that links no driver.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            answered(stringify!($name), |$state| $body)
        }
    )*};
}

exported! {
    fn cuInit(_state, _flags: c_uint) { Ok(String::new()) }

    fn cuDriverGetVersion(_state, version: *mut c_int) {
        put(version, number("version", 12_040) as c_int);
        Ok(String::new())
    }

    fn cuDeviceGetCount(_state, count: *mut c_int) {
        put(count, number("devices", 1) as c_int);
        Ok(String::new())
    }

    fn cuDeviceGet(_state, device: *mut c_int, place: c_int) {
        if u64::try_from(place).map_or(true, |place| place >= number("devices", 1)) { return Err(INVALID_DEVICE) }
        put(device, place);
        Ok(String::new())
    }

    fn cuDeviceGetName(_state, name: *mut c_char, bytes: c_int, _device: c_int) {
        let given = b"NVIDIA Fake\0";
        if usize::try_from(bytes).is_ok_and(|bytes| bytes < given.len()) { return Err(INVALID_VALUE) }
        // SAFETY: there is room for so many bytes.
        unsafe { ptr::copy_nonoverlapping(given.as_ptr(), name.cast(), given.len()) };
        Ok(String::new())
    }

    fn cuDeviceGetAttribute(_state, value: *mut c_int, attribute: c_int, device: c_int) {
        let (major, minor) = capability(device.unsigned_abs() as usize);
        let given: u64 = match attribute {
            36 => number("clock", 2_619_000),
            37 => 5120,
            75 => major.parse().expect("a number"),
            76 => minor.parse().expect("a number"),
            97 => number("shared", 232_448),
            _ => return Err(INVALID_VALUE),
        };
        put(value, given as c_int);
        Ok(attribute.to_string())
    }

    fn cuDevicePrimaryCtxRetain(state, context: *mut *mut c_void, device: c_int) {
        *state.retained.entry(device.unsigned_abs() as usize).or_default() += 1;
        put(context, handle(FIRST_CONTEXT + device.unsigned_abs() as usize));
        Ok("+context".into())
    }

    fn cuDevicePrimaryCtxRelease_v2(state, device: c_int) {
        let retained = state.retained.entry(device.unsigned_abs() as usize).or_default();
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok("-context".into())
    }

    fn cuCtxPushCurrent_v2(state, context: *mut c_void) {
        let device = context.addr().checked_sub(FIRST_CONTEXT).ok_or(INVALID_CONTEXT)?;
        if state.retained.get(&device).is_none_or(|&retained| retained == 0) { return Err(INVALID_CONTEXT) }
        CURRENT.with_borrow_mut(|current| current.push(context.addr()));
        Ok("+current".into())
    }

    fn cuCtxPopCurrent_v2(_state, context: *mut *mut c_void) {
        let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        put(context, handle(popped));
        Ok("-current".into())
    }

    fn cuMemGetInfo_v2(state, free: *mut usize, total: *mut usize) {
        in_context()?;
        let all = number("memory", 1 << 30) as usize;
        put(free, all - state.arrays.values().map(|array| array.bytes.len()).sum::<usize>());
        put(total, all);
        Ok(String::new())
    }

    fn cuMemAlloc_v2(state, address: *mut u64, bytes: usize) {
        in_context()?;
        not_captured()?;
        let held: usize = state.arrays.values().map(|array| array.bytes.len()).sum();
        if bytes == 0 { return Err(INVALID_VALUE) }
        if held + bytes > number("memory", 1 << 30) as usize { return Err(OUT_OF_MEMORY) }
        let end = state.arrays.last_key_value().map(|(begin, array)| begin + array.bytes.len() as u64);
        let begin = end.unwrap_or(FIRST_ADDRESS).next_multiple_of(256) + if setting("odd").is_some() { 2 } else { 0 };
        state.arrays.insert(begin, Array { bytes: vec![0xA5; bytes], written: false });
        put(address, begin);
        Ok(format!("+array {begin:#x} {bytes}"))
    }

    fn cuMemFree_v2(state, address: u64) {
        in_context()?;
        state.arrays.remove(&address).ok_or(INVALID_VALUE)?;
        Ok(format!("-array {address:#x}"))
    }

    fn cuMemcpyHtoD_v2(state, to: u64, from: *const c_void, bytes: usize) {
        in_context()?;
        not_captured()?;
        let array = state.array(to, bytes)?;
        // SAFETY: the caller's array has so many bytes.
        array.bytes[..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(from.cast(), bytes) });
        array.written = true;
        Ok(format!("{to:#x} {bytes}"))
    }

    fn cuMemcpyDtoH_v2(state, to: *mut c_void, from: u64, bytes: usize) {
        in_context()?;
        not_captured()?;
        let (&begin, array) = state.arrays.range(..=from).next_back().ok_or(INVALID_VALUE)?;
        let array = array.bytes.get((from - begin) as usize..).filter(|array| array.len() >= bytes);
        let array = array.ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's array has so many bytes.
        unsafe { ptr::copy_nonoverlapping(array.as_ptr(), to.cast(), bytes) };
        Ok(format!("{from:#x} {bytes}"))
    }

    fn cuMemcpyDtoDAsync_v2(state, to: u64, from: u64, bytes: usize, stream: *mut c_void) {
        in_context()?;
        let array = state.array(from, bytes)?;
        if !array.written { return Err(INVALID_VALUE) }
        let copy = array.bytes[..bytes].to_vec();
        let array = state.array(to, bytes)?;
        array.bytes[..bytes].copy_from_slice(&copy);
        array.written = true;
        state.clock += COPY;
        Ok(format!("{to:#x} {from:#x} {bytes} stream {}", stream.addr()))
    }

    fn cuModuleLoadDataEx(state, module: *mut *mut c_void, text: *const c_void, options: c_uint, keys: *mut c_int, values: *mut *mut c_void) {
        in_context()?;
        not_captured()?;
        // SAFETY: the caller gives text that ends in 0.
        let text = unsafe { CStr::from_ptr(text.cast()) }.to_str().map_err(|_| INVALID_PTX)?.to_string();
        let read = if setting("refuses").is_some() { Err("ptxas application ptx input, line 1; fatal: no PTX".into()) } else { PtxModule::parse(&text).map_err(|error| error.to_string()) };
        match read {
            Ok(read) => {
                let made = state.new_handle();
                let after = |word: &str| text.lines().find_map(|line| line.trim().strip_prefix(word)).unwrap_or("?");
                let (version, target) = (after(".version ").to_string(), after(".target ").to_string());
                state.modules.insert(made, Loaded { module: read, text, dynamic: PLAIN_SHARED });
                put(module, handle(made));
                Ok(format!("{version} {target} +module {made}"))
            }
            Err(error) => {
                for i in 0..options as usize {
                    // SAFETY: there are so many keys and values; that of key 5 points to as many bytes as that of key 6 says.
                    unsafe {
                        if *keys.add(i) == 5 {
                            let most = (0..options as usize).find(|&j| *keys.add(j) == 6).map_or(0, |j| (*values.add(j)).addr());
                            let said = CString::new(error.as_str()).unwrap_or_default();
                            let said = said.as_bytes_with_nul();
                            ptr::copy_nonoverlapping(said.as_ptr(), (*values.add(i)).cast(), said.len().min(most));
                        }
                    }
                }
                Err(INVALID_PTX)
            }
        }
    }

    fn cuModuleUnload(state, module: *mut c_void) {
        in_context()?;
        state.modules.remove(&module.addr()).ok_or(INVALID_HANDLE)?;
        state.functions.retain(|_, (of, _)| *of != module.addr());
        Ok(format!("-module {}", module.addr()))
    }

    fn cuModuleGetFunction(state, function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        in_context()?;
        // SAFETY: the caller gives a name that ends in 0.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let loaded = state.modules.get(&module.addr()).ok_or(INVALID_HANDLE)?;
        if !loaded.text.contains(&format!(".entry {name}(")) { return Err(500) }
        let made = state.new_handle();
        state.functions.insert(made, (module.addr(), name.clone()));
        put(function, handle(made));
        Ok(name)
    }

    fn cuFuncGetAttribute(state, value: *mut c_int, attribute: c_int, function: *mut c_void) {
        put(value, state.attribute(function.addr(), attribute)?);
        Ok(attribute.to_string())
    }

    fn cuFuncSetAttribute(state, function: *mut c_void, attribute: c_int, value: c_int) {
        let (module, name) = state.functions.get(&function.addr()).cloned().ok_or(INVALID_HANDLE)?;
        match attribute {
            8 => {
                let dynamic = u32::try_from(value).map_err(|_| INVALID_VALUE)?;
                if u64::from(dynamic) > number("shared", 232_448) { return Err(INVALID_VALUE) }
                state.modules.get_mut(&module).ok_or(INVALID_HANDLE)?.dynamic = dynamic;
            }
            9 if (-1..=100).contains(&value) => {}
            _ => return Err(INVALID_VALUE),
        }
        Ok(format!("{name} {attribute} {value}"))
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        state, ctas: *mut c_int, function: *mut c_void, threads: c_int, dynamic: usize
    ) {
        in_context()?;
        if setting("silent").is_some() { return Err(INVALID_VALUE) }
        let shared = state.attribute(function.addr(), 1)? + dynamic as c_int + SHARED_OF_THE_SYSTEM;
        put(ctas, OF_A_MULTIPROCESSOR[0].div_euclid(shared).min(OF_A_MULTIPROCESSOR[1].div_euclid(threads)));
        Ok(String::new())
    }

    fn cuOccupancyMaxActiveClusters(state, clusters: *mut c_int, function: *mut c_void, config: *const Config) {
        in_context()?;
        if setting("silent").is_some() { return Err(INVALID_VALUE) }
        // SAFETY: the caller gives a pointer to one.
        let cluster = state.cluster(unsafe { &*config }, function.addr())?;
        put(clusters, number("clusters", 16) as c_int);
        Ok(format!("{cluster:?}"))
    }

    fn cuStreamIsCapturing(_state, stream: *mut c_void, status: *mut c_int) {
        in_context()?;
        put(status, c_int::from(setting("capturing").is_some()));
        Ok(stream.addr().to_string())
    }

    fn cuLaunchKernel(
        state, function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: *mut c_void, arguments: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        in_context()?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let config = Config { grid, block, shared_bytes, stream, attributes: ptr::null_mut(), attribute_count: 0 };
        state.launch(&config, function.addr(), arguments)
    }

    fn cuLaunchKernelEx(state, config: *const Config, function: *mut c_void, arguments: *mut *mut c_void, _extra: *mut *mut c_void) {
        in_context()?;
        // SAFETY: the caller gives a pointer to one.
        state.launch(unsafe { &*config }, function.addr(), arguments)
    }

    fn cuEventCreate(state, event: *mut *mut c_void, _flags: c_uint) {
        in_context()?;
        let made = state.new_handle();
        state.events.insert(made, f32::NAN);
        put(event, handle(made));
        Ok(format!("+event {made}"))
    }

    fn cuEventDestroy_v2(state, event: *mut c_void) {
        state.events.remove(&event.addr()).ok_or(INVALID_HANDLE)?;
        Ok(format!("-event {}", event.addr()))
    }

    fn cuEventRecord(state, event: *mut c_void, _stream: *mut c_void) {
        let clock = state.clock;
        *state.events.get_mut(&event.addr()).ok_or(INVALID_HANDLE)? = clock;
        Ok(event.addr().to_string())
    }

    fn cuEventSynchronize(state, event: *mut c_void) {
        not_captured()?;
        state.events.get(&event.addr()).filter(|clock| !clock.is_nan()).ok_or(INVALID_HANDLE)?;
        if let Some(fault) = state.fault.take() {
            record(&format!("fault {}", fault.to_string_lossy()));
            state.said = fault;
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(event.addr().to_string())
    }

    fn cuEventElapsedTime(state, milliseconds: *mut f32, before: *mut c_void, after: *mut c_void) {
        let [before, after] = [before, after].map(|event| state.events.get(&event.addr()).copied());
        put(milliseconds, after.ok_or(INVALID_HANDLE)? - before.ok_or(INVALID_HANDLE)?);
        Ok(String::new())
    }

    fn cuGetErrorName(_state, status: c_int, name: *mut *const c_char) {
        let named = match status {
            INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            CONTEXT_IS_DESTROYED => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
            CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            INVALID_CLUSTER_SIZE => c"CUDA_ERROR_INVALID_CLUSTER_SIZE",
            INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
            ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        put(name, named.as_ptr());
        Ok(String::new())
    }

    fn cuGetErrorString(state, status: c_int, text: *mut *const c_char) {
        put(text, if status == ILLEGAL_ADDRESS { state.said.as_ptr() } else { c"as it was told to".as_ptr() });
        Ok(String::new())
    }
}

/// `bytes` at `address` are a framework's array on the device. Where another was lent there, it is this one now.
///
/// # Safety
/// They are there, and nobody else reads or writes them, until all is taken back.
// SAFETY: no driver has a symbol of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_lend(address: u64, bytes: usize) {
    STATE.lock().unwrap_or_else(PoisonError::into_inner).lent.insert(address, bytes);
}

/// Nothing is lent any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_take_back() {
    STATE.lock().unwrap_or_else(PoisonError::into_inner).lent.clear();
}

/// Other settings, and nothing has been called yet.
///
/// # Safety
/// They are text that ends in 0.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_set(settings: *const c_char) {
    // SAFETY: the caller says so.
    let settings = unsafe { CStr::from_ptr(settings) }.to_string_lossy().into_owned();
    *SETTINGS.write().unwrap_or_else(PoisonError::into_inner) = settings.leak();
    STATE.lock().unwrap_or_else(PoisonError::into_inner).calls.clear();
}
