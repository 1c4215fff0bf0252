//! Admission of connections, and the first message of each: the arena, and the server's status.

use std::io::{ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use super::peer::{Peer, Role};
use super::service::{End, PAUSE, Service};
use super::{Served, ServerControl};
use crate::frame::arena_answer;
use crate::peer::peer_credentials;
use crate::sessions::ServedSessions;

/// Most connections of one process, with its workers that are leaving. A vLLM has one connection for its scheduler and
/// one for each worker.
const CONNECTIONS_OF_PROCESS: usize = 32;

/// Most connections that are accepted in a turn.
const ACCEPTS: usize = 8;

impl Service {
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    if error.kind() != ErrorKind::WouldBlock {
                        self.paused_until = Some(Instant::now() + PAUSE);
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: UnixStream) {
        let own = rustix::process::geteuid().as_raw();
        let pid = match peer_credentials(&stream) {
            Ok((uid, pid)) if uid == own => pid,
            _ => return self.turn_away(stream),
        };
        // Processes of other PID namespaces cannot be told apart.
        let of_process = if pid == 0 {
            self.connections_max / 2
        } else {
            CONNECTIONS_OF_PROCESS
        };
        let peers = self.connections.values();
        let is_same = |peer: &&Peer| peer.pid == pid && peer.role == Role::New;
        let is_open = |peer: &&Peer| peer.pid == pid;
        let own_process = pid as u32 == std::process::id();
        let (all, new) = (
            peers.clone().filter(is_open).count() + self.leaving.of_process(pid),
            peers.filter(is_same).count(),
        );
        let too_many = !own_process && (all >= of_process || new >= of_process);
        if too_many
            || self.descriptors() >= self.connections_max
            || stream.set_nonblocking(true).is_err()
        {
            return self.turn_away(stream);
        }
        // Processes of other PID namespaces cannot be told apart: each of their connections counts for itself.
        let mut peers = self.connections.values();
        let same = peers.find(|peer| pid != 0 && peer.pid == pid);
        let account = self.queue.open(same.map(|peer| peer.account));
        let id = self.connections.insert(Peer::new(stream, pid, account));
        // A new peer has usually sent its first frame.
        self.queue.push(id, &mut self.connections[id]);
    }

    /// Number of descriptors of connections and of workers' processes, and of those that are not closed yet.
    pub(super) fn descriptors(&self) -> usize {
        let attached = self.control.attached.load(Ordering::Relaxed) as usize;
        self.connections.len() + attached + self.leaving.len() + self.closer.pending()
    }

    fn turn_away(&self, stream: UnixStream) {
        self.refuse();
        self.closer.end(stream);
    }

    pub(super) fn refuse(&self) {
        self.control.refused.fetch_add(1, Ordering::Relaxed);
    }
}

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
