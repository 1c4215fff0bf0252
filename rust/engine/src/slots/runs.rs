//! Runs of pages that are emptied for a page of another size class.

use crate::work;

use super::{Class, NO_PAGE, Owner, Slots, WITHHELD};

/// An aligned run of units that becomes one page for a class, once nothing in the run is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(super) unit: u32,
    pub(super) units: u32,
}

impl Run {
    pub(super) fn holds(self, unit: u32) -> bool {
        (self.unit..self.unit + self.units).contains(&unit)
    }

    /// First unit of the run.
    pub(crate) fn first_unit(self) -> u32 {
        self.unit
    }
}

/// A run that is being emptied, or is empty, for one size class. Other classes get no slots of the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClosedRun {
    pub(super) run: Run,
    pub(super) class: Class,
    /// Number of the run's pages in use.
    pub(super) pages: usize,
}

impl Slots {
    /// The run around `offset` that has to be emptied for a page of `class`.
    pub(crate) fn run_at(&self, offset: u64, class: Class) -> Run {
        let mut units = self.units(class);
        let unit = self.unit_of(offset);
        if let Some(number) = self.page_at(unit) {
            units = units.max(self.units(self.page(number).class));
        }
        let unit = unit / units * units;
        Run { unit, units }
    }

    /// The run with this index, if the region is cut into runs as large as pages of `class`; or a larger run around it.
    /// Behind the last run, the count begins again with the first.
    pub(crate) fn run_number(&self, index: u64, class: Class) -> Run {
        let run_bytes = self.unit_bytes * u64::from(self.units(class));
        let runs = self.extent() / run_bytes;
        self.run_at(index % runs * run_bytes, class)
    }

    /// Bytes of a run.
    pub(crate) fn run_bytes(&self, run: Run) -> u64 {
        u64::from(run.units) * self.unit_bytes
    }

    /// The page of a run that holds `unit`, or else the next page: its class, its owners, and the unit behind the page.
    /// `None` if the rest of the run is free.
    pub(crate) fn owners_from(&self, run: Run, unit: u32) -> Option<(Class, Vec<Owner>, u32)> {
        let page = (unit..run.unit + run.units).find_map(|unit| {
            work::slots(1);
            Some(self.page(self.page_at(unit)?))
        })?;
        let cells = self.cells_in(page);
        work::slots(cells.len());
        let owners = cells.filter_map(|cell| self.cells.owner(cell)).collect();
        Some((page.class, owners, page.unit + self.units(page.class)))
    }

    /// Whether `offset` lies in a run.
    pub(crate) fn is_in(&self, run: Run, offset: u64) -> bool {
        run.holds(self.unit_of(offset))
    }

    /// Keeps the free units of a run, and units that become free, for a page of `class`. Ends with
    /// [`Slots::open_run`], or when a slot of the class is allocated there. One run at a time.
    pub(crate) fn close_run(&mut self, run: Run, class: Class) {
        assert!(self.closed.is_none(), "one run is closed at a time");
        let pages = self.pages_of(run);
        for &number in &pages {
            self.leave_partial(number);
        }
        // A wholly free run is part of a larger free run.
        assert!(!pages.is_empty(), "a run without pages is closed");
        self.free_units.withhold(run.unit, run.units);
        let pages = pages.len();
        self.closed = Some(ClosedRun { run, class, pages });
    }

    /// The class for which a run is closed.
    pub(crate) fn closed_for(&self) -> Option<Class> {
        self.closed.map(|closed| closed.class)
    }

    /// The class for which an empty run is kept.
    pub(crate) fn kept_for(&self) -> Option<Class> {
        let empty = self.closed.filter(|closed| closed.pages == 0);
        empty.map(|closed| closed.class)
    }

    /// Opens the closed run: every class may take its free units.
    pub(crate) fn open_run(&mut self) {
        let Some(ClosedRun { run, .. }) = self.closed.take() else {
            return;
        };
        for number in self.pages_of(run) {
            self.enter_partial(number);
        }
        for unit in run.unit..run.unit + run.units {
            if self.page_at[unit as usize] == NO_PAGE {
                self.free_units.put(unit, 0);
            }
        }
    }

    /// Whether a unit belongs to the closed run.
    pub(super) fn is_closed(&self, unit: u32) -> bool {
        self.closed.is_some_and(|closed| closed.run.holds(unit))
    }

    /// Numbers of the pages in use of a run.
    pub(super) fn pages_of(&self, run: Run) -> Vec<u32> {
        let units = run.unit as usize..(run.unit + run.units) as usize;
        work::slots(units.len());
        let mut pages: Vec<u32> = self.page_at[units].to_vec();
        pages.dedup();
        pages.retain(|&number| number < WITHHELD);
        pages
    }
}
