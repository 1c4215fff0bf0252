//! The configuration of a simulated world, drawn from its seed.

use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::PromotionWait;
use undercroft_engine::EngineConfig;
use undercroft_engine::policy::PolicyKind;

use crate::disks::DeviceFaults;
use crate::model::Model;
use crate::random::Random;

const PAGE: u64 = 256 << 10;
/// A time to live so long that no payload of a world reaches it.
pub(crate) const LONG_TTL_S: u64 = 1_000_000;

/// Departures that the engine keeps. With this number it forgets no block of a life.
pub(crate) const DEPARTURES: usize = 4096;
const MILLISECOND: u64 = 1_000_000;

#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) engine: EngineConfig,
    /// Capacity and page size of each directory.
    pub(crate) devices: Vec<(u64, u64)>,
    pub(crate) faults: DeviceFaults,
    /// Whether there is room and time for everything and nothing fails. Then saved blocks must be found.
    pub(crate) roomy: bool,
    /// Clients give hints.
    pub(crate) hints: bool,
    /// An operator clears blocks, and has the engine drain for a while.
    pub(crate) operated: bool,
    /// Payloads on disk are encrypted.
    pub(crate) encrypted: bool,
    /// Others use the filesystems of the directories.
    pub(crate) neighbours: bool,
    /// Tables take no writes for a while.
    pub(crate) freezes: bool,
    /// Lives have wrong wall clocks.
    pub(crate) wrong_clocks: bool,
    /// Bits flip in the arena.
    pub(crate) changes: bool,
    /// There are more namespaces than entries for them, and sessions open and close.
    pub(crate) crowded: bool,
    /// Payloads that are evicted for another size class come back from the remote store.
    pub(crate) fetches_gaps: bool,
    pub(crate) lives: u64,
    pub(crate) steps: u64,
    /// Most operations of a device at a time.
    pub(crate) depth: usize,
    /// Whether the engine gets this depth.
    pub(crate) tells_depth: bool,
    /// How often a device hangs or answers again, in a thousand steps.
    pub(crate) hangs: u64,
    /// How often a directory is away for a life, in a thousand.
    pub(crate) away: u64,
    /// How often a directory cannot be opened at the start of a life, in a thousand.
    pub(crate) late: u64,
    pub(crate) latency_ns: u64,
}

