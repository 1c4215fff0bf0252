//! Tries again to open directories that could not be opened, on a thread of its own.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use undercroft_driver::Driver;
use undercroft_io::disk::open::open_if;

use crate::directories::{DirectoryState, OpenDirectory};
use crate::random::random;

/// Pause before directories are tried again. It doubles each time, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_secs(30);
const PAUSE_MAX: Duration = Duration::from_secs(3600);

/// The directories of an engine, shared by its threads.
#[derive(Debug, Default)]
pub(crate) struct SharedDirectories {
    state: Mutex<RetryState>,
    stopping: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct RetryState {
    /// Empty after the engine is stopped.
    pub(crate) directories: Vec<DirectoryState>,
    /// The socket at which other processes share the engine.
    pub(crate) socket: Option<PathBuf>,
    pub(crate) stopped: bool,
}

impl SharedDirectories {
    pub(crate) fn new(directories: Vec<DirectoryState>) -> Self {
        let state = RetryState {
            directories,
            ..RetryState::default()
        };
        Self {
            state: Mutex::new(state),
            stopping: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RetryState> {
        // No panic under the lock leaves a change half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unlocks the directories. From now on no directory is opened.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.stopped = true;
        state.directories.clear();
        self.stopping.notify_all();
    }

    /// Waits for the pause. Returns false if the directories are closed.
    fn pause(&self, pause: Duration) -> bool {
        let state = self.lock();
        let waited = self
            .stopping
            .wait_timeout_while(state, pause, |state| !state.stopped);
        !waited.unwrap_or_else(PoisonError::into_inner).0.stopped
    }
}

/// Starts the thread, if there is a directory to try again.
pub(crate) fn start(
    directories: &Arc<SharedDirectories>,
    driver: &Arc<Driver>,
    pause: Option<Duration>,
) -> std::io::Result<Option<JoinHandle<()>>> {
    let is_open = |state: &DirectoryState| matches!(state, DirectoryState::Open(_));
    if directories.lock().directories.iter().all(is_open) {
        return Ok(None);
    }
    let (directories, driver) = (Arc::clone(directories), Arc::clone(driver));
    let thread = std::thread::Builder::new()
        .name("undercroft-retry".to_owned())
        .spawn(move || {
            let mut pause = pause.unwrap_or(PAUSE_MIN);
            while directories.pause(pause) {
                if try_again(&directories, &driver) {
                    return;
                }
                pause = (2 * pause).min(PAUSE_MAX);
            }
        })?;
    Ok(Some(thread))
}

/// Tries to open the directories that are not open. Returns whether all are open now.
fn try_again(shared: &SharedDirectories, driver: &Driver) -> bool {
    let waiting: Vec<_> = {
        let state = shared.lock();
        let pairs = (0u16..).zip(&state.directories);
        pairs
            .filter_map(|(index, directory)| match directory {
                DirectoryState::Open(_) => None,
                DirectoryState::Unavailable(one) => Some((index, one.path.clone(), one.options)),
            })
            .collect()
    };
    let mut all = true;
    for (index, path, options) in waiting {
        let at = usize::from(index);
        // This runs without the lock: a failing disk may answer late.
        let is_wanted = || !shared.lock().stopped;
        let opened = open_if(&path, options, random(), is_wanted);
        if shared.lock().stopped {
            // The next engine may use the directory's blocks.
            return true;
        }
        match opened.and_then(|directory| directory.empty()) {
            Err(error) => {
                all = false;
                if let Some(DirectoryState::Unavailable(one)) =
                    shared.lock().directories.get_mut(at)
                {
                    one.reason = error.to_string();
                }
            }
            Ok(directory) => {
                let (files, image, directory) = OpenDirectory::of(directory);
                let mut state = published(shared, &directory);
                if state.stopped {
                    return true;
                }
                state.directories[at] = DirectoryState::Open(directory);
                driver.open_device(index, files, image);
            }
        }
    }
    all
}

/// The state after the engine's socket, if there is one, was written into a directory. This is written without the lock,
/// too.
fn published<'a>(
    shared: &'a SharedDirectories,
    directory: &OpenDirectory,
) -> MutexGuard<'a, RetryState> {
    let mut published = None;
    loop {
        let state = shared.lock();
        if state.stopped || state.socket == published {
            return state;
        }
        published.clone_from(&state.socket);
        drop(state);
        if let Some(socket) = &published {
            // If this fails, other processes do not find the engine, and report it.
            let _ = directory.lock.publish(socket);
        }
    }
}
