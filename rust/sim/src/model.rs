//! The properties that must hold, in plain terms: namespaces, prompts, and which blocks a hit
//! needs.

use std::collections::HashSet;

use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};

use crate::content::{PrefixKey, SavedPayload, extend};
use crate::random::Random;

/// Tokens of one hash block, in every namespace.
pub(crate) const HASH_BLOCK: u32 = 16;
/// Hash blocks of the longest prompt.
const DEPTH_MAX: u64 = 24;

/// A namespace as its clients know it.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) spec: NamespaceSpec,
    pub(crate) hash_bytes: usize,
    /// Counts the weights: payloads of different epochs differ.
    pub(crate) epoch: u64,
    /// The latest weights of all.
    newest: u64,
    /// The weights whose payloads a restart finds, or none.
    pub(crate) entered: u64,
    /// A reset was not durable when the engine ended. Unless it is repeated before anything else, the earlier weights
    /// are found again.
    pub(crate) must_reset: bool,
    /// Whether it belongs to one session, after a reset. Then nothing survives the session's end.
    pub(crate) private: bool,
    /// The share of the tiers that its sessions want, in thousandths.
    pub(crate) tenant_share: u16,
    /// Payloads saved under the present weights.
    pub(crate) stored: HashSet<SavedPayload>,
    /// Number of orders by which the engine has lost all of these payloads.
    pub(crate) losses: u64,
    /// Number of the last opening or closing of its sessions in this life of the engine.
    pub(crate) used: Option<u64>,
}

/// Depths at which blocks end, of each group, that a load of `(local, boundary]` hash blocks needs;
/// `None` if no hit may end there.
pub(crate) fn needs(spec: &NamespaceSpec, local: u32, boundary: u32) -> Option<Vec<(u8, u32)>> {
    let mut needs = Vec::new();
    let end = boundary * HASH_BLOCK;
    for (group, of) in (0u8..).zip(&spec.groups) {
        let block = of.block_tokens;
        let first_token = match of.kind {
            GroupKind::Ignored => continue,
            GroupKind::Full => 0,
            GroupKind::SlidingWindow { tokens } => end.saturating_sub(tokens - 1),
            GroupKind::ChunkedLocal { tokens } => end / tokens * tokens,
            GroupKind::State => end.saturating_sub(block),
        };
        if !end.is_multiple_of(block) {
            return None;
        }
        for index in first_token / block..end / block {
            let depth = (index + 1) * (block / HASH_BLOCK);
            if depth > local {
                needs.push((group, depth));
            }
        }
    }
    Some(needs)
}

impl Model {
    pub(crate) fn random(index: usize, small: bool, random: &mut Random) -> Self {
        let kinds: Vec<(GroupKind, u32)> = match random.below(8) {
            0..=2 => vec![(GroupKind::Full, random.pick(&[1, 1, 2]))],
            3 => vec![(GroupKind::Full, 1), (window(random), random.pick(&[1, 2]))],
            4 => vec![(GroupKind::Full, 2), (window(random), 1)],
            5 => vec![
                (GroupKind::Full, random.pick(&[1, 2])),
                (GroupKind::State, random.pick(&[2, 4])),
            ],
            6 => vec![
                (GroupKind::Full, 1),
                (
                    GroupKind::ChunkedLocal {
                        tokens: random.pick(&[64, 96]),
                    },
                    random.pick(&[1, 2]),
                ),
                (GroupKind::Ignored, 1),
            ],
            _ => vec![(window(random), 1), (GroupKind::State, 1)],
        };
        let groups: Vec<GroupSpec> = kinds
            .into_iter()
            .map(|(kind, hash_blocks)| GroupSpec {
                kind,
                block_tokens: hash_blocks * HASH_BLOCK,
                payload_bytes: payload_bytes(small, random),
            })
            .collect();
        let widest = groups
            .iter()
            .map(|group| group.block_tokens)
            .max()
            .unwrap_or(HASH_BLOCK);
        let spec = NamespaceSpec {
            description: format!("simulated namespace {index}"),
            hash_block_size: HASH_BLOCK,
            alignment_tokens: widest * random.pick(&[1, 1, 1, 2]),
            groups,
        };
        Self {
            spec,
            hash_bytes: random.pick(&[16, 32]),
            epoch: 0,
            newest: 0,
            entered: 0,
            must_reset: false,
            private: false,
            tenant_share: 0,
            stored: HashSet::new(),
            losses: 0,
            used: None,
        }
    }

