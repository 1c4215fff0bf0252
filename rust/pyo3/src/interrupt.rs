//! Long calls that Ctrl-C ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use serde::Serialize;

use crate::errors::UndercroftError;
use crate::json::to_python;

/// Interval of the checks for Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(50);
/// Longest wait for work that was stopped. A file system that hangs never ends it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The messages of the work for Python's `progress`.
pub(crate) type Tell<M> = dyn Fn(M);

/// The result of `work`, which runs on a thread of its own. Only Python's main thread gets Ctrl-C, so the caller waits
/// and calls `progress` with the work's messages. After Ctrl-C, or an exception of `progress`, the flag stops the work,
/// which has ten seconds to end. A second Ctrl-C ends the wait at once.
///
/// # Errors
/// The exception of `progress`, `KeyboardInterrupt`, or if the work panics.
pub(crate) fn interruptible<M, T>(
    py: Python<'_>,
    progress: &Py<PyAny>,
    work: impl FnOnce(&AtomicBool, &Tell<M>) -> T + Send + 'static,
) -> PyResult<T>
where
    M: Serialize + Send + 'static,
    T: Send + 'static,
{
    let stopped = Arc::new(AtomicBool::new(false));
    let (sender, mut messages) = channel();
    let of_work = Arc::clone(&stopped);
    let thread = thread::Builder::new()
        .name("undercroft-store".to_owned())
        // Nobody listens after a second Ctrl-C.
        .spawn(move || work(&of_work, &move |message| drop(sender.send(message))))?;
    let mut raised: Option<(PyErr, Instant)> = None;
    while let Some(message) = next(py, &mut messages) {
        let told = match message {
            Some(message) if raised.is_none() => {
                let message = to_python(py, &message)?;
                progress.call1(py, (message,)).map(drop)
            }
            _ => Ok(()),
        };
        if let Err(error) = told.and_then(|()| py.check_signals()) {
            if raised.is_some() {
                return Err(error);
            }
            stopped.store(true, Ordering::Relaxed);
            raised = Some((error, Instant::now()));
        }
        if let Some((error, _)) = raised.take_if(|(_, at)| at.elapsed() > PATIENCE) {
            return Err(error);
        }
    }
    let result = py.detach(|| thread.join());
    match raised {
        Some((error, _)) => Err(error),
        None => result.map_err(|_| UndercroftError::new_err("the work on the store panicked")),
    }
}

/// The next message, nothing yet, or `None` after the end of the work.
fn next<M: Send>(py: Python<'_>, messages: &mut Receiver<M>) -> Option<Option<M>> {
    match py.detach(move || messages.recv_timeout(SIGNALS)) {
        Ok(message) => Some(Some(message)),
        Err(RecvTimeoutError::Timeout) => Some(None),
        Err(RecvTimeoutError::Disconnected) => None,
    }
}
