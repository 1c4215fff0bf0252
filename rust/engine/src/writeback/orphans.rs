//! Orphans' parents: nodes that could not be written although children of them are on disk.

use std::collections::VecDeque;

use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::NodeId;

use super::super::residency::Residency;

/// Nodes that are not on disk while children of them are. Such a node cannot leave the arena before it has
/// been written, and a restart finds its children only after the write.
#[derive(Debug, Default)]
pub(super) struct Orphaned {
    /// The nodes, with their epochs.
    pub(super) nodes: VecDeque<(NodeId, u32)>,
    /// Slots of both tiers that had been freed when an orphan last found no room.
    full_since: Option<u64>,
}

fn freed(residency: &Residency) -> u64 {
    residency.freed(Tier::Host) + residency.freed(Tier::Disk)
}

impl Orphaned {
    /// Remembers a node whose children have become orphans, if it has any.
    pub(super) fn note(&mut self, id: NodeId, residency: &Residency) {
        let node = residency.node(id);
        if node.active_children(Tier::Disk) > 0 && !node.is_detached() {
            self.nodes.push_back((id, node.epoch));
        }
    }

    /// Notes that a node found no room: all nodes wait until a slot is freed.
    pub(super) fn found_no_room(&mut self, residency: &Residency) {
        self.full_since = Some(freed(residency));
    }

    pub(super) fn waits_for_room(&self, residency: &Residency) -> bool {
        self.full_since == Some(freed(residency))
    }

    /// Whether an orphans' parent may be written, now or after a pause.
    pub(super) fn any(&self, residency: &Residency) -> bool {
        let is_alive = |disk: &Disk| disk.health.is_alive();
        !self.nodes.is_empty()
            && !self.waits_for_room(residency)
            && residency.disks().iter().any(is_alive)
    }
}
