//! A node's payloads, as they lie in memory. With one group, the payload lies in the node. With several groups, the
//! payloads that are in some tier lie in a list, in the order of their groups: most blocks of windows and states are in
//! no tier.

use undercroft_contract::tier::Tier;

use super::node::{
    DiskState, HostState, MANY, NONE, Node, ONE_DISK, ONE_HOST, ONE_REQUIRED, ONE_SLOTS, Payload,
};
use super::slab::{Linked, Slab};

const HOST_STATES: [HostState; 4] = [
    HostState::Empty,
    HostState::Filling,
    HostState::Reading,
    HostState::Present,
];
const DISK_STATES: [DiskState; 4] = [
    DiskState::Empty,
    DiskState::Queued,
    DiskState::Writing,
    DiskState::Present,
];

/// The payload of one of several groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The next entry of the node, or `NONE`. In a free place: the next free place.
    next: u32,
    group: u8,
    host: HostState,
    disk: DiskState,
    words: [u32; 4],
}

impl Linked for Entry {
    fn link(&mut self) -> &mut u32 {
        &mut self.next
    }
}

fn words(payload: &Payload) -> [u32; 4] {
    let sum = payload.checksum;
    // Both halves.
    let (low, high) = (sum as u32, (sum >> 32) as u32);
    [payload.host_slot, payload.disk_slot, low, high]
}

fn payload(host: HostState, disk: DiskState, words: [u32; 4]) -> Payload {
    let [host_slot, disk_slot, low, high] = words;
    Payload {
        host,
        disk,
        host_slot,
        disk_slot,
        checksum: u64::from(high) << 32 | u64::from(low),
    }
}

/// Fields of a node with several groups, in its `payload`: the beginning of the list, the required groups, the number
/// of groups, and by tier the number of payloads with a slot.
const FIRST: usize = 0;
const REQUIRED: usize = 1;
const GROUPS: usize = 2;
const SLOTS: usize = 3;

impl Node {
    pub(super) fn set_groups(&mut self, groups: usize, required: u32) {
        if groups == 1 {
            self.put(ONE_REQUIRED, required & 1);
            return;
        }
        self.put(MANY, 1);
        self.payload[FIRST] = NONE;
        self.payload[REQUIRED] = required;
        self.payload[GROUPS] =
            u32::try_from(groups).expect("a namespace has at most GROUPS_MAX groups");
    }

    /// Groups whose payload must be readable for the node to be visible, one bit each.
    pub fn required(&self) -> u32 {
        if self.has(MANY) {
            self.payload[REQUIRED]
        } else {
            self.get(ONE_REQUIRED)
        }
    }

    /// Whether the payload of `group` must be readable for the node to be visible.
    pub fn requires(&self, group: u8) -> bool {
        self.required() >> group & 1 == 1
    }

    /// Indices of the node's groups.
    pub fn groups(&self) -> std::ops::Range<u8> {
        let count = if self.has(MANY) {
            self.payload[GROUPS]
        } else {
            1
        };
        // `GROUPS_MAX` is less than 256.
        0..count as u8
    }

    /// Number of payloads with a slot in a tier.
    pub fn slots(&self, tier: Tier) -> u8 {
        let count = if self.has(MANY) {
            self.payload[SLOTS] >> (8 * tier as u32)
        } else {
            self.get(ONE_SLOTS[tier as usize])
        };
        count as u8
    }

    /// See [`Node::slots`].
    pub fn set_slots(&mut self, tier: Tier, slots: u8) {
        if self.has(MANY) {
            let shift = 8 * tier as u32;
            let others = self.payload[SLOTS] & !(0xFF << shift);
            self.payload[SLOTS] = others | u32::from(slots) << shift;
        } else {
            self.put(ONE_SLOTS[tier as usize], u32::from(slots));
        }
    }

    /// Whether the node has no slot in any tier.
    pub fn has_no_slots(&self) -> bool {
        Tier::ALL.iter().all(|&tier| self.slots(tier) == 0)
    }

    fn one(&self) -> Payload {
        let host = HOST_STATES[self.get(ONE_HOST) as usize];
        let disk = DISK_STATES[self.get(ONE_DISK) as usize];
        payload(host, disk, self.payload)
    }

    pub(super) fn payload_of(&self, entries: &Slab<Entry>, group: u8) -> Payload {
        debug_assert!(self.groups().contains(&group), "no group {group}");
        if !self.has(MANY) {
            return self.one();
        }
        let mut at = self.payload[FIRST];
        while at != NONE {
            let entry = entries.get(at);
            if entry.group >= group {
                break;
            }
            at = entry.next;
        }
        entry_of(entries, at, group).unwrap_or_default()
    }

    pub(super) fn set_payload(&mut self, entries: &mut Slab<Entry>, group: u8, new: &Payload) {
        assert!(self.groups().contains(&group), "no group {group}");
        if !self.has(MANY) {
            self.put(ONE_HOST, new.host as u32);
            self.put(ONE_DISK, new.disk as u32);
            self.payload = words(new);
            return;
        }
        let (mut before, mut at) = (NONE, self.payload[FIRST]);
        while at != NONE && entries.get(at).group < group {
            (before, at) = (at, entries.get(at).next);
        }
        let is_there = at != NONE && entries.get(at).group == group;
        let is_nowhere = new.host == HostState::Empty && new.disk == DiskState::Empty;
        let next = match (is_there, is_nowhere) {
            (false, true) => return,
            (true, true) => {
                let next = entries.get(at).next;
                entries.remove(at);
                next
            }
            (is_there, false) => {
                let entry = Entry {
                    next: if is_there { entries.get(at).next } else { at },
                    group,
                    host: new.host,
                    disk: new.disk,
                    words: words(new),
                };
                if is_there {
                    *entries.get_mut(at) = entry;
                    return;
                }
                entries.insert(entry)
            }
        };
        match before {
            NONE => self.payload[FIRST] = next,
            before => entries.get_mut(before).next = next,
        }
    }
}

/// The payload at `at`, if it belongs to `group`.
fn entry_of(entries: &Slab<Entry>, at: u32, group: u8) -> Option<Payload> {
    let entry = (at != NONE).then(|| entries.get(at))?;
    (entry.group == group).then(|| payload(entry.host, entry.disk, entry.words))
}

/// The payload of each group of a node.
#[derive(Debug)]
pub struct Payloads<'a> {
    node: &'a Node,
    entries: &'a Slab<Entry>,
    groups: std::ops::Range<u8>,
    at: u32,
}

impl<'a> Payloads<'a> {
    pub(super) fn of(node: &'a Node, entries: &'a Slab<Entry>) -> Self {
        let at = if node.has(MANY) {
            node.payload[FIRST]
        } else {
            NONE
        };
        Self {
            node,
            entries,
            groups: node.groups(),
            at,
        }
    }
}

impl Iterator for Payloads<'_> {
    type Item = Payload;

    fn next(&mut self) -> Option<Payload> {
        let group = self.groups.next()?;
        if !self.node.has(MANY) {
            return Some(self.node.one());
        }
        let found = entry_of(self.entries, self.at, group);
        if found.is_some() {
            self.at = self.entries.get(self.at).next;
        }
        Some(found.unwrap_or_default())
    }
}
