//! A store of objects, behind calls that block. Each kind of store implements them.

use std::time::{Duration, SystemTime};

use undercroft_core::remote::RemoteError;

use crate::body::Body;
use crate::check::{Finding, advice};
use crate::receiver::Receiver;

/// Why a store cannot do something: the kind, and its own words for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// The kind.
    pub kind: RemoteError,
    /// The words of the store or the system; never a credential.
    pub detail: String,
    /// A remedy of its own; `None` if that of the kind will do.
    pub advice: Option<&'static str>,
}

impl StoreError {
    /// An error with the store's own words.
    pub fn new(kind: RemoteError, detail: impl std::fmt::Display) -> Self {
        Self {
            kind,
            detail: detail.to_string(),
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

impl From<RemoteError> for StoreError {
    fn from(kind: RemoteError) -> Self {
        Self::new(kind, kind)
    }
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.detail.is_empty() || self.detail == self.kind.to_string() {
            write!(f, "{}", self.kind)
        } else {
            write!(f, "{} ({})", self.kind, self.detail)
        }
    }
}

impl std::error::Error for StoreError {}

/// The result of a call.
pub type Result<T> = std::result::Result<T, StoreError>;

/// An object in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its path below the store's prefix.
    pub path: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it was written or last renewed, by the store's clock.
    pub modified: SystemTime,
}

/// A store of objects. Calls block; a call that gets no answer ends with [`RemoteError::Late`], where the system lets go
/// of it: a file system that hangs does not.
///
/// Paths are of lower-case letters, digits, `.`, `-` and `/`; the store puts its own prefix before them.
pub trait Objects: Send + Sync + std::fmt::Debug {
    /// `"file"`, `"s3"`, ...
    fn name(&self) -> &'static str;

    /// Calls that make sense at a time.
    fn parallel(&self) -> usize;

    /// Looks whether the store answers and accepts the credentials. May take many seconds.
    ///
    /// # Errors
    /// If not.
    fn greet(&self) -> Result<()> {
        self.probe(&["check/none".to_owned()]).map(drop)
    }

    /// Which objects exist: one bit for each path, at most 64.
    ///
    /// # Errors
    /// If the store does not say so for each.
    fn probe(&self, paths: &[String]) -> Result<u64>;

    /// Passes an object's bytes to `receiver`, in order, until the receiver has what it wants or they end.
    ///
    /// # Errors
    /// If there is no such object, the receiver refuses it, or the store fails.
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()>;

    /// Writes an object; it is never visible in part. Returns whether it was written: with `if_absent`, an object that is
    /// there already is kept, where the store can tell.
    ///
    /// # Errors
    /// If the object is not there as asked.
    fn put(&self, path: &str, body: &Body<'_>, if_absent: bool) -> Result<bool>;

    /// Removes objects; one that is not there is no error.
    ///
    /// # Errors
    /// If one may still be there.
    fn delete(&self, paths: &[String]) -> Result<()>;

    /// Calls `each` with the objects below a path, in no order, until it returns false.
    ///
    /// # Errors
    /// If the list is not complete.
    fn list(&self, below: &str, each: &mut dyn FnMut(Entry) -> bool) -> Result<()>;

    /// Removes the objects that are still as old as the list said; an object that was written since stays. Returns
    /// which objects this call has removed, in the order of `entries`. S3 names an object in the answers of both of two
    /// calls at once.
    ///
    /// # Errors
    /// If the store fails; some may be removed.
    fn delete_unchanged(&self, entries: &[Entry]) -> Result<Vec<bool>>;

    /// The difference of the store's clock and this machine's: positive if the store's is ahead. `None` if the store has
    /// no clock to ask for.
    ///
    /// # Errors
    /// If the store fails.
    fn clock_skew(&self) -> Result<Option<f64>>;

    /// Who removes objects: the store itself, by `remote_ttl` or its own policy, or `undercroft remote gc`.
    fn expires(&self) -> bool {
        false
    }

    /// Whether an object that was modified then is put again when it is read.
    fn renews(&self, _modified: SystemTime) -> bool {
        false
    }

    /// Findings on the store's settings.
    fn advice(&self) -> Vec<Finding> {
        Vec::new()
    }

    /// Removes the files of writers that ended while they wrote, if these are older than `age`.
    ///
    /// # Errors
    /// If the store fails.
    fn remove_leftovers(&self, _age: Duration) -> Result<u64> {
        Ok(0)
    }
}
