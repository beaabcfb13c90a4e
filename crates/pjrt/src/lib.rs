//! PJRT: plugins, devices and buffers ([`runtime`]); programs of ours on a mesh of devices ([`xla`]) and of users
//! ([`exported`]); programs compiled for devices that are not here ([`compile_worker`]).
//!
//! Without the default feature `bindings`, which needs libclang and protoc, there is nothing here.

#![cfg(feature = "bindings")]

pub mod compile_worker;
pub mod exported;
pub mod runtime;
pub mod xla;
