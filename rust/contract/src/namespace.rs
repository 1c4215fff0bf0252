//! Namespaces: the properties that must be equal for payloads to be interchangeable, and the needs
//! of a hit from each KV cache group.

use serde::{Deserialize, Serialize};

use crate::error::RegisterError;
use crate::key::NamespaceDigest;

/// Groups a namespace may have; a node keeps one bit for each.
pub const GROUPS_MAX: usize = 32;

/// The blocks that a hit of L tokens needs from a group (vLLM's `find_longest_cache_hit` per
/// manager).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Full attention and MLA: every block before L.
    Full,
    /// Sliding window: the blocks that cover the last `tokens - 1` tokens before L.
    SlidingWindow {
        /// Width of the window.
        tokens: u32,
    },
    /// Chunked local attention: the blocks of the chunk that L lies in, up to L.
    ChunkedLocal {
        /// Width of a chunk.
        tokens: u32,
    },
    /// State-space and linear attention: the one state exactly at L.
    State,
    /// Not prefix-cacheable: neither saved nor needed.
    Ignored,
}

/// One KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// The blocks of the group that a hit needs.
    pub kind: GroupKind,
    /// Tokens of one block; a multiple of `hash_block_size`.
    pub block_tokens: u32,
    /// Bytes of one payload, of all ranks together.
    pub payload_bytes: u32,
}

/// The description of a namespace by its clients, which a directory stores.
///
/// A model whose layers alternate between full attention and a window of 32 tokens, in blocks of 16 tokens:
///
/// ```
/// use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
///
/// let window = GroupKind::SlidingWindow { tokens: 32 };
/// let spec = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 4096), (window, 1024)]);
/// assert_eq!(spec.validate(), Ok(()));
/// // A hit of 10 blocks needs all blocks of full attention, and the last 31 tokens of the window.
/// assert_eq!(spec.needed_after(0, 10), 0);
/// assert_eq!(spec.needed_after(1, 10), 8);
/// // Another description is another namespace: no block is found in both.
/// let other = NamespaceSpec { description: "other".to_owned(), ..spec.clone() };
/// assert_ne!(other.digest(), spec.digest());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceSpec {
    /// Canonical description; its digest is the namespace's identity.
    pub description: String,
    /// Tokens of one hash block.
    pub hash_block_size: u32,
    /// The end of every hit is a multiple of this many tokens. Each session sets its own number; the description on
    /// disk has the number of the first session that used the namespace.
    pub alignment_tokens: u32,
    /// Groups, in vLLM's order.
    pub groups: Vec<GroupSpec>,
}

impl NamespaceSpec {
    /// A namespace whose groups have blocks of `tokens`, as its hash blocks have. A group is its kind, and the bytes of
    /// its payloads.
    pub fn uniform(
        description: impl Into<String>,
        tokens: u32,
        groups: &[(GroupKind, u32)],
    ) -> Self {
        let group = |&(kind, payload_bytes): &(GroupKind, u32)| GroupSpec {
            kind,
            block_tokens: tokens,
            payload_bytes,
        };
        Self {
            description: description.into(),
            hash_block_size: tokens,
            alignment_tokens: tokens,
            groups: groups.iter().map(group).collect(),
        }
    }

