//! `_core.Copier`: copies between host memory and the arena, off the interpreter's threads.

#![expect(
    unsafe_code,
    reason = "hands the device addresses that Python computed to the copier"
)]

use std::num::NonZeroUsize;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use undercroft_core::copy::{Copier, CopyPiece, Direction, Routine};

use crate::arena::PyArena;
use crate::errors::UndercroftError;

/// Copies between device pages in host memory (vLLM's CPU platform) and the arena, on threads of its
/// own. Loads go before saves. When it is dropped, it first finishes the submitted jobs.
#[pyclass(name = "Copier", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyCopier {
    copier: Copier,
    /// Dropped after the copier. Until then the engine knows that copies may be running.
    _arena: Py<PyArena>,
}

#[pymethods]
impl PyCopier {
    /// Starts `threads` threads.
    #[new]
    #[pyo3(signature = (arena, threads = 1))]
    fn new(arena: Py<PyArena>, threads: usize) -> PyResult<Self> {
        let threads = NonZeroUsize::new(threads)
            .ok_or_else(|| PyValueError::new_err("threads is 0; at least 1 is needed"))?;
        let copier = Copier::start(arena.get().arena().clone(), threads)?;
        Ok(Self {
            copier,
            _arena: arena,
        })
    }

    /// Queue jobs, all of them or none. Each job is a pair: its number, and the number of its pieces. The pieces are
    /// little-endian int64 arrays of device addresses, arena offsets and sizes in bytes, in the order of the jobs.
    ///
    /// The memory at the addresses must stay valid, and untouched by others, until the job is
    /// returned by `poll`. A range outside the arena raises UndercroftError and queues nothing.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the list from Python's"
    )]
    fn submit(
        &self,
        to_arena: bool,
        jobs: Vec<(u64, usize)>,
        addresses: &[u8],
        offsets: &[u8],
        sizes: &[u8],
    ) -> PyResult<()> {
        let direction = if to_arena {
            Direction::Save
        } else {
            Direction::Load
        };
        let pieces = pieces(addresses, offsets, sizes)?;
        let counted: usize = jobs.iter().map(|(_, count)| count).sum();
        if counted != pieces.len() {
            return Err(PyValueError::new_err(format!(
                "the jobs have {counted} pieces, but {} were given",
                pieces.len()
            )));
        }
        let mut rest = pieces.into_iter();
        let jobs = jobs.iter().map(|&(id, count)| {
            let own: Vec<CopyPiece> = rest.by_ref().take(count).collect();
            (id, own)
        });
        // SAFETY: the class documents that the memory at the addresses stays valid and untouched
        // until the job has ended; `undercroft.device.layout` computes them from vLLM's tensors.
        unsafe { self.copier.submit(direction, jobs) }
            .map_err(|error| UndercroftError::new_err(format!("a copy job: {error}")))
    }

    /// Name of the routine that copies bytes: the fastest on this processor. Waits for the measurement.
    #[getter]
    fn routine(&self, py: Python<'_>) -> &'static str {
        py.detach(Routine::fastest).name()
    }

    /// Jobs that have ended since the last call: (job id, seconds from the first byte to the last).
    fn poll(&self) -> Vec<(u64, f64)> {
        let ended = self.copier.poll();
        ended.iter().map(|end| (end.job, end.seconds)).collect()
    }

    /// Wait until every queued job has ended (GIL released).
    fn drain(&self, py: Python<'_>) {
        py.detach(|| self.copier.drain());
    }
}

/// Makes the pieces from three arrays. The arrays must have the same length and hold no negative number.
fn pieces(addresses: &[u8], offsets: &[u8], sizes: &[u8]) -> PyResult<Vec<CopyPiece>> {
    let lengths = [addresses.len(), offsets.len(), sizes.len()];
    if lengths != [addresses.len(); 3] || !addresses.len().is_multiple_of(8) {
        return Err(PyValueError::new_err(format!(
            "addresses, offsets and sizes have {lengths:?} bytes; they must be int64 arrays of one length"
        )));
    }
    let negative = || PyValueError::new_err("an address, offset or size is negative");
    numbers(addresses)
        .zip(numbers(offsets))
        .zip(numbers(sizes))
        .map(|((address, offset), size)| {
            Ok(CopyPiece {
                address: usize::try_from(address).map_err(|_| negative())?,
                offset: u64::try_from(offset).map_err(|_| negative())?,
                len: u64::try_from(size).map_err(|_| negative())?,
            })
        })
        .collect()
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = i64> + '_ {
    let (numbers, _) = bytes.as_chunks::<8>();
    numbers.iter().map(|number| i64::from_le_bytes(*number))
}
