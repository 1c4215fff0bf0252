//! The fields of residency, and the functions by which other parts read them.

use std::ops::Range;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, Forest, NONE, NodeId, NodeRef, NsId, Tier};
use crate::namespace::NamespaceSpec;
use crate::policy::{Policy, PolicyKind, TierPolicies};
use crate::slots::{Slots, page_bytes_for};

use super::super::changes::Changes;
use super::super::config::EngineConfig;
use super::erasures::Erasures;
use super::geometry::{Geometry, Region};
use super::host_checksums::HostChecksums;
use super::page_moves::{Moves, PageMove};
use super::placeholders::Placeholders;
use super::removal::Removals;
use super::resizing::Resizing;
use super::rest::Rest;
use super::sweep::ClearTotals;

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
pub(in crate::engine) struct Residency {
    pub(super) forest: Forest,
    pub(super) host: Slots,
    pub(super) host_checksums: HostChecksums,
    pub(super) host_policies: TierPolicies,
    pub(super) disks: Vec<Disk>,
    /// The payloads that each namespace has, by [`NsId`].
    pub(super) geometry: Vec<Geometry>,
    /// The policies' time: one tick for each request.
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
    pub(in crate::engine) changes: Changes,
    /// Payloads whose bytes on disk are erased.
    pub(in crate::engine) erasures: Erasures,
    /// While a pass is under way: nodes that have lost their last child, with their epochs.
    pub(super) bared: Option<Vec<(NodeId, u32)>>,
    /// The result of the last order to clear.
    pub(in crate::engine) cleared: ClearTotals,
}

impl Residency {
    pub(in crate::engine) fn new(config: &EngineConfig) -> Self {
        let host_bytes = config.host_bytes;
        let policy = new_policy(config.policy, host_bytes, config.seed);
        Self {
            forest: Forest::new(config.seed),
            host: Slots::new(host_bytes, page_bytes_for(host_bytes)),
            host_checksums: HostChecksums::default(),
            host_policies: TierPolicies::new(policy),
            disks: Vec::new(),
            geometry: Vec::new(),
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
    pub(in crate::engine) fn node(&self, id: NodeId) -> NodeRef<'_> {
        self.forest.node(id)
    }

    /// The parent of a node, if it has one.
    pub(super) fn parent(&self, id: NodeId) -> Option<NodeId> {
        let parent = self.node(id).parent();
        (parent != NONE).then_some(parent)
    }

    pub(in crate::engine) fn forest(&self) -> &Forest {
        &self.forest
    }

    /// Bytes that nodes, index and slots take. Candidates of the policies are few.
    pub(in crate::engine) fn index_bytes(&self) -> u64 {
        let disks = self.disks.iter().map(|disk| disk.slots().bytes());
        self.forest.bytes() + self.host.bytes() + disks.sum::<u64>()
    }

    pub(in crate::engine) fn host(&self) -> &Slots {
        &self.host
    }

    /// Directories, in the order of their indices.
    pub(in crate::engine) fn disks(&self) -> &[Disk] {
        &self.disks
    }

    pub(in crate::engine) fn disk_mut(&mut self, device: DeviceIndex) -> &mut Disk {
        &mut self.disks[device.index()]
    }

    /// Indices of the directories.
    pub(in crate::engine) fn devices(&self) -> impl Iterator<Item = DeviceIndex> + use<> {
        let count: Range<usize> = 0..self.disks.len();
        count.map(DeviceIndex::new)
    }

    /// The description of a namespace.
    pub(in crate::engine) fn spec(&self, ns: NsId) -> &NamespaceSpec {
        &self.geometry[usize::from(ns)].spec
    }

    /// The description of a node's namespace.
    pub(in crate::engine) fn spec_of(&self, id: NodeId) -> &NamespaceSpec {
        self.spec(self.node(id).ns)
    }

    /// Tokens of a hash block of a namespace.
    pub(in crate::engine) fn hash_block_size(&self, ns: NsId) -> u32 {
        self.spec(ns).hash_block_size
    }

    pub(in crate::engine) fn tick(&self) -> u64 {
        self.tick
    }

    /// Advances the tick: a request has come, or needs a tick of its own.
    pub(in crate::engine) fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Ends the request of the current tick: policies may learn.
    pub(in crate::engine) fn end_of_request(&mut self) {
        let tick = self.tick;
        self.host_policies.leaves.end_of_request(tick);
        for disk in &mut self.disks {
            disk.policies.leaves.end_of_request(tick);
        }
    }

    /// Slots freed since the start in one tier.
    pub(in crate::engine) fn freed(&self, tier: Tier) -> u64 {
        self.freed[tier as usize]
    }

    pub(in crate::engine) fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Whether any directory may be written to.
    pub(in crate::engine) fn any_disk_takes_writes(&self, now_ns: u64) -> bool {
        let mut disks = self.disks.iter();
        disks.any(|disk| disk.health.takes_writes(now_ns))
    }

    /// Whether no directory takes writes now, but a directory that does not answer may take writes later.
    pub(in crate::engine) fn waits_for_an_answer(&self, now_ns: u64) -> bool {
        let is_silent = |disk: &Disk| disk.health.is_alive() && !disk.health.answers();
        !self.any_disk_takes_writes(now_ns) && self.disks.iter().any(is_silent)
    }

    /// Whether the policy of the arena counts every block of a hit, not only the deepest.
    pub(in crate::engine) fn touches_every_block(&self) -> bool {
        self.host_policies.leaves.touches_every_block()
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
pub(super) fn new_policy(kind: PolicyKind, bytes: u64, seed: u64) -> Policy {
    let blocks = (bytes >> BLOCK_BYTES_LOG2).max(POLICY_BLOCKS_MIN);
    let blocks = usize::try_from(blocks).expect("a 64-bit machine");
    Policy::new(kind, blocks, seed)
}
