//! An engine on threads: one IO thread, and the threads of the callers.

mod driver;
mod embedded;
mod ends;

pub use driver::{Clock, Driver, END_GRACE, EngineAccess};
pub use embedded::EmbeddedSession;
