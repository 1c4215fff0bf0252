//! The nodes, their tree, and the index from hashes to nodes.

use undercroft_contract::key::{BlockHash, HashSource};
use undercroft_contract::tier::Tier;

use crate::work;

use super::hash_index::HashIndex;
use super::node::{NONE, Node, NodeId, NsId, Reach};
use super::segment::Tag;
use super::slab::Slab;
use super::view::{NodeMut, NodeRef, Side};
use crate::pool::Pool;

/// The nodes of one namespace.
#[derive(Debug)]
struct Tree {
    /// The first of its roots that are in the index, or `NONE`.
    first_root: NodeId,
    /// Number of nodes, detached nodes included.
    nodes: u32,
    /// Some of its nodes require a payload.
    has_required: bool,
}

/// A node as described by a record on disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundNode {
    pub(crate) ns: NsId,
    pub(crate) parent: NodeId,
    pub(crate) depth: u32,
    /// See [`Forest::tag`].
    pub(crate) tag: Tag,
    pub(crate) hash: BlockHash,
}

/// The nodes and their index.
#[derive(Debug)]
pub struct Forest {
    nodes: Pool<Node>,
    side: Side,
    /// The first free id, or `NONE`; each free id holds the next.
    free: NodeId,
    live: usize,
    index: HashIndex,
    trees: Vec<Tree>,
}

impl Forest {
    /// An empty forest; `seed` makes positions in the hash table unpredictable.
    pub fn new(seed: u64) -> Self {
        Self {
            nodes: Pool::new(),
            side: Side {
                counts: Slab::new(),
                entries: Slab::new(),
            },
            free: NONE,
            live: 0,
            index: HashIndex::new(seed),
            trees: Vec::new(),
        }
    }

    /// Adds a namespace; returns its index. `has_required`: whether some of its nodes will require a payload.
    pub fn add_namespace(&mut self, has_required: bool) -> NsId {
        let ns = NsId::try_from(self.trees.len()).expect("the engine limits its namespaces");
        self.trees.push(Tree {
            first_root: NONE,
            nodes: 0,
            has_required,
        });
        ns
    }

    /// Gives the index of a namespace without nodes to another namespace.
    pub(crate) fn replace_namespace(&mut self, ns: NsId, has_required: bool) {
        assert!(!self.has_nodes(ns), "namespace {ns} has nodes");
        self.trees[usize::from(ns)].has_required = has_required;
    }

    /// Indices of the namespaces.
    pub fn namespaces(&self) -> std::ops::Range<NsId> {
        0..NsId::try_from(self.trees.len()).expect("`add_namespace` counts them")
    }

    /// Number of nodes, in the index or detached.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes room for this many nodes. For an empty forest.
    pub(crate) fn reserve(&mut self, nodes: usize) {
        assert!(self.is_empty(), "nodes move");
        self.index.reserve(nodes);
    }

    /// A part of the hash of a node's key, by which the index finds the node.
    pub(crate) fn tag(&self, ns: NsId, hash: &BlockHash) -> Tag {
        self.index.tag(ns, hash)
    }

    /// Loads the place of a tag, which will be looked for soon, into the processor's cache.
    pub(crate) fn prefetch(&self, tag: Tag) {
        self.index.prefetch(tag);
    }

    /// Bytes that nodes and index take.
    pub fn bytes(&self) -> u64 {
        let side = self.side.counts.bytes() + self.side.entries.bytes();
        self.nodes.bytes() + side + self.index.bytes()
    }

