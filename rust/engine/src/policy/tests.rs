use proptest::prelude::*;

use super::*;

/// A call on the set of leaves. Nodes and ticks come from small ranges, so that they meet.
#[derive(Clone, Copy, Debug)]
enum Call {
    Insert { set: usize, node: u32, last: u64 },
    Remove { set: usize, node: u32 },
    Evict { set: usize },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let set = 0..3_usize;
    let call = prop_oneof![
        4 => (set.clone(), 0..40_u32, 0..200_u64)
            .prop_map(|(set, node, last)| Call::Insert { set, node, last }),
        2 => (set.clone(), 0..40_u32).prop_map(|(set, node)| Call::Remove { set, node }),
        1 => set.prop_map(|set| Call::Evict { set }),
    ];
    prop::collection::vec(call, 1..300)
}

/// Runs `calls` on a policy and on a plain list of leaves, which is handed to `check` with each victim.
fn run(
    kind: PolicyKind,
    calls: &[Call],
    mut check: impl FnMut(&[(usize, Leaf)], usize, Option<Leaf>),
) {
    let mut policy = Policy::new(kind, 40);
    let mut model: Vec<(usize, Leaf)> = Vec::new();
    for &call in calls {
        match call {
            Call::Insert { set, node, last } => {
                let leaf = Leaf {
                    node,
                    last,
                    hit_class: (last % 4) as u8,
                };
                if !model
                    .iter()
                    .any(|(of, known)| *of == set && known.node == node)
                {
                    policy.insert_leaf(set, leaf);
                    model.push((set, leaf));
                }
            }
            Call::Remove { set, node } => {
                let at = model
                    .iter()
                    .position(|(of, known)| *of == set && known.node == node);
                let absent = Leaf {
                    node,
                    last: 0,
                    hit_class: 0,
                };
                let leaf = at.map_or(absent, |at| model.swap_remove(at).1);
                assert_eq!(policy.remove_leaf(set, leaf), at.is_some());
            }
            Call::Evict { set } => {
                let victim = policy.victim(set, 200);
                check(&model, set, victim);
                if let Some(leaf) = victim {
                    assert!(policy.remove_leaf(set, leaf));
                    model.retain(|known| *known != (set, leaf));
                }
            }
        }
        for set in 0..3 {
            let expected = model.iter().filter(|(of, _)| *of == set).count();
            assert_eq!(policy.leaves(set), expected);
        }
    }
}

proptest! {
    #[test]
    fn lru_evicts_the_oldest_leaf(calls in calls()) {
        run(PolicyKind::Lru, &calls, |model, set, victim| {
            let of_class = model.iter().filter(|(of, _)| *of == set).map(|(_, leaf)| *leaf);
            assert_eq!(victim, of_class.min_by_key(|leaf| (leaf.last, leaf.node)));
        });
    }

    #[test]
    fn leafhd_evicts_a_present_leaf(calls in calls()) {
        run(PolicyKind::LeafHd, &calls, |model, set, victim| {
            let of_class: Vec<_> = model.iter().filter(|(of, _)| *of == set).collect();
            match victim {
                Some(leaf) => assert!(model.contains(&(set, leaf))),
                None => assert!(of_class.is_empty()),
            }
        });
    }
}

/// Blocks that come back after 10 ticks in set 1, and others that never do.
fn teach(policy: &mut Policy, ticks: u64) -> u64 {
    let mut live = [(0_u8, 0_u64); 10];
    for tick in 1..=ticks {
        let (hit_class, last) = &mut live[(tick % 10) as usize];
        if *last == 0 {
            *hit_class = policy.on_offer(tick, tick);
            policy.on_insert(tick, 1, *hit_class, tick);
        } else {
            let before = (*hit_class, *last);
            *hit_class = policy.on_hit(1, before.0, before.1, tick);
            policy.on_touch(1, before, (*hit_class, tick));
        }
        *last = tick;
        let dead = (tick << 32) | 1;
        assert_eq!(policy.on_offer(dead, tick), 0);
        policy.on_insert(dead, 1, 0, tick);
        policy.on_evict(dead, 1, 0, tick);
        policy.end_of_request(tick);
    }
    ticks
}

