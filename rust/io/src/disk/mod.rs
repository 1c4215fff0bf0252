//! A disk directory: its files, their sizes, and who may use them.

mod error;
mod files;
mod fit_table;
mod holder;
mod holes;
pub mod inspect;
mod names;
pub mod open;
pub mod patient;
mod space;
mod table;
mod way;

pub use error::StoreError;
