//! `_core.inspect`, `_core.examine`, `_core.descriptions`, `_core.verify`, `_core.drop_namespace`: a directory without
//! an engine. `_core.export_namespace`, `_core.import_namespace`: a namespace in a file.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use undercroft_host::{HostConfig, export, import, inspect};

use crate::errors::Result;
use crate::json::{to_json, to_python};

/// The contents of a cache directory. Changes nothing. Raises StoreError.
#[pyfunction]
#[pyo3(name = "inspect")]
pub(crate) fn inspect_directory(py: Python<'_>, directory: PathBuf) -> Result<Bound<'_, PyAny>> {
    let found = py.detach(|| inspect::inspect(&directory))?;
    Ok(to_python(py, &found)?)
}

/// The effect of opening the directories of these options (those of `Engine`). Changes nothing. Raises ConfigError.
#[pyfunction]
pub(crate) fn examine<'py>(
    py: Python<'py>,
    options: &Bound<'py, PyDict>,
) -> Result<Bound<'py, PyAny>> {
    let config = HostConfig::from_json(&to_json(options)?)?;
    let found = py.detach(|| inspect::examine(&config))?;
    Ok(to_python(py, &found)?)
}

/// The descriptions of the namespaces that a cache directory holds. Raises StoreError.
#[pyfunction]
pub(crate) fn descriptions(py: Python<'_>, directory: PathBuf) -> Result<Vec<String>> {
    Ok(py.detach(|| inspect::descriptions(&directory))?)
}

/// Reads every payload of a cache directory and compares its checksum. Changes nothing. Raises StoreError.
///
/// `progress(done, total)` is called now and then.
#[pyfunction]
pub(crate) fn verify(
    py: Python<'_>,
    directory: PathBuf,
    progress: Py<PyAny>,
) -> Result<Bound<'_, PyAny>> {
    let report = |done: usize, total: usize| {
        Python::attach(|py| progress.call1(py, (done, total)))?;
        Result::Ok(())
    };
    let found = py.detach(|| inspect::verify(&directory, report))?;
    Ok(to_python(py, &found)?)
}

/// Remove the namespaces whose digest starts with `digest` from a cache directory that is not in use. Returns how
/// many were removed. Raises ConfigError, StoreError.
#[pyfunction]
pub(crate) fn drop_namespace(py: Python<'_>, directory: PathBuf, digest: &str) -> Result<usize> {
    Ok(py.detach(|| inspect::drop_namespace(&directory, digest))?)
}

/// Write the blocks on disk of the namespace whose digest starts with `digest` to a new file. Raises ConfigError,
/// StoreError, UndercroftError.
///
/// `progress(done, total)` is called now and then.
#[pyfunction]
pub(crate) fn export_namespace<'py>(
    py: Python<'py>,
    directories: Vec<PathBuf>,
    digest: &str,
    path: PathBuf,
    key_file: PathBuf,
    progress: Py<PyAny>,
) -> Result<Bound<'py, PyAny>> {
    let report = |done: u64, total: u64| {
        Python::attach(|py| progress.call1(py, (done, total)))?;
        Result::Ok(())
    };
    let exported = py.detach(|| export(&directories, digest, (&path, &key_file), report))?;
    Ok(to_python(py, &exported)?)
}

/// Save the blocks of an exported file in the engine at a socket. Raises ConfigError, ServerError, UndercroftError.
///
/// `progress(step, done, total)` is called now and then.
#[pyfunction]
pub(crate) fn import_namespace(
    py: Python<'_>,
    socket: PathBuf,
    path: PathBuf,
    progress: Py<PyAny>,
) -> Result<Bound<'_, PyAny>> {
    let report = |step: &'static str, done: u64, total: u64| {
        Python::attach(|py| progress.call1(py, (step, done, total)))?;
        Result::Ok(())
    };
    let imported = py.detach(|| import(&socket, &path, report))?;
    Ok(to_python(py, &imported)?)
}
