//! `redis://`, `rediss://`: Redis and Valkey, one server or a cluster, by the crate `redis`. An object is a value that
//! expires.
//!
//! User and password come from the environment (`REDIS_USERNAME`, `REDIS_PASSWORD`) or a file (`REDIS_PASSWORD_FILE`).

mod address;
mod connection;
mod servers;
mod slots;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{
    ErrorKind, ExistenceCheck, FromRedisValue, RedisError, ServerErrorKind, SetExpiry, SetOptions,
    Value,
};
use undercroft_contract::remote::RemoteError;
use undercroft_contract::remote::segment::SEGMENT_ALIGN;

use crate::RemoteOptions;
use crate::body::ObjectBody;
use crate::directory::seconds_between;
use crate::finding::{Finding, Status};
use crate::location::{Location, LocationError, Scheme, is_this_machine};
use crate::objects::{ListedObject, Objects};
use crate::receiver::Receiver;
use crate::store_error::{ObjectStoreError, Result};
use address::{Address, STALL};
use connection::{Access, LIST, SHORT, TOO_LONG};
use servers::{Keyed, Servers};

/// Most calls at a time. A server carries out one command at a time, so more connections only share its network.
const PARALLEL: usize = 8;
/// Most names in one answer of a list.
const LISTED: usize = 1000;

