//! The behaviour that every IO engine must have, tested on each of them.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

mod erase;
mod given;
mod hang;
mod kernel;
mod rig;
mod sealed;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use undercroft_contract::checksum::checksum;
use undercroft_contract::io::{FileKind, IoFault, IoRequest};
use undercroft_io::arena::Arena;
use undercroft_io::fault::{FaultControl, FaultEngine, FaultRates, Noise, Script};
use undercroft_io::fault_hook::{CallKind, Verdict};
use undercroft_io::pool::ThreadPool;
use undercroft_io::uring::Uring;
use undercroft_io::{DeviceFiles, IoEngine, probe_io_uring};

use erase::{
    an_erasure_makes_a_hole_where_the_filesystem_zeroes_no_range,
    an_erasure_zeroes_the_range_and_returns_its_space_if_asked,
    endless_interruptions_of_any_call_end,
};
use given::{a_given_checksum_is_not_computed, the_checksum_covers_the_payload_only};
use kernel::{
    a_sync_of_each_file_succeeds_or_reports_its_failure,
    calls_that_fail_in_the_kernel_leave_room_for_others,
};
use rig::{ARENA, DEPTH, Open, Rig, UNIT, meta, os, pattern, read, write};

fn payloads_go_to_the_file_and_come_back(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    for (index, len) in [UNIT, 3 * UNIT, 1 << 20, (2 << 20) + UNIT]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(index as u64, len);
        let at = (index as u64) * (4 << 20);
        rig.arena.write(0, &bytes).unwrap();
        assert_eq!(rig.write(0, at, len as u32), Ok(checksum(&bytes)));
        let mut stored = vec![0; len as usize];
        rig.file("data").read_exact_at(&mut stored, at).unwrap();
        assert!(stored == bytes, "what is in the file, length {len}");
        assert_eq!(rig.read(8 << 20, at, &bytes), Ok(checksum(&bytes)));
        assert!(
            rig.arena.read(8 << 20, len).unwrap() == bytes,
            "what was read, length {len}"
        );
    }
}

fn metadata_is_written_and_synced(open: Open) {
    let script = Script::default();
    let mut rig = Rig::new(open, script.clone());
    let bytes = pattern(5, 3 * UNIT);
    assert_eq!(rig.one(meta(FileKind::Table, UNIT, &bytes, false)), Ok(0));
    assert!(script.calls(CallKind::Sync).is_empty());
    assert_eq!(rig.one(meta(FileKind::Super, 0, &bytes, true)), Ok(0));
    let sync = script.calls(CallKind::Sync);
    assert_eq!(
        sync.iter().map(|call| call.file).collect::<Vec<_>>(),
        [FileKind::Super]
    );
    for (name, at) in [("table", UNIT), ("super", 0)] {
        let mut stored = vec![0; bytes.len()];
        rig.file(name).read_exact_at(&mut stored, at).unwrap();
        assert!(stored == bytes, "{name}");
    }
}

fn a_failed_sync_fails_the_write(open: Open) {
    let fail = Verdict::Fail(Errno::IO.raw_os_error());
    let script = Script::default().then(CallKind::Sync, [fail]);
    let mut rig = Rig::new(open, script);
    let bytes = pattern(5, UNIT);
    assert_eq!(
        rig.one(meta(FileKind::Super, 0, &bytes, true)),
        os(Errno::IO)
    );
    assert_eq!(rig.one(meta(FileKind::Super, 0, &bytes, true)), Ok(0));
}

fn short_reads_are_continued(open: Open) {
    // In the middle, inside a unit, less than a unit, interrupted.
    let verdicts = [
        Verdict::Short(UNIT as u32),
        Verdict::Fail(Errno::INTR.raw_os_error()),
        Verdict::Short(2 * UNIT as u32 + 100),
        Verdict::Fail(Errno::AGAIN.raw_os_error()),
        Verdict::Short(7),
    ];
    let script = Script::default().then(CallKind::Read, verdicts);
    let mut rig = Rig::new(open, script.clone());
    let bytes = pattern(2, 16 * UNIT);
    rig.prepare(8 * UNIT, &bytes);
    assert_eq!(rig.read(UNIT, 8 * UNIT, &bytes), Ok(checksum(&bytes)));
    assert!(rig.arena.read(UNIT, 16 * UNIT).unwrap() == bytes);
    assert!(script.is_used_up());
    let calls: Vec<_> = script
        .calls(CallKind::Read)
        .iter()
        .map(|call| call.file_offset / UNIT)
        .collect();
    assert_eq!(
        calls,
        [8, 9, 9, 11, 11, 11],
        "each goes on behind the last whole unit"
    );
}

