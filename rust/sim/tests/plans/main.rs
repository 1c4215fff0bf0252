//! Planned waits over disks whose rates change, that other processes use, and that hang. The cost of each wait is
//! compared with the cheaper of loading all and computing all, which is known afterwards.
//!
//! `UNDERCROFT_PLAN_SEEDS=10000 cargo nextest run -p undercroft-sim --test plans --release`

mod decisions;
mod disk;
mod lies;
mod remote;
mod store;

use std::collections::BTreeMap;
use std::ops::Range;

use disk::{Device, Files, Random, SECOND};
use undercroft_contract::io::{IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, PromotionWait, SaveRequest, Step, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const BLOCK: u32 = 128;
const PAYLOAD: u32 = 1 << 20;
const DEPTH: usize = 32;
/// Blocks of the arena.
const HOST: u64 = 256;
/// Number of requests that are measured in each life, and blocks of the longest request.
const REQUESTS: usize = 40;
const LONGEST: f64 = 96.0;
/// How often the scheduler of an idle vLLM asks. The scheduler of a vLLM that decodes asks once a
/// step.
const POLL: u64 = 1_000_000;
/// Tokens of a step.
const CHUNK: u32 = 2048;
/// The largest difference of a step's time from the model's time, as a share.
const NOISE: f64 = 0.05;

/// The times of a vLLM, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Compute {
    step: f64,
    token: f64,
    position: f64,
    decode: f64,
}

impl Compute {
    /// A vLLM of any speed.
    fn any(random: &mut Random) -> Self {
        let token = random.log(5e3, 5e5);
        Self {
            step: random.log(1e6, 2e7),
            token,
            position: token * random.log(1e-6, 1e-4),
            decode: token * random.log(0.3, 3.0),
        }
    }

    /// The time of a step that computes a prompt's tokens from `from` to `to`, beside requests that decode.
    fn step_ns(&self, from: u32, to: u32, decodes: u32) -> f64 {
        let positions = (f64::from(to).powi(2) - f64::from(from).powi(2)) / 2.0;
        self.step
            + self.token * f64::from(to - from)
            + self.position * positions
            + self.decode * f64::from(decodes)
    }

    /// The steps from one token to another: the tokens at which each begins and ends.
    fn steps(from: u32, to: u32) -> impl Iterator<Item = (u32, u32)> {
        (0..(to - from).div_ceil(CHUNK)).map(move |i| {
            let start = from + i * CHUNK;
            (start, to.min(start + CHUNK))
        })
    }

    fn ns(&self, from: u32, to: u32, decodes: u32) -> f64 {
        Self::steps(from, to)
            .map(|(from, to)| self.step_ns(from, to, decodes))
            .sum()
    }

    /// The rate of a disk from which a prompt of 4,096 tokens is loaded as fast as it is computed.
    fn even_bytes_per_s(&self) -> f64 {
        f64::from(PAYLOAD) / (self.ns(0, 4096, 0) / 4096.0 * f64::from(BLOCK)) * 1e9
    }

    /// The time until a scheduler that asks after every step gets a result that takes `ns`.
    fn asked_ns(&self, ns: f64, decodes: u32) -> f64 {
        match decodes {
            0 => ns,
            _ => {
                let turn_ns = self.step_ns(0, 0, decodes);
                (ns / turn_ns).ceil() * turn_ns
            }
        }
    }
}

struct Life {
    engine: Engine,
    session: SessionId,
    files: Files,
    device: Device,
    /// Reads in flight, by their ends.
    reads: BTreeMap<(u64, u64), u64>,
    now_ns: u64,
    compute: Compute,
    /// The most requests that decode meanwhile, and the number that decode now.
    most_decodes: u32,
    decodes: u32,
    /// The share of prompts that are looked up when they arrive, before the scheduler asks.
    prefetches: f64,
    random: Random,
}

