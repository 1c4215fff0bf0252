//! The engine: a single-threaded state machine that owns index, slots, transfers and disk bookkeeping.
//!
//! It has no threads, no clock, no system calls and no randomness of its own. Commands and IO
//! completions go in, answers and IO requests come out, and each entry does bounded work. The driver
//! (`rust/driver`) gives it threads; the simulator (`rust/sim`) gives it whole lives from a seed.
//!
//! The engine's fields are rooms, which own their state:
//!
//! - `residency`: which payload is in which tier, and which may be evicted;
//! - `fetch`: what each request waits for and keeps in the arena;
//! - `promotions`: disk to arena, for the requests that wait;
//! - `writeback`: arena to disk, payloads and their records;
//! - `checksums`: which payloads in the arena are to be summed, behind saves and before hits;
//! - `namespaces`: the namespace tables, and resets;
//! - `sessions`: sessions, their lookups, and the transfers of their workers;
//! - `events`: the changes in the tiers, for sessions that ask; `departures`, for `explain`: how blocks left the tiers;
//! - `changes`: what residency and the remote store make known to `events` and `departures`;
//! - `pins` and `hints`: leases that hints ask for, with their budget; prefetches and demotions under way;
//! - `returns`: when conversations come back, and which are to be read before that;
//! - `planner`: whether loading or computing takes less time, by measurement;
//! - `remote`: the remote store, and the segments that are read from it or written to it;
//! - `ages`: the times of the ticks; `retention` and `clear`: what is removed because of its age, or by an order;
//! - `operations`: the purpose of each IO operation in flight.
//!
//! `verbs` is what [`Engine`] does for its callers. A room changes no other room but residency and what
//! `EngineParts` lends, and residency changes none. An effect on another room is a return value, which a verb passes on. No room can name [`Engine`].

mod ages;
mod buddy;
mod changes;
mod checksums;
mod clear;
mod config;
mod departures;
pub mod disk;
#[cfg(feature = "check")]
mod ensure;
mod events;
mod explain;
mod fetch;
pub mod forest;
mod hints;
mod ids;
mod lookup_cursor;
pub mod metrics;
mod namespaces;
mod operations;
mod parts;
mod pins;
mod planner;
pub mod policy;
mod pool;
mod promotions;
mod remote;
mod requests;
mod residency;
pub mod resolve;
mod retention;
mod returns;
mod save_cursor;
mod sealed;
mod sessions;
pub mod slots;
mod verbs;
pub mod work;
mod writeback;

pub use clear::{ClearOrder, ClearRefusal, ClearWhat, Cleared};
pub use config::EngineConfig;
pub use hints::HintCursor;
pub use ids::SessionId;
pub use lookup_cursor::LookupCursor;
pub use residency::{Moves, NamespaceUsage, TierSize};
pub use save_cursor::{Granted, SaveLimit, SaveProgress, Transfer};
pub use verbs::{
    ChainBytes, Drained, Due, Engine, HitExtents, OperationCount, Recovery, ResizeOrder,
    ResizeRefusal, Resized, Room, SessionUsage, Started,
};
#[cfg(feature = "check")]
pub use verbs::{EngineView, Held};
