//! A directory that keeps tables and no payloads, and whose reads take time. Its rate changes, other processes use it,
//! and it hangs now and then.

use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IoRequest};
use undercroft_contract::pages::page_bytes_for;

pub(crate) const SECOND: u64 = 1_000_000_000;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD129_42F0_1B6C_5A35) ^ 0x9E37_79B9)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number in `0.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number between two numbers. Each magnitude is equally likely.
    pub(crate) fn log(&mut self, from: f64, to: f64) -> f64 {
        from * (to / from).powf(self.unit())
    }

    pub(crate) fn chance(&mut self, of: f64) -> bool {
        self.unit() < of
    }
}

/// The rate of a device from some time on.
#[derive(Clone, Copy, Debug)]
struct Phase {
    from_ns: u64,
    bytes_per_s: f64,
}

/// A device, which decides when reads end.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    random: Random,
    phases: Vec<Phase>,
    latency_ns: u64,
    /// The probability that a read hangs for a second.
    hangs: f64,
    /// Reads that a phase without a rate has delayed all end with the phase.
    ends_at_once: bool,
    free_ns: u64,
}

impl Device {
    /// A device of about `bytes_per_s` for `seconds`, which other processes use, too.
    pub(crate) fn new(random: &mut Random, bytes_per_s: f64, seconds: u64) -> Self {
        let mut phases = Vec::new();
        let mut from_ns = 0;
        let is_shared = random.chance(0.6);
        while from_ns < seconds * SECOND {
            let sharers = [1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0][(random.next() % 7) as usize];
            let share = if is_shared { sharers } else { 1.0 };
            phases.push(Phase {
                from_ns,
                bytes_per_s: bytes_per_s / share,
            });
            from_ns += (random.log(3.0, 60.0) * SECOND as f64) as u64;
        }
        let hangs = if random.chance(0.3) { 2e-4 } else { 0.0 };
        Self {
            random: Random::new(random.next()),
            phases,
            latency_ns: random.log(2e4, 5e5) as u64,
            hangs,
            ends_at_once: false,
            free_ns: 0,
        }
    }

    /// A device that is fast, then answers nothing, then is slow, and finally fast again. `ends_ns`: the ends of the first
    /// three phases. `bytes_per_s`: the fast rate and the slow rate.
    pub(crate) fn lying(random: &mut Random, ends_ns: [u64; 3], bytes_per_s: [f64; 2]) -> Self {
        let [fast, slow] = bytes_per_s;
        let [hangs_ns, slow_ns, fast_ns] = ends_ns;
        let phases = [(0, fast), (hangs_ns, 0.0), (slow_ns, slow), (fast_ns, fast)];
        let phase = |(from_ns, bytes_per_s)| Phase {
            from_ns,
            bytes_per_s,
        };
        Self {
            random: Random::new(random.next()),
            phases: phases.map(phase).into(),
            latency_ns: random.log(2e4, 5e5) as u64,
            hangs: 0.0,
            ends_at_once: random.chance(0.5),
            free_ns: 0,
        }
    }

    /// A device whose rate stays the same except for noise.
    pub(crate) fn steady(bytes_per_s: f64) -> Self {
        let from_ns = 0;
        Self {
            random: Random::new(1),
            phases: vec![Phase {
                from_ns,
                bytes_per_s,
            }],
            latency_ns: 100_000,
            hangs: 0.0,
            ends_at_once: false,
            free_ns: 0,
        }
    }

    /// When a read of this many bytes ends that begins now. Reads run one after the other.
    pub(crate) fn read(&mut self, bytes: u32, now_ns: u64) -> u64 {
        let start_ns = self.free_ns.max(now_ns);
        let noise = 0.8 + 0.4 * self.random.unit();
        let hang_ns = if self.random.chance(self.hangs) {
            SECOND
        } else {
            0
        };
        self.free_ns = self.end_ns(f64::from(bytes) * noise, start_ns) + hang_ns;
        self.free_ns + self.latency_ns
    }

    /// When a read of this many bytes ends, by the rates of the phases.
    fn end_ns(&self, bytes: f64, start_ns: u64) -> u64 {
        let first = self
            .phases
            .partition_point(|phase| phase.from_ns <= start_ns);
        let (mut left, mut at_ns) = (bytes, start_ns);
        for (index, phase) in self.phases.iter().enumerate().skip(first.max(1) - 1) {
            let next = self.phases.get(index + 1);
            let until_ns = next.map_or(u64::MAX, |next| next.from_ns);
            let could = (until_ns - at_ns) as f64 / 1e9 * phase.bytes_per_s;
            if left <= could {
                return at_ns + (left / phase.bytes_per_s * 1e9) as u64;
            }
            (left, at_ns) = (left - could, until_ns);
            if phase.bytes_per_s == 0.0 && self.ends_at_once {
                return until_ns;
            }
        }
        unreachable!("the last phase has a rate and no end")
    }
}

/// The files of the directory, without payloads.
#[derive(Debug)]
pub(crate) struct Files {
    table: Vec<u8>,
    super_bytes: Vec<u8>,
}

impl Files {
    /// The files of a new directory, and its image for the engine.
    pub(crate) fn new(capacity: u64) -> (Self, DeviceImage) {
        let page_bytes = page_bytes_for(capacity);
        let superblock = Superblock {
            store_id: 1,
            page_bytes,
            encrypted: false,
        };
        let super_bytes: Vec<u8> = superblock.encode().into();
        let image = DeviceImage {
            capacity: capacity / page_bytes * page_bytes,
            page_bytes,
            holes: Vec::new(),
            super_bytes: super_bytes.clone(),
            table: Vec::new().into(),
        };
        let table = Vec::new();
        (Self { table, super_bytes }, image)
    }

    /// Carries out a write. Returns the checksum for the engine.
    pub(crate) fn write(&mut self, request: &IoRequest) -> u64 {
        let IoRequest::WriteMeta {
            file,
            file_offset,
            bytes,
            ..
        } = request
        else {
            return 7;
        };
        let held = match file {
            FileKind::Super => &mut self.super_bytes,
            _ => &mut self.table,
        };
        let at = *file_offset as usize;
        held.resize(held.len().max(at + bytes.len()), 0);
        held[at..at + bytes.len()].copy_from_slice(bytes);
        0
    }
}
