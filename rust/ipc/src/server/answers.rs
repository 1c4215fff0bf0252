//! The answers to connections without a session: the arena, and the server's status.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use super::connection::End;
use super::{Served, ServerControl};
use crate::frame::arena_answer;
use crate::sessions::ServedSessions;

/// The status, for `undercroft status`.
pub(super) fn describe(
    path: &std::path::Path,
    started: Instant,
    served: &Served,
    sessions: &ServedSessions,
    control: &ServerControl,
    connections: usize,
) -> Value {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "uptime_s": started.elapsed().as_secs_f64(),
        "socket": path,
        "stats": served.stats.take(),
        "info": (served.info)(),
        "sessions": sessions.describe(read(&control.attached)),
        "server": {
            "connections": connections,
            "workers": read(&control.attached),
            "refused": read(&control.refused),
            "malformed": read(&control.malformed),
            "lookups": sessions.lookups(),
            "descriptors": descriptors,
        },
    })
}

/// Sends the arena's descriptor. A new connection has room for the answer.
///
/// # Errors
/// `Closed` if a part of the answer was sent: the descriptor comes with its first byte. `LetGo` if nothing was sent.
pub(super) fn hand_over(stream: &UnixStream, served: &Served, version: u16) -> Result<(), End> {
    let mut answer = arena_answer(served.arena.size(), served.arena_id);
    answer[4..6].copy_from_slice(&version.to_le_bytes());
    let fds = [served.arena.fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(End::LetGo);
    }
    let parts = [IoSlice::new(&answer)];
    match sendmsg(stream.as_fd(), &parts, &mut ancillary, SendFlags::NOSIGNAL) {
        Ok(sent) if sent == answer.len() => Ok(()),
        Ok(_) => Err(End::Closed),
        Err(_) => Err(End::LetGo),
    }
}
