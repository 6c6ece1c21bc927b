"""`kv-nvme.sh`: which disks it takes, which it leaves alone, and that running it again changes nothing.

The kernel here may have no RAID, so tools are stand-ins that write down how they were called; the branch with
one disk also runs for real, on a loop device, where root may do that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from samovar.cluster.launch.up import nvme_script

SCRIPT = str(resources.files("samovar.cluster") / "scripts" / "kv-nvme.sh")
STORE = r"Amazon\x20EC2\x20NVMe\x20Instance\x20Storage"
EBS = r"Amazon\x20Elastic\x20Block\x20Store"
NEEDED = ("losetup", "mkfs.ext4", "blkid", "mount", "umount", "mountpoint")


class Machine:
    """A PATH of stand-ins. `disks`: what lsblk lists; `holds`: what blkid says of a device."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "log"
        self.log.write_text("")
        self.dir = folder / "kv"
        self.put("id", 'if [ "$1" = -u ]; then echo 0; else /usr/bin/id "$@"; fi')
        self.put("chown", "true")
        self.put("mkfs.ext4", 'for last; do :; done; echo samovar-kv > "$STATE/label-${last##*/}"')
        self.put("mount", 'for last; do :; done; touch "$STATE/mounted"')
        self.put("mountpoint", '[ -e "$STATE/mounted" ]')
        self.put(
            "blkid",
            'for last; do :; done; label="$STATE/label-${last##*/}"; other="$STATE/other-${last##*/}"\n'
            'if [ -e "$label" ]; then cat "$label"; exit 0; fi\n'
            'if [ -e "$other" ]; then [ "$1" = --output ] && echo TYPE=xfs; exit 0; fi\nexit 2',
        )
        self.put("mdadm", "true")
        self.disks()

    def put(self, name: str, body: str) -> None:
        path = self.bin / name
        state = self.bin.parent
        path.write_text(f'#!/bin/bash\nSTATE={state}\necho "{name} $*" >> {self.log}\n{body}\n')
        path.chmod(0o755)

    def disks(self, *rows: tuple[str, str], mounted_at: str = "") -> None:
        lines = "\\n".join(f"/dev/{name} {model}".replace("\\", "\\\\\\\\") for name, model in rows)
        self.put(
            "lsblk",
            f'case "$*" in *MOUNTPOINT*) printf "%b" "{mounted_at}" ;; *) printf "%b\\n" "{lines}" ;; esac',
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.bin.parent)}
        return subprocess.run(
            ["bash", SCRIPT, *words, str(self.dir)], env=env, capture_output=True, text=True, check=False
        )

    def calls(self, *names: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.split()[0] in names]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_several_disks_become_one(machine: Machine) -> None:
    machine.disks(("nvme0n1", EBS), ("nvme1n1", STORE), ("nvme2n1", STORE))
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.calls("mdadm") == [
        "mdadm --create /dev/md/kv --run --level=0 --raid-devices=2 --name=kv /dev/nvme1n1 /dev/nvme2n1"
    ]
    (made,) = machine.calls("mkfs.ext4")
    assert made.endswith(" /dev/md/kv")
    assert machine.calls("mount") == [f"mount -o noatime,nosuid,nodev /dev/md/kv {machine.dir}"]
    assert machine.dir.stat().st_mode & 0o777 == 0o700
    assert "on 2 disks" in done.stdout


def test_a_single_disk_is_used_as_it_is(machine: Machine) -> None:
    machine.disks(("nvme0n1", EBS), ("nvme1n1", STORE))
    assert machine.run().returncode == 0
    assert machine.calls("mdadm") == []
    assert machine.calls("mount") == [f"mount -o noatime,nosuid,nodev /dev/nvme1n1 {machine.dir}"]


