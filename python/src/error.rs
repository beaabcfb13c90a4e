//! The package's exceptions, which Python defines, and work that is done without the interpreter's lock.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use assay::text::shown_lines;
use pyo3::prelude::*;

/// Returns a message without characters that drive a terminal, which a stranger's file may have in its names.
fn shown(reason: &impl ToString) -> String {
    shown_lines(&reason.to_string()).into_owned()
}

/// The exception `class` of the package, made of `arguments`.
fn made<'py>(py: Python<'py>, class: &str, arguments: impl pyo3::call::PyCallArgs<'py>) -> PyErr {
    let made = py.import("assay._errors").and_then(|module| module.getattr(class)?.call1(arguments));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Returns the `SpecError` for a spec that is invalid.
pub(crate) fn spec_error(py: Python<'_>, reason: impl ToString) -> PyErr {
    made(py, "SpecError", (shown(&reason),))
}

/// Returns the `ProblemError` for a problem, a recipe or a file that is invalid.
pub(crate) fn problem_error(py: Python<'_>, reason: impl ToString) -> PyErr {
    made(py, "ProblemError", (shown(&reason),))
}

/// Returns the `OutputError` for an output `field` that is invalid.
pub(crate) fn output_error(py: Python<'_>, field: &str, given: impl ToString, expected: impl ToString) -> PyErr {
    made(py, "OutputError", (field, shown(&given), shown(&expected)))
}

/// Returns the `InputMutated` error for a kernel that wrote to the input `field`.
pub(crate) fn input_mutated(py: Python<'_>, field: &str) -> PyErr {
    let reason = format!("`{field}`: got other bytes after the call than before, expected an input that is only read");
    made(py, "InputMutated", (reason, field))
}

/// Returns the `KernelCrashed` error for a kernel whose process ended, with the `signal` if one ended it.
pub(crate) fn kernel_crashed(py: Python<'_>, reason: impl ToString, signal: Option<i32>) -> PyErr {
    made(py, "KernelCrashed", (shown(&reason), signal))
}

/// Returns the `KernelFailure` error for a kernel whose numbers are wrong.
pub(crate) fn kernel_failed(py: Python<'_>, reason: impl ToString) -> PyErr {
    made(py, "KernelFailure", (shown(&reason),))
}

/// Returns an `AssayError`, for errors that have no class.
pub(crate) fn other(py: Python<'_>, reason: impl ToString) -> PyErr {
    made(py, "AssayError", (shown(&reason),))
}

/// The process whose threads compute, 0 before there are any.
static COMPUTES: AtomicU32 = AtomicU32::new(0);

/// Does `work` without the interpreter's lock. A panic becomes an error: it is a defect of this package's.
///
/// # Errors
/// In a process that was forked after the threads were started: it has none of them, and would wait for ever.
pub(crate) fn apart<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let here = process::id();
    // The first call records its process; a fork inherits the number, but not the threads.
    let first = COMPUTES.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|first| first);
    if first != 0 && first != here {
        let expected = "expected a process of its own: multiprocessing.get_context(\"spawn\")";
        return Err(other(py, format!("process: got a fork of process {first}, which had computed, {expected}")));
    }
    // A panic must not unwind through the interpreter's C frames.
    py.detach(|| catch_unwind(AssertUnwindSafe(work))).map_err(|panic| {
        other(py, format!("a defect of grpo-assay's own, please report it: {}", words(panic.as_ref())))
    })
}

/// Returns the message of a panic.
pub(crate) fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}
