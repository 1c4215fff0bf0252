//! Opening a disk directory: ownership, lock, format, space. The only part of the tier, beside the
//! IO engines, that talks to the operating system.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use undercroft_contract::format::{
    BLOCK_BYTES, FORMAT_VERSION, NAMESPACES_MAX, Superblock, namespace_offset,
};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::pages::unit_bytes_for;
use undercroft_contract::size::Bytes;

use super::files::Found;
use super::files::{self, open_for_io, open_to_read, open_to_write, read_file, read_superblock};
use super::fit_table::fit_table;
use super::holes::{fill_holes, space_of};
use super::names::{DATA, LOCK, SUPER, TABLE, failed};
use super::space::{Filesystem, KeptFiles, Sizing, short_of_space, size};
use super::table::TableFile;
use super::way;
use crate::DeviceFiles;
use crate::disk::StoreError;
use crate::fork::Unshared;

pub use super::space::Capacity;

/// How long an answer from the table of mounts is used: its length depends on the machine.
const MOUNTS_FRESH: Duration = Duration::from_secs(1);

/// The treatment of a store of another format version, which cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnOtherVersion {
    /// The store is deleted: a cache can be filled again.
    #[default]
    Discard,
    /// The store is moved into a directory of its own, where it still takes space.
    SetAside,
    /// The directory is not used.
    Refuse,
}

/// The options of opening a directory.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// The most bytes that the directory's files may hold together.
    pub capacity: Capacity,
    /// The treatment of a store of another format version.
    pub on_other_version: OnOtherVersion,
    /// Whether payloads are encrypted: a store of the other kind counts as a store of another version.
    pub encrypted: bool,
}

impl From<u64> for StoreOptions {
    fn from(capacity: u64) -> Self {
        Self {
            capacity: Capacity::Bytes(capacity),
            on_other_version: OnOtherVersion::default(),
            encrypted: false,
        }
    }
}

/// Why a store of this version is not used.
fn strangeness(version: u32, options: StoreOptions) -> String {
    if version == Superblock::version(!options.encrypted) {
        let how = if options.encrypted {
            "is not encrypted, and key_file is set"
        } else {
            "is encrypted, and key_file is not set"
        };
        return how.to_owned();
    }
    format!("had format version {version}, which this undercroft does not read")
}

/// The effects that opening a directory would have.
#[derive(Clone, Debug, Serialize)]
pub struct Examination {
    /// Size of the data file, in bytes.
    pub capacity: u64,
    /// Whether the directory holds a store, and a start keeps it.
    pub is_kept: bool,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// An open directory. It is locked as long as this, or its files, or its lock lives.
///
/// ```
/// use undercroft_contract::pages::CAPACITY_MIN;
/// use undercroft_io::disk::{StoreError, open};
///
/// let parent = tempfile::tempdir()?;
/// let path = parent.path().join("cache");
/// let store_id = 42;
/// let directory = open::open(&path, CAPACITY_MIN, store_id)?;
/// // Two engines would overwrite each other's slots.
/// let refused = open::open(&path, CAPACITY_MIN, store_id).unwrap_err();
/// assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
/// drop(directory);
/// assert!(open::open(&path, CAPACITY_MIN, store_id).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Directory {
    /// The directory's path.
    pub path: PathBuf,
    /// The files, for the IO engine.
    pub files: DeviceFiles,
    /// The image, for `Engine::attach_disks`.
    pub image: DeviceImage,
    /// Notes for the operator about how the directory was opened.
    pub notes: Vec<String>,
    lock: Arc<Unshared<File>>,
}

impl Directory {
    /// Empties the store, for an engine that already runs and knows none of its blocks.
    ///
    /// # Errors
    /// If the store cannot be emptied.
    pub fn empty(mut self) -> Result<Self, StoreError> {
        let superblock = read_superblock(&self.path)?;
        files::create(&self.path, &superblock)?;
        // The superblock's file is a new file.
        self.files.superblock = open_for_io(&self.path, SUPER, false)?.0;
        self.image.super_bytes = superblock.encode().into();
        self.image.table = Vec::new().into();
        Ok(self)
    }

