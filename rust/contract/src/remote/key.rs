//! Names of the objects in a remote store.

use std::fmt::{self, Write};

use crate::key::{BlockHash, NamespaceDigest};

/// Version of the names and of the format of the objects ([`super::segment`]).
pub const REMOTE_VERSION: u32 = 1;
/// Version of the names and of the format of objects whose payloads are encrypted, each with a [seal](crate::cipher)
/// behind it.
pub const ENCRYPTED_VERSION: u32 = 2;

/// The versions of all names.
pub const VERSIONS: [u32; 2] = [REMOTE_VERSION, ENCRYPTED_VERSION];

/// File name of a namespace's description.
const DESCRIPTION: &str = "about.json";
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
        let name = ObjectName {
            version,
            namespace: self.namespace.to_prefix(),
            end: self.end,
            hash_blocks: self.hash_blocks,
            group: self.group,
        };
        name.path()
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path())
    }
}

/// The name of an object in its parts. [`ObjectName::parse`] accepts exactly the names that [`ObjectKey`] makes: a store
/// may hold the files of other applications, which look similar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectName {
    /// One of [`VERSIONS`].
    pub version: u32,
    /// The first bytes of the namespace's digest.
    pub namespace: NamespacePrefix,
    /// The block hash at the end of the segment.
    pub end: BlockHash,
    /// Hash blocks of the segment; not 0.
    pub hash_blocks: u32,
    /// The engine group of the object, if it is of one group.
    pub group: Option<u8>,
}

impl ObjectName {
    /// The parts of a name; `None` for a name that undercroft does not make.
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.split('/');
        let version = parts.next()?.parse().ok()?;
        let namespace = NamespacePrefix::parse(parts.next()?)?;
        let (hash, counts) = parts.nth(1)?.split_once('-')?;
        let (hash_blocks, group) = match counts.split_once("-g") {
            Some((hash_blocks, group)) => (hash_blocks, Some(group.parse().ok()?)),
            None => (counts, None),
        };
        let name = Self {
            version,
            namespace,
            end: BlockHash::new(&from_hex(hash)?)?,
            hash_blocks: hash_blocks.parse().ok()?,
            group,
        };
        let is_ours = VERSIONS.contains(&version) && name.hash_blocks > 0;
        // The comparison excludes all other spellings: upper case, signs, leading zeros, further parts.
        (is_ours && name.path() == path).then_some(name)
    }

    fn path(&self) -> String {
        let mut path = format!("{}/{}/", self.version, self.namespace);
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

/// The part of a namespace's digest that is in names: the first 16 bytes, written as hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespacePrefix([u8; DIGEST_BYTES]);

impl NamespacePrefix {
    /// The name of the namespace's description, which people read.
    pub fn description_path(&self) -> String {
        format!("{REMOTE_VERSION}/{self}/{DESCRIPTION}")
    }

    /// The namespace of a description with this name; `None` for another name.
    pub fn of_description(path: &str) -> Option<Self> {
        let found = Self::parse(path.split('/').nth(1)?)?;
        (found.description_path() == path).then_some(found)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self(from_hex(text)?.try_into().ok()?))
    }
}

impl NamespaceDigest {
    /// The part of the digest that the names in a remote store have.
    pub fn to_prefix(&self) -> NamespacePrefix {
        let mut prefix = [0; DIGEST_BYTES];
        prefix.copy_from_slice(&self.0[..DIGEST_BYTES]);
        NamespacePrefix(prefix)
    }
}

impl fmt::Display for NamespacePrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Whether a directory is one above objects: `<version>`, `<version>/<namespace>`, or `<version>/<namespace>/<2 hex>`.
pub fn is_above_objects(directory: &str) -> bool {
    let mut parts = directory.split('/');
    let version = parts.next().unwrap_or_default();
    let is_byte = |part: &str| from_hex(part).is_some_and(|bytes| bytes.len() == 1);
    VERSIONS.iter().any(|ours| ours.to_string() == version)
        && parts
            .next()
            .is_none_or(|part| NamespacePrefix::parse(part).is_some())
        && parts.next().is_none_or(is_byte)
        && parts.next().is_none()
}

