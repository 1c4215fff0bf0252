//! The io_uring engine: one ring, used by one thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use undercroft_contract::io::{FileKind, IoCompletion, IoFault, IoRequest};

use super::fault_hook::{Direct, FaultHook, Verdict};
use super::in_flight::{Active, Lane, Queues, RingPiece, Slot, file_index, parts, user_data};
use super::operation::{Body, ERASE_MODES, IoOperation, Next, Progress, Summing};
use super::ring::{Buffer, REFUSAL_PAUSE, Ring, RingTransfer, WAKE};
use super::waker::{EventWake, Wake};
use super::{DeviceFiles, IoEngine, IoFeatures, SPLIT, Waker};
use crate::arena::Arena;

/// Largest depth of a device.
const DEPTH_MAX: usize = 4096;

/// Most operations of all devices together. Slots are numbered with 16 bits, and there are twice as many as operations.
const OPERATIONS_MAX: usize = 1 << 14;

/// Entries in the kernel for each operation of the depth: room for the pieces of most payloads.
const ENTRIES_PER_OPERATION: usize = 4;

/// How many bytes one `wait` verifies before it returns, so that the caller can keep the device busy
/// meanwhile.
const VERIFY_BYTES: u64 = 512 << 10;

/// How many bytes of a write are added to its checksum before the ring is looked at again:
/// completions meanwhile leave the device with less to do.
const SUM_BYTES: u32 = 128 << 10;

/// The ring counts as broken when the kernel has refused calls this often in a row.
const REFUSALS_MAX: u32 = 100;

/// Instead of the number of a piece: denotes the sync after the transfer.
const SYNC: u16 = u16::MAX;

/// The files of a device, in the order in which they are registered.
const KINDS: [FileKind; 3] = [FileKind::Super, FileKind::Table, FileKind::Data];

/// The io_uring engine.
#[derive(Debug)]
pub struct Uring<I: FaultHook = Direct> {
    ring: Ring,
    arena: Arc<Arena>,
    devices: Vec<DeviceFiles>,
    fault_hook: I,
    depth: usize,
    in_flight: usize,
    /// For each device twice as many as the depth: a device must not wait while reads wait for
    /// verification.
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Lanes by index of the device: a device that hangs does not delay the others.
    lanes: Vec<Lane>,
    queues: Queues,
    wake: ArmedWake,
    refusals: u32,
}

/// The eventfd that ends a wait, and whether the ring polls it.
#[derive(Debug)]
struct ArmedWake {
    event: Arc<EventWake>,
    armed: bool,
}

/// Features that the kernel may refuse.
#[derive(Debug)]
pub(super) struct UringParts {
    ring: Ring,
    wake: EventWake,
    depth: usize,
}

impl UringParts {
    /// A ring with the files of all devices registered, for `depth` operations of each.
    pub(super) fn open(
        depth: usize,
        arena: &Arc<Arena>,
        devices: &[DeviceFiles],
    ) -> std::io::Result<Self> {
        let count = devices.len().max(1);
        let depth = depth.clamp(1, DEPTH_MAX).min(OPERATIONS_MAX / count);
        let files: Vec<_> = devices
            .iter()
            .flat_map(|device| KINDS.map(|kind| device.get(kind)))
            .collect();
        // One more entry for the waker.
        let entries = (count * depth * ENTRIES_PER_OPERATION) as u32 + 1;
        let ring = Ring::new(entries, &files, Arc::clone(arena), true)?;
        let wake = EventWake::new()?;
        Ok(Self { ring, wake, depth })
    }
}

impl Uring {
    /// A ring for `depth` operations in flight on each device (at most 4096, and 16384 of all
    /// devices together). Fails where the kernel does not allow io_uring or is too old.
    pub fn new(
        depth: usize,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
    ) -> std::io::Result<Self> {
        Self::with_fault_hook(depth, arena, devices, Direct)
    }
}

impl<I: FaultHook> Uring<I> {
    /// Like [`Uring::new`], with a hook for tests.
    pub fn with_fault_hook(
        depth: usize,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
        fault_hook: I,
    ) -> std::io::Result<Self> {
        let parts = UringParts::open(depth, &arena, &devices)?;
        Ok(Self::over(parts, arena, devices, fault_hook))
    }

    /// An engine over a ring opened for the same arena and devices.
    pub(super) fn over(
        parts: UringParts,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
        fault_hook: I,
    ) -> Self {
        let UringParts { ring, wake, depth } = parts;
        let count = devices.len();
        let slots = 2 * depth * count;
        Self {
            ring,
            arena,
            devices,
            fault_hook,
            depth,
            in_flight: 0,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            // There are at most twice OPERATIONS_MAX slots.
            free: (0..slots as u16).rev().collect(),
            lanes: (0..count).map(|_| Lane::new(depth)).collect(),
            queues: Queues {
                unsummed: VecDeque::new(),
                summing: Summing::default(),
                ended: VecDeque::new(),
                refused: Vec::new(),
            },
            wake: ArmedWake {
                event: Arc::new(wake),
                armed: false,
            },
            refusals: 0,
        }
    }

