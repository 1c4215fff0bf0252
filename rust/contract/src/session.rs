//! The contract between a vLLM scheduler and the engine: requests and answers by value, and [`Session`],
//! the one way to the cache. An engine in this process (`rust/driver`) and a client of another
//! process's engine (`rust/ipc`) implement it; one suite of tests runs over both.
//!
//! Words are vLLM's: computed tokens are tokens that the device already holds
//! (`num_computed_tokens`), external tokens are tokens that a load adds.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::explain::Rest;
use crate::hint::{HintAnswer, HintRequest};
use crate::key::{BlockHash, HashSource};
use crate::namespace::NamespaceSpec;
pub use crate::sources::{Brought, Sources};
use crate::tier::Tier;
pub use crate::tokens::{Finished, Tokens, TurnEnd};

/// Where a payload lies, in bytes from the start of the arena; [`ArenaOffset::NONE`] for a block that
/// is not to be copied. Workers take it as a little-endian i64, -1 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArenaOffset(i64);

impl ArenaOffset {
    /// Nothing is to be copied.
    pub const NONE: Self = Self(-1);

    /// An offset in bytes.
    ///
    /// # Panics
    /// If no arena can have this offset.
    pub fn new(bytes: u64) -> Self {
        Self(i64::try_from(bytes).expect("an arena is smaller than 2^63 bytes"))
    }

    /// The offset in bytes; `None` for [`ArenaOffset::NONE`].
    pub fn get(self) -> Option<u64> {
        u64::try_from(self.0).ok()
    }

    /// The bytes that workers and the protocol take.
    pub fn to_le_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// The opposite of [`ArenaOffset::to_le_bytes`].
    pub fn from_le_bytes(bytes: [u8; 8]) -> Self {
        Self(i64::from_le_bytes(bytes).max(-1))
    }
}

/// Blocks of one group: where each lies in the arena, from `first_block` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the group.
    pub group: u8,
    /// Index of the first block in the request's block table of that group.
    pub first_block: u32,
    /// One offset for each block.
    pub offsets: Vec<ArenaOffset>,
}

/// Appends extents of later blocks to extents of earlier blocks.
///
/// # Panics
/// If a group's blocks do not come front to back.
pub fn append_extents(all: &mut Vec<Extent>, later: Vec<Extent>) {
    for extent in later {
        let same_group = |of: &&mut Extent| of.group == extent.group;
        let Some(before) = all.iter_mut().find(same_group) else {
            all.push(extent);
            continue;
        };
        // Blocks in between are not copied.
        let index = (extent.first_block - before.first_block) as usize;
        assert!(
            index >= before.offsets.len(),
            "the extents of group {} come front to back",
            extent.group
        );
        before.offsets.resize(index, ArenaOffset::NONE);
        before.offsets.extend(extent.offsets);
    }
}

/// Blocks of a group, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Index of the group.
    pub group: u8,
    /// Index of the first block in the request's block table of that group.
    pub first_block: u32,
    /// Index of the block after the last.
    pub end_block: u32,
}

/// How long a lookup may stay pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PromotionWait {
    /// As long as reads end.
    Complete,
    /// As long as a load takes less time than computing, by measurement.
    Planned,
    /// `base_ns`, and `per_1k_tokens_ns` for every 1,000 tokens that the promotion would bring.
    Limit {
        /// The part that does not depend on the prompt, in nanoseconds.
        base_ns: u64,
        /// The part for every 1,000 tokens, in nanoseconds.
        per_1k_tokens_ns: u64,
    },
}

/// A step that a vLLM has run, for the model of its times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Tokens of prompts that the step computed.
    pub tokens: u32,
    /// The sum of these tokens' positions in their prompts.
    pub positions: u64,
    /// Requests of which the step computed one token after the prompt.
    pub decodes: u32,
    /// How long the step took, in nanoseconds.
    pub duration_ns: u64,
}

/// Whether the scheduler waits for a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Priority {
    /// The scheduler waits: promotions for the request start first, and the wait has a limit.
    Demand,
    /// The request has arrived, and the scheduler has not looked it up yet.
    Prefetch,
}

/// Asks for the cached part of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct LookupRequest<'a> {
    /// vLLM's id of the request.
    pub request: &'a str,
    /// The id that users know; empty if it is the same as `request`.
    pub label: &'a str,
    /// Block hashes of the prompt.
    pub hashes: &'a dyn HashSource,
    /// Tokens that the device holds: payloads before them are not fetched.
    pub computed: Tokens,
    /// The deepest boundary that the request can use.
    pub max: Tokens,
    /// The least boundary that the request can use: if no hit can end there or deeper, nothing is promoted.
    pub min: Tokens,
    /// Replaces the engine's `promotion_wait`; `None` keeps it.
    pub wait: Option<PromotionWait>,
    /// Tokens of requests that came before and are not computed yet.
    pub queued: Tokens,
    /// Whether the scheduler waits.
    pub priority: Priority,
}

