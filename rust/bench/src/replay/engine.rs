//! The engine as a cache to replay on: its index, slots, job table and policies. Payloads do not
//! exist, and the disk carries out what it is asked at once.

use undercroft_core::disk::DeviceImage;
use undercroft_core::engine::{Engine, EngineConfig, SessionId};
use undercroft_core::io::{ChecksumRequest, IoCompletion, IoRequest};
use undercroft_core::key::BlockHash;
use undercroft_core::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_core::policy::PolicyKind;
use undercroft_core::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_core::slots::page_bytes_for;

use super::{BLOCK_TOKENS, Counts, ReplayCache, ReplayError};

/// Bytes of a payload. None is ever allocated; its size sets how finely capacities can be given.
const PAYLOAD_BYTES: u32 = 64 << 10;
const TOKENS: u32 = BLOCK_TOKENS as u32;
/// IO operations that are carried out before the engine is asked again.
const DEPTH: usize = 64;
const REQUEST: &str = "request";
/// Virtual time between two requests: metadata writes end before their device counts as stalled.
const REQUEST_NS: u64 = 1_000_000;
/// Requests between two batches of metadata writes.
const METADATA_REQUESTS: u64 = 256;

/// What engine to replay on.
#[derive(Clone, Debug)]
pub struct Options {
    /// Capacity of the host tier, in blocks.
    pub host_blocks: usize,
    /// Capacity of the disk tier, in blocks; 0: no disk.
    pub disk_blocks: usize,
    /// Eviction policy of both.
    pub policy: PolicyKind,
    /// Write to disk only what was seen before.
    pub second_touch: bool,
    /// Fixes the random choices.
    pub seed: u64,
}

/// An engine with a host tier and, if its capacity is not 0, a disk tier.
#[derive(Debug)]
pub struct EngineCache {
    engine: Engine,
    session: SessionId,
    hashes: Vec<BlockHash>,
    io: Vec<IoRequest>,
    requests: u64,
    /// Metadata writes in flight. They end in batches, so that a block of records is encoded once for
    /// many changes: what is measured is the index.
    metadata: Vec<u64>,
    disk: bool,
}

impl EngineCache {
    /// An empty engine. Capacities are rounded down to whole pages of the engine.
    ///
    /// # Errors
    /// If the engine refuses such a small host tier.
    pub fn new(options: &Options) -> Result<Self, ReplayError> {
        let Options {
            host_blocks,
            disk_blocks,
            policy,
            second_touch,
            seed,
        } = *options;
        let bytes = |blocks: usize| blocks as u64 * u64::from(PAYLOAD_BYTES);
        let mut engine = Engine::new(EngineConfig {
            policy,
            second_touch,
            seed,
            ..EngineConfig::new(bytes(host_blocks))
        });
        if disk_blocks > 0 {
            engine.attach_disks(vec![DeviceImage {
                capacity: bytes(disk_blocks),
                page_bytes: page_bytes_for(bytes(disk_blocks)),
                super_bytes: Vec::new(),
                table: Vec::new().into(),
            }]);
        }
        let session = engine.open_session(NamespaceSpec {
            description: "trace".to_owned(),
            hash_block_size: TOKENS,
            alignment_tokens: TOKENS,
            groups: vec![GroupSpec {
                kind: GroupKind::Full,
                block_tokens: TOKENS,
                payload_bytes: PAYLOAD_BYTES,
            }],
        })?;
        let disk = disk_blocks > 0;
        Ok(Self {
            engine,
            session,
            hashes: Vec::new(),
            io: Vec::new(),
            requests: 0,
            metadata: Vec::new(),
            disk,
        })
    }

    /// Carries out all IO that the engine wants.
    fn settle(&mut self) {
        let mut checksums = Vec::new();
        loop {
            self.engine.next_checksums(&mut checksums);
            for ChecksumRequest { token, .. } in checksums.drain(..) {
                let result = Ok(0);
                self.engine.complete(IoCompletion { token, result });
            }
            self.engine.next_io(DEPTH, &mut self.io);
            if self.io.is_empty() {
                return;
            }
            for request in self.io.drain(..) {
                let token = request.token();
                let result = match request {
                    IoRequest::ReadPayload { checksum, .. } => Ok(checksum),
                    IoRequest::WritePayload { .. } => Ok(0),
                    IoRequest::WriteMeta { .. } => {
                        self.metadata.push(token);
                        continue;
                    }
                };
                self.engine.complete(IoCompletion { token, result });
            }
        }
    }
}

impl ReplayCache for EngineCache {
    fn request(&mut self, blocks: &[u64]) -> usize {
        self.requests += 1;
        self.engine.set_now(self.requests * REQUEST_NS);
        if self.requests.is_multiple_of(METADATA_REQUESTS) {
            for token in self.metadata.drain(..) {
                self.engine.complete(IoCompletion {
                    token,
                    result: Ok(0),
                });
            }
        }
        self.hashes.clear();
        self.hashes.extend(
            blocks
                .iter()
                .filter_map(|&block| BlockHash::new(&hash(block))),
        );
        let tokens = blocks.len() as u32 * TOKENS;
        let hit = loop {
            match self
                .engine
                .lookup(
                    self.session,
                    &LookupRequest::new(REQUEST, &self.hashes).max(Tokens(tokens)),
                )
                .tokens()
            {
                Some(Tokens(hit)) => break hit,
                None => self.settle(),
            }
        };
        let save = self
            .engine
            .begin_save(
                self.session,
                &SaveRequest::new(REQUEST, &self.hashes, Tokens(tokens)),
            )
            .transfer;
        if let Some(save) = save {
            self.engine.end_transfer(save.id, true);
        }
        self.engine.finish_request(self.session, REQUEST);
        self.settle();
        (hit / TOKENS) as usize
    }

    fn counts(&self) -> Vec<Counts> {
        let counters = self.engine.counters();
        let host = Counts {
            inserted: counters.saved_blocks + counters.disk_reads,
            evicted: counters.host_evictions,
        };
        let disk = Counts {
            inserted: counters.disk_writes,
            evicted: counters.disk_evictions,
        };
        if self.disk {
            vec![host, disk]
        } else {
            vec![host]
        }
    }
}

/// 32 bytes that are as good as the SHA-256 that vLLM uses: blocks spread evenly by any of them.
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
