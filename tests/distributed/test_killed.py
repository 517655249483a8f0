"""Two ranks that are killed, whose disk is full or whose checkpoint is damaged go on bit for bit, or say why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.killed_training import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kills(pytestconfig):
    return pytestconfig.getoption("--kills")


@pytest.fixture(scope="module")
def results(tmp_path_factory, kills):
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.distributed.killed_training", str(folder), "--kills", str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_killed_at_random_moments_go_on_bit_for_bit(results, kills):
    assert results["kills"] == kills and results["killed is whole"]


@pytest.mark.parametrize("name", ["killed one", "stopped one"])
def test_a_rank_that_is_left_alone_ends_with_an_error_in_time_and_the_run_goes_on_bit_for_bit(results, name):
    """A killed rank closes its connections; one that hangs is given up when a collective has waited long enough."""
    assert results[f"{name} after"] < TIMEOUT.total_seconds() + 15  # to notice, to say it and to end
    assert "Error: " in results[f"{name} says"]
    assert results[f"{name} is whole"]


def test_a_full_disk_is_said_and_the_run_goes_on_bit_for_bit(results):
    assert "File too large" in results["full says"] and results["full is whole"]


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_goes_on_bit_for_bit(results):
    assert "step-0024 is damaged; delete it to continue" in results["damaged says"] and results["damaged is whole"]
