//! A remote store of the simulator. Objects are in memory; answers come late, in any order, wrong, or never.

use std::collections::BTreeMap;

use undercroft_contract::checksum::checksum;
use undercroft_contract::remote::segment::{SEGMENT_ALIGN, verify};
use undercroft_contract::remote::{
    Expected, RemoteCompletion, RemoteDone, RemoteError, RemotePart, RemoteRequest,
};
use undercroft_io::arena::Arena;

use crate::rig::Random;

/// The probability of each fault, in a thousand operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// The operation fails.
    pub(crate) failed: u64,
    pub(crate) throttled: u64,
    /// The operation does not end until the store is woken.
    pub(crate) hang: u64,
    /// The operation takes ten seconds.
    pub(crate) slow: u64,
    /// A put is lost although it succeeds, or only its beginning is kept.
    pub(crate) torn: u64,
    pub(crate) full: u64,
    /// The credentials allow no put.
    pub(crate) read_only: bool,
    /// A bit of an object flips.
    pub(crate) corrupt: u64,
    /// An object takes the place of another.
    pub(crate) swapped: u64,
    /// An object is removed.
    pub(crate) evicted: u64,
    /// No key of the host decrypts an object.
    pub(crate) sealed: u64,
    /// The answer to a get lacks the checksum of the last payload.
    pub(crate) short: bool,
}

/// Objects by name, shared by all hosts.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) by_name: BTreeMap<String, Vec<u8>>,
    /// Numbers of operations so far.
    pub(crate) probed_keys: usize,
    pub(crate) probes: usize,
    pub(crate) gets: usize,
    pub(crate) puts: usize,
    /// Puts that may replace an existing object.
    pub(crate) replacing: usize,
}

impl Objects {
    fn any(&self, random: &mut Random) -> Option<String> {
        let at = random.below(self.by_name.len() as u64 + 1) as usize;
        self.by_name.keys().nth(at).cloned()
    }

    /// Changes objects without a request of a host.
    pub(crate) fn decay(&mut self, faults: &Faults, random: &mut Random) {
        if random.chance(faults.evicted)
            && let Some(name) = self.any(random)
        {
            self.by_name.remove(&name);
        }
        if random.chance(faults.corrupt)
            && let Some(name) = self.any(random)
        {
            let object = self.by_name.get_mut(&name).expect("it is there");
            let at = random.below(object.len() as u64) as usize;
            object[at] ^= 1 << random.below(8);
        }
        if random.chance(faults.swapped)
            && let (Some(a), Some(b)) = (self.any(random), self.any(random))
        {
            let other = self.by_name[&b].clone();
            self.by_name.insert(a, other);
        }
    }
}

#[derive(Debug)]
struct Flight {
    request: RemoteRequest,
    due_ns: u64,
}

/// One host's connection to the store.
#[derive(Debug)]
pub(crate) struct Connection {
    flights: Vec<Flight>,
    depth: usize,
    pub(crate) latency_ns: u64,
    pub(crate) faults: Faults,
    /// The store answers nothing.
    pub(crate) is_frozen: bool,
    /// Ranges of the arena in use: start, end, and whether an operation writes the range or only reads it.
    hands: Vec<(u64, u64, bool)>,
    pub(crate) most_put_bytes: u64,
}

