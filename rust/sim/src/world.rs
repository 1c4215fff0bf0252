//! A world: an engine, its machine and its clients, from the first start to the last stop.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use undercroft_contract::io::{ChecksumRequest, IoRequest};
use undercroft_contract::key::NamespaceDigest;
use undercroft_engine::{Due, Engine, Room, Started};

use crate::arena::SimArena;
use crate::brief::brief;
use crate::content::PrefixKey;
use crate::device::SimDevice;
use crate::disks::Disks;
use crate::log::Log;
use crate::model::{Model, Prompts};
use crate::participants::{Ends, Promise, SimClient, SimPins};
use crate::random::Random;
use crate::remote::SimRemote;
use crate::settings::{LONG_TTL_S, Settings};
use crate::shared::{SharedEngine, UNITS_MAX};

/// Steps between two checks of the engine's invariants.
const CHECK_EVERY: u64 = 24;
/// More rounds than the answers to a few requests need.
const ANSWER_ROUNDS: usize = 2_000;
/// More rounds of IO than any drain needs.
const DRAIN_ROUNDS: usize = 20_000;
/// Turns for the remaining work of entries, for each such round.
const REST_ROUNDS: usize = 100;
const SECOND: u64 = 1_000_000_000;

/// The virtual time.
#[derive(Debug, Default)]
pub(crate) struct VirtualClock {
    pub(crate) now_ns: u64,
    /// The right time at the start of the life, in seconds since 1970.
    pub(crate) unix_s: u64,
}

/// The events on which later checks depend.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The ends of transfers in this life.
    pub(crate) ends: Ends,
    /// Namespaces with a reset that is not durable yet.
    pub(crate) undurable: Vec<usize>,
    /// Whether something did not fit after all or was lost in a crash, so that saved blocks may be missing.
    pub(crate) roomy_broken: bool,
    /// Number of requests so far.
    pub(crate) names: u64,
    /// Directories that were out of reach during a reset, and still hold their earlier contents.
    pub(crate) stale: BTreeSet<usize>,
    /// Bits that have flipped in the arena in this life.
    pub(crate) changes: u64,
    /// Blocks that were saved in this life: namespace, weights, block.
    pub(crate) saved: HashSet<(usize, u64, PrefixKey)>,
    /// Sessions that were opened or closed so far.
    pub(crate) uses: u64,
    /// Payloads on disk at the last orderly stop, if nothing may be missing at the start.
    pub(crate) left_on_disk: Option<u64>,
    /// The last order to clear.
    pub(crate) promise: Option<Promise>,
    /// Namespaces that were in all tables at the last orderly stop, if none may be missing at the start.
    pub(crate) kept_namespaces: HashSet<NamespaceDigest>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) settings: Settings,
    pub(crate) clock: VirtualClock,
    pub(crate) engine: Arc<SharedEngine>,
    pub(crate) arena: SimArena,
    pub(crate) disks: Disks,
    pub(crate) remote: Option<SimRemote>,
    /// Checksums that are being computed.
    pub(crate) checksums: Vec<ChecksumRequest>,
    pub(crate) models: Vec<Model>,
    pub(crate) prompts: Prompts,
    pub(crate) sessions: Vec<SimClient>,
    /// Sessions in the middle of a save by steps, one inside the other.
    pub(crate) saving: Vec<usize>,
    pub(crate) pins: SimPins,
    pub(crate) history: History,
    pub(crate) log: Log,
}

