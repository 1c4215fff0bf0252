//! `file://`: a directory, often on a file system that many hosts share.
//!
//! An object is a file of mode 0600. It is written under a temporary name in its directory, made durable, and renamed.
//! A full or failing file system reports an error at the latest when the file is made durable. No symbolic link below
//! the directory is followed. Each opened directory and object belongs to this user or root, and nobody else may write
//! it: whoever can write there chooses the bytes of hits.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{
    Advice, AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT,
};
use rustix::io::Errno;
use undercroft_contract::remote::RemoteError;
use undercroft_contract::remote::key::is_above_objects;

use crate::RemoteOptions;
use crate::body::{Chunk, ObjectBody};
use crate::check::SAMPLES;
use crate::location::{Location, LocationError};
use crate::objects::{ListedObject, Objects};
use crate::receiver::{Receiver, os_error};
use crate::store_error::{ObjectStoreError, Result};

/// Prefix of the temporary names of objects that are being written or removed. Other applications do not use it.
const TEMPORARY: &str = ".undercroft-";

/// Most calls at a time. Each may wait for a server of the file system.
const PARALLEL: usize = 16;

const NO_DIRECTORY: &str = "not a directory";
const NO_PARENT: &str =
    "its parent directory does not exist; mount the file system, or make the directory";
const MOUNT: &str = "check the path, and that its file system is mounted";

const OTHERS: &str = "use a directory of this process's user that group and others cannot write: chown it, and chmod go-w; if \
     the file system itself changes owners, such as NFS that squashes ids, set remote_any_owner";

/// Most directories inside each other that are searched for objects: more than objects have.
const DEPTH: usize = 16;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);

/// A directory of objects.
#[derive(Debug)]
pub(crate) struct DirectoryStore {
    path: PathBuf,
    /// Whether the directory was there once. From then on it is not made again: its file system may be unmounted.
    is_made: AtomicBool,
    /// An object of at least this age becomes new again when it is read.
    renew_after: Duration,
    /// Whether this host makes objects new at all.
    renews: bool,
    /// Whether directories and objects may belong to other users, or be written by them.
    any_owner: bool,
    /// Makes temporary names unique in this process and among processes.
    names: (u64, AtomicU64),
}

impl DirectoryStore {
    /// The directory, which is made if its parent exists.
    pub(crate) fn open(
        location: &Location,
        options: RemoteOptions,
    ) -> std::result::Result<Self, LocationError> {
        let store = Self::later(location, options);
        match store.make() {
            Err(error) if error.advice == Some(MOUNT) => Err(location.refused(error.detail)),
            // The first operation reports other errors.
            _ => Ok(store),
        }
    }

    /// The directory, without a call to its file system, which may hang. The first operation makes the directory.
    pub(crate) fn later(location: &Location, options: RemoteOptions) -> Self {
        Self {
            path: PathBuf::from(&location.path),
            is_made: AtomicBool::new(false),
            renew_after: options.ttl / 2,
            renews: options.renew_rate.is_some(),
            any_owner: options.any_owner,
            names: (random(), AtomicU64::new(0)),
        }
    }

    /// Makes the directory if it was never there.
    fn make(&self) -> Result<()> {
        if self.is_made.load(Ordering::Relaxed) {
            return Ok(());
        }
        let unusable = |reason: &str| {
            Err(ObjectStoreError::new(RemoteError::Unreachable, reason).or_advice(MOUNT))
        };
        let made = rustix::fs::mkdir(&self.path, Mode::RWXU);
        match (made, std::fs::metadata(&self.path)) {
            (_, Ok(found)) if !found.is_dir() => return unusable(NO_DIRECTORY),
            (Ok(()) | Err(Errno::EXIST), _) | (_, Ok(_)) => {}
            (Err(Errno::NOENT), _) => {
                return unusable(NO_PARENT);
            }
            (Err(errno), _) => {
                let mut error = os_error(errno);
                error.detail = format!("{} cannot be made: {}", self.path.display(), error.detail);
                return Err(error);
            }
        }
        self.is_made.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The directory for the object at `path`, and the object's name there.
    fn parent<'p>(&self, path: &'p str, make: bool) -> Result<(OwnedFd, &'p str)> {
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        assert!(is_plain(name), "the name of an object: {path}");
        Ok((self.directory(parents, make)?, name))
    }

