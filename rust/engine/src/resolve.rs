//! Where a hit may end: the deepest boundary at which every group has the blocks that its kind
//! needs.
//!
//! Pure: it sees a chain only through a function. Its oracle is vLLM's `find_longest_cache_hit`.

use undercroft_contract::namespace::{GroupKind, NamespaceSpec};

/// The deepest boundary, in hash blocks, at or below `limit`, that is a multiple of the alignment and
/// lies above `local`, the boundary that the device itself holds; `local` if there is none.
///
/// `limit` is the reach of full attention: every block of its groups in `(local, limit]` is
/// available. `has(depth, group)` says whether the payload of another group's block that ends at `depth`
/// is available. It is never called at or below `local`: the device has these blocks.
pub fn resolve(
    spec: &NamespaceSpec,
    limit: u32,
    local: u32,
    has: impl FnMut(u32, usize) -> bool,
) -> u32 {
    let align = spec.alignment_tokens / spec.hash_block_size;
    resolve_part(spec, align, limit, local, 0, has).unwrap_or(local)
}

/// Searches as [`resolve`] does, with an alignment of this many hash blocks. Gives up at the first boundary at or
/// below `bottom`, unless that boundary is not above `local`. `Err`: that boundary, the next one to look at; no
/// boundary above it fits.
pub(crate) fn resolve_part(
    spec: &NamespaceSpec,
    align: u32,
    limit: u32,
    local: u32,
    bottom: u32,
    mut has: impl FnMut(u32, usize) -> bool,
) -> Result<u32, u32> {
    let mut boundary = limit / align * align;
    while boundary > local {
        if boundary <= bottom {
            return Err(boundary);
        }
        match missing(spec, boundary, local, &mut has) {
            None => return Ok(boundary),
            // Every boundary from this block on needs the missing block, too.
            Some(depth) => boundary = depth.saturating_sub(1) / align * align,
        }
    }
    Ok(local)
}

/// Whether a hit may end at `boundary`, if every block of full attention is available up to there. See [`resolve`].
pub(crate) fn may_end_at(
    spec: &NamespaceSpec,
    boundary: u32,
    local: u32,
    mut has: impl FnMut(u32, usize) -> bool,
) -> bool {
    missing(spec, boundary, local, &mut has).is_none()
}

/// The end of the deepest block that a hit at `boundary` needs and that is not available.
fn missing(
    spec: &NamespaceSpec,
    boundary: u32,
    local: u32,
    has: &mut impl FnMut(u32, usize) -> bool,
) -> Option<u32> {
    for (group, of) in spec.groups.iter().enumerate() {
        if of.kind == GroupKind::Ignored {
            continue;
        }
        if !spec.ends_block(group, boundary) {
            return Some(boundary);
        }
        if of.kind == GroupKind::Full {
            continue;
        }
        let hash_blocks = spec.hash_blocks(group);
        let after = spec
            .needed_after(group, boundary)
            .max(local / hash_blocks * hash_blocks);
        let mut depth = boundary;
        while depth > after {
            if !has(depth, group) {
                return Some(depth);
            }
            depth -= hash_blocks;
        }
    }
    None
}

