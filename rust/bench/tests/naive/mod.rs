//! The policies once more, written from their description alone: maps, scans and no cleverness.

mod model;

use std::collections::{BTreeMap, HashMap, HashSet};

pub(crate) use model::ModelCache;

/// Hits and stored blocks of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) hits: u64,
    pub(crate) inserted: u64,
}

/// The least recently used block that no resident block hangs on goes.
pub(crate) fn lru<'a>(requests: impl Iterator<Item = &'a [u64]>, capacity: usize) -> Outcome {
    let mut resident: HashMap<u64, (u64, Option<u64>)> = HashMap::new();
    let mut arrival: HashMap<u64, u64> = HashMap::new();
    let mut outcome = Outcome {
        hits: 0,
        inserted: 0,
    };
    for (tick, blocks) in requests.enumerate() {
        outcome.hits += blocks
            .iter()
            .take_while(|block| resident.contains_key(block))
            .count() as u64;
        for (index, &block) in blocks.iter().enumerate() {
            let parent = index.checked_sub(1).map(|above| blocks[above]);
            let next = arrival.len() as u64;
            arrival.entry(block).or_insert(next);
            if let Some((last, _)) = resident.get_mut(&block) {
                *last = tick as u64;
                continue;
            }
            if parent.is_some_and(|parent| !resident.contains_key(&parent)) {
                break;
            }
            if resident.len() >= capacity {
                let parents: HashSet<u64> = resident
                    .values()
                    .filter_map(|(_, parent)| *parent)
                    .collect();
                let oldest = resident
                    .iter()
                    .filter(|(block, _)| !parents.contains(block) && !blocks.contains(block))
                    .min_by_key(|(block, (last, _))| (*last, arrival[block]))
                    .map(|(&block, _)| block);
                let Some(oldest) = oldest else {
                    break;
                };
                resident.remove(&oldest);
            }
            resident.insert(block, (tick as u64, parent));
            outcome.inserted += 1;
        }
    }
    outcome
}

struct Block {
    last: u64,
    class: usize,
    depth: usize,
    parent: Option<u64>,
    children: u32,
}

