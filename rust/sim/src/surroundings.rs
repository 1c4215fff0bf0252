//! What happens around the engine: other users of the filesystems take space and free it, tables take no writes for a
//! while, copies of directories are sparse, and a life has a wrong wall clock.

use undercroft_core::engine::EngineConfig;

use crate::device::{FREE, SimDevice};
use crate::random::Random;
use crate::world::World;

/// A time to live so long that no payload of a world reaches it.
pub(crate) const LONG_TTL_S: u64 = 1_000_000;
const YEAR_S: u64 = 365 * 86_400;

/// Free blocks that other users leave.
fn drawn_space(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => 0,
        1 => random.below(16),
        2 => random.below(512),
        _ => FREE,
    }
}

impl World {
    /// Between two lives.
    pub(crate) fn surround(&mut self, config: &mut EngineConfig) {
        self.clock.unix_s += self.clock.now_ns / 1_000_000_000 + 1;
        config.unix_at_zero_s = self.clock.unix_s;
        if self.settings.wrong_clocks && self.random.chance(400) {
            config.unix_at_zero_s = match self.random.below(3) {
                0 => self.random.below(5000),
                1 => self.clock.unix_s - self.random.range(1, 20) * YEAR_S,
                _ => self.clock.unix_s - self.random.below(1000),
            };
            self.log.stats.wrong_clocks += 1;
            self.note(|| format!("the clock is {}", config.unix_at_zero_s));
        }
        if self.settings.tenants {
            for at in 0..self.disks.devices.len() {
                if self.random.chance(200) {
                    self.make_sparse(at);
                }
                self.disks.devices[at].free = drawn_space(&mut self.random);
            }
        }
        for at in 0..self.disks.devices.len() {
            if self.disks.devices[at].fill_holes() {
                self.log.stats.short_starts += 1;
                self.note(|| format!("directory {at} starts without some of its space"));
                self.lose_blocks();
            }
        }
    }

    /// A copy of a directory lacks some of its bytes.
    fn make_sparse(&mut self, at: usize) {
        let device: &mut SimDevice = &mut self.disks.devices[at];
        let blocks = device.capacity / 4096;
        let first = self.random.below(blocks);
        let count = self.random.range(1, blocks).min(blocks - first);
        device.punch(first * 4096, count * 4096);
        self.lose_blocks();
    }

    fn lose_blocks(&mut self) {
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
    }

    /// The operator changes the capacity of a directory.
    pub(crate) fn resize(&mut self) {
        if self.disks.devices.is_empty() {
            return;
        }
        let at = self.random.index(self.disks.devices.len());
        let device = &mut self.disks.devices[at];
        let pages = self.random.range(1, 10);
        device.resize(pages * device.page_bytes);
        self.history.left_on_disk = None;
        self.note(|| format!("device {at} now has {pages} pages"));
    }

    /// While an engine runs.
    pub(crate) fn surround_step(&mut self) -> Result<(), String> {
        self.open_late();
        if self.settings.tenants && self.random.chance(10) && !self.disks.devices.is_empty() {
            let at = self.random.index(self.disks.devices.len());
            self.disks.devices[at].free = drawn_space(&mut self.random);
        }
        if self.settings.freezes && self.random.chance(15) && !self.disks.attached.is_empty() {
            let device = self.random.index(self.disks.attached.len());
            let freezes = !self.disks.frozen.remove(&device) && self.disks.frozen.insert(device);
            self.log.stats.freezes += u64::from(freezes);
            self.note(|| format!("the table of device {device} takes no writes: {freezes}"));
        }
        self.check_promise()
    }

    /// Somebody moves all payloads and records of two encrypted stores to each other.
    pub(crate) fn exchange_stores(&mut self) {
        let of = &mut self.disks;
        let [one, two, ..] = &mut of.devices[..] else {
            return;
        };
        if (one.capacity, one.page_bytes) != (two.capacity, two.page_bytes) {
            return;
        }
        one.exchange_payloads(two);
        for (at, device) in of.devices.iter().take(2).enumerate() {
            for (offset, len) in device.recorded() {
                let bytes = device.at(offset, len).to_vec();
                of.moved.insert((at, offset), bytes);
            }
        }
        self.log.stats.exchanged_stores += 1;
        self.note(|| "somebody exchanges the payloads of two stores".to_owned());
        self.lose_blocks();
    }
}
