//! Saves: workers copy blocks from the device into slots of the arena.

use crate::forest::{DiskState, HostState, NONE, NodeId, NsId};
use crate::key::{BlockHash, HashSource};
use crate::namespace::GroupKind;
use crate::session::{Extent, Offer, SaveRequest, TransferId};

use super::coordinator::Engine;
use super::load::id_of;
use super::requests::{BlockOffers, RequestId};
use super::residency::Region;
use super::sessions::{SessionId, TransferKind, TransferState};

/// What a worker is to copy to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Ends it: [`Engine::end_transfer`].
    pub id: TransferId,
    /// Slots by group.
    pub extents: Vec<Extent>,
}

/// The answer to a [`SaveRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// `None` if there is nothing to copy.
    pub transfer: Option<Transfer>,
    /// Blocks were left out for want of memory: the save may be asked for again.
    pub refused: bool,
}

/// Why a payload got no slot in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotRefusal {
    /// Everything that could make room is in use: worth another try.
    Full,
    /// The policy keeps the payloads that are there.
    NotAdmitted,
}

/// A save while its slots are being reserved.
struct SavePlan<'a> {
    ns: NsId,
    hashes: Limited<'a>,
    offers: &'a [Offer],
    /// Payloads with a reserved slot.
    payloads: Vec<(NodeId, u8)>,
    /// Which blocks the policies have weighed for this request.
    blocks: BlockOffers,
    /// The deepest node of the chain so far, or `NONE`, and its epoch.
    tail: (NodeId, u32),
    /// A block was left out for want of memory.
    refused: bool,
}

/// Whether a save goes on after a block.
enum SaveStep {
    Block,
    End,
}

impl Engine {
    /// Reserves slots for the full blocks among a request's first tokens that are not cached and not
    /// being saved, see [`SaveRequest`].
    pub fn begin_save(&mut self, session: SessionId, save: &SaveRequest<'_>) -> Granted {
        let Some(state) = self.sessions.get(session) else {
            return Granted::default();
        };
        self.residency.allow_searches();
        // Blocks that this request has saved or found before are not counted as found again.
        let known = state.saved.get(save.request).copied().unwrap_or(0);
        let (ns, request) = (state.ns, state.requests.get(save.request).copied());
        let tokens = save.tokens.0 / self.residency.hash_block_size(ns);
        let hash_blocks = (tokens as usize).min(save.hashes.len());
        let hashes = Limited {
            hashes: save.hashes,
            len: hash_blocks,
        };
        // What is being removed makes room first.
        self.residency.continue_removals(self.config.removals);
        let found = self.residency.deepest(ns, &hashes, |_| true);
        let (anchor, depth) = found.unwrap_or((NONE, 0));
        let mut plan = SavePlan {
            ns,
            hashes,
            offers: save.offers,
            payloads: Vec::new(),
            blocks: self.blocks_offered(request, depth),
            tail: (anchor, 0),
            refused: false,
        };
        // The chain down to the anchor stays while its descendants are being added.
        if anchor != NONE {
            plan.tail.1 = self.residency.node(anchor).epoch;
            self.residency.pin(anchor);
        }
        self.fill_gaps(&mut plan);
        if !plan.refused {
            self.add_to_chain(&mut plan, depth);
            self.extend_chain(&mut plan, depth);
        }
        let here = self.settle_tail(&plan);
        if anchor != NONE {
            self.residency.unpin(anchor);
        }
        if let Some(id) = request {
            self.sessions.requests[id].offers = plan.blocks;
        }
        let state = self.sessions.get_mut(session);
        let state = state.expect("the session was here at the start");
        state.saved.insert(save.request.into(), known.max(here));
        // A request that has shrunk has nothing new.
        self.counters.deduplicated_blocks += u64::from(depth.saturating_sub(known));
        self.grant(session, plan)
    }

    /// Which blocks the policies have weighed. A block that was not admitted then may be here now.
    fn blocks_offered(&self, request: Option<RequestId>, depth: u32) -> BlockOffers {
        let mut blocks =
            request.map_or_else(BlockOffers::default, |id| self.sessions.requests[id].offers);
        if blocks.not_admitted <= depth {
            blocks.not_admitted = 0;
        }
        blocks
    }