/// The bytes of lower-case hexadecimal digits.
fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |digits: &[u8]| {
        let &[high, low] = digits else { return None };
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        Some(value(high)? << 4 | value(low)?)
    };
    digits.map(byte).collect()
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

    fn key(hash: &[u8], hash_blocks: u32, group: Option<u8>) -> ObjectKey {
        ObjectKey {
            namespace: NamespaceDigest(std::array::from_fn(|at| (at * 17) as u8)),
            end: BlockHash::new(hash).expect("a usable length"),
            hash_blocks,
            group,
        }
    }

    #[test]
    fn each_name_that_is_made_is_read() {
        for len in 1..=32 {
            let hash: Vec<u8> = (0..len).map(|at| (at * 83 + len) as u8).collect();
            for (hash_blocks, group) in [(1, None), (64, Some(0)), (u32::MAX, Some(255))] {
                let key = key(&hash, hash_blocks, group);
                for (version, path) in [(1, key.path()), (2, key.encrypted_path())] {
                    let name = ObjectName::parse(&path).expect(&path);
                    assert_eq!(name.path(), path);
                    assert_eq!((name.version, name.end), (version, key.end));
                    assert_eq!((name.hash_blocks, name.group), (hash_blocks, group));
                    assert_eq!(name.namespace, key.namespace.to_prefix());
                    let (directory, _) = path.rsplit_once('/').expect("a directory");
                    assert!(is_above_objects(directory), "{directory}");
                }
            }
        }
        let prefix = key(&[1], 1, None).namespace.to_prefix();
        let path = prefix.description_path();
        assert_eq!(NamespacePrefix::of_description(&path), Some(prefix));
        assert_eq!(ObjectName::parse(&path), None);
    }

    /// Names that differ from one that is made by one character, or by one part.
    #[test]
    fn a_name_that_is_not_made_is_not_read() {
        let path = key(&[0xab; 32], 8, Some(3)).path();
        let allowed = |changed: &str| {
            // Another hash, length, group or version is another name of undercroft's.
            let name = ObjectName::parse(changed);
            name.is_none_or(|name| name.path() == changed && VERSIONS.contains(&name.version))
        };
        for at in 0..path.len() {
            let (before, after) = (&path[..at], &path[at + 1..]);
            for other in ["", "A", "g", "0", "/", "-", ".", " ", "+", "é"] {
                for changed in [
                    format!("{before}{other}{after}"),
                    format!("{before}{other}{}", &path[at..]),
                ] {
                    assert!(allowed(&changed), "{changed}");
                    let digits = ["0", ""].contains(&other);
                    let read = ObjectName::parse(&changed).is_some();
                    assert!(digits || !read || changed == path, "{changed}");
                }
            }
        }
        for other in [
            "",
            "1",
            "2024/05/12/access.log",
            "1/a/b/c",
            "1/2/3/4-5",
            &path.replacen("1/", "3/", 1),
            &path.replacen("1/", "01/", 1),
            &path.replacen("/ab/", "/ac/", 1),
            &path.replacen("-8", "-08", 1),
            &path.replacen("-8", "-0", 1),
            &path.replacen("-8", "-4294967296", 1),
            &path.replacen("-g3", "-g256", 1),
            &path.replacen("-g3", "-g", 1),
            &path.to_uppercase(),
            &format!("/{path}"),
            &format!("{path}/"),
            &format!("{path}/x"),
            &format!("{path}.tmp"),
        ] {
            assert_eq!(ObjectName::parse(other), None, "{other}");
            assert_eq!(NamespacePrefix::of_description(other), None, "{other}");
        }
        for directory in ["", "3", "2024", "2024/05", "1/ab", "1/00/ab", "check"] {
            assert!(!is_above_objects(directory), "{directory}");
        }
    }

    #[test]
    fn hashes_of_different_lengths_have_different_names() {
        let short = key(&[1; 16], 1, None);
        let long = key(&[[1; 16], [0; 16]].concat(), 1, None);
        assert_ne!(short.path(), long.path());
    }
}
