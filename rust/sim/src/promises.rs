//! What an operator is told: after an order that is durable, no restart finds the blocks, whatever was not synced is
//! lost, and whichever directories it has; and erased bytes are nowhere on the medium.

use std::collections::HashSet;

use undercroft_core::disk::DeviceImage;
use undercroft_core::engine::{Cleared, Engine, EngineConfig, Held};
use undercroft_core::key::{BlockHash, NamespaceDigest};

use crate::content::Token;
use crate::world::World;

/// A payload by its namespace, hash and group.
pub(crate) type PayloadName = (NamespaceDigest, BlockHash, u8);

/// The last order to clear, until its promise has been checked.
#[derive(Debug)]
pub(crate) struct Promise {
    order: u64,
    erases: bool,
    /// Whether the order selected the blocks by their age: blocks in use are not among them.
    by_age: bool,
    /// The payloads that a restart would have found.
    before: HashSet<PayloadName>,
    /// The payloads' bytes on disk: directory, offset, sectors.
    bytes: Vec<(PayloadName, usize, u64, Vec<Token>)>,
    /// Payloads that were saved since.
    pub(crate) saved: HashSet<PayloadName>,
}

/// The payloads that an engine would find in these directories.
fn found(config: &EngineConfig, images: Vec<DeviceImage>) -> HashSet<PayloadName> {
    let mut config = config.clone();
    (config.namespaces_max, config.namespace_entries_max) = (1024, 128);
    config.disk_ttl_s = 0;
    config.remote = None;
    let mut engine = Engine::new(config);
    engine.attach_disks(images);
    engine.held().into_iter().map(|held| held.payload).collect()
}

impl World {
    /// The payloads that a restart now would find, if all that is not durable were lost, or nothing. The engine has any
    /// one of the directories, or all.
    fn found_by_restarts(&self) -> HashSet<PayloadName> {
        let devices = self
            .disks
            .attached
            .iter()
            .map(|&at| &self.disks.devices[at]);
        let devices: Vec<_> = devices.collect();
        let config = &self.settings.engine;
        let mut all = HashSet::new();
        for durable in [false, true] {
            let images = || {
                devices.iter().map(|device| match durable {
                    true => device.durable_image(),
                    false => device.image(),
                })
            };
            all.extend(found(config, images().collect()));
            if devices.len() > 1 {
                images().for_each(|image| all.extend(found(config, vec![image])));
            }
        }
        all
    }

    fn held(&self) -> Vec<Held> {
        self.engine.uncounted(|engine| engine.held())
    }

    /// The promise of an order that selects all blocks, or all blocks of some namespaces.
    pub(crate) fn promise(
        &self,
        (erases, by_age): (bool, bool),
        is_cleared: impl Fn(&str) -> bool,
    ) -> Option<Promise> {
        // Blocks of a remote store come back at any time.
        if self.remote.is_some() {
            return None;
        }
        let is_cleared = |(digest, ..): &PayloadName| is_cleared(&digest.to_hex());
        let before = self.found_by_restarts().into_iter().filter(is_cleared);
        let held = self
            .held()
            .into_iter()
            .filter(|held| is_cleared(&held.payload));
        let bytes = held.filter_map(|Held { payload, place }| {
            let (device, offset, len) = place?;
            let at = self.disks.attached[usize::from(device)];
            let sectors = self.disks.devices[at].at(offset, u64::from(len));
            Some((payload, at, offset, sectors.to_vec()))
        });
        Some(Promise {
            order: 0,
            erases,
            by_age,
            before: before.collect(),
            bytes: bytes.collect(),
            saved: HashSet::new(),
        })
    }

    /// The order was given: its promise is checked when it is durable.
    pub(crate) fn note_promise(&mut self, promise: Option<Promise>, given: &Cleared) {
        let order = given.order;
        self.history.promise = promise.map(|promise| Promise { order, ..promise });
    }

    /// Checks the promise of the last order, if it is durable.
    pub(crate) fn check_promise(&mut self) -> Result<(), String> {
        let Some(promise) = &self.history.promise else {
            return Ok(());
        };
        let cleared = self.engine.uncounted(|engine| engine.cleared());
        let is_void = cleared.order != promise.order
            || promise.by_age && cleared.pending > 0
            || self.disks.lied;
        if !is_void && (!cleared.durable || cleared.removing || cleared.pending > 0) {
            return Ok(());
        }
        let Some(promise) = self.history.promise.take().filter(|_| !is_void) else {
            return Ok(());
        };
        let mut there = promise.saved;
        there.extend(self.held().into_iter().map(|held| held.payload));
        let found = self.found_by_restarts();
        let again = found.intersection(&promise.before);
        if let Some(again) = again.into_iter().find(|of| !there.contains(of)) {
            return Err(format!(
                "a restart finds {again:?} after a durable clear: {cleared:?}"
            ));
        }
        self.log.stats.promises += 1;
        if !promise.erases || cleared.erase_failures > 0 {
            return Ok(());
        }
        for (payload, at, offset, bytes) in &promise.bytes {
            let len = bytes.len() as u64 * crate::content::SECTOR;
            let device = &self.disks.devices[*at];
            for now in [device.at(*offset, len), device.durable_at(*offset, len)] {
                let mut pairs = bytes.iter().zip(now);
                let is_left = pairs.any(|(before, now)| *before != 0 && before == now);
                if is_left && !there.contains(payload) {
                    return Err(format!(
                        "bytes at {at}:{offset} are not erased: {cleared:?}"
                    ));
                }
            }
            self.log.stats.erased_checked += 1;
        }
        Ok(())
    }
}
