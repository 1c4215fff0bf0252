//! Resets while objects are on their way: nothing of the description's weights reaches a session that was reset.

use undercroft_contract::session::LookupRequest;

use crate::rig::{BLOCK, Random, chain, config, model};
use crate::{FULL, MODEL, computed, host};

/// The namespace has no block yet, so its index is free at once.
#[test]
fn a_session_that_was_reset_gets_nothing_of_a_flight_that_began_before() {
    let hashes = chain(&[(1, 16)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    for is_own in [true, false] {
        let mut random = Random(1);
        let (mut reader, session) = host(config.clone());
        let other = reader.enter(|engine| engine.open_session(model(1, FULL)));
        let other = other.expect("a payload fits");
        let asks = if is_own { session } else { other };
        let question = LookupRequest::new("r", &hashes);
        assert!(reader.look(asks, &question).is_pending());
        reader.enter(|engine| engine.reset(session));
        reader.check();
        reader.run(300, &mut objects, &mut random);
        reader.check();
        let (tokens, _) = reader.ask(session, "s", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 0, "the session has other weights now");
        // The other session still has the weights of the description.
        let (tokens, _) = reader.ask(other, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 16 * BLOCK);
        assert_eq!(reader.load((other, "r"), tokens, &hashes, MODEL), 16);
        reader.check();
    }
}