impl<'a> LookupRequest<'a> {
    /// A demanded lookup of the whole prompt, of which the device holds nothing.
    pub fn new(request: &'a str, hashes: &'a dyn HashSource) -> Self {
        Self {
            request,
            label: "",
            hashes,
            computed: Tokens(0),
            max: Tokens::MAX,
            min: Tokens(0),
            wait: None,
            queued: Tokens(0),
            priority: Priority::Demand,
        }
    }

    /// With another id for users.
    #[must_use]
    pub fn label(self, label: &'a str) -> Self {
        Self { label, ..self }
    }

    /// With other computed tokens.
    #[must_use]
    pub fn computed(self, computed: Tokens) -> Self {
        Self { computed, ..self }
    }

    /// With another deepest boundary.
    #[must_use]
    pub fn max(self, max: Tokens) -> Self {
        Self { max, ..self }
    }

    /// With another least boundary.
    #[must_use]
    pub fn min(self, min: Tokens) -> Self {
        Self { min, ..self }
    }

    /// With a limit on the wait for its promotion.
    #[must_use]
    pub fn wait(self, wait: Option<PromotionWait>) -> Self {
        Self { wait, ..self }
    }

    /// Sets the tokens of other prompts that vLLM computes before this one.
    #[must_use]
    pub fn queued(self, queued: Tokens) -> Self {
        Self { queued, ..self }
    }

    /// With another priority.
    #[must_use]
    pub fn priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }

    /// The request, as a prefetch.
    #[must_use]
    pub fn prefetch(self) -> Self {
        self.priority(Priority::Prefetch)
    }
}

/// The answer to a [`LookupRequest`].
///
/// ```
/// use undercroft_contract::session::{Hit, Lookup, Tokens};
///
/// // 48 tokens can be loaded. Another prompt shares 64, where a state is missing.
/// let hit = Lookup::Hit(Hit { tokens: Tokens(48), shared: Tokens(64) });
/// assert_eq!((hit.tokens(), hit.shared()), (Some(Tokens(48)), Tokens(64)));
/// // A pending lookup says nothing of the hit yet, which is not the same as a miss.
/// let pending = Lookup::Pending { shared: Tokens(64) };
/// assert_eq!(pending.tokens(), None);
/// assert_eq!(Lookup::NOTHING.tokens(), Some(Tokens(0)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Payloads are being read from disk, or a server's answer is on its way: ask again.
    Pending {
        /// See [`Hit::shared`]; the tokens that are known so far.
        shared: Tokens,
    },
    /// A load may follow.
    Hit(Hit),
    /// There is nothing to load.
    Miss {
        /// See [`Hit::shared`]. If no hit reaches [`LookupRequest::min`], where the deepest hit would end.
        shared: Tokens,
    },
}

impl Lookup {
    /// Nothing is known of the prompt.
    pub const NOTHING: Self = Self::Miss { shared: Tokens(0) };

    /// See [`Hit::shared`].
    pub fn shared(self) -> Tokens {
        match self {
            Self::Pending { shared } | Self::Miss { shared } => shared,
            Self::Hit(hit) => hit.shared,
        }
    }

    /// Whether the lookup is to be repeated.
    pub fn is_pending(self) -> bool {
        matches!(self, Self::Pending { .. })
    }

    /// Where the hit ends; 0 for a miss, `None` while pending.
    pub fn tokens(self) -> Option<Tokens> {
        match self {
            Self::Pending { .. } => None,
            Self::Hit(hit) => Some(hit.tokens),
            Self::Miss { .. } => Some(Tokens(0)),
        }
    }
}

/// A usable prefix. Its payloads are leased: they stay in the arena until the request's next lookup,
/// its load, or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Where the hit ends, above the computed tokens of the request.
    pub tokens: Tokens,
    /// Tokens of the prompt whose chain is in the index, usable or not. Above `tokens` where a window or
    /// a state is missing: other prompts share that prefix, and a hit could end there.
    pub shared: Tokens,
}

/// Names a load or a save of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// Why a load or a save was given up, although none of its copies had failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GiveUp {
    /// The client's caches were reset, also by a pause or for sleep.
    Reset,
    /// The client's weights may have changed.
    Weights,
    /// The client or its connection has ended.
    Closed,
    /// The client asks for the save again.
    Retry,
}

/// How a load or a save has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferEnd {
    /// All ranks have copied.
    Done,
    /// A copy has failed.
    Failed,
    /// Nobody wants the copies any more.
    GivenUp(GiveUp),
}

impl From<bool> for TransferEnd {
    fn from(ok: bool) -> Self {
        if ok { Self::Done } else { Self::Failed }
    }
}

