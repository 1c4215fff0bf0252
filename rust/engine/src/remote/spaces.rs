//! Which namespaces use the remote store, and how their chains are cut into segments.

use rustc_hash::FxHashMap;
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::SLOT_ALIGN;

use crate::forest::NsId;

use super::super::namespaces::Namespaces;
use super::super::residency::Residency;

/// Most hash blocks of a segment: an entry of the engine handles one segment.
pub(super) const HASH_BLOCKS_MAX: u32 = 64;

/// A namespace in the remote store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) digest: NamespaceDigest,
    /// Hash blocks of a segment.
    pub(super) hash_blocks: u32,
    /// Bytes of a segment's payloads in an object.
    pub(super) bytes: u64,
    /// An object of windows or states has at least this many bytes, if there are as many (`remote_object`).
    pub(super) object_bytes: u64,
    /// A hit needs windows or states, too.
    pub(super) is_hybrid: bool,
}

/// The namespaces in the remote store.
#[derive(Debug)]
pub(super) struct Spaces {
    object_bytes: u64,
    /// By namespace, with the instance for which the entry was made.
    known: FxHashMap<NsId, (u64, Option<Space>)>,
}

impl Spaces {
    pub(super) fn new(object_bytes: u64) -> Self {
        Self {
            object_bytes,
            known: FxHashMap::default(),
        }
    }

    /// A namespace in the store. `None` if the namespace is private, or if no group has required payloads.
    pub(super) fn get(
        &mut self,
        ns: NsId,
        namespaces: &Namespaces,
        residency: &Residency,
    ) -> Option<Space> {
        let instance = namespaces.instance(ns);
        if let Some(&(of, space)) = self.known.get(&ns)
            && of == instance
        {
            return space;
        }
        let space = (!namespaces.is_private(ns)).then(|| {
            let digest = *namespaces.digest(ns);
            let spec = residency.spec(ns);
            let (hash_blocks, bytes) = segment_of(spec, self.object_bytes)?;
            Some(Space {
                digest,
                hash_blocks,
                bytes,
                object_bytes: self.object_bytes,
                is_hybrid: !spec.has_full_only(),
            })
        });
        let space = space.flatten();
        self.known.insert(ns, (instance, space));
        space
    }
}

/// Hash blocks of a segment, and the bytes of its payloads. A segment is the least power of two of runs, each of which
/// ends with a block of every group, that has `object_bytes`; segments of many small payloads have fewer bytes. `None`
/// if no group has required payloads.
fn segment_of(spec: &NamespaceSpec, object_bytes: u64) -> Option<(u32, u64)> {
    let run = (1..=HASH_BLOCKS_MAX).find(|&depth| spec.may_end(depth))?;
    let full = (0..spec.groups.len()).filter(|&group| spec.groups[group].kind == GroupKind::Full);
    let bytes_of_run: u64 = full
        .map(|group| {
            let payload = u64::from(spec.groups[group].payload_bytes).next_multiple_of(SLOT_ALIGN);
            payload * u64::from(run / spec.hash_blocks(group))
        })
        .sum();
    if bytes_of_run == 0 {
        return None;
    }
    let mut runs = 1;
    while bytes_of_run * u64::from(runs) < object_bytes && 2 * runs * run <= HASH_BLOCKS_MAX {
        runs *= 2;
    }
    Some((runs * run, bytes_of_run * u64::from(runs)))
}

#[cfg(test)]
mod tests {
    use undercroft_contract::namespace::GroupSpec;

    use super::*;

    fn spec(groups: &[(GroupKind, u32, u32)]) -> NamespaceSpec {
        let group = |&(kind, block_tokens, payload_bytes): &(GroupKind, u32, u32)| GroupSpec {
            kind,
            block_tokens,
            payload_bytes,
        };
        NamespaceSpec {
            description: "a model".to_owned(),
            hash_block_size: 16,
            alignment_tokens: 16,
            groups: groups.iter().map(group).collect(),
        }
    }

    #[test]
    fn a_segment_has_the_least_power_of_two_of_blocks_that_is_large_enough() {
        let cut = |bytes| segment_of(&spec(&[(GroupKind::Full, 16, bytes)]), 16 << 20);
        assert_eq!(cut(2 << 20), Some((8, 16 << 20)));
        assert_eq!(cut(5 << 20), Some((4, 20 << 20)));
        assert_eq!(cut(32 << 20), Some((1, 32 << 20)));
        assert_eq!(cut((1 << 20) + 1), Some((16, 16 * ((1 << 20) + 4096))));
        assert_eq!(
            cut(4096),
            Some((64, 64 * 4096)),
            "no more than an entry handles"
        );
    }

    #[test]
    fn a_segment_ends_with_a_block_of_every_group() {
        let groups = [
            (GroupKind::Full, 16, 1 << 20),
            (GroupKind::Full, 48, 1 << 20),
        ];
        assert_eq!(segment_of(&spec(&groups), 16 << 20), Some((12, 16 << 20)));
    }

    #[test]
    fn windows_and_states_do_not_count() {
        let window = GroupKind::SlidingWindow { tokens: 64 };
        for kind in [
            window,
            GroupKind::State,
            GroupKind::ChunkedLocal { tokens: 64 },
            GroupKind::Ignored,
        ] {
            let groups = [(GroupKind::Full, 16, 16 << 20), (kind, 16, 16 << 20)];
            assert_eq!(segment_of(&spec(&groups), 16 << 20), Some((1, 16 << 20)));
            assert_eq!(segment_of(&spec(&groups[1..]), 16 << 20), None);
        }
    }
}
