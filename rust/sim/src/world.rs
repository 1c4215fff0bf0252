//! A world: an engine, its machine and its clients, from first start to last stop.

use undercroft_core::engine::{Engine, TransferId};
use undercroft_core::io::IoRequest;

use crate::Stats;
use crate::arena::Arena;
use crate::client::Session;
use crate::device::Device;
use crate::disks::Disks;
use crate::model::{Model, Prompts};
use crate::random::Random;
use crate::settings::Settings;

/// Steps between two checks of the engine's invariants.
const CHECK_EVERY: u64 = 24;
/// More rounds of IO than any drain needs.
const DRAIN_ROUNDS: usize = 20_000;
const SECOND: u64 = 1_000_000_000;

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) settings: Settings,
    pub(crate) now_ns: u64,
    /// When a payload read ended last, and when the device was looked at.
    pub(crate) last_read_ns: u64,
    pub(crate) last_look_ns: u64,
    pub(crate) engine: Engine,
    pub(crate) arena: Arena,
    pub(crate) disks: Disks,
    pub(crate) models: Vec<Model>,
    pub(crate) prompts: Prompts,
    pub(crate) sessions: Vec<Session>,
    /// Transfers that have ended.
    pub(crate) ended: Vec<TransferId>,
    /// Namespaces with a reset that is not durable yet.
    pub(crate) undurable: Vec<usize>,
    /// Something did not fit after all, or a crash took it: not everything saved is there.
    pub(crate) roomy_broken: bool,
    /// Numbers the requests.
    pub(crate) names: u64,
    pub(crate) stats: Stats,
    pub(crate) trace: Vec<String>,
    traced: bool,
    /// Payloads on disk at the last orderly stop, if nothing may be missing at the start.
    left_on_disk: Option<u64>,
}

impl World {
    pub(crate) fn new(seed: u64, traced: bool) -> Self {
        let mut random = Random::new(seed);
        let (settings, models) = Settings::random(&mut random);
        let devices = settings.devices.iter();
        let devices = devices
            .map(|&(capacity, page)| Device::new(capacity, page))
            .collect();
        Self {
            now_ns: 0,
            last_read_ns: 0,
            last_look_ns: 0,
            engine: Engine::new(settings.engine.clone()),
            arena: Arena::new(settings.engine.host_bytes),
            disks: Disks::new(devices, settings.depth, settings.latency_ns),
            models,
            prompts: Prompts::default(),
            sessions: Vec::new(),
            ended: Vec::new(),
            undurable: Vec::new(),
            roomy_broken: false,
            names: 0,
            stats: Stats::default(),
            trace: Vec::new(),
            traced,
            left_on_disk: None,
            random,
            settings,
        }
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if self.traced {
            let line = format!("{:>12} {}", self.now_ns, line());
            self.trace.push(line);
        }
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        self.stats.seeds = 1;
        let settings = format!("{:?}", self.settings);
        self.note(|| settings);
        for life in 1..=self.settings.lives {
            self.start()?;
            for step in 0..self.settings.steps {
                self.step()?;
                if self.traced || step % CHECK_EVERY == 0 {
                    self.check()?;
                }
            }
            let last = life == self.settings.lives;
            if last || self.random.chance(250) {
                self.stop()?;
            } else {
                self.crash();
            }
            let counters = self.engine.counters();
            self.stats.disk_reads += counters.disk_reads;
            self.stats.evictions += counters.host_evictions;
            self.stats.corruptions += counters.checksum_failures;
        }
        Ok(())
    }

