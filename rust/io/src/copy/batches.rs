//! Copies between host and device memory, queued in batches on a stream of a CUDA device, by functions of its driver.
//!
//! Two measurements decide how (an H200, driver 580, pages of 64 KiB). The driver needs 0.4 us for each copy of a
//! batch, and the device begins when the call returns: a batch of 4,096 copies reaches three quarters of the bus, and
//! batches of 128 reach all of it. And a call for which the stream has no room waits for the device, under a lock that
//! every launch of the model needs: so few copies are in flight that there is always room.

#![expect(
    unsafe_code,
    reason = "calls functions of the CUDA driver by their addresses"
)]

use std::collections::VecDeque;
use std::time::Duration;

use super::functions::{Attributes, DriverFunctions, Event, Refused, Stream, called};
use super::{CopyPiece, Direction};

/// Copies of one call.
pub const BATCH: usize = 128;
/// Most copies in flight, a multiple of a batch. With fewer the bus waits for the next call.
pub const IN_FLIGHT: usize = 4 * BATCH;
/// Pause between two looks at the device. The copies in flight take longer.
const PAUSE: Duration = Duration::from_micros(20);
/// `CUDA_ERROR_NOT_READY`: the event has not happened.
const NOT_READY: u32 = 600;

/// How the copies run: each reads its source when the stream reaches it (`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`), and
/// beside kernels if possible (`CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`). Sources of loads may be read in any order;
/// that is not faster, and slower where many copies wait.
static ATTRIBUTES: Attributes = Attributes {
    order: 1,
    source: [0; 2],
    destination: [0; 2],
    flags: 1,
};
/// From which copy of a batch on the attributes hold.
static FIRST_COPY: usize = 0;

/// The copies of one stream. Only one thread queues copies on the stream.
#[derive(Debug)]
pub struct Batches {
    functions: DriverFunctions,
    pub(super) stream: Stream,
    /// Events behind batches in flight, the oldest first.
    marks: VecDeque<Event>,
    /// Events behind nothing.
    spare: Vec<Event>,
    /// Copies behind the last mark.
    unmarked: usize,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Batches {}

impl Batches {
    /// # Safety
    ///
    /// `stream` is a stream of the driver whose functions these are, and outlives the value.
    #[must_use]
    pub unsafe fn new(functions: DriverFunctions, stream: usize) -> Self {
        Self {
            functions,
            stream: std::ptr::with_exposed_provenance_mut(stream),
            marks: VecDeque::new(),
            spare: Vec::new(),
            unmarked: 0,
        }
    }

    /// The functions that it calls.
    #[must_use]
    pub fn functions(&self) -> DriverFunctions {
        self.functions
    }

    /// Queues copies, in their order. Waits for earlier ones while [`IN_FLIGHT`] are in flight. `arena`: the arena's
    /// address.
    ///
    /// # Safety
    ///
    /// Until work that is queued on the stream after this call has run, both sides of each piece are memory that the
    /// device may read or write, by the direction. The calling thread has the stream's context.
    pub unsafe fn queue(
        &mut self,
        direction: Direction,
        pieces: impl IntoIterator<Item = CopyPiece>,
        arena: u64,
    ) -> Result<(), Refused> {
        let mut pieces = pieces.into_iter();
        let (mut devices, mut hosts) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let mut sizes = Vec::with_capacity(BATCH);
        let mut queued = 0;
        loop {
            devices.clear();
            hosts.clear();
            sizes.clear();
            for piece in pieces.by_ref().take(BATCH) {
                devices.push(piece.address as u64);
                hosts.push(arena + piece.offset);
                sizes.push(piece.len as usize);
            }
            if sizes.is_empty() {
                return Ok(());
            }
            self.make_room()?;
            let (destinations, sources) = match direction {
                Direction::Save => (&hosts, &devices),
                Direction::Load => (&devices, &hosts),
            };
            let mut failed = usize::MAX;
            // SAFETY: as many entries of each array, one entry of attributes, which holds from the first copy on, and
            // by the contract memory that may be copied.
            let code = unsafe {
                (self.functions.copy)(
                    destinations.as_ptr(),
                    sources.as_ptr(),
                    sizes.as_ptr(),
                    sizes.len(),
                    &raw const ATTRIBUTES,
                    &raw const FIRST_COPY,
                    1,
                    &raw mut failed,
                    self.stream,
                )
            };
            if code != 0 {
                let place = (failed < sizes.len()).then(|| queued + failed);
                return Err(Refused::Copies { code, place });
            }
            queued += sizes.len();
            self.unmarked += sizes.len();
        }
    }

