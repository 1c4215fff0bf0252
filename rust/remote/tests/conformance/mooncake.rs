//! Mooncake: the contract, also while its processes hang and after they have ended.

use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_contract::remote::{RemoteDone, RemoteError};
use undercroft_remote::check::check;
use undercroft_remote::finding::Status;
use undercroft_remote::{Location, RemoteOptions, StoreHealth, set_python};

use crate::child::{child, free_port, url_of_parent};
use crate::rig::{Rig, Segment};

const PATIENCE: Duration = Duration::from_secs(60);
/// How long a helper that hangs is waited for.
const HUNG: Duration = Duration::from_secs(10);
/// A call without an answer ends within this time, even on a busy machine.
const SOON: Duration = Duration::from_secs(10);

const LATE: [Result<RemoteDone, RemoteError>; 3] = [const { Err(RemoteError::Late) }; 3];

/// A master, and a process that lends memory to the store. Dropping this ends both.
struct Mooncake {
    master: Process,
    client: Option<Process>,
    programs: PathBuf,
    port: u16,
    admin: u16,
}

struct Process(Child);

impl Process {
    fn start(program: &Path, arguments: &[String]) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).stdout(Stdio::null());
        // The process listens at no other address.
        command.env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
        command.env("MC_LOG_LEVEL", "ERROR").stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
        if signal == Signal::STOP {
            self.wait_until_stopped();
        }
    }

    /// On a busy machine some threads of a process stop later than others.
    fn wait_until_stopped(&self) {
        let end = Instant::now() + PATIENCE;
        let is_running = |task: std::io::Result<std::fs::DirEntry>| {
            let status = std::fs::read_to_string(task.unwrap().path().join("status"));
            status.is_ok_and(|status| !status.contains("State:\tT"))
        };
        let tasks = format!("/proc/{}/task", self.0.id());
        while std::fs::read_dir(&tasks).unwrap().any(is_running) {
            assert!(Instant::now() < end, "it goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Mooncake {
    /// Starts both processes. Without the wheel, prints that the test is skipped and returns None.
    fn start() -> Option<Self> {
        let Some(python) = std::env::var_os("UNDERCROFT_TEST_MOONCAKE") else {
            eprintln!(
                "skipped: UNDERCROFT_TEST_MOONCAKE names no Python with Mooncake's wheel; `make test-remote` has one"
            );
            return None;
        };
        let path = "import mooncake; print(list(mooncake.__path__)[0])";
        let output = Command::new(&python).args(["-c", path]).output().unwrap();
        let programs = String::from_utf8(output.stdout).unwrap();
        let programs = PathBuf::from(programs.trim());
        set_python(python.into());
        let (port, admin) = (free_port(), free_port());
        let mut mooncake = Self {
            master: master(&programs, port, admin),
            client: None,
            programs,
            port,
            admin,
        };
        mooncake.lend();
        Some(mooncake)
    }

    fn lend(&mut self) {
        let arguments = [
            "--host=127.0.0.1".to_owned(),
            format!("--port={}", free_port()),
            format!("--master_server_address=127.0.0.1:{}", self.port),
            "--metadata_server=P2PHANDSHAKE".to_owned(),
            "--global_segment_size=256 MB".to_owned(),
            "--protocol=tcp".to_owned(),
        ];
        let program = self.programs.join("mooncake_client");
        self.client = Some(Process::start(&program, &arguments));
        let store = self.rig("start").objects;
        let end = Instant::now() + PATIENCE;
        while store.advice()[0].status != Status::Ok {
            assert!(Instant::now() < end, "{:?}", store.advice());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn client(&self) -> &Process {
        self.client.as_ref().expect("it is running")
    }

    fn url(&self, prefix: &str) -> String {
        let (port, admin) = (self.port, self.admin);
        format!("mooncake://127.0.0.1:{port}/{prefix}?admin=127.0.0.1:{admin}")
    }

    fn rig(&self, prefix: &str) -> Rig {
        ready(&self.url(prefix))
    }
}

/// A rig whose helper has started, or has failed to start.
fn ready(url: &str) -> Rig {
    let rig = Rig::new(url, Box::new(())).unwrap();
    let _ = rig.objects.greet();
    rig
}

fn master(programs: &Path, port: u16, admin: u16) -> Process {
    let arguments = [
        "--rpc_address=127.0.0.1".to_owned(),
        format!("--rpc_port={port}"),
        "--metrics_host=127.0.0.1".to_owned(),
        format!("--metrics_port={admin}"),
    ];
    let process = Process::start(&programs.join("mooncake_master"), &arguments);
    let end = Instant::now() + PATIENCE;
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert!(Instant::now() < end, "mooncake_master does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    process
}

/// The results of a get, a put and a probe. Checks that each result came within [`SOON`].
fn all(rig: &mut Rig, segment: &Segment) -> [Result<RemoteDone, RemoteError>; 3] {
    let started = Instant::now();
    let results = [
        rig.get_all(segment),
        rig.put(segment, false),
        rig.probe(vec![segment.key]),
    ];
    assert!(started.elapsed() < 3 * SOON, "{results:?}");
    results
}

fn is_well(rig: &mut Rig, segment: &Segment) {
    rig.put(segment, true).unwrap();
    rig.get_all(segment).unwrap();
    let found = rig.probe(vec![segment.key]);
    assert_eq!(found, Ok(RemoteDone::Present(1)));
}

/// Repeats writes, reads and probes until all succeed.
fn recovers(rig: &mut Rig, segment: &Segment) {
    let end = Instant::now() + PATIENCE;
    loop {
        let results = [
            rig.put(segment, true),
            rig.get_all(segment),
            rig.probe(vec![segment.key]),
        ];
        if results.iter().all(Result::is_ok) && results[2] == Ok(RemoteDone::Present(1)) {
            return;
        }
        assert!(Instant::now() < end, "{results:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn every_case_of_the_contract_holds() {
    let Some(mooncake) = Mooncake::start() else {
        return;
    };
    for (name, case) in crate::CASES {
        eprintln!("{name}");
        case(mooncake.rig(name));
    }
}

#[test]
fn a_process_that_lends_memory_and_hangs_is_late_and_others_serve_afterwards() {
    let Some(mut mooncake) = Mooncake::start() else {
        return;
    };
    let mut rig = mooncake.rig("frozen");
    let segment = Segment::new(1);
    is_well(&mut rig, &segment);
    mooncake.client().signal(Signal::STOP);
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Late));
    // A probe asks only the master.
    let found = rig.probe(vec![segment.key]);
    assert_eq!(found, Ok(RemoteDone::Present(1)));
    mooncake.client = None;
    mooncake.lend();
    recovers(&mut rig, &segment);
}

#[test]
fn a_master_that_hangs_is_late_and_serves_again() {
    let Some(mooncake) = Mooncake::start() else {
        return;
    };
    let mut rig = mooncake.rig("master");
    let segment = Segment::new(2);
    is_well(&mut rig, &segment);
    mooncake.master.signal(Signal::STOP);
    let late = all(&mut rig, &segment);
    assert_eq!(late, LATE);
    mooncake.master.signal(Signal::CONT);
    recovers(&mut rig, &segment);
}

#[cfg(any(feature = "redis", feature = "s3"))]
#[test]
fn requests_fail_on_a_bad_network_to_the_master_and_recover() {
    use crate::proxy::{Fault, Proxy};

    let Some(mooncake) = Mooncake::start() else {
        return;
    };
    let proxy = Proxy::start(0, mooncake.port);
    let (port, admin) = (proxy.port(), mooncake.admin);
    let url = format!("mooncake://127.0.0.1:{port}/network?admin=127.0.0.1:{admin}");
    let mut rig = ready(&url);
    let segment = Segment::new(7);
    is_well(&mut rig, &segment);
    proxy.set(Fault::Delay(Duration::from_millis(20)));
    is_well(&mut rig, &segment);
    for fault in [Fault::Stall, Fault::Reset, Fault::Cut(1)] {
        proxy.set(fault);
        let results = all(&mut rig, &segment);
        assert!(results.iter().all(Result::is_err), "{fault:?}: {results:?}");
        proxy.set(Fault::None);
        recovers(&mut rig, &segment);
    }
}

#[test]
fn a_new_master_is_found_by_itself() {
    let Some(mut mooncake) = Mooncake::start() else {
        return;
    };
    let mut rig = mooncake.rig("restart");
    let segment = Segment::new(3);
    is_well(&mut rig, &segment);
    mooncake.master.signal(Signal::KILL);
    let _ = mooncake.master.0.wait();
    let failed = all(&mut rig, &segment);
    assert!(failed.iter().all(Result::is_err), "{failed:?}");
    mooncake.master = master(&mooncake.programs, mooncake.port, mooncake.admin);
    mooncake.client = None;
    mooncake.lend();
    recovers(&mut rig, &segment);
}

/// The helper processes that this process has started.
fn helpers() -> Vec<Pid> {
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let read = |name| std::fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let is_child = read("stat")
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok())
            == Some(std::process::id());
        (is_child && read("cmdline").contains("mooncake_helper")).then(|| Pid::from_raw(pid))?
    };
    std::fs::read_dir("/proc").unwrap().filter_map(of).collect()
}

/// Runs in a process of its own, since the test finds helpers by their parent process.
#[test]
fn a_helper_that_ends_or_hangs_is_replaced() {
    let Some(mooncake) = Mooncake::start() else {
        return;
    };
    child(
        "mooncake::before_a_bad_helper",
        &mooncake.url("helper"),
        &[],
    );
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn before_a_bad_helper() {
    let python = std::env::var_os("UNDERCROFT_TEST_MOONCAKE").unwrap();
    set_python(python.into());
    let mut rig = ready(&url_of_parent());
    let segment = Segment::new(4);
    is_well(&mut rig, &segment);
    let [first] = helpers()[..] else {
        panic!("one helper")
    };
    kill_process(first, Signal::SEGV).unwrap();
    let ended = Instant::now();
    recovers(&mut rig, &segment);
    assert!(
        ended.elapsed() < HUNG,
        "one that has ended is not waited for"
    );
    let [second] = helpers()[..] else {
        panic!("one helper")
    };
    assert_ne!(first, second);
    kill_process(second, Signal::STOP).unwrap();
    assert_eq!(all(&mut rig, &segment), LATE);
    recovers(&mut rig, &segment);
    assert_ne!(helpers(), [second]);
    drop(rig);
    assert_eq!(helpers(), [], "it ends with the store");
}

#[test]
fn a_full_store_evicts_and_never_returns_another_object() {
    let Some(mooncake) = Mooncake::start() else {
        return;
    };
    let mut rig = mooncake.rig("full");
    let bytes = vec![7; 60 << 20];
    let body = undercroft_remote::ObjectBody::bytes(&bytes);
    let mut refused = 0;
    for number in 0..12 {
        match rig.objects.put(&format!("1/x/{number}"), &body, true) {
            Ok(_) => {}
            Err(error) if error.kind == RemoteError::Full => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    eprintln!("{refused} of 12 refused");
    let mut kept = 0;
    rig.objects
        .list("1/x", &mut |entry| {
            assert_eq!(entry.bytes, bytes.len() as u64);
            kept += 1;
            true
        })
        .unwrap();
    assert!((1..12).contains(&kept), "{kept} of 12");
    recovers(&mut rig, &Segment::new(5));
}

#[test]
fn doctor_accepts_a_good_store_and_a_missing_master_gives_advice() {
    let Some(mut mooncake) = Mooncake::start() else {
        return;
    };
    let rig = mooncake.rig("doctor");
    let found = check(&*rig.objects);
    let bad = found.iter().filter(|finding| finding.status != Status::Ok);
    assert_eq!(bad.count(), 0, "{found:#?}");
    drop(rig);
    mooncake.client = None;
    mooncake.master = master(&mooncake.programs, free_port(), free_port());
    let url = mooncake.url("doctor");
    let mut rig = ready(&url);
    assert_eq!(rig.get_all(&Segment::new(6)), Err(RemoteError::Unreachable));
    let StoreHealth::Failed(error) = rig.pool.as_ref().unwrap().last_result().get() else {
        panic!("there is no master");
    };
    assert!(error.detail.contains("refused"), "{error}");
    assert!(error.advice().contains("mooncake_master"), "{error}");
}

#[test]
fn a_wheel_that_is_missing_is_named_with_the_command_that_installs_it() {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");
    let variables = [("PYTHONPATH", python)];
    let url = "mooncake://127.0.0.1:1/x";
    child("mooncake::without_the_wheel", url, &variables);
}

/// The test above runs this one. The Python on PATH is the system's Python.
#[test]
#[ignore = "a part of another test"]
fn without_the_wheel() {
    let location = Location::parse(&url_of_parent()).unwrap();
    let store = undercroft_remote::open(&location, RemoteOptions::default()).unwrap();
    let error = store.greet().unwrap_err();
    assert!(
        error.detail.contains("No module named 'mooncake'"),
        "{error}"
    );
    let advice = error.advice();
    assert!(
        advice.contains("pip install mooncake-transfer-engine"),
        "{advice}"
    );
}
