//! No read waits for a write.

use std::sync::{Arc, Condvar, Mutex};

use undercroft_contract::remote::{RemoteDone, RemoteError, RemoteRequest};
use undercroft_remote::{ListedObject, ObjectBody, Objects, Receiver, Result};

use crate::rig::{Rig, Segment};

/// A store without objects. Its writes wait until the test lets them continue.
#[derive(Debug, Default)]
struct SlowWrites(Mutex<bool>, Condvar);

impl Objects for SlowWrites {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn parallel(&self) -> usize {
        4
    }

    fn probe(&self, _paths: &[String]) -> Result<u64> {
        Ok(0)
    }

    fn get(&self, _path: &str, _receiver: &mut Receiver<'_>) -> Result<()> {
        Err(RemoteError::NotFound.into())
    }

    fn put(&self, _path: &str, _body: &ObjectBody<'_>, _if_absent: bool) -> Result<bool> {
        let go_on = self.0.lock().unwrap();
        drop(self.1.wait_while(go_on, |go_on| !*go_on));
        Ok(true)
    }

    fn delete(&self, _paths: &[String]) -> Result<()> {
        Ok(())
    }

    fn list(&self, _below: &str, _each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        Ok(())
    }

    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>> {
        Ok(vec![false; entries.len()])
    }

    fn clock_skew(&self) -> Result<Option<f64>> {
        Ok(None)
    }
}

#[test]
fn reads_and_probes_end_while_all_writes_wait() {
    let store = Arc::new(SlowWrites::default());
    let mut rig = Rig::over(Arc::clone(&store) as Arc<dyn Objects>, Box::new(()));
    let segment = Segment::new(1);
    let parts = rig.fill(&segment, 0);
    for _ in 0..8 {
        let (key, header, parts) = (segment.key, segment.header.encode(), parts.clone());
        rig.submit(|token| RemoteRequest::Put {
            token,
            key,
            header,
            parts,
            if_absent: true,
        });
    }
    for _ in 0..3 {
        assert_eq!(rig.get_all(&segment), Err(RemoteError::NotFound));
        let found = rig.probe(vec![segment.key]);
        assert_eq!(found, Ok(RemoteDone::Present(0)));
    }
    *store.0.lock().unwrap() = true;
    store.1.notify_all();
    let mut stored = 0;
    while stored < 8 {
        for completion in rig.wait() {
            assert_eq!(completion.result, Ok(RemoteDone::Stored));
            stored += 1;
        }
    }
}
