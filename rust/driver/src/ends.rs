//! The lines for the log about the end of an engine.

use undercroft_contract::size::Bytes;
use undercroft_engine::Engine;

/// The line about an IO thread that was let go.
pub(crate) const LET_GO: &str = "undercroft: the engine has ended, but operations on its disks or its remote store have not. \
     Until those on disks end, the directories stay locked, and the kernel does not end this process";

/// The line about blocks that an engine has not written when it ends.
pub(crate) fn lost(engine: &Engine) -> Option<String> {
    let (waiting, of_disks) = (engine.drained().queued_bytes, engine.operations());
    let writing = of_disks.all - of_disks.reads;
    let is_lost = waiting > 0 || writing > 0;
    is_lost.then(|| {
        let waiting = Bytes(waiting);
        format!(
            "undercroft: the engine ended before its disks had taken all blocks: {waiting} that waited are lost, \
             and perhaps the writes of {writing} operations that had begun. Lost blocks are computed again when they are needed"
        )
    })
}
