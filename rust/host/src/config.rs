//! The parameters of an engine: the options of `undercroft.config` that the engine uses, by the same names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use undercroft_cipher::{AesGcm, Keys};
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::remote::{RemoteConfig, RemoteWrite};
use undercroft_contract::tier::TENANT_SHARE_WHOLE;
use undercroft_engine::EngineConfig;
use undercroft_io::IoEngineChoice;
use undercroft_io::arena::ARENA_ALIGN;
use undercroft_io::disk::open::OnOtherVersion;
use undercroft_ipc::SocketLocation;
use undercroft_remote::Location;

use crate::error::HostError;

/// The prefix of a `server` address.
const UNIX: &str = "unix://";

/// One device of the disk tier.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Its directory.
    pub path: PathBuf,
    /// Most bytes of the directory's files together.
    pub capacity: DiskCapacity,
}

/// A size of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum DiskCapacity {
    /// In bytes.
    Bytes(u64),
    /// A part of the space that is free on the filesystem or that the directory uses already.
    Share {
        /// Above 0, at most 1.
        share: f64,
    },
}

/// The treatment of a directory that cannot be opened although its options are right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDiskError {
    /// The engine starts without the directory, and tries to open it again later.
    #[default]
    Degrade,
    /// The engine does not start.
    Refuse,
}

/// Which blocks are written to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskAdmission {
    /// Every block.
    #[default]
    All,
    /// Blocks from their second use on.
    SecondTouch,
}

/// How to open an engine. Sizes are in bytes.
///
/// ```
/// use undercroft_host::HostConfig;
///
/// let config = HostConfig::from_json(r#"{"host_memory": 8388608}"#)?;
/// assert_eq!(config.host_memory, 8 << 20);
/// // A misspelled option is refused, not ignored.
/// let refused = HostConfig::from_json(r#"{"host_memmory": 8388608}"#).unwrap_err();
/// assert!(refused.to_string().contains("host_memmory"), "{refused}");
/// # Ok::<(), undercroft_host::HostError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostConfig {
    /// `unix:///path` of a running server whose engine is used; empty for an engine of this process.
    pub server: String,
    /// Size of the arena, rounded down to whole pages.
    pub host_memory: u64,
    /// Devices of the disk tier.
    pub disks: Vec<DiskConfig>,
    /// The treatment of a directory that cannot be opened although its options are right.
    pub on_disk_error: OnDiskError,
    /// The treatment of a store of another format version.
    pub disk_on_other_version: OnOtherVersion,
    /// How disks are read and written.
    pub io_engine: IoEngineChoice,
    /// Reads in flight on each disk, and writes in flight on each disk; by default 32.
    pub io_depth: Option<usize>,
    /// The share of each tier that the blocks of this process's sessions keep when other namespaces need room, 0 to 1.
    pub tenant_share: f64,
    /// Directory of the engine's socket; empty for [`crate::default_socket_dir`].
    pub socket_dir: PathBuf,
    /// Path of the engine's socket; empty for a path of its own in `socket_dir`.
    pub socket: PathBuf,
    /// Most bytes of the arena for reads from disk in flight; by default half of the arena.
    pub promotion_memory: Option<u64>,
    /// Most bytes of the arena for pinned payloads; by default three tenths of the arena.
    pub pin_memory: Option<u64>,
    /// Least tokens of a load; a smaller gain is no hit. By default the planner decides.
    pub min_load_tokens: Option<u32>,
    /// Longest planned wait without progress, as a part of the time of computing; by default 0.25.
    pub load_margin: Option<f64>,
    /// Which blocks are written to disk.
    pub disk_admission: DiskAdmission,
    /// Bytes a second that may be written to disk; 0 is unlimited.
    pub disk_write_rate: u64,
    /// Seconds after which blocks that no request has used are evicted from disk; 0 if they stay.
    pub disk_ttl: u64,
    /// File with the keys for the encryption of payloads on disk and in the remote store; empty for no encryption.
    pub key_file: PathBuf,
    /// URL of the remote store; empty for none.
    pub remote: String,
    /// Least bytes of an object in the remote store; by default 16 MiB.
    pub remote_object: Option<u64>,
    /// Which blocks are written to the remote store.
    pub remote_write: RemoteWrite,
    /// Bytes a second that may be written to the remote store; by default 500,000,000, and 0 is unlimited.
    pub remote_write_rate: Option<u64>,
    /// Seconds for which an object is kept after its last use; by default three days.
    pub remote_ttl: Option<u64>,
    /// Whether a remote store's directory and its objects may belong to other users.
    pub remote_any_owner: bool,
    /// Compare the checksums of blocks in host memory before each hit.
    pub verify_host: bool,
    /// For benchmarks: [`crate::EngineHost::limit_reads`] can make the disks slow, or make them hang.
    #[cfg(feature = "faults")]
    pub inject_faults: bool,
    /// If another engine of this user has the directories open, use that engine, and take the directories over
    /// when it ends.
    pub share: bool,
    /// Milliseconds without a reply after which a server is not asked until it replies; by default 5.
    pub server_timeout_ms: Option<f64>,
    /// Longest wait of a lookup for a server's reply, in microseconds; by default 200.
    pub lookup_spin_us: Option<f64>,
}

