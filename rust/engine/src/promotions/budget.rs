//! How many bytes of the arena promotions may hold until they are loaded.

use super::super::fetch::{Promotion, Share};
use super::super::ids::RequestId;

/// The bytes that promotions hold or have reserved.
///
/// A promotion starts when all of its bytes fit, so that started promotions never wait for one
/// another. One demanded promotion at a time may start with a part, so that the device is not idle. A
/// request that holds bytes of an earlier promotion may exceed the budget by the bytes of the next.
///
/// Invariants: `held` is the sum of all requests' `bytes`, `prefetched` the sum over the requests without a demanded
/// lookup, `reserved` the part of `held` that is still to be read.
#[derive(Debug)]
pub(super) struct PromotionBudget {
    most: u64,
    held: u64,
    prefetched: u64,
    reserved: u64,
    /// The promotion that has started with a part of its bytes.
    partial: Option<RequestId>,
}

impl PromotionBudget {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most,
            held: 0,
            prefetched: 0,
            reserved: 0,
            partial: None,
        }
    }

    /// Sets the bytes that promotions may hold. Started promotions go on.
    pub(super) fn set(&mut self, most: u64) {
        self.most = most;
    }

    /// Bytes that one more promotion of a request may bring.
    pub(super) fn of(&self, share: &Share) -> u64 {
        self.most.saturating_sub(share.bytes)
    }

    /// Bytes that prefetches may hold together.
    pub(super) fn prefetch_bytes(&self) -> u64 {
        self.most / 2
    }

    /// Bytes that promotions hold in the arena, without reserved bytes.
    pub(super) fn promoted_bytes(&self) -> u64 {
        self.held - self.reserved
    }

    /// Whether other requests hold so much that this request does not get `bytes`.
    pub(super) fn lacks(&self, share: &Share, bytes: u64) -> bool {
        self.held > share.bytes && self.held + bytes > self.most
    }

    /// Whether a request's promotion has started with a part of its bytes.
    pub(super) fn is_partial(&self, id: RequestId) -> bool {
        self.partial == Some(id)
    }

    /// Whether a request's promotion may start, whose next payload needs `slot` bytes. If so, reserves the promotion's
    /// bytes, or notes that it has started with a part of them.
    pub(super) fn admit(&mut self, id: RequestId, share: &mut Share, slot: u64) -> bool {
        let promotion = share.waits.disk.as_ref();
        let (rest, continues) = promotion.map_or((0, false), |of| (of.unread, of.continues));
        let fits = if continues {
            // A request that holds a part of the budget does not wait for the rest: its plan is within the budget,
            // but other promotions may hold the rest.
            true
        } else if share.demanded {
            !self.lacks(share, rest)
        } else {
            let alone = self.prefetched <= share.bytes && self.held <= share.bytes;
            let within =
                self.prefetched + rest <= self.prefetch_bytes() && self.held + rest <= self.most;
            alone || within
        };
        if fits {
            self.release_part(id);
            self.reserve(share, rest);
            return true;
        }
        let may_be_partial = share.demanded && self.partial.is_none_or(|of| of == id);
        if may_be_partial && !self.lacks(share, slot) {
            self.partial = Some(id);
            return true;
        }
        false
    }

    fn reserve(&mut self, share: &mut Share, bytes: u64) {
        self.reserved += bytes;
        self.add(share, bytes);
        if let Some(promotion) = &mut share.waits.disk {
            promotion.reserved = Some(bytes);
        }
    }

    /// Counts a slot of the arena that was taken for a request.
    pub(super) fn take(&mut self, share: &mut Share, slot: u64) {
        let promotion = share.waits.disk.as_mut();
        let reserved = promotion.and_then(|promotion| promotion.reserved.as_mut());
        // A payload that was in the arena at the start may have been evicted: it was not counted.
        let from_reserved = reserved.as_ref().map_or(0, |left| slot.min(**left));
        if let Some(left) = reserved {
            *left -= from_reserved;
        }
        self.reserved -= from_reserved;
        self.add(share, slot - from_reserved);
    }

    fn add(&mut self, share: &mut Share, bytes: u64) {
        share.bytes += bytes;
        self.held += bytes;
        if !share.demanded {
            self.prefetched += bytes;
        }
    }

    /// A demanded lookup of a request has come.
    pub(super) fn demanded(&mut self, share: &Share) {
        let left = self.prefetched.checked_sub(share.bytes);
        self.prefetched = left.expect("`prefetched` counts every prefetch");
    }

    /// Frees the reserved bytes that an ended promotion has not read.
    pub(super) fn ended(&mut self, id: RequestId, promotion: &Promotion, share: &mut Share) {
        self.release_part(id);
        let unread = promotion.reserved.unwrap_or(0);
        self.reserved -= unread;
        self.subtract(share, unread);
    }

    fn release_part(&mut self, id: RequestId) {
        if self.partial == Some(id) {
            self.partial = None;
        }
    }

    /// Frees all bytes that a request without a promotion holds.
    pub(super) fn release(&mut self, share: &mut Share) {
        assert!(share.waits.disk.is_none(), "its promotion goes on");
        self.subtract(share, share.bytes);
    }

    fn subtract(&mut self, share: &mut Share, bytes: u64) {
        share.bytes -= bytes;
        let left = self.held.checked_sub(bytes);
        self.held = left.expect("`held` counts every request");
        if !share.demanded {
            let left = self.prefetched.checked_sub(bytes);
            self.prefetched = left.expect("`prefetched` counts every prefetch");
        }
    }

    /// Bytes held, bytes held by prefetches, and bytes reserved.
    #[cfg(feature = "check")]
    pub(super) fn counted(&self) -> (u64, u64, u64) {
        (self.held, self.prefetched, self.reserved)
    }
}