/// Learned hit density with admission. A hit touches its last block and some of those above, which stand for the others
/// in the learned densities; a victim is the oldest leaf, or that of a class that is clearly worse.
pub(crate) fn leafhd<'a>(requests: impl Iterator<Item = &'a [u64]>, capacity: usize) -> Outcome {
    let mut resident: HashMap<u64, Block> = HashMap::new();
    let mut leaves: Vec<u64> = Vec::new();
    let mut arrival: HashMap<u64, usize> = HashMap::new();
    // Remembered blocks by order of entry, and where each stands in it.
    let mut ghosts: BTreeMap<u64, (u64, u64, usize, usize)> = BTreeMap::new();
    let mut entry_of: HashMap<u64, u64> = HashMap::new();
    let mut entries = 0;
    let mut hits = [[0.0; 48]; 4];
    let mut exposure = [[0.0; 48]; 4];
    let mut density = [std::array::from_fn::<f64, 48, _>(|age| 1.0 / (age as f64 + 1.0)); 4];
    let mut relearned = 1;
    let mut outcome = Outcome {
        hits: 0,
        inserted: 0,
    };
    for (tick, blocks) in (1_u64..).zip(requests) {
        let found = blocks
            .iter()
            .take_while(|block| resident.contains_key(block))
            .count();
        outcome.hits += found as u64;
        let mut refused = false;
        let mut remember = |block,
                            last,
                            class,
                            depth,
                            entry_of: &mut HashMap<_, _>,
                            ghosts: &mut BTreeMap<_, _>| {
            entries += 1;
            entry_of.insert(block, entries);
            ghosts.insert(entries, (block, last, class, depth));
        };
        for (index, &block) in blocks.iter().enumerate() {
            let next = arrival.len();
            arrival.entry(block).or_insert(next);
            let depth = index + 1;
            if let Some(known) = resident.get_mut(&block) {
                if depth == found || stands_for(depth) > 0.0 {
                    hits[known.class][bucket(tick - known.last)] += stands_for(depth);
                    known.class = 3.min(known.class + 1);
                    known.last = tick;
                }
                continue;
            }
            let mut class = 0;
            if let Some((_, last, before, _)) =
                entry_of.remove(&block).and_then(|at| ghosts.remove(&at))
            {
                hits[before][bucket(tick - last)] += stands_for(depth);
                class = 3.min(before + 1);
            }
            if !refused && resident.len() >= capacity {
                let mut oldest: [Option<(u64, usize, u64)>; 4] = [None; 4];
                for leaf in leaves.iter().filter(|leaf| !blocks.contains(leaf)) {
                    let known = &resident[leaf];
                    let age = Some((known.last, arrival[leaf], *leaf));
                    let of_class = &mut oldest[known.class];
                    *of_class = (*of_class).or(age).min(age);
                }
                let worth = |class: usize, last| density[class][bucket(tick - last)];
                let candidates = oldest.iter().enumerate().filter_map(|(class, leaf)| {
                    leaf.map(|(last, arrival, leaf)| (last, arrival, leaf, worth(class, last)))
                });
                let order = |one: &f64, other: &f64| one.partial_cmp(other).unwrap();
                let worst = candidates
                    .clone()
                    .min_by(|one, other| order(&one.3, &other.3));
                let first = candidates.min_by_key(|&(last, arrival, ..)| (last, arrival));
                // The oldest one, unless another one is clearly worse.
                let victim = worst.filter(|worst| worst.3 < 0.8 * first.unwrap().3);
                let victim = victim.or(first);
                match victim.filter(|victim| density[class][0] >= 0.8 * victim.3) {
                    None => refused = true,
                    Some((_, _, victim, _)) => {
                        let gone = resident.remove(&victim).unwrap();
                        let (last, class, depth) = (gone.last, gone.class, gone.depth);
                        remember(victim, last, class, depth, &mut entry_of, &mut ghosts);
                        leaves.retain(|&leaf| leaf != victim);
                        if let Some(parent) = gone.parent {
                            let above = resident.get_mut(&parent).unwrap();
                            above.children -= 1;
                            above.last = above.last.max(gone.last);
                            above.class = above.class.max(gone.class);
                            if above.children == 0 {
                                leaves.push(parent);
                            }
                        }
                    }
                }
            }
            if refused {
                remember(block, tick, class, depth, &mut entry_of, &mut ghosts);
                continue;
            }
            let parent = index.checked_sub(1).map(|above| blocks[above]);
            if let Some(parent) = parent {
                resident.get_mut(&parent).unwrap().children += 1;
                leaves.retain(|&leaf| leaf != parent);
            }
            leaves.push(block);
            resident.insert(
                block,
                Block {
                    last: tick,
                    class,
                    depth,
                    parent,
                    children: 0,
                },
            );
            outcome.inserted += 1;
        }
        while ghosts.len() > 3 * capacity + 1000 {
            let (_, (block, ..)) = ghosts.pop_first().unwrap();
            entry_of.remove(&block);
        }
        if tick - relearned >= 50.min(10.max((tick - 1) / 16)) {
            let elapsed = (tick - relearned) as f64;
            relearned = tick;
            for block in resident.values() {
                let blocks = stands_for(block.depth);
                exposure[block.class][bucket(tick - block.last)] += elapsed * blocks;
            }
            for &(_, last, class, depth) in ghosts.values() {
                exposure[class][bucket(tick - last)] += elapsed * stands_for(depth);
            }
            for class in 0..4 {
                density[class] = relearn(&hits[class], &exposure[class]);
                let kept = 0.965_f64.powf(elapsed / 50.0);
                hits[class].iter_mut().for_each(|count| *count *= kept);
                exposure[class].iter_mut().for_each(|ticks| *ticks *= kept);
            }
        }
    }
    outcome
}

/// Blocks for which a block at a depth stands: those since the sampled depth before.
fn stands_for(depth: usize) -> f64 {
    let sampled = |depth: usize| {
        let octave = 1 << depth.ilog2();
        depth <= 8 || (depth - octave).is_multiple_of(octave / 4)
    };
    if !sampled(depth) {
        return 0.0;
    }
    let before = (1..depth).rev().find(|&above| sampled(above));
    (depth - before.unwrap_or(0)) as f64
}

fn bucket(age: u64) -> usize {
    if age < 4 {
        return age as usize;
    }
    let octave = 63 - age.leading_zeros() as usize;
    47.min(4 * (octave - 1) + ((age >> (octave - 2)) & 3) as usize)
}

fn relearn(hits: &[f64; 48], exposure: &[f64; 48]) -> [f64; 48] {
    let width = |bucket: usize| {
        if bucket < 4 {
            1.0
        } else {
            2_f64.powi(bucket as i32 / 4 - 1)
        }
    };
    let mut hazard = [0.0; 48];
    for bucket in 0..48 {
        let before = if bucket == 0 { 0.0 } else { hazard[bucket - 1] };
        hazard[bucket] = if hits[bucket] + exposure[bucket] > 0.0 {
            (hits[bucket] + 0.1 * before) / (exposure[bucket] + 0.1)
        } else {
            before / 2.0
        };
    }
    std::array::from_fn(|age| {
        let (mut alive, mut gained, mut spent, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
        for (later, rate) in hazard.iter().enumerate().skip(age) {
            let expected = rate * width(later);
            let stays = (-expected.min(50.0)).exp();
            gained += alive * (1.0 - stays);
            spent += alive
                * width(later)
                * if expected < 0.001 {
                    1.0
                } else {
                    (1.0 - stays) / expected
                };
            alive *= stays;
            best = best.max(gained / spent);
        }
        best
    })
}
