//! One connection of a server: bytes that have arrived from the peer, and bytes that the peer has not read yet.

use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use undercroft_contract::session::SessionToken;
use undercroft_io::fork::Unshared;

use super::connection::{AccountId, End};
use crate::budget::Budget;
use crate::descriptors::{self, Closer};
use crate::dialect::Dialect;
use crate::frame::{self, HEADER_BYTES, Header, VERSION};

/// Bytes read at a time.
pub(super) const READ_BYTES: usize = 256 << 10;

/// Most bytes that are sent before the other connections' turn.
const SEND_MAX: usize = 512 << 10;

/// Most bytes of a body from a peer without a session.
const FIRST_BODY_MAX: u32 = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The peer has no session and no arena.
    New,
    /// The peer has the arena, for the session with this token.
    Worker(SessionToken),
    /// The peer has the session with this token.
    Client(SessionToken),
}

/// The result of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// There may be more to read.
    More,
    /// All bytes that had arrived were read.
    All,
    /// The frame is too long for the remaining memory.
    NoRoom,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) stream: Unshared<UnixStream>,
    pub(super) role: Role,
    /// The peer's pid, as the kernel reports it; 0 for a process of another PID namespace.
    pub(super) pid: i32,
    /// The process of a worker, see [`process_of`](super::leaving::process_of).
    pub(super) process: Option<Unshared<OwnedFd>>,
    inbox: Vec<u8>,
    /// Bytes at the front of the inbox whose frames were carried out already; they are removed before the next read.
    done: usize,
    pub(super) outbox: Vec<u8>,
    /// Bytes of the outbox that were sent.
    sent: usize,
    /// Bytes of the outbox that are translated to the peer's version.
    translated: usize,
    /// The peer's version of the protocol, if it is an older version.
    pub(super) dialect: Option<&'static Dialect>,
    /// Bytes charged to the budget of inboxes.
    charged: u64,
    /// Time of the connection or of the last answer.
    pub(super) since: Instant,
    /// Time since which the rest of a frame is missing.
    half_since: Option<Instant>,
    /// The account of the peer's process in the fair queue.
    pub(super) account: AccountId,
    /// Whether the connection waits for its turn.
    pub(super) is_queued: bool,
    /// Whether the peer's frame waits for memory.
    pub(super) lacks_room: bool,
    /// Whether the peer reads no more. Its earlier messages are carried out.
    pub(super) is_deaf: bool,
}

impl Peer {
    pub(super) fn new(stream: UnixStream, pid: i32, account: AccountId) -> Self {
        Self {
            stream: stream.into(),
            role: Role::New,
            pid,
            process: None,
            inbox: Vec::new(),
            done: 0,
            outbox: Vec::new(),
            sent: 0,
            translated: 0,
            dialect: None,
            charged: 0,
            since: Instant::now(),
            half_since: None,
            account,
            is_queued: false,
            lacks_room: false,
            is_deaf: false,
        }
    }

    /// Bytes of answers that the peer has not read.
    pub(super) fn unread(&self) -> usize {
        self.outbox.len() - self.sent
    }

