//! Python objects to and from the core's, as JSON: for functions that are called now and then.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Serialize;

/// The value as None, bool, int, float, str, list or dict.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    value: &impl Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let text =
        serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// The object's JSON.
pub(crate) fn to_json(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = value.py().import("json")?.call_method1("dumps", (value,))?;
    text.extract()
}
