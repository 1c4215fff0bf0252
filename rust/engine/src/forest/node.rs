//! A node of the forest: one hash block of one prefix chain, and where its payloads are.

use undercroft_contract::format::TICK_MAX;
use undercroft_contract::key::BlockHash;
use undercroft_contract::tier::Tier;

/// Index of a node.
pub type NodeId = u32;
/// No node.
pub const NONE: NodeId = u32::MAX;
/// Index of a namespace.
pub type NsId = u16;

/// Index of a disk directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIndex(u8);

impl DeviceIndex {
    /// Directories that one engine may have.
    pub const COUNT_MAX: usize = 256;

    /// The device at `index`, which is below [`DeviceIndex::COUNT_MAX`].
    ///
    /// # Panics
    /// If `index` is not below this limit.
    pub fn new(index: usize) -> Self {
        Self(u8::try_from(index).expect("an engine has at most 256 directories"))
    }

    /// The index in the engine's list of directories.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The index as IO requests carry it.
    pub fn number(self) -> u16 {
        u16::from(self.0)
    }
}

/// A payload's state in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// No slot.
    #[default]
    Empty,
    /// A worker, or a get from the remote store, writes it; unreadable.
    Filling,
    /// A read from disk writes it; unreadable.
    Reading,
    /// Readable.
    Present,
}

/// A payload's state on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskState {
    /// No slot.
    #[default]
    Empty,
    /// In the write queue; no slot yet.
    Queued,
    /// The write is in flight.
    Writing,
    /// Readable.
    Present,
}

/// The places of one group's payload at a node. Slots are numbered in units of [`undercroft_contract::pages::SLOT_ALIGN`] bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// State in the arena.
    pub host: HostState,
    /// State on disk.
    pub disk: DiskState,
    /// Slot in the arena, unless `host` is `Empty`.
    pub host_slot: u32,
    /// Slot in the data file, while `disk` is `Writing` or `Present`.
    pub disk_slot: u32,
    /// While `disk` is `Present`: checksum of the payload on disk, or in an encrypted store the number of its write.
    pub checksum: u64,
}

impl Payload {
    /// Whether the payload has a slot in `tier`.
    pub fn has_slot(&self, tier: Tier) -> bool {
        match tier {
            Tier::Host => self.host != HostState::Empty,
            Tier::Disk => matches!(self.disk, DiskState::Writing | DiskState::Present),
        }
    }

    /// The payload's slot in `tier`, if it has one.
    pub(crate) fn slot(&self, tier: Tier) -> u32 {
        match tier {
            Tier::Host => self.host_slot,
            Tier::Disk => self.disk_slot,
        }
    }

    /// Whether the payload can be read from `tier`.
    pub fn is_readable(&self, tier: Tier) -> bool {
        match tier {
            Tier::Host => self.host == HostState::Present,
            Tier::Disk => self.disk == DiskState::Present,
        }
    }

    /// Whether the payload is being copied, read or written, or its write is queued.
    pub fn is_in_flight(&self) -> bool {
        matches!(self.host, HostState::Filling | HostState::Reading)
            || matches!(self.disk, DiskState::Queued | DiskState::Writing)
    }
}

/// How far a lookup reaches a node, in ascending order: a node of the host chain is visible, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Not in the index: it is freed when its last use ends.
    Detached,
    /// In the index, but a required payload of the chain up to here is missing.
    Hidden,
    /// Every required payload of the chain up to here is in some tier.
    Visible,
    /// Every required payload of the chain up to here is in the arena.
    HostChain,
}

/// Which payloads of a node may be evicted from a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Evictability {
    /// No payload.
    #[default]
    Kept,
    /// Only payloads that a hit can do without.
    OptionalPayloads,
    /// All payloads: the node is a leaf of the tier.
    Leaf,
}

/// When a node was used, for the eviction policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touch {
    /// Tick of the last touch.
    pub last: u64,
    /// Hits since first sight, 0 to 3.
    pub hit_class: u8,
}

/// Uses that keep a node and its payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Leases.
    pub pins: u32,
    /// Leases of nodes below whose hits need an optional payload of this node.
    pub holds: u32,
    /// Copies and IO operations in flight.
    pub busy: u32,
}

/// A node's neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) parent: NodeId,
    pub(super) first_child: NodeId,
    pub(super) next: NodeId,
    pub(super) prev: NodeId,
}

/// One hash block of one prefix chain, as it lies in memory: there is one for each block of a store, so its bytes
/// count. Fields that few nodes have lie elsewhere: see [`super::NodeRef`].
#[derive(Clone, Debug)]
pub struct Node {
    /// The node's block hash.
    pub hash: BlockHash,
    /// Disk directory of its payloads.
    pub device: DeviceIndex,
    /// The node's namespace.
    pub ns: NsId,
    /// Hash blocks from the root; 1 for the first.
    pub depth: u32,
    /// Distinguishes the nodes that have the same id one after the other.
    pub epoch: u32,
    pub(super) links: Links,
    /// Flags, and above them the higher bits of the tick of the last touch.
    flags: u32,
    /// The lower bits of the tick.
    tick: u32,
    /// Index of the node's [`super::counts::Counts`], or `NONE` if the flags hold the counts.
    pub(super) counts: u32,
    /// The payload of one group, or the places of several payloads: see `payloads.rs`.
    pub(super) payload: [u32; 4],
}

/// Some bits of the flags.
#[derive(Clone, Copy)]
pub(super) struct Bits {
    shift: u32,
    count: u32,
}

