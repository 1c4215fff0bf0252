//! The times of one vLLM: its steps, and the copies of its workers.

use super::super::ids::SessionId;
use super::Reading;
use super::line::{COPIES, Line};
use super::plan::{self, Wait, Way};
use super::step_model::StepModel;

/// The measurements of one vLLM.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) steps: StepModel,
    /// Times from the begin of a load to the end of its copies, less the step that runs meanwhile.
    pub(super) copies: Line,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            steps: StepModel::default(),
            copies: Line::new(COPIES),
        }
    }
}

/// A prompt, in tokens from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    pub(crate) session: SessionId,
    /// Tokens that the device holds.
    pub(crate) computed: u32,
    /// Tokens to compute or load, from the start of the prompt.
    pub(crate) end: u32,
    /// Tokens that vLLM computes before this prompt.
    pub(crate) queued: u32,
    /// About the number of bytes that a load copies for each token.
    pub(crate) bytes_per_token: f64,
}

impl Model {
    /// The time of a wait of `wait_ns` nanoseconds, and of the rest of the step in which it ends: vLLM looks up again
    /// once a step. On average the wait ends in the middle of a step.
    pub(super) fn until_asked_ns(&self, wait_ns: f64) -> f64 {
        if wait_ns <= 0.0 {
            return 0.0;
        }
        let turn_ns = self.steps.turn_ns();
        wait_ns.max(turn_ns / 2.0) + turn_ns / 2.0
    }

    /// A load up to `to`: the computing that the load saves, and the time of its copy. vLLM computes the remaining
    /// tokens in the step after the step of the copy.
    pub(super) fn way(&self, prompt: &Prompt, to: u32) -> Way {
        if to <= prompt.computed {
            return Way::NONE;
        }
        let bytes = (f64::from(to - prompt.computed) * prompt.bytes_per_token) as u64;
        Way {
            saved_ns: self.steps.saved_ns(prompt.computed, to, prompt.end),
            cost_ns: self.copies.of(bytes) + self.steps.turn_ns(),
        }
    }

    /// A wait for the tokens up to `boundary`, in blocks of `block` tokens. The tokens up to `arrived` have arrived.
    pub(super) fn wait(
        &self,
        prompt: &Prompt,
        (arrived, boundary, block): (u32, u32, u32),
        waited_ns: f64,
    ) -> Wait {
        let tokens = f64::from(boundary.saturating_sub(prompt.computed).max(1));
        let here = arrived.max(prompt.computed);
        let all = self.way(prompt, boundary);
        let computed_ns = all.saved_ns + self.steps.queue_ns(prompt.queued);
        Wait {
            waited_ns,
            compute_ns: computed_ns * self.steps.certain_part(),
            arrived: f64::from(here - prompt.computed) / tokens,
            block: f64::from(block) / tokens,
            all,
            here: self.way(prompt, here),
            rest_ns: None,
        }
    }

    /// Whether the guarantee would end a wait in which the tokens from `from` to `to` take `slower` times as long as
    /// predicted.
    pub(super) fn is_cut_short(
        &self,
        prompt: &Prompt,
        (from, to): (u32, u32),
        reading: &Reading,
        slower: f64,
        margin: f64,
    ) -> bool {
        let blocks = to
            .saturating_sub(from)
            .div_ceil(reading.block.max(1))
            .max(1);
        let [first_ns, all_ns] = [reading.first_ns, reading.all_ns].map(|ns| ns * slower);
        let block_ns = (all_ns - first_ns) / f64::from((blocks - 1).max(1));
        let turn_ns = self.steps.turn_ns();
        // From the second block on, the loss only grows or only falls: it is largest at the second or the last block.
        let is_ended_before = |block: u32| {
            let comes_ns = first_ns + f64::from(block) * block_ns;
            // The scheduler looks up once a step: the last lookup before the block arrives counts.
            let asked_ns = if turn_ns > 0.0 {
                ((comes_ns / turn_ns).ceil() - 1.0) * turn_ns
            } else {
                comes_ns
            };
            if asked_ns <= 0.0 {
                return false;
            }
            let arrived = if asked_ns < first_ns || block == 0 {
                0
            } else {
                block.min(1 + ((asked_ns - first_ns) / block_ns) as u32)
            };
            let arrived = from + (arrived * reading.block).min(to - from);
            let wait = self.wait(prompt, (arrived, to, reading.together), asked_ns);
            plan::stop(&wait, margin).is_some()
        };
        [0, 1, blocks - 1]
            .into_iter()
            .any(|block| block < blocks && is_ended_before(block))
    }
}
