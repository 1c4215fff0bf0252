//! The files of a disk directory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use undercroft_contract::io::FileKind;

use crate::fork::Unshared;

/// The open files of one device (directory).
#[derive(Debug)]
pub struct DeviceFiles {
    /// Superblock and namespace table.
    pub superblock: Unshared<OwnedFd>,
    /// Records.
    pub table: Unshared<OwnedFd>,
    /// Payload slots.
    pub data: Unshared<OwnedFd>,
    /// Whether the data file bypasses the page cache.
    pub o_direct: bool,
    /// Keeps the directory locked for as long as an operation may write to the files.
    pub lock: Option<Arc<Unshared<File>>>,
}

impl DeviceFiles {
    /// The files of a directory that could not be opened yet: every operation on them fails.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn absent() -> io::Result<Self> {
        let open =
            || rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Self {
            superblock: open()?.into(),
            table: open()?.into(),
            data: open()?.into(),
            o_direct: true,
            lock: None,
        })
    }

    pub(super) fn get(&self, kind: FileKind) -> BorrowedFd<'_> {
        match kind {
            FileKind::Super => self.superblock.as_fd(),
            FileKind::Table => self.table.as_fd(),
            FileKind::Data => self.data.as_fd(),
        }
    }
}

/// Opens a file for reading and writing past the page cache (O_DIRECT), or through the page cache if the filesystem
/// lacks O_DIRECT. Returns whether the file bypasses the page cache. With `create`, makes the file if it is missing.
/// The file's mode is 0600 under every umask, a symbolic link is not followed, and a file that another user may reach
/// is refused.
pub fn open_file(path: &Path, create: bool) -> io::Result<(Unshared<OwnedFd>, bool)> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if create {
        flags |= OFlags::CREATE;
    }
    let mode = Mode::RUSR | Mode::WUSR;
    let (fd, direct) = match rustix::fs::open(path, flags | OFlags::DIRECT, mode) {
        Ok(fd) => (Unshared::new(fd), true),
        // The filesystem has no O_DIRECT.
        Err(Errno::INVAL) => (rustix::fs::open(path, flags, mode)?.into(), false),
        Err(errno) => return Err(errno.into()),
    };
    check_own_file(&fd)?;
    if Mode::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != mode {
        rustix::fs::fchmod(&fd, mode)?;
    }
    Ok((fd, direct))
}

/// Checks that an open file is a regular file of this user without a second name: no other name or user
/// sees the bytes written to the file.
///
/// # Errors
/// Names the kind of the file. The error has no number of the operating system.
pub fn check_own_file(fd: impl AsFd) -> io::Result<()> {
    let found = rustix::fs::fstat(fd)?;
    let uid = rustix::process::geteuid().as_raw();
    let reason = if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        "it is no regular file".to_owned()
    } else if found.st_uid != uid {
        format!(
            "it belongs to uid {}, this process runs as uid {uid}",
            found.st_uid
        )
    } else if found.st_nlink > 1 {
        format!("it has {} names (hard links)", found.st_nlink)
    } else {
        return Ok(());
    };
    Err(io::Error::other(reason))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_private_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        assert_eq!(
            open_file(&path, false).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        drop(open_file(&path, true).unwrap());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let (fd, _) = open_file(&path, false).unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o7777, 0o600);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open_file(&link, true).is_err());
    }

    #[test]
    fn a_file_with_two_names_is_refused_and_so_is_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        drop(open_file(&path, true).unwrap());
        let other = dir.path().join("other");
        std::fs::hard_link(&path, &other).unwrap();
        let refused = open_file(&other, false).unwrap_err();
        assert!(refused.to_string().contains("2 names"), "{refused}");
        std::fs::remove_file(&other).unwrap();
        open_file(&path, false).unwrap();
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let refused = check_own_file(&socket).unwrap_err();
        assert!(refused.to_string().contains("no regular file"), "{refused}");
    }

    #[test]
    fn files_bypass_the_page_cache_where_the_filesystem_can() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("data");
        std::fs::write(&path, "").unwrap();
        let can = rustix::fs::open(&path, OFlags::RDWR | OFlags::DIRECT, Mode::empty()).is_ok();
        for _ in 0..2 {
            let (fd, direct) = open_file(&path, true).unwrap();
            let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
            assert_eq!((direct, flags.contains(OFlags::DIRECT)), (can, can));
            std::fs::remove_file(&path).unwrap();
        }
    }
}