#[test]
fn leafhd_learns_which_blocks_come_back() {
    let mut policy = Policy::new(PolicyKind::LeafHd, 20);
    let tick = teach(&mut policy, 1000);
    let live = Leaf {
        node: 1,
        last: tick - 5,
        hit_class: 3,
    };
    let dead = Leaf {
        node: 2,
        last: tick,
        hit_class: 0,
    };
    policy.insert_leaf(0, live);
    policy.insert_leaf(0, dead);
    assert_eq!(policy.victim(0, tick), Some(dead));
    assert!(policy.admit(3, &dead, tick));
    assert!(!policy.admit(0, &live, tick));
}

#[test]
fn lru_admits_everything_and_remembers_nothing() {
    let mut policy = Policy::new(PolicyKind::Lru, 20);
    let tick = teach(&mut policy, 100);
    assert!(policy.admit(
        0,
        &Leaf {
            node: 1,
            last: tick,
            hit_class: 3
        },
        tick
    ));
    policy.on_evict(77 << 32, 1, 2, tick);
    assert_eq!(policy.on_offer(77 << 32, tick + 1), 0);
    assert!(!policy.learns());
}

#[test]
fn an_evicted_or_refused_block_comes_back_one_class_higher() {
    let mut policy = Policy::new(PolicyKind::LeafHd, 20);
    policy.on_insert(10 << 32, 1, 1, 5);
    policy.on_evict(10 << 32, 1, 1, 5);
    assert_eq!(policy.on_offer(10 << 32, 9), 2);
    assert_eq!(policy.on_offer(10 << 32, 9), 0);

    policy.on_refuse(11 << 32, 1, 0, 9);
    assert_eq!(
        policy.on_offer(11 << 32, 9),
        0,
        "offered again by the same request"
    );
    policy.on_refuse(11 << 32, 1, 0, 9);
    assert_eq!(policy.on_offer(11 << 32, 10), 1);
}

#[test]
fn a_block_is_seen_again_until_it_is_forgotten() {
    let mut doorkeeper = Doorkeeper::new(3);
    let again: Vec<bool> = [1, 2, 1, 3, 4, 5, 1, 2]
        .into_iter()
        .map(|block: u64| doorkeeper.again(block << 32))
        .collect();
    assert_eq!(
        again,
        [false, false, true, false, false, false, false, false]
    );
}

#[test]
fn the_oldest_leaf_goes_first_unless_another_one_is_clearly_worse() {
    let mut policy = Policy::new(PolicyKind::LeafHd, 2000);
    let tick = teach(&mut policy, 500);
    let leaf = |node, age, hit_class| Leaf {
        node,
        last: tick - age,
        hit_class,
    };
    let first = |one: Leaf, other: Leaf| {
        let candidates = [((), one), ((), other)];
        policy.first(candidates.into_iter(), tick).unwrap().1
    };
    // Blocks of class 3 come back after 10 ticks, so that in 8 or 9 ticks there is one hit.
    let (older, younger) = (leaf(1, 2, 3), leaf(2, 1, 3));
    assert_eq!(first(older, younger), older);
    assert_eq!(first(younger, older), older);
    let soon = leaf(3, 6, 3);
    assert_eq!(first(soon, younger), younger);
    // Hardly any block of class 0 comes back.
    let dead = leaf(4, 0, 0);
    assert_eq!(first(soon, dead), dead);
}

#[test]
fn sampled_depths_stand_for_every_depth_once() {
    let depths: Vec<u32> = sampled_depths(100).collect();
    let dense = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40];
    assert_eq!(depths[..dense.len()], dense);
    let mut before = 0;
    for depth in 1..=5000 {
        let weight = sample::weight(depth);
        if sampled_depths(5000).any(|sampled| sampled == depth) {
            assert_eq!(weight, depth - before, "{depth}");
            before = depth;
        } else {
            assert_eq!(weight, 0, "{depth}");
        }
    }
    assert_eq!(sampled_depths(u32::MAX).last(), Some(7 << 29));
}

