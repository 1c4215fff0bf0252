//! The disk tier on real files: faults of the device, damage to the files, crashes, capacities,
//! several models and several devices. No wrong byte is ever served.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod changed;
mod child;
mod clear;
mod crash;
mod damage;
mod encrypted;
mod ends;
mod faults;
mod long_chains;
mod orders;
mod recency;
mod rig;
mod space;
mod start;
mod stores;
mod threads;
