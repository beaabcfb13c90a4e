//! PJRT: plugins, devices, programs of ours and of users, and the LM head's on every device count.

#[path = "../common"]
mod common {
    pub(crate) mod command;
    pub(crate) mod plugins;
}

mod exported_program;
mod lm_head;
mod runtime;
mod target_holes;

/// The libraries of the CPU plugins.
fn cpu_plugins() -> Vec<&'static std::path::Path> {
    common::plugins::cpu_clients().iter().map(|client| client.plugin().path()).collect()
}
