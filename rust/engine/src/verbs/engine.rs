//! The engine's fields, sessions and reports.

use undercroft_contract::error::RegisterError;
use undercroft_contract::session::{BlockEvents, GiveUp, SessionSpec, TransferEnd};
use undercroft_contract::tier::{TENANT_SHARE_WHOLE, TENANTS_MAX};

use crate::disk::{DeviceReport, Disk, Health};
use crate::forest::{NONE, NsId};
use crate::metrics::{Counters, Gauges, Order};

use super::super::ages::Ages;
use super::super::changes::Change;
use super::super::checksums::Checksums;
use super::super::clear::Clearing;
use super::super::config::EngineConfig;
use super::super::events::{FeedOf, Feeds};
use super::super::explain::LastLookups;
use super::super::fetch::Shares;
use super::super::hints::Hints;
use super::super::ids::{RequestId, SessionId, TransferKey, id_of};
use super::super::namespaces::Namespaces;
use super::super::operations::Operations;
use super::super::parts::EngineParts;
use super::super::pins::Pins;
use super::super::planner::Planner;
use super::super::promotions::{PromotionEnd, Promotions};
use super::super::remote::Remote;
use super::super::residency::{Residency, TenantShare};
use super::super::retention::Retention;
use super::super::returns::Returns;
use super::super::sessions::Sessions;
use super::super::writeback::WriteBack;

/// The engine. See the description of the crate.
///
/// Commands go in, answers come out, and [`Engine::turn`] says what the devices should do. Nothing here copies a byte:
///
/// ```
/// use undercroft_contract::key::BlockHash;
/// use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
/// use undercroft_contract::session::{LookupRequest, SaveRequest, SessionSpec, Tokens};
/// use undercroft_engine::{Engine, EngineConfig};
///
/// let mut engine = Engine::new(EngineConfig::new(4 << 20));
/// let model = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 4096)]);
/// let session = engine.open_session(SessionSpec::from(model))?;
/// let prompt: Vec<_> = (1..4).map(|block| BlockHash::new(&[block; 32]).unwrap()).collect();
///
/// // The first two blocks have been computed. Their slots come at once; workers copy into them.
/// let save = engine.begin_save(session, &SaveRequest::new("first", &prompt, Tokens(32)));
/// let copies = save.transfer.unwrap();
/// assert_eq!(copies.extents[0].offsets.len(), 2);
/// // Until the copies have ended no other request finds the blocks.
/// let lookup = LookupRequest::new("second", &prompt);
/// assert_eq!(engine.lookup(session, &lookup).tokens(), Some(Tokens(0)));
/// engine.end_transfer(copies.id, true);
/// assert_eq!(engine.lookup(session, &lookup).tokens(), Some(Tokens(32)));
/// # Ok::<(), undercroft_contract::error::RegisterError>(())
/// ```
#[derive(Debug)]
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) now_ns: u64,
    pub(super) residency: Residency,
    pub(super) promotions: Promotions,
    pub(super) writeback: WriteBack,
    pub(super) checksums: Checksums,
    pub(super) namespaces: Namespaces,
    pub(super) sessions: Sessions,
    pub(super) shares: Shares,
    pub(super) operations: Operations,
    pub(super) planner: Planner,
    pub(super) lookups: LastLookups,
    /// The sessions that get events.
    pub(super) feeds: Feeds,
    /// The times of the ticks.
    pub(super) ages: Ages,
    pub(super) pins: Pins,
    pub(super) hints: Hints,
    pub(super) returns: Returns,
    /// `None` without a remote store.
    pub(super) remote: Option<Box<Remote>>,
    pub(super) retention: Retention,
    pub(super) counters: Counters,
    pub(super) clearing: Clearing,
    /// No save and no promotion begins.
    pub(super) draining: bool,
    /// The health of a directory has changed since the last call of [`Engine::end_entry`].
    pub(super) health_changed: bool,
}

/// The parts of an engine that promotions, write-back and the remote store work on.
macro_rules! parts {
    ($engine:expr) => {
        EngineParts {
            config: &$engine.config,
            namespaces: &$engine.namespaces,
            residency: &mut $engine.residency,
            shares: &mut $engine.shares,
            operations: &mut $engine.operations,
            checksums: &mut $engine.checksums,
            rates: &mut $engine.planner.rates,
            ages: &$engine.ages,
            counters: &mut $engine.counters,
            now_ns: $engine.now_ns,
        }
    };
}

