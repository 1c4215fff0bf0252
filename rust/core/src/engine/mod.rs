//! The engine: a single-threaded state machine that owns index, slots, job table and disk
//! bookkeeping.
//!
//! It has no threads, no clock, no system calls and no randomness of its own. Commands and IO
//! completions go in, answers and IO requests come out, and each entry does bounded work. The shell
//! (`crate::shell`) gives it threads; the simulator (`rust/sim`) gives it whole lives from a seed.
//!
//! The three paths: `lookup` (submit, poll, discard), `promote` (disk to arena), `transfer`
//! (loads and saves by the workers), with `writeback` and `records` (arena to disk) behind the save.
//! `places` holds the transitions of payload places that all of them share, `evict` makes room.

use std::collections::{HashMap, HashSet, VecDeque};

use slotmap::SlotMap;

use crate::disk::Disk;
use crate::error::RegisterError;
use crate::forest::{Forest, NONE, NodeId, NsId};
use crate::io::{IoCompletion, IoRequest, device_depth};
use crate::key::BlockHash;
use crate::metrics::{Counters, Gauges};
use crate::namespace::{GroupKind, Namespace, NamespaceSpec};
use crate::policy::{Policy, PolicyKind, Seen};
use crate::slots::{Slots, page_bytes_for};

#[cfg(feature = "check")]
mod check;
mod evict;
mod lookup;
mod places;
mod promote;
mod records;
mod recover;
mod reset;
mod transfer;
mod writeback;

pub use lookup::Answer;
pub use recover::Recovery;
pub use transfer::{Extent, Offer, Transfer};

slotmap::new_key_type! {
    /// One client's use of one namespace.
    pub struct SessionId;
    struct RequestId;
    struct OpId;
    /// A load or a save under way.
    pub struct TransferId;
}

/// Namespaces of one engine, over its life.
const NAMESPACES_MAX: usize = 1024;

/// Blocks that second-touch admission remembers, at about 15 bytes each.
const SEEN_BLOCKS: usize = 2 << 20;

/// Sizes, policies and limits. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Bytes of the arena.
    pub host_bytes: u64,
    /// Eviction policy of every tier.
    pub policy: PolicyKind,
    /// Bytes that promotions may hold in the arena until they are loaded.
    pub promotion_bytes: u64,
    /// A hit that gains fewer tokens than this is not worth a load.
    pub min_load_tokens: u32,
    /// A promotion that sees no read end for this long, by the last look, is answered with what is there.
    pub stall_ns: u64,
    /// How long a request that the scheduler has asked for may wait for its promotion, as a base and a
    /// part for every 1,000 tokens it would gain; `None` waits as long as reads come in.
    pub promotion_wait_ns: Option<(u64, u64)>,
    /// Bytes a second that may be written to disk; 0 is unlimited.
    pub write_rate: u64,
    /// Write only what has been hit before (endurance mode).
    pub second_touch: bool,
    /// Writes that may be in flight while a read is.
    pub writes_beside_reads: usize,
    /// Source of every random choice.
    pub seed: u64,
    /// Seconds since 1970 when the engine's clock was at zero.
    pub unix_at_zero_s: u64,
}

impl EngineConfig {
    /// Defaults for an arena of `host_bytes`.
    pub fn new(host_bytes: u64) -> Self {
        Self {
            host_bytes,
            policy: PolicyKind::Lru,
            promotion_bytes: host_bytes / 2,
            min_load_tokens: 1,
            stall_ns: 1_000_000_000,
            promotion_wait_ns: None,
            write_rate: 0,
            second_touch: false,
            writes_beside_reads: 2,
            seed: 0,
            unix_at_zero_s: 0,
        }
    }
}

/// A client's session.
#[derive(Debug)]
struct Session {
    ns: NsId,
    requests: HashMap<Box<str>, RequestId>,
    /// How many granules each request has saved or found here when it did.
    saved: HashMap<Box<str>, u32>,
    /// The last save left blocks out for want of memory.
    save_refused: bool,
    /// How far a hit must end before the end of what is here.
    dropped_tokens: u32,
}

