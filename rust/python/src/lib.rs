//! The extension module `undercroft._core`.
