//! Segments that have become visible, and windows and states, are written to the store, behind everything else.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::remote::{
    Expected, RemoteDone, RemoteError, RemotePart, RemoteRequest, RemoteWrite, SegmentHeader,
};

use crate::forest::{HostState, NONE, NodeId};
use crate::slots::slot_offset;
use crate::work;

use super::super::parts::EngineParts;
use super::super::writeback::WriteBudget;
use super::pieces::{Piece, of_boundary};
use super::recent::fingerprint;
use super::spaces::Space;
use super::{ENTRY_HASH_BLOCKS, ObjectPut, Operation, Remote};

/// Most segments that an entry drops because their payloads were evicted.
const DROPS_MAX: usize = 64;
/// How long a store that is full, or denies writes, gets no puts.
const FULL_NS: u64 = 30_000_000_000;

/// The objects that wait to be written.
#[derive(Debug)]
pub(super) struct PutQueue {
    budget: WriteBudget,
    /// Nodes with their epochs, parents first.
    pub(super) ends: VecDeque<((NodeId, u32), Waiting)>,
    pub(super) walks: VecDeque<Walk>,
    /// Objects that are being written.
    writing: FxHashSet<u64>,
    /// The store was full or denied a write: nothing is written before this time.
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

    /// Segments and boundaries that wait.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.ends.is_empty() || self.has_walks()
    }

    /// Whether chains that requests have hit are to be looked at. Perhaps nothing else wakes the IO thread.
    pub(super) fn has_walks(&self) -> bool {
        !self.walks.is_empty()
    }

    /// Stops writes for a while: the store has no room, or denies writes.
    pub(super) fn pause(&mut self, now_ns: u64) {
        self.paused_until_ns = now_ns.saturating_add(FULL_NS);
    }
}

/// Why an object is not written now.
pub(super) enum Hold {
    /// The object will not be written: its payloads were evicted.
    Drop,
    /// The checksums of the object's payloads are being computed.
    Wait,
}

/// The result of one turn of the waiting writes.
pub(super) enum Turn {
    /// All of its objects are sent.
    Sent,
    /// None of its objects is written any more.
    Dropped,
    /// Another entry sends the remaining objects, when rate, memory and the store allow.
    Goes(Waiting),
    /// Another entry sends the remaining objects, when other objects have been written.
    Later(Waiting),
}

impl Remote {
    /// Whether the store has the segment that ends at a node, or the segment is being written.
    pub(super) fn is_there(&self, space: &Space, node: NodeId, parts: &EngineParts<'_>) -> bool {
        let state = parts.residency.node(node);
        let index = state.depth / space.hash_blocks - 1;
        let key = Piece::segment(space, index).key(space, state.hash);
        let object = fingerprint(&key);
        self.is_written(object) || self.known.contains(object, parts.now_ns)
    }

    /// Whether an object is being written.
    pub(super) fn is_written(&self, object: u64) -> bool {
        self.puts.writing.contains(&object)
    }

    /// Sends waiting writes, as far as rate, memory and the store allow.
    pub(super) fn send_puts(
        &mut self,
        most: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) {
        self.step_walks(parts);
        let (mut hash_blocks, mut drops) = (ENTRY_HASH_BLOCKS, DROPS_MAX);
        // Boundaries whose other objects are being written: this entry looks at each once.
        let mut later = Vec::new();
        while let Some(&(end, what)) = self.puts.ends.front() {
            let may_send = out.len() < most
                && self.breaker.allows(parts.now_ns)
                && parts.now_ns >= self.puts.paused_until_ns;
            if !may_send {
                break;
            }
            if hash_blocks == 0 || drops == 0 {
                self.has_rest = true;
                break;
            }
            let Some(space) = self.space_of(end, what, parts) else {
                self.puts.ends.pop_front();
                drops -= 1;
                continue;
            };
            let turn = match what {
                Waiting::Segment => self.put_segment(end.0, &space, parts, out),
                Waiting::Boundary { next } => {
                    let room = (most, &mut hash_blocks);
                    self.put_boundary((end.0, next), &space, room, parts, out)
                }
            };
            match turn {
                Turn::Sent => hash_blocks = hash_blocks.saturating_sub(space.hash_blocks),
                Turn::Dropped => drops -= 1,
                Turn::Goes(what) => {
                    self.puts.ends[0].1 = what;
                    break;
                }
                Turn::Later(what) => {
                    drops -= 1;
                    later.push((end, what));
                }
            }
            self.puts.ends.pop_front();
        }
        self.puts.ends.extend(later);
    }

