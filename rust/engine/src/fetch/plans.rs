//! What a request asks of the planner, and how a fetch comes along.

/// How a fetch under way comes along. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Tokens of the hit if the fetch ended now, and if all arrives.
    pub(crate) arrived: u32,
    pub(crate) end: u32,
    /// Tokens that arrive together.
    pub(crate) together: u32,
    /// Nanoseconds until all has arrived; `None` without a prediction.
    pub(crate) rest_ns: Option<f64>,
}

/// The planner's inputs for a request, and its decisions. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Planned {
    /// Tokens that the device holds.
    pub(crate) computed: u32,
    /// Tokens of the prompt.
    pub(crate) end: u32,
    /// Tokens that vLLM computes before this request.
    pub(crate) queued: u32,
    /// A hit of fewer tokens, with those on the device, does not serve the request.
    pub(crate) min: u32,
    /// Whether the request needed a hit to be served at the last lookup.
    pub(crate) needs_hit: bool,
    /// How long its last answer took.
    pub(crate) waited_ns: u64,
}

/// The payloads to read, of those that a hit needs from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    All,
    /// A few payloads, for which no request waits, to measure the device.
    Some,
    None,
}

impl Planned {
    /// Notes that a lookup asks for the tokens after `computed`, up to `end`.
    pub(crate) fn note(&mut self, computed: u32, end: u32) {
        (self.computed, self.end) = (computed, end);
    }
}
