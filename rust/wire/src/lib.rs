//! The Unix socket between processes: frames, and the arena's descriptor for the workers.
