//! The PJRT runtime on every CPU plugin that set-up installs: buffers, programs on one to eight devices, errors, leaks.

use super::cpu_plugins;
use assay_testkit::plugins;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use assay::device_dtype::DeviceDtype;
use assay::runtime::{Client, PjrtProgram, Plugin, RuntimeError};

/// `f(x, y) = (x + y, Σ over devices of x)` over four f32, on `devices` devices.
fn add_and_all_reduce(devices: usize) -> String {
    let group = (0..devices).map(|device| device.to_string()).collect::<Vec<_>>().join(", ");
    format!(
        r#"module {{
  func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {{
    %sum = stablehlo.add %x, %y : tensor<4xf32>
    %all = "stablehlo.all_reduce"(%x) <{{replica_groups = dense<[[{group}]]> : tensor<1x{devices}xi64>}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32>
    }}) : (tensor<4xf32>) -> tensor<4xf32>
    return %sum, %all : tensor<4xf32>, tensor<4xf32>
  }}
}}"#
    )
}

fn to_bytes(values: [f32; 4]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn download_f32(buffer: &assay::runtime::DeviceBuffer) -> Vec<f32> {
    let mut bytes = [0; 16];
    buffer.download(DeviceDtype::F32, &[4], &mut bytes).unwrap();
    bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

#[test]
fn plugin_of_each_c_api_loads_and_has_eight_devices() {
    let versions: Vec<_> = cpu_plugins().iter().map(|path| Plugin::load(path).unwrap().version()).collect();
    assert_eq!(versions, [(0, 115), (0, 81)]);
    for client in plugins::cpu_clients() {
        assert_eq!((client.platform(), client.device_count()), ("cpu", 8), "{client:?}");
    }
}

/// Nothing but its results tells how a program was compiled: where it is optimised, products and sums are fused and sums
/// taken in another order. A client of its own, so that no other test's programs are meant.
#[test]
fn compile_quickly_changes_the_bits_of_results() {
    const LENGTH: usize = 1000;
    let program = format!(
        "module {{ func.func public @main(%x: tensor<{LENGTH}xf32>) -> (tensor<{LENGTH}xf32>, tensor<f32>) {{
            %e = stablehlo.exponential %x : tensor<{LENGTH}xf32>
            %product = stablehlo.multiply %e, %x : tensor<{LENGTH}xf32>
            %y = stablehlo.add %product, %x : tensor<{LENGTH}xf32>
            %zero = stablehlo.constant dense<0.0> : tensor<f32>
            %sum = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0]
                : (tensor<{LENGTH}xf32>, tensor<f32>) -> tensor<f32>
            return %y, %sum : tensor<{LENGTH}xf32>, tensor<f32> }} }}"
    );
    let x: Vec<u8> = (0..LENGTH).flat_map(|i| ((i as f32 * 0.7).sin() * 3.0).to_le_bytes()).collect();
    for path in cpu_plugins() {
        let client = Client::create(Plugin::load(path).unwrap()).unwrap();
        let results = || {
            let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), 1)).unwrap();
            let x = client.upload(0, DeviceDtype::F32, &[LENGTH], &x).unwrap();
            let outputs = executable.execute(&[vec![&x]]).unwrap();
            let mut bytes = vec![0; 4 * LENGTH + 4];
            outputs[0][0].download(DeviceDtype::F32, &[LENGTH], &mut bytes[4..]).unwrap();
            outputs[0][1].download(DeviceDtype::F32, &[], &mut bytes[..4]).unwrap();
            bytes
        };
        let optimised = results();
        assert_eq!(results(), optimised, "{client:?}");
        client.compile_quickly();
        assert_ne!(results(), optimised, "{client:?}");
    }
}

