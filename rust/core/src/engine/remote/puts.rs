//! Segments that have become visible are written to the store, behind everything else.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::forest::{HostState, NONE, NodeId};
use crate::remote::{
    Expected, ObjectKey, RemoteDone, RemoteError, RemotePart, RemoteRequest, RemoteWrite,
    SegmentHeader, SegmentPayload,
};
use crate::slots::slot_offset;
use crate::work;

use super::super::parts::EngineParts;
use super::super::writeback::WriteBudget;
use super::recent::fingerprint;
use super::spaces::Space;
use super::{ENTRY_HASH_BLOCKS, Operation, Remote};

/// Segments that wait to be written.
const QUEUE_MAX: usize = 1 << 14;
/// Hits whose chains are being looked at, and nodes of them that an entry looks at.
const WALKS_MAX: usize = 64;
const WALK_NODES: usize = 256;
/// Segments that an entry drops because their payloads have gone.
const DROPS_MAX: usize = 64;
/// How long a store gets nothing that is full or denies writes.
const FULL_NS: u64 = 30_000_000_000;

/// A chain on which a request has hit: its segments are collected from the deepest upwards.
#[derive(Debug)]
struct Walk {
    /// The node that is looked at next, and its epoch.
    at: (NodeId, u32),
    /// Ends of segments, the deepest first.
    found: Vec<(NodeId, u32)>,
}

/// The segments that wait to be written.
#[derive(Debug)]
pub(super) struct PutQueue {
    budget: WriteBudget,
    /// Nodes at the ends of segments, with their epochs, parents first.
    ends: VecDeque<(NodeId, u32)>,
    walks: VecDeque<Walk>,
    /// Segments that are being written.
    writing: FxHashSet<u64>,
    /// The store was full or denied a write: nothing is written before.
    paused_until_ns: u64,
}

impl PutQueue {
    pub(super) fn new(rate: u64) -> Self {
        Self {
            budget: WriteBudget::new(rate),
            ends: VecDeque::new(),
            walks: VecDeque::new(),
            writing: FxHashSet::default(),
            paused_until_ns: 0,
        }
    }

    /// Segments that wait.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.ends.is_empty() || self.has_walks()
    }

    /// Whether chains that requests have hit are to be looked at. Nothing else may come that wakes the IO thread.
    pub(super) fn has_walks(&self) -> bool {
        !self.walks.is_empty()
    }

    /// The store has no room, or does not allow writes.
    pub(super) fn pause(&mut self, now_ns: u64) {
        self.paused_until_ns = now_ns.saturating_add(FULL_NS);
    }
}

/// Why a segment is not written now.
enum Hold {
    /// It will not be: its payloads have gone, or it is there.
    Drop,
    /// Its checksums are being computed.
    Wait,
}

impl Remote {
    /// Nodes have become visible.
    pub(super) fn offer_new(&mut self, visible: &[NodeId], parts: &mut EngineParts<'_>) {
        if self.config.write != RemoteWrite::All {
            return;
        }
        for &node in visible {
            if self.ends_segment(node, parts) {
                let epoch = parts.residency.node(node).epoch;
                self.enqueue((node, epoch), parts);
            }
        }
    }

    /// A request has hit the chain of a node.
    pub(super) fn offer_hit(&mut self, node: NodeId, parts: &mut EngineParts<'_>) {
        if self.config.write == RemoteWrite::None || self.puts.walks.len() == WALKS_MAX {
            return;
        }
        let state = parts.residency.node(node);
        let (ns, epoch) = (state.ns, state.epoch);
        if self
            .spaces
            .get(ns, parts.namespaces, parts.residency)
            .is_some()
        {
            let at = (node, epoch);
            let found = Vec::new();
            self.puts.walks.push_back(Walk { at, found });
        }
    }

    fn enqueue(&mut self, end: (NodeId, u32), parts: &mut EngineParts<'_>) {
        work::queued();
        if self.puts.ends.len() < QUEUE_MAX {
            self.puts.ends.push_back(end);
        } else {
            parts.counters.remote_puts_dropped_queue += 1;
        }
    }

    /// Whether a segment ends at a node, that the store is not known to have.
    fn ends_segment(&mut self, node: NodeId, parts: &EngineParts<'_>) -> bool {
        let state = parts.residency.node(node);
        let space = self.spaces.get(state.ns, parts.namespaces, parts.residency);
        space.is_some_and(|space| {
            state.depth.is_multiple_of(space.hash_blocks) && !self.is_there(&space, node, parts)
        })
    }

    /// Whether the store has, or is getting, the segment that ends at a node.
    fn is_there(&self, space: &Space, node: NodeId, parts: &EngineParts<'_>) -> bool {
        let segment = fingerprint(&space.digest, &parts.residency.node(node).hash);
        self.puts.writing.contains(&segment) || self.known.contains(segment, parts.now_ns)
    }

