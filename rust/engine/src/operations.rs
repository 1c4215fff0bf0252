//! IO operations in flight, and how many more each device takes.

use slotmap::{KeyData, SlotMap};
use undercroft_contract::io::{FileKind, IoRoom, device_depth};

use crate::forest::{DeviceIndex, NodeId};

slotmap::new_key_type! {
    struct OperationId;
}

/// The purpose of an IO operation in flight. `Uses::busy` keeps the node of a read or write; a lease keeps the
/// node of an erasure or a checksum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Read {
        node: NodeId,
        group: u8,
        started_ns: u64,
        /// Bytes that the device had to read when the read started, the bytes of this read among them.
        ahead: u64,
    },
    Write {
        node: NodeId,
        group: u8,
        started_ns: u64,
    },
    Erase {
        node: NodeId,
        group: u8,
    },
    Checksum {
        node: NodeId,
        group: u8,
    },
    /// Returns the space of a page to the filesystem.
    Release {
        device: DeviceIndex,
    },
    Table {
        device: DeviceIndex,
        block: u32,
    },
    /// Makes writes of records, or erasures, durable.
    Sync {
        device: DeviceIndex,
        file: FileKind,
    },
    Namespace {
        device: DeviceIndex,
        index: usize,
    },
}

/// The operations of one kind, reads or writes, that one device has in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    in_flight: usize,
    /// When the last operation ended, or the first of the operations in flight was started.
    progress_ns: u64,
}

impl Flow {
    /// Whether operations are in flight, and none has ended for `limit_ns`.
    fn is_stalled(self, limit_ns: u64, now_ns: u64) -> bool {
        self.in_flight > 0 && now_ns >= self.progress_ns.saturating_add(limit_ns)
    }
}

/// The operations of one device in flight.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceOperations {
    reads: Flow,
    writes: Flow,
    /// Operations that the device's IO engine takes now.
    room: usize,
    /// Erasures in flight, which the writes count, too.
    erasures: usize,
    /// How many writes may be in flight now, if fewer than the depth allows.
    writes_max: Option<usize>,
}

/// The operations in flight, and how many more may start.
///
/// Invariant: each device's flows count its operations of each kind.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// The operations, with their devices; a checksum has none.
    in_flight: SlotMap<OperationId, (Option<DeviceIndex>, Purpose)>,
    devices: Vec<DeviceOperations>,
    /// See [`Engine::set_io_depth`](super::Engine::set_io_depth).
    depth: Option<usize>,
    /// When the devices were polled last: the engine knows all operations that had ended by then.
    pub(super) polled_ns: u64,
}

impl Operations {
    pub(super) fn set_depth(&mut self, depth: usize) {
        self.depth = Some(depth);
    }

    /// Sets the number of devices. Each takes operations until [`Operations::polled`] limits them.
    pub(super) fn set_devices(&mut self, count: usize) {
        let device = DeviceOperations {
            room: usize::MAX,
            ..DeviceOperations::default()
        };
        self.devices.resize(count, device);
    }

    /// The devices were polled, and have room for further operations.
    pub(super) fn polled(&mut self, room: IoRoom<'_>, now_ns: u64) {
        self.polled_ns = now_ns;
        for (index, device) in self.devices.iter_mut().enumerate() {
            device.room = room.of(index);
        }
    }

    /// Notes an operation. Returns the token that its completion carries.
    pub(super) fn start(&mut self, purpose: Purpose, device: DeviceIndex, now_ns: u64) -> u64 {
        let of_device = &mut self.devices[device.index()];
        of_device.room = of_device.room.saturating_sub(1);
        of_device.erasures += usize::from(matches!(purpose, Purpose::Erase { .. }));
        let flow = of_device.flow(purpose);
        if flow.in_flight == 0 {
            flow.progress_ns = now_ns;
        }
        flow.in_flight += 1;
        let id = self.in_flight.insert((Some(device), purpose));
        slotmap::Key::data(&id).as_ffi()
    }

    /// Starts a checksum, which belongs to no device.
    pub(super) fn start_checksum(&mut self, node: NodeId, group: u8) -> u64 {
        let purpose = Purpose::Checksum { node, group };
        slotmap::Key::data(&self.in_flight.insert((None, purpose))).as_ffi()
    }