impl World {
    pub(crate) fn new(seed: u64, traced: bool) -> Self {
        let mut random = Random::new(seed);
        let (settings, models) = Settings::random(&mut random);
        let sizes = settings.devices.iter().enumerate();
        let devices = sizes.map(|(at, &size)| SimDevice::new(at, size, settings.encrypted));
        let devices = devices.collect();
        Self {
            clock: VirtualClock {
                now_ns: 0,
                unix_s: settings.engine.unix_at_zero_s,
            },
            engine: SharedEngine::new(Engine::new(settings.engine.clone())),
            arena: SimArena::new(settings.engine.host_bytes),
            disks: Disks::new(devices, settings.depth, settings.latency_ns),
            remote: settings
                .engine
                .remote
                .as_ref()
                .map(|_| SimRemote::new(&mut random)),
            checksums: Vec::new(),
            models,
            prompts: Prompts::default(),
            sessions: Vec::new(),
            saving: Vec::new(),
            pins: SimPins::default(),
            history: History::default(),
            log: Log::new(traced),
            random,
            settings,
        }
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        self.log.note(self.clock.now_ns, line);
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        self.log.stats.seeds = 1;
        let settings = format!("{:?}", self.settings);
        self.note(|| settings);
        for life in 1..=self.settings.lives {
            self.start()?;
            for step in 0..self.settings.steps {
                self.step()?;
                if self.log.is_traced() || step % CHECK_EVERY == 0 {
                    self.check()?;
                }
            }
            self.count_given_up();
            let last = life == self.settings.lives;
            if last || self.random.chance(250) {
                self.stop()?;
            } else {
                self.crash();
            }
            let counters = self.engine.with(|engine| *engine.counters());
            let most = self.engine.most_work();
            self.log.add_to_sum(&format!("{counters:?} {most:?}"));
            self.log.stats.disk_reads += counters.disk_reads;
            self.log.stats.remote_gets += counters.remote_gets;
            self.log.stats.remote_tokens += counters.remote_hit_tokens;
            self.log.stats.remote_corrupt += counters.remote_corrupt;
            self.log.stats.evictions += counters.host_evictions;
            let moves = self.engine.with(|engine| engine.inspect().moves());
            self.log.stats.moved_runs += moves.runs;
            self.log.stats.gaps += moves.gaps;
            self.log.stats.filled_gaps += moves.filled_gaps;
            self.log.stats.corruptions += counters.checksum_failures;
            self.log.stats.undecrypted += counters.decryption_failures;
            self.log.stats.changes_found += counters.host_checksum_failures;
        }
        Ok(())
    }

    /// Starts an engine on the contents of the devices.
    fn start(&mut self) -> Result<(), String> {
        let mut config = self.settings.engine.clone();
        // The engine cannot know the instances on a directory that is away: real seeds differ.
        if self.settings.away + self.settings.late > 0 || self.random.chance(500) {
            config.seed = self.random.next();
        }
        if !self.settings.roomy && self.random.chance(150) {
            self.resize();
        }
        self.surround(&mut config);
        (self.disks.faults, self.disks.lied) = (self.settings.faults, false);
        self.clock.now_ns = 0;
        self.history.promise = None;
        self.sessions.clear();
        self.pins = SimPins::default();
        self.history.ends = Ends::default();
        self.history.changes = 0;
        self.history.saved.clear();
        self.checksums.clear();
        self.arena.abandon();
        self.leave_and_come_back();
        if self.remote.is_some() && self.random.chance(300) {
            self.move_to_another_host();
        }
        self.disks.absent.clear();
        self.lose_some();
        self.tamper();
        if let Some(remote) = &mut self.remote {
            remote.key = self.settings.encrypted.then_some(self.disks.key);
        }
        self.engine = SharedEngine::new(Engine::new(config));
        if self.settings.tells_depth {
            let depth = self.settings.depth;
            self.engine.with(|engine| engine.set_io_depth(depth));
        }
        let images = self.disks.images();
        let recovery = self.engine.uncounted(|engine| engine.attach_disks(images));
        self.engine.with(Engine::attach_remote);
        self.note(|| format!("start: {recovery:?}"));
        self.log.stats.recovered += recovery.blocks;
        let blocks = self.engine.with(|engine| engine.gauges().disk_blocks);
        if recovery.blocks != blocks {
            return Err(format!("{recovery:?}, and {blocks} payloads on disk"));
        }
        if let Some(left) = self
            .history
            .left_on_disk
            .take()
            .filter(|&left| recovery.blocks < left)
        {
            return Err(format!(
                "{left} payloads were on disk when the engine stopped; at its start: {recovery:?}"
            ));
        }
        self.models.retain(|model| !model.private);
        self.check_remembered()?;
        self.check()?;
        for _ in 0..self.random.range(1, 3) {
            self.open_session()?;
        }
        Ok(())
    }

