//! The free runs of units of a region: a buddy system. The size of a run is a power of two, to which it is aligned.

use std::collections::BTreeSet;

/// The free runs.
///
/// Invariant: the two halves of a run are never both in the lists of free runs: the whole run would be there.
#[derive(Debug)]
pub(crate) struct Buddy {
    units: u32,
    /// First units of the free runs of `1 << order` units, by order.
    free: Vec<BTreeSet<u32>>,
}

impl Buddy {
    /// A region of `units` free units; the largest runs have `1 << largest` units.
    pub(crate) fn new(units: u32, largest: u32) -> Self {
        assert!(
            units.is_multiple_of(1 << largest),
            "{units} units are whole runs of {}",
            1 << largest
        );
        let mut free = vec![BTreeSet::new(); largest as usize + 1];
        free[largest as usize] = (0..units).step_by(1 << largest).collect();
        Self { units, free }
    }

    /// Whether a run of `1 << order` units can be taken.
    pub(crate) fn has(&self, order: u32) -> bool {
        self.free[order as usize..]
            .iter()
            .any(|runs| !runs.is_empty())
    }

    /// Takes a run of `1 << order` units from the smallest run that is large enough. Returns its first unit.
    pub(crate) fn take(&mut self, order: u32) -> Option<u32> {
        let order = order as usize;
        let found = (order..self.free.len()).find(|&order| !self.free[order].is_empty())?;
        let unit = self.free[found].pop_first()?;
        for half in order..found {
            self.free[half].insert(unit + (1 << half));
        }
        Some(unit)
    }

    /// Frees a run of `1 << order` units.
    pub(crate) fn put(&mut self, mut unit: u32, order: u32) {
        let mut order = order as usize;
        while order + 1 < self.free.len() && self.free[order].remove(&(unit ^ (1 << order))) {
            unit &= !(1 << order);
            order += 1;
        }
        let is_new = self.free[order].insert(unit);
        assert!(is_new, "the run at unit {unit} is freed twice");
    }

    /// Takes all free units of an aligned run that is not wholly free.
    pub(crate) fn withhold(&mut self, unit: u32, units: u32) {
        for runs in &mut self.free {
            while let Some(&free) = runs.range(unit..unit + units).next() {
                runs.remove(&free);
            }
        }
    }

    /// Makes the lists again from the units that are free now.
    pub(crate) fn rebuild(&mut self, is_free: impl Fn(u32) -> bool) {
        self.free.iter_mut().for_each(BTreeSet::clear);
        let largest = self.free.len() as u32 - 1;
        for unit in (0..self.units).step_by(1 << largest) {
            self.rebuild_run(unit, largest, &is_free);
        }
    }

    fn rebuild_run(&mut self, unit: u32, order: u32, is_free: &impl Fn(u32) -> bool) {
        if (unit..unit + (1 << order)).all(is_free) {
            self.free[order as usize].insert(unit);
        } else if order > 0 {
            self.rebuild_run(unit, order - 1, is_free);
            self.rebuild_run(unit + (1 << (order - 1)), order - 1, is_free);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn returned_units_merge_into_whole_runs() {
        let mut buddy = Buddy::new(16, 3);
        let taken: Vec<u32> = std::iter::from_fn(|| buddy.take(0)).collect();
        assert_eq!(taken.len(), 16);
        taken.into_iter().rev().for_each(|unit| buddy.put(unit, 0));
        assert_eq!(
            (buddy.take(3), buddy.take(3), buddy.take(0)),
            (Some(0), Some(8), None)
        );
    }

    proptest! {
        #[test]
        fn runs_in_use_never_overlap(calls in prop::collection::vec((0u32..4, any::<bool>(), 0usize..64), 1..300)) {
            let mut buddy = Buddy::new(64, 3);
            let mut live: Vec<(u32, u32)> = Vec::new();
            for (order, takes, pick) in calls {
                if takes || live.is_empty() {
                    let is_there = buddy.has(order);
                    let taken = buddy.take(order);
                    prop_assert_eq!(taken.is_some(), is_there);
                    live.extend(taken.map(|unit| (unit, order)));
                } else {
                    let (unit, order) = live.swap_remove(pick % live.len());
                    buddy.put(unit, order);
                }
                let mut used = [false; 64];
                for &(unit, order) in &live {
                    prop_assert!(unit.is_multiple_of(1 << order));
                    for unit in unit..unit + (1 << order) {
                        prop_assert!(!std::mem::replace(&mut used[unit as usize], true));
                    }
                }
                let mut rebuilt = Buddy::new(64, 3);
                rebuilt.rebuild(|unit| !used[unit as usize]);
                prop_assert_eq!(&rebuilt.free, &buddy.free);
            }
        }
    }
}
