//! Carries out an engine's requests: threads that make the calls of a store.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::panics::contained;
use undercroft_contract::remote::{
    ObjectKey, RemoteCompletion, RemoteDone, RemoteError, RemoteRequest, RemoteStore,
};
use undercroft_io::Waker;
use undercroft_io::arena::Arena;
use undercroft_io::copy::Routine;

use crate::body::ObjectBody;
use crate::objects::Objects;
use crate::receiver::Receiver;
use crate::renewals::{Copied, Renewals};
use crate::sealed::seal_object;
use crate::store_error::{ObjectStoreError, Result};

/// Longest wait of a pool's drop for calls that may still access the arena.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Writes use at most one in this many threads, so that reads always have the other threads.
const WRITE_SHARE: usize = 4;

/// Most pending removals of corrupt objects. Further corrupt objects stay until they are old.
const REMOVALS_MAX: usize = 64;

/// Work for one thread.
#[derive(Debug)]
enum ThreadWork {
    Request(RemoteRequest),
    /// Removes a corrupt object, after the completion of the get that has found it.
    Remove(String),
    /// Puts an old object again, after the completion of the get that has read it.
    Renew(String, Copied),
}

impl ThreadWork {
    /// Whether the work counts to the writes' share of the threads.
    fn is_write(&self) -> bool {
        use RemoteRequest::{Get, Probe};
        !matches!(self, Self::Request(Probe { .. } | Get { .. }))
    }
}

/// The pending work. Probes precede gets, and gets precede writes: removals, then puts, then renewals.
#[derive(Debug, Default)]
struct Queue {
    probes: VecDeque<RemoteRequest>,
    gets: VecDeque<RemoteRequest>,
    removals: VecDeque<String>,
    puts: VecDeque<RemoteRequest>,
    renewals: VecDeque<(String, Copied)>,
    writes_running: usize,
    running: usize,
    done: Vec<RemoteCompletion>,
}

impl Queue {
    /// The next work. `writes_max` is the writes' share of the threads.
    fn take(&mut self, writes_max: usize) -> Option<ThreadWork> {
        let read = self.probes.pop_front().or_else(|| self.gets.pop_front());
        let mut work = read.map(ThreadWork::Request);
        if work.is_none() && self.writes_running < writes_max {
            let removal = self.removals.pop_front().map(ThreadWork::Remove);
            let write = removal.or_else(|| self.puts.pop_front().map(ThreadWork::Request));
            work = write.or_else(|| {
                let (path, copied) = self.renewals.pop_front()?;
                Some(ThreadWork::Renew(path, copied))
            });
            self.writes_running += usize::from(work.is_some());
        }
        self.running += usize::from(work.is_some());
        work
    }

    /// Adds what follows a get.
    fn add(&mut self, work: ThreadWork) {
        match work {
            ThreadWork::Request(_) => unreachable!("requests are submitted"),
            ThreadWork::Remove(path) if self.removals.len() < REMOVALS_MAX => {
                self.removals.push_back(path);
            }
            ThreadWork::Remove(_) => {}
            // The room for copies limits the renewals.
            ThreadWork::Renew(path, copied) => self.renewals.push_back((path, copied)),
        }
    }
}

#[derive(Debug)]
struct SharedPool {
    objects: Arc<dyn Objects>,
    arena: Arc<Arena>,
    /// The cipher, if payloads are encrypted.
    cipher: Option<Arc<dyn PayloadCipher>>,
    waker: Waker,
    renewals: Arc<Renewals>,
    queue: Mutex<Queue>,
    /// Notified once for each request, and when the pool is dropped. A thread that ends its work takes the next work
    /// itself, so that no request wakes more than one thread.
    ///
    /// No wake-up is lost. Let R be the number of pending reads, plus the pending writes that have a free thread of the
    /// writes' share. As long as a thread waits, at least R other threads are about to look into the queue:
    ///
    /// - A submitted request adds one to R at most, and its notification adds a thread that looks.
    /// - A thread that ends its work adds itself. It adds one to R at most: the share that it frees, or the one removal
    ///   or renewal that follows its get.
    /// - A thread that looks takes work whenever R is above zero, which takes at least one from R. Only with R at zero
    ///   it waits, and it looks and begins to wait under one lock.
    work: Condvar,
    /// Notified when a request has ended.
    ended: Condvar,
    stop: AtomicBool,
    last: Mutex<Results>,
}

/// The results of the last operations, with the store's own text.
#[derive(Debug, Default)]
struct Results {
    last: StoreHealth,
    /// Why the store takes no writes, until a write succeeds: reads in between do not show whether it takes them again.
    no_writes: Option<ObjectStoreError>,
}

/// A [`RemoteStore`] over a store's calls.
#[derive(Debug)]
pub struct RequestPool {
    shared: Arc<SharedPool>,
    threads: Vec<JoinHandle<()>>,
    reads_in_flight: usize,
    puts_in_flight: usize,
}

/// Whether a store can be used, by its last operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StoreHealth {
    /// No operation has ended yet.
    #[default]
    Unknown,
    /// The operation succeeded, or there was no such object.
    Good,
    /// The operation failed, or the store takes no writes.
    Failed(ObjectStoreError),
}

