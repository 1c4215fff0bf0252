//! How a chain is cut into objects.
//!
//! Required payloads are cut into segments. A hit in a namespace with windows or states needs more: the required
//! payloads between the last whole segment and the end of the hit, and the windows and states there. These are objects
//! of their own.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::SLOT_ALIGN;
use undercroft_contract::remote::{ObjectKey, SegmentPayload};

use super::spaces::{HASH_BLOCKS_MAX, Space};

/// A run of hash blocks that is one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    /// Hash blocks of the chain before the object.
    pub(super) after: u32,
    /// Hash blocks of the chain up to the object's end.
    pub(super) to: u32,
    /// The group whose windows or states the object has; `None` for the required payloads.
    pub(super) group: Option<u8>,
}

impl Piece {
    /// The whole segment with this index, counted from the start of the chain.
    pub(super) fn segment(space: &Space, index: u32) -> Self {
        Self {
            after: index * space.hash_blocks,
            to: (index + 1) * space.hash_blocks,
            group: None,
        }
    }

    /// Number of the object's hash blocks.
    pub(super) fn hash_blocks(self) -> u32 {
        self.to - self.after
    }

    /// Whether the object has the payload of a group at a depth.
    pub(super) fn has(self, spec: &NamespaceSpec, depth: u32, group: u8) -> bool {
        match self.group {
            None => spec.required(depth) >> group & 1 == 1,
            Some(of) => of == group && spec.ends_block(usize::from(group), depth),
        }
    }

    /// The object's payloads, in the order of the object.
    pub(super) fn payloads(self, spec: &NamespaceSpec) -> Vec<SegmentPayload> {
        let mut payloads = Vec::new();
        for (hash_block, depth) in (0..).zip(self.after + 1..=self.to) {
            for (group, of) in (0..).zip(&spec.groups) {
                if self.has(spec, depth, group) {
                    payloads.push(SegmentPayload {
                        hash_block,
                        group,
                        len: of.payload_bytes,
                    });
                }
            }
        }
        payloads
    }

    /// Bytes of the object's payloads.
    pub(super) fn bytes(self, spec: &NamespaceSpec) -> u64 {
        let of_group = |(group, of): (usize, &undercroft_contract::namespace::GroupSpec)| {
            let blocks = match (self.group, of.kind) {
                (None, GroupKind::Full) => {
                    self.to / spec.hash_blocks(group) - self.after / spec.hash_blocks(group)
                }
                (Some(own), _) if usize::from(own) == group => {
                    self.to / spec.hash_blocks(group) - self.after / spec.hash_blocks(group)
                }
                _ => 0,
            };
            u64::from(blocks) * u64::from(of.payload_bytes).next_multiple_of(SLOT_ALIGN)
        };
        spec.groups.iter().enumerate().map(of_group).sum()
    }

    /// The object's name, with the block hash at the object's end.
    pub(super) fn key(self, space: &Space, end: BlockHash) -> ObjectKey {
        ObjectKey {
            namespace: space.digest,
            end,
            hash_blocks: self.hash_blocks(),
            group: self.group,
        }
    }
}

/// The objects that a hit at a boundary needs beside the whole segments before it: the required payloads behind the
/// segments, then windows and states, each front to back. The last object is written last, and a search for the
/// boundary probes it.
pub(super) fn of_boundary(spec: &NamespaceSpec, space: &Space, boundary: u32) -> Vec<Piece> {
    let whole = boundary / space.hash_blocks * space.hash_blocks;
    let mut pieces = Vec::new();
    if whole < boundary {
        pieces.push(Piece {
            after: whole,
            to: boundary,
            group: None,
        });
    }
    let last = last_of(spec, space, boundary);
    for group in 0..spec.groups.len() {
        let after = optional_after(spec, group, boundary);
        if after == boundary {
            continue;
        }
        let number = u8::try_from(group).ok();
        let to = match last.group == number {
            true => last.after,
            false => boundary,
        };
        let run = run_of(spec, group, space.object_bytes);
        // A run of one block is kept for the last object of a boundary: see `last_of`.
        let least = if to < boundary {
            2 * spec.hash_blocks(group)
        } else {
            1
        };
        push_runs(
            &mut pieces,
            Piece {
                after,
                to,
                group: number,
            },
            run,
            least,
        );
    }
    if last.group.is_some() {
        pieces.push(last);
    }
    pieces
}

