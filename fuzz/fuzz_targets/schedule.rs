//! Any text as the two files of a TPU kernel's schedule, which a line of `=` separates.
#![no_main]

use assay_ahead::tpu::TpuTarget;
use assay_ahead::tpu::schedule::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (bundles, utilization) = text.split_once("\n====\n").unwrap_or((text, ""));
    let target = TpuTarget::parse("v6e").expect("a known chip");
    if let Err(error) = parse("kernel", bundles, utilization, target.chip) {
        assert!(!error.to_string().is_empty());
    }
});
