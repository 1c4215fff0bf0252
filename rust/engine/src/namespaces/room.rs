//! Room for a namespace: an index of the engine's, and an entry in the table of each directory.

use undercroft_contract::error::RegisterError;
use undercroft_contract::format::{ENTRY_BYTES, NamespaceEntry};
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::namespace::NamespaceSpec;

use crate::forest::{DeviceIndex, NsId};

use super::{NamespaceState, Namespaces, is_kept};
use crate::residency::Residency;

impl Namespaces {
    /// Forgets namespaces until there are at most `shared_most` and each table has room for the entry of a new
    /// namespace, or of `opened`, or until all the others are in use.
    pub(super) fn make_room(
        &mut self,
        opened: Option<NsId>,
        shared_most: usize,
        residency: &mut Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) {
        // Sessions are about to use it.
        let is_unused = |ns| Some(ns) != opened && is_unused(ns);
        for device in residency.devices() {
            self.forget_strangers(opened, device, residency, is_unused);
        }
        while let Some(ns) = self.next_to_go(opened, shared_most, residency, is_unused) {
            self.vacate(ns, residency);
        }
    }

    /// The namespace to forget if room is short: one without a session. Namespaces without blocks come first, then
    /// the least recently used one.
    fn next_to_go(
        &self,
        opened: Option<NsId>,
        shared_most: usize,
        residency: &Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) -> Option<NsId> {
        let is_index_full = self.shared_count() > shared_most;
        let disks = residency.disks().iter();
        let full: Vec<&[u64]> = disks
            .map(|disk| disk.namespace_entries.as_slice())
            .filter(|entries| self.is_full(opened, entries, residency, &is_unused))
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

    /// Whether a table has no entry for a new namespace, or for `opened`: its free entries are for other namespaces that
    /// were reset and are in use, which get theirs when the clearing writes have ended.
    fn is_full(
        &self,
        opened: Option<NsId>,
        entries: &[u64],
        residency: &Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) -> bool {
        let cleared = entries.iter().filter(|&&found| found == 0).count();
        let free = cleared + self.entries_max.saturating_sub(entries.len());
        // The usual case costs no look at the namespaces.
        if free == 0 || self.clearing().next().is_none() {
            return free == 0;
        }
        let waits = |&(ns, state): &(NsId, &NamespaceState)| {
            let lacks_entry = state.volatile && !state.private && Some(ns) != opened;
            lacks_entry
                && !entries.contains(&state.instance)
                && (!is_unused(ns) || residency.forest().has_nodes(ns))
        };
        (0..).zip(&self.table).filter(waits).count() >= free
    }

    /// Frees a full table's entries that lead nowhere: their namespace does not fit the arena, so its
    /// records were dropped.
    fn forget_strangers(
        &mut self,
        opened: Option<NsId>,
        device: DeviceIndex,
        residency: &mut Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) {
        let entries = &residency.disks()[device.index()].namespace_entries;
        if !self.is_full(opened, entries, residency, is_unused) {
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
    pub(crate) fn volatile(&self, residency: &Residency, is_used: impl Fn(NsId) -> bool) -> usize {
        let waits = self.reset_pending();
        let has_blocks = |ns| residency.forest().has_nodes(ns);
        let known = (0..).zip(&self.table);
        let volatile = known.filter(|&(ns, state)| {
            let is_safe = is_kept(state, residency) || waits && state.volatile;
            !state.private && !is_safe && (is_used(ns) || has_blocks(ns))
        });
        volatile.count()
    }

    /// Notes a namespace that a directory has, and that does not fit the arena: its blocks stay there, unused.
    pub(crate) fn note_stranger(&mut self, instance: u64, digest: NamespaceDigest) {
        self.strangers.insert(instance, digest);
    }

    /// Whether a directory has blocks that this engine cannot use.
    pub(crate) fn has_strangers(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// Clears the entries of the namespaces that do not fit the arena and whose digest begins with `digits`. Returns
    /// whether there are any.
    pub(crate) fn clear_strangers(&mut self, digits: &str, residency: &mut Residency) -> bool {
        let named = |_: &u64, digest: &mut NamespaceDigest| digest.to_hex().starts_with(digits);
        let named: Vec<u64> = self.strangers.extract_if(named).map(|(of, _)| of).collect();
        for device in residency.devices() {
            let entries = residency.disk_mut(device).namespace_entries.clone();
            for (index, _) in (0..).zip(entries).filter(|(_, of)| named.contains(of)) {
                self.clear_entry(device, index, residency);
            }
        }
        !named.is_empty()
    }

    /// The namespaces that may have blocks, shared or of a session, and whose digest begins with `digits`.
    pub(crate) fn named(&self, digits: &str, is_used: impl Fn(NsId) -> bool) -> Vec<NsId> {
        let known = (0..).zip(&self.table);
        let named = known.filter(|(ns, state)| {
            (!state.private || is_used(*ns)) && state.digest.to_hex().starts_with(digits)
        });
        named.map(|(ns, _)| ns).collect()
    }

    /// Forgets a namespace and its blocks: from now on no lookup finds them. Its index becomes free when all blocks are
    /// removed and unused. The removal takes many entries of the engine.
    pub(crate) fn vacate(&mut self, ns: NsId, residency: &mut Residency) {
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

/// Whether the description fits an entry of a namespace table.
///
/// # Errors
/// If it does not.
pub(super) fn fit_entry(spec: &NamespaceSpec) -> Result<(), RegisterError> {
    let entry = NamespaceEntry {
        instance: u64::MAX,
        spec: spec.clone(),
    };
    match entry.encode() {
        Some(_) => Ok(()),
        None => Err(RegisterError::DescriptionTooLong {
            bytes: spec.description.len(),
            entry_bytes: ENTRY_BYTES,
        }),
    }
}
