//! Hit density, learned online for each hit class and age bucket.

use super::HIT_CLASSES;
use super::cohorts::Cohorts;
use super::leaf::class_index;

/// Age buckets: one for each age below 4, then four for each octave. The last bucket has no upper end.
pub(super) const BUCKETS: usize = 48;
const CLASSES: usize = HIT_CLASSES as usize;

/// The share of earlier observations that a relearning keeps after the usual time.
const KEEP: f64 = 0.965;
/// Weight of the prior in a hazard estimate, in block-ticks.
const PRIOR: f64 = 0.1;

type ClassTable = [[f64; BUCKETS]; CLASSES];

/// The bucket of an age in ticks.
pub(super) fn bucket(age: u64) -> usize {
    let Some(octave) = age.checked_ilog2().filter(|&octave| octave >= 2) else {
        return usize::from(age as u8);
    };
    let quarter = (age >> (octave - 2)) & 3;
    (4 * (octave as usize - 1) + quarter as usize).min(BUCKETS - 1)
}

/// The youngest age in a bucket.
pub(super) fn bucket_start(bucket: usize) -> u64 {
    if bucket < 4 {
        bucket as u64
    } else {
        (4 + bucket as u64 % 4) << (bucket / 4 - 1)
    }
}

/// Width of a bucket in ticks; the last bucket counts as wide as its neighbour.
fn width(bucket: usize) -> f64 {
    if bucket < 4 {
        1.0
    } else {
        (1_u64 << (bucket / 4 - 1)) as f64
    }
}

/// Hits, exposure and the density that follows from them.
#[derive(Debug)]
pub(super) struct Density {
    hits: ClassTable,
    /// Block-ticks that blocks spent in each class and bucket, remembered blocks included.
    exposure: ClassTable,
    density: ClassTable,
}

impl Density {
    pub(super) fn new() -> Self {
        let mut by_age = [0.0; BUCKETS];
        for (age, density) in by_age.iter_mut().enumerate() {
            *density = 1.0 / (age as f64 + 1.0);
        }
        Self {
            hits: [[0.0; BUCKETS]; CLASSES],
            exposure: [[0.0; BUCKETS]; CLASSES],
            density: [by_age; CLASSES],
        }
    }

    /// Expected hits per tick of residence of a block of `hit_class` and `age`.
    pub(super) fn of(&self, hit_class: u8, age: u64) -> f64 {
        self.density[class_index(hit_class)][bucket(age)]
    }

    /// Notes that `weight` blocks of `hit_class` were hit at `age`.
    pub(super) fn observe_hit(&mut self, hit_class: u8, age: u64, weight: u32) {
        self.hits[class_index(hit_class)][bucket(age)] += f64::from(weight);
    }

    /// Takes in the exposure of the last `elapsed` ticks, which are `times` the usual number, and estimates anew.
    pub(super) fn relearn(&mut self, cohorts: &Cohorts, elapsed: u64, times: f64) {
        let kept = KEEP.powf(times);
        for bucket in 0..BUCKETS {
            let end = (bucket + 1 < BUCKETS).then(|| bucket_start(bucket + 1));
            let blocks = cohorts.blocks_aged(bucket_start(bucket), end);
            for (exposure, blocks) in self.exposure.iter_mut().zip(blocks) {
                exposure[bucket] += (elapsed * blocks) as f64;
            }
        }
        for class in 0..CLASSES {
            let hazard = hazards(&self.hits[class], &self.exposure[class]);
            self.density[class] = densities(&hazard);
            self.hits[class].iter_mut().for_each(|hits| *hits *= kept);
            self.exposure[class]
                .iter_mut()
                .for_each(|exposure| *exposure *= kept);
        }
    }
}

/// Hits per block and tick in each bucket. A bucket without observations gets half of the younger bucket's value.
fn hazards(hits: &[f64; BUCKETS], exposure: &[f64; BUCKETS]) -> [f64; BUCKETS] {
    let mut hazards = [0.0; BUCKETS];
    let mut younger = 0.0;
    for ((hazard, hits), exposure) in hazards.iter_mut().zip(hits).zip(exposure) {
        *hazard = if hits + exposure > 0.0 {
            (hits + PRIOR * younger) / (exposure + PRIOR)
        } else {
            younger / 2.0
        };
        younger = *hazard;
    }
    hazards
}

/// Best hits per tick over all ways to hold a block of each age "until hit, or until the end of some
/// later bucket": the Gittins index of the hazard.
fn densities(hazard: &[f64; BUCKETS]) -> [f64; BUCKETS] {
    let mut survival = [0.0; BUCKETS];
    let mut residence = [0.0; BUCKETS];
    for bucket in 0..BUCKETS {
        let expected = hazard[bucket] * width(bucket);
        survival[bucket] = (-expected.min(50.0)).exp();
        residence[bucket] = if expected < 0.001 {
            width(bucket)
        } else {
            width(bucket) * (1.0 - survival[bucket]) / expected
        };
    }
    let mut densities = [0.0; BUCKETS];
    for (age, best) in densities.iter_mut().enumerate() {
        let (mut alive, mut hits, mut ticks) = (1.0, 0.0, 0.0);
        for later in age..BUCKETS {
            hits += alive * (1.0 - survival[later]);
            ticks += alive * residence[later];
            alive *= survival[later];
            if hits > *best * ticks {
                *best = hits / ticks;
            }
        }
    }
    densities
}
