//! The files of a directory, and how they are opened: files that another user may reach are refused.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use undercroft_contract::format::{
    BLOCK_BYTES, FORMAT_VERSION, NAMESPACES_MAX, Superblock, SuperblockError, namespace_offset,
};

use super::holder::holder;
use super::names::{DATA, LOCK, SUPER, SUPER_NEW, TABLE, TABLE_NEW, failed};
use crate::disk::StoreError;
use crate::fork::Unshared;
use crate::{DeviceFiles, check_own_file, open_file};

/// Begins the name of the directory in which a store of another format version is set aside.
const ASIDE: &str = "format-";

/// The state of a directory before anything is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The directory can become a store.
    Empty,
    /// A store of this format version.
    Store(Superblock),
    /// A store of another format version.
    OtherVersion(u32),
}

/// Makes a directory, and the missing directories above it.
pub(super) fn make(path: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed(path, "create the directory"))
}

/// Whether only this user can change the files in the directory.
pub(super) fn check_owner(path: &Path) -> Result<(), StoreError> {
    let found = fs::metadata(path).map_err(failed(path, "read its owner"))?;
    let uid = rustix::process::geteuid().as_raw();
    if found.uid() != uid {
        return Err(StoreError::Owner {
            path: path.to_owned(),
            owner: found.uid(),
            uid,
        });
    }
    if found.mode() & 0o022 != 0 {
        return Err(StoreError::Mode {
            path: path.to_owned(),
            mode: found.mode() & 0o7777,
        });
    }
    Ok(())
}

