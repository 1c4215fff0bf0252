//! Older versions of the protocol that a server speaks, for clients that are upgraded after it.
//!
//! Server and sessions know [`VERSION`] alone. At the socket, messages of an older client are
//! translated to this version, and answers to its own.
//!
//! From the first release on, [`OLDER`] has the version before [`VERSION`]. A change of a message raises
//! `VERSION` and comes with the two functions that translate it; a version that is two behind is removed.

use crate::frame::{self, FrameError, FrameKind, HEADER_BYTES, Header, VERSION};

/// An older version of the protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    pub(crate) version: u16,
    /// The body of a client's message in the words of [`VERSION`]; `None` if it is no message.
    pub(crate) request: fn(&[u8]) -> Option<Vec<u8>>,
    /// The body of a server's message in the words of this dialect; `None` for one that it lacks, which is
    /// not sent.
    pub(crate) reply: fn(&[u8]) -> Option<Vec<u8>>,
}

/// The older versions that a server speaks. There has been no release yet.
pub(crate) static OLDER: &[Dialect] = &[];

impl Dialect {
    /// A client's frame as one of this version.
    pub(crate) fn request_frame(&self, frame: &[u8]) -> Result<Vec<u8>, FrameError> {
        let first = frame::first_as(self.version, frame)?;
        let (header, body, _) = first.ok_or(FrameError::Malformed)?;
        let body = match header.kind {
            FrameKind::Request => (self.request)(body).ok_or(FrameError::Malformed)?,
            _ => body.to_vec(),
        };
        Ok(joined(header.kind, &body, VERSION))
    }

    /// Frames of this version as frames of the dialect.
    pub(crate) fn reply_frames(&self, frames: &[u8]) -> Vec<u8> {
        let (mut all, mut at) = (Vec::with_capacity(frames.len()), 0);
        while let Ok(Some((header, body, len))) = frame::first(&frames[at..]) {
            if let Some(body) = (self.reply)(body) {
                all.extend(joined(header.kind, &body, self.version));
            }
            at += len;
        }
        all
    }
}

fn joined(kind: FrameKind, body: &[u8], version: u16) -> Vec<u8> {
    let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let header = Header { kind, body_bytes }.encode_as(version);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(body);
    bytes
}
