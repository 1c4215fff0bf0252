//! A Python list of block hashes, read without copying the list.
#![expect(
    unsafe_code,
    reason = "thousands of hashes are read in microseconds, on the scheduler's thread"
)]

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use undercroft_core::key::{BlockHash, HASH_BYTES_MAX, HashSource};

/// The hashes as vLLM has them: `bytes` objects in a list.
pub(crate) struct Hashes<'a, 'py>(pub(crate) &'a Bound<'py, PyList>);

impl HashSource for Hashes<'_, '_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Option<BlockHash> {
        let item = self.0.get_item(index).ok()?;
        BlockHash::new(item.cast::<PyBytes>().ok()?.as_bytes())
    }

    fn append_from(&self, from: usize, out: &mut Vec<u8>) -> (usize, usize) {
        let (list, mut len) = (self.0.as_ptr(), 0);
        for index in from..self.len() {
            let count = (index - from, len);
            let Ok(at) = ffi::Py_ssize_t::try_from(index) else {
                return count;
            };
            // SAFETY: `self.0` proves that the interpreter is attached and `list` is a list; an index out of
            // range gives null, which is looked at below.
            let item = unsafe { ffi::PyList_GetItem(list, at) };
            if item.is_null() {
                return count;
            }
            let (mut bytes, mut size) = (std::ptr::null_mut(), 0);
            // SAFETY: a borrowed reference, alive while the list holds it: nobody else runs Python code as long
            // as this thread is attached, and nothing here does. The results are written to live variables.
            if unsafe { ffi::PyBytes_AsStringAndSize(item, &raw mut bytes, &raw mut size) } != 0 {
                // No bytes object: what it raised is nobody's business.
                drop(PyErr::take(self.0.py()));
                return count;
            }
            let Ok(size) = usize::try_from(size) else {
                return count;
            };
            if size == 0 || size > HASH_BYTES_MAX || len != 0 && size != len {
                return count;
            }
            if len == 0 {
                out.reserve(size * (self.len() - index));
            }
            // SAFETY: its content has `size` bytes, does not change, and outlives this copy as the object does.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes.cast(), size) });
            len = size;
        }
        (self.len().saturating_sub(from), len)
    }
}