/// Reads the results of a pool's last operations, for the operator.
#[derive(Clone, Debug)]
pub struct LastResult(Arc<SharedPool>);

impl LastResult {
    /// The result of the last operation, or the reason why the store takes no writes.
    pub fn get(&self) -> StoreHealth {
        let results = self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        match (&results.last, &results.no_writes) {
            (StoreHealth::Unknown | StoreHealth::Good, Some(error)) => {
                StoreHealth::Failed(ObjectStoreError {
                    detail: format!("writes only: {}", error.detail),
                    ..error.clone()
                })
            }
            (last, _) => last.clone(),
        }
    }
}

impl RequestPool {
    /// Starts the threads, one of which checks the store first. `waker` is woken after each completion.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        objects: Arc<dyn Objects>,
        arena: Arc<Arena>,
        waker: Waker,
    ) -> std::io::Result<Self> {
        Self::start_with(objects, arena, waker, None)
    }

    /// Like [`RequestPool::start`]. With a cipher, objects are encrypted before they are put, and only encrypted objects
    /// are found.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start_with(
        objects: Arc<dyn Objects>,
        arena: Arc<Arena>,
        waker: Waker,
        cipher: Option<Arc<dyn PayloadCipher>>,
    ) -> std::io::Result<Self> {
        let threads = objects.parallel();
        let renewals = Renewals::new(objects.renew_rate());
        let shared = Arc::new(SharedPool {
            objects,
            arena,
            cipher,
            waker,
            renewals,
            queue: Mutex::new(Queue {
                // The first check of the store.
                running: 1,
                ..Queue::default()
            }),
            work: Condvar::new(),
            ended: Condvar::new(),
            stop: AtomicBool::new(false),
            last: Mutex::default(),
        });
        let mut pool = Self {
            shared,
            threads: Vec::with_capacity(threads),
            reads_in_flight: 0,
            puts_in_flight: 0,
        };
        for index in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("undercroft-rt{index}"))
                .spawn(move || {
                    if index == 0 {
                        shared.greet();
                    }
                    shared.work();
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Waits for the end of the store's first check, whatever its result. Nothing is submitted yet.
    pub(crate) fn wait_for_first_check(&self) {
        let queue = self.shared.lock();
        let ended = &self.shared.ended;
        drop(ended.wait_while(queue, |queue| queue.running > 0));
    }

    /// Reads the results of the last operations, even after the pool's end.
    pub fn last_result(&self) -> LastResult {
        LastResult(Arc::clone(&self.shared))
    }
}

impl RemoteStore for RequestPool {
    fn name(&self) -> &'static str {
        self.shared.objects.name()
    }

    /// Room for further requests. Puts that wait for the writes' share of threads do not count: they delay no read.
    fn room(&self) -> usize {
        let puts = self.puts_in_flight.min(self.shared.writes_max());
        self.threads
            .len()
            .saturating_sub(self.reads_in_flight + puts)
    }

    fn submit(&mut self, request: RemoteRequest) {
        match request {
            RemoteRequest::Put { .. } => self.puts_in_flight += 1,
            _ => self.reads_in_flight += 1,
        }
        let mut queue = self.shared.lock();
        match request {
            RemoteRequest::Probe { .. } => queue.probes.push_back(request),
            RemoteRequest::Get { .. } => queue.gets.push_back(request),
            RemoteRequest::Put { .. } => queue.puts.push_back(request),
        }
        drop(queue);
        self.shared.work.notify_one();
    }

    fn drain(&mut self, out: &mut Vec<RemoteCompletion>) {
        let mut queue = self.shared.lock();
        out.append(&mut queue.done);
        let puts = queue.puts.len() + queue.writes_running;
        let all = queue.probes.len() + queue.gets.len() + queue.puts.len() + queue.running;
        drop(queue);
        (self.puts_in_flight, self.reads_in_flight) = (puts, all - puts);
    }
}

impl Drop for RequestPool {
    /// If a call does not end in time, its own reference keeps the arena mapped.
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Relaxed);
        let mut queue = shared.lock();
        shared.work.notify_all();
        let deadline = Instant::now() + DRAIN_LIMIT;
        while queue.running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = shared.ended.wait_timeout(queue, left);
            (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        for thread in self.threads.drain(..) {
            // A panic of the thread has been reported by the panic hook.
            drop(thread.join());
        }
    }
}

impl SharedPool {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writes_max(&self) -> usize {
        (self.objects.parallel() / WRITE_SHARE).max(1)
    }

