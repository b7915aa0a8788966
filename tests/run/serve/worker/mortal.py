"""The process of an engine that is ready at once and sends a parcel; the next one never is ready.

`MORTAL` is a file that the first of them writes.
"""

import os
import socket
import sys
import time
from pathlib import Path

from meshwright.run.serve.framing import Frames
from meshwright.run.serve.parcels import SharedMemoryPost
from meshwright.run.serve.worker.frames import Ready, Start, framed, to_worker

if __name__ == "__main__":
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(sys.argv[1])
    (body,) = Frames().add(way.recv(1 << 16))
    start = to_worker.decode(body)
    assert isinstance(start, Start)
    born = Path(os.environ["MORTAL"])
    if not born.exists():
        parcel = SharedMemoryPost(start.parcels_at).send(b"keys", blocks=1, first=0)
        born.write_text(parcel.place)
        way.sendall(framed(Ready(64, 64, 256, [])))
    time.sleep(600)
