//! Saves: workers copy blocks from the device into slots of the arena.
//!
//! A save may be as long as a prompt: its slots are reserved, and its end is carried out, in steps of a bounded number
//! of blocks. Other threads enter the engine between two steps; the save keeps a lease on the chain that it has built
//! so far.

use slotmap::KeyData;
use undercroft_contract::explain::Reason;
use undercroft_contract::key::{BlockHash, HashSource};
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{
    Offer, SaveEnd, SaveRefusal, SaveRequest, Tokens, TransferId, TurnEnd, append_extents,
};

use crate::forest::{DiskState, HostState, NONE, NodeId};

use super::super::ids::{RequestId, SessionId, TransferKey, id_of};
use super::super::residency::Region;
use super::super::save_cursor::{
    BlockOffers, Gaps, Granted, Limited, Offers, SaveCursor, SaveLimit, SaveProgress, Transfer,
    merged,
};
use super::super::sessions::{SaveTransfer, TransferKind, TransferState};
use super::engine::Engine;
use super::hits::count_request;

/// Why a payload got no slot in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotRefusal {
    /// Everything that could make room is in use: the client may ask for the save again.
    Full,
    /// The policy keeps the payloads that are in the arena.
    NotAdmitted,
}

/// A step of a save.
struct SavePlan<'a> {
    hashes: Limited<'a>,
    cursor: Box<SaveCursor>,
    /// Payloads with a slot that this step has reserved.
    payloads: Vec<(NodeId, u8)>,
    /// The deepest node of the chain so far, or `NONE`, and its epoch.
    tail: (NodeId, u32),
    limit: SaveLimit,
}

impl SavePlan<'_> {
    /// Counts a block that is looked at. False if the step's limit is reached.
    fn look(&mut self) -> bool {
        let left = self.limit.blocks.checked_sub(1);
        self.limit.blocks = left.unwrap_or(0);
        left.is_some()
    }
}

/// Whether a save continues after a block.
enum SaveStep {
    Block,
    End,
}

impl Engine {
    /// Reserves slots for the full blocks of a request's first tokens, except blocks that are cached or
    /// being saved, see [`SaveRequest`].
    pub fn begin_save(&mut self, session: SessionId, save: &SaveRequest<'_>) -> Granted {
        let Some(id) = self.start_save(session, save) else {
            return Granted::default();
        };
        let mut all = Vec::new();
        loop {
            match self.step_save(id, save, SaveLimit::NONE) {
                SaveProgress::More(extents) => append_extents(&mut all, extents),
                SaveProgress::Ended { extents, end } => {
                    append_extents(&mut all, extents);
                    let transfer = (!all.is_empty()).then_some(Transfer { id, extents: all });
                    return Granted { transfer, end };
                }
            }
        }
    }

    /// Starts a save, for [`Engine::step_save`]. `None` if there is no such session, or the engine drains.
    pub fn start_save(&mut self, session: SessionId, save: &SaveRequest<'_>) -> Option<TransferId> {
        let state = self.sessions.get_mut(session)?;
        if self.draining || state.is_barred {
            return None;
        }
        self.residency.allow_page_moves(self.config.visits / 2);
        self.residency.allow_rest(self.config.tells);
        // Blocks that this request has saved or found before are not counted as found again.
        let before = state.begin_saving(save.request);
        let known = before.map_or(0, |of| of.blocks);
        let (ns, request) = (state.ns, state.requests.get(save.request).copied());
        let tokens = save.tokens.0 / self.residency.hash_block_size(ns);
        let hash_blocks = (tokens as usize).min(save.hashes.len()) as u32;
        let hashes = Limited::new(save.hashes, hash_blocks);
        // Nodes that are being removed make room first.
        self.residency.continue_removals(self.config.removals);
        let found = self.residency.deepest(ns, &hashes, |_| true);
        let (anchor, depth) = found.unwrap_or((NONE, 0));
        if before.is_none() {
            let request = request.map(|id| &self.sessions.requests[id]);
            count_request(&mut self.residency, ns, &hashes, anchor, request);
        }
        self.pins
            .used(ns, save.hashes, depth, self.now_ns, &self.residency);
        // A request that has become shorter has no new blocks.
        self.counters.deduplicated_blocks += u64::from(depth.saturating_sub(known));
        let blocks = self.blocks_offered(request, depth);
        // The chain down to the anchor stays while its descendants are being added.
        if anchor != NONE {
            self.residency.pin(anchor);
        }
        let mut next = depth + 1;
        if blocks.not_admitted > 0 {
            // The policies have weighed the blocks before, which are not saved.
            next = next.max(blocks.offered + 1);
        }
        let offers = Offers::of(save);
        let (mut lacks, mut reach) = (Vec::new(), hash_blocks);
        if save.only_offers {
            (lacks, reach) = offers.lacking(self.residency.spec(ns), (depth, hash_blocks));
        }
        let cursor = SaveCursor {
            ns,
            instance: self.namespaces.instance(ns),
            hash_blocks: reach,
            gaps: Gaps::above(anchor),
            offers,
            end: SaveEnd {
                tokens: Tokens(0),
                refused: (!lacks.is_empty()).then_some(SaveRefusal::PrefixGone),
                lacks,
            },
            depth,
            next,
            next_offer: (0, 0),
            blocks,
            tail: anchor,
            here: depth,
        };
        let key = self.sessions.begin_transfer(TransferState {
            session,
            bytes: 0,
            kind: TransferKind::Save(SaveTransfer {
                payloads: Vec::new(),
                ended: 0,
                cursor: Some(Box::new(cursor)),
            }),
        });
        Some(id_of(key))
    }

