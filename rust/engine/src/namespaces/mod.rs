//! The namespaces, and the namespace table of each directory.

use std::collections::{HashMap, HashSet, VecDeque};

use undercroft_contract::error::RegisterError;
use undercroft_contract::format::{
    BLOCK_BYTES, NamespaceEntry, NamespaceUse, namespace_offset, use_offset,
};
use undercroft_contract::io::{FileKind, IoFault, IoRequest};
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::namespace::NamespaceSpec;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, NsId};

use super::config::EngineConfig;
use super::operations::{Operations, Purpose};
use super::residency::Residency;

mod room;

use room::fit_entry;

/// A registered namespace.
#[derive(Debug)]
struct NamespaceState {
    digest: NamespaceDigest,
    /// The instance in the namespace's records on disk. A reset begins a new instance.
    instance: u64,
    /// The namespace belongs to one session, whose weights may differ from the described weights.
    private: bool,
    /// The namespace is not in the namespace table: no restart finds its records.
    volatile: bool,
    /// Tick of the last known use: a session was opened or closed, or a record on disk has this tick.
    last_use: u64,
}

/// A write of an entry of the namespace table, or of when its namespace was used.
#[derive(Clone, Debug)]
struct EntryWrite {
    device: DeviceIndex,
    index: usize,
    file_offset: u64,
    bytes: Box<[u8]>,
    /// The write clears the entry, durably.
    clears: bool,
    /// The write has failed before: it is tried again when the directory takes writes.
    failed: bool,
}

impl EntryWrite {
    fn is_same_entry(&self, other: &Self) -> bool {
        (self.device, self.index) == (other.device, other.index)
    }
}

/// The namespaces of the engine, and writes of their entries.
///
/// Invariants:
/// - no two lives get the same instance, and no new life gets an instance that a directory knows;
/// - each entry has one write at a time, in the order of its changes: an entry's old contents are never written after
///   the entry was cleared;
/// - a shared namespace that was reset is entered again only when every clearing write has succeeded.
#[derive(Debug)]
pub(super) struct Namespaces {
    /// By [`NsId`].
    table: Vec<NamespaceState>,
    entry_writes: VecDeque<EntryWrite>,
    in_flight: Vec<EntryWrite>,
    /// Instances that are or were in use.
    instances: HashSet<u64>,
    /// Instances that directories have, and that do not fit the arena, with their digests.
    strangers: HashMap<u64, NamespaceDigest>,
    /// See [`EngineConfig::namespaces_max`].
    shared_max: usize,
    /// See [`EngineConfig::namespace_entries_max`].
    entries_max: usize,
    random: u64,
    /// A namespace was reset while a directory could not be opened.
    reset_beyond_reach: bool,
}

impl Namespaces {
    pub(super) fn new(config: &EngineConfig) -> Self {
        Self {
            table: Vec::new(),
            entry_writes: VecDeque::new(),
            in_flight: Vec::new(),
            instances: HashSet::new(),
            strangers: HashMap::new(),
            shared_max: config.namespaces_max,
            entries_max: config.namespace_entries_max,
            random: config.seed ^ 0x5DEE_CE66_D1CE_4E5B,
            reset_beyond_reach: false,
        }
    }

    fn state(&self, ns: NsId) -> &NamespaceState {
        &self.table[usize::from(ns)]
    }

    fn state_mut(&mut self, ns: NsId) -> &mut NamespaceState {
        &mut self.table[usize::from(ns)]
    }

    pub(super) fn digest(&self, ns: NsId) -> &NamespaceDigest {
        &self.state(ns).digest
    }

    pub(super) fn instance(&self, ns: NsId) -> u64 {
        self.state(ns).instance
    }

    pub(super) fn is_private(&self, ns: NsId) -> bool {
        self.state(ns).private
    }

