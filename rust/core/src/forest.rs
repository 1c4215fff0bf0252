//! The prefix forest: one node per block hash, a child's prefix extending its parent's.
//!
//! Invariant: **a node is present only while its parent is present.** So presence along a chain of
//! hashes is monotone, and the deepest present one is found by galloping and bisection.
//!
//! This module keeps the tree and its counters. Which payload is where, and what may be evicted, is
//! decided in `engine::places`.

use hashbrown::HashTable;

use crate::key::{BlockHash, HashSource};

/// Index of a node.
pub type NodeId = u32;
/// No node.
pub const NONE: NodeId = u32::MAX;
/// Index of a namespace.
pub type NsId = u16;

/// The two tiers of places, as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The arena.
    Host = 0,
    /// The data files.
    Disk = 1,
}

/// A payload's place in the arena.
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

/// A payload's place on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskState {
    /// No slot.
    #[default]
    Empty,
    /// Waits for its turn to be written; no slot yet.
    Queued,
    /// The write is in flight.
    Writing,
    /// Readable.
    Present,
}

/// Where one group's payload at a node is. Offsets count [`crate::slots::SLOT_ALIGN`] bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// State in the arena.
    pub host: HostState,
    /// State on disk.
    pub disk: DiskState,
    /// Slot in the arena, unless `host` is `Empty`.
    pub host_at: u32,
    /// Slot in the data file, while `disk` is `Writing` or `Present`.
    pub disk_at: u32,
    /// Checksum of the payload on disk, while `disk` is `Present`.
    pub checksum: u64,
}

#[derive(Clone, Debug)]
enum Places {
    One(Place),
    Many(Box<[Place]>),
}

/// One granule of one prefix chain.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its block hash.
    pub hash: BlockHash,
    /// Its namespace.
    pub ns: NsId,
    /// Disk device of its payloads.
    pub device: u8,
    /// Hits since first sight, 0 to 3 (policy).
    pub hit_class: u8,
    /// Every required payload of the chain up to here is in some tier.
    pub visible: bool,
    /// Every required payload of the chain up to here is in the arena.
    pub host_chain: bool,
    /// No longer in the index: waits for its references to end.
    pub detached: bool,
    /// Whether it is in the policy's set of leaves, by tier.
    pub leaf: [bool; 2],
    /// Whether it is no leaf, but holds payloads that a hit can do without, by tier.
    pub spare: [bool; 2],
    /// Places in use, by tier.
    pub places_used: [u8; 2],
    /// Children that are active in a tier (see [`Forest::is_active`]).
    pub tier_children: [u32; 2],
    /// Granules from the root; 1 for the first.
    pub depth: u32,
    /// Leases.
    pub pins: u32,
    /// Leases of nodes below, whose hits need a payload here that others can do without.
    pub holds: u32,
    /// Copies and IO operations in flight.
    pub busy: u32,
    /// Groups whose payload must be here for the node to be visible, one bit each.
    pub required: u32,
    /// Tick of the last touch.
    pub last: u64,
    /// Distinguishes the users of one index over time.
    pub generation: u32,
    /// The parent, or `NONE`.
    pub parent: NodeId,
    /// Number of children.
    pub children: u32,
    first_child: NodeId,
    next: NodeId,
    prev: NodeId,
    places: Places,
}

impl Node {
    /// Place of each group.
    pub fn places(&self) -> &[Place] {
        match &self.places {
            Places::One(place) => std::slice::from_ref(place),
            Places::Many(places) => places,
        }
    }

    /// Place of one group.
    pub fn place(&self, group: u8) -> &Place {
        &self.places()[usize::from(group)]
    }

    /// Place of one group.
    pub fn place_mut(&mut self, group: u8) -> &mut Place {
        match &mut self.places {
            Places::One(place) => place,
            Places::Many(places) => &mut places[usize::from(group)],
        }
    }

    /// Whether the payload of `group` must be here for the node to be visible.
    pub fn requires(&self, group: usize) -> bool {
        self.required >> group & 1 == 1
    }

    /// Whether nothing refers to it but its children.
    pub fn is_idle(&self) -> bool {
        self.pins == 0 && self.busy == 0
    }
}