#[test]
fn blocks_between_the_sampled_depths_teach_nothing() {
    let keeps_younger = |depth| {
        let mut policy = Policy::new(PolicyKind::LeafHd, 20);
        // Blocks come back 20 ticks after their last use, and never sooner.
        for tick in 1..=400_u64 {
            let block = (tick % 20) << 32;
            let hit_class = policy.on_offer(block, tick);
            policy.on_insert(block, depth, hit_class, tick);
            policy.on_evict(block, depth, hit_class, tick);
            policy.end_of_request(tick);
        }
        let young = Leaf {
            node: 0,
            last: 398,
            hit_class: 3,
        };
        let old = Leaf { last: 383, ..young };
        policy.first([((), old), ((), young)].into_iter(), 400) == Some(((), old))
    };
    assert!(!keeps_younger(8), "the older block is about to come back");
    assert!(keeps_younger(9));
}

#[test]
fn age_buckets_tile_the_ages() {
    for bucket in 0..density::BUCKETS {
        let start = density::bucket_start(bucket);
        assert_eq!(density::bucket(start), bucket);
        assert!(bucket == 0 || density::bucket(start - 1) == bucket - 1);
    }
    assert_eq!(density::bucket_start(density::BUCKETS - 1), 7168);
    assert_eq!(density::bucket(u64::MAX), density::BUCKETS - 1);
}

/// Blocks of set and last touch; the second number picks one to be touched again or dropped.
fn touches() -> impl Strategy<Value = Vec<(u64, usize, bool)>> {
    prop::collection::vec((0..4000_u64, 0..64_usize, any::<bool>()), 1..60)
}

proptest! {
    #[test]
    fn cohorts_count_every_block_at_its_age(touches in touches()) {
        let mut cohorts = cohorts::Cohorts::new();
        let mut model: Vec<(u8, u64)> = Vec::new();
        let mut now = 0;
        for (later, pick, gone) in touches {
            now += later;
            if let Some(&(set, last)) = model.get(pick) {
                cohorts.remove(set, last, 2);
                model.swap_remove(pick);
            }
            if !gone {
                let set = (pick % 4) as u8;
                cohorts.add(set, now, 2);
                model.push((set, now));
            }
            cohorts.advance(now);
            for (from, to) in [(0, Some(1)), (1, Some(3000)), (3000, Some(7168)), (7168, None)] {
                let mut expected = [0; 4];
                for (set, last) in &model {
                    let age = now - last;
                    if age >= from && to.is_none_or(|to| age < to) {
                        expected[usize::from(*set)] += 2;
                    }
                }
                prop_assert_eq!(cohorts.blocks_aged(from, to), expected);
            }
        }
    }

    #[test]
    fn the_ghost_list_is_a_bounded_map(calls in prop::collection::vec((any::<bool>(), 0..60_u64), 1..400)) {
        let mut ghosts = ghost::GhostList::new(20);
        let mut model: Vec<Option<(u64, ghost::Remembered)>> = Vec::new();
        for (now, (push, block)) in ((1_u64 << 33) + 1000..).zip(calls) {
            // Few distinct homes, so that runs of the table collide and wrap.
            let fingerprint = (0xffff_fff0 + block / 4 * 0x0400_0000 + block % 4) << 32;
            let known = model.iter_mut().rev().take(20).find(|entry| entry.is_some_and(|(of, _)| of == fingerprint));
            let known = known.and_then(Option::take).map(|(_, remembered)| remembered);
            prop_assert_eq!(ghosts.take(fingerprint, now), known);
            if push {
                let remembered = ghost::Remembered { last: now - block, hit_class: (block % 4) as u8, weight: [0, 1, 2, 1 << 28][block as usize % 4] };
                let dropped = model.len().checked_sub(20).and_then(|oldest| model[oldest].take());
                prop_assert_eq!(ghosts.push(fingerprint, remembered, now), dropped.map(|(_, remembered)| remembered));
                model.push(Some((fingerprint, remembered)));
            }
        }
    }
}
