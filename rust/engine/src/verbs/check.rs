//! The checks of all invariants of the engine, which the simulator runs after every few steps.

use std::collections::{HashMap, HashSet};

use undercroft_contract::explain::Explained;
use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::session::{BlockEvent, Extent, Tokens};

use crate::forest::{DiskState, HostState, NONE, NodeId};
use crate::slots::slot_offset;

use super::super::ensure::ensure;
use super::super::ids::SessionId;
use super::super::operations::Purpose;
use super::super::residency::{LeaseCounts, Moves};
use super::super::sessions::TransferKind;
use super::engine::Engine;

/// A payload in the tiers.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Digest of its namespace, its block hash, and its group.
    pub payload: (NamespaceDigest, BlockHash, u8),
    /// Where it is on disk, if it is there: the directory, the offset in the data file, and the bytes of its slot.
    pub place: Option<(u16, u64, u32)>,
}

/// A view of the state that callers have no part in, for the simulator and for tests.
#[derive(Clone, Copy, Debug)]
pub struct EngineView<'a> {
    engine: &'a Engine,
}

impl Engine {
    /// A view of the state for the simulator and for tests.
    pub fn inspect(&self) -> EngineView<'_> {
        EngineView { engine: self }
    }
}

impl<'a> EngineView<'a> {
    /// Each shared namespace, and whether all directories keep the namespace, so that a restart finds its saved blocks.
    /// A directory does not keep a namespace while sessions use all entries of the directory's table, or while a reset
    /// is not durable.
    pub fn shared_namespaces(self) -> impl Iterator<Item = (&'a NamespaceDigest, bool)> {
        self.engine
            .namespaces
            .shared_namespaces(&self.engine.residency)
    }
}

