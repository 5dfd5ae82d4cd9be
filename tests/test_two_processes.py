"""Training over two processes, joined by `jax.distributed` on this machine, against one device of one process."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

from tests import two_processes

SECONDS = 240  # for both processes, start to end


def test_two_processes_train_as_one_device_does():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.two_processes", str(rank), "2", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        printed = [p.communicate(timeout=SECONDS) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(err[-2000:] for _, err in printed)
    losses = json.loads(printed[0][0].splitlines()[-1])  # after what the collectives print
    np.testing.assert_allclose(losses, two_processes.on_one_device(), rtol=2e-5)
    assert losses[-1] < 0.9 * losses[0]
