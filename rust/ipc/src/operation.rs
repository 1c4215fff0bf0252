//! An operator's questions to a running engine, and orders.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use undercroft_contract::explain::ExplainQuery;
use undercroft_contract::hint::{Hint, HintAnswer, HintRequest, PIN_NAME_MAX, TTL_MAX_NS};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::Tokens;
use undercroft_driver::EngineAccess;
use undercroft_engine::metrics::Order;
use undercroft_engine::{ClearOrder, Engine, ResizeOrder};

use crate::orders::{self, Caller};

/// A question or an order. Each is one bounded entry of the engine.
///
/// The commands send it as JSON, whose outer name is the operation:
///
/// ```
/// use undercroft_ipc::OperatorRequest;
///
/// let order: OperatorRequest = serde_json::from_str(r#"{"drain": {"cancel": false}}"#)?;
/// assert_eq!(order, OperatorRequest::Drain { cancel: false });
/// // A misspelled operation is refused, not ignored.
/// assert!(serde_json::from_str::<OperatorRequest>(r#"{"drian": {"cancel": false}}"#).is_err());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperatorRequest {
    /// Returns some of the last lookups: `lookups` (each an [`Explained`]), and `before`, for the question for more.
    ///
    /// [`Explained`]: undercroft_contract::explain::Explained
    Explain(ExplainQuery),
    /// Pins a chain of blocks, or ends a pin. Returns `answer`, `tokens` and, for a rejection, `reason`; or `error` for
    /// an impossible hint.
    Hint(OperatorHint),
    /// Begins to clear blocks, and returns the progress (a [`Cleared`]); `error` if the order is refused.
    ///
    /// [`Cleared`]: undercroft_engine::Cleared
    Clear(ClearOrder),
    /// Returns the progress of the last order to clear.
    Cleared {},
    /// Begins to drain, or with `cancel` ends a drain. Returns the progress (a [`Drained`]).
    ///
    /// [`Drained`]: undercroft_engine::Drained
    Drain {
        /// Whether to end a drain: the engine then accepts saves and promotions again.
        cancel: bool,
    },
    /// Returns the progress of the drain.
    Drained {},
    /// Begins to set the sizes of the tiers, and returns the progress (a [`Resized`]); `error` if a size is impossible.
    ///
    /// [`Resized`]: undercroft_engine::Resized
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

impl OperatorRequest {
    /// Carries the operation out for `caller`, and returns the answer. An order is counted and logged. `available`
    /// returns the memory that the machine leaves: it reads files, so it is not called with the engine locked.
    pub(crate) fn carry_out(
        &self,
        engine: &impl EngineAccess,
        caller: Caller,
        available: impl FnOnce() -> Option<u64>,
    ) -> Value {
        let order = self.order();
        let available = match order {
            Some(Order::Resize) => available(),
            _ => None,
        };
        let done = engine.enter(|engine| {
            if let Some(order) = order {
                engine.count_order(order);
            }
            self.answer(engine, available)
        });
        // Without an answer the engine is broken.
        let done = done.unwrap_or_default();
        if let Some(order) = order {
            orders::tell(caller, order, &self.arguments(), &done);
        }
        done
    }

    /// The kind of the order; `None` for a question.
    fn order(&self) -> Option<Order> {
        match self {
            Self::Clear(_) => Some(Order::Clear),
            Self::Drain { .. } => Some(Order::Drain),
            Self::Resize(_) => Some(Order::Resize),
            Self::Hint(hint) if hint.verb == "release" => Some(Order::Unpin),
            Self::Hint(_) => Some(Order::Pin),
            Self::Explain(_)
            | Self::Cleared {}
            | Self::Drained {}
            | Self::Resized {}
            | Self::Describe { .. } => None,
        }
    }

    /// The operation's fields, for the log.
    fn arguments(&self) -> Value {
        let mut fields = match json!(self) {
            Value::Object(named) => named.into_iter().next().map(|(_, fields)| fields),
            _ => None,
        }
        .unwrap_or_default();
        if let Self::Hint(hint) = self {
            fields["hashes"] = json!(hint.hashes.len());
        }
        fields
    }

