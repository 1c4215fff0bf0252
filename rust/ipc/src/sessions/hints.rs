//! Hints of a session's client.

use std::ops::Range;
use std::sync::Arc;

use undercroft_contract::hint::{Hint, HintAnswer, HintRefusal, HintRequest, PIN_NAME_MAX};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::HintCursor;

use super::Violation;
use super::job::{HintAsked, Then};
use super::state::{Budgets, ServedSession};
use crate::protocol::{HashRun, HintMessage, ServerMessage};

impl ServedSession {
    /// Carries a hint out, and appends the answer.
    pub(super) fn take_hint(
        &mut self,
        driver: &Driver,
        message: HintMessage<'_>,
        budgets: &mut Budgets,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let (request, hashes, asked) = asked(message)?;
        self.take_hashes(request, &hashes, budgets)?;
        self.hint(driver, request, &asked, out);
        Ok(())
    }

    /// Like [`ServedSession::take_hint`], with many hashes, which are in `frame` at `left`.
    pub(super) fn take_hint_later(
        &mut self,
        message: HintMessage<'_>,
        (frame, left): (Arc<Vec<u8>>, Range<usize>),
        budgets: &mut Budgets,
    ) -> Result<(), Violation> {
        let (request, hashes, asked) = asked(message)?;
        self.take_hashes_later((request, hashes), frame, left, budgets, Then::Hint(asked))
    }

    /// Carries out a hint about a request whose hashes the server has.
    pub(super) fn hint(
        &mut self,
        driver: &Driver,
        request: u64,
        asked: &HintAsked,
        out: &mut Vec<u8>,
    ) {
        let state = self.requests.get(&request).filter(|state| !state.over);
        let answer = state.map(|state| {
            let request = HintRequest {
                request: &state.name,
                hashes: &state.hashes,
                max: asked.max,
                hint: &asked.hint,
            };
            let mut cursor = HintCursor::default();
            let answer = driver.drive(|engine| engine.step_hint(self.id, &request, &mut cursor));
            answer.unwrap_or(HintAnswer::Rejected(HintRefusal::Unavailable))
        });
        let number = asked.number;
        let answer = answer.unwrap_or(HintAnswer::Rejected(HintRefusal::NotCached));
        ServerMessage::Hinted { number, answer }.append_to(out);
    }
}

/// The parts of a message with an allowed hint.
fn asked(message: HintMessage<'_>) -> Result<(u64, HashRun<'_>, HintAsked), Violation> {
    if let Hint::Pin { name, .. } | Hint::Release { name } = &message.hint
        && name.len() > PIN_NAME_MAX
    {
        return Err(Violation);
    }
    let asked = HintAsked {
        number: message.number,
        max: message.max,
        hint: message.hint,
    };
    Ok((message.request, message.hashes, asked))
}