/// The times of a life's requests, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    planned: f64,
    better: f64,
    computed: f64,
    loaded: f64,
    requests: u32,
    /// Number of requests that were more than 10 % slower than computing, and more than 25 %.
    slower: u32,
    much_slower: u32,
    /// The largest delay of a request beyond two turns, as a share of the computing time.
    most: f64,
}

impl Sums {
    fn add(&mut self, of: &Self) {
        self.planned += of.planned;
        self.better += of.better;
        self.computed += of.computed;
        self.loaded += of.loaded;
        self.requests += of.requests;
        self.slower += of.slower;
        self.much_slower += of.much_slower;
        self.most = self.most.max(of.most);
    }
}

fn chain(chain: u64, blocks: u32) -> Vec<BlockHash> {
    let hash = |block: u32| {
        let mut bytes = [0; 32];
        let mut random = Random::new(chain << 20 | u64::from(block));
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes());
        }
        BlockHash::new(&bytes).expect("a hash of 32 bytes")
    };
    (0..blocks).map(hash).collect()
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let compute = Compute::any(&mut random);
        let is_busy = random.chance(0.5);
        let most_decodes = if is_busy {
            random.log(2.0, 64.0) as u32
        } else {
            0
        };
        // The rate lies around the rate at which a prompt is loaded as fast as it is computed.
        let rate = compute.even_bytes_per_s() * random.log(0.1, 10.0);
        let device = Device::new(&mut random, rate, 600);
        Self::with(compute, most_decodes, device, GroupKind::Full, random)
    }

    fn with(
        compute: Compute,
        most_decodes: u32,
        device: Device,
        kind: GroupKind,
        mut random: Random,
    ) -> Self {
        let mut config = EngineConfig::new(HOST * u64::from(PAYLOAD));
        config.promotion_wait = PromotionWait::Planned;
        config.min_load_tokens = None;
        config.seed = random.next();
        let (files, image) = Files::new(16 << 30);
        let mut engine = Engine::new(config);
        engine.attach_disks(vec![image]);
        engine.set_io_depth(DEPTH);
        let namespace = NamespaceSpec::uniform("plans", BLOCK, &[(kind, PAYLOAD)]);
        let session = engine.open_session(namespace).expect("a payload fits");
        Self {
            engine,
            session,
            files,
            device,
            reads: BTreeMap::new(),
            now_ns: 0,
            compute,
            most_decodes,
            decodes: 0,
            prefetches: 0.0,
            random,
        }
    }

    /// Runs the IO thread until a time.
    fn run_until(&mut self, until_ns: u64) {
        loop {
            self.start_io();
            let Some((&(end_ns, token), &checksum)) = self.reads.first_key_value() else {
                break;
            };
            if end_ns > until_ns {
                break;
            }
            self.reads.pop_first();
            self.now_ns = self.now_ns.max(end_ns);
            self.engine.set_now(self.now_ns);
            let result = Ok(checksum);
            self.engine.complete(IoCompletion { token, result });
        }
        self.now_ns = self.now_ns.max(until_ns);
        self.engine.set_now(self.now_ns);
        self.start_io();
    }

    fn start_io(&mut self) {
        loop {
            let mut started = Started::default();
            let room = DEPTH - self.reads.len();
            self.engine.turn(Room::io(room), &mut started);
            let mut wrote = false;
            for request in started.io {
                let token = request.token();
                if let IoRequest::ReadPayload { checksum, len, .. } = request {
                    let end_ns = self.device.read(len, self.now_ns);
                    self.reads.insert((end_ns, token), checksum);
                } else {
                    let result = Ok(self.files.write(&request));
                    self.engine.complete(IoCompletion { token, result });
                    wrote = true;
                }
            }
            if !wrote && self.engine.wake() != Due::Now {
                return;
            }
        }
    }

    #[expect(clippy::ptr_arg, reason = "a source of hashes is sized")]
    fn save(&mut self, hashes: &Vec<BlockHash>) {
        let tokens = Tokens(hashes.len() as u32 * BLOCK);
        let request = SaveRequest::new("save", hashes, tokens);
        let granted = self.engine.begin_save(self.session, &request);
        let transfer = granted.transfer.expect("the arena has room");
        self.engine.end_transfer(transfer.id, true);
        self.engine.finish_request(self.session, "save");
        let until_ns = self.now_ns + POLL;
        self.run_until(until_ns);
    }

    /// Saves prompts of these lengths in blocks, then computes other prompts until the first ones are on disk only.
    fn store(&mut self, lengths: &[u32]) -> Vec<Vec<BlockHash>> {
        let prompts = (0..).zip(lengths).map(|(i, &blocks)| chain(i, blocks));
        let prompts: Vec<Vec<BlockHash>> = prompts.collect();
        prompts.iter().for_each(|hashes| self.save(hashes));
        // Other saves evict the blocks from host memory.
        for i in 0..HOST / 32 {
            let hashes = chain(1_000_000 + i, 32);
            self.save(&hashes);
            self.run_steps(0, 32 * BLOCK - 77 * i as u32, 1.0);
        }
        prompts
    }

    /// Computes a prompt from `from` on. Returns the nanoseconds that it took.
    fn run_steps(&mut self, from: u32, to: u32, noise: f64) -> u64 {
        let began_ns = self.now_ns;
        for (from, to) in Compute::steps(from, to) {
            self.run_step(from, to, noise);
        }
        self.now_ns - began_ns
    }

    fn run_step(&mut self, from: u32, to: u32, noise: f64) {
        let took_ns = (self.compute.step_ns(from, to, self.decodes) * noise) as u64;
        let until_ns = self.now_ns + took_ns;
        self.run_until(until_ns);
        let (wide_from, wide_to) = (u64::from(from), u64::from(to));
        let step = Step {
            tokens: to - from,
            positions: (wide_to * wide_to - wide_from * wide_from) / 2,
            decodes: self.decodes,
            duration_ns: took_ns,
        };
        self.engine.report_steps(self.session, &[step]);
    }

    /// Waits until the scheduler asks again, and at least for `ns`.
    fn wait(&mut self, ns: u64, noise: f64) {
        let until_ns = self.now_ns + ns;
        if self.decodes == 0 {
            self.run_until(until_ns);
        }
        while self.now_ns < until_ns {
            self.run_step(0, 0, noise);
        }
    }

    /// Asks for a prompt that is on disk, and runs it to its first token.
    #[expect(clippy::ptr_arg, reason = "a source of hashes is sized")]
    fn ask(&mut self, hashes: &Vec<BlockHash>, sums: &mut Sums) -> Result<(), String> {
        let end = hashes.len() as u32 * BLOCK + 1;
        let noise = 1.0 + NOISE * (2.0 * self.random.unit() - 1.0);
        self.decodes = (self.random.unit() * f64::from(self.most_decodes)) as u32;
        if self.decodes == 0 {
            self.engine.report_steps(self.session, &[Step::default()]);
        } else {
            self.run_step(0, 0, noise);
        }
        // A copy of the device tells the time to load all blocks.
        let (mut device, arrived_ns) = (self.device.clone(), self.now_ns);
        let all_ns =
            (0..hashes.len()).fold(0, |_, _| device.read(PAYLOAD, arrived_ns)) - arrived_ns;
        let request = LookupRequest::new("ask", hashes).max(Tokens(end - 1));
        if self.random.chance(self.prefetches) {
            // After an early prefetch the scheduler asks at once, or when its step has ended.
            self.engine.lookup(self.session, &request.prefetch());
            if self.decodes > 0 {
                self.run_step(0, 0, noise);
            }
        }
        let began_ns = self.now_ns;
        // In the comparison, the reads begin when the prompt arrives, too.
        let all_ns = all_ns.saturating_sub(began_ns - arrived_ns);
        let hit = loop {
            let answer = self.engine.lookup(self.session, &request);
            if let Some(tokens) = answer.tokens() {
                break tokens.0;
            }
            self.wait(if self.decodes == 0 { POLL } else { 1 }, noise);
        };
        let copy_ns = |tokens: u32| 1e6 + f64::from(tokens / BLOCK) * f64::from(PAYLOAD) / 20.0;
        if hit > 0 {
            let load = self
                .engine
                .begin_load(self.session, "ask", Tokens(0), Tokens(hit))
                .ok_or("a hit cannot be loaded")?;
            self.wait(copy_ns(hit) as u64, noise);
            self.engine.end_transfer(load.id, true);
        }
        self.run_steps(hit, end, noise);
        self.engine.finish_request(self.session, "ask");
        let took = (self.now_ns - began_ns) as f64;
        let of = &self.compute;
        let compute = of.ns(0, end, self.decodes) * noise;
        let waits = [all_ns as f64, copy_ns(end - 1)].map(|ns| of.asked_ns(ns, self.decodes));
        let all = waits.iter().sum::<f64>() + of.ns(end - 1, end, self.decodes) * noise;
        // One step until the scheduler asks, and one step for a load.
        let turn = (POLL as f64).max(of.step_ns(0, 0, self.decodes));
        let most = compute * (1.25 + 2.0 * NOISE) + 2.0 * turn + copy_ns(hit);
        if took > most {
            return Err(format!(
                "{end} tokens, of which {hit} were loaded, took {:.1} ms; computing {:.1}, loading {:.1}; {:?} learned as {:?}",
                took / 1e6,
                compute / 1e6,
                all / 1e6,
                self.compute,
                self.engine.gauges()
            ));
        }
        sums.most = sums.most.max((took - 2.0 * turn) / compute);
        sums.planned += took / 1e9;
        sums.computed += compute / 1e9;
        sums.loaded += all / 1e9;
        sums.better += compute.min(all) / 1e9;
        sums.requests += 1;
        sums.slower += u32::from(took > 1.1 * compute);
        sums.much_slower += u32::from(took > 1.25 * compute);
        Ok(())
    }
}

