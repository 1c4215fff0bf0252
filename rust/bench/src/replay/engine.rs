//! The engine itself as a cache to replay on.

use undercroft_host::replay::ReplayEngine;

use super::{Counts, ReplayCache};

impl ReplayCache for ReplayEngine {
    fn request(&mut self, blocks: &[u64]) -> usize {
        let hit = ReplayEngine::request(self, blocks.len(), blocks);
        hit.host + hit.disk
    }

    fn counts(&self) -> Vec<Counts> {
        let counters = self.counters();
        let host = Counts {
            inserted: counters.saved_blocks + counters.disk_reads,
            evicted: counters.host_evictions,
        };
        let disk = Counts {
            inserted: counters.disk_writes,
            evicted: counters.disk_evictions,
        };
        if self.has_disk() {
            vec![host, disk]
        } else {
            vec![host]
        }
    }
}
