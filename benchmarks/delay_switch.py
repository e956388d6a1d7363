"""The switch of an emulated cluster whose links have latency: it delivers every packet a fixed time after it was sent.

    node0 eth0 (tun) --read--> [ due time, packet ] --write at its due time--> node1 eth0 (tun)

Kernels without the netem queueing discipline cannot delay packets by themselves. Here each node's `eth0` is a TUN
device whose other end this process holds; rates stay those of `tc tbf` at the node's end. It ends when its standard
input is closed, so it never outlives the cluster.
"""

import argparse
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 65536
LAST_BYTE_OF_DESTINATION = 19


def open_device(namespace: str) -> int:
    """The other end of a namespace's `eth0`; this process is in that namespace afterwards."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    return device


def forward(devices: list[int], latency_s: float) -> None:
    """Moves packets until standard input is closed; node i has the address that ends in i + 1."""
    # All packets wait equally long, so the first one in is the first one out.
    waiting: deque[tuple[float, int, bytes]] = deque()
    stop = sys.stdin.fileno()
    while True:
        timeout_s = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        ready, _, _ = select.select([*devices, stop], [], [], timeout_s)
        if stop in ready:
            return
        due_s = time.monotonic() + latency_s
        for device in ready:
            try:
                while True:
                    packet = os.read(device, LARGEST_PACKET)
                    node = packet[LAST_BYTE_OF_DESTINATION] - 1
                    if packet[0] >> 4 == 4 and 0 <= node < len(devices):
                        waiting.append((due_s, node, packet))
            except BlockingIOError:
                continue
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, node, packet = waiting.popleft()
            with suppress(BlockingIOError):  # a full queue drops, as in any network; TCP sends again
                os.write(devices[node], packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, required=True, help="one way")
    parser.add_argument("namespaces", nargs="+")
    arguments = parser.parse_args()
    devices = [open_device(namespace) for namespace in arguments.namespaces]
    print("ready", flush=True)
    forward(devices, 1e-3 * arguments.latency_ms)


if __name__ == "__main__":
    main()
