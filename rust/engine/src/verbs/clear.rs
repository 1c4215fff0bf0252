//! Blocks are removed by an order, or because they were unused for too long.

use undercroft_contract::io::{FileKind, IoFault, IoRequest};

use crate::disk::Disk;
use crate::forest::{DeviceIndex, NodeId, NsId};

use super::super::clear::{ClearOrder, ClearRefusal, ClearWhat, Cleared, Clearing, DIGITS_MIN};
use super::super::operations::Purpose;
use super::super::residency::{ClearTotals, Leaving, Sweep, UnusedCursor};
use super::engine::Engine;

/// Pause before nodes that were in use are looked at again, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
/// The files whose changes an order makes durable. Each write of a namespace's entry has its own sync.
const SYNCED: [FileKind; 2] = [FileKind::Table, FileKind::Data];
/// Resolution of the times, as a part of the time to live.
const RETENTION_STEPS: u32 = 64;

impl Engine {
    /// Begins to clear; [`Engine::cleared`] returns the progress.
    ///
    /// # Errors
    /// If another order is under way, or names no namespace.
    pub fn clear(&mut self, order: &ClearOrder) -> Result<Cleared, ClearRefusal> {
        if self.cleared().removing {
            return Err(ClearRefusal::Busy);
        }
        let digits = digits_of(&order.what)?;
        let is_used = |ns| self.sessions.uses(ns);
        let known = digits.as_ref().map(|of| self.namespaces.named(of, is_used));
        // The index has no block of a namespace that does not fit this arena, but an engine with a larger one finds them.
        let has_strangers = digits.as_ref().is_some_and(|of| {
            let residency = &mut self.residency;
            self.namespaces.clear_strangers(of, residency)
        });
        let namespaces = known.unwrap_or_default();
        if let (ClearWhat::Namespace(_), Some(digits)) = (&order.what, digits)
            && namespaces.is_empty()
            && !has_strangers
        {
            return Err(ClearRefusal::Unknown(digits));
        }
        let number = self.clearing.order + 1;
        self.residency.end_pass();
        self.residency.erasures.until = None;
        let erasures = &self.residency.erasures;
        self.clearing = Clearing {
            order: number,
            erased_before: (erasures.bytes, erasures.failures),
            erases: order.erase,
            is_absent: self.residency.disks().iter().any(Disk::is_absent),
            is_by_age: matches!(order.what, ClearWhat::OlderThan(_)),
            ..Clearing::default()
        };
        self.residency.cleared = ClearTotals {
            order: number,
            ..ClearTotals::default()
        };
        let leaving = Leaving {
            order: number,
            erases: order.erase,
        };
        for ns in namespaces {
            self.end_life(ns, leaving);
        }
        self.end_outlived_flights();
        if let ClearWhat::OlderThan(seconds) = order.what {
            let until = match seconds {
                0 => Some(self.residency.tick()),
                _ => self.tick_before(seconds),
            };
            let sweep = until.map(|until| Sweep::new(number, until, order.erase));
            self.clearing.sweep = sweep;
            self.residency.erasures.until = until.filter(|_| order.erase);
        }
        Ok(self.cleared())
    }

    /// Ends the life of a namespace durably; its sessions begin another life.
    fn end_life(&mut self, ns: NsId, leaving: Leaving) {
        if self.sessions.uses(ns) {
            let is_unused = |ns| !self.sessions.uses(ns);
            let new = self
                .namespaces
                .begin_new_life(ns, &mut self.residency, is_unused);
            if new == ns {
                // No other namespace index was free: all blocks were removed at once.
                return;
            }
            self.sessions.move_all(ns, new);
            self.settle_shares();
        } else {
            self.namespaces.vacate(ns, &mut self.residency);
        }
        self.residency.set_leaving(ns, Some(leaving));
        self.clearing.gone.push(ns);
    }

    /// The last tick that was over `seconds` ago. Blocks used after it are too young to be cleared.
    fn tick_before(&self, seconds: u32) -> Option<u64> {
        let at_s = self.unix_s().checked_sub(seconds)?;
        self.ages.last_by(at_s)
    }

    /// The progress of the last order.
    pub fn cleared(&self) -> Cleared {
        let (residency, clearing) = (&self.residency, &self.clearing);
        let totals = &residency.cleared;
        let mut cleared = Cleared {
            order: clearing.order,
            erased_bytes: residency.erasures.bytes - clearing.erased_before.0,
            erase_failures: residency.erasures.failures - clearing.erased_before.1,
            durable: self.is_clear_durable(),
            ..Cleared::default()
        };
        if clearing.order > 0 {
            [cleared.host_blocks, cleared.disk_blocks] = totals.blocks;
            [cleared.host_bytes, cleared.disk_bytes] = totals.bytes;
        }
        let left = |&ns: &NsId| residency.left_of(ns, clearing.order);
        cleared.pending = clearing.gone.iter().map(left).sum();
        // A directory that hangs may answer after hours, or never: an operator can give further orders meanwhile.
        cleared.removing = self.is_erasing() || self.namespaces.is_resetting(residency);
        cleared.removing |= self.is_removing();
        if let Some(sweep) = &clearing.sweep {
            cleared.removing |= clearing.in_use.is_none();
            cleared.pending += clearing.in_use.unwrap_or(sweep.in_use);
        }
        cleared.removing |= self.is_settling();
        if clearing.gone.is_empty() {
            cleared.pending += residency.erasures.len() as u64;
        }
        cleared
    }

