//! An engine on threads: one IO thread, and the threads of the callers.

mod driver;
mod embedded;

pub use driver::{Clock, Driver, EngineAccess};
pub use embedded::EmbeddedSession;
