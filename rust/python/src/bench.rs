//! `_core.bench_disk`, `_core.bench_recover`: measurements of `undercroft bench`.

use std::path::PathBuf;

use pyo3::prelude::*;
use serde::Serialize;
use undercroft_bench::disk::DiskBench;
use undercroft_bench::{BenchError, recover};

use crate::errors::UndercroftError;

/// The disk tier through the whole engine, against a bare O_DIRECT loop in the same run.
///
/// `directory` must be empty and is left so. Keys of the result: `undercroft bench disk`. Raises
/// UndercroftError.
#[pyfunction]
#[pyo3(signature = (directory, block_bytes, blocks, depth = 32, io_engine = "auto"))]
pub(crate) fn bench_disk<'py>(
    py: Python<'py>,
    directory: PathBuf,
    block_bytes: u32,
    blocks: u64,
    depth: u32,
    io_engine: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let bench = DiskBench {
        block_bytes,
        blocks,
        depth,
        io_engine: crate::engine::choice(io_engine)?,
    };
    as_dict(py, py.detach(|| bench.run(&directory)))
}

/// How long opening a directory of `blocks` blocks takes.
///
/// `directory` must be empty and is left so. Keys of the result: `undercroft bench recover`. Raises
/// UndercroftError.
#[pyfunction]
pub(crate) fn bench_recover(
    py: Python<'_>,
    directory: PathBuf,
    blocks: u64,
) -> PyResult<Bound<'_, PyAny>> {
    as_dict(py, py.detach(|| recover::run(&directory, blocks)))
}

fn as_dict(
    py: Python<'_>,
    result: Result<impl Serialize, BenchError>,
) -> PyResult<Bound<'_, PyAny>> {
    let failed = |text: String| UndercroftError::new_err(text);
    let report = result.map_err(|error| failed(error.to_string()))?;
    let text = serde_json::to_string(&report).map_err(|error| failed(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
