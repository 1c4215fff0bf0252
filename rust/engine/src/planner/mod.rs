//! Load or compute: how long a load will take, how long computing would take, and which loads are started and awaited.
//!
//! The planner learns from operations that run anyway: finished reads of each device ([`rates`]), gets from the remote
//! store ([`remote`]), copies of the workers ([`line`]), steps that the connector reports ([`step_model`]). [`plan`]
//! decides from these times alone. The planner has no clock, so the same events lead to the same decisions.

mod counts;
mod line;
mod model;
mod plan;
mod rates;
mod remote;
mod step_model;

use slotmap::SecondaryMap;
use undercroft_contract::session::Step;

use crate::metrics::Gauges;

use super::ids::SessionId;
use model::Model;
use plan::{Wait, Way};

pub(super) use counts::FetchSource;
pub(super) use model::Prompt;
pub(super) use plan::{Reason, Stop};
pub(super) use rates::{Rates, ReadShare};
pub(super) use remote::{Fetch, RemoteRates};

/// Without a prediction, a load must gain at least this many tokens: a load takes a step more than computing.
const LEAST_UNKNOWN: u32 = 64;

/// After this time without a read, the engine makes some reads although they seem too slow: their times may have
/// changed. The same holds for loads from host memory.
pub(super) const MEASURE_AFTER_NS: u64 = 250_000_000;

/// A read is started only if it could take this multiple of its predicted time before the guarantee ends the wait. A
/// read that is hardly faster than computing gains less than a wait costs that the guarantee ends.
const SLOWER: f64 = 1.1;

/// Tokens of a long prompt, for the gauges.
const LONG: u32 = 32 << 10;

/// How long tokens take to come from a disk, or from the remote store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Nanoseconds until the first usable part has arrived.
    pub(super) first_ns: f64,
    /// Nanoseconds until all tokens have arrived.
    pub(super) all_ns: f64,
    /// Tokens of a usable part.
    pub(super) block: u32,
    /// Tokens that are in flight at once. Tokens in flight do not count as delayed.
    pub(super) together: u32,
    pub(super) is_prefetch: bool,
    /// Expected part of the tokens that the store has.
    pub(super) present: f64,
    /// Nanoseconds until the store has answered that it has none of the tokens.
    pub(super) absent_ns: f64,
    /// Enough was measured for these times.
    pub(super) is_known: bool,
    /// Nothing was measured for long, and nothing is being measured.
    pub(super) is_old: bool,
}

/// A decision about a promotion, or a flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) promotes: bool,
    pub(super) reason: Reason,
}

#[derive(Debug)]
pub(super) struct Planner {
    pub(super) rates: Rates,
    models: SecondaryMap<SessionId, Model>,
    /// Near-even decisions so far.
    near_even: u64,
    /// See [`EngineConfig::load_margin`](super::EngineConfig::load_margin).
    margin: f64,
    /// The session that reported last.
    latest: Option<SessionId>,
    /// Bytes per token at the last decision about a promotion, for the gauges.
    bytes_per_token: f64,
}

impl Planner {
    pub(super) fn new(margin: f64, seed: u64) -> Self {
        Self {
            rates: Rates::default(),
            models: SecondaryMap::new(),
            near_even: seed % 100,
            margin,
            latest: None,
            bytes_per_token: 0.0,
        }
    }

    /// Learns from steps that a vLLM has run.
    pub(super) fn add_steps(&mut self, session: SessionId, steps: &[Step]) {
        self.latest = Some(session);
        let Some(entry) = self.models.entry(session) else {
            return;
        };
        let model = entry.or_default();
        steps.iter().for_each(|step| model.steps.add(step));
    }

    /// Learns from a load that workers have copied.
    pub(super) fn add_copy(&mut self, session: SessionId, bytes: u64, took_ns: u64, now_ns: u64) {
        if let Some(entry) = self.models.entry(session) {
            let model = entry.or_default();
            let turn_ns = model.steps.turn_ns() as u64;
            model
                .copies
                .add(bytes, took_ns.saturating_sub(turn_ns), now_ns);
        }
    }

