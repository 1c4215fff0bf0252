//! An operator's questions to a running engine, and orders.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use undercroft_core::engine::{ClearOrder, Engine, ResizeOrder};
use undercroft_core::explain::ExplainQuery;
use undercroft_core::hint::{Hint, HintAnswer, HintRequest, PIN_NAME_MAX, TTL_MAX_NS};
use undercroft_core::key::BlockHash;
use undercroft_core::memory;
use undercroft_core::session::Tokens;

/// A question or an order. Each is one bounded entry of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Returns some of the last lookups: `lookups` (each an [`Explained`]), and `before`, for the question for more.
    ///
    /// [`Explained`]: undercroft_core::explain::Explained
    Explain(ExplainQuery),
    /// Pins a chain of blocks, or ends a pin. Returns `answer`, `tokens` and, for a rejection, `reason`; or `error` for
    /// an impossible hint.
    Hint(OperatorHint),
    /// Begins to clear blocks, and returns the progress (a [`Cleared`]); `error` if the order is refused.
    ///
    /// [`Cleared`]: undercroft_core::engine::Cleared
    Clear(ClearOrder),
    /// Returns the progress of the last order to clear.
    Cleared {},
    /// Begins to drain, or with `cancel` ends a drain. Returns the progress (a [`Drained`]).
    ///
    /// [`Drained`]: undercroft_core::engine::Drained
    Drain {
        /// Whether to end a drain: the engine then accepts saves and promotions again.
        cancel: bool,
    },
    /// Returns the progress of the drain.
    Drained {},
    /// Begins to set the sizes of the tiers, and returns the progress (a [`Resized`]); `error` if a size is impossible.
    ///
    /// [`Resized`]: undercroft_core::engine::Resized
    Resize(ResizeOrder),
    /// Returns the sizes of the tiers.
    Resized {},
    /// Returns the `description` of a namespace; null if the engine has none.
    Describe {
        /// The namespace's digest, hexadecimal.
        namespace: String,
    },
}

/// An operator's hint about a chain of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperatorHint {
    /// First digits of the namespace's digest. Empty: the only namespace that a vLLM uses.
    pub namespace: String,
    /// "pin" or "release".
    pub verb: String,
    /// Block hashes of a prompt from its first block on, in hexadecimal.
    pub hashes: Vec<String>,
    /// See [`Hint::Pin`].
    pub ttl_ns: u64,
    /// See [`Hint::Pin`].
    pub name: String,
}

impl Operation {
    /// Carries the operation out.
    pub(crate) fn carry_out(&self, engine: &mut Engine) -> Value {
        match self {
            Self::Explain(query) => {
                let (lookups, before) = engine.explain(query);
                json!({"lookups": lookups, "before": before})
            }
            Self::Clear(order) => match engine.clear(order) {
                Ok(cleared) => json!(cleared),
                Err(refusal) => json!({"error": refusal.to_string()}),
            },
            Self::Cleared {} => json!(engine.cleared()),
            Self::Drain { cancel } => json!(engine.drain(*cancel)),
            Self::Drained {} => json!(engine.drained()),
            Self::Resize(order) => match engine.resize(order, memory::available()) {
                Ok(resized) => json!(resized),
                Err(refusal) => json!({"error": refusal.to_string()}),
            },
            Self::Resized {} => json!(engine.resized()),
            Self::Describe { namespace } => json!({"description": engine.description(namespace)}),
            Self::Hint(hint) => match hint.carry_out(engine) {
                Ok(answer) => told(answer),
                Err(error) => json!({"error": error}),
            },
        }
    }
}

impl OperatorHint {
    fn carry_out(&self, engine: &mut Engine) -> Result<HintAnswer, String> {
        let session = engine.session_in(&self.namespace)?;
        let hashes = self.hashes.iter().map(|hash| parse(hash));
        let hashes: Vec<BlockHash> = hashes.collect::<Result<_, _>>()?;
        let request = HintRequest {
            request: "an operator",
            hashes: &hashes,
            max: Tokens(u32::MAX),
            hint: &self.hint()?,
        };
        Ok(engine.hint(session, &request))
    }

    fn hint(&self) -> Result<Hint, String> {
        let name = self.name.clone();
        if name.len() > PIN_NAME_MAX {
            return Err(format!(
                "name = {name:?}: allowed is text of at most {PIN_NAME_MAX} bytes"
            ));
        }
        match (self.verb.as_str(), self.ttl_ns) {
            ("pin", ttl_ns @ 1..=TTL_MAX_NS) => Ok(Hint::Pin { ttl_ns, name }),
            ("pin", ttl_ns) => Err(format!(
                "ttl_ns = {ttl_ns}: allowed is a number from 1 to {TTL_MAX_NS}"
            )),
            ("release", _) => Ok(Hint::Release { name }),
            (verb, _) => Err(format!(
                "verb = {verb:?}: allowed is \"pin\" or \"release\""
            )),
        }
    }
}

/// A block hash in hexadecimal.
fn parse(text: &str) -> Result<BlockHash, String> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let bytes = text.as_bytes().chunks(2).map(|pair| match *pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    });
    let bytes: Option<Vec<u8>> = bytes.collect();
    let hash = bytes.and_then(|bytes| BlockHash::new(&bytes));
    hash.ok_or_else(|| {
        format!("hash {text:?}: allowed is a block hash of 1 to 32 bytes in hexadecimal")
    })
}

fn told(answer: HintAnswer) -> Value {
    match answer {
        HintAnswer::Accepted(tokens) => json!({"answer": "accepted", "tokens": tokens.0}),
        HintAnswer::Clipped(tokens) => json!({"answer": "clipped", "tokens": tokens.0}),
        HintAnswer::Rejected(refusal) => {
            json!({"answer": "rejected", "tokens": 0, "reason": refusal.name()})
        }
        HintAnswer::Pending => json!({"answer": "pending", "tokens": 0}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_pairs_of_hexadecimal_digits() {
        assert_eq!(parse("0aFf").unwrap().as_bytes(), [10, 255]);
        let long = "00".repeat(33);
        for bad in ["", "0", "0af", "xy", "+1", "0\u{e4}", &long] {
            let said = parse(bad).unwrap_err();
            assert!(said.contains("in hexadecimal"), "{said}");
        }
    }

    #[test]
    fn an_impossible_hint_names_its_field_and_the_allowed_values() {
        let pin = OperatorHint {
            verb: "pin".to_owned(),
            ttl_ns: 1,
            ..OperatorHint::default()
        };
        let said = |hint: OperatorHint| hint.hint().unwrap_err();
        let verb = "demote".to_owned();
        assert!(
            said(OperatorHint {
                verb,
                ..pin.clone()
            })
            .starts_with("verb = \"demote\": allowed")
        );
        let name = "x".repeat(65);
        assert!(
            said(OperatorHint {
                name,
                ..pin.clone()
            })
            .contains("at most 64 bytes")
        );
        for ttl_ns in [0, TTL_MAX_NS + 1] {
            assert!(
                said(OperatorHint {
                    ttl_ns,
                    ..pin.clone()
                })
                .starts_with("ttl_ns = ")
            );
        }
        assert!(pin.hint().is_ok());
    }
}
