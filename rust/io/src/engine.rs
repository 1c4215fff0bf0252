//! The trait that all IO engines implement.

use std::sync::Arc;
use std::time::Duration;

use undercroft_contract::io::{IoCompletion, IoRequest};

use crate::arena::Arena;
use crate::files::DeviceFiles;
use crate::waker::Waker;

/// Carries out operations. Owned by the IO thread alone: another thread may make the IO engine, but the thread that
/// first submits or waits has to make all further calls, and drop it. The drop waits for as long as a device takes for
/// operations that it has begun: the kernel may use their memory and files until they end.
///
/// Short transfers are resubmitted, EINTR and EAGAIN are retried; the caller sees neither.
/// Buffers: the arena outlives the engine (it holds an `Arc` of the mapping); metadata is owned by
/// the operation until its completion.
///
/// A payload goes from the arena to a data file and back, and is refused where its checksum is another:
///
/// ```
/// use std::sync::Arc;
///
/// use undercroft_contract::io::{IoFault, IoRequest};
/// use undercroft_io::arena::{ARENA_ALIGN, Arena};
/// use undercroft_io::{DeviceFiles, IoEngineChoice, open_file, open_io_engine};
///
/// let directory = tempfile::tempdir()?;
/// let file = |name: &str| open_file(&directory.path().join(name), true);
/// let (data, o_direct) = file("data")?;
/// let (superblock, table) = (file("super")?.0, file("table")?.0);
/// let files = DeviceFiles { superblock, table, data, o_direct, lock: None };
/// let arena = Arc::new(Arena::create(3 * ARENA_ALIGN)?);
/// arena.write(0, &[7; 1000])?;
/// let (mut io, _) = open_io_engine(IoEngineChoice::Auto, 4, Arc::clone(&arena), vec![files])?;
/// let (device, file_offset, len, payload_len) = (0, 0, 4096, 1000);
/// let mut ended = Vec::new();
///
/// let checksum = None;
/// let write = IoRequest::WritePayload {
///     token: 0, device, file_offset, arena_offset: 0, len, payload_len, checksum,
/// };
/// io.submit(write);
/// io.wait(None, &mut ended);
/// let sum = ended[0].result.unwrap();
///
/// for (token, checksum) in [(1, sum), (2, sum + 1)] {
///     let arena_offset = token * ARENA_ALIGN;
///     let read = IoRequest::ReadPayload {
///         token, device, file_offset, arena_offset, len, payload_len, checksum,
///     };
///     io.submit(read);
///     io.wait(None, &mut ended);
/// }
/// assert_eq!(arena.read(ARENA_ALIGN, 1000)?, [7; 1000]);
/// assert_eq!((ended[1].result, ended[2].result), (Ok(sum), Err(IoFault::Corrupt)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait IoEngine: Send + std::fmt::Debug {
    /// The arena of the transfers.
    fn arena(&self) -> &Arc<Arena>;
    /// `"io_uring"`, `"thread_pool"`, ...; shown to the operator.
    fn name(&self) -> &'static str;
    /// How many operations each device may have in flight.
    fn depth(&self) -> usize;
    /// Operations submitted and not yet completed, of all devices.
    fn in_flight(&self) -> usize;
    /// How many operations of a device may be submitted now. Operations that the device has ended
    /// and that are still to be verified need not count.
    fn room(&self, device: u16) -> usize;
    /// Starts an operation. The caller does so only while its device has `room()`.
    fn submit(&mut self, request: IoRequest);
    /// Pushes completions to `out`. Blocks until there is at least one, [`Waker::wake`] was called,
    /// or `timeout` has passed (`None`: no limit; zero: without blocking).
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>);
    /// Returns the memory behind a range of the arena, which no operation uses, to the system.
    ///
    /// # Errors
    /// Like [`Arena::release`].
    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()>;
    /// A handle by which other threads end a `wait`.
    fn waker(&self) -> Waker;
    /// Sets the files of a device that had [`DeviceFiles::absent`], and so no operations.
    ///
    /// # Errors
    /// If the files cannot be used.
    fn replace_files(&mut self, _device: u16, _files: DeviceFiles) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// Longer transfers go to the ring in pieces of this size in bytes.
pub(crate) const SPLIT: u32 = 512 << 10;
