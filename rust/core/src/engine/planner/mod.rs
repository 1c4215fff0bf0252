//! Load or compute: how long a load will take, how long computing would, and which is started and awaited.
//!
//! The planner learns from operations that run anyway: finished reads of each device ([`rates`]), copies of the workers
//! ([`line`]), steps that the connector reports ([`step_model`]). [`plan`] decides of times alone. The planner belongs
//! to the engine: it has no clock, and decides the same for the same events.

mod line;
mod plan;
mod rates;
mod step_model;

use slotmap::SecondaryMap;

use crate::metrics::{Counters, Gauges};
use crate::session::Step;

use super::sessions::SessionId;
use line::{COPIES, Line};
use step_model::StepModel;

pub(super) use plan::{Reason, Stop};
use plan::{Wait, Way};
pub(super) use rates::{Rates, ReadShare};

/// Without a prediction, a hit that gains fewer tokens is not worth a load, which takes a step more than computing.
const LEAST_UNKNOWN: u32 = 64;

/// After so long without a read, some reads are made although they seem too slow, and so is a load from host memory:
/// their times may have changed.
const MEASURE_AFTER_NS: u64 = 250_000_000;

/// Tokens of a long prompt, for the gauges.
const LONG: u32 = 32 << 10;

/// The measurements of one vLLM.
#[derive(Debug)]
struct Model {
    steps: StepModel,
    /// From a load's begin to the end of its copies, less the step that runs meanwhile.
    copies: Line,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            steps: StepModel::default(),
            copies: Line::new(COPIES),
        }
    }
}

/// A prompt, in tokens from its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prompt {
    pub(super) session: SessionId,
    /// Tokens that the device holds.
    pub(super) computed: u32,
    /// Tokens to compute or load, from the start of the prompt.
    pub(super) end: u32,
    /// Tokens that vLLM computes before it.
    pub(super) queued: u32,
    /// Bytes that a load copies for each token, about.
    pub(super) bytes_per_token: f64,
}

/// How long a promotion's reads take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Time until the first part has come that is of use by itself.
    pub(super) first_ns: f64,
    pub(super) all_ns: f64,
    pub(super) is_prefetch: bool,
}