    /// Continues a save that [`Engine::start_save`] has started, with the same request.
    pub fn step_save(
        &mut self,
        id: TransferId,
        save: &SaveRequest<'_>,
        limit: SaveLimit,
    ) -> SaveProgress {
        let key = TransferKey::from(KeyData::from_ffi(id.0));
        let state = self.sessions.save_mut(key);
        let Some((session, cursor)) =
            state.and_then(|(session, save)| save.cursor.take().map(|cursor| (session, cursor)))
        else {
            return SaveProgress::Ended {
                extents: Vec::new(),
                end: SaveEnd::default(),
            };
        };
        self.residency.allow_page_moves(self.config.visits / 2);
        self.residency.allow_rest(self.config.tells);
        let leased = cursor.tail;
        let epoch = if leased == NONE {
            0
        } else {
            self.residency.node(leased).epoch
        };
        let mut plan = SavePlan {
            hashes: Limited::new(save.hashes, cursor.hash_blocks),
            cursor,
            payloads: Vec::new(),
            tail: (leased, epoch),
            limit,
        };
        let is_valid = self.may_go_on(session, &plan);
        let ended = !is_valid || self.go_on(&mut plan);
        plan.cursor.here = self.residency.forest().depth(plan.tail.0);
        let reached = if is_valid { self.reached(&plan) } else { 0 };
        plan.cursor.end.tokens = Tokens(reached * self.residency.hash_block_size(plan.cursor.ns));
        if plan.cursor.end.refused == Some(SaveRefusal::HostFull) && reached > 0 {
            // Blocks of the chain for which the disk had no time make room once they are written.
            let (tail, now_ns) = (plan.tail.0, self.now_ns);
            self.writeback
                .offer_hit(tail, &mut self.residency, now_ns, &mut self.counters);
        }
        let ended = self.lease_tail(&mut plan, leased, ended);
        self.keep_step(key, session, save.request, plan, ended)
    }

    /// Whether the namespace, and the nodes that the save has added to it, are unchanged.
    fn may_go_on(&self, session: SessionId, plan: &SavePlan<'_>) -> bool {
        let ns = self.sessions.get(session).map(|state| state.ns);
        let tail = plan.tail.0;
        ns == Some(plan.cursor.ns)
            && self.namespaces.instance(plan.cursor.ns) == plan.cursor.instance
            && (tail == NONE || !self.residency.has_left_index(tail))
    }

    /// Hash blocks of the chain of which the index has every required payload.
    fn reached(&self, plan: &SavePlan<'_>) -> u32 {
        let (tail, epoch) = plan.tail;
        if tail == NONE || !self.residency.forest().is_live(tail, epoch) {
            return 0;
        }
        let gap = plan.cursor.gaps.found.last();
        let above = gap.map(|&gap| self.residency.node(gap).depth - 1);
        above.unwrap_or(match plan.cursor.gaps.stay {
            true => plan.cursor.depth,
            false => plan.cursor.here,
        })
    }

