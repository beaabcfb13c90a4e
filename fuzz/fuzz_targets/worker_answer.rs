//! Any bytes as all that a kernel's process writes to its stdout: with a valid introduction before them, and without one.
#![no_main]

#[path = "file.rs"]
mod file;

use std::ffi::OsString;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use assay_campaign::worker::{Worker, WorkerError, WorkerLaunch};
use assay_core::problem::{Dtype, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{Recipe, Regime};
use libfuzzer_sys::fuzz_target;
use signal_hook::consts::SIGPIPE;

const HELLO: &[u8] = br#"{"protocol": "assay-check/1", "dtypes": ["f32"], "outputs": []}"#;

static PROBLEM: LazyLock<Problem> = LazyLock::new(|| {
    let recipe = Recipe {
        shape: [1, 2, 3],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 0,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    recipe.problem(&LossSpec::default()).expect("a valid recipe")
});

// A write to a kernel that has ended is an error in a program of Rust's, and a signal in the fuzzer's, which would end it.
fuzz_target!(
    init: {
        signal_hook::flag::register(SIGPIPE, Arc::default()).expect("a signal that may be handled");
    },
    |bytes: &[u8]| {
        ask(bytes);
        ask(&[HELLO, b"\n", bytes, b"\n"].concat());
    }
);

fn ask(stdout: &[u8]) {
    let path = file::of(stdout, "txt");
    // The shell goes on to read, so that a request is not an error before the answer is read.
    let script = r#"cat "$0"; exec cat >/dev/null"#;
    let moment = Duration::from_millis(200);
    let launch = WorkerLaunch::new(["sh".into(), "-c".into(), script.into(), OsString::from(path)]);
    let said = Worker::start(WorkerLaunch { start: moment, answer: moment, ..launch })
        .and_then(|mut worker| worker.ask(&LossSpec::default(), &*PROBLEM).map(drop));
    if let Err(error @ WorkerError::Protocol { .. }) = said {
        assert!(!error.to_string().lines().next().unwrap_or_default().contains(char::is_control), "{error:?}");
    }
}
