//! Planned waits for a remote store that has some of the prompts, at a rate around break-even.

use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::remote::{RemoteConfig, RemoteWrite};
use undercroft_contract::session::{LookupRequest, PromotionWait, Step, Tokens};
use undercroft_engine::{Engine, EngineConfig, Room, SessionId, Started};

use super::disk::{Random, SECOND};
use super::store::Store;
use super::{BLOCK, BlockHash, Compute, LONGEST, NOISE, PAYLOAD, POLL, REQUESTS, Sums, chain};

/// Blocks of a segment.
const SEGMENT: u32 = 4;

/// A host with a store, no disk, and a vLLM.
struct Life {
    engine: Engine,
    session: SessionId,
    store: Store,
    now_ns: u64,
    compute: Compute,
    decodes: u32,
    prefetches: f64,
    random: Random,
}

impl Life {
    fn new(compute: Compute, store: Store, mut random: Random) -> Self {
        let mut config = EngineConfig::new(512 * u64::from(PAYLOAD));
        config.promotion_wait = PromotionWait::Planned;
        config.min_load_tokens = None;
        config.seed = random.next();
        config.promotion_bytes = config.host_bytes;
        config.remote = Some(RemoteConfig {
            object_bytes: u64::from(SEGMENT) * u64::from(PAYLOAD),
            write: RemoteWrite::None,
            ..RemoteConfig::default()
        });
        let mut engine = Engine::new(config);
        engine.attach_remote();
        let namespace = NamespaceSpec::uniform("plans", BLOCK, &[(GroupKind::Full, PAYLOAD)]);
        let session = engine.open_session(namespace).expect("a payload fits");
        let mut life = Self {
            engine,
            session,
            store,
            now_ns: 0,
            compute,
            decodes: 0,
            prefetches: 0.0,
            random,
        };
        // vLLM has run for a while.
        for i in 0..20 {
            life.run_steps(0, 2048 - 77 * (i % 16), 1.0);
        }
        life
    }

    /// Runs the IO thread until a time.
    fn run_until(&mut self, until_ns: u64) {
        loop {
            let mut started = Started::default();
            let room = Room::store(self.store.room());
            self.engine.turn(room, &mut started);
            started.store.iter().for_each(|of| self.store.submit(of));
            // The thread reads the clock every few milliseconds.
            let turn_ns = until_ns.min(self.store.now_ns() + 5_000_000);
            let ended = self.store.run(turn_ns);
            self.now_ns = self.store.now_ns();
            self.engine.set_now(self.now_ns);
            let is_over = ended.is_empty() && started.store.is_empty() && self.now_ns >= until_ns;
            for completion in ended {
                self.engine.complete_remote(completion);
            }
            if is_over {
                return;
            }
        }
    }

    fn run_steps(&mut self, from: u32, to: u32, noise: f64) {
        for (from, to) in Compute::steps(from, to) {
            self.run_step(from, to, noise);
        }
    }

    fn run_step(&mut self, from: u32, to: u32, noise: f64) {
        let took_ns = (self.compute.step_ns(from, to, self.decodes) * noise) as u64;
        let until_ns = self.now_ns + took_ns;
        self.run_until(until_ns);
        let (from, to) = (u64::from(from), u64::from(to));
        let step = Step {
            tokens: (to - from) as u32,
            positions: (to * to - from * from) / 2,
            decodes: self.decodes,
            duration_ns: took_ns,
        };
        self.engine.report_steps(self.session, &[step]);
    }

    fn wait(&mut self, ns: u64, noise: f64) {
        let until_ns = self.now_ns + ns;
        if self.decodes == 0 {
            self.run_until(until_ns);
        }
        while self.now_ns < until_ns {
            self.run_step(0, 0, noise);
        }
    }

    /// Puts the segments of a prompt into the store.
    fn put(&mut self, hashes: &[BlockHash]) {
        let whole = hashes.chunks_exact(SEGMENT as usize);
        let ends = whole.map(|segment| segment[SEGMENT as usize - 1]);
        self.store.objects.extend(ends);
    }

