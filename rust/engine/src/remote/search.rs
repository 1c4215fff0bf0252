//! Which objects the store has: the end of a chain of segments, or the deepest boundary of a prompt whose hits need
//! windows or states.

use std::collections::VecDeque;

use super::pieces::Piece;

/// Segments that are fetched at once, without a probe.
pub(super) const FETCHED: u32 = 2;
/// Most segments of one search. Two rounds probe at most 128 of them.
pub(super) const SEGMENTS_MAX: u32 = 4096;
/// Boundaries of one round, as many as a probe may ask for.
const ROUND: usize = 64;
/// Rounds for the deepest boundaries, beside the round for the ends of segments.
const DEEP_ROUNDS: usize = 3;

/// The search for the objects of a flight that the store has.
#[derive(Debug)]
pub(super) enum Search {
    /// With full attention alone: the end of a chain.
    Segments(Segments),
    /// Where a hit needs windows or states: a boundary.
    Boundary(BoundarySearch),
}

/// The search for a boundary, and the objects of the boundary that was found.
#[derive(Debug)]
pub(super) struct BoundarySearch {
    pub(super) boundaries: Boundaries,
    /// The objects of a hit at the boundary, in the order of their gets; empty before one was found.
    pub(super) pieces: Vec<Piece>,
    /// Number of the first object that does not arrive.
    end: u32,
}

impl BoundarySearch {
    pub(super) fn new(boundaries: Boundaries) -> Self {
        Self {
            boundaries,
            pieces: Vec::new(),
            end: 0,
        }
    }

    /// Sets the objects of the boundary that was found.
    pub(super) fn set_pieces(&mut self, pieces: Vec<Piece>) {
        self.end = pieces.len() as u32;
        self.pieces = pieces;
    }
}

impl Search {
    /// Whether the objects are usable only together, for a hit that needs windows or states.
    pub(super) fn is_for_boundary(&self) -> bool {
        matches!(self, Self::Boundary(_))
    }

    /// The objects of the boundary that was found.
    pub(super) fn pieces(&self) -> &[Piece] {
        match self {
            Self::Segments(_) => &[],
            Self::Boundary(of) => &of.pieces,
        }
    }

    /// Whether an answer is awaited.
    pub(super) fn is_asking(&self) -> bool {
        !self.asked().is_empty()
    }

    /// The segments, or the boundaries, of the round in flight.
    pub(super) fn asked(&self) -> &[u32] {
        match self {
            Self::Segments(of) => of.asked(),
            Self::Boundary(of) => of.boundaries.asked(),
        }
    }

    /// Whether no further answer is expected.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Segments(of) => of.is_over(),
            Self::Boundary(of) => of.boundaries.is_over(),
        }
    }

    /// How many objects may be fetched, as far as is known.
    pub(super) fn present(&self) -> u32 {
        match self {
            Self::Segments(of) => of.present(),
            Self::Boundary(of) => of.end,
        }
    }

    /// The segments, or the boundaries, to ask for in the next round.
    pub(super) fn next_round(&mut self) -> &[u32] {
        match self {
            Self::Segments(of) => of.next_round(),
            Self::Boundary(of) => of.boundaries.next_round(),
        }
    }

    /// Notes that neither an object nor the objects behind it arrive.
    pub(super) fn ends_at(&mut self, object: u32) {
        match self {
            Self::Segments(of) => of.ends_at(object),
            Self::Boundary(of) => of.end = of.end.min(object),
        }
    }
}

/// The search for the end of a chain, in two rounds of about the square root of its segments: first evenly spread
/// segments, then the segments between the last present and the first absent. If the store has a segment, it probably
/// has the segments before, too.
#[derive(Debug)]
pub(super) struct Segments {
    /// Number of segments that the store has, by the answers.
    present: u32,
    /// The first segment that the store lacks, by the answers; the number of segments if it lacks none.
    absent: u32,
    /// The distance of the segments of the first round.
    stride: u32,
    /// The next round, from 0.
    round: u8,
    /// The segments of the round in flight.
    asked: Vec<u32>,
}

impl Segments {
    /// A search among `segments` segments, at most [`SEGMENTS_MAX`].
    pub(super) fn new(segments: u32) -> Self {
        assert!(segments <= SEGMENTS_MAX, "a chain of {segments} segments");
        let mut stride = 1;
        while stride * stride < segments {
            stride += 1;
        }
        Self {
            present: FETCHED.min(segments),
            absent: segments,
            stride,
            round: 0,
            asked: Vec::new(),
        }
    }

