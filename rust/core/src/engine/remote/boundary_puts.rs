//! Writes the objects of a boundary: the payloads that a hit there needs beside whole segments.

use crate::forest::{NONE, NodeId};
use crate::remote::RemoteRequest;
use crate::work;

use super::super::parts::EngineParts;
use super::Remote;
use super::offers::Waiting;
use super::pieces::{Piece, of_boundary};
use super::puts::{Hold, Turn};
use super::recent::fingerprint;
use super::spaces::Space;

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
