//! Fetch or compute: which flights begin, and for how long a request waits for one.

use crate::forest::NodeId;
use crate::session::{LookupRequest, Priority, Tokens};

use super::super::coordinator::Engine;
use super::super::fetch::{Pace, Share};
use super::super::ids::{FlightId, RequestId};
use super::super::planner::{Fetch, FetchSource, Reading, Reason, Start, Stop};
use super::super::requests::RequestState;
use super::Remote;
use super::flight::Flight;
use super::search::FETCHED;
use super::spaces::Space;

/// Segments that are not fetched are noted as left if the store is expected to have at least this part of them.
const LIKELY: f64 = 0.5;

/// Where the hits of a request end, in hash blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitEnds {
    /// Hits end at multiples of this number.
    pub(super) align: u32,
    /// This many of the last hash blocks that are cached cannot be used.
    pub(super) dropped: u32,
}

/// The hash blocks of a prompt that the tiers lack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) space: Space,
    /// The deepest node of the prompt in the tiers, or `NONE`, and its depth.
    pub(super) deepest: NodeId,
    pub(super) found: u32,
    /// Segments before the first segment that is lacking.
    pub(super) skipped: u32,
    /// Number of segments that are lacking; about, with windows or states.
    pub(super) segments: u32,
    /// The end of the hit that the tiers alone allow, and the end of the last segment or the last boundary.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The segments to fetch, of those that a prompt lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetches {
    All {
        /// Gets in flight at once.
        width: u32,
        /// The predicted time of the gets, in nanoseconds; `None` without a prediction.
        predicted_ns: Option<u64>,
    },
    /// This many of the first segments, for which no request waits, to measure the store.
    Some(u32),
    None,
}

impl Engine {
    /// Whether to fetch the segments that a prompt lacks, by a new flight or by the flight `under_way`.
    pub(super) fn plans_flight(
        &mut self,
        id: RequestId,
        request: &LookupRequest<'_>,
        wanted: &Wanted,
        under_way: Option<FlightId>,
    ) -> Fetches {
        let state = &mut self.sessions.requests[id];
        let blocks = u32::try_from(request.hashes.len()).unwrap_or(u32::MAX);
        state.planned.note(request.computed.0, request.max.0);
        let Some(remote) = &self.remote else {
            return Fetches::None;
        };
        let state = &self.sessions.requests[id];
        if !self.is_planned(&self.shares[id].waits) {
            return Fetches::All {
                width: u32::MAX,
                predicted_ns: None,
            };
        }
        let size = self.hash_block_size_of(state);
        let mut prompt = self.prompt(state);
        prompt.end = prompt.end.min(blocks.saturating_mul(size));
        let segment = wanted.space.hash_blocks * size;
        let to = (wanted.to * size).min(prompt.end);
        // The blocks that a draft model drops lie behind the end.
        let from = (wanted.from * size).max(prompt.computed).min(to);
        // A part of a window or state is of no use.
        let is_hybrid = wanted.space.is_hybrid;
        let block = if is_hybrid { to - from } else { segment };
        let is_prefetch = request.priority == Priority::Prefetch;
        let is_idle = remote.get_window.in_flight() == 0;
        let of_width = |width: u32| Reading {
            block,
            together: block.saturating_mul(width),
            is_prefetch,
            ..self.flight_reading(remote, wanted, under_way, width)
        };
        // With more gets at once, a flight is faster, but each get ends later.
        let at_once = (remote.get_window.bytes() / wanted.space.bytes) as u32;
        let most = wanted.segments.min(at_once).max(1);
        let widths = [most, most / 2, most / 4, most / 8];
        let mut readings = widths
            .map(|width| (width.max(1), of_width(width.max(1))))
            .into_iter();
        let ends = (from, to);
        let safe = readings.find(|(_, of)| self.planner.is_safe(&prompt, ends, of));
        let (width, reading) = safe.unwrap_or((most, of_width(most)));
        let start = if reading.is_known || is_idle || !remote.order.is_empty() {
            self.planner.start(&prompt, ends, &reading)
        } else {
            // Abandoned gets still occupy the store, so new gets would arrive as late.
            Start {
                promotes: false,
                reason: match reading.is_old {
                    true => Reason::Measure,
                    false => Reason::Faster,
                },
            }
        };
        let tokens = to.saturating_sub(from);
        self.note_start(id, FetchSource::Remote, (&start, is_prefetch), tokens);
        if start.promotes {
            let is_known = start.reason != Reason::Unknown;
            return Fetches::All {
                width: if is_known { width } else { (most / 4).max(1) },
                predicted_ns: is_known.then_some(reading.all_ns as u64),
            };
        }
        let share = &mut self.shares[id];
        // A prefetch is decided again when the scheduler asks.
        share.waits.gave_up |= !is_prefetch;
        share.is_left |= reading.present >= LIKELY;
        match start.reason {
            Reason::Measure => Fetches::Some(self.planner.rates.remote.next_measured()),
            _ => Fetches::None,
        }
    }