    /// Carries out a step. Returns whether the save has ended.
    fn go_on(&mut self, plan: &mut SavePlan<'_>) -> bool {
        if !self.find_gaps(plan) {
            return false;
        }
        match self.fill_gaps(plan) {
            // No lookup would reach a block behind a gap that stays.
            Ok(true) if plan.cursor.gaps.stay => self.add_to_chain(plan),
            Ok(true) => self.add_to_chain(plan) && self.extend_chain(plan),
            Ok(false) => false,
            Err(refusal) => {
                // No lookup reaches a block behind a gap.
                if refusal == SlotRefusal::Full {
                    plan.cursor.end.refused = Some(SaveRefusal::HostFull);
                }
                true
            }
        }
    }

    /// Moves the save's lease from `leased` to the deepest node of its chain, or ends the lease if the save has ended.
    /// Returns whether the save has ended.
    fn lease_tail(&mut self, plan: &mut SavePlan<'_>, leased: NodeId, ended: bool) -> bool {
        let (tail, epoch) = plan.tail;
        let is_live = tail != NONE && self.residency.forest().is_live(tail, epoch);
        let ended = ended || tail != NONE && !is_live;
        let moved = tail != leased && is_live;
        if moved && ended {
            // A tail without payloads would keep its ancestors from eviction: remove it.
            self.residency.reconcile(tail);
        } else if moved {
            self.residency.pin(tail);
            plan.cursor.tail = tail;
        }
        if leased != NONE && (ended || moved) {
            self.residency.unpin(leased);
        }
        ended
    }

    /// Notes the slots that a step has reserved, and the progress of the save.
    fn keep_step(
        &mut self,
        key: TransferKey,
        session: SessionId,
        request: &str,
        plan: SavePlan<'_>,
        ended: bool,
    ) -> SaveProgress {
        let SavePlan {
            cursor,
            payloads,
            tail,
            hashes,
            ..
        } = plan;
        let extents = self.residency.extents(&payloads);
        let bytes = self.residency.slot_bytes_of(&payloads);
        self.sessions.add_save_bytes(key, bytes);
        let (blocks, here) = (cursor.blocks, cursor.here);
        let (_, save) = self.sessions.save_mut(key).expect("a save that goes on");
        save.payloads.extend(payloads);
        if !ended {
            save.cursor = Some(cursor);
            return SaveProgress::More(extents);
        }
        let is_empty = save.payloads.is_empty();
        // The client has nothing to copy, and reports no end of the transfer.
        if is_empty {
            self.sessions.end_transfer(key, false);
        }
        if let Some(id) = self.sessions.request_id(session, request) {
            self.sessions.requests[id].offers = blocks;
        }
        let end = (cursor.end.tokens > Tokens(0)).then_some(tail);
        if let Some(end) = end {
            let first = hashes.get(0).map_or(0, |first| first.fingerprint());
            self.note_saved(session, cursor.gaps.anchor, (first, end));
        }
        let state = self.sessions.get_mut(session);
        if let Some(saved) = state.and_then(|state| state.saved.get_mut(request)) {
            saved.blocks = saved.blocks.max(here);
            saved.end = end.or(saved.end);
        } else if let Some(end) = end {
            // The request finished before its last save.
            self.returns.finished(end, TurnEnd::UNKNOWN, self.now_ns);
        }
        let lacks = merged(&cursor.end.lacks);
        let end = SaveEnd {
            lacks,
            ..cursor.end
        };
        SaveProgress::Ended { extents, end }
    }

    /// Which blocks the policies have weighed. A block that was not admitted may be in the index now.
    fn blocks_offered(&self, request: Option<RequestId>, depth: u32) -> BlockOffers {
        let mut blocks =
            request.map_or_else(BlockOffers::default, |id| self.sessions.requests[id].offers);
        if blocks.not_admitted <= depth {
            blocks.not_admitted = 0;
        }
        blocks
    }

    /// Finds the required payloads that are missing in the middle of the chain that existed when the save began. Returns
    /// whether all are found.
    fn find_gaps(&mut self, plan: &mut SavePlan<'_>) -> bool {
        // The save's lease keeps these nodes: they are the tail, and nodes above.
        while plan.cursor.gaps.at != NONE {
            let node = self.residency.node(plan.cursor.gaps.at);
            if node.is_visible() {
                plan.cursor.gaps.at = NONE;
            } else if plan.look() {
                let parent = node.parent();
                if node.is_gap() {
                    plan.cursor.note_gap(&self.residency);
                }
                plan.cursor.gaps.at = parent;
            } else {
                return false;
            }
            let gaps = &plan.cursor.gaps;
            if gaps.at == NONE && !gaps.found.is_empty() && !gaps.stay {
                // The blocks below are used, too: lookups are about to reach them again.
                self.residency.renew(plan.tail.0);
            }
        }
        true
    }

