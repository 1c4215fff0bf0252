//! The fields of residency, and the functions by which other parts read them; the payloads of each namespace with their
//! size class in each region; the changes that are noted for those who listen
//! ([`Changes`](super::super::changes::Changes)); the checksums of the payloads in the arena, by slot.

use std::ops::Range;

use undercroft_contract::explain::Reason;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::BlockEvent;
use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, Forest, NONE, NodeId, NodeRef, NsId};
use crate::policy::{Policy, PolicyKind, Tenants, TierPolicies};
use crate::slots::{Class, Slots, slot_offset};

use super::super::changes::{Change, Changes};
use super::super::config::EngineConfig;
use super::progress::{
    ClearTotals, Erasures, Moves, PageMove, Placeholders, Removals, Resizing, Rest,
};
use super::tenants::{NamespaceUsage, Shares, TenantShare};

/// Bytes of a block, to estimate how many a tier holds, as a power of two.
const BLOCK_BYTES_LOG2: u32 = 16;
/// The least number of blocks for which a policy is made.
const POLICY_BLOCKS_MIN: u64 = 64;

/// An entry may end the use of several payloads, each with a chain above. So for one chain, an entry removes only this
/// part of the nodes that it may remove.
const CHAIN_STEPS: usize = 8;

/// Which payload is in which tier.
///
/// Invariants:
/// - a payload has a slot in a tier exactly while its state there says so, and the slot's owner is the
///   payload; all payloads of a node on disk are in one directory;
/// - a node counts its slots and its active children, and in `Uses::busy` its copies and IO operations,
///   `queued_bytes` the payloads in state `Queued`;
/// - a node is visible if and only if its parent is visible and every required payload is readable in some tier,
///   or is being read;
/// - a node is in the host chain only if its parent is and every required payload is in the arena; the reverse also
///   holds, except below a node with very many nodes below;
/// - a policy's set holds exactly the nodes whose [`Evictability`] says so: nothing leased, held, in flight
///   or above a payload of the same tier, and no last copy that a child needs;
/// - a detached node is freed as soon as nothing uses it and it has no children.
///
/// [`Evictability`]: crate::forest::Evictability
#[derive(Debug)]
pub(crate) struct Residency {
    pub(super) forest: Forest,
    pub(super) host: Slots,
    pub(super) host_checksums: HostChecksums,
    pub(super) host_policies: TierPolicies,
    pub(super) disks: Vec<Disk>,
    /// The payloads that each namespace has, by [`NsId`].
    pub(super) geometry: Vec<Geometry>,
    pub(super) shares: Shares,
    /// The policies' time: a request takes a tick, and others for its hit and its first save if requests came between.
    pub(super) tick: u64,
    /// Number of slots freed since the start, by tier. Those that wait for room compare this number.
    pub(super) freed: [u64; 2],
    /// Slot bytes of the payloads in the write queue.
    pub(super) queued_bytes: u64,
    pub(super) removals: Removals,
    /// Nodes of one chain without payloads that an entry adds records for, or removes; the others wait for later
    /// entries.
    pub(super) chain_steps: usize,
    pub(super) placeholders: Placeholders,
    pub(super) rest: Rest,
    /// Some nodes that belong to the host chain may not be marked so.
    pub(super) is_rise_cut: bool,
    /// The pages that move to another size class, by region: the arena, then the directories.
    pub(super) page_moves: Vec<PageMove>,
    pub(super) moves: Moves,
    /// The sizes that an operator has set, by region; empty before the first order.
    pub(super) resizing: Vec<Resizing>,
    /// A payload on disk was evicted although other payloads on disk depend on it.
    pub(super) disk_gaps: bool,
    /// Changes that the engine passes on to those who listen.
    pub(crate) changes: Changes,
    /// Payloads whose bytes on disk are erased.
    pub(crate) erasures: Erasures,
    /// While a pass is under way: nodes that have lost their last child, with their epochs.
    pub(super) bared: Option<Vec<(NodeId, u32)>>,
    /// The result of the last order to clear.
    pub(crate) cleared: ClearTotals,
}

