//! Copies of small pages through a staging buffer on the device: kernels move pages between the KV cache and shards
//! in the buffer, and whole shards are copied.
//!
//! The buffer has two parts: while the kernels of one part run, the copies of the other part run. A call queues the
//! work of any number of blocks, so that its thread needs the interpreter's lock once.

#![expect(
    unsafe_code,
    reason = "calls functions of the CUDA driver by their addresses"
)]

use std::ffi::{c_uint, c_void};
use std::ops::Range;
use std::sync::Arc;

use super::functions::{DriverFunctions, Event, Kernel, Refused, Stream, called};
use super::{Batches, BlockPage, BlockPages, BlockPieces, Direction, Joined};

/// The kernel, which the driver compiles for its device.
static TEXT: &str = concat!(include_str!("move_pages.ptx"), "\0");
/// Entries of the kernel's table. All parameters of a kernel together have at most 4,096 bytes.
const TABLE: usize = 504;
/// Entries for one page.
const PAGE_ENTRIES: usize = 4;
/// Most pages of a launch. The rest of the table has room for more than a hundred blocks.
const MOST_PAGES: usize = 96;
/// Threads that move one page.
const THREADS: c_uint = 256;
/// Bytes that a thread moves at a time: addresses, strides and sizes are multiples.
pub(super) const UNIT: u64 = 16;
/// Parts of the staging buffer.
const PARTS: usize = 2;
/// Alignment of the parts in bytes, as of the buffer.
const ALIGNMENT: u64 = 512;

