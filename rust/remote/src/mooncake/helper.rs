//! The process of Mooncake's client. The client can hang or crash there without harm to this process.
//!
//! A range of the shared memory stays in use until its operation has been answered or the process has ended. So a late
//! transfer never writes into another object's range.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use undercroft_core::remote::RemoteError;

use super::buffer::Slot;
use super::protocol::{Answer, Numbered, Request, Start};
use crate::objects::{Result, StoreError};

/// A process that has not answered a request for this time is ended.
const HUNG: Duration = Duration::from_secs(10);
/// A process whose failed transfers hold this many bytes of the shared memory is ended: they may still be written.
const HELD_MAX: u64 = super::buffer::BUFFER_BYTES / 2;
/// Longest time in which the process may disconnect from the store.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// Longest write of a request: unless the process hangs, the socket accepts a request at once.
const WRITE_LIMIT: Duration = Duration::from_secs(1);
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
    answer: Sender<(Answer, Option<Slot>)>,
    slot: Option<Slot>,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<u64, Pending>,
    /// Slots of transfers that failed.
    held: Vec<Slot>,
    /// The number of the last request. The settings have number 0.
    last: u64,
    /// Whether the process is connected to the store; `None` before it has reported.
    ready: Option<Result<()>>,
    has_ended: bool,
}

/// A running helper.
#[derive(Debug)]
pub(super) struct Helper {
    socket: Mutex<UnixStream>,
    state: Mutex<State>,
    /// Notified when the process is ready or has failed, and when it has ended.
    change: Condvar,
    /// The process. The thread that waits for its end locks it.
    child: Mutex<Child>,
    /// The last line of the process's messages.
    words: Mutex<String>,
    since: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(words: impl std::fmt::Display) -> StoreError {
    let text = format_args!("Mooncake's client: {words}");
    StoreError::new(RemoteError::Unreachable, text)
}

fn late() -> StoreError {
    StoreError::new(RemoteError::Late, "no answer of Mooncake's client in time")
}

impl Helper {
    /// Starts the process, and two threads that live as long.
    pub(super) fn start(settings: &Start<'_>, memory: BorrowedFd<'_>) -> Result<Arc<Self>> {
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        ours.set_write_timeout(Some(WRITE_LIMIT)).map_err(failed)?;
        let python = PYTHON.get().map_or("python3".into(), Clone::clone);
        // -P: no import from the working directory. A process group of its own: Ctrl-C in a terminal does not end it.
        let mut child = Command::new(&python)
            .args(["-P", "-m", "undercroft.mooncake_helper"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| failed(format_args!("{}: {error}", python.display())))?;
        let messages = child.stderr.take().expect("it is piped");
        let helper = Arc::new(Self {
            socket: Mutex::new(ours.try_clone().map_err(failed)?),
            state: Mutex::default(),
            change: Condvar::new(),
            child: Mutex::new(child),
            words: Mutex::default(),
            since: Instant::now(),
        });
        let (reader, listener) = (Arc::clone(&helper), Arc::clone(&helper));
        // A thread that does not start ends the process: its socket is closed with the closure.
        thread(move || listener.listen(messages))?;
        thread(move || reader.read(ours))?;
        let line = serde_json::to_string(settings).expect("texts and numbers") + "\n";
        helper.send_first(line.as_bytes(), memory)?;
        Ok(helper)
    }

    /// Waits until the process is connected to the store.
    pub(super) fn ready(&self, deadline: Instant) -> Result<()> {
        let mut state = locked(&self.state);
        loop {
            if let Some(ready) = &state.ready {
                return ready.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
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
    pub(super) fn is_usable(&self) -> bool {
        let state = locked(&self.state);
        let held: u64 = state.held.iter().map(|slot| slot.len).sum();
        let mut pending = state.pending.values();
        let hangs = pending.any(|pending| pending.since.elapsed() > HUNG);
        let starts = state.ready.is_none() && self.since.elapsed() <= HUNG;
        let is_ready = starts || matches!(state.ready, Some(Ok(())));
        is_ready && !state.has_ended && !hangs && held <= HELD_MAX
    }

    /// Sends a request. `slot` is the range of the memory that it is about.
    pub(super) fn ask(&self, request: &Request, slot: Option<Slot>) -> Result<Waiting> {
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
        Ok(Waiting { received })
    }

    /// Ends the process. Operations that it has not answered fail.
    pub(super) fn end(&self) {
        // An error means that the process has ended already.
        let _ = locked(&self.child).kill();
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

    fn end_of_process(&self) -> StoreError {
        let words = locked(&self.words);
        match words.is_empty() {
            true => failed("its process has ended"),
            false => failed(format_args!("its process has ended: {words}")),
        }
    }

    /// A thread: passes answers on until the process has ended.
    fn read(&self, socket: UnixStream) {
        use RemoteError::{Full, NotFound};
        for line in BufReader::new(socket)
            .lines()
            .map_while(std::io::Result::ok)
        {
            let Ok(answer) = serde_json::from_str::<Answer>(&line) else {
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
            // If the object or room for it is missing, no transfer was begun.
            let may_come = answer
                .error()
                .is_some_and(|error| !matches!(error.kind, NotFound | Full));
            if may_come {
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
        for line in BufReader::new(messages)
            .split(b'\n')
            .map_while(std::io::Result::ok)
        {
            let text = String::from_utf8_lossy(&line);
            if !text.trim().is_empty() {
                *locked(&self.words) = text.trim().chars().take(WORDS_MAX).collect();
            }
        }
    }
}

/// An answer that may come.
#[derive(Debug)]
pub(super) struct Waiting {
    received: Receiver<(Answer, Option<Slot>)>,
}

impl Waiting {
    /// The answer, and the range of the memory that the request was about.
    pub(super) fn wait(self, helper: &Helper, deadline: Instant) -> Result<(Answer, Option<Slot>)> {
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
