//! The depths at which a learning policy counts blocks.
//!
//! A hit uses each block above its end. To count them all would make a hit as dear as its prompt is long; to count only
//! its end would hide the blocks that many prompts share. So the policy counts the blocks at the depths 1 to 8, and at
//! four depths of each octave behind them. Each of them stands for the blocks since the depth before.

/// Depths up to here all count.
const DENSE: u32 = 8;

/// Number of blocks for which a block at `depth` stands; 0 if the policy does not count it.
pub(crate) fn weight(depth: u32) -> u32 {
    if depth <= DENSE {
        return u32::from(depth > 0);
    }
    let step = step(depth);
    if depth.is_power_of_two() {
        step / 2
    } else if depth.is_multiple_of(step) {
        step
    } else {
        0
    }
}

/// The depths that count, up to `depth`, in ascending order.
pub fn sampled_depths(depth: u32) -> impl Iterator<Item = u32> {
    let next = |&at: &u32| at.checked_add(if at < DENSE { 1 } else { step(at) });
    std::iter::successors(Some(1), next).take_while(move |&at| at <= depth)
}

/// A quarter of the octave that begins at or before `depth`.
fn step(depth: u32) -> u32 {
    1 << (depth.ilog2() - 2)
}
