//! The `assay` command; see [`assay::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    assay::cli::main()
}