    /// Reserves slots, front to back, for the payloads that are missing in the middle of the chain. Returns whether all
    /// gaps are filled; `Err` if a slot is refused.
    fn fill_gaps(&mut self, plan: &mut SavePlan<'_>) -> Result<bool, SlotRefusal> {
        while let Some(&node) = plan.cursor.gaps.found.last() {
            if !plan.look() {
                return Ok(false);
            }
            self.fill_gap(plan, node)?;
            plan.cursor.gaps.found.pop();
        }
        Ok(true)
    }

    /// Reserves slots for the required payloads of a node that are in no tier.
    fn fill_gap(&mut self, plan: &mut SavePlan<'_>, node: NodeId) -> Result<(), SlotRefusal> {
        let hit_class = self.residency.node(node).touch().hit_class;
        while let Some(group) = self.residency.missing_group(node) {
            self.reserve(plan, node, group, hit_class)?;
        }
        Ok(())
    }

    /// Adds new blocks to the end of the chain, front to back, as far as there are slots. Returns whether no block is
    /// left to add.
    fn extend_chain(&mut self, plan: &mut SavePlan<'_>) -> bool {
        while let Some(hash) = plan.hashes.get(plan.cursor.next as usize - 1) {
            if !plan.look() {
                return false;
            }
            let found = self.residency.forest().find(plan.cursor.ns, &hash);
            if let Some(node) = found {
                // Another session has saved the block since the last step. If its parent is not the tail, the
                // caller's hashes are no chain.
                if plan.tail.0 == NONE || self.residency.node(node).parent() != plan.tail.0 {
                    return true;
                }
                plan.tail = (node, self.residency.node(node).epoch);
            } else if let SaveStep::End = self.extend_by(plan, plan.cursor.next, hash) {
                return true;
            }
            plan.cursor.next += 1;
        }
        true
    }

    /// Adds one block to the chain, if the policy admits it and there are slots.
    fn extend_by(&mut self, plan: &mut SavePlan<'_>, depth: u32, hash: BlockHash) -> SaveStep {
        let fingerprint = hash.fingerprint();
        // A block that found no room before was weighed then.
        let hit_class = if depth > plan.cursor.blocks.offered {
            self.offer_block(fingerprint)
        } else {
            0
        };
        if plan.cursor.blocks.not_admitted > 0 {
            // No lookup reaches a block behind a missing block.
            plan.cursor.blocks.offered = plan.cursor.blocks.offered.max(depth);
            self.residency.refuse_block(fingerprint, depth, hit_class);
            return SaveStep::Block;
        }
        let node = self
            .residency
            .insert(plan.cursor.ns, plan.tail.0, hash, hit_class);
        let start = plan.payloads.len();
        if let Err(refusal) = self.fill_node(node, hit_class, plan) {
            for (node, group) in plan.payloads.drain(start..) {
                self.residency.host_failed(node, group);
            }
            self.residency.reconcile(node);
            if refusal == SlotRefusal::Full {
                plan.cursor.end.refused = Some(SaveRefusal::HostFull);
                return SaveStep::End;
            }
            plan.cursor.blocks.not_admitted = depth;
            plan.cursor.blocks.offered = plan.cursor.blocks.offered.max(depth);
            self.residency.refuse_block(fingerprint, depth, hit_class);
            let ns = plan.cursor.ns;
            self.residency.note_departure(ns, hash, Reason::NotAdmitted);
            return SaveStep::Block;
        }
        plan.cursor.blocks.offered = plan.cursor.blocks.offered.max(depth);
        plan.tail = (node, self.residency.node(node).epoch);
        SaveStep::Block
    }

    /// Reserves slots for offered optional payloads at the nodes of the chain that were in the index when the save
    /// began. Returns whether all offers were looked at.
    fn add_to_chain(&mut self, plan: &mut SavePlan<'_>) -> bool {
        while let Some(offer) = plan.cursor.offers.get(plan.cursor.next_offer.0) {
            let first = offer.first_block.max(plan.cursor.next_offer.1);
            match self.add_offer(plan, offer, first) {
                // The next step continues at this block.
                Some(Err(block)) => {
                    plan.cursor.next_offer.1 = block;
                    return false;
                }
                Some(Ok(())) => plan.cursor.next_offer = (plan.cursor.next_offer.0 + 1, 0),
                None => plan.cursor.next_offer = (usize::MAX, 0),
            }
        }
        true
    }

