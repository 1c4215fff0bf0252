//! The process at the other end of a socket.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

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

/// Whether a socket has no event of these flags now, and its peer has not hung up. True if the kernel cannot tell.
pub(crate) fn is_quiet(socket: &impl AsFd, flags: PollFlags) -> bool {
    answers_no_event(|| {
        poll(
            &mut [PollFd::new(socket, flags)],
            Some(&Timespec::default()),
        )
    })
}

/// An interrupted question is asked again.
fn answers_no_event(mut ask: impl FnMut() -> Result<usize, Errno>) -> bool {
    loop {
        match ask() {
            Ok(events) => return events == 0,
            Err(Errno::INTR) => {}
            Err(_) => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_interrupted_question_says_nothing_about_the_peer() {
        let is_quiet = |answers: &[Result<usize, Errno>]| {
            let mut answers = answers.iter();
            answers_no_event(|| *answers.next().expect("no further question"))
        };
        assert!(is_quiet(&[Err(Errno::INTR), Err(Errno::INTR), Ok(0)]));
        assert!(!is_quiet(&[Err(Errno::INTR), Ok(1)]));
        assert!(is_quiet(&[Err(Errno::NOMEM)]));
    }

    #[test]
    fn a_message_is_an_event_if_it_is_asked_for_and_the_end_always_is() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        assert!(is_quiet(&ours, PollFlags::IN));
        theirs.write_all(b"x").expect("room");
        assert!(!is_quiet(&ours, PollFlags::IN));
        assert!(is_quiet(&ours, PollFlags::empty()));
        drop(theirs);
        assert!(!is_quiet(&ours, PollFlags::empty()));
    }
}
