//! The ends of loads and saves: copies succeed or fail, or nobody wants them any more.

use std::collections::BTreeMap;

use undercroft_contract::session::{GiveUp, TransferEnd, TransferId};
use undercroft_engine::metrics::Counters;

use crate::content::hash_of;
use crate::world::World;

/// Ended transfers whose acknowledgement may come again.
const REPEATED: usize = 32;

impl World {
    /// The end of some copies: few fail, and few are given up.
    pub(crate) fn drawn_end(&mut self, reason: GiveUp) -> TransferEnd {
        match self.random.below(1000) {
            0..=39 => TransferEnd::Failed,
            40..=69 => TransferEnd::GivenUp(reason),
            _ => TransferEnd::Done,
        }
    }

    /// Ends a load. After a failure its request's lookups are misses; if the load is given up, they are not.
    pub(crate) fn end_load(
        &mut self,
        session: usize,
        at: usize,
        end: TransferEnd,
    ) -> Result<(), String> {
        let load = self.sessions[session].loads.swap_remove(at);
        self.let_go_of_load(&load);
        if end == TransferEnd::Failed {
            let requests = &mut self.sessions[session].requests;
            let of = requests
                .iter_mut()
                .find(|request| request.name == load.request);
            if let Some(request) = of {
                request.failed = true;
                (request.ready, request.promise) = (None, None);
            }
        }
        self.log.stats.given_up_loads += u64::from(matches!(end, TransferEnd::GivenUp(_)));
        self.end_transfer(session, ("load", load.id), end)
    }

    /// Ends a save. Unless it has succeeded, its blocks are dropped.
    pub(crate) fn end_save(
        &mut self,
        session: usize,
        at: usize,
        end: TransferEnd,
    ) -> Result<(), String> {
        let save = self.sessions[session].saves.swap_remove(at);
        self.let_go_of_save(&save);
        if end == TransferEnd::Done {
            self.log.stats.blocks_saved += save.blocks.len() as u64;
            for block in &save.blocks {
                let payload = &block.payload;
                // The namespace is that of the save's beginning.
                let (digest, len) = (
                    self.digest(payload.namespace),
                    self.models[payload.namespace].hash_bytes,
                );
                if let (Some(promise), Some(hash)) =
                    (&mut self.history.promise, hash_of(payload.key, len))
                {
                    promise.saved.insert((digest, hash, payload.group));
                }
                let model = &mut self.models[payload.namespace];
                if payload.epoch == model.epoch && !save.lost {
                    model.stored.insert(*payload);
                    let of = (payload.namespace, payload.epoch, payload.key);
                    self.history.saved.insert(of);
                }
            }
        }
        self.log.stats.given_up_saves += u64::from(matches!(end, TransferEnd::GivenUp(_)));
        self.end_transfer(session, ("save", save.id), end)
    }

    fn end_transfer(
        &mut self,
        session: usize,
        (direction, id): (&'static str, TransferId),
        end: TransferEnd,
    ) -> Result<(), String> {
        self.history.ends.count(direction, end);
        if self.random.chance(500) {
            let of = &self.sessions[session].session;
            match end {
                TransferEnd::Done => of.end_transfer(id, true),
                TransferEnd::Failed => of.end_transfer(id, false),
                TransferEnd::GivenUp(reason) => of.give_up(id, reason),
            }
        } else {
            self.end_by_steps(id, end)?;
        }
        self.note(|| format!("end {direction} {id:?}: {end:?}"));
        let known = &mut self.history.ends.known;
        known.push(id);
        if known.len() > REPEATED {
            known.swap_remove(0);
        }
        Ok(())
    }

    /// Ends a transfer in steps, like a server: others enter the engine between two steps.
    fn end_by_steps(&mut self, id: TransferId, end: TransferEnd) -> Result<(), String> {
        loop {
            let blocks = self.random.range(1, 4) as usize;
            let ended = self
                .engine
                .with(|engine| engine.step_end_of_transfer(id, end, blocks));
            if ended {
                return Ok(());
            }
            self.engine.with(|engine| engine.inspect().check())?;
            match self.random.below(6) {
                0 => self.start_io()?,
                1 => self.end_io()?,
                _ => {}
            }
        }
    }

    /// Gives up the copies of a session, in any order, as a scheduler does whose caches are reset.
    pub(crate) fn give_up_transfers(
        &mut self,
        session: usize,
        of_saves: GiveUp,
    ) -> Result<(), String> {
        loop {
            let state = &self.sessions[session];
            let (loads, saves) = (state.loads.len(), state.saves.len());
            if loads + saves == 0 {
                return Ok(());
            }
            let at = self.random.index(loads + saves);
            if at < loads {
                self.end_load(session, at, TransferEnd::GivenUp(GiveUp::Reset))?;
            } else {
                self.end_save(session, at - loads, TransferEnd::GivenUp(of_saves))?;
            }
        }
    }

    /// Repeats an acknowledgement.
    pub(crate) fn repeat_acknowledgement(&mut self) -> Result<(), String> {
        if !self.history.ends.known.is_empty() {
            let id = self.history.ends.known[self.random.index(self.history.ends.known.len())];
            match self.random.below(3) {
                0 => self.engine.with(|engine| engine.end_transfer(id, true)),
                1 => self.engine.with(|engine| engine.end_transfer(id, false)),
                _ => self
                    .engine
                    .with(|engine| engine.end_transfer(id, TransferEnd::GivenUp(GiveUp::Retry))),
            }
        }
        Ok(())
    }

    /// Every end is counted once, by its direction and reason.
    pub(crate) fn check_ends(&self, counters: &Counters) -> Result<(), String> {
        let ends = &self.history.ends;
        let told = [
            (("load", "closed"), counters.given_up_loads_closed),
            (("load", "reset"), counters.given_up_loads_reset),
            (("save", "closed"), counters.given_up_saves_closed),
            (("save", "reset"), counters.given_up_saves_reset),
            (("save", "retry"), counters.given_up_saves_retry),
            (("save", "weights"), counters.given_up_saves_weights),
        ];
        let told: BTreeMap<_, _> = told.into_iter().filter(|(_, count)| *count > 0).collect();
        if told != ends.given_up || counters.save_failures != ends.failed_saves {
            return Err(format!(
                "given up: {told:?}, failed saves: {}; expected: {ends:?}",
                counters.save_failures
            ));
        }
        Ok(())
    }
}
