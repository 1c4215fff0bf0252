//! Injected faults, for tests: below the retry logic of the real engines ([`Script`], [`Noise`]),
//! and above the retry logic ([`FaultEngine`], a device that hangs or fails).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};

use super::fault_hook::{Call, CallKind, FaultHook, Verdict};
use super::{DeviceFiles, IoEngine, Waker};
use crate::arena::Arena;

/// Verdicts for calls, in order: each verdict is for the next call of its kind, and calls of other kinds
/// pass meanwhile. Records every call. Clones share the script.
#[derive(Clone, Debug, Default)]
pub struct Script(Arc<Mutex<ScriptState>>);

#[derive(Debug, Default)]
struct ScriptState {
    verdicts: VecDeque<(CallKind, Verdict)>,
    calls: Vec<Call>,
}

impl Script {
    /// Appends verdicts for calls of one kind.
    #[must_use]
    pub fn then(self, kind: CallKind, verdicts: impl IntoIterator<Item = Verdict>) -> Self {
        self.lock()
            .verdicts
            .extend(verdicts.into_iter().map(|verdict| (kind, verdict)));
        self
    }

    /// The calls of one kind so far.
    pub fn calls(&self, kind: CallKind) -> Vec<Call> {
        self.lock()
            .calls
            .iter()
            .copied()
            .filter(|call| call.kind == kind)
            .collect()
    }

    /// Whether every verdict has been given.
    pub fn is_used_up(&self) -> bool {
        self.lock().verdicts.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, ScriptState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultHook for Script {
    fn on_call(&self, call: &Call) -> Verdict {
        let mut state = self.lock();
        state.calls.push(*call);
        let due = state
            .verdicts
            .front()
            .is_some_and(|(kind, _)| *kind == call.kind);
        let next = if due {
            state.verdicts.pop_front()
        } else {
            None
        };
        next.map_or(Verdict::Pass, |(_, verdict)| verdict)
    }
}

/// Rates of faults, in calls of a thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// A transfer moves only a part, of any length.
    pub short: u32,
    /// EINTR or EAGAIN.
    pub interrupted: u32,
    /// EIO on a read.
    pub read_error: u32,
    /// EIO, ENOSPC or EROFS on a write or sync.
    pub write_error: u32,
    /// A flipped bit in the bytes of a read.
    pub flip: u32,
}

/// Faults at random, from a seed.
#[derive(Debug)]
pub struct Noise {
    rates: FaultRates,
    state: AtomicU64,
}

impl Noise {
    /// The same seed gives the same faults for the same sequence of calls.
    pub fn new(seed: u64, rates: FaultRates) -> Self {
        Self {
            rates,
            state: AtomicU64::new(seed),
        }
    }

    /// SplitMix64.
    fn random(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = self
            .state
            .fetch_add(STEP, Ordering::Relaxed)
            .wrapping_add(STEP);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&self, per_thousand: u32) -> bool {
        self.random() % 1000 < u64::from(per_thousand)
    }

    fn pick(&self, errnos: &[Errno]) -> Verdict {
        let index = self.random() as usize % errnos.len();
        Verdict::Fail(errnos[index].raw_os_error())
    }
}

impl FaultHook for Noise {
    fn on_call(&self, call: &Call) -> Verdict {
        let reading = call.kind == CallKind::Read;
        if self.happens(self.rates.interrupted) {
            return self.pick(&[Errno::INTR, Errno::AGAIN]);
        }
        if reading && self.happens(self.rates.read_error) {
            return self.pick(&[Errno::IO]);
        }
        if !reading && self.happens(self.rates.write_error) {
            return self.pick(&[Errno::IO, Errno::NOSPC, Errno::ROFS]);
        }
        if call.len > 0 && self.happens(self.rates.short) {
            return Verdict::Short(1 + (self.random() % u64::from(call.len)) as u32);
        }
        if reading && self.happens(self.rates.flip) {
            let at = (self.random() % u64::from(call.len)) as u32;
            return Verdict::Flip {
                at,
                mask: 1 << (self.random() % 8),
            };
        }
        Verdict::Pass
    }
}

/// An engine whose device can be made to hang or to fail, by its [`FaultControl`].
#[derive(Debug)]
pub struct FaultEngine<E> {
    inner: E,
    control: Arc<SharedFaults>,
    /// The device of each operation in flight, by its token.
    devices: HashMap<u64, u16>,
    held: Vec<IoCompletion>,
    /// Reads of a slow device: when each read may end, by its token, and when the last read ends.
    due: HashMap<u64, Instant>,
    busy_until: Option<Instant>,
    /// Number of changes of the rate when these times were set.
    read_rates: u64,
}

/// A read of a device that hangs ends after this time if the test does not release it.
const HANG: Duration = Duration::from_secs(3600);

/// Controls a [`FaultEngine`] from any thread.
#[derive(Clone, Debug)]
pub struct FaultControl {
    control: Arc<SharedFaults>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct SharedFaults(Mutex<Faults>);

#[derive(Clone, Debug, Default)]
struct Faults {
    hold: bool,
    held_devices: BTreeSet<u16>,
    read_rate: Option<f64>,
    /// How often the rate was changed.
    read_rates: u64,
    reads: Option<i32>,
    writes: Option<i32>,
}

impl SharedFaults {
    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: IoEngine> FaultEngine<E> {
    /// An engine without faults at first, and its control.
    pub fn new(inner: E) -> (Self, FaultControl) {
        let control = Arc::new(SharedFaults::default());
        let handle = FaultControl {
            control: Arc::clone(&control),
            waker: inner.waker(),
        };
        (
            Self {
                inner,
                control,
                devices: HashMap::new(),
                held: Vec::new(),
                due: HashMap::new(),
                busy_until: None,
                read_rates: 0,
            },
            handle,
        )
    }

    /// Forgets the times of the reads so far if the rate was changed since they were set.
    fn obey_new_rate(&mut self, changes: u64) {
        if std::mem::replace(&mut self.read_rates, changes) != changes {
            self.due.clear();
            self.busy_until = None;
            // Completions that were held back are there for the next wait.
            self.inner.waker().wake();
        }
    }

    /// Operations of a device that have ended and are held back.
    fn held_of(&self, device: u16) -> usize {
        let held = self.held.iter();
        held.filter(|completion| self.devices.get(&completion.token) == Some(&device))
            .count()
    }
}

impl FaultControl {
    /// From now on no operation completes.
    pub fn hang(&self) {
        self.control.lock().hold = true;
    }