    /// The namespace of an instance that a directory knows.
    pub(super) fn of_instance(&self, instance: u64) -> Option<NsId> {
        let mut known = (0..).zip(&self.table);
        known.find_map(|(ns, state)| (state.instance == instance).then_some(ns))
    }

    /// The namespace that all sessions of a description share.
    pub(super) fn shared(&self, digest: &NamespaceDigest) -> Option<NsId> {
        let mut known = (0..).zip(&self.table);
        known.find_map(|(ns, state)| (state.digest == *digest && !state.private).then_some(ns))
    }

    /// Whether a description is known.
    pub(super) fn knows(&self, digest: &NamespaceDigest) -> bool {
        self.table.iter().any(|state| state.digest == *digest)
    }

    /// The shared namespaces, and whether each directory's table has an entry of it.
    #[cfg(feature = "check")]
    pub(super) fn shared_namespaces<'a>(
        &'a self,
        residency: &'a Residency,
    ) -> impl Iterator<Item = (&'a NamespaceDigest, bool)> {
        let shared = self.table.iter().filter(|state| !state.private);
        shared.map(|state| (&state.digest, is_kept(state, residency)))
    }

    /// The shared namespace of a description. A new namespace is made, and entered in the tables that lack it. Where
    /// there is no room, the least recently used namespace is forgotten with its blocks; `is_unused` holds for
    /// namespaces that no session uses.
    ///
    /// # Errors
    /// If the description makes no sense, contradicts the known description, or does not fit.
    pub(super) fn register(
        &mut self,
        spec: NamespaceSpec,
        residency: &mut Residency,
        used_s: u32,
        is_unused: impl Fn(NsId) -> bool,
    ) -> Result<NsId, RegisterError> {
        spec.validate()?;
        let digest = spec.digest();
        if let Some(ns) = self.shared(&digest) {
            let known = residency.spec(ns);
            if known.groups != spec.groups || known.hash_block_size != spec.hash_block_size {
                return Err(RegisterError::Conflict {
                    digest: digest.to_hex(),
                });
            }
            self.used(ns, residency, used_s);
            if lacks_entry(self.state(ns), residency) {
                // The namespace is empty after a reset, or came when sessions used all the tables' namespaces.
                self.make_room(Some(ns), self.shared_max, residency, &is_unused);
                self.enter_again(residency);
            }
            return Ok(ns);
        }
        // No other namespace is forgotten for a namespace that does not fit.
        residency.fit(spec.clone())?;
        fit_entry(&spec)?;
        let shared_most = self.shared_max.saturating_sub(1);
        self.make_room(None, shared_most, residency, &is_unused);
        self.check_count()?;
        let instance = self.new_instance();
        let ns = match self.vacant(residency, &is_unused) {
            Some(ns) => self.replace(ns, spec, instance, false, residency)?,
            None => self.add(spec, instance, false, residency)?,
        };
        self.enter(ns, residency);
        self.used(ns, residency, used_s);
        Ok(ns)
    }

    /// Whether there may be another shared namespace.
    ///
    /// # Errors
    /// If the engine has as many as it may have.
    fn check_count(&self) -> Result<(), RegisterError> {
        let count = self.shared_count();
        if count >= self.shared_max {
            return Err(RegisterError::TooMany { count });
        }
        Ok(())
    }

    fn shared_count(&self) -> usize {
        self.table.iter().filter(|state| !state.private).count()
    }

    /// Writes into a namespace's entries that a session was opened or closed at `used_s` seconds since 1970.
    pub(super) fn used(&mut self, ns: NsId, residency: &mut Residency, used_s: u32) {
        let tick = residency.next_tick();
        self.note_use(ns, tick);
        let instance = self.instance(ns);
        let bytes = NamespaceUse {
            instance,
            tick,
            used_s,
        }
        .encode();
        for device in residency.devices() {
            let entries = &residency.disk_mut(device).namespace_entries;
            let Some(index) = entries.iter().position(|&found| found == instance) else {
                continue;
            };
            let file_offset = use_offset(index);
            let mut waiting = self.entry_writes.iter_mut();
            let same =
                waiting.find(|write| write.device == device && write.file_offset == file_offset);
            if let Some(same) = same {
                // Sessions may come and go faster than the directory takes writes.
                same.bytes.clone_from(&bytes);
                continue;
            }
            self.entry_writes.push_back(EntryWrite {
                device,
                index,
                file_offset,
                bytes: bytes.clone(),
                clears: false,
                failed: false,
            });
        }
    }

    /// Notes that a namespace is used at `tick`.
    pub(super) fn note_use(&mut self, ns: NsId, tick: u64) {
        let state = self.state_mut(ns);
        state.last_use = state.last_use.max(tick);
    }

    /// An index of a private namespace of which no block is left.
    fn vacant(&self, residency: &Residency, is_unused: impl Fn(NsId) -> bool) -> Option<NsId> {
        (0..).zip(&self.table).find_map(|(ns, state)| {
            let is_empty = state.private && !residency.forest().has_nodes(ns);
            (is_empty && is_unused(ns)).then_some(ns)
        })
    }

    /// Gives a vacant index to a namespace.
    ///
    /// # Errors
    /// If the payloads do not fit.
    fn replace(
        &mut self,
        vacant: NsId,
        spec: NamespaceSpec,
        instance: u64,
        private: bool,
        residency: &mut Residency,
    ) -> Result<NsId, RegisterError> {
        let digest = spec.digest();
        let geometry = residency.fit(spec)?;
        residency.replace_namespace(vacant, geometry);
        *self.state_mut(vacant) = NamespaceState {
            digest,
            instance,
            private,
            volatile: private,
            last_use: 0,
        };
        Ok(vacant)
    }

    /// Adds a namespace to the engine (not to the tables).
    ///
    /// # Errors
    /// If there are too many, or the payloads do not fit.
    pub(super) fn add(
        &mut self,
        spec: NamespaceSpec,
        instance: u64,
        private: bool,
        residency: &mut Residency,
    ) -> Result<NsId, RegisterError> {
        // There may be as many private namespaces as sessions.
        if !private {
            self.check_count()?;
        }
        if self.table.len() >= usize::from(NsId::MAX) {
            let count = self.table.len();
            return Err(RegisterError::TooMany { count });
        }
        let digest = spec.digest();
        let geometry = residency.fit(spec)?;
        let ns = residency.add_namespace(geometry);
        assert_eq!(
            usize::from(ns),
            self.table.len(),
            "residency counts namespaces as the table does"
        );
        self.table.push(NamespaceState {
            digest,
            instance,
            private,
            volatile: private,
            last_use: 0,
        });
        Ok(ns)
    }

    /// Makes a private namespace with the description of `ns`, at an index for which `is_unused` holds.
    ///
    /// # Errors
    /// If there are too many namespaces.
    pub(super) fn add_private(
        &mut self,
        ns: NsId,
        residency: &mut Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) -> Result<NsId, RegisterError> {
        let spec = residency.spec(ns).clone();
        let instance = self.new_instance();
        match self.vacant(residency, is_unused) {
            Some(vacant) => self.replace(vacant, spec, instance, true, residency),
            None => self.add(spec, instance, true, residency),
        }
    }

    /// Enters a namespace into the table of each directory that lacks it. Where sessions use all namespaces of a table,
    /// it is volatile: a restart does not find its blocks in that directory.
    pub(super) fn enter(&mut self, ns: NsId, residency: &mut Residency) {
        let (instance, is_volatile) = (self.instance(ns), self.state(ns).volatile);
        let entry = NamespaceEntry {
            instance,
            spec: residency.spec(ns).clone(),
        };
        let bytes = entry
            .encode()
            .expect("register refuses a description that does not fit an entry");
        for device in residency.devices() {
            // A directory that could not be opened yet gets the entries when it is opened.
            if residency.disk_mut(device).is_absent() {
                continue;
            }
            let entries = &mut residency.disk_mut(device).namespace_entries;
            if entries.contains(&instance) {
                continue;
            }
            let free = entries.iter().position(|&found| found == 0);
            let free = free.or_else(|| {
                (entries.len() < self.entries_max).then(|| {
                    entries.push(0);
                    entries.len() - 1
                })
            });
            let Some(index) = free.filter(|_| !is_volatile) else {
                self.state_mut(ns).volatile = true;
                continue;
            };
            entries[index] = instance;
            self.entry_writes.push_back(EntryWrite {
                device,
                index,
                file_offset: namespace_offset(index),
                bytes: bytes.clone(),
                clears: false,
                failed: false,
            });
        }
    }

    /// Begins another life of a namespace, at another index: no earlier block or record belongs to the new life. Ends
    /// the old life durably. The caller moves the sessions.
    pub(super) fn begin_new_life(
        &mut self,
        ns: NsId,
        residency: &mut Residency,
        is_unused: impl Fn(NsId) -> bool,
    ) -> NsId {
        let (is_private, last_use) = (self.is_private(ns), self.state(ns).last_use);
        // Private at first: the number of shared namespaces may be at its limit.
        let added = self.add_private(ns, residency, is_unused);
        self.vacate(ns, residency);
        // If no index is left, the namespace keeps its index, and this call removes all its blocks.
        let new = added.unwrap_or_else(|_| {
            residency.finish_removals();
            ns
        });
        let state = self.state_mut(new);
        state.private = is_private;
        state.last_use = last_use;
        if !is_private {
            // Older blocks in an absent directory cannot be ended now.
            self.reset_beyond_reach |= residency.disks().iter().any(Disk::is_absent);
            self.enter_again(residency);
        }
        new
    }

    /// An absent directory has become usable. It holds no blocks of lives that ended meanwhile.
    pub(super) fn note_reach(&mut self, residency: &Residency) {
        self.reset_beyond_reach &= residency.disks().iter().any(Disk::is_absent);
    }

    /// Clears an entry of a namespace table durably: the life of the entry's namespace on this directory ends.
    pub(super) fn clear_entry(
        &mut self,
        device: DeviceIndex,
        index: usize,
        residency: &mut Residency,
    ) {
        residency.disk_mut(device).namespace_entries[index] = 0;
        self.entry_writes.push_back(EntryWrite {
            device,
            index,
            file_offset: namespace_offset(index),
            bytes: vec![0; BLOCK_BYTES].into(),
            clears: true,
            failed: false,
        });
    }

    /// Makes entries for reset namespaces whose sessions still have the described weights, and for namespaces that
    /// found no room. Does nothing while a record from before a reset could still return.
    fn enter_again(&mut self, residency: &mut Residency) {
        if self.clearing().next().is_some() {
            return;
        }
        for ns in residency.forest().namespaces() {
            let state = self.state_mut(ns);
            if state.volatile && !state.private {
                state.volatile = false;
                self.enter(ns, residency);
            }
        }
    }

    /// Whether a reset is not durable yet, and a write that makes it durable has not failed.
    pub(super) fn reset_pending(&self) -> bool {
        self.clearing().any(|write| !write.failed)
    }

    /// Like [`Namespaces::reset_pending`], for writes of the directories that answer.
    pub(super) fn is_resetting(&self, residency: &Residency) -> bool {
        let answers = |device: DeviceIndex| residency.disks()[device.index()].health.answers();
        self.clearing()
            .any(|write| !write.failed && answers(write.device))
    }

    /// Whether a reset could not be made durable.
    pub(super) fn reset_failed(&self) -> bool {
        self.reset_beyond_reach || self.clearing().any(|write| write.failed)
    }

    fn clearing(&self) -> impl Iterator<Item = &EntryWrite> {
        let writes = self.in_flight.iter().chain(&self.entry_writes);
        writes.filter(|write| write.clears)
    }

    /// Whether a write of the namespace table may be started, now or after a pause.
    #[inline]
    pub(super) fn has_writes(&self, residency: &Residency) -> bool {
        // Asked at the end of each entry, and nearly always empty.
        !self.entry_writes.is_empty()
            && self.entry_writes.iter().any(|write| {
                !write.failed || residency.disks()[write.device.index()].health.is_alive()
            })
    }

    /// Appends writes of the namespace table.
    pub(super) fn next_writes(
        &mut self,
        residency: &Residency,
        operations: &mut Operations,
        now_ns: u64,
        out: &mut Vec<IoRequest>,
    ) {
        let mut at = 0;
        while at < self.entry_writes.len() {
            let write = &self.entry_writes[at];
            let disk = &residency.disks()[write.device.index()];
            // Devices carry writes out in any order, so two writes of one entry are never under way together.
            let same = |other: &EntryWrite| write.is_same_entry(other);
            let waits = self.in_flight.iter().any(same)
                || self.entry_writes.iter().take(at).any(same)
                || !operations.has_room(write.device)
                || !disk.health.answers()
                || write.failed && !disk.health.takes_writes(now_ns);
            if waits {
                at += 1;
                continue;
            }
            let write = self
                .entry_writes
                .remove(at)
                .expect("`at` is below the length");
            let purpose = Purpose::Namespace {
                device: write.device,
                index: write.index,
            };
            let token = operations.start(purpose, write.device, now_ns);
            out.push(IoRequest::WriteMeta {
                token,
                device: write.device.number(),
                file: FileKind::Super,
                file_offset: write.file_offset,
                bytes: write.bytes.clone(),
                sync: write.clears,
            });
            self.in_flight.push(write);
        }
    }

    /// The write of an entry has ended.
    ///
    /// # Errors
    /// If the device failed the write. The write will be tried again.
    pub(super) fn write_ended(
        &mut self,
        (device, index): (DeviceIndex, usize),
        result: Result<u64, IoFault>,
        residency: &mut Residency,
        now_ns: u64,
    ) -> Result<(), IoFault> {
        let mut in_flight = self.in_flight.iter();
        let found = in_flight.position(|write| (write.device, write.index) == (device, index));
        let found = found.expect("an entry whose write ended was being written");
        let mut write = self.in_flight.swap_remove(found);
        let health = &mut residency.disk_mut(device).health;
        let Err(fault) = result else {
            health.write_succeeded(now_ns);
            if write.clears {
                self.enter_again(residency);
            }
            return Ok(());
        };
        write.failed = true;
        self.entry_writes.push_front(write);
        if fault == IoFault::Stopped {
            return Ok(());
        }
        health.write_failed(fault, now_ns);
        Err(fault)
    }

    /// Notes that a directory knows this instance.
    pub(super) fn note_instance(&mut self, instance: u64) {
        self.instances.insert(instance);
    }

    /// An identity for a life of a namespace, unknown to every directory: no old record may become
    /// valid again, even after a restart with the same seed.
    fn new_instance(&mut self) -> u64 {
        loop {
            let instance = self.next_random();
            if self.instances.insert(instance) {
                return instance;
            }
        }
    }

    fn next_random(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        // 0 means an empty entry.
        (z ^ z >> 31).max(1)
    }
}

/// Whether each directory's table has an entry of a namespace.
fn is_kept(state: &NamespaceState, residency: &Residency) -> bool {
    let mut disks = residency.disks().iter();
    disks.all(|disk| disk.namespace_entries.contains(&state.instance))
}

/// Whether a directory that is not absent lacks an entry of a namespace.
fn lacks_entry(state: &NamespaceState, residency: &Residency) -> bool {
    let mut there = residency.disks().iter().filter(|disk| !disk.is_absent());
    there.any(|disk| !disk.namespace_entries.contains(&state.instance))
}