#[test]
fn buffer_of_every_element_type_keeps_its_bytes() {
    for client in plugins::cpu_clients() {
        for element in DeviceDtype::ALL {
            // Truth values are 0 and 1; every other bit pattern is a value of its type.
            let top = if element == DeviceDtype::Pred { 2 } else { 251 };
            let sent: Vec<u8> = (0..6 * element.size()).map(|i| (i * 37 % top) as u8).collect();
            for device in [0, 7] {
                let buffer = client.upload(device, element, &[2, 3], &sent).unwrap();
                assert_eq!((buffer.element().unwrap(), buffer.shape().unwrap()), (element, vec![2, 3]));
                let mut back = vec![0; sent.len()];
                buffer.download(element, &[2, 3], &mut back).unwrap();
                assert_eq!(back, sent, "{element} on device {device} of {client:?}");
            }
        }
    }
}

#[test]
fn execute_on_one_to_eight_devices_has_separate_arguments() {
    for client in plugins::cpu_clients() {
        for devices in [1, 2, 4, 8] {
            let program = add_and_all_reduce(devices);
            let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), devices)).unwrap();
            let x = |device: usize| [device as f32, 1.0, 0.5, -2.0];
            let upload = |device, values| client.upload(device, DeviceDtype::F32, &[4], &to_bytes(values)).unwrap();
            let buffers: Vec<_> =
                (0..devices).map(|device| (upload(device, x(device)), upload(device, [10.0; 4]))).collect();
            let arguments: Vec<_> = buffers.iter().map(|(x, y)| vec![x, y]).collect();
            let outputs = executable.execute(&arguments).unwrap();
            assert_eq!(outputs.len(), devices);
            let total: f32 = (0..devices).map(|device| device as f32).sum();
            let d = devices as f32;
            for (device, outputs) in outputs.iter().enumerate() {
                let [sum, all] = &outputs[..] else { panic!("two outputs") };
                assert_eq!(download_f32(sum), x(device).map(|x| x + 10.0));
                assert_eq!(download_f32(all), [total, d, 0.5 * d, -2.0 * d]);
            }
        }
    }
}

#[test]
fn execute_with_a_donated_argument_consumes_it() {
    let program = "module { func.func public @main(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
        %y = stablehlo.add %x, %x : tensor<4xf32>
        return %y : tensor<4xf32>
    } }";
    for client in plugins::cpu_clients() {
        let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), 1)).unwrap();
        assert_eq!(executable.memory().unwrap().alias_bytes, 16);
        let x = client.upload(0, DeviceDtype::F32, &[4], &to_bytes([1.0, 2.0, 3.0, 4.0])).unwrap();
        let outputs = executable.execute(&[vec![&x]]).unwrap();
        assert_eq!(download_f32(&outputs[0][0]), [2.0, 4.0, 6.0, 8.0]);
        let again = executable.execute(&[vec![&x]]).unwrap_err();
        assert!(matches!(&again, RuntimeError::Plugin { .. }), "{again}");
        assert!(x.download(DeviceDtype::F32, &[4], &mut [0; 16]).is_err(), "the argument's array is gone");
    }
}

#[test]
fn client_serves_several_threads() {
    let client = plugins::cpu_clients().remove(0);
    let program = add_and_all_reduce(1);
    let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), 1)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (client, executable) = (&client, &executable);
            scope.spawn(move || {
                for i in 0..50 {
                    let upload = |x: f32| client.upload(0, DeviceDtype::F32, &[4], &to_bytes([x; 4])).unwrap();
                    let (x, y) = (upload(thread as f32), upload(i as f32));
                    let outputs = executable.execute(&[vec![&x, &y]]).unwrap();
                    assert_eq!(download_f32(&outputs[0][0]), [(thread + i) as f32; 4]);
                }
            });
        }
    });
}

fn expect_load_error(path: &Path, wanted: &str) {
    let error = Plugin::load(path).expect_err(wanted).to_string();
    assert!(error.contains(wanted) && error.contains(path.file_name().unwrap().to_str().unwrap()), "{error}");
}

#[test]
fn plugin_path_of_another_file_is_an_error_that_names_it() {
    expect_load_error(Path::new("/nowhere/plugin.so"), "cannot be loaded: No such file");
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    fs::write(&text, "not a library").unwrap();
    expect_load_error(&text, "cannot be loaded");
    let libm = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6"];
    let libm = libm.iter().map(Path::new).find(|path| path.exists()).expect("a C library");
    let error = Plugin::load(libm).unwrap_err().to_string();
    assert!(error.contains("does not export `GetPjrtApi`"), "{error}");
}

