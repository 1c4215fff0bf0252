//! Stores whose payloads are encrypted: a model of the cipher, other keys, and files that somebody has rearranged.

use undercroft_core::cipher::Binding;
use undercroft_core::disk::format::{PLACEHOLDER, RECORD_BYTES, Record};
use undercroft_core::io::IoFault;

use crate::content::{Token, checksum};
use crate::device::SimDevice;
use crate::random::{Random, mix};
use crate::world::World;

/// A word that differs with every part of a binding, and with the key.
fn mask(key: u64, binding: &Binding) -> u64 {
    let bytes = binding.namespace.iter().chain(&*binding.associated);
    bytes.fold(key, |sum, &byte| mix(sum, u64::from(byte)))
}

/// The sectors of an encrypted payload in a slot of `sectors`; its seal is in the last one.
pub(crate) fn seal(plain: &[Token], sectors: usize, key: u64, binding: &Binding) -> Vec<Token> {
    assert!(plain.len() < sectors, "the seal has a sector of its own");
    let mask = mask(key, binding);
    let mut stored = vec![0; sectors];
    for (at, (to, &from)) in (0u64..).zip(stored.iter_mut().zip(plain)) {
        *to = from ^ mix(mask, at);
    }
    stored[sectors - 1] = mix(mask, checksum(plain));
    stored
}

/// Decrypts the payload of `sectors` in an encrypted slot.
pub(crate) fn unseal(
    stored: &[Token],
    sectors: usize,
    key: u64,
    binding: &Binding,
) -> Result<Vec<Token>, IoFault> {
    let mask = mask(key, binding);
    let encrypted = (0u64..).zip(&stored[..sectors]);
    let plain: Vec<Token> = encrypted.map(|(at, &of)| of ^ mix(mask, at)).collect();
    let is_right = stored.last() == Some(&mix(mask, checksum(&plain)));
    is_right.then_some(plain).ok_or(IoFault::Cipher)
}

/// Exchanges the slots of two records, in a table whose checksums are right again. Whether there are two.
fn exchange(device: &mut SimDevice, random: &mut Random) -> bool {
    let table = device.table_mut();
    let decoded = table.chunks_exact(RECORD_BYTES).map(Record::decode);
    let found: Vec<(usize, Record)> = decoded
        .enumerate()
        .filter_map(|(at, record)| Some((at, record?)))
        .filter(|(_, record)| record.group != PLACEHOLDER)
        .collect();
    if found.is_empty() {
        return false;
    }
    let (at, one) = random.pick(&found);
    let others = found.iter().filter(|(_, record)| {
        (record.group, record.payload_bytes) == (one.group, one.payload_bytes)
            && record.slot != one.slot
    });
    let others: Vec<(usize, Record)> = others.copied().collect();
    if others.is_empty() {
        return false;
    }
    let (other_at, other) = random.pick(&others);
    for (at, record, slot) in [(at, one, other.slot), (other_at, other, one.slot)] {
        let bytes = &mut table[at * RECORD_BYTES..][..RECORD_BYTES];
        Record { slot, ..record }.encode(bytes);
    }
    true
}

impl World {
    /// Between two lives, encrypted stores get another key, or somebody rearranges their files.
    pub(crate) fn tamper(&mut self) {
        if !self.settings.encrypted || self.settings.roomy {
            return;
        }
        if self.random.chance(100) {
            self.disks.key = self.random.next();
            self.note(|| "the operator gives other keys".to_owned());
        }
        let count = self.disks.devices.len();
        if count == 0 || !self.random.chance(500) {
            return;
        }
        for _ in 0..self.random.range(1, 20) {
            let at = self.random.index(count);
            let exchanged = exchange(&mut self.disks.devices[at], &mut self.random);
            self.log.stats.exchanged += u64::from(exchanged);
        }
        self.note(|| "somebody exchanges slots".to_owned());
        if self.random.chance(300) {
            self.exchange_stores();
        }
        self.history.left_on_disk = None;
    }
}
