//! Hints: sent to the server once, with the hashes that the server lacks.

use undercroft_contract::hint::{HintAnswer, HintRefusal, HintRequest};

use super::ClientState;
use crate::protocol::{ClientMessage, HintMessage, append_with_hashes};

/// Most hints without an answer.
const HINTS_MAX: usize = 256;

impl ClientState {
    /// Sends a hint to the server. Returns the number of the hint; `None` if no message can be sent now.
    pub(crate) fn send_hint(&mut self, hint: &HintRequest<'_>) -> Option<u64> {
        if self.open.is_none() || self.is_filling() {
            return None;
        }
        if self.hints.len() >= HINTS_MAX {
            // The caller does not wait for these answers any more.
            self.hints.clear();
        }
        let (request, known) = self.request(hint.request, hint.hashes)?;
        let number = self.next_number();
        let message = |hashes| {
            ClientMessage::Hint(HintMessage {
                request,
                number,
                max: hint.max,
                hint: hint.hint.clone(),
                hashes,
            })
        };
        let count = append_with_hashes(&mut self.outbox, hint.hashes, known, message)?;
        self.learned(hint.request, hint.hashes, count);
        self.hints.insert(number, None);
        Some(number)
    }

    /// The server has answered a hint. The answer is dropped if the caller has stopped waiting.
    pub(super) fn take_hinted(&mut self, number: u64, answer: HintAnswer) {
        if let Some(known) = self.hints.get_mut(&number) {
            *known = Some(answer);
        }
    }

    /// Whether a hint has an answer, or will get none.
    pub(crate) fn is_hinted(&self, number: u64) -> bool {
        self.hints.get(&number).is_none_or(Option::is_some)
    }

    /// Forgets a hint. Returns its answer, if the answer is known.
    pub(crate) fn end_hint(&mut self, number: u64) -> HintAnswer {
        match self.hints.remove(&number) {
            Some(answer) => answer.unwrap_or(HintAnswer::Pending),
            None => HintAnswer::Rejected(HintRefusal::Unavailable),
        }
    }
}
