//! The namespace table of each directory: entering a namespace, and reset, which drops everything of
//! one, durably.

use crate::disk::format::{BLOCK_BYTES, NAMESPACES_MAX, NamespaceEntry, namespace_offset};
use crate::forest::{NONE, NsId};
use crate::io::{FileKind, IoFault, IoRequest};

use super::{Engine, Op, SessionId};

/// A write of an entry of the namespace table.
#[derive(Clone, Debug)]
pub(super) struct EntryWrite {
    device: usize,
    index: usize,
    bytes: Box<[u8]>,
    /// It clears the entry, durably.
    clears: bool,
    /// It has failed before: it is tried again when the directory takes writes.
    failed: bool,
}

impl Engine {
    /// Enters a namespace into the table of each directory that lacks it. One that cannot be entered
    /// is used all the same, until the process ends.
    pub(super) fn save_namespace(&mut self, ns: NsId) {
        let namespace = &self.namespaces[usize::from(ns)];
        let instance = namespace.instance;
        let entry = NamespaceEntry {
            instance,
            spec: namespace.spec.clone(),
        };
        let encoded = entry.encode().filter(|_| !namespace.volatile);
        for device in 0..self.disks.len() {
            let disk = &mut self.disks[device];
            if disk.namespace_entries.contains(&instance) {
                continue;
            }
            let free = disk.namespace_entries.iter().position(|&found| found == 0);
            let free = free.or_else(|| {
                (disk.namespace_entries.len() < NAMESPACES_MAX).then(|| {
                    disk.namespace_entries.push(0);
                    disk.namespace_entries.len() - 1
                })
            });
            match (free, &encoded) {
                (Some(index), Some(bytes)) => {
                    disk.namespace_entries[index] = instance;
                    self.entry_writes.push_back(EntryWrite {
                        device,
                        index,
                        bytes: bytes.clone(),
                        clears: false,
                        failed: false,
                    });
                }
                _ => self.namespaces[usize::from(ns)].volatile = true,
            }
        }
    }

