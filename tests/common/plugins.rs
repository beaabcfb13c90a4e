//! The CPU plugins that `make setup` installs.

use std::path::PathBuf;

use assay::runtime::Client;

/// The default plugin and the older one.
pub(crate) fn cpu_plugins() -> Vec<PathBuf> {
    ["pjrt_cpu.so", "pjrt_cpu_0_81.so"]
        .map(|name| {
            let path = PathBuf::from(".plugins").join(name);
            assert!(path.is_file(), "{} is missing: run `make setup`", path.display());
            path
        })
        .to_vec()
}

/// One client of each.
pub(crate) fn cpu_clients() -> Vec<Client> {
    cpu_plugins().iter().map(|path| Client::shared(path).unwrap()).collect()
}
