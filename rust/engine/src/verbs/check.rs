//! The checks of all invariants of the engine, which the simulator runs after every few steps.

use std::collections::{HashMap, HashSet};

use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::session::BlockEvent;

use crate::forest::{DiskState, HostState, NONE, NodeId};
use crate::slots::slot_offset;

use super::super::ensure::ensure;
use super::super::ids::SessionId;
use super::super::operations::Purpose;
use super::super::residency::LeaseCounts;
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

impl Engine {
    /// Whether every invariant of the engine's state holds.
    ///
    /// # Errors
    /// Names the first invariant that does not hold, and where.
    pub fn check(&self) -> Result<(), String> {
        // A directory that may have been given up held the only copy on disk of some nodes.
        let given_up = u64::from(self.config.read_failures_max);
        let has_failed =
            self.counters.write_failures > 0 || self.counters.read_failures >= given_up;
        self.residency.check(&self.count_leases()?, has_failed)?;
        self.check_write_queue()?;
        let reading = self.check_operations()?;
        self.promotions.check(&self.shares, &reading)?;
        self.pins.check(&self.residency)?;
        if let Some(remote) = &self.remote {
            remote.check(&self.shares, &self.residency, &self.namespaces)?;
        }
        let shares = self.shares.values().flat_map(|of| {
            let priority = of.priority();
            let shares = of.waits.disk.iter().flat_map(|of| &of.shares);
            shares.map(move |share| (priority, share))
        });
        let reads = self.operations.iter().filter_map(|&(device, of)| match of {
            Purpose::Read { node, group, .. } => {
                Some((device?, self.residency.slot_bytes(node, group)))
            }
            _ => None,
        });
        self.planner.rates.check(shares, reads)?;
        let of_sessions: usize = self
            .sessions
            .values()
            .map(|session| session.requests.len())
            .sum();
        let requests = self.sessions.requests.len();
        ensure!(
            of_sessions == requests,
            "{requests} requests, sessions know {of_sessions}"
        );
        let shares = self.shares.len();
        ensure!(requests == shares, "{requests} requests, {shares} shares");
        Ok(())
    }

    /// The payloads in the tiers, as known to a session that has taken all events ([`Engine::take_events`]).
    pub fn announced(&self, session: SessionId) -> Vec<BlockEvent> {
        let state = self.sessions.get(session);
        state.map_or_else(Vec::new, |state| self.residency.announced(state.ns))
    }

    /// The payloads of shared namespaces in the tiers.
    pub fn held(&self) -> Vec<Held> {
        let all = self.residency.held().into_iter();
        let shared = all.filter(|(ns, ..)| !self.namespaces.is_private(*ns));
        let held = shared.map(|(ns, hash, group, place)| Held {
            payload: (*self.namespaces.digest(ns), hash, group),
            place,
        });
        held.collect()
    }

    /// The blocks that the remote store is known to have, as known to a session that has taken all events.
    pub fn announced_remote(&self, session: SessionId) -> Vec<BlockEvent> {
        let state = self.sessions.get(session);
        let remote = self.remote.as_deref();
        let known = state.zip(remote);
        known.map_or_else(Vec::new, |(state, remote)| {
            remote.known_blocks(state.ns, &self.namespaces)
        })
    }

    /// Whether a request waits for objects of the remote store.
    pub fn awaits_objects(&self, session: SessionId, request: &str) -> bool {
        let id = self.sessions.request_id(session, request);
        id.is_some_and(|id| self.shares[id].waits.remote.is_some())
    }

    /// Number of payloads that a restart would find: their whole chain is on disk.
    pub fn durable_blocks(&self) -> u64 {
        self.residency.durable_blocks()
    }