    fn directory(&self, below: &str, make: bool) -> Result<OwnedFd> {
        self.make()?;
        // The path of the store's directory may contain links: the operator has configured it.
        let top = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(CWD, &self.path, top, Mode::empty());
        let mut at = opened.map_err(|errno| self.error(errno))?;
        self.check_directory(&at, "", 0)?;
        for (depth, name) in (1..).zip(below.split('/').filter(|name| !name.is_empty())) {
            assert!(is_plain(name), "a directory of objects: {below}");
            let found = rustix::fs::openat(&at, name, DIRECTORY, Mode::empty());
            at = match found {
                Err(Errno::NOENT) if make => {
                    match rustix::fs::mkdirat(&at, name, Mode::RWXU) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(os_error(errno)),
                    }
                    let made = rustix::fs::openat(&at, name, DIRECTORY, Mode::empty());
                    made.map_err(os_error)?
                }
                found => found.map_err(os_error)?,
            };
            self.check_directory(&at, below, depth)?;
        }
        Ok(at)
    }

    /// Whether nobody else can write the directory that is the `depth`-th on the way to `below`.
    fn check_directory(&self, at: &OwnedFd, below: &str, depth: usize) -> Result<()> {
        let found = rustix::fs::fstat(at).map_err(os_error)?;
        match foreign(&found) {
            Some(why) if !self.any_owner => {
                let names = below.split('/').filter(|name| !name.is_empty());
                let path = names
                    .take(depth)
                    .fold(self.path.clone(), |path, name| path.join(name));
                let detail = format!("{} {why}", path.display());
                Err(ObjectStoreError::new(RemoteError::Denied, detail).or_advice(OTHERS))
            }
            _ => Ok(()),
        }
    }

    /// An error of the directory itself: it is missing as long as its file system is not mounted.
    fn error(&self, errno: Errno) -> ObjectStoreError {
        let mut error = os_error(errno);
        if error.kind == RemoteError::NotFound {
            let advice = "check that the file system is mounted, and that its server answers";
            error = ObjectStoreError::new(RemoteError::Unreachable, error.detail).or_advice(advice);
        }
        error.detail = format!("{}: {}", self.path.display(), error.detail);
        error
    }

    fn read_only(&self, path: &str) -> Result<OwnedFd> {
        let (parent, name) = self.parent(path, false)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        rustix::fs::openat(&parent, name, flags, Mode::empty()).map_err(os_error)
    }

    fn temporary(&self) -> String {
        let (process, count) = &self.names;
        temporary_name(*process, count.fetch_add(1, Ordering::Relaxed))
    }

    fn find(&self, path: &str) -> Result<bool> {
        let (parent, name) = match self.parent(path, false) {
            Err(error) if error.kind == RemoteError::NotFound => return Ok(false),
            parent => parent?,
        };
        match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(is_file(&found)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(os_error(errno)),
        }
    }

    /// Gives the finished file its name. Returns whether the file has it.
    fn publish(
        &self,
        parent: &OwnedFd,
        temporary: &str,
        name: &str,
        if_absent: bool,
    ) -> Result<bool> {
        if !if_absent {
            let renamed = rustix::fs::renameat(parent, temporary, parent, name);
            return renamed.map(|()| true).map_err(os_error);
        }
        let flags = RenameFlags::NOREPLACE;
        let named = match rustix::fs::renameat_with(parent, temporary, parent, name, flags) {
            // File systems without this flag, such as NFS, support links.
            Err(Errno::INVAL | Errno::NOSYS) => {
                rustix::fs::linkat(parent, temporary, parent, name, AtFlags::empty())
                    .and_then(|()| rustix::fs::unlinkat(parent, temporary, AtFlags::empty()))
            }
            named => named,
        };
        match named {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(os_error(errno)),
        }
    }

    fn write(&self, parent: &OwnedFd, temporary: &str, body: &ObjectBody<'_>) -> Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(parent, temporary, flags, mode).map_err(os_error)?;
        let mut at = 0;
        for chunk in body.chunks() {
            let len = match &chunk {
                Chunk::Bytes(bytes) => bytes.len() as u64,
                Chunk::Arena(_, _, len) => *len,
            };
            let mut done = 0;
            while done < len {
                let written = match &chunk {
                    Chunk::Bytes(bytes) => {
                        rustix::io::pwrite(&file, &bytes[done as usize..], at + done)
                    }
                    Chunk::Arena(arena, offset, len) => {
                        arena.pwrite(file.as_fd(), at + done, offset + done, len - done)
                    }
                };
                match written {
                    Ok(0) => return Err(os_error(Errno::NOSPC)),
                    Ok(count) => done += count as u64,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(os_error(errno)),
                }
            }
            at += len;
        }
        rustix::fs::fdatasync(&file).map_err(os_error)
    }

    /// Calls `each` with the files of a directory and below, and with the directory of each. Directories that `enters`
    /// refuses are left out.
    fn walk(
        &self,
        below: &str,
        enters: fn(&str) -> bool,
        each: &mut dyn FnMut(&OwnedFd, &str, &str, &Stat) -> Result<bool>,
    ) -> Result<bool> {
        let at = match self.directory(below, false) {
            // The directory was removed meanwhile.
            Err(error) if error.kind == RemoteError::NotFound => return Ok(true),
            // A directory of another user, beside undercroft's.
            Err(error) if !below.is_empty() && error.advice == Some(OTHERS) => return Ok(true),
            at => at?,
        };
        for entry in Dir::read_from(&at).map_err(os_error)? {
            let entry = entry.map_err(os_error)?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            let path = match below {
                "" => name.to_owned(),
                _ => format!("{below}/{name}"),
            };
            let found = match rustix::fs::statat(&at, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                found => found.map_err(os_error)?,
            };
            let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
            let go_on = match name {
                "." | ".." => true,
                _ if is_directory && is_plain(name) => {
                    let is_deep = path.split('/').count() >= DEPTH;
                    is_deep || !enters(&path) || self.walk(&path, enters, each)?
                }
                _ if is_file(&found) => each(&at, name, &path, &found)?,
                _ => true,
            };
            if !go_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Removes a file if its age is still that of `entry`. The file gets another name first, so that a file that is
    /// written anew meanwhile stays.
    fn remove_unchanged(&self, entry: &ListedObject) -> Result<bool> {
        let (parent, name) = match self.parent(&entry.path, false) {
            Err(error) if error.kind == RemoteError::NotFound => return Ok(false),
            parent => parent?,
        };
        let aside = self.temporary();
        match rustix::fs::renameat(&parent, name, &parent, &aside) {
            Err(Errno::NOENT) => return Ok(false),
            renamed => renamed.map_err(os_error)?,
        }
        let found = match rustix::fs::statat(&parent, &aside, AtFlags::SYMLINK_NOFOLLOW) {
            // Another process has removed the file as a leftover of a killed writer.
            Err(Errno::NOENT) => return Ok(false),
            found => found.map_err(os_error)?,
        };
        let is_same = modified(&found) == entry.modified && found.st_size as u64 == entry.bytes;
        if !is_same && self.publish(&parent, &aside, name, true)? {
            return Ok(false);
        }
        match rustix::fs::unlinkat(&parent, &aside, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(is_same),
            Err(errno) => Err(os_error(errno)),
        }
    }
}

impl Objects for DirectoryStore {
    fn name(&self) -> &'static str {
        "file"
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    fn probe(&self, paths: &[String]) -> Result<u64> {
        let mut bits = 0;
        for (index, path) in paths.iter().enumerate() {
            bits |= u64::from(self.find(path)?) << index;
        }
        Ok(bits)
    }

    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        let file = self.read_only(path)?;
        let found = rustix::fs::fstat(&file).map_err(os_error)?;
        if !is_file(&found) {
            return Err(ObjectStoreError::new(
                RemoteError::Corrupt,
                "not a regular file",
            ));
        }
        // Nobody else can write the directory: somebody could once, or this user has moved the file here.
        if let Some(why) = foreign(&found).filter(|_| !self.any_owner) {
            return Err(ObjectStoreError::new(
                RemoteError::Corrupt,
                format!("the object {why}"),
            ));
        }
        receiver.take_file(file.as_fd())?;
        if receiver.wants_all() && self.renews(modified(&found)) {
            let times = Timestamps {
                last_access: time(UTIME_OMIT),
                last_modification: time(UTIME_NOW),
            };
            // The age of another owner's file cannot be changed.
            let _ = rustix::fs::futimens(&file, &times);
        }
        Ok(())
    }

    fn uncache(&self, paths: &[String]) {
        for path in paths {
            // The next read of a missing object reports it.
            if let Ok(file) = self.read_only(path) {
                let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
            }
        }
    }

    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        if if_absent && self.find(path)? {
            return Ok(false);
        }
        // Only the directories of an object are made, not the store's own: its file system may not be mounted.
        let (parent, name) = self.parent(path, true)?;
        let temporary = self.temporary();
        let written = self.write(&parent, &temporary, body);
        let published = written.and_then(|()| self.publish(&parent, &temporary, name, if_absent));
        if !matches!(published, Ok(true)) {
            let _ = rustix::fs::unlinkat(&parent, &temporary, AtFlags::empty());
        }
        published.map_err(|error| match error.kind {
            // The directory was removed meanwhile.
            RemoteError::NotFound => ObjectStoreError::new(RemoteError::Unreachable, error.detail),
            _ => error,
        })
    }

    fn delete(&self, paths: &[String]) -> Result<()> {
        for path in paths {
            let (parent, name) = match self.parent(path, false) {
                Err(error) if error.kind == RemoteError::NotFound => continue,
                parent => parent?,
            };
            match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(os_error(errno)),
            }
        }
        Ok(())
    }

    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        let each = &mut |_: &OwnedFd, name: &str, path: &str, found: &Stat| {
            Ok(name.starts_with('.')
                || each(ListedObject {
                    path: path.to_owned(),
                    bytes: found.st_size as u64,
                    modified: modified(found),
                }))
        };
        self.walk(below.trim_end_matches('/'), |_| true, each)?;
        Ok(())
    }

    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>> {
        entries
            .iter()
            .map(|entry| self.remove_unchanged(entry))
            .collect()
    }

    /// The time of a new file, which the file system's server gives.
    fn clock_skew(&self) -> Result<Option<f64>> {
        let top = self.directory("", false)?;
        let name = self.temporary();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let before = SystemTime::now();
        let made = rustix::fs::openat(&top, name.as_str(), flags, Mode::RUSR | Mode::WUSR);
        let file = made.map_err(os_error)?;
        let found = rustix::io::write(&file, b"clock").and_then(|_| rustix::fs::fstat(&file));
        let between = before + before.elapsed().unwrap_or_default() / 2;
        let _ = rustix::fs::unlinkat(&top, name.as_str(), AtFlags::empty());
        let store = modified(&found.map_err(os_error)?);
        Ok(Some(seconds_between(between, store)))
    }

    fn renews(&self, modified: SystemTime) -> bool {
        let age = SystemTime::now().duration_since(modified);
        self.renews && age.is_ok_and(|age| age > self.renew_after)
    }

    fn remove_leftovers(&self, age: Duration) -> Result<u64> {
        let mut removed = 0;
        let each = &mut |parent: &OwnedFd, name: &str, _: &str, found: &Stat| {
            let is_old = SystemTime::now()
                .duration_since(modified(found))
                .is_ok_and(|old| old > age);
            if is_temporary(name) && is_old {
                match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
                    Ok(()) => removed += 1,
                    Err(Errno::NOENT) => {}
                    Err(errno) => return Err(os_error(errno)),
                }
            }
            Ok(true)
        };
        self.walk("", has_temporary_files, each)?;
        Ok(removed)
    }
}