impl HostConfig {
    /// Reads the options from a JSON object.
    ///
    /// # Errors
    /// Names the option that is unknown or has an impossible value, and the allowed values.
    pub fn from_json(json: &str) -> Result<Self, HostError> {
        let mut values = serde_json::Deserializer::from_str(json);
        let config = serde_path_to_error::deserialize(&mut values).map_err(|error| {
            let text = error.inner().to_string();
            // The message never shows the JSON.
            let reason = text.split(" at line ").next().unwrap_or_default();
            match error.path().to_string().as_str() {
                "." => HostError::Option(reason.to_owned()),
                path => HostError::Option(format!("{path}: {reason}")),
            }
        })?;
        // Options behind the object would be ignored.
        let end = values.end();
        end.map_err(|_| HostError::Option("the options are more than one JSON object".to_owned()))?;
        Ok(config)
    }

    /// The socket of the configured server; `None` for an engine of this process.
    pub(crate) fn server_socket(&self) -> Result<Option<PathBuf>, HostError> {
        if self.server.is_empty() {
            return Ok(None);
        }
        match self.server.strip_prefix(UNIX) {
            Some(path) if path.starts_with('/') => Ok(Some(path.into())),
            _ => Err(HostError::Option(format!(
                "server is {:?}; allowed: \"unix:///path\" of a running `undercroft serve`",
                self.server
            ))),
        }
    }

