//! Checksums of payloads in the arena, whose computing takes time, and bytes in the arena that change.

use undercroft_core::engine::{Room, Started};
use undercroft_core::io::{ChecksumRequest, IoCompletion};

use crate::arena::Hand;
use crate::content::{SECTOR, checksum, sectors};
use crate::world::World;

impl World {
    /// Begins checksums, and ends some.
    pub(crate) fn sum(&mut self) -> Result<(), String> {
        let mut started = Started::default();
        self.engine
            .with(|engine| engine.turn(Room::checksums(u32::MAX), &mut started));
        for request in started.checksums {
            let (offset, len) = (request.arena_offset, u64::from(request.payload_len));
            self.arena.take(offset, len, Hand::Read, "a checksum")?;
            self.checksums.push(request);
        }
        for _ in 0..self.random.range(1, 8) {
            if self.checksums.is_empty() {
                break;
            }
            let at = self.random.index(self.checksums.len());
            let request = self.checksums.swap_remove(at);
            self.end_checksum(request)?;
        }
        Ok(())
    }

    fn end_checksum(&mut self, request: ChecksumRequest) -> Result<(), String> {
        let ChecksumRequest {
            token,
            arena_offset,
            payload_len,
        } = request;
        let len = u64::from(payload_len);
        let result = Ok(checksum(self.arena.at(arena_offset, len)));
        self.arena.release(arena_offset, len, Hand::Read);
        self.note(|| format!("checksum of {arena_offset}+{len}: {result:?}"));
        self.engine
            .with(|engine| engine.complete(IoCompletion { token, result }));
        let mut sectors = (0..sectors(len) as u64).map(|sector| arena_offset + sector * SECTOR);
        if sectors.any(|at| self.arena.has_changed(at)) {
            let payloads = self.engine.uncounted(|engine| engine.guarded_payloads());
            if payloads.iter().any(|&(offset, _)| offset == arena_offset) {
                return Err(format!(
                    "the payload at {arena_offset} is kept, although it was found to have changed"
                ));
            }
        }
        Ok(())
    }

    /// Flips a bit of a payload in the arena, if there is a payload whose change the engine can detect.
    pub(crate) fn change_a_payload(&mut self) {
        let payloads = self.engine.uncounted(|engine| engine.guarded_payloads());
        if payloads.is_empty() {
            return;
        }
        let (offset, len) = payloads[self.random.index(payloads.len())];
        let sector = self.random.index(sectors(u64::from(len))) as u64;
        let at = offset + sector * SECTOR;
        if self.arena.has_changed(at) {
            return;
        }
        let bit = self.random.below(64);
        self.arena.change(at, bit);
        self.history.changes += 1;
        self.log.stats.changes += 1;
        self.note(|| format!("bit {bit} of the sector at {at} in the arena flips"));
    }
}
