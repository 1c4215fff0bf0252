//! Room for a namespace: an index of the engine's, and an entry in the table of each directory.

use crate::forest::{DeviceIndex, NsId};

use super::{NamespaceState, Namespaces, is_kept};
use crate::engine::residency::Residency;

impl Namespaces {
    /// Forgets namespaces until there are at most `shared_most` and each table has room for an entry, or until all the
    /// others are in use.
    pub(super) fn make_room(
        &mut self,
        shared_most: usize,
        residency: &mut Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) {
        for device in residency.devices() {
            self.forget_strangers(device, residency);
        }
        while let Some(ns) = self.next_to_go(shared_most, residency, &is_unused) {
            self.vacate(ns, residency);
        }
    }

    /// The namespace to forget if room is short: one without a session. Namespaces without blocks come first, then
    /// the least recently used one.
    fn next_to_go(
        &self,
        shared_most: usize,
        residency: &Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) -> Option<NsId> {
        let is_index_full = self.shared_count() > shared_most;
        let disks = residency.disks().iter();
        let full: Vec<&[u64]> = disks
            .map(|disk| disk.namespace_entries.as_slice())
            .filter(|entries| self.is_full(entries))
            .collect();
        let makes_room = |state: &NamespaceState| {
            is_index_full || full.iter().any(|entries| entries.contains(&state.instance))
        };
        let known = (0..).zip(&self.table);
        let candidates =
            known.filter(|(ns, state)| !state.private && makes_room(state) && is_unused(*ns));
        let oldest = candidates.min_by_key(|&(ns, state)| {
            let has_blocks = residency.forest().has_nodes(ns);
            (has_blocks, state.last_use)
        });
        oldest.map(|(ns, _)| ns)
    }

    fn is_full(&self, entries: &[u64]) -> bool {
        entries.len() >= self.entries_max && !entries.contains(&0)
    }

    /// Frees a full table's entries that lead nowhere: their namespace does not fit the arena, so its
    /// records were dropped.
    fn forget_strangers(&mut self, device: DeviceIndex, residency: &mut Residency) {
        let entries = &residency.disk_mut(device).namespace_entries;
        if !self.is_full(entries) {
            return;
        }
        let strangers: Vec<usize> = (0..)
            .zip(entries)
            .filter(|&(_, &instance)| self.of_instance(instance).is_none())
            .map(|(index, _)| index)
            .collect();
        for index in strangers {
            self.clear_entry(device, index, residency);
        }
    }

    /// Number of shared namespaces whose blocks a restart does not find: a table lacks their entry, and no reset that is
    /// under way makes room for it. A namespace without blocks and sessions loses nothing.
    pub(in crate::engine) fn volatile(
        &self,
        residency: &Residency,
        is_used: impl Fn(NsId) -> bool,
    ) -> usize {
        let waits = self.reset_pending();
        let has_blocks = |ns| residency.forest().has_nodes(ns);
        let known = (0..).zip(&self.table);
        let volatile = known.filter(|&(ns, state)| {
            let is_safe = is_kept(state, residency) || waits && state.volatile;
            !state.private && !is_safe && (is_used(ns) || has_blocks(ns))
        });
        volatile.count()
    }

    /// The namespaces that may have blocks, shared or of a session, and whose digest begins with `digits`.
    pub(in crate::engine) fn named(
        &self,
        digits: &str,
        is_used: impl Fn(NsId) -> bool,
    ) -> Vec<NsId> {
        let known = (0..).zip(&self.table);
        let named = known.filter(|(ns, state)| {
            (!state.private || is_used(*ns)) && state.digest.to_hex().starts_with(digits)
        });
        named.map(|(ns, _)| ns).collect()
    }

    /// Forgets a namespace and its blocks: from now on no lookup finds them. Its index becomes free when all blocks are
    /// removed and unused. The removal takes many entries of the engine.
    pub(in crate::engine) fn vacate(&mut self, ns: NsId, residency: &mut Residency) {
        residency.remove_namespace(ns);
        let old = self.instance(ns);
        for device in residency.devices() {
            for index in 0..residency.disk_mut(device).namespace_entries.len() {
                if residency.disk_mut(device).namespace_entries[index] == old {
                    // The entry is cleared durably: a reset of the namespace's next life must not let this life return.
                    self.clear_entry(device, index, residency);
                }
            }
        }
        let instance = self.new_instance();
        let state = self.state_mut(ns);
        state.instance = instance;
        // The namespace is now like a private one whose session has ended.
        state.private = true;
        state.volatile = true;
    }
}
