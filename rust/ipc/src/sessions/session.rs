//! One session of a server: its requests, its pending lookups, its loads and saves.
//!
//! A message whose work grows with a prompt makes a [`Job`], which is carried out step by step. The session's next
//! message is carried out when its jobs are done.

use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use undercroft_contract::explain::Rest;
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{
    BlockEvents, Finished, GiveUp, Priority, Tokens, TransferEnd, TurnEnd,
};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::Engine;

use super::Violation;
use super::job::{HASH_STEP, HIT_STEP, HashJob, HitJob, Job, Then};
use super::request::{Looked, REQUEST_BYTES, ServedRequest, bytes_of, growth};
use super::state::{Budgets, ServedSession};
use super::transfers::end_some;
use crate::protocol::{
    HASHES_MAX, HashRun, LeasedHit, LookupAnswer, LookupMessage, REQUESTS_MAX, ServerMessage,
    label_of,
};

/// With more bytes of queued answers than this, a client gets no further answers until it has read these.
pub(crate) const ANSWERS_MAX: usize = 1 << 20;

/// Most pending lookups that one step examines.
const PENDING_STEP: usize = 64;

impl ServedSession {
    /// The client's connection has ended. Loads, saves and the leases of hits stay: workers may copy.
    pub(super) fn client_went(&mut self, budgets: &mut Budgets) {
        self.connected = false;
        self.pending.clear();
        self.resets.clear();
        self.jobs.clear();
        budgets
            .answers
            .give_back(std::mem::take(&mut self.answer_bytes));
    }

    /// Ends some lookups of a client whose connection has ended. Lookups whose answer was a hit are ended only if
    /// `all`. Returns true if there is nothing more to end.
    pub(super) fn step_end_of_client(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        all: bool,
    ) -> bool {
        let some: Vec<u64> = self.requests.keys().copied().take(PENDING_STEP).collect();
        for request in some {
            if let Some(mut state) = self.requests.remove(&request) {
                self.forget(&state, budgets);
                driver.enter(|engine| engine.end_unanswered(self.id, &state.name));
                self.left_behind.push((state.name, state.held.take()));
            }
        }
        if !self.requests.is_empty() {
            return false;
        }
        if !all {
            return true;
        }
        let from = self.left_behind.len().saturating_sub(PENDING_STEP);
        for (name, held) in self.left_behind.split_off(from) {
            driver.enter(|engine| engine.finish_request(self.id, &name));
            self.let_go(held, budgets);
        }
        if let Some((&number, transfer)) = self.transfers.iter().next() {
            if end_some(driver, transfer.id, TransferEnd::GivenUp(GiveUp::Closed)) {
                let held = self.transfers.remove(&number).and_then(|of| of.held);
                self.let_go(held, budgets);
            }
            return false;
        }
        self.left_behind.is_empty()
    }

    /// Number of lookups and resets that are pending.
    pub(super) fn pending(&self) -> usize {
        self.pending.len() + self.resets.len()
    }

