//! How long a step of a vLLM takes, learned from the steps that its connector reports.

use undercroft_contract::session::Step;

/// Steps with a prefill after which the model counts as known.
const KNOWN: u32 = 8;
/// A step with fewer prefill tokens says little of the computing time.
const PREFILL: u32 = 16;
/// Share of the old steps that stays when a new one comes: about the last 32 count. Steps with and without a prefill
/// count apart, since there are many without between two with a prefill.
const KEEP: f64 = 1.0 - 1.0 / 32.0;
/// A step counts as at most this multiple of its prediction: a step in which the process was delayed says nothing.
const CLIP: f64 = 3.0;
/// The fastest of about this many recent steps with a prefill bounds the time of computing from below. A delay of the
/// process makes a step longer, and nothing makes a step shorter than its computing.
const RECENT: f64 = 32.0;
/// The least part of a prediction that is taken for certain.
const CERTAIN: f64 = 0.5;
/// The assumption before the first measurement: 2 ms, and 20,000 tokens a second.
const PRIOR: [f64; TERMS] = [2e6, 50e6, 0.0, 0.0];
/// The weight of the assumption about each term, as a part of the steps' weight in the term. Where the steps do not
/// distinguish the terms, the model attributes most of the time to the tokens.
const PRIOR_WEIGHTS: [f64; TERMS] = [0.03, 0.001, 0.01, 0.01];

const TERMS: usize = 4;

/// Sums over steps, from which least squares follow.
#[derive(Clone, Copy, Debug, Default)]
struct StepSums {
    products: [[f64; TERMS]; TERMS],
    times: [f64; TERMS],
}

impl StepSums {
    fn add(&mut self, terms: [f64; TERMS], ns: f64, weight: f64) {
        for (row, &term) in terms.iter().enumerate() {
            for (column, &other) in terms.iter().enumerate() {
                let sum = &mut self.products[row][column];
                *sum = *sum * KEEP + weight * term * other;
            }
            self.times[row] = self.times[row] * KEEP + weight * term * ns;
        }
    }
}

/// `s0 + c1 tokens + c2 positions + c3 decodes` nanoseconds, none of them negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepModel {
    prefills: StepSums,
    decodes: StepSums,
    /// Nanoseconds for a step, for 1,000 tokens, for a million positions, and for 100 decodes.
    factors: [f64; TERMS],
    prefill_steps: u32,
    /// Most tokens of prefill of a step.
    chunk: u32,
    /// Decodes of the last step.
    running: u32,
    /// The part of the predicted time that a prefill takes at least.
    certain: f64,
}

impl Default for StepModel {
    fn default() -> Self {
        Self {
            prefills: StepSums::default(),
            decodes: StepSums::default(),
            factors: PRIOR,
            prefill_steps: 0,
            chunk: 1,
            running: 0,
            certain: 1.0,
        }
    }
}

fn terms(tokens: u32, positions: u64, decodes: u32) -> [f64; TERMS] {
    [
        1.0,
        f64::from(tokens) / 1e3,
        positions as f64 / 1e6,
        f64::from(decodes) / 1e2,
    ]
}

