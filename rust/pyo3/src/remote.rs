//! `_core.remote_*`: a remote store without an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use pyo3::prelude::*;
use serde::Serialize;
use undercroft_remote::gc::{Limits, collect};
use undercroft_remote::measure::measure;
use undercroft_remote::{
    Location, LocationError, Objects, Options, StoreError, check, contents, open, open_existing,
};

use crate::errors::{ConfigError, UndercroftError};
use crate::json::to_python;

/// Interval at which a long call checks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(50);

fn refused(error: LocationError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

fn opened(url: &str) -> PyResult<Arc<dyn Objects>> {
    let location = Location::parse(url).map_err(refused)?;
    open(&location, Options::default()).map_err(refused)
}

/// Opens a store for an operator's commands.
fn opened_existing(url: &str) -> PyResult<Arc<dyn Objects>> {
    let location = Location::parse(url).map_err(refused)?;
    open_existing(&location, Options::default()).map_err(refused)
}

/// The exception for a store's error. The message names the URL, since a URL that was opened has no credentials.
fn failed(url: &str, error: &StoreError) -> PyErr {
    UndercroftError::new_err(format!("{url}: {error}: {}", error.advice()))
}

/// Calls Python's `progress`. Returns false after an exception in Python, for example after Ctrl-C.
fn tell(progress: &Py<PyAny>, error: &mut Option<PyErr>, value: &impl Serialize) -> bool {
    let told = Python::attach(|py| {
        py.check_signals()?;
        progress.call1(py, (to_python(py, value)?,)).map(drop)
    });
    *error = told.err();
    error.is_none()
}

/// Removes old objects from a remote store: what `undercroft_remote::gc::Report` says. `progress([done, total])` is
/// called now and then. Raises ConfigError, UndercroftError.
#[pyfunction]
#[pyo3(signature = (url, progress, *, max_bytes = None, max_age = None, min_age = 60, dry_run = false))]
pub(crate) fn remote_gc(
    py: Python<'_>,
    url: &str,
    progress: Py<PyAny>,
    max_bytes: Option<u64>,
    max_age: Option<u64>,
    min_age: u64,
    dry_run: bool,
) -> PyResult<Py<PyAny>> {
    let objects = opened_existing(url)?;
    if objects.expires() {
        return Err(ConfigError::new_err(format!(
            "remote is \"{url}\": this store removes objects itself: Redis by remote_ttl, and by maxmemory with \
             maxmemory-policy allkeys-lru; Mooncake when its memory is full. `undercroft remote gc` is for directories and \
             object stores"
        )));
    }
    let limits = Limits {
        max_bytes,
        max_age: max_age.map(Duration::from_secs),
        min_age: Duration::from_secs(min_age),
        dry_run,
    };
    let mut raised = None;
    let report = py.detach(|| {
        let tell = |done, total| tell(&progress, &mut raised, &[done, total]);
        collect(&*objects, &limits, tell)
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let report = report.map_err(|error| failed(url, &error))?;
    Ok(to_python(py, &report)?.unbind())
}

/// The contents of a remote store, by namespace. Raises ConfigError, UndercroftError.
#[pyfunction]
pub(crate) fn remote_contents<'py>(py: Python<'py>, url: &str) -> PyResult<Bound<'py, PyAny>> {
    let objects = opened_existing(url)?;
    let found = py.detach(|| contents::contents(&*objects));
    to_python(py, &found.map_err(|error| failed(url, &error))?)
}

/// Findings on a remote store, as `undercroft doctor` has them. Raises ConfigError.
#[pyfunction]
pub(crate) fn remote_check<'py>(py: Python<'py>, url: &str) -> PyResult<Bound<'py, PyAny>> {
    let objects = opened(url)?;
    let found = py.detach(|| check::check(&*objects));
    to_python(py, &found)
}

/// Speeds of a remote store for objects of these sizes, with about `total` bytes of each. `progress(rates)` is called
/// after each. Ctrl-C ends it once the objects are removed. Raises ConfigError, UndercroftError.
#[pyfunction]
pub(crate) fn remote_measure(
    py: Python<'_>,
    url: &str,
    sizes: Vec<u64>,
    total: u64,
    progress: Py<PyAny>,
) -> PyResult<Py<PyAny>> {
    let objects = opened(url)?;
    let (stopped, mut raised) = (AtomicBool::new(false), None);
    let (found, interrupted) = py.detach(|| {
        thread::scope(|scope| {
            let tell = |rates: &_| tell(&progress, &mut raised, rates);
            let work = scope.spawn(|| measure(&objects, &sizes, total, &stopped, tell));
            let interrupted = until_finished(&work, &stopped);
            (work.join(), interrupted)
        })
    });
    if let Some(error) = interrupted.or(raised) {
        return Err(error);
    }
    let found = found.map_err(|_| UndercroftError::new_err("the measurement panicked"))?;
    let found = found.map_err(|error| failed(url, &error))?;
    Ok(to_python(py, &found)?.unbind())
}

/// Waits for a thread on Python's main thread. Only the main thread gets Ctrl-C, and then sets `stopped` for `work`.
fn until_finished<T>(work: &ScopedJoinHandle<'_, T>, stopped: &AtomicBool) -> Option<PyErr> {
    let mut interrupted = None;
    while !work.is_finished() {
        thread::sleep(SIGNALS);
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            stopped.store(true, Ordering::Relaxed);
            interrupted = Some(error);
        }
    }
    interrupted
}
