//! The file that holds the keys.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use undercroft_io::secret::SecretBytes;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Most keys of a file.
pub const KEYS_MAX: usize = 16;
/// A file with more bytes is no key file.
const FILE_BYTES_MAX: usize = 64 << 10;

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

/// Keys, the key for writing first. Their bytes are never shown, and lie in secret memory alone.
pub struct Keys {
    bytes: SecretBytes,
    count: usize,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.count)
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
        let mut file = File::from(opened.map_err(|errno| failed(errno.into()))?);
        check(path, &file, failed)?;
        let mut bytes = SecretBytes::zeros(FILE_BYTES_MAX + 1).map_err(failed)?;
        let mut len = 0;
        loop {
            match file.read(&mut bytes.bytes_mut()[len..]) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let mut keys = Self {
            bytes: SecretBytes::zeros(KEYS_MAX * KEY_BYTES).map_err(failed)?,
            count: 0,
        };
        let parsed = keys.parse(&bytes.bytes()[..len]);
        parsed.map_err(|reason| KeyFileError::Contents {
            path: path.to_owned(),
            reason,
        })?;
        Ok(keys)
    }

    fn parse(&mut self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() == KEY_BYTES {
            self.place(0).copy_from_slice(bytes);
            self.count = 1;
            return Ok(());
        }
        let is_key = |line: &&[u8]| !line.is_empty() && !line.starts_with(b"#");
        let lines = bytes.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let found = lines.clone().filter(is_key).count();
        for (number, line) in (1..).zip(lines).filter(|(_, line)| is_key(line)) {
            // A further key is read over the last one, only to name a line that is no key.
            let at = self.count.min(KEYS_MAX - 1);
            if !decode(line, self.place(at)) {
                return Err(format!("line {number} is no key"));
            }
            if at == self.count && self.iter().any(|key| key == self.key(at)) {
                return Err(format!("line {number} repeats a key"));
            }
            self.count = at + 1;
        }
        match found {
            0 => Err("it has no key".to_owned()),
            1..=KEYS_MAX => Ok(()),
            found => Err(format!("it has {found} keys, more than {KEYS_MAX}")),
        }
    }

    fn place(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes.bytes_mut()[index * KEY_BYTES..][..KEY_BYTES]
    }

    fn key(&self, index: usize) -> &[u8] {
        &self.bytes.bytes()[index * KEY_BYTES..][..KEY_BYTES]
    }

    /// Keys of one repeated byte each.
    #[cfg(test)]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut keys = Self {
            bytes: SecretBytes::zeros(KEYS_MAX * KEY_BYTES).expect("memory"),
            count: bytes.len(),
        };
        for (index, byte) in bytes.iter().enumerate() {
            keys.place(index).fill(*byte);
        }
        keys
    }

    /// The keys, the key for writing first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.count).map(|index| self.key(index))
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

/// Writes the key of 64 hexadecimal digits to its place. Returns false if the line is none.
fn decode(line: &[u8], key: &mut [u8]) -> bool {
    let digit = |byte: u8| (byte as char).to_digit(16);
    let pairs = line.chunks_exact(2);
    line.len() == 2 * KEY_BYTES
        && key.iter_mut().zip(pairs).all(|(byte, pair)| {
            let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else {
                return false;
            };
            *byte = (high << 4 | low) as u8;
            true
        })
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
        assert_eq!(keys.key(0), raw);
        let (first, second) = ("0A".repeat(32), "ff".repeat(32));
        let keys = read(format!("# new\n{first}\r\n\n  {second}").as_bytes()).unwrap();
        let found: Vec<&[u8]> = keys.iter().collect();
        assert_eq!(found, [&[10; 32][..], &[255; 32]]);
        assert_eq!(format!("{keys:?}"), "2 keys");
    }

    #[test]
    fn read_refuses_a_malformed_key_file_and_shows_no_key() {
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
