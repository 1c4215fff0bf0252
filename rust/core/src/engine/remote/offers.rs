//! Offers to the store: segments of blocks that have become visible, boundaries of windows and states that were saved,
//! and the segments of chains that requests have hit.

use crate::forest::{NONE, NodeId};
use crate::namespace::GroupKind;
use crate::remote::RemoteWrite;
use crate::work;

use super::super::parts::EngineParts;
use super::Remote;

/// Most segments and boundaries that wait to be written.
const QUEUE_MAX: usize = 1 << 14;
/// Most hits whose chains are being looked at, and nodes of these chains that an entry looks at.
const WALKS_MAX: usize = 64;
const WALK_NODES: usize = 256;

/// The waiting writes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    /// The segment that ends at a node.
    Segment,
    /// The objects of a hit that ends at a node, without whole segments, from the object `next` on.
    Boundary { next: usize },
}

/// A chain on which a request has hit: its segments are collected from the deepest upwards.
#[derive(Debug)]
pub(super) struct Walk {
    /// The node to be looked at next, and its epoch.
    at: (NodeId, u32),
    /// Ends of segments, the deepest first.
    found: Vec<(NodeId, u32)>,
}

impl Remote {
    /// Offers the segments that end at nodes that have become visible.
    pub(super) fn offer_new(&mut self, visible: &[NodeId], parts: &mut EngineParts<'_>) {
        if self.config.write != RemoteWrite::All {
            return;
        }
        for &node in visible {
            if self.ends_segment(node, parts) {
                let epoch = parts.residency.node(node).epoch;
                self.enqueue((node, epoch), Waiting::Segment, parts);
            }
        }
    }

    /// Offers the chain of a node that a request has hit.
    pub(super) fn offer_hit(&mut self, node: NodeId, parts: &mut EngineParts<'_>) {
        if self.config.write == RemoteWrite::None || self.puts.walks.len() == WALKS_MAX {
            return;
        }
        let state = parts.residency.node(node);
        let (ns, epoch) = (state.ns, state.epoch);
        let Some(space) = self.spaces.get(ns, parts.namespaces, parts.residency) else {
            return;
        };
        let at = (node, epoch);
        let found = Vec::new();
        self.puts.walks.push_back(Walk { at, found });
        if space.is_hybrid {
            self.enqueue(at, Waiting::Boundary { next: 0 }, parts);
        }
    }

    fn enqueue(&mut self, end: (NodeId, u32), what: Waiting, parts: &mut EngineParts<'_>) {
        work::queued();
        if self.puts.ends.len() < QUEUE_MAX {
            self.puts.ends.push_back((end, what));
        } else {
            parts.counters.remote_puts_dropped_queue += 1;
        }
    }

    /// Offers boundaries of payloads that have been saved, front to back. Where a run of windows or a state ends, a hit
    /// may end.
    pub(super) fn offer_saved(&mut self, payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
        if self.config.write != RemoteWrite::All {
            return;
        }
        let Some(&(first, _)) = payloads.first() else {
            return;
        };
        let ns = parts.residency.node(first).ns;
        let space = self.spaces.get(ns, parts.namespaces, parts.residency);
        if space.is_none_or(|space| !space.is_hybrid) {
            return;
        }
        let mut ends = Vec::new();
        let residency = &*parts.residency;
        let optional = payloads.iter().filter(|&&(node, group)| {
            let state = residency.node(node);
            !state.is_detached() && !state.requires(group)
        });
        for &(node, group) in optional {
            work::queued();
            let kind = residency.spec(ns).groups[usize::from(group)].kind;
            let above = residency.node(node).parent();
            // A window's blocks are needed together, and each state alone.
            if kind != GroupKind::State && ends.last() == Some(&above) {
                ends.pop();
            }
            if ends.last() != Some(&node) {
                ends.push(node);
            }
        }
        ends.sort_unstable();
        ends.dedup();
        for node in ends {
            let epoch = parts.residency.node(node).epoch;
            self.enqueue((node, epoch), Waiting::Boundary { next: 0 }, parts);
        }
    }

    /// Whether a segment ends at a node, and the store is not known to have it.
    fn ends_segment(&mut self, node: NodeId, parts: &EngineParts<'_>) -> bool {
        let state = parts.residency.node(node);
        let space = self.spaces.get(state.ns, parts.namespaces, parts.residency);
        space.is_some_and(|space| {
            state.depth.is_multiple_of(space.hash_blocks) && !self.is_there(&space, node, parts)
        })
    }

    /// Collects the segments of chains that requests have hit, parents first, as far as the store lacks them.
    pub(super) fn step_walks(&mut self, parts: &mut EngineParts<'_>) {
        let mut nodes = WALK_NODES;
        while let Some(mut walk) = self.puts.walks.pop_front() {
            loop {
                let (at, epoch) = walk.at;
                let is_live = at != NONE && parts.residency.forest().is_live(at, epoch);
                if !is_live || parts.residency.node(at).is_detached() {
                    break;
                }
                if nodes == 0 {
                    self.puts.walks.push_front(walk);
                    self.has_rest = true;
                    return;
                }
                nodes -= 1;
                work::node();
                let state = parts.residency.node(at);
                let Some(space) = self.spaces.get(state.ns, parts.namespaces, parts.residency)
                else {
                    break;
                };
                // The write of a segment may have failed although the write of a deeper segment succeeded.
                if state.depth.is_multiple_of(space.hash_blocks)
                    && !self.is_there(&space, at, parts)
                {
                    walk.found.push(walk.at);
                }
                let above = parts.residency.node(at).parent();
                let epoch = match above {
                    NONE => 0,
                    above => parts.residency.node(above).epoch,
                };
                walk.at = (above, epoch);
            }
            for end in walk.found.into_iter().rev() {
                self.enqueue(end, Waiting::Segment, parts);
            }
        }
    }
}
