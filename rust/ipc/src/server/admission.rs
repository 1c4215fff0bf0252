//! Admission of connections.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::connection::PAUSE;
use super::peer::{Peer, Role};
use super::service::Service;
use crate::peer::peer_credentials;

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
