//! The files that options name for results: `-` is stdout, and no folder.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::ArgMatches;
use clap::error::ErrorKind;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::CliError;
use crate::text::drives_terminal;

/// Whether stdout carries a result of the command that runs, so that its text goes to stderr.
static STDOUT_TAKEN: AtomicBool = AtomicBool::new(false);

/// Options that name a file for a result, by clap's id and as they are typed.
const FILES: [(&str, &str); 6] = [
    ("json", "--json"),
    ("html", "--html"),
    ("markdown", "--markdown"),
    ("junit", "--junit"),
    ("output", "-o"),
    ("out", "--out"),
];

/// Commands whose `-o` or `--out` names a folder.
const FOLDERS: [(&str, &str, &str); 3] =
    [("suite", "output", "-o"), ("emit", "output", "-o"), ("train", "out", "--out")];

/// Whether `path` names stdout.
fn is_stdout(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|name| path == Path::new(name))
}

/// Decides whether stdout carries a result of this command line.
///
/// # Errors
/// A usage error if it would carry two results, or a folder.
pub(super) fn claim_stdout(matches: &ArgMatches) -> Result<(), clap::Error> {
    let Some((command, given)) = matches.subcommand() else { return Ok(()) };
    let goes_there = |id: &str| given.try_get_one::<PathBuf>(id).ok().flatten().is_some_and(|path| is_stdout(path));
    if let Some((.., option)) = FOLDERS.iter().find(|(name, id, _)| *name == command && goes_there(id)) {
        let wrong = format!("{option}: got stdout, expected a folder: {command} writes several files\n");
        return Err(clap::Error::raw(ErrorKind::ValueValidation, wrong));
    }
    let options: Vec<&str> = FILES.iter().filter(|(id, _)| goes_there(id)).map(|&(_, option)| option).collect();
    if let [first, second, ..] = options[..] {
        let wrong = format!("{first} and {second}: got stdout twice, expected a file for one of them\n");
        return Err(clap::Error::raw(ErrorKind::ArgumentConflict, wrong));
    }
    STDOUT_TAKEN.store(!options.is_empty(), Ordering::Relaxed);
    Ok(())
}

/// Whether stdout carries a result of the command that runs.
pub(super) fn takes_stdout() -> bool {
    STDOUT_TAKEN.load(Ordering::Relaxed)
}

/// Turns a failed write to a standard stream into an error. A pipe that is closed, as by `head`, ends the output and not the command: its
/// exit code still says whether all passed.
pub(super) fn unless_closed(stream: &'static str, written: io::Result<()>) -> Result<(), CliError> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Io { path: stream.into(), action: "write", reason: error })
        }
        _ => Ok(()),
    }
}

/// Writes a file whole or not at all, or to stdout.
pub(super) fn write(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CliError> {
    if is_stdout(path) {
        let mut out = io::BufWriter::new(io::stdout().lock());
        return unless_closed("stdout", fill(&mut out).and_then(|()| out.flush()));
    }
    crate::fixture::persist(path, fill).map_err(|reason| CliError::Io { path: path.into(), action: "write", reason })
}

/// Writes `value` as JSON.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), CliError> {
    write(path, |out| {
        let mut serializer = serde_json::Serializer::with_formatter(&mut *out, ShownJson::default());
        value.serialize(&mut serializer)?;
        out.write_all(b"\n")
    })
}

/// The layout of `serde_json`'s pretty printer, with the characters escaped that JSON allows and a terminal is driven by.
#[derive(Default)]
struct ShownJson(PrettyFormatter<'static>);

impl Formatter for ShownJson {
    fn write_string_fragment<W: Write + ?Sized>(&mut self, out: &mut W, fragment: &str) -> io::Result<()> {
        // Each is one of 16 bits.
        fragment.split_inclusive(drives_terminal).try_for_each(|part| match part.chars().next_back() {
            Some(last) if drives_terminal(last) => {
                out.write_all(&part.as_bytes()[..part.len() - last.len_utf8()])?;
                write!(out, "\\u{:04x}", u32::from(last))
            }
            _ => out.write_all(part.as_bytes()),
        })
    }

    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_array(out)
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_array(out)
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(out, first)
    }

    fn end_array_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_array_value(out)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object(out)
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object(out)
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object_value(out)
    }

    fn end_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object_value(out)
    }
}

/// Lets `make` write a file at `path`. A file for stdout is made in a folder for temporary files first, as its writer may have to seek.
pub(super) fn write_seekable<T, E>(path: &Path, make: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, CliError>
where
    CliError: From<E>,
{
    if !is_stdout(path) {
        return Ok(make(path)?);
    }
    let io = |action| move |reason| CliError::Io { path: "a temporary file".into(), action, reason };
    let file = tempfile::NamedTempFile::new().map_err(io("make"))?;
    let made = make(file.path())?;
    let mut written = std::fs::File::open(file.path()).map_err(io("read"))?;
    write(path, |out| io::copy(&mut written, out).map(drop))?;
    Ok(made)
}
