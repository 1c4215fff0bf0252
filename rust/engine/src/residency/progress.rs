//! How far the longer works of residency have come: pages that move, payloads that are removed or erased, tiers that get
//! another size, and nodes whose readers are told later.

use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashSet;

use crate::forest::{DeviceIndex, NodeId, NsId};
use crate::policy::Tenants;
use crate::slots::{Class, Owner, Run};

/// The run of pages of one region that is being emptied, or is empty, for a size class.
#[derive(Debug, Default)]
pub(super) struct PageMove {
    /// The run that is being emptied.
    pub(super) emptying: Option<Emptying>,
    /// The class that the run is for, or that the last run was for.
    pub(super) class: Class,
    /// The class was refused a slot, and waits for the run.
    pub(super) waits: bool,
    /// How often other classes have asked since the class asked last.
    pub(super) others: u64,
    /// Number of the run to look at next, beside those around candidates.
    pub(super) next: u64,
    /// Number of slots freed in the tier when the last run could not be had.
    pub(super) in_vain: Option<u64>,
    /// Runs in a row that could not be had.
    pub(super) vain: u32,
    /// Nodes that the present entry may still look at.
    pub(super) visits: usize,
    /// Tenants whose payloads stay, by the last search.
    pub(super) kept: Tenants,
}

/// A run that is being emptied. It is closed: no slot of the run is allocated.
#[derive(Debug)]
pub(super) struct Emptying {
    pub(super) run: Run,
    /// The first unit whose page was not looked at.
    pub(super) unit: u32,
    /// Payloads of the page that is being emptied.
    pub(super) left: Vec<Owner>,
}

/// Counters of pages that moved between size classes since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moves {
    /// Runs of pages that another class got.
    pub runs: u64,
    /// Payloads evicted from runs while others depended on them.
    pub gaps: u64,
    /// Payloads of gaps that were saved again.
    pub filled_gaps: u64,
}

impl PageMove {
    pub(super) fn spend(&mut self, visits: usize) {
        self.visits = self.visits.saturating_sub(visits);
    }
}

/// The nodes that have not been marked yet.
#[derive(Debug)]
pub(super) struct Rest {
    /// Number of nodes that the present entry may still mark.
    pub(super) left: usize,
    /// Nodes that may become visible, each with the siblings behind it. When a node leaves the index, its next sibling
    /// takes its place.
    pub(super) hidden: Vec<NodeId>,
}

impl Rest {
    /// No nodes, and no limit until [`Residency::allow_rest`].
    pub(super) fn new() -> Self {
        Self {
            left: usize::MAX,
            hidden: Vec::new(),
        }
    }

    /// Whether the entry may mark one node more, which counts from now on.
    pub(super) fn take(&mut self) -> bool {
        let may = self.left > 0;
        self.left -= usize::from(may);
        may
    }

    /// The first node of each series of siblings.
    #[cfg(feature = "check")]
    pub(super) fn hidden(&self) -> impl Iterator<Item = NodeId> {
        self.hidden.iter().copied()
    }
}

/// Chains of which some nodes wait for their records.
#[derive(Debug, Default)]
pub(super) struct Placeholders {
    /// The deepest node that waits of each chain, with its epoch, and the directory.
    pub(super) later: VecDeque<(NodeId, u32, DeviceIndex)>,
}

/// The removals under way.
///
/// Invariants: the root of a subtree is detached, and has children; all nodes of the subtree are below it.
#[derive(Debug, Default)]
pub(super) struct Removals {
    /// Namespaces that have ended.
    pub(super) namespaces: VecDeque<NsId>,
    /// Roots of subtrees, with their epochs.
    pub(super) subtrees: VecDeque<(NodeId, u32)>,
    /// Nodes to be reconciled, with their epochs, because nodes below were removed.
    pub(super) bare: VecDeque<(NodeId, u32)>,
    /// Directories that were given up, and the first node that was not looked at yet.
    pub(super) devices: VecDeque<(DeviceIndex, NodeId)>,
    /// A node on the way to the next leaf to remove, and its epoch.
    pub(super) cursor: Option<(NodeId, u32)>,
}

