//! PJRT: plugins, devices, programs of ours and of users, and the LM head's on every device count.

mod abi;
mod exported_program;
mod lm_head;
mod on_a_tpu;
mod replicas;
mod rewritten;
mod runtime;
mod scattered;
mod tpu_record;

/// The libraries of the CPU plugins.
fn cpu_plugins() -> Vec<&'static std::path::Path> {
    assay_testkit::plugins::cpu_clients().iter().map(|client| client.plugin().path()).collect()
}