/// Identifies a session to the workers that copy for it, and entitles them to the arena. 0 is no session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionToken(pub u128);

/// A load that has begun: its payloads stay where they are until [`Session::end_transfer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Ends the transfer.
    pub id: TransferId,
    /// The session for which the payloads are kept.
    pub session: SessionToken,
    /// Where to copy from.
    pub extents: Vec<Extent>,
    /// The tiers in which the load's tokens were found.
    pub sources: Sources,
}

/// Asks where to save the blocks of a prompt's first tokens.
#[derive(Clone, Copy, Debug)]
pub struct SaveRequest<'a> {
    /// vLLM's id of the request. A policy weighs each of its blocks once, however often its save is tried
    /// or continued.
    pub request: &'a str,
    /// Block hashes of prompt and answer.
    pub hashes: &'a dyn HashSource,
    /// Tokens that the device has computed: their full blocks are saved, unless they are cached.
    pub tokens: Tokens,
    /// Blocks of windows and states that the device holds. They are added to blocks that are cached
    /// already, too.
    pub offers: &'a [Offer],
    /// The device holds no block that is not among the offers, of full attention neither: a save that needs another
    /// one ends before it, see [`SaveRefusal::PrefixGone`].
    pub only_offers: bool,
    /// Somebody wants these blocks by name, as with a hint or an import: no policy refuses them for being worth little.
    pub is_wanted: bool,
}

impl<'a> SaveRequest<'a> {
    /// A save of the first `tokens` tokens' full blocks, without offers.
    pub fn new(request: &'a str, hashes: &'a dyn HashSource, tokens: Tokens) -> Self {
        Self {
            request,
            hashes,
            tokens,
            offers: &[],
            only_offers: false,
            is_wanted: false,
        }
    }

    /// With offers.
    #[must_use]
    pub fn offers(self, offers: &'a [Offer]) -> Self {
        Self { offers, ..self }
    }

    /// Whether the device holds no other blocks than the offers.
    #[must_use]
    pub fn only_offers(self, only_offers: bool) -> Self {
        Self {
            only_offers,
            ..self
        }
    }

    /// Whether somebody wants the blocks by name.
    #[must_use]
    pub fn wanted(self, is_wanted: bool) -> Self {
        Self { is_wanted, ..self }
    }
}

/// Why a save ends before the tokens that it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveRefusal {
    /// Memory is short: the client may ask for the save again.
    HostFull,
    /// Neither the cache nor the device has a block that those after it need.
    PrefixGone,
}

impl SaveRefusal {
    /// The name for Python and people.
    pub fn name(self) -> &'static str {
        match self {
            Self::HostFull => "host_full",
            Self::PrefixGone => "prefix_gone",
        }
    }
}

/// Where a save ends, and why there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveEnd {
    /// With the blocks that are copied now, the index has every block of full attention up to here.
    pub tokens: Tokens,
    /// Why the save does not go further. `None` also if a policy keeps other blocks instead.
    pub refused: Option<SaveRefusal>,
    /// Blocks of full attention that neither the cache nor the device has. Empty without
    /// [`SaveRefusal::PrefixGone`].
    pub lacks: Vec<Offer>,
}

/// The answer to a [`SaveRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Save {
    /// Slots, or a grant without slots if there is nothing to copy.
    Granted(SaveGrant),
    /// [`Session::poll_saves`] returns the grant later.
    Pending(TransferId),
    /// There is no engine now.
    Unavailable,
}

/// Slots for a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveGrant {
    /// Ends the save, unless there is nothing to copy.
    pub id: TransferId,
    /// The session for which the slots are kept.
    pub session: SessionToken,
    /// Where to copy to. Empty if there is nothing to copy: the save has ended.
    pub extents: Vec<Extent>,
    /// Where the save ends.
    pub end: SaveEnd,
}

/// The parameters of a new session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSpec {
    /// The namespace; it is registered if it is new.
    pub namespace: NamespaceSpec,
    /// Tokens before the end of the cached prefix at which every hit must end: a draft model's KV
    /// of a token depends on the token after it.
    pub dropped_tokens: Tokens,
    /// The session shares blocks with no other session: its weights may not match the namespace's description.
    pub private: bool,
    /// A hit of a prefetch is leased, too: the client loads it without another lookup.
    pub leases_prefetches: bool,
    /// The share of each tier, in thousandths, that the namespace's blocks keep when other namespaces' blocks need room. The
    /// greatest share of a namespace's sessions counts.
    pub tenant_share: u16,
}

impl From<NamespaceSpec> for SessionSpec {
    fn from(namespace: NamespaceSpec) -> Self {
        Self {
            namespace,
            dropped_tokens: Tokens(0),
            private: false,
            leases_prefetches: false,
            tenant_share: 0,
        }
    }
}

