//! The directory of the sockets: private to the user, and without sockets of processes that have ended.

use std::fs::{self, DirBuilder, File, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, geteuid, test_kill_process};
use undercroft_io::fork::Unshared;

/// Longest path of a socket in bytes (`sun_path` less its final zero).
pub const SOCKET_PATH_MAX: usize = 107;

/// Longest wait for other processes that make a socket in the same directory, which usually takes microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// Why a server could not make its socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The path does not fit into a socket address.
    #[error(
        "path {path:?} has {bytes} bytes, at most {SOCKET_PATH_MAX} are possible; choose a shorter one"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The directory belongs to another user.
    #[error(
        "{dir:?} belongs to uid {found}, this process runs as uid {own}; choose a directory of its own"
    )]
    Owner {
        /// The directory.
        dir: PathBuf,
        /// Its owner.
        found: u32,
        /// This process's effective uid.
        own: u32,
    },
    /// Other users may enter the directory.
    #[error("{dir:?} has mode {mode:04o}, expected 0700; run: chmod 700 {dir:?}")]
    Mode {
        /// The directory.
        dir: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The path is not a directory. A symbolic link to a directory is none.
    #[error("{dir:?} is not a directory; choose another one")]
    NotADirectory {
        /// The path.
        dir: PathBuf,
    },
    /// Another server answers there.
    #[error("{path:?}: another server listens there; stop it, or choose another socket")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The kernel refused a step.
    #[error("{path:?}: {step} failed: {source}")]
    Os {
        /// File or directory.
        path: PathBuf,
        /// The step that failed.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn os(path: &Path, step: &'static str) -> impl Fn(io::Error) -> SocketError {
    move |source| SocketError::Os {
        path: path.into(),
        step,
        source,
    }
}

/// Makes the directory if it is missing, checks that it is private, and removes the sockets that
/// dead processes left.
pub(crate) fn prepare(dir: &Path) -> Result<(), SocketError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .or_else(|error| {
            // An existing non-directory is reported below.
            if error.kind() == io::ErrorKind::AlreadyExists {
                Ok(())
            } else {
                Err(os(dir, "creating")(error))
            }
        })?;
    let found = fs::symlink_metadata(dir).map_err(os(dir, "stat"))?;
    let own = geteuid().as_raw();
    let mode = found.mode() & 0o7777;
    if !found.is_dir() {
        return Err(SocketError::NotADirectory { dir: dir.into() });
    }
    if found.uid() != own {
        return Err(SocketError::Owner {
            dir: dir.into(),
            found: found.uid(),
            own,
        });
    }
    if mode & 0o077 != 0 {
        return Err(SocketError::Mode {
            dir: dir.into(),
            mode,
        });
    }
    for entry in fs::read_dir(dir).map_err(os(dir, "reading"))?.flatten() {
        if is_stale(&entry.path()) {
            // Another process may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// A listening socket `<pid>-<random>.sock` of mode 0600 in a directory that [`prepare`] checked.
pub(crate) fn listen(dir: &Path) -> Result<(Unshared<UnixListener>, PathBuf), SocketError> {
    let random = RandomState::new().build_hasher().finish();
    listen_at(dir.join(format!("{}-{random:016x}.sock", std::process::id())))
}

/// A listening socket of mode 0600 at `path`, in a directory that [`prepare`] checked. A socket
/// without a listener is replaced.
pub(crate) fn listen_at(path: PathBuf) -> Result<(Unshared<UnixListener>, PathBuf), SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_MAX {
        return Err(SocketError::PathTooLong { path, bytes });
    }
    let is_socket = |found: fs::Metadata| found.file_type().is_socket();
    if fs::symlink_metadata(&path).is_ok_and(is_socket) {
        // Connecting does not wait: a frozen server with a full queue also listens.
        match connect_at_once(&path) {
            Err(Errno::CONNREFUSED) => {
                fs::remove_file(&path).map_err(os(&path, "removing a dead socket"))?;
            }
            _ => return Err(SocketError::InUse { path }),
        }
    }
    let listener = Unshared::new(UnixListener::bind(&path).map_err(os(&path, "bind"))?);
    fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(os(&path, "chmod"))?;
    listener
        .set_nonblocking(true)
        .map_err(os(&path, "setting it non-blocking"))?;
    Ok((listener, path))
}

/// Like [`listen_at`]. If many processes call this at once for the socket of a process that has ended, one succeeds.
/// Without the lock, the others would replace its socket before it listens.
pub(crate) fn listen_alone(
    path: PathBuf,
) -> Result<(Unshared<UnixListener>, PathBuf), SocketError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let file = File::open(dir).map_err(os(dir, "opening"))?;
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::INTR | Errno::AGAIN) if Instant::now() < until => sleep(LOCK_PAUSE),
            Err(Errno::INTR | Errno::AGAIN) => return Err(SocketError::InUse { path }),
            // Some file systems have no locks.
            _ => break,
        }
    }
    let made = listen_at(path);
    // Unlock explicitly: a child that was forked meanwhile also has the file open.
    let _ = flock(&file, FlockOperation::Unlock);
    made
}

