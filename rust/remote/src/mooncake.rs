//! `mooncake://`: Mooncake Store, by the client in Mooncake's own wheel.
//!
//! The client is an extension of Python. Its calls wait half a minute for a peer that hangs, and without end for a
//! master that hangs. So the client runs in a process of its own, `undercroft.mooncake_helper`, which is ended if it
//! hangs. Objects pass through memory that both processes map.

mod buffer;
mod helper;
mod protocol;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use undercroft_contract::remote::RemoteError;

use crate::body::{Chunk, ObjectBody};
use crate::finding::{Finding, Status};
use crate::location::{Location, LocationError, MooncakePlace};
use crate::objects::{ListedObject, Objects};
use crate::receiver::Receiver;
use crate::store_error::{ObjectStoreError, Result, out_of_arena};
use buffer::{BUFFER_BYTES, SharedMemory, SharedRange};
use helper::Helper;
pub use helper::set_python;
use protocol::{Answer, HelperStart, Request};

/// Most calls at a time. The helper carries them out one after the other: over TCP, concurrent calls are slower.
const PARALLEL: usize = 8;
/// A call without an object's bytes ends within this time.
const STALL: Duration = Duration::from_secs(1);
/// A call with an object's bytes ends within this time plus the time of its bytes at the least rate.
const TRANSFER: Duration = Duration::from_secs(2);
const SLOWEST: u64 = 16 << 20;
/// A list, or the wait for a helper's start.
const PATIENT: Duration = Duration::from_secs(20);
/// Least time between the starts of two helpers, if the first cannot be used or started.
const RESTART: Duration = Duration::from_secs(1);
/// Bytes that are copied between two checks whether the store must end.
const PIECE: u64 = 1 << 20;
/// Names in one request for sizes.
const LISTED: usize = 1000;

/// Values of a Mooncake store.
pub(crate) struct MooncakeStore {
    place: MooncakePlace,
    buffer: Arc<SharedMemory>,
    helper: Mutex<Running>,
}

/// The present helper, or why it was not started, and the time of its start.
type Running = Option<(Result<Arc<Helper>>, Instant)>;

impl std::fmt::Debug for MooncakeStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MooncakeStore")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl MooncakeStore {
    /// Nothing is started yet.
    pub(crate) fn open(location: &Location) -> std::result::Result<Self, LocationError> {
        Ok(Self {
            place: MooncakePlace::of(location).map_err(|error| location.refused(error))?,
            buffer: SharedMemory::new(BUFFER_BYTES).map_err(|error| location.refused(error))?,
            helper: Mutex::default(),
        })
    }

    fn key(&self, path: &str) -> String {
        format!("{}/{path}", self.place.prefix)
    }

    fn keys(&self, paths: &[String]) -> Vec<String> {
        paths.iter().map(|path| self.key(path)).collect()
    }

    /// A helper that is connected to the store. Starts one if there is none that can be used. Waits for its start until
    /// `patience`.
    fn helper(&self, patience: Instant) -> Result<Arc<Helper>> {
        let mut running = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let helper = match &*running {
            Some((Ok(helper), _)) if helper.is_usable(now) => Ok(Arc::clone(helper)),
            Some((last, since)) if now.duration_since(*since) < RESTART => last.clone(),
            old => {
                if let Some((Ok(helper), _)) = old {
                    helper.end();
                }
                let helper = self.start();
                *running = Some((helper.clone(), Instant::now()));
                helper
            }
        };
        drop(running);
        let helper = helper?;
        helper.ready(patience)?;
        Ok(helper)
    }

    fn start(&self) -> Result<Arc<Helper>> {
        let settings = HelperStart {
            bytes: BUFFER_BYTES,
            master: &self.place.master,
            metadata: &self.place.metadata,
            segment: self.place.segment,
            protocol: &self.place.protocol,
            device: &self.place.device,
            host: &self.place.host,
            admin: &self.place.admin,
        };
        Helper::start(&settings, self.buffer.arena.fd())
    }

    /// The answer to a request. While the helper starts, the request fails at once: the start may take minutes.
    fn ask(
        &self,
        request: &Request,
        slot: Option<SharedRange>,
        deadline: Instant,
    ) -> Result<(Answer, Option<SharedRange>)> {
        let helper = self.helper(Instant::now())?;
        helper.ask(request, slot)?.wait(&helper, deadline)
    }

    /// The answer to a request without an object's bytes.
    fn say(&self, request: &Request) -> Result<Answer> {
        let answer = self.ask(request, None, Instant::now() + STALL);
        answer.map(|(answer, _)| answer)
    }

    /// The memory through which an object's bytes pass, and the deadline of its transfer.
    fn room(&self, bytes: u64) -> Result<(SharedRange, Instant)> {
        let time = TRANSFER + Duration::from_secs(1) * bytes.div_ceil(SLOWEST) as u32;
        let deadline = Instant::now() + time;
        Ok((self.buffer.take(bytes, deadline)?, deadline))
    }

    fn fill(&self, slot: &SharedRange, body: &ObjectBody<'_>) -> Result<()> {
        let (to, mut at) = (&self.buffer.arena, slot.at);
        for chunk in body.chunks() {
            let (copied, len) = match chunk {
                Chunk::Bytes(bytes) => (to.write(at, bytes), bytes.len() as u64),
                Chunk::Arena(arena, offset, len) => (to.copy_from(at, arena, offset, len), len),
            };
            copied.map_err(out_of_arena)?;
            at += len;
        }
        Ok(())
    }
}