    /// Whether no restart finds a block that the last order has removed, and the medium was told of all erasures.
    fn is_clear_durable(&self) -> bool {
        let (clearing, residency) = (&self.clearing, &self.residency);
        let is_absent = residency.disks().iter().any(Disk::is_absent);
        let is_sweeping = clearing.sweep.is_some() && clearing.in_use.is_none();
        let may_return = self.namespaces.reset_pending()
            || self.namespaces.reset_failed()
            || clearing.is_absent && is_absent
            || clearing.is_by_age && self.namespaces.has_strangers()
            || is_sweeping
            || !residency.disks().iter().all(Disk::is_order_durable);
        let may_be_read =
            clearing.erases && (self.is_removing() || !residency.erasures.is_durable());
        !may_return && !may_be_read
    }

    /// Whether blocks of a namespace that was cleared are left to be removed.
    fn is_removing(&self) -> bool {
        let (clearing, residency) = (&self.clearing, &self.residency);
        let is_going =
            |&ns: &NsId| residency.left_of(ns, clearing.order) > 0 && residency.is_ending(ns);
        clearing.gone.iter().any(is_going)
    }

    /// Whether records or erasures of the last order become durable on directories that take writes.
    fn is_settling(&self) -> bool {
        self.residency.devices().any(|device| {
            let disk = &self.residency.disks()[device.index()];
            let unsynced = self.residency.erasures.is_unsynced(device);
            disk.health.takes_writes(self.now_ns) && (!disk.is_order_durable() || unsynced)
        })
    }

    /// Whether erasures are pending on directories that answer.
    fn is_erasing(&self) -> bool {
        let is_busy = |device: DeviceIndex| {
            let health = &self.residency.disks()[device.index()].health;
            health.answers() && self.operations.erasures(device) > 0
        };
        self.residency.has_waiting_erasures() || self.residency.devices().any(is_busy)
    }

    /// Continues the pass under way. Returns whether there is one.
    pub(super) fn step_pass(&mut self, steps: usize) -> bool {
        if !self.is_pass_due() {
            return false;
        }
        let Some(mut sweep) = self.clearing.sweep.take() else {
            return false;
        };
        let is_over = self.residency.step_sweep(&mut sweep, steps);
        if is_over {
            if self.clearing.in_use.is_none() || sweep.removed > 0 {
                self.residency.order_records();
            }
            self.clearing.in_use = Some(sweep.in_use);
            self.clearing.next_pass_ns = self.now_ns + PAUSE_NS;
        }
        if !is_over {
            self.clearing.sweep = Some(sweep);
        } else if sweep.in_use > 0 {
            sweep.again();
            self.clearing.sweep = Some(sweep);
        } else {
            self.residency.erasures.until = None;
        }
        true
    }

    fn is_pass_due(&self) -> bool {
        self.clearing.sweep.is_some() && self.now_ns >= self.clearing.next_pass_ns
    }

    /// Whether the next entry continues the pass.
    pub(super) fn has_passes(&self) -> bool {
        self.is_pass_due() && !self.residency.has_many_erasures()
    }

    /// Whether a pass is under way, or will begin.
    pub(super) fn waits_for_pass(&self) -> bool {
        self.clearing.sweep.is_some()
    }

    /// A write of a payload ends. If the payload's bytes should be erased and the write has failed, the bytes may be on
    /// the medium, and nothing erases them.
    pub(super) fn note_unerased(&mut self, id: NodeId, ok: bool) {
        if !ok && self.residency.is_to_be_erased(id) {
            self.residency.erasures.failures += 1;
        }
    }

    /// Whether a file of a directory is to be synced at the end of an order.
    fn needs_sync(&self, device: DeviceIndex, file: FileKind) -> bool {
        match file {
            FileKind::Super => false,
            FileKind::Table => self.residency.disks()[device.index()].needs_table_sync(),
            FileKind::Data => {
                self.residency.erasures.needs_sync(device)
                    && !self.residency.has_waiting_erasures()
                    && !self.residency.has_removals()
                    && !self.is_pass_due()
                    && self.operations.erasures(device) == 0
            }
        }
    }

    /// Whether a sync can be started, now or after a pause.
    #[inline]
    pub(super) fn has_syncs(&self) -> bool {
        self.residency.devices().any(|device| {
            let is_alive = self.residency.disks()[device.index()].health.is_alive();
            is_alive && SYNCED.iter().any(|&file| self.needs_sync(device, file))
        })
    }

