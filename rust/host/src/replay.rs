//! Replays traces on the engine's index, slots, job table and policies. Payloads do not exist, and the disk carries out
//! reads and writes at once, the writes at most at the rate of the options.

use undercroft_contract::error::RegisterError;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{ChecksumRequest, IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::metrics::Counters;
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

/// Bytes of a payload. No payload is ever allocated. The size determines the granularity of capacities.
const PAYLOAD_BYTES: u32 = 64 << 10;
/// Tokens of a block. The number has no effect: the engine's answers are converted back into blocks.
const TOKENS: u32 = 16;
/// IO operations that are carried out between two questions to the engine.
const DEPTH: usize = 64;
const REQUEST: &str = "request";
/// Virtual time between two requests: metadata writes end before their device counts as stalled.
const REQUEST_NS: u64 = 1_000_000;
/// Requests between two batches of metadata writes.
const METADATA_REQUESTS: u64 = 256;
/// Least time between two questions to the engine while writes wait for their rate: well below the time for which the
/// engine saves its rate up.
const STEP_NS: u64 = 50_000_000;

/// The engine's options.
#[derive(Clone, Debug)]
pub struct Options {
    /// Capacity of the host tier, in blocks.
    pub host_blocks: usize,
    /// Capacity of the disk tier, in blocks; 0: no disk.
    pub disk_blocks: usize,
    /// Eviction policy of both tiers.
    pub policy: PolicyKind,
    /// Whether blocks are written to disk only from their second use on.
    pub second_touch: bool,
    /// Blocks a second that the disk can write; 0 if it takes every write at once. Writes that wait take memory;
    /// without memory for them they are not made, as in an engine on a slow disk.
    pub disk_writes_per_s: f64,
    /// Seed of the random choices.
    pub seed: u64,
}

/// An engine with a host tier and, if its capacity is not 0, a disk tier.
#[derive(Debug)]
pub struct ReplayEngine {
    engine: Engine,
    session: SessionId,
    hashes: Vec<BlockHash>,
    /// Operations to carry out.
    operations: Started,
    requests: u64,
    now_ns: u64,
    /// Time between two questions to the engine while writes wait for their rate.
    step_ns: u64,
    /// Metadata writes in flight. They end in batches, so that a block of records is encoded once for many changes and
    /// a measurement shows the time of the index.
    metadata: Vec<u64>,
}

/// The leading blocks of a prompt that were present, by the tier that held them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayHit {
    /// Blocks in host memory.
    pub host: usize,
    /// Blocks only on disk.
    pub disk: usize,
}

impl ReplayEngine {
    /// An empty engine. Capacities are rounded down to whole pages of the engine.
    ///
    /// # Errors
    /// If the engine refuses such a small host tier.
    pub fn new(options: &Options) -> Result<Self, RegisterError> {
        let Options {
            host_blocks,
            disk_blocks,
            policy,
            second_touch,
            disk_writes_per_s,
            seed,
        } = *options;
        let bytes = |blocks: usize| blocks as u64 * u64::from(PAYLOAD_BYTES);
        let write_rate = write_rate(disk_writes_per_s);
        let block_ns = (u64::from(PAYLOAD_BYTES) * 1_000_000_000).checked_div(write_rate);
        let mut engine = Engine::new(EngineConfig {
            policy,
            second_touch,
            write_rate,
            seed,
            // A replay needs no explanations.
            departures: 0,
            explained_lookups: 1,
            ..EngineConfig::new(bytes(host_blocks))
        });
        if disk_blocks > 0 {
            engine.attach_disks(vec![DeviceImage {
                capacity: bytes(disk_blocks),
                page_bytes: page_bytes_for(bytes(disk_blocks)),
                holes: Vec::new(),
                super_bytes: Vec::new(),
                table: Vec::new().into(),
            }]);
        }
        let session = engine.open_session(NamespaceSpec::uniform(
            "trace",
            TOKENS,
            &[(GroupKind::Full, PAYLOAD_BYTES)],
        ))?;
        Ok(Self {
            engine,
            session,
            hashes: Vec::new(),
            operations: Started::default(),
            requests: 0,
            now_ns: 0,
            step_ns: STEP_NS.max(block_ns.unwrap_or(0)),
            metadata: Vec::new(),
        })
    }

