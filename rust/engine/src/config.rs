//! Configuration of an engine.

use undercroft_contract::format::NAMESPACES_MAX;
use undercroft_contract::remote::RemoteConfig;
use undercroft_contract::session::PromotionWait;

use crate::policy::PolicyKind;

/// Sizes, policies and limits. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Bytes of the arena.
    pub host_bytes: u64,
    /// Eviction policy of every tier.
    pub policy: PolicyKind,
    /// Bytes that promotions may hold in the arena until they are loaded.
    pub promotion_bytes: u64,
    /// Bytes of the chains that hints may pin together; 0 if none may be pinned.
    pub pin_bytes: u64,
    /// A hit that gains fewer tokens than this is not worth a load; `None` leaves that to the planner.
    pub min_load_tokens: Option<u32>,
    /// If no read ends for this long, by the last poll, on the device that a promotion waits for, the lookup is
    /// answered with the part in the arena.
    pub stall_ns: u64,
    /// Failed reads in a row after which a directory is given up.
    pub read_failures_max: u32,
    /// How long a request that the scheduler has asked for may wait for its promotion.
    pub promotion_wait: PromotionWait,
    /// The part of the computing time that a planned wait may take although nothing arrives.
    pub load_margin: f64,
    /// Bytes a second that may be written to disk; 0 is unlimited.
    pub write_rate: u64,
    /// Seconds after which payloads that no request has used are evicted from disk; 0 if they stay.
    pub disk_ttl_s: u64,
    /// Write only blocks that have been hit before (endurance mode).
    pub second_touch: bool,
    /// Writes that may be in flight while a read is in flight.
    pub writes_beside_reads: usize,
    /// Most nodes that one entry of the engine removes when many are removed together: the nodes of a reset namespace,
    /// or of a directory that is given up.
    pub removals: usize,
    /// Most nodes that one entry notifies of the arrival of a payload above them; the others wait for later entries.
    pub tells: usize,
    /// Nodes that one entry looks at in a search for the end of a hit, at least 2. In a search for pages for another
    /// size class, an entry looks at half as many in each region.
    pub visits: u32,
    /// Compare the checksums of a hit's payloads in the arena before each hit. A write compares only payloads that were not
    /// summed while they waited for it: the others' records get the checksum of the save.
    pub verify_host: bool,
    /// Shared namespaces that the engine has at once.
    pub namespaces_max: usize,
    /// Entries of a directory's namespace table that are used; at most [`NAMESPACES_MAX`].
    pub namespace_entries_max: usize,
    /// Read the blocks of conversations before they are expected to come back, after pauses of this time or more: blocks
    /// used more recently are still in the arena, or there is no room for them. 0: none.
    pub return_pause_ns: u64,
    /// Events that are kept for each session that asks for them.
    pub event_ring: usize,
    /// Lookups that are kept for [`Engine::explain`](super::Engine::explain), about 160 bytes each.
    pub explained_lookups: usize,
    /// Blocks that are remembered when they have left the tiers, 8 bytes each.
    pub departures: usize,
    /// The use of a remote store; `None` if there is none.
    pub remote: Option<RemoteConfig>,
    /// Source of every random choice.
    pub seed: u64,
    /// Seconds since 1970 when the engine's clock was at zero.
    pub unix_at_zero_s: u64,
}

impl EngineConfig {
    /// Defaults for an arena of `host_bytes`.
    pub fn new(host_bytes: u64) -> Self {
        Self {
            host_bytes,
            policy: PolicyKind::default(),
            promotion_bytes: host_bytes / 2,
            // Three tenths.
            pin_bytes: host_bytes / 10 * 3,
            min_load_tokens: Some(1),
            stall_ns: 1_000_000_000,
            read_failures_max: 8,
            promotion_wait: PromotionWait::Complete,
            load_margin: 0.25,
            write_rate: 0,
            disk_ttl_s: 0,
            second_touch: false,
            writes_beside_reads: 2,
            removals: 128,
            tells: 128,
            visits: 1000,
            verify_host: false,
            namespaces_max: 1024,
            namespace_entries_max: NAMESPACES_MAX,
            return_pause_ns: 2_000_000_000,
            event_ring: 1 << 16,
            explained_lookups: 4096,
            departures: 1 << 19,
            remote: None,
            seed: 0,
            unix_at_zero_s: 0,
        }
    }
}
