//! The process of Mooncake's client. The client can hang or crash there without harm to this process.
//!
//! A range of the shared memory stays in use until no transfer of its operation runs any more, as an answer says, or the
//! process has ended. So a late transfer never writes into another object's range.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use undercroft_contract::remote::RemoteError;
use undercroft_io::fork::Unshared;

use super::buffer::SharedRange;
use super::protocol::{Answer, HelperStart, Numbered, Request};
use crate::store_error::{ObjectStoreError, Result};

/// A process that has not answered a request for this time is ended.
const HUNG: Duration = Duration::from_secs(10);
/// A process that has not started within this time is ended, with some time more for the memory that it lends: it
/// allocates the memory and registers it with the network cards. 500 GB took 87 seconds in a report.
const START_LIMIT: Duration = Duration::from_secs(20);
const START_LIMIT_OF_GIB: Duration = Duration::from_secs(1);
/// A process whose failed transfers hold this many bytes of the shared memory is ended: they may still be written.
const HELD_MAX: u64 = super::buffer::BUFFER_BYTES / 2;
/// Longest time in which the process may disconnect from the store.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// Longest write of a request: unless the process hangs, the socket accepts a request at once.
const WRITE_LIMIT: Duration = Duration::from_secs(1);
/// Most bytes of an answer. The longest has the names of all objects.
const LINE_MAX: u64 = 24 << 20;
/// Most bytes of a message that are read at once.
const MESSAGE_MAX: u64 = 64 << 10;
/// Characters of the process's last message that a failure shows.
const WORDS_MAX: usize = 300;

static PYTHON: OnceLock<PathBuf> = OnceLock::new();

/// Sets the Python that has Mooncake's wheel and undercroft. It is this process's Python, whose path only the caller
/// knows.
pub fn set_python(path: PathBuf) {
    // The first path stays: later paths are the same.
    let _ = PYTHON.set(path);
}

/// A request that has no answer yet.
#[derive(Debug)]
struct Pending {
    since: Instant,
    answer: Sender<(Answer, Option<SharedRange>)>,
    slot: Option<SharedRange>,
}

#[derive(Debug, Default)]
struct HelperState {
    pending: HashMap<u64, Pending>,
    /// Slots of transfers that failed.
    held: Vec<SharedRange>,
    /// The number of the last request. The settings have number 0.
    last: u64,
    /// Whether the process is connected to the store; `None` before it has reported.
    ready: Option<Result<()>>,
    has_ended: bool,
}

/// A running helper.
#[derive(Debug)]
pub(super) struct Helper {
    socket: Mutex<Unshared<UnixStream>>,
    state: Mutex<HelperState>,
    /// Notified when the process is ready or has failed, and when it has ended.
    change: Condvar,
    /// The process. The thread that waits for its end locks it.
    child: Mutex<Child>,
    /// The last line of the process's messages.
    words: Mutex<String>,
    since: Instant,
    start_limit: Duration,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(words: impl std::fmt::Display) -> ObjectStoreError {
    let text = format_args!("Mooncake's client: {words}");
    ObjectStoreError::new(RemoteError::Unreachable, text)
}

fn late() -> ObjectStoreError {
    ObjectStoreError::new(RemoteError::Late, "no answer of Mooncake's client in time")
}

impl Helper {
    /// Starts the process, and two threads that live as long.
    pub(super) fn start(settings: &HelperStart<'_>, memory: BorrowedFd<'_>) -> Result<Arc<Self>> {
        let python = PYTHON.get().map_or("python3".into(), Clone::clone);
        Self::start_by(&python, settings, memory)
    }

