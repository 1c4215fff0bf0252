//! The servers of a Redis: one server, or the servers of a cluster. Each has connections that are kept between calls.
//!
//! Any server of a cluster returns the map of keys to servers. The map is read at the first call, and again after a
//! server has redirected a caller or has failed, and after a key had no server. A server outside of a cluster has all
//! keys.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use redis::{Cmd, RedisResult, ServerError, ServerErrorKind, Value};
use undercroft_contract::remote::RemoteError;

use super::address::{Address, STALL};
use super::connection::{Access, LIST, RedisConnection};
use super::slots::{Map, ranges, slot};
use super::store_error;
use crate::store_error::{ObjectStoreError, Result};

/// Most servers to which a command is sent, one after the other, while a cluster moves its key.
const REDIRECTS: usize = 4;

/// A command and its key.
pub(super) struct Keyed {
    key: String,
    command: Cmd,
}

impl Keyed {
    pub(super) fn new(key: &str, command: Cmd) -> Self {
        let key = key.to_owned();
        Self { key, command }
    }
}

/// The commands for one server.
struct Part<'a> {
    address: &'a Address,
    /// The positions of these commands among all commands.
    indices: Vec<usize>,
    commands: Vec<&'a Cmd>,
}

/// One server.
struct Server {
    address: Address,
    access: Arc<Access>,
    /// Unused connections.
    idle: Mutex<Vec<RedisConnection>>,
}

#[derive(Default)]
struct MapState {
    map: Option<Arc<Map>>,
    /// Whether the map may be outdated.
    is_stale: bool,
    servers: HashMap<Address, Arc<Server>>,
}

/// All servers.
pub(super) struct Servers {
    /// The servers of the URL.
    named: Vec<Address>,
    access: Arc<Access>,
    state: Mutex<MapState>,
    /// Locked by the caller that reads the map anew. Other callers use the old map meanwhile.
    learning: Mutex<()>,
    /// Index of the server to ask first for the map. A server that did not answer is not asked first.
    first_asked: AtomicUsize,
}

impl Servers {
    /// Nothing is connected yet.
    pub(super) fn new(named: Vec<Address>, access: Access) -> Self {
        Self {
            named,
            access: Arc::new(access),
            state: Mutex::default(),
            learning: Mutex::default(),
            first_asked: AtomicUsize::new(0),
        }
    }

    /// The answers to commands, in their order. Commands of one server are sent together, and their answers have `most`
    /// bytes in all.
    pub(super) fn ask(&self, commands: &[Keyed], most: u64) -> Result<Vec<Value>> {
        let map = self.map()?;
        let mut groups: BTreeMap<&Address, Vec<usize>> = BTreeMap::new();
        for (index, command) in commands.iter().enumerate() {
            let Some(address) = map.server(slot(command.key.as_bytes())) else {
                // The cluster may be new, or moving the keys to another server.
                self.lock().is_stale = true;
                return Err(failed("no server of the cluster has this key"));
            };
            groups.entry(address).or_default().push(index);
        }
        let parts = groups.into_iter().map(|(address, indices)| Part {
            address,
            commands: indices.iter().map(|at| &commands[*at].command).collect(),
            indices,
        });
        let mut found = vec![Value::Nil; commands.len()];
        for (part, answers) in self.ask_parts(parts.collect(), most) {
            for (index, answer) in part.indices.iter().zip(answers?) {
                let command = &commands[*index].command;
                found[*index] = self.followed(command, answer, part.address, most)?;
            }
        }
        Ok(found)
    }

