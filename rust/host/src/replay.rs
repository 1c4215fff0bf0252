//! Replays traces on the engine's index, slots, job table and policies. Payloads do not exist, and the disk carries out
//! reads and writes at once, the writes at most at the rate of the options. So does the remote store of a fleet.

mod fleet;
mod recent;
mod reference;
mod router;
mod store;

use std::sync::PoisonError;

use undercroft_contract::error::RegisterError;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{ChecksumRequest, IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::remote::RemoteConfig;
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::metrics::Counters;
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

pub use fleet::{Fleet, FleetHit, FleetOptions, FleetRequest};
pub use reference::{ReferenceHits, reference_hits};
pub use router::RouterKind;
pub use store::{StoreLoad, StoreUse};

use store::SharedStore;

/// Bytes of a payload. No payload is ever allocated. The size determines the granularity of capacities.
const PAYLOAD_BYTES: u32 = 64 << 10;
/// Tokens of a block. The number has no effect: the engine's answers are converted back into blocks.
const TOKENS: u32 = 16;
/// The checksum of every payload. The engine takes 0 for an unknown checksum.
const CHECKSUM: u64 = 1;
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
    remote: Option<SharedStore>,
}

/// The leading blocks of a prompt that were present, by the tier that held them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayHit {
    /// Blocks in host memory.
    pub host: usize,
    /// Blocks only on disk.
    pub disk: usize,
    /// Blocks only in the remote store.
    pub remote: usize,
}

impl ReplayEngine {
    /// An empty engine. Capacities are rounded down to whole pages of the engine.
    ///
    /// # Errors
    /// If the engine refuses such a small host tier.
    pub fn new(options: &Options) -> Result<Self, RegisterError> {
        Self::with_store(options, None)
    }

    /// An empty engine that shares a store with others.
    fn with_store(
        options: &Options,
        remote: Option<(SharedStore, RemoteConfig)>,
    ) -> Result<Self, RegisterError> {
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
            remote: remote.as_ref().map(|(_, config)| config.clone()),
            // A trace's times may be made up.
            return_pause_ns: 0,
            ..EngineConfig::new(bytes(host_blocks))
        });
        if remote.is_some() {
            engine.attach_remote();
        }
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
            // A slow disk takes longer than a step to write a block: shorter steps would find nothing to do.
            step_ns: STEP_NS.max(block_ns.unwrap_or(0)),
            metadata: Vec::new(),
            remote: remote.map(|(store, _)| store),
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
        let counts = |of: &Counters| (of.disk_reads, of.remote_hit_tokens);
        let before = counts(self.counters());
        let hit = self.look_up(prompt);
        if self.remote.is_some() {
            // The engine counts the tokens that the store has brought when their load begins.
            self.load(hit);
        }
        let after = counts(self.counters());
        let remote = ((after.1 - before.1) / u64::from(TOKENS)) as usize;
        let disk = ((after.0 - before.0) as usize).min(hit - remote);
        self.save(blocks.len());
        self.engine.finish_request(self.session, REQUEST);
        self.settle();
        ReplayHit {
            host: hit - remote - disk,
            disk,
            remote,
        }
    }

    /// Lets time pass until `now_ns`, counted from the start of the replay, in which the disk writes what waits. Does
    /// nothing if that time is over: each request takes a millisecond.
    pub fn pass_time(&mut self, now_ns: u64) {
        while self.now_ns < now_ns {
            self.end_metadata();
            self.settle();
            let step_ns = if self.has_waiting_writes() {
                self.step_ns
            } else {
                u64::MAX
            };
            self.set_now(self.now_ns.saturating_add(step_ns).min(now_ns));
        }
        self.settle();
    }

    /// Whether writes wait for the rate of a disk or of the store.
    fn has_waiting_writes(&self) -> bool {
        self.engine.wake() >= Due::Poll
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
        let most = Tokens(blocks as u32 * TOKENS);
        let mut is_settled = false;
        loop {
            let request = LookupRequest::new(REQUEST, &self.hashes).max(most);
            let answer = self.engine.lookup(self.session, &request).tokens();
            match answer {
                Some(Tokens(hit)) => return (hit / TOKENS) as usize,
                None if is_settled => {
                    // It waits for memory that nothing will free, and gives up as time passes.
                    self.pass_time(self.now_ns.saturating_add(self.step_ns));
                }
                None => {
                    self.settle();
                    is_settled = true;
                }
            }
        }
    }

    fn load(&mut self, hit: usize) {
        let tokens = Tokens(hit as u32 * TOKENS);
        let load = (hit > 0)
            .then(|| (self.engine).begin_load(self.session, REQUEST, Tokens(0), tokens))
            .flatten();
        if let Some(load) = load {
            self.engine.end_transfer(load.id, true);
        }
    }

    fn save(&mut self, blocks: usize) {
        let tokens = Tokens(blocks as u32 * TOKENS);
        let request = SaveRequest::new(REQUEST, &self.hashes, tokens);
        if let Some(save) = self.engine.begin_save(self.session, &request).transfer {
            self.engine.end_transfer(save.id, true);
        }
    }

    /// Carries out all IO that the engine requests.
    fn settle(&mut self) {
        loop {
            let mut is_quiet = !self.serve_store();
            (self.engine).turn(Room::checksums(u32::MAX), &mut self.operations);
            for ChecksumRequest { token, .. } in self.operations.checksums.drain(..) {
                let result = Ok(CHECKSUM);
                self.engine.complete(IoCompletion { token, result });
                // A write to the store waits for its checksums.
                is_quiet &= self.remote.is_none();
            }
            self.engine.turn(Room::io(DEPTH), &mut self.operations);
            if self.operations.io.is_empty() && is_quiet {
                return;
            }
            self.end_io();
        }
    }

    /// Carries out the operations of the store that start now. Returns whether there were any.
    fn serve_store(&mut self) -> bool {
        let Some(store) = &self.remote else {
            return false;
        };
        (self.engine).turn(Room::store(DEPTH), &mut self.operations);
        let has_some = !self.operations.store.is_empty();
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        for request in self.operations.store.drain(..) {
            self.engine.complete_remote(store.carry_out(&request));
        }
        has_some
    }

    /// Ends the operations of the disk, except metadata writes.
    fn end_io(&mut self) {
        for request in self.operations.io.drain(..) {
            let token = request.token();
            let result = match request {
                IoRequest::ReadPayload { checksum, .. } => Ok(checksum),
                IoRequest::WritePayload { .. } | IoRequest::Sealed(_) => Ok(CHECKSUM),
                IoRequest::Erase { .. } | IoRequest::Sync { .. } => Ok(0),
                IoRequest::WriteMeta { .. } => {
                    self.metadata.push(token);
                    continue;
                }
            };
            self.engine.complete(IoCompletion { token, result });
        }
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