    /// Starts an engine on what the devices hold.
    fn start(&mut self) -> Result<(), String> {
        let mut config = self.settings.engine.clone();
        if self.random.chance(500) {
            config.seed = self.random.next();
        }
        if !self.settings.roomy && self.random.chance(150) {
            self.resize();
        }
        self.disks.faults = self.settings.faults;
        self.now_ns = 0;
        self.last_read_ns = 0;
        self.last_look_ns = 0;
        self.sessions.clear();
        self.ended.clear();
        self.arena.abandon();
        self.engine = Engine::new(config);
        let images = self.disks.devices.iter().map(Device::image).collect();
        let recovery = self.engine.attach_disks(images);
        self.note(|| format!("start: {recovery:?}"));
        self.stats.recovered += recovery.blocks;
        let blocks = self.engine.gauges().disk_blocks;
        if recovery.blocks != blocks {
            return Err(format!("{recovery:?}, and {blocks} payloads on disk"));
        }
        if let Some(left) = self
            .left_on_disk
            .take()
            .filter(|&left| recovery.blocks < left)
        {
            return Err(format!(
                "{left} payloads were on disk when the engine stopped; at its start: {recovery:?}"
            ));
        }
        self.models.retain(|model| !model.private);
        self.check()?;
        for _ in 0..self.random.range(1, 3) {
            self.open_session()?;
        }
        Ok(())
    }

    /// The operator changes the capacity of a directory.
    fn resize(&mut self) {
        if self.disks.devices.is_empty() {
            return;
        }
        let at = self.random.index(self.disks.devices.len());
        let device = &mut self.disks.devices[at];
        let pages = self.random.range(1, 10);
        device.resize(pages * device.page_bytes);
        self.left_on_disk = None;
        self.note(|| format!("device {at} now has {pages} pages"));
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(100) {
            0..=19 => self.start_io(),
            20..=44 => self.end_io(),
            45..=54 => {
                self.advance();
                Ok(())
            }
            55 if !self.settings.faults.is_none() => {
                self.rot();
                Ok(())
            }
            _ => self.client_step(),
        }
    }

    fn advance(&mut self) {
        let by = match self.random.below(20) {
            0 => self.random.below(SECOND / 4),
            1..=9 => self.random.below(self.settings.latency_ns * 2),
            _ => self.random.below(20_000),
        };
        self.set_now(self.now_ns + by);
    }

    fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.engine.set_now(now_ns);
    }

    /// A record rots.
    fn rot(&mut self) {
        if !self.disks.devices.is_empty() && self.random.chance(100) {
            let at = self.random.index(self.disks.devices.len());
            self.disks.devices[at].corrupt_table(&mut self.random);
        }
    }

    fn start_io(&mut self) -> Result<(), String> {
        let mut requests = Vec::new();
        let room = self.disks.room();
        self.last_look_ns = self.now_ns;
        self.engine.next_io(room, &mut requests);
        if requests.len() > room {
            return Err(format!("{} requests for a room of {room}", requests.len()));
        }
        for request in requests {
            self.note(|| format!("start {}", brief(&request)));
            self.disks
                .submit(request, self.now_ns, &mut self.arena, &mut self.random)?;
        }
        Ok(())
    }

    fn end_io(&mut self) -> Result<(), String> {
        if self.random.chance(600)
            && let Some(due) = self.disks.next_due_ns()
        {
            self.set_now(self.now_ns.max(due));
        }
        for _ in 0..self.random.range(1, 3) {
            let ended = self
                .disks
                .complete(self.now_ns, &mut self.arena, &mut self.random);
            let Some((request, completion)) = ended else {
                break;
            };
            if request.is_read() {
                self.last_read_ns = self.now_ns;
            }
            self.note(|| format!("end {}: {:?}", brief(&request), completion.result));
            self.engine.complete(completion);
        }
        if !self.engine.reset_pending() && !self.engine.reset_failed() {
            for namespace in self.undurable.drain(..) {
                self.models[namespace].entered = self.models[namespace].epoch;
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        let gauges = self.engine.gauges();
        if gauges.host_used_bytes > gauges.host_capacity_bytes
            || gauges.disk_used_bytes > gauges.disk_capacity_bytes
        {
            return Err(format!("over capacity: {gauges:?}"));
        }
        let counters = self.engine.counters();
        self.roomy_broken |= counters.host_evictions
            + counters.disk_evictions
            + counters.refused_host_full
            + counters.refused_disk_full
            + counters.refused_admission
            + counters.refused_write_rate
            > 0;
        self.engine.check()
    }

    fn crash(&mut self) {
        let power_loss = self.random.chance(400);
        self.note(|| format!("crash, power loss: {power_loss}"));
        self.stats.crashes += 1;
        self.stats.power_losses += u64::from(power_loss);
        self.disks.crash(power_loss, &self.arena, &mut self.random);
        self.roomy_broken = true;
        self.left_on_disk = None;
        for namespace in self.undurable.drain(..) {
            self.models[namespace].must_reset = true;
        }
    }

    /// The end in good order: everybody gets an answer, leaves, and all is written.
    fn stop(&mut self) -> Result<(), String> {
        self.stats.restarts += 1;
        self.answer_everybody()?;
        self.note(|| "everybody leaves".to_owned());
        while let Some(session) = self.sessions.len().checked_sub(1) {
            self.finish_transfers(session)?;
            self.close_session(session)?;
        }
        self.disks.heal(self.now_ns);
        let mut rounds = 0;
        while !self.engine.is_quiet() || self.disks.in_flight() > 0 {
            self.start_io()?;
            if self.disks.in_flight() == 0 {
                // Writes pause after failures, and the write budget accrues.
                self.set_now(self.now_ns + SECOND);
            }
            self.end_io()?;
            rounds += 1;
            if rounds > DRAIN_ROUNDS {
                return Err(format!(
                    "IO never comes to rest: {:?}",
                    self.engine.gauges()
                ));
            }
        }
        self.check()?;
        self.nothing_is_left()?;
        for namespace in self.undurable.drain(..) {
            self.models[namespace].must_reset = true;
        }
        self.count_stored()
    }

    /// No request waits for longer than the engine's limit, even if the disk answers no more.
    fn answer_everybody(&mut self) -> Result<(), String> {
        if self.settings.roomy {
            return Ok(());
        }
        for _ in 0..6 {
            for session in 0..self.sessions.len() {
                for request in 0..self.sessions[session].requests.len() {
                    self.poll(session, request)?;
                }
            }
            self.set_now(self.now_ns + self.settings.engine.stall_ns + 1);
            self.start_io()?;
        }
        Ok(())
    }

    fn finish_transfers(&mut self, session: usize) -> Result<(), String> {
        while !self.sessions[session].loads.is_empty() || !self.sessions[session].saves.is_empty() {
            self.transfer_step(session)?;
        }
        Ok(())
    }

    fn nothing_is_left(&self) -> Result<(), String> {
        let gauges = self.engine.gauges();
        let left = gauges.jobs
            + gauges.loads
            + gauges.saves
            + gauges.sessions
            + gauges.host_pinned_bytes
            + gauges.promotion_queue_bytes;
        if left > 0 || !self.arena.is_idle() {
            return Err(format!("in use although everybody left: {gauges:?}"));
        }
        Ok(())
    }

    /// Compares what is on disk with what was saved, where nothing may be missing.
    fn count_stored(&mut self) -> Result<(), String> {
        let sound = self.settings.faults.is_none();
        let on_disk = self.engine.gauges().disk_blocks;
        if sound {
            self.left_on_disk = Some(on_disk);
        }
        let stored: usize = self.models.iter().map(|model| model.stored.len()).sum();
        let complete = self.settings.roomy && !self.roomy_broken && !self.disks.devices.is_empty();
        self.stats.complete_stops += u64::from(complete);
        if complete && on_disk != stored as u64 {
            return Err(format!(
                "{stored} payloads were saved, {on_disk} are on disk"
            ));
        }
        if self.disks.devices.is_empty() {
            self.models
                .iter_mut()
                .for_each(|model| model.stored.clear());
        }
        Ok(())
    }
}

fn brief(request: &IoRequest) -> String {
    match request {
        IoRequest::ReadPayload {
            device,
            file_offset,
            arena_offset,
            len,
            ..
        } => {
            format!("read of {device}:{file_offset}+{len} to {arena_offset}")
        }
        IoRequest::WritePayload {
            device,
            file_offset,
            arena_offset,
            len,
            ..
        } => {
            format!("write of {arena_offset}+{len} to {device}:{file_offset}")
        }
        IoRequest::WriteMeta {
            device,
            file,
            file_offset,
            sync,
            ..
        } => {
            format!("write of {device}:{file:?} at {file_offset}, sync {sync}")
        }
    }
}
