//! Events: which payloads have come to a tier or left it, for the routers that follow a session's vLLM.
//!
//! A session that asks for events has a feed. The feed first reports the payloads in the tiers, a few nodes at a time
//! (its replay), then each change. A change at a node that the replay has not reached is not reported: the replay
//! reports the state of the node when it comes there. So each change is reported once. Without a session that asks,
//! nothing is noted.

use std::collections::VecDeque;

use hashbrown::HashSet;
use undercroft_contract::key::NamespaceDigest;
use undercroft_contract::session::{BlockEvent, BlockEvents};

use crate::forest::{NONE, NodeId, NsId};
use crate::work;

use super::ids::SessionId;
use super::residency::Residency;

/// Events that one call takes from a feed's ring at most.
pub(super) const EVENTS_MAX: usize = 512;
/// Nodes that a step of a replay looks at.
const REPLAY_STEP: usize = 512;

/// The events for one session.
///
/// Invariant: except for the events in the ring, the client knows exactly the payloads of the told nodes, by tier.
#[derive(Debug)]
struct Feed {
    session: SessionId,
    of: FeedOf,
    ring: VecDeque<BlockEvent>,
    /// Events were dropped, or the session has another namespace: all payloads are told anew.
    is_stale: bool,
    replay: Replay,
    /// The number of the first block in the remote store that was not told; `u64::MAX` if all were told.
    remote_next: u64,
}

/// The namespace that a feed tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FeedOf {
    pub(super) ns: NsId,
    /// The life of the namespace: its index may meanwhile belong to another namespace.
    pub(super) instance: u64,
    /// The namespace's digest in the remote store; `None` if it is private. A new life keeps the digest.
    pub(super) digest: Option<NamespaceDigest>,
}

/// How far a replay has come, in the order of the nodes' ids; a node's ancestors are told before it.
#[derive(Debug, Default)]
struct Replay {
    /// The first node that was not looked at; `NONE` if all were looked at.
    next: NodeId,
    /// Nodes from `next` on that have been told before their turn.
    ahead: HashSet<NodeId>,
    /// A chain of nodes to be told, with their epochs, the last one first.
    path: Vec<(NodeId, u32)>,
    /// Nodes above the path have not been looked at.
    climbs: bool,
}

impl Replay {
    /// Whether a node's changes are told.
    fn has_reported(&self, id: NodeId) -> bool {
        id < self.next || !self.ahead.is_empty() && self.ahead.contains(&id)
    }

    /// Whether all nodes were told.
    fn is_done(&self) -> bool {
        self.next == NONE
    }

    /// Adds events for some more of the payloads that a namespace has in the tiers.
    fn step(&mut self, ns: NsId, residency: &Residency, events: &mut Vec<BlockEvent>) {
        let forest = residency.forest();
        for _ in 0..REPLAY_STEP {
            work::node();
            if self.climbs {
                self.climb(residency);
            } else if let Some((id, epoch)) = self.path.pop() {
                let is_here = forest.is_live(id, epoch) && !residency.node(id).is_detached();
                if is_here && !self.has_reported(id) {
                    self.ahead.insert(id);
                    let payloads = residency.readable(id).into_iter();
                    events.extend(
                        payloads.map(|(group, tier)| residency.event(id, group, tier, true)),
                    );
                }
            } else if self.next as usize >= forest.ids_given() {
                // The changes of all nodes are told from now on.
                self.next = NONE;
                self.ahead.clear();
                return;
            } else {
                let id = self.next;
                let is_due = forest.is_used(id)
                    && residency.node(id).ns == ns
                    && !residency.node(id).is_detached()
                    && !self.has_reported(id);
                if is_due {
                    self.path.push((id, residency.node(id).epoch));
                    self.climbs = true;
                } else {
                    self.next += 1;
                    self.ahead.remove(&id);
                }
            }
        }
    }