    /// Appends the syncs that end an order.
    pub(super) fn next_syncs(&mut self, out: &mut Vec<IoRequest>) {
        for device in self.residency.devices() {
            for file in SYNCED {
                let disk = &self.residency.disks()[device.index()];
                let takes = disk.health.takes_writes(self.now_ns);
                if !takes || !self.operations.may_write(device) || !self.needs_sync(device, file) {
                    continue;
                }
                match file {
                    FileKind::Data => self.residency.erasures.sync_begins(device),
                    _ => self.residency.disk_mut(device).table_sync_begins(),
                }
                let purpose = Purpose::Sync { device, file };
                let token = self.operations.start(purpose, device, self.now_ns);
                let device = device.number();
                out.push(IoRequest::Sync {
                    token,
                    device,
                    file,
                });
            }
        }
    }

    /// A sync has ended. A failed one is repeated when the directory takes writes.
    pub(super) fn sync_ended(
        &mut self,
        (device, file): (DeviceIndex, FileKind),
        result: Result<u64, IoFault>,
    ) {
        match file {
            FileKind::Data => self.residency.erasures.sync_ended(device, result.is_ok()),
            _ => {
                let disk = self.residency.disk_mut(device);
                disk.table_sync_ended(result.is_ok());
            }
        }
        let health = &mut self.residency.disk_mut(device).health;
        match result {
            Ok(_) => health.write_succeeded(self.now_ns),
            Err(IoFault::Stopped) => {}
            Err(fault) => {
                health.sync_failed(fault, self.now_ns);
                self.counters.write_failures += 1;
            }
        }
    }

    /// Appends erasures to start now, at most `most` of each device.
    pub(super) fn next_erasures(&mut self, most: usize, out: &mut Vec<IoRequest>) {
        for device in self.residency.devices() {
            self.next_erasures_of(device, most, out);
        }
    }

    fn next_erasures_of(&mut self, device: DeviceIndex, most: usize, out: &mut Vec<IoRequest>) {
        let health = &self.residency.disks()[device.index()].health;
        let (is_alive, answers) = (health.is_alive(), health.answers());
        for _ in 0..most {
            let starts = answers
                && self.operations.erasures(device) < most
                && self.operations.may_write(device);
            if is_alive && !starts {
                return;
            }
            let Some((id, group)) = self.residency.erasures.take(device) else {
                return;
            };
            if !is_alive {
                let stopped = Err(IoFault::Stopped);
                self.residency.erasure_ended((id, group), stopped);
                continue;
            }
            let purpose = Purpose::Erase { node: id, group };
            let token = self.operations.start(purpose, device, self.now_ns);
            let (file_offset, len) = self.residency.disk_range(id, group);
            out.push(IoRequest::Erase {
                token,
                device: device.number(),
                file_offset,
                len,
                frees: false,
            });
        }
    }
}

impl Engine {
    /// Evicts from disk some of the payloads that have been unused for too long. Looks at `steps` nodes.
    pub(super) fn evict_unused(&mut self, steps: usize) {
        let (retention, now_s) = (&self.retention, self.unix_s());
        let Some(ttl_s) = retention.ttl_s else {
            return;
        };
        if now_s >= retention.next_s && !retention.has_rest() {
            self.begin_search(now_s, ttl_s);
        }
        let Some(mut cursor) = self.retention.sweep.take() else {
            return;
        };
        let counters = &mut self.counters;
        match self.residency.evict_unused(&mut cursor, steps, counters) {
            true => self.retention.sweep = Some(cursor),
            false => self.retention.swept = Some(cursor.last()),
        }
    }

    /// Begins to look for payloads, if some ticks have become too old.
    fn begin_search(&mut self, now_s: u32, ttl_s: u32) {
        // Uses from now on have a later tick.
        self.residency.next_tick();
        let retention = &mut self.retention;
        retention.next_s = now_s.saturating_add((ttl_s / RETENTION_STEPS).max(1));
        let by_s = now_s.checked_sub(ttl_s);
        let over = by_s.and_then(|by_s| self.ages.over_by(by_s));
        let over = over.filter(|&tick| retention.swept < Some(tick));
        retention.sweep = over.map(UnusedCursor::new);
    }

    /// The tables have been read: payloads that were unused for too long are gone before the first lookup.
    pub(super) fn end_retention_found(&mut self) {
        let steps = self.config.removals;
        self.evict_unused(steps);
        while self.retention.has_rest() {
            self.evict_unused(steps);
            self.tell_listeners();
        }
    }
}

/// The beginning of the digests that an order selects; `None` if it selects by age.
fn digits_of(what: &ClearWhat) -> Result<Option<String>, ClearRefusal> {
    match what {
        ClearWhat::OlderThan(_) => Ok(None),
        ClearWhat::All => Ok(Some(String::new())),
        ClearWhat::Namespace(digits) => {
            let are_digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            if digits.len() < DIGITS_MIN || !are_digits {
                return Err(ClearRefusal::Digits(digits.to_owned()));
            }
            Ok(Some(digits.to_ascii_lowercase()))
        }
    }
}
