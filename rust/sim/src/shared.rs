//! The engine of one life: the world gives it time and IO, and sessions call it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use undercroft_core::driver::EngineAccess;
use undercroft_core::engine::Engine;

/// An engine that the world and its sessions share.
#[derive(Debug)]
pub(crate) struct SharedEngine(Mutex<Engine>);

impl SharedEngine {
    pub(crate) fn new(engine: Engine) -> Arc<Self> {
        Arc::new(Self(Mutex::new(engine)))
    }

    /// Enters the engine. A panic is not contained: the run reports it.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl EngineAccess for SharedEngine {
    fn enter<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        Some(self.with(work))
    }

    fn read<R>(&self, work: impl FnOnce(&Engine) -> R) -> Option<R> {
        Some(self.with(|engine| work(engine)))
    }

    // The world does nothing while a session waits, so waiting would change nothing.
    fn wait_until(&self, _timeout: Duration, done: impl FnMut(&mut Engine) -> bool) -> bool {
        self.with(done)
    }
}
