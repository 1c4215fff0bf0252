//! One directory: its slots with their records, its policies and its health.

use undercroft_contract::cipher::SEAL_BYTES;
use undercroft_contract::format::{PLACEHOLDER, PLACEHOLDERS_SHARE, RECORDS_PER_BLOCK};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::IoFault;
use undercroft_contract::pages::{CAPACITY_MIN, SLOT_ALIGN};

use crate::policy::{Policy, TierPolicies};
use crate::slots::{Class, Owner, Place, Slots};

use super::health::{Health, HealthMonitor};
use super::latency::Latency;
use super::records::Records;

/// The most memory that the index takes for each block of a full store, in bytes: a node, its place in the hash table,
/// and a slot. Chains of few blocks, branches and several KV cache groups take more.
pub const INDEX_BYTES_PER_BLOCK: u64 = 112;

/// Placeholder records that even the smallest directory may have.
const PLACEHOLDERS_MIN: u64 = CAPACITY_MIN / SLOT_ALIGN / PLACEHOLDERS_SHARE;

/// Longest time that a changed block of the table waits for other blocks, in nanoseconds: the record of a slot may be
/// this old.
const TABLE_DELAY_NS: u64 = 1_000_000_000;

/// Blocks of the table that are written only for the ticks of touches, once in each pause: 64 KiB/s.
const TOUCHED_BLOCKS_MAX: usize = 16;
const TOUCHED_PAUSE_NS: u64 = 1_000_000_000;

/// One directory.
///
/// The record of a slot has the number of the slot's cell: the records of a page follow each other.
#[derive(Debug)]
pub(crate) struct Disk {
    slots: Slots,
    records: Records,
    /// The id of the store, if its payloads are encrypted.
    encrypted_store: Option<u64>,
    pub(crate) policies: TierPolicies,
    pub(crate) health: HealthMonitor,
    /// Times of the reads and writes of payloads.
    pub(crate) latencies: [Latency; 2],
    /// When the longest waiting block of the table was first seen waiting.
    dirty_since_ns: Option<u64>,
    /// When touched records may be written again.
    next_touched_ns: u64,
    /// Instance in each entry of the namespace table; 0 is empty.
    pub(crate) namespace_entries: Vec<u64>,
}

/// The state of a directory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceReport {
    /// Whether it is used.
    pub health: Health,
    /// The fault that caused this.
    pub fault: Option<IoFault>,
    /// How long the reads and the writes of payloads took.
    pub latencies: [Latency; 2],
    /// Payloads on it.
    pub blocks: u64,
}

impl Disk {
    pub(crate) fn new(image: &DeviceImage, policy: Policy, namespace_entries: Vec<u64>) -> Self {
        let mut slots = Slots::new(image.capacity, image.page_bytes);
        slots.exclude(&image.holes);
        let health = if slots.extent() == 0 {
            HealthMonitor::absent()
        } else {
            HealthMonitor::new()
        };
        Self {
            slots,
            records: Records::default(),
            encrypted_store: image.encrypted_store(),
            policies: TierPolicies::new(policy),
            health,
            latencies: [Latency::default(); 2],
            dirty_since_ns: None,
            next_touched_ns: 0,
            namespace_entries,
        }
    }

    /// The directory's state.
    pub(crate) fn report(&self) -> DeviceReport {
        let (health, fault) = self.health.report();
        DeviceReport {
            health,
            fault,
            latencies: self.latencies,
            blocks: self.slots.blocks(),
        }
    }