    /// The socket of the engine's own server, and the option that determines it.
    pub(crate) fn socket_location<'a>(
        &'a self,
        default_dir: &'a Path,
    ) -> (&'static str, SocketLocation<'a>) {
        if self.is_server() {
            ("socket", SocketLocation::At(&self.socket))
        } else if self.socket_dir != Path::new("") {
            ("socket_dir", SocketLocation::In(&self.socket_dir))
        } else {
            ("socket_dir", SocketLocation::In(default_dir))
        }
    }

    /// Whether the engine is the engine of `undercroft serve`, which alone chooses the path of its socket.
    pub(crate) fn is_server(&self) -> bool {
        self.socket != Path::new("")
    }

    /// The cipher with the keys of the key file; `None` without a key file.
    pub(crate) fn cipher(&self) -> Result<Option<Arc<dyn PayloadCipher>>, HostError> {
        if self.key_file == Path::new("") {
            return Ok(None);
        }
        if self.io_engine == IoEngineChoice::IoUring {
            return Err(HostError::Option(
                "io_engine is \"io_uring\", with which undercroft does not encrypt; with key_file, allowed are \"auto\" and \
                 \"thread_pool\""
                    .to_owned(),
            ));
        }
        Ok(Some(Arc::new(AesGcm::new(Keys::read(&self.key_file)?))))
    }

    /// The location of the remote store; `None` without a remote store.
    pub(crate) fn remote_location(&self) -> Result<Option<Location>, HostError> {
        if self.remote.is_empty() {
            return Ok(None);
        }
        let location = Location::parse(&self.remote);
        Ok(Some(
            location.map_err(|error| HostError::Option(error.to_string()))?,
        ))
    }

    /// The settings of the remote store itself.
    pub(crate) fn remote_options(&self) -> undercroft_remote::RemoteOptions {
        let defaults = undercroft_remote::RemoteOptions::default();
        undercroft_remote::RemoteOptions {
            ttl: self.remote_ttl.map_or(defaults.ttl, Duration::from_secs),
            renew_rate: match self.remote_write {
                RemoteWrite::None => None,
                _ => self.remote_write_rate.or(defaults.renew_rate),
            },
            any_owner: self.remote_any_owner,
        }
    }

    /// The engine's part of the options of the remote store.
    fn remote(&self) -> Option<RemoteConfig> {
        let defaults = RemoteConfig::default();
        (!self.remote.is_empty()).then(|| RemoteConfig {
            object_bytes: self.remote_object.unwrap_or(defaults.object_bytes),
            write: self.remote_write,
            write_rate: self.remote_write_rate.unwrap_or(defaults.write_rate),
            ..defaults
        })
    }

    /// Size of the arena: whole pages.
    pub(crate) fn arena_bytes(&self) -> u64 {
        self.host_memory / ARENA_ALIGN * ARENA_ALIGN
    }

    /// The engine's part of the options.
    pub(crate) fn engine(&self) -> EngineConfig {
        let defaults = EngineConfig::new(self.arena_bytes());
        EngineConfig {
            // Tests of tiers turn these over with prompts that nobody asks for again, which the learned order does not admit.
            #[cfg(feature = "faults")]
            policy: match std::env::var_os("UNDERCROFT_LEAST_RECENT") {
                Some(_) => undercroft_engine::policy::PolicyKind::Lru,
                None => defaults.policy,
            },
            promotion_bytes: self.promotion_memory.unwrap_or(defaults.promotion_bytes),
            pin_bytes: self.pin_memory.unwrap_or(defaults.pin_bytes),
            min_load_tokens: self.min_load_tokens,
            load_margin: self.load_margin.unwrap_or(defaults.load_margin),
            second_touch: self.disk_admission == DiskAdmission::SecondTouch,
            write_rate: self.disk_write_rate,
            disk_ttl_s: self.disk_ttl,
            verify_host: self.verify_host,
            remote: self.remote(),
            ..defaults
        }
    }

    /// See [`HostConfig::io_depth`].
    pub(crate) fn io_depth(&self) -> usize {
        self.io_depth.unwrap_or(32)
    }

    /// See [`HostConfig::server_timeout_ms`].
    pub(crate) fn server_timeout(&self) -> Duration {
        let ms = self.server_timeout_ms.unwrap_or(5.0);
        Duration::from_secs_f64((ms / 1e3).clamp(1e-4, 3600.0))
    }

    /// See [`SessionSpec::tenant_share`](undercroft_contract::session::SessionSpec::tenant_share).
    pub(crate) fn tenant_share(&self) -> u16 {
        (self.tenant_share * f64::from(TENANT_SHARE_WHOLE)).ceil() as u16
    }

    /// See [`HostConfig::lookup_spin_us`].
    pub(crate) fn lookup_spin(&self) -> Duration {
        let us = self.lookup_spin_us.unwrap_or(200.0);
        Duration::from_secs_f64((us / 1e6).clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        HostConfig::from_json(json).unwrap_err().to_string()
    }

    #[test]
    fn options_have_their_names_and_the_others_their_defaults() {
        let json = r#"{"host_memory": 4097, "disks": [{"path": "/d", "capacity": 5}], "io_engine": "thread_pool",
            "disk_admission": "second_touch", "promotion_memory": null,
            "verify_host": true}"#;
        let config = HostConfig::from_json(json).unwrap();
        let expected = HostConfig {
            host_memory: 4097,
            disks: vec![DiskConfig {
                path: "/d".into(),
                capacity: DiskCapacity::Bytes(5),
            }],
            io_engine: IoEngineChoice::ThreadPool,
            disk_admission: DiskAdmission::SecondTouch,
            verify_host: true,
            ..HostConfig::default()
        };
        assert_eq!(config, expected);
        assert_eq!(config.engine().host_bytes, 4096);
        assert_eq!(config.engine().promotion_bytes, 2048);
        assert_eq!(config.engine().pin_bytes, 1227);
        assert!(config.engine().second_touch && config.engine().verify_host);
    }

    #[test]
    fn an_impossible_value_is_refused_with_the_allowed_values() {
        let unknown = refused(r#"{"host_mem": 1}"#);
        assert!(unknown.contains("`host_mem`") && unknown.contains("`host_memory`"));
        let choice = refused(r#"{"io_engine": "aio"}"#);
        assert!(
            choice.starts_with("io_engine: ") && choice.contains("`io_uring`"),
            "{choice}"
        );
        let admission = refused(r#"{"disk_admission": "ALL"}"#);
        assert!(
            admission.contains("`all`, `second_touch`")
                || admission.contains("`all` or `second_touch`")
        );
        let disk = refused(r#"{"disks": [{"path": "/d"}]}"#);
        assert!(
            disk.starts_with("disks[0]: ") && disk.contains("`capacity`"),
            "{disk}"
        );
        assert!(refused(r#"{"host_memory": -1}"#).starts_with("host_memory: "));
        assert!(!choice.contains("line"));
        let second = refused(r#"{"host_memory": 1} {"disk_ttl": 5}"#);
        assert!(second.contains("more than one JSON object"), "{second}");
        assert!(HostConfig::from_json("{} \n").is_ok());
    }

    #[test]
    fn the_options_of_a_remote_store_have_effect_only_with_its_url() {
        let of = |json: &str| HostConfig::from_json(json).unwrap().engine().remote;
        assert_eq!(of(r#"{"remote_write": "none"}"#), None);
        let found = of(
            r#"{"remote": "file:///d", "remote_object": 1048576, "remote_write": "second_touch",
            "remote_write_rate": 7, "remote_ttl": 60}"#,
        );
        let expected = RemoteConfig {
            object_bytes: 1 << 20,
            write: RemoteWrite::SecondTouch,
            write_rate: 7,
            ..RemoteConfig::default()
        };
        assert_eq!(found, Some(expected));
        let config = HostConfig {
            remote: "redis://:secret@host".to_owned(),
            ..HostConfig::default()
        };
        let refused = config.remote_location().unwrap_err().to_string();
        assert!(
            refused.starts_with("remote is ") && !refused.contains("secret"),
            "{refused}"
        );
    }

    #[test]
    fn a_server_is_an_absolute_path_of_a_unix_socket() {
        let of = |server: &str| {
            let server = server.to_owned();
            HostConfig {
                server,
                ..HostConfig::default()
            }
            .server_socket()
        };
        assert_eq!(of("").unwrap(), None);
        assert_eq!(of("unix:///run/s").unwrap(), Some("/run/s".into()));
        for server in ["/run/s", "unix://run/s", "tcp://h:1"] {
            let refused = of(server).unwrap_err().to_string();
            assert!(refused.contains(server) && refused.contains("unix:///path"));
        }
    }
}