/// Whether a directory is empty or holds a store. Refuses a directory that holds other files. A store of the other kind,
/// encrypted or not, counts as a store of another version.
pub(super) fn find(path: &Path, encrypted: bool) -> Result<Found, StoreError> {
    note("look", "");
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(failed(path, "list it"))? {
        let entry = entry.map_err(failed(path, "list it"))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    let has = |name: &str| names.iter().any(|found| found == name);
    if has(SUPER) {
        let superblock = match read_superblock(path) {
            Err(StoreError::Version { found, .. }) => return Ok(Found::OtherVersion(found)),
            read => read?,
        };
        // A start that was killed may have moved a part of the files already.
        if superblock.encrypted != encrypted {
            let version = Superblock::version(superblock.encrypted);
            return Ok(Found::OtherVersion(version));
        }
        return match [TABLE, DATA].into_iter().find(|needed| !has(needed)) {
            Some(missing) => Err(damaged(path, &format!("the file {missing} is missing"))),
            None => Ok(Found::Store(superblock)),
        };
    }
    let ours = [SUPER_NEW, TABLE, TABLE_NEW, DATA, LOCK];
    // `lost+found` belongs to the filesystem, at the root of a disk; clients keep `weights.json`, and the engine's
    // process keeps `hours.json` in the directory.
    let others = ["lost+found", "weights.json", "hours.json", "hours.json.new"];
    let is_known = |name: &String| {
        ours.iter().chain(&others).any(|known| name == known) || name.starts_with(ASIDE)
    };
    if let Some(found) = names.iter().find(|name| !is_known(name)) {
        return Err(StoreError::Foreign {
            path: path.to_owned(),
            found: found.clone(),
        });
    }
    let records = fs::symlink_metadata(path.join(TABLE)).map_or(0, |found| found.len());
    // A start that was killed has left these files of a store that it removed.
    let is_removed = has(SUPER_NEW) || names.iter().any(|name| name.starts_with(ASIDE));
    if records > 0 && !is_removed {
        return Err(damaged(path, "the file super is missing"));
    }
    Ok(Found::Empty)
}

fn damaged(path: &Path, reason: &str) -> StoreError {
    StoreError::Damaged {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Why a file could not be opened.
fn refused(path: &Path, name: &'static str, source: io::Error) -> StoreError {
    let is_link = source.raw_os_error() == Some(Errno::LOOP.raw_os_error());
    let reason = match source.raw_os_error() {
        _ if is_link => "it is a symbolic link".to_owned(),
        None => source.to_string(),
        Some(_) => return failed(&path.join(name), "open it")(source),
    };
    StoreError::Untrusted {
        path: path.to_owned(),
        name,
        reason,
    }
}

/// Opens a file to read it.
pub(super) fn open_to_read(path: &Path, name: &'static str) -> Result<File, StoreError> {
    // With `NONBLOCK`, opening a pipe does not block; the check below refuses it.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path.join(name), flags, Mode::empty());
    let file = opened.map_err(|errno| refused(path, name, errno.into()))?;
    check_own_file(&file).map_err(|error| refused(path, name, error))?;
    Ok(file.into())
}

/// Opens a file to write it through the page cache; with `create`, makes it if it is missing.
pub(super) fn open_to_write(
    path: &Path,
    name: &'static str,
    create: bool,
) -> Result<OwnedFd, StoreError> {
    let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    if create {
        flags |= OFlags::CREATE;
    }
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = rustix::fs::open(path.join(name), flags, mode);
    let file = opened.map_err(|errno| refused(path, name, errno.into()))?;
    check_own_file(&file).map_err(|error| refused(path, name, error))?;
    // Sets the mode whatever the umask is.
    rustix::fs::fchmod(&file, mode).map_err(|errno| refused(path, name, errno.into()))?;
    Ok(file)
}

/// Opens a file for the engine. Also returns whether the file bypasses the page cache.
pub(super) fn open_for_io(
    path: &Path,
    name: &'static str,
    create: bool,
) -> Result<(Unshared<OwnedFd>, bool), StoreError> {
    open_file(&path.join(name), create).map_err(|error| refused(path, name, error))
}

/// Reads a whole file.
pub(super) fn read_file(path: &Path, name: &'static str) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    let mut file = open_to_read(path, name)?;
    file.read_to_end(&mut bytes)
        .map_err(failed(&path.join(name), "read it"))?;
    Ok(bytes)
}

pub(super) fn read_superblock(path: &Path) -> Result<Superblock, StoreError> {
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    let file = open_to_read(path, SUPER)?;
    file.take(BLOCK_BYTES as u64)
        .read_to_end(&mut block)
        .map_err(failed(path, "read the superblock"))?;
    Superblock::decode(&block).map_err(|error| match error {
        SuperblockError::NotOurs => StoreError::Foreign {
            path: path.to_owned(),
            found: format!("{SUPER} of another program"),
        },
        SuperblockError::Version(found) => StoreError::Version {
            path: path.to_owned(),
            found,
            supported: FORMAT_VERSION,
        },
        SuperblockError::Checksum => damaged(path, "its checksum does not match"),
        SuperblockError::Value => damaged(path, "impossible page size"),
    })
}

/// Locks a directory, for as long as the file is open in this process: forked children give it up.
pub(super) fn take_lock(path: &Path) -> Result<Unshared<File>, StoreError> {
    let mut lock = Unshared::new(File::from(open_to_write(path, LOCK, true)?));
    rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive)
        .map_err(|errno| not_locked(path, errno, &mut lock))?;
    // A write that is in memory only says nothing of the device.
    let written = write_owner(&lock, None).and_then(|()| lock.sync_all());
    written.map_err(failed(path, "write the lock file"))?;
    note("lock", LOCK);
    Ok(lock)
}

/// Fails if another process has the directory locked, which a frozen filesystem still answers. The next look reports any
/// other failure.
pub(super) fn refuse_in_use(path: &Path) -> Result<(), StoreError> {
    match lock_owner(path) {
        Err(in_use @ StoreError::InUse { .. }) => Err(in_use),
        _ => Ok(()),
    }
}

/// Fails with the process that has the directory locked, if there is one. Changes nothing.
pub(super) fn lock_owner(path: &Path) -> Result<(), StoreError> {
    let mut lock = match open_to_read(path, LOCK) {
        // The directory was never used.
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(());
        }
        opened => opened?,
    };
    // The lock is held only during this call: an engine that starts meanwhile tries again.
    rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockShared)
        .map_err(|errno| not_locked(path, errno, &mut lock))
}

/// Why a directory could not be locked.
fn not_locked(path: &Path, errno: Errno, lock: &mut File) -> StoreError {
    if errno != Errno::WOULDBLOCK {
        // Some network filesystems are mounted without locks.
        return failed(&path.join(LOCK), "lock it")(errno.into());
    }
    let mut owner = String::new();
    // If the read fails, the message still tells the user how to continue.
    let _ = lock.read_to_string(&mut owner);
    let mut lines = owner.lines();
    let named = lines.next().and_then(|pid| pid.parse().ok());
    StoreError::InUse {
        path: path.to_owned(),
        pid: holder(lock, named).unwrap_or(0),
        socket: lines.next().map(PathBuf::from),
    }
}

/// Writes the owner of the lock: the process, and the socket of its engine. A single write, so that a reader sees all
/// of it.
pub(super) fn write_owner(lock: &File, socket: Option<&Path>) -> io::Result<()> {
    let mut owner = format!("{}\n", std::process::id()).into_bytes();
    if let Some(socket) = socket {
        owner.extend_from_slice(socket.as_os_str().as_encoded_bytes());
        owner.push(b'\n');
    }
    lock.set_len(0)?;
    lock.write_all_at(&owner, 0)
}