impl Engine {
    /// An engine without disks; [`Engine::attach_disks`] adds them.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            now_ns: 0,
            residency: Residency::new(&config),
            promotions: Promotions::new(config.promotion_bytes),
            writeback: WriteBack::new(&config),
            checksums: Checksums::default(),
            namespaces: Namespaces::new(&config),
            sessions: Sessions::default(),
            shares: Shares::default(),
            operations: Operations::default(),
            planner: Planner::new(config.load_margin, config.seed),
            lookups: LastLookups::new(config.explained_lookups, config.departures),
            feeds: Feeds::new(config.event_ring),
            ages: Ages::new(config.disk_ttl_s),
            pins: Pins::new(config.pin_bytes),
            hints: Hints::default(),
            returns: Returns::new(config.return_pause_ns),
            remote: None,
            retention: Retention::new(config.disk_ttl_s),
            counters: Counters::default(),
            clearing: Clearing::default(),
            draining: false,
            health_changed: false,
            config,
        }
    }

    /// Sets the time, in nanoseconds since the engine's start. A time before the last one is ignored.
    #[inline]
    pub fn set_now(&mut self, now_ns: u64) {
        // Earlier changes have the time before.
        self.tell_listeners();
        self.now_ns = self.now_ns.max(now_ns);
        self.lookups.departures.set_now(self.now_ns);
        let tick = self.residency.tick();
        let now_s = self.unix_s();
        self.ages.note(tick, now_s);
    }

    /// Tells the listeners of the changes since the last call. Called at the end of each entry, and within entries that
    /// may change much.
    #[inline]
    pub(super) fn tell_listeners(&mut self) {
        if self.residency.changes.is_empty() {
            return;
        }
        self.residency.changes.drain(|change| match change {
            Change::Payload { ns, node, event } => self.feeds.note(ns, node, event),
            Change::Remote {
                digest,
                number,
                event,
            } => self.feeds.note_remote(&digest, number, event),
            Change::Departure { ns, hash, reason } => {
                self.lookups.departures.note(ns, &hash, reason);
            }
        });
    }

    /// Sets how many IO operations each device can have in flight (`IoEngine::depth`). Reads take only a part of this
    /// depth, and so do writes.
    pub fn set_io_depth(&mut self, depth: usize) {
        self.operations.set_depth(depth);
    }

    /// Ends an entry: the listeners are told of its changes. Returns whether a promotion has ended, or a directory's
    /// health has changed, since the last entry. If so, the caller should look waiting requests up again.
    #[inline]
    pub fn end_entry(&mut self) -> bool {
        self.tell_listeners();
        let ended = self.promotions.take_ended();
        let ended = self.remote.as_mut().is_some_and(|of| of.take_ended()) || ended;
        std::mem::take(&mut self.health_changed) || ended
    }

    /// The promotions, and the parts that they work on.
    pub(super) fn promotions(&mut self) -> (&mut Promotions, EngineParts<'_>) {
        (&mut self.promotions, parts!(self))
    }

    /// The remote store, if there is one, and the parts that it works on.
    pub(super) fn remote(&mut self) -> Option<(&mut Remote, EngineParts<'_>)> {
        Some((self.remote.as_deref_mut()?, parts!(self)))
    }

    /// The write-back, and the parts that it works on.
    pub(super) fn writeback(&mut self) -> (&mut WriteBack, EngineParts<'_>) {
        (&mut self.writeback, parts!(self))
    }

    /// Opens a session.
    ///
    /// # Errors
    /// If the namespace makes no sense, a payload is larger than a page of the arena or of a data file, or its share does
    /// not fit beside the shares of other namespaces.
    pub fn open_session(
        &mut self,
        spec: impl Into<SessionSpec>,
    ) -> Result<SessionId, RegisterError> {
        let spec = spec.into();
        let namespace = spec.namespace.clone();
        let used_s = self.unix_s();
        // No other namespace is forgotten for a session that is refused.
        let known = self.namespaces.shared(&namespace.digest());
        self.check_share(known, spec.tenant_share)?;
        let is_unused = |ns| !self.sessions.uses(ns);
        let ns = self
            .namespaces
            .register(namespace, &mut self.residency, used_s, is_unused)?;
        // Another namespace may have made room.
        self.end_outlived_flights();
        let session = self.sessions.open(ns, &spec);
        self.settle_shares();
        if spec.private {
            self.make_private(session);
        }
        Ok(session)
    }

    /// Whether the shares of all namespaces with sessions fit the tiers if a session of `ns` wants a share.
    fn check_share(&self, ns: Option<NsId>, asked: u16) -> Result<(), RegisterError> {
        let shares = self.sessions.shares();
        let others = shares
            .iter()
            .filter(|&(&of, &share)| Some(of) != ns && share > 0);
        let (count, others) =
            others.fold((0, 0), |(count, sum), (_, share)| (count + 1, sum + share));
        let left = TENANT_SHARE_WHOLE.saturating_sub(others);
        if asked > 0 && (asked > left || count >= TENANTS_MAX) {
            return Err(RegisterError::ShareTooLarge { asked, others });
        }
        Ok(())
    }

    /// Gives each namespace the greatest share of its sessions. Called when a session has come, or has got another
    /// namespace.
    pub(super) fn settle_shares(&mut self) {
        let wanted = self.sessions.shares().into_iter();
        let wanted: Vec<TenantShare> = wanted
            .map(|(ns, share)| TenantShare { ns, share })
            .collect();
        self.residency.settle_shares(&wanted);
    }

    /// Seconds since 1970.
    pub(super) fn unix_s(&self) -> u32 {
        let now_s = self.config.unix_at_zero_s + self.now_ns / 1_000_000_000;
        u32::try_from(now_s).unwrap_or(u32::MAX)
    }

    /// Ends a session: its lookups, leases, loads and saves.
    ///
    /// No worker of the session may copy any more: the slots of the session's transfers are reused.
    pub fn close_session(&mut self, session: SessionId) {
        self.end_lookups(session);
        let transfers = self.sessions.transfers();
        let of_session: Vec<TransferKey> = transfers
            .filter(|(_, transfer)| transfer.session == session)
            .map(|(key, _)| key)
            .collect();
        for transfer in of_session {
            self.end_transfer(id_of(transfer), TransferEnd::GivenUp(GiveUp::Closed));
        }
        self.close_feed(session);
        let Some(state) = self.sessions.close(session) else {
            return;
        };
        self.planner.forget(session);
        self.leave_namespace(state.ns);
    }

    /// A session has left a namespace: its blocks are dropped if nobody else may find them.
    pub(super) fn leave_namespace(&mut self, ns: NsId) {
        if self.namespaces.is_private(ns) {
            self.residency.remove_namespace(ns);
        } else {
            let used_s = self.unix_s();
            self.namespaces.used(ns, &mut self.residency, used_s);
        }
    }

    /// Ends a session's lookups and frees their leases. Loads and saves under way go on.
    pub fn end_lookups(&mut self, session: SessionId) {
        for request in self.sessions.requests_of(session) {
            self.drop_request(request);
        }
        self.sessions.forget_removed(session);
    }

    /// Frees the leases and memory of a request, and forgets its state. The session keeps the request's name until the
    /// caller removes the name, or calls `forget_removed`.
    pub(super) fn drop_request(&mut self, id: RequestId) {
        self.release_hit(id);
        self.sessions.requests.remove(id);
        self.shares.remove(id);
        self.residency.end_of_request();
    }

    /// Ends a request's promotion and lease, and its share of the promotion budget.
    pub(super) fn release_hit(&mut self, id: RequestId) {
        let (promotions, mut parts) = self.promotions();
        promotions.end(id, PromotionEnd::Cancelled, &mut parts);
        let share = &mut parts.shares[id];
        share.move_lease(NONE, parts.residency);
        promotions.release(share);
        self.leave_flight(id);
    }

    /// Digest of a session's namespace, hexadecimal.
    pub fn namespace_of(&self, session: SessionId) -> Option<String> {
        let ns = self.sessions.get(session)?.ns;
        Some(self.namespaces.digest(ns).to_hex())
    }

    /// Counts an order of an operator. [`Engine::reset`] counts itself.
    pub fn count_order(&mut self, order: Order) {
        self.counters.count_order(order);
    }

    /// Counters since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The gauges as of now. Costs a pass over sessions, namespaces and disks, not over blocks.
    pub fn gauges(&self) -> Gauges {
        let disks = self.residency.disks();
        let sum = |of: fn(&Disk) -> u64| disks.iter().map(of).sum();
        let is_degraded = |disk: &&Disk| disk.health.report().0 != Health::Good;
        let (host, forest) = (self.residency.host(), self.residency.forest());
        let transfers = self.sessions.all_transfers();
        let resized = self.resized();
        let transferring = transfers.load_bytes + transfers.save_bytes;
        let mut gauges = Gauges {
            host_capacity_bytes: host.capacity(),
            host_target_bytes: resized.host.target_bytes,
            host_used_bytes: host.used_bytes(),
            host_pinned_bytes: self.promotions.promoted_bytes() + transferring,
            host_blocks: host.blocks(),
            disk_capacity_bytes: sum(|disk| disk.slots().capacity()),
            disk_target_bytes: resized.disk.target_bytes,
            disk_used_bytes: sum(|disk| disk.slots().used_bytes()),
            disk_blocks: sum(|disk| disk.slots().blocks()),
            disk_degraded: disks.iter().filter(is_degraded).count() as u64,
            nodes: forest.len() as u64,
            namespaces: forest
                .namespaces()
                .filter(|&ns| forest.has_nodes(ns))
                .count() as u64,
            volatile_namespaces: self
                .namespaces
                .volatile(&self.residency, |ns| self.sessions.uses(ns))
                as u64,
            sessions: self.sessions.len() as u64,
            sessions_opened: self.sessions.opened(),
            active_lookups: self.sessions.requests.len() as u64,
            loads: transfers.loads,
            saves: transfers.saves,
            draining: u64::from(self.draining),
            pins: self.pins.len() as u64,
            pin_bytes: self.pins.bytes(),
            pin_capacity_bytes: self.pins.budget(),
            promotion_queue_bytes: Promotions::queue_bytes(&self.shares),
            ..Gauges::default()
        };
        self.planner.report(&mut gauges);
        if let Some(remote) = &self.remote {
            remote.report(&mut gauges);
        }
        gauges
    }

    /// The state of each directory.
    pub fn devices(&self) -> Vec<DeviceReport> {
        self.residency.disks().iter().map(Disk::report).collect()
    }
}

