//! The lookups of a session that wait for an answer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::session::{Lookup, LookupRequest, Priority, Tokens};

/// Lookups that are looked at together.
const PART: usize = 256;

/// The demanded lookups of a session that were answered with [`Lookup::Pending`], each with its computed tokens, until
/// [`Session::ended_waits`](crate::session::Session::ended_waits) has told that they are not pending any more.
#[derive(Debug, Default)]
pub struct PendingLookups(Mutex<HashMap<Box<str>, Tokens>>);

impl PendingLookups {
    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Tokens>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lookup was answered.
    pub fn answered(&self, request: &LookupRequest<'_>, answer: Lookup) {
        if request.priority == Priority::Prefetch || !answer.is_pending() {
            return;
        }
        let mut waits = self.lock();
        if let Some(computed) = waits.get_mut(request.request) {
            *computed = request.computed;
        } else {
            waits.insert(request.request.into(), request.computed);
        }
    }

    /// A request's lookup is not needed any more.
    pub fn forget(&self, request: &str) {
        self.lock().remove(request);
    }

    /// The requests whose waits have ended since the last call. `pending` returns of each lookup whether it is still
    /// pending, or `None` if none is.
    pub fn take_ended(
        &self,
        mut pending: impl FnMut(&[(&str, Tokens)]) -> Option<Vec<bool>>,
    ) -> Vec<Box<str>> {
        let mut waits = self.lock();
        let all: Vec<(&str, Tokens)> = waits.iter().map(|(name, &at)| (&**name, at)).collect();
        let mut ended: Vec<Box<str>> = Vec::new();
        for part in all.chunks(PART) {
            let pending = pending(part).unwrap_or_default();
            let is_pending = |at: usize| pending.get(at).is_some_and(|&is_pending| is_pending);
            let of_part = part.iter().enumerate();
            ended.extend(
                of_part
                    .filter(|&(at, _)| !is_pending(at))
                    .map(|(_, &(name, _))| name.into()),
            );
        }
        for name in &ended {
            waits.remove(name);
        }
        ended
    }
}