/// Cuts a run of hash blocks at multiples of `run`, but into pieces of at least `least` hash blocks.
fn push_runs(pieces: &mut Vec<Piece>, all: Piece, run: u32, least: u32) {
    let mut after = all.after;
    while after < all.to {
        let mut to = (after / run + 1) * run;
        if to - after < least {
            to += run;
        }
        if to + least > all.to {
            to = all.to;
        }
        pieces.push(Piece { after, to, ..all });
        after = to;
    }
}

/// The last object of a boundary: a state, or the end of a window that no other boundary has as an object. If there is
/// neither, the required payloads before the boundary.
pub(super) fn last_of(spec: &NamespaceSpec, space: &Space, boundary: u32) -> Piece {
    let is_state = |&group: &usize| spec.groups[group].kind == GroupKind::State;
    let is_needed = |&group: &usize| optional_after(spec, group, boundary) < boundary;
    let groups = (0..spec.groups.len()).rev();
    let state = groups.clone().find(is_state);
    if let Some(group) = state.or_else(|| groups.clone().find(is_needed)) {
        let block = spec.hash_blocks(group);
        let after = optional_after(spec, group, boundary);
        return Piece {
            // A run of one block belongs to no other boundary.
            after: match boundary - after > 2 * block {
                true => boundary - block,
                false => after,
            },
            to: boundary,
            group: u8::try_from(group).ok(),
        };
    }
    let whole = (boundary - 1) / space.hash_blocks * space.hash_blocks;
    Piece {
        after: whole,
        to: boundary,
        group: None,
    }
}

/// For a hit at a boundary, the depth after which a group's windows or states are needed.
fn optional_after(spec: &NamespaceSpec, group: usize, boundary: u32) -> u32 {
    match spec.groups[group].kind {
        GroupKind::Full | GroupKind::Ignored => boundary,
        GroupKind::State => boundary - 1,
        GroupKind::SlidingWindow { .. } | GroupKind::ChunkedLocal { .. } => {
            spec.needed_after(group, boundary)
        }
    }
}

