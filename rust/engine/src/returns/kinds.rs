//! Kinds of conversations, whose pauses are counted together.

use undercroft_contract::session::TurnEnd;

/// Kinds that are remembered: sets of this many, of which the one with the least credit gives way.
const WAYS: usize = 8;
const SETS_LOG2: u32 = 8;

/// The common traits of conversations: the instance of their namespace, how often they have come back, up to 3, and more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) instance: u64,
    pub(super) turns: u8,
    pub(super) by: By,
}

/// By which a kind is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    /// The first block, which conversations with the same system prompt share, and how the last turn ended.
    First(u64, TurnEnd),
    /// How the last turn ended.
    End(TurnEnd),
    /// The octave of the depth.
    Depth(u8),
}

impl Kind {
    /// Whether the end of a turn tells the kind.
    pub(super) fn names_end(self) -> bool {
        match self.by {
            By::First(_, end) | By::End(end) => end.is_known(),
            By::Depth(_) => false,
        }
    }

    /// Distinguishes kinds; never 0. Two with one tag would cost predictions, no more.
    fn tag(self) -> u64 {
        let by = match self.by {
            By::First(first, end) => [1, first, u64::from(end.0)],
            By::End(end) => [2, 0, u64::from(end.0)],
            By::Depth(depth) => [3, 0, u64::from(depth)],
        };
        let words = [self.instance, u64::from(self.turns)].into_iter().chain(by);
        let mixed = words.fold(0_u64, |mixed, word| {
            let mixed = (mixed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ mixed >> 32
        });
        mixed.max(1)
    }
}

/// Half octaves of the unit of pauses.
const STEPS: usize = 48;

/// The pauses of a kind, which older ones enter with less weight.
#[derive(Clone, Copy, Debug)]
struct Pauses {
    steps: [u8; STEPS],
    /// Conversations that did not come back while they were remembered.
    never: u8,
    sum: u8,
    /// Falls whenever another kind of the set has to give way.
    credit: u8,
}

impl Pauses {
    const NONE: Self = Self {
        steps: [0; STEPS],
        never: 0,
        sum: 0,
        credit: 0,
    };
    const SUM_MAX: u8 = 128;
    /// Fewer pauses say nothing.
    const SUM_LEAST: u8 = 16;

    fn note(&mut self, pause: Option<u32>) {
        let of = pause.map(step_of);
        let count = of.map_or(&mut self.never, |step| &mut self.steps[step]);
        *count += 1;
        self.sum += 1;
        if self.sum == Self::SUM_MAX {
            self.steps.iter_mut().for_each(|count| *count /= 2);
            self.never /= 2;
            self.sum = self.steps.iter().sum::<u8>() + self.never;
        }
        // A new kind outlasts the next few, which else would replace each other beside kinds that are not counted any more.
        self.credit = self.sum + WAYS as u8;
    }

    fn say_something(&self) -> bool {
        self.sum >= Self::SUM_LEAST
    }

    /// The least and the greatest pause of the step, or of the two steps, that have seven eighths of all.
    fn narrow(&self) -> Option<(u64, u64)> {
        if !self.say_something() {
            return None;
        }
        let found = |count: usize| {
            let mut parts = self.steps.windows(count);
            let sum = |part: &[u8]| part.iter().map(|&of| u32::from(of)).sum::<u32>();
            let step = parts.position(|part| sum(part) * 8 >= u32::from(self.sum) * 7)?;
            Some((least_of(step), least_of(step + count)))
        };
        found(1).or_else(|| found(2))
    }
}

/// The half octave of a pause.
fn step_of(pause: u32) -> usize {
    let pause = pause.max(2);
    let octave = pause.ilog2();
    let half = pause >> (octave - 1) & 1;
    ((octave * 2 + half) as usize).min(STEPS - 1)
}

/// The least pause of a half octave.
fn least_of(step: usize) -> u64 {
    let octave = 1u64 << (step / 2);
    octave + octave / 2 * (step as u64 % 2)
}

/// The pauses of a fixed number of kinds. Most first blocks are of one conversation: such kinds come and go, and those
/// that are counted often stay.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    /// By set; 0: none. Empty before the first kind.
    tags: Vec<u64>,
    pauses: Vec<Pauses>,
}

impl Kinds {
    /// A conversation of a kind has come back after a pause, in units; `None`: it has not come.
    pub(super) fn count(&mut self, kind: Kind, pause: Option<u32>) {
        if self.tags.is_empty() {
            let places = WAYS << SETS_LOG2;
            self.tags = vec![0; places];
            self.pauses = vec![Pauses::NONE; places];
        }
        let tag = kind.tag();
        let set = set_of(tag);
        let own = self.tags[set.clone()].iter().position(|&of| of == tag);
        let place = match own {
            Some(at) => set.start + at,
            None => {
                let worth = |&at: &usize| (self.tags[at] != 0, self.pauses[at].credit);
                let place = set.clone().min_by_key(worth);
                let place = place.expect("a set has places");
                if self.tags[place] != 0 {
                    for of in &mut self.pauses[set.clone()] {
                        of.credit = of.credit.saturating_sub(1);
                    }
                }
                self.tags[place] = tag;
                self.pauses[place] = Pauses::NONE;
                place
            }
        };
        self.pauses[place].note(pause);
    }

    /// The least and the greatest pause of nearly all conversations of a kind, in units, if there are such pauses.
    pub(super) fn narrow(&self, kind: Kind) -> Option<(u64, u64)> {
        self.find(kind)?.narrow()
    }

    /// Whether enough pauses of a kind are known to say something.
    pub(super) fn knows(&self, kind: Kind) -> bool {
        self.find(kind).is_some_and(Pauses::say_something)
    }

    fn find(&self, kind: Kind) -> Option<&Pauses> {
        let tag = kind.tag();
        let set = set_of(tag);
        let at = self.tags.get(set.clone())?.iter().position(|&of| of == tag);
        Some(&self.pauses[set.start + at?])
    }
}

fn set_of(tag: u64) -> std::ops::Range<usize> {
    let set = (tag >> (u64::BITS - SETS_LOG2)) as usize * WAYS;
    set..set + WAYS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(first: u64) -> Kind {
        Kind {
            instance: 1,
            turns: 0,
            by: By::First(first, TurnEnd(5)),
        }
    }

    #[test]
    fn a_kind_with_many_pauses_outlasts_kinds_of_one_conversation() {
        let mut kinds = Kinds::default();
        for first in 1..200_000 {
            kinds.count(with(first), None);
            if first % 50 == 0 {
                kinds.count(with(0), Some(3000));
            }
        }
        let (least, most) = kinds.narrow(with(0)).expect("all pauses are alike");
        assert!((least..most).contains(&3000), "{least} {most}");
    }

    #[test]
    fn kinds_that_are_counted_no_more_give_way() {
        let mut kinds = Kinds::default();
        let many = (WAYS << SETS_LOG2) as u64 * 4;
        for (round, times) in [(0, 20), (1, 100)] {
            for _ in 0..times {
                for first in 0..many / 8 {
                    kinds.count(with(first + round * many), Some(3000));
                }
            }
        }
        let known = (0..many / 8).filter(|first| kinds.narrow(with(first + many)).is_some());
        let known = known.count() as u64;
        assert!(known > many / 8 * 9 / 10, "{known} of {}", many / 8);
    }
}