/// To map such a library would end this process.
#[test]
fn plugin_file_cut_short_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("short.so");
    fs::copy(".plugins/pjrt_cpu.so", &path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(3_000_000).unwrap();
    expect_load_error(&path, "it is cut short: 3000000 bytes of at least");
}

#[test]
fn compile_error_has_the_plugins_message() {
    for client in plugins::cpu_clients() {
        let compile = |code: &str| client.compile(&PjrtProgram::replicated(code.as_bytes(), 1)).unwrap_err();
        let syntax = compile("module { func.func public @main( }");
        assert!(
            matches!(&syntax, RuntimeError::Plugin { message, .. } if message.raw().contains("error: expected")),
            "{syntax}"
        );
        let unknown = compile("module { func.func public @main() { \"no.such_op\"() : () -> () return } }");
        assert!(matches!(&unknown, RuntimeError::Plugin { what, .. } if what == "compile"), "{unknown}");
    }
}

#[test]
fn devices_beyond_the_plugins_are_an_error_with_both_counts() {
    for client in plugins::cpu_clients() {
        let program = add_and_all_reduce(9);
        let error = client.compile(&PjrtProgram::replicated(program.as_bytes(), 9)).unwrap_err();
        assert_eq!(error.to_string(), "device count: got 9, expected 1 to 8 (platform cpu)");
        assert!(client.upload(8, DeviceDtype::F32, &[4], &[0; 16]).is_err());
    }
}

#[test]
fn buffer_bytes_unlike_its_shape_are_refused_both_ways() {
    let client = plugins::cpu_clients().remove(0);
    let short = client.upload(0, DeviceDtype::F32, &[4], &[0; 15]).unwrap_err();
    assert_eq!(short.to_string(), "upload: got 15 bytes, expected 16 for f32 [4]");
    let overflow = client.upload(0, DeviceDtype::F32, &[usize::MAX, 2], &[0; 8]).unwrap_err();
    assert!(matches!(overflow, RuntimeError::Bytes { expected: usize::MAX, .. }));
    let buffer = client.upload(0, DeviceDtype::F32, &[4], &[0; 16]).unwrap();
    let wrong = |element, shape: &[usize], bytes: usize| {
        buffer.download(element, shape, &mut vec![0; bytes]).unwrap_err().to_string()
    };
    assert!(wrong(DeviceDtype::I32, &[4], 16).contains("returned f32 [4], expected i32 [4]"));
    assert!(wrong(DeviceDtype::F32, &[2, 2], 16).contains("returned f32 [4], expected f32 [2, 2]"));
    assert!(wrong(DeviceDtype::F32, &[4], 12).contains("got 12 bytes, expected 16"));
}

#[test]
fn execute_with_wrong_arguments_is_refused() {
    for client in plugins::cpu_clients() {
        let program = add_and_all_reduce(2);
        let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), 2)).unwrap();
        let x = client.upload(0, DeviceDtype::F32, &[4], &[0; 16]).unwrap();
        for arguments in [vec![], vec![vec![&x, &x]], vec![vec![&x, &x], vec![&x]]] {
            let error = executable.execute(&arguments).unwrap_err();
            assert!(matches!(error, RuntimeError::Arguments { .. }), "{error}");
        }
        let one = client.compile(&PjrtProgram::replicated(add_and_all_reduce(1).as_bytes(), 1)).unwrap();
        let missing = one.execute(&[vec![&x]]).unwrap_err();
        assert!(matches!(missing, RuntimeError::Plugin { .. }), "{missing}");
        let small = client.upload(0, DeviceDtype::F32, &[2], &[0; 8]).unwrap();
        let wrong = one.execute(&[vec![&x, &small]]).unwrap_err();
        assert!(matches!(wrong, RuntimeError::Plugin { .. }), "{wrong}");
    }
}