/// Hash blocks of an object of one group, except the first and the last object of a boundary. Boundaries that are near
/// each other share the other objects.
fn run_of(spec: &NamespaceSpec, group: usize, object_bytes: u64) -> u32 {
    let block = spec.hash_blocks(group);
    let payload = u64::from(spec.groups[group].payload_bytes).next_multiple_of(SLOT_ALIGN);
    let mut blocks = 1;
    while payload * u64::from(blocks) < object_bytes && 2 * blocks * block <= HASH_BLOCKS_MAX {
        blocks *= 2;
    }
    blocks * block
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_contract::key::NamespaceDigest;

    const MIB: u32 = 1 << 20;

    fn spec(kinds: &[(GroupKind, u32)]) -> NamespaceSpec {
        NamespaceSpec::uniform("", 16, kinds)
    }

    fn space() -> Space {
        Space {
            digest: NamespaceDigest::of("a model"),
            hash_blocks: 8,
            bytes: 16 << 20,
            object_bytes: 16 << 20,
            is_hybrid: true,
        }
    }

    fn runs(kinds: &[(GroupKind, u32)], boundary: u32) -> Vec<(u32, u32, Option<u8>)> {
        let pieces = of_boundary(&spec(kinds), &space(), boundary);
        let run = |piece: Piece| (piece.after, piece.to, piece.group);
        pieces.into_iter().map(run).collect()
    }

    #[test]
    fn a_state_is_an_object_of_its_own() {
        let kinds = [(GroupKind::Full, 2 * MIB), (GroupKind::State, 9 * MIB)];
        assert_eq!(runs(&kinds, 21), [(16, 21, None), (20, 21, Some(1))]);
        assert_eq!(runs(&kinds, 16), [(15, 16, Some(1))]);
    }

    #[test]
    fn an_ignored_group_has_no_objects() {
        let kinds = [
            (GroupKind::Ignored, 0),
            (GroupKind::Full, 2 * MIB),
            (GroupKind::State, 9 * MIB),
        ];
        let mut spec = spec(&kinds);
        // As the connector registers the group.
        spec.groups[0].block_tokens = 0;
        let pieces = of_boundary(&spec, &space(), 21);
        let groups: Vec<_> = pieces.into_iter().map(|piece| piece.group).collect();
        assert_eq!(groups, [None, Some(2)]);
    }

    #[test]
    fn windows_of_near_boundaries_share_objects() {
        let window = GroupKind::SlidingWindow { tokens: 20 * 16 };
        let kinds = [(GroupKind::Full, 2 * MIB), (window, 2 * MIB)];
        let at = |boundary| runs(&kinds, boundary).split_off(1);
        let run = |after, to| (after, to, Some(1));
        assert_eq!(at(30), [run(10, 16), run(16, 24), run(24, 29), run(29, 30)]);
        assert_eq!(at(31), [run(11, 16), run(16, 24), run(24, 30), run(30, 31)]);
    }

    #[test]
    fn the_last_object_of_a_boundary_is_no_other_object_of_another() {
        let window = |tokens| GroupKind::SlidingWindow { tokens };
        for tokens in [20, 40, 60, 100, 300] {
            for kinds in [
                vec![(GroupKind::Full, 2 * MIB), (window(tokens), 2 * MIB)],
                vec![(window(tokens), 40 * MIB), (GroupKind::Full, 2 * MIB)],
                vec![
                    (GroupKind::State, MIB),
                    (GroupKind::Full, MIB),
                    (window(tokens), MIB),
                ],
            ] {
                let (spec, space) = (spec(&kinds), space());
                let others = (5..200).flat_map(|boundary| {
                    let mut pieces = of_boundary(&spec, &space, boundary);
                    pieces.pop();
                    pieces
                });
                let others: Vec<Piece> = others.collect();
                for boundary in 5..200 {
                    let last = last_of(&spec, &space, boundary);
                    assert!(!others.contains(&last), "{kinds:?}: {last:?}");
                }
            }
        }
    }

    #[test]
    fn a_chunk_that_begins_at_a_boundary_needs_nothing_there() {
        let chunk = GroupKind::ChunkedLocal { tokens: 64 };
        let kinds = [(GroupKind::Full, 2 * MIB), (chunk, 2 * MIB)];
        assert_eq!(runs(&kinds, 8), []);
        assert_eq!(runs(&kinds, 10), [(8, 10, None), (8, 10, Some(1))]);
        let last = [(8, 11, None), (8, 10, Some(1)), (10, 11, Some(1))];
        assert_eq!(runs(&kinds, 11), last);
    }

    #[test]
    fn the_last_object_of_a_boundary_is_the_last_of_the_list() {
        let window = GroupKind::SlidingWindow { tokens: 20 * 16 };
        let chunk = GroupKind::ChunkedLocal { tokens: 64 };
        for kinds in [
            vec![(GroupKind::Full, 2 * MIB), (window, 2 * MIB)],
            vec![(GroupKind::State, 9 * MIB), (GroupKind::Full, 2 * MIB)],
            vec![
                (GroupKind::Full, 2 * MIB),
                (window, 2 * MIB),
                (chunk, 2 * MIB),
            ],
            vec![(GroupKind::Full, 2 * MIB), (chunk, 2 * MIB)],
        ] {
            let (spec, space) = (spec(&kinds), space());
            for boundary in 1..100 {
                let last = of_boundary(&spec, &space, boundary).last().copied();
                let last = last.unwrap_or_else(|| Piece::segment(&space, boundary / 8 - 1));
                assert_eq!(last_of(&spec, &space, boundary), last, "{boundary}");
            }
        }
    }

    #[test]
    fn a_piece_has_as_many_bytes_as_its_payloads() {
        let window = GroupKind::SlidingWindow { tokens: 100 };
        let mut spec = spec(&[(GroupKind::Full, 5000), (window, 100), (GroupKind::Full, 1)]);
        spec.groups[0].block_tokens = 32;
        let space = Space {
            object_bytes: 10_000,
            ..space()
        };
        for boundary in (2..40).step_by(2) {
            for piece in of_boundary(&spec, &space, boundary) {
                let lens = piece.payloads(&spec).into_iter();
                let lens = lens.map(|of| u64::from(of.len).next_multiple_of(SLOT_ALIGN));
                assert_eq!(piece.bytes(&spec), lens.sum::<u64>(), "{piece:?}");
            }
        }
    }
}
