//! Regions whose size an operator has set: pages are withheld from all size classes, and returned to the system.
//!
//! Free pages are withheld first. Then pages of little worth are emptied, as if for another size class (`page_moves`).
//! Where no page can be emptied, leaves are evicted, down to half of the size at most: a payload with too many nodes
//! below keeps its page.

use crate::forest::DeviceIndex;
use crate::metrics::Counters;
use crate::policy::{Leaf, Tenants};
use crate::slots::{Class, Run};

use super::progress::Resizing;
use super::state::{Region, Residency};

/// Most pages that one entry withholds or puts back, and most leaves that it evicts.
const STEPS: usize = 4;
/// Pause before the next attempt if nothing could be withheld, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
/// Bytes of the arena that are returned to the system at once.
const PIECE_BYTES: u64 = 8 << 20;
/// The smallest size of a region, in pages of the largest size.
const PAGES_MIN: u64 = 4;

/// The size of a tier, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TierSize {
    /// Bytes that slots may use now.
    pub capacity_bytes: u64,
    /// Bytes that slots may use when the resize has ended.
    pub target_bytes: u64,
    /// The largest size, which is the size at the start.
    pub maximum_bytes: u64,
    /// Bytes that no slot uses, and that were not returned to the system.
    pub kept_bytes: u64,
    /// Capacity and target differ, or memory or space is being returned to the system.
    pub resizing: bool,
}

impl Residency {
    /// The smallest and the largest size that a region can have, and the bytes of its largest pages.
    pub(crate) fn sizes(&self, region: Region) -> (u64, u64, u64) {
        let slots = self.slots(region);
        let (most, page) = (slots.usable(), slots.page_bytes());
        (most.min(PAGES_MIN * page), most, page)
    }

    /// Sets the size of a region.
    pub(crate) fn set_target(&mut self, region: Region, target: u64) {
        let count = self.page_moves.len();
        self.resizing.resize_with(count, Resizing::default);
        let resizing = self.resizing_mut(region);
        resizing.target = Some(target);
        resizing.next_ns = 0;
        // The cause may be gone.
        resizing.waiting.extend(resizing.kept.drain(..));
        resizing.kept_bytes = 0;
    }

    /// The arena, then the directories.
    pub(super) fn regions(&self) -> impl Iterator<Item = Region> + use<> {
        std::iter::once(Region::Host).chain(self.devices().map(Region::Disk))
    }

    fn resizing_mut(&mut self, region: Region) -> &mut Resizing {
        &mut self.resizing[region.index()]
    }

    /// Bytes of a region that are to be withheld. A directory that was opened after the order has pages now.
    fn wanted(&self, region: Region) -> u64 {
        let most = self.slots(region).usable();
        most.saturating_sub(self.target(region))
    }

    fn target(&self, region: Region) -> u64 {
        let of = self.resizing.get(region.index());
        let most = self.slots(region).usable();
        of.and_then(|of| of.target)
            .map_or(most, |target| target.min(most))
    }

    /// Whether a resize has work that may be done now.
    pub(crate) fn has_resizing(&self, now_ns: u64) -> bool {
        !self.resizing.is_empty()
            && self.regions().any(|region| {
                let of = &self.resizing[region.index()];
                self.is_off_target(region) && now_ns >= of.next_ns
                    || region == Region::Host && of.is_releasing()
            })
    }

    /// Whether a region is to continue with a resize, now or later.
    pub(crate) fn waits_to_resize(&self) -> bool {
        !self.resizing.is_empty() && self.regions().any(|region| self.is_off_target(region))
    }

    fn is_off_target(&self, region: Region) -> bool {
        let (wanted, has) = (self.wanted(region), self.slots(region).withheld_bytes());
        wanted > has || self.spare_run(region).is_some()
    }

    /// Continues to resize the regions whose size was set. Each region may look at `visits` nodes.
    pub(crate) fn continue_resizing(&mut self, now_ns: u64, visits: u32, counters: &mut Counters) {
        if !self.has_resizing(now_ns) {
            return;
        }
        self.allow_page_moves(visits);
        for region in self.regions() {
            if now_ns < self.resizing[region.index()].next_ns {
                continue;
            }
            if self.wanted(region) > self.slots(region).withheld_bytes() {
                self.shrink(region, now_ns, counters);
            } else {
                self.grow(region);
            }
        }
    }

