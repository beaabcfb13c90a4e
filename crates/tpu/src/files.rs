//! What libtpu leaves behind, read as text.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::error::TpuError;

/// The largest file that is read back. The longest seen takes 1 MB.
const MOST_BYTES: u64 = 64 << 20;

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TpuError {
    let path = path.to_path_buf();
    move |reason| TpuError::Io { path, action, reason }
}

/// A whole file, if it is not too large for one; bytes that are no UTF-8 are replaced.
pub(super) fn read_text(path: &Path) -> Result<String, TpuError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed("open", path))?;
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed("read", path))?;
    if bytes.len() as u64 > MOST_BYTES {
        let reason = io::Error::other(format!("it has more than {MOST_BYTES} bytes"));
        return Err(failed("read", path)(reason));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
