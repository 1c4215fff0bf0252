//! Lookups: sent once, answered from memory, and sent again when the answer does not fit any more.

use std::time::{Duration, Instant};

use undercroft_contract::explain::{Reason, Rest};
use undercroft_contract::key::HashSource;
use undercroft_contract::session::{Finished, Hit, Lookup, LookupRequest, Priority, Step, Tokens};

use super::{ClientRequest, ClientState, Polled, Stage};
use crate::protocol::{
    ClientMessage, LookupMessage, REQUESTS_MAX, STEPS_MAX, append_with_hashes, label_of,
};

/// A lookup whose answer is a miss is sent again after this time, since other sessions save blocks.
const MISS_FRESH: Duration = Duration::from_millis(5);

/// Longest delay of a server's reply for requests that wait for the disk anyway.
const PENDING_DEADLINE: Duration = Duration::from_millis(100);

impl ClientState {
    /// The answer to a lookup, as far as the client has it. Asks the server if necessary.
    pub(crate) fn lookup(&mut self, question: &LookupRequest<'_>, now: Instant) -> Polled {
        if self.open.is_none() {
            return Polled::NOTHING;
        }
        let late = self.is_late(now);
        let (mut is_retry, mut shared) = (false, Tokens(0));
        if let Some(request) = self.requests.get(question.request) {
            shared = request.shared;
            let covered = question.max <= request.max
                && question.computed >= request.computed
                && question.min == request.min
                && question.wait == request.wait;
            let (waited, may_wait) = (request.waited, !request.is_retry);
            match &request.stage {
                // The answer to the question before may leave out blocks that this one could use.
                _ if !covered => {}
                Stage::Idle => {}
                Stage::Sent if late || waited && !may_wait => {
                    return Polled::Answer(Lookup::Miss { shared });
                }
                Stage::Sent => return on_its_way(question.priority, waited, shared),
                Stage::Pending if self.is_later(now, PENDING_DEADLINE) => {
                    return Polled::Answer(Lookup::Miss { shared });
                }
                Stage::Pending => {
                    if question.priority == Priority::Demand {
                        self.demand(question.request, question.queued);
                    }
                    return Polled::Answer(Lookup::Pending { shared });
                }
                Stage::Answered(hit, at) => {
                    let tokens = hit.as_ref().map(|hit| hit.tokens);
                    match tokens.filter(|&tokens| tokens > question.computed) {
                        Some(tokens) if tokens <= question.max => {
                            return Polled::Answer(Lookup::Hit(Hit { tokens, shared }));
                        }
                        // The hit ends behind the blocks that the request can use now.
                        Some(_) => {}
                        None if late || now.duration_since(*at) < MISS_FRESH => {
                            return Polled::Answer(Lookup::Miss { shared });
                        }
                        // Others may have saved blocks since.
                        None => is_retry = true,
                    }
                }
            }
        }
        if late || !self.send_lookup(question, is_retry, now) {
            return Polled::Answer(Lookup::Miss { shared });
        }
        on_its_way(question.priority, false, shared)
    }

    /// Whether a demanded lookup that was pending would be answered so again, and would have nothing to send.
    pub(crate) fn still_pending(&self, name: &str, now: Instant) -> bool {
        let request = self.open.is_some().then(|| self.requests.get(name));
        request
            .flatten()
            .is_some_and(|request| match request.stage {
                Stage::Idle | Stage::Answered(..) => false,
                Stage::Sent => request.waited && !request.is_retry && !self.is_late(now),
                Stage::Pending => request.demanded && !self.is_later(now, PENDING_DEADLINE),
            })
    }

    /// The short wait for the reply to a request's lookup has ended: the request does not wait again.
    pub(crate) fn waited(&mut self, name: &str) {
        if let Some(request) = self.requests.get_mut(name) {
            request.waited = true;
        }
    }

    /// The reason why a request's last answer has no more tokens: "no server" if no server gave this answer.
    pub(crate) fn rest(&self, name: &str, now: Instant) -> Option<Rest> {
        let of_server = self.requests.get(name);
        let is_answered = |request: &&ClientRequest| matches!(request.stage, Stage::Answered(..));
        match of_server.filter(is_answered) {
            Some(request) => request.rest,
            None if self.open.is_some() && !self.is_late(now) && of_server.is_none() => None,
            None => Some(Reason::NoServer.into()),
        }
    }

    /// Whether a request has no lookup that is pending, here or on the server.
    pub(crate) fn is_answered(&self, name: &str) -> bool {
        let pending = |of: &ClientRequest| matches!(of.stage, Stage::Sent | Stage::Pending);
        self.open.is_none() || !self.requests.get(name).is_some_and(pending)
    }