fn live(seed: u64, total: &mut Sums) -> Result<(), String> {
    let mut life = Life::new(seed);
    life.prefetches = 0.5;
    let lengths = (0..REQUESTS).map(|_| life.random.log(2.0, LONGEST) as u32);
    let lengths: Vec<u32> = lengths.collect();
    for hashes in life.store(&lengths) {
        life.ask(&hashes, total)?;
        let pause = life.random.log(0.01, 3.0) * SECOND as f64;
        let until_ns = life.now_ns + pause as u64;
        life.run_until(until_ns);
    }
    life.engine
        .inspect()
        .check()
        .map_err(|error| format!("check: {error}"))
}

/// The seeds of a test: `most` of them, unless the environment names other seeds.
fn seeds(most: u64) -> Range<u64> {
    let number = |name, otherwise| {
        let value = std::env::var(name);
        value.map_or(otherwise, |value| value.parse().expect("a number"))
    };
    let first = number("UNDERCROFT_PLAN_SEED", 0);
    first..first + number("UNDERCROFT_PLAN_SEEDS", most)
}

#[test]
fn planned_waits_cost_little_more_than_the_better_choice_and_stay_within_the_guarantee() {
    let seeds = seeds(300);
    let count = (seeds.end - seeds.start) as f64;
    let mut total = Sums::default();
    let mut regrets = 0.0;
    for seed in seeds {
        let mut sums = Sums::default();
        if let Err(error) = live(seed, &mut sums) {
            panic!("seed {seed}: {error}");
        }
        regrets += sums.planned / sums.better - 1.0;
        total.add(&sums);
    }
    let regret = regrets / count;
    println!("mean regret {:.1} % of {total:?}", regret * 100.0);
    assert!(regret <= 0.06, "a mean regret of {:.1} %", regret * 100.0);
}