/// Values of a server or a cluster.
pub(crate) struct RedisStore {
    servers: Servers,
    prefix: String,
    ttl: Duration,
    /// Whether a read renews an object's time to live.
    renews: bool,
    exposure: Option<String>,
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
        options: RemoteOptions,
    ) -> std::result::Result<Self, LocationError> {
        let place = (location.redis()).map_err(|error| location.refused(error))?;
        let tls = match location.scheme {
            Scheme::Rediss => Some(connection::tls().map_err(|error| location.refused(error))?),
            _ => None,
        };
        let is_local = |(host, _): &Address| is_this_machine(host);
        let exposure = match &tls {
            None if !place.servers.iter().all(is_local) => Some(format!(
                "{location}: the password and the blocks are not encrypted on the network"
            )),
            _ => None,
        };
        let access = Access {
            username: std::env::var("REDIS_USERNAME").ok(),
            password: password(location)?,
            database: place.database,
            tls,
        };
        Ok(Self {
            servers: Servers::new(place.servers, access),
            prefix: place.prefix,
            ttl: options.ttl.max(Duration::from_secs(1)),
            renews: options.renew_rate.is_some(),
            exposure,
        })
    }

    fn key(&self, path: &str) -> String {
        format!("{}/{path}", self.prefix)
    }

    /// A finding on a server's memory; `None` if the server's operator has forbidden the question.
    fn memory(&self, server: &Address) -> Option<Finding> {
        let asked = redis::cmd("INFO").arg("memory").take();
        let answer = self.servers.ask_one(server, &[&asked], SHORT).ok()?.pop()?;
        let info: redis::InfoDict = value(answer).ok()?;
        let (name, status) = ("remote memory", Status::Warn);
        let most: u64 = info.get("maxmemory").unwrap_or(0);
        let policy: String = info.get("maxmemory_policy").unwrap_or_default();
        Some(if most == 0 {
            let advice = "set maxmemory, and maxmemory-policy allkeys-lru: it grows until its machine is full";
            let text = "the server has no limit of its memory";
            Finding::new(name, status, text, advice)
        } else if policy == "noeviction" {
            let advice = "set maxmemory-policy allkeys-lru: a full server refuses writes";
            Finding::new(name, status, "the server evicts nothing", advice)
        } else {
            let text = format!("{} MiB, {policy}", most >> 20);
            Finding::new(name, Status::Ok, text, "")
        })
    }

    /// The objects of one server.
    fn list_of(
        &self,
        server: &Address,
        pattern: &str,
        each: &mut dyn FnMut(ListedObject) -> bool,
    ) -> Result<bool> {
        let mut cursor: u64 = 0;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(pattern);
            scan.arg("COUNT").arg(LISTED);
            let answer = self.servers.ask_one(server, &[&scan], LIST)?.pop();
            let (next, keys): (u64, Vec<String>) = value(answer.unwrap_or(Value::Nil))?;
            let asked = keys.iter().flat_map(|key| {
                ["STRLEN", "TTL"].map(|name| Keyed::new(key, redis::cmd(name).arg(key).take()))
            });
            let asked: Vec<Keyed> = asked.collect();
            let found = match asked.is_empty() {
                true => Vec::new(),
                false => self.servers.ask(&asked, LIST)?,
            };
            let found: Vec<i64> = found.into_iter().map(value).collect::<Result<_>>()?;
            for (key, of_key) in keys.iter().zip(found.chunks(2)) {
                let path = key.strip_prefix(&self.prefix).unwrap_or(key);
                // The server keeps no time of the last use, but each write and renewal gives the key its whole
                // lifetime.
                let left = Duration::from_secs(u64::try_from(of_key[1]).unwrap_or(0));
                let entry = ListedObject {
                    path: path.trim_start_matches('/').to_owned(),
                    bytes: u64::try_from(of_key[0]).unwrap_or(0),
                    modified: SystemTime::now() + left - self.ttl,
                };
                // -2: the key has expired since it was listed.
                if of_key[1] != -2 && !each(entry) {
                    return Ok(false);
                }
            }
            if next == 0 {
                return Ok(true);
            }
            cursor = next;
        }
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
        let asked = paths.iter().map(|path| {
            let key = self.key(path);
            Keyed::new(&key, redis::cmd("EXISTS").arg(&key).take())
        });
        let found = self.servers.ask(&asked.collect::<Vec<_>>(), SHORT)?;
        let bits = found.into_iter().enumerate();
        bits.map(|(index, found)| Ok(u64::from(value::<bool>(found)?) << index))
            .try_fold(0, |all, bit: Result<u64>| Ok(all | bit?))
    }

    /// A read renews the object's time to live (`remote_ttl`), unless this host only reads.
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        let key = self.key(path);
        let wanted = isize::try_from(receiver.wanted()).unwrap_or(isize::MAX);
        let read = if receiver.wants_all() {
            redis::cmd("GET").arg(&key).take()
        } else {
            redis::cmd("GETRANGE")
                .arg(&key)
                .arg(0)
                .arg(wanted - 1)
                .take()
        };
        let second = match self.renews {
            true => redis::cmd("EXPIRE")
                .arg(&key)
                .arg(self.ttl.as_secs())
                .take(),
            false => redis::cmd("EXISTS").arg(&key).take(),
        };
        let asked = [read, second].map(|command| Keyed::new(&key, command));
        // A whole object ends with zeros.
        let most = receiver.wanted().next_multiple_of(SEGMENT_ALIGN) + SHORT;
        let answers = self.servers.ask(&asked, most);
        let mut answers = answers.map_err(|error| match error.detail.contains(TOO_LONG) {
            true => {
                ObjectStoreError::new(RemoteError::Corrupt, "the value is larger than the object")
            }
            false => error,
        })?;
        let exists: bool = value(answers.remove(1))?;
        let bytes: Option<Vec<u8>> = value(answers.remove(0))?;
        match bytes {
            Some(bytes) if exists || !bytes.is_empty() => receiver.take(&bytes).map(drop),
            _ => Err(RemoteError::NotFound.into()),
        }
    }

    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        let key = self.key(path);
        let mut options = SetOptions::default().with_expiration(SetExpiry::EX(self.ttl.as_secs()));
        if if_absent {
            options = options.conditional_set(ExistenceCheck::NX);
        }
        let mut command = redis::cmd("SET");
        command.arg(&key).arg(body.to_vec()).arg(&options);
        let stored = self.servers.ask(&[Keyed::new(&key, command)], SHORT)?;
        Ok(stored != [Value::Nil])
    }

    fn delete(&self, paths: &[String]) -> Result<()> {
        let asked = paths.iter().map(|path| {
            let key = self.key(path);
            Keyed::new(&key, redis::cmd("UNLINK").arg(&key).take())
        });
        self.servers
            .ask(&asked.collect::<Vec<_>>(), SHORT)
            .map(drop)
    }

    /// Objects have no time of modification in Redis. It is computed from the remaining time to live.
    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        let pattern = format!("{}*", escaped(&self.key(below)));
        for server in self.servers.all()? {
            if !self.list_of(&server, &pattern, each)? {
                break;
            }
        }
        Ok(())
    }

    fn delete_unchanged(&self, _entries: &[ListedObject]) -> Result<Vec<bool>> {
        Err(ObjectStoreError::new(
            RemoteError::Denied,
            "the server removes objects itself: by remote_ttl, and by maxmemory with maxmemory-policy allkeys-lru",
        ))
    }

    fn clock_skew(&self) -> Result<Option<f64>> {
        let Some(server) = self.servers.all()?.pop() else {
            return Ok(None);
        };
        let before = SystemTime::now();
        let time = redis::cmd("TIME");
        let answer = self.servers.ask_one(&server, &[&time], SHORT)?;
        let between = before + before.elapsed().unwrap_or_default() / 2;
        let (seconds, micros): (u64, u64) = value(answer.into_iter().next().unwrap_or(Value::Nil))?;
        let store = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros);
        Ok(Some(seconds_between(between, store)))
    }

    fn exposure(&self) -> Option<String> {
        self.exposure.clone()
    }

    fn advice(&self) -> Vec<Finding> {
        let servers = self.servers.all().unwrap_or_default();
        let found = servers.iter().filter_map(|server| self.memory(server));
        // Only the finding of the worst server of a cluster is reported.
        found
            .max_by_key(|finding| finding.status == Status::Warn)
            .into_iter()
            .collect()
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

/// The pattern that matches only this text.
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

/// The value of an answer.
fn value<T: FromRedisValue>(answer: Value) -> Result<T> {
    let answer = answer.extract_error().map_err(store_error)?;
    redis::from_redis_value(answer).map_err(|error| store_error(error.into()))
}

fn store_error(error: RedisError) -> ObjectStoreError {
    // The codes that the crate does not know are only in the text.
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
    let (detail, advice) = match kind {
        RemoteError::Denied => (
            text,
            "set REDIS_PASSWORD or REDIS_PASSWORD_FILE, and REDIS_USERNAME for a user that may read, write and delete the \
             keys of the prefix",
        ),
        // The system's text would describe a socket that is not ready.
        RemoteError::Late => (format!("no answer within {} s", STALL.as_secs()), TLS),
        RemoteError::Unreachable if says(&["DB index", "SELECT is not"]) => (text, DATABASE),
        RemoteError::Unreachable => (text, REACH),
        RemoteError::Full => (text, FULL),
        _ => return ObjectStoreError::new(kind, text),
    };
    ObjectStoreError::new(kind, detail).or_advice(advice)
}

const DATABASE: &str = "choose a database that the server has, in the URL, as in redis://host:6379/0; a cluster has database 0 only";
const FULL: &str = "set maxmemory-policy allkeys-lru on the server, so that it evicts old objects, or raise its maxmemory";
const REACH: &str = "check the host and the port in the URL, and that the server runs there; rediss:// is for a port with TLS";
const TLS: &str = "check the host and the port in the URL, firewalls, and the server's load; rediss:// is for a port with TLS";
