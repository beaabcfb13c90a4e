//! Any bytes as the result of a command, made into a page.
#![no_main]

use std::path::Path;

use assay_report::{Input, render};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Input::parse(Path::new("fuzzed.json"), bytes) {
        Err(error) => assert!(!error.to_string().contains(char::is_control), "not one line: {error:?}"),
        Ok(input) => {
            let page = render(&[input], "assay report fuzzed.json");
            assert!(page.starts_with("<!DOCTYPE html>"));
        }
    }
});