/// What an IO operation in flight is for. The node it works on is kept alive by `Node::busy`.
#[derive(Clone, Copy, Debug)]
enum Op {
    Read {
        node: NodeId,
        group: u8,
        started_ns: u64,
    },
    Write {
        node: NodeId,
        group: u8,
        started_ns: u64,
    },
    Table {
        device: usize,
        block: u32,
    },
    Namespace {
        device: usize,
        index: usize,
    },
}

/// The engine. See the module's description.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    now_ns: u64,
    /// When the device was looked at last: what had ended by then is known.
    looked_ns: u64,
    tick: u64,
    random: u64,
    forest: Forest,
    host: Slots,
    host_policy: Policy,
    /// Nodes that are no leaves of the arena, but hold payloads there that a hit can do without.
    host_spares: Policy,
    disks: Vec<Disk>,
    namespaces: Vec<Namespace>,
    sessions: SlotMap<SessionId, Session>,
    requests: SlotMap<RequestId, lookup::Request>,
    transfers: SlotMap<TransferId, transfer::TransferState>,
    ops: SlotMap<OpId, Op>,
    reads_in_flight: usize,
    writes_in_flight: usize,
    /// See [`Engine::set_io_depth`].
    io_depth: Option<usize>,
    /// Requests with reads to issue: first those that the scheduler waits for, then prefetches.
    turns: [VecDeque<RequestId>; 2],
    /// Who waits for a payload being read.
    waiters: HashMap<(NodeId, u8), Vec<promote::Waiter>>,
    /// Arena bytes that promotions hold until they are loaded; of these, for requests that the
    /// scheduler has not asked for yet; and which of those are done.
    promoted_bytes: u64,
    prefetched_bytes: u64,
    prefetched: VecDeque<RequestId>,
    write_queue: VecDeque<writeback::Queued>,
    queued_bytes: u64,
    refused: writeback::Refused,
    write_tokens: u64,
    write_tokens_at_ns: u64,
    /// Nodes that could not be written although children of them are on disk.
    stranded: VecDeque<(NodeId, u32)>,
    /// There was no room for one of them, and nothing has left since.
    rescue_waits: bool,
    entry_writes: VecDeque<reset::EntryWrite>,
    entries_in_flight: Vec<reset::EntryWrite>,
    /// Instances of namespaces that are or were in use: never given to another.
    instances: HashSet<u64>,
    record_generation: u64,
    /// Blocks offered before, for second-touch admission.
    seen: Option<Seen>,
    counters: Counters,
}

impl Engine {
    /// An engine without disks; [`Engine::attach_disks`] adds them.
    pub fn new(config: EngineConfig) -> Self {
        let host = Slots::new(config.host_bytes, page_bytes_for(config.host_bytes));
        let capacity_blocks = usize::try_from(config.host_bytes >> 16)
            .unwrap_or(usize::MAX)
            .max(64);
        Self {
            host_policy: Policy::new(config.policy, capacity_blocks, config.seed),
            host_spares: Policy::new(PolicyKind::Lru, 0, 0),
            forest: Forest::new(config.seed),
            seen: config.second_touch.then(|| Seen::new(SEEN_BLOCKS)),
            random: config.seed ^ 0x5DEE_CE66_D1CE_4E5B,
            host,
            config,
            now_ns: 0,
            looked_ns: 0,
            tick: 0,
            disks: Vec::new(),
            namespaces: Vec::new(),
            sessions: SlotMap::with_key(),
            requests: SlotMap::with_key(),
            transfers: SlotMap::with_key(),
            ops: SlotMap::with_key(),
            reads_in_flight: 0,
            writes_in_flight: 0,
            io_depth: None,
            turns: [VecDeque::new(), VecDeque::new()],
            waiters: HashMap::new(),
            promoted_bytes: 0,
            prefetched_bytes: 0,
            prefetched: VecDeque::new(),
            write_queue: VecDeque::new(),
            queued_bytes: 0,
            refused: writeback::Refused::default(),
            write_tokens: 0,
            write_tokens_at_ns: 0,
            stranded: VecDeque::new(),
            rescue_waits: false,
            entry_writes: VecDeque::new(),
            entries_in_flight: Vec::new(),
            instances: HashSet::new(),
            record_generation: 0,
            counters: Counters::default(),
        }
    }

