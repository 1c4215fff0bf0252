//! The virtual IO engine: operations in flight, which end in any order, late, badly, or never.

use std::collections::{BTreeSet, HashMap};

use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{
    FileKind, IO_ALIGN, IoCompletion, IoFault, IoRequest, SealedTransfer,
};

use crate::arena::{Hand, SimArena};
use crate::content::{SECTOR, Token, checksum, seal, sectors, unseal};
use crate::device::{Persisted, SimDevice, Write};
use crate::random::Random;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Rates of faults, in a thousand operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceFaults {
    pub(crate) read_error: u64,
    /// A bit of a payload flips on the medium, before it is read.
    pub(crate) corrupt: u64,
    /// A bit flips in transit.
    pub(crate) transient: u64,
    /// EIO, after which any part may have been written.
    pub(crate) write_error: u64,
    pub(crate) full: u64,
    /// The device reports a write as successful, but has written nothing or a part.
    pub(crate) lost: u64,
    /// The operation takes 10 seconds.
    pub(crate) slow: u64,
    /// The operation never ends.
    pub(crate) hang: u64,
}

impl DeviceFaults {
    pub(crate) fn is_none(&self) -> bool {
        let Self {
            read_error,
            corrupt,
            transient,
            write_error,
            full,
            lost,
            slow,
            hang,
        } = self;
        read_error + corrupt + transient + write_error + full + lost + slow + hang == 0
    }
}

#[derive(Debug)]
struct Flight {
    request: IoRequest,
    due_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Disks {
    /// All devices.
    pub(crate) devices: Vec<SimDevice>,
    /// Devices that the engine has, by its numbers.
    pub(crate) attached: Vec<usize>,
    /// Attached devices that could not be opened yet, by the engine's numbers.
    pub(crate) absent: BTreeSet<usize>,
    /// Attached devices that hang now, by the engine's numbers.
    hung: BTreeSet<usize>,
    /// Attached devices whose table takes no writes now, by the engine's numbers.
    pub(crate) frozen: BTreeSet<usize>,
    /// Encrypted payloads that somebody has moved to another store: device, offset, bytes.
    pub(crate) moved: HashMap<(usize, u64), Vec<Token>>,
    pub(crate) faults: DeviceFaults,
    /// Whether a device has reported a write of its table, or an erasure, that it has not carried out in this life. No
    /// order can be durable there.
    pub(crate) lied: bool,
    /// The key of encrypted stores.
    pub(crate) key: u64,
    flights: Vec<Flight>,
    /// Most operations of a device at a time.
    depth: usize,
    latency_ns: u64,
}

impl Disks {
    pub(crate) fn new(devices: Vec<SimDevice>, depth: usize, latency_ns: u64) -> Self {
        Self {
            attached: (0..devices.len()).collect(),
            absent: BTreeSet::new(),
            hung: BTreeSet::new(),
            frozen: BTreeSet::new(),
            moved: HashMap::new(),
            devices,
            faults: DeviceFaults::default(),
            lied: false,
            key: 0,
            flights: Vec::new(),
            depth,
            latency_ns,
        }
    }

    /// Free depth of each device.
    pub(crate) fn rooms(&self) -> Vec<usize> {
        let mut rooms = vec![self.depth; self.attached.len()];
        for flight in &self.flights {
            rooms[target(&flight.request).0] -= 1;
        }
        rooms
    }

    /// Makes a device hang, or ends its hang. Returns whether it hangs now.
    pub(crate) fn toggle(&mut self, device: usize) -> bool {
        !self.hung.remove(&device) && self.hung.insert(device)
    }

    /// Whether every operation ends.
    pub(crate) fn is_well(&self) -> bool {
        self.hung.is_empty() && self.frozen.is_empty() && self.faults.is_none()
    }

    /// The images of the directories that the engine has.
    pub(crate) fn images(&self) -> Vec<DeviceImage> {
        let attached = self.attached.iter().enumerate();
        let image = |(device, &at): (usize, &usize)| match self.absent.contains(&device) {
            true => DeviceImage::absent(),
            false => self.devices[at].image(),
        };
        attached.map(image).collect()
    }

