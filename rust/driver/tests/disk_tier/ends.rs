//! The end of an engine over a disk that does not answer.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use undercroft_contract::session::LookupRequest;
use undercroft_driver::{Driver, END_GRACE, EngineAccess};
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::arena::Arena;
use undercroft_io::disk::{StoreError, open};
use undercroft_io::fault_hook::{Call, Direct, FaultHook, Verdict};

use crate::rig::{DISK, HOST, Io, MODEL, Model, Open, PATIENCE, dir};

/// No call begins until the sender is gone.
#[derive(Debug)]
struct Hang(Mutex<Receiver<()>>);

impl FaultHook for Hang {
    fn on_call(&self, _: &Call) -> Verdict {
        let _gone = self.0.lock().unwrap().recv();
        Verdict::Pass
    }
}

fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_end_does_not_wait_for_a_disk_that_hangs_and_keeps_what_the_disk_may_use() {
    for io in Io::all() {
        let (_guard, store) = dir();
        Open::new(std::slice::from_ref(&store)).plain().save(1, 10);
        let (mut files, image, lock) = open::open(&store, DISK, 1).unwrap().into_parts();
        let arena = Arc::new(Arena::create(HOST).unwrap());
        let (sender, receiver) = channel();
        // Its reads do not end.
        let (never_ready, writer) = rustix::pipe::pipe().unwrap();
        let of_io = Arc::clone(&arena);
        let devices = match io {
            Io::Ring => {
                files.data = never_ready.into();
                io.open(of_io, vec![files], Direct)
            }
            Io::Pool => io.open(of_io, vec![files], Hang(Mutex::new(receiver))),
        };
        let mut engine = Engine::new(EngineConfig::new(HOST));
        engine.attach_disks(vec![image]);
        let session = engine.open_session(MODEL.spec()).unwrap();
        let driver = Driver::start(engine, devices).unwrap();
        let hashes = Model::hashes(1, 10);
        driver.enter(|engine| engine.lookup(session, &LookupRequest::new("r", &hashes)));
        until(|| driver.read(|engine| engine.operations().reads) > Some(0));

        let (began, timeout) = (Instant::now(), Duration::from_millis(100));
        driver.stop(timeout);
        let took = began.elapsed();
        assert!(
            took < timeout + END_GRACE + END_GRACE / 2,
            "{io:?} {took:?}"
        );
        drop(lock);
        let opened = || open::open(&store, DISK, 1);
        let refused = opened().err();
        assert!(
            matches!(refused, Some(StoreError::InUse { .. })),
            "{io:?} {refused:?}"
        );
        assert!(Arc::strong_count(&arena) > 1, "reads may still come");

        drop((sender, writer));
        until(|| opened().is_ok());
        drop(driver);
        until(|| Arc::strong_count(&arena) == 1);
    }
}