    /// Tells the time, in nanoseconds since the engine's start; never goes back.
    pub fn set_now(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Tells how many IO operations can be in flight ([`IoEngine::depth`]). Reads and writes each take a
    /// part of them only.
    ///
    /// [`IoEngine::depth`]: crate::io::IoEngine::depth
    pub fn set_io_depth(&mut self, depth: usize) {
        self.io_depth = Some(depth);
    }

    /// How many reads may start while `room` operations may.
    fn reads_room(&self, room: usize) -> usize {
        let Some(depth) = self.io_depth else {
            return room;
        };
        // What is read and being verified has left its room already.
        let reads = depth.saturating_sub(room + self.writes_in_flight);
        device_depth(depth).saturating_sub(reads).min(room)
    }

    /// How many writes may be in flight.
    fn writes_max(&self) -> usize {
        self.io_depth
            .map_or(usize::MAX, |depth| 2 * device_depth(depth))
    }

    /// Opens a session on a namespace, which is registered if it is new.
    ///
    /// # Errors
    /// If the spec makes no sense, or a payload is larger than a page of the arena or of a data file.
    pub fn open_session(&mut self, spec: NamespaceSpec) -> Result<SessionId, RegisterError> {
        let ns = self.register(spec)?;
        Ok(self.sessions.insert(Session {
            ns,
            requests: HashMap::new(),
            saved: HashMap::new(),
            save_refused: false,
            dropped_tokens: 0,
        }))
    }

    /// Sets how many tokens before the end of what is here each hit of a session must end, 0 at first.
    /// What a draft model keeps for a token depends on the token after it.
    pub fn set_dropped_tokens(&mut self, session: SessionId, tokens: u32) {
        if let Some(state) = self.sessions.get_mut(session) {
            state.dropped_tokens = tokens;
        }
    }

    fn register(&mut self, spec: NamespaceSpec) -> Result<NsId, RegisterError> {
        spec.validate()?;
        let digest = spec.digest();
        let shared = |ns: &Namespace| ns.digest == digest && !ns.private;
        if let Some(at) = self.namespaces.iter().position(shared) {
            if self.namespaces[at].spec.groups != spec.groups
                || self.namespaces[at].spec.hash_block_tokens != spec.hash_block_tokens
            {
                return Err(RegisterError::Conflict {
                    digest: digest.to_hex(),
                });
            }
            // The alignment is the client's way of looking, not a property of the bytes.
            self.namespaces[at].spec.alignment_tokens = spec.alignment_tokens;
            return Ok(NsId::try_from(at).unwrap_or(NsId::MAX));
        }
        let instance = self.new_instance();
        let ns = self.add_namespace(spec, instance, false)?;
        self.save_namespace(ns);
        Ok(ns)
    }

    /// Adds a namespace to the tables of the engine (not of the disks).
    fn add_namespace(
        &mut self,
        spec: NamespaceSpec,
        instance: u64,
        private: bool,
    ) -> Result<NsId, RegisterError> {
        let count = self.namespaces.iter().filter(|ns| !ns.private).count();
        // As many private ones as there are sessions.
        if !private && count >= NAMESPACES_MAX || self.namespaces.len() >= usize::from(NsId::MAX) {
            return Err(RegisterError::TooMany { count });
        }
        let namespace = self.make_namespace(spec, instance, private)?;
        self.namespaces.push(namespace);
        Ok(self.forest.add_namespace())
    }

    fn make_namespace(
        &mut self,
        spec: NamespaceSpec,
        instance: u64,
        private: bool,
    ) -> Result<Namespace, RegisterError> {
        let mut host_class = Vec::new();
        let mut disk_class = vec![Vec::new(); self.disks.len()];
        for (index, group) in spec.groups.iter().enumerate() {
            if group.kind == GroupKind::Ignored {
                host_class.push(None);
                disk_class.iter_mut().for_each(|classes| classes.push(None));
                continue;
            }
            let payload_bytes = u64::from(group.payload_bytes);
            let too_large = |region, page_bytes, option| RegisterError::PayloadTooLarge {
                group: index,
                payload_bytes,
                region,
                page_bytes,
                option,
            };
            let class = self.host.class_for(payload_bytes);
            if class.is_none() {
                return Err(too_large(
                    "the arena",
                    self.host.page_bytes(),
                    "host_memory",
                ));
            }
            host_class.push(class);
            for (disk, classes) in self.disks.iter_mut().zip(&mut disk_class) {
                let class = disk.slots.class_for(payload_bytes);
                if class.is_none() {
                    let page_bytes = disk.slots.page_bytes();
                    return Err(too_large("the data file", page_bytes, "disk_capacity"));
                }
                classes.push(class);
            }
        }
        Ok(Namespace {
            digest: spec.digest(),
            spec,
            instance,
            private,
            volatile: private,
            host_class,
            disk_class,
        })
    }

    /// Ends a session: its lookups, leases, loads and saves.
    ///
    /// The caller must be sure that no worker of the session copies any more: its slots are reused.
    pub fn close_session(&mut self, session: SessionId) {
        self.end_lookups(session);
        let of_session: Vec<TransferId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.session == session)
            .map(|(id, _)| id)
            .collect();
        for transfer in of_session {
            self.end_transfer(transfer, false);
        }
        if let Some(state) = self.sessions.remove(session)
            && self.namespaces[usize::from(state.ns)].private
        {
            self.drop_all(state.ns);
        }
    }

