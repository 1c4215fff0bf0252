//! The trait that all IO engines implement.

use std::sync::Arc;
use std::time::Duration;

use undercroft_contract::io::{IoCompletion, IoRequest};

use crate::arena::Arena;
use crate::files::DeviceFiles;
use crate::waker::Waker;

/// Carries out operations. Owned by the IO thread alone: another thread may make the IO engine, but the thread that
/// first submits or waits has to make all further calls, and drop it.
///
/// Short transfers are resubmitted, EINTR and EAGAIN are retried; the caller sees neither.
/// Buffers: the arena outlives the engine (it holds an `Arc` of the mapping); metadata is owned by
/// the operation until its completion.
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

/// How long dropping an engine waits for operations that the device has not answered. After that it
/// abandons them, and leaks the memory that the kernel may still write to.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Longer transfers go to the ring in pieces of this size in bytes.
pub(crate) const SPLIT: u32 = 512 << 10;
