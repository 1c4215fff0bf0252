//! Panics end here, not in the process that embeds us.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of `work`; `None` if it panics, which the panic hook has reported then.
///
/// Unwind-safe: `work` takes a lock, a panic poisons it, and no thread sees the protected state again. In vLLM's
/// scheduler a panic that is not caught would end the engine.
pub fn contained<R>(work: impl FnOnce() -> Option<R>) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok().flatten()
}
