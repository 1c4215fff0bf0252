//! Loads and saves, which the workers copy, and resets.

use std::time::Instant;

use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{
    Extent, GiveUp, Load, Save, SaveGrant, SaveRequest, Sources, Tokens, TransferId,
};

use super::{ClientState, Stage, TransferStage};
use crate::protocol::{ClientMessage, LeasedHit, OFFERS_MAX, SaveMessage, append_with_hashes};

impl ClientState {
    /// Begins the load of `external` tokens after `computed`. `None` if the request's last hit does not cover these
    /// tokens.
    pub(crate) fn begin_load(
        &mut self,
        name: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<Load> {
        let session = self.open.as_ref()?.session;
        let state = self.requests.get(name)?;
        let Stage::Answered(Some(hit), _) = &state.stage else {
            return None;
        };
        if computed < state.computed {
            return None;
        }
        let extents = self.extents_of(hit, computed, external)?;
        let sources = Sources::of(computed, external, hit.brought);
        let request = state.id;
        if let Some(state) = self.requests.get_mut(name) {
            state.stage = Stage::Idle;
        }
        let id = TransferId(self.next_number());
        self.transfers.insert(id, TransferStage::Load);
        self.send(&ClientMessage::BeginLoad {
            request,
            transfer: id.0,
            computed,
            external,
        });
        Some(Load {
            id,
            session,
            extents,
            sources,
        })
    }

    /// The part of a hit's extents that a load of `external` tokens after `computed` copies. `None` if no
    /// load may end there.
    fn extents_of(
        &self,
        hit: &LeasedHit,
        computed: Tokens,
        external: Tokens,
    ) -> Option<Vec<Extent>> {
        let spec = &self.spec;
        let end = computed.0.checked_add(external.0)?;
        let only_full = |kind| matches!(kind, GroupKind::Full | GroupKind::Ignored);
        let is_part = end < hit.tokens.0;
        if external == Tokens(0)
            || end > hit.tokens.0
            || is_part && !spec.groups.iter().all(|group| only_full(group.kind))
            || !end.is_multiple_of(spec.hash_block_size)
            || !spec.may_end(end / spec.hash_block_size)
        {
            return None;
        }
        let mut extents = Vec::with_capacity(hit.extents.len());
        for extent in &hit.extents {
            let tokens = spec.groups.get(usize::from(extent.group))?.block_tokens;
            // A block counts if it ends after the computed tokens, up to the boundary.
            let first = extent.first_block;
            let skip = computed.0.checked_div(tokens)?.saturating_sub(first);
            let keep = (end / tokens).saturating_sub(first.checked_add(skip)?);
            let rest = extent.offsets.get(skip as usize..).unwrap_or_default();
            let offsets = rest[..rest.len().min(keep as usize)].to_vec();
            if !offsets.is_empty() {
                extents.push(Extent {
                    group: extent.group,
                    first_block: first + skip,
                    offsets,
                });
            }
        }
        Some(extents)
    }

    /// Asks for slots. The grant arrives later.
    pub(crate) fn begin_save(&mut self, save: &SaveRequest<'_>, now: Instant) -> Save {
        self.try_begin_save(save, now)
            .map_or(Save::Unavailable, Save::Pending)
    }

    fn try_begin_save(&mut self, save: &SaveRequest<'_>, now: Instant) -> Option<TransferId> {
        if self.open.is_none() || self.is_late(now) || self.is_filling() {
            return None;
        }
        let (request, known) = self.request(save.request, save.hashes)?;
        let id = TransferId(self.next_number());
        let message = |hashes| {
            ClientMessage::BeginSave(SaveMessage {
                request,
                transfer: id.0,
                tokens: save.tokens,
                // The pieces beyond the limit are not saved.
                offers: save.offers[..save.offers.len().min(OFFERS_MAX)].to_vec(),
                only_offers: save.only_offers,
                is_wanted: save.is_wanted,
                hashes,
            })
        };
        let count = append_with_hashes(&mut self.outbox, save.hashes, known, message)?;
        self.learned(save.request, save.hashes, count);
        self.replies_due.push_back(now);
        self.transfers.insert(id, TransferStage::PendingSave);
        Some(id)
    }

    /// The grants that have arrived since the last call.
    pub(crate) fn take_grants(&mut self) -> Vec<SaveGrant> {
        std::mem::take(&mut self.grants)
    }

    pub(crate) fn end_transfer(&mut self, id: TransferId, ok: bool) {
        match self.transfers.remove(&id) {
            Some(TransferStage::Load | TransferStage::GrantedSave) => self.send_end_of(id, ok),
            // When the grant arrives, its slots are returned.
            Some(TransferStage::PendingSave) | None => {}
        }
    }

    /// Like [`ClientState::end_transfer`], for a load or a save that the caller does not want any more.
    pub(crate) fn give_up(&mut self, id: TransferId, reason: GiveUp) {
        let transfer = id.0;
        match self.transfers.remove(&id) {
            Some(TransferStage::Load | TransferStage::GrantedSave) => {
                self.send(&ClientMessage::GiveUp { transfer, reason });
            }
            Some(TransferStage::PendingSave) | None => {}
        }
    }

    pub(super) fn send_end_of(&mut self, id: TransferId, ok: bool) {
        self.send(&ClientMessage::EndTransfer { transfer: id.0, ok });
    }

    /// Requests that the server drop everything of the namespace. Returns the reset's id; `None` without a server. In
    /// both cases no lookup finds an earlier block from now on.
    pub(crate) fn begin_reset(&mut self) -> Option<u64> {
        (self.private, self.was_reset) = (true, true);
        self.open.as_ref()?;
        self.end_lookups();
        let reset = self.next_number();
        self.resets.insert(reset, None);
        self.send(&ClientMessage::Reset { reset });
        Some(reset)
    }

    /// The weights change: the session uses the namespace of `description`, or shares with no session, on this server
    /// and on later ones.
    pub(crate) fn change_weights(&mut self, description: Option<&str>) {
        (self.private, self.was_reset) = (description.is_none(), false);
        if let Some(description) = description {
            description.clone_into(&mut self.spec.description);
            self.namespace = self.spec.digest().to_hex();
        }
        if self.open.is_some() {
            self.end_lookups();
            self.send_weights();
        }
    }

    /// Tells the server which namespace the session uses.
    pub(super) fn send_weights(&mut self) {
        let description = (!self.private).then(|| self.spec.description.clone());
        self.send(&ClientMessage::ChangeWeights { description });
    }

    /// Ends all lookups: hits that were found before must not be loaded any more.
    fn end_lookups(&mut self) {
        let names: Vec<Box<str>> = self.requests.keys().cloned().collect();
        for name in names {
            self.end_lookup(&name);
        }
    }

    /// Whether a reset has ended.
    pub(crate) fn has_reset_ended(&self, reset: u64) -> bool {
        self.resets.get(&reset).is_none_or(Option::is_some)
    }

    /// Forgets a reset. Returns whether it has ended and is durable.
    pub(crate) fn end_reset(&mut self, reset: u64) -> bool {
        self.resets.remove(&reset).flatten().unwrap_or(false)
    }
}
