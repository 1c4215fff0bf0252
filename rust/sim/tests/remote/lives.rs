//! Whole lives from a seed: two hosts and one store, with all faults in any order.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::{
    Extent, Load, Lookup, LookupRequest, PromotionWait, SaveRequest, Step, Tokens, TransferId,
};
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Due, EngineConfig, SessionId};

use crate::FULL;
use crate::rig::{
    BLOCK, Host, MILLISECOND, Random, SECOND, SLOT, assert_complete, chain, config, model, offers,
};
use crate::store::{Connection, Faults, Objects};

/// The groups of each model.
const MODELS: [&[GroupKind]; 4] = [
    FULL,
    &[GroupKind::Full, GroupKind::SlidingWindow { tokens: 70 }],
    &[GroupKind::State, GroupKind::Full],
    &[
        GroupKind::Full,
        GroupKind::SlidingWindow { tokens: 40 },
        GroupKind::ChunkedLocal { tokens: 64 },
        GroupKind::Full,
        GroupKind::State,
    ],
];
const SEEDS: u64 = 300;
const STEPS: u64 = 250;

/// A request of a client.
struct Request {
    name: String,
    hashes: Vec<BlockHash>,
    /// Its last answer, if it was a hit.
    hit: Option<u32>,
    pending: bool,
}

struct Client {
    host: usize,
    kinds: &'static [GroupKind],
    session: SessionId,
    model: u64,
    /// The weights: 0 stands for the weights of the description.
    weights: u64,
    requests: Vec<Request>,
    loads: Vec<(Load, Vec<BlockHash>, u32)>,
    saves: Vec<(TransferId, Vec<Extent>, Vec<BlockHash>)>,
}

