//! The part's invariants, for the simulator.

use std::collections::{HashMap, HashSet};

use undercroft_contract::session::BlockEvent;

use crate::forest::{HostState, NONE, NodeId, NsId};

use super::super::ensure::ensure;
use super::super::fetch::Shares;
use super::super::namespaces::Namespaces;
use super::super::residency::Residency;
use super::{FlightId, ObjectGet, Operation, Remote};

impl Remote {
    /// The nodes that flights and puts lease.
    pub(crate) fn leases(&self) -> impl Iterator<Item = NodeId> {
        let of_flight = |flight: &super::Flight| {
            let kept = flight.held.kept.iter().copied();
            kept.chain([flight.held.lease]).collect::<Vec<_>>()
        };
        let flights = self.flights.values().flat_map(of_flight);
        let puts = self.operations.values().flat_map(|of| match &of.operation {
            Operation::Put(put) => put.nodes.clone(),
            _ => Vec::new(),
        });
        flights.chain(puts).filter(|&node| node != NONE)
    }

    /// The blocks of a namespace that the store is known to have.
    pub(crate) fn known_blocks(&self, ns: NsId, namespaces: &Namespaces) -> Vec<BlockEvent> {
        self.told.all(ns, namespaces)
    }

    /// Whether the part's invariants hold.
    ///
    /// # Errors
    /// Names the first invariant that does not hold.
    pub(crate) fn check(
        &self,
        shares: &Shares,
        residency: &Residency,
        namespaces: &Namespaces,
    ) -> Result<(), String> {
        let gets = self.check_operations(residency)?;
        let held: u64 = self.flights.values().map(|flight| flight.held.bytes).sum();
        ensure!(
            held == self.held,
            "flights hold {held}, counted {}",
            self.held
        );
        for (id, flight) in &self.flights {
            let in_flight = gets.get(&id).copied().unwrap_or(0);
            ensure!(
                flight.objects.gets == in_flight,
                "{id:?} counts {} gets of {in_flight}",
                flight.objects.gets
            );
            ensure!(!flight.is_unused(), "{id:?} without a request");
            ensure!(
                flight.fate.is_over != self.order.contains(&id),
                "{id:?} has ended and goes on"
            );
            ensure!(
                flight.fate.is_over
                    || flight.chain.instance == namespaces.instance(flight.chain.ns),
                "{id:?} goes on although the life of its namespace has ended"
            );
            for waiter in &flight.waiters {
                let share = shares.get(*waiter);
                let knows = share.is_some_and(|share| share.waits.remote == Some(id));
                ensure!(knows, "a waiter of {id:?} does not know the flight");
            }
        }
        for (id, share) in shares {
            let Some(flight) = share.waits.remote else {
                continue;
            };
            let of = self.flights.get(flight);
            ensure!(
                of.is_some_and(|of| of.waiters.contains(&id)),
                "a request waits for {flight:?}, which does not know it"
            );
        }
        ensure!(
            self.by_segment.values().all(|&id| self.order.contains(&id)),
            "a segment is announced by a flight that has ended"
        );
        Ok(())
    }

    /// The gets in flight of each flight.
    fn check_operations(&self, residency: &Residency) -> Result<HashMap<FlightId, u32>, String> {
        let (mut filling, mut bytes) = (HashSet::new(), [0, 0]);
        let mut gets = HashMap::<_, u32>::new();
        for of in self.operations.values() {
            match &of.operation {
                Operation::Probe { .. } => {}
                Operation::Put(put) => bytes[1] += put.bytes,
                Operation::Get(ObjectGet {
                    takers,
                    payloads,
                    bytes: of,
                    ..
                }) => {
                    bytes[0] += of;
                    for (flight, _) in takers {
                        *gets.entry(*flight).or_default() += 1;
                    }
                    for &(node, group) in payloads {
                        let state = residency.node(node).payload(group).host;
                        ensure!(
                            state == HostState::Filling && filling.insert((node, group)),
                            "node {node} group {group}: fetched while {state:?}, or twice"
                        );
                    }
                }
            }
        }
        let mut fetching = self.fetching.values();
        ensure!(
            fetching.all(|&get| self.operations.contains_key(get)),
            "an object counts as being fetched whose get has ended"
        );
        let windows = [self.get_window.in_flight(), self.put_window.in_flight()];
        ensure!(
            windows == bytes,
            "windows {windows:?}, operations {bytes:?}"
        );
        Ok(gets)
    }
}