    /// Ends a session's lookups and frees their leases. Loads and saves under way go on.
    pub fn end_lookups(&mut self, session: SessionId) {
        let Some(state) = self.sessions.get_mut(session) else {
            return;
        };
        for request in std::mem::take(&mut state.requests).into_values() {
            self.drop_request(request);
        }
    }

    /// Ends a session's lookups but for those that were answered with a hit: a worker may copy what they
    /// keep, for a load that was begun and that we have not heard of.
    pub fn end_unanswered(&mut self, session: SessionId) {
        let Some(state) = self.sessions.get_mut(session) else {
            return;
        };
        let answered = |id: &RequestId| {
            let of = &self.requests[*id];
            of.promotion.is_none() && of.lease != NONE
        };
        let ended = state.requests.extract_if(|_, id| !answered(id));
        for (_, request) in ended.collect::<Vec<_>>() {
            self.drop_request(request);
        }
    }

    /// A session's lookups, those of them that the disk owes an answer, loads and saves.
    pub fn session_jobs(&self, session: SessionId) -> [usize; 4] {
        let requests = self.sessions.get(session).map(|state| &state.requests);
        let pending = requests.map_or(0, |requests| {
            let of = |id: &&RequestId| self.requests[**id].promotion.is_some();
            requests.values().filter(of).count()
        });
        let transfers = || self.transfers.values().filter(|of| of.session == session);
        let loads = transfers().filter(|transfer| transfer.is_load()).count();
        let lookups = requests.map_or(0, HashMap::len);
        [lookups, pending, loads, transfers().count() - loads]
    }

    /// Digest of a session's namespace, hexadecimal.
    pub fn namespace_of(&self, session: SessionId) -> Option<String> {
        let ns = self.sessions.get(session)?.ns;
        Some(self.namespaces[usize::from(ns)].digest.to_hex())
    }

    /// Whether [`Engine::next_io`] may have something to start, given free depth.
    pub fn has_io(&self) -> bool {
        !self.turns[0].is_empty()
            || !self.turns[1].is_empty()
            || self.has_entry_writes()
            || !self.write_queue.is_empty()
            || self.has_stranded()
            || self
                .disks
                .iter()
                .any(|disk| disk.is_alive() && disk.dirty_blocks() > 0)
    }

    /// Whether nothing is in flight and nothing waits to be written.
    pub fn is_quiet(&self) -> bool {
        self.ops.is_empty() && !self.has_io()
    }

