//! `undercroft._core`: the core for Python. It converts Python's options and calls to the core's, the core's answers to
//! classes, and its errors to exceptions.

mod arena;
mod batches;
mod copier;
mod engine;
mod errors;
mod hashes;
mod inspect;
mod interrupt;
mod json;
mod memory;
mod remote;
mod replay;
mod resolve;
mod session;
mod values;

/// The Rust core.
#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::arena::PyArena;
    #[pymodule_export]
    use crate::batches::{PyBlockPages, PyBlockPieces, PyCopyBatches, PyStagedCopies};
    #[pymodule_export]
    use crate::copier::{PyBlockPlaces, PyCopier};
    #[pymodule_export]
    use crate::engine::{
        PyEngine, default_server_socket, operate, server_status, take_log, wait_log,
    };
    #[pymodule_export]
    use crate::inspect::{
        descriptions, drop_namespace, examine, export_namespace, import_namespace,
        inspect_directory, verify,
    };
    #[pymodule_export]
    use crate::memory::{available_memory, limiting_group, probe_io_uring, slots_in};
    #[pymodule_export]
    use crate::remote::{remote_check, remote_contents, remote_examine, remote_gc, remote_measure};
    #[pymodule_export]
    use crate::replay::{PyFleet, PyReplay, reference_hits};
    #[pymodule_export]
    use crate::resolve::resolve;
    #[pymodule_export]
    use crate::session::PySession;
    #[pymodule_export]
    use crate::values::{PyArenaAddress, PyExtent, PyLoad, PyLookup, PySaveGrant};

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name Python programs look for")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let errors = module.py().import("undercroft.errors")?;
        for name in [
            "UndercroftError",
            "ConfigError",
            "StoreError",
            "ServerError",
        ] {
            module.add(name, errors.getattr(name)?)?;
        }
        let python = module.py().import("sys")?.getattr("executable")?;
        if let Some(path) = python.extract::<Option<std::path::PathBuf>>()? {
            undercroft_remote::set_python(path);
        }
        module.add("__build__", crate::build())
    }
}

/// Profile, platform and commit of this build, for reports of bugs. The commit is known if the build sets
/// `UNDERCROFT_COMMIT`. The builds of releases set it.
fn build() -> String {
    let profile = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    let commit = option_env!("UNDERCROFT_COMMIT").unwrap_or("unknown");
    format!("{profile}, {arch}-{os}, commit {commit}")
}
