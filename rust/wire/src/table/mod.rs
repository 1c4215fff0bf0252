//! What a client knows: its requests' lookups, its loads and saves, and the frames that wait to be sent.
//! Plain state without threads or clocks; `client` gives it both.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use undercroft_core::key::BlockHash;
use undercroft_core::namespace::NamespaceSpec;

use crate::protocol::{Ready, Reply, Request, WireExtent};

mod lookups;
#[cfg(test)]
mod tests;
mod transfers;

/// How often the server is asked whether it is there: while a request waits for the disk, and else.
const PING_PENDING: Duration = Duration::from_millis(50);
const PING: Duration = Duration::from_secs(1);

/// More frames than this are not kept for a server that does not read.
const OUTBOX_MAX: usize = 64 << 20;

/// A session that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The server's socket.
    pub socket: PathBuf,
    /// Which arena it has.
    pub generation: u64,
    /// Token that workers attach with.
    pub session: u128,
}

/// What a poll found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Polled {
    /// The deepest usable boundary.
    Ready(u32),
    /// The disk owes it, or the server; ask again later.
    Pending,
    /// The server's answer is on its way: worth a short wait, once.
    Soon,
}

/// Slots for a save, or the news that there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The save.
    pub save: u64,
    /// Token of the session that the slots are granted to.
    pub session: u128,
    /// Blocks were left out for want of memory.
    pub refused: bool,
    /// Where to copy to; empty if there is nothing to copy, and the save has ended.
    pub extents: Vec<WireExtent>,
}

#[derive(Debug, Default)]
enum State {
    /// No lookup.
    #[default]
    Idle,
    /// Submitted.
    Sent,
    /// The disk owes the answer.
    Pending,
    /// Answered, and the server leases it for us.
    Ready(Ready, Instant),
}

#[derive(Debug)]
struct Job {
    id: u64,
    version: u32,
    /// Hashes that the server has, and the last of them.
    known: u32,
    last: Option<BlockHash>,
    local_tokens: u32,
    max_tokens: u32,
    asked: bool,
    state: State,
    /// This lookup has been waited for.
    waited: bool,
    /// It is the second look at a miss: not worth waiting for.
    again: bool,
    /// Of the last answer.
    shared_tokens: u32,
    from_disk: Option<(u32, u32)>,
}

#[derive(Debug)]
pub(crate) struct Table {
    spec: NamespaceSpec,
    deadline: Duration,
    /// The session, while the connection is there.
    pub(crate) up: Option<Link>,
    /// The last session that there was.
    pub(crate) last: Option<Link>,
    /// Why the server refused us.
    pub(crate) refused: Option<String>,
    /// Why there is no connection.
    pub(crate) trouble: String,
    pub(crate) namespace: String,
    pub(crate) info: String,
    pub(crate) stats: String,
    /// Frames to send.
    pub(crate) outbox: Vec<u8>,
    jobs: HashMap<Box<str>, Job>,
    names: HashMap<u64, Box<str>>,
    next: u64,
    /// When the requests were sent whose direct replies are due, in order.
    awaiting: VecDeque<Instant>,
    pinged: Option<Instant>,
    loads: HashSet<u64>,
    /// Saves, and whether they have their slots.
    saves: HashMap<u64, bool>,
    grants: Vec<Grant>,
    resets: HashMap<u64, Option<bool>>,
    /// A reset was asked for: the weights may be others than the namespace says, whatever server comes.
    pub(crate) private: bool,
}

impl Table {
    pub(crate) fn new(spec: NamespaceSpec, deadline: Duration) -> Self {
        Self {
            namespace: spec.digest().to_hex(),
            spec,
            deadline,
            up: None,
            last: None,
            refused: None,
            trouble: "it has not answered yet".to_owned(),
            info: String::new(),
            stats: String::new(),
            outbox: Vec::new(),
            jobs: HashMap::new(),
            names: HashMap::new(),
            next: 1,
            awaiting: VecDeque::new(),
            pinged: None,
            loads: HashSet::new(),
            saves: HashMap::new(),
            grants: Vec::new(),
            resets: HashMap::new(),
            private: false,
        }
    }

    /// The session is open. `private`: as it was asked for.
    pub(crate) fn registered(&mut self, link: Link, private: bool, info: String) {
        self.info = info;
        self.refused = None;
        self.up = Some(link.clone());
        self.last = Some(link);
        if self.private && !private {
            // Asked for while the session was being opened.
            let ticket = self.next();
            self.send(&Request::Reset { ticket });
        }
    }

