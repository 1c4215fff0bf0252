//! An operator: clears blocks, has the engine drain, and sets the sizes of the tiers. And the answers to its orders: after
//! an order that is durable, no restart finds the blocks, whatever was not synced is lost, and whichever directories it
//! has; and erased bytes are nowhere on the medium.

use std::collections::HashSet;

use undercroft_contract::image::DeviceImage;
use undercroft_engine::{
    ClearOrder, ClearRefusal, ClearWhat, Cleared, Engine, EngineConfig, Held, ResizeOrder, Resized,
    Room, Started, TierSize,
};

use crate::arena::Hand;
use crate::participants::{PayloadName, Promise};
use crate::remote::SimRemote;
use crate::world::World;

/// More turns than a pass over all nodes takes.
const TURNS_MAX: usize = 2_000;

impl World {
    /// An operator gives an order.
    pub(crate) fn operate(&mut self) -> Result<(), String> {
        if self.random.chance(250) {
            let cancel = self.random.chance(700);
            let drained = self.engine.with(|engine| engine.drain(cancel));
            self.note(|| format!("drain, cancel {cancel}: {drained:?}"));
            self.history.roomy_broken |= !cancel;
            return self.check_drained();
        }
        if self.random.chance(250) {
            return self.resize_tiers();
        }
        let namespace = self.random.index(self.models.len());
        let what = match self.random.below(10) {
            0..=4 => ClearWhat::Namespace(self.digest(namespace).to_hex()),
            5 => ClearWhat::All,
            6..=7 => ClearWhat::OlderThan(0),
            _ => ClearWhat::OlderThan(self.random.range(1, 2) as u32),
        };
        let erase = self.random.chance(400);
        self.clear(&ClearOrder { what, erase })
    }

    /// Sets sizes between the smallest and the largest, or exactly these.
    fn resize_tiers(&mut self) -> Result<(), String> {
        let now = self.engine.with(|engine| engine.resized());
        let part = self.random.pick(&[300, 600, 700, 800, 900, 1000, 1000]);
        // A directory's size counts its records.
        let of_disk = now.disk.maximum_bytes * 104 / 100 * part / 1000;
        let order = match self.random.below(3) {
            0 => ResizeOrder {
                disk_bytes: Some(of_disk / self.disks.attached.len().max(1) as u64),
                ..ResizeOrder::default()
            },
            _ => ResizeOrder {
                host_bytes: Some(now.host.maximum_bytes * part / 1000),
                ..ResizeOrder::default()
            },
        };
        let given = self.engine.with(|engine| engine.resize(&order, None));
        self.note(|| format!("{order:?}: {given:?}"));
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        self.log.stats.resizes += u64::from(given.is_ok());
        Ok(())
    }

    /// Frees a part of the arena to the system, unless a process has pinned it.
    pub(crate) fn release_memory(&mut self) -> Result<(), String> {
        let mut started = Started::default();
        let room = Room {
            memory: true,
            ..Room::default()
        };
        self.engine.with(|engine| engine.turn(room, &mut started));
        let Some((offset, len)) = started.memory else {
            return Ok(());
        };
        let ok = self.random.chance(900);
        self.note(|| format!("the system gets {offset}+{len} of the arena back: {ok}"));
        if ok {
            self.arena.take(offset, len, Hand::Write, "the system")?;
            self.arena.at_mut(offset, len).fill(0);
            self.arena.release(offset, len, Hand::Write);
            self.log.stats.released += 1;
        }
        self.engine.with(|engine| engine.arena_release_ended(ok));
        Ok(())
    }

    /// When nothing is in use any more, the tiers must reach their sizes.
    pub(crate) fn check_resized(&mut self) -> Result<(), String> {
        let mut resized = Resized::default();
        for _ in 0..TURNS_MAX {
            resized = self.engine.with(|engine| engine.resized());
            if !resized.host.resizing && !resized.disk.resizing {
                let over = |of: &TierSize| of.capacity_bytes > of.target_bytes;
                if over(&resized.host) {
                    return Err(format!("over its size: {resized:?}"));
                }
                self.log.stats.resizes_checked += 1;
                return Ok(());
            }
            self.start_io()?;
            self.set_now(self.clock.now_ns + 1_000_000_000);
            self.end_io()?;
            self.sum()?;
        }
        Err(format!("a resize never ends: {resized:?}"))
    }

