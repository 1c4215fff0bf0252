use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const OWNER: Owner = Owner { node: 7, group: 0 };

#[test]
fn a_page_returns_to_the_pool_when_its_last_slot_is_freed() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    let small = slots.class_for(4096).unwrap();
    let large = slots.class_for(200 << 10).unwrap();
    let taken: Vec<u64> = (0..4).map(|_| slots.alloc(large, OWNER).unwrap()).collect();
    assert_eq!(slots.alloc(small, OWNER), None);
    slots.free(large, taken[2]);
    assert_eq!(slots.alloc(small, OWNER), Some(taken[2]));
}

#[test]
fn a_payload_larger_than_a_page_has_no_class() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    assert!(slots.class_for(256 << 10).is_some());
    assert_eq!(slots.class_for((256 << 10) + 1), None);
}

#[test]
fn claims_rebuild_the_same_state() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    let class = slots.class_for(8192).unwrap();
    slots.reserve_cells(40);
    let second = slots.place(class, 8192).unwrap();
    assert!(slots.rivals(second).is_empty());
    assert_eq!(slots.claim(second, 5, OWNER), 5);
    assert_eq!(slots.rivals(second).as_slice(), [(OWNER, 5)]);
    assert_eq!(slots.place(class, 4096), None);
    assert_eq!(slots.place(class, 1 << 20), None);
    let other = slots.class_for(4096).unwrap();
    let first_of_other = slots.place(other, 0).unwrap();
    assert_eq!(slots.rivals(first_of_other).as_slice(), [(OWNER, 5)]);
    slots.finish_claims();
    let mut seen: Vec<u64> = Vec::new();
    while let Some(offset) = slots.alloc(class, OWNER) {
        seen.push(offset);
    }
    assert_eq!(seen.len(), 4 * 32 - 1);
    assert!(!seen.contains(&8192));
}

#[test]
fn a_record_names_a_slot_only_where_one_begins_and_ends() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    // A page has five slots, and 16 KiB that no slot fits.
    let class = slots.class_for(48 << 10).unwrap();
    for at in 0..(1u64 << 20) / SLOT_ALIGN {
        let offset = at * SLOT_ALIGN;
        let within = offset % (256 << 10);
        let is_slot = within.is_multiple_of(48 << 10) && within < 5 * (48 << 10);
        assert_eq!(slots.place(class, offset).is_some(), is_slot, "{offset}");
    }
}

#[test]
fn a_claim_that_is_taken_back_leaves_its_page_to_other_classes() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    let (small, large) = (
        slots.class_for(8192).unwrap(),
        slots.class_for(200 << 10).unwrap(),
    );
    for (offset, record) in [(8192, 1), (16384, 2)] {
        slots.claim(slots.place(small, offset).unwrap(), record, OWNER);
    }
    slots.unclaim(small, 8192);
    slots.unclaim(small, 16384);
    let first = slots.place(large, 0).unwrap();
    assert!(slots.rivals(first).is_empty());
    slots.claim(first, 1, OWNER);
    slots.finish_claims();
    assert_eq!((slots.used(small), slots.used(large)), (0, 1));
    let taken = (0..4).map_while(|_| slots.alloc(large, OWNER)).count();
    assert_eq!(taken, 3);
}

#[test]
fn a_page_whose_records_belong_to_others_gets_new_ones() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    let class = slots.class_for(8192).unwrap();
    slots.reserve_cells(64);
    assert!(slots.take_cell_at(3, OWNER));
    assert!(!slots.take_cell_at(3, OWNER));
    let moved = slots.claim(slots.place(class, 8192).unwrap(), 4, OWNER);
    assert_ne!(moved, 4);
    // The claimed slot is the page's second slot.
    let first = slots.place(class, 0).unwrap();
    assert_eq!(slots.claim(first, 3, OWNER), moved - 1);
    assert_eq!(slots.owner_of_cell(3), Some(OWNER));
    slots.put_cell(3);
    assert_eq!(slots.owner_of_cell(3), None);
    assert_eq!(slots.take_cell(OWNER), 0);
}