    /// A node. The id must be of a live node.
    pub fn node(&self, id: NodeId) -> NodeRef<'_> {
        NodeRef {
            node: &self.nodes[id as usize],
            side: &self.side,
        }
    }

    /// A node. The id must be of a live node.
    pub fn node_mut(&mut self, id: NodeId) -> NodeMut<'_> {
        NodeMut {
            node: &mut self.nodes[id as usize],
            side: &mut self.side,
        }
    }

    /// Depth of a node; 0 for `NONE`.
    pub fn depth(&self, id: NodeId) -> u32 {
        match id {
            NONE => 0,
            id => self.node(id).depth,
        }
    }

    /// Whether `id` still names the node with this `epoch`.
    pub fn is_live(&self, id: NodeId, epoch: u32) -> bool {
        self.nodes
            .get(id as usize)
            .is_some_and(|node| node.epoch == epoch)
    }

    /// The node of a hash, visible or not.
    pub fn find(&self, ns: NsId, hash: &BlockHash) -> Option<NodeId> {
        self.find_tagged(self.index.tag(ns, hash), ns, hash)
    }

    fn find_tagged(&self, tag: Tag, ns: NsId, hash: &BlockHash) -> Option<NodeId> {
        self.index.find(tag, |id| {
            work::node();
            let node = &self.nodes[id as usize];
            node.ns == ns && node.hash == *hash
        })
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
            // If the hashes are no chain, only a node whose depth is its hash's position counts.
            (node.depth as usize == index + 1 && accept(&node)).then_some(id)
        };
        // Every probe up to `low` has found a node, the last of which is `best`. The probe at `high` has found none.
        let mut best = None;
        let mut low = 0;
        let mut high = hashes.len();
        // The index usually has all of a warm request, or nothing of a cold request: probe both ends first.
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
        let id = best?;
        let depth = self.node(id).depth;
        assert_eq!(depth as usize, low, "the deepest probe that found a node");
        Some((id, depth))
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
        if parent != NONE {
            let above = self.node(parent);
            assert!(!above.is_detached(), "a node is added below a detached one");
            assert_eq!(above.ns, ns, "a node is added to another namespace");
        }
        let id = self.next_id();
        let mut node = Node::new(ns, parent, hash, self.depth(parent) + 1);
        node.set_groups(groups, required);
        self.put(id, node);
        self.index.insert(self.index.tag(ns, &hash), id);
        id
    }

    /// The node of a hash, and whether it is new. If there is none, adds the [`FoundNode`], with one group or more,
    /// some of them `required`. A node whose parent is not known yet is added among the roots; [`Forest::set_parent`]
    /// sets the parent.
    pub(crate) fn find_or_insert(
        &mut self,
        found: &FoundNode,
        groups: usize,
        required: u32,
    ) -> (NodeId, bool) {
        let &FoundNode {
            ns,
            parent,
            depth,
            tag,
            ref hash,
        } = found;
        if let Some(id) = self.find_tagged(tag, ns, hash) {
            return (id, false);
        }
        let id = self.next_id();
        let mut node = Node::new(ns, parent, *hash, depth);
        node.set_groups(groups, required);
        self.put(id, node);
        self.index.insert(tag, id);
        (id, true)
    }

    /// Sets the parent of a node that was added without a parent.
    pub(crate) fn set_parent(&mut self, id: NodeId, parent: NodeId) {
        assert_eq!(
            self.depth(parent) + 1,
            self.depth(id),
            "node {id} is not a child of {parent}"
        );
        self.unlink(id);
        self.node_mut(id).links.parent = parent;
        self.link(id);
    }

    /// The id that the next added node gets.
    fn next_id(&self) -> NodeId {
        match self.free {
            NONE => {
                let id = self.nodes.len();
                assert!(id < NONE as usize, "the last index means no node");
                id as NodeId
            }
            free => free,
        }
    }

    /// Stores a node at the id of [`Forest::next_id`], and adds it to the children of its parent.
    fn put(&mut self, id: NodeId, mut node: Node) {
        let ns = node.ns;
        if self.free == NONE {
            self.nodes.push(node);
        } else {
            let before = self.node(id);
            node.epoch = before.epoch;
            self.free = before.links.next;
            self.nodes[id as usize] = node;
        }
        self.live += 1;
        self.trees[usize::from(ns)].nodes += 1;
        self.link(id);
    }

    fn head_mut(&mut self, id: NodeId) -> &mut NodeId {
        let node = self.node(id);
        let (parent, ns) = (node.links.parent, node.ns);
        if parent == NONE {
            &mut self.trees[usize::from(ns)].first_root
        } else {
            &mut self.nodes[parent as usize].links.first_child
        }
    }

    fn link(&mut self, id: NodeId) {
        let head = std::mem::replace(self.head_mut(id), id);
        self.node_mut(id).links.next = head;
        if head != NONE {
            self.node_mut(head).links.prev = id;
        }
        let parent = self.node(id).links.parent;
        if parent != NONE {
            self.node_mut(parent)
                .change_counts(|counts| counts.children += 1);
        }
    }

    /// Removes a node from the index, and from its parent's list of children. The parent counts it as a child until
    /// [`Forest::release`].
    pub fn unindex(&mut self, id: NodeId) {
        let node = self.node(id);
        assert!(!node.is_detached(), "node {id} left the index twice");
        let tag = self.index.tag(node.ns, &node.hash);
        let found = self.index.remove(tag, id);
        assert!(found, "a node that is not detached is in the index");
        self.unlink(id);
        self.node_mut(id).set_reach(Reach::Detached);
    }

    /// Removes a node from its parent's list of children, or from the list of roots.
    fn unlink(&mut self, id: NodeId) {
        let links = self.node(id).links;
        let (next, prev) = (links.next, links.prev);
        if prev == NONE {
            *self.head_mut(id) = next;
        } else {
            self.node_mut(prev).links.next = next;
        }
        if next != NONE {
            self.node_mut(next).links.prev = prev;
        }
        let mut node = self.node_mut(id);
        (node.links.next, node.links.prev) = (NONE, NONE);
    }

    /// Frees a detached node without children.
    pub fn release(&mut self, id: NodeId) {
        let node = self.node(id);
        assert!(node.is_detached(), "node {id} is freed and in the index");
        assert_eq!(node.children(), 0, "node {id} is freed and has children");
        assert!(node.is_idle(), "node {id} is freed and in use");
        assert!(node.has_no_slots(), "node {id} is freed and has slots");
        work::node();
        let (parent, ns) = (node.links.parent, node.ns);
        if parent != NONE {
            self.node_mut(parent)
                .change_counts(|counts| counts.children -= 1);
        }
        self.live -= 1;
        self.trees[usize::from(ns)].nodes -= 1;
        let free = std::mem::replace(&mut self.free, id);
        let mut node = self.node_mut(id);
        node.epoch = node.epoch.wrapping_add(1);
        node.depth = 0;
        node.links.next = free;
    }

    /// First child in the index, or `NONE`; further children by [`Forest::next_sibling`].
    pub fn first_child(&self, id: NodeId) -> NodeId {
        self.node(id).links.first_child
    }

    /// Children of a node that are in the index, first to last.
    pub fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(self.first_child(id))
    }

    /// Roots of a namespace that are in the index.
    pub fn roots(&self, ns: NsId) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(self.first_root(ns))
    }

    fn siblings(&self, first: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let existing = |id: NodeId| (id != NONE).then_some(id);
        let siblings =
            std::iter::successors(existing(first), move |&id| existing(self.next_sibling(id)));
        siblings.inspect(|_| work::node())
    }

    /// A node's ancestors, from its parent upwards.
    pub fn ancestors(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let existing = |id: NodeId| (id != NONE).then_some(id);
        let ancestors = std::iter::successors(existing(self.node(id).parent()), move |&id| {
            existing(self.node(id).parent())
        });
        ancestors.inspect(|_| work::node())
    }

    /// The sibling after this one, or `NONE`.
    pub fn next_sibling(&self, id: NodeId) -> NodeId {
        self.node(id).links.next
    }

    /// First root of a namespace, or `NONE`.
    pub fn first_root(&self, ns: NsId) -> NodeId {
        self.trees[usize::from(ns)].first_root
    }

    /// Whether a namespace has a node, in the index or detached.
    pub fn has_nodes(&self, ns: NsId) -> bool {
        self.trees[usize::from(ns)].nodes > 0
    }

    /// Nodes of a namespace, in the index or detached.
    pub fn count(&self, ns: NsId) -> u32 {
        self.trees[usize::from(ns)].nodes
    }

    /// The ancestor of `id` at `depth`; `id` itself at its own depth.
    pub fn ancestor(&self, mut id: NodeId, depth: u32) -> NodeId {
        while id != NONE && self.node(id).depth > depth {
            work::node();
            id = self.node(id).links.parent;
        }
        id
    }

    /// Whether a node keeps its parent from being a leaf of `tier`: the node has a slot there, or it
    /// requires no payload and has a child that is active.
    ///
    /// In a namespace where no node requires a payload, chains have any number of nodes without a payload, and no
    /// payload depends on another. There only nodes with a slot are active.
    pub fn is_active(&self, id: NodeId, tier: Tier) -> bool {
        let node = self.node(id);
        node.slots(tier) > 0
            || node.required() == 0
                && node.active_children(tier) > 0
                && self.trees[usize::from(node.ns)].has_required
    }

    /// Number of ids given so far, of live and freed nodes: all ids are below this number.
    pub fn ids_given(&self) -> usize {
        self.nodes.len()
    }

    /// Whether a given id belongs to a live node.
    pub fn is_used(&self, id: NodeId) -> bool {
        self.node(id).depth > 0
    }

    /// Ids of all live nodes, detached ones included.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        // `insert` keeps the count below `NONE`.
        let ids = (0..self.nodes.len() as NodeId).inspect(|_| work::node());
        ids.filter(|&id| self.is_used(id))
    }
}