impl Engine {
    /// Some of the payloads that have come to the tiers of a session's namespace, or left them, since the last call.
    /// The first call begins with the payloads in the tiers, and so does a call that asks for a `restart`.
    pub fn take_events(&mut self, session: SessionId, restart: bool) -> BlockEvents {
        let Some(of) = self.feed_of(session) else {
            return BlockEvents::default();
        };
        // The replay goes on: changes before this are of the nodes that have been told until now.
        self.tell_listeners();
        self.residency.changes.has_feeds = true;
        let (remote, namespaces) = (self.remote.as_deref(), &self.namespaces);
        self.feeds
            .take((session, of), restart, &self.residency, |from, events| {
                remote.map_or(u64::MAX, |remote| {
                    remote.replay_told(of.ns, from, namespaces, events)
                })
            })
    }

    /// Ends the feed of a session.
    pub(super) fn close_feed(&mut self, session: SessionId) {
        self.feeds.close(session);
        self.residency.changes.has_feeds = !self.feeds.is_empty();
    }

    /// Whether [`Engine::take_events`] would return events for a session.
    pub fn has_events(&self, session: SessionId) -> bool {
        self.feeds.has_some(session, self.feed_of(session))
    }

    fn feed_of(&self, session: SessionId) -> Option<FeedOf> {
        let ns = self.sessions.get(session)?.ns;
        let digest = *self.namespaces.digest(ns);
        Some(FeedOf {
            ns,
            instance: self.namespaces.instance(ns),
            digest: (!self.namespaces.is_private(ns)).then_some(digest),
        })
    }
}
