//! Opening a disk directory: ownership, lock, format, space. The only part of the tier, beside the
//! IO engines, that talks to the operating system.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation};

use super::format::{BLOCK_BYTES, FORMAT_VERSION, NAMESPACES_MAX, PLACEHOLDER, PLACEHOLDERS_SHARE};
use super::format::{RECORD_BYTES, Record, Superblock, SuperblockError, namespace_offset};
use crate::disk::DeviceImage;
use crate::error::StoreError;
use crate::io::{DeviceFiles, open_file};
use crate::slots::{SLOT_ALIGN, page_bytes_for};

/// Smallest `disk_capacity`, in bytes.
pub const CAPACITY_MIN: u64 = 16 << 20;

/// Largest data file, in bytes: slots are counted in 32 bits, in units of [`SLOT_ALIGN`]. A larger
/// capacity stays unused beyond it.
pub const CAPACITY_MAX: u64 = crate::slots::SLOT_ALIGN << 32;
/// One part in this many of a capacity is for records and namespaces: enough for a record of every
/// slot of the least size, so that `disk_capacity` holds for all files together.
const META_SHARE: u64 = 30;

const SUPER: &str = "super";
const SUPER_NEW: &str = "super.new";
const TABLE: &str = "table";
const TABLE_NEW: &str = "table.new";
const DATA: &str = "data";
const LOCK: &str = "lock";

/// An open directory. It is locked as long as this lives.
#[derive(Debug)]
pub struct Directory {
    /// Where it is.
    pub path: PathBuf,
    /// For the IO engine.
    pub files: DeviceFiles,
    /// For `Engine::attach_disks`.
    pub image: DeviceImage,
    lock: File,
}

impl Directory {
    /// Splits off what keeps the directory locked.
    pub fn into_parts(self) -> (DeviceFiles, DeviceImage, DirectoryLock) {
        let files = [
            (SUPER, self.files.superblock.try_clone()),
            (TABLE, self.files.table.try_clone()),
            (DATA, self.files.data.try_clone()),
        ];
        let lock = DirectoryLock {
            // Without one it cannot be said that it is missing; nothing else is lost.
            files: files
                .into_iter()
                .filter_map(|(name, file)| Some((name, file.ok()?)))
                .collect(),
            path: self.path,
            lock: self.lock,
        };
        (self.files, self.image, lock)
    }
}

/// Keeps a directory locked.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    /// Names and descriptors of the files that are open.
    files: Vec<(&'static str, OwnedFd)>,
    lock: File,
}

impl DirectoryLock {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes into the lock file at which socket the owner serves others.
    ///
    /// # Errors
    /// If the file cannot be written: others then do not find the socket.
    pub fn publish(&self, socket: &Path) -> std::io::Result<()> {
        write_owner(&self.lock, Some(socket))
    }

    /// Says so if a file was deleted or replaced since it was opened: what is written now is lost when
    /// the engine ends. Asks for the open files, in memory, and never for their names on disk.
    pub fn missing_file(&self) -> Option<String> {
        let gone = |(_, file): &&(&str, OwnedFd)| {
            rustix::fs::fstat(file).is_ok_and(|found| found.st_nlink == 0)
        };
        let (name, _) = self.files.iter().find(gone)?;
        Some(format!("the file {name} was deleted or replaced"))
    }
}

/// A directory's contents, read without changing it.
#[derive(Debug)]
pub struct Contents {
    /// The superblock.
    pub superblock: Superblock,
    /// Superblock and namespace table.
    pub super_bytes: Vec<u8>,
    /// Records.
    pub table_bytes: Vec<u8>,
    /// The data file.
    pub data: File,
    /// Its size.
    pub data_bytes: u64,
}

fn failed<'a>(
    path: &'a Path,
    action: &'static str,
) -> impl FnOnce(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io {
        path: path.to_owned(),
        action,
        hint: match source.kind() {
            std::io::ErrorKind::PermissionDenied => "; give this user read and write access to it",
            std::io::ErrorKind::ReadOnlyFilesystem => "; mount the filesystem writable",
            std::io::ErrorKind::StorageFull => "; free space there, or lower disk_capacity",
            _ => "",
        },
        source,
    }
}

