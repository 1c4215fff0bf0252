//! `undercroft._core`: the thin Python binding of the core.

mod arena;
mod bench;
mod client;
mod copier;
mod engine;
mod errors;
mod hashes;
mod inspect;
mod json;
mod opened;
mod remote;
mod replay;
mod resolve;
mod session;

/// The Rust core.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::arena::PyArena;
    #[pymodule_export]
    use crate::bench::{bench_disk, bench_recover};
    #[pymodule_export]
    use crate::client::PyClient;
    #[pymodule_export]
    use crate::copier::PyCopier;
    #[pymodule_export]
    use crate::engine::{PyEngine, status};
    #[pymodule_export]
    use crate::errors::{ConfigError, StoreError, UndercroftError};
    #[pymodule_export]
    use crate::inspect::{drop_namespace, inspect, verify};
    #[pymodule_export]
    use crate::replay::bench_replay;
    #[pymodule_export]
    use crate::resolve::resolve;
    #[pymodule_export]
    use crate::session::PySession;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name Python programs look for")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
