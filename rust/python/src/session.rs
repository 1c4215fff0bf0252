//! `_core.Session`: one vLLM engine's use of one namespace.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use slotmap::{Key, KeyData};
use undercroft_core::engine::{Answer, Engine, Offer, SessionId, Transfer, TransferId};
use undercroft_core::key::{BlockHash, HashSource};
use undercroft_core::shell::Shell;

/// A Python list of hashes, read one by one.
struct Hashes<'a, 'py>(&'a Bound<'py, PyList>);

impl HashSource for Hashes<'_, '_> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        let item = self.0.get_item(index).ok()?;
        BlockHash::new(item.cast::<PyBytes>().ok()?.as_bytes())
    }
}

type PyTransfer<'py> = (u64, Vec<(u8, u32, Bound<'py, PyBytes>)>);

fn to_python(py: Python<'_>, transfer: Transfer) -> PyTransfer<'_> {
    let extents = transfer.extents.into_iter().map(|extent| {
        let slots: Vec<u8> = extent
            .slots
            .iter()
            .flat_map(|slot| slot.to_le_bytes())
            .collect();
        (extent.group, extent.first_block, PyBytes::new(py, &slots))
    });
    (transfer.id.data().as_ffi(), extents.collect())
}

/// One vLLM engine's use of one namespace. Every call takes microseconds and never blocks on IO.
#[pyclass(name = "Session", module = "undercroft._core", frozen)]
pub(crate) struct PySession {
    shell: Arc<Shell>,
    id: SessionId,
    namespace: String,
}

impl PySession {
    pub(crate) fn new(shell: Arc<Shell>, id: SessionId, namespace: String) -> Self {
        Self {
            shell,
            id,
            namespace,
        }
    }
}

#[pymethods]
impl PySession {
    /// Digest of the namespace, hexadecimal.
    #[getter]
    fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Start the lookup of a request, and the promotion of what lies on disk only. Idempotent.
    #[pyo3(signature = (request_id, hashes, num_computed_tokens = 0, max_tokens = None))]
    fn submit(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
    ) {
        let max = max_tokens.unwrap_or(u32::MAX);
        self.shell.enter(|engine| {
            engine.submit(
                self.id,
                request_id,
                &Hashes(hashes),
                num_computed_tokens,
                max,
            );
        });
    }

    /// The deepest usable boundary in tokens from the start of the prompt, or None while pending.
    #[pyo3(signature = (request_id, hashes, num_computed_tokens, max_tokens = None))]
    fn poll(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
    ) -> Option<u32> {
        let waits = |engine: &Engine| engine.waits(self.id, request_id, num_computed_tokens);
        if self.shell.look(waits) == Some(true) {
            return None;
        }
        let max = max_tokens.unwrap_or(u32::MAX);
        let answer = self.shell.enter(|engine| {
            engine.poll(
                self.id,
                request_id,
                &Hashes(hashes),
                num_computed_tokens,
                max,
            )
        });
        match answer {
            Some(Answer::Pending) => None,
            Some(Answer::Ready(tokens)) => Some(tokens),
            None => Some(0),
        }
    }

    /// Wait until a lookup is no longer pending, woken by its answer, at most `timeout_s` seconds.
    /// Whether it is; ask `poll` then.
    fn wait(&self, py: Python<'_>, request_id: &str, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 3600.0));
        py.detach(|| {
            self.shell
                .wait_until(timeout, |engine| !engine.is_pending(self.id, request_id))
        })
    }

    /// How many tokens of the request's prompt its last lookup found a chain for, usable or not.
    fn shared_tokens(&self, request_id: &str) -> u32 {
        self.shell
            .look(|engine| engine.shared_tokens(self.id, request_id))
            .unwrap_or(0)
    }

    /// Of the tokens after `num_computed_tokens`, how many came from (host, disk).
    fn tiers(
        &self,
        request_id: &str,
        num_computed_tokens: u32,
        num_external_tokens: u32,
    ) -> (u32, u32) {
        self.shell
            .look(|engine| {
                engine.sources(
                    self.id,
                    request_id,
                    num_computed_tokens,
                    num_external_tokens,
                )
            })
            .unwrap_or((num_external_tokens, 0))
    }

    /// Pin the payloads of a load: (job id, per group (group, index of the first block, offsets)).
    fn begin_load<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        num_computed_tokens: u32,
        num_external_tokens: u32,
    ) -> Option<PyTransfer<'py>> {
        let begun = self.shell.enter(|engine| {
            engine.begin_load(
                self.id,
                request_id,
                num_computed_tokens,
                num_external_tokens,
            )
        });
        begun.flatten().map(|transfer| to_python(py, transfer))
    }

    /// All ranks have ended the copies of a load.
    fn end_load(&self, job_id: u64, ok: bool) {
        self.end(job_id, ok);
    }

    /// Reserve slots for the blocks of the first `num_tokens` tokens that are not here yet.
    #[pyo3(signature = (request_id, hashes, num_tokens, offers = Vec::new()))]
    fn begin_save<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        hashes: &Bound<'py, PyList>,
        num_tokens: u32,
        offers: Vec<(u8, u32, u32)>,
    ) -> Option<PyTransfer<'py>> {
        let offers: Vec<Offer> = offers
            .into_iter()
            .map(|(group, first_block, end_block)| Offer {
                group,
                first_block,
                end_block,
            })
            .collect();
        let begun = self.shell.enter(|engine| {
            engine.begin_save(self.id, request_id, &Hashes(hashes), num_tokens, &offers)
        });
        begun.flatten().map(|transfer| to_python(py, transfer))
    }

    /// Whether the last `begin_save` left out blocks for want of memory.
    fn save_refused(&self) -> bool {
        self.shell
            .look(|engine| engine.save_refused(self.id))
            .unwrap_or(false)
    }

    /// All ranks have ended the copies of a save.
    fn end_save(&self, job_id: u64, ok: bool) {
        self.end(job_id, ok);
    }

    /// The request has finished or was aborted. Idempotent.
    fn discard(&self, request_id: &str) {
        self.shell
            .enter(|engine| engine.discard(self.id, request_id));
    }

    /// Drop everything of this namespace, durably. False if that could not be made durable in time.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn reset(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 1e6));
        py.detach(|| {
            self.shell.enter(|engine| engine.reset(self.id));
            self.shell
                .wait_until(timeout, |engine| !engine.reset_pending())
                && self
                    .shell
                    .enter(|engine| !engine.reset_failed())
                    .unwrap_or(false)
        })
    }

    /// End the session: all of its jobs and leases are freed. Idempotent.
    fn close(&self) {
        self.shell.enter(|engine| engine.close_session(self.id));
    }
}

impl PySession {
    fn end(&self, job_id: u64, ok: bool) {
        let id = TransferId::from(KeyData::from_ffi(job_id));
        self.shell.enter(|engine| engine.end_transfer(id, ok));
    }
}
