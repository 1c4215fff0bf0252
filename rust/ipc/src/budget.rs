//! Shares of a limited resource for all its users: memory of a server, or of its arena.

/// A limited resource. A user may take at most as much as then remains for the others. So the first user gets at most
/// half of the limit, and the next user half of the rest. Every user gets at least the floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    limit: u64,
    floor: u64,
    used: u64,
}

impl Budget {
    pub(crate) fn new(limit: u64, floor: u64) -> Self {
        Self {
            limit,
            floor,
            used: 0,
        }
    }

    /// The amount that a client may take in addition to its `own`.
    pub(crate) fn room(&self, own: u64) -> u64 {
        share(self.limit, self.used, own).max(self.floor.saturating_sub(own))
    }

    pub(crate) fn allows(&self, own: u64, more: u64) -> bool {
        more <= self.room(own)
    }

    pub(crate) fn take(&mut self, bytes: u64) {
        self.used += bytes;
    }

    pub(crate) fn give_back(&mut self, bytes: u64) {
        let left = self.used.checked_sub(bytes);
        self.used = left.expect("no more is released than was taken");
    }
}

/// The amount that a client may take in addition to its `own`, if `used` of `limit` is taken. After this the client has
/// as much as remains.
pub(crate) fn share(limit: u64, used: u64, own: u64) -> u64 {
    // own + more <= limit - used - more
    limit.saturating_sub(used).saturating_sub(own) / 2
}

/// Whether a client that then has `own` leaves as much to the others, if `used` of `limit` is then taken. [`share`] for
/// amounts that the client may have in common with others.
pub(crate) fn leaves_enough(limit: u64, used: u64, own: u64) -> bool {
    own <= limit.saturating_sub(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_alone_gets_half_and_everybody_the_floor() {
        const LIMIT: u64 = 1 << 20;
        const FLOOR: u64 = 1 << 10;
        let mut budget = Budget::new(LIMIT, FLOOR);
        let mut all = Vec::new();
        for _ in 0..32 {
            let mut own = 0;
            while budget.room(own) > 0 {
                let more = budget.room(own).min(1000);
                assert!(budget.allows(own, more) && !budget.allows(own, more + LIMIT));
                budget.take(more);
                own += more;
            }
            all.push(own);
        }
        assert!(all[0] > LIMIT / 2 - 2 && all[0] <= LIMIT / 2);
        assert!(all[1] > LIMIT / 4 - 2 && all[1] <= LIMIT / 4);
        assert!(all.iter().all(|&own| own >= FLOOR), "{all:?}");
        assert!(budget.used < LIMIT + 32 * FLOOR);
        for own in all {
            budget.give_back(own);
        }
        assert_eq!(budget, Budget::new(LIMIT, FLOOR));
    }
}
