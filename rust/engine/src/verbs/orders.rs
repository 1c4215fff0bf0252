//! What an operator orders while the engine runs: the tiers' sizes, and a drain before maintenance.
//!
//! The size at the start is the largest: no process maps more of the arena, and a data file has no more slots. After a
//! restart, the configured sizes hold again. An engine that drains begins no save and no read, and writes what waits to
//! disk and to the remote store.

use serde::{Deserialize, Serialize};
use undercroft_contract::explain::Reason;
use undercroft_contract::io::IoRequest;
use undercroft_contract::pages::{capacity_for, data_of};
use undercroft_contract::size::Bytes;

use crate::forest::DeviceIndex;

use super::super::operations::Purpose;
use super::super::remote::Remote;
use super::super::residency::{Region, TierSize};
use super::engine::Engine;
use super::jobs::Due;

/// New sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResizeOrder {
    /// Bytes of host memory; `None` keeps the size.
    pub host_bytes: Option<u64>,
    /// Maximum bytes of the files of each directory, as `disk_capacity`; `None` keeps the size.
    pub disk_bytes: Option<u64>,
}

/// The sizes of the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resized {
    /// Host memory.
    pub host: TierSize,
    /// All directories together, without their records.
    pub disk: TierSize,
}

/// Why sizes are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefusal {
    /// Outside the sizes that the engine can have.
    #[error(
        "{option} {}: allowed is {} to {}; restart with another {option} for a size beyond that",
        Bytes(*bytes), Bytes(*least), Bytes(*most)
    )]
    Bounds {
        /// The option that has the size at the start.
        option: &'static str,
        /// The size asked for.
        bytes: u64,
        /// The smallest size.
        least: u64,
        /// The largest size.
        most: u64,
    },
    /// There is no directory.
    #[error("disk_capacity: the engine has no disk_path")]
    NoDisk,
    /// The machine does not have the memory.
    #[error(
        "host_memory {}: {} more are needed, and {} of memory are available; ask for less",
        Bytes(*bytes), Bytes(*needed), Bytes(*available)
    )]
    Memory {
        /// The size asked for.
        bytes: u64,
        /// Bytes of memory that the arena would take in addition.
        needed: u64,
        /// The memory that the machine or the container's limit leaves.
        available: u64,
    },
}

impl Engine {
    /// Sets sizes; [`Engine::resized`] returns the progress. `available` is the memory that the machine has left;
    /// `None` if unknown.
    ///
    /// # Errors
    /// If a size is impossible. Nothing is changed then.
    pub fn resize(
        &mut self,
        order: &ResizeOrder,
        available: Option<u64>,
    ) -> Result<Resized, ResizeRefusal> {
        if let Some(bytes) = order.host_bytes {
            let (least, most, page) = self.residency.sizes(Region::Host);
            check("host_memory", bytes, (least, most), most + page)?;
            let used = most - self.residency.released_bytes(Region::Host);
            let needed = bytes.saturating_sub(used);
            if let Some(available) = available.filter(|&available| available < needed) {
                return Err(ResizeRefusal::Memory {
                    bytes,
                    needed,
                    available,
                });
            }
        }
        let devices: Vec<DeviceIndex> = self.residency.devices().collect();
        if let Some(bytes) = order.disk_bytes {
            let sizes = devices
                .iter()
                .map(|&device| self.residency.sizes(Region::Disk(device)));
            // A directory that could not be opened yet has no size.
            let sizes: Vec<_> = sizes.filter(|&(_, most, _)| most > 0).collect();
            let least = sizes.iter().map(|&(least, ..)| least).max();
            let largest = sizes.iter().max_by_key(|&&(_, most, _)| most);
            let (Some(least), Some(&(_, most, page))) = (least, largest) else {
                return Err(ResizeRefusal::NoDisk);
            };
            let bounds = (capacity_for(least), capacity_for(most));
            check("disk_capacity", bytes, bounds, capacity_for(most + page))?;
        }
        if let Some(bytes) = order.host_bytes {
            self.residency.set_target(Region::Host, bytes);
            self.set_budgets(bytes);
        }
        if let Some(bytes) = order.disk_bytes {
            for device in devices {
                let region = Region::Disk(device);
                self.residency.set_target(region, data_of(bytes));
            }
        }
        Ok(self.resized())
    }

