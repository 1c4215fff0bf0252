//! Bookkeeping of one disk directory: slots, records and health. No IO happens here: the engine
//! turns what this module decides into requests.

use std::collections::{BTreeSet, HashMap};

use rustc_hash::FxHashMap;

use crate::disk::format::{LINK, LINKS_SHARE, RECORDS_PER_BLOCK};
use crate::io::IoFault;
use crate::policy::{Policy, PolicyKind};
use crate::slots::{Class, Owner, SLOT_ALIGN, Slots};

pub mod format;
pub mod inspect;
pub mod open;

/// Failed writes in a row after which a directory takes no writes for a while.
const WRITE_FAILURES_MAX: u32 = 3;
/// Failed reads in a row after which a directory is given up.
const READ_FAILURES_MAX: u32 = 8;
/// Pause before writes are tried again, in nanoseconds.
const WRITE_PAUSE_NS: u64 = 30_000_000_000;
/// Pause before a directory that was given up is tried again, in nanoseconds. Doubled each time, up to
/// [`FAILED_DOUBLINGS_MAX`] times (about an hour).
const FAILED_PAUSE_NS: u64 = 60_000_000_000;
const FAILED_DOUBLINGS_MAX: u32 = 6;

/// Links that even the smallest directory may have.
const LINKS_MIN: u64 = open::CAPACITY_MIN / SLOT_ALIGN / LINKS_SHARE;

/// Whether a directory is usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Reads and writes.
    Good,
    /// Reads only, until the given time in nanoseconds; then writes are tried again.
    NoWrites {
        /// When to try again.
        until_ns: u64,
    },
    /// Neither, and empty: too many reads failed. Used again from the given time in nanoseconds, if a
    /// write succeeds then.
    Failed {
        /// When to try again.
        until_ns: u64,
    },
}

/// What a directory holds, as read when it was opened.
#[derive(Debug)]
pub struct DeviceImage {
    /// Bytes of the data file that may be used.
    pub capacity: u64,
    /// Page size of the data file.
    pub page_bytes: u64,
    /// The `super` file.
    pub super_bytes: Vec<u8>,
    /// The `table` file.
    pub table_bytes: Vec<u8>,
}

/// One directory.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) slots: Slots,
    pub(crate) policy: Policy,
    /// Nodes that are no leaves, but hold payloads that a hit can do without.
    pub(crate) spares: Policy,
    pub(crate) health: Health,
    /// Why it is not `Good`.
    pub(crate) fault: Option<IoFault>,
    /// Instance in each entry of the namespace table; 0 is empty.
    pub(crate) namespace_entries: Vec<u64>,
    write_failures: u32,
    read_failures: u32,
    /// How often it was given up since a read succeeded last.
    given_up: u32,
    /// Record of each slot, by page: fixed while the page keeps its class.
    page_records: FxHashMap<u32, Vec<u32>>,
    record_owner: Vec<Option<Owner>>,
    /// Records of nodes that may be without payloads.
    links: HashMap<u32, u32>,
    free_records: BTreeSet<u32>,
    dirty: BTreeSet<u32>,
    blocks_in_flight: BTreeSet<u32>,
}

impl Disk {
    pub(crate) fn new(slots: Slots, policy: Policy, namespace_entries: Vec<u64>) -> Self {
        Self {
            slots,
            policy,
            spares: Policy::new(PolicyKind::Lru, 0, 0),
            health: Health::Good,
            fault: None,
            namespace_entries,
            write_failures: 0,
            read_failures: 0,
            given_up: 0,
            page_records: FxHashMap::default(),
            record_owner: Vec::new(),
            links: HashMap::new(),
            free_records: BTreeSet::new(),
            dirty: BTreeSet::new(),
            blocks_in_flight: BTreeSet::new(),
        }
    }

    /// Whether a write may be tried at `now_ns`.
    pub(crate) fn takes_writes(&self, now_ns: u64) -> bool {
        match self.health {
            Health::Good => true,
            Health::NoWrites { until_ns } | Health::Failed { until_ns } => now_ns >= until_ns,
        }
    }

