//! Placeholder records: records of nodes that have no required payload, above a payload on disk. Without these records
//! a restart could not find the payload.

use std::collections::VecDeque;

use crate::forest::{DeviceIndex, NONE, NodeId};
use crate::work;

use super::state::Residency;

/// Chains of which some nodes wait for their records.
#[derive(Debug, Default)]
pub(super) struct Placeholders {
    /// The deepest node that waits of each chain, with its epoch, and the directory.
    later: VecDeque<(NodeId, u32, DeviceIndex)>,
}

impl Residency {
    /// Gives placeholder records to the ancestors that may be without payloads, up to the first that has payloads or a
    /// record: the nodes above it have their records, or get them later.
    pub(in crate::engine) fn add_placeholders(&mut self, id: NodeId, device: DeviceIndex) {
        let above = self.node(id).parent();
        self.add_placeholders_from(above, device, self.chain_steps);
    }

    /// Whether nodes wait for their records.
    pub(in crate::engine) fn has_placeholders(&self) -> bool {
        !self.placeholders.later.is_empty()
    }

    /// Gives records to about `steps` of the nodes that wait for them.
    pub(in crate::engine) fn continue_placeholders(&mut self, steps: usize) {
        let mut left = steps;
        while left > 0
            && let Some((id, epoch, device)) = self.placeholders.later.pop_front()
        {
            let is_alive = self.disk_mut(device).health.is_alive();
            let is_here = self.forest.is_live(id, epoch) && !self.node(id).is_detached();
            left -= 1;
            if is_alive && is_here {
                left = self.add_placeholders_from(id, device, left.max(1));
            }
        }
    }

    /// Gives records to at most `steps` nodes of a chain, from `at` upwards. Returns the number of steps that are left.
    fn add_placeholders_from(
        &mut self,
        mut at: NodeId,
        device: DeviceIndex,
        steps: usize,
    ) -> usize {
        for taken in 0..steps {
            let is_wanted = at != NONE && self.node(at).required() == 0;
            if !is_wanted || !self.disk_mut(device).add_placeholder(at) {
                return steps - taken;
            }
            work::node();
            at = self.node(at).parent();
        }
        if at != NONE && self.node(at).required() == 0 {
            let epoch = self.node(at).epoch;
            self.placeholders.later.push_back((at, epoch, device));
        }
        0
    }
}
