//! Launches as other software makes them, and arrays of somebody else's, on a driver without a device
//! (`crates/cuda/examples`).

use std::env;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use assay_core::device_dtype::DeviceDtype;
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use assay_programs::StructuredSpec;
use assay_programs::operation::{BatchForm, OperationKernel};
use assay_ptx::{Parameter, PtxAddress, PtxBuilder, PtxKernel, PtxLaunch, PtxTarget, PtxValue};
use libloading::Library;

use super::*;
use crate::op::{Gpu, OperationLaunch};
use crate::run::program;

/// The entry `cuLaunchKernel` of the C API.
// SAFETY: who calls it keeps to what the Driver API Reference says of the function.
type LaunchKernel = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// The driver without a device. It has one state in a process, so that tests take turns.
struct Fake {
    library: Library,
    _turn: MutexGuard<'static, ()>,
}

impl Fake {
    fn new(settings: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = env::current_exe().unwrap().parent().unwrap().with_file_name("examples");
        let path = folder.join("libfake_cuda.so");
        assert!(path.is_file(), "{} is missing: `cargo build --workspace --examples`", path.display());
        // SAFETY: all that reads the environment in this binary waits for its turn.
        unsafe { env::set_var(DRIVER_VARIABLE, &path) };
        // SAFETY: its initialisers run, and are those of Rust.
        let library = unsafe { Library::new(path) }.unwrap();
        let fake = Self { library, _turn: turn };
        fake.set(settings);
        fake
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: each use has the type that the example gives the symbol.
        *unsafe { self.library.get(name.as_bytes()) }.unwrap()
    }

    fn set(&self, settings: &str) {
        // SAFETY: that is its type.
        let set = self.symbol::<unsafe extern "C" fn(*const c_char)>("fake_cuda_set");
        let settings = CString::new(settings).unwrap();
        // SAFETY: the text ends in 0 and is alive over the call.
        unsafe { set(settings.as_ptr()) };
    }

    fn context() -> Arc<CudaContext> {
        CudaDevice::new(Driver::load().unwrap(), 0).unwrap().context().unwrap()
    }

    /// Launches as XLA does, without attributes.
    fn launch_plainly(&self, loaded: &LoadedKernel, ctas: u32, array: &CudaMemory) -> c_int {
        let launch: LaunchKernel = self.symbol("cuLaunchKernel");
        let mut address = array.address;
        let mut arguments: [*mut c_void; 1] = [ptr::from_mut(&mut address).cast()];
        let [x, y, z] = loaded.kernel().block;
        let (arguments, none) = (arguments.as_mut_ptr(), ptr::null_mut());
        let _current = array.context.enter().unwrap();
        // SAFETY: the function is loaded, and its one argument is an array that it may write.
        unsafe { launch(loaded.function, ctas, 1, 1, x, y, z, 0, none, arguments, ptr::null_mut()) }
    }

    /// Lends an array of this process to the device.
    fn lend(&self, array: &mut Late) -> BorrowedArray {
        // SAFETY: that is its type.
        let lend = self.symbol::<unsafe extern "C" fn(u64, usize)>("fake_cuda_lend");
        let (address, bytes) = (array.bytes().as_mut_ptr().expose_provenance() as u64, array.bytes().len());
        // SAFETY: the array is there until all is taken back, and nobody else touches it meanwhile.
        unsafe {
            lend(address, bytes);
            BorrowedArray::new(address, bytes)
        }
    }

    fn take_back(&self) {
        // SAFETY: that is its type.
        let take_back = self.symbol::<unsafe extern "C" fn()>("fake_cuda_take_back");
        // SAFETY: it may be called at any time.
        unsafe { take_back() };
    }
}

/// Bytes that begin so many past a multiple of 16.
struct Late {
    room: Vec<u8>,
    start: usize,
}

