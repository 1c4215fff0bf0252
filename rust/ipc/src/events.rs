//! Events of blocks as bytes of a message. Each event has one byte of flags, the group, and its hashes, each after its
//! length. Length 0 means that there is no hash.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{BlockEvent, EventTier};

const STORED: u8 = 1;
const ON_DISK: u8 = 2;
const IN_REMOTE: u8 = 4;

pub(crate) fn serialize<S: Serializer>(
    events: &[BlockEvent],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut bytes = Vec::with_capacity(events.len() * 68);
    for event in events {
        let stored = if event.stored { STORED } else { 0 };
        let tier = match event.tier {
            EventTier::Host => 0,
            EventTier::Disk => ON_DISK,
            EventTier::Remote => IN_REMOTE,
        };
        bytes.extend([stored | tier, event.group]);
        append(&mut bytes, event.hash.as_bytes());
        append(
            &mut bytes,
            event.parent.as_ref().map_or(&[], BlockHash::as_bytes),
        );
    }
    serializer.serialize_bytes(&bytes)
}

fn append(bytes: &mut Vec<u8>, hash: &[u8]) {
    bytes.push(u8::try_from(hash.len()).expect("a hash has at most 32 bytes"));
    bytes.extend_from_slice(hash);
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<BlockEvent>, D::Error> {
    let mut bytes: &'de [u8] = Deserialize::deserialize(deserializer)?;
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let event = first(&mut bytes);
        events.push(event.ok_or_else(|| D::Error::custom("the events are no whole events"))?);
    }
    Ok(events)
}

/// Takes the first event from the bytes; `None` if the bytes do not begin with an event.
fn first(bytes: &mut &[u8]) -> Option<BlockEvent> {
    let flags = *bytes.split_off_first()?;
    let group = *bytes.split_off_first()?;
    let tier = match flags & !STORED {
        0 => EventTier::Host,
        ON_DISK => EventTier::Disk,
        IN_REMOTE => EventTier::Remote,
        _ => return None,
    };
    let hash = BlockHash::new(hash_bytes(bytes)?)?;
    let parent = match hash_bytes(bytes)? {
        [] => None,
        parent => Some(BlockHash::new(parent)?),
    };
    Some(BlockEvent {
        tier,
        stored: flags & STORED != 0,
        group,
        hash,
        parent,
    })
}

/// Takes a hash after its length.
fn hash_bytes<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = *bytes.split_off_first()?;
    bytes.split_off(..usize::from(len))
}