    /// Sends a part of the pending bytes. If the peer reads no more, drops them.
    pub(super) fn send(&mut self) {
        self.translate();
        let end = self.outbox.len().min(self.sent + SEND_MAX);
        while self.sent < end {
            match self.stream.write(&self.outbox[self.sent..end]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.is_deaf = true;
                    self.sent = self.outbox.len();
                    break;
                }
            }
        }
        if self.sent == self.outbox.len() {
            (self.sent, self.translated) = (0, 0);
            self.outbox.clear();
            self.outbox.shrink_to(READ_BYTES);
        } else if self.sent > self.outbox.len() / 2 {
            // At most as many bytes are moved as were sent.
            self.outbox.drain(..self.sent);
            self.translated = self.translated.saturating_sub(self.sent);
            self.sent = 0;
        }
    }

    /// Translates the replies since the last call into the peer's version.
    fn translate(&mut self) {
        if let Some(dialect) = self.dialect {
            let new = self.outbox.split_off(self.translated);
            self.outbox.extend(dialect.reply_frames(&new));
            self.translated = self.outbox.len();
        }
    }

    pub(super) fn version(&self) -> u16 {
        self.dialect.map_or(VERSION, |dialect| dialect.version)
    }

    /// Reads the peer's version of the protocol from the first header.
    fn learn_version(&mut self, dialects: &'static [Dialect]) {
        if let (Role::New, Some(head)) = (self.role, self.inbox.first_chunk::<HEADER_BYTES>()) {
            let version = u16::from_le_bytes([head[4], head[5]]);
            self.dialect = dialects.iter().find(|of| of.version == version);
        }
    }

    /// Reads a part of the bytes that have arrived.
    ///
    /// # Errors
    /// How the connection ends. `Malformed` if the peer has passed descriptors: nobody has asked for them.
    pub(super) fn fill(
        &mut self,
        budget: &mut Budget,
        scratch: &mut [u8],
        closer: &Closer,
    ) -> Result<Filled, End> {
        self.inbox.drain(..self.done);
        self.done = 0;
        self.lacks_room = !self.make_room(budget)?;
        if self.lacks_room {
            self.half_since = None;
            return Ok(Filled::NoRoom);
        }
        let received = match descriptors::receive(&self.stream, scratch) {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::WouldBlock && !self.is_deaf => {
                return Ok(Filled::All);
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(self.reset()),
            Err(_) => return Err(End::Closed),
        };
        if received.has_descriptors() {
            closer.close(received.descriptors);
            return Err(End::Malformed);
        }
        let bytes = received.bytes;
        // A peer that leaves in the middle of a frame has broken the protocol.
        if bytes == 0 {
            return Err(if self.inbox.is_empty() {
                End::Closed
            } else {
                End::Malformed
            });
        }
        self.inbox.extend_from_slice(&scratch[..bytes]);
        let is_worker = matches!(self.role, Role::Worker(_));
        if is_worker && self.inbox.len() > HEADER_BYTES {
            // After its first frame a worker sends one header only, to release the arena.
            return Err(End::Malformed);
        }
        self.charge(budget, self.inbox.capacity());
        Ok(if bytes < scratch.len() {
            Filled::All
        } else {
            Filled::More
        })
    }

    /// The end of a peer that did not read all that was sent. The kernel closes a descriptor that was not received.
    fn reset(&self) -> End {
        match self.role {
            // A worker is sent the arena only.
            Role::Worker(_) => End::LetGo,
            Role::New | Role::Client(_) => End::Closed,
        }
    }

    /// Makes room for the frame whose header has arrived, and for one more read. Returns whether there is room.
    fn make_room(&mut self, budget: &mut Budget) -> Result<bool, End> {
        let mut needed = self.inbox.len() + READ_BYTES;
        if let Some(head) = self.inbox.first_chunk::<HEADER_BYTES>() {
            let header = Header::decode_as(self.version(), head).map_err(End::from)?;
            let body_bytes = header.body_bytes;
            if self.role == Role::New && body_bytes > FIRST_BODY_MAX {
                return Err(End::Malformed);
            }
            needed = needed.max(HEADER_BYTES + body_bytes as usize + READ_BYTES);
        }
        if needed > self.inbox.capacity() {
            let more = (needed as u64).saturating_sub(self.charged);
            if !budget.allows(self.charged, more) {
                return Ok(false);
            }
            if needed > 2 * READ_BYTES {
                self.inbox.reserve_exact(needed - self.inbox.len());
            }
            self.charge(budget, self.inbox.capacity());
        }
        Ok(true)
    }

    fn charge(&mut self, budget: &mut Budget, bytes: usize) {
        budget.give_back(self.charged);
        self.charged = bytes as u64;
        budget.take(self.charged);
    }

    /// Frees the memory that the last frames used.
    pub(super) fn shrink(&mut self, budget: &mut Budget) {
        if self.done == self.inbox.len() {
            self.inbox.clear();
            self.done = 0;
            self.inbox.shrink_to(READ_BYTES);
            self.charge(budget, self.inbox.capacity());
        }
    }

    /// The length of the first frame, if it has arrived completely.
    pub(super) fn frame(&mut self, dialects: &'static [Dialect]) -> Result<Option<usize>, End> {
        if self.done == 0 {
            self.learn_version(dialects);
        }
        let first = frame::first_as(self.version(), &self.inbox[self.done..]);
        let first = first.map_err(End::from)?;
        let len = first.map(|(_, _, len)| len);
        if len.is_some() || self.done == self.inbox.len() {
            self.half_since = None;
        } else {
            self.half_since.get_or_insert_with(Instant::now);
        }
        Ok(len)
    }

    /// The bytes of the first frame, of length `len`, and the buffer for its answer.
    pub(super) fn first(&mut self, len: usize) -> (&[u8], &mut Vec<u8>) {
        let from = self.done;
        self.done += len;
        (&self.inbox[from..from + len], &mut self.outbox)
    }

    /// Removes the first frame, of length `len`, from the inbox.
    pub(super) fn take_frame(&mut self, len: usize) -> Vec<u8> {
        self.inbox.drain(..self.done);
        self.done = 0;
        let rest = self.inbox.split_off(len);
        std::mem::replace(&mut self.inbox, rest)
    }

    /// The server does not read from this peer: the missing rest of a frame is not the peer's fault.
    pub(super) fn pardon(&mut self) {
        self.half_since = None;
    }

    /// Whether the rest of a frame has been missing for longer than `timeout`.
    pub(super) fn is_stuck(&self, now: Instant, timeout: Duration) -> bool {
        self.half_since
            .is_some_and(|since| now.saturating_duration_since(since) > timeout)
    }

    /// Returns the inbox's share of the budget.
    pub(super) fn release(&mut self, budget: &mut Budget) {
        budget.give_back(std::mem::take(&mut self.charged));
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn messages_from_before_a_peers_end_are_read_although_no_answer_reaches_it() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut accounts = SlotMap::<AccountId, ()>::with_key();
        let mut peer = Peer::new(ours, 1, accounts.insert(()));
        theirs.write_all(b"the last words").unwrap();
        drop(theirs);
        peer.outbox.extend(b"an answer");
        peer.send();
        assert_eq!(peer.unread(), 0);
        let mut budget = Budget::new(1 << 20, 1 << 20);
        let mut scratch = vec![0; READ_BYTES];
        let closer = Closer::start().unwrap();
        let mut fill = || peer.fill(&mut budget, &mut scratch, &closer);
        assert_eq!(fill(), Ok(Filled::All));
        assert_eq!(peer.inbox, b"the last words");
    }

    #[test]
    fn a_peer_that_reads_no_answers_and_says_nothing_is_ended() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.shutdown(std::net::Shutdown::Read).unwrap();
        let mut accounts = SlotMap::<AccountId, ()>::with_key();
        let mut peer = Peer::new(ours, 1, accounts.insert(()));
        let mut budget = Budget::new(1 << 20, 1 << 20);
        let mut scratch = vec![0; READ_BYTES];
        let closer = Closer::start().unwrap();
        assert_eq!(
            peer.fill(&mut budget, &mut scratch, &closer),
            Ok(Filled::All)
        );
        peer.outbox.extend(b"an answer");
        peer.send();
        assert_eq!(
            peer.fill(&mut budget, &mut scratch, &closer),
            Err(End::Closed)
        );
    }
}
