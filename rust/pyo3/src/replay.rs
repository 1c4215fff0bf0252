//! `_core.Replay`, `_core.Fleet` and `_core.reference_hits`: the engine without payloads, for `undercroft estimate`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use undercroft_contract::remote::RemoteWrite;
use undercroft_engine::metrics::Counters;
use undercroft_engine::policy::PolicyKind;
use undercroft_host::HostError;
use undercroft_host::replay::{
    self, FleetOptions, FleetRequest, Options, ReplayEngine, RouterKind,
};

use crate::errors::Result;

/// The engine's index, slots and policies, for the replay of a trace. It stores nothing.
#[pyclass(name = "Replay", module = "undercroft._core", frozen)]
pub(crate) struct PyReplay {
    engine: Mutex<ReplayEngine>,
}

#[pymethods]
impl PyReplay {
    /// An empty engine; capacities in blocks, 0 disk blocks for none. The disk writes `disk_writes_per_s` blocks a
    /// second, or each at once if that is 0. Raises ConfigError.
    #[new]
    #[pyo3(signature = (host_blocks, disk_blocks = 0, second_touch = false, disk_writes_per_s = 0.0))]
    fn new(
        host_blocks: usize,
        disk_blocks: usize,
        second_touch: bool,
        disk_writes_per_s: f64,
    ) -> Result<Self> {
        let options = Options {
            host_blocks,
            disk_blocks,
            policy: PolicyKind::default(),
            second_touch,
            disk_writes_per_s,
            seed: 1,
        };
        let engine = ReplayEngine::new(&options).map_err(HostError::from)?;
        Ok(Self {
            engine: Mutex::new(engine),
        })
    }

    /// Serve a request: look up the first `prompt` blocks, save all. Returns the blocks found in host memory and those
    /// found on disk.
    fn request(&self, py: Python<'_>, prompt: usize, blocks: Vec<u64>) -> (usize, usize) {
        py.detach(|| {
            let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            let hit = engine.request(prompt.min(blocks.len()), &blocks);
            (hit.host, hit.disk)
        })
    }

    /// Let time pass until `seconds` after the start of the replay: the disk writes what waits for its rate.
    fn pass_time(&self, py: Python<'_>, seconds: f64) {
        py.detach(|| {
            let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            engine.pass_time((seconds.max(0.0) * 1e9) as u64);
        });
    }

    /// Blocks written to disk so far.
    #[getter]
    fn disk_writes(&self) -> u64 {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.counters().disk_writes
    }

    /// Writes that were not made because too many waited already.
    #[getter]
    fn dropped_writes(&self) -> u64 {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        dropped_writes(engine.counters())
    }
}

/// Many hosts behind a router, each with an engine without payloads, and the remote store that they share.
#[pyclass(name = "Fleet", module = "undercroft._core", frozen)]
pub(crate) struct PyFleet {
    fleet: Mutex<replay::Fleet>,
}

#[pymethods]
impl PyFleet {
    /// Empty hosts. Capacities are in blocks of requests, each of which is `parts` blocks of the engine; an object of the
    /// store has `object_blocks` of these. Raises ConfigError.
    #[new]
    #[pyo3(signature = (*, hosts, router, parts, host_blocks, disk_blocks, second_touch, disk_writes_per_s,
                        store_objects, object_blocks, store_write, store_writes_per_s))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        hosts: usize,
        router: &str,
        parts: u32,
        host_blocks: usize,
        disk_blocks: usize,
        second_touch: bool,
        disk_writes_per_s: f64,
        store_objects: usize,
        object_blocks: u32,
        store_write: &str,
        store_writes_per_s: f64,
    ) -> Result<Self> {
        let in_parts = |blocks: usize| blocks * parts as usize;
        let options = FleetOptions {
            hosts,
            host: Options {
                host_blocks: in_parts(host_blocks),
                disk_blocks: in_parts(disk_blocks),
                policy: PolicyKind::default(),
                second_touch,
                disk_writes_per_s: disk_writes_per_s * f64::from(parts),
                seed: 1,
            },
            parts,
            router: match router {
                "random" => RouterKind::Random,
                "sticky" => RouterKind::Sticky,
                _ => RouterKind::Prefix,
            },
            store_objects,
            object_blocks,
            store_write: match store_write {
                "none" => RemoteWrite::None,
                "second_touch" => RemoteWrite::SecondTouch,
                _ => RemoteWrite::All,
            },
            store_writes_per_s: store_writes_per_s * f64::from(parts),
        };
        let fleet = replay::Fleet::new(&options).map_err(HostError::from)?;
        Ok(Self {
            fleet: Mutex::new(fleet),
        })
    }

    /// Serve a request that arrives `seconds` after the start. Returns its host's number and the engine's blocks found in
    /// host memory, on disk and in the store.
    fn request(
        &self,
        py: Python<'_>,
        seconds: f64,
        session: u64,
        prompt: usize,
        blocks: Vec<u64>,
    ) -> (usize, usize, usize, usize) {
        py.detach(|| {
            let mut fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
            let found = fleet.request(&FleetRequest {
                time_ns: (seconds.max(0.0) * 1e9) as u64,
                session,
                prompt,
                blocks: &blocks,
            });
            let hit = found.hit;
            (found.host, hit.host, hit.disk, hit.remote)
        })
    }

    /// Counts of the hosts and of the store, by name. Blocks are the engine's; peaks are those of a minute.
    fn counts(&self) -> BTreeMap<&'static str, u64> {
        let fleet = self.fleet.lock().unwrap_or_else(PoisonError::into_inner);
        let store = fleet.store_load();
        let of_hosts = |count: fn(&Counters) -> u64| -> u64 {
            let hosts = fleet.hosts().iter();
            hosts.map(|host| count(host.counters())).sum()
        };
        BTreeMap::from([
            ("disk_writes", of_hosts(|of| of.disk_writes)),
            ("disk_dropped", of_hosts(dropped_writes)),
            (
                "store_dropped",
                of_hosts(|of| of.remote_puts_dropped_queue + of.remote_puts_dropped_gone),
            ),
            ("gets", store.total.gets),
            ("probes", store.total.probes),
            ("puts", store.total.puts),
            ("read_blocks", store.total.read_blocks),
            ("written_blocks", store.total.written_blocks),
            ("evicted_objects", store.evicted),
            ("peak_requests", store.peak_requests),
            ("peak_blocks", store.peak_blocks),
        ])
    }
}

fn dropped_writes(counters: &Counters) -> u64 {
    counters.refused_write_rate + counters.refused_disk_behind
}

/// The prompt blocks that LRU finds in a cache of `capacity` blocks, and those that the optimum finds. `prompts`: for each
/// request, how many of its blocks the prompt has.
#[pyfunction]
pub(crate) fn reference_hits(
    py: Python<'_>,
    prompts: Vec<usize>,
    blocks: Vec<Vec<u64>>,
    capacity: usize,
) -> (usize, usize) {
    py.detach(|| {
        let of_requests = blocks.iter().map(Vec::as_slice);
        let requests: Vec<_> = prompts.into_iter().zip(of_requests).collect();
        let hits = replay::reference_hits(&requests, capacity);
        (hits.lru, hits.optimum)
    })
}