/// The nodes and their index.
#[derive(Debug)]
pub struct Forest {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    index: HashTable<NodeId>,
    roots: Vec<NodeId>,
    seed: u64,
}

fn mix(seed: u64, ns: NsId, hash: &BlockHash) -> u64 {
    let mut head = [0; 8];
    head.copy_from_slice(&hash.padded()[..8]);
    // Block hashes are uniform already; the seed keeps table positions unpredictable.
    (u64::from_le_bytes(head) ^ seed ^ u64::from(ns)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Forest {
    /// An empty forest; `seed` makes positions in the hash table unpredictable.
    pub fn new(seed: u64) -> Self {
        Self {
            nodes: Vec::new(),
            free: Vec::new(),
            index: HashTable::new(),
            roots: Vec::new(),
            seed,
        }
    }

    /// Makes room for `count` nodes (recovery).
    pub fn reserve(&mut self, count: usize) {
        self.nodes.reserve(count);
        let (nodes, seed) = (&self.nodes, self.seed);
        self.index.reserve(count, |&id| {
            let node = &nodes[id as usize];
            mix(seed, node.ns, &node.hash)
        });
    }

    /// Adds a namespace; its index.
    pub fn add_namespace(&mut self) -> NsId {
        self.roots.push(NONE);
        NsId::try_from(self.roots.len() - 1).unwrap_or(NsId::MAX)
    }

    /// Nodes in the index and detached ones.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A node. The id must be of a live node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// A node. The id must be of a live node.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    /// Whether `id` still is the node it was in `generation`.
    pub fn is_live(&self, id: NodeId, generation: u32) -> bool {
        self.nodes
            .get(id as usize)
            .is_some_and(|node| node.generation == generation)
    }

    /// The node of a hash, visible or not.
    pub fn find(&self, ns: NsId, hash: &BlockHash) -> Option<NodeId> {
        let nodes = &self.nodes;
        self.index
            .find(mix(self.seed, ns, hash), |&id| {
                let node = &nodes[id as usize];
                node.ns == ns && node.hash == *hash
            })
            .copied()
    }

    /// The deepest node of the chain for which `accept` holds, and its depth, by galloping from the
    /// front and bisecting. `accept` must be monotone along the chain.
    pub fn deepest<H: HashSource + ?Sized>(
        &self,
        ns: NsId,
        hashes: &H,
        accept: impl Fn(&Node) -> bool,
    ) -> Option<(NodeId, u32)> {
        let probe = |index: usize| {
            let id = self.find(ns, &hashes.get(index)?)?;
            let node = self.node(id);
            // Of hashes that are no chain, only what stands where they say counts.
            (node.depth as usize == index + 1 && accept(node)).then_some(id)
        };
        let mut best = None;
        let mut low = 0;
        let mut high = hashes.len();
        // A warm request is usually there to its end, a cold one not at all: look at both first.
        if high > 0 {
            match probe(high - 1) {
                Some(id) => {
                    low = high;
                    best = Some(id);
                }
                None => high -= 1,
            }
        }
        let mut step = 1;
        while low < high {
            let at = (low + step - 1).min(high - 1);
            match probe(at) {
                Some(id) => {
                    best = Some(id);
                    low = at + 1;
                    step *= 2;
                }
                None => {
                    high = at;
                    break;
                }
            }
        }
        while low < high {
            let middle = low + (high - low) / 2;
            match probe(middle) {
                Some(id) => {
                    best = Some(id);
                    low = middle + 1;
                }
                None => high = middle,
            }
        }
        Some((best?, u32::try_from(low).unwrap_or(u32::MAX)))
    }

    /// Adds a node below `parent` (`NONE`: a root). The hash must not be in the index.
    pub fn insert(
        &mut self,
        ns: NsId,
        parent: NodeId,
        hash: BlockHash,
        groups: usize,
        required: u32,
    ) -> NodeId {
        debug_assert!(self.find(ns, &hash).is_none(), "node inserted twice");
        let depth = if parent == NONE {
            1
        } else {
            self.node(parent).depth + 1
        };
        let places = if groups == 1 {
            Places::One(Place::default())
        } else {
            Places::Many(vec![Place::default(); groups].into())
        };
        let mut node = Node {
            hash,
            ns,
            device: 0,
            hit_class: 0,
            visible: false,
            host_chain: false,
            detached: false,
            leaf: [false; 2],
            spare: [false; 2],
            places_used: [0; 2],
            tier_children: [0; 2],
            depth,
            pins: 0,
            holds: 0,
            busy: 0,
            required,
            last: 0,
            generation: 0,
            parent,
            children: 0,
            first_child: NONE,
            next: NONE,
            prev: NONE,
            places,
        };
        let id = match self.free.pop() {
            Some(id) => {
                node.generation = self.node(id).generation;
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                NodeId::try_from(self.nodes.len() - 1).unwrap_or(NONE)
            }
        };
        self.link(id);
        let (nodes, seed) = (&self.nodes, self.seed);
        self.index
            .insert_unique(mix(seed, ns, &hash), id, |&other| {
                let node = &nodes[other as usize];
                mix(seed, node.ns, &node.hash)
            });
        id
    }

    fn head_mut(&mut self, id: NodeId) -> &mut NodeId {
        let node = self.node(id);
        let (parent, ns) = (node.parent, node.ns);
        if parent == NONE {
            &mut self.roots[usize::from(ns)]
        } else {
            &mut self.nodes[parent as usize].first_child
        }
    }

    fn link(&mut self, id: NodeId) {
        let head = std::mem::replace(self.head_mut(id), id);
        self.node_mut(id).next = head;
        if head != NONE {
            self.node_mut(head).prev = id;
        }
        let parent = self.node(id).parent;
        if parent != NONE {
            self.node_mut(parent).children += 1;
        }
    }

    /// Takes a node out of the index; it stays linked until [`Forest::release`].
    pub fn unindex(&mut self, id: NodeId) {
        let node = self.node(id);
        let (ns, hash) = (node.ns, node.hash);
        if let Ok(entry) = self
            .index
            .find_entry(mix(self.seed, ns, &hash), |&other| other == id)
        {
            entry.remove();
        }
        self.node_mut(id).detached = true;
    }

    /// Unlinks and frees a detached node without children.
    pub fn release(&mut self, id: NodeId) {
        let node = self.node(id);
        debug_assert!(node.detached && node.children == 0 && node.is_idle());
        let (parent, next, prev) = (node.parent, node.next, node.prev);
        if prev == NONE {
            *self.head_mut(id) = next;
        } else {
            self.node_mut(prev).next = next;
        }
        if next != NONE {
            self.node_mut(next).prev = prev;
        }
        if parent != NONE {
            self.node_mut(parent).children -= 1;
        }
        let node = self.node_mut(id);
        node.generation = node.generation.wrapping_add(1);
        self.free.push(id);
    }

    /// First child, or `NONE`; further ones by [`Forest::next_sibling`].
    pub fn first_child(&self, id: NodeId) -> NodeId {
        self.node(id).first_child
    }

    /// The sibling after this one, or `NONE`.
    pub fn next_sibling(&self, id: NodeId) -> NodeId {
        self.node(id).next
    }

    /// First root of a namespace, or `NONE`.
    pub fn first_root(&self, ns: NsId) -> NodeId {
        self.roots[usize::from(ns)]
    }

    /// The ancestor of `id` at `depth`, itself included.
    pub fn ancestor(&self, mut id: NodeId, depth: u32) -> NodeId {
        while id != NONE && self.node(id).depth > depth {
            id = self.node(id).parent;
        }
        id
    }

    /// Whether a node keeps its parent from being a leaf of `tier`: it holds a payload there, or,
    /// holding none by nature, exists for a child that does.
    pub fn is_active(&self, id: NodeId, tier: Tier) -> bool {
        let node = self.node(id);
        node.places_used[tier as usize] > 0
            || (node.required == 0 && node.tier_children[tier as usize] > 0)
    }

    /// Ids of all live nodes, detached ones included.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let mut dead = vec![false; self.nodes.len()];
        for &id in &self.free {
            dead[id as usize] = true;
        }
        (0..NodeId::try_from(self.nodes.len()).unwrap_or(NONE))
            .filter(move |&id| !dead[id as usize])
    }
}
