"""How many cores a rank has: masks, quotas of each kind and depth, and what upstream will do to the mask."""

import os

import pytest

from trtllm_pp_progress.mpi import cores as _cores
from trtllm_pp_progress.mpi.cores import AFFINITY, cores, crowded, quota, ranks_here

V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 32 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def system(tmp_path):
    """Return the function that makes a /proc and a /sys with groups and their limits, and the root of both."""

    def make(mount, membership, limits):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/root rw\n" + mount)
        (tmp_path / "proc/self/cgroup").write_text(membership)
        for path, text in limits.items():
            file = tmp_path / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ({"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "200000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n", "a/cpu.max": "200000 100000\n"}, 0.5),
        ({"a/b/cpu.max": ""}, None),
        ({"a/b/cpu.max": "1 0"}, None),
        ({}, None),
    ],
)
def test_case_81_the_lowest_ancestor_counts(system, limits, found):
    """ninja-build/ninja#2805: Kubernetes limits the pod above the container."""
    assert quota(system(V2.format(root="/"), "0::/a/b\n", limits)) == found


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"a/cpu.cfs_quota_us": "-1\n", "a/cpu.cfs_period_us": "100000\n"}, None),
        ({"a/cpu.cfs_quota_us": "150000\n", "a/cpu.cfs_period_us": "100000\n"}, 1.5),
        (
            {
                "a/cpu.cfs_quota_us": "-1",
                "a/cpu.cfs_period_us": "100000",
                "cpu.cfs_quota_us": "50000",
                "cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
)
def test_case_81_version_1_of_control_groups(system, limits, found):
    """Each controller has a tree of its own there; -1 is no limit."""
    placed = {f"cpu,cpuacct/{path}": text for path, text in limits.items()}
    assert quota(system(V1.format(root="/"), "3:cpuset:/x\n4:cpu,cpuacct:/a\n0::/\n", placed)) == found


@pytest.mark.parametrize("version", [1, 2])
def test_case_81_a_container_that_sees_the_hosts_path(system, version):
    """Its own group is what is mounted, whatever the path says that the host has for it."""
    path = "/kubepods/pod1/c1"
    if version == 2:
        root = system(V2.format(root=path), f"0::{path}\n", {"cpu.max": "300000 100000"})
    else:
        limits = {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
        root = system(V1.format(root=path), f"4:cpu,cpuacct:{path}\n", limits)
    assert quota(root) == 3


@pytest.mark.parametrize("path", ["/../../elsewhere", "/not/mounted/here", ""])
def test_case_81_a_path_that_is_not_mounted_here_leads_nowhere_else(system, path):
    """What is mounted is what can be read: the group of a namespace seen from outside of it, say."""
    assert quota(system(V2.format(root="/"), f"0::{path}\n", {"cpu.max": "300000 100000"})) == 3


def test_without_control_groups_there_is_no_quota(tmp_path):
    """As in a sandbox without /proc."""
    assert quota(tmp_path) is None


def test_this_machine_can_be_asked():
    """Whatever its answer."""
    found = quota()
    assert found is None or found > 0


@pytest.mark.parametrize(
    ("value", "allowed", "later"),
    [
        (None, 2, 8),
        (None, 8, None),
        ("0", 2, 2),
        ("0", 8, 8),
        ("1", 2, None),
        ("yes", 2, 2),
    ],
)
def test_case_82_what_upstream_does_to_the_mask(value, allowed, later, monkeypatch, tmp_path):
    """NVIDIA/TensorRT-LLM#18117: cleared where it is narrow and nothing is said, the GPU's cores, or left as it is."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    found = cores({} if value is None else {AFFINITY: value}, tmp_path)
    assert (found.allowed, found.online, found.later) == (allowed, 8, later)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"PALS_LOCAL_SIZE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 1),
    ],
)
def test_ranks_of_this_host_are_counted_by_their_launcher(environ, ranks):
    """Where none says, this is the only one."""
    assert ranks_here(environ) == ranks


@pytest.mark.parametrize(
    ("allowed", "limit", "ranks", "few"),
    [
        (8, None, 4, False),
        (7, None, 4, True),
        (8, 8, 4, False),
        (8, 7.5, 4, True),
        (2, 16, 1, False),
        (64, 1.5, 1, True),
    ],
)
def test_case_81_the_quota_counts_for_when_the_native_thread_steps_in(allowed, limit, ranks, few, monkeypatch):
    """Two busy threads a rank share what all ranks of the host may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(_cores, "quota", lambda root=None: limit)
    assert crowded({"MPI_LOCALNRANKS": str(ranks)}) == few
