//! The order of the work, and what it moves, with a driver that notes its calls.

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
    // SAFETY: as many entries, as for the driver. So are the following ones.
    let destinations = unsafe { std::slice::from_raw_parts(destinations, count) };
    // SAFETY: see above.
    let sources = unsafe { std::slice::from_raw_parts(sources, count) };
    // SAFETY: see above.
    let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
    for (index, size) in sizes.iter().enumerate() {
        let moved = (destinations[index], sources[index], *size as u64);
        DEVICE.with_borrow_mut(|device| device.moved.push(moved));
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
    assert_eq!(text.to_bytes_with_nul(), TEXT.as_bytes());
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
    // SAFETY: five parameters.
    let parameters = unsafe { std::slice::from_raw_parts(parameters, 5) };
    // SAFETY: of the types of the kernel's. So are the following ones.
    let table = unsafe { *parameters[0].cast::<[u64; TABLE]>() };
    // SAFETY: see above.
    let pages = unsafe { *parameters[1].cast::<c_uint>() } as usize;
    // SAFETY: see above.
    let to_pages = unsafe { *parameters[2].cast::<c_uint>() };
    // SAFETY: see above.
    let shards = unsafe { *parameters[3].cast::<u64>() };
    // SAFETY: see above.
    let shard = unsafe { *parameters[4].cast::<u64>() };
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

/// The pages of every second layer lie farther apart.
fn page(number: u64) -> BlockPage {
    BlockPage {
        address: PAGES + number * (1 << 24),
        stride: 2048 * (1 + number % 2),
        len: 1024,
        offset: number * 1024,
    }
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
    let staged = unsafe { Staged::new(functions, KERNELS) };
    Lane {
        // SAFETY: see above.
        copies: unsafe { Batches::new(functions, COPIES) },
        staged: staged.unwrap(),
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
fn the_next_call_starts_with_the_other_part() {
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
        for (pages, blocks, shards) in [(1, 1200, 2100), (200, 300, 700), (96, 121, 500), (3, 7, 1)]
        {
            DEVICE.with_borrow_mut(|device| device.moved.clear());
            lane().queue(direction, pages, blocks, shards).unwrap();
            let moved = DEVICE.with_borrow(|device| device.moved.clone());
            let ends = moved.into_iter().map(|(to, from, len)| match direction {
                Direction::Save => (from, to, len),
                Direction::Load => (to, from, len),
            });
            let (mut through, copied): (Vec<_>, Vec<_>) =
                ends.partition(|(_, behind, _)| *behind < ARENA);
            let shard = pages * 1024;
            let places: Vec<_> = copied.iter().map(|(_, at, len)| (*at, *len)).collect();
            let expected = (1..=blocks).map(|block| (ARENA + 2 * block * shard, shard));
            assert_eq!(places, expected.collect::<Vec<_>>());
            // Each page goes to its place in the shard that is copied for its block.
            let shards = (1..).zip(copied.iter().map(|(shard, _, _)| *shard));
            let expected = shards.flat_map(|(block, shard)| {
                let at = move |number| page(number).address + block * page(number).stride;
                (0..pages).map(move |number| (at(number), shard + number * 1024, 1024))
            });
            let mut expected: Vec<_> = expected.collect();
            expected.sort_unstable();
            through.sort_unstable();
            assert_eq!(through, expected);
        }
    }
}

#[test]
fn the_parts_of_the_buffer_lie_side_by_side_and_are_aligned() {
    for (len, shard) in [(1 << 20, 1024), (1_000_000, 1008), (4096, 4096), (48, 48)] {
        let (places, room) = places(&(BUFFER..BUFFER + len), shard);
        let mut end = BUFFER;
        for place in &places {
            assert!(place.address >= end && place.address.is_multiple_of(ALIGNMENT));
            end = place.address + room;
        }
        assert!(end <= BUFFER + len && room >= shard);
        assert_eq!(places.last().unwrap().parts.end, PARTS);
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
    for parameter in [
        &*format!(".param .align 8 .b8 table[{}],", TABLE * size_of::<u64>()),
        ".param .u32 pages,",
        ".param .u32 to_pages,",
        ".param .u64 shards,",
        ".param .u64 shard_bytes)",
    ] {
        assert!(TEXT.contains(parameter), "{parameter}");
    }
}