    /// Waits until a batch more is allowed in flight.
    fn make_room(&mut self) -> Result<(), Refused> {
        if self.unmarked >= BATCH {
            let mark = match self.spare.pop() {
                Some(mark) => mark,
                None => self.functions.new_event()?,
            };
            // SAFETY: an event of this driver, and by the contract of `new` its stream.
            unsafe { self.functions.record_event(mark, self.stream) }?;
            self.marks.push_back(mark);
            self.unmarked = 0;
        }
        while self.marks.len() >= IN_FLIGHT / BATCH {
            // SAFETY: an event of this driver.
            match unsafe { (self.functions.query)(self.marks[0]) } {
                NOT_READY => std::thread::sleep(PAUSE),
                code => {
                    called("cuEventQuery", code)?;
                    self.spare.extend(self.marks.pop_front());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::c_uint;

    use super::*;
    use crate::copy::functions::UNTIMED;
    use crate::copy::functions::tests::uncalled;

    const STREAM: usize = 0x5EAD;
    const ARENA: u64 = 1 << 40;

    /// A device that runs nothing until it is asked about an event for the second time.
    #[derive(Default)]
    struct Device {
        batches: Vec<usize>,
        orders: Vec<c_uint>,
        /// Copies behind each recorded event, by its number.
        marks: Vec<(usize, usize)>,
        queued: usize,
        ended: usize,
        most_in_flight: usize,
        made: usize,
        asked: usize,
        /// The batch of which the third copy is refused.
        refuses: Option<usize>,
        broken: bool,
        /// Whether the sources are the device's.
        saves: bool,
    }

    thread_local! {
        static DEVICE: RefCell<Device> = RefCell::default();
    }

    fn device<T>(look: impl FnOnce(&mut Device) -> T) -> T {
        DEVICE.with_borrow_mut(look)
    }

    unsafe extern "C" fn copy(
        destinations: *const u64,
        sources: *const u64,
        sizes: *const usize,
        count: usize,
        attributes: *const Attributes,
        first: *const usize,
        attribute_count: usize,
        failed: *mut usize,
        stream: Stream,
    ) -> u32 {
        assert_eq!(stream.addr(), STREAM);
        assert_eq!(attribute_count, 1);
        // SAFETY: one entry, which says where the attributes begin to hold.
        assert_eq!(unsafe { *first }, 0);
        // SAFETY: as many entries, as for the driver.
        let destinations = unsafe { std::slice::from_raw_parts(destinations, count) };
        // SAFETY: see above.
        let sources = unsafe { std::slice::from_raw_parts(sources, count) };
        // SAFETY: see above.
        let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
        let (devices, hosts) = if device(|device| device.saves) {
            (sources, destinations)
        } else {
            (destinations, sources)
        };
        for (index, host) in hosts.iter().enumerate() {
            assert_eq!(host - ARENA, devices[index] * 100);
            assert_eq!(sizes[index] as u64, 1 + devices[index] % 7);
        }
        // SAFETY: one entry of attributes.
        let order = unsafe { (*attributes).order };
        device(|device| {
            device.batches.push(count);
            if device.refuses == Some(device.batches.len()) {
                // SAFETY: the place for the number of the failed copy.
                unsafe { *failed = 2 };
                return 7;
            }
            device.orders.push(order);
            device.queued += count;
            device.most_in_flight = device.most_in_flight.max(device.queued - device.ended);
            0
        })
    }

    unsafe extern "C" fn create(event: *mut Event, flags: c_uint) -> u32 {
        assert_eq!(flags, UNTIMED);
        device(|device| {
            device.made += 1;
            // SAFETY: the place for an event.
            unsafe { *event = std::ptr::without_provenance_mut(device.made) };
        });
        0
    }

    unsafe extern "C" fn record(event: Event, stream: Stream) -> u32 {
        assert_eq!(stream.addr(), STREAM);
        device(|device| {
            let number = event.addr();
            device.marks.retain(|(known, _)| *known != number);
            device.marks.push((number, device.queued));
        });
        0
    }

    unsafe extern "C" fn query(event: Event) -> u32 {
        device(|device| {
            if device.broken {
                return 700;
            }
            let behind = device
                .marks
                .iter()
                .find(|(known, _)| *known == event.addr());
            let behind = behind.expect("only recorded events are asked about").1;
            if device.ended >= behind {
                return 0;
            }
            device.asked += 1;
            if device.asked.is_multiple_of(2) {
                device.ended = behind;
                return 0;
            }
            NOT_READY
        })
    }

    fn batches() -> Batches {
        let functions = DriverFunctions {
            copy,
            create,
            record,
            query,
            ..uncalled()
        };
        // SAFETY: the functions take any stream.
        unsafe { Batches::new(functions, STREAM) }
    }

    fn queue(batches: &mut Batches, count: usize, direction: Direction) -> Result<(), Refused> {
        device(|device| device.saves = direction == Direction::Save);
        let pieces = (0..count).map(|number| CopyPiece {
            address: number,
            offset: number as u64 * 100,
            len: 1 + number as u64 % 7,
        });
        // SAFETY: the device here copies nothing.
        unsafe { batches.queue(direction, pieces, ARENA) }
    }

    #[test]
    fn thousands_of_copies_are_cut_into_batches_of_which_few_are_in_flight() {
        let mut batches = batches();
        queue(&mut batches, 10_000, Direction::Load).unwrap();
        device(|device| {
            assert_eq!(device.batches.iter().sum::<usize>(), 10_000);
            assert_eq!(device.batches.len(), 10_000_usize.div_ceil(BATCH));
            assert_eq!(device.most_in_flight, IN_FLIGHT);
            assert!(device.made <= IN_FLIGHT / BATCH, "{} events", device.made);
            assert!(device.orders.iter().all(|order| *order == 1));
        });
    }

    #[test]
    fn the_copies_of_many_small_calls_are_counted_together() {
        let mut batches = batches();
        for _ in 0..1000 {
            queue(&mut batches, 10, Direction::Save).unwrap();
        }
        device(|device| {
            assert_eq!(device.queued, 10_000);
            assert!(
                device.most_in_flight < IN_FLIGHT + BATCH,
                "{}",
                device.most_in_flight
            );
            assert!(device.most_in_flight >= IN_FLIGHT);
            assert!(device.made <= IN_FLIGHT / BATCH, "{} events", device.made);
        });
    }

    #[test]
    fn a_refused_copy_is_named() {
        let mut batches = batches();
        device(|device| device.refuses = Some(3));
        let refused = queue(&mut batches, 1000, Direction::Load).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!(
                "cuMemcpyBatchAsync failed with error 7 at copy {}",
                2 * BATCH + 2
            )
        );
        assert_eq!(
            device(|device| device.queued),
            2 * BATCH,
            "earlier copies are queued"
        );
    }

    #[test]
    fn a_device_that_has_failed_ends_the_wait() {
        let mut batches = batches();
        device(|device| device.broken = true);
        let refused = queue(&mut batches, 2 * IN_FLIGHT, Direction::Load).unwrap_err();
        assert_eq!(refused.to_string(), "cuEventQuery failed with error 700");
    }
}
