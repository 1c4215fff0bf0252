use super::super::{available_by, limiting_group_by};
use super::*;

/// A machine with 1,000 KiB available, on which the process is in the group `path` of the hierarchy `hierarchy` (the
/// first two fields of a line of /proc/self/cgroup).
struct Machine {
    root: tempfile::TempDir,
}

const V1: &str = "4:cpu,memory";
const V2: &str = "0:";
const KIB: u64 = 1024;

impl Machine {
    fn new(hierarchy: &str, path: &str) -> Self {
        let machine = Self {
            root: tempfile::tempdir().unwrap(),
        };
        machine.write(
            "proc/meminfo",
            "MemAvailable:   1000 kB\nMemTotal:   2000 kB\n",
        );
        machine.write(
            "proc/self/cgroup",
            &format!("9:name=systemd:/x\n{hierarchy}:{path}\n"),
        );
        machine
    }

    /// Mounts the hierarchy at `point`, from its group `root` on.
    fn mount(self, kind: &str, root: &str, point: &str) -> Self {
        let point = self.root.path().join(point);
        let (fs, options) = match kind {
            V1 => ("cgroup", "rw,cpu,memory"),
            _ => ("cgroup2", "rw,nsdelegate"),
        };
        let file = self.root.path().join("proc/self/mountinfo");
        let mut text = fs::read_to_string(&file).unwrap_or_default();
        text += "31 23 0:28 / /sys rw,relatime shared:7 - sysfs sysfs rw\n";
        let point = point.to_str().unwrap().replace(' ', "\\040");
        text += &format!(
            "35 31 0:32 {root} {point} rw,nosuid shared:9 master:2 - {fs} none {options}\n"
        );
        fs::write(file, text).unwrap();
        self
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Gives a group of version 2 a limit and an amount in use.
    fn v2(self, directory: &str, max: &str, current: u64) -> Self {
        self.write(&format!("{directory}/memory.max"), &format!("{max}\n"));
        self.write(
            &format!("{directory}/memory.current"),
            &format!("{current}\n"),
        );
        self
    }

    /// The same for version 1.
    fn v1(self, directory: &str, limit: u64, usage: u64) -> Self {
        self.write(
            &format!("{directory}/memory.limit_in_bytes"),
            &format!("{limit}\n"),
        );
        self.write(
            &format!("{directory}/memory.usage_in_bytes"),
            &format!("{usage}\n"),
        );
        self
    }

    fn proc(&self) -> PathBuf {
        self.root.path().join("proc")
    }

    fn available(&self) -> u64 {
        available_by(&self.proc()).unwrap()
    }

    fn group(&self) -> Option<PathBuf> {
        let group = limiting_group_by(&self.proc())?;
        Some(group.strip_prefix(self.root.path()).unwrap().to_owned())
    }
}

#[test]
fn without_a_limit_the_machine_decides() {
    for (kind, v) in [(V1, 1), (V2, 2)] {
        let machine = Machine::new(kind, "/").mount(kind, "/", "cg");
        assert_eq!((machine.available(), machine.group()), (1000 * KIB, None));
        let machine = match v {
            1 => machine.v1("cg", 9_223_372_036_854_771_712, 600),
            _ => machine.v2("cg", "max", 600),
        };
        assert_eq!((machine.available(), machine.group()), (1000 * KIB, None));
    }
}

#[test]
fn the_limit_of_the_processs_own_group_counts_below_the_root() {
    let slurm = "slurm/uid_1/job_7/step_0";
    let machine = Machine::new(V1, &format!("/{slurm}")).mount(V1, "/", "cg/memory");
    let machine = machine.v1(&format!("cg/memory/{slurm}"), 1000, 600);
    assert_eq!(machine.available(), 400);
    assert_eq!(machine.group(), Some(format!("cg/memory/{slurm}").into()));

    let unit = "system.slice/undercroft.service";
    let machine = Machine::new(V2, &format!("/{unit}")).mount(V2, "/", "cg");
    let machine = machine.v2(&format!("cg/{unit}"), "1000", 600);
    assert_eq!(machine.available(), 400);
    assert_eq!(machine.group(), Some(format!("cg/{unit}").into()));
}

#[test]
fn the_group_above_that_leaves_least_decides() {
    let machine = Machine::new(V2, "/slice/pod/container")
        .mount(V2, "/", "cg")
        .v2("cg/slice", "5000", 4000)
        .v2("cg/slice/pod", "2000", 1700)
        .v2("cg/slice/pod/container", "900", 100);
    assert_eq!(machine.available(), 300);
    assert_eq!(machine.group(), Some("cg/slice/pod".into()));

    // The limit of the sibling is not the process's.
    let machine = Machine::new(V1, "/pod/one")
        .mount(V1, "/", "cg")
        .v1("cg", 9000, 100)
        .v1("cg/pod", 7000, 1000)
        .v1("cg/pod/two", 10, 10);
    assert_eq!(machine.available(), 6000);
}

#[test]
fn a_mount_that_begins_at_the_containers_group_is_no_deeper() {
    // Docker and Kubernetes with the host's namespace of control groups.
    for (kind, v) in [(V1, 1), (V2, 2)] {
        let machine = Machine::new(kind, "/docker/abc/nested").mount(kind, "/docker/abc", "cg");
        let machine = match v {
            1 => machine.v1("cg", 1000, 600).v1("cg/nested", 900, 200),
            _ => machine.v2("cg", "1000", 600).v2("cg/nested", "900", 200),
        };
        assert_eq!(machine.available(), 400, "{kind}");
    }
}

#[test]
fn a_namespace_of_control_groups_hides_names_but_no_limits() {
    // Mounted within the namespace.
    let machine = Machine::new(V2, "/")
        .mount(V2, "/", "cg")
        .v2("cg", "1000", 600);
    assert_eq!(machine.available(), 400);
    // Mounted before the namespace was made: the root of the mount is two groups above.
    let machine = Machine::new(V2, "/in")
        .mount(V2, "/../..", "cg")
        .v2("cg", "1000", 700);
    assert_eq!(machine.available(), 300);
    // The process was moved out of the namespace, and a mount from above it shows its group.
    let machine = Machine::new(V2, "/../other")
        .mount(V2, "/", "inner")
        .mount(V2, "/..", "cg")
        .v2("inner", "5", 1)
        .v2("cg/other", "1000", 500);
    assert_eq!(machine.available(), 500);
}

#[test]
fn of_several_mounts_the_one_that_shows_the_most_groups_counts() {
    let machine = Machine::new(V2, "/pod/own")
        .mount(V2, "/pod/own", "small")
        .mount(V2, "/pod/other", "foreign")
        .mount(V2, "/", "with space")
        .v2("foreign", "5", 1)
        .v2("with space/pod", "1000", 600);
    assert_eq!(machine.available(), 400);
    assert_eq!(machine.group(), Some("with space/pod".into()));
}

#[test]
fn both_versions_side_by_side_count() {
    let machine = Machine::new(V1, "/one")
        .mount(V1, "/", "one")
        .mount(V2, "/", "two");
    let machine = machine.v1("one/one", 5000, 0).v2("two/b", "1000", 600);
    assert_eq!(
        machine.available(),
        5000,
        "the group of version 2 is not known"
    );
    machine.write("proc/self/cgroup", "4:memory:/one\n0::/b\n");
    assert_eq!(machine.available(), 400);
}

#[test]
fn file_cache_that_can_be_dropped_does_not_count_as_used() {
    let machine = Machine::new(V2, "/")
        .mount(V2, "/", "cg")
        .v2("cg", "1000", 600);
    machine.write("cg/memory.stat", "anon 1\ninactive_file 250\n");
    assert_eq!(machine.available(), 650);
    let machine = machine.v2("cg", "1000", 2000);
    assert_eq!(machine.available(), 0, "over its limit");

    let machine = Machine::new(V1, "/")
        .mount(V1, "/", "cg")
        .v1("cg", 1000, 600);
    machine.write(
        "cg/memory.stat",
        "inactive_file 7\ntotal_inactive_file 250\n",
    );
    assert_eq!(machine.available(), 650);
}

#[test]
fn the_limit_at_which_the_kernel_slows_a_group_counts() {
    let machine = Machine::new(V2, "/")
        .mount(V2, "/", "cg")
        .v2("cg", "1000", 600);
    machine.write("cg/memory.high", "max\n");
    assert_eq!(machine.available(), 400);
    machine.write("cg/memory.high", "700\n");
    assert_eq!(machine.available(), 100);
}

#[test]
fn bytes_in_swap_leave_less_of_a_limit_of_memory_and_swap() {
    let machine = Machine::new(V1, "/")
        .mount(V1, "/", "cg")
        .v1("cg", 1000, 600);
    machine.write("cg/memory.memsw.limit_in_bytes", "1200\n");
    machine.write("cg/memory.memsw.usage_in_bytes", "1100\n");
    assert_eq!(machine.available(), 100);
}

#[test]
fn a_limit_above_the_groups_that_are_seen_counts() {
    // A container of version 1 does not see its pod, but its statistics tell the pod's limit.
    let machine = Machine::new(V1, "/pod/c")
        .mount(V1, "/pod/c", "cg")
        .v1("cg", 9000, 600);
    machine.write("cg/memory.stat", "hierarchical_memory_limit 1000\n");
    assert_eq!(machine.available(), 400);
}

#[test]
fn a_broken_description_of_the_groups_leaves_the_machines_memory() {
    for (cgroup, mountinfo) in [
        ("", ""),
        ("4:memory\n0:", "31 23\n31 23 0:28 / - \n - cgroup2\n"),
        (
            "4:memory:relative\n0::\n",
            "1 2 3 / /x a - cgroup c\n1 2 3 rel /y a - cgroup2 c x\n",
        ),
        ("4:memory:/../..\n", "1 2 3 / /x\\9 a - cgroup c memory\n"),
    ] {
        let machine = Machine::new(V2, "/");
        machine.write("proc/self/cgroup", cgroup);
        machine.write("proc/self/mountinfo", mountinfo);
        assert_eq!(machine.available(), 1000 * KIB, "{cgroup:?} {mountinfo:?}");
    }
}
