//! Sizes of the pages of a region (the arena, or a data file), and of the data file of a capacity. The engine cuts a
//! region into these pages, and whoever opens a directory makes its files for them.

use crate::io::IO_ALIGN;

/// Slot sizes are multiples of this, in bytes (O_DIRECT alignment).
pub const SLOT_ALIGN: u64 = IO_ALIGN;

/// The largest page of a region: no payload is larger.
pub const PAGE_BYTES_MAX: u64 = 64 << 20;
const PAGE_BYTES_MIN: u64 = 256 << 10;
/// A region has at least about this many pages of the largest size, so that every size class finds room.
const PAGES_TARGET: u64 = 64;
/// The smallest page, as a part of the largest.
const UNITS_PER_PAGE: u64 = 64;

/// Smallest `disk_capacity`, in bytes.
pub const CAPACITY_MIN: u64 = 16 << 20;

/// Largest data file, in bytes: slots are counted in 32 bits, in units of [`SLOT_ALIGN`], and ext4's largest file is
/// 4 KiB smaller than that limit. A larger capacity is used only up to this size.
pub const CAPACITY_MAX: u64 = (SLOT_ALIGN << 32) - PAGE_BYTES_MAX;

/// One part in this many of a capacity is for records and namespaces: enough for a record of every
/// slot of the least size, so that `disk_capacity` holds for all files together.
const META_SHARE: u64 = 30;

/// Bytes of the largest pages of a region of `capacity` bytes: a power of two.
pub fn page_bytes_for(capacity: u64) -> u64 {
    let share = (capacity / PAGES_TARGET).max(1);
    (1 << share.ilog2()).clamp(PAGE_BYTES_MIN, PAGE_BYTES_MAX)
}

/// Bytes of the smallest pages, where the largest have `page_bytes`.
pub fn unit_bytes_for(page_bytes: u64) -> u64 {
    (page_bytes / UNITS_PER_PAGE).max(SLOT_ALIGN)
}

/// A region whose pages hold payloads of `payload_bytes`; `None` if no page is large enough.
pub fn region_for(payload_bytes: u64) -> Option<u64> {
    let page_bytes = payload_bytes.next_power_of_two().max(PAGE_BYTES_MIN);
    (page_bytes <= PAGE_BYTES_MAX).then_some(page_bytes * PAGES_TARGET)
}

/// Size of the data file of a capacity, before it is cut to whole pages.
pub fn data_of(capacity: u64) -> u64 {
    (capacity - capacity / META_SHARE).min(CAPACITY_MAX)
}

/// The smallest capacity whose data file has `data_bytes`.
pub fn capacity_for(data_bytes: u64) -> u64 {
    let near = data_bytes + data_bytes / (META_SHARE - 1);
    (near.saturating_sub(2)..=near + 2)
        .find(|&capacity| data_of(capacity) >= data_bytes)
        .unwrap_or(near + 2)
}

/// A capacity, rounded up, whose pages hold payloads of `payload_bytes`; `None` if no page is large enough.
pub fn capacity_for_payload(payload_bytes: u64) -> Option<u64> {
    let data_bytes = region_for(payload_bytes)?;
    Some(capacity_for(data_bytes).next_multiple_of(data_bytes / 16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::Bytes;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_capacity_is_the_smallest_one_with_its_data_file() {
        for capacity in [CAPACITY_MIN, GIB, 7 * GIB + 4096, 3_000_000_017] {
            let data = data_of(capacity);
            let found = capacity_for(data);
            assert!(found <= capacity && data_of(found) >= data, "{capacity}");
            assert!(data_of(found - 1) < data, "{capacity}");
        }
    }

    #[test]
    fn a_capacity_that_is_advised_has_pages_for_the_payload() {
        for payload in [5000, 2 << 20, 40 << 20, PAGE_BYTES_MAX] {
            let capacity = capacity_for_payload(payload).unwrap().max(CAPACITY_MIN);
            let page_bytes = page_bytes_for(data_of(capacity));
            assert!(page_bytes >= payload, "{payload}");
            // The message shows the whole number.
            let shown = Bytes(capacity).to_string();
            let (number, unit) = shown.split_once(' ').unwrap();
            let unit = if unit == "GiB" { GIB } else { 1 << 20 };
            assert_eq!(
                number.parse::<f64>().unwrap() * unit as f64,
                capacity as f64
            );
        }
        assert_eq!(capacity_for_payload(PAGE_BYTES_MAX + 1), None);
    }
}
