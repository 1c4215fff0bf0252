//! The engine of another process, through one session on its socket.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{Session, Tokens};
use undercroft_ipc::{Client, ClientConfig, ConnectionState, Resolve, SessionAddress};

use crate::config::HostConfig;
use crate::error::HostError;
use crate::{Connection, EngineHost};

/// Longest wait of a registration for a server: a server that runs answers at once.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest wait for a directory that is in use, and longest wait of a registration for its owner. Both together are longer than
/// the owner waits for another directory, which may hang.
pub(crate) const OWNER_TIMEOUT: Duration = Duration::from_secs(20);

/// The engine of another process. It does nothing before [`EngineHost::register`].
pub struct RemoteHost {
    /// `None` after the client has taken it.
    resolve: Mutex<Option<Resolve>>,
    tenant_share: u16,
    timeout: Duration,
    spin: Duration,
    /// The error that a directory is in use. The start fails with this error if the directory's owner does not answer.
    in_use: Option<String>,
    client: OnceLock<Arc<Client>>,
}

impl std::fmt::Debug for RemoteHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteHost")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl RemoteHost {
    /// The engine of the server at `socket`. If the server does not run yet, sessions are opened when it runs.
    pub(crate) fn of_server(config: &HostConfig, socket: PathBuf) -> Self {
        Self::new(config, Box::new(move || Ok(socket.clone())), None)
    }

    /// The engine at the socket that `resolve` finds. `in_use`: the error about a directory whose owner this process
    /// needs.
    pub(crate) fn new(config: &HostConfig, resolve: Resolve, in_use: Option<String>) -> Self {
        Self {
            resolve: Mutex::new(Some(resolve)),
            tenant_share: config.tenant_share(),
            timeout: config.server_timeout(),
            spin: config.lookup_spin(),
            in_use,
            client: OnceLock::new(),
        }
    }

    fn start(
        &self,
        namespace: NamespaceSpec,
        dropped_tokens: Tokens,
    ) -> Result<&Arc<Client>, HostError> {
        let resolve = self.resolve.lock();
        let resolve = resolve.unwrap_or_else(PoisonError::into_inner).take();
        let config = ClientConfig {
            namespace,
            dropped_tokens,
            tenant_share: self.tenant_share,
            deadline: self.timeout,
            spin: self.spin,
        };
        let client = Client::start(config, resolve.ok_or(HostError::SecondSession)?);
        let client = Arc::new(client.map_err(HostError::Thread)?);
        Ok(self.client.get_or_init(|| client))
    }

    /// A report of the server, which is JSON; an empty object before the first report.
    fn report(&self, of: impl FnOnce(&Client) -> String) -> Value {
        let json = self.client.get().map(|client| of(client));
        let report = json.and_then(|json| serde_json::from_str(&json).ok());
        report.unwrap_or_else(|| json!({}))
    }
}

impl EngineHost for RemoteHost {
    fn register(
        &self,
        namespace: NamespaceSpec,
        dropped_tokens: Tokens,
    ) -> Result<Arc<dyn Session>, HostError> {
        namespace.validate()?;
        let client = self.start(namespace, dropped_tokens)?;
        let timeout = match self.in_use {
            Some(_) => OWNER_TIMEOUT,
            None => REGISTER_TIMEOUT,
        };
        match (client.wait_for_connection(timeout), &self.in_use) {
            (ConnectionState::Refused(reason), _) => Err(HostError::Refused(reason)),
            (ConnectionState::Down(reason), Some(in_use)) => Err(HostError::Owner {
                in_use: in_use.clone(),
                reason,
            }),
            _ => Ok(Arc::clone(client) as Arc<dyn Session>),
        }
    }

    fn arena(&self) -> Option<SessionAddress> {
        self.client.get()?.address()
    }

    fn stats(&self) -> Value {
        self.report(|client| client.reports().1)
    }

    fn info(&self) -> Value {
        self.report(|client| client.reports().0)
    }

    fn connection(&self) -> Connection {
        let state = self.client.get().map(|client| client.connection());
        let (state, reason) = match state {
            Some(ConnectionState::Up) => return Connection::up(),
            Some(ConnectionState::Late) => {
                ("late", "the server does not answer in time".to_owned())
            }
            Some(ConnectionState::Down(why)) => ("down", why),
            Some(ConnectionState::Refused(why)) => ("refused", why),
            None => ("down", "not registered yet".to_owned()),
        };
        Connection { state, reason }
    }

    fn flush(&self, _timeout: Duration) -> bool {
        true
    }

    fn close(&self) {
        if let Some(client) = self.client.get() {
            client.close();
        }
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn took_over(&self) -> bool {
        false
    }
}
