//! Populates the arena's pages before their use, with huge pages where the kernel has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::mm::Advice;

use super::region::Arena;
use super::{ARENA_ALIGN, HUGE_PAGE, numa};

/// How much the background thread populates in one step, in bytes.
const PREFAULT_STEP: u64 = 64 << 20;

impl Arena {
    /// Populates a range, so that later accesses do not fault. Fails with EINVAL before
    /// Linux 5.14, and with ENOMEM or EFAULT if memory is short.
    pub fn prefault(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.check(offset, len).map_err(|_| Errno::INVAL)?;
        if !self.huge_pages() {
            self.gather(offset, len);
        }
        self.advise(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Asks for transparent huge pages for the range at once. Without the request, shared memory has them only
    /// if the system's `shmem_enabled` allows them. With contiguous memory, a transfer is one
    /// piece for the device. Ranges that the kernel (6.1 or newer) refuses stay on plain
    /// pages.
    fn gather(&self, offset: u64, len: u64) {
        let first = offset.next_multiple_of(HUGE_PAGE);
        let end = (offset + len) / HUGE_PAGE * HUGE_PAGE;
        // The kernel gathers no range without a page, and takes the huge page from the node of an existing page.
        let touch = |at| {
            let page =
                at + ARENA_ALIGN * numa::page_of_node_in_turn(at / HUGE_PAGE, self.nodes.len());
            self.advise(page, ARENA_ALIGN, Advice::LinuxPopulateWrite)
        };
        if first < end
            && (first..end)
                .step_by(HUGE_PAGE as usize)
                .all(|at| touch(at).is_ok())
        {
            let _ = self.collapse(first, end - first);
        }
    }
}

/// A thread that populates the whole arena, from its start on. Stopped and joined
/// on drop.
#[derive(Debug)]
pub struct Prefault {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Starts to populate `arena` in the background. If the kernel cannot, pages are populated on first use.
pub fn prefault_in_background(arena: Arc<Arena>) -> std::io::Result<Prefault> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::Builder::new()
        .name("undercroft-prefault".into())
        .spawn(move || prefault_steps(&arena, &stopped))?;
    Ok(Prefault {
        stop,
        thread: Some(thread),
    })
}

fn prefault_steps(arena: &Arena, stop: &AtomicBool) {
    let mut done = arena.populated();
    let ends = || stop.load(Ordering::Relaxed) || arena.is_released.load(Ordering::Relaxed);
    while done < arena.size() && !ends() {
        let step = PREFAULT_STEP.min(arena.size() - done);
        match arena.prefault(done, step) {
            Ok(()) => done += step,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => return,
        }
        arena.populated.store(done, Ordering::Release);
    }
}

impl Prefault {
    /// Waits until the thread has populated the arena and ended.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_background_thread_populates_everything() {
        let size = PREFAULT_STEP + 8192;
        let arena = Arc::new(Arena::create(size).unwrap());
        arena.write(0, b"kept").unwrap();
        prefault_in_background(Arc::clone(&arena)).unwrap().join();
        assert_eq!(arena.populated(), size);
        assert_eq!(arena.read(0, 4).unwrap(), b"kept");
        let blocks = rustix::fs::fstat(arena.fd())
            .unwrap()
            .st_blocks
            .cast_unsigned();
        assert!(
            blocks * 512 >= size,
            "{blocks} blocks of 512 bytes behind {size} bytes"
        );
    }

    #[test]
    fn populated_memory_is_in_huge_pages_with_any_default_of_the_system() {
        let arena = Arena::create(3 * HUGE_PAGE).unwrap();
        assert!((arena.address() as u64).is_multiple_of(HUGE_PAGE));
        arena.write(HUGE_PAGE, b"kept").unwrap();
        arena.prefault(0, 2 * HUGE_PAGE).unwrap();
        assert_eq!(arena.read(HUGE_PAGE, 4).unwrap(), b"kept");
        arena.write(2 * HUGE_PAGE, b"there").unwrap();
        if let Err(error) = arena.collapse(2 * HUGE_PAGE, HUGE_PAGE) {
            return eprintln!("not shown: this kernel has none for shared memory ({error})");
        }
        let found = mapped_in_huge_pages(arena.address());
        assert!(
            found >= 2 * HUGE_PAGE || arena.huge_pages(),
            "{found} bytes"
        );
    }

    /// A field that the kernel reports of the mapping at `address`.
    fn field_of_mapping(address: usize, name: &str) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = maps.split_once(&format!("\n{address:x}-")).unwrap().1;
        let line = mapping.split_once(&format!("\n{name}:")).unwrap().1;
        line.lines().next().unwrap().trim().to_owned()
    }

    /// Bytes of the mapping at `address` that the kernel maps in transparent huge pages.
    fn mapped_in_huge_pages(address: usize) -> u64 {
        let field = field_of_mapping(address, "ShmemPmdMapped");
        let kib: u64 = field.split_whitespace().next().unwrap().parse().unwrap();
        kib * 1024
    }

    #[test]
    fn core_dumps_leave_the_arena_out() {
        let arena = Arena::create(1 << 20).unwrap();
        let flags = field_of_mapping(arena.address(), "VmFlags");
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn dropping_the_prefault_stops_it() {
        let arena = Arc::new(Arena::create(PREFAULT_STEP).unwrap());
        drop(prefault_in_background(Arc::clone(&arena)).unwrap());
        assert_eq!(
            Arc::strong_count(&arena),
            1,
            "the thread has let go of the arena"
        );
    }
}
