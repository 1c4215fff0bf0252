//! A device that always has payloads to write.

use std::collections::VecDeque;

use undercroft_contract::io::IoRequest;
use undercroft_engine::{ClearOrder, ClearWhat};

use crate::rig::{MILLISECOND, Rig, SECOND};
use crate::{DEPTH, SMALL, config, records_of};

/// The time of one write.
const WRITE_NS: u64 = 20 * MILLISECOND;
/// Blocks of a prompt.
const LEN: u32 = 8;

/// A device that ends one write after the other, in the order of their starts.
struct Saturated {
    rig: Rig,
    in_flight: VecDeque<IoRequest>,
    prompts: u64,
}

impl Saturated {
    fn new() -> Self {
        let mut rig = Rig::new(config(64 << 20), &[1 << 30], SMALL);
        rig.engine.set_io_depth(DEPTH);
        Self {
            rig,
            in_flight: VecDeque::new(),
            prompts: 0,
        }
    }

    /// Lets time pass. The write queue never becomes empty. Returns the operations that ended.
    fn pass(&mut self, ns: u64) -> Vec<IoRequest> {
        let mut ended = Vec::new();
        for _ in 0..ns / WRITE_NS {
            // More is saved than is written.
            self.rig.save(self.prompts, LEN);
            self.prompts += 1;
            let room = DEPTH - self.in_flight.len();
            self.in_flight.extend(self.rig.start(room));
            self.rig.pass(WRITE_NS);
            let request = self.in_flight.pop_front().unwrap();
            ended.push(request.clone());
            self.rig.end(request);
        }
        ended
    }
}

#[test]
fn records_are_written_although_payloads_always_wait() {
    let mut saturated = Saturated::new();
    let ended = saturated.pass(20 * SECOND);
    let records = ended.iter().filter_map(records_of).count();
    let payloads = ended.len() - records;
    let rig = saturated.rig.restart(config(64 << 20));
    let found: u64 = rig.blocks().iter().sum();
    // The last seconds may be missing: the device's queue takes 1.4 s, and a record waits for a second.
    let late = 5 * SECOND / WRITE_NS;
    assert!(
        found + late >= payloads as u64,
        "{found} of {payloads} payloads have a record"
    );
}

#[test]
fn bytes_are_erased_although_payloads_always_wait() {
    let mut saturated = Saturated::new();
    saturated.pass(20 * SECOND);
    let order = ClearOrder {
        what: ClearWhat::All,
        erase: true,
    };
    saturated.rig.engine.clear(&order).unwrap();
    let ended = saturated.pass(10 * SECOND);
    let is_erasure = |request: &&IoRequest| matches!(request, IoRequest::Erase { .. });
    let erased = ended.iter().filter(is_erasure).count();
    assert!(erased > 10, "{erased} erasures in ten seconds");
}
