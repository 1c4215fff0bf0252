//! Turns that end with a tool call come back after the tool's time, others when a person likes: the engine learns which.

use undercroft_contract::session::TurnEnd;

use super::{FIRST, Life, Random, SECOND, Sums, third};

/// The last tokens of a turn that calls a tool, and of an answer.
const TOOL: TurnEnd = TurnEnd(11);
const ANSWER: TurnEnd = TurnEnd(12);

/// Conversations whose turns end with a tool call or an answer, as a coin falls: the tool takes a minute, and a person a random
/// time. Returns the sums of turns after a tool call, and of those after an answer. `tells`: whether the engine hears of the ends.
fn live(life: &mut Life, conversations: u64, turns: u64, tells: bool) -> [Sums; 2] {
    let session = life.open("model");
    let mut random = Random::new(3);
    let mut due = std::collections::BTreeSet::new();
    for of in 0..conversations {
        due.insert((SECOND + of * 2 * SECOND, of, 0, ANSWER.0));
    }
    let mut sums = [Sums::default(); 2];
    while let Some((at_ns, of, turn, before)) = due.pop_first() {
        life.until(at_ns);
        let is_tool = random.unit() < 0.5;
        let end = if is_tool { TOOL } else { ANSWER };
        let known = FIRST + turn.max(1) - 1 - u64::from(turn == 0);
        let told = if tells { end } else { TurnEnd::UNKNOWN };
        let done = life.turn_of(session, of, known, told);
        if turn >= turns / 2 {
            sums[usize::from(TurnEnd(before) != TOOL)].add(&done, known);
        }
        let person_ns = (-(1.0 - random.unit()).ln() * 180.0 * SECOND as f64) as u64;
        let tool_ns = 60 * SECOND + random.next() % SECOND;
        let pause_ns = if is_tool { tool_ns } else { person_ns };
        if turn + 1 < turns {
            due.insert((life.now_ns + pause_ns, of, turn + 1, end.0));
        }
    }
    life.check();
    sums
}

#[test]
fn turns_after_a_tool_call_are_read_before_they_come_and_others_are_not() {
    let [told, untold] = [true, false].map(|tells| {
        let mut life = Life::new(third(40, 30), 8192, true);
        let sums = live(&mut life, 40, 30, tells);
        let counters = life.engine.counters();
        (
            sums,
            counters.return_reads_used,
            counters.return_reads_wasted,
        )
    });
    let ([tool, answer], used, wasted) = told;
    assert!(tool.share() > 0.7, "{told:?} {untold:?}");
    // Pauses of persons are random, so that reads before them would be in vain.
    assert!(wasted * 15 < used, "{used} {wasted}");
    assert!(tool.share() > answer.share() + 0.3, "{told:?}");
    // Without the ends, all pauses look random.
    let ([tool, _], ..) = untold;
    assert!(tool.share() < 0.5, "{untold:?}");
}

/// Conversations that each come back once, with one of two system prompts: after a minute, or when a person likes. Turns of both
/// end alike, and have the same depth. Of `all`, every `each`th one is of the second. Returns the sums of the second half of those
/// of the first prompt, and the counts of reads that were used and wasted.
fn two_prompts(host_blocks: u64, all: u64, each: u64) -> (Sums, u64, u64) {
    let mut life = Life::new(host_blocks, 65536, true);
    let session = life.open("model");
    let mut random = Random::new(5);
    let mut due = std::collections::BTreeSet::new();
    for of in 0..all {
        let prompt = if of % each == 0 { 2 } else { 1 };
        due.insert((of * SECOND, prompt << 32 | of, FIRST - 1));
    }
    let mut sums = Sums::default();
    while let Some((at_ns, of, known)) = due.pop_first() {
        life.until(at_ns);
        let done = life.turn_of(session, of, known, TOOL);
        let is_regular = of >> 32 == 1;
        if known == FIRST {
            if is_regular && of & 0xffff_ffff > all / 2 {
                sums.add(&done, known);
            }
            continue;
        }
        let person_ns = (-(1.0 - random.unit()).ln() * 90.0 * SECOND as f64) as u64;
        let pause_ns = if is_regular { 60 * SECOND } else { person_ns };
        due.insert((life.now_ns + pause_ns, of, FIRST));
    }
    life.check();
    let counters = life.engine.counters();
    (
        sums,
        counters.return_reads_used,
        counters.return_reads_wasted,
    )
}

#[test]
fn conversations_with_the_same_first_block_are_a_kind_of_their_own() {
    let (sums, used, wasted) = two_prompts(1600, 600, 2);
    assert!(sums.share() > 0.8, "{sums:?} {used} {wasted}");
    assert!(wasted * 20 < used, "{sums:?} {used} {wasted}");
}

#[test]
fn a_few_conversations_with_random_pauses_are_not_predicted_from_many_with_others() {
    let (sums, used, wasted) = two_prompts(1600, 900, 10);
    assert!(sums.share() > 0.8, "{sums:?} {used} {wasted}");
    // The first ones are: their kind is not known yet.
    assert!(wasted < 30, "{sums:?} {used} {wasted}");
}