    /// Serves a request: looks up the first `prompt` of its blocks, then saves all of them.
    pub fn request(&mut self, prompt: usize, blocks: &[u64]) -> ReplayHit {
        self.requests += 1;
        self.set_now(self.now_ns + REQUEST_NS);
        if self.requests.is_multiple_of(METADATA_REQUESTS) {
            self.end_metadata();
        }
        self.hashes.clear();
        self.hashes.extend(
            blocks
                .iter()
                .filter_map(|&block| BlockHash::new(&hash(block))),
        );
        let reads = self.engine.counters().disk_reads;
        let hit = self.look_up(prompt);
        let disk = (self.engine.counters().disk_reads - reads) as usize;
        self.save(blocks.len());
        self.engine.finish_request(self.session, REQUEST);
        self.settle();
        ReplayHit {
            host: hit.saturating_sub(disk),
            disk: disk.min(hit),
        }
    }

    /// Lets time pass until `now_ns`, counted from the start of the replay, in which the disk writes what waits. Does
    /// nothing if that time is over: each request takes a millisecond.
    pub fn pass_time(&mut self, now_ns: u64) {
        while self.now_ns < now_ns {
            self.end_metadata();
            self.settle();
            let waits = self.engine.wake() >= Due::Start;
            let step_ns = if waits { self.step_ns } else { u64::MAX };
            self.set_now(self.now_ns.saturating_add(step_ns).min(now_ns));
        }
        self.settle();
    }

    fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.engine.set_now(now_ns);
    }

    /// Ends the metadata writes in flight.
    fn end_metadata(&mut self) {
        for token in self.metadata.drain(..) {
            let result = Ok(0);
            self.engine.complete(IoCompletion { token, result });
        }
    }

    /// The engine's counters.
    pub fn counters(&self) -> &Counters {
        self.engine.counters()
    }

    /// Blocks that the host tier holds.
    pub fn host_blocks(&self) -> usize {
        (self.engine.gauges().host_capacity_bytes / u64::from(PAYLOAD_BYTES)) as usize
    }

    /// Whether the engine has a disk tier.
    pub fn has_disk(&self) -> bool {
        self.engine.device_count() > 0
    }

    /// The number of leading blocks that are present. Blocks on disk are read.
    fn look_up(&mut self, blocks: usize) -> usize {
        let request = LookupRequest::new(REQUEST, &self.hashes).max(Tokens(blocks as u32 * TOKENS));
        loop {
            let answer = self.engine.lookup(self.session, &request).tokens();
            match answer {
                Some(Tokens(hit)) => return (hit / TOKENS) as usize,
                None => settle(&mut self.engine, &mut self.operations, &mut self.metadata),
            }
        }
    }

    fn save(&mut self, blocks: usize) {
        let tokens = Tokens(blocks as u32 * TOKENS);
        let request = SaveRequest::new(REQUEST, &self.hashes, tokens);
        if let Some(save) = self.engine.begin_save(self.session, &request).transfer {
            self.engine.end_transfer(save.id, true);
        }
    }

    fn settle(&mut self) {
        settle(&mut self.engine, &mut self.operations, &mut self.metadata);
    }
}

/// The engine's write rate in bytes a second; 0 is unlimited, and less than a byte is a byte.
fn write_rate(blocks_per_s: f64) -> u64 {
    if blocks_per_s > 0.0 {
        ((blocks_per_s * f64::from(PAYLOAD_BYTES)) as u64).max(1)
    } else {
        0
    }
}

/// Carries out all IO that the engine requests.
fn settle(engine: &mut Engine, operations: &mut Started, metadata: &mut Vec<u64>) {
    loop {
        engine.turn(Room::checksums(u32::MAX), operations);
        for ChecksumRequest { token, .. } in operations.checksums.drain(..) {
            let result = Ok(0);
            engine.complete(IoCompletion { token, result });
        }
        engine.turn(Room::io(DEPTH), operations);
        if operations.io.is_empty() {
            return;
        }
        for request in operations.io.drain(..) {
            let token = request.token();
            let result = match request {
                IoRequest::ReadPayload { checksum, .. } => Ok(checksum),
                IoRequest::WritePayload { .. }
                | IoRequest::Sealed(_)
                | IoRequest::Erase { .. }
                | IoRequest::Sync { .. } => Ok(0),
                IoRequest::WriteMeta { .. } => {
                    metadata.push(token);
                    continue;
                }
            };
            engine.complete(IoCompletion { token, result });
        }
    }
}

/// 32 bytes in place of vLLM's SHA-256. Like there, any of the bytes distributes blocks evenly.
fn hash(block: u64) -> [u8; 32] {
    let mut hash = [0; 32];
    for (lane, bytes) in (0_u64..).zip(hash.chunks_exact_mut(8)) {
        let mut mixed = block
            .wrapping_mul(4)
            .wrapping_add(lane)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    hash
}
