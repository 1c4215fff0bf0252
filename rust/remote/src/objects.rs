//! A store of objects, behind calls that block. Each kind of store implements them.

use std::time::{Duration, SystemTime};

use crate::body::ObjectBody;
use crate::finding::Finding;
use crate::receiver::Receiver;
use crate::store_error::Result;

/// An object in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its path below the store's prefix.
    pub path: String,
    /// Its bytes.
    pub bytes: u64,
    /// Time at which the object was written or last renewed, by the store's clock.
    pub modified: SystemTime,
}

/// A store of objects. Calls block. A call without an answer ends with [`RemoteError::Late`](undercroft_contract::remote::RemoteError::Late), if the system can end the
/// call: a call to a file system that hangs cannot be ended.
///
/// Paths have lower-case letters, digits, `.`, `-` and `/`. The store adds its own prefix.
///
/// ```
/// use undercroft_remote::{Location, ObjectBody, Receiver, RemoteOptions, open};
///
/// let directory = tempfile::tempdir()?;
/// let location = Location::parse(&format!("file://{}", directory.path().display()))?;
/// let store = open(&location, RemoteOptions::default())?;
/// let paths = ["a/first".to_owned(), "a/second".to_owned()];
/// assert!(store.put(&paths[0], &ObjectBody::bytes(b"payloads"), true)?);
/// // One bit for each path: the first object exists.
/// assert_eq!(store.probe(&paths)?, 0b01);
/// // Two hosts may save the same blocks: the second keeps the object that is there.
/// assert!(!store.put(&paths[0], &ObjectBody::bytes(b"the same"), true)?);
/// let mut receiver = Receiver::bytes(64);
/// store.get(&paths[0], &mut receiver)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Objects: Send + Sync + std::fmt::Debug {
    /// `"file"`, `"s3"`, ...
    fn name(&self) -> &'static str;

    /// Most useful number of calls at a time.
    fn parallel(&self) -> usize;

    /// Checks whether the store answers and accepts the credentials. May take many seconds.
    ///
    /// # Errors
    /// If the store does not answer or refuses the credentials.
    fn greet(&self) -> Result<()> {
        self.probe(&["check/none".to_owned()]).map(drop)
    }

    /// Which objects exist: one bit for each path, at most 64.
    ///
    /// # Errors
    /// If the store does not answer for each path.
    fn probe(&self, paths: &[String]) -> Result<u64>;

    /// Passes an object's bytes to `receiver`, in order, until the receiver wants no more or the object ends.
    ///
    /// # Errors
    /// If there is no such object, the receiver refuses it, or the store fails.
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()>;

    /// Asks this host's system to drop the objects from its own memory, so that the next reads come from the store.
    fn uncache(&self, _paths: &[String]) {}

    /// Writes an object, which is never visible in part. Returns whether it was written: with `if_absent`, an existing
    /// object is kept, if the store supports this.
    ///
    /// # Errors
    /// If the object may not have been written.
    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool>;

    /// Removes objects. A missing object is no error.
    ///
    /// # Errors
    /// If an object may still exist.
    fn delete(&self, paths: &[String]) -> Result<()>;

    /// Calls `each` with the objects below a path, in no order, until it returns false.
    ///
    /// # Errors
    /// If the list is not complete.
    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()>;

    /// Removes the objects whose times have not changed since the list. An object that was written since then stays.
    /// Returns which objects this call has removed, in the order of `entries`. For two simultaneous calls, S3 reports
    /// an object as removed to both.
    ///
    /// # Errors
    /// If the store fails. Some objects may have been removed.
    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>>;

    /// Seconds by which the store's clock is ahead of this machine's clock; negative if it is behind. `None` if the
    /// store has no clock.
    ///
    /// # Errors
    /// If the store fails.
    fn clock_skew(&self) -> Result<Option<f64>>;

    /// Whether the store itself removes objects, by `remote_ttl` or its own policy. Else `undercroft remote gc` does.
    fn expires(&self) -> bool {
        false
    }

    /// Whether an object with this time of modification becomes new again when it is read.
    fn renews(&self, _modified: SystemTime) -> bool {
        false
    }

    /// Most bytes a second of old objects that the pool may put again after it has read them; 0 for no limit. `None`
    /// if the pool puts no object again: the store itself makes old objects new, or this host only reads.
    fn renew_rate(&self) -> Option<u64> {
        None
    }

    /// Why others on the network may read the requests and the blocks; `None` if they are encrypted or stay on this
    /// machine.
    fn exposure(&self) -> Option<String> {
        None
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