    /// Whether the device has reads. Whoever takes their ends then calls [`Engine::next_io`] from time to
    /// time also if none ends: that is how the engine knows that the device answers no more.
    pub fn reads(&self) -> bool {
        self.reads_in_flight > 0
    }

    /// Appends IO requests to start now, at most `room` of them: reads before writes. All that has ended
    /// has been taken ([`Engine::complete`]).
    pub fn next_io(&mut self, room: usize, out: &mut Vec<IoRequest>) {
        self.looked_ns = self.now_ns;
        let limit = out.len() + room;
        self.next_reads(out.len() + self.reads_room(room), out);
        self.next_writes(limit, out);
    }

    /// Takes the end of an IO operation.
    pub fn complete(&mut self, completion: IoCompletion) {
        let id = OpId::from(slotmap::KeyData::from_ffi(completion.token));
        let Some(op) = self.ops.remove(id) else {
            return;
        };
        match op {
            Op::Read {
                node,
                group,
                started_ns,
            } => {
                self.reads_in_flight -= 1;
                self.read_ended(node, group, started_ns, completion.result);
            }
            Op::Write {
                node,
                group,
                started_ns,
            } => {
                self.writes_in_flight -= 1;
                self.write_ended(node, group, started_ns, completion.result);
            }
            Op::Table { device, block } => {
                self.writes_in_flight -= 1;
                self.table_write_ended(device, block, completion.result);
            }
            Op::Namespace { device, index } => {
                self.writes_in_flight -= 1;
                self.namespace_write_ended(device, index, completion.result);
            }
        }
    }

    fn start_op(&mut self, op: Op) -> u64 {
        match op {
            Op::Read { .. } => self.reads_in_flight += 1,
            _ => self.writes_in_flight += 1,
        }
        slotmap::Key::data(&self.ops.insert(op)).as_ffi()
    }

    /// Counters since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What there is now. Costs a pass over sessions and disks, not over blocks.
    pub fn gauges(&self) -> Gauges {
        let disk = |of: fn(&Disk) -> u64| self.disks.iter().map(of).sum();
        let (mut loads, mut saves, mut transferring) = (0, 0, 0);
        for transfer in self.transfers.values() {
            transferring += transfer.bytes;
            if transfer.is_load() {
                loads += 1
            } else {
                saves += 1
            }
        }
        Gauges {
            host_capacity_bytes: self.host.capacity(),
            host_used_bytes: self.host.used_bytes(),
            host_pinned_bytes: self.promoted_bytes + transferring,
            host_blocks: self.host.blocks(),
            disk_capacity_bytes: disk(|disk| disk.slots.capacity()),
            disk_used_bytes: disk(|disk| disk.slots.used_bytes()),
            disk_blocks: disk(|disk| disk.slots.blocks()),
            disk_degraded: self
                .disks
                .iter()
                .filter(|disk| disk.health != crate::disk::Health::Good)
                .count() as u64,
            nodes: self.forest.len() as u64,
            namespaces: self.namespaces.len() as u64,
            sessions: self.sessions.len() as u64,
            jobs: self.requests.len() as u64,
            loads,
            saves,
            promotion_queue_bytes: self.promotion_queue_bytes(),
        }
    }

    /// Payloads on each directory.
    pub fn disk_blocks_by_device(&self) -> Vec<u64> {
        self.disks.iter().map(|disk| disk.slots.blocks()).collect()
    }

    /// Health of each directory, with the fault that caused it.
    pub fn health(&self) -> Vec<(crate::disk::Health, Option<crate::io::IoFault>)> {
        self.disks
            .iter()
            .map(|disk| (disk.health, disk.fault))
            .collect()
    }

    /// An identity for a life of a namespace, other than all that the directories know: after a
    /// restart with the same seed too, no old record may come back to life.
    fn new_instance(&mut self) -> u64 {
        loop {
            let instance = self.next_random();
            if self.instances.insert(instance) {
                return instance;
            }
        }
    }

    fn next_random(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31).max(1)
    }

    fn fingerprint(hash: &BlockHash) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&hash.padded()[..8]);
        u64::from_le_bytes(head)
    }
}