    /// Whether the server has not replied to a request's lookup yet.
    pub(crate) fn is_sent(&self, name: &str) -> bool {
        let sent = |request: &ClientRequest| matches!(request.stage, Stage::Sent);
        self.open.is_some() && self.requests.get(name).is_some_and(sent)
    }

    /// The lookup is not needed any more. Idempotent.
    pub(crate) fn end_lookup(&mut self, name: &str) {
        let Some(state) = self.requests.get_mut(name) else {
            return;
        };
        if !matches!(state.stage, Stage::Idle) {
            state.stage = Stage::Idle;
            // An answer that is still due is void.
            state.version += 1;
            let request = state.id;
            self.send(&ClientMessage::EndLookup { request });
        }
    }

    /// The request has finished. Idempotent.
    pub(crate) fn finish_request(&mut self, finished: Finished<'_>) {
        if let Some(state) = self.requests.remove(finished.request) {
            self.names.remove(&state.id);
            self.send(&ClientMessage::FinishRequest {
                request: state.id,
                turn_end: finished.turn_end,
            });
        }
    }

    /// Tells the server, once, that the scheduler waits for a lookup.
    fn demand(&mut self, name: &str, queued: Tokens) {
        let Some(state) = self.requests.get_mut(name) else {
            return;
        };
        if !std::mem::replace(&mut state.demanded, true) {
            let request = state.id;
            self.send(&ClientMessage::Demand { request, queued });
        }
    }

    /// Reports the vLLM's steps to the server. A report that cannot be sent is dropped.
    pub(crate) fn report_steps(&mut self, steps: &[Step]) {
        if self.is_filling() {
            return;
        }
        for steps in steps.chunks(STEPS_MAX) {
            let steps = steps.to_vec();
            self.send(&ClientMessage::ReportSteps { steps });
        }
    }

    /// A request's id, and the number of its hashes that the server has. `None` if there are too many requests.
    pub(super) fn request(&mut self, name: &str, hashes: &dyn HashSource) -> Option<(u64, u32)> {
        if let Some(request) = self.requests.get(name) {
            // Each hash covers all hashes before it.
            let last = request.known.checked_sub(1).map(|at| at as usize);
            if last.and_then(|at| hashes.get(at)) == request.last {
                return Some((request.id, request.known));
            }
            // This is another prompt under the same name.
            self.finish_request(name.into());
        }
        if self.requests.len() >= REQUESTS_MAX {
            return None;
        }
        let id = self.next_number();
        self.names.insert(id, name.into());
        let request = ClientRequest {
            id,
            version: 0,
            known: 0,
            last: None,
            computed: Tokens(0),
            max: Tokens(0),
            min: Tokens(0),
            wait: None,
            demanded: false,
            stage: Stage::Idle,
            waited: false,
            is_retry: false,
            shared: Tokens(0),
            rest: None,
        };
        self.requests.insert(name.into(), request);
        Some((id, 0))
    }

    /// The server has `count` more of a request's hashes.
    pub(super) fn learned(&mut self, name: &str, hashes: &dyn HashSource, count: u32) {
        if let Some(request) = self.requests.get_mut(name) {
            request.known += count;
            let last = request.known.checked_sub(1);
            request.last = last.and_then(|at| hashes.get(at as usize));
        }
    }

    /// Sends a lookup to the server. Returns false if no message can be sent now.
    fn send_lookup(&mut self, question: &LookupRequest<'_>, is_retry: bool, now: Instant) -> bool {
        let (name, hashes) = (question.request, question.hashes);
        let Some((id, known)) = self.request(name, hashes) else {
            return false;
        };
        if self.is_filling() {
            return false;
        }
        let version = self.requests.get(name).map_or(0, |request| request.version) + 1;
        let message = |hashes| {
            ClientMessage::Lookup(LookupMessage {
                request: id,
                version,
                label: if known == 0 { label_of(name) } else { "" },
                computed: question.computed,
                max: question.max,
                min: question.min,
                priority: question.priority,
                wait: question.wait,
                queued: question.queued,
                hashes,
            })
        };
        let Some(count) = append_with_hashes(&mut self.outbox, hashes, known, message) else {
            return false;
        };
        self.learned(name, hashes, count);
        self.replies_due.push_back(now);
        if let Some(request) = self.requests.get_mut(name) {
            request.version = version;
            (request.computed, request.max) = (question.computed, question.max);
            (request.min, request.wait) = (question.min, question.wait);
            request.demanded = question.priority == Priority::Demand;
            request.stage = Stage::Sent;
            (request.waited, request.is_retry) = (false, is_retry);
        }
        true
    }
}

/// The answer while the server's reply is due: the scheduler waits once for the reply, a prefetch does not wait.
fn on_its_way(priority: Priority, waited: bool, shared: Tokens) -> Polled {
    if waited || priority == Priority::Prefetch {
        Polled::Answer(Lookup::Pending { shared })
    } else {
        Polled::Soon { shared }
    }
}
