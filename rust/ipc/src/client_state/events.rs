//! Events of a server's tiers, as a client receives them.

use std::time::{Duration, Instant};

use undercroft_contract::session::BlockEvents;

use super::ClientState;
use crate::protocol::ClientMessage;

/// Interval between two questions to a server that had no more events.
const ASK: Duration = Duration::from_millis(5);

/// Events that have arrived and were not taken yet, and the question for more.
#[derive(Debug, Default)]
pub(super) struct EventState {
    taken: BlockEvents,
    /// Whether the caller takes events.
    is_used: bool,
    /// Time of the last question to the server on this connection.
    asked: Option<Instant>,
    /// Whether the reply has not arrived yet.
    is_due: bool,
    /// Whether the server has more events.
    more: bool,
    /// Whether the caller has forgotten all events: the server must begin again, and a due reply is void.
    restart: bool,
}

impl EventState {
    /// A session is open. Its events have not been requested yet.
    pub(super) fn opened(&mut self) {
        self.more = true;
    }

    /// The session is lost: its events are void.
    pub(super) fn lost(&mut self) {
        let restart = self.restart;
        *self = Self {
            is_used: self.is_used,
            ..Self::default()
        };
        // A caller that has asked for a restart holds no events that need to be voided.
        self.taken.cleared = self.is_used && !restart;
    }

    /// The server has sent events. Returns false if the client has not asked for events.
    pub(super) fn take(&mut self, told: BlockEvents) -> bool {
        if self.restart {
            return std::mem::take(&mut self.is_due);
        }
        if told.cleared {
            self.taken.events.clear();
            self.taken.cleared = true;
        }
        self.taken.events.extend(told.events);
        self.more = told.more;
        std::mem::take(&mut self.is_due)
    }
}

impl ClientState {
    /// The events since the last call. Asks the server for more. `restart`: asks for all events again, since the caller
    /// has forgotten the earlier events.
    pub(crate) fn take_events(&mut self, restart: bool, now: Instant) -> BlockEvents {
        self.events.is_used = true;
        if restart {
            self.events.taken = BlockEvents::default();
            (self.events.restart, self.events.more) = (true, true);
        }
        let mut taken = std::mem::take(&mut self.events.taken);
        if self.open.is_none() || self.is_late(now) {
            return taken;
        }
        let is_new = |at: Instant| now.saturating_duration_since(at) < ASK;
        let waits = !self.events.more && self.events.asked.is_some_and(is_new);
        if !self.events.is_due && !waits && !self.is_filling() {
            let restart = self.events.restart;
            self.events.is_due = self.send(&ClientMessage::TakeEvents { restart });
            if self.events.is_due {
                self.events.restart = false;
                self.replies_due.push_back(now);
                self.events.asked = Some(now);
            }
        }
        taken.more = self.events.more;
        taken
    }
}
