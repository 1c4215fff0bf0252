//! Transfers: loads and saves that the workers carry out between device and arena.

use crate::forest::{DiskState, HostState, NONE, NodeId, NsId, Tier};
use crate::key::HashSource;
use crate::namespace::GroupKind;

use super::places::{Loss, bytes};
use super::{Engine, SessionId, TransferId};

/// Blocks of one group: the slot of each from `first_block` on, as an offset in bytes from the
/// start of the arena; -1 where nothing is to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the group.
    pub group: u8,
    /// Index of the first block in the request's block table of that group.
    pub first_block: u32,
    /// One offset for each block.
    pub slots: Vec<i64>,
}

/// What a worker is to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Ends it: [`Engine::end_transfer`].
    pub id: TransferId,
    /// Blocks by group.
    pub extents: Vec<Extent>,
}

/// Blocks of a group that a hit can do without (a window's, or a state) and that the device holds now:
/// a save takes them too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Index of the group.
    pub group: u8,
    /// Index of the first block in the request's block table of that group.
    pub first_block: u32,
    /// Index of the block after the last.
    pub end_block: u32,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// Leases the node.
    Load { lease: NodeId, request: Box<str> },
    /// Payloads being filled, front to back.
    Save { places: Vec<(NodeId, u8)> },
}

/// Why a payload got no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// Everything that could make room is in use: worth another try.
    Full,
    /// The policy would rather keep what is there.
    NotAdmitted,
}

#[derive(Debug)]
pub(super) struct TransferState {
    pub(super) session: SessionId,
    /// Of the slots that it copies from or to.
    pub(super) bytes: u64,
    pub(super) kind: Kind,
}

impl TransferState {
    pub(super) fn is_load(&self) -> bool {
        matches!(self.kind, Kind::Load { .. })
    }
}

impl Engine {
    /// Starts the load of `(local, local + external]` tokens of a request whose answer was Ready.
    /// `None` if a payload has gone since: the caller reports the load as failed.
    pub fn begin_load(
        &mut self,
        session: SessionId,
        request: &str,
        local_tokens: u32,
        external_tokens: u32,
    ) -> Option<Transfer> {
        let transfer = self.try_begin_load(session, request, local_tokens, external_tokens, false);
        if transfer.is_none() {
            self.counters.load_failures += 1;
        }
        transfer
    }

    /// As [`Engine::begin_load`], for a client that was told the slots with its answer and may copy from
    /// them already: also if the prefix was dropped from the index since, since its lease keeps the bytes.
    pub fn begin_promised_load(
        &mut self,
        session: SessionId,
        request: &str,
        local_tokens: u32,
        external_tokens: u32,
    ) -> Option<Transfer> {
        self.try_begin_load(session, request, local_tokens, external_tokens, true)
    }

    /// Where the payloads of a load of `(local_tokens, boundary]` lie, for a request whose last answer was
    /// Ready with that boundary. They stay there as long as the request keeps its answer.
    pub fn leased_extents(
        &self,
        session: SessionId,
        request: &str,
        local_tokens: u32,
    ) -> Vec<Extent> {
        let lease = self
            .sessions
            .get(session)
            .and_then(|state| state.requests.get(request))
            .and_then(|&id| self.requests.get(id))
            .map_or(NONE, |state| state.lease);
        if lease == NONE {
            return Vec::new();
        }
        let ns = usize::from(self.forest.node(lease).ns);
        let granule = self.namespaces[ns].spec.hash_block_tokens;
        self.extents(&self.steps(lease, local_tokens / granule))
    }

