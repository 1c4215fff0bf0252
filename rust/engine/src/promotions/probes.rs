//! Probes: reads for which no request waits, which measure how fast a device is now.

use undercroft_contract::io::IoRequest;
use undercroft_contract::session::Priority;

use crate::forest::{DeviceIndex, DiskState, HostState, NodeId};
use crate::work;

use super::super::parts::EngineParts;
use super::super::residency::Residency;
use super::Promotions;
use super::reads::read_request;

/// Payloads that are read of each device: enough for its latency and its rate.
const PROBES: usize = 4;

/// A payload to be read, with the epoch of its node.
pub(super) type Probe = (NodeId, u32, u8);

impl Promotions {
    /// Plans probes of the first payloads on disk that a load up to `target` needs beyond `local` hash blocks.
    pub(crate) fn probe(&mut self, target: NodeId, local: u32, residency: &Residency) {
        let mut left = vec![PROBES; residency.disks().len()];
        for (node, group) in residency.needed_payloads(target, local) {
            let state = residency.node(node);
            let payload = state.payload(group);
            if payload.host == HostState::Empty
                && payload.disk == DiskState::Present
                && left[state.device.index()] > 0
            {
                left[state.device.index()] -= 1;
                self.probes.push((node, state.epoch, group));
            }
        }
    }

    /// Appends the probes that can start now, and forgets the other probes: the next prompt has new probes.
    pub(crate) fn next_probes(&mut self, parts: &mut EngineParts<'_>, out: &mut Vec<IoRequest>) {
        for (node, epoch, group) in std::mem::take(&mut self.probes) {
            work::queued();
            if !parts.residency.forest().is_live(node, epoch) {
                continue;
            }
            let state = parts.residency.node(node);
            let (payload, device): (_, DeviceIndex) = (state.payload(group), state.device);
            let starts = payload.host == HostState::Empty
                && payload.disk == DiskState::Present
                && !state.is_detached()
                && !parts.residency.is_being_given_up(device)
                && parts.operations.may_read(device)
                && parts
                    .residency
                    .reserve_host(node, group, HostState::Reading, parts.counters);
            if starts {
                let slot = parts.residency.slot_bytes(node, group);
                parts
                    .rates
                    .read_began(device, slot, &mut [], Priority::Prefetch);
                out.push(read_request(node, group, parts));
            }
        }
    }
}
