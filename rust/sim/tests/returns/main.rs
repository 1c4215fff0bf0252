//! Conversations that come back: those whose pauses repeat are read from disk before they come, and nothing else is.

#[path = "../plans/disk.rs"]
#[expect(dead_code, reason = "plans use the rest")]
mod disk;
mod ends;
mod forgotten;
mod meanwhile;

use std::collections::BTreeMap;

use disk::{Device, Files, Random, SECOND};
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{Finished, LookupRequest, SaveRequest, Tokens, TurnEnd};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const BLOCK: u32 = 128;
const PAYLOAD: u32 = 1 << 20;
const DEPTH: usize = 32;
const MILLISECOND: u64 = 1_000_000;
/// Blocks of a conversation's first turn; each turn adds one.
const FIRST: u64 = 32;
const BYTES_PER_S: f64 = 2e9;

fn chain(of: u64, blocks: u64) -> Vec<BlockHash> {
    let hash = |block: u64| {
        let mut bytes = [0; 32];
        // The first block is that of the system prompt, if `of` names one in its upper half.
        let whose = match block {
            0 if of >> 32 > 0 => of >> 32 << 32,
            _ => of,
        };
        let mut random = Random::new(whose << 20 | block);
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes());
        }
        BlockHash::new(&bytes).expect("32 bytes")
    };
    (0..blocks).map(hash).collect()
}

struct Life {
    engine: Engine,
    files: Files,
    device: Device,
    /// Reads in flight, by their ends.
    reads: BTreeMap<(u64, u64), u64>,
    now_ns: u64,
    /// Reads fail from now on.
    is_failing: bool,
    /// Writes fail from now on.
    is_full: bool,
}

/// A turn of a conversation.
struct Turn {
    /// Blocks of the hit that were in the arena when the request came.
    at_once: u64,
    waited_ns: u64,
}

impl Life {
    fn new(host_blocks: u64, disk_blocks: u64, reads_returns: bool) -> Self {
        let config = EngineConfig {
            return_pause_ns: if reads_returns { 2 * SECOND } else { 0 },
            ..EngineConfig::new(host_blocks * u64::from(PAYLOAD))
        };
        Self::with(config, disk_blocks)
    }

    fn with(config: EngineConfig, disk_blocks: u64) -> Self {
        let mut engine = Engine::new(config);
        let (files, image) = Files::new(disk_blocks * u64::from(PAYLOAD));
        engine.attach_disks(vec![image]);
        Self {
            engine,
            files,
            device: Device::steady(BYTES_PER_S),
            reads: BTreeMap::new(),
            now_ns: 0,
            is_failing: false,
            is_full: false,
        }
    }

    fn open(&mut self, model: &str) -> SessionId {
        let spec = NamespaceSpec::uniform(model, BLOCK, &[(GroupKind::Full, PAYLOAD)]);
        self.engine
            .open_session(spec)
            .expect("a payload fits a page")
    }

    /// A turn of the IO thread.
    fn turn(&mut self) {
        self.engine.set_now(self.now_ns);
        while let Some((&(at_ns, token), _)) = self.reads.first_key_value() {
            if at_ns > self.now_ns {
                break;
            }
            let checksum = self.reads.remove(&(at_ns, token)).expect("it is the first");
            let result = match self.is_failing {
                true => Err(IoFault::Os(5)),
                false => Ok(checksum),
            };
            self.engine.complete(IoCompletion { token, result });
        }
        let mut started = Started::default();
        let room = DEPTH - self.reads.len();
        self.engine.turn(Room::io(room), &mut started);
        for request in &started.io {
            let token = request.token();
            match request {
                IoRequest::ReadPayload { checksum, len, .. } => {
                    let end_ns = self.device.read(*len, self.now_ns);
                    self.reads.insert((end_ns, token), *checksum);
                }
                _ => {
                    let result = match self.is_full {
                        true => Err(IoFault::Os(28)),
                        false => Ok(self.files.write(request)),
                    };
                    self.engine.complete(IoCompletion { token, result });
                }
            }
        }
        self.engine.end_entry();
    }

    /// When the IO thread wakes.
    fn wakes_ns(&self) -> u64 {
        let pause_ns = match self.engine.wake() {
            Due::Now => MILLISECOND / 10,
            Due::Start | Due::Poll => 10 * MILLISECOND,
            Due::Look => 250 * MILLISECOND,
            Due::Never | Due::Event | Due::Later => SECOND,
        };
        let read = self.reads.first_key_value();
        let read_ns = read.map_or(u64::MAX, |(&(at_ns, _), _)| at_ns);
        (self.now_ns + pause_ns).min(read_ns.max(self.now_ns + 1))
    }

