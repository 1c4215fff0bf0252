//! `_core.CopyBatches`: copies of a CUDA device, queued without the interpreter's lock.

#![expect(
    unsafe_code,
    reason = "calls the driver's functions at addresses that Python has found"
)]

use std::sync::{Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use undercroft_core::copy::{Batches, DriverFunctions, SourceOrder};

/// The batches of copies of one stream. A thread that queues copies here does not need the interpreter's lock, which
/// the model's thread holds most of the time.
#[pyclass(name = "CopyBatches", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyCopyBatches {
    batches: Mutex<Batches>,
}

#[pymethods]
impl PyCopyBatches {
    /// `functions`: the addresses of the driver's `cuMemcpyBatchAsync` (in version 12.8 of its interface),
    /// `cuEventCreate`, `cuEventRecord` and `cuEventQuery`. `stream`: the handle of a stream that is never destroyed.
    /// Raises ValueError for a null address.
    #[new]
    fn new(functions: (usize, usize, usize, usize), stream: usize) -> PyResult<Self> {
        let (copy, create, record, query) = functions;
        // SAFETY: documented above; `undercroft.device.memcpy` asks the driver for them.
        let functions = unsafe { DriverFunctions::at(copy, create, record, query) };
        let functions =
            functions.ok_or_else(|| PyValueError::new_err("the address of a function is null"))?;
        // SAFETY: documented above.
        let batches = unsafe { Batches::new(functions, stream) };
        Ok(Self {
            batches: Mutex::new(batches),
        })
    }

    /// Queue copies, given by parallel int64 arrays of addresses and sizes in bytes, and wait while too many are in
    /// flight. `any_order`: the device may read the sources at once. Raises RuntimeError when the driver refuses.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the buffers from Python's arrays"
    )]
    fn queue(
        &self,
        py: Python<'_>,
        destinations: PyBuffer<i64>,
        sources: PyBuffer<i64>,
        sizes: PyBuffer<i64>,
        any_order: bool,
    ) -> PyResult<()> {
        let destinations = numbers(py, &destinations)?;
        let sources = numbers(py, &sources)?;
        let sizes = numbers(py, &sizes)?;
        if destinations.len() != sizes.len() || sources.len() != sizes.len() {
            let lengths = (destinations.len(), sources.len(), sizes.len());
            return Err(PyValueError::new_err(format!(
                "destinations, sources and sizes have {lengths:?} entries; they must be as long as each other"
            )));
        }
        let sizes: Vec<usize> = sizes.into_iter().map(|size| size as usize).collect();
        let order = if any_order {
            SourceOrder::Any
        } else {
            SourceOrder::Stream
        };
        py.detach(|| {
            let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: `undercroft.device.cuda` checks the blocks and slots that it computes addresses from, keeps both
            // sides until the copies have ended, and its lanes' threads have selected the device.
            unsafe { batches.queue(&destinations, &sources, &sizes, order) }
        })
        .map_err(|refused| PyRuntimeError::new_err(refused.to_string()))
    }
}

fn numbers(py: Python<'_>, array: &PyBuffer<i64>) -> PyResult<Vec<u64>> {
    let negative = || PyValueError::new_err("an address or a size is negative");
    let numbers = array.to_vec(py)?.into_iter();
    numbers
        .map(|number| u64::try_from(number).map_err(|_| negative()))
        .collect()
}
