//! The fallback where io_uring is not allowed: threads that make plain system calls.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};

use super::fault_hook::{Direct, FaultHook};
use super::operation::{Body, ERASE_MODES, IoOperation, Next, Progress};
use super::sealed::{self, SealedBuffer};
use super::waker::Wake;
use super::{DeviceFiles, IoEngine, Waker};
use crate::arena::Arena;

/// More threads for a device than this gain nothing: fewer large transfers keep the device busy.
const THREADS_MAX: usize = 16;

/// The thread-pool engine. Each device has its own threads: a device that hangs does not delay the
/// others.
#[derive(Debug)]
pub struct ThreadPool<I: FaultHook = Direct> {
    shared: Arc<PoolShared<I>>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
}

#[derive(Debug)]
struct PoolShared<I> {
    arena: Arc<Arena>,
    devices: RwLock<Vec<Arc<DeviceFiles>>>,
    fault_hook: I,
    /// For payloads that are encrypted on disk.
    cipher: Option<Arc<dyn PayloadCipher>>,
    state: Mutex<PoolState>,
    /// Signals that there is work for a device, by its index.
    work: Vec<Condvar>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    queues: Vec<DeviceQueue>,
    /// Ended operations, and the device; `None` for an operation on a device that does not exist.
    completions: Vec<(Option<usize>, IoCompletion)>,
    woken: bool,
    stop: bool,
}

#[derive(Debug, Default)]
struct DeviceQueue {
    reads: VecDeque<IoOperation>,
    others: VecDeque<IoOperation>,
    running: usize,
    /// Operations submitted whose completions were not delivered yet.
    in_flight: usize,
}

impl ThreadPool {
    /// A pool for `depth` operations in flight on each device.
    pub fn new(
        depth: usize,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
    ) -> std::io::Result<Self> {
        Self::with_fault_hook(depth, arena, devices, Direct)
    }
}

impl<I: FaultHook> ThreadPool<I> {
    /// Like [`ThreadPool::new`], with a hook for tests.
    pub fn with_fault_hook(
        depth: usize,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
        fault_hook: I,
    ) -> std::io::Result<Self> {
        Self::open(depth, arena, devices, (fault_hook, None))
    }

    /// Like [`ThreadPool::new`], with a hook for tests, and a cipher for payloads that are encrypted on disk.
    pub fn open(
        depth: usize,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
        (fault_hook, cipher): (I, Option<Arc<dyn PayloadCipher>>),
    ) -> std::io::Result<Self> {
        let (depth, count) = (depth.max(1), devices.len());
        let shared = Arc::new(PoolShared {
            arena,
            devices: RwLock::new(devices.into_iter().map(Arc::new).collect()),
            fault_hook,
            cipher,
            state: Mutex::new(PoolState {
                queues: (0..count).map(|_| DeviceQueue::default()).collect(),
                ..PoolState::default()
            }),
            work: (0..count).map(|_| Condvar::new()).collect(),
            done: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            depth,
        };
        for device in 0..count {
            for index in 0..depth.min(THREADS_MAX) {
                let shared = Arc::clone(&pool.shared);
                let thread = std::thread::Builder::new()
                    .name(format!("undercroft-io{device}-{index}"))
                    .spawn(move || shared.work(device))?;
                pool.threads.push(thread);
            }
        }
        Ok(pool)
    }
}

impl<I: FaultHook> IoEngine for ThreadPool<I> {
    fn arena(&self) -> &Arc<Arena> {
        &self.shared.arena
    }

    fn name(&self) -> &'static str {
        "thread_pool"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        self.arena().release(offset, len)
    }

    fn in_flight(&self) -> usize {
        let state = self.shared.lock();
        let nowhere = state.completions.iter().filter(|(of, _)| of.is_none());
        let of_devices: usize = state.queues.iter().map(|queue| queue.in_flight).sum();
        of_devices + nowhere.count()
    }

