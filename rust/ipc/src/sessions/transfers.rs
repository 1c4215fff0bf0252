//! A session's loads and saves.

use std::ops::Range;
use std::sync::Arc;

use undercroft_contract::session::{
    Extent, SaveEnd, SaveRefusal, SaveRequest, Tokens, TransferEnd, TransferId, append_extents,
};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{SaveLimit, SaveProgress};

use super::Violation;
use super::job::{Job, SAVE_STEP, SaveAsked, SaveJob, Then};
use super::state::{Budgets, ServedSession, ServedTransfer};
use crate::budget::share;
use crate::protocol::{SaveMessage, ServerMessage};

/// Most loads and saves of a session at a time.
const TRANSFERS_MAX: usize = 1 << 16;

impl ServedSession {
    pub(super) fn begin_load(
        &mut self,
        driver: &Driver,
        request: u64,
        transfer: u64,
        (computed, external): (Tokens, Tokens),
    ) -> Result<(), Violation> {
        self.check_transfer(transfer)?;
        let state = self.requests.get_mut(&request).ok_or(Violation)?;
        let load = driver
            .enter(|engine| engine.begin_known_load(self.id, &state.name, computed, external));
        match load {
            Some(Some(id)) => {
                // The load keeps the chain of the hit, which has ended.
                let held = state.held.take();
                self.transfers.insert(transfer, ServedTransfer { id, held });
                Ok(())
            }
            // No lease keeps the payloads of this load, so the client's workers must not copy them. The server never
            // refuses a client that follows the protocol.
            Some(None) => Err(Violation),
            // The engine is broken, so it does not write into the arena any more.
            None => Ok(()),
        }
    }

    /// Whether a load or a save may have this number.
    fn check_transfer(&self, transfer: u64) -> Result<(), Violation> {
        // If two transfers had one number, the first could not be ended any more.
        let is_free = !self.transfers.contains_key(&transfer);
        if is_free && self.transfers.len() < TRANSFERS_MAX {
            Ok(())
        } else {
            Err(Violation)
        }
    }

    pub(super) fn begin_save(
        &mut self,
        driver: &Driver,
        message: SaveMessage<'_>,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        self.check_transfer(message.transfer)?;
        self.take_hashes(message.request, &message.hashes, budgets)?;
        let (request, asked) = asked_save(message);
        self.save(driver, request, asked, budgets, out)
    }

    /// Like [`ServedSession::begin_save`], with many hashes, which are in `frame` at `left`.
    pub(super) fn begin_save_later(
        &mut self,
        message: SaveMessage<'_>,
        (frame, left): (Arc<Vec<u8>>, Range<usize>),
        budgets: &mut Budgets,
    ) -> Result<(), Violation> {
        self.check_transfer(message.transfer)?;
        let hashes = message.hashes;
        let (request, asked) = asked_save(message);
        self.take_hashes_later((request, hashes), frame, left, budgets, Then::Save(asked))
    }

    /// Starts the save of a request whose hashes the server has.
    pub(super) fn save(
        &mut self,
        driver: &Driver,
        request: u64,
        asked: SaveAsked,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        self.check_transfer(asked.transfer)?;
        let state = self.requests.get(&request).filter(|state| !state.over);
        let id = state.and_then(|state| {
            let save = SaveRequest::new(&state.name, &state.hashes, asked.tokens);
            let save = save.offers(&asked.offers).only_offers(asked.only_offers);
            let save = save.wanted(asked.is_wanted);
            driver.enter(|engine| engine.start_save(self.id, &save))
        });
        let Some(id) = id.flatten() else {
            append_grant(asked.transfer, SaveEnd::default(), Vec::new(), out);
            return Ok(());
        };
        self.transfers
            .insert(asked.transfer, ServedTransfer { id, held: None });
        let job = SaveJob {
            request,
            transfer: (asked.transfer, id),
            tokens: asked.tokens,
            extents: Vec::new(),
        };
        self.go_on_saving(driver, job, budgets, out);
        Ok(())
    }

    /// Reserves some more of a save's slots. Appends the grant when all are reserved.
    pub(super) fn go_on_saving(
        &mut self,
        driver: &Driver,
        mut job: SaveJob,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) {
        let (transfer, id) = job.transfer;
        let step = self.requests.get(&job.request).and_then(|state| {
            let save = SaveRequest::new(&state.name, &state.hashes, job.tokens);
            driver.enter(|engine| {
                let (own, all) = engine.save_bytes(self.id);
                // A client that hangs in the middle of its saves must not hold the whole arena.
                let used = all + budgets.held.bytes();
                let limit = SaveLimit {
                    blocks: SAVE_STEP,
                    bytes: share(engine.host_capacity(), used, own),
                };
                engine.step_save(id, &save, limit)
            })
        });
        let (extents, ended) = match step {
            Some(SaveProgress::More(extents)) => (extents, None),
            Some(SaveProgress::Ended { extents, end }) => (extents, Some(end)),
            None => (Vec::new(), Some(SaveEnd::default())),
        };
        append_extents(&mut job.extents, extents);
        let Some(end) = ended else {
            self.jobs.push_front(Job::Save(job));
            return;
        };
        if job.extents.is_empty() {
            self.transfers.remove(&transfer);
        }
        if !append_grant(transfer, end, job.extents, out) {
            // Too many extents for one frame.
            self.end_transfer(driver, transfer, TransferEnd::Failed, budgets);
            let refused = Some(SaveRefusal::HostFull);
            let end = SaveEnd {
                refused,
                ..SaveEnd::default()
            };
            append_grant(transfer, end, Vec::new(), out);
        }
    }

    pub(super) fn end_transfer(
        &mut self,
        driver: &Driver,
        transfer: u64,
        end: TransferEnd,
        budgets: &mut Budgets,
    ) {
        let Some(ServedTransfer { id, held }) = self.transfers.remove(&transfer) else {
            return;
        };
        if !end_some(driver, id, end) {
            self.jobs.push_back(Job::End { transfer: id, end });
        }
        self.let_go(held, budgets);
    }
}

fn asked_save(message: SaveMessage<'_>) -> (u64, SaveAsked) {
    let asked = SaveAsked {
        transfer: message.transfer,
        tokens: message.tokens,
        offers: message.offers,
        only_offers: message.only_offers,
        is_wanted: message.is_wanted,
    };
    (message.request, asked)
}

/// Continues to end a transfer. Returns whether it has ended.
pub(super) fn end_some(driver: &Driver, transfer: TransferId, end: TransferEnd) -> bool {
    let ended =
        driver.enter(|engine| engine.step_end_of_transfer(transfer, end, SAVE_STEP as usize));
    ended.unwrap_or(true)
}

/// Appends a grant. Returns false if there are too many extents for one frame.
fn append_grant(transfer: u64, end: SaveEnd, extents: Vec<Extent>, out: &mut Vec<u8>) -> bool {
    let reply = ServerMessage::Granted {
        transfer,
        end,
        extents,
    };
    reply.append_to(out)
}
