//! The remote store of an engine of this process.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::remote::RemoteWrite;
use undercroft_driver::{Driver, EngineAccess};
use undercroft_io::arena::Arena;
use undercroft_remote::{LastResult, Objects, RequestPool, StoreHealth, describe};

use crate::config::HostConfig;
use crate::error::HostError;

/// Longest wait of a start until the engine has its store. This usually takes microseconds.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// The remote store, for reports. The engine's IO thread carries out the operations.
#[derive(Debug)]
pub(crate) struct RemoteTier {
    url: String,
    objects: Arc<dyn Objects>,
    last: LastResult,
    is_written: bool,
}

impl RemoteTier {
    /// Attaches the store of the options to the engine. The engine itself retries a store that cannot be reached now.
    ///
    /// # Errors
    /// If the options or the key file cannot be used, or this build does not support the kind of store.
    pub(crate) fn start(
        config: &HostConfig,
        driver: &Driver,
        arena: &Arc<Arena>,
    ) -> Result<Option<Self>, HostError> {
        let Some(location) = config.remote_location()? else {
            return Ok(None);
        };
        let objects = undercroft_remote::open_for_engine(&location, config.remote_options())
            .map_err(|error| HostError::Option(error.to_string()))?;
        let (of_pool, arena) = (Arc::clone(&objects), Arc::clone(arena));
        let pool = RequestPool::start_with(of_pool, arena, driver.waker(), config.cipher()?);
        let pool = pool.map_err(HostError::Thread)?;
        let last = pool.last_result();
        driver.attach_remote(Box::new(pool));
        // Otherwise the first lookup could miss because the IO thread has not attached the store yet.
        driver.wait_until(ATTACH_TIMEOUT, |engine| engine.has_remote());
        Ok(Some(Self {
            url: location.to_string(),
            objects,
            last,
            is_written: config.remote_write != RemoteWrite::None,
        }))
    }

    /// The report: `health` is "unknown" until the store has answered or failed.
    pub(crate) fn info(&self) -> Value {
        let (health, fault, remedy) = match self.last.get() {
            StoreHealth::Unknown => ("unknown", None, ""),
            StoreHealth::Good => ("good", None, ""),
            StoreHealth::Failed(error) => ("failed", Some(error.to_string()), error.advice()),
        };
        json!({
            "url": self.url,
            "kind": self.objects.name(),
            "health": health,
            "fault": fault,
            "advice": remedy,
            "exposure": self.objects.exposure(),
        })
    }

    /// Whether the last operation failed.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(self.last.get(), StoreHealth::Failed(_))
    }

    /// Writes the description of a namespace to the store, for people. Does not wait for the write.
    pub(crate) fn describe(&self, description: &str) {
        if !self.is_written {
            return;
        }
        let (objects, description) = (Arc::clone(&self.objects), description.to_owned());
        let work = move || {
            let digest = NamespaceDigest::of(&description);
            // Without the description `undercroft inspect` shows the digest alone.
            let _ = describe(&*objects, &digest, &description);
        };
        // If the thread cannot be started, only the description is missing.
        let _ = std::thread::Builder::new()
            .name("undercroft-about".to_owned())
            .spawn(work);
    }
}

#[cfg(test)]
mod tests;