/// A decision about a promotion.
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

    /// A vLLM has run steps.
    pub(super) fn add_steps(&mut self, session: SessionId, steps: &[Step]) {
        self.latest = Some(session);
        let Some(entry) = self.models.entry(session) else {
            return;
        };
        let model = entry.or_default();
        steps.iter().for_each(|step| model.steps.add(step));
    }

    /// Workers have copied a load.
    pub(super) fn add_copy(&mut self, session: SessionId, bytes: u64, took_ns: u64, now_ns: u64) {
        if let Some(entry) = self.models.entry(session) {
            let model = entry.or_default();
            let turn_ns = model.steps.turn_ns() as u64;
            model
                .copies
                .add(bytes, took_ns.saturating_sub(turn_ns), now_ns);
        }
    }

    /// A session was closed.
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

    /// Whether to read the payloads that a load up to `disk` needs beyond one up to `host`. `may_measure`: no reads for
    /// measurement are pending yet.
    pub(super) fn start(
        &mut self,
        prompt: &Prompt,
        (host, disk): (u32, u32),
        reading: Reading,
        may_measure: bool,
        now_ns: u64,
    ) -> Start {
        self.bytes_per_token = prompt.bytes_per_token;
        let rates_known = self.rates.are_known();
        let ways = self.with_model(prompt.session, |model| {
            let mut more = model.way(prompt, disk);
            // While vLLM computes the requests before, waiting costs nothing.
            let free_ns = if reading.is_prefetch {
                model.steps.queue_ns(prompt.queued)
            } else {
                0.0
            };
            let waits = [reading.first_ns, reading.all_ns].map(|ns| (ns - free_ns).max(0.0));
            let [first_ns, all_ns] = waits;
            if first_ns > self.margin * more.saved_ns * model.steps.certain_part() {
                // The guarantee would end the wait before anything has come.
                more.cost_ns = f64::INFINITY;
            }
            more.cost_ns += model.until_asked_ns(all_ns);
            let less = if host > prompt.computed {
                model.way(prompt, host)
            } else {
                Way::NONE
            };
            (model.steps.is_known() && rates_known).then_some((more, less))
        });
        let Some((more, less)) = ways else {
            return Start {
                promotes: true,
                reason: Reason::Unknown,
            };
        };
        let (promotes, reason) = plan::start(more, less, &mut self.near_even);
        let is_old = || {
            let since_ns = now_ns.checked_sub(MEASURE_AFTER_NS);
            since_ns.is_some_and(|since_ns| self.rates.are_old(since_ns))
        };
        if !promotes && may_measure && is_old() {
            let reason = Reason::Measure;
            return Start { promotes, reason };
        }
        Start { promotes, reason }
    }

    /// Whether a wait for a promotion up to `boundary` ends. Its payloads up to `arrived` are there, and its blocks
    /// have `block` tokens.
    pub(super) fn stop(
        &self,
        prompt: &Prompt,
        (arrived, boundary, block): (u32, u32, u32),
        waited_ns: u64,
        rest_ns: impl FnOnce() -> f64,
        follows_prediction: bool,
    ) -> Option<Stop> {
        let rates_known = self.rates.are_known();
        self.with_model(prompt.session, |model| {
            let tokens = f64::from(boundary.saturating_sub(prompt.computed).max(1));
            let here = arrived.max(prompt.computed);
            let all = model.way(prompt, boundary);
            let predicts = follows_prediction && rates_known && model.steps.is_known();
            let wait = Wait {
                waited_ns: waited_ns as f64,
                compute_ns: (all.saved_ns + model.steps.queue_ns(prompt.queued))
                    * model.steps.certain_part(),
                arrived: f64::from(here - prompt.computed) / tokens,
                block: f64::from(block) / tokens,
                all,
                here: model.way(prompt, here),
                rest_ns: predicts.then(|| model.until_asked_ns(rest_ns())),
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

impl Model {
    /// How long a wait of so many nanoseconds takes until vLLM asks again, which it does once a step. On average the
    /// wait ends in the middle of one.
    fn until_asked_ns(&self, wait_ns: f64) -> f64 {
        if wait_ns <= 0.0 {
            return 0.0;
        }
        let turn_ns = self.steps.turn_ns();
        wait_ns.max(turn_ns / 2.0) + turn_ns / 2.0
    }

    /// A load up to `to`: computing that it saves, and its copy. vLLM computes the rest in the step after that of the
    /// copy.
    fn way(&self, prompt: &Prompt, to: u32) -> Way {
        if to <= prompt.computed {
            return Way::NONE;
        }
        let bytes = (f64::from(to - prompt.computed) * prompt.bytes_per_token) as u64;
        Way {
            saved_ns: self.steps.saved_ns(prompt.computed, to, prompt.end),
            cost_ns: self.copies.of(bytes) + self.steps.turn_ns(),
        }
    }
}

impl Reason {
    /// Counts a decision about a promotion that would have brought so many tokens.
    pub(super) fn count(self, promotes: bool, tokens: u32, counters: &mut Counters) {
        let counter = match (promotes, self) {
            (true, Self::Faster | Self::Measure) => &mut counters.plans_load_faster,
            (true, Self::Unknown) => &mut counters.plans_load_unknown,
            (true, Self::OtherWay) => &mut counters.plans_load_other_way,
            (false, Self::OtherWay) => &mut counters.plans_compute_other_way,
            (false, Self::Measure) => &mut counters.plans_compute_measure,
            (false, _) => &mut counters.plans_compute_faster,
        };
        *counter += 1;
        if !promotes {
            let tokens_of = match self {
                Self::OtherWay => &mut counters.tokens_not_loaded_other_way,
                _ => &mut counters.tokens_not_loaded_disk,
            };
            *tokens_of += u64::from(tokens);
        }
    }
}

impl Stop {
    /// Counts the end of a wait, and the tokens that have not come.
    pub(super) fn count(self, tokens: u32, counters: &mut Counters) {
        let (plans, tokens_of) = match self {
            Self::Rest => (
                &mut counters.plans_stopped_rest,
                &mut counters.tokens_not_loaded_rest,
            ),
            Self::Guarantee => (
                &mut counters.plans_stopped_guarantee,
                &mut counters.tokens_not_loaded_guarantee,
            ),
        };
        *plans += 1;
        *tokens_of += u64::from(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forest::DeviceIndex;
    use crate::session::Priority;

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
        let device = DeviceIndex::new(0);
        for i in 1..=8 {
            planner
                .rates
                .read_began(device, 1000, &mut [], Priority::Demand);
            let times = (i, i + 1000);
            planner.rates.read_ended(device, 1000, 1000, times, true);
        }
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
                is_prefetch: false,
            };
            let ends = (0, 1000);
            planner.start(&prompt, ends, reading, false, 2000).promotes
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