fn short_writes_are_continued(open: Open) {
    let verdicts = [
        Verdict::Short(3 * UNIT as u32),
        Verdict::Fail(Errno::INTR.raw_os_error()),
        Verdict::Short(UNIT as u32 + 1),
        Verdict::Short(0),
    ];
    for metadata in [false, true] {
        let script = Script::default().then(CallKind::Write, verdicts);
        let mut rig = Rig::new(open, script.clone());
        let bytes = pattern(3, 16 * UNIT);
        let name = if metadata {
            assert_eq!(rig.one(meta(FileKind::Table, 0, &bytes, false)), Ok(0));
            "table"
        } else {
            rig.arena.write(0, &bytes).unwrap();
            assert_eq!(rig.write(0, 0, 16 * UNIT as u32), Ok(checksum(&bytes)));
            "data"
        };
        assert!(script.is_used_up());
        assert!(std::fs::read(rig.path(name)).unwrap() == bytes, "{name}");
    }
}

fn errors_are_reported_and_pass(open: Open) {
    for errno in [Errno::IO, Errno::NOSPC, Errno::ROFS] {
        for kind in [CallKind::Read, CallKind::Write] {
            let script = Script::default().then(kind, [Verdict::Fail(errno.raw_os_error())]);
            let mut rig = Rig::new(open, script);
            let bytes = pattern(4, 2 * UNIT);
            rig.prepare(0, &bytes);
            rig.arena.write(0, &bytes).unwrap();
            let attempt = |rig: &mut Rig| match kind {
                CallKind::Read => rig.read(4 * UNIT, 0, &bytes),
                _ => rig.write(0, 0, 2 * UNIT as u32),
            };
            assert_eq!(attempt(&mut rig), os(errno));
            assert_eq!(
                attempt(&mut rig),
                Ok(checksum(&bytes)),
                "the next one works"
            );
        }
    }
}

/// EAGAIN alone, on each kind of call: the IO engine asks again for the same bytes, and its caller
/// does not notice.
fn a_busy_device_is_asked_again(open: Open) {
    let busy = || [Verdict::Fail(Errno::AGAIN.raw_os_error())];
    let script = Script::default()
        .then(CallKind::Write, busy())
        .then(CallKind::Read, busy())
        .then(CallKind::Write, busy())
        .then(CallKind::Sync, busy());
    let mut rig = Rig::new(open, script.clone());
    let bytes = pattern(3, 8 * UNIT);
    rig.arena.write(0, &bytes).unwrap();
    assert_eq!(rig.write(0, 0, bytes.len() as u32), Ok(checksum(&bytes)));
    assert_eq!(rig.read(1 << 20, 0, &bytes), Ok(checksum(&bytes)));
    let written = rig.one(meta(FileKind::Super, 0, &bytes[..4096], true));
    assert_eq!(written, Ok(0));
    assert!(script.is_used_up());
    for (kind, operations) in [
        (CallKind::Write, 2),
        (CallKind::Read, 1),
        (CallKind::Sync, 1),
    ] {
        let calls = script.calls(kind);
        assert_eq!(calls.len(), 2 * operations, "{kind:?}");
        for pair in calls.chunks(2) {
            assert_eq!(pair[0], pair[1], "{kind:?}: the same again");
        }
    }
}

fn the_end_of_the_file_is_truncated(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let bytes = pattern(6, 4 * UNIT);
    for kept in [0, 1, 100, UNIT, UNIT + 1, 4 * UNIT - 1] {
        rig.prepare(0, &bytes);
        rig.file("data").set_len(kept).unwrap();
        assert_eq!(
            rig.read(0, 0, &bytes),
            Err(IoFault::Truncated),
            "{kept} bytes kept"
        );
    }
}

fn a_flipped_bit_is_corrupt(open: Open) {
    let len = 2 << 20;
    for at in [0, 4097, len - 1] {
        let flip = Verdict::Flip {
            at: at % (128 << 10),
            mask: 0x10,
        };
        let mut rig = Rig::new(open, Script::default().then(CallKind::Read, [flip]));
        let bytes = pattern(7, u64::from(len));
        rig.prepare(0, &bytes);
        assert_eq!(rig.read(0, 0, &bytes), Err(IoFault::Corrupt), "in memory");
        assert_eq!(rig.read(0, 0, &bytes), Ok(checksum(&bytes)));
        let flipped = [bytes[at as usize] ^ 0x10];
        rig.file("data")
            .write_all_at(&flipped, u64::from(at))
            .unwrap();
        assert_eq!(
            rig.read(0, 0, &bytes),
            Err(IoFault::Corrupt),
            "on disk, at {at}"
        );
    }
}