    /// Collects the segments of chains that requests have hit, and that are not there, parents first.
    fn step_walks(&mut self, parts: &mut EngineParts<'_>) {
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
                // A write above one that succeeded may have failed.
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
                self.enqueue(end, parts);
            }
        }
    }

    /// Sends segments that wait, as far as rate, memory and the store go.
    pub(super) fn send_puts(
        &mut self,
        most: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) {
        self.step_walks(parts);
        let (mut hash_blocks, mut drops) = (ENTRY_HASH_BLOCKS, DROPS_MAX);
        while let Some(&(node, epoch)) = self.puts.ends.front() {
            let may_send = out.len() < most
                && self.breaker.allows(parts.now_ns)
                && parts.now_ns >= self.puts.paused_until_ns;
            if !may_send {
                return;
            }
            if hash_blocks == 0 || drops == 0 {
                self.has_rest = true;
                return;
            }
            let Some(space) = self.space_of((node, epoch), parts) else {
                self.puts.ends.pop_front();
                drops -= 1;
                continue;
            };
            self.puts.budget.refill(space.bytes, parts.now_ns);
            if !self.puts.budget.allows(space.bytes) || !self.put_window.allows(space.bytes) {
                return;
            }
            hash_blocks = hash_blocks.saturating_sub(space.hash_blocks);
            match self.start_put(node, &space, parts) {
                Ok(request) => out.push(request),
                Err(Hold::Wait) => return,
                Err(Hold::Drop) => drops -= 1,
            }
            self.puts.ends.pop_front();
        }
    }

    /// The namespace of a segment that is still to be written.
    fn space_of(
        &mut self,
        (node, epoch): (NodeId, u32),
        parts: &mut EngineParts<'_>,
    ) -> Option<Space> {
        work::queued();
        let is_live = parts.residency.forest().is_live(node, epoch);
        if !is_live || parts.residency.has_left_index(node) {
            parts.counters.remote_puts_dropped_gone += 1;
            return None;
        }
        let ns = parts.residency.node(node).ns;
        let space = self.spaces.get(ns, parts.namespaces, parts.residency)?;
        (!self.is_there(&space, node, parts)).then_some(space)
    }

    /// Starts to write the segment that ends at a node.
    fn start_put(
        &mut self,
        end: NodeId,
        space: &Space,
        parts: &mut EngineParts<'_>,
    ) -> Result<RemoteRequest, Hold> {
        let (described, payloads) = describe(end, space, parts).ok_or_else(|| {
            parts.counters.remote_puts_dropped_gone += 1;
            Hold::Drop
        })?;
        let sums = payloads.iter();
        let sums: Option<Vec<u64>> = sums
            .map(|&(node, group)| parts.residency.host_checksum(node, group))
            .collect();
        let Some(checksums) = sums else {
            sum_missing(&payloads, parts);
            return Err(Hold::Wait);
        };
        let key = ObjectKey {
            namespace: space.digest,
            end: parts.residency.node(end).hash,
            hash_blocks: space.hash_blocks,
            group: None,
        };
        let part = |(at, &(node, group)): (u32, &(NodeId, u8))| RemotePart {
            payload: at,
            arena_offset: slot_offset(parts.residency.node(node).payload(group).host_slot),
            len: parts.residency.payload_bytes(node, group),
        };
        let of_request: Vec<RemotePart> = (0..).zip(&payloads).map(part).collect();
        parts.residency.pin(end);
        self.puts.budget.spend(space.bytes);
        self.put_window.started(space.bytes);
        let segment = fingerprint(&space.digest, &key.end);
        self.puts.writing.insert(segment);
        let operation = Operation::Put {
            node: end,
            fingerprint: segment,
            bytes: space.bytes,
            payload_bytes: described.payloads.iter().map(|of| u64::from(of.len)).sum(),
        };
        let header = SegmentHeader {
            described,
            checksums,
        };
        Ok(RemoteRequest::Put {
            token: self.send(operation, parts.now_ns),
            key,
            header: header.encode(),
            parts: of_request,
            if_absent: !self.broken.contains(segment, parts.now_ns),
        })
    }

    /// The write of a segment has ended.
    pub(super) fn put_ended(
        &mut self,
        segment: u64,
        result: &Result<RemoteDone, RemoteError>,
        now_ns: u64,
    ) {
        self.puts.writing.remove(&segment);
        match result {
            Ok(RemoteDone::Stored) => {
                self.broken.remove(segment);
                self.absent.remove(segment);
                self.known.insert(segment, now_ns);
            }
            Ok(_) => self.known.insert(segment, now_ns),
            Err(_) => {}
        }
    }
}

/// The segment that ends at a node, and its payloads, front to back. `None` unless all are in the arena.
fn describe(
    end: NodeId,
    space: &Space,
    parts: &EngineParts<'_>,
) -> Option<(Expected, Vec<(NodeId, u8)>)> {
    let residency = &*parts.residency;
    let above = residency.forest().ancestors(end);
    let nodes = std::iter::once(end).chain(above);
    let mut nodes: Vec<NodeId> = nodes.take(space.hash_blocks as usize).collect();
    nodes.reverse();
    let parent = residency.node(nodes[0]).parent();
    let mut payloads = Vec::new();
    let mut described = Expected {
        namespace: space.digest,
        parent: (parent != NONE).then(|| residency.node(parent).hash),
        hashes: nodes
            .iter()
            .map(|&node| residency.node(node).hash)
            .collect(),
        payloads: Vec::new(),
    };
    for (index, &node) in (0..).zip(&nodes) {
        let state = residency.node(node);
        for group in state.groups().filter(|&group| state.requires(group)) {
            if state.payload(group).host != HostState::Present {
                return None;
            }
            payloads.push((node, group));
            described.payloads.push(SegmentPayload {
                hash_block: index,
                group,
                len: residency.payload_bytes(node, group),
            });
        }
    }
    // Clients choose block hashes: they may differ in length.
    described.is_valid().then_some((described, payloads))
}

/// Has the checksums computed that are not known, and that nobody computes.
fn sum_missing(payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
    for &(node, group) in payloads {
        let is_known = parts.residency.host_checksum(node, group).is_some();
        if !is_known && parts.checksums.has_room() {
            let (residency, operations) = (&mut *parts.residency, &mut *parts.operations);
            parts.checksums.start(node, group, residency, operations);
        }
    }
}
