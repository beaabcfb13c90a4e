//! Any text as an optimized HLO module, from which traffic is read.
#![no_main]

use assay_ahead::traffic::Traffic;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(error) = Traffic::parse("module.txt", text) {
        assert!(!error.to_string().is_empty());
    }
});
