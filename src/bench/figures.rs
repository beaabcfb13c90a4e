//! The figures of a bench, from its times and the memory that was seen.

use std::collections::BTreeMap;
use std::time::Duration;

use super::subject::{BenchSubject, MemorySeen, Opponent};
use super::timed::Timed;
use super::turns::Times;
use crate::case::StepCounts;
use crate::gpu::GpuChip;
use crate::implementation::{KernelTiming, KernelTimings, RunsOn, Unavailable};
use crate::memory::{CompiledMemory, DeviceMemory};
use crate::schema::bench::{BenchFigures, BenchKernel, KernelFigures, Ratios};

impl<W: Timed> BenchSubject<'_, W> {
    pub(super) fn figures(
        &self,
        counts: StepCounts,
        times: Times,
        memory: MemorySeen,
        runs_on: Option<RunsOn>,
    ) -> BenchFigures {
        let steps = sorted(&times.steps);
        let mean = steps.iter().sum::<f64>() / steps.len() as f64;
        let median = percentile(&steps, 50);
        let ratio = |times: &Vec<Duration>| median / percentile(&sorted(times), 50);
        let name = |opponent: &Opponent<W::Problem>| match opponent {
            Opponent::Bound => W::BOUND.to_string(),
            Opponent::Implementation(implementation) => implementation.id().into(),
        };
        let ratios = self.opponents.iter().zip(&times.of_opponents);
        let ratios = Ratios(ratios.map(|(opponent, times)| (name(opponent), ratio(times))).collect());
        let mut why_null = BTreeMap::new();
        let isa = self.implementation.isa();
        if isa.is_none() {
            why_null
                .insert("isa".into(), "only kernels on this machine's cores say which instructions they use".into());
        }
        let roofline_share = ratios.0.get(W::BOUND).map(|ratio| 1.0 / ratio);
        if roofline_share.is_none() {
            why_null.insert("roofline_share".into(), format!("the bound is {}: --against {}", W::BOUND_IS, W::BOUND));
        }
        let mut keep = |key: &str, figure: Result<i64, Unavailable>| {
            figure.map_err(|why| why_null.insert(key.into(), why.reason)).ok()
        };
        let unreported = || Unavailable { reason: "the device's allocator does not report it".into() };
        let in_use = |memory: &Result<DeviceMemory, Unavailable>| memory.clone().map(|memory| memory.bytes_in_use);
        let peak = |of: fn(DeviceMemory) -> Option<i64>| {
            memory.after_run.clone().and_then(|memory| of(memory).ok_or_else(unreported))
        };
        let compiled = |of: fn(CompiledMemory) -> i64| memory.compiled.clone().map(of);
        let mut figures = BenchFigures {
            implementation: self.implementation.id().into(),
            devices: self.devices,
            shape: self.recipe.extents(),
            dtype: self.recipe.recipe().dtype.to_string(),
            judged_shape: None,
            layout: None,
            rounds_logits: None,
            warmup: counts.warmup,
            steps: counts.steps,
            first_call_s: times.first.as_secs_f64(),
            avg_step_ms: mean * 1e3,
            step_s_mean: mean,
            step_s_p50: median,
            step_s_p90: percentile(&steps, 90),
            step_s_min: percentile(&steps, 0),
            step_s_max: percentile(&steps, 100),
            gb_per_s: None,
            device: None,
            kernel_launches: None,
            kernel_s_p50: None,
            kernel_s_min: None,
            kernel_gb_per_s: None,
            device_copy_s_p50: None,
            device_copy_gb_per_s: None,
            device_copy_share: None,
            kernels: Vec::new(),
            device_gb_per_s: None,
            device_gb_per_s_from: None,
            device_share: None,
            gflop_per_s: None,
            threads: rayon::current_num_threads(),
            isa: isa.map(String::from),
            lowering: self.implementation.lowering().map(String::from),
            ratios,
            roofline_share,
            mem_after_alloc: keep("mem_after_alloc", in_use(&memory.after_alloc)),
            mem_after_run: keep("mem_after_run", in_use(&memory.after_run)),
            peak_bytes_in_use: keep("peak_bytes_in_use", peak(|memory| memory.peak_bytes_in_use)),
            peak_bytes_reserved: keep("peak_bytes_reserved", peak(|memory| memory.peak_bytes_reserved)),
            argument_bytes: keep("argument_bytes", compiled(|memory| memory.argument_bytes)),
            output_bytes: keep("output_bytes", compiled(|memory| memory.output_bytes)),
            temp_bytes: keep("temp_bytes", compiled(|memory| memory.temp_bytes)),
            alias_bytes: keep("alias_bytes", compiled(|memory| memory.alias_bytes)),
            why_null,
        };
        self.recipe.add_own(self.devices, &mut figures);
        if let Some(kernels) = &times.kernels {
            add_kernels(&mut figures, kernels);
        }
        if let Some(runs_on) = runs_on {
            add_device(&mut figures, runs_on, self.devices);
        }
        figures
    }
}

