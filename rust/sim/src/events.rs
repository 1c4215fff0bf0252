//! Routers: each client replays its events into an index of its own, which is compared with the engine's tiers.

use std::collections::HashSet;

use undercroft_core::key::BlockHash;
use undercroft_core::session::{BlockEvent, BlockEvents};

use crate::world::World;

/// More calls than all events need.
const CALLS_MAX: usize = 200;

/// The index of a router: payloads by hash, group and tier.
#[derive(Debug, Default)]
pub(crate) struct RouterIndex {
    payloads: HashSet<(BlockHash, u8, u8)>,
    /// Whether the last call left no further events.
    is_complete: bool,
    /// Whether the router's client has taken events.
    pub(crate) listens: bool,
}

fn key(event: &BlockEvent) -> (BlockHash, u8, u8) {
    (event.hash, event.group, event.tier as u8)
}

impl RouterIndex {
    /// Applies events. No payload is announced twice, and no payload is removed that was not
    /// announced.
    fn apply(&mut self, told: &BlockEvents) -> Result<(), String> {
        if told.cleared {
            self.payloads.clear();
        }
        for event in &told.events {
            let changed = if event.stored {
                self.payloads.insert(key(event))
            } else {
                self.payloads.remove(&key(event))
            };
            if !changed {
                return Err(format!("told in vain: {event:?}"));
            }
        }
        self.is_complete = !told.more;
        Ok(())
    }
}

impl World {
    /// A router takes some events.
    pub(crate) fn take_events(&mut self, session: usize) -> Result<(), String> {
        let restart = self.random.chance(20);
        let client = &mut self.sessions[session];
        if restart {
            client.router.payloads.clear();
        }
        let told = client.session.take_events(restart);
        if restart && told.cleared {
            return Err("what a router has forgotten is voided".to_owned());
        }
        client.router.listens = true;
        self.log.stats.events += told.events.len() as u64;
        self.log.stats.events_cleared += u64::from(told.cleared);
        client.router.apply(&told)
    }

    /// Routers that have taken all events hold the same payloads as the engine.
    pub(crate) fn check_routers(&mut self) -> Result<(), String> {
        for session in 0..self.sessions.len() {
            if !self.sessions[session].router.listens {
                continue;
            }
            for _ in 0..CALLS_MAX {
                self.take_events(session)?;
                if self.sessions[session].router.is_complete {
                    break;
                }
            }
            let client = &self.sessions[session];
            let there = self.engine.uncounted(|engine| {
                let mut there = engine.announced(client.id);
                there.extend(engine.announced_remote(client.id));
                there
            });
            let there: HashSet<_> = there.iter().map(key).collect();
            let known = &client.router.payloads;
            if !client.router.is_complete || *known != there {
                let extra: Vec<_> = known.difference(&there).collect();
                let missing: Vec<_> = there.difference(known).collect();
                return Err(format!(
                    "a router believes in {extra:?} and does not know {missing:?}"
                ));
            }
            self.log.stats.routers_checked += 1;
        }
        Ok(())
    }
}