    /// Splits off the lock that keeps other processes from using the directory, as the files do.
    pub fn into_parts(self) -> (DeviceFiles, DeviceImage, DirectoryLock) {
        let files = [
            (SUPER, self.files.superblock.try_clone()),
            (TABLE, self.files.table.try_clone()),
            (DATA, self.files.data.try_clone()),
            (LOCK, self.lock.try_clone().map(OwnedFd::from)),
        ];
        let lock = DirectoryLock {
            // Without a descriptor the engine cannot tell that the file is missing; everything else
            // works.
            files: files
                .into_iter()
                .filter_map(|(name, file)| Some((name, file.ok()?.into())))
                .collect(),
            path: self.path,
            lock: self.lock,
            unmounted: Mutex::default(),
        };
        (self.files, self.image, lock)
    }
}

/// Keeps a directory locked.
#[derive(Debug)]
pub struct DirectoryLock {
    path: PathBuf,
    /// Names and descriptors of the files that are open.
    files: Vec<(&'static str, Unshared<OwnedFd>)>,
    lock: Arc<Unshared<File>>,
    /// Whether the filesystem was unmounted, and when this was looked up.
    unmounted: Mutex<Option<(Instant, bool)>>,
}

impl DirectoryLock {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the socket at which the owner serves clients into the lock file.
    ///
    /// # Errors
    /// If the file cannot be written: clients then do not find the socket.
    pub fn publish(&self, socket: &Path) -> std::io::Result<()> {
        files::write_owner(&self.lock, Some(socket))
    }

    /// Returns a message if a file was deleted or replaced since it was opened, or its filesystem was unmounted: bytes
    /// written from now on are lost when the engine ends, or another process may use the directory, too. Examines the
    /// open files and the table of mounts, in memory, and never looks up the names of the files on disk.
    pub fn missing_file(&self) -> Option<String> {
        let gone = |(_, file): &&(&str, Unshared<OwnedFd>)| {
            rustix::fs::fstat(file).is_ok_and(|found| found.st_nlink == 0)
        };
        if let Some((name, _)) = self.files.iter().find(gone) {
            return Some(format!("the file {name} was deleted or replaced"));
        }
        let gone = "its filesystem was unmounted while it was in use (umount -l)";
        self.is_unmounted().then(|| gone.to_owned())
    }

