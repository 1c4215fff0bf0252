//! The hash slots of a Redis cluster: the slot of a key, and the server of a slot.

use redis::Value;

use super::servers::Address;

/// Slots of a cluster.
const SLOTS: u16 = 16_384;

/// A run of slots, and their server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) address: Address,
}

impl Range {
    /// All slots.
    pub(super) fn all(address: Address) -> Self {
        Self {
            first: 0,
            last: SLOTS - 1,
            address,
        }
    }

    pub(super) fn has(&self, slot: u16) -> bool {
        (self.first..=self.last).contains(&slot)
    }
}

/// The slot of a key. If there is text between its first braces, only this text counts.
pub(super) fn slot(key: &[u8]) -> u16 {
    let tagged = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let len = rest.iter().position(|byte| *byte == b'}')?;
        (len > 0).then_some(&rest[..len])
    });
    crc16(tagged.unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM, which Redis uses.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| {
        let sum = sum ^ (u16::from(*byte) << 8);
        (0..8).fold(sum, |sum, _| {
            let shifted = sum << 1;
            if sum & 0x8000 == 0 {
                shifted
            } else {
                shifted ^ 0x1021
            }
        })
    })
}

/// The ranges in an answer to `CLUSTER SLOTS`. A server without an address is the answering server, at `host`.
pub(super) fn ranges(answer: Value, host: &str) -> Option<Vec<Range>> {
    let Value::Array(all) = answer else {
        return None;
    };
    all.into_iter().map(|one| range(one, host)).collect()
}

fn range(one: Value, host: &str) -> Option<Range> {
    let Value::Array(fields) = one else {
        return None;
    };
    let [first, last, Value::Array(server), ..] = &fields[..] else {
        return None;
    };
    let [name, port, ..] = &server[..] else {
        return None;
    };
    let name = match name {
        Value::BulkString(name) if !name.is_empty() => String::from_utf8(name.clone()).ok()?,
        Value::SimpleString(name) if !name.is_empty() => name.clone(),
        Value::BulkString(_) | Value::SimpleString(_) | Value::Nil => host.to_owned(),
        _ => return None,
    };
    Some(Range {
        first: number(first)?,
        last: number(last)?,
        address: (name, number(port)?),
    })
}

fn number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server returned these values for `CLUSTER KEYSLOT`.
    #[test]
    fn a_key_is_in_the_slot_that_redis_says() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b""), 0);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"a{foo}b{bar}"), 12_182);
        assert_eq!(slot(b"{}foo"), slot(b"{}foo"));
        assert_ne!(slot(b"{}foo"), 12_182);
    }

    #[test]
    fn ranges_of_an_answer_are_those_of_its_first_servers() {
        let server = |name: Value, port| Value::Array(vec![name, Value::Int(port)]);
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let range = |first, last, servers: Vec<Value>| {
            Value::Array([vec![Value::Int(first), Value::Int(last)], servers].concat())
        };
        let answer = Value::Array(vec![
            range(
                0,
                99,
                vec![server(text("a"), 7000), server(text("replica"), 7001)],
            ),
            range(100, 16_383, vec![server(Value::Nil, 7002)]),
        ]);
        let expected = [(0, 99, "a", 7000), (100, 16_383, "asked", 7002)];
        let expected = expected.map(|(first, last, name, port)| Range {
            first,
            last,
            address: (name.to_owned(), port),
        });
        assert_eq!(ranges(answer, "asked").as_deref(), Some(&expected[..]));
        assert_eq!(ranges(Value::Int(1), "asked"), None);
        let without_port = range(0, 1, vec![Value::Array(vec![text("a")])]);
        assert_eq!(ranges(Value::Array(vec![without_port]), "asked"), None);
    }
}
