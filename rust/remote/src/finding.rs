//! What a check of a store has found.

use serde::Serialize;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// There is no problem.
    Ok,
    /// The finding costs speed or a feature.
    Warn,
    /// The store cannot be used.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its subject.
    pub name: &'static str,
    /// The result.
    pub status: Status,
    /// The finding, for people.
    pub found: String,
    /// The remedy; empty if there is nothing to do.
    pub advice: String,
}

impl Finding {
    pub(crate) fn new(
        name: &'static str,
        status: Status,
        found: impl Into<String>,
        advice: &str,
    ) -> Self {
        let (found, advice) = (found.into(), advice.to_owned());
        Self {
            name,
            status,
            found,
            advice,
        }
    }
}