/// Opens a directory for an engine, making it if it is missing or empty. `store_id` names a new one.
///
/// # Errors
/// If it is in use, foreign, damaged, of another version, of another user, or there is no space.
/// Nothing is changed then.
pub fn open(path: &Path, capacity: u64, store_id: u64) -> Result<Directory, StoreError> {
    if capacity < CAPACITY_MIN {
        return Err(StoreError::TooSmall {
            path: path.to_owned(),
            capacity,
            minimum: CAPACITY_MIN,
        });
    }
    fs::create_dir_all(path).map_err(failed(path, "create the directory"))?;
    check_owner(path)?;
    if !check_names(path)? {
        read_superblock(path)?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .map_err(failed(path, "make it private"))?;
    let lock = take_lock(path)?;
    // Again: another process may have made it, used it and left.
    let is_new = check_names(path)?;
    check_space(path, capacity)?;
    let data_bytes = (capacity - capacity / META_SHARE).min(CAPACITY_MAX);
    let superblock = if is_new {
        let page_bytes = page_bytes_for(data_bytes);
        let superblock = Superblock {
            store_id,
            page_bytes,
        };
        create(path, &superblock)?;
        superblock
    } else {
        read_superblock(path)?
    };
    let data_bytes = data_bytes / superblock.page_bytes * superblock.page_bytes;
    if data_bytes == 0 {
        return Err(StoreError::TooSmall {
            path: path.to_owned(),
            capacity,
            minimum: superblock.page_bytes * 2,
        });
    }
    size_data(path, data_bytes)?;
    fit_table(path, data_bytes)?;
    let read = |name: &str| fs::read(path.join(name)).map_err(failed(path, "read its tables"));
    let image = DeviceImage {
        capacity: data_bytes,
        page_bytes: superblock.page_bytes,
        super_bytes: read(SUPER)?,
        table_bytes: read(TABLE)?,
    };
    let open_one =
        |name: &str| open_file(&path.join(name), false).map_err(failed(path, "open its files"));
    let (data, o_direct) = open_one(DATA)?;
    let files = DeviceFiles {
        superblock: open_one(SUPER)?.0,
        table: open_one(TABLE)?.0,
        data,
        o_direct,
    };
    Ok(Directory {
        path: path.to_owned(),
        files,
        image,
        lock,
    })
}

/// Reads a store without changing it, for inspection. It may be in use: what is then read is a
/// mixture of moments.
///
/// # Errors
/// As [`open`].
pub fn read(path: &Path) -> Result<Contents, StoreError> {
    let superblock = read_superblock(path)?;
    let data = File::open(path.join(DATA)).map_err(failed(path, "open the data file"))?;
    Ok(Contents {
        superblock,
        super_bytes: fs::read(path.join(SUPER)).map_err(failed(path, "read the super file"))?,
        table_bytes: fs::read(path.join(TABLE)).map_err(failed(path, "read the table"))?,
        data_bytes: data
            .metadata()
            .map_err(failed(path, "measure the data file"))?
            .len(),
        data,
    })
}

/// The descriptions in the namespace table of a store, which may be in use. Reads neither records nor payloads.
///
/// # Errors
/// As [`read`].
pub fn read_descriptions(path: &Path) -> Result<Vec<String>, StoreError> {
    read_superblock(path)?;
    let bytes = fs::read(path.join(SUPER)).map_err(failed(path, "read the super file"))?;
    let entries = (0..NAMESPACES_MAX).filter_map(|index| {
        let at = usize::try_from(namespace_offset(index)).ok()?;
        let end = bytes.len().min(at + super::format::NAMESPACE_BYTES);
        super::format::NamespaceEntry::decode(bytes.get(at..end)?)
    });
    Ok(entries.map(|entry| entry.spec.description).collect())
}

/// Removes a namespace from a store that is not in use: its entry is cleared, so that its records
/// lead nowhere. `digest` is hexadecimal, in full or a prefix. Returns how many were removed.
///
/// # Errors
/// As [`open`]; the store must not be in use.
pub fn drop_namespace(path: &Path, digest: &str) -> Result<usize, StoreError> {
    let contents = read(path)?;
    let _lock = take_lock(path)?;
    let file = File::options()
        .write(true)
        .open(path.join(SUPER))
        .map_err(failed(path, "open the super file"))?;
    let mut dropped = 0;
    for index in 0..NAMESPACES_MAX {
        let at = namespace_offset(index);
        let entry = usize::try_from(at)
            .ok()
            .and_then(|at| contents.super_bytes.get(at..));
        let Some(found) = entry.and_then(super::format::NamespaceEntry::decode) else {
            continue;
        };
        if found.spec.digest().to_hex().starts_with(digest) {
            file.write_all_at(&[0; BLOCK_BYTES], at)
                .map_err(failed(path, "clear an entry"))?;
            dropped += 1;
        }
    }
    file.sync_all()
        .map_err(failed(path, "sync the super file"))?;
    Ok(dropped)
}

fn check_owner(path: &Path) -> Result<(), StoreError> {
    let owner = fs::metadata(path)
        .map_err(failed(path, "read its owner"))?
        .uid();
    let uid = rustix::process::getuid().as_raw();
    if owner != uid && uid != 0 {
        return Err(StoreError::Owner {
            path: path.to_owned(),
            owner,
            uid,
        });
    }
    Ok(())
}

/// Whether the directory is to be made a store. Refuses one that holds something else.
fn check_names(path: &Path) -> Result<bool, StoreError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(failed(path, "list it"))? {
        let entry = entry.map_err(failed(path, "list it"))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    let ours = [SUPER, SUPER_NEW, TABLE, TABLE_NEW, DATA, LOCK];
    // A filesystem's own directory, at the root of a disk of its own; and what clients keep here.
    let others = ["lost+found", "weights.json"];
    let is_foreign = |name: &&String| !ours.iter().chain(&others).any(|known| name == known);
    let foreign = names.iter().find(is_foreign);
    if names.iter().any(|name| name == SUPER) {
        for needed in [TABLE, DATA] {
            if !names.iter().any(|name| name == needed) {
                let reason = format!("the file {needed} is missing");
                return Err(StoreError::Damaged {
                    path: path.to_owned(),
                    reason,
                });
            }
        }
        return Ok(false);
    }
    if let Some(found) = foreign {
        return Err(StoreError::Foreign {
            path: path.to_owned(),
            found: found.clone(),
        });
    }
    let records = fs::metadata(path.join(TABLE)).map_or(0, |found| found.len());
    if records > 0 {
        let reason = "the file super is missing".to_owned();
        return Err(StoreError::Damaged {
            path: path.to_owned(),
            reason,
        });
    }
    Ok(true)
}

fn read_superblock(path: &Path) -> Result<Superblock, StoreError> {
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    let file = File::open(path.join(SUPER)).map_err(failed(path, "open the super file"))?;
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
        SuperblockError::Checksum => StoreError::Damaged {
            path: path.to_owned(),
            reason: "its checksum does not match".to_owned(),
        },
        SuperblockError::Value => StoreError::Damaged {
            path: path.to_owned(),
            reason: "impossible page size".to_owned(),
        },
    })
}

