//! `_core.Replay`: the engine without payloads, for `undercroft estimate`.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use undercroft_engine::policy::PolicyKind;
use undercroft_host::HostError;
use undercroft_host::replay::{Options, ReplayEngine};

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
    #[pyo3(signature = (host_blocks, disk_blocks = 0, leafhd = false, second_touch = false, disk_writes_per_s = 0.0))]
    fn new(
        host_blocks: usize,
        disk_blocks: usize,
        leafhd: bool,
        second_touch: bool,
        disk_writes_per_s: f64,
    ) -> Result<Self> {
        let options = Options {
            host_blocks,
            disk_blocks,
            policy: if leafhd {
                PolicyKind::LeafHd
            } else {
                PolicyKind::Lru
            },
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
        let counters = engine.counters();
        counters.refused_write_rate + counters.refused_disk_behind
    }
}
