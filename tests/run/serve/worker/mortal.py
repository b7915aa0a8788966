"""The process of an engine that is ready at once and sends a parcel; the next one never is ready.

`MORTAL` is a file that the first of them writes.
"""

import os
import socket
import sys
import time
from pathlib import Path

from meshwright.run.serve.frame_codec import FrameDecoder
from meshwright.run.serve.kv_transfer.transport import SharedMemoryKVSender
from meshwright.run.serve.worker.protocol import (
    EngineReady,
    StartEngine,
    encode_message,
    worker_message_decoder,
)

if __name__ == "__main__":
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(sys.argv[1])
    (body,) = FrameDecoder().feed(way.recv(1 << 16))
    start = worker_message_decoder.decode(body)
    assert isinstance(start, StartEngine)
    born = Path(os.environ["MORTAL"])
    if not born.exists():
        parcel = SharedMemoryKVSender(start.kv_transfer_folder).send(b"keys", blocks=1, first=0)
        born.write_text(parcel.address)
        way.sendall(encode_message(EngineReady(64, 64, 256, [])))
    time.sleep(600)
