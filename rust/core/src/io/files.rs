//! The files of a disk directory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::FileKind;

/// The open files of one device (directory).
#[derive(Debug)]
pub struct DeviceFiles {
    /// Superblock and namespace table.
    pub superblock: OwnedFd,
    /// Records.
    pub table: OwnedFd,
    /// Payload slots.
    pub data: OwnedFd,
    /// Whether the data file bypasses the page cache.
    pub o_direct: bool,
}

impl DeviceFiles {
    pub(super) fn get(&self, kind: FileKind) -> BorrowedFd<'_> {
        match kind {
            FileKind::Super => self.superblock.as_fd(),
            FileKind::Table => self.table.as_fd(),
            FileKind::Data => self.data.as_fd(),
        }
    }
}

/// Opens a file for reading and writing past the page cache (O_DIRECT), or through it where the
/// filesystem cannot; says which. With `create`, makes it if it is missing. Its mode is 0600
/// whatever the umask, and a symbolic link is not followed.
pub fn open_file(path: &Path, create: bool) -> io::Result<(OwnedFd, bool)> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if create {
        flags |= OFlags::CREATE;
    }
    let mode = Mode::RUSR | Mode::WUSR;
    let (fd, direct) = match rustix::fs::open(path, flags | OFlags::DIRECT, mode) {
        Ok(fd) => (fd, true),
        // The filesystem has no O_DIRECT.
        Err(Errno::INVAL) => (rustix::fs::open(path, flags, mode)?, false),
        Err(errno) => return Err(errno.into()),
    };
    if Mode::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != mode {
        rustix::fs::fchmod(&fd, mode)?;
    }
    Ok((fd, direct))
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
}