    fn start_by(
        python: &Path,
        settings: &HelperStart<'_>,
        memory: BorrowedFd<'_>,
    ) -> Result<Arc<Self>> {
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        // A forked child with this end would keep the process alive.
        let ours = Unshared::new(ours);
        ours.set_write_timeout(Some(WRITE_LIMIT)).map_err(failed)?;
        let socket = Mutex::new(ours.try_clone().map_err(failed)?.into());
        // -P: no import from the working directory. A process group of its own: Ctrl-C in a terminal does not end it.
        let mut child = Command::new(python)
            .args(["-P", "-m", "undercroft.mooncake_helper"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| failed(format_args!("{}: {error}", python.display())))?;
        let messages = child.stderr.take().expect("it is piped");
        let helper = Arc::new(Self {
            socket,
            state: Mutex::default(),
            change: Condvar::new(),
            child: Mutex::new(child),
            words: Mutex::default(),
            since: Instant::now(),
            start_limit: START_LIMIT + START_LIMIT_OF_GIB * (settings.segment >> 30) as u32,
        });
        let line = serde_json::to_string(settings).expect("texts and numbers") + "\n";
        let (reader, listener) = (Arc::clone(&helper), Arc::clone(&helper));
        let started = thread(move || listener.listen(messages))
            .and_then(|()| thread(move || reader.read(&ours)))
            .and_then(|()| helper.send_first(line.as_bytes(), memory));
        if let Err(error) = started {
            // The threads end with the process, which nobody may wait for.
            helper.end();
            let _ = locked(&helper.child).wait();
            return Err(error);
        }
        Ok(helper)
    }

    /// Waits until the process is connected to the store. An error if it is still starting at the deadline.
    pub(super) fn ready(&self, deadline: Instant) -> Result<()> {
        let mut state = locked(&self.state);
        loop {
            if let Some(ready) = &state.ready {
                return ready.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed("it is starting"));
            }
            let waited = self.change.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The first line, and the descriptor of the shared memory.
    fn send_first(&self, line: &[u8], memory: BorrowedFd<'_>) -> Result<()> {
        let fds = [memory];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let is_pushed = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(is_pushed, "room for one descriptor");
        let socket = locked(&self.socket);
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(socket.as_fd(), &[IoSlice::new(line)], &mut ancillary, flags);
        match sent {
            Ok(count) if count == line.len() => Ok(()),
            Ok(_) => Err(failed("it takes no settings")),
            Err(errno) => Err(failed(std::io::Error::from(errno))),
        }
    }

    /// Whether the process can get requests: it has not ended, and does not hang.
    pub(super) fn is_usable(&self, now: Instant) -> bool {
        let state = locked(&self.state);
        let held: u64 = state.held.iter().map(|slot| slot.len).sum();
        let mut pending = state.pending.values();
        let hangs = pending.any(|pending| now.saturating_duration_since(pending.since) > HUNG);
        let age = now.saturating_duration_since(self.since);
        let starts = state.ready.is_none() && age <= self.start_limit;
        let is_ready = starts || matches!(state.ready, Some(Ok(())));
        is_ready && !state.has_ended && !hangs && held <= HELD_MAX
    }

    /// Sends a request. `slot` is the range of the memory that it is about.
    pub(super) fn ask(
        &self,
        request: &Request,
        slot: Option<SharedRange>,
    ) -> Result<PendingAnswer> {
        let (answer, received) = channel();
        let mut state = locked(&self.state);
        if state.has_ended {
            return Err(self.end_of_process());
        }
        state.last += 1;
        let id = state.last;
        let since = Instant::now();
        let pending = Pending {
            since,
            answer,
            slot,
        };
        state.pending.insert(id, pending);
        drop(state);
        let line = serde_json::to_string(&Numbered { id, request }).expect("texts and numbers");
        let sent = locked(&self.socket).write_all((line + "\n").as_bytes());
        if sent.is_err() {
            // A part of the line may have been written.
            self.end();
        }
        Ok(PendingAnswer { received })
    }

    /// Ends the process. Operations that it has not answered fail.
    pub(super) fn end(&self) {
        let mut child = match self.child.try_lock() {
            Ok(child) => child,
            Err(TryLockError::Poisoned(child)) => child.into_inner(),
            // Whoever holds the lock has killed the process, and may wait long for its end: the kernel first frees the
            // memory that the process lends.
            Err(TryLockError::WouldBlock) => return,
        };
        // An error means that the process has ended already.
        let _ = child.kill();
    }

    /// Lets the process disconnect from the store, and ends the process if this takes long.
    pub(super) fn close(&self) {
        // An error means that the process has ended already.
        let _ = locked(&self.socket).shutdown(Shutdown::Write);
        let state = locked(&self.state);
        let waited = (self.change).wait_timeout_while(state, CLOSE_LIMIT, |state| !state.has_ended);
        drop(waited);
        self.end();
    }

    fn end_of_process(&self) -> ObjectStoreError {
        let words = locked(&self.words);
        match words.is_empty() {
            true => failed("its process has ended"),
            false => failed(format_args!("its process has ended: {words}")),
        }
    }

    /// A thread: passes answers on until the process has ended.
    fn read(&self, socket: &UnixStream) {
        let mut reader = BufReader::new(socket);
        while let Some(line) = line(&mut reader, LINE_MAX) {
            if !line.ends_with(b"\n") {
                break;
            }
            let Ok(answer) = serde_json::from_slice::<Answer>(&line) else {
                break;
            };
            let mut state = locked(&self.state);
            if answer.id == 0 {
                state.ready = Some(answer.error().map_or(Ok(()), Err));
                self.change.notify_all();
                continue;
            }
            let Some(mut pending) = state.pending.remove(&answer.id) else {
                break;
            };
            if answer.is_unsettled() {
                state.held.extend(pending.slot.take());
            }
            // The caller may not wait any more.
            let _ = pending.answer.send((answer, pending.slot));
        }
        self.end();
        // After this the process does not write to the memory any more.
        let _ = locked(&self.child).wait();
        let mut state = locked(&self.state);
        state.has_ended = true;
        state
            .ready
            .get_or_insert_with(|| Err(self.end_of_process()));
        state.pending.clear();
        state.held.clear();
        self.change.notify_all();
    }

    /// A thread: keeps the last line of the process's messages.
    fn listen(&self, messages: impl Read) {
        let mut reader = BufReader::new(messages);
        while let Some(line) = line(&mut reader, MESSAGE_MAX) {
            let text = String::from_utf8_lossy(&line);
            if !text.trim().is_empty() {
                *locked(&self.words) = text.trim().chars().take(WORDS_MAX).collect();
            }
        }
    }
}

/// The next line, or its first `most` bytes; `None` at the end.
fn line(reader: &mut impl BufRead, most: u64) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let count = reader.take(most).read_until(b'\n', &mut line).ok()?;
    (count > 0).then_some(line)
}

/// An answer that may come.
#[derive(Debug)]
pub(super) struct PendingAnswer {
    received: Receiver<(Answer, Option<SharedRange>)>,
}

impl PendingAnswer {
    /// The answer, and the range of the memory that the request was about.
    pub(super) fn wait(
        self,
        helper: &Helper,
        deadline: Instant,
    ) -> Result<(Answer, Option<SharedRange>)> {
        let left = deadline.saturating_duration_since(Instant::now());
        let (answer, slot) = self
            .received
            .recv_timeout(left)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => late(),
                RecvTimeoutError::Disconnected => helper.end_of_process(),
            })?;
        match answer.error() {
            Some(error) => Err(error),
            None => Ok((answer, slot)),
        }
    }
}

