//! The chains that are pinned, as a tree of runs of nodes: the blocks that a chain shares with pinned ones are found
//! without a walk, and so are the blocks that the end of a pin sets free.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use slotmap::SlotMap;

use crate::forest::NodeId;
use crate::work;

use super::PinKey;

slotmap::new_key_type! {
    /// A run of nodes that the same pins keep.
    pub(super) struct SpanKey;
}

/// A run of nodes of one chain, front to back. A pin keeps the run in which it ends, and all runs above.
#[derive(Debug)]
struct Span {
    above: Option<SpanKey>,
    /// Depth of the node before the first.
    after: u32,
    nodes: Vec<NodeId>,
    /// Thousands of conversations may begin with one run, and thousands of names may pin one node.
    below: BTreeSet<SpanKey>,
    /// Pins of the last node.
    pins: BTreeSet<PinKey>,
    /// The pin of the last node that has no name.
    unnamed: Option<PinKey>,
}

impl Span {
    fn new(above: Option<SpanKey>, after: u32, nodes: Vec<NodeId>) -> Self {
        Self {
            above,
            after,
            nodes,
            below: BTreeSet::new(),
            pins: BTreeSet::new(),
            unnamed: None,
        }
    }

    fn end(&self) -> u32 {
        self.after + self.nodes.len() as u32
    }
}

/// How far a chain is in the tree.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Depth of the last node that is in the tree; 0 if none is.
    pub(super) depth: u32,
    /// The runs on the way that the chain has in full, each with the depth of its end, from the root on.
    full: Vec<(u32, SpanKey)>,
    /// The run that the chain has in part.
    part: Option<SpanKey>,
}

/// Pinned chains.
///
/// Invariants: each node is in one run at most; a run without a pin has at least two runs below; the first node of
/// each run, and no other, is in `firsts`.
#[derive(Debug, Default)]
pub(super) struct PinTree {
    spans: SlotMap<SpanKey, Span>,
    firsts: HashMap<NodeId, SpanKey>,
}

impl PinTree {
    /// How far a chain is in the tree. `at` names its node at a depth, from 1 on.
    pub(super) fn shared(&self, at: impl Fn(u32) -> Option<NodeId>) -> Shared {
        let mut shared = Shared::default();
        loop {
            work::index();
            let first = at(shared.depth + 1);
            let Some(&key) = first.and_then(|first| self.firsts.get(&first)) else {
                return shared;
            };
            let span = &self.spans[key];
            let is_shared =
                |index: usize| at(span.after + 1 + index as u32) == Some(span.nodes[index]);
            let last = span.nodes.len() - 1;
            if is_shared(last) {
                shared.depth = span.end();
                shared.full.push((shared.depth, key));
                continue;
            }
            // The chain has every node up to `low`, and lacks the node at `high`.
            let (mut low, mut high) = (0, last);
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if is_shared(middle) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            shared.depth = span.after + low as u32 + 1;
            shared.part = Some(key);
            return shared;
        }
    }

    /// Pins that end on a chain, the deepest first: each pin also keeps the blocks of the pins that follow.
    pub(super) fn pins_on<'a>(&'a self, shared: &'a Shared) -> impl Iterator<Item = PinKey> + 'a {
        let spans = shared.full.iter().rev();
        spans.flat_map(|&(_, key)| self.spans[key].pins.iter().copied())
    }

