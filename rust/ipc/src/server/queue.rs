//! A fair queue: the next connection with work is one of the process that has had the least time.
//!
//! A process pays for the processor time that it takes. If the kernel preempts or throttles the server's thread while it
//! serves a process, nobody pays for the pause.

use std::collections::VecDeque;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use slotmap::SlotMap;

use super::connection::{AccountId, ConnectionId};
use super::peer::Peer;

/// Largest advantage, in time, of a process without work for a long time.
const CREDIT: Duration = Duration::from_millis(1);

/// Largest debt of a process. Each other process with work may be served for this long before the process has its next
/// turn.
const DEBT: Duration = Duration::from_millis(1);

/// Least price of a turn: the clock of some kernels stands still for milliseconds.
const PRICE_MIN: Duration = Duration::from_micros(1);

/// The processor time of the calling thread.
pub(super) fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::from_secs(now.tv_sec.unsigned_abs())
        + Duration::from_nanos(now.tv_nsec.unsigned_abs())
}

/// The time that was spent on a process.
#[derive(Debug)]
struct Account {
    spent: Duration,
    connections: usize,
}

/// Connections with work, and the accounts of all processes with a connection.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    accounts: SlotMap<AccountId, Account>,
    /// In the order in which the connections came.
    waiting: VecDeque<ConnectionId>,
    /// The time that was spent on the process of the last turn.
    clock: Duration,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Number of accounts.
    #[cfg(test)]
    pub(super) fn accounts(&self) -> usize {
        self.accounts.len()
    }

    /// The account of a new connection: that of its process, `shared`, if the process has other connections.
    pub(super) fn open(&mut self, shared: Option<AccountId>) -> AccountId {
        let new = Account {
            spent: Duration::ZERO,
            connections: 0,
        };
        let id = shared.unwrap_or_else(|| self.accounts.insert(new));
        self.accounts[id].connections += 1;
        id
    }

    /// A connection has been closed.
    pub(super) fn close(&mut self, account: AccountId) {
        self.accounts[account].connections -= 1;
        if self.accounts[account].connections == 0 {
            self.accounts.remove(account);
        }
    }

    /// A connection has work.
    pub(super) fn push(&mut self, id: ConnectionId, peer: &mut Peer) {
        if !std::mem::replace(&mut peer.is_queued, true) {
            let spent = &mut self.accounts[peer.account].spent;
            *spent = (*spent).max(self.clock.saturating_sub(CREDIT));
            self.waiting.push_back(id);
        }
    }

    /// Removes and returns the connection whose turn it is.
    pub(super) fn pop(&mut self, peers: &mut SlotMap<ConnectionId, Peer>) -> Option<ConnectionId> {
        self.waiting.retain(|&id| peers.contains_key(id));
        let spent_on = |id: ConnectionId| self.accounts[peers[id].account].spent;
        let waiting = self.waiting.iter().enumerate();
        let (at, _) = waiting.min_by_key(|&(_, &id)| spent_on(id))?;
        let id = self.waiting.remove(at)?;
        let peer = &mut peers[id];
        peer.is_queued = false;
        self.clock = self.clock.max(self.accounts[peer.account].spent);
        Some(id)
    }

    /// A turn of a connection of this account took so much processor time.
    pub(super) fn charge(&mut self, account: AccountId, took: Duration) {
        let most = self.clock + DEBT;
        let spent = &mut self.accounts[account].spent;
        *spent = (*spent + took.max(PRICE_MIN)).min(most);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    const SLICE: Duration = Duration::from_micros(100);

    /// A queue with connections that all have work.
    #[derive(Default)]
    struct Busy {
        queue: FairQueue,
        peers: SlotMap<ConnectionId, Peer>,
    }

    impl Busy {
        /// A process with so many connections.
        fn add(&mut self, connections: usize) -> Vec<ConnectionId> {
            let mut shared = None;
            let mut add = || {
                let account = self.queue.open(shared);
                shared = Some(account);
                let stream = UnixStream::pair().unwrap().0;
                self.peers.insert(Peer::new(stream, 1, account))
            };
            (0..connections).map(|_| add()).collect()
        }

        fn push(&mut self, id: ConnectionId) {
            self.queue.push(id, &mut self.peers[id]);
        }

        /// Gives a turn of this price to the next connection.
        fn turn(&mut self, price: impl Fn(ConnectionId) -> Duration) -> ConnectionId {
            let id = self.queue.pop(&mut self.peers).unwrap();
            self.queue.charge(self.peers[id].account, price(id));
            id
        }

        fn spent(&self, id: ConnectionId) -> Duration {
            self.queue.accounts[self.peers[id].account].spent
        }
    }

    #[test]
    fn those_that_take_much_wait_for_those_that_take_little() {
        let mut busy = Busy::default();
        let small = busy.add(1)[0];
        let large: Vec<ConnectionId> = (0..8).map(|_| busy.add(1)[0]).collect();
        let mut waited = 0;
        for round in 0..2000 {
            for &id in &large {
                busy.push(id);
            }
            // The small peer has work in every tenth round.
            if round % 10 == 0 {
                busy.push(small);
            }
            let id = busy.turn(|id| if id == small { SLICE / 20 } else { SLICE });
            waited += usize::from(round % 10 == 0 && id != small && round > 100);
        }
        assert_eq!(waited, 0, "it waits although it has had least");
        let spent: Vec<Duration> = large.iter().map(|&id| busy.spent(id)).collect();
        let (least, most) = (spent.iter().min().unwrap(), spent.iter().max().unwrap());
        assert!(*most - *least <= SLICE, "{spent:?}");
    }

    #[test]
    fn who_is_charged_for_a_pause_waits_for_a_few_turns_of_the_others_only() {
        let mut busy = Busy::default();
        let (victim, others) = (busy.add(1)[0], 8);
        let others: Vec<ConnectionId> = (0..others).map(|_| busy.add(1)[0]).collect();
        let turns = |busy: &mut Busy| {
            busy.push(victim);
            let mut served = 0;
            loop {
                for &id in &others {
                    busy.push(id);
                }
                if busy.turn(|_| SLICE) == victim {
                    return served;
                }
                served += 1;
            }
        };
        for _ in 0..100 {
            turns(&mut busy);
        }
        let account = busy.peers[victim].account;
        busy.queue.charge(account, Duration::from_millis(300));
        let most = others.len() * DEBT.div_duration_f64(SLICE).ceil() as usize + others.len();
        let served = turns(&mut busy);
        assert!(served <= most, "{served} turns of others came first");
    }

    #[test]
    fn a_process_with_many_connections_gets_no_more_than_one_with_a_single_connection() {
        let mut busy = Busy::default();
        let crowd: Vec<ConnectionId> = (0..4).flat_map(|_| busy.add(32)).collect();
        let single = busy.add(1)[0];
        let mut of_single = 0;
        let mut turns = HashMap::<ConnectionId, usize>::new();
        for _ in 0..5 * 32 * 10 {
            for &id in &crowd {
                busy.push(id);
            }
            busy.push(single);
            let id = busy.turn(|_| SLICE);
            of_single += usize::from(id == single);
            *turns.entry(id).or_default() += 1;
        }
        assert!(of_single >= 32 * 10 - 1, "{of_single} turns of one fifth");
        // All connections of a process take turns.
        assert!(crowd.iter().all(|id| (9..=11).contains(&turns[id])));
        for (_, peer) in std::mem::take(&mut busy.peers) {
            busy.queue.close(peer.account);
        }
        assert_eq!(busy.queue.accounts(), 0);
    }

    #[test]
    fn a_thread_that_does_not_run_takes_no_processor_time() {
        let (start, before) = (Instant::now(), processor_time());
        std::thread::sleep(Duration::from_millis(50));
        let took = processor_time() - before;
        assert!(took < start.elapsed() / 2, "{took:?}");
    }

    #[test]
    fn with_a_clock_that_stands_still_all_take_turns() {
        let mut busy = Busy::default();
        let all: Vec<ConnectionId> = (0..3).map(|_| busy.add(1)[0]).collect();
        let mut turns = HashMap::<ConnectionId, usize>::new();
        for _ in 0..30 {
            for &id in &all {
                busy.push(id);
            }
            *turns.entry(busy.turn(|_| Duration::ZERO)).or_default() += 1;
        }
        assert!(all.iter().all(|id| turns[id] == 10), "{turns:?}");
    }
}