    /// Takes some directories away for a life, and brings others back. The operator has emptied a directory that was
    /// away during a reset, as the documents require.
    fn leave_and_come_back(&mut self) {
        let before = std::mem::take(&mut self.disks.attached);
        for at in 0..self.disks.devices.len() {
            if self.random.chance(self.settings.away) {
                continue;
            }
            self.disks.attached.push(at);
            if self.history.stale.remove(&at) {
                self.note(|| format!("the operator empties directory {at}"));
                let size = self.settings.devices[at];
                self.disks.devices[at] = SimDevice::new(at, size, self.settings.encrypted);
            }
        }
        if before != self.disks.attached || before.is_empty() {
            // Blocks whose ancestors are on an absent directory are dropped.
            self.history.roomy_broken = true;
            self.history.left_on_disk = None;
            self.history.kept_namespaces.clear();
            self.log.stats.away += 1;
            let attached = self.disks.attached.clone();
            self.note(|| format!("the engine has directories {attached:?}"));
        }
    }

    /// The next engine runs on another host: it shares only the remote store with the last engine.
    fn move_to_another_host(&mut self) {
        let is_encrypted = self.settings.encrypted;
        for (at, &size) in self.settings.devices.iter().enumerate() {
            self.disks.devices[at] = SimDevice::new(at, size, is_encrypted);
        }
        self.history.stale.clear();
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        self.history.kept_namespaces.clear();
        self.log.stats.moves += 1;
        self.note(|| "another host".to_owned());
    }

    fn step(&mut self) -> Result<(), String> {
        if self.random.chance(self.settings.hangs) && !self.disks.attached.is_empty() {
            let device = self.random.index(self.disks.attached.len());
            let hangs = self.disks.toggle(device);
            self.log.stats.hangs += u64::from(hangs);
            self.note(|| format!("device {device} hangs: {hangs}"));
        }
        self.surround_step()?;
        if self.remote.is_some() && self.random.chance(300) {
            self.remote_turn()?;
        }
        match self.random.below(100) {
            0..=19 => self.start_io(),
            20..=44 => self.end_io(),
            45..=54 => {
                self.advance();
                if self.settings.is_punctual() {
                    self.start_io()?;
                }
                Ok(())
            }
            55 if !self.settings.faults.is_none() => {
                self.rot();
                Ok(())
            }
            56 if self.settings.changes => {
                self.change_a_payload();
                Ok(())
            }
            57..=60 => self.sum(),
            _ => self.client_step(),
        }
    }

    fn advance(&mut self) {
        let by = match self.random.below(20) {
            0 => self.random.below(SECOND / 4),
            1..=9 => self.random.below(self.settings.latency_ns * 2),
            _ => self.random.below(20_000),
        };
        self.set_now(self.clock.now_ns + by);
    }

    pub(crate) fn set_now(&mut self, now_ns: u64) {
        self.clock.now_ns = now_ns;
        self.engine.with(|engine| engine.set_now(now_ns));
    }

    /// Damages a record.
    fn rot(&mut self) {
        if !self.disks.devices.is_empty() && self.random.chance(100) {
            let at = self.random.index(self.disks.devices.len());
            self.disks.devices[at].corrupt_table(&mut self.random);
        }
    }

    /// The work of the IO thread: takes ended operations, and starts the operations that the engine requests.
    pub(crate) fn start_io(&mut self) -> Result<(), String> {
        if self.settings.is_punctual() {
            while self.complete_one() {}
        }
        let mut started = Started::default();
        let mut rooms = self.disks.rooms();
        self.engine
            .with(|engine| engine.turn(Room::io(&rooms[..]), &mut started));
        self.release_memory()?;
        for request in started.io {
            let device = usize::from(request.device());
            rooms[device] = rooms[device]
                .checked_sub(1)
                .ok_or_else(|| format!("more for device {device} than it has room for"))?;
            self.note(|| format!("start {}", brief(&request)));
            self.disks.submit(
                request,
                self.clock.now_ns,
                &mut self.arena,
                &mut self.random,
            )?;
        }
        // With operations in flight, the next look at the devices would be due.
        if self.engine.with(|engine| engine.wake()) == Due::Event {
            return Err(
                "a job waits for the end of an operation, and none is in flight".to_owned(),
            );
        }
        Ok(())
    }