    /// Drops everything of a session's namespace. It cannot be found any more when this returns; it
    /// cannot be found after a restart either once [`Engine::reset_pending`] and
    /// [`Engine::reset_failed`] are false.
    ///
    /// A reset usually follows a change of the session's weights, which the description of the namespace
    /// may not show. So the session goes on by itself, see [`Engine::make_private`].
    pub fn reset(&mut self, session: SessionId) {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return;
        };
        self.drop_all(ns);
        let namespace = &mut self.namespaces[usize::from(ns)];
        let (old, is_private) = (namespace.instance, namespace.private);
        namespace.volatile = true;
        let instance = self.new_instance();
        self.namespaces[usize::from(ns)].instance = instance;
        if is_private {
            return;
        }
        for device in 0..self.disks.len() {
            for index in 0..self.disks[device].namespace_entries.len() {
                if self.disks[device].namespace_entries[index] == old {
                    self.clear_entry(device, index);
                }
            }
        }
        self.enter_again();
        self.part(session, ns);
    }

    /// Ends the life of a namespace on a directory, durably.
    pub(super) fn clear_entry(&mut self, device: usize, index: usize) {
        self.disks[device].namespace_entries[index] = 0;
        self.entry_writes.push_back(EntryWrite {
            device,
            index,
            bytes: vec![0; BLOCK_BYTES].into(),
            clears: true,
            failed: false,
        });
    }

    /// From now on a session finds what it has saved itself, and nobody else finds that, nor does a
    /// restart: its weights are not those that the description says. Ends its lookups. Idempotent.
    pub fn make_private(&mut self, session: SessionId) {
        let ns = self.sessions.get(session).map(|state| state.ns);
        if let Some(ns) = ns.filter(|&ns| !self.namespaces[usize::from(ns)].private) {
            self.end_lookups(session);
            self.part(session, ns);
        }
    }

    /// Gives a session of the shared namespace `ns` one of its own.
    fn part(&mut self, session: SessionId, ns: NsId) {
        let spec = self.namespaces[usize::from(ns)].spec.clone();
        let instance = self.new_instance();
        let private = match self.unused_private() {
            Some(unused) => self
                .make_namespace(spec, instance, true)
                .map(|namespace| self.namespaces[usize::from(unused)] = namespace)
                .map(|()| unused),
            None => self.add_namespace(spec, instance, true),
        };
        // It fitted when the session was opened.
        let Ok(private) = private else { return };
        if let Some(state) = self.sessions.get_mut(session) {
            state.ns = private;
            for &request in state.requests.values() {
                self.requests[request].ns = private;
            }
        }
    }

    /// A private namespace that nobody uses any more.
    fn unused_private(&self) -> Option<NsId> {
        let used = |ns: NsId| self.sessions.values().any(|state| state.ns == ns);
        (0..).zip(&self.namespaces).find_map(|(ns, namespace)| {
            let unused = namespace.private && self.forest.first_root(ns) == NONE && !used(ns);
            unused.then_some(ns)
        })
    }

    /// Drops everything of a namespace; what is in use goes when it is not any more.
    pub(super) fn drop_all(&mut self, ns: NsId) {
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
    }

    /// Enters namespaces that were reset once nothing of before can come back: for those who still have
    /// the weights that the description says.
    fn enter_again(&mut self) {
        if self.clearing().next().is_some() {
            return;
        }
        for at in 0..self.namespaces.len() {
            let namespace = &mut self.namespaces[at];
            if namespace.volatile && !namespace.private {
                namespace.volatile = false;
                self.save_namespace(NsId::try_from(at).unwrap_or(NsId::MAX));
            }
        }
    }

    /// Whether a reset is not durable yet, and may be soon.
    pub fn reset_pending(&self) -> bool {
        self.clearing().any(|write| !write.failed)
    }

    /// Whether a reset could not be made durable. It is tried again while the process lives.
    pub fn reset_failed(&self) -> bool {
        self.clearing().any(|write| write.failed)
    }

    fn clearing(&self) -> impl Iterator<Item = &EntryWrite> {
        let in_flight = self.entries_in_flight.iter();
        in_flight
            .chain(&self.entry_writes)
            .filter(|write| write.clears)
    }

    /// Whether a write of the namespace table may be started, now or after a pause.
    pub(super) fn has_entry_writes(&self) -> bool {
        self.entry_writes
            .iter()
            .any(|write| !write.failed || self.disks[write.device].is_alive())
    }

    /// Appends writes of the namespace table. One entry is written once at a time, so that what was
    /// cleared is never followed by what it held.
    pub(super) fn next_namespace_writes(&mut self, limit: usize, out: &mut Vec<IoRequest>) {
        let mut at = 0;
        while out.len() < limit && at < self.entry_writes.len() {
            let write = &self.entry_writes[at];
            let same =
                |other: &EntryWrite| (other.device, other.index) == (write.device, write.index);
            let waits = self.entries_in_flight.iter().any(same)
                || self.entry_writes.iter().take(at).any(same)
                || write.failed && !self.disks[write.device].takes_writes(self.now_ns);
            if waits {
                at += 1;
                continue;
            }
            let Some(write) = self.entry_writes.remove(at) else {
                return;
            };
            let token = self.start_op(Op::Namespace {
                device: write.device,
                index: write.index,
            });
            out.push(IoRequest::WriteMeta {
                token,
                device: u16::try_from(write.device).unwrap_or(u16::MAX),
                file: FileKind::Super,
                file_offset: namespace_offset(write.index),
                bytes: write.bytes.clone(),
                sync: write.clears,
            });
            self.entries_in_flight.push(write);
        }
    }

    pub(super) fn namespace_write_ended(
        &mut self,
        device: usize,
        index: usize,
        result: Result<u64, IoFault>,
    ) {
        let found = self
            .entries_in_flight
            .iter()
            .position(|write| (write.device, write.index) == (device, index));
        let Some(mut write) = found.map(|at| self.entries_in_flight.swap_remove(at)) else {
            return;
        };
        let Err(fault) = result else {
            self.disks[device].write_succeeded(self.now_ns);
            if write.clears {
                self.enter_again();
            }
            return;
        };
        if fault != IoFault::Stopped {
            self.counters.write_failures += 1;
            self.disks[device].write_failed(fault, self.now_ns);
        }
        write.failed = true;
        self.entry_writes.push_front(write);
    }
}
