//! The engine's statistics as JSON: one flat object of numbers, durations in seconds.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use undercroft_engine::metrics::{Counters, Gauges};

/// The source of a server's statistics.
#[derive(Clone)]
pub struct StatsSource(Arc<dyn Fn() -> Value + Send + Sync>);

impl StatsSource {
    /// `take` makes the statistics in the form of [`stats_json`].
    pub fn new(take: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }

    pub(crate) fn take(&self) -> Value {
        (self.0)()
    }
}

impl std::fmt::Debug for StatsSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StatsSource")
    }
}

/// A report is reused for this many times the time of making it, so that reports take at most a hundredth of the time.
const REPORT_SHARE: u32 = 100;

/// A report for all clients, which may be slightly old.
#[derive(Debug, Default)]
pub(crate) struct Report {
    last: String,
    fresh_until: Option<Instant>,
}

impl Report {
    pub(crate) fn take(&mut self, make: impl FnOnce() -> Value) -> String {
        let start = Instant::now();
        if self.fresh_until.is_none_or(|until| start >= until) {
            self.last = make().to_string();
            self.fresh_until = Some(start + start.elapsed() * REPORT_SHARE);
        }
        self.last.clone()
    }
}

/// Counters and gauges together; `undercroft.connector.observe.stats` documents each.
pub fn stats_json(counters: &Counters, gauges: &Gauges) -> Value {
    let mut all = Map::new();
    for part in [json!(gauges), json!(counters)] {
        let Value::Object(part) = part else { continue };
        for (name, value) in part {
            match (name.strip_suffix("_ns"), value.as_u64()) {
                (Some(name), Some(ns)) => {
                    all.insert(format!("{name}_seconds"), json!(ns as f64 / 1e9));
                }
                _ => {
                    all.insert(name, value);
                }
            }
        }
    }
    Value::Object(all)
}
