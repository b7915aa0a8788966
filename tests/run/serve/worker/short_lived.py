"""The process of an engine that dies early: `DIES` says when."""

import os
import select
import signal
import socket
import sys
import time

if __name__ == "__main__":
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    way.connect(sys.argv[1])
    when = os.environ["DIES"]
    if when == "with its start unread":
        select.select([way], [], [])
    elif when == "some time after it was heard last":  # as where a machine is busy
        way.recv(1 << 20)
        way.close()
        time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
