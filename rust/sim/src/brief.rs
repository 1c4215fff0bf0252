//! IO requests in the trace of a failure.

use undercroft_contract::io::IoRequest;

/// A short text for a request.
pub(crate) fn brief(request: &IoRequest) -> String {
    match request {
        IoRequest::ReadPayload {
            device,
            file_offset,
            arena_offset,
            len,
            ..
        } => {
            format!("read of {device}:{file_offset}+{len} to {arena_offset}")
        }
        IoRequest::WritePayload {
            device,
            file_offset,
            arena_offset,
            len,
            ..
        } => {
            format!("write of {arena_offset}+{len} to {device}:{file_offset}")
        }
        IoRequest::Sealed(of) => {
            let (reads, device, at, len) = (of.reads, of.device, of.file_offset, of.len);
            let arena_offset = of.arena_offset;
            format!("sealed, reads: {reads}, {device}:{at}+{len} and {arena_offset}")
        }
        IoRequest::Erase {
            device,
            file_offset,
            len,
            ..
        } => format!("erasure of {device}:{file_offset}+{len}"),
        IoRequest::Sync { device, file, .. } => format!("sync of {device}:{file:?}"),
        IoRequest::WriteMeta {
            device,
            file,
            file_offset,
            sync,
            ..
        } => {
            format!("write of {device}:{file:?} at {file_offset}, sync {sync}")
        }
    }
}