    /// From now on no operation of one device completes.
    pub fn hang_device(&self, device: u16) {
        self.control.lock().held_devices.insert(device);
    }

    /// Operations that were held back complete, and so do all later operations.
    pub fn release(&self) {
        let mut faults = self.control.lock();
        faults.hold = false;
        faults.held_devices.clear();
        drop(faults);
        self.waker.wake();
    }

    /// From now on reads of all devices together end at this rate in bytes a second; at 0 no read ends. `None`: no
    /// limit.
    pub fn limit_reads(&self, bytes_per_s: Option<f64>) {
        let mut faults = self.control.lock();
        faults.read_rate = bytes_per_s;
        faults.read_rates += 1;
        drop(faults);
        self.waker.wake();
    }

    /// Reads complete with this error number from now on, or normally again.
    pub fn fail_reads(&self, errno: Option<i32>) {
        self.control.lock().reads = errno;
    }

    /// Writes complete with this error number from now on, or normally again.
    pub fn fail_writes(&self, errno: Option<i32>) {
        self.control.lock().writes = errno;
    }
}

impl<E: IoEngine> IoEngine for FaultEngine<E> {
    fn arena(&self) -> &Arc<Arena> {
        self.inner.arena()
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        self.inner.release_memory(offset, len)
    }

    fn replace_files(&mut self, device: u16, files: DeviceFiles) -> std::io::Result<()> {
        self.inner.replace_files(device, files)
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn room(&self, device: u16) -> usize {
        self.inner.room(device).saturating_sub(self.held_of(device))
    }

    fn submit(&mut self, request: IoRequest) {
        let faults = self.control.lock().clone();
        // Before this request gets its time: a wait that saw the change only later would let it end at once.
        self.obey_new_rate(faults.read_rates);
        let held = self.held_of(request.device());
        let is_full = held > 0 && self.room(request.device()) == 0;
        self.devices.insert(request.token(), request.device());
        let fault = if request.is_read() {
            faults.reads
        } else {
            faults.writes
        };
        let token = request.token();
        let read_len = match &request {
            IoRequest::ReadPayload { len, .. } => Some(*len),
            IoRequest::Sealed(of) => of.reads.then_some(of.len),
            _ => None,
        };
        if let (Some(rate), Some(len)) = (faults.read_rate, read_len) {
            let now = Instant::now();
            let takes = Duration::try_from_secs_f64(f64::from(len) / rate);
            let takes = takes.unwrap_or(HANG).min(HANG);
            let due = self.busy_until.map_or(now, |until| until.max(now)) + takes;
            self.busy_until = Some(due);
            self.due.insert(token, due);
        }
        match fault {
            Some(errno) => {
                self.held.push(IoCompletion {
                    token,
                    result: Err(IoFault::Os(errno)),
                });
                // The completion is there for the next wait.
                self.inner.waker().wake();
            }
            // Operations held back count as in flight, as they would in a real device.
            None if is_full => {
                let result = Err(IoFault::Os(Errno::BUSY.raw_os_error()));
                self.held.push(IoCompletion { token, result });
                self.inner.waker().wake();
            }
            None => self.inner.submit(request),
        }
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        let changes = self.control.lock().read_rates;
        self.obey_new_rate(changes);
        let left = |due: &Instant| due.saturating_duration_since(Instant::now());
        let held = self.held.iter();
        let first = held
            .filter_map(|of| self.due.get(&of.token))
            .map(left)
            .min();
        let timeout = match (timeout, first) {
            (Some(timeout), Some(first)) => Some(timeout.min(first)),
            (timeout, first) => timeout.or(first),
        };
        self.inner.wait(timeout, &mut self.held);
        let (now, due) = (Instant::now(), &mut self.due);
        let faults = self.control.lock().clone();
        let devices = &mut self.devices;
        out.extend(self.held.extract_if(.., |completion| {
            let device = devices.get(&completion.token);
            let is_held = device.is_some_and(|device| faults.held_devices.contains(device));
            let is_early = due.get(&completion.token).is_some_and(|&due| due > now);
            let ends = !faults.hold && !is_held && !is_early;
            if ends {
                devices.remove(&completion.token);
                due.remove(&completion.token);
            }
            ends
        }));
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}

impl<E: IoEngine + ?Sized> IoEngine for Box<E> {
    fn arena(&self) -> &Arc<Arena> {
        (**self).arena()
    }

    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        (**self).release_memory(offset, len)
    }

    fn replace_files(&mut self, device: u16, files: DeviceFiles) -> std::io::Result<()> {
        (**self).replace_files(device, files)
    }

    fn depth(&self) -> usize {
        (**self).depth()
    }

    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }

    fn room(&self, device: u16) -> usize {
        (**self).room(device)
    }

    fn submit(&mut self, request: IoRequest) {
        (**self).submit(request);
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        (**self).wait(timeout, out);
    }

    fn waker(&self) -> Waker {
        (**self).waker()
    }
}
