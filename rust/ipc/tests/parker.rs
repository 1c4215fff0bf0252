//! Interleavings, in loom, of threads that queue frames with the thread that takes them: no frame is left
//! behind while that thread is parked.

mod atomic {
    pub(crate) use loom::sync::atomic::{AtomicU8, Ordering};
}
#[path = "../src/parker.rs"]
mod parker;

use loom::model::Builder;
use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;
use parker::Parker;

const CALLERS: usize = 2;

/// With more, loom needs minutes.
const PREEMPTIONS: usize = 3;

fn lock(mutex: &Mutex<usize>) -> MutexGuard<'_, usize> {
    mutex.lock().expect("not poisoned")
}

struct Shared {
    frames: Mutex<usize>,
    parker: Parker,
    /// An eventfd's count, and the threads that wait for it.
    count: Mutex<usize>,
    woken: Condvar,
}

/// Takes frames until all callers' have come; a wake-up that never comes is a deadlock, which loom reports.
fn take_all(shared: &Shared, lingers: bool) {
    let mut taken = 0;
    loop {
        {
            let mut frames = lock(&shared.frames);
            taken += std::mem::take(&mut *frames);
            shared.parker.taken();
        }
        if taken == CALLERS {
            return;
        }
        if lingers && !shared.parker.is_idle() {
            continue;
        }
        if shared.parker.park() {
            let mut count = lock(&shared.count);
            while *count == 0 {
                count = shared.woken.wait(count).expect("not poisoned");
            }
            *count = 0;
        }
    }
}

fn explore(lingers: bool) {
    let mut model = Builder::new();
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let shared = Arc::new(Shared {
            frames: Mutex::new(0),
            parker: Parker::new(),
            count: Mutex::new(0),
            woken: Condvar::new(),
        });
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    *lock(&shared.frames) += 1;
                    if shared.parker.queued() {
                        *lock(&shared.count) += 1;
                        shared.woken.notify_one();
                    }
                })
            })
            .collect();
        take_all(&shared, lingers);
        for caller in callers {
            caller.join().expect("no panic");
        }
    });
}

#[test]
fn no_frame_is_left_while_the_thread_is_parked() {
    explore(false);
}

#[test]
fn no_frame_is_left_while_the_thread_lingers_first() {
    explore(true);
}
