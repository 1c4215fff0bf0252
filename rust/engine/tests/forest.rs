//! The forest against a plain model: a map from prefixes to nodes.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use undercroft_contract::key::BlockHash;
use undercroft_engine::forest::{Forest, NONE, NodeId, NsId};

const NAMESPACES: usize = 2;

/// A prefix: its namespace, and which way it takes at each hash block.
type Prefix = (NsId, Vec<u8>);

fn hash(way: &[u8]) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[0] = way.len() as u8;
    // As block hashes do, it fixes the whole prefix. Namespaces share them.
    for (at, step) in way.iter().enumerate() {
        bytes[1 + at] = step + 1;
    }
    BlockHash::new(&bytes).unwrap()
}

fn hashes(way: &[u8]) -> Vec<BlockHash> {
    (1..=way.len()).map(|end| hash(&way[..end])).collect()
}

#[derive(Clone, Debug)]
enum Step {
    /// Nodes are added below one that is there, or from a root on.
    Insert {
        below: usize,
        way: u8,
        ns: NsId,
        run: usize,
    },
    /// A node leaves the index with all its descendants.
    Detach { node: usize },
    /// Detached nodes without children are freed.
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let insert = (any::<usize>(), 0u8..3, 0..NAMESPACES as NsId, 1usize..12).prop_map(
        |(below, way, ns, run)| Step::Insert {
            below,
            way,
            ns,
            run,
        },
    );
    let detach = any::<usize>().prop_map(|node| Step::Detach { node });
    prop::collection::vec(
        prop_oneof![6 => insert, 1 => detach, 1 => Just(Step::Release)],
        1..200,
    )
}

struct Pair {
    forest: Forest,
    present: BTreeMap<Prefix, NodeId>,
    detached: Vec<(NodeId, u32)>,
}

impl Pair {
    fn take(&mut self, step: &Step) {
        match *step {
            Step::Insert {
                below,
                way,
                ns,
                run,
            } => {
                let at = below % (self.present.len() + 1);
                let parent = self.present.iter().nth(at);
                let parent = parent.map(|(prefix, id)| (prefix.clone(), *id));
                let ((ns, mut prefix), mut parent) = parent.unwrap_or(((ns, Vec::new()), NONE));
                for _ in 0..run.min(28 - prefix.len()) {
                    prefix.push(way);
                    let here = self.present.entry((ns, prefix.clone()));
                    parent = *here
                        .or_insert_with(|| self.forest.insert(ns, parent, hash(&prefix), 1, 1));
                }
            }
            Step::Detach { node } if !self.present.is_empty() => {
                let (top, _) = self.present.iter().nth(node % self.present.len()).unwrap();
                let (ns, way) = top.clone();
                self.present.retain(|(of, prefix), id| {
                    let goes = *of == ns && prefix.starts_with(&way);
                    if goes {
                        self.forest.unindex(*id);
                        self.detached.push((*id, self.forest.node(*id).epoch));
                    }
                    !goes
                });
            }
            Step::Detach { .. } => {}
            Step::Release => {
                let childless = |(id, _): &(NodeId, u32)| self.forest.node(*id).children() == 0;
                let (free, kept): (Vec<_>, Vec<_>) = self.detached.drain(..).partition(childless);
                self.detached = kept;
                for (id, epoch) in free {
                    assert!(self.forest.is_live(id, epoch));
                    self.forest.release(id);
                    assert!(!self.forest.is_live(id, epoch));
                }
            }
        }
    }

    /// The children of a node that are in the index, as the forest lists them.
    fn linked(&self, mut at: NodeId) -> Vec<NodeId> {
        let mut found = Vec::new();
        while at != NONE {
            found.push(at);
            at = self.forest.next_sibling(at);
        }
        found.sort_unstable();
        found
    }

    fn check(&self) {
        assert_eq!(self.forest.len(), self.present.len() + self.detached.len());
        let mut all: Vec<NodeId> = self.present.values().copied().collect();
        all.extend(self.detached.iter().map(|(id, _)| *id));
        all.sort_unstable();
        assert_eq!(self.forest.ids().collect::<Vec<_>>(), all);
        for ((ns, way), &id) in &self.present {
            assert_eq!(self.forest.find(*ns, &hash(way)), Some(id));
            let node = self.forest.node(id);
            assert_eq!(
                (node.ns, node.depth as usize, node.is_detached()),
                (*ns, way.len(), false)
            );
            let above = self.present.get(&(*ns, way[..way.len() - 1].to_vec()));
            assert_eq!(
                node.parent(),
                above.copied().unwrap_or(NONE),
                "a parent is there"
            );
        }
        for &(id, _) in &self.detached {
            let node = self.forest.node(id);
            assert!(node.is_detached() && self.forest.find(node.ns, &node.hash) != Some(id));
        }
        let below = |parent: NodeId, ns: NsId| {
            let of_parent = |id: &NodeId| {
                let node = self.forest.node(*id);
                node.parent() == parent && node.ns == ns
            };
            all.iter().copied().filter(of_parent).collect::<Vec<_>>()
        };
        let present = |mut ids: Vec<NodeId>| {
            ids.retain(|&id| !self.forest.node(id).is_detached());
            ids
        };
        for &id in &all {
            let children = self.linked(self.forest.first_child(id));
            let all = below(id, self.forest.node(id).ns);
            assert_eq!(self.forest.node(id).children() as usize, all.len());
            assert_eq!(children, present(all));
        }
        for ns in 0..NAMESPACES as NsId {
            let roots = self.linked(self.forest.first_root(ns));
            assert_eq!(roots, present(below(NONE, ns)));
            let of_namespace = |id: &&NodeId| self.forest.node(**id).ns == ns;
            let nodes = all.iter().filter(of_namespace).count();
            assert_eq!(self.forest.has_nodes(ns), nodes > 0);
        }
    }

    /// Every prefix in the forest, continued in another way, is found to its own depth.
    fn look_up(&self, limit: u32) {
        for ((ns, way), &id) in &self.present {
            let more = way.iter().copied().chain([7, 7, 7]).collect::<Vec<_>>();
            let found = self.forest.deepest(*ns, &hashes(&more)[..], |_| true);
            assert_eq!(found, Some((id, way.len() as u32)));
            let shallow = self
                .forest
                .deepest(*ns, &hashes(way)[..], |node| node.depth <= limit);
            let depth = limit.min(way.len() as u32);
            let expected = (depth > 0).then(|| (self.forest.ancestor(id, depth), depth));
            assert_eq!(shallow, expected);
            if let Some((at, _)) = expected {
                assert_eq!(
                    self.present.get(&(*ns, way[..depth as usize].to_vec())),
                    Some(&at)
                );
            }
            let other = 1 - *ns;
            let elsewhere = (1..=way.len()).rev();
            let known = |end: &usize| self.present.contains_key(&(other, way[..*end].to_vec()));
            let expected = elsewhere.into_iter().find(known).unwrap_or(0) as u32;
            let found = self.forest.deepest(other, &hashes(way)[..], |_| true);
            assert_eq!(found.map_or(0, |(_, depth)| depth), expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_forest_is_a_map_of_prefixes(steps in steps(), seed in any::<u64>(), limit in 0u32..6) {
        let mut pair = Pair { forest: Forest::new(seed), present: BTreeMap::new(), detached: Vec::new() };
        (0..NAMESPACES).for_each(|_| { pair.forest.add_namespace(true); });
        for step in &steps {
            pair.take(step);
            pair.check();
        }
        pair.look_up(limit);
    }
}
