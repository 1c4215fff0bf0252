//! The engine: a single-threaded state machine that owns index, slots, transfers and disk bookkeeping.
//!
//! It has no threads, no clock, no system calls and no randomness of its own. Commands and IO
//! completions go in, answers and IO requests come out, and each entry does bounded work. The driver
//! (`crate::driver`) gives it threads; the simulator (`rust/sim`) gives it whole lives from a seed.
//!
//! [`Engine`] coordinates parts that own their fields:
//!
//! - `residency`: which payload is in which tier, and which may be evicted;
//! - `fetch`: what each request waits for and keeps in the arena, and for how long requests wait;
//! - `promotions`: disk to arena, for the requests that wait;
//! - `writeback`: arena to disk, payloads and their records;
//! - `checksums`: which payloads in the arena are to be summed, behind saves and before hits;
//! - `namespaces`: the namespace tables, and resets;
//! - `sessions`: sessions, their lookups, and the transfers of their workers;
//! - `events`: the changes in the tiers, for sessions that ask; `departures`, for `explain`: how blocks left the tiers;
//! - `changes`: what residency and the remote store make known to `events` and `departures`;
//! - `pins`: leases that hints ask for, with their budget; `hints` carries out hints of every kind;
//! - `planner`: whether loading or computing takes less time, by measurement;
//! - `remote`: the remote store, and the segments that are read from it or written to it;
//! - `ages`: the times of the ticks;
//! - `clear` removes blocks by their namespace or age, `drain` begins no save and no promotion, `resize` sets the
//!   tiers' sizes;
//! - `operations`: the purpose of each IO operation in flight;
//! - `jobs`: the table of all that is done beside requests, a part in each turn of the IO thread.
//!
//! A part calls no other part but residency, and residency calls none. An effect on another part is a return value,
//! which the engine passes on: `lookup`, `load`, `save`, `io`, `reset` and `recover` do so for one kind of
//! command each.

mod ages;
mod changes;
#[cfg(feature = "check")]
mod check;
mod checksums;
mod clear;
mod config;
mod coordinator;
mod departures;
mod drain;
#[cfg(feature = "check")]
mod ensure;
mod events;
mod explain;
mod fetch;
mod hints;
mod ids;
mod io;
mod jobs;
mod load;
mod lookup;
mod lookup_cursor;
mod namespaces;
mod operations;
mod parts;
mod pins;
mod planner;
mod promotions;
mod recover;
mod remote;
mod requests;
mod reset;
mod residency;
mod resize;
mod retention;
mod save;
mod save_cursor;
mod sealed;
mod served;
mod sessions;
mod writeback;

#[cfg(feature = "check")]
pub use check::Held;
pub use clear::{ClearOrder, ClearRefusal, ClearWhat, Cleared};
pub use config::EngineConfig;
pub use coordinator::Engine;
pub use drain::Drained;
pub use hints::HintCursor;
pub use ids::SessionId;
pub use io::OperationCount;
pub use jobs::{Due, Room, Started};
pub use lookup_cursor::LookupCursor;
pub use recover::Recovery;
pub use residency::{Moves, TierSize};
pub use resize::{ResizeOrder, ResizeRefusal, Resized};
pub use save::{Granted, SaveLimit, SaveProgress, Transfer};
pub use served::{ChainBytes, HitExtents, SessionUsage};
