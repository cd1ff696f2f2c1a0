"""Two processes and nothing between them but ZeroMQ: the floor under everything built on it."""

import subprocess
import sys
import tempfile

import zmq
from measure import plan_of, repeat, times

BODY = b"x" * 64


def serve(address: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    while True:
        router.send_multipart(router.recv_multipart())


def main() -> None:
    plan = plan_of(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/pingpong"
        server = subprocess.Popen([sys.executable, __file__, "serve", address])
        try:
            dealer = zmq.Context().socket(zmq.DEALER)
            dealer.connect(address)

            def ping() -> None:
                dealer.send(BODY)
                dealer.recv()

            times("ping-pong", repeat(plan.calls, ping))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        main()
