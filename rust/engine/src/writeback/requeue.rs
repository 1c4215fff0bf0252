//! Nodes with orphans are queued again.

use super::super::parts::EngineParts;
use super::queue::{WriteBack, fits_queue};
use crate::forest::NONE;
use crate::work;

/// Nodes that one entry queues again.
const NODES_MAX: usize = 64;

impl WriteBack {
    /// Queues one node with orphans again, and the ancestors that it needs on disk. Of a long chain, the upper part
    /// comes first, and the rest when the write queue is empty again. Returns whether the next entry continues the
    /// search for the upper part.
    pub(super) fn requeue_orphan(&mut self, parts: &mut EngineParts<'_>) -> bool {
        let residency = &mut *parts.residency;
        if self.orphaned.waits_for_room(residency)
            || !self.is_idle()
            || !residency.any_disk_takes_writes(parts.now_ns)
        {
            return false;
        }
        let Some((id, epoch)) = self.orphaned.nodes.pop_front() else {
            return false;
        };
        // A payload that no lookup reaches is offered again when lookups reach it.
        if !residency.forest().is_live(id, epoch) || !residency.node(id).is_visible() {
            return false;
        }
        let mut chain = Vec::new();
        let mut at = id;
        while at != NONE && residency.writable_group(at).is_some() {
            work::node();
            if residency.node(at).is_detached() {
                // The ancestor is being removed, and `id` with it.
                return false;
            }
            if chain.len() == NODES_MAX {
                let above = (at, residency.node(at).epoch);
                self.orphaned.nodes.push_front((id, epoch));
                self.orphaned.nodes.push_front(above);
                return true;
            }
            chain.push(at);
            at = residency.required_ancestor(at);
        }
        for at in chain.into_iter().rev() {
            while let Some(group) = residency.writable_group(at) {
                // Where nothing is queued, a payload that does not fit now never fits.
                if !fits_queue(at, group, residency) {
                    if !self.is_idle() {
                        self.orphaned.nodes.push_front((id, epoch));
                    }
                    return false;
                }
                work::queued();
                self.enqueue_admitted(at, group, residency);
                residency.refresh(at);
            }
        }
        false
    }
}
