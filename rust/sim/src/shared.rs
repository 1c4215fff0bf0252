//! The engine of one life: the world gives it time and IO, and sessions call it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use undercroft_driver::EngineAccess;
use undercroft_engine::Engine;
use undercroft_engine::work::Work;

/// Units of work that an entry of a simulated engine may do: its prompts have 24 hash blocks of at most three
/// groups, and its pages at most 64 slots. Making room and giving a page its records are most of it, for each of up to
/// three directories at once; a search for pages of other size classes looks at 500 nodes of each, or somewhat more.
pub(crate) const UNITS_MAX: u64 = 3_200 + 3 * 500;

/// An engine that the world and its sessions share.
#[derive(Debug)]
pub(crate) struct SharedEngine {
    engine: Mutex<Engine>,
    /// The entry with the most work.
    most: Mutex<Work>,
}

impl SharedEngine {
    pub(crate) fn new(engine: Engine) -> Arc<Self> {
        Arc::new(Self {
            engine: Mutex::new(engine),
            most: Mutex::default(),
        })
    }

    /// Enters the engine, whose work is bounded. A panic is not contained: the run reports it.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> R {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        Work::take();
        let result = work(&mut engine);
        engine.end_entry();
        let done = Work::take();
        let mut most = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        if done.units() > most.units() {
            *most = done;
        }
        result
    }

    /// Enters the engine without counting the work: for its start, and for a check of its invariants.
    pub(crate) fn uncounted<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(&mut self.engine.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The work of the entry with the most work.
    pub(crate) fn most_work(&self) -> Work {
        *self.most.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EngineAccess for SharedEngine {
    fn enter<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        Some(self.with(work))
    }

    fn read<R>(&self, work: impl FnOnce(&Engine) -> R) -> Option<R> {
        Some(self.with(|engine| work(engine)))
    }

    fn read_or_enter<R>(
        &self,
        known: impl FnOnce(&Engine) -> Option<R>,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        Some(self.with(|engine| known(engine).unwrap_or_else(|| work(engine))))
    }

    // The world does nothing while a session waits, so waiting would change nothing.
    fn wait_until(&self, _timeout: Duration, done: impl FnMut(&mut Engine) -> bool) -> bool {
        self.with(done)
    }

    fn give_way(&self) {}
}
