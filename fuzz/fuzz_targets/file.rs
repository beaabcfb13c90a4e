//! Bytes as a file of this process, for readers that take a path.

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;

/// Writes the bytes over those of the last call, into memory where that is a file system.
pub fn of(bytes: &[u8], extension: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let path = folder.join(format!("assay-fuzz-{}.{extension}", std::process::id()));
    fs::write(&path, bytes).expect("a file in memory");
    path
}

/// Checks that an error is one line, without characters that drive a terminal.
#[allow(dead_code, reason = "not every target that writes a file has an error")]
pub fn expect_one_line(error: &dyn Display) {
    let message = error.to_string();
    assert!(!message.contains(char::is_control), "not one line: {message:?}");
    assert!(message.len() < 4096, "{} bytes", message.len());
}