fn dot(a: [f64; TERMS], b: [f64; TERMS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl StepModel {
    /// Takes the time of one step. A step without tokens and decodes means that nothing runs.
    pub(super) fn add(&mut self, step: &Step) {
        self.running = step.decodes;
        if step.tokens == 0 && step.decodes == 0 {
            return;
        }
        let terms = terms(step.tokens, step.positions, step.decodes);
        let expected = dot(terms, self.factors).max(1e3);
        let mut ns = step.duration_ns as f64;
        if self.is_known() {
            if step.tokens.saturating_mul(4) >= self.chunk {
                self.note_part(ns / expected);
            }
            ns = ns.min(expected * CLIP);
        }
        // The fit weighs the error as a share of the step's time: a long step counts no more than a short one.
        let weight = 1.0 / (ns.max(1e5) * ns.max(1e5));
        if step.tokens >= PREFILL {
            self.chunk = self.chunk.max(step.tokens);
            self.prefill_steps = self.prefill_steps.saturating_add(1);
            self.prefills.add(terms, ns, weight);
        } else {
            self.decodes.add(terms, ns, weight);
        }
        self.fit();
    }

    /// Notes which part of its prediction a long step has taken.
    fn note_part(&mut self, part: f64) {
        let part = part.clamp(CERTAIN, 1.0);
        self.certain = part.min(self.certain + (part - self.certain) / RECENT);
    }

    fn fit(&mut self) {
        let mut products = [[0.0; TERMS]; TERMS];
        let mut times = [0.0; TERMS];
        for row in 0..TERMS {
            times[row] = self.prefills.times[row] + self.decodes.times[row];
            for (column, product) in products[row].iter_mut().enumerate() {
                *product = self.prefills.products[row][column] + self.decodes.products[row][column];
            }
        }
        // The assumption decides where the steps do not distinguish two terms, or lack a term. Each term has its own
        // weight: short steps say much about the time of a step, and nothing about positions.
        for term in 0..TERMS {
            let scale = (PRIOR_WEIGHTS[term] * products[term][term]).max(f64::MIN_POSITIVE);
            products[term][term] += scale;
            times[term] += scale * PRIOR[term];
        }
        self.factors = not_negative(&products, &times);
    }

    /// The least part of its predicted time that computing takes, by the fastest of the recent steps.
    pub(super) fn certain_part(&self) -> f64 {
        self.certain
    }

    /// Whether enough steps were seen.
    pub(super) fn is_known(&self) -> bool {
        self.prefill_steps >= KNOWN
    }

    /// The computing time that a prompt of `end` tokens saves if the tokens between `from` and `to` need not be
    /// computed, in nanoseconds: their share of steps, and the steps that are not run.
    pub(super) fn saved_ns(&self, from: u32, to: u32, end: u32) -> f64 {
        // At least the prompt's last token is computed, even if all tokens are cached.
        let steps = |tokens: u32| (tokens.saturating_add(1)).div_ceil(self.chunk.max(1));
        let (left, less) = (end.saturating_sub(from), end.saturating_sub(to));
        let fewer = f64::from(steps(left) - steps(less));
        let to_f = f64::from(to);
        let from_f = f64::from(from);
        let [step, per_1k, per_1m, per_100] = self.factors;
        fewer * (step + per_100 * f64::from(self.running) / 1e2)
            + (to_f - from_f) / 1e3 * per_1k
            + (to_f * to_f - from_f * from_f) / 2e6 * per_1m
    }

    /// Time of a step of the decoding requests; 0 if there are none.
    pub(super) fn turn_ns(&self) -> f64 {
        let [step, _, _, per_100] = self.factors;
        match self.running {
            0 => 0.0,
            decodes => step + per_100 * f64::from(decodes) / 1e2,
        }
    }

    /// Nanoseconds for computing `tokens` of other prompts, which are computed before.
    pub(super) fn queue_ns(&self, tokens: u32) -> f64 {
        f64::from(tokens) / 1e3 * self.ns_per_1k(0)
    }

    /// Nanoseconds for 1,000 tokens at a position of a long prompt.
    pub(super) fn ns_per_1k(&self, position: u32) -> f64 {
        let [step, per_1k, per_1m, _] = self.factors;
        per_1k + f64::from(position) / 1e3 * per_1m + step * 1e3 / f64::from(self.chunk.max(1000))
    }
}

/// Least squares without negative factors: a factor that would be negative is zero, and the others are fitted again.
fn not_negative(products: &[[f64; TERMS]; TERMS], times: &[f64; TERMS]) -> [f64; TERMS] {
    let mut counts = [true; TERMS];
    loop {
        let factors = solve(*products, *times, counts);
        let lowest = (0..TERMS)
            .filter(|&term| counts[term] && factors[term] < 0.0)
            .min_by(|&a, &b| factors[a].total_cmp(&factors[b]));
        match lowest {
            None => return factors,
            Some(term) => counts[term] = false,
        }
    }
}

/// Gauss-Jordan over the terms that count; the others are zero.
fn solve(
    mut products: [[f64; TERMS]; TERMS],
    mut times: [f64; TERMS],
    counts: [bool; TERMS],
) -> [f64; TERMS] {
    for term in (0..TERMS).filter(|&term| !counts[term]) {
        products[term] = [0.0; TERMS];
        products.iter_mut().for_each(|row| row[term] = 0.0);
        (products[term][term], times[term]) = (1.0, 0.0);
    }
    for pivot in 0..TERMS {
        let by = products[pivot][pivot].max(f64::MIN_POSITIVE);
        let (row, time) = (products[pivot], times[pivot]);
        for other in (0..TERMS).filter(|&other| other != pivot) {
            let factor = products[other][pivot] / by;
            for (left, &right) in products[other].iter_mut().zip(&row) {
                *left -= factor * right;
            }
            times[other] -= factor * time;
        }
    }
    std::array::from_fn(|term| times[term] / products[term][term].max(f64::MIN_POSITIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 3 ms, 40 us a token, 10 ns a position, 0.1 ms a decode.
    fn step(tokens: u32, position: u64, decodes: u32) -> Step {
        let positions = u64::from(tokens) * (position + u64::from(tokens) / 2);
        let duration_ns =
            3_000_000 + 40_000 * u64::from(tokens) + 10 * positions + 100_000 * u64::from(decodes);
        Step {
            tokens,
            positions,
            decodes,
            duration_ns,
        }
    }

    fn learned(steps: impl Iterator<Item = Step>) -> StepModel {
        let mut model = StepModel::default();
        steps.for_each(|step| model.add(&step));
        model
    }

    fn assert_near(model: &StepModel, (from, to, end): (u32, u32, u32), expected_ms: f64) {
        let error = model.saved_ns(from, to, end) / 1e6 / expected_ms;
        assert!(
            (0.9..1.1).contains(&error),
            "{error} of {expected_ms} ms: {model:?}"
        );
    }

    #[test]
    fn time_of_a_prefix_follows_from_steps_with_other_prompts_and_decodes_in_them() {
        let steps = (0..200).map(|i| {
            step(
                [512, 300, 0, 100][i % 4],
                512 * (i as u64 % 9),
                (i as u32 % 7) * 4,
            )
        });
        let mut model = learned(steps);
        assert!(model.is_known());
        model.add(&step(0, 0, 0));
        // The saving is eight steps of 512 tokens, 4,096 tokens, and their positions.
        assert_near(
            &model,
            (0, 4096, 4097),
            8.0 * 3.0 + 4096.0 * 0.04 + 4096.0 * 4096.0 / 2.0 * 1e-5,
        );
        // The last step is taken in any case.
        assert_near(
            &model,
            (0, 256, 400),
            256.0 * 0.04 + 256.0 * 256.0 / 2.0 * 1e-5,
        );
    }

    #[test]
    fn short_steps_do_not_hide_that_later_tokens_take_longer() {
        // Loads leave steps with one token, twice for each prompt that is computed. A position takes 65 ns: half of the
        // time of the longest prompt.
        let of = |i: usize| match i % 6 {
            0 => (2049, 4_000_000 + 57_000 * 2049 + 65 * 2049 * 2049 / 2),
            3 => (513, 4_000_000 + 57_000 * 513 + 65 * 513 * 513 / 2),
            _ => (1, 4_000_000),
        };
        let step = |(tokens, duration_ns): (u32, u64)| Step {
            tokens,
            positions: u64::from(tokens) * u64::from(tokens) / 2,
            decodes: 0,
            duration_ns,
        };
        let model = learned((0..120).map(|i| step(of(i))));
        assert_near(
            &model,
            (0, 2048, 2049),
            2048.0 * 0.057 + 2048.0 * 2048.0 / 2.0 * 65e-6,
        );
    }

    #[test]
    fn the_step_of_the_last_token_is_not_saved() {
        let model = learned((0..40).map(|i| step([512, 256][i % 2], 0, 0)));
        let [whole, but_one] = [256, 257].map(|end| model.saved_ns(0, 256, end));
        assert_eq!(whole, but_one);
    }

    #[test]
    fn prefills_are_not_forgotten_in_a_long_run_of_decodes() {
        let prefills = (0..40).map(|i| step(512, 512 * (i % 8), 3));
        let decodes = (0..5000).map(|i| step(0, 0, 10 + i % 20));
        let mut model = learned(prefills.chain(decodes));
        model.add(&step(0, 0, 0));
        assert_near(
            &model,
            (0, 2048, 2049),
            4.0 * 3.0 + 2048.0 * 0.04 + 2048.0 * 2048.0 / 2.0 * 1e-5,
        );
    }

    #[test]
    fn a_step_in_which_the_process_was_held_up_says_little() {
        let steps = (0..60).map(|i| step(512, 512 * (i % 8), 0));
        let mut model = learned(steps);
        let before = model.saved_ns(0, 2048, 2049);
        model.add(&Step {
            duration_ns: 30_000_000_000,
            ..step(512, 0, 0)
        });
        assert!(model.saved_ns(0, 2048, 2049) < 1.2 * before, "{model:?}");
    }

    #[test]
    fn the_certain_part_follows_the_fastest_of_the_recent_steps() {
        let held_up = |i: u64| Step {
            duration_ns: step(512, 0, 0).duration_ns * if i.is_multiple_of(5) { 1 } else { 2 },
            ..step(512, 0, 0)
        };
        let mut model = learned((0..60).map(held_up));
        let predicted = model.saved_ns(0, 512, 1025);
        let least = step(512, 0, 0).duration_ns as f64;
        assert!(predicted > 1.3 * least, "the mean: {model:?}");
        let certain = predicted * model.certain_part();
        assert!(
            (0.85..1.1).contains(&(certain / least)),
            "{certain} of {least}: {model:?}"
        );
        // One fast step is enough, and counts until many others have come.
        model.add(&step(512, 0, 0));
        let certain = model.saved_ns(0, 512, 1025) * model.certain_part();
        assert!(certain < 1.1 * least, "{certain} of {least}: {model:?}");
        (0..300).for_each(|i| model.add(&step(512, 512 * (i % 8), 0)));
        assert!(model.certain_part() > 0.95, "{model:?}");
    }

    #[test]
    fn a_turn_is_a_step_of_those_that_decode_and_nothing_once_they_have_finished() {
        let steps = (0..60).map(|i| step(512 * (i as u32 % 2), 0, 4 + i as u32 % 8));
        let mut model = learned(steps);
        model.add(&step(0, 0, 8));
        let error = model.turn_ns() / 3.8e6;
        assert!((0.9..1.1).contains(&error), "{error}: {model:?}");
        let before = model.factors;
        model.add(&Step::default());
        assert_eq!((model.turn_ns(), model.factors), (0.0, before));
    }

    #[test]
    fn before_any_step_20_000_tokens_a_second_are_assumed() {
        let model = StepModel::default();
        assert!(!model.is_known());
        assert!((model.ns_per_1k(0) / 50e6 - 1.0).abs() < 0.1);
    }

    #[test]
    fn steps_that_hardly_differ_give_no_negative_factor() {
        let mut model = StepModel::default();
        for i in 0..100_u64 {
            let noise = i * 7919 % 2_000_000;
            model.add(&Step {
                duration_ns: 20_000_000 - noise,
                ..step(512, i % 3, (i % 5) as u32)
            });
            assert!(
                model.factors.iter().all(|&factor| factor >= 0.0),
                "{model:?}"
            );
        }
    }
}