    pub(crate) fn end_io(&mut self) -> Result<(), String> {
        if self.random.chance(600)
            && let Some(due) = self.disks.next_due_ns()
        {
            self.set_now(self.clock.now_ns.max(due));
        }
        for _ in 0..self.random.range(1, 3) {
            if !self.complete_one() {
                break;
            }
        }
        let durable = |engine: &mut Engine| !engine.reset_pending() && !engine.reset_failed();
        if self.engine.with(durable) {
            for namespace in self.history.undurable.drain(..) {
                self.models[namespace].entered = self.models[namespace].epoch;
            }
        }
        Ok(())
    }

    /// Takes the end of an operation that is due, if there is one.
    fn complete_one(&mut self) -> bool {
        let ended = self
            .disks
            .complete(self.clock.now_ns, &mut self.arena, &mut self.random);
        let Some((request, completion)) = ended else {
            return false;
        };
        self.note(|| format!("end {}: {:?}", brief(&request), completion.result));
        let is_erasure = matches!(request, IoRequest::Erase { frees: false, .. });
        self.log.stats.erased += u64::from(is_erasure && completion.result.is_ok());
        self.engine.with(|engine| engine.complete(completion));
        true
    }

    fn check(&mut self) -> Result<(), String> {
        let gauges = self.engine.with(|engine| engine.gauges());
        if gauges.host_used_bytes > gauges.host_capacity_bytes
            || gauges.disk_used_bytes > gauges.disk_capacity_bytes
        {
            return Err(format!("over capacity: {gauges:?}"));
        }
        let counters = self.engine.with(|engine| *engine.counters());
        if counters.host_checksum_failures > self.history.changes {
            return Err(format!(
                "{} payloads are said to have changed, and {} have",
                counters.host_checksum_failures, self.history.changes
            ));
        }
        self.history.roomy_broken |= counters.host_evictions
            + counters.disk_evictions
            + counters.refused_host_full
            + counters.refused_disk_full
            + counters.refused_admission
            + counters.refused_write_rate
            + counters.refused_disk_behind
            > 0;
        if self.settings.is_punctual() && counters.promotions_given_up > 0 {
            return Err("a lookup was given up although its device delivers".to_owned());
        }
        self.check_ends(&counters)?;
        self.engine.uncounted(|engine| engine.inspect().check())?;
        let most = self.engine.most_work();
        self.log.stats.most_units = self.log.stats.most_units.max(most.units());
        if most.units() > UNITS_MAX {
            return Err(format!(
                "an entry did {} units of work: {most:?}",
                most.units()
            ));
        }
        Ok(())
    }

    fn crash(&mut self) {
        let power_loss = self.random.chance(400);
        self.note(|| format!("crash, power loss: {power_loss}"));
        self.log.stats.crashes += 1;
        self.log.stats.power_losses += u64::from(power_loss);
        self.disks.crash(power_loss, &self.arena, &mut self.random);
        if let Some(remote) = &mut self.remote {
            remote.crash(&self.arena, &mut self.random);
        }
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        self.history.kept_namespaces.clear();
        for namespace in self.history.undurable.drain(..) {
            self.models[namespace].must_reset = true;
        }
    }

