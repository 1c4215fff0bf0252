//! Lookups: asked for ahead of time, answered from memory, asked for again when the answer no longer fits.

use std::time::{Duration, Instant};

use undercroft_core::key::HashSource;

use super::{Job, Polled, State, Table};
use crate::protocol::{REQUESTS_MAX, Request, append_with_hashes};

/// An answer without a gain is asked for again when it is older than this: others save all the time.
const MISS_FRESH: Duration = Duration::from_millis(5);

/// How late a server may be for requests that wait for the disk anyway.
const PENDING_DEADLINE: Duration = Duration::from_millis(100);

impl Table {
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

    fn ask(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else {
            return;
        };
        if !std::mem::replace(&mut job.asked, true) {
            let request = job.id;
            self.send(&Request::Ask { request });
        }
    }

    /// A request's number, and how many of its hashes the server has. `None` if it has too many requests.
    pub(super) fn job<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
    ) -> Option<(u64, u32)> {
        if let Some(job) = self.jobs.get(name) {
            // Each hash covers all before it.
            let last = job.known.checked_sub(1).map(|at| at as usize);
            if last.and_then(|at| hashes.get(at)) == job.last {
                return Some((job.id, job.known));
            }
            // Another prompt under the same name.
            self.forget(name);
        }
        if self.jobs.len() >= REQUESTS_MAX {
            return None;
        }
        let id = self.next();
        self.names.insert(id, name.into());
        let job = Job {
            id,
            version: 0,
            known: 0,
            last: None,
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
        Some((id, 0))
    }

    /// The server has `count` more of a request's hashes.
    pub(super) fn learned<H: HashSource + ?Sized>(&mut self, name: &str, hashes: &H, count: u32) {
        if let Some(job) = self.jobs.get_mut(name) {
            job.known += count;
            let last = job.known.checked_sub(1);
            job.last = last.and_then(|at| hashes.get(at as usize));
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
        let Some((request, known)) = self.job(name, hashes) else {
            return false;
        };
        let version = self.jobs.get(name).map_or(0, |job| job.version) + 1;
        if self.up.is_none() || self.is_filling() {
            return false;
        }
        let frame = |hashes| Request::Submit {
            request,
            version,
            local_tokens,
            max_tokens,
            asked,
            wait_ns,
            hashes,
        };
        let Some(count) = append_with_hashes(&mut self.outbox, hashes, known, frame) else {
            return false;
        };
        self.learned(name, hashes, count);
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
