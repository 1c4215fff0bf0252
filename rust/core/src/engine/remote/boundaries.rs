//! Where a hit ends in the store if it needs windows or states: which boundaries to ask for.

use std::collections::VecDeque;

/// Boundaries of one round, as many as a probe may ask for.
const ROUND: usize = 64;
/// Rounds for the deepest boundaries, beside the round for the ends of segments.
const DEEP_ROUNDS: usize = 3;

/// The search for the deepest boundary that is in the store. Unlike a segment, a boundary in the store says nothing
/// about other boundaries. The first round probes the deepest boundaries, the next round the ends of segments, later
/// rounds more of the deepest: a prompt may end anywhere, and windows are kept at multiples of many tokens.
#[derive(Debug)]
pub(super) struct Boundaries {
    /// Boundaries in hash blocks, each round the deepest first.
    rounds: VecDeque<Vec<u32>>,
    asked: Vec<u32>,
    found: Option<u32>,
}

impl Boundaries {
    /// A search among the multiples of `step` in `(above, limit]` that are `usable`; segments end at multiples of
    /// `segment`.
    pub(super) fn new(
        (above, limit): (u32, u32),
        (step, segment): (u32, u32),
        usable: impl Fn(u32) -> bool,
    ) -> Self {
        let last = limit / step * step;
        let deep = (above + 1..=last).rev().step_by(step as usize);
        let of_rounds = ROUND * DEEP_ROUNDS;
        let mut deepest: Vec<u32> = deep.take(of_rounds).filter(|&at| usable(at)).collect();
        let rest = deepest.split_off(deepest.len().min(ROUND));
        let below = deepest.last().copied().unwrap_or(last + 1);
        let coarse = (above + 1..below).rev();
        let is_end = |at: &u32| at.is_multiple_of(segment) && at.is_multiple_of(step);
        let skip = coarse
            .clone()
            .take(segment as usize)
            .position(|at| at.is_multiple_of(segment));
        let ends: Vec<u32> = match skip {
            Some(skip) => coarse
                .skip(skip)
                .step_by(segment as usize)
                .take(ROUND)
                .filter(|at| is_end(at) && usable(*at))
                .collect(),
            None => Vec::new(),
        };
        let rest: Vec<u32> = rest.into_iter().filter(|at| !ends.contains(at)).collect();
        let mut rounds = VecDeque::from([deepest, ends]);
        rounds.extend(rest.chunks(ROUND).map(<[u32]>::to_vec));
        rounds.retain(|round| !round.is_empty());
        Self {
            rounds,
            asked: Vec::new(),
            found: None,
        }
    }

    /// Whether an answer is awaited.
    pub(super) fn is_asking(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The boundaries of the round in flight.
    pub(super) fn asked(&self) -> &[u32] {
        &self.asked
    }

    /// Whether no further answer is expected.
    pub(super) fn is_over(&self) -> bool {
        !self.is_asking() && self.rounds.is_empty()
    }

    /// The deepest boundary in the store, by the answers.
    pub(super) fn found(&self) -> Option<u32> {
        self.found
    }

    /// The boundaries to ask for in the next round.
    pub(super) fn next_round(&mut self) -> &[u32] {
        assert!(
            !self.is_asking(),
            "a round begins before the last has ended"
        );
        self.asked = self.rounds.pop_front().unwrap_or_default();
        &self.asked
    }

    /// Takes the answer of a round: one bit for each boundary. `None`: there was no answer, and the search ends.
    pub(super) fn answer(&mut self, bits: Option<u64>) {
        let asked = std::mem::take(&mut self.asked);
        let Some(bits) = bits else {
            self.rounds.clear();
            return;
        };
        let there = (0..).zip(asked).find(|(at, _)| bits >> at & 1 == 1);
        self.found = self.found.max(there.map(|(_, boundary)| boundary));
        let found = self.found.unwrap_or(0);
        for round in &mut self.rounds {
            round.retain(|&boundary| boundary > found);
        }
        self.rounds.retain(|round| !round.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches a store that has these boundaries: the boundary that is found, keys and rounds.
    fn search(range: (u32, u32), steps: (u32, u32), there: &[u32]) -> (Option<u32>, usize, u32) {
        let mut search = Boundaries::new(range, steps, |_| true);
        let (mut keys, mut rounds) = (0, 0);
        while !search.is_over() {
            let asked = search.next_round().to_vec();
            assert!(!asked.is_empty() && asked.len() <= 64, "{asked:?}");
            (keys, rounds) = (keys + asked.len(), rounds + 1);
            let bits = (0..).zip(&asked);
            let bits = bits.fold(0, |bits, (at, of)| {
                bits | u64::from(there.contains(of)) << at
            });
            search.answer(Some(bits));
        }
        (search.found(), keys, rounds)
    }

    #[test]
    fn the_deepest_boundary_of_a_short_prompt_is_found_in_one_round() {
        assert_eq!(search((0, 50), (1, 8), &[3, 30, 31]), (Some(31), 50, 1));
        assert_eq!(search((31, 50), (1, 8), &[3, 30, 31]), (None, 19, 1));
        assert_eq!(search((0, 7), (4, 8), &[4]), (Some(4), 1, 1));
        assert_eq!(search((4, 7), (4, 8), &[4]), (None, 0, 0));
    }

    #[test]
    fn every_boundary_of_128_steps_is_asked_for() {
        for there in 1..=128 {
            let (found, keys, rounds) = search((0, 128), (1, 8), &[there]);
            assert_eq!(found, Some(there));
            assert!(keys <= 128 && rounds <= 3, "{keys} keys in {rounds} rounds");
        }
    }

    #[test]
    fn a_long_prompt_takes_at_most_four_rounds_and_256_keys() {
        for there in (1..6000).step_by(7) {
            let (found, keys, rounds) = search((0, 6000), (1, 64), &[there]);
            let is_near = there > 6000 - 192;
            let is_end = there % 64 == 0 && there > 6000 - 64 - 64 * 65;
            assert_eq!(found.is_some(), is_near || is_end, "{there}");
            assert!(keys <= 256 && rounds <= 4, "{keys} keys in {rounds} rounds");
        }
    }

    #[test]
    fn boundaries_above_one_that_is_there_are_not_asked_for() {
        assert_eq!(search((0, 6000), (1, 64), &[5999]), (Some(5999), 64, 1));
        // The end of a segment is in the store: only deeper boundaries are of interest.
        let (found, keys, _) = search((0, 6000), (1, 64), &[5888]);
        assert_eq!(found, Some(5888));
        assert!(keys < 64 + 64 + 64, "{keys} keys");
    }

    #[test]
    fn boundaries_are_multiples_of_the_step() {
        let mut search = Boundaries::new((3, 50), (6, 24), |_| true);
        assert_eq!(search.next_round(), [48, 42, 36, 30, 24, 18, 12, 6]);
    }

    #[test]
    fn without_an_answer_the_search_ends() {
        let mut search = Boundaries::new((0, 1000), (1, 8), |at| at != 1000);
        assert_eq!(search.next_round()[0], 999);
        search.answer(None);
        assert!(search.is_over() && search.found().is_none());
    }
}