    /// Gives promotions, pins and the remote store the same parts of the arena as before.
    fn set_budgets(&mut self, host_bytes: u64) {
        let part = |of: u64| {
            let part =
                u128::from(of) * u128::from(host_bytes) / u128::from(self.config.host_bytes.max(1));
            u64::try_from(part).unwrap_or(of).min(of)
        };
        let (promotions, pins) = (
            part(self.config.promotion_bytes),
            part(self.config.pin_bytes),
        );
        self.promotions.set_budget(promotions);
        self.pins.set_budget(pins);
        if let Some(remote) = &mut self.remote {
            remote.set_budgets(host_bytes, promotions);
        }
    }

    /// The sizes now.
    pub fn resized(&self) -> Resized {
        let mut disk = TierSize::default();
        for device in self.residency.devices() {
            let of = self.residency.size_of(Region::Disk(device));
            disk.capacity_bytes += of.capacity_bytes;
            disk.target_bytes += of.target_bytes;
            disk.maximum_bytes += of.maximum_bytes;
            disk.kept_bytes += of.kept_bytes;
            disk.resizing |= of.resizing;
        }
        Resized {
            host: self.residency.size_of(Region::Host),
            disk,
        }
    }

    /// A part of the arena was returned to the system (`ok`), or another process keeps it.
    pub fn arena_release_ended(&mut self, ok: bool) {
        self.residency.arena_release_ended(ok);
    }

    /// Appends requests that return pages to the filesystem, one page of each directory.
    pub(super) fn next_releases(&mut self, out: &mut Vec<IoRequest>) {
        if !self.residency.has_releases() {
            return;
        }
        for device in self.residency.devices() {
            let health = &self.residency.disks()[device.index()].health;
            if !health.is_alive() {
                self.residency.refuse_releases(device);
                continue;
            }
            if !health.answers() || !self.operations.may_write(device) {
                continue;
            }
            let Some((file_offset, len)) = self.residency.next_release(device) else {
                continue;
            };
            let token = self
                .operations
                .start(Purpose::Release { device }, device, self.now_ns);
            out.push(IoRequest::Erase {
                token,
                device: device.number(),
                file_offset,
                len: u32::try_from(len).expect("a page has at most 64 MiB"),
                frees: true,
            });
        }
    }
}

/// A size of the configuration may be larger by less than a page.
fn check(
    option: &'static str,
    bytes: u64,
    (least, most): (u64, u64),
    end: u64,
) -> Result<(), ResizeRefusal> {
    if (least..end).contains(&bytes) {
        return Ok(());
    }
    Err(ResizeRefusal::Bounds {
        option,
        bytes,
        least,
        most,
    })
}

/// How far an engine has drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drained {
    /// No save begins, and no read from disk or from the remote store.
    pub draining: bool,
    /// Saves that began before the drain and have not ended.
    pub saves: u64,
    /// Bytes of the payloads that wait to be written.
    pub queued_bytes: u64,
    /// Reads and writes in flight on the devices.
    pub operations: u64,
    /// Objects that wait to be written to the remote store, or are being written.
    pub remote_writes: u64,
    /// Nothing is left to be written to disk or to the remote store, and nothing is being fetched from the remote
    /// store.
    pub clean: bool,
}

impl Engine {
    /// Begins to drain; with `cancel`, stops draining. Idempotent.
    pub fn drain(&mut self, cancel: bool) -> Drained {
        self.draining = !cancel;
        if self.draining {
            self.write_touched();
        }
        self.drained()
    }

    /// Why nothing is read from disk: `unread`, or the drain if `unread` names no reason.
    pub(super) fn unless_draining(&self, unread: Reason) -> Reason {
        match unread {
            Reason::Complete if self.draining => Reason::Draining,
            unread => unread,
        }
    }

    /// How far the engine has drained.
    pub fn drained(&self) -> Drained {
        let saves = self.sessions.all_transfers().saves;
        let remote = self.remote.as_deref();
        let remote_writes = remote.map_or(0, Remote::unwritten);
        let is_reading = remote.is_some_and(Remote::is_reading);
        let is_written =
            saves == 0 && remote_writes == 0 && self.is_quiet() && self.wake() < Due::Now;
        Drained {
            draining: self.draining,
            saves,
            queued_bytes: self.residency.queued_bytes(),
            operations: self.operations.len() as u64,
            remote_writes,
            clean: self.draining && is_written && !is_reading,
        }
    }
}
