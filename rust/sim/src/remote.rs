//! A remote store: its objects outlive the engines, and its answers come late, in any order, wrong, or never.

use std::collections::BTreeMap;

use undercroft_contract::remote::segment::SegmentHeader;
use undercroft_contract::remote::{
    ObjectKey, RemoteCompletion, RemoteConfig, RemoteDone, RemoteError, RemotePart, RemoteRequest,
    RemoteWrite,
};

use crate::arena::{Hand, SimArena};
use crate::content::{Token, checksum};
use crate::random::Random;

const MILLISECOND: u64 = 1_000_000;

/// Rates of faults, in a thousand operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    failed: u64,
    throttled: u64,
    hang: u64,
    slow: u64,
    /// A put is lost although it succeeds.
    lost: u64,
    full: u64,
    /// A bit of an object flips, in a thousand steps.
    corrupt: u64,
    /// An object takes the place of another.
    swapped: u64,
    /// An object is removed.
    evicted: u64,
    /// No key of the host decrypts an object.
    sealed: u64,
}

#[derive(Clone, Debug)]
struct Object {
    header: SegmentHeader,
    payloads: Vec<Vec<Token>>,
    /// The key of the object's payloads; `None` if they are plain.
    key: Option<u64>,
}

#[derive(Debug)]
struct Flight {
    request: RemoteRequest,
    due_ns: u64,
    /// Whether the operation neither hangs nor is slow.
    is_prompt: bool,
}

/// The store of a world, with the one engine's operations.
#[derive(Debug)]
pub(crate) struct SimRemote {
    objects: BTreeMap<ObjectKey, Object>,
    flights: Vec<Flight>,
    pub(crate) faults: Faults,
    room: usize,
    latency_ns: u64,
    /// Whether the store answers nothing.
    is_frozen: bool,
    /// The key of the host that is connected; `None` without encryption.
    pub(crate) key: Option<u64>,
}

/// The use of a store, drawn for a world; `None` if it has none.
pub(crate) fn config(random: &mut Random) -> Option<RemoteConfig> {
    random.chance(500).then(|| drawn(random))
}

/// A use of a store.
pub(crate) fn drawn(random: &mut Random) -> RemoteConfig {
    RemoteConfig {
        object_bytes: random.range(1, 16) * 4096,
        write: random.pick(&[
            RemoteWrite::All,
            RemoteWrite::All,
            RemoteWrite::All,
            RemoteWrite::SecondTouch,
            RemoteWrite::None,
        ]),
        write_rate: random.pick(&[0, 0, 1 << 20]),
        window_bytes: random.range(1, 256) * 4096,
        probe_ns: random.range(1, 100) * MILLISECOND,
        stall_ns: random.range(1, 200) * MILLISECOND,
        absent_ns: random.below(1000) * MILLISECOND,
    }
}

impl SimRemote {
    pub(crate) fn new(random: &mut Random) -> Self {
        let mut rate = |most: u64| match random.chance(300) {
            true => random.range(1, most),
            false => 0,
        };
        Self {
            faults: Faults {
                failed: rate(300),
                throttled: rate(200),
                hang: rate(60),
                slow: rate(60),
                lost: rate(100),
                full: rate(100),
                corrupt: rate(40),
                swapped: rate(40),
                evicted: rate(60),
                sealed: rate(60),
            },
            objects: BTreeMap::new(),
            flights: Vec::new(),
            room: random.range(1, 12) as usize,
            latency_ns: random.pick(&[1, 1, 10]) * random.range(1, 2 * MILLISECOND),
            is_frozen: false,
            key: None,
        }
    }

