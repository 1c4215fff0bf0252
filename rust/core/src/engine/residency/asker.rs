//! For which size class pages are searched and emptied, and for how long: a class that no longer needs a page must not
//! delay other classes.

use crate::slots::Class;

use super::geometry::Region;
use super::state::Residency;

/// A search, or an empty run, is kept for a class that does not ask any more until other classes have asked this often.
const OTHERS_MAX: u64 = 16;
/// For a class that was refused, and will ask again, the limit is a sixteenth of the slots in use, at most this number.
const OTHERS_OF_REFUSED_MAX: u64 = 4096;

/// The size class that a search, or an emptied run, is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    class: Class,
    /// The class was refused and has got no slot since: the search goes on by itself. Otherwise the class has room for
    /// now, and may never need more.
    pub(super) waits: bool,
    /// How often other classes have asked since the class asked last.
    others: u64,
}

impl Asker {
    pub(super) fn new(class: Class) -> Self {
        Self {
            class,
            waits: false,
            others: 0,
        }
    }
}

impl Residency {
    /// Notes whether a class that asked for room was refused, and will ask again, or got room.
    pub(super) fn note_refusal(&mut self, region: Region, class: Class, is_refused: bool) {
        let asker = self.search_mut(region).asker.as_mut();
        if let Some(asker) = asker.filter(|asker| asker.class == class) {
            asker.waits = is_refused;
        }
    }

    /// Whether the search under way, or an empty run, belongs to another class than `class`. The other class loses the
    /// search or the run if it has not asked for long, or has a slot while `class` has none.
    pub(super) fn is_others(&mut self, region: Region, class: Class, has_nothing: bool) -> bool {
        let is_kept = self.slots(region).kept_for().is_some();
        let of_refused = self.slots(region).blocks() / OTHERS_MAX;
        let search = self.search_mut(region);
        let is_taken = is_kept || search.is_under_way();
        let Some(asker) = search.asker.as_mut().filter(|_| is_taken) else {
            return false;
        };
        if asker.class == class {
            asker.others = 0;
            return false;
        }
        asker.others += 1;
        let most = match asker.waits {
            true => of_refused.clamp(OTHERS_MAX, OTHERS_OF_REFUSED_MAX),
            false => OTHERS_MAX,
        };
        let gives_way = asker.others > most || has_nothing && (is_kept || !asker.waits);
        if gives_way {
            (search.pass, search.emptying) = (None, None);
            self.slots_mut(region).open_run();
        }
        !gives_way
    }
}
