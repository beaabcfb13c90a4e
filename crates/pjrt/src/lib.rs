//! PJRT: plugins, devices and buffers ([`runtime`]); programs of ours on a mesh of devices ([`xla`]) and of users
//! ([`exported`]); programs compiled for devices that are not here ([`ahead`]).
//!
//! Without the default feature `bindings`, which needs libclang and protoc, there is nothing here.

#![cfg(feature = "bindings")]

pub mod ahead;
pub mod exported;
pub mod runtime;
pub mod xla;
