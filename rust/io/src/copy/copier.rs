//! Copies between device pages that are host memory (vLLM's CPU platform) and the arena, on threads
//! of their own. Loads go before saves, since a request waits for a load and no request waits for a
//! save.

#![expect(
    unsafe_code,
    reason = "copies between raw addresses of another allocator and the arena"
)]

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::arena::{Arena, OutOfBounds};

use super::{Joined, Routine, nontemporal};

/// How much a thread copies before it looks for a more urgent job, in bytes.
const SLICE: u64 = 4 << 20;

/// One run of bytes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPiece {
    /// Address on the device's side.
    pub address: usize,
    /// Offset in the arena, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Which way a job copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Arena to device.
    Load,
    /// Device to arena.
    Save,
}

/// A job that has been copied in full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    /// The number given to [`Copier::submit`].
    pub job: u64,
    /// From the start of its first piece to the end of its last.
    pub seconds: f64,
}

#[derive(Debug)]
struct CopyJob {
    id: u64,
    pieces: Arc<[CopyPiece]>,
    /// The first piece that no thread has taken.
    next: usize,
    /// Slices that threads are copying.
    running: usize,
    started: Option<Instant>,
}

#[derive(Debug, Default)]
struct CopierState {
    loads: VecDeque<CopyJob>,
    saves: VecDeque<CopyJob>,
    ended: Vec<Ended>,
    closing: bool,
}

/// Bytes that a thread copies in one go.
struct Slice {
    direction: Direction,
    job: u64,
    pieces: Arc<[CopyPiece]>,
    range: Range<usize>,
}

impl CopierState {
    fn queue(&mut self, direction: Direction) -> &mut VecDeque<CopyJob> {
        match direction {
            Direction::Load => &mut self.loads,
            Direction::Save => &mut self.saves,
        }
    }

    fn take(&mut self) -> Option<Slice> {
        [Direction::Load, Direction::Save]
            .into_iter()
            .find_map(|direction| self.take_from(direction))
    }

    fn take_from(&mut self, direction: Direction) -> Option<Slice> {
        let waiting = |job: &&mut CopyJob| job.next < job.pieces.len();
        let job = self.queue(direction).iter_mut().find(waiting)?;
        let start = job.next;
        let mut bytes = 0;
        while job.next < job.pieces.len() && bytes < SLICE {
            bytes += job.pieces[job.next].len;
            job.next += 1;
        }
        job.running += 1;
        job.started.get_or_insert_with(Instant::now);
        Some(Slice {
            direction,
            job: job.id,
            pieces: Arc::clone(&job.pieces),
            range: start..job.next,
        })
    }

    fn give_back(&mut self, slice: &Slice) {
        let queue = self.queue(slice.direction);
        let Some(index) = queue.iter().position(|job| job.id == slice.job) else {
            return;
        };
        let job = &mut queue[index];
        job.running -= 1;
        if job.running > 0 || job.next < job.pieces.len() {
            return;
        }
        let seconds = job.started.map_or(0.0, |at| at.elapsed().as_secs_f64());
        queue.remove(index);
        self.ended.push(Ended {
            job: slice.job,
            seconds,
        });
    }

    fn idle(&self) -> bool {
        self.loads.is_empty() && self.saves.is_empty()
    }
}

#[derive(Debug)]
struct CopierShared {
    arena: Arc<Arena>,
    state: Mutex<CopierState>,
    work: Condvar,
    idle: Condvar,
}

