"""Whether host 2 can be reached, before its link is cut, while it is, and after it was mended, as one line of JSON."""

import json
import os
import socket
import subprocess
import time

ENTER = os.environ["HOSTS_ENTER"]


def reached():
    """Tell whether a datagram's reply comes; one that nobody listens for is answered by the host itself."""
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((os.environ["HOSTS_ADDRESSES"].split()[1], 9))
        datagrams.settimeout(0.2)
        for _ in range(25):
            try:
                datagrams.send(b".")
                datagrams.recv(1)
            except TimeoutError:
                continue
            except OSError as error:
                if isinstance(error, ConnectionRefusedError):
                    return True
                time.sleep(0.2)
    return False


def link(state):
    """Cut or mend the link of host 2."""
    subprocess.run([ENTER, "0", "ip", "link", "set", "port2", state], check=True)


found = [reached()]
link("down")
found.append(reached())
link("up")
found.append(reached())
print(json.dumps({"reached": found}))