    /// Goes one node up from the top of the path.
    fn climb(&mut self, residency: &Residency) {
        let top = self.path.last().copied();
        let top = top.filter(|&(id, epoch)| residency.forest().is_live(id, epoch));
        let Some((top, _)) = top else {
            // The node was freed meanwhile: the replay continues with the rest of the path.
            self.path.pop();
            self.climbs = false;
            return;
        };
        let above = residency.node(top).parent();
        let is_due = |above: NodeId| {
            above != NONE && !residency.node(above).is_detached() && !self.has_reported(above)
        };
        if is_due(above) {
            self.path.push((above, residency.node(above).epoch));
        } else {
            self.climbs = false;
        }
    }
}

impl Feed {
    fn new(session: SessionId, of: FeedOf) -> Self {
        Self {
            session,
            of,
            ring: VecDeque::new(),
            is_stale: false,
            replay: Replay::default(),
            remote_next: 0,
        }
    }

    fn push(&mut self, event: BlockEvent, capacity: usize) {
        if self.ring.len() >= capacity {
            self.is_stale = true;
            self.ring = VecDeque::new();
        } else {
            self.ring.push_back(event);
        }
    }

    /// Whether the replay has told all payloads of the tiers and the remote store.
    fn is_complete(&self) -> bool {
        self.replay.is_done() && self.remote_next == u64::MAX
    }
}

/// The feeds of the sessions that have asked for events.
#[derive(Debug)]
pub(super) struct Feeds {
    feeds: Vec<Feed>,
    /// Events that a feed keeps at most.
    capacity: usize,
}

impl Feeds {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            feeds: Vec::new(),
            capacity,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.feeds.is_empty()
    }

    /// Notes a change of a node, for the feeds that have told the node.
    pub(super) fn note(&mut self, ns: NsId, id: NodeId, event: BlockEvent) {
        for feed in &mut self.feeds {
            if feed.of.ns != ns || feed.is_stale || !feed.replay.has_reported(id) {
                continue;
            }
            feed.push(event, self.capacity);
        }
    }

    /// Notes a change of a block in the remote store, for the feeds that have told its number.
    pub(super) fn note_remote(&mut self, digest: &NamespaceDigest, number: u64, event: BlockEvent) {
        for feed in &mut self.feeds {
            let is_of = feed.of.digest.as_ref() == Some(digest);
            if is_of && !feed.is_stale && number < feed.remote_next {
                feed.push(event, self.capacity);
            }
        }
    }

    pub(super) fn close(&mut self, session: SessionId) {
        self.feeds.retain(|feed| feed.session != session);
    }

    /// Whether a session whose namespace is `of` has events to take.
    pub(super) fn has_some(&self, session: SessionId, of: Option<FeedOf>) -> bool {
        let feed = self.feeds.iter().find(|feed| feed.session == session);
        feed.is_none_or(|feed| {
            !feed.ring.is_empty() || feed.is_stale || Some(feed.of) != of || !feed.is_complete()
        })
    }

    /// The next events for a session whose namespace is `of`. A session without a feed gets one. `restart` begins the
    /// feed anew, for a client that has forgotten the events. `replay_remote` adds events for blocks in the remote store
    /// from a number on, and returns the number that comes next.
    pub(super) fn take(
        &mut self,
        (session, of): (SessionId, FeedOf),
        restart: bool,
        residency: &Residency,
        replay_remote: impl FnOnce(u64, &mut Vec<BlockEvent>) -> u64,
    ) -> BlockEvents {
        let known = self.feeds.iter().position(|feed| feed.session == session);
        let index = known.unwrap_or_else(|| {
            self.feeds.push(Feed::new(session, of));
            self.feeds.len() - 1
        });
        let feed = &mut self.feeds[index];
        let cleared = !restart && (feed.is_stale || feed.of != of);
        if cleared || restart {
            *feed = Feed::new(session, of);
        }
        let count = feed.ring.len().min(EVENTS_MAX);
        let events = feed.ring.drain(..count).collect();
        let mut taken = BlockEvents {
            cleared,
            events,
            more: true,
        };
        // A node of the replay may have the hash of a node whose removal is still in the ring.
        if !feed.ring.is_empty() {
            return taken;
        }
        if !feed.replay.is_done() {
            feed.replay.step(of.ns, residency, &mut taken.events);
        } else if feed.remote_next != u64::MAX {
            feed.remote_next = replay_remote(feed.remote_next, &mut taken.events);
        }
        taken.more = !feed.is_complete();
        taken
    }
}