    fn try_begin_load(
        &mut self,
        session: SessionId,
        request: &str,
        local_tokens: u32,
        external_tokens: u32,
        promised: bool,
    ) -> Option<Transfer> {
        let id = *self.sessions.get(session)?.requests.get(request)?;
        let state = &self.requests[id];
        let (lease, ns) = (state.lease, usize::from(state.ns));
        if lease == NONE || self.forest.node(lease).detached && !promised {
            return None;
        }
        let spec = &self.namespaces[ns].spec;
        let end = local_tokens.checked_add(external_tokens)?;
        let (boundary, local) = (
            end / spec.hash_block_tokens,
            local_tokens / spec.hash_block_tokens,
        );
        if end % spec.hash_block_tokens != 0 || !spec.may_end(boundary) {
            return None;
        }
        if boundary > self.forest.node(lease).depth || boundary <= local {
            return None;
        }
        let target = self.forest.ancestor(lease, boundary);
        let steps = self.steps(target, local);
        let readable = |&(node, group): &(NodeId, u8)| {
            self.forest.node(node).place(group).host == HostState::Present
        };
        if !steps.iter().all(readable) {
            return None;
        }
        let extents = self.extents(&steps);
        self.pin_hit(target);
        // A promotion stands on the lease.
        self.end_promotion(id, false);
        self.lease(id, NONE);
        self.release_promoted(id);
        let kind = Kind::Load {
            lease: target,
            request: request.into(),
        };
        let id = self.transfers.insert(TransferState {
            session,
            bytes: self.slot_bytes_of(&steps),
            kind,
        });
        Some(Transfer { id, extents })
    }

    fn slot_bytes_of(&self, places: &[(NodeId, u8)]) -> u64 {
        let slots = places.iter();
        slots
            .map(|&(node, group)| self.host.slot_bytes(self.host_class(node, group)))
            .sum()
    }