impl Bits {
    const fn after(self, count: u32) -> Self {
        Self {
            shift: self.shift + self.count,
            count,
        }
    }
}

const REACH: Bits = Bits { shift: 0, count: 2 };
const GAP: Bits = REACH.after(1);
const HIT_CLASS: Bits = GAP.after(2);
const EVICTABILITY: [Bits; 2] = [HIT_CLASS.after(2), HIT_CLASS.after(2).after(2)];
/// Whether there are several groups.
pub(super) const MANY: Bits = EVICTABILITY[1].after(1);
/// A node with one group: whether its payload is required, its states, and whether it has slots.
pub(super) const ONE_REQUIRED: Bits = MANY.after(1);
pub(super) const ONE_HOST: Bits = ONE_REQUIRED.after(2);
pub(super) const ONE_DISK: Bits = ONE_HOST.after(2);
pub(super) const ONE_SLOTS: [Bits; 2] = [ONE_DISK.after(1), ONE_DISK.after(1).after(1)];
/// Without [`super::counts::Counts`]: number of children, and number of active children by tier.
pub(super) const FEW_CHILDREN: Bits = ONE_SLOTS[1].after(1);
pub(super) const FEW_ACTIVE: [Bits; 2] = [FEW_CHILDREN.after(1), FEW_CHILDREN.after(1).after(1)];
const TICK_HIGH: Bits = FEW_ACTIVE[1].after(12);
const _: () = assert!(TICK_HIGH.shift + TICK_HIGH.count == u32::BITS);
const _: () = assert!(TICK_MAX == (1 << (32 + TICK_HIGH.count)) - 1);

const REACHES: [Reach; 4] = [
    Reach::Detached,
    Reach::Hidden,
    Reach::Visible,
    Reach::HostChain,
];
const EVICTABILITIES: [Evictability; 3] = [
    Evictability::Kept,
    Evictability::OptionalPayloads,
    Evictability::Leaf,
];

impl Node {
    pub(super) fn new(ns: NsId, parent: NodeId, hash: BlockHash, depth: u32) -> Self {
        let mut node = Self {
            hash,
            device: DeviceIndex::default(),
            ns,
            depth,
            epoch: 0,
            links: Links {
                parent,
                first_child: NONE,
                next: NONE,
                prev: NONE,
            },
            flags: 0,
            tick: 0,
            counts: NONE,
            payload: [0; 4],
        };
        node.set_reach(Reach::Hidden);
        node
    }

    pub(super) fn get(&self, bits: Bits) -> u32 {
        self.flags >> bits.shift & ((1 << bits.count) - 1)
    }

    pub(super) fn has(&self, bits: Bits) -> bool {
        self.get(bits) != 0
    }

    pub(super) fn put(&mut self, bits: Bits, value: u32) {
        let mask = (1 << bits.count) - 1;
        debug_assert!(value <= mask, "{value} does not fit {} bits", bits.count);
        self.flags = self.flags & !(mask << bits.shift) | value << bits.shift;
    }

    /// The parent, or `NONE`.
    pub fn parent(&self) -> NodeId {
        self.links.parent
    }

    /// How far a lookup reaches the node.
    pub fn reach(&self) -> Reach {
        REACHES[self.get(REACH) as usize]
    }

    /// See [`Node::reach`].
    pub fn set_reach(&mut self, reach: Reach) {
        self.put(REACH, reach as u32);
    }

    /// Whether a required payload was evicted although the nodes below keep their payloads.
    pub fn is_gap(&self) -> bool {
        self.has(GAP)
    }

    /// See [`Node::is_gap`].
    pub fn set_gap(&mut self, is_gap: bool) {
        self.put(GAP, u32::from(is_gap));
    }

    /// When the node was used.
    pub fn touch(&self) -> Touch {
        Touch {
            last: u64::from(self.get(TICK_HIGH)) << 32 | u64::from(self.tick),
            // Two bits.
            hit_class: self.get(HIT_CLASS) as u8,
        }
    }

    /// See [`Node::touch`].
    ///
    /// # Panics
    /// If the tick is past [`TICK_MAX`], or the hit class is above 3.
    pub fn set_touch(&mut self, touch: Touch) {
        assert!(touch.last <= TICK_MAX, "tick {} is too late", touch.last);
        assert!(touch.hit_class < 4, "hit class {}", touch.hit_class);
        self.put(TICK_HIGH, (touch.last >> 32) as u32);
        self.tick = touch.last as u32;
        self.put(HIT_CLASS, u32::from(touch.hit_class));
    }

    /// The policy's set of a tier that the node is in.
    pub fn evictability(&self, tier: Tier) -> Evictability {
        EVICTABILITIES[self.get(EVICTABILITY[tier as usize]) as usize]
    }

    /// See [`Node::evictability`].
    pub fn set_evictability(&mut self, tier: Tier, evictability: Evictability) {
        self.put(EVICTABILITY[tier as usize], evictability as u32);
    }

    /// Whether the node has left the index.
    pub fn is_detached(&self) -> bool {
        self.reach() == Reach::Detached
    }

    /// Whether every required payload of the chain up to here is in some tier.
    pub fn is_visible(&self) -> bool {
        self.reach() >= Reach::Visible
    }

    /// Whether every required payload of the chain up to here is in the arena.
    pub fn is_host_chain(&self) -> bool {
        self.reach() == Reach::HostChain
    }
}
