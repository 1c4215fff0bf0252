//! Workers whose connection has ended without a release of the arena. A killed process closes its descriptors one by
//! one, the highest first, while its device may still copy. So such a worker counts until its process has ended.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use undercroft_contract::session::SessionToken;
use undercroft_io::fork::Unshared;

use crate::peer::is_quiet;

/// Time for which a worker counts if its process cannot be watched: in another PID namespace, before Linux 6.5.
const UNWATCHED: Duration = Duration::from_secs(10);

/// A descriptor of a worker's process, which is readable once the whole process has ended; `None` if the process
/// cannot be watched.
pub(super) fn process_of(worker: &UnixStream) -> Option<Unshared<OwnedFd>> {
    if let Ok(process) = getsockopt(worker, PeerPidfd) {
        return Some(process.into());
    }
    let credentials = getsockopt(worker, PeerCredentials).ok()?;
    let process = pidfd_open(Pid::from_raw(credentials.pid())?, PidfdFlags::empty()).ok()?;
    // The pid may belong to another process by now, unless the worker is still connected after the lookup of the pid.
    is_quiet(worker, PollFlags::empty()).then(|| process.into())
}

#[derive(Debug)]
struct LeavingWorker {
    session: SessionToken,
    process: Option<Unshared<OwnedFd>>,
    pid: i32,
    since: Instant,
}

impl LeavingWorker {
    fn is_gone(&self) -> bool {
        match &self.process {
            Some(process) => {
                let mut fds = [PollFd::new(process, PollFlags::IN)];
                poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            }
            None => self.since.elapsed() >= UNWATCHED,
        }
    }
}

/// The workers that are leaving.
#[derive(Debug, Default)]
pub(super) struct LeavingWorkers(Vec<LeavingWorker>);

impl LeavingWorkers {
    /// The connection of a worker of the process `pid` has ended.
    pub(super) fn add(
        &mut self,
        session: SessionToken,
        pid: i32,
        process: Option<Unshared<OwnedFd>>,
    ) {
        self.0.push(LeavingWorker {
            session,
            process,
            pid,
            since: Instant::now(),
        });
    }

    /// Descriptors to wait for. Each is readable once its worker has ended.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let processes = self.0.iter().filter_map(|worker| worker.process.as_ref());
        processes.map(|process| PollFd::new(process, PollFlags::IN))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Number of workers of the process `pid`.
    pub(super) fn of_process(&self, pid: i32) -> usize {
        self.0.iter().filter(|worker| worker.pid == pid).count()
    }

    /// The sessions of the workers that have ended, one entry for each worker.
    pub(super) fn take_gone(&mut self) -> Vec<SessionToken> {
        let gone = self.0.extract_if(.., |worker| worker.is_gone());
        gone.map(|worker| worker.session).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_lives_is_waited_for_and_one_that_is_gone_is_not() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let mut leaving = LeavingWorkers::default();
        leaving.add(
            SessionToken(7),
            pid.as_raw_nonzero().get(),
            Some(pidfd_open(pid, PidfdFlags::empty()).unwrap().into()),
        );
        assert_eq!(leaving.take_gone(), []);
        drop(child.stdin.take());
        let mut fds: Vec<_> = leaving.fds().collect();
        poll(&mut fds, None).unwrap();
        assert_eq!(leaving.take_gone(), [SessionToken(7)]);
        assert_eq!(leaving.fds().count(), 0);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_cannot_be_watched_counts_for_seconds() {
        let mut leaving = LeavingWorkers::default();
        leaving.add(SessionToken(7), 0, None);
        assert_eq!(leaving.take_gone(), []);
        assert_eq!(leaving.of_process(0), 1);
        leaving.0[0].since -= UNWATCHED;
        assert_eq!(leaving.take_gone(), [SessionToken(7)]);
    }

    #[test]
    fn the_process_at_the_other_end_is_the_one_that_connected() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut leaving = LeavingWorkers::default();
        leaving.add(SessionToken(1), 1, process_of(&ours));
        assert!(leaving.0[0].process.is_some());
        assert_eq!(leaving.take_gone(), [], "this process lives");
        drop(theirs);
    }
}