/// Whether [`DirectoryStore::open`] would succeed. Makes no directory.
pub(crate) fn examine(
    location: &Location,
    options: RemoteOptions,
) -> std::result::Result<(), LocationError> {
    let path = PathBuf::from(&location.path);
    let is_missing = |path: &Path| matches!(std::fs::metadata(path), Err(error) if error.kind() == ErrorKind::NotFound);
    if std::fs::metadata(&path).is_ok_and(|found| !found.is_dir()) {
        return Err(location.refused(NO_DIRECTORY));
    }
    if is_missing(&path) && path.parent().is_some_and(is_missing) {
        return Err(location.refused(NO_PARENT));
    }
    let why = rustix::fs::stat(&path)
        .ok()
        .and_then(|found| foreign(&found));
    match why.filter(|_| !options.any_owner) {
        Some(why) => Err(location.refused(format_args!("{} {why}; {OTHERS}", path.display()))),
        None => Ok(()),
    }
}

/// How another user may write a directory or a file: root may anyway.
fn foreign(found: &Stat) -> Option<String> {
    let uid = rustix::process::geteuid().as_raw();
    let mode = found.st_mode & 0o7777;
    if found.st_uid != uid && found.st_uid != 0 {
        return Some(format!(
            "belongs to uid {}, this process runs as uid {uid}",
            found.st_uid
        ));
    }
    (mode & 0o022 != 0).then(|| format!("has mode {mode:04o}, with which others can write it"))
}

