//! An engine in another process: what the Python classes need of it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pyo3::prelude::*;
use undercroft_core::namespace::NamespaceSpec;
use undercroft_wire::{Client, ClientConfig, Link, LinkState, Resolve};

use crate::errors::{ConfigError, StoreError, UndercroftError};

/// How long registering waits for a server: it answers at once or is not there.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long it waits for the owner of a directory, which may still be opening it.
pub(crate) const OWNER_TIMEOUT: Duration = Duration::from_secs(10);

/// One session on an engine elsewhere.
pub(crate) struct Remote {
    resolve: std::sync::Mutex<Option<Resolve>>,
    deadline: Duration,
    spin: Duration,
    /// That a directory is in use: without its owner nobody can serve, and the start is refused.
    in_use: Option<String>,
    client: OnceLock<Arc<Client>>,
}

impl Remote {
    pub(crate) fn new(
        resolve: Resolve,
        deadline_ms: f64,
        spin_us: f64,
        in_use: Option<String>,
    ) -> Self {
        Self {
            resolve: std::sync::Mutex::new(Some(resolve)),
            deadline: Duration::from_secs_f64((deadline_ms / 1e3).clamp(1e-4, 3600.0)),
            spin: Duration::from_secs_f64((spin_us / 1e6).clamp(0.0, 1.0)),
            in_use,
            client: OnceLock::new(),
        }
    }

    /// Opens the session. If the server is not there it is opened when it comes.
    pub(crate) fn register(
        &self,
        py: Python<'_>,
        spec: NamespaceSpec,
        dropped_tokens: u32,
    ) -> PyResult<Arc<Client>> {
        spec.validate()
            .map_err(|error| ConfigError::new_err(error.to_string()))?;
        let resolve = self.resolve.lock().ok().and_then(|mut once| once.take());
        let resolve = resolve.ok_or_else(|| {
            UndercroftError::new_err("a client has one session; make another client for another")
        })?;
        let config = ClientConfig {
            spec,
            dropped_tokens,
            deadline: self.deadline,
            spin: self.spin,
        };
        let client = Arc::new(Client::start(config, resolve)?);
        let timeout = match self.in_use {
            Some(_) => OWNER_TIMEOUT,
            None => REGISTER_TIMEOUT,
        };
        let state = py.detach(|| client.wait_for_link(timeout));
        match state {
            LinkState::Refused(reason) => return Err(ConfigError::new_err(reason)),
            LinkState::Down(why) => {
                if let Some(in_use) = &self.in_use {
                    let message = format!(
                        "{in_use}. It could be shared, but its engine does not answer: {why}"
                    );
                    return Err(StoreError::new_err(message));
                }
            }
            _ => {}
        }
        let _ = self.client.set(Arc::clone(&client));
        Ok(client)
    }

    pub(crate) fn client(&self) -> Option<&Arc<Client>> {
        self.client.get()
    }

    pub(crate) fn link(&self) -> Option<Link> {
        self.client()?.link()
    }

    /// Whether there is a session: "up", "late", "down" or "refused", and why.
    pub(crate) fn state(&self) -> (&'static str, String) {
        let state = self.client().map(|client| client.state());
        match state {
            Some(LinkState::Up) => ("up", String::new()),
            Some(LinkState::Late) => ("late", "the server does not answer in time".to_owned()),
            Some(LinkState::Down(why)) => ("down", why),
            Some(LinkState::Refused(why)) => ("refused", why),
            None => ("down", "not registered yet".to_owned()),
        }
    }

    pub(crate) fn close(&self) {
        if let Some(client) = self.client() {
            client.close();
        }
    }
}
