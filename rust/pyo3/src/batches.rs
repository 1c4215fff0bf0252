//! `_core.BlockPages` and `_core.BlockPieces`: the bytes of blocks on a device and in the arena. `_core.CopyBatches` and
//! `_core.StagedCopies`: copies of a CUDA device, queued without the interpreter's lock.

#![expect(
    unsafe_code,
    reason = "calls the driver's functions at addresses that Python has found"
)]

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use undercroft_io::copy::{
    Batches, BlockPage, BlockPages, BlockPieces, CopyPiece, Direction, DriverFunctions, Joined,
    Refused, Staged,
};

/// The pages of the blocks of one KV cache group on one rank.
#[pyclass(name = "BlockPages", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyBlockPages(Arc<BlockPages>);

#[pymethods]
impl PyBlockPages {
    /// int64 arrays, an entry for each page: address in block 0, bytes from one block to the next, bytes, and offset in
    /// the block's shard. Raises ValueError for arrays of different lengths, and for negative numbers.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the buffers from Python's arrays"
    )]
    fn new(
        py: Python<'_>,
        addresses: PyBuffer<i64>,
        strides: PyBuffer<i64>,
        sizes: PyBuffer<i64>,
        offsets: PyBuffer<i64>,
    ) -> PyResult<Self> {
        let [addresses, strides, sizes, offsets] =
            arrays(py, [&addresses, &strides, &sizes, &offsets])?;
        let page = |index: usize| BlockPage {
            address: addresses[index],
            stride: strides[index],
            len: sizes[index],
            offset: offsets[index],
        };
        let pages = BlockPages::new((0..addresses.len()).map(page));
        Ok(Self(Arc::new(pages)))
    }

    /// Whether the pages can be copied by `StagedCopies`: they begin and end at multiples of 16 bytes.
    #[getter]
    fn aligned(&self) -> bool {
        self.0.aligned()
    }

    /// The pieces of blocks whose shards are at these offsets in the arena (int64 arrays), in order. Neighbours on
    /// both sides are one piece, and no piece lies on both sides of a multiple of `chunk` bytes in the arena.
    ///
    /// Raises ValueError for arrays of different lengths, for negative numbers, and for a chunk of 0 bytes.
    #[pyo3(signature = (blocks, offsets, chunk = None))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 makes the buffers from Python's arrays"
    )]
    fn pieces(
        &self,
        py: Python<'_>,
        blocks: PyBuffer<i64>,
        offsets: PyBuffer<i64>,
        chunk: Option<NonZeroU64>,
    ) -> PyResult<PyBlockPieces> {
        let [blocks, offsets] = arrays(py, [&blocks, &offsets])?;
        let blocks = blocks.into_iter().zip(offsets).collect();
        let pieces = BlockPieces::new(Arc::clone(&self.0), blocks);
        let chunk = chunk.map_or(u64::MAX, NonZeroU64::get);
        Ok(PyBlockPieces(Joined::new(pieces, chunk)))
    }
}

/// Runs of bytes to copy between a device and the arena.
#[pyclass(name = "BlockPieces", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyBlockPieces(Joined<BlockPieces>);

#[pymethods]
impl PyBlockPieces {
    /// The pieces: (device address, offset in the arena, bytes).
    fn list(&self) -> Vec<(usize, u64, u64)> {
        let values = |piece: CopyPiece| (piece.address, piece.offset, piece.len);
        self.iter().map(values).collect()
    }
}

