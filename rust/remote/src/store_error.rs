//! Errors of stores, and their remedies.

use undercroft_contract::remote::RemoteError;

use crate::redact::redacted;

/// The error of an operation: its kind, and the store's own text for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStoreError {
    /// The kind.
    pub kind: RemoteError,
    /// The text from the store or the system; never a credential.
    pub detail: String,
    /// A remedy for this error; `None` for the remedy of the kind.
    pub advice: Option<&'static str>,
}

impl ObjectStoreError {
    /// An error with the store's own text, without credentials in its URLs.
    pub fn new(kind: RemoteError, detail: impl std::fmt::Display) -> Self {
        Self {
            kind,
            detail: redacted(&detail.to_string()),
            advice: None,
        }
    }

    /// The error with a remedy of its own, unless it has one.
    #[must_use]
    pub(crate) fn or_advice(self, advice: &'static str) -> Self {
        Self {
            advice: self.advice.or(Some(advice)),
            ..self
        }
    }

    /// The remedy.
    pub fn advice(&self) -> &'static str {
        self.advice.unwrap_or_else(|| advice(self.kind))
    }
}

impl From<RemoteError> for ObjectStoreError {
    fn from(kind: RemoteError) -> Self {
        Self::new(kind, kind)
    }
}

impl std::fmt::Display for ObjectStoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.detail.is_empty() || self.detail == self.kind.to_string() {
            write!(f, "{}", self.kind)
        } else {
            write!(f, "{} ({})", self.kind, self.detail)
        }
    }
}

impl std::error::Error for ObjectStoreError {}

/// The result of a call.
pub type Result<T> = std::result::Result<T, ObjectStoreError>;

/// The remedy of a kind of failure.
pub fn advice(kind: RemoteError) -> &'static str {
    match kind {
        RemoteError::Denied => {
            "check the credentials in the environment, and that they may read, write, list and delete below the prefix"
        }
        RemoteError::Full => "make room: run `undercroft remote gc`, or raise the store's limit",
        RemoteError::Throttled => {
            "the store serves too many requests; raise its limits, or set remote_write_rate"
        }
        RemoteError::Late => {
            "check the way to the store: its address, its port, firewalls, its load"
        }
        _ => "check the URL, and the endpoint and region in the environment",
    }
}

pub(crate) fn out_of_arena(range: undercroft_io::arena::OutOfBounds) -> ObjectStoreError {
    ObjectStoreError::new(RemoteError::Unreachable, range)
}