    /// The features that the kernel granted.
    pub fn features(&self) -> IoFeatures {
        IoFeatures {
            engine: self.name(),
            o_direct: self.devices.iter().all(|device| device.o_direct),
            registered_buffers: self.ring.registered() > 0,
            fallback: None,
        }
    }

    fn start(&mut self, index: u16, operation: IoOperation) {
        let len = operation.len;
        let moved = if operation.is_transfer() { len } else { 0 };
        let pieces: Vec<_> = (0..moved)
            .step_by(SPLIT as usize)
            .map(|start| RingPiece {
                start,
                progress: Progress::new(SPLIT.min(len - start)),
                verdict: Verdict::Pass,
            })
            .collect();
        let count = pieces.len() as u16;
        let lane = &mut self.lanes[usize::from(operation.device)];
        lane.moving += 1;
        lane.slots += 1;
        if operation.is_payload_write() {
            lane.batch.push(index, count, len);
            let epoch = self.slots[usize::from(index)].epoch;
            let is_given = operation.given_checksum().is_some();
            (self.queues.unsummed).extend((!is_given).then_some((epoch, index)));
        } else if !operation.is_transfer() {
            lane.ready
                .push_back((index, SYNC - operation.erase_modes_skipped()));
        } else {
            lane.ready.extend((0..count).map(|piece| (index, piece)));
        }
        self.slots[usize::from(index)].active = Some(Active {
            source: operation.given_checksum(),
            operation,
            unfinished: pieces.len().max(1),
            pieces,
            tail: Progress::new(0),
            synced: false,
            fault: None,
        });
    }

    /// Moves pieces of all devices to the ring.
    fn push_ready(&mut self) {
        for device in 0..self.lanes.len() {
            self.push_ready_of(device);
        }
    }

    /// Moves pieces of a device to the ring while the ring has room.
    fn push_ready_of(&mut self, device: usize) {
        let entries_max = self.depth * ENTRIES_PER_OPERATION;
        let lane = &mut self.lanes[device];
        lane.batch.release(&mut lane.ready);
        while self.lanes[device].entries < entries_max
            && let Some((index, piece)) = self.lanes[device].ready.pop_front()
        {
            if !self.ring.has_room() {
                self.submit_queued();
            }
            if !self.ring.has_room() {
                self.lanes[device].ready.push_front((index, piece));
                return;
            }
            self.push(index, piece);
        }
    }

    fn push(&mut self, index: u16, number: u16) {
        let slot = &mut self.slots[usize::from(index)];
        let Some(active) = &mut slot.active else {
            return;
        };
        let user_data = user_data(slot.epoch, index, number);
        let operation = &active.operation;
        let lane = &mut self.lanes[usize::from(operation.device)];
        let file = file_index(operation);
        if active.fault.is_some() {
            // The remaining pieces of a failed operation are not transferred.
            return self.finish_piece(index);
        }
        let Some(piece) = active.pieces.get_mut(usize::from(number)) else {
            let call = match operation.is_erasure() {
                true => operation.call(operation.file_offset, operation.len),
                false => operation.sync_call(),
            };
            match self.fault_hook.on_call(&call).issued(call.len) {
                Ok(_) if operation.is_erasure() => {
                    lane.entries += 1;
                    // The numbers below that of a sync stand for the ways to erase, which are tried one after the
                    // other.
                    let mode = ERASE_MODES[usize::from(SYNC - number)];
                    let range = (operation.file_offset, operation.len);
                    self.ring.push_erasure(file, range, mode, user_data);
                }
                Ok(_) => {
                    lane.entries += 1;
                    self.ring.push_sync(file, user_data);
                }
                Err(errno) => self.advance(index, number, Err(errno)),
            }
            return;
        };
        // The kernel may have transferred a part, so the rest is asked for.
        let done = piece.start + piece.progress.done();
        let at = operation.file_offset + u64::from(done);
        let call = operation.call(at, piece.progress.remaining());
        piece.verdict = self.fault_hook.on_call(&call);
        let len = match piece.verdict.issued(call.len) {
            Ok(len) => len,
            Err(errno) => return self.advance(index, number, Err(errno)),
        };
        let buffer = match &operation.body {
            Body::Read { arena_offset, .. } | Body::Write { arena_offset, .. } => {
                Buffer::Arena(arena_offset + u64::from(done))
            }
            Body::Meta { buffer, .. } => Buffer::Metadata(Arc::clone(buffer), done),
            Body::Sealed { .. } | Body::Erase { .. } | Body::Sync => {
                return self.finish_piece(index);
            }
        };
        let transfer = RingTransfer {
            reading: operation.is_read(),
            file,
            file_offset: call.file_offset,
            buffer,
            len,
        };
        lane.entries += 1;
        self.ring.push_transfer(transfer, user_data);
    }

