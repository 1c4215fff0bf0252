//! `redis://`, `rediss://`: Redis and Valkey, by the crate `redis`. An object is a value that expires.
//!
//! Whoever calls has a connection to itself; those that are not in use are kept. User and password come from the
//! environment (`REDIS_USERNAME`, `REDIS_PASSWORD`) or a file (`REDIS_PASSWORD_FILE`).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{
    Client, Connection, ConnectionAddr, ConnectionLike, ErrorKind, ExistenceCheck,
    IntoConnectionInfo, RedisConnectionInfo, RedisError, ServerErrorKind, SetExpiry, SetOptions,
    TypedCommands,
};
use undercroft_core::remote::RemoteError;

use crate::Options;
use crate::body::Body;
use crate::check::{Finding, Status};
use crate::directory::seconds_between;
use crate::location::{Location, LocationError, Scheme};
use crate::objects::{Entry, Objects, Result, StoreError};
use crate::receiver::Receiver;

/// Calls at a time. The server carries out one command at a time; more connections only divide its network.
const PARALLEL: usize = 8;
/// A connection that is not there after so long, or a byte.
const STALL: Duration = Duration::from_secs(1);
/// Names in one answer of a list.
const LISTED: usize = 1000;

/// Values of a server.
pub(crate) struct RedisStore {
    client: Client,
    prefix: String,
    ttl: Duration,
    idle: Mutex<Vec<Connection>>,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl RedisStore {
    pub(crate) fn open(
        location: &Location,
        options: Options,
    ) -> std::result::Result<Self, LocationError> {
        let (host, port, database, prefix) =
            (location.redis()).map_err(|error| location.refused(error))?;
        let addr = if location.scheme == Scheme::Rediss {
            ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let mut settings = RedisConnectionInfo::default().set_db(database);
        if let Ok(name) = std::env::var("REDIS_USERNAME") {
            settings = settings.set_username(name);
        }
        if let Some(password) = password(location)? {
            settings = settings.set_password(password);
        }
        let info = addr.into_connection_info();
        let client = info
            .and_then(|info| Client::open(info.set_redis_settings(settings)))
            .map_err(|error| location.refused(error))?;
        Ok(Self {
            client,
            prefix,
            ttl: options.ttl,
            idle: Mutex::default(),
        })
    }

    fn key(&self, path: &str) -> String {
        format!("{}/{path}", self.prefix)
    }

    /// Makes a call on a connection of its own. A connection that was kept may have been closed by the server: then the
    /// call is made again on a new one.
    fn with<R>(&self, call: impl Fn(&mut Connection) -> redis::RedisResult<R>) -> Result<R> {
        let kept = self.lock().pop();
        if let Some(mut connection) = kept {
            match call(&mut connection) {
                Err(error) if error.is_connection_dropped() && !error.is_timeout() => {}
                result => return self.end(connection, result),
            }
        }
        let mut connection = self.connect().map_err(store_error)?;
        let result = call(&mut connection);
        self.end(connection, result)
    }

    fn end<R>(&self, connection: Connection, result: redis::RedisResult<R>) -> Result<R> {
        // After an answer that came in part nothing that follows has a meaning.
        let is_usable = match &result {
            Ok(_) => true,
            Err(error) => matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension),
        };
        if is_usable && connection.is_open() {
            self.lock().push(connection);
        }
        result.map_err(store_error)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self) -> redis::RedisResult<Connection> {
        let mut connection = self.client.get_connection_with_timeout(STALL)?;
        connection.set_read_timeout(Some(STALL))?;
        connection.set_write_timeout(Some(STALL))?;
        // A server that wants a password closes the connection at a large value, and does not say why.
        redis::cmd("PING").exec(&mut connection)?;
        Ok(connection)
    }
}

impl Objects for RedisStore {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    fn probe(&self, paths: &[String]) -> Result<u64> {
        let mut pipeline = redis::pipe();
        for path in paths {
            pipeline.exists(self.key(path));
        }
        let found: Vec<bool> = self.with(|connection| pipeline.query(connection))?;
        let bits = found.iter().enumerate();
        Ok(bits.fold(0, |all, (index, found)| all | u64::from(*found) << index))
    }

