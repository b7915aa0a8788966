"""The process of an engine that is ready at once, and reads weights while a file is there.

`READING` is that file.
"""

import os
import socket
import sys
import time
from pathlib import Path

from meshwright.run.serve.asked import Piece
from meshwright.run.serve.framing import Frames
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Call,
    Done,
    Ready,
    Start,
    framed,
    to_worker,
)

if __name__ == "__main__":
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(sys.argv[1])
    frames = Frames()
    while data := way.recv(1 << 16):
        for body in frames.add(data):
            message = to_worker.decode(body)
            if isinstance(message, Start):
                way.sendall(framed(Ready(64, 64, 256, [])))
            elif isinstance(message, Asked):
                way.sendall(framed(Answered([(message.number, Piece(finish="stop"))])))
            elif isinstance(message, Call):
                while Path(os.environ["READING"]).exists():
                    time.sleep(0.02)
                way.sendall(framed(Done(message.number)))
