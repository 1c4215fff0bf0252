//! `undercroft_bench._bench`: measurements and replays for `undercroft bench`.

use std::fmt::Display;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;
use serde::de::{Deserialize, IntoDeserializer, value};
use undercroft_bench::disk::DiskBench;
use undercroft_bench::replay::{Options, replay_file};

pyo3::import_exception!(undercroft.errors, UndercroftError);
pyo3::import_exception!(undercroft.errors, ConfigError);

fn failed(error: impl Display) -> PyErr {
    UndercroftError::new_err(error.to_string())
}

/// One of an option's words.
fn choice<'a, T: Deserialize<'a>>(option: &str, word: &'a str) -> PyResult<T> {
    let word: value::StrDeserializer<'a, value::Error> = word.into_deserializer();
    T::deserialize(word).map_err(|error| ConfigError::new_err(format!("{option}: {error}")))
}

fn as_dict(py: Python<'_>, report: impl Serialize) -> PyResult<Bound<'_, PyAny>> {
    let text = serde_json::to_string(&report).map_err(failed)?;
    py.import("json")?.call_method1("loads", (text,))
}

/// How fast one thread compares payloads in the arena with their checksums, in 1e9 bytes/s. Raises UndercroftError.
#[pyfunction]
fn checksum_gbps(py: Python<'_>, block_bytes: u32, blocks: u32, rounds: usize) -> PyResult<f64> {
    py.detach(|| undercroft_bench::checksums::speed(block_bytes, blocks, rounds))
        .map_err(failed)
}

/// The disk tier through the whole engine, against a bare O_DIRECT loop in the same run.
///
/// `directory` must be empty and is left so. Keys of the result: `undercroft bench disk`. Raises UndercroftError.
#[pyfunction]
#[pyo3(signature = (directory, block_bytes, blocks, depth = 32, io_engine = "auto", key_file = ""))]
fn disk<'py>(
    py: Python<'py>,
    directory: PathBuf,
    block_bytes: u32,
    blocks: u64,
    depth: u32,
    io_engine: &str,
    key_file: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let bench = DiskBench {
        block_bytes,
        blocks,
        depth,
        io_engine: choice("io_engine", io_engine)?,
        key_file: key_file.into(),
    };
    as_dict(py, py.detach(|| bench.run(&directory)).map_err(failed)?)
}

/// How long opening a directory of `blocks` blocks takes.
///
/// `directory` must be empty and is left so. Keys of the result: `undercroft bench recover`. Raises UndercroftError.
#[pyfunction]
fn recover(py: Python<'_>, directory: PathBuf, blocks: u64) -> PyResult<Bound<'_, PyAny>> {
    let report = py.detach(|| undercroft_bench::recover::run(&directory, blocks));
    as_dict(py, report.map_err(failed)?)
}

/// Replay a trace on the engine, without payloads: hit rates and insert rates. Raises UndercroftError.
#[pyfunction]
#[pyo3(signature = (trace, host_blocks, disk_blocks, policy, second_touch = false))]
fn replay<'py>(
    py: Python<'py>,
    trace: PathBuf,
    host_blocks: usize,
    disk_blocks: usize,
    policy: &str,
    second_touch: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let options = Options {
        host_blocks,
        disk_blocks,
        policy: choice("policy", policy)?,
        second_touch,
        disk_writes_per_s: 0.0,
        seed: 1,
    };
    let report = py
        .detach(|| replay_file(&trace, &options))
        .map_err(failed)?;
    let fields = PyDict::new(py);
    fields.set_item("requests", report.requests)?;
    fields.set_item("blocks", report.blocks)?;
    fields.set_item("hit_percent", report.hit_percent())?;
    for (tier, (name, counts)) in ["host", "disk"].iter().zip(&report.tiers).enumerate() {
        let percent = report.insert_percent(tier);
        fields.set_item(format!("{name}_insert_percent"), percent)?;
        fields.set_item(format!("{name}_inserted"), counts.inserted)?;
        fields.set_item(format!("{name}_evicted"), counts.evicted)?;
    }
    fields.set_item("accesses_per_s", report.accesses_per_second())?;
    Ok(fields)
}

/// Measurements and replays.
#[pymodule]
mod _bench {
    #[pymodule_export]
    use super::{checksum_gbps, disk, recover, replay};
}
