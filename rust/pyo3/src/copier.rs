//! `_core.Copier`: copies between host memory and the arena, off the interpreter's threads.

#![expect(
    unsafe_code,
    reason = "hands the device addresses that Python computed to the copier"
)]

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use undercroft_io::arena::OutOfBounds;
use undercroft_io::copy::{BlockPlaces, Copier, PlacedPieces, Routine};

use crate::arena::PyArena;
use crate::batches::{PyBlockPieces, direction};
use crate::errors::UndercroftError;
use crate::values::PyExtent;

/// The places of one group's blocks in the program's memory, checked.
#[pyclass(name = "BlockPlaces", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyBlockPlaces(BlockPlaces);

#[pymethods]
impl PyBlockPlaces {
    /// `parts`: the bytes of each part of a block. `numbers` and `addresses` are int64 arrays: the ascending numbers of
    /// the blocks, and the address of each part of each block. `regions`: the beginning and the end of each region,
    /// ascending. Raises ValueError for a part outside the regions, and for arrays that do not fit together.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the buffers from Python's arrays"
    )]
    fn new(
        py: Python<'_>,
        group: u8,
        parts: Vec<u64>,
        numbers: PyBuffer<i64>,
        addresses: PyBuffer<i64>,
        regions: Vec<(usize, usize)>,
    ) -> PyResult<Self> {
        let regions: Vec<_> = regions.iter().map(|&(begin, end)| begin..end).collect();
        let (numbers, addresses) = (numbers.to_vec(py)?, addresses.to_vec(py)?);
        BlockPlaces::new(group, parts, numbers, addresses, &regions)
            .map(Self)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

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

    /// Queue jobs, all of them or none. Each job is a pair: its number, and its pieces.
    ///
    /// The memory at the addresses must stay valid, and untouched by others, until the job is
    /// returned by `poll`. A range outside the arena raises UndercroftError and queues nothing.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the list from Python's"
    )]
    fn submit(&self, to_arena: bool, jobs: Vec<(u64, Vec<Py<PyBlockPieces>>)>) -> PyResult<()> {
        let jobs = jobs
            .iter()
            .map(|(job, pieces)| (*job, pieces.iter().flat_map(|some| some.get().iter())));
        // SAFETY: the class documents that the memory at the addresses stays valid and untouched
        // until the job has ended; `undercroft.device.layout` computes them from vLLM's tensors.
        unsafe { self.copier.submit(direction(to_arena), jobs) }.map_err(outside)
    }

    /// Queue the copies of one job between the slots of blocks and their places in the program's memory, at most one
    /// entry of `places` for each group. Returns the bytes to be copied, and by group the numbers of the blocks that
    /// are copied, and of those that have slots and no places. A save that lacks places queues nothing; neither does a
    /// job without pieces.
    ///
    /// The memory at the places must stay valid, and untouched by others, until the job is returned by `poll`. A range
    /// outside the arena raises UndercroftError and queues nothing.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the lists from Python's"
    )]
    fn submit_blocks(
        &self,
        py: Python<'_>,
        to_arena: bool,
        job: u64,
        extents: Vec<Py<PyExtent>>,
        places: Vec<Py<PyBlockPlaces>>,
    ) -> PyResult<(u64, Numbers, Numbers)> {
        let slots = extents.iter().map(|one| one.get().slots(py));
        let placed = PlacedPieces::of(slots, places.iter().map(|one| &one.get().0));
        let is_short = to_arena && !placed.lacking.is_empty();
        if is_short || placed.pieces.is_empty() {
            return Ok((0, Numbers::new(), placed.lacking));
        }
        // SAFETY: the class documents that the memory at the places stays valid and untouched until the job has ended.
        unsafe {
            self.copier
                .submit(direction(to_arena), [(job, placed.pieces)])
        }
        .map_err(outside)?;
        Ok((placed.bytes, placed.copied, placed.lacking))
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

/// Numbers of blocks by group.
type Numbers = BTreeMap<u8, Vec<u32>>;

fn outside(error: OutOfBounds) -> PyErr {
    UndercroftError::new_err(format!("a copy job: {error}"))
}
