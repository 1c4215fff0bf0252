//! What a client knows: its requests' lookups, its loads and saves, and the frames that wait to be sent.
//! Plain state without threads or clocks; `client` gives it both.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use undercroft_core::key::HashSource;
use undercroft_core::namespace::{GroupKind, NamespaceSpec};

use crate::protocol::{Hashes, Ready, Reply, Request, WireExtent};

/// An answer without a gain is asked for again when it is older than this: others save all the time.
const MISS_FRESH: Duration = Duration::from_millis(5);

/// How late a server may be for requests that wait for the disk anyway.
const PENDING_DEADLINE: Duration = Duration::from_millis(100);

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
    /// Of the arena that the slots are in.
    pub generation: u64,
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
    /// Hashes that the server has.
    known: u32,
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

#[derive(Clone, Copy, Debug)]
enum End {
    Load(u64, bool),
    Save(u64, bool),
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
    scratch: Vec<u8>,
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
    /// Ends that could not be told because the connection was lost.
    ends: Vec<End>,
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
            trouble: String::new(),
            info: String::new(),
            stats: String::new(),
            outbox: Vec::new(),
            scratch: Vec::new(),
            jobs: HashMap::new(),
            names: HashMap::new(),
            next: 1,
            awaiting: VecDeque::new(),
            pinged: None,
            loads: HashSet::new(),
            saves: HashMap::new(),
            grants: Vec::new(),
            resets: HashMap::new(),
            ends: Vec::new(),
        }
    }

    // Lookup

    /// Starts a lookup before the scheduler asks. Idempotent.
    pub(crate) fn submit<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
        (local_tokens, max_tokens): (u32, u32),
        wait_ns: Option<(u64, u64)>,
        now: Instant,
    ) {
        if self.up.is_none() || self.is_late(now) {
            return;
        }
        let idle = |job: &Job| matches!(job.state, State::Idle);
        if self.jobs.get(name).is_none_or(idle) {
            self.send_lookup(
                name,
                hashes,
                (local_tokens, max_tokens),
                wait_ns,
                false,
                now,
            );
        }
    }

    /// The answer as far as it is known; submits the request if need be.
    pub(crate) fn poll<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
        (local_tokens, max_tokens): (u32, u32),
        wait_ns: Option<(u64, u64)>,
        now: Instant,
    ) -> Polled {
        if self.up.is_none() {
            return Polled::Ready(0);
        }
        let late = self.is_late(now);
        let mut again = false;
        if let Some(job) = self.jobs.get(name) {
            let deeper = max_tokens > job.max_tokens || local_tokens < job.local_tokens;
            match &job.state {
                State::Sent if !deeper => {
                    return if late || job.again && job.waited {
                        Polled::Ready(0)
                    } else if job.waited {
                        Polled::Pending
                    } else {
                        Polled::Soon
                    };
                }
                State::Pending if !deeper => {
                    if self.is_later(now, PENDING_DEADLINE) {
                        return Polled::Ready(0);
                    }
                    self.ask(name);
                    return Polled::Pending;
                }
                State::Ready(ready, at) if !deeper => {
                    let gain = ready.tokens > local_tokens;
                    if gain && ready.tokens <= max_tokens {
                        return Polled::Ready(ready.tokens);
                    }
                    if !gain && (late || now.duration_since(*at) < MISS_FRESH) {
                        return Polled::Ready(ready.tokens);
                    }
                    again = !gain;
                }
                _ => {}
            }
        }
        if late {
            return Polled::Ready(0);
        }
        let sent = self.send_lookup(name, hashes, (local_tokens, max_tokens), wait_ns, true, now);
        if let Some(job) = self.jobs.get_mut(name) {
            job.again = again;
        }
        if sent { Polled::Soon } else { Polled::Ready(0) }
    }

    /// The short wait for a request's answer is over: it is not waited for again.
    pub(crate) fn waited(&mut self, name: &str) {
        if let Some(job) = self.jobs.get_mut(name) {
            job.waited = true;
        }
    }

    /// Whether neither the server nor the disk owes an answer.
    pub(crate) fn is_answered(&self, name: &str) -> bool {
        let owed = |job: &Job| matches!(job.state, State::Sent | State::Pending);
        self.up.is_none() || !self.jobs.get(name).is_some_and(owed)
    }

    /// Whether the server has not said anything about a request yet.
    pub(crate) fn is_sent(&self, name: &str) -> bool {
        let sent = |job: &Job| matches!(job.state, State::Sent);
        self.up.is_some() && self.jobs.get(name).is_some_and(sent)
    }

    pub(crate) fn shared_tokens(&self, name: &str) -> u32 {
        self.jobs.get(name).map_or(0, |job| job.shared_tokens)
    }

    /// Of the tokens in `(local, local + external]`, how many came from (host, disk).
    pub(crate) fn sources(&self, name: &str, local: u32, external: u32) -> (u32, u32) {
        let end = local.saturating_add(external);
        let from_disk = self.jobs.get(name).and_then(|job| job.from_disk);
        let disk = from_disk.map_or(0, |(after, to)| {
            to.clamp(local, end) - after.clamp(local, end)
        });
        (external - disk, disk)
    }

    /// The lookup is not needed any more. Idempotent.
    pub(crate) fn release(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else {
            return;
        };
        if !matches!(job.state, State::Idle) {
            job.state = State::Idle;
            // What is on its way is void.
            job.version += 1;
            let request = job.id;
            self.send(&Request::Release { request });
        }
    }

    /// The request has ended. Idempotent.
    pub(crate) fn forget(&mut self, name: &str) {
        if let Some(job) = self.jobs.remove(name) {
            self.names.remove(&job.id);
            self.send(&Request::Forget { request: job.id });
        }
    }

    // Loads and saves

    /// Begins the load of `(local, local + external]` tokens of what was answered: its number, the arena's
    /// generation, and where to copy from. `None` if the answer does not cover it.
    pub(crate) fn begin_load(
        &mut self,
        name: &str,
        local: u32,
        external: u32,
    ) -> Option<(u64, u64, Vec<WireExtent>)> {
        let generation = self.up.as_ref()?.generation;
        let job = self.jobs.get_mut(name)?;
        let State::Ready(ready, _) = &job.state else {
            return None;
        };
        let end = local.checked_add(external)?;
        let only_full = |kind| matches!(kind, GroupKind::Full | GroupKind::Ignored);
        let partial = end < ready.tokens;
        if external == 0
            || local < job.local_tokens
            || end > ready.tokens
            || partial && !self.spec.groups.iter().all(|group| only_full(group.kind))
            || end % self.spec.hash_block_tokens != 0
        {
            return None;
        }
        let mut extents = Vec::with_capacity(ready.extents.len());
        for (group, first, slots) in &ready.extents {
            let tokens = self.spec.groups.get(usize::from(*group))?.block_tokens;
            // A block counts if it ends after what the device holds, up to the boundary.
            let skip = (local / tokens)
                .saturating_sub(*first)
                .min(u32::try_from(slots.len()).ok()?);
            let keep = (end / tokens).saturating_sub(*first + skip) as usize;
            let rest = &slots[skip as usize..];
            let kept = rest[..keep.min(rest.len())].to_vec();
            if !kept.is_empty() {
                extents.push((*group, first + skip, kept));
            }
        }
        let request = job.id;
        job.state = State::Idle;
        let load = self.next();
        self.loads.insert(load);
        self.send(&Request::BeginLoad {
            request,
            load,
            local_tokens: local,
            external_tokens: external,
        });
        Some((load, generation, extents))
    }

    pub(crate) fn end_load(&mut self, load: u64, ok: bool) {
        if self.loads.remove(&load) {
            self.end(End::Load(load, ok));
        }
    }

    /// Asks for slots for the full blocks of the first `tokens` tokens. The number of the save, whose grant
    /// comes later; `None` if the server is not there.
    pub(crate) fn begin_save<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
        tokens: u32,
        offers: &[(u8, u32, u32)],
        now: Instant,
    ) -> Option<u64> {
        if self.up.is_none() || self.is_late(now) {
            return None;
        }
        let save = self.next();
        let (request, known) = self.job(name, hashes);
        let mut bytes = std::mem::take(&mut self.scratch);
        let (count, hash_bytes) = collect(hashes, known, &mut bytes);
        let sent = self.send(&Request::BeginSave {
            request,
            save,
            hashes: Hashes {
                known,
                hash_bytes,
                bytes: &bytes,
            },
            tokens,
            offers: offers.to_vec(),
        });
        self.scratch = bytes;
        if !sent {
            return None;
        }
        self.learned(name, count);
        self.awaiting.push_back(now);
        self.saves.insert(save, false);
        Some(save)
    }

    /// The grants that have come since the last call.
    pub(crate) fn take_grants(&mut self) -> Vec<Grant> {
        std::mem::take(&mut self.grants)
    }

    pub(crate) fn end_save(&mut self, save: u64, ok: bool) {
        // If its slots are still on their way, they are given back when they come.
        if self.saves.remove(&save) == Some(true) {
            self.end(End::Save(save, ok));
        }
    }

    fn end(&mut self, end: End) {
        if self.up.is_none() {
            self.ends.push(end);
            return;
        }
        match end {
            End::Load(load, ok) => self.send(&Request::EndLoad { load, ok }),
            End::Save(save, ok) => self.send(&Request::EndSave { save, ok }),
        };
    }

    /// Asks to drop everything of the namespace; its number. `None` if the server is not there.
    pub(crate) fn reset(&mut self) -> Option<u64> {
        self.up.as_ref()?;
        // Answers from before must not be loaded any more.
        let names: Vec<Box<str>> = self.jobs.keys().cloned().collect();
        for name in names {
            self.release(&name);
        }
        let ticket = self.next();
        self.resets.insert(ticket, None);
        self.send(&Request::Reset { ticket });
        Some(ticket)
    }

    /// How a reset ended, once it has.
    pub(crate) fn take_reset(&mut self, ticket: u64) -> Option<bool> {
        let ended = self.resets.get(&ticket).copied().unwrap_or(Some(false));
        if ended.is_some() {
            self.resets.remove(&ticket);
        }
        ended
    }

    // The connection

    /// The session is open.
    pub(crate) fn registered(&mut self, link: Link, resumed: bool, info: String) {
        if !resumed {
            // The server knows nothing of them.
            self.loads.clear();
            self.saves.clear();
            self.ends.clear();
        }
        self.info = info;
        self.refused = None;
        self.up = Some(link.clone());
        self.last = Some(link);
        for end in std::mem::take(&mut self.ends) {
            self.end(end);
        }
    }

    /// The connection is lost: nobody answers what was asked.
    pub(crate) fn lost(&mut self, why: String) {
        self.trouble = why;
        let Some(link) = self.up.take() else { return };
        self.outbox.clear();
        self.awaiting.clear();
        self.pinged = None;
        self.jobs.clear();
        self.names.clear();
        let generation = link.generation;
        let waiting = self.saves.iter().filter(|(_, granted)| !**granted);
        let empty = waiting.map(|(&save, _)| Grant {
            save,
            generation,
            refused: false,
            extents: Vec::new(),
        });
        self.grants.extend(empty);
        self.saves.retain(|_, granted| *granted);
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
                let generation = self.up.as_ref().map_or(0, |link| link.generation);
                match self.saves.get_mut(&save) {
                    Some(granted) => {
                        if extents.is_empty() {
                            self.saves.remove(&save);
                        } else {
                            *granted = true;
                        }
                        self.grants.push(Grant {
                            save,
                            generation,
                            refused,
                            extents,
                        });
                    }
                    None if extents.is_empty() => {}
                    None => self.end(End::Save(save, false)),
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

    fn ask(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else {
            return;
        };
        if !std::mem::replace(&mut job.asked, true) {
            let request = job.id;
            self.send(&Request::Ask { request });
        }
    }

    /// A request's number, and how many of its hashes the server has.
    fn job<H: HashSource + ?Sized>(&mut self, name: &str, hashes: &H) -> (u64, u32) {
        if let Some(job) = self.jobs.get(name) {
            if job.known as usize <= hashes.len() {
                return (job.id, job.known);
            }
            // Another prompt under the same name.
            self.forget(name);
        }
        let id = self.next();
        self.names.insert(id, name.into());
        let job = Job {
            id,
            version: 0,
            known: 0,
            local_tokens: 0,
            max_tokens: 0,
            asked: false,
            state: State::Idle,
            waited: false,
            again: false,
            shared_tokens: 0,
            from_disk: None,
        };
        self.jobs.insert(name.into(), job);
        (id, 0)
    }

    fn learned(&mut self, name: &str, count: u32) {
        if let Some(job) = self.jobs.get_mut(name) {
            job.known += count;
        }
    }

    fn send_lookup<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
        (local_tokens, max_tokens): (u32, u32),
        wait_ns: Option<(u64, u64)>,
        asked: bool,
        now: Instant,
    ) -> bool {
        let (request, known) = self.job(name, hashes);
        let version = self.jobs.get(name).map_or(0, |job| job.version) + 1;
        let mut bytes = std::mem::take(&mut self.scratch);
        let (count, hash_bytes) = collect(hashes, known, &mut bytes);
        let sent = self.send(&Request::Submit {
            request,
            version,
            hashes: Hashes {
                known,
                hash_bytes,
                bytes: &bytes,
            },
            local_tokens,
            max_tokens,
            asked,
            wait_ns,
        });
        self.scratch = bytes;
        if !sent {
            return false;
        }
        self.learned(name, count);
        self.awaiting.push_back(now);
        if let Some(job) = self.jobs.get_mut(name) {
            job.version = version;
            (job.local_tokens, job.max_tokens) = (local_tokens, max_tokens);
            job.asked = asked;
            job.state = State::Sent;
            (job.waited, job.again) = (false, false);
        }
        true
    }
}

/// The hashes after the first `known`, one after the other: their number and length.
fn collect<H: HashSource + ?Sized>(hashes: &H, known: u32, out: &mut Vec<u8>) -> (u32, u8) {
    out.clear();
    let mut len = 0;
    let mut count = 0;
    for index in known as usize..hashes.len() {
        let Some(hash) = hashes.get(index) else { break };
        let bytes = hash.as_bytes();
        if count == 0 {
            len = bytes.len();
            out.reserve(len * (hashes.len() - index));
        } else if bytes.len() != len {
            break;
        }
        out.extend_from_slice(bytes);
        count += 1;
    }
    // Without a hash its length does not matter, but it must be one.
    (count, u8::try_from(len.max(1)).unwrap_or(1))
}