impl CopierShared {
    fn state(&self) -> MutexGuard<'_, CopierState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of a thread: copies until the copier is dropped and nothing is left.
    fn run(&self) {
        let routine = Routine::fastest();
        let mut state = self.state();
        loop {
            if let Some(slice) = state.take() {
                drop(state);
                for piece in &slice.pieces[slice.range.clone()] {
                    self.copy(routine, slice.direction, piece);
                }
                nontemporal::fence();
                state = self.state();
                state.give_back(&slice);
                if state.idle() {
                    self.idle.notify_all();
                }
            } else if state.closing {
                return;
            } else {
                state = self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn copy(&self, routine: Routine, direction: Direction, piece: &CopyPiece) {
        // `submit` has checked the range; an error here cannot happen and copies nothing.
        let Ok(arena) = self.arena.pointer(piece.offset, piece.len) else {
            return;
        };
        let device = std::ptr::with_exposed_provenance_mut::<u8>(piece.address);
        let (from, to) = match direction {
            Direction::Load => (arena, device),
            Direction::Save => (device, arena),
        };
        // SAFETY: the arena's side is valid by the check above, the device's by the contract of
        // `Copier::submit`, which also says that they do not overlap.
        unsafe { nontemporal::copy(routine, from.cast_const(), to, piece.len as usize) };
    }
}

/// Carries out copy jobs in the order of their submission, loads first. On drop it finishes the
/// submitted jobs.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<CopierShared>,
    threads: Vec<JoinHandle<()>>,
}

impl Copier {
    /// Starts the threads. Fails if the system refuses one.
    pub fn start(arena: Arc<Arena>, threads: NonZeroUsize) -> std::io::Result<Self> {
        let shared = Arc::new(CopierShared {
            arena,
            state: Mutex::default(),
            work: Condvar::new(),
            idle: Condvar::new(),
        });
        let mut copier = Self {
            shared,
            threads: Vec::new(),
        };
        for index in 0..threads.get() {
            let shared = Arc::clone(&copier.shared);
            let thread = std::thread::Builder::new()
                .name(format!("undercroft-cp{index}"))
                .spawn(move || shared.run())?;
            copier.threads.push(thread);
        }
        Ok(copier)
    }

    /// Queues jobs, all at once, to begin in their order. Their numbers must differ from each other and from the
    /// numbers of queued jobs. Nothing is queued if a piece of any job lies outside the arena.
    ///
    /// # Safety
    ///
    /// Until a job is returned by [`Copier::poll`], each of its pieces' `len` bytes at its `address` must be valid for
    /// reads (save) or writes (load) from any thread, must not overlap the arena, and no other thread may write them
    /// (save) or access them (load).
    pub unsafe fn submit<P: IntoIterator<Item = CopyPiece>>(
        &self,
        direction: Direction,
        jobs: impl IntoIterator<Item = (u64, P)>,
    ) -> Result<(), OutOfBounds> {
        let prepare = |(id, pieces)| Ok((id, self.prepare(pieces)?));
        let jobs: Vec<(u64, Vec<CopyPiece>)> =
            jobs.into_iter().map(prepare).collect::<Result<_, _>>()?;
        let mut state = self.shared.state();
        for (job, pieces) in jobs {
            if pieces.is_empty() {
                state.ended.push(Ended { job, seconds: 0.0 });
                continue;
            }
            state.queue(direction).push_back(CopyJob {
                id: job,
                pieces: pieces.into(),
                next: 0,
                running: 0,
                started: None,
            });
        }
        drop(state);
        self.shared.work.notify_all();
        Ok(())
    }

    /// Checks the pieces, joins pieces that are adjacent in source and target, and splits long pieces.
    fn prepare(
        &self,
        pieces: impl IntoIterator<Item = CopyPiece>,
    ) -> Result<Vec<CopyPiece>, OutOfBounds> {
        let check = |piece: CopyPiece| {
            let is_inside = self.shared.arena.check(piece.offset, piece.len);
            is_inside.map(|()| piece)
        };
        let pieces: Vec<CopyPiece> = pieces.into_iter().map(check).collect::<Result<_, _>>()?;
        Ok(Joined::new(pieces, SLICE).collect())
    }

    /// Jobs that have ended since the last call.
    pub fn poll(&self) -> Vec<Ended> {
        std::mem::take(&mut self.shared.state().ended)
    }

    /// Waits until all submitted jobs have been copied.
    pub fn drain(&self) {
        let mut state = self.shared.state();
        while !state.idle() {
            state = self
                .shared
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The panic of a thread has already been reported on stderr.
            let _ = thread.join();
        }
    }
}

impl CopyPiece {
    pub(super) fn adjoins(&self, next: &Self) -> bool {
        self.address.wrapping_add(self.len as usize) == next.address
            && self.offset + self.len == next.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn copier(arena_bytes: usize, threads: usize) -> (Arc<Arena>, Copier) {
        let arena = Arc::new(Arena::create(arena_bytes as u64).unwrap());
        let threads = NonZeroUsize::new(threads).unwrap();
        (Arc::clone(&arena), Copier::start(arena, threads).unwrap())
    }

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i / 7 + i * i / 1000) as u8).collect()
    }

    /// Pages of `page` bytes, the device's in order, the arena's in reverse.
    fn pages(device: &mut [u8], page: usize) -> Vec<CopyPiece> {
        let count = device.len() / page;
        let address = device.as_mut_ptr().expose_provenance();
        (0..count)
            .map(|i| CopyPiece {
                address: address + i * page,
                offset: ((count - 1 - i) * page) as u64,
                len: page as u64,
            })
            .collect()
    }

