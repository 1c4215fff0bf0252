//! `_core.resolve`: the boundary at which a hit ends, for tests and tools.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_engine::resolve::resolve_all;
use undercroft_host::HostError;

use crate::errors::Result;
use crate::values::{PyGroup, group_specs};

/// The deepest boundary of a hit in tokens, when `present[group][block]` says which blocks are cached.
#[pyfunction]
#[pyo3(signature = (groups, hash_block_size, alignment_tokens, present, max_tokens, num_computed_tokens = 0))]
pub(crate) fn resolve(
    groups: Vec<PyGroup>,
    hash_block_size: u32,
    alignment_tokens: u32,
    present: Vec<Vec<bool>>,
    max_tokens: u32,
    num_computed_tokens: u32,
) -> Result<u32> {
    let spec = NamespaceSpec {
        description: String::new(),
        hash_block_size,
        alignment_tokens,
        groups: group_specs(&groups)?,
    };
    spec.validate().map_err(HostError::from)?;
    let (found, expected) = (present.len(), spec.groups.len());
    if found != expected {
        let message =
            format!("present has {found} groups; it must have {expected}, as many as groups");
        return Err(PyValueError::new_err(message).into());
    }
    let has = |depth: u32, group: usize| {
        let block = (depth / spec.hash_blocks(group)) as usize - 1;
        present[group].get(block).copied().unwrap_or(false)
    };
    let (limit, computed) = (
        max_tokens / hash_block_size,
        num_computed_tokens / hash_block_size,
    );
    Ok(resolve_all(&spec, limit, computed, has) * hash_block_size)
}