def test_running_it_again_changes_nothing(machine: Machine) -> None:
    machine.disks(("nvme1n1", STORE))
    assert machine.run().returncode == 0
    first = machine.calls("mkfs.ext4", "mount", "mdadm")
    assert machine.run().returncode == 0
    assert machine.calls("mkfs.ext4", "mount", "mdadm") == first
    (machine.bin.parent / "mounted").unlink()  # after a reboot: mounted again, not formatted
    assert machine.run().returncode == 0
    assert len(machine.calls("mkfs.ext4")) == 1
    assert len(machine.calls("mount")) == 2


def test_disks_of_others_are_never_formatted(machine: Machine) -> None:
    machine.disks(("nvme0n1", EBS), ("sda", "Samsung"))
    assert machine.run().returncode == 0
    machine.disks(("nvme1n1", STORE))
    (machine.bin.parent / "other-nvme1n1").touch()
    done = machine.run()
    assert done.returncode == 1
    assert "/dev/nvme1n1 holds something else" in done.stderr
    assert machine.calls("mkfs.ext4", "mount") == []


def test_a_file_system_that_the_image_has_made_is_shared(machine: Machine, tmp_path: Path) -> None:
    taken = tmp_path / "opt"
    taken.mkdir()
    machine.disks(("nvme1n1", STORE), mounted_at=f"{taken}\\n")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.calls("mkfs.ext4") == []
    assert machine.calls("mount") == [f"mount --bind {taken}/samovar-kv {machine.dir}"]


def test_without_disks_it_is_a_directory(machine: Machine) -> None:
    machine.disks(("nvme1n1", STORE))
    for _ in range(2):
        done = machine.run("--no-disks")
        assert done.returncode == 0, done.stderr
    assert machine.dir.is_dir()
    assert machine.dir.stat().st_mode & 0o777 == 0o700
    assert machine.calls("lsblk", "mkfs.ext4", "mount") == []


def test_a_named_disk_is_taken(machine: Machine) -> None:
    assert machine.run("--disk", "/dev/sdx").returncode == 0
    assert machine.calls("mount") == [f"mount -o noatime,nosuid,nodev /dev/sdx {machine.dir}"]


def test_others_than_root_ask_sudo_once_with_what_was_found(machine: Machine) -> None:
    machine.put("id", 'if [ "$1" = -u ]; then echo 1000; else echo 1001; fi')
    machine.put("sudo", "true")
    machine.disks(("nvme1n1", STORE))
    assert machine.run().returncode == 0
    (call,) = machine.calls("sudo")
    assert call == f"sudo -n bash {SCRIPT} --disk /dev/nvme1n1 --owner 1000:1001 {machine.dir}"
    assert machine.calls("mount") == []


@pytest.mark.parametrize(
    ("words", "text"),
    [(("--dsk", "x"), "no option --dsk"), (("a",), "one directory only"), (("--disk",), "")],
)
def test_wrong_flags_are_refused(machine: Machine, words: tuple[str, ...], text: str) -> None:
    done = machine.run(*words)
    assert done.returncode == 1
    assert text in done.stderr


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[str]:
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        pytest.skip(f"a loop device needs root and these programs: {', '.join(lacking) or 'root is missing'}")
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["umount", str(tmp_path / "kv")], capture_output=True, check=False)
    subprocess.run(["losetup", "--detach", device], check=True)


def test_one_disk_for_real(loop_device: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"

    def run() -> str:
        words = ["bash", SCRIPT, "--disk", loop_device, "--owner", "12345:54321", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run()
    assert os.path.ismount(folder)
    found = folder.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 54321, 0o700)
    (folder / "block").write_bytes(b"warm")
    run()
    subprocess.run(["umount", str(folder)], check=True)
    assert not (folder / "block").exists()
    run()
    assert (folder / "block").read_bytes() == b"warm"
    subprocess.run(["umount", str(folder)], check=True)
    subprocess.run(["mkswap", loop_device], capture_output=True, check=True)
    words = ["bash", SCRIPT, "--disk", loop_device, str(folder)]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "holds something else" in refused.stderr


def test_the_script_is_part_of_the_package() -> None:
    assert nvme_script().startswith("#!/usr/bin/env bash\n")
