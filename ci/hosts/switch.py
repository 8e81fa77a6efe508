"""The switch between the hosts of a bed, with loss, delay and a rate: netem's part, which not every kernel has.

    switch.py HOSTS LOSS_PERCENT DELAY_MS RATE_MBIT        on the interfaces port1, port2, ...; a rate of 0 is none

Frames are taken and given as the kernel has them, segments unsplit and checksums undone, so that 64 KiB are one frame.
With loss each segment is a frame, and is lost on its own. A port's frames leave in the order in which they came. As in
a real one a queue that is full, with BUFFER_S at the rate, loses what comes next. A cut link (`ip link set port2 down`)
loses everything.
"""

import contextlib
import ctypes
import heapq
import itertools
import random
import select
import socket
import sys
import time

SOL_PACKET, VNET_HEADER, IGNORE_OUTGOING = 263, 15, 23
HEADER = 10  # struct virtio_net_hdr: what to do about checksum and segments
ALL_PROTOCOLS = 3
BUFFER_S = 0.1
BUFFER = 1 << 26  # bytes that the kernel keeps for this program
LARGEST = 1 << 17
SEED = 20003


def port(number):
    """Return a socket that takes and gives a port's frames."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    opened.setsockopt(SOL_PACKET, VNET_HEADER, 1)
    opened.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    for buffer, forced in ((socket.SO_SNDBUF, 32), (socket.SO_RCVBUF, 33)):
        opened.setsockopt(socket.SOL_SOCKET, buffer, BUFFER)
        with contextlib.suppress(PermissionError):  # without root it is what the kernel allows everybody
            opened.setsockopt(socket.SOL_SOCKET, forced, BUFFER)
    opened.bind((f"port{number}", ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


def serve(ports, loss, delay_s, bytes_per_s):
    """Pass frames on for ever."""
    draw = random.Random(SEED)
    learnt = {}  # ports by hardware address
    free = dict.fromkeys(ports, 0.0)  # when a port has sent what it was given
    due, order = [], itertools.count()
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for source in select.select(ports, [], [], wait)[0]:
            with contextlib.suppress(OSError):  # the link went down
                frame = source.recv(LARGEST)
                if draw.random() < loss:
                    continue
                now = time.monotonic()
                target, learnt[frame[HEADER + 6 : HEADER + 12]] = learnt.get(frame[HEADER : HEADER + 6]), source
                if bytes_per_s:
                    if free[source] - now > BUFFER_S:
                        continue
                    free[source] = now = max(now, free[source]) + (len(frame) - HEADER) / bytes_per_s
                targets = [target] if target else [other for other in ports if other is not source]
                heapq.heappush(due, (now + delay_s, next(order), targets, frame))
        while due and due[0][0] <= time.monotonic():
            _, _, targets, frame = heapq.heappop(due)
            for target in targets:
                with contextlib.suppress(OSError):
                    target.send(frame)


def main(hosts, loss_percent, delay_ms, rate_mbit):
    """Open the ports and serve them."""
    PR_SET_TIMERSLACK = 29
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # a delay is what was asked for, not 50 us more
    ports = [port(number) for number in range(1, int(hosts) + 1)]
    serve(ports, float(loss_percent) / 100, float(delay_ms) / 1e3, float(rate_mbit) * 1e6 / 8)


if __name__ == "__main__":
    main(*sys.argv[1:])
