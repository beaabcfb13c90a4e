//! Any bytes as a recorded run of a published implementation, with the spec that its options ask for.
#![no_main]

#[path = "file.rs"]
mod file;

use assay_fixture::PeerFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match PeerFile::read(file::of(bytes, "json")) {
        Err(error) => file::expect_one_line(&error),
        Ok(run) => {
            let _ = run.candidate();
            if let Err(error) = run.resolve() {
                file::expect_one_line(&error);
            }
        }
    }
});
