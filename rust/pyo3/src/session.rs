//! `_core.Session`: one vLLM scheduler's use of one namespace.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use undercroft_contract::hint::{Hint, HintAnswer, HintRequest};
use undercroft_contract::session::{
    BlockEvent, EventTier, Finished, GiveUp, LookupRequest, Offer, PromotionWait, SaveRequest,
    Session, Step, Tokens, TransferId, TurnEnd,
};
use undercroft_io::fork::OfProcess;

use crate::hashes::Hashes;
use crate::values::{PyLoad, PyLookup, PyOffer, PySaveGrant, timeout};

/// One vLLM scheduler's use of one namespace. Calls take microseconds and never wait for IO, except calls with a
/// timeout.
#[pyclass(name = "Session", module = "undercroft._core", frozen)]
pub(crate) struct PySession {
    session: OfProcess<Arc<dyn Session>>,
}

impl PySession {
    pub(crate) fn new(session: Arc<dyn Session>) -> Self {
        Self {
            session: OfProcess::new(session),
        }
    }
}

#[pymethods]
impl PySession {
    /// Digest of the namespace, hexadecimal.
    #[getter]
    fn namespace(&self) -> String {
        self.session.namespace()
    }

    /// Look up a prompt. Promotes nothing if no hit can end at `min_tokens` or beyond.
    #[pyo3(signature = (request_id, hashes, num_computed_tokens = 0, max_tokens = None, wait_ms = None, min_tokens = 0, planned = false, queued_tokens = 0))]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn lookup(
        &self,
        py: Python<'_>,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
        wait_ms: Option<(f64, f64)>,
        min_tokens: u32,
        planned: bool,
        queued_tokens: u32,
    ) -> PyResult<Py<PyLookup>> {
        let hashes = Hashes(hashes);
        let request = question(
            request_id,
            &hashes,
            num_computed_tokens,
            max_tokens,
            promotion_wait(wait_ms, planned),
            min_tokens,
        )
        .queued(Tokens(queued_tokens));
        PyLookup::of(py, self.session.lookup(&request))
    }

    /// A lookup that the scheduler does not wait for. Returns the shared tokens, as far as they are known.
    #[pyo3(signature = (request_id, hashes, num_computed_tokens = 0, max_tokens = None, wait_ms = None, min_tokens = 0, planned = false, queued_tokens = 0))]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn prefetch(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
        wait_ms: Option<(f64, f64)>,
        min_tokens: u32,
        planned: bool,
        queued_tokens: u32,
    ) -> u32 {
        let hashes = Hashes(hashes);
        let request = question(
            request_id,
            &hashes,
            num_computed_tokens,
            max_tokens,
            promotion_wait(wait_ms, planned),
            min_tokens,
        )
        .queued(Tokens(queued_tokens));
        self.session.lookup(&request.prefetch()).shared().0
    }

    /// Wait until a lookup is no longer pending, at most `timeout_s` seconds. Returns whether it is answered.
    fn wait(&self, py: Python<'_>, request_id: &str, timeout_s: f64) -> bool {
        py.detach(|| self.session.wait(request_id, timeout(timeout_s, 3600.0)))
    }

    /// The requests whose lookup was pending and is not any more, each named once.
    fn ended_waits(&self) -> Vec<String> {
        let ended = self.session.ended_waits().into_iter();
        ended.map(String::from).collect()
    }

    /// The reason why a request's last answer has no more tokens, and the seconds since the missing block's eviction.
    fn rest(&self, request_id: &str) -> Option<(&'static str, Option<u32>)> {
        let rest = self.session.rest(request_id)?;
        Some((rest.reason.name(), rest.ago_s))
    }

    /// End the lookup of a request, which is not needed any more.
    fn end_lookup(&self, request_id: &str) {
        self.session.end_lookup(request_id);
    }

    /// Begin the load of tokens that the last hit of the request covers; None if it does not cover them.
    fn begin_load(
        &self,
        py: Python<'_>,
        request_id: &str,
        num_computed_tokens: u32,
        num_external_tokens: u32,
    ) -> PyResult<Option<PyLoad>> {
        let (computed, external) = (Tokens(num_computed_tokens), Tokens(num_external_tokens));
        let load = self.session.begin_load(request_id, computed, external);
        load.map(|load| PyLoad::new(py, &load)).transpose()
    }

    /// Ask for slots for the blocks of the first `num_tokens` tokens that are not cached yet; None if no server can
    /// be asked.
    #[pyo3(signature = (request_id, hashes, num_tokens, offers = Vec::new(), only_offers = false,
        wanted = false))]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn begin_save(
        &self,
        py: Python<'_>,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_tokens: u32,
        offers: Vec<PyOffer>,
        only_offers: bool,
        wanted: bool,
    ) -> PyResult<Option<PySaveGrant>> {
        let offers: Vec<Offer> = offers.into_iter().map(Offer::from).collect();
        let hashes = &Hashes(hashes);
        let request = SaveRequest::new(request_id, hashes, Tokens(num_tokens));
        let request = request
            .offers(&offers)
            .only_offers(only_offers)
            .wanted(wanted);
        PySaveGrant::of(py, &self.session.begin_save(&request))
    }

    /// The grants of pending saves that have arrived since the last call.
    fn poll_saves(&self, py: Python<'_>) -> PyResult<Vec<PySaveGrant>> {
        let grants = self.session.poll_saves();
        grants
            .iter()
            .map(|grant| PySaveGrant::new(py, grant))
            .collect()
    }

    /// All ranks have ended the copies of a load or a save.
    fn end_transfer(&self, transfer_id: u64, ok: bool) {
        self.session.end_transfer(TransferId(transfer_id), ok);
    }

    /// End a load or a save that is not wanted any more. `reason`: "reset", "weights", or for a save "retry".
    fn give_up(&self, transfer_id: u64, reason: &str) -> PyResult<()> {
        let reason = match reason {
            "reset" => GiveUp::Reset,
            "weights" => GiveUp::Weights,
            "retry" => GiveUp::Retry,
            _ => {
                let allowed = "\"reset\", \"weights\" or \"retry\"";
                let message = format!("reason is {reason:?}; allowed: {allowed}");
                return Err(PyValueError::new_err(message));
            }
        };
        self.session.give_up(TransferId(transfer_id), reason);
        Ok(())
    }

    /// The request has finished or was aborted. `turn_end` is the same number for turns whose last tokens are the same; 0: not
    /// known.
    #[pyo3(signature = (request_id, turn_end = 0))]
    fn finish_request(&self, request_id: &str, turn_end: u32) {
        let turn_end = TurnEnd(turn_end);
        self.session.finish_request(Finished {
            request: request_id,
            turn_end,
        });
    }

    /// Give a hint about a prompt's future use. Returns the outcome, the number of its tokens, and a refusal's reason.
    #[pyo3(signature = (request_id, hashes, verb, max_tokens = None, ttl_s = 300.0, name = ""))]
    fn hint(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        verb: &str,
        max_tokens: Option<u32>,
        ttl_s: f64,
        name: &str,
    ) -> PyResult<(&'static str, u32, &'static str)> {
        let hint = match verb {
            "prefetch" => Hint::Prefetch,
            "pin" => Hint::Pin {
                ttl_ns: timeout(ttl_s, 1e9).as_nanos() as u64,
                name: name.to_owned(),
            },
            "demote" => Hint::Demote,
            "release" => Hint::Release {
                name: name.to_owned(),
            },
            _ => {
                let allowed = "\"prefetch\", \"pin\", \"demote\" or \"release\"";
                let message = format!("verb is {verb:?}; allowed: {allowed}");
                return Err(PyValueError::new_err(message));
            }
        };
        let answer = self.session.hint(&HintRequest {
            request: request_id,
            hashes: &Hashes(hashes),
            max: max_tokens.map_or(Tokens::MAX, Tokens),
            hint: &hint,
        });
        Ok(match answer {
            HintAnswer::Accepted(tokens) => ("accepted", tokens.0, ""),
            HintAnswer::Clipped(tokens) => ("clipped", tokens.0, ""),
            HintAnswer::Rejected(refusal) => ("rejected", 0, refusal.name()),
            HintAnswer::Pending => ("pending", 0, ""),
        })
    }

    /// The changes in the tiers since the last call: whether all earlier changes are void, the changes (stored,
    /// tier, group, hash, parent's hash), and whether more changes can be taken at once. None if there is no change.
    /// `restart`: the caller has forgotten all earlier changes, so every block in the tiers is reported again.
    #[pyo3(signature = (restart = false))]
    fn take_events<'py>(
        &self,
        py: Python<'py>,
        restart: bool,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let taken = self.session.take_events(restart);
        if !taken.cleared && !taken.more && taken.events.is_empty() {
            return Ok(None);
        }
        let one = |event: &BlockEvent| {
            let hash = PyBytes::new(py, event.hash.as_bytes());
            let parent = event
                .parent
                .map(|parent| PyBytes::new(py, parent.as_bytes()));
            let tier = match event.tier {
                EventTier::Host => "host",
                EventTier::Disk => "disk",
                EventTier::Remote => "remote",
            };
            (event.stored, tier, event.group, hash, parent).into_pyobject(py)
        };
        let events: Vec<Bound<'py, PyTuple>> =
            taken.events.iter().map(one).collect::<PyResult<_>>()?;
        (taken.cleared, events, taken.more)
            .into_pyobject(py)
            .map(Some)
    }

    /// Report the vLLM's steps, each as (tokens of prompts, the sum of their positions, decodes, seconds).
    fn report_steps(&self, steps: Vec<(u32, u64, u32, f64)>) {
        let step = |(tokens, positions, decodes, seconds): (u32, u64, u32, f64)| Step {
            tokens,
            positions,
            decodes,
            duration_ns: timeout(seconds, 3600.0).as_nanos() as u64,
        };
        let steps: Vec<Step> = steps.into_iter().map(step).collect();
        self.session.report_steps(&steps);
    }

    /// Drop everything of the namespace. Returns false if the reset is not durable in time.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn reset(&self, py: Python<'_>, timeout_s: f64) -> bool {
        py.detach(|| self.session.reset(timeout(timeout_s, 1e6)))
    }

    /// The weights change: use the namespace of `description`, or with None one that is shared with no session.
    #[pyo3(signature = (description = None))]
    fn change_weights(&self, description: Option<&str>) {
        self.session.change_weights(description);
    }

    /// End the session: its lookups, leases, loads and saves. Idempotent; nothing in a forked child.
    fn close(&self, py: Python<'_>) {
        if let Some(session) = self.session.get() {
            py.detach(|| session.close());
        }
    }
}

/// The question of a demanded lookup.
fn question<'a>(
    request: &'a str,
    hashes: &'a Hashes<'_, '_>,
    computed: u32,
    max: Option<u32>,
    wait: PromotionWait,
    min: u32,
) -> LookupRequest<'a> {
    LookupRequest::new(request, hashes)
        .computed(Tokens(computed))
        .max(max.map_or(Tokens::MAX, Tokens))
        .min(Tokens(min))
        .wait(Some(wait))
}

/// The wait for a limit in milliseconds (the base, and the part for every 1,000 tokens), if there is one.
fn promotion_wait(limit_ms: Option<(f64, f64)>, planned: bool) -> PromotionWait {
    let nanoseconds = |ms: f64| timeout(ms / 1e3, 1e6).as_nanos() as u64;
    match limit_ms {
        Some((base, per_1k_tokens)) => PromotionWait::Limit {
            base_ns: nanoseconds(base),
            per_1k_tokens_ns: nanoseconds(per_1k_tokens),
        },
        None if planned => PromotionWait::Planned,
        None => PromotionWait::Complete,
    }
}