    /// The namespace of the rest that is to be written.
    fn space_of(
        &mut self,
        (node, epoch): (NodeId, u32),
        what: Waiting,
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
        let is_there = matches!(what, Waiting::Segment) && self.is_there(&space, node, parts);
        (!is_there).then_some(space)
    }

    /// Writes the segment that ends at a node.
    fn put_segment(
        &mut self,
        end: NodeId,
        space: &Space,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) -> Turn {
        if !self.may_put(space.bytes, parts) {
            return Turn::Goes(Waiting::Segment);
        }
        let depth = parts.residency.node(end).depth;
        let piece = Piece::segment(space, depth / space.hash_blocks - 1);
        let above = parts.residency.forest().ancestors(end);
        let nodes = std::iter::once(end).chain(above);
        let mut nodes: Vec<NodeId> = nodes.take(space.hash_blocks as usize).collect();
        nodes.reverse();
        match self.start_put(&nodes, piece, space, parts) {
            Ok(request) => {
                out.push(request);
                Turn::Sent
            }
            Err(Hold::Wait) => Turn::Goes(Waiting::Segment),
            Err(Hold::Drop) => Turn::Dropped,
        }
    }

    /// Whether the rate and the window allow a write of this many bytes.
    pub(super) fn may_put(&mut self, bytes: u64, parts: &EngineParts<'_>) -> bool {
        self.puts.budget.refill(bytes, parts.now_ns);
        self.puts.budget.allows(bytes) && self.put_window.allows(bytes)
    }

