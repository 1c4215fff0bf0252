//! Requests with reads to start, by the device for which the next read waits.

use std::collections::BTreeMap;

use undercroft_contract::session::Priority;

use super::super::ids::RequestId;
use crate::forest::DeviceIndex;

/// The queue in which a request waits (by priority, device or checksums), and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuePlace {
    priority: u8,
    device: Option<DeviceIndex>,
    /// Smaller numbers come first.
    order: u64,
}

impl QueuePlace {
    pub(crate) fn device(self) -> Option<DeviceIndex> {
        self.device
    }

    /// Whether the place is in a queue of this priority.
    #[cfg(feature = "check")]
    pub(super) fn is_of(self, priority: Priority) -> bool {
        self.priority == priority as u8
    }

    /// The place with the same order in the queue of another device.
    pub(super) fn at(self, device: Option<DeviceIndex>) -> Self {
        Self { device, ..self }
    }
}

/// One queue for each priority and device: a device that is full, or hangs, delays no request that waits for another
/// device.
#[derive(Debug, Default)]
pub(super) struct ReadQueues {
    waiting: BTreeMap<QueuePlace, RequestId>,
    /// The order of the request that came last.
    last: u64,
}

impl ReadQueues {
    /// A place behind all earlier requests of the same priority.
    pub(super) fn new_place(
        &mut self,
        priority: Priority,
        device: Option<DeviceIndex>,
    ) -> QueuePlace {
        self.last += 1;
        QueuePlace {
            priority: priority as u8,
            device,
            order: self.last,
        }
    }

    pub(super) fn insert(&mut self, place: QueuePlace, id: RequestId) {
        let before = self.waiting.insert(place, id);
        assert_eq!(before, None, "a place in a queue is one request's");
    }

    pub(super) fn remove(&mut self, place: QueuePlace) {
        let removed = self.waiting.remove(&place);
        assert!(removed.is_some(), "a request that waits is in a queue");
    }

    /// The first request in the queue of a device behind the order `after`.
    pub(super) fn first(
        &self,
        priority: Priority,
        device: Option<DeviceIndex>,
        after: u64,
    ) -> Option<(u64, RequestId)> {
        let from = QueuePlace {
            priority: priority as u8,
            device,
            order: after + 1,
        };
        let to = QueuePlace {
            order: u64::MAX,
            ..from
        };
        let (place, &id) = self.waiting.range(from..=to).next()?;
        Some((place.order, id))
    }

    /// Whether any request waits for a device.
    pub(super) fn waits_for(&self, device: Option<DeviceIndex>) -> bool {
        let mut priorities = [Priority::Demand, Priority::Prefetch].into_iter();
        priorities.any(|priority| self.first(priority, device, 0).is_some())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The requests that have a place.
    #[cfg(feature = "check")]
    pub(super) fn at(&self, place: QueuePlace) -> Option<RequestId> {
        self.waiting.get(&place).copied()
    }

    #[cfg(feature = "check")]
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}