    /// Takes all completions of the ring.
    fn reap(&mut self) {
        while let Some((user_data, outcome)) = self.ring.reap() {
            if user_data == WAKE {
                self.wake.armed = false;
                self.wake.event.reset();
                continue;
            }
            let (epoch, index, piece) = parts(user_data);
            let slot = self.slots.get(usize::from(index));
            if let Some(slot) = slot.filter(|slot| slot.epoch == epoch)
                && let Some(active) = &slot.active
            {
                self.lanes[usize::from(active.operation.device)].entries -= 1;
                self.advance(index, piece, outcome);
            }
        }
    }

    /// Continues an operation after the outcome of one call.
    fn advance(&mut self, index: u16, number: u16, outcome: Result<u32, Errno>) {
        let Some(active) = &mut self.slots[usize::from(index)].active else {
            return;
        };
        let reading = active.operation.is_read();
        if active.operation.is_erasure() && number == SYNC && outcome == Err(Errno::OPNOTSUPP) {
            let device = usize::from(active.operation.device);
            return self.lanes[device].ready.push_back((index, SYNC - 1));
        }
        let next = match active.pieces.get_mut(usize::from(number)) {
            Some(piece) => {
                let done = piece.start + piece.progress.done();
                if outcome.is_ok() {
                    active.operation.flip(&self.arena, done, piece.verdict);
                }
                piece
                    .progress
                    .advance(outcome.map(|moved| piece.verdict.reported(moved)), reading)
            }
            None => active.tail.advance(outcome, reading),
        };
        match next {
            Next::Again => {
                let device = usize::from(active.operation.device);
                self.lanes[device].ready.push_back((index, number));
            }
            Next::Done => self.finish_piece(index),
            Next::Failed(fault) => {
                active.fault.get_or_insert(fault);
                self.finish_piece(index);
            }
        }
    }

    fn finish_piece(&mut self, index: u16) {
        let Some(active) = &mut self.slots[usize::from(index)].active else {
            return;
        };
        active.unfinished -= 1;
        if active.unfinished > 0 {
            return;
        }
        let lane = &mut self.lanes[usize::from(active.operation.device)];
        if active.fault.is_none() && active.operation.syncs() && !active.synced {
            active.synced = true;
            active.unfinished = 1;
            lane.ready.push_back((index, SYNC));
        } else {
            if active.operation.is_payload_write() {
                lane.batch.ended(active.operation.len);
            }
            lane.moving -= 1;
            self.queues.ended.push_back(index);
        }
    }

    /// Continues the checksums of the writes in flight. False if there is nothing to compute.
    fn sum(&mut self) -> bool {
        let Some(&(_, index)) = self.queues.unsummed.front() else {
            return false;
        };
        // The first write was not delivered yet: `deliver` runs before and removes delivered writes from the front.
        if let Some(active) = &mut self.slots[usize::from(index)].active
            && active
                .operation
                .sum(&self.arena, &mut self.queues.summing, SUM_BYTES)
        {
            active.source = Some(self.queues.summing.finish());
            self.next_sum();
        }
        true
    }

    fn next_sum(&mut self) {
        self.queues.unsummed.pop_front();
        self.queues.summing = Summing::default();
    }

    /// Delivers ended operations, verifying no more than [`VERIFY_BYTES`] or one payload.
    fn deliver(&mut self, out: &mut Vec<IoCompletion>) {
        let before = out.len();
        out.append(&mut self.queues.refused);
        let mut verified = 0;
        while verified < VERIFY_BYTES
            && let Some(index) = self.queues.ended.pop_front()
        {
            let slot = &mut self.slots[usize::from(index)];
            let Some(Active {
                operation,
                source,
                fault,
                ..
            }) = slot.active.take()
            else {
                continue;
            };
            slot.epoch = slot.epoch.wrapping_add(1);
            self.free.push(index);
            self.lanes[usize::from(operation.device)].slots -= 1;
            let result = match fault {
                Some(fault) => Err(fault),
                None => {
                    if operation.is_read() || source.is_none() {
                        verified += u64::from(operation.len);
                    }
                    let source = source.unwrap_or_else(|| operation.source_checksum(&self.arena));
                    operation.verify(&self.arena, source)
                }
            };
            out.push(IoCompletion {
                token: operation.token,
                result,
            });
        }
        self.in_flight -= out.len() - before;
        // Removes writes that were delivered before their checksums' turn.
        while let Some(&(epoch, index)) = self.queues.unsummed.front()
            && self.slots[usize::from(index)].epoch != epoch
        {
            self.next_sum();
        }
    }

