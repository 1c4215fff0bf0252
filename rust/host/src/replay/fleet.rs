//! Many hosts behind a router, each with an engine of its own, and the remote store that they share.

use std::sync::{Arc, Mutex, PoisonError};

use undercroft_contract::error::RegisterError;
use undercroft_contract::remote::{RemoteConfig, RemoteWrite};

use super::router::{Router, RouterKind};
use super::store::{SharedStore, Store, StoreLoad};
use super::{Options, PAYLOAD_BYTES, ReplayEngine, ReplayHit, write_rate};

/// Longest time in which one host is ahead of another while writes wait for their rate.
const STEP_NS: u64 = 1_000_000_000;

/// The hosts, their router and their store.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// Number of hosts.
    pub hosts: usize,
    /// The engine of each host. Capacities are in the engine's blocks.
    pub host: Options,
    /// Blocks of the engine in a block of a request.
    pub parts: u32,
    /// The router.
    pub router: RouterKind,
    /// Objects that the store holds; 0: there is no store.
    pub store_objects: usize,
    /// The engine's blocks of an object, a power of two.
    pub object_blocks: u32,
    /// Which objects are written.
    pub store_write: RemoteWrite,
    /// Blocks a second that a host may write to the store; 0 if it writes each at once.
    pub store_writes_per_s: f64,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct FleetRequest<'a> {
    /// When it arrives, counted from the start of the replay.
    pub time_ns: u64,
    /// The number of its session.
    pub session: u64,
    /// The number of blocks of the prompt, of `blocks`.
    pub prompt: usize,
    /// The prompt's blocks, then those of the answer.
    pub blocks: &'a [u64],
}

/// Where a request was served, and its hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetHit {
    /// The host's number.
    pub host: usize,
    /// The hit in the engine's blocks.
    pub hit: ReplayHit,
}

/// The fleet.
#[derive(Debug)]
pub struct Fleet {
    hosts: Vec<ReplayEngine>,
    /// Hosts with writes that wait for their rate.
    waiting: Vec<usize>,
    router: Router,
    store: Option<SharedStore>,
    parts: u32,
    now_ns: u64,
    /// The engine's blocks of the present request.
    blocks: Vec<u64>,
}

impl Fleet {
    /// Empty hosts, and an empty store.
    ///
    /// # Errors
    /// If the engine refuses such a small host tier.
    pub fn new(options: &FleetOptions) -> Result<Self, RegisterError> {
        let host = &options.host;
        let store = (options.store_objects > 0)
            .then(|| Arc::new(Mutex::new(Store::new(options.store_objects))));
        let config = RemoteConfig {
            object_bytes: u64::from(options.object_blocks) * u64::from(PAYLOAD_BYTES),
            write: options.store_write,
            write_rate: write_rate(options.store_writes_per_s),
            // Reads end at once.
            window_bytes: u64::MAX,
            ..RemoteConfig::default()
        };
        let engine = |seed| {
            let of_host = Options {
                seed,
                ..host.clone()
            };
            let store = store
                .as_ref()
                .map(|store| (Arc::clone(store), config.clone()));
            ReplayEngine::with_store(&of_host, store)
        };
        let blocks = (host.host_blocks + host.disk_blocks) / options.parts as usize;
        Ok(Self {
            hosts: (1..=options.hosts as u64)
                .map(engine)
                .collect::<Result<_, _>>()?,
            waiting: Vec::new(),
            router: Router::new(options.router, options.hosts, blocks),
            store,
            parts: options.parts,
            now_ns: 0,
            blocks: Vec::new(),
        })
    }

    /// Serves a request, which arrives no earlier than the requests before.
    pub fn request(&mut self, request: &FleetRequest<'_>) -> FleetHit {
        self.pass_time(request.time_ns);
        let prompt = request.prompt.min(request.blocks.len());
        let of_prompt = &request.blocks[..prompt];
        let host = (self.router).route(request.session, of_prompt, self.now_ns);
        let parts = 0..u64::from(self.parts);
        let in_parts = |&block: &u64| parts.clone().map(move |part| part_of(block, part));
        self.blocks.clear();
        self.blocks.extend(request.blocks.iter().flat_map(in_parts));
        let engine = &mut self.hosts[host];
        engine.pass_time(self.now_ns);
        let hit = engine.request(prompt * self.parts as usize, &self.blocks);
        if engine.has_waiting_writes() && !self.waiting.contains(&host) {
            self.waiting.push(host);
        }
        self.router.note(host, request.blocks);
        FleetHit { host, hit }
    }

    /// Lets time pass on the hosts with writes that wait, in turn: the others find the objects that one has
    /// written.
    fn pass_time(&mut self, until_ns: u64) {
        while self.now_ns < until_ns {
            let step_ns = match self.waiting.is_empty() {
                true => u64::MAX,
                false => STEP_NS,
            };
            self.now_ns = self.now_ns.saturating_add(step_ns).min(until_ns);
            if let Some(store) = &self.store {
                let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
                store.set_now(self.now_ns);
            }
            let (hosts, now_ns) = (&mut self.hosts, self.now_ns);
            self.waiting.retain(|&host| {
                hosts[host].pass_time(now_ns);
                hosts[host].has_waiting_writes()
            });
        }
    }

    /// The engines of the hosts.
    pub fn hosts(&self) -> &[ReplayEngine] {
        &self.hosts
    }