    /// How long a flight takes with `width` gets in flight at once.
    fn flight_reading(
        &self,
        remote: &Remote,
        wanted: &Wanted,
        under_way: Option<FlightId>,
        width: u32,
    ) -> Reading {
        let (rates, is_hybrid) = (&self.planner.rates.remote, wanted.space.is_hybrid);
        let (first_ns, all_ns) = rates.wait_ns(&Fetch {
            ahead: remote.ahead_of(under_way),
            segments: wanted.segments,
            bytes: wanted.space.bytes,
            width,
            is_probed: is_hybrid || wanted.segments > FETCHED,
            silent_ns: remote.silent_ns(self.now_ns),
        });
        Reading {
            first_ns: if is_hybrid { all_ns } else { first_ns },
            all_ns,
            block: 0,
            together: 0,
            is_prefetch: false,
            present: rates.present(),
            absent_ns: rates.absent_ns(),
            is_known: rates.is_known(),
            is_old: under_way.is_none() && remote.reads == 0 && rates.is_old(self.now_ns),
        }
    }

    /// Why a request's planned wait for a flight is over, with the tokens that have not arrived; `None` if the wait
    /// goes on.
    pub(super) fn flight_stop(
        &self,
        (state, share): (&RequestState, &Share),
        flight: &Flight,
        computed: Tokens,
    ) -> Option<(Stop, u32)> {
        let remote = self.remote.as_deref()?;
        self.plan_stop((state, share), computed, |prompt| {
            let size = self.hash_block_size_of(state);
            let (arrived, end) = flight.progress();
            let plan = &share.plans.remote;
            let predicts = !plan.ignores_prediction && self.planner.rates.remote.is_known();
            Pace {
                arrived: arrived * size,
                end: (end * size).min(prompt.end),
                together: flight.objects.gets.max(1) * flight.chain.space.hash_blocks * size,
                rest_ns: predicts.then(|| self.rest_ns(remote, flight)),
            }
        })
    }

    /// Nanoseconds until all segments of a flight have arrived.
    fn rest_ns(&self, remote: &Remote, flight: &Flight) -> f64 {
        let unsent = flight.unsent();
        let (_, all_ns) = self.planner.rates.remote.wait_ns(&Fetch {
            ahead: 0,
            segments: unsent + flight.objects.gets,
            bytes: flight.chain.space.bytes,
            width: flight.objects.width,
            is_probed: !flight.is_searched(),
            silent_ns: remote.silent_ns(self.now_ns),
        });
        if unsent > 0 || flight.sent_ns == 0 {
            return all_ns;
        }
        // A get that takes longer than predicted is expected to take as long again.
        let since_ns = (self.now_ns - flight.sent_ns.min(self.now_ns)) as f64;
        if since_ns < all_ns {
            all_ns - since_ns
        } else {
            since_ns
        }
    }
}