    /// Submits the queued entries and takes the completions, without waiting.
    fn submit_queued(&mut self) {
        let outcome = self.ring.submit();
        self.note(outcome);
    }

    fn enter(&mut self, timeout: Option<Duration>) {
        let outcome = self.ring.enter(timeout);
        if self.note(outcome) {
            return;
        }
        // Avoids spinning while the kernel refuses. The waker still ends the pause.
        let _ = poll(
            &mut [PollFd::from_borrowed_fd(
                self.wake.event.fd(),
                PollFlags::IN,
            )],
            Some(&REFUSAL_PAUSE),
        );
        if let (Some(errno), true) = (outcome.err(), self.is_broken()) {
            for device in 0..self.lanes.len() {
                let lane = &mut self.lanes[device];
                lane.batch.release_all(&mut lane.ready);
                for (index, piece) in std::mem::take(&mut lane.ready) {
                    self.advance(index, piece, Err(errno));
                }
            }
        }
    }

    /// Whether the kernel accepted the call; counts refusals in a row.
    fn note(&mut self, outcome: Result<(), Errno>) -> bool {
        self.refusals = if outcome.is_ok() {
            0
        } else {
            self.refusals.saturating_add(1)
        };
        outcome.is_ok()
    }

    fn is_broken(&self) -> bool {
        self.refusals >= REFUSALS_MAX
    }

    fn arm_wake(&mut self) {
        if !self.wake.armed {
            if !self.ring.has_room() {
                self.submit_queued();
            }
            self.wake.armed = self.ring.push_wake(self.wake.event.fd());
        }
    }
}

impl<I: FaultHook> Drop for Uring<I> {
    /// Waits for the operations in the kernel. While they may write to the files, the directories stay locked.
    fn drop(&mut self) {
        if !self.ring.drain() {
            std::mem::forget(std::mem::take(&mut self.devices));
        }
    }
}

impl<I: FaultHook> IoEngine for Uring<I> {
    fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn room(&self, device: u16) -> usize {
        let lane = self.lanes.get(usize::from(device));
        lane.map_or(0, |lane| {
            let idle = self.depth.saturating_sub(lane.moving);
            idle.min((2 * self.depth).saturating_sub(lane.slots))
        })
    }

    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        self.ring.release_memory(offset, len)
    }

    fn replace_files(&mut self, device: u16, files: DeviceFiles) -> std::io::Result<()> {
        let first = usize::from(device) * KINDS.len();
        let new = KINDS.map(|kind| files.get(kind));
        self.ring.replace_files(first, &new)?;
        self.devices[usize::from(device)] = files;
        Ok(())
    }

    fn submit(&mut self, request: IoRequest) {
        let (token, device) = (request.token(), request.device());
        let is_known = usize::from(device) < self.lanes.len();
        let has_room = !is_known || self.room(device) > 0;
        self.in_flight += 1;
        let refusal = if self.is_broken() {
            Errno::IO
        } else {
            Errno::BUSY
        };
        let takes = has_room && !self.is_broken();
        let index = if takes { self.free.pop() } else { None };
        let operation = match index {
            Some(_) => IoOperation::plain(request, &self.arena, self.devices.len()),
            None => Err(IoFault::Os(refusal.raw_os_error())),
        };
        match (operation, index) {
            (Ok(operation), Some(index)) => {
                self.start(index, operation);
                self.push_ready_of(usize::from(device));
            }
            (outcome, index) => {
                self.free.extend(index);
                let result = outcome.map(|_| 0);
                self.queues.refused.push(IoCompletion { token, result });
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let before = out.len();
        let mut asked = false;
        loop {
            self.reap();
            // Arms the wake-up after reaping, which may have used the armed one.
            self.arm_wake();
            self.push_ready();
            // Submits before other work, since the device may be idle.
            self.submit_queued();
            self.deliver(out);
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let time_is_up = asked && left == Some(Duration::ZERO);
            if out.len() > before || self.wake.event.take() || time_is_up {
                return;
            }
            let idle = !self.sum() && !self.ring.register_more();
            if idle {
                self.enter(left);
            } else {
                self.submit_queued();
            }
            asked = idle;
        }
    }

    fn waker(&self) -> Waker {
        Waker::new(Arc::clone(&self.wake.event) as Arc<dyn Wake>)
    }
}