    fn until(&mut self, to_ns: u64) {
        loop {
            self.turn();
            let next_ns = self.wakes_ns();
            if next_ns >= to_ns {
                self.now_ns = self.now_ns.max(to_ns);
                self.engine.set_now(self.now_ns);
                return;
            }
            self.now_ns = next_ns;
        }
    }

    /// A request asks for a conversation of `known` blocks, waits for its hit, and adds a block.
    fn request(&mut self, session: SessionId, of: u64, known: u64) -> Turn {
        self.turn_of(session, of, known, TurnEnd::UNKNOWN)
    }

    /// Like [`Life::request`], and the turn ends in a certain way.
    fn turn_of(&mut self, session: SessionId, of: u64, known: u64, turn_end: TurnEnd) -> Turn {
        let hashes = chain(of, known + 1);
        let asked = hashes[..known as usize].to_vec();
        let evicted = self.engine.counters().disk_read_bytes;
        let since_ns = self.now_ns;
        let mut at_once = None;
        let hit = loop {
            let answer = self
                .engine
                .lookup(session, &LookupRequest::new("request", &asked));
            at_once.get_or_insert(answer.tokens());
            if let Some(hit) = answer.tokens() {
                break hit;
            }
            self.turn();
            self.now_ns = self.wakes_ns();
            self.turn();
        };
        let waited_ns = self.now_ns - since_ns;
        assert!(self.engine.counters().disk_read_bytes >= evicted);
        if hit > Tokens(0) {
            let load = self.engine.begin_load(session, "request", Tokens(0), hit);
            self.engine
                .end_transfer(load.expect("a hit can be loaded").id, true);
        }
        let tokens = Tokens(hashes.len() as u32 * BLOCK);
        for _ in 0..64 {
            let save = SaveRequest::new("request", &hashes, tokens);
            let granted = self.engine.begin_save(session, &save);
            if let Some(transfer) = granted.transfer {
                self.engine.end_transfer(transfer.id, true);
            }
            self.until(self.now_ns + MILLISECOND);
            if granted.end.refused.is_none() {
                break;
            }
        }
        let finished = Finished {
            request: "request",
            turn_end,
        };
        self.engine.finish_request(session, finished);
        let at_once = at_once.flatten().unwrap_or(Tokens(0)).0 / BLOCK;
        Turn {
            at_once: u64::from(at_once),
            waited_ns,
        }
    }

    fn check(&self) {
        self.engine
            .inspect()
            .check()
            .expect("every invariant holds");
    }
}

/// The turns after the first ones, from which the engine learns.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    turns: u64,
    at_once: u64,
    waited_ns: u64,
    longest_ns: u64,
}

impl Sums {
    fn add(&mut self, turn: &Turn, known: u64) {
        self.turns += 1;
        self.at_once += u64::from(turn.at_once == known);
        self.waited_ns += turn.waited_ns;
        self.longest_ns = self.longest_ns.max(turn.waited_ns);
    }

    fn share(&self) -> f64 {
        self.at_once as f64 / self.turns as f64
    }
}

/// Turns of each conversation from which the engine learns.
const LEARNED: u64 = 5;

/// Conversations with pauses in turn, of which the arena holds a third, and requests for long prompts between them that
/// the disk alone has. `pause_ns`: of a conversation's turn. Returns the sums of both.
fn live(
    life: &mut Life,
    (conversations, turns, others): (u64, u64, u64),
    mut pause_ns: impl FnMut(u64) -> u64,
) -> [Sums; 2] {
    let session = life.open("model");
    let mut random = Random::new(7);
    let mut due: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for of in 0..conversations {
        due.insert((SECOND + of * 2 * SECOND, of), 0);
    }
    const OTHERS: u64 = 1 << 16;
    for of in 0..others {
        due.insert((of * SECOND * 13 / 7, OTHERS + of), 0);
    }
    let mut sums = [Sums::default(); 2];
    while let Some(((at_ns, of), turn)) = due.pop_first() {
        life.until(at_ns);
        if of >= OTHERS {
            let done = life.request(session, of, FIRST);
            if turn > 1 {
                sums[1].add(&done, FIRST);
            }
            let next_ns = life.now_ns + SECOND * others + random.next() % (60 * SECOND);
            if due.keys().any(|&(_, of)| of < OTHERS) {
                due.insert((next_ns, of), turn + 1);
            }
            continue;
        }
        let known = FIRST + turn.saturating_sub(1);
        // The first turn brings the prompt.
        let known = known - u64::from(turn == 0);
        let done = life.request(session, of, known);
        if turn >= LEARNED {
            sums[0].add(&done, known);
        }
        if turn + 1 < turns {
            due.insert((life.now_ns + pause_ns(of), of), turn + 1);
        }
    }
    life.check();
    sums
}

