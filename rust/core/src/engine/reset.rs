//! Reset: everything of a namespace is dropped, durably.

use crate::forest::NONE;

use super::{Engine, SessionId};

impl Engine {
    /// Drops everything of a session's namespace. It cannot be found any more when this returns; it
    /// cannot be found after a restart either once [`Engine::reset_pending`] is false.
    ///
    /// A reset usually follows a change of the weights, which the description of the namespace may
    /// not show. So what is saved from now on is found by this process only.
    pub fn reset(&mut self, session: SessionId) {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return;
        };
        let mut roots = Vec::new();
        let mut root = self.forest.first_root(ns);
        while root != NONE {
            roots.push(root);
            root = self.forest.next_sibling(root);
        }
        for root in roots {
            if !self.forest.node(root).detached {
                self.detach(root);
            }
        }
        let old = self.namespaces[usize::from(ns)].instance;
        self.namespaces[usize::from(ns)].instance = self.next_random();
        self.namespaces[usize::from(ns)].volatile = true;
        self.namespace_sync_failed = false;
        for (device, disk) in self.disks.iter_mut().enumerate() {
            for (index, entry) in disk.namespace_entries.iter_mut().enumerate() {
                if *entry == old {
                    *entry = 0;
                    let blank = vec![0; crate::disk::format::BLOCK_BYTES].into();
                    self.namespace_writes
                        .push_back((device, index, blank, true));
                    self.namespace_syncs += 1;
                }
            }
        }
    }

    /// Whether resets are not durable yet.
    pub fn reset_pending(&self) -> bool {
        self.namespace_syncs > 0
    }

    /// Whether a write of the namespace table has failed since the last reset.
    pub fn reset_failed(&self) -> bool {
        self.namespace_sync_failed
    }
}