/// Connects, or returns the error at once.
pub(crate) fn connect_at_once(path: &Path) -> Result<Unshared<UnixStream>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let socket = Unshared::new(UnixStream::from(socket));
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Whether the process in the name has ended and no process listens. Both conditions are needed: the process may run in
/// another PID namespace, and a running process may be about to listen.
fn is_stale(path: &Path) -> bool {
    let pid = path
        .file_name()
        .and_then(|name| {
            name.to_str()?
                .strip_suffix(".sock")?
                .split_once('-')?
                .0
                .parse()
                .ok()
        })
        .and_then(Pid::from_raw);
    let Some(pid) = pid else { return false };
    test_kill_process(pid) == Err(Errno::SRCH)
        && connect_at_once(path).is_err_and(|errno| errno == Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_and_its_socket_are_made_private() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        prepare(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        let (_listener, path) = listen(&dir).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn directories_that_others_may_enter_are_refused() {
        let root = tempfile::tempdir().unwrap();
        for mode in [0o750, 0o705, 0o777] {
            fs::set_permissions(root.path(), Permissions::from_mode(mode)).unwrap();
            let error = prepare(root.path()).unwrap_err().to_string();
            assert!(
                error.contains("chmod 700") && error.contains(&format!("{mode:04o}")),
                "{error}"
            );
        }
    }

    #[test]
    fn files_and_links_are_no_directory() {
        let root = tempfile::tempdir().unwrap();
        let (file, link) = (root.path().join("file"), root.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        for path in [file, link] {
            assert!(
                matches!(prepare(&path), Err(SocketError::NotADirectory { .. })),
                "{path:?}"
            );
        }
    }

    #[test]
    fn a_path_that_is_too_long_is_named() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("d".repeat(100));
        prepare(&dir).unwrap();
        let error = listen(&dir).unwrap_err();
        assert!(matches!(error, SocketError::PathTooLong { .. }), "{error}");
        assert!(error.to_string().contains("choose a shorter one"));
    }

    #[test]
    fn only_sockets_of_dead_processes_are_removed() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), Permissions::from_mode(0o700)).unwrap();
        // A process that has ended and been waited for.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dead = root.path().join(format!("{}-1.sock", child.id()));
        drop(UnixListener::bind(&dead).unwrap());
        let elsewhere = root.path().join(format!("{}-2.sock", child.id()));
        let _alive = UnixListener::bind(&elsewhere).unwrap();
        let own = root.path().join(format!("{}-3.sock", std::process::id()));
        drop(UnixListener::bind(&own).unwrap());
        let other = root.path().join("notes.txt");
        fs::write(&other, "").unwrap();
        prepare(root.path()).unwrap();
        assert!(!dead.exists());
        assert!(
            elsewhere.exists(),
            "somebody listens: another PID namespace"
        );
        assert!(own.exists() && other.exists());
    }

    #[test]
    fn a_path_is_taken_from_the_dead_and_from_nobody_else() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s.sock");
        let (first, _) = listen_at(path.clone()).unwrap();
        let taken = listen_at(path.clone()).unwrap_err();
        assert!(matches!(taken, SocketError::InUse { .. }), "{taken}");
        drop(first);
        listen_at(path).unwrap();
        let notes = root.path().join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        assert!(listen_at(notes.clone()).is_err());
        assert_eq!(fs::read(notes).unwrap(), b"mine");
    }

    #[test]
    fn of_many_that_start_at_once_over_a_dead_socket_one_listens() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s.sock");
        for _ in 0..50 {
            drop(UnixListener::bind(&path).unwrap());
            let start = std::sync::Barrier::new(8);
            let made: Vec<_> = std::thread::scope(|scope| {
                let one = || {
                    start.wait();
                    listen_alone(path.clone())
                };
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
            assert!(connect_at_once(&path).is_ok(), "it can be reached");
            fs::remove_file(&path).unwrap();
        }
    }
}
