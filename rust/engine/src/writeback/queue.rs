//! The write queue: the payloads offered to the disks, and their order.

use std::collections::VecDeque;

use undercroft_contract::io::IoRequest;

use crate::forest::{DiskState, HostState, NONE, NodeId};
use crate::metrics::Counters;
use crate::policy::Doorkeeper;
use crate::work;

use super::super::config::EngineConfig;
use super::super::parts::EngineParts;
use super::super::residency::Residency;
use super::budget::WriteBudget;
use super::orphans::Orphaned;
use super::refusals::Refusals;

/// Queued writes that one entry of the engine looks at.
pub(crate) const WRITES_LOOKED_AT: usize = 128;
/// Blocks that second-touch admission remembers, at about 15 bytes each.
const DOORKEEPER_BLOCKS: usize = 2 << 20;

/// Queued payloads that one pass passes over or postpones, in search of writes that can start.
const SCAN_MAX: usize = 16;

/// A payload in the write queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedWrite {
    pub(super) node: NodeId,
    pub(super) epoch: u32,
    pub(super) group: u8,
    /// Group of the required ancestor's payload that was to be written first.
    pub(super) ancestor_group: Option<u8>,
    /// Children of the node are on disk: it is written without asking the policy.
    pub(super) admitted: bool,
    /// The payload was not summed before it was queued. A checksum that is known by now is about as old as the entry.
    pub(super) unsummed: bool,
}

/// Payloads to be written from the arena to disk.
///
/// Invariants:
/// - every payload in state `Queued` is in the queue exactly once; entries of nodes that were removed, or whose payload
///   is in another state, are skipped;
/// - a payload is written after its required ancestor's, an optional one after its own node's;
/// - a node that is not on disk although children of it are is an orphan's parent, or was refused.
#[derive(Debug)]
pub(crate) struct WriteBack {
    queue: VecDeque<QueuedWrite>,
    pub(super) refusals: Refusals,
    budget: WriteBudget,
    pub(super) orphaned: Orphaned,
    /// Blocks offered before, for second-touch admission.
    doorkeeper: Option<Doorkeeper>,
    /// The last entry stopped before the end of the queue, although more writes could have started.
    has_rest: bool,
    /// The first payload of the queue has no slot yet: no other write starts in this entry.
    waits_for_room: bool,
    /// Sequence number of the last table block that was written.
    pub(super) record_seq: u64,
    /// The write rate kept the next write from starting.
    is_held_by_rate: bool,
    /// Payloads have gone to the devices since late records or erasures did: now these go first.
    pub(crate) payloads_went: bool,
}

