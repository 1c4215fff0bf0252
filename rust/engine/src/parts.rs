//! The parts that promotions, write-back and the remote store work on, beside their own fields.

use crate::metrics::Counters;

use super::ages::Ages;
use super::checksums::Checksums;
use super::config::EngineConfig;
use super::fetch::Shares;
use super::namespaces::Namespaces;
use super::operations::Operations;
use super::planner::Rates;
use super::residency::Residency;

/// The parts that the engine lends for one call.
#[derive(Debug)]
pub(super) struct EngineParts<'a> {
    pub(super) config: &'a EngineConfig,
    pub(super) namespaces: &'a Namespaces,
    pub(super) residency: &'a mut Residency,
    pub(super) shares: &'a mut Shares,
    pub(super) operations: &'a mut Operations,
    pub(super) checksums: &'a mut Checksums,
    pub(super) rates: &'a mut Rates,
    pub(super) ages: &'a Ages,
    pub(super) counters: &'a mut Counters,
    pub(super) now_ns: u64,
}

impl EngineParts<'_> {
    /// Whether any device takes one more write.
    pub(super) fn any_takes_a_write(&self) -> bool {
        let mut devices = self.residency.devices();
        devices.any(|device| self.operations.may_write(device))
    }
}
