//! Checks that the engine's explanations are true: a saved block is never explained as a block that was never seen.

use undercroft_core::explain::{ExplainQuery, Reason};
use undercroft_core::session::Tokens;

use crate::model::HASH_BLOCK;
use crate::settings::DEPARTURES;
use crate::world::World;

impl World {
    /// Checks the engine's explanation of an answer to a request.
    pub(crate) fn check_explained(
        &mut self,
        session: usize,
        request: usize,
        tokens: u32,
    ) -> Result<(), String> {
        let of = &self.sessions[session];
        let state = &of.requests[request];
        let name = &state.name;
        let told = self.engine.with(|engine| engine.explained(of.id, name));
        let Some(told) = told else {
            // Other entries have replaced it.
            let is_short = self.settings.engine.explained_lookups < DEPARTURES;
            let rest = self.engine.with(|engine| engine.rest(of.id, name));
            return match rest {
                Some(_) if is_short => Ok(()),
                _ => Err(format!("{name} was answered, and nothing is said of it")),
            };
        };
        if told.hit_tokens != tokens || &told.request != name || told.found_tokens < tokens {
            return Err(format!(
                "{name}: a hit of {tokens} tokens is told as {told:?}"
            ));
        }
        if told.rest.reason == Reason::LoadFailed && !state.failed {
            return Err(format!("{name}: no load has failed, and {told:?}"));
        }
        let is_new = matches!(told.rest.reason, Reason::NeverSeen | Reason::OtherIdentity);
        let remembers = self.settings.engine.departures >= DEPARTURES && !self.settings.crowded;
        let missing = state.keys.get((told.found_tokens / HASH_BLOCK) as usize);
        let Some(&missing) = missing.filter(|_| is_new && remembers) else {
            return Ok(());
        };
        let key = (of.namespace, self.models[of.namespace].epoch, missing);
        if self.history.saved.contains(&key) {
            return Err(format!(
                "{name}: a block that was saved is missing, and {told:?}"
            ));
        }
        self.log.stats.explained += 1;
        Ok(())
    }

    /// An operator asks for the last lookups.
    pub(crate) fn explain(&mut self) -> Result<(), String> {
        let mut query = ExplainQuery {
            misses: self.history.names.is_multiple_of(2),
            ..ExplainQuery::default()
        };
        let mut last = None;
        loop {
            let (told, before) = self.engine.with(|engine| engine.explain(&query));
            for one in told {
                if last.is_some_and(|last| one.position >= last) {
                    return Err(format!("{one:?} comes after the one at {last:?}"));
                }
                last = Some(one.position);
                let bound = Tokens(one.asked_tokens.max(one.device_tokens));
                if Tokens(one.hit_tokens) > bound {
                    return Err(format!("a hit beyond the question: {one:?}"));
                }
            }
            match before {
                None => return Ok(()),
                before => query.before = before,
            }
        }
    }
}