impl Objects for MooncakeStore {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn parallel(&self) -> usize {
        PARALLEL
    }

    /// Starts the helper.
    fn greet(&self) -> Result<()> {
        self.helper(Instant::now() + PATIENT)?;
        self.probe(&["check/none".to_owned()]).map(drop)
    }

    fn probe(&self, paths: &[String]) -> Result<u64> {
        let keys = self.keys(paths);
        let answer = self.say(&Request::Exist { keys })?;
        let found = answer.values(paths.len())?.iter().enumerate();
        Ok(found.fold(0, |all, (index, value)| {
            all | (u64::from(*value == 1) << index)
        }))
    }

    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        let wanted = receiver.wanted();
        let (slot, deadline) = self.room(wanted)?;
        let request = Request::Get {
            key: self.key(path),
            at: slot.at,
            bytes: wanted,
        };
        let (answer, slot) = self.ask(&request, Some(slot), deadline)?;
        let slot = slot.expect("it comes back with the answer");
        let bytes = u64::try_from(answer.value()?).unwrap_or(0).min(wanted);
        // The helper's process can change the bytes: the receiver verifies a copy.
        let mut done = 0;
        while done < bytes {
            let count = PIECE.min(bytes - done);
            if !receiver.take_shared(&self.buffer.arena, slot.at + done, count)? {
                break;
            }
            done += count;
        }
        Ok(())
    }

    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        let bytes = body.len();
        let (slot, deadline) = self.room(bytes)?;
        self.fill(&slot, body)?;
        let request = Request::Put {
            key: self.key(path),
            at: slot.at,
            bytes,
            if_absent,
        };
        let (answer, _) = self.ask(&request, Some(slot), deadline)?;
        Ok(answer.value()? == 1)
    }

    fn delete(&self, paths: &[String]) -> Result<()> {
        let keys = self.keys(paths);
        self.say(&Request::Remove { keys }).map(drop)
    }

    /// Mooncake's objects have no time, so they count as new.
    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        let (prefix, patience) = (self.key(below), Instant::now() + PATIENT);
        self.helper(patience)?;
        let (listed, _) = self.ask(&Request::List { prefix }, None, patience)?;
        for keys in listed.names.chunks(LISTED) {
            let keys = keys.to_vec();
            let request = Request::Sizes { keys };
            let deadline = Instant::now() + PATIENT;
            let (sizes, _) = self.ask(&request, None, deadline)?;
            let Request::Sizes { keys } = request else {
                unreachable!("it was made above")
            };
            for (key, bytes) in keys.iter().zip(sizes.values(keys.len())?) {
                let path = key.strip_prefix(&self.place.prefix).unwrap_or(key);
                let entry = ListedObject {
                    path: path.trim_start_matches('/').to_owned(),
                    bytes: u64::try_from(*bytes).unwrap_or(0),
                    modified: SystemTime::now(),
                };
                if *bytes >= 0 && !each(entry) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn delete_unchanged(&self, _entries: &[ListedObject]) -> Result<Vec<bool>> {
        Err(ObjectStoreError::new(
            RemoteError::Denied,
            "the store removes objects itself, when its memory is full",
        ))
    }

    fn clock_skew(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    fn advice(&self) -> Vec<Finding> {
        let name = "remote memory";
        let Ok(answer) = self.say(&Request::Memory) else {
            let text = format!("mooncake_master tells nothing at {}", self.place.admin);
            let advice = "give the address of its metrics port in the URL: admin=host:9003";
            return vec![Finding::new(name, Status::Warn, text, advice)];
        };
        vec![match answer.values[..] {
            [used, total] if total > 0 => {
                let text = format!("{} of {} MiB in use", used >> 20, total >> 20);
                Finding::new(name, Status::Ok, text, "")
            }
            _ => {
                let text = "no process lends memory to the store";
                let advice = "start mooncake_client on the machines that store objects, or add segment=16GiB to the URL";
                Finding::new(name, Status::Fail, text, advice)
            }
        }]
    }

    fn expires(&self) -> bool {
        true
    }
}

impl Drop for MooncakeStore {
    fn drop(&mut self) {
        let running = self.helper.get_mut();
        let running = running.unwrap_or_else(PoisonError::into_inner);
        if let Some((Ok(helper), _)) = running.take() {
            helper.close();
        }
    }
}