impl PyBlockPieces {
    /// The pieces.
    pub(crate) fn iter(&self) -> impl Iterator<Item = CopyPiece> + use<> {
        self.0.clone()
    }
}

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
    /// `cuEventCreate`, `cuEventRecord`, `cuEventQuery`, `cuStreamWaitEvent`, `cuModuleLoadData`, `cuModuleGetFunction`
    /// and `cuLaunchKernel`. `stream`: the handle of a stream that is never destroyed. Raises ValueError for a null
    /// address.
    #[new]
    fn new(functions: [usize; 8], stream: usize) -> PyResult<Self> {
        // SAFETY: documented above; `undercroft.device.memcpy` asks the driver for them.
        let functions = unsafe { DriverFunctions::at(functions) };
        let functions =
            functions.ok_or_else(|| PyValueError::new_err("the address of a function is null"))?;
        // SAFETY: documented above.
        let batches = unsafe { Batches::new(functions, stream) };
        Ok(Self {
            batches: Mutex::new(batches),
        })
    }

    /// Queue copies, and wait while too many are in flight. `arena`: the arena's address. Raises RuntimeError when the
    /// driver refuses.
    fn queue(
        &self,
        py: Python<'_>,
        to_arena: bool,
        pieces: &PyBlockPieces,
        arena: u64,
    ) -> PyResult<()> {
        let direction = direction(to_arena);
        let pieces = pieces.iter();
        py.detach(|| {
            // SAFETY: `undercroft.device.cuda` checks the blocks and slots of the pieces, and keeps both sides until
            // the copies have ended. Its lanes' threads have selected the device.
            unsafe { self.lock().queue(direction, pieces, arena) }
        })
        .map_err(refusal)
    }
}

impl PyCopyBatches {
    fn lock(&self) -> MutexGuard<'_, Batches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies of small pages through a staging buffer, queued without the interpreter's lock.
#[pyclass(name = "StagedCopies", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyStagedCopies {
    copies: Py<PyCopyBatches>,
    staged: Mutex<Staged>,
}

#[pymethods]
impl PyStagedCopies {
    /// `copies`: those of the stream of copies. `kernels`: the handle of the stream of kernels, which is never
    /// destroyed. Raises RuntimeError when the driver refuses the kernel.
    #[new]
    fn new(py: Python<'_>, copies: Py<PyCopyBatches>, kernels: usize) -> PyResult<Self> {
        let functions = copies.get().lock().functions();
        // SAFETY: documented above. The lanes' threads have selected the device.
        let staged = py.detach(|| unsafe { Staged::new(functions, kernels) });
        Ok(Self {
            copies,
            staged: Mutex::new(staged.map_err(refusal)?),
        })
    }

    /// Queue the copies of the blocks of `pieces`, and wait while too many are in flight. `staging`: address and bytes
    /// of the staging buffer.
    ///
    /// Raises ValueError for pages that are not aligned, or a buffer without room for a shard, and RuntimeError when the
    /// driver refuses: both streams may then have work that the other one does not wait for.
    fn queue(
        &self,
        py: Python<'_>,
        to_arena: bool,
        pieces: &PyBlockPieces,
        staging: (u64, u64),
        arena: u64,
    ) -> PyResult<()> {
        let (direction, blocks) = (direction(to_arena), pieces.0.clone());
        let (address, len) = staging;
        if !blocks.fits(address, len) {
            return Err(PyValueError::new_err(format!(
                "a staging buffer of {len} bytes for pages that are not aligned, or make a larger shard"
            )));
        }
        py.detach(|| {
            let mut copies = self.copies.get().lock();
            let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
            let staging = address..address + len;
            // SAFETY: as for `CopyBatches.queue`. `undercroft.device.lane` allocates the buffer for this value alone, and
            // waits for the device before it uses another one.
            unsafe { staged.queue(&mut copies, direction, &blocks, staging, arena) }
        })
        .map_err(refusal)
    }
}

fn refusal(refused: Refused) -> PyErr {
    PyRuntimeError::new_err(refused.to_string())
}

pub(crate) fn direction(to_arena: bool) -> Direction {
    if to_arena {
        Direction::Save
    } else {
        Direction::Load
    }
}

/// Arrays of one length.
fn arrays<const N: usize>(py: Python<'_>, buffers: [&PyBuffer<i64>; N]) -> PyResult<[Vec<u64>; N]> {
    let lengths = buffers.map(|buffer| buffer.item_count());
    if lengths != [lengths[0]; N] {
        return Err(PyValueError::new_err(format!(
            "the arrays have {lengths:?} entries; they must be as long as each other"
        )));
    }
    let mut arrays = [const { Vec::new() }; N];
    for (array, buffer) in arrays.iter_mut().zip(buffers) {
        let numbers = buffer.to_vec(py)?.into_iter().map(u64::try_from);
        *array = numbers
            .collect::<Result<_, _>>()
            .map_err(|_| PyValueError::new_err("a number is negative"))?;
    }
    Ok(arrays)
}