    /// Groups places by KV cache group, with their slots by block index.
    fn extents(&self, places: &[(NodeId, u8)]) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for &(node, group) in places {
            let at = self.forest.node(node);
            let granules = self.namespaces[usize::from(at.ns)]
                .spec
                .granules(usize::from(group));
            let block = at.depth / granules - 1;
            let slot = i64::try_from(bytes(at.place(group).host_at)).unwrap_or(-1);
            match extents.iter_mut().find(|extent| extent.group == group) {
                None => extents.push(Extent {
                    group,
                    first_block: block,
                    slots: vec![slot],
                }),
                Some(extent) => {
                    let index = (block - extent.first_block) as usize;
                    extent.slots.resize(index, -1);
                    extent.slots.push(slot);
                }
            }
        }
        extents
    }

    /// Reserves slots for the full blocks among a request's first `num_tokens` tokens that are not
    /// here and not under way. `None` if there is nothing to copy. What was left out for want of
    /// memory can be asked for again ([`Engine::save_refused`]).
    ///
    /// `request`: the one whose blocks these are. A policy weighs each of its blocks once, however often
    /// its save is tried or continued.
    /// `offers`: what the device holds of groups that are not full attention. It is added to blocks that
    /// are here already, too.
    pub fn begin_save<H: HashSource + ?Sized>(
        &mut self,
        session: SessionId,
        request: &str,
        hashes: &H,
        num_tokens: u32,
        offers: &[Offer],
    ) -> Option<Transfer> {
        let state = self.sessions.get(session)?;
        // What this request has saved or found before is not found again.
        let known = state.saved.get(request).copied().unwrap_or(0);
        let (name, ns, request) = (request, state.ns, state.requests.get(request).copied());
        let granule = self.namespaces[usize::from(ns)].spec.hash_block_tokens;
        let granules = (num_tokens / granule).min(u32::try_from(hashes.len()).unwrap_or(u32::MAX));
        let hashes = Limited {
            hashes,
            len: granules as usize,
        };
        let found = self.forest.deepest(ns, &hashes, |_| true);
        let (mut parent, depth) = found.unwrap_or((NONE, 0));
        let mut places: Vec<(NodeId, u8)> = Vec::new();
        let mut refused = false;
        let (mut offered, mut not_admitted) = request.map_or((0, 0), |id| {
            (self.requests[id].offered, self.requests[id].not_admitted)
        });
        if not_admitted <= depth {
            not_admitted = 0;
        }
        // Everything down to the parent stays while its descendants are being added.
        if parent != NONE {
            self.pin(parent);
        }
        let anchor = parent;
        self.add_to_chain(ns, &hashes, depth, offers, &mut places);
        let mut tail_generation = if parent == NONE {
            0
        } else {
            self.forest.node(parent).generation
        };
        let first = if not_admitted > 0 {
            offered.max(depth)
        } else {
            depth
        } + 1;
        for depth in first..=granules {
            let hash = hashes.get(depth as usize - 1);
            // One that is here already, elsewhere, is of hashes that are no chain.
            let Some(hash) = hash.filter(|hash| self.forest.find(ns, hash).is_none()) else {
                break;
            };
            let groups = self.namespaces[usize::from(ns)].spec.groups.len();
            let required = self.namespaces[usize::from(ns)].spec.required(depth);
            let fingerprint = Self::fingerprint(&hash);
            let hit_class = if depth > offered {
                self.offer(fingerprint)
            } else {
                0
            };
            if not_admitted > 0 {
                // Nothing can be found behind a block that is not here.
                offered = offered.max(depth);
                self.host_policy
                    .on_refuse(fingerprint, hit_class, self.tick);
                continue;
            }
            let node = self.forest.insert(ns, parent, hash, groups, required);
            let state = self.forest.node_mut(node);
            state.last = self.tick;
            state.hit_class = hit_class;
            let start = places.len();
            match self.fill_node(node, hit_class, offers, &mut places) {
                Ok(()) => offered = offered.max(depth),
                Err(refusal) => {
                    for (node, group) in places.drain(start..) {
                        self.forest.node_mut(node).busy -= 1;
                        self.drop_host(node, group, Loss::Dropped);
                    }
                    self.settle(node);
                    if refusal == Refusal::Full {
                        refused = true;
                        break;
                    }
                    not_admitted = depth;
                    offered = offered.max(depth);
                    self.host_policy
                        .on_refuse(fingerprint, hit_class, self.tick);
                    continue;
                }
            }
            if required == 0 {
                self.rise(node);
            }
            parent = node;
            tail_generation = self.forest.node(node).generation;
        }
        let here = match parent {
            NONE => 0,
            parent => self.forest.node(parent).depth,
        };
        // A tail without payloads would keep what it stands on from eviction.
        if self.forest.is_live(parent, tail_generation) {
            self.settle(parent);
        }
        if anchor != NONE {
            self.unpin(anchor);
        }
        if let Some(id) = request {
            self.requests[id].offered = offered;
            self.requests[id].not_admitted = not_admitted;
        }
        let state = &mut self.sessions[session];
        state.save_refused = refused;
        state.saved.insert(name.into(), known.max(here));
        self.counters.deduplicated_blocks += u64::from(depth.saturating_sub(known));
        if places.is_empty() {
            return None;
        }
        // Offers may come in any order.
        places.sort_by_key(|&(node, _)| self.forest.node(node).depth);
        let extents = self.extents(&places);
        let id = self.transfers.insert(TransferState {
            session,
            bytes: self.slot_bytes_of(&places),
            kind: Kind::Save { places },
        });
        Some(Transfer { id, extents })
    }

    /// Reserves slots for what is offered of the first `depth` nodes of a chain, all of which are here.
    fn add_to_chain<H: HashSource + ?Sized>(
        &mut self,
        ns: NsId,
        hashes: &Limited<'_, H>,
        depth: u32,
        offers: &[Offer],
        places: &mut Vec<(NodeId, u8)>,
    ) {
        for offer in offers {
            let group = usize::from(offer.group);
            let spec = &self.namespaces[usize::from(ns)].spec;
            if group >= spec.groups.len() || spec.groups[group].kind == GroupKind::Ignored {
                continue;
            }
            let granules = spec.granules(group);
            let end = offer.end_block.min(depth / granules);
            for block in offer.first_block..end {
                let at = (block + 1) * granules;
                let found = hashes.get(at as usize - 1);
                let Some(node) = found.and_then(|hash| self.forest.find(ns, &hash)) else {
                    return;
                };
                let state = self.forest.node(node);
                let place = state.place(offer.group);
                let here = place.host != HostState::Empty || place.disk != DiskState::Empty;
                if state.depth != at || state.requires(group) || here {
                    continue;
                }
                let hit_class = state.hit_class;
                self.renew(node);
                match self.reserve(node, offer.group, hit_class) {
                    Ok(()) => places.push((node, offer.group)),
                    Err(_) => return,
                }
            }
        }
    }

    /// Offers a block that is nowhere to the policies; the hit class that it enters with.
    fn offer(&mut self, fingerprint: u64) -> u8 {
        let tick = self.tick;
        let mut class = self.host_policy.on_offer(fingerprint, tick);
        for disk in &mut self.disks {
            class = class.max(disk.policy.on_offer(fingerprint, tick));
        }
        let again = self
            .seen
            .as_mut()
            .is_some_and(|seen| seen.again(fingerprint));
        class.max(u8::from(again))
    }

    /// Reserves a new node's slots. `Err` if one that it cannot do without is refused.
    fn fill_node(
        &mut self,
        node: NodeId,
        hit_class: u8,
        offers: &[Offer],
        places: &mut Vec<(NodeId, u8)>,
    ) -> Result<(), Refusal> {
        let at = self.forest.node(node);
        let (depth, required, ns) = (at.depth, at.required, usize::from(at.ns));
        for group in 0..u8::try_from(at.places().len()).unwrap_or(0) {
            let spec = &self.namespaces[ns].spec;
            if !spec.ends_block(usize::from(group), depth) {
                continue;
            }
            let must = required >> group & 1 == 1;
            let block = depth / spec.granules(usize::from(group)) - 1;
            if !must && !offered(offers, group, block) {
                continue;
            }
            match self.reserve(node, group, hit_class) {
                Ok(()) => places.push((node, group)),
                Err(refusal) if must => return Err(refusal),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Reserves one slot of the arena for a payload that is to be saved.
    fn reserve(&mut self, node: NodeId, group: u8, hit_class: u8) -> Result<(), Refusal> {
        let class = self.host_class(node, group);
        // The way to disk leads through the arena: there, the disk's policy decides.
        let choosy = self.disks.is_empty() && self.host.is_full(class);
        if choosy && self.refuses(Tier::Host, 0, class, hit_class) {
            self.counters.refused_admission += 1;
            Err(Refusal::NotAdmitted)
        } else if self.take_host(node, group, HostState::Filling) {
            Ok(())
        } else {
            self.counters.refused_host_full += 1;
            Err(Refusal::Full)
        }
    }

    /// Whether the session's last save left blocks out that may be tried again.
    pub fn save_refused(&self, session: SessionId) -> bool {
        self.sessions
            .get(session)
            .is_some_and(|state| state.save_refused)
    }

    /// All ranks have ended the copies of a transfer. Unknown ids are ignored: an acknowledgement
    /// may come twice.
    pub fn end_transfer(&mut self, id: TransferId, ok: bool) {
        let Some(transfer) = self.transfers.remove(id) else {
            return;
        };
        match transfer.kind {
            Kind::Load { lease, request } => {
                self.unpin_hit(lease);
                if ok {
                    return;
                }
                self.counters.load_failures += 1;
                let request = self
                    .sessions
                    .get(transfer.session)
                    .and_then(|state| state.requests.get(&request).copied());
                if let Some(request) = request {
                    self.requests[request].failed = true;
                }
            }
            Kind::Save { places } => {
                if !ok {
                    self.counters.save_failures += 1;
                }
                for (node, group) in places {
                    if ok {
                        if !self.forest.node(node).detached {
                            self.counters.saved_blocks += 1;
                        }
                        self.host_filled(node, group);
                        self.offer_late_to_disk(node, group);
                    } else {
                        self.forest.node_mut(node).busy -= 1;
                        self.drop_host(node, group, Loss::Dropped);
                        self.settle(node);
                    }
                }
            }
        }
    }
}

fn offered(offers: &[Offer], group: u8, block: u32) -> bool {
    offers
        .iter()
        .any(|offer| offer.group == group && (offer.first_block..offer.end_block).contains(&block))
}

/// The first `len` hashes.
struct Limited<'a, H: ?Sized> {
    hashes: &'a H,
    len: usize,
}

impl<H: HashSource + ?Sized> HashSource for Limited<'_, H> {
    fn len(&self) -> usize {
        self.len
    }
    fn get(&self, index: usize) -> Option<crate::key::BlockHash> {
        self.hashes.get(index)
    }
}
