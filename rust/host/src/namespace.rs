//! KV cache groups as the connector describes them.

use undercroft_contract::namespace::{GroupKind, GroupSpec};

use crate::error::HostError;

/// A KV cache group. `window_tokens`: tokens of a window or chunk; ignored for other kinds.
///
/// # Errors
/// If the kind is unknown.
pub fn group_spec(
    kind: &str,
    block_tokens: u32,
    payload_bytes: u32,
    window_tokens: u32,
) -> Result<GroupSpec, HostError> {
    let tokens = window_tokens;
    let kind = match kind {
        "full" => GroupKind::Full,
        "sliding_window" => GroupKind::SlidingWindow { tokens },
        "chunked_local" => GroupKind::ChunkedLocal { tokens },
        "state" => GroupKind::State,
        "ignored" => GroupKind::Ignored,
        _ => {
            return Err(HostError::Option(format!(
                "KV cache group of kind {kind:?}; allowed: \"full\", \"sliding_window\", \"chunked_local\", \"state\", \
                 \"ignored\""
            )));
        }
    };
    Ok(GroupSpec {
        kind,
        block_tokens,
        payload_bytes,
    })
}