    /// Forgets a session that was closed.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.models.remove(session);
    }

    fn with_model<R>(&self, session: SessionId, of: impl FnOnce(&Model) -> R) -> R {
        match self.models.get(session) {
            Some(model) => of(model),
            None => of(&Model::default()),
        }
    }

    /// The fewest tokens that a load may gain.
    pub(super) fn least(&self, session: SessionId) -> u32 {
        let knows = |model: &Model| model.steps.is_known() && model.copies.is_known();
        if self.with_model(session, knows) {
            1
        } else {
            LEAST_UNKNOWN
        }
    }

    /// Whether a load of the tokens in host memory, up to `to`, is worth its copy.
    pub(super) fn is_copy_worth(&self, prompt: &Prompt, to: u32, now_ns: u64) -> bool {
        self.with_model(prompt.session, |model| {
            if !model.steps.is_known() || !model.copies.is_known() {
                return to - prompt.computed >= LEAST_UNKNOWN;
            }
            let way = model.way(prompt, to);
            let is_old = now_ns >= model.copies.last_ns().saturating_add(MEASURE_AFTER_NS);
            way.saved_ns > way.cost_ns || is_old && to - prompt.computed >= LEAST_UNKNOWN
        })
    }

    /// Whether to read the tokens that a load up to `to` needs and a load up to `from` does not.
    pub(super) fn start(
        &mut self,
        prompt: &Prompt,
        (from, to): (u32, u32),
        reading: &Reading,
    ) -> Start {
        self.bytes_per_token = prompt.bytes_per_token;
        let margin = self.margin;
        let ways = self.with_model(prompt.session, |model| {
            (model.steps.is_known() && reading.is_known)
                .then(|| ways(model, prompt, (from, to), reading, margin))
        });
        let Some((more, less, is_safe)) = ways else {
            return Start {
                promotes: true,
                reason: Reason::Unknown,
            };
        };
        let (promotes, reason) = plan::start(more, less, is_safe, &mut self.near_even);
        if !promotes && reading.is_old {
            let reason = Reason::Measure;
            return Start { promotes, reason };
        }
        Start { promotes, reason }
    }

    /// Whether the guarantee leaves time for a wait that takes a little longer than predicted.
    pub(super) fn is_safe(&self, prompt: &Prompt, ends: (u32, u32), reading: &Reading) -> bool {
        self.with_model(prompt.session, |model| {
            let (prompt, reading) = without_queue(model, prompt, reading);
            !model.is_cut_short(&prompt, ends, &reading, SLOWER, self.margin)
        })
    }

    /// Whether a wait for the tokens up to `boundary` ends now, and why. The tokens up to `arrived` have arrived; the
    /// next `block` tokens arrive together. `rest_ns`: time until all tokens have arrived; `None` without a prediction,
    /// or if the prediction shall not count.
    pub(super) fn stop(
        &self,
        prompt: &Prompt,
        (arrived, boundary, block): (u32, u32, u32),
        waited_ns: u64,
        rest_ns: Option<f64>,
    ) -> Option<Stop> {
        self.with_model(prompt.session, |model| {
            let wait = model.wait(prompt, (arrived, boundary, block), waited_ns as f64);
            let rest_ns = rest_ns.filter(|_| model.steps.is_known());
            let wait = Wait {
                rest_ns: rest_ns.map(|ns| model.until_asked_ns(ns)),
                ..wait
            };
            plan::stop(&wait, self.margin)
        })
    }

    /// The computing time that a load saves, and the time of its copy, in nanoseconds.
    pub(super) fn load_ns(&self, prompt: &Prompt, to: u32) -> (f64, f64) {
        self.with_model(prompt.session, |model| {
            let way = model.way(prompt, to);
            (way.saved_ns, way.cost_ns)
        })
    }

    /// Writes the learned rates into the gauges.
    pub(super) fn report(&self, gauges: &mut Gauges) {
        let (bytes_per_s, latency_ns) = self.rates.learned();
        gauges.plan_disk_bytes_per_s = bytes_per_s as u64;
        gauges.plan_disk_latency_ns = latency_ns as u64;
        self.rates.remote.report(gauges);
        let model = self.latest.and_then(|session| self.models.get(session));
        let Some(model) = model else {
            return;
        };
        if model.copies.is_known() {
            gauges.plan_copy_bytes_per_s = model.copies.bytes_per_s() as u64;
            gauges.plan_copy_latency_ns = model.copies.latency_ns() as u64;
        }
        if model.steps.is_known() {
            let rate = |position| 1e12 / model.steps.ns_per_1k(position).max(1.0);
            gauges.plan_prefill_tokens_per_s = rate(0) as u64;
            gauges.plan_prefill_tokens_per_s_32k = rate(LONG) as u64;
            gauges.plan_bytes_per_token = self.bytes_per_token as u64;
        }
    }
}

