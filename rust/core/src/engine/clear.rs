//! Blocks that an operator has cleared.
//!
//! A namespace that is cleared begins another life, as at a reset: no lookup finds any of its blocks from that entry
//! on, nor does a restart. A clear by age searches all nodes in a pass. Both remove blocks from the leaves up, in
//! steps. Blocks in use are removed when their last use ends.

use serde::{Deserialize, Serialize};

use crate::forest::{DeviceIndex, NsId};
use crate::io::{IoFault, IoRequest};

use super::coordinator::Engine;
use super::operations::Purpose;
use super::residency::{ClearTotals, Leaving, Sweep};

/// Pause before nodes that were in use are looked at again, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
/// Most erasures that one entry starts, and that a device has at once: a filesystem delays other work on the file
/// meanwhile.
const ERASURES: usize = 4;
/// Fewer digits of a digest could name another namespace by mistake.
const DIGITS_MIN: usize = 8;

/// Which blocks to clear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClearWhat {
    /// All blocks of all namespaces.
    All,
    /// The blocks of the namespaces whose digest begins with these hexadecimal digits, eight or more.
    Namespace(String),
    /// Blocks that no request has used for this many seconds.
    OlderThan(u32),
}

/// An order to clear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClearOrder {
    /// Which blocks.
    pub what: ClearWhat,
    /// The blocks' bytes on disk are erased, too.
    pub erase: bool,
}

/// The result of the last order so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cleared {
    /// Number of the order; 0 before the first.
    pub order: u64,
    /// Payloads in host memory that no lookup finds any more.
    pub host_blocks: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Payloads on disk that no lookup finds any more.
    pub disk_blocks: u64,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Bytes erased from the data files.
    pub erased_bytes: u64,
    /// Payloads whose bytes could not be erased.
    pub erase_failures: u64,
    /// Hash blocks that are left: not reached, in use, or being erased.
    pub pending: u64,
    /// Whether the engine continues to remove blocks. If not, the pending ones wait for the end of their use, or for a
    /// directory that does not answer.
    pub removing: bool,
    /// Whether no restart finds any of the blocks. False while a directory is away or takes no writes.
    pub durable: bool,
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClearRefusal {
    /// Another order is under way.
    #[error("another clear is under way; ask again when it has ended")]
    Busy,
    /// No namespace has such a digest.
    #[error(
        "no namespace has a digest that begins with {0}; undercroft inspect and explain show digests"
    )]
    Unknown(String),
    /// The digest is too short.
    #[error("namespace {0:?}: allowed are {DIGITS_MIN} or more hexadecimal digits of its digest")]
    Digits(String),
}

/// The last order, and the pass under way.
#[derive(Debug, Default)]
pub(super) struct Clearing {
    order: u64,
    /// Indices that namespaces had before the order ended their lives.
    gone: Vec<NsId>,
    sweep: Option<Sweep>,
    /// Nodes that the last pass of the order found in use.
    in_use: Option<u64>,
    next_pass_ns: u64,
    /// Erased bytes and failures when the order came.
    erased_before: (u64, u64),
}

impl Engine {
    /// Begins to clear; [`Engine::cleared`] returns the progress.
    ///
    /// # Errors
    /// If another order is under way, or names no namespace.
    pub fn clear(&mut self, order: &ClearOrder) -> Result<Cleared, ClearRefusal> {
        if self.cleared().removing {
            return Err(ClearRefusal::Busy);
        }
        let namespaces = self.namespaces_of(&order.what)?;
        let number = self.clearing.order + 1;
        self.residency.end_pass();
        let erasures = &self.residency.erasures;
        self.clearing = Clearing {
            order: number,
            erased_before: (erasures.bytes, erasures.failures),
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
        }
        Ok(self.cleared())
    }

    /// The namespaces that an order selects.
    fn namespaces_of(&self, what: &ClearWhat) -> Result<Vec<NsId>, ClearRefusal> {
        let digits = match what {
            ClearWhat::OlderThan(_) => return Ok(Vec::new()),
            ClearWhat::All => "",
            ClearWhat::Namespace(digits) => digits,
        };
        let are_digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if *what != ClearWhat::All && (digits.len() < DIGITS_MIN || !are_digits) {
            return Err(ClearRefusal::Digits(digits.to_owned()));
        }
        let digits = digits.to_ascii_lowercase();
        let is_used = |ns| self.sessions.uses(ns);
        let found = self.namespaces.named(&digits, is_used);
        if found.is_empty() && *what != ClearWhat::All {
            return Err(ClearRefusal::Unknown(digits));
        }
        Ok(found)
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
        } else {
            self.namespaces.vacate(ns, &mut self.residency);
        }
        self.residency.set_leaving(ns, Some(leaving));
        self.clearing.gone.push(ns);
    }

    /// The last tick that was over `seconds` ago. Blocks used after it are too young to be cleared.
    fn tick_before(&self, seconds: u32) -> Option<u64> {
        let at_s = self.unix_s().checked_sub(seconds)?;
        self.residency.ages.last_by(at_s)
    }

    /// The progress of the last order.
    pub fn cleared(&self) -> Cleared {
        let (residency, clearing) = (&self.residency, &self.clearing);
        let totals = &residency.cleared;
        let mut cleared = Cleared {
            order: clearing.order,
            erased_bytes: residency.erasures.bytes - clearing.erased_before.0,
            erase_failures: residency.erasures.failures - clearing.erased_before.1,
            durable: !self.namespaces.reset_pending() && !self.namespaces.reset_failed(),
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
        let is_going = |ns: &NsId| left(ns) > 0 && residency.is_ending(*ns);
        cleared.removing |= clearing.gone.iter().any(is_going);
        if let Some(sweep) = &clearing.sweep {
            cleared.removing |= clearing.in_use.is_none();
            cleared.pending += clearing.in_use.unwrap_or(sweep.in_use);
        }
        if clearing.gone.is_empty() {
            cleared.pending += residency.erasures.len() as u64;
        }
        cleared
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
    pub(super) fn step_pass(&mut self) -> bool {
        if !self.is_pass_due() {
            return false;
        }
        let Some(mut sweep) = self.clearing.sweep.take() else {
            return false;
        };
        let is_over = self.residency.step_sweep(&mut sweep, self.config.removals);
        if is_over {
            self.clearing.in_use = Some(sweep.in_use);
            self.clearing.next_pass_ns = self.now_ns + PAUSE_NS;
        }
        if !is_over {
            self.clearing.sweep = Some(sweep);
        } else if sweep.in_use > 0 {
            sweep.again();
            self.clearing.sweep = Some(sweep);
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

    /// Appends erasures to start now.
    pub(super) fn next_erasures(&mut self, out: &mut Vec<IoRequest>) {
        for device in self.residency.devices() {
            self.next_erasures_of(device, out);
        }
    }

    fn next_erasures_of(&mut self, device: DeviceIndex, out: &mut Vec<IoRequest>) {
        let health = &self.residency.disks()[device.index()].health;
        let (is_alive, answers) = (health.is_alive(), health.answers());
        for _ in 0..ERASURES {
            let starts = answers
                && self.operations.erasures(device) < ERASURES
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
