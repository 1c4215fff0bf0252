//! A leaf, and the classes of its hits.

/// Number of hit classes: hits of a block since it was first seen, capped.
pub const HIT_CLASSES: u8 = 4;

/// An evictable leaf as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The forest's number of the node.
    pub node: u32,
    /// Tick of the last touch.
    pub last: u64,
    /// Hits since first sight, below [`HIT_CLASSES`].
    pub hit_class: u8,
}

impl Leaf {
    /// Whether the leaf was last used before `other`. Equal ticks have one order, too.
    pub(super) fn is_older(&self, other: &Leaf) -> bool {
        (self.last, self.node) < (other.last, other.node)
    }
}

/// The class after one more hit.
pub(super) fn next_class(hit_class: u8) -> u8 {
    hit_class.saturating_add(1).min(HIT_CLASSES - 1)
}

/// Index of a hit class. A record on disk may hold a number above the last class.
pub(super) fn class_index(hit_class: u8) -> usize {
    usize::from(hit_class.min(HIT_CLASSES - 1))
}