    /// Whether the directory could not be opened yet.
    pub(crate) fn is_absent(&self) -> bool {
        self.slots.extent() == 0
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The slots, for closing and opening runs of them. Single slots are taken and freed through the device, with
    /// their records.
    pub(crate) fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// The id of the store, if its payloads are encrypted.
    pub(crate) fn encrypted_store(&self) -> Option<u64> {
        self.encrypted_store
    }

    /// The size class of payloads of `payload_bytes`; `None` if a page holds none of them.
    pub(crate) fn class_for(&mut self, payload_bytes: u64) -> Option<Class> {
        self.slots.class_for(self.sealed_bytes(payload_bytes))
    }

    /// Bytes of a payload on disk, with its seal in an encrypted store.
    pub(crate) fn sealed_bytes(&self, payload_bytes: u64) -> u64 {
        payload_bytes + self.encrypted_store.map_or(0, |_| SEAL_BYTES as u64)
    }

    /// Allocates a slot and its record.
    pub(crate) fn alloc(&mut self, class: Class, owner: Owner) -> Option<u64> {
        self.slots.alloc(class, owner)
    }

    /// Frees a slot. The record on disk is overwritten with the next write of its block. Until then the
    /// record describes bytes that do not match its checksum as soon as the slot is used again.
    pub(crate) fn free(&mut self, class: Class, offset: u64) {
        let page = self.slots.page_of(offset);
        let records = self.slots.cells_of_page(page);
        self.records.mark_stale(self.slots.cell_of(class, offset));
        self.slots.free(class, offset);
        if self.slots.page_class(page).is_none() {
            self.records.release(records);
        }
    }

    /// Makes room for the records of the table on disk.
    pub(crate) fn begin_claims(&mut self, records: u32) {
        self.slots.reserve_cells(records);
    }

    /// Claims a slot that, by its record on disk, is in use, and that has no rivals. Returns the number of its record
    /// from now on.
    pub(crate) fn claim(&mut self, place: Place, record: u32, owner: Owner) -> u32 {
        let now = self.slots.claim(place, record, owner);
        if now != record {
            self.records.mark_dirty(now);
            self.records.mark_dirty(record);
        }
        now
    }

    /// Revokes a claim: a later record claims the bytes or the payload.
    pub(crate) fn unclaim(&mut self, class: Class, offset: u64) {
        self.records.mark_stale(self.slots.cell_of(class, offset));
        self.slots.unclaim(class, offset);
    }

    /// Notes that the payload of a slot has left the index.
    pub(crate) fn slot_is_stale(&mut self, class: Class, offset: u64) {
        self.records.mark_stale(self.slots.cell_of(class, offset));
    }

    /// Notes that a record on disk describes no payload that was taken over.
    pub(crate) fn mark_stale(&mut self, record: u32) {
        self.records.mark_stale(record);
    }

    /// No restart may find a payload that is not there now: the table is brought up to date, and synced.
    pub(crate) fn order_records(&mut self) {
        self.records.order();
    }

    /// Whether a sync of the table is due, because all blocks of an order have been written.
    pub(crate) fn needs_table_sync(&self) -> bool {
        self.records.ordered().needs_sync()
    }

    /// Whether the medium has all records since the last order.
    pub(crate) fn is_order_durable(&self) -> bool {
        self.records.ordered().is_durable()
    }

    /// A sync of the table begins.
    pub(crate) fn table_sync_begins(&mut self) {
        self.records.sync_begins();
    }

    /// A sync of the table has ended.
    pub(crate) fn table_sync_ended(&mut self, ok: bool) {
        self.records.sync_ended(ok);
    }

    /// Completes a series of [`Disk::claim`].
    pub(crate) fn finish_claims(&mut self) {
        self.slots.finish_claims();
    }

    /// Claims the record of a placeholder on disk. False if the node has a record, or if there are too many
    /// placeholders.
    pub(crate) fn claim_placeholder(&mut self, node: u32, record: u32) -> bool {
        if !self.may_add_placeholder(node) {
            return false;
        }
        let group = PLACEHOLDER;
        if self.slots.take_cell_at(record, Owner { node, group }) {
            self.records.add_placeholder(node, record);
        } else {
            self.records.mark_dirty(record);
            self.add_placeholder(node);
        }
        true
    }

    /// Gives a node a placeholder record, so that a restart finds the nodes below it. False if the node
    /// has such a record, or if there are too many.
    pub(crate) fn add_placeholder(&mut self, node: u32) -> bool {
        let may_add = self.may_add_placeholder(node);
        if may_add {
            let group = PLACEHOLDER;
            let record = self.slots.take_cell(Owner { node, group });
            self.records.add_placeholder(node, record);
            self.records.mark_dirty(record);
        }
        may_add
    }

    fn may_add_placeholder(&self, node: u32) -> bool {
        !self.records.has_placeholder(node) && !self.has_all_placeholders()
    }

    /// Whether there are as many placeholders as there may be: the table stays within its share.
    pub(crate) fn has_all_placeholders(&self) -> bool {
        let slots = self.slots.capacity() / SLOT_ALIGN;
        self.records.placeholders() >= (slots / PLACEHOLDERS_SHARE).max(PLACEHOLDERS_MIN)
    }

    /// Frees a node's own record, if it has one.
    pub(crate) fn remove_placeholder(&mut self, node: u32) {
        if let Some(record) = self.records.remove_placeholder(node) {
            self.slots.put_cell(record);
        }
    }

    /// Notes that the record of a slot has changed and must be written.
    pub(crate) fn mark_dirty(&mut self, class: Class, offset: u64) {
        let record = self.slots.cell_of(class, offset);
        self.records.mark_dirty(record);
    }

    /// Notes that a payload was used. Its record is written later.
    pub(crate) fn mark_touched(&mut self, class: Class, offset: u64) {
        let record = self.slots.cell_of(class, offset);
        self.records.mark_touched(record);
    }

    /// Whether records of used payloads wait to be written.
    pub(crate) fn has_touched(&self) -> bool {
        self.records.has_touched()
    }

    /// Marks some records of used payloads to be written now, at a bounded rate.
    pub(crate) fn write_some_touched(&mut self, now_ns: u64) {
        if now_ns >= self.next_touched_ns && self.records.has_touched() {
            self.next_touched_ns = now_ns + TOUCHED_PAUSE_NS;
            self.records.write_touched(TOUCHED_BLOCKS_MAX);
        }
    }

    /// Marks all records of used payloads to be written now, at the end of the engine.
    pub(crate) fn write_all_touched(&mut self) {
        self.records.write_touched(usize::MAX);
    }

    /// Whether a block of the table has waited long enough for other blocks.
    pub(crate) fn is_table_late(&mut self, now_ns: u64) -> bool {
        if self.records.dirty_blocks() == 0 {
            self.dirty_since_ns = None;
            return false;
        }
        let since = *self.dirty_since_ns.get_or_insert(now_ns);
        now_ns >= since + TABLE_DELAY_NS
    }

    /// Blocks of the table that are to be written.
    pub(crate) fn dirty_blocks(&self) -> usize {
        self.records.dirty_blocks()
    }

    /// Takes the next block of the table to write; no block is in flight twice.
    pub(crate) fn take_dirty_block(&mut self) -> Option<u32> {
        self.records.take_dirty_block()
    }

    /// The write of a block has ended: `None` if it was never made, because the engine ends.
    pub(crate) fn block_written(&mut self, block: u32, ok: Option<bool>) {
        self.records.block_written(block, ok);
    }

    /// Owners of the records of a block.
    pub(crate) fn block_owners(&self, block: u32) -> impl Iterator<Item = Option<Owner>> + '_ {
        let first = block * RECORDS_PER_BLOCK as u32;
        let records = first..first + RECORDS_PER_BLOCK as u32;
        records.map(|record| self.slots.owner_of_cell(record))
    }

    /// Number of records in use for payloads, and whether each placeholder has its own record and a node that `may_have`
    /// one.
    #[cfg(feature = "check")]
    pub(crate) fn records_in_use(&self, may_have: impl Fn(u32) -> bool) -> (usize, bool) {
        let group = PLACEHOLDER;
        let mut nodes = self.records.nodes();
        let owned = nodes.all(|(node, record)| {
            self.slots.owner_of_cell(record) == Some(Owner { node, group }) && may_have(node)
        });
        let used = self.slots.cells_used();
        (used - self.records.nodes().count(), owned)
    }

    /// Whether a node has a record of its own.
    #[cfg(feature = "check")]
    pub(crate) fn has_placeholder(&self, node: u32) -> bool {
        self.records.has_placeholder(node)
    }
}