    /// Adds a second group of full attention, whose payloads may have another size.
    pub(crate) fn add_full_group(&mut self, small: bool, random: &mut Random) {
        let of = self.spec.groups[0];
        self.spec.groups.push(GroupSpec {
            kind: GroupKind::Full,
            block_tokens: random.pick(&[HASH_BLOCK, of.block_tokens]),
            payload_bytes: payload_bytes(small, random),
        });
    }

    /// Adds a group that is neither saved nor needed, before any of the others, as the connector registers the group.
    pub(crate) fn add_ignored_group(&mut self, random: &mut Random) {
        let of = GroupSpec {
            kind: GroupKind::Ignored,
            block_tokens: 0,
            payload_bytes: 0,
        };
        let at = random.index(self.spec.groups.len());
        self.spec.groups.insert(at, of);
    }

    /// The namespace of the same model with other weights, which have a name.
    pub(crate) fn renamed(&self) -> Self {
        let mut renamed = self.private(0);
        renamed.spec.description += ", other weights";
        renamed.private = false;
        renamed
    }

    /// The namespace of a session that parts with this one. `epoch`: no other's.
    pub(crate) fn private(&self, epoch: u64) -> Self {
        Self {
            spec: self.spec.clone(),
            hash_bytes: self.hash_bytes,
            epoch,
            newest: epoch,
            entered: 0,
            must_reset: false,
            private: true,
            tenant_share: self.tenant_share,
            stored: HashSet::new(),
            losses: 0,
            used: None,
        }
    }

    pub(crate) fn payload(&self, namespace: usize, key: PrefixKey, group: u8) -> SavedPayload {
        SavedPayload {
            namespace,
            epoch: self.epoch,
            key,
            group,
        }
    }

    /// The deepest boundary of a hit, in hash blocks, of all saved blocks: `local` if none is deeper.
    pub(crate) fn deepest(
        &self,
        namespace: usize,
        keys: &[PrefixKey],
        local: u32,
        most: u32,
    ) -> u32 {
        let has = |group: u8, depth: u32| {
            let payload = self.payload(namespace, keys[depth as usize - 1], group);
            self.stored.contains(&payload)
        };
        let align = self.spec.alignment_tokens / HASH_BLOCK;
        let deepest = (keys.len() as u32).min(most);
        let boundaries = (local + 1..=deepest)
            .rev()
            .filter(|boundary| boundary % align == 0);
        let usable = |boundary: u32| {
            // A prefix is found only if all of its full attention is present, even for tokens that the device holds.
            let whole = needs(&self.spec, 0, boundary)?;
            let full = |group: u8| self.spec.groups[usize::from(group)].kind == GroupKind::Full;
            let is_whole = whole
                .iter()
                .all(|&(group, depth)| !full(group) || has(group, depth));
            let load = needs(&self.spec, local, boundary)?;
            (is_whole && load.iter().all(|&(group, depth)| has(group, depth))).then_some(boundary)
        };
        boundaries.into_iter().find_map(usable).unwrap_or(local)
    }

    /// The weights change.
    pub(crate) fn advance(&mut self) {
        self.newest += 1;
        self.epoch = self.newest;
        self.stored.clear();
    }
}

fn payload_bytes(small: bool, random: &mut Random) -> u32 {
    let sizes: &[u32] = if small {
        &[700, 4096, 6000]
    } else {
        &[700, 4096, 10_000, 19_900, 40_000, 70_000, 131_072]
    };
    random.pick(sizes)
}

fn window(random: &mut Random) -> GroupKind {
    let tokens = random.pick(&[2, 17, 33, 40, 64]);
    GroupKind::SlidingWindow { tokens }
}

/// Prompts that share prefixes.
#[derive(Debug, Default)]
pub(crate) struct Prompts {
    known: Vec<Vec<PrefixKey>>,
}

impl Prompts {
    /// A prompt, as the prefix at each of its hash blocks.
    pub(crate) fn draw(&mut self, random: &mut Random) -> Vec<PrefixKey> {
        let mut prompt = Vec::new();
        if !self.known.is_empty() && random.chance(800) {
            let known = &self.known[random.index(self.known.len())];
            let shared = random.index(known.len()) + 1;
            prompt.extend_from_slice(&known[..shared]);
        }
        if prompt.is_empty() || random.chance(600) {
            let more = random
                .range(1, 8)
                .min(DEPTH_MAX - (prompt.len() as u64).min(DEPTH_MAX - 1));
            for _ in 0..more {
                let parent = prompt.last().copied().unwrap_or(0);
                prompt.push(extend(parent, random.below(3)));
            }
        }
        prompt.truncate(DEPTH_MAX as usize);
        if self.known.len() < 24 {
            self.known.push(prompt.clone());
        } else {
            let at = random.index(self.known.len());
            self.known[at] = prompt.clone();
        }
        prompt
    }
}
