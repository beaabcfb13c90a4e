//! Nothing that the runtime makes outlives its owner.

use std::fs;

use assay::device_dtype::DeviceDtype;
use assay::runtime::PjrtProgram;
use assay_testkit::plugins;

/// Resident memory of this process in KiB.
fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// Least-squares slope of `values` over their index.
fn slope(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let (mid, mean) = ((n - 1.0) / 2.0, values.iter().sum::<f64>() / n);
    let covariance: f64 = values.iter().enumerate().map(|(i, y)| (i as f64 - mid) * (y - mean)).sum();
    covariance / values.iter().enumerate().map(|(i, _)| (i as f64 - mid).powi(2)).sum::<f64>()
}

/// A cycle holds 2 × 2 × 256 KiB of buffers: one that is lost each cycle is four times the limit, and those that an allocator keeps for
/// the next one, as it keeps more of larger ones, are below it.
pub(crate) fn cycles_leak_nothing() {
    const CYCLES: usize = 200;
    const WARM_UP: usize = 50;
    let program = "module { func.func public @main(%x: tensor<65536xf32>) -> (tensor<65536xf32>, tensor<f32>) {
        %y = stablehlo.add %x, %x : tensor<65536xf32>
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %sum = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0]
            : (tensor<65536xf32>, tensor<f32>) -> tensor<f32>
        return %y, %sum : tensor<65536xf32>, tensor<f32>
    } }";
    let bytes = vec![0; 1 << 18];
    for client in plugins::cpu_clients() {
        let mut seen = Vec::new();
        for _ in 0..CYCLES {
            let executable = client.compile(&PjrtProgram::replicated(program.as_bytes(), 2)).unwrap();
            let x: Vec<_> =
                (0..2).map(|device| client.upload(device, DeviceDtype::F32, &[1 << 16], &bytes).unwrap()).collect();
            let outputs = executable.execute(&[vec![&x[0]], vec![&x[1]]]).unwrap();
            outputs[1][1].download(DeviceDtype::F32, &[], &mut [0; 4]).unwrap();
            assert!(client.compile(&PjrtProgram::replicated(b"not a program", 1)).is_err());
            seen.push(resident());
        }
        let slope = slope(&seen[WARM_UP..]);
        assert!(slope < 64.0, "resident memory grows by {slope:.1} KiB a cycle on {client:?}: {seen:?}");
    }
}
