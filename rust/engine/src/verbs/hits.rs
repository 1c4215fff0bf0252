//! The hits of requests, as the order of eviction counts them.

use undercroft_contract::key::HashSource;

use crate::forest::{NONE, NodeId, NsId};

use super::super::requests::RequestState;
use super::super::residency::Residency;

/// Notes, at a request's first save, that the blocks above its hit were hit, too. `anchor`: the deepest node of the chain. A
/// save without a lookup takes a tick of its own, and uses the blocks that are there; no request has come back to them.
pub(super) fn count_request(
    residency: &mut Residency,
    ns: NsId,
    hashes: &dyn HashSource,
    anchor: NodeId,
    request: Option<&RequestState>,
) {
    let Some(&RequestState { hit, tick, .. }) = request else {
        residency.next_tick();
        if anchor != NONE {
            residency.renew(anchor);
        }
        return residency.end_of_request();
    };
    if hit > 1 {
        if tick != residency.tick() {
            residency.next_tick();
        }
        residency.count_hit(ns, hashes, hit - 1, tick);
    }
}

#[cfg(test)]
mod tests {
    use undercroft_contract::key::BlockHash;
    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
    use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};

    use crate::policy::PolicyKind;
    use crate::{Engine, EngineConfig, SessionId};

    fn engine() -> (Engine, SessionId, Vec<BlockHash>) {
        let mut engine = Engine::new(EngineConfig {
            policy: PolicyKind::LeafHd,
            ..EngineConfig::new(1 << 20)
        });
        let spec = NamespaceSpec::uniform("weights", 16, &[(GroupKind::Full, 4096)]);
        let session = engine.open_session(spec).expect("a payload fits");
        let hash = |block| BlockHash::new(&[block; 32]).expect("32 bytes");
        (engine, session, (1..13).map(hash).collect())
    }

    fn save(engine: &mut Engine, session: SessionId, request: &str, hashes: &[BlockHash]) {
        let hashes = hashes.to_vec();
        let tokens = Tokens(hashes.len() as u32 * 16);
        let save = SaveRequest::new(request, &hashes, tokens);
        if let Some(transfer) = engine.begin_save(session, &save).transfer {
            engine.end_transfer(transfer.id, true);
        }
    }

    /// The hit class of each block.
    fn classes(engine: &Engine, hashes: &[BlockHash]) -> Vec<u8> {
        let forest = engine.residency.forest();
        let class = |hash| {
            let id = forest.find(0, hash).expect("it is saved");
            forest.node(id).touch().hit_class
        };
        hashes.iter().map(class).collect()
    }

    #[test]
    fn a_hit_counts_once_whatever_comes_before_its_save() {
        for others in 0..3 {
            let (mut engine, session, hashes) = engine();
            save(&mut engine, session, "first", &hashes);
            let lookup = LookupRequest::new("a", &hashes);
            engine.lookup(session, &lookup);
            assert_eq!(
                classes(&engine, &hashes),
                [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
            );
            for other in 0..others {
                let absent = vec![BlockHash::new(&[99; 32]).expect("32 bytes")];
                let name = format!("other {other}");
                engine.lookup(session, &LookupRequest::new(&name, &absent));
            }
            for _ in 0..2 {
                save(&mut engine, session, "a", &hashes);
                // The ninth and the eleventh depth are not sampled.
                let counted = [1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1];
                assert_eq!(classes(&engine, &hashes), counted, "{others} others");
            }
        }
    }

    #[test]
    fn a_prompt_that_is_saved_in_pieces_without_a_lookup_hits_none_of_them() {
        let (mut engine, session, hashes) = engine();
        for piece in 1..=hashes.len() {
            let name = format!("piece {piece}");
            save(&mut engine, session, &name, &hashes[..piece]);
        }
        assert_eq!(classes(&engine, &hashes), [0; 12]);
    }

    #[test]
    fn blocks_that_others_saved_after_the_lookup_are_no_hits() {
        let (mut engine, session, hashes) = engine();
        let lookup = LookupRequest::new("a", &hashes);
        engine.lookup(session, &lookup);
        save(&mut engine, session, "first", &hashes);
        save(&mut engine, session, "a", &hashes);
        assert_eq!(classes(&engine, &hashes), [0; 12]);
    }
}