impl EngineView<'_> {
    /// Counts of the pages that moved between size classes, and of the effect on the chains through them.
    pub fn moves(&self) -> Moves {
        self.engine.residency.moves()
    }

    /// Memory of the index, in bytes: nodes, the hash table and the slots' owners. Costs a pass over the tables' parts.
    pub fn index_bytes(&self) -> u64 {
        self.engine.residency.index_bytes()
    }

    /// Whether operations of the store are in flight, or requests wait to be sent.
    pub fn has_remote_work(&self) -> bool {
        let remote = self.engine.remote.as_ref();
        remote.is_some_and(|remote| remote.is_active())
    }

    /// The places of the payloads of a load, which begins after `computed` tokens and ends with the request's last
    /// hit. The payloads keep these places as long as the request keeps its hit.
    pub fn hit_extents(&self, session: SessionId, request: &str, computed: Tokens) -> Vec<Extent> {
        let lease = self.engine.sessions.request_id(session, request);
        let lease = lease.map_or(NONE, |id| self.engine.shares[id].lease);
        if lease == NONE {
            return Vec::new();
        }
        let residency = &self.engine.residency;
        let local = computed.0 / residency.spec_of(lease).hash_block_size;
        residency.extents(&residency.needed_payloads(lease, local))
    }

    /// Whether every invariant of the engine's state holds.
    ///
    /// # Errors
    /// Names the first invariant that does not hold, and where.
    pub fn check(&self) -> Result<(), String> {
        // A directory that may have been given up held the only copy on disk of some nodes.
        let given_up = u64::from(self.engine.config.read_failures_max);
        let has_failed = self.engine.counters.write_failures > 0
            || self.engine.counters.read_failures >= given_up;
        self.engine
            .residency
            .check(&self.count_leases()?, has_failed)?;
        self.check_write_queue()?;
        let reading = self.check_operations()?;
        self.engine
            .promotions
            .check(&self.engine.shares, &reading)?;
        self.engine.pins.check(&self.engine.residency)?;
        self.engine.returns.check()?;
        if let Some(remote) = &self.engine.remote {
            remote.check(
                &self.engine.shares,
                &self.engine.residency,
                &self.engine.namespaces,
            )?;
        }
        let shares = self.engine.shares.values().flat_map(|of| {
            let priority = of.priority();
            let shares = of.waits.disk.iter().flat_map(|of| &of.shares);
            shares.map(move |share| (priority, share))
        });
        let reads = self
            .engine
            .operations
            .iter()
            .filter_map(|&(device, of)| match of {
                Purpose::Read { node, group, .. } => {
                    Some((device?, self.engine.residency.slot_bytes(node, group)))
                }
                _ => None,
            });
        self.engine.planner.rates.check(shares, reads)?;
        let of_sessions: usize = self
            .engine
            .sessions
            .values()
            .map(|session| session.requests.len())
            .sum();
        let requests = self.engine.sessions.requests.len();
        ensure!(
            of_sessions == requests,
            "{requests} requests, sessions know {of_sessions}"
        );
        let shares = self.engine.shares.len();
        ensure!(requests == shares, "{requests} requests, {shares} shares");
        Ok(())
    }

    /// The lookup of a request that was answered last.
    pub fn explained(&self, session: SessionId, request: &str) -> Option<Explained> {
        let state = self.engine.sessions.request(session, request)?;
        let (_, position) = state.answered.noted?;
        Some(
            self.engine
                .told(position, self.engine.lookups.at(position)?),
        )
    }

    /// The payloads in the tiers, as known to a session that has taken all events ([`Engine::take_events`]).
    pub fn announced(&self, session: SessionId) -> Vec<BlockEvent> {
        let state = self.engine.sessions.get(session);
        state.map_or_else(Vec::new, |state| self.engine.residency.announced(state.ns))
    }

    /// The payloads of shared namespaces in the tiers.
    pub fn held(&self) -> Vec<Held> {
        let all = self.engine.residency.held().into_iter();
        let shared = all.filter(|(ns, ..)| !self.engine.namespaces.is_private(*ns));
        let held = shared.map(|(ns, hash, group, place)| Held {
            payload: (*self.engine.namespaces.digest(ns), hash, group),
            place,
        });
        held.collect()
    }

    /// The blocks that the remote store is known to have, as known to a session that has taken all events.
    pub fn announced_remote(&self, session: SessionId) -> Vec<BlockEvent> {
        let state = self.engine.sessions.get(session);
        let remote = self.engine.remote.as_deref();
        let known = state.zip(remote);
        known.map_or_else(Vec::new, |(state, remote)| {
            remote.known_blocks(state.ns, &self.engine.namespaces)
        })
    }

    /// Whether a request waits for objects of the remote store.
    pub fn awaits_objects(&self, session: SessionId, request: &str) -> bool {
        let id = self.engine.sessions.request_id(session, request);
        id.is_some_and(|id| self.engine.shares[id].waits.remote.is_some())
    }

    /// Number of payloads that a restart would find: their whole chain is on disk.
    pub fn durable_blocks(&self) -> u64 {
        self.engine.residency.durable_blocks()
    }

    /// Leases of each node, and leases of nodes below that need the node's payloads.
    fn count_leases(&self) -> Result<LeaseCounts, String> {
        let mut counts = LeaseCounts::default();
        let mut hits = Vec::new();
        for share in self.engine.shares.values() {
            hits.push(share.lease);
            let promotion = share.waits.disk.as_ref();
            let reached = promotion.map_or(NONE, |promotion| promotion.reached());
            if reached != NONE {
                *counts.pins.entry(reached).or_default() += 1;
            }
        }
        for (node, _) in self.engine.residency.erasures.iter() {
            *counts.pins.entry(node).or_default() += 1;
        }
        for node in self.engine.remote.iter().flat_map(|remote| remote.leases()) {
            *counts.pins.entry(node).or_default() += 1;
        }
        for (node, _) in self.engine.checksums.in_flight() {
            *counts.pins.entry(node).or_default() += 1;
        }
        for (_, transfer) in self.engine.sessions.transfers() {
            ensure!(
                self.engine.sessions.get(transfer.session).is_some(),
                "transfer of no session"
            );
            match &transfer.kind {
                TransferKind::Load { lease, .. } => hits.push(*lease),
                TransferKind::Save(save) => {
                    let tail = save.cursor.as_ref().map_or(NONE, |cursor| cursor.tail);
                    if tail != NONE {
                        *counts.pins.entry(tail).or_default() += 1;
                    }
                }
            }
        }
        hits.extend(self.engine.pins.nodes());
        for id in hits.into_iter().filter(|&id| id != NONE) {
            *counts.pins.entry(id).or_default() += 1;
            for above in self.engine.residency.window_above(id) {
                *counts.holds.entry(above).or_default() += 1;
            }
        }
        Ok(counts)
    }

    /// Payloads in the arena, as their offsets and bytes, that the engine would find to have changed: their
    /// checksums are known, and no hit that was verified relies on them.
    pub fn guarded_payloads(&self) -> Vec<(u64, u32)> {
        let forest = self.engine.residency.forest();
        let mut relied_on = HashSet::new();
        if self.engine.config.verify_host {
            let of_requests = self.engine.shares.values().map(|share| share.lease);
            let loads = self
                .engine
                .sessions
                .transfers()
                .filter_map(|(_, transfer)| {
                    let TransferKind::Load { lease, .. } = &transfer.kind else {
                        return None;
                    };
                    Some(*lease)
                });
            let leases = of_requests.chain(loads).filter(|&lease| lease != NONE);
            relied_on
                .extend(leases.flat_map(|lease| self.engine.residency.needed_payloads(lease, 0)));
        }
        let mut found = Vec::new();
        for id in forest.ids().filter(|&id| !forest.node(id).is_detached()) {
            for (group, payload) in (0u8..).zip(forest.node(id).payloads()) {
                let is_guarded = payload.host == HostState::Present
                    && !relied_on.contains(&(id, group))
                    && self.engine.residency.host_checksum(id, group).is_some();
                if is_guarded {
                    let bytes = self.engine.residency.payload_bytes(id, group);
                    found.push((slot_offset(payload.host_slot), bytes));
                }
            }
        }
        found
    }

    fn check_write_queue(&self) -> Result<(), String> {
        let forest = self.engine.residency.forest();
        let is_queued =
            |id: NodeId, group: u8| forest.node(id).payload(group).disk == DiskState::Queued;
        let mut entries: HashMap<(NodeId, u8), u32> = HashMap::new();
        for (node, epoch, group) in self.engine.writeback.queued() {
            if forest.is_live(node, epoch) && is_queued(node, group) {
                *entries.entry((node, group)).or_default() += 1;
            }
        }
        for id in forest.ids() {
            for group in forest.node(id).groups() {
                let expected = u32::from(is_queued(id, group));
                let found = entries.get(&(id, group)).copied().unwrap_or(0);
                ensure!(
                    found == expected,
                    "node {id} group {group}: {found} times in the write queue"
                );
            }
        }
        Ok(())
    }

    /// Returns the payloads being read.
    fn check_operations(&self) -> Result<HashSet<(NodeId, u8)>, String> {
        let engine = self.engine;
        let mut counts = vec![(0, 0); engine.residency.disks().len()];
        let (mut reading, mut writing) = (HashSet::new(), HashSet::new());
        for &(device, operation) in engine.operations.iter() {
            // A checksum belongs to no device and is not counted.
            let (reads, writes) = match device {
                Some(device) => &mut counts[device.index()],
                None => &mut (0, 0),
            };
            match operation {
                Purpose::Read { node, group, .. } => {
                    *reads += 1;
                    let state = engine.residency.node(node).payload(group).host;
                    ensure!(
                        state == HostState::Reading,
                        "node {node}: read while {state:?}"
                    );
                    ensure!(
                        reading.insert((node, group)),
                        "node {node} group {group}: read twice at once"
                    );
                }
                Purpose::Write { node, group, .. } => {
                    *writes += 1;
                    let state = engine.residency.node(node).payload(group).disk;
                    ensure!(
                        state == DiskState::Writing,
                        "node {node}: written while {state:?}"
                    );
                    ensure!(
                        writing.insert((node, group)),
                        "node {node} group {group}: written twice at once"
                    );
                }
                Purpose::Erase { node, group } => {
                    *writes += 1;
                    let state = engine.residency.node(node).payload(group).disk;
                    ensure!(
                        state == DiskState::Present && engine.residency.node(node).is_detached(),
                        "node {node}: erased while {state:?}"
                    );
                }
                Purpose::Checksum { node, group } => {
                    let state = engine.residency.node(node).payload(group).host;
                    ensure!(
                        state == HostState::Present && engine.checksums.is_in_flight(node, group),
                        "node {node}: summed while {state:?}"
                    );
                    reading.insert((node, group));
                }
                Purpose::Table { .. }
                | Purpose::Namespace { .. }
                | Purpose::Release { .. }
                | Purpose::Sync { .. } => {
                    *writes += 1;
                }
            }
        }
        let of = &engine.operations;
        for (device, expected) in engine.residency.devices().zip(counts) {
            let counted = (of.reads(device), of.writes(device));
            ensure!(
                counted == expected,
                "{device:?}: reads and writes in flight {counted:?}, operations {expected:?}"
            );
        }
        Ok(reading)
    }
}