    fn is_unmounted(&self) -> bool {
        // A panic leaves the last answer.
        let mut looked = self
            .unmounted
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match *looked {
            Some((at, answer)) if at.elapsed() < MOUNTS_FRESH => answer,
            _ => {
                let answer = is_unmounted(&self.lock).unwrap_or(false);
                *looked = Some((Instant::now(), answer));
                answer
            }
        }
    }
}

/// Whether the mount through which a file was opened is no longer in the table of mounts; `None` if the kernel does not
/// tell.
fn is_unmounted(file: &File) -> Option<bool> {
    let number = file.as_raw_fd();
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok()?;
    let of_file = about
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut ids = mounts.lines().filter_map(|line| line.split(' ').next());
    Some(ids.all(|id| id != of_file.trim()))
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
    /// Size of the data file.
    pub data_bytes: u64,
}

/// Opens a directory for an engine. Makes a store if the directory is missing or empty; `store_id` names it.
///
/// # Errors
/// If the directory is in use, foreign, damaged, of another version or of another user, or if there is no space.
/// Nothing is changed then.
pub fn open(
    path: &Path,
    options: impl Into<StoreOptions>,
    store_id: u64,
) -> Result<Directory, StoreError> {
    open_if(path, options.into(), store_id, || true)
}

/// Like [`open`]. Asks `is_wanted` when the directory is locked and the filesystem has taken a write, before anything
/// that changes a store or may take long: the caller may have given the directory up.
///
/// # Errors
/// As [`open`], and an error that nothing reads if the directory is not wanted.
pub fn open_if(
    path: &Path,
    options: StoreOptions,
    store_id: u64,
    is_wanted: impl FnOnce() -> bool,
) -> Result<Directory, StoreError> {
    files::refuse_in_use(path)?;
    let of_way = way::check(path)?;
    files::make(path)?;
    files::check_owner(path)?;
    // The first look changes nothing, so a wrong option leaves the files as they were.
    plan(path, files::find(path, options.encrypted)?, options)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .map_err(failed(path, "make it private"))?;
    let lock = Arc::new(files::take_lock(path)?);
    if !is_wanted() {
        let given_up = std::io::ErrorKind::Interrupted.into();
        return Err(failed(path, "open it")(given_up));
    }
    // The second look, under the lock: another process may have made a store, used it and ended.
    let found = files::find(path, options.encrypted)?;
    let (sizing, mut notes) = plan(path, found, options)?;
    notes.extend(of_way);
    if let Found::OtherVersion(version) = found {
        match options.on_other_version {
            OnOtherVersion::SetAside => files::set_aside(path, version)?,
            OnOtherVersion::Discard | OnOtherVersion::Refuse => files::discard(path)?,
        }
    }
    let superblock = superblock(path, found, &sizing, (store_id, options.encrypted))?;
    let (data_bytes, holes) = match size_data(path, &sizing) {
        Ok(sized) => sized,
        Err(error) => {
            // Frees the space of the new files: an engine may try again as long as the filesystem is full.
            if !matches!(found, Found::Store(_)) {
                let _ = files::discard(path);
            }
            return Err(error);
        }
    };
    if data_bytes < sizing.data_bytes {
        notes.push(format!(
            "disk_path {} keeps its size: the filesystem cannot give it {}",
            path.display(),
            Bytes(sizing.data_bytes)
        ));
    }
    let lost: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
    if lost > 0 {
        notes.push(short_of_space(path, lost, data_bytes));
    }
    fit_table(path, data_bytes)?;
    let image = DeviceImage {
        capacity: data_bytes,
        page_bytes: superblock.page_bytes,
        holes,
        super_bytes: read_file(path, SUPER)?,
        table: Box::new(TableFile(open_to_read(path, TABLE)?)),
    };
    Ok(Directory {
        path: path.to_owned(),
        files: files::of_device(path, &lock)?,
        image,
        notes,
        lock,
    })
}

/// The effects that [`open`] would have now. Changes nothing.
///
/// # Errors
/// As [`open`].
pub fn examine(path: &Path, options: StoreOptions) -> Result<Examination, StoreError> {
    use rustix::fs::Access;
    let place = nearest(path);
    let found = if place == path {
        files::check_owner(path)?;
        let found = files::find(path, options.encrypted)?;
        files::lock_owner(path)?;
        found
    } else {
        Found::Empty
    };
    rustix::fs::access(place, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|errno| failed(place, "write there")(errno.into()))?;
    let (sizing, mut notes) = plan(path, found, options)?;
    notes.extend(way::check(path)?);
    let Sizing {
        data_bytes, lost, ..
    } = sizing;
    if lost > 0 {
        notes.push(short_of_space(path, lost, data_bytes));
    }
    Ok(Examination {
        capacity: data_bytes - lost,
        is_kept: matches!(found, Found::Store(_)),
        notes,
    })
}

/// The nearest directory that exists: one that is made later lies on its filesystem.
fn nearest(path: &Path) -> &Path {
    let exists = |place: &&Path| place.exists();
    path.ancestors().find(exists).unwrap_or(Path::new("/"))
}

/// The size that the store will have, with notes for the operator.
fn plan(
    path: &Path,
    found: Found,
    options: StoreOptions,
) -> Result<(Sizing, Vec<String>), StoreError> {
    let mut notes = Vec::new();
    let measure = "measure its files";
    let held = match (found, options.on_other_version) {
        (Found::Empty, _) => KeptFiles::discarded(files::bytes_of(path)),
        (Found::Store(superblock), _) => {
            KeptFiles::of(path, superblock.page_bytes).map_err(failed(path, measure))?
        }
        // It differs in the encryption alone, for which the operator has another remedy.
        (Found::OtherVersion(found), OnOtherVersion::Refuse)
            if found == Superblock::version(!options.encrypted) =>
        {
            return Err(StoreError::Encryption {
                path: path.to_owned(),
                reason: strangeness(found, options),
            });
        }
        (Found::OtherVersion(found), OnOtherVersion::Refuse) => {
            return Err(StoreError::Version {
                path: path.to_owned(),
                found,
                supported: FORMAT_VERSION,
            });
        }
        (Found::OtherVersion(version), OnOtherVersion::Discard) => {
            notes.push(format!(
                "disk_path {} {}: its {} are discarded",
                path.display(),
                strangeness(version, options),
                Bytes(files::bytes_of(path)),
            ));
            KeptFiles::discarded(files::bytes_of(path))
        }
        (Found::OtherVersion(version), OnOtherVersion::SetAside) => {
            notes.push(format!(
                "disk_path {} {}: it is set aside in {}, where it still takes {}; delete that directory to have the \
                 space",
                path.display(),
                strangeness(version, options),
                files::aside(path, version).display(),
                Bytes(files::bytes_of(path)),
            ));
            // The files stay, so their space is not free.
            KeptFiles::default()
        }
    };
    let place = nearest(path);
    let filesystem = Filesystem::of(place).map_err(failed(path, "measure free space"))?;
    let sizing = size(path, options.capacity, held, filesystem)?;
    notes.extend(sizing.note.clone());
    Ok((sizing, notes))
}

/// The superblock of the store. A new store is made; a store whose capacity needs other pages gets them.
fn superblock(
    path: &Path,
    found: Found,
    sizing: &Sizing,
    (store_id, encrypted): (u64, bool),
) -> Result<Superblock, StoreError> {
    let page_bytes = sizing.page_bytes;
    match found {
        Found::Store(superblock) if superblock.page_bytes == page_bytes => Ok(superblock),
        Found::Store(superblock) => {
            let superblock = Superblock {
                page_bytes,
                ..superblock
            };
            // Records whose slots fit the pages are found again.
            files::replace_superblock(path, &superblock)?;
            Ok(superblock)
        }
        Found::Empty | Found::OtherVersion(_) => {
            let superblock = Superblock {
                store_id,
                page_bytes,
                encrypted,
            };
            files::create(path, &superblock)?;
            Ok(superblock)
        }
    }
}

/// Reads a store without changing it, for inspection. If the store is in use, its parts are read at
/// different moments.
///
/// # Errors
/// As [`open`].
pub fn read(path: &Path) -> Result<Contents, StoreError> {
    let superblock = read_superblock(path)?;
    let data = open_to_read(path, DATA)?;
    Ok(Contents {
        superblock,
        super_bytes: read_file(path, SUPER)?,
        table_bytes: read_file(path, TABLE)?,
        data_bytes: data
            .metadata()
            .map_err(failed(path, "measure the data file"))?
            .len(),
        data,
    })
}

/// Succeeds if no process has a directory open. Changes nothing.
///
/// # Errors
/// If a process has the directory open, or the directory's lock file cannot be read.
pub fn check_unused(path: &Path) -> Result<(), StoreError> {
    files::lock_owner(path)
}

/// The process that has a directory open; 0 if the process is unknown, `None` if there is none.
///
/// # Errors
/// If its lock file cannot be read.
pub fn used_by(path: &Path) -> Result<Option<u32>, StoreError> {
    match check_unused(path) {
        Err(StoreError::InUse { pid, .. }) => Ok(Some(pid)),
        free => free.map(|()| None),
    }
}

/// The descriptions in the namespace table of a store, which may be in use. Reads neither records nor payloads.
///
/// # Errors
/// As [`read`].
pub fn read_descriptions(path: &Path) -> Result<Vec<String>, StoreError> {
    read_superblock(path)?;
    let bytes = read_file(path, SUPER)?;
    let entries = (0..NAMESPACES_MAX).filter_map(|index| {
        let at = usize::try_from(namespace_offset(index)).ok()?;
        let end = bytes
            .len()
            .min(at + undercroft_contract::format::NAMESPACE_BYTES);
        undercroft_contract::format::NamespaceEntry::decode(bytes.get(at..end)?)
    });
    Ok(entries.map(|entry| entry.spec.description).collect())
}

/// Removes a namespace from a store that is not in use: its entry is cleared, so that no restart uses its
/// records. `digest` is hexadecimal, in full or a prefix. Returns how many namespaces were removed.
///
/// # Errors
/// As [`open`]; the store must not be in use.
pub fn drop_namespace(path: &Path, digest: &str) -> Result<usize, StoreError> {
    let contents = read(path)?;
    files::check_owner(path)?;
    let _lock = files::take_lock(path)?;
    let file = File::from(open_to_write(path, SUPER, false)?);
    let mut dropped = 0;
    for index in 0..NAMESPACES_MAX {
        let at = namespace_offset(index);
        let entry = usize::try_from(at)
            .ok()
            .and_then(|at| contents.super_bytes.get(at..));
        let Some(found) = entry.and_then(undercroft_contract::format::NamespaceEntry::decode)
        else {
            continue;
        };
        if found.spec.digest().to_hex().starts_with(digest) {
            file.write_all_at(&[0; BLOCK_BYTES], at)
                .map_err(failed(path, "clear an entry"))?;
            dropped += 1;
        }
    }
    files::sync(path, &file, SUPER)?;
    Ok(dropped)
}

/// Sets the size of the data file and allocates its blocks, so that writing never fills the filesystem. An existing
/// store that cannot grow keeps its size, and an existing store that cannot have all of its space back starts without
/// the holes that are left. Returns the size, and these holes.
fn size_data(path: &Path, sizing: &Sizing) -> Result<(u64, Vec<Range<u64>>), StoreError> {
    let Sizing {
        data_bytes,
        page_bytes,
        ..
    } = *sizing;
    let allocate = "allocate the data file";
    let file = File::from(open_to_write(path, DATA, false)?);
    let found = file
        .metadata()
        .map_err(failed(path, "measure the data file"))?;
    if found.len() > data_bytes {
        file.set_len(data_bytes)
            .map_err(failed(path, "shrink the data file"))?;
    }
    let kept = found.len().min(data_bytes) / page_bytes * page_bytes;
    let budget = || Filesystem::of(path).map(Filesystem::available);
    let space = space_of(&file).map_err(failed(path, "measure the data file"))?;
    let missing = data_bytes.saturating_sub(space);
    if kept == 0 || missing <= budget().map_err(failed(path, "measure free space"))? {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, data_bytes) {
            Ok(()) => return Ok((data_bytes, Vec::new())),
            // The filesystem cannot allocate: the file stays sparse, and a full filesystem shows as a failed write.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                file.set_len(data_bytes)
                    .map_err(failed(path, "size the data file"))?;
                return Ok((data_bytes, Vec::new()));
            }
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) if kept > 0 => {}
            Err(errno) => {
                // Nothing of a new file is left.
                file.set_len(found.len().min(data_bytes))
                    .map_err(failed(path, "free space"))?;
                return Err(failed(path, allocate)(errno.into()));
            }
        }
    }
    // Frees the space behind the end that the attempt has allocated.
    file.set_len(found.len().min(data_bytes))
        .map_err(failed(path, "free space"))?;
    let budget = budget().map_err(failed(path, "measure free space"))?;
    let pages = (unit_bytes_for(page_bytes), page_bytes);
    let holes = fill_holes(&file, kept, pages, budget).map_err(failed(path, allocate))?;
    let lost: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
    if lost >= kept {
        return Err(failed(path, allocate)(Errno::NOSPC.into()));
    }
    Ok((kept, holes))
}
