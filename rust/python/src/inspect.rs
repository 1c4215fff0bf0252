//! `_core.inspect`, `_core.verify`, `_core.drop_namespace`: a directory without an engine.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use undercroft_core::disk::format::{FORMAT_VERSION, Record};
use undercroft_core::disk::inspect::{Summary, is_intact};
use undercroft_core::disk::open;
use undercroft_core::error::StoreError as CoreStoreError;

use crate::errors::StoreError;

/// Payloads verified between two calls of the progress function.
const STEP: usize = 64;
/// Fewer digits could name a namespace that was not meant.
const DIGITS_MIN: usize = 8;

fn failed(error: &CoreStoreError) -> PyErr {
    StoreError::new_err(error.to_string())
}

/// What a cache directory holds. Changes nothing.
///
/// Keys: format_version, capacity_bytes, used_bytes, records, damaged_records, namespaces (a list of
/// digest, description, blocks, bytes, and the age of the oldest and newest block, oldest_s and newest_s, in
/// seconds). Raises StoreError.
#[pyfunction]
pub(crate) fn inspect(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let (summary, capacity) = py
        .detach(|| {
            let contents = open::read(&directory)?;
            Ok((Summary::of(&contents), contents.data_bytes))
        })
        .map_err(|error: CoreStoreError| failed(&error))?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let age = |written: u32| now.as_secs().saturating_sub(u64::from(written));
    let used: u64 = summary
        .records
        .iter()
        .map(|record| u64::from(record.payload_bytes))
        .sum();
    let found = PyDict::new(py);
    found.set_item("format_version", FORMAT_VERSION)?;
    found.set_item("capacity_bytes", capacity)?;
    found.set_item("used_bytes", used)?;
    found.set_item("records", summary.records.len())?;
    found.set_item("damaged_records", summary.damaged)?;
    let spaces = PyList::empty(py);
    for space in &summary.namespaces {
        let item = PyDict::new(py);
        item.set_item("digest", space.spec.digest().to_hex())?;
        item.set_item("description", &space.spec.description)?;
        item.set_item("blocks", space.blocks)?;
        item.set_item("bytes", space.bytes)?;
        item.set_item("oldest_s", (space.blocks > 0).then(|| age(space.oldest_s)))?;
        item.set_item("newest_s", (space.blocks > 0).then(|| age(space.newest_s)))?;
        spaces.append(item)?;
    }
    found.set_item("namespaces", spaces)?;
    Ok(found)
}

/// Reads every payload of a cache directory and compares its checksum. Changes nothing.
///
/// `progress(done, total)` is called now and then. Keys of the result: checked, corrupt, bytes. Of a
/// directory in use, blocks may be replaced meanwhile and count as corrupt. Raises StoreError.
#[pyfunction]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    directory: PathBuf,
    progress: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let contents = open::read(&directory).map_err(|error| failed(&error))?;
    let summary = py.detach(|| Summary::of(&contents));
    let total = summary.records.len();
    let (mut corrupt, mut bytes, mut done) = (0_u64, 0_u64, 0);
    progress.call1((done, total))?;
    for records in summary.records.chunks(STEP) {
        let check = |records: &[Record]| {
            records.iter().try_fold(0, |corrupt, record| {
                Ok::<u64, std::io::Error>(corrupt + u64::from(!is_intact(record, &contents.data)?))
            })
        };
        corrupt += py.detach(|| check(records)).map_err(|error| {
            StoreError::new_err(format!(
                "{}: reading a payload: {error}",
                directory.display()
            ))
        })?;
        bytes += records
            .iter()
            .map(|record| u64::from(record.payload_bytes))
            .sum::<u64>();
        done += records.len();
        progress.call1((done, total))?;
    }
    let found = PyDict::new(py);
    found.set_item("checked", total)?;
    found.set_item("corrupt", corrupt)?;
    found.set_item("bytes", bytes)?;
    Ok(found)
}

/// Remove namespaces from a cache directory that is not in use: how many whose digest starts with
/// `digest`, at least eight hexadecimal digits. Raises StoreError.
#[pyfunction]
pub(crate) fn drop_namespace(py: Python<'_>, directory: PathBuf, digest: &str) -> PyResult<usize> {
    if digest.len() < DIGITS_MIN || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(StoreError::new_err(format!(
            "namespace {digest:?}: allowed are at least {DIGITS_MIN} hexadecimal digits, as undercroft inspect shows them"
        )));
    }
    let digest = digest.to_ascii_lowercase();
    py.detach(|| open::drop_namespace(&directory, &digest))
        .map_err(|error| failed(&error))
}