fn take_lock(path: &Path) -> Result<File, StoreError> {
    let mut lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path.join(LOCK))
        .map_err(failed(path, "open the lock file"))?;
    lock.set_permissions(fs::Permissions::from_mode(0o600))
        .map_err(failed(path, "make the lock file private"))?;
    if rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut owner = String::new();
        // A courtesy: without it the message still says what to do.
        let _ = lock.read_to_string(&mut owner);
        let mut lines = owner.lines();
        return Err(StoreError::InUse {
            path: path.to_owned(),
            pid: lines.next().and_then(|pid| pid.parse().ok()).unwrap_or(0),
            socket: lines.next().map(PathBuf::from),
        });
    }
    write_owner(&lock, None).map_err(failed(path, "write the lock file"))?;
    Ok(lock)
}

/// Writes who owns the lock: the process, and the socket of its engine. In one write, so that a reader
/// sees all of it.
fn write_owner(lock: &File, socket: Option<&Path>) -> std::io::Result<()> {
    let mut owner = format!("{}\n", std::process::id()).into_bytes();
    if let Some(socket) = socket {
        owner.extend_from_slice(socket.as_os_str().as_encoded_bytes());
        owner.push(b'\n');
    }
    lock.set_len(0)?;
    lock.write_all_at(&owner, 0)
}

