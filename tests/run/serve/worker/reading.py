"""The process of an engine that is ready at once, and reads weights while a file is there.

`READING` is that file.
"""

import os
import socket
import sys
import time
from pathlib import Path

from meshwright.run.serve.frame_codec import FrameDecoder
from meshwright.run.serve.request import RequestOutput
from meshwright.run.serve.worker.protocol import (
    AddRequest,
    EngineOutputs,
    EngineReady,
    StartEngine,
    UtilityCall,
    UtilityResult,
    encode_message,
    worker_message_decoder,
)

if __name__ == "__main__":
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(sys.argv[1])
    frames = FrameDecoder()
    while data := way.recv(1 << 16):
        for body in frames.feed(data):
            message = worker_message_decoder.decode(body)
            if isinstance(message, StartEngine):
                way.sendall(encode_message(EngineReady(64, 64, 256, [])))
            elif isinstance(message, AddRequest):
                way.sendall(
                    encode_message(
                        EngineOutputs([(message.request_id, RequestOutput(finish_reason="stop"))])
                    )
                )
            elif isinstance(message, UtilityCall):
                while Path(os.environ["READING"]).exists():
                    time.sleep(0.02)
                way.sendall(encode_message(UtilityResult(message.call_id)))
