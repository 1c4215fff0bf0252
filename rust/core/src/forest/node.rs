//! A node of the forest: one hash block of one prefix chain, and where its payloads are.

use crate::key::BlockHash;

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
    /// If it is not.
    pub fn new(index: usize) -> Self {
        Self(u8::try_from(index).expect("an engine has at most 256 directories"))
    }

    /// As an index of the engine's list of directories.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// As IO requests carry it.
    pub fn number(self) -> u16 {
        u16::from(self.0)
    }
}

/// The two tiers that hold payloads, as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The arena.
    Host = 0,
    /// The data files.
    Disk = 1,
}

impl Tier {
    /// Both tiers.
    pub const ALL: [Self; 2] = [Self::Host, Self::Disk];
}

/// A payload's state in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// No slot.
    #[default]
    Empty,
    /// A worker writes it; unreadable.
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

/// Where one group's payload at a node is. Slots count [`crate::slots::SLOT_ALIGN`] bytes.
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
    /// Checksum of the payload on disk, while `disk` is `Present`.
    pub checksum: u64,
}

impl Payload {
    /// Whether it has a slot in `tier`.
    pub fn has_slot(&self, tier: Tier) -> bool {
        match tier {
            Tier::Host => self.host != HostState::Empty,
            Tier::Disk => matches!(self.disk, DiskState::Writing | DiskState::Present),
        }
    }

    /// Whether it can be read from `tier`.
    pub fn is_readable(&self, tier: Tier) -> bool {
        match tier {
            Tier::Host => self.host == HostState::Present,
            Tier::Disk => self.disk == DiskState::Present,
        }
    }

    /// Whether a copy or an IO operation works on it, or a write of it is queued.
    pub fn is_in_flight(&self) -> bool {
        matches!(self.host, HostState::Filling | HostState::Reading)
            || matches!(self.disk, DiskState::Queued | DiskState::Writing)
    }
}

/// Most nodes have one group: their payload lies in the node.
#[derive(Clone, Debug)]
enum Payloads {
    One(Payload),
    Many(Box<[Payload]>),
}

/// How far a lookup reaches a node. Each state includes those before it.
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
    /// None.
    #[default]
    Kept,
    /// Those that a hit can do without.
    OptionalPayloads,
    /// All: the node is a leaf of the tier.
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
    /// Leases of nodes below, whose hits need a payload here that other hits can do without.
    pub holds: u32,
    /// Copies and IO operations in flight.
    pub busy: u32,
}

/// Counts by tier, and what follows from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// The policy's set that the node is in.
    pub evictability: [Evictability; 2],
    /// Payloads with a slot.
    pub slots: [u8; 2],
    /// Children that are active (see [`super::Forest::is_active`]).
    pub active_children: [u32; 2],
}

/// A node's neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) parent: NodeId,
    pub(super) children: u32,
    pub(super) first_child: NodeId,
    pub(super) next: NodeId,
    pub(super) prev: NodeId,
}

/// One hash block of one prefix chain.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its block hash.
    pub hash: BlockHash,
    /// Its namespace.
    pub ns: NsId,
    /// Disk directory of its payloads.
    pub device: DeviceIndex,
    /// Whether a lookup finds it.
    pub reach: Reach,
    /// A required payload was evicted although the nodes below have theirs.
    pub is_gap: bool,
    /// Hash blocks from the root; 1 for the first.
    pub depth: u32,
    /// Groups whose payload must be readable for the node to be visible, one bit each.
    pub required: u32,
    /// Distinguishes the nodes that one index names over time.
    pub epoch: u32,
    /// When it was used.
    pub touch: Touch,
    /// What keeps it.
    pub uses: Uses,
    /// Its slots and its children's, by tier.
    pub tiers: TierCounts,
    pub(super) links: Links,
    payloads: Payloads,
}

impl Node {
    pub(super) fn new(
        ns: NsId,
        parent: NodeId,
        hash: BlockHash,
        depth: u32,
        groups: usize,
        required: u32,
    ) -> Self {
        let payloads = if groups == 1 {
            Payloads::One(Payload::default())
        } else {
            Payloads::Many(vec![Payload::default(); groups].into())
        };
        Self {
            hash,
            ns,
            device: DeviceIndex::default(),
            reach: Reach::Hidden,
            is_gap: false,
            depth,
            required,
            epoch: 0,
            touch: Touch::default(),
            uses: Uses::default(),
            tiers: TierCounts::default(),
            links: Links {
                parent,
                children: 0,
                first_child: NONE,
                next: NONE,
                prev: NONE,
            },
            payloads,
        }
    }

    /// The parent, or `NONE`.
    pub fn parent(&self) -> NodeId {
        self.links.parent
    }

    /// Number of children.
    pub fn children(&self) -> u32 {
        self.links.children
    }

    /// Indices of its groups.
    pub fn groups(&self) -> std::ops::Range<u8> {
        let count = self.payloads().len();
        0..u8::try_from(count).expect("a namespace has at most GROUPS_MAX groups")
    }

    /// Payload of each group.
    pub fn payloads(&self) -> &[Payload] {
        match &self.payloads {
            Payloads::One(payload) => std::slice::from_ref(payload),
            Payloads::Many(payloads) => payloads,
        }
    }

    /// Payload of one group.
    pub fn payload(&self, group: u8) -> &Payload {
        &self.payloads()[usize::from(group)]
    }

    /// Payload of one group.
    pub fn payload_mut(&mut self, group: u8) -> &mut Payload {
        match &mut self.payloads {
            Payloads::One(payload) => {
                assert_eq!(group, 0, "the node's namespace has one group");
                payload
            }
            Payloads::Many(payloads) => &mut payloads[usize::from(group)],
        }
    }

    /// Whether the payload of `group` must be readable for the node to be visible.
    pub fn requires(&self, group: u8) -> bool {
        self.required >> group & 1 == 1
    }

    /// Whether it has left the index.
    pub fn is_detached(&self) -> bool {
        self.reach == Reach::Detached
    }

    /// Whether every required payload of the chain up to here is in some tier.
    pub fn is_visible(&self) -> bool {
        self.reach >= Reach::Visible
    }

    /// Whether every required payload of the chain up to here is in the arena.
    pub fn is_host_chain(&self) -> bool {
        self.reach == Reach::HostChain
    }

    /// Whether nothing refers to it but its children.
    pub fn is_idle(&self) -> bool {
        self.uses.pins == 0 && self.uses.busy == 0
    }

    /// Whether it has no slot in any tier.
    pub fn has_no_slots(&self) -> bool {
        self.tiers.slots == [0, 0]
    }
}