    /// The connection is lost, and with it the session: nobody answers what was asked, and the server
    /// ends the loads and saves once the workers have let go.
    pub(crate) fn lost(&mut self, why: String) {
        self.trouble = why;
        let Some(link) = self.up.take() else { return };
        self.outbox.clear();
        self.awaiting.clear();
        self.pinged = None;
        // The next server counts from zero.
        self.stats.clear();
        self.jobs.clear();
        self.names.clear();
        self.loads.clear();
        let session = link.session;
        let waiting = self.saves.drain().filter(|&(_, granted)| !granted);
        self.grants.extend(waiting.map(|(save, _)| Grant {
            save,
            session,
            refused: false,
            extents: Vec::new(),
        }));
        self.resets.values_mut().for_each(|ended| {
            ended.get_or_insert(false);
        });
    }

    /// Takes a reply. False if it is none that belongs here.
    pub(crate) fn reply(&mut self, reply: Reply, now: Instant) -> bool {
        let direct = match &reply {
            Reply::Answer { direct, .. } => *direct,
            Reply::Granted { .. } | Reply::Pong { .. } => true,
            _ => false,
        };
        if direct && self.awaiting.pop_front().is_none() {
            return false;
        }
        match reply {
            Reply::Answer {
                request,
                version,
                ready,
                ..
            } => {
                let job = self
                    .names
                    .get(&request)
                    .and_then(|name| self.jobs.get_mut(name));
                let current = |job: &&mut Job| {
                    job.version == version && matches!(job.state, State::Sent | State::Pending)
                };
                if let Some(job) = job.filter(current) {
                    job.state = match ready {
                        None => State::Pending,
                        Some(ready) => {
                            job.shared_tokens = ready.shared_tokens;
                            job.from_disk = ready.from_disk;
                            State::Ready(ready, now)
                        }
                    };
                }
            }
            Reply::Granted {
                save,
                refused,
                extents,
            } => {
                let session = self.up.as_ref().map_or(0, |link| link.session);
                match self.saves.get_mut(&save) {
                    Some(granted) => {
                        if extents.is_empty() {
                            self.saves.remove(&save);
                        } else {
                            *granted = true;
                        }
                        self.grants.push(Grant {
                            save,
                            session,
                            refused,
                            extents,
                        });
                    }
                    None if extents.is_empty() => {}
                    None => {
                        self.send(&Request::EndSave { save, ok: false });
                    }
                }
            }
            Reply::Reset { ticket, ok } => {
                if let Some(ended) = self.resets.get_mut(&ticket) {
                    *ended = Some(ok);
                }
            }
            Reply::Pong { stats } => self.stats = stats,
            Reply::Registered { .. } | Reply::Refused { .. } | Reply::Status { .. } => {
                return false;
            }
        }
        true
    }

    /// Asks the server whether it is there, from time to time. When to come again.
    pub(crate) fn tick(&mut self, now: Instant) -> Duration {
        if self.up.is_none() {
            return PING;
        }
        let pending = |job: &Job| matches!(job.state, State::Pending);
        let interval = if self.jobs.values().any(pending) {
            PING_PENDING
        } else {
            PING
        };
        let due = |at: Instant| now.duration_since(at) >= interval;
        if self.awaiting.is_empty() && self.pinged.is_none_or(due) {
            self.pinged = Some(now);
            if self.send(&Request::Ping) {
                self.awaiting.push_back(now);
            }
        }
        interval
    }

    /// Whether frames pile up for a server that does not read them.
    pub(crate) fn is_overfull(&self) -> bool {
        self.outbox.len() > OUTBOX_MAX
    }

    /// Whether so many frames wait to be sent that nothing new is asked: what follows from what was asked
    /// must still fit.
    fn is_filling(&self) -> bool {
        self.outbox.len() > OUTBOX_MAX / 2
    }

    /// Whether the server owes a direct reply for longer than its deadline: it is not asked meanwhile.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.is_later(now, self.deadline)
    }

    fn is_later(&self, now: Instant, deadline: Duration) -> bool {
        let deadline = deadline.max(self.deadline);
        self.awaiting
            .front()
            .is_some_and(|&at| now.saturating_duration_since(at) > deadline)
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn send(&mut self, request: &Request<'_>) -> bool {
        self.up.is_some() && request.append_to(&mut self.outbox)
    }
}
