//! A Redis cluster: the contract, and keys that move from one server to another.

use std::time::{Duration, Instant};

use undercroft_contract::remote::{RemoteDone, RemoteError};

use crate::child::free_port;
use crate::rig::{Rig, Segment};
use crate::server::Redis;

/// Three servers, each of which has a third of the keys.
struct Cluster {
    servers: Vec<Redis>,
    _place: tempfile::TempDir,
}

impl Cluster {
    /// The first slot of each server, and the slot after the last slot.
    const BOUNDS: [u16; 4] = [0, 5461, 10_923, 16_384];

    fn start() -> Result<Self, String> {
        let place = tempfile::tempdir().unwrap();
        let start = |index: usize| {
            let (dir, bus) = (place.path().join(index.to_string()), free_port());
            std::fs::create_dir(&dir).unwrap();
            Redis::start(&[
                "--dir",
                dir.to_str().unwrap(),
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "2000",
                "--cluster-port",
                &bus.to_string(),
            ])
            .map(|server| (server, bus))
        };
        let started: Vec<(Redis, u16)> = (0..3).map(start).collect::<Result<_, _>>()?;
        for (index, (server, _)) in started.iter().enumerate() {
            let (first, end) = (Self::BOUNDS[index], Self::BOUNDS[index + 1]);
            server.say(&format!("CLUSTER SET-CONFIG-EPOCH {}", index + 1));
            server.say(&format!("CLUSTER ADDSLOTSRANGE {first} {}", end - 1));
        }
        for (other, bus) in &started[1..] {
            let meet = format!("CLUSTER MEET 127.0.0.1 {} {bus}", other.port());
            started[0].0.say(&meet);
        }
        let servers = started.into_iter().map(|(server, _)| server).collect();
        let cluster = Self {
            servers,
            _place: place,
        };
        let end = Instant::now() + Duration::from_secs(60);
        let knows_all = |server: &Redis| server.say("CLUSTER SLOTS").starts_with("*3\r\n");
        let is_up = |server: &Redis| server.say("CLUSTER INFO").contains("cluster_state:ok");
        while !(cluster.servers.iter()).all(|server| is_up(server) && knows_all(server)) {
            assert!(
                Instant::now() < end,
                "{}",
                cluster.servers[0].say("CLUSTER INFO")
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(cluster)
    }

    fn url(&self, prefix: &str) -> String {
        // The URL does not name the last server.
        let ports = [self.servers[1].port(), self.servers[0].port()];
        let [a, b] = ports.map(|port| format!("127.0.0.1:{port}"));
        format!("redis://{a},{b}/0/{prefix}")
    }

    /// The slot of a key, the place of the key's server, and the place of another server.
    fn place_of(&self, key: &str) -> (u16, usize, usize) {
        let answer = self.servers[0].say(&format!("CLUSTER KEYSLOT {key}"));
        let slot: u16 = answer.trim_start_matches(':').trim().parse().unwrap();
        let behind = Self::BOUNDS.iter().position(|bound| *bound > slot).unwrap();
        (slot, behind - 1, behind % 3)
    }
}

/// A server's name in its cluster.
fn id(server: &Redis) -> String {
    let answer = server.say("CLUSTER MYID");
    answer.lines().nth(1).unwrap().to_owned()
}

fn start() -> Option<Cluster> {
    Cluster::start()
        .inspect_err(|reason| eprintln!("skipped: {reason}"))
        .ok()
}

fn rig(cluster: &Cluster, prefix: &str) -> Rig {
    Rig::new(&cluster.url(prefix), Box::new(())).unwrap()
}

/// One cluster for all cases: it takes seconds to start.
#[test]
fn every_case_of_the_contract_holds() {
    let Some(cluster) = start() else { return };
    for (name, case) in crate::CASES {
        eprintln!("{name}");
        case(rig(&cluster, name));
    }
    let segments: Vec<Segment> = (0..32).map(Segment::new).collect();
    let mut rig = rig(&cluster, "test");
    for segment in &segments {
        rig.put(segment, true).unwrap();
    }
    for server in &cluster.servers {
        let keys = server.say("DBSIZE");
        assert_ne!(keys, ":0\r\n", "each server has some of them");
    }
}

/// A cluster moves a slot in two steps: at first only keys that the old server lacks are at the new one.
#[test]
fn a_key_is_found_while_it_moves_to_another_server_and_afterwards() {
    let Some(cluster) = start() else { return };
    let mut rig = rig(&cluster, "test");
    let (old, new) = (Segment::new(1), Segment::new(2));
    rig.put(&old, true).unwrap();
    let key = |segment: &Segment| format!("test/{}", segment.key.path());
    let (slot, from, to) = cluster.place_of(&key(&new));
    let (from, to) = (&cluster.servers[from], &cluster.servers[to]);
    let (from_id, to_id) = (id(from), id(to));
    to.say(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"));
    from.say(&format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"));
    assert_eq!(
        rig.probe(vec![new.key, old.key]),
        Ok(RemoteDone::Present(0b10))
    );
    assert_eq!(rig.get_all(&new), Err(RemoteError::NotFound));
    assert_eq!(rig.put(&new, true), Ok(RemoteDone::Stored));
    assert_eq!(
        from.say(&format!("CLUSTER COUNTKEYSINSLOT {slot}")),
        ":0\r\n"
    );
    rig.get_all(&new).unwrap();
    for server in [to, from] {
        server.say(&format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
    }
    rig.get_all(&new).unwrap();
    assert_eq!(rig.put(&new, true), Ok(RemoteDone::AlreadyThere));
    assert_eq!(
        rig.probe(vec![new.key, old.key]),
        Ok(RemoteDone::Present(0b11))
    );
}

#[test]
fn a_call_that_was_sent_to_another_server_is_the_last_one_to_be_sent() {
    let Some(cluster) = start() else { return };
    let mut rig = rig(&cluster, "test");
    let segment = Segment::new(1);
    assert_eq!(rig.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
    let (slot, from, to) = cluster.place_of(&format!("test/{}", segment.key.path()));
    let to_id = id(&cluster.servers[to]);
    for place in [to, from] {
        cluster.servers[place].say(&format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
    }
    for _ in 0..5 {
        rig.put(&segment, false).unwrap();
    }
    let errors = cluster.servers[from].say("INFO errorstats");
    assert!(errors.contains("errorstat_MOVED:count=1\r\n"), "{errors}");
}

#[test]
fn the_keys_of_a_server_that_ends_are_unreachable_and_the_others_stay() {
    let Some(mut cluster) = start() else { return };
    // The remaining servers answer for their own keys although other keys are missing.
    for server in &cluster.servers {
        server.say("CONFIG SET cluster-require-full-coverage no");
    }
    let mut rig = rig(&cluster, "test");
    let segments: Vec<Segment> = (0..16).map(Segment::new).collect();
    let ends = |segment: &Segment| {
        let (_, place, _) = cluster.place_of(&format!("test/{}", segment.key.path()));
        place == 0
    };
    let lost: Vec<bool> = segments.iter().map(ends).collect();
    assert!(lost.contains(&true) && lost.contains(&false), "{lost:?}");
    for segment in &segments {
        rig.put(segment, true).unwrap();
    }
    drop(cluster.servers.remove(0));
    for (segment, is_lost) in segments.iter().zip(&lost) {
        let found = rig.get_all(segment).map(drop);
        let expected = if *is_lost {
            Err(RemoteError::Unreachable)
        } else {
            Ok(())
        };
        assert_eq!(found, expected);
    }
}

#[test]
fn several_servers_without_a_cluster_are_reported() {
    let servers = [(); 2].map(|()| Redis::start(&[]));
    let [Ok(a), Ok(b)] = servers else {
        eprintln!("skipped: redis-server is missing");
        return;
    };
    let url = format!("redis://127.0.0.1:{},127.0.0.1:{}", a.port(), b.port());
    let mut rig = Rig::new(&url, Box::new(())).unwrap();
    assert_eq!(rig.get_all(&Segment::new(1)), Err(RemoteError::Unreachable));
    let last = rig.pool.as_ref().unwrap().last_result().get();
    assert!(format!("{last:?}").contains("is in no cluster"), "{last:?}");
}

/// A server of a cluster of one shard.
fn one_of_cluster(place: &std::path::Path, name: &str) -> Option<(Redis, u16)> {
    let (dir, bus) = (place.join(name), free_port());
    std::fs::create_dir(&dir).unwrap();
    let server = Redis::start(&[
        "--dir",
        dir.to_str().unwrap(),
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &bus.to_string(),
        "--repl-diskless-sync-delay",
        "0",
    ]);
    let server = server.inspect_err(|reason| eprintln!("skipped: {reason}"));
    Some((server.ok()?, bus))
}

#[track_caller]
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_replica_that_takes_over_the_only_shard_is_found() {
    let place = tempfile::tempdir().unwrap();
    let (Some((primary, _)), Some((replica, bus))) = (
        one_of_cluster(place.path(), "primary"),
        one_of_cluster(place.path(), "replica"),
    ) else {
        return;
    };
    primary.say("CLUSTER ADDSLOTSRANGE 0 16383");
    primary.say(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", replica.port()));
    let known = id(&primary);
    wait_until(|| {
        replica
            .say("CLUSTER NODES")
            .contains(&format!("{known} 127.0.0.1"))
    });
    replica.say(&format!("CLUSTER REPLICATE {known}"));
    wait_until(|| {
        replica
            .say("INFO replication")
            .contains("master_link_status:up")
    });
    // A primary names no replica that has received nothing yet (`isReplicaAvailable`, Redis `src/cluster.c`), and an idle
    // primary sends the first thing only after 10 s.
    wait_until(|| primary.say("CLUSTER INFO").contains("cluster_state:ok"));
    assert_eq!(primary.say("SET first write"), "+OK\r\n");
    wait_until(|| primary.say("CLUSTER SLOTS").contains(&id(&replica)));
    // The URL does not name the replica.
    let mut rig = Rig::new(&primary.url(), Box::new(())).unwrap();
    let segment = Segment::new(1);
    rig.put(&segment, true).unwrap();
    // `WAIT` would wait only for what its own connection has written.
    wait_until(|| replica.say("DBSIZE") == primary.say("DBSIZE"));
    drop(primary);
    replica.say("CLUSTER FAILOVER TAKEOVER");
    wait_until(|| replica.say("ROLE").contains("master"));
    wait_until(|| rig.get_all(&segment).is_ok());
}

#[test]
fn a_cluster_that_is_still_being_formed_is_used_as_soon_as_it_has_all_keys() {
    let place = tempfile::tempdir().unwrap();
    let Some((server, _)) = one_of_cluster(place.path(), "server") else {
        return;
    };
    let mut rig = Rig::new(&server.url(), Box::new(())).unwrap();
    let keys: Vec<_> = (0..64).map(|number| Segment::new(number).key).collect();
    assert_eq!(rig.probe(keys.clone()), Err(RemoteError::Unreachable));
    server.say("CLUSTER ADDSLOTSRANGE 0 8191");
    assert_eq!(rig.probe(keys.clone()), Err(RemoteError::Unreachable));
    server.say("CLUSTER ADDSLOTSRANGE 8192 16383");
    wait_until(|| rig.probe(keys.clone()) == Ok(RemoteDone::Present(0)));
}
