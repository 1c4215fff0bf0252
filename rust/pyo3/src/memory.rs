//! Facts about this machine, for sizing and `undercroft doctor`.

use pyo3::prelude::*;
use undercroft_contract::pages::page_bytes_for;
use undercroft_engine::slots::{Owner, Slots};
use undercroft_io::memory;

use crate::errors::UndercroftError;

/// Bytes of memory that this process may still allocate, within the limit of its control group. Raises
/// UndercroftError if the kernel does not report them.
#[pyfunction]
pub(crate) fn available_memory() -> PyResult<u64> {
    memory::available().ok_or_else(|| {
        UndercroftError::new_err(
            "the available memory is unknown: /proc/meminfo has no MemAvailable and no control \
             group sets a limit; set host_memory in bytes",
        )
    })
}

/// The control group whose limit determines `available_memory`; None if the machine's memory does.
#[pyfunction]
pub(crate) fn limiting_group() -> Option<String> {
    Some(memory::limiting_group()?.to_string_lossy().into_owned())
}

/// Why this process cannot use io_uring; None if it can. Opens a ring and closes it.
#[pyfunction]
pub(crate) fn probe_io_uring(py: Python<'_>) -> Option<String> {
    py.detach(undercroft_io::probe_io_uring).err()
}

/// Number of payloads of `payload_bytes` that a tier of `capacity` bytes holds if it holds no other payloads: slots are
/// aligned, and lie in pages. 0 if a payload fits no page.
#[pyfunction]
pub(crate) fn slots_in(capacity: u64, payload_bytes: u64) -> u64 {
    let page_bytes = page_bytes_for(capacity);
    let mut page = Slots::new(page_bytes, page_bytes);
    let Some(class) = page.class_for(payload_bytes) else {
        return 0;
    };
    let owner = Owner { node: 0, group: 0 };
    while page.alloc(class, owner).is_some() {}
    page.used(class) * (capacity / page_bytes)
}