impl Late {
    fn new(bytes: &[u8], late: usize) -> Self {
        let mut room = vec![0; bytes.len() + 64];
        let start = room.as_ptr().addr().wrapping_neg() % 16 + late;
        room[start..start + bytes.len()].copy_from_slice(bytes);
        room.truncate(start + bytes.len());
        Self { room, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.room[self.start..]
    }
}

/// Writes a kernel in which each of `ctas` CTAs writes its rank in its cluster.
fn ranks(ctas: u32, cluster: u32) -> PtxKernel {
    let mut on = PtxBuilder::new("ranks", PtxTarget::Sm90);
    let array = on.output("ranks", DeviceDtype::I32, &[ctas as usize]);
    let (thread, cta, rank) = (on.thread(), on.cta(), on.rank());
    let first: PtxValue<bool> = on.less(thread, 1);
    on.when(first, |on| {
        let offset = on.mul_wide(cta, 4);
        let to = on.add(array, offset);
        on.store(PtxAddress::Global(to, 0), rank);
    });
    on.finish(PtxLaunch { grid: [ctas, 1, 1], block: [32, 1, 1], cluster, least_resident: 1 })
}

fn read(array: &CudaMemory) -> Vec<i32> {
    let mut bytes = vec![0; array.bytes()];
    array.read(&mut bytes).unwrap();
    bytes.chunks(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect()
}

const REFUSED: c_int = 912;

/// XLA's command buffers launch without attributes: the clusters are those of the text, if it has some.
#[test]
fn cluster_in_the_text_alone_is_launched() {
    let fake = Fake::new("");
    let context = Fake::context();
    let loaded = context.load(ranks(4, 2)).unwrap();
    let array = context.allocate("ranks", 16).unwrap();
    assert_eq!(fake.launch_plainly(&loaded, 4, &array), 0);
    assert_eq!(read(&array), [0, 1, 0, 1]);
    assert_eq!(fake.launch_plainly(&loaded, 3, &array), REFUSED, "no whole clusters");

    // Without the directive a device would run it, each CTA for itself.
    let mut kernel = ranks(4, 2);
    kernel.text = kernel.text.replace(".explicitcluster\n", "");
    let implicit = context.load(kernel).unwrap();
    let array = context.allocate("ranks", 16).unwrap();
    assert_eq!(fake.launch_plainly(&implicit, 4, &array), REFUSED);
    KernelCall { kernel: &implicit, inputs: vec![], outputs: vec![&array] }.launch().unwrap();
    assert_eq!(read(&array), [0, 1, 0, 1]);
}

#[test]
fn cluster_at_odds_with_the_text_is_refused() {
    let fake = Fake::new("silent=1");
    let context = Fake::context();
    let array = context.allocate("ranks", 16).unwrap();
    for (of_text, of_launch) in [(2, 4), (4, 2)] {
        let loaded = context.load(PtxKernel { cluster: of_launch, ..ranks(4, of_text) }).unwrap();
        let error = KernelCall { kernel: &loaded, inputs: vec![], outputs: vec![&array] }.launch().unwrap_err();
        assert!(error.to_string().starts_with("launch ranks: CUDA_ERROR_INVALID_CLUSTER_SIZE"), "{error}");
    }
    // Asked for room for clusters that its text does not have, the driver reports no room.
    fake.set("");
    let error = context.load(PtxKernel { cluster: 2, ..ranks(4, 4) }).err().unwrap();
    assert!(matches!(error, CudaError::NoRoom { cluster: 2, .. }), "{error}");
}

/// Runs two rows of logits, `late` bytes after a multiple of 16, through both kernels; dlogits start `apart` bytes further.
fn halves(fake: &Fake, vocab: usize, late: usize, apart: usize) -> Result<[Vec<u8>; 2], CudaError> {
    let context = Fake::context();
    let spec = LossSpec::default();
    let row = Shape { batch: 1, tokens: 1, vocab };
    let kernels =
        program("gpu-two-pass").gpu_kernels_for(StructuredSpec::new(&spec), row, Dtype::Bf16, 1, PtxTarget::Sm90);
    let loaded = kernels.unwrap().into_iter().map(|kernel| context.load(kernel).unwrap()).collect::<Vec<_>>();
    let ones = |count: usize| 1.0_f32.to_ne_bytes().repeat(count);
    // Numbers near 1, all of them different.
    let logits: Vec<u8> = (0..2 * vocab).flat_map(|i| (0x3F80 + i as u16).to_ne_bytes()).collect();
    let mut arrays = [
        ("inverse_temperature", Late::new(&ones(1), 4)),
        ("columns", Late::new(&(vocab as i32).to_ne_bytes(), 8)),
        ("logits", Late::new(&logits, late)),
        ("ids", Late::new(&[3_i32, 7].map(i32::to_ne_bytes).concat(), 12)),
        ("scales", Late::new(&ones(16), 4)),
        ("statistics", Late::new(&ones(16), 0)),
        ("dlogits", Late::new(&vec![0; logits.len()], late + apart)),
    ];
    let lent = arrays.iter_mut().map(|(name, array)| (*name, fake.lend(array))).collect::<Vec<_>>();
    let stream = CudaStream::default_one();
    let rows = |parameter: &Parameter| if matches!(parameter.shape[..], [1, 1, _]) { 2 } else { 1 };
    let ran = loaded.iter().try_for_each(|kernel| {
        let counts: Vec<usize> = kernel.kernel().parameters.iter().map(rows).collect();
        kernel.enqueue(2, &counts, stream, &lent)
    });
    // An error on the device is reported to the call that waits.
    let current = context.enter()?;
    let done = timing::CudaEvent::new(current.driver)?;
    done.record()?;
    done.wait("both")?;
    fake.take_back();
    ran.map(|()| [5, 6].map(|place| arrays[place].1.bytes().to_vec()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Rows that are no whole blocks may begin at any element. Each element's gradient is the same; sums are in another
/// order.
#[test]
fn array_of_odd_rows_may_begin_at_any_element() {
    let fake = Fake::new("");
    let expected = halves(&fake, 65, 0, 0).unwrap();
    assert!(expected[1].iter().any(|&byte| byte != 0));
    for late in [2, 4, 6, 8, 14] {
        let [statistics, dlogits] = halves(&fake, 65, late, if late == 6 { 16 } else { 0 }).unwrap();
        assert_eq!(dlogits, expected[1], "{late}");
        for (value, expected) in floats(&statistics).into_iter().zip(floats(&expected[0])) {
            assert!((value - expected).abs() <= 4.0 * f32::EPSILON * expected.abs(), "{late}: {value}, {expected}");
        }
    }
    let refused = |vocab, late, apart| halves(&fake, vocab, late, apart).unwrap_err().to_string();
    let said = refused(65, 1, 0);
    assert!(said.contains("array logits: it begins at 0x") && said.contains("expected a multiple of 2,"), "{said}");
    // Whole blocks are read as such.
    let said = refused(64, 2, 0);
    assert!(said.contains("array logits: it begins at 0x") && said.contains("expected a multiple of 16,"), "{said}");
    let said = refused(65, 2, 4);
    let parts =
        ["grpo_dlogits", "arrays logits and dlogits: they begin 2 and 6 bytes past a multiple of 16", "write over"];
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
}

/// A kernel is loaded at its first use, which no graph can contain; a loaded kernel can be captured.
#[test]
fn capture_of_a_first_use_is_refused_and_of_a_second_is_not() {
    let fake = Fake::new("capturing=1");
    let gpu = Gpu::at(0).unwrap();
    let spec = LossSpec::default();
    let mut arrays = [
        ("inverse_temperature", Late::new(&1.0_f32.to_ne_bytes(), 0)),
        ("columns", Late::new(&64_i32.to_ne_bytes(), 0)),
        ("logits", Late::new(&[0; 256], 0)),
        ("ids", Late::new(&[0; 8], 0)),
        ("statistics", Late::new(&[0; 64], 0)),
    ];
    let lent = arrays.iter_mut().map(|(name, array)| (*name, fake.lend(array))).collect::<Vec<_>>();
    let stream = CudaStream::default_one();
    let called = OperationLaunch {
        kernel: OperationKernel::Statistics,
        spec: &spec,
        form: BatchForm::default(),
        extents: [2, 1, 64],
        dtype: Dtype::Bf16,
        stream,
        arrays: &lent,
    };
    let error = gpu.enqueue(called).unwrap_err().to_string();
    for part in
        ["kernel grpo_statistics", "captured into a CUDA graph", "one run of the same loss, dtype and vocabulary"]
    {
        assert!(error.contains(part), "`{part}` not in: {error}");
    }
    fake.set("");
    gpu.enqueue(called).unwrap();
    fake.set("capturing=1");
    gpu.enqueue(called).unwrap();
    // The default stream may not be asked while another is captured.
    fake.set("fail=cuStreamIsCapturing:1:906");
    let other = OperationLaunch { dtype: Dtype::F16, ..called };
    assert!(gpu.enqueue(other).unwrap_err().to_string().contains("captured into a CUDA graph"));
    fake.take_back();
}

/// Tensors of a framework on a B200 use the B200's own text, which this driver is too old for.
#[test]
fn b200_of_a_framework_needs_a_newer_driver() {
    let _fake = Fake::new("devices=2,capability=9.0/10.0");
    assert!(Gpu::at(0).is_ok());
    let error = Gpu::at(1).err().unwrap().to_string();
    for part in ["it is of CUDA 12.4", "expected 12.7 or newer", "PTX 8.6", "sm_100", "update the driver"] {
        assert!(error.contains(part), "`{part}` not in: {error}");
    }
}