    /// Starts to write an object with these nodes, front to back.
    pub(super) fn start_put(
        &mut self,
        nodes: &[NodeId],
        piece: Piece,
        space: &Space,
        parts: &mut EngineParts<'_>,
    ) -> Result<RemoteRequest, Hold> {
        let (described, payloads) = describe(nodes, piece, space, parts).ok_or_else(|| {
            parts.counters.remote_puts_dropped_gone += 1;
            Hold::Drop
        })?;
        let sums = payloads.iter();
        let sums: Option<Vec<u64>> = sums
            .map(|&(node, group)| parts.residency.host_checksum(node, group))
            .collect();
        let Some(checksums) = sums else {
            // The header goes first and has all checksums, so the put is tried again when they are computed.
            sum_missing(&payloads, parts);
            return Err(Hold::Wait);
        };
        let end = *nodes.last().expect("an object has hash blocks");
        let key = piece.key(space, parts.residency.node(end).hash);
        let part = |(at, &(node, group)): (u32, &(NodeId, u8))| RemotePart {
            payload: at,
            arena_offset: slot_offset(parts.residency.node(node).payload(group).host_slot),
            len: parts.residency.payload_bytes(node, group),
        };
        let of_request: Vec<RemotePart> = (0..).zip(&payloads).map(part).collect();
        // A lease keeps all required payloads down to its node, but only the node's own optional payloads.
        let leased = match piece.group {
            None => vec![end],
            Some(_) => payloads.iter().map(|&(node, _)| node).collect(),
        };
        for &node in &leased {
            parts.residency.pin(node);
        }
        let bytes = piece.bytes(parts.residency.spec_of(end));
        self.puts.budget.spend(bytes);
        self.put_window.started(bytes);
        let object = fingerprint(&key);
        self.puts.writing.insert(object);
        let operation = Operation::Put(ObjectPut {
            nodes: leased,
            fingerprint: object,
            payloads,
            bytes,
            payload_bytes: described.payloads.iter().map(|of| u64::from(of.len)).sum(),
        });
        let header = SegmentHeader {
            described,
            checksums,
        };
        Ok(RemoteRequest::Put {
            token: self.send(operation, parts.now_ns),
            key,
            header: header.encode(),
            parts: of_request,
            // A broken object is replaced, because each get would fetch it again, and refuse it again.
            if_absent: !self.broken.contains(object, parts.now_ns),
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

/// An object with these nodes, front to back, and its payloads. `None` unless all payloads are in the arena.
fn describe(
    nodes: &[NodeId],
    piece: Piece,
    space: &Space,
    parts: &EngineParts<'_>,
) -> Option<(Expected, Vec<(NodeId, u8)>)> {
    let residency = &*parts.residency;
    let first = *nodes.first()?;
    let parent = residency.node(first).parent();
    let described = Expected {
        namespace: space.digest,
        parent: (parent != NONE).then(|| residency.node(parent).hash),
        hashes: nodes
            .iter()
            .map(|&node| residency.node(node).hash)
            .collect(),
        payloads: piece.payloads(residency.spec_of(first)),
    };
    let payloads = described.payloads.iter();
    let payloads: Vec<(NodeId, u8)> = payloads
        .map(|of| (nodes[of.hash_block as usize], of.group))
        .collect();
    let mut all = payloads.iter();
    let is_here = |&(node, group): &(NodeId, u8)| {
        residency.node(node).payload(group).host == HostState::Present
    };
    // Clients choose block hashes: they may differ in length.
    (all.all(is_here) && described.is_valid()).then_some((described, payloads))
}

/// Starts the checksums that are neither known nor being computed.
fn sum_missing(payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
    for &(node, group) in payloads {
        let is_known = parts.residency.host_checksum(node, group).is_some();
        if !is_known && parts.checksums.has_room() {
            let (residency, operations) = (&mut *parts.residency, &mut *parts.operations);
            parts.checksums.start(node, group, residency, operations);
        }
    }
}

impl Remote {
    /// Writes the objects of the boundary at a node, from `next` on. The last object is sent when the store has the
    /// others: a search for the boundary probes the last object.
    pub(super) fn put_boundary(
        &mut self,
        (end, mut next): (NodeId, usize),
        space: &Space,
        (most, hash_blocks): (usize, &mut u32),
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) -> Turn {
        let residency = &*parts.residency;
        let depth = residency.node(end).depth;
        let spec = residency.spec_of(end);
        let is_boundary = spec.may_end(depth) && residency.node(end).is_visible();
        if !is_boundary || next == 0 && !residency.has_windows_in_host(end) {
            return Turn::Dropped;
        }
        let pieces = of_boundary(spec, space, depth);
        let Some(lowest) = pieces.iter().map(|piece| piece.after).min() else {
            return Turn::Dropped;
        };
        let above = residency.forest().ancestors(end);
        let nodes = std::iter::once(end).chain(above);
        let mut nodes: Vec<NodeId> = nodes.take((depth - lowest) as usize).collect();
        nodes.reverse();
        *hash_blocks = hash_blocks.saturating_sub(depth - lowest);
        let of_piece = |piece: Piece| {
            let range = (piece.after - lowest) as usize..(piece.to - lowest) as usize;
            &nodes[range]
        };
        let objects = pieces.iter().map(|&piece| {
            let last = of_piece(piece).last().copied().unwrap_or(NONE);
            fingerprint(&piece.key(space, parts.residency.node(last).hash))
        });
        let objects: Vec<u64> = objects.collect();
        while let Some(&piece) = pieces.get(next) {
            work::queued();
            let is_known = self.known.contains(objects[next], parts.now_ns);
            if is_known || self.is_written(objects[next]) {
                next += 1;
                continue;
            }
            let is_last = next + 1 == pieces.len();
            let mut others = objects[..next].iter().filter(|_| is_last);
            if let Some(&other) = others.find(|&&of| !self.known.contains(of, parts.now_ns)) {
                return match self.is_written(other) {
                    true => Turn::Later(Waiting::Boundary { next }),
                    // The object's write has failed.
                    false => Turn::Dropped,
                };
            }
            let bytes = piece.bytes(parts.residency.spec_of(end));
            if out.len() >= most || !self.may_put(bytes, parts) {
                return Turn::Goes(Waiting::Boundary { next });
            }
            match self.start_put(of_piece(piece), piece, space, parts) {
                Ok(request) => out.push(request),
                Err(Hold::Wait) => return Turn::Goes(Waiting::Boundary { next }),
                Err(Hold::Drop) => return Turn::Dropped,
            }
            next += 1;
        }
        Turn::Sent
    }
}

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
    pub(crate) fn offer_new(&mut self, visible: &[NodeId], parts: &mut EngineParts<'_>) {
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
    pub(crate) fn offer_hit(&mut self, node: NodeId, parts: &mut EngineParts<'_>) {
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
    pub(crate) fn offer_saved(&mut self, payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
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