fn thread(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let builder = std::thread::Builder::new().name("undercroft-mc".to_owned());
    builder.spawn(work).map(drop).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use undercroft_io::arena::{ARENA_ALIGN, Arena};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Starts a process that never answers, with settings of any size.
    fn start(segment: u64, metadata: &str) -> (Result<Arc<Helper>>, tempfile::TempDir) {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("python");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(&program, mode).unwrap();
        let settings = HelperStart {
            bytes: ARENA_ALIGN,
            master: "",
            metadata,
            segment,
            protocol: "",
            device: "",
            host: "",
            admin: "",
        };
        let memory = Arena::create(ARENA_ALIGN).unwrap();
        let started = Helper::start_by(&program, &settings, memory.fd());
        (started, place)
    }

    #[test]
    fn a_process_that_lends_much_memory_may_start_longer() {
        for (segment, limit) in [(0, 20), (500 << 30, 520)] {
            let (helper, _place) = start(segment, "");
            let helper = helper.unwrap();
            let usable = |seconds| helper.is_usable(helper.since + Duration::from_secs(seconds));
            assert!(usable(limit) && !usable(limit + 1));
            let error = helper.ready(Instant::now()).unwrap_err();
            assert_eq!(error.kind, RemoteError::Unreachable);
            assert!(error.detail.contains("starting"), "{error}");
            helper.end();
        }
    }

    #[test]
    fn nobody_waits_for_the_end_of_a_process_that_ends_late() {
        let (helper, _place) = start(0, "");
        let helper = helper.unwrap();
        helper.end();
        // Like the thread that waits for the end.
        let waiting = locked(&helper.child);
        let other = Arc::clone(&helper);
        let (done, ended) = channel();
        std::thread::spawn(move || {
            other.end();
            done.send(())
        });
        ended.recv_timeout(PATIENCE).unwrap();
        drop(waiting);
    }

    /// Number of this process's threads that serve helpers.
    fn threads() -> usize {
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            let path = entry.unwrap().path().join("comm");
            std::fs::read_to_string(path).is_ok_and(|name| name.trim() == "undercroft-mc")
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.map(name).filter(|is| *is).count()
    }

    #[test]
    fn a_start_that_fails_leaves_no_process_and_no_thread() {
        // More than a socket takes before anybody reads.
        let (started, _place) = start(0, &"m".repeat(4 << 20));
        let error = started.unwrap_err();
        assert!(error.detail.contains("takes no settings"), "{error}");
        let end = Instant::now() + PATIENCE;
        while threads() > 0 {
            assert!(Instant::now() < end, "{} threads", threads());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
