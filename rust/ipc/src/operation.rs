//! An operator's questions to a running engine, and orders.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use undercroft_core::engine::Engine;
use undercroft_core::explain::ExplainQuery;

/// A question or an order. Each is one bounded entry of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Tells some of the last lookups: `lookups` (each an [`Explained`]), and `before`, with which to ask for more.
    ///
    /// [`Explained`]: undercroft_core::explain::Explained
    Explain(ExplainQuery),
}

impl Operation {
    /// Carries it out.
    pub(crate) fn carry_out(&self, engine: &Engine) -> Value {
        match self {
            Self::Explain(query) => {
                let (lookups, before) = engine.explain(query);
                json!({"lookups": lookups, "before": before})
            }
        }
    }
}
