//! Reading of files that nobody vouches for: regular files, and never more than is expected of them.
//!
//! A path that the user names may lead anywhere, also to a pipe, and is read by [`read_named`]. A path that is found, such as a manifest
//! next to a problem or a file in a folder, must lead to a regular file: a device has no end, and a pipe may never have a beginning.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens the regular file to which `path` leads, without waiting for a pipe or a device.
///
/// # Errors
/// The operating system's error, or one that says what `path` leads to in place of a regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // A pipe without a writer, and some devices, would otherwise be waited for. Regular files do not mind.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NONBLOCK.union(rustix::fs::OFlags::NOCTTY).bits().cast_signed(),
    );
    let file = options.open(path)?;
    // The file that is open is asked, and not the path, which may lead elsewhere by now.
    let metadata = file.metadata()?;
    if metadata.is_file() { Ok(file) } else { Err(not_regular(&metadata)) }
}

/// Returns the error that `metadata` is not that of a regular file.
fn not_regular(metadata: &Metadata) -> io::Error {
    let file_type = metadata.file_type();
    let mut given = if file_type.is_dir() { "a folder" } else { "no file" };
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if file_type.is_fifo() {
            given = "a pipe";
        } else if file_type.is_char_device() || file_type.is_block_device() {
            given = "a device";
        }
    }
    io::Error::new(io::ErrorKind::InvalidInput, format!("got {given}, expected a regular file"))
}

/// Creates a file at `path`, over whatever file or link is there: what a link leads to stays as it is.
///
/// # Errors
/// The operating system's error.
pub fn create_own(path: &Path) -> io::Result<File> {
    // The name is removed, never followed, and then made by whoever is first.
    match std::fs::remove_file(path) {
        Err(reason) if reason.kind() != io::ErrorKind::NotFound => return Err(reason),
        _ => {}
    }
    File::create_new(path)
}

/// Opens a file to lock it, and creates it if it is not there. A link at `path` is refused, and nothing is written.
///
/// # Errors
/// The operating system's error.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NONBLOCK.union(rustix::fs::OFlags::NOFOLLOW).bits().cast_signed(),
    );
    options.open(path)
}

/// Reads the regular file to which `path` leads, of at most `longest` bytes.
///
/// # Errors
/// Those of [`open_regular`], and one for a file that is longer.
pub fn read_regular(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    read_at_most(open_regular(path)?, longest)
}

/// Reads text in UTF-8, as [`read_regular`] does.
///
/// # Errors
/// Those of [`read_regular`], and one for other bytes.
pub fn read_regular_text(path: &Path, longest: u64) -> io::Result<String> {
    in_utf8(read_regular(path, longest)?)
}

/// Reads at most `longest` bytes from whatever the user names, also a pipe.
///
/// # Errors
/// The operating system's error, and one if there is more.
pub fn read_named(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    read_at_most(File::open(path)?, longest)
}

/// Reads text in UTF-8, as [`read_named`] does.
///
/// # Errors
/// Those of [`read_named`], and one for other bytes.
pub fn read_named_text(path: &Path, longest: u64) -> io::Result<String> {
    in_utf8(read_named(path, longest)?)
}

fn read_at_most(file: File, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than allowed is read, so that a longer file is seen without reading all of it.
    file.take(longest.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        let reason = format!("got more than {longest} bytes, expected at most {longest}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

fn in_utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let reason = format!("got a byte outside UTF-8 at offset {}, expected text", error.utf8_error().valid_up_to());
        io::Error::new(io::ErrorKind::InvalidData, reason)
    })
}