    /// The pins without a name that end on a chain, the deepest first.
    pub(super) fn unnamed_on<'a>(
        &'a self,
        shared: &'a Shared,
    ) -> impl Iterator<Item = PinKey> + 'a {
        let spans = shared.full.iter().rev();
        spans.filter_map(|&(_, key)| {
            work::node();
            self.spans[key].unnamed
        })
    }

    /// The pin without a name that ends at a depth of a chain.
    pub(super) fn unnamed_at(&self, shared: &Shared, depth: u32) -> Option<PinKey> {
        let &(end, last) = shared.full.last()?;
        self.spans[last].unnamed.filter(|_| end == depth)
    }

    /// Whether a chain has a run in full. `shared` may be older than the end of some pins: joined runs keep the end of
    /// the lower run.
    pub(super) fn is_on(&self, shared: &Shared, key: SpanKey) -> bool {
        let end = self.spans[key].end();
        let at = shared.full.binary_search_by_key(&end, |&(end, _)| end);
        at.is_ok_and(|at| shared.full[at].1 == key)
    }

    /// Adds a pin, with a name or without, to the last node of a chain. `new` are the chain's nodes outside the tree.
    /// The node has no other pin without a name.
    pub(super) fn add(
        &mut self,
        pin: PinKey,
        has_name: bool,
        shared: &Shared,
        new: Vec<NodeId>,
    ) -> SpanKey {
        work::index();
        let above = match shared.part {
            Some(part) => Some(self.split(part, shared.depth)),
            None => shared.full.last().map(|&(_, key)| key),
        };
        let key = if let Some(&first) = new.first() {
            let key = self.spans.insert(Span::new(above, shared.depth, new));
            self.firsts.insert(first, key);
            if let Some(above) = above {
                self.spans[above].below.insert(key);
            }
            key
        } else {
            above.expect("a pinned chain has a node")
        };
        let span = &mut self.spans[key];
        span.pins.insert(pin);
        if !has_name {
            assert!(span.unnamed.is_none(), "a node has one pin without a name");
            span.unnamed = Some(pin);
        }
        key
    }

    /// Divides a run after the node at `depth`. The second half keeps the key, since pins end with it.
    fn split(&mut self, key: SpanKey, depth: u32) -> SpanKey {
        let span = &mut self.spans[key];
        let lower = span.nodes.split_off((depth - span.after) as usize);
        let nodes = std::mem::replace(&mut span.nodes, lower);
        let (above, after) = (span.above, std::mem::replace(&mut span.after, depth));
        let (first, second) = (nodes[0], span.nodes[0]);
        let upper = self.spans.insert(Span {
            below: BTreeSet::from([key]),
            ..Span::new(above, after, nodes)
        });
        self.spans[key].above = Some(upper);
        self.firsts.insert(first, upper);
        self.firsts.insert(second, key);
        if let Some(above) = above {
            let below = &mut self.spans[above].below;
            below.remove(&key);
            below.insert(upper);
        }
        upper
    }

    /// Ends a pin of the run `key`. Returns the range of depths (exclusive, inclusive) that no pin keeps any more.
    pub(super) fn remove(&mut self, key: SpanKey, pin: PinKey) -> (u32, u32) {
        work::index();
        let span = &mut self.spans[key];
        span.pins.remove(&pin);
        span.unnamed = span.unnamed.filter(|&other| other != pin);
        let kept = (span.after, span.after);
        if !span.pins.is_empty() {
            return kept;
        }
        if !span.below.is_empty() {
            self.join(key);
            return kept;
        }
        let freed = (span.after, span.end());
        let (first, above) = (span.nodes[0], span.above);
        self.firsts.remove(&first);
        self.spans.remove(key);
        if let Some(above) = above {
            self.spans[above].below.remove(&key);
            self.join(above);
        }
        freed
    }

    /// Joins a run without pins and the only one below it.
    fn join(&mut self, upper: SpanKey) {
        work::index();
        let span = &self.spans[upper];
        let Some(&key) = span.below.first() else {
            return;
        };
        if span.below.len() > 1 || !span.pins.is_empty() {
            return;
        }
        let Some(span) = self.spans.remove(upper) else {
            return;
        };
        self.firsts.insert(span.nodes[0], key);
        let lower = &mut self.spans[key];
        self.firsts.remove(&lower.nodes[0]);
        let mut nodes = span.nodes;
        nodes.append(&mut lower.nodes);
        (lower.nodes, lower.after, lower.above) = (nodes, span.after, span.above);
        if let Some(above) = span.above {
            let below = &mut self.spans[above].below;
            below.remove(&upper);
            below.insert(key);
        }
    }

    /// Each run as the range of depths (exclusive, inclusive) of its nodes, and the last node.
    #[cfg(feature = "check")]
    pub(super) fn runs(&self) -> impl Iterator<Item = (u32, u32, NodeId)> + '_ {
        let spans = self.spans.values();
        spans.map(|span| (span.after, span.end(), span.nodes[span.nodes.len() - 1]))
    }

    /// Whether the invariants hold, and every run is a chain: `parent` names a node's parent.
    #[cfg(feature = "check")]
    pub(super) fn check(&self, parent: impl Fn(NodeId) -> Option<NodeId>) -> Result<(), String> {
        use super::super::ensure::ensure;
        let firsts = self.firsts.len();
        ensure!(
            firsts == self.spans.len(),
            "{firsts} first nodes of {} runs",
            self.spans.len()
        );
        for (key, span) in &self.spans {
            ensure!(!span.nodes.is_empty(), "a pinned run without nodes");
            ensure!(
                self.firsts.get(&span.nodes[0]) == Some(&key),
                "a run that no walk finds"
            );
            ensure!(
                !span.pins.is_empty() || span.below.len() > 1,
                "a run without a pin has {} below",
                span.below.len()
            );
            ensure!(
                span.unnamed.is_none_or(|pin| span.pins.contains(&pin)),
                "a run knows a pin that is not its own"
            );
            let above = span.above.map(|above| &self.spans[above]);
            ensure!(
                above.map_or(0, Span::end) == span.after,
                "a run stands elsewhere"
            );
            let mut before = above.and_then(|above| above.nodes.last().copied());
            for &node in &span.nodes {
                ensure!(
                    parent(node) == before,
                    "node {node} of a run is on another chain"
                );
                before = Some(node);
            }
            for below in &span.below {
                ensure!(
                    self.spans[*below].above == Some(key),
                    "a run below knows another"
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pins a chain, named by its nodes, under a name.
    fn add(
        tree: &mut PinTree,
        keys: &mut SlotMap<PinKey, ()>,
        chain: &[NodeId],
    ) -> (SpanKey, PinKey) {
        let shared = tree.shared(|depth| chain.get(depth as usize - 1).copied());
        let pin = keys.insert(());
        let new = chain[shared.depth as usize..].to_vec();
        (tree.add(pin, true, &shared, new), pin)
    }

    #[test]
    fn a_removed_pin_frees_its_unshared_nodes_in_any_order() {
        let chains: [&[NodeId]; 5] = [
            &[1, 2, 3, 4],
            &[1, 2, 5, 6, 7],
            &[1, 2],
            &[1, 2, 5, 6, 7, 8],
            &[9],
        ];
        for first in 0..120u32 {
            let mut order: Vec<usize> = (0..5).collect();
            let mut left = first;
            for at in 0..5 {
                order.swap(at, at + left as usize % (5 - at));
                left /= 5 - at as u32;
            }
            let (mut tree, mut keys) = (PinTree::default(), SlotMap::with_key());
            let pins = chains.map(|chain| add(&mut tree, &mut keys, chain));
            let mut kept: Vec<usize> = (0..5).collect();
            for &at in &order {
                kept.retain(|&other| other != at);
                let others = |node: &NodeId| kept.iter().any(|&other| chains[other].contains(node));
                let alone = chains[at].iter().filter(|node| !others(node)).count();
                let (after, end) = tree.remove(pins[at].0, pins[at].1);
                assert_eq!((end - after) as usize, alone, "{order:?} at {at}");
            }
            assert!(tree.spans.is_empty() && tree.firsts.is_empty());
        }
    }

    #[test]
    fn a_chain_is_shared_up_to_where_it_parts() {
        let (mut tree, mut keys) = (PinTree::default(), SlotMap::with_key());
        let (_, long) = add(&mut tree, &mut keys, &[1, 2, 3, 4, 5, 6, 7]);
        let (_, short) = add(&mut tree, &mut keys, &[1, 2]);
        let of = |tree: &PinTree, chain: &[NodeId]| {
            let shared = tree.shared(|depth| chain.get(depth as usize - 1).copied());
            (shared.depth, tree.pins_on(&shared).collect::<Vec<_>>())
        };
        assert_eq!(of(&tree, &[1, 2, 3, 4, 8]), (4, vec![short]));
        assert_eq!(of(&tree, &[1]), (1, vec![]));
        assert_eq!(of(&tree, &[8]), (0, vec![]));
        assert_eq!(of(&tree, &[1, 2, 3, 4, 5, 6, 7, 8]), (7, vec![long, short]));
    }

    #[test]
    fn the_pin_without_a_name_is_that_of_its_own_node() {
        let (mut tree, mut keys) = (PinTree::default(), SlotMap::with_key());
        let chain: [NodeId; 3] = [1, 2, 3];
        let shared_of = |tree: &PinTree, depth: usize| {
            let chain = &chain[..depth];
            tree.shared(|depth| chain.get(depth as usize - 1).copied())
        };
        let (key_of_three, three) = add(&mut tree, &mut keys, &chain);
        let shared = shared_of(&tree, 2);
        let pin = keys.insert(());
        let key = tree.add(pin, false, &shared, Vec::new());
        let all = shared_of(&tree, 3);
        assert_eq!(tree.unnamed_on(&all).collect::<Vec<_>>(), [pin]);
        let at = |depth| tree.unnamed_at(&shared_of(&tree, depth as usize), depth);
        assert_eq!([1, 2, 3].map(at), [None, Some(pin), None]);
        assert!(tree.is_on(&all, key) && !tree.is_on(&shared_of(&tree, 1), key));
        // A pin of another branch ends, and the runs above join.
        let (branch, other) = add(&mut tree, &mut keys, &[1, 2, 3, 9]);
        let (deep, _) = add(&mut tree, &mut keys, &[1, 2, 3, 4]);
        let of_deep = tree.shared(|depth| [1, 2, 3, 4].get(depth as usize - 1).copied());
        tree.remove(key_of_three, three);
        tree.remove(branch, other);
        assert!(tree.is_on(&of_deep, deep) && tree.is_on(&of_deep, key));
        tree.remove(key, pin);
        assert_eq!(tree.unnamed_on(&shared_of(&tree, 3)).count(), 0);
    }
}