    /// The digest of the description.
    pub fn digest(&self) -> NamespaceDigest {
        NamespaceDigest::of(&self.description)
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// Names the first impossible value, and the allowed values.
    pub fn validate(&self) -> Result<(), RegisterError> {
        let hash_block_size = self.hash_block_size;
        if hash_block_size == 0 {
            return Err(RegisterError::Value {
                key: "hash_block_size",
                value: 0,
                allowed: "at least 1",
            });
        }
        if self.alignment_tokens == 0 || !self.alignment_tokens.is_multiple_of(hash_block_size) {
            return Err(RegisterError::Value {
                key: "alignment_tokens",
                value: u64::from(self.alignment_tokens),
                allowed: "a multiple of hash_block_size",
            });
        }
        if self.groups.is_empty() || self.groups.len() > GROUPS_MAX {
            return Err(RegisterError::Value {
                key: "groups",
                value: self.groups.len() as u64,
                allowed: "1 to 32 KV cache groups",
            });
        }
        let mut used = self
            .groups
            .iter()
            .filter(|group| group.kind != GroupKind::Ignored)
            .peekable();
        if used.peek().is_none() {
            return Err(RegisterError::Value {
                key: "groups",
                value: 0,
                allowed: "1 KV cache group or more that is not ignored",
            });
        }
        for group in used {
            if group.block_tokens == 0 || group.block_tokens % hash_block_size != 0 {
                return Err(RegisterError::Value {
                    key: "block_tokens",
                    value: u64::from(group.block_tokens),
                    allowed: "a multiple of hash_block_size",
                });
            }
            if group.payload_bytes == 0 {
                return Err(RegisterError::Value {
                    key: "payload_bytes",
                    value: 0,
                    allowed: "at least 1",
                });
            }
        }
        Ok(())
    }

    /// Hash blocks of one block of `group`.
    pub fn hash_blocks(&self, group: usize) -> u32 {
        self.groups[group].block_tokens / self.hash_block_size
    }

    /// Whether a block of `group` ends at `depth` hash blocks.
    pub fn ends_block(&self, group: usize, depth: u32) -> bool {
        self.groups[group].kind != GroupKind::Ignored
            && depth.is_multiple_of(self.hash_blocks(group))
    }

    /// Whether a hit may end at `boundary` hash blocks: a block of every group ends there.
    pub fn may_end(&self, boundary: u32) -> bool {
        (0..self.groups.len()).all(|group| {
            self.groups[group].kind == GroupKind::Ignored || self.ends_block(group, boundary)
        })
    }

    /// Whether any group needs every block of a prefix.
    pub fn has_full(&self) -> bool {
        self.groups
            .iter()
            .any(|group| group.kind == GroupKind::Full)
    }

    /// Whether every group needs every block of a prefix, or none.
    pub fn has_full_only(&self) -> bool {
        let mut kinds = self.groups.iter().map(|group| group.kind);
        kinds.all(|kind| matches!(kind, GroupKind::Full | GroupKind::Ignored))
    }

    /// Bytes that a load of a long prefix copies for each token, of the groups that need every block.
    pub fn bytes_per_token(&self) -> f64 {
        let full = self
            .groups
            .iter()
            .filter(|group| group.kind == GroupKind::Full);
        full.map(|group| f64::from(group.payload_bytes) / f64::from(group.block_tokens))
            .sum()
    }

    /// Groups whose payload a node at `depth` requires, one bit each.
    pub fn required(&self, depth: u32) -> u32 {
        (0..self.groups.len())
            .filter(|&group| {
                self.groups[group].kind == GroupKind::Full && self.ends_block(group, depth)
            })
            .fold(0, |mask, group| mask | 1 << group)
    }

    /// For a hit of `boundary` hash blocks, the depth after which `group`'s blocks are needed.
    pub fn needed_after(&self, group: usize, boundary: u32) -> u32 {
        let hash_blocks = self.hash_blocks(group);
        let in_hash_blocks = |tokens: u32| {
            let blocks = tokens.div_ceil(self.groups[group].block_tokens);
            // A window may be as wide as a number can tell.
            blocks.saturating_mul(hash_blocks)
        };
        match self.groups[group].kind {
            GroupKind::Full => 0,
            GroupKind::SlidingWindow { tokens } => {
                boundary.saturating_sub(in_hash_blocks(tokens.saturating_sub(1)).max(hash_blocks))
            }
            GroupKind::ChunkedLocal { tokens } => {
                let start = boundary * self.hash_block_size / tokens.max(1) * tokens.max(1);
                start / self.groups[group].block_tokens * hash_blocks
            }
            GroupKind::State => boundary.saturating_sub(hash_blocks),
            GroupKind::Ignored => boundary,
        }
    }
}
