//! Hints: clients give them for their prompts, and pinned blocks must stay. Routers: each client replays its events into an
//! index of its own, which is compared with the engine's tiers.

use std::collections::HashSet;

use undercroft_contract::hint::{Hint, HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::Tokens;
use undercroft_contract::tier::Tier;
use undercroft_engine::metrics::Counters;

use crate::model::HASH_BLOCK;
use crate::participants::{SimPin, SimPins, payload_named};
use crate::world::World;

const MILLISECOND: u64 = 1_000_000;
/// The longest time to live of a pin.
pub(crate) const TTL_MAX_NS: u64 = 5_000 * MILLISECOND;

/// Number of pins that have ended before their time, and of payloads that devices have lost.
fn ended_early(counters: &Counters) -> u64 {
    counters.pins_over_budget
        + counters.pins_gave_way
        + counters.pins_lost
        + counters.hints_release_accepted
        + counters.checksum_failures
        + counters.host_checksum_failures
        + counters.decryption_failures
        + counters.read_failures
        + counters.write_failures
}

impl World {
    /// A client gives a hint about one of its prompts.
    pub(crate) fn hint(&mut self, session: usize) {
        let count = self.sessions[session].requests.len();
        if count == 0 {
            return;
        }
        let request = self.random.index(count);
        let name = self.random.pick(&["", "", "one", "other"]).to_owned();
        let ttl_ns = self.random.range(1, TTL_MAX_NS);
        let hint = match self.random.below(10) {
            0..=4 => Hint::Pin { ttl_ns, name },
            5..=6 => Hint::Prefetch,
            7..=8 => Hint::Demote,
            _ => Hint::Release { name },
        };
        self.note_weights(session, request);
        let (_, most) = self.limits(session, request);
        let of = &self.sessions[session];
        let state = &of.requests[request];
        let answer = of.session.hint(&HintRequest {
            request: &state.name,
            hashes: &state.hashes,
            max: Tokens(most),
            hint: &hint,
        });
        let request_name = state.name.clone();
        self.log.stats.hints += 1;
        self.note(|| format!("hint {hint:?} on {request_name} most {most}: {answer:?}"));
        let Hint::Pin { ttl_ns, name } = &hint else {
            return;
        };
        let is_pinned = matches!(answer, HintAnswer::Accepted(_) | HintAnswer::Clipped(_));
        let is_over = answer == HintAnswer::Rejected(HintRefusal::OverBudget);
        if !name.is_empty() && (is_pinned || is_over) {
            // Another pin of that name has ended, also when the budget has no room for the new one.
            let namespace = self.sessions[session].namespace;
            self.pins.pins.retain(|pin| pin.namespace != namespace);
        }
        if let HintAnswer::Accepted(tokens) | HintAnswer::Clipped(tokens) = answer {
            self.pinned(session, request, tokens, *ttl_ns);
        }
    }

    /// Notes the present payloads of a pin, which must stay.
    fn pinned(&mut self, session: usize, request: usize, tokens: Tokens, ttl_ns: u64) {
        self.log.stats.pins += 1;
        let of = &self.sessions[session];
        let spec = &self.models[of.namespace].spec;
        let is_full: Vec<bool> = spec
            .groups
            .iter()
            .map(|of| of.kind == GroupKind::Full)
            .collect();
        let hashes = &of.requests[request].hashes[..(tokens.0 / HASH_BLOCK) as usize];
        let chain: HashSet<BlockHash> = hashes.iter().copied().collect();
        let there = self
            .engine
            .uncounted(|engine| engine.inspect().announced(of.id));
        let kept = there
            .iter()
            .filter(|event| is_full[usize::from(event.group)] && chain.contains(&event.hash));
        let payloads: Vec<(BlockHash, u8)> = kept.map(|event| (event.hash, event.group)).collect();
        self.pins.pins.push(SimPin {
            namespace: of.namespace,
            epoch: self.models[of.namespace].epoch,
            payloads,
            ends_ns: self.clock.now_ns.saturating_add(ttl_ns),
        });
    }

    /// Pinned blocks are in some tier, unless a pin had to end early.
    pub(crate) fn check_pins(&mut self) -> Result<(), String> {
        let counters = self.engine.uncounted(|engine| *engine.counters());
        let ended = ended_early(&counters);
        let now_ns = self.clock.now_ns;
        if ended != self.pins.ended || self.settings.crowded || !self.settings.faults.is_none() {
            self.pins.pins.clear();
            self.pins.ended = ended;
        }
        let models = &self.models;
        self.pins
            .pins
            .retain(|pin| pin.ends_ns > now_ns && models[pin.namespace].epoch == pin.epoch);
        for pin in &self.pins.pins {
            let mut sessions = self.sessions.iter();
            let Some(of) = sessions.find(|of| of.namespace == pin.namespace) else {
                continue;
            };
            let there = self
                .engine
                .uncounted(|engine| engine.inspect().announced(of.id));
            let there: HashSet<_> = there
                .iter()
                .map(|event| (event.hash, event.group))
                .collect();
            let mut lost = pin
                .payloads
                .iter()
                .filter(|payload| !there.contains(*payload));
            if let Some(lost) = lost.next() {
                return Err(format!(
                    "{lost:?} is pinned, and neither in {:?}",
                    Tier::ALL
                ));
            }
            self.log.stats.pins_checked += 1;
        }
        Ok(())
    }

    /// All pins have ended some time after the last use.
    pub(crate) fn end_pins(&mut self) -> Result<(), String> {
        self.pins = SimPins::default();
        self.set_now(self.clock.now_ns + TTL_MAX_NS);
        for _ in 0..1000 {
            self.start_io()?;
            if self.engine.with(|engine| engine.gauges().pins) == 0 {
                return Ok(());
            }
        }
        Err("a pin does not end".to_owned())
    }
}

/// More calls than all events need.
const CALLS_MAX: usize = 200;

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
                let mut there = engine.inspect().announced(client.id);
                there.extend(engine.inspect().announced_remote(client.id));
                there
            });
            let there: HashSet<_> = there.iter().map(payload_named).collect();
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
