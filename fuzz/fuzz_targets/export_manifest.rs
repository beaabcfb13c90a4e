//! Any bytes as the manifest of an exported program. The program itself is compiled by a plugin, and is not there.
#![no_main]

#[path = "file.rs"]
mod file;

use assay_pjrt::exported::ExportedProgram;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ExportedProgram::read(file::of(bytes, "toml"), None) {
        file::expect_one_line(&error);
    }
});