    /// An object that is read is wanted for `remote_ttl` again.
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        let key = self.key(path);
        let wanted = isize::try_from(receiver.wanted()).unwrap_or(isize::MAX);
        let seconds = i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX);
        let mut pipeline = redis::pipe();
        if receiver.wants_all() {
            pipeline.get(&key);
        } else {
            pipeline.getrange(&key, 0, wanted - 1);
        }
        pipeline.expire(&key, seconds);
        type Answer = (Option<Vec<u8>>, bool);
        let (bytes, exists): Answer = self.with(|connection| pipeline.query(connection))?;
        match bytes {
            Some(bytes) if exists || !bytes.is_empty() => receiver.take(&bytes).map(drop),
            _ => Err(RemoteError::NotFound.into()),
        }
    }

    fn put(&self, path: &str, body: &Body<'_>, if_absent: bool) -> Result<bool> {
        let (key, bytes) = (self.key(path), body.to_vec());
        let mut options =
            SetOptions::default().with_expiration(SetExpiry::EX(self.ttl.as_secs().max(1)));
        if if_absent {
            options = options.conditional_set(ExistenceCheck::NX);
        }
        let stored: redis::Value = self.with(|connection| {
            redis::cmd("SET")
                .arg(&key)
                .arg(&bytes)
                .arg(&options)
                .query(connection)
        })?;
        Ok(stored != redis::Value::Nil)
    }

    fn delete(&self, paths: &[String]) -> Result<()> {
        let keys: Vec<String> = paths.iter().map(|path| self.key(path)).collect();
        if keys.is_empty() {
            return Ok(());
        }
        self.with(|connection| connection.unlink(&keys)).map(drop)
    }

    /// Objects have no time of their own here: the time of the next renewal stands for it.
    fn list(&self, below: &str, each: &mut dyn FnMut(Entry) -> bool) -> Result<()> {
        let pattern = format!("{}*", escaped(&self.key(below)));
        let mut cursor: u64 = 0;
        loop {
            let (next, keys): (u64, Vec<String>) = self.with(|connection| {
                let mut scan = redis::cmd("SCAN");
                scan.arg(cursor)
                    .arg("MATCH")
                    .arg(&pattern)
                    .arg("COUNT")
                    .arg(LISTED);
                scan.query(connection)
            })?;
            let mut pipeline = redis::pipe();
            for key in &keys {
                pipeline.strlen(key).ttl(key);
            }
            let found: Vec<i64> = match keys.is_empty() {
                true => Vec::new(),
                false => self.with(|connection| pipeline.query(connection))?,
            };
            for (key, of_key) in keys.iter().zip(found.chunks(2)) {
                let path = key.strip_prefix(&self.prefix).unwrap_or(key);
                let left = Duration::from_secs(u64::try_from(of_key[1]).unwrap_or(0));
                let entry = Entry {
                    path: path.trim_start_matches('/').to_owned(),
                    bytes: u64::try_from(of_key[0]).unwrap_or(0),
                    modified: SystemTime::now() + left - self.ttl,
                };
                if of_key[1] != -2 && !each(entry) {
                    return Ok(());
                }
            }
            if next == 0 {
                return Ok(());
            }
            cursor = next;
        }
    }

    fn delete_unchanged(&self, _entries: &[Entry]) -> Result<Vec<bool>> {
        Err(StoreError::new(
            RemoteError::Denied,
            "the server removes objects itself: by remote_ttl, and by maxmemory with maxmemory-policy allkeys-lru",
        ))
    }

    fn clock_skew(&self) -> Result<Option<f64>> {
        let before = SystemTime::now();
        let (seconds, micros): (u64, u64) =
            self.with(|connection| redis::cmd("TIME").query(connection))?;
        let between = before + before.elapsed().unwrap_or_default() / 2;
        let store = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros);
        Ok(Some(seconds_between(between, store)))
    }

    fn advice(&self) -> Vec<Finding> {
        let info: Result<redis::InfoDict> =
            self.with(|connection| redis::cmd("INFO").arg("memory").query(connection));
        let Ok(info) = info else {
            // The server's operator may have forbidden it.
            return Vec::new();
        };
        let (name, status) = ("remote memory", Status::Warn);
        let most: u64 = info.get("maxmemory").unwrap_or(0);
        let policy: String = info.get("maxmemory_policy").unwrap_or_default();
        vec![if most == 0 {
            let advice = "set maxmemory, and maxmemory-policy allkeys-lru: it grows until its machine is full";
            Finding::new(
                name,
                status,
                "the server has no limit of its memory",
                advice,
            )
        } else if policy == "noeviction" {
            let advice = "set maxmemory-policy allkeys-lru: a full server refuses writes";
            Finding::new(name, status, "the server evicts nothing", advice)
        } else {
            let text = format!("{} MiB, {policy}", most >> 20);
            Finding::new(name, Status::Ok, text, "")
        }]
    }

    fn expires(&self) -> bool {
        true
    }
}

/// The password of the environment or a file.
fn password(location: &Location) -> std::result::Result<Option<String>, LocationError> {
    if let Ok(password) = std::env::var("REDIS_PASSWORD") {
        return Ok(Some(password));
    }
    let Some(path) = std::env::var_os("REDIS_PASSWORD_FILE") else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let path = path.to_string_lossy();
        location.refused(format_args!("REDIS_PASSWORD_FILE is {path:?}: {error}"))
    })?;
    Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
}

/// The text as a pattern that matches itself.
fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if "*?[]\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

fn store_error(error: RedisError) -> StoreError {
    // While a connection is set up, and in a pipeline, the server's code is only in the text.
    let text = error.to_string();
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let kind = match error.kind() {
        ErrorKind::AuthenticationFailed
        | ErrorKind::Server(ServerErrorKind::NoPerm | ServerErrorKind::ReadOnly) => {
            RemoteError::Denied
        }
        ErrorKind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::TryAgain) => {
            RemoteError::Throttled
        }
        _ if says(&["NOAUTH", "WRONGPASS", "NOPERM", "READONLY"]) => RemoteError::Denied,
        _ if says(&["OOM"]) => RemoteError::Full,
        _ if says(&["max number of clients"]) => RemoteError::Throttled,
        _ if error.is_timeout() => RemoteError::Late,
        _ => RemoteError::Unreachable,
    };
    StoreError::new(kind, text)
}
