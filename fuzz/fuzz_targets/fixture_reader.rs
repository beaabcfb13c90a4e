//! Any bytes at all, read as a safetensors file in every way there is. Errors are fine; a panic, or an allocation
//! beyond `-malloc_limit_mb`, is not.
#![no_main]

use std::io::Cursor;

use assay_core::problem::{FloatArray, HeadGradient};
use assay_fixture::{ProblemFile, SafetensorsFile, candidate};
use libfuzzer_sys::fuzz_target;
use ndarray::{Ix3, IxDyn};

const PREFIX_LEN: usize = 8;

fuzz_target!(|bytes: &[u8]| {
    read_everything(bytes);
    // Most changes to a header change its length, and would all end at the same error: mend the prefix and go deeper.
    if let Some(brace) = bytes.iter().rposition(|&byte| byte == b'}')
        && brace >= PREFIX_LEN
    {
        let header_len = (brace + 1 - PREFIX_LEN) as u64;
        read_everything(&[&header_len.to_le_bytes(), &bytes[PREFIX_LEN..]].concat());
    }
});

fn read_everything(bytes: &[u8]) {
    let held = match SafetensorsFile::new(Cursor::new(bytes), "fuzzed") {
        Ok(held) => held,
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains(char::is_control), "not one line: {message:?}");
            return;
        }
    };
    for name in held.names() {
        let (dtype, shape) = held.info(name).expect("it is listed");
        assert!(shape.iter().product::<usize>() * dtype.bitsize() / 8 <= bytes.len());
        let _ = held.floats::<IxDyn>(name);
        let _ = held.numbers::<IxDyn>(name);
        let _ = held.integers::<IxDyn>(name);
    }
    let _ = candidate::<FloatArray<Ix3>, _>(&held);
    let _ = candidate::<HeadGradient, _>(&held);
    let problems = ProblemFile::new(held);
    for logits in problems.logits_names() {
        let _ = problems.problem(logits, None);
        for old_logp in problems.old_logp_names() {
            let _ = problems.problem(logits, Some(old_logp));
        }
    }
}
