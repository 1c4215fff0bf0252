//! Descriptors that a peer passes over a socket although nobody has asked for them.
//!
//! The last close of a descriptor may wait for as long as the peer likes: a socket lingers until its data is sent, and a
//! filesystem in user space answers when it likes. If a message is read without room for its descriptors, the kernel
//! closes them in the reading thread. So descriptors are refused where the kernel can (Linux 6.16), and are otherwise
//! received and closed by another thread. The same thread closes connections: the kernel may hold descriptors in their
//! queues.

use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use nix::libc;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SetBool;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// Most descriptors of one message, by the kernel's rules.
const OF_MESSAGE_MAX: usize = 253;

/// Not yet in `libc`. Only SPARC has another number.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Whether a socket accepts descriptors.
#[derive(Clone, Copy, Debug)]
struct PassRights;

nix::setsockopt_impl!(PassRights, libc::SOL_SOCKET, SO_PASSRIGHTS, bool, SetBool);

/// From now on, nobody can pass descriptors to a socket, or to the connections of a listening socket. Before Linux 6.16
/// this has no effect.
pub(crate) fn refuse(socket: &impl AsFd) {
    let _ = setsockopt(socket, PassRights, &false);
}

/// Bytes of a message.
#[derive(Debug)]
pub(crate) struct Received {
    /// Number of bytes; 0 at the end of the connection.
    pub(crate) bytes: usize,
    /// Descriptors that came with the bytes.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Whether the process had no room for all descriptors.
    pub(crate) is_cut: bool,
}

impl Received {
    /// Whether the peer has sent descriptors.
    pub(crate) fn has_descriptors(&self) -> bool {
        self.is_cut || !self.descriptors.is_empty()
    }
}

/// Reads from a socket, with room for all descriptors that may come.
pub(crate) fn receive(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(OF_MESSAGE_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(buffer)];
    let message = loop {
        let flags = RecvFlags::CMSG_CLOEXEC;
        match recvmsg(socket, &mut parts, &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            message => break message?,
        }
    };
    let mut descriptors = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            descriptors.extend(passed);
        }
    }
    Ok(Received {
        bytes: message.bytes,
        descriptors,
        is_cut: message.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// A thread that closes descriptors. When this is dropped, the thread ends after its last close.
#[derive(Debug)]
pub(crate) struct Closer {
    to_close: Sender<OwnedFd>,
    pending: Arc<AtomicUsize>,
}

impl Closer {
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (to_close, descriptors) = channel::<OwnedFd>();
        let pending = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&pending);
        let thread = std::thread::Builder::new().name("undercroft-close".to_owned());
        thread.spawn(move || {
            for descriptor in descriptors {
                drop(descriptor);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        Ok(Self { to_close, pending })
    }

    /// Closes descriptors soon.
    pub(crate) fn close(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        for descriptor in descriptors {
            self.pending.fetch_add(1, Ordering::Relaxed);
            // The thread runs for as long as there is a sender.
            let _ = self.to_close.send(descriptor);
        }
    }

    /// Ends a connection: the peer notices this at once, even if the close waits.
    pub(crate) fn end(&self, connection: UnixStream) {
        let _ = connection.shutdown(Shutdown::Both);
        self.close([connection.into()]);
    }

    /// Number of descriptors that are not closed yet.
    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }
}

/// Closes descriptors without a wait, on a thread of its own.
pub(crate) fn close_elsewhere(descriptors: Vec<OwnedFd>) {
    if descriptors.is_empty() {
        return;
    }
    if let Ok(closer) = Closer::start() {
        closer.close(descriptors);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    /// A descriptor whose last close waits until the receiver is gone, and at most for `most`.
    pub(crate) fn lingering(most: Duration) -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&sender, Some(most)).unwrap();
        (sender.into(), receiver)
    }

    #[test]
    fn the_end_of_a_connection_that_holds_descriptors_waits_for_nothing() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (lingers, receiver) = lingering(PATIENCE);
        let descriptors = [lingers.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = [IoSlice::new(b"x")];
        sendmsg(&theirs, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
        drop(lingers);
        let closer = Closer::start().unwrap();
        let start = Instant::now();
        closer.end(ours);
        assert!(start.elapsed() < PATIENCE / 2);
        assert_eq!(closer.pending(), 1, "the close waits");
        drop(receiver);
        while closer.pending() > 0 {
            assert!(start.elapsed() < PATIENCE / 2);
            std::thread::yield_now();
        }
    }

    #[test]
    fn all_descriptors_of_a_message_are_received() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let descriptors = vec![null.as_fd(); OF_MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(OF_MESSAGE_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = [IoSlice::new(b"x")];
        sendmsg(&theirs, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
        let received = receive(&ours, &mut [0; 8]).unwrap();
        assert_eq!((received.bytes, received.is_cut), (1, false));
        assert_eq!(received.descriptors.len(), OF_MESSAGE_MAX);
    }
}