    fn room(&self, device: u16) -> usize {
        let state = self.shared.lock();
        let queue = state.queues.get(usize::from(device));
        queue.map_or(0, |queue| self.depth.saturating_sub(queue.in_flight))
    }

    fn replace_files(&mut self, device: u16, files: DeviceFiles) -> std::io::Result<()> {
        let devices = self.shared.devices.write();
        let mut devices = devices.unwrap_or_else(PoisonError::into_inner);
        devices[usize::from(device)] = Arc::new(files);
        Ok(())
    }

    fn submit(&mut self, request: IoRequest) {
        let (token, device) = (request.token(), usize::from(request.device()));
        let operation = IoOperation::new(request, &self.shared.arena, self.shared.devices().len());
        let mut state = self.shared.lock();
        let queue = state.queues.get_mut(device);
        let has_room = queue.as_ref().is_none_or(|of| of.in_flight < self.depth);
        let fault = match (operation, queue) {
            (Ok(operation), Some(queue)) if has_room => {
                queue.in_flight += 1;
                if operation.is_read() {
                    queue.reads.push_back(operation);
                } else {
                    queue.others.push_back(operation);
                }
                drop(state);
                return self.shared.work[device].notify_one();
            }
            (Err(fault), _) if has_room => fault,
            _ => IoFault::Os(Errno::BUSY.raw_os_error()),
        };
        let of = state.queues.get_mut(device).map(|queue| {
            queue.in_flight += 1;
            device
        });
        let result = Err(fault);
        state.completions.push((of, IoCompletion { token, result }));
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.shared.lock();
        while state.completions.is_empty() && !state.woken {
            state =
                match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                    None => self
                        .shared
                        .done
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner),
                    Some(Duration::ZERO) => break,
                    Some(left) => {
                        self.shared
                            .done
                            .wait_timeout(state, left)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                };
        }
        state.woken = false;
        for (device, completion) in std::mem::take(&mut state.completions) {
            if let Some(device) = device {
                state.queues[device].in_flight -= 1;
            }
            out.push(completion);
        }
    }

    fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.shared) as Arc<dyn Wake>)
    }
}

impl<I: FaultHook> Wake for PoolShared<I> {
    fn wake(&self) {
        self.lock().woken = true;
        self.done.notify_one();
    }
}