/// 2⁴⁵ numbers of four bytes are more than an address space holds.
#[test]
fn execute_out_of_memory_is_an_error_and_the_client_lives_on() {
    let huge = "module { func.func public @main(%x: tensor<f32>) -> tensor<35184372088832xf32> {
        %y = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> tensor<35184372088832xf32>
        return %y : tensor<35184372088832xf32>
    } }";
    for client in plugins::cpu_clients() {
        let executable = client.compile(&PjrtProgram::replicated(huge.as_bytes(), 1)).unwrap();
        let x = client.upload(0, DeviceDtype::F32, &[], &[0; 4]).unwrap();
        let error = executable.execute(&[vec![&x]]).unwrap_err();
        // Beside other tests on its devices a plugin has been seen to say `INTERNAL`, with the same words.
        let code = matches!(&error, RuntimeError::Plugin { code: "RESOURCE_EXHAUSTED" | "INTERNAL", .. });
        assert!(code && error.to_string().contains("Out of memory allocating 140737488355328 bytes"), "{error}");
        let program = add_and_all_reduce(1);
        let small = client.compile(&PjrtProgram::replicated(program.as_bytes(), 1)).unwrap();
        let x = client.upload(0, DeviceDtype::F32, &[4], &to_bytes([1.0; 4])).unwrap();
        assert_eq!(download_f32(&small.execute(&[vec![&x, &x]]).unwrap()[0][0]), [2.0; 4]);
    }
}

/// Some plugins find this out when they compile, some when they run.
#[test]
fn custom_call_that_the_plugin_lacks_is_named() {
    let program = "module { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        %y = stablehlo.custom_call @no_such_target(%x) : (tensor<4xf32>) -> tensor<4xf32>
        return %y : tensor<4xf32>
    } }";
    for client in plugins::cpu_clients() {
        let x: Vec<_> =
            (0..2).map(|device| client.upload(device, DeviceDtype::F32, &[4], &to_bytes([1.0; 4])).unwrap()).collect();
        let error = client
            .compile(&PjrtProgram::replicated(program.as_bytes(), 2))
            .and_then(|executable| executable.execute(&[vec![&x[0]], vec![&x[1]]]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no_such_target"), "{error}");
    }
}

/// Builds a library whose `GetPjrtApi` returns `table`.
fn fake_plugin(folder: &Path, name: &str, table: &str) -> PathBuf {
    let source = format!(
        "#[repr(C)] pub struct Table {{ size: usize, extension: usize, version_size: usize, version_extension: usize,
             major: i32, minor: i32, functions: [usize; 8] }}
         static TABLE: Table = Table {{ size: {table}, functions: [0; 8] }};
         // SAFETY: the library has nothing else of this name.
         #[unsafe(no_mangle)] pub extern \"C\" fn GetPjrtApi() -> *const Table {{
             if TABLE.size == 0 {{ std::ptr::null() }} else {{ &TABLE }}
         }}"
    );
    let (source_path, library) = (folder.join(format!("{name}.rs")), folder.join(format!("{name}.so")));
    fs::write(&source_path, source).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let arguments = ["--edition", "2024", "--crate-type", "cdylib", "-o"];
    let built = Command::new(rustc).args(arguments).arg(&library).arg(&source_path).status().unwrap();
    assert!(built.success());
    library
}

#[test]
fn plugin_table_old_short_or_missing_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let version =
        |major, minor| format!("extension: 0, version_size: 24, version_extension: 0, major: {major}, minor: {minor}");
    for (name, size, major, minor, wanted) in [
        ("old", 512, 0, 53, "C API 0.53; expected 0.54 or newer"),
        ("other", 2048, 1, 60, "C API 1.60; expected 0.54 or newer"),
        ("short", 96, 0, 115, "its table of functions takes 96 bytes, less than"),
        ("null", 0, 0, 0, "its `GetPjrtApi` returned null"),
    ] {
        let library = fake_plugin(folder.path(), name, &format!("{size}, {}", version(major, minor)));
        expect_load_error(&library, wanted);
    }
}
