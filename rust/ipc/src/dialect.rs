//! Older versions of the protocol that a server supports, for clients that are upgraded after the server.
//!
//! Server and sessions have messages of [`VERSION`] only. At the socket, an older client's messages are translated to
//! this version, and the answers to the client's version.
//!
//! From the first release on, [`OLDER`] has the version before [`VERSION`]. A change of a message raises
//! `VERSION` and needs two functions that translate the message. A version that is two behind is removed.

use crate::frame::{self, FrameError, FrameKind, HEADER_BYTES, Header, VERSION};

/// An older version of the protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    pub(crate) version: u16,
    /// Translates the body of a client's message to [`VERSION`]; `None` if the body is no message.
    pub(crate) request: fn(&[u8]) -> Option<Vec<u8>>,
    /// Translates the body of a server's message to this dialect; `None` for a message that the dialect lacks, which is
    /// not sent.
    pub(crate) reply: fn(&[u8]) -> Option<Vec<u8>>,
}

/// The older versions that a server supports. There has been no release yet.
pub(crate) static OLDER: &[Dialect] = &[];

impl Dialect {
    /// Translates a client's frame to this version.
    pub(crate) fn request_frame(&self, frame: &[u8]) -> Result<Vec<u8>, FrameError> {
        let first = frame::first_as(self.version, frame)?;
        let (header, body, _) = first.ok_or(FrameError::Malformed)?;
        let body = match header.kind {
            FrameKind::Request => (self.request)(body).ok_or(FrameError::Malformed)?,
            _ => body.to_vec(),
        };
        Ok(joined(header.kind, &body, VERSION))
    }

    /// Translates frames of this version to the dialect.
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