    /// Whether it is in use at all.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.health, Health::Failed { .. })
    }

    /// Counts a write that was carried out. One that was in flight when writes were paused proves
    /// nothing.
    pub(crate) fn write_succeeded(&mut self, now_ns: u64) {
        if self.takes_writes(now_ns) {
            self.write_failures = 0;
            self.health = Health::Good;
            self.fault = None;
        }
    }

    /// Counts a failed write. A full or read-only medium pauses writes at once.
    pub(crate) fn write_failed(&mut self, fault: IoFault, now_ns: u64) {
        self.write_failures += 1;
        let full = [
            rustix::io::Errno::NOSPC,
            rustix::io::Errno::ROFS,
            rustix::io::Errno::DQUOT,
        ]
        .iter()
        .any(|errno| fault == IoFault::Os(errno.raw_os_error()));
        match &mut self.health {
            Health::Failed { until_ns } => {
                *until_ns = now_ns.saturating_add(FAILED_PAUSE_NS).max(*until_ns);
            }
            _ if full || self.write_failures >= WRITE_FAILURES_MAX => {
                let until_ns = now_ns.saturating_add(WRITE_PAUSE_NS);
                self.health = Health::NoWrites { until_ns };
                self.fault = Some(fault);
            }
            _ => {}
        }
    }

    pub(crate) fn read_succeeded(&mut self) {
        self.read_failures = 0;
        self.given_up = 0;
    }

    /// Counts a read that the device failed; true if the directory is now given up.
    pub(crate) fn read_failed(&mut self, fault: IoFault, now_ns: u64) -> bool {
        self.read_failures += 1;
        if self.read_failures < READ_FAILURES_MAX || !self.is_alive() {
            return false;
        }
        let pause = FAILED_PAUSE_NS << self.given_up.min(FAILED_DOUBLINGS_MAX);
        self.health = Health::Failed {
            until_ns: now_ns.saturating_add(pause),
        };
        self.fault = Some(fault);
        self.given_up += 1;
        self.read_failures = 0;
        true
    }

    /// Takes a slot and its record.
    pub(crate) fn alloc(&mut self, class: Class, owner: Owner) -> Option<u64> {
        let offset = self.slots.alloc(class, owner)?;
        let record = self.record_of(class, offset);
        self.record_owner[record as usize] = Some(owner);
        Some(offset)
    }

    /// Gives a slot back. Its record on disk is overwritten when its block is next written; until
    /// then it describes bytes that fail their checksum as soon as the slot is used again.
    pub(crate) fn free(&mut self, class: Class, offset: u64) {
        let record = self.record_of(class, offset);
        self.record_owner[record as usize] = None;
        let page = self.slots.page_of(offset);
        self.slots.free(class, offset);
        if self.slots.page_class(page).is_none() {
            self.free_records
                .extend(self.page_records.remove(&page).into_iter().flatten());
        }
    }

    /// Takes the slot and record that a store on disk says are in use.
    pub(crate) fn claim(&mut self, class: Class, offset: u64, record: u32, owner: Owner) -> bool {
        let taken = self
            .record_owner
            .get(record as usize)
            .is_some_and(Option::is_some);
        if taken || !self.slots.claim(class, offset, owner) {
            return false;
        }
        let (page, slot) = self.slot_of(class, offset);
        let records = self.page_records.entry(page).or_default();
        let slots = usize::try_from(self.slots.page_bytes() / self.slots.slot_bytes(class));
        records.resize(slots.unwrap_or(0), u32::MAX);
        records[slot] = record;
        if self.record_owner.len() <= record as usize {
            self.record_owner.resize(record as usize + 1, None);
        }
        self.record_owner[record as usize] = Some(owner);
        true
    }

    /// Takes the record of a link, as a store on disk says. False if it is taken, or there is one.
    pub(crate) fn claim_link(&mut self, node: u32, record: u32) -> bool {
        let at = record as usize;
        if self.record_owner.len() <= at {
            self.record_owner.resize(at + 1, None);
        }
        if self.record_owner[at].is_some() || self.links.contains_key(&node) || self.has_all_links()
        {
            return false;
        }
        self.record_owner[at] = Some(Owner { node, group: LINK });
        self.links.insert(node, record);
        true
    }

    /// Whether there are as many links as there may be: the table stays within its share.
    pub(crate) fn has_all_links(&self) -> bool {
        let slots = self.slots.capacity() / SLOT_ALIGN;
        self.links.len() as u64 >= (slots / LINKS_SHARE).max(LINKS_MIN)
    }

    /// Gives a node a record of its own, so that what stands on it is found again. False if it has one,
    /// or cannot.
    pub(crate) fn add_link(&mut self, node: u32) -> bool {
        if self.links.contains_key(&node) || self.has_all_links() {
            return false;
        }
        let record = self.take_record();
        self.record_owner[record as usize] = Some(Owner { node, group: LINK });
        self.links.insert(node, record);
        self.dirty.insert(record / RECORDS_PER_BLOCK as u32);
        true
    }

    /// Gives up a node's own record, if it has one.
    pub(crate) fn remove_link(&mut self, node: u32) {
        if let Some(record) = self.links.remove(&node) {
            self.record_owner[record as usize] = None;
            self.free_records.insert(record);
        }
    }

    /// Names the owner of a slot that was claimed with a record.
    pub(crate) fn set_owner(&mut self, class: Class, offset: u64, record: u32, owner: Owner) {
        self.record_owner[record as usize] = Some(owner);
        self.slots.set_owner(class, offset, owner);
    }

    /// Completes a series of [`Disk::claim`].
    pub(crate) fn finish_claims(&mut self) {
        self.slots.finish_claims();
        let mut given: Vec<bool> = self.record_owner.iter().map(Option::is_some).collect();
        let mut next = 0;
        let mut pages: Vec<u32> = self.page_records.keys().copied().collect();
        pages.sort_unstable();
        for page in pages {
            let mut records = self.page_records.remove(&page).unwrap_or_default();
            for record in records.iter_mut().filter(|record| **record == u32::MAX) {
                while given.get(next).copied().unwrap_or(false) {
                    next += 1;
                }
                if next == given.len() {
                    given.push(false);
                    self.record_owner.push(None);
                }
                given[next] = true;
                *record = u32::try_from(next).unwrap_or(u32::MAX);
            }
            self.page_records.insert(page, records);
        }
        self.free_records = (0u32..)
            .zip(&given)
            .filter(|(_, given)| !**given)
            .map(|(record, _)| record)
            .collect();
    }

    /// Notes that the record of a slot has changed and must be written.
    pub(crate) fn mark_dirty(&mut self, class: Class, offset: u64) {
        let record = self.record_of(class, offset);
        self.dirty.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// Blocks of the table that wait to be written.
    pub(crate) fn dirty_blocks(&self) -> usize {
        self.dirty.len()
    }

    /// Takes the next block of the table to write. A block is in flight once at a time, so that an
    /// older image never lands on a newer one.
    pub(crate) fn take_dirty_block(&mut self) -> Option<u32> {
        let block = self
            .dirty
            .iter()
            .copied()
            .find(|block| !self.blocks_in_flight.contains(block))?;
        self.dirty.remove(&block);
        self.blocks_in_flight.insert(block);
        Some(block)
    }

    /// The write of a block has ended.
    pub(crate) fn block_written(&mut self, block: u32, ok: bool) {
        self.blocks_in_flight.remove(&block);
        if !ok {
            self.dirty.insert(block);
        }
    }

    /// Owners of the records of a block.
    pub(crate) fn block_owners(&self, block: u32) -> impl Iterator<Item = Option<Owner>> + '_ {
        let first = block as usize * RECORDS_PER_BLOCK;
        (first..first + RECORDS_PER_BLOCK).map(|i| self.record_owner.get(i).copied().flatten())
    }

    /// The record of a slot in use, and whose it is.
    #[cfg(feature = "check")]
    pub(crate) fn record_at(&self, class: Class, offset: u64) -> Option<(u32, Option<Owner>)> {
        let (page, slot) = self.slot_of(class, offset);
        let record = *self.page_records.get(&page)?.get(slot)?;
        Some((record, *self.record_owner.get(record as usize)?))
    }

    /// How many records are in use for payloads and links, and whether each link has one.
    #[cfg(feature = "check")]
    pub(crate) fn records_in_use(&self) -> (usize, bool) {
        let linked = self.links.iter().all(|(&node, &record)| {
            self.record_owner[record as usize] == Some(Owner { node, group: LINK })
        });
        let used = self.record_owner.iter().flatten().count();
        (used - self.links.len(), linked)
    }

    /// Whether a node has a record of its own.
    #[cfg(feature = "check")]
    pub(crate) fn has_link(&self, node: u32) -> bool {
        self.links.contains_key(&node)
    }

    fn slot_of(&self, class: Class, offset: u64) -> (u32, usize) {
        let within = offset % self.slots.page_bytes() / self.slots.slot_bytes(class);
        (
            self.slots.page_of(offset),
            usize::try_from(within).unwrap_or(usize::MAX),
        )
    }

    fn record_of(&mut self, class: Class, offset: u64) -> u32 {
        let (page, slot) = self.slot_of(class, offset);
        if !self.page_records.contains_key(&page) {
            let count = self.slots.page_bytes() / self.slots.slot_bytes(class);
            let records = (0..count).map(|_| self.take_record()).collect();
            self.page_records.insert(page, records);
        }
        self.page_records[&page][slot]
    }

    fn take_record(&mut self) -> u32 {
        self.free_records.pop_first().unwrap_or_else(|| {
            self.record_owner.push(None);
            u32::try_from(self.record_owner.len() - 1).unwrap_or(u32::MAX)
        })
    }
}
