//! The memory of blocks that are not resident: evicted and refused blocks.

/// Bits of a packed word that hold the tick. Above them, two bits hold the hit class, and the highest hold the weight's
/// number of bits.
const TICK_BITS: u32 = 25;
const TICK_MASK: u32 = (1 << TICK_BITS) - 1;
const CLASS_MASK: u32 = 3;
const WEIGHT_AT: u32 = TICK_BITS + 2;
/// An empty place of the table, and a vacant entry of the ring: both are zero, so that a large list takes memory
/// only as it fills.
const EMPTY: u32 = 0;
const VACANT: u64 = 0;

/// The remembered facts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remembered {
    pub(super) last: u64,
    pub(super) hit_class: u8,
    /// Blocks for which this one stands: 0, or a power of two.
    pub(super) weight: u32,
}

/// A bounded list in order of entry, found by fingerprint. About 15 bytes an entry; every operation is
/// O(1) and nothing is ever rehashed. Only 32 bits of a fingerprint are compared: a rare false memory
/// costs precision of an estimate, no more.
#[derive(Debug)]
pub(super) struct GhostList {
    /// Fingerprint's tag and packed word of each entry.
    ring: Box<[u64]>,
    /// Next place of the ring to be written.
    head: u32,
    /// Ring places, plus one, by fingerprint: linear probing, deletion by shifting back.
    table: Box<[u32]>,
    shift: u32,
}

impl GhostList {
    /// A list of at most `entries` blocks.
    pub(super) fn new(entries: usize) -> Self {
        let entries = entries.clamp(1, 1 << 30);
        let bits = (entries + entries / 4).next_power_of_two().ilog2().max(1);
        Self {
            ring: vec![VACANT; entries].into_boxed_slice(),
            head: 0,
            table: vec![EMPTY; 1 << bits].into_boxed_slice(),
            shift: 32 - bits,
        }
    }

    /// Remembers a block at the young end. Returns the oldest block if it had to be forgotten for this.
    /// The block must not be in the list.
    pub(super) fn push(
        &mut self,
        fingerprint: u64,
        block: Remembered,
        now: u64,
    ) -> Option<Remembered> {
        let place = self.head;
        self.head = (place + 1) % self.ring.len() as u32;
        let leaving = self.ring[place as usize];
        let dropped = (leaving != VACANT).then(|| {
            self.unlink(place, tag_of(leaving));
            unpack(leaving as u32, now)
        });
        let tag = tag_from(fingerprint);
        self.ring[place as usize] = (u64::from(tag) << 32) | u64::from(pack(block));
        self.link(place, tag);
        dropped
    }

    /// Removes the remembered facts of a block.
    pub(super) fn take(&mut self, fingerprint: u64, now: u64) -> Option<Remembered> {
        let tag = tag_from(fingerprint);
        let mut at = self.home(tag);
        loop {
            let place = self.table[at].checked_sub(1)? as usize;
            let entry = self.ring[place];
            if tag_of(entry) == tag {
                self.close(at);
                self.ring[place] = VACANT;
                return Some(unpack(entry as u32, now));
            }
            at = self.next(at);
        }
    }

    fn home(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.table.len() - 1)
    }

    fn link(&mut self, place: u32, tag: u32) {
        let mut at = self.home(tag);
        while self.table[at] != EMPTY {
            at = self.next(at);
        }
        self.table[at] = place + 1;
    }

    fn unlink(&mut self, place: u32, tag: u32) {
        let mut at = self.home(tag);
        while self.table[at] != place + 1 {
            if self.table[at] == EMPTY {
                return;
            }
            at = self.next(at);
        }
        self.close(at);
    }

    /// Empties place `hole` and moves later entries of its run back, so that no probe stops early.
    fn close(&mut self, mut hole: usize) {
        let mask = self.table.len() - 1;
        let mut at = self.next(hole);
        while let Some(place) = self.table[at].checked_sub(1) {
            let home = self.home(tag_of(self.ring[place as usize]));
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.table[hole] = self.table[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.table[hole] = EMPTY;
    }
}

/// The half of an entry that is compared.
fn tag_of(entry: u64) -> u32 {
    (entry >> 32) as u32
}

/// The tag of a fingerprint. A client's keys may differ in few bits, so all bits count.
fn tag_from(fingerprint: u64) -> u32 {
    tag_of(fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Weight, class and tick modulo 2^25 in one word. A word that would be 0 is moved by a tick.
fn pack(block: Remembered) -> u32 {
    let weight_bits = u32::BITS - block.weight.leading_zeros();
    let class = u32::from(block.hit_class).min(CLASS_MASK);
    let packed =
        (weight_bits << WEIGHT_AT) | (class << TICK_BITS) | (block.last as u32 & TICK_MASK);
    packed.max(1)
}

/// The latest tick up to `now` that packs to `packed`.
fn unpack(packed: u32, now: u64) -> Remembered {
    let age = (now as u32).wrapping_sub(packed) & TICK_MASK;
    Remembered {
        last: now.saturating_sub(u64::from(age)),
        hit_class: (packed >> TICK_BITS & CLASS_MASK) as u8,
        weight: (1 << (packed >> WEIGHT_AT)) >> 1,
    }
}
