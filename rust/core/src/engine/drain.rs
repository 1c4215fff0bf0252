//! An engine that drains, before maintenance: it begins no save and no read, and writes what waits to disk and to
//! the remote store.

use serde::Serialize;

use super::coordinator::Engine;
use super::jobs::Due;
use super::remote::Remote;
use crate::explain::Reason;

/// How far an engine has drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drained {
    /// No save begins, and no read from disk or from the remote store.
    pub draining: bool,
    /// Saves that began before the drain and have not ended.
    pub saves: u64,
    /// Bytes of the payloads that wait to be written.
    pub queued_bytes: u64,
    /// Reads and writes in flight on the devices.
    pub operations: u64,
    /// Objects that wait to be written to the remote store, or are being written.
    pub remote_writes: u64,
    /// Nothing is left to be written to disk or to the remote store, and nothing is being fetched from the remote
    /// store.
    pub clean: bool,
}

impl Engine {
    /// Begins to drain; with `cancel`, stops draining. Idempotent.
    pub fn drain(&mut self, cancel: bool) -> Drained {
        self.draining = !cancel;
        if self.draining {
            self.write_touched();
        }
        self.drained()
    }

    /// Why nothing is read from disk: `unread`, or the drain if `unread` names no reason.
    pub(super) fn unless_draining(&self, unread: Reason) -> Reason {
        match unread {
            Reason::Complete if self.draining => Reason::Draining,
            unread => unread,
        }
    }

    /// How far the engine has drained.
    pub fn drained(&self) -> Drained {
        let saves = self.sessions.all_transfers().saves;
        let remote = self.remote.as_deref();
        let remote_writes = remote.map_or(0, Remote::unwritten);
        let is_reading = remote.is_some_and(Remote::is_reading);
        let is_written =
            saves == 0 && remote_writes == 0 && self.is_quiet() && self.wake() < Due::Now;
        Drained {
            draining: self.draining,
            saves,
            queued_bytes: self.residency.queued_bytes(),
            operations: self.operations.len() as u64,
            remote_writes,
            clean: self.draining && is_written && !is_reading,
        }
    }
}
