//! The file that holds the keys.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use zeroize::Zeroizing;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Most keys of a file.
pub const KEYS_MAX: usize = 16;
/// A file with more bytes is no key file.
const FILE_BYTES_MAX: u64 = 64 << 10;

pub(crate) type Key = Zeroizing<[u8; KEY_BYTES]>;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file cannot be read.
    #[error("key_file {path} cannot be read: {source}; name a file that this user can read")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The path is no regular file.
    #[error("key_file {path} is no regular file; name a file with the keys")]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// Another user owns the file.
    #[error(
        "key_file {path} belongs to uid {owner}, this process runs as uid {uid}; allowed are a file of this user or of root"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        uid: u32,
    },
    /// Other users may read or write the file.
    #[error(
        "key_file {path} has mode {mode:04o}, with which others can read or write it; allowed are 0600 and 0400, and 0440 for a \
         file of root: chmod 600 {path}"
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file does not hold keys.
    #[error(
        "key_file {path}: {reason}; allowed are 32 bytes, or lines of 64 hexadecimal digits, as `openssl rand -hex 32` prints"
    )]
    Contents {
        /// The file.
        path: PathBuf,
        /// The problem, without any byte of the file.
        reason: String,
    },
}

/// Keys, the key for writing first. Their bytes are never shown, and are cleared when the keys are dropped.
pub struct Keys(Vec<Key>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// Reads a key file: 32 bytes, or lines of 64 hexadecimal digits, among them empty ones and comments that begin
    /// with `#`.
    ///
    /// # Errors
    /// If the file cannot be read, other users can read it, or it holds anything else.
    pub fn read(path: &Path) -> Result<Self, KeyFileError> {
        let failed = |source: io::Error| KeyFileError::Io {
            path: path.to_owned(),
            source,
        };
        // With `NONBLOCK`, opening a pipe does not block. Links are followed: a mounted secret is a link.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::open(path, flags, Mode::empty());
        let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
        check(path, &file, failed)?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(FILE_BYTES_MAX as usize + 1));
        file.take(FILE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        Self::parse(&bytes).map_err(|reason| KeyFileError::Contents {
            path: path.to_owned(),
            reason,
        })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        if let Ok(raw) = <[u8; KEY_BYTES]>::try_from(bytes) {
            return Ok(Self(vec![Zeroizing::new(raw)]));
        }
        let mut keys: Vec<Key> = Vec::new();
        for (number, line) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let key = key_of(line).ok_or_else(|| format!("line {number} is no key"))?;
            if keys.contains(&key) {
                return Err(format!("line {number} repeats a key"));
            }
            keys.push(key);
        }
        match keys.len() {
            0 => Err("it has no key".to_owned()),
            1..=KEYS_MAX => Ok(Self(keys)),
            found => Err(format!("it has {found} keys, more than {KEYS_MAX}")),
        }
    }

    /// The keys, the key for writing first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Key> {
        self.0.iter()
    }
}

/// Checks that only this user can read the keys.
fn check(
    path: &Path,
    file: &File,
    failed: impl Fn(io::Error) -> KeyFileError,
) -> Result<(), KeyFileError> {
    let found = rustix::fs::fstat(file).map_err(|errno| failed(errno.into()))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(KeyFileError::Kind {
            path: path.to_owned(),
        });
    }
    let uid = rustix::process::geteuid().as_raw();
    if found.st_uid != uid && found.st_uid != 0 {
        return Err(KeyFileError::Owner {
            path: path.to_owned(),
            owner: found.st_uid,
            uid,
        });
    }
    let mode = found.st_mode & 0o7777;
    // A secret that Kubernetes mounts belongs to root, and the pod's group reads it.
    let of_others = if found.st_uid == 0 { 0o037 } else { 0o077 };
    if mode & of_others != 0 {
        return Err(KeyFileError::Mode {
            path: path.to_owned(),
            mode,
        });
    }
    Ok(())
}

/// The key of 64 hexadecimal digits.
fn key_of(line: &[u8]) -> Option<Key> {
    if line.len() != 2 * KEY_BYTES {
        return None;
    }
    let digit = |byte: u8| (byte as char).to_digit(16);
    let mut key = Key::default();
    for (byte, pair) in key.iter_mut().zip(line.chunks_exact(2)) {
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(contents: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, contents).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    fn read(contents: &[u8]) -> Result<Keys, String> {
        let (_dir, path) = file(contents, 0o600);
        Keys::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_raw_bytes_or_lines_of_hexadecimal_digits() {
        let raw: Vec<u8> = (0..32).collect();
        let keys = read(&raw).unwrap();
        assert_eq!(keys.0[0].as_slice(), raw);
        let (first, second) = ("0A".repeat(32), "ff".repeat(32));
        let keys = read(format!("# new\n{first}\r\n\n  {second}").as_bytes()).unwrap();
        let found: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
        assert_eq!(found, [&[10; 32][..], &[255; 32]]);
        assert_eq!(format!("{keys:?}"), "2 keys");
    }

    #[test]
    fn what_is_no_key_is_refused_without_showing_it() {
        let good = "0a".repeat(32);
        for (contents, reason) in [
            (String::new(), "it has no key"),
            ("# nothing\n\n".to_owned(), "it has no key"),
            (format!("{good}\nsecret"), "line 2 is no key"),
            ("g".repeat(64), "line 1 is no key"),
            ("é".repeat(32), "line 1 is no key"),
            (format!("{good}0a"), "line 1 is no key"),
            (format!("{good}\n{good}"), "line 2 repeats a key"),
            ("x".repeat(70_000), "line 1 is no key"),
        ] {
            let refused = read(contents.as_bytes()).unwrap_err();
            assert!(refused.contains(reason), "{refused}");
            assert!(
                refused.contains("openssl rand -hex 32") && !refused.contains("secret"),
                "{refused}"
            );
        }
        let many: String = (0..17).map(|key| format!("{key:064x}\n")).collect();
        assert!(read(many.as_bytes()).unwrap_err().contains("17 keys"));
    }

    #[test]
    fn a_file_that_others_can_read_is_refused_with_the_remedy() {
        for mode in [0o644, 0o604, 0o660, 0o602] {
            let (_dir, path) = file(&[1; 32], mode);
            let refused = Keys::read(&path).unwrap_err().to_string();
            assert!(refused.contains(&format!("mode {mode:04o}")), "{refused}");
            assert!(refused.contains("chmod 600"), "{refused}");
        }
        for mode in [0o600, 0o400] {
            let (_dir, path) = file(&[1; 32], mode);
            Keys::read(&path).unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let refused = Keys::read(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("no regular file"), "{refused}");
        let refused = Keys::read(&dir.path().join("gone")).unwrap_err();
        assert!(refused.to_string().contains("cannot be read"), "{refused}");
    }

    #[test]
    fn the_group_may_read_a_file_of_root_only() {
        let (_dir, path) = file(&[1; 32], 0o440);
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(Keys::read(&path).is_ok(), is_root);
        if is_root {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            let refused = Keys::read(&path).unwrap_err().to_string();
            assert!(refused.contains("uid 65534"), "{refused}");
        }
    }
}
