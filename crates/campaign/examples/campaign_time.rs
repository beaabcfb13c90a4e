//! How long a campaign of TRL's loss takes, with and without the mutation score: `cargo run --release -p assay-campaign --example
//! campaign_time -- 500`, of 500 problems before the native kernel.
//!
//! Processor time is that of all threads together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use assay_campaign::{Campaign, Deck, Fault, KernelUnderTest, LocalKernel};
use assay_core::problem::{Candidate, FloatView, Problem};
use assay_core::spec::LossSpec;
use assay_core::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay_native::Native;
use ndarray::Ix3;

fn main() {
    let cases = std::env::args().nth(1).map_or(500, |cases| cases.parse().expect("a number of problems"));
    let spec =
        presets::spec(Preset::Trl, None, &PresetOptions::default(), &BatchInputs::default()).expect("a preset").spec;
    println!("mutation score   wall s   processor s   of it in the kernel, wall s");
    for power in [false, true] {
        let deck = Deck { cases, wide: Deck::usual_wide(cases, 2), ..Deck::default() };
        let campaign = Campaign { deck, power, ..Campaign::new("native", spec.clone()) };
        let mut kernel = TimedKernel { calls: Duration::ZERO };
        let (start, processor) = (Instant::now(), processor_seconds());
        campaign.run(&mut kernel, &mut |_| ()).expect("a campaign that runs");
        let (wall, processor) = (start.elapsed().as_secs_f64(), processor_seconds() - processor);
        let calls = kernel.calls.as_secs_f64();
        println!("{:<14} {wall:>8.2} {processor:>13.2} {calls:>29.2}", if power { "yes" } else { "no" });
    }
}

/// The native kernel, and the time that its calls took.
struct TimedKernel {
    calls: Duration,
}

impl KernelUnderTest for TimedKernel {
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<'_, Ix3>>),
    ) -> Result<(), Fault> {
        let start = Instant::now();
        let mut reading = Duration::ZERO;
        let answered = LocalKernel::<Problem>(&Native::default()).answer(spec, problem, &mut |candidate| {
            let start = Instant::now();
            read(candidate);
            reading += start.elapsed();
        });
        self.calls += start.elapsed().saturating_sub(reading);
        answered
    }
}

/// Returns what all threads took so far, to the nanosecond; 0 where the system does not count it.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let statistics = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
    // The first of three numbers is the time on a processor.
    let nanoseconds = |statistics: String| statistics.split_whitespace().next()?.parse::<f64>().ok();
    statistics.filter_map(nanoseconds).sum::<f64>() / 1e9
}
