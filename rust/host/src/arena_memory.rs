//! The memory of an engine's arena. After the end of an engine, its memory stays taken until the last worker has
//! unmapped it.

use std::time::Duration;

use undercroft_contract::log;
use undercroft_contract::log::Level;
use undercroft_contract::size::Bytes;
use undercroft_io::arena::{Arena, ArenaError};
use undercroft_io::memory;

use crate::error::{HostError, MEMORY_WAIT};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// The machine's memory.
pub(crate) struct HostMemory<'a> {
    /// See [`Arena::create`].
    pub(crate) create: &'a dyn Fn(u64) -> Result<Arena, ArenaError>,
    /// See [`memory::total`].
    pub(crate) total: Option<u64>,
    pub(crate) pause: &'a dyn Fn(Duration),
    /// Tells the operator about the wait.
    pub(crate) tell: &'a dyn Fn(String),
}

impl HostMemory<'_> {
    /// The memory of this machine.
    pub(crate) fn of_machine() -> Self {
        Self {
            create: &Arena::create,
            total: memory::total(),
            pause: &std::thread::sleep,
            tell: &|line| log::say(Level::Warning, format!("undercroft: {line}")),
        }
    }

    /// A new arena of `size` bytes. A server (`is_server`) waits at most [`MEMORY_WAIT`] for memory that the machine
    /// has, but not now: nobody connects to a server that is not there, and vLLM waits for no server.
    ///
    /// # Errors
    /// If the memory does not suffice, or the kernel refuses it.
    pub(crate) fn arena(&self, size: u64, is_server: bool) -> Result<Arena, HostError> {
        let has_it = self.total.is_none_or(|total| size <= total);
        let mut waited = Duration::ZERO;
        loop {
            let lack = match (self.create)(size) {
                Err(lack @ ArenaError::Memory { .. }) if is_server && has_it => lack,
                created => return Ok(created?),
            };
            if waited >= MEMORY_WAIT {
                return Err(HostError::MemoryHeld(lack));
            }
            if waited.is_zero() {
                (self.tell)(waiting(&lack));
            }
            (self.pause)(PAUSE);
            waited += PAUSE;
        }
    }
}

/// Fails if an arena of `size` bytes could not be made now.
pub(crate) fn check_memory(size: u64) -> Result<(), ArenaError> {
    match memory::available().filter(|available| *available < size) {
        Some(available) if !memory::has_huge_pages(size) => {
            Err(ArenaError::Memory { size, available })
        }
        _ => Ok(()),
    }
}

fn waiting(lack: &ArenaError) -> String {
    let available = match lack {
        ArenaError::Memory { available, .. } => Bytes(*available).to_string(),
        other => other.to_string(),
    };
    format!(
        "waiting at most {} seconds for host_memory: {available} of memory are available now; the workers of running \
         vLLMs may still hold the memory of an earlier server",
        MEMORY_WAIT.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    const SIZE: u64 = 1 << 20;

    /// The result for an arena of `SIZE`, if the machine has `total` bytes and enough of them are free after `free_after`
    /// attempts; the number of attempts; the time of the pauses; the lines for the operator.
    fn create(
        is_server: bool,
        total: u64,
        free_after: u32,
    ) -> (Result<Arena, HostError>, u32, Duration, Vec<String>) {
        let (attempts, paused) = (Cell::new(0), Cell::new(Duration::ZERO));
        let lines = RefCell::new(Vec::new());
        let memory = HostMemory {
            create: &|size| {
                attempts.set(attempts.get() + 1);
                if attempts.get() > free_after {
                    return Arena::create(size);
                }
                let available = 5000;
                Err(ArenaError::Memory { size, available })
            },
            total: Some(total),
            pause: &|pause| paused.set(paused.get() + pause),
            tell: &|line| lines.borrow_mut().push(line),
        };
        let arena = memory.arena(SIZE, is_server);
        (arena, attempts.get(), paused.get(), lines.into_inner())
    }

    #[test]
    fn a_server_waits_for_memory_that_others_still_hold() {
        let (arena, attempts, paused, lines) = create(true, 2 * SIZE, 7);
        assert_eq!(arena.unwrap().size(), SIZE);
        assert_eq!((attempts, paused), (8, 7 * PAUSE));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("4.882 KiB"), "{lines:?}");
    }

    #[test]
    fn the_wait_ends_with_an_error_that_names_who_may_hold_the_memory() {
        let (arena, _, paused, lines) = create(true, 2 * SIZE, u32::MAX);
        let error = arena.unwrap_err();
        assert_eq!(error.class(), crate::ErrorClass::Config);
        let error = error.to_string();
        assert!(
            error.starts_with("host_memory 1 MiB: only")
                && error.contains("workers of running vLLMs"),
            "{error}"
        );
        assert_eq!((paused, lines.len()), (MEMORY_WAIT, 1));
    }

    #[test]
    fn more_than_the_machine_has_is_not_waited_for_and_vllm_does_not_wait() {
        for (is_server, total) in [(true, SIZE - 1), (false, 2 * SIZE)] {
            let (arena, attempts, paused, lines) = create(is_server, total, 1);
            let error = arena.unwrap_err();
            assert!(matches!(error, HostError::Arena(_)), "{error}");
            assert_eq!((attempts, paused, lines.len()), (1, Duration::ZERO, 0));
        }
    }
}