    /// Asks for a prompt, and runs it to its first token. Returns the tokens of the hit, and adds the times to `sums`.
    #[expect(clippy::ptr_arg, reason = "a source of hashes is sized")]
    fn ask(&mut self, hashes: &Vec<BlockHash>, sums: &mut Sums) -> Result<u32, String> {
        let end = hashes.len() as u32 * BLOCK + 1;
        let noise = 1.0 + NOISE * (2.0 * self.random.unit() - 1.0);
        if self.decodes == 0 {
            self.engine.report_steps(self.session, &[Step::default()]);
        } else {
            self.run_step(0, 0, noise);
        }
        let whole = hashes.chunks_exact(SEGMENT as usize);
        let there = whole
            .take_while(|of| self.store.objects.contains(&of[SEGMENT as usize - 1]))
            .count();
        let segment_bytes = u64::from(SEGMENT) * u64::from(PAYLOAD);
        let (arrived_ns, all_ns) = (self.now_ns, self.store.all_ns(there, segment_bytes));
        let request = LookupRequest::new("ask", hashes).max(Tokens(end - 1));
        if self.random.chance(self.prefetches) {
            self.engine.lookup(self.session, &request.prefetch());
            if self.decodes > 0 {
                self.run_step(0, 0, noise);
            }
        }
        let began_ns = self.now_ns;
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
        let most = there as u32 * SEGMENT * BLOCK;
        let waits = [all_ns as f64, copy_ns(most)].map(|ns| of.asked_ns(ns, self.decodes));
        let all = waits.iter().sum::<f64>() + of.ns(most.min(end - 1), end, self.decodes) * noise;
        let turn = (POLL as f64).max(of.step_ns(0, 0, self.decodes));
        let limit = compute * (1.25 + 2.0 * NOISE) + 2.0 * turn + copy_ns(hit);
        if took > limit {
            return Err(format!(
                "{end} tokens, of which {hit} were loaded and {most} were there, took {:.1} ms; computing {:.1}, \
                 loading {:.1}; {:?} learned as {:?}",
                took / 1e6,
                compute / 1e6,
                all / 1e6,
                self.compute,
                self.engine.gauges()
            ));
        }
        let better = if there > 0 { compute.min(all) } else { compute };
        sums.most = sums.most.max((took - 2.0 * turn) / compute);
        sums.planned += took / 1e9;
        sums.computed += compute / 1e9;
        sums.loaded += if there > 0 { all } else { compute } / 1e9;
        sums.better += better / 1e9;
        sums.requests += 1;
        sums.slower += u32::from(took > 1.1 * compute);
        sums.much_slower += u32::from(took > 1.25 * compute);
        Ok(hit)
    }
}

fn live(seed: u64, sums: &mut Sums) -> Result<(), String> {
    let mut random = Random::new(seed);
    let compute = Compute::any(&mut random);
    let most_decodes = if random.chance(0.5) {
        random.log(2.0, 64.0)
    } else {
        0.0
    };
    let rate = compute.even_bytes_per_s() * random.log(0.1, 10.0);
    let store = Store::any(&mut random, rate, 600);
    let there = [1.0, 1.0, 0.5, 0.1, 0.0][(random.next() % 5) as usize];
    let mut life = Life::new(compute, store, random);
    life.prefetches = 0.5;
    for at in 0..REQUESTS as u64 {
        let hashes = chain(at, life.random.log(4.0, LONGEST) as u32);
        if life.random.chance(there) {
            life.put(&hashes);
        }
        life.decodes = (life.random.unit() * most_decodes) as u32;
        life.ask(&hashes, sums)
            .map_err(|error| format!("prompt {at}: {error}"))?;
        let pause = life.random.log(0.01, 3.0) * SECOND as f64;
        let until_ns = life.now_ns + pause as u64;
        life.run_until(until_ns);
    }
    life.engine
        .inspect()
        .check()
        .map_err(|error| format!("check: {error}"))
}