    fn device_mut(&mut self, device: usize) -> &mut SimDevice {
        &mut self.devices[self.attached[device]]
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    fn answers(&self, flight: &Flight) -> bool {
        !self.hung.contains(&target(&flight.request).0)
    }

    /// Time at which the next operation may end.
    pub(crate) fn next_due_ns(&self) -> Option<u64> {
        let answering = self.flights.iter().filter(|flight| self.answers(flight));
        let due = answering.map(|flight| flight.due_ns);
        due.min().filter(|&due| due < u64::MAX)
    }

    /// Takes a request. An impossible request is an error.
    pub(crate) fn submit(
        &mut self,
        request: IoRequest,
        now_ns: u64,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Result<(), String> {
        let (device, file, offset, len) = target(&request);
        if device >= self.attached.len()
            || self.absent.contains(&device)
            || !offset.is_multiple_of(IO_ALIGN)
            || !len.is_multiple_of(IO_ALIGN)
        {
            return Err(format!("impossible request {request:?}"));
        }
        if file == FileKind::Data && offset + len > self.devices[self.attached[device]].capacity {
            return Err(format!(
                "beyond the capacity of device {device}: {request:?}"
            ));
        }
        if file == FileKind::Data && self.devices[self.attached[device]].is_excluded(offset, len) {
            return Err(format!("in a hole of device {device}: {request:?}"));
        }
        for other in &self.flights {
            let (device_2, file_2, offset_2, len_2) = target(&other.request);
            let apart = device != device_2
                || file != file_2
                || offset + len <= offset_2
                || offset_2 + len_2 <= offset;
            if !apart {
                return Err(format!(
                    "two operations at once on the same bytes: {request:?} and {:?}",
                    other.request
                ));
            }
        }
        match &request {
            IoRequest::ReadPayload {
                arena_offset, len, ..
            } => {
                arena.take(*arena_offset, u64::from(*len), Hand::Write, "a read")?;
                for token in arena.at_mut(*arena_offset, u64::from(*len)) {
                    *token = random.next();
                }
            }
            IoRequest::WritePayload {
                arena_offset, len, ..
            } => {
                arena.take(*arena_offset, u64::from(*len), Hand::Read, "a write")?;
            }
            IoRequest::Sealed(of) => {
                let (hand, who) = hand_of(of);
                let len = u64::from(of.payload_len);
                arena.take(of.arena_offset, len, hand, who)?;
                if of.reads {
                    for token in arena.at_mut(of.arena_offset, len) {
                        *token = random.next();
                    }
                }
            }
            IoRequest::WriteMeta { .. } | IoRequest::Erase { .. } | IoRequest::Sync { .. } => {}
        }
        let due_ns = if random.chance(self.faults.hang) {
            u64::MAX
        } else if random.chance(self.faults.slow) {
            now_ns + 10_000_000_000
        } else {
            now_ns + random.range(1, self.latency_ns)
        };
        self.flights.push(Flight { request, due_ns });
        Ok(())
    }

    /// Ends one of the operations that are due.
    pub(crate) fn complete(
        &mut self,
        now_ns: u64,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Option<(IoRequest, IoCompletion)> {
        let due = self
            .flights
            .iter()
            .enumerate()
            .filter(|(_, flight)| flight.due_ns <= now_ns && self.answers(flight));
        let due: Vec<usize> = due.map(|(at, _)| at).collect();
        if due.is_empty() {
            return None;
        }
        let request = self.flights.swap_remove(random.pick(&due)).request;
        let result = match &request {
            IoRequest::ReadPayload { .. } => self.read(&request, arena, random),
            IoRequest::Sealed(of) if of.reads => self.read_sealed(of, arena, random),
            IoRequest::Sync { device, file, .. } => self.sync(*device, *file, random),
            _ => self.write(&request, arena, random),
        };
        release(&request, arena);
        let token = request.token();
        Some((request, IoCompletion { token, result }))
    }

    fn read(
        &mut self,
        request: &IoRequest,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Result<u64, IoFault> {
        let IoRequest::ReadPayload {
            device,
            file_offset,
            arena_offset,
            len,
            payload_len,
            checksum: expected,
            ..
        } = *request
        else {
            return Err(IoFault::Stopped);
        };
        if random.chance(self.faults.read_error) {
            return Err(IoFault::Os(EIO));
        }
        let corrupts = random.chance(self.faults.corrupt);
        let device = self.device_mut(usize::from(device));
        if corrupts {
            device.corrupt(file_offset, u64::from(payload_len), random);
        }
        let len = u64::from(len);
        arena
            .at_mut(arena_offset, len)
            .copy_from_slice(device.at(file_offset, len));
        let payload = arena.at_mut(arena_offset, u64::from(payload_len));
        if random.chance(self.faults.transient) {
            payload[random.index(sectors(u64::from(payload_len)))] ^= 1 << random.below(64);
        }
        let found = checksum(payload);
        if found != expected {
            return Err(IoFault::Corrupt);
        }
        Ok(found)
    }

    fn read_sealed(
        &mut self,
        of: &SealedTransfer,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Result<u64, IoFault> {
        if random.chance(self.faults.read_error) {
            return Err(IoFault::Os(EIO));
        }
        let (corrupts, key) = (random.chance(self.faults.corrupt), self.key);
        let at = self.attached[usize::from(of.device)];
        let device = &mut self.devices[at];
        if corrupts {
            device.corrupt(of.file_offset, u64::from(of.len), random);
        }
        let payload = sectors(u64::from(of.payload_len));
        let stored = device.at(of.file_offset, u64::from(of.len));
        let plain = unseal(stored, payload, key, &of.binding)?;
        let moved = self.moved.get(&(at, of.file_offset));
        assert!(
            moved.is_none_or(|moved| moved != stored),
            "a payload of another store was decrypted: {of:?}"
        );
        let to = arena.at_mut(of.arena_offset, u64::from(of.payload_len));
        to.copy_from_slice(&plain);
        Ok(checksum(&plain))
    }

    fn sync(&mut self, device: u16, file: FileKind, random: &mut Random) -> Result<u64, IoFault> {
        let is_frozen = file == FileKind::Table && self.frozen.contains(&usize::from(device));
        if is_frozen || random.chance(self.faults.write_error) {
            return Err(IoFault::Os(EIO));
        }
        self.device_mut(usize::from(device)).sync(file, random);
        Ok(0)
    }

    fn write(
        &mut self,
        request: &IoRequest,
        arena: &SimArena,
        random: &mut Random,
    ) -> Result<u64, IoFault> {
        let (write, result) = intended(request, arena, self.key);
        if random.chance(self.faults.full) {
            return Err(IoFault::Os(ENOSPC));
        }
        let fails = random.chance(self.faults.write_error);
        let lost = self.faults.lost;
        let (number, file, offset, len) = target(request);
        if file == FileKind::Table && self.frozen.contains(&number) {
            return Err(IoFault::Os(EIO));
        }
        let device = self.device_mut(number);
        if let IoRequest::Erase { frees: true, .. } = request {
            // A page that is returned twice is a page without space.
            return match fails {
                true => Err(IoFault::Os(EIO)),
                false => {
                    device.punch(offset, len);
                    Ok(0)
                }
            };
        }
        if file == FileKind::Data && !device.take_space(offset, len) {
            return Err(IoFault::Os(ENOSPC));
        }
        if fails {
            device.write(
                write,
                random.pick(&[Persisted::Whole, Persisted::Nothing, Persisted::Torn]),
                random,
            );
            return Err(IoFault::Os(EIO));
        }
        let sync = matches!(request, IoRequest::WriteMeta { sync: true, .. });
        // No engine can handle a device that falsely reports a sync, so syncs are never lost.
        let extent = if !sync && random.chance(lost) {
            random.pick(&[Persisted::Nothing, Persisted::Torn])
        } else {
            Persisted::Whole
        };
        device.write(write, extent, random);
        let of_order = file == FileKind::Table || matches!(request, IoRequest::Erase { .. });
        self.lied |= of_order && extent != Persisted::Whole;
        let device = self.device_mut(number);
        if sync {
            device.sync(target(request).1, random);
        }
        Ok(result)
    }

    /// The process ends. Each operation in flight has been carried out in full, in part, or not at all.
    pub(crate) fn crash(&mut self, power_loss: bool, arena: &SimArena, random: &mut Random) {
        self.hung.clear();
        self.frozen.clear();
        while !self.flights.is_empty() {
            let flight = self.flights.swap_remove(random.index(self.flights.len()));
            let is_sync = matches!(flight.request, IoRequest::Sync { .. });
            if !flight.request.is_read() && !is_sync {
                let (write, _) = intended(&flight.request, arena, self.key);
                let extent = random.pick(&[Persisted::Whole, Persisted::Nothing, Persisted::Torn]);
                let (device, file, offset, len) = target(&flight.request);
                let device = self.device_mut(device);
                if file == FileKind::Table
                    || file == FileKind::Super
                    || device.take_space(offset, len)
                {
                    device.write(write, extent, random);
                }
            }
        }
        for device in &mut self.devices {
            device.crash(power_loss, random);
        }
    }

    /// From now on nothing fails, and operations that hung go on.
    pub(crate) fn heal(&mut self, now_ns: u64) {
        self.faults = DeviceFaults::default();
        self.hung.clear();
        self.frozen.clear();
        for flight in &mut self.flights {
            flight.due_ns = flight.due_ns.min(now_ns + self.latency_ns);
        }
    }
}

/// The bytes that a write must write, and their checksum.
fn intended(request: &IoRequest, arena: &SimArena, key: u64) -> (Write, u64) {
    match request {
        IoRequest::Sealed(of) => {
            let plain = arena.at(of.arena_offset, u64::from(of.payload_len));
            let tokens = seal(plain, sectors(u64::from(of.len)), key, &of.binding);
            let offset = of.file_offset;
            (Write::Data { offset, tokens }, checksum(plain))
        }
        IoRequest::WriteMeta {
            file,
            file_offset,
            bytes,
            ..
        } => {
            let (file, offset, bytes) = (*file, *file_offset, bytes.clone());
            (
                Write::Meta {
                    file,
                    offset,
                    bytes,
                },
                0,
            )
        }
        IoRequest::Erase {
            file_offset, len, ..
        } => {
            let tokens = vec![0; sectors(u64::from(*len))];
            let offset = *file_offset;
            (Write::Data { offset, tokens }, 0)
        }
        IoRequest::Sync { .. } => unreachable!("a sync writes no bytes of its own"),
        IoRequest::WritePayload {
            file_offset,
            arena_offset,
            len,
            payload_len,
            checksum: given,
            ..
        } => {
            let tokens = arena.at(*arena_offset, u64::from(*len)).to_vec();
            let payload = &tokens[..u64::from(*payload_len).div_ceil(SECTOR) as usize];
            let sum = given.unwrap_or_else(|| checksum(payload));
            let offset = *file_offset;
            (Write::Data { offset, tokens }, sum)
        }
        IoRequest::ReadPayload { .. } => unreachable!("a read writes nothing"),
    }
}

fn release(request: &IoRequest, arena: &mut SimArena) {
    match request {
        IoRequest::ReadPayload {
            arena_offset, len, ..
        } => {
            arena.release(*arena_offset, u64::from(*len), Hand::Write);
        }
        IoRequest::WritePayload {
            arena_offset, len, ..
        } => {
            arena.release(*arena_offset, u64::from(*len), Hand::Read);
        }
        IoRequest::Sealed(of) => {
            arena.release(of.arena_offset, u64::from(of.payload_len), hand_of(of).0);
        }
        IoRequest::WriteMeta { .. } | IoRequest::Erase { .. } | IoRequest::Sync { .. } => {}
    }
}

/// The use of a slot of the arena, and its holder.
fn hand_of(of: &SealedTransfer) -> (Hand, &'static str) {
    if of.reads {
        (Hand::Write, "a sealed read")
    } else {
        (Hand::Read, "a sealed write")
    }
}

/// Device, file, offset and length.
fn target(request: &IoRequest) -> (usize, FileKind, u64, u64) {
    match request {
        IoRequest::ReadPayload {
            device,
            file_offset,
            len,
            ..
        }
        | IoRequest::WritePayload {
            device,
            file_offset,
            len,
            ..
        }
        | IoRequest::Erase {
            device,
            file_offset,
            len,
            ..
        } => (
            usize::from(*device),
            FileKind::Data,
            *file_offset,
            u64::from(*len),
        ),
        IoRequest::Sync { device, file, .. } => (usize::from(*device), *file, 0, 0),
        IoRequest::Sealed(of) => (
            usize::from(of.device),
            FileKind::Data,
            of.file_offset,
            u64::from(of.len),
        ),
        IoRequest::WriteMeta {
            device,
            file,
            file_offset,
            bytes,
            ..
        } => (
            usize::from(*device),
            *file,
            *file_offset,
            bytes.len() as u64,
        ),
    }
}