fn impossible_requests_are_refused(open: Open) {
    let script = Script::default();
    let mut rig = Rig::new(open, script.clone());
    let unit = UNIT as u32;
    let requests = [
        write(1, 1, 0, unit),
        write(1, 0, 512, unit),
        write(1, 0, 0, 100),
        write(1, 0, 0, 0),
        write(1, ARENA, 0, unit),
        write(1, ARENA - UNIT, 0, 2 * unit),
        write(1, 0, u64::MAX - UNIT + 1, unit),
        read(1, u64::MAX - UNIT + 1, 0, unit, 0),
        IoRequest::WritePayload {
            token: 1,
            device: 1,
            file_offset: 0,
            arena_offset: 0,
            len: unit,
            payload_len: unit,
            checksum: None,
        },
        IoRequest::WritePayload {
            token: 1,
            device: 0,
            file_offset: 0,
            arena_offset: 0,
            len: unit,
            payload_len: unit + 1,
            checksum: None,
        },
        meta(FileKind::Data, 0, &[0; 4096], false),
        meta(FileKind::Table, 0, &[0; 100], false),
        meta(FileKind::Table, 0, &[], true),
    ];
    for request in requests {
        assert_eq!(rig.one(request.clone()), os(Errno::INVAL), "{request:?}");
    }
    assert!(script.calls(CallKind::Write).is_empty() && script.calls(CallKind::Read).is_empty());
}

fn more_than_the_depth_is_refused(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    assert_eq!(rig.engine.depth(), DEPTH);
    for token in 0..DEPTH as u64 + 3 {
        rig.engine
            .submit(write(token, 0, token * UNIT, UNIT as u32));
    }
    assert_eq!(rig.engine.in_flight(), DEPTH + 3);
    let mut completions = rig.drain();
    completions.sort_by_key(|completion| completion.token);
    assert_eq!(completions.len(), DEPTH + 3);
    for completion in completions {
        assert_eq!(completion.result.is_ok(), completion.token < DEPTH as u64);
    }
    assert!(
        rig.write(0, 0, UNIT as u32).is_ok(),
        "the places are free again"
    );
}

fn every_request_completes_once(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let slot = 256 << 10;
    let bytes: Vec<_> = (0..DEPTH as u64)
        .map(|index| pattern(index, slot))
        .collect();
    for round in 0..20 {
        for (index, bytes) in bytes.iter().enumerate() {
            let (index, at) = (index as u64, index as u64 * slot);
            rig.arena.write(at, bytes).unwrap();
            rig.engine
                .submit(write(round * 1000 + index, at, at, slot as u32));
        }
        let mut tokens: Vec<_> = rig
            .drain()
            .iter()
            .map(|done| (done.token, done.result.is_ok()))
            .collect();
        tokens.sort_unstable();
        let expected: Vec<_> = (0..DEPTH as u64)
            .map(|index| (round * 1000 + index, true))
            .collect();
        assert_eq!(tokens, expected);
        for (index, bytes) in bytes.iter().enumerate() {
            let (index, at) = (index as u64, index as u64 * slot);
            let request = read(index, (4 << 20) + at, at, slot as u32, checksum(bytes));
            rig.engine.submit(request);
        }
        for done in rig.drain() {
            assert_eq!(done.result, Ok(checksum(&bytes[done.token as usize])));
        }
    }
}

fn waiting_ends_by_timeout_and_by_waking(open: Open) {
    let mut rig = Rig::new(open, Script::default());
    let mut out = Vec::new();
    rig.engine.wait(Some(Duration::ZERO), &mut out);
    rig.engine.wait(Some(Duration::from_millis(2)), &mut out);
    let waker = rig.engine.waker();
    // Before the wait: it is not lost. Several count as one.
    waker.wake();
    waker.wake();
    rig.engine.wait(None, &mut out);
    // During the wait, or before it, as the threads happen to run; many times, for lost wake-ups.
    for _ in 0..200 {
        let waker = rig.engine.waker();
        let thread = std::thread::spawn(move || waker.wake());
        rig.engine.wait(None, &mut out);
        thread.join().unwrap();
    }
    assert!(out.is_empty());
    let bytes = pattern(1, UNIT);
    rig.arena.write(0, &bytes).unwrap();
    assert_eq!(rig.write(0, 0, UNIT as u32), Ok(checksum(&bytes)));
    drop(rig);
    waker.wake();
}

