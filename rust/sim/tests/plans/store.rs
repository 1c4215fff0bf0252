//! A remote store whose gets share a rate that changes, and that hangs now and then. It keeps names and no bytes.

use std::collections::HashSet;

use undercroft_contract::key::BlockHash;
use undercroft_contract::remote::{RemoteCompletion, RemoteDone, RemoteError, RemoteRequest};

use super::disk::{Random, SECOND};

/// The rate of the store from some time on.
#[derive(Clone, Copy, Debug)]
struct Phase {
    from_ns: u64,
    bytes_per_s: f64,
}

#[derive(Clone, Debug)]
struct Operation {
    token: u64,
    result: Result<RemoteDone, RemoteError>,
    /// The time at which its bytes begin to arrive.
    ready_ns: u64,
    left: f64,
}

/// The store, as one host sees it.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    phases: Vec<Phase>,
    pub(crate) latency_ns: u64,
    /// Most bytes a second of one get.
    pub(crate) connection: f64,
    operations: Vec<Operation>,
    /// Objects, by the hash at their ends.
    pub(crate) objects: HashSet<BlockHash>,
    now_ns: u64,
    pub(crate) gets: usize,
}

/// Most operations in flight.
const DEPTH: usize = 32;

impl Store {
    pub(crate) fn steady(bytes_per_s: f64, latency_ns: u64) -> Self {
        let from_ns = 0;
        Self {
            phases: vec![Phase {
                from_ns,
                bytes_per_s,
            }],
            latency_ns,
            connection: f64::INFINITY,
            operations: Vec::new(),
            objects: HashSet::new(),
            now_ns: 0,
            gets: 0,
        }
    }

    /// A store of about `bytes_per_s` for `seconds`. Other hosts use it, and it hangs now and then.
    pub(crate) fn any(random: &mut Random, bytes_per_s: f64, seconds: u64) -> Self {
        let mut store = Self::steady(bytes_per_s, random.log(5e5, 5e7) as u64);
        let is_shared = random.chance(0.6);
        let hangs = if random.chance(0.3) { 0.1 } else { 0.0 };
        let mut from_ns = 0;
        store.phases.clear();
        while from_ns < seconds * SECOND {
            let sharers = [1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0][(random.next() % 7) as usize];
            let share = if is_shared { sharers } else { 1.0 };
            let is_hung = random.chance(hangs);
            let bytes_per_s = if is_hung { 0.0 } else { bytes_per_s / share };
            store.phases.push(Phase {
                from_ns,
                bytes_per_s,
            });
            let length = if is_hung { 0.5 } else { random.log(3.0, 60.0) };
            from_ns += (length * SECOND as f64) as u64;
        }
        store.phases.push(Phase {
            from_ns,
            bytes_per_s,
        });
        if random.chance(0.5) {
            store.connection = bytes_per_s / random.log(1.0, 16.0);
        }
        store
    }

    /// From now on the store has this rate.
    pub(crate) fn turns(&mut self, bytes_per_s: f64) {
        let from_ns = 0;
        self.phases = vec![Phase {
            from_ns,
            bytes_per_s,
        }];
    }

    pub(crate) fn room(&self) -> usize {
        DEPTH - self.operations.len()
    }

    pub(crate) fn submit(&mut self, request: &RemoteRequest) {
        let has = |end: &BlockHash| self.objects.contains(end);
        let (result, bytes) = match request {
            RemoteRequest::Probe { keys, .. } => {
                let there = (0..).zip(keys).filter(|(_, key)| has(&key.end));
                let bits = there.fold(0, |bits, (at, _)| bits | 1 << at);
                (Ok(RemoteDone::Present(bits)), 0)
            }
            RemoteRequest::Get { key, parts, .. } if has(&key.end) => {
                let bytes: u64 = parts.iter().map(|part| u64::from(part.len)).sum();
                (Ok(RemoteDone::Got(vec![7; parts.len()])), bytes)
            }
            RemoteRequest::Get { .. } => (Err(RemoteError::NotFound), 0),
            RemoteRequest::Put { .. } => (Err(RemoteError::Full), 0),
        };
        self.gets += usize::from(matches!(request, RemoteRequest::Get { .. }));
        self.operations.push(Operation {
            token: request.token(),
            result,
            ready_ns: self.now_ns + self.latency_ns,
            left: bytes as f64,
        });
    }

    /// When this many objects, each of `bytes` bytes, would have arrived if they were requested now.
    pub(crate) fn all_ns(&self, objects: usize, bytes: u64) -> u64 {
        let mut store = self.clone();
        // A round of probes precedes the third object.
        let probes_ns = if objects > 2 { self.latency_ns } else { 0 };
        for token in 0..objects as u64 {
            store.operations.push(Operation {
                token: u64::MAX - token,
                result: Ok(RemoteDone::Stored),
                ready_ns: self.now_ns + self.latency_ns + probes_ns,
                left: bytes as f64,
            });
        }
        let is_ours = |of: &Operation| of.token > u64::MAX - 1000;
        while store.operations.iter().any(is_ours) {
            let at_ns = store.next_ns();
            store.run_to(at_ns);
            store
                .operations
                .retain(|of| of.ready_ns > at_ns || of.left > 0.5);
        }
        store.now_ns - self.now_ns
    }

    fn rate(&self) -> (f64, u64) {
        let next = self.phases.partition_point(|of| of.from_ns <= self.now_ns);
        let until_ns = self.phases.get(next).map_or(u64::MAX, |of| of.from_ns);
        let active = self
            .operations
            .iter()
            .filter(|of| of.ready_ns <= self.now_ns);
        let active = active.filter(|of| of.left > 0.5).count().max(1);
        let rate = self.phases[next - 1].bytes_per_s / active as f64;
        (rate.min(self.connection), until_ns)
    }

    /// The time of the next change.
    pub(crate) fn next_ns(&self) -> u64 {
        let (rate, until_ns) = self.rate();
        let ends = self.operations.iter().map(|of| {
            if of.ready_ns > self.now_ns {
                of.ready_ns
            } else if of.left <= 0.5 {
                self.now_ns
            } else if rate > 0.0 {
                self.now_ns + (of.left / rate * 1e9).ceil() as u64 + 1
            } else {
                u64::MAX
            }
        });
        ends.fold(until_ns, u64::min)
    }

    /// Transfers bytes until `to_ns`. No earlier change may be due.
    fn run_to(&mut self, to_ns: u64) {
        let (rate, _) = self.rate();
        let bytes = rate * (to_ns - self.now_ns) as f64 / 1e9;
        for of in &mut self.operations {
            if of.ready_ns <= self.now_ns {
                of.left = (of.left - bytes).max(0.0);
            }
        }
        self.now_ns = to_ns;
    }

    /// Continues until `until_ns`, or until operations end. Returns the operations that have ended.
    pub(crate) fn run(&mut self, until_ns: u64) -> Vec<RemoteCompletion> {
        loop {
            let (now_ns, ended) = (self.now_ns, |of: &mut Operation| of.left <= 0.5);
            let is_over = |of: &mut Operation| of.ready_ns <= now_ns && ended(of);
            let over: Vec<Operation> = self.operations.extract_if(.., is_over).collect();
            if !over.is_empty() || now_ns >= until_ns {
                let completion = |of: Operation| RemoteCompletion {
                    token: of.token,
                    result: of.result,
                };
                return over.into_iter().map(completion).collect();
            }
            let to_ns = self.next_ns().min(until_ns);
            self.run_to(to_ns);
        }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns
    }
}
