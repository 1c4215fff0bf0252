//! Catches panics, so that they do not reach the process that embeds the engine.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of `work`; `None` if it panics. The panic hook has then reported the panic.
///
/// Unwind-safe: `work` takes a lock, a panic poisons it, and no thread sees the protected state again. In vLLM's
/// scheduler a panic that is not caught would end the engine.
pub fn contained<R>(work: impl FnOnce() -> Option<R>) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok().flatten()
}
