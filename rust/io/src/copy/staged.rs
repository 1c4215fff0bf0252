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
struct Place {
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
            // SAFETY: handles of this driver, and by the contract memory that may be read and written.
            unsafe {
                match direction {
                    Direction::Save => {
                        self.wait_until_free(place, self.kernels)?;
                        self.launch(direction, pages, some, place.address)?;
                        self.pass(self.kernels, copies.stream)?;
                        copies.queue(direction, shards, arena)?;
                        self.is_used_until_now(place, copies.stream)?;
                    }
                    Direction::Load => {
                        self.wait_until_free(place, copies.stream)?;
                        copies.queue(direction, shards, arena)?;
                        self.pass(copies.stream, self.kernels)?;
                        self.launch(direction, pages, some, place.address)?;
                        self.is_used_until_now(place, self.kernels)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Lets `stream` wait for all work that uses the place. An event that was never recorded is not waited for.
    unsafe fn wait_until_free(&self, place: &Place, stream: Stream) -> Result<(), Refused> {
        for part in place.parts.clone() {
            // SAFETY: by the contract.
            unsafe { self.wait(stream, self.free[part]) }?;
        }
        Ok(())
    }

    unsafe fn is_used_until_now(&self, place: &Place, last: Stream) -> Result<(), Refused> {
        for part in place.parts.clone() {
            // SAFETY: by the contract.
            unsafe { self.functions.record_event(self.free[part], last) }?;
        }
        Ok(())
    }

    /// Lets the next work of `to` wait for the work that `from` has now.
    unsafe fn pass(&self, from: Stream, to: Stream) -> Result<(), Refused> {
        // SAFETY: by the contract. So is the next one.
        unsafe { self.functions.record_event(self.passed, from) }?;
        // SAFETY: see above.
        unsafe { self.wait(to, self.passed) }
    }

    unsafe fn wait(&self, stream: Stream, event: Event) -> Result<(), Refused> {
        // SAFETY: by the contract.
        called("cuStreamWaitEvent", unsafe {
            (self.functions.wait)(stream, event, 0)
        })
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
fn places(staging: &Range<u64>, shard: u64) -> (Vec<Place>, u64) {
    let len = staging.end - staging.start;
    let part = len / PARTS as u64 / ALIGNMENT * ALIGNMENT;
    let taken = (1..PARTS).find(|taken| shard <= *taken as u64 * part);
    let Some(taken) = taken else {
        let whole = Place {
            address: staging.start,
            parts: 0..PARTS,
        };
        return (vec![whole], len);
    };
    let places = (0..PARTS / taken).map(|nth| Place {
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
mod tests {
    use std::cell::RefCell;
    use std::ffi::{CStr, c_char};

    use super::*;
    use crate::copy::functions::{Attributes, Module};

    const COPIES: usize = 0xC0;
    const KERNELS: usize = 0xE0;
    const ARENA: u64 = 1 << 40;
    const BUFFER: u64 = 1 << 20;
    const PAGES: u64 = 1 << 30;

    /// A driver that notes its calls and runs nothing.
    #[derive(Default)]
    struct Device {
        calls: Vec<String>,
        /// (destination, source, bytes) of all copies and moves.
        moved: Vec<(u64, u64, u64)>,
        events: usize,
        /// The number of the call that is refused.
        refuses: Option<usize>,
    }

    thread_local! {
        static DEVICE: RefCell<Device> = RefCell::default();
    }

    fn note(call: String) -> u32 {
        DEVICE.with_borrow_mut(|device| {
            let nth = device.calls.len();
            device.calls.push(call);
            if device.refuses == Some(nth) { 7 } else { 0 }
        })
    }

    fn name(handle: *mut c_void) -> &'static str {
        match handle.addr() {
            COPIES => "copies",
            KERNELS => "kernels",
            1 => "passed",
            2 => "first free",
            3 => "second free",
            _ => "another",
        }
    }

    unsafe extern "C" fn copy(
        destinations: *const u64,
        sources: *const u64,
        sizes: *const usize,
        count: usize,
        _: *const Attributes,
        _: *const usize,
        _: usize,
        _: *mut usize,
        stream: Stream,
    ) -> u32 {
        for index in 0..count {
            // SAFETY: as many entries, as for the driver.
            let (to, from) = unsafe { (*destinations.add(index), *sources.add(index)) };
            // SAFETY: see above.
            let size = unsafe { *sizes.add(index) } as u64;
            DEVICE.with_borrow_mut(|device| device.moved.push((to, from, size)));
        }
        note(format!("{}: copy {count}", name(stream)))
    }

    unsafe extern "C" fn create(event: *mut Event, _: c_uint) -> u32 {
        let number = DEVICE.with_borrow_mut(|device| {
            device.events += 1;
            device.events
        });
        // SAFETY: the place for an event.
        unsafe { *event = std::ptr::without_provenance_mut(number) };
        0
    }

    unsafe extern "C" fn record(event: Event, stream: Stream) -> u32 {
        note(format!("{}: record {}", name(stream), name(event)))
    }

    unsafe extern "C" fn query(_: Event) -> u32 {
        0
    }

    unsafe extern "C" fn wait(stream: Stream, event: Event, _: c_uint) -> u32 {
        note(format!("{}: wait for {}", name(stream), name(event)))
    }

    unsafe extern "C" fn load(module: *mut Module, text: *const c_void) -> u32 {
        // SAFETY: a text that ends with a 0, as for the driver.
        let text = unsafe { CStr::from_ptr(text.cast()) };
        assert_eq!(text.to_bytes(), include_bytes!("move_pages.ptx"));
        // SAFETY: the place for a module.
        unsafe { *module = std::ptr::without_provenance_mut(4) };
        0
    }

    unsafe extern "C" fn find(kernel: *mut Kernel, module: Module, name: *const c_char) -> u32 {
        assert_eq!(module.addr(), 4);
        // SAFETY: a name that ends with a 0.
        assert_eq!(unsafe { CStr::from_ptr(name) }, c"move_pages");
        // SAFETY: the place for a function.
        unsafe { *kernel = std::ptr::without_provenance_mut(5) };
        0
    }

    #[expect(clippy::too_many_arguments, reason = "those of the driver's function")]
    unsafe extern "C" fn launch(
        kernel: Kernel,
        grid: c_uint,
        _: c_uint,
        _: c_uint,
        _: c_uint,
        _: c_uint,
        _: c_uint,
        _: c_uint,
        stream: Stream,
        parameters: *const *const c_void,
        _: *const *const c_void,
    ) -> u32 {
        assert_eq!(kernel.addr(), 5);
        // SAFETY: five parameters, of the types of the kernel's. So are the following ones.
        let table = unsafe { *(*parameters).cast::<[u64; TABLE]>() };
        // SAFETY: see above.
        let pages = unsafe { *(*parameters.add(1)).cast::<c_uint>() } as usize;
        // SAFETY: see above.
        let to_pages = unsafe { *(*parameters.add(2)).cast::<c_uint>() };
        // SAFETY: see above.
        let shards = unsafe { *(*parameters.add(3)).cast::<u64>() };
        // SAFETY: see above.
        let shard = unsafe { *(*parameters.add(4)).cast::<u64>() };
        for cta in 0..grid as usize {
            let (block, page) = (cta / pages, cta % pages);
            let [address, stride, len, offset] = *table[4 * page..].first_chunk().unwrap();
            let in_cache = address + table[4 * pages + block] * stride;
            let in_shard = shards + block as u64 * shard + offset;
            let (to, from) = if to_pages == 0 {
                (in_shard, in_cache)
            } else {
                (in_cache, in_shard)
            };
            DEVICE.with_borrow_mut(|device| device.moved.push((to, from, len)));
        }
        note(format!("{}: launch {grid}", name(stream)))
    }

    struct Lane {
        copies: Batches,
        staged: Staged,
    }

    fn lane() -> Lane {
        DEVICE.with_borrow_mut(|device| device.events = 0);
        let functions = DriverFunctions {
            copy,
            create,
            record,
            query,
            wait,
            load,
            find,
            launch,
        };
        // SAFETY: the functions take any stream.
        unsafe {
            Lane {
                copies: Batches::new(functions, COPIES),
                staged: Staged::new(functions, KERNELS).unwrap(),
            }
        }
    }

    impl Lane {
        /// Copies blocks 1, 2, ... between pages of 1 KiB and every second shard of the arena. The staging buffer has
        /// room for `shards` shards.
        fn queue(
            &mut self,
            direction: Direction,
            pages: u64,
            blocks: u64,
            shards: u64,
        ) -> Result<(), Refused> {
            let page = |number| BlockPage {
                address: PAGES + number * (1 << 24),
                stride: 2048,
                len: 1024,
                offset: number * 1024,
            };
            let shard = pages * 1024;
            let pages = Arc::new(BlockPages::new((0..pages).map(page)));
            let blocks = (1..=blocks).map(|block| (block, 2 * block * shard));
            let blocks = Joined::new(BlockPieces::new(pages, blocks.collect()), u64::MAX);
            let staging = BUFFER..BUFFER + shards * shard;
            assert!(blocks.fits(staging.start, shards * shard));
            // SAFETY: the device here moves nothing.
            unsafe {
                self.staged
                    .queue(&mut self.copies, direction, &blocks, staging, ARENA)
            }
        }
    }

    /// The calls since the last time.
    fn calls() -> Vec<String> {
        DEVICE.with_borrow_mut(|device| std::mem::take(&mut device.calls))
    }

    #[test]
    fn a_save_copies_a_part_when_its_kernel_has_run_and_fills_it_again_when_it_is_copied() {
        lane().queue(Direction::Save, 3, 5, 4).unwrap();
        assert_eq!(
            calls(),
            [
                "kernels: wait for first free",
                "kernels: launch 6",
                "kernels: record passed",
                "copies: wait for passed",
                "copies: copy 2",
                "copies: record first free",
                "kernels: wait for second free",
                "kernels: launch 6",
                "kernels: record passed",
                "copies: wait for passed",
                "copies: copy 2",
                "copies: record second free",
                "kernels: wait for first free",
                "kernels: launch 3",
                "kernels: record passed",
                "copies: wait for passed",
                "copies: copy 1",
                "copies: record first free",
            ]
        );
    }

    #[test]
    fn a_load_empties_a_part_when_it_is_copied_and_fills_it_again_when_its_kernel_has_run() {
        lane().queue(Direction::Load, 3, 3, 4).unwrap();
        assert_eq!(
            calls(),
            [
                "copies: wait for first free",
                "copies: copy 2",
                "copies: record passed",
                "kernels: wait for passed",
                "kernels: launch 6",
                "kernels: record first free",
                "copies: wait for second free",
                "copies: copy 1",
                "copies: record passed",
                "kernels: wait for passed",
                "kernels: launch 3",
                "kernels: record second free",
            ]
        );
    }

    #[test]
    fn the_next_call_goes_on_with_the_other_part() {
        let mut lane = lane();
        lane.queue(Direction::Save, 3, 1, 4).unwrap();
        calls();
        lane.queue(Direction::Load, 3, 1, 4).unwrap();
        assert_eq!(calls()[0], "copies: wait for second free");
    }

    #[test]
    fn a_shard_larger_than_a_part_takes_both() {
        lane().queue(Direction::Save, 3, 2, 1).unwrap();
        let one = [
            "kernels: wait for first free",
            "kernels: wait for second free",
            "kernels: launch 3",
            "kernels: record passed",
            "copies: wait for passed",
            "copies: copy 1",
            "copies: record first free",
            "copies: record second free",
        ];
        assert_eq!(calls(), [one, one].concat());
    }

    #[test]
    fn each_page_is_moved_once_however_many_launches_it_takes() {
        for direction in [Direction::Save, Direction::Load] {
            for (pages, blocks, shards) in
                [(1, 1200, 2100), (200, 300, 700), (96, 121, 500), (3, 7, 1)]
            {
                DEVICE.with_borrow_mut(|device| device.moved.clear());
                lane().queue(direction, pages, blocks, shards).unwrap();
                let moved = DEVICE.with_borrow(|device| device.moved.clone());
                let ends = moved.into_iter().map(|(to, from, len)| match direction {
                    Direction::Save => (from, to, len),
                    Direction::Load => (to, from, len),
                });
                let (through, copied): (Vec<_>, Vec<_>) =
                    ends.partition(|(_, behind, _)| *behind < ARENA);
                // As on a device: each chunk's pages and its shards are in the order of the calls.
                let mut found: Vec<_> = through.iter().map(|(page, _, _)| *page).collect();
                found.sort_unstable();
                let expected = (0..pages).flat_map(|page| {
                    (1..=blocks).map(move |block| PAGES + page * (1 << 24) + block * 2048)
                });
                let mut expected: Vec<_> = expected.collect();
                expected.sort_unstable();
                assert_eq!(found, expected);
                let shard = pages * 1024;
                let places: Vec<_> = copied
                    .iter()
                    .map(|(_, arena, len)| (arena - ARENA, *len))
                    .collect();
                let expected: Vec<_> = (1..=blocks)
                    .map(|block| (2 * block * shard, shard))
                    .collect();
                assert_eq!(places, expected);
                for (page, at, _) in &through {
                    let (number, block) =
                        ((page - PAGES) >> 24, ((page - PAGES) & 0xFF_FFFF) / 2048);
                    let (shard_at, _, _) = copied[block as usize - 1];
                    assert_eq!(
                        *at,
                        shard_at + number * 1024,
                        "page {number} of block {block}"
                    );
                }
            }
        }
    }

    #[test]
    fn after_a_refused_call_nothing_is_queued() {
        for direction in [Direction::Save, Direction::Load] {
            lane().queue(direction, 100, 5, 4).unwrap();
            let all = calls();
            for nth in 0..all.len() {
                DEVICE.with_borrow_mut(|device| device.refuses = Some(nth));
                let refused = lane().queue(direction, 100, 5, 4).unwrap_err();
                assert!(refused.to_string().contains("failed with error 7"));
                assert_eq!(calls(), all[..=nth]);
            }
            DEVICE.with_borrow_mut(|device| device.refuses = None);
        }
    }

    #[test]
    fn pages_that_are_not_aligned_or_too_large_do_not_fit() {
        let fits = |address, stride, len, offset, staging| {
            let page = BlockPage {
                address,
                stride,
                len,
                offset,
            };
            let blocks = BlockPieces::new(Arc::new(BlockPages::new([page])), [].into());
            Joined::new(blocks, u64::MAX).fits(BUFFER, staging)
        };
        assert!(fits(16, 32, 48, 0, 48));
        for (address, stride, len, offset, staging) in [
            (8, 32, 48, 0, 48),
            (16, 40, 48, 0, 48),
            (16, 32, 40, 0, 48),
            (16, 32, 48, 8, 64),
            (16, 32, 48, 0, 47),
            (16, 32, 0, 0, 48),
        ] {
            assert!(!fits(address, stride, len, offset, staging));
        }
    }

    #[test]
    fn the_kernel_has_the_parameters_that_it_gets() {
        let text = include_str!("move_pages.ptx");
        for parameter in [
            &*format!(".param .align 8 .b8 table[{}],", TABLE * size_of::<u64>()),
            ".param .u32 pages,",
            ".param .u32 to_pages,",
            ".param .u64 shards,",
            ".param .u64 shard_bytes)",
        ] {
            assert!(text.contains(parameter), "{parameter}");
        }
    }
}