struct Life {
    random: Random,
    hosts: Vec<Host>,
    objects: Objects,
    clients: Vec<Client>,
    faults: Faults,
    /// The models of this life.
    models: [u64; 2],
    names: u64,
    checked: u64,
    /// Number of loads with windows or states.
    completed: u64,
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut rate = |most: u64| match random.chance(300) {
            true => random.below(most) + 1,
            false => 0,
        };
        let faults = Faults {
            failed: rate(300),
            throttled: rate(200),
            hang: rate(40),
            slow: rate(40),
            torn: rate(200),
            full: rate(100),
            read_only: false,
            corrupt: rate(60),
            swapped: rate(60),
            evicted: rate(100),
            sealed: rate(100),
            short: false,
        };
        let mut life = Self {
            hosts: Vec::new(),
            objects: Objects::default(),
            clients: Vec::new(),
            faults,
            models: [0, random.below(MODELS.len() as u64)],
            names: 0,
            checked: 0,
            completed: 0,
            random,
        };
        for at in 0..2 {
            let host = life.host();
            life.hosts.push(host);
            for _ in 0..=life.random.below(2) {
                life.open(at);
            }
        }
        life
    }

    fn config(&mut self) -> EngineConfig {
        let random = &mut self.random;
        let mut config = config(64 * (1 + random.below(3)), 1 << random.below(4));
        config.policy = [PolicyKind::Lru, PolicyKind::LeafHd][random.below(2) as usize];
        config.seed = random.next();
        config.verify_host = random.chance(200);
        config.removals = [1, 3, 128][random.below(3) as usize];
        if random.chance(300) {
            config.promotion_bytes = random.below(config.host_bytes);
        }
        config.promotion_wait = match random.below(4) {
            0 => PromotionWait::Planned,
            1 => PromotionWait::Limit {
                base_ns: random.below(40 * MILLISECOND),
                per_1k_tokens_ns: random.below(40 * MILLISECOND),
            },
            _ => PromotionWait::Complete,
        };
        let remote = config.remote.as_mut().expect("it is set");
        let modes = [
            RemoteWrite::All,
            RemoteWrite::SecondTouch,
            RemoteWrite::None,
        ];
        remote.write = modes[random.below(5).saturating_sub(2) as usize];
        remote.write_rate = [0, 0, 100 * SLOT][random.below(3) as usize];
        remote.window_bytes = (1 + random.below(40)) * SLOT;
        remote.absent_ns = random.below(5000) * MILLISECOND;
        config
    }

    fn host(&mut self) -> Host {
        let config = self.config();
        let depth = 1 + self.random.below(30) as usize;
        let latency_ns = 1 + self.random.below(40 * MILLISECOND);
        let disk = [0, 0, 128, 512][self.random.below(4) as usize];
        let mut host = Host::new(config, Connection::new(depth, latency_ns), disk);
        host.store.faults = self.faults;
        host
    }

    fn open(&mut self, host: usize) {
        let id = self.models[self.random.below(2) as usize];
        let kinds = MODELS[id as usize];
        let opened = self.hosts[host].enter(|engine| engine.open_session(model(id, kinds)));
        if let Some(&session) = opened.as_ref().ok().filter(|_| self.random.chance(500)) {
            // A vLLM of any speed, so that the planner compares the store with it.
            let step = Step {
                tokens: 1024,
                positions: 512 * 1024,
                decodes: 0,
                duration_ns: 1 + self.random.below(2000 * MILLISECOND),
            };
            self.hosts[host].enter(|engine| engine.report_steps(session, &[step; 10]));
        }
        self.clients.push(Client {
            host,
            kinds,
            session: opened.expect("a payload fits"),
            model: id,
            weights: 0,
            requests: Vec::new(),
            loads: Vec::new(),
            saves: Vec::new(),
        });
    }

    fn run(&mut self) {
        for step in 0..STEPS {
            self.step();
            if step % 8 == 0 {
                self.hosts.iter().for_each(Host::check);
            }
        }
        self.finish();
    }

    fn step(&mut self) {
        let wait_ns = match self.random.below(4) {
            0 => 0,
            1 => self.random.below(200 * MILLISECOND),
            _ => self.random.below(10 * MILLISECOND),
        };
        for host in &mut self.hosts {
            host.now_ns += wait_ns;
        }
        let (faults, random) = (self.faults, &mut self.random);
        self.objects.decay(&faults, random);
        for host in &mut self.hosts {
            if random.chance(700) {
                host.turn(&mut self.objects, random);
            }
            if faults.hang > 0 && random.chance(10) {
                host.store.is_frozen ^= true;
            }
            if random.chance(10) {
                let now_ns = host.now_ns;
                host.store.wake(now_ns);
            }
        }
        match self.random.below(1000) {
            0..3 => {
                let host = self.random.below(2) as usize;
                self.restart(host);
            }
            3..10 => {
                let host = self.random.below(2) as usize;
                self.open(host);
            }
            _ => self.client_step(),
        }
    }

    /// A process ends, with all its memory, and another begins.
    fn restart(&mut self, at: usize) {
        self.clients.retain(|client| client.host != at);
        self.hosts[at] = self.host();
        self.open(at);
    }

    fn client_step(&mut self) {
        if self.clients.is_empty() {
            return self.open(0);
        }
        let at = self.random.below(self.clients.len() as u64) as usize;
        let count = self.clients[at].requests.len() as u64;
        match self.random.below(100) {
            0 => self.reset(at),
            1 => self.close(at),
            2..30 => self.end_transfers(at),
            _ if count == 0 || count < 5 && self.random.chance(250) => self.begin(at),
            of => {
                let request = self.random.below(count) as usize;
                match of {
                    30..65 => self.look(at, request),
                    65..80 => self.load(at, request),
                    80..93 => self.save(at, request),
                    _ => self.end(at, request),
                }
            }
        }
    }

    fn begin(&mut self, at: usize) {
        let random = &mut self.random;
        let head = (random.below(3), random.below(24) as u32 + 1);
        let tail = (random.below(3), random.below(16) as u32);
        self.names += 1;
        self.clients[at].requests.push(Request {
            name: format!("r{}", self.names),
            hashes: chain(&[head, tail]),
            hit: None,
            pending: false,
        });
        if random.chance(500) {
            let last = self.clients[at].requests.len() - 1;
            self.ask(at, last, true);
        }
    }

    fn ask(&mut self, at: usize, request: usize, prefetch: bool) -> Lookup {
        let client = &mut self.clients[at];
        let of = &mut client.requests[request];
        let mut question = LookupRequest::new(&of.name, &of.hashes);
        if prefetch {
            question = question.prefetch();
        }
        let host = &mut self.hosts[client.host];
        let known = host.enter(|engine| {
            engine.still_pending(client.session, &of.name, Tokens(0), question.priority)
        });
        let answer = known.unwrap_or_else(|| host.look(client.session, &question));
        if !prefetch {
            of.pending = answer.is_pending();
            of.hit = match answer {
                Lookup::Hit(hit) => Some(hit.tokens.0),
                _ => None,
            };
        }
        answer
    }

    fn look(&mut self, at: usize, request: usize) {
        self.ask(at, request, false);
    }

    fn load(&mut self, at: usize, request: usize) {
        let client = &mut self.clients[at];
        let host = &mut self.hosts[client.host];
        let Some(tokens) = client.requests[request].hit else {
            return;
        };
        let of = client.requests.swap_remove(request);
        let end = Tokens(tokens);
        let load = host.enter(|engine| engine.begin_load(client.session, &of.name, Tokens(0), end));
        client
            .loads
            .push((load.expect("a hit can be loaded"), of.hashes, tokens));
    }

    fn save(&mut self, at: usize, request: usize) {
        let client = &mut self.clients[at];
        let host = &mut self.hosts[client.host];
        let of = &client.requests[request];
        let blocks = of.hashes.len() as u32;
        let end = Tokens(blocks * BLOCK);
        // The device has the windows and the state at the end of the computed blocks, and perhaps at an earlier end.
        let mut ends = vec![blocks];
        if self.random.chance(300) {
            ends.push(self.random.below(u64::from(blocks)) as u32 + 1);
        }
        let offered = match self.random.chance(900) {
            true => offers(&model(client.model, client.kinds), &ends),
            false => Vec::new(),
        };
        let save = SaveRequest::new(&of.name, &of.hashes, end).offers(&offered);
        let granted = host.enter(|engine| engine.begin_save(client.session, &save));
        if let Some(transfer) = granted.transfer {
            let to = (transfer.id, transfer.extents, of.hashes.clone());
            client.saves.push(to);
        }
    }

    fn end(&mut self, at: usize, request: usize) {
        let client = &mut self.clients[at];
        let of = client.requests.swap_remove(request);
        let host = &mut self.hosts[client.host];
        host.enter(|engine| engine.finish_request(client.session, &of.name));
    }

    /// Carries out the workers' copies. Checks the bytes of loads, and writes the bytes of saves.
    fn end_transfers(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let host = &mut self.hosts[client.host];
        let weights = (client.model, client.weights);
        for (load, hashes, tokens) in client.loads.drain(..) {
            assert_complete(&load, &model(client.model, client.kinds), tokens);
            self.completed += u64::from(client.kinds.len() > 1);
            self.checked += u64::from(host.compare(&load, &hashes, weights));
            host.enter(|engine| engine.end_transfer(load.id, true));
        }
        for (id, extents, hashes) in client.saves.drain(..) {
            host.fill(&extents, &hashes, weights);
            let ok = self.random.chance(950);
            host.enter(|engine| engine.end_transfer(id, ok));
        }
    }

    /// Changes the weights of a client, and resets its session.
    fn reset(&mut self, at: usize) {
        self.end_transfers(at);
        self.names += 1;
        let client = &mut self.clients[at];
        client.weights = self.names;
        client.requests.iter_mut().for_each(|of| of.hit = None);
        let session = client.session;
        self.hosts[client.host].enter(|engine| engine.reset(session));
    }

    fn close(&mut self, at: usize) {
        self.end_transfers(at);
        let client = self.clients.swap_remove(at);
        self.hosts[client.host].enter(|engine| engine.close_session(client.session));
    }

    /// Ends the life. Checks that every request is answered, whatever the store does, and that nothing stays in use.
    fn finish(&mut self) {
        if self.random.chance(300) {
            self.hosts
                .iter_mut()
                .for_each(|host| host.store.is_frozen = true);
        }
        // Requests with an answer end first, since other requests may wait for their memory.
        let since_ns = self.hosts[0].now_ns;
        for at in 0..self.clients.len() {
            self.end_transfers(at);
        }
        let mut is_waiting = true;
        while is_waiting {
            is_waiting = false;
            for at in 0..self.clients.len() {
                for request in (0..self.clients[at].requests.len()).rev() {
                    let was_pending = self.clients[at].requests[request].pending;
                    if was_pending && self.ask(at, request, false).is_pending() {
                        is_waiting = true;
                    } else {
                        self.end(at, request);
                    }
                }
            }
            self.turn(20 * MILLISECOND);
            let waited_ns = self.hosts[0].now_ns - since_ns;
            assert!(waited_ns < 60 * SECOND, "a lookup is never answered");
        }
        while !self.clients.is_empty() {
            self.close(0);
        }
        for host in &mut self.hosts {
            host.store.faults = Faults::default();
            let now_ns = host.now_ns;
            host.store.wake(now_ns);
        }
        for _ in 0..4000 {
            self.turn(20 * MILLISECOND);
            // The slots of a subtree that is being removed are freed with its nodes.
            let is_active = |host: &Host| {
                let engine = &host.engine;
                engine.inspect().has_remote_work()
                    || engine.wake() == Due::Now
                    || !engine.is_quiet()
            };
            if !self.hosts.iter().any(is_active) {
                break;
            }
        }
        for host in &mut self.hosts {
            host.check();
            assert_eq!(host.store.in_flight(), 0);
            assert!(
                !host.engine.inspect().has_remote_work(),
                "{:?}",
                host.engine.gauges()
            );
            let gauges = host.engine.gauges();
            assert_eq!(gauges.host_pinned_bytes, 0);
            // The whole arena can be used again: every slot is free.
            let session = host.enter(|engine| engine.open_session(model(7, FULL)));
            let session = session.expect("a payload fits");
            let slots = gauges.host_capacity_bytes / SLOT;
            let hashes = chain(&[(99, slots as u32)]);
            let saved = host.save((session, "all"), &hashes, (7, 0)) as u64;
            // The other policy may keep old blocks that it values more than new blocks.
            assert!(
                saved == slots || host.policy != PolicyKind::Lru,
                "{saved} of {slots}"
            );
            let units = host.most_work.units();
            assert!(
                units <= 2_000 + 40 * 130,
                "an entry took {:?}",
                host.most_work
            );
        }
    }

    fn turn(&mut self, ns: u64) {
        for host in &mut self.hosts {
            host.turn(&mut self.objects, &mut self.random);
            host.now_ns += ns;
        }
    }
}

#[test]
fn seeds() {
    let count = std::env::var("UNDERCROFT_REMOTE_SEEDS");
    let count = count
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(SEEDS);
    let first = std::env::var("UNDERCROFT_REMOTE_SEED");
    let first = first.ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let (mut checked, mut gets, mut tokens, mut corrupt, mut opened) = (0, 0, 0, 0, 0);
    let mut completed = 0;
    for seed in first..first + count {
        eprintln!("seed {seed}");
        let mut life = Life::new(seed);
        life.run();
        checked += life.checked;
        completed += life.completed;
        for host in &life.hosts {
            let counters = host.engine.counters();
            gets += counters.remote_gets;
            tokens += counters.remote_hit_tokens;
            corrupt += counters.remote_corrupt;
            opened += counters.remote_failures;
        }
    }
    println!(
        "{count} seeds: {checked} blocks compared, {gets} gets, {tokens} tokens, {corrupt} corrupt, {completed} with windows"
    );
    if count >= SEEDS {
        assert!(
            checked > 10 * count && gets > count && tokens > count,
            "too little happened"
        );
        assert!(corrupt > 0 && opened > 0, "the store was never at fault");
        assert!(completed > count / 4, "{completed} loads with windows");
    }
}
