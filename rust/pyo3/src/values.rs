//! Answers of sessions, as classes of Python.

use std::ffi::OsString;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyList};
use undercroft_contract::namespace::GroupSpec;
use undercroft_contract::session::{
    Extent, Load, Lookup, Offer, Save, SaveGrant, SaveRefusal, Tokens,
};
use undercroft_host::{HostError, group_spec};
use undercroft_io::copy::SlotRun;
use undercroft_ipc::SessionAddress;

/// The address from which workers get the arena.
#[pyclass(name = "ArenaAddress", module = "undercroft._core", frozen, get_all)]
#[derive(Default)]
pub(crate) struct PyArenaAddress {
    socket: OsString,
    arena_id: u64,
    session: u128,
}

impl From<SessionAddress> for PyArenaAddress {
    fn from(address: SessionAddress) -> Self {
        Self {
            socket: address.socket.into(),
            arena_id: address.arena_id,
            session: address.session.0,
        }
    }
}

/// The answer to a lookup.
#[pyclass(name = "Lookup", module = "undercroft._core", frozen, get_all)]
pub(crate) struct PyLookup {
    /// An object, since Python reads a field that holds one without a call.
    pending: Py<PyBool>,
    tokens: u32,
    shared_tokens: u32,
}

impl PyLookup {
    /// A pending answer has no other content, so one object is enough: a scheduler asks for each pending request in
    /// each step.
    pub(crate) fn of(py: Python<'_>, lookup: Lookup) -> PyResult<Py<Self>> {
        static PENDING: PyOnceLock<Py<PyLookup>> = PyOnceLock::new();
        let (Tokens(shared), pending) = (lookup.shared(), lookup.is_pending());
        match lookup.tokens() {
            Some(Tokens(tokens)) => Self::new(py, pending, tokens, shared),
            None => PENDING
                .get_or_try_init(py, || Self::new(py, pending, 0, 0))
                .map(|answer| answer.clone_ref(py)),
        }
    }

    fn new(py: Python<'_>, pending: bool, tokens: u32, shared_tokens: u32) -> PyResult<Py<Self>> {
        let pending = PyBool::new(py, pending).to_owned().unbind();
        Py::new(
            py,
            Self {
                pending,
                tokens,
                shared_tokens,
            },
        )
    }
}

/// Blocks of one group, with the arena offset of each.
#[pyclass(name = "Extent", module = "undercroft._core", frozen, get_all)]
pub(crate) struct PyExtent {
    group: u8,
    first_block: u32,
    offsets: Py<PyBytes>,
}

impl PyExtent {
    /// The slots of the blocks, as the copier takes them.
    pub(crate) fn slots<'a>(&'a self, py: Python<'a>) -> SlotRun<'a> {
        SlotRun {
            group: self.group,
            first_block: self.first_block,
            offsets: self.offsets.as_bytes(py).as_chunks().0,
        }
    }
}

fn extents(py: Python<'_>, extents: &[Extent]) -> PyResult<Py<PyList>> {
    let one = |extent: &Extent| {
        let offsets: Vec<[u8; 8]> = extent.offsets.iter().map(|at| at.to_le_bytes()).collect();
        PyExtent {
            group: extent.group,
            first_block: extent.first_block,
            offsets: PyBytes::new(py, offsets.as_flattened()).unbind(),
        }
    };
    let extents: Vec<Bound<'_, PyExtent>> = extents
        .iter()
        .map(|extent| Bound::new(py, one(extent)))
        .collect::<PyResult<_>>()?;
    Ok(PyList::new(py, extents)?.unbind())
}

/// A load that has begun.
#[pyclass(name = "Load", module = "undercroft._core", frozen, get_all)]
pub(crate) struct PyLoad {
    transfer_id: u64,
    session: u128,
    extents: Py<PyList>,
    host_tokens: u32,
    disk_tokens: u32,
    remote_tokens: u32,
}

impl PyLoad {
    pub(crate) fn new(py: Python<'_>, load: &Load) -> PyResult<Self> {
        Ok(Self {
            transfer_id: load.id.0,
            session: load.session.0,
            extents: extents(py, &load.extents)?,
            host_tokens: load.sources.host.0,
            disk_tokens: load.sources.disk.0,
            remote_tokens: load.sources.remote.0,
        })
    }
}

/// The grant of a save, which may be pending.
#[pyclass(name = "SaveGrant", module = "undercroft._core", frozen, get_all)]
pub(crate) struct PySaveGrant {
    transfer_id: u64,
    pending: bool,
    session: u128,
    extents: Py<PyList>,
    tokens: u32,
    refused: Option<&'static str>,
    lacks: Vec<(u8, u32, u32)>,
}

impl PySaveGrant {
    pub(crate) fn new(py: Python<'_>, grant: &SaveGrant) -> PyResult<Self> {
        Ok(Self {
            transfer_id: grant.id.0,
            pending: false,
            session: grant.session.0,
            extents: extents(py, &grant.extents)?,
            tokens: grant.end.tokens.0,
            refused: grant.end.refused.map(SaveRefusal::name),
            lacks: grant.end.lacks.iter().map(of_range).collect(),
        })
    }

    /// None if no server can be asked.
    pub(crate) fn of(py: Python<'_>, save: &Save) -> PyResult<Option<Self>> {
        match save {
            Save::Granted(grant) => Self::new(py, grant).map(Some),
            Save::Pending(id) => Ok(Some(Self {
                transfer_id: id.0,
                pending: true,
                session: 0,
                extents: PyList::empty(py).unbind(),
                tokens: 0,
                refused: None,
                lacks: Vec::new(),
            })),
            Save::Unavailable => Ok(None),
        }
    }
}

fn of_range(range: &Offer) -> (u8, u32, u32) {
    (range.group, range.first_block, range.end_block)
}

/// Blocks that the device holds and that a save may also copy.
#[derive(FromPyObject)]
pub(crate) struct PyOffer {
    group: u8,
    first_block: u32,
    end_block: u32,
}

impl From<PyOffer> for Offer {
    fn from(offer: PyOffer) -> Self {
        Self {
            group: offer.group,
            first_block: offer.first_block,
            end_block: offer.end_block,
        }
    }
}

/// A KV cache group.
#[derive(FromPyObject)]
pub(crate) struct PyGroup {
    kind: String,
    block_tokens: u32,
    payload_bytes: u32,
    window_tokens: u32,
}

/// Converts the groups to the core's.
pub(crate) fn group_specs(groups: &[PyGroup]) -> Result<Vec<GroupSpec>, HostError> {
    let spec = |group: &PyGroup| {
        group_spec(
            &group.kind,
            group.block_tokens,
            group.payload_bytes,
            group.window_tokens,
        )
    };
    groups.iter().map(spec).collect()
}

/// A timeout in seconds, at most `most`.
pub(crate) fn timeout(seconds: f64, most: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, most))
}
