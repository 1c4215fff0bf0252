//! The process at the other end of a socket.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

/// The peer's uid, as the kernel reports it.
///
/// This does not use rustix: for a process of another PID namespace the kernel reports the pid 0, which rustix cannot
/// read. Containers could then not share a server.
pub(crate) fn peer_uid(socket: &impl AsFd) -> io::Result<u32> {
    Ok(peer_credentials(socket)?.0)
}

/// The peer's uid and pid, as the kernel reports them; the pid is 0 for a process of another PID namespace.
pub(crate) fn peer_credentials(socket: &impl AsFd) -> io::Result<(u32, i32)> {
    let credentials = getsockopt(socket, PeerCredentials)?;
    Ok((credentials.uid(), credentials.pid()))
}
