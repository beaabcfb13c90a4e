//! The flags of XLA in the environment, tried in another process before this one reads them.
//!
//! XLA ends the process that gives it an unknown flag, or a known one with a wrong value, by exit code 1, which is that of a failed verdict
//! in the `assay` command.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::client::Client;
use super::error::RuntimeError;
use super::plugin::Plugin;

/// The environment variable from which every XLA reads its flags.
pub(crate) const XLA_VARIABLE: &str = "XLA_FLAGS";

/// The hidden command of the `assay` executable that tries a plugin.
pub const TRIAL_COMMAND: &str = "try-plugin";

/// Whether every plugin knows `flag` and takes its value, so that it is not worth a process.
fn is_known(flag: &str) -> bool {
    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
    match name {
        // XLA reads quotes itself.
        "--xla_dump_to" => value.is_some_and(|path| !path.is_empty() && !path.contains(['"', '\''])),
        "--xla_dump_hlo_as_text" | "--xla_dump_hlo_as_proto" | "--xla_llvm_disable_expensive_passes" => {
            matches!(value, None | Some("true" | "false"))
        }
        "--xla_force_host_platform_device_count" => {
            value.and_then(|count| count.parse().ok()).is_some_and(|count: u32| (1..=64).contains(&count))
        }
        "--xla_backend_optimization_level" => matches!(value, Some("0" | "1" | "2" | "3")),
        _ => false,
    }
}

/// The exit code of the `assay` command for an error, which the process that reads the flags next has again.
const ERROR: i32 = 2;

/// The executable that [`try_flags_with`] was given.
static EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();

/// Lets the `assay` executable at `executable` try plugins first, by [`TRIAL_COMMAND`], wherever the environment has flags for XLA.
pub fn try_flags_with(executable: PathBuf) {
    // Only the first is kept: a process has one executable.
    let _ = EXECUTABLE.set(executable);
}

/// Creates a client of the plugin at `path` in this process, which its flags may end.
///
/// # Errors
/// As [`Plugin::load`] and [`Client::create`].
pub fn try_plugin(path: &Path) -> Result<(), RuntimeError> {
    Client::create(Plugin::load(path)?).map(drop)
}

/// Checks that the plugin at `path` reads the flags of the environment and goes on.
pub(super) fn expect_flags(path: &Path) -> Result<(), RuntimeError> {
    let given = env::var(XLA_VARIABLE).unwrap_or_default();
    let Some(executable) = EXECUTABLE.get().filter(|_| !given.split_whitespace().all(is_known)) else {
        return Ok(());
    };
    let mut trial = Command::new(executable);
    trial.arg(TRIAL_COMMAND).arg(path).stdin(Stdio::null()).stdout(Stdio::null());
    // An executable that is gone tries nothing.
    let Ok(tried) = trial.output() else { return Ok(()) };
    if tried.status.success() || tried.status.code() == Some(ERROR) {
        return Ok(());
    }
    // The line that XLA marks as fatal has the reason after the time and the place in its source; a list of all flags may follow it.
    let words = String::from_utf8_lossy(&tried.stderr);
    let fatal = words.lines().filter(|line| line.starts_with('F')).find_map(|line| line.split_once("] "));
    let last = || words.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing");
    let said = fatal.map_or_else(last, |(_, said)| said);
    Err(RuntimeError::Flags {
        given: given.into(),
        path: path.into(),
        status: tried.status.to_string(),
        said: said.into(),
    })
}