    /// The work of the store so far; none without a store.
    pub fn store_load(&self) -> StoreLoad {
        let store = self.store.as_ref();
        store.map_or_else(StoreLoad::default, |store| {
            store.lock().unwrap_or_else(PoisonError::into_inner).load()
        })
    }
}

/// The number of a part of a block.
fn part_of(block: u64, part: u64) -> u64 {
    block ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use undercroft_engine::EngineConfig;

    use super::*;

    fn options(hosts: usize, store_objects: usize) -> FleetOptions {
        FleetOptions {
            hosts,
            host: Options {
                host_blocks: 64,
                disk_blocks: 0,
                policy: EngineConfig::new(0).policy,
                second_touch: false,
                disk_writes_per_s: 0.0,
                seed: 1,
            },
            parts: 1,
            router: RouterKind::Random,
            store_objects,
            object_blocks: 1,
            store_write: RemoteWrite::All,
            store_writes_per_s: 0.0,
        }
    }

    fn request(time_ns: u64, session: u64, blocks: &[u64]) -> FleetRequest<'_> {
        FleetRequest {
            time_ns,
            session,
            prompt: blocks.len(),
            blocks,
        }
    }

    /// The hosts of requests with these blocks, a millisecond apart.
    fn routed(router: RouterKind, of: &[(u64, &[u64])]) -> Vec<usize> {
        let mut fleet = Fleet::new(&FleetOptions {
            router,
            ..options(4, 0)
        })
        .expect("a fleet");
        let times = (0..).step_by(1_000_000);
        let requests = times.zip(of);
        requests
            .map(|(at, &(session, blocks))| fleet.request(&request(at, session, blocks)).host)
            .collect()
    }

    #[test]
    fn a_host_finds_what_another_has_written() {
        let mut fleet = Fleet::new(&options(8, 1000)).expect("a fleet");
        let blocks: Vec<u64> = (0..8).collect();
        let mut served = [false; 8];
        for time in 0..40 {
            let FleetHit { host, hit } = fleet.request(&request(time, 0, &blocks));
            let found = (hit.host, hit.remote);
            match (time, std::mem::replace(&mut served[host], true)) {
                (0, _) => assert_eq!(found, (0, 0)),
                (_, false) => assert_eq!(found, (0, 8)),
                (_, true) => assert_eq!(found, (8, 0)),
            }
        }
        let load = fleet.store_load();
        assert_eq!((load.total.puts, load.total.written_blocks), (8, 8));
        assert_eq!(load.total.read_blocks, 7 * 8);
        assert_eq!(load.peak_requests, load.total.requests());
    }

    #[test]
    fn a_full_store_forgets_what_was_used_least_lately() {
        let mut fleet = Fleet::new(&options(1, 4)).expect("a fleet");
        let blocks: Vec<u64> = (0..8).collect();
        fleet.request(&request(0, 0, &blocks));
        assert_eq!(fleet.store_load().evicted, 4);
    }

    #[test]
    fn writes_wait_for_their_rate() {
        let slow = FleetOptions {
            store_writes_per_s: 1.0,
            ..options(1, 1000)
        };
        let mut fleet = Fleet::new(&slow).expect("a fleet");
        let blocks: Vec<u64> = (0..8).collect();
        fleet.request(&request(0, 0, &blocks));
        let before = fleet.store_load().total.puts;
        fleet.request(&request(4_000_000_000, 0, &[100]));
        let after = fleet.store_load().total.puts;
        assert!(before <= 1 && (3..=5).contains(&after), "{before}, {after}");
    }

    #[test]
    fn a_prefix_leads_to_its_host_until_the_host_has_too_much_to_do() {
        let (a, b): (Vec<u64>, Vec<u64>) = ((0..8).collect(), (100..108).collect());
        let hosts = routed(RouterKind::Prefix, &[(0, &a), (1, &b), (2, &b), (3, &a)]);
        assert_eq!((hosts[0], hosts[1]), (hosts[3], hosts[2]));
        assert_ne!(hosts[0], hosts[1]);
        let flood = vec![(0, &*a); 100];
        let hosts = routed(RouterKind::Prefix, &flood);
        let most = (0..4).map(|host| hosts.iter().filter(|&&of| of == host).count());
        assert!(most.max() < Some(50), "{hosts:?}");
    }

    #[test]
    fn a_shared_beginning_alone_leads_nowhere() {
        let prompts: Vec<Vec<u64>> = (1..9)
            .map(|of| std::iter::once(0).chain(of * 100..of * 100 + 9).collect())
            .collect();
        let requests: Vec<(u64, &[u64])> = prompts.iter().map(|of| (0, &**of)).collect();
        let hosts = routed(RouterKind::Prefix, &requests);
        assert_eq!(hosts[..4].iter().max(), Some(&3));
    }

    #[test]
    fn sessions_stay_and_random_requests_do_not() {
        let blocks: Vec<u64> = (0..4).collect();
        let requests: Vec<(u64, &[u64])> = (0..64).map(|of| (of % 8, &*blocks)).collect();
        let sticky = routed(RouterKind::Sticky, &requests);
        assert!((8..64).all(|at| sticky[at] == sticky[at % 8]), "{sticky:?}");
        assert!((0..3).all(|host| sticky.contains(&host)), "{sticky:?}");
        let random = routed(RouterKind::Random, &requests);
        assert!((8..64).any(|at| random[at] != random[at % 8]));
        assert!((0..4).all(|host| random.contains(&host)), "{random:?}");
    }
}
