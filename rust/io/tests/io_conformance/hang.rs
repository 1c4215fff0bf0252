//! A device that hangs holds up no other.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use undercroft_contract::io::IoRequest;
use undercroft_io::arena::Arena;
use undercroft_io::fault_hook::{Call, CallKind, FaultHook, Verdict};
use undercroft_io::pool::ThreadPool;
use undercroft_io::uring::Uring;
use undercroft_io::{DeviceFiles, IoEngine};

use super::is_possible;
use super::rig::{ARENA, DEPTH, PATIENCE, UNIT, device_in, read, write};

/// A device that hangs, with as much to do as it takes; another one beside it.
fn a_device_that_hangs_holds_up_no_other(engine: &mut dyn IoEngine) {
    let depth = DEPTH;
    for token in 0..depth as u64 {
        let at = token * 4 * UNIT;
        // Each is several entries of a ring.
        engine.submit(read_of(0, token, at, 4 << 20));
    }
    assert_eq!((engine.room(0), engine.room(1)), (0, depth));
    for round in 0..4 {
        for token in 0..depth as u64 {
            let token = 1000 + 100 * round + token;
            engine.submit(read_of(1, token, 8 << 20, UNIT as u32));
        }
        assert_eq!(engine.room(1), 0);
        let (mut out, start) = (Vec::new(), Instant::now());
        while out.len() < depth {
            engine.wait(Some(PATIENCE), &mut out);
            assert!(start.elapsed() < PATIENCE, "the other one waits");
        }
        assert!(out.iter().all(|done| done.token >= 1000));
        assert_eq!((engine.room(0), engine.room(1)), (0, depth));
    }
    assert_eq!(engine.in_flight(), depth);
}

fn read_of(device: u16, token: u64, arena_offset: u64, len: u32) -> IoRequest {
    let mut request = read(token, arena_offset, 0, len, 0);
    if let IoRequest::ReadPayload { device: of, .. } = &mut request {
        *of = device;
    }
    request
}

/// Calls on device 0 do not return until the sender is gone.
#[derive(Debug)]
struct Hang(Mutex<Receiver<()>>);

impl FaultHook for Hang {
    fn on_call(&self, call: &Call) -> Verdict {
        if call.device == 0 {
            let _gone = self.0.lock().unwrap().recv();
        }
        Verdict::Pass
    }
}

#[test]
fn a_device_that_hangs_holds_up_no_other_thread_pool() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let devices = dirs.iter().map(|dir| device_in(dir.path())).collect();
    let arena = Arc::new(Arena::create(ARENA).unwrap());
    let (hangs, receiver) = std::sync::mpsc::channel();
    let hook = Hang(Mutex::new(receiver));
    let mut engine = ThreadPool::with_fault_hook(DEPTH, arena, devices, hook).unwrap();
    a_device_that_hangs_holds_up_no_other(&mut engine);
    drop(hangs);
}

#[test]
fn a_device_that_hangs_holds_up_no_other_io_uring() {
    if !is_possible(true) {
        return;
    }
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut devices: Vec<DeviceFiles> = dirs.iter().map(|dir| device_in(dir.path())).collect();
    // No bytes come through the pipe: its reads do not end.
    let (never_ready, writer) = rustix::pipe::pipe().unwrap();
    devices[0].data = never_ready.into();
    let arena = Arc::new(Arena::create(ARENA).unwrap());
    let of_thread = Arc::clone(&arena);
    let (sender, used) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut engine = Uring::new(DEPTH, of_thread, devices).unwrap();
        a_device_that_hangs_holds_up_no_other(&mut engine);
        sender.send(()).unwrap();
    });
    used.recv().unwrap();
    assert!(
        !thread.is_finished() && Arc::strong_count(&arena) > 1,
        "the kernel may still write to the arena"
    );
    drop(writer);
    thread.join().unwrap();
    assert_eq!(Arc::strong_count(&arena), 1);
}

/// Notes each call, and lets it go on when the sender has sent a permit or is gone.
#[derive(Debug)]
struct Gate {
    calls: Arc<Mutex<Vec<CallKind>>>,
    permits: Mutex<Receiver<()>>,
}

impl FaultHook for Gate {
    fn on_call(&self, call: &Call) -> Verdict {
        self.calls.lock().unwrap().push(call.kind);
        let _gone = self.permits.lock().unwrap().recv();
        Verdict::Pass
    }
}

#[test]
fn a_read_starts_before_the_writes_that_wait_for_a_thread() {
    // More operations than the pool has threads for a device.
    let depth = 40;
    let dir = tempfile::tempdir().unwrap();
    let arena = Arc::new(Arena::create(ARENA).unwrap());
    let (permits, receiver) = std::sync::mpsc::channel();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let hook = Gate {
        calls: Arc::clone(&calls),
        permits: Mutex::new(receiver),
    };
    let devices = vec![device_in(dir.path())];
    let mut engine = ThreadPool::with_fault_hook(depth, arena, devices, hook).unwrap();
    let start = Instant::now();
    let until = |count: usize| {
        while calls.lock().unwrap().len() < count {
            assert!(start.elapsed() < PATIENCE, "the threads begin nothing");
            std::thread::yield_now();
        }
    };
    for token in 0..depth as u64 - 1 {
        engine.submit(write(token, 0, token * UNIT, UNIT as u32));
    }
    until(16);
    engine.submit(read(99, 0, 0, UNIT as u32, 0));
    permits.send(()).unwrap();
    until(17);
    assert_eq!(calls.lock().unwrap()[16], CallKind::Read);
    drop(permits);
}
