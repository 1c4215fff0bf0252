//! The store of an engine whose environment is wrong: each call fails, with the reason and the remedy.

use undercroft_contract::remote::RemoteError;

use crate::body::ObjectBody;
use crate::location::{Location, LocationError, Scheme};
use crate::objects::{ListedObject, Objects};
use crate::receiver::Receiver;
use crate::store_error::{ObjectStoreError, Result};

/// The environment of a process does not change.
const ADVICE: &str = "correct this and start vLLM again; `undercroft doctor --remote URL` tells whether the store can be \
     used then";

/// A store that cannot be used before the next start.
#[derive(Debug)]
pub(crate) struct UnusableStore {
    name: &'static str,
    error: ObjectStoreError,
}

impl UnusableStore {
    pub(crate) fn new(location: &Location, error: &LocationError) -> Self {
        let (LocationError(text), of) = (error, location.refused(""));
        // The caller names the URL.
        let reason = text.strip_prefix(of.0.as_str()).unwrap_or(text);
        Self {
            name: match location.scheme {
                Scheme::Rediss => Scheme::Redis.name(),
                scheme => scheme.name(),
            },
            error: ObjectStoreError::new(RemoteError::Unreachable, reason).or_advice(ADVICE),
        }
    }

    fn fail<T>(&self) -> Result<T> {
        Err(self.error.clone())
    }
}

impl Objects for UnusableStore {
    fn name(&self) -> &'static str {
        self.name
    }

    fn parallel(&self) -> usize {
        1
    }

    fn probe(&self, _paths: &[String]) -> Result<u64> {
        self.fail()
    }

    fn get(&self, _path: &str, _receiver: &mut Receiver<'_>) -> Result<()> {
        self.fail()
    }

    fn put(&self, _path: &str, _body: &ObjectBody<'_>, _if_absent: bool) -> Result<bool> {
        self.fail()
    }

    fn delete(&self, _paths: &[String]) -> Result<()> {
        self.fail()
    }

    fn list(&self, _below: &str, _each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        self.fail()
    }

    fn delete_unchanged(&self, _entries: &[ListedObject]) -> Result<Vec<bool>> {
        self.fail()
    }

    fn clock_skew(&self) -> Result<Option<f64>> {
        self.fail()
    }
}
