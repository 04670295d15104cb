"""What the machine is busy with, and what control groups of both versions allow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flatout.callbacks.gpu import CURVES
from flatout.callbacks.hardware_watch import Host
from flatout.distributed.limits import Limits, cpu_periods, limits


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"sys/fs/cgroup/cgroup.controllers": "cpu memory io\n"}
V1_GROUPS = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"


def test_a_machine_without_control_groups_has_no_limits(tmp_path):
    assert limits(tmp_path) == Limits(None, None)
    assert limits(tmp_path).facts() == {"cores_allowed": None, "memory_allowed_gb": None}
    assert cpu_periods(tmp_path) == {}


def test_version_2_in_a_container_stands_at_the_top(tmp_path):
    root = files(
        tmp_path,
        V2
        | {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": "8000000000\n",
            "sys/fs/cgroup/cpu.stat": (
                "usage_usec 99\nnr_periods 40\nnr_throttled 10\nthrottled_usec 7\n"
            ),
        },
    )
    assert limits(root) == Limits(1.5, 8_000_000_000)
    assert limits(root).facts() == {"cores_allowed": 1.5, "memory_allowed_gb": 8.0}
    assert cpu_periods(root) == {"nr_periods": 40, "nr_throttled": 10}


def test_version_2_takes_the_tightest_of_a_group_and_those_around_it(tmp_path):
    inner = "sys/fs/cgroup/system.slice/job.scope"
    root = files(
        tmp_path,
        V2
        | {
            "proc/self/cgroup": "0::/system.slice/job.scope\n",
            f"{inner}/cpu.max": "max 100000\n",
            f"{inner}/memory.max": "9000000000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/system.slice/memory.max": "5000000000\n",
        },
    )
    assert limits(root) == Limits(4.0, 5_000_000_000)


def test_version_2_without_limits_says_max(tmp_path):
    root = files(
        tmp_path,
        V2
        | {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/memory.max": "max\n",
        },
    )
    assert limits(root) == Limits(None, None)


def test_version_1_on_the_machine_itself(tmp_path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": V1_GROUPS,
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "2000000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.stat": (
                "nr_periods 8\nnr_throttled 2\nthrottled_time 5\n"
            ),
        },
    )
    assert limits(root) == Limits(0.5, 2_000_000_000)
    assert cpu_periods(root) == {"nr_periods": 8, "nr_throttled": 2}


def test_version_1_in_a_container_shows_the_group_at_the_top_whatever_its_path_says(tmp_path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": V1_GROUPS,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert limits(root) == Limits(None, 3_000_000_000)


def test_version_1_stays_in_charge_where_both_are_mounted(tmp_path):
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/\n4:memory:/\n0::/\n",
            "sys/fs/cgroup/unified/cgroup.controllers": "\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert limits(root) == Limits(2.0, None)


@pytest.mark.parametrize("path", ["/../../etc", "/../sibling"])
def test_a_path_that_leads_out_of_the_mount_is_not_followed(tmp_path, path):
    root = files(
        tmp_path,
        V2
        | {
            "proc/self/cgroup": f"0::{path}\n",
            "sys/fs/cgroup/memory.max": "7\n",
            "sys/fs/sibling/memory.max": "5\n",
            "sys/fs/etc/x": "",
        },
    )
    assert limits(root) == Limits(None, 7)


def test_a_busy_process_is_seen_to_be_busy():
    host = Host()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    found = host.sample()
    assert found.keys() <= {name for name in CURVES if name.startswith("host/")}
    assert 0.05 < found["host/process_cpu_cores"] < 1.5
    assert 0 < found["host/machine_cpu_share"] <= 1
    assert 0.01 < found["host/process_memory_gb"] < 100
    assert found["host/available_memory_gb"] > 0
    assert found["host/swap_out_mb_per_s"] >= 0


def test_a_container_that_is_held_back_shows_in_which_share_of_its_periods(tmp_path):
    stat = tmp_path / "sys/fs/cgroup/cpu.stat"
    root = files(
        tmp_path,
        V2
        | {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/cpu.stat": "nr_periods 100\nnr_throttled 50\n",
        },
    )
    host = Host(root)
    assert "host/cpu_held_back_share" not in host.sample()  # no period has passed
    stat.write_text("nr_periods 110\nnr_throttled 53\n")
    assert host.sample()["host/cpu_held_back_share"] == pytest.approx(0.3)
