//! The candidates of a tier, by tenant, and their order.

use undercroft_contract::tier::TENANTS_MAX;

use crate::slots::Class;

use super::{Leaf, Policy, PolicyKind};

/// Whose candidate a node is: a namespace with a share of its own has a number above 0, all others have 0.
pub(crate) type Tenant = u8;

/// Numbers of tenants, 0 included. More than there are tenants at a time, since a number may be used again only when
/// all candidates of its last tenant are gone.
pub(crate) const TENANTS: Tenant = 64;
const _: () = assert!(TENANTS_MAX < TENANTS - 1);

/// Some tenants, such as those whose candidates stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tenants(u64);

impl Tenants {
    /// Every tenant but one.
    pub(crate) fn all_but(tenant: Tenant) -> Self {
        Self(!(1 << tenant))
    }

    /// These tenants, and one more.
    pub(crate) fn with(self, tenant: Tenant) -> Self {
        Self(self.0 | 1 << tenant)
    }

    /// These tenants without one of them.
    pub(crate) fn without(self, tenant: Tenant) -> Self {
        Self(self.0 & !(1 << tenant))
    }

    /// These tenants and others.
    pub(crate) fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    pub(crate) fn has(self, tenant: Tenant) -> bool {
        self.0 >> tenant & 1 == 1
    }
}

/// The candidates of a tier: leaves, which lose all payloads, and other nodes, which lose only optional payloads. Each
/// tenant has sets of its own, so that a search passes over a tenant's candidates at once.
#[derive(Debug)]
pub(crate) struct TierPolicies {
    /// Leaves, by the configured policy.
    pub(crate) leaves: Policy,
    /// Nodes with optional payloads that are no leaves. Always least recently used.
    optional: Policy,
    /// Tenants that may have candidates: those below this number.
    tenants: Tenant,
}

impl TierPolicies {
    pub(crate) fn new(leaves: Policy) -> Self {
        Self {
            leaves,
            optional: Policy::new(PolicyKind::Lru, 0),
            tenants: 1,
        }
    }

    fn policy(&mut self, is_leaf: bool) -> &mut Policy {
        match is_leaf {
            true => &mut self.leaves,
            false => &mut self.optional,
        }
    }

    /// Makes a node a candidate of a size class, for a tenant.
    pub(crate) fn insert(&mut self, is_leaf: bool, class: Class, tenant: Tenant, leaf: Leaf) {
        self.tenants = self.tenants.max(tenant + 1);
        self.policy(is_leaf).insert_leaf(set(class, tenant), leaf);
    }

    /// Removes a candidate. Its namespace may have become another tenant since it came, so `tenant`'s set is only the
    /// first to be searched. Returns whether it was a candidate.
    pub(crate) fn remove(
        &mut self,
        is_leaf: bool,
        class: Class,
        tenant: Tenant,
        leaf: Leaf,
    ) -> bool {
        let tenants = self.tenants;
        let policy = self.policy(is_leaf);
        policy.remove_leaf(set(class, tenant), leaf)
            || (0..tenants).any(|of| policy.remove_leaf(set(class, of), leaf))
    }

    /// The candidate of size class `class` to evict next, and its tenant: of the policy's leaf and the oldest node with
    /// optional payloads of each tenant that is not `kept`.
    pub(crate) fn victim(&self, class: Class, tick: u64, kept: Tenants) -> Option<(Tenant, Leaf)> {
        let tenants = (0..self.tenants).filter(|&tenant| !kept.has(tenant));
        let firsts = tenants.filter_map(|tenant| {
            let first = self.first(set(class, tenant), tick);
            first.map(|leaf| (tenant, leaf))
        });
        self.leaves.first(firsts, tick)
    }

    /// The candidate of a set to evict next.
    fn first(&self, set: usize, tick: u64) -> Option<Leaf> {
        let leaf = self.leaves.victim(set, tick);
        let optional = self.optional.victim(set, tick);
        match (leaf, optional) {
            (Some(leaf), Some(optional)) if leaf.last < optional.last => Some(leaf),
            (leaf, optional) => optional.or(leaf),
        }
    }

    /// The candidate of size class `class` to evict next where no namespace has a share.
    pub(crate) fn only_victim(&self, class: Class, tick: u64) -> Option<Leaf> {
        self.first(set(class, 0), tick)
    }

    /// From each set of the tenants that are not `kept`, up to `count` candidates of size class `class` that may be
    /// evicted soon.
    pub(crate) fn victims(&self, class: Class, count: usize, kept: Tenants) -> Vec<Leaf> {
        let mut victims = Vec::new();
        for tenant in (0..self.tenants).filter(|&tenant| !kept.has(tenant)) {
            victims.extend(self.leaves.victims(set(class, tenant), count));
            victims.extend(self.optional.victims(set(class, tenant), count));
        }
        victims
    }

    /// Whether the policy keeps every leaf rather than store a new block of `class`, one of `classes`. Leaves of other size
    /// classes count, since their pages may come to this class: else a class whose own leaves are all in use would not
    /// grow while another class holds blocks that nobody uses.
    pub(crate) fn refuses(
        &self,
        class: Class,
        mut classes: std::ops::Range<Class>,
        hit_class: u8,
        tick: u64,
        kept: Tenants,
    ) -> bool {
        if !self.leaves.learns() {
            return false;
        }
        let mut tenants = (0..self.tenants).filter(|&tenant| !kept.has(tenant));
        let has_optional =
            tenants.any(|tenant| self.optional.victim(set(class, tenant), tick).is_some());
        let keeps = |of| {
            let victim = self.victim(of, tick, kept);
            victim.map(|(_, victim)| !self.leaves.admit(hit_class, &victim, tick))
        };
        !has_optional && keeps(class) == Some(true) && classes.all(|of| keeps(of) != Some(false))
    }

    /// Candidates of a size class: leaves, or the others.
    #[cfg(feature = "check")]
    pub(crate) fn count(&self, is_leaf: bool, class: Class) -> usize {
        let policy = match is_leaf {
            true => &self.leaves,
            false => &self.optional,
        };
        let tenants = 0..self.tenants;
        tenants
            .map(|tenant| policy.leaves(set(class, tenant)))
            .sum()
    }

    /// The tenants that have candidates of any of the size classes.
    pub(crate) fn with_candidates(&self, classes: std::ops::Range<Class>) -> Tenants {
        let mut found = Tenants::default();
        for tenant in 0..self.tenants {
            let has = |class| {
                let set = set(class, tenant);
                self.leaves.leaves(set) + self.optional.leaves(set) > 0
            };
            if classes.clone().any(has) {
                found = found.with(tenant);
            }
        }
        found
    }
}

/// The policy's number of the set of a tenant's candidates of a size class.
fn set(class: Class, tenant: Tenant) -> usize {
    usize::from(class) * usize::from(TENANTS) + usize::from(tenant)
}