#[test]
fn a_planned_wait_for_a_remote_store_costs_little_more_than_the_better_choice() {
    let seeds = super::seeds(300);
    let count = (seeds.end - seeds.start) as f64;
    let (mut total, mut regrets) = (Sums::default(), 0.0);
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

/// Blocks of each prompt, on a store of a multiple of the break-even rate.
const BLOCKS: u32 = 64;

fn steady(factor: f64) -> Life {
    let compute = Compute {
        step: 5e6,
        token: 5e4,
        position: 0.0,
        decode: 0.0,
    };
    let rate = compute.even_bytes_per_s() * factor;
    Life::new(compute, Store::steady(rate, 5_000_000), Random::new(3))
}

/// Asks for this many new prompts that the store has, from the number `first` on. Returns the tokens of each hit, and the
/// last prompt's time divided by its computing time.
fn ask_many(life: &mut Life, first: u64, prompts: u64) -> (Vec<u32>, f64) {
    let (mut hits, mut last) = (Vec::new(), 0.0);
    for at in first..first + prompts {
        let hashes = chain(at, BLOCKS);
        life.put(&hashes);
        let mut sums = Sums::default();
        hits.push(life.ask(&hashes, &mut sums).expect("within the guarantee"));
        last = sums.planned / sums.computed;
        let until_ns = life.now_ns + SECOND / 10;
        life.run_until(until_ns);
    }
    (hits, last)
}

#[test]
fn a_store_that_is_faster_than_computing_is_waited_for() {
    let mut life = steady(5.0);
    let (hits, last) = ask_many(&mut life, 0, 20);
    assert!(
        hits[8..].iter().all(|&hit| hit == BLOCKS * BLOCK),
        "{hits:?}"
    );
    assert!(last < 0.35, "{last} times computing");
    let counters = *life.engine.counters();
    assert!(counters.remote_plans_load_faster >= 12, "{counters:?}");
    let error = counters.plan_error_remote_ns as f64 / counters.plan_actual_remote_ns as f64;
    assert!(error < 0.2, "{error} of {counters:?}");
}

#[test]
fn a_store_that_is_slower_than_computing_is_not_waited_for() {
    let mut life = steady(0.3);
    ask_many(&mut life, 0, 12);
    let before = *life.engine.counters();
    let (hits, last) = ask_many(&mut life, 100, 40);
    assert!(hits.iter().all(|&hit| hit == 0), "{hits:?}");
    assert!(last < 1.06, "{last} times computing");
    let counters = *life.engine.counters();
    let decisions = |of: &undercroft_engine::metrics::Counters| {
        of.remote_plans_compute_faster + of.remote_plans_compute_measure
    };
    assert!(
        decisions(&counters) - decisions(&before) >= 39,
        "{counters:?}"
    );
    // Some segments are fetched to measure the store. No request waits for them.
    let measured = counters.remote_plans_compute_measure - before.remote_plans_compute_measure;
    let fetched = counters.remote_gets - before.remote_gets;
    assert!(measured >= 2 && fetched <= 3 * measured + 3, "{counters:?}");
    // The store has become fast.
    let rate = life.compute.even_bytes_per_s() * 8.0;
    life.store.turns(rate);
    let (hits, _) = ask_many(&mut life, 200, 60);
    assert!(hits[50..].iter().all(|&hit| hit > 0), "{hits:?}");
}

#[test]
fn a_store_that_turns_slow_is_left() {
    let mut life = steady(5.0);
    ask_many(&mut life, 0, 20);
    let rate = life.compute.even_bytes_per_s() * 0.2;
    life.store.turns(rate);
    let (hits, last) = ask_many(&mut life, 100, 12);
    let late = hits[3..].iter().filter(|&&hit| hit > 0).count();
    assert!(late <= 1 && last < 1.06, "{hits:?}, {last}");
    let counters = *life.engine.counters();
    let stopped = counters.remote_plans_stopped_rest + counters.remote_plans_stopped_guarantee;
    assert!(
        stopped >= 1 && counters.tokens_not_loaded_remote > 0,
        "{counters:?}"
    );
}

#[test]
fn a_store_that_has_nothing_costs_a_cold_prompt_nothing() {
    let mut life = steady(5.0);
    // A round trip takes almost a quarter of the time of computing.
    life.store.latency_ns = 25_000_000;
    let mut took = Vec::new();
    for at in 0..120 {
        let mut sums = Sums::default();
        let hashes = chain(at, 18);
        life.ask(&hashes, &mut sums).expect("within the guarantee");
        took.push(sums.planned / sums.computed);
        let until_ns = life.now_ns + SECOND / 10;
        life.run_until(until_ns);
    }
    let late = took[40..].iter().filter(|&&of| of > 1.06).count();
    assert!(late == 0, "{took:?}");
    // From now on the store has the prompts, and the planner notices this.
    let (hits, _) = ask_many(&mut life, 1000, 150);
    assert!(hits[140..].iter().all(|&hit| hit > 0), "{hits:?}");
}