    /// Changes or removes objects, and lets the store hang or answer again.
    pub(crate) fn decay(&mut self, random: &mut Random) {
        let any = |objects: &BTreeMap<ObjectKey, Object>, random: &mut Random| {
            let at = random.index(objects.len() + 1);
            objects.keys().nth(at).copied()
        };
        if random.chance(self.faults.evicted)
            && let Some(key) = any(&self.objects, random)
        {
            self.objects.remove(&key);
        }
        if random.chance(self.faults.corrupt)
            && let Some(key) = any(&self.objects, random)
            && let Some(object) = self.objects.get_mut(&key)
        {
            let payload = random.index(object.payloads.len());
            let tokens = &mut object.payloads[payload];
            let at = random.index(tokens.len());
            tokens[at] ^= 1 << random.below(64);
        }
        if random.chance(self.faults.swapped)
            && let (Some(a), Some(b)) = (any(&self.objects, random), any(&self.objects, random))
        {
            let other = self.objects[&b].clone();
            self.objects.insert(a, other);
        }
        if self.faults.hang > 0 && random.chance(5) {
            self.is_frozen ^= true;
        }
    }

    pub(crate) fn submit(
        &mut self,
        request: RemoteRequest,
        now_ns: u64,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Result<(), String> {
        if self.room() == 0 {
            return Err("more for the remote store than it has room for".to_owned());
        }
        let (parts, hand) = parts_of(&request);
        for part in parts {
            let (at, len) = (part.arena_offset, u64::from(part.len));
            arena.take(at, len, hand, "the remote store")?;
            if hand == Hand::Write {
                for token in arena.at_mut(at, len) {
                    *token = random.next();
                }
            }
        }
        let (due_ns, is_prompt) = match () {
            () if random.chance(self.faults.hang) => (u64::MAX, false),
            () if random.chance(self.faults.slow) => (now_ns + 10_000 * MILLISECOND, false),
            () => (now_ns + random.range(1, self.latency_ns), true),
        };
        self.flights.push(Flight {
            request,
            due_ns,
            is_prompt,
        });
        Ok(())
    }

    /// Ends one of the operations that are due.
    pub(crate) fn complete(
        &mut self,
        now_ns: u64,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Option<(RemoteRequest, RemoteCompletion)> {
        let due = (0..self.flights.len()).filter(|&at| self.flights[at].due_ns <= now_ns);
        let due: Vec<usize> = due.filter(|_| !self.is_frozen).collect();
        if due.is_empty() {
            return None;
        }
        let request = self.flights.swap_remove(random.pick(&due)).request;
        let result = self.carry_out(&request, arena, random);
        let (parts, hand) = parts_of(&request);
        for part in parts {
            arena.release(part.arena_offset, u64::from(part.len), hand);
        }
        let completion = RemoteCompletion {
            token: request.token(),
            result,
        };
        Some((request, completion))
    }

    fn carry_out(
        &mut self,
        request: &RemoteRequest,
        arena: &mut SimArena,
        random: &mut Random,
    ) -> Result<RemoteDone, RemoteError> {
        if random.chance(self.faults.throttled) {
            return Err(RemoteError::Throttled);
        }
        if random.chance(self.faults.failed) {
            return Err(random.pick(&[
                RemoteError::Unreachable,
                RemoteError::Late,
                RemoteError::Denied,
            ]));
        }
        match request {
            RemoteRequest::Probe { keys, .. } => {
                let there = (0..)
                    .zip(keys)
                    .filter(|(_, key)| self.objects.contains_key(key));
                let bits = there.fold(0, |bits, (at, _)| bits | 1 << at);
                Ok(RemoteDone::Present(bits))
            }
            RemoteRequest::Get {
                key, expect, parts, ..
            } => {
                let object = self.objects.get(key).ok_or(RemoteError::NotFound)?;
                if object.header.described != **expect {
                    return Err(RemoteError::Corrupt);
                }
                if random.chance(self.faults.sealed) || object.key != self.key {
                    return Err(RemoteError::Cipher);
                }
                let mut sums = Vec::new();
                for part in parts {
                    let payload = part.payload as usize;
                    let tokens = &object.payloads[payload];
                    let slot = arena.at_mut(part.arena_offset, u64::from(part.len));
                    slot.copy_from_slice(tokens);
                    sums.push(checksum(tokens));
                    if sums.last() != object.header.checksums.get(payload) {
                        return Err(RemoteError::Corrupt);
                    }
                }
                Ok(RemoteDone::Got(sums))
            }
            RemoteRequest::Put {
                key,
                header,
                parts,
                if_absent,
                ..
            } => {
                if random.chance(self.faults.full) {
                    return Err(RemoteError::Full);
                }
                if *if_absent && self.objects.contains_key(key) {
                    return Ok(RemoteDone::AlreadyThere);
                }
                if !random.chance(self.faults.lost) {
                    let of_host = self.key;
                    let stored = object(header, parts, of_host, arena);
                    self.objects.insert(*key, stored);
                }
                Ok(RemoteDone::Stored)
            }
        }
    }

    /// The engine ends without warning. Objects that it was writing may exist or not.
    pub(crate) fn crash(&mut self, arena: &SimArena, random: &mut Random) {
        for flight in std::mem::take(&mut self.flights) {
            if let RemoteRequest::Put {
                key, header, parts, ..
            } = &flight.request
                && random.chance(500)
            {
                let stored = object(header, parts, self.key, arena);
                self.objects.insert(*key, stored);
            }
        }
    }

    /// From now on nothing fails, and operations that hung go on. Returns the faults until then.
    pub(crate) fn heal(&mut self, now_ns: u64) -> Faults {
        let faults = std::mem::take(&mut self.faults);
        self.is_frozen = false;
        for flight in &mut self.flights {
            flight.due_ns = flight.due_ns.min(now_ns + self.latency_ns);
        }
        faults
    }

    /// Time at which the next operation ends that neither hangs nor is slow.
    pub(crate) fn next_due_ns(&self) -> Option<u64> {
        let flights = self.flights.iter().filter(|flight| flight.is_prompt);
        flights
            .map(|flight| flight.due_ns)
            .min()
            .filter(|_| !self.is_frozen)
    }

    pub(crate) fn room(&self) -> usize {
        self.room - self.flights.len()
    }

    pub(crate) fn puts_in_flight(&self) -> usize {
        let is_put = |of: &&Flight| matches!(of.request, RemoteRequest::Put { .. });
        self.flights.iter().filter(is_put).count()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }
}

fn object(header: &[u8], parts: &[RemotePart], key: Option<u64>, arena: &SimArena) -> Object {
    let header = SegmentHeader::decode(header);
    let tokens = |part: &RemotePart| arena.at(part.arena_offset, u64::from(part.len)).to_vec();
    Object {
        header: header.expect("the engine writes headers"),
        payloads: parts.iter().map(tokens).collect(),
        key,
    }
}

fn parts_of(request: &RemoteRequest) -> (&[RemotePart], Hand) {
    match request {
        RemoteRequest::Probe { .. } => (&[], Hand::Read),
        RemoteRequest::Get { parts, .. } => (parts, Hand::Write),
        RemoteRequest::Put { parts, .. } => (parts, Hand::Read),
    }
}

pub(crate) fn brief_remote(request: &RemoteRequest) -> String {
    let name = |key: &ObjectKey| {
        let group = key
            .group
            .map_or(String::new(), |group| format!("-g{group}"));
        format!("{:016x}-{}{group}", key.end.fingerprint(), key.hash_blocks)
    };
    match request {
        RemoteRequest::Probe { keys, .. } => {
            format!(
                "probe of {}",
                keys.iter().map(name).collect::<Vec<_>>().join(" ")
            )
        }
        RemoteRequest::Get { key, parts, .. } => format!("get of {}: {parts:?}", name(key)),
        RemoteRequest::Put { key, parts, .. } => format!("put of {}: {parts:?}", name(key)),
    }
}
