//! Names of the objects in a remote store.

use std::fmt::{self, Write};

use crate::key::{BlockHash, NamespaceDigest};

/// Version of the names and of the format of the objects ([`super::segment`]).
pub const REMOTE_VERSION: u32 = 1;
/// Version of the names and of the format of objects whose payloads are encrypted, each with a [seal](crate::cipher)
/// behind it.
pub const ENCRYPTED_VERSION: u32 = 2;

/// Number of bytes of the namespace's digest in a name. The object's header has the whole digest.
const DIGEST_BYTES: usize = 16;

/// The name of an object, which holds payloads of a segment: the run of hash blocks that ends with one block hash. The
/// hash fixes the whole prefix, so the name fixes the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// The namespace.
    pub namespace: NamespaceDigest,
    /// The block hash at the end of the segment.
    pub end: BlockHash,
    /// Hash blocks of the segment.
    pub hash_blocks: u32,
    /// The engine group whose windows or states the object has; `None` for the required payloads.
    pub group: Option<u8>,
}

impl ObjectKey {
    /// The name below the store's prefix: lower-case letters, digits, `-` and `/`, at most 160 bytes.
    /// `1/<namespace, 32 hex>/<2 hex of the hash>/<hash hex>-<hash blocks>`, with `-g<group>` behind it for an object
    /// of one engine group.
    pub fn path(&self) -> String {
        self.path_of(REMOTE_VERSION)
    }

    /// The name of the object with encrypted payloads.
    pub fn encrypted_path(&self) -> String {
        self.path_of(ENCRYPTED_VERSION)
    }

    fn path_of(&self, version: u32) -> String {
        let mut path = format!("{version}/");
        push_hex(&mut path, &self.namespace.0[..DIGEST_BYTES]);
        path.push('/');
        let end = self.end.as_bytes();
        push_hex(&mut path, &end[..1]);
        path.push('/');
        push_hex(&mut path, end);
        // Writing to a string cannot fail.
        let _ = write!(path, "-{}", self.hash_blocks);
        if let Some(group) = self.group {
            let _ = write!(path, "-g{group}");
        }
        path
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path())
    }
}

fn push_hex(out: &mut String, bytes: &[u8]) {
    for byte in bytes {
        let _ = write!(out, "{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_the_namespace_the_hash_and_the_length() {
        let key = ObjectKey {
            namespace: NamespaceDigest([0xab; 32]),
            end: BlockHash::new(&[0x0c; 32]).expect("32 bytes"),
            hash_blocks: 8,
            group: None,
        };
        let name = format!("1/{}/0c/{}-8", "ab".repeat(16), "0c".repeat(32));
        assert_eq!(key.path(), name);
        assert_eq!(key.encrypted_path(), format!("2{}", &name[1..]));
        let state = ObjectKey {
            group: Some(3),
            ..key
        };
        assert_eq!(state.path(), format!("{name}-g3"));
        assert!(state.path().len() <= 160);
    }

    #[test]
    fn hashes_of_different_lengths_have_different_names() {
        let key = |bytes: &[u8]| {
            let key = ObjectKey {
                namespace: NamespaceDigest([0; 32]),
                end: BlockHash::new(bytes).expect("a usable length"),
                hash_blocks: 1,
                group: None,
            };
            key.path()
        };
        assert_ne!(key(&[1; 16]), key(&[[1; 16], [0; 16]].concat()));
    }
}
