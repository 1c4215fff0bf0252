//! Benchmarks that the command line and `cargo bench` share.