    fn clear(&mut self, order: &ClearOrder) -> Result<(), String> {
        let promise = match &order.what {
            ClearWhat::All => self.promise((order.erase, false), |_| true),
            ClearWhat::OlderThan(0) => self.promise((order.erase, true), |_| true),
            ClearWhat::OlderThan(_) => None,
            ClearWhat::Namespace(digest) => self.promise((order.erase, false), |of| of == digest),
        };
        let given = self.engine.with(|engine| engine.clear(order));
        self.note(|| format!("{order:?}: {given:?}"));
        match given {
            Ok(given) => self.note_promise(promise, &given),
            // Sessions of it have been closed, and nothing of it is shared.
            Err(ClearRefusal::Busy | ClearRefusal::Unknown(_)) => return Ok(()),
            Err(refused) => return Err(format!("{order:?}: {refused}")),
        }
        self.log.stats.clears += 1;
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        match &order.what {
            ClearWhat::OlderThan(seconds) => self.cleared_by_age(*seconds),
            ClearWhat::All => self.cleared_namespaces(|_| true),
            ClearWhat::Namespace(digest) => self.cleared_namespaces(|found| found == digest),
        }
    }

    /// Checks that nothing of these namespaces is found any more.
    fn cleared_namespaces(&mut self, is_cleared: impl Fn(&str) -> bool) -> Result<(), String> {
        for namespace in 0..self.models.len() {
            if !is_cleared(&self.digest(namespace).to_hex()) {
                continue;
            }
            self.forget(namespace);
            self.history.saved.retain(|&(of, _, _)| of != namespace);
            self.pins.forget(namespace);
            for of in self.sessions.iter().filter(|of| of.namespace == namespace) {
                let there = self
                    .engine
                    .uncounted(|engine| engine.inspect().announced(of.id));
                if let Some(left) = there.first() {
                    return Err(format!("{left:?} is there after a clear"));
                }
                self.log.stats.clears_checked += 1;
            }
        }
        let attached = &self.disks.attached;
        let away = (0..self.disks.devices.len()).filter(|at| !attached.contains(at));
        self.history.stale.extend(away);
        Ok(())
    }

    /// The pass comes to an end by itself. Blocks unused for longer are gone then, unless they are in use.
    fn cleared_by_age(&mut self, seconds: u32) -> Result<(), String> {
        if self.random.chance(500) {
            return Ok(());
        }
        for _ in 0..TURNS_MAX {
            self.start_io()?;
            if self.disks.in_flight() == 0 {
                // A block of the table waits for others, while payloads wait for the write budget.
                self.set_now(self.clock.now_ns + 10_000_000);
            }
            self.end_io()?;
            let cleared = self.engine.with(|engine| engine.cleared());
            if cleared.removing {
                continue;
            }
            if seconds > 0 || cleared.pending > 0 {
                return Ok(());
            }
            for of in &self.sessions {
                let there = self
                    .engine
                    .uncounted(|engine| engine.inspect().announced(of.id));
                if let Some(left) = there.first() {
                    return Err(format!("{left:?} is there, and said to be cleared"));
                }
            }
            self.log.stats.clears_checked += 1;
            return Ok(());
        }
        match self.disks.is_well() {
            true => Err("a clear never ends".to_owned()),
            // The pass waits for a device that hangs.
            false => Ok(()),
        }
    }

    /// An engine that reports that it has drained has no pending writes.
    pub(crate) fn check_drained(&mut self) -> Result<(), String> {
        let drained = self.engine.with(|engine| engine.drained());
        let writes = self.engine.with(|engine| engine.operations().all > 0);
        let puts = self.remote.as_ref().map_or(0, SimRemote::puts_in_flight);
        if drained.clean && (writes || drained.queued_bytes > 0 || puts > 0) {
            return Err(format!("clean, and at work: {drained:?}"));
        }
        Ok(())
    }
}

/// The payloads that an engine would find in these directories.
fn found(config: &EngineConfig, images: Vec<DeviceImage>) -> HashSet<PayloadName> {
    let mut config = config.clone();
    (config.namespaces_max, config.namespace_entries_max) = (1024, 128);
    config.disk_ttl_s = 0;
    config.remote = None;
    let mut engine = Engine::new(config);
    engine.attach_disks(images);
    engine
        .inspect()
        .held()
        .into_iter()
        .map(|held| held.payload)
        .collect()
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
        self.engine.uncounted(|engine| engine.inspect().held())
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
