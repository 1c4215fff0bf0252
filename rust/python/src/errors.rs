//! The exceptions of `undercroft._core`.

use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(
    undercroft._core,
    UndercroftError,
    PyException,
    "Base of every error the core raises; the message names what was found and what to do."
);
create_exception!(
    undercroft._core,
    ConfigError,
    UndercroftError,
    "A configuration value is impossible on this machine (too large, not a directory, ...)."
);
create_exception!(
    undercroft._core,
    StoreError,
    UndercroftError,
    "A disk directory is foreign, damaged, of another format version, or in use."
);
