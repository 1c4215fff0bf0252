//! The memory of blocks that are not resident: evicted and refused ones.

/// Bits of a packed entry that hold the tick; two more hold the hit class.
const TICK_BITS: u32 = 30;
const TICK_MASK: u32 = (1 << TICK_BITS) - 1;
/// Marks an empty place of the table and a ring entry that was taken out.
const NONE: u32 = u32::MAX;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remembered {
    pub(super) last: u64,
    pub(super) hit_class: u8,
}

/// A bounded list in order of entry, found by fingerprint. About 15 bytes an entry, allocated at
/// once and touched as it fills; every operation is O(1) and nothing is ever rehashed. Only 32 bits of
/// a fingerprint are compared: a rare false memory costs precision of an estimate, no more.
#[derive(Debug)]
pub(super) struct GhostList {
    ring: Box<[Entry]>,
    /// Next place of the ring to be written.
    head: usize,
    /// Ring places by fingerprint: linear probing, deletion by shifting back.
    table: Box<[u32]>,
    shift: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u32,
    packed: u32,
}

const VACANT: Entry = Entry {
    tag: 0,
    packed: NONE,
};

impl GhostList {
    /// A list of at most `entries` blocks.
    pub(super) fn new(entries: usize) -> Self {
        let entries = entries.clamp(1, 1 << 30);
        let bits = (entries + entries / 4).next_power_of_two().ilog2().max(1);
        Self {
            ring: vec![VACANT; entries].into_boxed_slice(),
            head: 0,
            table: vec![NONE; 1 << bits].into_boxed_slice(),
            shift: 32 - bits,
        }
    }

    /// Remembers a block at the young end. Returns the oldest one where it had to make place for it.
    pub(super) fn push(
        &mut self,
        fingerprint: u64,
        block: Remembered,
        now: u64,
    ) -> Option<Remembered> {
        let tag = tag_of(fingerprint);
        let place = self.head;
        self.head = (self.head + 1) % self.ring.len();
        let leaving = self.ring[place];
        let dropped = (leaving.packed != NONE).then(|| {
            self.unlink(place as u32, leaving.tag);
            unpack(leaving.packed, now)
        });
        self.ring[place] = Entry {
            tag,
            packed: pack(block),
        };
        self.link(place as u32, tag);
        dropped
    }

    /// Takes out what is remembered of a block. A block is pushed again only after it was taken out.
    pub(super) fn take(&mut self, fingerprint: u64, now: u64) -> Option<Remembered> {
        let tag = tag_of(fingerprint);
        let mut at = self.home(tag);
        loop {
            let place = self.table[at];
            if place == NONE {
                return None;
            }
            let entry = self.ring[place as usize];
            if entry.tag == tag {
                self.close(at);
                self.ring[place as usize] = VACANT;
                return Some(unpack(entry.packed, now));
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
        while self.table[at] != NONE {
            at = self.next(at);
        }
        self.table[at] = place;
    }

    fn unlink(&mut self, place: u32, tag: u32) {
        let mut at = self.home(tag);
        while self.table[at] != place {
            if self.table[at] == NONE {
                return;
            }
            at = self.next(at);
        }
        self.close(at);
    }

    /// Empties place `hole` and moves later entries of its run back, so that no probe stops early.
    fn close(&mut self, mut hole: usize) {
        let mask = self.table.len() - 1;
        let mut at = hole;
        loop {
            at = self.next(at);
            let place = self.table[at];
            if place == NONE {
                break;
            }
            let home = self.home(self.ring[place as usize].tag);
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.table[hole] = place;
                hole = at;
            }
        }
        self.table[hole] = NONE;
    }
}

fn tag_of(fingerprint: u64) -> u32 {
    (fingerprint >> 32) as u32
}

/// Class and tick modulo 2^30 in one word. The word that means "vacant" is moved by one tick.
fn pack(block: Remembered) -> u32 {
    let packed = (u32::from(block.hit_class.min(3)) << TICK_BITS) | (block.last as u32 & TICK_MASK);
    packed.min(NONE - 1)
}

/// The latest tick up to `now` that packs to `packed`.
fn unpack(packed: u32, now: u64) -> Remembered {
    let age = (now as u32).wrapping_sub(packed) & TICK_MASK;
    Remembered {
        last: now.saturating_sub(u64::from(age)),
        hit_class: (packed >> TICK_BITS) as u8,
    }
}