    fn grant(&mut self, session: SessionId, plan: SavePlan<'_>) -> Granted {
        let SavePlan {
            mut payloads,
            refused,
            ..
        } = plan;
        if payloads.is_empty() {
            return Granted {
                transfer: None,
                refused,
            };
        }
        // Offers may come in any order.
        payloads.sort_by_key(|&(node, _)| self.residency.node(node).depth);
        let extents = self.residency.extents(&payloads);
        let key = self.sessions.begin_transfer(TransferState {
            session,
            bytes: self.residency.slot_bytes_of(&payloads),
            kind: TransferKind::Save { payloads },
        });
        let id = id_of(key);
        Granted {
            transfer: Some(Transfer { id, extents }),
            refused,
        }
    }

    /// Reserves slots for required payloads that were evicted from the middle of the chain, front to back.
    fn fill_gaps(&mut self, plan: &mut SavePlan<'_>) {
        let mut gaps = Vec::new();
        let mut at = plan.tail.0;
        while at != NONE && !self.residency.node(at).is_visible() {
            if self.residency.node(at).is_gap {
                gaps.push(at);
            }
            at = self.residency.node(at).parent();
        }
        if gaps.is_empty() {
            return;
        }
        // The blocks behind are used, too: they are about to be in reach again.
        self.residency.renew(plan.tail.0);
        for node in gaps.into_iter().rev() {
            let hit_class = self.residency.node(node).touch.hit_class;
            while let Some(group) = self.residency.missing_group(node) {
                match self.reserve(node, group, hit_class) {
                    Ok(()) => plan.payloads.push((node, group)),
                    Err(refusal) => {
                        plan.refused |= refusal == SlotRefusal::Full;
                        return;
                    }
                }
            }
        }
    }

    /// Adds the blocks after `depth` to the chain, front to back, as far as there are slots.
    fn extend_chain(&mut self, plan: &mut SavePlan<'_>, depth: u32) {
        let mut next = depth + 1;
        if plan.blocks.not_admitted > 0 {
            // The blocks before were weighed, and are not saved.
            next = next.max(plan.blocks.offered + 1);
        }
        while let Some(hash) = plan.hashes.get(next as usize - 1) {
            // The hash is in the index below another parent: the caller's hashes are no chain.
            if self.residency.forest().find(plan.ns, &hash).is_some() {
                return;
            }
            if let SaveStep::End = self.extend_by(plan, next, hash) {
                return;
            }
            next += 1;
        }
    }

    /// Adds one block to the chain, if the policy admits it and there are slots.
    fn extend_by(&mut self, plan: &mut SavePlan<'_>, depth: u32, hash: BlockHash) -> SaveStep {
        let fingerprint = hash.fingerprint();
        // A block that is asked for again after it found no room was weighed then.
        let hit_class = if depth > plan.blocks.offered {
            self.offer_block(fingerprint)
        } else {
            0
        };
        if plan.blocks.not_admitted > 0 {
            // No lookup reaches a block behind one that is not here.
            plan.blocks.offered = plan.blocks.offered.max(depth);
            self.residency.refuse_block(fingerprint, hit_class);
            return SaveStep::Block;
        }
        let node = self.residency.insert(plan.ns, plan.tail.0, hash, hit_class);
        let start = plan.payloads.len();
        if let Err(refusal) = self.fill_node(node, hit_class, plan) {
            for (node, group) in plan.payloads.drain(start..) {
                self.residency.host_failed(node, group);
            }
            self.residency.reconcile(node);
            if refusal == SlotRefusal::Full {
                plan.refused = true;
                return SaveStep::End;
            }
            plan.blocks.not_admitted = depth;
            plan.blocks.offered = plan.blocks.offered.max(depth);
            self.residency.refuse_block(fingerprint, hit_class);
            return SaveStep::Block;
        }
        plan.blocks.offered = plan.blocks.offered.max(depth);
        if self.residency.node(node).required == 0 {
            // Nothing has to be copied for it.
            let mut visible = Vec::new();
            self.residency.propagate_visible(node, &mut visible);
            self.writeback
                .offer_new(&visible, &mut self.residency, &mut self.counters);
        }
        plan.tail = (node, self.residency.node(node).epoch);
        SaveStep::Block
    }

    /// Depth of the chain now. A tail without payloads would keep its ancestors from eviction: it goes.
    fn settle_tail(&mut self, plan: &SavePlan<'_>) -> u32 {
        let (tail, epoch) = plan.tail;
        if tail == NONE {
            return 0;
        }
        let depth = self.residency.node(tail).depth;
        if self.residency.forest().is_live(tail, epoch) {
            self.residency.reconcile(tail);
        }
        depth
    }

