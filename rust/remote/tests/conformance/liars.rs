//! Stores that lie: about sizes, types and forms, without an end, and slowly. Nothing that they answer ends the process,
//! fills its memory, keeps a call for long, or leads a request elsewhere. Each kind of store is tested in a process of its
//! own, whose memory nothing else takes.

#[cfg(feature = "s3")]
mod cloud;
mod directory;
#[cfg(feature = "redis")]
mod redis;
#[cfg(any(feature = "redis", feature = "s3"))]
mod wire;

use std::time::{Duration, Instant};

use undercroft_contract::remote::{RemoteDone, RemoteRequest};
use undercroft_remote::check::check;

use crate::rig::{Rig, Segment};

/// The process may grow by this many bytes.
const GROWTH: u64 = 32 << 20;
/// The calls together end within this time, even on a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// Gets at the same time.
const GETS: usize = 8;

/// The most memory of this process since the last call of [`forget_peak`], in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() << 10
}

fn forget_peak() {
    // Without the permission, the most memory so far counts: the test is less strict then.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Takes the memory that calls of any kind take once: host memory itself, threads, roots of certificates.
fn warm(rig: &mut Rig) {
    rig.wait_until_idle();
    let zeros = vec![0; 1 << 20];
    for at in (0..rig.arena.size()).step_by(zeros.len()) {
        rig.arena.write(at, &zeros).unwrap();
    }
    read(rig, "an empty store");
    operate(rig);
}

/// Makes the calls of an engine, which fail.
fn read(rig: &mut Rig, lie: &str) {
    let segment = Segment::new(1);
    for _ in 0..GETS {
        let (key, parts) = (segment.key, segment.parts(8));
        let expect = Box::new(segment.header.described.clone());
        rig.submit(|token| RemoteRequest::Get {
            token,
            key,
            expect,
            parts,
        });
    }
    let mut ended = 0;
    while ended < GETS {
        for done in rig.wait() {
            assert!(done.result.is_err(), "{lie}: {done:?}");
            ended += 1;
        }
    }
    // A store may say that it has everything, and that it has stored everything.
    let _ = rig.put(&segment, false);
    let found = rig.probe(vec![segment.key]);
    assert!(
        matches!(found, Err(_) | Ok(RemoteDone::Present(0 | 1))),
        "{lie}: {found:?}"
    );
}

/// Makes the calls of the operator's commands.
fn operate(rig: &Rig) {
    let _ = rig.objects.list("1/", &mut |_| true);
    let _ = rig.objects.delete(&[Segment::new(1).key.path()]);
    assert!(!check(&*rig.objects).is_empty());
}

/// Makes calls, and compares the memory and the time that they take.
fn withstands(rig: &mut Rig, lie: &str, calls: impl FnOnce(&mut Rig)) {
    grows_little(lie, || calls(rig));
}

/// The same, of calls of any kind.
pub(crate) fn grows_little(lie: &str, calls: impl FnOnce()) {
    forget_peak();
    let (before, started) = (peak(), Instant::now());
    calls();
    let (grown, elapsed) = (peak().saturating_sub(before), started.elapsed());
    eprintln!("{lie}: {} MiB, {elapsed:?}", grown >> 20);
    assert!(grown < GROWTH, "{lie}: {} MiB more", grown >> 20);
    assert!(elapsed < SOON, "{lie}: {elapsed:?}");
}
