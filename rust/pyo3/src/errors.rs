//! Errors of the core as the exceptions of `undercroft.errors`.

use pyo3::prelude::*;
use undercroft_host::{ErrorClass, HostError};

pyo3::import_exception!(undercroft.errors, UndercroftError);
pyo3::import_exception!(undercroft.errors, ConfigError);
pyo3::import_exception!(undercroft.errors, StoreError);
pyo3::import_exception!(undercroft.errors, ServerError);

/// An exception to raise. `?` converts the core's errors to it.
pub(crate) struct Raised(PyErr);

/// The return type of the binding's functions.
pub(crate) type Result<T> = std::result::Result<T, Raised>;

impl From<HostError> for Raised {
    fn from(error: HostError) -> Self {
        let message = error.to_string();
        Self(match error.class() {
            ErrorClass::Config => ConfigError::new_err(message),
            ErrorClass::Store => StoreError::new_err(message),
            ErrorClass::Server => ServerError::new_err(message),
            ErrorClass::Engine => UndercroftError::new_err(message),
        })
    }
}

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        raised.0
    }
}