/// The files of a store, for the IO engine.
pub(super) fn of_device(
    path: &Path,
    lock: &Arc<Unshared<File>>,
) -> Result<DeviceFiles, StoreError> {
    let (data, o_direct) = open_for_io(path, DATA, false)?;
    Ok(DeviceFiles {
        superblock: open_for_io(path, SUPER, false)?.0,
        table: open_for_io(path, TABLE, false)?.0,
        data,
        o_direct,
        lock: Some(Arc::clone(lock)),
    })
}

/// Makes a new store. The superblock is written last, and gets its name at once: a crash leaves either a
/// whole store or none.
pub(super) fn create(path: &Path, superblock: &Superblock) -> Result<(), StoreError> {
    let table = File::from(open_to_write(path, TABLE, true)?);
    table.set_len(0).map_err(failed(path, "empty the table"))?;
    open_to_write(path, DATA, true)?;
    let new = path.join(SUPER_NEW);
    // A crash may have left the file behind.
    let _ = fs::remove_file(&new);
    let file = File::from(open_to_write(path, SUPER_NEW, true)?);
    file.write_all_at(&superblock.encode(), 0)
        .map_err(failed(path, "write the superblock"))?;
    file.set_len(namespace_offset(NAMESPACES_MAX))
        .map_err(failed(path, "size the super file"))?;
    put_in_place(path, &file, (SUPER_NEW, SUPER))
}

/// Gives a new file its name, in place of an earlier file. After a crash there is the earlier file, or all of the new.
pub(super) fn put_in_place(
    path: &Path,
    file: &File,
    (new, name): (&'static str, &'static str),
) -> Result<(), StoreError> {
    sync(path, file, new)?;
    fs::rename(path.join(new), path.join(name)).map_err(failed(&path.join(new), "rename it"))?;
    note("rename", name);
    sync_directory(path)
}

/// Lets a test see the order of the calls that make a start safe against a loss of power and other starts.
fn note(_call: &'static str, _name: &'static str) {
    #[cfg(test)]
    tests::CALLS.with_borrow_mut(|calls| calls.push((_call, _name)));
}

/// Replaces the superblock of a store that gets pages of another size.
pub(super) fn replace_superblock(path: &Path, superblock: &Superblock) -> Result<(), StoreError> {
    let file = File::from(open_to_write(path, SUPER, false)?);
    file.write_all_at(&superblock.encode(), 0)
        .map_err(failed(path, "write the superblock"))?;
    sync(path, &file, SUPER)
}

/// Makes all that was written to a file of the directory durable.
pub(super) fn sync(path: &Path, file: &File, name: &'static str) -> Result<(), StoreError> {
    file.sync_all()
        .map_err(failed(&path.join(name), "sync it"))?;
    note("sync", name);
    Ok(())
}

/// A step of [`discard`].
#[derive(Clone, Copy, Debug)]
enum DiscardStep {
    Rename(&'static str, &'static str),
    Delete(&'static str),
}

/// The steps of [`discard`]. If a start is killed between two of them, the next start finds a store or none.
const DISCARD_STEPS: [DiscardStep; 4] = [
    DiscardStep::Rename(SUPER, SUPER_NEW),
    DiscardStep::Delete(TABLE),
    DiscardStep::Delete(DATA),
    DiscardStep::Delete(SUPER_NEW),
];

/// Deletes the files of a store. The superblock loses its name first: after a crash, the directory holds no store.
pub(super) fn discard(path: &Path) -> Result<(), StoreError> {
    for step in DISCARD_STEPS {
        discard_step(path, step)?;
    }
    sync_directory(path)
}

fn discard_step(path: &Path, step: DiscardStep) -> Result<(), StoreError> {
    let done = match step {
        DiscardStep::Rename(from, to) => fs::rename(path.join(from), path.join(to)),
        DiscardStep::Delete(name) => fs::remove_file(path.join(name)),
    };
    match done {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed(path, "delete the store")(error))
        }
        _ => Ok(()),
    }
}

/// Where a store of a format version is set aside.
pub(super) fn aside(path: &Path, version: u32) -> PathBuf {
    path.join(format!("{ASIDE}{version}"))
}