impl Connection {
    pub(crate) fn new(depth: usize, latency_ns: u64) -> Self {
        Self {
            flights: Vec::new(),
            depth,
            latency_ns,
            faults: Faults::default(),
            is_frozen: false,
            hands: Vec::new(),
            most_put_bytes: 0,
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.depth - self.flights.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Ends the freeze. All operations, also the ones that hang, are due now.
    pub(crate) fn wake(&mut self, now_ns: u64) {
        self.is_frozen = false;
        for flight in &mut self.flights {
            flight.due_ns = flight.due_ns.min(now_ns);
        }
    }

    /// Takes a request.
    ///
    /// # Panics
    /// If the request reads memory that another operation writes, or writes memory that another operation uses.
    pub(crate) fn submit(
        &mut self,
        request: RemoteRequest,
        now_ns: u64,
        objects: &mut Objects,
        random: &mut Random,
    ) {
        assert!(self.room() > 0, "more requests than there is room for");
        let writes = matches!(request, RemoteRequest::Get { .. });
        for part in parts_of(&request) {
            let (from, to) = range(part);
            assert!(from.is_multiple_of(4096), "{part:?} is not aligned");
            let clash =
                (self.hands.iter()).find(|(a, b, w)| from < *b && *a < to && (*w || writes));
            assert!(clash.is_none(), "{part:?} of {request:?} is in use");
        }
        let taken = parts_of(&request).iter().map(range);
        self.hands
            .extend(taken.map(|(from, to)| (from, to, writes)));
        match &request {
            RemoteRequest::Probe { keys, .. } => {
                objects.probes += 1;
                objects.probed_keys += keys.len();
            }
            RemoteRequest::Get { .. } => objects.gets += 1,
            RemoteRequest::Put { if_absent, .. } => {
                objects.puts += 1;
                objects.replacing += usize::from(!if_absent);
            }
        }
        let due_ns = match () {
            () if random.chance(self.faults.hang) => u64::MAX,
            () if random.chance(self.faults.slow) => now_ns + 10_000_000_000,
            () => now_ns + self.latency_ns / 2 + random.below(self.latency_ns + 1),
        };
        self.flights.push(Flight { request, due_ns });
        let puts = self.hands.iter().filter(|(_, _, writes)| !writes);
        let bytes = puts.map(|(from, to, _)| to - from).sum();
        self.most_put_bytes = self.most_put_bytes.max(bytes);
    }

    /// Whether an operation writes to a part of the arena, or with `is_write`, whether one reads or writes it.
    pub(crate) fn uses(&self, offset: u64, len: u64, is_write: bool) -> bool {
        let mut hands = self.hands.iter();
        hands.any(|&(from, to, writes)| offset < to && from < offset + len && (writes || is_write))
    }

    /// Ends the operations that are due, in any order.
    pub(crate) fn drain(
        &mut self,
        now_ns: u64,
        objects: &mut Objects,
        arena: &Arena,
        random: &mut Random,
    ) -> Vec<RemoteCompletion> {
        let mut ended = Vec::new();
        loop {
            let due: Vec<usize> = (0..self.flights.len())
                .filter(|&at| self.flights[at].due_ns <= now_ns && !self.is_frozen)
                .collect();
            if due.is_empty() {
                return ended;
            }
            let at = due[random.below(due.len() as u64) as usize];
            let request = self.flights.swap_remove(at).request;
            let result = self.carry_out(&request, objects, arena, random);
            for part in parts_of(&request) {
                let writes = matches!(request, RemoteRequest::Get { .. });
                let (from, to) = range(part);
                let hand = self.hands.iter().position(|&of| of == (from, to, writes));
                self.hands.swap_remove(hand.expect("it was taken"));
            }
            ended.push(RemoteCompletion {
                token: request.token(),
                result,
            });
        }
    }

    fn carry_out(
        &self,
        request: &RemoteRequest,
        objects: &mut Objects,
        arena: &Arena,
        random: &mut Random,
    ) -> Result<RemoteDone, RemoteError> {
        let errors = [
            RemoteError::Unreachable,
            RemoteError::Late,
            RemoteError::Denied,
            // Only a get can have this error.
            RemoteError::Cipher,
        ];
        if random.chance(self.faults.throttled) {
            return Err(RemoteError::Throttled);
        }
        let fails = random.chance(self.faults.failed);
        let is_get = matches!(request, RemoteRequest::Get { .. });
        let error = errors[random.below(if is_get { 4 } else { 3 }) as usize];
        match request {
            RemoteRequest::Probe { .. } if fails => Err(error),
            RemoteRequest::Probe { keys, .. } => {
                let there = |key: &&_| objects.by_name.contains_key(&format!("{key}"));
                let bits = (0..).zip(keys).filter(|(_, key)| there(key));
                Ok(RemoteDone::Present(
                    bits.fold(0, |bits, (at, _)| bits | 1 << at),
                ))
            }
            RemoteRequest::Get {
                key, expect, parts, ..
            } => {
                // A store may have written any bytes before it fails.
                for part in parts {
                    if random.chance(500) {
                        let junk = vec![random.below(256) as u8; part.len as usize];
                        let written = arena.write(part.arena_offset, &junk);
                        written.expect("in the arena");
                    }
                }
                if fails {
                    return Err(error);
                }
                let is_sealed = random.chance(self.faults.sealed);
                match get(objects, &key.path(), expect, parts, arena) {
                    Ok(_) if is_sealed => Err(RemoteError::Cipher),
                    Ok(RemoteDone::Got(mut sums)) if self.faults.short => {
                        sums.pop();
                        Ok(RemoteDone::Got(sums))
                    }
                    got => got,
                }
            }
            RemoteRequest::Put {
                key,
                header,
                parts,
                if_absent,
                ..
            } => {
                if fails {
                    return Err(error);
                }
                if self.faults.read_only {
                    return Err(RemoteError::Denied);
                }
                if random.chance(self.faults.full) {
                    return Err(RemoteError::Full);
                }
                if *if_absent && objects.by_name.contains_key(&key.path()) {
                    return Ok(RemoteDone::AlreadyThere);
                }
                let mut object = header.to_vec();
                for part in parts {
                    let bytes = arena.read(part.arena_offset, u64::from(part.len));
                    object.extend(bytes.expect("in the arena"));
                    object.resize(object.len().next_multiple_of(SEGMENT_ALIGN as usize), 0);
                }
                if random.chance(self.faults.torn) {
                    object.truncate(random.below(object.len() as u64) as usize + 1);
                }
                objects.by_name.insert(key.path(), object);
                Ok(RemoteDone::Stored)
            }
        }
    }
}

/// Carries out a get as the contract requires.
fn get(
    objects: &Objects,
    name: &str,
    expect: &Expected,
    parts: &[RemotePart],
    arena: &Arena,
) -> Result<RemoteDone, RemoteError> {
    let object = objects.by_name.get(name).ok_or(RemoteError::NotFound)?;
    let header = verify(object, expect).map_err(|_| RemoteError::Corrupt)?;
    let offsets: Vec<u64> = expect.offsets().collect();
    let mut sums = Vec::new();
    for part in parts {
        let payload = part.payload as usize;
        assert_eq!(part.len, expect.payloads[payload].len);
        let from = offsets[payload] as usize;
        let bytes = object.get(from..from + part.len as usize);
        let bytes = bytes.ok_or(RemoteError::Corrupt)?;
        arena.write(part.arena_offset, bytes).expect("in the arena");
        let sum = checksum(bytes);
        if sum != header.checksums[payload] {
            return Err(RemoteError::Corrupt);
        }
        sums.push(sum);
    }
    Ok(RemoteDone::Got(sums))
}

fn parts_of(request: &RemoteRequest) -> &[RemotePart] {
    match request {
        RemoteRequest::Probe { .. } => &[],
        RemoteRequest::Get { parts, .. } | RemoteRequest::Put { parts, .. } => parts,
    }
}

fn range(part: &RemotePart) -> (u64, u64) {
    (part.arena_offset, part.arena_offset + u64::from(part.len))
}
