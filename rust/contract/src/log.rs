//! Lines for the operator's log. The core has no logger of its own: whoever runs it takes the lines.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Most lines that wait to be taken. The oldest give way.
const WAITING_MAX: usize = 1000;

/// The urgency of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Something was done as ordered.
    Info,
    /// Something may need the operator.
    Warning,
}

static LINES: Mutex<VecDeque<(Level, String)>> = Mutex::new(VecDeque::new());
static SAID: Condvar = Condvar::new();

/// Gives the log a line. Waits for nothing.
pub fn say(level: Level, line: String) {
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    if lines.len() == WAITING_MAX {
        lines.pop_front();
    }
    lines.push_back((level, line));
    SAID.notify_one();
}

/// Waits for lines, at most `timeout`, and leaves them for [`take`].
pub fn wait(timeout: Duration) {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = SAID.wait_timeout_while(lines, timeout, |lines| lines.is_empty());
    drop(waited.unwrap_or_else(PoisonError::into_inner));
}

/// The lines since the last call, in order.
pub fn take() -> Vec<(Level, String)> {
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.drain(..).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_once_in_order_and_the_oldest_give_way() {
        let own = |line: &str| line.starts_with("test ");
        for number in 0..WAITING_MAX + 2 {
            say(Level::Info, format!("test {number}"));
        }
        let taken = take();
        let taken: Vec<_> = taken.iter().filter(|(_, line)| own(line)).collect();
        assert!(taken[0].1 != "test 0" && taken.len() <= WAITING_MAX);
        assert_eq!(taken.last().unwrap().1, format!("test {}", WAITING_MAX + 1));
        assert!(!take().iter().any(|(_, line)| own(line)));
    }
}