/// Moves the files of a store into a directory of its own in `path`, in place of a store that was set aside earlier.
/// The superblock is moved last: after a crash, the next start moves the remaining files.
pub(super) fn set_aside(path: &Path, version: u32) -> Result<(), StoreError> {
    let aside = aside(path, version);
    make(&aside)?;
    if aside.join(SUPER).exists() {
        discard(&aside)?;
    }
    for name in [TABLE, DATA, SUPER] {
        match fs::rename(path.join(name), aside.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed(
                    path,
                    "set aside the store of another format version",
                )(error));
            }
            _ => {}
        }
    }
    sync_directory(&aside)?;
    sync_directory(path)
}

/// Bytes that the files of a store of any version take.
pub(super) fn bytes_of(path: &Path) -> u64 {
    let files = [SUPER, TABLE, DATA].map(|name| fs::symlink_metadata(path.join(name)));
    let found = files.into_iter().flatten();
    found.map(|found| found.blocks() * 512).sum()
}

fn sync_directory(path: &Path) -> Result<(), StoreError> {
    let dir = File::open(path).map_err(failed(path, "open the directory"))?;
    dir.sync_all().map_err(failed(path, "sync the directory"))?;
    note("sync", "");
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::RefCell;

    use undercroft_contract::format::NamespaceEntry;
    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};

    use super::super::open::drop_namespace;
    use super::*;

    thread_local! {
        /// The calls of this thread: a call, and the file. The directory has no name.
        pub(in crate::disk) static CALLS: RefCell<Vec<(&'static str, &'static str)>> =
            const { RefCell::new(Vec::new()) };
    }

    const SUPERBLOCK: Superblock = Superblock {
        store_id: 1,
        page_bytes: 1 << 20,
        encrypted: false,
    };

    #[test]
    fn a_start_that_is_killed_while_it_discards_a_store_leaves_no_damaged_store() {
        for steps in 0..=DISCARD_STEPS.len() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path();
            create(path, &SUPERBLOCK).unwrap();
            fs::write(path.join(TABLE), [1; BLOCK_BYTES]).unwrap();
            for step in &DISCARD_STEPS[..steps] {
                discard_step(path, *step).unwrap();
            }
            let expected = match steps {
                0 => Found::Store(SUPERBLOCK),
                _ => Found::Empty,
            };
            assert_eq!(find(path, false).unwrap(), expected, "after {steps} steps");
            create(path, &SUPERBLOCK).unwrap();
            assert_eq!(fs::metadata(path.join(TABLE)).unwrap().len(), 0);
            assert_eq!(find(path, false).unwrap(), Found::Store(SUPERBLOCK));
        }
    }

    #[test]
    fn a_new_store_has_its_name_only_when_it_is_durable() {
        let dir = tempfile::tempdir().unwrap();
        CALLS.take();
        create(dir.path(), &SUPERBLOCK).unwrap();
        let expected = [("sync", SUPER_NEW), ("rename", SUPER), ("sync", "")];
        assert_eq!(CALLS.take(), expected);
    }

    #[test]
    fn changes_to_an_unused_store_are_durable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        create(path, &SUPERBLOCK).unwrap();
        CALLS.take();
        replace_superblock(path, &SUPERBLOCK).unwrap();
        assert_eq!(CALLS.take(), [("sync", SUPER)]);
        let entry = NamespaceEntry {
            instance: 1,
            spec: NamespaceSpec::uniform("{}", 16, &[(GroupKind::Full, 4096)]),
        };
        let digest = entry.spec.digest().to_hex();
        let file = File::options().write(true).open(path.join(SUPER)).unwrap();
        file.write_all_at(&entry.encode().unwrap(), namespace_offset(0))
            .unwrap();
        CALLS.take();
        assert_eq!(drop_namespace(path, &digest).unwrap(), 1);
        let calls = CALLS.take();
        assert_eq!(calls.last(), Some(&("sync", SUPER)), "{calls:?}");
        assert_eq!(drop_namespace(path, &digest).unwrap(), 0);
    }

    #[test]
    fn a_start_looks_at_the_store_again_when_it_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        // Another process may have made a store between a start's first look and its lock.
        for _ in 0..2 {
            CALLS.take();
            drop(crate::disk::open::open(&path, 64 << 20, 1).unwrap());
            let calls = CALLS.take();
            let last = |call| calls.iter().rposition(|&(of, _)| of == call);
            assert!(
                last("lock").is_some() && last("look") > last("lock"),
                "{calls:?}"
            );
        }
    }

    #[test]
    fn a_filesystem_without_locks_is_no_directory_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let mut lock = take_lock(dir.path()).unwrap();
        let refused = lock_owner(dir.path()).unwrap_err();
        assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
        for errno in [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP] {
            let refused = not_locked(dir.path(), errno, &mut lock);
            assert!(
                refused.may_pass() && refused.to_string().contains("lock"),
                "{refused}"
            );
        }
    }
}
