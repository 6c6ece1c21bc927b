"""Many hosts on one machine, without a container engine: namespaces, a bridge, and nothing that stays.

    with Lab("demo") as lab:
        a = lab.boot("a")                                  # 10.77.0.10, ready in 0.1 s
        b = lab.boot("b", nvme_bytes=256 * MIB)            # with an own ext4 at /mnt/kv
        a.run("ray start --head --node-ip-address=10.77.0.10 --port=6379")
        port = lab.forward(a, 8000)                        # http://127.0.0.1:{port} on the real machine
        lab.cut(b); lab.mend(b)                            # its cable
        lab.part(a, b); lab.join(a, b)                     # only between these two
        b.slow(200)                                        # Mbit/s, both ways
        b.kill()                                           # power off: everything on it is gone

A host has its own addresses, processes, host name and `/etc`, `/root`, `/tmp`, `/run`, `/mnt`, `/dev/shm`
and `/var/log`; all else of the file system is the machine's (and writable: take care). Its `/root` is empty
but for the Python that runs the tests and Samovar's cache of models (a host's own writes to it are
private); login shells have this environment's `bin` in PATH. `/mnt/lab` is one directory on all hosts,
`Lab.shared` outside. Out of the lab leads a default route that answers "unreachable" at once, to name
servers, too: nothing on a host can reach the machine, other labs or the internet.

`Host.run` starts with a clean environment (PATH, HOME and a few), never with that of the tests.
`Host.processes("raylet")` are psutil's, to kill; `Host.file("/tmp/x")` is a host's file seen from outside.
Needs root, iproute2 and util-linux. When the tests end, however they do (SIGKILL too), the kernel ends the
hosts; the files of those that had no time to clean up are removed by the next `Lab`.
"""

from tests.infra.netlab.host import Host
from tests.infra.netlab.lab import Lab
from tests.infra.netlab.shell import LabError

__all__ = ["Host", "Lab", "LabError"]
