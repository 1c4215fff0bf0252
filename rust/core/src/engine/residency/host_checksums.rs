//! Checksums of the payloads in the arena, by slot.

use crate::forest::NodeId;
use crate::slots::slot_offset;

use super::geometry::Region;
use super::state::Residency;

/// The value for an unknown checksum. A payload whose checksum is 0, one in 2^64, is not compared.
const UNKNOWN: u64 = 0;

/// The checksums of payloads in the arena, as far as they are known: 8 bytes for each slot.
///
/// Invariant: the entry of a slot belongs to the payload in the slot.
#[derive(Debug, Default)]
pub(super) struct HostChecksums {
    pages: Vec<Vec<u64>>,
}

impl HostChecksums {
    fn get(&self, (page, slot): (usize, usize)) -> u64 {
        let found = self.pages.get(page).and_then(|slots| slots.get(slot));
        found.copied().unwrap_or(UNKNOWN)
    }

    fn set(&mut self, (page, slot): (usize, usize), checksum: u64) {
        if self.pages.len() <= page {
            self.pages.resize(page + 1, Vec::new());
        }
        let slots = &mut self.pages[page];
        if slots.len() <= slot {
            slots.resize(slot + 1, UNKNOWN);
        }
        slots[slot] = checksum;
    }
}

impl Residency {
    /// The checksum of a payload in the arena, if it is known.
    pub(in crate::engine) fn host_checksum(&self, id: NodeId, group: u8) -> Option<u64> {
        let known = self.host_checksums.get(self.host_place(id, group));
        (known != UNKNOWN).then_some(known)
    }

    /// Takes the checksum of the bytes that are now in a payload's slot of the arena. False if another checksum of the
    /// payload is known. The first checksum is kept.
    pub(in crate::engine) fn is_unchanged(&mut self, id: NodeId, group: u8, found: u64) -> bool {
        match self.host_checksum(id, group) {
            Some(known) => known == found,
            None => {
                self.set_host_checksum(id, group, Some(found));
                true
            }
        }
    }

    /// Notes the checksum of a payload that is about to fill its slot.
    pub(in crate::engine) fn set_host_checksum(
        &mut self,
        id: NodeId,
        group: u8,
        checksum: Option<u64>,
    ) {
        let place = self.host_place(id, group);
        self.host_checksums.set(place, checksum.unwrap_or(UNKNOWN));
    }

    /// Page and slot of a payload in the arena.
    fn host_place(&self, id: NodeId, group: u8) -> (usize, usize) {
        let class = self.class(id, Region::Host, group);
        let offset = slot_offset(self.node(id).payload(group).host_slot);
        let page = self.host.page_of(offset) as usize;
        (page, self.host.slot_at(class, offset))
    }
}