#[test]
fn the_next_slot_comes_from_the_fullest_page() {
    let mut slots = Slots::new(1 << 20, 256 << 10);
    let class = slots.class_for(32 << 10).unwrap();
    let page_of = |offset: u64| offset / (256 << 10);
    let taken: Vec<u64> = std::iter::from_fn(|| slots.alloc(class, OWNER)).collect();
    assert_eq!(taken.len(), 4 * 8);
    // Each page keeps another number of slots.
    let free = |slots: &mut Slots, page: u64, count: usize| {
        let of_page = taken.iter().filter(|&&offset| page_of(offset) == page);
        of_page
            .take(count)
            .for_each(|&offset| slots.free(class, offset));
    };
    for (page, count) in [(0, 5), (1, 2), (2, 6), (3, 3)] {
        free(&mut slots, page, count);
    }
    let pages: Vec<u64> = std::iter::from_fn(|| slots.alloc(class, OWNER))
        .map(page_of)
        .collect();
    let expected = [(1, 2), (3, 3), (0, 5), (2, 6)];
    let expected = expected.map(|(page, count)| [page].repeat(count)).concat();
    assert_eq!(pages, expected);
}

proptest! {
    #[test]
    fn slots_in_use_never_overlap(ops in prop::collection::vec((0usize..3, any::<bool>(), 0usize..64), 1..400)) {
        let sizes = [4096u64, 12 << 10, 100 << 10];
        let mut slots = Slots::new(2 << 20, 256 << 10);
        let classes = sizes.map(|size| slots.class_for(size).unwrap());
        let mut live: Vec<(usize, u64)> = Vec::new();
        for (kind, allocate, pick) in ops {
            if allocate || live.is_empty() {
                if let Some(offset) = slots.alloc(classes[kind], OWNER) {
                    live.push((kind, offset));
                }
            } else {
                let (kind, offset) = live.swap_remove(pick % live.len());
                slots.free(classes[kind], offset);
            }
            let mut extents: Vec<(u64, u64)> =
                live.iter().map(|&(k, o)| (o, o + slots.slot_bytes(classes[k]))).collect();
            extents.sort_unstable();
            prop_assert!(extents.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(extents.last().is_none_or(|last| last.1 <= slots.capacity()));
            let bytes: u64 = extents.iter().map(|(from, to)| to - from).sum();
            prop_assert_eq!(bytes, slots.used_bytes());
            let mut by_class: HashMap<usize, u64> = HashMap::new();
            live.iter().for_each(|(k, _)| *by_class.entry(*k).or_default() += 1);
            for (k, class) in classes.iter().enumerate() {
                prop_assert_eq!(slots.used(*class), by_class.get(&k).copied().unwrap_or(0));
            }
        }
    }
}

#[test]
fn a_run_with_a_withheld_or_excluded_unit_is_known() {
    let mut slots = Slots::new(4 << 20, 1 << 20);
    let class = slots.class_for(1 << 20).unwrap();
    let run = slots.run_at(0, class);
    assert!(!slots.has_withheld(run));
    let withheld = slots.withholding(0);
    let taken = slots.withhold(withheld).unwrap();
    let around = slots.run_at(slots.run_range(taken).0, class);
    assert!(slots.has_withheld(around));
    slots.put_back(taken);
    assert!(!slots.has_withheld(around));
    let byte = (2 << 20) + 5000..(2 << 20) + 5001;
    slots.exclude(std::slice::from_ref(&byte));
    assert!(slots.has_withheld(slots.run_at(2 << 20, class)));
    assert_eq!(slots.capacity(), (4 << 20) - (16 << 10), "one unit");
}

#[test]
fn no_slot_lies_in_an_excluded_range_and_no_record_claims_one_there() {
    let mut slots = Slots::new(4 << 20, 1 << 20);
    slots.exclude(&[0..1 << 20, (3 << 20) - 4096..3 << 20]);
    let class = slots.class_for(64 << 10).unwrap();
    for offset in [0, 64 << 10, (3 << 20) - (64 << 10)] {
        assert_eq!(slots.place(class, offset), None, "{offset}");
    }
    assert!(slots.place(class, 1 << 20).is_some());
    let mut taken = 0;
    while let Some(offset) = slots.alloc(
        class,
        Owner {
            node: taken,
            group: 0,
        },
    ) {
        let end = offset + (64 << 10);
        assert!(offset >= 1 << 20 && !(end > (3 << 20) - 4096 && offset < 3 << 20));
        taken += 1;
    }
    assert!(taken >= 32, "{taken}");
}
