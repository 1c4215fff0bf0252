//! The tiers of one host.

/// The two tiers that hold payloads, as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The arena.
    Host = 0,
    /// The data files.
    Disk = 1,
}

impl Tier {
    /// Both tiers.
    pub const ALL: [Self; 2] = [Self::Host, Self::Disk];
}