    /// Leases of each node, and leases of nodes below that need the node's payloads.
    fn count_leases(&self) -> Result<LeaseCounts, String> {
        let mut counts = LeaseCounts::default();
        let mut hits = Vec::new();
        for share in self.shares.values() {
            hits.push(share.lease);
            let promotion = share.waits.disk.as_ref();
            let reached = promotion.map_or(NONE, |promotion| promotion.reached());
            if reached != NONE {
                *counts.pins.entry(reached).or_default() += 1;
            }
        }
        for (node, _) in self.residency.erasures.iter() {
            *counts.pins.entry(node).or_default() += 1;
        }
        for node in self.remote.iter().flat_map(|remote| remote.leases()) {
            *counts.pins.entry(node).or_default() += 1;
        }
        for (node, _) in self.checksums.in_flight() {
            *counts.pins.entry(node).or_default() += 1;
        }
        for (_, transfer) in self.sessions.transfers() {
            ensure!(
                self.sessions.get(transfer.session).is_some(),
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
        hits.extend(self.pins.nodes());
        for id in hits.into_iter().filter(|&id| id != NONE) {
            *counts.pins.entry(id).or_default() += 1;
            for above in self.residency.window_above(id) {
                *counts.holds.entry(above).or_default() += 1;
            }
        }
        Ok(counts)
    }

    /// Payloads in the arena, as their offsets and bytes, that the engine would find to have changed: their
    /// checksums are known, and no hit that was verified relies on them.
    pub fn guarded_payloads(&self) -> Vec<(u64, u32)> {
        let forest = self.residency.forest();
        let mut relied_on = HashSet::new();
        if self.config.verify_host {
            let of_requests = self.shares.values().map(|share| share.lease);
            let loads = self.sessions.transfers().filter_map(|(_, transfer)| {
                let TransferKind::Load { lease, .. } = &transfer.kind else {
                    return None;
                };
                Some(*lease)
            });
            let leases = of_requests.chain(loads).filter(|&lease| lease != NONE);
            relied_on.extend(leases.flat_map(|lease| self.residency.needed_payloads(lease, 0)));
        }
        let mut found = Vec::new();
        for id in forest.ids().filter(|&id| !forest.node(id).is_detached()) {
            for (group, payload) in (0u8..).zip(forest.node(id).payloads()) {
                let is_guarded = payload.host == HostState::Present
                    && !relied_on.contains(&(id, group))
                    && self.residency.host_checksum(id, group).is_some();
                if is_guarded {
                    let bytes = self.residency.payload_bytes(id, group);
                    found.push((slot_offset(payload.host_slot), bytes));
                }
            }
        }
        found
    }

    fn check_write_queue(&self) -> Result<(), String> {
        let forest = self.residency.forest();
        let is_queued =
            |id: NodeId, group: u8| forest.node(id).payload(group).disk == DiskState::Queued;
        let mut entries: HashMap<(NodeId, u8), u32> = HashMap::new();
        for (node, epoch, group) in self.writeback.queued() {
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
        let mut counts = vec![(0, 0); self.residency.disks().len()];
        let (mut reading, mut writing) = (HashSet::new(), HashSet::new());
        for &(device, operation) in self.operations.iter() {
            // A checksum belongs to no device and is not counted.
            let (reads, writes) = match device {
                Some(device) => &mut counts[device.index()],
                None => &mut (0, 0),
            };
            match operation {
                Purpose::Read { node, group, .. } => {
                    *reads += 1;
                    let state = self.residency.node(node).payload(group).host;
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
                    let state = self.residency.node(node).payload(group).disk;
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
                    let state = self.residency.node(node).payload(group).disk;
                    ensure!(
                        state == DiskState::Present && self.residency.node(node).is_detached(),
                        "node {node}: erased while {state:?}"
                    );
                }
                Purpose::Checksum { node, group } => {
                    let state = self.residency.node(node).payload(group).host;
                    ensure!(
                        state == HostState::Present && self.checksums.is_in_flight(node, group),
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
        for (device, expected) in self.residency.devices().zip(counts) {
            let counted = (
                self.operations.reads(device),
                self.operations.writes(device),
            );
            ensure!(
                counted == expected,
                "{device:?}: reads and writes in flight {counted:?}, operations {expected:?}"
            );
        }
        Ok(reading)
    }
}