    /// Reserves slots for the blocks of an offer from `first` on. `Err`: the step's limit was reached before
    /// this block. `None`: no other offer is taken.
    fn add_offer(
        &mut self,
        plan: &mut SavePlan<'_>,
        offer: Offer,
        first: u32,
    ) -> Option<Result<(), u32>> {
        let spec = self.residency.spec(plan.cursor.ns);
        let group = usize::from(offer.group);
        // Offers come from clients: a group may not exist.
        let is_ignored = |kind| kind == GroupKind::Ignored;
        if spec.groups.get(group).is_none_or(|of| is_ignored(of.kind)) {
            return Some(Ok(()));
        }
        let hash_blocks = spec.hash_blocks(group);
        let end = offer.end_block.min(plan.cursor.depth / hash_blocks);
        for block in first..end {
            if !plan.look() {
                return Some(Err(block));
            }
            let at = (block + 1) * hash_blocks;
            let hash = plan.hashes.get(at as usize - 1)?;
            let node = self.residency.forest().find(plan.cursor.ns, &hash)?;
            let state = self.residency.node(node);
            let payload = state.payload(offer.group);
            let is_here = payload.host != HostState::Empty || payload.disk != DiskState::Empty;
            if state.depth != at || state.requires(offer.group) || is_here {
                continue;
            }
            let hit_class = state.touch().hit_class;
            self.residency.renew(node);
            self.reserve(plan, node, offer.group, hit_class).ok()?;
        }
        Some(Ok(()))
    }

    /// Offers a block that is in no tier to the policies; returns the hit class with which the block
    /// enters.
    fn offer_block(&mut self, fingerprint: u64) -> u8 {
        let hit_class = self.residency.offer_block(fingerprint);
        let again = self.writeback.was_offered(fingerprint);
        hit_class.max(u8::from(again))
    }

    /// Reserves a new node's slots. `Err` if the slot of a required payload is refused.
    fn fill_node(
        &mut self,
        node: NodeId,
        hit_class: u8,
        plan: &mut SavePlan<'_>,
    ) -> Result<(), SlotRefusal> {
        let state = self.residency.node(node);
        let (depth, required, groups) = (state.depth, state.required(), state.groups());
        for group in groups {
            let spec = self.residency.spec(plan.cursor.ns);
            if !spec.ends_block(usize::from(group), depth) {
                continue;
            }
            let is_required = required >> group & 1 == 1;
            let block = depth / spec.hash_blocks(usize::from(group)) - 1;
            if !is_required && !plan.cursor.offers.contains(group, block) {
                continue;
            }
            match self.reserve(plan, node, group, hit_class) {
                Ok(()) => {}
                Err(refusal) if is_required => return Err(refusal),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Reserves one slot of the arena for a payload that is to be saved.
    fn reserve(
        &mut self,
        plan: &mut SavePlan<'_>,
        node: NodeId,
        group: u8,
        hit_class: u8,
    ) -> Result<(), SlotRefusal> {
        // A save may evict as many payloads as it brings.
        self.tell_listeners();
        // With disks, the arena admits each payload: payloads reach disk through the arena, and the disk's policy
        // decides.
        let is_lowest = self.residency.disks().is_empty();
        // A gap is not weighed: the blocks behind it are worth nothing without it.
        let weighs =
            is_lowest && !plan.cursor.offers.are_wanted && plan.cursor.gaps.found.is_empty();
        let residency = &mut self.residency;
        let bytes = residency.slot_bytes(node, group);
        if weighs && residency.refuses_new(node, group, Region::Host, hit_class) {
            self.counters.refused_admission += 1;
            Err(SlotRefusal::NotAdmitted)
        } else if bytes <= plan.limit.bytes
            && residency.reserve_below(plan.cursor.tail, (node, group), &mut self.counters)
        {
            plan.limit.bytes -= bytes;
            plan.payloads.push((node, group));
            Ok(())
        } else {
            self.counters.refused_host_full += 1;
            Err(SlotRefusal::Full)
        }
    }

    /// Ends the copies of some of a save's payloads: with `ok` the payloads become readable, else their slots are
    /// freed.
    pub(super) fn end_saved(&mut self, payloads: &[(NodeId, u8)], ok: bool) {
        self.residency.allow_rest(self.config.tells);
        let mut visible = Vec::new();
        for &(node, group) in payloads {
            self.tell_listeners();
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
        }
        if ok {
            self.offer_remote_saved(payloads);
        }
    }
}
