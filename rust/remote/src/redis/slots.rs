//! The hash slots of a Redis cluster: the slot of a key, and the server of a slot.

use std::collections::HashSet;

use redis::Value;

use super::address::Address;

/// Slots of a cluster.
const SLOTS: u16 = 16_384;

/// A run of slots, and their servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: u16,
    last: u16,
    pub(super) address: Address,
    /// The server's replicas, one of which may take over.
    replicas: Vec<Address>,
}

impl Range {
    fn has(&self, slot: u16) -> bool {
        (self.first..=self.last).contains(&slot)
    }
}

/// Which server has which keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Map {
    /// A server outside of a cluster has all keys.
    Single(Address),
    /// The slots that a server of a cluster has reported. Some may be missing.
    Cluster(Vec<Range>),
}

impl Map {
    /// The server of a slot.
    pub(super) fn server(&self, slot: u16) -> Option<&Address> {
        match self {
            Self::Single(address) => Some(address),
            Self::Cluster(ranges) => {
                let range = ranges.iter().find(|range| range.has(slot));
                range.map(|range| &range.address)
            }
        }
    }

    /// The servers that have keys, in the order of the map, and their replicas.
    pub(super) fn servers(&self) -> (Vec<Address>, Vec<Address>) {
        match self {
            Self::Single(address) => (vec![address.clone()], Vec::new()),
            Self::Cluster(ranges) => {
                let unique = |all: Vec<Address>| -> Vec<Address> {
                    let mut seen = HashSet::new();
                    let is_first = |address: &Address| seen.insert(address.clone());
                    all.into_iter().filter(is_first).collect()
                };
                let first = ranges.iter().map(|range| range.address.clone());
                let replicas = ranges.iter().flat_map(|range| range.replicas.clone());
                (unique(first.collect()), unique(replicas.collect()))
            }
        }
    }

    /// Number of slots that no server has.
    pub(super) fn missing(&self) -> u32 {
        match self {
            Self::Single(_) => 0,
            Self::Cluster(ranges) => {
                let slots = |range: &Range| u32::from(range.last) + 1 - u32::from(range.first);
                u32::from(SLOTS).saturating_sub(ranges.iter().map(slots).sum())
            }
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
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
    let [first, last, server, replicas @ ..] = &fields[..] else {
        return None;
    };
    let (first, last) = (number(first)?, number(last)?);
    (first <= last && last < SLOTS).then_some(Range {
        first,
        last,
        address: address(server, host)?,
        // The address of a replica may be unknown.
        replicas: (replicas.iter())
            .filter_map(|one| address(one, host))
            .collect(),
    })
}

fn address(server: &Value, host: &str) -> Option<Address> {
    let Value::Array(fields) = server else {
        return None;
    };
    let [name, port, ..] = &fields[..] else {
        return None;
    };
    let name = match name {
        Value::BulkString(name) if !name.is_empty() => String::from_utf8(name.clone()).ok()?,
        Value::SimpleString(name) if !name.is_empty() => name.clone(),
        Value::BulkString(_) | Value::SimpleString(_) | Value::Nil => host.to_owned(),
        _ => return None,
    };
    Some((name, number(port)?))
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
    fn ranges_of_an_answer_have_its_first_server_and_its_replicas() {
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
        let [a, replica, asked] = [("a", 7000), ("replica", 7001), ("asked", 7002)]
            .map(|(name, port)| (name.to_owned(), port));
        let found = ranges(answer, "asked").unwrap();
        let map = Map::Cluster(found.clone());
        assert_eq!(map.server(99), Some(&a));
        assert_eq!(map.server(100), Some(&asked));
        assert_eq!(map.servers().1, [replica]);
        assert_eq!(map.missing(), 0);
        assert_eq!(Map::Cluster(found[..1].to_vec()).missing(), 16_284);
        let single = Map::Single(asked);
        assert_eq!((single.missing(), single.is_cluster()), (0, false));
        assert_eq!(ranges(Value::Int(1), "asked"), None);
        let without_port = range(0, 1, vec![Value::Array(vec![text("a")])]);
        assert_eq!(ranges(Value::Array(vec![without_port]), "asked"), None);
    }
}
