//! Loads and saves: what the workers copy, and resets.

use std::time::Instant;

use undercroft_core::key::HashSource;
use undercroft_core::namespace::GroupKind;

use super::{Grant, State, Table};
use crate::protocol::{Request, WireExtent, append_with_hashes};

impl Table {
    /// Begins the load of `(local, local + external]` tokens of what was answered: its number, the token of
    /// its session, and where to copy from. `None` if the answer does not cover it.
    pub(crate) fn begin_load(
        &mut self,
        name: &str,
        local: u32,
        external: u32,
    ) -> Option<(u64, u128, Vec<WireExtent>)> {
        let session = self.up.as_ref()?.session;
        let job = self.jobs.get_mut(name)?;
        let State::Ready(ready, _) = &job.state else {
            return None;
        };
        let end = local.checked_add(external)?;
        let only_full = |kind| matches!(kind, GroupKind::Full | GroupKind::Ignored);
        let partial = end < ready.tokens;
        if external == 0
            || local < job.local_tokens
            || end > ready.tokens
            || partial && !self.spec.groups.iter().all(|group| only_full(group.kind))
            || end % self.spec.hash_block_tokens != 0
        {
            return None;
        }
        let mut extents = Vec::with_capacity(ready.extents.len());
        for (group, first, slots) in &ready.extents {
            let tokens = self.spec.groups.get(usize::from(*group))?.block_tokens;
            // A block counts if it ends after what the device holds, up to the boundary.
            let skip = (local / tokens)
                .saturating_sub(*first)
                .min(u32::try_from(slots.len()).ok()?);
            let keep = (end / tokens).saturating_sub(*first + skip) as usize;
            let rest = &slots[skip as usize..];
            let kept = rest[..keep.min(rest.len())].to_vec();
            if !kept.is_empty() {
                extents.push((*group, first + skip, kept));
            }
        }
        let request = job.id;
        job.state = State::Idle;
        let load = self.next();
        self.loads.insert(load);
        self.send(&Request::BeginLoad {
            request,
            load,
            local_tokens: local,
            external_tokens: external,
        });
        Some((load, session, extents))
    }

    pub(crate) fn end_load(&mut self, load: u64, ok: bool) {
        if self.loads.remove(&load) {
            self.send(&Request::EndLoad { load, ok });
        }
    }

    /// Asks for slots for the full blocks of the first `tokens` tokens. The number of the save, whose grant
    /// comes later; `None` if the server is not there.
    pub(crate) fn begin_save<H: HashSource + ?Sized>(
        &mut self,
        name: &str,
        hashes: &H,
        tokens: u32,
        offers: &[(u8, u32, u32)],
        now: Instant,
    ) -> Option<u64> {
        if self.up.is_none() || self.is_late(now) || self.is_filling() {
            return None;
        }
        let (request, known) = self.job(name, hashes)?;
        let save = self.next();
        let offers = offers.to_vec();
        let frame = |hashes| Request::BeginSave {
            request,
            save,
            tokens,
            offers,
            hashes,
        };
        let count = append_with_hashes(&mut self.outbox, hashes, known, frame)?;
        self.learned(name, hashes, count);
        self.awaiting.push_back(now);
        self.saves.insert(save, false);
        Some(save)
    }

    /// The grants that have come since the last call.
    pub(crate) fn take_grants(&mut self) -> Vec<Grant> {
        std::mem::take(&mut self.grants)
    }

    pub(crate) fn end_save(&mut self, save: u64, ok: bool) {
        // If its slots are still on their way, they are given back when they come.
        if self.saves.remove(&save) == Some(true) {
            self.send(&Request::EndSave { save, ok });
        }
    }

    /// Asks to drop everything of the namespace; its number. `None` if the server is not there. Whatever
    /// comes of it, nothing from before is found from now on.
    pub(crate) fn reset(&mut self) -> Option<u64> {
        self.private = true;
        self.up.as_ref()?;
        // Answers from before must not be loaded any more.
        let names: Vec<Box<str>> = self.jobs.keys().cloned().collect();
        for name in names {
            self.release(&name);
        }
        let ticket = self.next();
        self.resets.insert(ticket, None);
        self.send(&Request::Reset { ticket });
        Some(ticket)
    }

    /// How a reset ended, once it has.
    pub(crate) fn take_reset(&mut self, ticket: u64) -> Option<bool> {
        let ended = self.resets.get(&ticket).copied().unwrap_or(Some(false));
        if ended.is_some() {
            self.resets.remove(&ticket);
        }
        ended
    }
}
