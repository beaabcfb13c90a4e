//! PJRT: the one door to devices. A [`Plugin`] is a shared library with a `GetPjrtApi`; a [`Client`] holds its devices;
//! a [`DeviceBuffer`] is an array on one of them; an [`Executable`] is a compiled StableHLO program. A
//! [`Topology`] describes devices that are not here; a program compiled for one is [`UnloadedExecutable`].
//!
//! Every object keeps alive what it was made from and frees itself, so that any order of drops is right. PJRT objects
//! may be used from any thread, and so may these. Plugins stay loaded until the process ends: none can be unloaded.
//!
//! The calls go through `pjrt-sys`, because `pjrt` 0.2 executes on one device only, has no bf16 host buffers, takes an
//! event that is ready for one that has succeeded, and panics where a destructor fails. `pjrt` itself encodes the
//! compile options.

// The C API. Each block gives its reason.
#![allow(unsafe_code)]

#[doc(hidden)]
pub mod abi;
mod buffers;
mod client;
mod error;
mod execute;
mod flags;
mod memory;
mod plugin;
mod topology;

pub use buffers::DeviceBuffer;
pub use client::Client;
pub use error::{LIMIT_VARIABLE, RuntimeError};
pub use execute::{Executable, PjrtProgram, TIME_LIMIT};
pub(crate) use flags::XLA_VARIABLE;
pub use flags::{TRIAL_COMMAND, try_flags_with, try_plugin};
pub use plugin::{PLUGIN_VARIABLE, Plugin, asked_for, find_installed, locate, quiet_plugins};
pub use topology::{Topology, UnloadedExecutable};