fn dropping_waits_for_operations_in_flight(open: Open) {
    for _ in 0..20 {
        let mut rig = Rig::new(open, Script::default());
        for token in 0..DEPTH as u64 - 1 {
            rig.engine
                .submit(write(token, 0, token * (1 << 20), 1 << 20));
        }
        rig.engine
            .submit(meta(FileKind::Super, 0, &[7; 4096], true));
        let Rig { engine, arena, dir } = rig;
        drop(engine);
        assert_eq!(
            Arc::strong_count(&arena),
            1,
            "the engine has let go of the arena"
        );
        drop(dir);
    }
}

/// Rounds of writes and reads under faults: every operation that completes without an error is
/// right.
fn noise_never_makes_wrong_bytes(
    open: impl Fn(Arc<Arena>, DeviceFiles, Noise) -> Box<dyn IoEngine>,
) {
    let rates = FaultRates {
        short: 300,
        interrupted: 200,
        read_error: 20,
        write_error: 20,
        flip: 30,
    };
    let slot = 40 * UNIT;
    let mut outcomes = [0; 3];
    for seed in 0..20 {
        let mut rig = Rig::with(|arena, device| open(arena, device, Noise::new(seed, rates)));
        let bytes: Vec<_> = (0..DEPTH as u64)
            .map(|index| pattern(seed + index, slot))
            .collect();
        for (index, bytes) in bytes.iter().enumerate() {
            let at = index as u64 * slot;
            rig.arena.write(at, bytes).unwrap();
            rig.engine.submit(write(index as u64, at, at, slot as u32));
        }
        let written = rig.drain();
        for done in written.iter().filter(|done| done.result.is_ok()) {
            let (index, at) = (done.token as usize, done.token * slot);
            assert_eq!(done.result, Ok(checksum(&bytes[index])), "seed {seed}");
            let mut stored = vec![0; slot as usize];
            rig.file("data").read_exact_at(&mut stored, at).unwrap();
            assert!(
                stored == bytes[index],
                "seed {seed}: a write that succeeded is in the file"
            );
            let request = read(
                done.token,
                (8 << 20) + at,
                at,
                slot as u32,
                checksum(&bytes[index]),
            );
            rig.engine.submit(request);
        }
        for done in rig.drain() {
            let (index, at) = (done.token as usize, done.token * slot);
            match done.result {
                Ok(_) => {
                    let found = rig.arena.read((8 << 20) + at, slot).unwrap();
                    assert!(found == bytes[index], "seed {seed}: wrong bytes");
                    outcomes[0] += 1;
                }
                Err(IoFault::Corrupt) => outcomes[1] += 1,
                Err(_) => outcomes[2] += 1,
            }
        }
    }
    assert!(
        outcomes.iter().all(|count| *count > 0),
        "right, corrupt, failed: {outcomes:?}"
    );
}

/// Where io_uring is forbidden, its tests do not run, and say so.
fn is_possible(needs_io_uring: bool) -> bool {
    match probe_io_uring() {
        Err(reason) if needs_io_uring => {
            eprintln!("not run: {reason}");
            false
        }
        _ => true,
    }
}

#[test]
fn noise_never_makes_wrong_bytes_io_uring() {
    if !is_possible(true) {
        return;
    }
    noise_never_makes_wrong_bytes(|arena, device, noise| {
        Box::new(Uring::with_fault_hook(DEPTH, arena, vec![device], noise).unwrap())
    });
}

#[test]
fn noise_never_makes_wrong_bytes_thread_pool() {
    noise_never_makes_wrong_bytes(|arena, device, noise| {
        Box::new(ThreadPool::with_fault_hook(DEPTH, arena, vec![device], noise).unwrap())
    });
}

/// The device has no room, the file is not open for writing, or is gone from its directory.
fn the_kernels_own_errors_come_through(open: Open) {
    let mut rig = Rig::with(|arena, mut device| {
        let full = File::options().read(true).write(true).open("/dev/full");
        device.data = OwnedFd::from(full.unwrap()).into();
        device.table = OwnedFd::from(File::open("/dev/null").unwrap()).into();
        open(DEPTH, arena, vec![device], Script::default())
    });
    assert_eq!(rig.write(0, 0, 1 << 20), os(Errno::NOSPC));
    let zeros = vec![0; 4096];
    assert_eq!(rig.read(0, 0, &zeros), Ok(checksum(&zeros)), "reads go on");
    assert_eq!(
        rig.one(meta(FileKind::Table, 0, &zeros, true)),
        os(Errno::BADF)
    );
    std::fs::remove_file(rig.path("super")).unwrap();
    assert_eq!(
        rig.one(meta(FileKind::Super, 0, &zeros, true)),
        Ok(0),
        "the open file is used"
    );
}

