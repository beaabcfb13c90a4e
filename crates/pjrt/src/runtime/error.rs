//! The errors between this process and a plugin.

use std::path::PathBuf;
use std::time::Duration;

use pjrt_sys::{PJRT_Api, PJRT_Error, PJRT_Error_Destroy_Args, PJRT_Error_GetCode_Args, PJRT_Error_Message_Args};

use super::abi::bytes_from;
use assay_core::device_dtype::DeviceDtype;
use assay_core::memory::Shortage;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};

/// The environment variable with the seconds that a run may take.
pub const LIMIT_VARIABLE: &str = "ASSAY_RUN_SECONDS";

/// The reason why the runtime failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeError {
    /// The flags of the environment end the process that reads them.
    #[error("`XLA_FLAGS`: got `{given}`, expected flags that {path} reads; it ended ({status}): {said}")]
    Flags {
        /// The whole content of the variable.
        given: ForeignText,
        /// The path of the plugin.
        path: ShownPath,
        /// The exit status or the signal of the process that tried them.
        status: String,
        /// The line that it wrote about the reason.
        said: ForeignText,
    },
    /// No plugin was named, and none is installed.
    #[error(
        "PJRT plugin: none given and none found ({}); run `make setup`, or give one by --plugin or \
         ASSAY_PJRT_PLUGIN",
        assay_core::project::in_words(looked)
    )]
    NoPlugin {
        /// Every path that was tried, in order.
        looked: Vec<PathBuf>,
    },
    /// The file cannot be loaded as a shared library.
    #[error("PJRT plugin {path}: cannot be loaded: {reason}")]
    Load {
        /// The file that was to be loaded.
        path: ShownPath,
        /// The message of the system's loader.
        reason: ForeignText,
    },
    /// The library is not a PJRT plugin.
    #[error("PJRT plugin {path}: {found}; expected a library that exports `GetPjrtApi`")]
    NotAPlugin {
        /// The file that was to be loaded.
        path: ShownPath,
        /// The property that disqualifies the library.
        found: String,
    },
    /// The plugin has a C API that this crate does not support.
    #[error("PJRT plugin {path}: C API {major}.{minor}; expected 0.{oldest} or newer")]
    Version {
        /// The file that was to be loaded.
        path: ShownPath,
        /// The major version of its C API.
        major: i32,
        /// The minor version of its C API.
        minor: i32,
        /// The oldest minor version that is supported.
        oldest: i32,
    },
    /// The process has loaded as many plugins as it can.
    #[error("PJRT plugin {path}: already {limit} plugins are loaded, the most that one process may hold")]
    TooManyPlugins {
        /// The file that was to be loaded.
        path: ShownPath,
        /// The most plugins that a process may load.
        limit: usize,
    },
    /// The plugin refused or failed.
    #[error("{what}: {code}: {message}")]
    Plugin {
        /// The operation that the plugin was asked for.
        what: String,
        /// PJRT's name of the error code.
        code: &'static str,
        /// The message of the plugin, unchanged.
        message: ForeignLines,
    },
    /// The plugin lacks a function.
    #[error("{what}: the plugin does not implement it")]
    Missing {
        /// The operation that the plugin was asked for.
        what: String,
    },
    /// The plugin gave an impossible answer.
    #[error("{what}: the plugin returned {given}, expected {expected}")]
    Answer {
        /// The operation that the plugin was asked for.
        what: String,
        /// The answer as text, or its size.
        given: String,
        /// A description of valid answers.
        expected: String,
    },
    /// The plugin has fewer devices than were asked for.
    #[error("device count: got {given}, expected 1 to {available} (platform {platform})")]
    Devices {
        /// The number of devices asked for.
        given: usize,
        /// The number of devices that the plugin has.
        available: usize,
        /// The platform's name, such as `cpu`.
        platform: String,
    },
    /// The number of bytes does not match the array.
    #[error("{what}: got {given} bytes, expected {expected} for {element} {shape:?}")]
    Bytes {
        /// The operation and the array that it is about.
        what: String,
        /// The number of bytes that the caller gave.
        given: usize,
        /// The number of bytes that the shape needs.
        expected: usize,
        /// The element type of the array.
        element: DeviceDtype,
        /// The extents of the array.
        shape: Vec<usize>,
    },
    /// The arguments do not match the executable.
    #[error("execute: got {given}, expected {expected}")]
    Arguments {
        /// The arguments that were passed, as counts.
        given: String,
        /// The arguments that the executable takes.
        expected: String,
    },
    /// A run did not finish in time. It continues, since PJRT cannot cancel it.
    #[error(
        "{what}: not finished after {limit:?}, and given up; {LIMIT_VARIABLE} says how many seconds a run may take"
    )]
    TimedOut {
        /// The operation that was waited for.
        what: String,
        /// The time limit that was exceeded.
        limit: Duration,
    },
    /// The environment has an invalid time limit.
    #[error("{LIMIT_VARIABLE}: got `{given}`, expected whole seconds, at least 1")]
    Limit {
        /// The value of the environment variable.
        given: String,
    },
    /// Several devices have the same part of an output with different values.
    #[error(
        "{output}: on device {device} element {element} is {given}, expected {expected}, which another device holds"
    )]
    Replicas {
        /// The name of the output that differs.
        output: &'static str,
        /// The device whose value differs from an earlier one.
        device: usize,
        /// The index of the element in the whole array, in row-major order.
        element: usize,
        /// The element's bytes in hexadecimal, the highest digit first.
        given: String,
        /// The bytes of the same element on an earlier device.
        expected: String,
    },
    /// The run needs more memory than is available.
    #[error(transparent)]
    Memory(#[from] Shortage),
}

/// Turns a PJRT status into a `Result`, and frees it.
///
/// # Safety
/// `error` came from `api` and is used nowhere else.
pub(super) unsafe fn check(
    api: &PJRT_Api,
    error: *mut PJRT_Error,
    what: impl FnOnce() -> String,
) -> Result<(), RuntimeError> {
    if error.is_null() {
        return Ok(());
    }
    // The message belongs to the error: it is copied before the error is freed.
    let mut message = PJRT_Error_Message_Args::new();
    message.error = error;
    let mut code = PJRT_Error_GetCode_Args::new();
    code.error = error;
    let mut destroy = PJRT_Error_Destroy_Args::new();
    destroy.error = error;
    // SAFETY: the error is alive until the last call, and the message is copied before that.
    let message = unsafe {
        if let Some(read) = api.PJRT_Error_Message {
            read(&raw mut message);
        }
        if let Some(read) = api.PJRT_Error_GetCode {
            let nested = read(&raw mut code);
            debug_assert!(nested.is_null(), "an error without a code");
        }
        let text = String::from_utf8_lossy(bytes_from(message.message, message.message_size)).into_owned();
        if let Some(free) = api.PJRT_Error_Destroy {
            free(&raw mut destroy);
        }
        text
    };
    Err(RuntimeError::Plugin { what: what(), code: code_name(code.code), message: message.into() })
}

/// Returns the name of an error code; PJRT has those of absl.
fn code_name(code: u32) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    NAMES.get(code as usize).copied().unwrap_or("an error code that PJRT does not define")
}
