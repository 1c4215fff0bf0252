//! Waits for threads that a disk may hold up.

use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause between two looks at a thread.
const LOOK: Duration = Duration::from_millis(1);

/// Waits for the end of a thread, and lets it go if it has not ended in time: the thread continues, with all that it
/// owns. Returns whether it has ended. The panic hook has reported a panic of the thread.
pub fn join_within(thread: JoinHandle<()>, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while !thread.is_finished() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    drop(thread.join());
    true
}

/// The result of work on a thread of its own; `None` if it has not ended in time, or cannot begin. The thread
/// continues then.
pub fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, ended) = channel();
    let thread = std::thread::Builder::new().spawn(move || sender.send(work()));
    thread.ok()?;
    ended.recv_timeout(limit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_end_is_let_go() {
        let (end, wait) = channel::<()>();
        let (sender, ended) = channel();
        let thread = std::thread::spawn(move || {
            let _gone = wait.recv();
            sender.send(()).unwrap();
        });
        assert!(!join_within(thread, Duration::from_millis(10)));
        drop(end);
        ended.recv().unwrap();
        let panics = std::thread::spawn(|| panic!("for a test"));
        assert!(join_within(panics, Duration::from_secs(60)));
    }
}
