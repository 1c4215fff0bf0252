//! A fair queue: the next connection is the one with work that has had the least time.

use std::time::Duration;

use slotmap::SlotMap;

use super::peer::Peer;
use super::service::ConnectionId;

/// Largest advantage, in time, of a connection without work for a long time.
const CREDIT: Duration = Duration::from_millis(1);

/// Connections with work.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    waiting: Vec<ConnectionId>,
    /// The time that was spent on the connection of the last turn.
    clock: Duration,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A connection has work.
    pub(super) fn push(&mut self, id: ConnectionId, peer: &mut Peer) {
        if !std::mem::replace(&mut peer.is_queued, true) {
            peer.spent = peer.spent.max(self.clock.saturating_sub(CREDIT));
            self.waiting.push(id);
        }
    }

    /// Removes and returns the connection whose turn it is.
    pub(super) fn pop(&mut self, peers: &mut SlotMap<ConnectionId, Peer>) -> Option<ConnectionId> {
        self.waiting.retain(|&id| peers.contains_key(id));
        let waiting = self.waiting.iter().enumerate();
        let (at, _) = waiting.min_by_key(|&(_, &id)| peers[id].spent)?;
        let id = self.waiting.swap_remove(at);
        let peer = &mut peers[id];
        peer.is_queued = false;
        self.clock = self.clock.max(peer.spent);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn those_that_take_much_wait_for_those_that_take_little() {
        let mut peers = SlotMap::<ConnectionId, Peer>::with_key();
        let mut add = || peers.insert(Peer::new(UnixStream::pair().unwrap().0, 1));
        let (small, large): (_, Vec<_>) = (add(), (0..8).map(|_| add()).collect());
        let mut queue = FairQueue::default();
        let mut waited = 0;
        for round in 0..2000 {
            for &id in &large {
                queue.push(id, &mut peers[id]);
            }
            // The small peer has work in every tenth round.
            if round % 10 == 0 {
                queue.push(small, &mut peers[small]);
            }
            let id = queue.pop(&mut peers).unwrap();
            let cost = if id == small { 5 } else { 100 };
            peers[id].spent += Duration::from_micros(cost);
            waited += usize::from(round % 10 == 0 && id != small && round > 100);
        }
        assert_eq!(waited, 0, "it waits although it has had least");
        let spent: Vec<Duration> = large.iter().map(|&id| peers[id].spent).collect();
        let (least, most) = (spent.iter().min().unwrap(), spent.iter().max().unwrap());
        assert!(*most - *least <= Duration::from_micros(100), "{spent:?}");
    }
}
