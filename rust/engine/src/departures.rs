//! A bounded memory of blocks that have left the tiers or were not admitted, for [`Reason`]s.

use undercroft_contract::explain::{Reason, Rest};
use undercroft_contract::key::BlockHash;

use crate::forest::NsId;
use crate::work;

/// Blocks that are remembered in the same place: as many as a cache line holds.
const PLACES: usize = 8;

/// Reasons that are remembered.
const REASONS: [Reason; 4] = [
    Reason::EvictedHost,
    Reason::EvictedDisk,
    Reason::Lost,
    Reason::NotAdmitted,
];

/// The bits of an entry: 32 of the block's tag, 29 of the second, 3 of the reason: its place in [`REASONS`], from 1. 0 is no
/// entry.
const REASON_BITS: u32 = 3;
const REASON_MASK: u64 = (1 << REASON_BITS) - 1;
const SECOND_MASK: u64 = (1 << (32 - REASON_BITS)) - 1;

/// Blocks that have left the tiers or were not admitted, the latest ones: 8 bytes for each.
///
/// Only a part of a hash is compared, so about one answer in a billion is about another block.
#[derive(Debug)]
pub(super) struct Departures {
    /// Entries by hash. Zero at first, so that the memory is the system's until it is used.
    lines: Box<[[u64; PLACES]]>,
    /// Seconds since the engine's start.
    now_s: u64,
}

impl Departures {
    /// A memory of about `blocks` blocks. For 0, nothing is remembered.
    pub(super) fn new(blocks: usize) -> Self {
        let lines = match blocks.div_ceil(PLACES) {
            0 => 0,
            lines => lines.next_power_of_two(),
        };
        Self {
            lines: vec![[0; PLACES]; lines].into_boxed_slice(),
            now_s: 0,
        }
    }

    pub(super) fn set_now(&mut self, now_ns: u64) {
        self.now_s = now_ns / 1_000_000_000;
    }

    /// The last payload of a block has left a tier, or a block was not admitted.
    pub(super) fn note(&mut self, ns: NsId, hash: &BlockHash, reason: Reason) {
        let Some((line, tag)) = self.place(ns, hash) else {
            return;
        };
        work::index();
        let of = REASONS.iter().position(|&of| of == reason);
        let of = of.expect("a reason for which blocks leave or stay away") as u64 + 1;
        let entry = tag << 32 | (self.now_s & SECOND_MASK) << REASON_BITS | of;
        let line = &mut self.lines[line];
        // The entry of the same block, else a free place, else the oldest entry.
        let now_s = self.now_s & SECOND_MASK;
        let age = |&entry: &u64| match entry {
            0 => u64::MAX,
            entry => now_s.saturating_sub(entry >> REASON_BITS & SECOND_MASK),
        };
        let is_same = |entry: &u64| *entry != 0 && *entry >> 32 == tag;
        let place = line.iter().position(is_same).or_else(|| {
            let places = line.iter().enumerate();
            places.max_by_key(|(_, entry)| age(entry)).map(|(at, _)| at)
        });
        line[place.expect("a line has places")] = entry;
    }

    /// Why a block is not there, if that is remembered.
    pub(super) fn find(&self, ns: NsId, hash: &BlockHash) -> Option<Rest> {
        let (line, tag) = self.place(ns, hash)?;
        work::index();
        let mut entries = self.lines[line].iter();
        let entry = *entries.find(|&&entry| entry != 0 && entry >> 32 == tag)?;
        let second = entry >> REASON_BITS & SECOND_MASK;
        let ago_s = (self.now_s & SECOND_MASK).saturating_sub(second);
        Some(Rest {
            reason: REASONS[(entry & REASON_MASK) as usize - 1],
            ago_s: u32::try_from(ago_s).ok(),
        })
    }

    /// Line and tag of a block; `None` if nothing is remembered.
    fn place(&self, ns: NsId, hash: &BlockHash) -> Option<(usize, u64)> {
        let last = self.lines.len().checked_sub(1)?;
        // Block hashes are uniform, but the same hash may occur in several namespaces.
        let mixed = hash.fingerprint() ^ u64::from(ns).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        Some((mixed as usize & last, mixed >> 32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> BlockHash {
        BlockHash::new(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).unwrap()
    }

    #[test]
    fn a_block_is_remembered_with_its_tier_and_its_time() {
        let mut gone = Departures::new(1024);
        assert_eq!(gone.find(0, &hash(1)), None);
        gone.set_now(5_000_000_000);
        gone.note(0, &hash(1), Reason::EvictedHost);
        gone.note(0, &hash(2), Reason::EvictedDisk);
        gone.note(0, &hash(3), Reason::Lost);
        gone.note(0, &hash(4), Reason::NotAdmitted);
        gone.set_now(12_900_000_000);
        let found = |number| gone.find(0, &hash(number)).map(|of| (of.reason, of.ago_s));
        assert_eq!(found(1), Some((Reason::EvictedHost, Some(7))));
        assert_eq!(found(2), Some((Reason::EvictedDisk, Some(7))));
        assert_eq!(found(3), Some((Reason::Lost, Some(7))));
        assert_eq!(found(4), Some((Reason::NotAdmitted, Some(7))));
        assert_eq!(gone.find(1, &hash(1)), None, "of another namespace");
    }

    #[test]
    fn the_last_way_counts_and_takes_no_other_place() {
        let mut gone = Departures::new(PLACES);
        for number in 0..PLACES as u64 {
            gone.note(0, &hash(number), Reason::EvictedHost);
        }
        gone.note(0, &hash(0), Reason::EvictedDisk);
        for number in 0..PLACES as u64 {
            assert!(gone.find(0, &hash(number)).is_some());
        }
        let way = gone.find(0, &hash(0)).unwrap().reason;
        assert_eq!(way, Reason::EvictedDisk);
    }

    #[test]
    fn the_oldest_block_is_forgotten_first_and_the_memory_does_not_grow() {
        let mut gone = Departures::new(4096);
        for number in 0..20_000 {
            gone.set_now(number * 1_000_000_000);
            gone.note(0, &hash(number), Reason::EvictedHost);
        }
        let known = |numbers: std::ops::Range<u64>| {
            let all = numbers.end - numbers.start;
            let found = numbers.filter(|&number| gone.find(0, &hash(number)).is_some());
            found.count() as f64 / all as f64
        };
        assert!(known(18_500..20_000) > 0.95);
        assert!(known(0..10_000) < 0.05);
        assert_eq!(size_of_val(&*gone.lines), 4096 * 8);
        assert!(Departures::new(0).find(0, &hash(1)).is_none());
    }
}