    fn shrink(&mut self, region: Region, now_ns: u64, counters: &mut Counters) {
        for _ in 0..STEPS {
            let withheld = self.slots(region).withheld_bytes();
            let missing = self.wanted(region).saturating_sub(withheld);
            if missing == 0 {
                break;
            }
            let free = self.slots(region).free_order(missing);
            // Runs of the smallest pages in use are single pages, of whatever class.
            let order = free.unwrap_or_else(|| self.slots(region).least_order());
            let class = self.slots_mut(region).withholding(order);
            if free.is_none() && !self.take_run(region, class, None, Tenants::default(), counters) {
                self.note_refusal(region, class, true);
                let is_emptying = self.is_emptying(region);
                if !is_emptying && !self.evict_coldest(region, counters) {
                    self.resizing_mut(region).next_ns = now_ns + PAUSE_NS;
                }
                return;
            }
            let Some(run) = self.slots_mut(region).withhold(class) else {
                return;
            };
            self.resizing_mut(region).waiting.push_back(run);
        }
    }

    /// Evicts some leaves of all classes, the least recently used first. False if there is none, or if enough are
    /// evicted.
    fn evict_coldest(&mut self, region: Region, counters: &mut Counters) -> bool {
        for done in 0..STEPS {
            let used = self.slots(region).used_bytes();
            if used <= self.target(region) / 2 {
                return done > 0;
            }
            let classes = self.slots(region).classes();
            let classes: Vec<Class> = classes
                .filter(|&class| self.slots(region).used(class) > 0)
                .collect();
            let victims = classes
                .into_iter()
                // An operator's order makes each tier's shares smaller, too.
                .filter_map(|class| self.victim(region, class, Tenants::default()));
            let Some(Leaf { node, .. }) = victims.min_by_key(|leaf| leaf.last) else {
                return done > 0;
            };
            self.evict(node, region.tier(), counters);
        }
        true
    }

    fn grow(&mut self, region: Region) {
        self.end_withholding(region);
        for _ in 0..STEPS {
            let Some(run) = self.spare_run(region) else {
                return;
            };
            let bytes = self.slots(region).run_bytes(run);
            let of = self.resizing_mut(region);
            if of.waiting.back() == Some(&run) {
                of.waiting.pop_back();
            } else if of.kept.last() == Some(&run) {
                of.kept.pop();
                of.kept_bytes -= bytes;
            } else {
                of.released.pop();
            }
            self.slots_mut(region).put_back(run);
            // Classes that were refused may try again.
            self.freed[region.tier() as usize] += 1;
        }
    }

    /// A withheld page that the region may have again. Pages that were not returned to the system come first.
    fn spare_run(&self, region: Region) -> Option<Run> {
        let (slots, of) = (self.slots(region), &self.resizing[region.index()]);
        let spare = slots.withheld_bytes().checked_sub(self.wanted(region))?;
        let last = [of.waiting.back(), of.kept.last(), of.released.last()];
        let mut last = last.into_iter().flatten().copied();
        last.find(|&run| slots.run_bytes(run) <= spare)
    }

    /// The next page of a directory whose space is to be returned to the filesystem: its offset and its bytes.
    pub(crate) fn next_release(&mut self, device: DeviceIndex) -> Option<(u64, u64)> {
        let region = Region::Disk(device);
        let of = self.resizing.get_mut(region.index())?;
        if of.releasing.is_some() {
            return None;
        }
        let run = of.waiting.pop_front()?;
        of.releasing = Some((run, 0));
        Some(self.slots(region).run_range(run))
    }

    /// Whether [`Residency::next_release`] has a page for a directory.
    pub(crate) fn has_releases(&self) -> bool {
        let mut of_disks = self.resizing.iter().skip(1);
        of_disks.any(|of| of.releasing.is_none() && !of.waiting.is_empty())
    }