impl Residency {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let host_bytes = config.host_bytes;
        let policy = new_policy(config.policy, host_bytes);
        Self {
            forest: Forest::new(config.seed),
            host: Slots::new(host_bytes, page_bytes_for(host_bytes)),
            host_checksums: HostChecksums::default(),
            host_policies: TierPolicies::new(policy),
            disks: Vec::new(),
            geometry: Vec::new(),
            shares: Shares::default(),
            tick: 0,
            freed: [0, 0],
            queued_bytes: 0,
            removals: Removals::default(),
            chain_steps: (config.removals / CHAIN_STEPS).max(1),
            placeholders: Placeholders::default(),
            rest: Rest::new(),
            is_rise_cut: false,
            page_moves: vec![PageMove::default()],
            moves: Moves::default(),
            resizing: Vec::new(),
            disk_gaps: false,
            changes: Changes::new(config.departures > 0),
            erasures: Erasures::default(),
            bared: None,
            cleared: ClearTotals::default(),
        }
    }

    /// A node. The id must be of a live node.
    pub(crate) fn node(&self, id: NodeId) -> NodeRef<'_> {
        self.forest.node(id)
    }

    /// The parent of a node, if it has one.
    pub(super) fn parent(&self, id: NodeId) -> Option<NodeId> {
        let parent = self.node(id).parent();
        (parent != NONE).then_some(parent)
    }

    pub(crate) fn forest(&self) -> &Forest {
        &self.forest
    }

    /// Bytes that nodes, index and slots take. Candidates of the policies are few.
    #[cfg(feature = "check")]
    pub(crate) fn index_bytes(&self) -> u64 {
        let disks = self.disks.iter().map(|disk| disk.slots().bytes());
        self.forest.bytes() + self.host.bytes() + disks.sum::<u64>()
    }

    pub(crate) fn host(&self) -> &Slots {
        &self.host
    }

    /// Directories, in the order of their indices.
    pub(crate) fn disks(&self) -> &[Disk] {
        &self.disks
    }

    pub(crate) fn disk_mut(&mut self, device: DeviceIndex) -> &mut Disk {
        &mut self.disks[device.index()]
    }

    /// Indices of the directories.
    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceIndex> + use<> {
        let count: Range<usize> = 0..self.disks.len();
        count.map(DeviceIndex::new)
    }

    /// The description of a namespace.
    pub(crate) fn spec(&self, ns: NsId) -> &NamespaceSpec {
        &self.geometry[usize::from(ns)].spec
    }

    /// The description of a node's namespace.
    pub(crate) fn spec_of(&self, id: NodeId) -> &NamespaceSpec {
        self.spec(self.node(id).ns)
    }

    /// A namespace's share of the tiers, and its bytes there.
    pub(crate) fn namespace_usage(&self, ns: NsId) -> NamespaceUsage {
        let bytes = |region: Region| self.shares.bytes(ns, region.index());
        NamespaceUsage {
            tenant_share: self.shares.share(ns),
            host_bytes: bytes(Region::Host),
            disk_bytes: self.devices().map(Region::Disk).map(bytes).sum(),
        }
    }

    /// Gives namespaces that sessions use the shares that they want, see [`Shares::settle`].
    pub(crate) fn settle_shares(&mut self, wanted: &[TenantShare]) {
        let regions = self.disks.iter().map(|disk| (disk.slots(), &disk.policies));
        let regions = std::iter::once((&self.host, &self.host_policies)).chain(regions);
        let mut with_candidates = Tenants::default();
        for (slots, policies) in regions {
            with_candidates = with_candidates.and(policies.with_candidates(slots.classes()));
        }
        self.shares.settle(wanted, with_candidates);
    }

    /// Tokens of a hash block of a namespace.
    pub(crate) fn hash_block_size(&self, ns: NsId) -> u32 {
        self.spec(ns).hash_block_size
    }

    pub(crate) fn tick(&self) -> u64 {
        self.tick
    }

    /// Advances the tick: a request has come, or needs a tick of its own.
    pub(crate) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Ends the request of the current tick: one of the policies may learn, each first in its turn.
    pub(crate) fn end_of_request(&mut self) {
        let (tick, policies) = (self.tick, self.disks.len() + 1);
        for after in 0..policies {
            let policy = match (tick as usize + after) % policies {
                0 => &mut self.host_policies,
                disk => &mut self.disks[disk - 1].policies,
            };
            if policy.leaves.end_of_request(tick) {
                return;
            }
        }
    }

    /// Slots freed since the start in one tier.
    pub(crate) fn freed(&self, tier: Tier) -> u64 {
        self.freed[tier as usize]
    }

    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Whether any directory may be written to.
    pub(crate) fn any_disk_takes_writes(&self, now_ns: u64) -> bool {
        let mut disks = self.disks.iter();
        disks.any(|disk| disk.health.takes_writes(now_ns))
    }

    /// Whether no directory takes writes now, but a directory that does not answer may take writes later.
    pub(crate) fn waits_for_an_answer(&self, now_ns: u64) -> bool {
        let is_silent = |disk: &Disk| disk.health.is_alive() && !disk.health.answers();
        !self.any_disk_takes_writes(now_ns) && self.disks.iter().any(is_silent)
    }

    pub(super) fn policies(&mut self, region: Region) -> &mut TierPolicies {
        match region {
            Region::Host => &mut self.host_policies,
            Region::Disk(device) => &mut self.disks[device.index()].policies,
        }
    }

    pub(super) fn slots(&self, region: Region) -> &Slots {
        match region {
            Region::Host => &self.host,
            Region::Disk(device) => self.disks[device.index()].slots(),
        }
    }

    pub(super) fn slots_mut(&mut self, region: Region) -> &mut Slots {
        match region {
            Region::Host => &mut self.host,
            Region::Disk(device) => self.disks[device.index()].slots_mut(),
        }
    }

    /// The region that holds a node's payloads of a tier.
    pub(super) fn region(&self, id: NodeId, tier: Tier) -> Region {
        match tier {
            Tier::Host => Region::Host,
            Tier::Disk => Region::Disk(self.node(id).device),
        }
    }
}

