//! A remote store that the engines of a replay share: the names of objects, of which the least recently used leave.

use std::sync::{Arc, Mutex};

use undercroft_contract::remote::{RemoteCompletion, RemoteDone, RemoteError, RemoteRequest};

use super::CHECKSUM;
use super::recent::RecentSet;

/// Nanoseconds of a window of [`StoreLoad::peak`].
const WINDOW_NS: u64 = 60_000_000_000;

pub(super) type SharedStore = Arc<Mutex<Store>>;

/// Operations of a store. Blocks are the engine's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUse {
    /// Reads of objects that are there.
    pub gets: u64,
    /// Questions for one object, and reads of objects that are not there.
    pub probes: u64,
    /// Writes of objects.
    pub puts: u64,
    /// Blocks that were read.
    pub read_blocks: u64,
    /// Blocks that were sent to the store, also of objects that it has.
    pub written_blocks: u64,
}

impl StoreUse {
    fn since(self, before: Self) -> Self {
        Self {
            gets: self.gets - before.gets,
            probes: self.probes - before.probes,
            puts: self.puts - before.puts,
            read_blocks: self.read_blocks - before.read_blocks,
            written_blocks: self.written_blocks - before.written_blocks,
        }
    }

    /// Requests of all kinds.
    pub fn requests(&self) -> u64 {
        self.gets + self.probes + self.puts
    }

    fn blocks(&self) -> u64 {
        self.read_blocks + self.written_blocks
    }
}

/// The work of a store over a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreLoad {
    /// All of it.
    pub total: StoreUse,
    /// Most requests in a minute.
    pub peak_requests: u64,
    /// Most blocks that are read and written in a minute.
    pub peak_blocks: u64,
    /// Objects that left for others.
    pub evicted: u64,
}

#[derive(Debug)]
pub(super) struct Store {
    objects: RecentSet,
    load: StoreLoad,
    /// The end of the present window, and the work before it.
    window_end_ns: u64,
    before: StoreUse,
}

impl Store {
    /// An empty store for this number of objects.
    pub(super) fn new(objects: usize) -> Self {
        Self {
            objects: RecentSet::new(objects),
            load: StoreLoad::default(),
            window_end_ns: WINDOW_NS,
            before: StoreUse::default(),
        }
    }

    pub(super) fn set_now(&mut self, now_ns: u64) {
        if now_ns >= self.window_end_ns {
            self.note_peak();
            self.before = self.load.total;
            self.window_end_ns = (now_ns / WINDOW_NS + 1) * WINDOW_NS;
        }
    }

    pub(super) fn load(&mut self) -> StoreLoad {
        self.note_peak();
        self.load
    }

    fn note_peak(&mut self) {
        let load = &mut self.load;
        let of_window = load.total.since(self.before);
        load.peak_requests = load.peak_requests.max(of_window.requests());
        load.peak_blocks = load.peak_blocks.max(of_window.blocks());
    }

    pub(super) fn carry_out(&mut self, request: &RemoteRequest) -> RemoteCompletion {
        let work = &mut self.load.total;
        let result = match request {
            RemoteRequest::Probe { keys, .. } => {
                work.probes += keys.len() as u64;
                let bits = (0..)
                    .zip(keys)
                    .map(|(at, key)| u64::from(self.objects.contains(key.end.fingerprint())) << at);
                Ok(RemoteDone::Present(bits.sum()))
            }
            RemoteRequest::Get { key, parts, .. } => {
                let object = key.end.fingerprint();
                if self.objects.contains(object) {
                    self.objects.add(object);
                    work.gets += 1;
                    work.read_blocks += parts.len() as u64;
                    Ok(RemoteDone::Got(vec![CHECKSUM; parts.len()]))
                } else {
                    work.probes += 1;
                    Err(RemoteError::NotFound)
                }
            }
            RemoteRequest::Put { key, parts, .. } => {
                let object = key.end.fingerprint();
                let was_there = self.objects.contains(object);
                work.puts += 1;
                work.written_blocks += parts.len() as u64;
                self.load.evicted += u64::from(self.objects.add(object).is_some());
                Ok(match was_there {
                    true => RemoteDone::AlreadyThere,
                    false => RemoteDone::Stored,
                })
            }
        };
        RemoteCompletion {
            token: request.token(),
            result,
        }
    }
}