    /// Ends the return of a page's space (`ok`), or notes that the filesystem cannot take the space.
    pub(crate) fn release_ended(&mut self, device: DeviceIndex, ok: bool) {
        self.settle_release(Region::Disk(device), ok);
    }

    /// The next part of the arena that is to be returned to the system: its offset and its bytes.
    pub(crate) fn next_arena_release(&mut self) -> Option<(u64, u64)> {
        let of = self.resizing.first_mut()?;
        if of.releasing.is_none() {
            of.releasing = of.waiting.pop_front().map(|run| (run, 0));
        }
        let (run, done) = of.releasing?;
        let (offset, bytes) = self.slots(Region::Host).run_range(run);
        Some((offset + done, PIECE_BYTES.min(bytes - done)))
    }

    /// Ends the return of that part, which has succeeded if `ok`.
    pub(crate) fn arena_release_ended(&mut self, ok: bool) {
        let Some((run, done)) = self.resizing[0].releasing else {
            return;
        };
        let done = done + PIECE_BYTES;
        if ok && done < self.slots(Region::Host).run_bytes(run) {
            self.resizing[0].releasing = Some((run, done));
        } else {
            self.settle_release(Region::Host, ok);
        }
    }

    fn settle_release(&mut self, region: Region, ok: bool) {
        let Some((run, _)) = self.resizing_mut(region).releasing.take() else {
            return;
        };
        let bytes = self.slots(region).run_bytes(run);
        let of = self.resizing_mut(region);
        if ok {
            of.released.push(run);
        } else {
            of.kept.push(run);
            of.kept_bytes += bytes;
        }
    }

    /// Keeps the pages of a directory that takes no operations any more.
    pub(crate) fn refuse_releases(&mut self, device: DeviceIndex) {
        let region = Region::Disk(device);
        while let Some(run) = self
            .resizing
            .get_mut(region.index())
            .and_then(|of| of.waiting.pop_front())
        {
            let bytes = self.slots(region).run_bytes(run);
            let of = self.resizing_mut(region);
            of.kept.push(run);
            of.kept_bytes += bytes;
        }
    }

    /// The size of a region. Costs a pass over the pages that wait to be returned to the system.
    pub(crate) fn size_of(&self, region: Region) -> TierSize {
        let slots = self.slots(region);
        let (capacity, maximum) = (slots.capacity(), slots.usable());
        let Some(of) = self.resizing.get(region.index()) else {
            return TierSize {
                capacity_bytes: capacity,
                target_bytes: maximum,
                maximum_bytes: maximum,
                ..TierSize::default()
            };
        };
        let releasing = of.releasing.iter().map(|(run, _)| run);
        let left = of.waiting.iter().chain(releasing);
        let left: u64 = left.map(|&run| slots.run_bytes(run)).sum();
        TierSize {
            capacity_bytes: capacity,
            target_bytes: self.target(region),
            maximum_bytes: maximum,
            kept_bytes: of.kept_bytes + left,
            resizing: self.is_off_target(region) || of.is_releasing(),
        }
    }

    /// Bytes that were returned to the system.
    pub(crate) fn released_bytes(&self, region: Region) -> u64 {
        let of = self.resizing.get(region.index());
        let runs = of.into_iter().flat_map(|of| &of.released);
        runs.map(|&run| self.slots(region).run_bytes(run)).sum()
    }

    /// Whether the withheld runs are exactly the runs of the resize.
    #[cfg(feature = "check")]
    pub(super) fn check_resizing(&self, region: Region) -> Result<(), String> {
        let Some(of) = self.resizing.get(region.index()) else {
            return Ok(());
        };
        let slots = self.slots(region);
        let releasing = of.releasing.iter().map(|(run, _)| run);
        let all = of.waiting.iter().chain(&of.kept).chain(&of.released);
        let bytes: u64 = all.chain(releasing).map(|&run| slots.run_bytes(run)).sum();
        super::super::ensure::ensure!(
            bytes == slots.withheld_bytes(),
            "{region:?}: {} bytes are withheld, {bytes} of known pages",
            slots.withheld_bytes()
        );
        Ok(())
    }
}
