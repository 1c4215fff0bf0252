//! `_core.Session`: one vLLM engine's use of one namespace.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use slotmap::{Key, KeyData};
use undercroft_core::engine::{Answer, Engine, Extent, Offer, SessionId, TransferId};
use undercroft_core::shell::Shell;
use undercroft_wire::protocol::WireExtent;
use undercroft_wire::{Client, Grant};

use crate::engine::wait_ns;
use crate::hashes::Hashes;

type PyExtents<'py> = Vec<(u8, u32, Bound<'py, PyBytes>)>;

/// (job id, token of the session, extents)
type PyLoad<'py> = (u64, u128, PyExtents<'py>);

/// (save, job id or 0, token of the session, extents, whether blocks were refused)
type PyGrant<'py> = (u64, u64, u128, PyExtents<'py>, bool);

fn extents(py: Python<'_>, extents: Vec<WireExtent>) -> PyExtents<'_> {
    let extents = extents.into_iter().map(|(group, first_block, slots)| {
        let slots: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        (group, first_block, PyBytes::new(py, &slots))
    });
    extents.collect()
}

fn plain(extents: Vec<Extent>) -> Vec<WireExtent> {
    let one = |extent: Extent| (extent.group, extent.first_block, extent.slots);
    extents.into_iter().map(one).collect()
}

/// The engine, as a session of this process or of a server.
enum Backend {
    Embedded {
        shell: Arc<Shell>,
        id: SessionId,
        /// The last save's number; grants with their job ids.
        grants: Mutex<(u64, Vec<(u64, Grant)>)>,
    },
    Served(Arc<Client>),
}

/// One vLLM engine's use of one namespace. Every call takes microseconds and never blocks on IO.
#[pyclass(name = "Session", module = "undercroft._core", frozen)]
pub(crate) struct PySession {
    backend: Backend,
    namespace: String,
}

impl PySession {
    pub(crate) fn embedded(shell: Arc<Shell>, id: SessionId, namespace: String) -> Self {
        let grants = Mutex::default();
        Self {
            backend: Backend::Embedded { shell, id, grants },
            namespace,
        }
    }

    pub(crate) fn served(client: Arc<Client>) -> Self {
        Self {
            namespace: client.namespace(),
            backend: Backend::Served(client),
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
    #[pyo3(signature = (request_id, hashes, num_computed_tokens = 0, max_tokens = None, wait_ms = None))]
    fn submit(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
        wait_ms: Option<(f64, f64)>,
    ) {
        let max = max_tokens.unwrap_or(u32::MAX);
        let (hashes, local, wait) = (&Hashes(hashes), num_computed_tokens, wait_ms.map(wait_ns));
        match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                shell.enter(|engine| {
                    if let Some((base, part)) = wait {
                        engine.limit_wait(*id, request_id, base, part);
                    }
                    engine.submit(*id, request_id, hashes, local, max);
                });
            }
            Backend::Served(client) => client.submit(request_id, hashes, local, max, wait),
        }
    }

    /// The deepest usable boundary in tokens from the start of the prompt, or None while pending.
    #[pyo3(signature = (request_id, hashes, num_computed_tokens, max_tokens = None, wait_ms = None))]
    fn poll(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_computed_tokens: u32,
        max_tokens: Option<u32>,
        wait_ms: Option<(f64, f64)>,
    ) -> Option<u32> {
        let max = max_tokens.unwrap_or(u32::MAX);
        let (hashes, local, wait) = (&Hashes(hashes), num_computed_tokens, wait_ms.map(wait_ns));
        match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                let waits = |engine: &Engine| engine.waits(*id, request_id, local);
                if shell.look(waits) == Some(true) {
                    return None;
                }
                let answer = shell.enter(|engine| {
                    if let Some((base, part)) = wait {
                        engine.limit_wait(*id, request_id, base, part);
                    }
                    engine.poll(*id, request_id, hashes, local, max)
                });
                match answer {
                    Some(Answer::Pending) => None,
                    Some(Answer::Ready(tokens)) => Some(tokens),
                    None => Some(0),
                }
            }
            Backend::Served(client) => client.poll(request_id, hashes, local, max, wait),
        }
    }

    /// Wait until a lookup is no longer pending, woken by its answer, at most `timeout_s` seconds.
    /// Whether it is; ask `poll` then.
    fn wait(&self, py: Python<'_>, request_id: &str, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 3600.0));
        py.detach(|| match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                shell.wait_until(timeout, |engine| !engine.is_pending(*id, request_id))
            }
            Backend::Served(client) => client.wait(request_id, timeout),
        })
    }

    /// How many tokens of the request's prompt its last lookup found a chain for, usable or not.
    fn shared_tokens(&self, request_id: &str) -> u32 {
        match &self.backend {
            Backend::Embedded { shell, id, .. } => shell
                .look(|engine| engine.shared_tokens(*id, request_id))
                .unwrap_or(0),
            Backend::Served(client) => client.shared_tokens(request_id),
        }
    }

    /// Of the tokens after `num_computed_tokens`, how many came from (host, disk).
    fn tiers(
        &self,
        request_id: &str,
        num_computed_tokens: u32,
        num_external_tokens: u32,
    ) -> (u32, u32) {
        let (local, external) = (num_computed_tokens, num_external_tokens);
        match &self.backend {
            Backend::Embedded { shell, id, .. } => shell
                .look(|engine| engine.sources(*id, request_id, local, external))
                .unwrap_or((external, 0)),
            Backend::Served(client) => client.sources(request_id, local, external),
        }
    }

    /// Pin the payloads of a load: (job id, session's token, per group (group, first block, offsets)).
    fn begin_load<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        num_computed_tokens: u32,
        num_external_tokens: u32,
    ) -> Option<PyLoad<'py>> {
        let (local, external) = (num_computed_tokens, num_external_tokens);
        let (job, session, found) = match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                let begun =
                    shell.enter(|engine| engine.begin_load(*id, request_id, local, external));
                let transfer = begun.flatten()?;
                let job = transfer.id.data().as_ffi();
                (job, 0, plain(transfer.extents))
            }
            Backend::Served(client) => client.begin_load(request_id, local, external)?,
        };
        Some((job, session, extents(py, found)))
    }

    /// All ranks have ended the copies of a load.
    fn end_load(&self, job_id: u64, ok: bool) {
        match &self.backend {
            Backend::Embedded { shell, .. } => end(shell, job_id, ok),
            Backend::Served(client) => client.end_load(job_id, ok),
        }
    }

    /// Ask for slots for the blocks of the first `num_tokens` tokens that are not here yet: the number of
    /// the save, which `grants` names in its answer; None if nobody can be asked.
    #[pyo3(signature = (request_id, hashes, num_tokens, offers = Vec::new()))]
    fn begin_save(
        &self,
        request_id: &str,
        hashes: &Bound<'_, PyList>,
        num_tokens: u32,
        offers: Vec<(u8, u32, u32)>,
    ) -> Option<u64> {
        match &self.backend {
            Backend::Embedded {
                shell, id, grants, ..
            } => {
                let offers = offers.iter().map(|&(group, first_block, end_block)| Offer {
                    group,
                    first_block,
                    end_block,
                });
                let offers: Vec<Offer> = offers.collect();
                let (transfer, refused) = shell.enter(|engine| {
                    let hashes = &Hashes(hashes);
                    let transfer = engine.begin_save(*id, request_id, hashes, num_tokens, &offers);
                    (transfer, engine.save_refused(*id))
                })?;
                let mut grants = grants.lock().ok()?;
                grants.0 += 1;
                let save = grants.0;
                let (job, extents) = transfer.map_or((0, Vec::new()), |transfer| {
                    (transfer.id.data().as_ffi(), plain(transfer.extents))
                });
                grants.1.push((
                    job,
                    Grant {
                        save,
                        session: 0,
                        refused,
                        extents,
                    },
                ));
                Some(save)
            }
            Backend::Served(client) => {
                client.begin_save(request_id, &Hashes(hashes), num_tokens, &offers)
            }
        }
    }

    /// The answers to `begin_save` that have come since the last call: (save, job id or 0 if there is nothing
    /// to copy, session's token, per group (group, first block, offsets), whether blocks were left out for
    /// want of memory).
    fn grants<'py>(&self, py: Python<'py>) -> Vec<PyGrant<'py>> {
        let found = match &self.backend {
            Backend::Embedded { grants, .. } => {
                let taken = grants
                    .lock()
                    .map(|mut grants| std::mem::take(&mut grants.1));
                taken.unwrap_or_default()
            }
            Backend::Served(client) => {
                let job = |grant: Grant| {
                    let job = if grant.extents.is_empty() {
                        0
                    } else {
                        grant.save
                    };
                    (job, grant)
                };
                client.grants().into_iter().map(job).collect()
            }
        };
        let grant = |(job, grant): (u64, Grant)| {
            let slots = extents(py, grant.extents);
            (grant.save, job, grant.session, slots, grant.refused)
        };
        found.into_iter().map(grant).collect()
    }

    /// All ranks have ended the copies of a save.
    fn end_save(&self, job_id: u64, ok: bool) {
        match &self.backend {
            Backend::Embedded { shell, .. } => end(shell, job_id, ok),
            Backend::Served(client) => client.end_save(job_id, ok),
        }
    }

    /// The lookup of a request is not needed any more. Idempotent.
    fn discard(&self, request_id: &str) {
        match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                shell.enter(|engine| engine.discard(*id, request_id));
            }
            Backend::Served(client) => client.release(request_id),
        }
    }

    /// The request has finished or was aborted. Idempotent.
    fn finish(&self, request_id: &str) {
        match &self.backend {
            Backend::Embedded { .. } => self.discard(request_id),
            Backend::Served(client) => client.forget(request_id),
        }
    }

    /// Drop everything of this namespace, durably. False if that could not be made durable in time.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn reset(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 1e6));
        py.detach(|| match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                shell.enter(|engine| engine.reset(*id));
                shell.wait_until(timeout, |engine| !engine.reset_pending())
                    && shell
                        .enter(|engine| !engine.reset_failed())
                        .unwrap_or(false)
            }
            Backend::Served(client) => client.reset(timeout),
        })
    }

    /// End the session: all of its jobs and leases are freed. Idempotent.
    fn close(&self, py: Python<'_>) {
        match &self.backend {
            Backend::Embedded { shell, id, .. } => {
                shell.enter(|engine| engine.close_session(*id));
            }
            Backend::Served(client) => py.detach(|| client.close()),
        }
    }
}

fn end(shell: &Shell, job_id: u64, ok: bool) {
    let id = TransferId::from(KeyData::from_ffi(job_id));
    shell.enter(|engine| engine.end_transfer(id, ok));
}
