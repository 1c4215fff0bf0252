//! The contract between the parts of undercroft: keys, requests and answers, errors, and the formats of stored bytes.
//! Values and traits only. This crate makes no system call, and knows neither Python, CUDA nor the environment.

pub mod binding;
pub mod checksum;
pub mod cipher;
pub mod error;
pub mod explain;
pub mod format;
pub mod hint;
pub mod image;
pub mod io;
pub mod key;
pub mod little_endian;
pub mod log;
pub mod namespace;
pub mod pages;
pub mod panics;
pub mod pending;
pub mod prefetch;
pub mod remote;
pub mod session;
pub mod size;
mod sources;
pub mod tier;
mod tokens;
