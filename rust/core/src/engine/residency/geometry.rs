//! The payloads of each namespace, and their size class in each region.

use crate::forest::{DeviceIndex, Tier};
use crate::namespace::NamespaceSpec;
use crate::slots::Class;

/// A region that slots are allocated from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Region {
    /// The arena.
    Host,
    /// The data file of a directory.
    Disk(DeviceIndex),
}

impl Region {
    /// The region's number: the arena, then the directories.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Host => 0,
            Self::Disk(device) => 1 + device.index(),
        }
    }

    pub(super) fn tier(self) -> Tier {
        match self {
            Self::Host => Tier::Host,
            Self::Disk(_) => Tier::Disk,
        }
    }
}

/// A namespace that an operator has cleared: its last blocks leave as they become free.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Leaving {
    /// Number of the order.
    pub(in crate::engine) order: u64,
    /// The bytes on disk are erased.
    pub(in crate::engine) erases: bool,
}

/// The payloads of one namespace.
#[derive(Debug)]
pub(in crate::engine) struct Geometry {
    pub(super) spec: NamespaceSpec,
    /// Size class of each group in the arena; `None` for ignored groups.
    pub(super) host_class: Vec<Option<Class>>,
    /// Size class of each group, by directory.
    pub(super) disk_class: Vec<Vec<Option<Class>>>,
    /// `Some` if an operator has cleared the namespace.
    pub(super) leaving: Option<Leaving>,
}

impl Geometry {
    pub(super) fn class(&self, region: Region, group: usize) -> Option<Class> {
        let classes = match region {
            Region::Host => &self.host_class,
            Region::Disk(device) => &self.disk_class[device.index()],
        };
        *classes.get(group)?
    }
}