    fn answer(&self, engine: &mut Engine, available: Option<u64>) -> Value {
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
            Self::Resize(order) => match engine.resize(order, available) {
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
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use undercroft_contract::log;
    use undercroft_driver::Driver;
    use undercroft_engine::EngineConfig;
    use undercroft_io::arena::Arena;
    use undercroft_io::{IoEngineChoice, open_io_engine};

    use super::*;

    fn driver() -> Driver {
        let arena = Arc::new(Arena::create(1 << 20).unwrap());
        let (io, _) = open_io_engine(IoEngineChoice::ThreadPool, 4, arena, Vec::new()).unwrap();
        Driver::start(Engine::new(EngineConfig::new(1 << 20)), io).unwrap()
    }

    #[test]
    fn every_order_leaves_one_line_and_a_count_and_no_question_does() {
        let driver = driver();
        let pin = json!({"verb": "pin", "ttl_ns": 1, "name": "a\nb", "hashes": vec!["00"; 999]});
        let asked = [
            (
                json!({"clear": {"what": "all", "erase": false}}),
                "clear {\"erase\":false,\"what\":\"all\"}",
            ),
            (
                json!({"clear": {"what": {"older_than": 7}, "erase": true}}),
                "clear {\"erase\":true,",
            ),
            (json!({"cleared": {}}), ""),
            (
                json!({"drain": {"cancel": false}}),
                "drain {\"cancel\":false}",
            ),
            (
                json!({"drain": {"cancel": true}}),
                "drain {\"cancel\":true}",
            ),
            (json!({"drained": {}}), ""),
            (
                json!({"resize": {"host_bytes": 1}}),
                "resize {\"disk_bytes\":null,\"host_bytes\":1}",
            ),
            (json!({"resized": {}}), ""),
            (
                json!({"hint": pin}),
                "pin {\"hashes\":999,\"name\":\"a\\nb\",",
            ),
            (json!({"hint": {"verb": "release"}}), "unpin {\"hashes\":0,"),
            (json!({"explain": {}}), ""),
            (json!({"describe": {"namespace": "00"}}), ""),
        ];
        let caller = Caller::at(&std::os::unix::net::UnixStream::pair().unwrap().0);
        let by = format!(
            "by uid {}, pid {}: {{",
            rustix::process::geteuid().as_raw(),
            std::process::id()
        );
        for (operation, expected) in asked {
            let operation: OperatorRequest = serde_json::from_value(operation).unwrap();
            log::take();
            let before = driver.read(|engine| json!(engine.counters())).unwrap();
            operation.carry_out(&driver, caller, || None);
            let after = driver.read(|engine| json!(engine.counters())).unwrap();
            let lines = log::take();
            let lines: Vec<_> = lines
                .iter()
                .filter(|(_, line)| line.contains(" order "))
                .collect();
            let more: Vec<_> = after
                .as_object()
                .unwrap()
                .iter()
                .filter(|(name, count)| name.starts_with("orders_") && before[*name] != **count)
                .map(|(name, _)| name.trim_start_matches("orders_"))
                .collect();
            if expected.is_empty() {
                assert_eq!((lines.len(), more.len()), (0, 0), "{lines:?}");
                continue;
            }
            assert_eq!(lines.len(), 1, "{lines:?}");
            let line = &lines[0].1;
            let expected = format!("undercroft: order {expected}");
            assert!(line.starts_with(&expected) && line.contains(&by), "{line}");
            assert_eq!(more, [expected.split(' ').nth(2).unwrap()]);
        }
    }

    #[test]
    fn the_machine_is_looked_at_without_the_engine() {
        let driver = Arc::new(driver());
        let other = Arc::clone(&driver);
        let resize = OperatorRequest::Resize(ResizeOrder::default());
        let mut looked = false;
        resize.carry_out(&*driver, Caller::default(), || {
            let (answered, answer) = channel();
            std::thread::spawn(move || other.read(|_| answered.send(())));
            looked = answer.recv_timeout(Duration::from_secs(10)).is_ok();
            None
        });
        assert!(looked, "another thread could enter the engine");
    }

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
