//! Any text as a spec in YAML, TOML and JSON. A spec that is taken has a form of each, and a description.
#![no_main]

use assay_core::spec::LossSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let parsed = [
        serde_saphyr::from_str::<LossSpec>(text).ok(),
        toml::from_str(text).ok(),
        serde_json::from_str(text).ok(),
    ];
    for spec in parsed.into_iter().flatten() {
        match spec.check() {
            Err(error) => assert!(!error.to_string().is_empty()),
            Ok(()) => {
                let again = serde_json::to_string(&spec).expect("plain data has a JSON form");
                let again: LossSpec = serde_json::from_str(&again).expect("its own JSON");
                assert!(again.check().is_ok());
            }
        }
    }
});
