//! `_core.resolve`: where a hit may end, for tests and tools.

use pyo3::prelude::*;
use undercroft_core::namespace::NamespaceSpec;
use undercroft_core::resolve::resolve_all;

use crate::engine::group_specs;
use crate::errors::ConfigError;

/// The deepest boundary of a hit in tokens, when `present[group][block]` says what can be had.
#[pyfunction]
#[pyo3(signature = (groups, hash_block_tokens, alignment_tokens, present, max_tokens, local_tokens = 0))]
pub(crate) fn resolve(
    groups: Vec<(String, u32, u32, u32)>,
    hash_block_tokens: u32,
    alignment_tokens: u32,
    present: Vec<Vec<bool>>,
    max_tokens: u32,
    local_tokens: u32,
) -> PyResult<u32> {
    let spec = NamespaceSpec {
        description: String::new(),
        hash_block_tokens,
        alignment_tokens,
        groups: group_specs(groups)?,
    };
    spec.validate()
        .map_err(|error| ConfigError::new_err(error.to_string()))?;
    if present.len() != spec.groups.len() {
        return Err(ConfigError::new_err(format!(
            "present has {} groups; it must have {}, as many as groups",
            present.len(),
            spec.groups.len()
        )));
    }
    let has = |depth: u32, group: usize| {
        let block = (depth / spec.granules(group)) as usize - 1;
        present[group].get(block).copied().unwrap_or(false)
    };
    let (limit, local) = (
        max_tokens / hash_block_tokens,
        local_tokens / hash_block_tokens,
    );
    Ok(resolve_all(&spec, limit, local, has) * hash_block_tokens)
}
