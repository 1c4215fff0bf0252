//! What a request asks of the planner, and how a fetch comes along.

/// How a fetch under way comes along. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Pace {
    /// Tokens of the hit if the fetch ended now, and if all arrives.
    pub(in crate::engine) arrived: u32,
    pub(in crate::engine) end: u32,
    /// Tokens that arrive together.
    pub(in crate::engine) together: u32,
    /// Nanoseconds until all has arrived; `None` without a prediction.
    pub(in crate::engine) rest_ns: Option<f64>,
}

/// The planner's inputs for a request, and its decisions. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct Planned {
    /// Tokens that the device holds.
    pub(in crate::engine) computed: u32,
    /// Tokens of the prompt.
    pub(in crate::engine) end: u32,
    /// Tokens that vLLM computes before this request.
    pub(in crate::engine) queued: u32,
    /// A hit of fewer tokens, with those on the device, does not serve the request.
    pub(in crate::engine) min: u32,
    /// Whether the request needed a hit to be served at the last lookup.
    pub(in crate::engine) needs_hit: bool,
    /// How long its last answer took.
    pub(in crate::engine) waited_ns: u64,
}

/// The payloads to read, of those that a hit needs from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Reads {
    All,
    /// A few payloads, for which no request waits, to measure the device.
    Some,
    None,
}

impl Planned {
    /// Notes that a lookup asks for the tokens after `computed`, up to `end`.
    pub(in crate::engine) fn note(&mut self, computed: u32, end: u32) {
        (self.computed, self.end) = (computed, end);
    }
}