impl Settings {
    pub(crate) fn random(random: &mut Random) -> (Self, Vec<Model>) {
        // A seed without these further choices means the same as before there were any.
        let mut further = random.branch(1);
        let roomy = random.chance(200);
        let crowded = random.chance(250);
        let count = if crowded {
            random.range(4, 16)
        } else {
            random.range(1, 3)
        } as usize;
        let mut models: Vec<Model> = (0..count)
            .map(|index| Model::random(index, roomy, random))
            .collect();
        let mut engine = EngineConfig::new(random.range(2, 6) * PAGE);
        engine.policy = random.pick(&[PolicyKind::Lru, PolicyKind::LeafHd]);
        engine.seed = random.below(3);
        engine.unix_at_zero_s = 1_790_000_000;
        engine.promotion_bytes = match random.below(4) {
            0 => random.below(engine.host_bytes),
            1 => 16 << 10,
            2 => engine.host_bytes,
            _ => engine.host_bytes / 2,
        };
        engine.pin_bytes = match random.below(4) {
            0 => 0,
            1 => engine.host_bytes,
            _ => engine.host_bytes / 10 * 3,
        };
        engine.min_load_tokens = Some(random.pick(&[1, 1, 16, 40]));
        engine.stall_ns = random.range(1, 200) * MILLISECOND;
        if random.chance(300) {
            engine.promotion_wait = PromotionWait::Limit {
                base_ns: random.below(20 * MILLISECOND),
                per_1k_tokens_ns: random.below(50 * MILLISECOND),
            };
        } else if random.chance(150) {
            engine.promotion_wait = PromotionWait::Planned;
            if random.chance(500) {
                engine.min_load_tokens = None;
            }
        }
        if random.chance(200) {
            engine.write_rate = random.range(1, 200) << 20;
        }
        engine.second_touch = random.chance(150);
        if random.chance(150) {
            engine.disk_ttl_s = random.range(1, 3);
        }
        engine.verify_host = random.chance(300);
        engine.writes_beside_reads = random.below(4) as usize;
        engine.removals = random.pick(&[1, 3, 16]);
        engine.tells = random.pick(&[1, 3, 16]);
        engine.event_ring = random.pick(&[1, 8, 64, 1 << 16]);
        engine.visits = random.pick(&[2, 3, 20, 1000]);
        engine.departures =
            [0, 16, DEPARTURES, DEPARTURES][engine.host_bytes as usize / PAGE as usize % 4];
        engine.explained_lookups = [1, 7, 4096][engine.promotion_bytes as usize % 3];
        let mut devices: Vec<(u64, u64)> = (0..random.pick(&[0, 1, 1, 1, 2, 2, 3]))
            .map(|_| (random.range(1, 10) * PAGE, PAGE))
            .collect();
        if random.chance(100) {
            devices
                .iter_mut()
                .for_each(|device| *device = (device.0 * 2, PAGE * 2));
        }
        if random.chance(250) {
            // Many pages, and more than one model.
            engine.host_bytes = random.range(8, 32) * PAGE;
            devices
                .iter_mut()
                .for_each(|device| device.0 = random.range(8, 40) * device.1);
            if random.chance(400) {
                // Only the arena has payloads: payloads that are evicted for another size class leave gaps.
                devices.clear();
            }
        }
        if crowded {
            engine.namespace_entries_max = random.range(1, 4) as usize;
            // Each directory may hold others, as after a loss of power.
            let held = engine.namespace_entries_max * devices.len();
            engine.namespaces_max = held.max(1) + random.below(4) as usize;
        }
        let mut faults = DeviceFaults::default();
        if roomy {
            engine.host_bytes = 24 * PAGE;
            // Nodes that wait for a later entry to be notified are not found.
            engine.tells = usize::MAX;
            if random.chance(500) {
                engine.promotion_bytes = engine.host_bytes;
            }
            engine.promotion_wait = PromotionWait::Complete;
            engine.min_load_tokens = engine.min_load_tokens.or(Some(1));
            engine.write_rate = 0;
            engine.disk_ttl_s = 0;
            engine.second_touch = false;
            devices.iter_mut().for_each(|device| device.0 = 24 * PAGE);
        } else if random.chance(600) {
            faults = random_faults(random);
        }
        let latency_ns = random.pick(&[1, 1, 5]) * random.range(1, 2 * MILLISECOND);
        if roomy {
            // A read that takes longer than the limit is a stall, a read that waits for others is none.
            engine.stall_ns = latency_ns + random.pick(&[1, engine.stall_ns]);
        }
        let hangs = if !roomy && random.chance(300) {
            random.range(1, 8)
        } else {
            0
        };
        if !roomy {
            engine.remote = crate::remote::config(random);
        }
        for model in &mut models {
            if further.chance(100) {
                model.add_full_group(roomy, &mut further);
            }
        }
        let mut settings = Self {
            tells_depth: random.chance(700),
            hangs,
            away: if random.chance(200) { 400 } else { 0 },
            late: if random.chance(150) { 300 } else { 0 },
            engine,
            devices,
            faults,
            roomy,
            hints: random.chance(600),
            operated: random.chance(400),
            encrypted: random.chance(300),
            neighbours: false,
            freezes: false,
            wrong_clocks: false,
            changes: !roomy && random.chance(300),
            crowded,
            fetches_gaps: false,
            lives: random.range(1, 6),
            steps: random.range(100, 500),
            depth: random.range(1, 16) as usize,
            latency_ns,
        };
        if !roomy && !crowded && further.chance(100) {
            settings.leave_gaps(&mut models, &mut further);
        }
        // A life reads few payloads: with the usual limit hardly any directory would be given up.
        let usual = settings.engine.read_failures_max;
        settings.engine.read_failures_max = further.pick(&[1, 2, usual]);
        if !settings.faults.is_none() && further.chance(100) {
            settings.faults.read_error = 500;
        }
        for model in &mut models {
            if further.chance(150) {
                model.add_ignored_group(&mut further);
            }
        }
        if !settings.fetches_gaps && further.chance(400) {
            for at in 0..models.len() {
                if further.chance(600) {
                    let renamed = models[at].renamed();
                    models.push(renamed);
                }
            }
        }
        settings.neighbours = !roomy && further.chance(150);
        settings.freezes = !roomy && further.chance(150);
        settings.wrong_clocks = further.chance(150);
        if further.chance(300) {
            for model in &mut models {
                model.tenant_share = further.pick(&[0, 0, 100, 300, 600, 1000]);
            }
        }
        // Lives are short: with the usual limit no conversation would be expected.
        settings.engine.return_pause_ns =
            further.pick(&[0, MILLISECOND / 2, MILLISECOND / 2, 5 * MILLISECOND]);
        if settings.wrong_clocks {
            settings.engine.disk_ttl_s = LONG_TTL_S;
        }
        (settings, models)
    }
}

impl Settings {
    /// Whether every device delivers its reads in time, and there is memory for all.
    pub(crate) fn is_punctual(&self) -> bool {
        self.roomy && self.faults.is_none()
    }
}

impl Settings {
    /// Makes payloads that are evicted for another size class leave gaps, and come back from a remote store: only a
    /// small arena has payloads, for which two models compete.
    fn leave_gaps(&mut self, models: &mut Vec<Model>, random: &mut Random) {
        models.truncate(2);
        while models.len() < 2 {
            models.push(Model::random(models.len(), false, random));
        }
        for (model, payload_bytes) in models.iter_mut().zip([4000, 8000]) {
            let groups = model.spec.groups.iter_mut();
            groups.for_each(|group| group.payload_bytes = payload_bytes);
        }
        self.devices.clear();
        self.operated = false;
        self.fetches_gaps = true;
        self.lives = 1;
        self.steps = random.range(1500, 3000);
        let engine = &mut self.engine;
        engine.host_bytes = PAGE;
        engine.promotion_bytes = engine.host_bytes;
        engine.visits = 1000;
        engine.removals = random.pick(&[16, 256]);
        let mut remote = crate::remote::drawn(random);
        remote.object_bytes = random.range(1, 8) * 4096;
        remote.write = RemoteWrite::All;
        remote.write_rate = 0;
        engine.remote = Some(remote);
    }
}

fn random_faults(random: &mut Random) -> DeviceFaults {
    let mut rate = |most: u64| {
        if random.chance(350) {
            random.range(1, most)
        } else {
            0
        }
    };
    DeviceFaults {
        read_error: rate(200),
        corrupt: rate(60),
        transient: rate(60),
        write_error: rate(200),
        full: rate(60),
        lost: rate(60),
        slow: rate(60),
        hang: rate(30),
    }
}