    /// The orderly stop: all requests are answered and finish, and all payloads are written.
    fn stop(&mut self) -> Result<(), String> {
        self.log.stats.restarts += 1;
        self.answer_everybody()?;
        self.check_routers()?;
        self.note(|| "everybody leaves".to_owned());
        while let Some(session) = self.sessions.len().checked_sub(1) {
            self.finish_transfers(session)?;
            self.close_session(session)?;
        }
        self.disks.heal(self.clock.now_ns);
        let now_ns = self.clock.now_ns;
        let faults = self.remote.as_mut().map(|remote| remote.heal(now_ns));
        self.engine.with(|engine| engine.drain(false));
        self.end_pins()?;
        let mut rounds = 0;
        let rests = |engine: &mut Engine| {
            engine.is_quiet() && engine.wake() != Due::Now && !engine.inspect().has_remote_work()
        };
        while !self.engine.with(rests) || self.disks.in_flight() > 0 {
            self.start_io()?;
            self.remote_turn()?;
            if self.disks.in_flight() == 0 {
                // Writes pause after failures, and the write budget accrues.
                self.set_now(self.clock.now_ns + SECOND);
            }
            self.end_io()?;
            self.sum()?;
            // The remaining work of entries may take any number of turns without IO, but it ends.
            rounds += if self.engine.with(|engine| engine.wake() == Due::Now) {
                1
            } else {
                REST_ROUNDS
            };
            if rounds > DRAIN_ROUNDS * REST_ROUNDS {
                return Err(format!(
                    "IO never comes to rest: {:?}",
                    self.engine.with(|engine| engine.gauges())
                ));
            }
        }
        self.check_resized()?;
        self.check_drained()?;
        self.check_remote()?;
        if let (Some(remote), Some(faults)) = (&mut self.remote, faults) {
            remote.faults = faults;
        }
        self.check()?;
        self.nothing_is_left()?;
        for namespace in self.history.undurable.drain(..) {
            self.models[namespace].must_reset = true;
        }
        self.count_stored()
    }

    /// Every request is answered once answered requests finish, even if a device does not answer any more.
    fn answer_everybody(&mut self) -> Result<(), String> {
        for session in 0..self.sessions.len() {
            self.finish_transfers(session)?;
        }
        for _ in 0..ANSWER_ROUNDS {
            let mut pending = 0;
            for session in 0..self.sessions.len() {
                pending += self.answer_session(session)?;
            }
            if pending == 0 {
                return Ok(());
            }
            self.start_io()?;
            self.remote_turn()?;
            self.sum()?;
            match self.disks.next_due_ns().filter(|_| self.remote.is_none()) {
                Some(due) => self.set_now(self.clock.now_ns.max(due)),
                None => self.set_now(self.clock.now_ns + self.settings.engine.stall_ns + 1),
            }
            while self.complete_one() {}
        }
        Err("a request waits although everybody else has left".to_owned())
    }

    /// Looks up each request of a session, and finishes the answered requests. Returns the number of the others.
    fn answer_session(&mut self, session: usize) -> Result<usize, String> {
        let mut at = 0;
        while at < self.sessions[session].requests.len() {
            let tokens = self.sessions[session].requests[at].tokens;
            self.ask(session, at, (0, tokens))?;
            self.finish_transfers(session)?;
            if self.sessions[session].requests[at].asked_ns.is_none() {
                self.discard(session, at);
            } else {
                at += 1;
            }
        }
        Ok(at)
    }

    fn finish_transfers(&mut self, session: usize) -> Result<(), String> {
        while !self.sessions[session].loads.is_empty() || !self.sessions[session].saves.is_empty() {
            self.transfer_step(session)?;
        }
        Ok(())
    }

    fn nothing_is_left(&self) -> Result<(), String> {
        let gauges = self.engine.with(|engine| engine.gauges());
        let left = gauges.active_lookups
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

    /// Compares the payloads on disk with the saved payloads, if nothing may be missing.
    fn count_stored(&mut self) -> Result<(), String> {
        let expires = (1..LONG_TTL_S).contains(&self.settings.engine.disk_ttl_s);
        let sound = self.settings.faults.is_none() && !expires && !self.settings.neighbours;
        let on_disk = self.engine.with(|engine| engine.gauges().disk_blocks);
        if sound {
            self.history.left_on_disk =
                Some(self.engine.with(|engine| engine.inspect().durable_blocks()));
        }
        self.note_kept();
        let stored: usize = self.models.iter().map(|model| model.stored.len()).sum();
        let complete =
            self.settings.roomy && !self.history.roomy_broken && !self.disks.attached.is_empty();
        self.log.stats.complete_stops += u64::from(complete);
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