impl Removals {
    pub(super) fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
            && self.subtrees.is_empty()
            && self.bare.is_empty()
            && self.devices.is_empty()
    }

    /// Whether a node is to be reconciled.
    #[cfg(feature = "check")]
    pub(super) fn is_bare(&self, id: NodeId) -> bool {
        self.bare.iter().any(|&(bare, _)| bare == id)
    }
}

/// Payloads that an order has taken out of the index, by tier, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClearTotals {
    /// Number of the order.
    pub(crate) order: u64,
    pub(crate) blocks: [u64; 2],
    pub(crate) bytes: [u64; 2],
}

/// Payloads whose bytes are to be erased, or are being erased.
///
/// Invariant: each payload leases its node, which has left the index; each payload is on disk.
#[derive(Debug, Default)]
pub(crate) struct Erasures {
    /// The payloads whose erasure has not started, by directory.
    pub(super) queues: BTreeMap<DeviceIndex, VecDeque<(NodeId, u8)>>,
    /// All of the payloads.
    pub(super) pending: FxHashSet<(NodeId, u8)>,
    /// Bytes erased since the start: the medium was told.
    pub(crate) bytes: u64,
    /// By directory: bytes erased since the last sync began, and bytes whose sync is under way.
    pub(super) unsynced: BTreeMap<DeviceIndex, (u64, u64)>,
    /// Writes whose bytes were not erased.
    pub(crate) failures: u64,
    /// The bytes of nodes whose last use was at this tick or before are erased, by an order whose pass is not over.
    pub(crate) until: Option<u64>,
}

impl Erasures {
    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Takes the first payload of a directory whose erasure has not started. The caller starts or ends the erasure.
    pub(crate) fn take(&mut self, device: DeviceIndex) -> Option<(NodeId, u8)> {
        self.queues.get_mut(&device)?.pop_front()
    }

    /// Whether a directory has erased bytes whose sync has not begun.
    pub(crate) fn needs_sync(&self, device: DeviceIndex) -> bool {
        let of = self.unsynced.get(&device);
        of.is_some_and(|&(waiting, syncing)| waiting > 0 && syncing == 0)
    }

    /// Whether a directory has erasures of which its medium may not know.
    pub(crate) fn is_unsynced(&self, device: DeviceIndex) -> bool {
        self.unsynced.contains_key(&device)
    }

    /// Whether the medium was told of all erasures.
    pub(crate) fn is_durable(&self) -> bool {
        self.pending.is_empty() && self.unsynced.is_empty()
    }

    /// A sync of a data file begins.
    pub(crate) fn sync_begins(&mut self, device: DeviceIndex) {
        if let Some((waiting, syncing)) = self.unsynced.get_mut(&device) {
            *syncing = std::mem::take(waiting);
        }
    }

    /// A sync of a data file has ended.
    pub(crate) fn sync_ended(&mut self, device: DeviceIndex, ok: bool) {
        let Some((mut waiting, syncing)) = self.unsynced.remove(&device) else {
            return;
        };
        match ok {
            true => self.bytes += syncing,
            false => waiting += syncing,
        }
        if waiting > 0 {
            self.unsynced.insert(device, (waiting, 0));
        }
    }

    /// The payloads, each of which leases its node.
    #[cfg(feature = "check")]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.pending.iter().copied()
    }
}

/// One region whose size was set.
///
/// Invariant: these runs are exactly the withheld runs.
#[derive(Debug, Default)]
pub(super) struct Resizing {
    /// Bytes that the region may have; `None` for its largest size.
    pub(super) target: Option<u64>,
    /// Pages that wait to be returned to the system.
    pub(super) waiting: VecDeque<Run>,
    /// The page that is being returned to the system, and how many bytes of it were returned.
    pub(super) releasing: Option<(Run, u64)>,
    /// Pages that were returned to the system, and pages that could not be returned.
    pub(super) released: Vec<Run>,
    pub(super) kept: Vec<Run>,
    pub(super) kept_bytes: u64,
    pub(super) next_ns: u64,
}

impl Resizing {
    pub(super) fn is_releasing(&self) -> bool {
        self.releasing.is_some() || !self.waiting.is_empty()
    }
}
