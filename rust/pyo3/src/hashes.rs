//! A Python list of block hashes, read without copying the list.
#![expect(
    unsafe_code,
    reason = "thousands of hashes are read in microseconds, on the scheduler's thread"
)]

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use undercroft_contract::key::{BlockHash, HASH_BYTES_MAX, HashSource};

/// vLLM's hashes: `bytes` objects in a list.
pub(crate) struct Hashes<'a, 'py>(pub(crate) &'a Bound<'py, PyList>);

impl Hashes<'_, '_> {
    /// The hash at `index`, without a copy; `None` if there is none. Always inlined: behind `dyn HashSource` the
    /// compiler would make a call for each hash, and sending a prompt of 8,192 hashes would take a quarter longer.
    #[inline(always)]
    fn bytes(&self, index: usize) -> Option<&[u8]> {
        let index = ffi::Py_ssize_t::try_from(index).ok()?;
        // SAFETY: `self.0` proves that the interpreter is attached and that this is a list; an index out of
        // range gives null.
        let item = unsafe { ffi::PyList_GetItem(self.0.as_ptr(), index) };
        let bytes = if item.is_null() {
            std::ptr::null_mut()
        } else {
            // SAFETY: a borrowed reference, alive while the list holds it, see below. Null if it is no bytes
            // object.
            unsafe { ffi::PyBytes_AsString(item) }
        };
        if bytes.is_null() {
            // The caller treats the hash as unusable: the exception is dropped.
            drop(PyErr::take(self.0.py()));
            return None;
        }
        // SAFETY: a bytes object, so it has a size.
        let size = usize::try_from(unsafe { ffi::Py_SIZE(item) }).ok()?;
        // SAFETY: as many bytes, which do not change. No other thread runs Python code as long as this thread is
        // attached, and nothing here does: the list holds the object until then.
        Some(unsafe { std::slice::from_raw_parts(bytes.cast(), size) })
    }
}

impl HashSource for Hashes<'_, '_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Option<BlockHash> {
        BlockHash::new(self.bytes(index)?)
    }

    fn append_from(&self, from: usize, out: &mut Vec<u8>) -> (usize, usize) {
        let end = self.len();
        let Some(len) = self.bytes(from).map(<[u8]>::len) else {
            return (0, 0);
        };
        if !(1..=HASH_BYTES_MAX).contains(&len) {
            return (0, 0);
        }
        out.reserve(len * (end - from));
        for index in from..end {
            match self.bytes(index).filter(|hash| hash.len() == len) {
                None => return (index - from, len),
                // The usual length, known to the compiler: two moves instead of a call.
                Some(hash) => match <&[u8; HASH_BYTES_MAX]>::try_from(hash) {
                    Ok(hash) => out.extend_from_slice(hash),
                    Err(_) => out.extend_from_slice(hash),
                },
            }
        }
        (end - from, len)
    }
}
