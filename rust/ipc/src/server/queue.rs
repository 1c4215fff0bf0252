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

/// Largest advantage, in time, of a process without work for a long time: about one turn, so that it comes first. Each of
/// many such processes with work at once delays the others by this.
const CREDIT: Duration = Duration::from_micros(100);

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

/// The time that was spent on a process, and its connections.
#[derive(Debug, Default)]
struct Account {
    spent: Duration,
    connections: usize,
    /// Those with work, in the order in which they came. Some may be closed.
    waiting: VecDeque<ConnectionId>,
}

/// The accounts of all processes with a connection. A turn costs a look at each account, not at each connection.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    accounts: SlotMap<AccountId, Account>,
    /// Connections with work, of all accounts.
    waiting: usize,
    /// The time that was spent on the process of the last turn.
    clock: Duration,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Number of accounts.
    #[cfg(test)]
    pub(super) fn accounts(&self) -> usize {
        self.accounts.len()
    }

    /// The account of a new connection: that of its process, `shared`, if the process has other connections.
    pub(super) fn open(&mut self, shared: Option<AccountId>) -> AccountId {
        let id = shared.unwrap_or_else(|| self.accounts.insert(Account::default()));
        self.accounts[id].connections += 1;
        id
    }

    /// A connection has been closed.
    pub(super) fn close(&mut self, account: AccountId) {
        self.accounts[account].connections -= 1;
        if self.accounts[account].connections == 0 {
            let closed = self.accounts.remove(account);
            self.waiting -= closed.map_or(0, |closed| closed.waiting.len());
        }
    }

    /// A connection has work.
    pub(super) fn push(&mut self, id: ConnectionId, peer: &mut Peer) {
        if !std::mem::replace(&mut peer.is_queued, true) {
            let account = &mut self.accounts[peer.account];
            account.spent = account.spent.max(self.clock.saturating_sub(CREDIT));
            account.waiting.push_back(id);
            self.waiting += 1;
        }
    }

    /// Removes and returns the connection whose turn it is.
    pub(super) fn pop(&mut self, peers: &mut SlotMap<ConnectionId, Peer>) -> Option<ConnectionId> {
        loop {
            let waiting = |account: &&mut Account| !account.waiting.is_empty();
            let accounts = self.accounts.values_mut().filter(waiting);
            let account = accounts.min_by_key(|account| account.spent)?;
            let id = account.waiting.pop_front()?;
            self.waiting -= 1;
            if let Some(peer) = peers.get_mut(id) {
                peer.is_queued = false;
                self.clock = self.clock.max(account.spent);
                return Some(id);
            }
        }
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
    fn who_was_alone_waits_for_two_turns_of_each_of_a_crowd_that_comes() {
        let mut busy = Busy::default();
        let first = busy.add(1)[0];
        for _ in 0..1000 {
            busy.push(first);
            busy.turn(|_| SLICE);
        }
        let crowd: Vec<ConnectionId> = (0..24).flat_map(|_| busy.add(32)).collect();
        for &id in &crowd {
            busy.push(id);
        }
        busy.push(first);
        let mut before = 0;
        while busy.turn(|_| SLICE) != first {
            before += 1;
        }
        assert!(before <= 2 * 24, "{before} turns of others came first");
    }

    #[test]
    fn the_work_of_closed_connections_is_forgotten() {
        let mut busy = Busy::default();
        let (closed, open) = (busy.add(2), busy.add(2));
        for &id in closed.iter().chain(&open) {
            busy.push(id);
        }
        for &id in closed.iter().chain(&open[..1]) {
            let peer = busy.peers.remove(id).unwrap();
            busy.queue.close(peer.account);
        }
        assert_eq!(busy.queue.accounts(), 1);
        assert_eq!(busy.queue.pop(&mut busy.peers), Some(open[1]));
        assert_eq!(busy.queue.pop(&mut busy.peers), None);
        assert!(busy.queue.is_empty());
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