/// Blocks that the arena holds: a third of the conversations'.
fn third(conversations: u64, turns: u64) -> u64 {
    conversations * (FIRST + turns / 2) / 3
}

#[test]
fn regular_conversations_are_in_host_memory_when_they_come() {
    const OF: (u64, u64, u64) = (30, 16, 0);
    let mut with = Life::new(third(30, 16), 4096, true);
    let mut without = Life::new(third(30, 16), 4096, false);
    // Noise of 5 %.
    let pause = |mut random: Random| move |_| 60 * SECOND + random.next() % (3 * SECOND);
    let [read, _] = live(&mut with, OF, pause(Random::new(1)));
    let [plain, _] = live(&mut without, OF, pause(Random::new(1)));
    assert!(plain.share() < 0.1, "without: {plain:?}");
    // The learned order takes a block or two of some of them before they come.
    assert!(read.share() > 0.75, "with: {read:?}");
    assert!(read.waited_ns * 20 < plain.waited_ns, "{read:?} {plain:?}");
    let counters = with.engine.counters();
    assert!(
        counters.return_reads_used > 20 * counters.return_reads_wasted,
        "{counters:?}"
    );
    assert_eq!(without.engine.counters().return_reads_used, 0);
}

#[test]
fn demanded_reads_are_not_slower() {
    const OF: (u64, u64, u64) = (30, 16, 40);
    let blocks = third(30, 16);
    let [mut with, mut without] = [true, false].map(|of| Life::new(blocks, 8192, of));
    let pause = |mut random: Random| move |_| 60 * SECOND + random.next() % (3 * SECOND);
    let read = live(&mut with, OF, pause(Random::new(1)));
    let plain = live(&mut without, OF, pause(Random::new(1)));
    assert!(read[0].share() > 0.65, "{read:?}");
    assert!(plain[1].waited_ns > 0, "{plain:?}");
    let mean = |of: Sums| of.waited_ns as f64 / of.turns as f64;
    assert!(mean(read[1]) < 1.03 * mean(plain[1]), "{read:?} {plain:?}");
    assert!(
        read[1].longest_ns < plain[1].longest_ns + 20 * MILLISECOND,
        "{read:?} {plain:?}"
    );
}

#[test]
fn random_pauses_are_hardly_ever_predicted() {
    for seed in 0..4 {
        let [mut with, mut without] = [true, false].map(|of| Life::new(third(40, 40), 8192, of));
        let pause = |mut random: Random| {
            move |_| (-(1.0 - random.unit()).ln() * 60.0 * SECOND as f64) as u64
        };
        let [read, _] = live(&mut with, (40, 40, 0), pause(Random::new(seed)));
        let [plain, _] = live(&mut without, (40, 40, 0), pause(Random::new(seed)));
        let counters = with.engine.counters();
        let wasted = counters.return_reads_wasted;
        assert!(wasted * 50 < read.turns, "{wasted} of {read:?}");
        assert!(read.share() > plain.share() - 0.02, "{read:?} {plain:?}");
    }
}

#[test]
fn a_kind_with_one_pause_is_read_before_it_comes_again() {
    // Each conversation comes back once, after the pause of all.
    let [mut with, mut without] = [true, false].map(|of| Life::new(third(30, 2), 16384, of));
    let shares = [&mut with, &mut without].map(|life| {
        let session = life.open("model");
        let mut sums = Sums::default();
        for of in 0..200 {
            life.until(of * 2 * SECOND);
            if of >= 30 {
                let done = life.request(session, of - 30, FIRST);
                if of >= 100 {
                    sums.add(&done, FIRST);
                }
            }
            life.request(session, of, FIRST - 1);
        }
        life.check();
        sums.share()
    });
    assert!(shares[0] > 0.8 && shares[1] < 0.1, "{shares:?}");
}
