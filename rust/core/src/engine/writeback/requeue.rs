//! Nodes with orphans are queued again.

use super::super::parts::EngineParts;
use super::queue::WriteBack;
use crate::forest::NONE;

impl WriteBack {
    /// Queues one node with orphans again, and the ancestors that it needs on disk.
    pub(super) fn requeue_orphan(&mut self, parts: &mut EngineParts<'_>) {
        let residency = &mut *parts.residency;
        if self.orphaned.waits_for_room(residency)
            || !self.is_idle()
            || !residency.any_disk_takes_writes(parts.now_ns)
        {
            return;
        }
        let Some((id, epoch)) = self.orphaned.nodes.pop_front() else {
            return;
        };
        // A payload that no lookup reaches is offered again when lookups reach it.
        if !residency.forest().is_live(id, epoch) || !residency.node(id).is_visible() {
            return;
        }
        let mut chain = Vec::new();
        let mut at = id;
        while at != NONE && residency.writable_group(at).is_some() {
            if residency.node(at).is_detached() {
                // The ancestor is being removed, and `id` with it.
                return;
            }
            chain.push(at);
            at = residency.required_ancestor(at);
        }
        for id in chain.into_iter().rev() {
            while let Some(group) = residency.writable_group(id) {
                self.enqueue_admitted(id, group, residency);
            }
            residency.refresh(id);
        }
    }
}