/// Leaves out the time in which vLLM computes earlier requests: a wait costs nothing in that time.
fn without_queue(model: &Model, prompt: &Prompt, reading: &Reading) -> (Prompt, Reading) {
    if !reading.is_prefetch {
        return (*prompt, *reading);
    }
    let free_ns = model.steps.queue_ns(prompt.queued);
    let rest = |ns: f64| (ns - free_ns).max(0.0);
    let prompt = Prompt {
        queued: 0,
        ..*prompt
    };
    let reading = Reading {
        first_ns: rest(reading.first_ns),
        all_ns: rest(reading.all_ns),
        absent_ns: rest(reading.absent_ns),
        ..*reading
    };
    (prompt, reading)
}

/// The way that loads the tokens up to `to`, the way that loads only the tokens up to `from`, and whether the guarantee
/// would let the first way take a little longer than predicted.
fn ways(
    model: &Model,
    prompt: &Prompt,
    (from, to): (u32, u32),
    reading: &Reading,
    margin: f64,
) -> (Way, Way, bool) {
    let (prompt, reading) = without_queue(model, prompt, reading);
    let is_cut_short = |slower| model.is_cut_short(&prompt, (from, to), &reading, slower, margin);
    let less = if from > prompt.computed {
        model.way(&prompt, from)
    } else {
        Way::NONE
    };
    let all = model.way(&prompt, to);
    let is_safe = !is_cut_short(SLOWER);
    let cost_ns = if !is_safe && is_cut_short(1.0) {
        f64::INFINITY
    } else {
        all.cost_ns + model.until_asked_ns(reading.all_ns)
    };
    let absent_ns = less.cost_ns + model.until_asked_ns(reading.absent_ns);
    let (there, absent) = (reading.present, 1.0 - reading.present);
    let more = Way {
        saved_ns: there * all.saved_ns + absent * less.saved_ns,
        cost_ns: there * cost_ns + absent * absent_ns,
    };
    (more, less, is_safe)
}

#[cfg(test)]
mod tests {
    use undercroft_contract::session::Priority;

    use super::*;

    #[test]
    fn bytes_of_disks_of_which_none_answers_never_come() {
        let rates = Rates::default();
        let wait_ns = rates.wait_ns(1, Priority::Demand, std::iter::empty, |_| 0);
        assert_eq!(wait_ns, f64::INFINITY);
    }

    #[test]
    fn a_read_of_which_no_part_is_of_use_takes_a_quarter_of_computing_at_most() {
        let session = slotmap::SlotMap::<SessionId, ()>::with_key().insert(());
        let mut planner = Planner::new(0.25, 0);
        let step = Step {
            tokens: 1000,
            positions: 0,
            decodes: 0,
            duration_ns: 100_000_000,
        };
        planner.add_steps(session, &[step; 8]);
        let mut starts = |needs_all, wait_ms: f64| {
            let prompt = Prompt {
                session,
                computed: 0,
                end: 1001,
                queued: 0,
                bytes_per_token: 1.0,
            };
            let all_ns = wait_ms * 1e6;
            let reading = Reading {
                first_ns: if needs_all { all_ns } else { all_ns / 10.0 },
                all_ns,
                block: if needs_all { 1000 } else { 100 },
                together: if needs_all { 1000 } else { 100 },
                is_prefetch: false,
                present: 1.0,
                absent_ns: 0.0,
                is_known: true,
                is_old: false,
            };
            planner.start(&prompt, (0, 1000), &reading).promotes
        };
        // Computing takes 100 ms.
        assert_eq!(
            [20.0, 40.0, 120.0].map(|ms| starts(false, ms)),
            [true, true, false]
        );
        assert_eq!(
            [20.0, 40.0, 120.0].map(|ms| starts(true, ms)),
            [true, false, false]
        );
    }
}