impl<I: FaultHook> Drop for ThreadPool<I> {
    /// Waits for operations under way.
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.iter().for_each(Condvar::notify_all);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // Wakers keep the rest alive.
        let devices = self.shared.devices.write();
        devices.unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl<I: FaultHook> PoolShared<I> {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The main loop of one thread of a device.
    fn work(&self, device: usize) {
        let mut buffer = SealedBuffer::new();
        let mut state = self.lock();
        while !state.stop {
            let queue = &mut state.queues[device];
            let Some(operation) = queue.reads.pop_front().or_else(|| queue.others.pop_front())
            else {
                state = self.work[device]
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.running += 1;
            drop(state);
            let result = self.carry_out(&operation, &mut buffer);
            state = self.lock();
            state.queues[device].running -= 1;
            let token = operation.token;
            let completion = IoCompletion { token, result };
            state.completions.push((Some(device), completion));
            self.done.notify_one();
        }
    }

    fn devices(&self) -> RwLockReadGuard<'_, Vec<Arc<DeviceFiles>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(
        &self,
        operation: &IoOperation,
        buffer: &mut SealedBuffer,
    ) -> Result<u64, IoFault> {
        let device = Arc::clone(&self.devices()[usize::from(operation.device)]);
        let file = device.get(operation.file);
        if operation.is_erasure() {
            repeat(&mut Progress::new(0), false, |_, _| {
                self.erase(operation, file)
            })?;
            return Ok(0);
        }
        if let Body::Sync = operation.body {
            repeat(&mut Progress::new(0), false, |_, _| {
                self.sync(operation, file)
            })?;
            return Ok(0);
        }
        if let Body::Sealed { .. } = operation.body {
            return self.carry_out_sealed(operation, file, buffer);
        }
        let source = operation.source_checksum(&self.arena);
        let mut progress = Progress::new(operation.len);
        repeat(&mut progress, operation.is_read(), |done, len| {
            self.transfer(operation, file, done, len)
        })?;
        if operation.syncs() {
            // A sync moves no bytes: it either succeeds or fails as a whole.
            repeat(&mut Progress::new(0), false, |_, _| {
                self.sync(operation, file)
            })?;
        }
        operation.verify(&self.arena, source)
    }

    fn carry_out_sealed(
        &self,
        operation: &IoOperation,
        file: BorrowedFd<'_>,
        buffer: &mut SealedBuffer,
    ) -> Result<u64, IoFault> {
        let Some(cipher) = &self.cipher else {
            return Err(IoFault::Os(Errno::INVAL.raw_os_error()));
        };
        let reads = operation.is_read();
        sealed::carry_out(operation, (&self.arena, cipher), buffer, |bytes| {
            repeat(&mut Progress::new(operation.len), reads, |done, len| {
                let at = operation.file_offset + u64::from(done);
                let verdict = self.fault_hook.on_call(&operation.call(at, len));
                let end = done + verdict.issued(len)?;
                let range = done as usize..end as usize;
                sealed::call(file, (reads, at), bytes, range, verdict)
            })
        })
    }

    fn transfer(
        &self,
        operation: &IoOperation,
        file: BorrowedFd<'_>,
        done: u32,
        len: u32,
    ) -> Result<u32, Errno> {
        let at = operation.file_offset + u64::from(done);
        let verdict = self.fault_hook.on_call(&operation.call(at, len));
        let len = verdict.issued(len)?;
        let moved = match &operation.body {
            Body::Read { arena_offset, .. } => {
                self.arena
                    .pread(file, at, arena_offset + u64::from(done), u64::from(len))?
            }
            Body::Write { arena_offset, .. } => {
                self.arena
                    .pwrite(file, at, arena_offset + u64::from(done), u64::from(len))?
            }
            Body::Meta { buffer, .. } => {
                rustix::io::pwrite(file, &buffer.rest(done)[..len as usize], at)?
            }
            Body::Sealed { .. } | Body::Erase { .. } | Body::Sync => return Err(Errno::INVAL),
        };
        operation.flip(&self.arena, done, verdict);
        Ok(verdict.reported(moved as u32))
    }

    fn erase(&self, operation: &IoOperation, file: BorrowedFd<'_>) -> Result<u32, Errno> {
        let (at, len) = (operation.file_offset, operation.len);
        let verdict = self.fault_hook.on_call(&operation.call(at, len));
        verdict.issued(len)?;
        let mut erased = Err(Errno::OPNOTSUPP);
        for mode in &ERASE_MODES[usize::from(operation.erase_modes_skipped())..] {
            if erased == Err(Errno::OPNOTSUPP) {
                let mode = FallocateFlags::from_bits_retain(*mode);
                erased = rustix::fs::fallocate(file, mode, at, u64::from(len));
            }
        }
        erased.map(|()| 0)
    }

    fn sync(&self, operation: &IoOperation, file: BorrowedFd<'_>) -> Result<u32, Errno> {
        let verdict = self.fault_hook.on_call(&operation.sync_call());
        verdict.issued(0)?;
        rustix::fs::fdatasync(file).map(|()| 0)
    }
}

/// Calls the function with (bytes done, bytes left) until all bytes were moved.
fn repeat(
    progress: &mut Progress,
    reading: bool,
    mut call: impl FnMut(u32, u32) -> Result<u32, Errno>,
) -> Result<(), IoFault> {
    loop {
        let outcome = call(progress.done(), progress.remaining());
        match progress.advance(outcome, reading) {
            Next::Again => {}
            Next::Done => return Ok(()),
            Next::Failed(fault) => return Err(fault),
        }
    }
}
