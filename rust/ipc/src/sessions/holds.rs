//! What a session's hits and loads keep in host memory, and the lookups that this memory limits.

use std::sync::Arc;

use undercroft_contract::explain::Reason;
use undercroft_contract::session::Tokens;
use undercroft_driver::{Driver, EngineAccess};

use super::held::HeldChain;
use super::job::FoundHit;
use super::request::Looked;
use super::state::{Budgets, ServedSession};
use crate::budget::leaves_enough;
use crate::protocol::LookupAnswer;

impl ServedSession {
    /// Bytes of host memory that the session's hits and loads keep from eviction.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// A hit or a load has ended, and keeps its chain no longer.
    pub(super) fn let_go(&mut self, held: Option<Arc<HeldChain>>, budgets: &mut Budgets) {
        if let Some(chain) = held {
            self.held.remove(&chain);
            budgets.held.remove(&chain);
            self.request_bytes -= chain.own_memory();
            budgets.hashes.give_back(chain.own_memory());
        }
    }

    /// Whether a request's hit keeps its chain from now on. Otherwise returns the tokens of the longest hit that the
    /// session's share has room for.
    ///
    /// Hits count, too, not only loads: a client begins the load of a hit without asking again.
    fn hold(&mut self, request: u64, hit: &FoundHit, budgets: &mut Budgets) -> Result<(), Tokens> {
        let depth = self.chain_bytes.hash_blocks(hit.tokens);
        let state = self.requests.get_mut(&request).ok_or(Tokens(0))?;
        let hashes = state.hashes.get(..depth as usize).ok_or(Tokens(0))?;
        let memory = HeldChain::memory(hashes.len());
        if !budgets.hashes.allows(self.request_bytes, memory) {
            return Err(Tokens(0));
        }
        let chain = HeldChain::new(&self.scope, hashes, &self.chain_bytes, hit.end_bytes);
        let chain = chain.ok_or(Tokens(0))?;
        let of_all = budgets.held.bytes() + hit.save_bytes;
        let fits = |of_session: u64, more_of_all: u64| {
            leaves_enough(
                hit.host_capacity,
                of_all + more_of_all,
                self.held.bytes() + of_session,
            )
        };
        if !fits(self.held.more(&chain), budgets.held.more(&chain)) {
            // Blocks that this session, or any, keeps already cost its share, or that of all, nothing again.
            let (own, all) = (self.held.shared(&chain), budgets.held.shared(&chain));
            let fits_up_to = |to: u32| {
                let more = |shared: u32| self.chain_bytes.between(shared, to) + hit.end_bytes;
                fits(more(own.min(to)), more(all.min(to)))
            };
            // The bytes only grow with the depth. The whole chain, `depth`, was found not to fit.
            let (mut low, mut high) = (0, depth);
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if fits_up_to(middle) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            return Err(self.chain_bytes.tokens(low));
        }
        self.held.add(&chain);
        budgets.held.add(&chain);
        self.request_bytes += memory;
        budgets.hashes.take(memory);
        state.held = Some(chain);
        Ok(())
    }

    /// The state of a request's lookup, which ends the request's earlier hit. If the session's share of host memory has
    /// no room for the hit, the answer is a shorter hit, or a miss.
    pub(super) fn looked(
        &mut self,
        driver: &Driver,
        budgets: &mut Budgets,
        request: u64,
    ) -> Option<Looked> {
        let state = self.requests.get_mut(&request)?;
        let held = state.held.take();
        let looked = state.lookup(driver, self.id);
        self.let_go(held, budgets);
        let room = match &looked {
            Some(Looked::Hit(hit)) => self.hold(request, hit, budgets),
            _ => return looked,
        };
        let Err(room) = room else {
            return looked;
        };
        let state = self.requests.get_mut(&request)?;
        let max = std::mem::replace(&mut state.max, room);
        let looked = state.lookup(driver, self.id);
        state.max = max;
        let Some(Looked::Hit(mut hit)) = looked else {
            return looked;
        };
        if self.hold(request, &hit, budgets).is_ok() {
            hit.rest = Some(Reason::Budget.into());
            return Some(Looked::Hit(hit));
        }
        let state = self.requests.get(&request)?;
        driver.enter(|engine| engine.end_lookup(self.id, &state.name));
        let answer = LookupAnswer::Miss { shared: hit.shared };
        Some(Looked::Answer(answer, Some(Reason::Budget.into())))
    }
}
