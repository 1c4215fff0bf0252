//! An engine of this process, with the server that sends its arena to workers and its answers to other processes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{Session, SessionSpec, SessionToken, Tokens};
use undercroft_driver::{EmbeddedSession, EngineAccess};
use undercroft_io::arena::{Prefault, prefault_in_background};
use undercroft_ipc::{Served, Server, SessionAddress, StatsSource, new_token};

use crate::arena_memory::HostMemory;
use crate::config::HostConfig;
use crate::directories::Directories;
use crate::error::HostError;
use crate::random::random;
use crate::running::RunningEngine;
use crate::socket_path::default_socket_dir;
use crate::{Connection, EngineHost};

/// Longest wait of a close for writes in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// An engine of this process.
#[derive(Debug)]
pub struct EmbeddedHost {
    engine: Arc<RunningEngine>,
    socket: PathBuf,
    arena_id: u64,
    /// The share of this process's sessions.
    tenant_share: u16,
    /// The token of this process's sessions.
    token: SessionToken,
    /// `None` after the close.
    server: Mutex<Option<Server>>,
    /// Populates the arena's pages. Without it the first use of a page populates the page.
    _prefault: Option<Prefault>,
}

impl EmbeddedHost {
    /// Opens the directories and the arena, and starts the engine and its server.
    ///
    /// # Errors
    /// If a directory, the memory, the IO engine or the socket cannot be used.
    pub fn open(config: &HostConfig) -> Result<Self, HostError> {
        Self::open_in(config, &HostMemory::of_machine())
    }

    fn open_in(config: &HostConfig, memory: &HostMemory<'_>) -> Result<Self, HostError> {
        let mut of_engine = config.engine();
        of_engine.seed = random();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        of_engine.unix_at_zero_s = unix.unwrap_or_default().as_secs();
        config.remote_location()?;
        // The directories come before the memory: they may be in use.
        let directories = Directories::open(config)?;
        let arena = Arc::new(memory.arena(config.arena_bytes(), config.is_server())?);
        let io = (config.io_engine, config.io_depth());
        #[cfg(feature = "faults")]
        let slowed = config.inject_faults;
        #[cfg(not(feature = "faults"))]
        let slowed = false;
        let how = (None, slowed);
        let of_io = Arc::clone(&arena);
        let engine = RunningEngine::start_with(of_engine, directories, io, of_io, how)?;
        engine.attach_remote(config)?;
        let (engine, arena_id) = (Arc::new(engine), random());
        let token = new_token();
        let server = serve(config, &engine, arena_id, token)?;
        let socket = server.path().to_owned();
        engine.publish(&socket);
        Ok(Self {
            engine,
            socket,
            arena_id,
            tenant_share: config.tenant_share(),
            token,
            server: Mutex::new(Some(server)),
            _prefault: prefault_in_background(arena).ok(),
        })
    }

    /// The socket at which other processes share the engine.
    pub(crate) fn socket(&self) -> &PathBuf {
        &self.socket
    }
}

fn serve(
    config: &HostConfig,
    engine: &Arc<RunningEngine>,
    arena_id: u64,
    own_token: SessionToken,
) -> Result<Server, HostError> {
    let (of_info, of_stats) = (Arc::clone(engine), Arc::clone(engine));
    let options = serde_json::to_value(config).unwrap_or_default();
    let served = Served {
        driver: Arc::clone(engine.driver()),
        arena: Arc::clone(engine.arena()),
        arena_id,
        own_token,
        info: Box::new(move || {
            let mut info = of_info.info();
            // Other processes that use this engine compare these options with their own.
            info["options"] = options.clone();
            info
        }),
        stats: StatsSource::new(move || of_stats.stats()),
    };
    let default_dir = default_socket_dir();
    let (option, location) = config.socket_location(&default_dir);
    Server::start(location, served).map_err(|source| HostError::Socket { option, source })
}

