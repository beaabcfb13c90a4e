//! The `assay` command; see [`assay::cli`].

use std::process::ExitCode;

/// The allocator, which counts the bytes that training allocates.
#[cfg(feature = "train")]
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> ExitCode {
    #[cfg(feature = "pjrt")]
    {
        assay::runtime::quiet_plugins();
        if let Ok(own) = std::env::current_exe() {
            assay::runtime::try_flags_with(own);
        }
    }
    assay::cli::main()
}