/// A policy for a region of `bytes`.
pub(super) fn new_policy(kind: PolicyKind, bytes: u64) -> Policy {
    let blocks = (bytes >> BLOCK_BYTES_LOG2).max(POLICY_BLOCKS_MIN);
    let blocks = usize::try_from(blocks).expect("a 64-bit machine");
    Policy::new(kind, blocks)
}

/// A region that slots are allocated from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    /// The arena.
    Host,
    /// The data file of a directory.
    Disk(DeviceIndex),
}

impl Region {
    /// The region's number: the arena, then the directories.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Host => 0,
            Self::Disk(device) => 1 + device.index(),
        }
    }

    pub(super) fn tier(self) -> Tier {
        match self {
            Self::Host => Tier::Host,
            Self::Disk(_) => Tier::Disk,
        }
    }
}

/// A namespace that an operator has cleared: its last blocks leave as they become free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    /// Number of the order.
    pub(crate) order: u64,
    /// The bytes on disk are erased.
    pub(crate) erases: bool,
}

/// The payloads of one namespace.
#[derive(Debug)]
pub(crate) struct Geometry {
    pub(super) spec: NamespaceSpec,
    /// Size class of each group in the arena; `None` for ignored groups.
    pub(super) host_class: Vec<Option<Class>>,
    /// Size class of each group, by directory.
    pub(super) disk_class: Vec<Vec<Option<Class>>>,
    /// `Some` if an operator has cleared the namespace.
    pub(super) leaving: Option<Leaving>,
}

impl Geometry {
    pub(super) fn class(&self, region: Region, group: usize) -> Option<Class> {
        let classes = match region {
            Region::Host => &self.host_class,
            Region::Disk(device) => &self.disk_class[device.index()],
        };
        *classes.get(group)?
    }
}

impl Residency {
    /// The event that a payload of a node has become readable in a tier (`stored`), or is no longer readable.
    pub(crate) fn event(&self, id: NodeId, group: u8, tier: Tier, stored: bool) -> BlockEvent {
        let parent = self.parent(id).filter(|_| stored);
        BlockEvent {
            tier: tier.into(),
            stored,
            group,
            hash: self.node(id).hash,
            parent: parent.map(|parent| self.node(parent).hash),
        }
    }

    /// Notes that a payload of a node has become readable in a tier (`stored`), or is no longer readable.
    pub(super) fn note_event(&mut self, id: NodeId, group: u8, tier: Tier, stored: bool) {
        if !self.changes.has_feeds || self.node(id).is_detached() {
            return;
        }
        let event = self.event(id, group, tier, stored);
        let (ns, node) = (self.node(id).ns, id);
        self.changes.note(Change::Payload { ns, node, event });
    }

    /// Notes that the last payload of a block has left a tier, or that a block was not admitted.
    pub(crate) fn note_departure(&mut self, ns: NsId, hash: BlockHash, reason: Reason) {
        if self.changes.has_departures {
            self.changes.note(Change::Departure { ns, hash, reason });
        }
    }

