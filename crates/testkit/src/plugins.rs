//! The CPU plugins that `make setup` installs, and how tests compile with them.

use std::env;
use std::path::Path;

use assay_core::text::ShownPath;
use assay_pjrt::runtime::{Client, RuntimeError};

/// The client of a plugin. Programs compile with XLA's least optimisation, as a test runs each a few times; with
/// `ASSAY_FULL_OPTIMIZATION` set, as users compile them.
///
/// # Errors
/// [`RuntimeError`] where the plugin cannot be loaded.
pub fn client(path: &Path) -> Result<Client, RuntimeError> {
    let client = Client::shared(path)?;
    if env::var_os("ASSAY_FULL_OPTIMIZATION").is_none() {
        client.compile_quickly();
    }
    Ok(client)
}

/// One client of the default plugin and of the older one.
///
/// # Panics
/// Where one is not installed.
pub fn cpu_clients() -> Vec<Client> {
    ["pjrt_cpu.so", "pjrt_cpu_0_81.so"]
        .map(|name| {
            let path = Path::new(".plugins").join(name);
            assert!(path.is_file(), "{} is missing: run `make setup`", ShownPath(&path));
            client(&path).unwrap()
        })
        .to_vec()
}