/// Makes a new store. The superblock comes last, under its name at once: what a crash leaves behind
/// is either a store or nothing.
fn create(path: &Path, superblock: &Superblock) -> Result<(), StoreError> {
    let action = failed;
    for name in [TABLE, DATA] {
        open_file(&path.join(name), true).map_err(action(path, "create its files"))?;
    }
    let new = path.join(SUPER_NEW);
    open_file(&new, true).map_err(action(path, "create the super file"))?;
    let file = File::options()
        .write(true)
        .open(&new)
        .map_err(action(path, "open the super file"))?;
    file.write_all_at(&superblock.encode(), 0)
        .map_err(action(path, "write the superblock"))?;
    file.set_len(namespace_offset(NAMESPACES_MAX))
        .map_err(action(path, "size the super file"))?;
    file.sync_all()
        .map_err(action(path, "sync the superblock"))?;
    fs::rename(&new, path.join(SUPER)).map_err(action(path, "name the super file"))?;
    let dir = File::open(path).map_err(action(path, "open the directory"))?;
    dir.sync_all().map_err(action(path, "sync the directory"))
}

/// Refuses a capacity that would fill the filesystem.
fn check_space(path: &Path, capacity: u64) -> Result<(), StoreError> {
    // What the store takes already is part of its capacity.
    let held = fs::metadata(path.join(DATA)).map_or(0, |found| found.blocks() * 512);
    let statvfs = rustix::fs::statvfs(path)
        .map_err(|errno| failed(path, "measure free space")(errno.into()))?;
    let total = statvfs.f_blocks * statvfs.f_frsize;
    let reserve = (total / 20).min(4 << 30);
    let available = (statvfs.f_bavail * statvfs.f_frsize + held).saturating_sub(reserve);
    if capacity > available {
        return Err(StoreError::NoSpace {
            path: path.to_owned(),
            capacity,
            available,
            reserve,
        });
    }
    Ok(())
}

/// Gives the data file its size, with its blocks, so that writing never fills the filesystem.
fn size_data(path: &Path, data_bytes: u64) -> Result<(), StoreError> {
    let action = failed;
    let file = File::options()
        .write(true)
        .open(path.join(DATA))
        .map_err(action(path, "open the data file"))?;
    let found = file
        .metadata()
        .map_err(action(path, "measure the data file"))?;
    if found.len() > data_bytes {
        file.set_len(data_bytes)
            .map_err(action(path, "shrink the data file"))?;
    }
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, data_bytes) {
        Ok(()) => Ok(()),
        // The filesystem cannot: the file is sparse, and a full one shows as a failed write.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file
            .set_len(data_bytes)
            .map_err(action(path, "size the data file")),
        Err(errno) => Err(failed(path, "allocate the data file")(errno.into())),
    }
}

/// Packs the records of what still fits, if the table is longer than a data file of this size can
/// need: after the capacity was lowered. A crash leaves the old table or the new one.
fn fit_table(path: &Path, data_bytes: u64) -> Result<(), StoreError> {
    let slots = data_bytes / SLOT_ALIGN;
    let most = (slots + slots / PLACEHOLDERS_SHARE) * RECORD_BYTES as u64;
    let action = failed;
    let table = fs::metadata(path.join(TABLE)).map_err(action(path, "measure the table"))?;
    if table.len() <= most {
        return Ok(());
    }
    let old = fs::read(path.join(TABLE)).map_err(action(path, "read the table"))?;
    // Of two records of the same slot, the later one.
    let mut kept: BTreeMap<u32, (u64, &[u8])> = BTreeMap::new();
    let mut placeholders: Vec<&[u8]> = Vec::new();
    for bytes in old.chunks_exact(RECORD_BYTES) {
        let Some(record) = Record::decode(bytes) else {
            continue;
        };
        if record.group == PLACEHOLDER {
            placeholders.push(bytes);
            continue;
        }
        let end = u64::from(record.slot) * SLOT_ALIGN + u64::from(record.payload_bytes);
        let later = kept
            .get(&record.slot)
            .is_none_or(|(seq, _)| *seq < record.seq);
        if end <= data_bytes && later {
            kept.insert(record.slot, (record.seq, bytes));
        }
    }
    let mut new: Vec<u8> = kept
        .values()
        .map(|(_, bytes)| *bytes)
        .chain(placeholders)
        .flatten()
        .copied()
        .collect();
    new.resize(new.len().next_multiple_of(BLOCK_BYTES), 0);
    let at = path.join(TABLE_NEW);
    open_file(&at, true).map_err(action(path, "create the packed table"))?;
    let file = File::options()
        .write(true)
        .truncate(true)
        .open(&at)
        .map_err(action(path, "open the packed table"))?;
    file.write_all_at(&new, 0)
        .map_err(action(path, "write the packed table"))?;
    file.sync_all()
        .map_err(action(path, "sync the packed table"))?;
    fs::rename(&at, path.join(TABLE)).map_err(action(path, "name the packed table"))
}