    /// Ends the operation of a token. `None` if the token is unknown or its operation has ended.
    pub(super) fn end(
        &mut self,
        token: u64,
        now_ns: u64,
    ) -> Option<(Option<DeviceIndex>, Purpose)> {
        let id = OperationId::from(KeyData::from_ffi(token));
        let (device, purpose) = self.in_flight.remove(id)?;
        let Some(at) = device else {
            return Some((None, purpose));
        };
        let of_device = &mut self.devices[at.index()];
        of_device.erasures -= usize::from(matches!(purpose, Purpose::Erase { .. }));
        of_device.room = of_device.room.saturating_add(1);
        let flow = of_device.flow(purpose);
        let left = flow.in_flight.checked_sub(1);
        flow.in_flight = left.expect("every operation in flight is counted");
        flow.progress_ns = now_ns;
        Some((device, purpose))
    }

    pub(super) fn reads(&self, device: DeviceIndex) -> usize {
        self.devices[device.index()].reads.in_flight
    }

    #[cfg(feature = "check")]
    pub(super) fn writes(&self, device: DeviceIndex) -> usize {
        self.devices[device.index()].writes.in_flight
    }

    /// When a read of a device ended last, or the first of the reads in flight was started.
    pub(super) fn read_progress_ns(&self, device: DeviceIndex) -> u64 {
        self.devices[device.index()].reads.progress_ns
    }

    /// How long a device has had reads of which none has ended.
    pub(super) fn silent_ns(&self, device: DeviceIndex, now_ns: u64) -> u64 {
        match self.reads(device) {
            0 => 0,
            _ => now_ns.saturating_sub(self.read_progress_ns(device)),
        }
    }

    /// Whether the reads of a device are stalled, and whether its writes are: some are in flight, and none has ended
    /// for `limit_ns`.
    pub(super) fn stalled(&self, device: DeviceIndex, limit_ns: u64, now_ns: u64) -> (bool, bool) {
        let of_device = &self.devices[device.index()];
        (
            of_device.reads.is_stalled(limit_ns, now_ns),
            of_device.writes.is_stalled(limit_ns, now_ns),
        )
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Operations in flight.
    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Erasures of a device in flight.
    pub(super) fn erasures(&self, device: DeviceIndex) -> usize {
        self.devices[device.index()].erasures
    }

    /// Whether a device takes any operation.
    pub(super) fn has_room(&self, device: DeviceIndex) -> bool {
        self.devices[device.index()].room > 0
    }

    /// Whether one more read of a device may start.
    pub(super) fn may_read(&self, device: DeviceIndex) -> bool {
        let of_device = &self.devices[device.index()];
        let Some(depth) = self.depth else {
            return of_device.room > 0;
        };
        // A payload that was read and is being verified takes no room any more.
        let moving = depth.saturating_sub(of_device.room);
        let reads = moving.saturating_sub(of_device.writes.in_flight);
        of_device.room > 0 && reads < device_depth(depth)
    }

    /// Allows a device `most` writes in flight; `None`: as many as its depth allows.
    pub(super) fn limit_writes(&mut self, device: DeviceIndex, most: Option<usize>) {
        self.devices[device.index()].writes_max = most;
    }

    /// Whether one more write to a device may start.
    pub(super) fn may_write(&self, device: DeviceIndex) -> bool {
        let of_device = &self.devices[device.index()];
        let depth = self
            .depth
            .map_or(usize::MAX, |depth| 2 * device_depth(depth));
        let most = of_device.writes_max.map_or(depth, |most| most.min(depth));
        of_device.room > 0 && of_device.writes.in_flight < most
    }

    /// The payloads that are being read from a device.
    pub(super) fn reads_of(&self, device: DeviceIndex) -> Vec<(NodeId, u8)> {
        let operations = self.in_flight.values();
        let reads = operations.filter_map(|&(of, purpose)| match purpose {
            Purpose::Read { node, group, .. } if of == Some(device) => Some((node, group)),
            _ => None,
        });
        reads.collect()
    }

    #[cfg(feature = "check")]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Option<DeviceIndex>, Purpose)> {
        self.in_flight.values()
    }
}

impl DeviceOperations {
    fn flow(&mut self, purpose: Purpose) -> &mut Flow {
        match purpose {
            Purpose::Read { .. } => &mut self.reads,
            _ => &mut self.writes,
        }
    }
}
