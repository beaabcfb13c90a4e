//! The `assay` command; see [`assay::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "pjrt")]
    assay::runtime::quiet_plugins();
    assay::cli::main()
}