/// A payload has become readable in a tier, or is no longer readable there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// The tier.
    pub tier: EventTier,
    /// Whether the payload has come; otherwise it has left.
    pub stored: bool,
    /// Index of the payload's group.
    pub group: u8,
    /// The block hash at the payload's end.
    pub hash: BlockHash,
    /// Hash of the block before; `None` for the first block of a prompt, and for a payload that has left.
    pub parent: Option<BlockHash>,
}

/// Where the payload of an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventTier {
    /// In host memory.
    Host,
    /// On disk.
    Disk,
    /// In the remote store, as far as this engine knows.
    Remote,
}

impl From<Tier> for EventTier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Host => Self::Host,
            Tier::Disk => Self::Disk,
        }
    }
}

/// The changes in the tiers, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockEvents {
    /// All earlier events are void: changes were lost, or the session has another namespace. The
    /// present content follows from here on.
    pub cleared: bool,
    /// The changes.
    pub events: Vec<BlockEvent>,
    /// More events are available at once.
    pub more: bool,
}

/// One vLLM scheduler's use of one namespace. Calls take microseconds and never wait for IO, except calls
/// with a timeout. Every call may be repeated, and no call fails: without an engine, lookups are misses.
pub trait Session: std::fmt::Debug + Send + Sync {
    /// Digest of the namespace, hexadecimal.
    fn namespace(&self) -> String;

    /// Looks a prompt up, and starts to promote its payloads that are only on disk. A hit of
    /// [`Priority::Demand`] is leased.
    fn lookup(&self, request: &LookupRequest<'_>) -> Lookup;

    /// Waits until [`Session::lookup`] no longer answers [`Lookup::Pending`], at most for `timeout`.
    /// Returns whether the lookup is no longer pending.
    fn wait(&self, request: &str, timeout: Duration) -> bool;

    /// The requests whose last demanded lookup was answered [`Lookup::Pending`] and would now be answered otherwise, as far
    /// as the session knows. Each is named once. All other lookups are still pending: a caller with many of them need not
    /// repeat each one.
    fn ended_waits(&self) -> Vec<Box<str>>;

    /// Why the last answer of a request's lookup has no more tokens; `None` before the first answer.
    fn rest(&self, request: &str) -> Option<Rest>;

    /// The request's lookup is not needed any more: ends its lease and its promotion.
    fn end_lookup(&self, request: &str);

    /// Begins the load of `external` tokens after `computed`, up to a boundary that the request's last
    /// hit covers. `None` if no hit covers the load: the request computes these tokens.
    fn begin_load(&self, request: &str, computed: Tokens, external: Tokens) -> Option<Load>;

    /// Asks for slots for the blocks that are not cached yet.
    fn begin_save(&self, request: &SaveRequest<'_>) -> Save;

    /// The grants of pending saves that have come since the last call.
    fn poll_saves(&self) -> Vec<SaveGrant>;

    /// Ends a load or a save: all ranks have ended its copies, or no rank will copy. After a failed load the
    /// request's lookups are misses; a failed save is dropped.
    fn end_transfer(&self, id: TransferId, ok: bool);

    /// Ends a load or a save that nobody wants any more, when no rank copies any more. Neither counts as failed: the
    /// request of a load may be looked up again, and a save is dropped.
    fn give_up(&self, id: TransferId, reason: GiveUp);

    /// A request has finished or was aborted. Loads and saves under way go on.
    fn finish_request(&self, finished: Finished<'_>);

    /// Reports a client's knowledge of a prompt's future use: see [`Hint`](crate::hint::Hint). Waits only microseconds
    /// for a server's answer, then answers [`HintAnswer::Pending`].
    fn hint(&self, request: &HintRequest<'_>) -> HintAnswer;

    /// The payloads that were stored in the tiers or removed since the last call. The first calls report the present
    /// content, a part in each call. Until then nothing is noted. `restart`: the receivers have forgotten all events,
    /// so the session reports the present content again, without [`BlockEvents::cleared`].
    fn take_events(&self, restart: bool) -> BlockEvents;

    /// Steps that the vLLM has run since the last call.
    fn report_steps(&self, steps: &[Step]);

    /// Drops all blocks of the namespace: from now on no lookup finds an earlier block. Waits at most `timeout`
    /// until no restart finds an earlier block either. Returns whether that is ensured.
    /// If the session was closed, drops nothing and returns false.
    fn reset(&self, timeout: Duration) -> bool;

    /// The weights of the session's vLLM change. From now on the session uses the namespace of `description`, or, with
    /// `None`, a namespace that it shares with no session: only the session itself finds what it saves there. Earlier
    /// hits end. Loads and saves under way end in the namespace in which they began.
    fn change_weights(&self, description: Option<&str>);

    /// Ends the session: its lookups, leases, loads and saves.
    fn close(&self);
}
