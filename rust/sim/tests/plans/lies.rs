//! A device that is fast, then answers nothing, then is slow, and finally fast again.

use super::disk::{Device, Random};
use super::{Compute, DEPTH, GroupKind, Life, Sums};

/// Blocks of each prompt.
const BLOCKS: u32 = 16;
/// Prompts of a life.
const PROMPTS: usize = 48;

fn live(seed: u64, sums: &mut Sums) -> Result<(), String> {
    let mut random = Random::new(seed);
    let compute = Compute::any(&mut random);
    let most_decodes = [0, 0, 4, 32][(random.next() % 4) as usize];
    let even = compute.even_bytes_per_s();
    let [fast, slow] = [even * random.log(4.0, 60.0), even * random.log(0.02, 1.0)];
    let kind = GroupKind::Full;
    let device = Device::steady(fast);
    let mut life = Life::with(compute, most_decodes, device, kind, random);
    life.prefetches = 0.5;
    let prompts = life.store(&[BLOCKS; PROMPTS]);
    let unit = compute.ns(0, BLOCKS * super::BLOCK, 0);
    let mut end_ns = life.now_ns;
    let ends_ns = [12.0, life.random.log(0.3, 30.0), 12.0].map(|units| {
        end_ns += (units * unit) as u64;
        end_ns
    });
    life.device = Device::lying(&mut life.random, ends_ns, [fast, slow]);
    for (at, hashes) in prompts.iter().enumerate() {
        let before = life.now_ns;
        life.ask(hashes, sums).map_err(|error| {
            format!("prompt {at}, asked at {before}, ends {ends_ns:?}: {error}")
        })?;
        if life.random.chance(0.3) {
            let until_ns = life.now_ns + (life.random.log(0.01, 3.0) * unit) as u64;
            life.run_until(until_ns);
        }
    }
    assert!(life.reads.len() <= DEPTH, "reads in flight");
    Ok(())
}

#[test]
fn a_request_on_a_disk_that_hangs_and_returns_slow_takes_a_quarter_more_than_computing_at_most() {
    let mut sums = Sums::default();
    for seed in super::seeds(300) {
        if let Err(error) = live(seed, &mut sums) {
            panic!("seed {seed}: {error}");
        }
    }
    println!("{sums:?}");
}
