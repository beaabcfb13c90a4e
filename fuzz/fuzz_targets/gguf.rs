//! Any bytes as a GGUF file of a Qwen2 model.
#![no_main]

#[path = "file.rs"]
mod file;

use assay_train::train::qwen2::read_checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = file::of(bytes, "gguf");
    if let Err(error) = read_checkpoint(&path) {
        assert!(!error.to_string().is_empty());
    }
});
