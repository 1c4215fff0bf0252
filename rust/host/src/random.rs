//! Random numbers.

use std::hash::{BuildHasher, RandomState};

/// A number that differs from process to process and from call to call.
pub(crate) fn random() -> u64 {
    // The standard library's keys come from the operating system.
    RandomState::new().hash_one(std::process::id())
}
