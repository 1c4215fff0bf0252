//! `_core.bench_replay`: a trace replayed on the engine's index and policies.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use undercroft_bench::replay::{Options, replay_file};
use undercroft_core::policy::PolicyKind;

use crate::errors::{ConfigError, UndercroftError};

/// Replay a trace on the engine, without payloads: hit rates and insert rates.
#[pyfunction]
#[pyo3(signature = (trace, host_blocks, disk_blocks, policy, second_touch = false))]
pub(crate) fn bench_replay(
    py: Python<'_>,
    trace: PathBuf,
    host_blocks: usize,
    disk_blocks: usize,
    policy: &str,
    second_touch: bool,
) -> PyResult<Py<PyDict>> {
    let policy = PolicyKind::from_name(policy).ok_or_else(|| {
        let names = PolicyKind::NAMES.map(|(name, _)| name).join(", ");
        ConfigError::new_err(format!("policy {policy:?}: allowed are {names}"))
    })?;
    let options = Options {
        host_blocks,
        disk_blocks,
        policy,
        second_touch,
        seed: 1,
    };
    let report = py
        .detach(|| replay_file(&trace, &options))
        .map_err(|error| UndercroftError::new_err(error.to_string()))?;
    let fields = PyDict::new(py);
    fields.set_item("requests", report.requests)?;
    fields.set_item("blocks", report.blocks)?;
    fields.set_item("hit_percent", report.hit_percent())?;
    for (tier, (name, counts)) in ["host", "disk"].iter().zip(&report.tiers).enumerate() {
        fields.set_item(
            format!("{name}_insert_percent"),
            report.insert_percent(tier),
        )?;
        fields.set_item(format!("{name}_inserted"), counts.inserted)?;
        fields.set_item(format!("{name}_evicted"), counts.evicted)?;
    }
    fields.set_item("accesses_per_s", report.accesses_per_second())?;
    Ok(fields.unbind())
}