    /// A thread: one piece of work after the other, until the pool is dropped.
    fn work(&self) {
        while let Some(work) = self.next() {
            let is_write = work.is_write();
            let mut after = None;
            let done = match work {
                ThreadWork::Request(request) => {
                    let (token, is_put) = (
                        request.token(),
                        matches!(request, RemoteRequest::Put { .. }),
                    );
                    let result = contained(|| Some(self.carry_out(request, &mut after)))
                        .unwrap_or(Err(RemoteError::Unreachable.into()));
                    match is_put {
                        true => self.note_put(&result),
                        false => self.note(&result),
                    }
                    let result = result.map_err(|error| error.kind);
                    Some(RemoteCompletion { token, result })
                }
                ThreadWork::Remove(path) => {
                    // Without the permission to remove it, the object is removed when it is old.
                    contained(|| self.objects.delete(&[path]).ok());
                    None
                }
                ThreadWork::Renew(path, copied) => {
                    self.renew(&path, &copied);
                    None
                }
            };
            let mut queue = self.lock();
            queue.running -= 1;
            queue.writes_running -= usize::from(is_write);
            queue.done.extend(done);
            if let Some(after) = after {
                queue.add(after);
            }
            drop(queue);
            self.ended.notify_one();
            // There is a completion, or more room.
            self.waker.wake();
        }
    }

    /// A renewal that fails is no error: the object is removed when its time to live is over.
    fn renew(&self, path: &str, copied: &Copied) {
        if self.renewals.is_paused(Instant::now()) {
            return;
        }
        let body = ObjectBody::bytes(&copied.bytes);
        let put = contained(|| self.objects.put(path, &body, false).ok());
        if put.is_none() {
            self.renewals.pause(Instant::now());
        }
    }

    fn next(&self) -> Option<ThreadWork> {
        let mut queue = self.lock();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(work) = queue.take(self.writes_max()) {
                return Some(work);
            }
            let waited = self.work.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Carries out a request. `after` gets the work that follows the completion.
    fn carry_out(
        &self,
        request: RemoteRequest,
        after: &mut Option<ThreadWork>,
    ) -> Result<RemoteDone> {
        match request {
            RemoteRequest::Probe { keys, .. } => {
                let paths: Vec<String> = keys.iter().map(|key| self.path(key)).collect();
                Ok(RemoteDone::Present(self.objects.probe(&paths)?))
            }
            RemoteRequest::Get {
                key, expect, parts, ..
            } => {
                let path = self.path(&key);
                let (arena, stop) = (&self.arena, &self.stop);
                let mut receiver = match &self.cipher {
                    Some(cipher) => {
                        Receiver::sealed_segment(arena, (&expect, &path), &parts, stop, cipher)
                    }
                    None => Receiver::segment(arena, &expect, &parts, stop),
                };
                receiver.renewed_by(&self.renewals);
                let got = self.objects.get(&path, &mut receiver);
                let kept = receiver.take_kept();
                let sums = got.and_then(|()| receiver.finish());
                // A request waits for the answer, and not for a put or a delete.
                *after = match &sums {
                    Ok(_) => kept.map(|copied| ThreadWork::Renew(path, copied)),
                    Err(error) if error.kind == RemoteError::Corrupt => {
                        Some(ThreadWork::Remove(path))
                    }
                    Err(_) => None,
                };
                sums.map(RemoteDone::Got)
            }
            RemoteRequest::Put {
                key,
                header,
                parts,
                if_absent,
                ..
            } => {
                let path = self.path(&key);
                // The arena keeps the plain bytes, so encrypted ones need memory of their own.
                let object = match &self.cipher {
                    Some(cipher) => {
                        let sealed = seal_object((&path, &header), &parts, &self.arena, cipher);
                        Some(sealed?)
                    }
                    None => None,
                };
                let body = match &object {
                    Some(object) => ObjectBody::bytes(object.bytes()),
                    None => ObjectBody::segment(&header, &self.arena, &parts),
                };
                let stored = self.objects.put(&path, &body, if_absent)?;
                Ok(if stored {
                    RemoteDone::Stored
                } else {
                    RemoteDone::AlreadyThere
                })
            }
        }
    }

    fn path(&self, key: &ObjectKey) -> String {
        match self.cipher {
            Some(_) => key.encrypted_path(),
            None => key.path(),
        }
    }

    /// Checks whether the store answers, before there is a request: credentials may have to be fetched first.
    fn greet(&self) {
        // The first measurement of the routines takes some tens of milliseconds: here, no request waits for it.
        Routine::fastest_of_cached();
        let found = contained(|| Some(self.objects.greet()));
        self.note(&found.unwrap_or(Err(RemoteError::Unreachable.into())));
        self.lock().running -= 1;
        self.ended.notify_one();
    }

    fn note<T>(&self, result: &Result<T>) {
        use RemoteError::Stopped;
        let last = match result {
            Err(error) if error.kind == Stopped => return,
            // Errors of one object do not count.
            Err(error) if !error.kind.is_of_object() => StoreHealth::Failed(error.clone()),
            _ => StoreHealth::Good,
        };
        self.results().last = last;
    }

    fn note_put(&self, result: &Result<RemoteDone>) {
        use RemoteError::{Denied, Full};
        match result {
            Err(error) if matches!(error.kind, Denied | Full) => {
                self.results().no_writes = Some(error.clone());
                return;
            }
            Ok(RemoteDone::Stored) => self.results().no_writes = None,
            _ => {}
        }
        self.note(result);
    }

    fn results(&self) -> MutexGuard<'_, Results> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
