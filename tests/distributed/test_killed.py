"""Two ranks that are killed, whose disk is full or whose checkpoint is damaged go on bit for bit, or say why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.killed_training import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]


def test_ranks_that_are_killed_stopped_out_of_disk_or_damaged_go_on_bit_for_bit(tmp_path, pytestconfig) -> None:
    """A killed rank closes its connections; one that hangs is given up when a collective has waited long enough.

    One test, since workers would each train for themselves.
    """
    kills = pytestconfig.getoption("--kills")
    command = [sys.executable, "-m", "tests.distributed.killed_training", str(tmp_path), "--kills", str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["kills"] == kills and results["killed is whole"]
    for name in ("killed one", "stopped one"):
        assert results[f"{name} after"] < TIMEOUT.total_seconds() + 15  # to notice, to say it and to end
        assert "Error: " in results[f"{name} says"]
        assert results[f"{name} is whole"]
    assert "File too large" in results["full says"] and results["full is whole"]
    assert "step-0024 is damaged; delete it to continue" in results["damaged says"] and results["damaged is whole"]
