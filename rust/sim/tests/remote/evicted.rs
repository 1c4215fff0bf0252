//! Objects that the store has evicted although a host remembers them.

use undercroft_contract::session::LookupRequest;
use undercroft_engine::work::Work;

use crate::rig::{BLOCK, Random, chain, config};
use crate::store::Objects;
use crate::{MODEL, host};

const SEGMENT: u64 = 4;
const SLOTS: u64 = 128;

/// A host writes a prompt of `segments` segments, whose place in the arena other blocks take. The store then evicts all
/// segments but the first `kept`, and the host computes the prompt once more.
fn is_written_again(segments: u32, kept: usize, seed: u64) {
    let hashes = chain(&[(1, segments * SEGMENT as u32)]);
    let (mut objects, mut random) = (Objects::default(), Random(seed));
    let mut config = config(SLOTS, SEGMENT);
    config.promotion_bytes = config.host_bytes;
    let (mut one, session) = host(config);
    one.save((session, "w"), &hashes, MODEL);
    one.run(3000, &mut objects, &mut random);
    let written: Vec<String> = objects.by_name.keys().cloned().collect();
    assert_eq!(written.len(), segments as usize);
    for other in 0..SLOTS {
        one.save((session, "o"), &chain(&[(100 + other, 1)]), MODEL);
    }
    let ends = hashes[..kept * SEGMENT as usize].iter().map(crate::hex);
    let ends: Vec<String> = ends.collect();
    let is_kept = |name: &String| ends.iter().any(|end| name.contains(end));
    objects.by_name.retain(|name, _| is_kept(name));
    assert_eq!(objects.by_name.len(), kept);

    let (tokens, _) = one.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, kept as u32 * SEGMENT as u32 * BLOCK);
    let puts = objects.puts;
    one.save((session, "r"), &hashes, MODEL);
    one.run(3000, &mut objects, &mut random);
    let there: Vec<String> = objects.by_name.keys().cloned().collect();
    assert_eq!(
        there, written,
        "{segments} segments, {kept} kept, seed {seed}"
    );
    assert_eq!(objects.puts - puts, segments as usize - kept);
    one.check();
}

#[test]
fn a_prompt_whose_objects_a_probe_does_not_find_is_written_again() {
    for segments in [3, 6, 12, 30] {
        for kept in [0, 1, 2, segments as usize / 2, segments as usize - 1] {
            for seed in 0..20 {
                is_written_again(segments, kept, seed);
            }
        }
    }
}

#[test]
fn the_answers_about_a_thousand_evicted_segments_are_bounded_work() {
    let hashes = chain(&[(1, 1024)]);
    let (mut objects, mut random) = (Objects::default(), Random(1));
    let mut config = config(1400, 1);
    config.promotion_bytes = config.host_bytes;
    let (mut one, session) = host(config);
    one.save((session, "w"), &hashes, MODEL);
    one.run(3000, &mut objects, &mut random);
    assert_eq!(objects.by_name.len(), 1024);
    for other in 0..1400 {
        one.save((session, "o"), &chain(&[(100 + other, 1)]), MODEL);
    }
    one.run(3000, &mut objects, &mut random);
    objects.by_name.clear();
    let question = LookupRequest::new("r", &hashes);
    assert!(one.look(session, &question).is_pending());
    one.most_work = Work::default();
    one.run(300, &mut objects, &mut random);
    assert!(one.most_work.units() <= 2_000, "{:?}", one.most_work);
    assert!(one.most_work.index > 512, "{:?}", one.most_work);
    one.check();
}