    /// Asks all servers at once.
    fn ask_parts<'a>(
        &self,
        parts: Vec<Part<'a>>,
        most: u64,
    ) -> Vec<(Part<'a>, Result<Vec<Value>>)> {
        let ask = |part: Part<'a>| {
            let answers = self.ask_one(part.address, &part.commands, most);
            (part, answers)
        };
        if parts.len() < 2 {
            return parts.into_iter().map(ask).collect();
        }
        std::thread::scope(|scope| {
            let asked: Vec<_> = (parts.into_iter())
                .map(|part| scope.spawn(move || ask(part)))
                .collect();
            let joined = asked.into_iter().map(|one| one.join());
            joined
                .map(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    /// The answers of one server, of `most` bytes in all.
    pub(super) fn ask_one(
        &self,
        address: &Address,
        commands: &[&Cmd],
        most: u64,
    ) -> Result<Vec<Value>> {
        let server = self.server(address);
        let mut packed = Vec::new();
        for command in commands {
            command.write_packed_command(&mut packed);
        }
        let answers = server.exchange(&packed, commands.len(), most);
        answers.map_err(|error| {
            // In a cluster another server may have taken over its keys.
            let mut state = self.lock();
            state.is_stale |= state.map.as_ref().is_some_and(|map| map.is_cluster());
            store_error(error)
        })
    }

    /// The answer, after the redirects that begin with the answer of the server at `from`.
    fn followed(
        &self,
        command: &Cmd,
        mut answer: Value,
        from: &Address,
        most: u64,
    ) -> Result<Value> {
        let mut from = from.clone();
        for _ in 0..REDIRECTS {
            let Value::ServerError(error) = &answer else {
                return Ok(answer);
            };
            let is_asking = match error.kind() {
                // This key alone has moved so far: its new server answers only after ASKING, and the map stays valid.
                Some(ServerErrorKind::Ask) => true,
                Some(ServerErrorKind::Moved) => {
                    self.lock().is_stale = true;
                    false
                }
                _ => return Err(store_error(error.clone().into())),
            };
            let to = (error.details()).and_then(|details| redirect(details, &from.0));
            from = to.ok_or_else(|| failed(format_args!("a redirect to nowhere: {error}")))?;
            let asking = redis::cmd("ASKING");
            let commands = [&asking, command];
            let commands = if is_asking {
                &commands[..]
            } else {
                &commands[1..]
            };
            answer = self
                .ask_one(&from, commands, most)?
                .pop()
                .unwrap_or(Value::Nil);
        }
        Err(failed(
            "the servers of the cluster send each key to another one",
        ))
    }

    /// The addresses of all servers that have keys, by the cluster's present map.
    pub(super) fn all(&self) -> Result<Vec<Address>> {
        Ok(self.learn()?.servers().0)
    }

    fn map(&self) -> Result<Arc<Map>> {
        let state = self.lock();
        let (map, is_stale) = (state.map.clone(), state.is_stale);
        drop(state);
        let Some(map) = map else {
            return self.learn();
        };
        if is_stale && let Ok(_one) = self.learning.try_lock() {
            // If no server answers, the next call reports the error.
            return Ok(self.learn().unwrap_or(map));
        }
        Ok(map)
    }

    /// Reads the map from one of the servers of the last map, of their replicas, and of the URL. A server that has just
    /// started knows only a part of the map, so the most complete map counts.
    fn learn(&self) -> Result<Arc<Map>> {
        let started = Instant::now();
        let known = self.lock().map.clone();
        let (mut asked, replicas) = known.map(|map| map.servers()).unwrap_or_default();
        for address in replicas.iter().chain(&self.named) {
            if !asked.contains(address) {
                asked.push(address.clone());
            }
        }
        let first = self.first_asked.load(Ordering::Relaxed) % asked.len();
        asked.rotate_left(first);
        let (mut best, mut last): (Option<Map>, _) = (None, None);
        for address in &asked {
            let is_complete = best.as_ref().is_some_and(|map| map.missing() == 0);
            if is_complete || started.elapsed() >= STALL {
                break;
            }
            match self.map_of(address) {
                Ok(map)
                    if best
                        .as_ref()
                        .is_none_or(|best| map.missing() < best.missing()) =>
                {
                    best = Some(map);
                }
                Ok(_) => {}
                Err(error) => {
                    self.first_asked.fetch_add(1, Ordering::Relaxed);
                    last = Some(error);
                }
            }
        }
        let Some(best) = best.map(Arc::new) else {
            return Err(last.unwrap_or_else(|| failed("no server is named")));
        };
        let mut state = self.lock();
        (state.map, state.is_stale) = (Some(Arc::clone(&best)), false);
        Ok(best)
    }

    /// The map of one server.
    fn map_of(&self, address: &Address) -> Result<Map> {
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let answer = self.ask_one(address, &[&command], LIST)?.pop();
        match answer.unwrap_or(Value::Nil) {
            Value::ServerError(error) if !reports_no_cluster(&error) => {
                Err(store_error(error.into()))
            }
            Value::ServerError(_) if self.named.len() > 1 => Err(failed(format_args!(
                "the URL names several servers, but {}:{} is in no cluster, or does not tell",
                address.0, address.1
            ))),
            Value::ServerError(_) => Ok(Map::Single(address.clone())),
            answer => ranges(answer, &address.0)
                .map(Map::Cluster)
                .ok_or_else(|| failed("an answer to CLUSTER SLOTS that has another form")),
        }
    }

    fn server(&self, address: &Address) -> Arc<Server> {
        let mut state = self.lock();
        let server = state.servers.entry(address.clone()).or_insert_with(|| {
            Arc::new(Server {
                address: address.clone(),
                access: Arc::clone(&self.access),
                idle: Mutex::default(),
            })
        });
        Arc::clone(server)
    }

    fn lock(&self) -> MutexGuard<'_, MapState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Sends commands and reads their answers on an unused connection. The server may have closed a kept connection:
    /// then the commands are sent again on a new connection.
    fn exchange(&self, packed: &[u8], count: usize, most: u64) -> RedisResult<Vec<Value>> {
        let kept = self.lock().pop();
        if let Some(connection) = kept {
            match self.exchange_on(connection, packed, (count, most)) {
                Err(error) if error.is_connection_dropped() && !error.is_timeout() => {}
                Err(error) if error.is_timeout() => {
                    // A router may have forgotten all unused connections.
                    self.lock().clear();
                    return Err(error);
                }
                result => return result,
            }
        }
        let connection = RedisConnection::open(&self.address, &self.access)?;
        self.exchange_on(connection, packed, (count, most))
    }

    /// A connection is kept only after all answers: bytes after a part of an answer cannot be read. The first late
    /// answer ends the call.
    fn exchange_on(
        &self,
        mut connection: RedisConnection,
        packed: &[u8],
        (count, most): (usize, u64),
    ) -> RedisResult<Vec<Value>> {
        let answers = connection.exchange(packed, count, most)?;
        if connection.is_clean() {
            self.lock().push(connection);
        }
        Ok(answers)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RedisConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the error shows that a server is in no cluster, or does not report its cluster.
fn reports_no_cluster(error: &ServerError) -> bool {
    use ServerErrorKind::{NoPerm, ResponseError};
    matches!(error.kind(), Some(NoPerm | ResponseError))
}

/// The address in the text `<slot> <host>:<port>` of a redirect. Without a host: the host of the answering server.
fn redirect(details: &str, from: &str) -> Option<Address> {
    let (_, address) = details.split_once(' ')?;
    let (host, port) = address.trim().rsplit_once(':')?;
    let host = if host.is_empty() { from } else { host };
    Some((host.to_owned(), port.parse().ok()?))
}

fn failed(why: impl std::fmt::Display) -> ObjectStoreError {
    ObjectStoreError::new(RemoteError::Unreachable, why)
}