    /// Whether an answer is awaited.
    pub(super) fn is_asking(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The segments of the round in flight.
    pub(super) fn asked(&self) -> &[u32] {
        &self.asked
    }

    /// Whether the search has ended.
    pub(super) fn is_over(&self) -> bool {
        !self.is_asking() && self.is_last()
    }

    fn is_last(&self) -> bool {
        self.round == 2 || self.present >= self.absent
    }

    /// How many segments may be fetched: the segments that the store has by the answers so far.
    pub(super) fn present(&self) -> u32 {
        self.present.min(self.absent)
    }

    /// The segments, counted from 0, to probe in the next round.
    pub(super) fn next_round(&mut self) -> &[u32] {
        assert!(
            !self.is_asking(),
            "a round begins before the last has ended"
        );
        if !self.is_last() {
            let (from, to, stride) = match self.round {
                0 => (self.stride - 1, self.absent, self.stride as usize),
                _ => (self.present, self.absent, 1),
            };
            let known = self.present;
            let spread = (from..to).step_by(stride);
            self.asked = spread.filter(|&segment| segment >= known).collect();
            let last = self.absent - 1;
            if self.round == 0 && self.asked.last().is_none_or(|&of| of < last) {
                self.asked.push(last);
            }
            self.round += 1;
        }
        &self.asked
    }

    /// Takes the answer of a round: one bit for each segment. `None`: there was no answer, and the search ends.
    pub(super) fn answer(&mut self, bits: Option<u64>) {
        let asked = std::mem::take(&mut self.asked);
        let Some(bits) = bits else {
            self.round = 2;
            self.absent = self.present;
            return;
        };
        let missing = (0..).zip(&asked).find(|(at, _)| bits >> at & 1 == 0);
        let before = missing.map_or(asked.len(), |(at, _)| at);
        if let Some((_, &segment)) = missing {
            self.absent = self.absent.min(segment);
        }
        if let Some(&segment) = before.checked_sub(1).and_then(|last| asked.get(last)) {
            self.present = self.present.max(segment + 1);
        }
        if self.round == 2 {
            self.absent = self.absent.min(self.present);
        }
    }

    /// Notes that the store lacks a segment, whatever the answers were.
    pub(super) fn ends_at(&mut self, segment: u32) {
        self.absent = self.absent.min(segment);
    }
}

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
mod segment_tests {
    use super::*;

    /// Searches a store that has the first `there` of `segments` segments: the end that is found, requests and rounds.
    fn search(segments: u32, there: u32) -> (u32, usize, u32) {
        let mut search = Segments::new(segments);
        let (mut requests, mut rounds) = (0, 0);
        while !search.is_over() {
            let asked = search.next_round().to_vec();
            if asked.is_empty() {
                break;
            }
            (requests, rounds) = (requests + asked.len(), rounds + 1);
            assert!(asked.len() <= 64 && asked.is_sorted(), "{asked:?}");
            let bits = (0..).zip(&asked);
            let bits = bits.fold(0, |bits, (at, &of)| bits | u64::from(of < there) << at);
            search.answer(Some(bits));
        }
        (search.present(), requests, rounds)
    }

    #[test]
    fn the_end_is_found_wherever_it_is() {
        for segments in (1..70).chain([100, 1000, 1024, 4096]) {
            for there in (0..=segments).step_by(1 + segments as usize / 90) {
                let (found, ..) = search(segments, there);
                // The first two segments are fetched whatever the answers are.
                assert_eq!(
                    found,
                    there.max(FETCHED.min(segments)),
                    "{there} of {segments}"
                );
            }
        }
    }

    #[test]
    fn a_thousand_segments_take_seventy_requests_and_two_rounds() {
        for there in 0..=1024 {
            let (_, requests, rounds) = search(1024, there);
            assert!(
                requests + FETCHED as usize <= 70 && rounds <= 2,
                "{requests} requests in {rounds} rounds for {there}"
            );
        }
    }

    #[test]
    fn a_short_chain_is_not_probed() {
        assert_eq!(search(1, 1), (1, 0, 0));
        assert_eq!(search(2, 2), (2, 0, 0));
    }

    #[test]
    fn segments_behind_a_hole_do_not_count() {
        let mut search = Segments::new(100);
        let asked = search.next_round().to_vec();
        assert_eq!(asked, [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]);
        search.answer(Some(0b11_1111_1101));
        assert_eq!(search.present(), 10);
        assert_eq!(search.next_round(), [10, 11, 12, 13, 14, 15, 16, 17, 18]);
    }

    #[test]
    fn known_segments_count_without_an_answer() {
        let mut search = Segments::new(100);
        search.next_round();
        search.answer(None);
        assert!(search.is_over());
        assert_eq!(search.present(), FETCHED);
    }
}

#[cfg(test)]
mod boundary_tests {
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
