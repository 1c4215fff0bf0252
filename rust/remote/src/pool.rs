//! Carries out an engine's requests: threads that make the calls of a store.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use undercroft_core::arena::Arena;
use undercroft_core::cipher::PayloadCipher;
use undercroft_core::io::Waker;
use undercroft_core::panics::contained;
use undercroft_core::remote::{
    ObjectKey, RemoteCompletion, RemoteDone, RemoteError, RemoteRequest, RemoteStore,
};

use crate::body::Body;
use crate::objects::{Objects, Result, StoreError};
use crate::receiver::Receiver;
use crate::sealed::seal_object;

/// Longest wait of a pool's drop for calls that may still access the arena.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Puts use at most one in this many threads, so that reads always have the other threads.
const PUT_SHARE: usize = 4;

/// The pending requests. Probes precede gets, and gets precede puts.
#[derive(Debug, Default)]
struct Queue {
    probes: VecDeque<RemoteRequest>,
    gets: VecDeque<RemoteRequest>,
    puts: VecDeque<RemoteRequest>,
    puts_running: usize,
    running: usize,
    done: Vec<RemoteCompletion>,
}

#[derive(Debug)]
struct Shared {
    objects: Arc<dyn Objects>,
    arena: Arc<Arena>,
    /// The cipher, if payloads are encrypted.
    cipher: Option<Arc<dyn PayloadCipher>>,
    waker: Waker,
    queue: Mutex<Queue>,
    /// Notified once for each request, and when the pool is dropped. A thread that ends a request takes the next
    /// request itself, so that no request wakes more than one thread.
    work: Condvar,
    /// Notified when a request has ended.
    ended: Condvar,
    stop: AtomicBool,
    /// The result of the last operation, with the store's own text.
    last: Mutex<Health>,
}

/// A [`RemoteStore`] over a store's calls.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    reads_in_flight: usize,
    puts_in_flight: usize,
}

/// The result of a store's last operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// No operation has ended yet.
    #[default]
    Unknown,
    /// The operation succeeded, or there was no such object.
    Good,
    /// The operation failed.
    Failed(StoreError),
}

/// Reads the result of a pool's last operation, for the operator.
#[derive(Clone, Debug)]
pub struct LastResult(Arc<Shared>);

impl LastResult {
    /// The result of the last operation.
    pub fn get(&self) -> Health {
        let last = self.0.last.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Pool {
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

    /// Like [`Pool::start`]. With a cipher, objects are encrypted before they are put, and only encrypted objects are
    /// found.
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
        let shared = Arc::new(Shared {
            objects,
            arena,
            cipher,
            waker,
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

    /// Reads the result of the last operation, even after the pool's end.
    pub fn last_result(&self) -> LastResult {
        LastResult(Arc::clone(&self.shared))
    }
}

impl RemoteStore for Pool {
    fn name(&self) -> &'static str {
        self.shared.objects.name()
    }

    /// Room for further requests. Puts that wait for the puts' share of threads do not count: they delay no read.
    fn room(&self) -> usize {
        let puts = self.puts_in_flight.min(self.shared.puts_max());
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
        let puts = queue.puts.len() + queue.puts_running;
        let all = queue.probes.len() + queue.gets.len() + queue.puts.len() + queue.running;
        drop(queue);
        (self.puts_in_flight, self.reads_in_flight) = (puts, all - puts);
    }
}

impl Drop for Pool {
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn puts_max(&self) -> usize {
        (self.objects.parallel() / PUT_SHARE).max(1)
    }

    /// A thread: one request after the other, until the pool is dropped.
    fn work(&self) {
        while let Some(request) = self.next() {
            let token = request.token();
            let is_put = matches!(request, RemoteRequest::Put { .. });
            let mut after = None;
            let result = contained(|| Some(self.carry_out(request, &mut after)))
                .unwrap_or(Err(RemoteError::Unreachable.into()));
            self.note(&result);
            let mut queue = self.lock();
            queue.running -= 1;
            queue.puts_running -= usize::from(is_put);
            let result = result.map_err(|error| error.kind);
            queue.done.push(RemoteCompletion { token, result });
            drop(queue);
            self.ended.notify_one();
            self.waker.wake();
            if let Some((path, bytes)) = after
                && !self.stop.load(Ordering::Relaxed)
            {
                // A failed renewal is no error: the object is removed when its time to live is over.
                let _ = self.objects.put(&path, &Body::bytes(&bytes), false);
            }
        }
    }

    fn next(&self) -> Option<RemoteRequest> {
        let mut queue = self.lock();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            let read = queue.probes.pop_front();
            let mut request = read.or_else(|| queue.gets.pop_front());
            if request.is_none() && queue.puts_running < self.puts_max() {
                request = queue.puts.pop_front();
                queue.puts_running += usize::from(request.is_some());
            }
            if let Some(request) = request {
                queue.running += 1;
                return Some(request);
            }
            let waited = self.work.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Carries out a request. `after` gets an object to put again.
    fn carry_out(
        &self,
        request: RemoteRequest,
        after: &mut Option<(String, Vec<u8>)>,
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
                let got = self.objects.get(&path, &mut receiver);
                let kept = receiver.take_kept();
                let sums = got.and_then(|()| receiver.finish());
                if matches!(&sums, Err(error) if error.kind == RemoteError::Corrupt) {
                    // Without the permission to remove it, the object is removed when it is old.
                    let _ = self.objects.delete(std::slice::from_ref(&path));
                }
                let sums = sums?;
                *after = kept.map(|bytes| (path, bytes));
                Ok(RemoteDone::Got(sums))
            }
            RemoteRequest::Put {
                key,
                header,
                parts,
                if_absent,
                ..
            } => {
                let path = self.path(&key);
                let object = match &self.cipher {
                    Some(cipher) => {
                        let sealed = seal_object((&path, &header), &parts, &self.arena, cipher);
                        Some(sealed?)
                    }
                    None => None,
                };
                let body = match &object {
                    Some(object) => Body::bytes(object),
                    None => Body::segment(&header, &self.arena, &parts),
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
            Err(error) if !error.kind.is_of_object() => Health::Failed(error.clone()),
            _ => Health::Good,
        };
        *(self.last.lock()).unwrap_or_else(PoisonError::into_inner) = last;
    }
}
