//! The engine of the process that has the directories open, until this process takes them over.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{Session, Tokens};
use undercroft_io::disk::StoreError;
use undercroft_io::disk::open::check_unused;
use undercroft_ipc::{Resolve, SessionAddress, is_served};

use crate::arena_memory::check_memory;
use crate::config::HostConfig;
use crate::embedded::EmbeddedHost;
use crate::error::HostError;
use crate::remote::{OWNER_TIMEOUT, RemoteHost};
use crate::{Connection, EngineHost};

/// Pause between attempts to open directories whose owner neither ends nor serves yet.
const OWNER_PAUSE: Duration = Duration::from_millis(20);

/// The engine that this process has opened after the owner's end, while it is open. The client's thread owns it.
type TakenOver = Arc<OnceLock<Weak<EmbeddedHost>>>;

/// The engine of the process that has the directories open. When this owner ends, one of its clients opens the
/// directories, and stays a client: of its own engine.
#[derive(Debug)]
pub struct SharedHost {
    remote: RemoteHost,
    taken_over: TakenOver,
}

/// An engine of this process, or of another process of this user that has the directories open.
///
/// # Errors
/// The errors of [`EmbeddedHost::open`], except for directories in use by an engine that can be shared.
pub(crate) fn open(config: HostConfig) -> Result<Box<dyn EngineHost>, HostError> {
    match open_or_wait(&config) {
        Ok(host) => Ok(Box::new(host)),
        Err(HostError::Store(in_use @ StoreError::InUse { .. })) => {
            Ok(Box::new(SharedHost::new(config, &in_use)))
        }
        Err(error) => Err(error),
    }
}

/// Opens the directories. Waits for an owner that is ending, or that does not serve yet.
fn open_or_wait(config: &HostConfig) -> Result<EmbeddedHost, HostError> {
    let end = Instant::now() + OWNER_TIMEOUT;
    loop {
        let opened = EmbeddedHost::open(config);
        let Err(HostError::Store(StoreError::InUse { socket, .. })) = &opened else {
            return opened;
        };
        if socket.as_deref().is_some_and(is_served) || Instant::now() >= end {
            return opened;
        }
        sleep(OWNER_PAUSE);
    }
}

impl SharedHost {
    fn new(config: HostConfig, in_use: &StoreError) -> Self {
        let taken_over = TakenOver::default();
        let of_config = config.clone();
        let resolve = find_owner(config, Arc::clone(&taken_over));
        Self {
            remote: RemoteHost::new(&of_config, resolve, Some(in_use.to_string())),
            taken_over,
        }
    }

    /// This process's engine, after it has taken the directories over.
    fn own(&self) -> Option<Arc<EmbeddedHost>> {
        self.taken_over.get()?.upgrade()
    }
}