/// A rig whose device can be made to hang or to fail.
fn faulty() -> (Rig, FaultControl) {
    let mut control = None;
    let rig = Rig::with(|arena, device| {
        let inner = ThreadPool::new(DEPTH, arena, vec![device]).unwrap();
        let (engine, handle) = FaultEngine::new(inner);
        control = Some(handle);
        Box::new(engine)
    });
    (rig, control.unwrap())
}

#[test]
fn a_device_that_hangs_answers_when_it_is_released() {
    let (mut rig, control) = faulty();
    control.hang();
    rig.engine.submit(write(1, 0, 0, UNIT as u32));
    let mut out = Vec::new();
    rig.engine.wait(Some(Duration::from_millis(5)), &mut out);
    assert!(out.is_empty());
    assert_eq!(rig.engine.in_flight(), 1);
    let handle = control.clone();
    let thread = std::thread::spawn(move || handle.release());
    assert_eq!(rig.drain().len(), 1);
    thread.join().unwrap();
    control.fail_writes(Some(Errno::NOSPC.raw_os_error()));
    control.fail_reads(Some(Errno::IO.raw_os_error()));
    assert_eq!(rig.write(0, 0, UNIT as u32), os(Errno::NOSPC));
    assert_eq!(rig.read(0, 0, &[0; 4096]), os(Errno::IO));
    control.fail_writes(None);
    control.fail_reads(None);
    assert!(rig.write(0, 0, UNIT as u32).is_ok());
}

#[test]
fn a_read_that_begins_after_the_device_hangs_does_not_end() {
    let (mut rig, control) = faulty();
    let checksum = rig.write(0, 0, UNIT as u32).unwrap();
    control.limit_reads(Some(0.0));
    // Between this request and the change of the rate the engine has not waited.
    rig.engine.submit(read(7, 0, 0, UNIT as u32, checksum));
    let mut out = Vec::new();
    for _ in 0..20 {
        rig.engine.wait(Some(Duration::from_millis(5)), &mut out);
    }
    assert!(out.is_empty());
    control.limit_reads(None);
    assert_eq!(rig.drain().len(), 1);
}

macro_rules! conformance {
    ($engine:ident, $needs_io_uring:expr, $open:expr; $($test:ident)*) => {
        mod $engine {
            use super::*;
            $(#[test] fn $test() {
                if is_possible($needs_io_uring) {
                    super::$test($open)
                }
            })*
        }
    };
    ($($engine:ident, needs io_uring: $needs:expr => $open:expr,)*) => {
        $(conformance! { $engine, $needs, $open;
            payloads_go_to_the_file_and_come_back
            the_checksum_covers_the_payload_only
            a_given_checksum_is_not_computed
            metadata_is_written_and_synced
            a_failed_sync_fails_the_write
            short_reads_are_continued
            short_writes_are_continued
            errors_are_reported_and_pass
            a_busy_device_is_asked_again
            endless_interruptions_of_any_call_end
            an_erasure_zeroes_the_range_and_returns_its_space_if_asked
            an_erasure_makes_a_hole_where_the_filesystem_zeroes_no_range
            the_end_of_the_file_is_truncated
            a_flipped_bit_is_corrupt
            impossible_requests_are_refused
            more_than_the_depth_is_refused
            every_request_completes_once
            waiting_ends_by_timeout_and_by_waking
            dropping_waits_for_operations_in_flight
            the_kernels_own_errors_come_through
            calls_that_fail_in_the_kernel_leave_room_for_others
            a_sync_of_each_file_succeeds_or_reports_its_failure
        })*
    };
}

conformance! {
    io_uring, needs io_uring: true => |depth, arena, devices, script| {
        Box::new(Uring::with_fault_hook(depth, arena, devices, script).unwrap())
    },
    fault_engine, needs io_uring: true => |depth, arena, devices, script| {
        let inner = Uring::with_fault_hook(depth, arena, devices, script).unwrap();
        Box::new(FaultEngine::new(inner).0)
    },
    thread_pool, needs io_uring: false => |depth, arena, devices, script| {
        Box::new(ThreadPool::with_fault_hook(depth, arena, devices, script).unwrap())
    },
}
