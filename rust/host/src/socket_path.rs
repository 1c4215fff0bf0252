//! The default paths of sockets. Only this file reads the environment.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::random::random;

/// Directory of the sockets: `$XDG_RUNTIME_DIR/undercroft`, else `undercroft-<uid>` in the directory for temporary
/// files.
/// If another user has taken this name: another private directory beside it, with the same name each time.
pub fn default_socket_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("undercroft"),
        None => own_dir(&std::env::temp_dir()),
    }
}

/// The default socket of `undercroft serve` and `undercroft status`.
pub fn default_server_socket() -> PathBuf {
    default_socket_dir().join("serve.sock")
}

/// The path of a private directory in a directory to which all users may write. It may not exist yet.
fn own_dir(temporary: &Path) -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let name = format!("undercroft-{uid}");
    let usual = temporary.join(&name);
    if !is_taken(&usual, uid) {
        return usual;
    }
    let entries = fs::read_dir(temporary).into_iter().flatten().flatten();
    let beside = entries.filter(|entry| {
        let found = entry.file_name();
        let is_named_so = found
            .to_str()
            .is_some_and(|found| found.starts_with(&format!("{name}-")));
        is_named_so && is_private(&entry.path(), uid)
    });
    if let Some(first) = beside.map(|entry| entry.path()).min() {
        return first;
    }
    let new = temporary.join(format!("{name}-{:016x}", random()));
    match DirBuilder::new().mode(0o700).create(&new) {
        Ok(()) => new,
        // With the usual path, the error names the reason.
        Err(_) => usual,
    }
}

/// Whether something other than a directory of this user has the path.
fn is_taken(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| !found.is_dir() || found.uid() != uid)
}

fn is_private(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Takes a path before this user.
    type Take<'a> = Box<dyn Fn(&Path) + 'a>;

    #[test]
    fn a_name_that_somebody_else_has_taken_is_not_used() {
        let temporary = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let usual = temporary.path().join(format!("undercroft-{uid}"));
        assert_eq!(own_dir(temporary.path()), usual);
        let as_link = |path: &Path| symlink(elsewhere.path(), path).unwrap();
        let as_file = |path: &Path| fs::write(path, "").unwrap();
        let mut takes: Vec<Take<'_>> = vec![Box::new(as_link), Box::new(as_file)];
        if uid == 0 {
            // Only root can change a directory's owner.
            takes.push(Box::new(|path| {
                fs::create_dir(path).unwrap();
                std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
            }));
        }
        // A directory that other users may enter is not private either.
        let open = temporary.path().join(format!("undercroft-{uid}-0"));
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        let mut found = None;
        for take in takes {
            take(&usual);
            let dir = own_dir(temporary.path());
            assert!(is_private(&dir, uid) && dir != usual && dir != open);
            assert_eq!(*found.get_or_insert(dir.clone()), dir, "the same each time");
            if usual.is_dir() && !usual.is_symlink() {
                fs::remove_dir(&usual).unwrap();
            } else {
                fs::remove_file(&usual).unwrap();
            }
        }
    }
}
