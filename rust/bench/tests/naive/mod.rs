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
    parent: Option<u64>,
    children: u32,
}

/// Learned hit density with admission; victims are drawn by a linear congruential generator.
pub(crate) fn leafhd<'a>(
    requests: impl Iterator<Item = &'a [u64]>,
    capacity: usize,
    seed: u64,
) -> Outcome {
    let mut resident: HashMap<u64, Block> = HashMap::new();
    let mut leaves: Vec<u64> = Vec::new();
    // Remembered blocks by order of entry, and where each stands in it.
    let mut ghosts: BTreeMap<u64, (u64, u64, usize)> = BTreeMap::new();
    let mut entry_of: HashMap<u64, u64> = HashMap::new();
    let mut entries = 0;
    let mut hits = [[0.0; 48]; 4];
    let mut exposure = [[0.0; 48]; 4];
    let mut density = [std::array::from_fn::<f64, 48, _>(|age| 1.0 / (age as f64 + 1.0)); 4];
    let (mut random, mut relearned) = (seed, 0);
    let mut outcome = Outcome {
        hits: 0,
        inserted: 0,
    };
    for (tick, blocks) in (1_u64..).zip(requests) {
        outcome.hits += blocks
            .iter()
            .take_while(|block| resident.contains_key(block))
            .count() as u64;
        let mut refused = false;
        let mut remember =
            |block, last, class, entry_of: &mut HashMap<u64, u64>, ghosts: &mut BTreeMap<_, _>| {
                entries += 1;
                entry_of.insert(block, entries);
                ghosts.insert(entries, (block, last, class));
            };
        for (index, &block) in blocks.iter().enumerate() {
            if let Some(known) = resident.get_mut(&block) {
                hits[known.class][bucket(tick - known.last)] += 1.0;
                known.class = 3.min(known.class + 1);
                known.last = tick;
                continue;
            }
            let mut class = 0;
            if let Some((_, last, before)) =
                entry_of.remove(&block).and_then(|at| ghosts.remove(&at))
            {
                hits[before][bucket(tick - last)] += 1.0;
                class = 3.min(before + 1);
            }
            if !refused && resident.len() >= capacity {
                let mut victim: Option<(f64, u64)> = None;
                for _ in 0..64 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let leaf = leaves[(random >> 33) as usize % leaves.len()];
                    if !blocks.contains(&leaf) {
                        let worth =
                            density[resident[&leaf].class][bucket(tick - resident[&leaf].last)];
                        if victim.is_none_or(|(lowest, _)| worth < lowest) {
                            victim = Some((worth, leaf));
                        }
                    }
                }
                match victim.filter(|(worth, _)| density[class][0] >= *worth) {
                    None => refused = true,
                    Some((_, victim)) => {
                        let gone = resident.remove(&victim).unwrap();
                        remember(victim, gone.last, gone.class, &mut entry_of, &mut ghosts);
                        leaves.retain(|&leaf| leaf != victim);
                        if let Some(parent) = gone.parent {
                            let above = resident.get_mut(&parent).unwrap();
                            above.children -= 1;
                            if above.children == 0 {
                                leaves.push(parent);
                            }
                        }
                    }
                }
            }
            if refused {
                remember(block, tick, class, &mut entry_of, &mut ghosts);
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
                    parent,
                    children: 0,
                },
            );
            outcome.inserted += 1;
        }
        while ghosts.len() > 8 * capacity + 1000 {
            let (_, (block, ..)) = ghosts.pop_first().unwrap();
            entry_of.remove(&block);
        }
        if tick - relearned >= 50 {
            let elapsed = (tick - relearned) as f64;
            relearned = tick;
            for block in resident.values() {
                exposure[block.class][bucket(tick - block.last)] += elapsed;
            }
            for &(_, last, class) in ghosts.values() {
                exposure[class][bucket(tick - last)] += elapsed;
            }
            for class in 0..4 {
                density[class] = relearn(&hits[class], &exposure[class]);
                hits[class].iter_mut().for_each(|count| *count *= 0.95);
                exposure[class].iter_mut().for_each(|ticks| *ticks *= 0.95);
            }
        }
    }
    outcome
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