/// Like [`resolve`], for a chain of which `has` knows all payloads. Also finds the reach of full attention, which is at
/// most `limit` hash blocks.
pub fn resolve_all(
    spec: &NamespaceSpec,
    limit: u32,
    local: u32,
    has: impl Fn(u32, usize) -> bool,
) -> u32 {
    let gap = (local + 1..=limit).find(|&depth| {
        let required = spec.required(depth);
        (0..spec.groups.len()).any(|group| required >> group & 1 == 1 && !has(depth, group))
    });
    resolve(spec, gap.map_or(limit, |gap| gap - 1), local, has)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use undercroft_contract::namespace::GroupSpec;

    use super::*;

    fn spec(groups: &[(GroupKind, u32)], alignment_tokens: u32) -> NamespaceSpec {
        NamespaceSpec {
            description: String::new(),
            hash_block_size: 16,
            alignment_tokens,
            groups: groups
                .iter()
                .map(|&(kind, block_tokens)| GroupSpec {
                    kind,
                    block_tokens,
                    payload_bytes: 1,
                })
                .collect(),
        }
    }

    /// By the definition: tries every boundary and every needed block.
    fn naive(
        spec: &NamespaceSpec,
        limit: u32,
        local: u32,
        has: &dyn Fn(u32, usize) -> bool,
    ) -> u32 {
        let align = spec.alignment_tokens / spec.hash_block_size;
        (local + 1..=limit)
            .rev()
            .filter(|boundary| boundary % align == 0)
            .find(|&boundary| {
                (0..spec.groups.len()).all(|group| {
                    if spec.groups[group].kind == GroupKind::Ignored {
                        return true;
                    }
                    if !spec.ends_block(group, boundary) {
                        return false;
                    }
                    let hash_blocks = spec.hash_blocks(group);
                    (1..=boundary / hash_blocks)
                        .map(|block| block * hash_blocks)
                        .all(|depth| {
                            depth <= spec.needed_after(group, boundary)
                                || depth <= local / hash_blocks * hash_blocks
                                || has(depth, group)
                        })
                })
            })
            .unwrap_or(local)
    }

    #[test]
    fn full_attention_hits_up_to_its_limit() {
        let spec = spec(&[(GroupKind::Full, 16)], 32);
        assert_eq!(resolve(&spec, 7, 0, |_, _| false), 6);
        assert_eq!(resolve(&spec, 1, 0, |_, _| true), 0);
        assert_eq!(resolve(&spec, 4, 6, |_, _| true), 6);
    }

    #[test]
    fn a_state_counts_only_at_its_boundary() {
        let spec = spec(&[(GroupKind::Full, 16), (GroupKind::State, 16)], 16);
        assert_eq!(
            resolve(&spec, 10, 0, |depth, group| group == 0 || depth == 4),
            4
        );
    }

    #[test]
    fn a_window_needs_only_its_last_blocks() {
        let window = GroupKind::SlidingWindow { tokens: 33 };
        let spec = spec(&[(GroupKind::Full, 16), (window, 16)], 16);
        assert_eq!(
            resolve(&spec, 10, 0, |depth, group| group == 0 || depth >= 9),
            10
        );
        assert_eq!(
            resolve(&spec, 10, 0, |depth, group| group == 0
                || [5, 6, 8].contains(&depth)),
            6
        );
    }

    fn kind() -> impl Strategy<Value = (GroupKind, u32)> {
        prop_oneof![
            Just((GroupKind::Full, 16)),
            Just((GroupKind::Full, 32)),
            (2u32..100).prop_map(|tokens| (GroupKind::SlidingWindow { tokens }, 16)),
            (2u32..100).prop_map(|tokens| (GroupKind::SlidingWindow { tokens }, 32)),
            Just((GroupKind::ChunkedLocal { tokens: 64 }, 16)),
            Just((GroupKind::State, 32)),
            Just((GroupKind::Ignored, 16)),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(
            kinds in prop::collection::vec(kind(), 1..4),
            limit in 0u32..40,
            local in 0u32..20,
            missing in prop::collection::vec(any::<u64>(), 4),
            dense in any::<bool>(),
        ) {
            let spec = spec(&kinds, 32);
            let local = (local / 2 * 2).min(limit);
            let has = |depth: u32, group: usize| {
                let mask = if dense { missing[group] & missing[(group + 1) % 4] & missing[(group + 2) % 4] } else { missing[group] };
                mask >> (depth % 64) & 1 == 0
            };
            prop_assert_eq!(resolve_all(&spec, limit, local, has), naive(&spec, limit, local, &has));
        }
    }
}