/// The kernels of one stream, and the order between them and the copies of another stream. Only one thread queues work
/// on the two streams.
#[derive(Debug)]
pub struct Staged {
    functions: DriverFunctions,
    kernel: Kernel,
    kernels: Stream,
    /// Happens when the work of one stream has run for which the other one waits.
    passed: Event,
    /// For each part of the staging buffer, an event after all work that uses it.
    free: [Event; PARTS],
    /// The part that comes next.
    next: usize,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Staged {}

/// The place of a chunk of shards in the staging buffer: a part, or several where a shard is larger.
#[derive(Clone, Debug)]
struct StagingPlace {
    address: u64,
    parts: Range<usize>,
}

impl Staged {
    /// Loads the kernel. `kernels`: the handle of its stream.
    ///
    /// # Safety
    ///
    /// `kernels` is a stream of the driver whose functions these are, and outlives the value. The calling thread has
    /// the stream's context.
    pub unsafe fn new(functions: DriverFunctions, kernels: usize) -> Result<Self, Refused> {
        let (mut module, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a text that ends with a 0, and the place for the module.
        let code = unsafe { (functions.load)(&raw mut module, TEXT.as_ptr().cast()) };
        called("cuModuleLoadData", code)?;
        // SAFETY: a module of this driver, a name that ends with a 0, and the place for the function.
        let code = unsafe { (functions.find)(&raw mut kernel, module, c"move_pages".as_ptr()) };
        called("cuModuleGetFunction", code)?;
        let passed = functions.new_event()?;
        let mut free = [std::ptr::null_mut(); PARTS];
        for event in &mut free {
            *event = functions.new_event()?;
        }
        Ok(Self {
            functions,
            kernel,
            kernels: std::ptr::with_exposed_provenance_mut(kernels),
            passed,
            free,
            next: 0,
        })
    }

    /// Queues the copies of blocks, in their order, between the device and the arena at the address `arena`. Waits like
    /// [`Batches::queue`]. `staging`: the addresses of the staging buffer. After an error work may still be queued on
    /// either stream that the other one does not wait for.
    ///
    /// # Safety
    ///
    /// As for [`Batches::queue`]. The pages are [`BlockPages::aligned`], and the staging buffer is device memory that
    /// only this value uses, aligned like them, with room for a shard. If another buffer was used before, all its work
    /// has run.
    pub unsafe fn queue(
        &mut self,
        copies: &mut Batches,
        direction: Direction,
        blocks: &Joined<BlockPieces>,
        staging: Range<u64>,
        arena: u64,
    ) -> Result<(), Refused> {
        let (pages, chunk) = (&*blocks.pieces.pages, blocks.chunk);
        let shard = pages.shard_len();
        let (places, len) = places(&staging, shard);
        for some in blocks.pieces.blocks.chunks((len / shard).max(1) as usize) {
            let place = &places[self.next % places.len()];
            self.next = (self.next + 1) % PARTS;
            let shards = shards(place.address, shard, some, chunk);
            match direction {
                Direction::Save => {
                    self.wait_until_free(place, self.kernels)?;
                    // SAFETY: by the contract. So are the following calls.
                    unsafe { self.launch(direction, pages, some, place.address) }?;
                    self.pass(self.kernels, copies.stream)?;
                    // SAFETY: see above.
                    unsafe { copies.queue(direction, shards, arena) }?;
                    self.is_used_until_now(place, copies.stream)?;
                }
                Direction::Load => {
                    self.wait_until_free(place, copies.stream)?;
                    // SAFETY: see above.
                    unsafe { copies.queue(direction, shards, arena) }?;
                    self.pass(copies.stream, self.kernels)?;
                    // SAFETY: see above.
                    unsafe { self.launch(direction, pages, some, place.address) }?;
                    self.is_used_until_now(place, self.kernels)?;
                }
            }
        }
        Ok(())
    }

    /// Lets `stream` wait for all work that uses the place. An event that was never recorded is not waited for.
    fn wait_until_free(&self, place: &StagingPlace, stream: Stream) -> Result<(), Refused> {
        for part in place.parts.clone() {
            self.wait(stream, self.free[part])?;
        }
        Ok(())
    }

    fn is_used_until_now(&self, place: &StagingPlace, last: Stream) -> Result<(), Refused> {
        for part in place.parts.clone() {
            // SAFETY: an event of this driver, and one of the two streams.
            unsafe { self.functions.record_event(self.free[part], last) }?;
        }
        Ok(())
    }

    /// Lets the next work of `to` wait for the work that `from` has now.
    fn pass(&self, from: Stream, to: Stream) -> Result<(), Refused> {
        // SAFETY: an event of this driver, and one of the two streams.
        unsafe { self.functions.record_event(self.passed, from) }?;
        self.wait(to, self.passed)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), Refused> {
        // SAFETY: an event of this driver, and one of the two streams.
        let code = unsafe { (self.functions.wait)(stream, event, 0) };
        called("cuStreamWaitEvent", code)
    }

    /// Launches kernels that move the pages of some blocks from or to their shards at the address `shards`.
    unsafe fn launch(
        &self,
        direction: Direction,
        pages: &BlockPages,
        blocks: &[(u64, u64)],
        shards: u64,
    ) -> Result<(), Refused> {
        let shard = pages.shard_len();
        let to_pages = c_uint::from(direction == Direction::Load);
        for pages in pages.pages.chunks(MOST_PAGES) {
            let count = pages.len() as c_uint;
            let most = TABLE - PAGE_ENTRIES * pages.len();
            for (nth, some) in blocks.chunks(most).enumerate() {
                let table = table(pages, some);
                let shards = shards + (nth * most) as u64 * shard;
                let parameters: [*const c_void; 5] = [
                    (&raw const table).cast(),
                    (&raw const count).cast(),
                    (&raw const to_pages).cast(),
                    (&raw const shards).cast(),
                    (&raw const shard).cast(),
                ];
                let grid = count * some.len() as c_uint;
                // SAFETY: the parameters have the types of the kernel's, and the driver reads them in the call; by the
                // contract memory that may be read and written.
                let code = unsafe {
                    (self.functions.launch)(
                        self.kernel,
                        grid,
                        1,
                        1,
                        THREADS,
                        1,
                        1,
                        0,
                        self.kernels,
                        parameters.as_ptr(),
                        std::ptr::null(),
                    )
                };
                called("cuLaunchKernel", code)?;
            }
        }
        Ok(())
    }
}

/// The places for chunks of shards of `shard` bytes in a staging buffer, and the bytes of one.
fn places(staging: &Range<u64>, shard: u64) -> (Vec<StagingPlace>, u64) {
    let len = staging.end - staging.start;
    let part = len / PARTS as u64 / ALIGNMENT * ALIGNMENT;
    let taken = (1..PARTS).find(|taken| shard <= *taken as u64 * part);
    let Some(taken) = taken else {
        let whole = StagingPlace {
            address: staging.start,
            parts: 0..PARTS,
        };
        return (vec![whole], len);
    };
    let places = (0..PARTS / taken).map(|nth| StagingPlace {
        address: staging.start + (nth * taken) as u64 * part,
        parts: nth * taken..(nth + 1) * taken,
    });
    (places.collect(), taken as u64 * part)
}

/// The copies of shards that lie side by side from `address` on.
fn shards(address: u64, shard: u64, blocks: &[(u64, u64)], chunk: u64) -> Joined<BlockPieces> {
    let whole = BlockPage {
        address,
        stride: shard,
        len: shard,
        offset: 0,
    };
    let numbered = blocks.iter().zip(0..);
    let places = numbered.map(|((_, offset), number)| (number, *offset));
    let pieces = BlockPieces::new(Arc::new(BlockPages::new([whole])), places.collect());
    Joined::new(pieces, chunk)
}

/// The kernel's table.
fn table(pages: &[BlockPage], blocks: &[(u64, u64)]) -> [u64; TABLE] {
    let mut table = [0; TABLE];
    let of_pages = pages
        .iter()
        .flat_map(|page| [page.address, page.stride, page.len, page.offset]);
    let entries = of_pages.chain(blocks.iter().map(|(number, _)| *number));
    for (entry, value) in table.iter_mut().zip(entries) {
        *entry = value;
    }
    table
}

#[cfg(test)]
mod tests;
