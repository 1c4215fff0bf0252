//! Where a chain of segments ends in the store: which segments to probe.

/// Segments that are fetched at once, without a probe.
pub(super) const FETCHED: u32 = 2;
/// Most segments of one search. Two rounds probe at most 128 of them.
pub(super) const SEGMENTS_MAX: u32 = 4096;

/// The search for the end of a chain, in two rounds of about the square root of its segments: first evenly spread
/// segments, then the segments between the last present and the first absent. If the store has a segment, it probably
/// has the segments before, too.
#[derive(Debug)]
pub(super) struct Search {
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

impl Search {
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

    /// A search that has ended: the store is known to have this many pieces.
    pub(super) fn known(pieces: u32) -> Self {
        Self {
            present: pieces,
            absent: pieces,
            stride: 1,
            round: 2,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches a store that has the first `there` of `segments` segments: the end that is found, requests and rounds.
    fn search(segments: u32, there: u32) -> (u32, usize, u32) {
        let mut search = Search::new(segments);
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
    fn what_stands_behind_a_hole_does_not_count() {
        let mut search = Search::new(100);
        let asked = search.next_round().to_vec();
        assert_eq!(asked, [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]);
        search.answer(Some(0b11_1111_1101));
        assert_eq!(search.present(), 10);
        assert_eq!(search.next_round(), [10, 11, 12, 13, 14, 15, 16, 17, 18]);
    }

    #[test]
    fn without_an_answer_what_is_known_counts() {
        let mut search = Search::new(100);
        search.next_round();
        search.answer(None);
        assert!(search.is_over());
        assert_eq!(search.present(), FETCHED);
    }
}