    #[test]
    fn bytes_survive_save_and_load_with_any_number_of_threads() {
        for threads in [1, 3] {
            let (_arena, copier) = copier(32 * MIB, threads);
            let mut device = pattern(32 * MIB);
            let expected = device.clone();
            let pieces = pages(&mut device, 96 * 1024);
            let covered = pieces.len() * 96 * 1024;
            // SAFETY: `device` outlives the job, and is not touched before it has ended.
            unsafe { copier.submit(Direction::Save, [(1, pieces.clone())]) }.unwrap();
            copier.drain();
            device.fill(0);
            let pieces = pages(&mut device, 96 * 1024);
            // SAFETY: as above.
            unsafe { copier.submit(Direction::Load, [(2, pieces)]) }.unwrap();
            copier.drain();
            let ended: Vec<u64> = copier.poll().iter().map(|ended| ended.job).collect();
            assert_eq!(ended, [1, 2]);
            assert!(device[..covered] == expected[..covered]);
            assert!(device[covered..].iter().all(|byte| *byte == 0));
            assert_eq!(copier.poll(), []);
        }
    }

    #[test]
    fn pieces_that_go_on_are_joined_and_long_ones_are_split() {
        let (_arena, copier) = copier(16 * MIB, 1);
        let piece = |address, offset, len| CopyPiece {
            address,
            offset,
            len,
        };
        let joined = copier
            .prepare([
                piece(1000, 0, 10),
                piece(1010, 10, 20),
                piece(1030, 40, 5),
                piece(2000, 45, 5),
                piece(2005, 50, 0),
            ])
            .unwrap();
        let expected = [piece(1000, 0, 30), piece(1030, 40, 5), piece(2000, 45, 5)];
        assert_eq!(joined, expected);
        let split = copier.prepare([piece(0, 0, 2 * SLICE + 1)]).unwrap();
        let expected = [
            piece(0, 0, SLICE),
            piece(SLICE as usize, SLICE, SLICE),
            piece(2 * SLICE as usize, 2 * SLICE, 1),
        ];
        assert_eq!(split, expected);
    }

    #[test]
    fn a_piece_outside_the_arena_queues_nothing() {
        let (_arena, copier) = copier(MIB, 1);
        let mut device = vec![0; 4096];
        let address = device.as_mut_ptr().expose_provenance();
        let inside = CopyPiece {
            address,
            offset: 0,
            len: 4096,
        };
        for offset in [MIB as u64 - 4095, u64::MAX - 10] {
            let outside = CopyPiece { offset, ..inside };
            // SAFETY: `device` outlives the copier's jobs.
            let refused = unsafe {
                copier.submit(
                    Direction::Save,
                    [(6, vec![inside]), (7, vec![inside, outside])],
                )
            };
            assert_eq!(refused.unwrap_err().offset, offset);
        }
        copier.drain();
        assert_eq!(copier.poll(), []);
    }

    #[test]
    fn a_load_overtakes_the_saves_that_wait() {
        let (_arena, copier) = copier(MIB, 1);
        let mut device = vec![1_u8; 3 * 4096];
        let address = device.as_mut_ptr().expose_provenance();
        let piece = |index: usize| CopyPiece {
            address: address + index * 4096,
            offset: index as u64 * 4096,
            len: 4096,
        };
        // The lock keeps the thread from starting before all three are queued.
        let mut state = copier.shared.state();
        for (id, direction) in [
            (1, Direction::Save),
            (2, Direction::Save),
            (3, Direction::Load),
        ] {
            state.queue(direction).push_back(CopyJob {
                id,
                pieces: [piece(id as usize - 1)].into(),
                next: 0,
                running: 0,
                started: None,
            });
        }
        drop(state);
        copier.shared.work.notify_all();
        copier.drain();
        let order: Vec<u64> = copier.poll().iter().map(|ended| ended.job).collect();
        assert_eq!(order, [3, 1, 2]);
    }

    #[test]
    fn drop_finishes_submitted_copies() {
        let (arena, copier) = copier(8 * MIB, 1);
        let mut device = pattern(8 * MIB);
        let expected = device.clone();
        for (job, piece) in pages(&mut device, 64 * 1024).into_iter().enumerate() {
            // SAFETY: `device` outlives the copier.
            unsafe { copier.submit(Direction::Save, [(job as u64, [piece])]) }.unwrap();
        }
        drop(copier);
        let page = 64 * 1024;
        for (i, chunk) in expected.chunks(page).enumerate() {
            let offset = (expected.len() - (i + 1) * page) as u64;
            assert!(arena.read(offset, page as u64).unwrap() == chunk);
        }
    }

    #[test]
    fn a_job_without_pieces_ends_at_once() {
        let (_arena, copier) = copier(MIB, 1);
        // SAFETY: there is no piece.
        unsafe { copier.submit(Direction::Load, [(5, [])]) }.unwrap();
        let ended = Ended {
            job: 5,
            seconds: 0.0,
        };
        assert_eq!(copier.poll(), [ended]);
    }
}
