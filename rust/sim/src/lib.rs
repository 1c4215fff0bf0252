//! The simulator: whole lives of the engine from a seed.
