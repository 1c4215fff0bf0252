//! `_core.remote_*`: a remote store without an engine.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use undercroft_remote::gc::{Limits, collect};
use undercroft_remote::measure::{OfSize, measure};
use undercroft_remote::{
    Location, LocationError, ObjectStoreError, Objects, RemoteOptions, check, contents, examine,
    open, open_existing,
};

use crate::errors::{ConfigError, UndercroftError};
use crate::interrupt::interruptible;
use crate::json::to_python;

fn refused(error: LocationError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

fn opened(url: &str, options: RemoteOptions) -> PyResult<Arc<dyn Objects>> {
    let location = Location::parse(url).map_err(refused)?;
    open(&location, options).map_err(refused)
}

/// Opens a store for an operator's commands.
fn opened_existing(url: &str, options: RemoteOptions) -> PyResult<Arc<dyn Objects>> {
    let location = Location::parse(url).map_err(refused)?;
    open_existing(&location, options).map_err(refused)
}

/// The settings of a store for an operator's command.
fn owned_by(any_owner: bool) -> RemoteOptions {
    RemoteOptions {
        any_owner,
        ..RemoteOptions::default()
    }
}

/// The exception for a store's error. The message names the URL, since a URL that was opened has no credentials.
fn failed(url: &str, error: &ObjectStoreError) -> PyErr {
    UndercroftError::new_err(format!("{url}: {error}: {}", error.advice()))
}

/// Removes old objects from a remote store: what `undercroft_remote::gc::GcReport` says. `progress([done, total])` is
/// called now and then. Raises ConfigError, UndercroftError.
#[pyfunction]
#[pyo3(signature = (url, progress, *, max_bytes = None, max_age = None, min_age = 60, dry_run = false, any_owner = false))]
#[expect(
    clippy::too_many_arguments,
    reason = "each is an argument of the command"
)]
pub(crate) fn remote_gc(
    py: Python<'_>,
    url: &str,
    progress: Py<PyAny>,
    max_bytes: Option<u64>,
    max_age: Option<u64>,
    min_age: u64,
    dry_run: bool,
    any_owner: bool,
) -> PyResult<Py<PyAny>> {
    let limits = Limits {
        max_bytes,
        max_age: max_age.map(Duration::from_secs),
        min_age: Duration::from_secs(min_age),
        dry_run,
    };
    let url = url.to_owned();
    let report = interruptible(py, &progress, move |stopped, tell| {
        let objects = opened_existing(&url, owned_by(any_owner))?;
        if objects.expires() {
            return Err(ConfigError::new_err(format!(
                "remote is \"{url}\": this store removes objects itself: Redis by remote_ttl, and by maxmemory with \
                 maxmemory-policy allkeys-lru; Mooncake when its memory is full. `undercroft remote gc` is for directories \
                 and object stores"
            )));
        }
        let report = collect(&*objects, &limits, stopped, |done, total| {
            tell([done, total])
        });
        report.map_err(|error| failed(&url, &error))
    })?;
    Ok(to_python(py, &report?)?.unbind())
}

/// The contents of a remote store, by namespace. Raises ConfigError, UndercroftError.
#[pyfunction]
#[pyo3(signature = (url, *, any_owner = false))]
pub(crate) fn remote_contents<'py>(
    py: Python<'py>,
    url: &str,
    any_owner: bool,
) -> PyResult<Bound<'py, PyAny>> {
    // Opening asks the file system, too, which may hang.
    let found = py.detach(|| {
        let found = contents::contents(&*opened_existing(url, owned_by(any_owner))?);
        found.map_err(|error| failed(url, &error))
    });
    to_python(py, &found?)
}

/// Why an engine could not use a remote store now, for people; `None` if it probably could. Sends no request, and makes
/// no directory. Raises ConfigError if the engine would refuse to start.
#[pyfunction]
#[pyo3(signature = (url, *, any_owner = false))]
pub(crate) fn remote_examine(
    py: Python<'_>,
    url: &str,
    any_owner: bool,
) -> PyResult<Option<String>> {
    let found = py.detach(|| examine(&Location::parse(url)?, owned_by(any_owner)));
    Ok(found.map_err(refused)?.map(|reason| reason.to_string()))
}

/// Findings on a remote store, as `undercroft doctor` has them. Raises ConfigError.
#[pyfunction]
#[pyo3(signature = (url, *, any_owner = false))]
pub(crate) fn remote_check<'py>(
    py: Python<'py>,
    url: &str,
    any_owner: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let check = || Ok::<_, PyErr>(check::check(&*opened(url, owned_by(any_owner))?));
    let found = py.detach(check);
    to_python(py, &found?)
}

/// Speeds of a remote store for objects of these sizes, with about `total` bytes of each. `progress(rates)` is called
/// after each. Ctrl-C ends it once the objects are removed. Raises ConfigError, UndercroftError.
#[pyfunction]
#[pyo3(signature = (url, sizes, total, progress, *, any_owner = false))]
pub(crate) fn remote_measure(
    py: Python<'_>,
    url: &str,
    sizes: Vec<u64>,
    total: u64,
    progress: Py<PyAny>,
    any_owner: bool,
) -> PyResult<Py<PyAny>> {
    let url = url.to_owned();
    let found = interruptible(py, &progress, move |stopped, tell| {
        let objects = opened(&url, owned_by(any_owner))?;
        let told = |rates: &OfSize| tell(rates.clone());
        let found = measure(&objects, &sizes, total, stopped, told);
        found.map_err(|error| failed(&url, &error))
    })?;
    Ok(to_python(py, &found?)?.unbind())
}
