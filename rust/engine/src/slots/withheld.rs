//! Pages that no size class gets. The region is smaller while they are withheld. Excluded units never come back.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::work;

use super::{Class, ClassState, NO_PAGE, Run, Slots, WITHHELD};

impl Slots {
    /// Excludes ranges in bytes from use, before any slot is taken: a unit with such a byte gets no page.
    pub(crate) fn exclude(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            let first = (range.start / self.unit_bytes) as usize;
            let end = range.end.div_ceil(self.unit_bytes) as usize;
            let end = end.min(self.page_at.len());
            for unit in self.page_at.get_mut(first..end).unwrap_or_default() {
                self.excluded_units += u64::from(*unit == NO_PAGE);
                *unit = WITHHELD;
            }
        }
        self.free_units
            .rebuild(|unit| self.page_at[unit as usize] == NO_PAGE);
    }

    /// Bytes of the pages that are withheld.
    pub(crate) fn withheld_bytes(&self) -> u64 {
        self.unit_bytes * self.withheld_units
    }

    /// The order of the largest free page that has at most `bytes`, or the smallest size.
    pub(crate) fn free_order(&self, bytes: u64) -> Option<u32> {
        let units = (bytes / self.unit_bytes).max(1);
        let most = (self.page_bytes / self.unit_bytes).min(units).ilog2();
        (0..=most).rev().find(|&order| self.free_units.has(order))
    }

    /// The order of the smallest pages in use.
    pub(crate) fn least_order(&self) -> u32 {
        let used = self.classes.iter().filter(|class| class.used > 0);
        used.map(|class| class.order).min().unwrap_or(0)
    }

    /// Whether pages of a class are withheld.
    pub(crate) fn withholds(&self, class: Class) -> bool {
        self.classes[usize::from(class)].withholds
    }

    /// The class whose pages, of `1 << order` units, are withheld.
    pub(crate) fn withholding(&mut self, order: u32) -> Class {
        let is_it = |class: &ClassState| class.withholds && class.order == order;
        let found = self.classes.iter().position(is_it);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassState {
                slot_bytes: self.unit_bytes << order,
                order,
                partial: BTreeSet::new(),
                used: 0,
                withholds: true,
            });
            self.classes.len() - 1
        });
        Class::try_from(index).expect("there are few sizes of pages")
    }

    /// Withholds a page, if one of this class is free.
    pub(crate) fn withhold(&mut self, class: Class) -> Option<Run> {
        if self.kept_for() == Some(class) {
            self.open_run();
        }
        let units = self.units(class);
        let unit = self.free_units.take(units.ilog2())?;
        work::slots(units as usize);
        self.page_at[unit as usize..(unit + units) as usize].fill(WITHHELD);
        self.withheld_units += u64::from(units);
        Some(Run { unit, units })
    }

    /// Frees a withheld page for slots again.
    pub(crate) fn put_back(&mut self, run: Run) {
        work::slots(run.units as usize);
        let units = &mut self.page_at[run.unit as usize..(run.unit + run.units) as usize];
        assert!(
            units.iter().all(|&unit| unit == WITHHELD),
            "{run:?} is withheld"
        );
        units.fill(NO_PAGE);
        self.withheld_units -= u64::from(run.units);
        self.free_units.put(run.unit, run.units.ilog2());
    }

    /// Whether a part of a run is withheld or excluded: it cannot be emptied for another class.
    pub(crate) fn has_withheld(&self, run: Run) -> bool {
        let mut units = run.unit..run.unit + run.units;
        self.withheld_units + self.excluded_units > 0
            && units.any(|unit| self.page_at[unit as usize] == WITHHELD)
    }

    /// The offset of a run in bytes, and the number of its bytes.
    pub(crate) fn run_range(&self, run: Run) -> (u64, u64) {
        (u64::from(run.unit) * self.unit_bytes, self.run_bytes(run))
    }
}