    /// Notes that a node is about to leave the index: no lookup finds its payloads any more.
    pub(super) fn note_detached(&mut self, id: NodeId) {
        if !self.changes.has_feeds {
            return;
        }
        for (group, tier) in self.readable(id) {
            self.note_event(id, group, tier, false);
        }
    }

    /// Groups and tiers of a node's readable payloads.
    pub(crate) fn readable(&self, id: NodeId) -> Vec<(u8, Tier)> {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let in_tiers = payloads.flat_map(|(group, payload)| {
            let tiers = Tier::ALL.into_iter();
            let tiers = tiers.filter(move |&tier| payload.is_readable(tier));
            tiers.map(move |tier| (group, tier))
        });
        in_tiers.collect()
    }

    /// The events that a session gets of a namespace if it reads all of them: one for each readable payload and tier.
    #[cfg(feature = "check")]
    pub(crate) fn announced(&self, ns: NsId) -> Vec<BlockEvent> {
        let ids = self.forest.ids();
        let ids = ids.filter(|&id| self.node(id).ns == ns && !self.node(id).is_detached());
        let all = ids.flat_map(|id| {
            let payloads = self.readable(id).into_iter();
            payloads.map(move |(group, tier)| self.event(id, group, tier, true))
        });
        all.collect()
    }

    /// The payloads in the tiers: namespace, hash, group, and the place on disk.
    #[cfg(feature = "check")]
    #[expect(clippy::type_complexity, reason = "only the simulator takes it")]
    pub(crate) fn held(&self) -> Vec<(NsId, BlockHash, u8, Option<(u16, u64, u32)>)> {
        let ids = self.forest.ids();
        let ids = ids.filter(|&id| !self.node(id).is_detached());
        let all = ids.flat_map(|id| {
            let node = self.node(id);
            let payloads = self.readable(id).into_iter();
            payloads.map(move |(group, tier)| {
                let place = (tier == Tier::Disk).then(|| {
                    let (offset, bytes) = self.disk_range(id, group);
                    (node.device.number(), offset, bytes)
                });
                (node.ns, node.hash, group, place)
            })
        });
        all.collect()
    }
}

/// The value for an unknown checksum. A payload whose checksum is 0, one in 2^64, is not compared.
const UNKNOWN: u64 = 0;

/// The checksums of payloads in the arena, as far as they are known: 8 bytes for each slot.
///
/// Invariant: the entry of a slot belongs to the payload in the slot.
#[derive(Debug, Default)]
pub(super) struct HostChecksums {
    pages: Vec<Vec<u64>>,
}

impl HostChecksums {
    fn get(&self, (page, slot): (usize, usize)) -> u64 {
        let found = self.pages.get(page).and_then(|slots| slots.get(slot));
        found.copied().unwrap_or(UNKNOWN)
    }

    fn set(&mut self, (page, slot): (usize, usize), checksum: u64) {
        if self.pages.len() <= page {
            self.pages.resize(page + 1, Vec::new());
        }
        let slots = &mut self.pages[page];
        if slots.len() <= slot {
            slots.resize(slot + 1, UNKNOWN);
        }
        slots[slot] = checksum;
    }
}

impl Residency {
    /// The checksum of a payload in the arena, if it is known.
    pub(crate) fn host_checksum(&self, id: NodeId, group: u8) -> Option<u64> {
        let known = self.host_checksums.get(self.host_place(id, group));
        (known != UNKNOWN).then_some(known)
    }

    /// Takes the checksum of the bytes that are now in a payload's slot of the arena. False if another checksum of the
    /// payload is known. The first checksum is kept.
    pub(crate) fn is_unchanged(&mut self, id: NodeId, group: u8, found: u64) -> bool {
        match self.host_checksum(id, group) {
            Some(known) => known == found,
            None => {
                self.set_host_checksum(id, group, Some(found));
                true
            }
        }
    }

    /// Notes the checksum of a payload that is about to fill its slot.
    pub(crate) fn set_host_checksum(&mut self, id: NodeId, group: u8, checksum: Option<u64>) {
        let place = self.host_place(id, group);
        self.host_checksums.set(place, checksum.unwrap_or(UNKNOWN));
    }

    /// Page and slot of a payload in the arena.
    fn host_place(&self, id: NodeId, group: u8) -> (usize, usize) {
        let class = self.class(id, Region::Host, group);
        let offset = slot_offset(self.node(id).payload(group).host_slot);
        let page = self.host.page_of(offset) as usize;
        (page, self.host.slot_at(class, offset))
    }
}