/// Finds the socket of the engine that has the directories: the owner's engine or, after the owner's end, an engine
/// that this function opens.
fn find_owner(config: HostConfig, taken_over: TakenOver) -> Resolve {
    let mut own: Option<Arc<EmbeddedHost>> = None;
    Box::new(move || {
        if let Some(own) = &own {
            return Ok(own.socket().clone());
        }
        if let Err(error) = check_memory(config.arena_bytes()) {
            // Without memory the directories need not be opened.
            return socket_of_owner(&config).ok_or_else(|| error.to_string());
        }
        match EmbeddedHost::open(&config) {
            Ok(host) => {
                let host = own.insert(Arc::new(host));
                let first = taken_over.set(Arc::downgrade(host));
                assert!(first.is_ok(), "an engine is opened once: `own` keeps it");
                Ok(host.socket().clone())
            }
            Err(HostError::Store(StoreError::InUse {
                socket: Some(socket),
                ..
            })) => Ok(socket),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// The socket of the engine that has one of the directories open.
fn socket_of_owner(config: &HostConfig) -> Option<PathBuf> {
    let mut disks = config.disks.iter();
    disks.find_map(|disk| match check_unused(&disk.path) {
        Err(StoreError::InUse { socket, .. }) => socket,
        _ => None,
    })
}

impl EngineHost for SharedHost {
    fn register(
        &self,
        namespace: NamespaceSpec,
        dropped_tokens: Tokens,
    ) -> Result<Arc<dyn Session>, HostError> {
        self.remote.register(namespace, dropped_tokens)
    }

    fn arena(&self) -> Option<SessionAddress> {
        self.remote.arena()
    }

    fn stats(&self) -> Value {
        let own = self.own().map(|own| own.stats());
        own.unwrap_or_else(|| self.remote.stats())
    }

    fn info(&self) -> Value {
        let own = self.own().map(|own| own.info());
        own.unwrap_or_else(|| self.remote.info())
    }

    fn connection(&self) -> Connection {
        self.remote.connection()
    }

    fn flush(&self, timeout: Duration) -> bool {
        self.own().is_none_or(|own| own.flush(timeout))
    }

    fn close(&self) {
        self.remote.close();
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn took_over(&self) -> bool {
        self.taken_over.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use undercroft_contract::namespace::GroupKind;

    use super::*;
    use crate::config::{DiskCapacity, DiskConfig};

    fn config(root: &Path) -> HostConfig {
        HostConfig {
            host_memory: 16 << 20,
            disks: vec![DiskConfig {
                path: root.join("disk"),
                capacity: DiskCapacity::Bytes(64 << 20),
            }],
            socket_dir: root.join("run"),
            share: true,
            server_timeout_ms: Some(30_000.0),
            ..HostConfig::default()
        }
    }

    fn register(host: &dyn EngineHost) -> Result<Arc<dyn Session>, HostError> {
        let namespace = NamespaceSpec::uniform("test", 16, &[(GroupKind::Full, 4096)]);
        host.register(namespace, Tokens(0))
    }

    fn arena_id(host: &dyn EngineHost) -> Option<u64> {
        host.arena().map(|address| address.arena_id)
    }

    #[test]
    fn a_second_engine_shares_the_first_and_takes_its_directories_over_when_it_ends() {
        let root = tempfile::tempdir().unwrap();
        let first = open(config(root.path())).unwrap();
        register(&*first).unwrap();
        assert!(!first.is_shared());
        let second = open(config(root.path())).unwrap();
        assert!(second.is_shared() && !second.took_over());
        assert_eq!(second.connection().state, "down");
        register(&*second).unwrap();
        assert_eq!(second.connection(), Connection::up());
        assert_eq!(arena_id(&*second), arena_id(&*first));
        first.close();
        let end = Instant::now() + Duration::from_secs(30);
        while !(second.took_over() && second.connection() == Connection::up()) {
            assert!(Instant::now() < end, "{:?}", second.connection());
            sleep(Duration::from_millis(5));
        }
        assert_ne!(arena_id(&*second), arena_id(&*first));
        assert_eq!(second.info()["disks"][0]["health"], "good");
        assert!(second.flush(Duration::from_secs(10)));
        second.close();
        let third = EmbeddedHost::open(&config(root.path())).unwrap();
        assert!(!third.is_shared(), "the directories were released");
    }

    #[test]
    fn a_takeover_without_memory_opens_no_directory_and_finds_the_owner() {
        let root = tempfile::tempdir().unwrap();
        let mut large = config(root.path());
        large.host_memory = 1 << 50;
        let mut resolve = find_owner(large, TakenOver::default());
        let error = resolve().unwrap_err();
        assert!(error.contains("host_memory 1024 TiB: only"), "{error}");
        assert!(!root.path().join("disk").exists());
        let owner = EmbeddedHost::open(&config(root.path())).unwrap();
        assert_eq!(resolve(), Ok(owner.socket().clone()));
    }

    #[test]
    fn a_directory_whose_owner_is_not_to_be_shared_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let _first = open(config(root.path())).unwrap();
        let mut alone = config(root.path());
        alone.share = false;
        let refused = crate::open(alone).unwrap_err();
        assert_eq!(refused.class(), crate::ErrorClass::Store);
        assert!(refused.to_string().contains("is in use by process"));
    }

    #[test]
    fn an_engine_of_another_process_takes_one_session() {
        let root = tempfile::tempdir().unwrap();
        let _first = open(config(root.path())).unwrap();
        let second = open(config(root.path())).unwrap();
        register(&*second).unwrap();
        let refused = register(&*second).unwrap_err();
        assert!(matches!(refused, HostError::SecondSession), "{refused}");
    }
}
