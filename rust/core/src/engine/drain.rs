//! An engine that drains, before maintenance: it begins no save and no promotion, and writes its queue to disk.

use serde::Serialize;

use super::coordinator::Engine;
use crate::explain::Reason;

/// How far an engine has drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drained {
    /// No save and no promotion begins.
    pub draining: bool,
    /// Saves that began before, and have not ended.
    pub saves: u64,
    /// Bytes of the payloads that wait to be written.
    pub queued_bytes: u64,
    /// Reads and writes that the devices have.
    pub operations: u64,
    /// Nothing is left to be written.
    pub clean: bool,
}

impl Engine {
    /// Begins or, with `cancel`, ends to drain. Idempotent.
    pub fn drain(&mut self, cancel: bool) -> Drained {
        self.draining = !cancel;
        if self.draining {
            self.write_touched();
        }
        self.drained()
    }

    /// Why nothing is read from disk, if nothing else forbids it.
    pub(super) fn unless_draining(&self, unread: Reason) -> Reason {
        match unread {
            Reason::Complete if self.draining => Reason::Draining,
            unread => unread,
        }
    }

    /// How far the engine has drained.
    pub fn drained(&self) -> Drained {
        let saves = self.sessions.all_transfers().saves;
        Drained {
            draining: self.draining,
            saves,
            queued_bytes: self.residency.queued_bytes(),
            operations: self.operations.len() as u64,
            clean: self.draining && saves == 0 && self.is_quiet() && !self.has_rest(),
        }
    }
}
