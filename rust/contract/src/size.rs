//! Sizes in messages, in the units in which people write them.

use std::fmt;

const UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

/// Bytes, shown with at most four significant digits and rounded down, so that an operator can use a shown limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((unit, scale)) = UNITS.iter().find(|(_, scale)| self.0 >= *scale) else {
            return write!(f, "{} B", self.0);
        };
        let whole = self.0 / scale;
        let decimals: u32 = match whole {
            0..10 => 3,
            10..100 => 2,
            100..1000 => 1,
            _ => 0,
        };
        let part = u128::from(self.0 % scale) * 10_u128.pow(decimals) / u128::from(*scale);
        if part == 0 {
            return write!(f, "{whole} {unit}");
        }
        let digits = format!("{part:0width$}", width = decimals as usize);
        write!(f, "{whole}.{} {unit}", digits.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn sizes_are_shown_as_people_write_them_and_never_larger_than_they_are() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(8 << 20), "8 MiB");
        assert_eq!(shown((1 << 30) + (1 << 29)), "1.5 GiB");
        assert_eq!(shown((1 << 30) + (1 << 20)), "1 GiB");
        assert_eq!(shown((10 << 30) - 1), "9.999 GiB");
        assert_eq!(shown((1 << 40) - 1), "1023 GiB");
        assert_eq!(shown(u64::MAX), "16777215 TiB");
    }
}