impl WriteBack {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            queue: VecDeque::new(),
            refusals: Refusals::default(),
            budget: WriteBudget::new(config.write_rate),
            orphaned: Orphaned::default(),
            doorkeeper: config
                .second_touch
                .then(|| Doorkeeper::new(DOORKEEPER_BLOCKS)),
            has_rest: false,
            waits_for_room: false,
            record_seq: 0,
            is_held_by_rate: false,
            payloads_went: false,
        }
    }

    /// Whether a block was offered for a save before.
    pub(crate) fn was_offered(&mut self, fingerprint: u64) -> bool {
        let doorkeeper = self.doorkeeper.as_mut();
        doorkeeper.is_some_and(|doorkeeper| doorkeeper.again(fingerprint))
    }

    /// Queues the payloads of nodes that have become visible, unless the nodes have to be hit first.
    pub(crate) fn offer_new(
        &mut self,
        nodes: &[NodeId],
        residency: &mut Residency,
        counters: &mut Counters,
    ) {
        for &id in nodes {
            if residency.disks().is_empty() {
                return;
            }
            if self.doorkeeper.is_some() && residency.node(id).touch().hit_class == 0 {
                counters.refused_admission += 1;
                self.orphaned.note(id, residency);
            } else {
                self.queue_writes(id, residency, counters);
            }
        }
    }

    /// Queues the optional payload that has arrived at a node that was visible before, unless it came from disk.
    pub(crate) fn offer_late(
        &mut self,
        id: NodeId,
        group: u8,
        residency: &mut Residency,
        counters: &mut Counters,
    ) {
        let node = residency.node(id);
        let is_new = node.payload(group).disk == DiskState::Empty;
        if is_new && node.is_visible() && !node.requires(group) {
            self.offer_new(&[id], residency, counters);
        }
    }

    /// Offers the payloads of the chain down to `id`, which was hit, again if they were refused or not
    /// admitted before.
    pub(crate) fn offer_hit(
        &mut self,
        id: NodeId,
        residency: &mut Residency,
        now_ns: u64,
        counters: &mut Counters,
    ) {
        let slot = residency.least_slot_bytes(residency.node(id).ns);
        let is_full = residency.queued_bytes() + slot > residency.host().capacity() / 2;
        if is_full || !residency.any_disk_takes_writes(now_ns) {
            return;
        }
        let mut chain = Vec::new();
        let mut at = id;
        while at != NONE
            && (residency.node(at).required() == 0 || residency.writable_group(at).is_some())
        {
            work::node();
            chain.push(at);
            at = residency.node(at).parent();
        }
        for id in chain.into_iter().rev() {
            self.queue_writes(id, residency, counters);
        }
    }

    /// Queues a visible node's payloads that are in the arena and not on disk.
    fn queue_writes(&mut self, id: NodeId, residency: &mut Residency, counters: &mut Counters) {
        if !residency.node(id).is_visible() {
            return;
        }
        let node = residency.node(id);
        // First the required payloads: without them the others are of no use.
        let (required, optional): (Vec<u8>, Vec<u8>) =
            node.groups().partition(|&group| node.requires(group));
        for group in required.into_iter().chain(optional) {
            let payload = residency.node(id).payload(group);
            if payload.host != HostState::Present || payload.disk != DiskState::Empty {
                continue;
            }
            if !fits_queue(id, group, residency) {
                if self.is_held_by_rate {
                    counters.refused_write_rate += 1;
                } else {
                    counters.refused_disk_behind += 1;
                }
                self.orphaned.note(id, residency);
                continue;
            }
            let write = enqueue(id, group, residency);
            self.queue.push_back(write);
        }
        residency.refresh(id);
    }

    /// Queues a payload that the policy does not weigh.
    pub(super) fn enqueue_admitted(&mut self, id: NodeId, group: u8, residency: &mut Residency) {
        let write = enqueue(id, group, residency);
        self.queue.push_back(QueuedWrite {
            admitted: true,
            ..write
        });
    }

    /// Queues the payload of a required ancestor, then the payload that needs the ancestor: both before all
    /// others.
    pub(super) fn enqueue_ancestor_first(
        &mut self,
        (ancestor, group): (NodeId, u8),
        write: QueuedWrite,
        residency: &mut Residency,
    ) {
        self.queue.push_front(QueuedWrite {
            ancestor_group: Some(group),
            ..write
        });
        self.queue.push_front(enqueue(ancestor, group, residency));
    }

    /// Moves a payload to the end of the queue.
    pub(super) fn postpone(&mut self, write: QueuedWrite) {
        self.queue.push_back(write);
    }

    /// Queues a payload again, in front of all others.
    pub(super) fn wait_for_room(&mut self, write: QueuedWrite) {
        self.queue.push_front(write);
        self.waits_for_room = true;
    }

    /// Whether nothing is queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether [`WriteBack::next_writes`] stopped although it could have continued.
    pub(crate) fn has_rest(&self) -> bool {
        self.has_rest
    }

    /// Whether [`WriteBack::next_writes`] may have something to start, given free depth.
    pub(crate) fn has_payloads(&self, residency: &Residency) -> bool {
        !self.queue.is_empty() || self.orphaned.any(residency)
    }

    /// Appends payload writes to start now. Looks at `most` payloads of the queue.
    pub(crate) fn next_writes(
        &mut self,
        parts: &mut EngineParts<'_>,
        most: usize,
        out: &mut Vec<IoRequest>,
    ) {
        self.refusals.expire(parts.now_ns);
        self.has_rest = self.requeue_orphan(parts);
        let next_bytes = self
            .queue
            .front()
            .map_or(0, |write| payload_bytes(write, parts.residency));
        self.budget.refill(next_bytes, parts.now_ns);
        self.waits_for_room = false;
        self.is_held_by_rate = false;
        if parts.residency.waits_for_an_answer(parts.now_ns) {
            return;
        }
        let (mut at, mut in_vain, mut looked_at) = (0, 0, 0);
        while in_vain < SCAN_MAX
            && at < self.queue.len()
            && parts.any_takes_a_write()
            && !self.waits_for_room
        {
            let (write, queued) = (self.queue[at], self.queue.len());
            if waits_for_device(&write, parts) {
                at += 1;
                in_vain += 1;
                continue;
            }
            // Writes that are refused start nothing: a disk that fails may refuse the whole queue.
            if looked_at == most {
                self.has_rest = true;
                break;
            }
            looked_at += 1;
            let bytes = payload_bytes(&write, parts.residency);
            if !self.budget.allows(bytes) {
                self.is_held_by_rate = true;
                break;
            }
            work::queued();
            self.queue.remove(at);
            if let Some(request) = self.start_write(write, parts) {
                self.budget.spend(bytes);
                out.push(request);
            } else if self.queue.len() >= queued {
                // The payload's ancestor is written first, and may be among the waiting payloads.
                in_vain += usize::from(at > 0);
            }
        }
    }

    /// The write queue, front to back.
    #[cfg(feature = "check")]
    pub(crate) fn queued(&self) -> impl Iterator<Item = (NodeId, u32, u8)> {
        let writes = self.queue.iter();
        writes.map(|write| (write.node, write.epoch, write.group))
    }
}

/// Whether the directory of a queued payload has no room for a write.
fn waits_for_device(write: &QueuedWrite, parts: &EngineParts<'_>) -> bool {
    let (id, residency) = (write.node, &*parts.residency);
    let is_live = residency.forest().is_live(id, write.epoch) && !residency.node(id).is_detached();
    let device = is_live.then(|| residency.choose_disk(id, parts.now_ns));
    device
        .flatten()
        .is_some_and(|device| !parts.operations.may_write(device))
}

/// Whether a payload may be queued. Queued payloads cannot be evicted: half of the arena is left to other payloads.
pub(super) fn fits_queue(id: NodeId, group: u8, residency: &Residency) -> bool {
    let slot = residency.slot_bytes(id, group);
    residency.queued_bytes() + slot <= residency.host().capacity() / 2
}

/// Makes an entry of the queue; the caller adds it to the queue.
fn enqueue(id: NodeId, group: u8, residency: &mut Residency) -> QueuedWrite {
    residency.queue_write(id, group);
    QueuedWrite {
        node: id,
        epoch: residency.node(id).epoch,
        group,
        ancestor_group: None,
        admitted: false,
        unsummed: residency.host_checksum(id, group).is_none(),
    }
}

/// Bytes of a queued payload; 0 if its node was removed.
fn payload_bytes(write: &QueuedWrite, residency: &Residency) -> u64 {
    if residency.forest().is_live(write.node, write.epoch) {
        u64::from(residency.payload_bytes(write.node, write.group))
    } else {
        0
    }
}
