//! The surroundings of the engine: other users of the filesystems take space and free it, tables take no writes for a
//! while, copies of directories are sparse, and a life has a wrong wall clock. Directories cannot be opened at the start,
//! or are given up; stores are encrypted, and somebody rearranges their files; checksums take time, and bytes in the
//! arena change.

use undercroft_contract::format::{PLACEHOLDER, RECORD_BYTES, Record};
use undercroft_contract::io::{ChecksumRequest, IoCompletion};
use undercroft_contract::remote::RemoteError;
use undercroft_engine::disk::Health;
use undercroft_engine::{EngineConfig, Room, Started};

use crate::arena::Hand;
use crate::content::{SECTOR, checksum, sectors};
use crate::device::{FREE, SimDevice};
use crate::random::Random;
use crate::remote::{SimRemote, brief_remote};
use crate::world::World;

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
        if self.settings.neighbours {
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
        if self.settings.neighbours && self.random.chance(10) && !self.disks.devices.is_empty() {
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

impl World {
    /// Begins checksums, and ends some.
    pub(crate) fn sum(&mut self) -> Result<(), String> {
        let mut started = Started::default();
        self.engine
            .with(|engine| engine.turn(Room::checksums(u32::MAX), &mut started));
        for request in started.checksums {
            let (offset, len) = (request.arena_offset, u64::from(request.payload_len));
            self.arena.take(offset, len, Hand::Read, "a checksum")?;
            self.checksums.push(request);
        }
        for _ in 0..self.random.range(1, 8) {
            if self.checksums.is_empty() {
                break;
            }
            let at = self.random.index(self.checksums.len());
            let request = self.checksums.swap_remove(at);
            self.end_checksum(request)?;
        }
        Ok(())
    }

    fn end_checksum(&mut self, request: ChecksumRequest) -> Result<(), String> {
        let ChecksumRequest {
            token,
            arena_offset,
            payload_len,
        } = request;
        let len = u64::from(payload_len);
        let result = Ok(checksum(self.arena.at(arena_offset, len)));
        self.arena.release(arena_offset, len, Hand::Read);
        self.note(|| format!("checksum of {arena_offset}+{len}: {result:?}"));
        self.engine
            .with(|engine| engine.complete(IoCompletion { token, result }));
        let mut sectors = (0..sectors(len) as u64).map(|sector| arena_offset + sector * SECTOR);
        if sectors.any(|at| self.arena.has_changed(at)) {
            let payloads = self
                .engine
                .uncounted(|engine| engine.inspect().guarded_payloads());
            if payloads.iter().any(|&(offset, _)| offset == arena_offset) {
                return Err(format!(
                    "the payload at {arena_offset} is kept, although it was found to have changed"
                ));
            }
        }
        Ok(())
    }

    /// Flips a bit of a payload in the arena, if there is a payload whose change the engine can detect.
    pub(crate) fn change_a_payload(&mut self) {
        let payloads = self
            .engine
            .uncounted(|engine| engine.inspect().guarded_payloads());
        if payloads.is_empty() {
            return;
        }
        let (offset, len) = payloads[self.random.index(payloads.len())];
        let sector = self.random.index(sectors(u64::from(len))) as u64;
        let at = offset + sector * SECTOR;
        if self.arena.has_changed(at) {
            return;
        }
        let bit = self.random.below(64);
        self.arena.change(at, bit);
        self.history.changes += 1;
        self.log.stats.changes += 1;
        self.note(|| format!("bit {bit} of the sector at {at} in the arena flips"));
    }
}

impl World {
    /// Makes some of the engine's directories impossible to open.
    pub(crate) fn lose_some(&mut self) {
        for device in 0..self.disks.attached.len() {
            if self.random.chance(self.settings.late) {
                self.disks.absent.insert(device);
            }
        }
        if self.disks.absent.is_empty() {
            return;
        }
        self.history.roomy_broken = true;
        self.history.left_on_disk = None;
        self.history.kept_namespaces.clear();
        self.log.stats.absent += self.disks.absent.len() as u64;
        let absent = self.disks.absent.clone();
        self.note(|| format!("the engine starts without devices {absent:?}"));
    }

    /// A directory can be opened again. Its content is discarded: the engine may have ended lives of namespaces
    /// meanwhile.
    pub(crate) fn open_late(&mut self) {
        if !self.random.chance(self.settings.late / 10) {
            return;
        }
        let Some(device) = self.disks.absent.pop_first() else {
            return;
        };
        let at = self.disks.attached[device];
        let (capacity, page) = self.settings.devices[at];
        self.disks.devices[at] = SimDevice::new(at, (capacity, page), self.settings.encrypted);
        // It holds no blocks of lives that ended while it was out of reach, so the operator need not empty it.
        self.history.stale.remove(&at);
        self.log.stats.late += 1;
        self.note(|| format!("device {device} is opened late"));
        let image = self.disks.devices[at].image();
        let number = u16::try_from(device).expect("a few devices");
        self.engine.with(|engine| engine.open_disk(number, &image));
    }

    /// Counts the directories that the engine has given up, but for the absent directories.
    pub(crate) fn count_given_up(&mut self) {
        let devices = self.engine.with(|engine| engine.devices());
        let failed = devices.iter().enumerate().filter(|(device, of)| {
            matches!(of.health, Health::Failed { .. }) && !self.disks.absent.contains(device)
        });
        self.log.stats.given_up += failed.count() as u64;
    }

    /// Directories that the engine cannot reach.
    pub(crate) fn out_of_reach(&self) -> Vec<usize> {
        let disks = &self.disks;
        let there: Vec<usize> = (disks.attached.iter().enumerate())
            .filter(|(device, _)| !disks.absent.contains(device))
            .map(|(_, &at)| at)
            .collect();
        let all = 0..disks.devices.len();
        all.filter(|at| !there.contains(at)).collect()
    }
}

/// Exchanges the slots of two records, in a table whose checksums are right again. Whether there are two.
fn exchange(device: &mut SimDevice, random: &mut Random) -> bool {
    let table = device.table_mut();
    let decoded = table.chunks_exact(RECORD_BYTES).map(Record::decode);
    let found: Vec<(usize, Record)> = decoded
        .enumerate()
        .filter_map(|(at, record)| Some((at, record?)))
        .filter(|(_, record)| record.group != PLACEHOLDER)
        .collect();
    if found.is_empty() {
        return false;
    }
    let (at, one) = random.pick(&found);
    let others = found.iter().filter(|(_, record)| {
        (record.group, record.payload_bytes) == (one.group, one.payload_bytes)
            && record.slot != one.slot
    });
    let others: Vec<(usize, Record)> = others.copied().collect();
    if others.is_empty() {
        return false;
    }
    let (other_at, other) = random.pick(&others);
    for (at, record, slot) in [(at, one, other.slot), (other_at, other, one.slot)] {
        let bytes = &mut table[at * RECORD_BYTES..][..RECORD_BYTES];
        Record { slot, ..record }.encode(bytes);
    }
    true
}

impl World {
    /// Between two lives, encrypted stores get another key, or somebody rearranges their files.
    pub(crate) fn tamper(&mut self) {
        if !self.settings.encrypted || self.settings.roomy {
            return;
        }
        if self.random.chance(100) {
            self.disks.key = self.random.next();
            self.note(|| "the operator gives other keys".to_owned());
        }
        let count = self.disks.devices.len();
        if count == 0 || !self.random.chance(500) {
            return;
        }
        for _ in 0..self.random.range(1, 20) {
            let at = self.random.index(count);
            let exchanged = exchange(&mut self.disks.devices[at], &mut self.random);
            self.log.stats.exchanged += u64::from(exchanged);
        }
        self.note(|| "somebody exchanges slots".to_owned());
        if self.random.chance(300) {
            self.exchange_stores();
        }
        self.history.left_on_disk = None;
    }
}

impl World {
    /// The work of the store's threads: some operations end, and others begin.
    pub(crate) fn remote_turn(&mut self) -> Result<(), String> {
        let due_ns = self.remote.as_ref().and_then(SimRemote::next_due_ns);
        if let Some(due_ns) = due_ns.filter(|_| self.random.chance(400)) {
            self.set_now(self.clock.now_ns.max(due_ns));
        }
        let now_ns = self.clock.now_ns;
        if let Some(remote) = &mut self.remote {
            remote.decay(&mut self.random);
        }
        for _ in 0..self.random.range(1, 4) {
            let remote = self.remote.as_mut();
            let ended =
                remote.and_then(|of| of.complete(now_ns, &mut self.arena, &mut self.random));
            let Some((request, ended)) = ended else {
                break;
            };
            self.note(|| format!("end {}: {:?}", brief_remote(&request), ended.result));
            let is_undecrypted = ended.result == Err(RemoteError::Cipher);
            self.log.stats.remote_undecrypted += u64::from(is_undecrypted);
            self.engine.with(|engine| engine.complete_remote(ended));
        }
        let room = self.remote.as_ref().map_or(0, SimRemote::room);
        let mut started = Started::default();
        self.engine
            .with(|engine| engine.turn(Room::store(room), &mut started));
        for request in started.store {
            self.note(|| format!("start {}", brief_remote(&request)));
            let remote = self.remote.as_mut().ok_or("a request to no store")?;
            remote.submit(request, now_ns, &mut self.arena, &mut self.random)?;
        }
        Ok(())
    }

    /// Checks that the store has no operation of the engine any more.
    pub(crate) fn check_remote(&mut self) -> Result<(), String> {
        let Some(remote) = &self.remote else {
            return Ok(());
        };
        let has_work = self
            .engine
            .with(|engine| engine.inspect().has_remote_work());
        if has_work || remote.in_flight() > 0 {
            return Err(format!(
                "{} operations of the remote store, and more to do: {has_work}",
                remote.in_flight()
            ));
        }
        Ok(())
    }
}