/// `to - from` in seconds.
pub(crate) fn seconds_between(from: SystemTime, to: SystemTime) -> f64 {
    match to.duration_since(from) {
        Ok(ahead) => ahead.as_secs_f64(),
        Err(behind) => -behind.duration().as_secs_f64(),
    }
}

fn temporary_name(process: u64, count: u64) -> String {
    format!("{TEMPORARY}{process:016x}-{count}")
}

fn is_temporary(name: &str) -> bool {
    let numbers = name.strip_prefix(TEMPORARY).and_then(|rest| {
        let (process, count) = rest.split_once('-')?;
        Some((u64::from_str_radix(process, 16).ok()?, count.parse().ok()?))
    });
    numbers.is_some_and(|(process, count)| temporary_name(process, count) == name)
}

/// Whether objects, descriptions or samples of checks are written in this directory or below.
fn has_temporary_files(directory: &str) -> bool {
    directory == SAMPLES || is_above_objects(directory)
}

fn is_plain(name: &str) -> bool {
    let bytes = OsStr::new(name).as_bytes();
    !bytes.is_empty() && bytes[0] != b'.' && !bytes.contains(&0)
}

fn is_file(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
}

fn modified(found: &Stat) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(found.st_mtime).unwrap_or(0));
    UNIX_EPOCH + seconds + Duration::from_nanos(found.st_mtime_nsec)
}

fn time(nanoseconds: i64) -> Timespec {
    Timespec {
        tv_sec: 0,
        tv_nsec: nanoseconds,
    }
}

/// A number that differs from process to process and from host to host.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's keys come from the operating system.
    RandomState::new().hash_one(std::process::id())
}
