//! A line of the log for each order to a running engine.

use std::os::fd::AsFd;

use serde_json::Value;
use undercroft_contract::log;
use undercroft_contract::log::Level;
use undercroft_engine::metrics::Order;

use crate::peer::peer_credentials;

/// Most characters of an order's arguments, and of the answer to it, in the log.
const SHOWN_MAX: usize = 500;

/// The process that gives orders over a connection, as the kernel reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    uid: u32,
    /// 0 for a process of another PID namespace.
    pid: i32,
}

impl Caller {
    /// The process at the other end of a socket.
    pub(crate) fn at(socket: &impl AsFd) -> Self {
        let (uid, pid) = peer_credentials(socket).unwrap_or_default();
        Self { uid, pid }
    }
}

impl std::fmt::Display for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            0 => write!(f, "uid {}, in another PID namespace", self.uid),
            pid => write!(f, "uid {}, pid {pid}", self.uid),
        }
    }
}

/// Logs an order, its arguments, its caller, and the answer.
pub(crate) fn tell(caller: Caller, order: Order, arguments: &Value, did: &Value) {
    let (arguments, did) = (shown(arguments), shown(did));
    let name = order.name();
    log::say(
        Level::Info,
        format!("undercroft: order {name} {arguments} by {caller}: {did}"),
    );
}

fn shown(value: &Value) -> String {
    let mut text = value.to_string();
    if let Some((end, _)) = text.char_indices().nth(SHOWN_MAX) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_long_value_is_cut() {
        let text = shown(&json!("\u{e4}".repeat(SHOWN_MAX)));
        assert_eq!(text.chars().count(), SHOWN_MAX + 3);
        assert!(text.ends_with("\u{e4}..."));
        assert_eq!(shown(&json!({"erase": true})), "{\"erase\":true}");
    }
}
