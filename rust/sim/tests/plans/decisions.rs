//! Single decisions on devices of one rate, after the planner has learned it.

use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{LookupRequest, Step, Tokens};

use super::disk::{Device, Random, SECOND};
use super::{BLOCK, BlockHash, CHUNK, Compute, Life, POLL, Sums};

/// Blocks of each prompt.
const BLOCKS: u32 = 32;
/// Prompts from which the planner learns.
const LEARN: usize = 12;

/// A life whose planner has learned a device of this multiple of the break-even rate. The prompts are on disk only.
fn learned(factor: f64, prompts: usize) -> (Life, Vec<Vec<BlockHash>>) {
    let compute = Compute {
        step: 5e6,
        token: 5e4,
        position: 0.0,
        decode: 0.0,
    };
    let rate = compute.even_bytes_per_s() * factor;
    let (device, kind) = (Device::steady(rate), GroupKind::Full);
    let mut life = Life::with(compute, 0, device, kind, Random::new(3));
    let mut stored = life.store(&vec![BLOCKS; LEARN + prompts]);
    for hashes in stored.drain(..LEARN) {
        let sums = &mut Sums::default();
        life.ask(&hashes, sums).expect("within the guarantee");
    }
    (life, stored)
}

#[expect(clippy::ptr_arg, reason = "a source of hashes is sized")]
fn request(hashes: &Vec<BlockHash>) -> LookupRequest<'_> {
    LookupRequest::new("r", hashes).max(Tokens(BLOCKS * BLOCK))
}

fn pass(life: &mut Life, ns: u64) {
    let until_ns = life.now_ns + ns;
    life.run_until(until_ns);
}

#[test]
fn a_request_that_only_a_hit_can_serve_is_read_from_a_disk_that_is_slower_than_computing() {
    let (mut life, prompts) = learned(0.2, 3);
    let all = Tokens(BLOCKS * BLOCK);
    let stopped = |life: &Life| {
        let counters = life.engine.counters();
        counters.plans_stopped_guarantee + counters.plans_stopped_rest
    };
    let before = stopped(&life);
    for (hashes, min) in prompts.iter().zip([Tokens(0), Tokens(1), all]) {
        let request = request(hashes).min(min);
        let mut answer = life.engine.lookup(life.session, &request);
        assert_eq!(
            answer.is_pending(),
            min > Tokens(0),
            "{min:?} is weighed or not"
        );
        while answer.is_pending() {
            pass(&mut life, POLL);
            answer = life.engine.lookup(life.session, &request);
        }
        let expected = if min > Tokens(0) { all } else { Tokens(0) };
        assert_eq!(answer.tokens().unwrap_or_default(), expected);
        life.engine.finish_request(life.session, "r");
        // Meanwhile the planner measures nothing, because the last read is recent.
    }
    assert_eq!(stopped(&life), before);
}

#[test]
fn a_slow_disk_is_measured_with_blocks_for_which_nobody_waits() {
    let (mut life, prompts) = learned(0.2, 4);
    let reads = |life: &Life| life.engine.counters().disk_reads;
    let measured = |life: &Life| life.engine.counters().plans_compute_measure;
    let (before, began) = (measured(&life), reads(&life));
    pass(&mut life, SECOND);
    let ask = |life: &mut Life, hashes| {
        let answer = life.engine.lookup(life.session, &request(hashes));
        assert_eq!(answer.tokens(), Some(Tokens(0)));
        life.engine.finish_request(life.session, "r");
    };
    ask(&mut life, &prompts[0]);
    // While these blocks are being read, and shortly after, no other blocks are read.
    ask(&mut life, &prompts[1]);
    assert_eq!(measured(&life), before + 1);
    pass(&mut life, SECOND / 5);
    ask(&mut life, &prompts[1]);
    assert_eq!((measured(&life), reads(&life)), (before + 1, began + 4));
    // The disk has become fast. The prompt that finds this out is computed, and the next is loaded.
    life.device = Device::steady(life.compute.even_bytes_per_s() * 5.0);
    pass(&mut life, SECOND);
    ask(&mut life, &prompts[2]);
    pass(&mut life, SECOND / 5);
    assert_eq!((measured(&life), reads(&life)), (before + 2, began + 8));
    let answer = life.engine.lookup(life.session, &request(&prompts[3]));
    assert!(answer.is_pending());
}

#[test]
fn a_wait_is_a_quarter_of_computing_although_most_steps_before_it_were_held_up() {
    let (mut life, prompts) = learned(5.0, 1);
    for i in 0..64 {
        let held_up = if i % 8 == 0 { 1.0 } else { 2.5 };
        let step = Step {
            tokens: CHUNK,
            positions: u64::from(CHUNK).pow(2) / 2,
            decodes: 0,
            duration_ns: (life.compute.step_ns(0, CHUNK, 0) * held_up) as u64,
        };
        life.engine.report_steps(life.session, &[step]);
    }
    life.device = Device::steady(1.0);
    let mut sums = Sums::default();
    life.ask(&prompts[0], &mut sums)
        .expect("within the guarantee");
    assert_eq!(life.engine.counters().plans_stopped_guarantee, 1);
}

#[test]
fn a_prompt_is_not_read_if_the_guarantee_would_end_its_wait() {
    // Reading takes five sixths of the predicted time of computing. Computing may take a third less than predicted.
    let (mut life, prompts) = learned(1.2, 8);
    for i in 0..64 {
        let part = if i % 8 == 0 { 0.65 } else { 1.0 };
        let step = Step {
            tokens: CHUNK,
            positions: u64::from(CHUNK).pow(2) / 2,
            decodes: 0,
            duration_ns: (life.compute.step_ns(0, CHUNK, 0) * part) as u64,
        };
        life.engine.report_steps(life.session, &[step]);
    }
    let before = life.engine.counters().plans_stopped_guarantee;
    let mut sums = Sums::default();
    for hashes in &prompts {
        life.ask(hashes, &mut sums).expect("within the guarantee");
    }
    let stopped = life.engine.counters().plans_stopped_guarantee - before;
    let ratio = sums.planned / sums.computed;
    assert!(
        stopped == 0 && ratio < 1.02,
        "{stopped} waits ended, {ratio}"
    );
}

#[test]
fn one_in_a_hundred_near_even_prompts_takes_the_other_way() {
    let (mut life, prompts) = learned(1.15, 200);
    for hashes in &prompts {
        let sums = &mut Sums::default();
        life.ask(hashes, sums).expect("within the guarantee");
    }
    let counters = life.engine.counters();
    let other_ways = counters.plans_load_other_way + counters.plans_compute_other_way;
    assert!((1..=2).contains(&other_ways), "{counters:?}");
}