    /// Reserves slots for the optional payloads that are offered of the first `depth` nodes of the chain,
    /// all of which are here.
    fn add_to_chain(&mut self, plan: &mut SavePlan<'_>, depth: u32) {
        for offer in plan.offers {
            let spec = self.residency.spec(plan.ns);
            let group = usize::from(offer.group);
            // Offers come from outside: a group may not exist.
            let is_ignored = |kind| kind == GroupKind::Ignored;
            if spec.groups.get(group).is_none_or(|of| is_ignored(of.kind)) {
                continue;
            }
            let hash_blocks = spec.hash_blocks(group);
            let end = offer.end_block.min(depth / hash_blocks);
            for block in offer.first_block..end {
                let at = (block + 1) * hash_blocks;
                let hash = plan.hashes.get(at as usize - 1);
                let found = hash.and_then(|hash| self.residency.forest().find(plan.ns, &hash));
                let Some(node) = found else {
                    return;
                };
                let state = self.residency.node(node);
                let payload = state.payload(offer.group);
                let is_here = payload.host != HostState::Empty || payload.disk != DiskState::Empty;
                if state.depth != at || state.requires(offer.group) || is_here {
                    continue;
                }
                let hit_class = state.touch.hit_class;
                self.residency.renew(node);
                match self.reserve(node, offer.group, hit_class) {
                    Ok(()) => plan.payloads.push((node, offer.group)),
                    Err(_) => return,
                }
            }
        }
    }

    /// Offers a block that is nowhere to the policies; the hit class that it enters with.
    fn offer_block(&mut self, fingerprint: u64) -> u8 {
        let hit_class = self.residency.offer_block(fingerprint);
        let again = self.writeback.was_offered(fingerprint);
        hit_class.max(u8::from(again))
    }

    /// Reserves a new node's slots. `Err` if a required one is refused.
    fn fill_node(
        &mut self,
        node: NodeId,
        hit_class: u8,
        plan: &mut SavePlan<'_>,
    ) -> Result<(), SlotRefusal> {
        let state = self.residency.node(node);
        let (depth, required, groups) = (state.depth, state.required, state.groups());
        for group in groups {
            let spec = self.residency.spec(plan.ns);
            if !spec.ends_block(usize::from(group), depth) {
                continue;
            }
            let is_required = required >> group & 1 == 1;
            let block = depth / spec.hash_blocks(usize::from(group)) - 1;
            if !is_required && !is_offered(plan.offers, group, block) {
                continue;
            }
            match self.reserve(node, group, hit_class) {
                Ok(()) => plan.payloads.push((node, group)),
                Err(refusal) if is_required => return Err(refusal),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Reserves one slot of the arena for a payload that is to be saved.
    fn reserve(&mut self, node: NodeId, group: u8, hit_class: u8) -> Result<(), SlotRefusal> {
        // The way to disk leads through the arena: there, the disk's policy decides.
        let weighs = self.residency.disks().is_empty();
        let residency = &mut self.residency;
        if weighs && residency.refuses_new(node, group, Region::Host, hit_class) {
            self.counters.refused_admission += 1;
            Err(SlotRefusal::NotAdmitted)
        } else if residency.reserve_host(node, group, HostState::Filling, &mut self.counters) {
            Ok(())
        } else {
            self.counters.refused_host_full += 1;
            Err(SlotRefusal::Full)
        }
    }

    /// A save's copies have ended: its payloads are readable, or their slots are freed.
    pub(super) fn finish_save(&mut self, payloads: &[(NodeId, u8)], ok: bool) {
        if !ok {
            self.counters.save_failures += 1;
        }
        let mut visible = Vec::new();
        for &(node, group) in payloads {
            if !ok {
                self.residency.host_failed(node, group);
                self.residency.reconcile(node);
                continue;
            }
            if !self.residency.node(node).is_detached() {
                self.counters.saved_blocks += 1;
            }
            if self.needs_checksums() {
                self.checksums.add_saved(node, group, &self.residency);
            }
            self.payload_arrived(node, group, &mut visible);
            self.writeback
                .offer_late(node, group, &mut self.residency, &mut self.counters);
        }
    }
}

fn is_offered(offers: &[Offer], group: u8, block: u32) -> bool {
    offers
        .iter()
        .any(|offer| offer.group == group && (offer.first_block..offer.end_block).contains(&block))
}

/// The first `len` hashes.
struct Limited<'a> {
    hashes: &'a dyn HashSource,
    len: usize,
}

impl HashSource for Limited<'_> {
    fn len(&self) -> usize {
        self.len
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        (index < self.len).then(|| self.hashes.get(index)).flatten()
    }
}