/// Adds what was seen of a step's kernels, and of the copies between them.
fn add_kernels(figures: &mut BenchFigures, KernelTimings { kernels, copies, copied_bytes }: &KernelTimings) {
    // A launch of all kernels takes what each of them takes.
    let launch = |i: usize| kernels.iter().map(|kernel| kernel.took[i]).sum();
    let launches: Vec<Duration> = (0..copies.len()).map(launch).collect();
    let (launches, copies) = (sorted(&launches), sorted(copies));
    let (kernel, copy) = (percentile(&launches, 50), percentile(&copies, 50));
    figures.kernel_launches = Some(launches.len());
    figures.kernel_s_p50 = Some(kernel);
    figures.kernel_s_min = Some(percentile(&launches, 0));
    figures.kernel_gb_per_s = figures.gb_per_s.map(|rate| rate * figures.step_s_p50 / kernel);
    let of_copy = 2.0 * *copied_bytes as f64 / 1e9 / copy;
    figures.device_copy_s_p50 = Some(copy);
    figures.device_copy_gb_per_s = Some(of_copy);
    figures.device_copy_share = figures.kernel_gb_per_s.map(|rate| rate / of_copy);
    figures.kernels = kernels.iter().map(figures_of_kernel).collect();
}

fn figures_of_kernel(KernelTiming { kernel, took }: &KernelTiming) -> BenchKernel {
    let took = sorted(took);
    BenchKernel {
        name: kernel.name.clone(),
        s_p50: percentile(&took, 50),
        s_min: percentile(&took, 0),
        assembled: KernelFigures {
            registers: kernel.registers,
            local_bytes: kernel.local_bytes,
            static_shared_bytes: kernel.static_shared_bytes,
            dynamic_shared_bytes: kernel.dynamic_shared_bytes,
            most_threads: kernel.most_threads,
            ptx_version: kernel.ptx_version,
            binary_version: kernel.binary_version,
            ctas_a_multiprocessor: kernel.ctas_a_multiprocessor,
            clusters: kernel.clusters,
        },
    }
}

/// Adds the largest rate of `devices` devices of one kind, as they report it or as NVIDIA's datasheet gives it, and the
/// share that was reached.
fn add_device(figures: &mut BenchFigures, RunsOn { device, bytes_per_s }: RunsOn, devices: usize) {
    let by_datasheet = || GpuChip::with_device_name(&device).map(|chip| (chip.hbm_tb_per_s * 1e12, "datasheet"));
    if let Some((bytes_per_s, from)) = bytes_per_s.map(|own| (own, "device")).or_else(by_datasheet) {
        let most = bytes_per_s / 1e9 * devices as f64;
        let took = figures.kernel_s_p50.unwrap_or(figures.step_s_p50);
        figures.device_gb_per_s = Some(most);
        figures.device_gb_per_s_from = Some(from.into());
        figures.device_share = figures.gb_per_s.map(|rate| rate * figures.step_s_p50 / took / most);
    }
    figures.device = Some(device);
}

/// Returns the times in seconds, in ascending order.
fn sorted(times: &[Duration]) -> Vec<f64> {
    let mut seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

/// The smallest of `sorted` that so many percent of them do not exceed.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (percent * sorted.len()).div_ceil(100);
    sorted[rank.max(1) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bench_percentiles_are_samples() {
        let sorted = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0];
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&sorted, percent)), [1.0, 5.0, 9.0, 10.0]);
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&[3.0], percent)), [3.0; 4]);
        assert_eq!([50, 90].map(|percent| percentile(&[1.0, 2.0, 3.0], percent)), [2.0, 3.0]);
    }
}