impl EngineHost for EmbeddedHost {
    fn register(
        &self,
        namespace: NamespaceSpec,
        dropped_tokens: Tokens,
    ) -> Result<Arc<dyn Session>, HostError> {
        if let Some(remote) = self.engine.remote() {
            remote.describe(&namespace.description);
        }
        let driver = Arc::clone(self.engine.driver());
        let spec = SessionSpec {
            dropped_tokens,
            tenant_share: self.tenant_share,
            ..namespace.into()
        };
        let session = EmbeddedSession::open(driver, spec)?;
        Ok(Arc::new(session.with_token(self.token)))
    }

    fn arena(&self) -> Option<SessionAddress> {
        Some(SessionAddress {
            socket: self.socket.clone(),
            arena_id: self.arena_id,
            session: self.token,
        })
    }

    fn stats(&self) -> Value {
        self.engine.stats()
    }

    #[cfg(feature = "faults")]
    fn limit_reads(&self, bytes_per_s: Option<f64>) -> bool {
        self.engine.limit_reads(bytes_per_s)
    }

    fn info(&self) -> Value {
        self.engine.info()
    }

    fn connection(&self) -> Connection {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if server.as_ref().is_none_or(Server::is_alive) {
            return Connection::up();
        }
        let reason = "the server's thread has ended; its panic is in the log above".to_owned();
        Connection {
            state: "down",
            reason,
        }
    }

    fn flush(&self, timeout: Duration) -> bool {
        let driver = self.engine.driver();
        driver.wait_until(timeout, |engine| engine.is_quiet())
    }

    fn close(&self) {
        let server = self.server.lock();
        drop(server.unwrap_or_else(PoisonError::into_inner).take());
        self.engine.stop(CLOSE_TIMEOUT);
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn took_over(&self) -> bool {
        false
    }
}

impl Drop for EmbeddedHost {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use undercroft_io::arena::{Arena, ArenaError};

    use super::*;
    use crate::config::{DiskCapacity, DiskConfig};

    fn config(root: &Path) -> HostConfig {
        let disks = ["good", "bad"].map(|name| DiskConfig {
            path: root.join(name),
            capacity: DiskCapacity::Bytes(64 << 20),
        });
        HostConfig {
            host_memory: 16 << 20,
            disks: disks.into(),
            socket_dir: root.join("run"),
            ..HostConfig::default()
        }
    }

    /// The thread that tries the bad directory again must not keep the locks of the good ones.
    #[test]
    fn an_engine_that_could_not_start_leaves_its_directories_free() {
        let root = tempfile::tempdir().unwrap();
        drop(EmbeddedHost::open(&config(root.path())).unwrap());
        // Another superblock's checksum: the directory is tried again later.
        let superblock = root.path().join("bad/super");
        let mut damaged = std::fs::read(&superblock).unwrap();
        damaged[20] ^= 1;
        std::fs::write(&superblock, &damaged).unwrap();

        let mut without_socket = config(root.path());
        without_socket.socket_dir = root.path().join("file");
        std::fs::write(&without_socket.socket_dir, "").unwrap();
        let refused = EmbeddedHost::open(&without_socket).unwrap_err();
        assert!(matches!(refused, HostError::Socket { .. }), "{refused}");

        let host = EmbeddedHost::open(&config(root.path())).unwrap();
        assert_eq!(host.info()["disks"][0]["health"], "good");
        assert_eq!(host.info()["disks"][1]["health"], "unavailable");
    }

    #[test]
    fn only_a_server_waits_for_memory() {
        let root = tempfile::tempdir().unwrap();
        for is_server in [true, false] {
            let mut config = HostConfig {
                host_memory: 16 << 20,
                socket_dir: root.path().join("run"),
                ..HostConfig::default()
            };
            if is_server {
                config.socket = root.path().join("run/serve.sock");
            }
            let free = Cell::new(false);
            let memory = HostMemory {
                create: &|size| match free.get() {
                    true => Arena::create(size),
                    false => Err(ArenaError::Memory { size, available: 0 }),
                },
                total: Some(1 << 30),
                pause: &|_| free.set(true),
                tell: &|_| {},
            };
            let opened = EmbeddedHost::open_in(&config, &memory);
            assert_eq!(opened.is_ok(), is_server, "{opened:?}");
        }
    }
}
