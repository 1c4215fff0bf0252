//! Shares of the tiers that namespaces keep, and the bytes that each namespace has.
//!
//! A namespace with a share is a tenant. While its payloads in a region take no more than its share of the region, a
//! payload of another namespace takes none of them. Payloads beyond the share are evicted as any others, so a share is
//! no limit.

use undercroft_contract::tier::{TENANT_SHARE_WHOLE, TENANTS_MAX};

use crate::forest::NsId;
use crate::policy::{TENANTS, Tenant, Tenants};

/// A namespace's share of each region, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TenantShare {
    pub(crate) ns: NsId,
    pub(crate) share: u16,
}

/// A namespace's share of the tiers, and its bytes there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceUsage {
    /// Its share of each tier, in thousandths; 0 if it has none.
    pub tenant_share: u16,
    /// Bytes of its slots in the arena.
    pub host_bytes: u64,
    /// Bytes of its slots on disk.
    pub disk_bytes: u64,
}

/// Namespaces with shares, and the bytes of each namespace.
///
/// Invariants: the shares add up to no more than [`TENANT_SHARE_WHOLE`]; a namespace has one tenant's number at most.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// The namespaces of the tenants 1, 2, and so on.
    shares: Vec<Option<TenantShare>>,
    /// By [`NsId`].
    of: Vec<Holdings>,
}

/// The bytes of a namespace.
#[derive(Clone, Debug, Default)]
struct Holdings {
    tenant: Tenant,
    /// Slot bytes by region.
    bytes: Vec<u64>,
}

impl Shares {
    /// The tenant that a namespace is.
    pub(super) fn of(&self, ns: NsId) -> Tenant {
        self.of.get(usize::from(ns)).map_or(0, |of| of.tenant)
    }

    /// Whether any namespace has had a share: else no candidate can be in another tenant's set.
    pub(super) fn has_any(&self) -> bool {
        !self.shares.is_empty()
    }

    /// A namespace's share in thousandths; 0 if it has none.
    pub(super) fn share(&self, ns: NsId) -> u16 {
        let mut shares = self.shares.iter().flatten();
        shares
            .find(|share| share.ns == ns)
            .map_or(0, |found| found.share)
    }

    /// Slot bytes of a namespace's payloads in a region.
    pub(super) fn bytes(&self, ns: NsId, region: usize) -> u64 {
        let of = self.of.get(usize::from(ns));
        let bytes = of.and_then(|of| of.bytes.get(region));
        bytes.copied().unwrap_or(0)
    }

    /// Counts a slot that a namespace has got in a region.
    pub(super) fn slot_taken(&mut self, ns: NsId, region: usize, bytes: u64) {
        let ns = usize::from(ns);
        if self.of.len() <= ns {
            self.of.resize(ns + 1, Holdings::default());
        }
        let of = &mut self.of[ns].bytes;
        if of.len() <= region {
            of.resize(region + 1, 0);
        }
        of[region] += bytes;
    }

    /// Ends the count of a slot that a namespace has given up.
    pub(super) fn slot_freed(&mut self, ns: NsId, region: usize, bytes: u64) {
        let held = &mut self.of[usize::from(ns)].bytes[region];
        let left = held.checked_sub(bytes);
        *held = left.expect("a namespace's bytes count each of its slots");
    }

    /// The tenants that have no more than their shares of a region of `capacity` bytes.
    pub(super) fn kept(&self, region: usize, capacity: u64) -> Tenants {
        let mut kept = Tenants::default();
        for (tenant, share) in (1..).zip(&self.shares) {
            let Some(TenantShare { ns, share }) = *share else {
                continue;
            };
            // No overflow: a region has less than 2^54 bytes.
            let most = capacity * u64::from(share) / u64::from(TENANT_SHARE_WHOLE);
            if self.bytes(ns, region) <= most {
                kept = kept.with(tenant);
            }
        }
        kept
    }

    /// Gives namespaces with sessions the shares that these want, 0 included, as far as all of them fit. A namespace
    /// without a session keeps its share as far as there is room for it. `with_candidates`: tenants that have candidates.
    pub(super) fn settle(&mut self, wanted: &[TenantShare], with_candidates: Tenants) {
        let asked = |ns: NsId| wanted.iter().find(|of| of.ns == ns);
        let idle = self.shares.iter().flatten();
        let idle: Vec<TenantShare> = idle
            .filter(|share| asked(share.ns).is_none())
            .copied()
            .collect();
        let mut left = TENANT_SHARE_WHOLE;
        let mut given = Vec::new();
        for &TenantShare { ns, share } in wanted.iter().chain(&idle) {
            let share = share.min(left);
            if share > 0 && given.len() < usize::from(TENANTS_MAX) {
                left -= share;
                given.push(TenantShare { ns, share });
            }
        }
        for of in &mut self.shares {
            let ns = of.map(|share| share.ns);
            *of = given
                .iter()
                .position(|share| Some(share.ns) == ns)
                .map(|at| given.swap_remove(at));
        }
        for share in given {
            let numbered = (1..TENANTS).zip(&self.shares);
            let mut vacant = numbered.filter(|(_, share)| share.is_none());
            // A number whose last tenant has candidates would keep these for the next one.
            match vacant.find(|&(tenant, _)| !with_candidates.has(tenant)) {
                Some((tenant, _)) => self.shares[usize::from(tenant) - 1] = Some(share),
                // Beyond, the namespace gets its share when the next session comes.
                None if self.shares.len() + 1 < usize::from(TENANTS) => {
                    self.shares.push(Some(share))
                }
                None => {}
            }
        }
        self.number();
    }

    /// A namespace has lost its last block, and its index goes to another.
    pub(super) fn forget(&mut self, ns: NsId) {
        for of in &mut self.shares {
            *of = of.filter(|share| share.ns != ns);
        }
        self.number();
    }

    fn number(&mut self) {
        self.of.iter_mut().for_each(|of| of.tenant = 0);
        for (tenant, share) in (1..).zip(&self.shares) {
            let Some(share) = share else { continue };
            let ns = usize::from(share.ns);
            if self.of.len() <= ns {
                self.of.resize(ns + 1, Holdings::default());
            }
            self.of[ns].tenant = tenant;
        }
    }
}
