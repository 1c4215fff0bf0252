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

/// A whole tier, in the unit of [`SessionSpec::tenant_share`](crate::session::SessionSpec::tenant_share).
pub const TENANT_SHARE_WHOLE: u16 = 1000;

/// Namespaces of an engine that may have a [`SessionSpec::tenant_share`](crate::session::SessionSpec::tenant_share) at a time.
pub const TENANTS_MAX: u8 = 15;