    /// Whether messages are being carried out.
    pub(super) fn is_busy(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Bytes of memory of the session's requests and answers.
    pub(super) fn bytes(&self) -> u64 {
        self.request_bytes + self.answer_bytes
    }

    fn forget(&mut self, state: &ServedRequest, budgets: &mut Budgets) {
        let bytes = bytes_of(state);
        self.request_bytes -= bytes;
        budgets.hashes.give_back(bytes);
    }

    /// The request, with room for the hashes of a message.
    fn request(
        &mut self,
        request: u64,
        hashes: &HashRun<'_>,
        budgets: &mut Budgets,
    ) -> Result<&mut ServedRequest, Violation> {
        let count = hashes.count().ok_or(Violation)?;
        let is_full = self.requests.len() >= REQUESTS_MAX;
        let state = match self.requests.entry(request) {
            Entry::Occupied(state) => state.into_mut(),
            Entry::Vacant(_) if is_full => return Err(Violation),
            Entry::Vacant(place) => {
                let state = place.insert(ServedRequest::new(request));
                // Without memory for a request its lookups are misses, and the session goes on.
                if budgets.hashes.allows(self.request_bytes, REQUEST_BYTES) {
                    self.request_bytes += REQUEST_BYTES;
                    budgets.hashes.take(REQUEST_BYTES);
                } else {
                    state.give_up();
                }
                state
            }
        };
        if state.over {
            return Ok(state);
        }
        // A hash is sent once: client and server agree on how many are here, or one of them is broken.
        if hashes.known as usize != state.hashes.len() {
            return Err(Violation);
        }
        let before = bytes_of(state);
        if state.hashes.len() + count > HASHES_MAX {
            state.give_up();
        } else if let Some(bytes) = growth(&state.hashes, count) {
            if budgets.hashes.allows(self.request_bytes, bytes) {
                state.hashes.reserve(count);
            } else {
                state.give_up();
            }
        }
        let after = bytes_of(state);
        self.request_bytes = self.request_bytes - before + after;
        budgets.hashes.give_back(before);
        budgets.hashes.take(after);
        Ok(state)
    }

    /// Copies the hashes of a message.
    pub(super) fn take_hashes(
        &mut self,
        request: u64,
        hashes: &HashRun<'_>,
        budgets: &mut Budgets,
    ) -> Result<(), Violation> {
        let state = self.request(request, hashes, budgets)?;
        if state.over || hashes.append_to(&mut state.hashes) {
            Ok(())
        } else {
            Err(Violation)
        }
    }

    /// Copies the hashes of a message step by step from the message's frame, and then carries the message out.
    pub(super) fn take_hashes_later(
        &mut self,
        (request, hashes): (u64, HashRun<'_>),
        frame: Arc<Vec<u8>>,
        left: Range<usize>,
        budgets: &mut Budgets,
        then: Then,
    ) -> Result<(), Violation> {
        let is_over = self.request(request, &hashes, budgets)?.over;
        self.jobs.push_back(Job::Hashes(HashJob {
            request,
            left: if is_over { 0..0 } else { left },
            frame,
            hash_bytes: usize::from(hashes.hash_bytes),
            then,
        }));
        Ok(())
    }

    /// Notes the parameters of a lookup.
    fn ask(&mut self, message: &LookupMessage<'_>) {
        if let Some(state) = self.requests.get_mut(&message.request) {
            state.version = message.version;
            if !message.label.is_empty() && !state.over {
                state.label = label_of(message.label).to_owned();
            }
            (state.computed, state.max) = (message.computed, message.max);
            (state.min, state.wait, state.queued) = (message.min, message.wait, message.queued);
            if message.priority == Priority::Demand {
                state.priority = Priority::Demand;
            }
        }
    }

    pub(super) fn lookup(
        &mut self,
        driver: &Driver,
        message: &LookupMessage<'_>,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        self.take_hashes(message.request, &message.hashes, budgets)?;
        self.ask(message);
        self.look_up(driver, budgets, message.request, out);
        Ok(())
    }

    /// Like [`ServedSession::lookup`], with many hashes, which are in `frame` at `left`.
    pub(super) fn lookup_later(
        &mut self,
        message: &LookupMessage<'_>,
        (frame, left): (Arc<Vec<u8>>, Range<usize>),
        budgets: &mut Budgets,
    ) -> Result<(), Violation> {
        self.take_hashes_later(
            (message.request, message.hashes),
            frame,
            left,
            budgets,
            Then::LookUp,
        )?;
        self.ask(message);
        Ok(())
    }

    fn forget_pending(&mut self, request: u64) {
        let state = self.requests.get_mut(&request);
        if state.is_some_and(|state| std::mem::take(&mut state.pending)) {
            self.pending.retain(|&pending| pending != request);
        }
    }

    /// Carries out the lookup of a request whose hashes the server has.
    fn look_up(&mut self, driver: &Driver, budgets: &mut Budgets, request: u64, out: &mut Vec<u8>) {
        self.forget_pending(request);
        if !self.requests.contains_key(&request) {
            return;
        }
        let looked = self.looked(driver, budgets, request);
        let looked = looked.unwrap_or(Looked::Answer(LookupAnswer::NOTHING, None));
        self.answer(driver, budgets, request, true, looked, out);
    }

    /// Appends the answer to a lookup, or makes a job that appends it.
    fn answer(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        request: u64,
        direct: bool,
        looked: Looked,
        out: &mut Vec<u8>,
    ) {
        let Some(state) = self.requests.get_mut(&request) else {
            return;
        };
        let version = state.version;
        let hit = match looked {
            Looked::Answer(answer, rest) => {
                state.pending = answer.is_pending();
                if state.pending {
                    self.pending.push_back(request);
                }
                return append_answer((request, version, direct), answer, rest, out);
            }
            Looked::Hit(hit) => hit,
        };
        let bytes = 8 * hit.left.blocks();
        // Extents are collected for many hits at a time: a hit beyond their budget is answered as a miss.
        if !budgets.answers.allows(self.answer_bytes, bytes) {
            let (shared, held) = (hit.shared, state.held.take());
            driver.enter(|engine| engine.end_lookup(self.id, &state.name));
            self.let_go(held, budgets);
            let answer = LookupAnswer::Miss { shared };
            return append_answer((request, version, direct), answer, hit.rest, out);
        }
        self.answer_bytes += bytes;
        budgets.answers.take(bytes);
        let job = HitJob {
            request,
            version,
            direct,
            hit,
        };
        if job.hit.left.is_done() {
            self.tell_hit(driver, budgets, job, out);
        } else {
            self.jobs.push_back(Job::Hit(job));
        }
    }

    /// Collects some more of a hit's extents. Appends the answer when all are collected.
    fn tell_hit(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        mut job: HitJob,
        out: &mut Vec<u8>,
    ) {
        let mut is_lost = false;
        if !job.hit.left.is_done() {
            let left = &mut job.hit.left;
            let part = driver.read(|engine| engine.step_hit_extents(left, HIT_STEP));
            match part.flatten() {
                Some(part) => job.hit.parts.push(part),
                // The request has ended or has another hit, so the blocks of this one are leased no more.
                None => is_lost = true,
            }
        }
        if !is_lost && !job.hit.left.is_done() {
            // At the front, because a client's messages are answered in their order.
            self.jobs.push_front(Job::Hit(job));
            return;
        }
        let bytes = 8 * job.hit.left.blocks();
        self.answer_bytes -= bytes;
        budgets.answers.give_back(bytes);
        let shared = job.hit.shared;
        let answer = if is_lost {
            LookupAnswer::Miss { shared }
        } else {
            LookupAnswer::Hit(LeasedHit {
                tokens: job.hit.tokens,
                shared,
                brought: job.hit.brought,
                extents: job.hit.extents(),
            })
        };
        append_answer(
            (job.request, job.version, job.direct),
            answer,
            job.hit.rest,
            out,
        );
    }

    pub(super) fn demand(&mut self, request: u64, queued: Tokens) {
        if let Some(state) = self.requests.get_mut(&request) {
            state.priority = Priority::Demand;
            state.queued = queued;
        }
    }

    pub(super) fn end_lookup(&mut self, driver: &Driver, request: u64, budgets: &mut Budgets) {
        self.forget_pending(request);
        if let Some(state) = self.requests.get_mut(&request) {
            state.priority = Priority::Prefetch;
            driver.enter(|engine| engine.end_lookup(self.id, &state.name));
            let held = state.held.take();
            self.let_go(held, budgets);
        }
    }

    pub(super) fn finish_request(
        &mut self,
        driver: &Driver,
        (request, turn_end): (u64, TurnEnd),
        budgets: &mut Budgets,
    ) {
        self.forget_pending(request);
        if let Some(mut state) = self.requests.remove(&request) {
            self.forget(&state, budgets);
            let request = &*state.name;
            let finished = Finished { request, turn_end };
            driver.enter(|engine| engine.finish_request(self.id, finished));
            self.let_go(state.held.take(), budgets);
        }
    }

    /// Continues the message that is being carried out.
    pub(super) fn step(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        match self.jobs.pop_front() {
            Some(Job::Hashes(job)) => self.take_more_hashes(driver, budgets, job, out)?,
            Some(Job::Save(job)) => self.go_on_saving(driver, job, budgets, out),
            Some(Job::Hit(job)) => self.tell_hit(driver, budgets, job, out),
            Some(Job::End { transfer, end }) if !end_some(driver, transfer, end) => {
                self.jobs.push_front(Job::End { transfer, end });
            }
            Some(Job::End { .. }) | None => {}
        }
        Ok(())
    }

    fn take_more_hashes(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        mut job: HashJob,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let state = self.requests.get_mut(&job.request).ok_or(Violation)?;
        let end = job
            .left
            .end
            .min(job.left.start + HASH_STEP * job.hash_bytes);
        let some = job.frame[job.left.start..end].chunks_exact(job.hash_bytes);
        state.hashes.extend(some.filter_map(BlockHash::new));
        job.left.start = end;
        if !job.left.is_empty() {
            self.jobs.push_front(Job::Hashes(job));
            return Ok(());
        }
        match job.then {
            Then::LookUp => {
                self.look_up(driver, budgets, job.request, out);
                Ok(())
            }
            Then::Save(asked) => self.save(driver, job.request, asked, budgets, out),
            Then::Hint(asked) => {
                self.hint(driver, job.request, &asked, out);
                Ok(())
            }
        }
    }

    /// Appends the changes in the tiers since the last message of this kind.
    pub(super) fn take_events(&self, driver: &Driver, restart: bool, out: &mut Vec<u8>) {
        // An entry would make the IO thread retry the operations that wait for memory.
        let taken = driver.read_or_enter(
            |engine| (!restart && !engine.has_events(self.id)).then(BlockEvents::default),
            |engine| engine.take_events(self.id, restart),
        );
        let BlockEvents {
            cleared,
            events,
            more,
        } = taken.unwrap_or_default();
        ServerMessage::Events {
            cleared,
            more,
            events,
        }
        .append_to(out);
    }

    /// Appends the answers of some lookups that are no longer pending.
    pub(super) fn answer_lookups(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) {
        let some: Vec<u64> = self.pending.iter().copied().take(PENDING_STEP).collect();
        let (id, requests) = (self.id, &self.requests);
        let still_pending = |engine: &Engine, request: &u64| {
            let state = requests.get(request);
            state.is_some_and(|state| state.still_pending(engine, id))
        };
        // A read is enough here. An entry would make the IO thread retry the operations that wait for memory.
        let ended: Option<Vec<bool>> = driver.read(|engine| {
            let requests = some.iter();
            requests.map(|of| !still_pending(engine, of)).collect()
        });
        let ended = ended.unwrap_or_else(|| vec![true; some.len()]);
        self.pending.drain(..some.len());
        for (request, ended) in some.into_iter().zip(ended) {
            // The other lookups are answered when the client has read the queued answers.
            if !ended || out.len() > ANSWERS_MAX || self.is_busy() {
                self.pending.push_back(request);
                continue;
            }
            if !self.requests.contains_key(&request) {
                continue;
            }
            let looked = self.looked(driver, budgets, request);
            match looked.unwrap_or(Looked::Answer(LookupAnswer::NOTHING, None)) {
                Looked::Answer(answer, _) if answer.is_pending() => self.pending.push_back(request),
                looked => {
                    if let Some(state) = self.requests.get_mut(&request) {
                        state.pending = false;
                    }
                    self.answer(driver, budgets, request, false, looked, out);
                }
            }
        }
    }
}

fn append_answer(
    (request, version, direct): (u64, u32, bool),
    answer: LookupAnswer,
    rest: Option<Rest>,
    out: &mut Vec<u8>,
) {
    let shared = match &answer {
        LookupAnswer::Pending { shared } | LookupAnswer::Miss { shared } => *shared,
        LookupAnswer::Hit(hit) => hit.shared,
    };
    let message = |answer| ServerMessage::Answer {
        request,
        version,
        direct,
        answer,
        rest,
    };
    if !message(answer).append_to(out) {
        // A hit with too many extents for one frame is not worth a load.
        message(LookupAnswer::Miss { shared }).append_to(out);
    }
}
