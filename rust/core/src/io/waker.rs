//! Ending another thread's wait.

use std::fmt::Debug;
use std::sync::Arc;

/// What an IO engine provides so that its `wait` can be ended from other threads.
pub trait Wake: Send + Sync + Debug {
    /// Ends the present `wait`, or the next one if none is going on.
    fn wake(&self);
}

/// Ends the `wait` of the engine it came from. Cheap to clone; harmless after the engine is gone.
#[derive(Clone, Debug)]
pub struct Waker(Arc<dyn Wake>);

impl Waker {
    /// A waker over an engine's own means.
    pub fn new(wake: Arc<dyn Wake>) -> Self {
        Self(wake)
    }

    /// Ends the present `wait`, or the next one if none is going on.
    pub fn wake(&self) {
        self.0.wake();
    }
}
